"""Gradients of parameters whose optimizer state is sharded over replicas: averages, and what nobody may read.

With ``outer_strategy="optim"`` (HFSDP) ``parameter.grad`` is the average within one replica. That over the replicas
exists in rows, as the gradient of the main parameter that the optimizer will update, once somebody has asked for it: a
step, or a norm. It is made once, and holds as long as the gradient that it was made of stays as it is.

Whatever reads ``parameter.grad`` (torch's clipping, a loss scaler, a log) would find another number on each replica,
and scale each by another factor. Such a gradient is therefore a DTensor that computes nothing but what gives the same
before and after the average, an :class:`UnaveragedGradient`. FSDP2 and te_fsdp go by its local tensor.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Collection, Iterable, Sequence
from numbers import Number
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

import torch
from torch.distributed.tensor import DTensor

from te_fsdp.component import Component
from te_fsdp.errors import OrderError
from te_fsdp.features.hfsdp.optimizer_shards import OUTER, OptimizerShard
from te_fsdp.features.hfsdp.overlap import EarlyAverages, GradientAveraging
from te_fsdp.lifecycle import (
    assign_main_gradients,
    broadcast_tp_gradients,
    gradient_of,
    gradients_of,
    zero_gradient,
)
from te_fsdp.quantized.amax import KEEPS_MAIN_WEIGHTS
from te_fsdp.records import get_record, label_of, plan_of
from te_fsdp.sharded_model import sharded_model_of
from te_fsdp.tensor_version import TensorVersion
from te_fsdp.upstream import fsdp2_patches as _fsdp2_patches, torch_dtensor as _torch

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from te_fsdp.apply_fully_shard import Setup
    from te_fsdp.features.hfsdp.main_parameter import MainParameter
    from te_fsdp.sharded_model import ShardedModel


class ShardedParameters(Protocol):
    """The parameters of one optimizer that shards its state: ``main_params.MainParameters``."""

    known: dict[int, MainParameter]  #: Main parameters by ``id`` of the parameter

    def trained(self) -> list[MainParameter]:
        """Return the trained parameters whose state is sharded, in the same order on all replicas."""
        ...

    def look(self, parameters: Sequence[torch.Tensor]) -> Sequence[MainParameter | None]:
        """Return the main parameters that a step would use now."""
        ...


class OuterAverages:
    """The averages of one optimizer's gradients; ``early`` are those that begin during backward.

    What makes or completes them raises OrderError where gradients have changed since they were averaged.
    """

    def __init__(self, main_parameters: ShardedParameters) -> None:
        self._main_parameters = main_parameters
        self.early = EarlyAverages(self._apart)
        self._averaging = GradientAveraging(())  # of those that the last step has averaged
        # What averages were multiplied by since they were made; the gradients that they were made of were not.
        self._factor: torch.Tensor | None = None

    def _apart(self) -> list[OptimizerShard]:
        """What is trained and averaged, in the optimizer's order; the same on all replicas."""
        return [own.shard for own in self._main_parameters.trained() if not own.shard.reduced]

    @property
    def ready(self) -> dict[int, MainParameter]:
        """The main parameters whose gradients are averages that are there, by their parameters' ids."""
        return {key: own for key, own in self._main_parameters.known.items() if own.source is not None}

    def make(self) -> None:
        """Average the gradients of cut parameters over their replicas, unless that is done.

        Collective over the replicas: one reduce-scatter per group of replicas and dtype, or what is left to do of those
        that have begun during backward. The parameters' own gradients stay as they are.
        """
        cut = self._main_parameters.trained()
        parameters = [own.parameter for own in cut]
        gradients = gradients_of(parameters)
        if not cut or self._is_done(cut, gradients):
            return
        self._factor = None
        for gradient in gradients:
            apply_deferred_grad_scale(gradient)
        self._main_parameters.look(parameters)
        given: list[MainParameter] = []
        averages, specs, sources = [], [], []
        for own, source, rows in zip(cut, gradients, self._averages(cut, gradients), strict=True):
            if rows is None:
                continue  # no replica has a gradient
            if source is None:  # others have one: from now on this rank takes part as they do
                source = zero_gradient(own.parameter)
                if not own.shard.reduced:
                    hide_unaveraged_grad(source)
            given.append(own)
            averages.append(rows)
            specs.append(own.shard.spec(rows))
            sources.append(source)
        assign_main_gradients([own.main for own in given], _torch.dtensors(averages, specs))
        for own, seen in zip(given, TensorVersion.now(sources), strict=True):
            own.source = seen
        broadcast_tp_gradients(
            [own.parameter for own in given], {id(own.parameter): own.main for own in given}
        )

    def finish(self) -> None:
        """Complete the averages that have begun during backward. Collective over the replicas if there may be some."""
        if self.early.expected:
            self.make()

    @property
    def made(self) -> dict[int, torch.Tensor]:
        """Averages that are there, by the ``id`` of the gradient that each is of."""
        return {id(own.source.gradient()): own.main.grad for own in self.ready.values() if own.source}

    def multiplied(self, factor: torch.Tensor) -> None:
        """Note that the averages that are there were multiplied by a number. Local operation."""
        if self.ready:
            self._factor = factor if self._factor is None else self._factor * factor

    def clear(self) -> None:
        """Forget all averages. Their gradients are still to be multiplied, if they are not cleared. Local operation."""
        factor, self._factor = self._factor, None
        for own in self.ready.values():
            gradient = own.source.gradient() if own.source is not None and factor is not None else None
            if gradient is not None:
                setattr(gradient, _FACTOR, factor)
            own.source = own.main.grad = own.main.decoupled_grad = None

    def forget(self, parameters: Iterable[torch.Tensor]) -> None:
        """Forget what was averaged of gradients that are about to be cleared. Local operation."""
        for parameter in parameters:
            own = self._main_parameters.known.get(id(parameter))
            if own is not None:
                own.source = None

    def _is_done(self, cut: list[MainParameter], gradients: list[torch.Tensor | None]) -> bool:
        """Whether the averages that are there are those of the gradients that are there."""
        kept, fresh, changed = 0, 0, 0
        same = TensorVersion.are_same([own.source for own in cut], gradients)
        for own, gradient, is_same in zip(cut, gradients, same, strict=True):
            if gradient is None:
                own.source = None
            elif own.source is None or own.source.gradient() is not gradient:
                fresh += 1
            elif is_same:
                kept += 1
            else:
                changed += 1
        if changed or (kept and fresh):
            raise OrderError(
                f"{changed + fresh} of {len(cut)} gradients have changed since they were averaged",
                expected="the last backward of a step before clip_grad_norm_, grad_norm and scale_gradients",
                got="another backward, or another change of gradients, between them and step()",
                why="The step would miss it",
                fix="clip once, after the last backward; begin the next step with zero_grad()",
            )
        for own in self.ready.values() if not kept else ():
            own.source = None
        return bool(kept)

    def _averages(self, cut: list[MainParameter], gradients: list[Any]) -> list[torch.Tensor | None]:
        """This rank's rows of each average; ``None`` of a gradient that is not there to be cut. Collective."""
        local = {
            id(own.parameter): None if gradient is None else _torch.local_of(gradient)
            for own, gradient in zip(cut, gradients, strict=True)
        }
        found = self.early.finish()
        late = tuple([own.shard for own in cut if not own.shard.reduced and id(own.parameter) not in found])
        if self._averaging.shards != late:
            self._averaging = GradientAveraging(late)
        averages = self._averaging.start([local[id(shard.parameter)] for shard in late]).wait()
        found |= {id(shard.parameter): rows for shard, rows in zip(late, averages, strict=True)}
        for own in cut:
            if id(own.parameter) not in found:  # equal on all replicas
                shard, gradient = own.shard, local[id(own.parameter)]
                rows = None if gradient is None else shard.of(gradient).to(shard.dtype, copy=True)
                found[id(own.parameter)] = None if rows is None else rows.contiguous()
        return [found[id(own.parameter)] for own in cut]


# ------------------------------------------------------------------------------------------------ of several parameters


def averaged_tensors_of(parameters: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """The tensors whose ``grad`` is the model's gradient: main parameters of cut parameters, all others themselves.

    Averages what has not been averaged. Collective over the replicas of cut parameters, once per optimizer; in the same
    order on all ranks.

    Raises:
        OrderError: A parameter of ``outer_strategy="optim"`` whose optimizer was not sharded, or gradients that have
            changed since they were averaged.
    """
    given = list(parameters)
    ready: dict[int, MainParameter] = {}
    for averages in averages_of(given, "clip_grad_norm_ or grad_norm before shard_optimizer"):
        averages.make()
        ready |= averages.ready
    return [ready[id(p)].main if id(p) in ready else p for p in given]


def check_step(optimizer: Optimizer) -> None:
    """Raise OrderError before a step of an optimizer that would not average over the replicas. Local operation."""
    keeper = getattr(optimizer, KEEPS_MAIN_WEIGHTS, None)
    if keeper is not None and keeper.cuts:
        return
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if gradient_of(parameter) is not None:
                _check_sharded(parameter, f"{type(optimizer).__name__}.step()")


def _check_sharded(parameter: torch.Tensor, what: str) -> None:
    """Raise for a parameter whose gradients wait for an optimizer that averages them."""
    plan, state = plan_of(parameter), sharded_model_of(parameter)
    if plan is None or plan.storage.gradient[0] != "P" or state is None or state.meshes.size(OUTER) == 1:
        return
    raise OrderError(
        f"{what}: {label_of(parameter)} of a model with outer_strategy='optim'",
        expected="an optimizer that averages gradients over dp_replicate",
        got="one that updates with those of this rank's dp_shard group",
        why="The copies of the model would train apart",
        fix="call te_fsdp.shard_optimizer(optimizer) once, right after it was built",
    )


def averages_of(parameters: Iterable[torch.Tensor], what: str = "") -> list[OuterAverages]:
    """The averages of several parameters' gradients, one object for each optimizer that cuts state. Local operation.

    Raises:
        OrderError: That ``what`` lacks an optimizer that was sharded, for a trained parameter of
            ``outer_strategy="optim"``; not where it is empty.
    """
    found: dict[int, OuterAverages] = {}
    for parameter in parameters:
        facts = get_record(parameter)
        # Of the living optimizer that cuts its state.
        cutting = facts.main_parameters() if facts is not None and facts.main_parameters is not None else None
        if cutting is not None:
            found[id(cutting)] = cutting.averages
        elif what and parameter.requires_grad:
            _check_sharded(parameter, what)
    return list(found.values())


# --------------------------------------------------------------------------------------- gradients of one replica alone

#: Attribute of a gradient that was averaged: what the average was multiplied by, and the gradient was not.
_FACTOR = "_te_fsdp_factor"
#: Attribute of a gradient: its parameter's label.
_LABEL = "_te_fsdp_label"
#: Attributes that are values; the others are shape, dtype and the like.
VALUES = ("data", "T", "H", "mT", "mH", "real", "imag")
#: Methods and functions that tell the shape and the like, or change no value.
NO_VALUES = (
    *("size", "dim", "ndimension", "numel", "nelement", "stride", "element_size", "storage_offset"),
    *("get_device", "is_contiguous", "is_floating_point", "is_complex", "__len__", "__hash__"),
    *("requires_grad_", "detach", "detach_"),
)
#: Linear, so that they give the same before and after the average.
_LINEAR = (
    *("zero_", "mul_", "div_", "__imul__", "__itruediv__", "multiply_", "divide_", "true_divide_"),
    *("_foreach_zero_", "_foreach_mul_", "_foreach_div_"),
)


def _refuse(gradient: torch.Tensor | None, what: str, *unused: Any, **more: Any) -> NoReturn:
    """Raise :class:`OrderError` for an operation on a gradient."""
    label = "" if gradient is None else gradient.__dict__.get(_LABEL, "")
    shape = "" if gradient is None else f" of shape {tuple(gradient.shape)}"
    raise OrderError(
        f"{what} on the gradient of {label or f'a parameter{shape}'}",
        expected=f"a gradient that is averaged over {OUTER}",
        got="one that is averaged over this copy of the model alone, as each backward leaves it with "
        'outer_strategy="optim"',
        why="Each copy would see other numbers",
        fix="use te_fsdp.clip_grad_norm_, te_fsdp.grad_norm and te_fsdp.scale_gradients; where other code must read "
        "gradients, shard with outer_strategy='no_shard' (HSDP)",
    )


class UnaveragedGradient(DTensor):
    """A gradient that is averaged within one replica of the model alone, see above."""

    __slots__ = ()

    to_local = functools.partialmethod(_refuse, "to_local")
    full_tensor = functools.partialmethod(_refuse, "full_tensor")
    redistribute = functools.partialmethod(_refuse, "redistribute")
    __deepcopy__ = functools.partialmethod(_refuse, "deepcopy")
    __reduce_ex__ = functools.partialmethod(_refuse, "pickle")

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run what is harmless.

        Not ``__torch_dispatch__``: torch before 2.13 does not ask a subclass of DTensor for its own.

        Raises:
            OrderError: Anything else.
        """
        name = func.__name__
        if name in ("__get__", "__set__", "__delete__"):
            name = func.__self__.__name__
            harmless = name not in VALUES
        else:
            linear = name in _LINEAR and not kwargs and all(map(_is_number, args[1:]))
            harmless = linear or name in NO_VALUES
        if not harmless:
            given = args[0] if args and isinstance(args[0], (list, tuple)) else args
            _refuse(next((g for g in given if isinstance(g, cls)), None), name)
        result = _torch.plain_results(func, types, args, kwargs or {})
        return hide_unaveraged_grad(result) if isinstance(result, DTensor) else result

    def __repr__(self, **unused: Any) -> str:
        """Without values."""
        return f"{type(self).__name__}(shape={tuple(self.shape)}, placements={self.placements})"


def _is_number(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return all(map(_is_number, value))
    return isinstance(value, Number) or (isinstance(value, torch.Tensor) and value.ndim == 0)


def hide_unaveraged_grad(gradient: torch.Tensor) -> torch.Tensor:
    """The same gradient, as one that is averaged within one replica alone. Local operation."""
    if isinstance(gradient, DTensor):
        gradient.__class__ = UnaveragedGradient
    return gradient


@torch.no_grad()
def apply_deferred_grad_scale(gradient: torch.Tensor | None) -> None:
    """Multiply a gradient by what its average was clipped or scaled by, before others are added to it. Local operation.

    A loop that clears gradients after each step never comes to it.
    """
    factor = None if gradient is None else gradient.__dict__.pop(_FACTOR, None)
    if gradient is not None and factor is not None:
        local = _torch.local_of(gradient)
        local.copy_(torch.where(local == 0, local, local * factor))  # zeros stay, whatever the factor


def hide_unaveraged_grads(setup: Setup) -> None:
    """Hide the gradients that FSDP2 reduces for a model with ``outer_strategy="optim"``. Local operation.

    Their averages may begin then (:class:`~te_fsdp.features.hfsdp.overlap.EarlyAverages`).
    """
    state = setup.state
    if state.outer != "optim":
        return
    own = ShardedOptimizer()
    state.components.attach(own)
    for name, unit in state.modules.items() if state.meshes.size(OUTER) > 1 else ():
        after = functools.partial(_after, weakref.ref(state), weakref.ref(own), name)
        _fsdp2_patches.wrap_reductions(unit, _before, after)


class ShardedOptimizer(Component):
    """The optimizer that shards its state over the replicas of one model's parameters."""

    def __init__(self, averages: OuterAverages | None = None) -> None:
        #: Averages of the optimizer's gradients; ``None`` until :func:`te_fsdp.shard_optimizer` is called.
        self.averages = averages

    def zero_grad(self, parameters: Collection[torch.Tensor]) -> None:
        """Forget the averages of these parameters' gradients. Local operation."""
        for averages in averages_of(parameters):
            averages.forget(parameters)


@torch.no_grad()
def _before(parameters: Iterable[torch.Tensor]) -> None:
    for parameter in parameters:
        apply_deferred_grad_scale(parameter.grad)


def _after(
    of: weakref.ref[ShardedModel],
    component: weakref.ref[ShardedOptimizer],
    unit: str,
    parameters: Iterable[torch.Tensor],
    group: int,
    event: Any,
) -> None:
    for parameter in parameters:
        gradient = parameter.grad
        if isinstance(gradient, DTensor) and not isinstance(gradient, UnaveragedGradient):
            gradient.__class__ = UnaveragedGradient
            facts = get_record(parameter)
            setattr(gradient, _LABEL, facts.label or "" if facts is not None else "")
    state, own = of(), component()
    if state is not None and own is not None and own.averages is not None:
        own.averages.early.reduced(state, unit, group, event)
