"""State dicts from before the first forward stay those of the model, as torch's FSDP2 promises to trainers."""

import pytest
from parity import early_state_dict


@pytest.mark.ranks(2)
@pytest.mark.parametrize("rows", [8, 7])
@pytest.mark.parametrize("sharder", ["te_fsdp", "torch"])
def test_early_state_dict_has_trained_values(pool, sharder, rows):
    """``state = model.state_dict()`` once before training, then saved in each step. Uneven rows were stale."""
    assert pool.run(early_state_dict.untracked_parameters, 2, sharder=sharder, rows=rows) == [[], []]
