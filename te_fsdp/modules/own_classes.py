"""What modules of a user's own classes hold beside tensors and modules: recorded, and compared with care.

Only the user knows whether an attribute is a part of what a module computes. So another function is asked for, and
another value is noted. Ranks may hold other values, as their number: the first one's are in the file.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from te_fsdp import _te, _torch
from te_fsdp.modules.callables import is_told
from te_fsdp.modules.semantics import (
    OWN,
    UNKNOWN,
    Difference,
    Semantics,
    known_kind,
    plain,
    same,
    semantics_of,
    to_json,
)

if TYPE_CHECKING:
    from torch import nn

#: Modules of Python whose classes are nobody's own.
_LIBRARIES = ("torch.", "transformer_engine.", "te_fsdp.", "builtins")
#: The longest value that is recorded, in characters.
_LONGEST = 200
_FUNCTION = "function "


def own_settings(model: nn.Module) -> dict[str, Semantics]:
    """Public attributes of modules of a user's own classes, by name; functions in words. Local operation."""
    found = {}
    for prefix, module in model.named_modules():
        cls = type(module)
        own = next((base for base in cls.__mro__ if not base.__module__.startswith(_LIBRARIES)), None)
        if own is None or known_kind(cls) is not None:
            continue
        values = {name: _told(cls, name, value) for name, value in vars(module).items()}
        settings = {name: value for name, value in values.items() if value is not UNKNOWN}
        if settings:
            found[_torch.without_wrappers(prefix)] = Semantics(own.__name__, OWN, settings)
    return found


def _told(cls: type, name: str, value: Any) -> Any:
    """An attribute's plain value; unknown what is torch's, not public, or hides a method, as wrappers do."""
    if name.startswith("_") or name == "training" or (callable(value) and hasattr(cls, name)):
        return UNKNOWN
    found = plain(value)
    if callable(value) and found is not UNKNOWN and is_told(found):
        found = f"{_FUNCTION}{found}"
    return found if len(repr(found)) <= _LONGEST else UNKNOWN


def record(model: nn.Module) -> dict[str, Any]:
    """A model's semantics for a manifest, and the recipes under which it has run. Local operation."""
    return {"recipes": _te.recipes_in_use(model), **to_json(semantics_of(model) | own_settings(model))}


def own_differences(saved: Mapping[str, Semantics], here: Mapping[str, Semantics]) -> list[Difference]:
    """What differs between attributes that modules of both models have. Local operation."""
    found = []
    for name in sorted(saved.keys() & here.keys()):
        then, now = saved[name].settings, here[name].settings
        for setting in sorted(then.keys() & now.keys()):
            pair = then[setting], now[setting]
            if not same(*pair):
                asks = all(isinstance(value, str) and value.startswith(_FUNCTION) for value in pair)
                label = f"{name}.{setting}".lstrip(".")
                found.append(Difference(label, *pair, "strict" if asks else "note"))
    return found
