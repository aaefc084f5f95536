"""Collectives through shared memory, compared with Gloo.

A rank that calls a different collective is detected.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from harness import shared_memory
from torch.distributed.device_mesh import init_device_mesh

pytestmark = [pytest.mark.cpu, pytest.mark.ranks(4)]
# Whatever the other tests are run with.
SHARED, GLOO = ({shared_memory.GLOO_VARIABLE: value} for value in ("0", "1"))


def every_collective() -> tuple[list, list]:
    """Return results of all collectives over all ranks and over pairs, and which of them shared memory did."""
    results, ways = [], []

    def done(work, *tensors):
        work.wait()
        ways.append(type(work).__module__ == shared_memory.__name__)
        results.extend(tensor.clone() for tensor in tensors)

    pairs = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    for group in (dist.group.WORLD, pairs["a"].get_group(), pairs["b"].get_group()):
        size, rank = group.size(), group.rank()

        for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.bool):
            mine = (torch.arange(2 * size) * (dist.get_rank() + 1)).to(dtype)
            for op in ("SUM", "AVG", "MAX", "MIN", "PRODUCT"):
                if dtype.is_floating_point or (op != "AVG" and dtype != torch.bool):
                    how = {"op": getattr(dist.ReduceOp, op), "group": group, "async_op": True}
                    whole, part = mine.clone(), mine[:2].clone()
                    done(dist.all_reduce(whole, **how), whole)
                    done(dist.reduce_scatter_tensor(part, mine, **how), part)
            gathered = torch.empty(2 * size * size, dtype=dtype)
            done(dist.all_gather_into_tensor(gathered, mine, group, async_op=True), gathered)
            apart = list(torch.empty_like(gathered).chunk(size))
            done(dist.all_gather(apart, mine, group, async_op=True), *apart)
            swapped = torch.empty_like(mine)
            done(dist.all_to_all_single(swapped, mine, group=group, async_op=True), swapped)
            told = mine.clone()
            done(dist.broadcast(told, group=group, group_src=1, async_op=True), told)
        # Rank r has k rows for rank k, and the first rank none for any rank.
        rows = torch.arange(3.0 * size * (size - 1) // 2).view(-1, 3) + 100 * rank
        taken = torch.empty(size * rank, 3)
        sizes = {"output_split_sizes": [rank] * size, "input_split_sizes": list(range(size))}
        done(dist.all_to_all_single(taken, rows, **sizes, group=group, async_op=True), taken)
        done(dist.barrier(group, async_op=True))
        held = torch.arange(6.0).view(2, 3).t() + rank
        for name in ("sum", "avg", "max"):
            results.append(functional.all_reduce(held, name, group).wait())
        gathered = functional.all_gather_tensor(held.t(), 0, group).wait()
        results.extend((gathered, functional.reduce_scatter_tensor(gathered, "sum", 0, group).wait()))
        large = torch.full((shared_memory.SLOT // 4 + 1,), 1.0)
        done(dist.all_reduce(large, group=group, async_op=True), large)
    return results, ways


def mismatched_call(group_of: int, other: str) -> None:
    """Call a different collective on one rank."""
    tensor = torch.ones(4)
    if dist.get_rank() == group_of and other == "max":
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
    elif dist.get_rank() == group_of:
        dist.all_reduce(tensor.bfloat16())
    else:
        dist.all_reduce(tensor)


def test_shared_memory_collectives_equal_gloo(pool):
    """Check with small integers, whose sums do not depend on the order."""
    shared = pool.run(every_collective, 4, env=SHARED)
    gloo = pool.run(every_collective, 4, env=GLOO)
    for (ours, ways), (theirs, stock) in zip(shared, gloo, strict=True):
        assert len(ours) == len(theirs) > 100
        for mine, expected in zip(ours, theirs, strict=True):
            assert mine.dtype == expected.dtype and torch.equal(mine, expected)
        assert not any(stock)
        assert ways.count(False) == 3 * (4 * 2 + 1)  # products, and what is too large


def read_before_wait() -> list[torch.Tensor]:
    """Return a tensor's values before and after a wait for its all-gather, and their bytes."""
    seen = []
    for dtype in (torch.bfloat16, torch.uint8):
        gathered = torch.empty(4, dtype=dtype)
        work = dist.all_gather_into_tensor(gathered, torch.ones(1, dtype=dtype), async_op=True)
        seen.append(gathered.clone())
        work.wait()
        seen.append(gathered.clone())
    return seen


def test_results_are_written_by_wait(pool):
    """Check that a missing wait is visible, whatever the timing."""
    for floats, right, nonsense, also_right in pool.run(read_before_wait, 4, env=SHARED):
        assert floats.isnan().all() and (nonsense != 1).all()
        assert (right == 1).all() and (also_right == 1).all()


@pytest.mark.parametrize("other", ["max", "bfloat16"])
def test_mismatched_collectives_raise(pool, other):
    errors = pool.run_expect_error(mismatched_call, 4, group_of=2, other=other, env=SHARED)
    assert all("collectives do not match" in error.message for error in errors)
