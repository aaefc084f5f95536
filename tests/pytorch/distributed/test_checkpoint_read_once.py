"""Loads that read each shard once for all ranks.

Ranks get the same bits from fewer bytes of storage, or all of them the error.
"""

from __future__ import annotations

import pytest
from checkpointing import read_once
from checkpointing.models import Case

COPIES, HSDP = {"dp_replicate": 2, "dp_shard": 1}, {"dp_replicate": 2, "dp_shard": 2}
MXFP8 = Case(optimizer="fused", recipe="mxfp8", quantized=True)

pytestmark = pytest.mark.cpu


@pytest.mark.parametrize(
    ("ranks", "case", "axes", "to"),
    [
        pytest.param(
            2, Case(optimizer="fused bf16"), COPIES, COPIES, id="copies", marks=pytest.mark.ranks(2)
        ),
        pytest.param(4, MXFP8, HSDP, HSDP, id="hsdp-mxfp8", marks=pytest.mark.ranks(4)),
        pytest.param(
            4, Case(stacked=True), {"dp_shard": 2, "tp": 2}, HSDP, id="other", marks=pytest.mark.ranks(4)
        ),
    ],
)
def test_read_once_is_bitwise_equal(pool, tmp_path, ranks, case, axes, to):
    for outcome in pool.run(
        read_once.compare_reads, ranks, case=case, axes=axes, to=to, directory=str(tmp_path)
    ):
        assert outcome["wrong"] == [] and outcome["tensors"] > 20
        each, once, auto = outcome["read"]
        assert 0.45 * each < once < 0.6 * each and auto == once, outcome["read"]


@pytest.mark.ranks(4)
def test_read_errors_are_raised_on_all_ranks(pool, tmp_path):
    results = pool.run(read_once.errors_of_damaged_files, 4, axes=HSDP, directory=str(tmp_path))
    for texts, changed, count in results:
        assert texts == results[0][0] and changed == [] and count > 10
        *damaged, unknown = texts
        assert all(
            "damaged checkpoint: __0_0.distcp: its contents have changed (CRC-32" in text for text in damaged
        )
        assert len(damaged) == 2 and "load: read: expected 'auto', 'each' or 'once', got 'twice'" in unknown
