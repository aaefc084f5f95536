"""Private names of torch outside of FSDP2. Checked with torch 2.11 to 2.15.

The docstring of each function names the private names that it uses.
"""

from __future__ import annotations

import contextlib
import math
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint import _nested_dict
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.state_dict import _maybe_full_or_cpu_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import _get_default_store, _resolve_process_group
from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter as ReduceScatter
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor._redistribute import _gen_transform_infos
from torch.distributed.tensor.debug import (
    _clear_fast_path_sharding_prop_cache,
    _clear_python_sharding_prop_cache,
)
from torch.distributed.tensor.placement_types import Placement, Replicate, Shard, _StridedShard
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_unflatten

#: Concatenates the axes of submeshes of one mesh (``DeviceMesh._concatenate``).
concatenate_meshes: Callable[[list[DeviceMesh]], DeviceMesh] = DeviceMesh._concatenate


def explain_concatenations(explain: Callable[[list[DeviceMesh], Exception], None]) -> None:
    """Call a function with the meshes that torch's ``fully_shard`` cannot concatenate, and torch's error. Local."""

    def _concatenate(device_mesh_list: list[DeviceMesh]) -> DeviceMesh:
        try:
            return concatenate_meshes(device_mesh_list)
        except (RuntimeError, TypeError) as error:
            explain(device_mesh_list, error)
            raise

    DeviceMesh._concatenate = staticmethod(_concatenate)


#: 1-D flattening of a mesh under a name, row-major, cached by torch on the root mesh (``DeviceMesh._flatten``).
flatten_mesh: Callable[[DeviceMesh, str], DeviceMesh] = DeviceMesh._flatten
#: The root mesh from which a mesh was sliced, or the mesh itself (``DeviceMesh._get_root_mesh``).
root_mesh: Callable[[DeviceMesh], DeviceMesh] = DeviceMesh._get_root_mesh


def placed(
    local: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Placement], like: torch.Tensor
) -> DTensor:
    """Wrap a local tensor in a DTensor with the global shape and stride of ``like``. Local operation without checks."""
    return DTensor.from_local(
        local, mesh, placements, run_check=False, shape=like.shape, stride=like.stride()
    )


def is_replication_implicit() -> bool:
    """Return whether torch takes plain tensors for replicated DTensors (``implicit_replication``). Local operation."""
    return getattr(DTensor._op_dispatcher, "_allow_implicit_replication", False)


def replicated(value: Any, target: DTensor) -> Any:
    """Return a plain tensor as torch takes it next to a DTensor: replicated, if that is implicit. Local operation."""
    is_plain = isinstance(value, torch.Tensor) and not isinstance(value, DTensor) and value.ndim > 0
    if not is_plain or not is_replication_implicit():
        return value
    placements = [Replicate()] * target.device_mesh.ndim
    return DTensor.from_local(value, target.device_mesh, placements, run_check=False)


def placed_like(local: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """Place ``local`` like a parameter: a DTensor with its shape and placements, or ``local``. Local operation."""
    if not isinstance(parameter, DTensor):
        return local
    # zeros_like and similar functions would copy the parameter's dtype into the spec.
    return with_boxes(placed(local, parameter.device_mesh, parameter.placements, parameter), parameter)


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the local tensor object of a DTensor (``DTensor._local_tensor``), or the tensor itself."""
    # ``DTensor.to_local`` returns a view without the attributes that TE sets on quantized tensors after each
    # all-gather.
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


#: :func:`local_of` for DTensors, without a Python call (``DTensor._local_tensor``).
local_of_dtensor: Callable[[DTensor], torch.Tensor] = operator.attrgetter("_local_tensor")


#: The base of a view, or ``None`` for other tensors (``Tensor._base``).
base_of: Callable[[torch.Tensor], torch.Tensor | None] = operator.attrgetter("_base")


def memory_id(tensor: torch.Tensor) -> int:
    """Return a number that views share and that ``tensor.data = ...`` changes (``UntypedStorage._cdata``)."""
    with torch._C.DisableTorchFunction():  # a model's own initialization runs on other tensors
        return tensor.untyped_storage()._cdata


def local_tensors_of(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Return :func:`local_of` of several tensors."""
    local = []
    for tensor in tensors:
        local.append(tensor._local_tensor if isinstance(tensor, DTensor) else tensor)
    return local


def specs_of(tensors: Iterable[torch.Tensor]) -> list[DTensorSpec]:
    """Return :func:`spec_of` of the DTensors among several tensors."""
    return [tensor._spec for tensor in tensors if isinstance(tensor, DTensor)]


def in_dtypes_of(
    gradients: Iterable[torch.Tensor | None], parameters: Iterable[torch.Tensor]
) -> list[torch.Tensor | None]:
    """Cast gradients to their parameters' dtypes via local tensors, since DTensor operations have a high host cost."""
    cast: list[torch.Tensor | None] = []
    for gradient, parameter in zip(gradients, parameters, strict=True):
        if gradient is None or gradient.dtype == parameter.dtype:
            cast.append(gradient)
        elif isinstance(gradient, DTensor) and isinstance(parameter, DTensor):
            spec, local = parameter._spec, gradient._local_tensor.to(parameter.dtype)
            if gradient.placements != spec.placements:  # partial
                spec = replace(spec, placements=gradient.placements)
            cast.append(new_dtensor(DTensor, local, spec, requires_grad=False))
        else:
            cast.append(gradient.to(parameter.dtype))
    return cast


def locals_and_specs(
    parameters: Iterable[DTensor],
) -> tuple[tuple[torch.Tensor, ...], list[DTensorSpec | None]]:
    """Return :func:`local_of` and :func:`spec_of` of several DTensors. Every forward of a module calls it."""
    local: list[torch.Tensor] = []
    specs: list[DTensorSpec | None] = []  # the caller may replace entries by None
    for parameter in parameters:
        local.append(parameter._local_tensor)
        specs.append(parameter._spec)
    return tuple(local), specs


def unflatten_dp_shard(mesh: DeviceMesh, sizes: dict[str, int]) -> DeviceMesh:
    """Split the axis ``dp_shard`` of ``mesh`` into several, row-major, with the same root (``DeviceMesh._unflatten``).

    The process groups of the other axes are shared with ``mesh``. Those of the new axes are created. Collective
    over the world.
    """
    assert mesh.mesh_dim_names is not None
    # torch 2.11 supports indices only: it rejects the names of existing axes.
    index = mesh.mesh_dim_names.index("dp_shard")
    return mesh._unflatten(index, tuple(sizes.values()), tuple(sizes))


#: Mesh, placements, global shape and stride of a DTensor (``DTensor._spec``).
spec_of: Callable[[DTensor], DTensorSpec] = operator.attrgetter("_spec")
#: Class, local tensor, spec, ``requires_grad=False``: a DTensor, without the Python calls of ``DTensor.__init__``.
new_dtensor: Callable[..., DTensor] = DTensor.__new__


def dtensor(local: torch.Tensor, spec: DTensorSpec) -> DTensor:
    """Return a DTensor around ``local``, without the view and the checks of ``DTensor.from_local``."""
    return new_dtensor(DTensor, local, spec, requires_grad=False)


def dtensors(
    tensors: Sequence[torch.Tensor | None], specs: Sequence[DTensorSpec | None]
) -> list[DTensor | None]:
    """Return :func:`dtensor` of several tensors; ``None`` if a tensor or its spec is missing."""
    results: list[DTensor | None] = []
    for local, spec in zip(tensors, specs, strict=True):
        missing = local is None or spec is None
        results.append(None if missing else new_dtensor(DTensor, local, spec, requires_grad=False))
    return results


def with_dtype(spec: DTensorSpec, dtype: torch.dtype) -> DTensorSpec:
    """Return a spec with a different dtype. Local operation."""
    # DTensor operations use the dtype in the spec. Fused optimizers reject groups with several dtypes.
    if spec.tensor_meta is None or spec.tensor_meta.dtype == dtype:
        return spec
    return replace(spec, tensor_meta=spec.tensor_meta._replace(dtype=dtype))


def zero_gradient(parameter: torch.Tensor) -> torch.Tensor:
    """Return a gradient of zeros for a sharded, unsharded or plain parameter. Local operation."""
    # Do not use ``torch.zeros_like``: it dequantizes a quantized weight. An unsharded weight may be resharded at this
    # point, so that its storage has no bytes.
    local, dtype = local_of(parameter), getattr(parameter, "grad_dtype", None) or parameter.dtype
    zeros = torch.zeros(local.shape, dtype=dtype, device=local.device)
    return dtensor(zeros, with_dtype(parameter._spec, dtype)) if isinstance(parameter, DTensor) else zeros


def with_local(local: torch.Tensor, like: DTensor, *, requires_grad: bool) -> nn.Parameter:
    """Return a parameter with the spec of ``like`` and the local tensor object ``local`` with its attributes."""
    spec = with_dtype(like._spec, local.dtype)
    detached = local.detach() if local.requires_grad else local  # else torch warns
    parameter = torch.nn.Parameter(dtensor(detached, spec), requires_grad=requires_grad)
    # nn.Parameter detaches, which creates a new local object. Restore the given one.
    parameter._local_tensor = local  # type: ignore[missing-attribute]
    return with_boxes(parameter, like)  # type: ignore[bad-return]


def with_boxes(new: DTensor, like: torch.Tensor) -> DTensor:
    """Give a DTensor the class of one with the same placements (:mod:`te_fsdp.boxed_dtensor`) and return it."""
    if BOXES in like.__dict__:
        new.__class__, new.__dict__[BOXES] = type(like), like.__dict__[BOXES]  # type: ignore[bad-argument-type]
    return new


#: Attribute of a DTensor: its ``BoxMap`` (:mod:`te_fsdp.boxed_dtensor`). Pickles contain ``True`` for a DTensor whose
#: rows are not in the original order, so the name must not change.
BOXES = "_te_fsdp_local_order"
#: Python attributes of a DTensor that must not be copied to a different object.
DTENSOR_ATTRIBUTES = frozenset(("_local_tensor", "_spec", BOXES))


def shard_dim_of(placement: Placement) -> int | None:
    """Return the tensor dim that a placement shards, or ``None``."""
    # ``_StridedShard`` is not a subclass of ``Shard``.
    if isinstance(placement, Shard) or type(placement).__name__ == "_StridedShard":
        return int(placement.dim)  # type: ignore[attr-defined]
    return None


def has_uneven_strides(tensor: torch.Tensor | None) -> bool:
    """Return whether several axes shard one dim unevenly, which ``distribute_tensor`` refuses (``_StridedShard``)."""
    if type(tensor) is not DTensor or all(type(p).__name__ != "_StridedShard" for p in tensor.placements):
        return False
    dims = [shard_dim_of(placement) for placement in tensor.placements]
    sizes = [
        (dim, math.prod(n for n, d in zip(tensor.device_mesh.shape, dims, strict=True) if d == dim))
        for dim in dims
    ]
    return any(dim is not None and tensor.shape[dim] % ranks for dim, ranks in sizes)


def strided_shard(dim: int, split_factor: int) -> Placement:
    """Return ``_StridedShard``, which shards a dim that later axes have split into ``split_factor`` parts."""
    return Shard(dim) if split_factor == 1 else _StridedShard(dim, split_factor=split_factor)


def shifted(placement: Placement, dims: int) -> Placement:
    """Return the placement for a tensor with ``dims`` more leading dims (``_StridedShard.split_factor``)."""
    dim = shard_dim_of(placement)
    return placement if dim is None else strided_shard(dim + dims, getattr(placement, "split_factor", 1))


def version_of(tensor: torch.Tensor) -> int:
    """Return the number of in-place writes to a tensor (``Tensor._version``), via the DTensor or its local tensor."""
    # torch counts operations on a DTensor in the DTensor's version only.
    return versions_of([tensor])[0]


def versions_and_locals_of(tensors: Iterable[torch.Tensor]) -> tuple[list[int], list[torch.Tensor]]:
    """Return :func:`version_of` and :func:`local_of` of several tensors."""
    versions, local_tensors = [], []
    with torch._C.DisableTorchFunctionSubclass():
        for tensor in tensors:
            version, local = tensor._version, tensor
            if isinstance(tensor, DTensor):
                local = tensor._local_tensor
                version += local._version
            versions.append(version)
            local_tensors.append(local)
    return versions, local_tensors


def versions_of(tensors: Iterable[torch.Tensor | None]) -> list[int]:
    """Return :func:`version_of` of several tensors, -1 for ``None``, without ``__torch_function__`` of subclasses."""
    with torch._C.DisableTorchFunctionSubclass():
        return [
            -1
            if tensor is None
            else tensor._version + (tensor._local_tensor._version if isinstance(tensor, DTensor) else 0)
            for tensor in tensors
        ]


def count_writes(tensors: Iterable[torch.Tensor]) -> None:
    """Increase the versions of DTensors after writes that torch does not count (``torch._foreach_`` functions)."""
    written = [one for one in tensors if isinstance(one, DTensor) and not one.is_inference()]
    torch.autograd.graph.increment_version(written)


def end_failed_capture(device: torch.device, pool: tuple[int, int]) -> None:
    """Notify the allocator of the end of a capture that ``CUDAGraph.capture_end`` could not end."""
    # ``capture_end`` may raise before it does so (``CUDAGraph.cpp``, torch 2.11 to 2.15). Frees on other
    # streams would then be deferred forever (``captures_underway``), and the pool would never be released. A
    # repeated call has no effect.
    try:
        torch._C._cuda_endAllocateToPool(device.index, pool)
    except RuntimeError:  # no capture is in progress
        return
    torch._C._cuda_releasePool(device.index, pool)


def is_shard_of_other_rank(value: object, parameter: DTensor) -> bool:
    """Return whether a tensor is a shard of another rank of a parameter's mesh. Local operation."""
    # A pickled mesh contains the coordinate of the rank that wrote it (``DeviceMesh.__getstate__``, torch
    # 2.11 to 2.15).
    if not isinstance(value, DTensor) or value.device_mesh != parameter.device_mesh:
        return False
    return value.device_mesh.get_coordinate() != parameter.device_mesh.get_coordinate()


#: Number of the running backward on this thread, -1 outside of one (``torch._C._current_graph_task_id``).
backward_id: Callable[[], int] = torch._C._current_graph_task_id


def in_backward() -> bool:
    """Return whether autograd is running a backward on this thread."""
    return backward_id() != -1


#: Flatten nested tuples, lists and dicts to leaves and a structure, and rebuild them (``torch.utils._pytree``).
flatten, unflatten = tree_flatten, tree_unflatten


#: Exclude a hook from ``torch.compile`` tracing. It causes a graph break and runs on real tensors.
disable_compile = torch.compiler.disable

#: Like :func:`disable_compile`, as a decorator: it imports torch._dynamo in the first call (``torch._disable_dynamo``).
runs_eagerly = torch._disable_dynamo


#: Context in which no dispatch mode is active (``torch.utils._python_dispatch``). Selective checkpointing is such a
#: mode: it counts operations, and a recomputation must run the operations of the forward.
without_modes: Callable[[], Any] = _disable_current_modes


def is_persistent(module: nn.Module, name: str) -> bool:
    """Return whether a module's buffer is part of its state dict (``Module._non_persistent_buffers_set``)."""
    return name not in module._non_persistent_buffers_set


def without_wrappers(name: str) -> str:
    """Return a module's FQN without the parts added by activation checkpointing and ``torch.compile``."""
    return f".{name}.".replace("._checkpoint_wrapped_module.", ".").replace("._orig_mod.", ".").strip(".")


def copy_all_(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    """Copy tensors to tensors of the same shapes in one call (``torch._foreach_copy_``). Dtypes may differ."""
    if targets:
        torch._foreach_copy_(targets, sources)


def multiply_all_(tensors: list[torch.Tensor], factor: torch.Tensor) -> None:
    """Multiply plain tensors in place by a scalar tensor, with few kernels (``torch._foreach_mul_``)."""
    for (device, _), group in _by_kind(tensors).items():
        torch._foreach_mul_(group, factor.to(device))


#: Stop the device's kernels if a scalar is false, without a wait of the host (``torch._assert_async``).
assert_on_device: Callable[[torch.Tensor], None] = torch._assert_async


def _by_kind(tensors: Iterable[torch.Tensor]) -> dict[tuple[torch.device, torch.dtype], list[torch.Tensor]]:
    """Group tensors by device and dtype, for foreach kernels."""
    by_kind: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for tensor in tensors:
        by_kind.setdefault((tensor.device, tensor.dtype), []).append(tensor)
    return by_kind


def abs_max(tensors: list[torch.Tensor]) -> torch.Tensor:
    """Return the largest absolute value of plain tensors of one dtype; NaN if one is NaN (``torch._foreach_norm``)."""
    return torch.stack(torch._foreach_norm(tensors, float("inf"))).max()


def norms(tensors: list[torch.Tensor], order: float) -> list[torch.Tensor]:
    """Return the norm of each nonempty plain tensor, accumulated in at least fp32 (``torch._foreach_norm``).

    The result contains fp32 scalars, grouped by device and dtype of the tensors.
    """
    results: list[torch.Tensor] = []
    for (_, dtype), group in _by_kind(filter(torch.Tensor.numel, tensors)).items():
        within = torch.promote_types(dtype, torch.float32)
        results += map(torch.Tensor.float, torch._foreach_norm(group, order, dtype=within))
    return results


#: The key-value store used by the rendezvous of the default process group (``_get_default_store``).
default_store: Callable[[], torch.distributed.Store] = _get_default_store


@contextlib.contextmanager
def simulated_world(size: int) -> Iterator[None]:
    """Run as rank 0 of ``size`` simulated ranks, whose values equal its own (``FakeStore``).

    DTensor caches results with their mesh (``_clear_python_sharding_prop_cache`` and others). An equal mesh of a
    different world has the same key, but different groups and coordinates.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    def forget_meshes() -> None:
        _clear_python_sharding_prop_cache()
        _clear_fast_path_sharding_prop_cache()
        _gen_transform_infos.cache_clear()

    forget_meshes()
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=size)
    try:
        yield
    finally:
        torch.distributed.destroy_process_group()
        forget_meshes()


#: Process group by torch's internal name (``_resolve_process_group``). Every write to a weight calls it.
group_by_name: Callable[[str], torch.distributed.ProcessGroup] = _resolve_process_group  # type: ignore[assignment]


# --- files


#: DCP's class for the location of a stored tensor: file, offset, length (``_StorageInfo``).
StorageInfo: Any = _StorageInfo
#: The nested state dict that DCP has flattened to the first argument. The second one maps keys to their paths.
unflatten_state_dict: Callable[[dict[str, Any], dict[str, tuple[Any, ...]]], dict[str, Any]] = (
    _nested_dict.unflatten_state_dict
)
#: A state dict unsharded, or on the CPU, as its options say (``_maybe_full_or_cpu_state_dict``). Collective over the
#: mesh of each DTensor if the result is unsharded.
full_or_cpu_state_dict: Callable[[dict[str, Any], Any], dict[str, Any]] = _maybe_full_or_cpu_state_dict


#: ``__torch_function__`` of a tensor subclass whose operations return plain tensors
#: (``torch._C._disabled_torch_function_impl``).
plain_results = torch._C._disabled_torch_function_impl


def is_absent_extra_state(value: object) -> bool:
    """Return whether a value is the placeholder of ``set_model_state_dict`` for a missing ``_extra_state``."""
    return type(value).__name__ == "_EXTRA_STATE"


def weight_hooks(module: nn.Module) -> list[Any]:
    """Return the hooks that compute a module's weights before its forward: ``weight_norm``, ``prune``."""
    hooks = module._forward_pre_hooks.values()
    return [hook for hook in hooks if type(hook).__module__.startswith("torch.nn.utils.")]


# --- optimizers


def dtensor_supports(operator: str) -> bool:
    """Return whether DTensor supports an aten operator, such as ``_fused_sgd_.tensor_lr`` (``ShardingPropagator``)."""
    tables = vars(DTensor._op_dispatcher.sharding_propagator).values()  # one table per kind of rule
    name, overload = operator.split(".")
    overload_op = getattr(getattr(torch.ops.aten, name), overload)
    return any(overload_op in table for table in tables if isinstance(table, dict))


def is_copied_optimizer(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether an optimizer was copied or unpickled, without a call of its constructor."""
    # Only the constructor sets ``_warned_capturable_if_run_uncaptured``, which ``Optimizer.__getstate__``
    # omits.
    return "_warned_capturable_if_run_uncaptured" not in optimizer.__dict__


def has_own_step_hooks(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether an optimizer has hooks of its own before its step (``_optimizer_step_pre_hooks``)."""
    return bool(optimizer._optimizer_step_pre_hooks)


def muon_arithmetic() -> tuple[Callable[..., torch.Tensor], Callable[..., float]]:
    """Return Muon's functions: orthogonalize a matrix, adjust the learning rate to a shape."""
    # ``torch.optim._muon``, torch 2.11. ``torch.optim.Muon`` applies them to complete parameters only.
    from torch.optim import _muon

    return _muon._zeropower_via_newtonschulz, _muon._adjust_lr


def step_hooks(optimizer: torch.optim.Optimizer) -> list[Callable[..., Any]]:
    """Return the hooks of an optimizer's step: its own (``_optimizer_step_pre_hooks``) and those of all optimizers."""
    optimizer_hooks = optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks
    tables: Any = (_global_optimizer_pre_hooks, _global_optimizer_post_hooks, *optimizer_hooks)
    return [hook for table in tables for hook in table.values()]


def device_sleep(milliseconds: float) -> None:
    """Let the current stream of the GPU wait (``torch.cuda._sleep``), at about 2 million cycles per millisecond."""
    torch.cuda._sleep(int(2e6 * milliseconds))
