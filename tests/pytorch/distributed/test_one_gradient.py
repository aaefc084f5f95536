"""Reductions of all gradients of a unit as one. They change no bit."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from harness import assert_bitwise_equal
from strategies import one_gradient

_STEPS = one_gradient.STEPS
_FP32 = {"main_grads_dtype": torch.float32, "grad_comm_dtype": torch.bfloat16}


def _both(pool: Any, axes: dict[str, int], **options: Any) -> list[tuple[Any, Any]]:
    """Return the results of each rank: with one gradient for all, and with FSDP2's records; compare them."""
    ours, stock = (
        pool.run(one_gradient.train, math.prod(axes.values()), axes=axes, stock=stock, **options)
        for stock in (False, True)
    )
    for have, want in zip(ours, stock, strict=True):
        assert want["as one"] == 0
        assert [name for name, _ in have["tensors"]] == [name for name, _ in want["tensors"]]
        for (name, mine), (_, other) in zip(have["tensors"], want["tensors"], strict=True):
            assert_bitwise_equal(name, mine, other)
            assert other.any() or name == "mlp.fc2_bias", name  # the frozen one is zero
    return list(zip(ours, stock, strict=True))


@pytest.mark.parametrize(
    ("axes", "options"),
    [
        pytest.param({"dp_shard": 2}, {}, id="dp", marks=pytest.mark.ranks(2)),
        pytest.param({"dp_shard": 2}, {"policy": _FP32}, id="fp32", marks=pytest.mark.ranks(2)),
        pytest.param({"dp_shard": 2}, {"microbatches": 3}, id="added", marks=pytest.mark.ranks(2)),
        pytest.param(
            {"dp_shard": 2, "dp_replicate": 2}, {"microbatches": 2}, id="hsdp", marks=pytest.mark.ranks(4)
        ),
        pytest.param({"dp_shard": 2, "tp": 2}, {}, id="tp", marks=pytest.mark.ranks(4)),
    ],
)
def test_gradients_are_bitwise_equal(pool, axes, options):
    """Check uneven rows, a frozen weight, fp32 gradients, sums over microbatches, hsdp and tp."""
    for have, _ in _both(pool, axes, **options):
        units = 1 if "tp" in axes else 2
        assert have["as one"] == units * _STEPS * options.get("microbatches", 1)


@pytest.mark.ranks(2)
def test_hooks_of_shards_are_called(pool):
    """FSDP2 reduces the gradients of a unit with hooks on its shards, and calls them; the other unit has none."""
    for have, want in _both(pool, {"dp_shard": 2}, hook=True):
        assert have["as one"] == _STEPS
        assert have["called"] == want["called"] == [True] * _STEPS


@pytest.mark.ranks(2)
def test_a_parameter_that_one_rank_uses(pool):
    """Ranks that reduce as one and ranks that do not run the same collectives."""
    counts = [have["as one"] for have, _ in _both(pool, {"dp_shard": 2}, unused=True)]
    assert counts == [_STEPS + 1, _STEPS]  # the root's reduction too, where the rank used the parameter
