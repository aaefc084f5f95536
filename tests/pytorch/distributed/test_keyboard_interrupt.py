"""KeyboardInterrupt in a collective call on one rank, whose script catches it. The other ranks waited."""

from __future__ import annotations

import bodies_keyboard_interrupt as bodies
import pytest

#: The test's own collectives cannot be watched.
GLOO = {"TE_FSDP_TEST_GLOO": "1"}
TEXT = "interrupted on rank 1 by KeyboardInterrupt"


@pytest.mark.parametrize("collective", ["maximum", "gather"])
def test_interrupt_within_a_collective_call(pool, collective):
    results = pool.run(bodies.interrupt_within_call, 3, env=GLOO, collective=collective)
    assert results[1][0].startswith("KeyboardInterrupt")
    for first, following in results:
        assert f"CollectiveError: te_fsdp.test: {TEXT}" in following
        assert first.startswith("KeyboardInterrupt") or first == following


def test_interrupt_before_a_collective_call(pool):
    first, second = pool.run(bodies.interrupt_before_call, 2)
    assert second == ["KeyboardInterrupt: ", ""]
    assert f"CollectiveError: te_fsdp.test: {TEXT}" in first[0] and first[1] == ""


@pytest.mark.parametrize(("victim", "where"), [(1, "on rank(s) 1: "), (0, "")])
def test_interrupt_in_save(pool, tmp_path, victim, where):
    results = pool.run(bodies.interrupt_saving, 2, folder=str(tmp_path), victim=victim)
    text = f"te_fsdp.checkpoint.save: interrupted on rank {victim} by KeyboardInterrupt"
    assert results[victim][0].startswith("KeyboardInterrupt") and text in results[victim][1]
    # Without the message, the error would be that of a rank that is silent for the collective timeout.
    assert results[1 - victim][0].startswith(f"CollectiveError: {where}{text}")


@pytest.mark.parametrize(("victim", "where"), [(1, "on rank(s) 1: "), (0, "")])
def test_error_on_one_rank_in_save(pool, tmp_path, victim, where):
    """Check an error on one rank. The other ranks waited for its next message."""
    results = pool.run(bodies.interrupt_saving, 2, folder=str(tmp_path), victim=victim, by_error=True)
    text = f"te_fsdp.checkpoint.save: interrupted on rank {victim} by MemoryError"
    assert results[victim][0] == "MemoryError: no memory" and text in results[victim][1]
    assert f"{where}{text}" in results[1 - victim][0] and text in results[1 - victim][1]


@pytest.mark.parametrize("moment", ["reply", "exchange"])
def test_interrupt_in_load(pool, tmp_path, moment):
    """Check a reply whose second part was never received, and data of the exchange that were never sent."""
    (first, seconds), (second, _) = pool.run(bodies.interrupt_loading, 2, folder=str(tmp_path), moment=moment)
    assert second[0].startswith("KeyboardInterrupt") and TEXT in second[1]
    assert TEXT in first[0] and TEXT in first[1] and seconds < 15


@pytest.mark.parametrize("moment", ["error", "error in the exchange", "error at the end"])
def test_error_on_one_rank_in_load(pool, tmp_path, moment):
    """Check an error on one rank. The other waited for its agreement or data. At the end, its next call raises."""
    (first, seconds), (second, _) = pool.run(bodies.interrupt_loading, 2, folder=str(tmp_path), moment=moment)
    text = "te_fsdp.checkpoint.load: interrupted on rank 1 by MemoryError"
    assert text in first[1] and text in second[1] and seconds < 15
    assert first[0] == "" if moment == "error at the end" else text in first[0]
    assert "MemoryError" in second[0] and "no memory" in second[0]
