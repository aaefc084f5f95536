"""Buckets of gradients that are all-reduced together: which ranks, what order, what dtype."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from te_fsdp import _torch
from te_fsdp.sharding.comm import GradComm, all_reduce_gradients

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from te_fsdp.mesh import Meshes

__all__ = ["CAPACITY", "Bucket", "Part", "Ranks", "pack"]

#: Elements of one all-reduce; larger tensors travel alone. A copy of all gradients could be as large as the model.
CAPACITY = 1 << 25
# Parts begin at multiples of this many elements, so that kernels may read the gradients in vectors.
_ALIGNED = 64


@dataclass(frozen=True)
class Ranks:
    """Over whom gradients are added up.

    Attributes:
        mesh: 1-D mesh of the ranks that hold the same parameters and see other data; ``None`` for one rank.
        divisor: What the sum is divided by; 1 for sums.
    """

    mesh: DeviceMesh | None
    divisor: int

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The mesh's process group."""
        return self.mesh.get_group() if self.mesh is not None else None

    @classmethod
    def dense(cls, meshes: Meshes) -> Ranks:
        """Data parallelism. Collective over the world where it has two axes: a process group is made."""
        return cls(_flat(meshes.fsdp, "data"), meshes.size("dp_replicate") * meshes.size("dp_shard"))

    @classmethod
    def experts(cls, meshes: Meshes) -> Ranks:
        """The ranks with the same experts; but an expert's loss is the mean over the data of all ranks."""
        if meshes.expert_mesh is None:
            return cls.dense(meshes)
        return cls(_flat(meshes.expert_fsdp, "expert_data"), cls.dense(meshes).divisor)


def _flat(mesh: DeviceMesh | None, name: str) -> DeviceMesh | None:
    """A mesh as one axis, ``None`` for one rank."""
    if mesh is None or mesh.size() == 1:
        return None
    axes = mesh.mesh_dim_names or ()
    large = [axis for axis in axes if mesh[axis].size() > 1]
    return mesh[large[0]] if len(large) == 1 else _torch.flatten_mesh(mesh, name)


@dataclass(eq=False)
class Part:
    """One gradient to reduce.

    Attributes:
        key: Given back with the result.
        value: Local gradient, ``None`` if this rank has none, and once it is in a bucket.
        shape: Local shape of the parameter.
        device: Its device.
        dtype: Dtype in which it is accumulated.
        ranks: Over whom it is added up.
        partial: Whether to add it up over tp as well.
    """

    key: Any
    value: torch.Tensor | None
    shape: torch.Size
    device: torch.device
    dtype: torch.dtype
    ranks: Ranks
    partial: bool

    @property
    def room(self) -> int:
        """Elements that it takes in a bucket."""
        return -(-self.shape.numel() // _ALIGNED) * _ALIGNED


def pack(parts: Iterable[Part], tp: DeviceMesh | None) -> list[Bucket]:
    """Buckets of at most :data:`CAPACITY` elements (or one tensor), in an order that follows from the parts' own.

    Local operation.

    Args:
        parts: In the same order on all ranks, those without a gradient included.
        tp: The tensor-parallel mesh.
    """
    kinds: dict[tuple[Ranks, torch.dtype, torch.device], list[Part]] = {}
    for part in parts:
        kinds.setdefault((part.ranks, part.dtype, part.device), []).append(part)
    buckets = []
    for same in kinds.values():
        # Parts to add up over tp come first: they are one piece of the bucket.
        filling: list[Part] = []
        filled = 0
        for part in sorted(same, key=lambda part: not part.partial):
            if filling and filled + part.room > CAPACITY:
                buckets.append(Bucket(tuple(filling), tp))
                filling, filled = [], 0
            filling.append(part)
            filled += part.room
        buckets.append(Bucket(tuple(filling), tp))
    return buckets


@dataclass(frozen=True, eq=False)
class Bucket:
    """Gradients of one kind that travel together.

    Attributes:
        parts: Those to add up over tp first, then the others.
        tp: The tensor-parallel mesh.
    """

    parts: tuple[Part, ...]
    tp: DeviceMesh | None

    def reduce(self, comm: GradComm | None) -> Iterator[tuple[Any, torch.Tensor]]:
        """All-reduce the bucket.

        Collective over data parallel (once), and over tp if it holds partial gradients (once).

        Args:
            comm: How gradients travel; ``None``: in their own dtype.

        Yields:
            Key and reduced local gradient of each parameter that had a gradient on any of the ranks.
        """
        ranks, flat = self.parts[0].ranks, self._flat()
        mine = [part.value is not None for part in self.parts]
        for part in self.parts:
            part.value = None
        partial = sum(part.room for part in self.parts if part.partial)
        if partial and self.tp is not None:
            dist.all_reduce(flat[:partial], group=self.tp.get_group())
        averaged = 1
        if ranks.group is not None:
            average = ranks.divisor != 1
            all_reduce_gradients(flat, ranks.group, comm, average=average)
            averaged = ranks.group.size() if average else 1
        # Flags of other ranks are read, and the device waited for, only where this rank lacks a gradient.
        seen = mine if all(mine) else [flag > 0 for flag in flat[-len(mine) :].tolist()]
        if averaged != ranks.divisor:
            flat.mul_(averaged / ranks.divisor)
        at = 0
        for part, given in zip(self.parts, seen, strict=True):
            if given:
                yield part.key, flat[at : at + part.shape.numel()].view(part.shape)
            at += part.room

    def _flat(self) -> torch.Tensor:
        """All gradients one after the other, and a flag for each: whether this rank has it."""
        gap = torch.zeros(_ALIGNED, dtype=self.parts[0].dtype, device=self.parts[0].device)
        pieces = []
        for part in self.parts:
            size, value = part.shape.numel(), part.value
            pieces.append(gap.new_zeros(size) if value is None else value.reshape(-1).to(part.dtype))
            pieces.append(gap[: part.room - size])
        given = [float(part.value is not None) for part in self.parts]
        pieces.append(gap.new_ones(len(given)) if all(given) else gap.new_tensor(given))
        return torch.cat(pieces)
