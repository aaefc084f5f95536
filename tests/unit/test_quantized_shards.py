"""Test quantized weights in one process: shards, packed buffers, shape requirements of formats."""

from __future__ import annotations

import inspect
import re

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import te_fsdp
from te_fsdp.errors import PlacementError, PrecisionError
from te_fsdp.layout import Box, Layout, ParameterRule
from te_fsdp.mesh import Meshes
from te_fsdp.quantized import components, fsdp_hooks
from te_fsdp.quantized.alignment import Grid, Weight, check_fit, check_quantizer, fits, fitting_dim
from te_fsdp.quantized.components import block_of, components_of
from te_fsdp.upstream import patches as _patches, te as _te
from te_fsdp.upstream.te_formats import FORMATS

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
    """Return FSDP meshes in which this process simulates the given rank."""
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
def test_quantized_shard_equals_a_slice_of_the_unsharded_weight(world, recipe, place):
    """All bytes are equal: they are copied although FSDP2 shards high-precision values."""
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


def test_delayed_scaling_shard_keeps_the_scale(world):
    whole = Model(world, "DelayedScaling").up.weight
    shard = local(te_fsdp.fully_shard(Model(world, "DelayedScaling"), meshes_at(1)))
    assert torch.equal(shard._data, whole._data[ROWS // 2 :])
    assert torch.equal(shard._scale_inv, whole._scale_inv)


@pytest.mark.parametrize("recipe", ["MXFP8BlockScaling", "Float8CurrentScaling", "NVFP4BlockScaling"])
def test_high_precision_initial_value_is_sharded(world, recipe):
    """Optimizers initialize main weights from it (`preserve_high_precision_init_val`)."""
    whole = Model(world, recipe, keep=True).up.weight.get_high_precision_init_val()
    model = te_fsdp.fully_shard(Model(world, recipe, keep=True), meshes_at(1))
    assert torch.equal(local(model).get_high_precision_init_val(), whole[ROWS // 2 :])
    local(model).clear_high_precision_init_val()
    assert local(model).get_high_precision_init_val() is None
    unkept = te_fsdp.fully_shard(Model(world, recipe), meshes_at(1))
    assert _te.high_precision_value(local(unkept)) is None


def test_block_sizes_match_te_constants(te):
    """Compare the rows per scale with TE's own constants."""
    from transformer_engine.pytorch import constants

    assert FORMATS["mxfp8"].block == constants.MXFP8_BLOCK_SCALING_SIZE
    assert FORMATS["nvfp4"].block == constants.NVFP4_BLOCK_SCALING_SIZE
    from transformer_engine.pytorch import Float8BlockQuantizer

    assert (
        FORMATS["float8-block"].block
        == Float8BlockQuantizer(
            constants.TE_DType[torch.float8_e4m3fn], rowwise=True, columnwise=True
        ).block_len
    )


def test_format_names_match_for_tensors_and_quantizers(te):
    """A tensor and its quantizer have the same format name. An unknown format has TE's class name."""
    for recipe in RECIPES:
        module = Model(te, recipe).up
        quantizer = _te.weight_quantizer(module, "weight")
        assert _te.format_of(module.weight) == _te.format_of_quantizer(quantizer)
        assert _te.format_of(module.weight) in FORMATS.values()
        assert _te.weight_quantizer(module, "bias") is None
        shared = recipe in ("Float8CurrentScaling", "NVFP4BlockScaling")
        assert _te.needs_shared_amax(quantizer) is shared
    assert _te.format_of_quantizer(object()).name == "object"
    assert _te.format_of(torch.ones(2)) is None


@pytest.mark.parametrize("recipe", RECIPES)
def test_format_table_matches_te_tensors(te, recipe):
    """Compare names of buffers, attributes, options and functions, and which buffers contain the values."""
    weight = Model(te, recipe).up.weight.detach()
    row, data = _te.format_of(weight), weight.get_metadata()
    assert all(data[buffer.name] is getattr(weight, buffer.attribute) for buffer in row.buffers)
    assert set(row.unknown_options) <= set(data)
    values = [data[name] for name in data if name.endswith("data") and data[name] is not None]
    assert list(map(id, _te.value_buffers_of(weight))) == list(map(id, values))
    assert callable(getattr(te, row.available))
    element = data.get("fp8_dtype", data.get("fp4_dtype"))
    assert element.name in row.elements


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
def test_packed_buffers_round_trip(described):
    buffers = tuple(
        torch.arange(torch.Size(shape).numel()).remainder(251).to(dtype).reshape(shape)
        for dtype, shape in described
    )
    flat, places = components.pack_flat(buffers)
    assert (flat.dtype, flat.dim()) == (torch.uint8, 1)
    for before, after in zip(buffers, places.typed(flat), strict=True):
        assert after.dtype == before.dtype and torch.equal(before.reshape(-1), after)
        assert after.numel() == 0 or (after.data_ptr() - flat.data_ptr()) % 256 == 0
    if flat.numel():
        first = next(places.typed(flat))
        assert first.untyped_storage().data_ptr() == flat.untyped_storage().data_ptr()


def test_fsdp_hooks_are_patched_once(te):
    _patches.apply_patches(fsdp_hooks.PATCHES)
    classes = _patches.gathering_tensors()
    hooks = [(cls.fsdp_pre_all_gather, cls.fsdp_post_all_gather) for cls in classes]
    _patches.apply_patches(fsdp_hooks.PATCHES)
    assert len(classes) >= 2
    assert [(cls.fsdp_pre_all_gather, cls.fsdp_post_all_gather) for cls in classes] == hooks


def test_fsdp_hooks_accept_calls_without_a_module(te):
    """TE's tests call them with `module=None`. Without a binding, the hooks behave as in stock TE."""
    told = []

    def stock(self, mesh, orig_size, contiguous_orig_stride, module, mp_policy):
        told.append((mesh, module, mp_policy))
        return (self,), "metadata"

    hook, tensor = fsdp_hooks.pre_all_gather(stock), torch.ones(2, 2)
    for options in (
        {"module": None, "mp_policy": None},
        {"module": torch.nn.Linear(1, 1), "mp_policy": None},
        {},
    ):
        inputs, metadata = hook(
            tensor,
            mesh=None,
            orig_size=tensor.shape,
            contiguous_orig_stride=tensor.stride(),
            **options,
        )
        assert inputs[0] is tensor and metadata == "metadata"
    assert len(told) == 3
    # FSDP2 distinguishes hooks of one mesh only from these by counting.
    assert len(inspect.signature(hook).parameters) == 6


# --------------------------------------------------------------------------------------------------- what fits


REPLICATED = ParameterRule(None)


def weight(shape: tuple[int, int], fmt: str, rule: ParameterRule = REPLICATED) -> Weight:
    return Weight("up.weight", shape, FORMATS[fmt], rule, FORMATS[fmt].block)


SIZES = st.integers(1, 12)
BLOCKS = sorted(name for name, row in FORMATS.items() if row.block)


@settings(max_examples=200, deadline=None)
@given(st.sampled_from(BLOCKS), SIZES, SIZES, st.sampled_from([16, 32, 64]), st.integers(1, 6))
def test_shards_require_full_blocks(fmt, rows, columns, unit, ranks):
    """Compare with FSDP2's actual shards (`torch.chunk`)."""
    shape, block = (rows * unit, columns * unit), FORMATS[fmt].block
    for dim in (0, 1):
        pieces = [piece.shape[dim] for piece in torch.empty(shape).chunk(ranks, dim=dim)]
        even = pieces == pieces[:1] * ranks
        if fmt == "float8":
            expected = dim == 0 or even
        else:
            whole = [size % block == 0 for size in shape]
            if fmt == "float8-block":  # a short last block along an unsharded dim
                whole = [fine or d != dim or ranks == 1 for d, fine in enumerate(whole)]
                whole[1 - dim] = True
            expected = even and all(whole) and (ranks == 1 or pieces[0] % block == 0)
        assert fits(weight(shape, fmt), ranks, dim) == expected, (shape, dim, pieces)


@settings(max_examples=200, deadline=None)
@given(
    st.sampled_from(["mxfp8", "nvfp4", "float8-block"]), SIZES, SIZES, st.integers(1, 8), st.integers(1, 3)
)
def test_proposed_meshes_and_shapes_are_valid(fmt, rows, columns, shard, tp_log):
    """The mesh and the shape that the error message proposes are accepted."""
    tp = 2 ** (tp_log - 1)
    made = weight((rows * 16 * tp, columns * 16), fmt, ParameterRule(0)).over(tp)
    grid = Grid(1, shard, tp)
    if fitting_dim(made, shard) is not None:
        assert check_fit(made, grid) == fitting_dim(made, shard)
        return
    with pytest.raises(PlacementError) as caught:
        check_fit(made, grid)
    message = str(caught.value)
    mesh = re.search(r"dp_replicate=(\d+), dp_shard=(\d+), tp=(\d+)", message)
    if mesh:
        sizes = tuple(map(int, mesh.groups()))
        assert sizes[0] * sizes[1] * sizes[2] == shard * tp
        assert fitting_dim(made.over(sizes[2]), sizes[1]) is not None
    else:
        assert "no mesh of these ranks fits" in message
        assert all(fitting_dim(made.over(t), 1) is None for t in (1, 2, 4) if t <= tp)
    shape = tuple(map(int, re.search(r"a weight of \w* ?shape \((\d+), (\d+)\)", message).groups()))
    assert shape != (rows * 16 * tp, columns * 16)
    assert fitting_dim(weight(shape, fmt, ParameterRule(0)).over(tp), shard) is not None


def test_proposed_gqa_shapes_are_the_nearest():
    """Query, key and value of 8 and 4 heads take 2, 1 and 1 blocks, so 4 blocks per tp rank fit."""
    queries = ParameterRule(0, Layout("stacked", (8, 4, 4)))
    with pytest.raises(PlacementError, match=r"unsharded shape \(2048, 512\) instead of \(1024, 512\)"):
        check_fit(weight((1024, 512), "float8-block", queries).over(4), Grid(1, 1, 4))
    assert fits(weight((2048, 512), "float8-block", queries).over(4), 1, 0)


def test_stacked_weights_require_full_blocks():
    halves = ParameterRule(0, Layout("stacked", (1, 1)))
    assert fits(weight((128, 64), "mxfp8", halves), 2, 0)
    assert not fits(weight((96, 64), "mxfp8", halves), 1, 0)  # 48 rows each
    assert fits(weight((96, 64), "mxfp8"), 1, 0)


def part(te, name: str):
    """Return a quantizer of one format, as the factory of a custom recipe makes it."""
    import transformer_engine_torch as tex

    kind = tex.DType.kFloat8E4M3
    if name == "block":
        return te.Float8BlockQuantizer(fp8_dtype=kind, rowwise=True, columnwise=True, block_scaling_dim=2)
    if name == "delayed":
        return te.Float8Quantizer(torch.ones(1), torch.zeros(1), kind)
    return (
        te.MXFP8Quantizer(kind) if name == "mxfp8" else te.Float8CurrentScalingQuantizer(kind, device="cpu")
    )


def hybrid(te, rowwise: str, columnwise: str):
    from transformer_engine.pytorch.tensor.hybrid_tensor import HybridQuantizer

    return HybridQuantizer(rowwise_quantizer=part(te, rowwise), columnwise_quantizer=part(te, columnwise))


@pytest.mark.parametrize(
    ("formats", "block"),
    [
        (("block", "mxfp8"), 128),
        (("mxfp8", "block"), 128),
        (("current", "mxfp8"), 32),
        (("block", "current"), 128),
    ],
)
def test_hybrid_weights_use_the_larger_block_of_both_formats(world, formats, block):
    """128 rows contain four MXFP8 scales, but 32 rows are too few for one scale of 128."""
    from transformer_engine.common.recipe import CustomRecipe

    def factory(role):
        return (
            hybrid(world, *formats)
            if role is not None and role.tensor_type == "weight"
            else part(world, "current")
        )

    with world.quantized_model_init(recipe=CustomRecipe(qfactory=factory)):
        layer = world.Linear(COLUMNS, ROWS, params_dtype=torch.bfloat16, device="cpu")
    assert block_of(layer.weight) == block
    unfit = nn.Sequential(layer)
    size = 2 * ROWS // block  # half a block for each
    with pytest.raises(PlacementError, match=f"rows divisible by {size} FSDP ranks \\* {block}"):
        te_fsdp.fully_shard(unfit, meshes_at(size // 2, size))


@pytest.mark.parametrize("formats", [("delayed", "mxfp8"), ("block", "delayed")])
def test_hybrid_weights_with_delayed_scaling_are_rejected(te, formats):
    with pytest.raises(PrecisionError, match=r"w: hybrid weight with a part in delayed scaling.*Fix: "):
        check_quantizer("w", hybrid(te, *formats))
    check_quantizer("w", hybrid(te, "current", "mxfp8"))
