"""Check that an optimizer steps every parameter with a gradient, frozen or not, as in one process.

Under HFSDP a parameter that was frozen after its backward kept its value.
"""

from __future__ import annotations

import pytest
from strategies import frozen_gradients


@pytest.mark.ranks(4)
@pytest.mark.parametrize("case", list(frozen_gradients.STRATEGIES))
def test_optimizer_steps_frozen_parameters_with_gradients(pool, case):
    assert pool.run(frozen_gradients.differing, 4, case=case, when="later") == [[]] * 4


@pytest.mark.ranks(4)
@pytest.mark.parametrize("when", ["first", "later", "one replica"])
def test_hfsdp_averages_of_frozen_parameters(pool, when):
    assert pool.run(frozen_gradients.differing, 4, case="hfsdp", when=when, marked=True) == [[]] * 4


@pytest.mark.ranks(4)
def test_assigned_gradient_of_a_frozen_parameter(pool):
    """Check gradients that no backward has computed, which only some replicas may have."""
    for error in pool.run_expect_error(frozen_gradients.assign, 4):
        assert error.type_name == "OrderError"
        assert "units.0.weight: frozen, with a gradient that no backward has computed" in error.message
