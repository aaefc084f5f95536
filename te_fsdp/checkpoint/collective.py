"""All ranks go on, or all raise the same: small collectives over the default process group."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from te_fsdp.errors import CheckpointError, TeFsdpError

__all__ = ["all_agree", "from_rank_0", "gather", "rank", "world_size"]

T = TypeVar("T")


def rank() -> int:
    """This process' rank; 0 without torch.distributed."""
    return dist.get_rank() if dist.is_initialized() else 0


def world_size() -> int:
    """Number of processes; 1 without torch.distributed."""
    return dist.get_world_size() if dist.is_initialized() else 1


def gather(value: T) -> list[T]:
    """Every rank's value, on every rank. Collective over the world; values are pickled, so keep them small."""
    if world_size() == 1:
        return [value]
    values: list[Any] = [None] * world_size()
    dist.all_gather_object(values, value)
    return values


def from_rank_0(call: Callable[[], T]) -> T:
    """Run a function on rank 0 and hand its result, or its exception, to all. Collective over the world.

    Raises:
        TeFsdpError: What the function raised; other exceptions come as CheckpointError.
    """
    outcome: list[Any] = [None, None]
    if rank() == 0:
        try:
            outcome[0] = call()
        except TeFsdpError as error:
            outcome[1] = error
        except Exception as error:
            outcome[1] = CheckpointError(f"rank 0: {type(error).__name__}: {error}")
    if world_size() > 1:
        dist.broadcast_object_list(outcome, src=0)
    if outcome[1] is not None:
        raise outcome[1]
    return outcome[0]


def all_agree(call: Callable[[], T]) -> T:
    """Run a function on every rank; if it raises on any, raise the same error on all.

    Collective over the world.

    Raises:
        TeFsdpError: The first failing rank's; its text names the ranks if not all failed.
    """
    result, mine = None, None
    try:
        result = call()
    except TeFsdpError as error:
        mine = error
    except Exception as error:
        mine = CheckpointError(f"{type(error).__name__}: {error}")
        mine.__cause__ = error
    seen = gather(None if mine is None else (type(mine), str(mine)))
    failed = [r for r, problem in enumerate(seen) if problem is not None]
    if not failed:
        return result  # type: ignore[return-value]
    kind, text = seen[failed[0]]  # type: ignore[misc]
    if len(failed) < len(seen):
        text = f"on rank(s) {', '.join(map(str, failed))}: {text}"
    error = kind(text)
    raise error from (mine.__cause__ if mine is not None else None)
