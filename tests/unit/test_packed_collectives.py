"""Test collectives that are packed into one buffer, waited for later."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, strategies as st

from te_fsdp.collectives.async_work import Pending, SideStream, UnitOrder
from te_fsdp.collectives.redistribute import PackedLayout, RowPartition

CPU = torch.device("cpu")
SHAPES = st.lists(st.integers(0, 5), min_size=1, max_size=3).map(torch.Size)


def values(shape: torch.Size) -> torch.Tensor:
    return torch.arange(1, 1 + math.prod(shape), dtype=torch.float32).view(shape)


@given(st.lists(SHAPES, max_size=5), st.sampled_from([1, 3, 16]), st.integers(0, 2))
def test_packed_tensors_are_unpacked(shapes: list[torch.Size], align: int, missing: int) -> None:
    """Each tensor is aligned, with zeros for gaps and missing tensors, and flags at the end."""
    tensors = [None if at == missing else values(shape) for at, shape in enumerate(shapes)]
    buffer = PackedLayout(tuple(math.prod(shape) for shape in shapes), align, trailing=2)
    packed = buffer.pack(tensors, torch.float64, CPU, torch.tensor([7.0, 8.0], dtype=torch.float64))
    assert packed.numel() == buffer.numel and packed[-2:].tolist() == [7, 8]
    for tensor, shape, piece in zip(tensors, shapes, buffer.views(packed), strict=True):
        assert piece.storage_offset() % align == 0
        assert torch.equal(piece.view(shape), torch.zeros(shape) if tensor is None else tensor)
    whole = sum(float(tensor.sum()) for tensor in tensors if tensor is not None)
    assert packed[:-2].sum() == whole


@given(SHAPES, st.integers(1, 4), st.data())
def test_row_partition_equals_torch_chunk(shape: torch.Size, ranks: int, data: st.DataObject) -> None:
    """Rows are split and joined again. Each rank's rows equal ``torch.chunk``'s."""
    rows = RowPartition(shape, data.draw(st.integers(0, len(shape) - 1)), ranks)
    whole = values(shape)
    split = torch.zeros((ranks, rows.numel))
    for mine, flat in rows.pairs(whole, split):
        flat.copy_(mine)
    chunks = whole.chunk(ranks, rows.dim) if whole.numel() else ()
    for rank, chunk in enumerate(chunks):
        assert split[rank, : chunk.numel()].tolist() == chunk.reshape(-1).tolist()
        assert not split[rank, chunk.numel() :].any()
    assert rows.is_even == (shape[rows.dim] % ranks == 0)
    joined = torch.zeros(shape)
    for mine, flat in rows.pairs(joined, split):
        mine.copy_(flat)
    assert torch.equal(joined, whole)


def test_pending_result_is_unpacked_only_on_wait() -> None:
    log: list[str] = []

    class Work:
        def wait(self) -> None:
            log.append("waits")

    def finish() -> int:
        log.append("unpacks")
        return 3

    side = SideStream()
    with side.after_current(CPU):
        pending = side.start(lambda: Pending(finish, Work()))
    doubled = pending.then(lambda value: 2 * value)
    assert log == []
    assert doubled.wait() == 6 and log == ["waits", "unpacks"]


@pytest.mark.parametrize(("arrivals", "begun"), [("ab", ["a", "b"]), ("b", []), ("ba", ["a", "b"])])
def test_units_start_in_the_agreed_order(arrivals: str, begun: list[str]) -> None:
    """A complete unit waits for earlier ones in the agreed order."""
    order, results = UnitOrder(["a", "b"]), list[str]()
    order.agreed = ("a", "b")
    order.begin("aabb")
    for unit in arrivals:
        for key in (1, 2):
            order.arrived(unit, (unit, key))
            order.arrived(unit, (unit, key))  # again: counts once
            while (complete := order.next(len(results))) is not None:
                results.append(complete)
    assert results == begun
