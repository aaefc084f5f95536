"""The collectives of an optimizer step whose state is cut over holders of the same parameters.

    gradients (one shard each)  --reduce-scatter, AVG-->  this rank's rows
    new rows, as they travel    --all-gather-->           shards

A large tensor that is cut along its first dim travels by itself, without a copy: its rows lie one after the other
already. All others are packed, one collective per group and dtype, however many there are. Rows are padded to the same
number per holder. A holder whose backward has not reached a parameter sends zeros, and says so: behind the packed rows
each holder sends one number per parameter, 1 where it has a gradient.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from te_fsdp import _torch
from te_fsdp.move.comm import GradComm, comm_of
from te_fsdp.move.start import all_gather_single, reduce_scatter
from te_fsdp.sharding.outer_chunks import Chunk
from te_fsdp.sharding.state import state_of

__all__ = [
    "LARGE",
    "Average",
    "Part",
    "Way",
    "average",
    "by_group",
    "comm_for",
    "start_average",
    "start_gather",
]

#: Elements of a tensor that is worth a collective of its own; a smaller one is packed.
LARGE = 1 << 20
#: Elements; kernels read several at once from addresses that allow it.
_ALIGNED = 16
#: Key of a batch: global ranks of the holders, dtype on the wire.
Key = tuple[tuple[int, ...], torch.dtype]


def by_group(chunks: Sequence[Chunk], dtypes: Sequence[torch.dtype]) -> dict[Key, list[int]]:
    """Places of the chunks that travel together."""
    found: dict[Key, list[int]] = {}
    for place, (chunk, dtype) in enumerate(zip(chunks, dtypes, strict=True)):
        found.setdefault((chunk.ranks, dtype), []).append(place)
    return found


# ------------------------------------------------------------------------------------------------------------ gradients


class Average(NamedTuple):
    """This rank's rows of a gradient, averaged over the holders.

    Attributes:
        rows: Of shape ``chunk.shape``.
        holders: How many holders have a gradient, on the device and not as a whole number; ``None`` where this rank is
            one of them.
    """

    rows: torch.Tensor
    holders: torch.Tensor | None = None

    def result(self) -> torch.Tensor | None:
        """The rows; ``None`` where no holder has a gradient.

        Only a rank without a gradient has to ask, which on a GPU waits for the device.
        """
        return self.rows if self.holders is None or bool(self.holders > 0) else None


def average(
    chunks: Sequence[Chunk], gradients: Sequence[torch.Tensor | None], dtype: torch.dtype
) -> list[Average]:
    """This rank's rows of each gradient, averaged over the holders, or summed if the user wants sums.

    Collective over the holders, all the same: a reduce-scatter, and one more for each large tensor; in ``dtype`` or
    what the model's precision policy says. Temporary memory: what is packed, and what has another dtype, once in
    ``dtype``.

    Args:
        chunks: The parameters, in the same order on all holders.
        gradients: Local gradient of each, of the local tensor's shape; ``None`` where this rank has none.
        dtype: Of the result.
    """
    return start_average(chunks, gradients, dtype, Way(chunks[0].copies.group, comm_for(chunks[0])))()


class Way(NamedTuple):
    """How gradients get to their holders.

    Attributes:
        group: The holders.
        comm: How gradients travel.
        flags: Whether holders tell each other which gradients they have.
        async_op: Whether nothing waits for it before the result is asked for; the gradients must not change until then.
    """

    group: dist.ProcessGroup
    comm: GradComm | None
    flags: bool = True
    async_op: bool = False


def start_average(
    chunks: Sequence[Chunk], gradients: Sequence[torch.Tensor | None], dtype: torch.dtype, way: Way
) -> Callable[[], list[Average]]:
    """Begin :func:`average`. Collective over the holders, all the same: as that; without flags only what is sent.

    Args:
        chunks: As there.
        gradients: As there.
        dtype: As there.
        way: To the holders.

    Returns:
        Waits, where nothing has waited yet, and returns the averages. Without flags they are there in any case, zero
        where no holder has a gradient.
    """
    alone = [_travels_alone(chunk, chunk.numel, chunk.dim) for chunk in chunks]
    packed = [place for place, large in enumerate(alone) if not large]
    under_way: list[Callable[[], Any]] = []
    rows, holders = _start_packed(chunks, gradients, packed, dtype, way, under_way)
    for place, (chunk, gradient) in enumerate(zip(chunks, gradients, strict=True)):
        if not alone[place]:
            continue
        if gradient is None:
            local = _torch.local_of(chunk.parameter)
            source = torch.zeros(local.shape, dtype=dtype, device=local.device)
        else:
            source = gradient.to(dtype).contiguous()
        rows[place] = torch.empty(chunk.shape, dtype=dtype, device=source.device)
        _send(rows[place].view(-1), source.view(-1), chunk, way, under_way)
    averages = [
        Average(rows[place], holders[place] if way.flags and gradient is None else None)
        for place, gradient in enumerate(gradients)
    ]

    def finish() -> list[Average]:
        while under_way:
            under_way.pop(0)()
        return averages

    return finish


def _send(
    output: torch.Tensor, source: torch.Tensor, chunk: Chunk, way: Way, under_way: list[Callable[[], Any]]
) -> None:
    """One reduce-scatter; what is left to do about it joins ``under_way``."""
    op = dist.ReduceOp.SUM if chunk.copies.sums else dist.ReduceOp.AVG
    finish = reduce_scatter(output, source, way.group, way.comm, op=op, async_op=way.async_op).wait
    if way.async_op:
        under_way.append(finish)
    else:
        finish()


def _start_packed(
    chunks: Sequence[Chunk],
    gradients: Sequence[torch.Tensor | None],
    packed: list[int],
    dtype: torch.dtype,
    way: Way,
    under_way: list[Callable[[], Any]],
) -> tuple[dict[int, torch.Tensor], torch.Tensor]:
    """Rows of the gradients at the places ``packed``, and how many holders have each gradient, packed or not."""
    first = chunks[0]
    small = [chunks[place] for place in packed]
    sizes = [chunk.numel for chunk in small]
    total = sum(map(_aligned, sizes))
    flags = len(chunks) if way.flags else 0
    device = _torch.local_of(first.parameter).device
    buffer = torch.empty(first.size, total + flags, dtype=dtype, device=device)
    buffer[:, total:] = 1
    for place, gradient in enumerate(gradients[:flags]):
        if gradient is None:
            buffer[:, total + place] = 0
    for chunk, place, part in zip(small, packed, _segments(buffer, sizes), strict=True):
        gradient = gradients[place]
        if gradient is None:
            part.zero_()
        elif chunk.is_even:
            part.view(chunk.size, *chunk.shape).copy_(chunk.by_holder(gradient))
        else:
            part.zero_()
            for holder, rows in enumerate(gradient.split(chunk.step) if chunk.step else ()):
                part[holder, : rows.numel()].copy_(rows.reshape(-1))
    result = torch.empty(buffer.shape[1], dtype=dtype, device=device)
    if result.numel():
        _send(result, buffer.view(-1), first, way, under_way)
    found = {
        place: part[: (chunk.high - chunk.low) * chunk.width].view(chunk.shape)
        for chunk, place, part in zip(small, packed, _segments(result, sizes), strict=True)
    }
    return found, result[total:]


def comm_for(chunk: Chunk) -> GradComm | None:
    """How the model that a parameter belongs to wants gradients to travel. Local operation."""
    state = state_of(chunk.parameter)
    return comm_of(state.model) if state is not None else None


# -------------------------------------------------------------------------------------------------------------- weights


class Part(NamedTuple):
    """One tensor of which each holder has rows.

    Attributes:
        chunk: Of the parameter: names the holders, and the dim.
        mine: This rank's rows, along ``chunk.dim``.
        whole: Where the rows of all holders go, of the same dtype; this rank's may lie there already.
    """

    chunk: Chunk
    mine: torch.Tensor
    whole: torch.Tensor

    @property
    def step(self) -> int:
        """Rows per holder, the last ones may have fewer."""
        return -(-self.whole.shape[self.chunk.dim] // self.chunk.size)

    @property
    def numel(self) -> int:
        """Elements that each holder sends: its rows, padded to :attr:`step`."""
        rows = self.whole.shape[self.chunk.dim]
        return self.step * (self.whole.numel() // rows) if rows else 0


def start_gather(
    parts: Sequence[Part], *, as_bytes: bool = False, async_op: bool = False
) -> Callable[[], None]:
    """Begin to give each holder the rows of all holders.

    Collective over the holders, all the same: one all-gather per group and dtype, and one more for each large tensor.
    Temporary memory: what is packed, once.

    Args:
        parts: In the same order on all holders.
        as_bytes: Pack tensors of all dtypes together.
        async_op: Whether nothing waits for it, and nothing that is packed is written, before the returned function is
            called; the parts must not change until then.

    Returns:
        Completes what is left to do: nothing without ``async_op``.
    """
    under_way: list[Callable[[], Any]] = []
    dtypes = [torch.uint8 if as_bytes else part.mine.dtype for part in parts]
    for (_, dtype), places in by_group([part.chunk for part in parts], dtypes).items():
        packed = []
        for part in (parts[place] for place in places):
            alone = _travels_alone(part.chunk, part.numel, part.chunk.dim)
            if alone and part.whole.is_contiguous() and part.mine.is_contiguous():
                group = part.chunk.copies.group
                whole, mine = part.whole.view(-1), part.mine.view(-1)
                work = all_gather_single(whole, mine, group=group, async_op=async_op)
                if async_op:
                    under_way.append(functools.partial(_arrived, work, mine))
            else:
                packed.append(part)
        if packed:
            finish = _start_packed_gather(packed, dtype, async_op)
            if async_op:
                under_way.append(finish)
            else:
                finish()

    def complete() -> None:
        while under_way:
            under_way.pop(0)()

    return complete


def _arrived(work: Any, sent: torch.Tensor) -> None:
    """Wait for a collective; what it sends is kept until then."""
    work.wait()


def _start_packed_gather(parts: Sequence[Part], dtype: torch.dtype, async_op: bool) -> Callable[[], None]:
    """One all-gather, in ``dtype``, which is that of the parts, or bytes; the returned function writes the wholes."""
    chunk, device = parts[0].chunk, parts[0].mine.device
    sizes = [part.numel * part.mine.element_size() // dtype.itemsize for part in parts]
    mine = torch.empty(sum(map(_aligned, sizes)), dtype=dtype, device=device)
    for part, segment in zip(parts, _segments(mine, sizes), strict=True):
        rows = segment.view(part.mine.dtype)
        rows[: part.mine.numel()].view(part.mine.shape).copy_(part.mine)
        rows[part.mine.numel() :].zero_()
    buffer = torch.empty(chunk.size, mine.numel(), dtype=dtype, device=device)
    work = all_gather_single(buffer.view(-1), mine, group=chunk.copies.group, async_op=async_op)

    def finish() -> None:
        if async_op:
            _arrived(work, mine)
        for part, segment in zip(parts, _segments(buffer, sizes), strict=True):
            _unpack(part, segment.view(part.mine.dtype))

    return finish


def _unpack(part: Part, gathered: torch.Tensor) -> None:
    """Write gathered rows, ``(holders, elements)``, into the whole tensor."""
    whole, dim, size, step = part.whole, part.chunk.dim, part.chunk.size, part.step
    if whole.shape[dim] == size * step:
        whole.unflatten(dim, (size, step)).movedim(dim, 0).copy_(gathered.view(size, *part.mine.shape))
        return
    for holder, rows in enumerate(whole.split(step, dim) if step else ()):
        rows.copy_(gathered[holder, : rows.numel()].view(rows.shape))


# ------------------------------------------------------------------------------------------------------------- together


def _travels_alone(chunk: Chunk, numel: int, dim: int) -> bool:
    """Whether a tensor is worth a collective of its own; the same on all holders."""
    return chunk.is_even and dim == 0 and numel * chunk.size >= LARGE


def _aligned(size: int) -> int:
    """Elements that a part takes, so that the next one begins on a multiple of :data:`_ALIGNED`."""
    return -(-size // _ALIGNED) * _ALIGNED


def _segments(packed: torch.Tensor, sizes: Sequence[int]) -> Iterator[torch.Tensor]:
    """Views of each part in the last dim."""
    start = 0
    for size in sizes:
        yield packed[..., start : start + size]
        start += _aligned(size)
