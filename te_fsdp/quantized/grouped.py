"""Between an ordinary tensor of all experts and TE's ``GroupedTensor`` over the same memory.

TE's kernels take a grouped tensor: the experts one after the other in flat buffers. An ordinary contiguous
(experts, out, in) tensor has the same bytes. Nothing is copied here in either direction: FSDP2 frees and refills the
memory of the gathered weight, and the grouped tensor that TE has saved for backward sees it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import torch

from te_fsdp import _te
from te_fsdp.parameters import carry_over
from te_fsdp.quantized.grouped_weight import adopt_grouped, is_grouped_weight

__all__ = ["as_grouped", "grouped_cut", "plain_of"]


class _AsGrouped(torch.autograd.Function):
    """Ordinary tensor -> grouped tensor over its memory; gradients pass as they are."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        return _wrap(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return gradients[0]


def as_grouped(tensor: torch.Tensor) -> torch.Tensor:
    """``GroupedTensor`` over the memory of an ordinary tensor. Local operation.

    Args:
        tensor: Contiguous (experts, out, in), or (experts, out); its gradient will have this shape.
    """
    if torch.is_grad_enabled() and tensor.requires_grad:
        return _AsGrouped.apply(tensor)
    return _wrap(tensor)


def _wrap(tensor: torch.Tensor) -> torch.Tensor:
    if is_grouped_weight(tensor):
        return tensor.as_grouped()  # type: ignore[missing-attribute]
    tensor = tensor.detach()
    return _te.te().tensor.GroupedTensor.make_grouped_tensor_from_rowwise_data(
        num_tensors=tensor.shape[0],
        tensor_shape=tuple(tensor.shape[1:]),
        rowwise_data=tensor,
        dtype=tensor.dtype,
    )


def plain_of(parameter: torch.nn.Parameter) -> torch.nn.Parameter:
    """The ordinary parameter over the memory of a ``GroupedTensor`` one, with its Python attributes. Local operation.

    Args:
        parameter: As TE makes it; ordinary ones are returned as they are.
    """
    if not isinstance(parameter, _te.te().tensor.GroupedTensor):
        return parameter
    grouped: Any = parameter.detach()
    local = (
        grouped.rowwise_data.view(parameter.shape) if grouped.quantizer is None else adopt_grouped(grouped)
    )
    new = torch.nn.Parameter(local, requires_grad=parameter.requires_grad)
    kept = _te.high_precision_value(parameter)
    if kept is not None:
        _te.attach_high_precision_value(new, kept)
    carry_over(parameter, new)
    return new


def grouped_cut(
    shape: tuple[int, ...],
    ranks: int,
    counts: Collection[int] = (),
    fits: Callable[[int], bool] = lambda dim: True,
) -> int:
    """The dim along which FSDP2 shall cut a tensor of all experts, so that every rank gets as much.

    Args:
        shape: tp-local (experts, out, in) or (experts, out).
        ranks: How many FSDP ranks cut it.
        counts: How many experts the ranks of ``ep`` hold, which all cut along one dim.
        fits: Whether an expert may be cut along a dim that divides.

    Returns:
        0 where the experts divide, else the first dim that does; 0, with uneven or empty shards, if none does.
    """
    if all(count % ranks == 0 for count in counts or shape[:1]):
        return 0
    return next((dim for dim in range(1, len(shape)) if shape[dim] % ranks == 0 and fits(dim)), 0)
