"""Check that boxes tile the original tensor exactly once on any mesh."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings, strategies as st

from te_fsdp.errors import PlacementError
from te_fsdp.layout import PLAIN, Box, Coordinates, Layout, ParameterRule, chunk_range, shard_boxes
from tests.unit.layout_reference import GATED, Cut, cuts, from_boxes, shard, stacked_layouts

relaxed = settings(max_examples=150, deadline=None)


@relaxed
@given(cuts())
def test_shards_equal_the_reference(cut):
    original = cut.original()
    for at in cut.places():
        shape, boxes = shard_boxes(cut.shape, cut.rule, at)
        expected = shard(original, cut.rule, at)
        assert shape == tuple(expected.shape)
        assert torch.equal(from_boxes(original, shape, boxes), expected)


@relaxed
@given(cuts())
def test_boxes_tile_every_shard_and_the_original_once(cut):
    """Each element is in one shard, or in one shard per TP rank if replicated over tp."""
    in_original = torch.zeros(cut.shape, dtype=torch.long)
    for at in cut.places():
        shape, boxes = shard_boxes(cut.shape, cut.rule, at)
        in_local = torch.zeros(shape, dtype=torch.long)
        for box in boxes:
            assert 0 not in box.sizes
            in_local[box.local_slices()] += 1
            in_original[box.original_slices()] += 1
        assert (in_local == 1).all()
    copies = cut.at.tp_size if cut.rule.shard_dim is None else 1
    assert (in_original == copies).all()


@relaxed
@given(cuts())
def test_boxes_are_in_local_order_and_plain_shards_have_one(cut):
    for at in cut.places():
        shape, boxes = shard_boxes(cut.shape, cut.rule, at)
        assert [box.local for box in boxes] == sorted(box.local for box in boxes)
        assert (len(boxes) == 0) == (0 in shape)
        if not cut.rule.layout.is_stacked:
            assert len(boxes) <= 1
        assert len(boxes) <= len(cut.rule.layout.blocks)


@relaxed
@given(stacked_layouts().flatmap(lambda layout: cuts(layout, min_tp=2)))
def test_control_plain_rule_misplaces_stacked_rows(cut):
    """Negative control: without the stacked layout, values differ although shapes agree."""
    original = cut.original()
    plain = ParameterRule(0)
    wrong = 0
    for at in cut.places():
        shape, boxes = shard_boxes(cut.shape, plain, at)
        expected = shard(original, cut.rule, at)
        assert shape == tuple(expected.shape)  # shapes agree, so that only the values can differ
        wrong += not torch.equal(from_boxes(original, shape, boxes), expected)
    assert wrong > 0


@relaxed
@given(st.integers(0, 40), st.integers(1, 12))
def test_chunk_range_equals_torch_chunk(length, chunks):
    expected = [tuple(chunk.tolist()) for chunk in torch.arange(length).chunk(chunks) if len(chunk)]
    ranges = [chunk_range(length, chunks, index) for index in range(chunks)]
    assert [tuple(range(*r)) for r in ranges if r[0] < r[1]] == expected
    # Empty ones are last and start at the end, so that they can be cut from the tensor as well.
    assert all(r == (length, length) for r in ranges[len(expected) :])


def test_chunk_range_is_not_a_balanced_split():
    """5 rows over 4 ranks: 2 + 2 + 1 + 0, where a balanced split would give 2 + 1 + 1 + 1."""
    assert [chunk_range(5, 4, index) for index in range(4)] == [(0, 2), (2, 4), (4, 5), (5, 5)]


# ------------------------------------------------------------------------------------------- examples by hand


def test_gated_rows_over_tp_2_and_fsdp_2():
    """The example of the module's docstring: `[gate; up]` of 8 rows."""

    def rows(tp_rank: int, fsdp_rank: int) -> list[int]:
        at = Coordinates(2, tp_rank, 2, fsdp_rank)
        _, boxes = shard_boxes((8,), ParameterRule(0, GATED), at)
        return [row for box in boxes for row in range(8)[box.original_slices()[0]]]

    assert [rows(0, 0), rows(0, 1), rows(1, 0), rows(1, 1)] == [[0, 1], [4, 5], [2, 3], [6, 7]]


def test_an_fsdp_shard_across_blocks_has_two_boxes():
    """4 query heads and 2 groups of 2 rows, tp 2: rank 0 has rows 0-3, 8-9 and 12-13; 4 + 4 over FSDP."""
    rule = ParameterRule(0, Layout("stacked", (4, 2, 2)))
    shape, boxes = shard_boxes((16, 3), rule, Coordinates(2, 0, 2, 1))
    assert shape == (4, 3)
    assert boxes == [Box((8, 0), (0, 0), (2, 3)), Box((12, 0), (2, 0), (2, 3))]


def test_fsdp_and_tp_may_shard_different_dims():
    shape, boxes = shard_boxes((4, 6), ParameterRule(0), Coordinates(2, 1, 2, 1, fsdp_dim=1))
    assert (shape, boxes) == ((2, 3), [Box((2, 3), (0, 0), (2, 3))])


def test_an_empty_shard_has_a_shape_and_no_box():
    assert shard_boxes((2, 5), ParameterRule(None), Coordinates(fsdp_size=4, fsdp_rank=3)) == ((0, 5), [])


@pytest.mark.parametrize("shape", [(0,), (0, 4), (4, 0)])
@pytest.mark.parametrize("fsdp_size", [1, 2])
def test_empty_parameter_has_no_boxes(shape, fsdp_size):
    """TE registers an empty tensor for a disabled bias."""
    local, boxes = shard_boxes(shape, ParameterRule(None), Coordinates(fsdp_size=fsdp_size))
    assert boxes == [] and 0 in local


def test_scalar_is_not_sharded():
    at = Coordinates(tp_size=2, tp_rank=1, fsdp_size=1)
    assert shard_boxes((), ParameterRule(None), at) == ((), [Box((), (), ())])


def test_sizes_that_tp_does_not_divide_are_rejected():
    with pytest.raises(PlacementError) as caught:
        shard_boxes((9, 4), ParameterRule(0, PLAIN), Coordinates(tp_size=2), name="up.weight")
    assert str(caught.value) == (
        "up.weight: dim 0 of shape (9, 4), layout plain: expected every block divisible by tp size 2, got block "
        "sizes [9]. Fix: choose a dimension that is divisible by the tp size, or a different tp size."
    )


@pytest.mark.parametrize(
    ("shape", "blocks", "sizes"),
    [
        ((12, 4), (4, 1, 1), "[8, 2, 2]"),  # 12 divides by 4; the key and value blocks do not
        ((10, 4), (1, 2), "[3, 6]"),  # 10 rows are not a multiple of such blocks
    ],
)
def test_blocks_that_tp_does_not_divide_are_rejected(shape, blocks, sizes):
    rule = ParameterRule(0, Layout("stacked", blocks))
    with pytest.raises(
        PlacementError, match=re.escape(f"layout stacked{blocks}: expected every block")
    ) as caught:
        shard_boxes(shape, rule, Coordinates(tp_size=4))
    assert sizes in str(caught.value)


# ------------------------------------------------------------------------------------------------- the types


@pytest.mark.parametrize(
    ("kind", "blocks"),
    [("plain", (1, 1)), ("stacked", (1,)), ("stacked", (1, 0)), ("stacked", ()), ("grouped", (1, 1))],
)
def test_inconsistent_layouts_are_rejected(kind, blocks):
    with pytest.raises(AssertionError):
        Layout(kind, blocks)


def test_inconsistent_rules_are_rejected():
    with pytest.raises(AssertionError, match="owns its gradient"):
        ParameterRule(0, partial_grad=True)


def test_layouts_are_formatted_as_text():
    assert (str(PLAIN), str(GATED), str(Layout("stacked", (4, 2, 2)))) == (
        "plain",
        "stacked(1, 1)",
        "stacked(4, 2, 2)",
    )


def test_control_comparison_detects_a_shifted_box():
    """A box that is off by one row is detected by the comparison that all tests here use."""
    cut = Cut((6, 2), ParameterRule(0), Coordinates(tp_size=2, fsdp_size=1))
    shape, [box] = shard_boxes(cut.shape, cut.rule, cut.at)
    moved = replace(box, original=(1, 0))
    assert torch.equal(from_boxes(cut.original(), shape, [box]), shard(cut.original(), cut.rule, cut.at))
    assert not torch.equal(
        from_boxes(cut.original(), shape, [moved]), shard(cut.original(), cut.rule, cut.at)
    )
