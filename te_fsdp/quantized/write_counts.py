"""Count quantizations into quantized tensors."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from te_fsdp.quantized.quantizer_record import QUANTIZER_RECORD, change_quantizer_record
from te_fsdp.upstream import te as _te, torch_dtensor as _torch
from te_fsdp.upstream.patches import apply_patch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch


# ``tensor._version`` does not count writes through ``.data``, through ``detach()`` or by ``torch._foreach_``
# functions. All of these call ``quantize_`` of a tensor that has a copy of the same quantizer. The copies share one
# counter.
def write_numbers_of(parameters: Sequence[torch.Tensor]) -> list[int]:
    """Return numbers that change with each write: versions, plus quantizations that are counted from the first call."""
    # Every step calls it twice, so it makes few calls.
    numbers, local_tensors = _torch.versions_and_locals_of(parameters)
    for index, local in enumerate(local_tensors):
        quantizer = getattr(local, _te.QUANTIZER, None)
        if quantizer is None:
            continue
        record = quantizer.__dict__.get(QUANTIZER_RECORD)
        if not record or record.writes is None:
            patch_quantize()
            change_quantizer_record(quantizer, writes=[0])
        else:
            numbers[index] += record.writes[0]
    return numbers


def patch_quantize() -> None:
    """Let ``quantize_`` of TE's tensors count; once per process."""

    def wrap_quantize(stock: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(stock)
        def quantize_(self: Any, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            count_write(self)
            return stock(self, tensor, *args, **kwargs)

        return quantize_

    apply_patch("count", wrap_quantize)


def count_write(tensor: Any) -> None:
    """Count one quantization into a tensor."""
    quantizer = _te.quantizer_of(tensor)
    record = None if quantizer is None else quantizer.__dict__.get(QUANTIZER_RECORD)
    if record and record.writes is not None:
        record.writes[0] += 1
