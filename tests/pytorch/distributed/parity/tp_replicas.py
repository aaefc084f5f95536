"""Bodies: parameters that tp replicates. They stay equal although the last bits of their gradients differ."""

from __future__ import annotations

import contextlib
from typing import Any

import harness
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from parity.models import KINDS, Build

STEPS = 3


def training(
    axes: dict[str, int], optimizer: str, *, wrap: str = "te_fsdp", watched: bool = True
) -> dict[str, Any]:
    """Train with gradients that differ slightly between ranks, as atomic additions make them.

    Args:
        axes: mesh sizes.
        optimizer: "adamw", or "fused" for TE's with bf16 parameters and fp32 main weights.
        wrap: "te_fsdp" for its fully_shard, "tp" for set_device_mesh alone.
        watched: negative control if not, gradients stay as each rank has them.

    Returns:
        Names of replicated parameters and states, and of those that differ between tp ranks.
    """
    import te_fsdp
    from te_fsdp import lifecycle
    from te_fsdp.upstream import torch_dtensor as _torch

    model, meshes = _model(axes, optimizer, wrap)
    steps = _optimizer(optimizer, model)
    watch = contextlib.nullcontext() if watched else _without(lifecycle)
    generator = torch.Generator().manual_seed(dist.get_rank())
    with watch:
        for _ in range(STEPS):
            for parameter in model.parameters():
                local = torch.ones(_torch.local_of(parameter).shape)
                local += 1e-3 * torch.randn(local.shape, generator=generator)
                parameter.grad = _like(local.to(parameter.dtype).to(harness.device()), parameter)
            te_fsdp.clip_grad_norm_(model, 1.0)
            steps.step()
    before = _differing(model, steps, meshes)
    te_fsdp.broadcast_params(model, steps)
    return {**before, "after broadcast": _differing(model, steps, meshes)["differ"]}


def _model(axes: dict[str, int], optimizer: str, wrap: str) -> tuple[torch.nn.Module, Any]:
    import te_fsdp

    meshes = te_fsdp.Meshes.build(**axes, device_type=harness.device_type())
    torch.manual_seed(3)
    model = KINDS["language_model"](Build(harness.device(), **meshes.te_kwargs())).module
    if optimizer == "fused":
        model = model.bfloat16()
    if wrap == "te_fsdp":
        te_fsdp.fully_shard(model, meshes)
    else:
        te_fsdp.set_device_mesh(model, tp_mesh=meshes.tp, weight_mesh=meshes.weight)
    return model, meshes


def _optimizer(name: str, model: torch.nn.Module) -> torch.optim.Optimizer:
    if name == "adamw":
        return torch.optim.AdamW(model.parameters(), lr=1e-2)
    from transformer_engine.pytorch.optimizers import FusedAdam

    return FusedAdam(model.parameters(), lr=1e-2, master_weights=True)


def _like(local: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    if not isinstance(parameter, DTensor):
        return local
    mesh, shape, stride = parameter.device_mesh, parameter.shape, parameter.stride()
    return DTensor.from_local(local, mesh, parameter.placements, run_check=False, shape=shape, stride=stride)


@contextlib.contextmanager
def _without(lifecycle: Any) -> Any:
    """Take nothing over."""
    stock, lifecycle.broadcast_tp_gradients = lifecycle.broadcast_tp_gradients, lambda parameters: None
    try:
        yield
    finally:
        lifecycle.broadcast_tp_gradients = stock


def _differing(model: torch.nn.Module, optimizer: torch.optim.Optimizer, meshes: Any) -> dict[str, list[str]]:
    """Compare what tp ranks replicate. Collective over tp."""
    from te_fsdp.upstream import torch_dtensor as _torch

    group, size = meshes.tp.get_group(), meshes.tp.size()
    results: dict[str, list[str]] = {"whole": [], "differ": []}
    for name, parameter in model.named_parameters():
        if not parameter.placements[-1].is_replicate():
            continue
        states = optimizer.state[parameter].items()
        tensors = {
            name: parameter,
            **{f"{name}.{k}": s for k, s in states if isinstance(s, torch.Tensor) and s.ndim},
        }
        for label, tensor in tensors.items():
            local = _torch.local_of(tensor.detach()).contiguous()
            everyone = [torch.empty_like(local) for _ in range(size)]
            dist.all_gather(everyone, local, group=group)
            results["whole"].append(label)
            if any(not torch.equal(other, local) for other in everyone):
                results["differ"].append(label)
    return results
