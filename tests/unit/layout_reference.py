"""Shard parameters slowly with tensors: the reference for the arithmetic of boxes."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from hypothesis import strategies as st

from te_fsdp.layout import PLAIN, Box, Coordinates, Layout, ParameterRule

GATED = Layout("stacked", (1, 1))


@dataclass(frozen=True)
class Cut:
    """A parameter and the axes that shard it. `at.tp_rank` and `at.fsdp_rank` are not used."""

    shape: tuple[int, ...]
    rule: ParameterRule
    at: Coordinates

    def places(self) -> list[Coordinates]:
        """Return the coordinates of all ranks."""
        return [
            replace(self.at, tp_rank=t, fsdp_rank=f)
            for t in range(self.at.tp_size)
            for f in range(self.at.fsdp_size)
        ]

    def original(self) -> torch.Tensor:
        """Return the unsharded parameter; every element has its own value."""
        return torch.arange(math.prod(self.shape)).reshape(self.shape)


def tp_local(original: torch.Tensor, rule: ParameterRule, tp_size: int, tp_rank: int) -> torch.Tensor:
    """Return the tensor of one tensor-parallel rank: its chunk of every block, concatenated."""
    if rule.shard_dim is None or tp_size == 1:
        return original
    dim = rule.shard_dim
    unit = original.shape[dim] // sum(rule.layout.blocks)
    blocks = torch.split(original, [unit * part for part in rule.layout.blocks], dim)
    return torch.cat([torch.chunk(block, tp_size, dim)[tp_rank] for block in blocks], dim)


def shard(original: torch.Tensor, rule: ParameterRule, at: Coordinates) -> torch.Tensor:
    """Return the shard of one rank: the tp-local tensor sharded over FSDP by torch.chunk."""
    local = tp_local(original, rule, at.tp_size, at.tp_rank)
    if at.fsdp_size == 1:
        return local
    chunks = torch.chunk(local, at.fsdp_size, at.fsdp_dim)
    return chunks[at.fsdp_rank] if at.fsdp_rank < len(chunks) else local.narrow(at.fsdp_dim, 0, 0)


def from_boxes(original: torch.Tensor, shape: tuple[int, ...], boxes: list[Box]) -> torch.Tensor:
    """Assemble a shard from its boxes, with -1 for elements without a box."""
    local = torch.full(shape, -1, dtype=original.dtype)
    for box in boxes:
        local[box.local_slices()] = original[box.original_slices()]
    return local


@st.composite
def stacked_layouts(draw: st.DrawFn) -> Layout:
    """Generate layouts: gated, fused QKV with grouped queries, and stacks of any heights."""
    kind = draw(st.sampled_from(["gated", "qkv", "any"]))
    if kind == "gated":
        return GATED
    if kind == "qkv":
        groups = draw(st.integers(1, 3))
        return Layout("stacked", (groups * draw(st.integers(1, 4)), groups, groups))
    return Layout("stacked", tuple(draw(st.lists(st.integers(1, 5), min_size=2, max_size=4))))


def layouts() -> st.SearchStrategy[Layout]:
    """Generate plain and stacked layouts."""
    return st.just(PLAIN) | stacked_layouts()


@st.composite
def cuts(draw: st.DrawFn, layout: Layout | None = None, min_tp: int = 1, ndim: int | None = None) -> Cut:
    """Generate a parameter of 1 to 3 dims, or ``ndim``, and axes that can shard it, unevenly or without rows."""
    layout = draw(layouts()) if layout is None else layout
    tp = draw(st.integers(min_tp, 4))
    least, most = (0, 2) if ndim is None else (ndim - 1, ndim - 1)
    other = draw(st.lists(st.integers(1, 4), min_size=least, max_size=most))
    if layout.is_stacked:
        dim: int | None = 0
    else:
        dim = draw(st.sampled_from([*range(len(other) + 1), None])) if min_tp == 1 else 0
    sizes = [draw(st.integers(1, 9)), *other]
    if dim is not None:
        # TE's own condition: every block divides by tp (heads and groups do, or the width of the feed-forward).
        step = math.lcm(*(tp // math.gcd(tp, part) for part in layout.blocks))
        sizes[dim] = sum(layout.blocks) * step * draw(st.integers(1, 3))
    fsdp_dim = draw(st.integers(0, len(sizes) - 1))
    at = Coordinates(tp_size=tp, fsdp_size=draw(st.integers(1, 8)), fsdp_dim=fsdp_dim)
    return Cut(tuple(sizes), ParameterRule(dim, layout), at)
