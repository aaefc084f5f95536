"""Damaged checkpoints.

Further tests: replicas that differ, bytes on disk, the user's own state on this or a different mesh.
"""

from __future__ import annotations

import os

import pytest
from checkpointing import faults
from checkpointing.models import Case

SEED = int(os.environ.get("TE_FSDP_CORRUPTION_SEED", "4"))
DP2, DP4, TP2 = {"dp_shard": 2}, {"dp_shard": 4}, {"dp_shard": 1, "tp": 2}
DP2_TP2 = {"dp_shard": 2, "tp": 2}
HSDP, HSDP_TP = {"dp_replicate": 2, "dp_shard": 2}, {"dp_replicate": 2, "dp_shard": 2, "tp": 2}
NORM = "layer.self_attention.layernorm_qkv.layer_norm_weight"


@pytest.mark.ranks(2)
def test_random_corruptions_are_detected(pool, tmp_path):
    results = pool.run(faults.corruptions, 2, directory=str(tmp_path), start=SEED, count=60)
    for outcome in results:
        assert outcome["missed"] == [], f"seed {SEED}"
        assert set(outcome["kinds"]) == set(faults.Corruption.KINDS) and sum(outcome["kinds"].values()) == 60


@pytest.mark.ranks(4)
@pytest.mark.parametrize(
    ("axes", "name", "of", "pair"),
    [
        (DP2_TP2, NORM, "model", "rank 3 from rank 2"),
        (DP2_TP2, NORM, "exp_avg", "rank 3 from rank 2"),
        (HSDP, "layer.layernorm_mlp.fc1_weight", "model", "rank 3 from rank 1"),
        (HSDP, "layer.layernorm_mlp.fc2_weight", "master_param", "rank 3 from rank 1"),
    ],
)
def test_save_of_different_replicas_raises(pool, tmp_path, axes, name, of, pair):
    """Check one element that differs by one unit in the last place."""
    results = pool.run(
        faults.save_different_replicas, 4, directory=str(tmp_path), axes=axes, name=name, of=of
    )
    key = f"model.{name}" if of == "model" else f"optimizer.state.{name}.{of}"
    for kind, text in results:
        assert kind == "CheckpointError"
        assert f"save: 1 tensor(s) differ between ranks that must have the same: {key} ({pair})" in text


@pytest.mark.parametrize(
    ("axes", "ranks", "case"),
    [
        pytest.param(DP2_TP2, 4, Case(stacked=True), id="dp2xtp2", marks=pytest.mark.ranks(4)),
        pytest.param(TP2, 2, Case(stacked=True, optimizer="fused"), id="tp2", marks=pytest.mark.ranks(2)),
        pytest.param(
            HSDP_TP, 8, Case(stacked=True, optimizer="fused"), id="hsdp", marks=pytest.mark.ranks(8)
        ),
    ],
)
def test_replicas_are_written_once(pool, tmp_path, axes, ranks, case):
    for outcome in pool.run(faults.bytes_on_disk, ranks, directory=str(tmp_path), axes=axes, case=case):
        assert outcome["wrong"] == []
        assert outcome["written"] == outcome["stored"] == outcome["logical"]
        assert outcome["logical"] > 2.9 * outcome["parameters"] > 0, "weights, and two or more states of most"
        assert outcome["keys"] > 10
        # torch.save's envelope of each tensor: a zip directory, a small pickle, and alignment to 64 bytes.
        assert 0 < outcome["files"] - outcome["stored"] < 2048 * outcome["chunks"]


@pytest.mark.ranks(4)
def test_run_state_and_generators_round_trip(pool, tmp_path):
    where = {"directory": str(tmp_path)}
    saved = pool.run(faults.extra_state, 4, axes=DP4, start=5, **where)
    assert len({str(outcome["drawn"]["torch"]) for outcome in saved}) == 4
    for rank, outcome in enumerate(pool.run(faults.extra_state, 4, axes=DP4, start=None, **where)):
        assert outcome["drawn"] == saved[rank]["drawn"] and outcome["step"] == 7
        assert outcome["own"] == {"rank": rank, "sampler": [rank] * 3} and outcome["epoch"] == (1, 2)
    for axes, ranks in ((HSDP, 4), (DP2, 2)):
        for rank, outcome in enumerate(pool.run(faults.extra_state, ranks, axes=axes, start=None, **where)):
            assert outcome["drawn"]["order"] == saved[0]["drawn"]["order"], "does not depend on the mesh"
            assert outcome["drawn"]["torch"] != saved[rank]["drawn"]["torch"]
            assert outcome["rng"] and outcome["own"] is None and outcome["step"] == 7
