"""A recipe's training script with torch's FSDP2, next to its port. The test counts the lines that differ.

Each function builds a model on meta, shards it, and yields model and optimizer, and then each step's loss.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
import transformer_engine.pytorch as te
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformer_engine.common.recipe import Float8CurrentScaling

import te_fsdp
from recipes.models import MODELS, Rotary, loss_of

#: From a step, the number of a part and the number of parts to inputs, and the labels of all parts over their number.
Batch = Callable[[int, int, int], tuple[dict[str, torch.Tensor], float]]


def stock(kind: str, config: dict[str, Any], batch: Batch, steps: range) -> Iterator[Any]:
    """Train as the recipe does, on data-parallel ranks."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
    place = {"device": "meta", "params_dtype": config["dtype"]}
    with torch.device("meta"), te.quantized_model_init(config["fp8"], Float8CurrentScaling()):
        model = MODELS[kind](config, **place)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    model.to_empty(device="cpu")
    model.rotary_emb.inv_freq = Rotary(config["width"] // config["heads"]).inv_freq
    initialize(model)
    optimizer = optimizer_of(model, config)
    yield model, optimizer
    for step in steps:
        inputs, total = batch(step, dist.get_rank(), dist.get_world_size())
        with te.autocast(config["fp8"], recipe=Float8CurrentScaling()):
            logits = model(inputs)
        loss = loss_of(logits, inputs["labels"], total)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        yield loss.item()


def ported(
    kind: str, config: dict[str, Any], batch: Batch, steps: range, axes: dict[str, int]
) -> Iterator[Any]:
    """Train with te_fsdp."""
    meshes = te_fsdp.Meshes.build(**axes, device_type="cpu")
    place = {"device": "meta", "params_dtype": config["dtype"], **keywords(kind, config, meshes)}
    with torch.device("meta"), te.quantized_model_init(config["fp8"], Float8CurrentScaling()):
        model = MODELS[kind](config, **place)
    te_fsdp.fully_shard(model, meshes, units=[f"layers.{n}" for n in range(config["layers"])])
    model.rotary_emb.inv_freq = Rotary(config["width"] // config["heads"]).inv_freq
    te_fsdp.materialize(model, seed=0)
    optimizer = optimizer_of(model, config)
    yield model, optimizer
    for step in steps:
        inputs, total = batch(step, meshes.data_rank, meshes.data_size)
        with te.autocast(config["fp8"], recipe=Float8CurrentScaling()):
            logits = model(inputs)
        loss = loss_of(logits, inputs["labels"], total)
        loss.backward()
        te_fsdp.clip_grad_norm_(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        yield loss.item()


def initialize(model: nn.Module) -> None:
    """Initialize the weights as the recipe does, of each module by itself and then by the model's rules."""
    torch.manual_seed(0)
    with torch.no_grad():
        for module in model.modules():
            if callable(reset := getattr(module, "reset_parameters", None)):
                reset()
            model._init_weights(module)


def optimizer_of(model: nn.Module, config: dict[str, Any]) -> torch.optim.Optimizer:
    """Return the recipe's optimizer."""
    if config["fp8"]:
        return te.optimizers.FusedAdam(model.parameters(), lr=1e-2, eps=1e-3, master_weights=True)
    return torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3)


def keywords(kind: str, config: dict[str, Any], meshes: te_fsdp.Meshes) -> dict[str, Any]:
    """Return what the layers need to know of the meshes, and a Mixtral of its experts."""
    if kind == "mixtral":
        return {"own": meshes.experts(config["experts"]), "ep": meshes.ep, **meshes.te_kwargs()}
    return {"set_parallel_mode": True, **meshes.te_kwargs()}
