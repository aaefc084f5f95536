"""Quantized weights in the safetensors that torch's ``HuggingFaceStorageWriter`` writes."""

from __future__ import annotations

import pytest
from plain_dcp import safetensors_writer


@pytest.mark.ranks(2)
@pytest.mark.parametrize("recipe", ["current", "block", "mxfp8"])
@pytest.mark.parametrize("joined", [True, False])
@pytest.mark.parametrize("axes", [{"tp": 2, "dp_shard": 1}, {"dp_shard": 2}], ids=["tp", "dp"])
def test_safetensors_have_high_precision_values(pool, tmp_path, axes, joined, recipe):
    """The writer raised SafetensorError for a tensor class without a storage."""
    outcomes = pool.run(
        safetensors_writer.saved,
        2,
        kind="gated MLP",
        recipe=recipe,
        axes=axes,
        joined=joined,
        directory=str(tmp_path),
    )
    for found in outcomes:
        assert found["wrong"] == [] and found["dtypes"] == {"torch.bfloat16"} and found["control"], found
