"""All-gathers of FSDP2 units that start before the unit's forward.

Private names of FSDP2: ``FSDPStateContext.iter_forward_root``, ``FSDPState._states_to_forward_prefetch``,
``FSDPParamGroup._all_gather_result``, ``unshard_async_op``. Checked with torch 2.11 to 2.15.
"""

from __future__ import annotations

from torch import nn

from te_fsdp.upstream.fsdp2_units import fsdp_parameter_groups, fsdp_state_of
from te_fsdp.upstream.torch_autograd import without_subclasses


def is_in_root_forward(unit: nn.Module) -> bool:
    """Return whether a forward of the unit's root is running, and not one of an inner unit alone."""
    running = unit._get_fsdp_state()._state_ctx.iter_forward_root  # type: ignore[operator]
    return running is not None and running._is_root is True


def has_forward_prefetch(unit: nn.Module) -> bool:
    """Return whether the user has called ``set_modules_to_forward_prefetch`` of a unit."""
    return bool(fsdp_state_of(unit)._states_to_forward_prefetch)


def start_gather(unit: nn.Module) -> bool:
    """Start to all-gather a unit as FSDP2's prefetch in forward does. Return whether it was sharded.

    Collective over the ranks of the unit's shards.
    """
    has_started = False
    for group in fsdp_parameter_groups(unit):
        if group._all_gather_result is not None or group.is_unsharded:
            continue
        before = group._training_state
        group._training_state = type(before).FORWARD
        try:
            group.unshard(group.unshard_async_op)
        finally:
            group._training_state = before
        has_started = True
    return has_started


def drop_gather(unit: nn.Module) -> None:
    """Free the weights of a started all-gather that no forward has used. Local operation."""
    for group in fsdp_parameter_groups(unit):
        if group._all_gather_result is not None:
            group.wait_for_unshard()
            group.reshard()


def versions_of_shards(unit: nn.Module) -> list[int]:
    """Return a number for each of a unit's shards, which each write to the DTensor or to its local tensor raises."""
    with without_subclasses():  # reads attributes without a Python call
        shards = [m.sharded_param for group in fsdp_parameter_groups(unit) for m in group.fsdp_params]
        return [shard._version + shard._local_tensor._version for shard in shards]
