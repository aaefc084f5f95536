"""Plans: what each rank of a job of any number of GPUs will hold and send, found in one process on one CPU.

    import te_fsdp.planning as planning
    job = planning.Job("my-llama", strategy="optim_grads_params", optimizer="fused-adam", sequence=8192)
    found = planning.plan(job, planning.Sizes(dp_shard=32, tp=2))
    print(found.peak.bytes, found.sent())
    best = planning.search(job, gpus=64, memory=80 * 2**30)

The model is built on meta as the first of so many ranks would build it, and ``te_fsdp.fully_shard`` shards it in
earnest, in a world whose other ranks torch's fake process group pretends. So a plan reads what a job would train with,
and what te_fsdp would refuse it refuses, with the same error.

``search`` plans it on all meshes of so many GPUs, and puts those that send least first. What a step sends is weighed by
where: an axis whose ranks lie in one node is taken to be ``LINK_RATIO`` times as fast as one between nodes. Ranks are
numbered as ``Meshes`` does it, tp innermost, then ep, cp, dp_shard and dp_replicate. Meshes that work on fewer tokens
in a step are compared by token.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist

from te_fsdp.checkpoint.portable.huggingface_config import read_config
from te_fsdp.errors import CheckpointError, OrderError, PlacementError, TeFsdpError
from te_fsdp.mesh import Meshes
from te_fsdp.mesh_checks import ALL_AXES
from te_fsdp.planning.costs import (
    Weight,
    checkpoint_bytes,
    flops_of,
    optimizer_bytes,
    stages_of,
    sum_of,
    weights_of,
)
from te_fsdp.planning.job import (
    OPTIMIZERS,
    RECIPES,
    Job,
    Sizes,
    build_model,
    is_function,
    require_recipe,
    workload_of,
)
from te_fsdp.planning.step import Machine, Peak, StepTime, Traffic, peak_of, reach_of, step_time, traffic_of
from te_fsdp.reporting import Report, Row, describe
from te_fsdp.shard_model import fully_shard
from te_fsdp.upstream import torch_dtensor as _torch

__all__ = [
    "LINK_RATIO",
    "OPTIMIZERS",
    "RECIPES",
    "Candidate",
    "Job",
    "Machine",
    "Peak",
    "Plan",
    "Sizes",
    "StepTime",
    "Traffic",
    "plan",
    "search",
]

#: Version of the file that :meth:`Plan.as_json` makes.
_VERSION = 1


@dataclass(frozen=True)
class Plan:
    """What each rank of a job will hold and send; where ranks differ, the one with the largest part of everything.

    Attributes:
        job: Fields of :class:`~te_fsdp.planning.Job`, as plain values.
        sizes: Of the mesh.
        report: As ``te_fsdp.report`` will describe the model on the first rank, once it is materialized.
        held: Between two steps: words -> bytes of weights by format and of the optimizer.
        gradients: Bytes of reduced gradients.
        largest_unit: Bytes of the largest unit when it is gathered.
        activations: Bytes that all modules keep between forward and backward.
        peak: The highest point of a step.
        traffic: What a rank sends in a step.
        checkpoint: Bytes of a checkpoint's tensors, of all ranks: ``"model"`` and ``"optimizer"``.
        parameters: Elements of the model, each once.
        notes: What was not counted, or taken for granted.
        flops: Floating-point operations of a rank in a step: ``"products"`` and ``"attention"``.
    """

    job: Mapping[str, Any]
    sizes: Sizes
    report: Report
    held: Mapping[str, int]
    gradients: int
    largest_unit: int
    activations: int
    peak: Peak
    traffic: tuple[Traffic, ...]
    checkpoint: Mapping[str, int]
    parameters: int
    notes: tuple[str, ...] = ()
    flops: Mapping[str, float] = field(default_factory=dict)

    @property
    def held_bytes(self) -> int:
        """All that is held between two steps."""
        return sum(self.held.values())

    def sent(self) -> dict[str, int]:
        """Bytes that a rank receives in a step, by axis."""
        found: Counter[str] = Counter()
        for row in self.traffic:
            found[row.axis] += row.bytes
        return dict(found)

    def time(self, machine: Machine) -> StepTime:
        """How long a step takes on a machine of given speeds. Local operation.

        Raises:
            CheckpointError: A plan from the file of a te_fsdp that counted no operations.
        """
        if not self.flops:
            raise CheckpointError("plan: no operations are counted in it", fix="plan the job again")
        states = sum(size for words, size in self.held.items() if not words.startswith("weights, "))
        updated = 2 * states + self.gradients + self.held_bytes - states
        return step_time(self.flops, self.traffic, updated, self.largest_unit, self.sizes, machine)

    def as_json(self) -> dict[str, Any]:
        """A value that ``json.dump`` takes, and :meth:`from_json`."""
        return {"te_fsdp_plan": _VERSION} | dataclasses.asdict(self) | {"sent": self.sent()}

    @classmethod
    def from_json(cls, value: Mapping[str, Any], where: str = "plan") -> Plan:
        """The plan of what :meth:`as_json` gave, perhaps by way of a file, which messages call ``where``.

        Raises:
            CheckpointError: Something else, or written by a newer te_fsdp.
        """
        if value.get("te_fsdp_plan") != _VERSION:
            raise CheckpointError(
                f"{where}: not a plan", expected=f"te_fsdp_plan: {_VERSION}", got=value.get("te_fsdp_plan")
            )
        try:
            found = dict(value)
            del found["te_fsdp_plan"], found["sent"]
            found.pop("step", None)  # what the command has estimated of it
            found["sizes"], found["peak"] = Sizes(**found["sizes"]), Peak(**found["peak"])
            found["traffic"] = tuple(Traffic(**row) for row in found["traffic"])
            found["notes"] = tuple(found["notes"])
            report = _tuples(found["report"])
            found["report"] = Report(**report | {"rows": tuple(Row(**row) for row in report["rows"])})
            return cls(**found)
        except (KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{where}: not a plan ({type(error).__name__}: {error}).") from error


def _tuples(value: Any) -> Any:
    """A value from JSON, its lists as the tuples that they were."""
    if isinstance(value, dict):
        return {key: _tuples(item) for key, item in value.items()}
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


def plan(job: Job, sizes: Sizes) -> Plan:
    """Plan a job on a mesh of any size. Local operation: in a process without ranks, on the CPU, with tensors on meta.

    Args:
        job: The model, how it is sharded, and how it is trained.
        sizes: Of the mesh.

    Raises:
        OrderError: ``torch.distributed`` is running.
        TeFsdpError: What the job itself would raise: see :func:`te_fsdp.fully_shard` and :class:`te_fsdp.Meshes`.
    """
    require_recipe(job)
    with _fake_ranks(sizes.ranks):
        return _plan(job, sizes)


def _fake_ranks(count: int) -> AbstractContextManager[None]:
    """A world of so many ranks, of which this process is the first."""
    if dist.is_initialized():
        raise OrderError(
            "plan: torch.distributed is running",
            expected="a process of its own",
            why="A plan plays a job of other ranks",
            fix="plan before init_process_group, or run te-fsdp plan",
        )
    return _torch.fake_world_of(count)


def _plan(job: Job, sizes: Sizes) -> Plan:
    """:func:`plan` in a world of the right size that is pretended already."""
    meshes = Meshes.build(**{axis: getattr(sizes, axis) for axis in ALL_AXES}, device_type="cpu")
    model, names = build_model(job, meshes)
    work = workload_of(job, sizes)
    stages, notes = stages_of(model, job, work, sizes.tp)
    flops = flops_of(model, job, work, sizes.tp)
    fully_shard(
        model,
        meshes,
        units=names,
        strategy=job.strategy,
        outer_strategy=job.outer_strategy,
        precision=job.precision,
        checks="off",
    )
    weights = weights_of(model, job)
    held, units = _held(weights, job, meshes), Counter[str]()
    for weight in weights:
        units[weight.unit] += max(weight.gathered, weight.gathered_again)
    if any(weight.experts for weight in weights):
        notes.append("all ranks of ep are taken to hold as many experts as the first one")
    return Plan(
        job=job.described(),
        sizes=sizes,
        report=dataclasses.replace(describe(model, settled=True), checks=""),
        held=held,
        gradients=sum_of(weights, "gradient"),
        largest_unit=max(units.values(), default=0),
        activations=sum(stage.kept for stage in stages),
        peak=peak_of(weights, stages, held, job),
        traffic=traffic_of(model, weights, job, sizes, work),
        checkpoint=checkpoint_bytes(weights, job),
        parameters=sum_of(weights, "logical"),
        notes=tuple(notes),
        flops=flops,
    )


def _held(weights: list[Weight], job: Job, meshes: Meshes) -> dict[str, int]:
    """What lies in memory between two steps: words -> bytes."""
    found: Counter[str] = Counter()
    names = {4: "float32", 2: "16 bits", 8: "float64"}
    for weight in weights:
        kind = weight.format.name if weight.format is not None else names.get(weight.itemsize, "other")
        found[f"weights, {kind}"] += weight.held
    ranks = {axis: meshes.size(axis) for axis in ("dp_replicate", "dp_shard", "tp")}
    return dict(found) | {w: size for w, size in optimizer_bytes(weights, job, ranks).items() if size}


# ------------------------------------------------------------------------------------------------ the search for a mesh


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
    job: Job, *, gpus: int, memory: int, node: int = 8, cp: int = 1, fixed: Mapping[str, int] | None = None
) -> list[Candidate]:
    """Plan a job on every mesh of so many GPUs, the best first. Local operation, as :func:`te_fsdp.planning.plan`.

    tp is tried within a node, ep where a Hugging Face model has experts.

    Args:
        job: What is planned; its ``microbatches`` hold for every mesh.
        gpus: Their number.
        memory: Bytes of each.
        node: GPUs of a node.
        cp: Size of that axis.
        fixed: Axes of which one size alone is tried.

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
    asked = fixed or {}
    every = _meshes(job, gpus // cp, node, cp)
    meshes = [s for s in every if all(getattr(s, axis) == size for axis, size in asked.items())]
    if not meshes:
        raise PlacementError(
            f"search: meshes of {gpus} GPUs with {', '.join(f'{axis}={size}' for axis, size in asked.items())}",
            expected="sizes that divide the GPUs, tp within a node, ep of a model with experts",
            got="none",
        )
    require_recipe(job)
    with _fake_ranks(gpus):
        found = [_candidate(job, sizes, memory, node) for sizes in meshes]

    def place(one: Candidate) -> tuple[int, float]:
        if one.plan is None:
            return 2, 0
        return (1, one.plan.peak.bytes) if one.reason else (0, one.cost)

    return sorted(found, key=place)


def _meshes(job: Job, ranks: int, node: int, cp: int) -> Iterator[Sizes]:
    """All meshes of so many ranks, times cp, that are worth a plan."""
    experts = 1
    if not is_function(job.model):
        about = read_config(job.model)  # type: ignore[arg-type]
        experts = about.experts.count if about.experts is not None else 1
    divisors = [one for one in range(1, ranks + 1) if ranks % one == 0]
    for tp, ep, replicas in itertools.product(divisors, repeat=3):
        shards, rest = divmod(ranks, tp * ep * replicas)
        if not rest and tp <= node and experts % ep == 0:
            yield Sizes(replicas, shards, cp, ep, tp)


def _candidate(job: Job, sizes: Sizes, memory: int, node: int) -> Candidate:
    """The plan of one mesh, and whether it fits."""
    try:
        found = _plan(job, sizes)
    except TeFsdpError as error:
        return Candidate(sizes, None, str(error))
    sent = found.sent()
    within = sum(size for axis, size in sent.items() if reach_of(axis, sizes) <= node)
    over = found.peak.bytes - memory
    reason = f"{over / 2**30:.1f} GiB too much" if over > 0 else ""
    tokens = job.sequence * job.batch * job.microbatches / (sizes.tp * sizes.cp)
    return Candidate(sizes, found, reason, within, sum(sent.values()) - within, tokens)
