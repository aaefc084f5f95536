"""Contents of a checkpoint of any kind, written as a checkpoint of te_fsdp, as safetensors or with ``torch.save``."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from te_fsdp.checkpoint.directory import new_directory
from te_fsdp.checkpoint.manifest import STACKS_EXPERTS, Tick, write_manifest
from te_fsdp.checkpoint.portable.contents import (
    MANIFEST_KEY,
    Contents,
    describe,
    open_checkpoint_contents,
    open_safetensors_contents,
    portable_name,
    portable_text,
    resolve,
    split_experts,
    stack_experts,
)
from te_fsdp.checkpoint.portable.lazy import InMemory, Lazy, cast
from te_fsdp.checkpoint.portable.optimizers import optimizer_state_dict
from te_fsdp.checkpoint.portable.safetensors import write_file, write_folder
from te_fsdp.checkpoint.portable.state_dicts import (
    Choices,
    open_dcp_contents,
    open_torch_contents,
    refuse_scrambled,
)
from te_fsdp.checkpoint.portable.torch_files import write_torch
from te_fsdp.checkpoint.writing import write_tensors
from te_fsdp.errors import CheckpointError

__all__ = [
    "Transform",
    "check_apart",
    "open_any",
    "transformed",
    "weights_only",
    "write_checkpoint",
    "write_pt",
    "write_safetensors",
]


def open_any(path: Path, choices: Choices | None = None) -> Contents:
    """Contents of whatever lies at a path. Local operation.

    A checkpoint of te_fsdp or the newest in a folder of them, safetensors, a file of ``torch.save``, or a plain DCP
    directory.

    Raises:
        CheckpointError: Nothing readable there, damaged, or not to be converted; names file and key.
    """
    where, kind = resolve(path)
    if kind == "safetensors":
        return open_safetensors_contents(where)
    if kind == "torch":
        return open_torch_contents(where, choices or Choices())
    if kind == "DCP":
        contents = open_dcp_contents(where, choices or Choices())
        refuse_scrambled(contents)
        return contents
    contents = open_checkpoint_contents(where)
    if contents.manifest.format_version < STACKS_EXPERTS:
        stack_experts(contents)
    return contents


def check_apart(source: Path, target: Path) -> None:
    """Raise where writing a target would write into its source, or replace it. Local operation.

    Args:
        source: What is read, a file or directory.
        target: What is to be written; links on the way are followed.
    """
    one, other = (Path(os.path.realpath(path)) for path in (source, target))
    same = one == other or (other.exists() and os.path.samefile(one, other))
    if same or one.is_relative_to(other) or other.is_relative_to(one):
        where = "the source itself" if same else "inside of it" if other.is_relative_to(one) else "around it"
        raise CheckpointError(
            f"{target}: cannot be written",
            expected=f"a path outside of the source {source}",
            got=where,
            why="The source would be changed while it is read, and be another checkpoint afterwards",
            fix="choose another target",
        )


@dataclass(frozen=True)
class Transform:
    """What becomes of the weights.

    Attributes:
        dtype: Of floating-point parameters in high precision; ``None``: as they are. Buffers stay as they are.
        dequantize: Whether quantized weights become high precision.
        weights: ``"compute"``, ``"auto"`` or ``"main"``, see :meth:`Contents.best_value`; the latter two dequantize.
    """

    dtype: torch.dtype | None = None
    dequantize: bool = False
    weights: str = "compute"


def transformed(contents: Contents, transform: Transform) -> tuple[Contents, dict[str, str]]:
    """Contents with other weights, and by name where each value comes from.

    Sources: ``"main"``, ``"dequantized"``, ``"stored"``, and ``"quantized"`` for what stays so.

    Raises:
        CheckpointError: A weight that is not there in the wanted form.
    """
    manifest = replace(contents.manifest, parameters=dict(contents.manifest.parameters), files={})
    tensors = {k: t for k, t in contents.tensors.items() if not k.startswith("model.")}
    sources: dict[str, str] = {}
    for name in contents.names:
        parts = contents.components(name)
        if parts is not None and not transform.dequantize:
            tensors |= {f"model.{name}:{part}": tensor for part, tensor in parts.items()}
            sources[name] = "quantized"
            continue
        value, sources[name] = contents.best_value(name, transform.weights)
        is_parameter = name in manifest.parameters
        if is_parameter and value.dtype.is_floating_point and transform.dtype not in (None, value.dtype):
            value = cast(value, transform.dtype)  # type: ignore[arg-type]
        tensors[f"model.{name}"] = value
        if is_parameter:
            layout = manifest.parameters[name].get("layout")
            manifest.parameters[name] = {**describe(value), "layout": layout}
    notes = list(contents.notes)
    if transform.dequantize and manifest.delayed:
        # A history belongs to a quantized weight's scale; activations get theirs in the first steps.
        notes.append(
            f"delayed-scaling state of {len(manifest.delayed)} module(s): left, weights are high precision"
        )
        manifest.delayed = {}
        tensors = {k: t for k, t in tensors.items() if not k.startswith("delayed.")}
    return Contents(contents.source, contents.kind, manifest, tensors, notes), sources


def weights_only(contents: Contents) -> Contents:
    """Contents without optimizer, extra and delayed-scaling state; notes what was left."""
    manifest, notes = contents.manifest, list(contents.notes)
    if manifest.optimizer is not None:
        notes.append(f"optimizer: left ({len(manifest.optimizer['state'])} states)")
    if manifest.extra:
        notes.append(f"extra: left ({', '.join(sorted(manifest.extra))})")
    if manifest.delayed:
        notes.append(f"delayed-scaling state of {len(manifest.delayed)} module(s): left")
    bare = replace(manifest, optimizer=None, extra={}, delayed={})
    tensors = {key: tensor for key, tensor in contents.tensors.items() if key.startswith("model.")}
    return Contents(contents.source, contents.kind, bare, tensors, notes)


def write_checkpoint(target: Path, contents: Contents, tick: Tick, *, force: bool = False) -> list[str]:
    """Write a checkpoint of te_fsdp, loadable on any mesh; it appears when it is whole. Returns its files.

    Raises:
        CheckpointError: Something lies at the target, or a tensor cannot be read or written.
    """
    with new_directory(target, force=force, needed=contents.bytes) as folder:
        manifest = write_tensors(folder, contents.tensors, tick, contents.manifest)
        write_manifest(folder, manifest)
    return sorted(manifest.files)


def write_safetensors(
    target: Path, contents: Contents, tick: Tick, *, shard_bytes: int, force: bool = False
) -> list[str]:
    """Write a ``.safetensors`` file, or a folder with shards and their index. Returns the files.

    Raises:
        CheckpointError: See :func:`write_checkpoint`; also a dtype that safetensors lacks.
    """
    tensors = {portable_name(key): tensor for key, tensor in contents.tensors.items()}
    metadata = {MANIFEST_KEY: portable_text(contents.manifest)}
    needed = contents.bytes
    if target.suffix == ".safetensors":
        with new_directory(target, force=force, needed=needed, is_file=True) as file:
            write_file(file, tensors, metadata, tick)
        return [target.name]
    with new_directory(target, force=force, needed=needed) as folder:
        return write_folder(folder, tensors, metadata, tick, shard_bytes)


def write_pt(
    target: Path, contents: Contents, tick: Tick, *, everything: bool, force: bool = False
) -> list[str]:
    """Write a file with ``torch.save``: a state dict, or a dict with it, the optimizer's, and the rest.

    The state dict has the entries ``_extra_state`` that stock modules want, empty, and a weight for each expert.
    With ``everything`` the file is ``{"model": ..., "optimizer": ..., "te_fsdp": ...}``; the last is what te_fsdp
    needs to read it back.

    Raises:
        CheckpointError: See :func:`write_checkpoint`.
    """
    contents = split_experts(contents)
    objects: dict[str, Any] = _state_dict(contents)
    if everything:
        rest = {
            portable_name(key): tensor
            for key, tensor in contents.tensors.items()
            if not key.startswith(("model.", "optimizer."))
        }
        objects = {
            "model": objects,
            MANIFEST_KEY: {"manifest": portable_text(contents.manifest), "tensors": rest},
        }
        optimizer = optimizer_state_dict(contents)
        if optimizer is not None:
            objects["optimizer"] = optimizer
    with new_directory(target, force=force, needed=contents.bytes, is_file=True) as file:
        write_torch(file, objects, tick)
    return [target.name]


def _state_dict(contents: Contents) -> dict[str, Lazy]:
    tensors = {k: t for k, t in contents.tensors.items() if k.startswith("model.")}
    state: dict[str, Lazy] = {portable_name(key): tensor for key, tensor in tensors.items()}
    for name, first in contents.manifest.tied.items():
        same = {k: t for k, t in state.items() if k.partition(":")[0] == first}
        state |= {name + key.removeprefix(first): tensor for key, tensor in same.items()}
    for module in contents.manifest.extra_states:
        state[f"{module}._extra_state".lstrip(".")] = InMemory(
            torch.empty(0, dtype=torch.uint8, device="cpu")
        )
    return state
