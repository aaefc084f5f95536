"""Which attention backend TE would pick: the only place that asks TE's private selection. TE 2.18 to 2.20."""

from __future__ import annotations

import importlib
import logging
from typing import Any

import torch

__all__ = ["choice"]


class _Lines(logging.Handler):
    """Keeps what TE logs while it chooses: its reasons."""

    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keep one line."""
        if not record.getMessage().startswith("Running with config"):  # the question, not a reason
            self.lines.append(record.getMessage())


def choice(*, heads: int, groups: int, head_dim: int, sequence: int) -> dict[str, Any]:
    """What TE's ``DotProductAttention`` would run in bf16 with a causal mask, with TE's own reasons. Local.

    Args:
        heads: Attention heads of the query.
        groups: Heads of key and value.
        head_dim: Elements of a head.
        sequence: Tokens.

    Returns:
        ``backend`` ("flash", "fused", "unfused" or "none") and ``reasons``, the lines that TE logs about it.

    Raises:
        ImportError, AttributeError, TypeError: This TE selects in another way.
    """
    module = importlib.import_module("transformer_engine.pytorch.attention.dot_product_attention.utils")
    asked = module.AttentionParams(
        qkv_dtype=torch.bfloat16,
        qkv_layout="bshd_bshd_bshd",
        num_heads=heads,
        num_gqa_groups=groups,
        head_dim_qk=head_dim,
        head_dim_v=head_dim,
        max_seqlen_q=sequence,
        max_seqlen_kv=sequence,
        attn_mask_type="causal",
        window_size=(-1, 0),
    )
    seen, logger = _Lines(), logging.getLogger("DotProductAttention")
    logs = module.AttentionLogging
    level, propagate = logs._log_level, logger.propagate
    logger.addHandler(seen)
    logs._log_level = logging.DEBUG  # the selection sets its logger to this at each call
    logger.propagate = False
    try:
        found = module.get_attention_backend(asked)
    finally:
        logger.removeHandler(seen)
        logs._log_level = level
        logger.propagate = propagate
    # (flash, which flash, fused, which fused, unfused, all that could): TE 2.18 and later
    names = {"flash": found[0], "fused": found[2], "unfused": found[4]}
    return {"backend": next((name for name, taken in names.items() if taken), "none"), "reasons": seen.lines}
