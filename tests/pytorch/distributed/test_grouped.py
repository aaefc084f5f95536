"""One parameter for all experts of a ``GroupedLinear``: the same training as one parameter per expert, on any mesh."""

from __future__ import annotations

import pytest
from grouping import bodies

DP2, DP4, TP2 = {"dp_shard": 2}, {"dp_shard": 4}, {"dp_shard": 1, "tp": 2}
DP2_TP2, EP2, EP2_DP2, EP2_TP2 = (
    {"dp_shard": 2, "tp": 2},
    {"dp_shard": 1, "ep": 2},
    {"dp_shard": 2, "ep": 2},
    {"dp_shard": 1, "ep": 2, "tp": 2},
)


def ranks_of(mesh: dict[str, int]) -> int:
    count = 1
    for size in mesh.values():
        count *= size
    return count


def case(mesh, experts, splits, recipe="none", *, quantized=False, **options):
    name = "x".join(f"{axis.split('_')[0]}{size}" for axis, size in mesh.items() if size > 1)
    words = [
        name,
        f"{experts}experts",
        recipe,
        *(["quantized"] if quantized else []),
        *map(str, options.values()),
    ]
    return pytest.param(
        mesh,
        experts,
        splits,
        recipe,
        quantized,
        options,
        id="-".join(words),
        marks=pytest.mark.ranks(ranks_of(mesh)),
    )


@pytest.mark.parametrize(
    ("mesh", "experts", "splits", "recipe", "quantized", "options"),
    [
        case(DP2, 2, (1, 2)),
        case(DP2, 3, (1, 0, 2), "mxfp8"),
        case(TP2, 2, (1, 1), "mxfp8"),
        case(DP2_TP2, 2, (1, 0)),
        case(EP2, 3, (1, 0), "mxfp8"),
        case(EP2_DP2, 4, (0, 1)),
        case(EP2_TP2, 4, (2, 0), "mxfp8"),
        case(DP2, 3, (1, 0, 2), "mxfp8", quantized=True, optimizer="fused"),
        case(DP2_TP2, 2, (1, 0), "mxfp8", quantized=True),
        case(EP2_DP2, 2, (1,), "nvfp4", quantized=True),
        case(DP2, 1, (1,), "current", quantized=True, optimizer="fused"),
    ],
)
def test_both_forms(pool, mesh, experts, splits, recipe, quantized, options):
    kwargs = {"mesh": mesh, "experts": experts, "splits": splits, "recipe": recipe, "quantized": quantized}
    for outcome in pool.run(bodies.both_forms, ranks_of(mesh), **kwargs, **options):
        assert outcome["checked"]["real"] >= 4 * bodies.STEPS
