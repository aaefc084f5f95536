"""State of a model between two calls: parameters, gradients.

After each public call, parameters and ``.grad`` are as in docs/strategies.md, under every strategy. A
cleared gradient is dropped, an unreduced one is not read. A backward does not use weights written to after its forward.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from strategies import between_calls

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
def test_documented_table_of_parameters_and_gradients(pool, strategy):
    documented = _documented()[strategy]
    assert len(documented) == 14
    assert pool.run(between_calls.compare_table, 2, strategy=strategy) == [documented] * 2


@pytest.mark.ranks(2)
@pytest.mark.covering(strength=0, always=[{"strategy": "optim"}])
@pytest.mark.parametrize("strategy", ALL)
def test_torch_clip_grad_norm_after_manual_reduction(pool, strategy):
    pool.run(between_calls.clipped_by_torch, 2, strategy=strategy)


@pytest.mark.ranks(2)
@pytest.mark.covering(strength=0, always=[{"strategy": "optim_grads"}])
@pytest.mark.parametrize("strategy", ALL)
def test_zero_grad_drops_unreduced_gradients(pool, strategy):
    pool.run(
        between_calls.discard_microbatch,
        2,
        strategy=strategy,
        ways=[way for way in between_calls.WAYS if way != "nothing"],
    )


@pytest.mark.ranks(4)
@pytest.mark.parametrize("strategy", ["optim_grads", "optim_grads_params"])
def test_zero_grad_drops_unreduced_gradients_with_hsdp(pool, strategy):
    ways = ["each parameter of the model", "the optimizer", "a wrapper"]
    pool.run(between_calls.discard_microbatch, 4, strategy=strategy, ways=ways, dp_replicate=2)


@pytest.mark.ranks(2)
def test_negative_control_without_zero_grad(pool):
    """Negative control: without `zero_grad` the comparison fails."""
    from harness import BodyFailed

    with pytest.raises(BodyFailed, match="gradient of"):
        pool.run(between_calls.discard_microbatch, 2, strategy="optim", ways=["nothing"])


@pytest.mark.ranks(2)
@pytest.mark.covering(strength=0, always=[{"strategy": "optim_grads_params"}])
@pytest.mark.parametrize("strategy", ALL)
def test_zero_grad_of_one_layer(pool, strategy):
    pool.run(between_calls.clear_one_layer, 2, strategy=strategy)


@pytest.mark.ranks(4)
def test_zero_grad_of_one_layer_raises_with_hsdp(pool):
    pool.run(between_calls.clear_one_layer_of_hsdp, 4)


@pytest.mark.ranks(2)
@pytest.mark.covering(strength=0, always=[{"strategy": "no_shard"}])
@pytest.mark.parametrize("strategy", ALL)
def test_unreduced_gradients_cannot_be_read(pool, strategy):
    pool.run(between_calls.read_unreduced_gradients, 2, strategy=strategy)


@pytest.mark.ranks(2)
@pytest.mark.covering(strength=0, always=[{"strategy": "optim_grads_params"}])
@pytest.mark.parametrize("strategy", ALL)
def test_weight_write_between_forward_and_backward_raises(pool, strategy):
    pool.run(between_calls.error_of_stale_weights, 2, strategy=strategy)


@pytest.mark.ranks(2)
@pytest.mark.covering(strength=0, always=[{"strategy": "no_shard"}])
@pytest.mark.parametrize("strategy", ALL)
def test_autograd_grad_of_parameters_raises(pool, strategy):
    pool.run(between_calls.errors_of_autograd_grad, 2, strategy=strategy)


@pytest.mark.ranks(2)
def test_module_zero_grad_class_method_is_not_patched(pool):
    """Check that te_fsdp changes objects of sharded models only, never classes of torch."""
    assert pool.run(between_calls.stock_class, 2) == [True, True]
