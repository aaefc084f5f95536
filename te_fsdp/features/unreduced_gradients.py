"""Markers in ``.grad`` of parameters whose gradients are not reduced yet."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, NoReturn

import torch
from torch.distributed.tensor import DTensor

from te_fsdp.apply_fully_shard import Setup
from te_fsdp.component import Component
from te_fsdp.errors import OrderError, shorten
from te_fsdp.features.unreadable_gradients import (
    UnreadableGradient,
    UnreadableShard,
    reads_values,
    tensor_arguments,
)
from te_fsdp.kept_weights import expose_sharded_params, expose_unsharded_params
from te_fsdp.layout import SyncMode
from te_fsdp.sharded_model import ShardedModel, record_unsharded_params
from te_fsdp.upstream import (
    fsdp2_gradients as _fsdp2_gradients,
    fsdp2_patches as _fsdp2_patches,
    fsdp2_state as _fsdp2,
    fsdp2_units,
    torch_autograd as _torch_autograd,
    torch_dtensor as _torch,
)


# [Note: markers] FSDP2 and ``replicated_gradients.py`` store an unreduced gradient outside ``.grad`` of the
# optimizer's parameter. In one process that gradient would be in ``.grad``. So every way to clear ``.grad`` must drop
# it: ``optimizer.zero_grad()``, ``zero_grad()`` of any module, or a loop over parameters.
#
# A backward that leaves a gradient unreduced sets ``.grad`` to an empty marker of the
# gradient's shape, unless ``.grad`` has a reduced gradient already. A marker refuses to be read, since its
# norm would be wrong. It is removed before the reduction. If ``.grad`` is ``None`` by then, the user has
# cleared it. The unreduced gradient is dropped at the start of the next forward, backward, reduction or step.
class _Unreduced(UnreadableGradient):
    """Operations of markers ([Note: markers])."""

    __slots__ = ()
    name_of: Callable[[], str] | None = None  #: Returns the name of the parameter
    is_zeroed = False  #: Whether it was filled with zeros, which clears the gradient

    @staticmethod
    def refuse(gradient: Any, use: str) -> NoReturn:
        """Raise :class:`OrderError` for an operation that reads a gradient before its reduction."""
        name_of = getattr(gradient, "name_of", None)
        name = "" if name_of is None else name_of()
        raise OrderError(
            f"{use} on the gradient of {name or 'a parameter'}",
            expected="a gradient that is reduced over the data-parallel ranks",
            got="an unreduced gradient, after a backward that was not the last one of its step",
            why="Each rank has the gradient of its own microbatches only",
            fix="read it after the last microbatch, or call te_fsdp.finish_grad_reduce(model) first; "
            "zero_grad() and .grad = None drop it",
        )

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run operations that read no values, record that a marker was zeroed, and raise for all others."""
        name, is_read = reads_values(func)
        tensors = tensor_arguments(args)
        if name in ("zero_", "_foreach_zero_"):
            for marker in tensors:
                if isinstance(marker, _Unreduced):
                    marker.is_zeroed = True  # type: ignore[missing-attribute]
            unmarked = [item for item in tensors if not is_marker(item)]
            if unmarked:
                func(unmarked, **(kwargs or {}))
            return args[0]
        # `p.grad.detach_().zero_()` clears a gradient: it must be this marker that is set to zero, not a
        # copy.
        if name in ("detach", "detach_"):
            return args[0]
        # torch.compile reads metadata of .grad for each parameter that a forward uses, but not its values.
        if is_read and not _torch_autograd.is_compiling():
            cls.refuse(next(filter(is_marker, tensors), None), name)
        return _torch.plain_results(func, types, args, kwargs or {})


class UnreducedShard(_Unreduced, UnreadableShard):
    """Marker in ``.grad`` of a DTensor parameter with an unreduced gradient."""

    __slots__ = ()


class UnreducedTensor(_Unreduced, torch.Tensor):
    """Marker in ``.grad`` of a plain parameter with an unreduced gradient."""


def is_marker(gradient: torch.Tensor | None) -> bool:
    """Return whether ``.grad`` is a marker of an unreduced gradient."""
    return isinstance(gradient, _Unreduced)


class _Marked(NamedTuple):
    parameter: torch.Tensor
    source: Any  #: ``FSDPParam``, or ``Slot`` of ``replicated_gradients.py``
    group: Any  #: ``FSDPParamGroup``, or ``None``
    owner: Component | None  #: The component that stores the gradient, if FSDP2 does not
    seen: torch.Tensor  #: ``.grad`` when the parameter was marked

    @property
    def is_cleared(self) -> bool:
        """Return whether the user has cleared ``.grad``."""
        return self.parameter.grad is None or getattr(self.seen, "is_zeroed", False)


class UnreducedGradients(Component):
    """Markers of one model ([Note: markers])."""

    def __init__(self, state: ShardedModel) -> None:
        self._state = weakref.ref(state)
        self._marked: dict[int, _Marked] = {}
        self._zeros: dict[tuple[torch.dtype, torch.device], torch.Tensor] = {}
        self.groups: list[Any] = []  #: The parameter groups of FSDP2
        #: A parameter to whose ``.grad`` the last backward added. If this one adds again, the others are not checked.
        self.added: torch.Tensor | None = None
        self.backward = -1  #: Id of the last backward that has started
        self.checked = -1  #: Id of the last backward that checks have seen (``checks/backward.py``)
        self.progress: Any = None  #: Numbers of backwards and steps (``checks/progress.py``)
        # Sharded and unsharded parameters, and .grad of the unsharded one after the forward.
        self._unsharded: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []

    def mark(
        self, parameter: torch.Tensor, source: Any, group: Any = None, owner: Component | None = None
    ) -> None:
        """Mark a parameter with an unreduced gradient. Local operation."""
        # A later microbatch of the same step: `seen` stays the `.grad` of the first one, which shows whether it was
        # cleared.
        if id(parameter) in self._marked:
            return
        self._marked[id(parameter)] = _Marked(parameter, source, group, owner, self._set_marker(parameter))

    def _set_marker(self, parameter: torch.Tensor) -> torch.Tensor:
        """Return ``.grad``, which becomes a marker if it is ``None``."""
        if parameter.grad is not None:
            return parameter.grad
        local = _torch.local_of(parameter)
        kind = getattr(parameter, "grad_dtype", None) or parameter.dtype, local.device
        zero = self._zeros.get(kind)
        if zero is None:
            zero = self._zeros[kind] = torch.zeros((), dtype=kind[0], device=kind[1])
        # Not `expand`: its result is a view of a tensor of 0 dimensions, which torch 2.11 cannot trace.
        empty = zero.new_empty(0).set_(zero.untyped_storage(), 0, local.shape, (0,) * local.dim())
        # Strides of 0: a marker has the shape of the gradient, but the memory of one number.
        if isinstance(parameter, DTensor):
            marker: Any = _torch.placed_like(empty, parameter)
            marker.__class__ = UnreducedShard
        else:
            marker = empty.as_subclass(UnreducedTensor)
        marker.name_of = functools.partial(self._name, id(parameter))
        parameter.grad = marker
        return marker

    def names(self) -> dict[int, str]:
        """Return the names of sharded parameters by ``id``, also while units are unsharded."""
        state = self._state()
        if state is None:
            return {}
        for _, unit in state.gathered():
            record_unsharded_params(unit)
        return state.names()

    def _name(self, key: int) -> str:
        return self.names().get(key, "a parameter")

    def unmark(self, parameters: Iterable[torch.Tensor]) -> None:
        """Remove the markers of parameters whose gradients are reduced or dropped next. Local operation."""
        for parameter in parameters if self._marked else ():
            marked = self._marked.pop(id(parameter), None)
            if marked is not None and is_marker(parameter.grad):
                parameter.grad = None

    def after_forward(self, trained: Sequence[torch.Tensor]) -> None:
        """Drop cleared gradients at the start of each backward of these outputs. Local operation."""
        self.mark_unsharded()
        # The autograd graph keeps the hook, and must not keep this component and its model alive.
        reference = weakref.ref(self)

        def start(gradient: torch.Tensor) -> None:
            component = reference()
            if component is not None and component.backward != _torch.backward_id():
                component.backward = _torch.backward_id()
                component.drop_cleared()

        # A hook of the output runs before any hook of a parameter. Outputs may be several tensors, so the
        # hook runs several times per backward, and only the first one has an effect.
        for tensor in trained:
            tensor.register_hook(start)

    def drop_unreduced(self) -> None:
        """Remove all markers. Local operation."""
        self.unmark([marked.parameter for marked in self._marked.values()])

    def mark_unsharded(self) -> None:
        """Mark unsharded parameters after a forward, if their sharded parameters have gradients. Local operation."""
        # ``model.parameters()`` returns the unsharded parameters between forward and backward. Clearing ``.grad`` of
        # one clears ``.grad`` of its sharded parameter. FSDP2 and autograd do not see these markers.
        self.unmark_unsharded()
        for sharded, unsharded in _fsdp2_gradients.sharded_unsharded_pairs(self.groups):
            if unsharded is None or sharded.grad is None:
                continue
            self._unsharded.append((sharded, unsharded, self._set_marker(unsharded)))

    def unmark_unsharded(self) -> None:
        """Undo :meth:`mark_unsharded`, and clear the gradients whose markers were cleared. Local operation."""
        marked, self._unsharded = self._unsharded, []
        for sharded, unsharded, marker in marked:
            if unsharded.grad is None or getattr(marker, "is_zeroed", False):
                sharded.grad = None
            if is_marker(unsharded.grad):
                unsharded.grad = None

    before_recovery = unmark_unsharded

    def drop_cleared(self) -> None:
        """Drop the unreduced gradients of parameters whose ``.grad`` was cleared. Local operation.

        Raises OrderError if only some gradients of a unit were cleared after HSDP reduced the unit over ``dp_shard``.
        """
        if self._unsharded:
            self.unmark_unsharded()
        cleared = [marked for marked in self._marked.values() if marked.is_cleared] if self._marked else []
        if not cleared:
            return
        keys = {id(marked.parameter) for marked in cleared}
        # All units are checked before the first gradient is dropped, so an error changes nothing.
        for marked in cleared:
            if marked.group is None or not _fsdp2_gradients.has_partial_reduction(marked.group):
                continue
            uncleared = [
                self._name(id(other.parameter))
                for key, other in self._marked.items()
                if other.group is marked.group and key not in keys
            ]
            if uncleared:
                raise OrderError(
                    f"{self._name(id(marked.parameter))}: .grad was cleared before the gradient was fully reduced",
                    expected="all gradients of the unit cleared",
                    got=f"gradients of the same unit that were not cleared: {shorten(uncleared, 3)}",
                    why="HSDP stores the gradients that are reduced over dp_shard in one buffer for the unit",
                    fix="call te_fsdp.zero_grad(model), which clears all gradients",
                )
        for marked in cleared:
            if marked.group is None:
                marked.source.unreduced = None
            else:
                _fsdp2_gradients.drop_unreduced_gradient(marked.source, marked.group)
        self.unmark([marked.parameter for marked in cleared])
        # A component may keep more than the gradients themselves. It drops that when its last gradient is cleared.
        owners = [marked.owner for marked in self._marked.values()]
        for owner in {marked.owner for marked in cleared}:
            if owner is not None and owner not in owners:
                owner.drop_unreduced()

    # Hooks of an FSDPParamGroup.

    def before_backward(self, name: str) -> None:
        """Prepare the unsharded parameters of a unit for backward. Local operation."""
        # The output of an inner unit that ran alone has no hook that drops cleared gradients.
        if self._unsharded or (self._marked and self.backward != _torch.backward_id()):
            self.backward = _torch.backward_id()
            self.drop_cleared()
        state = self._state()
        if state is not None and name in state.unsharded.exposed:  # the backward of another forward has ended
            expose_unsharded_params(state, name, state.modules[name])

    def before_reduction(self, group: Any) -> None:
        """Remove the markers of a parameter group before its reduction. Local operation."""
        if self._marked:
            self.unmark(fsdp2_units.shards_of(group))

    def after_backward(self, name: str, group: Any) -> None:
        """Mark unreduced gradients of a group, and expose its sharded parameters. Local operation."""
        if not _fsdp2_gradients.reduces_over_all_axes(group):
            for managed in _fsdp2_gradients.group_params_with_unreduced_gradients(group):
                self.mark(_fsdp2.sharded_param_of(managed), managed, group)
        state = self._state()
        if state is None:
            return
        state.sync.completed = state.sync.mode is SyncMode.LAST
        if _fsdp2_gradients.is_group_unsharded(group):
            expose_sharded_params(state, name)


def watch_unreduced_gradients(setup: Setup) -> None:
    """Mark gradients that backwards of the model leave unreduced, from now on. Local operation."""
    state = setup.state
    marks = UnreducedGradients(state)
    state.components.attach(marks)
    for name, groups in setup.groups.items():
        for group in groups:
            marks.groups.append(group)
            _fsdp2_patches.add_reduction_listener(
                group, before=marks.before_reduction, ended=functools.partial(marks.after_backward, name)
            )
            fsdp2_units.call_before(group, "pre_backward", functools.partial(marks.before_backward, name))
