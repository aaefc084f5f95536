"""A step as a rank runs it: what it has in memory at its highest point, what it sends, and how long it takes.

Memory: forward and backward are played module by module, as FSDP2 runs them.

    what lies there                     from                                 to
    weights, optimizer state            always
    gathered weights of a unit          its forward (backward)               its end; under optim, optim_grads the last
                                                                             backward
    buffer of a gather                  the gather of its unit               in forward the end of the next unit's
                                                                             gather, else the end of its own
    buffer of the next unit's gather    the begin of a unit's backward       its own
    activations                         a module's forward                   its backward
    gradients as backward makes them    a module's backward                  the end of its unit's
    buffer of a reduction               the end of a unit's backward         the end of the next unit's
    reduced gradients                   the end of a unit's backward         the optimizer's step

Whole shards (one rank alone) have no buffers: their memory is that of the gathered weights, unless these are cast, and
gradients become the reduced ones one after the other.

Looked up in torch 2.11 and 2.13 (``_fsdp_param_group.py``), and compared with an allocator's history on H200s. The
caching allocator's own losses do not count, as in ``torch.cuda.max_memory_allocated``, nor what NCCL takes outside.

Traffic is what a rank must receive whatever the algorithm, which is at the same time the least that it sends. How its
seconds, those of computation and those of the optimizer make a step is docs/plan.md, "The time of a step". Rates are
those that are reached, not those of a data sheet: they follow from one measured step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from torch import nn

from te_fsdp.errors import PlacementError
from te_fsdp.planning.costs import Sent, Stage, Weight, sent_by, sum_of, temporary_in_step
from te_fsdp.planning.job import Job, Sizes, Workload

#: Workspaces of cuBLAS, torch's and TransformerEngine's, each of 32 MiB on Hopper and later.
_WORKSPACES = 2 * 2**25


@dataclass(frozen=True)
class Peak:
    """The highest point of a step.

    Attributes:
        when: The moment, in words.
        parts: What lies in memory then: words -> bytes, the largest first.
    """

    when: str
    parts: Mapping[str, int]

    @property
    def bytes(self) -> int:
        """Their sum."""
        return sum(self.parts.values())


@dataclass(frozen=True)
class _Unit:
    """One unit and its weights."""

    name: str  #: Empty for the root
    weights: Sequence[Weight]  #: Its own, not those of units in it
    kept: int = 0  #: Bytes that all modules in it keep, units in it included
    entering: int = 0  #: Bytes of what enters it
    is_outermost: bool = False  #: Whether it lies in no other unit but the root

    @property
    def label(self) -> str:
        return self.name or "the root"

    @property
    def keeps(self) -> bool:
        """Whether its weights stay gathered from forward to backward."""
        return any(weight.storage.gather == "step" for weight in self.weights)

    @property
    def reduces_each(self) -> bool:
        """Whether gradients are reduced with each backward of a step."""
        return any(weight.storage.reduce == "each" for weight in self.weights)

    @property
    def gathers(self) -> bool:
        """Whether anything is sent to gather it."""
        return any(not weight.is_alone and weight.gathered for weight in self.weights)

    def buffer(self, gathered: str) -> int:
        """Bytes of the buffer of its gather, for forward or backward; what it has alone is sent nowhere."""
        return sum_of((weight for weight in self.weights if not weight.is_alone), gathered)

    @property
    def reduction(self) -> int:
        """Bytes of the buffer that its gradients are reduced from; that of what stays whole is not FSDP2's."""
        return sum(w.reduction for w in self.weights if not (w.storage.is_whole or w.is_passed))


@dataclass(frozen=True)
class _Run:
    """Modules of one unit that follow each other; a unit with units in it has several runs."""

    unit: _Unit
    stages: Sequence[Stage]
    first: bool  #: Whether the unit's forward begins with them
    last: bool  #: Whether it ends with them


def peak_of(weights: Sequence[Weight], stages: Sequence[Stage], held: Mapping[str, int], job: Job) -> Peak:
    """The highest point of a settled step on the first rank. Local operation.

    Args:
        weights: All weights of the rank.
        stages: All stages of a microbatch, in the order of forward.
        held: What lies in memory all the time: words -> bytes.
        job: How the model is trained.
    """
    runs, root = _runs(weights, stages)
    memory = _Memory({**held, "workspaces": _WORKSPACES}, job)
    if job.microbatches > 1:
        # The last microbatch begins with what the others have added up, and with the buffer of their last reduction.
        memory.now["reduced gradients"] = sum(w.gradient for w in weights if w.storage.reduce == "each")
        memory.now["unreduced gradients"] = sum(map(memory.adding_up, weights))
        before = next((run.unit for run in runs if run.unit.name), root)
        memory.now["buffers of reductions"] = before.reduction if before.reduces_each else 0
    memory.forward(runs, root)
    memory.backward(runs, root)
    memory.now = Counter({**held, "workspaces": _WORKSPACES})
    memory.now["reduced gradients"] = sum_of(weights, "gradient")
    memory.look("the optimizer's step", temporaries_of_the_optimizer=temporary_in_step(weights, job))
    return Peak(memory.when, {name: size for name, size in memory.best.most_common() if size})


def _runs(weights: Sequence[Weight], stages: Sequence[Stage]) -> tuple[list[_Run], _Unit]:
    """Runs in the order of forward, and the root; its own modules make runs as those of any unit."""
    by_unit: dict[str, list[Weight]] = {"": []}
    for weight in weights:
        by_unit.setdefault(weight.unit, []).append(weight)
    inside = {name: [stage for stage in stages if _is_inside(stage.module, name)] for name in by_unit}
    for name in [name for name in by_unit if name and not inside[name]]:
        by_unit[""] += by_unit.pop(name)  # nobody knows when it runs
    names = sorted(by_unit, key=len, reverse=True)
    units = {"": _Unit("", by_unit[""])}
    for name in filter(None, by_unit):
        outermost = not any(o and o != name and _is_inside(name, o) for o in names)
        kept, entering = sum(stage.kept for stage in inside[name]), inside[name][0].entering
        units[name] = _Unit(name, by_unit[name], kept, entering, outermost)
    parts = groupby(stages, lambda stage: next(name for name in names if _is_inside(stage.module, name)))
    runs = [(name, list(run)) for name, run in parts]
    order = [name for name, _ in runs]
    last = {name: at for at, name in enumerate(order)}
    return [
        _Run(units[n], run, order.index(n) == at, last[n] == at) for at, (n, run) in enumerate(runs)
    ], units[""]


def _is_inside(name: str, unit: str) -> bool:
    """Whether a module is a unit, or lies in it."""
    return not unit or name == unit or name.startswith(f"{unit}.")


class _Memory:
    """What lies in memory while a step is played, and the highest point so far."""

    def __init__(self, held: Mapping[str, int], job: Job) -> None:
        self.now: Counter[str] = Counter(held)
        self.best: Counter[str] = Counter()
        self.when, self.job = "", job

    def look(self, when: str, **beside: int) -> None:
        """Note this moment, with what lies there for it alone, if it is the highest so far."""
        found = Counter(self.now)
        found.update({name.replace("_", " "): size for name, size in beside.items()})
        if found.total() > self.best.total():
            self.best, self.when = found, when

    def adding_up(self, weight: Weight) -> int:
        """Bytes of a gradient that microbatches add up unreduced: whole, in the dtype of the reduced one."""
        adds = self.job.microbatches > 1 and weight.storage.reduce == "last"
        return weight.gradient * weight.whole // max(weight.elements, 1) if adds else 0

    def new(self, weights: Iterable[Weight]) -> int:
        """Bytes of gradients that a backward leaves until its unit ends; autograd adds to what has their own dtype."""
        return sum(w.unreduced for w in weights if w.unreduced != self.adding_up(w))

    def forward(self, runs: Iterable[_Run], root: _Unit) -> None:
        """All units' forwards; the root's weights are gathered for all of it."""
        self.gather(root)
        self.look("the beginning of forward")
        for run in runs:
            unit = run.unit
            if unit.name and run.first:
                self.gather(unit)
            self.now["activations"] += sum(stage.kept for stage in run.stages)
            self.look(f"forward of {unit.label}")
            if unit.name and run.last:
                if self.job.recompute and unit.is_outermost:
                    self.now["activations"] -= unit.kept - unit.entering
                if not unit.keeps:
                    self.release(unit, "gathered")
        self.now["buffers of gathers"] = 0
        if not root.keeps:
            self.release(root, "gathered")

    def gather(self, unit: _Unit) -> None:
        """Gather a unit for its forward: first into a buffer, beside that of the unit before."""
        buffer = unit.buffer("gathered")
        self.look(f"the gather of {unit.label}", the_next_buffer=buffer)
        self.now["buffers of gathers"] = buffer
        self.install(unit, "gathered")

    def install(self, unit: _Unit, gathered: str) -> None:
        """Take gathered weights into memory: ``"gathered"`` for forward, ``"gathered_again"`` for backward."""
        derived = "derived_early" if gathered == "gathered" else "derived"
        self.now["gathered weights"] += sum_of(unit.weights, gathered)
        self.now["transposes of gathered weights"] += sum_of(unit.weights, derived)

    def release(self, unit: _Unit, gathered: str, *, transposes: bool = True) -> None:
        """Release them; in backward transposes have gone already, with their modules."""
        self.now["gathered weights"] -= sum_of(unit.weights, gathered)
        self.now["transposes of gathered weights"] -= transposes * sum_of(unit.weights, "derived_early")

    def backward(self, runs: Sequence[_Run], root: _Unit) -> None:
        """All units' backwards, the last one first. The root's gradients are reduced at the end of all."""
        order = [run.unit for run in reversed(runs) if run.last and run.unit.name]
        by_module: dict[str, list[Weight]] = {}
        for weight in (weight for unit in (root, *order) for weight in unit.weights):
            by_module.setdefault(weight.module, []).append(weight)
        staged = {stage.module for run in runs for stage in run.stages}

        def begin(unit: _Unit) -> None:
            if not unit.keeps:
                self.install(unit, "gathered_again")
            # Of modules of which nothing is known, gradients are there from the beginning.
            self.now["unreduced gradients"] += self.new(w for w in unit.weights if w.module not in staged)

        begin(root)
        for run in reversed(runs):
            unit = run.unit
            if unit.name and run.last:
                begin(unit)
                ahead = [one for one in order[order.index(unit) + 1 :][:1] if one.gathers and not one.keeps]
                self.now["buffers of gathers"] = sum(one.buffer("gathered_again") for one in ahead)
                if self.job.recompute and unit.is_outermost:
                    self.now["activations"] += unit.kept - unit.entering
            for stage in reversed(run.stages):
                self.stage_backward(stage, by_module.get(stage.module, []))
            if unit.name and run.first:
                self.reduce(unit)
        self.reduce(root)

    def stage_backward(self, stage: Stage, weights: Sequence[Weight]) -> None:
        """The backward of one module."""
        for moment in stage.moments:
            gradients = [w for w in weights if moment.gradients is None or w.name in moment.gradients]
            derived = [w for w in weights if moment.derived is None or w.name in moment.derived]
            # Transposes go one by one; the moments of a module come in that order.
            gone = sum_of(weights, "derived") - sum_of(derived, "derived") if moment.gradients is None else 0
            self.look(
                f"backward of {stage.module or 'the loss'}",
                temporaries_of_the_module=moment.temporary + sum_of(derived, "copied"),
                unreduced_gradients=sum_of(gradients, "unreduced"),
                transposes_of_gathered_weights=-gone,
            )
        self.now["activations"] -= stage.kept
        self.now["unreduced gradients"] += self.new(weights)
        self.now["transposes of gathered weights"] -= sum_of(weights, "derived")

    def reduce(self, unit: _Unit) -> None:
        """The end of a unit's backward: its weights are released, its gradients reduced through a buffer."""
        # What other microbatches have left takes it up.
        adds, when = self.job.microbatches > 1 and unit.reduces_each, f"the reduction of {unit.label}"
        for weight in (weight for weight in unit.weights if weight.is_passed):
            # One after the other, before anything is released: cast, unless it is there in its dtype already.
            added = self.adding_up(weight)
            self.look(
                when, reduced_gradients=0 if weight.gradient in (weight.unreduced, added) else weight.gradient
            )
            self.now["unreduced gradients"] -= self.new([weight]) + added
            self.now["reduced gradients"] += 0 if adds else weight.gradient
        self.release(unit, "gathered" if unit.keeps else "gathered_again", transposes=False)
        rest = [weight for weight in unit.weights if not weight.is_passed]
        gradient = sum_of(rest, "gradient")
        self.now["buffers of reductions"] = unit.reduction
        # Gradients are gone when what becomes of them is made; what stays whole is not FSDP2's.
        whole = sum(weight.gradient for weight in rest if weight.storage.is_whole)
        self.look(when, reduced_gradients=whole)
        self.now["unreduced gradients"] -= self.new(rest) + sum(map(self.adding_up, rest))
        self.look(when, reduced_gradients=gradient)
        self.now["reduced gradients"] += 0 if adds else gradient


# -------------------------------------------------------------------------------------------------------------- traffic


@dataclass(frozen=True)
class Traffic:
    """One kind of collective over one axis in an optimizer step.

    Attributes:
        axis: Name; ``"dp"`` where ``dp_replicate`` and ``dp_shard`` act as one.
        what: What is sent.
        collective: ``"all-gather"``, ``"reduce-scatter"``, ``"all-reduce"``, ``"all-to-all"`` or ``"ring"``.
        ranks: How many take part.
        bytes: That a rank receives in a step.
    """

    axis: str
    what: str
    collective: str
    ranks: int
    bytes: int


def traffic_of(
    model: nn.Module, weights: Sequence[Weight], job: Job, sizes: Sizes, work: Workload
) -> tuple[Traffic, ...]:
    """All of a step's traffic, but for scales, norms and checks: a few numbers each. Local operation."""
    total: Counter[tuple[str, str, str, int]] = Counter()
    for key, size in (*_of_weights(weights, job, sizes), *sent_by(model, job, sizes, work)):
        total[key] += round(size)
    order = ("dp_shard", "dp_replicate", "dp", "tp", "cp", "ep")
    rows = [Traffic(*key, size) for key, size in total.items() if size]
    return tuple(sorted(rows, key=lambda row: (order.index(row.axis), row.what)))


def _of_weights(weights: Sequence[Weight], job: Job, sizes: Sizes) -> Sent:
    """Weights and gradients over the data-parallel axes."""
    replicas = sizes.dp_replicate
    for weight in weights:
        shards = sizes.dp_shard * sizes.cp * (1 if weight.experts else sizes.ep)
        storage, times = weight.storage, 1 if weight.storage.reduce == "last" else job.microbatches
        gradient = weight.whole * weight.wire
        if storage.is_whole:
            ranks = shards * replicas
            yield ("dp", "gradients", "all-reduce", ranks), 2 * gradient * (ranks - 1) / ranks
            continue
        share = (shards - 1) / shards
        gathers = weight.gathered
        if storage.gather == "pass" and weight.gradient:
            gathers = job.microbatches * (weight.gathered + weight.gathered_again)
        elif storage.gather == "pass":
            gathers = job.microbatches * 2 * weight.gathered
        yield ("dp_shard", "weights", "all-gather", shards), gathers * share
        yield ("dp_shard", "gradients", "reduce-scatter", shards), times * gradient * share
        part = gradient / shards
        if storage.gradient[0] == "P":
            others = (replicas - 1) / replicas
            yield ("dp_replicate", "gradients", "reduce-scatter", replicas), part * others
            yield (
                ("dp_replicate", "weights", "all-gather", replicas),
                weight.held * others * bool(weight.gradient),
            )
        else:
            yield ("dp_replicate", "gradients", "all-reduce", replicas), 2 * part * (replicas - 1) / replicas


# ----------------------------------------------------------------------------------------------------------------- time

#: Axes whose messages the next product waits for.
_WAITED_FOR = ("tp", "ep")


@dataclass(frozen=True)
class Machine:
    """Speeds that a job reaches."""

    tflops: float  #: 10^12 operations a second of products, in the recipe's format
    #: Of attention, which FP8 recipes leave in 16 bits; ``None``: as products.
    attention_tflops: float | None = None
    within: float = 140.0  #: 10^9 bytes a second that a GPU receives over links of its node
    between: float = 40.0  #: Over links between nodes
    memory: float = 4000.0  #: 10^9 bytes a second of a GPU's memory
    node: int = 8  #: GPUs of a node
    contention: float = 0.4  #: Share of hidden communication's time that computation loses
    #: Milliseconds in which the host issues a step, as measured (``host_ms`` of ``benchmarks/step.py``); 0: the device
    #: never waits for it, as in CUDA graphs.
    host: float = 0.0

    def __post_init__(self) -> None:
        for name in ("tflops", "within", "between", "memory", "node"):
            if not getattr(self, name) > 0:
                raise PlacementError(f"plan: {name}", expected="more than 0", got=getattr(self, name))
        if not 0 <= self.contention <= 1:
            raise PlacementError("plan: contention", expected="a share, 0 to 1", got=self.contention)
        if not self.host >= 0:
            raise PlacementError("plan: host", expected="0 or more", got=self.host)


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step."""

    compute: float  #: Products and attention
    optimizer: float  #: Its step
    links: dict[str, float]  #: Axis -> seconds that its messages take
    exposed: dict[str, float]  #: Axis -> seconds of them that the step waits for
    contended: float  #: What hidden messages cost computation
    host: float = 0.0  #: What issuing it takes

    @property
    def waits(self) -> float:
        """How long the device waits for its host."""
        return max(self.host - self._device, 0.0)

    @property
    def seconds(self) -> float:
        """All of it."""
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

    ``updated`` are bytes that the optimizer reads and writes, ``unit`` those of the largest unit when it is gathered.
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
        # A gather before the first unit computes, a reduction after the last one has.
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
    """How many neighbouring ranks an axis spans, those of axes further in included."""
    inner = {"tp": 1, "ep": sizes.tp, "cp": sizes.tp * sizes.ep}
    if axis in inner:
        return inner[axis] * getattr(sizes, axis)
    # Dense weights are cut over dp_shard, cp and ep.
    shards = sizes.tp * sizes.ep * sizes.cp * sizes.dp_shard
    return shards if axis == "dp_shard" else shards * sizes.dp_replicate
