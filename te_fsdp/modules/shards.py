"""Where a module's parameter lies: its rule, this rank's coordinates, and the boxes of the original that it holds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch.distributed.tensor import DTensor

from te_fsdp import _torch
from te_fsdp.binding import binding_of
from te_fsdp.errors import PlacementError, message
from te_fsdp.layout.boxes import Box, Coordinates, shard_boxes
from te_fsdp.layout.rules import ParameterRule

if TYPE_CHECKING:
    import torch
    from torch import nn

__all__ = ["ShardInfo", "shard_info"]

_REPLICATED = ParameterRule(None)


@dataclass(frozen=True)
class ShardInfo:
    """One rank's share of one parameter.

    Attributes:
        rule: The parameter's rule; replicated for modules that were never bound.
        at: This rank's coordinates.
        original_shape: Shape of the original (unsharded, tp size 1) tensor.
        local_shape: Shape of the local tensor.
        boxes: Rectangles of the original that make up the local tensor.
    """

    rule: ParameterRule
    at: Coordinates
    original_shape: tuple[int, ...]
    local_shape: tuple[int, ...]
    boxes: tuple[Box, ...]


def shard_info(module: nn.Module, name: str, parameter: torch.Tensor, *, label: str = "") -> ShardInfo:
    """Describe ``module._parameters[name]``. Local operation, reads no data (meta tensors are fine).

    Args:
        module: The owner.
        name: The parameter's name in the owner.
        parameter: The parameter: plain, tp DTensor, or FSDP2's sharded DTensor.
        label: Full name for error messages.

    Raises:
        PlacementError: The local tensor has not the shape that rule and mesh give it.
    """
    label = label or name
    binding = binding_of(module)
    rule = binding.rules.get(name, _REPLICATED) if binding is not None else _REPLICATED
    has_tp = binding is not None and binding.tp_mesh is not None
    has_ep = binding is not None and binding.experts_mesh is not None and rule.layout.is_grouped
    at = _coordinates(parameter, has_tp, has_ep, label) if isinstance(parameter, DTensor) else Coordinates()
    original = tuple(parameter.shape)
    local_shape, boxes = shard_boxes(original, rule, at, name=label)
    have = tuple(_torch.local_of(parameter).shape)
    if have != local_shape:
        raise PlacementError(
            f"{label}: local shape",
            expected=f"{local_shape} of {original} at {at}",
            got=have,
            fix="do not replace local tensors by hand; bind and shard the model again",
        )
    return ShardInfo(rule, at, original, local_shape, tuple(boxes))


def _coordinates(parameter: DTensor, has_tp: bool, has_ep: bool, label: str) -> Coordinates:
    """Coordinates from a DTensor's placements: tp is the last axis of a bound parameter, ep and FSDP2's come before."""
    mesh, placements = parameter.device_mesh, parameter.placements
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        raise PlacementError(message(f"{label}: this rank is not on the parameter's mesh {mesh}"))
    tp_axis = mesh.ndim - 1 if has_tp else None
    ep_axis = mesh.ndim - 1 - has_tp if has_ep else None
    cuts = [
        i
        for i, p in enumerate(placements)
        if i not in (tp_axis, ep_axis) and _torch.shard_dim_of(p) is not None
    ]
    if len(cuts) > 1:
        raise PlacementError(
            f"{label}: placements {tuple(placements)}", expected="at most one FSDP shard axis", got=len(cuts)
        )
    tp = (mesh.size(tp_axis), coordinate[tp_axis]) if tp_axis is not None else (1, 0)
    ep = (mesh.size(ep_axis), coordinate[ep_axis]) if ep_axis is not None else (1, 0)
    if not cuts:
        return Coordinates(tp_size=tp[0], tp_rank=tp[1], ep_size=ep[0], ep_rank=ep[1])
    axis = cuts[0]
    dim = _torch.shard_dim_of(placements[axis])
    assert dim is not None
    return Coordinates(*tp, mesh.size(axis), coordinate[axis], dim, *ep)
