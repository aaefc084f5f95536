"""Permutation of the tokens of experts by indices (``common/permutation``).

The map (top-k x tokens,) has at ``[k * tokens + token]`` the row of the permuted tensor that holds the token for its
k-th expert, -1 if the token was dropped.
"""

from __future__ import annotations

from typing import Any

import torch


def moe_permute_fwd(
    input: torch.Tensor,
    dtype: Any,
    indices: torch.Tensor,
    num_out_tokens: int,
    workspace: list[torch.Tensor],
    max_expanded_token_num: int,
) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
    """Return the tokens (rows, hidden) sorted by expert, their map, and the workspace.

    ``indices`` (tokens, top-k) are experts. Rows from ``num_out_tokens`` on are dropped; 0 keeps all.
    """
    del dtype, max_expanded_token_num
    tokens, topk = indices.shape
    order = indices.reshape(-1).sort(stable=True).indices
    kept = num_out_tokens if num_out_tokens > 0 else len(order)
    rows = torch.arange(len(order), dtype=torch.int32, device=input.device)
    row_id_map = torch.empty_like(rows)
    row_id_map[(order % topk) * tokens + order // topk] = rows.where(rows < kept, -1)
    return input[order[:kept] // topk], row_id_map, workspace


def moe_unpermute_fwd(
    input: torch.Tensor, dtype: Any, row_id_map: torch.Tensor, prob: torch.Tensor, num_tokens: int, topk: int
) -> torch.Tensor:
    """Return the fp32 sum of each token's rows, weighted by ``prob`` (tokens, top-k) unless that is empty."""
    del dtype
    rows = row_id_map.view(topk, num_tokens).long()
    values = input[rows.clamp(min=0)].float() * (rows >= 0)[..., None]
    if prob.numel():
        values = values * prob.T.float()[..., None]
    return values.sum(0).to(input.dtype)


def moe_permute_bwd(
    input: torch.Tensor, dtype: Any, row_id_map: torch.Tensor, prob: torch.Tensor, num_tokens: int, topk: int
) -> torch.Tensor:
    """Return the gradient (tokens, hidden) of :func:`moe_permute_fwd`."""
    return moe_unpermute_fwd(input, dtype, row_id_map, prob, num_tokens, topk)


def moe_unpermute_bwd(
    input_bwd: torch.Tensor, input_fwd: torch.Tensor, dtype: Any, row_id_map: torch.Tensor, prob: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the gradients of :func:`moe_unpermute_fwd`: of the rows, and of ``prob`` in fp32."""
    del dtype
    tokens, topk = prob.shape if prob.numel() else (len(row_id_map), 1)
    rows = row_id_map.view(topk, tokens).long()
    is_kept = rows >= 0
    gradient = input_bwd.float().expand(topk, *input_bwd.shape)
    weighted = gradient * prob.T.float()[..., None] if prob.numel() else gradient
    output = torch.zeros_like(input_fwd)
    output[rows[is_kept]] = weighted[is_kept].to(output.dtype)
    of_prob = (input_fwd[rows.clamp(min=0)].float() * gradient).sum(-1) * is_kept
    return output, of_prob.T.contiguous()


__all__ = ["moe_permute_bwd", "moe_permute_fwd", "moe_unpermute_bwd", "moe_unpermute_fwd"]
