"""TransformerEngine's Triton cross entropy (``pytorch/triton/cross_entropy.py``), in PyTorch."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from te_fsdp.emulation._errors import EmulationError


class _Rows(NamedTuple):
    """Statistics of the rows of this rank's logits, each fp32 (rows,)."""

    largest: torch.Tensor
    #: Sum of ``exp(logit - largest)``.
    exponentials: torch.Tensor
    #: The logit of the target; minus infinity where another rank has it.
    target: torch.Tensor
    #: Sum of the logits.
    total: torch.Tensor


def _rows_of(logits: torch.Tensor, target: torch.Tensor, first: int) -> _Rows:
    """Return statistics of (rows, local vocabulary) fp32 logits whose first column is token ``first``."""
    largest = logits.amax(1)
    column = target - first
    is_local = (column >= 0) & (column < logits.shape[1])
    found = logits.gather(1, column.clamp(0, logits.shape[1] - 1).unsqueeze(1)).squeeze(1)
    return _Rows(
        largest,
        (logits - largest[:, None]).exp().sum(1),
        torch.where(is_local, found, float("-inf")),
        logits.sum(1),
    )


def _combined(rows: _Rows, group: Any, size: int) -> _Rows:
    """Return the statistics of the rows over all ranks of a group. One all-gather over ``group``."""
    if size == 1:
        return rows
    local = torch.stack(tuple(rows), dim=1)
    gathered = local.new_empty(size * len(local), 4)
    dist.all_gather_into_tensor(gathered, local, group=group)
    each = _Rows(*gathered.view(size, -1, 4).unbind(2))
    largest = each.largest.amax(0)
    exponentials = (each.exponentials * (each.largest - largest).exp()).sum(0)
    return _Rows(largest, exponentials, each.target.amax(0), each.total.sum(0))


def _gradient(
    logits: torch.Tensor, target: torch.Tensor, rows: _Rows, first: int, vocabulary: int, smoothing: float
) -> torch.Tensor:
    """Return the fp32 gradient of each row's loss by its local logits."""
    gradient = (logits - rows.largest[:, None]).exp() / rows.exponentials[:, None] - smoothing / vocabulary
    columns = torch.arange(first, first + logits.shape[1], device=logits.device)
    return gradient - (columns == target[:, None]) * (1 - smoothing)


def cross_entropy_forward(
    _input: torch.Tensor,
    target: torch.Tensor,
    label_smoothing: float,
    reduce_loss: bool,
    dist_process_group: Any,
    ignore_idx: int,
    overwrite_input: bool | None = None,
) -> tuple[Any, ...]:
    """Return the loss of logits (B, S, local vocabulary), and what backward needs. One all-gather over the group.

    TransformerEngine 2.19 and later pass ``overwrite_input`` and get ``(loss, logits, statistics (rows, 2), target,
    number of targets, rank, size)``. TransformerEngine 2.18 gets ``(loss, gradient in fp32)``.
    """
    rank, size = (0, 1) if dist_process_group is None else _place(dist_process_group)
    logits, labels = _input.detach().flatten(0, 1).float(), target.reshape(-1)
    if len(labels) != len(logits):
        raise EmulationError(f"{len(labels)} targets for {len(logits)} rows of logits")
    columns, kept = logits.shape[1], labels != ignore_idx
    local = _rows_of(logits, labels, rank * columns)
    rows = _combined(local, dist_process_group, size)
    logarithm = rows.largest + rows.exponentials.log()
    loss = logarithm - rows.target
    if label_smoothing > 0:
        # 2.18 sums the logits of this rank alone: its smoothed loss differs by rank, its gradients do not.
        total = local.total if overwrite_input is None else rows.total
        smoothed = label_smoothing * logarithm - label_smoothing / (columns * size) * total
        loss = loss * (1 - label_smoothing) + smoothed
    loss = loss.masked_fill(~kept, 0.0)
    number = kept.sum().reshape(1).clamp(min=1)
    reduced = loss.sum() / number if reduce_loss else loss.reshape(_input.shape[:2])
    if overwrite_input is None:
        gradient = _gradient(logits, labels, rows, rank * columns, columns * size, label_smoothing)
        gradient = gradient.masked_fill(~kept[:, None], 0.0) / (number if reduce_loss else 1)
        return reduced, gradient.view(_input.shape)
    saved = _input if overwrite_input else _input.detach().clone(memory_format=torch.contiguous_format)
    statistics = torch.stack((rows.largest, rows.exponentials), dim=1)
    return reduced, saved, statistics, target.contiguous(), number if reduce_loss else None, rank, size


def cross_entropy_backward(
    saved: torch.Tensor, *arguments: Any, is_cg_capturable: bool = False
) -> torch.Tensor:
    """Return the gradient (B, S, local vocabulary) of the logits, written over ``saved``.

    TransformerEngine 2.19 and later pass logits, statistics, target, number of targets, the gradient of the loss, label
    smoothing, whether the loss is reduced, rank, size, the ignored target. TransformerEngine 2.18 passes the gradient
    that forward returned, and the gradient of the loss.
    """
    del is_cg_capturable
    if len(arguments) <= 2:
        return saved.mul_(
            arguments[0].reshape(-1, 1) if arguments[0].numel() == 1 else arguments[0][..., None]
        )
    statistics, target, number, of_loss, smoothing, reduced, rank, size, ignored = arguments
    logits, labels = saved.detach().flatten(0, 1), target.reshape(-1)
    columns = logits.shape[1]
    rows = _Rows(statistics[:, 0], statistics[:, 1], statistics[:, 0], statistics[:, 0])
    gradient = _gradient(logits.float(), labels, rows, rank * columns, columns * size, smoothing)
    factor = (of_loss.float() / number).reshape(1, 1) if reduced else of_loss.reshape(-1, 1).float()
    logits.copy_((gradient * factor).masked_fill((labels == ignored)[:, None], 0.0))
    return saved


def _place(group: Any) -> tuple[int, int]:
    """Return the rank in a group, and its size."""
    return dist.get_rank(group), dist.get_world_size(group)


__all__ = ["cross_entropy_backward", "cross_entropy_forward"]
