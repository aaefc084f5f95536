"""`report_nan` of a model that is trained by a registered method instead of its forward."""

from __future__ import annotations

import pytest
from precision import nan_report


@pytest.mark.ranks(2)
def test_nan_report_names_rank_and_microbatch(pool):
    cases = {"method": {"method": True}, "no_sync": {"method": True, "context": "no_sync"}}
    for found in pool.run(nan_report.errors_of_one_nan, 2, cases=cases, axes={}):
        for name, (first, second, weights) in found.items():
            assert first.startswith("gradients with NaN or infinity: second.weight: rank 1 (microbatch 2)"), (
                name
            )
            assert (second, weights) == ("", ""), name
