"""State of a model between two calls.

The kind: after each public call, parameters and ``.grad`` are as docs/strategies.md says, under every strategy. A
cleared gradient is dropped, an unreduced one is not read. A backward does not use weights written to after its forward.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from strategies import between

ALL = ("no_shard", "optim", "optim_grads", "optim_grads_params")
DOCS = Path(__file__).parents[3] / "docs"


def _documented() -> dict[str, dict[str, str]]:
    """Return the table of docs/strategies.md: strategy -> call -> parameters and gradients."""
    text = (DOCS / "strategies.md").read_text()
    rows = [re.split(r" *\| *", line.strip("| \n")) for line in text.splitlines() if line.startswith("|")]
    first = next(i for i, row in enumerate(rows) if row[0] == "after")
    head, found = [word.strip("`") for word in rows[first][1:]], {}
    for row in rows[first + 2 :]:
        if len(row) != 5:
            break
        for strategy, cell in zip(head, row[1:], strict=True):
            found.setdefault(strategy, {}).update(dict.fromkeys(row[0].split("; "), cell))
    return found


@pytest.mark.ranks(2)
@pytest.mark.parametrize("strategy", ALL)
def test_table(pool, strategy):
    documented = _documented()[strategy]
    assert len(documented) == 14
    assert pool.run(between.table, 2, strategy=strategy) == [documented] * 2


@pytest.mark.ranks(2)
@pytest.mark.covering(strength=0, always=[{"strategy": "optim"}])
@pytest.mark.parametrize("strategy", ALL)
def test_clipping_by_torch_after_a_reduction_by_hand(pool, strategy):
    pool.run(between.clipped_by_torch, 2, strategy=strategy)


@pytest.mark.ranks(2)
@pytest.mark.covering(strength=0, always=[{"strategy": "optim_grads"}])
@pytest.mark.parametrize("strategy", ALL)
def test_cleared_gradients_are_gone(pool, strategy):
    pool.run(between.cleared, 2, strategy=strategy, ways=[way for way in between.WAYS if way != "nothing"])


@pytest.mark.ranks(4)
@pytest.mark.parametrize("strategy", ["optim_grads", "optim_grads_params"])
def test_cleared_gradients_are_gone_with_hsdp(pool, strategy):
    ways = ["each parameter of the model", "the optimizer", "a wrapper"]
    pool.run(between.cleared, 4, strategy=strategy, ways=ways, dp_replicate=2)


@pytest.mark.ranks(2)
def test_uncleared_gradients_are_noticed(pool):
    """Negative control: without clearing, the comparison fails."""
    from harness import BodyFailed

    with pytest.raises(BodyFailed, match="gradient of"):
        pool.run(between.cleared, 2, strategy="optim", ways=["nothing"])


@pytest.mark.ranks(2)
@pytest.mark.covering(strength=0, always=[{"strategy": "optim_grads_params"}])
@pytest.mark.parametrize("strategy", ALL)
def test_gradients_cleared_in_part(pool, strategy):
    pool.run(between.cleared_in_part, 2, strategy=strategy)


@pytest.mark.ranks(4)
def test_gradients_cleared_in_part_of_hsdp(pool):
    pool.run(between.cleared_in_part_of_hsdp, 4)


@pytest.mark.ranks(2)
@pytest.mark.covering(strength=0, always=[{"strategy": "no_shard"}])
@pytest.mark.parametrize("strategy", ALL)
def test_waiting_gradients_are_not_read(pool, strategy):
    pool.run(between.unread, 2, strategy=strategy)


@pytest.mark.ranks(2)
@pytest.mark.covering(strength=0, always=[{"strategy": "optim_grads_params"}])
@pytest.mark.parametrize("strategy", ALL)
def test_weights_written_between_forward_and_backward(pool, strategy):
    pool.run(between.stale, 2, strategy=strategy)


@pytest.mark.ranks(2)
@pytest.mark.covering(strength=0, always=[{"strategy": "no_shard"}])
@pytest.mark.parametrize("strategy", ALL)
def test_autograd_grad(pool, strategy):
    pool.run(between.returned, 2, strategy=strategy)


@pytest.mark.ranks(2)
def test_torch_keeps_its_own_zero_grad(pool):
    """The kind: te_fsdp changes objects of sharded models, never classes of torch."""
    assert pool.run(between.stock_class, 2) == [True, True]
