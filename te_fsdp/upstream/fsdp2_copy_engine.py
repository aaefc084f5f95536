"""Copy engine all-gathers of FSDP2 units: each rank copies the other ranks' shards into its unsharded weights."""

# [Note: all-gathers by copies] This replaces an all-gather into a buffer and the copy out of it
# (``FSDPParamGroup.unshard``, ``wait_for_unshard``):
#
#     every rank   copies shards into shared memory unless they are stored there already     (on the all-gather
#     stream)
#     all ranks    barrier
#     every rank   copies each rank's part of each tensor into the memory that kernels read; one kernel copies all
#                  small parts
#     all ranks    barrier: no rank reads any more, so shards may be written again
#
# The weights of a forward's last units are still unsharded when their backward starts, unless an optimizer
# has stepped.
#
# FSDP2 keeps managing the memory of unsharded weights. It resizes storages before an all-gather and after the
# unit is released, and tensors saved by autograd refer to these storages. The memory belongs to the
# all-gather stream, so that an all-gather need not wait for concurrent computation. It is released once this
# stream waits for all readers. After a forward this is one unit later, because the next all-gather would
# otherwise wait for this unit's forward.
#
# Private names of FSDP2, checked with torch 2.11 to 2.15. ``upstream/fsdp2_patches.py`` installs the
# replacements.

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, Protocol, TypeAlias

import torch

from te_fsdp.upstream.fsdp2_fixed_memory import FixedMemory
from te_fsdp.upstream.fsdp2_hooks import current_stream, on_stream, profiler_range
from te_fsdp.upstream.fsdp2_patches import has_all_gather_hooks, set_gather_methods
from te_fsdp.upstream.fsdp2_settled import sent_tensors
from te_fsdp.upstream.fsdp2_units import fsdp_parameter_groups, owners_of
from te_fsdp.upstream.torch_dtensor import copy_all_, local_of

#: Alignment of each part in bytes, required by vectorized copies and kernels.
ALIGNMENT = 256
#: Parts below this size in bytes are copied together by one kernel, because the launch of a copy takes longer.
SMALL = 1 << 16


class Memory(Protocol):
    """Memory that the ranks read of each other (:class:`te_fsdp.peer_memory.PeerMemory`)."""

    parts: list[torch.Tensor]
    local: torch.Tensor
    barrier: Callable[[], None]


class _SharedLocation(NamedTuple):
    """Location of a shard's tensors in shared memory, one after the other."""

    memory: Memory
    offset: int
    sizes: tuple[int, ...]

    @property
    def addresses(self) -> list[int]:
        starts = itertools.accumulate(
            map(_aligned, self.sizes), initial=self.memory.local.data_ptr() + self.offset
        )
        return [*starts][:-1]


class _PendingCopy(NamedTuple):
    """A pending all-gather, with the fields that FSDP2 reads of an ``AllGatherResult``."""

    all_gather_event: Any
    all_gather_work: None = None


#: (target, source) of copies, uint8.
_Pairs: TypeAlias = list[tuple[torch.Tensor, torch.Tensor]]


class _Gather(NamedTuple):
    """Cached copy plan of a group's all-gather, reused as long as nothing changes."""

    #: Inputs of the plan for each record: the offset in shared memory for tensors that are copied there first (None if
    #: stored there), sizes and dtypes of the tensors.
    keys: list[tuple[Any, ...]]
    outputs: list[list[torch.Tensor]]  #: FSDP2's lists of gathered tensors
    sent: list[list[torch.Tensor]]  #: This rank's tensors, or their copies in shared memory
    #: Tensors with addresses, if all of them are stored in shared memory
    seen: list[list[tuple[torch.Tensor, int]]]
    #: Storages of unsharded weights, with their sizes in bytes
    storages: list[tuple[torch.UntypedStorage, int]]
    copies: _Pairs  #: Copies from other ranks
    local: _Pairs  #: Copies of this rank's shards
    #: Targets and sources of the small parts of all ranks
    small: tuple[list[torch.Tensor], list[torch.Tensor]]
    joins: list[tuple[Any, list[torch.Tensor]]]  #: Records whose gathered tensors are concatenated from parts

    def is_same(self, records: list[Any], sent: list[Sequence[torch.Tensor]]) -> bool:
        """Return whether the plan applies to these tensors without staging. Every all-gather calls it."""
        if len(records) != len(self.seen):
            return False
        for record, outputs, tensors, addresses in zip(records, self.outputs, sent, self.seen, strict=True):
            if record.all_gather_outputs is not outputs or len(tensors) != len(addresses):
                return False
            for tensor, (before, address) in zip(tensors, addresses, strict=True):
                if tensor is not before or tensor.data_ptr() != address:
                    return False
        return True


class _ReleasedUnit(NamedTuple):
    """Gathered weights of a released group, until another all-gather uses the memory."""

    storages: list[torch.UntypedStorage]  #: Their memory
    event: Any  #: Event after which no kernel reads it
    is_kept: bool  #: Whether it contains the weights for the next backward


class CopyEngineGathers:
    """Copy engine all-gathers of a model's units with shards on the same ranks.

    Attributes:
        peer_memory: Memory whose barrier all all-gathers use.
        make: Allocates shared memory of the given size in bytes. Collective over the ranks; waits for the device.
        sent_of: Returns the attributes of an evenly sharded quantized weight that are sent unchanged; empty if these
            vary.
        staged: Number of bytes that were copied into shared memory.
    """

    def __init__(
        self,
        peer_memory: Memory,
        make: Callable[[int], Memory],
        sent_of: Callable[[torch.Tensor], Sequence[str]],
    ) -> None:
        self.peer_memory, self.make, self.sent_of = peer_memory, make, sent_of
        self.staged = 0
        self._rank = next(rank for rank, part in enumerate(peer_memory.parts) if part is peer_memory.local)
        self._staging: Memory | None = None
        self._locations: dict[int, _SharedLocation] = {}
        self._gathers: dict[int, _Gather] = {}  # of each group: its latest plan
        self._read: dict[int, Any] = {}  # of each group: the event after which no rank reads its shards
        self._last: Any = None  # event of the latest all-gather
        self._held: dict[int, _ReleasedUnit] = {}
        self._fixed: dict[int, FixedMemory] = {}
        self._postponed: set[int] = set()  # groups that are all-gathered when they are waited for

    @property
    def shared_bytes(self) -> int:
        """Return the shared memory of this rank in bytes, which torch's allocator does not count."""
        memories = {id(location.memory): location.memory for location in self._locations.values()}
        return sum(
            m.local.numel() for m in (self.peer_memory, self._staging, *memories.values()) if m is not None
        )

    def install(self, unit: torch.nn.Module) -> None:
        """All-gather a unit by copies from now on. Local operation."""
        for group in fsdp_parameter_groups(unit):
            set_gather_methods(group, self)

    def fix_addresses(self, unit: torch.nn.Module, memory: FixedMemory) -> None:
        """All-gather a unit into memory that stays allocated, from its first all-gather on. Local operation."""
        for group in fsdp_parameter_groups(unit):
            self._fixed[id(group)] = memory

    # --- shards

    def move_to_shared_memory(
        self, units: Iterable[torch.nn.Module], alias: Callable[..., torch.Tensor]
    ) -> None:
        """Move shards that are sent unchanged into shared memory. Collective over the ranks.

        The parameters stay the same objects. Shards are not moved if the all-gather casts them, if their quantized
        buffers are joined or padded first, if they are on meta, or if an earlier call has moved them. ``alias`` is
        :func:`te_fsdp.peer_memory.alias`.
        """
        records = [m for u in units for group in fsdp_parameter_groups(u) for m in group.fsdp_params]
        to_move = [(managed, tensors) for managed in records if (tensors := self._tensors_to_move(managed))]
        if not to_move:
            return
        sizes = [tuple([tensor.nbytes for tensor in tensors.values()]) for _, tensors in to_move]
        # One allocation for all shards, because exchanging handles of shared memory is collective and slow.
        memory, offset = self.make(sum(_aligned(size) for several in sizes for size in several)), 0
        self._gathers.clear()
        for (managed, tensors), several in zip(to_move, sizes, strict=True):
            self._locations[id(managed)] = _SharedLocation(memory, offset, several)
            for (name, data), size in zip(tensors.items(), several, strict=True):
                moved = alias(memory.local, offset, data).copy_(data.view(-1))
                offset += _aligned(size)
                if name:
                    setattr(local_of(managed.sharded_param), name, moved.view(data.shape))
                    continue
                managed._sharded_param_data, local = moved, local_of(managed.sharded_param)
                dim, padded = managed.fsdp_placement.dim, moved.view(managed.padded_sharded_param_size)
                local.data = padded.narrow(dim, 0, local.shape[dim] if local.numel() else 0)

    def _tensors_to_move(self, managed: Any) -> dict[str, torch.Tensor]:
        """Return a shard's tensors that are sent unchanged but are not in shared memory, by name."""
        owner, name = owners_of(managed)[0]
        local, dim = local_of(getattr(owner, name)), managed.fsdp_placement.dim
        if local.is_meta:
            return {}
        managed.reset_sharded_param()  # FSDP2 has not re-read the parameter since its initialization
        if not has_all_gather_hooks(local):
            data = managed._sharded_param_data  # FSDP2's flat tensor has no name
            tensors = {"": data} if managed.mp_policy.param_dtype in (None, data.dtype) else {}
        elif dim == 0 and managed._orig_size[0] == managed.mesh_info.shard_mesh_size * local.shape[0]:
            tensors = {name: getattr(local, name) for name in self.sent_of(local)}
        else:  # the hooks create new tensors
            tensors = {}
        if not all(t is not None and t.numel() and t.is_contiguous() for t in tensors.values()):
            return {}
        location = self._locations.get(id(managed))
        is_shared = (
            location is not None and [tensor.data_ptr() for tensor in tensors.values()] == location.addresses
        )
        return {} if is_shared else tensors

    # --- replacements of methods that FSDP2 calls

    def unshard(self, group: Any, stock: Callable[[bool], None], async_op: bool = False) -> None:
        """Run in place of ``FSDPParamGroup.unshard``. Collective over the ranks."""
        if group._all_gather_result is not None or group.is_unsharded:
            return
        phase = group._training_state._name_
        if phase == "PRE_BACKWARD" and not group.unshard_in_backward:
            return
        fixed = self._fixed.get(id(group))
        if phase == "PRE_BACKWARD" and fixed is not None and fixed.owner_in_backward(group) is not None:
            # The unit whose weights are in this memory may be about to compute and prefetch this group.
            self._postponed.add(id(group))
            return
        self._postponed.discard(id(group))
        released = self._held.pop(id(group), None)
        if type(group._all_gather_comm).__name__ != "DefaultAllGather":  # set by the user meanwhile
            stock(async_op)
            return
        if released is not None and phase == "PRE_BACKWARD" and self._has_backward_weights(group, released):
            with torch.no_grad():
                sent_tensors(group)  # hooks must run before they receive the gathered tensors
            group._all_gather_result = _PendingCopy(None)
            return
        in_pass = phase in ("FORWARD", "PRE_BACKWARD")
        # After an explicit call the user may write to shards. Work on the current stream must therefore wait.
        stream = group.comm_ctx.all_gather_stream if in_pass else current_stream(group)
        shown = profiler_range(group._with_fqn("FSDP::all_gather"))
        with shown, torch.no_grad(), on_stream(stream):
            _wait(stream, self._last)  # the previous all-gather may have used a different stream
            _wait(stream, released and released.event)
            del released  # not earlier, because other buffers could reuse the memory
            gather = self._plan_copies(group)
            if fixed is not None:
                fixed.take(group, stream)
            self.peer_memory.barrier()
            self._copy(gather, is_first=phase == "FORWARD" and not group.comm_ctx.post_forward_order)
            for managed, parts in gather.joins:
                _join(managed, parts)
            copied = stream.record_event()
            self.peer_memory.barrier()
            self._read[id(group)] = self._last = stream.record_event()
        group._all_gather_result = _PendingCopy(copied)

    def wait_for_unshard(self, group: Any, stock: Callable[[], None]) -> None:
        """Run in place of ``FSDPParamGroup.wait_for_unshard``. Collective if the all-gather was postponed."""
        if id(group) in self._postponed:
            # A prefetch does not come here, so that the owner of the memory has computed ([Note: fixed addresses]).
            self._fixed[id(group)].reshard_owner(group)
            group.unshard()
        if not isinstance(group._all_gather_result, _PendingCopy):
            stock()
            return
        current, event = current_stream(group), group._all_gather_result.all_gather_event
        if group.post_forward_mesh_info is None and group._training_state._name_ == "FORWARD":
            # These weights stay unsharded after an evaluation. A write to their shards comes after no `to_sharded`.
            event = self._read[id(group)]
        _wait(current, event)
        for managed in group.fsdp_params:
            is_new = "_unsharded_param" not in managed.__dict__
            if is_new or type(managed.sharded_param._local_tensor) is not torch.Tensor:
                managed.init_unsharded_param()
        group._to_unsharded()
        group._all_gather_result = None
        # Weights kept from forward are needed in this backward.
        frees = bool(self._held) and group._training_state.name != "PRE_BACKWARD"
        # With staging, hooks release memory that the current stream still reads.
        if frees or self._cached_plan(group) is None:
            self._release(group, current.record_event(), frees=frees)

    def to_sharded(self, group: Any, stock: Callable[[], None]) -> None:
        """Run in place of ``FSDPParamGroup._to_sharded``. Local operation."""
        if group.is_sharded:
            return
        stock()
        current = current_stream(group)
        # The next write to shards is on this stream.
        _wait(current, self._read.pop(id(group), None))
        gather = self._cached_plan(group)
        if gather is not None:
            memory = [storage for storage, _ in gather.storages]
        else:
            records = [] if id(group) in self._fixed else group.fsdp_params
            tensors = [t for m in records for t in (*m.all_gather_outputs, *m._unsharded_inner_tensors)]
            memory = [tensor.untyped_storage() for tensor in tensors]
        after_forward, event = group._training_state.name == "FORWARD", current.record_event()
        if (fixed := self._fixed.get(id(group))) is not None:
            fixed.release(group, event)
        self._held[id(group)] = _ReleasedUnit(memory, event, after_forward)
        if not after_forward:
            self._release(group, event)

    def _cached_plan(self, group: Any) -> _Gather | None:
        """Return a group's plan if all shards are in shared memory; ``None`` for a partial all-gather."""
        gather = self._gathers.get(id(group))
        return gather if gather is not None and len(gather.seen) == len(group.fsdp_params) else None

    def expire(self) -> None:
        """Make the next backward all-gather again, because shards have new values. Local operation."""
        self._held = {key: released._replace(is_kept=False) for key, released in self._held.items()}

    def _has_backward_weights(self, group: Any, released: _ReleasedUnit) -> bool:
        """Return whether a released group's memory contains the weights for a backward. Identical on all ranks."""
        fixed = self._fixed.get(id(group))
        if fixed is not None and not fixed.contains(group):
            return False
        # Changes of shards are not checked here: some ranks may have no rows of the weight.
        return released.is_kept and all(
            (not has_all_gather_hooks(m.sharded_param) or self.sent_of(local_of(m.sharded_param)))
            and m.all_gather_outputs
            and all(output.untyped_storage().size() for output in m.all_gather_outputs)
            for m in group.fsdp_params
        )

    def forget(self) -> None:
        """Drop all events and free released memory. Local operation; nothing may be pending."""
        self._read.clear()
        self._last = None
        self._free()

    # --- a gather

    def _plan_copies(self, group: Any) -> _Gather:
        """Plan the copies, and copy shards outside of shared memory into it."""
        records, gather = group.fsdp_params, self._gathers.get(id(group))
        sent = sent_tensors(group)
        if gather is not None and gather.is_same(records, sent):
            for storage, size in gather.storages:
                if storage.nbytes() != size:  # `size` would be a call of Python
                    storage.resize_(size)
            return gather
        needed, keys = 0, list[tuple[Any, ...]]()
        for managed, tensors in zip(records, sent, strict=True):
            cast = None if has_all_gather_hooks(managed.sharded_param) else managed.param_dtype
            dtypes = tuple([cast or tensor.dtype for tensor in tensors])
            typed_tensors = zip(tensors, dtypes, strict=True)
            sizes = tuple([tensor.numel() * dtype.itemsize for tensor, dtype in typed_tensors])
            location = self._locations.get(id(managed))
            is_in_place = location is not None and sizes == location.sizes
            keys.append((None if is_in_place else needed, sizes, dtypes))
            needed += 0 if is_in_place else sum(map(_aligned, sizes))
        if needed and (self._staging is None or self._staging.local.numel() < needed):
            self._staging = None
            self._gathers.clear()  # plans keep the memory alive
            self._staging = self.make(needed)
        ranks, fixed = len(self.peer_memory.parts), self._fixed.get(id(group))
        numels = [
            [size // dtype.itemsize for size, dtype in zip(sizes, dtypes, strict=True)]
            for _, sizes, dtypes in keys
        ]
        if fixed is not None:
            fixed.assign(group, [(n, key[2]) for n, key in zip(numels, keys, strict=True)], ranks)
        for managed, (_, _, dtypes), numels_of_record in zip(records, keys, numels, strict=True):
            managed.init_all_gather_outputs(numels_of_record, list(dtypes), ranks, managed.device)
            managed.alloc_all_gather_outputs()
        gather = self._gathers.pop(id(group), None)
        outputs = [managed.all_gather_outputs for managed in records]
        if gather is None or gather.keys != keys or any(map(operator.is_not, gather.outputs, outputs)):
            gather = self._make_plan(records, keys)
            if fixed is not None:
                gather = gather._replace(storages=[])
        if not gather.joins:  # concatenated parts use memory of this all-gather only
            self._gathers[id(group)] = gather
        pairs = [
            (mine, tensor)
            for parts, tensors in zip(gather.sent, sent, strict=True)
            for mine, tensor in zip(parts, tensors, strict=True)
            if tensor.data_ptr() != mine.data_ptr()
        ]
        self._stage([mine for mine, _ in pairs], [tensor.view(-1) for _, tensor in pairs])
        gather.seen[:] = [] if pairs else [[(t, t.data_ptr()) for t in tensors] for tensors in sent]
        return gather

    # A separate function, because tests of stale shards replace it.
    def _stage(self, targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
        copy_all_(targets, sources)
        self.staged += sum(target.nbytes for target in targets)

    def _make_plan(self, records: list[Any], keys: list[tuple[Any, ...]]) -> _Gather:
        """Plan the copies of an all-gather, with small parts separate."""
        ranks, parts_sent, copies, local, joins = len(self.peer_memory.parts), [], _Pairs(), _Pairs(), []
        for managed, (offset, sizes, dtypes) in zip(records, keys, strict=True):
            location = self._locations[id(managed)] if offset is None else None
            memory: Any = self._staging if location is None else location.memory
            position, targets, parts = (
                offset if location is None else location.offset,
                managed.all_gather_outputs,
                [],
            )
            if managed.fsdp_placement.dim != 0:
                targets = [torch.empty_like(output) for output in targets]
                joins.append((managed, targets))
            for target, size, dtype in zip(targets, sizes, dtypes, strict=True):
                parts.append(memory.local[position : position + size].view(dtype))
                # Use .data: autograd would treat a write to the tensor as a modification of saved tensors.
                rows = target.data.view(torch.uint8).view(ranks, size)
                # each rank starts with a different peer, so that no rank is read by all at once
                for step in range(1, ranks):
                    rank = (self._rank + step) % ranks
                    copies.append((rows[rank], memory.parts[rank][position : position + size]))
                local.append((rows[self._rank], memory.local[position : position + size]))
                position += _aligned(size)
            parts_sent.append(parts)
        outputs = [managed.all_gather_outputs for managed in records]
        storages = [(tensor.untyped_storage(), tensor.nbytes) for tensors in outputs for tensor in tensors]
        pairs = [pair for pair in (*copies, *local) if pair[0].numel() <= SMALL]
        small = [target for target, _ in pairs], [source for _, source in pairs]
        copies = [pair for pair in copies if pair[0].numel() > SMALL]
        local = [pair for pair in local if pair[0].numel() > SMALL]
        return _Gather(keys, outputs, parts_sent, [], storages, copies, local, small, joins)

    # A separate method, because tests of late ranks replace it.
    def _copy(self, gather: _Gather, is_first: bool) -> None:
        for target, source in gather.copies:
            target.copy_(source)
        copy_all_(*gather.small)
        # The first all-gather of a forward overlaps with nothing. There a kernel copies this rank's part, because copy
        # engines take five times as long for a copy within one GPU.
        if is_first:
            copy_all_([target for target, _ in gather.local], [source for _, source in gather.local])
            return
        for target, source in gather.local:
            target.copy_(source)

    # --- memory of gathered weights

    def _release(self, group: Any, event: Any, frees: bool = True) -> None:
        """After ``event``, let all-gathers reuse released memory and free the memory of released units."""
        stream = getattr(group.comm_ctx, "all_gather_stream", None)
        if stream is not None:  # None before the first forward
            _wait(stream, event)
        if frees:
            self._free()

    def _free(self) -> None:
        for released in self._held.values():
            for storage in released.storages:
                if storage.nbytes():
                    storage.resize_(0)
        self._held.clear()


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def _wait(stream: Any, event: Any) -> None:
    """Let a stream wait for an event; ``None`` on the CPU."""
    if event is not None:
        stream.wait_event(event)


def _join(managed: Any, parts: list[torch.Tensor]) -> None:
    """Concatenate ranks' parts along their shard dim, as ``foreach_all_gather_copy_out`` does."""
    dim, shape = managed.fsdp_placement.dim, list(managed.padded_sharded_param_size)
    for part, output in zip(parts, managed.all_gather_outputs, strict=True):
        ranks = part.numel() // managed.padded_sharded_param_size.numel()
        chunks = part.view(ranks * shape[0], *shape[1:]).chunk(ranks)
        full_shape = [length * ranks if index == dim else length for index, length in enumerate(shape)]
        torch.cat(chunks, dim=dim, out=output.data.view(full_shape))
