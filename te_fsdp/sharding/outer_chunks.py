"""Which part of a replicated parameter each of its holders keeps optimizer state for.

A parameter may be held by several ranks alike: over ``dp_replicate`` with ``outer_strategy="optim"`` (HFSDP: each
holds the same FSDP2 shard), or over all of data parallel (``no_shard``). Its local tensor is then cut once more, as
``torch.chunk`` cuts, and each holder updates its own part:

    mesh                (dp_replicate,                dp_shard,              tp)
    parameter                                         (_StridedShard(0, tp),  Shard(0))
    main weight, state  (_StridedShard(0, shard*tp),  _StridedShard(0, tp),   Shard(0))

The first dim is cut that all its axes cut evenly (of a quantized weight, into whole blocks if any is), dim 0 if there
is none. Main weights and states are DTensors of the
parameter's own shape. DCP's own arithmetic is not exact for dims that several axes cut unevenly, so that
te_fsdp.checkpoint goes by :attr:`Chunk.low` and :attr:`Chunk.high`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Partial, Shard

from te_fsdp import _torch
from te_fsdp.layout.boxes import chunk_range
from te_fsdp.move.start import Rows
from te_fsdp.parameters import plan_of
from te_fsdp.quantized.components import block_of
from te_fsdp.sharding.state import state_of

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor.placement_types import Placement

__all__ = ["OUTER", "Chunk", "Copies", "copies_of", "rows_of_state"]

#: The outer axis.
OUTER = "dp_replicate"


@dataclass(frozen=True)
class Copies:
    """Who holds a parameter alike.

    Attributes:
        mesh: The parameter's own mesh (none for a plain tensor) with the axis of its holders put in front.
        reduced: Whether gradients arrive equal on all holders, so that they are only cut. Otherwise they are averaged.
        sums: Whether those that are not reduced are summed instead.
    """

    mesh: DeviceMesh
    reduced: bool
    sums: bool = False

    @property
    def group(self) -> dist.ProcessGroup:
        """Process group of the holders."""
        return self.mesh.get_group(0)

    @property
    def partial(self) -> Partial:
        """How gradients that are not reduced lie on the holders, in DTensor's words."""
        return Partial("sum" if self.sums else "avg")

    @property
    def ranks(self) -> tuple[int, ...]:
        """Global ranks of the holders."""
        return tuple(dist.get_process_group_ranks(self.group))


class Chunk:
    """The part of one parameter's local tensor that this rank keeps state for: its rows, along ``dim``.

    Attributes:
        parameter: The parameter: plain, or a DTensor.
        dtype: Of its main weight and of the average of its gradients: fp32 for low-precision parameters.
        copies: Its holders.
        ranks: Their global ranks.
        size: Number of holders.
        dim: The dim that is cut.
        rows: How the local tensor is cut over the holders.
        low, high: This rank's rows.
        shape: Of these.
        obstacles: Why the weight cannot travel as bytes, by class and shape of the local tensor (``outer_gather``).
    """

    def __init__(self, parameter: torch.Tensor, copies: Copies) -> None:
        local = _torch.local_of(parameter)
        self._specs: dict[torch.dtype, Any] = {}
        self.obstacles: dict[tuple[type, tuple[int, ...]], str | None] = {}
        self.parameter, self.copies, self.ranks = parameter, copies, copies.ranks
        self.dtype = torch.promote_types(parameter.dtype, torch.float32)
        self.dim = _dim_to_cut(parameter, copies.mesh)
        self.size = copies.mesh.size(0)
        self.rows = Rows(local.shape, self.dim, self.size)
        self.low, self.high = chunk_range(local.shape[self.dim], self.size, copies.mesh.get_local_rank(0))
        self.shape = (*local.shape[: self.dim], self.high - self.low, *local.shape[self.dim + 1 :])

    def has_whole(self, unit: int) -> bool:
        """Whether every holder of every piece has equally many rows, a multiple of ``unit``.

        Local operation on the parameter's global shape: all ranks find the same, whatever their own pieces are.
        """
        parts = self.size * _parts(self.parameter, self.copies.mesh, self.dim)
        return self.parameter.shape[self.dim] % (unit * parts) == 0

    @property
    def placements(self) -> tuple[Placement, ...]:
        """Placements of main weight and states on ``copies.mesh``."""
        own, factor = _own_placements(self.parameter), _parts(self.parameter, self.copies.mesh, self.dim)
        return (Shard(self.dim) if factor == 1 else _torch.strided_shard(self.dim, factor), *own)

    def of(self, local: torch.Tensor) -> torch.Tensor:
        """This rank's rows of a tensor like the parameter's local one; a view."""
        return local.narrow(self.dim, self.low, self.high - self.low)

    def distributed(self, rows: torch.Tensor) -> DTensor:
        """DTensor of the parameter's shape around this rank's rows, on ``copies.mesh``. Local operation."""
        spec = self._specs.get(rows.dtype)
        if spec is None:  # made once per dtype: it takes longer than all the rest
            made = _torch.placed(rows, self.copies.mesh, self.placements, self.parameter)
            spec = self._specs[rows.dtype] = _torch.spec_of(made)
        return _torch.dtensor(rows, spec)


def _own_placements(parameter: torch.Tensor) -> tuple[Placement, ...]:
    """Placements of a DTensor, none of a plain tensor."""
    return tuple(parameter.placements) if isinstance(parameter, DTensor) else ()


def _parts(parameter: torch.Tensor, mesh: DeviceMesh, dim: int) -> int:
    """Into how many parts the parameter's own axes cut a dim; ``mesh`` has one axis more in front."""
    placements = enumerate(_own_placements(parameter))
    return math.prod(mesh.size(1 + axis) for axis, p in placements if _torch.shard_dim_of(p) == dim)


def _dim_to_cut(parameter: torch.Tensor, mesh: DeviceMesh) -> int:
    """The first dim that all its axes and that of the holders cut evenly, else 0; the same on all ranks.

    Of a quantized weight the first one that they cut into whole blocks, if there is one.
    """
    block = block_of(_torch.local_of(parameter)) or 1
    for unit in dict.fromkeys((block, 1)):
        for dim, length in enumerate(parameter.shape):
            if length and length % (unit * mesh.size(0) * _parts(parameter, mesh, dim)) == 0:
                return dim
    return 0


def rows_of_state(value: torch.Tensor, parameter: torch.Tensor) -> tuple[int, int, int] | None:
    """Dim and half-open range of it of the part of a local tensor that a state covers; ``None`` if it is not cut.

    Local operation.
    """
    own = parameter.device_mesh.ndim if isinstance(parameter, DTensor) else 0
    if not isinstance(value, DTensor) or value.device_mesh.ndim != own + 1:
        return None
    mesh, dim = value.device_mesh, _torch.shard_dim_of(value.placements[0])
    assert dim is not None
    low, high = chunk_range(_torch.local_of(parameter).shape[dim], mesh.size(0), mesh.get_local_rank(0))
    return dim, low, high


def copies_of(parameter: torch.Tensor) -> Copies | None:
    """Who holds a parameter alike, such that its optimizer state is to be cut; ``None`` where it is not.

    Local operation. Scalars are never cut.
    """
    plan, state = plan_of(parameter), state_of(parameter)
    if plan is None or state is None or parameter.ndim == 0:
        return None
    meshes = state.meshes
    root = meshes.expert_mesh if plan.experts and meshes.expert_mesh is not None else meshes.device_mesh
    axes = tuple(axis for axis in plan.storage.cut_further if root[axis].size() > 1)
    if not axes:
        return None
    own = parameter.device_mesh if isinstance(parameter, DTensor) else None
    if plan.storage.is_whole:
        # Made when the model was sharded, for the reductions of gradients.
        name = "data" if root is meshes.device_mesh else "expert_data"
        holders = root[axes] if len(axes) == 1 else _torch.flatten_mesh(root[axes], name)
        return Copies(holders if own is None else _torch.concatenated_meshes(holders, own), reduced=True)
    assert own is not None and own.mesh_dim_names is not None
    return Copies(root[(*axes, *own.mesh_dim_names)], reduced=False, sums=not state.average_gradients)
