"""Functions of stacked tensors, whose shards have the rows in the order of the ranks.

The functions of this module take tensors of :class:`te_fsdp.boxed_dtensor.BoxedDTensor`.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate

from te_fsdp.errors import PlacementError
from te_fsdp.upstream import torch_dtensor as _torch
from te_fsdp.upstream.torch_autograd import without_subclasses
from te_fsdp.upstream.torch_functions import PARTS, VIEWS, by_position, is_in_place, keeps_dim, part_dims
from te_fsdp.upstream.torch_redistribution import MixedOrder, without_mixed_order

#: torch 2.13 computes global indices from those of the shards, without a redistribution.
_INDICES = {torch.argmax, torch.argmin, torch.Tensor.argmax, torch.Tensor.argmin}


#: Functions that compute each element from those at the same position, as optimizers call them.
_ELEMENTWISE = frozenset((
    "abs", "add", "addcdiv", "addcmul", "clamp", "clamp_min", "div", "lerp", "maximum", "mul", "neg", "rsqrt", "sign",
    "sqrt", "sub", "add_", "addcdiv_", "addcmul_", "clamp_", "div_", "lerp_", "mul_", "neg_", "sign_", "sqrt_", "sub_",
    "__get__", "is_complex", "is_floating_point",
))  # fmt: skip


def is_elementwise(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Return whether rows need no order: an elementwise function of numbers and tensors of one layout. Local."""
    if func.__name__ not in _ELEMENTWISE:
        return False
    spec: Any = None
    for value in (*args, *kwargs.values()) if kwargs else args:
        if isinstance(value, DTensor):
            other, spec = value._spec, spec or value._spec
            if type(value) is OrderedCopy or other.mesh is not spec.mesh:
                return False
            if other is not spec and (other.placements, other.shape) != (spec.placements, spec.shape):
                return False
        elif not isinstance(value, (int, float)) and not (
            isinstance(value, torch.Tensor) and value.ndim == 0
        ):
            return False
    return True


#: In-place functions that compute each element from those of other tensors at the same position.
_WRITES = frozenset(
    f"{name}_" for name in (
        "add", "sub", "subtract", "mul", "multiply", "div", "divide", "true_divide", "floor_divide", "lerp", "addcmul",
        "addcdiv", "masked_fill", "clamp", "clip", "clamp_min", "clamp_max", "pow", "fmod", "remainder", "copysign",
        "__iadd_", "__isub_", "__imul_", "__itruediv_", "__ifloordiv_", "__imod_", "__ipow_",
    )
)  # fmt: skip


# [Note: rows in the order of the ranks] The placement over tp tells which dim of a result has the rows of a stacked
# argument: transposed, of some columns, or reduced over columns. Functions that use the order of rows either split
# rows (``view``), or torch redistributes an argument. They get arguments in the original order instead.
def run_in_order(func: Any, types: Any, args: Any, kwargs: dict[str, Any], stacked: Sequence[Any]) -> Any:
    """Run a function with stacked arguments. Collective over their mesh if the result depends on the order of rows.

    Raises PlacementError for such a function if it writes to a stacked tensor.
    """
    if func in PARTS or func in VIEWS:
        args, kwargs = by_position(args, kwargs)
    first = args[0] if args else None
    target = kwargs.get("out") if "out" in kwargs else (first if is_in_place(func) else None)
    is_written = getattr(target, "_stacked", None) is not None
    dim = stacked[0].__dict__[_torch.BOXES].rule.shard_dim
    is_part = func in PARTS and first is stacked[0] and dim in part_dims(func, args, kwargs)
    is_split = func in VIEWS and first is stacked[0] and not keeps_dim(func, dim, args, kwargs)
    if not is_part and not is_split and func not in _INDICES:
        try:
            with without_mixed_order(stacked[0].device_mesh, [_row_count(tensor) for tensor in stacked]):
                result = _torch.plain_results(func, types, args, kwargs)
            # Results have complete rows of an argument, or none.
            spec = stacked[0]._spec
            if all(
                (item._spec.shape, item._spec.placements)
                == (spec.shape, spec.placements)  # most in optimizers
                or item.device_mesh != spec.mesh
                or _torch.shard_dim_of(item._spec.placements[-1]) is None
                or any(row_dim(item, tensor) is not None for tensor in stacked)
                for item in _dtensors_in(result)
            ):
                return result
        except MixedOrder:
            pass
        except NotImplementedError:  # torch 2.11: ``max`` of ``_StridedShard``
            if is_written:
                raise
    if is_written:
        if is_part or target is not first or func.__name__ not in _WRITES:
            raise _write_error(func)
        args = (first, *(_like_rows(value, target, func) for value in args[1:]))
        kwargs = {key: _like_rows(value, target, func) for key, value in kwargs.items()}
        return _torch.plain_results(func, types, args, kwargs)
    written = args[:1] if target is not None and target is first else ()
    args = (*written, *_replicated_in_order(args[len(written) :]))
    kwargs = {key: _replicated_in_order(value) for key, value in kwargs.items()}
    result = _torch.plain_results(func, types, args, kwargs)
    _mark_copies(result, (args, list(kwargs.values())), target)
    return result


def stacked_among(values: Sequence[Any]) -> list[Any]:
    """Return the stacked tensors in a sequence, and in its lists and tuples."""
    found: list[Any] = []
    for value in values:
        if type(value) in (list, tuple):
            found += stacked_among(value)
        elif isinstance(value, DTensor) and getattr(value, "_stacked", None) is not None:
            found.append(value)
    return found


def row_dim(result: DTensor, tensor: Any) -> int | None:
    """Return the dim of a result with the rows of a stacked tensor, as in its shards; ``None`` without one."""
    box_map, mesh = tensor._stacked, tensor.device_mesh
    dim = _torch.shard_dim_of(result._spec.placements[-1]) if result.device_mesh == mesh else None
    if box_map is None or dim is None:
        return None
    # A flat view has each block of rows in one piece, so that the mapping is valid for it, too.
    shape = result._spec.shape
    is_flat = (
        len(shape) == 1 and box_map.rule.shard_dim == 0 and math.prod(shape) == math.prod(tensor._spec.shape)
    )
    return dim if is_flat or shape[dim] == _row_count(tensor) else None


def _row_count(tensor: Any) -> int:
    return tensor._spec.shape[tensor.__dict__[_torch.BOXES].rule.shard_dim]


def _replicated_in_order(value: Any) -> Any:
    """Return a stacked DTensor, or those in a sequence, replicated in the original order. Collective over its mesh."""
    if type(value) in (tuple, list):  # also the index of p[mask, 0]
        return type(value)(map(_replicated_in_order, value))
    is_stacked = isinstance(value, DTensor) and getattr(value, "_stacked", None) is not None
    return value.redistribute(placements=[Replicate()] * value.device_mesh.ndim) if is_stacked else value


def _like_rows(value: Any, target: Any, func: Any) -> Any:
    """Return a DTensor with the rows in the order of a stacked one's shards. Collective over its mesh."""
    value = _torch.replicated(value, target)
    if not isinstance(value, DTensor) or value._spec.placements == target._spec.placements:
        return value
    rows, sizes = value._spec.shape, target._spec.shape
    can_expand = len(rows) == len(sizes) and all(a in (1, b) for a, b in zip(rows, sizes, strict=True))
    if not can_expand or value.device_mesh != target.device_mesh:
        raise _write_error(func)
    if type(target._local_tensor) is not torch.Tensor:  # a quantized weight would round the value
        raise _write_error(func)
    return torch.empty_like(target, dtype=value.dtype).copy_(value.expand(sizes))


def like_first_list(func: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return arguments of a ``_foreach_`` or ``_fused_`` function with all rows in the order of the first list's.

    Collective over the mesh of each tensor that has different placements.
    """
    first = args[0] if args else None
    if (
        not isinstance(first, (list, tuple)) or func.__name__ == "_foreach_copy_"
    ):  # which converts each tensor
        return args
    pairs = [(t, t._spec.placements if isinstance(t, DTensor) else None) for t in first]
    is_implicit = _torch.is_replication_implicit()

    def fit(values: Any) -> Any:
        if values is first or not isinstance(values, (list, tuple)) or len(values) != len(first):
            return values
        return [
            _like_rows(value, target, func)
            if (value._spec.placements != placements if isinstance(value, DTensor) else is_implicit)
            and getattr(target, "_stacked", None) is not None
            else value
            for value, (target, placements) in zip(values, pairs, strict=True)
        ]

    return tuple(map(fit, args))


def _dtensors_in(value: Any, kind: Any = DTensor) -> list[Any]:
    """Return the DTensors, or tensors of a different class, in a value, also in its lists and tuples."""
    if isinstance(value, (list, tuple)):
        return [item for entry in value for item in _dtensors_in(entry, kind)]
    return [value] if isinstance(value, kind) else []


def _mark_copies(result: Any, sources: Any, target: Any = None, cls: type[DTensor] | None = None) -> None:
    """Change the class of results that share memory with a source. In one process they would be views."""
    memory = {_torch.memory_id(item._local_tensor) for item in _dtensors_in(sources)}
    for item in _dtensors_in(result):
        if type(item) is DTensor and item is not target and _torch.memory_id(item._local_tensor) in memory:
            item.__class__ = cls or OrderedCopy


def refuse_writes_to_copies(copies: Sequence[DTensor], is_written: bool) -> None:
    """Let writes to copied rows of sharded tensors raise, or raise now. Local operation."""
    if is_written:
        raise _rows_error("__setitem__")
    for copied in copies:
        if type(copied) is DTensor:
            copied.__class__ = RowsCopy


def _rows_error(name: str) -> PlacementError:
    return PlacementError(
        f"{name}: a write to some rows of a sharded tensor",
        expected="a write to the full length of the sharded dim",
        got="rows or columns of several ranks, which torch has gathered",
        why="It would change this copy, and be lost",
        fix="use tensor.mul_(mask) with a DTensor, or write to full = tensor.full_tensor(), then call tensor.copy_("
        "torch.distributed.tensor.distribute_tensor(full, tensor.device_mesh, tensor.placements)). Clone the rows to "
        "use them for something else",
    )


def _write_error(func: Any) -> PlacementError:
    return PlacementError(
        f"{func.__name__}: a write to some rows of a stacked weight under tensor parallelism",
        expected="a write to all rows, or to columns",
        got="a function that depends on the order of rows, which is different in the shards",
        why="It would change a copy, or different rows",
        fix="write to full = weight.full_tensor(), then call weight.copy_(torch.distributed.tensor.distribute_tensor("
        "full, weight.device_mesh, weight.placements))",
    )


def refuse_writes(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raise PlacementError if a function writes to an :class:`OrderedCopy`, or its local tensor, also in a list."""
    # Functions of torch.nn.init pass their tensor by its name.
    args, kwargs = by_position(args, kwargs)
    targets = [kwargs.get("out"), args[0] if args and is_in_place(func) else None]
    for target in _dtensors_in(targets, (OrderedCopy, LocalCopy)):
        raise _write_error(func) if type(target) is OrderedCopy else _rows_error(func.__name__)


class OrderedCopy(DTensor):
    """A part of a stacked tensor in the original order. Writes raise, because in one process it is a view."""

    def to_local(self, **options: Any) -> torch.Tensor:
        """Return the local tensor, to which writes raise, too."""
        return super().to_local(**options).as_subclass(LocalCopy)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run the function as for any DTensor; raise PlacementError for a write."""
        kwargs = kwargs or {}
        refuse_writes(func, args, kwargs)
        result = _torch.plain_results(func, types, args, kwargs)
        _mark_copies(result, _dtensors_in(args, OrderedCopy), cls=cls)
        return result

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Return an ordinary DTensor."""
        local = copy.deepcopy(self._local_tensor.detach(), memo)
        memo[id(self)] = new = DTensor(local, self._spec, requires_grad=self.requires_grad)
        return new

    def __reduce_ex__(self, proto: Any) -> Any:
        """Pickle an ordinary DTensor."""
        return _torch.dtensor(self._local_tensor, self._spec).__reduce_ex__(proto)


class RowsCopy(OrderedCopy):
    """Rows of an ordinary sharded tensor that torch has gathered."""


class LocalCopy(torch.Tensor):
    """The local tensor of an :class:`OrderedCopy`, or a view of it."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run the function as for any tensor; raise PlacementError for a write."""
        refuse_writes(func, args, kwargs or {})
        result = _torch.plain_results(func, types, args, kwargs or {})
        if func is torch.Tensor.numpy:
            result.flags.writeable = False
        with without_subclasses():
            memory = {item.untyped_storage().data_ptr() for item in _dtensors_in(args, LocalCopy)}
            for item in _dtensors_in(result, torch.Tensor):
                if type(item) is torch.Tensor and item.untyped_storage().data_ptr() in memory:
                    item.__class__ = LocalCopy
        return result

    def plain(self) -> torch.Tensor:
        """Return an ordinary tensor with the same memory."""
        with without_subclasses():
            return self.detach().as_subclass(torch.Tensor)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Return an ordinary tensor."""
        return copy.deepcopy(self.plain(), memo)

    def __reduce_ex__(self, proto: Any) -> Any:
        """Pickle an ordinary tensor."""
        return self.plain().__reduce_ex__(proto)
