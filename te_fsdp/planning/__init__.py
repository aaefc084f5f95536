"""Cost estimates for a training job of any size, computed in one CPU process.

    import te_fsdp.planning as planning
    job = planning.Job("my-llama", strategy="optim_grads_params", optimizer="fused-adam", sequence=8192)
    found = planning.plan(job, planning.Sizes(dp_shard=32, tp=2))
    print(found.peak.bytes, found.sent())
    best = planning.search(job, gpus=64, memory=80 * 2**30)

The model is built on the meta device and sharded by ``te_fsdp.fully_shard``. torch's fake process group
simulates the other ranks. A plan therefore reads the same DTensors as the job. Configurations that te_fsdp
rejects raise the same error here.

``search`` plans the job on every mesh of the given number of GPUs. The mesh with the least communication per
token comes first. Communication within a node is assumed to be ``LINK_RATIO`` times as fast as between nodes.
Ranks are numbered as in ``Meshes``: tp is innermost, then ep, cp, dp_shard and dp_replicate.
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
from te_fsdp.features.reporting import Report, Row, describe
from te_fsdp.mesh import Meshes
from te_fsdp.planning.costs import checkpoint_bytes, flops_of, optimizer_bytes, stages_of, sum_of, weights_of
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

#: Version of the file format of :meth:`Plan.as_json`.
_VERSION = 1


@dataclass(frozen=True)
class Plan:
    """Estimated memory and communication of a job on one mesh.

    Numbers are those of the rank with the largest shards. Sizes are in bytes.
    """

    job: Mapping[str, Any]  #: Fields of :class:`~te_fsdp.planning.Job` as plain values
    sizes: Sizes  #: Sizes of the mesh axes
    report: Report  #: Output of ``te_fsdp.report`` on the first rank after materialization
    held: Mapping[str, int]  #: Memory between steps, by category (weights per format, optimizer state)
    gradients: int  #: Size of the reduced gradients
    largest_unit: int  #: Size of the largest unsharded unit
    activations: int  #: Size of all activations saved between forward and backward
    peak: Peak  #: Peak memory of a step
    traffic: tuple[Traffic, ...]  #: Communication of one rank per step
    #: Size of the tensors in a checkpoint over all ranks, for ``"model"`` and ``"optimizer"``
    checkpoint: Mapping[str, int]
    parameters: int  #: Number of elements of the model. Replicas are counted once.
    notes: tuple[str, ...] = ()  #: Costs that are not counted, and assumptions
    #: Floating-point operations of one rank per step, for ``"products"`` (GEMMs) and ``"attention"``
    flops: Mapping[str, float] = field(default_factory=dict)

    @property
    def held_bytes(self) -> int:
        """Return the memory between steps, in bytes."""
        return sum(self.held.values())

    def sent(self) -> dict[str, int]:
        """Return the bytes that a rank receives per step, by mesh axis."""
        by_axis: Counter[str] = Counter()
        for row in self.traffic:
            by_axis[row.axis] += row.bytes
        return dict(by_axis)

    def time(self, machine: Machine) -> StepTime:
        """Estimate the time of a step on a machine with the given speeds. Local operation.

        Raises:
            CheckpointError: The plan was loaded from a file of a te_fsdp version that did not count operations.
        """
        if not self.flops:
            raise CheckpointError("plan: it contains no operation counts", fix="plan the job again")
        # The categories of ``held`` are weights by format, and optimizer state.
        states = sum(size for label, size in self.held.items() if not label.startswith("weights, "))
        # The optimizer is bound by memory: it reads and writes states, reads gradients and writes weights.
        updated = 2 * states + self.gradients + self.held_bytes - states
        return step_time(self.flops, self.traffic, updated, self.largest_unit, self.sizes, machine)

    def as_json(self) -> dict[str, Any]:
        """Return the plan as a JSON-serializable dict for :meth:`from_json`."""
        return {"te_fsdp_plan": _VERSION} | dataclasses.asdict(self) | {"sent": self.sent()}

    @classmethod
    def from_json(cls, value: Mapping[str, Any], where: str = "plan") -> Plan:
        """Load a plan from the output of :meth:`as_json`. Errors refer to it as ``where``.

        Raises:
            CheckpointError: The value is not a plan, or a newer te_fsdp wrote it.
        """
        if value.get("te_fsdp_plan") != _VERSION:
            raise CheckpointError(
                f"{where}: not a plan",
                expected=f"te_fsdp_plan: {_VERSION}",
                got=value.get("te_fsdp_plan"),
                fix="write it again by te-fsdp plan --json",
            )
        try:
            args = dict(value)
            # The version and a derived sum, which are not fields.
            del args["te_fsdp_plan"], args["sent"]
            args.pop("step", None)  # estimated time added by the command line
            args["sizes"], args["peak"] = Sizes(**args["sizes"]), Peak(**args["peak"])
            args["traffic"] = tuple(Traffic(**row) for row in args["traffic"])
            args["notes"] = tuple(args["notes"])
            report = _tuples(args["report"])
            args["report"] = Report(**report | {"rows": tuple(Row(**row) for row in report["rows"])})
            return cls(**args)
        except (KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(
                f"{where}: not a plan",
                got=f"{type(error).__name__}: {error}",
                fix="write it again by te-fsdp plan --json",
            ) from error


def _tuples(value: Any) -> Any:
    """Convert JSON lists back to tuples, recursively."""
    if isinstance(value, dict):
        return {key: _tuples(item) for key, item in value.items()}
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


def plan(job: Job, sizes: Sizes) -> Plan:
    """Plan a job on a mesh of any size. Local operation on the CPU with meta tensors.

    The process must not have initialized ``torch.distributed``.

    Args:
        job: Model, sharding options and training options.
        sizes: Sizes of the mesh axes.

    Raises:
        OrderError: ``torch.distributed`` is initialized.
        TeFsdpError: The job itself would raise this error. See :func:`te_fsdp.fully_shard` and
            :class:`te_fsdp.Meshes`.
    """
    require_recipe(job)
    with _fake_ranks(sizes.ranks):
        return _plan(job, sizes)


def _fake_ranks(count: int) -> AbstractContextManager[None]:
    """Return a context with a fake process group of ``count`` ranks. This process is rank 0."""
    if dist.is_initialized():
        raise OrderError(
            "plan: torch.distributed is initialized",
            expected="a separate process",
            why="A plan simulates the ranks of a different job",
            fix="call plan before init_process_group, or run the command te-fsdp plan",
        )
    return _torch.simulated_world(count)


def _plan(job: Job, sizes: Sizes) -> Plan:
    """Implement :func:`plan` inside a fake process group of the right size."""
    meshes = Meshes.build(**dataclasses.asdict(sizes), device_type="cpu")
    model, names = build_model(job, meshes)
    work = workload_of(job, sizes)
    stages, notes = stages_of(model, job, work, sizes.tp)
    flops = flops_of(model, job, work, sizes.tp)
    options: dict[str, Any] = {n: getattr(job, n) for n in ("strategy", "outer_strategy", "precision")}
    fully_shard(model, meshes, units=names, checks="off", **options)
    weights = weights_of(model, job)
    resident, units = Counter[str](), Counter[str]()
    dtypes = {4: "float32", 2: "16 bits", 8: "float64"}
    for weight in weights:
        kind = weight.format.name if weight.format is not None else dtypes.get(weight.itemsize, "other")
        resident[f"weights, {kind}"] += weight.sharded
        # A unit occupies the larger of its forms in forward and backward.
        units[weight.unit] += max(weight.gathered, weight.gathered_again)
    held = dict(resident) | {
        what: size for what, size in optimizer_bytes(weights, job, meshes).items() if size
    }
    if any(weight.experts for weight in weights):
        notes.append("every ep rank is assumed to have as many experts as the first one")
    return Plan(
        job=job.described(),
        sizes=sizes,
        # The plan turns checks off, which does not describe the job.
        report=dataclasses.replace(describe(model, settled=True), checks=""),
        held=held,
        gradients=sum_of(weights, "gradient"),
        largest_unit=max(units.values(), default=0),
        activations=sum(stage.saved for stage in stages),
        peak=peak_of(weights, stages, held, job),
        traffic=traffic_of(model, weights, job, sizes, work),
        checkpoint=checkpoint_bytes(weights, job),
        parameters=sum_of(weights, "logical"),
        notes=tuple(notes),
        flops=flops,
    )


# ------------------------------------------------------------------------------------------------ the search for a mesh


#: Ratio of NVLink bandwidth (Hopper, 450 GB/s each way) to a 400 Gb/s network card per GPU (50 GB/s).
LINK_RATIO = 9


@dataclass(frozen=True)
class Candidate:
    """One mesh considered by a search."""

    sizes: Sizes  #: Sizes of the mesh axes
    plan: Plan | None  #: Plan of the job on this mesh. ``None`` if te_fsdp or the model rejects the mesh.
    reason: str = ""  #: Reason for the rejection. Empty if the job fits.
    within: int = 0  #: Bytes that a rank receives per step over axes within a node
    between: int = 0  #: Bytes that a rank receives per step over axes between nodes
    #: Tokens per GPU and step, which is the tokens of a data-parallel rank divided by the tp and cp sizes
    tokens: float = 1.0

    @property
    def cost(self) -> float:
        """Return the communication per token in bytes, weighted with ``LINK_RATIO``."""
        return (self.within / LINK_RATIO + self.between) / self.tokens


def search(
    job: Job, *, gpus: int, memory: int, node: int = 8, cp: int = 1, fixed: Mapping[str, int] | None = None
) -> list[Candidate]:
    """Plan a job on every mesh of the given number of GPUs. Local operation, as :func:`te_fsdp.planning.plan`.

    The search varies tp within a node. It varies ep for Hugging Face models with experts.

    Args:
        job: Job to plan. ``microbatches`` is the same on every mesh.
        gpus: Number of GPUs.
        memory: Memory of each GPU in bytes.
        node: Number of GPUs per node.
        cp: Size of the cp axis.
        fixed: Sizes of axes that the search does not vary.

    Returns:
        Meshes on which the job fits, cheapest first. Then those where it does not fit, smallest peak first.
        Rejected meshes come last.

    Raises:
        PlacementError: No mesh matches these numbers.
    """
    if min(gpus, memory, node, cp) < 1 or gpus % cp:
        raise PlacementError(
            "search",
            expected="positive numbers, with gpus divisible by cp",
            got=f"gpus={gpus}, memory={memory}, node={node}, cp={cp}",
            fix="pass a multiple of cp as gpus, memory in bytes, and the GPUs of a node as node",
        )
    sizes_fixed, every = fixed or {}, _meshes(job, gpus // cp, node, cp)
    meshes = [s for s in every if all(getattr(s, axis) == size for axis, size in sizes_fixed.items())]
    if not meshes:
        raise PlacementError(
            f"search: meshes of {gpus} GPUs with {', '.join(f'{axis}={size}' for axis, size in sizes_fixed.items())}",
            expected="sizes whose product divides the GPUs, tp within a node, ep only for models with experts",
            fix="omit a size, so that search tries all values",
        )
    require_recipe(job)

    def candidate(sizes: Sizes) -> Candidate:
        try:
            # te_fsdp and the model reject a mesh with the error that training would raise.
            planned = _plan(job, sizes)
        except TeFsdpError as error:
            return Candidate(sizes, None, str(error))
        sent = planned.sent()
        within = sum(size for axis, size in sent.items() if reach_of(axis, sizes) <= node)
        over = planned.peak.bytes - memory
        reason = f"{over / 2**30:.1f} GiB over the limit" if over > 0 else ""
        tokens = job.sequence * job.batch * job.microbatches / (sizes.tp * sizes.cp)
        return Candidate(sizes, planned, reason, within, sum(sent.values()) - within, tokens)

    def rank_of(candidate_: Candidate) -> tuple[int, float]:
        # Rank by class first: fitting, too large, rejected.
        if candidate_.plan is None:
            return 2, 0
        return (1, candidate_.plan.peak.bytes) if candidate_.reason else (0, candidate_.cost)

    with _fake_ranks(gpus):
        return sorted(map(candidate, meshes), key=rank_of)


def _meshes(job: Job, ranks: int, node: int, cp: int) -> Iterator[Sizes]:
    """Yield the candidate meshes of ``ranks * cp`` GPUs."""
    experts = 1
    if not is_function(job.model):
        about = read_config(job.model)  # type: ignore[arg-type]
        experts = about.experts.count if about.experts is not None else 1
    divisors = [n for n in range(1, ranks + 1) if ranks % n == 0]
    for tp, ep, replicas in itertools.product(divisors, repeat=3):
        shards, remainder = divmod(ranks, tp * ep * replicas)
        # tp communicates in each layer, which is slow between nodes.
        if not remainder and tp <= node and experts % ep == 0:
            yield Sizes(replicas, shards, cp, ep, tp)
