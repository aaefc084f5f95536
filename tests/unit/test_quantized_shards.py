"""Quantized weights in one process: shards of ones made on the device, packed buffers, the check of the weight mesh."""

from __future__ import annotations

import types

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import te_fsdp
from te_fsdp import _te
from te_fsdp.binding import Binding
from te_fsdp.errors import MeshError
from te_fsdp.layout.boxes import Box
from te_fsdp.mesh import Meshes
from te_fsdp.quantized import all_gather
from te_fsdp.quantized.components import components_of
from te_fsdp.quantized.shards import BLOCK_ROWS

WORLD, ME = 16, 8
ROWS, COLUMNS = 256, 128
RECIPES = (
    "DelayedScaling",
    "Float8CurrentScaling",
    "Float8BlockScaling",
    "MXFP8BlockScaling",
    "NVFP4BlockScaling",
)


class Model(nn.Module):
    """A linear with a quantized weight."""

    def __init__(self, te, recipe: str, *, keep: bool = False) -> None:
        super().__init__()
        from transformer_engine.common import recipe as recipes

        torch.manual_seed(0)
        options = {"recipe": getattr(recipes, recipe)(), "preserve_high_precision_init_val": keep}
        with te.quantized_model_init(enabled=True, **options):
            self.up = te.Linear(COLUMNS, ROWS, params_dtype=torch.bfloat16, device="cpu")


def meshes_at(place: int, size: int = 2) -> Meshes:
    """Pure FSDP over ranks of which this process is the given one."""
    mesh = DeviceMesh("cpu", torch.arange(size) + ME - place, mesh_dim_names=("dp_shard",))
    return Meshes.from_device_mesh(mesh)


@pytest.fixture
def world(fake_world, te):
    fake_world(WORLD, ME)
    return te


def local(model: nn.Module) -> torch.Tensor:
    return model.up.weight._local_tensor


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("place", [0, 1])
def test_a_shard_is_the_slice_of_the_whole_weight(world, recipe, place):
    """In every byte, although FSDP2 cut high-precision values: the bytes are copied."""
    whole = Model(world, recipe).up.weight
    fmt = _te.format_of(whole)
    model = te_fsdp.fully_shard(Model(world, recipe), meshes_at(place))
    shard = local(model)
    assert _te.format_of(shard) == fmt
    part = slice(place * ROWS // 2, (place + 1) * ROWS // 2)
    assert torch.equal(shard.dequantize(), whole.dequantize()[part])
    sources = {c.name: c for c in components_of(whole.detach(), "whole")}
    targets = components_of(shard, "shard")
    assert {c.name for c in targets} == set(sources)
    box = Box((part.start, 0), (0, 0), tuple(shard.shape))
    for target in targets:
        cut = target.boxes([box], "weight")[0]
        expected = sources[target.name].tensor[cut.original_slices()]
        assert torch.equal(target.tensor[cut.local_slices()], expected), target.name
    other = slice((1 - place) * ROWS // 2, (2 - place) * ROWS // 2)
    assert not torch.equal(shard.dequantize(), whole.dequantize()[other])  # negative control


def test_delayed_scaling_keeps_the_scale_it_has(world):
    whole = Model(world, "DelayedScaling").up.weight
    shard = local(te_fsdp.fully_shard(Model(world, "DelayedScaling"), meshes_at(1)))
    assert torch.equal(shard._data, whole._data[ROWS // 2 :])
    assert torch.equal(shard._scale_inv, whole._scale_inv)


@pytest.mark.parametrize("recipe", ["MXFP8BlockScaling", "Float8CurrentScaling", "NVFP4BlockScaling"])
def test_the_value_from_before_quantization_is_cut_too(world, recipe):
    """`preserve_high_precision_init_val`: what an optimizer takes its main weights from."""
    whole = Model(world, recipe, keep=True).up.weight.get_high_precision_init_val()
    model = te_fsdp.fully_shard(Model(world, recipe, keep=True), meshes_at(1))
    assert torch.equal(local(model).get_high_precision_init_val(), whole[ROWS // 2 :])
    local(model).clear_high_precision_init_val()
    assert local(model).get_high_precision_init_val() is None
    unkept = te_fsdp.fully_shard(Model(world, recipe), meshes_at(1))
    assert _te.high_precision_value(local(unkept)) is None


def test_every_format_has_its_block(te):
    """The rows that one scale spans, against TE's own constants."""
    from transformer_engine.pytorch import constants

    assert BLOCK_ROWS["mxfp8"] == constants.MXFP8_BLOCK_SCALING_SIZE
    assert BLOCK_ROWS["nvfp4"] == constants.NVFP4_BLOCK_SCALING_SIZE
    from transformer_engine.pytorch import Float8BlockQuantizer

    assert (
        BLOCK_ROWS["float8-block"]
        == Float8BlockQuantizer(
            constants.TE_DType[torch.float8_e4m3fn], rowwise=True, columnwise=True
        ).block_len
    )


def test_names_of_formats(te):
    """Of a tensor and of the quantizer that makes it: the same, and TE's class name for one that we do not know."""
    for recipe in RECIPES:
        module = Model(te, recipe).up
        quantizer = _te.weight_quantizer(module, "weight")
        assert _te.format_of(module.weight) == _te.format_of_quantizer(quantizer) in BLOCK_ROWS
        assert _te.weight_quantizer(module, "bias") is None
        shared = recipe in ("Float8CurrentScaling", "NVFP4BlockScaling")
        assert _te.needs_shared_amax(quantizer) is shared
    assert _te.format_of_quantizer(object()) == "object"
    assert _te.format_of(torch.ones(2)) is None


# ------------------------------------------------------------------------------------------- all-gather hooks

DTYPES = (torch.uint8, torch.float32, torch.bfloat16)


@settings(max_examples=50, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 9), min_size=1, max_size=3)),
        min_size=1,
        max_size=4,
    )
)
def test_packed_buffers_come_out_as_they_went_in(described):
    buffers = tuple(
        torch.arange(torch.Size(shape).numel()).remainder(251).to(dtype).reshape(shape)
        for dtype, shape in described
    )
    (flat,), packed = all_gather._pack(buffers, "metadata")
    assert (flat.dtype, flat.dim(), packed.metadata) == (torch.uint8, 1, "metadata")
    for before, after in zip(buffers, all_gather._unpack(flat, packed), strict=True):
        assert (after.dtype, after.shape) == (before.dtype, before.shape) and torch.equal(before, after)
        assert after.numel() == 0 or (after.data_ptr() - flat.data_ptr()) % 256 == 0
    if flat.numel():
        assert (
            all_gather._unpack(flat, packed)[0].untyped_storage().data_ptr()
            == flat.untyped_storage().data_ptr()
        )


def test_hooks_are_mended_once(te):
    all_gather.mend_hooks()
    classes = _te.gathering_tensor_classes()
    hooks = [(cls.fsdp_pre_all_gather, cls.fsdp_post_all_gather) for cls in classes]
    all_gather.mend_hooks()
    assert len(classes) >= 2
    assert [(cls.fsdp_pre_all_gather, cls.fsdp_post_all_gather) for cls in classes] == hooks


def test_a_weight_mesh_that_misses_ranks(world):
    """Found in the gather, where the FSDP axis is known; formats without a scale per tensor do not care."""
    tp, fsdp = DeviceMesh("cpu", [ME, ME + 1]), types.SimpleNamespace(size=lambda: 4)
    current = Model(world, "Float8CurrentScaling").up.weight
    with pytest.raises(MeshError) as caught:
        all_gather._check_weight_mesh(current, Binding("up", tp, tp, {}), fsdp)
    assert str(caught.value) == (
        "up: weight_mesh of a weight with one scale per tensor: expected 4 (FSDP shard axis) * 2 (tp) = 8 ranks, got 2 "
        "ranks. Ranks outside it would quantize their pieces with another scale. Fix: pass "
        'weight_mesh=te_fsdp.Meshes(...).weight, the flattened ("dp_shard", "tp") mesh.'
    )
    with pytest.raises(MeshError, match="= 8 ranks, got 1 ranks"):
        all_gather._check_weight_mesh(current, Binding("up", tp, None, {}), fsdp)
    all_gather._check_weight_mesh(current, Binding("up", None, None, {}), fsdp)
    all_gather._check_weight_mesh(current, Binding("up", tp, DeviceMesh("cpu", range(8, 16)), {}), fsdp)
    all_gather._check_weight_mesh(
        Model(world, "MXFP8BlockScaling").up.weight, Binding("up", tp, tp, {}), fsdp
    )
