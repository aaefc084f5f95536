"""Reduction of all gradients of an FSDP2 unit as one gradient."""

# [Note: one gradient] FSDP2 runs six loops over a unit's parameters in each reduction. te_fsdp passes it one record in
# place of all, so that its loops run once:
#
#     copies in     FSDP2's kernel copies, and casts, all gradients into the input (``copy_in``)
#     collectives   FSDP2's, of the same memory on the same streams, then its casts
#     copies out    shards get views of the output as gradients, or add them (``to_sharded_dtensor``)
#
# FSDP2 itself reduces gradients along dimensions other than 0, of several dtypes, accumulated without a reduction,
# offloaded to the CPU, not yet all-reduced, or with hooks on the shards. Private names of FSDP2 (``FSDPParam``,
# ``foreach_reduce``), checked with torch 2.11 to 2.15.

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch.distributed.fsdp._fully_shard import _fsdp_collectives
from torch.distributed.tensor import DTensor, Shard

from te_fsdp.upstream.torch_dtensor import new_dtensor

#: The function of torch 2.15 that orders the elements of gradients; ``None`` before.
_STOCK_ORDER = getattr(_fsdp_collectives, "_default_reduce_scatter_input_fn", None)

_NO_DTYPES = (None, None)


class ReducedRecord:
    """A record (``FSDPParam``) without a parameter, of which FSDP2 reduces a gradient."""

    fsdp_placement, offload_to_cpu, is_dtensor = Shard(0), False, False
    contiguous_sharded_stride = (1,)
    unsharded_accumulated_grad = sharded_grad_dtype = grad_offload_event = unsharded_grad_dtype = None
    # Searches for a module's record during the reduction, as by a step in a gradient hook, read the owners.
    _module_info = SimpleNamespace(module=None, param_name="", shared_modules=(), shared_param_names=())

    def __init__(self) -> None:
        # FSDP2 reads the unsharded and the sharded parameter of a record, and their gradients.
        self._unsharded_param = self.unsharded_param = SimpleNamespace(grad=None)
        self.sharded_param = SimpleNamespace(grad=None, requires_grad=True)
        self.sharded_size = self.padded_sharded_param_size = self._orig_size = torch.Size((0,))

    @property
    def unsharded_grad_data(self) -> Any:
        """Return the unsharded local gradient, which FSDP2 reads to reduce it."""
        return self.unsharded_param.grad

    def accumulate_unsharded_grad_if_needed(self) -> None:
        """Do nothing, because FSDP2 has no gradient of an earlier backward to add."""

    def to_sharded(self) -> None:
        """Do nothing, because FSDP2 has no all-gathered parameter to reshard."""


class _Gradients:
    """List of local gradients that FSDP2 reduces as if it were one 1-D gradient."""

    def __init__(self, tensors: list[torch.Tensor], numel: int) -> None:
        self.tensors, self.dtype, self._size = tensors, tensors[0].dtype, torch.Size((numel,))

    def size(self) -> torch.Size:
        """Return the size of one 1-D tensor with all gradients and their padding."""
        return self._size


def copy_in(gradients: list[Any], output: torch.Tensor, ranks: int) -> None:
    """Run in place of ``foreach_reduce_scatter_copy_in``: copy gradients to the input of a reduce-scatter. Local."""
    if type(gradients[0]) is not _Gradients:
        _fsdp_collectives.foreach_reduce_scatter_copy_in(gradients, output, ranks)
        return
    tensors = gradients[0].tensors
    torch._chunk_cat(tensors, dim=0, num_chunks=ranks, out=output.view(ranks, -1))
    tensors.clear()  # frees gradients


class _Layout(NamedTuple):
    """Places of the gradients of some parameters in the output of a reduction."""

    records: list[Any]  #: FSDP2's records of the parameters
    #: (record, its sharded size, stride of its shard, offset in elements) of each parameter
    places: list[tuple[Any, torch.Size, tuple[int, ...], int]]
    numel: int  #: Number of elements of a rank's part, including padding


class OneGradient(ReducedRecord):
    """Record that replaces the records of all trained parameters of a group in a reduction."""

    def __init__(self) -> None:
        super().__init__()
        self._layout: _Layout | None = None
        #: The records that it replaces in this reduction, the one of use flags included
        self.members: list[Any] = []

    def reduce(self, group: Any, flags: Any, stock: Callable[..., None], args: tuple[Any, ...]) -> bool:
        """Run a group's ``post_backward`` with one record. Return whether it ran.

        ``flags`` are the group's :class:`te_fsdp.upstream.fsdp2_unused.UseFlags`, or ``None``. Collectives of FSDP2.
        """
        if (
            not group.all_reduce_grads
            or group._partial_reduce_output is not None
            or getattr(group, "_prepare_reduce_scatter_inputs", None) is not _STOCK_ORDER
            or (flags is not None and (flags.filled or flags.undecided))
        ):
            return False
        records, tensors = list[Any](), list[torch.Tensor]()
        if not _find_gradients(group, records, tensors):
            return False
        layout = self._layout
        if layout is None or layout.records != records:
            layout = self._layout = _layout_of(records)
        order = group.__dict__.get("_reduce_scatter_param_indices")  # torch 2.15: of the records to reduce
        dtypes = {_NO_DTYPES}
        if order is not None:
            dtypes = {(managed.unsharded_grad_dtype, managed.sharded_grad_dtype) for managed in records}
        if len(dtypes) > 1 or not layout.numel:
            return False
        ((self.unsharded_grad_dtype, self.sharded_grad_dtype),) = dtypes
        ranks, count = group.mesh_info.shard_mesh_size, layout.numel
        self.members = records
        if flags is not None:
            tensors.append(flags.of_rank(set(), records, group, tensors[0].dtype))
            self.members, count = [*records, flags], count + len(records)
        with torch._C.DisableTorchFunctionSubclass():
            for managed in records:
                managed._unsharded_param.grad = None
        if group.reshard_after_backward:
            group._to_sharded()  # otherwise FSDP2 would call it with this record in the list
        self.unsharded_param.grad = _Gradients(tensors, count * ranks)
        self.sharded_size = self.padded_sharded_param_size = torch.Size((count,))
        stock_records, group.fsdp_params = group.fsdp_params, [self]
        if order is not None:
            group._reduce_scatter_param_indices = [0]
        try:
            stock(*args)
        finally:
            group.fsdp_params, self.sharded_param.grad = stock_records, None
            if order is not None:
                group._reduce_scatter_param_indices = order
        return True

    def to_sharded_dtensor(self, reduced: torch.Tensor) -> torch.Tensor:
        """Set or add the gradients of the shards: views of a rank's part of the output, on the current stream."""
        assert self._layout is not None
        start, dtype = reduced.storage_offset(), reduced.dtype
        with torch._C.DisableTorchFunctionSubclass():
            for managed, size, stride, offset in self._layout.places:
                part, shard = torch.as_strided(reduced, size, stride, start + offset), managed.sharded_param
                if (earlier := shard.grad) is not None:
                    earlier._local_tensor += part
                    continue
                # torch 2.15: the specs that FSDP2 has made
                specs = managed.__dict__.get("_sharding_spec_by_dtype")
                spec = managed._sharding_spec if specs is None else specs.get(dtype)
                if spec is None or "to_sharded_dtensor" in managed.__dict__:
                    shard.grad = managed.to_sharded_dtensor(part)
                else:
                    shard.grad = new_dtensor(DTensor, part, spec, requires_grad=False)
        return reduced


def _find_gradients(group: Any, records: list[Any], tensors: list[torch.Tensor]) -> bool:
    """Add the trained records of a group and their local gradients to lists. Return whether FSDP2 would copy these."""
    ordered = group.fsdp_params
    if (order := group.__dict__.get("_reduce_scatter_param_indices")) is not None:  # torch 2.15
        ordered = [ordered[index] for index in order]
    with torch._C.DisableTorchFunctionSubclass():
        for managed in ordered:
            attrs, shard = managed.__dict__, managed.sharded_param
            parameter = attrs.get("_unsharded_param")
            if parameter is None or attrs.get("unsharded_accumulated_grad") is not None:
                return False
            gradient = parameter.grad
            if (gradient is None) is parameter.requires_grad:
                return False
            if gradient is None:
                continue
            if managed.is_dtensor:
                if (
                    not isinstance(gradient, DTensor)
                    or gradient._spec.placements != parameter._spec.placements
                ):
                    return False  # FSDP2 redistributes it
                gradient = gradient._local_tensor
            if (
                type(gradient) is not torch.Tensor
                or (tensors and gradient.dtype != tensors[0].dtype)
                or managed.fsdp_placement.dim
                or managed.offload_to_cpu
                or shard._post_accumulate_grad_hooks
                or not (shard.grad is None or isinstance(shard.grad, DTensor))
            ):
                return False
            records.append(managed)
            tensors.append(gradient)
    return bool(tensors)


def _layout_of(records: list[Any]) -> _Layout:
    """Return the places of the gradients of records, whose sizes FSDP2 never changes."""
    places, numel = list[tuple[Any, torch.Size, tuple[int, ...], int]](), 0
    for managed in records:
        places.append((managed, managed.sharded_size, managed.contiguous_sharded_stride, numel))
        numel += managed.padded_sharded_param_size.numel()
    return _Layout(records, places, numel)
