"""HFSDP (`outer_strategy="optim"`): weights over dp_shard, optimizer state over dp_replicate x dp_shard."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hfsdp import bodies

#: Axes of each mesh -> cases that run on it one after the other.
PARITY: dict[str, tuple[dict[str, int], list[dict[str, Any]]]] = {
    "2x1": ({"dp_replicate": 2, "dp_shard": 1}, [{"optimizer": "fused", "microbatches": 3}]),
    "4x1": (
        {"dp_replicate": 4, "dp_shard": 1},
        [{"optimizer": "te", "clip": 0.5}, {"optimizer": "sgd", "microbatches": 3}],
    ),
    "2x2": (
        {"dp_replicate": 2, "dp_shard": 2},
        [
            {"optimizer": "sgd", "microbatches": 3, "clip": 0.5},
            {"optimizer": "adamw", "clip": 0.5},
            {"optimizer": "foreach", "microbatches": 3},
            {"optimizer": "te", "microbatches": 3, "clip": 0.5},
        ],
    ),
    "2x2xtp2": (
        {"dp_replicate": 2, "dp_shard": 2, "tp": 2},
        [{"optimizer": "adamw", "microbatches": 3, "clip": 0.5}],
    ),
}


def _mesh(name: str) -> object:
    return pytest.param(name, marks=pytest.mark.ranks(math.prod(PARITY[name][0].values())), id=name)


@pytest.mark.parametrize("mesh", [_mesh(name) for name in PARITY])
def test_equals_one_process(pool, mesh):
    axes, cases = PARITY[mesh]
    results = pool.run(bodies.parity, math.prod(axes.values()), axes=axes, cases=cases)
    assert all(len(result) == len(cases) for result in results)
