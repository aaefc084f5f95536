"""Bodies: optimizers whose kernels read options in device memory."""

from __future__ import annotations

import copy
from typing import Any

import harness
import torch
from torch import nn
from torch.distributed.checkpoint import state_dict as torch_state_dict


def resumed(sharder: str, main_weights: bool, by: str) -> dict[str, Any]:
    """Return what differs after a step of a job that resumes from a state dict on the CPU, and devices of options."""
    job, other = _job(sharder, main_weights, 3), _job(sharder, main_weights, 4)
    rates = set[str]()
    job[1].register_step_pre_hook(
        lambda optimizer, *_: rates.update(group["lr"].device.type for group in optimizer.param_groups)
    )
    torch_state_dict.get_state_dict(*job)  # takes a step without gradients: the optimizer has no state
    _step(*job)
    options = torch_state_dict.StateDictOptions(full_state_dict=by == "full")
    model, optimizer = torch_state_dict.get_state_dict(*job, options=options)
    torch_state_dict.set_state_dict(
        *other,
        model_state_dict=model,
        optim_state_dict=_with_options_on_the_cpu(optimizer),
        options=options,
    )
    devices = {v.device.type for group in other[1].param_groups for v in group.values() if torch.is_tensor(v)}
    before = [harness.full(p.detach()).clone() for p in other[0].parameters()]
    _step(*job)
    _step(*other)
    after = [[harness.full(p.detach()) for p in model.parameters()] for model, _ in (job, other)]
    return {
        "equal": sum(map(torch.equal, *after)),
        "moved": sum(not torch.equal(v, w) for v, w in zip(before, after[1], strict=True)),
        "options": sorted(devices),
        "rates": sorted(rates),
    }


def _with_options_on_the_cpu(saved: dict[str, Any]) -> dict[str, Any]:
    saved = copy.deepcopy(saved)
    for group in saved["param_groups"]:
        group |= {key: v.cpu() for key, v in group.items() if isinstance(v, torch.Tensor)}
    return saved


def _job(sharder: str, main_weights: bool, seed: int) -> tuple[nn.Module, Any]:
    import transformer_engine.pytorch as te
    from transformer_engine.pytorch.optimizers import FusedAdam

    import te_fsdp

    dtype = torch.bfloat16 if main_weights else torch.float32
    meshes = te_fsdp.Meshes.build(dp_shard=2, device_type=harness.device_type())
    options = {"bias": False, "params_dtype": dtype, "device": "meta"}
    model = nn.Sequential(te.Linear(32, 32, **options), te.Linear(32, 32, **options))
    if sharder == "te_fsdp":
        te_fsdp.fully_shard(model, meshes)
    else:
        te_fsdp.set_device_mesh(model, meshes.tp, meshes.weight)
        torch.distributed.fsdp.fully_shard(model, mesh=meshes.fsdp)
    te_fsdp.materialize(model, seed=seed)
    optimizer = FusedAdam(model.parameters(), lr=2**-4, capturable=True, master_weights=main_weights)
    if main_weights:
        te_fsdp.main_weights(model, optimizer)
    return model, optimizer


def _step(model: nn.Module, optimizer: Any) -> None:
    x = torch.ones(4, 32, device=harness.device(), dtype=next(model.parameters()).dtype)
    model(x).float().square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
