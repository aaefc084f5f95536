"""``ExpertDispatcher`` names wrong shapes and dtypes before it communicates."""

from __future__ import annotations

import pytest
import torch
from test_expert_dispatch import meshes

__all__ = ["meshes"]


def test_wrong_inputs_are_named(meshes):
    """Indices that are no integers, results with missing rows, weights of another shape. Control: right ones pass."""
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
