"""Changes of a loop after its first steps. Graphs record them."""

from __future__ import annotations

import pytest
from graphed import change_bodies
from test_graphed_programs import ENVIRONMENT


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    "optimizer",
    ["adamw", pytest.param("fused_adam", marks=pytest.mark.gpu)],  # the emulated one reads values on the host
)
@pytest.mark.parametrize("kind", ["", "frozen", "cleared", "added"])
def test_optimizer_state_created_in_a_graphed_step(pool, kind, optimizer):
    # The step with new states runs its optimizer eagerly, with a recording that is not kept.
    for found in pool.run(
        change_bodies.first_updates, 2, env=ENVIRONMENT, kind=kind, optimizer=optimizer, timeout=240
    ):
        if (kind, optimizer) == ("added", "fused_adam"):
            # FusedAdam creates the step count of a group on the host, which fails in a capture.
            assert found.pop(0).startswith("the capture has failed")
            found.insert(0, "")
        assert found == ["", 1, 5]


@pytest.mark.ranks(2)
def test_optimizer_that_replaces_state_runs_eagerly(pool):
    for found in pool.run(
        change_bodies.first_updates, 2, env=ENVIRONMENT, kind="", optimizer="replaces", timeout=240
    ):
        assert found == ["it replaces the tensors of its state", 1, 5]


@pytest.mark.ranks(2)
def test_frozen_weight_with_trained_bias_raises_in_a_graphed_step(pool):
    for error in pool.run(change_bodies.frozen_weight, 2, env=ENVIRONMENT, timeout=240):
        assert error.startswith("1.bias: a trained bias of a frozen weight")


@pytest.mark.arch("9.0")
@pytest.mark.parametrize("recipe", ["Float8CurrentScaling", "Float8BlockScaling"])
def test_two_backwards_of_transposed_quantized_weights(pool, recipe):
    for recordings, replays in pool.run(
        change_bodies.quantized_forwards, 1, env=ENVIRONMENT, recipe=recipe, timeout=240
    ):
        assert recordings == 3
        assert replays >= 12
