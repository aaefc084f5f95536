"""One collective, begun: all that te_fsdp sends of parameters and gradients goes through :func:`start`.

What the ranks of a group hold, and what they shall hold, say which collective that is, in DTensor's words:

    source     target     collective      what for
    Partial    Replicate  all-reduce      gradients of parameters that are not sharded, over data parallel
    Partial    Shard      reduce-scatter  HFSDP: gradients, over dp_replicate; FSDP2's units, over dp_shard
    Shard      Replicate  all-gather      HFSDP: new weights, over dp_replicate
    Replicate  Shard      none            each rank takes its rows (``OptimizerShard.of``)

Those that add in fp32 what is sent in another dtype use an all-to-all. :func:`broadcast` makes replicas equal. Another
transport (copies into fixed slots, say) takes the place of a row.

One :class:`GradComm` per model says in which dtype its gradients cross the wire, rounded right before a collective, and
in which they are added up: FSDP2's (:mod:`te_fsdp.sharding.comm_units`), those that are not sharded, the outer axis.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import Partial, Replicate, Shard

from te_fsdp.errors import OrderError, PrecisionError
from te_fsdp.move.pending import Pending, current_stream

if TYPE_CHECKING:
    from torch import nn
    from torch.distributed.tensor.placement_types import Placement


@dataclass(frozen=True)
class Buffer:
    """Where tensors lie in one piece of memory, one after the other.

    Attributes:
        sizes: Elements of each.
        align: Each begins at a multiple of so many elements, so that kernels may read several at once.
        more: Elements behind the last one, for flags.
    """

    sizes: tuple[int, ...]
    align: int = 1
    more: int = 0

    @functools.cached_property
    def rooms(self) -> tuple[int, ...]:
        """Elements that each takes."""
        return tuple([-(-size // self.align) * self.align for size in self.sizes])

    @functools.cached_property
    def numel(self) -> int:
        """Elements of the whole."""
        return sum(self.rooms) + self.more

    def pieces(self, memory: torch.Tensor) -> list[torch.Tensor]:
        """Views of each tensor's elements, in the last dim of ``memory``. Local operation."""
        starts = itertools.accumulate(self.rooms, initial=0)
        return [memory[..., at : at + size] for at, size in zip(starts, self.sizes, strict=False)]

    def pack(
        self,
        tensors: Sequence[torch.Tensor | None],
        dtype: torch.dtype,
        device: torch.device,
        more: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The tensors in new memory, 1-D, by one kernel; those of another dtype are cast. Local operation.

        Args:
            tensors: Of at most so many elements as :attr:`sizes` says; what is missing is filled with zeros, ``None``
                wholly.
            dtype: Of the memory.
            device: Where.
            more: What lies behind them, of :attr:`more` elements.
        """
        held = [0 if tensor is None else tensor.numel() for tensor in tensors]
        gaps = [room - numel for room, numel in zip(self.rooms, held, strict=True)]
        # One for all: they are views of it.
        zeros = torch.zeros(max(gaps, default=0), dtype=dtype, device=device)
        found = [zeros[:0]]
        for tensor, gap in zip(tensors, gaps, strict=True):
            if tensor is not None:
                found.append(tensor.reshape(-1).to(dtype))
            if gap:
                found.append(zeros[:gap])
        if more is not None:
            found.append(more)
        return torch.cat(found)


@dataclass(frozen=True)
class Rows:
    """How a tensor is cut over ranks along one dim: as ``torch.chunk`` cuts, the last ranks have fewer rows or none.

    Attributes:
        shape: Of the whole tensor.
        dim: The dim that is cut.
        ranks: Over how many.
    """

    shape: torch.Size
    dim: int
    ranks: int

    @functools.cached_property
    def step(self) -> int:
        """Rows of each rank, but for the last ones."""
        return -(-self.shape[self.dim] // self.ranks)

    @functools.cached_property
    def numel(self) -> int:
        """Elements that each rank sends or receives: its rows, padded to :attr:`step`."""
        rows = self.shape[self.dim]
        return self.step * (math.prod(self.shape) // rows) if rows else 0

    @functools.cached_property
    def is_even(self) -> bool:
        """Whether all ranks have the same number of rows."""
        return self.shape[self.dim] == self.step * self.ranks

    def pairs(self, whole: torch.Tensor, flat: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Views of the same rows in a whole tensor and in ``flat``, of shape (ranks, :attr:`numel`). Local operation.

        One pair where all ranks have equally many rows, else one for each rank that has some, without what pads them.
        """
        if self.is_even:
            rows = whole.unflatten(self.dim, (self.ranks, self.step)).movedim(self.dim, 0)
            return [(rows, flat.view(rows.shape))]
        cut = enumerate(whole.split(self.step, self.dim))
        return [(rows, flat[rank, : rows.numel()].view(rows.shape)) for rank, rows in cut]


#: Dtypes that gradients may be sent in; every transport adds these.
COMM_DTYPES = (torch.float32, torch.bfloat16, torch.float16)

#: Key in the ``__dict__`` of a sharded model.
_KEY = "_te_fsdp_grad_comm"


@dataclass
class GradComm:
    """What one model's gradient reductions look up each time they run.

    Attributes:
        dtype: On the wire; ``None``: the dtype of the buffer that is reduced (main_grads_dtype).
        fp32_sum: Add in fp32 what crossed the wire in another dtype, instead of in the wire's dtype.
        look: Is shown each buffer right before its reduction, with the name of its unit (``None``: of no unit).
    """

    dtype: torch.dtype | None = None
    fp32_sum: bool = False
    look: Callable[[str | None, torch.Tensor], None] | None = None

    def wire(self, dtype: torch.dtype) -> torch.dtype:
        """Wire dtype of a buffer of ``dtype``. Local operation."""
        return dtype if self.dtype is None else self.dtype


def set_comm(model: nn.Module, comm: GradComm) -> None:
    """Make ``comm`` what :func:`grad_comm` changes for ``model``. Local operation."""
    model.__dict__[_KEY] = comm


def comm_of(model: nn.Module) -> GradComm | None:
    """The model's :class:`GradComm`; ``None`` where it was sharded without a precision policy. Local operation."""
    return model.__dict__.get(_KEY)


@contextlib.contextmanager
def grad_comm(model: nn.Module, dtype: torch.dtype | None) -> Iterator[None]:
    """Let gradients be sent in another dtype for a while, for example in bf16 for all but the last steps.

    Holds for every reduction that runs inside, of the outer axis at an optimizer step too. Contexts nest; leaving one,
    also by an exception, restores what held before. What gradients accumulate in does not change. Local operation; all
    ranks must use the same dtype, as the wire connects them.

    Args:
        model: The model that :func:`te_fsdp.fully_shard` was called on, with a precision policy.
        dtype: ``torch.float32``, ``torch.bfloat16`` or ``torch.float16``; ``None``: main_grads_dtype.

    Raises:
        OrderError: The model has no precision policy.
        PrecisionError: Another dtype.
    """
    comm = comm_of(model)
    if comm is None:
        raise OrderError(
            f"grad_comm({type(model).__name__})",
            expected="the model that te_fsdp.fully_shard was called on, with a precision policy",
            got="a module without one",
            fix="te_fsdp.fully_shard(model, meshes, precision=te_fsdp.MixedPrecisionPolicy(...))",
        )
    if dtype is not None and dtype not in COMM_DTYPES:
        raise PrecisionError(
            "grad_comm: wrong dtype",
            expected=f"None or one of {', '.join(map(str, COMM_DTYPES))}",
            got=dtype,
            fix="gradients travel in floating-point dtypes that every transport can add",
        )
    before, comm.dtype = comm.dtype, dtype
    try:
        yield
    finally:
        comm.dtype = before


#: Elements of a tensor that is worth a collective of its own: packing it would cost more than it saves.
LARGE = 1 << 20


@torch.no_grad()
def start(
    buffer: torch.Tensor,
    source: Placement,
    target: Placement,
    group: dist.ProcessGroup,
    comm: GradComm | None = None,
    *,
    into: torch.Tensor | None = None,
    async_op: bool = True,
) -> Pending[torch.Tensor]:
    """Begin to move a tensor. Collective over ``group``: see the table above, with fp32 sums :class:`GradComm`.

    Args:
        buffer: Contiguous, of the same number of elements on all ranks; it must not change before the end. That of an
            all-reduce is given away: its memory may become the result's.
        source: What the ranks hold: ``Partial("sum")`` or ``Partial("avg")``, or ``Shard``.
        target: What they shall hold: ``Replicate``, or ``Shard``: each its part.
        group: The ranks.
        comm: The model's; ``None``: gradients are sent in the buffer's dtype.
        into: 1-D, where the result goes; not for an all-reduce. Gradients may be of another dtype than ``buffer``.
        async_op: Whether nothing waits before :meth:`Pending.wait`; otherwise the current stream does right away.

    Returns:
        The result: ``into``, or as ``buffer``.
    """
    if isinstance(source, Partial):
        op = dist.ReduceOp.AVG if source.reduce_op == "avg" else dist.ReduceOp.SUM
        if isinstance(target, Replicate):
            return _all_reduce(buffer, group, comm, op)
        assert into is not None
        return reduce_scatter(into, buffer, group, comm, op=op, async_op=async_op)
    assert isinstance(source, Shard) and isinstance(target, Replicate) and into is not None
    gather = _first_of(dist, "all_gather_single", "all_gather_into_tensor")
    work = gather(into, buffer, group=group, async_op=async_op)
    # The buffer is kept by the function until the transport has read it.
    return Pending(lambda sent=buffer: into, work, current_stream(buffer.device))


def _all_reduce(
    buffer: torch.Tensor, group: dist.ProcessGroup, comm: GradComm | None, op: Any
) -> Pending[torch.Tensor]:
    ranks, stream = group.size(), current_stream(buffer.device)
    if comm is not None and comm.look is not None:
        comm.look(None, buffer)
    if ranks == 1 or buffer.numel() == 0:
        return Pending(lambda: buffer, None, stream)
    dtype, shape = buffer.dtype, buffer.shape
    wire = dtype if comm is None else comm.wire(dtype)
    if comm is not None and comm.fp32_sum and wire != torch.float32:
        padded = -(-buffer.numel() // ranks)
        sent = buffer.new_zeros(padded * ranks, dtype=wire)
        sent[: buffer.numel()].copy_(buffer.view(-1))
        received = torch.empty_like(sent)
        work = dist.all_to_all_single(received, sent, group=group, async_op=True)

        def gather_sums() -> torch.Tensor:
            gather = _first_of(dist, "all_gather_single", "all_gather_into_tensor")
            gather(sent, _add_in_fp32(received, group, op).to(wire), group=group)
            return sent[: shape.numel()].to(dtype).view(shape)

        return Pending(gather_sums, work, stream)
    (buffer,), op, after = _halved([buffer], wire, ranks, op)
    sent = buffer.to(wire)
    work = dist.all_reduce(sent, op=op, group=group, async_op=True)

    def cast() -> torch.Tensor:
        result = sent.to(dtype)
        return result if after == 1 else result.div_(after)

    return Pending(cast, work, stream)


@torch.no_grad()
def reduce_scatter(
    output: torch.Tensor,
    source: torch.Tensor | Sequence[torch.Tensor],
    group: dist.ProcessGroup,
    comm: GradComm | None,
    *,
    op: Any = dist.ReduceOp.AVG,
    async_op: bool = False,
) -> Pending[torch.Tensor]:
    """Begin to add up over a group by way of the wire's dtype; each rank keeps its part.

    Collective over ``group``: one reduce-scatter, or one all-to-all for fp32 sums of another wire dtype; of several
    sources as many reduce-scatters at once, or as many all-to-alls.

    Args:
        output: 1-D, this rank's part, in any floating-point dtype.
        source: 1-D, ``group.size()`` parts one after the other; already in the wire's dtype, or in any other. Several,
            of one dtype, have their parts in ``output`` one after the other; not with ``async_op``.
        group: Who adds.
        comm: The model's; ``None``: the source's own dtype.
        op: ``AVG``, ``SUM``, or NCCL's premultiplied sum (not with fp32 sums).
        async_op: As for :func:`start`.
    """
    sources = [source] if isinstance(source, torch.Tensor) else list(source)
    assert len(sources) == 1 or not async_op
    wire = sources[0].dtype if comm is None else comm.wire(sources[0].dtype)
    stream = current_stream(output.device) if async_op else None
    shares = [each.numel() // group.size() for each in sources] if len(sources) > 1 else []
    if comm is not None and comm.fp32_sum and wire != torch.float32:
        if len(sources) > 1:
            for part, out in zip(sources, output.split(shares), strict=True):
                reduce_scatter(out, part, group, comm, op=op)
            return Pending(lambda: output, None, stream)
        sent = sources[0].to(wire)
        received = torch.empty_like(sent)
        work = dist.all_to_all_single(received, sent, group=group, async_op=async_op)
        # What is sent is kept until then.
        pending = Pending(lambda sent=sent: _add_in_fp32(received, group, op, output), work, stream)
    else:
        sources, op, after = _halved(sources, wire, group.size(), op)
        parts = [each.to(wire) for each in sources]
        received = output if output.dtype == wire else torch.empty_like(output, dtype=wire)
        if len(parts) > 1:
            work = _reduce_scatter_all(list(received.split(shares)), parts, op, group)
        else:
            scatter = _first_of(dist, "reduce_scatter_single", "reduce_scatter_tensor")
            work = scatter(received, parts[0], op=op, group=group, async_op=async_op)

        def cast(sent: list[torch.Tensor] = parts) -> torch.Tensor:  # kept until then
            if received is not output:
                output.copy_(received)
            return output if after == 1 else output.div_(after)

        pending = Pending(cast, work, stream)
    if async_op:
        return pending
    pending.wait()  # what is sent is freed
    return Pending(lambda: output, None, stream)


def _add_in_fp32(
    received: torch.Tensor, group: dist.ProcessGroup, op: Any, into: torch.Tensor | None = None
) -> torch.Tensor:
    """The sum, in fp32 and in the order of the ranks, of what each rank has sent of this rank's part."""
    parts, average = received.view(group.size(), -1), op == dist.ReduceOp.AVG
    if not average and op != dist.ReduceOp.SUM:
        raise PrecisionError(
            "fp32 sum of gradients",
            expected="ReduceOp.SUM or ReduceOp.AVG",
            got=op,
            why="A premultiplied sum is computed inside the transport",
            fix="call set_force_sum_reduction_for_comms(True) on units with a gradient divide factor",
        )
    direct = into if into is not None and into.dtype == torch.float32 else None
    total = (torch.mean if average else torch.sum)(parts, 0, dtype=torch.float32, out=direct)
    return total if into is None or into is direct else into.copy_(total)


def _halved(
    sources: list[torch.Tensor], wire: torch.dtype, ranks: int, op: Any
) -> tuple[list[torch.Tensor], Any, float]:
    """What to send, by which operation, and what to divide the result by: as they are, but for averages in fp16.

    These overflow early, and are divided by about the root of ranks each time.
    """
    if wire != torch.float16 or op != dist.ReduceOp.AVG:
        return sources, op, 1
    before = 1
    while before * before < ranks:
        before *= 2
    return [torch.div(each, before) for each in sources], dist.ReduceOp.SUM, ranks / before


def _reduce_scatter_all(
    outputs: list[torch.Tensor], sources: list[torch.Tensor], op: Any, group: dist.ProcessGroup
) -> Any:
    """Several as one operation, queued on the current stream: what torch's own context manager for it calls."""
    options = dist.ReduceScatterOptions()
    options.reduceOp, options.asyncOp = op, False
    named = _first_of(group, "reduce_scatter_single_coalesced", "reduce_scatter_tensor_coalesced")
    return named(outputs, sources, options)


def _first_of(owner: Any, name: str, older: str) -> Any:
    """A collective by its name, or by the one that older versions of torch have (before 2.13 for single tensors)."""
    return getattr(owner, name, None) or getattr(owner, older)


@torch.no_grad()
def gather_all(
    tensors: Sequence[tuple[torch.Tensor, torch.Tensor]], group: dist.ProcessGroup
) -> Pending[None]:
    """Begin several all-gathers as one operation, for which a transport has one launch. Collective over ``group``.

    Args:
        tensors: What this rank sends, and where that of all ranks goes, both 1-D; the first may lie in the second.
        group: The ranks.
    """
    gather = _first_of(group, "all_gather_single_coalesced", "allgather_into_tensor_coalesced")
    work = gather([whole for _, whole in tensors], [mine for mine, _ in tensors])
    return Pending(lambda: None, work, current_stream(tensors[0][0].device))


@torch.no_grad()
def broadcast(tensors: Sequence[torch.Tensor], group: dist.ProcessGroup) -> None:
    """Make tensors those of the group's first rank, in place.

    Collective over ``group``: one broadcast per dtype, and one for each contiguous tensor of more than :data:`LARGE`
    elements.

    Args:
        tensors: In the same order, and of the same shapes, on all ranks.
        group: The ranks.
    """
    small: dict[torch.dtype, list[torch.Tensor]] = {}
    for tensor in tensors:
        if tensor.numel() > LARGE and tensor.is_contiguous():
            dist.broadcast(tensor, group=group, group_src=0)
        elif tensor.numel():
            small.setdefault(tensor.dtype, []).append(tensor)
    for dtype, several in small.items():
        buffer = Buffer(tuple(tensor.numel() for tensor in several))
        packed = buffer.pack(several, dtype, several[0].device)
        dist.broadcast(packed, group=group, group_src=0)
        for tensor, values in zip(several, buffer.pieces(packed), strict=True):
            tensor.copy_(values.view(tensor.shape))
