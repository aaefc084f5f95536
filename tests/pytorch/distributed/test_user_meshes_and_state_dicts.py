"""First attempts of users: user-built meshes, a forward before materialize, entries of state dicts."""

from __future__ import annotations

import pytest
from checkpointing.models import Case
from harness.shared_memory import GLOO_VARIABLE
from user_meshes import meshes, state_dicts

MESHES = {
    "torch's, reordered": {"axes": {"dp_shard": 2, "dp_replicate": 2}},
    "other names": {
        "axes": {"data_parallel": 2, "tp": 2},
        "names": {"data_parallel": "dp_shard"},
    },
    "stages": {"axes": {"pp": 2, "dp_shard": 2}},
    "stages with tp": {"axes": {"pp": 2, "tp": 2}, "names": {}},
    "stages sliced away": {"axes": {"pp": 2, "dp_shard": 2}, "sliced": True},
    "stages by another name": {
        "axes": {"tiers": 2, "data": 2},
        "names": {"tiers": None, "data": "dp_shard"},
    },
    "stages without FSDP2": {"axes": {"pp": 2, "dp_shard": 2}, "strategy": "no_shard"},
    "axes of one rank": {"axes": {"whatever": 1, "dp_shard": 4}},
}


@pytest.mark.covering(days=2)
@pytest.mark.ranks(4)
@pytest.mark.parametrize("case", MESHES)
def test_training_on_user_built_meshes(pool, case):
    stages = pool.run(meshes.training, 4, **MESHES[case])
    assert stages == ([0, 0, 1, 1] if case.startswith("stages") else [0] * 4)


@pytest.mark.ranks(4)
def test_process_groups_of_one_pipeline_stage(pool):
    env = {GLOO_VARIABLE: "1"}  # which takes groups of one name for one
    assert pool.run(meshes.groups_created_by_ranks, 4, env=env, timeout=30) == [1, 1, 5, 5]


@pytest.mark.ranks(4)
def test_checkpoint_of_one_pipeline_stage_raises(pool, tmp_path):
    for (text,) in pool.run(meshes.checkpoint_of_a_stage, 4, directory=str(tmp_path)):
        assert "a model on 2 of 4 ranks" in text and "Fix: use plain torch.distributed.checkpoint" in text


@pytest.mark.ranks(4)
def test_mismatched_submeshes_raise(pool):
    for raised in pool.run_expect_error(meshes.error_of_mismatched_submeshes, 4):
        assert raised.type_name == "MeshError" and "a mesh of some of the ranks" in raised.message


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("how", "strategy"),
    [("fully_shard", "optim_grads_params"), ("fully_shard", "no_shard"), ("set_device_mesh", "no_shard")],
)
def test_forward_before_materialize_raises(pool, how, strategy):
    for texts in pool.run(meshes.forward_before_materialize, 2, how=how, strategy=strategy):
        assert len(texts) == 3
        for call, text in texts.items():
            assert "forward before te_fsdp.materialize" in text, call
            assert "blocks.0." in text and "Fix: call te_fsdp.materialize(model)" in text, call


DP2_TP2, TP4 = {"dp_shard": 2, "tp": 2}, {"tp": 4}
ENTRIES = {
    "plain": Case(optimizer="fused"),
    "stacked": Case(stacked=True, optimizer="fused"),
    "delayed": Case(optimizer="fused", recipe="delayed"),
    "delayed stacked quantized": Case(stacked=True, optimizer="fused", recipe="delayed", quantized=True),
    "current": Case(optimizer="fused", recipe="current", quantized=True),
}


@pytest.mark.ranks(4)
@pytest.mark.parametrize("which", ENTRIES)
def test_state_dict_entries_are_tensors(pool, tmp_path, which):
    case, where = ENTRIES[which], {"directory": str(tmp_path)}
    outcomes = pool.run(state_dicts.use_all_entries, 4, case=case, axes=DP2_TP2, **where)
    for outcome in outcomes:
        shapes = set(outcome["shapes"].values())
        assert (outcome["states"] > 0) == which.startswith("delayed")
        assert all(len(shape) == 1 for shape in shapes)
        if not which.startswith("delayed"):
            assert shapes == {(0,)}


@pytest.mark.ranks(4)
@pytest.mark.parametrize("other", [None, TP4], ids=["same", "tp4"])
@pytest.mark.parametrize("which", ["stacked", "current"])
def test_dcp_of_cpu_offloaded_state_dicts(pool, tmp_path, which, other):
    where = {"directory": str(tmp_path), "axes": DP2_TP2, "other": other}
    assert min(pool.run(state_dicts.round_trip_of_offloaded, 4, case=ENTRIES[which], **where)) > 8


@pytest.mark.ranks(4)
@pytest.mark.parametrize("recipe", ["delayed", "current", "mxfp8"])
def test_all_gather_hooks_called_by_te_scripts(pool, recipe):
    for counts in pool.run(state_dicts.call_hooks_by_hand, 4, recipe=recipe, tp=2):
        assert counts["hooks"] == counts["gathered"] >= 4
