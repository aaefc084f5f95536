"""Bodies: new weights that arrive while the next forward runs."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import harness
import torch
import torch.distributed as dist
from harness.collectives import recorded
from no_sharding.overlap import Chain
from torch import nn

from hfsdp.early import SGD, inputs
from hfsdp.early_bits import KINDS, Trainer
from hfsdp.wire import large_from

STEPS = 3


@contextlib.contextmanager
def overlapping() -> Iterator[None]:
    """Optimizers that are sharded inside gather new weights after their steps."""
    import te_fsdp

    stock = te_fsdp.shard_optimizer
    te_fsdp.shard_optimizer = functools.partial(stock, overlap_gather=True)
    try:
        yield
    finally:
        te_fsdp.shard_optimizer = stock


@contextlib.contextmanager
def late(fault: str = "") -> Iterator[None]:
    """On GPUs, new weights of each unit arrive about 30 ms late: as on the CPU, what does not wait is wrong.

    With a fault they come 0.3 s late: also where other processes slow down what reads them too early.

    Args:
        fault: "never": nobody waits; "ahead": a forward that gathers ahead waits for its own unit alone; "" for none.
    """
    from te_fsdp import _fsdp2
    from te_fsdp.move.pending import PendingGathers
    from te_fsdp.sharding import outer_shards

    wait, ahead, start = PendingGathers.wait, _fsdp2.gathers_ahead, outer_shards.start_install

    def delayed(*args: Any, **kwargs: Any) -> Any:
        torch.cuda._sleep(500_000_000 if fault else 50_000_000)
        return start(*args, **kwargs)

    if harness.device_type() == "cuda":
        outer_shards.start_install = delayed
    if fault == "never":
        PendingGathers.wait = lambda self, *names: self._pending.clear()
    elif fault == "ahead":
        _fsdp2.gathers_ahead = lambda unit: False
    try:
        yield
    finally:
        PendingGathers.wait, _fsdp2.gathers_ahead, outer_shards.start_install = wait, ahead, start


def under_way(model: nn.Module) -> list[str]:
    """Units whose new weights nobody has waited for."""
    from te_fsdp.sharding.state import sharding_state

    pending = sharding_state(model).pending_gathers
    return [] if pending is None else list(pending._pending)


def compare(checks: harness.Comparisons, what: str, ours: Trainer, theirs: Trainer) -> None:
    """Local weights, gradients and main weights to the bit, as they are now: nothing is waited for."""
    from te_fsdp._torch import local_of

    pairs = zip(ours.model.named_parameters(), theirs.model.parameters(), strict=True)
    for (name, own), other in pairs:
        checks.same_bits(f"{what} {name}", own, other)
        if own.grad is not None:
            checks.same_bits(f"{what} {name}: gradient", local_of(own.grad), local_of(other.grad))
        mains = [t.optimizer.state[p].get("master_param") for t, p in ((ours, own), (theirs, other))]
        if mains[0] is not None:
            checks.same_bits(f"{what} {name}: main weight", *mains)


def same_bits(
    kind: str, clip: bool = False, large: int | None = None, fault: str = "", **options: Any
) -> dict[str, Any]:
    """Steps of two like models, of which the second one gathers within its steps: the same bits.

    Args:
        kind: Of ``early_bits``.
        clip: Whether gradients are clipped.
        large: From how many elements on tensors travel by themselves.
        fault: Of :func:`late`.
        options: Of the kind.

    Returns:
        ``after``: units under way after each step of the first model; ``left``: after the backward behind it;
        ``gathers``: all-gathers in the last step of each model.
    """
    if "dtype" in options:
        options["dtype"] = getattr(torch, options["dtype"])
    with overlapping():
        first = KINDS[kind](**options)
    second = KINDS[kind](**options)
    found: dict[str, Any] = {"after": [], "left": []}
    checks = harness.Comparisons()
    with large_from(large), late(fault):
        for step in range(STEPS):
            for trainer in (first, second):
                trainer.backward(step)
            found["left"].append(under_way(first.model))
            compare(checks, f"step {step}", first, second)
            gathers = []
            for trainer in (
                second,
                first,
            ):  # the other way round one would wait for the other, on one communicator
                with recorded() as calls:
                    trainer.step(clip)
                gathers.insert(0, sum(call.kind == "all_gather" for call in calls))
            found["after"].append(under_way(first.model))
        assert not under_way(second.model)
        settled(first, second, checks)
    return found | {"gathers": gathers, "compared": checks.require(STEPS)}


def settled(first: Trainer, second: Trainer, checks: harness.Comparisons) -> None:
    """The weights that both have now."""
    import te_fsdp

    te_fsdp.release_params(first.model)
    te_fsdp.release_params(second.model)
    assert not under_way(first.model)
    compare(checks, "at last", first, second)


# --- a chain of blocks


def twins(blocks: int = 3, shard: int = 1) -> tuple[Trainer, Trainer]:
    """Two like chains, each block a unit; the first one gathers after its steps."""
    import te_fsdp

    found = []
    for overlap in (True, False):
        torch.manual_seed(1)
        model = Chain(blocks)
        meshes = te_fsdp.Meshes.build(dp_replicate=2, dp_shard=shard, device_type=harness.device_type())
        te_fsdp.fully_shard(model, meshes, units="blocks.*", outer_strategy="optim")
        optimizer = torch.optim.SGD(model.parameters(), **SGD)
        te_fsdp.shard_optimizer(optimizer, overlap_gather=overlap)

        def backward(seed: int, model: nn.Module = model) -> None:
            model(inputs(seed)[dist.get_rank()]).square().mean().backward()

        found.append(Trainer(model, optimizer, backward))
    return found[0], found[1]


def train(pair: tuple[Trainer, Trainer], *seeds: int) -> None:
    """A step of both for each seed; last that of the model whose new weights are then under way."""
    for seed in seeds:
        for trainer in reversed(pair):
            trainer.backward(seed)
            trainer.step(False)


@late()
def other_units(orders: list[list[int]]) -> list[list[str]]:
    """Replicas use other units, or none of some: units under way after each backward of this rank."""
    pair, checks, found = twins(blocks=4), harness.Comparisons(), []
    for trainer in pair:
        trainer.model.order = orders[dist.get_rank()]
    for seed in (1, 2, 3):
        for trainer in pair:
            trainer.backward(seed)
        found.append(under_way(pair[0].model))
        for trainer in pair:
            trainer.step(False)
    settled(*pair, checks)
    checks.require(8)
    return found


@late()
def frozen() -> list[list[str]]:
    """Units under way after steps, with a block that is frozen meanwhile."""
    pair, checks, found = twins(), harness.Comparisons(), []
    for train_it in (True, False, True):
        for trainer in pair:
            trainer.model.blocks[1].requires_grad_(train_it)
        train(pair, len(found))
        found.append(under_way(pair[0].model))
    settled(*pair, checks)
    checks.require(6)
    return found


@late()
def interrupted(where: str) -> list[str]:
    """An exception in the forward, or in the backward, after a step; then the microbatch is run again.

    Returns:
        Units under way after it.
    """
    import te_fsdp

    pair, checks = twins(), harness.Comparisons()
    train(pair, 1)

    def fail(*unused: Any) -> None:
        raise RuntimeError("half way")

    for number, trainer in enumerate(pair):
        block = trainer.model.blocks[1]
        register = (
            block.register_forward_pre_hook if where == "forward" else block.register_full_backward_hook
        )
        handle = register(fail)
        with contextlib.suppress(RuntimeError):
            trainer.backward(2)
        handle.remove()
        if number == 0:
            found = under_way(trainer.model)
        te_fsdp.zero_grad(trainer.model)
    train(pair, 2, 3)
    settled(*pair, checks)
    checks.require(6)
    return found


@late()
def two_optimizers() -> list[list[str]]:
    """Of one model: units under way after the step of each."""
    import te_fsdp

    pair, checks, found = twins(), harness.Comparisons(), []
    both = []
    for overlap, trainer in zip((True, False), pair, strict=True):
        parts = [trainer.model.blocks[0], trainer.model.blocks[1:]]
        optimizers = [torch.optim.SGD(part.parameters(), **SGD) for part in parts]
        both.append([te_fsdp.shard_optimizer(each, overlap_gather=overlap) for each in optimizers])
    for seed in (1, 2, 3):
        for trainer, optimizers in zip(pair, both, strict=True):
            trainer.backward(seed)
            for optimizer in optimizers:
                optimizer.step()
                if trainer is pair[0]:
                    found.append(under_way(trainer.model))
                optimizer.zero_grad()
    settled(*pair, checks)
    checks.require(6)
    return found


def gathers_ahead(fault: str = "") -> list[list[str]]:
    """Units that FSDP2 gathers ahead of their forward; units under way when the first block runs."""
    pair, checks, found = twins(shard=2), harness.Comparisons(), []
    for trainer in pair:
        blocks = list(trainer.model.blocks)
        blocks[0].set_modules_to_forward_prefetch(blocks[1:])
    pair[0].model.blocks[0].register_forward_pre_hook(lambda *args: found.append(under_way(pair[0].model)))
    with late(fault):
        train(pair, 1, 2, 3)
        settled(*pair, checks)
    checks.require(6)
    return found


# --- the option


def without_effect(axes: dict[str, int], outer: str) -> None:
    """A model without anything that could arrive later."""
    import te_fsdp

    model = Chain()
    meshes = te_fsdp.Meshes.build(**axes, device_type=harness.device_type())
    te_fsdp.fully_shard(model, meshes, outer_strategy=outer)
    te_fsdp.shard_optimizer(torch.optim.SGD(model.parameters(), **SGD), overlap_gather=True)


def given_later() -> None:
    """The option, for an optimizer that was sharded without it."""
    import te_fsdp

    first, second = twins()
    te_fsdp.shard_optimizer(first.optimizer, overlap_gather=True)
    te_fsdp.shard_optimizer(first.optimizer)
    te_fsdp.shard_optimizer(second.optimizer, overlap_gather=True)


def on_one_rank() -> None:
    """The option on one rank alone."""
    import te_fsdp

    model = Chain()
    meshes = te_fsdp.Meshes.build(dp_replicate=2, device_type=harness.device_type())
    te_fsdp.fully_shard(model, meshes, units="blocks.*", outer_strategy="optim")
    optimizer = torch.optim.SGD(model.parameters(), **SGD)
    te_fsdp.shard_optimizer(optimizer, overlap_gather=dist.get_rank() == 0)
