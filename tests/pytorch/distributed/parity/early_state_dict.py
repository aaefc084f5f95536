"""Bodies: state dicts from before the first forward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import harness
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)

import te_fsdp

#: How a script holds a parameter.
HELD: dict[str, Callable[[nn.Module, str], Any]] = {
    "state_dict": lambda model, name: model.state_dict()[name],
    "detach": lambda model, name: dict(model.named_parameters())[name].detach(),
}


def _model(sharder: str, rows: int) -> nn.Module:
    import transformer_engine.pytorch as te

    meshes = te_fsdp.Meshes.build(device_type=harness.device_type())
    options = {"bias": False, "params_dtype": torch.float32, "device": "meta"}
    model = nn.Sequential(te.Linear(16, rows, **options), nn.Linear(rows, 5, device="meta"))
    if sharder == "te_fsdp":
        te_fsdp.fully_shard(model, meshes, units=["0"])
    else:
        te_fsdp.set_device_mesh(model, None, meshes.device_mesh["dp_shard"])
        for layer in (model[0], model):
            torch.distributed.fsdp.fully_shard(layer, mesh=meshes.device_mesh["dp_shard"])
    return te_fsdp.materialize(model, seed=0)


def untracked_parameters(sharder: str, rows: int) -> list[str]:
    """Train for a step. Return the parameters that earlier state dicts do not show."""
    found = []
    for how, hold in HELD.items():
        model = _model(sharder, rows)
        names = [name for name, _ in model.named_parameters()]
        entries = {name: hold(model, name) for name in names}
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model(torch.randn(4, 16, device=harness.device())).square().mean().backward()
        optimizer.step()
        for name, parameter in model.named_parameters():
            if not torch.equal(entries[name].to_local(), parameter.to_local()):
                found.append(f"{how}: {name}")
    return found


def loaded_values(how: str, recipe: str, directory: str) -> dict[str, list[str]]:
    """Load BF16 values into quantized weights on (dp_shard, tp). Return weights unlike those of one process."""
    import transformer_engine.pytorch as te
    from transformer_engine.common import recipe as recipes

    meshes = te_fsdp.Meshes.build(tp=2, device_type=harness.device_type())
    format_ = {"current": recipes.Float8CurrentScaling, "delayed": recipes.DelayedScaling}[recipe]()
    options = {
        "activation": "swiglu",
        "bias": False,
        "params_dtype": torch.bfloat16,
        "device": harness.device(),
    }

    def quantized(**more: Any) -> nn.Module:
        with te.quantized_model_init(recipe=format_):
            return te.LayerNormMLP(32, 64, **options, **more)

    torch.manual_seed(meshes.tp.get_local_rank())
    model = quantized(set_parallel_mode=True, **meshes.te_kwargs())
    with torch.no_grad():
        model.layer_norm_weight.fill_(1)
    te_fsdp.fully_shard(model, meshes)
    reference, generator = quantized(), torch.Generator().manual_seed(7)
    values = {
        name: torch.randn(weight.shape, generator=generator).to(harness.device(), torch.bfloat16)
        for name, weight in reference.named_parameters()
    }
    reference.load_state_dict(values, strict=False)
    if how == "dcp":
        dcp.save({"model": values}, checkpoint_id=directory)
        entries = get_model_state_dict(model)
        weights = {"model": {name: entries[name] for name in values}}
        dcp.load(weights, checkpoint_id=directory)
        set_model_state_dict(model, weights["model"], options=StateDictOptions(strict=False))
    else:
        rank0 = how == "broadcast"
        given = values if not rank0 or dist.get_rank() == 0 else {}
        kinds = StateDictOptions(full_state_dict=True, broadcast_from_rank0=rank0, strict=False)
        set_model_state_dict(model, dict(given), options=kinds)
    wanted = dict(reference.named_parameters())
    # A quantized weight of one process has the scale of its own values only after a step under delayed scaling.
    exact = {n: values[n] if recipe == "delayed" else _values(wanted[n]) for n in values}
    allowed = 2**-4 if recipe == "delayed" else 0  # FP8 E4M3 rounds by half of 2^-3
    found = {n: _values(parameter.full_tensor()) for n, parameter in model.named_parameters()}
    scales: list[Any] = [None] * dist.get_world_size()
    own = {n: float(p.to_local()._scale_inv) for n, p in model.named_parameters() if p.ndim > 1}
    dist.all_gather_object(scales, own)
    return {
        "loaded": [n for n in exact if not torch.allclose(found[n], exact[n].float(), allowed, allowed / 8)],
        "differing_scales": [n for n in own if len({scale[n] for scale in scales}) > 1],
    }


def _values(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.dequantize() if hasattr(tensor, "dequantize") else tensor).detach().float()
