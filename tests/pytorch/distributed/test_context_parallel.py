"""Attention over ``cp``.

One call sets it up from the meshes. Values are compared with one process. Every mistake raises.
"""

from __future__ import annotations

import bodies_context_parallel as bodies
import pytest


@pytest.mark.ranks(2)
@pytest.mark.arch("9.0", "10.0")
def test_ring_attention(pool):
    pool.run(bodies.parity, 2, axes={"cp": 2}, comm_types=["p2p"])


@pytest.mark.ranks(2)
def test_all_gather_and_all_to_all(pool):
    pool.run(bodies.parity, 2, axes={"cp": 2}, comm_types=["a2a", "all_gather"])


@pytest.mark.ranks(2)
def test_attention_without_mask(pool):
    pool.run(bodies.parity, 2, axes={"cp": 2}, comm_types=["p2p"], causal=False)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("parallel", [False, True])
def test_context_parallel_with_tp(pool, parallel):
    comm_types = ["p2p", "a2a"] if parallel else ["p2p"]
    pool.run(bodies.parity, 4, axes={"cp": 2, "tp": 2}, comm_types=comm_types, parallel=parallel)


@pytest.mark.ranks(4)
def test_quantized_weights_on_two_axes(pool):
    pool.run(bodies.parity, 4, axes={"dp_shard": 2, "cp": 2}, comm_types=["p2p"], recipe="current")


@pytest.mark.ranks(4)
def test_hierarchical_a2a_p2p(pool):
    pool.run(bodies.parity, 4, axes={"cp": 4}, comm_types=["a2a+p2p"])


@pytest.mark.ranks(2)
def test_set_context_parallel_without_fully_shard(pool):
    pool.run(bodies.set_context_parallel_without_fsdp, 2, axes={"cp": 2})


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    "body", [bodies.context_parallel_shard, bodies.unsupported_setups, bodies.unsupported_calls]
)
def test_unsupported_setups_raise(pool, body):
    pool.run(body, 2, axes={"cp": 2})


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("what", "text"),
    [
        ("parts", ""),
        ("unchecked", ""),
        ("whole", "x the same on cp ranks 0 and 1"),
        ("lengths", "x (bfloat16 (8, 4, 64) on cp rank 0, bfloat16 (12, 4, 64) on cp rank 1)"),
    ],
)
def test_wrong_inputs_raise(pool, what, text):
    for kind, got in pool.run(bodies.forward_with_inputs, 2, axes={"cp": 2}, what=what):
        assert kind == ("InputError" if text else ""), got
        assert text in got and (not text or "te_fsdp.context_parallel_shard(batch, meshes)" in got)
