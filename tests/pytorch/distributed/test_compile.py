"""torch.compile around a sharded model."""

from __future__ import annotations

import pytest
from checkpointing.selection import is_full
from strategies import compiled, compiled_parts

ALL = ["no_shard", "optim", "optim_grads", "optim_grads_params"]
MIXED = {"blocks.0": "optim", "blocks.1": "no_shard"}


@pytest.mark.covering(days=2)
@pytest.mark.ranks(4)
@pytest.mark.parametrize(
    ("axes", "outer", "backend", "strategies"),
    [
        ({}, "no_shard", "eager", ALL),
        ({}, "no_shard", "aot_eager", [MIXED]),
        ({"tp": 2}, "no_shard", "eager", ALL),
        ({"dp_replicate": 2}, "optim", "eager", ["optim"]),
    ],
    ids=["dp", "aot", "tp", "hfsdp"],
)
def test_compiled_training_is_bitwise_equal(pool, axes, outer, backend, strategies, matrix_seed, request):
    ranks = 4 if axes else 2
    if strategies is ALL and not is_full(request.config):  # they take turns
        strategies = [ALL[matrix_seed % len(ALL)]]
        if "tp" not in axes:  # a hook before each unit looks at the weights that this one keeps gathered
            strategies = sorted({"optim", *strategies})
    for graphs in pool.run(
        compiled.trained, ranks, strategies=strategies, axes=axes, backend=backend, outer=outer, timeout=300
    ):
        assert all(graphs), graphs  # something was compiled: the head, between the units


@pytest.mark.ranks(2)
@pytest.mark.parametrize("way", ["before", "after", "torch", "step"])
def test_compiled_parts_equal_one_process(pool, way):
    assert pool.run(compiled_parts.equal_to_one_process, 2, way=way, timeout=300) == [10, 10]
