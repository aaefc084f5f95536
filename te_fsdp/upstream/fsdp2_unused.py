"""Gradients of parameters that a rank did not use in a backward, under FSDP2; torch 2.11 to 2.15."""

# [Note: unused parameters] FSDP2 reduces the gradients that exist. Ranks with different sets of gradients
# would run different collectives. So a parameter without a gradient participates with zeros. Flags that are
# reduced with the gradients record whether any rank used it.

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn

from te_fsdp.upstream.fsdp2_gradients import unreduced_gradients_of
from te_fsdp.upstream.fsdp2_hooks import current_stream
from te_fsdp.upstream.fsdp2_patches import add_reduction_listener
from te_fsdp.upstream.fsdp2_reduce import ReducedRecord
from te_fsdp.upstream.fsdp2_units import GROUP, record_of, replace_property
from te_fsdp.upstream.torch_autograd import resume_accumulation_hooks, suspend_accumulation_hooks
from te_fsdp.upstream.torch_dtensor import zero_gradient


def complete_gradients(group: Any) -> None:
    """Give all trained parameters of a group gradients of one dtype before it reduces. Local operation.

    ``.grad`` is ``None`` after a backward for parameters that no rank used (:class:`UseFlags`).
    """
    # It replaces FSDP2's ``set_reduce_scatter_unused_params``, which torch 2.11 does not have.
    info = group.mesh_info
    is_alone = info.shard_mesh_size == 1 and not hasattr(info, "replicate_mesh_size")
    if not is_alone:
        flags = group.__dict__[GROUP].flags = UseFlags()
        group.finalize_backward = functools.partial(_finalize, group, flags, group.finalize_backward)
    add_reduction_listener(group, before=functools.partial(_complete, not is_alone))


def _finalize(group: Any, flags: UseFlags, stock: Any, *args: Any) -> None:
    """Run in place of ``FSDPParamGroup.finalize_backward``. Local operation."""
    unused, reduced = group._all_gather_result, group._post_reduce_event
    if unused is not None and unused.all_gather_event is not None:
        # FSDP2 frees an all-gather that nothing used, as after an evaluation between two steps. Until torch 2.14 it
        # waits for it on a `torch.Stream`, which ignores the event. Later all-gathers would get the memory too early.
        current_stream(group).wait_event(unused.all_gather_event)
    stock(*args)
    if flags.undecided:
        if reduced is not None:  # torch 2.15 waits for the last reductions later
            reduced.wait()
        flags.decide(group)


# FSDP2 accumulates in the reduction dtype but keeps gradients of a first backward in the unsharded
# parameters' dtype. It also creates zeros for unused parameters in that dtype. If the two dtypes differ, it
# cannot reduce the gradients together (torch 2.15 uses one dtype itself).
def _complete(is_shared: bool, group: Any) -> None:
    """Create the missing gradients, and cast the others to the dtype of accumulated ones if there are some.

    ``is_shared``: whether other ranks reduce these gradients too, so that even the first ones must be complete.
    """
    flags, records = group.__dict__[GROUP].flags, group.fsdp_params
    accumulated = [a for m in records if (a := m.__dict__.get("unsharded_accumulated_grad")) is not None]
    dtype = accumulated[0].dtype if accumulated else None
    with torch._C.DisableTorchFunctionSubclass():
        trained = [
            (managed, parameter, parameter.grad)
            for managed in records
            if (parameter := managed.__dict__.get("_unsharded_param")) is not None and parameter.requires_grad
        ]
    for managed, parameter, gradient in trained:
        # A rank that reduces alone does not need the missing ones, which no step may see.
        if managed.unsharded_accumulated_grad is not None or not (is_shared if gradient is None else dtype):
            continue
        if gradient is None:
            gradient = zero_gradient(parameter)
            if flags is not None:
                flags.filled.add(managed)
        if dtype is None:
            parameter.grad = gradient
        else:
            managed.unsharded_accumulated_grad, parameter.grad = gradient.to(dtype), None


class UseFlags(ReducedRecord):
    """The number of ranks that used each parameter of a group, reduced in one collective with the gradients.

    Each rank sends 1 for a parameter that it used and 0 for one filled with zeros. FSDP2 reduces the flags as
    the gradient of one more record. A rank that used all parameters reads nothing. The others read the result after
    the backward, which waits for the device, and remove gradients of parameters that no rank used. Ranks agree: a
    parameter without any use has the flag 0 everywhere.

    Alternatives considered: a separate collective per step, as in DDP's ``find_unused_parameters``.

    Attributes:
        filled: Records that take part in the coming reduction with zeros.
        undecided: Records whose gradient may consist of zeros alone, with their flags so far.
    """

    def __init__(self) -> None:
        super().__init__()
        self.filled: set[Any] = set()
        self.undecided: dict[Any, list[torch.Tensor]] = {}
        self._dropped: set[Any] = set()
        self._all_used: tuple[Any, torch.Tensor] | None = None

    def reduce_with(self, group: Any, stock: Any, *args: Any) -> None:
        """Run a group's ``post_backward`` with the flags as an additional record."""
        records = group.fsdp_params
        trained = [m for m in records if hasattr(m, "_unsharded_param") and m._unsharded_param.requires_grad]
        # FSDP2 frees gradients while it reduces them, so no reference to one may remain here.
        dtype = next((g.dtype for managed in trained for g in unreduced_gradients_of(managed)), None)
        if dtype is None:
            stock(*args)
            return
        filled, self.filled = self.filled, set()
        self.unsharded_param.grad = self.of_rank(filled, trained, group, dtype)
        # Gradients that may consist of zeros alone after this reduction, with their earlier flags. There are none for
        # a missing gradient, even if one of an earlier microbatch was dropped.
        earlier: dict[Any, list[torch.Tensor]] = {
            m: [] if m.sharded_param.grad is None else self.undecided[m]
            for m in filled
            if m.sharded_param.grad is None or m in self.undecided
        }
        if group.reshard_after_backward:
            group._to_sharded()  # otherwise FSDP2 would call it with the record of the flags in the list
        # FSDP2 calls the post-accumulate gradient hooks of sharded parameters during the reduction, also for parameters
        # that no rank used. An optimizer step in a hook would then decay such a weight. With sums of HSDP, FSDP2
        # records only after the reduction that gradients are reduced.
        is_late = bool(filled) or group._partial_reduce_output is not None
        hooks = suspend_accumulation_hooks([m.sharded_param for m in trained] if is_late else ())
        group.fsdp_params, self.unsharded_grad_dtype = [*records, self], dtype
        order = group.__dict__.get("_reduce_scatter_param_indices")  # torch 2.15: of the records to reduce
        if order is not None:
            group._reduce_scatter_param_indices = [*order, len(records)]
        try:
            stock(*args)
        finally:
            group.fsdp_params = records
            if order is not None:
                group._reduce_scatter_param_indices = order
            resume_accumulation_hooks(list(hooks))
        reduced, self.sharded_param.grad = self.sharded_param.grad, None
        if reduced is None:
            return  # HSDP keeps the sums over dp_shard until it reduces them over dp_replicate
        for number, managed in enumerate(trained) if earlier or self.undecided else ():
            if managed in earlier:
                self.undecided[managed] = [*earlier[managed], reduced[number]]
            else:  # its gradient does not consist of zeros alone
                self.undecided.pop(managed, None)
        if hooks:
            if group._post_reduce_event is not None:
                group._post_reduce_event.wait()
            counts = zip(trained, reduced.tolist(), strict=True) if filled else ()
            unused = {id(m.sharded_param) for m, n in counts if n == 0 and m in filled}
            for parameter, calls in hooks:
                for call in () if id(parameter) in unused else calls.values():
                    call(parameter)

    def of_rank(self, filled: set[Any], trained: list[Any], group: Any, dtype: torch.dtype) -> torch.Tensor:
        """Return this rank's flags, of shape (ranks x parameters,), in the dtype of the gradients. Local operation."""
        ranks, count = group.mesh_info.shard_mesh_size, len(trained)
        self.sharded_size = self.padded_sharded_param_size = torch.Size((count,))
        # The reduce-scatter gives each rank one copy of the sums, because each part is the same.
        if filled:
            flags = [0.0 if managed in filled else 1.0 for managed in trained]
            return torch.tensor(flags * ranks, dtype=dtype, device=group.device)
        key = ranks, count, dtype
        if self._all_used is None or self._all_used[0] != key:
            self._all_used = key, torch.ones(ranks * count, dtype=dtype, device=group.device)
        return self._all_used[1]

    def decide(self, group: Any) -> None:
        """Remove the gradients of parameters that no rank used. Waits for the device."""
        undecided, self.undecided = self.undecided, {}
        flags = torch.stack([torch.stack(flags_of_ranks).sum() for flags_of_ranks in undecided.values()])
        if type(flags) is not torch.Tensor:
            return  # the model is planned, not trained
        if not (flags.is_cuda and torch.cuda.is_current_stream_capturing()):
            # The only wait for the device. A rank that used all parameters has nothing to decide.
            used = flags.tolist()
            self._dropped = {managed for managed, count in zip(undecided, used, strict=True) if count == 0}
        for managed in undecided:
            if managed in self._dropped:  # During graph capture, repeat the decision of the previous step.
                managed.sharded_param.grad = None

    def to_sharded_dtensor(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return this rank's copy of the reduced flags."""
        return tensor


def keep_zeros_unquantized(module: nn.Module, shard: torch.Tensor) -> None:
    """Let FSDP2 create zeros for an unused quantized weight without reading it (``shard``, a local tensor). Local."""
    # ``set_reduce_scatter_unused_params`` of torch 2.13 and later: the property calls ``torch.zeros_like``.
    managed, name = record_of(module, shard), "unsharded_zero_grad_data"
    stock = getattr(type(managed), name, None)
    if isinstance(stock, property) and stock.fget is not _unquantized_zeros:
        replace_property(managed, name, _unquantized_zeros)


def _unquantized_zeros(managed: Any) -> torch.Tensor:
    return managed._get_grad_inner_tensor(zero_gradient(managed._unsharded_param))
