"""Quantized weights under activation checkpointing, which runs a forward in the middle of a backward.

Before a backward FSDP2 gathers a resharded unit again, and TE 2.18 to 2.20 then keeps of a weight only what backward
GEMMs read. When the forward is run again for its activations, what forward GEMMs read is missing (TE raises from deep
inside). Float8 and float8-block weights travel in the bytes that forward reads, so that te_fsdp hands these back at no
cost. Of MXFP8 weights TE gathers one of two independent halves: te_fsdp raises before anything is computed.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from te_fsdp import _te, _torch
from te_fsdp.errors import PrecisionError, message

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch
    from torch import nn

    from te_fsdp.binding import Binding

__all__ = ["check_recomputation", "keep_rowwise"]

#: Buffers that forward GEMMs read, in the order in which they are gathered (TE 2.20.2 ``fsdp_pre_all_gather``).
_ROWWISE = {"float8": ("_data",), "float8-block": ("_rowwise_data", "_rowwise_scale_inv")}


def keep_rowwise(stock: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a quantized tensor class's ``fsdp_post_all_gather``: the gathered buffers stay on the gathered weight.

    They live until FSDP2 frees them after the backward, on the weight or not. Local operation.
    """

    @functools.wraps(stock)
    def fsdp_post_all_gather(
        self: torch.Tensor, all_gather_outputs: tuple[torch.Tensor, ...], *args: Any, **kwargs: Any
    ) -> Any:
        tensor, inner = stock(self, all_gather_outputs, *args, **kwargs)
        names = _ROWWISE.get(_te.format_of(tensor) or "", ())
        for name, buffer in zip(names, all_gather_outputs, strict=False):
            if getattr(tensor, name) is None:
                setattr(tensor, name, buffer)
        return tensor, inner

    return fsdp_post_all_gather


def check_recomputation(module: nn.Module, binding: Binding) -> None:
    """Raise if a forward that runs inside a backward finds gathered weights of which a half is missing.

    Local operation; every rank gathers the same halves and raises the same.

    Args:
        module: A bound module under FSDP2, whose forward is about to run in a backward.
        binding: Its binding.

    Raises:
        PrecisionError: Names the weight and what to change.
    """
    for name, parameter in module._parameters.items():
        local = None if parameter is None else _torch.local_of(parameter)
        if local is None or _te.format_of(local) != "mxfp8":
            continue
        usages: dict[str, bool] = local.get_usages()  # type: ignore[attr-defined]
        if all(usages.values()):
            continue
        raise PrecisionError(
            message(
                f"{binding.label(name)}: activation checkpointing with a resharded mxfp8 weight",
                expected="row-wise and column-wise bytes for the recomputed forward and the backward",
                got=", ".join(way for way, there in usages.items() if there) + " bytes alone",
                why="TransformerEngine gathers one of the two, and they cannot be had from each other",
                fix="pass reshard_after_forward=False, or keep these weights in high precision",
            )
        )
