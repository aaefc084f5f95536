"""Pieces that several ranks hold: written once, so they must be equal. Compared by checksums."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from te_fsdp.agree import Ranks
from te_fsdp.checkpoint.staging import blocks_of, flat_rows
from te_fsdp.checkpoint.sums import crc32, view_of
from te_fsdp.errors import CheckpointError, message

__all__ = ["check_replicas", "checksums"]

# Odd multipliers of linear congruential generators (Knuth; Steele and Vigna): sums depend on the positions.
_IN_BLOCK, _PER_BLOCK = 6364136223846793005, 3935559000370003845
#: Elements that are summed up at once on a device, which bounds the memory for it (16 bytes each).
_BLOCK = 1 << 22


def check_replicas(ranks: Ranks, shared: dict[int, torch.Tensor], names: list[str]) -> None:
    """Raise on all ranks unless pieces that several ranks hold have the same bytes on all of them.

    Collective over the ranks: one round of small messages.

    Args:
        ranks: The world.
        shared: This rank's pieces that others hold as well, by numbers that are the same on all ranks.
        names: Of the tensors, by number; rank 0 alone needs them.

    Raises:
        CheckpointError: Names the tensors and the ranks.
    """
    if ranks.size == 1:
        return

    def mine() -> dict[int, int]:
        return dict(zip(shared, checksums(shared.values()), strict=True))

    def compare(seen: list[dict[int, int]]) -> list[None]:
        first: dict[int, tuple[int, int]] = {}
        differing: dict[str, set[tuple[int, int]]] = {}
        for rank, sums in enumerate(seen):
            for number, value in sums.items():
                holder, expected = first.setdefault(number, (rank, value))
                if value != expected:
                    differing.setdefault(names[number], set()).add((rank, holder))
        if differing:
            raise CheckpointError(_drifted(differing))
        return [None] * len(seen)

    ranks.round(mine, compare)


def _drifted(differing: dict[str, set[tuple[int, int]]]) -> str:
    names = sorted(differing)
    shown = [f"{name} ({_pairs(differing[name])})" for name in names[:5]]
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return message(
        f"save: {len(names)} tensor(s) differ between ranks that must hold the same: {', '.join(shown)}{more}",
        expected="equal values on all ranks",
        got="differing ones",
        why="The files hold one of them, and the others would be lost",
        fix="shard the model with te_fsdp.fully_shard; let the recipe reduce amaxes over all ranks; "
        "te_fsdp.broadcast_params(model, optimizer) makes drifted copies of a sharded model equal again; buffers that "
        "each rank makes from its own data (BatchNorm) must be made equal before, or not persistent; experts that "
        "every rank counts from 0 get global indices by te_fsdp.set_device_mesh(model, ..., ep_mesh=...)",
    )


def _pairs(pairs: set[tuple[int, int]]) -> str:
    """Who differs from whom, shortened."""
    shown = [f"rank {rank} from rank {holder}" for rank, holder in sorted(pairs)]
    return ", ".join(shown[:2]) + (", ..." if len(shown) > 2 else "")


def checksums(tensors: Iterable[torch.Tensor]) -> list[int]:
    """Checksum of each tensor's bytes: CRC-32 on the host, a weighted sum elsewhere, fetched all at once."""
    sums: dict[int, int] = {}
    elsewhere: list[tuple[list[int], torch.Tensor]] = []
    for block in blocks_of(enumerate(tensors)):
        rows = flat_rows(block.rows())
        if rows.device.type == "cpu":
            crcs = (crc32(view_of(row.view(torch.uint8))) for row in rows)
            sums.update(zip(block.keys, crcs, strict=True))
        else:
            elsewhere.append((block.keys, _weighted(rows)))
    if elsewhere:
        fetched = torch.cat([found for _, found in elsewhere]).tolist()
        sums.update(zip((key for keys, _ in elsewhere for key in keys), fetched, strict=True))
    return [sums[number] for number in range(len(sums))]


def _weighted(rows: torch.Tensor) -> torch.Tensor:
    """Sum of each row's words, each times its own odd weight; int64 on its device, wrapping on overflow."""
    words = rows.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}.get(rows.element_size(), torch.int64))
    width = max(1, min(_BLOCK // len(rows), words.shape[1]))
    weights = torch.arange(width, dtype=torch.int64, device=rows.device).mul_(2).add_(1).mul_(_IN_BLOCK)
    total = torch.zeros(len(rows), dtype=torch.int64, device=rows.device)
    for block in words.split(width, dim=1):
        total = total * _PER_BLOCK + (block.to(torch.int64) * weights[: block.shape[1]]).sum(dim=1)
    return total
