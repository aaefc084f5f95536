"""torch's symmetric memory (``torch.distributed._symmetric_memory``): memory of a GPU that its peers read.

Private names, checked on torch 2.11 to 2.15.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

__all__ = ["barrier", "is_there", "share"]


def is_there() -> bool:
    """Whether this torch has symmetric memory for CUDA devices."""
    try:
        import torch.distributed._symmetric_memory
    except ImportError:
        return False
    return torch.cuda.is_available()


def share(size: int, device: torch.device, group: dist.ProcessGroup) -> tuple[Any, list[torch.Tensor]]:
    """Memory of each rank that all ranks of a group can read (``empty``, ``rendezvous``, ``get_buffer``).

    Collective over the group; waits for the device. It is no part of what torch's caching allocator counts. Freeing it
    waits for the device as well.

    Args:
        size: Bytes, the same on all ranks.
        device: This rank's.
        group: The ranks.

    Returns:
        What :func:`barrier` takes; by rank a uint8 tensor of ``size`` elements, all on this rank's device for torch, so
        that a contiguous copy from any of them is a plain memory copy.
    """
    import torch.distributed._symmetric_memory as symmetric

    own = symmetric.empty(size, dtype=torch.uint8, device=device)
    handle = symmetric.rendezvous(own, group)
    shared = [
        own if rank == group.rank() else handle.get_buffer(rank, (size,), torch.uint8)
        for rank in range(group.size())
    ]
    return handle, shared


def barrier(handle: Any, seconds: float) -> None:
    """Let the current stream wait for the same call of all ranks (``_SymmetricMemory.barrier``).

    One small kernel, which a graph can hold. It fails, and with it the process' use of the device, when a rank has not
    come after ``seconds``.
    """
    handle.barrier(channel=0, timeout_ms=int(1e3 * seconds))
