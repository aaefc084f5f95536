"""Memory that the ranks of one host read from each other.

A rank writes to its part of :class:`PeerMemory` only. A barrier separates its writes from the reads of other
ranks, and their reads from its next writes:

=======  ==============================================================  =====================================
device   memory                                                          barrier
=======  ==============================================================  =====================================
cuda     symmetric memory of torch (``upstream/symmetric_memory.py``)    a small kernel on the current stream
cpu      a file of each rank in a temporary folder, mapped by all        an all-reduce of one element
=======  ==============================================================  =====================================
"""

from __future__ import annotations

import datetime
import socket
import tempfile
import uuid
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from te_fsdp.collectives.agreement import gather
from te_fsdp.collectives.rendezvous import collective_timeout, is_simulated
from te_fsdp.upstream import symmetric_memory as _symmetric_memory

#: Smallest number of bytes: torch does not map empty files.
_LEAST = 256


class PeerMemory:
    """Memory with one part per rank of a group: uint8 tensors of one size on this rank's device. It reads all parts."""

    def __init__(self, parts: list[torch.Tensor], group: dist.ProcessGroup, handle: Any = None) -> None:
        self.parts, self.local, self.group, self._handle = parts, parts[group.rank()], group, handle

    def barrier(self) -> None:
        """Make the current stream (on the CPU: the caller) wait for all ranks.

        Collective over the group. If a rank does not arrive within :func:`te_fsdp.set_collective_timeout`, the barrier
        of the others fails: on the CPU with an error, on a GPU with a trap that ends the process.
        """
        seconds = collective_timeout()
        if self._handle is not None:
            _symmetric_memory.barrier(self._handle, seconds)
            return
        work = dist.all_reduce(torch.zeros(1), group=self.group, async_op=True)
        assert work is not None
        work.wait(datetime.timedelta(seconds=seconds))


class PeerGroup:
    """Ranks that can read each other's memory; ``token``: see :class:`te_fsdp.upstream.symmetric_memory.Exchange`."""

    def __init__(self, device: torch.device, group: dist.ProcessGroup, token: str) -> None:
        self.device, self.group = device, group
        self._exchange = None if device.type == "cpu" else _symmetric_memory.Exchange(group, token)

    def share(self, size: int) -> PeerMemory:
        """Allocate memory that all ranks read. Collective over the group; waits for the device.

        ``size``: bytes of each rank's part. A failure raises RuntimeError, on the CPU on all ranks.
        """
        size = max(size, _LEAST)
        if self._exchange is None:
            storages, reason = [], ""
            with tempfile.NamedTemporaryFile(prefix="te_fsdp_peers_") as file:
                file.truncate(size)
                for name in gather(file.name, self.group):
                    try:
                        storages.append(torch.UntypedStorage.from_file(name, shared=True, nbytes=size))
                    except RuntimeError as error:
                        reason = str(error).splitlines()[0]
                # Also a barrier: no file is deleted before all ranks have mapped it.
                reasons = gather(reason, self.group)
            if any(reasons):
                raise RuntimeError(next(filter(None, reasons)))
            return PeerMemory(
                [torch.empty(0, dtype=torch.uint8).set_(storage, 0, (size,), (1,)) for storage in storages],
                self.group,
            )
        handle, parts = _symmetric_memory.allocate_shared_memory(size, self.device, self._exchange)
        return PeerMemory(parts, self.group, handle)


def connect_peers(device: torch.device, group: dist.ProcessGroup) -> tuple[PeerGroup, PeerMemory] | str:
    """Return a group's ranks as peers and shared memory, or why they cannot share. Collective over ``group``."""
    # The ranks exchange their hosts and the GPUs that they reach, then try to share memory.
    if is_simulated():
        return "the other ranks are simulated"
    boot = Path("/proc/sys/kernel/random/boot_id")
    # Containers of one host have different names, but the boot id of the host.
    host = f"{socket.gethostname()} {boot.read_text().strip() if boot.exists() else ''}"
    # One gather for all data that ranks exchange, because each gather waits for the slowest rank.
    may_share = _symmetric_memory.may_share_a_gpu()
    own_address = host, _identity(device), _out_of_reach(device), may_share, uuid.uuid4().hex
    by_rank = gather(own_address, group)
    hosts = {host for host, *_ in by_rank}
    identities = [identity for _, identity, *_ in by_rank]
    if len(hosts) > 1:
        return f"its ranks are on {len(hosts)} hosts"
    overlap = device.type != "cpu" and len(set(identities)) < len(identities)
    if overlap and not all(may_share for *_, may_share, _ in by_rank):
        return "two of its ranks share a GPU"
    for _, _, unreachable, *_ in by_rank:
        if unreachable is None:
            return "this torch has no symmetric memory"
        if unreachable & set(identities):
            return "two of its GPUs have no direct access to each other's memory"
    failed = ""
    # "" uses the group itself, for torch versions that do not accept te_fsdp's own group.
    for token in (by_rank[0][-1], ""):
        connected, reason = None, ""
        try:
            peers = PeerGroup(device, group, token)
            connected = peers, peers.share(_LEAST)
        except RuntimeError as error:
            reason = f"sharing memory failed: {str(error).splitlines()[0]}"
        # The ranks must agree: memory that only some have shared is useless.
        reasons = list(filter(None, gather(reason, group)))
        if connected is not None and not reasons:
            return connected
        failed = failed or reasons[0]
    return failed


def _identity(device: torch.device) -> str:
    """Return the UUID of a GPU, which does not depend on the visible devices; the type of other devices."""
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else device.type


def _out_of_reach(device: torch.device) -> set[str] | None:
    """Return the visible GPUs without direct access from this rank's GPU; ``None`` without symmetric memory."""
    if device.type == "cpu":
        return set()
    if not torch.cuda.is_available():
        return None
    device_index = torch.cuda.current_device() if device.index is None else device.index
    others = (number for number in range(torch.cuda.device_count()) if number != device_index)
    return {
        _identity(torch.device("cuda", number))
        for number in others
        if not torch.cuda.can_device_access_peer(device_index, number)
    }


def alias(memory: torch.Tensor, offset: int, like: torch.Tensor) -> torch.Tensor:
    """Return a 1-D tensor of the dtype and number of elements of ``like`` in bytes of ``memory``. Local operation.

    ``memory`` is uint8 and stays alive with the result. ``offset`` is a multiple of the dtype's size.
    """
    # DLPack, because the storage of the result covers exactly these bytes.
    size = like.numel() * like.element_size()
    return torch.from_dlpack(memory[offset : offset + size]).view(like.dtype)
