"""torch's symmetric memory (``torch.distributed._symmetric_memory``): memory of a GPU that its peers read.

Private names, checked on torch 2.11 to 2.15.
"""

from __future__ import annotations

import os
import weakref
from typing import Any

import torch
import torch.distributed as dist

from te_fsdp._torch import default_store


def is_there() -> bool:
    """Whether this torch has symmetric memory for CUDA devices."""
    try:
        import torch.distributed._symmetric_memory
    except ImportError:
        return False
    return torch.cuda.is_available()


def may_share_a_gpu() -> bool:
    """Whether torch shares memory between two ranks on one GPU: its own switch for tests on fewer GPUs than ranks."""
    return os.environ.get("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES") == "1"


class _Numbered(dist.Store):
    """A store of one group of ranks, for keys that torch numbers by process: here they are numbered by group.

    Up to torch 2.14 ranks find each other by the number of rendezvous that a process has made, in whatever group, and
    wait for ever where that differs (pytorch issue #196082).
    """

    def __init__(self, store: dist.Store) -> None:
        super().__init__()
        self._store = store
        self._numbers: dict[str, int] = {}

    def _key(self, key: str) -> str:
        kind, _, rank = key.rpartition("/")
        return f"{self._numbers.setdefault(kind, len(self._numbers))}/{rank}"

    def set(self, key: str, value: bytes) -> None:  # type: ignore[override]
        """Write a value."""
        self._store.set(self._key(key), value)  # type: ignore[bad-argument-type]

    def get(self, key: str) -> bytes:
        """Wait for a value."""
        return self._store.get(self._key(key))

    def wait(self, keys: list[str], *timeout: Any) -> None:  # type: ignore[override]
        """Wait for values."""
        self._store.wait([self._key(key) for key in keys], *timeout)


class Exchange:
    """What the ranks of a group find each other's memory by.

    Attributes:
        name: That torch knows the ranks by.
        group: The ranks.
    """

    def __init__(self, group: dist.ProcessGroup, token: str = "") -> None:
        """Local operation.

        Args:
            group: The ranks.
            token: The same on all of them, and of no other exchange: torch then knows the ranks by a process group
                without a backend, whose store counts their rendezvous alone. Empty: by ``group``.
        """
        from torch.distributed.distributed_c10d import _register_process_group, _unregister_process_group

        self.name, self.group = f"te_fsdp/peers/{token}" if token else group.group_name, group
        if token:
            # Both are kept here: C++ alone keeps neither the group nor the object that Python's methods belong to.
            self._store = _Numbered(dist.PrefixStore(self.name, default_store()))
            self._ranks = dist.ProcessGroup(self._store, group.rank(), group.size())
            _register_process_group(dist.GroupName(self.name), self._ranks)
            weakref.finalize(self, _unregister_process_group, dist.GroupName(self.name))


def share(size: int, device: torch.device, exchange: Exchange) -> tuple[Any, list[torch.Tensor]]:
    """Memory of each rank that all ranks of a group can read (``empty``, ``rendezvous``, ``get_buffer``).

    Collective over the group; waits for the device. It is no part of what torch's caching allocator counts. Freeing it
    waits for the device as well.

    Args:
        size: Bytes, the same on all ranks.
        device: This rank's.
        exchange: Of the ranks.

    Returns:
        What :func:`barrier` takes; by rank a uint8 tensor of ``size`` elements, all on this rank's device for torch, so
        that a contiguous copy from any of them is a plain memory copy.
    """
    import torch.distributed._symmetric_memory as symmetric

    own, group = symmetric.empty(size, dtype=torch.uint8, device=device), exchange.group
    handle = symmetric.rendezvous(own, exchange.name)  # type: ignore[bad-argument-type]
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
