"""Bodies: properties of exempt parameters."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from typing import Any

import harness
import torch
import torch.distributed as dist
from harness.collectives import recorded
from harness.memory import live_bytes
from parity.runs import Cut, copy_shards, scramble, shards
from quantization.weight_bytes import gathered
from torch import nn

from no_sharding.models import BATCH, HIDDEN, SEQUENCE, exempt, seeded
from no_sharding.training import optimizer_of, sharded

UNITS = ["encoder", "blocks.*"]


def meshes_of(axes: dict[str, int]) -> Any:
    """Return the job's meshes."""
    import te_fsdp

    return te_fsdp.Meshes.build(**axes, device_type=harness.device_type())


def batch(meshes: Any, seed: int = 3) -> torch.Tensor:
    """Return this rank's part of a batch that is the same on all ranks."""
    x = torch.randn(SEQUENCE, BATCH, HIDDEN, generator=torch.Generator().manual_seed(seed))
    return Cut.of(meshes).take(x, None).to(harness.device())


def collectives_and_memory(
    axes: dict[str, int], parts: tuple[str, ...], *, microbatches: int = 1, marked: bool = False
) -> dict[str, Any]:
    """Return collectives of one step, and bytes of parameters on this rank.

    Args:
        axes: mesh sizes.
        parts: what is exempt; the frozen encoder is a unit otherwise.
        microbatches: backwards in the step.
        marked: whether the loop marks the last microbatch.
    """
    import te_fsdp

    meshes = meshes_of(axes)
    model = seeded(**meshes.te_kwargs())
    whole = {name: p.numel() * p.element_size() for name, p in model.named_parameters()}
    if parts:
        exempt(model, parts)
    te_fsdp.fully_shard(model, meshes, units=UNITS, transport="nccl")  # its calls are counted
    model(batch(meshes)).sum().backward()  # what happens once
    te_fsdp.zero_grad(model)
    with recorded() as calls:
        for number in range(microbatches):
            last = number == microbatches - 1
            with te_fsdp.microbatch(model, is_last=last) if marked else contextlib.nullcontext():
                model(batch(meshes, number)).square().mean().backward()
    hooks = [m._forward_pre_hooks or m._forward_hooks for m in model.encoder.modules()]
    report = te_fsdp.report(model)
    return {
        **Counter(call.kind for call in calls),
        "bytes": report.total_bytes,
        "encoder": sum(size for name, size in whole.items() if name.startswith("encoder")),
        "all": sum(whole.values()),
        "hooks": sum(map(bool, hooks)),
        "noted": sorted(row.name for row in report if "no_shard" in row.note),
    }


def no_second_copy(axes: dict[str, int], strategy: str) -> dict[str, float]:
    """Return bytes that sharding and a step add to those of the parameters, relative to them; and FSDP2's modules."""
    import transformer_engine.pytorch as te

    import te_fsdp

    meshes = meshes_of(axes)
    seeded()(batch(meshes)).square().mean().backward()  # TE makes its workspaces
    before = live_bytes()
    model = seeded()
    whole = live_bytes() - before
    te_fsdp.fully_shard(model, meshes, units=te.LayerNormMLP, strategy=strategy)
    model(batch(meshes)).square().mean().backward()
    te_fsdp.zero_grad(model)
    units = sum(isinstance(m, torch.distributed.fsdp.FSDPModule) for m in model.modules())
    return {"held": (live_bytes() - before) / whole, "units": units}


def reset_after_sharding(axes: dict[str, int], how: str) -> int:
    """Check reductions after fully_shard, replaced parameters, or a backward that raised.

    Args:
        axes: mesh sizes.
        how: "assign" (load_state_dict), "materialize" or "interrupted".
    """
    from te_fsdp.sharded_model import get_sharded_model, sharded_model_of

    meshes = meshes_of(axes)
    reference, model = seeded(), sharded(meshes, "no_shard", (), "meta" if how == "materialize" else "device")
    if how == "assign":
        model.load_state_dict(
            {name: value.clone() for name, value in reference.state_dict().items()}, assign=True
        )
    if how == "interrupted":
        model(batch(meshes, 7)).square().mean().backward()
        handle = model.blocks[1].register_full_backward_hook(_fail)
        try:
            model(batch(meshes)).square().mean().backward()
        except RuntimeError as error:
            assert "half way" in str(error)
        handle.remove()
        for (
            parameter
        ) in model.parameters():  # as an optimizer's zero_grad does, which knows nothing of te_fsdp
            parameter.grad = None
    copy_shards(reference, model)
    model(batch(meshes)).square().mean().backward()
    assert all(sharded_model_of(p) is get_sharded_model(model) for p in model.parameters() if p.requires_grad)
    reference(batch_of_all()).square().mean().backward()
    checks = harness.Comparisons()
    for name, parameter in reference.named_parameters():
        if parameter.requires_grad:
            mine = model.get_parameter(name).grad
            checks.close(name, mine, parameter.grad, 1e-5, "fp32: the sum over samples in a different order")
    return len(checks.require(10))


def _fail(*unused: Any) -> None:
    raise RuntimeError("half way")


def batch_of_all(seed: int = 3) -> torch.Tensor:
    """Return the full batch of :func:`batch`."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(SEQUENCE, BATCH, HIDDEN, generator=generator).to(harness.device())


class Methods(nn.Module):
    """A unit with its own method, which a root calls instead of the unit."""

    def __init__(self) -> None:
        super().__init__()
        self.unit = Unit()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.unit.encode(x)


class Unit(nn.Linear):
    """A linear layer with a forward of a different name."""

    def __init__(self) -> None:
        super().__init__(4, 4, device=harness.device())

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.weight, self.bias)


def forward_method(how: str) -> bool:
    """Check that a registered method, one of an exempt unit, or a "forgotten" one reads unsharded weights."""
    import te_fsdp

    torch.manual_seed(3)
    model = Methods()
    expected = model(torch.ones(2, 4, device=harness.device()))
    if how == "exempt":
        te_fsdp.fsdp_no_shard(model.unit)
    te_fsdp.fully_shard(model, meshes_of({}), units="unit")
    if how != "forgotten":
        te_fsdp.register_forward_method(model.unit, "encode")
    return torch.equal(model(torch.ones(2, 4, device=harness.device())), expected)


def torch_fully_shard() -> None:
    """Call torch's own fully_shard, which does not support marks."""
    import te_fsdp

    meshes, model = meshes_of({}), seeded()
    exempt(model)
    te_fsdp.set_device_mesh(model)
    torch.distributed.fsdp.fully_shard(model, mesh=meshes.fsdp)


def different_replicas(where: str) -> None:
    """Use different replicas of an exempt parameter, which must raise.

    Args:
        where: "fully_shard", "materialize" (ranks with other random states) or "save".
    """
    import te_fsdp

    rank, meshes = dist.get_rank(), meshes_of({"dp_shard": 2})
    model = seeded("meta" if where == "materialize" else None)
    exempt(model)
    if where == "fully_shard":
        model.position.data += rank
    te_fsdp.fully_shard(model, meshes)
    if where == "materialize":
        with initialize_by_rank():
            te_fsdp.materialize(model)
    model.position.data += rank
    te_fsdp.checkpoint.save("/nonexistent/never written", model)


@contextlib.contextmanager
def initialize_by_rank() -> Iterator[None]:
    """Build linear layers whose initialisation depends on the rank."""
    stock = nn.Linear.reset_parameters

    def careless(self: nn.Linear) -> None:
        stock(self)
        with torch.no_grad():
            self.bias += dist.get_rank()

    nn.Linear.reset_parameters = careless
    try:
        yield
    finally:
        nn.Linear.reset_parameters = stock


def full_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Return parameters and optimizer states as unsharded tensors."""
    results = {}
    for name, parameter, _ in shards(model):
        prefix, _, own = name.rpartition(".")
        module = model.get_submodule(prefix)
        results[name] = gathered(module, own, parameter.detach())
        for key, value in optimizer.state.get(parameter, {}).items():
            if value.dim():
                results[f"{name}:{key}"] = gathered(module, own, value)
    return results


def checkpoint_round_trip(path: str, first: dict[str, int], second: dict[str, int]) -> list[int]:
    """Save with exempt parameters, load where they are sharded, save there and load back: the same values, bit for bit.

    Returns:
        Number of tensors compared, and how many of them differed before the loads.
    """
    import te_fsdp

    def made(
        axes: dict[str, int], parts: tuple[str, ...], seed: int
    ) -> tuple[nn.Module, torch.optim.Optimizer]:
        meshes = meshes_of(axes)
        model = sharded(meshes, "optim_grads_params", parts, "meta")
        te_fsdp.materialize(model, seed=seed)
        reference = seeded()
        scramble(reference)
        copy_shards(reference, model)
        optimizer = optimizer_of("AdamW", model.parameters())
        for step in range(seed):
            model(batch(meshes, step)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return model, optimizer

    parts = ("encoder", "adapter", "position")
    trained = made(first, parts, 2)
    expected = full_state(*trained)
    te_fsdp.checkpoint.save(f"{path}/first", *trained)
    differed = 0
    for axes, own, name in ((second, (), "first"), (first, parts, "second")):
        other = made(axes, own, 1)
        differed += sum(not torch.equal(value, expected[key]) for key, value in full_state(*other).items())
        te_fsdp.checkpoint.load(f"{path}/{name}", *other)
        checks = harness.Comparisons()
        result = full_state(*other)
        assert result.keys() == expected.keys()
        for key, value in result.items():
            checks.bitwise_equal(key, value, expected[key])
        checks.require(len(expected))
        if name == "first":
            te_fsdp.checkpoint.save(f"{path}/second", *other)
    return [len(expected), differed]
