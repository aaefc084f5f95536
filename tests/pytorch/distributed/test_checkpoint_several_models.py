"""Checkpoints of several models.

Models and optimizers are saved by name on one mesh, with main weights, then loaded on a different one.
"""

from __future__ import annotations

import pytest
import torch
from checkpointing import several_models

DP2, HSDP = {"dp_shard": 2}, {"dp_replicate": 2, "dp_shard": 1}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("there", [DP2, HSDP], ids=["same mesh", "different mesh"])
def test_several_models_continue_as_without_interruption(pool, tmp_path, there):
    """Check a job with several models or optimizers, bit for bit."""
    expected = pool.run(several_models.save_several_models, 2, directory=str(tmp_path), axes=DP2)[0]
    assert len(expected) > 20
    for outcome in pool.run(several_models.load_several_models, 2, directory=str(tmp_path), axes=there):
        found = outcome["values"]
        assert outcome["step"] == 3 and found.keys() == expected.keys()
        assert [n for n, v in expected.items() if not torch.equal(found[n], v)] == []
        assert any(not torch.equal(v, expected[n]) for n, v in outcome["before"].items()), "the control"


@pytest.mark.ranks(2)
def test_unsupported_dtensors_in_extra_raise(pool, tmp_path):
    for outcome in pool.run(several_models.errors_of_extra_dtensors, 2, directory=str(tmp_path), axes=DP2):
        assert "extra/sums/w: a DTensor that cannot be stored" in outcome["text"]
        assert "Fix: store value.full_tensor()" in outcome["text"]
    assert list(tmp_path.iterdir()) == []
