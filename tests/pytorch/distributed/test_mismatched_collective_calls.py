"""Collective calls that some ranks make late, alone or not at all. They are reported, then raised on all ranks."""

from __future__ import annotations

import re

import bodies_mismatched_collective_calls as bodies
import pytest

CALLS = (
    "Meshes.build",
    "Meshes.from_device_mesh",
    "fully_shard",
    "materialize",
    "reset_parameters",
    "broadcast_params",
    "shard_optimizer",
    "checkpoint.save",
    "checkpoint.load",
    "checkpoint.load_huggingface",
    "checkpoint.save_huggingface",
)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("call", CALLS)
def test_call_on_one_rank_only_raises_on_all_ranks(pool, call, tmp_path):
    first, *others = pool.run(bodies.call_on_rank_0_only, 4, call=call, folder=str(tmp_path))
    assert f"te_fsdp.{call}" in first["error"] and "ranks 1-3 have not called it" in first["error"]
    assert "on all 4 ranks" in first["error"] and "1 of them after 1 s" in first["error"]
    assert "Fix: " in first["error"] and "set_collective_timeout" in first["error"]
    assert first["warnings"] and f"te_fsdp.{call}" in first["warnings"][0]
    assert "rank 0 has waited" in first["warnings"][0] and "ranks 1-3 have" in first["warnings"][0]
    assert not list(tmp_path.iterdir())
    for other in others:  # no rank waits for those that have given up
        assert other["error"] == first["error"] and not other["warnings"]


@pytest.mark.ranks(4)
def test_late_rank_is_waited_for(pool, tmp_path):
    *early, late = pool.run(bodies.late_rank, 4, folder=str(tmp_path))
    assert not late["warnings"]
    for rank, result in enumerate(early):
        assert f"rank {rank} has waited" in result["warnings"][0]
        # On a machine that is busy with other things others may be late too, at first.
        assert re.search(r"Of 4 ranks, ranks? [\d, -]*3 (has|have) not called it yet", result["warnings"][0])


@pytest.mark.ranks(4)
def test_different_calls_raise_at_once(pool, tmp_path):
    texts = pool.run(bodies.different_calls, 4, folder=str(tmp_path))
    assert len(set(texts)) == 1
    assert "rank 0 in te_fsdp.checkpoint.save; ranks 1-3 in te_fsdp.checkpoint.load" in texts[0]
    assert "Fix: make the same calls in the same order" in texts[0]


@pytest.mark.ranks(3)
def test_different_calls_are_detected_before_all_ranks_arrive(pool):
    texts = pool.run(bodies.different_calls_before_all_ranks_arrive, 3)
    assert len(set(texts)) == 1
    assert "rank 0 in te_fsdp.call_0; rank 1 in te_fsdp.call_1" in texts[0] and "call_2" not in texts[0]


@pytest.mark.ranks(4)
def test_subgroups_rendezvous_independently(pool):
    assert pool.run(bodies.rendezvous_of_subgroups, 4) == [[]] * 4


@pytest.mark.ranks(2)
def test_nested_calls_rendezvous_once(pool):
    assert pool.run(bodies.nested_calls, 2) == [0, 0]


@pytest.mark.ranks(4)
def test_rendezvous_store_does_not_grow(pool):
    few, many = (pool.run(bodies.store_keys_after, 4, rounds=rounds) for rounds in (4, 40))
    assert max(few) > 0 and max(many) <= max(few)


@pytest.mark.ranks(2)
def test_call_after_a_failed_call_succeeds(pool):
    assert pool.run(bodies.call_after_a_failed_call, 2) == [["error", "second"]] * 2


@pytest.mark.ranks(2)
def test_torchrun_restart_ignores_ranks_of_the_previous_start(pool):
    assert pool.run(bodies.restarted_by_torchrun, 2, restarts="1") == ["went on"] * 2
    same_start = pool.run(bodies.restarted_by_torchrun, 2, restarts="0")
    assert "the ranks are in different calls" in same_start[0]


@pytest.mark.ranks(2)
def test_build_with_the_store_of_a_previous_start_raises(pool):
    for restarts, count in {"0": 0, "1": 1}.items():
        environment = {"TORCHELASTIC_RESTART_COUNT": restarts}
        for texts in pool.run(bodies.build_after_a_restart, 2, init_group=False, env=environment):
            assert len(texts) == count and all("TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1" in t for t in texts)


@pytest.mark.ranks(3)
def test_errors_of_rank_0_are_raised_on_all_ranks(pool):
    """Check errors that are not an ``Exception``, such as DCP's, which only rank 0 would raise otherwise."""
    first, *others = pool.run(bodies.errors_raised_on_rank_0, 3)
    assert [kind for kind, _ in first] == ["OrderError", "CheckpointError", "CheckpointError"]
    assert "rank 0: CheckpointException: " in first[2][1]
    assert others == [first, first]
