"""How far two runs of the same training may differ that quantize different pieces: derived per format.

One process and a sharded run quantize the same numbers in other groups: a rank's tokens, its rows of a weight, its part
of a gradient. Where the groups differ, so do the scales, and where the scales differ the rounding is independent. With
u the root mean square of the relative rounding error of one operand,

    one GEMM, both operands quantized                       sqrt(2) u     (gradients in a different format: hypot(u, v))
    a chain of n GEMMs                                      sqrt(n) times that
    the difference of two runs, independent at worst        sqrt(2) times that

A gradient has behind it the chain forward, the chain back, and its own GEMM. Norms, softmax and residual branches are
taken to pass relative errors on unchanged; residuals shrink them, so that a TransformerLayer stays below its bound.

The error of rounding to m bits of mantissa is uniform within one unit in the last place, which is 2^-m of a number at
the lower end of a binade and half of that at its upper end: u <= 2^-m / sqrt(12). Stochastic rounding doubles the
variance. The bound is on the norm of a tensor's difference relative to its own norm, which sums over thousands of
elements and so has next to no spread of its own. A row of 64 elements or more may be off by ROW times as much, a single
element by PEAK standard deviations, each relative to the larger of its own size and that of the unsharded tensor.
"""

from __future__ import annotations

import math

PEAK, ROW = 6, 2
#: Mantissa bits of what is quantized forward (input, weight) and backward (gradient).
_E4M3, _E5M2, _E2M1, _BF16, _FP32 = 3, 2, 1, 7, 23
MANTISSA = {
    "delayed": (_E4M3, _E5M2),
    "current": (_E4M3, _E5M2),
    "block": (_E4M3, _E4M3),
    "mxfp8": (_E4M3, _E4M3),
    "nvfp4": (_E2M1, _E2M1),
    "hybrid": (_E4M3, _BF16),
}
#: GEMMs from input to output; attention's two products of activations stay in high precision.
GEMMS = {
    "linear": 2,
    "layernorm_linear": 2,
    "mlp_gelu": 2,
    "mlp_swiglu": 2,
    "attention": 2,
    "transformer": 4,
    "grouped": 2,
}
#: fp32: ten chained sums of up to 1024 products added in a different order, sqrt(1024) * 2^-24 = 2e-6 each.
FP32 = 1e-5


def rounding(bits: int) -> float:
    """Return the largest root mean square of the relative error of rounding to this number of mantissa bits."""
    return 2.0**-bits / math.sqrt(12)


def bounds(recipe: str, weights: str, module: str, gemms: int = 0) -> tuple[float, float]:
    """Return relative differences allowed of outputs and of gradients; `gemms` of a chain of several modules."""
    if weights == "fp32":
        return FP32, FP32
    gemms = gemms or GEMMS[module]
    # Every operation rounds to bf16, in forward and in backward: GEMM, bias or activation, residual or norm.
    base = 3 * 2 * rounding(_BF16) ** 2
    if recipe == "none":
        return math.sqrt(gemms * base), math.sqrt(3 * gemms * base)
    forward, backward = (rounding(bits) for bits in MANTISSA[recipe])
    if recipe == "nvfp4":
        backward *= math.sqrt(2)  # gradients are rounded stochastically
    output = 2 * gemms * 2 * forward**2
    gradient = output + 2 * (gemms + 1) * (forward**2 + backward**2)
    return math.sqrt(output + gemms * base), math.sqrt(gradient + 3 * gemms * base)


def loss_bound(output: float, gradient: float, first: float, loss: float, elements: int) -> float:
    """Return the absolute difference allowed of a loss.

    Forward: the loss is a mean of squared errors of the size of the outputs, which move by independent parts `output`
    of themselves: 6 standard deviations of 2 * output / sqrt(elements). Updates: a share of at most `gradient` of the
    progress since the first loss goes elsewhere.
    """
    return 6 * 2 * output / math.sqrt(elements) * loss + gradient * abs(first - loss)
