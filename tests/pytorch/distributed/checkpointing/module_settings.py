"""Bodies of models with different module settings over tensor parallelism."""

from __future__ import annotations

from typing import Any

import harness
import torch
import torch.distributed as dist
from torch import nn

from checkpointing.mistakes import error_of

FEW, MANY = ({"num_attention_heads": h, "num_gqa_groups": h // 4, "kv_channels": 64 // h} for h in (8, 16))


class UserModule(nn.Module):
    """A user's module with a setting that differs between ranks."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.number, self.factor, self.inner = dist.get_rank(), factor, nn.Linear(2, 2)


def model(tp: int, **kwargs: Any) -> nn.Module:
    """Return a layer on a mesh; without tensor parallelism sharded over data."""
    import transformer_engine.pytorch as te

    import te_fsdp

    meshes = te_fsdp.Meshes.build(dp_shard=2 // tp, tp=tp, device_type=harness.device_type())
    settings = {
        **FEW,
        "activation": "swiglu",
        "fuse_qkv_params": True,
        "qkv_weight_interleaved": False,
        **kwargs,
    }
    layer = te.TransformerLayer(
        64, 64, device="meta", set_parallel_mode=True, **settings, **meshes.te_kwargs()
    )
    # Otherwise it compares the settings between ranks itself.
    te_fsdp.fully_shard(layer, meshes, checks="off")
    return te_fsdp.materialize(layer)


def load_different_settings(directory: str) -> dict[str, tuple[str, str]]:
    """Check that other settings are refused on every rank with nothing changed, and the same settings load silently."""
    import te_fsdp

    te_fsdp.checkpoint.save(f"{directory}/a", model(tp=2))
    loaded = te_fsdp.checkpoint.load(f"{directory}/a", model(tp=1))
    assert loaded.is_complete and not loaded.notes, "a mesh is no difference"
    results = {}
    for name, settings in {
        "heads": MANY,
        "rows": {"qkv_weight_interleaved": True},
        "activation": {"activation": "geglu"},
        # One rank alone: all must hear of it before anything is read.
        "one rank": {"layernorm_epsilon": 1e-3 if dist.get_rank() == 1 else 1e-5},
    }.items():
        for tp in (2, 1):
            other = model(tp, **settings)
            before = [harness.full(p).clone() for p in other.parameters()]
            results[f"{name}, tp={tp}"] = error_of(
                lambda other=other: te_fsdp.checkpoint.load(f"{directory}/a", other)
            )
            after = [harness.full(p) for p in other.parameters()]
            assert all(map(torch.equal, before, after)), "nothing was loaded"
    te_fsdp.checkpoint.save(f"{directory}/own", UserModule(1.0))
    assert te_fsdp.checkpoint.load(f"{directory}/own", UserModule(2.0)).notes == [
        "factor: saved 1.0, model has 2.0"
    ]
    apart = model(2, layernorm_epsilon=1e-3 if dist.get_rank() == 1 else 1e-5)
    results["save"] = error_of(lambda: te_fsdp.checkpoint.save(f"{directory}/b", apart))
    return results
