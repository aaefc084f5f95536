"""Sums over tp that TE's GroupedLinear leaves to the model. `group` is ``None`` without tensor parallelism."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist


class SumOverTp(torch.autograd.Function):
    """Sum row-parallel partial results over the ranks; the gradient is complete on every rank already."""

    @staticmethod
    def forward(ctx: Any, partial_output: torch.Tensor, group: Any) -> torch.Tensor:
        return _sum(partial_output, group)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradients[0], None


class SumGradientOverTp(torch.autograd.Function):
    """Pass on the input of a column-parallel layer; the gradient is the sum over the ranks' columns."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _sum(gradients[0], ctx.group), None


def _sum(value: torch.Tensor, group: Any) -> torch.Tensor:
    value = value.clone()
    if group is not None:
        dist.all_reduce(value, group=group)
    return value
