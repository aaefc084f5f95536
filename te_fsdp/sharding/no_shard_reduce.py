"""Gradients of parameters that every data-parallel rank holds whole: added up over the ranks, exactly once each.

    backward     .grad <- what earlier backwards left unreduced; autograd adds to it
    its end      .grad <- .grad from before + the sum over the ranks of what is unreduced (or, told to wait, it is
                 put aside)

So ``.grad`` is the reduced gradient, or ``None``, whenever no backward runs, and a plain loop over microbatches adds up
reduced gradients: what was reduced is never reduced again.

All gradients of one dtype travel together, in the order of the parameters' names, which is the same on all ranks. A
parameter that had no gradient on this rank travels as zeros, with a flag, since another rank may have one.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor import DTensor

from te_fsdp import _torch
from te_fsdp.binding import binding_of
from te_fsdp.errors import OrderError, message
from te_fsdp.sharding.agree import check_whole
from te_fsdp.sharding.comm import comm_of
from te_fsdp.sharding.no_shard_bucket import Part, Ranks, pack
from te_fsdp.sharding.outer_chunks import set_copies
from te_fsdp.sharding.state import mark, sharding_state

if TYPE_CHECKING:
    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh

    from te_fsdp.mesh import Meshes
    from te_fsdp.sharding.no_shard import Exempt, NoShard

__all__ = ["ReplicatedGradients"]


@dataclass(eq=False)
class _Slot:
    """One exempt parameter and the parts of its gradient.

    Attributes:
        exempt: The parameter by its owner.
        ranks: Over whom its gradient is added up.
        partial: Whether each tp rank computes a part of its gradient.
        hooked: The parameter whose gradients are watched.
        handles: Its hooks.
        reduced: ``.grad`` from before, while a backward runs.
        unreduced: What is waiting for its reduction.
    """

    exempt: Exempt
    ranks: Ranks
    partial: bool
    hooked: weakref.ref[torch.Tensor] | None = None
    handles: list[Any] = field(default_factory=list)
    reduced: torch.Tensor | None = None
    unreduced: torch.Tensor | None = None


class ReplicatedGradients:
    """Reduces the gradients of a model's exempt parameters at the end of each backward.

    Args:
        model: The root. The reduction is bound to the gradients of what its forward returns.
        plan: What is exempt.
        meshes: The job's meshes.
        grads_dtype: Accumulate gradients in this dtype; ``None``: the parameters' own.
        average: Divide gradients by the number of data-parallel ranks; otherwise they are sums.
    """

    def __init__(
        self,
        model: nn.Module,
        plan: NoShard,
        meshes: Meshes,
        *,
        grads_dtype: torch.dtype | None = None,
        average: bool = True,
    ) -> None:
        dense, experts = Ranks.dense(meshes), Ranks.experts(meshes)
        if not average:
            dense, experts = replace(dense, divisor=1), replace(experts, divisor=1)
        self._slots = []
        for exempt in (exempt.bound() for exempt in plan.parameters):
            binding = binding_of(exempt.module)
            rule = binding.rules.get(exempt.name) if binding is not None else None
            is_expert = getattr(binding, "ep_mesh", None) is not None
            partial = rule is not None and rule.partial_grad and meshes.size("tp") > 1
            self._slots.append(_Slot(exempt, experts if is_expert else dense, partial))
        self._model, self._meshes, self._grads_dtype = weakref.ref(model), meshes, grads_dtype
        self._sync = True
        self._inside: list[_Slot] = []
        self._running = False
        self.attach()
        model.register_forward_pre_hook(self._before_forward)
        model.register_forward_hook(self._after_forward)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        raise OrderError(
            message(
                "deepcopy of a model with no_shard parameters after fully_shard",
                why="The copy's gradients would be reduced together with the original's",
                fix="copy the model before te_fsdp.fully_shard",
            )
        )

    # ------------------------------------------------------------------------------------- what the schedule asks

    @property
    def pending(self) -> list[str]:
        """Names of the parameters with gradients that are not reduced yet."""
        return [
            slot.exempt.label for slot in self._slots if slot.unreduced is not None or slot in self._inside
        ]

    @property
    def interrupted(self) -> bool:
        """Whether a backward has raised before its end; what it gave is dropped by the next forward."""
        return self._running and not _torch.in_backward()

    def recover(self) -> None:
        """Drop what a backward that has raised gave; ``.grad`` is what it was before."""
        if self.interrupted:
            self._leave()

    def set_gradient_sync(self, enabled: bool) -> None:
        """Whether the backwards to come reduce gradients when they end; otherwise they wait."""
        self._sync = enabled

    @torch.no_grad()
    def reduce(self) -> None:
        """Add up over the ranks what is waiting, and add it to ``.grad``.

        Collective over data parallel: one all-reduce per dtype and group of ranks (and one over tp for gradients
        that tp ranks hold parts of), one more for each tensor larger than a bucket. All ranks must call it.
        """
        model = self._model()
        comm = comm_of(model) if model is not None else None
        trained = [slot for slot in self._slots if slot.exempt.parameter.requires_grad]
        buckets = pack([self._part(slot) for slot in trained], self._meshes.tp)
        for slot in trained:
            slot.unreduced = None  # the buckets have them, and free them one by one
        for bucket in buckets:
            with torch.profiler.record_function("te_fsdp::reduce_no_shard"):
                for slot, value in bucket.reduce(comm):
                    _add(slot.exempt.parameter, value)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget all gradients, those that wait included."""
        self._leave()
        for slot in self._slots:
            slot.unreduced = None
            parameter = slot.exempt.parameter
            if set_to_none:
                parameter.grad = None
            elif parameter.grad is not None:
                parameter.grad.detach_().zero_()

    def attach(self) -> None:
        """Watch the gradients of the parameters there are now: loading and initialisation replace them. Local."""
        replaced = False
        for slot in self._slots:
            parameter = slot.exempt.parameter
            if not parameter.requires_grad or (slot.hooked is not None and slot.hooked() is parameter):
                continue
            for handle in slot.handles:
                handle.remove()
            slot.hooked, replaced = weakref.ref(parameter), True
            if slot.exempt.cut_state and slot.ranks.mesh is not None:
                set_copies(parameter, _holders(parameter, slot.ranks.mesh), reduced=True)
            if self._grads_dtype is not None and parameter.dtype != self._grads_dtype:
                parameter.grad_dtype = self._grads_dtype
            slot.handles = [parameter.register_hook(functools.partial(self._arrive, slot))]
        model = self._model()
        state = sharding_state(model) if replaced and model is not None else None
        if state is not None:
            mark(state)  # optimizer hooks know a model by its parameters

    def renewed(self) -> None:
        """Take note of parameters that initialisation has replaced, and check that all ranks hold the same.

        Collective over the world.

        Raises:
            InitError: They do not.
        """
        self.attach()
        check_whole(
            ((e.label, e.module, e.name) for e in (slot.exempt for slot in self._slots)), self._meshes
        )

    # -------------------------------------------------------------------------------------------------- the hooks

    def _before_forward(self, module: nn.Module, inputs: Any) -> None:
        self.attach()
        self.recover()

    def _after_forward(self, module: nn.Module, inputs: Any, output: Any) -> None:
        """Every rank that runs backward shall come to the reduction, those without any such gradient included."""
        if torch.is_grad_enabled():
            for tensor in _tensors(output):
                if tensor.requires_grad:
                    tensor.register_hook(self._begin)

    def _begin(self, gradient: torch.Tensor) -> None:
        if not self._running:
            self._running = True
            _torch.at_end_of_backward(self._end)

    def _arrive(self, slot: _Slot, gradient: torch.Tensor) -> None:
        """A gradient is about to be added to ``.grad``: let it meet those of its kind."""
        self._begin(gradient)
        if slot not in self._inside:
            parameter = slot.exempt.parameter
            slot.reduced, parameter.grad = parameter.grad, slot.unreduced
            slot.unreduced = None
            self._inside.append(slot)

    def _end(self) -> None:
        self._leave(keep=True)
        if self._sync:
            self.reduce()

    def _leave(self, *, keep: bool = False) -> None:
        """Put ``.grad`` from before back; what the backward gave waits, or is forgotten (the backward raised).

        Gradients that were cleared since then stay cleared.
        """
        for slot in self._inside:
            parameter = slot.exempt.parameter
            slot.unreduced = parameter.grad if keep else None
            if keep or parameter.grad is not None:
                parameter.grad = slot.reduced
            slot.reduced = None
        self._inside.clear()
        self._running = False

    def _part(self, slot: _Slot) -> Part:
        parameter = slot.exempt.parameter
        local = _torch.local_of(parameter)
        waiting = None if slot.unreduced is None else _torch.local_of(slot.unreduced)
        dtype = self._grads_dtype or parameter.dtype
        return Part(slot, waiting, local.shape, local.device, dtype, slot.ranks, slot.partial)


def _holders(parameter: torch.Tensor, mesh: DeviceMesh) -> DeviceMesh:
    """The mesh of a parameter's optimizer state that is cut over data parallel: that axis, then the parameter's own."""
    if not isinstance(parameter, DTensor):
        return mesh
    return _torch.concatenated_meshes(mesh, parameter.device_mesh)


def _add(parameter: torch.Tensor, value: torch.Tensor) -> None:
    """Add a reduced local gradient to a parameter's."""
    if parameter.grad is not None:
        _torch.local_of(parameter.grad).add_(value)
    elif isinstance(parameter, DTensor):
        parameter.grad = _torch.dtensor(value, _torch.spec_of(parameter))
    else:
        parameter.grad = value


def _tensors(output: Any) -> Iterator[torch.Tensor]:
    """The tensors in what a forward returned."""
    if isinstance(output, torch.Tensor):
        yield output
    else:
        inner: Iterable[Any] = ()
        if isinstance(output, dict):
            inner = output.values()
        elif isinstance(output, (list, tuple)):
            inner = output
        elif hasattr(type(output), "__dataclass_fields__"):
            inner = vars(output).values()
        for item in inner:
            yield from _tensors(item)
