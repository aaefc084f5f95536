"""``iter_weights`` compares its options on all ranks before it communicates.

Without the comparison, an option that differs on one rank hangs or sends tensors in a wrong format.
"""

from __future__ import annotations

import pytest
from checkpointing import stream_options

from tests.unit.huggingface_models import make_huggingface

pytestmark = pytest.mark.cpu


@pytest.fixture
def folder(tmp_path):
    pytest.importorskip("transformers", reason="transformers is not installed (extra: test)")
    make_huggingface("llama").save_pretrained(tmp_path / "model")
    return str(tmp_path / "model")


@pytest.mark.parametrize("option", ["format", "receiver", "bucket_bytes", "since"])
def test_different_options_on_ranks_raise(pool, folder, option):
    for error in pool.run_expect_error(
        stream_options.error_of_different_options, 2, folder=folder, option=option
    ):
        assert error.type_name == "CheckpointError", error
        assert f"iter_weights: {option}: expected the same on all ranks" in error.message, error


def test_equal_options_pass(pool, folder):
    found = pool.run(stream_options.error_of_different_options, 2, folder=folder, option="")
    assert found[0] == found[1] > 10


def test_non_model_argument_raises():
    import te_fsdp
    import te_fsdp.huggingface

    with pytest.raises(te_fsdp.errors.CheckpointError, match="iter_weights: model: expected a model"):
        te_fsdp.huggingface.iter_weights(None, config={})
