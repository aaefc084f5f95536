"""Bodies: averages over the outer axis that start during the last backward."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import harness
import torch
import torch.distributed as dist
from harness.collectives import recorded
from no_sharding.overlap import Chain
from torch import nn
from torch.distributed.tensor import Partial

from hfsdp.quantized_transfers import logged

#: SGD steps of 0.1 with fp32 gradients, added up over ranks in a different order.
CLOSE = {"rtol": 1e-5, "why": "fp32: sums over 2 ranks and 3 rows in a different order, a few SGD steps"}
SGD = {"lr": 0.1, "momentum": 0.9}


@contextlib.contextmanager
def record_reduce_scatters() -> Iterator[list[int]]:
    """Record the elements that this rank gets of each reduce-scatter over the outer axis, in order."""
    from te_fsdp.features.hfsdp import overlap

    results: list[int] = []
    stock = overlap.redistribute

    def counting(buffer: torch.Tensor, source: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(source, Partial):
            results.append(kwargs["into"].numel())
        return stock(buffer, source, *args, **kwargs)

    overlap.redistribute = counting
    try:
        yield results
    finally:
        overlap.redistribute = stock


# --- against one process


class Pair:
    """A chain of blocks on all ranks, each a unit, and the same in one process; SGD on both."""

    def __init__(self, axes: dict[str, int] | None = None, blocks: int = 3, **options: Any) -> None:
        """Build the run; ``options`` are arguments of fully_shard."""
        import te_fsdp

        torch.manual_seed(1)
        self.reference = Chain(blocks)
        torch.manual_seed(1)
        self.model = Chain(blocks)
        meshes = te_fsdp.Meshes.build(**(axes or {"dp_replicate": 2}), device_type=harness.device_type())
        te_fsdp.fully_shard(self.model, meshes, units="blocks.*", outer_strategy="optim", **options)
        self.optimizer = te_fsdp.shard_optimizer(torch.optim.SGD(self.model.parameters(), **SGD))
        self.other = torch.optim.SGD(self.reference.parameters(), **SGD)
        self.checks = harness.Comparisons()
        self.steps = 0

    def backward(self, seed: int, orders: list[list[int]] | None = None, marked: bool = True) -> int:
        """Run a backward on all ranks, which may use other blocks; return the number of started averages."""
        import te_fsdp

        rank = dist.get_rank()
        self.model.order = orders[rank] if orders else list(range(len(self.model.blocks)))
        context = te_fsdp.microbatch(self.model, is_last=True) if marked else contextlib.nullcontext()
        with record_reduce_scatters() as calls, context:
            self.model(inputs(seed)[rank]).square().mean().backward()
        return len(calls)

    def expect(self, seed: int, orders: list[list[int]] | None = None) -> None:
        """Run the same in one process."""
        for number, part in enumerate(inputs(seed)):
            self.reference.order = orders[number] if orders else list(range(len(self.model.blocks)))
            loss = self.reference(part.detach().requires_grad_()).square().mean()
            (loss / dist.get_world_size()).backward()

    def step(self) -> int:
        """Step both, and compare parameters; return the number of reduce-scatters that the step has started."""
        with record_reduce_scatters() as calls:
            self.optimizer.step()
        self.other.step()
        self.optimizer.zero_grad()
        self.other.zero_grad()
        self.steps += 1
        for name, parameter in self.reference.named_parameters():
            ours = harness.full(self.model.get_parameter(name))
            self.checks.close(f"step {self.steps} {name}", ours, parameter, **CLOSE)
        return len(calls)

    def both(self, seed: int, orders: list[list[int]] | None = None, marked: bool = True) -> tuple[int, int]:
        """Run backward and step; return the number of reduce-scatters that each of them has started."""
        early = self.backward(seed, orders, marked)
        self.expect(seed, orders)
        return early, self.step()


def inputs(seed: int) -> torch.Tensor:
    """Return a batch for each rank."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(dist.get_world_size(), 3, 8, generator=generator).to(harness.device()).requires_grad_()


def communication_counts() -> dict[str, Any]:
    """Return the communication of backward and step, marked or not, trained or not; all of a marked step."""
    pair = Pair()
    results = {"marked": [pair.both(seed) for seed in (1, 2, 3)]}
    results["plain"] = [pair.both(seed, marked=False) for seed in (4, 5)]
    for each in (pair.model, pair.reference):
        each.blocks[1].weight.requires_grad_(False)
    results["frozen"] = [pair.both(seed) for seed in (7, 8)]
    for each in (pair.model, pair.reference):
        each.blocks[1].weight.requires_grad_(True)
    results["trained"] = [pair.both(seed) for seed in (9, 10)]
    with recorded() as calls:
        pair.both(11)
    kinds = [call.kind for call in calls if call.kind != "all_gather"]
    return results | {"kinds": kinds, "compared": pair.checks.require(60)}


def two_optimizers() -> list[int]:
    """Use two optimizers of one model. The one sharded last gets its averages during backward."""
    import te_fsdp

    pair, results = Pair(), []
    parts = [pair.model.blocks[0], pair.model.blocks[1:]]
    optimizers = [te_fsdp.shard_optimizer(torch.optim.SGD(part.parameters(), **SGD)) for part in parts]
    pair.optimizer = optimizers[1]
    for seed in (1, 2, 3):
        results.append(pair.backward(seed))
        pair.expect(seed)
        optimizers[0].step()
        optimizers[0].zero_grad()
        pair.step()
    pair.checks.require(18)
    return results


def different_units(orders: list[list[int]], alone: bool = False) -> list[tuple[int, int]]:
    """Use different units, or a different order, on replicas.

    Args:
        orders: Blocks of each rank.
        alone: Negative control: the ranks do not agree on one order.
    """
    from te_fsdp.collectives import async_work

    stock = async_work.maximum
    pair = Pair(blocks=4)
    agree = async_work.UnitOrder.agree

    def spoilt(self: Any, *args: Any) -> None:
        async_work.maximum = lambda *args, **kwargs: None
        try:
            agree(self, *args)
        finally:
            async_work.maximum = stock

    if alone:
        async_work.UnitOrder.agree = spoilt
    try:
        results = [pair.both(seed, orders) for seed in (1, 2, 3)]
    finally:
        async_work.UnitOrder.agree = agree
    pair.checks.require(24)
    return results


def units_used_several_times(reentrant: bool) -> list[tuple[int, int]]:
    """Train with a block used twice, only later, or from the first on; or backwards in the backward (checkpoints)."""
    pair, results = Pair(), []
    for each in (pair.model, pair.reference):
        each.reentrant = reentrant
    usual, again = [[0, 1, 2]] * 2, [[0, 1, 2] if reentrant else [0, 2, 1, 2]] * 2
    for seed, orders in enumerate([usual, usual, again, usual]):
        results.append(pair.both(seed, orders))
    pair = Pair()
    for seed in (1, 2):
        results.append(pair.both(seed, again))
    pair.checks.require(12)
    return results


def interrupted(where: dict[int, int | str]) -> list[tuple[int, int]]:
    """Check a marked backward that raises on each rank at a different place, and the repeated step.

    Args:
        where: rank -> block whose gradient raises, "forward", or "before": in a microbatch that others follow. Ranks
            that are left out see no exception, and go on to the step.
    """
    import te_fsdp

    pair = Pair()
    for seed in (1, 2):
        pair.both(seed)
    place = where.get(dist.get_rank())
    if place is not None:
        with _raising(pair.model, place):
            try:
                if place == "before":
                    with te_fsdp.microbatch(pair.model, is_last=False):
                        pair.model(inputs(3)[dist.get_rank()]).square().mean().backward()
                pair.backward(3)
            except RuntimeError as error:
                assert "half way" in str(error)
            else:
                raise AssertionError("nothing was raised")
        te_fsdp.zero_grad(pair.model)
    results = [pair.both(3)]
    results += [pair.both(seed) for seed in (4, 5)]
    pair.checks.require(24)
    return results


@contextlib.contextmanager
def _raising(model: nn.Module, place: int | str) -> Iterator[None]:
    def fail(*unused: Any) -> None:
        raise RuntimeError("half way")

    if place == "forward":
        handle = model.blocks[2].register_forward_pre_hook(fail)
    else:
        handle = model.blocks[0 if place == "before" else place].register_full_backward_hook(fail)
    try:
        yield
    finally:
        handle.remove()


def change_gradients_before_step(how: str) -> dict[str, Any]:
    """Check a step whose gradients change between the end of the marked backward and the step.

    Returns:
        ``sent``: reduce-scatters of that backward, and of the steps after it; ``between``: of that backward and its
        step, and what was in between; ``logged``: lines of te_fsdp's log.
    """
    pair = Pair()
    for seed in (1, 2):
        pair.both(seed)
    with logged() as lines, record_reduce_scatters() as calls:
        results = [pair.backward(3)]
        pair.expect(3)
        _change(how, pair)
        pair.step()
    more = [pair.both(seed) for seed in (6, 7)]
    pair.checks.require(18)
    return {"sent": [*results, *more], "between": len(calls), "logged": [x for x in lines if "in vain" in x]}


def _change(how: str, pair: Pair) -> None:
    import te_fsdp

    rank, size = dist.get_rank(), dist.get_world_size()
    if how in ("zero_grad", "optimizer.zero_grad", "zeros"):
        if how == "optimizer.zero_grad":
            pair.optimizer.zero_grad()
        else:
            te_fsdp.zero_grad(pair.model, set_to_none=how == "zero_grad")
        pair.other.zero_grad()
        pair.backward(4)
        pair.expect(4)
    elif how == "marked twice":
        pair.backward(4)
        pair.expect(4)
    elif how == "twice in one context":
        with te_fsdp.microbatch(pair.model, is_last=True):
            for seed in (4, 5):
                pair.model(inputs(seed)[rank]).square().mean().backward()
        for seed in (4, 5):
            pair.expect(seed)
    elif how == "plain":
        pair.backward(4, marked=False)
        pair.expect(4)
    elif how == "one rank":  # no rank needs another's backward
        if rank == 0:
            pair.backward(4, marked=False)
        (pair.reference(inputs(4)[0].detach()).square().mean() / size).backward()
    elif how in ("by hand", "scale_gradients"):
        if how == "by hand":
            for parameter in pair.model.parameters():
                parameter.grad.mul_(0.5)
        else:
            te_fsdp.scale_gradients(pair.model, 0.5)
        for parameter in pair.reference.parameters():
            parameter.grad.mul_(0.5)


def backward_after_norm() -> None:
    """Run a marked backward after a norm, which the step would miss."""
    import te_fsdp

    pair = Pair()
    for seed in (1, 2):
        pair.both(seed)
    pair.backward(3)
    te_fsdp.clip_grad_norm_(pair.model, 1e9)
    pair.backward(4)
    try:
        pair.optimizer.step()
    finally:
        te_fsdp.zero_grad(pair.model)
        results = [pair.both(seed) for seed in (5, 6)]
        assert results[1] == (3, 0), results


def communicated_dtypes(where: str, absent: int | None = None) -> list[list[str]]:
    """Return the dtypes of sent averages if the third and the fourth step, or their backwards, use bf16.

    Args:
        where: "step" or "backward".
        absent: Rank without a backward in the fourth step.
    """
    import te_fsdp

    pair = Pair(precision=te_fsdp.MixedPrecisionPolicy(main_params_dtype=None))
    results = []
    for step in range(5):
        both = te_fsdp.grad_comm(pair.model, torch.bfloat16) if step in (2, 3) else contextlib.nullcontext()
        with recorded() as calls, contextlib.ExitStack() as stack:
            with both if where == "backward" else contextlib.nullcontext():
                stack.enter_context(both if where == "step" else contextlib.nullcontext())
                if step != 3 or dist.get_rank() != absent:
                    pair.backward(step, [[0, 1, 2]] * 2)
            pair.optimizer.step()
            pair.optimizer.zero_grad()
        results.append([call.dtype for call in calls if call.kind == "reduce_scatter"])
    return results


def marked_on_some_ranks(marked: list[list[bool]], lines: int = 1) -> list[tuple[int, int]]:
    """Check steps whose last backward is marked on some ranks only.

    Args:
        marked: For each step, the ranks that mark the last microbatch.
        lines: How often the log reports that averages wait.
    """
    from te_fsdp.features.hfsdp import overlap

    overlap._warn_once.cache_clear()
    pair = Pair()
    with logged() as seen:
        results = [pair.both(seed, marked=ranks[dist.get_rank()]) for seed, ranks in enumerate(marked)]
    pair.checks.require(6 * len(marked))
    assert len([line for line in seen if "in the first step: so averages" in line]) == lines, seen
    return results


def context_flags() -> list[bool]:
    """Return the model's flags in contexts: nested, and left by exceptions."""
    import te_fsdp
    from te_fsdp.sharded_model import get_sharded_model

    model = Pair().model
    state, results = get_sharded_model(model), []
    with te_fsdp.microbatch(model, is_last=True):
        results.append(state.sync.last_microbatch)
        for inner in (te_fsdp.no_sync(model), te_fsdp.sync(model), te_fsdp.microbatch(model, is_last=False)):
            with inner:
                results.append(state.sync.last_microbatch)
            results.append(state.sync.last_microbatch)
    with contextlib.suppress(RuntimeError), te_fsdp.microbatch(model, is_last=True):
        raise RuntimeError
    results.append(state.sync.last_microbatch)
    with te_fsdp.sync(model):
        results.append(state.sync.last_microbatch)
    return results
