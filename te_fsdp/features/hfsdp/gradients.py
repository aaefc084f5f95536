"""Averages over ``dp_replicate`` of gradients whose optimizer state is sharded over it as well."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Collection, Iterable, Sequence
from numbers import Number
from typing import Any, NoReturn

import torch
from torch.distributed.tensor import DTensor

from te_fsdp.apply_fully_shard import Setup
from te_fsdp.collectives.agreement import maximum
from te_fsdp.collectives.rendezvous import is_capturing
from te_fsdp.component import Component
from te_fsdp.errors import OrderError
from te_fsdp.features.hfsdp.optimizer_shards import OUTER, MainParameter, group_by_key
from te_fsdp.features.hfsdp.overlap import EarlyAverages, GradientAveraging
from te_fsdp.features.unreadable_gradients import UnreadableShard, reads_values, tensor_arguments
from te_fsdp.lifecycle import broadcast_tp_gradients, gradient_of, gradients_of, runs_if
from te_fsdp.records import PARAMETER, get_or_create_record, get_record, label_of, plan_of
from te_fsdp.sharded_model import ShardedModel, sharded_model_of
from te_fsdp.tensor_version import TensorVersion
from te_fsdp.upstream import (
    fsdp2_gradients as _fsdp2_gradients,
    fsdp2_patches as _fsdp2_patches,
    fsdp2_units,
    torch_autograd as _torch_autograd,
    torch_dtensor as _torch,
)


# [Note: frozen parameters with a gradient] An optimizer of torch steps each parameter that has a gradient. Its
# ``requires_grad`` does not matter, also if it was set after the backward. Replicas average the gradients of the
# same parameters, but one of them alone may have a gradient. So they compare once after a parameter was frozen, and
# again after it was trained in a forward. Other steps send nothing for frozen parameters.
#
# [Note: averages over replicas] With ``outer_strategy="optim"`` (HFSDP) ``parameter.grad`` is the average within one
# replica. The average over replicas is computed on demand (by a step or a norm). It consists of this rank's rows, as
# the gradient of the main parameter that the optimizer updates. It is computed once and is valid while the underlying
# gradient does not change.
class OuterAverages:
    """Averages of one optimizer's gradients over replicas; ``early`` contains those that start during backward.

    Methods that compute or complete averages raise OrderError if gradients have changed since they were averaged.
    Main parameters are found by ``id`` of the parameter, and ``lookup`` updates them as a step does. ``sharded``
    returns those with sharded state.
    """

    def __init__(
        self,
        by_id: dict[int, MainParameter],
        sharded: Callable[[], list[MainParameter]],
        lookup: Callable[[Sequence[torch.Tensor]], Any],
    ) -> None:
        self._by_id, self._lookup, self._sharded = by_id, lookup, sharded
        #: Frozen parameters -> whether any replica has a gradient. Identical on all replicas.
        self._frozen: dict[MainParameter, bool] = {}
        # The shards are in the optimizer's order, which is identical on all replicas.
        self.early = EarlyAverages(lambda: [p.shard for p in self.averaged() if not p.shard.reduced])
        self._averaging = GradientAveraging(())  # for the gradients of the last step
        # Factor by which averages were multiplied after they were computed. The underlying gradients were not.
        self._factor: torch.Tensor | None = None

    @property
    def ready(self) -> dict[int, MainParameter]:
        """Return the main parameters whose averaged gradient is available, keyed by id(parameter)."""
        return {key: pair for key, pair in self._by_id.items() if pair.source is not None}

    def averaged(self) -> list[MainParameter]:
        """Return the parameters whose gradients are averaged, in the same order on all replicas. Local operation."""
        return [
            pair
            for pair in self._sharded()
            if pair.parameter.requires_grad or (self._frozen and self._frozen.get(pair))
        ]

    def drop_trained(self) -> None:
        """Drop the entries of frozen parameters that are trained again. Local operation."""
        for pair in [pair for pair in self._frozen if pair.parameter.requires_grad]:
            del self._frozen[pair]

    def compare_frozen(self) -> None:
        """Determine which parameters that were frozen since the previous call have a gradient on any replica.

        Collective over the replicas if there are such parameters: one all-reduce of an integer per parameter. Raises
        OrderError for other frozen parameters with a gradient.
        """
        self.drop_trained()
        new: list[MainParameter] = []
        for pair in self._sharded():
            if pair.parameter.requires_grad:
                continue
            known = self._frozen.get(pair)
            if known is None:
                new.append(pair)
            elif not known and gradient_of(pair.parameter) is not None:
                raise OrderError(
                    f"{label_of(pair.parameter)}: frozen, with a gradient that no backward has computed",
                    expected="a gradient from a backward after a forward in which it was trained",
                    got="a gradient that was assigned",
                    why="Replicas without this gradient would not average it",
                    fix="set requires_grad before the forward or before the step",
                )
        groups = group_by_key(new, [pair.shard.ranks for pair in new])
        # Sorted, so that all ranks run the collectives of their groups in the same order.
        for pairs in sorted(groups, key=lambda group: group[0].shard.ranks):
            found = [gradient_of(pair.parameter) is not None for pair in pairs]
            if not is_capturing():  # a recorded step clears gradients first, on all ranks
                device = _torch.local_of(pairs[0].parameter).device
                flags = torch.tensor(found, dtype=torch.int32, device=device)
                maximum(flags, pairs[0].shard.group)
                found = list(map(bool, flags.tolist()))
            self._frozen.update(zip(pairs, found, strict=True))

    def average(self) -> None:
        """Average the gradients of parameters with sharded state over their replicas, unless done already.

        Collective over the replicas: one reduce-scatter per replica group and dtype, or the rest of those that started
        during backward, and :meth:`compare_frozen`. The parameters' own gradients are not changed.
        """
        self.compare_frozen()
        sharded = self.averaged()
        gradients = gradients_of([pair.parameter for pair in sharded])
        if not sharded or self._is_done(sharded, gradients):
            return
        self._factor = None
        for pair, gradient in zip(sharded, gradients, strict=True):
            if pair.parameter.__dict__[PARAMETER].deferred_scale is not None:
                apply_deferred_grad_scale(pair.parameter, gradient)
        locals_ = [None if gradient is None else _torch.local_of(gradient) for gradient in gradients]
        rows_of = self.early.finish()  # by id of the parameter; ``None`` if no replica has a gradient
        # The gradients whose averages have not started during backward.
        late = [
            index
            for index, pair in enumerate(sharded)
            if not pair.shard.reduced and id(pair.parameter) not in rows_of
        ]
        shards = tuple([sharded[index].shard for index in late])
        # Kept for the next steps, because the packing depends on the shards only.
        if self._averaging.shards != shards:
            self._averaging = GradientAveraging(shards)
        late_rows = self._averaging.start([locals_[index] for index in late]).wait()
        rows_of |= {id(shard.parameter): rows for shard, rows in zip(shards, late_rows, strict=True)}
        averaged: list[MainParameter] = []
        means: list[torch.Tensor] = []
        sources: list[torch.Tensor] = []
        for pair, source, local in zip(sharded, gradients, locals_, strict=True):
            parameter, shard = pair.parameter, pair.shard
            if not shard.reduced:
                rows = rows_of[id(parameter)]
            else:  # equal on all replicas, so that it is only sliced
                rows = None if local is None else shard.of(local).to(shard.dtype, copy=True).contiguous()
            if rows is None:
                if pair in self._frozen:
                    self._frozen[pair] = False
                continue
            if source is None:  # other replicas have one, so this rank participates like them
                source = parameter.grad = _torch.zero_gradient(parameter)
                if not shard.reduced:
                    hide_unaveraged_grad(source)
            averaged.append(pair)
            means.append(rows)
            sources.append(source)
        parameters = [pair.parameter for pair in averaged]
        self._lookup(parameters)
        specs = [pair.shard.spec(rows) for pair, rows in zip(averaged, means, strict=True)]
        assign_main_gradients([pair.main for pair in averaged], _torch.dtensors(means, specs))
        for pair, version in zip(averaged, TensorVersion.now(sources), strict=True):
            pair.source = version
        broadcast_tp_gradients(parameters, {id(pair.parameter): pair.main for pair in averaged})

    def finish(self) -> None:
        """Complete averages that started during backward. Collective over the replicas if there may be some."""
        if self.early.expected:
            self.average()

    @property
    def computed(self) -> dict[int, torch.Tensor]:
        """Return the available averages, by ``id`` of the underlying gradient."""
        return {id(pair.source.gradient()): pair.main.grad for pair in self.ready.values() if pair.source}

    def multiplied(self, factor: torch.Tensor) -> None:
        """Record that the available averages were multiplied by a number. Local operation."""
        if self.ready:
            self._factor = factor if self._factor is None else self._factor * factor

    def clear(self) -> None:
        """Drop all averages. Their factor still applies to gradients that are not cleared. Local operation."""
        factor, self._factor = self._factor, None
        for pair in self.ready.values():
            gradient = None if pair.source is None else pair.source.gradient()
            if gradient is not None and factor is not None:
                get_or_create_record(pair.parameter).deferred_scale = weakref.ref(gradient), factor
            pair.source = pair.main.grad = pair.main.decoupled_grad = None

    def forget(self, parameters: Iterable[torch.Tensor]) -> None:
        """Drop the averages of gradients that are about to be cleared. Local operation."""
        for parameter in parameters:
            pair = self._by_id.get(id(parameter))
            if pair is not None:
                pair.source = None

    def _is_done(self, sharded: list[MainParameter], gradients: list[torch.Tensor | None]) -> bool:
        """Return whether the available averages match the current gradients; raise OrderError if some do not."""
        unchanged, fresh, changed = 0, 0, 0
        same = TensorVersion.are_same([pair.source for pair in sharded], gradients)
        for pair, gradient, is_same in zip(sharded, gradients, same, strict=True):
            if gradient is None:
                pair.source = None
            elif pair.source is None or pair.source.gradient() is not gradient:
                fresh += 1
            elif is_same:
                unchanged += 1
            else:
                changed += 1
        # All averages are of this step, or none is. A mixture means that a backward ran after they were computed.
        if changed or (unchanged and fresh):
            raise OrderError(
                f"{changed + fresh} of {len(sharded)} gradients have changed after they were averaged",
                expected="the last backward of a step before clip_grad_norm_ and scale_gradients",
                got="a further backward, or a write to a gradient, between these calls and step()",
                why="The step would ignore the change",
                fix="clip once, after the last backward; begin the next step with zero_grad()",
            )
        for pair in self.ready.values() if not unchanged else ():
            pair.source = None
        return bool(unchanged)


# ------------------------------------------------------------------------------------------------ of several parameters


def refuse_unaveraged(parameter: torch.Tensor, call: str) -> None:
    """Raise OrderError for a parameter whose gradients require an optimizer that averages them. Local operation."""
    plan, state = plan_of(parameter), sharded_model_of(parameter)
    if plan is None or plan.storage.gradient[0] != "P" or state is None or state.meshes.size(OUTER) == 1:
        return
    raise OrderError(
        f"{call}: {label_of(parameter)} of a model with outer_strategy='optim'",
        expected="an optimizer that averages gradients over dp_replicate",
        got="an optimizer that uses gradients of this rank's dp_shard group",
        why="The replicas of the model would diverge",
        fix="call te_fsdp.shard_optimizer(optimizer) once, right after building it",
    )


def averages_of(parameters: Iterable[torch.Tensor], call: str = "") -> list[OuterAverages]:
    """Return the averages of several parameters, one object per optimizer with sharded state. Local operation.

    ``call`` names the caller in errors. Then a trained parameter of ``outer_strategy="optim"`` raises OrderError if no
    optimizer shards its state.
    """
    by_optimizer: dict[int, OuterAverages] = {}
    for parameter in parameters:
        record = get_record(parameter)
        # The optimizer that shards its state, if it is still alive.
        reference = None if record is None else record.main_parameters
        main_parameters = None if reference is None else reference()
        if main_parameters is not None:
            by_optimizer[id(main_parameters)] = main_parameters.averages
        elif call and parameter.requires_grad:
            refuse_unaveraged(parameter, call)
    return list(by_optimizer.values())


# --------------------------------------------------------------------------------------- gradients of one replica alone

#: Linear operations, which have the same result before and after the average.
_LINEAR = (
    *("zero_", "mul_", "div_", "__imul__", "__itruediv__", "multiply_", "divide_", "true_divide_"),
    *("_foreach_zero_", "_foreach_mul_", "_foreach_div_"),
)


# [Note: unaveraged gradients] Code that reads ``parameter.grad`` (torch's clipping, a loss scaler, a log)
# would see a different value on each replica, and scale each replica differently. So this gradient is a
# DTensor that supports only operations with the same result before and after the average, an
# :class:`UnaveragedGradient`. FSDP2 and te_fsdp use its local tensor.
class UnaveragedGradient(UnreadableShard):
    """A gradient that is averaged within one replica of the model only ([Note: unaveraged gradients])."""

    __slots__ = ()
    label = ""  #: Label of its parameter

    @staticmethod
    def refuse(gradient: Any, use: str) -> NoReturn:
        """Raise :class:`OrderError` for an operation on a gradient."""
        label = getattr(gradient, "label", "")
        shape = "" if gradient is None else f" of shape {tuple(gradient.shape)}"
        raise OrderError(
            f"{use} on the gradient of {label or f'a parameter{shape}'}",
            expected=f"a gradient that is averaged over {OUTER}",
            got="a gradient that is averaged over this replica only, as after each backward with "
            'outer_strategy="optim"',
            why="Each replica would see different numbers",
            fix="use te_fsdp.clip_grad_norm_ (max_norm=math.inf only returns the norm) and te_fsdp.scale_gradients; if "
            "other code must read gradients, shard with outer_strategy='no_shard' (HSDP)",
        )

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run operations that do not depend on the average. Raise :class:`OrderError` for all others."""
        name, is_read = reads_values(func)
        is_linear = name in _LINEAR and not kwargs and all(map(_is_number, args[1:]))
        if is_read and not is_linear:
            cls.refuse(next((g for g in tensor_arguments(args) if isinstance(g, cls)), None), name)
        result = _torch.plain_results(func, types, args, kwargs or {})
        return hide_unaveraged_grad(result) if isinstance(result, DTensor) else result


def _is_number(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return all(map(_is_number, value))
    return isinstance(value, Number) or (isinstance(value, torch.Tensor) and value.ndim == 0)


def hide_unaveraged_grad(gradient: torch.Tensor) -> torch.Tensor:
    """Mark a gradient as averaged within one replica only, and return it. Local operation."""
    if isinstance(gradient, DTensor):
        # The object stays, because the parameter and FSDP2 refer to it.
        gradient.__class__ = UnaveragedGradient
    return gradient


@torch.no_grad()
def apply_deferred_grad_scale(parameter: torch.Tensor, gradient: torch.Tensor | None) -> None:
    """Apply the deferred factor of a parameter's gradient before accumulating into it. Local operation."""
    # The factor comes from clipping or scaling the average. Loops that clear gradients after each step never need this.
    # Not `get_record`, because each backward calls this for each parameter.
    record = parameter.__dict__.get(PARAMETER)
    if not record or record.deferred_scale is None:
        return
    scaled, factor = record.deferred_scale
    if gradient is not None and scaled() is gradient:
        record.deferred_scale = None
        local = _torch.local_of(gradient)
        local.copy_(torch.where(local == 0, local, local * factor))  # zeros stay zero for any factor


@runs_if("is_hfsdp")
def hide_unaveraged_grads(setup: Setup) -> None:
    """Hide the gradients that FSDP2 reduces for a model with ``outer_strategy="optim"``. Local operation."""
    component = ShardedOptimizer(setup.state)
    # Their averages may begin right after a reduction ([Note: early averages]).
    for name, groups in setup.groups.items() if OUTER in setup.axes else ():
        # Every backward reduces each parameter group of its tree at least once, even if it did not use the group.
        for number, group in enumerate(groups):
            after = functools.partial(component.after_reduction, name, number)
            _fsdp2_patches.add_reduction_listener(group, before=component.before_reduction, after=after)


class ShardedOptimizer(Component):
    """Component with the averages of the optimizers that shard their state over a model's replicas."""

    def __init__(self, state: ShardedModel) -> None:
        self._state = weakref.ref(state)
        #: Averages of the optimizer's gradients; ``None`` until :func:`te_fsdp.shard_optimizer` is called.
        self.averages: OuterAverages | None = None
        self._all = weakref.WeakSet[OuterAverages]()  # of all optimizers of the model
        state.components.attach(self)

    def add(self, averages: OuterAverages) -> None:
        """Set the averages of a further optimizer. Local operation."""
        self.averages = averages
        self._all.add(averages)

    def before_forward(self) -> None:
        """Drop the entries of frozen parameters that are trained again. Local operation."""
        for averages in self._all:
            averages.drop_trained()

    def zero_grad(self, parameters: Collection[torch.Tensor]) -> None:
        """Drop the averages of these parameters' gradients. Local operation."""
        for averages in averages_of(parameters):
            averages.forget(parameters)

    # Hooks of an FSDPParamGroup.

    def before_reduction(self, group: Any) -> None:
        """Apply deferred factors to the gradients of a parameter group, before FSDP2 adds to them. Local operation."""
        shards = fsdp2_units.shards_of(group)
        for parameter in shards:
            apply_deferred_grad_scale(parameter, parameter.grad)
        _torch_autograd.run_before_accumulation_hooks(shards, self._hide)

    def after_reduction(self, unit: str, number: int, group: Any) -> None:
        """Hide the gradients of a unit's group with this number, which FSDP2 has just reduced, and start averages."""
        self._hide(*fsdp2_units.shards_of(group))
        if (state := self._state()) is not None and self.averages is not None:
            self.averages.early.reduced(state, unit, number, _fsdp2_gradients.reduction_event(group))

    def _hide(self, *parameters: torch.Tensor) -> None:
        for parameter in parameters:
            gradient = parameter.grad
            # Code that reads .grad between backward and step would get the gradient of one replica. The class
            # raises for it.
            if isinstance(gradient, DTensor) and not isinstance(gradient, UnaveragedGradient):
                hidden: Any = hide_unaveraged_grad(gradient)
                plan = plan_of(parameter)
                hidden.label = "" if plan is None else plan.label


def assign_main_gradients(mains: Iterable[torch.Tensor], gradients: Iterable[torch.Tensor | None]) -> None:
    """Set the gradient of each main parameter under both names that optimizers read."""
    for main, gradient in zip(mains, gradients, strict=True):
        main.grad = main.decoupled_grad = gradient  # type: ignore[missing-attribute]
