"""Private names of torch for transports (docs/transport.md), checked with torch 2.11 to 2.15."""

# [Note: peer memory and zero-copy gradients] Copy engine all-gathers use memory of a GPU that its peers read:
# torch's symmetric memory (``torch.distributed._symmetric_memory``).
#
# ``zero_copy_gradients``: FSDP2 copies all gradients of a unit into the input of one reduce-scatter, ordered
# by rank. A gradient sharded evenly along its first dim can be sent without a copy. Here each large gradient
# is a part of its own, and small ones are copied together. NCCL runs the reduce-scatters of all parts as one
# operation. The output is the same:
#
#     FSDP2   a0 b0 c0 a1 b1 c1    one reduce-scatter        rank r: ar br cr
#     here    a0 a1 | b0 c0 b1 c1  one for "a", for "b c"    rank r: ar br cr

from __future__ import annotations

import os
import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from te_fsdp.upstream.fsdp2_units import GROUP
from te_fsdp.upstream.torch_dtensor import default_store

# --- memory that peers read


def may_share_a_gpu() -> bool:
    """Return whether torch shares memory between two ranks on one GPU (its switch for tests with fewer GPUs)."""
    return os.environ.get("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES") == "1"


class _Numbered(dist.Store):
    """A store for one process group, which renumbers keys that torch numbers per process.

    Until torch 2.14 the rendezvous key contains the number of rendezvous of the process in all groups. If ranks
    differ in it, they wait forever (pytorch issue #196082).
    """

    def __init__(self, store: dist.Store) -> None:
        super().__init__()
        self._store = store
        self._numbers: dict[str, int] = {}

    def _key(self, key: str) -> str:
        kind, _, rank = key.rpartition("/")
        return f"{self._numbers.setdefault(kind, len(self._numbers))}/{rank}"

    def set(self, key: str, value: bytes) -> None:  # type: ignore[override]
        """Set the value of a key in the store."""
        self._store.set(self._key(key), value)  # type: ignore[bad-argument-type]

    def get(self, key: str) -> bytes:
        """Return the value of a key; wait until a rank sets it."""
        return self._store.get(self._key(key))

    def wait(self, keys: list[str], *timeout: Any) -> None:  # type: ignore[override]
        """Wait until the values of all keys are set."""
        self._store.wait([self._key(key) for key in keys], *timeout)


class Exchange:
    """Process group through which ranks map each other's memory; torch identifies it by ``name``."""

    def __init__(self, group: dist.ProcessGroup, token: str = "") -> None:
        """Create the group. ``token`` is identical on all ranks and unique to this exchange. Local operation.

        With a token, a process group without a backend is registered, whose store counts only its own
        rendezvous. Without it, ``group`` is used.
        """
        from torch.distributed.distributed_c10d import _register_process_group, _unregister_process_group

        self.name, self.group = f"te_fsdp/peers/{token}" if token else group.group_name, group
        if token:
            # Keep references to both. C++ keeps neither the group nor the Python object of the store.
            self._store = _Numbered(dist.PrefixStore(self.name, default_store()))
            self._ranks = dist.ProcessGroup(self._store, group.rank(), group.size())
            _register_process_group(dist.GroupName(self.name), self._ranks)
            weakref.finalize(self, _unregister_process_group, dist.GroupName(self.name))


def allocate_shared_memory(
    size: int, device: torch.device, exchange: Exchange
) -> tuple[Any, list[torch.Tensor]]:
    """Allocate memory that all ranks of a group can read (``empty``, ``rendezvous``, ``get_buffer``).

    Collective over the group; waits for the device. torch's caching allocator does not count this memory.
    Freeing it waits for the device as well. The size in bytes is the same on all ranks.

    Returns:
        The handle for :func:`barrier`, and one uint8 tensor of ``size`` elements per rank. For torch all of them are
        on this rank's device, so that a contiguous copy from any of them is a plain memory copy.
    """
    import torch.distributed._symmetric_memory as symmetric

    mine, group = symmetric.empty(size, dtype=torch.uint8, device=device), exchange.group
    handle = symmetric.rendezvous(mine, exchange.name)  # type: ignore[bad-argument-type]
    shared = [
        mine if rank == group.rank() else handle.get_buffer(rank, (size,), torch.uint8)
        for rank in range(group.size())
    ]
    return handle, shared


def barrier(handle: Any, seconds: float) -> None:
    """Let the current stream wait for the same call on all ranks (``_SymmetricMemory.barrier``).

    It launches one small kernel, which a CUDA graph can capture. If a rank does not arrive within ``seconds``,
    the kernel fails and the process can no longer use the device.
    """
    handle.barrier(channel=0, timeout_ms=int(1e3 * seconds))


# --- zero-copy gradients

#: Minimum number of elements of a gradient that is sent separately in any group.
LARGE = 1 << 16
#: Number of gradients of a group up to which small ones are sent separately, too. A further part of one operation of
#: NCCL costs the host some microseconds, the kernel that copies gradients together some ten (H100).
FEW = 16


class ReduceScatterPart(NamedTuple):
    """One part of a reduce-scatter: the number of elements over all ranks, and the number of gradients."""

    numel: int
    count: int
    is_alone: bool  #: Whether it is one gradient, sent from its own memory


class ReduceScatterParts(NamedTuple):
    """Parts of a parameter group's gradients, in order, for a reduce-scatter over ``ranks``."""

    ranks: int
    parts: tuple[ReduceScatterPart, ...]
    numel: int  #: Number of elements of all parts, including padding
    count: int  #: Number of gradients
    avoids_copies: bool  #: Whether a large gradient is sent from its own memory

    @classmethod
    def of(cls, ranks: int, parts: Sequence[ReduceScatterPart]) -> ReduceScatterParts:
        """Create the layout, and compute once the numbers that each reduction reads."""
        numel, count = sum(part.numel for part in parts), sum(part.count for part in parts)
        large = any(part.is_alone and part.numel >= LARGE for part in parts)
        return cls(ranks, tuple(parts), numel, count, large)


# [Note: input of a reduce-scatter without a copy] FSDP2 requests the memory of the input from a custom
# reduce-scatter but fills it itself (``chunk_cat``, from torch 2.15 ``chunk_cat_mixed_dtype``). It divides
# the input if the dtype has a small range. te_fsdp returns a tensor that implements these two operations
# differently and no others (``__torch_function__``).
class ZeroCopyInput(torch.Tensor):
    """Placeholder for the input of FSDP2's reduce-scatter. It has no elements of its own."""

    sent: list[torch.Tensor]  #: 1-D, one per part
    in_use: list[torch.Tensor]  #: Tensors that another stream reads until the reduction has ended
    parts_layout: ReduceScatterParts  #: Layout of the parts

    @classmethod
    def make(cls, layout: ReduceScatterParts, dtype: torch.dtype, device: torch.device) -> ZeroCopyInput:
        """Create an empty input, to be sent in ``dtype``."""
        placeholder = torch.empty(0, dtype=dtype, device=device).as_subclass(cls)
        placeholder.sent, placeholder.in_use, placeholder.parts_layout = [], [], layout
        return placeholder

    def view(self, *shape: Any) -> ZeroCopyInput:  # type: ignore[override]
        """Return the input itself. FSDP2 uses the view only to fill it."""
        return self

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Implement the operations of FSDP2 on the input of a reduce-scatter."""
        into = (kwargs or {}).get("out")
        with torch._C.DisableTorchFunctionSubclass():
            if isinstance(into, cls):
                return into._fill(args[0], func)
            if func is torch.Tensor.div_:
                placeholder, divisor = args
                # Not in place, because gradients may be shared.
                placeholder.in_use = placeholder.sent
                placeholder.sent = [part / divisor for part in placeholder.in_use]
                return placeholder
        raise AssertionError(f"unsupported operation on the input of a reduce-scatter: {func}")

    def _fill(self, gradients: Sequence[torch.Tensor], chunk_cat: Any) -> None:
        """Fill the parts from gradients in FSDP2's order."""
        remaining = [gradient for gradient in gradients if gradient.numel()]
        # FSDP2 passes the gradients of all trained parameters, see complete_gradients.
        assert len(remaining) == self.parts_layout.count
        for part in self.parts_layout.parts:
            mine, remaining = remaining[: part.count], remaining[part.count :]
            if part.is_alone:
                self.sent.append(mine[0].to(self.dtype).contiguous().view(-1))
                continue
            memory = torch.empty(part.numel, dtype=self.dtype, device=self.device)
            ranks = self.parts_layout.ranks
            chunk_cat(mine, dim=0, num_chunks=ranks, out=memory.view(ranks, -1))
            self.sent.append(memory)


def zero_copy_input_of(
    group: Any, numel: int, dtype: torch.dtype, *, packs_small: bool = False
) -> ZeroCopyInput | None:
    """Return a placeholder for a reduction's input of ``numel`` elements. Local operation.

    Return ``None`` if all gradients must be copied, or if FSDP2 does not reduce the gradients of all trained
    parameters. All ranks return the same. ``packs_small``: every part is a collective of its own, so that small
    gradients are always copied together.
    """
    record = group.__dict__.get(GROUP)
    if record is None or not record.sends_without_copy:
        return None
    # torch 2.15 reduces the records in the order of their dtypes.
    order = getattr(group, "_reduce_scatter_param_indices", None)
    records = [group.fsdp_params[index] for index in order] if order else group.fsdp_params
    if records[0] is record.one:
        records = record.one.members
    trained = [managed for managed in records if managed.sharded_param.requires_grad]
    key, cached = (trained, packs_small), record.parts
    if cached is None or cached[0] != key:
        # The shapes of FSDP2's records are constant, so the parts are too.
        packs, ranks = packs_small or len(trained) > FEW, group.mesh_info.shard_mesh_size
        parts = list[ReduceScatterPart]()
        for managed in trained:
            size = managed.padded_sharded_param_size.numel() * ranks
            if size == 0:
                continue
            is_alone = (size >= LARGE or not packs) and not _reason_to_copy(managed, ranks)
            if is_alone or not parts or parts[-1].is_alone:
                parts.append(ReduceScatterPart(size, 1, is_alone))
            else:
                parts[-1] = ReduceScatterPart(parts[-1].numel + size, parts[-1].count + 1, is_alone=False)
        cached = record.parts = key, ReduceScatterParts.of(ranks, parts)
    layout = cached[1]
    if layout.numel != numel or not layout.avoids_copies:
        return None
    return ZeroCopyInput.make(layout, dtype, group.device)


def _reason_to_copy(managed: Any, ranks: int) -> str:
    """Return why a gradient cannot be sent without a copy."""
    # FSDP2 itself reorders gradients sharded along other dims.
    rows = managed._orig_size[0]
    if managed.fsdp_placement.dim == 0 and rows % ranks:
        return f"{rows} rows are not divisible by {ranks} ranks"
    return ""


def large_gradients(group: Any) -> list[tuple[Any, str]]:
    """Return FSDP2's records of large parameters, each with the reason to copy its gradient (empty if none)."""
    ranks = group.mesh_info.shard_mesh_size
    large = (m for m in group.fsdp_params if m.padded_sharded_param_size.numel() * ranks >= LARGE)
    return [(managed, _reason_to_copy(managed, ranks)) for managed in large]
