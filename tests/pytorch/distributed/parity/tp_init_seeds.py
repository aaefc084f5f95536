"""Models that are built on the device, with equal seeds on all ranks or correctly."""

from __future__ import annotations

import contextlib
from typing import Any

import harness
import torch
import torch.distributed as dist
from experts.model import build as build_experts

from parity.models import FFN, HEADS, HIDDEN

#: How a model comes to its meshes.
ENTRIES = ("fully_shard", "set_device_mesh", "method", "constructor")


def _recipe(name: str) -> Any:
    from transformer_engine.common import recipe

    return {"mxfp8": recipe.MXFP8BlockScaling, "current": recipe.Float8CurrentScaling}[name]()


def _layer(entry: str, meshes: Any, dtype: torch.dtype, weights: str) -> Any:
    """Return a layer whose query, key and value are their own parameters."""
    import transformer_engine.pytorch as te

    import te_fsdp

    quantized = weights != "plain"
    context = te.quantized_model_init(recipe=_recipe(weights)) if quantized else contextlib.nullcontext()
    options: dict[str, Any] = {"set_parallel_mode": True, "fuse_qkv_params": quantized, "params_dtype": dtype}
    if entry == "constructor":
        options |= {"tp_mesh": meshes.tp, "weight_mesh": meshes.weight}
    else:
        options |= meshes.te_kwargs()
    kind = te_fsdp.TransformerLayer if entry == "constructor" else te.TransformerLayer
    with context:
        return kind(2 * HIDDEN, 2 * FFN, HEADS, device=harness.device(), **options)


def _enter(model: Any, entry: str, meshes: Any) -> None:
    import te_fsdp

    if entry == "fully_shard":
        te_fsdp.fully_shard(model, meshes)
    elif entry == "set_device_mesh":
        te_fsdp.set_device_mesh(torch.nn.Sequential(model), meshes.tp, meshes.weight)
    elif entry == "method":
        te_fsdp.set_device_mesh(model, meshes.tp, meshes.weight)


def error_over_tp(
    entry: str, values: str, weights: str = "plain", dtype: str = "float32", axes: Any = None
) -> tuple[str, str]:
    """Return the error of a model on a tp mesh, or nothing.

    Args:
        entry: One of :data:`ENTRIES`.
        values: "drawn" from equal seeds; "one" for one equal weight among others of their own; "seeds" with another
            seed on each tp rank; "constant" for weights of one value each; "meant" for marked ones.
        weights: "plain", or a recipe to quantize them by.
        dtype: Of parameters.
        axes: Sizes of the mesh.
    """
    import te_fsdp

    meshes = te_fsdp.Meshes.build(**(axes or {"tp": 2}), device_type=harness.device_type())
    own = meshes.tp.get_local_rank() if values in ("seeds", "one") else 0
    torch.manual_seed(5 + own)
    try:
        model = _layer(entry, meshes, getattr(torch, dtype), weights)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if values == "constant":
                    parameter.fill_(0.5)
                if values == "one" and name.endswith("proj.weight"):
                    parameter.copy_(torch.linspace(-1, 1, parameter.numel()).view(parameter.shape))
                parameter.equal_shards = values == "meant"
        before = [p.__class__ for p in model.parameters()]
        _enter(model, entry, meshes)
    except te_fsdp.InitError as error:
        if entry != "constructor":
            assert [p.__class__ for p in model.parameters()] == before, "a refused model is changed"
        return type(error).__name__, str(error)
    return "", ""


def error_over_ep(values: str, single: bool = False) -> tuple[str, str]:
    """Return the error of experts on two ep ranks: "drawn", "seeds", "constant", or "copies" of one layer."""
    import te_fsdp

    meshes = te_fsdp.Meshes.build(ep=2, device_type=harness.device_type())
    torch.manual_seed(1)
    model = build_experts("none", "fp32", 4, meshes, harness.device(), bias=False, single=single, own=False)
    with torch.no_grad():
        for name, parameter in model.mixture.named_parameters():
            if values == "seeds":
                parameter += dist.get_rank()
            elif values == "constant":
                parameter.fill_(0.5)
            elif values == "copies":
                parameter.copy_(model.mixture.get_parameter(name.rstrip("0123456789") + "0"))
    try:
        te_fsdp.fully_shard(model, meshes)
    except te_fsdp.InitError as error:
        return type(error).__name__, str(error)
    return "", ""
