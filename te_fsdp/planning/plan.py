"""``plan``: what each rank of a job will hold and send, found in one process without GPUs.

The model is built on meta as the first of so many ranks would build it, and ``te_fsdp.fully_shard`` shards it in
earnest, in a world whose other ranks torch's fake process group pretends. So a plan reads what a job would train with,
and what te_fsdp would refuse it refuses, with the same error.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from te_fsdp import _torch
from te_fsdp.axes import ALL_AXES
from te_fsdp.errors import CheckpointError, OrderError
from te_fsdp.mesh import Meshes
from te_fsdp.planning.activations import stages_of
from te_fsdp.planning.job import Job, Sizes, build_model, workload_of
from te_fsdp.planning.peak import Peak, peak_of
from te_fsdp.planning.traffic import Traffic, traffic_of
from te_fsdp.planning.weights import Weight, checkpoint_bytes, optimizer_bytes, sums, weights_of
from te_fsdp.sharding.fully_shard import fully_shard
from te_fsdp.sharding.report import Report, Row, describe

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

    def as_json(self) -> dict[str, Any]:
        """A value that ``json.dump`` takes, and :meth:`from_json`."""
        return {"te_fsdp_plan": _VERSION} | dataclasses.asdict(self) | {"sent": self.sent()}

    @classmethod
    def from_json(cls, value: Mapping[str, Any], where: str = "plan") -> Plan:
        """The plan of such a value.

        Args:
            value: From :meth:`as_json`, perhaps by way of a file.
            where: Name of the file, for messages.

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
    with pretended_ranks(sizes.ranks):
        return plan_here(job, sizes)


@contextmanager
def pretended_ranks(count: int) -> Iterator[None]:
    """A world of so many ranks for plans, of which this process is the first.

    Raises:
        OrderError: ``torch.distributed`` is running.
    """
    if dist.is_initialized():
        raise OrderError(
            "plan: torch.distributed is running",
            expected="a process of its own",
            why="A plan plays a job of other ranks",
            fix="plan before init_process_group, or run te-fsdp plan",
        )
    with _torch.pretended_world(count):
        yield


def plan_here(job: Job, sizes: Sizes) -> Plan:
    """:func:`plan` in a world of the right size that is pretended already."""
    meshes = Meshes.build(**{axis: getattr(sizes, axis) for axis in ALL_AXES}, device_type="cpu")
    model, units = build_model(job, meshes)
    work = workload_of(job, sizes)
    stages, notes = stages_of(model, job, work, sizes.tp)
    fully_shard(
        model,
        meshes,
        units=units,
        strategy=job.strategy,
        outer_strategy=job.outer_strategy,
        precision=job.precision,
        check_inputs=False,
    )
    weights = weights_of(model, job)
    held = _held(weights, job, meshes)
    if any(weight.experts for weight in weights):
        notes.append("all ranks of ep are taken to hold as many experts as the first one")
    return Plan(
        job=job.described(),
        sizes=sizes,
        report=describe(model, settled=True),
        held=held,
        gradients=sums(weights, "gradient"),
        largest_unit=max(_unit_sizes(weights).values(), default=0),
        activations=sum(stage.kept for stage in stages),
        peak=peak_of(weights, stages, held, job),
        traffic=traffic_of(model, weights, job, sizes, work),
        checkpoint=checkpoint_bytes(weights, job),
        parameters=sums(weights, "logical"),
        notes=tuple(notes),
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


def _unit_sizes(weights: list[Weight]) -> dict[str, int]:
    """Bytes of each unit when it is gathered."""
    found: Counter[str] = Counter()
    for weight in weights:
        found[weight.unit] += max(weight.gathered, weight.gathered_again)
    return dict(found)
