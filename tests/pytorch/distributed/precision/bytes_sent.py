"""Bytes that collectives send, by kind or dtype."""

from __future__ import annotations

import collections
from collections.abc import Iterable

import harness
import torch
import torch.distributed as dist
from harness.collectives import Collective


def communicated_bytes(calls: Iterable[Collective]) -> collections.Counter[tuple[str, str]]:
    """Return unsharded bytes of collectives by (kind, dtype)."""
    seen: collections.Counter[tuple[str, str]] = collections.Counter()
    for call in calls:
        if call.kind != "broadcast":  # copies over tp, which no policy is about
            seen[call.kind, call.dtype] += call.bytes
    return seen


def fp16_averages(large: float) -> dict[str, list[list[float]]]:
    """Average in fp16 over all ranks: one value that all have, and powers of two, one for each rank.

    Args:
        large: The value.

    Returns:
        By collective, what each average is.
    """
    from torch.distributed.tensor import Partial, Replicate, Shard

    from te_fsdp.collectives.redistribute import GradComm, redistribute

    comm, group, ranks = GradComm(torch.float16), dist.group.WORLD, dist.get_world_size()
    results: dict[str, list[list[float]]] = {"all_reduce": [], "reduce_scatter": []}
    for value in (large, 2.0 ** dist.get_rank()):
        full = torch.full((2 * ranks,), value, device=harness.device())
        reduced = redistribute(full.clone(), Partial("avg"), Replicate(), group, comm).wait()
        results["all_reduce"].append(reduced.unique().tolist())
        part = torch.empty(2, device=harness.device())
        redistribute(full, Partial("avg"), Shard(0), group, comm, into=part).wait()
        results["reduce_scatter"].append(part.unique().tolist())
    return results
