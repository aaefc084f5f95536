"""A DTensor whose shards are several rectangles of the original tensor.

``Shard(0)`` describes a stacked layout (gated fc1, non-interleaved QKV) only for one tensor-parallel size. FSDP2,
optimizers and kernels need nothing else, because they work on local tensors. ``full_tensor``, ``redistribute`` and
checkpoints need the positions in the original tensor. :class:`BoxedDTensor` keeps these positions with the tensor.
See "Stacked layouts" in docs/internals.md for the alternatives.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.placement_types import Placement

from te_fsdp.errors import PlacementError
from te_fsdp.layout import Box, Coordinates, ParameterRule, block_heights, shard_boxes
from te_fsdp.row_order import (
    OrderedCopy,
    RowsCopy,
    is_elementwise,
    like_first_list,
    refuse_writes,
    row_dim,
    run_in_order,
    stacked_among,
)
from te_fsdp.upstream import torch_dtensor as _torch
from te_fsdp.upstream.torch_dcp import shard_item
from te_fsdp.upstream.torch_functions import support_foreach

#: Key in a tensor's ``__dict__``.
_KEY = _torch.BOXES
#: Memory format in DCP's metadata of tensors whose rows are in the order of the unsharded module. DCP writes it and
#: does not use it; DTensors of torch have ``torch.contiguous_format``.
ORIGINAL_ORDER = torch.preserve_format


@dataclass(frozen=True)
class BoxMap:
    """Mapping of the shards of a DTensor to the original tensor."""

    rule: ParameterRule  #: Rule of the parameter
    has_tp: bool  #: Whether the last mesh dimension is the tensor-parallel axis
    has_ep: bool  #: Whether an expert-parallel mesh dimension precedes it
    placements: tuple[Placement, ...]  #: Placements for which the mapping is valid
    #: Weak reference to the module of a quantized parameter, and the parameter's name there
    owner: tuple[Any, str] | None = field(default=None, compare=False)
    #: Whether DCP plans to write the tensor, and not to read into it.
    to_write: bool = field(default=False, compare=False)

    def __deepcopy__(self, memo: dict[int, Any]) -> BoxMap:
        """Return the same object, which never changes."""
        return self

    def __reduce__(self) -> Any:
        """Pickle without the owner, which other processes do not have."""
        return BoxMap, (self.rule, self.has_tp, self.has_ep, self.placements)


def coordinates_of(parameter: DTensor, has_tp: bool, has_ep: bool, label: str) -> Coordinates:
    """Return this rank's coordinates from a DTensor's placements. Local operation.

    Raises PlacementError if the rank is not on the mesh, or several axes of FSDP2 shard the parameter.
    """
    # The tensor-parallel axis is the last one. The expert-parallel axis and those of FSDP2 are before it.
    mesh, placements = parameter.device_mesh, parameter.placements
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        raise PlacementError(
            f"{label}: this rank is not on the parameter's mesh",
            expected=f"one of the ranks {mesh.mesh.flatten().tolist()}",
            got=f"rank {torch.distributed.get_rank()}",
            fix="use the parameter on the ranks of its mesh only",
        )
    tp_axis = mesh.ndim - 1 if has_tp else None
    ep_axis = mesh.ndim - 1 - has_tp if has_ep else None
    dims = {a: _torch.shard_dim_of(p) for a, p in enumerate(placements) if a not in (tp_axis, ep_axis)}
    sharded = [(axis, dim) for axis, dim in dims.items() if dim is not None]
    if len(sharded) > 1:
        raise PlacementError(
            f"{label}: placements {tuple(placements)}",
            expected="at most one FSDP shard axis",
            got=len(sharded),
            fix="shard it by te_fsdp.fully_shard, or by torch's over one mesh axis",
        )

    def position_on(axis: int | None) -> tuple[int, int]:
        return (1, 0) if axis is None else (mesh.size(axis), coordinate[axis])

    axis, dim = sharded[0] if sharded else (None, 0)
    return Coordinates(*position_on(tp_axis), *position_on(axis), dim, *position_on(ep_axis))


def boxed(tensor: torch.Tensor | None, rule: ParameterRule | None, *, has_tp: bool) -> None:
    """Change the class of a bound parameter, in place, if its placements do not describe its shards. Local."""
    # Only stacked rows that tensor parallelism shards need this class. Other tensors keep their class, because each
    # attribute access of this one costs a call.
    if type(tensor) is DTensor and rule is not None and has_tp and is_reordered(tensor, rule):
        _set_class(tensor, BoxMap(rule, has_tp, False, tuple(tensor.placements)))


def is_reordered(tensor: DTensor, rule: ParameterRule) -> bool:
    """Return whether the rows of a tensor-parallel DTensor are in a different order than its placements describe."""
    return rule.layout.is_stacked and tensor.device_mesh.size(tensor.device_mesh.ndim - 1) > 1


def boxed_like(tensor: Any, parameter: torch.Tensor) -> Any:
    """Return a tensor made for a parameter, such as an optimizer state, with its mapping. Local operation."""
    box_map = parameter.__dict__.get(_KEY)
    if isinstance(box_map, BoxMap) and type(tensor) is DTensor and tensor.shape == parameter.shape:
        _set_class(tensor, box_map, parameter.kept_class if isinstance(parameter, BoxedDTensor) else None)
    return tensor


def rows_of_shards(parameter: torch.Tensor) -> torch.Tensor | None:
    """Return, for each row of the original parameter, its row in the concatenated shards of tp. Local operation.

    ``None`` if they are the same, or if tp shards a different dim than the rows.
    """
    if not isinstance(parameter, BoxedDTensor):
        return None
    if (box_map := parameter._stacked) is None or box_map.rule.shard_dim != 0:
        return None
    return _in_order_of_blocks(torch.arange(parameter.shape[0]), parameter.device_mesh, box_map.rule)


def _in_order_of_blocks(full: torch.Tensor, mesh: DeviceMesh, rule: ParameterRule) -> torch.Tensor:
    """Return concatenated shards in the original order."""
    dim, tp = rule.shard_dim, mesh.size(mesh.ndim - 1)
    assert dim is not None
    # The all-gather concatenates the ranks, and each rank has a part of every block.
    parts = [height // tp for height in block_heights(full.shape[dim], rule)]
    blocks = full.split(parts * tp, dim)
    return torch.cat([blocks[rank * len(parts) + b] for b in range(len(parts)) for rank in range(tp)], dim)


def _set_class(tensor: DTensor, box_map: BoxMap, cls: type[BoxedDTensor] | None = None) -> None:
    tensor.__class__ = cls = cls or BoxedDTensor
    support_foreach(cls)
    tensor.__dict__[_KEY] = box_map


class _Context(tuple[Any, ...]):
    """Context of ``DTensor.__tensor_flatten__``, whose length torch.compile checks, with the mapping."""

    mapping: tuple[BoxMap | None, type[BoxedDTensor] | None] = None, None


#: Functions whose result is filled afterwards, with the attributes of the argument (``StateDictStager``).
_COPIED_INTO = ("new_empty",)


# The class overrides the functions that return more than the local tensor:
#
# - ``full_tensor`` and ``redistribute`` return the order of the unsharded module, as do functions that depend on the
#   order of rows (:mod:`te_fsdp.row_order`);
# - DCP's protocol (``__create_write_items__`` and its companions) describes each rectangle as one chunk;
# - ``copy_`` from an ordinary DTensor, whose rows have the original order, takes this rank's rectangles;
# - copies, and tensors made by ``zeros_like`` and similar functions, have the class too, e.g. optimizer states.
#
# [Note: arithmetic of stacked tensors] Functions of a stacked tensor and a DTensor in the original order combine
# different rows, if it is sharded over tp. Only ``copy_`` converts, and in-place functions if the placements differ,
# because no mark identifies the order of every other tensor:
#
# - ``DTensor.from_local(p.to_local() * 2, ...)``, ``(p.T * 2).T`` and ``distribute_tensor(x, ...)`` have the same
#   class, mesh and placements. The first two are in the order of the ranks, like the updates of Muon. Adding them to
#   ``p`` is correct. Converting or refusing them would break these optimizers.
# - A mark on the results of ``distribute_tensor`` is lost in functions of ordinary DTensors, such as ``x > 0``. An
#   error would also refuse optimizer states that start as zeros, which are correct in both orders.
# - A mark on the mesh or the ``DTensorSpec`` is the same for ``from_local`` and ``distribute_tensor``, if both use
#   ``p.device_mesh`` and ``p.placements``.
# - A placement propagates through all functions. ``_StridedShard(0, split_factor=blocks)`` on tp describes blocks of
#   one height. In torch 2.13 all of 19 functions were correct without FSDP2, and 18 with ``Shard(1)`` on dp, where
#   ``view(-1)`` raises. After FSDP2 has sharded dim 0, ``full_tensor`` returns wrong rows. Blocks of different heights
#   (QKV with fewer key groups) have no such placement.
class BoxedDTensor(DTensor):
    """A DTensor with the positions of its shards in the original tensor."""

    #: Class of tensors made of it; ``None``: this module's.
    kept_class: type[BoxedDTensor] | None = None

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run the function as for any DTensor, and describe the rows of its results."""
        kwargs = kwargs or {}
        if is_elementwise(func, args, kwargs):
            result = _torch.plain_results(func, types, args, kwargs)
            if type(result) is DTensor:
                _keep_class(result, args, func)
            return result
        if OrderedCopy in types or RowsCopy in types:
            refuse_writes(func, args, kwargs)
        if func is torch.Tensor.copy_:
            args = (args[0], rows_for(*args[:2]), *args[2:])
        # Functions of lists change or compute each tensor on its own. Attributes compute nothing. Gradients have the
        # rows of their tensors.
        is_list = func.__name__.startswith(("_foreach_", "_fused_"))
        is_simple = is_list or func.__name__ == "__get__" or func is torch.autograd.grad
        if is_list:
            args = like_first_list(func, args)
        stacked = [] if is_simple else stacked_among((args, tuple(kwargs.values())))
        if stacked:
            result = run_in_order(func, types, args, kwargs, stacked)
        else:
            result = _torch.plain_results(func, types, args, kwargs)
        if type(result) is DTensor:
            _keep_class(result, stacked or args, func)
        elif isinstance(result, (list, tuple)):
            for index, item in enumerate(result):
                if type(item) is DTensor:
                    lists = [a[index] for a in args if type(a) in (list, tuple) and len(a) == len(result)]
                    _keep_class(item, stacked or lists, func)
        return result

    def full_tensor(self, *, grad_placements: Sequence[Placement] | None = None) -> torch.Tensor:
        """Return the original tensor, in the order of the unsharded module. Collective over the mesh."""
        if not self._needs_values():
            return super().full_tensor(grad_placements=grad_placements)
        return self._original()

    def redistribute(
        self, device_mesh: Any = None, placements: Sequence[Placement] | None = None, **options: Any
    ) -> DTensor:
        """Return an ordinary DTensor of the original tensor. Collective over the mesh, unless nothing changes."""
        mesh = device_mesh or self.device_mesh
        if placements is None or not self._needs_values():
            return super().redistribute(device_mesh, placements, **options)
        if mesh == self.device_mesh and tuple(placements) == tuple(self.placements):
            return boxed_like(super().redistribute(device_mesh, placements, **options), self)
        full = self._original()
        # DTensor's own redistribution takes local tensors for contiguous parts of the tensor. Rows of stacked
        # weights are not, so they are put in order first.
        everywhere = DTensor.from_local(
            full, self.device_mesh, [Replicate()] * self.device_mesh.ndim, run_check=False
        )
        return everywhere.redistribute(device_mesh, placements, **options)

    def __create_write_items__(self, fqn: str, object: Any) -> list[WriteItem]:
        if self._map is None:
            return super().__create_write_items__(fqn, object)
        self.__dict__[_KEY] = replace(self._map, to_write=True)
        # A reader of the files can see that rows need no reordering.
        shard, size = self._local_tensor, self.size()
        return [shard_item(fqn, shard, chunk, size, memory_format=ORIGINAL_ORDER) for chunk in self._chunks()]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        if self._map is None:
            return super().__create_chunk_list__()
        # DCP calls this method for loads only, and reads the shards of saves and loads by one method.
        self.__dict__[_KEY] = replace(self._map, to_write=False)
        return self._chunks()

    def _chunks(self) -> list[ChunkStorageMetadata]:
        boxes = self.local_boxes()
        return [ChunkStorageMetadata(torch.Size(b.original), torch.Size(b.sizes)) for b in boxes]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        if self._map is None:
            return super().__get_tensor_shard__(index)
        for box in self.local_boxes():
            if index.offset is not None and tuple(index.offset) == box.original:
                return self._shard_of(box, to_write=self._map.to_write)
        raise ValueError(f"{index.fqn}: this rank has no rows at {index.offset}")

    def __init_subclass__(cls) -> None:
        ForkingPickler.register(cls, _reduce_for_process)

    def for_process(self) -> BoxedDTensor:
        """Return the contents of a pickle for another process. Local operation."""
        return self

    def __reduce_ex__(self, proto: Any) -> Any:
        """Pickle an ordinary DTensor, which processes without te_fsdp can read, with a note on its order."""
        # A pickle with this class would need te_fsdp to be read.
        plain = _torch.dtensor(self._local_tensor, self._spec)
        if self._map is not None:
            plain.__dict__[_KEY] = True
        return plain.__reduce_ex__(proto)

    def __tensor_flatten__(self) -> Any:
        names, context = super().__tensor_flatten__()
        context = _Context(context)
        context.mapping = self.__dict__.get(_KEY), self.kept_class
        return names, context

    @staticmethod
    def __tensor_unflatten__(
        inner_tensors: Any, flatten_spec: Any, outer_size: Any, outer_stride: Any
    ) -> Any:
        # torch.compile checks that its arguments have the class that it has traced.
        tensor = DTensor.__tensor_unflatten__(inner_tensors, flatten_spec, outer_size, outer_stride)
        return _with_map(tensor, *flatten_spec.mapping)

    def __copy__(self) -> Any:
        return boxed_like(_torch.dtensor(self._local_tensor, self._spec), self)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        new = DTensor(
            copy.deepcopy(self._local_tensor.detach(), memo), self._spec, requires_grad=self.requires_grad
        )
        memo[id(self)] = new
        return boxed_like(new, self)

    @property
    def _map(self) -> BoxMap | None:
        """Return the mapping if it is valid for the present placements, else ``None``."""
        box_map = self.__dict__.get(_KEY)
        return box_map if box_map is not None and tuple(self._spec.placements) == box_map.placements else None

    @property
    def _stacked(self) -> BoxMap | None:
        """Return the mapping if rows are not in the order that the placements describe, else ``None``."""
        mapping = self._map
        is_stacked = mapping is not None and mapping.has_tp and is_reordered(self, mapping.rule)
        return mapping if is_stacked else None

    def local_boxes(self) -> list[Box]:
        """Return this rank's rectangles of the original tensor. Local operation."""
        box_map = self.__dict__[_KEY]
        coordinates = coordinates_of(self, box_map.has_tp, box_map.has_ep, "tensor")
        return shard_boxes(tuple(self._spec.shape), box_map.rule, coordinates)[1]

    def _original(self) -> torch.Tensor:
        """Return the unsharded tensor on every rank, with the blocks of rows in the original order."""
        mesh, box_map = self.device_mesh, self._stacked
        full = DTensor.redistribute(self._plain_values(), placements=[Replicate()] * mesh.ndim).to_local()
        return full if box_map is None else _in_order_of_blocks(full, mesh, box_map.rule)

    def _plain_values(self) -> DTensor:
        """Return a DTensor of high-precision values."""
        return self

    def _needs_values(self) -> bool:
        """Return whether torch's own ``redistribute`` would return anything but the original tensor."""
        return self._stacked is not None

    def _shard_of(self, box: Box, *, to_write: bool) -> torch.Tensor:
        """Return the rectangle of the local tensor that DCP writes into the files, or reads into."""
        return self._local_tensor[box.local_slices()]

    def fill(self, original: torch.Tensor) -> DTensor:
        """Write this rank's rectangles of an original tensor; return the tensor, a new one on the device for meta."""
        local = self._local_tensor
        if local.is_meta:
            local = torch.empty(local.shape, dtype=original.dtype, device=original.device)
        for box in self.local_boxes():
            local[box.local_slices()].copy_(original[box.original_slices()])
        return self if local is self._local_tensor else boxed_like(_torch.dtensor(local, self._spec), self)


# A pickle for a process of this job, such as the one in which ``dcp.async_save`` writes, keeps the mapping. As an
# ordinary DTensor it would be written in the order of the ranks, without an error.
def _reduce_for_process(tensor: BoxedDTensor) -> Any:
    tensor = tensor.for_process()
    box_map = tensor.__dict__.get(_KEY)
    plain = _torch.dtensor(tensor._local_tensor, tensor._spec)
    return _with_map, (plain, box_map, tensor.kept_class)


def _with_map(tensor: DTensor, box_map: BoxMap | None, cls: type[BoxedDTensor] | None) -> DTensor:
    if box_map is not None:
        _set_class(tensor, box_map, cls)
    return tensor


ForkingPickler.register(BoxedDTensor, _reduce_for_process)


def _keep_class(result: DTensor, args: Sequence[Any], func: Any) -> None:
    """Give a result the class of the first argument that has it, if its placements describe the rows."""
    for arg in args:
        if isinstance(arg, BoxedDTensor) and (box_map := arg.__dict__.get(_KEY)) is not None:
            placements, shape = tuple(result._spec.placements), result._spec.shape
            is_same = placements == box_map.placements and shape == arg._spec.shape
            dim = None if is_same else row_dim(result, arg)
            if dim is not None and func.__name__ not in _COPIED_INTO:
                rule = replace(box_map.rule, shard_dim=dim)
                box_map = replace(box_map, rule=rule, placements=placements, owner=None)
            if is_same or dim is not None or func.__name__ in _COPIED_INTO:
                _set_class(result, box_map, arg.kept_class)
            return


def order_states(optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> None:
    """Replace ordinary DTensors in a state dict of stacked parameters, which have their mesh, placements and shape.

    Those of ``distribute_tensor`` are in the original order, those of ``torch.load`` in the order of the ranks, as a
    note in the pickle says. Collective over the mesh if there are any of the former.
    """
    # In place of a copy: FusedAdam reads it once more after ``torch.optim.Optimizer.load_state_dict``.
    keys = chain.from_iterable(group["params"] for group in state_dict["param_groups"])
    parameters = chain.from_iterable(group["params"] for group in optimizer.param_groups)
    for key, target in zip(keys, parameters, strict=False):
        is_stacked = isinstance(target, BoxedDTensor) and target._stacked is not None
        states = state_dict["state"].get(key, {}) if is_stacked else {}
        for name, value in states.items():
            # Third-party optimizers wrap tensor classes of their own, in the order of the ranks.
            is_plain = type(value) is DTensor and type(value._local_tensor) is torch.Tensor
            if is_plain and value.shape == target.shape and _is_placed_like(value, target):
                states[name] = boxed_like(rows_for(target, value), target)


def _is_placed_like(source: DTensor, target: DTensor) -> bool:
    return source.device_mesh == target.device_mesh and source.placements == target.placements


@torch.no_grad()
def rows_for(target: Any, source: Any) -> Any:
    """Return the source of a copy: for an ordinary DTensor in the original order, the rows of a boxed target.

    Collective over the source's mesh in this case.
    """
    if not isinstance(target, BoxedDTensor) or target._stacked is None:
        return source
    source = _torch.replicated(source, target)
    if not isinstance(source, DTensor):
        return source
    same = _is_placed_like(source, target)
    if same and source.__dict__.get(_KEY) in (True, target._map):
        return source
    # Local tensors of both have the rows in different orders, so that copying one to the other would permute the
    # weight.
    full = source.full_tensor()
    local = full.new_empty(target._local_tensor.shape)
    for box in BoxedDTensor.local_boxes(target):
        local[box.local_slices()] = full[box.original_slices()]
    return boxed_like(_torch.placed(local, target.device_mesh, target.placements, target), target)
