"""What te_fsdp does around ``optimizer.step()``: one hook before every step and one after it, each running a list.

    bound models      ``BEFORE_STEP`` and ``AFTER_STEP`` of ``bind_device_mesh.py``
    sharded models    those of ``optimizer_step.py``, which have the same and more

torch calls hooks in the order in which they were registered: in which a process first needed them. These lists have one
order, which docs/internals.md prints. Their functions look at the parameters that te_fsdp has marked
(:class:`te_fsdp.records.ParameterRecord`), so that optimizers of other models in the process see no change.

**Parameters that every tensor-parallel rank holds whole** are kept equal to the bit here. Without sequence
parallelism each tp rank computes the whole gradient of norms, row-parallel biases and foreign modules from the same
numbers. On a GPU the results are not always the same: some kernels add in whatever order their blocks finish
(measured on an H200: torch's embedding backward in fp32 gave 200 results in 200 runs; row-parallel biases of TE
drifted apart within two steps). The difference is rounding, but the copies never meet again, and a checkpoint could
hold one of them only. So before every step the ranks take over the gradients of the first tp rank, after FSDP2 has
reduced and cut them. Optimizers work element by element, so that parameters and states stay equal.

Where a parameter is marked ``sequence_parallel = True``, each rank computes a part, and all parts are added up. A layer
that sequence parallelism feeds some of the tokens, and that nobody has marked, would learn from those of the first rank
alone; one that is marked and sees all tokens, from ``tp`` times its gradient. So gradients are compared over ``tp``:
whole ones before a parameter's first two steps, parts where they come to be, in a first backward. Two, since layers
that begin at zero give some gradients of zero at first.

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
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from te_fsdp.collectives.agreement import raised_on_all_ranks
from te_fsdp.collectives.redistribute import broadcast
from te_fsdp.collectives.rendezvous import is_capturing, is_simulated
from te_fsdp.errors import GradientError, OrderError, shorten
from te_fsdp.records import (
    COPIED,
    KEY,
    ModuleBinding,
    ParameterRecord,
    binding_of,
    get_or_create_record,
    get_record,
    label_of,
)
from te_fsdp.upstream import te as _te, torch_dtensor as _torch

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.optim import Optimizer


# In how many steps gradients of a parameter are compared.
_STEPS = 2
# How far gradients of one parameter may lie apart over tp, in parts of their norm. Kernels that add in another order
# change bf16 values by a unit in the last place, 1/256; sums in bf16 over hundreds of ranks by 1/40. Other tokens give
# gradients that have less in common, but for batches of very many: the norm of the noise to that of the mean.
_APART = 1 / 16
# Four bits, rounded at random as each rank draws: 1/5.
_APART_IN_4_BITS = 1 / 2
# Parts of one gradient that lie nearer than this, in parts of their norm, are one gradient, rounded otherwise.
_SAME = 1 / 128


def parameters_of_optimizer(optimizer: Optimizer) -> list[tuple[torch.Tensor, ParameterRecord]]:
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
        where: ``"AdamW.step"``, for messages.
        closure: What it was given to run forward and backward within the step, or ``None``. Before a step another may
            be put in its place.
    """

    def __init__(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self.optimizer = optimizer
        self.where = f"{type(optimizer).__name__}.step"
        self.closure = kwargs.get("closure") or next(filter(callable, args[1:]), None)

    @functools.cached_property
    def held(self) -> list[tuple[torch.Tensor, ParameterRecord]]:
        """:func:`parameters_of_optimizer` the optimizer, from the first look on."""
        return parameters_of_optimizer(self.optimizer)

    @property
    def names(self) -> dict[int, str]:
        """``id`` -> name of every parameter of the sharded models, for errors."""
        return {id(p): name for state, _ in self.models for name, p in state.parameters().items()}

    @functools.cached_property
    def models(self) -> list[tuple[Any, list[torch.Tensor]]]:
        """State of each sharded model that the optimizer works on (``ShardedModel``), and its parameters here."""
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


def register_step_functions(before: StepFunctions, after: StepFunctions) -> None:
    """Run these around every optimizer step from now on, in order. Of lists that hold one another the longer stays."""
    lists = _lists()
    if len(before) + len(after) > len(lists.before) + len(lists.after):
        lists.before, lists.after = before, after


def sync_tp_replicas(step: Step) -> None:
    """Replace gradients of parameters that each tp rank holds whole by the first tp rank's.

    Collective over tp. Parameters whose optimizer state is cut over further axes are left to the optimizer's own hook:
    they are averaged there before.
    """
    broadcast_tp_gradients(
        [p for p, facts in step.held if facts.tp_replica and facts.main_parameters is None]
    )


@torch.no_grad()
def broadcast_tp_gradients(
    parameters: Iterable[torch.Tensor], main_parameters: Mapping[int, torch.Tensor] | None = None
) -> None:
    """Replace the gradients of tp-replicated parameters by those of the first tp rank, in place.

    Collective over tp where there are such gradients: one broadcast per dtype, and one for each large tensor.
    Parameters that te_fsdp has not bound are passed over; the others have gradients for the same ones, in one order,
    on all tp ranks. ``main_parameters``: ``id`` of a parameter -> the tensor that has its gradient, if not itself.
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


def schedule_gradient_checks(model: nn.Module, wanted: bool) -> None:
    """Let gradients of what each rank of tp holds whole be looked at in the first steps, or no longer. Local."""
    for binding in filter(None, map(binding_of, model.modules())):
        binding.grad_checks_left.clear()
        if wanted and binding.tp_mesh is not None and binding.tp_mesh.size() > 1:
            # Of a loss that is a plain sum the gradient of a bias is the number of tokens.
            marked = [
                name for name, rule in binding.rules.items() if rule.partial_grad and "bias" not in name
            ]
            binding.grad_checks_left.update(dict.fromkeys(marked, _STEPS))
    for parameter in model.parameters():
        facts = get_record(parameter)
        if facts is not None and facts.tp_replica:
            facts.grad_checks_left = _STEPS if wanted else 0


@torch.no_grad()
def refuse_same_gradient(binding: ModuleBinding, name: str, gradient: torch.Tensor) -> None:
    """Look at this rank's part of a sum over tp, in the first backward in which it is not zero. Collective then.

    Raises ``GradientError`` where all ranks of tp have computed the same.
    """
    if name not in binding.grad_checks_left or is_simulated() or is_capturing():
        return
    assert binding.tp_mesh is not None
    ((_, ratio),) = _tp_gradient_deviation(binding.tp_mesh, [(gradient, gradient)])
    if ratio < _SAME:
        raise GradientError(
            f"{binding.label(name)}: gradients that are the same over tp",
            expected="another part of the gradient on each rank, of a parameter that is marked sequence_parallel",
            got="the same on all ranks of a tp group",
            why="They are added up: the parameter would learn from a multiple of its gradient",
            fix="leave the mark off layers that see all tokens on each rank (sequence_parallel=False), or cut the "
            "sequence before them. Where gradients shall be the same, pass check_inputs=False to fully_shard or "
            "set_device_mesh",
        )
    binding.grad_checks_left[name] -= 1
    if ratio >= _SAME or not binding.grad_checks_left[name]:
        del binding.grad_checks_left[name]


def require_equal_gradients(step: Step) -> None:
    """Compare the gradients of what every rank of tp holds whole, in the first steps of each parameter.

    Collective then: a broadcast of each such gradient over tp, and two numbers for each over its mesh.

    Raises:
        GradientError: They differ by more than rounding, on all ranks of the model. They are as they were.
    """
    looked = [
        (parameter, facts)
        for parameter, facts in step.held
        if facts.grad_checks_left and parameter.requires_grad
    ]
    if not looked or is_simulated() or is_capturing():
        return
    found: dict[DeviceMesh, list[tuple[torch.Tensor, torch.Tensor]]] = {}
    for parameter, _ in looked:
        gradient = gradient_of(parameter)
        if gradient is not None and isinstance(parameter, DTensor):
            found.setdefault(parameter.device_mesh, []).append((parameter, _torch.local_of(gradient)))
    recipes = [recipe for state, _ in step.models for recipe in _te.recipes_in_use(state.model)]
    in_4_bits = any("NVFP4" in recipe or "Custom" in recipe for recipe in recipes)
    with raised_on_all_ranks(step.models[0][0].meshes.device_mesh if step.models else None, step.where):
        apart = [entry for mesh, held in found.items() for entry in _tp_gradient_deviation(mesh, held)]
        limit = _APART_IN_4_BITS if in_4_bits else _APART
        _refuse_tp_deviation(step, [(parameter, ratio) for parameter, ratio in apart if ratio > limit])
    for _, facts in looked:
        facts.grad_checks_left -= 1


@torch.no_grad()
def _tp_gradient_deviation(
    mesh: DeviceMesh, held: list[tuple[torch.Tensor, torch.Tensor]]
) -> list[tuple[torch.Tensor, float]]:
    """How far the gradients lie from those of the first tp rank, in parts of their norm. Collective over ``mesh``.

    ``held`` are parameters, with the local tensors of their gradients; tp is the last axis. The same numbers on all
    ranks: NaN without a gradient but zero, and with NaN in one.
    """
    group = mesh.get_group(mesh.ndim - 1)
    if group.size() == 1:
        return []
    sums = torch.zeros((len(held), 2), dtype=torch.float64, device=held[0][1].device)
    for row, (_, gradient) in zip(sums, held, strict=True):
        first = gradient.clone(memory_format=torch.contiguous_format)
        dist.broadcast(first, group=group, group_src=0)
        row[0] = torch.linalg.vector_norm(gradient - first, dtype=torch.float64).square()
        row[1] = torch.linalg.vector_norm(first, dtype=torch.float64).square()
    for axis in range(mesh.ndim):
        dist.all_reduce(sums, group=mesh.get_group(axis))
    # All ranks but the first differ from it; all have its norm.
    ratios = (sums[:, 0] / (group.size() - 1) / (sums[:, 1] / group.size())).sqrt().tolist()
    return [(parameter, ratio) for (parameter, _), ratio in zip(held, ratios, strict=True)]


def _refuse_tp_deviation(step: Step, apart: list[tuple[torch.Tensor, float]]) -> None:
    if not apart:
        return
    names = step.names
    for owner, name in registered_at({id(parameter) for parameter, _ in apart} - names.keys()):
        binding = binding_of(owner)
        names[id(owner._parameters[name])] = name if binding is None else binding.label(name)
    told = [
        f"{names.get(id(parameter), 'a parameter')} by {ratio:.0%} of its norm" for parameter, ratio in apart
    ]
    raise GradientError(
        f"{step.where}: gradients that differ over tp",
        expected="the same on all ranks of a tp group, of parameters that each holds whole",
        got=shorten(told, 3, ", "),
        why="They come of other tokens or features on each rank, as sequence parallelism deals them out, and nobody "
        "adds them up: those of the first rank would be taken",
        fix="set parameter.sequence_parallel = True on the parameters of layers that see a part of the tokens, before "
        "te_fsdp.fully_shard or set_device_mesh; or give these layers all tokens. Where gradients shall differ, pass "
        "check_inputs=False to fully_shard or set_device_mesh",
    )


@contextlib.contextmanager
def track_replaced_parameters(model: nn.Module, by: str, *, prefix: str = "") -> Iterator[None]:
    """Mark the parameters that ``model`` has before the context and no longer after it. Local operation."""
    before = list(model.named_parameters(prefix=prefix))
    try:
        yield
    finally:
        now = {id(parameter) for parameter in model.parameters()}
        for name, parameter in before:
            if id(parameter) not in now:
                mark_replaced(parameter, name, by)


def mark_replaced(parameter: torch.Tensor, name: str, by: str) -> None:
    """Mark a parameter that a module has lost. Local operation."""
    # On a record of this object's own: a gathered parameter shares its shard's, which stays. Of calls within each other
    # the outermost, the user's own, marks last.
    parameter.__dict__[KEY] = dataclasses.replace(
        get_record(parameter) or ParameterRecord(), replaced_by=(name, by)
    )


def refuse_replaced(step: Step) -> None:
    """Raise for parameters that no module has any longer, or that are copies which none ever had.

    Raises:
        OrderError: Names the first of them, and the call that replaced it.
    """
    marked = {id(parameter): parameter for parameter, facts in step.held if facts.replaced_by}
    is_copy = _torch.is_copied_optimizer(step.optimizer) and step.optimizer not in _lists().right_copies
    if not marked and not is_copy:
        return
    held = (parameter for group in step.optimizer.param_groups for parameter in group["params"])
    # Without a record, or with what a pickle leaves of one.
    unmarked = {id(parameter): parameter for parameter in held if is_copy and not parameter.__dict__.get(KEY)}
    # Another model may share a parameter with the one that lost it, or be a copy as well: a step for that one is right.
    wanted = {*marked, *unmarked}
    for owner, name in registered_at(wanted):
        key = id(owner._parameters[name])
        wanted.discard(key)
        unmarked.pop(key, None)
        if key in marked:
            get_or_create_record(marked.pop(key)).replaced_by = None
    marked |= _copies_of_sharded(unmarked)
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


def _copies_of_sharded(unmarked: dict[int, torch.Tensor]) -> dict[int, torch.Tensor]:
    """All, if they are copies of sharded models' parameters: with what a pickle leaves, or each like one of theirs."""
    ours = _ours() if unmarked else {}
    return unmarked if all(KEY in p.__dict__ or _kind(p) in ours for p in unmarked.values()) else {}


def _kind(parameter: torch.Tensor) -> tuple[Any, ...]:
    return isinstance(parameter, DTensor), tuple(parameter.shape), parameter.dtype


def _ours() -> dict[tuple[Any, ...], str]:
    """Kind -> name of a parameter of each kind that the sharded models of this process have. For errors alone."""
    states: dict[int, Any] = {}
    for module in _modules():
        for parameter in module.__dict__.get("_parameters", {}).values():
            facts = None if parameter is None else get_record(parameter)
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
    facts = get_record(parameter)
    if facts is not None and facts.replaced_by is not None and facts.replaced_by[1] != COPIED:
        return facts.replaced_by
    original = facts.copied_from() if facts is not None and facts.copied_from is not None else None
    state = original.state() if original is not None and original.state is not None else None
    names = state.parameters() if state is not None else {}
    name = next((name for name, own in names.items() if get_record(own) is original), None)
    return name or _ours().get(_kind(parameter)) or label_of(parameter), COPIED


def registered_at(parameters: Collection[int]) -> Iterator[tuple[nn.Module, str]]:
    """Every module of this process that has a parameter, and its name there: parameters do not know their owners.

    Local operation, for setup and errors alone. Parameters are given by ``id``; what is removed meanwhile is not looked
    for any longer.
    """
    for module in _modules():
        for name, parameter in module.__dict__.get("_parameters", {}).items():
            if id(parameter) in parameters:
                yield module, name


def _modules() -> Iterator[nn.Module]:
    """All objects of this process that the garbage collector knows and that are modules."""
    # By type: proxies of all kinds answer isinstance with side effects.
    return (candidate for candidate in gc.get_objects() if issubclass(type(candidate), nn.Module))


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


def assign_main_gradients(mains: Iterable[torch.Tensor], gradients: Iterable[torch.Tensor | None]) -> None:
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
