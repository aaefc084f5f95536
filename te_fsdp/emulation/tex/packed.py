"""Sequences of different lengths in attention (``csrc/extensions/attention.cpp``).

Layouts: packed (``thd``), padded (``bshd``), and caches of keys and values. ``cu_seqlens`` (batch + 1,) are the
cumulative lengths of sequences that are packed one after the other.
"""

from __future__ import annotations

from typing import Any

import torch

from te_fsdp.emulation._errors import EmulationError
from te_fsdp.emulation.tex.enums import NVTE_QKV_Format


def _places(cu_seqlens: torch.Tensor, limit: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the sequence and the position within it of each packed token."""
    bounds = cu_seqlens.long()
    lengths = bounds.diff()
    if int(lengths.amax()) > limit:
        raise EmulationError(f"a packed sequence of {int(lengths.amax())} tokens, longer than {limit}")
    sequences = torch.arange(len(lengths), device=bounds.device).repeat_interleave(lengths)
    return sequences, torch.arange(len(sequences), device=bounds.device) - bounds[:-1][sequences]


def convert_thd_to_bshd(
    tensor: torch.Tensor, cu_seqlens: torch.Tensor, b: int, max_seq_len: int
) -> torch.Tensor:
    """Return packed tokens (tokens, heads, channels) as (batch, sequence, heads, channels), padded with zeros."""
    sequences, positions = _places(cu_seqlens, max_seq_len)
    if len(tensor) < len(sequences):
        raise EmulationError(f"{len(tensor)} packed tokens, but cu_seqlens ends at {len(sequences)}")
    output = tensor.new_zeros(b, max_seq_len, *tensor.shape[1:])
    output[sequences, positions] = tensor[: len(sequences)]
    return output


def convert_bshd_to_thd(tensor: torch.Tensor, cu_seqlens: torch.Tensor, t: int) -> torch.Tensor:
    """Return the tokens of (batch, sequence, heads, channels) packed as (tokens, heads, channels)."""
    sequences, positions = _places(cu_seqlens, tensor.shape[1])
    output = tensor.new_zeros(t, *tensor.shape[2:])
    output[: len(sequences)] = tensor[sequences, positions]
    return output


def copy_to_kv_cache(
    new_k: torch.Tensor,
    new_v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    page_table: torch.Tensor,
    cu_new_lens: torch.Tensor,
    cu_cached_lens: torch.Tensor,
    qkv_format: Any,
    b: int,
    max_ctx_len: int,
    max_seq_len: int,
    max_pages_per_seq: int,
    is_non_paged: bool,
) -> None:
    """Write new keys and values behind those of each sequence, in caches (pages, page length, heads, channels).

    Without pages the batch is brought into the order of ``page_table`` first. ``cu_cached_lens`` counts the new tokens.
    """
    del max_ctx_len, max_seq_len
    batch = min(b, len(cu_new_lens) - 1)
    new_lengths = cu_new_lens[: batch + 1].diff().tolist()
    lengths = cu_cached_lens[: batch + 1].diff().tolist()
    if is_non_paged:
        order = page_table[:batch].long()
        for cache in (k_cache, v_cache):
            cache[:batch] = cache[order].clone()
    pages = page_table.reshape(-1, max_pages_per_seq)
    for sequence, (new, length) in enumerate(zip(new_lengths, lengths, strict=True)):
        positions = torch.arange(length - new, length)
        page = pages[sequence, positions // k_cache.shape[1]].long()
        page = torch.full_like(page, sequence) if is_non_paged else page
        for source, cache in ((new_k, k_cache), (new_v, v_cache)):
            cache[page, positions % k_cache.shape[1]] = _tokens(
                source, qkv_format, sequence, new, cu_new_lens
            )


def _tokens(
    source: torch.Tensor, format: Any, sequence: int, length: int, bounds: torch.Tensor
) -> torch.Tensor:
    """Return the first tokens of one sequence, (length, heads, channels)."""
    if int(format) == int(NVTE_QKV_Format.NVTE_BSHD):
        return source[sequence, :length]
    if int(format) == int(NVTE_QKV_Format.NVTE_SBHD):
        return source[:length, sequence]
    return source[int(bounds[sequence]) : int(bounds[sequence]) + length]


__all__ = ["convert_bshd_to_thd", "convert_thd_to_bshd", "copy_to_kv_cache"]
