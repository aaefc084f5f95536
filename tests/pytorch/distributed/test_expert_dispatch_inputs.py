"""Inputs of ``ExpertDispatcher`` with a wrong shape or dtype.

They are named before a collective.
"""

from __future__ import annotations

import re

import pytest
import torch
from experts import dispatching
from test_expert_dispatch import meshes

__all__ = ["meshes"]


def test_wrong_inputs_raise(meshes):
    """Check non-integer indices, missing result rows and weights of a wrong shape. Correct inputs pass."""
    import te_fsdp

    dispatcher = te_fsdp.ExpertDispatcher(meshes, 4, 8)
    tokens, chosen, weights = torch.randn(3, 5), torch.arange(2).expand(3, 2), torch.ones(3, 2)
    with pytest.raises(te_fsdp.InputError, match=r"int32 or int64.*float32"):
        dispatcher.dispatch(tokens, chosen.float())
    rows, route = dispatcher.dispatch(tokens, chosen)
    with pytest.raises(te_fsdp.InputError, match=r"\(32, hidden\).*\(31, 5\)"):
        dispatcher.combine(rows[:-1], route, weights)
    with pytest.raises(te_fsdp.InputError, match=r"\(3, 2\).*\(3, 1\)"):
        dispatcher.combine(rows, route, weights[:, :1])
    torch.testing.assert_close(dispatcher.combine(rows, route, weights), 2 * tokens)


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        (
            "capacity",
            r"ExpertDispatcher: capacity: .*ep rank 0: \[8\], ep rank 1: \[9\].*largest number of tokens",
        ),
        ("hidden", r"ExpertDispatcher: hidden: .*ep rank 0: \[5\], ep rank 1: \[6\]"),
        ("shape", r"ExpertDispatcher.dispatch: shapes"),
    ],
)
def test_mismatch_on_one_rank_raises_on_all_ranks(pool, wrong, text):
    """Check a size that differs on one rank. It hung, aborted in Gloo or gave rows of wrong experts."""
    for error in pool.run_expect_error(dispatching.wrong_on_rank_1, 2, wrong=wrong):
        assert error.type_name == "InputError" and re.search(text, error.message), error


@pytest.mark.cpu
@pytest.mark.ranks(2)
def test_index_out_of_range_raises_on_all_ranks(pool):
    """Check an index out of range on the CPU. On a GPU the host does not read indices."""
    for error in pool.run_expect_error(dispatching.wrong_on_rank_1, 2, wrong="index"):
        assert error.type_name == "InputError" and "indices from 0 to 3" in error.message, error
