"""Redistribution of DTensors: of arguments of functions, of ``_StridedShard``, of dtypes without collectives.

Checked with torch 2.11 to 2.14.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.distributed import _state_dict_utils
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, _api, _dispatch, _redistribute, placement_types
from torch.distributed.tensor._ops import _tensor_ops
from torch.distributed.tensor.placement_types import Placement
from torch.utils import _pytree

from te_fsdp.upstream.patches import Replacements, wrapping
from te_fsdp.upstream.torch_dtensor import shard_dim_of, shifted, strided_shard

_watched = threading.local()
#: Dtypes that Gloo and NCCL do not communicate, such as the remainders of FusedAdam, and dtypes of their sizes
SAME_SIZE = {
    torch.int16: torch.bfloat16,
    torch.uint16: torch.bfloat16,
    torch.uint32: torch.int32,
    torch.uint64: torch.int64,
    torch.float8_e4m3fn: torch.uint8,
    torch.float8_e5m2: torch.uint8,
    torch.float8_e4m3fnuz: torch.uint8,
    torch.float8_e5m2fnuz: torch.uint8,
    torch.float8_e8m0fnu: torch.uint8,
}


class MixedOrder(Exception):
    """Torch would redistribute an argument over the last axis, along a dim of the given sizes."""


@contextlib.contextmanager
def without_mixed_order(mesh: DeviceMesh, rows: list[int]) -> Iterator[None]:
    """Raise :class:`MixedOrder` before torch redistributes an argument over the last axis of ``mesh``.

    It only raises for dims with these numbers of rows. Local operation.
    """
    _install()
    before, _watched.now = getattr(_watched, "now", None), (mesh, rows)
    try:
        yield
    finally:
        _watched.now = before


@functools.cache
def _install() -> None:
    dispatcher: Any = DTensor._op_dispatcher
    stock = dispatcher.redistribute_local_args

    @functools.wraps(stock)
    def redistribute_local_args(op_info: Any, suggested: Any, *args: Any, **kwargs: Any) -> Any:
        now: tuple[DeviceMesh, list[int]] | None = getattr(_watched, "now", None)
        if now is not None:
            is_tree = op_info.args_tree_spec is not None
            new = _pytree.tree_leaves(suggested.args_schema) if is_tree else suggested.args_schema
            for old, fitted in zip(op_info.flat_args_schema, new, strict=False):
                if not hasattr(old, "placements") or not hasattr(fitted, "placements") or old.mesh != now[0]:
                    continue
                before, after = old.placements[-1], fitted.placements[-1]
                dims = {shard_dim_of(before), shard_dim_of(after)} - {None}
                moves = before != after and not isinstance(before, Partial)
                if moves and any(old.shape[dim] in now[1] for dim in dims):
                    raise MixedOrder
        return stock(op_info, suggested, *args, **kwargs)

    dispatcher.redistribute_local_args = redistribute_local_args


@functools.cache
def move_strided_shards() -> None:
    """Let ``t``, ``stack``, ``select`` and ``unbind`` move the dim of ``_StridedShard``. Local, once per process."""
    # Rules of torch 2.11 move the dim of ``Shard`` only. Results then had wrong placements, without an error.
    probe = strided_shard(0, 2)
    if probe not in _tensor_ops.shift_shard_dims_after_insert([probe]):
        return
    rules, transposed = DTensor._op_dispatcher.sharding_propagator.op_strategy_funcs, torch.ops.aten.t.default
    stock: Any = rules[transposed]

    def after_insert(placements: Sequence[Placement], insert_dim: int = 0) -> list[Placement]:
        return [_moved(placement, lambda dim: dim + (dim >= insert_dim)) for placement in placements]

    def after_remove(placements: Sequence[Placement], remove_dim: int = 0) -> list[Placement]:
        return [_moved(placement, lambda dim: dim - (dim > remove_dim)) for placement in placements]

    def after_transpose(schema: Any) -> Any:
        result = stock(schema)
        for rule in result.strategies:
            spec = rule.input_specs[0]
            if spec.ndim == 2:
                placements = tuple(_moved(placement, lambda dim: 1 - dim) for placement in spec.placements)
                rule.output_specs = type(spec)(spec.mesh, placements)
        return result

    rules[transposed] = after_transpose
    _tensor_ops.shift_shard_dims_after_insert = after_insert  # type: ignore[assignment]
    _tensor_ops.shift_shard_dims_after_remove = after_remove  # type: ignore[assignment]


@wrapping
def gather_uneven_by_axis(transforms: list[Any], *args: Any, stock: Any, **kwargs: Any) -> list[Any]:
    """Return the all-gathers of a redistribution, over one axis at a time if shards are uneven. Local operation."""
    # torch merges all-gathers if the mesh was flattened, e.g. to a weight mesh. Rows of uneven shards are then wrong.
    merged = stock(transforms, *args, **kwargs)
    for item in merged:
        dim = shard_dim_of(item.src_dst_placements[0])
        is_merged = hasattr(item, "original_mesh_dims") and dim is not None
        if is_merged and item.logical_shape[dim] % item.mesh.size():
            return transforms
    return merged


def _moved(placement: Placement, move: Callable[[int], int]) -> Placement:
    dim = shard_dim_of(placement)
    return placement if dim is None else shifted(placement, move(dim) - dim)


def as_bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor, or its view in a dtype of its size that Gloo and NCCL communicate. Local operation."""
    return tensor.view(SAME_SIZE[tensor.dtype]) if tensor.dtype in SAME_SIZE else tensor


@wrapping
def communicate_bits(tensor: torch.Tensor, *args: Any, stock: Any, **kwargs: Any) -> Any:
    """Communicate a tensor by its bits if Gloo and NCCL lack its dtype. Collective as the function is."""
    if tensor.dtype not in SAME_SIZE:
        return stock(tensor, *args, **kwargs)
    args = _pytree.tree_map_only(torch.Tensor, as_bits, args)
    result = stock(as_bits(tensor), *args, **kwargs)
    return result.view(tensor.dtype) if isinstance(result, torch.Tensor) else result


@wrapping
def broadcast_bits(full: dict[str, Any], local: dict[str, Any], keys: Any, *args: Any, stock: Any) -> None:
    """Broadcast the tensors of a state dict, by their bits if necessary. Collective over the group."""
    for key in keys:
        dtype, received = full[key].dtype, local
        if bits := SAME_SIZE.get(dtype):
            value, received = full[key], {key: torch.empty(0)}
            is_info = isinstance(value, _state_dict_utils._TensorInfo)
            full[key] = type(value)(value.size, bits) if is_info else value.view(bits)
        stock(full, received, [key], *args)
        if bits and (target := local.get(key)) is not None:
            value = received[key].view(dtype)
            local[key] = (target, value) if isinstance(target, DTensor) else value
            _state_dict_utils._distribute_tensors(local, [key], *args)


#: All-gathers of shards of different sizes are over one mesh axis at a time. DTensors and full state dicts communicate
#: all dtypes.
PATCHES: Replacements = (
    (_redistribute, "_optimize_transform_infos", gather_uneven_by_axis),
    (_api, "redistribute_local_tensor", communicate_bits),
    (_dispatch, "redistribute_local_tensor", communicate_bits),
    (_redistribute, "redistribute_local_tensor", communicate_bits),
    (placement_types, "mesh_scatter", communicate_bits),
    (placement_types, "mesh_broadcast", communicate_bits),
    (placement_types, "pad_tensor", communicate_bits),
    (_state_dict_utils, "_broadcast_tensors", broadcast_bits),
)
