"""Trainings whose all-gathers are te_fsdp's from the second one on, or FSDP2's throughout."""

from __future__ import annotations

import functools
import gc
import weakref
from typing import Any
from unittest import mock

import harness
import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp._fully_shard import _fsdp_collectives

import te_fsdp
from te_fsdp.upstream import fsdp2_gather
from te_fsdp.upstream.fsdp2_units import fsdp_parameter_groups
from te_fsdp.upstream.torch_dtensor import local_of

HIDDEN, TOKENS, STEPS = 256, 32, 5
CYCLES = 100_000_000  # about 50 ms on an H100


def _model(recipe: str, policy: Any, width: int = HIDDEN) -> tuple[torch.nn.Module, Any]:
    """Return the sharded model, whose last unit has ``width`` features, and its recipe."""
    import transformer_engine.pytorch as te
    from quantization.models import recipe_of

    options = {"bias": True, "device": "meta", "params_dtype": torch.float32}
    made = None if recipe == "none" else recipe_of(recipe)
    with te.quantized_model_init(enabled=made is not None, recipe=made):
        model = torch.nn.Sequential(
            *[te.LayerNormLinear(HIDDEN, n, **options) for n in (HIDDEN, HIDDEN, width)]
        )
    if made is None and policy.param_dtype is not None:  # a unit with two dtypes
        model[1].bias = torch.nn.Parameter(model[1].bias.to(torch.bfloat16))
    units = [te.LayerNormLinear]
    te_fsdp.fully_shard(
        model, te_fsdp.Meshes.build(dp_shard=2), units=units, mp_policy=policy, transport="nccl"
    )
    te_fsdp.materialize(model, seed=0)
    return model, made


def _between(model: torch.nn.Module, x: torch.Tensor, step: int) -> None:
    """Evaluate, or move shards to other memory, as a loop does between two steps."""
    if step == 1:
        with torch.inference_mode():
            model(x)
    if step == 3:
        with torch.no_grad():
            model(x)
        model.to(harness.device())
        local_of(model[0].layer_norm_weight).mul_(0.5)


def train(recipe: str, casts: bool, stock: bool) -> dict[str, Any]:
    """Return losses, weights and the number of te_fsdp's all-gathers of five steps."""
    import transformer_engine.pytorch as te

    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16 if casts else None)
    (model, made), losses, seen = _model(recipe, policy), [], []
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    te_fsdp.main_weights(model, optimizer)
    dtype = torch.bfloat16 if casts else torch.float32
    stop = mock.patch.object(fsdp2_gather, "_can_repeat", lambda *_: False)
    copy_in = fsdp2_gather._Plan.copy_in

    def counted(plan: Any, *args: Any) -> None:
        seen.append(len(plan.sizes))
        copy_in(plan, *args)

    with stop if stock else mock.patch.object(fsdp2_gather._Plan, "copy_in", counted):
        for step in range(STEPS):
            torch.manual_seed(10 * step + dist.get_rank())
            x = torch.randn(TOKENS, HIDDEN, dtype=dtype, device=harness.device())
            with te.autocast(enabled=made is not None, recipe=made):
                _between(model, x, step)
                loss = model(x).float().square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
    weights = [harness.full(parameter).float() for parameter in model.parameters()]
    return {"losses": losses, "weights": weights, "gathers": len(seen)}


def outputs_after_evaluation(waits: bool) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return outputs of microbatches after an evaluation, whose all-gathers are late on a GPU, and of later forwards.

    After the evaluation, FSDP2 prefetches a unit that the backward does not use. ``waits`` is false for FSDP2's own
    end of a backward, which frees this all-gather.
    """
    # With equal sizes the second all-gather would send the same part of the memory, which no rank overwrites.
    model, _ = _model("none", MixedPrecisionPolicy(), width=2 * HIDDEN)
    x = torch.linspace(-1, 1, TOKENS * HIDDEN, device=harness.device()).view(TOKENS, HIDDEN).requires_grad_()
    if not waits:
        for unit in model:
            for group in fsdp_parameter_groups(unit):
                group.finalize_backward = functools.partial(type(group).finalize_backward, group)
    outputs, gather = list[torch.Tensor](), _fsdp_collectives.DefaultAllGather.__call__

    def late(self: Any, *args: Any, **options: Any) -> Any:
        if harness.device_type() == "cuda":
            torch.cuda._sleep(CYCLES)
        return gather(self, *args, **options)

    with mock.patch.object(_fsdp_collectives.DefaultAllGather, "__call__", late), te_fsdp.no_sync(model):
        with torch.no_grad():
            model(x)
        for scale in (1, 2):
            outputs.append(model(x * scale))
            outputs[-1].square().mean().backward()
    with torch.no_grad():
        return [output.detach() for output in outputs], [model(x * scale) for scale in (1, 2)]


def freed_shards() -> list[bool]:
    """Return whether the memory of shards that were moved elsewhere is freed before the next all-gather."""
    model, _ = _model("none", MixedPrecisionPolicy())
    x = torch.randn(TOKENS, HIDDEN, device=harness.device())
    for _ in range(3):
        model(x).sum().backward()
    before = [weakref.ref(local_of(parameter).untyped_storage()) for parameter in model.parameters()]
    model._apply(lambda tensor: tensor.clone())
    gc.collect()
    return [reference() is None for reference in before]
