"""State that a recorded graph does not contain. te_fsdp checks it, or the step runs eagerly.

A forward reads these values from outside its tensor arguments, and they change between steps.
"""

from __future__ import annotations

import pytest
from graphed import state_bodies

pytestmark = pytest.mark.cpu

#: Captured operations do not include those that go through memory of the test's own collectives.
GLOO = {"TE_FSDP_TEST_GLOO": "1"}
REPLACED = "replaces the buffer mean, which must be updated in place"


@pytest.mark.parametrize("units", [False, True], ids=["step", "units"])
@pytest.mark.parametrize("kind", ["copied", "assigned", "data", "moved"])
def test_buffers_updated_in_forward(pool, kind, units):
    for why, recordings in pool.run(state_bodies.buffers, 2, env=GLOO, kind=kind, units=units, timeout=240):
        if kind in ("assigned", "data"):
            assert why.rstrip(")").endswith(REPLACED) and recordings == 0
        else:
            assert (why, recordings) == ("", (2 if units else 1) * (1 + (kind == "moved")))


def test_failed_capture_restores_buffers(pool):
    for why, recordings in pool.run(
        state_bodies.buffers, 2, env=GLOO, kind="assigned", units=False, reads=True
    ):
        assert "operation not permitted when stream is capturing" in why and recordings == 0


@pytest.mark.parametrize("units", [False, True], ids=["step", "units"])
def test_changed_attributes_of_argument_objects_are_used(pool, units):
    for (recordings,) in pool.run(state_bodies.objects_as_arguments, 2, env=GLOO, units=units, timeout=240):
        assert recordings <= 4


def test_learning_rate_as_number_or_tensor(pool):
    assert pool.run(state_bodies.learning_rates, 2, env=GLOO) == [[1, 5]] * 2
