"""One collective, begun: all that te_fsdp sends of parameters and gradients goes through :func:`start`.

What the ranks of a group hold, and what they shall hold, say which collective that is, in DTensor's words:

    source     target     collective      what for
    Partial    Replicate  all-reduce      gradients of parameters that are not sharded, over data parallel
    Partial    Shard      reduce-scatter  HFSDP: gradients, over dp_replicate; FSDP2's units, over dp_shard
    Shard      Replicate  all-gather      HFSDP: new weights, over dp_replicate
    Replicate  Shard      none            each rank takes its rows (``Chunk.of``)

and :func:`broadcast` makes replicas equal. Gradients cross the wire in the dtype that their model's
:class:`~te_fsdp.move.comm.GradComm` says. Another transport (copies into fixed slots, say) takes the place of a row.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import Partial, Replicate, Shard

from te_fsdp.errors import PrecisionError
from te_fsdp.move.buffer import Buffer
from te_fsdp.move.pending import Pending, current_stream

if TYPE_CHECKING:
    from torch.distributed.tensor.placement_types import Placement

    from te_fsdp.move.comm import GradComm

__all__ = ["LARGE", "broadcast", "reduce_scatter", "start"]

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
        target: What they shall hold: ``Replicate``, or ``Shard``: the rank's part of as many as there are ranks.
        group: The ranks.
        comm: How the model's gradients travel; ``None``: in the buffer's dtype.
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
    work = all_gather_single(into, buffer, group=group, async_op=async_op)
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
            all_gather_single(sent, _add_in_fp32(received, group, op).to(wire), group=group)
            return sent[: shape.numel()].to(dtype).view(shape)

        return Pending(gather_sums, work, stream)
    before, after = _half_factors(wire, ranks, op)
    sent = buffer.to(wire) if before == 1 else torch.div(buffer, before).to(wire)
    op = op if before == 1 else dist.ReduceOp.SUM
    work = dist.all_reduce(sent, op=op, group=group, async_op=True)

    def cast() -> torch.Tensor:
        result = sent.to(dtype)
        return result if after == 1 else result.div_(after)

    return Pending(cast, work, stream)


@torch.no_grad()
def reduce_scatter(
    output: torch.Tensor,
    source: torch.Tensor,
    group: dist.ProcessGroup,
    comm: GradComm | None,
    *,
    op: Any = dist.ReduceOp.AVG,
    async_op: bool = False,
) -> Pending[torch.Tensor]:
    """Begin to add up over a group by way of the wire's dtype; each rank keeps its part.

    Collective over ``group``: one reduce-scatter, or one all-to-all for fp32 sums of another wire dtype.

    Args:
        output: 1-D, this rank's part, in any floating-point dtype.
        source: 1-D, ``group.size()`` parts one after the other; already in the wire's dtype, or in any other.
        group: Who adds.
        comm: The model's; ``None``: the source's own dtype.
        op: ``AVG``, ``SUM``, or NCCL's premultiplied sum (not with fp32 sums).
        async_op: As for :func:`start`; ``source`` must not change, and ``output`` is not complete, before the end.
    """
    wire = source.dtype if comm is None else comm.wire(source.dtype)
    stream = current_stream(output.device) if async_op else None
    if comm is not None and comm.fp32_sum and wire != torch.float32:
        sent = source.to(wire)
        received = torch.empty_like(sent)
        work = dist.all_to_all_single(received, sent, group=group, async_op=async_op)
        pending = Pending(lambda sent=sent: output.copy_(_add_in_fp32(received, group, op)), work, stream)
    else:
        before, after = _half_factors(wire, group.size(), op)
        if before != 1:
            source, op = torch.div(source, before), dist.ReduceOp.SUM
        sent = source.to(wire)
        received = output if output.dtype == wire else torch.empty_like(output, dtype=wire)
        work = reduce_scatter_single(received, sent, op=op, group=group, async_op=async_op)

        def cast(sent: torch.Tensor = sent) -> torch.Tensor:  # kept until then
            if received is not output:
                output.copy_(received)
            return output if after == 1 else output.div_(after)

        pending = Pending(cast, work, stream)
    if async_op:
        return pending
    pending.wait()  # what is sent is freed
    return Pending(lambda: output, None, stream)


def _add_in_fp32(received: torch.Tensor, group: dist.ProcessGroup, op: Any) -> torch.Tensor:
    """The sum, in fp32 and in the order of the ranks, of what each rank has sent of this rank's part."""
    ranks = group.size()
    total = received.view(ranks, -1).sum(0, dtype=torch.float32)
    if op == dist.ReduceOp.AVG:
        return total.div_(ranks)
    if op != dist.ReduceOp.SUM:
        raise PrecisionError(
            "fp32 sum of gradients",
            expected="ReduceOp.SUM or ReduceOp.AVG",
            got=op,
            why="A premultiplied sum is computed inside the transport",
            fix="call set_force_sum_reduction_for_comms(True) on units with a gradient divide factor",
        )
    return total


def _half_factors(wire: torch.dtype, ranks: int, op: Any) -> tuple[int, float]:
    """What to divide by before and after an average in fp16, which overflows early: each about the root of ranks."""
    if wire != torch.float16 or op != dist.ReduceOp.AVG:
        return 1, 1
    before = 1
    while before * before < ranks:
        before *= 2
    return before, ranks / before


def reduce_scatter_single(output: torch.Tensor, source: torch.Tensor, **options: Any) -> Any:
    """``dist.reduce_scatter_single``, which torch before 2.13 calls ``reduce_scatter_tensor``."""
    named = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    return named(output, source, **options)


def all_gather_single(output: torch.Tensor, source: torch.Tensor, **options: Any) -> Any:
    """``dist.all_gather_single``, which torch before 2.13 calls ``all_gather_into_tensor``."""
    named = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    return named(output, source, **options)


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
