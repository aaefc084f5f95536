"""TE's `fuse_wgrad_accumulation`: FSDP2 reduces what TE has added up, under every strategy."""

from __future__ import annotations

import pytest
from hfsdp import fusion


@pytest.mark.parametrize(
    ("axes", "options"),
    [
        pytest.param({"dp_shard": 2}, {"microbatches": 3}, marks=pytest.mark.ranks(2), id="dp2"),
        pytest.param(
            {"dp_shard": 2},
            {"microbatches": 3, "contexts": True, "strategy": "optim"},
            marks=pytest.mark.ranks(2),
            id="dp2-optim",
        ),
        pytest.param({"dp_shard": 2, "tp": 2}, {}, marks=pytest.mark.ranks(4), id="dp2xtp2"),
        pytest.param(
            {"dp_replicate": 2, "dp_shard": 2},
            {"microbatches": 2, "contexts": True, "outer": "optim"},
            marks=pytest.mark.ranks(4),
            id="hfsdp",
        ),
    ],
)
def test_equals_one_process(pool, axes, options):
    ranks = 2 if axes == {"dp_shard": 2} else 4
    for result in pool.run(fusion.training, ranks, axes=axes, **options):
        # TE leaves each weight's whole gradient on it; all but the last ones are dropped.
        assert result["left"] <= 1


@pytest.mark.ranks(2)
def test_gradients_that_nobody_reduces_would_show(pool):
    assert all("relative error" in seen for seen in pool.run(fusion.lost, 2, axes={"dp_shard": 2}))


@pytest.mark.ranks(2)
def test_refused_outside_of_fsdp2(pool):
    for error in pool.run_expect_error(fusion.refused, 2):
        assert error.type_name == "PlacementError" and "last.weight: fuse_wgrad_accumulation" in error.message


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("recipe", "options"),
    [
        ("none", {}),
        ("none", {"policy": True}),
        ("none", {"policy": True, "microbatches": 3}),
        ("none", {"microbatches": 3}),
        ("current", {}),
    ],
)
def test_bf16_and_quantized_weights(pool, recipe, options):
    pool.run(fusion.twins, 2, axes={"dp_shard": 2}, recipe=recipe, **options)


@pytest.mark.ranks(2)
def test_a_te_that_adds_to_what_is_new(pool):
    pool.run(fusion.never_asking, 2, axes={"dp_shard": 2})
