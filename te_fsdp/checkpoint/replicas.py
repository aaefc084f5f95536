"""Reading once what several ranks load: each of them reads a part of it, and sends it to the others.

Ranks that hold copies of one shard (HSDP's replicas, all ranks without sharding) ask for the same. Where storage is the
limit, the bytes that come from it count, and not those between the ranks.

All is read, and right, on all ranks before anything is sent: a rank that meets damage leaves nobody waiting.
Sent is from rank to rank over our own gloo group; in the k-th turn each sends to the k-th one after it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from te_fsdp.agree import Ranks, digest
from te_fsdp.checkpoint.background import HostMemory, aligned
from te_fsdp.checkpoint.compare import Rectangle, Staged
from te_fsdp.errors import CheckpointError
from te_fsdp.layout import slices

#: Bytes that are sent together, unless a single tensor has more.
_MESSAGE = 1 << 26
#: Ranks beyond which others read the same once more: to have it from ever more ranks costs messages.
_MOST = 64
#: Tensors of the model and the optimizer; further ones may be a rank's own.
_COMMON = ("model.", "optimizer.", "delayed.")


@dataclass
class _Message:
    """Rectangles that are sent together, with the bytes where each begins."""

    places: list[tuple[Rectangle, int]]
    size: int = 0


@dataclass
class Share:
    """What one rank reads of what it and others want, and what it gets from them.

    Attributes:
        ranks: The world.
        members: Those that want the same, in ascending order.
        own: What this rank reads: its part, and what it alone wants.
        dtypes: Of the tensors of the files, by key.
        sent: Messages by member.
        received: Memory for the other members' messages, by member.
    """

    ranks: Ranks
    members: list[int]
    own: list[Rectangle]
    dtypes: Mapping[str, torch.dtype]
    sent: list[list[_Message]] = field(default_factory=list)
    received: dict[int, list[torch.Tensor]] = field(default_factory=dict)

    @classmethod
    def of(cls, ranks: Ranks, wanted: list[Rectangle], dtypes: Mapping[str, torch.dtype]) -> Share:
        """Find who wants the same as this rank. Collective over the ranks: a round of small messages."""
        common = [place for place in wanted if place[0].startswith(_COMMON) and place[0] in dtypes]
        members = ranks.round(lambda: digest(repr(common)), _alike)
        share = cls(ranks, members, wanted, dtypes)
        if len(members) > 1:
            parts, rest = share._divide(common), set(wanted) - set(common)
            share.own = [*parts[members.index(ranks.rank)], *(place for place in wanted if place in rest)]
            share.sent = [share._messages(part) for part in parts]
        return share

    def provide(self) -> None:
        """Have memory for what others send. Local operation; may fail, so that all ranks must hear of it."""
        memory = HostMemory()
        for member, messages in zip(self.members, self.sent, strict=False):
            if member != self.ranks.rank:
                self.received[member] = [memory.take(message.size) for message in messages]

    def exchange(self, staged: Staged) -> None:
        """Send what this rank has read to the others, and take theirs. Collective over the members.

        Raises:
            CheckpointError: A rank has died.
        """
        count, me = len(self.members), self.members.index(self.ranks.rank)
        for number in range(max(map(len, self.sent), default=0)):
            packed = [self._pack(message, staged) for message in self.sent[me][number : number + 1]]
            for turn in range(1, count):
                source = self.members[(me - turn) % count]
                theirs = self.received[source][number : number + 1]
                try:
                    works = [self.ranks.group.recv(theirs, source, 1)] if theirs else []
                    if packed:
                        works.append(self.ranks.group.send(packed, self.members[(me + turn) % count], 1))
                    for work in works:
                        work.wait()
                except RuntimeError as lost:  # gloo's
                    raise CheckpointError(f"rank {self.ranks.rank} lost another rank: {lost}") from lost
        for member, memory in self.received.items():
            for message, data in zip(self.sent[self.members.index(member)], memory, strict=True):
                for place, view in self._views(message, data):
                    staged.parts[place] = [((0,) * len(place[1]), view)]
        self.received.clear()  # the memory goes with the last tensor in it

    def _pack(self, message: _Message, staged: Staged) -> torch.Tensor:
        data = torch.empty(message.size, dtype=torch.uint8, device="cpu")
        for place, view in self._views(message, data):
            for offsets, values in staged.parts[place]:
                view[slices(offsets, values.shape)].copy_(values)
        return data

    def _views(self, message: _Message, data: torch.Tensor) -> list[tuple[Rectangle, torch.Tensor]]:
        """The rectangles of a message, as tensors in its memory."""
        parts = ((place, data[begin : begin + self._bytes_of(place)]) for place, begin in message.places)
        return [(place, part.view(self.dtypes[place[0]]).view(place[2])) for place, part in parts]

    def _bytes_of(self, place: Rectangle) -> int:
        return math.prod(place[2]) * self.dtypes[place[0]].itemsize

    def _divide(self, places: list[Rectangle]) -> list[list[Rectangle]]:
        """Parts of about as many bytes, each in the order of the whole: neighbours lie side by side in the files."""
        sizes, count = [self._bytes_of(place) for place in places], len(self.members)
        parts: list[list[Rectangle]] = [[] for _ in range(count)]
        total, before = max(1, sum(sizes)), 0
        for place, size in zip(places, sizes, strict=True):
            parts[min(count - 1, (before + size // 2) * count // total)].append(place)
            before += size
        return parts

    def _messages(self, places: list[Rectangle]) -> list[_Message]:
        messages: list[_Message] = []
        for place in places:
            size = aligned(self._bytes_of(place))
            if not messages or messages[-1].size + size > _MESSAGE:
                messages.append(_Message([]))
            messages[-1].places.append((place, messages[-1].size))
            messages[-1].size += size
        return messages


def _alike(seen: list[int]) -> list[list[int]]:
    """For each rank those with its number, at most so many that each still reads much of it."""
    alike: dict[int, list[int]] = {}
    for rank, number in enumerate(seen):
        alike.setdefault(number, []).append(rank)
    place: dict[int, list[int]] = {}
    for ranks in alike.values():
        for first in range(0, len(ranks), _MOST):
            place |= dict.fromkeys(ranks[first : first + _MOST], ranks[first : first + _MOST])
    return [place[rank] for rank in range(len(seen))]
