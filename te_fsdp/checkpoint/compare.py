"""Differences between a checkpoint and a model with its optimizer, all of them, before anything is read."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from te_fsdp.checkpoint.collective import gather
from te_fsdp.checkpoint.manifest import Manifest
from te_fsdp.checkpoint.model_state import ModelState, dtype_name, shorten
from te_fsdp.checkpoint.planner import read_metadata
from te_fsdp.errors import CheckpointError, message

__all__ = ["Differences", "check_metadata", "compare_model"]

#: Aspects of a parameter that must be equal, in the order in which they are looked at.
_ASPECTS = ("shape", "layout", "format", "components", "dtype")


@dataclass
class Differences:
    """What does not fit.

    Attributes:
        tensors: Kind of difference -> tensor name -> detail (may be empty).
        optimizer: Differences of the optimizer, in words.
    """

    tensors: dict[str, dict[str, str]] = field(default_factory=dict)
    optimizer: list[str] = field(default_factory=list)

    def add(self, kind: str, name: str, detail: str = "") -> None:
        """Note one tensor."""
        self.tensors.setdefault(kind, {})[name] = detail

    def names(self) -> set[str]:
        """Tensors that differ."""
        return {name for named in self.tensors.values() for name in named}

    def over_all_ranks(self) -> Differences:
        """The union over ranks, the same on all. Collective over the world."""
        union = Differences()
        for other in gather(self):
            for kind, named in other.tensors.items():
                union.tensors.setdefault(kind, {}).update(named)
            union.optimizer += [text for text in other.optimizer if text not in union.optimizer]
        return union

    def texts(self) -> list[str]:
        """One text per kind, with the number of tensors and the first few names."""
        lines = []
        for kind, named in self.tensors.items():
            shown = [f"{name}{': ' if detail else ''}{detail}" for name, detail in named.items()]
            lines.append(f"{len(named)} {kind} ({shorten(shown, 3)})")
        return lines + self.optimizer

    def __bool__(self) -> bool:
        return bool(self.tensors or self.optimizer)


def compare_model(manifest: Manifest, state: ModelState) -> Differences:
    """Differences in parameters and buffers. Local operation."""
    found = Differences()
    saved = {**manifest.parameters, **manifest.buffers}
    here: dict[str, dict[str, Any]] = {**state.described, **state.buffers}
    for name in here.keys() - saved.keys():
        found.add("missing in the checkpoint", name)
    for name in saved.keys() - here.keys():
        found.add("only in the checkpoint", name)
    for name, now in here.items():
        then = saved.get(name)
        if then is None:
            continue
        for aspect in _ASPECTS:
            old, new = then.get(aspect), now.get(aspect)
            # A model that was never bound does not know its layouts; the files hold the same rows either way.
            if old != new and not (aspect == "layout" and None in (old, new)):
                found.add(f"with another {aspect}", name, f"saved {_text(old)}, model has {_text(new)}")
                break
    for kind, named in found.tensors.items():
        found.tensors[kind] = dict(sorted(named.items()))
    return found


def _text(value: Any) -> str:
    if value is None:
        return "high precision"
    return str(tuple(value)) if isinstance(value, list) else str(value)


def check_metadata(source: Path, manifest: Manifest) -> None:
    """Every tensor that the manifest lists is in DCP's metadata, with its shape and dtype. Local operation.

    Raises:
        CheckpointError: The two disagree: the directory was put together from several, or damaged.
    """
    have = read_metadata(source)
    wrong = []
    for key, shape, dtype in _stored(manifest):
        saved = have.get(key)
        if saved is None:
            wrong.append(f"{key} is missing")
        elif shape is not None and (saved[0] != tuple(shape) or dtype_name(saved[1]) != dtype):
            wrong.append(f"{key} is {saved[0]} {dtype_name(saved[1])} instead of {tuple(shape)} {dtype}")
    if wrong:
        raise CheckpointError(
            message(
                f"{source}: damaged checkpoint: {shorten(wrong)}",
                why="Its manifest and its tensors are not of one save",
                fix="load an earlier checkpoint, or copy this one again",
            )
        )


def _stored(manifest: Manifest) -> Iterator[tuple[str, list[int] | None, str | None]]:
    """Key, shape and dtype of the tensors that a manifest lists; no shape for components."""
    for name, described in {**manifest.parameters, **manifest.buffers}.items():
        if described.get("format") is not None:
            yield from ((f"model.{name}:{part}", None, None) for part in described["components"])
        elif math.prod(described["shape"]):
            yield f"model.{name}", described["shape"], described["dtype"]
    for name in manifest.delayed:
        parts = [
            f"{key}.{tensor}"
            for key in ("scaling_fwd", "scaling_bwd")
            for tensor in ("scale", "amax_history")
        ]
        yield from ((f"delayed.{name}:{part}", None, None) for part in parts)
    for name, states in (manifest.optimizer or {"state": {}})["state"].items():
        for key, described in states.items():
            if "dtype" in described and math.prod(described["shape"]):
                yield f"optimizer.state.{name}.{key}", described["shape"], described["dtype"]
