"""Body: options of ``iter_weights`` that differ between ranks."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from checkpointing.rollout import trained


def error_of_different_options(folder: str, option: str) -> int:
    """Stream with a different value of an option on rank 1, or with equal ones for ``""``."""
    from te_fsdp import huggingface as rollout

    model, optimizer, _ = trained(folder, {"axes": {"dp_shard": 2}, "layers": {"fuse_qkv_params": True}}, 0)
    first = rollout.iter_weights(model, optimizer, config=folder)
    names = len(list(first))
    values = {"format": "bf16", "receiver": 1, "bucket_bytes": 3_000, "since": first}
    given: dict[str, Any] = {option: values[option]} if option and dist.get_rank() else {}
    assert len(list(rollout.iter_weights(model, optimizer, config=folder, **given))) == names
    return names
