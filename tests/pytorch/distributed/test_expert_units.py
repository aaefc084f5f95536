"""One FSDP2 unit for all experts of a layer, where the user names a module that contains only experts."""

from __future__ import annotations

import pytest
from experts import units

SINGLE = {"NVTE_GROUPED_LINEAR_SINGLE_PARAM": "1"}
EACH = ["mixture.up", "mixture.down"]


@pytest.mark.ranks(4)
@pytest.mark.parametrize(
    ("requested", "dense", "expected"),
    [
        ([], False, ["", *EACH]),
        (["mixture"], False, ["", "mixture"]),
        (["mixture", "mixture.down"], False, ["", "mixture", "mixture.down"]),
        (["mixture"], True, ["", "mixture", *EACH]),  # other ranks shard a dense parameter
    ],
)
def test_fsdp_units_of_experts(pool, requested, dense, expected):
    results = pool.run(units.sharded, 4, axes={"ep": 2, "dp_shard": 2}, requested=requested, dense=dense)
    assert results == [expected] * 4


EP2 = {"ep": 2, "dp_shard": 2}
CASES = [
    (EP2, "none", "fp32", {}),
    (EP2, "delayed", "quantized", {}),
    (EP2, "current", "quantized", {"strategy": "optim"}),
    ({"ep": 2, "dp_replicate": 2}, "block", "quantized", {}),
    ({"ep": 2, "tp": 2}, "none", "fp32", {"strategy": "optim_grads"}),
]
SINGLE_CASES = [
    (EP2, "none", "bf16", {"strategy": "optim_grads"}),
    (EP2, "mxfp8", "quantized", {}),
]


def check(results):
    assert all(one["ranks"] == 4 and max(one["shares"].values()) <= 1 for one in results)


@pytest.mark.ranks(4)
@pytest.mark.parametrize(("axes", "recipe", "weights", "how"), CASES, ids=str)
def test_training_with_one_unit_for_all_experts(pool, axes, recipe, weights, how):
    results = pool.run(units.trained, 4, axes=axes, recipe=recipe, weights=weights, **how)
    check(results)


@pytest.mark.single_grouped
@pytest.mark.ranks(4)
@pytest.mark.parametrize(("axes", "recipe", "weights", "how"), SINGLE_CASES, ids=str)
def test_training_with_one_unit_of_single_parameters(pool, axes, recipe, weights, how):
    results = pool.run(
        units.trained, 4, env=SINGLE, axes=axes, recipe=recipe, weights=weights, single=True, **how
    )
    check(results)
