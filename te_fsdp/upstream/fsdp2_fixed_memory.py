"""Memory at fixed addresses for unsharded weights, which units of the same shapes use in turn."""

# [Note: fixed addresses] FSDP2 frees unsharded weights after each pass, and the allocator may return
# different memory for the next all-gather. A CUDA graph contains addresses, so units with graphs use memory
# that stays allocated:
#
#     unit            0    1    2    3    backward:    3    2    1    0
#     memory          a    b    a    b                 b    a    b    a
#
# One unit is all-gathered while the previous one computes, so that memory of two units is enough, as many as FSDP2
# allocates. There are two exceptions:
#
# - A unit that is all-gathered before the first forward of the model, for example because the user evaluates it
#   alone, has memory of its own. The order of such calls need not be that of the model's forward.
# - A unit whose input requires no gradient stays unsharded until the end of the backward. A backward through two
#   forwards of the model then needs its memory for another unit, which reshards it.
#
# Private names of FSDP2 (``FSDPParam.all_gather_outputs``, ``FSDPParamGroup._training_state``), checked with
# torch 2.11 to 2.15.

from __future__ import annotations

from collections import Counter
from typing import Any

import torch

from te_fsdp.errors import OrderError
from te_fsdp.upstream.fsdp2_state import is_in_root_forward


class _UnitMemory:
    """Memory for the unsharded weights of one unit at a time."""

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        self.tensors = tensors
        self.owner: Any = None  # parameter group whose weights it contains, or contained last
        self.event: Any = None  # event after which no kernel reads them


class FixedMemory:
    """Memory for the unsharded weights of several parameter groups."""

    def __init__(self, units: int) -> None:
        #: Number of units of the same shapes that are unsharded at the same time; 0 if all are.
        self.units = units
        self._by_shape: dict[tuple[Any, ...], _UnitMemory] = {}
        self._used: Counter[tuple[Any, ...]] = Counter()
        self._by_group: dict[int, _UnitMemory] = {}  # id of a group -> its memory

    def assign(self, group: Any, sizes: list[tuple[list[int], tuple[torch.dtype, ...]]], ranks: int) -> None:
        """Let FSDP2 all-gather a group into its memory, before its first all-gather. Local operation.

        ``sizes`` has the number of elements and the dtypes of the tensors that one rank sends, for each record.
        """
        if id(group) in self._by_group:
            return
        key: tuple[Any, ...] = tuple((tuple(numels), dtypes) for numels, dtypes in sizes)
        if not is_in_root_forward(group.modules[0]):
            key = (*key, id(group))  # memory of its own ([Note: fixed addresses])
        number = self._used[key]
        self._used[key] += 1
        where = (key, number % self.units if self.units else number)
        if where not in self._by_shape:
            flat = [(n, dtype) for numels, dtypes in sizes for n, dtype in zip(numels, dtypes, strict=True)]
            tensors = [torch.empty(n * ranks, dtype=dtype, device=group.device) for n, dtype in flat]
            self._by_shape[where] = _UnitMemory(tensors)
        memory = self._by_group[id(group)] = self._by_shape[where]
        # Different tensor objects over the same storages, because versions count per object.
        views = iter(
            [
                torch.empty(0, dtype=t.dtype, device=t.device).set_(t.untyped_storage(), 0, t.shape, (1,))
                for t in memory.tensors
            ]
        )
        for managed, (numels, _) in zip(group.fsdp_params, sizes, strict=True):
            managed.all_gather_outputs = [next(views) for _ in numels]

    def owner_in_backward(self, group: Any) -> Any:
        """Return the other group, in its backward, whose unsharded weights a group's memory contains; or ``None``."""
        memory = self._by_group.get(id(group))
        owner = None if memory is None else memory.owner
        if owner is None or owner is group or not owner.is_unsharded:
            return None
        return owner if owner._training_state.name == "PRE_BACKWARD" else None

    def reshard_owner(self, group: Any) -> None:
        """Reshard the unit of :meth:`owner_in_backward`, whose next backward all-gathers it again. Local operation."""
        owner = self.owner_in_backward(group)
        if owner is not None:
            owner.reshard()
            # FSDP2 skips pre-backward, and with it the all-gather, of a group that is still in its backward.
            owner._training_state = type(owner._training_state).IDLE

    def take(self, group: Any, stream: Any) -> None:
        """Let a stream wait until a group's memory can be written; raise OrderError if it is in use. Local."""
        memory = self._by_group.get(id(group))
        if memory is None:
            return
        owner = memory.owner
        is_other = owner is not None and owner is not group
        if is_other and (owner.is_unsharded or owner._all_gather_result is not None):
            raise OrderError(
                f"{group._module_fqn}: all-gather while {owner._module_fqn} is unsharded",
                expected="one unit that computes and the next one that is all-gathered",
                got="more units of the same shapes that are unsharded at the same time",
                why="te_fsdp.graphed_units stores the unsharded weights of such units in the same memory",
                fix="prefetch one unit ahead only, and do not call unshard() of these units",
            )
        # Kernels of the previous owner may still read the memory.
        if memory.event is not None:
            stream.wait_event(memory.event)
        memory.owner = group

    def release(self, group: Any, event: Any) -> None:
        """Record after which event a group's memory can be written again. Local operation."""
        memory = self._by_group.get(id(group))
        if memory is not None and memory.owner is group:
            memory.event = event

    def contains(self, group: Any) -> bool:
        """Return whether a group's memory contains that group's weights."""
        memory = self._by_group.get(id(group))
        return memory is None or memory.owner is group

    def storages(self, group: Any) -> set[int]:
        """Return the addresses of a group's storages; empty before its first all-gather."""
        memory = self._by_group.get(id(group))
        return set() if memory is None else {t.untyped_storage().data_ptr() for t in memory.tensors}
