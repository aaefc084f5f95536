"""Collectives of small tensors between workers of a CPU pool, through shared memory.

gloo sends over TCP, by three threads a group: 0.2 to 4 ms of CPU time a rank and collective. The workers of a pool are
forked from one server, so they can exchange a tensor through shared memory, in about 50 us.

Gloo is still used to create process groups, for messages from rank to rank, tensors that are large or not plain, other
operations than sum, average, maximum and minimum, runs whose body makes its own group (`init_group=False`), and
everything if TE_FSDP_TEST_GLOO=1 is set, for one run by `env` or for all in pytest's environment.

Unlike gloo's, an asynchronous collective waits for the other ranks when it is called. Its results are written by the
wait and not before. Until then the outputs contain NaN or arbitrary values, so that a read before the wait always fails
a test. With gloo this depends on timing. If collectives do not match, all ranks raise. Gloo would hang or mix up
messages.
"""

from __future__ import annotations

import functools
import hashlib
import math
import mmap
import weakref
from collections.abc import Callable, Sequence
from multiprocessing import get_context
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

GLOO_VARIABLE = "TE_FSDP_TEST_GLOO"
LAZY_VARIABLE = "TORCH_GLOO_LAZY_INIT"
"""gloo's own: ranks connect when they first send, which in most groups is never."""
GROUPS = 96
"""Number of process groups of one run with shared memory; later ones use gloo."""
SLOT = 1 << 18
"""Most bytes that a rank gives to one collective."""
ARENA = GROUPS * 8 * 2 * (SLOT + 8)
"""Bytes of address space for all slots; memory is taken where something is written."""
_HEAD = 3  # words at the beginning of the table: generation, groups, bytes of assigned slots
_WORDS = 4  # for each group: its key, ranks that have arrived, completed collectives, offset of its slots

_Results = list[tuple[torch.Tensor, torch.Tensor]]
"""Tensors to be filled, each with its elements in a row."""
_NONSENSE = 85

_AVERAGE = dist.ReduceOp.RedOpType.AVG
_OPERATORS = {
    dist.ReduceOp.RedOpType.SUM: torch.add,
    _AVERAGE: torch.add,
    dist.ReduceOp.RedOpType.MAX: torch.maximum,
    dist.ReduceOp.RedOpType.MIN: torch.minimum,
}
_FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
_INTEGERS = (torch.int32, torch.int64, torch.uint8, torch.int8)


class Exchange:
    """Memory and semaphores of the processes that are forked from this one."""

    def __init__(self) -> None:
        self._groups: dict[str, tuple[Any, Group | None]] = {}
        self._generation: int | None = None
        self.renew()

    def renew(self) -> None:
        """Reset for later processes: a killed process may have left any state."""
        self.slots = torch.frombuffer(mmap.mmap(-1, ARENA), dtype=torch.uint8)
        self.table = memoryview(mmap.mmap(-1, 8 * (_HEAD + _WORDS * GROUPS))).cast("q")
        context = get_context("fork")
        self.lock = context.Lock()
        self.turnstiles = [(context.Semaphore(0), context.Semaphore(0)) for _ in range(GROUPS)]

    def begin(self, generation: int | None) -> None:
        """Forget the groups of the last run.

        Args:
            generation: Number of the next run of the pool; None: it uses gloo only.
        """
        self._groups, self._generation = {}, generation

    def group(self, stock: Any) -> Group | None:
        """Return this rank's view of a process group; None if it uses gloo only."""
        if self._generation is None or type(stock) is not dist.ProcessGroup:
            return None
        name = stock.group_name
        known = self._groups.get(name)
        if known is None or known[0]() is not stock:
            known = self._groups[name] = (weakref.ref(stock), self._join(stock) if _is_gloo(stock) else None)
        return known[1]

    def _join(self, stock: Any) -> Group | None:
        """Find the entry of a process group in the table, or add one."""
        ranks = dist.get_process_group_ranks(stock)
        identity = hashlib.blake2b(f"{stock.group_name} {ranks}".encode(), digest_size=7).digest()
        key, table = int.from_bytes(identity, "big"), self.table
        with self.lock:
            if table[0] != self._generation:
                self._clear()
            groups, taken = table[1], table[2]
            for place in range(groups):
                if table[_HEAD + _WORDS * place] == key:
                    return Group(self, stock, place)
            needed = 2 * len(ranks) * (SLOT + 8)
            if groups == GROUPS or taken + needed > ARENA:
                return None
            for word, value in enumerate((key, 0, 0, taken)):
                table[_HEAD + _WORDS * groups + word] = value
            table[1], table[2] = groups + 1, taken + needed
            return Group(self, stock, groups)

    def _clear(self) -> None:
        """Empty the table of an earlier run."""
        for place in range(self.table[1]):
            for turnstile in self.turnstiles[place]:
                while turnstile.acquire(False):  # left by a rank that was interrupted while it waited
                    pass
        self.table[0], self.table[1], self.table[2] = self._generation, 0, 0


class Group:
    """This rank's view of a process group.

    A rank writes its part into one of two slots in turn. A rank that arrives at a collective has read the parts of the
    previous one. So when all have arrived, the slots of the previous one are free.
    """

    def __init__(self, exchange: Exchange, stock: Any, place: int) -> None:
        self.rank, self.size = stock.rank(), stock.size()
        self._table, self._at = exchange.table, _HEAD + _WORDS * place
        self._lock, self._turnstiles = exchange.lock, exchange.turnstiles[place]
        start, length = self._table[self._at + 3], 2 * self.size * SLOT
        self._slots = exchange.slots[start : start + length].view(2, self.size, SLOT)
        heads = exchange.slots[start + length : start + length + 2 * self.size * 8]
        self._heads = memoryview(heads.view(torch.int64).numpy())

    def parts(self, what: tuple[Any, ...], given: torch.Tensor | None, like: torch.Tensor) -> torch.Tensor:
        """Return the values of all ranks. Collective over the group.

        Args:
            what: Describes the collective; equal on all ranks.
            given: This rank's part, contiguous; None if it has none.
            like: A tensor of a part's size and dtype.

        Returns:
            Shape (ranks, elements): memory that others overwrite once this rank has arrived at the next collective.

        Raises:
            RuntimeError: on all ranks, if their descriptions differ.
        """
        slots = self._slots[self._turn(), :, : like.numel() * like.element_size()].view(like.dtype)
        if given is not None:
            slots[self.rank].copy_(given.view(-1))
        self.meet(what)
        return slots

    def meet(self, what: tuple[Any, ...]) -> None:
        """Wait for all ranks, and compare their collectives; see `parts`."""
        turn, table, at = self._turn(), self._table, self._at
        heads, first = self._heads, turn * self.size
        heads[first + self.rank] = hash(what)  # equal in all processes that are forked from one
        with self._lock:
            come = table[at + 1] + 1
            table[at + 1] = come % self.size
            table[at + 2] += come == self.size
        if come == self.size:
            for _ in range(self.size - 1):
                self._turnstiles[turn].release()
        else:
            self._turnstiles[turn].acquire()
        for rank in range(self.size):
            if heads[first + rank] != heads[first]:
                raise RuntimeError(
                    f"collectives do not match: rank {rank} of the group differs from 0; here {what}"
                )

    def _turn(self) -> int:
        return self._table[self._at + 2] & 1  # changes only when this rank has arrived, too


def install() -> Exchange:
    """Let collectives of this process, and of those forked from it, use shared memory, from `Exchange.begin` on."""
    exchange = Exchange()
    for name, collective in _COLLECTIVES.items():
        stock = getattr(dist.ProcessGroup, name, None)
        if stock is not None:
            setattr(dist.ProcessGroup, name, _instead(exchange, stock, collective))
    exchange.library = torch.library.Library("_c10d_functional", "IMPL")  # in effect as long as it exists
    for name, functional in _FUNCTIONAL.items():
        exchange.library.impl(name, functional, "CPU")
    return exchange


def _instead(
    exchange: Exchange, stock: Callable[..., Any], collective: Callable[..., _Results | None]
) -> Callable[..., Any]:
    @functools.wraps(stock)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        group = exchange.group(self)
        if group is not None:
            with torch.no_grad():
                results = collective(group, *args, **kwargs)
                if results is not None:
                    return _Undelivered(results)
        return stock(self, *args, **kwargs)

    return call


class _Undelivered(dist.Work):
    """A completed collective whose results are copied to their destination by ``wait``."""

    def __init__(self, results: _Results) -> None:
        super().__init__()
        self._results = results
        for output, _ in results:
            # To `data`, here and below, because autograd does not count gloo's writes as changes either.
            output.data.fill_(math.nan if output.dtype.is_floating_point else _NONSENSE)

    def wait(self, timeout: Any = None) -> bool:
        """Copy the results to their destinations, once."""
        results, self._results = self._results, []
        for output, value in results:
            output.data.view(-1).copy_(value)
        return True

    def is_completed(self) -> bool:
        """Return true, because the data can be read already."""
        return self.wait()

    def is_success(self) -> bool:
        """Return true, because the data can be read already."""
        return self.wait()

    def get_future(self) -> torch.futures.Future[Any]:
        """Return a future that has its value."""
        self.wait()
        future: torch.futures.Future[Any] = torch.futures.Future()
        future.set_result([])
        return future


# ------------------------------------------------------------------------------------- a process group's collectives
# None, on all ranks: gloo runs it.


def _all_reduce(group: Group, tensors: Sequence[torch.Tensor], options: Any = None) -> _Results | None:
    kind = _kind(options)
    if not isinstance(tensors, list) or len(tensors) != 1 or not _reduces(kind, tensors[0]):
        return None
    (tensor,) = tensors
    parts = group.parts(("all_reduce", kind.name, *_described(tensor)), tensor, tensor)
    return [(tensor, _reduced(kind, parts))]


def _all_gather_single(
    group: Group, output: torch.Tensor, source: torch.Tensor, options: Any = None
) -> _Results | None:
    if not (_fits(source) and _takes(output, source, source.numel() * group.size)):
        return None
    parts = group.parts(("all_gather", *_described(source)), source, source)
    return [(output, _copy(parts))]


def _all_gather(
    group: Group, outputs: list[list[torch.Tensor]], sources: list[torch.Tensor], options: Any = None
) -> _Results | None:
    if len(sources) != 1 or not _fits(sources[0]) or len(outputs[0]) != group.size:
        return None
    (source,), (received,) = sources, outputs
    if not all(_takes(item, source, source.numel()) for item in received):
        return None
    parts = group.parts(("all_gather", *_described(source)), source, source)
    return [(item, part.clone()) for item, part in zip(received, parts, strict=True)]


def _reduce_scatter_single(
    group: Group, output: torch.Tensor, source: torch.Tensor, options: Any = None
) -> _Results | None:
    kind, mine = _kind(options), output.numel()
    if not _reduces(kind, source) or source.numel() != mine * group.size or not _takes(output, source, mine):
        return None
    parts = group.parts(("reduce_scatter", kind.name, *_described(source)), source, source)
    return [(output, _reduced(kind, parts[:, group.rank * mine : (group.rank + 1) * mine]))]


def _all_to_all_single(
    group: Group,
    output: torch.Tensor,
    source: torch.Tensor,
    output_sizes: list[int],
    source_sizes: list[int],
    options: Any = None,
) -> _Results | None:
    if not (_plain(source) and _plain(output)) or output.dtype != source.dtype:
        return None
    if output_sizes or source_sizes:
        return _uneven_all_to_all(group, output, source, output_sizes, source_sizes)
    if not _fits(source) or source.numel() % group.size or output.numel() != source.numel():
        return None
    parts = group.parts(("all_to_all", *_described(source)), source, source)
    return [(output, _copy(parts.view(group.size, group.size, -1)[:, group.rank]))]


def _uneven_all_to_all(
    group: Group, output: torch.Tensor, source: torch.Tensor, output_sizes: list[int], source_sizes: list[int]
) -> _Results | None:
    """Exchange sizes first, so that all ranks know whether the buffers match, and the sources and destinations."""
    ranks, row = range(group.size), math.prod(source.shape[1:])
    wanted = output_sizes or [len(output) // group.size] * group.size
    given = source_sizes or [len(source) // group.size] * group.size
    told = torch.tensor([given, wanted])
    sizes = group.parts(("sizes of all_to_all", row, str(source.dtype)), told, told).view(group.size, 2, -1)
    sizes = sizes.tolist()
    if any(sizes[giver][0][taker] != sizes[taker][1][giver] for giver in ranks for taker in ranks):
        raise RuntimeError(f"all_to_all: what ranks give and expect differs; here {given} and {wanted}")
    most = row * max(sum(gives) for gives, _ in sizes)
    if not 0 < most * source.element_size() <= SLOT:
        return None
    sent = source.new_zeros(most)
    sent[: source.numel()] = source.data.view(-1)
    parts = group.parts(("all_to_all", most, str(source.dtype)), sent, sent)
    mine = [
        part.split([row * size for size in gives] + [most - row * sum(gives)])[group.rank]
        for part, (gives, _) in zip(parts, sizes, strict=True)
    ]
    return [(output, torch.cat(mine))]


def _broadcast(group: Group, tensors: list[torch.Tensor], options: Any) -> _Results | None:
    if len(tensors) != 1 or not _fits(tensors[0]):
        return None
    (tensor,), root = tensors, options.rootRank
    parts = group.parts(
        ("broadcast", root, *_described(tensor)), tensor if group.rank == root else None, tensor
    )
    return [] if group.rank == root else [(tensor, _copy(parts[root]))]


def _barrier(group: Group, opts: Any = None) -> _Results | None:
    group.meet(("barrier",))
    return []


#: By the names of ProcessGroup's methods; some have a different name before torch 2.13.
_COLLECTIVES: dict[str, Callable[..., _Results | None]] = {
    "allreduce": _all_reduce,
    "all_gather_single": _all_gather_single,
    "_allgather_base": _all_gather_single,
    "allgather": _all_gather,
    "reduce_scatter_single": _reduce_scatter_single,
    "_reduce_scatter_base": _reduce_scatter_single,
    "all_to_all_single": _all_to_all_single,
    "alltoall_base": _all_to_all_single,
    "broadcast": _broadcast,
    "barrier": _barrier,
}


def _is_gloo(stock: Any) -> bool:
    try:
        return type(stock._get_backend(torch.device("cpu"))).__name__ == "ProcessGroupGloo"
    except RuntimeError:  # there is none for the CPU
        return False


def _kind(options: Any) -> Any:
    return dist.ReduceOp.RedOpType.SUM if options is None else getattr(options.reduceOp, "op", None)


def _plain(tensor: torch.Tensor) -> bool:
    return (
        type(tensor) in (torch.Tensor, torch.nn.Parameter)
        and tensor.device.type == "cpu"
        and tensor.layout is torch.strided
        and tensor.is_contiguous()
    )


def _fits(tensor: torch.Tensor) -> bool:
    return _plain(tensor) and 0 < tensor.numel() * tensor.element_size() <= SLOT


def _takes(output: torch.Tensor, source: torch.Tensor, elements: int) -> bool:
    return _plain(output) and output.dtype == source.dtype and output.numel() == elements


def _reduces(kind: Any, tensor: torch.Tensor) -> bool:
    if kind not in _OPERATORS or not _fits(tensor):
        return False
    return tensor.dtype in _FLOATS or (kind != _AVERAGE and tensor.dtype in _INTEGERS)


def _copy(parts: torch.Tensor) -> torch.Tensor:
    """Copy elements in a row, out of memory that the next collectives write to."""
    return parts.clone(memory_format=torch.contiguous_format).view(-1)


def _described(tensor: torch.Tensor) -> tuple[str, int]:
    return str(tensor.dtype), tensor.numel()


def _reduced(kind: Any, parts: torch.Tensor) -> torch.Tensor:
    """Reduce rank after rank, rounded to the dtype after each, as on a ring; divide at the end, as gloo does."""
    total = parts[0].clone()
    for part in parts[1:]:
        _OPERATORS[kind](total, part, out=total)
    return total.div_(len(parts)) if kind == _AVERAGE else total


# ------------------------------------------------------- DTensor's collectives, which torch would otherwise call in C++


def _functional_all_reduce(source: torch.Tensor, operation: str, group: Any) -> torch.Tensor:
    output = source.clone(memory_format=torch.contiguous_format)
    options = dist.AllreduceOptions()
    options.reduceOp = getattr(dist.ReduceOp, operation.upper())
    _resolved(group).allreduce([output], options).wait()
    return output


def _functional_all_gather(source: torch.Tensor, size: int, group: Any) -> torch.Tensor:
    output = source.new_empty((source.shape[0] * size, *source.shape[1:]))
    group = _resolved(group)
    gather = getattr(group, "all_gather_single", None) or group._allgather_base
    gather(output, source.contiguous()).wait()
    return output


def _functional_reduce_scatter(source: torch.Tensor, operation: str, size: int, group: Any) -> torch.Tensor:
    output = source.new_empty((source.shape[0] // size, *source.shape[1:]))
    options = dist.ReduceScatterOptions()
    options.reduceOp = getattr(dist.ReduceOp, operation.upper())
    group = _resolved(group)
    scatter = getattr(group, "reduce_scatter_single", None) or group._reduce_scatter_base
    scatter(output, source.contiguous(), options).wait()
    return output


_FUNCTIONAL: dict[str, Callable[..., torch.Tensor]] = {
    "all_reduce": _functional_all_reduce,
    "all_gather_into_tensor": _functional_all_gather,
    "reduce_scatter_tensor": _functional_reduce_scatter,
}


def _resolved(group: Any) -> Any:
    if isinstance(group, str):
        return distributed_c10d._resolve_process_group(group)
    return group if isinstance(group, dist.ProcessGroup) else dist.ProcessGroup.unbox(group)
