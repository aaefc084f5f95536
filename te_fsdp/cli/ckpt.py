"""The commands of ``te-fsdp ckpt``."""

from __future__ import annotations

import datetime
import fnmatch
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import torch
from tyro.conf import Positional, arg

from te_fsdp.checkpoint.directory import damaged, in_place_of, refused_files
from te_fsdp.checkpoint.extra import decode
from te_fsdp.checkpoint.lazy_tensors import check_zip, total_bytes
from te_fsdp.checkpoint.load_source import problems_of
from te_fsdp.checkpoint.manifest import Manifest, dtype_name, unreadable
from te_fsdp.checkpoint.portable.convert import (
    check_apart,
    check_written,
    compare_contents,
    open_any,
    resolve,
    transformed,
    weights_only,
    write_checkpoint,
    write_pt,
    write_safetensors,
)
from te_fsdp.checkpoint.portable.huggingface import (
    TeBlocks,
    TeNames,
    values_for_huggingface,
    write_huggingface,
)
from te_fsdp.checkpoint.portable.huggingface_config import config_contents
from te_fsdp.checkpoint.progress import bytes_bar
from te_fsdp.checkpoint.reader import CHECKPOINT, DCP_KIND, Choices, Contents
from te_fsdp.checkpoint.storage import resolve_path
from te_fsdp.cli import UsageError, bytes_of, human_bytes, print_json, print_table
from te_fsdp.cli.checkpoint_texts import counted, pairs, semantics_lines, short
from te_fsdp.errors import CheckpointError

_Json = Annotated[bool, arg(name="json", help="One JSON document on stdout instead of text.")]
_Key = Annotated[
    str | None,
    arg(help="Path of the model's state dict in a nested torch.save file, with dots between keys."),
]
_Check = Annotated[
    Literal["checksums", "sizes"], arg(help="How the files of a source checkpoint are verified first.")
]
_Force = Annotated[bool, arg(help="Replace an existing target. It is kept until the new one is complete.")]
_Optimizer = Annotated[
    str | None, arg(help="Class of the optimizer in a DCP directory, if its options do not identify it.")
]
_Size = Annotated[
    str,
    arg(
        help="Largest safetensors file, such as 5GB or 500MiB. Larger models get several files with an index."
    ),
]
_ExtraState = Annotated[
    Literal["read", "drop"],
    arg(help="TransformerEngine's _extra_state: read its delayed-scaling state, or drop it."),
]
_DType = Literal["float32", "bfloat16", "float16"]
_SHARD = "5GB"
#: Kinds of sources that can contain a model's state dict under a key.
_NESTED = ("torch.save", DCP_KIND)
_TORCH = (".pt", ".pth", ".bin", ".ckpt")


@dataclass(frozen=True)
class Model:
    """The TransformerEngine model whose weights are exported as a Hugging Face model."""

    layers: TeBlocks = field(default_factory=TeBlocks)
    names: TeNames = field(default_factory=TeNames)


_AS_USUAL = Model()


@dataclass
class Target:
    """Target path, with its kind and options."""

    path: Path  #: File or directory
    kind: str | None  #: ``"checkpoint"``, ``"safetensors"``, ``"torch"``; ``None``: inferred from the suffix
    shard_bytes: int  #: Size of the largest safetensors file in bytes
    force: bool  #: Whether to replace an existing target
    like: Path | None = None  #: Folder of a Hugging Face model whose layout the target copies

    def resolve_kind(self, default: str | None) -> str:
        """Set the kind: the given one, else that of the suffix, else ``default``. Raise UsageError if none applies."""
        suffix = self.path.suffix
        inferred = "safetensors" if suffix == ".safetensors" else "torch" if suffix in _TORCH else None
        if self.like is not None and inferred is not None:
            raise UsageError(f"{self.path}: --like writes a folder, not a {suffix} file")
        if self.kind is not None and inferred is not None and self.kind != inferred:
            raise UsageError(f"{self.path}: --to {self.kind} contradicts the suffix {suffix}")
        self.kind = self.kind or inferred or default
        if self.kind in ("checkpoint", "torch") and self.shard_bytes != _bytes(_SHARD):
            raise UsageError(
                f"{self.path}: --max-shard-size is for safetensors, not for a {self.kind} target"
            )
        if self.kind is None:
            raise UsageError(f"{self.path}: set its kind with --to checkpoint, safetensors or torch")
        return self.kind


def _open(source: Path, choices: Choices) -> Contents:
    """Return the contents of a path; UsageError for choices that its kind does not have. Local operation."""
    contents, key = open_any(source, choices), choices.key
    if contents.kind not in _NESTED and (key is not None or choices.optimizer_class is not None):
        option = "--optimizer-class" if key is None else "--key"
        raise UsageError(f"{source}: {option} is for {' or '.join(_NESTED)}, not for a {contents.kind}")
    return contents


def convert(
    source: Positional[Path],
    target: Positional[Path],
    /,
    *,
    to: Annotated[
        Literal["checkpoint", "safetensors", "torch"] | None,
        arg(help="Kind of the target. Default: inferred from .safetensors, .pt, .pth, .bin or .ckpt."),
    ] = None,
    everything: Annotated[
        bool,
        arg(help="Write optimizer, extra and delayed-scaling state too; only the optimizer into torch.save."),
    ] = False,
    dtype: Annotated[_DType | None, arg(help="Dtype of high-precision floating-point parameters.")] = None,
    quantized: Annotated[
        Literal["keep", "dequantize"] | None,
        arg(help="Keep the components of quantized weights (default for checkpoints) or dequantize them."),
    ] = None,
    max_shard_size: _Size = _SHARD,
    key: _Key = None,
    optimizer_class: _Optimizer = None,
    extra_state: _ExtraState = "read",
    check: _Check = "checksums",
    force: _Force = False,
    as_json: _Json = False,
) -> int:
    """Convert between te_fsdp checkpoints, safetensors, torch.save files and, as sources, plain DCP directories.

    Names and shapes are those of the unsharded module's state_dict().
    """
    destination = Target(resolve_path(target), to, _bytes(max_shard_size), force)
    kind = destination.resolve_kind(None)
    contents = _open(source, Choices(key, extra_state, optimizer_class))
    form = quantized or ("keep" if kind == "checkpoint" else "dequantize")
    values = {"dtype": None if dtype is None else getattr(torch, dtype), "dequantize": form == "dequantize"}
    options = {"check": check, "everything": everything, "table": False, "as_json": as_json}
    return _transform_and_write(contents, destination, _AS_USUAL, **options, **values)


def export(
    source: Positional[Path],
    target: Positional[Path],
    /,
    *,
    dtype: Annotated[
        _DType | None,
        arg(
            help="Dtype of floating-point parameters. Default: dtype in the config.json of --like, else bfloat16."
        ),
    ] = None,
    weights: Annotated[
        Literal["auto", "main", "compute"],
        arg(help="Export the optimizer's main weights if they exist (auto, main), or never (compute)."),
    ] = "auto",
    max_shard_size: _Size = _SHARD,
    check: _Check = "checksums",
    like: Annotated[
        Path | None,
        arg(help="Write a Hugging Face folder with the names, config.json and tokenizer of this folder."),
    ] = None,
    te: Model = _AS_USUAL,
    force: _Force = False,
    as_json: _Json = False,
) -> int:
    """Export consolidated weights in one dtype for inference: main weights if they exist, else dequantized weights.

    The output names the source of each weight. The target is a folder of safetensors, a .safetensors file, or a
    torch.save file (.pt, .pth, .bin, .ckpt). With --like it is a Hugging Face model.
    """
    if like is None and te != _AS_USUAL:
        raise UsageError("the --te... options describe the model to export; they need --like")
    destination = Target(resolve_path(target), None, _bytes(max_shard_size), force, like)
    destination.resolve_kind("safetensors")
    config = config_contents(like) if like is not None else {}
    # the second key is that of transformers before 5
    chosen = dtype or config.get("dtype", config.get("torch_dtype"))
    chosen = chosen if chosen in get_args(_DType) else "bfloat16"
    values = {"dtype": getattr(torch, chosen), "dequantize": True, "weights": weights}
    options = {"check": check, "everything": False, "table": True, "as_json": as_json}
    return _transform_and_write(open_any(source), destination, te, **options, **values)


def _bytes(text: str) -> int:
    size = bytes_of(text, unit=True)
    if not size:
        raise UsageError(f"--max-shard-size {text}: expected a size with a unit, such as 5GB or 500MiB")
    return size


def _verify_source(contents: Contents, as_json: bool) -> None:
    """Verify the checksums of a checkpoint. Files of other kinds are verified while they are read."""
    files, path = contents.manifest.files, contents.source
    # torch.load maps the file and would not read the checksums of its zip entries.
    if contents.kind == "torch.save":
        with unreadable(path, "file of torch.save", "the file is damaged, copy it again"):
            check_zip(path)
    if contents.kind != CHECKPOINT:
        return
    with bytes_bar(f"verifying {path.name}", _sum(files), _show_bar(as_json)) as tick:
        problems = contents.manifest.check_files(path, sorted(files), checksums=True, tick=tick)
    damaged(path, problems)


def _sum(files: Mapping[str, Sequence[int]]) -> int:
    """Return the total size of a manifest's files in bytes."""
    return sum(listed[0] for listed in files.values())


def _show_bar(as_json: bool) -> bool:
    """Return whether to show a progress bar: stderr is a terminal and the output is not JSON."""
    return sys.stderr.isatty() and not as_json


def _transform_and_write(
    source: Contents,
    target: Target,
    te: Model,
    *,
    check: str,
    everything: bool,
    table: bool,
    as_json: bool,
    **form: Any,
) -> int:
    """Verify, transform by :func:`transformed`, write, and print a summary. Return exit code 0."""
    path, shards = target.path, {"shard_bytes": target.shard_bytes}
    # Before anything is verified, which may take minutes for a large checkpoint.
    for read in filter(None, (source.source, target.like)):
        check_apart(read, path)
    if check == "checksums":  # a copy of damaged data would get valid checksums
        _verify_source(source, as_json)
    # Values of a Hugging Face model are rounded once, after norms are shifted.
    into, sources = transformed(source, **form if target.like is None else {**form, "dtype": None})
    if target.kind == "torch" or (target.kind != "checkpoint" and not everything):
        into = weights_only(into, optimizer=everything)
    values = into.tensors
    if target.like is not None:
        values = values_for_huggingface(into, target.like, te.layers, te.names, form["dtype"])
    size = total_bytes(values)
    replacing = in_place_of(path) if target.force and path.exists() else nullcontext(path)
    with bytes_bar(f"writing {path.name}", size, _show_bar(as_json)) as tick, replacing as temporary:
        if target.like is not None:
            files = write_huggingface(temporary, values, target.like, tick, **shards)
        elif target.kind == "checkpoint":
            files = write_checkpoint(temporary, into, tick)
        elif target.kind == "safetensors":
            files = write_safetensors(temporary, into, tick, **shards)
        else:
            files = write_pt(temporary, into, tick)
        # Opened again before the old target is replaced. A Hugging Face folder has another layout.
        if target.like is None:
            check_written(temporary, weights_only(into) if target.kind == "torch" else into)
    columns = ("name", "from", "dtype")
    dtypes = {name: into.manifest.tensor(name)["dtype"] for name in sources}
    if target.like is not None:
        dtypes |= dict.fromkeys(into.manifest.parameters, dtype_name(form["dtype"]))
    rows = [(name, origin, dtypes[name]) for name, origin in sources.items()]
    if as_json:
        tensors: Any = [dict(zip(columns, row, strict=True)) for row in rows]
        answer = {"ok": True, "source": str(source.source), "target": str(path), "kind": target.kind}
        print_json(answer | {"files": files, "bytes": size, "tensors": tensors, "notes": into.notes})
        return 0
    if table:
        print_table("weights", columns, rows)
    counts = ", ".join(f"{n} {origin}" for origin, n in Counter(sources.values()).items())
    print(f"{source.source} ({source.kind}) -> {path} ({target.kind})")
    print(f"weights and buffers: {counts}", *(f"note: {note}" for note in into.notes), sep="\n")
    print(f"{counted(len(files), 'file')}, {human_bytes(size)}")
    return 0


def inspect(
    path: Positional[Path],
    /,
    *,
    filter: Annotated[str, arg(help="Show names that match this pattern only, such as '*.mlp.*'.")] = "*",
    key: _Key = None,
    as_json: _Json = False,
) -> int:
    """Show the contents of a checkpoint: parameters, buffers, optimizer state, extra, meshes, versions, sizes.

    The path is a checkpoint, a folder of checkpoints (the newest is used), safetensors, a torch.save file, or a
    plain DCP directory.
    """
    contents = _open(path, Choices(key=key))
    manifest = contents.manifest
    groups, tensors = ("model", "optimizer", "delayed", "extra"), contents.tensors.items()
    sizes = {group: sum(t.bytes for key, t in tensors if key.startswith(group)) for group in groups}
    sizes |= {"total": contents.bytes, "files": _sum(manifest.files)}
    is_ours = contents.kind == CHECKPOINT
    summary = {
        "ok": True,
        "path": str(contents.source),
        "kind": contents.kind,
        "step": manifest.extra.get("step"),
        "saved_at": manifest.saved_at if is_ours else None,
        "versions": manifest.versions if is_ours else {},
        "mesh": manifest.mesh if is_ours else {},
        "parameters": [_parameter(contents, n) for n in manifest.parameters if fnmatch.fnmatch(n, filter)],
        "buffers": [_parameter(contents, n) for n in manifest.buffers if fnmatch.fnmatch(n, filter)],
        "optimizer": _optimizer(contents),
        "delayed": manifest.delayed,
        "semantics": manifest.semantics,
        "extra": manifest.extra,
        "bytes": sizes,
        "notes": contents.notes,
    }
    if as_json:
        print_json(summary)
    else:
        _print_summary(summary, filter)
    return 0


def _parameter(contents: Contents, name: str) -> dict[str, Any]:
    described = contents.manifest.tensor(name)
    parts = contents.components(name)
    stored = [contents.tensors[f"model.{name}"]] if parts is None else list(parts.values())
    row = {key: described.get(key) for key in ("shape", "dtype", "format", "layout")}
    row |= {"components": sorted(parts) if parts is not None else None}
    return {"name": name, **row, "bytes": sum(tensor.bytes for tensor in stored)}


def _optimizer(contents: Contents) -> dict[str, Any] | None:
    described = contents.manifest.optimizer
    if described is None:
        return None
    kinds: dict[tuple[str, str], dict[str, Any]] = {}
    for name, states in described["state"].items():
        for key, value in states.items():
            tensor = contents.tensors.get(f"optimizer.state.{name}.{key}")
            kind = kinds.setdefault((key, value.get("dtype", "plain")), {"tensors": 0, "bytes": 0})
            kind["tensors"] += 1
            kind["bytes"] += tensor.bytes if tensor is not None else 0
    return {
        "class": described["class"],
        "groups": [
            {"parameters": len(g["parameters"]), "options": decode(g["options"], {})}
            for g in described["groups"]
        ],
        "states": [{"name": k, "dtype": d, **counted} for (k, d), counted in kinds.items()],
    }


def _print_summary(summary: dict[str, Any], pattern: str) -> None:
    print(f"{summary['path']}: {summary['kind']}")
    if summary["saved_at"] is not None:
        when = datetime.datetime.fromtimestamp(summary["saved_at"] / 1e9, datetime.timezone.utc)
        mesh, versions = pairs(summary["mesh"]), pairs(summary["versions"])
        print(f"saved {when:%Y-%m-%d %H:%M:%S} UTC on {mesh} by {versions}")
    if summary["step"] is not None:
        print(f"step {short(summary['step'])}")
    rows = []
    for kind in ("parameters", "buffers"):
        for item in summary[kind]:
            form = item["format"] or item["dtype"]
            form += f" ({item['dtype']})" if item["format"] else ""
            layout = item["layout"] or ("buffer" if kind == "buffers" else "-")
            shape = " x ".join(map(str, item["shape"])) or "scalar"
            rows.append((item["name"], shape, form, layout, human_bytes(item["bytes"])))
    title = f"{counted(len(rows), 'tensor')} of the model" + (
        f" that match {pattern}" if pattern != "*" else ""
    )
    print_table(title, ("name", "shape", "format", "layout", "size"), rows, right=("size",))
    if (optimizer := summary["optimizer"]) is not None:
        states = [(s["name"], s["dtype"], s["tensors"], human_bytes(s["bytes"])) for s in optimizer["states"]]
        title = f"optimizer {optimizer['class']}"
        print_table(title, ("state", "dtype", "tensors", "size"), states, right=("tensors", "size"))
        for n, group in enumerate(optimizer["groups"]):
            print(f"  group {n}: {counted(group['parameters'], 'parameter')}, {pairs(group['options'])}")
    if summary["delayed"]:
        names = list(summary["delayed"])
        shown = ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
        print(f"delayed-scaling state of {counted(len(names), 'module')}: {shown}")
    lines = semantics_lines(summary["semantics"], pattern) if summary["semantics"] else []
    if summary["extra"]:
        lines += ["extra:", *(f"  {k}: {short(v)}" for k, v in summary["extra"].items())]
    sizes = (f"{kind} {human_bytes(count)}" for kind, count in summary["bytes"].items() if count)
    lines += ["sizes: " + ", ".join(sizes), *(f"note: {note}" for note in summary["notes"])]
    print(*lines, sep="\n")


def verify(path: Positional[Path], /, *, as_json: _Json = False) -> int:
    """Verify every byte of a checkpoint against its checksums, and its manifest against DCP's metadata."""
    where, kind = resolve(path)
    if kind != CHECKPOINT:
        raise CheckpointError(
            f"{where}: no checksums to verify",
            expected="a te_fsdp checkpoint",
            got=kind,
            fix="convert it to a checkpoint: te-fsdp ckpt convert SOURCE TARGET --to checkpoint",
        )
    files = Manifest.read(where).files
    total = _sum(files)
    with bytes_bar(f"verifying {where.name}", total, _show_bar(as_json)) as tick:
        problems = problems_of(where, tick)
    if as_json:
        answer = {"ok": not problems, "path": str(where), "files": len(files), "bytes": total}
        print_json(answer | {"problems": problems})
    elif problems:
        verdict = "not readable" if refused_files(problems) == problems else "damaged"
        print(f"{where}: {verdict}", *(f"  {problem}" for problem in problems), sep="\n")
    else:
        print(f"{where}: no damage found, {counted(len(files), 'file')}, {human_bytes(total)}")
    return 1 if problems else 0


def diff(
    a: Positional[Path],
    b: Positional[Path],
    /,
    *,
    rtol: Annotated[float, arg(help="Relative tolerance.")] = 0.0,
    atol: Annotated[float, arg(help="Absolute tolerance.")] = 0.0,
    weights_only: Annotated[
        bool, arg(help="Ignore optimizer state, delayed-scaling state and extra.")
    ] = False,
    strict: Annotated[bool, arg(help="Count different dtypes and formats as differences.")] = False,
    as_json: _Json = False,
) -> int:
    """Compare two checkpoints of te_fsdp by logical value, regardless of mesh and format.

    Quantized weights are compared by their dequantized values. The exit code is 1 if the checkpoints differ.
    """
    if not (rtol >= 0 and atol >= 0):
        raise UsageError(f"--rtol {rtol:g} --atol {atol:g}: expected 0 or more")
    first, second = open_any(a), open_any(b)
    # Both are refused or verified before the first comparison, which reads all data.
    for contents in (first, second):
        if contents.kind != CHECKPOINT:
            raise CheckpointError(
                f"{contents.source}: cannot be compared",
                expected="a te_fsdp checkpoint",
                got=contents.kind,
                fix="convert it first: te-fsdp ckpt convert SOURCE TARGET --to checkpoint",
            )
        _verify_source(contents, as_json)
    with bytes_bar("comparing", first.bytes, _show_bar(as_json)) as tick:
        report = compare_contents(first, second, tick, rtol=rtol, atol=atol, weights_only=weights_only)
    same = report.is_same(strict=strict)
    if as_json:
        answer = {"ok": True, "same": same, "a": str(first.source), "b": str(second.source), **asdict(report)}
        print_json(answer)
        return 0 if same else 1
    rows = [(d.name, d.kind, d.detail) for d in report.differences]
    if rows:
        print_table(f"A {first.source}\nB {second.source}", ("name", "difference", "A / B"), rows)
    counts = f"{report.equal} of {report.compared} tensors equal within rtol {rtol:g}, atol {atol:g}"
    print(*report.others, f"{'the same' if same else 'different'}: {counts}", sep="\n")
    return 0 if same else 1


COMMANDS: dict[str, Callable[..., int]] = {
    command.__name__: command for command in (inspect, verify, diff, convert, export)
}
