"""Test the map of Hugging Face tensors to TransformerEngine's, without either library."""

from __future__ import annotations

import inspect
import json
import logging
import re
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st

from te_fsdp.checkpoint.lazy_tensors import InMemory
from te_fsdp.checkpoint.portable import huggingface as hf, huggingface_config
from te_fsdp.checkpoint.portable.huggingface_config import FAMILIES
from te_fsdp.checkpoint.portable.huggingface_map import Form, Group
from te_fsdp.checkpoint.portable.huggingface_model import ModelDescription, layer_differences
from te_fsdp.errors import CheckpointError
from te_fsdp.modules.semantics import Semantics
from tests.unit.huggingface_models import MODELS, to_huggingface, to_te

LLAMA = {
    "model_type": "llama",
    "vocab_size": 10,
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_act": "silu",
}
GPT2 = {"model_type": "gpt2", "vocab_size": 10, "n_embd": 8, "n_layer": 2, "n_head": 2, "n_positions": 6}


def tensors(
    weights: hf.WeightMap, *, te: bool, dtype: torch.dtype = torch.float32
) -> dict[str, torch.Tensor]:
    """Return tensors with distinct elements, and gammas near one, where zero-centering is exact."""
    generator = torch.Generator().manual_seed(0)
    return {
        name: torch.rand(shape, generator=generator).to(dtype) + 0.5
        for name, shape in weights.shapes(te=te).items()
    }


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return list(one) == list(other) and all(torch.equal(one[k], other[k]) for k in one)


# ------------------------------------------------------------------------------------------------------ groups

PACKINGS = ("separate", "joined", "interleaved")


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(PACKINGS),
    st.sampled_from(PACKINGS),
    st.booleans(),
    st.integers(1, 3),
    st.integers(1, 3),
    st.integers(0, 3),
)
def test_every_qkv_layout_converts_to_every_other_and_back(one, other, transposed, groups, per_group, width):
    parts = ((groups * per_group * 2, width), (groups * 2, width), (groups * 2, width))

    def form(packing: str, side: str, transposed: bool = False) -> Form:
        names = tuple(side + part for part in "qkv") if packing == "separate" else (side,)
        return Form(names, transposed=transposed, groups=groups if packing == "interleaved" else 1)

    group = Group(parts, form(one, "a", transposed), form(other, "b"))
    source = {n: torch.rand(s) for n, s in group.huggingface.shapes(parts).items()}
    there = group.convert(source, to_te=True, dtype=torch.float32)
    assert {n: tuple(t.shape) for n, t in there.items()} == group.te.shapes(parts)
    assert sorted(torch.cat([t.flatten() for t in there.values()])) == sorted(
        torch.cat([t.flatten() for t in source.values()])
    )
    assert same(group.convert(there, to_te=False, dtype=torch.float32), source)


def test_interleaved_qkv_rows_match_a_written_out_example():
    # two groups, two query heads each, heads of one row: q0 q1 k0 v0 q2 q3 k1 v1
    group = Group(((4, 1), (2, 1), (2, 1)), Form(("q", "k", "v")), Form(("qkv",), groups=2))
    source = {
        "q": torch.tensor([[0.0], [1], [2], [3]]),
        "k": torch.tensor([[10.0], [11]]),
        "v": torch.tensor([[20.0], [21]]),
    }
    (packed,) = group.convert(source, to_te=True, dtype=torch.float32).values()
    assert packed.flatten().tolist() == [0, 1, 10, 20, 2, 3, 11, 21]


# ------------------------------------------------------------------------------------------------------ a model


@pytest.mark.parametrize(
    "config",
    [LLAMA, GPT2, {**LLAMA, "tie_word_embeddings": True, "attention_bias": True}],
    ids=["llama", "gpt2", "tied"],
)
def test_every_architecture_round_trips(config):
    weights = hf.WeightMap.build(config, hf.TeBlocks(fuse_qkv_params=True))
    source = tensors(weights, te=False)
    if config.get("tie_word_embeddings", config is GPT2):
        source["lm_head.weight"] = next(iter(source.values()))
    converted = dict(to_te(weights, source))
    assert {n: tuple(t.shape) for n, t in converted.items()} == weights.shapes(te=True)
    assert all(t.is_contiguous() for t in converted.values())
    lazy = weights.lazily({k: InMemory(v) for k, v in source.items()}, to_te=True)
    assert same({k: v.full() for k, v in lazy.items()}, converted)
    assert all((v.shape, v.dtype) == (tuple(converted[k].shape), converted[k].dtype) for k, v in lazy.items())
    back = dict(to_huggingface(weights, converted))
    assert back.keys() | {"lm_head.weight"} == source.keys() | {"lm_head.weight"}
    assert all(torch.equal(back[k], source[k]) for k in back)


def test_lazy_tensors_are_read_once_per_group():
    weights = hf.WeightMap.build(LLAMA, hf.TeBlocks(fuse_qkv_params=True))
    read: list[str] = []

    class Watched(InMemory):
        def rows(self, first, last):
            read.append(self.name)
            return super().rows(first, last)

    source = {}
    for name, tensor in tensors(weights, te=False).items():
        source[name] = Watched(tensor)
        source[name].name = name
    for converted in weights.lazily(source, to_te=True).values():
        for first in range(converted.height):
            converted.rows(first, first + 1)
    assert sorted(read) == sorted(source), "each tensor once"


def test_conversion_keeps_or_changes_the_dtype():
    weights = hf.WeightMap.build({**LLAMA, "attention_bias": True})
    source = tensors(weights, te=False, dtype=torch.bfloat16)
    there = dict(to_te(weights, source))
    assert {t.dtype for t in there.values()} == {torch.bfloat16}, "zeros too"
    assert {t.dtype for t in dict(to_te(weights, source, dtype=torch.float32)).values()} == {torch.float32}
    lazy = weights.lazily({k: InMemory(v) for k, v in source.items()}, to_te=True)
    assert {t.dtype for t in lazy.values()} == {t.full().dtype for t in lazy.values()} == {torch.bfloat16}
    source["model.layers.1.mlp.up_proj.weight"] = source["model.layers.1.mlp.up_proj.weight"].float()
    both = dict(to_te(weights, source))
    assert both["layers.1.layernorm_mlp.fc1_weight"].dtype == torch.float32, "that holds both"
    assert torch.equal(
        both["layers.1.layernorm_mlp.fc1_weight"], there["layers.1.layernorm_mlp.fc1_weight"].float()
    )
    assert {t.dtype for t in dict(to_te(weights, source, dtype=torch.float32)).values()} == {torch.float32}
    for lossy in (torch.int8, torch.float8_e4m3fn, torch.bool, "bfloat16"):
        with pytest.raises(
            CheckpointError, match=r"dtype: expected None, or a floating-point dtype of 16 bits"
        ):
            weights.lazily(source, to_te=True, dtype=lossy)


def test_zero_centered_gammas_are_converted(caplog):
    blocks = hf.TeBlocks(zero_centered_gamma=True, final_norm_zero_centered=True)
    weights = hf.WeightMap.build(LLAMA, blocks)
    source = tensors(weights, te=False)
    norm = "model.layers.0.input_layernorm.weight"
    source[norm][:2] = torch.tensor([0.5, 2.0])
    with caplog.at_level(logging.WARNING, "te_fsdp"):
        converted = dict(to_te(weights, source))
        assert torch.equal(
            converted["layers.0.self_attention.layernorm_qkv.layer_norm_weight"], source[norm] - 1
        )
        assert torch.equal(converted["norm.weight"], source["model.norm.weight"] - 1)
        assert same(dict(to_huggingface(weights, converted)), source)
        dict(to_huggingface(weights, converted, dtype=torch.bfloat16))  # rounds to the dtype, once
    assert not caplog.records
    source[norm][0] = 0.1  # of which 0.1 - 1 has fewer bits left
    with caplog.at_level(logging.WARNING, "te_fsdp"):
        dict(to_te(weights, source))
    assert "layers.0.self_attention.layernorm_qkv.layer_norm_weight: zero-centering rounded" in caplog.text


def test_additional_te_biases_are_zero_and_rejected_otherwise():
    weights = hf.WeightMap.build({**LLAMA, "attention_bias": True})
    source = tensors(weights, te=False)
    converted = dict(to_te(weights, source))
    zero = [name for name, tensor in converted.items() if not tensor.any()]
    assert zero == [f"layers.{n}.layernorm_mlp.{fc}_bias" for n in range(2) for fc in ("fc1", "fc2")]
    assert same(dict(to_huggingface(weights, converted)), source)
    converted["layers.1.layernorm_mlp.fc1_bias"][3] = 1e-9
    with pytest.raises(
        CheckpointError, match=r"layers\.1\.layernorm_mlp\.fc1_bias: values that .* no parameter for"
    ):
        dict(to_huggingface(weights, converted))


def test_user_defined_names_are_mapped():
    names = hf.TeNames(
        "decoder.blocks.{layer}.te.", "tok.w", "pos.w", "last.", "out.w", ("rope*", "decoder.scale")
    )
    weights = hf.WeightMap.build(LLAMA, names=names)
    ours = tensors(weights, te=True)
    assert {name.split(".")[0] for name in ours} == {"decoder", "tok", "last", "out"}
    assert "decoder.blocks.1.te.layernorm_mlp.fc2_weight" in ours
    source = {
        **ours,
        "rope.table": torch.zeros(2),
        "decoder.scale": torch.zeros(1),
        "a.b._extra_state": torch.zeros(0),
    }
    assert same(dict(to_te(weights, dict(to_huggingface(weights, source)))), ours)
    with pytest.raises(CheckpointError, match="unexpected: rope.table"):
        dict(to_huggingface(replace(weights, ignored_te=""), {**ours, "rope.table": torch.zeros(2)}))


# ----------------------------------------------------------------------------------------------- what must fail


def test_all_missing_unexpected_and_misshaped_tensors_are_named_at_once():
    weights = hf.WeightMap.build(LLAMA)
    source = tensors(weights, te=False)
    del source["model.layers.1.mlp.up_proj.weight"], source["lm_head.weight"]
    source["model.layers.0.self_attn.q_proj.weight"] = torch.zeros(4, 4)
    source["model.layers.2.mlp.up_proj.weight"] = torch.zeros(12, 8)
    source["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(4)  # of old versions, ignored
    with pytest.raises(CheckpointError) as error:
        to_te(weights, source)
    message = str(error.value)
    assert "missing: model.layers.1.mlp.up_proj.weight, lm_head.weight. " in message
    assert "unexpected: model.layers.2.mlp.up_proj.weight. " in message
    assert "q_proj.weight has shape [4, 4], not [8, 8]. " in message
    assert "inv_freq" not in message


@pytest.mark.parametrize(
    ("value", "text"),
    [
        pytest.param(torch.zeros(10, 8, dtype=torch.int8), "int8", id="int8"),
        pytest.param(torch.zeros(10, 8).to(torch.float8_e4m3fn), "float8_e4m3fn", id="float8"),
        pytest.param(torch.zeros(10, 8, device="meta"), "a meta tensor", id="meta"),
    ],
)
def test_tensors_that_are_not_plain_are_rejected(value, text):
    weights = hf.WeightMap.build(LLAMA)
    source = {**tensors(weights, te=False), "lm_head.weight": value}
    with pytest.raises(CheckpointError, match=f"lm_head.weight.*{text}"):
        dict(to_te(weights, source))


def test_tied_weights_that_differ_are_rejected():
    weights = hf.WeightMap.build({**LLAMA, "tie_word_embeddings": True})
    ours = tensors(weights, te=True)
    with pytest.raises(CheckpointError, match=r"head\.weight: differs from embedding\.weight"):
        dict(to_huggingface(weights, ours))
    ours["head.weight"] = ours["embedding.weight"].clone()
    assert "lm_head.weight" not in dict(to_huggingface(weights, ours))
    embedding = ours.pop("head.weight")
    assert "model.embed_tokens.weight" in dict(to_huggingface(weights, ours))
    del ours["embedding.weight"]
    with pytest.raises(CheckpointError, match=r"missing: embedding\.weight\. "):
        to_huggingface(weights, ours)
    converted = dict(to_huggingface(weights, {**ours, "head.weight": embedding}))
    assert torch.equal(converted["model.embed_tokens.weight"], embedding)


@pytest.mark.parametrize("config", [GPT2, {**LLAMA, "tie_word_embeddings": True}], ids=["gpt2", "llama"])
def test_tied_weight_stored_as_the_head_alone_loads(config):
    weights = hf.WeightMap.build(config)
    source = tensors(weights, te=False)
    del source["lm_head.weight"]
    expected = dict(to_te(weights, source))
    source["lm_head.weight"] = source.pop(next(iter(source)))
    assert same(dict(to_te(weights, source)), expected)


@pytest.mark.parametrize(
    ("config", "blocks", "names", "text"),
    [
        (GPT2, hf.TeBlocks(bias=False), None, "bias=False of the layers, but the gpt2 model has biases"),
        (LLAMA, None, hf.TeNames(head=None), "names.head is None, but the llama model has a separate head"),
        ({**LLAMA, "model_type": "t5"}, None, None, "model_type.*'t5'"),
        ({**LLAMA, "hidden_act": "gelu"}, None, None, "hidden_act is 'gelu', supported: silu"),
        ({**GPT2, "activation_function": "gelu", "scale_attn_weights": False}, None, None, "'gelu'.*; scale_attn"),
        ({**LLAMA, "quantization_config": {"quant_method": "fp8"}}, None, None, "quantization_config is"),
        ({**LLAMA, "model_type": "qwen2", "use_sliding_window": True}, None, None, "use_sliding_window is True"),
        ({**LLAMA, "layer_types": ["full_attention"]}, None, None, "a different number of layers"),
        ({**LLAMA, "layer_types": ["full_attention", "sliding_attention"]}, None, None, "other than full_attention"),
        ({**LLAMA, "decoder_sparse_step": 2}, None, None, "decoder_sparse_step is 2, supported: None, 1"),
        ({**LLAMA, "mlp_only_layers": [0]}, None, None, r"mlp_only_layers is \[0\], supported"),
        ({**LLAMA, "use_bidirectional_attention": True}, None, None, "use_bidirectional_attention is True"),
        ({**LLAMA, "num_key_value_heads": 3}, None, None, "4 query heads for 3 key heads"),
        ({k: v for k, v in LLAMA.items() if k != "hidden_size"}, None, None, "hidden_size is missing"),
    ],
    ids=[
        "GPT-2 without bias", "no head", "model type", "activation", "two settings",
        "quantized", "sliding window", "number of layers",
        "layer types", "sparse step", "MLP layers", "bidirectional",
        "key heads", "missing size",
    ],
)  # fmt: skip
def test_unsupported_models_are_rejected(config, blocks, names, text):
    with pytest.raises(CheckpointError, match=text):
        hf.WeightMap.build(config, blocks, names)


def test_config_json_is_read_and_validated(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    assert hf.read_config(tmp_path) == hf.read_config(tmp_path / "config.json") == hf.read_config(LLAMA)
    with pytest.raises(CheckpointError, match="not a readable config.json"):
        hf.read_config(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match="model without a description"):
        hf.read_config(None)
    plain = hf.read_config(LLAMA)
    assert (plain.head_dim, plain.tied, plain.norm_eps, plain.window) == (2, False, 1e-6, None)
    assert plain.te_rotary_kwargs() == {"dim": 2, "rotary_base": 10000.0, "interleaved": False}
    for rope in ({"rope_theta": 5e5}, {"rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}}):
        assert hf.read_config({**LLAMA, **rope}).te_rotary_kwargs()["rotary_base"] == 5e5
    scaled = {**LLAMA, "rope_scaling": {"type": "linear", "factor": 2.0}}
    with pytest.raises(CheckpointError, match="rope_scaling in config.json"):
        hf.read_config(scaled).te_rotary_kwargs()
    with pytest.raises(CheckpointError, match="learned positions"):
        hf.read_config(GPT2).te_rotary_kwargs()
    mistral = hf.read_config({**LLAMA, "model_type": "mistral", "sliding_window": 4})
    assert mistral.te_kwargs()["window_size"] == (3, 0)
    assert hf.read_config({**LLAMA, "model_type": "qwen2", "sliding_window": 4}).window is None
    both = {"rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}}
    both["rope_scaling"] = {"rope_theta": 7.0, "rope_type": "linear", "factor": 2.0}
    told = hf.read_config({**LLAMA, **both})  # transformers takes the older key
    assert (told.rope_theta, told.rope_scaling) == (7.0, {"rope_type": "linear", "factor": 2.0})
    by_layer = {kind: {"rope_theta": 50.0} for kind in ("full_attention", "sliding_attention")}
    assert hf.read_config({**LLAMA, "rope_parameters": by_layer}).rope_scaling == by_layer, "not plain"
    qwen3 = hf.read_config({**LLAMA, "model_type": "qwen3"})
    assert (qwen3.head_dim, qwen3.qk_norm, qwen3.qkv_bias) == (128, True, False)


@pytest.mark.parametrize(
    "name", [name for name in MODELS if name not in ("llama-tied-biased", "gpt2-untied")]
)
def test_config_defaults_match_transformers(name: str) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed (extra: test)")
    kind, _ = MODELS[name]
    stock = getattr(transformers, kind)()
    sizes = ["hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size"]
    sizes += [
        "num_experts",
        "num_local_experts",
        "moe_intermediate_size",
        "n_embd",
        "n_layer",
        "n_head",
        "n_positions",
    ]
    whole = stock.to_dict()
    bare = {key: whole[key] for key in [*sizes, "model_type"] if key in whole}
    assert len(bare) < len(whole) / 2, "most is left out"
    assert hf.read_config(bare) == hf.read_config(whole)


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({}, None),
        ({"rotary_base": 5e5}, "rotary_base: 500000.0, not 10000.0 (rotary)"),
        ({"interleaved": True}, "interleaved: True, not False (rotary)"),
        ({"seq_len_interpolation_factor": 2}, "seq_len_interpolation_factor: 2, not None (rotary)"),
    ],
    ids=str,
)
def test_rotary_embeddings_are_compared(settings, text):
    here = {"rotary": Semantics("RotaryPositionEmbedding", "te", {"rotary_base": 10000.0, **settings})}
    wrong = layer_differences(ModelDescription((), here, {}), hf.read_config(LLAMA), hf.TeNames())
    assert wrong == ([] if text is None else [text])


STRANGE = ("x", [1], {}, {"rope_theta": "x"}, -1, 0, 1e300, None, float("nan"), True, 2.5, [["a"]], 10**30)


@pytest.mark.parametrize("name", ["llama", "mistral", "qwen2-moe", "gemma", "mixtral", "gpt2"])
def test_invalid_config_values_raise_checkpoint_error(name: str) -> None:
    """Reading gives a description or CheckpointError. So does every value derived from it."""
    kind, told = MODELS[name]
    config = {"model_type": hf_name(kind), "intermediate_size": 64, "num_experts": 4, **told}
    keys = re.findall(r'get\("(\w+)"', inspect.getsource(huggingface_config))
    names = {
        *keys,
        *FAMILIES["gpt2"].keys.values(),
        "model_type",
        "hidden_act",
        "rope_type",
        "rope_parameters",
    }
    assert len(names) > 20
    refused = 0
    for key in sorted(names):
        for value in STRANGE:
            try:
                about = hf.read_config({**config, key: value})
            except CheckpointError:
                refused += 1
                continue
            for read in (about.te_attention_kwargs, about.te_kwargs, about.te_rotary_kwargs):
                with suppress(CheckpointError):
                    read()
    assert refused > 100
    with pytest.raises(
        CheckpointError, match=r"num_hidden_layers is 'x', expected an integer from 1 to 100000"
    ):
        hf.read_config({**LLAMA, "num_hidden_layers": "x"})
    with pytest.raises(CheckpointError, match=r"rope_theta is '7', expected a number"):
        hf.read_config({**LLAMA, "rope_parameters": {"rope_theta": "7"}})


def hf_name(kind: str) -> str:
    """Return ``model_type`` of a configuration's class."""
    words = re.findall("[A-Z][a-z]+[0-9]*|[A-Z]+[0-9]+", kind.removesuffix("Config"))
    return "gpt2" if words[0].startswith("GPT") else "_".join(words).lower()


LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_position_embeddings": 64}
BOTH = {"seq_len_interpolation_factor": 2, "pretrained_max_position_embeddings": 64}


@pytest.mark.parametrize("name", ["default", "linear", "llama3", "yarn", "dynamic"])
@pytest.mark.parametrize("base", [500.0, 1e6])
def test_rotary_frequencies_match_transformers(name: str, base: float) -> None:
    """Compare a model's actual frequencies. Unscaled ones are the negative control."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed (extra: test)")
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    more = {"linear": {"factor": 2.0}, "yarn": {"factor": 4.0}, "dynamic": {"factor": 4.0}, "llama3": LLAMA3}
    rope = {"rope_type": name, "rope_theta": base, **more.get(name, {})}
    sizes = {**LLAMA, "head_dim": 32, "max_position_embeddings": 64}
    config = transformers.LlamaConfig(**sizes, rope_parameters=rope)
    theirs = LlamaRotaryEmbedding(config).inv_freq
    plain = base ** -(torch.arange(0, 32, 2) / 32)
    one = Semantics("RotaryPositionEmbedding", "te", {"rotary_base": base})

    def wrong(frequencies: torch.Tensor, **settings: Any) -> list[str]:
        here = {"rotary": replace(one, settings={**one.settings, **settings})}
        about = hf.read_config({**sizes, "rope_parameters": rope})
        return layer_differences(ModelDescription((), here, {"rotary": frequencies}), about, hf.TeNames())

    assert bool(wrong(theirs)) == (name == "yarn"), "whose attention is scaled as well"
    assert bool(wrong(theirs.bfloat16())) == (name == "yarn")
    assert wrong(theirs * (1 + 1e-4)) and wrong(theirs[:-1]), "another one, as many"
    assert bool(wrong(plain)) == (name not in ("default", "dynamic"))
    assert bool(wrong(plain, **BOTH)) == (name != "linear")
    alone = wrong(plain, seq_len_interpolation_factor=2)
    assert bool(alone) == (name != "dynamic"), "which does not interpolate"
    assert wrong(theirs, interleaved=True)


def test_yarn_scaled_attention_is_rejected() -> None:
    """YaRN also scales attention scores, which frequencies cannot express. User-defined models are not checked."""
    rope = {"rope_type": "yarn", "factor": 4.0}
    about = hf.read_config({**LLAMA, "rope_scaling": rope})
    assert layer_differences(ModelDescription((), {}, {}), about, hf.TeNames()) == []
    here = {"other": Semantics("MultiheadAttention", "te", {})}
    (text,) = layer_differences(ModelDescription((), here, {}), about, hf.TeNames())
    assert text.startswith("attention: scaled by its heads alone, not as {'rope_type': 'yarn'")


@pytest.mark.parametrize("value", [None, "2", [2.0]], ids=str)
def test_rope_scaling_with_invalid_factor_is_rejected(value: Any) -> None:
    about = hf.read_config({**LLAMA, "rope_scaling": {"rope_type": "linear", "factor": value}})
    here = {"rotary": Semantics("RotaryPositionEmbedding", "te", {"rotary_base": 10000.0})}
    with pytest.raises(CheckpointError, match=r"rope_scaling in config.json: factor: expected a number"):
        layer_differences(ModelDescription((), here, {}), about, hf.TeNames())


def test_rope_scaling_is_compared_with_rotary_settings() -> None:
    """For a model without recorded frequencies, those that follow from its settings are compared."""
    scaled = hf.read_config({**LLAMA, "rope_scaling": {"rope_type": "linear", "factor": 2.0}})
    for more, is_right in (({}, False), (BOTH, True), ({**BOTH, "seq_len_interpolation_factor": 4}, False)):
        here = {"rotary": Semantics("RotaryPositionEmbedding", "te", {"rotary_base": 10000.0, **more})}
        result = layer_differences(ModelDescription((), here, {}), scaled, hf.TeNames())
        assert (result == []) == is_right
        assert (
            is_right or "not of the frequencies by {'rope_theta': 10000.0, 'rope_type': 'linear'" in result[0]
        )
