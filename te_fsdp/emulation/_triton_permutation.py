"""TransformerEngine's Triton kernels that permute the tokens of experts (``pytorch/triton/permutation.py``).

A row map (tokens, 2 x experts + 1) has for each token the rows of the permuted tensor that hold it, largest first, then
the experts of these rows, and in the last column their number.
"""

from __future__ import annotations

import torch

from te_fsdp.emulation._errors import EmulationError


def make_row_id_map(routing_map: torch.Tensor, num_tokens: int, num_experts: int) -> torch.Tensor:
    """Return the row map of a routing mask (tokens, experts); rows are sorted by expert, then by token."""
    mask = routing_map.reshape(num_tokens, num_experts) != 0
    by_expert = mask.T.reshape(-1)
    rows = (by_expert.cumsum(0) - 1).where(by_expert, -1).view(num_experts, num_tokens).T
    ordered, experts = rows.sort(dim=1, descending=True, stable=True)
    experts = experts.where(ordered >= 0, -1)
    return torch.cat((ordered, experts, mask.sum(1, keepdim=True)), dim=1).to(torch.int32)


def _routed(
    row_id_map: torch.Tensor, pad_offsets: torch.Tensor | None, num_experts: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return tokens, rows and experts of all routed pairs, token by token in the order of the map."""
    number = row_id_map[:, -1:].long()
    is_routed = torch.arange(num_experts, device=row_id_map.device) < number
    tokens = is_routed.nonzero()[:, 0]
    rows = row_id_map[:, :num_experts][is_routed].long()
    experts = row_id_map[:, num_experts:-1][is_routed].long()
    return tokens, rows if pad_offsets is None else rows + pad_offsets[experts].long(), experts


def permute_with_mask_map(
    inp: torch.Tensor,
    row_id_map: torch.Tensor,
    probs: torch.Tensor | None,
    scale: torch.Tensor | None,
    pad_offsets: torch.Tensor | None,
    num_tokens: int,
    num_experts: int,
    num_out_tokens: int,
    hidden_size: int,
    scale_hidden_dim: int | None,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Return tokens, their scales and probabilities in the rows of the map; other rows are zero.

    A token whose probability is zero leaves zeros in its row: such a row is padding of the routing map.
    """
    del num_tokens
    tokens, rows, experts = _routed(row_id_map, pad_offsets, num_experts)
    if len(rows) and int(rows.max()) >= num_out_tokens:
        raise EmulationError(f"{num_out_tokens} rows for permuted tokens, but row {int(rows.max())} is used")
    output = inp.new_zeros(num_out_tokens, hidden_size)
    output[rows] = inp[tokens]
    scales = None
    if scale is not None:
        scales = scale.new_zeros(num_out_tokens, scale_hidden_dim or 0)
        scales[rows] = scale[tokens]
    if probs is None:
        return output, scales, None
    permuted = probs.new_zeros(num_out_tokens)
    permuted[rows] = probs[tokens, experts]
    output[rows[permuted[rows] == 0]] = 0
    return output, scales, permuted


def unpermute_with_mask_map(
    inp: torch.Tensor,
    row_id_map: torch.Tensor,
    merging_probs: torch.Tensor | None,
    permuted_probs: torch.Tensor | None,
    pad_offsets: torch.Tensor | None,
    num_tokens: int,
    num_experts: int,
    hidden_size: int,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the fp32 sum of each token's rows, weighted by ``merging_probs``, and probabilities (tokens, experts)."""
    tokens, rows, experts = _routed(row_id_map, pad_offsets, num_experts)
    values = inp[rows].float()
    if merging_probs is not None:
        values = values * merging_probs[tokens, experts].float()[:, None]
    output = torch.zeros(num_tokens, hidden_size, device=inp.device).index_add_(0, tokens, values)
    probs = None
    if permuted_probs is not None:
        probs = permuted_probs.new_zeros(num_tokens, num_experts)
        probs[tokens, experts] = permuted_probs[rows]
    return output.to(inp.dtype), probs


def unpermute_with_mask_map_bwd_with_merging_probs(
    fwd_output_grad: torch.Tensor,
    row_id_map: torch.Tensor,
    fwd_input: torch.Tensor,
    merging_probs: torch.Tensor,
    pad_offsets: torch.Tensor | None,
    num_tokens: int,
    num_experts: int,
    num_out_tokens: int,
    hidden_size: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the gradients of permuted rows (rows, hidden) and of ``merging_probs`` (tokens, experts)."""
    tokens, rows, experts = _routed(row_id_map, pad_offsets, num_experts)
    gradient = fwd_output_grad[tokens].float()
    output = fwd_output_grad.new_zeros(num_out_tokens, hidden_size)
    output[rows] = (gradient * merging_probs[tokens, experts].float()[:, None]).to(output.dtype)
    of_probs = merging_probs.new_zeros(num_tokens, num_experts)
    of_probs[tokens, experts] = (fwd_input[rows].float() * gradient).sum(1).to(of_probs.dtype)
    return output, of_probs


def make_chunk_sort_map(
    split_sizes: torch.Tensor, sorted_indices: torch.Tensor, num_tokens: int, num_splits: int
) -> torch.Tensor:
    """Return each token's row once the chunks of ``split_sizes`` are in the order ``sorted_indices``, int32.

    Tokens after the last chunk keep their rows.
    """
    del num_splits
    order = sorted_indices.long()
    sizes = split_sizes.long()
    starts = sizes.cumsum(0) - sizes
    moved = torch.empty_like(starts)
    moved[order] = sizes[order].cumsum(0) - sizes[order]
    tokens = torch.arange(num_tokens, device=split_sizes.device)
    shifts = (moved - starts).repeat_interleave(sizes)
    tokens[: len(shifts)] += shifts
    return tokens.to(torch.int32)


def sort_chunks_by_map(
    inp: torch.Tensor,
    row_id_map: torch.Tensor,
    probs: torch.Tensor | None,
    num_tokens: int,
    hidden_size: int,
    is_forward: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return tokens and probabilities in the rows of the map, or back from them."""
    rows = row_id_map.long()

    def moved(tensor: torch.Tensor) -> torch.Tensor:
        if not is_forward:
            return tensor[rows]
        output = torch.empty_like(tensor)
        output[rows] = tensor
        return output

    return moved(inp.reshape(num_tokens, hidden_size)), None if probs is None else moved(probs)


__all__ = [
    "make_chunk_sort_map",
    "make_row_id_map",
    "permute_with_mask_map",
    "sort_chunks_by_map",
    "unpermute_with_mask_map",
    "unpermute_with_mask_map_bwd_with_merging_probs",
]
