"""Loops in which one rank does something different in a step, without an error of torch."""

from __future__ import annotations

import contextlib
import itertools
from typing import Any

import harness
import torch
import torch.distributed as dist
from bodies_mistakes import WIDTH, draw_batch, make_sgd, make_sharded
from torch import nn


def _backward(model: nn.Module) -> None:
    model(draw_batch(dist.get_rank() // 2 if dist.get_world_size() == 4 else None)).square().mean().backward()


def _skips_step(is_alone: bool, step: int) -> bool:
    return step == 2 and (dist.get_rank() == 1 or not is_alone)


def skip_a_step(model: nn.Module, optimizer: Any, is_alone: bool) -> None:
    for step in range(5):
        _backward(model)
        if not _skips_step(is_alone, step):
            optimizer.step()
        optimizer.zero_grad()


def leave_out_a_microbatch(model: nn.Module, optimizer: Any, is_alone: bool) -> None:
    import te_fsdp

    # As many microbatches in total: a rank without data would make the others wait.
    for of_step in (1, 1, 1, 2) if dist.get_rank() == 1 and is_alone else (1, 2, 1, 1):
        for index in range(of_step):
            with te_fsdp.microbatch(model, is_last=index == of_step - 1):
                _backward(model)
        optimizer.step()
        optimizer.zero_grad()


def change_the_learning_rate(model: nn.Module, optimizer: Any, is_alone: bool) -> None:
    for step in range(5):
        if step > 1 and (dist.get_rank() == 1 or not is_alone):
            optimizer.param_groups[0]["lr"] = 0.01
        _backward(model)
        optimizer.step()
        optimizer.zero_grad()


def clear_a_gradient(model: nn.Module, optimizer: Any, is_alone: bool) -> None:
    for step in range(5):
        _backward(model)
        if step > 1 and (dist.get_rank() == 1 or not is_alone):
            model.head.weight.grad = None  # type: ignore[union-attr]
        optimizer.step()
        optimizer.zero_grad()


def scale_gradients(model: nn.Module, optimizer: Any, is_alone: bool) -> None:
    for step in range(5):
        _backward(model)
        if step > 1 and (dist.get_rank() == 1 or not is_alone):
            for parameter in model.parameters():
                parameter.grad.mul_(0.5)  # type: ignore[union-attr]
        optimizer.step()
        optimizer.zero_grad()


def clip(
    model: nn.Module, optimizer: Any, is_alone: bool, begin: int = 2, by_torch: bool = False, **changed: float
) -> None:
    import te_fsdp

    clip_grad_norm_ = torch.nn.utils.clip_grad_norm_ if by_torch else te_fsdp.clip_grad_norm_
    for step in range(6):
        _backward(model)
        is_changed = step == begin and (dist.get_rank() == 1 or not is_alone)
        arguments = {"max_norm": 1e-3, "norm_type": 2.0} | (changed if is_changed else {})
        clip_grad_norm_(model.parameters(), **arguments)
        optimizer.step()
        optimizer.zero_grad()


def clip_by_another_norm(model: nn.Module, optimizer: Any, is_alone: bool) -> None:
    clip(model, optimizer, is_alone, begin=0, norm_type=3.0)


def change_the_clipping(model: nn.Module, optimizer: Any, is_alone: bool) -> None:
    """Change the clipping in one step only, before a step whose arguments ranks compare."""
    clip(model, optimizer, is_alone, max_norm=2e-3)


def change_the_clipping_by_torch(model: nn.Module, optimizer: Any, is_alone: bool) -> None:
    clip(model, optimizer, is_alone, by_torch=True, max_norm=2e-3)


def change_the_norm_by_torch(model: nn.Module, optimizer: Any, is_alone: bool) -> None:
    clip(model, optimizer, is_alone, by_torch=True, norm_type=3.0)


def step_several_optimizers(model: nn.Module, optimizer: Any, is_alone: bool) -> None:
    """Make two steps per backward, with two models."""
    other = make_sharded()
    optimizers = [make_sgd(model.head), make_sgd(model.inp), make_sgd(other)]  # type: ignore[arg-type]
    for step in range(6):
        _backward(model)
        _backward(other)
        for each in optimizers:
            if not (each is optimizers[0] and _skips_step(is_alone, step)):
                each.step()
            each.zero_grad()


def run(program: str, is_alone: bool, strategy: str, every: int = 2, **options: Any) -> list[float]:
    """Run a program next to an older model. Return the sum of each parameter over all ranks."""
    from te_fsdp.checks import progress

    before, progress.EVERY = progress.EVERY, every
    try:
        older = make_sharded(strategy, **options)
        model = make_sharded(strategy, **options)
        globals()[program](model, make_sgd(model), is_alone)
        del older
    finally:
        progress.EVERY = before
    return [float(torch.sum(getattr(p, "full_tensor", p.detach)())) for p in model.parameters()]


def save_after_a_step(path: str, is_alone: bool, strategy: str) -> None:
    """Skip a step between two comparisons, then save."""
    import te_fsdp

    model = make_sharded(strategy)
    optimizer = make_sgd(model)
    for step in range(5):
        _backward(model)
        if step != 4 or (is_alone and dist.get_rank() == 0):
            optimizer.step()
        optimizer.zero_grad()
    te_fsdp.checkpoint.save(path, model, optimizer)


def keys_of_the_store() -> list[int]:
    """Return the number of keys in the store after each of some comparisons."""
    from te_fsdp.checks import progress
    from te_fsdp.upstream import torch_dtensor as _torch

    before, progress.EVERY = progress.EVERY, 2
    try:
        model = make_sharded()
        optimizer, counts = make_sgd(model), []
        for _ in range(10):
            _backward(model)
            optimizer.step()
            optimizer.zero_grad()
            dist.barrier()
            counts.append(_torch.default_store().num_keys())
            dist.barrier()
    finally:
        progress.EVERY = before
    return counts[::2]


class Branches(nn.Module):
    """Three units of equal size, called in any order."""

    def __init__(self, order: list[int]) -> None:
        super().__init__()
        self.branches = nn.ModuleList(nn.Linear(WIDTH, WIDTH, device="meta") for _ in range(3))
        self.order = order

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        outputs = {index: self.branches[index](x) for index in self.order}
        return torch.stack([outputs[index] for index in sorted(outputs)]).sum(0)


def run_units_in_two_orders(begin: int, is_alone: bool, is_training: bool = True, **options: Any) -> None:
    """Call units in a different order from forward ``begin`` on, on rank 1 or on all ranks."""
    import te_fsdp

    axes = {axis: options.pop(axis, 1) for axis in ("dp_replicate", "dp_shard", "tp")}
    meshes = te_fsdp.Meshes.build(**axes, device_type=harness.device().type)
    model = Branches([0, 1, 2])
    te_fsdp.fully_shard(model, meshes, units=["branches.*"], **options)
    te_fsdp.materialize(model, seed=0)
    for number in range(3):
        if number == begin and (dist.get_rank() == 1 or not is_alone):
            model.order = [1, 0, 2]
        with torch.set_grad_enabled(is_training):
            output = model(draw_batch(dist.get_rank() // axes["tp"]))
        if is_training:
            output.square().mean().backward()
            model.zero_grad()


class Experts(nn.Module):
    """Two layers of experts, of which a rank calls only those that have tokens."""

    def __init__(self, meshes: Any) -> None:
        import transformer_engine.pytorch as te

        super().__init__()
        options = {"bias": False, "device": "meta", **meshes.te_kwargs()}
        self.inp = nn.Linear(WIDTH, WIDTH, device="meta")
        self.experts = nn.ModuleList(te.GroupedLinear(1, WIDTH, WIDTH, **options) for _ in range(2))

    def forward(self, x: torch.Tensor, calls: list[int]) -> torch.Tensor:
        x = self.inp(x)
        for index in calls:
            x = x + self.experts[index](x, [len(x)])
        return x


def different_experts_over_ep(checks: str | None) -> None:
    import te_fsdp

    meshes = te_fsdp.Meshes.build(dp_shard=1, ep=2, device_type=harness.device().type)
    model = Experts(meshes)
    te_fsdp.fully_shard(model, meshes, units=["experts.*"], checks=checks)
    te_fsdp.materialize(model, seed=0)
    for calls in ([0, 1], [1, 0]) if dist.get_rank() == 0 else ([1], [0]):
        with torch.no_grad():
            model(draw_batch(), calls)
        model(draw_batch(), calls).square().mean()


BASE = [0, 1, 2]


class Layers(nn.Module):
    """Units of equal size, called one after another in any order."""

    def __init__(self, device: Any = "meta") -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, device=device) for _ in range(3))
        self.order = BASE

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for index in self.order:
            x = self.layers[index](x).tanh()
        return x


def _with_reference(axes: dict[str, int], options: dict[str, Any]) -> tuple[Any, Any, Layers, list[Any]]:
    """Return meshes, a sharded model, the same model in one process, and their optimizers."""
    import te_fsdp

    meshes = te_fsdp.Meshes.build(**axes, device_type=harness.device().type)
    model, reference = Layers(), Layers(harness.device())
    te_fsdp.fully_shard(model, meshes, units=["layers.*"], **options)
    te_fsdp.materialize(model, seed=0)
    with torch.no_grad():
        for parameter, sharded in zip(reference.parameters(), model.parameters(), strict=True):
            parameter.copy_(harness.full(sharded))
    optimizers = [make_sgd(model), make_sgd(reference)]
    if options.get("outer_strategy") == "optim":
        te_fsdp.shard_optimizer(optimizers[0])
    return meshes, model, reference, optimizers


def change_the_order(
    axes: dict[str, int], orders: dict[str, list[int]], raises: bool, **options: Any
) -> dict[str, Any] | str:
    """Compare three steps of two microbatches with one process. Return the comparisons.

    `orders` has the orders of step 1 by "RANK MICROBATCH". With `raises`, only ranks that change the order run that
    microbatch, and return the error.
    """
    import te_fsdp

    meshes, model, reference, optimizers = _with_reference(axes, options)
    checks = harness.Comparisons()
    for step, micro in itertools.product(range(3), range(2)):
        by_rank = dict.fromkeys(range(meshes.data_size), BASE)
        if step == 1:
            by_rank |= {
                int(key.split()[0]): order for key, order in orders.items() if key.endswith(str(micro))
            }
        model.order = by_rank[meshes.data_rank]
        if raises and any(order != BASE for order in by_rank.values()):
            return _run_alone(model, is_last=micro == 1) if model.order != BASE else ""
        with te_fsdp.microbatch(model, is_last=micro == 1):
            model(draw_batch(meshes.data_rank)).square().mean().backward()
        for rank, order in by_rank.items():
            reference.order = order
            (reference(draw_batch(rank)).square().mean() / meshes.data_size).backward()
        for optimizer in optimizers if micro == 1 else ():
            optimizer.step()
            optimizer.zero_grad()
    for (name, have), want in zip(model.named_parameters(), reference.parameters(), strict=True):
        checks.close(name, have, want, 1e-5, "fp32: sums in a different order")
    return checks.require(6)


def _run_alone(model: nn.Module, is_last: bool) -> str:
    """Return the error of a forward on this rank alone, or an empty string."""
    import te_fsdp

    te_fsdp.set_collective_timeout(1)
    try:
        with te_fsdp.microbatch(model, is_last=is_last):
            model(draw_batch())
    except te_fsdp.CollectiveError as error:
        return str(error)
    finally:
        te_fsdp.set_collective_timeout(1800)
    return ""


#: Setters of FSDP2 that change the order or the operations of collectives.
SETTERS = {
    "set_modules_to_forward_prefetch": lambda layers: layers[0].set_modules_to_forward_prefetch([layers[2]]),
    "set_modules_to_backward_prefetch": lambda layers: layers[2].set_modules_to_backward_prefetch(
        [layers[0]]
    ),
    "set_reshard_after_forward": lambda layers: layers[0].set_reshard_after_forward(False),
    "set_requires_gradient_sync": lambda layers: layers[0].set_requires_gradient_sync(False),
    "set_reshard_after_backward": lambda layers: layers[0].set_reshard_after_backward(False),
    "set_force_sum_reduction_for_comms": lambda layers: layers[0].set_force_sum_reduction_for_comms(True),
}


def call_a_setter(setter: str, is_alone: bool, begin: int = 0) -> str:
    """Call a setter of FSDP2 before forward `begin`, on rank 1 or on all ranks.

    Return the error of rank 1 if only it calls the setter, after the first forward.
    """
    import te_fsdp

    meshes = te_fsdp.Meshes.build(dp_shard=2, device_type=harness.device().type)
    model = Layers()
    te_fsdp.fully_shard(model, meshes, units=["layers.*"])
    te_fsdp.materialize(model, seed=0)
    for number in range(3):
        if number == begin and (dist.get_rank() == 1 or not is_alone):
            SETTERS[setter](model.layers)
        if number == begin > 0 and is_alone:
            return _run_alone(model, is_last=True) if dist.get_rank() == 1 else ""
        model(draw_batch()).square().mean().backward()
    return ""


def call_manually(calls: str, is_alone: bool, strategy: str, begin: int) -> tuple[str, int]:
    """Call unshard and reshard, or start_param_gather, before forwards of two steps from step `begin` on.

    `calls` has, for each forward of a step, the numbers of layers, negative ones for `reshard`. With `is_alone`, rank 1
    makes the calls of step `begin` alone. Return its error, and the number of waits of the last step.
    """
    import te_fsdp

    meshes = te_fsdp.Meshes.build(dp_shard=2, device_type=harness.device().type)
    model = Layers()
    te_fsdp.fully_shard(model, meshes, units=["layers.*"], strategy=strategy)
    te_fsdp.materialize(model, seed=0)
    optimizer, counts = make_sgd(model), list[int]()
    state = te_fsdp.sharded_model.get_sharded_model(model)
    assert state is not None
    for step in range(5):
        for micro, numbers in enumerate(calls.split("|")):
            is_alone_now = is_alone and step == begin and bool(numbers)
            if is_alone_now and dist.get_rank() == 0:
                return "", 0
            te_fsdp.set_collective_timeout(1 if is_alone_now else 1800)
            try:
                for number in map(int, numbers.split() if step >= begin else ()):
                    layer: Any = model.layers[abs(number) - 1]
                    layer.unshard() if number > 0 else layer.reshard()
            except te_fsdp.CollectiveError as error:
                return str(error), 0
            finally:
                te_fsdp.set_collective_timeout(1800)
            if is_alone_now:
                return _run_alone(model, is_last=True), 0
            with te_fsdp.microbatch(model, is_last=micro == 1):
                model(draw_batch()).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        counts.append(state.computed.checks_done.total())
    return "", counts[-1] - counts[-2]


def reshard_before_a_step() -> None:
    """Reshard on rank 1 alone before steps."""
    import te_fsdp

    te_fsdp.set_collective_timeout(5)
    model = make_sharded("optim")
    optimizer = make_sgd(model)
    for _ in range(3):
        with te_fsdp.no_sync(model):
            _backward(model)
            if dist.get_rank() == 1:
                model.layer.reshard()  # type: ignore[operator]
        te_fsdp.finish_grad_reduce(model)
        optimizer.step()
        optimizer.zero_grad()
    te_fsdp.set_collective_timeout(1800)


def run_different_microbatches(kind: str) -> int:
    """Run one or two microbatches in a step, depending on the rank. Return the number of states to compare."""
    import te_fsdp

    meshes = te_fsdp.Meshes.build(dp_shard=2, device_type=harness.device().type)
    model = Layers()
    te_fsdp.fully_shard(model, meshes, units=["layers.*"], strategy="optim")
    te_fsdp.materialize(model, seed=0)
    optimizer, state = make_sgd(model), te_fsdp.sharded_model.get_sharded_model(model)
    assert state is not None
    for layer in model.layers:  # Gloo has no sums with a factor
        layer.set_force_sum_reduction_for_comms(True)  # type: ignore[operator]
    for step in range(4):
        if kind == "gather":
            te_fsdp.start_param_gather(model)
        for layer in model.layers if kind == "factor" else ():
            layer.set_gradient_divide_factor(float(step + 2))  # type: ignore[operator]
        count = 1 + (step > 0 and (step + dist.get_rank()) % 2)
        for micro in range(count):
            with te_fsdp.microbatch(model, is_last=micro == count - 1):
                model(draw_batch()).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return len(state.computed.states)


def train_different_microbatches(
    axes: dict[str, int], counts: list[list[int]], setter: bool, **options: Any
) -> dict[str, Any]:
    """Compare steps with numbers of microbatches by step and data-parallel rank with one process.

    With `setter`, a setter of FSDP2 leaves out the reductions of microbatches, instead of `te_fsdp.microbatch`.
    """
    import te_fsdp

    meshes, model, reference, optimizers = _with_reference(axes, options)
    checks = harness.Comparisons()
    for by_rank in counts:
        count = by_rank[meshes.data_rank]
        for micro in range(count):
            is_last = micro == count - 1
            for layer in model.layers if setter else ():
                layer.set_requires_gradient_sync(is_last)  # type: ignore[operator]
            with contextlib.nullcontext() if setter else te_fsdp.microbatch(model, is_last=is_last):
                model(draw_batch(meshes.data_rank + 8 * micro)).square().mean().backward()
        for rank, of_rank in enumerate(by_rank):
            for micro in range(of_rank):
                loss = reference(draw_batch(rank + 8 * micro)).square().mean()
                (loss / meshes.data_size).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for (name, have), want in zip(model.named_parameters(), reference.parameters(), strict=True):
        checks.close(name, have, want, 1e-5, "fp32: sums in a different order")
    return checks.require(6)
