"""Test buffers of quantized tensors: creation, update in place, changed usages, no-op flag, meta, empty."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings, strategies as st

from te_fsdp import emulation
from te_fsdp.emulation._errors import EmulationError
from te_fsdp.emulation.tex import formats
from tests.unit.emulation.formats_inputs import make

SHAPE = (64, 96)
ON_HOPPER = ("delayed", "current", "block1", "block2")
ALL = (*ON_HOPPER, "mxfp8", "nvfp4")


def build(name, **usages):
    from transformer_engine.pytorch.constants import DType
    from transformer_engine.pytorch.tensor import (
        float8_blockwise_tensor as block,
        float8_tensor,
        mxfp8_tensor,
        nvfp4_tensor,
    )

    usages = {"rowwise": True, "columnwise": True, **usages}
    e4m3 = DType.kFloat8E4M3
    if name == "delayed":
        return float8_tensor.Float8Quantizer(torch.tensor([2.0]), torch.zeros(1), e4m3, **usages)
    if name == "current":
        return float8_tensor.Float8CurrentScalingQuantizer(e4m3, device="cpu", **usages)
    if name.startswith("block"):
        return block.Float8BlockQuantizer(e4m3, block_scaling_dim=int(name[-1]), **usages)
    if name == "mxfp8":
        return mxfp8_tensor.MXFP8Quantizer(e4m3, **usages)
    return nvfp4_tensor.NVFP4Quantizer(**usages)


def buffers(y):
    """Return all tensors of a quantized tensor by attribute name."""
    return {k: v for k, v in vars(y).items() if isinstance(v, torch.Tensor) and k != "amax_reduction_group"}


def snapshot(y):
    return {name: value.clone() for name, value in buffers(y).items()}


def assert_same(y, expected):
    got = buffers(y)
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(got[name], value), name


@pytest.fixture(params=[("9.0", name) for name in ON_HOPPER] + [("10.0", name) for name in ALL], ids="-".join)
def name(request):
    emulation.switch_arch(request.param[0])
    return request.param[1]


@pytest.mark.parametrize("internal", [False, True])
def test_empty_quantized_tensors_have_the_buffers_of_filled_ones(name, internal):
    quantizer = build(name)
    quantizer.internal = internal
    y = formats.create_empty_quantized_tensor(
        quantizer, list(SHAPE), torch.bfloat16, torch.device("cuda"), False
    )
    assert type(y).__name__.endswith("Storage") == internal
    assert y._dtype == torch.bfloat16
    assert tuple(y.size()) == SHAPE
    assert all(value.device.type == "cpu" for value in buffers(y).values())
    filled = quantizer.quantize_impl(make("normal", SHAPE, torch.bfloat16))
    assert type(filled) is type(y)
    assert {k: v.shape for k, v in buffers(filled).items()} == {k: v.shape for k, v in buffers(y).items()}


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 12), st.integers(1, 12), st.booleans(), st.booleans(), st.sampled_from(ALL[1:]))
def test_buffers_match_transformer_engine_specs(rows, cols, rowwise, columnwise, name):
    """TransformerEngine 2.19 and later describes in Python the buffers that its extension allocates."""
    emulation.switch_arch("10.0")
    quantizer = build(name, rowwise=rowwise or not columnwise, columnwise=columnwise)
    if not hasattr(quantizer, "inner_tensor_specs"):
        pytest.skip("this TransformerEngine does not describe its buffers")
    shape = (32 * rows, 32 * cols)
    y = formats.create_empty_quantized_tensor(quantizer, shape, torch.float32, "cpu")
    expected = quantizer.inner_tensor_specs(shape)
    assert {k: (tuple(v.shape), v.dtype) for k, v in buffers(y).items()} == {
        k: (tuple(s), d) for k, (s, d) in expected.items()
    }


def test_update_in_place_equals_a_new_tensor(name):
    quantizer = build(name)
    first, second = make("normal", SHAPE, torch.bfloat16), make("heavy", SHAPE, torch.bfloat16, seed=1)
    y = quantizer(first)
    before, pointers = snapshot(y), {k: v.data_ptr() for k, v in buffers(y).items()}
    assert formats.quantize(second, quantizer, y) is y
    assert {k: v.data_ptr() for k, v in buffers(y).items()} == pointers
    fresh = snapshot(quantizer(second))
    assert_same(y, fresh)
    assert any(not torch.equal(before[k], fresh[k]) for k in before)


def test_noop_flag_keeps_buffers_and_amax(name):
    quantizer = build(name)
    y = quantizer(make("normal", SHAPE, torch.bfloat16))
    before, amax = snapshot(y), getattr(quantizer, "amax", torch.zeros(1)).clone()
    other = make("heavy", SHAPE, torch.bfloat16, seed=1)
    formats.quantize(other, quantizer, y, torch.ones(1))
    assert_same(y, before)
    assert torch.equal(getattr(quantizer, "amax", torch.zeros(1)), amax)
    formats.quantize(other, quantizer, y, torch.zeros(1))
    assert_same(y, snapshot(quantizer(other)))


def test_update_follows_changed_usages(name):
    """Switching from rowwise to both usages and back creates filled buffers and removes them."""
    x, other = make("normal", SHAPE, torch.bfloat16), make("heavy", SHAPE, torch.bfloat16, seed=1)
    quantizer = build(name, columnwise=False)
    y = quantizer(x)
    narrow = snapshot(y)
    quantizer.set_usage(columnwise=True)
    formats.quantize(other, quantizer, y)
    assert_same(y, snapshot(quantizer(other)))
    assert formats.operand(y, rowwise=False).shape == SHAPE
    quantizer.set_usage(columnwise=False)
    formats.quantize(x, quantizer, y)
    assert_same(y, narrow)


@pytest.mark.parametrize("kind", ["block1", "mxfp8", "nvfp4"])
def test_columnwise_only_quantization_matches_both_directions(kind):
    emulation.switch_arch("10.0")
    x = make("normal", SHAPE, torch.bfloat16)
    both = build(kind)(x)
    quantizer = build(kind, rowwise=False)
    y = quantizer(x)
    assert not any("rowwise" in attribute for attribute in buffers(y) if "column" not in attribute)
    assert torch.equal(y._columnwise_data, both._columnwise_data)
    y = build(kind)(x)
    formats.quantize(x, quantizer, y)
    assert y._rowwise_data is None
    assert torch.equal(y._columnwise_data, both._columnwise_data)
    with pytest.raises(EmulationError, match="is read rowwise, but _rowwise_data is missing"):
        formats.operand(y, rowwise=True)


def test_columnwise_only_is_rejected_where_kernels_need_rowwise():
    emulation.switch_arch("9.0")
    x = make("normal", SHAPE, torch.bfloat16)
    for kind in ("delayed", "current"):
        with pytest.raises(NotImplementedError, match="needs rowwise output storage"):
            build(kind, rowwise=False)(x)
    both, one = build("block2")(x), build("block2", rowwise=False)(x)
    assert one._rowwise_data is None and torch.equal(one._columnwise_data, both._columnwise_data)
    with pytest.raises(EmulationError, match="divides by a last dim of 0"):
        build("block2")(x[:, :0])
    emulation.switch_arch("10.0")
    y = build("current", rowwise=False)(x)  # _data serves both directions here
    assert y._transpose is None
    assert formats.operand(y, rowwise=False).shape == SHAPE


def test_update_follows_a_changed_dtype():
    from transformer_engine.pytorch.constants import DType

    emulation.switch_arch("10.0")
    x = make("normal", SHAPE, torch.bfloat16)
    quantizer = build("current")
    y = quantizer(x)
    quantizer.dtype = DType.kFloat8E5M2
    formats.quantize(x, quantizer, y)
    assert y._fp8_dtype == DType.kFloat8E5M2
    assert_same(y, snapshot(quantizer(x)))


def test_meta_and_empty_tensors_are_quantized(name):
    quantizer = build(name)
    y = formats.quantize(torch.empty(SHAPE, dtype=torch.bfloat16, device="meta"), quantizer)
    assert all(value.is_meta for value in buffers(y).values())
    empty = formats.quantize(torch.empty((0, 64), dtype=torch.bfloat16), quantizer)
    assert tuple(empty.size()) == (0, 64)
    assert formats.operand(torch.empty(0, 64), rowwise=True).shape == (0, 64)


def test_update_follows_a_changed_swizzle_flag():
    emulation.switch_arch("10.0")
    x = make("normal", (160, 160), torch.bfloat16)
    for kind in ("mxfp8", "nvfp4"):
        quantizer = build(kind)
        plain = quantizer(x)
        values = formats.operand(plain, rowwise=False)
        compact = snapshot(plain)
        quantizer.optimize_for_gemm = True
        formats.quantize(x, quantizer, plain)
        assert plain._with_gemm_swizzled_scales
        assert not torch.equal(plain._rowwise_scale_inv, compact["_rowwise_scale_inv"])
        assert torch.equal(formats.operand(plain, rowwise=False), values)
        quantizer.optimize_for_gemm = False
        formats.quantize(x, quantizer, plain)
        assert_same(plain, compact)
        by_hand = quantizer(x)
        formats.swizzle_scales_for_gemm_(by_hand)
        formats.swizzle_scales_for_gemm_(by_hand)  # a second call changes nothing
        quantizer.optimize_for_gemm = True
        assert_same(by_hand, snapshot(quantizer(x)))


def test_quantize_without_quantizer_returns_the_input():
    x = torch.randn(3, 4)
    assert formats.quantize(x, None) is x
    out = torch.zeros(3, 4)
    assert formats.quantize(x, None, out) is out
    assert torch.equal(out, x)


def test_batched_quantize_functions_equal_separate_calls(name):
    quantizer = build(name)
    grad = make("normal", SHAPE, torch.bfloat16)
    bias, y = formats.bgrad_quantize(grad, quantizer)
    assert torch.equal(bias, grad.float().sum(0).to(torch.bfloat16))
    assert_same(y, snapshot(quantizer(grad)))
    parts = formats.split_quantize(grad, [32, 0, 32], [build(name) for _ in range(3)])
    separate = formats.multi_tensor_quantize([grad[:32], grad[32:]], [build(name), build(name)])
    assert_same(parts[0], snapshot(separate[0]))
    assert_same(parts[2], snapshot(separate[1]))
    bulk = name not in ("delayed", "current")
    assert type(parts[0]).__name__.endswith("Storage") == bulk
    alone = formats.split_quantize(grad, [64], [build(name)], disable_bulk_allocation=True)
    assert not type(alone[0]).__name__.endswith("Storage")
    amax = torch.zeros(1)
    formats.compute_amax(grad, amax)
    assert amax.item() == grad.float().abs().max().item()


def test_fp8_transpose_moves_the_last_dim_to_the_front():
    data = torch.randint(0, 256, (2, 3, 5), dtype=torch.uint8)
    expected = data.reshape(6, 5).t().reshape(5, 2, 3)
    assert torch.equal(formats.fp8_transpose(data, 7, out=None), expected)
    out = torch.empty(5, 2, 3, dtype=torch.uint8)
    assert formats.fp8_transpose(data, 7, out=out) is out
    assert torch.equal(out, expected)
