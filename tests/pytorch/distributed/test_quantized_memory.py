"""Bytes of memory for quantized weights.

They are those of components and of the optimizer's state, nothing else.

On the CPU every live tensor of the process is counted; on GPUs the allocator is queried, too. `memory.PER_WEIGHT`,
`memory.OPTIMIZER` and `memory.COLLECTIVES` state what comes on top.
"""

from __future__ import annotations

import pytest
from quantization import memory

#: Bytes that torch and NCCL may keep allocated on a GPU after the warm-up; a leaked weight as below has 16 MiB.
SLACK = 2**21
CASES = {
    "delayed-dp2": {"recipe": "delayed"},
    "current-dp2-small": {"recipe": "current", "hidden": 48, "middle": 16},
    "mxfp8-dp2-cut_by_columns": {"recipe": "mxfp8", "hidden": 384, "middle": 352},
    "mxfp8-dp2-from_the_device": {"recipe": "mxfp8", "meta": False},
    "mxfp8-dp2-torchs_fully_shard": {"recipe": "mxfp8", "route": "torch's"},
    "mxfp8-tp2": {"recipe": "mxfp8", "tp": 2},
    "block-dp2": {"recipe": "block"},
    "block-hsdp2x1": {"recipe": "block", "dp_replicate": 2, "meta": False},
    "block-dp2-gathered_until_backward": {"recipe": "block", "reshard": False},
    "block-dp2-evaluated": {"recipe": "block", "reshard": False, "evaluate": True},
    "nvfp4-dp2": {"recipe": "nvfp4"},
}


def unaccounted(stage: dict) -> int:
    """Return the bytes beyond the declared ones."""
    return stage["live"] - stage["held"] - stage["overhead"]


def check(results: list[dict]) -> None:
    """Check that no byte is too many after initialisation, after steps, and after a reload of the weights."""
    for rank, outcome in enumerate(results):
        for name, stage in outcome.items():
            assert 0 <= unaccounted(stage) <= memory.COLLECTIVES, (rank, name, stage)
            assert stage["reported"] == stage["parameters"] > 0
        assert outcome["step"]["held"] > outcome["init"]["held"]  # the optimizer's state is there


@pytest.mark.covering(
    # Columns that are sent in separate buffers; weights that were quantized before they were sharded, by us too.
    # Weights that an evaluation has left gathered.
    always=[
        {"case": case}
        for case in (
            "mxfp8-dp2-cut_by_columns",
            "mxfp8-dp2-torchs_fully_shard",
            "mxfp8-dp2-from_the_device",
            "block-dp2-evaluated",
        )
    ],
    strength=0,
)
@pytest.mark.ranks(2)
@pytest.mark.cpu
@pytest.mark.parametrize("case", CASES)
def test_every_byte_is_accounted_for(pool, case):
    check(pool.run(memory.unaccounted_bytes, 2, **CASES[case]))


@pytest.mark.arch("9.0")
@pytest.mark.cpu
@pytest.mark.ranks(2)
@pytest.mark.parametrize("recipe", ["current", "delayed", "block"])
def test_memory_of_hopper_transposes(pool, recipe):
    """Check that transposes of shards and of unsharded weights are counted where they are stored."""
    check(pool.run(memory.unaccounted_bytes, 2, recipe=recipe))


@pytest.mark.cpu
@pytest.mark.ranks(2)
def test_negative_control_memory_without_savings(pool):
    """Negative controls: FSDP2's dequantized flat shards, and columnwise bytes that TE derived from gathered ones."""
    for meta, stages in ((True, ["step"]), (False, ["init", "step"])):
        for outcome in pool.run(memory.unaccounted_bytes, 2, recipe="mxfp8", fault="flat", meta=meta):
            for stage in (outcome[name] for name in stages):
                # Two bytes for each of half the values.
                assert 0 <= unaccounted(stage) - 2 * stage["full"] // 2 <= memory.COLLECTIVES, stage
    for recipe in ("block", "nvfp4"):
        for outcome in pool.run(memory.unaccounted_bytes, 2, recipe=recipe, fault="derived"):
            assert unaccounted(outcome["step"]) > outcome["step"]["full"] // 4, outcome["step"]


@pytest.mark.gpu
@pytest.mark.ranks(2)
@pytest.mark.parametrize("recipe", ["delayed", "current", "block"])
@pytest.mark.parametrize("reshard", [True, False])
def test_allocator_bytes_equal_tensor_bytes(pool, recipe, reshard):
    """Check that the allocator's bytes equal those of live tensors, rounded up to its blocks, plus a small slack."""
    results = pool.run(memory.unaccounted_bytes, 2, recipe=recipe, reshard=reshard, hidden=4096, middle=4096)
    for rank, outcome in enumerate(results):
        for name, stage in outcome.items():
            assert unaccounted(stage) <= SLACK, (rank, name, stage)
            most = stage["live"] + stage["tensors"] * memory.CUDA_BLOCK + SLACK
            assert stage["held"] <= stage["allocated"] <= most, (rank, name, stage)
