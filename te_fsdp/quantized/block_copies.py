"""Copies between quantized tensors whose blocks have different shapes.

``weight.copy_(source)`` of two tensors of one TE class copies the bytes and scales that both have (TE 2.20.2). If the
weight has one scale per square block and the source one per row of a block, the scales of the source's rows do not hold
for columns. te_fsdp stores rowwise data only and derives the columnwise data from it, which would then be wrong. In the
reverse direction the weight would keep its previous columnwise data.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from te_fsdp.quantized.quantizer_record import change_quantizer_record, quantizer_record
from te_fsdp.upstream import te as _te
from te_fsdp.upstream.patches import apply_patch


def patch_clone_of_scales(tensor: torch.Tensor) -> None:
    """Let clones of a quantized weight, and their clones, have their own scales. Local operation.

    TE's clones share scales (2.18 to 2.20.2). A clone kept by the user (the best weights so far, values to be
    restored) would combine old data with new scales after the next step.
    """
    for part in (tensor, *_te.storage_parts_of(tensor)):
        quantizer = _te.quantizer_of(part)
        if quantizer is not None and not quantizer_record(quantizer).clones_scales:
            patch_block_copies()
            change_quantizer_record(quantizer, clones_scales=True)


def patch_block_copies() -> None:
    """Quantize values in ``copy_`` between blocks of different shapes, for te_fsdp's weights; once per process."""

    def wrap_dispatch(stock: Any) -> Any:
        @classmethod
        @functools.wraps(stock.__func__)
        def __torch_dispatch__(cls: Any, func: Any, types: Any, args: Any, kwargs: Any = None) -> Any:
            if func is torch.ops.aten.copy_.default and _has_other_blocks(*args[:2]):
                # TE would copy the bytes, whose scales are those of other blocks.
                args[0].quantize_(args[1].dequantize(dtype=torch.float32))
                return args[0]
            return stock.__func__(cls, func, types, args, kwargs)

        return __torch_dispatch__

    apply_patch("copy blocks", wrap_dispatch)


def _has_other_blocks(target: Any, source: Any) -> bool:
    """Return whether a weight of te_fsdp and a source of its class have scales for blocks of different shapes."""
    if type(source) is not type(target):
        return False
    quantizer = _te.quantizer_of(target)
    is_ours = quantizer is not None and quantizer_record(quantizer).clones_scales
    return is_ours and _te.format_of(target) is not _te.format_of(source)
