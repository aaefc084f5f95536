"""Private names of torch, except FSDP2's running state and patches. Checked on torch 2.11 to 2.15.

Each function names the private name that it wraps.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import _get_default_store, _resolve_process_group
from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter as ReduceScatter
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement, Shard, _StridedShard
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_unflatten

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from torch import nn
    from torch.distributed.tensor._dtensor_spec import DTensorSpec


def concatenated_meshes(first: DeviceMesh, second: DeviceMesh) -> DeviceMesh:
    """The axes of two submeshes of one mesh, one after the other (``DeviceMesh._concatenate``)."""
    return type(first)._concatenate([first, second])


#: 1-D flattening of a mesh under a name, row-major, cached by torch on the root mesh (``DeviceMesh._flatten``).
flatten_mesh: Callable[[DeviceMesh, str], DeviceMesh] = DeviceMesh._flatten
#: The mesh that a mesh was cut out of, itself if it was not (``DeviceMesh._get_root_mesh``).
root_mesh: Callable[[DeviceMesh], DeviceMesh] = DeviceMesh._get_root_mesh


def placed(
    local: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Placement], like: torch.Tensor
) -> DTensor:
    """DTensor around a local tensor, of the global shape and stride of ``like``. Local operation; unchecked."""
    return DTensor.from_local(
        local, mesh, placements, run_check=False, shape=like.shape, stride=like.stride()
    )


def placed_like(local: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """``local`` placed as a parameter is: a DTensor of its shape and placements, or itself. Local operation."""
    if not isinstance(parameter, DTensor):
        return local
    # Not zeros_like and such: the parameter's own spec would say the parameter's dtype.
    return with_boxes(placed(local, parameter.device_mesh, parameter.placements, parameter), parameter)


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """The very local tensor object of a DTensor (``DTensor._local_tensor``), the tensor itself otherwise.

    ``DTensor.to_local`` returns a view, without the attributes that TE puts on quantized tensors after each gather.
    """
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


#: :func:`local_of` a DTensor, without a call of Python's (``DTensor._local_tensor``).
local_of_dtensor: Callable[[DTensor], torch.Tensor] = operator.attrgetter("_local_tensor")


def memory_of(tensor: DTensor) -> int:
    """A number that an assignment to ``tensor.data`` changes; the local tensor stays (``UntypedStorage._cdata``)."""
    return tensor.untyped_storage()._cdata


def local_tensors_of(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """:func:`local_of` several tensors at once."""
    return [tensor._local_tensor if isinstance(tensor, DTensor) else tensor for tensor in tensors]


def specs_of(tensors: Iterable[torch.Tensor]) -> list[DTensorSpec]:
    """:func:`spec_of` those of several tensors that are DTensors."""
    return [tensor._spec for tensor in tensors if isinstance(tensor, DTensor)]


def in_dtypes_of(
    gradients: Iterable[torch.Tensor | None], parameters: Iterable[torch.Tensor]
) -> list[torch.Tensor | None]:
    """Gradients in their parameters' dtypes, by their local tensors: operations on DTensors take the host long."""
    found: list[torch.Tensor | None] = []
    for gradient, parameter in zip(gradients, parameters, strict=True):
        if gradient is None or gradient.dtype == parameter.dtype:
            found.append(gradient)
        elif isinstance(gradient, DTensor) and isinstance(parameter, DTensor):
            spec, local = parameter._spec, gradient._local_tensor.to(parameter.dtype)
            if gradient.placements != spec.placements:  # partial
                spec = replace(spec, placements=gradient.placements)
            found.append(new_dtensor(DTensor, local, spec, requires_grad=False))
        else:
            found.append(gradient.to(parameter.dtype))
    return found


def locals_and_specs(
    parameters: Iterable[DTensor],
) -> tuple[tuple[torch.Tensor, ...], list[DTensorSpec | None]]:
    """:func:`local_of` and :func:`spec_of` of several DTensors at once: every forward of a module asks."""
    found: list[torch.Tensor] = []
    specs: list[DTensorSpec | None] = []  # the caller may take some out
    for parameter in parameters:
        found.append(parameter._local_tensor)
        specs.append(parameter._spec)
    return tuple(found), specs


def unflatten_mesh(mesh: DeviceMesh, axis: str, sizes: dict[str, int]) -> DeviceMesh:
    """``mesh`` with one axis cut into several, row-major, of the same root (``DeviceMesh._unflatten``).

    It shares the process groups of the other axes with ``mesh``; those of the new axes are made. Collective over the
    world.
    """
    assert mesh.mesh_dim_names is not None
    # torch 2.11 takes numbers alone: it refuses exactly the names that exist.
    place = mesh.mesh_dim_names.index(axis)
    return mesh._unflatten(place, tuple(sizes.values()), tuple(sizes))


#: Mesh, placements, global shape and stride of a DTensor (``DTensor._spec``).
spec_of: Callable[[DTensor], DTensorSpec] = operator.attrgetter("_spec")
#: Class, local tensor, spec, ``requires_grad=False``: a DTensor, without the Python calls of ``DTensor.__init__``.
new_dtensor: Callable[..., DTensor] = DTensor.__new__


def dtensor(local: torch.Tensor, spec: DTensorSpec) -> DTensor:
    """Return a DTensor around ``local``, without the view and the checks of ``DTensor.from_local``."""
    return new_dtensor(DTensor, local, spec, requires_grad=False)


def with_placements(spec: DTensorSpec, placements: tuple[Placement, ...]) -> DTensorSpec:
    """A spec with other placements. Local operation."""
    return spec if placements == spec.placements else replace(spec, placements=placements)


def dtensors(
    found: Sequence[torch.Tensor | None], specs: Sequence[DTensorSpec | None]
) -> list[DTensor | None]:
    """:func:`dtensor` of several tensors at once; ``None`` where a tensor or its spec is missing."""
    made: list[DTensor | None] = []
    for local, spec in zip(found, specs, strict=True):
        missing = local is None or spec is None
        made.append(None if missing else new_dtensor(DTensor, local, spec, requires_grad=False))
    return made


def with_dtype(spec: DTensorSpec, dtype: torch.dtype) -> DTensorSpec:
    """A spec that says another dtype. Local operation.

    Operations on DTensors go by the spec: fused optimizers refuse groups whose specs say several dtypes.
    """
    if spec.tensor_meta is None or spec.tensor_meta.dtype == dtype:
        return spec
    return replace(spec, tensor_meta=spec.tensor_meta._replace(dtype=dtype))


def with_local(local: torch.Tensor, like: DTensor, *, requires_grad: bool) -> nn.Parameter:
    """Parameter with the spec of ``like`` around ``local``; ``local``'s own attributes are kept on the local object."""
    spec = with_dtype(like._spec, local.dtype)
    parameter = torch.nn.Parameter(dtensor(local, spec), requires_grad=requires_grad)
    # nn.Parameter detaches, and detaching makes a new local object: put the given one back.
    parameter._local_tensor = local  # type: ignore[missing-attribute]
    return with_boxes(parameter, like)  # type: ignore[bad-return]


def with_boxes(new: DTensor, like: torch.Tensor) -> DTensor:
    """Give a new DTensor the class of one with the same placements (:mod:`te_fsdp.boxed_dtensor`); return it."""
    if BOXES in like.__dict__:
        new.__class__, new.__dict__[BOXES] = type(like), like.__dict__[BOXES]  # type: ignore[bad-argument-type]
    return new


BOXES = "_te_fsdp_boxes"  #: Attribute of :mod:`te_fsdp.boxed_dtensor`
#: What a DTensor keeps among its Python attributes for itself, and what no other object may be given.
OWN_ATTRIBUTES = frozenset(("_local_tensor", "_spec", BOXES))


def shard_dim_of(placement: Placement) -> int | None:
    """Tensor dim that a placement cuts, ``None`` if it does not (``_StridedShard`` is no subclass of ``Shard``)."""
    if isinstance(placement, Shard) or type(placement).__name__ == "_StridedShard":
        return int(placement.dim)  # type: ignore[attr-defined]
    return None


def strided_shard(dim: int, split_factor: int) -> Placement:
    """Placement of an axis that cuts what later axes have cut into ``split_factor`` parts (``_StridedShard``)."""
    return Shard(dim) if split_factor == 1 else _StridedShard(dim, split_factor=split_factor)


def shifted(placement: Placement, dims: int) -> Placement:
    """The same cut of a tensor with ``dims`` more leading dims (``_StridedShard.split_factor``)."""
    dim = shard_dim_of(placement)
    return placement if dim is None else strided_shard(dim + dims, getattr(placement, "split_factor", 1))


def version_of(tensor: torch.Tensor) -> int:
    """How often a tensor was written to in place (``Tensor._version``): as DTensor, or through its local one.

    Operations on a DTensor count there alone: torch counts before it hands them to the local tensor.
    """
    return versions_of([tensor])[0]


def versions_of(tensors: Iterable[torch.Tensor | None], *, with_locals: bool = True) -> list[int]:
    """:func:`version_of` several tensors at once, -1 for ``None``; subclasses of DTensor are not asked.

    Without ``with_locals`` writes to the local tensors do not count.
    """
    with torch._C.DisableTorchFunctionSubclass():
        if not with_locals:
            return [-1 if tensor is None else tensor._version for tensor in tensors]
        return [
            -1
            if tensor is None
            else tensor._version + (tensor._local_tensor._version if isinstance(tensor, DTensor) else 0)
            for tensor in tensors
        ]


def end_failed_capture(device: torch.device, pool: tuple[int, int]) -> None:
    """Tell the device's allocator that a capture is over which ``CUDAGraph.capture_end`` could not end.

    It raises before it says so itself (``CUDAGraph.cpp``, torch 2.11 to 2.15): frees on other streams would be put off
    for ever (``captures_underway``), and the pool never be given back. Nothing happens where it has said so.
    """
    try:
        torch._C._cuda_endAllocateToPool(device.index, pool)
    except RuntimeError:  # no capture is under way: the end, or the beginning, did not fail
        return
    torch._C._cuda_releasePool(device.index, pool)


def is_of_another_rank(value: object, parameter: DTensor) -> bool:
    """Whether a tensor is the part that another rank of a parameter's mesh holds. Local operation.

    Pickles of a mesh keep the coordinate of the rank that wrote them (``DeviceMesh.__getstate__``, torch 2.11 to 2.15).
    """
    if not isinstance(value, DTensor) or value.device_mesh != parameter.device_mesh:
        return False
    return value.device_mesh.get_coordinate() != parameter.device_mesh.get_coordinate()


#: A number for the backward that runs on this thread, -1 outside of one (``torch._C._current_graph_task_id``).
backward_id: Callable[[], int] = torch._C._current_graph_task_id


def in_backward() -> bool:
    """Whether autograd is running a backward on this thread."""
    return torch._C._current_graph_task_id() != -1


#: What lies in nested tuples, lists and dictionaries, and how it lies there; and the opposite
#: (``torch.utils._pytree``).
flatten, unflatten = tree_flatten, tree_unflatten


def disable_compile(call: Callable[..., Any]) -> Callable[..., Any]:
    """A hook that ``torch.compile`` does not trace, on tensors that stand for the real ones: it breaks the graph."""

    def plain(*args: Any, **kwargs: Any) -> Any:
        return call(*args, **kwargs)

    return torch.compiler.disable(plain)


#: A context in which no dispatch mode sees operations (``torch.utils._python_dispatch``). Selective checkpointing is
#: one: it counts operations, and those of a recomputation must be those of the forward.
without_modes: Callable[[], Any] = _disable_current_modes


def is_persistent(module: nn.Module, name: str) -> bool:
    """Whether a module's buffer belongs to its state dict (``Module._non_persistent_buffers_set``)."""
    return name not in module._non_persistent_buffers_set


def without_wrappers(name: str) -> str:
    """A module's name in the bare model, without what activation checkpointing and ``torch.compile`` add to it."""
    return f".{name}.".replace("._checkpoint_wrapped_module.", ".").replace("._orig_mod.", ".").strip(".")


def copy_all_(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    """Copy tensors into others of the same shapes, by one call (``torch._foreach_copy_``); dtypes may differ."""
    if targets:
        torch._foreach_copy_(targets, sources)


def multiply_all_(tensors: list[torch.Tensor], factor: torch.Tensor) -> None:
    """Multiply plain tensors in place by a scalar tensor, few kernels for many tensors (``torch._foreach_mul_``)."""
    for (device, _), group in _by_kind(tensors).items():
        torch._foreach_mul_(group, factor.to(device))


def _by_kind(tensors: Iterable[torch.Tensor]) -> dict[tuple[torch.device, torch.dtype], list[torch.Tensor]]:
    """Tensors that one kernel can take together."""
    found: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for tensor in tensors:
        found.setdefault((tensor.device, tensor.dtype), []).append(tensor)
    return found


def abs_max(tensors: list[torch.Tensor]) -> torch.Tensor:
    """Largest absolute value in plain tensors of one dtype, NaN if there is one (``torch._foreach_norm``)."""
    return torch.stack(torch._foreach_norm(tensors, float("inf"))).max()


def norms(tensors: list[torch.Tensor], order: float) -> list[torch.Tensor]:
    """Norm of each plain tensor that is not empty, added up in fp32 at least (``torch._foreach_norm``).

    fp32 scalars, in the order of kinds of tensors, not of tensors.
    """
    found: list[torch.Tensor] = []
    for (_, dtype), group in _by_kind(filter(torch.Tensor.numel, tensors)).items():
        within = torch.promote_types(dtype, torch.float32)
        found += [norm.float() for norm in torch._foreach_norm(group, order, dtype=within)]
    return found


#: The key-value store in which the ranks of the default process group found each other (``_get_default_store``).
default_store: Callable[[], torch.distributed.Store] = _get_default_store


@contextlib.contextmanager
def fake_world_of(size: int) -> Iterator[None]:
    """Be the first of so many ranks, without the others, which answer with its own values (``FakeStore``)."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=size)
    try:
        yield
    finally:
        torch.distributed.destroy_process_group()


#: The process group with torch's own name of it (``_resolve_process_group``). Every write into a weight asks.
group_by_name: Callable[[str], torch.distributed.ProcessGroup] = _resolve_process_group  # type: ignore[assignment]


# --- files


def without_data(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """A tensor that takes no memory and that ``torch.serialization.skip_data`` writes as a gap (``FakeTensorMode``)."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        return torch.empty(shape, dtype=dtype)


def place_class() -> Any:
    """What tells DCP's reader where a piece lies: file, offset, length (``_StorageInfo``)."""
    from torch.distributed.checkpoint.filesystem import _StorageInfo

    return _StorageInfo


def set_dcp_version(metadata: Any) -> None:
    """Mark DCP's metadata with the version that DCP's writer gives it, where it has them."""
    from torch.distributed.checkpoint import filesystem

    version = getattr(filesystem, "CURRENT_DCP_VERSION", None)
    if version is not None:
        metadata.version = version


#: ``__torch_function__`` of a tensor subclass whose operations return plain tensors
#: (``torch._C._disabled_torch_function_impl``).
plain_results = torch._C._disabled_torch_function_impl


def is_absent_extra_state(value: object) -> bool:
    """Whether ``set_model_state_dict`` of whole tensors means an ``_extra_state`` that it lacks (``_EXTRA_STATE``)."""
    return type(value).__name__ == "_EXTRA_STATE"


def weight_hook_classes(module: nn.Module) -> list[str]:
    """Classes of the hooks that compute a module's weights before its forward: ``weight_norm``, ``prune`` and such."""
    hooks = map(type, module._forward_pre_hooks.values())
    return [hook.__name__ for hook in hooks if hook.__module__.startswith("torch.nn.utils.")]


# --- optimizers


def has_rule(operator: str) -> bool:
    """Whether DTensor can run an operator of aten, such as ``_fused_sgd_.tensor_lr`` (``ShardingPropagator``)."""
    tables = vars(DTensor._op_dispatcher.sharding_propagator).values()  # one for each kind of rule
    name, overload = operator.split(".")
    wanted = getattr(getattr(torch.ops.aten, name), overload)
    return any(wanted in table for table in tables if isinstance(table, dict))


def is_copied_optimizer(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an optimizer came from copy or pickle: its constructor, which they leave out, sets one attribute more.

    (``_warned_capturable_if_run_uncaptured``, which ``Optimizer.__getstate__`` does not give.)
    """
    return "_warned_capturable_if_run_uncaptured" not in optimizer.__dict__


def muon_arithmetic() -> tuple[Callable[..., torch.Tensor], Callable[..., float]]:
    """Muon's orthogonalisation of one matrix, and its learning rate for a shape (of ``torch.optim._muon``, torch 2.11).

    ``torch.optim.Muon`` offers them for whole parameters alone.
    """
    from torch.optim import _muon

    return _muon._zeropower_via_newtonschulz, _muon._adjust_lr


def step_hooks(optimizer: torch.optim.Optimizer) -> list[Callable[..., Any]]:
    """What runs before and after an optimizer's steps: hooks of its own (``_optimizer_step_pre_hooks``), and of all."""
    own = optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks
    tables: Any = (_global_optimizer_pre_hooks, _global_optimizer_post_hooks, *own)
    return [hook for table in tables for hook in table.values()]
