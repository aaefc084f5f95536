"""Check that dequantized rectangles of weights equal TE's own dequantize bit for bit."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings, strategies as st

from te_fsdp.errors import CheckpointError, PlacementError
from te_fsdp.quantized.components import (
    components_of,
    covering,
    dequantize_box,
    describe_format,
    needed_components,
)

ROWS, COLUMNS = 256, 384
RECIPES = {
    "current": "Float8CurrentScaling",
    "block": "Float8BlockScaling",
    "mxfp8": "MXFP8BlockScaling",
    "nvfp4": "NVFP4BlockScaling",
}


@pytest.fixture(scope="module")
def weights(te) -> dict[str, torch.Tensor]:
    """Return a quantized weight per recipe, with magnitudes that differ from block to block."""
    from transformer_engine.common import recipe as recipes

    results = {}
    for name, kind in RECIPES.items():
        torch.manual_seed(0)
        with te.quantized_model_init(enabled=True, recipe=getattr(recipes, kind)()):
            weight = te.Linear(COLUMNS, ROWS, params_dtype=torch.bfloat16, device="cpu").weight
        scale = torch.logspace(-3, 3, ROWS).reshape(ROWS, 1) * torch.logspace(1, -1, COLUMNS)
        with torch.no_grad():
            weight.quantize_(torch.randn(ROWS, COLUMNS) * scale)
        results[name] = weight.detach()
    return results


def parts_of(weight: torch.Tensor, direction: str = "") -> dict[str, torch.Tensor]:
    return {c.name: c.tensor for c in components_of(weight, "w") if direction in c.name}


def whole_of(weight: torch.Tensor, direction: str = "") -> torch.Tensor:
    described, parts = describe_format(weight), parts_of(weight, direction)
    return dequantize_box(
        described, parts, needed_components(described, list(parts), "w"), (0, 0), weight.shape
    )


@pytest.mark.parametrize("name", RECIPES)
def test_values_equal_te_dequantize(weights, name):
    weight = weights[name]
    assert torch.equal(whole_of(weight), weight.dequantize(dtype=torch.float32))


@pytest.mark.parametrize("name", ["mxfp8", "block", "nvfp4"])
def test_columnwise_values_are_near_the_rowwise_ones(weights, name):
    """MXFP8 quantizes both directions independently, other formats share 2-D blocks. A wrong orientation is far off."""
    weight = weights[name]
    values, full = whole_of(weight, "columnwise"), weight.dequantize(dtype=torch.float32)
    if name == "mxfp8":
        # Two roundings of 1/16 relative each, or of the blocks' smallest steps.
        assert (values - full).abs().max() <= full.abs().max() / 8
        assert torch.corrcoef(torch.stack((values.flatten(), full.flatten())))[0, 1] > 0.99
    else:
        assert torch.equal(values, full)


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(sorted(RECIPES)), st.data())
def test_any_rectangle_can_be_dequantized_from_its_blocks(weights, name, data):
    """A rectangle may split blocks. The blocks that cover it suffice."""
    weight = weights[name]
    start = [data.draw(st.integers(0, size - 1)) for size in weight.shape]
    sizes = [data.draw(st.integers(1, size - at)) for size, at in zip(weight.shape, start, strict=True)]
    described = describe_format(weight)
    needed = needed_components(described, list(parts_of(weight)), "w")
    parts = {}
    for component, block in needed.items():
        at, extent = covering(start, sizes, block)
        parts[component] = parts_of(weight)[component][
            tuple(slice(a, a + n) for a, n in zip(at, extent, strict=True))
        ]
    values = dequantize_box(described, parts, needed, start, sizes)
    expected = weight.dequantize(dtype=torch.float32)
    place = tuple(slice(a, a + n) for a, n in zip(start, sizes, strict=True))
    assert torch.equal(values, expected[place])


def test_control_scales_of_a_neighboring_block_are_detected(weights):
    """Negative control: scales of the neighboring block give different values."""
    weight = weights["block"]
    described, parts = describe_format(weight), parts_of(weight)
    needed = needed_components(described, list(parts), "w")
    own = {
        "rowwise_data": parts["rowwise_data"][:128, :128],
        "rowwise_scale_inv": parts["rowwise_scale_inv"][1:, :1],
    }
    values = dequantize_box(described, own, needed, (0, 0), (128, 128))
    assert not torch.equal(values, weight.dequantize(dtype=torch.float32)[:128, :128])


@pytest.mark.parametrize("direction", ["rowwise", "columnwise"])
def test_smallest_and_largest_e8m0_scales_are_decoded(direction):
    """E8M0 (OCP MX, 5.4.1): byte 0 is 2^-127, a float32 subnormal; byte 254 is 2^127; byte 255 is NaN."""
    codes = torch.tensor([0, 1, 127, 254, 255], dtype=torch.uint8)
    expected = torch.tensor([2.0**-127, 2.0**-126, 1.0, 2.0**127, float("nan")])
    ones = torch.ones(1, 1).to(torch.float8_e4m3fn).view(torch.uint8)
    zeros = torch.zeros_like(ones)
    down = direction == "columnwise"
    scales = (codes.reshape(1, -1) if down else codes.reshape(-1, 1)).contiguous()
    shape = (32, len(codes)) if down else (len(codes), 32)
    for byte, values in ((ones, expected), (zeros, expected * 0)):
        parts = {f"{direction}_data": byte.expand(shape).contiguous(), f"{direction}_scale_inv": scales}
        described = "mxfp8 kFloat8E4M3"
        result = dequantize_box(
            described, parts, needed_components(described, list(parts), "w"), (0, 0), shape
        )
        wanted = (values.reshape(1, -1) if down else values.reshape(-1, 1)).expand(shape)
        torch.testing.assert_close(result, wanted, rtol=0, atol=0, equal_nan=True)


def test_nvfp4_4over6_is_rejected(weights):
    """4over6 uses the same buffers with scales up to 256 instead of 448, so plain reading gives wrong values."""
    weight = weights["nvfp4"].detach()
    assert describe_format(weight) == "nvfp4 kFloat4E2M1"
    weight._nvfp4_use_4over6 = True
    with pytest.raises(
        PlacementError, match=r"up\.weight: nvfp4 weight with .*4over6.*Fix: disable the option"
    ):
        describe_format(weight, "up.weight")


def test_dequantize_rejects_incomplete_components():
    with pytest.raises(
        CheckpointError, match=r"w: values of a quantized weight: expected components of one of"
    ):
        needed_components("hybrid kFloat8E4M3", ["data"], "w")
    with pytest.raises(CheckpointError, match="got mxfp8 kFloat8E4M3 with rowwise_data"):
        needed_components("mxfp8 kFloat8E4M3", ["rowwise_data"], "w")
