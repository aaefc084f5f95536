"""FSDP2's gathers as copies: each rank reads the others' shards, piece by piece, into its gathered weights' memory.

In place of one all-gather into a buffer and a copy out of it (``FSDPParamGroup.unshard``, ``wait_for_unshard``):

    every rank   shards that lie in memory which the others read: nothing; all others are copied there   (on the gather
    all ranks    a barrier                                                                                stream)
    every rank   one contiguous copy for each rank and tensor, into the very memory that kernels read
    all ranks    a barrier: nobody reads any more, shards may be written again

The gathered weights' memory stays FSDP2's: storages that are given memory before a gather and lose it when the unit is
released, while tensors that autograd has saved follow them. It is taken from the gather stream's part of the allocator,
so that a gather need not wait for what is computed meanwhile. It goes back when that stream waits for all that has read
it; after a forward that is one unit later, else the next gather would wait for this unit's forward.

Private names of FSDP2, checked on torch 2.11 to 2.15. The replacements are installed by ``_fsdp2_patches.py``.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, Protocol

import torch
from torch.profiler import record_function

from te_fsdp._fsdp2_patches import gather_with, gathers_itself
from te_fsdp._torch import copy_all_, fsdp_parameter_groups, local_of, owners_of

#: Each piece begins at a multiple of so many bytes: vectorised copies and kernels want aligned addresses.
ALIGNMENT = 256
#: Attribute of a parameter group: what gathers it.
_KEY = "_te_fsdp_copies"


class Memory(Protocol):
    """What the ranks read of each other (:class:`te_fsdp.move.peers.PeerMemory`)."""

    parts: list[torch.Tensor]
    own: torch.Tensor

    def barrier(self) -> None:
        """Wait for all ranks, on the current stream."""
        ...


class _Home(NamedTuple):
    """Where a shard lies in memory that the others read."""

    memory: Memory
    offset: int
    size: int


class _Copied(NamedTuple):
    """A gather under way: what FSDP2 looks for in an ``AllGatherResult`` of its own."""

    all_gather_event: Any
    all_gather_work: None = None


class _Places(NamedTuple):
    """A record in a gather.

    Attributes:
        key: Place in the memory for what is copied first, sizes and dtypes of the tensors that are sent: what the rest
            depends on.
        outputs: FSDP2's list of gathered tensors.
        own: Where this rank's tensors lie, or are copied to.
        copies: Targets and sources, uint8.
        parts: Gathered ranks after ranks, where they are to be put together along another dim than the first.
    """

    key: tuple[Any, ...]
    outputs: list[torch.Tensor]
    own: list[torch.Tensor]
    copies: list[tuple[torch.Tensor, torch.Tensor]]
    parts: list[torch.Tensor]


class CopiedGathers:
    """Gathers of a model's units whose shards lie on the same ranks.

    Attributes:
        meeting: Memory whose barrier all gathers use.
        make: Bytes -> memory that the ranks share. Collective over them; waits for the device.
        staged: How many bytes the gathers so far have copied on their way out of shards.
    """

    def __init__(self, meeting: Memory, make: Callable[[int], Memory]) -> None:
        self.meeting, self.make = meeting, make
        self.staged = 0
        self._rank = next(rank for rank, part in enumerate(meeting.parts) if part is meeting.own)
        self._staging: Memory | None = None
        self._homes: dict[int, _Home] = {}
        self._places: dict[int, _Places] = {}
        self._read: dict[int, Any] = {}  # of each group: the event after which nobody reads its shards
        self._last: Any = None  # that of the last gather
        self._held: dict[int, tuple[list[torch.Tensor], Any]] = {}

    @property
    def shared_bytes(self) -> int:
        """Bytes of this rank that the others read, which torch's allocator does not count."""
        memories = {id(home.memory): home.memory for home in self._homes.values()}
        return sum(m.own.numel() for m in (self.meeting, self._staging, *memories.values()) if m is not None)

    def install(self, unit: torch.nn.Module) -> None:
        """Gather a unit in this way from now on. Local operation."""
        for group in fsdp_parameter_groups(unit):
            setattr(group, _KEY, self)
            gather_with(group, self.unshard, self.wait_for_unshard, self.to_sharded)

    # --- shards

    def take_in(self, units: Iterable[torch.nn.Module], alias: Callable[..., torch.Tensor]) -> None:
        """Move shards that are sent as they lie into memory that the others read. Collective over the ranks.

        The parameters stay the same objects. Shards that are quantized, cast on their way or on meta stay where they
        are, as do those that another call has moved and nobody has moved away.

        Args:
            units: That this gathers.
            alias: :func:`te_fsdp.move.peers.alias`.
        """
        records = [m for u in units for group in fsdp_parameter_groups(u) for m in group.fsdp_params]
        records = [managed for managed in records if self._is_sent_as_it_lies(managed)]
        sizes = [_aligned(managed._sharded_param_data.nbytes) for managed in records]
        if not records:
            return
        memory, offset = self.make(sum(sizes)), 0
        for managed, size in zip(records, sizes, strict=True):
            data = managed._sharded_param_data
            moved = alias(memory.own, offset, data).copy_(data)
            self._homes[id(managed)] = _Home(memory, offset, data.nbytes)
            self._places.pop(id(managed), None)
            managed._sharded_param_data, local = moved, local_of(managed.sharded_param)
            dim, padded = managed.fsdp_placement.dim, moved.view(managed.padded_sharded_param_size)
            local.data = padded.narrow(dim, 0, local.shape[dim] if local.numel() else 0)
            offset += size

    def _is_sent_as_it_lies(self, managed: Any) -> bool:
        owner, name = owners_of(managed)[0]
        parameter = getattr(owner, name)
        if local_of(parameter).is_meta or gathers_itself(parameter):
            return False
        managed.reset_sharded_param()  # FSDP2 has not looked since the parameter was initialised
        data, home = managed._sharded_param_data, self._homes.get(id(managed))
        if home is not None and data.data_ptr() == home.memory.own.data_ptr() + home.offset:
            return False
        return data.numel() > 0 and managed.mp_policy.param_dtype in (None, data.dtype)

    # --- what FSDP2 calls

    def unshard(self, group: Any, stock: Callable[[bool], None], async_op: bool = False) -> None:
        """``FSDPParamGroup.unshard``. Collective over the ranks; a gather by hand holds up the current stream."""
        if group._all_gather_result is not None or group.is_unsharded:
            return
        phase, device = group._training_state.name, group.device_handle
        if phase == "PRE_BACKWARD" and not group.unshard_in_backward:
            return
        memory, event = self._held.pop(id(group), (None, None))
        if type(group._all_gather_comm).__name__ != "DefaultAllGather":  # what a user has set since
            stock(async_op)
            return
        in_pass = phase in ("FORWARD", "PRE_BACKWARD")
        # By hand a user may write to shards right afterwards: then what the current stream does next comes later.
        stream = group.comm_ctx.all_gather_stream if in_pass else device.current_stream()
        with record_function(group._with_fqn("FSDP::all_gather")), torch.no_grad(), device.stream(stream):
            _wait(stream, self._last)  # the gather before may have been on another stream
            _wait(stream, event)
            del memory  # not before: other buffers may take its place
            everything, joins = self._lay_out(group)
            self.meeting.barrier()
            self._copy(everything)
            for managed, parts in joins:
                _join(managed, parts)
            copied = stream.record_event()
            self.meeting.barrier()
            self._read[id(group)] = self._last = stream.record_event()
        group._all_gather_result = _Copied(copied)

    def wait_for_unshard(self, group: Any, stock: Callable[[], None]) -> None:
        """``FSDPParamGroup.wait_for_unshard``. Local operation."""
        if not isinstance(group._all_gather_result, _Copied):
            stock()
            return
        current = group.device_handle.current_stream()
        _wait(current, group._all_gather_result.all_gather_event)
        for managed in group.fsdp_params:
            managed.init_unsharded_param()
        group._to_unsharded()
        group._all_gather_result = None
        self._release(group, current)

    def to_sharded(self, group: Any, stock: Callable[[], None]) -> None:
        """``FSDPParamGroup._to_sharded``. Local operation."""
        if group.is_sharded:
            return
        stock()
        current = group.device_handle.current_stream()
        # Whoever writes to shards next, writes on this stream.
        _wait(current, self._read.pop(id(group), None))
        memory = [
            tensor
            for managed in group.fsdp_params
            for tensor in itertools.chain(managed.all_gather_outputs, managed._unsharded_inner_tensors)
        ]
        self._held[id(group)] = memory, current.record_event()
        if group._training_state.name != "FORWARD":
            self._release(group, current)

    def forget(self) -> None:
        """Forget all events, and free what waits to be freed. Local operation; nothing may be under way."""
        self._read.clear()
        self._last = None
        self._free()

    # --- a gather

    def _lay_out(self, group: Any) -> tuple[list[_Places], list[tuple[Any, list[torch.Tensor]]]]:
        """What is to be copied; shards that do not lie where the others read them are copied there.

        Returns:
            Places of each record; the records whose gathered tensors are put together of ranks' parts, with these.
        """
        needed = 0
        found: list[tuple[Any, list[torch.Tensor], tuple[Any, ...]]] = []
        for managed in group.fsdp_params:
            sources, dtypes = _inputs(managed)
            sizes = [source.numel() * dtype.itemsize for source, dtype in zip(sources, dtypes, strict=True)]
            home = self._homes.get(id(managed))
            is_home = home is not None and sizes == [home.size]
            found.append((managed, sources, (None if is_home else needed, tuple(sizes), tuple(dtypes))))
            needed += 0 if is_home else sum(map(_aligned, sizes))
        if needed and (self._staging is None or self._staging.own.numel() < needed):
            self._staging = None
            self._places.clear()  # what looks at the memory keeps it
            self._staging = self.make(needed)
        everything, joins, into, outof = [], [], [], []
        for managed, sources, key in found:
            places = self._places_of(managed, key)
            everything.append(places)
            if places.parts:
                joins.append((managed, places.parts))
            for source, mine in zip(sources, places.own, strict=True):
                if source.data_ptr() != mine.data_ptr():
                    into.append(mine)
                    outof.append(source)
        copy_all_(into, outof)
        self.staged += sum(target.nbytes for target in into)
        return everything, joins

    def _places_of(self, managed: Any, key: tuple[Any, ...]) -> _Places:
        """Where a record's tensors lie, and what they become part of: found again where nothing has changed."""
        offset, sizes, dtypes = key
        ranks = len(self.meeting.parts)
        numels = [size // dtype.itemsize for size, dtype in zip(sizes, dtypes, strict=True)]
        managed.init_all_gather_outputs(numels, list(dtypes), ranks, managed.device)
        managed.alloc_all_gather_outputs()
        known, outputs = self._places.get(id(managed)), managed.all_gather_outputs
        if known is not None and known.key == key and known.outputs is outputs:
            return known
        home = self._homes[id(managed)] if offset is None else None
        memory: Any = self._staging if home is None else home.memory
        at, own, copies, parts = offset if home is None else home.offset, [], [], []
        if managed.fsdp_placement.dim != 0:
            parts = [torch.empty_like(output) for output in outputs]
        for target, size, dtype in zip(parts or outputs, sizes, dtypes, strict=True):
            own.append(memory.own[at : at + size].view(dtype))
            # Not the tensor itself: what autograd has saved of it would seem to have been overwritten.
            rows = target.data.view(torch.uint8).view(ranks, size)
            for step in range(
                ranks
            ):  # each rank begins with another one, so that no rank is read by all at once
                rank = (self._rank + 1 + step) % ranks
                copies.append((rows[rank], memory.parts[rank][at : at + size]))
            at += _aligned(size)
        found = _Places(key, outputs, own, copies, parts)
        if not parts:  # those are memory of this gather alone
            self._places[id(managed)] = found
        return found

    def _copy(self, everything: list[_Places]) -> None:
        """Read all ranks' parts."""
        for places in everything:
            for target, source in places.copies:
                target.copy_(source)

    # --- memory of gathered weights

    def _release(self, group: Any, current: Any) -> None:
        """Free the memory of units that are released, as soon as all that has read it has ended."""
        stream = getattr(group.comm_ctx, "all_gather_stream", None)
        if stream is not None:  # there is none before the first forward
            _wait(stream, current.record_event())
        self._free()

    def _free(self) -> None:
        for tensors, _ in self._held.values():
            for tensor in tensors:
                storage = tensor.untyped_storage()
                if storage.size():
                    storage.resize_(0)
        self._held.clear()


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def _wait(stream: Any, event: Any) -> None:
    """Let a stream wait for an event; the CPU has none."""
    if event is not None:
        stream.wait_event(event)


def _inputs(managed: Any) -> tuple[list[torch.Tensor], list[torch.dtype]]:
    """Flat tensors of a shard that are sent, and the dtypes that they are sent in (``FSDPParam.all_gather_inputs``)."""
    if gathers_itself(managed.sharded_param):
        sources = managed.all_gather_inputs
        return sources, [source.dtype for source in sources]
    data = managed._sharded_param_data
    return [data], [managed.param_dtype or data.dtype]


def _join(managed: Any, parts: list[torch.Tensor]) -> None:
    """Put ranks' parts together along the dim that they are cut along, as ``foreach_all_gather_copy_out`` does."""
    dim, shape = managed.fsdp_placement.dim, list(managed.padded_sharded_param_size)
    for part, output in zip(parts, managed.all_gather_outputs, strict=True):
        ranks = part.numel() // managed.padded_sharded_param_size.numel()
        chunks = part.view(ranks * shape[0], *shape[1:]).chunk(ranks)
        whole = [length * ranks if at == dim else length for at, length in enumerate(shape)]
        torch.cat(chunks, dim=dim, out=output.data.view(whole))


def ranks_of_gathers(unit: torch.nn.Module) -> torch.distributed.ProcessGroup | None:
    """The ranks that a unit's weights are gathered from; ``None`` where that is one, or there are no weights."""
    for group in fsdp_parameter_groups(unit):
        if getattr(group.mesh_info, "shard_mesh_size", 1) > 1:
            return group.mesh_info.shard_process_group
    return None


def forget_copies(group: Any) -> None:
    """Forget the events of a parameter group's gathers (:meth:`CopiedGathers.forget`). Local operation."""
    gathers: CopiedGathers | None = group.__dict__.get(_KEY)
    if gathers is not None:
        gathers.forget()
