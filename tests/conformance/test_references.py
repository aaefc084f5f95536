"""Compare formats with independent Python implementations.

NVFP4 and current scaling: TransformerEngine's own reference quantizers, which its wheel brings
(`pytorch/custom_recipes/reference_*.py`). MXFP8 has none there; its block scales are checked against ONNX's conversion
to E8M0 and its values against the float8 types of `ml_dtypes`. All bit for bit, on the architecture that has the
format; products to the bound that summation in fp32 allows.
"""

from __future__ import annotations

import importlib
import importlib.util

import numpy as np
import pytest
import torch

from te_fsdp import emulation
from tests.conformance.case import Bound
from tests.conformance.check import difference
from tests.conformance.inputs import Env, pattern

ARCH = "10.0"
PATTERNS = ("normal", "heavy", "zeros", "ties", "tiny", "huge")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


#: Modules of `transformer_engine.pytorch.custom_recipes`, with their names before 2.19.
OLD_NAMES = {
    "reference_nvfp4": "quantization_ref_nvfp4",
    "reference_current_scaling": "quantization_ref_current_scaling",
    "reference_utils": "utils",
}


def _reference(name: str):
    package = "transformer_engine.pytorch.custom_recipes"
    result = importlib.util.find_spec(f"{package}.{name}")
    return importlib.import_module(f"{package}.{name if result else OLD_NAMES[name]}")


def _input(name: str, shape: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
    # The reference gives -0.0 the code of +0.0, kernels keep the sign: no negative zeros here.
    return torch.from_numpy(pattern(name, 700, shape)).to(dtype) + 0.0


def _same(got: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    line = difference(got.contiguous(), expected.contiguous(), Bound())
    assert line is None, f"{what}: {line}"


def _nvfp4_reference(tile: tuple[int, int], **options):
    reference, utils = _reference("reference_nvfp4"), _reference("reference_utils")
    return reference.NVFP4QuantizerRef(utils.Fp4Formats.E2M1, quant_tile_shape=tile, **options)


def _compare_nvfp4(got, expected, shape: tuple[int, int]) -> None:
    rows, cols = shape
    _same(got._rowwise_data, expected.data, "rowwise data")
    _same(got._columnwise_data, expected.data_t, "columnwise data")
    scale = expected.scale.view(torch.uint8)
    _same(got._rowwise_scale_inv[:rows, : cols // 16], scale, "rowwise scales")
    scale = expected.scale_t.view(torch.uint8)
    _same(got._columnwise_scale_inv[:cols, : rows // 16], scale, "columnwise scales")
    _same(got._amax_rowwise, expected.global_amax_row, "rowwise amax")
    _same(got._amax_columnwise, expected.global_amax_col, "columnwise amax")


@pytest.mark.parametrize("two_dim", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_nvfp4_quantization_equals_te_reference(env, dtype, two_dim):
    from transformer_engine.pytorch.tensor.nvfp4_tensor import NVFP4Quantizer

    reference = _nvfp4_reference((16, 16) if two_dim else (1, 16))
    for shape in ((48, 80), (128, 64), (16, 272)):
        for name in PATTERNS:
            x = _input(name, shape, DTYPES[dtype])
            got = NVFP4Quantizer(with_2d_quantization=two_dim)(x)
            _compare_nvfp4(got, reference.quantize(x), shape)


@pytest.mark.parametrize("signs", [False, True])
def test_nvfp4_with_hadamard_transform_equals_te_reference(env, signs):
    """On inputs whose 16-term sums are exact, so that the order of summation does not matter."""
    from transformer_engine.pytorch.tensor.nvfp4_tensor import NVFP4Quantizer

    reference = _nvfp4_reference((1, 16), with_rht=True, with_random_sign_mask=signs)
    for shape in ((48, 80), (128, 64)):
        x = (_input("ties", shape, torch.float32) / 8).to(torch.bfloat16)
        got = NVFP4Quantizer(with_rht=True, with_post_rht_amax=True, with_random_sign_mask=signs)(x)
        _compare_nvfp4(got, reference.quantize(x), shape)


def test_control_different_tile_size_is_detected(env):
    from transformer_engine.pytorch.tensor.nvfp4_tensor import NVFP4Quantizer

    x = _input("heavy", (48, 80), torch.bfloat16)
    with pytest.raises(AssertionError, match="rowwise data"):
        _compare_nvfp4(
            NVFP4Quantizer(with_2d_quantization=True)(x), _nvfp4_reference((1, 16)).quantize(x), (48, 80)
        )


def test_nvfp4_gemm_equals_te_reference(env):
    from transformer_engine.pytorch.cpp_extensions import general_gemm
    from transformer_engine.pytorch.tensor.nvfp4_tensor import NVFP4Quantizer

    weight, x = _input("normal", (48, 256), torch.bfloat16), _input("ties", (32, 256), torch.bfloat16)
    reference = _nvfp4_reference((1, 16))
    w, a = reference.quantize(weight), reference.quantize(x)
    expected = reference.qgemm(
        a.data, w.data, None, torch.float32, a.scale, w.scale, qresult_x=a, qresult_w=w
    )
    quantizers = [NVFP4Quantizer(), NVFP4Quantizer()]
    for quantizer in quantizers:
        quantizer.optimize_for_gemm = True
    got = general_gemm(quantizers[0](weight), quantizers[1](x), torch.float32, layout="TN")[0]
    # 256 products: each addition in fp32 errs by 2^-24 of a partial sum; factors are applied in a different order.
    bound = Bound(relative=2**-20, absolute=256 * 2**-24)
    assert difference(got, expected, bound) is None
    assert difference(got * 1.001, expected, bound) is not None


@pytest.mark.parametrize("fp8", ["e4m3", "e5m2"])
@pytest.mark.parametrize("pow2", [False, True])
def test_current_scaling_equals_te_reference(env, fp8, pow2):
    from tests.conformance.cases.quantize import current

    reference = _reference("reference_current_scaling")
    kind = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}[fp8]
    emulation.switch_arch("9.0")
    try:
        for name in ("normal", "heavy", "zeros", "ties"):
            for dtype in DTYPES.values():
                x = _input(name, (48, 80), dtype)
                made = current(env, fp8, force_pow_2_scales=pow2)
                got = made(x)
                expected = reference.CurrentScalingQuantizerRef(kind, pow_2_scales=pow2).quantize(x)
                _same(got._data, expected.data.view(torch.uint8), "data")
                _same(got._transpose, expected.data_t.view(torch.uint8), "transpose")
                _same(got._scale_inv.reshape(-1), expected.scale.reshape(-1), "inverse scale")
    finally:
        emulation.switch_arch("10.0")


def _mxfp8(x: np.ndarray, fp8: str, round_mode: str = "up") -> tuple[np.ndarray, np.ndarray]:
    """Return bytes and scale bytes of rows in blocks of 32, from ONNX's E8M0 and the float8 types of ml_dtypes."""
    ml_dtypes, helper = pytest.importorskip("ml_dtypes"), pytest.importorskip("onnx.numpy_helper")
    kind = {"e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2}[fp8]
    largest = np.float32(ml_dtypes.finfo(kind).max)
    blocks = x.reshape(x.shape[0], -1, 32)
    amax = np.abs(blocks).max(-1)
    scales = helper.to_float8e8m0(amax * (np.float32(1.0) / largest), round_mode=round_mode)
    exponents = scales.view(np.uint8).astype(np.int32) - 127
    scaled = np.ldexp(blocks.astype(np.float64), -exponents[..., None])  # exact: a power of two
    data = np.clip(scaled, -float(largest), float(largest)).astype(kind)
    return data.view(np.uint8).reshape(x.shape), scales.view(np.uint8)


def _check_mxfp8(x: torch.Tensor, fp8: str, env: Env, round_mode: str = "up") -> None:
    from transformer_engine.pytorch.tensor.mxfp8_tensor import MXFP8Quantizer

    got = MXFP8Quantizer(env.fp8(fp8))(x)
    rows, cols = x.shape
    data, scales = _mxfp8(x.float().numpy(), fp8, round_mode)
    _same(got._rowwise_scale_inv[:rows, : cols // 32], torch.from_numpy(scales), "rowwise scales")
    _same(got._rowwise_data, torch.from_numpy(data), "rowwise data")
    data, scales = _mxfp8(np.ascontiguousarray(x.float().numpy().T), fp8, round_mode)
    _same(got._columnwise_scale_inv[: rows // 32, :cols], torch.from_numpy(scales).t(), "columnwise scales")
    _same(got._columnwise_data, torch.from_numpy(data).t(), "columnwise data")


@pytest.mark.parametrize("fp8", ["e4m3", "e5m2"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_mxfp8_equals_onnx_e8m0_and_ml_dtypes_float8(env, dtype, fp8):
    for shape in ((64, 96), (32, 32), (128, 160)):
        for name in ("normal", "heavy", "zeros", "ties", "huge"):
            _check_mxfp8(_input(name, shape, DTYPES[dtype]), fp8, env)


def test_control_scales_rounded_down_are_detected(env):
    with pytest.raises(AssertionError, match="rowwise scales"):
        _check_mxfp8(_input("normal", (64, 96), torch.bfloat16), "e4m3", env, round_mode="down")
