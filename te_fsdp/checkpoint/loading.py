"""``load``: compare checkpoint, model and optimizer, report every difference at once, only then read."""

from __future__ import annotations

import logging
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from te_fsdp import _te, _torch
from te_fsdp.checkpoint import directory as directories
from te_fsdp.checkpoint.collective import all_agree, from_rank_0, mesh_sizes, rank
from te_fsdp.checkpoint.compare import Differences, check_metadata, compare_model
from te_fsdp.checkpoint.extra import decode, for_rank, tensor_slots
from te_fsdp.checkpoint.manifest import Manifest
from te_fsdp.checkpoint.model_state import (
    ModelState,
    make_delayed,
    missing_modules,
    model_state,
    reset_delayed,
    shorten,
)
from te_fsdp.checkpoint.optimizer_state import (
    check_scaled_state,
    compare_optimizer,
    prepare_loading,
    restore_groups,
)
from te_fsdp.checkpoint.planner import read_entries
from te_fsdp.checkpoint.retention import in_use
from te_fsdp.checkpoint.verifying import verify_together
from te_fsdp.errors import CheckpointError, message
from te_fsdp.sharding.optimizer import check_optimizer

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

__all__ = ["load"]

_log = logging.getLogger("te_fsdp")


def load(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Optimizer | None = None,
    *,
    strict: bool = True,
    verify: bool = False,
) -> dict[str, Any]:
    """Load a checkpoint into a model and its optimizer, in place, whatever mesh it was saved on.

    First compares the checkpoint with model and optimizer; on any difference nothing is changed. Optimizer
    state that does not exist yet is allocated. Collective over the world: call on all ranks. All ranks must
    reach the directory.

    Args:
        path: A checkpoint that :func:`te_fsdp.checkpoint.save` wrote.
        model: The model on its device, sharded or not; what its parameters hold is overwritten.
        optimizer: Over the model's current parameters; its group options are overwritten by the saved ones.
            ``None``: saved optimizer state is not read.
        strict: Whether everything must fit. ``False``: tensors that differ or are missing are left as they
            are and named in a warning; the optimizer is loaded only if all of it fits.
        verify: Read all files once before, and compare their checksums; each is read by one rank. Otherwise
            the manifest, DCP's metadata and the sizes of the files are checked.

    Returns:
        What ``save`` was given as ``extra``, tensors on the CPU. Values per rank come as this rank's, or, on
        another mesh, as ``None`` with a warning.

    Raises:
        CheckpointError: No checkpoint there, a damaged one, or one that differs (all differences in one
            text). All ranks raise the same.
        OrderError: The optimizer was built before the model was sharded.
    """
    source = Path(os.path.abspath(path))
    with in_use(source):
        return _load(source, model, optimizer, strict, verify)


def _load(
    source: Path, model: nn.Module, optimizer: Optimizer | None, strict: bool, verify: bool
) -> dict[str, Any]:
    began = time.perf_counter()
    manifest = from_rank_0(lambda: directories.open_checkpoint(source))
    if verify:
        verify_together(source, manifest)
    state, found = all_agree(lambda: _compare(source, manifest, model, optimizer))
    found = found.over_all_ranks()
    if found and strict:
        raise CheckpointError(_does_not_fit(source, manifest, found))
    if found:
        _log.warning("%s: loaded in part; left as it was: %s", source, "; ".join(found.texts()))
    names = ((manifest.parameters.keys() | manifest.buffers.keys()) & state.keys.keys()) - found.names()
    entries = {key: state.entries[key] for name in names for key in state.keys[name]}
    saved_optimizer = None if found.optimizer else manifest.optimizer
    if optimizer is not None and saved_optimizer is not None:
        entries |= prepare_loading(optimizer, saved_optimizer, state.owned)
    delayed = {n: d for n, d in manifest.delayed.items() if n not in missing_modules(model, manifest.delayed)}
    entries |= make_delayed(model, delayed)
    extra, homeless = for_rank(manifest.extra, manifest.mesh, mesh_sizes(model), rank())
    slots = tensor_slots(extra)
    read_entries(source, {**entries, **slots})
    reset_delayed(model, keep=set(delayed))
    state.finish_loading(names)
    if optimizer is not None and saved_optimizer is not None:
        restore_groups(optimizer, saved_optimizer)
    elif optimizer is not None:
        _refresh_main_weights(optimizer, state, names)
    _log.info("loaded %s in %.2f s", source, time.perf_counter() - began)
    if homeless:
        _log.warning(
            "%s: values per rank were saved on another mesh, so they are None: %s", source, shorten(homeless)
        )
    return decode(extra, slots)


def _compare(
    source: Path, manifest: Manifest, model: nn.Module, optimizer: Optimizer | None
) -> tuple[ModelState, Differences]:
    """Everything that one rank can find out; changes nothing."""
    check_metadata(source, manifest)
    state = model_state(model)
    found = compare_model(manifest, state)
    for name in missing_modules(model, manifest.delayed):
        found.add("with delayed-scaling state for a module that the model lacks", name)
    if optimizer is None:
        return state, found
    check_optimizer(model, optimizer)
    check_scaled_state(optimizer)
    if manifest.optimizer is None:
        found.optimizer.append("optimizer: none in the checkpoint")
    else:
        found.optimizer += compare_optimizer(optimizer, manifest.optimizer, state.owned)
    return state, found


def _does_not_fit(source: Path, manifest: Manifest, found: Differences) -> str:
    mesh = ", ".join(f"{axis}={size}" for axis, size in manifest.mesh.items())
    return message(
        f"{source} does not fit: {'; '.join(found.texts())}",
        why=f"Nothing was loaded (saved on {mesh} by te_fsdp {manifest.versions.get('te_fsdp')})",
        fix="build model and optimizer as they were saved, or load(..., strict=False) to take what fits",
    )


def _refresh_main_weights(optimizer: Optimizer, state: ModelState, names: set[str]) -> None:
    """Main weights of an optimizer that was not loaded follow the weights, lest its step undo the load."""
    for name in names & state.owned.keys():
        owned = state.owned[name]
        main = optimizer.state.get(owned.parameter, {}).get("master_param")
        if main is None:
            continue
        local = owned.local.dequantize() if _te.is_quantized(owned.local) else owned.local
        if _torch.local_of(main).dtype == torch.int16:
            optimizer.state.pop(owned.parameter)  # remainders mean nothing beside other weights
        else:
            _torch.local_of(main).copy_(local.detach())
