"""Checkpoints between sharding strategies: what is cut, kept or widened on one side does not matter on the other.

More of HFSDP: test_hfsdp.py. Parameters that are kept whole: test_no_shard.py.
"""

from __future__ import annotations

import pytest
from checkpointing import strategies
from checkpointing.models import Case
from checkpointing.strategies import Way

DP2_TP2, DP4, HSDP = {"dp_shard": 2, "tp": 2}, {"dp_shard": 4}, {"dp_replicate": 2, "dp_shard": 2}
WAYS = [
    Way("optim_grads", HSDP, {"strategy": "optim_grads"}),
    Way("no_shard", DP2_TP2, {"strategy": "no_shard"}),
    Way("hfsdp", HSDP, {"outer_strategy": "optim"}),
    Way("kept", DP2_TP2, kept=("norm", "head")),
    Way("optim", DP4, {"strategy": "optim"}),
    Way("optim_grads_params", DP2_TP2),
]


def check(results: list[dict], ways: list[Way]) -> None:
    for found in results:
        assert len(found) == len(ways)
        for pair, outcome in found.items():
            assert outcome["wrong"] == [] and outcome["left"] == {}, pair
            assert outcome["fresh"] > 20, "the control: before the load they differ"


@pytest.mark.ranks(4)
def test_between_strategies(pool, tmp_path):
    case = Case(unused=False)
    check(pool.run(strategies.between, 4, case=case, ways=WAYS, directory=str(tmp_path)), WAYS)


@pytest.mark.ranks(4)
def test_main_weights_as_parameters_and_in_the_optimizer(pool, tmp_path):
    """fp32 parameters of a precision policy and fp32 main weights of bf16 parameters are one another."""
    ways = [
        Way("wide", DP2_TP2, wide=True),
        Way("narrow", DP4),
        Way("outer", HSDP, {"outer_strategy": "optim"}),
    ]
    case = Case(optimizer="fused", unused=False)
    results = pool.run(strategies.between, 4, case=case, ways=ways, directory=str(tmp_path))
    check(results, ways)
    assert any(results[0]["wide -> narrow"]["converted"]) and not results[0]["narrow -> outer"]["converted"]
