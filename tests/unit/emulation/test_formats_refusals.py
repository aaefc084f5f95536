"""Test errors for inputs that a GPU would reject, hang on or misread."""

from __future__ import annotations

import pytest
import torch

from te_fsdp import emulation
from te_fsdp.emulation._errors import EmulationError
from te_fsdp.emulation.tex import formats
from te_fsdp.emulation.tex.formats import cast
from tests.unit.commands import run_ranks
from tests.unit.emulation.formats_inputs import make
from tests.unit.emulation.test_formats_update import build, snapshot

SHAPE = (64, 96)


@pytest.mark.parametrize(
    ("name", "shape", "text"),
    [
        ("mxfp8", (48, 64), r"MXFP8 needs both flattened dims to be multiples of 32, got shape \(48, 64\)"),
        ("mxfp8", (64, 40), "multiples of 32"),
        ("nvfp4", (24, 64), r"NVFP4 needs both flattened dims to be multiples of 16, got shape \(24, 64\)"),
        ("nvfp4", (2, 16, 40), r"\(2, 16, 40\) = \(32, 40\)"),
    ],
)
def test_quantizers_reject_unaligned_shapes(name, shape, text):
    emulation.switch_arch("10.0")
    with pytest.raises(EmulationError, match=text):
        build(name)(torch.zeros(shape))


@pytest.mark.parametrize("name", ["mxfp8", "nvfp4"])
def test_block_formats_are_rejected_on_architecture_9_0(name):
    emulation.switch_arch("9.0")
    with pytest.raises(EmulationError, match="needs architecture 10.0 or later, got 9.0"):
        build(name)(torch.zeros(SHAPE))


@pytest.mark.parametrize("name", ["block1", "block2"])
def test_block_scales_must_be_powers_of_two_on_architecture_10_0(name):
    x = make("normal", SHAPE, torch.bfloat16)
    quantizer = build(name)
    quantizer.force_pow_2_scales = False
    emulation.switch_arch("9.0")
    y = quantizer(x)
    formats.operand(y, rowwise=True)
    emulation.switch_arch("10.0")
    with pytest.raises(EmulationError, match="needs power-of-two scales: set force_pow_2_scales=True"):
        quantizer(x)
    with pytest.raises(EmulationError, match="rowwise scales on architecture 10.0 must be powers of two"):
        formats.operand(y, rowwise=True)


def test_quantize_rejects_quantizer_subclasses():
    from transformer_engine.pytorch.tensor.mxfp8_tensor import MXFP8Quantizer

    class Custom(MXFP8Quantizer):
        pass

    with pytest.raises(EmulationError, match="unknown quantizer .*Custom: expected exactly one of"):
        formats.quantize(torch.zeros(SHAPE), Custom(7))


@pytest.mark.parametrize("name", ["current", "block1", "mxfp8", "nvfp4"])
def test_quantize_rejects_wrong_input_dtypes_and_outputs(name):
    emulation.switch_arch("10.0")
    quantizer = build(name)
    with pytest.raises(
        EmulationError, match="expected a float32, float16 or bfloat16 input, got torch.float64"
    ):
        quantizer(torch.zeros(SHAPE, dtype=torch.float64))
    y = quantizer(torch.zeros(SHAPE))
    with pytest.raises(EmulationError, match=r"the input has shape \(32, 96\), but the output"):
        formats.quantize(torch.zeros(32, 96), quantizer, y)
    with pytest.raises(EmulationError, match="must write to an? .*Tensor, got Tensor"):
        formats.quantize(torch.zeros(SHAPE), quantizer, torch.zeros(SHAPE))


def test_operand_reads_only_what_the_kernel_reads():
    """The kernel reads the transpose on architecture 9.0, and the only buffer on 10.0."""
    x = make("normal", SHAPE, torch.bfloat16)
    emulation.switch_arch("9.0")
    y = build("current")(x)
    values = formats.operand(y, rowwise=False)
    assert torch.equal(values, formats.operand(y, rowwise=True))
    y._transpose.zero_()  # a stale transpose must show
    assert formats.operand(y, rowwise=False).abs().max() == 0
    y._transpose_invalid = True
    with pytest.raises(
        EmulationError, match="is read columnwise on architecture 9.0, but _transpose is flagged"
    ):
        formats.operand(y, rowwise=False)
    y._transpose = None
    with pytest.raises(EmulationError, match="but _transpose is missing"):
        formats.operand(y, rowwise=False)
    y._data = None
    with pytest.raises(EmulationError, match="is read rowwise on architecture 9.0, but _data is missing"):
        formats.operand(y, rowwise=True)
    emulation.switch_arch("10.0")
    y = build("current")(x)
    assert torch.equal(formats.operand(y, rowwise=False), formats.operand(y, rowwise=True))


@pytest.mark.parametrize("name", ["block1", "block2", "mxfp8", "nvfp4"])
def test_operand_requires_its_direction_and_padded_scales(name):
    emulation.switch_arch("10.0")
    y = build(name, columnwise=False)(make("normal", SHAPE, torch.bfloat16))
    with pytest.raises(EmulationError, match="is read columnwise, but _columnwise_data is missing"):
        formats.operand(y, rowwise=False)
    y._rowwise_scale_inv = y._rowwise_scale_inv[:, :1].clone()
    with pytest.raises(EmulationError, match="rowwise scales of .* expected"):
        formats.operand(y, rowwise=True)


def test_operand_accepts_plain_tensors():
    x = torch.randn(2, 3, 4, dtype=torch.bfloat16)
    assert torch.equal(formats.operand(x, rowwise=False), x.float().reshape(6, 4))


def test_dequantize_casts_or_rejects_unsupported_tensors():
    from transformer_engine.pytorch.constants import DType

    emulation.switch_arch("10.0")
    x = make("normal", SHAPE, torch.bfloat16)
    y = build("current")(x)
    full = formats.dequantize(y, torch.float32)
    for expected in (DType.kBFloat16, torch.bfloat16):
        assert torch.equal(formats.dequantize(y, expected), full.to(torch.bfloat16))
    with pytest.raises(EmulationError, match="does not dequantize Float8BlockwiseQTensor"):
        formats.dequantize(build("block1")(x), torch.float32)
    with pytest.raises(EmulationError, match="Tensor is not a quantized tensor"):
        formats.dequantize(x, torch.float32)
    with pytest.raises(EmulationError, match="has no rowwise data"):
        formats.dequantize(build("nvfp4", rowwise=False)(x), torch.float32)
    column_only = formats.dequantize(build("mxfp8", rowwise=False)(x), torch.float32)
    assert torch.equal(column_only, formats.operand(build("mxfp8")(x), rowwise=False))


def test_quantize_rejects_too_small_scale_buffers():
    emulation.switch_arch("10.0")
    quantizer = build("mxfp8")
    x = make("normal", SHAPE, torch.bfloat16)
    y = quantizer(x)
    whole = snapshot(y)
    y._rowwise_scale_inv = torch.zeros(
        64, 3, dtype=torch.uint8
    )  # just the used part: the kernel can write it
    formats.quantize(x, quantizer, y)
    assert torch.equal(y._rowwise_scale_inv, whole["_rowwise_scale_inv"][:64, :3])
    y._rowwise_scale_inv = torch.zeros(64, 2, dtype=torch.uint8)
    with pytest.raises(EmulationError, match=r"scale buffer of shape \(64, 2\) cannot hold \(64, 3\) scales"):
        formats.quantize(x, quantizer, y)


def test_split_quantize_rejects_wrong_sections():
    with pytest.raises(EmulationError, match=r"sections \[64, 64\] exceed the 64 rows"):
        formats.split_quantize(torch.zeros(SHAPE), [64, 64], [build("mxfp8"), build("mxfp8")])
    with pytest.raises(EmulationError, match="2 sections but 1 quantizers"):
        formats.split_quantize(torch.zeros(SHAPE), [32, 32], [build("mxfp8")])


TWO_RANKS = """
import sys
from tests.unit.emulation import test_formats_refusals
test_formats_refusals._two_ranks(int(sys.argv[1]), *sys.argv[2:])
"""


def _two_ranks(rank: int, store: str, results: str) -> None:
    torch.set_num_threads(1)
    emulation.install("10.0")
    torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    whole = make("heavy", (128, 96), torch.bfloat16)
    mine = whole.chunk(2)[rank].contiguous()
    outcomes = {}
    for name in ("current", "nvfp4"):
        quantizer = build(name)
        alone = snapshot(quantizer(mine))
        quantizer.with_amax_reduction = True
        together = formats.quantize(mine, quantizer)
        outcomes[name] = (alone, snapshot(together), snapshot(build(name)(whole)))
        # The no-op flag skips the write, not the collective: it must not leave the other rank waiting.
        formats.quantize(mine, quantizer, together, torch.ones(1) if rank == 0 else torch.zeros(1))
        outcomes[f"{name} noop"] = snapshot(together)
        if rank == 0:
            try:
                formats.quantize(mine[:0], quantizer)
            except EmulationError as error:
                outcomes[f"{name} empty"] = str(error)
    torch.save(outcomes, f"{results}{rank}")
    torch.distributed.destroy_process_group()


def test_amax_reduction_over_two_ranks_matches_the_unsharded_tensor(tmp_path, python):
    """With amax reduction, shards have the scale of the unsharded tensor and its rows as data."""
    run_ranks(python, TWO_RANKS, str(tmp_path / "store"), str(tmp_path / "rank"))
    for rank in range(2):
        result = torch.load(tmp_path / f"rank{rank}")
        alone, together, whole = result["current"]
        assert torch.equal(together["_scale_inv"], whole["_scale_inv"])
        assert torch.equal(together["_data"], whole["_data"].chunk(2)[rank])
        alone4, together4, whole4 = result["nvfp4"]
        for amax in ("_amax_rowwise", "_amax_columnwise"):
            assert torch.equal(together4[amax], whole4[amax])
        assert torch.equal(together4["_rowwise_data"], whole4["_rowwise_data"].chunk(2)[rank])
        for name in ("current", "nvfp4"):
            assert all(torch.equal(result[f"{name} noop"][k], v) for k, v in result[name][1].items())
            if rank == 0:
                assert "empty input with amax reduction over 2 ranks" in result[f"{name} empty"]
        # The control: without reduction the rank without the largest value gets a different scale.
        differs = not torch.equal(alone["_scale_inv"], whole["_scale_inv"])
        assert differs == (
            cast.amax_of(make("heavy", (128, 96), torch.bfloat16).chunk(2)[rank]) != whole_amax()
        )
        assert differs == (not torch.equal(alone4["_amax_rowwise"], whole4["_amax_rowwise"]))


def whole_amax():
    return cast.amax_of(make("heavy", (128, 96), torch.bfloat16))
