"""Checkpoints of any kind, written as one of te_fsdp, as safetensors or with ``torch.save``, or compared.

Two checkpoints are compared by logical value: quantized weights are dequantized, independent of mesh and format.
"""

from __future__ import annotations

import json
import math
import os
import zipfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from te_fsdp.checkpoint.directory import latest, new_directory, open_checkpoint, refuse_text, remove, visible
from te_fsdp.checkpoint.extra import decode
from te_fsdp.checkpoint.lazy_tensors import InMemory, Lazy, is_safetensors, mapped, write_file, write_folder
from te_fsdp.checkpoint.manifest import DCP_METADATA, Tick, dtype_name, has_manifest, unreadable
from te_fsdp.checkpoint.plain_dcp import cut_by_tp, with_leaves
from te_fsdp.checkpoint.planner import write_tensors
from te_fsdp.checkpoint.reader import CHECKPOINT, MANIFEST_KEY, OTHER, Choices, Contents, describe, rounded
from te_fsdp.checkpoint.state_dicts import open_state_dicts
from te_fsdp.checkpoint.storage import is_remote, resolve_path
from te_fsdp.errors import CheckpointError, shorten
from te_fsdp.modules.semantics import differences, format_differences, from_json, user_differences

#: Levels of folders below a path that are searched for checkpoints.
_DEPTH = 3


def resolve(path: Path) -> tuple[Path, str]:
    """Return the location and kind of a checkpoint: of the path, or of the newest one in or below a folder.

    Kinds: :data:`CHECKPOINT`, ``"DCP"``, ``"safetensors"``, ``"torch"``. Local operation. Raises CheckpointError for no
    readable checkpoint, an unfinished save, or checkpoints in several folders below the path.
    """
    path = resolve_path(path)
    if ".te_fsdp-" in path.name and path.name.startswith("."):
        raise CheckpointError(
            f"{path}: not finished", expected="a complete checkpoint", fix="use the previous one"
        )
    if path.is_dir():
        if has_manifest(path):
            return path, CHECKPOINT
        if (path / DCP_METADATA).is_file():
            return path, "DCP"
        if not is_safetensors(path):
            folders = [path] if is_remote(path) else [*_folders_of_checkpoints(path, _DEPTH)]
            if len(folders) > 1:
                raise CheckpointError(
                    f"{path}: several folders with checkpoints",
                    expected="a path with one checkpoint folder",
                    got=", ".join(map(str, folders)),
                    fix="pass one of them",
                )
            if newest := next(filter(None, map(latest, folders)), None):
                return newest, CHECKPOINT
            open_checkpoint(path)  # raises an error that names checkpoints nearby
    elif not path.is_file():
        is_special = not is_remote(path) and path.exists()
        reason = "neither a file nor a directory" if is_special else "path does not exist"
        raise CheckpointError(f"{path}: {reason}", fix="check the path")
    if is_remote(path):
        raise CheckpointError(
            f"{path}: cannot be read on object storage",
            expected="a checkpoint of te_fsdp, or a plain DCP directory",
            got="safetensors or a file of torch.save",
            fix="copy it to a local path",
        )
    if is_safetensors(path):
        return path, "safetensors"
    refuse_text(path)
    # A damaged end of a file raises BadZipFile.
    with unreadable(path, "file"), path.open("rb") as file, suppress(zipfile.BadZipFile):
        if zipfile.is_zipfile(file):
            return path, "torch"
    raise CheckpointError(
        f"{path}: neither a safetensors file nor one that torch.save wrote",
        fix="check the file: it is truncated, older than torch 1.6, or of a different kind",
    )


def _folders_of_checkpoints(folder: Path, depth: int) -> Iterator[Path]:
    """Yield a folder if it contains checkpoints, else those below that do: ``run/ckpt`` for ``run``."""
    if visible(folder):
        yield folder
    elif depth > 0:
        for inside in sorted(folder.iterdir()):
            if inside.is_dir() and not inside.name.startswith("."):
                yield from _folders_of_checkpoints(inside, depth - 1)


def open_any(path: Path, choices: Choices | None = None) -> Contents:
    """Return the contents of a checkpoint of any kind, with experts stacked; CheckpointError if unreadable. Local."""
    choices = choices or Choices()
    where, kind = resolve(path)
    if kind == CHECKPOINT:
        return Contents.of_checkpoint(where)
    contents = open_state_dicts(where, kind, choices)
    # A plain DCP directory does not record how tensor parallelism has ordered the rows of fused weights.
    refuse_scrambled(contents)
    contents.stack_experts()
    return contents


def refuse_scrambled(contents: Contents) -> None:
    """Raise CheckpointError for a plain directory of tensor parallelism: gated weights have rows in rank order."""
    if cut := sorted(key.removeprefix("model.") for key in cut_by_tp(contents.tensors)):
        raise CheckpointError(
            f"{contents.source}: {len(cut)} weight(s) in pieces of tensor parallelism: {shorten(cut, 3)}",
            expected="rows as in the unsharded module",
            got="rows rank by rank in fused and gated weights, without a record of which weights these are",
            fix="load it on the mesh that saved it, and save it with te_fsdp.checkpoint.save",
        )


def check_written(target: Path, contents: Contents) -> None:
    """Raise CheckpointError, and remove ``target``, if it is unreadable or its tensors differ from ``contents``.

    Compares names, dtypes and shapes, not values. Local operation.
    """

    def tensors_of(contents: Contents) -> dict[str, str]:
        # A file of torch.save has a weight for each expert.
        tensors = {key: t for key, t in contents.split_experts().tensors.items() if math.prod(t.shape)}
        return {key: f"{dtype_name(t.dtype)} {tuple(t.shape)}" for key, t in tensors.items()}

    try:
        written, expected = tensors_of(open_any(target)), tensors_of(contents)
    except CheckpointError:
        remove(target)
        raise
    differing = sorted(k for k in written.keys() | expected.keys() if written.get(k) != expected.get(k))
    if differing:
        remove(target)
        name = differing[0]
        raise CheckpointError(
            f"{target}: {len(differing)} tensor(s) differ from the source: {shorten(differing, 3)}",
            expected=f"{name}: {expected.get(name, 'absent')}",
            got=written.get(name, "absent"),
            why="The target was opened again after it was written, and removed",
            fix="write a different kind (--to), and report this with the source's te-fsdp ckpt inspect --json",
        )


def check_apart(source: Path, target: Path) -> None:
    """Raise CheckpointError if a target is inside its source, or would replace it; links are followed. Local."""
    places = (source, target)
    first, second = (Path(str(path)) if is_remote(path) else Path(os.path.realpath(path)) for path in places)
    # Hard links and bind mounts have different real paths.
    is_link = first.exists() and second.exists() and os.path.samefile(first, second)
    if is_link or second.is_relative_to(first) or first.is_relative_to(second):
        raise CheckpointError(
            f"{target}: cannot be written",
            expected=f"a path outside of the source {source}",
            got="the source itself, a path inside of it, or a parent directory",
            why="The source would be changed while it is read",
            fix="choose a different target",
        )


def transformed(
    contents: Contents, *, dtype: torch.dtype | None, dequantize: bool, weights: str = "compute"
) -> tuple[Contents, dict[str, str]]:
    """Return contents with converted weights, and the origin of each value by name.

    Origins: ``"main"``, ``"dequantized"``, ``"stored"``, and ``"quantized"`` for unchanged components. ``dtype`` is
    that of floating-point parameters in high precision (``None``: unchanged), ``weights`` as for
    :meth:`Contents.best_value`; ``"auto"`` and ``"main"`` need ``dequantize``. Buffers are unchanged. Raise
    CheckpointError for values that do not exist in that form.
    """
    if parts := [name for name in contents.names if name.endswith("scale_inv") and ":" in name]:
        raise CheckpointError(
            f"{contents.source}: bytes and scales of quantized weights: {shorten(parts, 3)}",
            expected="a source that records their formats",
            got="a file without them, as te-fsdp ckpt convert --quantized keep writes with torch.save",
            fix="convert the checkpoint itself, or a safetensors copy of it",
        )
    # A copy, because it is changed below. The listed files are those of the source.
    manifest = replace(contents.manifest, parameters=dict(contents.manifest.parameters), files={})
    tensors = {k: t for k, t in contents.tensors.items() if not k.startswith("model.")}
    sources: dict[str, str] = {}
    for name in contents.names:
        components = contents.components(name)
        if components is not None and not dequantize:
            tensors |= {f"model.{name}:{part}": tensor for part, tensor in components.items()}
            sources[name] = "quantized"
            continue
        value, sources[name] = contents.best_value(name, weights)
        if described := manifest.parameters.get(name):
            if value.dtype.is_floating_point and dtype not in (None, value.dtype):
                value = mapped(partial(rounded, name, dtype), dtype, value)  # type: ignore[arg-type]
            manifest.parameters[name] = {**describe(value), "layout": described.get("layout")}
        tensors[f"model.{name}"] = value
    notes = list(contents.notes)
    if dequantize and manifest.delayed:
        # A history belongs to a quantized weight's scale. Histories of activations are filled in the first steps.
        count = len(manifest.delayed)
        notes.append(f"delayed-scaling state of {count} module(s): left, weights are high precision")
        manifest.delayed = {}
        tensors = {k: t for k, t in tensors.items() if not k.startswith("delayed.")}
    return replace(contents, manifest=manifest, tensors=tensors, notes=notes), sources


def weights_only(contents: Contents, *, optimizer: bool = False) -> Contents:
    """Return contents without extra, delayed-scaling state and, unless requested, the optimizer; notes name them."""
    manifest, notes = contents.manifest, list(contents.notes)
    state = manifest.optimizer if optimizer else None
    if manifest.optimizer is not None and state is None:
        notes.append(f"optimizer: left ({len(manifest.optimizer['state'])} states)")
    if manifest.extra:
        notes.append(f"extra: left ({', '.join(sorted(manifest.extra))})")
    if manifest.delayed:
        notes.append(f"delayed-scaling state of {len(manifest.delayed)} module(s): left")
    # Scales of delayed scaling belong to a training run. A module without them begins with new ones.
    bare = replace(manifest, optimizer=state, extra={}, delayed={})
    prefixes = ("model.", "optimizer.") if optimizer else ("model.",)
    tensors = {key: tensor for key, tensor in contents.tensors.items() if key.startswith(prefixes)}
    return replace(contents, manifest=bare, tensors=tensors, notes=notes)


def write_checkpoint(target: Path, contents: Contents, tick: Tick) -> list[str]:
    """Write a checkpoint of te_fsdp, loadable on any mesh; it appears when it is complete. Return its files.

    Raise CheckpointError if the target exists, or a tensor cannot be read or written.
    """
    with new_directory(target, needed=contents.bytes, is_checkpoint=True) as folder:
        manifest = write_tensors(folder, contents.tensors, tick, contents.manifest)
        manifest.write(folder)
    return sorted(manifest.files)


def portable_name(key: str) -> str:
    """Return the name in portable files of a tensor with a te_fsdp key: weights have their own name."""
    return key.removeprefix("model.") if key.startswith("model.") else f"{OTHER}{key}"


def write_safetensors(target: Path, contents: Contents, tick: Tick, *, shard_bytes: int) -> list[str]:
    """Write a ``.safetensors`` file, or a folder with shards and their index. Like :func:`write_checkpoint`."""
    tensors = {portable_name(key): tensor for key, tensor in contents.tensors.items()}
    fields = asdict(contents.manifest).items()
    metadata = {MANIFEST_KEY: json.dumps({k: v for k, v in fields if k not in ("files", "folder")})}
    is_file = target.suffix == ".safetensors"
    with new_directory(target, needed=contents.bytes, is_file=is_file) as temporary_path:
        if not is_file:
            return write_folder(temporary_path, tensors, metadata, tick, shard_bytes)
        write_file(temporary_path, tensors, metadata, tick)
    return [target.name]


def write_pt(target: Path, contents: Contents, tick: Tick) -> list[str]:
    """Write a file with ``torch.save``: a state dict, or ``{"model": ..., "optimizer": ...}`` with an optimizer.

    The state dict has the entries ``_extra_state`` of stock modules, empty, and a weight for each expert. All tensors
    are in memory at once. Raise as :func:`write_checkpoint`.
    """
    # A stock GroupedLinear has one weight for each expert, and loads them by name.
    contents = contents.split_experts()
    optimizer, tensors = contents.manifest.optimizer, contents.tensors
    objects: dict[str, Any] = {portable_name(k): t for k, t in tensors.items() if k.startswith("model.")}
    for name, first in contents.manifest.tied.items():
        same = {k: t for k, t in objects.items() if k.partition(":")[0] == first}
        objects |= {name + key.removeprefix(first): tensor for key, tensor in same.items()}
    empty = torch.empty(0, dtype=torch.uint8, device="cpu")
    extras = [f"{module}._extra_state".lstrip(".") for module in contents.manifest.extra_states]
    # A strict load needs the entries. TE reads an empty one as no state.
    objects |= {name: InMemory(empty) for name in extras}
    if optimizer is not None:
        names = (name for group in optimizer["groups"] for name in group["parameters"])
        numbers = {name: number for number, name in enumerate(names)}
        groups = []
        for group in optimizer["groups"]:
            own = [*group["parameters"]]
            named = {"params": [numbers[name] for name in own], "param_names": own}
            groups.append(decode(group["options"], {}) | named)
        state: dict[int, dict[str, Any]] = {}
        for name, values in optimizer["state"].items():
            if name not in numbers:
                raise CheckpointError(f"optimizer state of {name}", expected="a parameter of a group")
            state[numbers[name]] = {
                key: tensors[f"optimizer.state.{name}.{key}"] if "dtype" in d else decode(d["value"], {})
                for key, d in values.items()
            }
        objects = {"model": objects, "optimizer": {"state": state, "param_groups": groups}}
    read: dict[int, torch.Tensor] = {}  # a tensor under several names is stored once

    def load(tensor: Lazy, key: str) -> torch.Tensor:
        if id(tensor) not in read:
            read[id(tensor)] = tensor.full()
            tick(tensor.bytes)
        return read[id(tensor)]

    with new_directory(target, needed=contents.bytes, is_file=True) as path, path.open("wb") as file:
        try:
            torch.save(with_leaves(objects, load), file)
        except RuntimeError as error:  # torch's writer fails again when it is closed after a failed write
            cause = error.__context__ if isinstance(error.__context__, OSError) else error
            raise cause from None
        file.flush()
        os.fsync(file.fileno())
    return [target.name]


@dataclass
class Difference:
    """One tensor that differs between two checkpoints."""

    name: str  #: Name of the parameter or buffer, or the key of optimizer state
    kind: str  #: ``"only in A"``, ``"only in B"``, ``"shape"``, ``"dtype"``, ``"format"``, or ``"values"``, as follows
    detail: str = ""
    elements: int = 0  #: Number of elements beyond the tolerance
    max_abs: float = 0.0  #: Infinite if one of the two is NaN
    max_rel: float = 0.0  #: Relative to the larger magnitude


@dataclass
class Report:
    """Differences between two checkpoints, and the numbers of compared and equal tensors."""

    differences: list[Difference] = field(default_factory=list)
    #: Differences of options, ``extra`` and the settings of modules, as texts.
    others: list[str] = field(default_factory=list)
    compared: int = 0  #: Number of tensors whose values were compared
    equal: int = 0  #: Number of compared tensors within the tolerance

    def is_same(self, *, strict: bool = False) -> bool:
        """Return whether nothing differs. Dtypes and formats, whose values may be equal, count if ``strict``."""
        counted = [d for d in self.differences if strict or d.kind not in ("dtype", "format")]
        return not (self.others or counted)


def compare_contents(
    a: Contents, b: Contents, tick: Tick, *, rtol: float = 0.0, atol: float = 0.0, weights_only: bool = False
) -> Report:
    """Compare two checkpoints. Local operation; a block of each tensor is in memory at a time.

    An element is beyond the tolerance if ``|a - b| > atol + rtol * |b|``, or if one of the two is NaN and the other is
    not. ``tick`` is called with the bytes of A. ``weights_only`` skips everything except weights.
    """
    report = Report()
    # Weights and buffers by logical value, then the other tensors as they are stored.
    kinds: list[tuple[set[str], set[str], Callable[[Contents, str], Lazy]]]
    # The other checkpoint may store a tied weight under each of its names.
    in_a, in_b = ({*c.names, *c.manifest.tied} & {*a.names, *b.names} for c in (a, b))
    kinds = [(in_a, in_b, lambda contents, name: contents.value(contents.manifest.tied.get(name, name)))]
    if not weights_only:
        in_a, in_b = ({key for key in c.tensors if not key.startswith("model.")} for c in (a, b))
        kinds.append((in_a, in_b, lambda contents, key: contents.tensors[key]))
        report.others = _compare_manifests(a, b)
    for in_a, in_b, value in kinds:
        for name in sorted(in_a | in_b):
            if (name in in_a) != (name in in_b):
                report.differences.append(Difference(name, "only in A" if name in in_a else "only in B"))
                continue
            described = (c.manifest.parameters.get(c.manifest.tied.get(name, name), {}) for c in (a, b))
            formats = [own.get("format") or "high precision" for own in described]
            short, long = sorted((format_.split() for format_ in formats), key=len)
            # Plain files do not record the scaling of float8 weights.
            if formats[0] != formats[1] and short != [long[0], long[-1]]:
                report.differences.append(Difference(name, "format", " / ".join(formats)))
            _compare(report, name, value(a, name), value(b, name), tick, rtol, atol)
    return report


def _compare_manifests(a: Contents, b: Contents) -> list[str]:
    """Return the differences of the optimizers' options, ``extra`` and the settings of modules. Local operation."""
    texts: list[str] = []
    saved_a, saved_b = a.manifest.optimizer, b.manifest.optimizer
    if saved_a is not None and saved_b is not None:
        if saved_a["class"] != saved_b["class"]:
            texts.append(f"optimizer: {saved_a['class']} / {saved_b['class']}")
        if len(saved_a["groups"]) != len(saved_b["groups"]):
            texts.append(f"optimizer: {len(saved_a['groups'])} / {len(saved_b['groups'])} groups")
        else:
            for n, (first, second) in enumerate(zip(saved_a["groups"], saved_b["groups"], strict=True)):
                texts += _compare_dicts(f"optimizer group {n}", first["options"], second["options"])
                if set(first["parameters"]) != set(second["parameters"]):
                    texts.append(f"optimizer group {n}: different parameters")
    elif (saved_a is None) != (saved_b is None):
        texts.append(f"optimizer: only in {'B' if saved_a is None else 'A'}")
    texts += _compare_dicts("extra", a.manifest.extra, b.manifest.extra)
    of_a, of_b = a.manifest.semantics, b.manifest.semantics
    if of_a and of_b and of_a["modules"] and of_b["modules"]:  # other kinds have none
        diff = differences(from_json(of_a), from_json(of_b), set(a.names) ^ set(b.names))
        diff += user_differences(*(from_json(saved, user_defined=True) for saved in (of_a, of_b)))
        texts += format_differences((setting for setting in diff if setting.effect != "note"), "{} / {}")
    return texts


def _compare(report: Report, name: str, a: Lazy, b: Lazy, tick: Tick, rtol: float, atol: float) -> None:
    if a.shape != b.shape:
        report.differences.append(Difference(name, "shape", f"{a.shape} / {b.shape}"))
        return
    if a.dtype != b.dtype:
        report.differences.append(Difference(name, "dtype", f"{dtype_name(a.dtype)} / {dtype_name(b.dtype)}"))
    difference = Difference(name, "values")
    # Small ones, because in fp64 a block takes eight times the bytes of an fp8 one.
    for first, last in a.blocks(2 << 20):
        _add_block(difference, a.rows(first, last), b.rows(first, last), rtol, atol)
        tick(a.bytes // a.height * (last - first))
    report.compared += 1
    report.equal += not difference.elements
    if difference.elements:
        largest = f"max abs {difference.max_abs:.3g}, max rel {difference.max_rel:.3g}"
        difference.detail = f"{difference.elements} of {math.prod(a.shape)}, {largest}"
        report.differences.append(difference)


def _add_block(difference: Difference, a: torch.Tensor, b: torch.Tensor, rtol: float, atol: float) -> None:
    if a.dtype == b.dtype and torch.equal(a, b):
        return
    if not a.dtype.is_floating_point and a.dtype == b.dtype and a.dtype.itemsize == 8:
        a, b = a.to(torch.int64), b.to(torch.int64)  # fp64 would round them
        differs = a != b
    else:
        a, b = a.double(), b.double()
        # NaN and infinities on one side are beyond any tolerance.
        differs = ~torch.isclose(a, b, rtol=rtol, atol=atol, equal_nan=True)
    if not differs.any():
        return
    gap = (a - b).abs().double()[differs]
    largest = torch.maximum(a.abs(), b.abs()).double()[differs]
    gap = torch.where(gap.isfinite(), gap, torch.inf)
    relative = torch.where(gap.isfinite(), gap / largest, torch.inf)  # unequal, so that one is not 0
    difference.elements += int(differs.sum())
    difference.max_abs = max(difference.max_abs, float(gap.max()))
    difference.max_rel = max(difference.max_rel, float(relative.max()))


def _compare_dicts(label: str, a: dict[str, Any], b: dict[str, Any]) -> list[str]:
    texts = []
    for key in sorted({*a, *b}):
        if key not in a or key not in b:
            texts.append(f"{label}: {key} only in {'A' if key in a else 'B'}")
        elif a[key] != b[key]:
            texts.append(f"{label}: {key} is {a[key]} / {b[key]}")
    return texts
