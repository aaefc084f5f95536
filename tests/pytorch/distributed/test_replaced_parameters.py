"""Parameters whose values or objects user code replaces. torch ignores the replacement without an error."""

from __future__ import annotations

import pytest
from parity import writes_after_evaluation


@pytest.mark.ranks(2)
@pytest.mark.parametrize("by", ["torch", "optim_grads_params"])
@pytest.mark.parametrize("surgery", writes_after_evaluation.REFUSED)
def test_replaced_parameter_raises(pool, surgery, by):
    for text in pool.run(writes_after_evaluation.error_of_change, 2, by=by, surgery=surgery):
        assert writes_after_evaluation.REFUSED[surgery][1] in text and "blocks.1.fc2_weight" in text
