"""Bodies: loads of state dicts in a different form, such as ordinary DTensors into quantized weights."""

from __future__ import annotations

from typing import Any

import harness
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import distribute_tensor

from plain_dcp.round_trip import Job, differing, to_full


def quantized_copies(recipe: str, axes: dict[str, int], sharder: str) -> dict[str, Any]:
    """Copy DTensors into quantized parameters, and compare with the same copies in stock TE's module."""
    from plain_dcp.round_trip import Model

    job = Job("gated MLP", recipe, axes, sharder, False, seed=4)
    stock = Model("gated MLP", recipe, keep=False, device=str(harness.device()))
    generator, before = torch.Generator().manual_seed(1), job.output()
    with torch.no_grad():
        for parameter, own in zip(job.model.parameters(), stock.parameters(), strict=True):
            values = torch.randn(own.shape, generator=generator).to(harness.device(), torch.bfloat16)
            own.copy_(values)
            parameter.copy_(distribute_tensor(values, parameter.device_mesh, parameter.placements))
    results = {name: to_full(p) for name, p in job.model.named_parameters()}
    expected = {name: to_full(p) for name, p in stock.named_parameters()}
    size = (32, 4, 512)
    batch = torch.randn(size, generator=torch.Generator().manual_seed(7)).to(harness.device(), torch.bfloat16)
    with torch.no_grad():
        error = (job.output() - stock(batch).float()).abs().max() / (before - job.output()).abs().max()
    return {"wrong": differing(results, expected), "error": float(error)}


def flat_states(source: str, target: str, directory: str) -> dict[str, Any]:
    """Load the flattened optimizer state of one form of experts into the other, with the options of the group."""
    one, other = (Job(kind, "bf16", {"dp_shard": 2}, "torch", False, seed=3) for kind in (source, target))
    flat = StateDictOptions(flatten_optimizer_state_dict=True)
    one.step(0)
    one.optimizer.param_groups[0]["lr"] = 0.5
    dcp.save(get_optimizer_state_dict(one.model, one.optimizer, options=flat), checkpoint_id=directory)
    state = get_optimizer_state_dict(other.model, other.optimizer, options=flat)
    dcp.load(state, checkpoint_id=directory)
    set_optimizer_state_dict(other.model, other.optimizer, state, options=flat)
    states = [{k: v for k, v in job.values().items() if "exp_avg" in k} for job in (one, other)]
    return {
        "wrong": differing(*states),
        "states": len(states[0]),
        "lr": other.optimizer.param_groups[0]["lr"],
    }


def broadcast_experts(axes: dict[str, int]) -> list[str]:
    """Load rank 0's unsharded tensors with ``cpu_offload``, and return the names of wrong tensors."""
    one, other = (Job("experts", "bf16", axes, "te_fsdp", False, seed) for seed in (3, 4))
    full = get_model_state_dict(one.model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    options = StateDictOptions(full_state_dict=True, cpu_offload=True, broadcast_from_rank0=True)
    set_model_state_dict(other.model, full, options=options)
    values = [{name: to_full(p) for name, p in job.model.named_parameters()} for job in (one, other)]
    return differing(*values)
