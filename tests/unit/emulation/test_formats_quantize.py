"""Compare quantization in every format with the slow reference: bytes, scales, dequantized values."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from te_fsdp import emulation
from te_fsdp.emulation.tex import formats
from tests.unit.emulation import reference_formats as reference
from tests.unit.emulation.formats_inputs import (
    DTYPES,
    KINDS,
    PATTERNS,
    array,
    assert_bytes,
    assert_floats,
    make,
)


def quantizers():
    from transformer_engine.pytorch.tensor import float8_blockwise_tensor, float8_tensor, mxfp8_tensor

    return (
        float8_tensor.Float8Quantizer,
        float8_tensor.Float8CurrentScalingQuantizer,
        float8_blockwise_tensor.Float8BlockQuantizer,
        mxfp8_tensor.MXFP8Quantizer,
    )


def te_dtype(kind):
    from transformer_engine.pytorch.constants import DType

    return DType(KINDS[kind])


def check_per_tensor(y, x, kind, scale, arch, rounding=reference.nearest):
    data, inverse = reference.per_tensor(array(x), kind, scale, rounding)
    assert_bytes(y._data, data, "_data")
    assert_bytes(y._scale_inv, np.array([inverse], np.float32), "_scale_inv")
    if arch == "9.0":
        assert_bytes(y._transpose, data.T, "_transpose")
        assert y._transpose_invalid is False
    else:
        assert y._transpose is None
    values = [[reference.multiply(reference.decode(int(b), kind), inverse) for b in row] for row in data]
    expected = np.array(values, np.float32)
    assert_floats(formats.dequantize(y, torch.float32), expected, "dequantize")
    for rowwise in (True, False):
        assert_floats(formats.operand(y, rowwise=rowwise), expected, f"operand rowwise={rowwise}")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("pattern", PATTERNS)
def test_delayed_scaling_matches_reference(arch, dtype, pattern):
    delayed, _, _, _ = quantizers()
    x = make(pattern, (24, 40), dtype)
    for kind, scale in (("e4m3", 3.7), ("e5m2", 1.0)):
        old = 0.5
        quantizer = delayed(torch.tensor([scale]), torch.tensor([old]), te_dtype(kind))
        y = quantizer(x)
        check_per_tensor(y, x, kind, float(np.float32(scale)), arch)
        assert quantizer.amax.item() == max(old, reference.amax(array(x).ravel().tolist()))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("pattern", PATTERNS)
def test_current_scaling_matches_reference(arch, dtype, pattern):
    _, current, _, _ = quantizers()
    x = make(pattern, (24, 40), dtype)
    amax = reference.amax(array(x).ravel().tolist())
    for kind, power_of_two, epsilon in (("e4m3", False, 0.0), ("e5m2", True, 0.0), ("e4m3", True, 64.0)):
        quantizer = current(
            te_dtype(kind), device="cpu", force_pow_2_scales=power_of_two, amax_epsilon=epsilon
        )
        options = {"power_of_two": power_of_two, "epsilon": epsilon}
        check_per_tensor(
            quantizer(x), x, kind, reference.scale_of(amax, reference.largest(kind), **options), arch
        )


def test_control_per_tensor_truncation_differs():
    emulation.switch_arch("10.0")
    _, current, _, _ = quantizers()
    x = make("normal", (24, 40), torch.float32)
    scale = reference.scale_of(reference.amax(array(x).ravel().tolist()), 448.0)
    y = current(te_dtype("e4m3"), device="cpu")(x)
    with pytest.raises(AssertionError, match="_data"):
        check_per_tensor(y, x, "e4m3", scale, "10.0", reference.truncated)


def test_transpose_of_a_3d_tensor_moves_the_last_dim_to_the_front(arch):
    """With more than two dims, the transpose moves the last dim to the front."""
    _, current, _, _ = quantizers()
    x = make("normal", (6, 8), torch.float32).reshape(2, 3, 8)
    y = current(te_dtype("e4m3"), device="cpu")(x)
    assert y.shape == (2, 3, 8)
    if arch == "9.0":
        assert y._transpose.shape == (8, 2, 3)
        assert torch.equal(y._transpose.reshape(8, 6), y._data.reshape(6, 8).t())
    assert formats.operand(y, rowwise=False).shape == (6, 8)


def check_mxfp8(y, x, kind, *, two_dim=False, swizzled=False, rounding=reference.nearest):
    for name in ("rowwise", "columnwise"):
        columnwise = name == "columnwise"
        data, scales = reference.mxfp8(
            array(x), kind, columnwise=columnwise, two_dim=two_dim, rounding=rounding
        )
        assert_bytes(getattr(y, f"_{name}_data"), data, f"{name} data")
        stored = scales
        if swizzled:
            stored = (
                reference.swizzle(scales.T).reshape(scales.shape) if columnwise else reference.swizzle(scales)
            )
        assert_bytes(getattr(y, f"_{name}_scale_inv"), stored, f"{name} scales")
        rows, cols = data.shape
        values = np.zeros((rows, cols), np.float32)
        for row in range(rows):
            for col in range(cols):
                byte = int(scales[row // 32, col] if columnwise else scales[row, col // 32])
                value = reference.decode(int(data[row, col]), kind)
                values[row, col] = reference.multiply(value, reference.e8m0_decode(byte))
        assert_floats(formats.operand(y, rowwise=not columnwise), values, f"{name} operand")
        if not columnwise:
            assert_floats(formats.dequantize(y, torch.float32), values, "dequantize")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("two_dim", [False, True])
def test_mxfp8_matches_reference(dtype, pattern, two_dim):
    emulation.switch_arch("10.0")
    _, _, _, mxfp8 = quantizers()
    kind = "e5m2" if pattern == "heavy" else "e4m3"
    x = make(pattern, (64, 96), dtype)
    quantizer = mxfp8(te_dtype(kind))
    if two_dim and not hasattr(quantizer, "with_2d_quantization"):
        pytest.skip("this TransformerEngine has no 2-D MXFP8")
    quantizer.with_2d_quantization = two_dim
    y = quantizer(x)
    check_mxfp8(y, x, kind, two_dim=two_dim)


@pytest.mark.parametrize("shape", [(32, 32), (160, 160), (128, 128)])
def test_swizzled_and_padded_mxfp8_scales_match_reference(shape):
    emulation.switch_arch("10.0")
    _, _, _, mxfp8 = quantizers()
    quantizer = mxfp8(te_dtype("e4m3"))
    quantizer.optimize_for_gemm = True
    x = make("normal", shape, torch.bfloat16)
    y = quantizer(x)
    assert y._with_gemm_swizzled_scales
    check_mxfp8(y, x, "e4m3", swizzled=True)


def test_control_mxfp8_truncation_differs():
    emulation.switch_arch("10.0")
    _, _, _, mxfp8 = quantizers()
    x = make("normal", (64, 96), torch.float32)
    with pytest.raises(AssertionError, match="rowwise data"):
        check_mxfp8(mxfp8(te_dtype("e4m3"))(x), x, "e4m3", rounding=reference.truncated)


def check_block(y, x, kind, *, two_dim, rounding=reference.nearest, **options):
    for name in ("rowwise", "columnwise"):
        columnwise = name == "columnwise"
        data, inverse = reference.block_fp8(
            array(x), kind, columnwise=columnwise, two_dim=two_dim, rounding=rounding, **options
        )
        assert_bytes(getattr(y, f"_{name}_data"), data, f"{name} data")
        assert_bytes(getattr(y, f"_{name}_scale_inv"), inverse, f"{name} scales")
        lines, length = data.shape
        values = np.zeros((lines, length), np.float32)
        for line in range(lines):
            for place in range(length):
                scale = inverse[line // 128, place // 128] if two_dim else inverse[place // 128, line]
                value = reference.decode(int(data[line, place]), kind)
                values[line, place] = reference.multiply(value, float(scale))
        expected = values.T if columnwise else values
        assert_floats(formats.operand(y, rowwise=not columnwise), expected, f"{name} operand")
        if not columnwise:
            assert_floats(y.dequantize(dtype=torch.float32), expected, "TransformerEngine's own dequantize")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("block_dim", [1, 2])
@pytest.mark.parametrize(("arch", "power_of_two"), [("9.0", False), ("10.0", True)])
def test_block_scaling_matches_reference(arch, power_of_two, dtype, pattern, block_dim):
    """Neither dim is a multiple of the block size, so that the last of the 2 x 2 blocks are incomplete."""
    emulation.switch_arch(arch)
    _, _, block, _ = quantizers()
    kind = "e5m2" if pattern == "heavy" else "e4m3"
    quantizer = block(
        te_dtype(kind),
        rowwise=True,
        columnwise=True,
        block_scaling_dim=block_dim,
        force_pow_2_scales=power_of_two,
    )
    x = make(pattern, (131, 137), dtype)
    options = {"power_of_two": power_of_two, "value_for_inf": torch.finfo(dtype).max}
    check_block(quantizer(x), x, kind, two_dim=block_dim == 2, **options)


@pytest.mark.parametrize("block_dim", [1, 2])
def test_block_scaling_with_amax_epsilon_matches_reference(block_dim):
    emulation.switch_arch("9.0")
    _, _, block, _ = quantizers()
    quantizer = block(
        te_dtype("e4m3"), rowwise=True, columnwise=True, block_scaling_dim=block_dim, amax_epsilon=0.75
    )
    x = make("normal", (40, 256), torch.float32)
    x[:, :128] *= 0.01
    check_block(quantizer(x), x, "e4m3", two_dim=block_dim == 2, power_of_two=True, epsilon=0.75)


def test_control_block_truncation_differs():
    emulation.switch_arch("10.0")
    _, _, block, _ = quantizers()
    x = make("normal", (64, 96), torch.float32)
    y = block(te_dtype("e4m3"), rowwise=True, columnwise=True)(x)
    with pytest.raises(AssertionError, match="rowwise data"):
        check_block(y, x, "e4m3", two_dim=True, power_of_two=True, rounding=reference.truncated)
