"""Differences between a checkpoint and a model with its optimizer, all of them, before anything is read."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

import torch

from te_fsdp import _te
from te_fsdp.agree import gather_if_any
from te_fsdp.checkpoint.entries import GROUPED
from te_fsdp.checkpoint.manifest import Manifest
from te_fsdp.checkpoint.model_state import ModelState
from te_fsdp.errors import shorten
from te_fsdp.modules.semantics import Difference, deciding, differences, from_json, in_words, semantics_of

if TYPE_CHECKING:
    from torch import nn

__all__ = ["GROUPS", "SETTINGS", "WHOLE_OPTIMIZER", "Differences", "compare_model", "compare_semantics"]

#: Name in ``Differences.settings`` of all settings, where a checkpoint has none.
SETTINGS = "settings"
#: Stand in ``Differences.optimizer`` for all of an optimizer, and for its groups' options and membership.
WHOLE_OPTIMIZER, GROUPS = "optimizer", "optimizer.param_groups"


@dataclass
class Differences:
    """What does not fit, and what fits after a conversion.

    Attributes:
        tensors: Kind of difference -> tensor or module name -> detail (may be empty).
        optimizer: Difference of the optimizer, in words -> parameters concerned, :data:`WHOLE_OPTIMIZER` or
            :data:`GROUPS`, without details.
        converted: Tensor -> how it is converted, for example ``"float32 -> mxfp8 kFloat8E4M3"``.
        settings: Of modules, by name (``<module>.<setting>``), harmless ones included.
    """

    tensors: dict[str, dict[str, str]] = field(default_factory=dict)
    optimizer: dict[str, dict[str, str]] = field(default_factory=dict)
    converted: dict[str, str] = field(default_factory=dict)
    settings: dict[str, Difference] = field(default_factory=dict)

    def add(self, kind: str, name: str, detail: str = "") -> None:
        """Note one tensor."""
        self.tensors.setdefault(kind, {})[name] = detail

    def add_optimizer(self, text: str, name: str = WHOLE_OPTIMIZER) -> None:
        """Note one parameter of the optimizer, or all of it."""
        self.optimizer.setdefault(text, {})[name] = ""

    def refuse_conversions(self) -> None:
        """Count what would be converted as a difference."""
        for name, how in self.converted.items():
            self.add("that would be converted", name, how)
        self.converted = {}

    def names(self) -> set[str]:
        """Tensors that differ."""
        return {name for named in self.tensors.values() for name in named}

    def optimizer_names(self) -> set[str]:
        """Parameters whose optimizer state differs; ``"optimizer"`` among them means all."""
        return {name for named in self.optimizer.values() for name in named}

    def without(self, allow: Iterable[str], *, strict: bool = True) -> Differences:
        """Those that no pattern of ``allow`` names; without ``strict`` only settings that change the function."""
        patterns = list(allow)

        def is_open(*names: str, always: bool = False) -> bool:
            known = any(fnmatchcase(name, pattern) for name in names for pattern in patterns)
            return (strict or always) and not known

        left = Differences()
        for name, setting in self.settings.items():
            if setting.effect != "note" and is_open(name, f".{name}", always=setting.effect == "error"):
                left.settings[name] = setting
        for kind, name, detail in _each(self.tensors):
            if is_open(name):
                left.add(kind, name, detail)
        for text, name, _ in _each(self.optimizer):
            if is_open(name, f"optimizer.state.{name}", WHOLE_OPTIMIZER):
                left.add_optimizer(text, name)
        return left

    def over_all_ranks(self) -> Differences:
        """The union over ranks, the same on all. Collective over the world."""
        union = Differences()
        mine = (self.tensors, self.optimizer, self.converted, self.settings)
        held = (
            [self] if any(mine) else []
        )  # a list, since differences that are allowed make this object false
        for other in itertools.chain.from_iterable(gather_if_any(held)):
            for kind, name, detail in _each(other.tensors):
                union.add(kind, name, detail)
            for text, name, _ in _each(other.optimizer):
                union.add_optimizer(text, name)
            union.converted.update(other.converted)
            union.settings.update(other.settings)
        return union

    def left(self) -> dict[str, str]:
        """Everything that differs, by name, with the reason in words."""
        reasons = {name: [str(one)] for name, one in self.settings.items() if one.effect != "note"}
        for kind, name, detail in _each(self.tensors):
            reasons.setdefault(name, []).append(f"{kind}{': ' if detail else ''}{detail}")
        for text, name, _ in _each(self.optimizer):
            key = name if name in (WHOLE_OPTIMIZER, GROUPS) else f"optimizer.state.{name}"
            reasons.setdefault(key, []).append(text)
        return {name: "; ".join(texts) for name, texts in sorted(reasons.items())}

    def texts(self) -> list[str]:
        """One text per kind, with the number of tensors and the first few names."""
        lines = []
        for kind, named in self.tensors.items():
            shown = [f"{name}{': ' if detail else ''}{detail}" for name, detail in named.items()]
            lines.append(f"{len(named)} {kind} ({shorten(shown, 3)})")
        for text, names in self.optimizer.items():
            shown = [name for name in names if name not in (WHOLE_OPTIMIZER, GROUPS)]
            lines.append(f"{text} ({shorten(sorted(shown))})" if shown else text)
        return lines + in_words(one for one in self.settings.values() if one.effect != "note")

    def harmless(self) -> list[str]:
        """Settings that differ, but not in what the weights compute when the model is evaluated."""
        return in_words(one for one in self.settings.values() if one.effect == "note")

    def __bool__(self) -> bool:
        return bool(self.tensors or self.optimizer or self.settings)


def _each(found: dict[str, dict[str, str]]) -> Iterator[tuple[str, str, str]]:
    """Kind, name and detail of each difference."""
    return ((kind, name, detail) for kind, named in found.items() for name, detail in named.items())


def compare_model(manifest: Manifest, state: ModelState) -> Differences:
    """Differences in parameters and buffers. Local operation."""
    found = Differences()
    saved = {**manifest.parameters, **manifest.buffers}
    here: dict[str, dict[str, Any]] = {**state.described, **state.buffers}
    for name in sorted(here.keys() - saved.keys()):
        found.add("missing in the checkpoint", name)
    for name in sorted(saved.keys() - here.keys()):
        found.add("only in the checkpoint", name)
    for name in sorted(here.keys() & saved.keys()):
        then, now = saved[name], here[name]
        # Converted files and foreign modules may not know their layouts.
        layouts = then.get("layout"), now.get("layout")
        if then["shape"] != now["shape"]:
            found.add("with another shape", name, _saved_and_here(_shape(then), _shape(now)))
        elif layouts[0] != layouts[1] and None not in layouts:
            found.add("with another layout", name, _saved_and_here(*layouts))
        else:
            _compare_contents(found, name, then, now, name in state.cut_blocks)
    return found


def compare_semantics(found: Differences, manifest: Manifest, model: nn.Module, state: ModelState) -> None:
    """Differences in what modules compute beside their weights, or that nobody recorded that. Local operation."""
    here, recorded = semantics_of(model), manifest.semantics
    if not recorded or not recorded["modules"]:
        # An older te_fsdp could have recorded TE's settings, and did not; in files of other kinds they never are.
        asks = not recorded and deciding({name: one for name, one in here.items() if one.library == "te"})
        values = deciding(here)
        if values:
            found.settings[SETTINGS] = Difference(SETTINGS, "none", values, "strict" if asks else "note")
        return
    alone = {*manifest.parameters, *manifest.buffers} ^ {*state.described, *state.buffers}
    for one in differences(from_json(recorded), here, alone):
        found.settings[one.name] = one
    recipes = recorded.get("recipes"), _te.recipes_in_use(model)
    if all(recipes) and recipes[0] != recipes[1]:
        found.settings["recipes"] = Difference("recipes", *recipes, "note")


def _compare_contents(
    found: Differences, name: str, then: dict[str, Any], now: dict[str, Any], cuts_blocks: bool
) -> None:
    """Format, components and dtype of one tensor: equal, convertible, or neither."""
    formats = then.get("format"), now.get("format")
    if formats == (None, None):
        if then["dtype"] == now["dtype"]:
            return
        if not (_is_real(then["dtype"]) and _is_real(now["dtype"])):
            found.add("with another dtype", name, _saved_and_here(then["dtype"], now["dtype"]))
        else:
            found.converted[name] = f"{then['dtype']} -> {now['dtype']}"
        return
    lacks = set(now.get("components", ())) - set(then.get("components", ()))
    if formats[0] == formats[1] and not lacks and not cuts_blocks:
        return
    if any(described["format"] is None and not _is_real(described["dtype"]) for described in (then, now)):
        found.add("with another format", name, _saved_and_here(*formats))
        return
    old, new = (d.get("format") or d["dtype"] for d in (then, now))
    why = ""
    if formats[0] == formats[1]:
        why = f" ({', '.join(sorted(lacks))} not saved)" if lacks else " (this mesh cuts through blocks)"
    found.converted[name] = f"{old} -> {new}{why}"


def _is_real(dtype: str) -> bool:
    return getattr(torch, dtype).is_floating_point


def _saved_and_here(old: Any, new: Any) -> str:
    return f"saved {_text(old)}, model has {_text(new)}"


def _shape(described: dict[str, Any]) -> str:
    shape = tuple(described["shape"])
    return f"{shape} of {shape[0]} experts" if described.get("layout") == GROUPED and shape else str(shape)


def _text(value: Any) -> str:
    if value is None:
        return "high precision"
    return str(tuple(value)) if isinstance(value, list) else str(value)
