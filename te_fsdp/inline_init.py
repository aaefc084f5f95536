"""Detection of initialization that constructors ran inline on meta, where it had no effect."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from types import CodeType, FunctionType
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from te_fsdp.errors import InitError, shorten
from te_fsdp.records import binding_of, get_or_create_record, get_record, param_owners
from te_fsdp.upstream import torch_dtensor as _torch

_log = logging.getLogger("te_fsdp")

#: Packages whose modules are initialized by ``reset_parameters``.
STOCK = ("torch", "transformer_engine", "te_fsdp")
#: Tensor methods with a trailing underscore that write no values.
_NO_VALUES = ("requires_grad_", "share_memory_", "rename_", "detach_", "resize_")
#: Depth of calls that are followed from a constructor.
_DEPTH = 4
_FIX = (
    "move the code to init_weights(self) of the model or reset_parameters(self) of the module, and call that in the "
    "constructor: materialize runs both. Or load a checkpoint in place of materialize"
)


# [Note: writes on meta] ``nn.init.normal_(self.proj.weight)`` in ``__init__`` writes nothing on meta, and nothing
# records the call. On meta, torch also counts in-place writes to each tensor. ``materialize`` counts the writes that
# it repeats: those of each ``reset_parameters``, and of the model's own initialization. A parameter with further
# writes would get values that differ from the constructor's.
def record_writes(model: nn.Module) -> None:
    """Record how often each parameter on meta was written to, before parameters are replaced. Local operation."""
    for owner in param_owners(model):
        parameter = owner.parameter
        if not parameter.is_meta or isinstance(parameter, DTensor) or binding_of(owner.module) is not None:
            continue
        if version := _torch.version_of(parameter):
            record = get_or_create_record(parameter)
            record.writes = max(record.writes, version)


def count_rewrites(parameter: torch.Tensor, writes: int | None) -> None:
    """Add writes that ``materialize`` has repeated on a parameter; ``None`` if all values are set by other means."""
    record = get_record(parameter)
    if record is not None and writes is None:
        record.writes = 0
    elif record is not None and writes is not None:
        record.rewrites += (writes,)


def refuse_lost_writes(model: nn.Module, contained: Iterable[Callable[[str], bool]]) -> None:
    """Raise InitError if a constructor's writes were not repeated. Local operation; clears the counts.

    ``contained``: for each initialization of the model's own, whether it contains the module of a name.
    """
    lost = []
    for owner in param_owners(model):
        record = get_record(owner.parameter)
        if record is None or not record.writes:
            continue
        writes, repeated = record.writes, record.rewrites  # of a tied parameter: one count for each owner
        record.writes, record.rewrites = 0, ()
        # A repeated reset_parameters only draws again, which does not change the distribution.
        is_multiple = any(count and writes % count == 0 for count in repeated)
        parts = owner.path.split(".") if owner.path else []
        around = (model.get_submodule(".".join(parts[:end])) for end in range(len(parts) + 1))
        writes_inline = any(_in_place_calls(type(module)) for module in around)
        if writes not in repeated and (not is_multiple or writes_inline):
            lost.append(owner.label)
    if lost:
        raise InitError(
            f"materialize: {shorten(lost, 3)}: initialized by code that ran on meta, in a constructor or after it",
            expected="initialization in reset_parameters or init_weights, which materialize can run",
            got=f"{len(lost)} parameter(s) with in-place writes that had no effect",
            why="They would get the values of reset_parameters instead of the constructor's",
            fix=_FIX,
        )
    # Writes through ``parameter.data`` are not counted. For these there is a warning, from the constructors' code.
    contained = list(contained)
    calls_of = {}
    for name, module in model.named_modules():
        if type(module) not in calls_of and not any(contains(name) for contains in contained):
            calls = _in_place_calls(type(module))
            calls_of[type(module)] = calls if "data" in calls else set()
    for cls, calls in calls_of.items():
        if calls:
            _log.warning(
                "materialize: the constructor of %s may have written to .data of parameters on meta (%s), which had no "
                "effect. To keep these values, %s.",
                cls.__name__.removeprefix("FSDP"),
                ", ".join(sorted(calls - {"data"})),
                _FIX,
            )


def _in_place_calls(cls: type) -> set[str]:
    """Return names of in-place operations in the constructors of a class, and "data" if they use that."""
    names = set()
    # Bases too: their constructors run on meta like the class's own.
    for base in cls.__mro__:
        constructor = vars(base).get("__init__")
        if isinstance(constructor, FunctionType) and str(base.__module__).partition(".")[0] not in STOCK:
            names |= {name for code in _reachable_code(cls, constructor, set()) for name in code.co_names}
    calls = {
        name
        for name in names
        if name.endswith("_") and not name.startswith("_") and name not in _NO_VALUES
        if hasattr(torch.nn.init, name) or hasattr(torch.Tensor, name)
    }
    return calls | ({"data"} & names) if calls else set()


def _reachable_code(cls: type, function: Any, seen: set[CodeType], depth: int = 0) -> Iterator[CodeType]:
    """Yield the code of a function, of functions in it, and of those of the user's that it names."""
    # Without ``reset_parameters`` and the functions that it calls, because ``materialize`` runs it.
    pending = [function.__code__]
    while pending:
        code = pending.pop()
        if code in seen:
            continue
        seen.add(code)
        yield code
        pending += [constant for constant in code.co_consts if isinstance(constant, CodeType)]
        for name in code.co_names if depth < _DEPTH else ():
            called = getattr(cls, name, None) or function.__globals__.get(name)
            is_own = (
                isinstance(called, FunctionType) and str(called.__module__).partition(".")[0] not in STOCK
            )
            if is_own and name not in ("reset_parameters", "_reset_parameters"):
                yield from _reachable_code(cls, called, seen, depth + 1)
