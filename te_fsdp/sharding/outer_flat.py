"""The two flat collectives of an optimizer step whose state is cut over holders of the same parameters.

    gradients (one shard each)  --cut into rows, packed-->  (holders, total)  --reduce-scatter, AVG-->  (total,)
    main weights (own rows)     --packed-->  (total,)  --all-gather-->  (holders, total)  --unpacked--> shards

One collective each per group and dtype, however many parameters there are. Rows are padded to the same number per
holder. A holder whose backward has not reached a parameter sends zeros, and says so: behind the rows each holder sends
one number per parameter, 1 where it has a gradient.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist

from te_fsdp import _torch
from te_fsdp.sharding.comm import GradComm, all_gather_single, comm_of, reduce_scatter_gradients
from te_fsdp.sharding.outer_chunks import Chunk
from te_fsdp.sharding.state import state_of

__all__ = ["average", "by_group", "gather", "unpack"]

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


def average(
    chunks: Sequence[Chunk], gradients: Sequence[torch.Tensor | None], dtype: torch.dtype
) -> list[torch.Tensor | None]:
    """This rank's rows of each gradient, averaged over the holders, or summed if the user wants sums.

    Collective over the holders, all the same: one reduce-scatter, in ``dtype`` or what the model's precision policy
    says. Temporary memory: the gradients once in ``dtype``.

    Args:
        chunks: The parameters, in the same order on all holders.
        gradients: Local gradient of each, of the local tensor's shape; ``None`` where this rank has none.
        dtype: Of the result.

    Returns:
        Rows of shape ``chunk.shape``; ``None`` where no holder has a gradient.
    """
    first = chunks[0]
    total = _total(chunks)
    device = _torch.local_of(first.parameter).device
    packed = torch.empty(first.size, total + len(chunks), dtype=dtype, device=device)
    packed[:, total:] = 1
    for place, (chunk, part) in enumerate(zip(chunks, _parts(packed, chunks), strict=True)):
        gradient = gradients[place]
        if gradient is None:
            part.zero_()
            packed[:, total + place] = 0
        elif chunk.is_even:
            part.view(chunk.size, *chunk.shape).copy_(chunk.by_holder(gradient))
        else:
            part.zero_()
            for holder, rows in enumerate(gradient.split(chunk.step) if chunk.step else ()):
                part[holder, : rows.numel()].copy_(rows.reshape(-1))
    result = torch.empty(packed.shape[1], dtype=dtype, device=device)
    op = dist.ReduceOp.SUM if first.copies.sums else dist.ReduceOp.AVG
    reduce_scatter_gradients(result, packed.view(-1), first.copies.group, _comm(first), op=op)
    found: list[torch.Tensor | None] = []
    for place, (chunk, part) in enumerate(zip(chunks, _parts(result, chunks), strict=True)):
        # Only a rank without a gradient has to ask, which on a GPU waits for the device.
        present = gradients[place] is not None or bool(result[total + place] > 0)
        found.append(part[: (chunk.high - chunk.low) * chunk.width].view(chunk.shape) if present else None)
    return found


def gather(chunks: Sequence[Chunk], rows: Sequence[torch.Tensor]) -> Iterator[tuple[Chunk, torch.Tensor]]:
    """All holders' rows of each parameter.

    Collective over the holders, all the same, when the first is asked for: one all-gather. Temporary memory: the
    parameters' local tensors once.

    Args:
        chunks: The parameters, in the same order on all holders.
        rows: This rank's rows of each, all of one dtype.

    Yields:
        Chunk, and its rows as ``(holders, chunk.numel)``, a view; padded.
    """
    first = chunks[0]
    mine = torch.empty(_total(chunks), dtype=rows[0].dtype, device=rows[0].device)
    for own, part in zip(rows, _parts(mine, chunks), strict=True):
        part[: own.numel()].copy_(own.reshape(-1))
        part[own.numel() :].zero_()
    packed = torch.empty(first.size, mine.numel(), dtype=mine.dtype, device=mine.device)
    all_gather_single(packed.view(-1), mine, group=first.copies.group)
    yield from zip(chunks, _parts(packed, chunks), strict=True)


def unpack(chunk: Chunk, part: torch.Tensor, local: torch.Tensor) -> None:
    """Write gathered rows into a tensor like the parameter's local one."""
    if chunk.is_even:
        chunk.by_holder(local).copy_(part.view(chunk.size, *chunk.shape))
        return
    for holder, rows in enumerate(local.split(chunk.step) if chunk.step else ()):
        rows.copy_(part[holder, : rows.numel()].view(rows.shape))


def _comm(chunk: Chunk) -> GradComm | None:
    """How the model that a parameter belongs to wants gradients to travel."""
    state = state_of(chunk.parameter)
    return comm_of(state.model) if state is not None else None


def _total(chunks: Sequence[Chunk]) -> int:
    """Elements that each holder sends or receives, every part beginning on a multiple of :data:`_ALIGNED`."""
    return sum(-(-chunk.numel // _ALIGNED) * _ALIGNED for chunk in chunks)


def _parts(packed: torch.Tensor, chunks: Sequence[Chunk]) -> Iterator[torch.Tensor]:
    """Views of each parameter's part in the last dim."""
    start = 0
    for chunk in chunks:
        yield packed[..., start : start + chunk.numel]
        start += -(-chunk.numel // _ALIGNED) * _ALIGNED
