"""The kind: parameters whose values or objects user code replaces, which torch ignores without an error."""

from __future__ import annotations

import pytest
from parity import evaluated_writes


@pytest.mark.ranks(2)
@pytest.mark.parametrize("by", ["torch", "optim_grads_params"])
@pytest.mark.parametrize("surgery", evaluated_writes.REFUSED)
def test_an_error_names_the_parameter(pool, surgery, by):
    for text in pool.run(evaluated_writes.refused, 2, by=by, surgery=surgery):
        assert evaluated_writes.REFUSED[surgery][1] in text and "blocks.1.fc2_weight" in text
