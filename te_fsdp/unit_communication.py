"""How FSDP2's units communicate: who gathers their weights, in which dtype gradients are reduced, and of whom.

For another dtype on the wire each unit has a custom reduce-scatter. FSDP2 calls ``allocate`` for the input, copies
gradients into it (and casts them while copying), calls ``allocate`` for the output, reduces, all-reduces the output
over ``dp_replicate``, and casts it to the sharded gradient's dtype. It takes whatever dtype the buffers have:

    input     wire's dtype where there is a wire and FSDP2 can copy into it, so that no further cast is needed
    output    main_grads_dtype; the wire's dtype where FSDP2 all-reduces it over dp_replicate right afterwards, but for
              fp32 sums: these need an all-reduce of our own, for which FSDP2 is given a process group that does it

Without a wire nothing needs one, but for ``zero_copy_gradients``: gradients are then sent from where they lie, and
FSDP2 is given nothing to copy them into (``te_fsdp/upstream/symmetric_memory.py``). ``"auto"`` does so in units
gathered by
``copy_engine``, if any of their large gradients can be sent so.

The weights of each unit are gathered by NCCL as FSDP2 does, or by the copy engines:

===============  ====================================================================================================
``nccl``         FSDP2's own all-gather (gloo on the CPU): shards into a buffer, sent by kernels, copied out of another
``copy_engine``  copies from rank to rank into the memory that kernels read (``te_fsdp/upstream/fsdp2_copy_engine.py``)
``auto``         ``copy_engine`` where it is possible and a gain was measured, ``nccl`` elsewhere
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
from te_fsdp.collectives.redistribute import GradComm, comm_of, redistribute, reduce_scatter
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

if TYPE_CHECKING:
    from torch import nn
    from torch.distributed.fsdp import MixedPrecisionPolicy as Fsdp2Policy

    from te_fsdp.layout import Storage
    from te_fsdp.sharded_model import ShardedModel

_log = logging.getLogger("te_fsdp")


def reduce_unused(model: nn.Module) -> None:
    """Let FSDP2 reduce zeros for trained parameters of a unit that had no gradient on this rank. Local operation.

    FSDP2 reduces what has a gradient. Where that differs between ranks (a branch that one rank takes and another does
    not), their collectives would not match: they hang, or mix the gradients of different parameters. A parameter that
    no rank used keeps ``None``, as in one process.

    Every unit must still run on all ranks or on none: its all-gather is a collective too.
    """
    for unit in model.modules():
        if not fsdp2_units.is_fsdp_module(unit):
            continue
        for group in fsdp2_units.fsdp_parameter_groups(unit):
            if not _fsdp2_unused.is_alone(group):
                _fsdp2_unused.fill_unused(group)
            _fsdp2_unused.one_gradient_dtype(group)
            _fsdp2_unused.drop_unused(group)


def set_unit_grad_comm(unit: nn.Module, comm: GradComm, name: str = "") -> None:
    """Let FSDP2 reduce the gradients of a unit as ``comm`` says, now and whenever it changes. Local operation."""
    if fsdp2_units.fsdp_parameter_groups(unit):
        unit.set_custom_reduce_scatter(UnitReduceScatter(unit, comm, name))  # type: ignore[operator]


class OuterGroup(dist.ProcessGroup):
    """The ranks of a process group (``stock``), with an all-reduce that adds in fp32 what is sent in another dtype.

    The sum is rounded to the wire's dtype once more on its way back, by an all-gather.
    """

    def __init__(self, stock: dist.ProcessGroup, comm: GradComm) -> None:
        super().__init__(stock.rank(), stock.size())  # type: ignore[missing-argument,bad-argument-type]
        self.stock, self.comm = stock, comm

    def allreduce(self, tensors: list[torch.Tensor], opts: Any = None) -> None:  # type: ignore[bad-override]
        """``dist.all_reduce(tensor, op, group=self)``, finished or queued on the current stream on return.

        Collective over the group: an all-to-all and an all-gather; an all-reduce where the wire has the tensor's dtype.
        """
        (buffer,) = tensors
        # In this order: the options' ReduceOp equals one of its constants, which do not equal it.
        average = opts.reduceOp == dist.ReduceOp.AVG
        assert average or opts.reduceOp == dist.ReduceOp.SUM  # what FSDP2 does over dp_replicate
        comm = replace(self.comm, look=None)  # it has been looked at before it was reduced over dp_shard
        source = Partial("avg" if average else "sum")
        result = redistribute(buffer, source, Replicate(), self.stock, comm).wait()
        if result is not buffer:
            buffer.copy_(result)


def _input_dtype(comm: GradComm, dtype: torch.dtype, device: str) -> torch.dtype:
    """Dtype of the input of a reduction that FSDP2 makes in ``dtype``, over several ranks."""
    wire = comm.wire(dtype)
    return wire if _fsdp2.can_copy_gradients_into(wire, device) else dtype


class UnitReduceScatter(_torch.ReduceScatter):
    """One unit's reduce-scatter (``FSDPModule.set_custom_reduce_scatter``)."""

    def __init__(self, unit: nn.Module, comm: GradComm, name: str) -> None:
        self.comm, self.name = comm, name
        self._unit = weakref.ref(unit)
        # Backward and size of an input whose output is to come, and the input while someone wants to look at it.
        self._input: tuple[int, int] | None = None
        self._buffer: torch.Tensor | None = None

    def allocate(
        self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """A new buffer: first the input of a reduction, then its output. Local operation.

        Args:
            size: One number of elements.
            dtype: That FSDP2 reduces in (main_grads_dtype).
            device: Where.
        """
        unit = self._unit()
        assert unit is not None  # it is running its backward
        shards, replicas, outer = fsdp2_units.reduction_of(unit)
        numel, backward, buffer = int(size[0]), _torch.backward_id(), None
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
            buffer = _torch_transport.zero_copy_input_of(group, numel, given)
        if buffer is None:
            buffer = torch.empty(*size, dtype=given, device=device)
        if self._input is not None and self.comm.look is not None:
            self._buffer = buffer
        return buffer

    def expose(self, gradient: torch.Tensor) -> None:
        """What is not reduced, since one rank holds all of it, right before it is kept. Local operation."""
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
        """Reduce and scatter. Collective over ``group``, finished or queued on the current stream on return.

        A range of the profiler, by the name of the unit.
        """
        assert not async_op  # FSDP2 runs it on a stream of its own
        source = (
            input_tensor.sent if isinstance(input_tensor, _torch_transport.ZeroCopyInput) else input_tensor
        )
        with torch.profiler.record_function(f"te_fsdp::reduce_scatter ({self.name})"):
            reduce_scatter(output_tensor, source, group, self.comm, op=op)


def enable_zero_copy_reduce_scatter(state: ShardedModel, policy: Fsdp2Policy, wanted: bool | str) -> None:
    """Let FSDP2 copy no large gradients before it reduces them. Local operation, the same on all ranks.

    Args:
        state: Of a model that FSDP2 has just sharded, whose transports are chosen; its ``copied`` is filled.
        policy: FSDP2's own, of models without a precision policy.
        wanted: Whether in all units, or ``"auto"``.
    """
    if not wanted:
        return
    transports = transports_of(state)
    comm, precision = comm_of(state.model) or GradComm(), state.precision
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
            continue  # FSDP2 copies all of them by one kernel
        _torch_transport.enable_zero_copy_reduce_scatter(group)
        if precision is None:
            set_unit_grad_comm(unit, comm, name)
    if rank() == 0:
        level = logging.INFO if wanted == "auto" else logging.WARNING
        for why in dict.fromkeys(filter(None, transports.copied.values())):
            named = [label for label, reason in transports.copied.items() if reason == why]
            _log.log(level, "zero_copy_gradients: gradients of %s are copied: %s", shorten(named, 3), why)


# ------------------------------------------------------------------ who gathers their weights


class Transport(NamedTuple):
    """How a unit is gathered.

    Attributes:
        name: ``"nccl"`` or ``"copy_engine"``; ``"none"`` where nothing is gathered.
        why: Why it is not ``copy_engine``; empty where it is.
        gathers: What gathers it by copies.
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
    """Settle how each unit of a model is gathered, and let it be so.

    Collective over the ranks that each unit's shards lie on, unit by unit.

    Args:
        state: Of a model that FSDP2 has just sharded; its ``transports`` are filled.
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
    """Why copies are not even tried: ``auto`` takes them where a gain was measured (``docs/transport.md``)."""
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
    """Move shards that are sent as they lie to where the other ranks read them, so that no gather copies them first.

    Collective over the ranks of each unit gathered by copies. Those of which this is not so are copied in every gather,
    shards on meta until this is called again.
    """
    for gathers in _all_gathers(state):
        units = [
            state.modules[name] for name, t in transports_of(state).by_unit.items() if t.gathers is gathers
        ]
        gathers.take_in(units, alias)


def invalidate_gathers(state: ShardedModel) -> None:
    """After a step: let backwards gather what is there from a forward before it. Local operation."""
    for gathers in _all_gathers(state):
        gathers.expire()


def shared_bytes(state: ShardedModel) -> int:
    """Bytes of this rank that others read in a model's gathers; torch's allocator does not count those of a GPU."""
    return sum(gathers.shared_bytes for gathers in _all_gathers(state))


def _all_gathers(state: ShardedModel) -> Iterable[_fsdp2_copies.CopyEngineGathers]:
    own: Any = state.components.by_class[UnitTransports]
    return {id(t.gathers): t.gathers for t in own.by_unit.values() if t.gathers is not None}.values()
