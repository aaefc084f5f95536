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
    from te_fsdp.planning.activations import Moment, Stage
    from te_fsdp.planning.job import Job
    from te_fsdp.planning.weights import Weight

__all__ = ["Peak", "peak_of"]

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
    """One unit: its weights, and the stages of its modules in the order of forward."""

    name: str
    weights: Sequence[Weight]
    stages: Sequence[Stage]

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
        return any(weight.whole > weight.elements and weight.gathered for weight in self.weights)


def peak_of(weights: Sequence[Weight], stages: Sequence[Stage], held: Mapping[str, int], job: Job) -> Peak:
    """The highest point of a settled step on the first rank. Local operation.

    Args:
        weights: All weights of the rank.
        stages: All stages of a microbatch, in the order of forward.
        held: What lies in memory all the time: words -> bytes.
        job: How the model is trained.
    """
    units, root = _units(weights, stages)
    memory = _Memory(Counter(held))
    memory.now["workspaces"] = _WORKSPACES
    if job.microbatches > 1:
        # The last microbatch begins with what the others have added up.
        for weight in weights:
            kind = "reduced gradients" if weight.storage.reduce == "each" else "unreduced gradients"
            memory.now[kind] += weight.gradient if weight.storage.reduce == "each" else _adding_up(weight)
    _forward(memory, units, root, job)
    _backward(memory, units, root, job)
    memory.now = Counter({**held, "workspaces": _WORKSPACES})
    memory.now["reduced gradients"] = sums(weights, "gradient")
    memory.look("the optimizer's step", temporaries_of_the_optimizer=temporary_in_step(weights, job))
    parts = {name: size for name, size in memory.best.most_common() if size}
    return Peak(memory.when, parts)


def _adding_up(weight: Weight) -> int:
    """Bytes of a gradient that adds up unreduced: whole, in the dtype of the reduced one."""
    return weight.gradient * weight.whole // max(weight.elements, 1)


def _units(weights: Sequence[Weight], stages: Sequence[Stage]) -> tuple[list[_Unit], _Unit]:
    """Units in the order of forward, and the root's own weights; its stages stand among the others."""
    by_unit: dict[str, list[Weight]] = {}
    names = sorted({weight.unit for weight in weights} - {""}, key=len, reverse=True)
    for weight in weights:
        by_unit.setdefault(weight.unit, []).append(weight)

    def unit_of(stage: Stage) -> str:
        inside = (name for name in names if stage.module == name or stage.module.startswith(f"{name}."))
        return next(inside, "")

    runs = [(name, list(run)) for name, run in groupby(stages, unit_of)]
    return [_Unit(name, by_unit.get(name, []) if name else [], run) for name, run in runs], _Unit(
        "", by_unit.get("", []), []
    )


def _forward(memory: _Memory, units: Iterable[_Unit], root: _Unit, job: Job) -> None:
    """All units' forwards; the root's weights are gathered for all of it."""
    _gather(memory, root)
    memory.look("the beginning of forward")
    for unit in units:
        if unit.weights:
            _gather(memory, unit)
        for stage in unit.stages:
            memory.now["activations"] += stage.kept
        memory.look(f"forward of {unit.label}")
        if job.recompute and unit.weights:
            memory.now["activations"] -= _recomputed(unit)
        if not unit.keeps:
            _release(memory, unit)
    memory.now["buffers of gathers"] = 0
    if not root.keeps:
        _release(memory, root)


def _gather(memory: _Memory, unit: _Unit) -> None:
    """Gather a unit for its forward: first into a buffer, beside that of the unit before."""
    size = sums(unit.weights, "gathered")
    buffer = size if unit.gathers else 0
    memory.look(f"the gather of {unit.label}", the_next_buffer=buffer)
    memory.now["buffers of gathers"] = buffer
    if unit.gathers:
        memory.now["gathered weights"] += size
        memory.now["transposes of gathered weights"] += sums(unit.weights, "derived")


def _release(memory: _Memory, unit: _Unit) -> None:
    """Release the weights of a unit after its forward."""
    if unit.gathers:
        memory.now["gathered weights"] -= sums(unit.weights, "gathered")
        memory.now["transposes of gathered weights"] -= sums(unit.weights, "derived")


def _recomputed(unit: _Unit) -> int:
    """Bytes that a unit's forward leaves out if it is run again: all but what enters the unit."""
    return sum(stage.kept for stage in unit.stages) - (unit.stages[0].entering if unit.stages else 0)


def _backward(memory: _Memory, units: Sequence[_Unit], root: _Unit, job: Job) -> None:
    """All units' backwards, the last one first. The root's gradients are reduced at the end of all."""
    _gather_again(memory, root)
    of_root = {weight.module: weight for weight in root.weights}
    inner = [unit for unit in units if unit.weights]
    for unit in reversed(units):
        buffer = 0
        if unit.weights:
            _gather_again(memory, unit)
            at = inner.index(unit)
            before = inner[at - 1] if at else None
            if before is not None and before.gathers and not before.keeps:
                buffer = sums(before.weights, "gathered_again")
            if job.recompute:
                memory.now["activations"] += _recomputed(unit)
        memory.now["buffers of gathers"] = buffer
        for stage in reversed(unit.stages):
            own = [weight for weight in unit.weights if weight.module == stage.module]
            own += [of_root[stage.module]] if stage.module in of_root and not unit.weights else []
            for moment in stage.moments:
                _look(memory, moment, own, f"backward of {stage.module or 'the loss'}")
            memory.now["activations"] -= stage.kept
            memory.now["unreduced gradients"] += sums(own, "unreduced")
            memory.now["transposes of gathered weights"] -= sums(own, "derived")
        if unit.weights:
            _reduce(memory, unit)
    _reduce(memory, root)


def _gather_again(memory: _Memory, unit: _Unit) -> None:
    """Gather a unit for its backward, unless its weights were kept."""
    if unit.gathers and not unit.keeps:
        memory.now["gathered weights"] += sums(unit.weights, "gathered_again")
        memory.now["transposes of gathered weights"] += sums(unit.weights, "derived")


def _look(memory: _Memory, moment: Moment, weights: Sequence[Weight], when: str) -> None:
    """One moment of a module's backward."""
    gradients = [w for w in weights if moment.gradients is None or w.name in moment.gradients]
    copied = [w for w in weights if moment.derived is None or w.name in moment.derived]
    # Transposes go one by one; the moments of a module come in that order.
    gone = sums(weights, "derived") - sums(copied, "derived") if moment.gradients is None else 0
    memory.look(
        when,
        temporaries_of_the_module=moment.temporary + sums(copied, "copied"),
        unreduced_gradients=sums(gradients, "unreduced"),
        transposes_of_gathered_weights=-gone,
    )


def _reduce(memory: _Memory, unit: _Unit) -> None:
    """The end of a unit's backward: its weights are released, its gradients reduced through a buffer."""
    unreduced, gradient = sums(unit.weights, "unreduced", "gradient")
    if unit.gathers:
        memory.now["gathered weights"] -= sums(
            unit.weights, "gathered_again" if not unit.keeps else "gathered"
        )
    whole = all(weight.storage.is_whole for weight in unit.weights)
    buffer = 0 if whole else sums(unit.weights, "reduction")
    memory.now["buffers of reductions"] = buffer
    memory.look(f"the reduction of {unit.label}", reduced_gradients=gradient)
    memory.now["unreduced gradients"] -= unreduced
    memory.now["reduced gradients"] += gradient
