"""All-gathers that start one unit ahead in forward. They change no bit, whatever a loop does in between."""

from __future__ import annotations

import pytest
from harness import assert_bitwise_equal
from strategies import forward_prefetch

AHEAD = ["layers.1", "layers.2", "layers.3"]
#: All-gathers that start ahead in each of five steps, by what happens before or in the fourth.
KINDS = {
    "plain": [[], AHEAD, AHEAD, AHEAD, AHEAD],
    "skip": [
        [],
        AHEAD,
        AHEAD,
        AHEAD[:2],
        [],
    ],  # of a unit that is not run: released; the order is recorded again
    "write": [[], AHEAD, AHEAD, AHEAD, AHEAD],
    "raise": [[], AHEAD, AHEAD, AHEAD[:2] + AHEAD, AHEAD],
    "inner": [[], AHEAD, AHEAD, AHEAD, AHEAD],
    "unfinished": [[], AHEAD, AHEAD, AHEAD[:2], AHEAD],
    "user": [[], [], [], [], []],
}


def _same(found: dict) -> None:
    have, want = found["with"], found["without"]
    for name in ("losses", "weights"):
        for number, (mine, other) in enumerate(zip(have[name], want[name], strict=True)):
            assert_bitwise_equal(f"{name} {number}", mine, other)


@pytest.mark.covering(always=[{"kind": "skip", "transport": "copy_engine"}], strength=1)
@pytest.mark.ranks(2)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("transport", ["nccl", "copy_engine"])
def test_prefetch_is_bitwise_equal(pool, transport, kind):
    for found in pool.run(forward_prefetch.train_both, 2, recipe="none", transport=transport, kind=kind):
        _same(found)
        assert found["with"]["started"] == KINDS[kind]
        assert not any(found["without"]["started"])


@pytest.mark.covering(strength=0)
@pytest.mark.ranks(2)
@pytest.mark.parametrize("recipe", ["current", "delayed", "block", "mxfp8", "nvfp4"])
def test_prefetch_of_quantized_weights_is_bitwise_equal(pool, recipe):
    for found in pool.run(
        forward_prefetch.train_both, 2, recipe=recipe, transport="copy_engine", kind="plain"
    ):
        _same(found)
        assert found["with"]["started"] == KINDS["plain"]


@pytest.mark.ranks(2)
@pytest.mark.parametrize("transport", ["nccl", "copy_engine"])
def test_negative_control_stale_prefetched_weights(pool, transport):
    """Negative control of "write"."""
    for found in pool.run(forward_prefetch.train_both, 2, recipe="none", transport=transport, kind="stale"):
        with pytest.raises(AssertionError):
            _same(found)
