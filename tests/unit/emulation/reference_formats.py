"""Slow reference of the quantization formats, written to be obviously right: enumeration, fractions, loops.

Nothing here uses torch or the library. Values are Python floats (every float32 is one exactly), arithmetic is
exact in ``Fraction`` and rounded once where a kernel rounds, 8-bit and 4-bit results are found among all
representable values.
"""

from __future__ import annotations

import bisect
import ctypes
import functools
import itertools
import math
from fractions import Fraction

import numpy as np

FLOAT32_MAX = float(np.finfo(np.float32).max)
E4M3, E5M2, E2M1 = "e4m3", "e5m2", "e2m1"
# kind: (mantissa bits, exponent bias, largest finite code, bit of the sign)
_KINDS = {E4M3: (3, 7, 0x7E, 0x80), E5M2: (2, 15, 0x7B, 0x80), E2M1: (1, 1, 0x7, 0x8)}
NAN_CODE = 0x7F


@functools.cache
def magnitudes(kind: str) -> tuple[Fraction, ...]:
    """Return all finite non-negative values of a type; the index is the code."""
    mantissa_bits, bias, last, _ = _KINDS[kind]
    values = []
    for code in range(last + 1):
        exponent, mantissa = code >> mantissa_bits, code & ((1 << mantissa_bits) - 1)
        if exponent == 0:  # subnormal
            value = Fraction(mantissa, 1 << mantissa_bits) * Fraction(2) ** (1 - bias)
        else:
            value = (1 + Fraction(mantissa, 1 << mantissa_bits)) * Fraction(2) ** (exponent - bias)
        values.append(value)
    return tuple(values)


def largest(kind: str) -> float:
    return float(magnitudes(kind)[-1])


@functools.cache
def decode(code: int, kind: str) -> float:
    sign_bit = _KINDS[kind][3]
    sign = -1.0 if code & sign_bit else 1.0
    code &= sign_bit - 1
    if code <= _KINDS[kind][2]:
        return sign * float(magnitudes(kind)[code])
    if kind == E5M2 and code == 0x7C:
        return sign * math.inf
    return math.nan


def nearest_by_search(x: float, kind: str) -> int:
    """Return the code of the magnitude nearest to ``|x|`` among all of them; of two equally near, the even code."""
    exact = Fraction(abs(x))
    return min(range(len(magnitudes(kind))), key=lambda code: (abs(magnitudes(kind)[code] - exact), code % 2))


def truncated(x: float, kind: str) -> int:
    """Return the code of the largest magnitude not above ``|x|``: the wrong rounding, for controls."""
    return bisect.bisect_right(magnitudes(kind), Fraction(abs(x))) - 1


def ties_away(x: float, kind: str) -> int:
    """Return nearest with ties away from zero: a second wrong rounding, for controls."""
    exact = Fraction(abs(x))
    return min(range(len(magnitudes(kind))), key=lambda code: (abs(magnitudes(kind)[code] - exact), -code))


@functools.cache
def _midpoints(kind: str) -> tuple[float, ...]:
    values = magnitudes(kind)
    return tuple(float((low + high) / 2) for low, high in itertools.pairwise(values))


def nearest(x: float, kind: str) -> int:
    """Return the same as :func:`nearest_by_search` by comparing with the midpoints, which floats hold exactly."""
    points = _midpoints(kind)
    low = bisect.bisect_left(points, abs(x))
    return low + 1 if low < len(points) and points[low] == abs(x) and low % 2 == 1 else low


def cast(x: float, kind: str, rounding=nearest) -> int:
    """Return saturating conversion as in hardware: NaN to NaN (+6 in E2M1), infinities to the largest value."""
    sign_bit = _KINDS[kind][3]
    if math.isnan(x):
        return _KINDS[kind][2] if kind == E2M1 else NAN_CODE
    sign = sign_bit if math.copysign(1.0, x) < 0 else 0
    if math.isinf(x):
        return sign | _KINDS[kind][2]
    return sign | rounding(x, kind)


def float32(exact: Fraction) -> float:
    """Return the float32 nearest to an exact value (ties to even, subnormals, overflow to infinity)."""
    if exact == 0:
        return 0.0
    size = abs(exact)
    exponent = size.numerator.bit_length() - size.denominator.bit_length()
    if Fraction(2) ** exponent > size:
        exponent -= 1
    step = Fraction(2) ** (max(exponent, -126) - 23)
    rounded = round(exact / step) * step  # round() of a Fraction goes to even on a tie
    return math.copysign(math.inf, rounded) if abs(rounded) > Fraction(FLOAT32_MAX) else float(rounded)


def multiply(a: float, b: float) -> float:
    """Return float32 product: exact in 53 bits, because each factor has 24, then rounded once."""
    return ctypes.c_float(a * b).value


@functools.cache
def divide(a: float, b: float) -> float:
    """Return float32 quotient of positive numbers; a zero divisor gives infinity."""
    if b == 0:
        return math.inf
    if math.isinf(b):
        return 0.0
    return float32(Fraction(a) / Fraction(b))


def amax(values) -> float:
    """Return the largest magnitude. NaN is ignored (CUDA's fmaxf returns the other argument)."""
    return max((abs(v) for v in values if not math.isnan(v)), default=0.0)


def scale_of(
    block_amax: float, limit: float, *, epsilon=0.0, power_of_two=False, value_for_inf=FLOAT32_MAX
) -> float:
    block_amax = max(block_amax, float(np.float32(epsilon)))
    if block_amax == 0 or math.isinf(block_amax):
        return 1.0
    scale = divide(limit, block_amax)
    if math.isinf(scale):
        scale = value_for_inf
    if power_of_two:
        power = 1.0
        while power > scale:
            power /= 2
        while power * 2 <= scale:
            power *= 2
        scale = power
    return scale


@functools.cache
def e8m0_round_up(value: float) -> int:
    """Return the smallest byte ``e`` in 0..254 with ``2 ** (e - 127) >= value``; 255 for NaN."""
    if math.isnan(value):
        return 255
    for byte in range(254):
        if 2.0 ** (byte - 127) >= value:
            return byte
    return 254


def e8m0_decode(byte: int) -> float:
    return math.nan if byte == 255 else 2.0 ** (byte - 127)


def swizzled_index(row: int, col: int, cols: int) -> int:
    """Return the index of a scale in GEMM order: tiles of 128 x 4, each by row modulo 32, row quarter, column."""
    tile = (row // 128) * (cols // 4) + col // 4
    return tile * 512 + (row % 32) * 16 + (row % 128 // 32) * 4 + col % 4


def swizzle(scales: np.ndarray) -> np.ndarray:
    rows, cols = scales.shape
    out = np.zeros(rows * cols, scales.dtype)
    for row in range(rows):
        for col in range(cols):
            out[swizzled_index(row, col, cols)] = scales[row, col]
    return out.reshape(rows, cols)


def up(value: int, multiple: int) -> int:
    while value % multiple:
        value += 1
    return value


def per_tensor(x: np.ndarray, kind: str, scale: float, rounding=nearest) -> tuple[np.ndarray, float]:
    """Return bytes and inverse scale of an unsharded tensor with a given scale."""
    data = np.array([cast(multiply(float(v), scale), kind, rounding) for v in x.ravel()], np.uint8)
    return data.reshape(x.shape), divide(1.0, scale)


def mxfp8(x: np.ndarray, kind: str, *, columnwise: bool, two_dim=False, rounding=nearest):
    """Return bytes (M, K) and padded E8M0 scales of one direction."""
    rows, cols = x.shape
    height, width = (32, 32) if two_dim else ((32, 1) if columnwise else (1, 32))
    data = np.zeros((rows, cols), np.uint8)
    scales = np.zeros(
        (up(rows // 32, 4), up(cols, 128)) if columnwise else (up(rows, 128), up(cols // 32, 4)), np.uint8
    )
    reciprocal_limit = float32(Fraction(1) / Fraction(largest(kind)))
    for top in range(0, rows, height):
        for left in range(0, cols, width):
            block = x[top : top + height, left : left + width]
            byte = e8m0_round_up(multiply(amax(block.ravel().tolist()), reciprocal_limit))
            factor = math.nan if byte == 255 else 2.0 ** (127 - byte)
            for row in range(top, top + height):
                for col in range(left, left + width):
                    data[row, col] = cast(multiply(float(x[row, col]), factor), kind, rounding)
                    scales[(row // 32, col) if columnwise else (row, col // 32)] = byte
    return data, scales


def block_fp8(x: np.ndarray, kind: str, *, columnwise: bool, two_dim: bool, rounding=nearest, **options):
    """Return bytes (rowwise (M, K), columnwise transposed (K, M)) and padded inverse scales of one direction."""
    rows, cols = x.shape
    height, width = (128, 128) if two_dim else ((128, 1) if columnwise else (1, 128))
    data = np.zeros((rows, cols), np.uint8)
    across, down = up(cols, 128) // 128, up(rows, 128) // 128
    if two_dim:
        shape = (across, up(down, 4)) if columnwise else (down, up(across, 4))
    else:
        shape = (down, up(cols, 4)) if columnwise else (across, up(rows, 4))
    inverse = np.zeros(shape, np.float32)
    for top in range(0, rows, height):
        for left in range(0, cols, width):
            block = x[top : top + height, left : left + width]
            scale = scale_of(amax(block.ravel().tolist()), largest(kind), **options)
            if two_dim:
                place = (left // 128, top // 128) if columnwise else (top // 128, left // 128)
            else:
                place = (top // 128, left) if columnwise else (left // 128, top)
            inverse[place] = divide(1.0, scale)
            for row in range(top, min(top + height, rows)):
                for col in range(left, min(left + width, cols)):
                    data[row, col] = cast(multiply(float(x[row, col]), scale), kind, rounding)
    return (data.T if columnwise else data), inverse


def nvfp4(x: np.ndarray, tensor_amax: float, *, two_dim=False, rounding=nearest):
    """Return packed codes and padded E4M3 scale bytes of one direction; columnwise is the transposed input."""
    rows, cols = x.shape
    encode = min(divide(448.0 * 6.0, tensor_amax), FLOAT32_MAX)
    if tensor_amax == 0 or encode == 0:
        encode = 1.0
    decode_global = divide(1.0, encode)
    sixth = float32(Fraction(1, 6))
    codes = np.zeros((rows, cols), np.uint8)
    scales = np.zeros((up(rows, 128), up(cols // 16, 4)), np.uint8)
    height = 16 if two_dim else 1
    for top in range(0, rows, height):
        for left in range(0, cols, 16):
            block = x[top : top + height, left : left + 16]
            scale = min(multiply(amax(block.ravel().tolist()), multiply(encode, sixth)), FLOAT32_MAX)
            byte = cast(scale, E4M3)
            factor = min(divide(1.0, multiply(decode(byte, E4M3), decode_global)), FLOAT32_MAX)
            for row in range(top, top + height):
                scales[row, left // 16] = byte
                for col in range(left, left + 16):
                    codes[row, col] = cast(multiply(float(x[row, col]), factor), E2M1, rounding)
    return codes[:, 0::2] | (codes[:, 1::2] << 4), scales


def nvfp4_decode(data: np.ndarray, scales: np.ndarray, tensor_amax: float) -> np.ndarray:
    """Return float32 values of packed codes: value * (scale * amax * (1 / 2688)), each product rounded."""
    rows, cols = data.shape[0], data.shape[1] * 2
    out = np.zeros((rows, cols), np.float32)
    factor = float32(Fraction(1, 6 * 448))
    for row in range(rows):
        for col in range(cols):
            code = int(data[row, col // 2]) >> (4 * (col % 2)) & 0xF
            scale = multiply(multiply(decode(int(scales[row, col // 16]), E4M3), tensor_amax), factor)
            out[row, col] = multiply(decode(code, E2M1), scale)
    return out


def hadamard16(signs: list[int]) -> np.ndarray:
    """Return diag(signs) times the 16 x 16 Hadamard matrix of Sylvester's construction, divided by 4."""
    matrix = np.ones((1, 1))
    while len(matrix) < 16:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    return np.diag(signs) @ matrix / 4.0
