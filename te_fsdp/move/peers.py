"""Memory that the ranks of a group read from each other: of GPUs with direct access, or of processes of one host.

A rank writes to its own part alone. Between its writes and the others' reads, and between their reads and its next
writes, there is a :meth:`PeerMemory.barrier`.

=======  ============================================================  ==================================
device   memory                                                        barrier
=======  ============================================================  ==================================
cuda     symmetric memory of torch (``te_fsdp/_torch_symm.py``)        a small kernel on the current stream
cpu      a file of each rank in a temporary folder, mapped by all      an all-reduce of one element
=======  ============================================================  ==================================
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

from te_fsdp import _torch_symm
from te_fsdp.agree import gather
from te_fsdp.all_ranks import collective_timeout, is_simulated

#: torch maps no empty file.
_LEAST = 256


class PeerMemory:
    """One part per rank of a group; each rank reads all of them.

    Attributes:
        parts: By rank, uint8 tensors of one size on this rank's device.
        own: This rank's part.
        group: The ranks.
    """

    def __init__(self, parts: list[torch.Tensor], group: dist.ProcessGroup, handle: Any = None) -> None:
        self.parts, self.own, self.group, self._handle = parts, parts[group.rank()], group, handle

    def barrier(self) -> None:
        """Wait until all ranks have come here: the current stream, or on the CPU the caller.

        Collective over the group. A rank that does not come within :func:`te_fsdp.set_collective_timeout` fails the
        barrier of the others: on the CPU by an error, on a GPU by a trap, after which the process is lost.
        """
        seconds = collective_timeout()
        if self._handle is not None:
            _torch_symm.barrier(self._handle, seconds)
            return
        work = dist.all_reduce(torch.zeros(1), group=self.group, async_op=True)
        assert work is not None
        work.wait(datetime.timedelta(seconds=seconds))


class Peers:
    """Ranks that can read each other's memory.

    Attributes:
        device: This rank's.
        group: The ranks.
    """

    def __init__(self, device: torch.device, group: dist.ProcessGroup, token: str) -> None:
        """``token``: see :class:`te_fsdp._torch_symm.Exchange`."""
        self.device, self.group = device, group
        self._exchange = None if device.type == "cpu" else _torch_symm.Exchange(group, token)

    def share(self, size: int) -> PeerMemory:
        """Memory that all ranks read. Collective over the group; waits for the device.

        Args:
            size: Bytes of each rank's part, the same on all ranks.

        Raises:
            RuntimeError: The memory cannot be had; on the CPU on all ranks.
        """
        size = max(size, _LEAST)
        if self._exchange is None:
            return PeerMemory(_mapped_files(size, self.group), self.group)
        handle, parts = _torch_symm.share(size, self.device, self._exchange)
        return PeerMemory(parts, self.group, handle)


def _mapped_files(size: int, group: dist.ProcessGroup) -> list[torch.Tensor]:
    """A file of each rank, mapped by all ranks. The files are gone afterwards, the memory lives as long as its maps."""
    storages, reason = [], ""
    with tempfile.NamedTemporaryFile(prefix="te_fsdp_peers_") as file:
        file.truncate(size)
        for name in gather(file.name, group):
            try:
                storages.append(torch.UntypedStorage.from_file(name, shared=True, nbytes=size))
            except RuntimeError as error:
                reason = str(error).splitlines()[0]
        reasons = gather(reason, group)  # also: nobody takes its file away before all have mapped it
    if any(reasons):
        raise RuntimeError(next(filter(None, reasons)))
    return [torch.empty(0, dtype=torch.uint8).set_(storage, 0, (size,), (1,)) for storage in storages]


def connect(device: torch.device, group: dist.ProcessGroup) -> tuple[Peers, PeerMemory] | str:
    """The ranks of a group as peers, with a first, small memory that they share; or why they cannot be.

    Collective over the group, which agrees: each rank tells where it is and whom it reaches, then all try.

    Args:
        device: This rank's.
        group: The ranks.
    """
    if is_simulated():
        return "the other ranks are simulated"
    own = (
        _host(),
        _identity(device),
        _out_of_reach(device),
        _torch_symm.may_share_a_gpu(),
        uuid.uuid4().hex,
    )
    told = gather(own, group)
    hosts = {host for host, *_ in told}
    identities = [identity for _, identity, *_ in told]
    if len(hosts) > 1:
        return f"its ranks are on {len(hosts)} hosts"
    overlap = device.type != "cpu" and len(set(identities)) < len(identities)
    if overlap and not all(may_share for *_, may_share, _ in told):
        return "two of its ranks share a GPU"
    for _, _, apart, *_ in told:
        if apart is None:
            return "this torch has no symmetric memory"
        if apart & set(identities):
            return "two of its GPUs have no direct access to each other's memory"
    failed = ""
    for token in (told[0][-1], ""):  # by the group itself where this torch does not take a group of te_fsdp's
        made, reason = None, ""
        try:
            peers = Peers(device, group, token)
            made = peers, peers.share(_LEAST)
        except RuntimeError as error:
            reason = f"sharing memory failed: {str(error).splitlines()[0]}"
        reasons = list(filter(None, gather(reason, group)))
        if made is not None and not reasons:
            return made
        failed = failed or reasons[0]
    return failed


def _host() -> str:
    """This machine since it was started; containers of one host have names of their own."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return f"{socket.gethostname()} {boot.read_text().strip() if boot.exists() else ''}"


def _identity(device: torch.device) -> str:
    """What a GPU is called whatever this process may see; the device's type otherwise."""
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else device.type


def _out_of_reach(device: torch.device) -> set[str] | None:
    """GPUs that this process sees and whose memory this rank's has no direct access to; ``None``: it never has."""
    if device.type == "cpu":
        return set()
    if not _torch_symm.is_there():
        return None
    own = torch.cuda.current_device() if device.index is None else device.index
    others = (number for number in range(torch.cuda.device_count()) if number != own)
    return {
        _identity(torch.device("cuda", number))
        for number in others
        if not torch.cuda.can_device_access_peer(own, number)
    }


def alias(memory: torch.Tensor, offset: int, like: torch.Tensor) -> torch.Tensor:
    """A tensor of the dtype and number of elements of ``like`` at some bytes of ``memory``. Local operation.

    Its storage is these bytes and no more, so that nobody who looks at a storage meets its neighbours, or could resize
    it. It keeps ``memory`` alive.

    Args:
        memory: uint8.
        offset: Of the first byte, a multiple of the dtype's size.
        like: Any tensor.

    Returns:
        1-D.
    """
    size = like.numel() * like.element_size()
    return torch.from_dlpack(memory[offset : offset + size]).view(like.dtype)
