"""Bodies: DCP's unsharded state dicts of an optimizer whose rows several axes shard unevenly."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest import mock

import harness
import torch
import torch.distributed as dist
from plain_dcp import uneven_shards
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)


def _trained(axes: dict[str, int], steps: int) -> tuple[Any, Any]:
    import transformer_engine.pytorch as te

    import te_fsdp

    meshes = te_fsdp.Meshes.build(**axes, device_type=harness.device_type())
    size = {"params_dtype": torch.float32, "device": "meta", "bias": False}
    parallel = {"set_parallel_mode": True, **meshes.te_kwargs()} if meshes.size("tp") > 1 else {}
    model = te.LayerNormMLP(5, 10, activation="swiglu", **size, **parallel)
    outer = "optim" if meshes.size("dp_replicate") > 1 else "no_shard"
    te_fsdp.fully_shard(model, meshes, outer_strategy=outer)
    te_fsdp.materialize(model, seed=0)
    optimizer = te_fsdp.shard_optimizer(torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-2))
    for step in range(steps):
        x = torch.randn(4, 5, generator=torch.Generator().manual_seed(step)).to(harness.device())
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def round_trip(axes: dict[str, int], flat: bool) -> list[str]:
    """Compare full states with those of a mesh without replicas, and load them: the differences."""
    model, optimizer = _trained(axes, 2)
    reference, other = _trained({"tp": axes.get("tp", 1)}, 2)
    options = StateDictOptions(full_state_dict=True, flatten_optimizer_state_dict=flat)
    whole = StateDictOptions(full_state_dict=True)
    states = get_optimizer_state_dict(model, optimizer, options=options)
    expected = get_optimizer_state_dict(reference, other, options=whole)["state"]
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    different = []
    for name, state in expected.items():
        for key in ("exp_avg", "exp_avg_sq"):
            value = states[f"state.{name}.{key}"] if flat else states["state"][name][key]
            # Means of gradients of other numbers of ranks, which have the same data, round differently.
            if value.shape != shapes[name] or not torch.allclose(value, state[key], rtol=1e-4, atol=1e-7):
                different.append(f"{key} of {name}: {tuple(value.shape)}")
    # torch cannot load flat states with ``full_state_dict=True`` (docs/upstream.md).
    for broadcast in () if flat else (False, True):
        new, its = _trained(axes, 0)
        given = states if not broadcast or dist.get_rank() == 0 else {}
        loading = replace(options, broadcast_from_rank0=broadcast)
        set_optimizer_state_dict(new, its, given, options=loading)
        again = get_optimizer_state_dict(new, its, options=options)
        if set(_tensors(states)) != set(_tensors(again)):
            different.append("names after loading")
        for key, value in _tensors(states).items():
            if not torch.equal(value, _tensors(again)[key]):
                different.append(f"{key} after loading, broadcast={broadcast}")
    return different


def _tensors(states: dict[str, Any], prefix: str = "") -> dict[str, torch.Tensor]:
    """Return the tensors of nested states."""
    found = {}
    for key, value in states.items():
        if isinstance(value, dict):
            found |= _tensors(value, f"{prefix}{key}.")
        elif isinstance(value, torch.Tensor):
            found[prefix + key] = value
    return found


def padded(copies: int, outer: str) -> dict[str, Any]:
    """Load full states as they were before they had the shapes of the parameters."""
    with mock.patch("te_fsdp.features.full_states.is_padded", return_value=False):
        return uneven_shards.resumed(copies, outer, full=True)
