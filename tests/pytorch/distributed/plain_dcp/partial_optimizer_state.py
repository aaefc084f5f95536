"""Bodies: optimizers whose state of some parameters, or of all, is a main weight alone."""

from __future__ import annotations

import copy
import shutil
import tempfile
from typing import Any

import harness
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict


def without_momentum(outer: str) -> dict[str, Any]:
    """Resume SGD with main weights only, from plain DCP in a new job and from its own state dict."""
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(folder, 0)
    job, other = _job("SGD", outer, 3), _job("SGD", outer, 4)
    _step(*job)
    job[1].load_state_dict(job[1].state_dict())
    model, optimizer = get_state_dict(*job)
    dcp.save({"model": model, "optimizer": optimizer}, checkpoint_id=folder[0])
    model, optimizer = get_state_dict(*other)
    dcp.load({"model": model, "optimizer": optimizer}, checkpoint_id=folder[0])
    set_state_dict(*other, model_state_dict=model, optim_state_dict=optimizer)
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(folder[0])
    return _equal_after_a_step(job, other)


def load_with_unstepped_parameter(outer: str) -> dict[str, Any]:
    """Load the state dict of a trained optimizer, with a parameter that never stepped, into a new one."""
    job, other = _job("AdamW", outer, 3), _job("AdamW", outer, 4)
    for model, _ in (job, other):
        model[1].requires_grad_(False)
    _step(*job)
    other[0].load_state_dict(job[0].state_dict())
    other[1].load_state_dict(copy.deepcopy(job[1].state_dict()))
    for model, _ in (job, other):
        model[1].requires_grad_(True)
    return _equal_after_a_step(job, other)


def frozen_when_loaded(outer: str, by: str) -> dict[str, Any]:
    """Freeze a layer before its optimizer loads the state of a trained one, and train it afterwards."""
    import te_fsdp

    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(folder, 0)
    job, other = _job("AdamW", outer, 3), _job("AdamW", outer, 4, frozen=True)
    _step(*job)
    if by == "state_dict":
        other[0].load_state_dict(job[0].state_dict())
        other[1].load_state_dict(copy.deepcopy(job[1].state_dict()))
    else:
        te_fsdp.checkpoint.save(f"{folder[0]}/saved", *job)
        te_fsdp.checkpoint.load(f"{folder[0]}/saved", *other)
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(folder[0])
    other[0].requires_grad_(True)
    return _equal_after_a_step(job, other)


def refused(outer: str) -> str:
    """Return the error if DCP has filled only the main weights of a fresh optimizer."""
    return _error_of_own_state(_job("AdamW", outer, 3)[1])


def _error_of_own_state(optimizer: Any) -> str:
    """Load an optimizer's own state dict; return the error, or nothing."""
    try:
        optimizer.load_state_dict(optimizer.state_dict())
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def _job(kind: str | type, outer: str, seed: int, *, frozen: bool = False) -> tuple[nn.Module, Any]:
    import transformer_engine.pytorch as te

    import te_fsdp

    meshes = te_fsdp.Meshes.build(dp_replicate=2, device_type=harness.device_type())
    options = {"bias": False, "params_dtype": torch.bfloat16, "device": "meta"}
    model = nn.Sequential(te.Linear(32, 32, **options), te.Linear(32, 32, **options))
    model[1].requires_grad_(not frozen)
    te_fsdp.fully_shard(model, meshes, outer_strategy=outer)
    te_fsdp.materialize(model, seed=seed)
    if isinstance(kind, str):
        kind = getattr(torch.optim if hasattr(torch.optim, kind) else te.optimizers, kind)
    optimizer: Any = kind(model.parameters(), lr=2**-4)
    te_fsdp.main_weights(model, optimizer)
    return model, te_fsdp.shard_optimizer(optimizer)


def _step(model: nn.Module, optimizer: Any) -> None:
    x = torch.ones(4, 32, device=harness.device(), dtype=torch.bfloat16)
    model(x).float().square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def _equal_after_a_step(one: tuple[nn.Module, Any], other: tuple[nn.Module, Any]) -> dict[str, Any]:
    before = [harness.full(p) for p in other[0].parameters()]
    _step(*one)
    _step(*other)
    mains = [
        [harness.full(opt.state[p]["master_param"]) for p in model.parameters()]
        for model, opt in (one, other)
    ]
    return {
        "equal": sum(map(torch.equal, *mains)),
        "moved": sum(
            not torch.equal(harness.full(p), v) for p, v in zip(other[0].parameters(), before, strict=True)
        ),
    }
