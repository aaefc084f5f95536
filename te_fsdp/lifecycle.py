"""Hooks around ``optimizer.step()``, which call lists of functions.

    bound models      ``BEFORE_STEP`` and ``AFTER_STEP`` of ``bind_device_mesh.py``
    main weights      those of ``features/main_weights.py``
    sharded models    those of ``components.py``, which contain the same functions and more

torch calls hooks in the order of their registration, which depends on the program. These lists have one fixed order,
which docs/internals.md prints. Their functions only use parameters with te_fsdp's record
(:class:`te_fsdp.records.ParameterRecord`), so that optimizers of other models in the process are not affected.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeAlias, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from te_fsdp.check_points import LEVELS, NONE, CheckPoints
from te_fsdp.collectives.redistribute import broadcast
from te_fsdp.records import KEEPS_MAIN_WEIGHTS, PARAMETER, ParameterRecord, get_record
from te_fsdp.tp_gradients import place_gradients
from te_fsdp.upstream import te as _te, torch_dtensor as _torch
from te_fsdp.upstream.torch_autograd import without_subclasses


def quantized_of_optimizer(optimizer: Optimizer) -> list[tuple[str, torch.Tensor, torch.Tensor]]:
    """Return label, parameter and local tensor of each quantized weight of an optimizer. Local operation."""
    return Step(optimizer, (), {}).quantized


class Step:
    """One call of ``optimizer.step()``, as the argument of the functions in the lists.

    Attributes:
        where: ``"AdamW.step"``, for messages.
        closure: The closure that runs forward and backward within the step, or ``None``. Functions before a step may
            replace it.
        recorded_params: The optimizer's parameters that have a record of te_fsdp, with the record.
        models: The ``ShardedModel`` of each sharded model with parameters in the optimizer, and these parameters.
        quantized: Label, parameter and local tensor of every quantized weight of a bound module.
        has_main_weights: Whether the optimizer has main weights, or is TE's FusedAdam.
        has_replicas: Whether a parameter is replicated over tp.
        has_bound_params: Whether some parameters belong to no sharded model.
    """

    def __init__(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self.optimizer = optimizer
        self.where = f"{type(optimizer).__name__}.step"
        # torch passes the optimizer itself as the first argument.
        self.closure = kwargs.get("closure") or next(filter(callable, args[1:]), None)
        self.recorded_params: list[tuple[torch.Tensor, ParameterRecord]] = []
        self.has_replicas = self.has_bound_params = False
        # One loop without calls for all functions, because it runs twice in each step.
        by_model: dict[int, tuple[Any, list[torch.Tensor]]] = {}
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                record = parameter.__dict__.get(PARAMETER)
                state = record.state() if record and record.state is not None else None
                if state is not None:
                    by_model.setdefault(id(state), (state, []))[1].append(parameter)
                else:
                    self.has_bound_params = True
                if record:
                    self.recorded_params.append((parameter, record))
                    self.has_replicas |= record.tp_replica
        self.models = list(by_model.values())
        self.quantized: list[tuple[str, torch.Tensor, torch.Tensor]] = []
        shards = _torch.local_tensors_of([parameter for parameter, _ in self.recorded_params])
        for (parameter, record), local in zip(self.recorded_params, shards, strict=True):
            if record.label is not None and _te.is_quantized_class(type(local)):
                self.quantized.append((record.label, parameter, local))
        self.has_main_weights = hasattr(optimizer, KEEPS_MAIN_WEIGHTS) or _te.is_fused_adam_class(
            type(optimizer)
        )

    @functools.cached_property
    def checks(self) -> CheckPoints:
        """Return the checks of the sharded model with the highest level; without one, those of bound models."""
        highest = None
        for state, _ in self.models:
            points: CheckPoints = state.checks
            if highest is None or LEVELS.index(points.level) > LEVELS.index(highest.level):
                highest = points
        return _step_hooks().bound_checks if highest is None else highest

    @property
    def names(self) -> dict[int, str]:
        """Return the name of every parameter of the sharded models by its ``id``, for errors."""
        return {id(p): name for state, _ in self.models for name, p in state.parameters().items()}


StepFunctions: TypeAlias = tuple[Callable[[Step], None], ...]
FunctionT = TypeVar("FunctionT", bound=Callable[..., None])


def runs_if(attribute: str) -> Callable[[FunctionT], FunctionT]:
    """Let a function of a list run only if this attribute of its argument (:class:`Step`, ``Setup``) is true."""

    def mark(function: FunctionT) -> FunctionT:
        function.__dict__["runs_if"] = attribute
        return function

    return mark


class _StepHooks:
    """The hooks before and after the steps of all optimizers of this process, with their lists of functions."""

    before: StepFunctions = ()
    after: StepFunctions = ()
    bound_checks: CheckPoints = NONE  #: Checks of optimizers without sharded models

    def before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        """Run the list before a step; return the new arguments if the closure was replaced."""
        # A step that raised may have left main weights in the groups, which have no record.
        main_parameters = getattr(optimizer, KEEPS_MAIN_WEIGHTS, None)
        if main_parameters is not None:
            main_parameters.restore_params(optimizer)
        step = Step(optimizer, args, kwargs)
        closure = step.closure
        for function in self.before:
            attribute = getattr(function, "runs_if", None)
            if attribute is None or getattr(step, attribute):
                function(step)
        if step.closure is closure:
            return None
        # The user may have passed the closure by position or by name.
        exchanged = {id(closure): step.closure}
        args = tuple(exchanged.get(id(value), value) for value in args)
        return args, {key: exchanged.get(id(value), value) for key, value in kwargs.items()}

    def after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Run the list after a step."""
        # A new object: torch passes nothing from one hook to the other, and a step that raises has no second one.
        step = Step(optimizer, args, kwargs)
        for function in self.after:
            attribute = getattr(function, "runs_if", None)
            if attribute is None or getattr(step, attribute):
                function(step)


@functools.cache
def _step_hooks() -> _StepHooks:
    """Return the hooks of this process; the first call, when a model is bound, registers them for all optimizers."""
    hooks = _StepHooks()
    # Hooks of all optimizers, because one may be built before or after its model is sharded.
    register_optimizer_step_pre_hook(_torch.disable_compile(hooks.before_step))
    register_optimizer_step_post_hook(_torch.disable_compile(hooks.after_step))
    return hooks


def register_step_functions(before: StepFunctions, after: StepFunctions, checks: CheckPoints = NONE) -> None:
    """Run these functions around every optimizer step from now on. A longer list replaces one that it contains."""
    hooks = _step_hooks()
    if checks.bound_step and not hooks.bound_checks.bound_step:
        hooks.bound_checks = checks
    if len(before) + len(after) > len(hooks.before) + len(hooks.after):
        hooks.before, hooks.after = before, after


def run_checks(step: Step) -> None:
    """Run the checks of a step, at the highest level of the optimizer's models, before anything changes.

    Collective as the checks are.
    """
    for check in step.checks.step if step.models else step.checks.bound_step:
        check(step)


# [Note: tp-replicated parameters] They are kept bitwise equal. Without sequence parallelism each tp rank
# computes the same gradient of norms, row-parallel biases and modules outside of TE, from the same inputs. On
# a GPU the results can differ, because some kernels sum in the order in which their blocks finish. On an
# H200, torch's embedding backward in fp32 gave 200 different results in 200 runs, and copies of TE's
# row-parallel biases differed after two steps. The differences are rounding errors, but the copies would
# never become equal again, and a checkpoint can contain only one of them. So before every step all ranks use
# the gradients of the first tp rank, after FSDP2 has reduced and sharded them. Optimizers work elementwise,
# so that parameters and states stay equal.
@runs_if("has_replicas")
def sync_tp_replicas(step: Step) -> None:
    """Replace gradients of tp-replicated parameters by those of the first tp rank.

    Collective over tp. Parameters with optimizer state sharded over further axes are excluded: the optimizer's own
    hook averages their gradients first.
    """
    replicas = [(parameter, record) for parameter, record in step.recorded_params if record.tp_replica]
    place_gradients([parameter for parameter, _ in replicas])
    broadcast_tp_gradients([parameter for parameter, record in replicas if record.main_parameters is None])


@torch.no_grad()
def broadcast_tp_gradients(
    parameters: Iterable[torch.Tensor], main_parameters: Mapping[int, torch.Tensor] | None = None
) -> None:
    """Replace the gradients of tp-replicated parameters by those of the first tp rank, in place.

    Collective over tp if there are such gradients: one broadcast per dtype, and one for each large tensor. Parameters
    without a record are skipped. The others must have gradients for the same parameters, in the same order, on all
    tp ranks. ``main_parameters`` maps the ``id`` of a parameter to a different tensor that has its gradient.
    """
    by_group: dict[dist.ProcessGroup, list[torch.Tensor]] = {}
    groups: dict[int, dist.ProcessGroup | None] = {}
    # Reads attributes of DTensors without Python calls: every step does so for every parameter.
    with without_subclasses():
        for parameter in parameters:
            record = parameter.__dict__.get(PARAMETER)
            if not record or not record.tp_replica or not isinstance(parameter, DTensor):
                continue
            holder: Any = main_parameters[id(parameter)] if main_parameters is not None else parameter
            mesh = _torch.spec_of(holder).mesh
            key = id(mesh)
            if key not in groups:
                # FSDP2 puts its axes before the existing one.
                groups[key] = mesh.get_group(mesh.ndim - 1) if mesh.size(mesh.ndim - 1) > 1 else None
            group = groups[key]
            for gradient in (holder.grad, getattr(holder, "decoupled_grad", None)):
                if gradient is not None and group is not None:
                    by_group.setdefault(group, []).append(gradient)
    for group, gradients in by_group.items():
        broadcast(_torch.local_tensors_of(gradients), group)


@contextlib.contextmanager
def track_replaced_parameters(model: nn.Module, by: str, *, prefix: str = "") -> Iterator[None]:
    """Mark the parameters of ``model`` that the code in the context replaces. Local operation."""
    before = list(model.named_parameters(prefix=prefix))
    try:
        yield
    finally:
        now = {id(parameter) for parameter in model.parameters()}
        for name, parameter in before:
            if id(parameter) not in now:
                mark_replaced(parameter, name, by)


def mark_replaced(parameter: torch.Tensor, name: str, by: str) -> None:
    """Mark a parameter as replaced in its module. Local operation."""
    # Write to a separate record: an unsharded parameter shares its shard's record, which stays valid. Of nested calls
    # the outermost one, which the user made, writes last.
    parameter.__dict__[PARAMETER] = dataclasses.replace(
        get_record(parameter) or ParameterRecord(), replaced_by=(name, by)
    )


# ---------------------------------------------------------------------------- gradients of an optimizer's parameters


def gradient_of(parameter: torch.Tensor) -> torch.Tensor | None:
    """Return a parameter's gradient: the decoupled gradient of a different dtype if there is one, else ``grad``."""
    decoupled = getattr(parameter, "decoupled_grad", None)
    return decoupled if decoupled is not None else parameter.grad


def gradients_of(parameters: Iterable[torch.Tensor]) -> list[torch.Tensor | None]:
    """Return :func:`gradient_of` each parameter, faster, because every step needs it twice for all parameters."""
    gradients = []
    for parameter in parameters:
        decoupled = getattr(parameter, "decoupled_grad", None)
        gradients.append(parameter.grad if decoupled is None else decoupled)
    return gradients
