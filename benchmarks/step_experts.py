"""Layers with experts for benchmarks/step.py."""

from __future__ import annotations

import argparse
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
import transformer_engine.pytorch as te
from torch import nn
from torch.distributed.nn.functional import all_to_all_single


class Experts(nn.Module):
    """This rank's experts of a layer, each with as many rows as the others."""

    def __init__(self, options: argparse.Namespace, own: int, **kwargs: Any) -> None:
        super().__init__()
        common = {"bias": False, "params_dtype": torch.bfloat16, **kwargs}
        self.up = te.GroupedLinear(own, options.hidden, 2 * options.ffn, **common)
        self.down = te.GroupedLinear(own, options.ffn, options.hidden, **common)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Map (experts here, rows per expert, hidden) to the same shape."""
        splits = [rows.shape[1]] * rows.shape[0]
        gate, y = self.up(rows.flatten(0, 1), splits).chunk(2, -1)
        return self.down(F.silu(gate) * y, splits).view_as(rows)


class Layer(nn.Module):
    """Attention, then experts, each with a norm before it and a residual connection.

    Every expert gets the same number of tokens, whatever the router finds: a step is then the same work in each run
    and on each mesh, of shapes that are known beforehand, which CUDA graphs need. The router's probabilities weigh the
    results.

    Args:
        options: The command line.
        group: Group over which the experts are distributed; ``None``: every rank has all experts.
        kwargs: Of TE's modules.
    """

    def __init__(self, options: argparse.Namespace, group: dist.ProcessGroup | None, **kwargs: Any) -> None:
        super().__init__()
        self.group, self.ranks = group, 1 if group is None else group.size()
        self.experts_in_all, self.top_k = options.experts, options.top_k
        self.attention = te.MultiheadAttention(
            options.hidden,
            options.heads,
            kv_channels=options.channels,
            num_gqa_groups=options.groups,
            attention_dropout=0.0,
            attn_mask_type="causal",
            input_layernorm=True,
            normalization="RMSNorm",
            bias=False,
            fuse_qkv_params=True,
            params_dtype=torch.bfloat16,
            **kwargs,
        )
        self.norm = te.RMSNorm(options.hidden, dtype=torch.bfloat16, **kwargs)
        plain = {"bias": False, "dtype": torch.bfloat16, **kwargs}
        self.router = nn.Linear(options.hidden, options.experts, **plain)
        self.experts = Experts(options, options.experts // self.ranks, **kwargs)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (sequence, batch, hidden) to the same shape."""
        x = x + self.attention(x)
        tokens = self.norm(x).flatten(0, 1)
        weights = self.router(tokens).float().softmax(-1)
        # Copy n of token t goes to expert t - n, modulo all experts.
        rolled = [tokens.roll(-n, 0) for n in range(self.top_k)]
        rows = torch.cat([self._by_expert(copies) for copies in rolled], 1)
        results = self._back(self.experts(self._there(rows))).chunk(self.top_k, 1)
        mixed = torch.zeros_like(tokens)
        for n, result in enumerate(results):
            mine = weights.roll(-n, 0).unflatten(0, (-1, self.experts_in_all)).diagonal(dim1=1, dim2=2)
            weighed = result.transpose(0, 1) * mine[..., None].to(result.dtype)
            mixed = mixed + weighed.flatten(0, 1).roll(n, 0)
        return x + mixed.view_as(x)

    def _by_expert(self, tokens: torch.Tensor) -> torch.Tensor:
        """Map (tokens, hidden) to (experts, tokens per expert, hidden): token index modulo the experts."""
        return tokens.unflatten(0, (-1, self.experts_in_all)).transpose(0, 1)

    def _there(self, rows: torch.Tensor) -> torch.Tensor:
        """Exchange (all experts, n, hidden) for (own experts, n * ranks, hidden) from all ranks."""
        if self.group is None:
            return rows
        arrived = all_to_all_single(torch.empty_like(rows), rows.contiguous(), group=self.group)
        return arrived.unflatten(0, (self.ranks, -1)).transpose(0, 1).flatten(1, 2)

    def _back(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the rows to their ranks."""
        if self.group is None:
            return rows
        parts = rows.unflatten(1, (self.ranks, -1)).transpose(0, 1).flatten(0, 1).contiguous()
        return all_to_all_single(torch.empty_like(parts), parts, group=self.group)
