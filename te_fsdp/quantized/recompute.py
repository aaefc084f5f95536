"""Quantized weights that a backward reads as forward does: activation checkpointing runs a forward in its middle.

Before a backward FSDP2 gathers a resharded unit again, and TE 2.18 to 2.20 then keeps of a weight only what backward
GEMMs read. When the forward is run again for its activations, what forward GEMMs read is missing (TE raises from deep
inside). Float8 and float8-block weights travel in the bytes that forward reads, so that te_fsdp hands these back at no
cost. Of MXFP8 weights TE gathers one of two independent halves. Where one is missed, both are gathered, then and there;
later backwards gather both at once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from te_fsdp import _fsdp2_gathers, _te, _torch
from te_fsdp.quantized.grouped_weight import is_grouped_weight

if TYPE_CHECKING:
    import torch
    from torch import nn

    from te_fsdp.binding import Binding

__all__ = ["gather_missing", "reads_again"]


def reads_again(shard: torch.Tensor, module: nn.Module, binding: Binding) -> bool:
    """Whether gathers of a weight for backward must bring both halves: its module runs its forward again there.

    Local operation.

    Args:
        shard: A quantized shard.
        module: Its owner.
        binding: The owner's.
    """
    # TE's own recomputation (LayerNormMLP(checkpoint=True)) passes by no forward that could ask.
    again = binding.recomputed or module.__dict__.get("checkpoint") is True
    return again and _te.travels_in_halves(shard)


def gather_missing(module: nn.Module, binding: Binding) -> None:
    """Complete gathered weights of which a half is missing, before a forward that runs inside a backward.

    Collective over ``dp_shard`` when a half is missing, at most in a module's first such forward: one all-gather.
    Every rank gathers the same halves and misses the same.

    Args:
        module: A bound module under FSDP2, whose forward is about to run in a backward.
        binding: Its binding.
    """
    missing = []
    for name, parameter in module._parameters.items():
        local = None if parameter is None else _torch.local_of(parameter)
        if local is not None and _te.travels_in_halves(local) and not is_grouped_weight(local):
            usages: dict[str, bool] = local.get_usages()  # type: ignore[attr-defined]
            if not all(usages.values()):
                missing.append(name)
    if missing:
        binding.recomputed = True
        _fsdp2_gathers.gather_again(_te.fsdp_group_of(module), module, missing)
