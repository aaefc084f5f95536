"""Collectives between DTensor placements, started asynchronously (:func:`redistribute`).

The current and the requested DTensor placements of a group's ranks determine the collective:

    source     target     collective      use
    Partial    Replicate  all-reduce      gradients of parameters that are not sharded, over data parallel
    Partial    Shard      reduce-scatter  HFSDP: gradients, over dp_replicate; FSDP2's units, over dp_shard
    Shard      Replicate  all-gather      HFSDP: new weights, over dp_replicate
    Replicate  Shard      none            HFSDP: each rank slices its rows (``OptimizerShard.of``)

A sum in fp32 of values sent in a lower precision uses an all-to-all. :func:`broadcast` makes replicas equal.

Each model has one :class:`GradComm`. It defines the dtype in which gradients are sent (rounded right before the
collective) and the dtype in which they are summed. It applies to FSDP2's gradients
(:mod:`te_fsdp.unit_communication`), gradients of replicated parameters, and gradients over the outer axis.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from te_fsdp.collectives.async_work import Pending, current_stream
from te_fsdp.errors import PrecisionError
from te_fsdp.upstream.torch_dtensor import copy_all_
from te_fsdp.upstream.torch_redistribution import SAME_SIZE, as_bits


@dataclass(frozen=True)
class PackedLayout:
    """Layout of tensors in one contiguous buffer."""

    sizes: tuple[int, ...]  #: Number of elements of each tensor
    #: Each tensor starts at a multiple of this number of elements, so that kernels can use vectorized reads
    align: int = 1
    trailing: int = 0  #: Extra elements after the last tensor, for flags

    @functools.cached_property
    def padded_sizes(self) -> tuple[int, ...]:
        """Return the padded size of each tensor in elements."""
        return tuple([-(-size // self.align) * self.align for size in self.sizes])

    @functools.cached_property
    def numel(self) -> int:
        """Return the size of the buffer in elements."""
        return sum(self.padded_sizes) + self.trailing

    def views(self, memory: torch.Tensor) -> list[torch.Tensor]:
        """Return views of each tensor's elements in the last dim of ``memory``. Local operation."""
        starts = itertools.accumulate(self.padded_sizes, initial=0)
        return [memory[..., start : start + size] for start, size in zip(starts, self.sizes, strict=False)]

    def pack(
        self,
        tensors: Sequence[torch.Tensor | None],
        dtype: torch.dtype,
        device: torch.device,
        trailing: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Pack tensors into a new 1-D buffer with one kernel. Tensors of a different dtype are cast. Local operation.

        Each tensor has at most the number of elements in :attr:`sizes`. The rest is filled with zeros, completely for
        ``None``. ``trailing`` has the contents of the extra elements.
        """
        gaps = list[int]()
        for padded, tensor in zip(self.padded_sizes, tensors, strict=True):
            gaps.append(padded if tensor is None else padded - tensor.numel())
        # One zero tensor for all padding: the padding tensors are views of it.
        zeros = torch.zeros(max(gaps, default=0), dtype=dtype, device=device)
        parts = [zeros[:0]]
        for tensor, gap in zip(tensors, gaps, strict=True):
            if tensor is not None:
                parts.append(tensor.reshape(-1).to(dtype))
            if gap:
                parts.append(zeros[:gap])
        if trailing is not None:
            parts.append(trailing)
        return torch.cat(parts)


@dataclass(frozen=True)
class RowPartition:
    """Sharding of a tensor along one dim as in ``torch.chunk``: the last ranks may have fewer rows or none."""

    shape: torch.Size  #: Shape of the unsharded tensor
    dim: int  #: The sharded dim
    ranks: int  #: Number of ranks

    @functools.cached_property
    def step(self) -> int:
        """Return the number of rows per rank; the last ranks may have fewer."""
        return -(-self.shape[self.dim] // self.ranks)

    @functools.cached_property
    def numel(self) -> int:
        """Return the number of elements that each rank sends or receives, padded to :attr:`step` rows."""
        rows = self.shape[self.dim]
        return self.step * (math.prod(self.shape) // rows) if rows else 0

    @functools.cached_property
    def is_even(self) -> bool:
        """Return whether all ranks have the same number of rows."""
        return self.shape[self.dim] == self.step * self.ranks

    def pairs(self, tensor: torch.Tensor, flat: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return pairs of views of the same rows in ``tensor`` and in ``flat``, of shape (ranks, :attr:`numel`).

        One pair if all ranks have the same number of rows, else one per non-empty rank, without padding. Local
        operation.
        """
        if self.is_even:
            rows = tensor.unflatten(self.dim, (self.ranks, self.step)).movedim(self.dim, 0)
            return [(rows, flat.view(rows.shape))]
        chunks = enumerate(tensor.split(self.step, self.dim))
        return [(rows, flat[rank, : rows.numel()].view(rows.shape)) for rank, rows in chunks]


#: Communication dtypes of gradients, which every transport can sum.
COMM_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass
class GradComm:
    """Communication settings of one model's gradient reductions, read at each reduction."""

    #: Dtype of communication. ``None``: the dtype of the reduced buffer (main_grads_dtype).
    dtype: torch.dtype | None = None
    fp32_sum: bool = False  #: Sum received values in fp32 instead of in the communication dtype
    #: Called with each buffer right before its reduction and the name of its unit (``None`` without a unit)
    observer: Callable[[str | None, torch.Tensor], None] | None = None

    def sent_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Return the communication dtype of a buffer of ``dtype``. Local operation."""
        return dtype if self.dtype is None else self.dtype


#: Elements of a tensor that gets its own collective: packing it would cost more than it saves.
LARGE = 1 << 20


@torch.no_grad()
def redistribute(
    buffer: torch.Tensor,
    source: Placement,
    target: Placement,
    group: dist.ProcessGroup,
    comm: GradComm | None = None,
    *,
    into: torch.Tensor | None = None,
    async_op: bool = True,
) -> Pending[torch.Tensor]:
    """Start the collective between two placements. Collective over ``group``: see the table above.

    Args:
        buffer: Contiguous, with the same number of elements on all ranks. Do not change it before the result is
            available. An all-reduce takes ownership: its memory may become the result's.
        source: Placement of the ranks' data: ``Partial("sum")``, ``Partial("avg")`` or ``Shard``.
        target: Requested placement: ``Replicate`` or ``Shard``.
        group: The ranks.
        comm: The model's settings. ``None``: gradients are sent in the buffer's dtype.
        into: 1-D output, not for an all-reduce. For gradients, its dtype may differ from the dtype of ``buffer``.
        async_op: If true, only :meth:`Pending.wait` waits. Otherwise the current stream waits right away.

    Returns:
        The result: ``into``, or a tensor like ``buffer``.
    """
    if isinstance(source, Partial):
        op = dist.ReduceOp.AVG if source.reduce_op == "avg" else dist.ReduceOp.SUM
        if isinstance(target, Replicate):
            return _all_reduce(buffer, group, comm, op)
        assert into is not None
        return reduce_scatter(into, buffer, group, comm, op=op, async_op=async_op)
    assert isinstance(source, Shard) and isinstance(target, Replicate) and into is not None
    gather = _first_available(dist, "all_gather_single", "all_gather_into_tensor")
    work = gather(into, buffer, group=group, async_op=async_op)
    # The closure keeps the buffer alive until the transport has read it.
    return Pending(lambda sent=buffer: into, work, current_stream(buffer.device))


def _all_reduce(
    buffer: torch.Tensor, group: dist.ProcessGroup, comm: GradComm | None, op: Any
) -> Pending[torch.Tensor]:
    """Start the sum or average of a buffer over all ranks, as :func:`redistribute` describes it. Collective."""
    ranks, stream = group.size(), current_stream(buffer.device)
    if comm is not None and comm.observer is not None:
        comm.observer(None, buffer)
    if ranks == 1 or buffer.numel() == 0:
        return Pending(lambda: buffer, None, stream)
    dtype, shape = buffer.dtype, buffer.shape
    sent_dtype = dtype if comm is None else comm.sent_dtype(dtype)
    if comm is not None and comm.fp32_sum and sent_dtype != torch.float32:
        # An all-to-all needs parts of one size, so the buffer is padded to a multiple of the ranks.
        padded = -(-buffer.numel() // ranks)
        sent = buffer.new_zeros(padded * ranks, dtype=sent_dtype)
        sent[: buffer.numel()].copy_(buffer.view(-1))
        received = torch.empty_like(sent)
        work = dist.all_to_all_single(received, sent, group=group, async_op=True)

        def gather_sums() -> torch.Tensor:
            # The all-to-all has read `sent`, so its memory is free for the result.
            gather = _first_available(dist, "all_gather_single", "all_gather_into_tensor")
            gather(sent, _add_in_fp32(received, group, op).to(sent_dtype), group=group)
            return sent[: shape.numel()].to(dtype).view(shape)

        return Pending(gather_sums, work, stream)
    (buffer,), op, divisor = _prescale_fp16([buffer], sent_dtype, ranks, op)
    sent = buffer.to(sent_dtype)
    work = dist.all_reduce(sent, op=op, group=group, async_op=True)

    def cast() -> torch.Tensor:
        result = sent.to(dtype)
        return result if divisor == 1 else result.div_(divisor)

    return Pending(cast, work, stream)


def reduce_scatter(
    output: torch.Tensor,
    source: torch.Tensor | Sequence[torch.Tensor],
    group: dist.ProcessGroup,
    comm: GradComm | None,
    *,
    op: Any = dist.ReduceOp.AVG,
    async_op: bool = False,
) -> Pending[torch.Tensor]:
    """Start a reduction over a group in the communication dtype. Each rank receives its shard of the sum.

    Collective over ``group``: one reduce-scatter, or one all-to-all for fp32 sums of a different communication dtype.
    With several sources, one such collective per source, grouped into one operation.

    Args:
        output: 1-D, this rank's shard, in any floating-point dtype.
        source: 1-D, ``group.size()`` concatenated shards, in the communication dtype or in any other. For several
            sources of one dtype, ``output`` contains their shards in sequence; not with ``async_op``.
        group: The ranks.
        comm: The model's settings. ``None``: the source's own dtype.
        op: ``AVG``, ``SUM``, or NCCL's premultiplied sum (not with fp32 sums).
        async_op: See :func:`redistribute`.
    """
    if torch.is_grad_enabled():  # FSDP2 calls it without gradients
        return torch.no_grad()(reduce_scatter)(output, source, group, comm, op=op, async_op=async_op)
    sources = [source] if isinstance(source, torch.Tensor) else list(source)
    assert len(sources) == 1 or not async_op
    sent_dtype = sources[0].dtype if comm is None else comm.sent_dtype(sources[0].dtype)
    stream = current_stream(output.device) if async_op else None
    shard_sizes = [part.numel() // group.size() for part in sources] if len(sources) > 1 else []
    if comm is not None and comm.fp32_sum and sent_dtype != torch.float32:
        if len(sources) > 1:
            for part, out in zip(sources, output.split(shard_sizes), strict=True):
                reduce_scatter(out, part, group, comm, op=op)
            return Pending(lambda: output, None, stream)
        sent = sources[0].to(sent_dtype)
        received = torch.empty_like(sent)
        work = dist.all_to_all_single(received, sent, group=group, async_op=async_op)
        # Keeps the sent buffers alive until then.
        pending = Pending(lambda sent=sent: _add_in_fp32(received, group, op, output), work, stream)
    else:
        sources, op, divisor = _prescale_fp16(sources, sent_dtype, group.size(), op)
        parts = [part.to(sent_dtype) for part in sources]
        received = output if output.dtype == sent_dtype else torch.empty_like(output, dtype=sent_dtype)
        if len(parts) > 1:
            work = _reduce_scatter_all(list(received.split(shard_sizes)), parts, op, group)
        else:
            scatter = _first_available(dist, "reduce_scatter_single", "reduce_scatter_tensor")
            work = scatter(received, parts[0], op=op, group=group, async_op=async_op)

        def cast(sent: list[torch.Tensor] = parts) -> torch.Tensor:  # the default argument keeps them alive
            if received is not output:
                output.copy_(received)
            return output if divisor == 1 else output.div_(divisor)

        pending = Pending(cast, work, stream)
    if async_op:
        return pending
    pending.wait()  # frees the sent buffers
    return Pending(lambda: output, None, stream)


def _add_in_fp32(
    received: torch.Tensor, group: dist.ProcessGroup, op: Any, into: torch.Tensor | None = None
) -> torch.Tensor:
    """Return the fp32 sum of the pieces that all ranks sent for this rank's shard, added in rank order."""
    parts, average = received.view(group.size(), -1), op == dist.ReduceOp.AVG
    if not average and op != dist.ReduceOp.SUM:
        raise PrecisionError(
            "fp32 sum of gradients",
            expected="ReduceOp.SUM or ReduceOp.AVG",
            got=op,
            why="The transport computes a premultiplied sum itself, in the communication dtype",
            fix="call set_force_sum_reduction_for_comms(True) on units with a gradient divide factor",
        )
    direct = into if into is not None and into.dtype == torch.float32 else None
    total = (torch.mean if average else torch.sum)(parts, 0, dtype=torch.float32, out=direct)
    return total if into is None or into is direct else into.copy_(total)


def _prescale_fp16(
    sources: list[torch.Tensor], sent_dtype: torch.dtype, ranks: int, op: Any
) -> tuple[list[torch.Tensor], Any, float]:
    """Return the buffers to send, the operation, and the divisor of the result. Only averages in fp16 are changed.

    They overflow early, so they are divided by about the square root of the number of ranks before and after.
    """
    if sent_dtype != torch.float16 or op != dist.ReduceOp.AVG:
        return sources, op, 1
    before = 1
    while before * before < ranks:
        before *= 2
    return [torch.div(part, before) for part in sources], dist.ReduceOp.SUM, ranks / before


def _reduce_scatter_all(
    outputs: list[torch.Tensor], sources: list[torch.Tensor], op: Any, group: dist.ProcessGroup
) -> Any:
    """Queue several reduce-scatters as one operation on the current stream. Collective over ``group``."""
    options = dist.ReduceScatterOptions()
    options.reduceOp, options.asyncOp = op, False
    named = _first_available(group, "reduce_scatter_single_coalesced", "reduce_scatter_tensor_coalesced")
    return named(outputs, sources, options)


def _first_available(owner: Any, name: str, older: str) -> Any:
    """Return a collective by its name, or by its name in older versions of torch (before 2.13 for single tensors)."""
    return getattr(owner, name, None) or getattr(owner, older)


@torch.no_grad()
def all_gather_many(
    tensors: Sequence[tuple[torch.Tensor, torch.Tensor]], group: dist.ProcessGroup
) -> Pending[None]:
    """Start several all-gathers as one operation with a single launch of the transport. Collective over ``group``.

    ``tensors``: pairs of this rank's shard and the output for all ranks, both 1-D. The shard may be part of the output.
    """
    gather = _first_available(group, "all_gather_single_coalesced", "allgather_into_tensor_coalesced")
    work = gather([output for _, output in tensors], [shard for shard, _ in tensors])
    return Pending(lambda: None, work, current_stream(tensors[0][0].device))


@torch.no_grad()
def broadcast(tensors: Sequence[torch.Tensor], group: dist.ProcessGroup) -> None:
    """Copy the tensors of the group's first rank to all ranks, in place.

    Collective over ``group``: one broadcast per dtype, and one for each contiguous tensor of more than :data:`LARGE`
    elements. All ranks pass tensors in the same order and with the same shapes.
    """
    small: dict[torch.dtype, list[torch.Tensor]] = {}
    # Every step broadcasts gradients, so it makes few calls.
    for tensor in [as_bits(t) if t.dtype in SAME_SIZE else t for t in tensors]:
        # Large tensors are sent alone: packing would copy them twice. Small ones are packed, because each
        # collective has a fixed cost.
        if tensor.numel() > LARGE and tensor.is_contiguous():
            dist.broadcast(tensor, group=group, group_src=0)
        elif tensor.numel():
            small.setdefault(tensor.dtype, []).append(tensor)
    for same_dtype in small.values():
        packed = torch.cat(list(map(torch.Tensor.flatten, same_dtype)))
        dist.broadcast(packed, group=group, group_src=0)
        views = packed.split(list(map(torch.Tensor.numel, same_dtype)))
        copy_all_(same_dtype, list(map(torch.Tensor.view_as, views, same_dtype)))
