"""How the weights of each unit are gathered: by NCCL as FSDP2 does, or by the copy engines.

===============  ====================================================================================================
``nccl``         FSDP2's own all-gather (gloo on the CPU): shards into a buffer, sent by kernels, copied out of another
``copy_engine``  copies from rank to rank into the memory that kernels read (``te_fsdp/_fsdp2_copies.py``)
``auto``         ``copy_engine`` where it is possible and a gain was measured, ``nccl`` elsewhere
===============  ====================================================================================================
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

import torch

from te_fsdp import _fsdp2_copies
from te_fsdp.agree import rank
from te_fsdp.move import peers

if TYPE_CHECKING:
    import torch.distributed as dist
    from torch import nn

    from te_fsdp.layout.storage import Storage
    from te_fsdp.sharding.state import ShardingState

__all__ = ["Transport", "choose_transports", "shared_bytes", "take_in_shards"]

_log = logging.getLogger("te_fsdp")


class Transport(NamedTuple):
    """How a unit is gathered.

    Attributes:
        name: ``"nccl"`` or ``"copy_engine"``; ``"none"`` where one rank holds whole shards.
        why: Why it is not ``copy_engine``; empty where it is.
        gathers: What gathers it by copies.
    """

    name: str
    why: str = ""
    gathers: _fsdp2_copies.CopiedGathers | None = None

    def __str__(self) -> str:
        return f"{self.name} ({self.why})" if self.why else self.name


def choose_transports(state: ShardingState, wanted: str) -> None:
    """Settle how each unit of a model is gathered, and let it be so.

    Collective over the ranks that each unit's shards lie on, unit by unit.

    Args:
        state: Of a model that FSDP2 has just sharded; its ``transports`` are filled.
        wanted: One of :data:`te_fsdp.sharding.units.TRANSPORTS`.
    """
    device, known = state.meshes.device, dict[str, _fsdp2_copies.CopiedGathers | str]()
    for name, unit in state.modules.items():
        ranks = _fsdp2_copies.ranks_of_gathers(unit)
        if ranks is None:
            state.transports[name] = Transport("none", "one rank holds whole shards")
            continue
        why = _why_not_asked(wanted, device, state.units[name])
        if not why:
            found = known.get(ranks.group_name)
            if found is None:
                found = known[ranks.group_name] = _connect(device, ranks)
            if not isinstance(found, str):
                found.install(unit)
                state.transports[name] = Transport("copy_engine", gathers=found)
                continue
            why = found
        state.transports[name] = Transport("nccl", why)
    _tell(state, wanted)


def _why_not_asked(wanted: str, device: torch.device, storage: Storage) -> str:
    """Why copies are not even tried: ``auto`` takes them where a gain was measured (``docs/transport.md``)."""
    if wanted == "nccl":
        return "transport='nccl' was asked for"
    if wanted == "copy_engine":
        return ""
    if device.type == "cpu":
        return "transport='auto' takes copy_engine on GPUs"
    if torch.cuda.get_device_capability(device) < (9, 0):
        return "transport='auto' takes copy_engine on GPUs of compute capability 9.0 and later"
    return (
        ""
        if storage.gather == "pass"
        else "transport='auto' takes copy_engine for weights gathered in each pass"
    )


def _connect(device: torch.device, ranks: dist.ProcessGroup) -> _fsdp2_copies.CopiedGathers | str:
    """What gathers units whose shards lie on some ranks by copies, or why they cannot be. Collective over them."""
    found = peers.connect(device, ranks)
    if isinstance(found, str):
        return found
    together, meeting = found
    return _fsdp2_copies.CopiedGathers(meeting, together.share)


def _tell(state: ShardingState, wanted: str) -> None:
    """One line in the log for each reason why units are gathered by NCCL though something else was wished for."""
    if wanted == "nccl" or rank() != 0:
        return
    level = logging.INFO if wanted == "auto" else logging.WARNING
    for why in dict.fromkeys(t.why for t in state.transports.values() if t.name == "nccl"):
        units = [name or "the root" for name, t in state.transports.items() if t.why == why]
        more = f" and {len(units) - 3} more" if len(units) > 3 else ""
        _log.log(
            level, "transport=%r: %s%s gathered by nccl, since %s", wanted, ", ".join(units[:3]), more, why
        )


def take_in_shards(state: ShardingState) -> None:
    """Move shards that travel as they are to where the other ranks read them, so that no gather copies them first.

    Collective over the ranks of each unit gathered by copies. Others are copied in every gather, shards on meta until
    this is called again.
    """
    for gathers in _all_gathers(state):
        units = [state.modules[name] for name, t in state.transports.items() if t.gathers is gathers]
        gathers.take_in(units, peers.alias)


def shared_bytes(model: nn.Module) -> int:
    """Bytes of this rank that others read in a model's gathers; torch's allocator does not count those of a GPU."""
    state: ShardingState | None = model.__dict__.get("_te_fsdp_sharding")
    return sum(gathers.shared_bytes for gathers in _all_gathers(state)) if state is not None else 0


def _all_gathers(state: ShardingState) -> Iterable[_fsdp2_copies.CopiedGathers]:
    return {id(t.gathers): t.gathers for t in state.transports.values() if t.gathers is not None}.values()
