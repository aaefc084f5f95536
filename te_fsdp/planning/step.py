"""Simulation of one step on one rank: peak memory, communication, duration."""

# [Note: simulated step] Memory: forward and backward are simulated module by module, in the order in which
# FSDP2 runs them.
#
#   tensor                              allocated at                      freed at
#   weights, optimizer state            always                            never
#   unsharded weights of a unit         start of its forward (backward)   its end; end of the last backward with
#                                                                         optim or optim_grads
#   all-gather buffer                   all-gather of the unit            in forward, end of the next unit's
#                                                                         all-gather; else end of its own
#   all-gather buffer of the next unit  start of a unit's backward        end of the prefetched all-gather
#   activations                         forward of a module               backward of the module
#   unreduced gradients                 backward of a module              end of the unit's backward
#   reduce-scatter buffer               end of a unit's backward          end of the next unit's backward
#   reduced gradients                   end of a unit's backward          optimizer step

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from torch import nn

from te_fsdp.errors import PlacementError
from te_fsdp.planning.costs import Stage, Weight, sent_by, sum_of
from te_fsdp.planning.job import Job, Sizes, Workload

#: cuBLAS workspaces of torch and TransformerEngine, 32 MiB each on Hopper and later.
_WORKSPACES = 2 * 2**25


@dataclass(frozen=True)
class Peak:
    """Peak memory of a step."""

    when: str  #: Description of the moment
    parts: Mapping[str, int]  #: Allocated bytes by category, the largest first

    @property
    def bytes(self) -> int:
        """Return the total in bytes."""
        return sum(self.parts.values())


@dataclass(frozen=True)
class _Unit:
    name: str  #: FQN; empty for the root
    weights: Sequence[Weight]  #: Its own weights, without those of nested units
    saved: int = 0  #: Bytes that all modules in it save for backward, including nested units
    entering: int = 0  #: Size of its input in bytes
    is_outermost: bool = False  #: Whether only the root contains it

    @property
    def label(self) -> str:
        return self.name or "the root"

    @property
    def keeps(self) -> bool:
        """Return whether its weights stay unsharded from forward to backward."""
        return any(weight.storage.gather == "step" for weight in self.weights)

    @property
    def reduces_each(self) -> bool:
        """Return whether gradients are reduced in every backward of a step."""
        return any(weight.storage.reduce == "each" for weight in self.weights)

    @property
    def gathers(self) -> bool:
        """Return whether its all-gather sends anything."""
        return any(not weight.is_alone and weight.gathered for weight in self.weights)

    def buffer(self, gathered: str) -> int:
        """Return the bytes of its all-gather buffer for ``"gathered"`` or ``"gathered_again"``."""
        # Weights that are on one rank only need no buffer.
        return sum_of((weight for weight in self.weights if not weight.is_alone), gathered)

    @property
    def reduction(self) -> int:
        """Return the bytes of its reduce-scatter buffer. Replicated parameters are not in it."""
        return sum(w.reduction for w in self.weights if not (w.storage.is_replicated or w.is_passed))


@dataclass(frozen=True)
class _Run:
    """Consecutive modules of one unit. A unit with nested units has several runs."""

    unit: _Unit
    stages: Sequence[Stage]
    first: bool  #: Whether it is the first run of the unit
    last: bool  #: Whether it is the last run of the unit


def peak_of(weights: Sequence[Weight], stages: Sequence[Stage], base: Mapping[str, int], job: Job) -> Peak:
    """Return the peak memory of a steady-state step on the first rank. Local operation.

    ``stages`` are those of a microbatch, in forward order. ``base`` is the permanent memory in bytes, by category.
    """
    runs, root = _runs(weights, stages)
    memory = _Memory({**base, "workspaces": _WORKSPACES}, job)
    if job.microbatches > 1:
        # The last microbatch starts with the accumulated gradients and with the buffer of the previous reduction.
        memory.now["reduced gradients"] = sum(w.gradient for w in weights if w.storage.reduce == "each")
        memory.now["unreduced gradients"] = sum(map(memory.accumulated_bytes, weights))
        # FSDP2 frees the buffer of a reduction when the next one starts, here in the last microbatch.
        before = next((run.unit for run in runs if run.unit.name), root)
        memory.now["buffers of reductions"] = before.reduction if before.reduces_each else 0
    memory.forward(runs, root)
    memory.backward(runs, root)
    memory.now = Counter({**base, "workspaces": _WORKSPACES})
    memory.now["reduced gradients"] = sum_of(weights, "gradient")
    # fp32 copies of low-precision gradients. FusedAdam reads gradients in their own dtype and needs none.
    low = (w for w in weights if w.gradient and w.needs_main_weight and w.gradient < 4 * w.elements)
    copies = 0 if job.optimizer == "fused-adam" else sum(4 * weight.elements for weight in low)
    memory.record_moment("the optimizer's step", temporaries_of_the_optimizer=copies)
    return Peak(memory.when, {name: size for name, size in memory.best.most_common() if size})


def _runs(weights: Sequence[Weight], stages: Sequence[Stage]) -> tuple[list[_Run], _Unit]:
    """Return the runs in forward order, and the root unit. Modules of the root form runs like those of other units."""
    by_unit: dict[str, list[Weight]] = {"": []}
    for weight in weights:
        by_unit.setdefault(weight.unit, []).append(weight)
    inside = {name: [stage for stage in stages if _is_inside(stage.module, name)] for name in by_unit}
    for name in [name for name in by_unit if name and not inside[name]]:
        by_unit[""] += by_unit.pop(name)  # the position of its forward is unknown
    names = sorted(by_unit, key=len, reverse=True)
    units = {"": _Unit("", by_unit[""])}
    for name in filter(None, by_unit):
        outermost = not any(o and o != name and _is_inside(name, o) for o in names)
        saved, entering = sum(stage.saved for stage in inside[name]), inside[name][0].entering
        units[name] = _Unit(name, by_unit[name], saved, entering, outermost)
    parts = groupby(stages, lambda stage: next(name for name in names if _is_inside(stage.module, name)))
    runs = [(name, list(run)) for name, run in parts]
    order = [name for name, _ in runs]
    last = {name: position for position, name in enumerate(order)}
    return [
        _Run(units[n], run, order.index(n) == index, last[n] == index) for index, (n, run) in enumerate(runs)
    ], units[""]


def _is_inside(name: str, unit: str) -> bool:
    """Return whether a module is the unit or is inside it."""
    return not unit or name == unit or name.startswith(f"{unit}.")


# This follows torch 2.11 and 2.13 (``_fsdp_param_group.py``) and was compared with allocator histories on
# H200 GPUs. Fragmentation of the caching allocator is not counted, as in ``torch.cuda.max_memory_allocated``.
# Memory that NCCL allocates outside of torch is not counted.
# A parameter that is on one rank only has no buffers. Its unsharded weight shares the memory of the shard
# unless it is cast. Its gradients become the reduced gradients one at a time.
class _Memory:
    """Allocated memory during a simulated step, with the peak so far."""

    def __init__(self, resident: Mapping[str, int], job: Job) -> None:
        self.now: Counter[str] = Counter(resident)
        self.best: Counter[str] = Counter()
        self.when, self.job = "", job

    def record_moment(self, when: str, **temporary: int) -> None:
        """Record this moment if it is the peak so far. ``temporary`` is allocated at this moment only."""
        sizes = Counter(self.now)
        sizes.update({name.replace("_", " "): size for name, size in temporary.items()})
        if sizes.total() > self.best.total():
            self.best, self.when = sizes, when

    def accumulated_bytes(self, weight: Weight) -> int:
        """Return the bytes of an unreduced gradient accumulated over microbatches, in the dtype of the reduced one."""
        adds = self.job.microbatches > 1 and weight.storage.reduce == "last"
        return weight.gradient * weight.unsharded // max(weight.elements, 1) if adds else 0

    def unreduced_bytes(self, weights: Iterable[Weight]) -> int:
        """Return the bytes of the gradients that a backward leaves until the end of its unit."""
        # Autograd accumulates in place into a gradient of the same dtype.
        return sum(w.unreduced for w in weights if w.unreduced != self.accumulated_bytes(w))

    def forward(self, runs: Iterable[_Run], root: _Unit) -> None:
        """Simulate the forward of all units. The root's weights stay unsharded throughout."""
        self.gather(root)
        self.record_moment("the beginning of forward")
        for run in runs:
            unit = run.unit
            if unit.name and run.first:
                self.gather(unit)
            self.now["activations"] += sum(stage.saved for stage in run.stages)
            self.record_moment(f"forward of {unit.label}")
            if unit.name and run.last:
                # A recomputed unit keeps its input only. Its activations exist again in its backward.
                if self.job.recompute and unit.is_outermost:
                    self.now["activations"] -= unit.saved - unit.entering
                if not unit.keeps:
                    self.release(unit, "gathered")
        self.now["buffers of gathers"] = 0
        if not root.keeps:
            self.release(root, "gathered")

    def gather(self, unit: _Unit) -> None:
        """All-gather a unit for its forward. Its buffer coexists with that of the previous unit."""
        buffer = unit.buffer("gathered")
        self.record_moment(f"the gather of {unit.label}", the_next_buffer=buffer)
        self.now["buffers of gathers"] = buffer
        self.add_unsharded(unit, "gathered")

    def add_unsharded(self, unit: _Unit, gathered: str) -> None:
        """Add unsharded weights, for forward (``"gathered"``) or backward (``"gathered_again"``)."""
        derived = "derived_early" if gathered == "gathered" else "derived"
        self.now["gathered weights"] += sum_of(unit.weights, gathered)
        self.now["transposes of gathered weights"] += sum_of(unit.weights, derived)

    def release(self, unit: _Unit, gathered: str, *, transposes: bool = True) -> None:
        """Release unsharded weights. In backward, the modules have released the transposes already."""
        self.now["gathered weights"] -= sum_of(unit.weights, gathered)
        self.now["transposes of gathered weights"] -= transposes * sum_of(unit.weights, "derived_early")

    def backward(self, runs: Sequence[_Run], root: _Unit) -> None:
        """Simulate the backward of all units in reverse order. The root's gradients are reduced at the very end."""
        order = [run.unit for run in reversed(runs) if run.last and run.unit.name]
        by_module: dict[str, list[Weight]] = {}
        for weight in (weight for unit in (root, *order) for weight in unit.weights):
            by_module.setdefault(weight.module, []).append(weight)
        staged = {stage.module for run in runs for stage in run.stages}

        def begin(unit: _Unit) -> None:
            if not unit.keeps:
                self.add_unsharded(unit, "gathered_again")
            # Gradients of modules without a formula are assumed to exist from the start.
            self.now["unreduced gradients"] += self.unreduced_bytes(
                w for w in unit.weights if w.module not in staged
            )

        begin(root)
        for run in reversed(runs):
            unit = run.unit
            if unit.name and run.last:
                begin(unit)
                # FSDP2 prefetches one unit in backward. Its buffer exists together with the current unit.
                ahead = [u for u in order[order.index(unit) + 1 :][:1] if u.gathers and not u.keeps]
                self.now["buffers of gathers"] = sum(u.buffer("gathered_again") for u in ahead)
                if self.job.recompute and unit.is_outermost:
                    self.now["activations"] += unit.saved - unit.entering
            for stage in reversed(run.stages):
                self.stage_backward(stage, by_module.get(stage.module, []))
            if unit.name and run.first:
                self.reduce(unit)
        self.reduce(root)

    def stage_backward(self, stage: Stage, weights: Sequence[Weight]) -> None:
        """Simulate the backward of one module."""
        for moment in stage.moments:
            gradients = [w for w in weights if moment.gradients is None or w.name in moment.gradients]
            derived = [w for w in weights if moment.derived is None or w.name in moment.derived]
            # Transposes are freed one by one, in the order of the module's moments.
            gone = sum_of(weights, "derived") - sum_of(derived, "derived") if moment.gradients is None else 0
            self.record_moment(
                f"backward of {stage.module or 'the loss'}",
                temporaries_of_the_module=moment.temporary + sum_of(derived, "copied"),
                unreduced_gradients=sum_of(gradients, "unreduced"),
                transposes_of_gathered_weights=-gone,
            )
        self.now["activations"] -= stage.saved
        self.now["unreduced gradients"] += self.unreduced_bytes(weights)
        self.now["transposes of gathered weights"] -= sum_of(weights, "derived")

    def reduce(self, unit: _Unit) -> None:
        """Simulate the end of a unit's backward: release its weights and reduce its gradients through a buffer."""
        # Gradients are added to those of previous microbatches.
        adds, when = self.job.microbatches > 1 and unit.reduces_each, f"the reduction of {unit.label}"
        for weight in (weight for weight in unit.weights if weight.is_passed):
            # One gradient at a time, before anything is released. It is cast unless it has the right dtype.
            added = self.accumulated_bytes(weight)
            self.record_moment(
                when, reduced_gradients=0 if weight.gradient in (weight.unreduced, added) else weight.gradient
            )
            self.now["unreduced gradients"] -= self.unreduced_bytes([weight]) + added
            self.now["reduced gradients"] += 0 if adds else weight.gradient
        self.release(unit, "gathered" if unit.keeps else "gathered_again", transposes=False)
        reduced = [weight for weight in unit.weights if not weight.is_passed]
        gradient = sum_of(reduced, "gradient")
        self.now["buffers of reductions"] = unit.reduction
        # The buffer is complete before gradients are freed. FSDP2 does not reduce replicated parameters.
        replicated = sum(weight.gradient for weight in reduced if weight.storage.is_replicated)
        self.record_moment(when, reduced_gradients=replicated)
        self.now["unreduced gradients"] -= self.unreduced_bytes(reduced) + sum(
            map(self.accumulated_bytes, reduced)
        )
        self.record_moment(when, reduced_gradients=gradient)
        self.now["reduced gradients"] += 0 if adds else gradient


# -------------------------------------------------------------------------------------------------------------- traffic


# Communication is the number of bytes that a rank must receive with any algorithm. It equals the minimum that
# a rank sends. docs/plan.md, "The time of a step", defines how communication, computation and optimizer time
# combine. Rates are achieved rates, fitted to one measured step, not data sheet values.
@dataclass(frozen=True)
class Traffic:
    """One kind of collective over one mesh axis in an optimizer step."""

    axis: str  #: Name of the axis; ``"dp"`` if ``dp_replicate`` and ``dp_shard`` act as one
    what: str  #: Tensors that are sent
    #: ``"all-gather"``, ``"reduce-scatter"``, ``"all-reduce"``, ``"all-to-all"`` or ``"ring"``.
    collective: str
    ranks: int  #: Size of the process group
    bytes: int  #: Bytes that a rank receives per step


def traffic_of(
    model: nn.Module, weights: Sequence[Weight], job: Job, sizes: Sizes, work: Workload
) -> tuple[Traffic, ...]:
    """Return the communication of a step, except scales, norms and checks (a few numbers each). Local operation."""
    total: Counter[tuple[str, str, str, int]] = Counter()
    replicas = sizes.dp_replicate
    for weight in weights:
        shards = sizes.dp_shard * sizes.cp * (1 if weight.experts else sizes.ep)
        storage, times = weight.storage, 1 if weight.storage.reduce == "last" else job.microbatches
        gradient = weight.unsharded * weight.sent_itemsize
        if storage.is_replicated:
            ranks = shards * replicas
            # An all-reduce receives each element twice: in its reduce-scatter and in its all-gather.
            total["dp", "gradients", "all-reduce", ranks] += round(2 * gradient * (ranks - 1) / ranks)
            continue
        share, part = (shards - 1) / shards, gradient / shards
        gathers = weight.gathered
        if storage.gather == "pass":
            gathers = weight.gathered + (weight.gathered_again if weight.gradient else weight.gathered)
            gathers *= job.microbatches
        total["dp_shard", "weights", "all-gather", shards] += round(gathers * share)
        total["dp_shard", "gradients", "reduce-scatter", shards] += round(times * gradient * share)
        if storage.gradient[0] == "P":
            others, updated = (replicas - 1) / replicas, weight.sharded * bool(weight.gradient)
            total["dp_replicate", "gradients", "reduce-scatter", replicas] += round(part * others)
            total["dp_replicate", "weights", "all-gather", replicas] += round(updated * others)
        else:
            size = 2 * part * (replicas - 1) / replicas
            total["dp_replicate", "gradients", "all-reduce", replicas] += round(size)
    for key, size in sent_by(model, job, sizes, work):
        total[key] += round(size)
    order = ("dp_shard", "dp_replicate", "dp", "tp", "cp", "ep")
    rows = [Traffic(*key, size) for key, size in total.items() if size]
    return tuple(sorted(rows, key=lambda row: (order.index(row.axis), row.what)))


# ----------------------------------------------------------------------------------------------------------------- time

#: Axes whose communication blocks the next GEMM.
_WAITED_FOR = ("tp", "ep")


@dataclass(frozen=True)
class Machine:
    """Achieved speeds of a machine."""

    tflops: float  #: 10^12 operations per second of GEMMs in the recipe's format
    #: The same for attention, which FP8 recipes run in 16 bits; ``None``: as GEMMs.
    attention_tflops: float | None = None
    within: float = 140.0  #: 10^9 bytes per second that a GPU receives from its node
    between: float = 40.0  #: 10^9 bytes per second that a GPU receives from other nodes
    memory: float = 4000.0  #: 10^9 bytes per second of a GPU's memory
    node: int = 8  #: GPUs per node
    contention: float = 0.4  #: Fraction of the overlapped communication time that computation loses
    #: Milliseconds that the host needs to issue a step, as measured (``host_ms`` of ``benchmarks/step.py``). 0:
    #: the device never waits for the host, as with CUDA graphs.
    host: float = 0.0

    def __post_init__(self) -> None:
        speeds = ("tflops", "within", "between", "memory", "node")
        for name, expected, fits in (
            *((name, "more than 0", getattr(self, name) > 0) for name in speeds),
            ("contention", "a fraction, 0 to 1", 0 <= self.contention <= 1),
            ("host", "0 or more", self.host >= 0),
        ):
            if not fits:
                fix = f"pass a measured value of {name}" if name in speeds else "omit it for the default"
                raise PlacementError(f"plan: {name}", expected=expected, got=getattr(self, name), fix=fix)


@dataclass(frozen=True)
class StepTime:
    """Estimated duration of a step, in seconds."""

    compute: float  #: GEMMs and attention
    optimizer: float  #: Optimizer step
    links: dict[str, float]  #: Axis -> communication time
    exposed: dict[str, float]  #: Axis -> communication time that is not overlapped
    contended: float  #: Slowdown of computation caused by overlapped communication
    host: float = 0.0  #: Time in which the host issues the step

    @property
    def waits(self) -> float:
        """Return the time in which the device waits for the host, in seconds."""
        return max(self.host - self._device, 0.0)

    @property
    def seconds(self) -> float:
        """Return the total in seconds."""
        return self._device + self.waits

    @property
    def _device(self) -> float:
        return self.compute + self.optimizer + sum(self.exposed.values()) + self.contended


def step_time(
    flops: Mapping[str, float],
    traffic: tuple[Traffic, ...],
    updated: int,
    unit: int,
    sizes: Sizes,
    machine: Machine,
) -> StepTime:
    """Estimate a step for :meth:`te_fsdp.planning.Plan.time`. Local operation.

    ``updated`` is the number of bytes that the optimizer reads and writes. ``unit`` is the size of the largest
    unsharded unit in bytes.
    """
    attention = machine.attention_tflops or machine.tflops
    compute = flops["products"] / machine.tflops / 1e12 + flops["attention"] / attention / 1e12
    links: dict[str, float] = {}
    exposed: dict[str, float] = {}
    hidden = 0.0
    for row in traffic:
        speed = 1e9 * (machine.within if reach_of(row.axis, sizes) <= machine.node else machine.between)
        links[row.axis] = links.get(row.axis, 0.0) + row.bytes / speed
        if row.axis in _WAITED_FOR:
            exposed[row.axis] = exposed.get(row.axis, 0.0) + row.bytes / speed
            continue
        # The first all-gather and the last reduce-scatter cannot overlap with computation.
        edge = min(row.bytes, unit * (row.ranks - 1) / row.ranks) / speed if row.axis != "cp" else 0.0
        exposed[row.axis] = exposed.get(row.axis, 0.0) + edge
        hidden += row.bytes / speed - edge
    longer = max(hidden - compute, 0.0)
    if longer:
        slowest = max((axis for axis in links if axis not in _WAITED_FOR), key=lambda axis: links[axis])
        exposed[slowest] += longer
    optimizer = updated / machine.memory / 1e9
    contended = machine.contention * (hidden - longer)
    return StepTime(compute, optimizer, links, exposed, contended, machine.host / 1e3)


def reach_of(axis: str, sizes: Sizes) -> int:
    """Return the number of adjacent ranks that an axis spans, including the axes inside it."""
    inner = {"tp": 1, "ep": sizes.tp, "cp": sizes.tp * sizes.ep}
    if axis in inner:
        return inner[axis] * getattr(sizes, axis)
    # Dense weights are sharded over dp_shard, cp and ep.
    shards = sizes.tp * sizes.ep * sizes.cp * sizes.dp_shard
    return shards if axis == "dp_shard" else shards * sizes.dp_replicate
