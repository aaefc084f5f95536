"""Fast paths of FSDP2's per-parameter work in the steady state: one loop per unit."""

# [Note: steady state] FSDP2 calls ten functions for each parameter to install the unsharded parameter and to
# restore the shard. te_fsdp's modules check each assignment. In the steady state both are the same objects in
# every pass. One loop over the unit compares them with those of the previous pass, then assigns:
#
#     same shard, same unsharded parameter, no new attribute     module._parameters[name] = ...
#     otherwise                                                  setattr, as FSDP2 does
#
# Private names of FSDP2 (``FSDPParamGroup._to_unsharded``, ``_to_sharded``), checked with torch 2.11 to 2.15.

from __future__ import annotations

import contextlib
import functools
import inspect
import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch.distributed.fsdp._fully_shard._fsdp_param import ShardedState
from torch.distributed.tensor import DTensor

from te_fsdp.upstream.fsdp2_hooks import current_stream
from te_fsdp.upstream.fsdp2_reduce import OneGradient
from te_fsdp.upstream.fsdp2_units import GROUP, ShardedUnshardedPair, owners_of, record_of_group
from te_fsdp.upstream.torch_dtensor import DTENSOR_ATTRIBUTES, new_dtensor

_SHARDED, _UNSHARDED = ShardedState.SHARDED, ShardedState.UNSHARDED


class _ParamSlot(NamedTuple):
    """A module attribute at which a unit's parameter is registered."""

    managed: Any  #: FSDP2's record (``FSDPParam``)
    owner: torch.nn.Module
    table: dict[str, Any]  #: ``owner._parameters``
    name: str
    pair: (
        ShardedUnshardedPair | None
    )  #: The module's record; ``None`` for a module that does not check assignments


class _ParamSlots(NamedTuple):
    """All parameter attributes of a parameter group."""

    records: list[Any]  #: ``FSDPParamGroup.fsdp_params``
    slots: list[_ParamSlot]


#: Maps a module and a parameter name to the module's record of both forms; ``None`` if the module does not check
#: assignments. An empty record means that every assignment is checked. Raises ``KeyError`` before the first
#: all-gather.
PairOf: TypeAlias = "Callable[[torch.nn.Module, str], ShardedUnshardedPair | None]"


def swap_in_one_loop(group: Any, pair_of: PairOf, record: str) -> None:
    """Let a parameter group swap its parameters in one loop, from its second all-gather on. Local operation.

    ``record`` is the attribute that both forms of a parameter share.
    """
    slots: list[_ParamSlots] = []
    group._to_unsharded = functools.partial(_to_unsharded, group, group._to_unsharded, slots, pair_of, record)
    group._to_sharded = functools.partial(_to_sharded, group, group._to_sharded, slots)


def _to_unsharded(
    group: Any, stock: Callable[[], None], cached: list[_ParamSlots], pair_of: PairOf, record: str
) -> None:
    """Run in place of ``FSDPParamGroup._to_unsharded``. Local operation."""
    # The list differs while `regather_parameters` all-gathers only some parameters of the unit.
    if not cached or cached[0].records is not group.fsdp_params or group._sharded_state is not _SHARDED:
        stock()
        if not cached:
            with contextlib.suppress(KeyError):  # a module has not recorded both forms of its parameters yet
                slots = [
                    _ParamSlot(managed, owner, owner._parameters, name, pair_of(owner, name))
                    for managed in group.fsdp_params
                    for owner, name in owners_of(managed)
                ]
                cached.append(_ParamSlots(group.fsdp_params, slots))
        return
    # avoids __torch_function__ of DTensor subclasses for each attribute
    with torch._C.DisableTorchFunctionSubclass():
        for managed, owner, table, name, pair in cached[0].slots:
            shard, unsharded = managed.sharded_param, managed._unsharded_param
            if shard.requires_grad is not unsharded.requires_grad:
                unsharded.requires_grad_(shard.requires_grad)
            if pair is None:
                table[name] = unsharded
            elif table.get(name) is shard is pair.shard and unsharded is pair.unsharded:
                # An attribute that was added to the shard since must be copied, which the module does in
                # `__setattr__`.
                attrs, source = unsharded.__dict__, shard.__dict__
                added = (
                    () if source.keys() <= attrs.keys() else source.keys() - attrs.keys() - DTENSOR_ATTRIBUTES
                )
                if not added and attrs.get(record) is source.get(record):
                    table[name] = unsharded
                else:
                    setattr(owner, name, unsharded)
            else:
                setattr(owner, name, unsharded)
            managed.sharded_state = _UNSHARDED
    group._sharded_state = _UNSHARDED


def _to_sharded(group: Any, stock: Callable[[], None], cached: list[_ParamSlots]) -> None:
    """Run in place of ``FSDPParamGroup._to_sharded``. Local operation."""
    if group._sharded_state is _SHARDED:
        return
    if not cached or cached[0].records is not group.fsdp_params or group._sharded_state is not _UNSHARDED:
        stock()
        return
    for managed, owner, table, name, pair in cached[0].slots:
        shard, unsharded = managed.sharded_param, managed._unsharded_param
        if pair is None:
            table[name] = shard
        elif (
            table.get(name) is unsharded is pair.unsharded
            and shard is pair.shard
            and not pair.is_shard_exposed
            # Modules copy attributes back to a shard from DTensors only.
            and (not isinstance(unsharded, DTensor) or unsharded.__dict__.keys() <= shard.__dict__.keys())
        ):
            if pair.release is not None:
                pair.release()
            table[name] = shard
        else:
            setattr(owner, name, shard)
    for managed in group.fsdp_params:
        if "free_unsharded_param" in managed.__dict__:
            managed.free_unsharded_param()
        elif not getattr(managed, "keep_unsharded_storage", False):  # torch 2.15
            for tensor in (*managed.all_gather_outputs, *managed._unsharded_inner_tensors):
                storage = tensor.untyped_storage()
                if storage.nbytes():
                    storage.resize_(0)
        managed.sharded_state = _SHARDED
    group._sharded_state = _SHARDED


# --------------------------------------------------------------------------------------------- records of parameters


def shorten_fsdp_calls(group: Any, replay: Callable[..., Any]) -> None:
    """Replace per-parameter calls of FSDP2 on a parameter group's records by a single call or none. Local operation.

    ``replay`` returns the result of a quantized shard's all-gather hook without device work, or ``None`` to call it.
    Call this before other replacements of a group's ``unshard`` and ``wait_for_unshard``.
    """
    record = record_of_group(group)
    # torch 2.15 lets a shard free the all-gather outputs after each gather. No class of TE 2.20 does, and no shortcut
    # would free them.
    frees = operator.attrgetter("_release_all_gather_outputs_after_post_all_gather")
    if hasattr(group, "_all_gather_output_fn") and any(map(frees, group.fsdp_params)):  # torch 2.15
        return
    # Records get a subclass because properties cannot be replaced on an object.
    record.replay, record.one = replay, OneGradient()
    for managed in group.fsdp_params:
        managed.__class__ = _with_shortcuts(type(managed), managed.is_dtensor)
    if group.mesh_info.shard_mesh_size == 1:
        group.wait_for_unshard = functools.partial(_wait_alone, group, group.wait_for_unshard)


_shape = operator.attrgetter("shape")


def _wait_alone(group: Any, stock: Callable[[], None]) -> None:
    """Run in place of ``FSDPParamGroup.wait_for_unshard`` on a single rank. Local operation."""
    # Plain shards that share their memory already are skipped, because there is nothing to copy or to wait
    # for.
    if group._all_gather_result is None:
        return
    # A pipeline schedule of torch 2.11 all-gathers before the first forward, which sets the attributes of comm_ctx. The
    # state is that of a unit that is sharded over several ranks.
    if getattr(group.comm_ctx, "all_gather_state", None) is not None:
        stock()
        return
    has_copied = False
    for managed, tensors in zip(group.fsdp_params, sent_tensors(group), strict=True):
        outputs, is_plain = (
            managed.all_gather_outputs,
            type(managed.sharded_param._local_tensor) is torch.Tensor,
        )
        if (
            outputs
            and outputs[0] is managed._sharded_param_data
            and "_unsharded_param" in managed.__dict__
            and is_plain
            and managed.param_dtype is None
        ):
            continue
        has_copied, data = True, tensors[0]
        if outputs and data.numel() == outputs[0].numel() == 0 and not is_plain:
            # A quantized shard sends nothing, and its unsharded weight uses its buffers.
            managed.init_unsharded_param()
            continue
        dtype = (is_plain and managed.param_dtype) or data.dtype
        managed.init_all_gather_outputs([data.numel()], [dtype], 1, group.device)
        target = managed.all_gather_outputs[0]
        storage, size = target.untyped_storage(), target.nbytes
        if storage.nbytes() != size:
            storage.resize_(size)
        # As FSDP2 does: autograd must not take the gathered values for an in-place change of saved tensors.
        with torch.autograd._unsafe_preserve_version_counter(target):
            target.copy_(data.view(-1), non_blocking=True)
        managed.init_unsharded_param()
    group._to_unsharded()
    group._all_gather_result = None
    if has_copied:
        wait_before_gathers(group, current_stream(group).record_event())


def wait_before_gathers(group: Any, event: Any) -> None:
    """Let the streams of all-gathers wait for an event; ``None`` on the CPU."""
    # a method of the group before torch 2.15
    wait = getattr(group, "_wait_all_gather_streams_on_event", None)
    (wait or group.comm_ctx.wait_all_gather_streams_on_event)(event)


def sent_tensors(group: Any) -> list[Sequence[torch.Tensor]]:
    """Return the tensors that each shard of a group sends, quantized ones not flattened. Local operation.

    The metadata of quantized shards is stored for FSDP2. Their hooks run only if they cannot be replayed.
    """
    record, mesh, now = group.__dict__.get(GROUP), None, None  # both are those of the group
    replay = None if record is None else record.replay
    sent = list[Sequence[torch.Tensor]]()
    for managed in group.fsdp_params:
        local = managed.sharded_param._local_tensor
        if type(local) is torch.Tensor or not hasattr(local, "fsdp_pre_all_gather"):
            sent.append((managed._sharded_param_data,))
            continue
        mesh, now = mesh or managed.shard_mesh_from_root, now or pass_of(group)
        size, module = managed._orig_size, managed._module_info.module
        replayed = None if replay is None else replay(local, mesh, size, module, now)
        if replayed is None:
            if not takes_all(type(local)) or local.shape != managed.padded_sharded_param_size:
                sent.append(managed.all_gather_inputs)
                continue
            # ``FSDPParam.all_gather_inputs`` would inspect the hook's signature in each all-gather.
            stride = managed._contiguous_orig_stride
            replayed = local.fsdp_pre_all_gather(mesh, size, stride, module, managed.mp_policy)
        tensors, metadata = replayed
        extensions = managed._extensions_data
        extensions.all_gather_metadata = metadata
        extensions.all_gather_input_sizes = list(map(_shape, tensors))
        sent.append(tensors)
    return sent


#: A plain gradient without a Python call. FSDP2 reads it if there is one.
_plain_gradient: Callable[[Any], Any] = operator.attrgetter("_unsharded_param.grad")


@functools.cache
def _with_shortcuts(kind: Any, is_dtensor: bool) -> Any:
    """Return a subclass of the record class ``kind`` with shortcuts for parameters without cast, move or padding."""
    stock_init, stock_gradient = kind.init_unsharded_param, kind.unsharded_grad_data.fget

    def init_unsharded_param(self: Any) -> None:
        # Uses the views that the previous all-gather made of its outputs.
        local, parameter = self.sharded_param._local_tensor, self.__dict__.get("_unsharded_param")
        if parameter is None or type(local) is torch.Tensor or not takes_all(type(local)):
            stock_init(self)
            return
        for tensor in self._unsharded_inner_tensors:
            if tensor.untyped_storage().nbytes() != tensor.nbytes:
                tensor.untyped_storage().resize_(tensor.nbytes)
        extensions, outputs = self._extensions_data, self.all_gather_outputs
        sizes, cached = tuple(extensions.all_gather_input_sizes), self.gathered_views
        if cached is None or cached[0] is not outputs or cached[1] != sizes:
            cached = self.gathered_views = outputs, sizes, self._unflatten_all_gather_outputs()
        metadata, dtype = extensions.all_gather_metadata, self.param_dtype or self.orig_dtype
        local.fsdp_post_all_gather(cached[2], metadata, dtype, out=parameter)
        # As `clear`, without a call.
        extensions.all_gather_metadata, extensions.all_gather_input_sizes = None, ()

    def unsharded_grad_data(self: Any) -> torch.Tensor:
        with torch._C.DisableTorchFunctionSubclass():
            gradient = self._unsharded_param.grad
        # With equal placements FSDP2 would redistribute nothing, but call DTensor for it.
        if type(gradient) is DTensor and gradient._spec.placements == self._unsharded_param._spec.placements:
            return gradient._local_tensor
        return stock_gradient(self)

    def to_sharded_dtensor(self: Any, tensor: torch.Tensor) -> DTensor:
        # FSDP2 raises for a different shape, with its own message.
        specs = self.__dict__.get("_sharding_spec_by_dtype")  # torch 2.15: those that FSDP2 has made
        spec = self._sharding_spec if specs is None else specs.get(tensor.dtype)
        if spec is None or tensor.requires_grad or tensor.shape != self.sharded_size:
            return kind.to_sharded_dtensor(self, tensor)
        return new_dtensor(DTensor, tensor, spec, requires_grad=False)

    answers = {
        "gathered_views": None,  # the all-gather outputs, the shapes of the inputs, and the outputs in these shapes
        "init_unsharded_param": init_unsharded_param,
        "unsharded_grad_data": property(unsharded_grad_data if is_dtensor else _plain_gradient),
        "to_sharded_dtensor": to_sharded_dtensor,
    }
    return type(kind.__name__, (kind,), answers)


def pass_of(group: Any) -> tuple[bool, bool]:
    """Return whether a group is all-gathered before backward, and whether it stays unsharded after forward."""
    # TE's all-gather hook reads both (``FSDPParamGroup._training_state``, ``post_forward_mesh_info``).
    # the property ``name`` of an enum runs Python code
    return group._training_state._name_ == "PRE_BACKWARD", group.post_forward_mesh_info is None


@functools.cache
def takes_all(cls: Any) -> bool:
    """Return whether a class has an all-gather hook with more arguments than the mesh."""
    hook = getattr(cls, "fsdp_pre_all_gather", None)
    return hook is not None and len(inspect.signature(hook).parameters) > 2
