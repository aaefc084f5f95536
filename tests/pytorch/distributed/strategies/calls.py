"""How many of te_fsdp's own functions a settled step calls."""

from __future__ import annotations

import os
import sys
from collections import Counter
from types import FrameType
from typing import Any

import harness
import torch

import te_fsdp

OPTIONS = {
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "fuse_qkv_params": True,
    "set_parallel_mode": True,
}


def settled(axes: dict[str, int]) -> list[tuple[str, int]]:
    """Functions of te_fsdp that the third step of a training calls, and how often, most calls first.

    Two TransformerLayers with FP8 weights (current scaling, 24 parameters), fully sharded, AdamW with main weights.
    """
    import transformer_engine.pytorch as te
    from transformer_engine.common.recipe import Float8CurrentScaling

    recipe, meshes = Float8CurrentScaling(), te_fsdp.Meshes.build(**axes)
    options = {**OPTIONS, "device": "meta", "params_dtype": torch.bfloat16, **meshes.te_kwargs()}
    with te.quantized_model_init(recipe=recipe):
        model = torch.nn.Sequential(*[te.TransformerLayer(64, 128, 4, **options) for _ in range(2)])
    te_fsdp.fully_shard(model, meshes)
    te_fsdp.materialize(model, seed=0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    te_fsdp.main_weights(model, optimizer)
    root = os.path.dirname(te_fsdp.__file__) + os.sep
    calls: Counter[str] = Counter()

    def count(frame: FrameType, event: str, _: Any) -> None:
        name = frame.f_code.co_filename
        if event == "call" and name.startswith(root) and not name.startswith(f"{root}emulation"):
            calls[f"{name[len(root) :]}:{frame.f_code.co_name}"] += 1

    for profile in (None, None, count):
        torch.manual_seed(0)
        sys.setprofile(profile)
        try:
            with te.autocast(enabled=True, recipe=recipe):
                output = model(torch.randn(16, 2, 64, dtype=torch.bfloat16, device=harness.device()))
            output.float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        finally:
            sys.setprofile(None)
    return calls.most_common()
