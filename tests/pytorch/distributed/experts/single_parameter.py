"""Bodies: experts in a single parameter under HFSDP."""

from __future__ import annotations

import logging
import math
from typing import Any

import harness
import torch
from hfsdp.quantized_transfers import logged
from matrix.bodies import _dense, _optimizer
from matrix.tolerances import MANTISSA, bounds, rounding
from quantization.weight_bytes import draws_are_fp32

from experts.bodies import STEPS, _part, _pass, batch
from experts.model import build


def sharded(axes: dict[str, int], recipe: str, weights: str, experts: int, **how: Any) -> tuple[Any, Any]:
    """Return meshes, and a mixture of experts in one parameter on them."""
    import te_fsdp

    meshes = te_fsdp.Meshes.build(**axes, device_type=harness.device_type())
    model = build(recipe, weights, experts, meshes, "meta", bias=False, single=True)
    te_fsdp.fully_shard(model, meshes, **how)
    te_fsdp.materialize(model, seed=3)
    return meshes, model


def compare_hfsdp(axes: dict[str, int], recipe: str, weights: str, experts: int) -> dict[str, Any]:
    """Compare HFSDP with HSDP: norms and updates of three clipped steps; ``warned``: weights sent as fp32.

    The gradients are as far apart as their formats allow, and each run rounds its weights to their format at the end.
    """
    import te_fsdp

    checks, trained, norms = harness.Comparisons(), [], []
    before: dict[str, torch.Tensor] = {}
    warned: list[str] = []
    for strategy in ("optim", "no_shard"):
        meshes, model = sharded(axes, recipe, weights, experts, outer_strategy=strategy)
        before = {name: _dense(p).clone() for name, p in model.named_parameters() if "mixture" in name}
        with logged(logging.WARNING) as lines:
            optimizer = te_fsdp.shard_optimizer(_optimizer(model))
        warned += [line for line in lines if "as fp32" in line]
        optimizer.param_groups[0]["lr"] *= 256  # updates well above what the formats round away
        norms.append([])
        for step in range(STEPS):
            _pass(model, *(_part(t, meshes) for t in batch(recipe, weights, experts, "uneven", step)))
            norms[-1].append(te_fsdp.clip_grad_norm_(model, 1.0))
            optimizer.step()
            optimizer.zero_grad()
        trained.append({name: _dense(p) for name, p in model.named_parameters() if name in before})
    _, bound = bounds(recipe, weights, "grouped")
    for step, (actual, expected) in enumerate(zip(*norms, strict=True)):
        checks.close(f"norm {step}", actual, expected, bound, "gradients in the recipe's format")
    bits = MANTISSA[recipe][0] if weights == "quantized" else 7
    shares = {}
    for name, start in before.items():
        update = float((trained[1][name] - start).norm())
        rounded = math.sqrt(2) * rounding(bits) * float(trained[1][name].norm())
        difference = float((trained[0][name] - trained[1][name]).norm())
        assert update > rounded, f"{name}: nothing but rounding"
        shares[name] = difference / (bound * update + rounded)
    return {**checks.require(STEPS), "shares": shares, "warned": warned}


def memory_per_rank(axes: dict[str, int], recipe: str, experts: int) -> dict[str, float]:
    """Return the bytes of quantized experts on this rank after a step, relative to the expected bytes.

    Returns:
        ``data``: bytes of their values over logical bytes / (ep x dp_shard x tp), in every direction that the format
        keeps. ``scales``: all else over these logical bytes. ``states``: elements of main weights and of both moments,
        each over logical ones / (ep x dp_shard x tp). ``reported``: bytes that the report states over those there are.
    """
    import te_fsdp
    from te_fsdp.upstream import te as _te, torch_dtensor as _torch

    meshes, model = sharded(axes, recipe, "quantized", experts)
    optimizer = _optimizer(model)
    _pass(model, *(_part(tensor, meshes) for tensor in batch(recipe, "quantized", experts, "every", 0)))
    optimizer.step()
    cuts = math.prod(axes.values()) // axes.get("dp_replicate", 1)
    values = {"data": 0, "scales": 0, "states": 0}
    logical = 0
    for module in (model.mixture.up, model.mixture.down):
        local: Any = _torch.local_of(module.weight)
        assert _te.is_quantized(local)
        logical += module.weight.numel()
        sizes = {name: b.numel() * b.element_size() for name, b in local.get_metadata().items()}
        values["data"] += sum(size for name, size in sizes.items() if name.endswith("data"))
        values["scales"] += sum(size for name, size in sizes.items() if not name.endswith("data"))
        states = optimizer.state[module.weight]
        assert {"exp_avg", "exp_avg_sq", "master_param"} <= states.keys()
        values["states"] += sum(_torch.local_of(state).numel() for state in states.values())
    rows = [row for row in te_fsdp.report(model) if row.name.startswith("mixture")]
    directions = sum(name.endswith("data") for name in sizes)
    width = 0.5 if recipe == "nvfp4" else 1.0
    share = directions * width * logical / cuts
    return {
        "data": values["data"] / share,
        "scales": values["scales"] / share,
        "states": values["states"] * cuts / (3 * logical),
        "reported": sum(row.bytes for row in rows) / (values["data"] + values["scales"]),
    }


def train_with_fp32_main_weights(recipe: str, experts: int) -> dict[str, Any]:
    """Train with fp32 main weights. Quantized weights are gathered in the compute dtype, also in inference mode."""
    import te_fsdp

    policy = te_fsdp.MixedPrecisionPolicy(main_params_dtype=torch.float32, param_dtype=torch.bfloat16)
    checks, outputs = harness.Comparisons(), []
    for how in ({}, {"precision": policy}):
        meshes, model = sharded({"dp_shard": 2}, recipe, "quantized", experts, **how)
        x, _, chosen = (_part(t, meshes) for t in batch(recipe, "quantized", experts, "uneven", 0))
        outputs.append(model(x, chosen))
        outputs[-1].float().square().mean().backward()
        assert all(p.grad is not None for p in model.parameters())
        with torch.inference_mode():
            checks.bitwise_equal("inference", model(x, chosen), outputs[-1].detach())
    if not draws_are_fp32():  # other initial values, not rounded ones
        return checks.require(2)
    # Initial values are drawn in bf16 here and in fp32 there, and then quantized.
    bound, _ = bounds(recipe, "quantized", "grouped")
    difference = (outputs[1] - outputs[0]).detach().double().norm() / outputs[0].detach().double().norm()
    assert float(difference) <= bound, float(difference)
    return checks.require(2)
