"""The highest point of a training step in memory: forward and backward played module by module, as FSDP2 runs them.

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
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import TYPE_CHECKING

from te_fsdp.planning.weights import sums, temporary_in_step

if TYPE_CHECKING:
    from te_fsdp.planning.activations import Stage
    from te_fsdp.planning.job import Job
    from te_fsdp.planning.weights import Weight

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


@dataclass
class _Memory:
    """What lies in memory, and the highest point so far."""

    now: Counter[str] = field(default_factory=Counter)
    best: Counter[str] = field(default_factory=Counter)
    when: str = ""

    def look(self, when: str, **beside: int) -> None:
        """Note this moment, with what lies there for it alone, if it is the highest so far."""
        found = Counter(self.now)
        found.update({name.replace("_", " "): size for name, size in beside.items()})
        if found.total() > self.best.total():
            self.best, self.when = found, when


@dataclass(frozen=True)
class _Unit:
    """One unit and its weights.

    Attributes:
        name: Its name; empty for the root.
        weights: Its own, not those of units in it.
        kept: Bytes that all modules in it keep, units in it included.
        entering: Bytes of what enters it.
        is_outermost: Whether it lies in no other unit but the root.
    """

    name: str
    weights: Sequence[Weight]
    kept: int = 0
    entering: int = 0
    is_outermost: bool = False

    @property
    def label(self) -> str:
        return self.name or "the root"

    @property
    def keeps(self) -> bool:
        """Whether its weights stay gathered from forward to backward."""
        return any(weight.storage.gather == "step" for weight in self.weights)

    @property
    def gathers(self) -> bool:
        """Whether anything is sent to gather it."""
        return any(not weight.is_alone and weight.gathered for weight in self.weights)

    def buffer(self, gathered: str) -> int:
        """Bytes of the buffer of its gather, for forward or backward; what it has alone is sent nowhere."""
        return sums((weight for weight in self.weights if not weight.is_alone), gathered)


@dataclass(frozen=True)
class _Run:
    """Modules of one unit that follow each other; a unit with units in it has several runs.

    Attributes:
        unit: Whose modules they are.
        stages: Theirs.
        first: Whether the unit's forward begins with them.
        last: Whether it ends with them.
    """

    unit: _Unit
    stages: Sequence[Stage]
    first: bool
    last: bool


def peak_of(weights: Sequence[Weight], stages: Sequence[Stage], held: Mapping[str, int], job: Job) -> Peak:
    """The highest point of a settled step on the first rank. Local operation.

    Args:
        weights: All weights of the rank.
        stages: All stages of a microbatch, in the order of forward.
        held: What lies in memory all the time: words -> bytes.
        job: How the model is trained.
    """
    runs, root = _runs(weights, stages)
    memory = _Memory(Counter(held))
    memory.now["workspaces"] = _WORKSPACES
    if job.microbatches > 1:
        # The last microbatch begins with what the others have added up, and with the buffer of their last reduction.
        memory.now["reduced gradients"] = sum(w.gradient for w in weights if w.storage.reduce == "each")
        memory.now["unreduced gradients"] = sum(_adding_up(weight, job) for weight in weights)
        before = next((run.unit for run in runs if run.unit.name), root)
        each = any(weight.storage.reduce == "each" for weight in before.weights)
        memory.now["buffers of reductions"] = _reduction(before) if each else 0
    _forward(memory, runs, root, job)
    _backward(memory, runs, root, job)
    memory.now = Counter({**held, "workspaces": _WORKSPACES})
    memory.now["reduced gradients"] = sums(weights, "gradient")
    memory.look("the optimizer's step", temporaries_of_the_optimizer=temporary_in_step(weights, job))
    parts = {name: size for name, size in memory.best.most_common() if size}
    return Peak(memory.when, parts)


def _adding_up(weight: Weight, job: Job) -> int:
    """Bytes of a gradient that microbatches add up unreduced: whole, in the dtype of the reduced one."""
    adds = job.microbatches > 1 and weight.storage.reduce == "last"
    return weight.gradient * weight.whole // max(weight.elements, 1) if adds else 0


def _new(weights: Iterable[Weight], job: Job) -> int:
    """Bytes of gradients that a backward leaves until its unit ends; autograd adds to what has their own dtype."""
    return sum(w.unreduced for w in weights if w.unreduced != _adding_up(w, job))


def _reduction(unit: _Unit) -> int:
    """Bytes of the buffer that a unit's gradients are reduced from; that of what stays whole is not FSDP2's."""
    return sum(w.reduction for w in unit.weights if not (w.storage.is_whole or w.is_passed))


def _runs(weights: Sequence[Weight], stages: Sequence[Stage]) -> tuple[list[_Run], _Unit]:
    """Runs in the order of forward, and the root; its own modules make runs as those of any unit."""
    by_unit: dict[str, list[Weight]] = {"": []}
    for weight in weights:
        by_unit.setdefault(weight.unit, []).append(weight)
    names = sorted(by_unit, key=len, reverse=True)

    def unit_of(stage: Stage) -> str:
        return next(name for name in names if _lies_in(stage.module, name))

    for name in [n for n in by_unit if n and not any(_lies_in(stage.module, n) for stage in stages)]:
        by_unit[""] += by_unit.pop(name)  # nobody knows when it runs
        names.remove(name)
    units = {}
    for name, own in by_unit.items():
        inside = [stage for stage in stages if name and _lies_in(stage.module, name)]
        outermost = bool(name) and not any(o and o != name and _lies_in(name, o) for o in names)
        entering = inside[0].entering if inside else 0
        units[name] = _Unit(name, own, sum(stage.kept for stage in inside), entering, outermost)
    parts = [(name, list(run)) for name, run in groupby(stages, unit_of)]
    order = [name for name, _ in parts]
    first = {name: order.index(name) for name in order}
    last = {name: at for at, name in enumerate(order)}
    runs = [_Run(units[n], run, first[n] == at, last[n] == at) for at, (n, run) in enumerate(parts)]
    return runs, units[""]


def _lies_in(name: str, unit: str) -> bool:
    """Whether a module is a unit, or lies in it."""
    return not unit or name == unit or name.startswith(f"{unit}.")


def _forward(memory: _Memory, runs: Iterable[_Run], root: _Unit, job: Job) -> None:
    """All units' forwards; the root's weights are gathered for all of it."""
    _gather(memory, root)
    memory.look("the beginning of forward")
    for run in runs:
        unit = run.unit
        if unit.name and run.first:
            _gather(memory, unit)
        for stage in run.stages:
            memory.now["activations"] += stage.kept
        memory.look(f"forward of {unit.label}")
        if unit.name and run.last:
            if job.recompute and unit.is_outermost:
                memory.now["activations"] -= unit.kept - unit.entering
            if not unit.keeps:
                _release(memory, unit, "gathered")
    memory.now["buffers of gathers"] = 0
    if not root.keeps:
        _release(memory, root, "gathered")


def _gather(memory: _Memory, unit: _Unit) -> None:
    """Gather a unit for its forward: first into a buffer, beside that of the unit before."""
    buffer = unit.buffer("gathered")
    memory.look(f"the gather of {unit.label}", the_next_buffer=buffer)
    memory.now["buffers of gathers"] = buffer
    _install(memory, unit, "gathered")


def _install(memory: _Memory, unit: _Unit, gathered: str) -> None:
    """Take gathered weights into memory: ``"gathered"`` for forward, ``"gathered_again"`` for backward."""
    derived = "derived_early" if gathered == "gathered" else "derived"
    memory.now["gathered weights"] += sums(unit.weights, gathered)
    memory.now["transposes of gathered weights"] += sums(unit.weights, derived)


def _release(memory: _Memory, unit: _Unit, gathered: str, *, transposes: bool = True) -> None:
    """Release them; in backward transposes have gone already, with their modules."""
    memory.now["gathered weights"] -= sums(unit.weights, gathered)
    memory.now["transposes of gathered weights"] -= transposes * sums(unit.weights, "derived_early")


def _backward(memory: _Memory, runs: Sequence[_Run], root: _Unit, job: Job) -> None:
    """All units' backwards, the last one first. The root's gradients are reduced at the end of all."""
    by_module: dict[str, list[Weight]] = {stage.module: [] for run in runs for stage in run.stages}
    order = [run.unit for run in reversed(runs) if run.last and run.unit.name]
    for weight in (weight for unit in (root, *order) for weight in unit.weights):
        by_module.setdefault(weight.module, []).append(weight)
    staged = {stage.module for run in runs for stage in run.stages}

    def begin(unit: _Unit) -> None:
        if not unit.keeps:
            _install(memory, unit, "gathered_again")
        # Of modules of which nothing is known, gradients are there from the beginning.
        alone = [weight for weight in unit.weights if weight.module not in staged]
        memory.now["unreduced gradients"] += _new(alone, job)

    begin(root)
    for run in reversed(runs):
        unit = run.unit
        if unit.name and run.last:
            begin(unit)
            ahead = [one for one in order[order.index(unit) + 1 :][:1] if one.gathers and not one.keeps]
            memory.now["buffers of gathers"] = sum(one.buffer("gathered_again") for one in ahead)
            if job.recompute and unit.is_outermost:
                memory.now["activations"] += unit.kept - unit.entering
        for stage in reversed(run.stages):
            _stage_backward(memory, stage, by_module[stage.module], job)
        if unit.name and run.first:
            _reduce(memory, unit, job)
    _reduce(memory, root, job)


def _stage_backward(memory: _Memory, stage: Stage, weights: Sequence[Weight], job: Job) -> None:
    """The backward of one module."""
    for moment in stage.moments:
        gradients = [w for w in weights if moment.gradients is None or w.name in moment.gradients]
        derived = [w for w in weights if moment.derived is None or w.name in moment.derived]
        # Transposes go one by one; the moments of a module come in that order.
        gone = sums(weights, "derived") - sums(derived, "derived") if moment.gradients is None else 0
        memory.look(
            f"backward of {stage.module or 'the loss'}",
            temporaries_of_the_module=moment.temporary + sums(derived, "copied"),
            unreduced_gradients=sums(gradients, "unreduced"),
            transposes_of_gathered_weights=-gone,
        )
    memory.now["activations"] -= stage.kept
    memory.now["unreduced gradients"] += _new(weights, job)
    memory.now["transposes of gathered weights"] -= sums(weights, "derived")


def _reduce(memory: _Memory, unit: _Unit, job: Job) -> None:
    """The end of a unit's backward: its weights are released, its gradients reduced through a buffer."""
    # What other microbatches have left takes it up.
    adds = job.microbatches > 1 and any(weight.storage.reduce == "each" for weight in unit.weights)
    for weight in (weight for weight in unit.weights if weight.is_passed):
        # One after the other, before anything is released: cast, unless it is there in its dtype already.
        gone = _new([weight], job) + _adding_up(weight, job)
        new = 0 if weight.gradient in (weight.unreduced, _adding_up(weight, job)) else weight.gradient
        memory.look(f"the reduction of {unit.label}", reduced_gradients=new)
        memory.now["unreduced gradients"] -= gone
        memory.now["reduced gradients"] += 0 if adds else weight.gradient
    _release(memory, unit, "gathered" if unit.keeps else "gathered_again", transposes=False)
    rest = [weight for weight in unit.weights if not weight.is_passed]
    gradient = sums(rest, "gradient")
    memory.now["buffers of reductions"] = _reduction(unit)
    # Gradients are gone when what becomes of them is made; what stays whole is not FSDP2's.
    whole = sum(weight.gradient for weight in rest if weight.storage.is_whole)
    memory.look(f"the reduction of {unit.label}", reduced_gradients=whole)
    memory.now["unreduced gradients"] -= _new(rest, job) + sum(_adding_up(weight, job) for weight in rest)
    memory.look(f"the reduction of {unit.label}", reduced_gradients=gradient)
    memory.now["reduced gradients"] += 0 if adds else gradient
