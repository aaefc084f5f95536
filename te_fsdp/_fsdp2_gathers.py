"""FSDP2's gathers by private names: where a forward is run again in backward, and cheaper (torch 2.11 to 2.15).

FSDP2's public all-gather hooks choose what of a shard travels, but not when, and must bring the same buffers each time.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING, Any

from te_fsdp._torch import fsdp_parameter_groups, local_of, managed_by, owners_of, without_modes

if TYPE_CHECKING:
    import torch
    from torch import nn

__all__ = ["as_if_kept", "begin_again", "gather_again", "make_room", "remember_shard_meshes"]


def begin_again(unit: nn.Module) -> None:
    """Let FSDP2 take part in a forward that runs in a backward after this unit's own backward. Local operation.

    A reentrant checkpoint runs forward and backward of each use of a unit in turn. FSDP2 leaves the unit's state at
    ``PRE_BACKWARD`` until the outermost backward ends (``FSDPState._training_state``), and then registers nothing for
    the second use: its gradients stay unreduced, without an error.
    """
    if any(group._training_state.name == "POST_BACKWARD" for group in fsdp_parameter_groups(unit)):
        state = unit._get_fsdp_state()  # type: ignore[operator]
        state._training_state = type(state._training_state).IDLE


@contextlib.contextmanager
def as_if_kept(group: Any) -> Iterator[None]:
    """Within the context a parameter group says of itself that it stays gathered between forward and backward.

    ``FSDPParamGroup._reshard_after_forward``, which is true where ``post_forward_mesh_info`` is set.
    """
    mesh_info, group.post_forward_mesh_info = group.post_forward_mesh_info, None
    try:
        yield
    finally:
        group.post_forward_mesh_info = mesh_info


def make_room(group: Any, shard: torch.Tensor, sizes: list[int]) -> None:
    """Let a gather bring other buffers of a shard than the one before. Local operation.

    FSDP2 makes memory for what its first gather brings, and fills that ever after (``FSDPParam.all_gather_outputs``;
    ``_unsharded_inner_tensors`` are views of it).

    Args:
        group: The shard's parameter group, not gathered.
        shard: Local shard with all-gather hooks of its own.
        sizes: Numbers of elements of the gathered buffers.
    """
    for managed in group.fsdp_params:
        have = managed.all_gather_outputs
        if local_of(managed.sharded_param) is shard and have and [t.numel() for t in have] != sizes:
            managed.all_gather_outputs, managed._unsharded_inner_tensors = [], []


def gather_again(group: Any, module: nn.Module, names: Collection[str]) -> None:
    """Gather some of a gathered module's parameters once more, into the same gathered parameters.

    Collective over the group's shard mesh: one all-gather (``FSDPParamGroup.unshard``, of fewer ``fsdp_params``).

    Args:
        group: The module's parameter group, gathered.
        module: Owner of the parameters.
        names: Their names there, the same on all ranks.
    """
    everything = group.fsdp_params
    group.fsdp_params = [
        managed
        for managed in everything
        if any(owner is module and name in names for owner, name in owners_of(managed))
    ]
    try:
        with without_modes():
            group._to_sharded()
            group.unshard()
            group.wait_for_unshard()
    finally:
        group.fsdp_params = everything


def remember_shard_meshes(unit: nn.Module) -> None:
    """Keep the mesh that FSDP2 hands to the all-gather hooks of a unit's parameters (``FSDPParam.shard_mesh``).

    Up to torch 2.12 it is a property that slices the mesh of HSDP anew at every gather of every quantized weight: a
    tenth of the host's time of a step. Later ones keep it themselves and are left alone. Local operation.
    """
    for managed in managed_by(unit):
        kind = type(managed)
        if hasattr(managed, "_shard_mesh") or not isinstance(getattr(kind, "shard_mesh", None), property):
            continue
        slicing = kind.shard_mesh.fget
        assert slicing is not None
        # A subclass, as FSDP2 gives units one: a property cannot be hidden by an attribute of the instance.
        managed.__class__ = _with_shard_mesh(kind)
        managed.__dict__[_SHARD_MESH] = slicing(managed)


#: Attribute of a record of FSDP2's: the mesh of its shards.
_SHARD_MESH = "_te_fsdp_shard_mesh"


@functools.cache
def _with_shard_mesh(kind: type) -> type:
    """A record's class whose ``shard_mesh`` is what :func:`remember_shard_meshes` has kept."""
    kept = property(lambda self: self.__dict__[_SHARD_MESH])
    return type(kind.__name__, (kind,), {"shard_mesh": kept})
