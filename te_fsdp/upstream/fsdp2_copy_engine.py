"""FSDP2's gathers as copies: each rank reads the others' shards, piece by piece, into its gathered weights' memory.

In place of one all-gather into a buffer and a copy out of it (``FSDPParamGroup.unshard``, ``wait_for_unshard``):

    every rank   shards that lie in memory which the others read: nothing; all others are copied there   (on the gather
    all ranks    a barrier                                                                                stream)
    every rank   one contiguous copy for each rank and tensor, into the very memory that kernels read; small ones by
                 one kernel
    all ranks    a barrier: nobody reads any more, shards may be written again

What the last units of a forward have gathered is there when their backward begins, unless an optimizer has stepped.

The gathered weights' memory stays FSDP2's: storages that are given memory before a gather and lose it when the unit is
released, while tensors that autograd has saved follow them. It is taken from the gather stream's part of the allocator,
so that a gather need not wait for what is computed meanwhile. It goes back when that stream waits for all that has read
it; after a forward that is one unit later, else the next gather would wait for this unit's forward.

Private names of FSDP2, checked on torch 2.11 to 2.15. The replacements are installed by ``upstream/fsdp2_patches.py``.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, Protocol, TypeAlias

import torch

from te_fsdp.upstream.fsdp2_patches import has_all_gather_hooks, set_gather_methods
from te_fsdp.upstream.fsdp2_settled import ask_hook, takes_all
from te_fsdp.upstream.fsdp2_units import fsdp_parameter_groups, owners_of
from te_fsdp.upstream.torch_dtensor import copy_all_, local_of

#: Each piece begins at a multiple of so many bytes: vectorised copies and kernels want aligned addresses.
ALIGNMENT = 256
#: Bytes of a piece that is copied with others by one kernel: to begin a copy of its own takes the host longer.
SMALL = 1 << 16


class Memory(Protocol):
    """What the ranks read of each other (:class:`te_fsdp.peer_memory.PeerMemory`)."""

    parts: list[torch.Tensor]
    own: torch.Tensor
    barrier: Callable[[], None]


class _SharedLocation(NamedTuple):
    """Where the tensors that are sent of a shard lie in memory that the others read, one after the other."""

    memory: Memory
    offset: int
    sizes: tuple[int, ...]

    @property
    def addresses(self) -> list[int]:
        """Of the tensors."""
        rooms = itertools.accumulate(
            map(_aligned, self.sizes), initial=self.memory.own.data_ptr() + self.offset
        )
        return [*rooms][:-1]


class _PendingCopy(NamedTuple):
    """A gather under way: what FSDP2 looks for in an ``AllGatherResult`` of its own."""

    all_gather_event: Any
    all_gather_work: None = None


#: Targets and sources of copies, uint8.
_Pairs: TypeAlias = list[tuple[torch.Tensor, torch.Tensor]]


class _Gather(NamedTuple):
    """What a group's gather copies: the next one the same, if nothing has changed."""

    #: What the rest depends on, of each record: the offset in the memory for what is copied first (None: it lies where
    #: the others read), sizes and dtypes of the tensors that are sent.
    keys: list[tuple[Any, ...]]
    outputs: list[list[torch.Tensor]]  #: FSDP2's lists of gathered tensors
    own: list[list[torch.Tensor]]  #: Where this rank's tensors lie, or are copied to
    seen: list[list[tuple[torch.Tensor, int]]]  #: What was sent, with addresses, if all of it lay there
    storages: list[tuple[torch.UntypedStorage, int]]  #: Gathered weights' memory, and how many bytes it needs
    copies: _Pairs  #: Of the other ranks' shards
    local: _Pairs  #: Of this rank's
    small: tuple[list[torch.Tensor], list[torch.Tensor]]  #: Targets, and sources, of all ranks' small pieces
    joins: list[tuple[Any, list[torch.Tensor]]]  #: Records whose gathered tensors are put together of parts

    def is_same(self, records: list[Any], sent: list[list[torch.Tensor]]) -> bool:
        """Whether a gather of these tensors copies the same, and nothing first. Asked in every gather."""
        if len(records) != len(self.seen):
            return False
        for record, outputs, tensors, seen in zip(records, self.outputs, sent, self.seen, strict=True):
            if record.all_gather_outputs is not outputs or len(tensors) != len(seen):
                return False
            for tensor, (before, address) in zip(tensors, seen, strict=True):
                if tensor is not before or tensor.data_ptr() != address:
                    return False
        return True


class _ReleasedUnit(NamedTuple):
    """What a released group has gathered, until somebody else takes the memory."""

    storages: list[torch.UntypedStorage]  #: The memory
    event: Any  #: When nobody computes with it any longer
    is_kept: bool  #: Whether it holds what the next backward would gather


class CopyEngineGathers:
    """Gathers of a model's units whose shards lie on the same ranks.

    Attributes:
        meeting: Memory whose barrier all gathers use.
        make: Bytes -> memory that the ranks share. Collective over them; waits for the device.
        sent_of: Attributes of a quantized shard that are sent, of even ones as they lie; none where these change.
        staged: How many bytes the gathers so far have copied on their way out of shards.
    """

    def __init__(
        self, meeting: Memory, make: Callable[[int], Memory], sent_of: Callable[[torch.Tensor], Sequence[str]]
    ) -> None:
        self.meeting, self.make, self.sent_of = meeting, make, sent_of
        self.staged = 0
        self._rank = next(rank for rank, part in enumerate(meeting.parts) if part is meeting.own)
        self._staging: Memory | None = None
        self._homes: dict[int, _SharedLocation] = {}
        self._gathers: dict[int, _Gather] = {}  # of each group: the last one
        self._read: dict[int, Any] = {}  # of each group: the event after which nobody reads its shards
        self._last: Any = None  # that of the last gather
        self._held: dict[int, _ReleasedUnit] = {}

    @property
    def shared_bytes(self) -> int:
        """Bytes of this rank that the others read, which torch's allocator does not count."""
        memories = {id(home.memory): home.memory for home in self._homes.values()}
        return sum(m.own.numel() for m in (self.meeting, self._staging, *memories.values()) if m is not None)

    def install(self, unit: torch.nn.Module) -> None:
        """Gather a unit in this way from now on. Local operation."""
        for group in fsdp_parameter_groups(unit):
            set_gather_methods(group, self)

    # --- shards

    def take_in(self, units: Iterable[torch.nn.Module], alias: Callable[..., torch.Tensor]) -> None:
        """Move shards that are sent as they lie into memory that the others read. Collective over the ranks.

        The parameters stay the same objects. Shards that are cast on their way, quantized ones whose buffers are put
        together or padded first, and those on meta stay where they are, as do those that another call has moved and
        nobody has moved away. ``alias`` is :func:`te_fsdp.peer_memory.alias`.
        """
        records = [m for u in units for group in fsdp_parameter_groups(u) for m in group.fsdp_params]
        found = [(managed, tensors) for managed in records if (tensors := self._outside(managed))]
        if not found:
            return
        sizes = [tuple([tensor.nbytes for tensor in tensors.values()]) for _, tensors in found]
        memory, offset = self.make(sum(_aligned(size) for several in sizes for size in several)), 0
        self._gathers.clear()
        for (managed, tensors), several in zip(found, sizes, strict=True):
            self._homes[id(managed)] = _SharedLocation(memory, offset, several)
            for (name, data), size in zip(tensors.items(), several, strict=True):
                moved = alias(memory.own, offset, data).copy_(data.view(-1))
                offset += _aligned(size)
                if name:
                    setattr(local_of(managed.sharded_param), name, moved.view(data.shape))
                    continue
                managed._sharded_param_data, local = moved, local_of(managed.sharded_param)
                dim, padded = managed.fsdp_placement.dim, moved.view(managed.padded_sharded_param_size)
                local.data = padded.narrow(dim, 0, local.shape[dim] if local.numel() else 0)

    def _outside(self, managed: Any) -> dict[str, torch.Tensor]:
        """What is sent of a shard as it lies, by name (empty: FSDP2's own), if it lies where others cannot read it."""
        owner, name = owners_of(managed)[0]
        local, dim = local_of(getattr(owner, name)), managed.fsdp_placement.dim
        if local.is_meta:
            return {}
        managed.reset_sharded_param()  # FSDP2 has not looked since the parameter was initialised
        if not has_all_gather_hooks(local):
            data = managed._sharded_param_data
            found = {"": data} if managed.mp_policy.param_dtype in (None, data.dtype) else {}
        elif dim == 0 and managed._orig_size[0] == managed.mesh_info.shard_mesh_size * local.shape[0]:
            found = {each: getattr(local, each) for each in self.sent_of(local)}
        else:  # the hooks make new tensors of it
            found = {}
        if not all(each is not None and each.numel() and each.is_contiguous() for each in found.values()):
            return {}
        home = self._homes.get(id(managed))
        lies_there = home is not None and [each.data_ptr() for each in found.values()] == home.addresses
        return {} if lies_there else found

    # --- what FSDP2 calls

    def unshard(self, group: Any, stock: Callable[[bool], None], async_op: bool = False) -> None:
        """``FSDPParamGroup.unshard``. Collective over the ranks; a gather by hand holds up the current stream."""
        if group._all_gather_result is not None or group.is_unsharded:
            return
        phase, device = group._training_state.name, group.device_handle
        if phase == "PRE_BACKWARD" and not group.unshard_in_backward:
            return
        held = self._held.pop(id(group), None)
        if type(group._all_gather_comm).__name__ != "DefaultAllGather":  # what a user has set since
            stock(async_op)
            return
        if held is not None and phase == "PRE_BACKWARD" and self._is_there(group, held):
            with torch.no_grad():
                for managed in group.fsdp_params:
                    _inputs(managed)  # hooks want to be asked before they are given what was gathered
            group._all_gather_result = _PendingCopy(None)
            return
        in_pass = phase in ("FORWARD", "PRE_BACKWARD")
        # By hand a user may write to shards right afterwards: then what the current stream does next comes later.
        stream = group.comm_ctx.all_gather_stream if in_pass else device.current_stream()
        # What torch.profiler.record_function shows of it would cost more than the rest of this line without a profiler.
        shown = torch._C._profiler._RecordFunctionFast(group._with_fqn("FSDP::all_gather"))
        with shown, torch.no_grad(), device.stream(stream):
            _wait(stream, self._last)  # the gather before may have been on another stream
            _wait(stream, held and held.event)
            del held  # not before: other buffers may take the memory's place
            gather = self._lay_out(group)
            self.meeting.barrier()
            self._copy(gather, is_first=phase == "FORWARD" and not group.comm_ctx.post_forward_order)
            for managed, parts in gather.joins:
                _join(managed, parts)
            copied = stream.record_event()
            self.meeting.barrier()
            self._read[id(group)] = self._last = stream.record_event()
        group._all_gather_result = _PendingCopy(copied)

    def wait_for_unshard(self, group: Any, stock: Callable[[], None]) -> None:
        """``FSDPParamGroup.wait_for_unshard``. Local operation."""
        if not isinstance(group._all_gather_result, _PendingCopy):
            stock()
            return
        current = group.device_handle.current_stream()
        _wait(current, group._all_gather_result.all_gather_event)
        for managed in group.fsdp_params:
            is_new = "_unsharded_param" not in managed.__dict__
            if is_new or type(managed.sharded_param._local_tensor) is not torch.Tensor:
                managed.init_unsharded_param()
        group._to_unsharded()
        group._all_gather_result = None
        # What is kept from forward is about to be used in this backward.
        frees = bool(self._held) and group._training_state.name != "PRE_BACKWARD"
        # Where shards are not sent as they lie hooks give memory back that the current stream still reads.
        if frees or self._settled(group) is None:
            self._release(group, current.record_event(), frees=frees)

    def to_sharded(self, group: Any, stock: Callable[[], None]) -> None:
        """``FSDPParamGroup._to_sharded``. Local operation."""
        if group.is_sharded:
            return
        stock()
        current = group.device_handle.current_stream()
        # Whoever writes to shards next, writes on this stream.
        _wait(current, self._read.pop(id(group), None))
        gather = self._settled(group)
        if gather is not None:
            memory = [storage for storage, _ in gather.storages]
        else:
            records = group.fsdp_params
            tensors = [t for m in records for t in (*m.all_gather_outputs, *m._unsharded_inner_tensors)]
            memory = [tensor.untyped_storage() for tensor in tensors]
        after_forward, event = group._training_state.name == "FORWARD", current.record_event()
        self._held[id(group)] = _ReleasedUnit(memory, event, after_forward)
        if not after_forward:
            self._release(group, event)

    def _settled(self, group: Any) -> _Gather | None:
        """A group's last gather, if all shards lay where the others read; not for a part that is gathered again."""
        gather = self._gathers.get(id(group))
        return gather if gather is not None and len(gather.seen) == len(group.fsdp_params) else None

    def expire(self) -> None:
        """Gather in the next backward what is there from a forward: shards have new values. Local operation."""
        self._held = {key: held._replace(is_kept=False) for key, held in self._held.items()}

    def _is_there(self, group: Any, held: _ReleasedUnit) -> bool:
        """Whether a released group's memory holds what a backward would gather: the same answer on all ranks."""
        # Whether somebody has edited a shard since is not asked: ranks may have nothing of it.
        return held.is_kept and all(
            (not has_all_gather_hooks(m.sharded_param) or self.sent_of(local_of(m.sharded_param)))
            and m.all_gather_outputs
            and all(output.untyped_storage().size() for output in m.all_gather_outputs)
            for m in group.fsdp_params
        )

    def forget(self) -> None:
        """Forget all events, and free what waits to be freed. Local operation; nothing may be under way."""
        self._read.clear()
        self._last = None
        self._free()

    # --- a gather

    def _lay_out(self, group: Any) -> _Gather:
        """What is to be copied; shards that do not lie where the others read them are copied there."""
        records, gather = group.fsdp_params, self._gathers.get(id(group))
        plain = torch.Tensor
        sent = [
            [m._sharded_param_data] if type(m.sharded_param._local_tensor) is plain else _inputs(m)
            for m in records
        ]
        if gather is not None and gather.is_same(records, sent):
            for storage, size in gather.storages:
                if storage.size() != size:
                    storage.resize_(size)
            return gather
        keys, ranks = self._keys_of(records, sent), len(self.meeting.parts)
        for managed, (_, sizes, dtypes) in zip(records, keys, strict=True):
            numels = [size // dtype.itemsize for size, dtype in zip(sizes, dtypes, strict=True)]
            managed.init_all_gather_outputs(numels, list(dtypes), ranks, managed.device)
            managed.alloc_all_gather_outputs()
        gather = self._gathers.pop(id(group), None)
        outputs = [managed.all_gather_outputs for managed in records]
        if gather is None or gather.keys != keys or any(map(operator.is_not, gather.outputs, outputs)):
            gather = self._gather_of(records, keys)
        if not gather.joins:  # what they are put together of is memory of this gather alone
            self._gathers[id(group)] = gather
        pairs = [
            (mine, tensor)
            for own, tensors in zip(gather.own, sent, strict=True)
            for mine, tensor in zip(own, tensors, strict=True)
            if tensor.data_ptr() != mine.data_ptr()
        ]
        self._stage([mine for mine, _ in pairs], [tensor.view(-1) for _, tensor in pairs])
        gather.seen[:] = [] if pairs else [[(t, t.data_ptr()) for t in tensors] for tensors in sent]
        return gather

    def _keys_of(self, records: list[Any], sent: list[list[torch.Tensor]]) -> list[tuple[Any, ...]]:
        """Where what is sent lies, or is copied to, its sizes and dtypes; with memory for what is copied."""
        needed, keys = 0, list[tuple[Any, ...]]()
        for managed, tensors in zip(records, sent, strict=True):
            cast = None if has_all_gather_hooks(managed.sharded_param) else managed.param_dtype
            dtypes = tuple([cast or tensor.dtype for tensor in tensors])
            each = zip(tensors, dtypes, strict=True)
            sizes = tuple([tensor.numel() * dtype.itemsize for tensor, dtype in each])
            home = self._homes.get(id(managed))
            is_home = home is not None and sizes == home.sizes
            keys.append((None if is_home else needed, sizes, dtypes))
            needed += 0 if is_home else sum(map(_aligned, sizes))
        if needed and (self._staging is None or self._staging.own.numel() < needed):
            self._staging = None
            self._gathers.clear()  # what looks at the memory keeps it
            self._staging = self.make(needed)
        return keys

    def _stage(self, targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
        """Copy shards to where the others read them."""
        copy_all_(targets, sources)
        self.staged += sum(target.nbytes for target in targets)

    def _gather_of(self, records: list[Any], keys: list[tuple[Any, ...]]) -> _Gather:
        """What a gather copies, small pieces apart."""
        ranks, every_own, copies, local, joins = len(self.meeting.parts), [], _Pairs(), _Pairs(), []
        for managed, (offset, sizes, dtypes) in zip(records, keys, strict=True):
            home = self._homes[id(managed)] if offset is None else None
            memory: Any = self._staging if home is None else home.memory
            at, targets, own = offset if home is None else home.offset, managed.all_gather_outputs, []
            if managed.fsdp_placement.dim != 0:
                targets = [torch.empty_like(output) for output in targets]
                joins.append((managed, targets))
            for target, size, dtype in zip(targets, sizes, dtypes, strict=True):
                own.append(memory.own[at : at + size].view(dtype))
                # Not the tensor itself: what autograd has saved of it would seem to have been overwritten.
                rows = target.data.view(torch.uint8).view(ranks, size)
                for step in range(1, ranks):  # each rank begins with another one: none is read by all at once
                    rank = (self._rank + step) % ranks
                    copies.append((rows[rank], memory.parts[rank][at : at + size]))
                local.append((rows[self._rank], memory.own[at : at + size]))
                at += _aligned(size)
            every_own.append(own)
        outputs = [managed.all_gather_outputs for managed in records]
        storages = [(tensor.untyped_storage(), tensor.nbytes) for tensors in outputs for tensor in tensors]
        pairs = [pair for pair in (*copies, *local) if pair[0].numel() <= SMALL]
        small = [target for target, _ in pairs], [source for _, source in pairs]
        copies = [pair for pair in copies if pair[0].numel() > SMALL]
        local = [pair for pair in local if pair[0].numel() > SMALL]
        return _Gather(keys, outputs, every_own, [], storages, copies, local, small, joins)

    def _copy(self, gather: _Gather, is_first: bool) -> None:
        """Read all ranks' parts; in a forward's first gather, beside which nothing computes, the own by a kernel."""
        for target, source in gather.copies:
            target.copy_(source)
        copy_all_(*gather.small)
        if is_first:  # copy engines take five times as long from a GPU to itself
            copy_all_([target for target, _ in gather.local], [source for _, source in gather.local])
            return
        for target, source in gather.local:
            target.copy_(source)

    # --- memory of gathered weights

    def _release(self, group: Any, event: Any, frees: bool = True) -> None:
        """Let gathers use memory that was given back, and free units', after the event: all that read it has ended."""
        stream = getattr(group.comm_ctx, "all_gather_stream", None)
        if stream is not None:  # there is none before the first forward
            _wait(stream, event)
        if frees:
            self._free()

    def _free(self) -> None:
        for held in self._held.values():
            for storage in held.storages:
                if storage.size():
                    storage.resize_(0)
        self._held.clear()


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def _wait(stream: Any, event: Any) -> None:
    """Let a stream wait for an event; the CPU has none."""
    if event is not None:
        stream.wait_event(event)


def _inputs(managed: Any) -> list[torch.Tensor]:
    """Tensors of a shard that are sent (``FSDPParam.all_gather_inputs``, which looks at hooks' signatures too)."""
    local = local_of(managed.sharded_param)
    if not has_all_gather_hooks(local):
        return [managed._sharded_param_data]
    is_even = local.shape == managed.padded_sharded_param_size
    if not is_even or managed.offload_to_cpu or not takes_all(type(local)):
        return managed.all_gather_inputs
    return list(ask_hook(managed, local))


def _join(managed: Any, parts: list[torch.Tensor]) -> None:
    """Put ranks' parts together along the dim that they are cut along, as ``foreach_all_gather_copy_out`` does."""
    dim, shape = managed.fsdp_placement.dim, list(managed.padded_sharded_param_size)
    for part, output in zip(parts, managed.all_gather_outputs, strict=True):
        ranks = part.numel() // managed.padded_sharded_param_size.numel()
        chunks = part.view(ranks * shape[0], *shape[1:]).chunk(ranks)
        whole = [length * ranks if at == dim else length for at, length in enumerate(shape)]
        torch.cat(chunks, dim=dim, out=output.data.view(whole))
