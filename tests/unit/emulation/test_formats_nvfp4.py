"""Compare NVFP4 with the slow reference: codes, scales, amaxes, Hadamard transform, transposes."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from te_fsdp import emulation
from te_fsdp.emulation._errors import EmulationError
from te_fsdp.emulation.tex import formats
from tests.unit.emulation import reference_formats as reference
from tests.unit.emulation.formats_inputs import (
    DTYPES,
    PATTERNS,
    array,
    assert_bytes,
    assert_floats,
    make,
)

SHAPE = (48, 80)


@pytest.fixture(autouse=True)
def blackwell():
    emulation.switch_arch("10.0")


def quantizer(**options):
    from transformer_engine.pytorch.tensor.nvfp4_tensor import NVFP4Quantizer

    return NVFP4Quantizer(**options)


def check_direction(y, source, name, *, two_dim=False, swizzled=False, rounding=reference.nearest):
    """Check one direction, which quantizes ``source``, a (lines, length) array."""
    amax = reference.amax(source.ravel().tolist())
    data, scales = reference.nvfp4(source, amax, two_dim=two_dim, rounding=rounding)
    assert getattr(y, f"_amax_{name}").tolist() == [amax]
    assert_bytes(
        getattr(y, f"_{name}_scale_inv"), reference.swizzle(scales) if swizzled else scales, f"{name} scales"
    )
    assert_bytes(getattr(y, f"_{name}_data"), data, f"{name} data")
    expected = reference.nvfp4_decode(data, scales, amax)
    got = formats.operand(y, rowwise=name == "rowwise")
    assert_floats(got if name == "rowwise" else got.t(), expected, f"{name} operand")
    if name == "rowwise":
        assert_floats(formats.dequantize(y, torch.float32), expected, "dequantize")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("two_dim", [False, True])
def test_nvfp4_matches_reference(dtype, pattern, two_dim):
    x = make(pattern, SHAPE, dtype)
    y = quantizer(with_2d_quantization=two_dim)(x)
    check_direction(y, array(x), "rowwise", two_dim=two_dim)
    check_direction(y, np.ascontiguousarray(array(x).T), "columnwise", two_dim=two_dim)


def test_control_nvfp4_truncation_differs():
    x = make("normal", SHAPE, torch.float32)
    with pytest.raises(AssertionError, match="rowwise data"):
        check_direction(quantizer()(x), array(x), "rowwise", rounding=reference.truncated)


@pytest.mark.parametrize("shape", [(48, 80), (128, 128)])
@pytest.mark.parametrize("two_dim", [False, True])
def test_swizzled_nvfp4_scales_match_reference(shape, two_dim):
    """The kernel swizzles aligned 2-D tensors and a later pass all others. Both give the same bytes."""
    made = quantizer(with_2d_quantization=two_dim)
    made.optimize_for_gemm = True
    x = make("normal", shape, torch.bfloat16)
    y = made(x)
    assert y._with_gemm_swizzled_scales
    check_direction(y, array(x), "rowwise", two_dim=two_dim, swizzled=True)
    check_direction(y, np.ascontiguousarray(array(x).T), "columnwise", two_dim=two_dim, swizzled=True)


@pytest.mark.parametrize("random_signs", [False, True])
def test_hadamard_transform_is_columnwise_only(random_signs):
    made = quantizer(with_rht=True, with_post_rht_amax=True, with_random_sign_mask=random_signs)
    # Small multiples of 1/16 keep the 16-term sums exact in float32, so that their order does not matter.
    x = (make("ties", SHAPE, torch.float32) / 8).to(torch.bfloat16)
    y = made(x)
    check_direction(y, array(x), "rowwise")
    signs = [1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1] if random_signs else [1] * 16
    mixed = array(x).T.reshape(-1, 16).astype(np.float64) @ reference.hadamard16(signs)
    turned = array(torch.from_numpy(mixed).to(torch.bfloat16)).reshape(SHAPE[1], SHAPE[0])
    check_direction(y, turned, "columnwise")


def test_hadamard_transform_requires_bfloat16():
    made = quantizer(with_rht=True, with_post_rht_amax=True)
    with pytest.raises(EmulationError, match="bfloat16 input only, got torch.float32"):
        made(make("normal", SHAPE, torch.float32))


def test_stochastic_rounding_is_bounded_and_unbiased():
    x = make("normal", (64, 64), torch.bfloat16)
    torch.manual_seed(1)
    made = quantizer(stochastic_rounding=True)
    plain = quantizer()(x)
    draws = []
    for _ in range(64):
        y = made(x)
        assert torch.equal(y._rowwise_scale_inv, plain._rowwise_scale_inv)
        draws.append(formats.dequantize(y, torch.float32))
    draws = torch.stack(draws)
    # A code is off by less than its step, at most 2 of 6: |error| < 2 / 6 of the block's largest value; the
    # tenth on top covers that the E4M3 scale of a block is off by up to 1/16.
    bound = x.float().reshape(64, 4, 16).abs().amax(2).repeat_interleave(16, 1) * (2 / 6) * 1.1
    assert ((draws - x.float()).abs() <= bound).all()
    assert draws.std(0).max() > 0
    # The mean over 64 draws of 4096 values: noise 1/sqrt(64 * 4096) of about a step, far below this bound.
    assert abs((draws.mean() - x.float().mean()).item()) < 2e-3


def test_nvfp4_data_and_scale_transposes_match_columnwise():
    x = make("normal", (48, 80), torch.bfloat16)
    y = quantizer(with_2d_quantization=True)(x)
    data = formats.nvfp4_data_transpose(y._rowwise_data, out=None)
    assert torch.equal(data, y._columnwise_data)  # 2-D tiles: the transpose is the columnwise quantization
    scales = torch.full_like(y._columnwise_scale_inv, 0xEE)
    formats.nvfp4_2d_scale_transpose(y._rowwise_scale_inv, scales, 3, 5)
    assert torch.equal(scales, y._columnwise_scale_inv)
    out, scales_out = torch.empty_like(data), torch.empty_like(scales)
    formats.nvfp4_2d_multi_tensor_transpose(
        [y._rowwise_data], [out], [y._rowwise_scale_inv], [scales_out], [48], [80]
    )
    assert torch.equal(out, data)
    assert torch.equal(scales_out, scales)


@pytest.mark.parametrize("option", ["nvfp4_use_4over6", "row_scaled_nvfp4"])
def test_unsupported_nvfp4_options_raise_with_their_name(option):
    with pytest.raises(EmulationError, match=f"{option} is not emulated"):
        quantizer(**{option: True})(make("normal", SHAPE, torch.bfloat16))


def test_columnwise_only_nvfp4_tiles_reject_float32():
    made = quantizer(with_2d_quantization=True, rowwise=False)
    made(make("normal", (64, 64), torch.bfloat16))
    with pytest.raises(EmulationError, match="columnwise-only NVFP4 in 16x16 tiles"):
        made(make("normal", (64, 64), torch.float32))
