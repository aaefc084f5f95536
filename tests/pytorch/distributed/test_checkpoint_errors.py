"""What can go wrong with a checkpoint: one error with all problems, the same on all ranks, and nothing changed."""

from __future__ import annotations

import pytest
from checkpointing import mistakes

pytestmark = pytest.mark.ranks(2)


def same_on_all(results: list) -> tuple[str, str]:
    """All ranks raised the same."""
    assert all(outcome == results[0] for outcome in results), results
    return results[0]


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("names", ["2 missing in the checkpoint (third.bias, third.weight)", "optimizer group 0: 2 missing"]),
        ("shapes", ["3 with another shape (first.bias: saved (8,), model has (6,),", "Nothing was loaded"]),
        ("dtype", ["4 with another dtype", "saved float32, model has bfloat16"]),
        ("one rank", ["2 missing in the checkpoint (third.bias, third.weight)"]),
        ("groups", ["optimizer: 1 groups saved, here 2"]),
        ("class", ["optimizer: saved AdamW, this one is SGD"]),
    ],
)
def test_another_model(pool, tmp_path, kind, words):
    name, text = same_on_all(
        pool.run(mistakes.load_into_another_model, 2, directory=str(tmp_path), kind=kind)
    )
    assert name == "CheckpointError"
    assert "step-1 does not fit: " in text
    for word in words:
        assert word in text
    assert "(saved on ranks=2, dp_shard=2 by te_fsdp " in text
    assert "Fix: build model and optimizer as they were saved" in text


def test_strict_false_takes_what_fits(pool, tmp_path):
    outcome = same_on_all(pool.run(mistakes.load_in_part, 2, directory=str(tmp_path)))
    assert (
        outcome["extra"] == {"step": 1} and outcome["same"] and outcome["untouched"] and outcome["state"] == 0
    )
    (warning,) = outcome["warnings"]
    assert "left as it was: 2 missing in the checkpoint (third.bias, third.weight)" in warning
    assert "optimizer group 0" in warning


def test_main_weights_follow_a_partial_load(pool, tmp_path):
    outcome = same_on_all(pool.run(mistakes.main_weights_follow, 2, directory=str(tmp_path)))
    assert outcome["wrong"] == 0 and outcome["state"] > 10


@pytest.mark.parametrize("only_rank", [None, 1])
def test_an_optimizer_built_before_sharding(pool, tmp_path, only_rank):
    results = pool.run(mistakes.optimizer_before_sharding, 2, directory=str(tmp_path), only_rank=only_rank)
    for name, text in same_on_all(results):
        assert name == "OrderError"
        assert "AdamW: 4 of 4 parameters are not the model's" in text
        assert "Fix: build it after te_fsdp.fully_shard and te_fsdp.materialize" in text
    assert (only_rank is None) == ("on rank(s) 1: " not in results[0][0][1])


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("no path", ["step-11: no such checkpoint", "got nothing at that path", "there is step-1"]),
        ("parent", ["a directory of checkpoints", "got step-1 inside", "latest("]),
        ("truncated", ["damaged checkpoint: __0_0.distcp: expected ", " bytes, got ", "Nothing was loaded"]),
        ("missing file", ["damaged checkpoint: __0_0.distcp is missing"]),
        ("manifest", ["te_fsdp.json: unreadable manifest (JSONDecodeError"]),
        ("plain", ["a plain torch.distributed.checkpoint directory", "torch.distributed.checkpoint.load"]),
    ],
)
def test_no_whole_checkpoint(pool, tmp_path, kind, words):
    name, text = same_on_all(pool.run(mistakes.damaged, 2, directory=str(tmp_path), kind=kind))
    assert name == "CheckpointError"
    for word in words:
        assert word in text
    assert "Fix: " in text


def test_one_rank_that_cannot_write(pool, tmp_path):
    outcome = same_on_all(pool.run(mistakes.failing_write, 2, directory=str(tmp_path)))
    name, text = outcome["error"]
    assert name == "CheckpointError" and "save failed on rank(s) 1: OSError: [Errno 28] No space left" in text
    assert outcome["left"] == ["step-1"]
    assert outcome["newest"].endswith("step-1")
    assert outcome["again"][0] == "CheckpointError" and "step-2: exists already" in outcome["again"][1]
    assert outcome["after"] == ["step-1", "step-2"]


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("scale", ["1 tensor(s) differ between ranks", "weight:fp8_scale_inv"]),
        ("unsharded", ["4 tensor(s) differ between ranks", "model.first.weight", "te_fsdp.fully_shard"]),
        ("names", ["parameters of the model: expected the same names", "rank(s) 1 differ from rank 0"]),
    ],
)
def test_ranks_that_disagree(pool, tmp_path, what, words):
    name, text = same_on_all(pool.run(mistakes.drifted, 2, directory=str(tmp_path), what=what))
    assert name == "CheckpointError"
    for word in words:
        assert word in text


@pytest.mark.recipe("mxfp8")
def test_another_format(pool, tmp_path):
    found = same_on_all(pool.run(mistakes.other_format, 2, directory=str(tmp_path)))
    assert all(name == "CheckpointError" for name, _ in found)
    assert "with another format" in found[0][1]
    assert "saved mxfp8 kFloat8E4M3, model has high precision" in found[0][1]
    assert "saved high precision, model has mxfp8 kFloat8E4M3" in found[1][1]
    assert "optimizer state 'master_param' is only in the checkpoint" in found[2][1]
    assert "state kept with a scale per shard" in found[3][1] and "exp_avg in uint8" in found[3][1]
