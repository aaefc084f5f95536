"""``set_model_state_dict(broadcast_from_rank0=True, cpu_offload=True)`` of quantized models."""

from __future__ import annotations

import pytest
from plain_dcp import cpu_offload


@pytest.mark.ranks(2)
@pytest.mark.parametrize("sharder", ["torch", "te_fsdp"])
@pytest.mark.parametrize(
    ("kind", "axes"), [("gated MLP", {"dp_shard": 1, "tp": 2}), ("Linear", {"dp_shard": 2})]
)
@pytest.mark.parametrize("recipe", ["current", "delayed", "nvfp4"])
def test_broadcast_with_cpu_offload_quantizes_values(pool, recipe, kind, axes, sharder):
    """Check that values are quantized although torch replaces entries by high-precision copies."""
    where = {"kind": kind, "recipe": recipe, "axes": axes, "sharder": sharder}
    for found in pool.run(cpu_offload.broadcast, 2, **where):
        assert found == {"control": True, "same output": True, "wrong": []}
