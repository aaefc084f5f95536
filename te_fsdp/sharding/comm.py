"""How gradients travel: in which dtype they cross the wire, and in which they are added up.

    main gradients   fp32 buffer (main_grads_dtype), where microbatches accumulate
    wire             the same buffer rounded to grad_comm_dtype, right before a collective
    reduction        by the transport in the wire's dtype; or here in fp32, of what an all-to-all brought

Everything that reduces gradients does it through this module, so that one :class:`GradComm` per model decides for
FSDP2's reduce-scatters (:mod:`te_fsdp.sharding.comm_units`), for parameters that are not sharded and for the outer
axis of hybrid sharding alike.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from te_fsdp.errors import OrderError, PrecisionError

if TYPE_CHECKING:
    from torch import nn

__all__ = [
    "COMM_DTYPES",
    "GradComm",
    "comm_of",
    "grad_comm",
    "reduce_scatter_gradients",
    "set_comm",
    "start_all_reduce",
    "start_reduce_scatter",
]

#: Dtypes that gradients may travel in; every transport adds these.
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
    """Let gradients travel in another dtype for a while, for example in bf16 for all but the last steps.

    Holds for every reduction that runs inside: of a backward, of parameters that are not sharded, of the outer axis
    at an optimizer step. Contexts nest; leaving one, also by an exception, restores what held before. What gradients
    accumulate in does not change. Local operation; all ranks must use the same dtype, as the wire connects them.

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


@torch.no_grad()
def start_all_reduce(
    buffer: torch.Tensor, group: dist.ProcessGroup, comm: GradComm | None, *, average: bool = True
) -> Callable[[], torch.Tensor]:
    """Begin to add a buffer of gradients up over a group, by way of the wire's dtype. Nothing waits for it yet.

    Collective over ``group``: one all-reduce; with fp32 sums of another wire dtype an all-to-all, and an all-gather
    when the result is asked for.

    Args:
        buffer: Contiguous, the same shape on all ranks. It is given away: its memory may become the result's.
        group: Who adds.
        comm: The model's; ``None``: the buffer's own dtype.
        average: Divide by the number of ranks.

    Returns:
        Lets the current stream (without streams: the caller) wait, and returns the sums, as ``buffer`` was.
    """
    ranks = group.size()
    if comm is not None and comm.look is not None:
        comm.look(None, buffer)
    if ranks == 1 or buffer.numel() == 0:
        return functools.partial(_waited_for, None, buffer, buffer.dtype, 1)
    wire = buffer.dtype if comm is None else comm.wire(buffer.dtype)
    op = dist.ReduceOp.AVG if average else dist.ReduceOp.SUM
    if comm is not None and comm.fp32_sum and wire != torch.float32:
        padded = -(-buffer.numel() // ranks)
        sent = buffer.new_zeros(padded * ranks, dtype=wire)
        sent[: buffer.numel()].copy_(buffer.view(-1))
        received = torch.empty_like(sent)
        work = dist.all_to_all_single(received, sent, group=group, async_op=True)
        return functools.partial(_gathered_sums, work, received, sent, buffer.shape, buffer.dtype, group, op)
    before, after = _half_factors(wire, ranks, op)
    travelling = buffer.to(wire) if before == 1 else torch.div(buffer, before).to(wire)
    op = op if before == 1 else dist.ReduceOp.SUM
    work = dist.all_reduce(travelling, op=op, group=group, async_op=True)
    return functools.partial(_waited_for, work, travelling, buffer.dtype, after)


@torch.no_grad()
def _waited_for(work: Any, travelling: torch.Tensor, dtype: torch.dtype, after: float) -> torch.Tensor:
    """What an all-reduce has summed, in the buffer's dtype."""
    if work is not None:
        work.wait()
    result = travelling.to(dtype)
    return result if after == 1 else result.div_(after)


@torch.no_grad()
def _gathered_sums(
    work: Any,
    received: torch.Tensor,
    sent: torch.Tensor,
    shape: torch.Size,
    dtype: torch.dtype,
    group: dist.ProcessGroup,
    op: Any,
) -> torch.Tensor:
    """The sums in fp32 of what an all-to-all has brought, of all ranks. Collective over ``group``: one all-gather."""
    work.wait()
    all_gather_single(sent, _add_in_fp32(received, group, op).to(sent.dtype), group=group)
    return sent[: shape.numel()].to(dtype).view(shape)


@torch.no_grad()
def reduce_scatter_gradients(
    output: torch.Tensor,
    source: torch.Tensor,
    group: dist.ProcessGroup,
    comm: GradComm | None,
    *,
    op: Any = dist.ReduceOp.AVG,
) -> None:
    """Add up over a group by way of the wire's dtype; each rank keeps its part.

    Collective over ``group``: one reduce-scatter, or one all-to-all for fp32 sums of another wire dtype.

    Args:
        output: 1-D, this rank's part, in any floating-point dtype.
        source: 1-D, ``group.size()`` parts one after the other; already in the wire's dtype, or in any other.
        group: Who adds.
        comm: The model's; ``None``: the source's own dtype.
        op: ``AVG``, ``SUM``, or NCCL's premultiplied sum (not with fp32 sums).
    """
    start_reduce_scatter(output, source, group, comm, op=op)()


@torch.no_grad()
def start_reduce_scatter(
    output: torch.Tensor,
    source: torch.Tensor,
    group: dist.ProcessGroup,
    comm: GradComm | None,
    *,
    op: Any = dist.ReduceOp.AVG,
    async_op: bool = False,
) -> Callable[[], None]:
    """Begin :func:`reduce_scatter_gradients`. Collective over ``group``, as that.

    Args:
        output: As there; it is not complete before the returned function was called.
        source: As there; it must not change until then.
        group: As there.
        comm: As there.
        op: As there.
        async_op: Do not let the current stream (without streams: the caller) wait before then.

    Returns:
        Completes ``output``, on the stream that is current then.
    """
    wire = source.dtype if comm is None else comm.wire(source.dtype)
    if comm is not None and comm.fp32_sum and wire != torch.float32:
        sent = source.to(wire)
        received = torch.empty_like(sent)
        work = dist.all_to_all_single(received, sent, group=group, async_op=async_op)
        return functools.partial(_take_sums, work, output, received, sent, group, op)
    before, after = _half_factors(wire, group.size(), op)
    if before != 1:
        source, op = torch.div(source, before), dist.ReduceOp.SUM
    travelling = source.to(wire)
    received = output if output.dtype == wire else torch.empty_like(output, dtype=wire)
    work = reduce_scatter_single(received, travelling, op=op, group=group, async_op=async_op)
    return functools.partial(_take_part, work, output, received, travelling, after)


@torch.no_grad()
def _take_part(
    work: Any, output: torch.Tensor, received: torch.Tensor, sent: torch.Tensor, after: float
) -> None:
    """What a reduce-scatter has summed, in the output's dtype. ``sent`` is kept until then."""
    if work is not None:
        work.wait()
    if received is not output:
        output.copy_(received)
    if after != 1:
        output.div_(after)


@torch.no_grad()
def _take_sums(
    work: Any,
    output: torch.Tensor,
    received: torch.Tensor,
    sent: torch.Tensor,
    group: dist.ProcessGroup,
    op: Any,
) -> None:
    """The sum in fp32, in the order of the ranks, of what an all-to-all has brought. ``sent`` is kept until then."""
    if work is not None:
        work.wait()
    output.copy_(_add_in_fp32(received, group, op))


def _add_in_fp32(received: torch.Tensor, group: dist.ProcessGroup, op: Any) -> torch.Tensor:
    """The sum, in fp32, of what each rank has sent of this rank's part."""
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
