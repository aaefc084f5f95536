"""Check that every expert belongs to one rank, every name to one expert."""

from __future__ import annotations

import pytest
import torch

from te_fsdp.errors import MeshError
from te_fsdp.layout import ExpertRange, expert_index, expert_ranges


@pytest.mark.parametrize("total", range(1, 20))
@pytest.mark.parametrize("ranks", range(1, 8))
def test_expert_ranges_equal_torch_chunk(total, ranks):
    dealt = [part.tolist() for part in torch.arange(total).chunk(ranks)]
    if len(dealt) < ranks:
        with pytest.raises(MeshError, match="at least one on each rank"):
            expert_ranges([*map(len, dealt), *[0] * (ranks - len(dealt))], "experts")
        return
    held = expert_ranges([len(part) for part in dealt], "experts")
    assert [list(range(h.first, h.first + h.count)) for h in held] == dealt
    for own in held:
        for kind in ("weight", "bias"):
            local = [f"{kind}{i}" for i in range(own.count)]
            registered = [own.registered_name(name) for name in local]
            assert registered == [f"{kind}{i}" for i in range(own.first, own.first + own.count)]
            # TE's names never are registered names of other experts of this rank, but for the first rank's own.
            assert own.first == 0 or not {*local} & {*registered}
            elsewhere = [f"{kind}{i}" for i in range(total) if own.is_elsewhere(f"{kind}{i}")]
            assert sorted([*elsewhere, *registered]) == sorted(f"{kind}{i}" for i in range(total))


@pytest.mark.parametrize("counts", [[1, 2], [2, 1, 2], [3, 3, 0], [4, 2], [1, 1, 3]])
def test_other_expert_distributions_are_rejected(counts):
    with pytest.raises(MeshError) as caught:
        expert_ranges(counts, "layers.0.experts")
    assert f"layers.0.experts: experts over ep={len(counts)}" in str(caught.value)
    assert f"got num_gemms of the ranks {counts}" in str(caught.value)


def test_uneven_expert_distribution_raises_with_the_full_text():
    with pytest.raises(MeshError) as caught:
        expert_ranges([1, 2], "up")
    assert str(caught.value) == (
        "up: experts over ep=2: expected 3 experts distributed as [2, 1], at least one on each rank, got num_gemms of "
        "the ranks [1, 2]. The number of experts on the previous ranks determines which expert a weight belongs to. "
        "Fix: build it with num_gemms=len(meshes.experts(total))."
    )


@pytest.mark.parametrize(
    ("name", "index"),
    [
        ("weight0", 0),
        ("bias12", 12),
        ("weight", None),
        ("weight01", None),
        ("q_weight0", None),
        ("weight1_", None),
    ],
)
def test_expert_names_are_parsed(name, index):
    assert expert_index(name) == index
    held = ExpertRange(4, 2, 8)
    if index is None:
        assert held.registered_name(name) == name
        assert not held.is_elsewhere(name)
