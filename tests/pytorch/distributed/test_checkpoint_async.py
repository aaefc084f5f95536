"""Asynchronous saves. The snapshot has the values at the call, whatever training changes during the write."""

from __future__ import annotations

import math

import pytest
from checkpointing import asynchronous
from checkpointing.models import Case

DP2_TP2 = {"dp_shard": 2, "tp": 2}
DP2 = {"dp_shard": 2}
HSDP_TP = {"dp_replicate": 2, "dp_shard": 2, "tp": 2}
ENVIRONMENT = {"NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0"}

FUSED = Case(stacked=True, optimizer="fused")
MXFP8 = Case(stacked=True, optimizer="fused", recipe="mxfp8", quantized=True)
DELAYED = Case(optimizer="fused", recipe="delayed", quantized=True)


def _row(case: Case, axes: dict[str, int], name: str):
    return pytest.param(case, axes, id=name, marks=pytest.mark.ranks(math.prod(axes.values())))


@pytest.mark.parametrize(
    ("case", "axes"),
    [
        _row(Case(), DP2, "adamw-dp2"),
        _row(FUSED, DP2_TP2, "fused-dp2xtp2"),
        pytest.param(
            MXFP8, DP2_TP2, id="mxfp8-dp2xtp2", marks=[pytest.mark.ranks(4), pytest.mark.recipe("mxfp8")]
        ),
        pytest.param(
            DELAYED, DP2, id="delayed-dp2", marks=[pytest.mark.ranks(2), pytest.mark.recipe("delayed")]
        ),
        _row(FUSED, HSDP_TP, "fused-hsdp2x2xtp2"),
    ],
)
def test_async_save_stores_the_values_at_the_call(pool, tmp_path, case, axes):
    ranks = math.prod(axes.values())
    where = {"axes": axes, "directory": str(tmp_path)}
    results = pool.run(asynchronous.snapshot, ranks, env=ENVIRONMENT, case=case, **where)
    for rank, outcome in enumerate(results):
        for save in outcome["saves"]:
            assert save["wrong"] == [], f"rank {rank}"
            assert save["tensors"] > 30 and save["changed"] > 30, (
                "training went on before anything was written"
            )
            assert save["same_loss"] and save["stall"] > 0
    # No replica is copied or written twice.
    for number in (0, 1):
        assert all(outcome["saves"][number]["bytes"] > 0 for outcome in results)


@pytest.mark.ranks(2)
def test_negative_control_values_after_training_on(pool, tmp_path):
    where = {"axes": DP2, "directory": str(tmp_path), "spoil": True}
    if pool.device_type != "cpu":
        pytest.skip("without copies the thread would read the device")
    for outcome in pool.run(asynchronous.snapshot, 2, case=Case(), **where):
        assert len(outcome["saves"][0]["wrong"]) > 30


@pytest.mark.ranks(2)
def test_async_saves_run_in_order_and_failures_are_raised(pool, tmp_path):
    results = pool.run(asynchronous.several_saves, 2, directory=str(tmp_path))
    for outcome in results:
        assert outcome["first_done"] and outcome["stall"] > 0.2
        assert len(outcome["held_up"]) == 4 and len(outcome["errors"]) == 2
        name, text = outcome["told"]
        assert name == "CheckpointError"
        assert (
            "/3: save failed on rank(s) 1: " in text and "the disk is full (No space left on device)" in text
        )
        name, text = outcome["refused"]
        assert name == "CheckpointError" and "/4: save failed on rank(s) 1" in text
        assert "save: the previous asynchronous save failed and its error was never retrieved" in text
        assert outcome["again"] and outcome["left"] == ["1", "2", "5"]
    assert results[0]["told"] == results[1]["told"] and results[0]["refused"] == results[1]["refused"]


@pytest.mark.ranks(2)
def test_async_save_completes_after_destroy_process_group(pool, tmp_path):
    for outcome in pool.run(asynchronous.groups_destroyed, 2, init_group=False, directory=str(tmp_path)):
        assert outcome["running"] and outcome["elements"] > 0


@pytest.mark.ranks(2)
def test_out_of_memory_on_one_rank_raises_on_all_ranks(pool, tmp_path):
    results = pool.run(asynchronous.out_of_memory, 2, directory=str(tmp_path))
    assert results[0] == results[1]
    assert "on rank(s) 1: MemoryError: no host memory" in results[0][1]


@pytest.mark.ranks(2)
def test_save_plan_is_reused_until_the_model_changes(pool, tmp_path):
    for outcome in pool.run(asynchronous.plan_reuse, 2, directory=str(tmp_path)):
        assert outcome["counts"] == [1, 1, 2, 2, 3] and outcome["wrong"] == []
        for kind, text in (outcome["drifted"], outcome["again"]):
            assert kind == "CheckpointError" and "model.ours (rank 1 from rank 0)" in text
