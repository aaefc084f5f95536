"""Reduce-scatter of FSDP2's units in a communication dtype ([Note: buffers of a reduction]).

Units without such a dtype use FSDP2's own reduce-scatter, except for ``zero_copy_gradients``. The module
:mod:`te_fsdp.features.transports` decides this for each unit, and how its weights are all-gathered.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import Partial, Replicate

from te_fsdp.collectives.redistribute import GradComm, redistribute, reduce_scatter
from te_fsdp.upstream import (
    fsdp2_state as _fsdp2,
    fsdp2_units,
    symmetric_memory as _symmetric_memory,
    torch_dtensor as _torch,
)
from te_fsdp.upstream.fsdp2_hooks import profiler_range


def set_unit_grad_comm(unit: nn.Module, comm: GradComm, name: str = "") -> None:
    """Make FSDP2 reduce the gradients of a unit according to ``comm``, also after changes of it. Local operation."""
    if fsdp2_units.fsdp_parameter_groups(unit):
        unit.set_custom_reduce_scatter(UnitReduceScatter(unit, comm, name))  # type: ignore[operator]


class OuterGroup(dist.ProcessGroup):
    """A process group with the ranks of ``stock`` and an all-reduce with fp32 sums of other communication dtypes.

    The all-gather of the sums rounds them to the communication dtype once more.
    """

    def __init__(self, stock: dist.ProcessGroup, comm: GradComm) -> None:
        super().__init__(stock.rank(), stock.size())  # type: ignore[missing-argument,bad-argument-type]
        self.stock, self.comm = stock, comm

    def allreduce(self, tensors: list[torch.Tensor], opts: Any = None) -> None:  # type: ignore[bad-override]
        """Run ``dist.all_reduce(tensor, op, group=self)``; it is complete or queued on the current stream on return.

        Collective over the group: an all-to-all and an all-gather, or one all-reduce if the tensor has the
        communication dtype.
        """
        (buffer,) = tensors
        # Keep this order: the options' ReduceOp equals one of its constants, but the constants do not equal it.
        average = opts.reduceOp == dist.ReduceOp.AVG
        assert average or opts.reduceOp == dist.ReduceOp.SUM  # FSDP2's operations over dp_replicate
        comm = replace(self.comm, observer=None)  # it was checked before the reduction over dp_shard
        source = Partial("avg" if average else "sum")
        result = redistribute(buffer, source, Replicate(), self.stock, comm).wait()
        if result is not buffer:
            buffer.copy_(result)


def input_dtype(comm: GradComm, dtype: torch.dtype, device: str) -> torch.dtype:
    """Return the input dtype of a reduction over several ranks that FSDP2 runs in ``dtype``."""
    sent_dtype = comm.sent_dtype(dtype)
    return sent_dtype if _fsdp2.can_copy_gradients_into(sent_dtype, device) else dtype


# [Note: buffers of a reduction] FSDP2 calls ``allocate`` for the input, copies gradients to it (the copy also
# casts), calls ``allocate`` for the output, reduces, all-reduces the output over ``dp_replicate``, and casts
# it to the sharded gradient's dtype. The buffers determine the dtypes:
#
#     input     the communication dtype, if there is one and FSDP2 can copy to it, so that no further cast is needed
#     output    main_grads_dtype; the communication dtype if FSDP2 then all-reduces the output over dp_replicate. For
#               fp32 sums FSDP2 gets a process group with te_fsdp's own all-reduce
class UnitReduceScatter(_torch.ReduceScatter):
    """The reduce-scatter of one unit (``FSDPModule.set_custom_reduce_scatter``)."""

    def __init__(self, unit: nn.Module, comm: GradComm, name: str) -> None:
        self.comm, self.name = comm, name
        self._unit = weakref.ref(unit)
        # Backward id and size of an input whose output is not allocated yet; also the input if ``observer`` is set.
        self._input: tuple[int, int] | None = None
        self._buffer: torch.Tensor | None = None

    def allocate(
        self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """Return a new buffer: first the input of a reduction, then its output. Local operation.

        ``size`` has one number of elements. ``dtype`` is that of FSDP2's reduction (main_grads_dtype).
        """
        unit = self._unit()
        assert unit is not None  # its backward is running
        shards, replicas, outer = fsdp2_units.reduction_of(unit)
        numel, backward, buffer = int(size[0]), _torch.backward_id(), None
        # The id of the backward, because after an error an input may have had no output.
        if self._input == (backward, numel * shards):
            self._input = None
            filled, self._buffer = self._buffer, None
            if filled is not None:  # FSDP2 has filled it
                for part in filled.sent if isinstance(filled, _symmetric_memory.ZeroCopyInput) else [filled]:
                    self.observe(part)
            sent = self.comm.sent_dtype(dtype) if outer and replicas > 1 and not self.comm.fp32_sum else dtype
        else:
            self._input = (backward, numel)
            sent = input_dtype(self.comm, dtype, device.type) if shards > 1 else dtype
            (group,) = fsdp2_units.fsdp_parameter_groups(unit)
            one_by_one = self.comm.fp32_sum and sent != torch.float32  # all-to-alls, which are not coalesced
            buffer = _symmetric_memory.zero_copy_input_of(group, numel, sent, packs_small=one_by_one)
        if buffer is None:
            buffer = torch.empty(*size, dtype=sent, device=device)
        if self._input is not None and self.comm.observer is not None:
            self._buffer = buffer
        return buffer

    def observe(self, gradient: torch.Tensor) -> None:
        """Pass a gradient to ``observer`` that is not reduced because one rank has all of it. Local operation."""
        if self.comm.observer is not None:
            self.comm.observer(self.name, gradient)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        """Run the reduce-scatter.

        Collective over ``group``; it is complete or queued on the current stream on return. It is a profiler range
        with the name of the unit.
        """
        assert not async_op  # FSDP2 runs it on its own stream
        source = (
            input_tensor.sent if isinstance(input_tensor, _symmetric_memory.ZeroCopyInput) else input_tensor
        )
        with profiler_range(f"te_fsdp::reduce_scatter ({self.name})"):
            reduce_scatter(output_tensor, source, group, self.comm, op=op)
