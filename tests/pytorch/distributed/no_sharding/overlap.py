"""Bodies: reductions of units with strategy no_shard that begin while backward runs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import harness
import torch
import torch.distributed as dist
from harness.collectives import recorded
from harness.memory import live_bytes
from torch import nn
from torch.utils.checkpoint import checkpoint

from no_sharding.bodies import meshes_of

WHY = "fp32: sums over 2 ranks and 3 rows in a different order"
#: Elements of each unit's bucket: parameters padded to 64, and a flag for each.
SIZES = {"never": 130, "head": 258, "common": 322, "left": 386, "right": 514}
MIXED = {"": "optim_grads_params", "left": "no_shard", "right": "no_shard", "head": "no_shard"}


class Branches(nn.Module):
    """common -> left on odd ranks, right on even ones -> head; no rank uses the fifth."""

    def __init__(self, left: int = 6) -> None:
        super().__init__()
        sizes = {"never": (3, 3), "common": (4, 50), "left": (50, left), "right": (50, 8), "head": (1, 70)}
        for name, (inner, outer) in sizes.items():
            self.add_module(name, nn.Linear(inner, outer, device=harness.device()))

    def forward(self, x: torch.Tensor, rank: int) -> torch.Tensor:
        branch = self.left if rank % 2 else self.right
        return self.head(branch(self.common(x)).tanh().sum(-1, keepdim=True))


def order(
    strategy: Any = "no_shard", *, marked: bool = False, left: int = 6, spoil: str = ""
) -> dict[str, Any]:
    """Run backwards in which each rank uses other units, and compare values with one process.

    Args:
        strategy: of all units, or by name.
        marked: two microbatches for each backward, and the loop marks the last one.
        left: features out of a branch; 8 makes its bucket as large as the other branch's.
        spoil: "order": the ranks do not agree on one; "late": nothing begins during backward.

    Returns:
        For each backward the elements of the all-reduces of data parallelism, in order, and how many of them were
        called when the input's gradient came.
    """
    import te_fsdp

    torch.manual_seed(1)
    reference = Branches(left)
    torch.manual_seed(1)
    model = Branches(left)
    units = [name for name, _ in model.named_children() if not isinstance(strategy, dict) or name in strategy]
    te_fsdp.fully_shard(model, meshes_of({}), units=units, strategy=strategy)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    generator = torch.Generator().manual_seed(2)
    checks, results, complete = harness.Comparisons(), [], []
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: complete.append(p.grad is not None))
    with inject_fault(spoil):
        for number in range(5):
            if number in (2, 4):
                for each in (model, reference):
                    each.head.weight.requires_grad_(number == 4)
                    each.zero_grad()
            with recorded() as calls:
                early: list[int] = []
                for last in (False, True) if marked else (True,):
                    x = torch.randn(ranks, 3, 4, generator=generator).to(harness.device()).requires_grad_()
                    x.register_hook(lambda _, e=early, c=calls: e.append(len(_sums(c))))
                    sum(reference(part, r).square().mean() for r, part in enumerate(x.detach())).backward()
                    with te_fsdp.microbatch(model, is_last=last):
                        model(x[rank], rank).square().mean().backward()
            results.append((_sums(calls), early[-1]))
            for name, parameter in reference.named_parameters():
                if parameter.grad is not None and parameter.requires_grad:
                    mine = harness.full(model.get_parameter(name).grad)
                    checks.close(f"backward {number} {name}", mine, parameter.grad / ranks, 1e-5, WHY)
    assert all(complete), "a hook of a parameter has found no gradient"
    return {**checks.require(20), "calls": results}


def _sums(calls: list[Any]) -> list[int]:
    """Return sums of gradients and of the order of units, without flags of reductions and compared numbers."""
    reduced = (call for call in calls if call.kind == "all_reduce" and call.dtype != "int32")
    return [call.whole for call in reduced if (call.dtype, call.whole) != ("int64", 4)]


@contextlib.contextmanager
def inject_fault(what: str) -> Iterator[None]:
    from te_fsdp.collectives import async_work
    from te_fsdp.collectives.async_work import UnitOrder

    agree, is_complete = UnitOrder.agree, UnitOrder.is_complete

    def alone(self: UnitOrder, *args: Any) -> None:
        stock, async_work.maximum = async_work.maximum, lambda *a, **k: None
        agree(self, *args)
        async_work.maximum = stock

    if what == "order":
        UnitOrder.agree = alone
    if what == "late":
        UnitOrder.is_complete = lambda self, unit: False
    try:
        yield
    finally:
        UnitOrder.agree, UnitOrder.is_complete = agree, is_complete


# --- chains of blocks


class Chain(nn.Module):
    """Blocks one after the other, by number, some of them several times."""

    def __init__(self, blocks: int = 3, width: int = 8) -> None:
        super().__init__()
        layers = (nn.Linear(width, width, device=harness.device()) for _ in range(blocks))
        self.blocks = nn.ModuleList(layers)
        self.order, self.reentrant = list(range(blocks)), False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number in self.order:
            block = self.blocks[number]
            x = checkpoint(block, x, use_reentrant=True) if self.reentrant else block(x)
            x = x.tanh()
        return x


def chain(blocks: int = 3, strategy: Any = "no_shard", **options: Any) -> tuple[Chain, Chain]:
    """Return a model on all ranks, and the same in one process."""
    import te_fsdp

    torch.manual_seed(1)
    reference = Chain(blocks)
    torch.manual_seed(1)
    model = Chain(blocks)
    te_fsdp.fully_shard(model, meshes_of({}), units="blocks.*", strategy=strategy, **options)
    return model, reference


def inputs(seed: int) -> torch.Tensor:
    """Return a batch for each rank."""
    generator = torch.Generator().manual_seed(seed)
    shape = (dist.get_world_size(), 3, 8)
    return torch.randn(*shape, generator=generator).to(harness.device()).requires_grad_()


def step(model: Chain, reference: Chain, seed: int, orders: list[list[int]] | None = None) -> dict[str, Any]:
    """Run a backward of both, with equal gradients. The ranks may use other blocks: `orders`."""
    import te_fsdp

    x, rank = inputs(seed), dist.get_rank()
    te_fsdp.zero_grad(model)
    reference.zero_grad()
    model.order = orders[rank] if orders else model.order
    model(x[rank]).square().mean().backward()
    for number, part in enumerate(x):
        reference.order = orders[number] if orders else reference.order
        reference(part).square().mean().backward()
    checks = harness.Comparisons()
    for name, parameter in reference.named_parameters():
        expected = parameter.grad / dist.get_world_size()
        checks.close(name, harness.full(model.get_parameter(name).grad), expected, 1e-5, WHY)
    return checks.require(6)


def interleave_with_fsdp2() -> dict[str, Any]:
    """Start a bucket before FSDP2's reduction on one rank, and after it on the other."""
    kept = {"": "optim_grads_params", "blocks.1": "no_shard", "blocks.3": "no_shard"}
    model, reference = chain(4, kept)
    step(model, reference, 1)
    results = {}
    for name, orders in {"all": [[0, 1, 2, 3]] * 2, "one": [[0, 1, 2, 3], [0, 1, 2]]}.items():
        with recorded() as calls:
            step(model, reference, 2, orders)
        results[name] = [c.kind for c in calls if c.kind != "all_gather" and c.dtype != "int32"]
    return results


def several_gradients(first: list[int], later: list[int]) -> int:
    """Use blocks several times in checkpoints, which get several gradients in one backward.

    Args:
        first: order of the blocks in the first backward.
        later: in those that follow.

    Returns:
        All-reduces that the last backward had called when the last block's gradient came.
    """
    model, reference = chain()
    for each in (model, reference):
        each.order, each.reentrant = first, True
    step(model, reference, 1)
    for each in (model, reference):
        each.order = later
    with recorded() as calls:
        at_end: list[int] = []
        model.blocks[later[0]].weight.register_hook(lambda _: at_end.append(len(_sums(calls))))
        step(model, reference, 2)
        calls.clear()
        step(model, reference, 3)
    return at_end[-1]


def interrupted(where: dict[int, int]) -> dict[str, Any]:
    """Raise in a backward at a different block on each rank. The next backwards are correct.

    Args:
        where: rank -> block whose gradient raises. Ranks that are left out see no exception.

    Returns:
        Of the interrupted backward, whether it raised, and whether a gradient that it has left is NaN.
    """
    import te_fsdp

    model, reference = chain()
    step(model, reference, 1)
    te_fsdp.zero_grad(model)
    handle, raised = None, False
    if dist.get_rank() in where:
        handle = model.blocks[where[dist.get_rank()]].register_full_backward_hook(_fail)
    x = inputs(2)
    with recorded() as calls:
        output = model(x[dist.get_rank()]).square().mean()
        try:
            output.backward()
        except RuntimeError as error:
            assert "half way" in str(error)
            handle.remove()
            raised = True
            te_fsdp.zero_grad(model)
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    spoilt = any(bool(g.isnan().all()) for g in gradients)
    for seed in (3, 4):
        step(model, reference, seed)
    return {"raised": raised, "spoilt": spoilt, "calls": len(_sums(calls))}


def raise_at_different_points(where: list[dict[int, int | str]], plain: bool = False) -> list[int]:
    """Raise at different points of a backward, or of a forward; each rank repeats its microbatches until it steps.

    Args:
        where: for each step, rank -> block whose gradient raises, "loss" (before any gradient reaches the model) or
            "forward". Ranks that are left out see no exception.
        plain: clear gradients with the optimizer, and not with te_fsdp.

    Returns:
        For each step how often this rank ran it.
    """
    import te_fsdp

    model, reference = chain()
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, reference)]
    rank, checks, results = dist.get_rank(), harness.Comparisons(), []
    for number, places in enumerate([{}, *where, {}]):
        place: int | str | None = places.get(rank)
        attempts, stepped = 0, False
        while not stepped:
            attempts += 1
            assert attempts < 10, "runs its microbatches again and again"
            try:
                for microbatch in range(2):
                    x = inputs(2 * number + microbatch)[rank]
                    with _raising(model, place if microbatch else None):
                        loss = model(x).square().mean()
                        if place == "loss" and microbatch:
                            loss.register_hook(_fail)
                        loss.backward()
                optimizers[0].step()
                stepped = True
            except (RuntimeError, te_fsdp.OrderError) as error:
                assert "half way" in str(error) or "on another rank" in str(error), error
                place = None
                optimizers[0].zero_grad() if plain else te_fsdp.zero_grad(model)
        results.append(attempts)
        for microbatch in range(2):
            for part in inputs(2 * number + microbatch).detach():
                (reference(part).square().mean() / dist.get_world_size()).backward()
        optimizers[1].step()
        for optimizer in optimizers:
            optimizer.zero_grad()
        for name, parameter in reference.named_parameters():
            ours = harness.full(model.get_parameter(name))
            checks.close(f"step {number} {name}", ours, parameter, 1e-5, WHY)
    checks.require(6 * len(results))
    return results


@contextlib.contextmanager
def _raising(model: Chain, place: int | str | None) -> Iterator[None]:
    if place is None or place == "loss":
        yield
        return
    block = model.blocks[1 if place == "forward" else int(place)]
    handle = (
        block.register_forward_pre_hook(_fail)
        if place == "forward"
        else block.register_full_backward_hook(_fail)
    )
    try:
        yield
    finally:
        handle.remove()


def _fail(*unused: Any) -> None:
    raise RuntimeError("half way")


def bitwise_equal(options: dict[str, Any]) -> dict[str, Any]:
    """Compare gradients reduced during backward bit for bit with those reduced at its end.

    Args:
        options: of the precision policy, dtypes by name.
    """
    import te_fsdp

    options = {
        key: getattr(torch, value) if isinstance(value, str) else value for key, value in options.items()
    }
    model, _ = chain(precision=te_fsdp.MixedPrecisionPolicy(**options))
    x, results, early = inputs(1), [], []
    with recorded() as calls:

        def hook(_: Any) -> None:
            begun = (c for c in calls if c.kind != "all_gather" and (c.dtype, c.whole) != ("int64", 4))
            early.append(len(list(begun)))

        model.blocks[0].weight.register_hook(hook)
        for _ in range(2):
            calls.clear()
            te_fsdp.zero_grad(model)
            model(x[dist.get_rank()]).square().mean().backward()
            results.append({name: p.grad.clone() for name, p in model.named_parameters()})
            gradients = [call for call in calls if call.dtype != "int32"]
            kinds = [call.kind for call in gradients]
    for name, gradient in results[0].items():
        harness.assert_bitwise_equal(name, results[1][name], gradient)
    return {"early": early, "kinds": kinds, "dtypes": [call.dtype for call in gradients]}


def memory() -> list[float]:
    """Return the most bytes of gradients and buckets in each of two backwards, relative to those of all gradients.

    Looked at whenever a bucket has been filled, when what it was filled with is still there.
    """
    import te_fsdp

    model = te_fsdp.fully_shard(Chain(width=1024), meshes_of({}), units="blocks.*", strategy="no_shard")
    gradients = sum(p.nbytes for p in model.parameters())
    x, results, cat = torch.ones(1, 1024, device=harness.device()), [], torch.cat
    model(x).sum().backward()  # workspaces
    te_fsdp.zero_grad(model)
    for agreed in (False, True):
        if not agreed:
            model.blocks[0].bias.requires_grad_(False)
        before, seen = live_bytes(), []

        def filling(*args: Any, seen: list[int] = seen, **kwargs: Any) -> torch.Tensor:
            filled = cat(*args, **kwargs)
            seen.append(live_bytes())
            return filled

        torch.cat = filling
        try:
            model(x).sum().backward()
        finally:
            torch.cat = cat
        results.append((max(seen) - before) / gradients)
        te_fsdp.zero_grad(model)
    return results
