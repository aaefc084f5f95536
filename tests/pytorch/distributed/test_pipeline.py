"""Pipelines under torch's schedules, compared with one process.

Their checkpoints are compared, too.
"""

from __future__ import annotations

import math

import pytest
import torch
from pipelines import saved, scheduled

DP, TP = {"pp": 2, "dp": 2}, {"pp": 2, "tp": 2}
MXFP8 = pytest.mark.recipe("mxfp8")
FP8 = {"recipe": "current", "quantized": True, "dtype": torch.bfloat16, "microbatches": 2}
RUNS = {
    "1f1b dp": {"axes": DP, "transport": "nccl"},
    "gpipe tp": {"axes": TP, "kind": "gpipe"},
    "interleaved": {"axes": DP, "kind": "interleaved", "strategy": "optim_grads"},
    "zero bubble": {"axes": DP, "kind": "zero bubble", "strategy": "optim_grads"},
    "no_shard": {"axes": DP, "strategy": "no_shard"},
    "some no_shard": {"axes": DP, "strategy": {"": "no_shard", "layers.*": "optim"}},
    "hfsdp": {"axes": {"pp": 2, "replicate": 2}, "outer_strategy": "optim", "strategy": "optim"},
    "shapes unknown": {"axes": {"pp": 2, "replicate": 2}, "known_shapes": False},
    "delayed": {"axes": {"pp": 2}, "recipe": "delayed", "quantized": True, "steps": 3, "microbatches": 2},
    "mxfp8": {"axes": DP, "recipe": "mxfp8", "quantized": True, "strategy": "optim_grads", "microbatches": 2},
    "bf16": {"axes": {"pp": 2}, "kind": "gpipe", "dtype": torch.bfloat16},
    "bf16 dp": {"axes": DP, "dtype": torch.bfloat16},
    "fp8": {"axes": {"pp": 2}, "kind": "interleaved", **FP8},
    "fp8 dp": {"axes": DP, **FP8},
}
MARKS = {"mxfp8": MXFP8, **dict.fromkeys(("bf16", "bf16 dp", "fp8", "fp8 dp"), pytest.mark.gpu)}
# All-gathers of a step: with kept weights one for each of three units, else for each microbatch too.
GATHERS = {"1f1b dp": 15, "interleaved": 3, "mxfp8": 3, "no_shard": 0}
# All-reduces of gradients in a step: of each unit that is not sharded, for any number of microbatches.
REDUCTIONS = {"no_shard": 3, "some no_shard": 1}


@pytest.mark.covering(days=2)
@pytest.mark.ranks(4)
@pytest.mark.parametrize("run", [pytest.param(run, marks=MARKS.get(run, ())) for run in RUNS])
def test_schedules_equal_one_process(pool, tmp_path, run):
    """Check losses, gradients, norms over all stages and updated weights by value."""
    _schedule(pool, tmp_path, run)


@pytest.mark.cpu
@pytest.mark.arch("9.0")
@pytest.mark.ranks(2)
def test_float8_weights_with_transposes(pool, tmp_path):
    """Check Hopper's float8 weights, whose transpose backward uses."""
    _schedule(pool, tmp_path, "delayed")


def _schedule(pool, tmp_path, run):
    case = RUNS[run]
    whole = {key: case[key] for key in ("recipe", "quantized", "dtype") if key in case}
    pool.run(saved.trained, 1, name="whole", directory=str(tmp_path), **whole)
    outcomes = pool.run(
        scheduled.training, math.prod(case["axes"].values()), directory=str(tmp_path), timeout=60, **case
    )
    for outcome in outcomes:
        assert run not in GATHERS or set(outcome["gathers"]) == {GATHERS[run]}
        assert run not in REDUCTIONS or set(outcome["reductions"]) == {REDUCTIONS[run]}
    assert outcomes[-1]["losses"] and not outcomes[0]["losses"]


@pytest.mark.ranks(4)
@pytest.mark.parametrize(
    ("broken", "word"), [("layer", "gradient of embedding.weight"), ("norm", "step 0: norm")]
)
def test_negative_control_faults(pool, tmp_path, broken, word):
    pool.run(saved.trained, 1, name="whole", directory=str(tmp_path))
    errors = pool.run_expect_error(scheduled.training, 4, directory=str(tmp_path), axes=DP, broken=broken)
    assert word in errors[0].message


CHAINS = {
    # Each but the first loads what the one before it saved.
    "fp32": ({}, [{"pp": 2, "dp": 2}, {"pp": 4}, {"pp": 2, "tp": 2}]),
    "two stages a rank": ({"per_rank": 2}, [{"pp": 2, "dp": 2}]),
    "delayed": ({"recipe": "delayed", "quantized": True}, [{"pp": 2, "dp": 2}]),
    "mxfp8": ({"recipe": "mxfp8", "quantized": True}, [{"pp": 2}]),
    "fp8": ({"recipe": "current", "quantized": True, "dtype": torch.bfloat16}, [{"pp": 2}]),
}


@pytest.mark.covering(days=2)
@pytest.mark.ranks(4)
@pytest.mark.parametrize(
    "chain", [pytest.param(c, marks={"mxfp8": MXFP8, "fp8": pytest.mark.gpu}.get(c, ())) for c in CHAINS]
)
def test_checkpoints_load_on_different_stages(pool, tmp_path, chain):
    """Check one process -> stages -> different stages -> one process."""
    options, hops = dict(CHAINS[chain][0]), CHAINS[chain][1]
    per_rank = options.pop("per_rank", 1)
    where = {"directory": str(tmp_path)}
    pool.run(saved.trained, 1, name="0", **where, **options)
    for number, axes in enumerate(hops):
        ranks = axes.get("pp", 1) * axes.get("dp", 1) * axes.get("tp", 1)
        hop = {"source": str(number), "target": str(number + 1), "axes": axes}
        for outcome in pool.run(
            saved.load_on_different_stages, ranks, **hop, **where, **options, per_rank=per_rank
        ):
            assert outcome == {"left": {}, "converted": {}, "step": 2}
    names = [str(number) for number in range(len(hops) + 1)]
    pool.run(saved.compare_checkpoints, 1, names=[*names, f"{names[-1]} before"], **where, **options)


@pytest.mark.ranks(2)
def test_split_backward_raises(pool):
    """Check the backward that zero-bubble schedules split. An unsplit backward works afterwards."""
    for name, text in pool.run(scheduled.error_of_split_backward, 2):
        assert name == "OrderError"
        assert "a backward only for the inputs of a pipeline stage" in text
        assert "PipelineStage(..., dw_builder=lambda: lambda: None)" in text


MISTAKES = {
    "counted from 0": [
        "tensor name(s) are repeated in several stages: embedding.weight",
        "Fix: give a stage the names",
    ],
    "other groups": ["the optimizer of stage 1", "as in stage 0, AdamW with groups [", "the same groups"],
    "missing": ["only in the checkpoint (layers.2.", "Nothing was loaded"],
}


@pytest.mark.ranks(4)
@pytest.mark.parametrize("what", MISTAKES)
def test_mismatched_stages_raise(pool, tmp_path, what):
    pool.run(saved.trained, 1, name="whole", directory=str(tmp_path))
    texts = pool.run(saved.errors_of_mismatched_stages, 4, directory=str(tmp_path), what=what)
    assert len(set(texts)) == 1
    assert all(word in texts[0] for word in MISTAKES[what]), texts[0]


@pytest.mark.ranks(4)
def test_parameters_shared_by_stages(pool, tmp_path):
    texts = pool.run(saved.tied, 4, directory=str(tmp_path))
    assert texts[0] == texts[3]
    assert 'shared=["embedding.weight"]' in texts[0]["unnamed"]
    assert (
        "differ between ranks that must have the same: model.embedding.weight (rank 3 from rank 1)"
        in texts[0]["unequal"]
    )
