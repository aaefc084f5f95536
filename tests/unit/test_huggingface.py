"""Hugging Face models and models of ``te.TransformerLayer`` with the same weights compute the same."""

from __future__ import annotations

import copy
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from te_fsdp.checkpoint.portable import huggingface as hf
from te_fsdp.checkpoint.portable.huggingface_groups import Group
from te_fsdp.errors import CheckpointError
from tests.unit.huggingface_models import MODELS, TeModel, make_huggingface

pytest.importorskip("transformers", reason="transformers is not installed (extra: test)")
import safetensors.torch

LAYERS: dict[str, dict[str, Any]] = {
    "split": {},
    "interleaved": {"fuse_qkv_params": True},
    "stacked": {"fuse_qkv_params": True, "qkv_weight_interleaved": False},
    "zero-centered": {"fuse_qkv_params": True, "zero_centered_gamma": True},
}
# Every option with both styles; the other models with one each, all options among them.
CASES = [(model, layer) for model in ("llama", "gpt2") for layer in LAYERS]
CASES += [("llama-tied-biased", "interleaved"), ("llama-attention-bias", "stacked"), ("mistral", "split")]
CASES += [("qwen2", "interleaved"), ("qwen3", "zero-centered"), ("gpt2-untied", "interleaved")]
TOKENS = torch.randint(0, 40, (3, 11), generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def logits(model: nn.Module) -> torch.Tensor:
    result = model(TOKENS)
    return getattr(result, "logits", result)


def rounding(original: nn.Module) -> tuple[torch.Tensor, float]:
    """Logits in float64, and what float32 may differ from them by.

    The Hugging Face model's own float32 error is measured. TransformerEngine's layer does the same sums in another
    order; the largest of 1320 such errors varies by less than four times.
    """
    exact = logits(copy.deepcopy(original).double())
    error = (logits(original) - exact).abs().max().item()
    assert 0 < error < 1e-4 * exact.abs().max().item()
    return exact, 4 * error


def difference(model: nn.Module, exact: torch.Tensor) -> float:
    return (logits(model) - exact).abs().max().item()


@pytest.fixture(scope="module")
def originals() -> dict[str, nn.Module]:
    return {name: make_huggingface(name) for name in MODELS}


def build(te: Any, original: nn.Module, layer: str) -> tuple[TeModel, hf.TeBlocks]:
    model = TeModel(te, hf.read_config(original.config), **LAYERS[layer])
    return model, hf.TeBlocks.of(model, final_norm_zero_centered=layer == "zero-centered")


def fill(model: nn.Module, tensors: Any) -> nn.Module:
    """What load_state_dict does not find are pickles and frequencies, not parameters."""
    outcome = model.load_state_dict(dict(tensors), strict=False)
    assert not outcome.unexpected_keys
    assert all(key.endswith(("_extra_state", "inv_freq")) for key in outcome.missing_keys), outcome
    return model


@pytest.mark.parametrize(("name", "layer"), CASES, ids=["-".join(case) for case in CASES])
def test_same_logits_there_and_back(
    te: Any, originals: dict[str, nn.Module], tmp_path: Path, name: str, layer: str
) -> None:
    original = originals[name]
    exact, bound = rounding(original)
    folder, back = tmp_path / "original", tmp_path / "back"
    original.save_pretrained(folder, max_shard_size="20KB")
    assert (folder / "model.safetensors.index.json").exists()

    model, blocks = build(te, original, layer)
    fill(model, hf.import_huggingface(folder, blocks=blocks))
    assert difference(model, exact) <= bound
    in_memory = dict(hf.import_huggingface(original.state_dict(), config=original.config, blocks=blocks))
    assert all(torch.equal(in_memory[k], v) for k, v in model.named_parameters()), "of the state dict, too"

    hf.export_huggingface(model.state_dict(), back, like=folder, blocks=blocks, max_file_bytes=20_000)
    assert (back / "config.json").read_bytes() == (folder / "config.json").read_bytes()
    exported, info = type(original).from_pretrained(
        back, output_loading_info=True, attn_implementation="eager"
    )
    assert not any(info.values()), info
    theirs = original.state_dict()
    assert exported.state_dict().keys() == theirs.keys()
    assert all(torch.equal(value, theirs[key]) for key, value in exported.state_dict().items())
    assert torch.equal(logits(exported), logits(original))
    files = [json.loads((f / "model.safetensors.index.json").read_text()) for f in (folder, back)]
    assert files[0]["weight_map"].keys() == files[1]["weight_map"].keys()


def swap(group: Group) -> Group:
    """The group, with the last two of its parts taken for each other."""
    names = group.huggingface.names
    return replace(group, huggingface=replace(group.huggingface, names=(*names[:-2], names[-1], names[-2])))


def mistaken(weights: hf.WeightMap, mistake: str) -> hf.WeightMap:
    """The map with an error that no shape tells."""
    groups = []
    for group in weights.groups:
        name, packing = group.te.names[0], group.te.packing
        if (mistake == "gate and up swapped" and "fc1_weight" in name) or (
            mistake == "key and value swapped" and "qkv.weight" in name
        ):
            group = swap(group)
        elif mistake == "not interleaved" and packing == "interleaved":
            group = replace(group, te=replace(group.te, packing="joined"))
        elif mistake == "gammas as they are":
            group = replace(group, te=replace(group.te, zero_centered=False))
        elif mistake == "not transposed" and "self_attention.proj.weight" in name:
            group = replace(group, huggingface=replace(group.huggingface, transposed=False))
        groups.append(group)
    assert tuple(groups) != weights.groups, "no mistake made"
    return replace(weights, groups=tuple(groups))


MISTAKES = [
    ("llama", "interleaved", "gate and up swapped"),
    ("llama", "interleaved", "key and value swapped"),
    ("llama", "interleaved", "not interleaved"),
    ("llama", "zero-centered", "gammas as they are"),
    ("gpt2", "interleaved", "not interleaved"),
    ("gpt2", "stacked", "not transposed"),
]


@pytest.mark.parametrize(("name", "layer", "mistake"), MISTAKES)
def test_a_mistake_shows(
    te: Any, originals: dict[str, nn.Module], name: str, layer: str, mistake: str
) -> None:
    exact, bound = rounding(originals[name])
    model, blocks = build(te, originals[name], layer)
    weights = hf.WeightMap.build(originals[name].config, blocks)
    state = originals[name].state_dict()
    assert difference(fill(model, weights.to_te(state)), exact) <= bound
    assert difference(fill(model, mistaken(weights, mistake).to_te(state)), exact) > 1000 * bound


@pytest.mark.parametrize(
    ("name", "option"),
    [
        ("llama", {"rotary_pos_interleaved": True}),
        ("llama", {"layernorm_epsilon": 1e-2}),
        ("mistral", {"window_size": (3, 0)}),
        ("qwen3", {"qk_norm_before_rope": False}),
        ("gpt2", {"activation": "relu"}),
    ],
    ids=str,
)
def test_a_layer_with_another_option_differs(
    te: Any, originals: dict[str, nn.Module], name: str, option: dict[str, Any]
) -> None:
    exact, bound = rounding(originals[name])
    model = TeModel(te, hf.read_config(originals[name].config), **option)
    state = hf.import_huggingface(originals[name].state_dict(), config=originals[name].config)
    assert difference(fill(model, state), exact) > 100 * bound


@pytest.mark.parametrize(
    ("name", "option", "text"),
    [
        ("llama", {"rotary_pos_interleaved": True}, "rotary_pos_interleaved is True, not False"),
        ("llama", {"layernorm_epsilon": 1e-2}, "layernorm_epsilon is 0.01, not 1e-05"),
        ("llama", {"activation": "geglu"}, "activation is geglu, not swiglu"),
        ("llama", {"num_attention_heads": 8, "num_gqa_groups": 4, "kv_channels": 4}, "heads is 8, not 4"),
        ("mistral", {"window_size": (3, 0)}, r"window_size is \(3, 0\), not \(2, 0\)"),
        ("qwen3", {"qk_norm_before_rope": False}, "qk_norm_before_rope is False, not True"),
        ("gpt2", {"self_attn_mask_type": "no_mask"}, "self_attn_mask_type is no_mask, not causal"),
    ],
    ids=str,
)
def test_such_a_layer_is_refused(
    te: Any, originals: dict[str, nn.Module], name: str, option: dict[str, Any], text: str
) -> None:
    config = originals[name].config
    model = TeModel(te, hf.read_config(config), **option)
    with pytest.raises(CheckpointError, match=rf"something else: layers\.0: .*{text}"):
        hf.load_huggingface(originals[name].state_dict(), model, config=config)


@pytest.mark.parametrize("name", MODELS)
def test_its_own_layers_are_not(te: Any, originals: dict[str, nn.Module], name: str) -> None:
    exact, bound = rounding(originals[name])
    model, _ = build(te, originals[name], "interleaved")
    hf.load_huggingface(originals[name].state_dict(), model, config=originals[name].config)
    assert difference(model, exact) <= bound


def test_names_of_the_hubs_gpt2(te: Any, originals: dict[str, nn.Module]) -> None:
    # The hub's files are those of a GPT2Model, with the causal masks of old.
    bare = {key.removeprefix("transformer."): value for key, value in originals["gpt2"].state_dict().items()}
    del bare["lm_head.weight"]
    bare["h.0.attn.bias"] = torch.ones(1, 1, 16, 16).tril().bool()
    model, blocks = build(te, originals["gpt2"], "split")
    exact, bound = rounding(originals["gpt2"])
    fill(model, hf.import_huggingface(bare, config=originals["gpt2"].config, blocks=blocks))
    assert difference(model, exact) <= bound


def test_load_into_a_model(te: Any, originals: dict[str, nn.Module], tmp_path: Path) -> None:
    original = originals["llama-tied-biased"]
    original.save_pretrained(tmp_path)
    exact, bound = rounding(original)
    model, _ = build(te, original, "zero-centered")
    hf.load_huggingface(tmp_path, model, final_norm_zero_centered=True)
    assert difference(model, exact) <= bound
    assert model.head.weight is model.embedding.weight

    before = {key: value.clone() for key, value in model.named_parameters()}
    other = TeModel(te, replace(hf.read_config(tmp_path), ffn=40, tied=False))
    with pytest.raises(CheckpointError) as error:
        hf.load_huggingface(tmp_path, other)
    assert "fc1_weight ([80, 32], not [96, 32])" in str(error.value)
    with pytest.raises(CheckpointError, match=r"the model has no: out\.weight.*nothing for: head\.weight"):
        hf.load_huggingface(tmp_path, model, names=hf.TeNames(head="out.weight"))
    broken = original.state_dict()
    broken["model.norm.weight"] = torch.zeros(3)
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight has shape \[3\]"):
        hf.load_huggingface(broken, model, config=original.config)
    assert all(torch.equal(before[key], value) for key, value in model.named_parameters()), "nothing changed"


def test_layers_that_have_no_counterpart(te: Any) -> None:
    with pytest.raises(CheckpointError, match=r"parallel_attention_mlp set"):
        hf.TeBlocks.of(te.TransformerLayer(32, 48, 4, parallel_attention_mlp=True, device="meta"))
    with pytest.raises(CheckpointError, match=r"got none"):
        hf.TeBlocks.of(nn.Linear(2, 2))
    layers = [te.TransformerLayer(32, 48, 4, bias=bias, device="meta") for bias in (True, False)]
    with pytest.raises(CheckpointError, match=r"got 2 kinds"):
        hf.TeBlocks.of(nn.Sequential(*layers))


PAGE = Path(__file__).resolve().parents[2] / "docs/huggingface.md"


def test_the_page_runs(
    te: Any, originals: dict[str, nn.Module], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "my-llama"
    originals["llama-tied-biased"].save_pretrained(folder)
    (folder / "tokenizer.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    code = "\n".join(re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), flags=re.MULTILINE | re.DOTALL))
    found: dict[str, Any] = {}
    exec(compile(code, PAGE.name, "exec"), found)

    with torch.no_grad():
        expected = originals["llama-tied-biased"](torch.arange(16).view(2, 8)).logits
    _, bound = rounding(originals["llama-tied-biased"])
    assert (found["logits"] - expected).abs().max() <= 2 * bound  # both are rounded
    for name in ("config.json", "tokenizer.json"):
        assert (tmp_path / "my-llama-trained" / name).read_bytes() == (folder / name).read_bytes()
    trained = safetensors.torch.load_file(tmp_path / "my-llama-trained/model.safetensors")
    before = safetensors.torch.load_file(folder / "model.safetensors")
    assert trained.keys() == before.keys() and all(torch.equal(trained[k], before[k]) for k in before)
    assert found["names"].head is None


def test_tied_weights_that_turn_out_to_differ(te: Any, originals: dict[str, nn.Module]) -> None:
    # Only reading the values tells, which may be after others are in the model.
    model = TeModel(te, hf.read_config(originals["llama-tied-biased"].config))
    broken = dict(originals["llama-tied-biased"].state_dict())
    broken["lm_head.weight"] = broken["lm_head.weight"] + 1
    with pytest.raises(CheckpointError, match=r"lm_head\.weight: differs from"):
        hf.load_huggingface(broken, model, config=originals["llama-tied-biased"].config)
    with pytest.raises(CheckpointError, match=r"several dtypes.* replaced in part: load again"):
        state = originals["llama"].state_dict()
        state["model.layers.1.mlp.up_proj.weight"] = state["model.layers.1.mlp.up_proj.weight"].bfloat16()
        config = originals["llama"].config
        hf.load_huggingface(state, TeModel(te, hf.read_config(config)), config=config)
