"""Test quantized weights that plain DCP wrote in shards: joined components or dequantized values."""

from __future__ import annotations

import functools
import io
from pathlib import Path
from typing import Any

import pytest
import torch

from te_fsdp.checkpoint.lazy_tensors import Chunked, DcpRecord, Lazy
from te_fsdp.checkpoint.plain_dcp import Quantized, quantized_or_plain
from te_fsdp.errors import CheckpointError
from te_fsdp.quantized.boxed import QuantizedSlice, values_of
from te_fsdp.quantized.components import components_of
from te_fsdp.upstream import te as _te

SHAPE = (256, 128)
HALVES = [(0, 0), (128, 0)]


def weight_of(te: Any, recipe: str, seed: int) -> torch.Tensor:
    from transformer_engine.common import recipe as recipes

    kind = {
        "current": recipes.Float8CurrentScaling,
        "block": recipes.Float8BlockScaling,
        "mxfp8": recipes.MXFP8BlockScaling,
        "nvfp4": recipes.NVFP4BlockScaling,
    }[recipe]
    torch.manual_seed(seed)
    # The largest values, and with them the scales, differ in any case.
    init = functools.partial(torch.nn.init.normal_, std=0.02 * 2**seed)
    with te.quantized_model_init(recipe=kind()):
        linear = te.Linear(SHAPE[1], SHAPE[0], bias=False, params_dtype=torch.bfloat16, init_method=init)
    return linear.weight.detach()


def chunked(folder: Path, pieces: list[torch.Tensor], *, offsets: Any = HALVES) -> Chunked:
    """Return the tensor in records as DCP writes them."""
    chunks: list[tuple[tuple[int, ...], Lazy]] = []
    for number, (at, piece) in enumerate(zip(offsets, pieces, strict=True)):
        file, record = folder / str(number), io.BytesIO()
        torch.save(piece, record)
        file.write_bytes(record.getvalue())
        stored = DcpRecord(file, "w", 0, file.stat().st_size, tuple(piece.shape), torch.bfloat16, check=True)
        chunks.append((at, stored))
    return Chunked("w", SHAPE, torch.bfloat16, chunks)


def half_of(weight: torch.Tensor, at: tuple[int, int], size: tuple[int, int] = (128, 128)) -> torch.Tensor:
    return QuantizedSlice(weight, at, size).stored()


@pytest.mark.parametrize("recipe", ["current", "block", "mxfp8", "nvfp4"])
def test_quantized_shards_are_joined_exactly(te, tmp_path, recipe):
    """Joined components equal those of the unsharded weight bit for bit."""
    weight = weight_of(te, recipe, 0)
    result = quantized_or_plain(
        "w", chunked(tmp_path, [half_of(weight, at) for at in HALVES]), scrambled=False
    )
    assert isinstance(result, Quantized) and (result.shape, result.dtype) == (SHAPE, torch.bfloat16)
    own = {component.name: component.tensor for component in components_of(weight, "w")}
    assert result.components.keys() == own.keys()
    assert [name for name, part in result.components.items() if not torch.equal(part.full(), own[name])] == []
    assert torch.equal(result.values("w").full().bfloat16(), values_of(weight, torch.bfloat16))


@pytest.mark.parametrize("recipe", ["current", "nvfp4"])
def test_shards_with_different_scales_are_dequantized(te, tmp_path, recipe):
    """One scale is wrong for the other shards, so a load quantizes the values again."""
    one, other = weight_of(te, recipe, 0), weight_of(te, recipe, 1)
    pieces = [half_of(one, HALVES[0]), half_of(other, HALVES[1])]
    result = quantized_or_plain("w", chunked(tmp_path, pieces), scrambled=False)
    assert isinstance(result, Chunked) and result.dtype is torch.float32
    assert torch.equal(result.full(), torch.cat([values_of(one)[:128], values_of(other)[128:]]))
    assert not torch.equal(result.full(), values_of(one)), "the control"


def test_mixed_quantized_and_plain_shards_are_dequantized(te, tmp_path):
    """A rank whose rectangle splits a block writes dequantized values."""
    weight, offsets = weight_of(te, "nvfp4", 0), [(0, 0), (128, 0), (136, 0)]
    pieces = [half_of(weight, at, (n, 128)) for at, n in zip(offsets, (128, 8, 120), strict=True)]
    assert list(map(_te.is_quantized, pieces)) == [True, False, False]
    result = quantized_or_plain("w", chunked(tmp_path, pieces, offsets=offsets), scrambled=False)
    assert result.dtype is torch.float32 and torch.equal(
        result.full().bfloat16(), values_of(weight, torch.bfloat16)
    )


def test_tp_shards_in_an_unknown_order_are_rejected(te, tmp_path):
    weight = weight_of(te, "mxfp8", 0)
    stored = chunked(tmp_path, [half_of(weight, at) for at in HALVES])
    with pytest.raises(CheckpointError, match="w: a quantized weight in 2 pieces of tensor parallelism"):
        quantized_or_plain("w", stored, scrambled=True)


def test_plain_shards_are_read_lazily(tmp_path):
    """The load reads their values later, only the rows of each rank."""
    stored = chunked(tmp_path, [torch.ones(128, 128, dtype=torch.bfloat16)] * 2)
    for number in range(2):
        (tmp_path / str(number)).unlink()
    assert quantized_or_plain("w", stored, scrambled=True) is stored
