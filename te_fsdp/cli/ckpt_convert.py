"""``te-fsdp ckpt convert`` and ``export``: commands that write another checkpoint."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from te_fsdp.checkpoint.background import bytes_bar
from te_fsdp.checkpoint.portable.contents import Contents
from te_fsdp.checkpoint.portable.convert import (
    Transform,
    check_apart,
    open_any,
    transformed,
    weights_only,
    write_checkpoint,
    write_pt,
    write_safetensors,
)
from te_fsdp.checkpoint.portable.huggingface import (
    TeBlocks,
    TeNames,
    open_huggingface,
    values_for_huggingface,
    write_huggingface,
)
from te_fsdp.checkpoint.portable.state_dicts import Choices
from te_fsdp.cli.ckpt_show import check_good, show_bar
from te_fsdp.cli.output import human_bytes, print_json, print_lines, print_table

__all__ = ["Model", "Target", "UsageError", "choices", "convert", "export"]

_TORCH = (".pt", ".pth", ".bin", ".ckpt")


class UsageError(Exception):
    """The command line is wrong; exit code 2."""


@dataclass(frozen=True)
class Model:
    """The TransformerEngine model whose weights a Hugging Face model's are, or become."""

    layers: TeBlocks = field(default_factory=TeBlocks)
    names: TeNames = field(default_factory=TeNames)
    untie: bool = False
    """Give a head that the Hugging Face model ties to the embedding values of its own."""

    @property
    def is_described(self) -> bool:
        """Whether anything was said about it."""
        return self != Model()


@dataclass
class Target:
    """Where to write.

    Attributes:
        path: The file or directory.
        kind: ``"checkpoint"``, ``"safetensors"``, ``"torch"``; ``None``: told by the suffix.
        shard_bytes: Largest safetensors file.
        force: Replace what lies there.
        like: A Hugging Face model's folder that the target shall be like.
    """

    path: Path
    kind: str | None
    shard_bytes: int
    force: bool
    like: Path | None = None

    def settle(self, default: str | None) -> str:
        """The kind, by the suffix where it was not given, else ``default``.

        Raises:
            UsageError: Neither tells, or the two contradict each other.
        """
        suffix = self.path.suffix
        told = "safetensors" if suffix == ".safetensors" else "torch" if suffix in _TORCH else None
        if self.like is not None and told is not None:
            raise UsageError(f"{self.path}: --like makes a folder, not a file {suffix}")
        if self.kind is not None and told is not None and self.kind != told:
            raise UsageError(f"{self.path}: --to {self.kind} contradicts the suffix {suffix}")
        self.kind = self.kind or told or default
        if self.kind is None:
            raise UsageError(f"{self.path}: say what it shall be with --to checkpoint, safetensors or torch")
        return self.kind


def choices(key: str | None, optimizer_class: str | None, extra_state: str) -> Choices:
    """What a reader cannot know, from the command line."""
    return Choices(key, optimizer_class, extra_state)


def convert(
    source: Path,
    target: Target,
    chosen: Choices,
    *,
    everything: bool,
    dtype: str | None,
    quantized: str | None,
    checksums: bool,
    as_json: bool,
    model: Model | None = None,
) -> int:
    """Convert a checkpoint, or a Hugging Face model onto ``model``; 0."""
    kind = target.settle(None)
    if model is None:
        contents = open_any(source, chosen)
    else:
        contents = open_huggingface(source, model.layers, model.names, untie=model.untie)
    _check(contents, target, checksums, as_json)
    dequantize = (quantized or ("keep" if kind == "checkpoint" else "dequantize")) == "dequantize"
    into, sources = transformed(contents, Transform(_dtype(dtype), dequantize))
    if kind != "checkpoint" and not everything:
        into = weights_only(into)
    files = _write(target, into, everything=everything, as_json=as_json)
    _report(contents, into, target, files, sources, as_json=as_json, table=False)
    return 0


def export(
    source: Path,
    target: Target,
    *,
    dtype: str,
    weights: str,
    checksums: bool,
    as_json: bool,
    model: Model | None = None,
) -> int:
    """Write weights for inference, those of ``model`` as a Hugging Face model like ``target.like``; 0."""
    target.settle("safetensors")
    contents = open_any(source, Choices())
    _check(contents, target, checksums, as_json)
    into, sources = transformed(contents, Transform(_dtype(dtype), True, weights))
    into = weights_only(into)
    files = _write(target, into, everything=False, as_json=as_json, model=model)
    _report(contents, into, target, files, sources, as_json=as_json, table=True)
    return 0


def _dtype(name: str | None) -> torch.dtype | None:
    return None if name is None else getattr(torch, name)


def _check(contents: Contents, target: Target, checksums: bool, as_json: bool) -> None:
    """The target lies apart from what is read, and a checkpoint's files are good, lest a copy give damage new sums."""
    for source in (contents.source, target.like):
        if source is not None:
            check_apart(source, target.path)
    if checksums:
        check_good(contents, as_json)


def _write(
    target: Target, contents: Contents, *, everything: bool, as_json: bool, model: Model | None = None
) -> list[str]:
    text = f"writing {target.path.name}"
    with bytes_bar(text, contents.bytes, show_bar(as_json)) as tick:
        if target.like is not None:
            size, place = target.shard_bytes, target.path
            te = model or Model()
            values = values_for_huggingface(contents, target.like, te.layers, te.names)
            return write_huggingface(place, values, target.like, tick, shard_bytes=size, force=target.force)
        if target.kind == "checkpoint":
            return write_checkpoint(target.path, contents, tick, force=target.force)
        if target.kind == "safetensors":
            return write_safetensors(
                target.path, contents, tick, shard_bytes=target.shard_bytes, force=target.force
            )
        return write_pt(target.path, contents, tick, everything=everything, force=target.force)


def _report(
    source: Contents,
    written: Contents,
    target: Target,
    files: list[str],
    sources: dict[str, str],
    *,
    as_json: bool,
    table: bool,
) -> None:
    dtypes = {
        n: (written.manifest.parameters.get(n) or written.manifest.buffers[n])["dtype"] for n in sources
    }
    counts = Counter(sources.values())
    if as_json:
        tensors: list[dict[str, Any]] = [
            {"name": name, "from": origin, "dtype": dtypes[name]} for name, origin in sources.items()
        ]
        answer = {"ok": True, "source": str(source.source), "target": str(target.path), "kind": target.kind}
        answer |= {"files": files, "bytes": written.bytes, "tensors": tensors, "notes": written.notes}
        print_json(answer)
        return
    if table:
        rows = [(name, origin, dtypes[name]) for name, origin in sources.items()]
        print_table("weights", ("name", "from", "dtype"), rows)
    print_lines([f"{source.source} ({source.kind}) -> {target.path} ({target.kind})"])
    print_lines([f"weights and buffers: {', '.join(f'{n} {origin}' for origin, n in counts.items())}"])
    print_lines(f"note: {note}" for note in written.notes)
    print_lines([f"{len(files)} files, {human_bytes(written.bytes)}"])
