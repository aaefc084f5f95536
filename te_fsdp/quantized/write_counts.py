"""Count quantizations into quantized tensors.

``tensor._version`` does not count writes through ``.data``, through ``detach()`` or by ``torch._foreach_`` functions.
All of these call ``quantize_`` of a tensor that has a copy of the same quantizer. The copies share one counter.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from te_fsdp.quantized.amax import WRITES, keep_amax_group_in_copies
from te_fsdp.upstream import te as _te
from te_fsdp.upstream.patches import apply_patch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch


def numbers_of_writes(tensors: Sequence[torch.Tensor]) -> list[int]:
    """Return how many quantizations into each local tensor were counted. Counting starts with the first call."""
    quantizers = [getattr(tensor, _te.QUANTIZER, None) for tensor in tensors]
    uncounted = [q for q in quantizers if q is not None and WRITES not in q.__dict__]
    if uncounted:
        keep_amax_group_in_copies()
        patch_quantize()
        for quantizer in uncounted:
            quantizer.__dict__.setdefault(WRITES, [0])
    return [0 if q is None else q.__dict__[WRITES][0] for q in quantizers]


def patch_quantize() -> None:
    """Let ``quantize_`` of TE's tensors count; once per process."""
    apply_patch("count", _wrap_quantize)


def count_write(tensor: Any) -> None:
    """Count one quantization into a tensor."""
    quantizer = _te.quantizer_of(tensor)
    if quantizer is not None and WRITES in quantizer.__dict__:
        quantizer.__dict__[WRITES][0] += 1


def _wrap_quantize(stock: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(stock)
    def quantize_(self: Any, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        count_write(self)
        return stock(self, tensor, *args, **kwargs)

    return quantize_
