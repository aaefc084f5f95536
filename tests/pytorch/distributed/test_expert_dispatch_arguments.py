"""Wrong arguments of ``ExpertDispatcher``.

An argument of a wrong kind is named, as is an index that is out of range in any call.

Python computes with such a number, so that torch or a different rank fails later, or rows are lost.
"""

from __future__ import annotations

import pytest
import torch
from test_expert_dispatch import meshes

__all__ = ["meshes"]
pytestmark = pytest.mark.cpu


def test_non_integer_sizes_raise(meshes):
    import te_fsdp

    for given in ((4, 3.5), (4.0, 3), (4, torch.tensor(3))):
        with pytest.raises(te_fsdp.PlacementError, match=r"ExpertDispatcher: \w+: expected an integer"):
            te_fsdp.ExpertDispatcher(meshes, *given)
    for wrong in (None, meshes.device_mesh):
        with pytest.raises(
            te_fsdp.PlacementError, match=r"ExpertDispatcher: meshes: expected te_fsdp.Meshes"
        ):
            te_fsdp.ExpertDispatcher(wrong, 4, 3)


def test_capacity_for_errors_name_the_argument():
    import te_fsdp

    capacity_for = te_fsdp.ExpertDispatcher.capacity_for
    assert capacity_for(6, 2, 4, 1.25, multiple=16) == 16 and capacity_for(6, 2, 4, 1.25) == 4
    wrong = {"tokens": (-1, 2, 4, 1.0), "top_k": (8, 0, 4, 1.0), "num_experts": (8, 2, 0, 1.0)}
    wrong |= {"factor": (8, 2, 4, -1.0), "multiple": (8, 2, 4, 1.0)}
    for name, given in wrong.items():
        with pytest.raises(te_fsdp.PlacementError, match=rf"capacity_for: {name}"):
            capacity_for(*given, **({"multiple": 0} if name == "multiple" else {}))


@pytest.mark.parametrize("wrong", [-1, 4])
def test_indices_of_later_calls_are_checked(meshes, wrong):
    import te_fsdp

    dispatcher = te_fsdp.ExpertDispatcher(meshes, 4, 8)
    tokens, chosen = torch.randn(3, 5), torch.arange(2).repeat(3, 1)
    dispatcher.dispatch(tokens, chosen)
    chosen[1, 0] = wrong
    with pytest.raises(te_fsdp.InputError, match="expected indices from 0 to 3"):
        dispatcher.dispatch(tokens, chosen)
    chosen[1, 0] = 3
    dispatcher.dispatch(tokens, chosen)
