"""State dicts that mix DTensors with quantized weights.

Flat states of experts in either form are tested, too.
"""

from __future__ import annotations

import pytest
from plain_dcp import mixed_state_dicts

ENVIRONMENT = {"NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0", "NVTE_GROUPED_LINEAR_SINGLE_PARAM": "1"}


@pytest.mark.ranks(4)
@pytest.mark.covering(strength=1, always=[{"recipe": "current", "sharder": "torch"}])
@pytest.mark.parametrize("sharder", ["torch", "te_fsdp"])
@pytest.mark.parametrize("recipe", ["current", "delayed", "block", "mxfp8", "nvfp4"])
def test_copy_of_dtensors_into_quantized_parameters(pool, recipe, sharder):
    """Check that copies without ``load_state_dict`` are quantized at once, before the next forward reads old bytes."""
    pool.arch = "9.0" if recipe == "block" else "10.0"
    axes = {"dp_shard": 2, "tp": 2}
    for found in pool.run(
        mixed_state_dicts.quantized_copies, 4, recipe=recipe, axes=axes, sharder=sharder, env=ENVIRONMENT
    ):
        # Outputs differ by sums of ranks in bf16; older bytes would differ by the size of the change.
        assert found["wrong"] == [] and found["error"] < 0.1, found


@pytest.mark.ranks(2)
@pytest.mark.single_grouped
@pytest.mark.parametrize(("source", "target"), [("experts", "one parameter"), ("one parameter", "experts")])
def test_flat_optimizer_state_between_expert_forms(pool, tmp_path, source, target):
    """Check group options, which a flattened state dict stores by parameter name. Names differ between both forms."""
    where = {"source": source, "target": target, "directory": str(tmp_path)}
    for found in pool.run(mixed_state_dicts.flat_states, 2, env=ENVIRONMENT, **where):
        assert found["wrong"] == [] and found["states"] > 0 and found["lr"] == 0.5, found


@pytest.mark.ranks(4)
def test_broadcast_of_experts_with_cpu_offload(pool):
    """Check torch's load options under expert parallelism, where each rank has different experts."""
    assert pool.run(mixed_state_dicts.broadcast_experts, 4, axes={"ep": 4}, env=ENVIRONMENT) == [[]] * 4
