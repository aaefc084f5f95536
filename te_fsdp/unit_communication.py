"""Communication of FSDP2's units: all-gather of weights, and dtype and ranks of the gradient reduction.

For a different communication dtype each unit has a custom reduce-scatter ([Note: buffers of a reduction]). Other units
need none, except for ``zero_copy_gradients``: gradients are then reduced from their own memory, without FSDP2's copy
(``te_fsdp/upstream/symmetric_memory.py``). ``"auto"`` does so in units with ``copy_engine``, if any of their large
gradients qualifies.

The weights of each unit are all-gathered by NCCL as FSDP2 does, or by the copy engines:

===============  ====================================================================================================
``nccl``         FSDP2's own all-gather (gloo on the CPU): with copies before and after the communication kernels
``copy_engine``  copies from rank to rank into the memory that kernels read (``upstream/fsdp2_copy_engine.py``)
``auto``         ``copy_engine`` if it is possible and measurably faster, ``nccl`` otherwise
===============  ====================================================================================================
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.tensor import Partial, Replicate

from te_fsdp.collectives.agreement import rank
from te_fsdp.collectives.redistribute import GradComm, redistribute, reduce_scatter
from te_fsdp.component import Component
from te_fsdp.errors import shorten
from te_fsdp.peer_memory import alias, connect_peers
from te_fsdp.upstream import (
    fsdp2_copy_engine as _fsdp2_copies,
    fsdp2_state as _fsdp2,
    fsdp2_units,
    fsdp2_unused as _fsdp2_unused,
    symmetric_memory as _torch_transport,
    te as _te,
    torch_dtensor as _torch,
)
from te_fsdp.upstream.fsdp2_hooks import profiler_range

if TYPE_CHECKING:
    from torch import nn
    from torch.distributed.fsdp import MixedPrecisionPolicy as Fsdp2Policy

    from te_fsdp.layout import Storage
    from te_fsdp.sharded_model import ShardedModel

_log = logging.getLogger("te_fsdp")


def reduce_unused(model: nn.Module) -> None:
    """Make FSDP2 reduce zeros for trained parameters of a unit that have no gradient on this rank. Local operation.

    FSDP2 reduces only existing gradients. If they differ between ranks (for example due to a branch that only one rank
    takes), the collectives would not match: they would hang, or mix gradients of different parameters. A parameter
    that no rank used keeps ``None``, as in one process.

    Each unit must still run on all ranks or on none, because its all-gather is a collective, too.
    """
    for unit in model.modules():
        if not fsdp2_units.is_fsdp_module(unit):
            continue
        for group in fsdp2_units.fsdp_parameter_groups(unit):
            if not _fsdp2_unused.is_alone(group):
                _fsdp2_unused.fill_unused(group)
            _fsdp2_unused.unify_gradient_dtypes(group)
            _fsdp2_unused.drop_unused(group)


def set_unit_grad_comm(unit: nn.Module, comm: GradComm, name: str = "") -> None:
    """Make FSDP2 reduce the gradients of a unit according to ``comm``, including later changes of it.

    Local operation.
    """
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
        comm = replace(self.comm, look=None)  # it was checked before the reduction over dp_shard
        source = Partial("avg" if average else "sum")
        result = redistribute(buffer, source, Replicate(), self.stock, comm).wait()
        if result is not buffer:
            buffer.copy_(result)


def _input_dtype(comm: GradComm, dtype: torch.dtype, device: str) -> torch.dtype:
    """Return the input dtype of a reduction over several ranks that FSDP2 runs in ``dtype``."""
    wire = comm.wire(dtype)
    return wire if _fsdp2.can_copy_gradients_into(wire, device) else dtype


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
        # Backward id and size of an input whose output is not allocated yet; also the input if ``look`` is set.
        self._input: tuple[int, int] | None = None
        self._buffer: torch.Tensor | None = None

    def allocate(
        self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """Return a new buffer: first the input of a reduction, then its output. Local operation.

        Args:
            size: One number of elements.
            dtype: Dtype of FSDP2's reduction (main_grads_dtype).
            device: Device of the buffer.
        """
        unit = self._unit()
        assert unit is not None  # its backward is running
        shards, replicas, outer = fsdp2_units.reduction_of(unit)
        numel, backward, buffer = int(size[0]), _torch.backward_id(), None
        # The id of the backward, because after an error an input may have had no output.
        if self._input == (backward, numel * shards):
            self._input = None
            seen, self._buffer = self._buffer, None
            if seen is not None:  # FSDP2 has filled it
                for part in seen.sent if isinstance(seen, _torch_transport.ZeroCopyInput) else [seen]:
                    self.expose(part)
            given = self.comm.wire(dtype) if outer and replicas > 1 and not self.comm.fp32_sum else dtype
        else:
            self._input = (backward, numel)
            given = _input_dtype(self.comm, dtype, device.type) if shards > 1 else dtype
            (group,) = fsdp2_units.fsdp_parameter_groups(unit)
            one_by_one = self.comm.fp32_sum and given != torch.float32  # all-to-alls, which are not coalesced
            buffer = _torch_transport.zero_copy_input_of(group, numel, given, packs_small=one_by_one)
        if buffer is None:
            buffer = torch.empty(*size, dtype=given, device=device)
        if self._input is not None and self.comm.look is not None:
            self._buffer = buffer
        return buffer

    def expose(self, gradient: torch.Tensor) -> None:
        """Pass a gradient to ``look`` that is not reduced because one rank holds all of it. Local operation."""
        if self.comm.look is not None:
            self.comm.look(self.name, gradient)

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
            input_tensor.sent if isinstance(input_tensor, _torch_transport.ZeroCopyInput) else input_tensor
        )
        with profiler_range(f"te_fsdp::reduce_scatter ({self.name})"):
            reduce_scatter(output_tensor, source, group, self.comm, op=op)


def enable_zero_copy_reduce_scatter(state: ShardedModel, policy: Fsdp2Policy, wanted: bool | str) -> None:
    """Make FSDP2 reduce large gradients without a copy. Local operation with the same result on all ranks.

    Args:
        state: State of a model that FSDP2 has just sharded, with chosen transports. Its ``copied`` is filled.
        policy: FSDP2's own, for models without a precision policy.
        wanted: Whether for all units, or ``"auto"``.
    """
    if not wanted:
        return
    transports = transports_of(state)
    comm, precision = state.sync.comm or GradComm(), state.precision
    labels = {id(parameter): label for label, parameter in state.parameters().items()}
    for name, unit in state.modules.items():
        groups = fsdp2_units.fsdp_parameter_groups(unit)
        if not groups or fsdp2_units.reduction_of(unit)[0] == 1:
            continue  # a root whose units hold all parameters; or one rank holds whole shards
        if wanted == "auto" and transports.by_unit[name].name != "copy_engine":
            continue
        (group,) = groups
        own = policy if precision is None else precision.fsdp2_policy(name)
        reduced = _input_dtype(comm, _fsdp2.reduced_dtype(unit, own), state.meshes.device.type)
        found = dict[str, str]()
        for managed, why in _torch_transport.large_gradients(group):
            parameter = _fsdp2.sharded_param_of(managed)
            computed = own.param_dtype or parameter.dtype
            if parameter.requires_grad:
                casts = f"computed in {computed}, reduced in {reduced}" if computed != reduced else ""
                found[labels[id(parameter)]] = why or casts
        transports.copied |= found
        if wanted == "auto" and all(found.values()):
            continue  # FSDP2 copies all of them with one kernel
        _torch_transport.enable_zero_copy_reduce_scatter(group)
        if precision is None:
            set_unit_grad_comm(unit, comm, name)
    if rank() == 0:
        level = logging.INFO if wanted == "auto" else logging.WARNING
        for why in dict.fromkeys(filter(None, transports.copied.values())):
            named = [label for label, reason in transports.copied.items() if reason == why]
            _log.log(level, "zero_copy_gradients: gradients of %s are copied: %s", shorten(named, 3), why)


# ------------------------------------------------------------------------------------------ transport of all-gathers


class Transport(NamedTuple):
    """How a unit is all-gathered.

    Attributes:
        name: ``"nccl"`` or ``"copy_engine"``; ``"none"`` if nothing is gathered.
        why: Reason why it is not ``copy_engine``; empty if it is.
        gathers: Object that runs the copy-engine all-gathers.
    """

    name: str
    why: str = ""
    gathers: _fsdp2_copies.CopyEngineGathers | None = None

    def __str__(self) -> str:
        return f"{self.name} ({self.why})" if self.why else self.name


class UnitTransports(Component):
    """How the units of one model are all-gathered and reduced."""

    def __init__(self) -> None:
        self.by_unit: dict[str, Transport] = {}  #: Transport of each unit that FSDP2 manages
        #: Large parameters of units with ``zero_copy_gradients``, with the reason why the gradient is copied, or "".
        self.copied: dict[str, str] = {}


def transports_of(state: ShardedModel) -> UnitTransports:
    """Return the transports of a model's units."""
    found = state.components.get(UnitTransports)
    if found is None:
        found = UnitTransports()
        state.components.attach(found)
    return found


def choose_transports(state: ShardedModel, wanted: str) -> None:
    """Choose the transport of each unit of a model and set it up.

    Collective over the ranks with the shards of each unit, unit by unit.

    Args:
        state: State of a model that FSDP2 has just sharded; its ``transports`` are filled.
        wanted: One of :data:`te_fsdp.plan.WORDS`.
    """
    transports = transports_of(state)
    device, known = state.meshes.device, dict[str, _fsdp2_copies.CopyEngineGathers | str]()
    for name, unit in state.modules.items():
        ranks = _fsdp2.all_gather_ranks(unit)
        if ranks is None:
            held = fsdp2_units.fsdp_parameter_groups(unit)
            why = "one rank holds whole shards" if held else "it has no sharded weights"
            transports.by_unit[name] = Transport("none", why)
            continue
        why = _default_transport_reason(wanted, device, state.units[name])
        if not why:
            # Units over the same ranks share one setup, which is collective and takes memory.
            found = known.get(ranks.group_name)
            if found is None:
                made = connect_peers(device, ranks)
                if not isinstance(made, str):
                    peers, meeting = made
                    made = _fsdp2_copies.CopyEngineGathers(
                        meeting, peers.share, _te.unchanged_hook_attributes
                    )
                found = known[ranks.group_name] = made
            if not isinstance(found, str):
                found.install(unit)
                transports.by_unit[name] = Transport("copy_engine", gathers=found)
                continue
            why = found
        transports.by_unit[name] = Transport("nccl", why)
    if wanted != "nccl" and rank() == 0:  # something else was wished for
        level = logging.INFO if wanted == "auto" else logging.WARNING
        for why in dict.fromkeys(t.why for t in transports.by_unit.values() if t.name == "nccl"):
            units = [name or "the root" for name, t in transports.by_unit.items() if t.why == why]
            _log.log(level, "transport=%r: %s gathered by nccl, since %s", wanted, shorten(units, 3), why)


def _default_transport_reason(wanted: str, device: torch.device, storage: Storage) -> str:
    """Return the reason why copies are not tried, empty if they are. For ``auto`` see ``docs/transport.md``."""
    if wanted == "nccl":
        return "transport='nccl' was asked for"
    if wanted == "copy_engine":
        return ""
    if device.type == "cpu":
        return "transport='auto' takes copy_engine on GPUs"
    if torch.cuda.get_device_capability(device) < (9, 0):
        return "transport='auto' takes copy_engine on GPUs of compute capability 9.0 and later"
    if storage.gather != "pass":
        return "transport='auto' takes copy_engine for weights gathered in each pass"
    return ""


def move_shards_to_shared_memory(state: ShardedModel) -> None:
    """Move shards to memory that the other ranks can read, so that all-gathers need no copy before.

    Collective over the ranks of each unit with ``copy_engine``. Shards that cannot be moved are copied in every
    all-gather, and so are meta shards until the next call.
    """
    for gathers in _all_gathers(state):
        units = [
            state.modules[name] for name, t in transports_of(state).by_unit.items() if t.gathers is gathers
        ]
        gathers.move_to_shared_memory(units, alias)


def invalidate_gathers(state: ShardedModel) -> None:
    """Mark all-gathered copies as stale after a step, so that backwards gather again. Local operation."""
    for gathers in _all_gathers(state):
        gathers.expire()


def shared_bytes(state: ShardedModel) -> int:
    """Return the bytes of this rank that others read in all-gathers; torch's allocator does not count them on a GPU."""
    return sum(gathers.shared_bytes for gathers in _all_gathers(state))


def _all_gathers(state: ShardedModel) -> Iterable[_fsdp2_copies.CopyEngineGathers]:
    own: Any = state.components.by_class[UnitTransports]
    found = {}
    for transport in own.by_unit.values():
        if transport.gathers is not None:
            found[id(transport.gathers)] = transport.gathers
    return found.values()
