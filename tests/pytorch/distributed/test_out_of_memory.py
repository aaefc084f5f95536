"""Out-of-memory errors in a step, after which the model continues training."""

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
def test_step_is_repeated_after_out_of_memory(pool, recipe, axes, options):
    ranks = 2 * len(axes)
    pool.run(out_of_memory.compare_with_undisturbed, ranks, recipe=recipe, points=4, axes=axes, **options)


@pytest.mark.ranks(2)
def test_negative_control_no_recovery_after_out_of_memory(pool):
    with pytest.raises(BodyFailed):
        pool.run(
            out_of_memory.compare_with_undisturbed,
            2,
            recipe="none",
            points=6,
            axes={"dp_shard": 2},
            mended=False,
            strategy="optim",
        )
