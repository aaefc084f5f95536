"""Compare each step of a quantization with enumeration or exact fractions."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from te_fsdp.emulation._errors import EmulationError
from te_fsdp.emulation.tex.formats import cast, nvfp4
from tests.unit.emulation import reference_formats as reference
from tests.unit.emulation.formats_inputs import KINDS

FINITE = st.floats(width=32, allow_nan=False, allow_infinity=False)
POSITIVE = st.floats(width=32, allow_nan=False, allow_infinity=False, min_value=0.0)


def every_bfloat16() -> torch.Tensor:
    return torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).float()


def around_midpoints(kind: str) -> torch.Tensor:
    """Return every representable value and every midpoint of neighbours, the float32s next to each; both signs."""
    values = [float(v) for v in reference.magnitudes(kind)]
    points = values + [(a + b) / 2 for a, b in itertools.pairwise(values)] + [reference.largest(kind) * 1.5]
    exact = torch.tensor(points, dtype=torch.float32)
    assert exact.double().tolist() == points  # float32 holds them all
    inf = torch.tensor(math.inf)
    near = torch.cat((exact, torch.nextafter(exact, inf), torch.nextafter(exact, -inf)))
    return torch.cat((near, -near))


@pytest.mark.parametrize("kind", ["e4m3", "e5m2", "e2m1"])
def test_both_reference_roundings_agree(kind):
    for x in around_midpoints(kind).tolist():
        assert reference.nearest(x, kind) == reference.nearest_by_search(x, kind), x


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("source", [every_bfloat16, around_midpoints], ids=["every_bfloat16", "midpoints"])
def test_cast_fp8_matches_reference(kind, source):
    x = source(kind) if source is around_midpoints else source()
    got = cast.cast_fp8(x, KINDS[kind]).tolist()
    assert got == [reference.cast(v, kind) for v in x.tolist()]


@pytest.mark.parametrize("source", [every_bfloat16, around_midpoints], ids=["every_bfloat16", "midpoints"])
def test_round_to_fp4_matches_reference(source):
    x = source("e2m1") if source is around_midpoints else source()
    assert nvfp4.round_to_nearest(x).tolist() == [reference.cast(v, "e2m1") for v in x.tolist()]


@pytest.mark.parametrize("wrong", [reference.truncated, reference.ties_away])
@pytest.mark.parametrize("kind", ["e4m3", "e5m2", "e2m1"])
def test_control_other_roundings_differ(kind, wrong):
    """The inputs distinguish round-to-nearest-even from truncation and from rounding ties away from zero."""
    x = around_midpoints(kind).tolist()
    assert [reference.cast(v, kind, wrong) for v in x] != [reference.cast(v, kind) for v in x]


@settings(max_examples=300, deadline=None)
@given(st.lists(st.floats(width=32), min_size=1, max_size=20))
def test_casts_of_any_float32_match_reference(values):
    x = torch.tensor(values, dtype=torch.float32)
    for kind, dtype in KINDS.items():
        assert cast.cast_fp8(x, dtype).tolist() == [reference.cast(v, kind) for v in x.tolist()]
    assert nvfp4.round_to_nearest(x).tolist() == [reference.cast(v, "e2m1") for v in x.tolist()]


@pytest.mark.parametrize("kind", KINDS)
def test_decode_fp8_matches_reference_for_every_byte(kind):
    got = cast.decode_fp8(torch.arange(256, dtype=torch.uint8), KINDS[kind]).tolist()
    expected = [reference.decode(code, kind) for code in range(256)]
    assert np.array_equal(np.array(got), np.array(expected), equal_nan=True)
    assert math.copysign(1, got[0x80]) == -1.0


def test_fp4_pack_and_unpack_are_inverse():
    codes = torch.arange(16, dtype=torch.uint8).repeat(3, 2)
    packed = nvfp4.pack(codes)
    assert packed[0, :2].tolist() == [0x10, 0x32]  # the even index in the low half
    assert torch.equal(nvfp4.unpack(packed), codes)


def e8m0_inputs() -> torch.Tensor:
    """Return every float32 exponent with mantissas that are zero, smallest, around half, and largest."""
    exponents = torch.arange(256, dtype=torch.int32) << 23
    mantissas = torch.tensor([0, 1, 0x3FFFFF, 0x400000, 0x400001, 0x7FFFFF], dtype=torch.int32)
    return (exponents[:, None] | mantissas).flatten().view(torch.float32)


def test_e8m0_rounds_up():
    x = e8m0_inputs()
    assert cast.e8m0_from_float(x).tolist() == [reference.e8m0_round_up(v) for v in x.tolist()]


def test_control_e8m0_truncation_differs():
    x = e8m0_inputs()
    truncated = (x.view(torch.int32) >> 23).tolist()
    assert cast.e8m0_from_float(x).tolist() != truncated


def test_e8m0_values_and_reciprocals_match_reference():
    bytes_ = torch.arange(256, dtype=torch.uint8)
    expected = np.array([reference.e8m0_decode(byte) for byte in range(256)])
    assert np.array_equal(cast.e8m0_value(bytes_).double().numpy(), expected, equal_nan=True)
    assert np.array_equal(cast.e8m0_reciprocal(bytes_).double().numpy(), 1.0 / expected, equal_nan=True)


@settings(max_examples=300, deadline=None)
@given(
    POSITIVE,
    st.sampled_from(["e4m3", "e5m2"]),
    st.booleans(),
    st.sampled_from([0.0, 1e-12, 0.25]),
    st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_scale_from_amax_matches_reference(value, kind, power_of_two, epsilon, dtype):
    largest_input = torch.finfo(dtype).max
    options = {"epsilon": epsilon, "power_of_two": power_of_two, "value_for_inf": largest_input}
    got = cast.scale_from_amax(torch.tensor([value]), cast.fp8_max(KINDS[kind]), **options)
    assert got.item() == reference.scale_of(value, reference.largest(kind), **options)


def test_scale_from_amax_handles_zero_inf_nan_and_subnormals():
    amax = torch.tensor([0.0, math.inf, math.nan, 1e-45, cast.FLOAT32_MAX, 448.0])
    assert cast.scale_from_amax(amax, 448.0).tolist() == [
        1.0,
        1.0,
        1.0,
        cast.FLOAT32_MAX,
        float(np.float32(448.0) / np.float32(cast.FLOAT32_MAX)),
        1.0,
    ]


@settings(max_examples=200, deadline=None)
@given(FINITE, FINITE)
def test_reference_arithmetic_is_ieee_float32(a, b):
    """The reference rounds exact products and quotients once, which equals float32 arithmetic."""
    with np.errstate(all="ignore"):
        product = np.float32(a) * np.float32(b)
        assert np.float32(reference.multiply(a, b)).tobytes() == product.tobytes()
        assert reference.multiply(a, b) == reference.float32(Fraction(a) * Fraction(b))
        if a > 0 and b > 0:
            assert np.float32(reference.divide(a, b)) == np.float32(a) / np.float32(b)


@pytest.mark.parametrize("shape", [(128, 4), (256, 4), (128, 12), (384, 8)])
def test_swizzle_matches_reference_and_is_invertible(shape):
    scales = torch.arange(math.prod(shape), dtype=torch.int32).reshape(shape)
    got = cast.swizzle_scales(scales)
    assert np.array_equal(got.numpy(), reference.swizzle(scales.numpy()))
    assert torch.equal(cast.unswizzle_scales(got), scales)
    assert not torch.equal(got, scales)


def test_amax_ignores_nan_and_empty_tensors():
    assert cast.amax_of(torch.tensor([1.0, math.nan, -3.0])).tolist() == [3.0]
    assert cast.amax_of(torch.tensor([math.nan])).tolist() == [0.0]
    assert cast.amax_of(torch.empty(0)).tolist() == [0.0]
    assert cast.amax_of(torch.tensor([1.0, -math.inf])).tolist() == [math.inf]


def test_stochastic_rounding_hits_both_neighbours_in_proportion():
    torch.manual_seed(0)
    values = torch.tensor([0.125, 1.1, 2.25, 3.0, 4.5, 5.75, 7.0, -2.25])
    grid = torch.tensor([reference.decode(code, "e2m1") for code in range(16)])
    draws = torch.stack([grid[nvfp4.round_stochastically(values).long()] for _ in range(4096)])
    low = torch.tensor([0.0, 1.0, 2.0, 3.0, 4.0, 4.0, 6.0, -3.0])
    high = torch.tensor([0.5, 1.5, 3.0, 3.0, 6.0, 6.0, 6.0, -2.0])
    assert ((draws == low) | (draws == high)).all()
    # 5 standard errors of a mean of 4096 draws (at most 1 / 64), plus 8 random bits' 1/256 times the step 2.
    assert (draws.mean(0) - values.clamp(-6, 6)).abs().max() < 5 / 64 + 2 / 256


def test_stochastic_rounding_keeps_exact_values_and_nan():
    values = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    both = torch.cat((values, -values, torch.tensor([math.nan, math.inf, -math.inf])))
    assert nvfp4.round_stochastically(both).tolist() == [*range(16), 7, 7, 15]


def test_cast_rejects_unknown_8bit_dtype():
    with pytest.raises(EmulationError, match="expected an FP8 dtype"):
        cast.cast_fp8(torch.zeros(1), 4)
