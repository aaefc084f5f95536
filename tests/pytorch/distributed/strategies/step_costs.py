"""Bodies: costs of one optimizer step, by strategy or loop."""

from __future__ import annotations

import collections
import copy
import itertools

import harness
import torch
import torch.distributed as dist
from harness.collectives import recorded
from harness.memory import live_bytes
from torch import nn

from strategies.bodies import loss_of, run
from strategies.models import batch, optimizer_of, sharded
from te_fsdp.layout import STRATEGIES

LOOPS = ("plain", "microbatch", "no_sync")


def collectives(dp_replicate: int, outer: str, microbatches: int) -> dict[str, dict[str, int]]:
    """Return collectives of one optimizer step, the first one aside: ``"strategy loop"`` -> kind -> calls.

    Collectives that only send integers, on the CPU, are a separate kind.

    Args:
        dp_replicate: Size of the outer axis.
        outer: fully_shard's outer_strategy.
        microbatches: In each step.
    """
    import te_fsdp

    meshes = te_fsdp.Meshes.build(dp_replicate=dp_replicate, device_type=harness.device_type())
    results = {}
    inputs = batch(0, dist.get_world_size(), microbatches)[:, dist.get_rank()]
    # The first one of a model warms up: there HFSDP agrees on the order of units, if its loop marks its last backward.
    loops = (("plain", "plain", "no_sync"), ("microbatch", "microbatch"))
    for strategy, kinds in itertools.product(STRATEGIES, loops):
        if outer == "optim" and strategy == "no_shard":
            continue
        model = sharded(meshes, strategy, outer, transport="nccl")
        optimizer = optimizer_of("SGD", model)
        if outer == "optim":
            te_fsdp.shard_optimizer(optimizer)
        for loop in kinds:
            with recorded() as calls:
                run(model, inputs, loop)
                optimizer.step()
            optimizer.zero_grad()
            seen = ("integers" if call.dtype.startswith("int") else call.kind for call in calls)
            results[f"{strategy} {loop}"] = dict(collections.Counter(seen))
    return results


def two_forwards(axes: dict[str, int], sharder: str) -> dict[str, int]:
    """Count reduce-scatters of a backward through one and two forwards of units. ``sharder``: torch or te_fsdp.

    The gradients of the latter are those of two backwards with one forward each, up to the order of fp32 sums.
    """
    import transformer_engine.pytorch as te
    from torch.distributed.fsdp import fully_shard

    import te_fsdp

    meshes = te_fsdp.Meshes.build(**axes, device_type=harness.device_type())
    options = {**meshes.te_kwargs(), "set_parallel_mode": True, "device": "meta"}
    model = nn.Sequential(*(te.LayerNormMLP(32, 64, **options) for _ in range(3)))
    if sharder == "te_fsdp":
        te_fsdp.fully_shard(model, meshes, units=te.LayerNormMLP, transport="nccl")
    else:
        te_fsdp.set_device_mesh(model, meshes.tp, meshes.weight)
        for unit in (*model, model):
            fully_shard(unit, mesh=meshes.fsdp)
    te_fsdp.materialize(model, seed=0)
    # Each tp group computes on equal inputs.
    generator = torch.Generator().manual_seed(dist.get_rank() // meshes.size("tp"))
    x = torch.randn(2, 16, 32, generator=generator).to(harness.device()).requires_grad_()

    def gradients() -> dict[str, torch.Tensor]:
        found = {name: harness.full(p.grad).clone() for name, p in model.named_parameters()}
        model.zero_grad()
        return found

    counts, checks = {}, harness.Comparisons()
    for part in x:
        with recorded() as calls:
            model(part).square().mean().backward()
        counts["one"] = sum(call.kind == "reduce_scatter" for call in calls)
    apart = gradients()
    with recorded() as calls:
        (model(x[0]).square().mean() + model(x[1]).square().mean()).backward()
    counts["two"] = sum(call.kind == "reduce_scatter" for call in calls)
    both = gradients()
    with recorded() as calls:
        first = model(x[0]).square().mean()
        model(x[1])  # dropped
        (first + model(x[1]).square().mean()).backward()
    counts["one dropped"] = sum(call.kind == "reduce_scatter" for call in calls)
    del first
    counts["nodes"] = _nodes_after_steps(model, x)
    for name, gradient in both.items():
        checks.close(name, gradient, apart[name], 1e-5, "fp32: sums of a few products in a different order")
    checks.require(18)
    return counts


def _nodes_after_steps(model: nn.Sequential, x: torch.Tensor) -> int:
    """Run steps that keep the previous loss; return the largest number of nodes that a unit has recorded."""
    from te_fsdp import records
    from te_fsdp.upstream import fsdp2_units

    for part in x.repeat(2, 1, 1):
        loss = model(part).square().mean()  # the graph of the previous one is alive meanwhile
        loss.backward()
    counts = []
    for unit in model:
        binding = records.binding_of(unit)
        assert binding is not None
        counts.append(len(binding.fsdp.forwards))
        for group in fsdp2_units.fsdp_parameter_groups(unit):
            counts.append(len(fsdp2_units.record_of_group(group).post_backwards))
    return max(counts)


def interleaved() -> None:
    """Check that each backward reduces, in two forwards before two backwards, as pipelines do."""
    import te_fsdp

    meshes = te_fsdp.Meshes.build(device_type=harness.device_type())
    torch.manual_seed(0)
    reference = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3))).to(harness.device())
    model = copy.deepcopy(reference)
    te_fsdp.fully_shard(model, meshes, units=nn.Linear)
    x = torch.randn(2, 4, 8, generator=torch.Generator().manual_seed(1)).to(harness.device()).requires_grad_()
    checks = harness.Comparisons()
    for each in (model, reference):
        losses = [each(part).square().mean() for part in x]
        losses[1].backward()
        gradients = [harness.full(p.grad).clone() for p in each.parameters()]
        losses[0].backward()
        gradients += [harness.full(p.grad) for p in each.parameters()]
        if each is model:
            found = gradients
    for number, (gradient, expected) in enumerate(zip(found, gradients, strict=True)):
        checks.close(f"{number}", gradient, expected, 1e-6, "fp32: means of equal terms")
    checks.require(12)


def gathers_without_root(microbatches: int) -> dict[str, int]:
    """Return all-gathers of one step of a model whose two units hold all parameters: ``"strategy loop"`` -> calls."""
    import te_fsdp

    meshes = te_fsdp.Meshes.build(device_type=harness.device_type())
    inputs = torch.ones(microbatches, 4, 8, device=harness.device())
    results = {}
    for strategy in STRATEGIES[1:]:
        layers = (nn.Linear(8, 8, device=harness.device()) for _ in range(2))
        torch.manual_seed(0)
        model = te_fsdp.fully_shard(
            nn.Sequential(*layers), meshes, units=nn.Linear, strategy=strategy, transport="nccl"
        )
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for loop in LOOPS:
            with recorded() as calls:
                run(model, inputs, loop)
                optimizer.step()
            optimizer.zero_grad()
            results[f"{strategy} {loop}"] = sum(call.kind == "all_gather" for call in calls)
    return results


# --- memory


#: Features of the model's input, hidden and output: rows not divisible by two. On GPUs large relative to blocks of 512
#: bytes that the allocator deals out.
SIZES = {"cpu": (256, 301, 99), "cuda": (2048, 2409, 793)}


class Wide(nn.Module):
    """Two units and a root, large enough that counters do not matter."""

    def __init__(self) -> None:
        super().__init__()
        device = harness.device()
        inner, middle, outer = SIZES[device.type]
        self.blocks = nn.ModuleList(nn.Linear(inner, middle, device=device) for _ in range(2))
        self.head = nn.Linear(middle, outer, device=device)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, second = self.blocks
        return self.head((first(x) + second(x)).relu())


def memory(strategy: str) -> dict[str, tuple[int, int]]:
    """Compare this rank's bytes with the expected bytes: between microbatches, and between steps.

    On GPUs by the allocator.
    """
    if harness.device_type() == "cuda":
        _memory(strategy)  # workspaces of cuBLAS, allocated once
    return _memory(strategy)


def _memory(strategy: str) -> dict[str, tuple[int, int]]:
    import te_fsdp

    meshes = te_fsdp.Meshes.build(device_type=harness.device_type())
    inner, *_ = SIZES[harness.device_type()]
    before = live_bytes()
    torch.manual_seed(0)
    model = te_fsdp.fully_shard(Wide(), meshes, units="blocks.*", strategy=strategy, transport="nccl")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    whole, cut, rows = _elements(model, meshes.size("dp_shard"))
    x = torch.randn(8, inner, device=harness.device())
    results = {}
    for _ in range(2):
        with te_fsdp.microbatch(model, is_last=False):
            loss_of(model, x).backward()
        results["between microbatches"] = live_bytes() - before - x.nbytes
        with te_fsdp.microbatch(model, is_last=True):
            loss_of(model, x).backward()
        optimizer.step()
        optimizer.zero_grad()
        results["between steps"] = live_bytes() - before - x.nbytes
    shards = strategy != "no_shard"
    weights, state = (cut, 2 * rows) if shards else (whole, 2 * whole)
    kept = whole if strategy in ("optim", "optim_grads") else 0
    waiting = whole if strategy in ("no_shard", "optim") else cut
    expected = {"between steps": weights + state, "between microbatches": weights + state + kept + waiting}
    return {name: (results[name], 4 * expected[name]) for name in expected}


def _elements(model: nn.Module, ranks: int) -> tuple[int, int, int]:
    """Return numbers of elements of all parameters: unsharded, of a rank with padded rows, and of this rank's rows."""
    from te_fsdp.upstream import torch_dtensor as _torch

    whole = sum(p.numel() for p in model.parameters())
    cut = sum(-(-p.shape[0] // ranks) * p.shape[1:].numel() for p in model.parameters())
    return whole, cut, sum(_torch.local_of(p).numel() for p in model.parameters())
