"""Test the tables of patches of TransformerEngine or torch."""

from __future__ import annotations

import csv
import inspect
import re
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._ops import _tensor_ops

import te_fsdp
from te_fsdp.mesh import Meshes
from te_fsdp.modules import fused_states
from te_fsdp.quantized import fsdp_hooks, quantizer_record
from te_fsdp.quantized.amax import DELAYED_UPDATES
from te_fsdp.upstream import fsdp2_state as _fsdp2, patches as _patches, te as _te
from te_fsdp.upstream.patches import FSDP2
from te_fsdp.upstream.torch_dtensor import strided_shard
from te_fsdp.upstream.torch_redistribution import move_strided_shards

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/upstream.md").read_text()
ROWS = list(csv.DictReader((ROOT / "tests/unit/patches.csv").read_text().splitlines()))


def test_each_patch_has_a_row_in_the_csv():
    assert [(row["owner"], row["attribute"]) for row in ROWS] == [
        (patch.owner, patch.attribute) for patch in (*FSDP2, *_patches.PATCHES.values())
    ]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row['owner']} {row['attribute']}")
def test_patch_rows_name_existing_tests(row):
    """The documented bug and the test exist. The test shows the bug in stock TE or torch, or fails without the patch.

    Without a passage the reason is a missing public API, not a bug.
    """
    assert not row["upstream"] or re.search(rf"^{re.escape(row['upstream'])}", PAGE, re.MULTILINE)
    file, _, name = row["test"].partition("::")
    sources = [path.read_text() for path in (ROOT / "tests").rglob(file)]
    assert any(f"def {name}(" in source for source in sources) if name else sources


def test_patch_tables_import_without_side_effects(python):
    program = (
        "import sys; from te_fsdp.upstream import patches as _patches\n"
        "assert len(_patches.PATCHES) > 9 and len(_patches.FSDP2) > 5\n"
        "assert not any(name.startswith('transformer_engine') for name in sys.modules)"
    )
    assert subprocess.run([python, "-c", program], cwd=ROOT, check=False).returncode == 0


def test_class_patches_are_installed_once(te):
    rows = fsdp_hooks.PATCHES + fused_states.PATCHES + DELAYED_UPDATES + quantizer_record.GROUP_NAMES
    rows += quantizer_record.COUNTED_WRITES + quantizer_record.BLOCK_COPIES
    rows += _patches.PICKLES  # of Python 3.11.0 to 3.11.4 alone
    _patches.apply_patches(rows)
    results = {}
    for name, owners in _patches._OWNERS.items():
        for owner in owners():
            attribute = _patches.PATCHES[name].attribute
            assert (owner, attribute) in _patches.patched_attributes
            results[owner, attribute] = owner.__dict__[attribute]
    _patches.apply_patches(rows)
    assert {(owner, name): owner.__dict__[name] for owner, name in results} == results
    assert len({attribute for _, attribute in results} - {"__reduce_ex__"}) == 14


# --------------------------------------------------------------------------- faults of stock TE, in one process


def weight_of(te, recipe: str, **options) -> torch.Tensor:
    from transformer_engine.common import recipe as recipes

    with te.quantized_model_init(recipe=getattr(recipes, recipe)(**options)):
        return te.Linear(64, 32, bias=False, params_dtype=torch.bfloat16, device="cpu").weight.detach()


def test_stock_te_clears_mxfp8_columnwise_data(te):
    """Patch "columnwise"."""
    weight = weight_of(te, "MXFP8BlockScaling")
    (module, *_) = _patches._modules_with("clear_columnwise_cache")
    inspect.unwrap(module.clear_columnwise_cache)(weight)
    assert weight.get_usages() == {"rowwise": True, "columnwise": False}


@pytest.mark.parametrize(
    ("recipe", "options"),
    [
        ("Float8BlockScaling", {}),
        ("Float8BlockScaling", {"w_block_scaling_dim": 1}),
        ("MXFP8BlockScaling", {}),
        ("NVFP4BlockScaling", {}),
        ("NVFP4BlockScaling", {"disable_2d_quantization": True}),
    ],
)
def test_cleared_columnwise_data_can_be_recomputed(te, recipe, options):
    """Any quantized weight, sharded or replicated, has its columnwise data also in a second backward."""
    _patches.apply_patches(fsdp_hooks.PATCHES)
    weight = weight_of(te, recipe, **options)
    before = weight.get_metadata()["columnwise_data"].clone()
    (module, *_) = _patches._modules_with("clear_columnwise_cache")
    for _ in range(2):
        module.clear_columnwise_cache(weight)
        is_cleared = not weight.get_usages()["columnwise"]
        assert is_cleared == (not options and recipe != "MXFP8BlockScaling"), "cleared to free memory"
        weight.update_usage(rowwise_usage=True, columnwise_usage=True)
        assert torch.equal(weight.get_metadata()["columnwise_data"], before)


@pytest.mark.parametrize("recipe", ["DelayedScaling", "Float8CurrentScaling", "NVFP4BlockScaling"])
def test_stock_te_quantizer_copy_loses_attributes(te, recipe):
    """Patch "copy"."""
    quantizer = _te.quantizer_of(weight_of(te, recipe))
    quantizer.mark = True
    assert not hasattr(inspect.unwrap(type(quantizer).copy)(quantizer), "mark")


def test_stock_te_mxfp8_new_zeros_has_no_padding(te):
    """Patch "new zeros"."""
    weight = weight_of(te, "MXFP8BlockScaling")
    padded = weight.get_metadata()["rowwise_scale_inv"].shape
    assert type(weight).new_zeros(weight, weight.shape).get_metadata()["rowwise_scale_inv"].shape != padded


@pytest.mark.parametrize("strategy", ["bound", "no_shard", "exempt"])
def test_replicated_mxfp8_weights_can_be_converted(te, fake_world, strategy):
    """``Module.to`` swaps plain parameters, which therefore must have no weak references."""
    from transformer_engine.common.recipe import MXFP8BlockScaling

    fake_world(2)
    with te.quantized_model_init(enabled=True, recipe=MXFP8BlockScaling()):
        model = nn.Sequential(te.Linear(64, 64, device="cpu"), te.LayerNormLinear(64, 64, device="cpu"))
    before = [parameter.dequantize() for parameter in model.parameters() if _te.is_quantized(parameter)]
    if strategy == "bound":
        te_fsdp.set_device_mesh(model)
    else:
        te_fsdp.fsdp_no_shard(model if strategy == "exempt" else [])
        how = "no_shard" if strategy == "no_shard" else "optim_grads_params"
        te_fsdp.fully_shard(model, Meshes.build(device_type="cpu"), strategy=how)
    model.to("cpu").float()
    after = [parameter.dequantize() for parameter in model.parameters() if _te.is_quantized(parameter)]
    assert len(after) == 2 and all(map(torch.equal, before, after))


def test_stock_torch_apply_loses_parameter_attributes(te, fake_world):
    """Patch "_apply": stock torch loses the attribute, te_fsdp keeps it."""
    fake_world(2)
    model = nn.Sequential(te.Linear(16, 16, params_dtype=torch.bfloat16, device="cpu"))
    te_fsdp.fully_shard(model, Meshes.build(device_type="cpu"))
    model[0].weight.mark = True
    model.to(torch.float32)
    assert model[0].weight.mark and model[0].weight.dtype == torch.float32
    nn.Module._apply(model[0], lambda tensor: tensor.to(torch.bfloat16))
    assert not hasattr(model[0].weight, "mark")


class _Quantized(torch.Tensor):
    """Stand-in for tensors with their own sharding function."""


@pytest.mark.parametrize("rows", [0, 1, 7, 8, 21])
@pytest.mark.parametrize("dim", [0, 1])
def test_fsdp2_chunks_of_all_ranks_match_lazy_ones(rows, dim):
    """FSDP2 creates a tensor for each rank's shard. te_fsdp creates equal tensors on request."""
    from torch.distributed.fsdp._fully_shard import _fsdp_param

    whole = torch.arange(3.0 * rows).reshape((rows, 3) if dim == 0 else (3, rows))
    stock = _fsdp_param._chunk_with_empty(whole, 8, dim=dim)
    assert isinstance(stock, list) and len(stock) == 8, "FSDP2 no longer cuts for all ranks: drop the patch"
    with _fsdp2.chunk_this_rank_only():
        pieces = _fsdp_param._chunk_with_empty(whole, 8, dim=dim)
        assert not isinstance(pieces, list)
        quantized = whole.as_subclass(_Quantized)
        assert isinstance(_fsdp_param._chunk_with_empty(quantized, 8, dim=dim), list)
    assert isinstance(_fsdp_param._chunk_with_empty(whole, 8, dim=dim), list)
    for rank, piece in enumerate(stock):
        actual = pieces[rank]
        assert (
            actual.shape == piece.shape and actual.stride() == piece.stride() and torch.equal(actual, piece)
        )
        assert not piece.numel() or actual.data_ptr() == piece.data_ptr()


class Spec(NamedTuple):
    mesh: object
    placements: tuple[object, ...]
    ndim: int = 2


def test_transpose_moves_the_dim_of_strided_shards(monkeypatch):
    """The rules do not move ``_StridedShard``, as in torch 2.11."""
    strided, rule = strided_shard(0, 2), SimpleNamespace(input_specs=[], output_specs=None)
    rules, transposed = DTensor._op_dispatcher.sharding_propagator.op_strategy_funcs, torch.ops.aten.t.default
    monkeypatch.setitem(rules, transposed, lambda schema: SimpleNamespace(strategies=[rule]))
    for name in ("insert", "remove"):
        # torch 2.15 has the second one elsewhere.
        monkeypatch.setattr(
            _tensor_ops, f"shift_shard_dims_after_{name}", lambda placements, dim=0: placements, raising=False
        )
    move_strided_shards.__wrapped__()
    kept, moved = [strided, Shard(0), Replicate()], [strided_shard(1, 2), Shard(1), Replicate()]
    assert _tensor_ops.shift_shard_dims_after_insert(kept) == moved
    assert _tensor_ops.shift_shard_dims_after_insert(kept, 1) == kept
    assert _tensor_ops.shift_shard_dims_after_remove(moved, 0) == kept
    assert _tensor_ops.shift_shard_dims_after_remove(moved, 1) == moved
    for before, after in ((kept, moved), (moved, kept)):
        rule.input_specs = [Spec("mesh", tuple(before))]
        rules[transposed](None)
        assert rule.output_specs == Spec("mesh", tuple(after))
    rule.input_specs, rule.output_specs = [Spec("mesh", tuple(kept), ndim=1)], "as it was"
    rules[transposed](None)
    assert rule.output_specs == "as it was"
