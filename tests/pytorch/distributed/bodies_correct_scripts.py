"""Correct training scripts that resemble mistakes (:mod:`bodies_mistakes`)."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import harness
import torch
import torch.distributed as dist
from bodies_mistakes import (
    Model,
    draw_batch,
    in_bf16,
    make_meshes,
    make_sgd,
    make_sharded,
    make_sp_model,
    step_in_bf16,
    take_step,
)
from torch import nn
from torch.distributed.tensor import DTensor


def _full(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _weights(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: _full(p.detach()).clone() for name, p in model.named_parameters()}


def _changed(model: nn.Module, before: dict[str, torch.Tensor]) -> set[str]:
    return {name.split(".")[0] for name, now in _weights(model).items() if not torch.equal(now, before[name])}


def frozen_and_unfrozen() -> bool:
    model = make_sharded()
    optimizer, seen = make_sgd(model), []
    for wanted in (True, False, True):
        model.layer.requires_grad_(wanted)
        before = _weights(model)
        take_step(model, optimizer)
        seen.append(_changed(model, before))
    return seen == [{"inp", "layer", "head"}, {"inp", "head"}, {"inp", "layer", "head"}]


def layer_removed_after_training() -> bool:
    """Remove a layer whose parameters stay in the optimizer."""
    model = make_sharded()
    optimizer, layer = make_sgd(model), model.layer
    take_step(model, optimizer)
    model.layer, before = nn.Identity(), _weights(layer)
    kept = _weights(model)
    take_step(model, optimizer)
    return _changed(model, kept) == {"inp", "head"} and not _changed(layer, before)


def alternating_recipes() -> bool:
    """Alternate recipes, as new objects in each step. Rank 0 alone evaluates a model with unsharded weights."""
    import transformer_engine.pytorch as te
    from transformer_engine.common.recipe import DelayedScaling

    for strategy in ("optim_grads_params", "no_shard"):
        model, losses = make_sharded(strategy), []
        optimizer = make_sgd(model)
        for step in range(4):
            with te.autocast(enabled=step % 2 == 0, recipe=DelayedScaling()):
                loss = model(draw_batch(rows=16)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            if strategy != "no_shard" or dist.get_rank() == 0:
                with torch.no_grad():
                    model.eval()(draw_batch(rows=16))
                model.train()
        if losses != sorted(losses, reverse=True):
            return False
    return True


def gradients_filled_with_zeros_by_hand() -> bool:
    one, other = make_sharded(), make_sharded()
    for model, to_none in ((one, True), (other, False)):
        optimizer = make_sgd(model)
        for _ in range(2):
            take_step(model, optimizer, to_none=to_none)
    return not _changed(one, _weights(other))


def grad_scaler_that_skips_a_step() -> bool:
    """Use gradients that are infinite on one rank. No rank steps."""
    model = make_sharded()
    optimizer, scaler = make_sgd(model), torch.amp.GradScaler(harness.device_type(), init_scale=4.0)
    scaler.scale(model(draw_batch()).square().mean()).backward()
    if dist.get_rank() == 0:
        model.inp.weight.grad.to_local()[0, 0] = float("inf")
    before = _weights(model)
    scaler.step(optimizer)
    scaler.update()
    return not _changed(model, before) and scaler.get_scale() == 2.0


def scheduler_built_before_main_weights() -> bool:
    import te_fsdp

    model = make_sharded(model=Model(make_meshes()).to(torch.bfloat16))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    te_fsdp.main_weights(model, optimizer)
    for _ in range(2):
        model(draw_batch().bfloat16()).float().square().mean().backward()
        optimizer.step()
        scheduler.step()
    return optimizer.param_groups[0]["lr"] == 0.25


def manual_weight_average() -> bool:
    """Average weights, install the average, evaluate and restore the weights."""
    model = make_sharded()
    average, before = [p.detach().clone() for p in model.parameters()], _weights(model)
    take_step(model, make_sgd(model))
    with torch.no_grad():
        kept = [p.detach().clone() for p in model.parameters()]
        for p, mean in zip(model.parameters(), average, strict=True):
            p.copy_(mean)
        first = not _changed(model, before) and model.eval()(draw_batch()).isfinite().all()
        for p, value in zip(model.parameters(), kept, strict=True):
            p.copy_(value)
    return bool(first) and _changed(model, before) == {"inp", "layer", "head"}


def hooks_after_accumulation() -> bool:
    """Check that hooks run once after each reduction, on the reduced gradients, as FSDP2 runs them."""
    import te_fsdp

    results = []
    for strategy in ("optim_grads_params", "optim_grads", "optim", "no_shard"):
        model, seen = make_sharded(strategy), list[tuple[str, torch.Tensor]]()
        for name, parameter in model.named_parameters():
            parameter.register_post_accumulate_grad_hook(
                lambda p, n=name, s=seen: s.append((n, _full(p.grad).clone()))
            )
        for _ in range(2):
            with te_fsdp.no_sync(model):
                model(draw_batch()).square().mean().backward()
            results.append(not seen)
            model(draw_batch()).square().mean().backward()
            reduced = {name: _full(p.grad) for name, p in model.named_parameters()}
            results += [len(seen) == len(reduced), all(torch.equal(reduced[n], g) for n, g in seen)]
            seen.clear()
    return all(results)


def parameter_counts_and_groups() -> bool:
    """Check that sizes and dims of sharded parameters are those of the unsharded model."""
    model, plain = make_sharded(), Model(make_meshes())
    sizes = [[(name, p.numel(), p.ndim) for name, p in item.named_parameters()] for item in (model, plain)]
    return sizes[0] == sizes[1]


def torch_clip_grad_norm() -> bool:
    import te_fsdp

    model = make_sharded()
    (30 * model(draw_batch())).square().mean().backward()
    norm = te_fsdp.clip_grad_norm_(model, 1e9)
    again = _full(nn.utils.clip_grad_norm_(model.parameters(), 1e9))
    # Two orders of a sum of 10 squares in fp32.
    return bool(torch.isclose(torch.as_tensor(norm).cpu(), again.cpu(), rtol=1e-6))


def tied_after_sharding() -> bool:
    model = make_sharded()
    model.head.weight = model.inp.weight
    optimizer = make_sgd(model)
    take_step(model, optimizer)
    return model.head.weight is model.inp.weight and len(optimizer.param_groups[0]["params"]) == 9


def layer_with_parallel_mode() -> bool:
    """Check that gradients over tp are sums over all tokens, as in one process."""
    model, tokens = make_sp_model(marked=True)
    model(tokens).square().sum().backward()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    optimizer.step()
    results = {name: _full(p.grad) for name, p in model.named_parameters()}
    whole = draw_batch(0)
    weights = {name: value.requires_grad_() for name, value in _weights(model).items()}
    for name in ("up", "down", "plain"):
        whole = nn.functional.linear(whole, weights[f"{name}.weight"], weights[f"{name}.bias"])
    whole.square().sum().backward()
    # Sums of up to 32 fp32 products in a different order; gradients around 1.
    return all(torch.allclose(results[name], w.grad, rtol=1e-4, atol=1e-4) for name, w in weights.items())


def inputs_that_should_differ() -> bool:
    for whole, marked in ((True, True), (False, False)):
        model, tokens = make_sp_model(marked=marked, whole=whole, check_inputs=False)
        model(tokens).square().sum().backward()
        make_sgd(model).step()
    return True


def edits_with_main_weights() -> bool:
    """Edit both, edit the weight with a recomputed main weight, and restore an average."""
    model, optimizer = in_bf16()
    weight = model.layer.fc2_weight
    step_in_bf16(model, optimizer)
    with torch.no_grad():
        optimizer.state[weight]["master_param"].fill_(3.0)
        weight.fill_(3.0)
        kept = model.head.weight.detach().clone()
        model.head.weight.zero_()
        model.eval()(draw_batch().bfloat16())
        model.train().head.weight.copy_(kept)
    optimizer.param_groups[0]["lr"] = 0.0
    step_in_bf16(model, optimizer)
    first = bool((_full(weight) == 3.0).all()) and torch.equal(_full(model.head.weight), _full(kept))
    with torch.no_grad():
        weight.fill_(2.0)
    del optimizer.state[weight]["master_param"]
    step_in_bf16(model, optimizer)
    return first and bool((_full(weight) == 2.0).all())


def discarded_microbatches() -> bool:
    """Discard microbatches by ``zero_grad`` of the optimizer, the model or a module around it."""
    import te_fsdp

    results = []
    for strategy, ways in (
        ("no_shard", "ozw"),
        ("optim", "zm"),
        ("optim_grads", "mw"),
        ("optim_grads_params", "omc"),
    ):
        for way in ("", *ways):
            model = make_sharded(strategy)
            optimizer = make_sgd(model)
            clear = {"z": lambda o=optimizer: o.zero_grad(set_to_none=False), "m": model.zero_grad}
            clear |= {
                "w": nn.ModuleList([model]).zero_grad,
                "c": torch.compile(model, backend="eager").zero_grad,
            }
            for context in (te_fsdp.no_sync(model), te_fsdp.microbatch(model, is_last=False)) if way else ():
                with context:
                    (100 * model(draw_batch(1))).square().mean().backward()
                clear.get(way, optimizer.zero_grad)()
                take_step(model, optimizer)
            for _ in () if way else range(2):
                take_step(model, optimizer)
            results.append(_weights(model))
    # Strategies add the same two ranks' gradients, whose sum knows no order.
    return all(torch.equal(w, results[0][name]) for item in results for name, w in item.items())


def optimizers_that_step_in_backward() -> bool:
    """Step one optimizer per parameter in a hook. The bits are those of one optimizer after backward.

    HSDP reduces each microbatch over ``dp_shard``, and runs the hooks in the last one.
    """
    import te_fsdp

    changed, replicas = [], {"dp_replicate": 2}
    strategies: list[tuple[str, dict[str, int]]] = [
        (strategy, {}) for strategy in ("optim_grads_params", "optim_grads", "optim", "no_shard")
    ]
    for strategy, axes in [*strategies, ("optim_grads_params", replicas), ("optim_grads", replicas)]:
        model, other = make_sharded(strategy, **axes), make_sharded(strategy, **axes)
        optimizers = {p: torch.optim.SGD([p], lr=0.1) for p in model.parameters()}

        def update(parameter: torch.Tensor, optimizers: dict[Any, Any] = optimizers) -> None:
            optimizers[parameter].step()
            optimizers[parameter].zero_grad()

        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(update)
        optimizer = make_sgd(other)
        for _ in range(2):
            for last in (False, True) if axes else (True,):
                for each in (model, other):
                    with te_fsdp.microbatch(each, is_last=last):
                        each(draw_batch()).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        changed += _changed(model, _weights(other))
    return not changed


def parameters_after_an_evaluation() -> bool:
    """Read, written to, clipped and passed to an optimizer while weights stay gathered: as where none do (ZeRO-3)."""
    results = []
    for strategy in ("optim_grads_params", "optim", "optim_grads"):
        model, losses = make_sharded(strategy), []

        def evaluate(model: nn.Module = model, losses: list[torch.Tensor] = losses) -> None:
            with torch.no_grad():
                losses.append(model.eval()(draw_batch(1)).square().mean())
            model.train()

        evaluate()
        optimizer = make_sgd(model)
        average = [p.detach().clone() for p in model.parameters()]
        for wanted in (True, False):
            model.head.requires_grad_(wanted)
            model(draw_batch()).square().mean().backward()
            evaluate()
            for p in model.parameters():
                if p.grad is not None:
                    p.grad.mul_(0.5)
            losses.append(_full(nn.utils.clip_grad_norm_(model.parameters(), 0.1)))
            optimizer.step()
            evaluate()
            with torch.no_grad():
                for p, mean in zip(model.parameters(), average, strict=True):
                    mean.lerp_(p, 0.5)
                    p.clamp_(-0.2, 0.2)
            evaluate()
            for p in model.parameters():
                p.grad = None
            if strategy != "optim_grads_params":
                model.unshard()
                if isinstance(model.head.weight, DTensor):
                    return False
                model.reshard()
        values = [*losses, *map(_full, average)]
        results.append({**_weights(model), **{str(place): value for place, value in enumerate(values)}})
    # Strategies add the same two ranks' gradients, whose sum knows no order.
    return all(torch.equal(value, results[0][name]) for item in results for name, value in item.items())


def backwards_that_raise() -> bool:
    """Skip the batch after ``optimizer.zero_grad()``, from the first one on."""

    def fail(*unused: object) -> None:
        raise ValueError("a bad batch")

    results = []
    for strategy in ("optim_grads_params", "optim", "no_shard"):
        for bad in (None, 0, 1):
            model = make_sharded(strategy)
            optimizer = make_sgd(model)
            for step in range(2):
                if step == bad:
                    hook = model.layer.register_full_backward_hook(fail)
                    with contextlib.suppress(ValueError):
                        (9 * model(draw_batch(1))).square().mean().backward()
                    hook.remove()
                    optimizer.zero_grad()
                take_step(model, optimizer)
            results.append(_weights(model))
    # Strategies add the same two ranks' gradients, whose sum knows no order.
    return all(torch.equal(w, results[0][name]) for item in results for name, w in item.items())


class Masked(nn.Linear):
    """A mask as a parameter, whose shards are equal."""

    def __init__(self, width: int) -> None:
        self.mask = None
        super().__init__(width, width, device="meta")
        mask = torch.empty(64, dtype=torch.bool, device="meta")
        self.mask = nn.Parameter(mask, requires_grad=False)

    def reset_parameters(self) -> None:
        super().reset_parameters()
        if self.mask is not None:
            self.mask.copy_(torch.arange(64) % 2 == 0)


def mask_as_a_parameter() -> bool:
    if torch.torch_version.TorchVersion(torch.__version__) < (2, 13):
        return True  # FSDP2 of torch 2.11 refuses parameters of integers
    model = Model(make_meshes())
    model.head = Masked(model.head.in_features)
    model = make_sharded(model=model)
    before = _weights(model)
    take_step(model, make_sgd(model))
    return _full(model.head.mask).sum() == 32 and "head" in _changed(model, before)


MEANT: list[Callable[[], bool]] = [
    mask_as_a_parameter,
    parameters_after_an_evaluation,
    backwards_that_raise,
    discarded_microbatches,
    optimizers_that_step_in_backward,
    frozen_and_unfrozen,
    layer_removed_after_training,
    alternating_recipes,
    gradients_filled_with_zeros_by_hand,
    grad_scaler_that_skips_a_step,
    scheduler_built_before_main_weights,
    manual_weight_average,
    hooks_after_accumulation,
    parameter_counts_and_groups,
    torch_clip_grad_norm,
    tied_after_sharding,
    layer_with_parallel_mode,
    inputs_that_should_differ,
    edits_with_main_weights,
]


def all_programs() -> dict[str, bool]:
    """Return whether each program has the expected result."""
    return {make.__name__: bool(make()) for make in MEANT}
