"""Router of a mixture of experts: scores, the best experts, the balancing loss (``common/fused_router``).

All arithmetic is fp32. Logits are (tokens, experts), with any leading dimensions.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional

from te_fsdp.emulation._errors import EmulationError
from te_fsdp.emulation.tex.enums import NVTERoutingMapFormat

#: Added to a sum that scores are divided by.
_EPSILON = 1e-20


def _scores(logits: torch.Tensor, score_function: str) -> torch.Tensor:
    """Return the scores of fp32 logits."""
    if score_function == "softmax":
        return logits.softmax(-1)
    if score_function == "sigmoid":
        return logits.sigmoid()
    if score_function == "sqrtsoftplus":
        return functional.softplus(logits).sqrt()
    raise EmulationError(f"unknown score function {score_function!r} of the router")


def _of_logits(logits: torch.Tensor, of_scores: torch.Tensor, score_function: str) -> torch.Tensor:
    """Return the gradient of the logits, given that of the scores."""
    scores = _scores(logits, score_function)
    if score_function == "softmax":
        return scores * (of_scores - (of_scores * scores).sum(-1, keepdim=True))
    if score_function == "sigmoid":
        return of_scores * scores * (1 - scores)
    return of_scores * logits.sigmoid() / (2 * scores)


def _of_normalized(values: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    """Return the gradient of ``values`` that were divided by their sum, given that of the quotients."""
    total = values.sum(-1, keepdim=True) + _EPSILON
    return gradient / total - (gradient * values).sum(-1, keepdim=True) / total.square()


def _best(values: torch.Tensor, topk: int, groups: int | None, group_topk: int | None) -> torch.Tensor:
    """Return the indices (tokens, top-k) of the largest values, in the best ``group_topk`` of ``groups`` if given."""
    if groups and group_topk:
        grouped = values.unflatten(-1, (groups, -1))
        of_groups = grouped.topk(topk // group_topk, dim=-1).values.sum(-1)
        chosen = torch.zeros_like(of_groups, dtype=torch.bool)
        chosen.scatter_(-1, of_groups.topk(group_topk, dim=-1).indices, True)
        values = grouped.masked_fill(~chosen[..., None], float("-inf")).flatten(-2)
    return values.topk(topk, dim=-1).indices


def _routing_map(indices: torch.Tensor, experts: int, format: int) -> torch.Tensor:
    """Return the mask (tokens, experts) of indices as bool, or with one bit per expert."""
    mask = torch.zeros(*indices.shape[:-1], experts, dtype=torch.bool, device=indices.device)
    mask.scatter_(-1, indices, True)
    if format == int(NVTERoutingMapFormat.BYTEMAP):
        return mask
    padded = functional.pad(mask, (0, -experts % 8)).unflatten(-1, (-1, 8))
    return (padded << torch.arange(8, device=mask.device)).sum(-1).to(torch.uint8)


def _mask(routing_map: torch.Tensor, experts: int, dense: bool, format: int) -> torch.Tensor:
    """Return the bool mask (tokens, experts) of a routing map, or of indices (tokens, top-k) if ``dense``."""
    if dense:
        mask = torch.zeros(*routing_map.shape[:-1], experts, dtype=torch.bool, device=routing_map.device)
        return mask.scatter_(-1, routing_map.long(), True)
    if format == int(NVTERoutingMapFormat.BYTEMAP):
        return routing_map.bool()
    bits = (routing_map[..., None] >> torch.arange(8, device=routing_map.device)) & 1
    return bits.flatten(-2)[..., :experts].bool()


def fused_topk_with_score_function_fwd(
    logits: torch.Tensor,
    topk: int,
    use_pre_softmax: bool,
    num_groups: int | None,
    group_topk: int | None,
    scaling_factor: float | None,
    score_function: str,
    expert_bias: torch.Tensor | None,
    routing_map_format: int = int(NVTERoutingMapFormat.BYTEMAP),
    topk_indices: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return probabilities (tokens, experts), zero where not routed, the routing map, and fp32 logits for backward.

    ``expert_bias`` decides which experts are chosen, and changes no probability. ``topk_indices`` is written to.
    """
    wide = logits.detach().float()
    after = score_function == "softmax" and not use_pre_softmax
    scores = wide if after else _scores(wide, score_function)
    if expert_bias is not None and score_function == "softmax":
        raise EmulationError("the router takes expert_bias with sigmoid or sqrtsoftplus scores")
    biased = scores if expert_bias is None else scores + expert_bias.float()
    indices = _best(biased, topk, num_groups, group_topk)
    chosen = scores.gather(-1, indices)
    if after:
        chosen = chosen.softmax(-1)
    elif score_function != "softmax" and topk > 1:
        chosen = chosen / (chosen.sum(-1, keepdim=True) + _EPSILON)
    chosen = chosen * (1.0 if scaling_factor is None else scaling_factor)
    probs = torch.zeros_like(wide).scatter_(-1, indices, chosen).to(logits.dtype)
    if topk_indices is not None:
        topk_indices.copy_(indices)
        return probs, topk_indices, wide
    return probs, _routing_map(indices, logits.shape[-1], int(routing_map_format)), wide


def fused_topk_with_score_function_bwd(
    routing_map: torch.Tensor,
    intermediate_output: torch.Tensor,
    grad_probs: torch.Tensor,
    grad_logits: torch.Tensor,
    topk: int,
    use_pre_softmax: bool,
    scaling_factor: float | None,
    score_function: str,
    use_dense_indices: bool = False,
    routing_map_format: int = int(NVTERoutingMapFormat.BYTEMAP),
) -> None:
    """Write the gradient of :func:`fused_topk_with_score_function_fwd` to ``grad_logits``."""
    logits = intermediate_output
    mask = _mask(routing_map, logits.shape[-1], use_dense_indices, int(routing_map_format))
    gradient = grad_probs.float() * mask * (1.0 if scaling_factor is None else scaling_factor)
    if score_function == "softmax" and not use_pre_softmax:
        # The logits of other experts had no part in the softmax.
        found = _of_logits(logits.masked_fill(~mask, float("-inf")), gradient, "softmax")
    else:
        if score_function != "softmax" and topk > 1:
            gradient = _of_normalized(_scores(logits, score_function) * mask, gradient) * mask
        found = _of_logits(logits, gradient, score_function)
    grad_logits.copy_(found)


def fused_score_for_moe_aux_loss_fwd(
    logits: torch.Tensor,
    topk: int,
    score_function: str,
    routing_map_format: int = int(NVTERoutingMapFormat.BYTEMAP),
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return fp32 scores that sum to one per token, the routing map of the largest ones, and fp32 logits."""
    wide = logits.detach().float()
    scores = _scores(wide, score_function)
    if score_function != "softmax" and topk > 1:
        scores = scores / (scores.sum(-1, keepdim=True) + _EPSILON)
    indices = scores.topk(topk, dim=-1).indices
    return scores, _routing_map(indices, logits.shape[-1], int(routing_map_format)), wide


def fused_score_for_moe_aux_loss_bwd(
    intermediate_output: torch.Tensor,
    grad_scores: torch.Tensor,
    grad_logits: torch.Tensor,
    topk: int,
    score_function: str,
) -> None:
    """Write the gradient of :func:`fused_score_for_moe_aux_loss_fwd` to ``grad_logits``."""
    gradient = grad_scores.float()
    if score_function != "softmax" and topk > 1:
        gradient = _of_normalized(_scores(intermediate_output, score_function), gradient)
    grad_logits.copy_(_of_logits(intermediate_output, gradient, score_function))


def fused_moe_aux_loss_fwd(
    probs: torch.Tensor,
    tokens_per_expert: torch.Tensor,
    total_num_tokens: Any,
    num_experts: int,
    num_rows: int,
    num_cols: int,
    topk: int,
    coeff: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the balancing loss, a scalar in the dtype of ``probs`` (tokens, experts), and its fp32 coefficient.

    ``coeff x experts / (top-k x total tokens^2) x sum over experts of (sum of probabilities x tokens of the expert)``.
    """
    del num_rows, num_cols
    total = float(total_num_tokens)
    factor = torch.tensor(
        num_experts * coeff / topk / total / total, dtype=torch.float32, device=probs.device
    )
    loss = (probs.float().sum(0) * tokens_per_expert.float()).sum() * factor
    return loss.to(probs.dtype), factor


def fused_moe_aux_loss_bwd(
    Const_buf: torch.Tensor,
    tokens_per_expert: torch.Tensor,
    num_rows: int,
    num_cols: int,
    grad_aux_loss: torch.Tensor,
) -> torch.Tensor:
    """Return the gradient of ``probs``, in the dtype of ``grad_aux_loss``."""
    of_column = Const_buf * tokens_per_expert.float() * grad_aux_loss.float()
    return of_column.expand(num_rows, num_cols).to(grad_aux_loss.dtype).contiguous()


fused_moe_aux_loss_fwd_graph_safe = fused_moe_aux_loss_fwd

__all__ = [
    "fused_moe_aux_loss_bwd",
    "fused_moe_aux_loss_fwd",
    "fused_moe_aux_loss_fwd_graph_safe",
    "fused_score_for_moe_aux_loss_bwd",
    "fused_score_for_moe_aux_loss_fwd",
    "fused_topk_with_score_function_bwd",
    "fused_topk_with_score_function_fwd",
]
