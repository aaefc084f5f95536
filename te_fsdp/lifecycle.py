"""Hooks around ``optimizer.step()``: one before every step and one after it, each running a list of functions.

    bound models      ``BEFORE_STEP`` and ``AFTER_STEP`` of ``bind_device_mesh.py``
    sharded models    those of ``components.py``, which contain the same functions and more

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

Checks of a step are in ``te_fsdp.checks``: :func:`run_checks` calls them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from te_fsdp.check_points import LEVELS, NONE, CheckPoints
from te_fsdp.collectives.redistribute import broadcast
from te_fsdp.records import KEY, ParameterRecord, get_record
from te_fsdp.upstream import torch_dtensor as _torch

if TYPE_CHECKING:
    from torch.optim import Optimizer


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

    @functools.cached_property
    def checks(self) -> CheckPoints:
        """Checks of the optimizer's sharded models, at their highest level; else those of bound models."""
        found = None
        for state, _ in self.models:
            points: CheckPoints = state.checks
            if found is None or LEVELS.index(points.level) > LEVELS.index(found.level):
                found = points
        return _lists().bound_checks if found is None else found

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
    bound_checks: CheckPoints = NONE  #: Checks of optimizers without sharded models

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


def register_step_functions(before: StepFunctions, after: StepFunctions, checks: CheckPoints = NONE) -> None:
    """Run these around every optimizer step from now on, in order. A longer list replaces one that it contains."""
    lists = _lists()
    if checks.bound_step and not lists.bound_checks.bound_step:
        lists.bound_checks = checks
    if len(before) + len(after) > len(lists.before) + len(lists.after):
        lists.before, lists.after = before, after


def run_checks(step: Step) -> None:
    """Run the checks of a step, at the highest level of the optimizer's models. They raise before anything changes."""
    for check in step.checks.step if step.models else step.checks.bound_step:
        check(step)


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
                found.setdefault(mesh.get_group(mesh.ndim - 1), []).append(gradient)
    for group, gradients in found.items():
        broadcast(_torch.local_tensors_of(gradients), group)


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


def registered_at(parameters: Collection[int]) -> Iterator[tuple[nn.Module, str]]:
    """Every module of this process that has a parameter, and its name there: parameters do not know their owners.

    Local operation, for setup and errors alone. Parameters are given by ``id``; what is removed meanwhile is not looked
    for any longer.
    """
    for module in modules_of_process():
        for name, parameter in module.__dict__.get("_parameters", {}).items():
            if id(parameter) in parameters:
                yield module, name


def modules_of_process() -> Iterator[nn.Module]:
    """Yield all modules of this process that the garbage collector tracks. For setup and errors only."""
    # By type, because isinstance has side effects on some proxies.
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
