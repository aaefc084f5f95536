"""The model that a Hugging Face ``config.json`` describes.

Read without the ``transformers`` package. Keys, defaults and rules are those of transformers 4.57 and 5.23
(``models/*/configuration_*.py``).
"""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

from te_fsdp.checkpoint.lazy_tensors import Lazy
from te_fsdp.checkpoint.manifest import Kind, dtype_name
from te_fsdp.checkpoint.storage import expanded
from te_fsdp.errors import CheckpointError


@dataclass(frozen=True)
class Experts:
    """The mixture of experts in each of a model's layers."""

    count: int  #: Number of experts of a layer
    ffn: int  #: Width inside an expert
    #: Width inside the expert that all tokens pass, whose output has a gate; 0: there is none
    shared_ffn: int = 0


@dataclass(frozen=True)
class Architecture:
    """A decoder model of Llama's or GPT-2's style."""

    model_type: str  #: transformers' name of the family
    layers: int  #: Number of layers
    hidden: int  #: Width
    ffn: int  #: Width inside the MLP
    heads: int  #: Query heads
    kv_heads: int  #: Key and value heads (GQA groups)
    head_dim: int  #: Width of a head
    vocabulary: int  #: Rows of the embedding
    positions: int  #: Rows of the learned position embedding; 0 with rotary embedding
    norm_eps: float  #: Epsilon of all norms
    qkv_bias: bool  #: Whether query, key and value have biases
    proj_bias: bool  #: Whether the attention's output projection has one
    mlp_bias: bool  #: Whether the MLP's projections have biases
    tied: bool  #: Whether the head shares the embedding's weight
    #: RMSNorm, rotary embedding, gated MLP; or LayerNorm, learned positions, GELU
    style: Literal["llama", "gpt2"] = "llama"
    activation: str = "swiglu"  #: TransformerEngine's name of the MLP's activation
    qk_norm: bool = False  #: Whether query and key are normalised per head, before the rotary embedding
    zero_centered: bool = False  #: Whether the Hugging Face model stores its norms' weights minus one
    embedding_scale: float = 1.0  #: Factor of the embeddings before the first layer
    experts: Experts | None = None  #: The layers' experts, if any
    rope_theta: float = 10000.0  #: Base of the rotary embedding
    rope_scaling: Mapping[str, Any] | None = None  #: Its scaling; ``None`` for the plain one
    window: int | None = None  #: Positions that a token attends to, itself included; ``None``: all before it
    attention_dropout: float = 0.0  #: Dropout of attention probabilities
    hidden_dropout: float = 0.0  #: Dropout of the branches' outputs

    def te_attention_kwargs(self) -> dict[str, Any]:
        """Return arguments of ``te.MultiheadAttention`` for the attention of a layer, including its norm."""
        kwargs: dict[str, Any] = {
            "hidden_size": self.hidden,
            "num_attention_heads": self.heads,
            "num_gqa_groups": self.kv_heads,
            "kv_channels": self.head_dim,
            "layernorm_epsilon": self.norm_eps,
            "attention_dropout": self.attention_dropout,
            "normalization": "RMSNorm" if self.style == "llama" else "LayerNorm",
            "bias": self.qkv_bias or self.proj_bias or self.mlp_bias,
            "attn_mask_type": "causal",
            "input_layernorm": True,
        }
        if self.qk_norm:
            kwargs |= {"qk_norm_type": "RMSNorm", "qk_norm_eps": self.norm_eps, "qk_norm_before_rope": True}
        return kwargs if self.window is None else {**kwargs, "window_size": (self.window - 1, 0)}

    def te_kwargs(self) -> dict[str, Any]:
        """Return arguments of ``te.TransformerLayer`` for a layer with the function of the Hugging Face layer.

        Add your own choices: ``fuse_qkv_params``, ``zero_centered_gamma``, ``params_dtype``, parallelism.

        Raises:
            CheckpointError: The layers have experts.
        """
        if self.experts is not None:
            raise CheckpointError(
                f"te.TransformerLayer for a layer of a {self.model_type} model",
                why="It does not support experts",
                fix="build the layer from te.MultiheadAttention(**te_attention_kwargs()), te.RMSNorm, a router and "
                "two te.GroupedLinear, under TeNames' names",
            )
        kwargs = self.te_attention_kwargs()
        del kwargs["input_layernorm"]
        mlp = {"ffn_hidden_size": self.ffn, "activation": self.activation}
        mask = {"self_attn_mask_type": kwargs.pop("attn_mask_type")}
        return kwargs | mlp | mask | {"hidden_dropout": self.hidden_dropout}

    def te_rotary_kwargs(self) -> dict[str, Any]:
        """Return arguments of TransformerEngine's ``RotaryPositionEmbedding``, whose result each layer takes.

        Raises:
            CheckpointError: No rotary embedding, or scaled frequencies, which that class does not compute.
        """
        if self.style != "llama" or self.rope_scaling is not None:
            raise CheckpointError(
                "rope_scaling in config.json" if self.rope_scaling else f"{self.model_type} model",
                expected="a rotary embedding with unscaled frequencies",
                got=self.rope_scaling or "learned positions",
                fix="write its frequencies into inv_freq of RotaryPositionEmbedding(head_dim, rotary_base=rope_theta)",
            )
        return {"dim": self.head_dim, "rotary_base": self.rope_theta, "interleaved": False}


class Names(NamedTuple):
    """Hugging Face's names of a model's parts, here Llama's; ``.weight`` and ``.bias`` are added."""

    prefix: str = "model."
    embedding: str = "embed_tokens"
    layer: str = "layers.{}."
    attention_norm: str = "input_layernorm"
    qkv: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    proj: str = "self_attn.o_proj"
    mlp_norm: str = "post_attention_layernorm"
    fc1: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj")
    fc2: str = "mlp.down_proj"
    experts: str = "mlp."  #: Prefix of router and experts
    expert_fc1: tuple[str, ...] = ("gate_proj", "up_proj")
    expert_fc2: str = "down_proj"
    final_norm: str = "norm"


_REQUIRED: Any = object()


class _Family(NamedTuple):
    """A row of the table: differences between a family's models and Llama's."""

    defaults: Mapping[str, Any] = {}  #: Defaults of keys that ``config.json`` lacks
    always: Mapping[str, Any] = {}  #: Fields of :class:`Architecture` that all its models share
    #: The model's activations that TransformerEngine's activation computes
    activations: tuple[str, ...] = ("silu", "swish")
    names: Names = Names()
    #: Keys of the number of experts and of their width, and of the shared expert's
    experts: tuple[str, ...] = ()
    windowed: bool = False  #: Whether the layers have the window, if there is one
    keys: Mapping[str, str] = {}  #: Keys of ``config.json`` by Llama's names, if they differ

    def get(self, entries: Mapping[str, Any], key: str, kind: Kind, default: Any = _REQUIRED) -> Any:
        """Return the value of Llama's key, or ``default`` for ``null``; ValueError if it is missing or invalid."""
        own = self.keys.get(key, key)
        value = entries.get(own, self.defaults.get(key, default))
        value = default if value is None else value
        if value is _REQUIRED:
            raise ValueError(f"{own} is missing")
        if value is not default and not kind.fits(value):
            raise ValueError(f"{own} is {value!a:.60}, expected {kind.expected}")
        return value


# fmt: off
#: Files next to the weights that a copy of a model needs.
_COMPANIONS = (
    "generation_config.json", "tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt",
    "chat_template*", "LICENSE*",
)
_TANH = ("gelu_new", "gelu_pytorch_tanh")
FAMILIES = {
    "llama": _Family(),
    "mistral": _Family({"num_key_value_heads": 8, "sliding_window": 4096}, windowed=True),
    "mixtral": _Family(
        {"num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 1e6},
        names=Names(experts="block_sparse_moe.", expert_fc1=("w1", "w3"), expert_fc2="w2"),
        experts=("num_local_experts", "intermediate_size"), windowed=True,
    ),
    "qwen2": _Family({"num_key_value_heads": 32, "qkv_bias": True}, {"proj_bias": False}),
    "qwen2_moe": _Family(
        {"num_key_value_heads": 16, "qkv_bias": True, "shared_expert_intermediate_size": 5632}, {"proj_bias": False},
        experts=("num_experts", "moe_intermediate_size", "shared_expert_intermediate_size"),
    ),
    "qwen3": _Family({"num_key_value_heads": 32, "head_dim": 128}, {"qk_norm": True}),
    "qwen3_moe": _Family(
        {"num_key_value_heads": 4}, {"qk_norm": True}, experts=("num_experts", "moe_intermediate_size")
    ),
    # Old files of Gemma contain "gelu" for the approximation by tanh. transformers reads them in the same way.
    "gemma": _Family(
        {"tie_word_embeddings": True, "num_key_value_heads": 16, "head_dim": 256},
        {"activation": "geglu", "zero_centered": True}, (*_TANH, "gelu"),
    ),
    "gpt2": _Family(
        {"rms_norm_eps": 1e-5, "attention_dropout": 0.1, "resid_pdrop": 0.1, "tie_word_embeddings": True},
        {"style": "gpt2", "activation": "gelu", "qkv_bias": True, "proj_bias": True, "mlp_bias": True}, _TANH,
        Names(
            "transformer.", "wte", "h.{}.", "ln_1", ("attn.c_attn",), "attn.c_proj",
            mlp_norm="ln_2", fc1=("mlp.c_fc",), fc2="mlp.c_proj", final_norm="ln_f",
        ),
        keys={
            "hidden_size": "n_embd", "num_hidden_layers": "n_layer", "num_attention_heads": "n_head",
            "intermediate_size": "n_inner", "rms_norm_eps": "layer_norm_epsilon", "attention_dropout": "attn_pdrop",
            "hidden_act": "activation_function",
        },
    ),
}
# fmt: on
_WHOLE = Kind("an integer of at least 1", lambda value: type(value) is int and value > 0)
_LAYERS = Kind("an integer from 1 to 100000", lambda value: type(value) is int and 0 < value <= 100_000)
_NUMBER = Kind("a number", lambda value: type(value) in (int, float) and math.isfinite(value))
_FLAG = Kind("true or false", lambda value: type(value) is bool)
_OBJECT = Kind("an object", lambda value: isinstance(value, Mapping))


def read_config(source: str | os.PathLike[str] | Mapping[str, Any] | Any) -> Architecture:
    """Read a model's description: a folder with ``config.json``, that file, its contents, or transformers' object.

    Local operation.

    Raises:
        CheckpointError: The file or keys are missing, or the model computes a different function than the supported
            families.
    """
    entries = config_contents(source)
    model_type = entries.get("model_type")
    family = FAMILIES.get(model_type) if isinstance(model_type, str) else None
    if family is None:
        expected = f"one of {', '.join(FAMILIES)}"
        raise CheckpointError("config.json: model_type", expected=expected, got=repr(model_type))
    supported: dict[str, tuple[Any, ...]] = {
        family.keys.get("hidden_act", "hidden_act"): family.activations,
        "add_cross_attention": (False,),
        "scale_attn_by_inverse_layer_idx": (False,),
        "scale_attn_weights": (True,),
        "quantization_config": (None,),
        "use_bidirectional_attention": (None, False),
        # With these, some layers would differ from the rest.
        "use_sliding_window": (None, False),
        "mlp_only_layers": (None, []),
        "decoder_sparse_step": (None, 1),
    }
    problems = [
        f"{key} is {entries[key]!r}, supported: {', '.join(map(str, values))}"
        for key, values in supported.items()
        if entries.get(key, values[0]) not in values
    ]
    result = None
    try:
        result = _architecture(entries, family, str(model_type))
    except ValueError as error:
        problems.append(str(error))
    if problems or result is None:
        raise CheckpointError(
            f"config.json of a {model_type} model: {'; '.join(problems)}",
            why="TransformerEngine's layer would compute a different function",
        )
    return result


def config_contents(source: Any) -> Mapping[str, Any]:
    """Return the entries of a configuration, as for :func:`read_config`."""
    if isinstance(source, Mapping):
        return source
    if hasattr(source, "to_dict"):
        return source.to_dict()
    if not isinstance(source, (str, os.PathLike)):
        raise CheckpointError(
            "Hugging Face model without a description",
            expected="a folder with config.json, or config=...",
            fix="pass config=model.config, or the folder that the model came from",
        )
    path = expanded(source)
    path = path / "config.json" if path.is_dir() else path
    try:
        contents = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(contents, dict):
            raise ValueError("not a JSON object")
    except (OSError, ValueError, RecursionError) as error:  # deep nesting ends the recursion of the parser
        hub = "download a model of the Hugging Face hub first: hf download NAME --local-dir FOLDER"
        is_other = not path.exists() or path.suffix != ".json"
        fix = f"pass the folder of a model, with config.json; {hub}" if is_other else ""
        raise CheckpointError(f"{path}: not a readable config.json ({error})", fix=fix) from error
    return contents


def write_config(
    folder: Path, config: Any, tensors: Mapping[str, Lazy], quantization: Mapping[str, Any] | None = None
) -> list[str]:
    """Write ``config.json`` with the files' dtype, and copy the files next to the original; return the names.

    ``quantization`` describes FP8 weights, whose dtype is that of the other tensors, bf16.
    """
    contents = dict(config_contents(config))
    dtypes = {dtype_name(tensor.dtype) for tensor in tensors.values()}
    if quantization is not None:
        contents["quantization_config"], dtypes = quantization, {"bfloat16"}
    if len(dtypes) == 1:
        contents["dtype" if "dtype" in contents else "torch_dtype"] = dtypes.pop()
    (folder / "config.json").write_text(json.dumps(contents, indent=2, default=str) + "\n", encoding="utf-8")
    names = ["config.json"]
    if isinstance(config, (str, os.PathLike)):  # only a folder has companions
        original = expanded(config)
        original = original if original.is_dir() else original.parent
        for path in (p for pattern in _COMPANIONS for p in original.glob(pattern) if p.is_file()):
            shutil.copyfile(path, folder / path.name)
            names.append(path.name)
    return names


def _architecture(entries: Mapping[str, Any], family: _Family, model_type: str) -> Architecture:
    """Return the description of a model; raise ValueError for missing, invalid or contradictory keys."""
    get = partial(family.get, entries)
    hidden, layers = get("hidden_size", _WHOLE), get("num_hidden_layers", _LAYERS)
    heads, bias = get("num_attention_heads", _WHOLE), get("attention_bias", _FLAG, False)
    kv_heads = get("num_key_value_heads", _WHOLE, heads)
    if heads % kv_heads:
        raise ValueError(f"{heads} query heads for {kv_heads} key heads")
    gpt2 = family.always.get("style") == "gpt2"
    attention = "sliding_attention" if family.windowed else "full_attention"
    if entries.get("layer_types") not in (None, [attention] * layers):
        raise ValueError(f"layer_types has types other than {attention}, or a different number of layers")
    # If both exist, transformers takes the older key.
    rope = get("rope_scaling", _OBJECT, None) or get("rope_parameters", _OBJECT, None) or {}
    theta = family.get({**entries, **rope}, "rope_theta", _NUMBER, 10000.0)
    plain = {"rope_type": "default", "type": "default", "partial_rotary_factor": 1.0, "rope_theta": theta}
    scaling = {key: value for key, value in rope.items() if plain.get(key, _REQUIRED) != value} or None
    experts = None
    if family.experts:
        number, width, *shared = family.experts
        # transformers 5 writes Qwen 3's number under Mixtral's key.
        count = get("num_local_experts", _WHOLE, None) or get(number, _WHOLE)
        experts = Experts(count, get(width, _WHOLE), get(shared[0], _WHOLE, 0) if shared else 0)
    values: dict[str, Any] = {
        "model_type": model_type,
        "layers": layers,
        "hidden": hidden,
        "ffn": get("intermediate_size", _WHOLE, 4 * hidden if gpt2 else _REQUIRED),
        "heads": heads,
        "kv_heads": kv_heads,
        "head_dim": get("head_dim", _WHOLE, hidden // heads),
        "vocabulary": get("vocab_size", _WHOLE),
        "positions": get("n_positions", _WHOLE) if gpt2 else 0,
        "norm_eps": get("rms_norm_eps", _NUMBER, 1e-6),
        "qkv_bias": get("qkv_bias", _FLAG, bias),
        "proj_bias": bias,
        "mlp_bias": model_type == "llama" and get("mlp_bias", _FLAG, False),
        "tied": get("tie_word_embeddings", _FLAG, False),
        "embedding_scale": hidden**0.5 if "zero_centered" in family.always else 1.0,
        "experts": experts,
        "rope_theta": theta,
        "rope_scaling": scaling,
        "window": get("sliding_window", _WHOLE, None) if family.windowed else None,
        "attention_dropout": get("attention_dropout", _NUMBER, 0.0),
        "hidden_dropout": get("resid_pdrop", _NUMBER, 0.0) if gpt2 else 0.0,
    }
    return Architecture(**{**values, **family.always})
