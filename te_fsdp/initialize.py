"""Initialization of sharded parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from te_fsdp.errors import InitError, OrderError, shorten
from te_fsdp.inline_init import count_rewrites
from te_fsdp.layout import expert_index
from te_fsdp.mesh import default_device_type, device_of
from te_fsdp.quantized.components import keep_rowwise_only
from te_fsdp.quantized.shards import attach_amax_group, quantize_shard
from te_fsdp.records import (
    PARAMETER,
    ModuleBinding,
    binding_of,
    checks_of,
    copy_param_attrs,
    name_of,
    plan_of,
    replace_local_tensor,
)
from te_fsdp.shard_info import ShardInfo, shard_info
from te_fsdp.upstream import fsdp2_patches as _fsdp2_patches, te as _te, torch_dtensor as _torch

# TE raises if it finds these attributes on a parameter that it is about to mark
# (``set_tensor_model_parallel_attributes``).
_TE_MARKS = ("tensor_model_parallel", "partition_dim", "partition_stride")


def check_initialized(parameters: Iterable[tuple[str, torch.Tensor | None]], prefix: str = "") -> None:
    """Raise OrderError if a forward would run on parameters without values. Local operation."""
    meta = [f"{prefix}.{name}" if prefix else name for name, p in parameters if p is not None and p.is_meta]
    if meta:
        raise OrderError(
            f"{meta[0]}: forward before te_fsdp.materialize",
            expected="parameters with values, on the device",
            got=f"{len(meta)} parameter(s) on meta",
            fix="call te_fsdp.materialize(model) after te_fsdp.fully_shard, or load a checkpoint after it",
        )


def fill_with_nan(fn: Any, tensors: Iterable[torch.Tensor | None]) -> bool:
    """Fill the memory that ``to_empty`` has allocated with NaN, which any loss shows. Return whether it has.

    ``fn`` is the function that ``Module._apply`` has applied to the tensors. Local operation.
    """
    # torch passes a lambda of its method, and so do overrides.
    if ".to_empty.<locals>" not in f".{getattr(fn, '__qualname__', '')}":
        return False
    for tensor in tensors:
        local = None if tensor is None else _torch.local_of(tensor).detach()
        if (
            local is not None
            and not local.is_meta
            and local.is_floating_point()
            and not _te.is_quantized(local)
        ):
            local.fill_(float("nan"))
    return True


def check_written(tensors: Iterable[tuple[str, torch.Tensor | None]], prefix: str = "") -> None:
    """Raise InitError for tensors that :func:`fill_with_nan` has filled and nothing has written to. Local operation."""
    unset = [
        f"{prefix}.{name}" if prefix else name
        for name, tensor in tensors
        if tensor is not None
        and (local := _torch.local_of(tensor)).is_floating_point()
        and local.numel()
        and not _te.is_quantized(local)
        and bool(local.isnan().all())
    ]
    if unset:
        raise InitError(
            f"{shorten(unset, 3)}: not initialized",
            expected="values after to_empty, which only allocates memory",
            got=f"{len(unset)} tensor(s) without a write",
            why="They would contain uninitialized memory",
            fix="call te_fsdp.materialize(model) instead of to_empty, or load a checkpoint",
        )


# [Note: one initialization] Each rank draws the unsharded original tensor from the default generator, one
# parameter at a time, and keeps its own boxes. With equal random state on all ranks the logical weights are
# those that stock TE draws in one process with that state, on any mesh. The cost is one original tensor of
# temporary memory.
def initialize_te_parameters(module: nn.Module) -> None:
    """Initialize the direct parameters of a bound TE module with TE's ``init_fn`` of each.

    Meta parameters are replaced by parameters on the device, others are filled in place. Quantized weights are
    quantized once, with the scale of the unsharded weight. Collective over the parameters' mesh (a check of the random
    state, and the amax of per-tensor formats). Raises InitError if the ranks' random states differ, or if an init
    function left values uninitialized.
    """
    binding = binding_of(module)
    assert binding is not None
    _check_module_random_state(module)
    first_error: Exception | None = None
    for name, parameter, elsewhere in _in_order(module, binding):
        value = None
        try:
            # The original tensor by TE's init method, and this rank's shard of it.
            label = binding.label(name)
            info = shard_info(module, name, parameter, label=label)
            with torch.no_grad():
                full = sentinel(info.original_shape, parameter.dtype, target_device(parameter))
                fill = _te.init_function(module, name)
                # TE fills one expert after the other.
                for part in full if info.rule.layout.is_grouped else (full,):
                    fill(part)
                if has_sentinel(full):
                    raise InitError(
                        f"{label}: not initialized",
                        expected="an init method that fills the unsharded tensor",
                        got="uninitialized values",
                        fix="pass an init_method to the TE module that fills the tensor in place",
                    )
                value = take_shard(full, info)
        # Raised below, because other ranks need this one in their collectives until then.
        except Exception as error:
            first_error = first_error or error
        if elsewhere:
            continue  # drop the value; the random state advances as in one process
        if value is None:
            local = _torch.local_of(parameter)
            # Zeros in place of the value that could not be drawn: the other ranks still need this one in
            # `store_shard`.
            value = torch.zeros(local.shape, dtype=parameter.dtype, device=target_device(parameter))
        store_shard(module, name, parameter, value, binding)
    if first_error is not None:
        raise first_error


def _in_order(module: nn.Module, binding: ModuleBinding) -> Iterator[tuple[str, torch.Tensor, bool]]:
    """Yield (name, parameter, whether it belongs to another rank) in the initialization order of one process.

    Parameters of another rank's experts are represented by those of a local expert, with the same shape and init
    function.
    """
    users = binding.distributed  # TE has no initialization for them
    params = {name: p for name, p in module._parameters.items() if p is not None and name not in users}
    if binding.experts is None:
        yield from ((name, p, False) for name, p in params.items())
        return
    yield from ((name, p, False) for name, p in params.items() if expert_index(name) is None)
    first = binding.experts.first
    kinds = [name.rstrip("0123456789") for name in params if expert_index(name) == first]
    for index in range(binding.experts.total):
        for kind in kinds:
            name = f"{kind}{index}"
            # Read it again, because initialization replaces meta parameters.
            parameter = module._parameters.get(name)
            template = module._parameters[f"{kind}{first}"]
            assert template is not None
            yield (name, parameter, False) if parameter is not None else (f"{kind}{first}", template, True)


def initialize_by_reset(module: nn.Module, reset: Callable[[], object]) -> list[str]:
    """Initialize a module outside of TE with its own ``reset`` on tensors of original size.

    Its parameters may be plain, tp DTensors or FSDP2's shards, on meta or on the device. Collective over their mesh (a
    check of the random state). Returns the names of direct parameters and floating-point buffers that stayed
    uninitialized.
    """
    _check_module_random_state(module)
    before = {name: p for name, p in module._parameters.items() if p is not None}
    infos = {name: shard_info(module, name, p) for name, p in before.items()}
    full_params: dict[int, torch.nn.Parameter] = {}  # one for each parameter: it may have several names here
    versions: dict[int, int] = {}
    for name, parameter in before.items():
        if id(parameter) not in full_params:
            full = sentinel(infos[name].original_shape, parameter.dtype, target_device(parameter))
            full_params[id(parameter)] = torch.nn.Parameter(full, requires_grad=parameter.requires_grad)
            versions[id(parameter)] = _torch.version_of(full_params[id(parameter)])
            copy_param_attrs(parameter, full_params[id(parameter)], leave_out=(PARAMETER,))
        module._parameters[name] = full_params[id(parameter)]
    # Buffers on the device keep their values, including NaN.
    pending = {name: b for name, b in module._buffers.items() if b is not None and b.is_meta}
    for name, buffer in pending.items():
        module._buffers[name] = sentinel(tuple(buffer.shape), buffer.dtype, target_device(buffer))
    try:
        with torch.no_grad():  # te.ops.Bias writes to its Parameter in place if that is on a GPU
            reset()
        filled = {name: p.detach() for name, p in module._parameters.items() if p is not None}
        for name, parameter in {id(p): (name, p) for name, p in before.items()}.values():
            is_filled_in_place = module._parameters[name] is full_params[id(parameter)]
            writes = _torch.version_of(full_params[id(parameter)]) - versions[id(parameter)]
            count_rewrites(parameter, writes if is_filled_in_place else None)
    finally:
        # Also after an exception: otherwise the model would keep tensors of original size.
        module._parameters.update(before)
    unset = []
    stored: dict[int, torch.nn.Parameter | None] = {}
    for name, parameter in before.items():
        if id(parameter) in stored:
            module._parameters[name] = stored[id(parameter)]
        elif has_sentinel(filled[name]):
            unset.append(name)
        else:
            store_shard(module, name, parameter, take_shard(filled[name], infos[name]), binding_of(module))
            stored[id(parameter)] = module._parameters[name]
    buffers = {name: module._buffers.get(name) for name in pending}
    return unset + [name for name, b in buffers.items() if b is not None and has_sentinel(b)]


def target_device(tensor: torch.Tensor) -> torch.device:
    """Return the device for a meta tensor: that of its mesh, else the machine's default device."""
    if not tensor.is_meta:
        return tensor.device
    return device_of(tensor.device_mesh.device_type if isinstance(tensor, DTensor) else default_device_type())


def check_random_state(parameter: torch.Tensor, mesh: DeviceMesh, label: str) -> None:
    """Run the checks of the "draw" point on all ranks of ``mesh``. Collective as these checks are."""
    for check in checks_of(parameter).draw:
        check(mesh, label, target_device(parameter))


def _check_module_random_state(module: nn.Module) -> None:
    """Check once per module, on the mesh of its first DTensor parameter and over the ranks with its experts.

    Plain parameters have no mesh on which to check.
    """
    binding, label = binding_of(module), name_of(module)
    params = {name: p for name, p in module._parameters.items() if p is not None}
    if binding is not None and binding.ep.mesh is not None:
        check_random_state(next(iter(params.values())), binding.ep.mesh, label)
    for name, parameter in params.items():
        if isinstance(parameter, DTensor):
            check_random_state(parameter, parameter.device_mesh, f"{label} ({name})")
            return


def original_value(module: nn.Module, name: str, parameter: torch.Tensor) -> torch.Tensor:
    """Return a copy of the original (unsharded) value of a module's direct parameter, in high precision.

    On meta every value is a sentinel that no init function produces. Collective over the mesh axes that shard the
    parameter: one sum all-reduce of the original tensor per axis, to which all ranks but one contribute zero.
    """
    local, info = _torch.local_of(parameter), shard_info(module, name, parameter)
    if local.is_meta:
        return sentinel(info.original_shape, parameter.dtype, target_device(parameter))
    with torch.no_grad():
        value: torch.Tensor = local.dequantize() if _te.is_quantized(local) else local.detach()
        full = torch.zeros(info.original_shape, dtype=value.dtype, device=value.device)
        # Each element is on one rank of an axis, and zero on the others, so that a sum assembles the tensor
        # exactly.
        for box in info.boxes:
            full[box.original_slices()] = value[box.local_slices()]
        if isinstance(parameter, DTensor):
            mesh = parameter.device_mesh
            for axis, placement in enumerate(parameter.placements):
                if mesh.size(axis) > 1 and _torch.shard_dim_of(placement) is not None:
                    dist.all_reduce(full, group=mesh.get_group(axis))
    return full


def take_shard(full: torch.Tensor, info: ShardInfo) -> torch.Tensor:
    """Return this rank's shard of an original tensor, as a separate tensor."""
    if info.local_shape == info.original_shape:
        return full.detach()
    value = torch.empty(info.local_shape, dtype=full.dtype, device=full.device)
    for box in info.boxes:
        value[box.local_slices()] = full[box.original_slices()]
    return value


def store_shard(
    module: nn.Module, name: str, old: torch.Tensor, value: torch.Tensor, binding: ModuleBinding | None
) -> None:
    """Write the value of a shard to the existing tensor, or to a new parameter that replaces a meta parameter.

    Collective over the amax group of a quantized weight with one scale: one max all-reduce.
    """
    local = _torch.local_of(old)
    quantizer = _te.weight_quantizer(module, name) if binding is not None else None
    if not local.is_meta and _te.is_quantized(local) == (quantizer is not None):
        with torch.no_grad():
            if binding is None or quantizer is None:
                local.copy_(value)
            else:
                attach_amax_group(local, binding)
                local.quantize_(value)  # type: ignore[operator]
                _te.drop_high_precision_value(local)
                if _te.keeps_high_precision_value(module):
                    _te.attach_high_precision_value(local, value.detach().cpu())
        for mark in _TE_MARKS:
            old.__dict__.pop(mark, None)
        return
    new = value if binding is None or quantizer is None else quantize_shard(value, quantizer, binding)
    parameter = module._parameters[name] = replace_local_tensor(old, new, leave_out=_TE_MARKS)
    if quantizer is None:
        _fsdp2_patches.pad_shard(module, name)
        return
    if _te.keeps_high_precision_value(module):
        # Set it on the object that optimizers read: a plain parameter is a different object than ``new``.
        _te.attach_high_precision_value(_torch.local_of(parameter), value.detach().cpu())
    plan = plan_of(old)
    if plan is not None and not plan.storage.is_replicated:
        keep_rowwise_only(new)
    if plan is None or plan.fsdp_dim is None:  # otherwise te_fsdp.fully_shard has done it
        _fsdp2_patches.disable_flat_shards(module, new)


def sentinel(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return a tensor of values that no init function produces: NaN, or the dtype's smallest integer."""
    return torch.full(shape, _sentinel_value(dtype), dtype=dtype, device=device)


def _sentinel_value(dtype: torch.dtype) -> float | bool:
    if dtype.is_floating_point or dtype.is_complex:
        return float("nan")
    return False if dtype == torch.bool else torch.iinfo(dtype).min


def has_sentinel(tensor: torch.Tensor) -> bool:
    """Return whether values were left uninitialized.

    For integers this is true only if all values are unset, because the smallest may be intended. For bool and unsigned
    dtypes it is never true, because any value may be intended.
    """
    if tensor.numel() == 0:
        return False
    if tensor.is_meta:
        return True
    if tensor.dtype.is_floating_point or tensor.dtype.is_complex:
        return bool(tensor.isnan().any())
    return tensor.dtype.is_signed and bool((tensor == _sentinel_value(tensor.dtype)).all())
