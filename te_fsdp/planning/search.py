"""``search``: the meshes of so many GPUs on which a job fits in memory, those first that send least.

What a step sends is weighed by where: an axis whose ranks lie in one node is taken to be ``LINK_RATIO`` times as fast
as one between nodes. Ranks are numbered as ``Meshes`` does it, tp innermost, then ep, cp, dp_shard and dp_replicate.
Meshes that work on fewer tokens in a step are compared by token.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from te_fsdp.checkpoint.portable.huggingface_config import read_config
from te_fsdp.errors import PlacementError, TeFsdpError
from te_fsdp.planning.job import Job, Sizes, is_function
from te_fsdp.planning.plan import Plan, plan_here, pretended_ranks

#: NVLink of Hopper (450 GB/s each way) against a network card of 400 Gb/s for each GPU (50 GB/s).
LINK_RATIO = 9


@dataclass(frozen=True)
class Candidate:
    """One mesh of a search.

    Attributes:
        sizes: Of its axes.
        plan: Of the job on it; ``None`` where te_fsdp or the model refuses it.
        reason: Why it does not do; empty if it fits.
        within: Bytes that a rank receives in a step over axes that lie in one node.
        between: Bytes over other axes.
        tokens: That a GPU works on in a step: those of its data-parallel rank, divided among tp and cp.
    """

    sizes: Sizes
    plan: Plan | None
    reason: str = ""
    within: int = 0
    between: int = 0
    tokens: float = 1.0

    @property
    def cost(self) -> float:
        """Bytes per token, those within a node counted as a part of those between nodes."""
        return (self.within / LINK_RATIO + self.between) / self.tokens


def search(
    job: Job, *, gpus: int, memory: int, node: int = 8, cp: int = 1, global_batch: int | None = None
) -> list[Candidate]:
    """Plan a job on every mesh of so many GPUs, the best first. Local operation, as :func:`te_fsdp.planning.plan`.

    tp is tried within a node, ep where a Hugging Face model has experts.

    Args:
        job: What is planned; its ``microbatches`` hold for every mesh, unless ``global_batch`` is given.
        gpus: Their number.
        memory: Bytes of each.
        node: GPUs of a node.
        cp: Size of that axis.
        global_batch: Sequences of a step on all GPUs together.

    Returns:
        Meshes that fit, cheapest first; then those that do not, with the smallest peak first; then refused ones.

    Raises:
        PlacementError: Numbers that make no mesh.
    """
    if min(gpus, memory, node, cp) < 1 or gpus % cp:
        raise PlacementError(
            "search",
            expected="positive numbers, cp a divisor of gpus",
            got=f"gpus={gpus}, memory={memory}, node={node}, cp={cp}",
        )
    with pretended_ranks(gpus):
        found = [_candidate(job, sizes, memory, node, global_batch) for sizes in _meshes(job, gpus, node, cp)]
    fitting = [one for one in found if not one.reason]
    large = [one for one in found if one.reason and one.plan is not None]
    refused = [one for one in found if one.plan is None]
    return [
        *sorted(fitting, key=lambda one: one.cost),
        *sorted(large, key=lambda one: one.plan.peak.bytes if one.plan is not None else 0),
        *refused,
    ]


def _meshes(job: Job, gpus: int, node: int, cp: int) -> Iterator[Sizes]:
    """All meshes that are worth a plan."""
    experts = 1
    if not is_function(job.model):
        about = read_config(job.model)  # type: ignore[arg-type]
        experts = about.experts.count if about.experts is not None else 1
    ranks = gpus // cp
    for tp in _divisors(ranks):
        for ep in _divisors(ranks // tp):
            if tp <= node and experts % ep == 0:
                for replicas in _divisors(ranks // tp // ep):
                    yield Sizes(replicas, ranks // tp // ep // replicas, cp, ep, tp)


def _divisors(number: int) -> list[int]:
    return [one for one in range(1, number + 1) if number % one == 0]


def _candidate(job: Job, sizes: Sizes, memory: int, node: int, global_batch: int | None) -> Candidate:
    """The plan of one mesh, and whether it fits."""
    copies = sizes.dp_replicate * sizes.dp_shard * sizes.ep
    if global_batch is not None:
        if global_batch % (copies * job.batch):
            reason = (
                f"{global_batch} sequences do not divide among {copies} data-parallel ranks x {job.batch}"
            )
            return Candidate(sizes, None, reason)
        job = replace(job, microbatches=global_batch // copies // job.batch)
    try:
        found = plan_here(job, sizes)
    except TeFsdpError as error:
        return Candidate(sizes, None, str(error))
    within = between = 0
    for axis, size in found.sent().items():
        if _reach(axis, sizes) <= node:
            within += size
        else:
            between += size
    over = found.peak.bytes - memory
    reason = f"{over / 2**30:.1f} GiB too much" if over > 0 else ""
    tokens = job.sequence * job.batch * job.microbatches / (sizes.tp * sizes.cp)
    return Candidate(sizes, found, reason, within, between, tokens)


def _reach(axis: str, sizes: Sizes) -> int:
    """How many neighbouring ranks an axis spans, those of axes further in included."""
    inner = {"tp": 1, "ep": sizes.tp, "cp": sizes.tp * sizes.ep}
    if axis in inner:
        return inner[axis] * getattr(sizes, axis)
    # Dense weights are cut over dp_shard, cp and ep.
    shards = sizes.tp * sizes.ep * sizes.cp * sizes.dp_shard
    return shards if axis == "dp_shard" else shards * sizes.dp_replicate
