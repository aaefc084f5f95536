"""Test which dims a function slices or indexes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from te_fsdp.upstream.torch_functions import part_dims

WEIGHT = torch.zeros(4, 8, 3)  # (experts, out, in), whose rows are dim 1


@pytest.mark.parametrize(
    ("index", "dims"),
    [
        pytest.param((0, slice(2, None)), {0, 1}, id="expert and rows"),
        pytest.param(0, {0}, id="expert"),
        pytest.param(slice(None), set(), id="all"),
        pytest.param((slice(None), 5), {1}, id="row of each"),
        pytest.param((Ellipsis, 1), {2}, id="last dim"),
        pytest.param((None, slice(None), 2), {1}, id="new dim"),
    ],
)
def test_part_dims_of_indexing(index: Any, dims: set[int]) -> None:
    """Includes rows behind a different index. Bug class: rows of one expert were in rank order."""
    assert part_dims(torch.Tensor.__getitem__, (WEIGHT, index), {}) == dims


def test_part_dims_of_functions_with_a_dim() -> None:
    assert part_dims(torch.chunk, (WEIGHT, 2, -2), {}) == {1}
    assert part_dims(torch.Tensor.split, (WEIGHT, 2), {"dim": 2}) == {2}
    assert part_dims(torch.Tensor.unbind, (WEIGHT,), {}) == {0}
