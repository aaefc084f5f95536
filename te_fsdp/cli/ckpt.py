"""``te-fsdp ckpt``: its commands, and what goes wrong as text and exit code.

Here are those that write another checkpoint, ``convert`` and ``export``.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import tyro
from tyro.conf import Positional, arg

from te_fsdp.checkpoint.background import bytes_bar
from te_fsdp.checkpoint.contents import DCP_KIND, Choices, Contents
from te_fsdp.checkpoint.paths import place_of
from te_fsdp.checkpoint.portable.convert import (
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
from te_fsdp.cli import ckpt_show
from te_fsdp.cli.ckpt_show import Json, Key, check_good, show_bar
from te_fsdp.cli.main import (
    UsageError,
    bytes_of,
    fail,
    human_bytes,
    print_json,
    print_lines,
    print_table,
    run,
)

_Force = Annotated[bool, arg(help="Replace what lies at the target; it stays until the new one is whole.")]
_Size = Annotated[
    str, arg(help="Largest safetensors file, such as 5GB or 500MiB; more go into shards with an index.")
]
_Optimizer = Annotated[
    str | None, arg(help="Class of the optimizer in a torch.save file, if its options do not tell it.")
]
_ExtraState = Annotated[
    Literal["read", "drop"],
    arg(help="TransformerEngine's _extra_state: read its delayed-scaling state, or drop it."),
]
_DType = Literal["float32", "bfloat16", "float16"]
_SHARD = "5GB"
#: Kinds of sources in which a model's state dict is one of several.
_NESTED = ("torch.save", DCP_KIND)
_TORCH = (".pt", ".pth", ".bin", ".ckpt")


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


_AS_USUAL = Model()


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
        if self.kind in ("checkpoint", "torch") and self.shard_bytes != _bytes(_SHARD):
            raise UsageError(
                f"{self.path}: --max-shard-size is for safetensors, not for a {self.kind} target"
            )
        if self.kind is None:
            raise UsageError(f"{self.path}: say what it shall be with --to checkpoint, safetensors or torch")
        return self.kind


def convert(
    source: Positional[Path],
    target: Positional[Path],
    /,
    *,
    to: Annotated[
        Literal["checkpoint", "safetensors", "torch"] | None,
        arg(help="Kind of the target; told by .safetensors, .pt, .pth, .bin or .ckpt."),
    ] = None,
    everything: Annotated[
        bool,
        arg(help="Optimizer, extra and delayed-scaling state into safetensors and torch.save files too."),
    ] = False,
    dtype: Annotated[_DType | None, arg(help="Of floating-point parameters in high precision.")] = None,
    quantized: Annotated[
        Literal["keep", "dequantize"] | None,
        arg(help="Quantized weights: keep their components (default into a checkpoint) or dequantize."),
    ] = None,
    max_shard_size: _Size = _SHARD,
    key: Key = None,
    optimizer_class: _Optimizer = None,
    extra_state: _ExtraState = "read",
    check: Annotated[
        Literal["checksums", "sizes"], arg(help="What of a source checkpoint's files is compared before.")
    ] = "checksums",
    from_: Annotated[
        Literal["huggingface"] | None,
        arg(name="from", help="The source is a Hugging Face model's folder, for a model as --te says."),
    ] = None,
    te: Model = _AS_USUAL,
    force: _Force = False,
    as_json: Json = False,
) -> int:
    """Convert between checkpoints of te_fsdp, safetensors, torch.save files and, as sources, plain DCP directories.

    Canonical names and rows: what the unsharded module's state_dict() holds. --from huggingface: the weights of a
    Hugging Face model onto the names of one built of te.TransformerLayer.
    """
    if from_ is None and te.is_described:
        raise UsageError("--te... describes the model for --from huggingface, which is not given")
    place = Target(place_of(target), to, _bytes(max_shard_size), force)
    kind = place.settle(None)
    if from_ is None:
        contents = open_any(source, Choices(key, optimizer_class, extra_state))
    else:
        contents = open_huggingface(source, te.layers, te.names, untie=te.untie)
    if contents.kind not in _NESTED and (key is not None or optimizer_class is not None):
        option = "--key" if key is not None else "--optimizer-class"
        raise UsageError(f"{source}: {option} is for {' or '.join(_NESTED)}, not for a {contents.kind}")
    _check(contents, place, check, as_json)
    dequantize = (quantized or ("keep" if kind == "checkpoint" else "dequantize")) == "dequantize"
    into, sources = transformed(contents, dtype=_dtype(dtype), dequantize=dequantize)
    if kind != "checkpoint" and not everything:
        into = weights_only(into)
    files = _write(place, into, everything=everything, as_json=as_json)
    _report(contents, into, place, files, sources, as_json=as_json, table=False)
    return 0


def export(
    source: Positional[Path],
    target: Positional[Path],
    /,
    *,
    dtype: Annotated[
        _DType, arg(help="Of floating-point parameters; buffers stay as they are.")
    ] = "bfloat16",
    weights: Annotated[
        Literal["auto", "main", "compute"],
        arg(help="The optimizer's main weights where there are any (auto, main) or never (compute)."),
    ] = "auto",
    max_shard_size: _Size = _SHARD,
    check: Annotated[
        Literal["checksums", "sizes"], arg(help="What of a source checkpoint's files is compared before.")
    ] = "checksums",
    like: Annotated[
        Path | None,
        arg(help="Write a Hugging Face model's folder: names, config.json and tokenizer as in this one."),
    ] = None,
    te: Model = _AS_USUAL,
    force: _Force = False,
    as_json: Json = False,
) -> int:
    """Write consolidated weights in one dtype, for inference: from main weights, else dequantized, and say which.

    A folder of safetensors, a .safetensors file, or a torch.save file (.pt, .pth, .bin, .ckpt). --like: a Hugging
    Face model.
    """
    if like is None and te.is_described:
        raise UsageError("--te... describes the model whose weights --like makes a Hugging Face model's")
    place = Target(place_of(target), None, _bytes(max_shard_size), force, like)
    place.settle("safetensors")
    contents = open_any(source)
    _check(contents, place, check, as_json)
    into, sources = transformed(contents, dtype=_dtype(dtype), dequantize=True, weights=weights)
    into = weights_only(into)
    files = _write(place, into, everything=False, as_json=as_json, model=te)
    _report(contents, into, place, files, sources, as_json=as_json, table=True)
    return 0


def _bytes(text: str) -> int:
    found = bytes_of(text)
    if not found:
        raise UsageError(f"--max-shard-size {text}: expected a size such as 5GB or 500MiB")
    return found


def _dtype(name: str | None) -> torch.dtype | None:
    return None if name is None else getattr(torch, name)


def _check(contents: Contents, target: Target, check: str, as_json: bool) -> None:
    """The target lies apart from what is read, and a checkpoint's files are good, lest a copy give damage new sums."""
    for source in (contents.source, target.like):
        if source is not None:
            check_apart(source, target.path)
    if check == "checksums":
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


COMMANDS: dict[str, Callable[..., int]] = {
    "inspect": ckpt_show.inspect,
    "verify": ckpt_show.verify,
    "diff": ckpt_show.diff,
    "convert": convert,
    "export": export,
}


def main(arguments: Sequence[str]) -> int:
    """Run ``te-fsdp ckpt`` with the arguments after it; returns the exit code."""
    command = functools.partial(
        tyro.extras.subcommand_cli_from_dict,
        COMMANDS,
        prog="te-fsdp ckpt",
        description="Checkpoints in one process: no model, no GPU, a block of a tensor at a time.",
        args=list(arguments),
        config=(tyro.conf.FlagCreatePairsOff, tyro.conf.PositionalMetavarFromFieldName),
    )
    try:
        return run(command, arguments)
    except Exception as error:  # a file that no check knows: the text says what to report
        return fail(
            arguments, f"unexpected {type(error).__name__}: {error}; please report it with this command", 1
        )
