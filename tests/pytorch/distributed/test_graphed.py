"""Graphed steps. CPU tests call recorded functions again, GPU tests use CUDA graphs."""

from __future__ import annotations

import pytest
import torch
from graphed import bodies, unit_bodies
from harness import devices

CASES = {
    "zero3": {},
    "zero copy": {"zero_copy": True},
    "optim, shapes": {"strategy": "optim", "shapes": True},
    "optim_grads": {"strategy": "optim_grads"},
    "no_shard": {"strategy": "no_shard"},
    "mixed": {"strategy": {"blocks.0": "optim", "blocks.1": "no_shard"}},
    "report_nan": {"nan": True},
    "SGD": {"optimizer": "SGD"},
    "SGD, report_nan": {"optimizer": "SGD", "nan": True},
    "main weights": {"bf16": True},
    "FP8 weights": {"bf16": True, "quantized": True},
    "FP8 weights, FusedAdam": {"bf16": True, "quantized": True, "optimizer": "FusedAdam"},
    "FP8 weights, FusedAdam reads the host": {
        "bf16": True,
        "quantized": True,
        "optimizer": "FusedAdam",
        "reads_host": True,
    },
}
EAGER_STEP = {
    "SGD": "SGD reads its learning rate on the host",
    "SGD, report_nan": "SGD reads its learning rate on the host",
    "FP8 weights, FusedAdam reads the host": "FusedAdam was built without capturable=True",
}


@pytest.mark.parametrize("names", [list(CASES)[:7], list(CASES)[7:]], ids=["strategies", "optimizers"])
def test_graphed_step_is_bitwise_equal(pool, names):
    for facts in pool.run(bodies.bitwise_equal, 2, cases={name: CASES[name] for name in names}, axes={}):
        for name, (why_eager, why_step_eager, recordings, replays) in facts.items():
            assert not why_eager, name
            assert why_step_eager.partition(", and this torch")[0] == EAGER_STEP.get(name, ""), name
            assert (recordings, replays) == ((2, 3) if "shapes" in name else (1, 4)), name


@pytest.mark.ranks(4)
@pytest.mark.parametrize(
    ("axes", "case", "ranks"),
    [
        ({"tp": 2}, {}, 4),
        ({"tp": 2}, {"bf16": True, "quantized": True}, 4),
        ({"dp_replicate": 2}, {}, 2),
        ({"dp_replicate": 2}, {"outer": "optim"}, 4),
    ],
    ids=["tp2", "tp2 FP8 weights", "hsdp", "hfsdp"],
)
def test_graphed_step_on_meshes_is_bitwise_equal(pool, axes, case, ranks):
    for facts in pool.run(bodies.bitwise_equal, ranks, cases={"it": case}, axes=axes, timeout=240):
        assert facts == {"it": ["", "", 1, 4]}


def test_changes_record_the_graph_again(pool):
    anew = {"replaced state", "option", "training mode", "frozen", "moved", "module", "watched", "pace"}
    for found in pool.run(bodies.recordings_after_changes, 2, timeout=240):
        assert len(found) == 11
        for name, recordings in found.items():
            assert recordings == [1, 2 if name in anew else 1], name


@pytest.mark.cpu
def test_eager_fallback_reasons_are_logged_once(pool):
    for rank, found in enumerate(pool.run(bodies.reasons, 2, timeout=240)):
        why, step, recordings, said = found["SGD"]
        assert (why, recordings, said) == ("", 1, 1) and "SGD reads its learning rate on the host" in step
        assert found["FusedAdam"][1:] == ["FusedAdam was built without capturable=True", 1, 1]
        failed = (
            "the capture has failed (RuntimeError: operation not permitted when stream is capturing)"
            if rank
            else "the capture has failed on a different rank"
        )
        assert found["gradients fail"] == [failed, "", 0, 1]
        assert found["update fails"] == ["", failed, 1, 1]
        assert found["hook"][1].startswith("AdamW has a hook that a replay would not call")
        assert found["shapes"] == [
            "inputs of more than 4 kinds (shapes, dtypes, or non-tensor values)",
            4,
        ]


def test_training_continues_after_a_failed_capture(pool):
    for found in pool.run(bodies.failed_capture, 2):
        assert found.pop("why").startswith("the capture has failed (")
        assert found == {"now": "", "recordings": 1, "replays": 3}


def test_nan_is_reported_before_the_update(pool):
    for raised, kept, finite, recordings, replays in pool.run(bodies.report_nan_between_graphs, 2):
        assert "rank 1 (microbatch 2)" in raised
        assert kept and finite and (recordings, replays) == (1, 2)


def test_evaluations_read_new_weights(pool):
    assert pool.run(bodies.evaluations, 2) == [[False, True, True, False]] * 2


def test_outputs_are_copies(pool):
    assert pool.run(bodies.outputs_are_copies, 2) == [True, True]


def test_invalid_arguments_raise(pool):
    for texts in pool.run(bodies.mistakes, 2):
        assert [text.split(":")[0] for text in texts] == [
            "OrderError",
            "OrderError",
            "PlacementError",
            "PlacementError",
        ]
        assert (
            "warmup: expected an integer of at least 1, got 0" in texts[2] and "max_norm must be" in texts[3]
        )


@pytest.mark.cpu
@pytest.mark.parametrize("failing", [0, 1], ids=["gradients", "update"])
def test_forget_allows_recording_after_a_failed_capture(pool, failing):
    """Check that ``forget()`` clears the reason to run eagerly, for the step and for the update."""
    before = [[True, False, 0, []], [False, True, 1, [False]]][failing]
    for found in pool.run(bodies.steps_after_forget, 2, failing=failing):
        assert found == {"before": before, "after": [False, False, 1 + failing, [True]]}


# ---------------------------------------------------------------------------------------------- units with graphs

UNIT_CASES = {
    "zero3": {},
    "optim": {"strategy": "optim"},
    "FP8 weights, FusedAdam": {"bf16": True, "quantized": True, "optimizer": "FusedAdam"},
    "gated": {"activation": "swiglu"},
}


@pytest.mark.parametrize(
    ("axes", "names"), [({}, list(UNIT_CASES)[:3]), ({"tp": 2}, ["zero3", "gated"])], ids=["dp2", "tp2"]
)
def test_graphed_units_are_bitwise_equal(pool, axes, names):
    """Check graphed forwards and backwards in an eager loop with two microbatches, clipping and an evaluation."""
    if not axes and devices.device_type() == "cuda" and torch.cuda.device_count() < 2:
        pytest.skip("all-gathers between ranks that share a GPU have no fixed addresses")
    cases = {name: UNIT_CASES[name] for name in names}
    for facts in pool.run(unit_bodies.bitwise_equal, 2, cases=cases, axes=axes, timeout=240):
        assert facts == {name: [{}, 2, 18] for name in names}


@pytest.mark.cpu
def test_negative_control_replay_of_stale_values(pool):
    assert pool.run(unit_bodies.stale_results_differ, 2) == [[True, False, False]] * 2


@pytest.mark.cpu
def test_units_run_eagerly_for_documented_reasons(pool):
    for found in pool.run(unit_bodies.reasons, 2, timeout=240):
        assert found["recorded"] == [2, 2, 0]
        failed = "the capture has failed (RuntimeError: operation not permitted when stream is capturing)"
        assert found["fails"] == [failed, 1, 1, 1]
        assert found["saved"][0].startswith("saved tensors are replaced by hooks") and found["saved"][1:] == [
            0,
            0,
            2,
        ]
        assert found["delayed"] == ["DelayedScaling updates scales between forward and backward", 0, 0, 2]
        assert [why.partition(" (")[0] for why in found["kinds"]] == ["inputs of more than 4 kinds"]


@pytest.mark.cpu
def test_units_are_replayed_in_order_only(pool):
    """Check that a unit runs eagerly if a replay would overwrite values of a pending backward."""
    for found in pool.run(unit_bodies.out_of_order_replays, 2, timeout=240):
        assert found == {
            "eager": [0, 0],
            "recorded": [2, 0],
            "replayed": [2, 2],
            "two forwards": [2, 4],
            "dropped": [2, 8],
            "frozen": [4, 8],
            "frozen, replayed": [4, 10],
            "why": {},
        }


@pytest.mark.cpu
def test_invalid_arguments_of_graphed_units_raise(pool):
    for texts in pool.run(unit_bodies.mistakes, 2):
        assert [text.split(":")[0] for text in texts] == [
            "OrderError",
            "PlacementError",
            "PlacementError",
            "PlacementError",
            "PlacementError",
            "OrderError",
        ]
        assert "graphed_units of a unit that contains units" in texts[3]
        assert 'expected fully_shard(..., transport="copy_engine")' in texts[4]
        assert "graphed_units after the first forward" in texts[5]
