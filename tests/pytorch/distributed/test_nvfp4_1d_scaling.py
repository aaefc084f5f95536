"""NVFP4 weights with one scale per 1 x 16 block.

Files store them as a separate format. Sharding them raises.
"""

from __future__ import annotations

import pytest
from quantization import nvfp4_1d

KINDS = ("nvfp4_rows", "nvfp4_squares")
NAMES = {"nvfp4_rows": "nvfp4-1d kFloat4E2M1", "nvfp4_squares": "nvfp4 kFloat4E2M1"}


@pytest.mark.recipe("nvfp4")
@pytest.mark.ranks(2)
@pytest.mark.parametrize("way", ["checkpoint", "older", "dcp"])
@pytest.mark.parametrize("target", KINDS)
@pytest.mark.parametrize("source", KINDS)
def test_loads_between_1d_and_2d_scaling(pool, tmp_path, source, target, way):
    """Check that loads quantize the source's values. They copied bytes under scales of different blocks."""
    where = {"source": source, "target": target, "way": way, "directory": str(tmp_path / "saved")}
    change = f"{NAMES[source]} -> {NAMES[target]}, from dequantized values"
    expected = {"equal": True, "control": True, "quantized": True, "converted": [change]}
    if source == target or way == "dcp":
        expected["converted"] = []
    for found in pool.run(nvfp4_1d.loads, 2, **where):
        assert found == expected


@pytest.mark.recipe("nvfp4")
@pytest.mark.ranks(2)
@pytest.mark.parametrize("ranks", [1, 2])
def test_sharding_1d_scaled_weights_raises(pool, ranks):
    """Check that all ranks raise an error with weight and fix, instead of an assertion of TE in the forward."""
    equal = pool.run(nvfp4_1d.same_rowwise_data, 1)[0]
    # Equal rowwise data of two weights does not determine their columnwise data.
    assert equal == {name: not name.startswith("columnwise") for name in equal}
    for errors in pool.run(nvfp4_1d.errors_of_sharding, ranks):
        assert len(errors) == 2
        for error in errors:
            assert ".weight: sharded NVFP4 weight with 1-D quantization" in error
            assert "disable_2d_quantization=False" in error
