"""``save``: every rank writes its own pieces into a hidden directory; when all have, it becomes visible."""

from __future__ import annotations

import hashlib
import logging
import os
import time
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor import DTensor

import te_fsdp
from te_fsdp import _te
from te_fsdp.checkpoint import directory as directories
from te_fsdp.checkpoint.collective import all_agree, from_rank_0, gather, rank, world_size
from te_fsdp.checkpoint.entries import Entry
from te_fsdp.checkpoint.extra import encode
from te_fsdp.checkpoint.manifest import DCP_METADATA, Manifest, checksum, write_manifest
from te_fsdp.checkpoint.model_state import (
    ModelState,
    delayed_state,
    model_state,
    share_newest_amax,
    shorten,
)
from te_fsdp.checkpoint.optimizer_state import OptimizerState, check_scaled_state, optimizer_state
from te_fsdp.checkpoint.planner import write_entries
from te_fsdp.checkpoint.progress import bytes_bar
from te_fsdp.errors import CheckpointError, message
from te_fsdp.sharding.optimizer import check_optimizer

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

__all__ = ["save"]

_log = logging.getLogger("te_fsdp")


def save(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Optimizer | None = None,
    *,
    extra: Mapping[str, Any] | None = None,
    progress: bool | None = None,
) -> None:
    """Save a model, its optimizer and what else a run needs, loadable on any mesh.

    The files hold every parameter and optimizer state in the layout of the unsharded module, each element
    once. The checkpoint appears at ``path`` only when it is whole and on disk: a killed save leaves a hidden
    directory that a later save removes.

    Collective over the world: call on all ranks, between steps. All ranks must reach the directory.

    Args:
        path: Where the checkpoint shall lie; a directory per checkpoint, for example ``DIR/step-200``.
            Nothing may lie there yet but an empty directory.
        model: Any model; FSDP2 units that are gathered are resharded first.
        optimizer: torch's or TE's FusedAdam, over the model's current parameters.
        extra: Plain values and tensors (step, position in the data); rank 0's are kept.
        progress: Draw a progress bar on rank 0.

    Raises:
        CheckpointError: Something lies at ``path``, ranks disagree on the model or on values that they must
            share, something cannot be stored, or a rank failed to write. All ranks raise the same; nothing
            appears at ``path``.
        OrderError: The optimizer was built before the model was sharded.
    """
    target = Path(os.path.abspath(path))
    began = time.perf_counter()
    state, optimized, delayed, extra_json, extra_entries = all_agree(
        lambda: _collect(model, optimizer, extra)
    )
    _check_same_model(state, optimized, delayed[0])
    share_newest_amax(delayed[1])
    entries = {**state.entries, **(optimized.entries if optimized else {}), **delayed[1]}
    _check_same_values(entries)
    if rank() == 0:
        entries |= extra_entries
    temporary = from_rank_0(lambda: directories.begin(target))
    with bytes_bar(f"saving {target.name}", sum(e.bytes for e in entries.values()), progress) as tick:
        write_entries(temporary, entries, tick)
    manifest = Manifest(
        versions=_versions(),
        mesh=_mesh_sizes(model),
        saved_at=time.time_ns(),
        parameters=state.described,
        buffers=state.buffers,
        delayed=delayed[0],
        optimizer=optimized.described if optimized else None,
        extra=extra_json,
    )
    _finish(temporary, target, manifest)
    _log.info("saved %s in %.2f s", target, time.perf_counter() - began)


def _collect(
    model: nn.Module, optimizer: Optimizer | None, extra: Mapping[str, Any] | None
) -> tuple[ModelState, OptimizerState | None, tuple[dict[str, Any], dict[str, Entry]], Any, dict[str, Entry]]:
    """Everything that is local, with all the errors that a rank can have."""
    extra_json, extra_entries = encode(dict(extra or {}))
    state = model_state(model)
    optimized = None
    if optimizer is not None:
        check_optimizer(model, optimizer)
        check_scaled_state(optimizer)
        optimized = optimizer_state(optimizer, state.owned)
    return state, optimized, delayed_state(model), extra_json, extra_entries


def _check_same_model(state: ModelState, optimized: OptimizerState | None, delayed: dict[str, Any]) -> None:
    """All ranks must describe the same model and optimizer. Collective over the world."""
    parts = {
        "parameters": state.described,
        "buffers": state.buffers,
        "optimizer": optimized.described if optimized else None,
        "delayed-scaling state": delayed,
    }
    digests = gather({name: _digest(repr(part).encode()) for name, part in parts.items()})
    for name in parts:
        others = [r for r, seen in enumerate(digests) if seen[name] != digests[0][name]]
        if others:
            raise CheckpointError(
                message(
                    f"save: {name} of the model",
                    expected="the same names, shapes, formats and options on all ranks",
                    got=f"rank(s) {', '.join(map(str, others))} differ from rank 0",
                    fix="build model and optimizer alike on all ranks",
                )
            )


def _check_same_values(entries: dict[str, Entry]) -> None:
    """What is written once for all ranks must be the same on all of them. Collective over the world."""
    if world_size() == 1:
        return
    mine = {k: _digest(_bytes_of(e.pieces[0].tensor)) for k, e in entries.items() if e.same_everywhere}
    seen = gather(mine)
    differ = [key for key in mine if len({digests[key] for digests in seen}) > 1]
    if differ:
        raise CheckpointError(
            message(
                f"save: {len(differ)} tensor(s) differ between ranks that must hold the same: {shorten(differ)}",
                expected="equal values on all ranks",
                got="differing ones",
                why="The files hold one of them, and the others would be lost",
                fix="shard the model with te_fsdp.fully_shard; let the recipe reduce amaxes over all ranks",
            )
        )


def _bytes_of(tensor: torch.Tensor) -> bytes:
    # A copy: "contiguous" tensors of one element may have any stride, which views as bytes refuse.
    flat = tensor.detach().reshape(-1).clone(memory_format=torch.contiguous_format)
    return flat.cpu().view(torch.uint8).numpy().tobytes()


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=8).digest()


def _finish(temporary: Path, target: Path, manifest: Manifest) -> None:
    """List the files, write the manifest, make the checkpoint visible. Collective over the world."""
    listed = gather(all_agree(lambda: _own_files(temporary)))

    def commit() -> None:
        manifest.files = {name: values for files in listed for name, values in files.items()}
        absent = [name for name in manifest.files if not (temporary / name).is_file()]
        if absent:
            raise CheckpointError(
                message(
                    f"{temporary}: rank 0 does not see {shorten(absent)}",
                    expected="a directory that all ranks share",
                    fix="save onto a file system that all nodes mount",
                )
            )
        write_manifest(temporary, manifest)
        directories.commit(temporary, target)

    from_rank_0(commit)


def _own_files(temporary: Path) -> dict[str, list[int]]:
    """Bytes and checksum of the files that this rank wrote (DCP names them ``__<rank>_<number>.distcp``)."""
    names = [p.name for p in temporary.glob(f"__{rank()}_*")]
    names += [DCP_METADATA] if rank() == 0 else []
    return {name: [(temporary / name).stat().st_size, checksum(temporary / name)] for name in names}


def _versions() -> dict[str, str]:
    versions = {"te_fsdp": te_fsdp.__version__, "torch": torch.__version__}
    if _te.is_loaded():
        versions["transformer_engine"] = metadata.version("transformer_engine")
    return versions


def _mesh_sizes(model: nn.Module) -> dict[str, int]:
    """World size and the axes of the widest mesh among the parameters."""
    meshes = [p.device_mesh for p in model.parameters() if isinstance(p, DTensor)]
    sizes = {"ranks": world_size()}
    if meshes:
        mesh = max(meshes, key=lambda m: m.ndim)
        names = mesh.mesh_dim_names or tuple(f"axis{i}" for i in range(mesh.ndim))
        sizes |= dict(zip(names, (int(s) for s in mesh.shape), strict=True))
    return sizes
