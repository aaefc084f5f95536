"""Wrong uses of a checkpoint. They raise one error with all problems on all ranks.

Nothing is changed.
"""

from __future__ import annotations

import pytest
from checkpointing import mistakes, module_settings, save_timing

pytestmark = pytest.mark.ranks(2)


def same_on_all(results: list) -> tuple[str, str]:
    """Check that all ranks raised the same, and return it."""
    assert all(outcome == results[0] for outcome in results), results
    return results[0]


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        pytest.param(
            "names",
            ["2 missing in the checkpoint (third.bias, third.weight)", "optimizer group 0: 2 missing"],
            id="names",
        ),
        pytest.param(
            "shapes",
            ["3 with a different shape (first.bias: saved (8,), model has (6,),", "Nothing was loaded"],
            id="shapes",
        ),
        pytest.param("dtype", ["4 that would be converted", "first.bias: float32 -> bfloat16"], id="dtype"),
        pytest.param("one rank", ["2 missing in the checkpoint (third.bias, third.weight)"], id="one rank"),
        pytest.param("groups", ["optimizer: 1 groups saved, here 2"], id="groups"),
        pytest.param("class", ["optimizer: saved AdamW, this one is SGD"], id="class"),
    ],
)
def test_load_into_a_different_model_raises(pool, tmp_path, kind, words):
    name, text = same_on_all(
        pool.run(mistakes.load_into_another_model, 2, directory=str(tmp_path), kind=kind)
    )
    assert name == "CheckpointError"
    assert "step-1 does not fit: " in text
    for word in words:
        assert word in text
    assert "(saved on ranks=2, dp_shard=2 by te_fsdp " in text
    assert "Fix: build model and optimizer as they were saved" in text


def test_different_module_settings_raise(pool, tmp_path):
    """Check that module settings are compared over meshes and ranks. A model that differs between ranks raises."""
    found = same_on_all(pool.run(module_settings.load_different_settings, 2, directory=str(tmp_path)))
    words = {
        "heads": "num_attention_heads: saved 8, model has 16 (self_attention.core_attention, self_attention)",
        "rows": "qkv_weight_interleaved: saved False, model has True (self_attention)",
        "activation": "activation: saved swiglu, model has geglu (layernorm_mlp)",
        "one rank": "eps: saved 1e-05, model has 0.001 (layernorm_mlp, self_attention.layernorm_qkv)",
    }
    for name, text in words.items():
        for tp in (1, 2):
            kind, got = found[f"{name}, tp={tp}"]
            assert kind == "CheckpointError" and text in got, got
    assert (
        "settings of modules of the model" in found["save"][1]
        and "rank(s) 1 differ from rank 0" in found["save"][1]
    )


@pytest.mark.parametrize("allow", [None, ["third.*"]], ids=["not_strict", "allow"])
def test_allowed_partial_load_reads_matching_tensors(pool, tmp_path, allow):
    outcome = same_on_all(pool.run(mistakes.load_partially, 2, directory=str(tmp_path), allow=allow))
    assert outcome["extra"] == {"step": 1} and outcome["same"] and outcome["untouched"]
    assert outcome["states"] == dict.fromkeys(
        ("first.bias", "first.weight", "second.bias", "second.weight"), 1.0
    )
    assert outcome["lr"] == 0.1
    (warning,) = outcome["warnings"]
    assert "not loaded: 2 missing in the checkpoint (third.bias, third.weight)" in warning
    assert "optimizer group 0: 2 missing in the checkpoint (third.bias, third.weight)" in warning
    states = ["optimizer.state.third.bias", "optimizer.state.third.weight"]
    assert list(outcome["left"]) == [*states, "third.bias", "third.weight"]
    assert outcome["left"]["third.bias"] == "missing in the checkpoint"


def test_differences_outside_the_allow_patterns_raise(pool, tmp_path):
    """Check that only differences that match a pattern of `allow` are accepted."""
    results = pool.run_expect_error(
        mistakes.load_partially, 2, directory=str(tmp_path), allow=["third.weight"]
    )
    for error in results:
        assert error.type_name == "CheckpointError"
        assert (
            "1 missing in the checkpoint (third.bias)" in error.message
            and "third.weight" not in error.message
        )
        assert "name deliberate differences in load(..., allow=[...])" in error.message


def test_different_param_groups_in_a_partial_load(pool, tmp_path):
    outcome = same_on_all(pool.run(mistakes.load_groups_partially, 2, directory=str(tmp_path)))
    name, text = outcome["refused"]
    assert name == "CheckpointError" and "optimizer: 2 groups saved, here 3" in text
    assert outcome["states"] == ["first.bias", "first.weight", "second.bias", "second.weight"]
    assert outcome["lr"] == [0.2, 0.5, 0.1], (
        "each group takes the options of the one that its parameters come from"
    )
    assert outcome["notes"] == ["options of optimizer group 1 left as they were"]
    states = ["optimizer.state.third.bias", "optimizer.state.third.weight"]
    assert outcome["left"] == ["optimizer.param_groups", *states]


def test_main_weights_follow_a_partial_load(pool, tmp_path):
    outcome = same_on_all(pool.run(mistakes.load_main_weights_partially, 2, directory=str(tmp_path)))
    assert outcome["wrong"] == 0 and outcome["state"] > 10


@pytest.mark.parametrize("only_rank", [None, 1])
def test_optimizer_built_before_sharding_raises(pool, tmp_path, only_rank):
    results = pool.run(mistakes.optimizer_before_sharding, 2, directory=str(tmp_path), only_rank=only_rank)
    for name, text in same_on_all(results):
        assert name == "OrderError"
        assert "AdamW: 4 of 4 parameters are not the model's" in text
        assert "Fix: build it after te_fsdp.fully_shard and te_fsdp.materialize" in text
    assert (only_rank is None) == ("on rank(s) 1: " not in results[0][0][1])


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        pytest.param(
            "no path",
            ["step-11: no such checkpoint", "got nothing at that path", "contains step-1"],
            id="no path",
        ),
        pytest.param("parent", ["a directory of checkpoints", "contains step-1", "latest("], id="parent"),
        pytest.param(
            "truncated",
            ["damaged checkpoint: __0_0.distcp: expected ", " bytes, got ", "Nothing was loaded"],
            id="truncated",
        ),
        pytest.param("missing file", ["damaged checkpoint: __0_0.distcp is missing"], id="missing file"),
        pytest.param("manifest", ["te_fsdp.json: unreadable manifest (JSONDecodeError"], id="manifest"),
        pytest.param(
            "no manifest",
            ["te_fsdp.json is missing next to its .metadata", "lost its manifest is incomplete"],
            id="no manifest",
        ),
    ],
)
def test_incomplete_or_damaged_checkpoint_raises(pool, tmp_path, kind, words):
    name, text = same_on_all(pool.run(mistakes.load_damaged, 2, directory=str(tmp_path), kind=kind))
    assert name == "CheckpointError"
    for word in words:
        assert word in text
    assert "Fix: " in text


def test_write_failure_on_one_rank_raises_on_all_ranks(pool, tmp_path):
    outcome = same_on_all(pool.run(mistakes.save_with_write_error, 2, directory=str(tmp_path)))
    name, text = outcome["error"]
    assert name == "CheckpointError" and "step-2: save failed on rank(s) 1: " in text
    assert "the disk is full (No space left on device)" in text
    assert outcome["left"] == ["step-1"]
    assert outcome["newest"].endswith("step-1")
    assert outcome["again"][0] == "CheckpointError" and "step-2: exists already" in outcome["again"][1]
    assert outcome["after"] == ["step-1", "step-2"]


@pytest.mark.parametrize(
    ("what", "words"),
    [
        pytest.param("scale", ["1 tensor(s) differ between ranks", "weight:fp8_scale_inv"], id="scale"),
        pytest.param(
            "unsharded",
            ["4 tensor(s) differ between ranks", "model.first.weight", "te_fsdp.fully_shard"],
            id="unsharded",
        ),
        pytest.param(
            "names",
            ["parameters of the model: expected the same names", "rank(s) 1 differ from rank 0"],
            id="names",
        ),
    ],
)
def test_save_of_different_values_on_ranks_raises(pool, tmp_path, what, words):
    name, text = same_on_all(pool.run(mistakes.save_different_values, 2, directory=str(tmp_path), what=what))
    assert name == "CheckpointError"
    for word in words:
        assert word in text


@pytest.mark.recipe("mxfp8")
def test_disallowed_format_conversions_raise(pool, tmp_path):
    found = same_on_all(pool.run(mistakes.load_different_format, 2, directory=str(tmp_path)))
    assert all(name == "CheckpointError" for name, _ in found)
    assert "that would be converted" in found[0][1] and "mxfp8 kFloat8E4M3 -> bfloat16" in found[0][1]
    assert "bfloat16 -> mxfp8 kFloat8E4M3" in found[1][1]
    assert "master_param: only in the checkpoint: left out" in found[2][1]
    assert "optimizer state 'master_param': saved float32, this optimizer keeps int16" in found[3][1]
    assert "state kept with a scale per shard" in found[4][1] and "exp_avg in uint8" in found[4][1]


def test_different_checkpoints_on_ranks_raise(pool, tmp_path):
    """Check that ranks never mix weights of two checkpoints, as when the newest one appears during the load."""
    found = same_on_all(pool.run(mistakes.load_different_checkpoints, 2, directory=str(tmp_path)))
    for kind, names in {
        "ours": ("ours-0", "ours-1"),
        "plain": ("plain-0", "plain-1"),
        "absent": ("ours-0", "ours-2"),
    }.items():
        name, text = found[kind]
        assert name == "CheckpointError" and "the ranks see different checkpoints" in text
        assert f"{names[0]} on rank 0" in text and f"{names[1]} on rank 1" in text


def test_hybrid_weights_raise_with_a_fix(pool, tmp_path):
    for error in pool.run_expect_error(mistakes.save_hybrid_weights, 2, directory=str(tmp_path)):
        assert error.type_name in ("CheckpointError", "PlacementError"), error
        assert "weight: quantized weight without a known layout" in error.message
        assert (
            "Fix: build it in high precision, without quantized_model_init; the custom recipe can stay"
            in (error.message)
        )


@pytest.mark.parametrize("how", ["no_shard", "optim", "optim_grads", "optim_grads_params", "torch"])
def test_save_between_microbatches_raises(pool, tmp_path, how):
    """Check that no save drops unreduced gradients, under every way of sharding.

    Complete gradients do not prevent a save. The save that raises drops no gradient of either microbatch.
    """
    for outcome in pool.run(save_timing.save_between_microbatches, 2, directory=str(tmp_path), how=how):
        name, text = outcome["refused"]
        assert (
            name == "OrderError"
            and "4 parameter(s) have gradients of a step that is not complete, such as " in text
        ), text
        assert "Fix: save after optimizer.step()" in text
        assert outcome["kept"] == dict.fromkeys(outcome["kept"], True) and len(outcome["kept"]) == 4
        expected = ["after", "before"] + (["discarded"] if how != "torch" else [])
        assert outcome["there"] == expected
