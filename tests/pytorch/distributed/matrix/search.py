"""Body of the random search: train one drawn configuration for three steps and compare with stock TE in one process.

The oracle is that of `matrix.bodies`: rank 0 trains the unsharded model on the whole batch. Outputs, gradients by value
and the updates of main weights are compared, within the bounds of `matrix.tolerances`.
"""

from __future__ import annotations

import contextlib
from typing import Any

import harness
import torch
import torch.distributed as dist
from parity.runs import shards
from torch import nn

from matrix.bodies import EPSILON, LEARNING_RATE, SEED, Check, Cut, Seen, _dense, _main, batch
from matrix.configurations import MESHES, Configuration
from matrix.models import build, recipe_of, width_of

STEPS = 3


class Stack(nn.Module):
    """Residual blocks of several module kinds; `side` is computed, and in the loss only where a step uses it."""

    def __init__(self, drawn: Configuration, device: Any, group: Any = None, **kwargs: Any) -> None:
        super().__init__()
        options = {"group": group, **kwargs}
        kinds = [*drawn.modules, *(["linear"] if drawn.side != "none" else [])]
        built = [
            build(kind, drawn.recipe, drawn.weights, device, checkpointing=drawn.checkpointing, **options)
            for kind in kinds
        ]
        if drawn.recipe == "nvfp4":  # stock TE rounds gradients at random: two runs of it differ
            recipe = recipe_of("nvfp4")
            recipe.disable_stochastic_rounding = True
            for trunk in built:
                trunk.recipe = recipe
        side = built.pop() if drawn.side != "none" else None
        self.blocks, self.side = nn.ModuleList(built), side  # in the order in which they were drawn

    def forward(self, x: torch.Tensor, use_side: bool = False) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        if self.side is None:
            return x
        side = self.side(x)
        return x + side if use_side else x


def trial(drawn: Configuration, *, spoil: bool = False) -> dict[str, float]:
    """Train a configuration and compare. Return the largest error of each kind as a share of its bound.

    Args:
        drawn: The configuration.
        spoil: Negative control: the last rank's tokens are others in the second step.
    """
    expected, originals, missing = reference(drawn)
    meshes, model = sharded(drawn)
    check = Check(drawn.recipe, drawn.weights, "linear", expected, originals, gemms=drawn.gemms)
    check.steps = STEPS
    check.initial(model)
    cut = Cut(meshes, drawn.sequence_parallel)
    before = {name: _dense(parameter).clone() for name, parameter, _ in shards(model)}
    optimizer = optimizer_of(drawn, model, is_sharded=True)
    for step in range(STEPS):
        if drawn.evaluates:
            evaluate(model, cut.take(batch(width(drawn), "evaluation")[0]))
        if drawn.abandons:
            abandon(drawn, model, cut)
        for micro in range(drawn.microbatches):
            place = f"{step}.{micro}"
            x, target = (cut.take(tensor) for tensor in batch(width(drawn), place))
            if spoil and step == 1 and dist.get_rank() == dist.get_world_size() - 1:
                x = -x
            with context_of(drawn, model, is_last=micro == drawn.microbatches - 1):
                output = run(model, x, target, drawn.microbatches * cut.tp_parts, uses_side(drawn, step))
            check.values(f"output {place}", output, cut.take(expected.tensors[f"output {place}"]))
        finish(drawn, model)
        compare_gradients(drawn, model, check, step, missing[step])
        optimizer.step()
        model.zero_grad()
    if drawn.optimizer.startswith("fused") and drawn.outer == "no_shard":
        for name, parameter, info in shards(model):
            if name in missing["never"]:
                continue
            check.shard("update", name, _main(optimizer, parameter) - before[name], info)
    return check.settle(drawn.ranks)["shares"]


def compare_gradients(
    drawn: Configuration, model: nn.Module, check: Check, step: int, missing: set[str]
) -> None:
    """Compare gradients by value; under HFSDP they belong to each replica until the optimizer's step."""
    for name, parameter, info in shards(model):
        if drawn.outer == "optim":
            continue
        if name in missing:
            check.absent(f"gradient {step} {name}", parameter.grad)
        elif parameter.grad is None:
            check.findings.failures.append(f"gradient {step} {name}: None, where one process has one")
        else:
            check.shard(f"gradient {step}", name, parameter.grad, info)


def width(drawn: Configuration) -> int:
    """Hidden size in which every format finds whole blocks."""
    return width_of(drawn.recipe, drawn.weights)


def uses_side(drawn: Configuration, step: int) -> bool:
    """Whether the side branch is in the loss of a step."""
    return drawn.side == "in the second step" and step == 1


def run(model: nn.Module, x: torch.Tensor, target: torch.Tensor, divisor: int, side: bool) -> torch.Tensor:
    """Forward and backward of a loss per token. Return the output."""
    x = x.detach().to(next(model.parameters()).dtype).requires_grad_()  # for te.checkpoint
    output = model(x, side)
    loss = (output.float() - target.float()).square().mean() * output.shape[-1]
    (loss / divisor).backward()
    return output.detach()


def evaluate(model: nn.Module, x: torch.Tensor) -> None:
    """Run a forward without gradients, as a validation between steps does."""
    model.eval()
    with torch.no_grad():
        model(x.to(next(model.parameters()).dtype))
    model.train()


def abandon(drawn: Configuration, model: nn.Module, cut: Cut) -> None:
    """Run a microbatch that is given up by ``zero_grad``."""
    import te_fsdp

    x, target = (cut.take(tensor) for tensor in batch(width(drawn), "abandoned"))
    with te_fsdp.no_sync(model):
        run(model, x, target, 1, False)
    model.zero_grad()


def context_of(
    drawn: Configuration, model: nn.Module, *, is_last: bool
) -> contextlib.AbstractContextManager[None]:
    """The context of one microbatch in the drawn schedule."""
    import te_fsdp

    if drawn.schedule == "microbatch":
        return te_fsdp.microbatch(model, is_last=is_last)
    if drawn.schedule == "by hand":
        te_fsdp.set_auto_sync(model, False)
    if drawn.schedule == "setter" and hasattr(model, "set_requires_gradient_sync"):  # not with no_shard
        model.set_requires_gradient_sync(is_last)
    return te_fsdp.no_sync(model) if drawn.schedule == "no_sync" and not is_last else contextlib.nullcontext()


def finish(drawn: Configuration, model: nn.Module) -> None:
    """Reduce what waits, where the schedule does so by hand."""
    import te_fsdp

    if drawn.schedule == "by hand":
        te_fsdp.finish_grad_reduce(model)
        te_fsdp.set_auto_sync(model, True)
        te_fsdp.release_params(model)


def sharded(drawn: Configuration) -> tuple[Any, nn.Module]:
    """Meshes and the sharded, initialized model."""
    import te_fsdp

    meshes = te_fsdp.Meshes.build(**MESHES[drawn.mesh], device_type=harness.device_type())
    kwargs = {**meshes.te_kwargs(), "sequence_parallel": drawn.sequence_parallel}
    model = Stack(drawn, "meta", **kwargs)
    for name in drawn.exempt:
        owner, _, own = name.rpartition(".")
        found = getattr(model.get_submodule(owner), own, None)
        if found is not None:
            te_fsdp.fsdp_no_shard(found)
    options: dict[str, Any] = {
        "strategy": drawn.strategy,
        "outer_strategy": drawn.outer,
        "check_inputs": False,
    }
    if drawn.units:
        options["units"] = list(drawn.units)
    te_fsdp.fully_shard(model, meshes, zero_copy_gradients=drawn.zero_copy, **options)
    te_fsdp.materialize(model, seed=SEED)
    return meshes, model


def optimizer_of(drawn: Configuration, model: nn.Module, *, is_sharded: bool) -> Any:
    """The drawn optimizer. Its steps are proportional to gradients, so that the gradients' bounds hold for them."""
    from transformer_engine.pytorch.optimizers import FusedAdam

    import te_fsdp

    if drawn.optimizer == "sgd":
        return torch.optim.SGD(model.parameters(), lr=LEARNING_RATE / EPSILON)
    if drawn.optimizer == "adamw":
        return torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, eps=EPSILON, weight_decay=1e-3)
    options: dict[str, Any] = {"master_weights": True, "master_weight_dtype": torch.float32}
    optimizer = FusedAdam(model.parameters(), lr=LEARNING_RATE, eps=EPSILON, **options)
    if is_sharded and drawn.outer == "optim":
        return te_fsdp.shard_optimizer(optimizer)
    if is_sharded and drawn.optimizer == "fused, main weights":
        te_fsdp.main_weights(model, optimizer)
    return optimizer


def reference(drawn: Configuration) -> tuple[Seen, dict[str, torch.Tensor], dict[Any, set[str]]]:
    """What one process sees, the initial parameters, and which have no gradient by step. Collective."""
    from transformer_engine.pytorch.quantization import FP8GlobalStateManager

    from te_fsdp.upstream import te as _te

    alone = [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]
    torch.manual_seed(SEED)
    model = Stack(drawn, harness.device(), group=alone)
    before = {name: _dense(parameter).clone() for name, parameter in model.named_parameters()}
    seen: dict[str, torch.Tensor] = {}
    missing: dict[Any, set[str]] = {}
    optimizer, trains = optimizer_of(drawn, model, is_sharded=False), dist.get_rank() == 0
    for step in range(STEPS):
        if trains and drawn.evaluates:
            evaluate(model, batch(width(drawn), "evaluation")[0])
        if trains and drawn.abandons:
            run(model, *batch(width(drawn), "abandoned"), 1, False)
            model.zero_grad()
        for micro in range(drawn.microbatches):
            place = f"{step}.{micro}"
            x, target = batch(width(drawn), place)
            seen[f"output {place}"] = x
            if trains:
                seen[f"output {place}"] = run(model, x, target, drawn.microbatches, uses_side(drawn, step))
        missing[step] = {name for name, p in model.named_parameters() if p.grad is None}
        for name, parameter in model.named_parameters():
            seen[f"gradient {step} {name}"] = before[name] if parameter.grad is None else parameter.grad
        if trains:
            optimizer.step()
            optimizer.zero_grad()
            for parameter in model.parameters():
                _te.drop_transpose(parameter)  # FusedAdam leaves a stale one on Hopper (docs/upstream.md)
    missing["never"] = missing[0] & missing[1] & missing[2]
    for name, parameter in model.named_parameters():
        has_main = trains and drawn.optimizer.startswith("fused") and name not in missing["never"]
        seen[f"update {name}"] = _main(optimizer, parameter) - before[name] if has_main else before[name]
    found = Seen({name: tensor.detach().float().clone() for name, tensor in seen.items()})
    found.send()
    sent = [missing]
    dist.broadcast_object_list(sent, 0)
    FP8GlobalStateManager.reset()  # else each of the two models would roll the other's amax histories
    return found, before, sent[0]
