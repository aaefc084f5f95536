"""Check that components of quantized weights tile the original once, or that split blocks are rejected."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from hypothesis import given, settings, strategies as st

from te_fsdp.errors import PlacementError
from te_fsdp.layout import Box, shard_boxes
from te_fsdp.quantized.components import Component, covering
from tests.unit.layout_reference import Cut, cuts

relaxed = settings(max_examples=120, deadline=None)
BLOCKS = ((1, 1), (1, 32), (32, 1), (1, 16), (16, 1), (1, 2), (2, 1), (128, 128))


@st.composite
def quantized_cuts(draw: st.DrawFn) -> Cut:
    """Return a 2-D weight of full blocks of 128 x 128 and any axes that can shard it; a shard may split blocks."""
    cut = draw(cuts(ndim=2))
    return replace(cut, shape=tuple(128 * size for size in cut.shape))


def shards(cut: Cut) -> list[tuple[tuple[int, ...], list[Box]]]:
    return [shard_boxes(cut.shape, cut.rule, at) for at in cut.places()]


@relaxed
@given(quantized_cuts(), st.sampled_from(BLOCKS))
def test_component_boxes_tile_the_original_once_or_are_rejected(cut, block):
    shape = tuple(size // step for size, step in zip(cut.shape, block, strict=True))
    written, refused = torch.zeros(shape, dtype=torch.long), 0
    for local_shape, boxes in shards(cut):
        component = Component("c", torch.empty(0), block)
        cuts_blocks = any(
            value % step
            for box in boxes
            for values in (box.original, box.local, box.sizes)
            for value, step in zip(values, block, strict=True)
        )
        try:
            result = component.boxes(boxes, "w")
        except PlacementError:
            assert cuts_blocks
            refused += 1
            continue
        assert not cuts_blocks
        filled = torch.zeros(
            tuple(-(-n // s) for n, s in zip(local_shape, block, strict=True)), dtype=torch.long
        )
        for box in result:
            written[box.original_slices()] += 1
            filled[box.local_slices()] += 1
        assert (filled == 1).all()
    copies = cut.at.tp_size if cut.rule.shard_dim is None else 1
    assert refused or (written == copies).all()
    assert (written <= copies).all()


@relaxed
@given(quantized_cuts(), st.sampled_from(BLOCKS))
def test_covering_blocks_contain_the_rectangle(cut, block):
    """A rank reads the blocks that overlap its rectangles, no others."""
    for _, boxes in shards(cut):
        for box in boxes:
            start, size = covering(box.original, box.sizes, block)
            for at, n, first, extent, step in zip(start, size, box.original, box.sizes, block, strict=True):
                assert at * step <= first < (at + 1) * step
                assert (at + n - 1) * step < first + extent <= (at + n) * step
            assert math.prod(size) >= math.prod(box.sizes) // math.prod(block)


def test_per_tensor_values_are_read_by_every_rank():
    assert covering((128, 0), (64, 32), None) == ((0,), (1,))
    assert covering((5, 7, 2), (3, 3, 3), (1, 1)) == ((5, 7, 2), (3, 3, 3))
