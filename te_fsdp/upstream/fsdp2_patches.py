"""Replacements of methods on objects of torch, most of them FSDP2's.

:data:`te_fsdp.upstream.patches.FSDP2` has one row per replacement, with its reason.

Only objects of models passed to ``te_fsdp.fully_shard`` are changed, never classes. Other models are not
affected. ``upstream/fsdp2_state.py`` replaces one function of FSDP2 for the duration of the call. Private names
of torch, checked with 2.11 to 2.15.
"""

from __future__ import annotations

import copy
import functools
import math
import operator
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from te_fsdp.upstream import fsdp2_units as _units
from te_fsdp.upstream.torch_dtensor import dtensor, local_of, shard_dim_of, spec_of, with_dtype

# --- FSDPParamGroup.post_backward


def add_reduction_listener(
    group: Any,
    *,
    before: _units.Listener | None = None,
    after: _units.Listener | None = None,
    ended: _units.Listener | None = None,
) -> None:
    """Call functions before and after a parameter group's reductions (``FSDPParamGroup.post_backward``, one wrapper).

    The function added last is called first before a reduction, and last after it. ``ended`` is also called after
    backwards that do not reduce.
    """
    record = group.__dict__.get(_units.GROUP) or _units.record_of_group(group)
    if record.listeners is None:
        # One wrapper for all listeners: each further one would cost Python calls in every backward.
        record.listeners = [], [], []
        stock = group.post_backward

        def post_backward(*args: Any) -> None:
            # The method itself runs also for microbatches whose gradients FSDP2 accumulates without a reduction.
            reduces, listeners = group.reduce_grads, record.listeners
            assert listeners is not None
            before, after, ended = (
                listeners if reduces else ((), (), () if record.is_postponed else listeners[2])
            )
            # The last one added runs first, so that FSDP2 follows directly on the first one added.
            for call in reversed(before):
                call(group)
            if not reduces:
                stock(*args)
            elif record.one is None or not record.one.reduce(group, record.flags, stock, args):
                if record.flags is None:
                    stock(*args)
                else:
                    record.flags.reduce_with(group, stock, *args)
            for call in (*after, *ended):
                call(group)

        group.post_backward = post_backward
    for registered, new in zip(record.listeners, (before, after, ended), strict=True):
        if new is not None:
            registered.append(new)


# --- dtypes of gradients


def keep_gradients_in_dtype(unit: nn.Module, dtype: torch.dtype) -> None:
    """Let FSDP2 store a unit's sharded gradients in a different dtype than its sharded parameters. Local operation."""

    # Until 2.14 FSDP2 casts reduced gradients to ``FSDPParamGroup._orig_dtype``, which ``_init_mp_dtypes``
    # sets to the parameters' dtype. Later versions cast to the parameter's public ``grad_dtype``, which
    # autograd requires in any version. Both are set whenever FSDP2 re-reads its parameters, because
    # parameters may have been replaced.
    def init_dtypes(group: Any, stock: Callable[[], None]) -> None:
        stock()
        if hasattr(group, "_orig_dtype") and group._orig_dtype is not None:
            group._orig_dtype = dtype
        _set_gradient_dtype(group, dtype)

    for group in _units.fsdp_parameter_groups(unit):
        # FSDP2 runs this method again before the first forward, and would set its dtype.
        group._init_mp_dtypes = functools.partial(init_dtypes, group, group._init_mp_dtypes)
        _set_gradient_dtype(group, dtype)
        for managed in group.fsdp_params:
            if not hasattr(managed, "_sharding_spec_by_dtype"):  # torch before 2.15
                managed.to_sharded_dtensor = functools.partial(_to_sharded, managed.to_sharded_dtensor, [])


def _to_sharded(stock: Callable[[torch.Tensor], DTensor], cached: list[Any], tensor: torch.Tensor) -> DTensor:
    """Run ``FSDPParam.to_sharded_dtensor`` for gradients of a different dtype than their parameter's."""
    # FSDP2 gives them the parameter's spec, which contains the parameter's dtype. DTensor operations use this
    # dtype. For example, ``lerp_`` of an optimizer with fp32 main weights would treat an fp32 gradient as
    # bf16 and raise.
    dtensor_ = stock(tensor)
    spec = spec_of(dtensor_)
    if spec.tensor_meta is None or spec.tensor_meta.dtype == tensor.dtype:
        return dtensor_
    # `cached` has the parameter's spec and the gradient's. A new one in every backward would also fill the
    # cache of DTensor's operations.
    if not cached or cached[0] is not spec:
        cached[:] = spec, with_dtype(spec, tensor.dtype)
    return dtensor(tensor, cached[1])


def _set_gradient_dtype(group: Any, dtype: torch.dtype) -> None:
    for parameter in _units.shards_of(group):
        if parameter.requires_grad:
            parameter.grad_dtype = dtype


# --- quantized shards


def disable_flat_shard(managed: Any) -> None:
    """Prevent FSDP2 from storing a flat copy of a shard with all-gather hooks. Local operation.

    The record's ``reset_sharded_param`` is replaced by one without copy and padding (the hooks pad). Plain
    shards and shards in pinned memory are left to FSDP2.
    """
    # FSDP2 stores ``FSDPParam._sharded_param_data = local.view(-1)``. It recomputes it in
    # ``reset_sharded_param``: at lazy init, in ``Module._apply`` and after ``load_state_dict``. It never
    # reads it for such a shard. TE's block formats return a dequantized copy for ``view(-1)``, so every shard
    # would also be stored in high precision.
    if "reset_sharded_param" not in managed.__dict__:
        stock = managed.reset_sharded_param

        def reset_sharded() -> None:
            info = managed._module_info
            parameter = getattr(info.module, info.param_name)
            if (
                managed.pin_memory
                or not isinstance(parameter, DTensor)
                or not has_all_gather_hooks(parameter)
            ):
                stock()
                return
            if hasattr(managed, "_capture_grad_dtype_policy"):
                # As torch 2.15 does: it casts reduced gradients to the record's dtype and assigns them to the
                # parameter, which only accepts its own ``grad_dtype``. A value set on the previous parameter applies
                # to the new one.
                managed._capture_grad_dtype_policy(managed.sharded_param)
                managed._capture_grad_dtype_policy(parameter)
                if not managed._has_sharded_grad_dtype_override:
                    managed.sharded_grad_dtype = parameter.dtype
                elif not parameter._has_grad_dtype_override:  # type: ignore[missing-attribute]
                    parameter.grad_dtype = managed.sharded_grad_dtype
                managed._sharding_spec_by_dtype.clear()  # gradient specs derived from the previous parameter's spec
            managed.sharded_param = parameter
            managed._sharding_spec = parameter._spec
            managed._sharded_param_data = torch.empty(0)

        managed.reset_sharded_param = reset_sharded
    owner, name = _units.owners_of(managed)[0]
    if has_all_gather_hooks(getattr(owner, name)):
        managed.reset_sharded_param()  # also releases the parameter that the registered one has replaced


def pad_shard(module: nn.Module, name: str) -> None:
    """Let FSDP2 pad an uneven shard in high precision now. Local operation, none without FSDP2.

    In its first forward it would replace the local tensor, so that state dicts from before kept the initial values.
    """
    parameter = module._parameters[name]
    if not isinstance(parameter, DTensor) or not parameter.ndim:
        return
    mesh, placements = parameter.device_mesh, enumerate(parameter.placements)
    parts = math.prod(mesh.size(axis) for axis, placement in placements if shard_dim_of(placement) == 0)
    # The search takes all parameters of the process.
    if parameter.shape[0] % parts and (managed := _units.find_fsdp_param(module, name)) is not None:
        managed.reset_sharded_param()


def disable_flat_shards(module: nn.Module, local: torch.Tensor) -> None:
    """Run :func:`disable_flat_shard` for a module's quantized shard. Local operation, none without FSDP2."""
    if (managed := _units.record_of(module, local)) is not None:
        disable_flat_shard(managed)


def has_all_gather_hooks(parameter: torch.Tensor) -> bool:
    """Return whether a shard has FSDP2's all-gather hooks (``fsdp_pre_all_gather``)."""
    return hasattr(local_of(parameter), "fsdp_pre_all_gather")


def adapt_records(group: Any, quantizable: Collection[tuple[int, str]]) -> None:
    """Adapt a group's records to weights that are or will be quantized: ``id`` of a module and name. Local operation.

    No high-precision copies (:func:`disable_flat_shard`), and a cached ``FSDPParam.shard_mesh`` for all-gather hooks.
    """
    for managed in group.fsdp_params:
        if quantizable and any((id(o), name) in quantizable for o, name in _units.owners_of(managed)):
            disable_flat_shard(managed)
        # Until torch 2.12 it is a property that slices the mesh of HSDP in every all-gather of every quantized
        # weight. This takes a tenth of the host time of a step. Later versions cache it in `_shard_mesh`, as
        # this does.
        is_property = isinstance(getattr(type(managed), "shard_mesh", None), property)
        if is_property and not hasattr(managed, "_shard_mesh"):
            managed._shard_mesh = managed.shard_mesh
            _units.replace_property(managed, "shard_mesh", _kept_shard_mesh)


#: Reads the cached mesh without a Python call.
_kept_shard_mesh = operator.attrgetter("_shard_mesh")


# --- shard groups of one rank


def alias_single_rank_shards(group: Any) -> None:
    """Let unsharded parameters use the memory of single-rank shards, and pass gradients on. Local operation.

    Values cast to ``param_dtype``, on the host, or in a part of a storage are left to FSDP2. So are
    all-reduces over ``dp_replicate`` (HSDP) and user-defined all-reduce hooks. Call this before other
    listeners of the group's reductions are added, because it must run right before FSDP2.
    """
    # Over a shard axis of size 1 FSDP2 copies each shard in every all-gather and stores both copies
    # (``FSDPParamGroup.wait_for_unshard``). Here ``FSDPParam.all_gather_outputs`` is the shard's memory.
    # torch skips the copy of a tensor onto itself. Quantized shards share their buffers through their hooks
    # (``quantized/fsdp_hooks.py``). FSDP2 also copies gradients into the input of a reduction and from there
    # to its output (``foreach_reduce``). Here they are passed on first, so FSDP2 finds none. Only gradients
    # that must be cast, divided or accumulated are written.
    if group.mesh_info.shard_mesh_size > 1:
        return
    for managed in group.fsdp_params:
        stock = managed.init_all_gather_outputs
        managed.init_all_gather_outputs = functools.partial(_init_outputs, managed, stock)
    if not hasattr(group.mesh_info, "replicate_mesh_size"):
        add_reduction_listener(group, before=_reduce_single_rank)


def _init_outputs(
    managed: Any,
    stock: Callable[..., None],
    all_gather_input_numels: list[int],
    all_gather_input_dtypes: list[torch.dtype],
    *rest: Any,
    **named: Any,
) -> None:
    """Run ``FSDPParam.init_all_gather_outputs`` in every all-gather, with the sizes and dtypes of its inputs."""
    data, outputs = managed._sharded_param_data, managed.all_gather_outputs
    # FSDP2 writes the inputs to the outputs. Alias the shard only if the inputs are the shard itself.
    is_own_shard = all_gather_input_numels == [data.numel()] and all_gather_input_dtypes == [data.dtype]
    if is_own_shard and outputs and outputs[0] is data:
        return  # as in the previous all-gather
    # Whether this all-gather uses the memory of the shard, and whether the previous one did. The unsharded parameter
    # can share the memory of a shard that uses its full storage on the device.
    lends = (
        is_own_shard
        and data.untyped_storage().nbytes() == data.numel() * data.itemsize
        and data.device == managed.device
        and not has_all_gather_hooks(managed.sharded_param)
    )
    lent = managed.__dict__.get("free_unsharded_param") is _keep
    if lends:
        managed.all_gather_outputs = [data]
        managed.free_unsharded_param = _keep
    elif lent:
        managed.all_gather_outputs = []
        del managed.free_unsharded_param
    stock(all_gather_input_numels, all_gather_input_dtypes, *rest, **named)
    if (lends or lent) and hasattr(managed, "_unsharded_param"):
        # The shard was loaded or moved since the previous all-gather: same parameter, different memory.
        output, size = managed.all_gather_outputs[0], managed._orig_size
        # The object stays: autograd and TE refer to it.
        local_of(managed._unsharded_param).data = output.as_strided(size, managed._contiguous_orig_stride, 0)


#: Replaces ``FSDPParam.free_unsharded_param``, which runs after every forward and backward. Does nothing.
_keep: Callable[[], Any] = tuple


def single_rank_parameters(unit: torch.nn.Module) -> dict[int, bool]:
    """Map ``id`` of each single-rank parameter of an FSDP module to whether its gradients are passed on."""
    passes: dict[int, bool] = {}
    for group in _units.fsdp_parameter_groups(unit):
        if group.mesh_info.shard_mesh_size == 1:
            listeners = _units.record_of_group(group).listeners  # of :func:`alias_single_rank_shards`
            skips_reduction = listeners is not None and _reduce_single_rank in listeners[0]
            passes |= {id(managed.sharded_param): skips_reduction for managed in group.fsdp_params}
    return passes


@torch.no_grad()
def _reduce_single_rank(group: Any) -> None:
    """Run in place of ``foreach_reduce`` for a shard group of size 1."""
    if group._all_reduce_hook is not None:  # FSDP2 then does more than pass gradients on
        return
    # Of :class:`te_fsdp.unit_communication.UnitReduceScatter`. FSDP2's own reduce-scatter has none.
    observe, factor = getattr(group._reduce_scatter_comm, "observe", None), group.gradient_divide_factor
    seen = set[int]()
    for managed in group.fsdp_params:
        parameter, unsharded = managed.sharded_param, getattr(managed, "_unsharded_param", None)
        # Before torch 2.15 accumulated gradients are stored separately.
        if vars(managed).get("unsharded_accumulated_grad") is not None:
            managed.accumulate_unsharded_grad_if_needed()
            gradient, managed.unsharded_accumulated_grad = managed.unsharded_accumulated_grad_data, None
        elif unsharded is not None and unsharded.grad is not None:
            gradient, unsharded.grad = managed.unsharded_grad_data, None
        else:
            continue
        reduced = group._reduce_dtype or getattr(managed, "unsharded_grad_dtype", None)
        gradient = gradient if reduced is None else gradient.to(reduced)
        if factor not in (None, 1):
            # Not in place, since the gradient may be shared. FSDP2 divides fp16 twice (torch 2.11 to 2.13).
            gradient = gradient / (factor * factor if gradient.dtype == torch.float16 else factor)
        if observe is not None:
            observe(gradient)
        dtype = managed.sharded_grad_dtype if hasattr(managed, "sharded_grad_dtype") else group._orig_dtype
        gradient = gradient if dtype is None else gradient.to(dtype)
        if parameter.grad is not None:
            local_of(parameter.grad).add_(gradient)
        else:
            # Gradients may be views of one memory. Accumulation into one must not change another.
            memory = gradient.untyped_storage()
            if memory.nbytes() != gradient.nbytes or memory.data_ptr() in seen:
                gradient = gradient.clone(memory_format=torch.contiguous_format)
            seen.add(memory.data_ptr())
            parameter.grad = managed.to_sharded_dtensor(gradient.contiguous())
        # Autograd does not run them, because it has not accumulated into this parameter. FSDP2 calls them in
        # the same way.
        for hook in (getattr(parameter, "_post_accumulate_grad_hooks", None) or {}).values():
            hook(parameter)


# --- gathers


def set_gather_methods(group: Any, gathers: Any) -> None:
    """Replace the all-gather and reshard methods of a parameter group. They get it and the stock method. Local."""
    _units.record_of_group(group).gathers = gathers
    group.unshard = functools.partial(gathers.unshard, group, group.unshard)
    group.wait_for_unshard = functools.partial(gathers.wait_for_unshard, group, group.wait_for_unshard)
    group._to_sharded = functools.partial(gathers.to_sharded, group, group._to_sharded)
    for record in group.fsdp_params:
        record.free_unsharded_param = _keep


# --- pipelines


def wrap_pipeline_step(stage: Any, sync: Callable[[bool], None], end: Callable[[], None]) -> None:
    """Forward a pipeline schedule's gradient synchronization to parameters that FSDP2 does not manage.

    ``sync`` gets whether following backwards reduce. ``end`` is called at the end of each backward and after
    the stage has reduced. Local operation.
    """
    # torch's stages (``_PipelineStageBase``) only control FSDP2's root. They disable reductions before each
    # backward. After the last one they enable and run them, and call the root's
    # ``_root_post_backward_final_callback`` (from torch 2.15 ``finalize_backward``). Then they divide all
    # gradients by the number of microbatches.
    stock_sync = stage.set_requires_gradient_sync

    def set_sync(enabled: bool, *, recurse: bool = True) -> None:
        # Calls without ``recurse`` are te_fsdp's own, for FSDP2 only.
        stock_sync(enabled, recurse=recurse)
        if recurse:
            sync(enabled)

    stage.set_requires_gradient_sync = set_sync
    state = stage._get_fsdp_state()
    stock = state._root_post_backward_final_callback
    state._root_post_backward_final_callback = functools.partial(_finalize, stock, end)
    if hasattr(stage, "finalize_backward"):
        stage.finalize_backward = functools.partial(_finalize, stage.finalize_backward, end)


def _finalize(stock: Callable[..., Any], end: Callable[[], None], *args: Any, **named: Any) -> Any:
    """End a backward or a stage (torch 2.15), then reduce parameters that FSDP2 does not manage."""
    handle = stock(*args, **named)
    end()
    return handle


# --- process groups, and methods of modules


def replace_outer_group(
    unit: nn.Module, make: Callable[[torch.distributed.ProcessGroup], torch.distributed.ProcessGroup]
) -> None:
    """Let FSDP2 all-reduce a unit's gradients over ``dp_replicate`` with a different process group. Local operation.

    ``make`` maps FSDP2's group to one of the same size.
    """
    # FSDP2 supports a custom reduce-scatter but no custom all-reduce. It calls ``dist.all_reduce`` with
    # ``mesh_info.replicate_process_group``, which it does not use otherwise.
    for group in _units.fsdp_parameter_groups(unit):
        info = copy.copy(group.mesh_info)  # other units may share the original
        info.replicate_process_group = make(info.replicate_process_group)
        group.mesh_info = info


def wrap_apply(module: nn.Module, call: Callable[..., Any]) -> None:
    """Call ``call`` instead of ``Module._apply``, which ``to``, ``float``, ``cuda`` and similar methods use.

    It gets the replaced method, then its arguments. A call on a module that contains this one calls it, too.
    """
    module.__dict__["_apply"] = functools.partial(call, module._apply)


def replace_zero_grad(model: nn.Module, zero_grad: Callable[..., None]) -> None:
    """Replace ``zero_grad`` of one model."""
    model.__dict__["zero_grad"] = zero_grad
