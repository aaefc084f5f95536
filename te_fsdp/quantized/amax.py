"""One scale for one weight: quantization whose amax covers every rank that holds a piece.

TE 2.20 forgets the reduction group on every detach, clone and ``nn.Parameter``, and each FSDP2 gather
overwrites it with the FSDP group alone. te_fsdp therefore never relies on the tensor to remember: the group
lives in the module's binding, and is put on the tensor where TE is about to read it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from te_fsdp import _te

if TYPE_CHECKING:
    from te_fsdp.binding import Binding

__all__ = ["attach_group", "quantize_shard", "requantize"]


def attach_group(local: torch.Tensor, binding: Binding) -> None:
    """Tell a quantized local shard over which ranks its next quantization must reduce the amax.

    Local operation. ``FusedAdam`` and ``quantize_`` read the mark (TE 2.20.2
    ``Float8CurrentScalingQuantizer.update_quantized``). The attribute dies with the tensor object, so
    pickling and checkpoint staging, which work on detached copies, never meet a process group.
    """
    if (
        binding.weight_mesh is not None
        and _te.is_quantized(local)
        and _te.needs_shared_amax(_te.quantizer_of(local))
    ):
        local.amax_reduction_group = binding.weight_mesh.get_group()  # type: ignore[attr-defined]


def quantize_shard(value: torch.Tensor, quantizer: Any, binding: Binding) -> torch.Tensor:
    """Quantize one rank's shard with the scale of the whole weight.

    Collective (max all-reduce of one or two floats) over the weight mesh for per-tensor formats, local for
    the others.

    Args:
        value: High-precision local shard.
        quantizer: The module's weight quantizer; left without a group afterwards.
        binding: Gives the weight mesh.

    Returns:
        Quantized tensor of ``value``'s shape.
    """
    shared = binding.weight_mesh is not None and _te.needs_shared_amax(quantizer)
    if shared:
        quantizer.with_amax_reduction = True
        quantizer.amax_reduction_group = binding.weight_mesh.get_group()  # type: ignore[union-attr]
    try:
        with torch.no_grad():
            local = quantizer(value)
    finally:
        if shared:
            quantizer.with_amax_reduction = False
            quantizer.amax_reduction_group = None
    attach_group(local, binding)
    return local


def requantize(local: torch.Tensor, binding: Binding) -> None:
    """Give a weight that TE quantized rank by rank the scale of the whole weight, in place.

    Uses the value from before quantization where TE kept it, the dequantized bytes otherwise. Collective over
    the weight mesh for per-tensor formats; nothing to do for the others, whose scales are local to a block.
    """
    if binding.weight_mesh is None or not _te.needs_shared_amax(_te.quantizer_of(local)):
        return
    value = _te.high_precision_value(local)
    value = local.dequantize() if value is None else value.to(local.device)  # type: ignore[operator]
    attach_group(local, binding)
    with torch.no_grad():
        local.quantize_(value)  # type: ignore[operator]
