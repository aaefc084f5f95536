"""What people try first: torch's own meshes, stages of a pipeline, a forward too early."""

from __future__ import annotations

import pytest
from doors import meshes

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


@pytest.mark.ranks(4)
@pytest.mark.parametrize("case", MESHES)
def test_meshes_of_others(pool, case):
    stages = pool.run(meshes.training, 4, **MESHES[case])
    assert stages == ([0, 0, 1, 1] if case.startswith("stages") else [0] * 4)


@pytest.mark.ranks(4)
def test_a_checkpoint_of_one_stage(pool, tmp_path):
    for (text,) in pool.run(meshes.checkpoint_of_a_stage, 4, directory=str(tmp_path)):
        assert "a model on 2 of 4 ranks" in text and "Fix: plain torch.distributed.checkpoint" in text


@pytest.mark.ranks(4)
def test_parts_that_do_not_match(pool):
    for raised in pool.run_expect_error(meshes.parts_that_do_not_match, 4):
        assert raised.type_name == "MeshError" and "a mesh of a part of the ranks" in raised.message


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("how", "strategy"),
    [("fully_shard", "optim_grads_params"), ("fully_shard", "no_shard"), ("set_device_mesh", "no_shard")],
)
def test_forward_before_materialize(pool, how, strategy):
    for texts in pool.run(meshes.forward_too_early, 2, how=how, strategy=strategy):
        assert len(texts) == 3
        for call, text in texts.items():
            assert "forward before te_fsdp.materialize" in text, call
            assert "blocks.0." in text and "Fix: call te_fsdp.materialize(model)" in text, call
