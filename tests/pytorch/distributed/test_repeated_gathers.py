"""All-gathers that reuse the sizes of a unit's previous one. They change no bit."""

from __future__ import annotations

import pytest
from harness import assert_bitwise_equal
from strategies import repeated_gathers


@pytest.mark.ranks(2)
@pytest.mark.parametrize("casts", [False, True], ids=["same dtype", "cast"])
@pytest.mark.parametrize("recipe", ["none", "current", "mxfp8"])
def test_repeated_gathers_are_bitwise_equal(pool, recipe, casts):
    """Check fp32 or quantized weights with fp32 norms, cast or not, against FSDP2's all-gathers."""
    ours, stock = (
        pool.run(repeated_gathers.train, 2, recipe=recipe, casts=casts, stock=stock)
        for stock in (False, True)
    )
    for have, want in zip(ours, stock, strict=True):
        # Each of three units is all-gathered twice a step. The first all-gather is FSDP2's.
        assert have["gathers"] >= 3 * (2 * repeated_gathers.STEPS - 1)
        assert want["gathers"] == 0
        for name in ("losses", "weights"):
            for number, (mine, other) in enumerate(zip(have[name], want[name], strict=True)):
                assert_bitwise_equal(f"{name} {number}", mine, other)


@pytest.mark.ranks(2)
def test_moved_shards_are_freed(pool):
    """A repeated all-gather keeps no reference to shards, whose memory a loop may free by moving them."""
    for freed in pool.run(repeated_gathers.freed_shards, 2):
        assert all(freed)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("waits", [True, pytest.param(False, marks=pytest.mark.gpu, id="control")])
def test_memory_of_an_unused_gather_is_not_used_too_early(pool, waits):
    """Check outputs after an evaluation against the same weights without one; FSDP2's own wait is the control."""
    outputs = pool.run(repeated_gathers.outputs_after_evaluation, 2, waits=waits)
    equal = [have.equal(want) for pair in outputs for have, want in zip(*pair, strict=True)]
    assert all(equal) is waits, equal
