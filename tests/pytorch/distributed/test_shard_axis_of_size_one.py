"""A shard axis of size 1. Neither weights nor gradients are copied."""

from __future__ import annotations

import pytest
import torch
from harness import assert_bitwise_equal
from strategies import shard_axis_of_size_one


def _runs(pool, **how):
    """Run a training with and one without lent memory on each rank, bitwise equal."""
    both = zip(
        pool.run(shard_axis_of_size_one.compare_shared_memory, 2, **how),
        pool.run(shard_axis_of_size_one.compare_shared_memory, 2, lend=False, **how),
        strict=True,
    )
    for one, other in both:
        assert one["lent"] and not any(other["lent"].values())
        for kind in ("losses", "weights"):
            for number, (have, want) in enumerate(zip(one[kind], other[kind], strict=True)):
                assert_bitwise_equal(f"{kind} {number}", have, want)
        yield one["lent"].values()


@pytest.mark.covering(
    # Memory that FSDP2 frees, or that a shard had before it was moved; buffers of quantized weights.
    always=[
        {"replicas": False, "recipe": recipe, "strategy": "optim_grads_params"}
        for recipe in ("none", "current")
    ],
    strength=1,
)
@pytest.mark.ranks(2)
@pytest.mark.parametrize("strategy", ["optim_grads_params", "optim_grads"])
@pytest.mark.parametrize("recipe", ["none", "current", "delayed", "block", "mxfp8", "nvfp4"])
@pytest.mark.parametrize("replicas", [False, True], ids=["tp2", "replicas2"])
def test_gathered_weight_shares_the_shards_memory(pool, recipe, strategy, replicas):
    for lent in _runs(pool, recipe=recipe, strategy=strategy, replicas=replicas):
        assert all(lent)


@pytest.mark.ranks(2)
def test_cast_weights_are_copied(pool):
    for lent in _runs(pool, recipe="none", main_params_dtype=torch.float32, param_dtype=torch.bfloat16):
        assert not any(lent)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("strategy", ["optim_grads_params", "optim"])
def test_gradients_are_not_copied(pool, strategy):
    """Check that gradients are passed on without a copy, except for gradients that share memory."""
    for passed in pool.run(shard_axis_of_size_one.reused_gradients, 2, strategy=strategy):
        assert sorted(passed) == ["matrix", "product.weight"]
