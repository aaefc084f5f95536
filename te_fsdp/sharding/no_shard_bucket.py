"""Buckets of gradients that are all-reduced together: which ranks, what order, what dtype."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from te_fsdp import _torch
from te_fsdp.sharding.comm import GradComm, start_all_reduce

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from te_fsdp.mesh import Meshes

__all__ = ["CAPACITY", "Bucket", "Part", "Ranks", "Travelling", "all_ranks", "current_stream", "pack"]

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
        own: A process group for these reductions alone, instead of the mesh's.
    """

    mesh: DeviceMesh | None
    divisor: int
    own: dist.ProcessGroup | None = None

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The process group that adds."""
        return self.mesh.get_group() if self.own is None and self.mesh is not None else self.own

    def apart(self, root: DeviceMesh) -> Ranks:
        """The same ranks by a process group of their own.

        Two reductions that ranks may start in different orders must not share one: FSDP2's and these, when ranks use
        different modules. Collective over the world: makes process groups.

        Args:
            root: The mesh of the job that the ranks' axis is cut from. Of several axes the group is their own already.
        """
        names = root.mesh_dim_names or ()
        if self.mesh is None or self.mesh.mesh_dim_names is None or self.mesh.mesh_dim_names[0] not in names:
            return self
        axis = names.index(self.mesh.mesh_dim_names[0])
        rows = root.mesh.movedim(axis, -1).reshape(-1, self.mesh.size()).tolist()
        own, _ = dist.new_subgroups_by_enumeration(rows)
        return replace(self, own=own)

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


def all_ranks(meshes: Meshes, *, apart: bool) -> tuple[Ranks, Ranks]:
    """Over whom gradients of dense parameters are added up, and those of experts. Collective over the world.

    Args:
        meshes: The job's meshes.
        apart: By process groups of their own.
    """
    dense = Ranks.dense(meshes)
    if apart:
        dense = dense.apart(meshes.device_mesh)
    if meshes.expert_mesh is None:
        return dense, dense
    experts = Ranks.experts(meshes)
    return dense, experts.apart(meshes.expert_mesh) if apart else experts


def _flat(mesh: DeviceMesh | None, name: str) -> DeviceMesh | None:
    """A mesh as one axis, ``None`` for one rank."""
    if mesh is None or mesh.size() == 1:
        return None
    axes = mesh.mesh_dim_names or ()
    large = [axis for axis in axes if mesh[axis].size() > 1]
    return mesh[large[0]] if len(large) == 1 else _torch.flatten_mesh(mesh, name)


@dataclass(frozen=True, eq=False)
class Part:
    """The place of one gradient in a bucket.

    Attributes:
        key: Given back with the result.
        shape: Local shape of the parameter.
        device: Its device.
        dtype: Dtype in which its gradient is accumulated.
        ranks: Over whom it is added up.
        partial: Whether to add it up over tp as well.
    """

    key: Any
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
        parts: In an order that is the same on all ranks.
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

    @torch.no_grad()
    def start(self, comm: GradComm | None, take: Callable[[Any], torch.Tensor | None]) -> Travelling:
        """Begin to all-reduce the bucket.

        Collective over data parallel (once), and over tp if it holds partial gradients (once, and the current stream
        waits for that). The gradients are freed when they are in the bucket, unless the caller holds them.

        Args:
            comm: How gradients travel; ``None``: in their own dtype.
            take: Key -> local gradient; ``None`` if this rank has none.
        """
        flat, mine = self._flat(take)
        return self._send(flat, mine, comm)

    def start_spoilt(self, comm: GradComm | None) -> Travelling:
        """Take part in the bucket's reduction, once, with NaN for all gradients. Collective as :meth:`start`."""
        first, room = self.parts[0], sum(part.room for part in self.parts) + len(self.parts)
        flat = torch.full((room,), math.nan, dtype=first.dtype, device=first.device)
        return self._send(flat, [True] * len(self.parts), comm)

    def _send(self, flat: torch.Tensor, mine: list[bool], comm: GradComm | None) -> Travelling:
        ranks = self.parts[0].ranks
        partial = sum(part.room for part in self.parts if part.partial)
        if partial and self.tp is not None:
            dist.all_reduce(flat[:partial], group=self.tp.get_group())
        stream = current_stream(flat.device)
        if ranks.group is None:
            return Travelling(self, mine, lambda: flat, stream)
        result = start_all_reduce(flat, ranks.group, comm, average=ranks.divisor != 1)
        return Travelling(self, mine, result, stream)

    def _flat(self, take: Callable[[Any], torch.Tensor | None]) -> tuple[torch.Tensor, list[bool]]:
        """All gradients one after the other, and a flag for each: whether this rank has it."""
        gap = torch.zeros(_ALIGNED, dtype=self.parts[0].dtype, device=self.parts[0].device)
        pieces, mine = [], []
        for part in self.parts:
            size, value = part.shape.numel(), take(part.key)
            pieces.append(gap.new_zeros(size) if value is None else value.reshape(-1).to(part.dtype))
            pieces.append(gap[: part.room - size])
            mine.append(value is not None)
        pieces.append(
            gap.new_ones(len(mine)) if all(mine) else gap.new_tensor([float(flag) for flag in mine])
        )
        return torch.cat(pieces), mine


@dataclass(frozen=True, eq=False)
class Travelling:
    """A bucket whose reduction has begun.

    Attributes:
        bucket: Which one.
        mine: For each part whether this rank had a gradient.
        result: Waits for the reduction, on the current stream where the device has streams, and returns it.
        stream: The stream that the buffer was made on; ``None`` where the device has none.
    """

    bucket: Bucket
    mine: list[bool]
    result: Callable[[], torch.Tensor]
    stream: torch.Stream | None

    @torch.no_grad()
    def finish(self) -> Iterator[tuple[Any, torch.Tensor]]:
        """Wait for the reduction.

        Collective over data parallel only with fp32 sums of another wire dtype (an all-gather).

        Yields:
            Key and reduced local gradient of each parameter that had a gradient on any of the ranks.
        """
        parts, flat = self.bucket.parts, self.result()
        now = current_stream(flat.device)
        if now is not None and now != self.stream:
            flat.record_stream(now)
        ranks = parts[0].ranks
        averaged = ranks.group.size() if ranks.group is not None and ranks.divisor != 1 else 1
        # Flags of other ranks are read, and the device waited for, only where this rank lacks a gradient. NaN counts.
        seen = self.mine if all(self.mine) else [flag != 0 for flag in flat[-len(parts) :].tolist()]
        if averaged != ranks.divisor:
            flat.mul_(averaged / ranks.divisor)
        at = 0
        for part, given in zip(parts, seen, strict=True):
            if given:
                yield part.key, flat[at : at + part.shape.numel()].view(part.shape)
            at += part.room


def current_stream(device: torch.device) -> torch.Stream | None:
    """The stream that work on ``device`` goes to now; ``None`` for the CPU."""
    return None if device.type == "cpu" else torch.accelerator.current_stream(device)
