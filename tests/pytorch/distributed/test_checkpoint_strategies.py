"""Checkpoints between sharding strategies.

More of HFSDP: test_hfsdp.py. Parameters that are not sharded: test_no_shard.py.
"""

from __future__ import annotations

import pytest
from checkpointing import strategies
from checkpointing.models import Case
from checkpointing.strategies import Sharding

DP2_TP2, DP4, HSDP = {"dp_shard": 2, "tp": 2}, {"dp_shard": 4}, {"dp_replicate": 2, "dp_shard": 2}
WAYS = [
    Sharding("optim_grads", HSDP, {"strategy": "optim_grads"}),
    Sharding("no_shard", DP2_TP2, {"strategy": "no_shard"}),
    Sharding("hfsdp", HSDP, {"outer_strategy": "optim"}),
    Sharding("kept", DP2_TP2, kept=("norm", "head")),
    Sharding("optim", DP4, {"strategy": "optim"}),
    Sharding("optim_grads_params", DP2_TP2),
]


def check(results: list[dict], ways: list[Sharding]) -> None:
    for found in results:
        assert len(found) == len(ways)
        for pair, outcome in found.items():
            assert outcome["wrong"] == [] and outcome["left"] == {}, pair
            assert outcome["fresh"] > 20, "the control: before the load they differ"


@pytest.mark.ranks(4)
def test_checkpoints_load_under_a_different_strategy(pool, tmp_path):
    case = Case(unused=False)
    check(pool.run(strategies.save_and_load_each, 4, case=case, ways=WAYS, directory=str(tmp_path)), WAYS)


@pytest.mark.ranks(4)
def test_fp32_parameters_and_optimizer_main_weights_are_interchangeable(pool, tmp_path):
    """Check fp32 parameters of a precision policy against fp32 main weights of bf16 parameters."""
    ways = [
        Sharding("wide", DP2_TP2, wide=True),
        Sharding("narrow", DP4),
        Sharding("outer", HSDP, {"outer_strategy": "optim"}),
    ]
    case = Case(optimizer="fused", unused=False)
    results = pool.run(strategies.save_and_load_each, 4, case=case, ways=ways, directory=str(tmp_path))
    check(results, ways)
    assert any(results[0]["wide -> narrow"]["converted"]) and not results[0]["narrow -> outer"]["converted"]
