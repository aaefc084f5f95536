"""Running out of memory in a step leaves a model that can go on."""

from __future__ import annotations

import pytest
from harness import BodyFailed
from strategies import out_of_memory

CASES = [
    ("none", {"dp_shard": 2}, {"strategy": "no_shard"}),
    ("current", {"dp_shard": 2}, {"transport": "copy_engine"}),
    ("mxfp8", {"dp_shard": 2, "tp": 2}, {"strategy": "optim_grads"}),
    ("current", {"dp_replicate": 2, "dp_shard": 2}, {"outer_strategy": "optim"}),
]


@pytest.mark.parametrize(
    ("recipe", "axes", "options"),
    [pytest.param(*case, marks=pytest.mark.ranks(2 * len(case[1]))) for case in CASES],
)
def test_a_step_that_ran_out_of_memory_is_taken_again(pool, recipe, axes, options):
    ranks = 2 * len(axes)
    pool.run(out_of_memory.disturbed, ranks, recipe=recipe, points=4, axes=axes, **options)


@pytest.mark.ranks(2)
def test_without_recovery_it_is_seen(pool):
    with pytest.raises(BodyFailed):
        pool.run(
            out_of_memory.disturbed,
            2,
            recipe="none",
            points=6,
            axes={"dp_shard": 2},
            mended=False,
            strategy="optim",
        )
