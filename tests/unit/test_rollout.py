"""Test weight streams for inference engines in one process for every model family."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from te_fsdp import huggingface as rollout
from te_fsdp.checkpoint.lazy_tensors import open_safetensors
from te_fsdp.checkpoint.portable import huggingface as hf
from te_fsdp.errors import CheckpointError
from tests.unit.huggingface_models import MODELS, SIZES, TeModel, make_huggingface

pytest.importorskip("transformers", reason="transformers is not installed (extra: test)")


def build(te: Any, name: str, folder: Path) -> tuple[TeModel, Any]:
    """Return a model of TE's modules with the weights of a Hugging Face model, and that model."""
    original = make_huggingface(name)
    original.save_pretrained(folder / "original")
    model = TeModel(te, hf.read_config(original.config), config=original.config, fuse_qkv_params=True)
    hf.load_huggingface(folder / "original", model)
    return model, original


@pytest.mark.parametrize("name", MODELS)
def test_weight_stream_equals_saved_files_for_every_family(te: Any, tmp_path: Path, name: str) -> None:
    """The stream equals the files of ``save_huggingface`` bit for bit."""
    model, original = build(te, name, tmp_path)
    hf.save_huggingface(tmp_path / "saved", model, config=original.config)
    files = {key: item.full() for key, item in open_safetensors(tmp_path / "saved")[0].items()}
    streamed = dict(rollout.iter_weights(model, config=original.config, bucket_bytes=10_000))
    assert list(streamed) == list(files)
    assert all(torch.equal(streamed[key], value) for key, value in files.items())
    next(iter(streamed.values())).add_(1)
    assert not all(torch.equal(streamed[key], value) for key, value in files.items()), "the control"


def test_fp8_folder_is_readable_by_transformers(te: Any, tmp_path: Path) -> None:
    """transformers reads the folder and dequantizes it to the same values."""
    model, original = build(te, "qwen3-moe", tmp_path)
    rollout.save_folder(tmp_path / "fp8", model, config=original.config, bucket_bytes=10_000)
    stored = {key: item.full() for key, item in open_safetensors(tmp_path / "fp8")[0].items()}
    streamed = dict(rollout.iter_weights(model, config=original.config, format="fp8-block"))
    assert stored.keys() == streamed.keys()
    same = (torch.equal(stored[k].view(torch.uint8), streamed[k].view(torch.uint8)) for k in stored)
    assert all(same)
    config = json.loads((tmp_path / "fp8/config.json").read_text())
    kept = config["quantization_config"]["modules_to_not_convert"]
    assert kept == ["model.layers.0.mlp.gate", "model.layers.1.mlp.gate", "lm_head"]
    assert config["quantization_config"]["weight_block_size"] == [128, 128]
    assert config.get("dtype", config.get("torch_dtype")) == "bfloat16"
    pytest.importorskip("accelerate", reason="transformers reads FP8 weights with accelerate alone")
    import transformers

    read = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "fp8", dtype=torch.bfloat16)
    for name, value in read.state_dict().items():
        original_value = original.state_dict()[name]
        # Half a step of e4m3 at the largest value of a block, 16 of 448, and bf16's rounding of the product.
        limit = original_value.abs().max().item() * (16 / 448 + 2**-8)
        error = (value.float() - original_value).abs().max().item()
        assert error <= limit, name
        if "experts" in name:
            assert error > 0, "the control: values were quantized"


def test_fp8_blocks_have_one_scale_each() -> None:
    """Each block has one scale, including incomplete blocks at the edges. Zeros stay zeros."""
    weight = torch.randn(200, 300, generator=torch.Generator().manual_seed(0))
    weight[:128, 128:256] = 0.0
    values, scales = rollout.quantize_blocks(weight)
    assert values.dtype == torch.float8_e4m3fn and scales.shape == (2, 3) and scales[0, 1] == 1.0
    spread = scales.repeat_interleave(128, 0)[:200].repeat_interleave(128, 1)[:, :300]
    error = (values.float() * spread - weight).abs()
    assert (error <= 16 * spread).all() and error.max() > 0  # half a step at 448
    assert (values[:128, 128:256].float() == 0).all()


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"format": "fp8"}, "expected 'native' or 'bf16' or 'fp8-block', got 'fp8'"),
        ({"receiver": 1}, "expected None, or ranks below 1, got 1"),
        ({"receiver": True}, "got True"),
        ({"receiver": []}, "got []"),
        ({"bucket_bytes": 0}, "expected a positive byte count, got 0"),
        ({"since": {}}, "got dict"),
    ],
)
def test_unsupported_stream_options_are_rejected(
    te: Any, tmp_path: Path, options: dict[str, Any], expected: str
) -> None:
    """The error names the unsupported option."""
    model, original = build(te, "llama", tmp_path)
    with pytest.raises(CheckpointError) as caught:
        rollout.iter_weights(model, config=original.config, **options)
    assert expected in str(caught.value) and next(iter(options)) in str(caught.value)


def test_since_requires_a_finished_stream_of_the_same_format(te: Any, tmp_path: Path) -> None:
    """``since`` requires a finished stream of the same format."""
    model, original = build(te, "llama", tmp_path)
    begun = rollout.iter_weights(model, config=original.config)
    next(begun)
    with pytest.raises(CheckpointError, match="got a stream that has not ended"):
        rollout.iter_weights(model, config=original.config, since=begun)
    assert len(list(begun)) > 1
    with pytest.raises(CheckpointError, match="got a stream of format='native'"):
        rollout.iter_weights(model, config=original.config, since=begun, format="bf16")
    assert list(rollout.iter_weights(model, config=original.config, since=begun)) == []


def test_transposed_gpt2_projections_are_rejected_in_fp8(te: Any, tmp_path: Path) -> None:
    """GPT-2's projections are transposed."""
    model, original = build(te, "gpt2", tmp_path)
    with pytest.raises(CheckpointError, match="fp8-block.*GPT-2"):
        rollout.iter_weights(model, config=original.config, format="fp8-block")


def test_biases_without_a_hugging_face_tensor_are_rejected(te: Any) -> None:
    """The error is raised before the first tensor of the stream."""
    config = {**SIZES, "model_type": "qwen2", "tie_word_embeddings": True}
    model = TeModel(te, hf.read_config(config), fuse_qkv_params=True)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("proj.bias"):
                parameter.fill_(1.0)
    with pytest.raises(CheckpointError, match=r"self_attention\.proj\.bias: values that"):
        rollout.iter_weights(model, config=config)
