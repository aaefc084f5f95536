"""Main weights that a state dict lacks or has in excess, or that a write to the model has outdated."""

from __future__ import annotations

import pytest
from plain_dcp import main_weights


@pytest.mark.ranks(2)
@pytest.mark.parametrize("full", [False, True])
def test_fused_adam_makes_missing_main_weights(pool, full):
    """The next step raised KeyError for sharded states. Negative control: the previous main weights are others."""
    for found in pool.run(main_weights.load_without, 2, optimizer="FusedAdam", full=full, keeps=True):
        assert len(found["stale"]) == 6 and found["differ"] == [], found
        assert found["keys"] == ["exp_avg", "exp_avg_sq", "master_param"]


@pytest.mark.ranks(2)
@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("optimizer", ["FusedAdam", "AdamW"])
def test_optimizers_without_main_weights_drop_them(pool, optimizer, full):
    """Steps did not update these states, which later saves contained. A full state dict raised in a rank's shapes."""
    for found in pool.run(main_weights.load_without, 2, optimizer=optimizer, full=full, keeps=False):
        assert found == {"stale": [], "differ": [], "keys": ["exp_avg", "exp_avg_sq"]}, found


@pytest.mark.ranks(2)
@pytest.mark.parametrize("recipe", ["none", "current"])
@pytest.mark.parametrize("optimizer", ["FusedAdam", "AdamW"])
def test_saves_have_main_weights_of_written_weights(pool, tmp_path, optimizer, recipe):
    """Loads that convert dtypes returned the weights from before the write. The optimizer keeps its main weights.

    Negative control: these do not round to the written weights.
    """
    where = {"directory": str(tmp_path), "optimizer": optimizer, "recipe": recipe}
    for found in pool.run(main_weights.save_after_writes, 2, **where):
        assert found["stale"] and found["saved"] == found["sent"] == found["differ"] == [], found


@pytest.mark.ranks(2)
@pytest.mark.parametrize("written", [False, True])
def test_sent_weights_have_the_scales_of_fp16_main_weights(pool, written):
    """Exports had the stored values. Negative control: these are different from the scaled ones."""
    for found in pool.run(main_weights.send_scaled_main_weights, 2, written=written):
        assert found["scaled"] and found["differ"] == [], found


@pytest.mark.ranks(2)
def test_loaded_main_weights_in_fp16_keep_their_values(pool):
    """The next step replaced some by the rounded weights. Negative control: weights that are written replace them."""
    for found in pool.run(main_weights.load_scaled_main_weights, 2):
        assert found["differ"] == found["stale"] == [], found


@pytest.mark.ranks(2)
@pytest.mark.parametrize("keeps", [False, True])
def test_a_state_dict_loads_into_several_optimizers(pool, keeps):
    """The second optimizer got the main weights of the first one's model, or rounded ones, without an error."""
    for found in pool.run(main_weights.load_one_dict_twice, 2, keeps=keeps):
        assert found == [True, True, True]
