"""Training with delayed scaling of BF16 weights that resumes from saved state dicts."""

from __future__ import annotations

import pytest
from plain_dcp import newest_amaxes

TP, DP = {"dp_shard": 1, "tp": 2}, {"dp_shard": 2}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("form", ["dcp", "async", "cached", "full"])
@pytest.mark.parametrize(
    ("axes", "evaluate"), [(TP, False), (TP, True), (DP, True)], ids=["tp", "tp-eval", "dp"]
)
def test_resumed_steps_equal_those_without_a_save(pool, tmp_path, axes, evaluate, form):
    """Files had the newest amaxes of one rank, so that histories and scales differed after the next forward.

    Negative control: the ranks have different newest amaxes when they save.
    """
    where = {"axes": axes, "form": form, "directory": str(tmp_path)}
    for found in pool.run(newest_amaxes.resume, 2, evaluate=evaluate, **where):
        assert found["unequal"] and found["newest"] and found["differ"] == [], found


@pytest.mark.ranks(2)
@pytest.mark.parametrize("form", ["dcp", "full"])
@pytest.mark.parametrize("axes", [DP, {"dp_shard": 1, "ep": 2}], ids=["dp", "ep"])
def test_experts_resume(pool, tmp_path, axes, form):
    """Check the rows of each expert, of which other ranks have others."""
    where = {"axes": axes, "form": form, "directory": str(tmp_path)}
    for found in pool.run(newest_amaxes.resume, 2, evaluate=True, experts=True, **where):
        assert found["unequal"] and found["newest"] and found["differ"] == [], found


@pytest.mark.ranks(4)
@pytest.mark.parametrize("axes", [DP, {"dp_shard": 2, "tp": 2}], ids=["dp", "dp-tp"])
def test_full_state_dicts_of_replicated_models_resume(pool, tmp_path, axes):
    """They had the newest amaxes of rank 0, or of its ``tp`` ranks."""
    where = {"axes": axes, "form": "full", "directory": str(tmp_path), "strategy": "no_shard"}
    for found in pool.run(newest_amaxes.resume, 2 * axes.get("tp", 1), evaluate=True, **where):
        assert found["unequal"] and found["newest"] and found["differ"] == [], found


@pytest.mark.ranks(2)
@pytest.mark.parametrize("fp8", [True, False])
def test_full_state_dict_on_one_rank_of_a_replicated_model(pool, fp8):
    """As with DDP. It is collective with delayed scaling alone, and raises where the others do not call it."""
    text = pool.run(newest_amaxes.full_state_on_one_rank, 2, fp8=fp8)[0]
    call = "torch.distributed.checkpoint.state_dict.get_model_state_dict(full_state_dict=True)"
    assert text.startswith(f"{call}: rank 1 has not called it") if fp8 else text == "", text
