"""Global indices of a parameter's local shard in the original tensor."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from te_fsdp.boxed_dtensor import coordinates_of
from te_fsdp.errors import PlacementError
from te_fsdp.layout import Box, Coordinates, ParameterRule, chunk_boxes, shard_boxes
from te_fsdp.records import binding_of
from te_fsdp.upstream import torch_dtensor as _torch

_REPLICATED = ParameterRule(None)


@dataclass(frozen=True)
class ShardInfo:
    """This rank's shard of one parameter."""

    rule: ParameterRule  #: The parameter's rule; replicated for modules that were never bound
    coordinates: Coordinates  #: This rank's coordinates
    original_shape: tuple[int, ...]  #: Shape of the original (unsharded, tp size 1) tensor
    local_shape: tuple[int, ...]  #: Shape of the local tensor
    boxes: tuple[Box, ...]  #: Rectangles of the original tensor that form the local tensor


def shard_info(module: nn.Module, name: str, parameter: torch.Tensor, *, label: str = "") -> ShardInfo:
    """Return the rule, shapes and global indices of this rank's shard of ``module._parameters[name]``.

    The parameter is a plain tensor, a tp DTensor or FSDP2's sharded DTensor; errors call it ``label``. Local operation
    that reads no values (meta tensors are supported). Raises ``PlacementError`` if the local tensor does not have the
    shape that follows from rule and mesh.
    """
    label = label or name
    binding = binding_of(module)
    rule = binding.rules.get(name, _REPLICATED) if binding is not None else _REPLICATED
    has_tp = binding is not None and binding.tp_mesh is not None
    has_ep = binding is not None and binding.ep.experts_mesh is not None and rule.layout.is_grouped
    original = tuple(parameter.shape)
    if binding is not None and name in binding.distributed and isinstance(parameter, DTensor):
        placed = binding.distributed[name]
        mesh, coordinate = parameter.device_mesh, parameter.device_mesh.get_coordinate() or ()
        first = mesh.ndim - placed.mesh.ndim
        by_axis: dict[int, tuple[int, int, int]] = {}
        # tp and ep have sharded the tensor first, FSDP2 shards their parts, although its axes are in front.
        for axis in (*range(first, mesh.ndim), *range(first)):
            dim = _torch.shard_dim_of(parameter.placements[axis])
            if dim is not None:
                by_axis[axis] = dim, mesh.size(axis), coordinate[axis]
        fsdp = next((sharding for axis, sharding in by_axis.items() if axis < first), (0, 1, 0))
        tp = by_axis.get(mesh.ndim - 1, (0, 1, 0)) if placed.tp_dim is not None else (0, 1, 0)
        ep = by_axis.get(first, (0, 1, 0)) if placed.is_expert else (0, 1, 0)
        coordinates = Coordinates(tp[1], tp[2], fsdp[1], fsdp[2], fsdp[0], ep[1], ep[2])
        local_shape, boxes = chunk_boxes(original, list(by_axis.values()))
    else:
        coordinates = Coordinates()
        if isinstance(parameter, DTensor):
            coordinates = coordinates_of(parameter, has_tp, has_ep, label)
        local_shape, boxes = shard_boxes(original, rule, coordinates, name=label)
    got_shape = tuple(_torch.local_of(parameter).shape)
    if got_shape != local_shape:
        raise PlacementError(
            f"{label}: local shape",
            expected=f"{local_shape} of {original} at {coordinates}",
            got=got_shape,
            fix="do not replace local tensors by hand; bind and shard the model again",
        )
    return ShardInfo(rule, coordinates, original, local_shape, tuple(boxes))
