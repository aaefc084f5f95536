"""FSDP2's gathers as copies: each rank reads the others' shards, piece by piece, into its gathered weights' memory.

In place of one all-gather into a buffer and a copy out of it (``FSDPParamGroup.unshard``, ``wait_for_unshard``):

    every rank   shards that lie in memory which the others read: nothing; all others are copied there   (on the gather
    all ranks    a barrier                                                                                stream)
    every rank   one contiguous copy for each rank and tensor, into the very memory that kernels read; small ones by
                 one kernel
    all ranks    a barrier: nobody reads any more, shards may be written again

The gathered weights' memory stays FSDP2's: storages that are given memory before a gather and lose it when the unit is
released, while tensors that autograd has saved follow them. It is taken from the gather stream's part of the allocator,
so that a gather need not wait for what is computed meanwhile. It goes back when that stream waits for all that has read
it; after a forward that is one unit later, else the next gather would wait for this unit's forward.

Private names of FSDP2, checked on torch 2.11 to 2.15. The replacements are installed by ``_fsdp2_patches.py``.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, Protocol

import torch

from te_fsdp._fsdp2_patches import gather_with, gathers_itself
from te_fsdp._torch import copy_all_, fsdp_parameter_groups, local_of, owners_of

#: Each piece begins at a multiple of so many bytes: vectorised copies and kernels want aligned addresses.
ALIGNMENT = 256
#: Bytes of a piece that is copied with others by one kernel: to begin a copy of its own takes the host longer.
SMALL = 1 << 16
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
    """Where the tensors that are sent of a shard lie in memory that the others read, one after the other."""

    memory: Memory
    offset: int
    sizes: tuple[int, ...]


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


class _Gather(NamedTuple):
    """What a group's gather copies: of one all of whose shards lie where the others read the next one, too.

    Attributes:
        seen: Each record's list of gathered tensors, and what was sent, each with its address.
        storages: Gathered weights' memory, and how many bytes it needs.
        copies: Targets and sources, uint8.
        small: The same of small pieces.
        joins: Records whose gathered tensors are put together of ranks' parts, with these.
    """

    seen: list[tuple[list[torch.Tensor], list[tuple[torch.Tensor, int]]]]
    storages: list[tuple[torch.UntypedStorage, int]]
    copies: list[tuple[torch.Tensor, torch.Tensor]]
    small: tuple[list[torch.Tensor], list[torch.Tensor]]
    joins: list[tuple[Any, list[torch.Tensor]]]

    def is_same(self, records: list[Any], sent: list[list[torch.Tensor]]) -> bool:
        """Whether a gather of these tensors copies the same. Asked in every gather."""
        if len(records) != len(self.seen):
            return False
        for record, tensors, (outputs, known) in zip(records, sent, self.seen, strict=True):
            if record.all_gather_outputs is not outputs or len(tensors) != len(known):
                return False
            for tensor, (before, address) in zip(tensors, known, strict=True):
                if tensor is not before or tensor.data_ptr() != address:
                    return False
        return True


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
        self._settled: dict[int, _Gather] = {}  # of each group all of whose shards lie where the others read
        self._read: dict[int, Any] = {}  # of each group: the event after which nobody reads its shards
        self._last: Any = None  # that of the last gather
        self._held: dict[int, tuple[list[torch.UntypedStorage], Any]] = {}

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

    def take_in(
        self,
        units: Iterable[torch.nn.Module],
        alias: Callable[..., torch.Tensor],
        sent_of: Callable[[torch.Tensor], Sequence[str]],
    ) -> None:
        """Move shards that are sent as they lie into memory that the others read. Collective over the ranks.

        The parameters stay the same objects. Shards that are cast on their way, quantized ones whose buffers are put
        together or padded first, and those on meta stay where they are, as do those that another call has moved and
        nobody has moved away.

        Args:
            units: That this gathers.
            alias: :func:`te_fsdp.move.peers.alias`.
            sent_of: Names of the attributes of a quantized shard that are sent, of even shards as they lie: always the
                same ones. None where these change.
        """
        records = [m for u in units for group in fsdp_parameter_groups(u) for m in group.fsdp_params]
        found = [(managed, tensors) for managed in records if (tensors := self._outside(managed, sent_of))]
        if not found:
            return
        sizes = [tuple([tensor.nbytes for tensor in tensors.values()]) for _, tensors in found]
        memory, offset = self.make(sum(_aligned(size) for several in sizes for size in several)), 0
        self._settled.clear()
        for (managed, tensors), several in zip(found, sizes, strict=True):
            self._homes[id(managed)] = _Home(memory, offset, several)
            self._places.pop(id(managed), None)
            for (name, data), size in zip(tensors.items(), several, strict=True):
                moved = alias(memory.own, offset, data).copy_(data.view(-1))
                offset += _aligned(size)
                if name:
                    setattr(local_of(managed.sharded_param), name, moved.view(data.shape))
                    continue
                managed._sharded_param_data, local = moved, local_of(managed.sharded_param)
                dim, padded = managed.fsdp_placement.dim, moved.view(managed.padded_sharded_param_size)
                local.data = padded.narrow(dim, 0, local.shape[dim] if local.numel() else 0)

    def _outside(
        self, managed: Any, sent_of: Callable[[torch.Tensor], Sequence[str]]
    ) -> dict[str, torch.Tensor]:
        """What is sent of a shard as it lies, by name (empty: FSDP2's own), if it lies where others cannot read it."""
        owner, name = owners_of(managed)[0]
        local, dim = local_of(getattr(owner, name)), managed.fsdp_placement.dim
        if local.is_meta:
            return {}
        managed.reset_sharded_param()  # FSDP2 has not looked since the parameter was initialised
        if not gathers_itself(local):
            data = managed._sharded_param_data
            found = {"": data} if managed.mp_policy.param_dtype in (None, data.dtype) else {}
        elif dim == 0 and managed._orig_size[0] == managed.mesh_info.shard_mesh_size * local.shape[0]:
            found = {each: getattr(local, each) for each in sent_of(local)}
        else:  # the hooks make new tensors of it
            found = {}
        if not all(each is not None and each.numel() and each.is_contiguous() for each in found.values()):
            return {}
        home = self._homes.get(id(managed))
        lies_there = home is not None and [each.data_ptr() for each in found.values()] == _addresses(home)
        return {} if lies_there else found

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
        # What torch.profiler.record_function shows of it would cost more than the rest of this line without a profiler.
        shown = torch._C._profiler._RecordFunctionFast(group._with_fqn("FSDP::all_gather"))
        with shown, torch.no_grad(), device.stream(stream):
            _wait(stream, self._last)  # the gather before may have been on another stream
            _wait(stream, event)
            del memory  # not before: other buffers may take its place
            gather = self._lay_out(group)
            self.meeting.barrier()
            self._copy(gather)
            for managed, parts in gather.joins:
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
        if self._held:
            self._release(group, current.record_event())

    def to_sharded(self, group: Any, stock: Callable[[], None]) -> None:
        """``FSDPParamGroup._to_sharded``. Local operation."""
        if group.is_sharded:
            return
        stock()
        current = group.device_handle.current_stream()
        # Whoever writes to shards next, writes on this stream.
        _wait(current, self._read.pop(id(group), None))
        settled, records = self._settled.get(id(group)), group.fsdp_params
        if settled is not None and len(settled.seen) == len(records):
            memory = [storage for storage, _ in settled.storages]
        else:  # also where a part of the group is about to be gathered again
            tensors = [t for m in records for t in (*m.all_gather_outputs, *m._unsharded_inner_tensors)]
            memory = [tensor.untyped_storage() for tensor in tensors]
        self._held[id(group)] = memory, current.record_event()
        if group._training_state.name != "FORWARD":
            self._release(group, self._held[id(group)][1])

    def forget(self) -> None:
        """Forget all events, and free what waits to be freed. Local operation; nothing may be under way."""
        self._read.clear()
        self._last = None
        self._free()

    # --- a gather

    def _lay_out(self, group: Any) -> _Gather:
        """What is to be copied; shards that do not lie where the others read them are copied there."""
        records, settled = group.fsdp_params, self._settled.get(id(group))
        sent = [_inputs(managed) for managed in records]
        if settled is not None and settled.is_same(records, sent):
            for storage, size in settled.storages:
                if storage.size() != size:
                    storage.resize_(size)
            return settled
        self._settled.pop(id(group), None)
        needed = 0
        keys = list[tuple[Any, ...]]()
        for managed, tensors in zip(records, sent, strict=True):
            dtypes = tuple([_sent_dtype(managed, tensor) for tensor in tensors])
            each = zip(tensors, dtypes, strict=True)
            sizes = tuple([tensor.numel() * dtype.itemsize for tensor, dtype in each])
            home = self._homes.get(id(managed))
            is_home = home is not None and sizes == home.sizes
            keys.append((None if is_home else needed, sizes, dtypes))
            needed += 0 if is_home else sum(map(_aligned, sizes))
        if needed and (self._staging is None or self._staging.own.numel() < needed):
            self._staging = None
            self._places.clear()  # what looks at the memory keeps it
            self._staging = self.make(needed)
        places = [self._places_of(managed, key) for managed, key in zip(records, keys, strict=True)]
        pairs = [
            (own, tensor)
            for place, tensors in zip(places, sent, strict=True)
            for own, tensor in zip(place.own, tensors, strict=True)
            if tensor.data_ptr() != own.data_ptr()
        ]
        self._stage([own for own, _ in pairs], [tensor.view(-1) for _, tensor in pairs])
        gather = _gather_of(records, sent, places)
        if not pairs and not gather.joins and all(place is None for place, *_ in keys):
            self._settled[id(group)] = gather
        return gather

    def _stage(self, targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
        """Copy shards to where the others read them."""
        copy_all_(targets, sources)
        self.staged += sum(target.nbytes for target in targets)

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

    def _copy(self, gather: _Gather) -> None:
        """Read all ranks' parts."""
        for target, source in gather.copies:
            target.copy_(source)
        copy_all_(*gather.small)

    # --- memory of gathered weights

    def _release(self, group: Any, event: Any) -> None:
        """Free the memory of units that are released, as soon as all that has read it has ended: the event."""
        stream = getattr(group.comm_ctx, "all_gather_stream", None)
        if stream is not None:  # there is none before the first forward
            _wait(stream, event)
        self._free()

    def _free(self) -> None:
        for storages, _ in self._held.values():
            for storage in storages:
                if storage.size():
                    storage.resize_(0)
        self._held.clear()


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def _wait(stream: Any, event: Any) -> None:
    """Let a stream wait for an event; the CPU has none."""
    if event is not None:
        stream.wait_event(event)


def _addresses(home: _Home) -> list[int]:
    """Of the tensors of a shard that lie where the others read."""
    found, at = list[int](), home.memory.own.data_ptr() + home.offset
    for size in home.sizes:
        found.append(at)
        at += _aligned(size)
    return found


def _gather_of(records: list[Any], sent: list[list[torch.Tensor]], places: list[_Places]) -> _Gather:
    """What a gather copies, small pieces apart."""
    pairs = [pair for place in places for pair in place.copies]
    small = [pair for pair in pairs if pair[0].numel() <= SMALL]
    memory = [output for place in places for output in place.outputs]
    return _Gather(
        [
            (place.outputs, [(tensor, tensor.data_ptr()) for tensor in tensors])
            for place, tensors in zip(places, sent, strict=True)
        ],
        [(tensor.untyped_storage(), tensor.nbytes) for tensor in memory],
        [pair for pair in pairs if pair[0].numel() > SMALL],
        ([target for target, _ in small], [source for _, source in small]),
        [(m, place.parts) for m, place in zip(records, places, strict=True) if place.parts],
    )


def _inputs(managed: Any) -> list[torch.Tensor]:
    """Tensors of a shard that are sent (``FSDPParam.all_gather_inputs``, which makes new views and casts).

    Hooks that take all that FSDP2 knows are called here: before each call it would look at their signature.
    """
    local = local_of(managed.sharded_param)
    if not gathers_itself(local):
        return [managed._sharded_param_data]
    is_even = local.shape == managed.padded_sharded_param_size
    if not is_even or managed.offload_to_cpu or not _takes_all(type(local)):
        return managed.all_gather_inputs
    tensors, metadata = local.fsdp_pre_all_gather(  # type: ignore[missing-attribute]
        managed.shard_mesh_from_root,
        managed._orig_size,
        managed._contiguous_orig_stride,
        managed._module_info.module,
        managed.mp_policy,
    )
    managed._extensions_data.all_gather_metadata = metadata
    managed._extensions_data.all_gather_input_sizes = [tensor.shape for tensor in tensors]
    return list(tensors)


@functools.cache
def _takes_all(cls: Any) -> bool:
    """Whether the all-gather hook of a class takes more than the mesh."""
    return len(inspect.signature(cls.fsdp_pre_all_gather).parameters) > 2


def _sent_dtype(managed: Any, tensor: torch.Tensor) -> torch.dtype:
    """Dtype that a tensor of a shard is sent in."""
    own = tensor.dtype if gathers_itself(managed.sharded_param) else managed.param_dtype
    return own or tensor.dtype


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
