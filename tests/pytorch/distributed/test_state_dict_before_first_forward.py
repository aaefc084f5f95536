"""State dicts before the first forward: their tensors stay the model's, as FSDP2 guarantees. Loads are exact."""

import pytest
from parity import early_state_dict


@pytest.mark.ranks(2)
@pytest.mark.parametrize("rows", [8, 7])
@pytest.mark.parametrize("sharder", ["te_fsdp", "torch"])
def test_early_state_dict_has_trained_values(pool, sharder, rows):
    """Check one ``state_dict()`` that is saved after every step. Uneven rows were stale."""
    assert pool.run(early_state_dict.untracked_parameters, 2, sharder=sharder, rows=rows) == [[], []]


@pytest.mark.ranks(4)
@pytest.mark.parametrize("recipe", ["current", "delayed"])
@pytest.mark.parametrize("how", ["full", "broadcast", "dcp"])
def test_high_precision_values_load_into_quantized_weights(pool, tmp_path, how, recipe):
    """Load into a gated weight that ``fully_shard`` has sharded on the device. It kept the scale of the initial one."""
    for result in pool.run(
        early_state_dict.loaded_values, 4, how=how, recipe=recipe, directory=str(tmp_path)
    ):
        assert result["loaded"] == []
        assert result["differing_scales"] == []
