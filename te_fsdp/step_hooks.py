"""What te_fsdp does around ``optimizer.step()``: one hook before every step and one after it, each running a list.

    bound models      ``BEFORE_STEP`` and ``AFTER_STEP`` of ``modules/apply.py``
    sharded models    those of ``sharding/steps.py``, which have the same and more

torch calls hooks in the order in which they were registered: in which a process first needed them. These lists have one
order, which docs/internals.md prints. Their functions look at the parameters that te_fsdp has marked
(:class:`te_fsdp.parameters.Facts`), so that optimizers of other models in the process see no change.

**Parameters that every tensor-parallel rank holds whole** are kept equal to the bit here. Without sequence
parallelism each tp rank computes the whole gradient of norms, row-parallel biases and foreign modules from the same
numbers. On a GPU the results are not always the same: some kernels add in whatever order their blocks finish
(measured on an H200: torch's embedding backward in fp32 gave 200 results in 200 runs; row-parallel biases of TE
drifted apart within two steps). The difference is rounding, but the copies never meet again, and a checkpoint could
hold one of them only.

Before every optimizer step the ranks therefore take over the gradients of the first tp rank: one broadcast of all
small ones together, after FSDP2 has reduced and cut them. Optimizers work element by element, so that parameters and
states stay equal.

**Steps of optimizers that hold parameters which binding, sharding or initialising has replaced** would be lost:

    optimizer built before    holds                          the model has, and gradients go to
    set_device_mesh           plain parameters               DTensors on tp
    fully_shard               plain ones, or DTensors on tp  FSDP2's shards
    materialize               shards on meta                 shards on the device

Whatever replaces a parameter leaves a mark on the old object, which lives exactly as long as somebody still holds it.
Before each step of an optimizer :func:`refuse_replaced` looks for marks.

**So would those of an optimizer that was copied, or pickled, without its model**: its parameters are copies. Copies of
DTensors are marked, pickles leave an empty mark, copies of plain parameters none: those are recognised by the
optimizer, whose constructor did not run, and by a model that has parameters like them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from te_fsdp import _torch
from te_fsdp.errors import OrderError
from te_fsdp.move.start import broadcast
from te_fsdp.parameters import COPIED, KEY, Facts, facts_of, label_of, noted

if TYPE_CHECKING:
    import torch.distributed as dist
    from torch.optim import Optimizer


def held_by(optimizer: Optimizer) -> list[tuple[torch.Tensor, Facts]]:
    """The parameters of an optimizer that te_fsdp has marked, each with its record. Local operation."""
    found = []
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            facts = parameter.__dict__.get(KEY)
            if facts:
                found.append((parameter, facts))
    return found


class Step:
    """A step of an optimizer, before or after it, as the functions of the lists see it.

    Attributes:
        optimizer: Whose step it is.
        where: ``"AdamW.step"``, for messages.
        closure: What it was given to run forward and backward within the step, or ``None``. Before a step another may
            be put in its place.
    """

    def __init__(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self.optimizer = optimizer
        self.where = f"{type(optimizer).__name__}.step"
        self.closure = kwargs.get("closure") or next(filter(callable, args[1:]), None)

    @functools.cached_property
    def held(self) -> list[tuple[torch.Tensor, Facts]]:
        """:func:`held_by` the optimizer, from the first look on."""
        return held_by(self.optimizer)

    @property
    def names(self) -> dict[int, str]:
        """``id`` -> name of every parameter of the sharded models, for errors."""
        return {id(p): name for state, _ in self.models for name, p in state.parameters().items()}

    @functools.cached_property
    def models(self) -> list[tuple[Any, list[torch.Tensor]]]:
        """State of each sharded model that the optimizer works on (``ShardingState``), and its parameters here."""
        found: dict[int, tuple[Any, list[torch.Tensor]]] = {}
        for parameter, facts in self.held:
            state = facts.state() if facts.state is not None else None
            if state is not None:
                found.setdefault(id(state), (state, []))[1].append(parameter)
        return list(found.values())


StepFunctions: TypeAlias = tuple[Callable[[Step], None], ...]


class _Lists:
    """The two lists of this process."""

    before: StepFunctions = ()
    after: StepFunctions = ()

    def __init__(self) -> None:
        #: Copied optimizers whose parameters modules have.
        self.right_copies: weakref.WeakSet[Optimizer] = weakref.WeakSet()

    def before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        """The hook before every step; gives torch the arguments if a closure has another one in its place."""
        step = Step(optimizer, args, kwargs)
        given = step.closure
        for function in self.before:
            function(step)
        if step.closure is given:
            return None
        exchanged = {id(given): step.closure}
        args = tuple(exchanged.get(id(value), value) for value in args)
        return args, {key: exchanged.get(id(value), value) for key, value in kwargs.items()}

    def after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """The hook after every step."""
        step = Step(optimizer, args, kwargs)
        for function in self.after:
            function(step)


@functools.cache
def _lists() -> _Lists:
    """Registered when the first model is bound; hooks of all optimizers belong to the process, and so do the lists."""
    lists = _Lists()
    register_optimizer_step_pre_hook(lists.before_step)
    register_optimizer_step_post_hook(lists.after_step)
    return lists


def run_around_steps(before: StepFunctions, after: StepFunctions) -> None:
    """Run these around every optimizer step from now on. Of lists that hold one another the longer stays.

    Args:
        before: Run before each step, in this order.
        after: Run after each step, in this order.
    """
    lists = _lists()
    if len(before) + len(after) > len(lists.before) + len(lists.after):
        lists.before, lists.after = before, after


def sync_tp_replicas(step: Step) -> None:
    """Replace gradients of parameters that each tp rank holds whole by the first tp rank's.

    Collective over tp as :func:`take_over_gradients`. Parameters whose optimizer state is cut over further axes are
    left to the optimizer's own hook: they are averaged there before.
    """
    take_over_gradients([p for p, facts in step.held if facts.tp_replica and facts.main_parameters is None])


@torch.no_grad()
def take_over_gradients(
    parameters: Iterable[torch.Tensor], main_parameters: Mapping[int, torch.Tensor] | None = None
) -> None:
    """Replace the gradients of tp-replicated parameters by those of the first tp rank, in place.

    Collective over tp where there are such gradients: one broadcast per dtype, and one for each large tensor.
    Looks only at parameters that te_fsdp has bound; shapes are those of this rank's shards.

    Args:
        parameters: In the same order, and with gradients for the same ones, on all tp ranks.
        main_parameters: ``id`` of a parameter -> the tensor that has its gradient, if not itself.
    """
    found: dict[dist.ProcessGroup, list[torch.Tensor]] = {}
    for parameter in parameters:
        facts = parameter.__dict__.get(KEY)
        if not facts or not facts.tp_replica or not isinstance(parameter, DTensor):
            continue
        holder: Any = main_parameters[id(parameter)] if main_parameters is not None else parameter
        mesh = holder.device_mesh
        for gradient in (holder.grad, getattr(holder, "decoupled_grad", None)):
            if gradient is not None and mesh.size(mesh.ndim - 1) > 1:
                # FSDP2 puts its axes before the one that was there.
                found.setdefault(mesh.get_group(mesh.ndim - 1), []).append(_torch.local_of(gradient))
    for group, gradients in found.items():
        broadcast(gradients, group)


@contextlib.contextmanager
def replacing(model: nn.Module, by: str, *, prefix: str = "") -> Iterator[None]:
    """Mark the parameters that ``model`` has before the context and no longer has after it. Local operation.

    Args:
        model: The root of what is changed.
        by: The call that replaces them, for the message.
        prefix: Name of ``model`` in the user's tree.
    """
    before = list(model.named_parameters(prefix=prefix))
    try:
        yield
    finally:
        now = {id(parameter) for parameter in model.parameters()}
        for name, parameter in before:
            if id(parameter) not in now:
                note_replaced(parameter, name, by)


def note_replaced(parameter: torch.Tensor, name: str, by: str) -> None:
    """Mark a parameter that a module has lost. Local operation."""
    # On a record of this object's own: a gathered parameter shares its shard's, which stays. Of calls within each other
    # the outermost, the user's own, marks last.
    parameter.__dict__[KEY] = dataclasses.replace(facts_of(parameter) or Facts(), replaced=(name, by))


def refuse_replaced(step: Step) -> None:
    """Raise for parameters that no module has any longer, or that are copies which none ever had.

    Raises:
        OrderError: Names the first of them, and the call that replaced it.
    """
    marked = {id(parameter): parameter for parameter, facts in step.held if facts.replaced}
    is_copy = _torch.is_copy(step.optimizer) and step.optimizer not in _lists().right_copies
    if not marked and not is_copy:
        return
    unmarked = _unmarked(step.optimizer) if is_copy else {}
    # Another model may share a parameter with the one that lost it, or be a copy as well: a step for that one is right.
    wanted = {*marked, *unmarked}
    for owner, name in registered_at(wanted):
        key = id(owner._parameters[name])
        wanted.discard(key)
        unmarked.pop(key, None)
        if key in marked:
            noted(marked.pop(key)).replaced = None
    marked |= _like_ours(unmarked)
    if not marked:
        if is_copy:
            _lists().right_copies.add(step.optimizer)
        return
    name, by = _named(next(iter(marked.values())))
    count = sum(len(group["params"]) for group in step.optimizer.param_groups)
    more = f", and {len(marked) - 1} more of its {count}" if len(marked) > 1 else ""
    got = f"one from before {by}, which has replaced it"
    whose = "new"
    fix = "build the optimizer after te_fsdp.fully_shard and te_fsdp.materialize, from model.parameters()"
    if by == COPIED:
        got, whose = "a copy, as copy.deepcopy or a pickle of an optimizer makes them", "model's"
        fix = "build another optimizer from model.parameters(), and let it load_state_dict(optimizer.state_dict())"
    raise OrderError(
        f"{step.where}: {name}{more}",
        expected="parameters that the model has now",
        got=got,
        why=f"Gradients go to the {whose} parameter: the step would change nothing",
        fix=fix,
    )


def _unmarked(optimizer: Optimizer) -> dict[int, torch.Tensor]:
    """``id`` -> parameters of an optimizer that carry no record, or what a pickle leaves of one."""
    held = (parameter for group in optimizer.param_groups for parameter in group["params"])
    return {id(parameter): parameter for parameter in held if not parameter.__dict__.get(KEY)}


def _like_ours(unmarked: dict[int, torch.Tensor]) -> dict[int, torch.Tensor]:
    """All, if they are copies of sharded models' parameters: with what a pickle leaves, or each like one of theirs."""
    ours = _ours() if unmarked else {}
    return unmarked if all(KEY in p.__dict__ or _kind(p) in ours for p in unmarked.values()) else {}


def _kind(parameter: torch.Tensor) -> tuple[Any, ...]:
    return isinstance(parameter, DTensor), tuple(parameter.shape), parameter.dtype


def _ours() -> dict[tuple[Any, ...], str]:
    """Kind -> name of a parameter of each kind that the sharded models of this process have. For errors alone."""
    states: dict[int, Any] = {}
    for candidate in gc.get_objects():
        if issubclass(type(candidate), nn.Module):
            for parameter in candidate.__dict__.get("_parameters", {}).values():
                facts = None if parameter is None else facts_of(parameter)
                state = facts.state() if facts is not None and facts.state is not None else None
                if state is not None:
                    states[id(state)] = state
    found: dict[tuple[Any, ...], str] = {}
    for state in states.values():
        for name, parameter in state.parameters().items():
            found.setdefault(_kind(parameter), name)
    return found


def _named(parameter: torch.Tensor) -> tuple[str, str]:
    """Name and cause of a parameter that no module has; of a copy the name of what was copied, or of one like it."""
    facts = facts_of(parameter)
    if facts is not None and facts.replaced is not None and facts.replaced[1] != COPIED:
        return facts.replaced
    original = facts.copy_of() if facts is not None and facts.copy_of is not None else None
    state = original.state() if original is not None and original.state is not None else None
    names = state.parameters() if state is not None else {}
    name = next((name for name, own in names.items() if facts_of(own) is original), None)
    return name or _ours().get(_kind(parameter)) or label_of(parameter), COPIED


def registered_at(parameters: Collection[int]) -> Iterator[tuple[nn.Module, str]]:
    """Every module of this process that has a parameter, and its name there: parameters do not know their owners.

    Local operation. Looks at all objects that the garbage collector knows: for setup and errors alone.

    Args:
        parameters: By ``id``; what is removed from it meanwhile is not looked for any longer.
    """
    for candidate in gc.get_objects():
        # By its type: proxies of all kinds answer isinstance with side effects.
        if issubclass(type(candidate), nn.Module):
            for name, parameter in candidate.__dict__.get("_parameters", {}).items():
                if id(parameter) in parameters:
                    yield candidate, name


# ---------------------------------------------------------------------------- gradients of an optimizer's parameters


def gradient_of(parameter: torch.Tensor) -> torch.Tensor | None:
    """A parameter's own gradient: the decoupled one of another dtype where there is one, else ``grad``."""
    decoupled = getattr(parameter, "decoupled_grad", None)
    return decoupled if decoupled is not None else parameter.grad


def gradients_of(parameters: Iterable[torch.Tensor]) -> list[torch.Tensor | None]:
    """:func:`gradient_of` several at once: every step asks twice for all parameters."""
    found = []
    for parameter in parameters:
        decoupled = getattr(parameter, "decoupled_grad", None)
        found.append(parameter.grad if decoupled is None else decoupled)
    return found


def give_gradients(mains: Iterable[torch.Tensor], gradients: Iterable[torch.Tensor | None]) -> None:
    """Set the gradient of each main parameter under both names that optimizers read."""
    for main, gradient in zip(mains, gradients, strict=True):
        main.grad = main.decoupled_grad = gradient  # type: ignore[missing-attribute]


def zero_gradient(parameter: torch.Tensor) -> torch.Tensor:
    """Give a parameter without gradient one of zeros. Local operation."""
    local = _torch.local_of(parameter)
    dtype = getattr(parameter, "grad_dtype", None) or parameter.dtype
    zeros = _torch.placed_like(torch.zeros(local.shape, dtype=dtype, device=local.device), parameter)
    parameter.grad = zeros
    return zeros


class Seen(NamedTuple):
    """A gradient at some time, to tell later whether it is still what it was then.

    Attributes:
        gradient: The gradient, if it lives.
        version: How often it had been written to in place.
    """

    gradient: weakref.ref[torch.Tensor]
    version: int

    @classmethod
    def now(cls, gradients: Sequence[torch.Tensor | None]) -> list[Seen | None]:
        """Several as they are now. Local operation."""
        together = zip(gradients, _torch.versions_of(gradients), strict=True)
        return [
            None if gradient is None else cls(weakref.ref(gradient), version)
            for gradient, version in together
        ]

    @staticmethod
    def are_same(seen: Sequence[Seen | None], gradients: Sequence[torch.Tensor | None]) -> list[bool]:
        """Whether gradients are those that were seen, unchanged; where none was seen, whether there is none. Local."""
        together = zip(seen, gradients, _torch.versions_of(gradients), strict=True)
        return [
            gradient is None if one is None else one.gradient() is gradient and one.version == version
            for one, gradient, version in together
        ]
