"""State dicts from before the first forward, whose tensors stay the model's, as FSDP2 guarantees."""

import pytest
from parity import early_state_dict


@pytest.mark.ranks(2)
@pytest.mark.parametrize("rows", [8, 7])
@pytest.mark.parametrize("sharder", ["te_fsdp", "torch"])
def test_early_state_dict_has_trained_values(pool, sharder, rows):
    """Check one ``state_dict()`` that is saved after every step. Uneven rows were stale."""
    assert pool.run(early_state_dict.untracked_parameters, 2, sharder=sharder, rows=rows) == [[], []]
