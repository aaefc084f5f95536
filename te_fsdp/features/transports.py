"""Choice of the transport of each unit's communication.

The weights of each unit are all-gathered by NCCL as FSDP2 does, or by the copy engines:

===============  ====================================================================================================
``nccl``         FSDP2's all-gather (gloo on the CPU): with copies before and after the communication kernels
``copy_engine``  copies from rank to rank into the memory that kernels read (``upstream/fsdp2_copy_engine.py``)
``auto``         ``copy_engine`` if it is possible and measurably faster, ``nccl`` otherwise
===============  ====================================================================================================

With ``zero_copy_gradients`` gradients are reduced from their own memory, without FSDP2's copy
(``te_fsdp/upstream/symmetric_memory.py``). ``"auto"`` does so in units with ``copy_engine``, if any of their large
gradients qualifies.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import NamedTuple, cast

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy as Fsdp2Policy

from te_fsdp.apply_fully_shard import Setup
from te_fsdp.collectives.agreement import rank
from te_fsdp.collectives.redistribute import GradComm
from te_fsdp.component import Component
from te_fsdp.errors import shorten
from te_fsdp.layout import Storage
from te_fsdp.peer_memory import alias, connect_peers
from te_fsdp.sharded_model import ShardedModel
from te_fsdp.unit_communication import input_dtype, set_unit_grad_comm
from te_fsdp.upstream import (
    fsdp2_copy_engine as _copy_engine,
    fsdp2_state as _fsdp2,
    fsdp2_units,
    symmetric_memory as _symmetric_memory,
    te as _te,
)

_log = logging.getLogger("te_fsdp")


class Transport(NamedTuple):
    """Transport of a unit's all-gathers."""

    name: str  #: ``"nccl"`` or ``"copy_engine"``; ``"none"`` without all-gathers
    why: str = ""  #: Reason why it is not ``copy_engine``; empty if it is
    gathers: _copy_engine.CopyEngineGathers | None = None  #: Object that runs the copy-engine all-gathers

    def __str__(self) -> str:
        return f"{self.name} ({self.why})" if self.why else self.name


class UnitTransports(Component):
    """Transports of the all-gathers and reductions of one model's units."""

    def __init__(self, modules: dict[str, nn.Module]) -> None:
        self._modules = modules
        self.by_unit: dict[str, Transport] = {}  #: Transport of each unit that FSDP2 manages
        #: Large parameters of units with ``zero_copy_gradients``, with the reason why the gradient is copied, or "".
        self.copied: dict[str, str] = {}

    @property
    def gathers(self) -> Iterable[_copy_engine.CopyEngineGathers]:
        """Return the objects that run copy-engine all-gathers, each once."""
        return {id(t.gathers): t.gathers for t in self.by_unit.values() if t.gathers is not None}.values()

    @property
    def shared_bytes(self) -> int:
        """Return the bytes of this rank that others read. On a GPU torch's allocator does not count them."""
        return sum(gathers.shared_bytes for gathers in self.gathers)

    def after_materialize(self) -> None:
        """Move shards to memory that the other ranks can read, so that all-gathers need no copy before.

        Collective over the ranks of each unit with ``copy_engine``. Shards that cannot be moved are copied in every
        all-gather, and so are meta shards until the next call.
        """
        for gathers in self.gathers:
            units = [self._modules[name] for name, t in self.by_unit.items() if t.gathers is gathers]
            gathers.move_to_shared_memory(units, alias)

    def finish_step(self) -> None:
        """Mark all-gathered copies as stale after a step, so that backwards all-gather again. Local operation."""
        for transport in self.by_unit.values():
            if transport.gathers is not None:
                transport.gathers.expire()


def transports_of(state: ShardedModel) -> UnitTransports:
    """Return the transports of a model's units."""
    return cast("UnitTransports", state.components.by_class[UnitTransports])


def choose_communication(setup: Setup) -> None:
    """Choose and set up the transports of all-gathers and reductions.

    Collective over the ranks with the shards of each unit, unit by unit.
    """
    plan, state, transport = setup.plan, setup.state, setup.plan.request.transport
    transports = UnitTransports(state.modules)
    state.components.attach(transports)
    device, by_group = setup.device, dict[str, _copy_engine.CopyEngineGathers | str]()
    for name, unit in state.modules.items():
        ranks = fsdp2_units.all_gather_ranks(unit)
        if ranks is None:
            why = "the shard group has one rank" if setup.groups[name] else "it has no sharded weights"
            transports.by_unit[name] = Transport("none", why)
            continue
        why = _default_transport_reason(transport, device, state.units[name])
        if not why:
            # Units over the same ranks share one setup, which is collective and takes memory.
            gathers = by_group.get(ranks.group_name)
            if gathers is None:
                connected = connect_peers(device, ranks)
                if not isinstance(connected, str):
                    peers, peer_memory = connected
                    connected = _copy_engine.CopyEngineGathers(
                        peer_memory, peers.share, _te.unchanged_hook_attributes
                    )
                gathers = by_group[ranks.group_name] = connected
            if not isinstance(gathers, str):
                gathers.install(unit)
                transports.by_unit[name] = Transport("copy_engine", gathers=gathers)
                continue
            why = gathers
        transports.by_unit[name] = Transport("nccl", why)
    # An explicit choice that cannot be followed is a warning. A default that adapts is not.
    level = logging.INFO if transport == "auto" else logging.WARNING
    is_adapted = transport != "nccl" and _log.isEnabledFor(level)  # a different transport was requested
    if is_adapted and rank() == 0:
        for why in dict.fromkeys(t.why for t in transports.by_unit.values() if t.name == "nccl"):
            units = [name or "the root" for name, t in transports.by_unit.items() if t.why == why]
            _log.log(level, "transport=%r: nccl all-gathers %s, since %s", transport, shorten(units, 3), why)
    # Shards on the device have their memory already. For those on meta, `materialize` repeats the call.
    transports.after_materialize()
    option = plan.request.zero_copy_gradients
    if option is True or (option and any(t.gathers is not None for t in transports.by_unit.values())):
        enable_zero_copy_reduce_scatter(state, plan.mp_policy, option)
    _log.debug("fully_shard: %d units over %s", len(plan.units), plan.meshes)


def _default_transport_reason(transport: str, device: torch.device, storage: Storage) -> str:
    """Return the reason why copies are not tried, empty if they are. For ``auto`` see ``docs/transport.md``."""
    if transport == "nccl":
        return "transport='nccl' was requested"
    if transport == "copy_engine":
        return ""
    if device.type == "cpu":
        return "transport='auto' uses copy_engine on GPUs"
    if torch.cuda.get_device_capability(device) < (9, 0):
        return "transport='auto' uses copy_engine on GPUs of compute capability 9.0 and later"
    if storage.gather != "pass":
        return "transport='auto' uses copy_engine for weights all-gathered in each pass"
    return ""


def enable_zero_copy_reduce_scatter(state: ShardedModel, policy: Fsdp2Policy, option: bool | str) -> None:
    """Make FSDP2 reduce large gradients without a copy. Local operation with the same result on all ranks.

    FSDP2 has just sharded the model, and its transports are chosen. ``policy`` is FSDP2's, for models without a
    precision policy. ``option`` is the argument ``zero_copy_gradients`` of ``fully_shard``.
    """
    transports = transports_of(state)
    comm, precision = state.sync.comm or GradComm(), state.precision
    labels = {id(parameter): label for label, parameter in state.parameters().items()}
    for name, unit in state.modules.items():
        groups = fsdp2_units.fsdp_parameter_groups(unit)
        if not groups or fsdp2_units.reduction_of(unit)[0] == 1:
            continue  # a root whose units contain all parameters; or the shard group has one rank
        if option == "auto" and transports.by_unit[name].name != "copy_engine":
            continue
        (group,) = groups
        unit_policy = policy if precision is None else precision.fsdp2_policy(name)
        reduced = input_dtype(comm, _fsdp2.reduced_dtype(unit, unit_policy), state.meshes.device.type)
        copied = dict[str, str]()
        for managed, why in _symmetric_memory.large_gradients(group):
            parameter = _fsdp2.sharded_param_of(managed)
            computed = unit_policy.param_dtype or parameter.dtype
            if parameter.requires_grad:
                casts = f"computed in {computed}, reduced in {reduced}" if computed != reduced else ""
                copied[labels[id(parameter)]] = why or casts
        transports.copied |= copied
        if option == "auto" and all(copied.values()):
            continue  # FSDP2 copies all of them with one kernel
        fsdp2_units.record_of_group(group).sends_without_copy = True
        if precision is None:
            set_unit_grad_comm(unit, comm, name)
    if rank() == 0:
        level = logging.INFO if option == "auto" else logging.WARNING
        for why in dict.fromkeys(filter(None, transports.copied.values())):
            named = [label for label, reason in transports.copied.items() if reason == why]
            _log.log(level, "zero_copy_gradients: gradients of %s are copied: %s", shorten(named, 3), why)
