"""Test which fp32 values round to the values of a low-precision tensor, for every format."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from te_fsdp.features.written_weights import rounded_values

PLAIN = {"bf16": torch.bfloat16, "fp16": torch.float16}
RECIPES = ("current", "delayed", "block", "mxfp8", "nvfp4")
BUFFERS = ("_data", "_rowwise_data")


def _quantize(te: Any, recipe: str, value: torch.Tensor) -> Any:
    from transformer_engine.common import recipe as recipes

    names = {
        "current": "Float8CurrentScaling",
        "delayed": "DelayedScaling",
        "block": "Float8BlockScaling",
        "mxfp8": "MXFP8BlockScaling",
        "nvfp4": "NVFP4BlockScaling",
    }
    with te.quantized_model_init(enabled=True, recipe=getattr(recipes, names[recipe])()):
        weight = te.Linear(256, 256, bias=False, device="cpu").weight
    with torch.no_grad():
        weight.copy_(value)
    return weight.detach()


def _values() -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    # Of many magnitudes: normal and subnormal numbers, and powers of two.
    scale = torch.exp2(torch.randint(-12, 3, (256, 256), generator=generator).float())
    value = torch.randn(256, 256, generator=generator) * scale
    return torch.where(torch.rand(256, 256, generator=generator) < 0.1, scale, value)


@pytest.mark.parametrize("name", [*PLAIN, *RECIPES])
@pytest.mark.parametrize("change", ["flip", "next"])
def test_main_weights_that_round_to_the_weight_are_kept(te, name, change):
    """Main weights are kept bit for bit if they round to the weight, and replaced if the weight has changed.

    The next number reaches powers of two from below, where numbers are denser.
    """
    if (name, change) == ("nvfp4", "next"):
        pytest.skip("a byte has two numbers")
    exact = _values()
    local = exact.to(PLAIN[name]) if name in PLAIN else _quantize(te, name, exact)
    rounded = rounded_values(local)
    assert torch.equal(rounded.keep(exact), exact)
    if name in PLAIN:
        numbers = local.view(torch.int16)
    else:
        numbers = next(value for b in BUFFERS if (value := getattr(local, b, None)) is not None)
    if change == "flip":
        numbers.bitwise_xor_(0x11 if name == "nvfp4" else 1)
    else:
        numbers.add_(1)
    neighbor = rounded_values(local)
    # Flipping a bit of 448 gives NaN. Exact values in the middle round to both.
    distances = (exact - rounded.value).abs() - (exact - neighbor.value).abs()
    compared = neighbor.value.isfinite() & (distances.abs() > 1e-4 * (neighbor.value - rounded.value).abs())
    assert compared.float().mean() > 0.99
    assert torch.equal(neighbor.keep(exact)[compared], neighbor.value[compared])


def test_saturated_main_weights_are_kept(te):
    """Delayed scaling starts with scale 1, where large values saturate."""
    exact = torch.full((256, 256), 1000.0)
    local = _quantize(te, "delayed", exact)
    assert torch.equal(local.dequantize(dtype=torch.float32), torch.full_like(exact, 448.0))
    assert torch.equal(rounded_values(local).keep(exact), exact)
    assert torch.equal(rounded_values(local).keep(-exact), torch.full_like(exact, 448.0))


@pytest.mark.parametrize(
    ("recipe", "factor"), [("current", 0.75), ("block", 0.75), ("mxfp8", 0.75), ("nvfp4", 0.5)]
)
def test_main_weights_above_a_smaller_amax_are_replaced(te, recipe, factor):
    """Bug class: with a smaller amax, the largest old values would saturate and look unchanged.

    They do not round to the written values. Keeping them dropped a lookahead or an average of the largest weights.
    """
    old = torch.randn(256, 256, generator=torch.Generator().manual_seed(1))
    rounded = rounded_values(_quantize(te, recipe, factor * old))
    large = old.abs() >= 3.0
    assert torch.equal(rounded.keep(old)[large], rounded.value[large])


def test_main_weights_of_small_nvfp4_blocks_are_kept(te):
    """NVFP4's 8-bit block scale may be subnormal, with a rounding error above FP4's spacing."""
    exact = torch.randn(256, 256, generator=torch.Generator().manual_seed(2))
    exact[:128] *= torch.exp2(-torch.arange(128.0) / 6)[:, None]
    assert torch.equal(rounded_values(_quantize(te, "nvfp4", exact)).keep(exact), exact)


def test_main_weights_above_a_smaller_block_amax_are_replaced(te):
    """As above, for NVFP4 blocks of 2^-10 of the largest one, whose scales are normal float8 numbers."""
    old = torch.full((256, 256), 3.0)
    old[:16] *= 2.0**-10
    rounded = rounded_values(_quantize(te, "nvfp4", 0.5 * old))
    assert torch.equal(rounded.keep(old), rounded.value)
