"""Writes of user code to weights between steps. The next step starts from the written values.

An optimizer with main weights would otherwise write the previous weights back: after ``copy_``, ``load_state_dict``, a
lookahead, or averaged weights that are swapped in and out.
"""

from __future__ import annotations

import pytest
from quantization import user_writes

from te_fsdp.layout import STRATEGIES

RECIPES = ("none", "current", "delayed", "block", "mxfp8", "nvfp4")


def _ways(recipe: str) -> list[str]:
    # Operations on sharded NVFP4 weights dequantize to BF16, which has not all of their values.
    absent = {"none": user_writes.UNCOUNTED, "nvfp4": ("mul_", "data.mul_", "foreach", "in and out")}.get(
        recipe, ()
    )
    return [way for way in user_writes.WAYS if way not in absent]


@pytest.mark.ranks(2)
@pytest.mark.covering(strength=1)
@pytest.mark.parametrize("optimizer", user_writes.OPTIMIZERS)
@pytest.mark.parametrize("recipe", RECIPES)
def test_step_uses_written_weights(pool, recipe, optimizer):
    """Check every way to write, for each format and each owner of main weights."""
    for number, way in enumerate(_ways(recipe)):
        strategy = STRATEGIES[number % len(STRATEGIES)]
        for found in pool.run(
            user_writes.trained, 2, recipe=recipe, optimizer=optimizer, strategy=strategy, way=way
        ):
            assert found["written"] is (way not in user_writes.RESTORED), (way, strategy)


@pytest.mark.ranks(2)
@pytest.mark.covering(strength=1)
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("way", user_writes.WAYS)
def test_step_uses_written_weights_under_every_strategy(pool, way, strategy):
    pool.run(user_writes.trained, 2, recipe="current", optimizer="AdamW", strategy=strategy, way=way)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("recipe", ["none", "current"])
@pytest.mark.parametrize("way", ["copy_", "data.mul_"])
def test_first_step_uses_written_weights(pool, way, recipe):
    """Check the first step, which compares all weights and therefore detects every write."""
    options = {"recipe": recipe, "optimizer": "SGD", "strategy": "optim_grads_params"}
    pool.run(user_writes.trained, 2, way=way, at=0, **options)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("way", ["copy_", "data.mul_", "in and out"])
def test_hfsdp_step_uses_written_weights(pool, way):
    """Check HFSDP, where each replica has main weights for its rows."""
    options = {"recipe": "current", "optimizer": "AdamW", "strategy": "optim_grads_params", "outer": "optim"}
    pool.run(user_writes.trained, 4, way=way, dp_replicate=2, dp_shard=2, **options)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("recipe", ["none", "mxfp8"])
def test_negative_control_ignored_writes(pool, recipe):
    """Negative control: main weights that are not updated."""
    from harness import BodyFailed

    options = {"recipe": recipe, "optimizer": "AdamW", "strategy": "optim_grads_params"}
    with pytest.raises(BodyFailed, match="0 2"):
        pool.run(user_writes.trained_without_updates, 2, way="copy_", **options)
