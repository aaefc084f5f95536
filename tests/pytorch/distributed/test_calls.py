"""A step asks once what never changes: te_fsdp's own calls in a settled step have a budget.

Python 3.10 and 3.11 also count a call for each comprehension.
"""

from __future__ import annotations

import pytest
from strategies import calls


@pytest.mark.ranks(2)
@pytest.mark.recipe("current")
@pytest.mark.parametrize(
    ("axes", "budget"),
    [({"dp_shard": 1, "tp": 2}, 800), ({"dp_shard": 2}, 650)],
    ids=["tp2", "dp2"],
)
def test_a_settled_step(pool, axes, budget):
    for counted in pool.run(calls.settled, 2, axes=axes):
        assert sum(dict(counted).values()) <= budget, counted[:20]
        # What every gather of its 8 weights comes by: the step was counted at all.
        assert dict(counted)["quantized/all_gather.py:fsdp_pre_all_gather"] == 16
