"""Parameters that some ranks use and others do not: all ranks must reduce the same gradients."""

from __future__ import annotations

from typing import TYPE_CHECKING

from te_fsdp import _fsdp2_patches, _torch

if TYPE_CHECKING:
    from torch import nn

__all__ = ["reduce_unused"]


def reduce_unused(model: nn.Module) -> None:
    """Let FSDP2 reduce zeros for trained parameters of a unit that had no gradient on this rank. Local operation.

    FSDP2 reduces what has a gradient. Where that differs between ranks (a branch that one rank takes and another does
    not), their collectives would not match: they hang, or mix the gradients of different parameters. A parameter of a
    unit that no rank used gets a gradient of zeros as well.

    Every unit must still run on all ranks or on none: its all-gather is a collective too.

    Args:
        model: The model after FSDP2's ``fully_shard``.
    """
    for unit in model.modules():
        if not _torch.is_fsdp_module(unit):
            continue
        if hasattr(unit, "set_reduce_scatter_unused_params"):
            unit.set_reduce_scatter_unused_params(True, recurse=False)  # type: ignore[operator]
        else:  # torch before 2.13
            for group in _torch.fsdp_parameter_groups(unit):
                _fsdp2_patches.fill_unused(group)
        for group in _torch.fsdp_parameter_groups(unit):
            _fsdp2_patches.one_gradient_dtype(group)
