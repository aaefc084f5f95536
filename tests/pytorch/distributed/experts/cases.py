"""Cases of training under expert parallelism, as the tests' parameters."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest

MESHES: dict[str, dict[str, int]] = {
    "ep2": {"ep": 2},
    "ep4": {"ep": 4},
    "ep2_dp2": {"ep": 2, "dp_shard": 2},
    "ep2_tp2": {"ep": 2, "tp": 2},
    "dp4": {"dp_shard": 4},
    "hsdp_ep2": {"dp_replicate": 2, "dp_shard": 1, "ep": 2},
    "cp2_ep2": {"dp_shard": 1, "cp": 2, "ep": 2},
    "ep2_dp2_tp2": {"ep": 2, "dp_shard": 2, "tp": 2},
    "hsdp_ep2_dp2": {"dp_replicate": 2, "dp_shard": 2, "ep": 2},
}


def ranks(mesh: str) -> int:
    """Return the number of ranks of a mesh."""
    return math.prod(MESHES[mesh].values())


def allowed(case: dict[str, Any]) -> bool:
    """Return whether TE trains a case with `mesh`, `form` (recipe, weights) and `bias` in full blocks."""
    (recipe, weights), mesh = case["form"], MESHES[case["mesh"]]
    if mesh.get("tp", 1) > 1 and (case["bias"] or recipe == "current"):
        return False  # TE refuses both
    # Dense float8-block weights of the tests' width have full blocks for two FSDP ranks.
    dense = ranks(case["mesh"]) // mesh.get("tp", 1) // mesh.get("dp_replicate", 1)
    return (recipe, weights) != ("block", "quantized") or dense == 2


def parametrize(
    metafunc: pytest.Metafunc, cases: list[dict[str, Any]], name: Callable[[dict[str, Any]], str]
) -> None:
    """Give a test its arguments `recipe` and `case`."""
    parameters = [
        pytest.param(case["form"][0], case, id=name(case), marks=pytest.mark.ranks(ranks(case["mesh"])))
        for case in cases
    ]
    metafunc.parametrize(("recipe", "case"), parameters)
