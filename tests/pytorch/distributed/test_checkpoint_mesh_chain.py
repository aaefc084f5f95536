"""A run with FP8 weights that moves from mesh to mesh (2 x tp 2, tp 4, 4 shards, one process).

Its main weights are in FP32.
"""

from __future__ import annotations

import math

import pytest
from checkpointing import chain
from checkpointing.selection import is_full

CHAIN: dict[str, dict[str, int] | None] = {
    "dp2xtp2": {"dp_shard": 2, "tp": 2},
    "tp4": {"dp_shard": 1, "tp": 4},
    "dp4": {"dp_shard": 4},
    "one": None,
}
# Losses of bf16 activations that are quantized to 8 bits: sums in a different order move a loss by a few units in the
# last place of bf16. Delayed scaling clips the first gradients after a change to more data-parallel ranks, whose
# gradients are larger than its history has seen (means over fewer tokens): measured 3.3 % of a loss on the CPU.
TOLERANCE = {"current": 2**-6, "block": 2**-6, "mxfp8": 2**-6, "none": 2**-7, "delayed": 2**-4}


def run_body(pool, body, mesh: str, **kwargs):
    """Run a body; on GPUs with kernels that always add in the same order."""
    axes = CHAIN[mesh]
    environment = {"NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0"}
    return pool.run(body, math.prod((axes or {}).values()), env=environment, axes=axes, **kwargs)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Parametrize one format with one scale per weight and one with blocks; all with `--matrix full` and on GPUs."""
    if "recipe" in metafunc.fixturenames:
        more = ["delayed", "block"] if is_full(metafunc.config) else []
        metafunc.parametrize("recipe", ["current", "mxfp8", *more])


@pytest.mark.ranks(4)
def test_training_continues_through_a_chain_of_meshes(pool, tmp_path, recipe):
    """Check weights, moments and main weights bit for bit. Losses continue as without interruption."""
    whole = run_body(pool, chain.train_uninterrupted, "dp2xtp2", recipe=recipe, links=len(CHAIN))[0]
    for position, mesh in enumerate(CHAIN):
        where = {"directory": str(tmp_path), "recipe": recipe, "position": position}
        expected = whole[position * chain.AFTER : (position + 1) * chain.AFTER]
        for outcome in run_body(pool, chain.continue_on_mesh, mesh, **where):
            assert outcome["wrong"] == [], mesh
            assert outcome["tensors"] > 30 or not position
            assert outcome["losses"] == pytest.approx(expected, rel=TOLERANCE[recipe], abs=0), mesh


@pytest.mark.ranks(4)
def test_negative_control_chain_without_load(pool, tmp_path):
    """Negative control: without the load nothing is equal."""
    where = {"directory": str(tmp_path), "recipe": "current"}
    run_body(pool, chain.continue_on_mesh, "dp2xtp2", position=0, **where)
    for outcome in run_body(pool, chain.continue_on_mesh, "tp4", position=1, spoil=True, **where):
        assert len(outcome["wrong"]) > 10
