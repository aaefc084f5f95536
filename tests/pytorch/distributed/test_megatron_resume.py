"""Resuming a training of the bridge through DCP, bit for bit."""

from __future__ import annotations

import pytest
from bridge import resume
from harness.shared_memory import GLOO_VARIABLE

from te_fsdp.layout import STRATEGIES

PLACES = [
    *((strategy, None) for strategy in STRATEGIES),
    ("no_shard", "no_shard"),
    ("optim_grads_params", "no_shard"),
    ("optim_grads_params", "optim"),
]


# TE's FusedAdam alone counts its steps in the group; of torch's optimizers one is plain, one foreach, one fused.
KINDS = {
    "some": ["Adam", "fused", "FusedAdam", "SGD"],
    "others": ["foreach", "momentum", "FusedAdam+main"],
    "rest": ["amsgrad", "AdamW", "RMSprop"],
}
assert sorted(kind for kinds in KINDS.values() for kind in kinds) == sorted(resume.OPTIMIZERS)


@pytest.mark.covering(
    # The count of steps in a group; state of one slice among copies, and of none.
    always=[
        {"strategy": "no_shard", "outer": None, "kinds": "some"},
        {"strategy": "no_shard", "outer": "no_shard", "kinds": "some"},
        {"strategy": "optim_grads_params", "outer": "optim", "kinds": "some"},
    ],
    strength=1,
)
@pytest.mark.ranks(4)
@pytest.mark.parametrize("kinds", KINDS)
@pytest.mark.parametrize(("strategy", "outer"), PLACES)
def test_resume_through_dcp_is_bitwise_equal(pool, tmp_path, strategy, outer, kinds):
    """Check the scenario of megatron-fsdp's `test_dcp_checkpoint_save_and_load` and two more steps."""
    kinds = KINDS[kinds]
    options = {"strategy": strategy, "outer": outer, "directory": str(tmp_path)}
    # How gloo rounds a sum depends on what it is packed with, which is to be the same after a resume.
    env = {GLOO_VARIABLE: "1"} if strategy == "no_shard" else {}
    for found in pool.run(resume.resume, 4, kinds=kinds, env=env, **options):
        assert list(found) == kinds
        for kind, outcome in found.items():
            assert outcome["loaded"] == [], kind
            assert outcome["trained"] == [], kind
            assert bool(outcome["states"]) == (kind != "SGD")


@pytest.mark.ranks(4)
def test_negative_control_resume_without_optimizer_state(pool):
    """Negative control: the compared values depend on the optimizer state, if there is some."""
    for found in pool.run(resume.without_state, 4, strategy="optim_grads_params", outer=None):
        assert found["Adam"] and not found["SGD"]


@pytest.mark.ranks(4)
@pytest.mark.parametrize(
    ("strategy", "outer"), [("no_shard", None), ("optim", None), ("optim_grads_params", "optim")]
)
def test_resume_with_main_weights(pool, tmp_path, strategy, outer):
    """Check bf16 weights with fp32 main weights in the optimizer."""
    kinds = ["AdamW", "fused", "momentum", "FusedAdam+main"]
    options = {"strategy": strategy, "outer": outer, "directory": str(tmp_path), "low": True}
    for found in pool.run(resume.resume, 4, kinds=kinds, **options):
        for kind, outcome in found.items():
            assert outcome["loaded"] == [] and outcome["trained"] == [], kind
            assert outcome["states"]


@pytest.mark.ranks(2)
def test_state_dicts_before_the_first_step(pool):
    for found in pool.run(resume.before_the_first_step, 2):
        assert found["states"] == [["exp_avg", "exp_avg_sq", "step"]] * 6 and found["steps"] == [0.0]
        assert found["changed"] == []
        for name in ("Adamax", "SGD", "NAdam"):
            assert f"{name}.state_dict() before the first step" in found[name]
        assert "Adam.load_state_dict: expected a state dict with state of 6 parameters" in found["early"]
