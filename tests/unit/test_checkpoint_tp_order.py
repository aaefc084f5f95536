"""Infer from the shards of a plain DCP directory whether tensor parallelism has reordered rows."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from te_fsdp.checkpoint.compare import Differences, compare_stacked
from te_fsdp.checkpoint.lazy_tensors import Chunked, InMemory, Lazy
from te_fsdp.checkpoint.load_source import Source
from te_fsdp.checkpoint.plain_dcp import cut_by_tp
from te_fsdp.checkpoint.portable.convert import refuse_scrambled
from te_fsdp.checkpoint.reader import DCP_KIND, Contents, empty_manifest
from te_fsdp.errors import CheckpointError

HIDDEN, FFN = 24, 40


def cut(rows: int, columns: int | None, shards: int, *, by_rows: int = 1, by_columns: int = 1) -> Lazy:
    """Shard a tensor over tp, then each tp shard evenly over FSDP, as torch.chunk does."""
    pieces: list[tuple[tuple[int, ...], Lazy]] = []
    for part in range(by_rows):
        height = rows // by_rows
        each = -(-height // shards)
        for first in range(0, height, each):
            size = min(each, height - first)
            for column in range(by_columns):
                width = () if columns is None else (columns // by_columns,)
                at = (part * height + first, *(column * n for n in width))
                pieces.append((at, InMemory(torch.zeros(size, *width))))
    return Chunked("k", (rows, *(() if columns is None else (columns,))), torch.float32, pieces)


def layer(shards: int, tp: int) -> dict[str, Lazy]:
    """Return a gated LayerNormMLP, and a fused QKV without its own norm."""
    return {
        "model.norm.weight": cut(HIDDEN, None, shards),
        "model.mlp.layer_norm_weight": cut(HIDDEN, None, shards),
        "model.mlp.fc1_weight": cut(2 * FFN, HIDDEN, shards, by_rows=tp),
        "model.mlp.fc1_bias": cut(2 * FFN, None, shards, by_rows=tp),
        "model.mlp.fc2_weight": cut(HIDDEN, FFN, shards, by_columns=tp),
        "model.qkv.weight": cut(3 * HIDDEN, HIDDEN, shards, by_rows=tp),
    }


STACKED = ("mlp.fc1_weight", "mlp.fc1_bias", "qkv.weight")


@pytest.mark.parametrize("shards", [1, 2, 3, 4, 5, 7, 8])
@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_tensor_parallelism_is_inferred_from_column_shards(shards: int, tp: int) -> None:
    """Column shards show it, because FSDP never shards columns, whether or not rows divide evenly."""
    result = cut_by_tp(layer(shards, tp))
    assert result.issuperset(f"model.{name}" for name in STACKED) if tp > 1 else not result


def contents_of(tmp_path: Path, tensors: dict[str, Lazy], extras: list[str]) -> Contents:
    made = Contents(tmp_path, DCP_KIND, empty_manifest(), tensors)
    shapes = {key.removeprefix("model."): list(tensor.shape) for key, tensor in tensors.items()}
    made.manifest.parameters = {name: {"shape": shape, "format": None} for name, shape in shapes.items()}
    made.manifest.extra_states = extras
    return made


@pytest.mark.parametrize(
    ("shards", "tp", "extras", "refused", "asked"),
    [
        (4, 1, ["mlp", "qkv"], [], False),
        (4, 1, [], [], True),
        (2, 2, [], list(STACKED), False),
        (1, 2, ["mlp", "qkv"], list(STACKED), False),
        (1, 1, ["mlp", "qkv"], [], False),
        (1, 1, ["qkv"], [], True),
    ],
)
def test_plain_dcp_load_reports_stacked_weights_with_unknown_row_order(
    tmp_path: Path, shards: int, tp: int, extras: list[str], refused: list[str], asked: bool
) -> None:
    """TP shards are a difference unless a module's entry excludes it. Otherwise a note is logged."""
    tensors = layer(shards, tp)
    contents = contents_of(tmp_path, tensors, extras)
    source, result = Source(tmp_path, DCP_KIND, contents.manifest, tensors), Differences()
    described = {name: {"layout": "stacked(1, 1)"} for name in STACKED} | {
        "mlp.fc2_weight": {"layout": "plain"}
    }
    compare_stacked(result, source, described)
    assert sorted(result.names()) == sorted(refused)
    assert [("If they were saved with tensor parallelism" in note) for note in source.notes] == [True] * asked


@pytest.mark.parametrize("recorded", [False, True])
def test_recorded_row_order_is_accepted(tmp_path: Path, recorded: bool) -> None:
    """dcp.save wrote the directory from a te_fsdp model whose state dict omits ``_extra_state``."""
    tensors = layer(2, 2)
    tensors["model.mlp.fc1_weight"].in_original_order = recorded  # type: ignore[missing-attribute]
    source, result = (
        Source(tmp_path, DCP_KIND, contents_of(tmp_path, tensors, []).manifest, tensors),
        Differences(),
    )
    compare_stacked(result, source, {name: {"layout": "stacked(1, 1)"} for name in STACKED})
    assert source.notes == [] and bool(result) is not recorded


def test_convert_rejects_tp_shards_without_a_model(tmp_path: Path) -> None:
    with pytest.raises(
        CheckpointError, match=r"in pieces of tensor parallelism: mlp.fc1_bias, mlp.fc1_weight"
    ):
        refuse_scrambled(contents_of(tmp_path, layer(2, 2), []))
    refuse_scrambled(contents_of(tmp_path, layer(4, 1), []))
