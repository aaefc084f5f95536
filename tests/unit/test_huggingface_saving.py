"""Check that ranks write every element of a Hugging Face model's tensors once."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from te_fsdp.checkpoint.lazy_tensors import InMemory
from te_fsdp.checkpoint.portable.huggingface_map import Form, Group, WeightMap
from te_fsdp.checkpoint.portable.huggingface_model import TeNames
from te_fsdp.checkpoint.portable.weight_transfer import Share, describe_shares, make_plan
from te_fsdp.checkpoint.tensor_entries import holders_of
from te_fsdp.errors import CheckpointError

ARCHITECTURE: Any = None  # a plan does not depend on it


def told(shape, *places, dtype=torch.float32):
    """Return a rank's description of a tensor of which it has rectangles."""
    return Share(shape, torch.bfloat16, dtype, places)


def rows(name, height, width, ranks, rank):
    """Shard a tensor by rows, possibly unevenly."""
    step = -(-height // ranks)
    low, high = min(rank * step, height), min((rank + 1) * step, height)
    return {name: told((height, width), ((low, 0), (high - low, width)))}


def holders(seen):
    describe_shares(seen)
    held = [[(name, item.shape, item.values, [*item.pieces]) for name, item in own.items()] for own in seen]
    return holders_of("iter_weights", held)


def test_every_element_is_written_by_one_rank():
    seen = [rows("a", 8, 4, 4, rank) for rank in range(4)]
    assert holders(seen)["a"].pieces[(2, 0), (2, 4)] == [(1, 0)]
    with pytest.raises(CheckpointError, match=r"the pieces of a \(24 of 32 elements\)"):
        holders(seen[:3])
    with pytest.raises(CheckpointError, match=r"the pieces of a \(40 of 32 elements\)"):
        holders([*seen, {"a": told((8, 4), ((1, 0), (2, 4)))}])
    with pytest.raises(CheckpointError, match=r"the pieces of a \(32 of 32 elements\)"):
        holders([*seen[:3], {"a": told((8, 4), ((5, 0), (2, 4)))}])
    other = {"a": told((8, 4), ((6, 0), (2, 4)), dtype=torch.bfloat16)}
    with pytest.raises(CheckpointError, match=r"a: of a different kind on rank 3"):
        holders([*seen[:3], other])
    nothing = {"a": told((8, 4), dtype=torch.bfloat16)}  # no element, and so no main weight
    assert describe_shares([nothing, *seen])["a"][2] == torch.float32


def share(*shape, dtype=torch.bfloat16):
    return Share(shape, dtype, dtype, [((0,) * len(shape), InMemory(torch.zeros(shape, dtype=dtype)))])


def component(*shape, dtype):
    return share(*shape, dtype=dtype)._replace(is_component=True)


def test_name_with_a_colon_is_not_an_fp8_component():
    shares = {name: share(8, 4) for name in ("layers:0.weight", "layers.weight")}
    plan = make_plan(shares, WeightMap(ARCHITECTURE, (), TeNames()))
    assert [*plan.pieces] == [*shares]


def test_ranks_number_shards_in_the_same_order():
    """Each rank chooses senders independently, so the order must not depend on a set."""
    names = [f"layers.{n}.proj.weight" for n in range(12)]
    groups = [Group(((128, 128),), Form((f"theirs.{n}",)), Form((name,))) for n, name in enumerate(names)]
    shares = {name: share(128, 128) for name in names}
    for name in names:
        shares |= {f"{name}:data": component(128, 128, dtype=torch.uint8)}
        shares |= {f"{name}:scale": component(1, 1, dtype=torch.float32)}
    plan = make_plan(shares, WeightMap(ARCHITECTURE, tuple(groups), TeNames()))
    in_order = [f"{name}:{kind}" for name in names for kind in ("data", "scale")]
    assert [*plan.own] == [*plan.pieces] == in_order
    assert [piece.number for pieces in plan.pieces.values() for piece in pieces] == [*range(24)]
