"""Parameters that tp replicates. They stay equal although kernels do not sum in the same order."""

from __future__ import annotations

import pytest
from parity import tp_replicas

DP2_TP2 = {"dp_shard": 2, "tp": 2}


@pytest.mark.ranks(4)
@pytest.mark.parametrize("optimizer", ["adamw", "fused"])
@pytest.mark.parametrize(
    ("axes", "wrap"), [(DP2_TP2, "te_fsdp"), ({"dp_shard": 1, "tp": 4}, "tp")], ids=["dp2xtp2", "tp4"]
)
def test_tp_replicas_stay_equal(pool, axes, wrap, optimizer):
    for outcome in pool.run(tp_replicas.training, 4, axes=axes, optimizer=optimizer, wrap=wrap):
        assert len(outcome["whole"]) > 20
        assert outcome["differ"] == []


@pytest.mark.ranks(4)
@pytest.mark.parametrize("optimizer", ["adamw", "fused"])
def test_negative_control_tp_replicas_diverge(pool, optimizer):
    """Negative control: replicas diverge without te_fsdp's reduction, and `broadcast_params` makes them equal."""
    for outcome in pool.run(tp_replicas.training, 4, axes=DP2_TP2, optimizer=optimizer, watched=False):
        assert len(outcome["differ"]) > 20
        assert outcome["after broadcast"] == []
