"""`ExpertDispatcher`, compared with one process with the same capacity.

It does not synchronize the host.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from experts import dispatching
from parity.runs import RTOL
from test_user_dtensors import NEAR_TF32


@pytest.mark.ranks(2)
def test_dropped_tokens_equal_one_process(pool):
    """Outputs and gradients of tokens and experts are equal bit for bit; the router's is summed over the ranks.

    Both ranks' rows of an expert are in the buffer of one process, in the same order. Negative control: one capacity
    for the tokens of both ranks drops different ones.
    """
    capacity = 9  # an even load is 16
    ranks = pool.run(dispatching.step, 2, axes={"dp_shard": 1, "ep": 2}, capacity=capacity)
    (one,) = pool.run(dispatching.step, 1, axes={}, capacity=capacity, groups=2)
    (other,) = pool.run(dispatching.step, 1, axes={}, capacity=2 * capacity)
    assert [rank["splits"] for rank in ranks] == [[18, 18], [18]] and one["splits"] == [18, 18, 18]
    assert sum(rank["dropped"] for rank in ranks) == one["dropped"] > 2 * dispatching.TOKENS * 2 // 5
    for name in ("outputs", "tokens"):
        assert torch.equal(torch.cat([rank[name] for rank in ranks]), one[name]), name
        assert not torch.equal(one[name][: len(other[name])], other[name])
    found = {name: value for rank in ranks for name, value in rank["gradients"].items()}
    assert found.keys() == one["gradients"].keys() and len(found) == 1 + 2 * dispatching.EXPERTS
    for name, expected in one["gradients"].items():
        if name == "router.weight":
            assert float((found[name] - expected).norm() / expected.norm()) < RTOL
        else:
            assert torch.equal(found[name], expected), name


@pytest.mark.ranks(2)
def test_a_large_capacity_drops_nothing(pool):
    """Outputs equal those of all experts on all tokens, with products of another size (tolerance of test_parity)."""
    options = {"axes": {"dp_shard": 1, "ep": 2}, "capacity": dispatching.TOKENS}
    ranks = pool.run(dispatching.step, 2, **options)
    (dense,) = pool.run(dispatching.step, 1, axes={}, capacity=1, groups=2, dense=True)
    assert [rank["dropped"] for rank in ranks] == [0, 0]
    found = torch.cat([rank["outputs"] for rank in ranks])
    assert float((found - dense["outputs"]).norm() / dense["outputs"].norm()) < RTOL


@pytest.mark.ranks(2)
def test_dispatch_in_graphed_steps(pool, device_type):
    """Replays send tokens according to the routing of their own step: bits of the plain loop, values of one process.

    On the CPU a replay runs the captured operations without their Python, on GPUs a CUDA graph. Negative controls: a
    capacity for the tokens of both ranks; and steps that drop different numbers of copies.
    """
    options = {"axes": {"dp_shard": 1, "ep": 2}, "capacity": 15}  # an even load is 16
    gloo = {"TE_FSDP_TEST_GLOO": "1"}  # memory of the test's own collectives is not captured
    plain = pool.run(dispatching.training, 2, env=gloo, **options)
    ranks = pool.run(dispatching.training, 2, env=gloo, recorded=True, **options)
    (one,) = pool.run(dispatching.training, 1, axes={}, capacity=15, groups=2)
    (other,) = pool.run(dispatching.training, 1, axes={}, capacity=30)
    found = {name: value for rank in ranks for name, value in rank["parameters"].items()}
    assert found.keys() == one["parameters"].keys()
    for rank, expected in zip(ranks, plain, strict=True):
        assert rank["graphs"] == (1, 4, "", ""), rank["graphs"]
        assert rank["losses"] == expected["losses"] and rank["dropped"] == expected["dropped"]
        assert all(torch.equal(value, expected["parameters"][n]) for n, value in rank["parameters"].items())
        assert len(set(rank["dropped"][2:])) > 1, "replays of one routing would drop one number of copies"
    assert [sum(pair) for pair in zip(*(rank["dropped"] for rank in ranks), strict=True)] == one["dropped"]
    losses = [sum(pair) for pair in zip(*(rank["losses"] for rank in ranks), strict=True)]
    near = RTOL if device_type == "cpu" else NEAR_TF32
    assert losses == pytest.approx(one["losses"], rel=near)
    assert losses != pytest.approx(other["losses"], rel=100 * near)
    for name, value in one["parameters"].items():
        assert float((found[name] - value).norm() / value.norm()) < near, name


@pytest.fixture
def meshes():
    """Yield meshes of one process."""
    import te_fsdp

    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    yield te_fsdp.Meshes.build(device_type="cpu")
    dist.destroy_process_group()


def test_dispatch_needs_no_host_synchronization(meshes):
    """Check forward and backward on meta, where no values exist. Negative control: reading one raises."""
    import te_fsdp

    dispatcher = te_fsdp.ExpertDispatcher(meshes, 5, 4, groups=2)
    tokens = torch.empty(12, 8, device="meta", requires_grad=True)
    chosen = torch.empty(12, 2, dtype=torch.long, device="meta")
    rows, route = dispatcher.dispatch(tokens, chosen)
    assert rows.shape == (sum(dispatcher.splits), 8) and dispatcher.splits == [8] * 5
    dispatcher.combine(rows, route, torch.empty(12, 2, device="meta")).sum().backward()
    assert tokens.grad is not None and route.dropped().is_meta
    with pytest.raises((RuntimeError, NotImplementedError)):
        route.dropped().item()


def test_capacity_limits_and_rounding(meshes):
    """Check that first choices precede second ones, and that capacities are rounded up to a recipe's rows."""
    import te_fsdp

    kind = te_fsdp.ExpertDispatcher
    assert kind.capacity_for(100, 2, 8, 1.0) == 25 and kind.capacity_for(100, 2, 8, 1.25, multiple=32) == 32
    dispatcher = kind(meshes, 2, 2)
    rows, route = dispatcher.dispatch(torch.arange(6.0).view(3, 2), torch.tensor([[0, 1], [1, 0], [1, 0]]))
    assert rows.tolist() == [[0, 1], [2, 3], [2, 3], [4, 5]]
    assert (route.rows == route.unused).tolist() == [[False, True], [False, False], [False, True]]
    with pytest.raises(te_fsdp.InputError, match="flatten the batch dims"):
        dispatcher.dispatch(torch.zeros(2, 3, 4), torch.zeros(2, 3, 1, dtype=torch.long))
    with pytest.raises(te_fsdp.PlacementError, match="capacity: expected an integer of at least 1"):
        kind(meshes, 2, 0)
