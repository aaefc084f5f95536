"""Do what FSDP2 does for each parameter of a unit in one loop, as long as nothing changes between two steps.

FSDP2 calls ten functions for each parameter and pass to install the gathered one and to put the shard back, and
te_fsdp's modules check each assignment. Both are the same objects in every pass. So one loop over the unit compares
them with those of the pass before, and assigns:

    same shard, same gathered parameter, no new attribute on either    module._parameters[name] = ...
    anything else                                                      setattr, as FSDP2 does

Private names of FSDP2 (``FSDPParamGroup._to_unsharded``, ``_to_sharded``), checked on torch 2.11 to 2.15.
"""

from __future__ import annotations

import functools
import inspect
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias

import torch
from torch.distributed.fsdp._fully_shard._fsdp_param import ShardedState
from torch.distributed.tensor import DTensor

from te_fsdp.upstream.fsdp2_units import owners_of
from te_fsdp.upstream.torch_dtensor import dtensor, new_dtensor, spec_of, with_dtype

if TYPE_CHECKING:
    from torch.distributed.tensor.placement_types import Placement

_SHARDED, _UNSHARDED = ShardedState.SHARDED, ShardedState.UNSHARDED


class Pair(Protocol):
    """The two forms of a parameter that a module knows (:class:`te_fsdp.records.ShardedUnshardedPair`)."""

    shard: Any
    gathered: Any
    release: Callable[[], None] | None
    is_aside: bool


class _Place(NamedTuple):
    """Where a parameter of a unit is registered."""

    managed: Any  #: FSDP2's record of it
    owner: torch.nn.Module
    own: dict[str, Any]  #: ``owner._parameters``
    name: str
    pair: Pair | None  #: What its module knows of it; ``None`` for a module that looks at no assignment


class _Places(NamedTuple):
    """All places of a parameter group."""

    records: list[Any]  #: ``FSDPParamGroup.fsdp_params``
    places: list[_Place]


#: Of a module and the name of a parameter: what it knows of the two forms, ``None`` where it looks at no assignment.
#: One that knows neither looks at every assignment; raises ``KeyError`` before the first gather.
PairOf: TypeAlias = "Callable[[torch.nn.Module, str], Pair | None]"


def swap_at_once(group: Any, pair_of: PairOf, record: str) -> None:
    """Let a parameter group swap its parameters in one loop from its second gather on. Local operation.

    ``record`` is the attribute that both forms of a parameter share.
    """
    known: list[_Places] = []
    group._to_unsharded = functools.partial(_to_unsharded, group, group._to_unsharded, known, pair_of, record)
    group._to_sharded = functools.partial(_to_sharded, group, group._to_sharded, known)


def _find_places(group: Any, pair_of: PairOf) -> list[_Places]:
    """One entry once every module knows both forms of its parameters, else none."""
    try:
        places = [
            _Place(managed, owner, owner._parameters, name, pair_of(owner, name))
            for managed in group.fsdp_params
            for owner, name in owners_of(managed)
        ]
    except KeyError:
        return []
    return [_Places(group.fsdp_params, places)]


def _to_unsharded(
    group: Any, stock: Callable[[], None], known: list[_Places], pair_of: PairOf, record: str
) -> None:
    """``FSDPParamGroup._to_unsharded``. Local operation."""
    if not known or known[0].records is not group.fsdp_params or group._sharded_state is not _SHARDED:
        stock()
        if not known:
            known[:] = _find_places(group, pair_of)
        return
    with torch._C.DisableTorchFunctionSubclass():  # subclasses of DTensor answer for each attribute
        for managed, owner, own, name, pair in known[0].places:
            shard, whole = managed.sharded_param, managed._unsharded_param
            if shard.requires_grad is not whole.requires_grad:
                whole.requires_grad_(shard.requires_grad)
            if pair is None:
                own[name] = whole
            elif own.get(name) is shard is pair.shard and whole is pair.gathered:
                have, wanted = whole.__dict__, shard.__dict__
                if wanted.keys() <= have.keys() and have.get(record) is wanted.get(record):
                    own[name] = whole
                else:
                    setattr(owner, name, whole)
            else:
                setattr(owner, name, whole)
            managed.sharded_state = _UNSHARDED
    group._sharded_state = _UNSHARDED


def _to_sharded(group: Any, stock: Callable[[], None], known: list[_Places]) -> None:
    """``FSDPParamGroup._to_sharded``. Local operation."""
    if group._sharded_state is _SHARDED:
        return
    if not known or known[0].records is not group.fsdp_params or group._sharded_state is not _UNSHARDED:
        stock()
        return
    for managed, owner, own, name, pair in known[0].places:
        shard, whole = managed.sharded_param, managed._unsharded_param
        if pair is None:
            own[name] = shard
        elif (
            own.get(name) is whole is pair.gathered
            and shard is pair.shard
            and not pair.is_aside
            # What modules carry back to a shard hangs on DTensors alone.
            and (not isinstance(whole, DTensor) or whole.__dict__.keys() <= shard.__dict__.keys())
        ):
            if pair.release is not None:
                pair.release()
            own[name] = shard
        else:
            setattr(owner, name, shard)
    for managed in group.fsdp_params:
        if "free_unsharded_param" in managed.__dict__:
            managed.free_unsharded_param()
        else:
            for tensor in (*managed.all_gather_outputs, *managed._unsharded_inner_tensors):
                storage = tensor.untyped_storage()
                if storage.nbytes():
                    storage.resize_(0)
        managed.sharded_state = _SHARDED
    group._sharded_state = _SHARDED


# --------------------------------------------------------------------------------------------- records of parameters


def ask_once(group: Any) -> None:
    """Let the records of a parameter group answer in one call, or none, what FSDP2 asks in five to ten. Local.

    For torch 2.11 to 2.14, whose records have ``accumulate_unsharded_grad_if_needed``; later ones stay as they are.
    Records get a subclass, as FSDP2 gives units one: properties cannot be replaced on an object. Call it before
    anything else replaces a group's ``unshard`` and ``wait_for_unshard``.
    """
    known = (hasattr(managed, "accumulate_unsharded_grad_if_needed") for managed in group.fsdp_params)
    if not all(known) or getattr(group.mesh_info, "is_spmd_mesh", False):
        return
    for managed in group.fsdp_params:
        managed.__class__ = _answering_at_once(type(managed))
    alone = getattr(group.mesh_info, "shard_mesh_size", 1) == 1
    wait = _wait_alone if alone else _wait_for_unshard
    group.wait_for_unshard = functools.partial(wait, group, group.wait_for_unshard)
    if not alone:
        group.unshard = functools.partial(_unshard, group, group.unshard)


#: In the place of a method of a record: nothing, without a call of Python's.
_nothing: Callable[[], Any] = tuple
_shape, _flat = operator.attrgetter("shape"), operator.methodcaller("view", -1)


def _unshard(group: Any, stock: Callable[[bool], None], async_op: bool = False) -> None:
    """``FSDPParamGroup.unshard`` that asks no plain shard what it sends. Collective as that is."""
    if group._all_gather_result is not None or group._sharded_state is _UNSHARDED:
        return
    for managed in group.fsdp_params:
        if (
            type(managed.sharded_param._local_tensor) is torch.Tensor
            and managed.param_dtype is None
            and managed.sharded_state is _SHARDED
            and not managed.offload_to_cpu
        ):
            managed.__dict__["all_gather_inputs"] = [managed._sharded_param_data]
    try:
        stock(async_op)
    finally:
        for managed in group.fsdp_params:
            managed.__dict__.pop("all_gather_inputs", None)


def _wait_for_unshard(group: Any, stock: Callable[[], None]) -> None:
    """``FSDPParamGroup.wait_for_unshard`` that takes all memory in one loop. Local operation."""
    if group._all_gather_result is None:
        return
    for managed in group.fsdp_params:
        own = managed.__dict__
        if "_unsharded_param" in own and type(managed.sharded_param._local_tensor) is torch.Tensor:
            own["init_unsharded_param"] = _nothing
        outputs = managed.all_gather_outputs
        for tensor in outputs:
            storage, size = tensor.untyped_storage(), tensor.nbytes
            if storage.nbytes() != size:
                storage.resize_(size)
        if outputs:  # the first gather makes them
            own["alloc_all_gather_outputs"] = _nothing
    try:
        stock()
    finally:
        for managed in group.fsdp_params:
            managed.__dict__.pop("init_unsharded_param", None)
            managed.__dict__.pop("alloc_all_gather_outputs", None)


def _wait_alone(group: Any, stock: Callable[[], None]) -> None:
    """``FSDPParamGroup.wait_for_unshard`` of one rank. Local operation.

    Plain shards that lend their memory already are passed over: there is nothing to copy, and nothing to wait for.
    """
    if group._all_gather_result is None:
        return
    if group.comm_ctx.all_gather_state is not None:  # of a unit that others have a part of
        stock()
        return
    has_copied = False
    for managed in group.fsdp_params:
        outputs = managed.all_gather_outputs
        if (
            outputs
            and outputs[0] is managed._sharded_param_data
            and "_unsharded_param" in managed.__dict__
            and type(managed.sharded_param._local_tensor) is torch.Tensor
            and managed.param_dtype is None
        ):
            continue
        has_copied, data = True, managed.all_gather_inputs[0]
        managed.init_all_gather_outputs([data.numel()], [data.dtype], 1, group.device)
        target = managed.all_gather_outputs[0]
        storage, size = target.untyped_storage(), target.nbytes
        if storage.nbytes() != size:
            storage.resize_(size)
        with torch.autograd._unsafe_preserve_version_counter(target):
            target.copy_(data)
        managed.init_unsharded_param()
    group._to_unsharded()
    group._all_gather_result = None
    if has_copied:
        event = group.device_handle.Event()
        event.record()
        group._wait_all_gather_streams_on_event(event)


@functools.cache
def _answering_at_once(kind: Any) -> Any:
    """A class of records whose answers are those of ``kind`` where nothing is cast, moved or padded."""
    stock_inputs, stock_gradient = kind.all_gather_inputs.fget, kind.unsharded_grad_data.fget

    class AllGatherInputs:
        """A property that an attribute of the record of the same name stands in for."""

        def __get__(self, managed: Any, _: Any) -> list[torch.Tensor]:
            local = managed.sharded_param._local_tensor
            if (
                type(local) is torch.Tensor
                or managed.sharded_state is not _SHARDED
                or managed.offload_to_cpu
                or local.shape != managed.padded_sharded_param_size
                or not takes_all(type(local))
            ):
                return stock_inputs(managed)
            tensors, metadata = local.fsdp_pre_all_gather(  # as ask_hook does, in one call less
                managed.shard_mesh_from_root,
                managed._orig_size,
                managed._contiguous_orig_stride,
                managed._module_info.module,
                managed.mp_policy,
            )
            managed._extensions_data.all_gather_metadata = metadata
            managed._extensions_data.all_gather_input_sizes = list(map(_shape, tensors))
            return list(map(_flat, tensors))

    def unsharded_grad_data(self: Any) -> torch.Tensor:
        with torch._C.DisableTorchFunctionSubclass():
            gradient = self._unsharded_param.grad
        if not self.is_dtensor and gradient is not None:
            return gradient
        if type(gradient) is DTensor and gradient._spec.placements == self._unsharded_param._spec.placements:
            return gradient._local_tensor
        return stock_gradient(self)

    def to_sharded_dtensor(self: Any, tensor: torch.Tensor) -> DTensor:
        if tensor.requires_grad or tensor.shape != self.sharded_size:
            return kind.to_sharded_dtensor(self, tensor)
        return new_dtensor(DTensor, tensor, self._sharding_spec, requires_grad=False)

    answers = {
        "all_gather_inputs": AllGatherInputs(),
        "unsharded_grad_data": property(unsharded_grad_data),
        "to_sharded_dtensor": to_sharded_dtensor,
    }
    return type(kind.__name__, (kind,), answers)


def ask_hook(managed: Any, local: Any) -> Sequence[torch.Tensor]:
    """What the all-gather hook of an even shard sends, noted as FSDP2 does.

    ``FSDPParam.all_gather_inputs``, which inspects the signature of the hook in each gather.
    """
    tensors, metadata = local.fsdp_pre_all_gather(
        managed.shard_mesh_from_root,
        managed._orig_size,
        managed._contiguous_orig_stride,
        managed._module_info.module,
        managed.mp_policy,
    )
    managed._extensions_data.all_gather_metadata = metadata
    managed._extensions_data.all_gather_input_sizes = list(map(_shape, tensors))
    return tensors


@functools.cache
def takes_all(cls: Any) -> bool:
    """Whether a class has an all-gather hook that takes more than the mesh."""
    hook = getattr(cls, "fsdp_pre_all_gather", None)
    return hook is not None and len(inspect.signature(hook).parameters) > 2


# ------------------------------------------------------------------------------------------- gradients of a whole unit


def partial_gradients(group: Any, placement: Placement) -> Iterator[tuple[Any, DTensor]]:
    """Records of a group whose whole gradients wait for their reduction as ``placement`` over one axis, with those.

    What several backwards have added up is complete then.
    """
    for managed in group.fsdp_params:
        parameter = managed.__dict__.get("_unsharded_param")
        if not isinstance(parameter, DTensor):
            continue
        gradient: Any = parameter.grad
        if managed.__dict__.get("unsharded_accumulated_grad") is not None:  # torch before 2.15
            if gradient is not None:
                managed.accumulate_unsharded_grad_if_needed()
            gradient = managed.unsharded_accumulated_grad
        if not isinstance(gradient, DTensor) or type(gradient._local_tensor) is not torch.Tensor:
            continue
        placements = gradient._spec.placements
        if (
            len(placements) == 1
            and placements[0] == placement
            and parameter._spec.placements[0].is_replicate()
        ):
            yield managed, gradient


def give_whole_gradient(managed: Any, gradient: torch.Tensor) -> None:
    """Put a local tensor in the place of one of :func:`partial_gradients`, placed as the gathered parameter is."""
    parameter = managed._unsharded_param
    whole = dtensor(gradient, with_dtype(spec_of(parameter), gradient.dtype))
    if managed.__dict__.get("unsharded_accumulated_grad") is not None:
        managed.unsharded_accumulated_grad = whole
    else:
        parameter.grad = whole
