"""Write a checkpoint with the code of an earlier version of te_fsdp, for tests/unit/test_old_checkpoints.py.

Run in a checkout of that version, first with four processes, then with one, which also writes plain DCP and digests:

    torchrun --nproc-per-node 4 write.py FOLDER
    torchrun --nproc-per-node 1 write.py FOLDER
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

import te_fsdp.emulation

te_fsdp.emulation.install("9.0")

import transformer_engine.pytorch as te  # noqa: E402
from transformer_engine.common.recipe import Float8CurrentScaling  # noqa: E402

import te_fsdp  # noqa: E402

folder, ranks = Path(sys.argv[1]), int(os.environ["WORLD_SIZE"])
meshes = te_fsdp.Meshes.build(dp_shard=max(ranks // 2, 1), tp=min(ranks, 2), device_type="cpu")
recipe = Float8CurrentScaling()


def mlp() -> te.LayerNormMLP:
    """Return a gated MLP on meta."""
    return te.LayerNormMLP(
        32,
        32,
        activation="swiglu",
        set_parallel_mode=True,
        params_dtype=torch.bfloat16,
        device="meta",
        **meshes.te_kwargs(),
    )


first = mlp()
with te.quantized_model_init(recipe=recipe, preserve_high_precision_init_val=True):
    second = mlp()
model = torch.nn.Sequential(first, second)
te_fsdp.fully_shard(model, meshes, units=[te.LayerNormMLP])
te_fsdp.materialize(model, seed=0)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
te_fsdp.main_weights(model, optimizer)
if ranks > 1:
    for step in range(2):
        torch.manual_seed(10 * step + int(os.environ["RANK"]) // 2)
        with te.autocast(enabled=True, recipe=recipe):
            model(torch.randn(32, 32).bfloat16()).float().pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    te_fsdp.checkpoint.save(folder / "te", model, optimizer, extra={"step": 2})
else:
    te_fsdp.checkpoint.load(folder / "te", model, optimizer)
    dcp.save(model.state_dict(), checkpoint_id=folder / "dcp")


def bits(tensor: torch.Tensor) -> str:
    """Return the digest of a tensor's values in FP32."""
    local = getattr(tensor, "_local_tensor", tensor)
    full = local.dequantize() if hasattr(local, "dequantize") and type(local) is not torch.Tensor else local
    return hashlib.sha256(full.detach().float().contiguous().numpy().tobytes()).hexdigest()[:16]


if ranks == 1:
    found = {name: bits(parameter) for name, parameter in model.named_parameters()}
    states = {}
    for name, parameter in model.named_parameters():
        for key, value in optimizer.state[parameter].items():
            states[f"{name} {key}"] = bits(torch.as_tensor(value) if not torch.is_tensor(value) else value)
    (folder / "digests.json").write_text(
        json.dumps({"parameters": found, "optimizer": states}, indent=1, sort_keys=True) + "\n"
    )
dist.barrier()
dist.destroy_process_group()
