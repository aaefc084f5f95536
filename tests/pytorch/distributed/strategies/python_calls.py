"""Counts of Python function calls in a steady-state step, by library."""

from __future__ import annotations

import gc
import os
import sys
import threading
from collections import Counter
from collections.abc import Callable
from types import FrameType
from typing import Any

import harness
import torch
import torch.distributed as dist
from torch import nn

import te_fsdp

LAYERS, HIDDEN, FFN, HEADS, TOKENS, EXPERTS = 3, 64, 128, 4, 32, 4
#: Axes of the mesh, whether weights are FP8, and the outer strategy.
CASES: dict[str, tuple[dict[str, int], bool, str]] = {
    "dense": ({"dp_shard": 2}, False, "no_shard"),
    "tp": ({"dp_shard": 2, "tp": 2}, False, "no_shard"),
    "tp alone": ({"dp_shard": 1, "tp": 2}, False, "no_shard"),
    "ep": ({"dp_shard": 2, "ep": 2}, False, "no_shard"),
    "fp8": ({"dp_shard": 2}, True, "no_shard"),
    "fp8 tp": ({"dp_shard": 2, "tp": 2}, True, "no_shard"),
    "hfsdp": ({"dp_replicate": 2, "dp_shard": 2}, False, "optim"),
    "fp8 hfsdp": ({"dp_replicate": 2, "dp_shard": 2}, True, "optim"),
}


class Experts(nn.Module):
    """The rank's experts, each with the same number of rows."""

    def __init__(self, own: int, **kwargs: Any) -> None:
        import transformer_engine.pytorch as te

        super().__init__()
        self.up = te.GroupedLinear(own, HIDDEN, FFN, bias=False, **kwargs)
        self.down = te.GroupedLinear(own, FFN, HIDDEN, bias=False, **kwargs)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        splits = [x.shape[0] // self.up.num_gemms] * self.up.num_gemms
        return self.down(torch.relu(self.up(x, splits)), splits)


class Layer(nn.Module):
    """A dense layer, or one with experts after it."""

    def __init__(self, own: int, tp: dict[str, Any], **kwargs: Any) -> None:
        import transformer_engine.pytorch as te

        super().__init__()
        options = {"hidden_dropout": 0.0, "attention_dropout": 0.0, "fuse_qkv_params": True, "bias": False}
        cut = {**tp, "set_parallel_mode": True, "sequence_parallel": True} if tp else {}
        self.dense = te.TransformerLayer(
            HIDDEN, FFN, HEADS, normalization="RMSNorm", **options, **cut, **kwargs
        )
        self.experts = Experts(own, **kwargs) if own else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.dense(x)
        return x if self.experts is None else x + self.experts(x.flatten(0, 1)).view_as(x)


def _model(is_fp8: bool, own: int, tp: dict[str, Any], device: Any) -> nn.Module:
    import transformer_engine.pytorch as te
    from transformer_engine.common.recipe import Float8CurrentScaling

    with te.quantized_model_init(enabled=is_fp8, recipe=Float8CurrentScaling()):
        layers = [Layer(own, tp, device=device, params_dtype=torch.bfloat16) for _ in range(LAYERS)]
    return nn.Sequential(*layers)


def _fused_adam(model: nn.Module) -> Any:
    from transformer_engine.pytorch.optimizers import FusedAdam

    return FusedAdam(model.parameters(), lr=1e-4, master_weights=True)


def _by_te_fsdp(case: str, **options: Any) -> tuple[nn.Module, Any]:
    """Train by te_fsdp; ``options`` are arguments of ``te_fsdp.fully_shard``."""
    axes, is_fp8, outer = CASES[case]
    sizes = {name: size for name, size in axes.items() if name != "dp_shard" or "ep" not in axes}
    meshes = te_fsdp.Meshes.build(**sizes)
    tp = meshes.te_kwargs() if axes.get("tp", 1) > 1 else {}
    model = _model(is_fp8, EXPERTS // axes["ep"] if "ep" in axes else 0, tp, "meta")
    units = [str(n) for n in range(LAYERS)]
    te_fsdp.fully_shard(model, meshes, units=units, outer_strategy=outer, **options)
    te_fsdp.materialize(model, seed=0)
    optimizer = _fused_adam(model)
    te_fsdp.main_weights(model, optimizer)
    if outer == "optim":
        te_fsdp.shard_optimizer(optimizer)
    return model, optimizer


def _by_fsdp2(case: str) -> tuple[nn.Module, Any]:
    """Train by FSDP2: each layer a unit, experts of ep one of their own; HSDP for HFSDP, which FSDP2 does not have."""
    from torch.distributed.fsdp import fully_shard

    axes, is_fp8, _ = CASES[case]
    device, ep, tp = harness.device(), axes.get("ep", 1), axes.get("tp", 1)
    if ep > 1:
        mesh = dist.init_device_mesh(device.type, (dist.get_world_size(),))
        experts = dist.init_device_mesh(
            device.type, (dist.get_world_size() // ep, ep), mesh_dim_names=("shard", "ep")
        )
    else:
        mesh = dist.init_device_mesh(device.type, tuple(axes.values()), mesh_dim_names=tuple(axes))
    of_tp = {"tp_group": mesh["tp"].get_group(), "tp_size": tp} if tp > 1 else {}
    model = _model(is_fp8, EXPERTS // ep if ep > 1 else 0, of_tp, device)
    for layer in model:
        if ep > 1:
            fully_shard(layer.experts, mesh=experts["shard"])
        fully_shard(layer, mesh=mesh["dp_shard"] if tp > 1 else mesh)
    fully_shard(model, mesh=mesh["dp_shard"] if tp > 1 else mesh)
    return model, _fused_adam(model)


def _by_none(case: str) -> tuple[nn.Module, Any]:
    """Train the same on one rank's unsharded weights."""
    axes, is_fp8, _ = CASES[case]
    ep, tp = axes.get("ep", 1), axes.get("tp", 1)
    of_tp: dict[str, Any] = {}
    if tp > 1:
        mesh = dist.init_device_mesh(harness.device().type, tuple(axes.values()), mesh_dim_names=tuple(axes))
        of_tp = {"tp_group": mesh["tp"].get_group(), "tp_size": tp}
    model = _model(is_fp8, EXPERTS // ep if ep > 1 else 0, of_tp, harness.device())
    return model, _fused_adam(model)


BUILDERS: dict[str, Callable[..., tuple[nn.Module, Any]]] = {
    "te_fsdp": _by_te_fsdp,
    "FSDP2": _by_fsdp2,
    "neither": _by_none,
}


def counted(case: str, **options: Any) -> dict[str, int]:
    """Return calls of Python functions in the fourth step of a training, those of the emulation left out, by library.

    ``options`` are arguments of ``te_fsdp.fully_shard``.
    """
    import transformer_engine.pytorch as te
    from transformer_engine.common.recipe import Float8CurrentScaling

    emulation = os.path.join(os.path.dirname(te_fsdp.__file__), "emulation") + os.sep
    results = {}
    for library, build in BUILDERS.items():
        model, optimizer = build(case, **options) if library == "te_fsdp" else build(case)
        calls: Counter[bool] = Counter()

        def count(frame: FrameType, event: str, _: Any, calls: Counter[bool] = calls) -> None:
            if event == "call":
                calls[frame.f_code.co_filename.startswith(emulation)] += 1

        for profile in (None, None, None, count):
            gc.collect()  # objects of earlier tests would end, and call, within the step
            torch.manual_seed(dist.get_rank())
            batch = torch.randn(TOKENS, 2, HIDDEN, dtype=torch.bfloat16, device=harness.device())
            threading.setprofile(profile)
            sys.setprofile(profile)
            gc.disable()
            try:
                with te.autocast(enabled=CASES[case][1], recipe=Float8CurrentScaling()):
                    output = model(batch)
                output.float().square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            finally:
                sys.setprofile(None)
                threading.setprofile(None)
                gc.enable()
        results[library] = calls[False]
    return results
