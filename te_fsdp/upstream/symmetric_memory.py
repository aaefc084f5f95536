"""What transports (``docs/transport.md``) need of torch by private names, checked on torch 2.11 to 2.15.

Gathers by copies: memory of a GPU that its peers read, torch's symmetric memory
(``torch.distributed._symmetric_memory``).

``zero_copy_gradients``: FSDP2 copies all gradients of a unit into the input of one reduce-scatter, cut into what each
rank shall get. A gradient that is cut along its first dim into equal parts can be sent as it is. So here each large
gradient is a part of its own, small ones are copied together, and the parts are reduced by reduce-scatters that NCCL
runs as one operation. The output is the same:

    FSDP2   a0 b0 c0 a1 b1 c1    one reduce-scatter        rank r: ar br cr
    here    a0 a1 | b0 c0 b1 c1  one for "a", for "b c"    rank r: ar br cr

Which parts there are depends on shapes alone, so that all ranks agree: a gradient that has another dtype than is sent,
or holes, is copied by itself. FSDP2 keeps what it takes for the input until the reduction has ended, and so the parts.

FSDP2 asks a reduce-scatter of one's own for the input's memory, but fills it itself (``chunk_cat``, from torch 2.15 on
``chunk_cat_mixed_dtype``), and divides it where the dtype has little range. It gets a tensor that answers these two
operations in its own way, and no other (``__torch_function__``).
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from te_fsdp.upstream.torch_dtensor import default_store

# --- memory that peers read


def is_available() -> bool:
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
    """What the ranks of a group find each other's memory by; torch knows them by ``name``."""

    def __init__(self, group: dist.ProcessGroup, token: str = "") -> None:
        """Local operation. ``token`` is the same on all ranks, and of no other exchange.

        With it torch knows the ranks by a process group without a backend, whose store counts their rendezvous alone;
        without by ``group``.
        """
        from torch.distributed.distributed_c10d import _register_process_group, _unregister_process_group

        self.name, self.group = f"te_fsdp/peers/{token}" if token else group.group_name, group
        if token:
            # Both are kept here: C++ alone keeps neither the group nor the object that Python's methods belong to.
            self._store = _Numbered(dist.PrefixStore(self.name, default_store()))
            self._ranks = dist.ProcessGroup(self._store, group.rank(), group.size())
            _register_process_group(dist.GroupName(self.name), self._ranks)
            weakref.finalize(self, _unregister_process_group, dist.GroupName(self.name))


def allocate_shared_memory(
    size: int, device: torch.device, exchange: Exchange
) -> tuple[Any, list[torch.Tensor]]:
    """Memory of each rank that all ranks of a group can read (``empty``, ``rendezvous``, ``get_buffer``).

    Collective over the group; waits for the device. It is no part of what torch's caching allocator counts. Freeing it
    waits for the device as well. The size in bytes is the same on all ranks.

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


# --- gradients that are sent from where they lie

#: Elements of a gradient that is sent by itself: copying smaller ones together costs less than sending them apart.
LARGE = 1 << 16


class ReduceScatterPart(NamedTuple):
    """What a reduce-scatter sends: elements of all ranks, of so many gradients."""

    numel: int
    count: int
    is_large: bool


class ReduceScatterParts(NamedTuple):
    """How the gradients of a parameter group are sent, in their order; they are cut over so many ranks."""

    ranks: int
    parts: tuple[ReduceScatterPart, ...]

    @property
    def numel(self) -> int:
        """Elements of all parts, with what pads the last ranks' rows."""
        return sum(part.numel for part in self.parts)


class ZeroCopyInput(torch.Tensor):
    """What FSDP2 takes for the input of a reduce-scatter; it has no elements of its own."""

    sent: list[torch.Tensor]  #: 1-D, one for each part
    kept: list[torch.Tensor]  #: What another stream reads until the reduction has ended
    how: ReduceScatterParts  #: What they are made of

    @classmethod
    def make(cls, how: ReduceScatterParts, dtype: torch.dtype, device: torch.device) -> ZeroCopyInput:
        """One that is to be filled, to be sent in ``dtype``."""
        made = torch.empty(0, dtype=dtype, device=device).as_subclass(cls)
        made.sent, made.kept, made.how = [], [], how
        return made

    def view(self, *shape: Any) -> ZeroCopyInput:  # type: ignore[override]
        """Itself: FSDP2 wants rows of ranks only to have them filled."""
        return self

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """What FSDP2 does with the input of a reduce-scatter."""
        into = (kwargs or {}).get("out")
        with torch._C.DisableTorchFunctionSubclass():
            if isinstance(into, cls):
                return into._fill(args[0], func)
            if func is torch.Tensor.div_:
                made, divisor = args
                # Not in place: others may look at a gradient.
                made.kept = made.sent
                made.sent = [part / divisor for part in made.kept]
                return made
        raise AssertionError(f"FSDP2 has done something new with the input of a reduce-scatter: {func}")

    def _fill(self, gradients: Sequence[torch.Tensor], chunk_cat: Any) -> None:
        """Take gradients in FSDP2's order."""
        left = [gradient for gradient in gradients if gradient.numel()]
        # Those of all trained parameters, see reduce_unused.
        assert len(left) == sum(part.count for part in self.how.parts)
        for part in self.how.parts:
            mine, left = left[: part.count], left[part.count :]
            if part.is_large:
                self.sent.append(mine[0].to(self.dtype).contiguous().view(-1))
                continue
            memory = torch.empty(part.numel, dtype=self.dtype, device=self.device)
            chunk_cat(mine, dim=0, num_chunks=self.how.ranks, out=memory.view(self.how.ranks, -1))
            self.sent.append(memory)


#: Attribute of a parameter group: whether its gradients are reduced from where they lie.
_KEY = "_te_fsdp_zero_copy"
#: Attribute of a parameter group: its trained records at the last look, and their parts.
_PARTS = "_te_fsdp_gradient_parts"


def enable_zero_copy_reduce_scatter(group: Any) -> None:
    """Let a parameter group's gradients be sent so by a reduce-scatter of te_fsdp's. Local operation."""
    group.__dict__[_KEY] = True


def zero_copy_input_of(group: Any, numel: int, dtype: torch.dtype) -> ZeroCopyInput | None:
    """What FSDP2 is to be given for a reduction's input of so many elements, if it is not memory. Local operation.

    ``None`` where nothing can be sent as it lies, or FSDP2 reduces other gradients than those of all trained
    parameters: on all ranks then.
    """
    if not group.__dict__.get(_KEY, False):
        return None
    how = _parts_of(group)
    if how.numel != numel or not any(part.is_large for part in how.parts):
        return None
    return ZeroCopyInput.make(how, dtype, group.device)


def _parts_of(group: Any) -> ReduceScatterParts:
    """How the gradients of a parameter group's trained parameters are sent: the same on all ranks."""
    trained = [managed for managed in _in_order(group) if managed.sharded_param.requires_grad]
    known = group.__dict__.get(_PARTS)
    if known is None or known[0] != trained:
        known = group.__dict__[_PARTS] = trained, _find_parts(trained, group.mesh_info.shard_mesh_size)
    return known[1]


def _find_parts(trained: list[Any], ranks: int) -> ReduceScatterParts:
    """The parts of the gradients of some of FSDP2's records, whose shapes do not change."""
    parts = list[ReduceScatterPart]()
    for managed in trained:
        numel = managed.padded_sharded_param_size.numel() * ranks
        if numel == 0:
            continue
        if numel >= LARGE and not _reason_to_copy(managed, ranks):
            parts.append(ReduceScatterPart(numel, 1, is_large=True))
        elif parts and not parts[-1].is_large:
            parts[-1] = ReduceScatterPart(parts[-1].numel + numel, parts[-1].count + 1, is_large=False)
        else:
            parts.append(ReduceScatterPart(numel, 1, is_large=False))
    return ReduceScatterParts(ranks, tuple(parts))


def _in_order(group: Any) -> list[Any]:
    """FSDP2's records in the order in which gradients are reduced: torch 2.15 sorts them by dtype."""
    order = getattr(group, "_reduce_scatter_param_indices", None)
    return [group.fsdp_params[at] for at in order] if order else group.fsdp_params


def _reason_to_copy(managed: Any, ranks: int) -> str:
    """Why a gradient cannot be sent as it lies. One cut along another dim FSDP2 has copied already, in order."""
    rows = managed._orig_size[0]
    if managed.fsdp_placement.dim == 0 and rows % ranks:
        return f"{rows} rows are not cut evenly over {ranks} ranks"
    return ""


def large_gradients(group: Any) -> list[tuple[Any, str]]:
    """FSDP2's records of large parameters, each with why its gradient cannot be sent as it lies, or nothing."""
    ranks = group.mesh_info.shard_mesh_size
    large = (m for m in group.fsdp_params if m.padded_sharded_param_size.numel() * ranks >= LARGE)
    return [(managed, _reason_to_copy(managed, ranks)) for managed in large]
