"""What a Hugging Face ``config.json`` says about a model, as far as weights and TransformerEngine need it.

Read without the ``transformers`` package. Keys, defaults and rules are those of transformers 4.57 and 5.23
(``models/*/configuration_*.py``).
"""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from te_fsdp.checkpoint.lazy import Lazy
from te_fsdp.checkpoint.manifest import Kind, dtype_name
from te_fsdp.errors import CheckpointError


@dataclass(frozen=True)
class Experts:
    """The mixture of experts in a model's layers."""

    count: int  #: Of a layer
    ffn: int  #: Width inside one
    layers: frozenset[int]  #: Numbers of the layers that have experts; the others have a plain MLP
    shared_ffn: int = (
        0  #: Width inside the expert that all tokens pass, whose output has a gate; 0: there is none
    )


@dataclass(frozen=True)
class Architecture:
    """A decoder model of Llama's or GPT-2's style."""

    model_type: str  #: transformers' name of the family
    #: RMSNorm, rotary embedding, gated MLP; or LayerNorm, learned positions, GELU
    style: Literal["llama", "gpt2"]
    layers: int  #: Number of layers
    hidden: int  #: Width
    ffn: int  #: Width inside the MLP
    heads: int  #: Query heads
    kv_heads: int  #: Key and value heads (GQA groups)
    head_dim: int  #: Width of a head
    vocabulary: int  #: Rows of the embedding
    positions: int  #: Rows of the learned position embedding; 0 with rotary embedding
    norm_eps: float  #: Epsilon of all norms
    activation: str  #: TransformerEngine's name of the MLP's activation
    qkv_bias: bool  #: Whether query, key and value have biases
    proj_bias: bool  #: Whether the attention's output projection has one
    mlp_bias: bool  #: Whether the MLP's projections have biases
    qk_norm: bool  #: Whether query and key are normalised per head, before the rotary embedding
    tied: bool  #: Whether the head shares the embedding's weight
    zero_centered: bool = False  #: Whether the Hugging Face model stores its norms' weights minus one
    branch_norms: bool = False  #: Whether attention and MLP have a norm after them, too
    embedding_scale: float = 1.0  #: What embeddings are multiplied by before the first layer
    logit_cap: float | None = None  #: Cap of the logits, ``cap * tanh(logits / cap)``; ``None``: none
    experts: Experts | None = None  #: The layers' experts, if any
    rope_theta: float = 10000.0  #: Base of the rotary embedding
    rope_scaling: Mapping[str, Any] | None = None  #: Its further settings; ``None`` for the plain one
    window_rope_theta: float | None = None  #: Its base in layers with a window, where it is another one
    #: Of each layer: positions that a token attends to, itself included; ``None``: all before it
    windows: tuple[int | None, ...] = ()
    attention_dropout: float = 0.0  #: Of attention probabilities
    hidden_dropout: float = 0.0  #: Of the branches' outputs

    def is_sparse(self, layer: int) -> bool:
        """Whether a layer has experts instead of an MLP."""
        return self.experts is not None and layer in self.experts.layers

    def te_attention_kwargs(self, layer: int = 0) -> dict[str, Any]:
        """Arguments of ``te.MultiheadAttention`` for the attention of a layer, its norm included."""
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
        window = self.windows[layer] if self.windows else None
        return kwargs if window is None else {**kwargs, "window_size": (window - 1, 0)}

    def te_kwargs(self, layer: int = 0) -> dict[str, Any]:
        """Arguments of ``te.TransformerLayer`` for a layer that computes what the Hugging Face layer does.

        Add what is yours to choose: ``fuse_qkv_params``, ``zero_centered_gamma``, ``params_dtype``, parallelism.

        Raises:
            CheckpointError: The layer has experts, or norms after its branches.
        """
        sparse = self.is_sparse(layer)
        if sparse or self.branch_norms:
            raise CheckpointError(
                f"te.TransformerLayer for layer {layer} of a {self.model_type} model",
                why=f"It has no {'experts' if sparse else 'norms after attention and MLP'}",
                fix="build the layer of te.MultiheadAttention(**te_attention_kwargs(layer)) and te.RMSNorm, with "
                f"{'a router and two te.GroupedLinear' if sparse else 'te.LayerNormMLP'}, under TeNames' names",
            )
        kwargs = self.te_attention_kwargs(layer)
        del kwargs["input_layernorm"]
        mlp = {"ffn_hidden_size": self.ffn, "activation": self.activation}
        mask = {"self_attn_mask_type": kwargs.pop("attn_mask_type")}
        return kwargs | mlp | mask | {"hidden_dropout": self.hidden_dropout}

    def te_rotary_kwargs(self, layer: int = 0) -> dict[str, Any]:
        """Arguments of TransformerEngine's ``RotaryPositionEmbedding``, whose result each layer takes.

        Raises:
            CheckpointError: No rotary embedding, or scaled frequencies, which that class does not compute.
        """
        windowed = self.window_rope_theta is not None and self.windows[layer] is not None
        if self.style != "llama" or (self.rope_scaling is not None and not windowed):
            raise CheckpointError(
                "rope_scaling in config.json" if self.rope_scaling else f"{self.model_type} model",
                expected="a rotary embedding of plain frequencies",
                got=self.rope_scaling or "learned positions",
                fix="compute the frequencies as the Hugging Face model does and pass them as rotary_pos_emb, shape "
                "(sequence, 1, 1, head_dim): the angles of one half of a head, twice",
            )
        base = self.window_rope_theta if windowed else self.rope_theta
        return {"dim": self.head_dim, "rotary_base": base, "interleaved": False}


class Names(NamedTuple):
    """Hugging Face's names of a model's parts, here Llama's; ``.weight`` and ``.bias`` are added."""

    prefix: str = "model."
    embedding: str = "embed_tokens"
    layer: str = "layers.{}."
    attention_norm: str = "input_layernorm"
    qkv: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    proj: str = "self_attn.o_proj"
    #: Of families with ``branch_norms``: after attention, and after the MLP
    out_norms: tuple[str, str] = ("post_attention_layernorm", "post_feedforward_layernorm")
    mlp_norm: str = "post_attention_layernorm"
    fc1: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj")
    fc2: str = "mlp.down_proj"
    experts: str = "mlp."  #: Prefix of router and experts
    expert_fc1: tuple[str, ...] = ("gate_proj", "up_proj")
    expert_fc2: str = "down_proj"
    final_norm: str = "norm"


class _Family(NamedTuple):
    """A row of the table: what tells a family's models from Llama's."""

    defaults: Mapping[str, Any] = {}  #: What the configuration has where ``config.json`` says nothing
    always: Mapping[str, Any] = {}  #: What :class:`Architecture` has for all its models
    #: Key of ``config.json``, and its values with which TransformerEngine's activation is the model's
    activation: tuple[str, tuple[str, ...]] = ("hidden_act", ("silu", "swish"))
    names: Names = Names()
    experts: tuple[
        str, ...
    ] = ()  #: Keys of the number of experts and of their width, and of the shared expert's


# fmt: off
#: Files beside the weights that a copy of a model needs.
_BESIDE = (
    "generation_config.json", "tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt",
    "chat_template*", "LICENSE*",
)
_ATTENTIONS = ("full_attention", "sliding_attention")
_TANH = ("gelu_new", "gelu_pytorch_tanh")
#: Every layer has the window, if there is one.
_WINDOWED = {"sliding_window_pattern": 1_000_000}
_GEMMA = {"activation": "geglu", "zero_centered": True}
_BRANCHES = Names(mlp_norm="pre_feedforward_layernorm")
_GEMMA3 = {
    "tie_word_embeddings": True, "num_key_value_heads": 4, "query_pre_attn_scalar": 256, "sliding_window_pattern": 6,
}
_CAPS = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, "sliding_window_pattern": 2}
FAMILIES = {
    "llama": _Family(),
    "mistral": _Family({"num_key_value_heads": 8, "sliding_window": 4096, **_WINDOWED}),
    "mixtral": _Family(
        {"num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 1e6, "sliding_window": None, **_WINDOWED},
        names=Names(experts="block_sparse_moe.", expert_fc1=("w1", "w3"), expert_fc2="w2"),
        experts=("num_local_experts", "intermediate_size"),
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
    # Old files of Gemma say "gelu" and mean the approximation by tanh, as transformers knows.
    "gemma": _Family(
        {"tie_word_embeddings": True, "num_key_value_heads": 16}, _GEMMA, ("hidden_act", (*_TANH, "gelu"))
    ),
    "gemma2": _Family(
        _GEMMA3 | _CAPS, _GEMMA | {"branch_norms": True}, ("hidden_activation", _TANH), _BRANCHES
    ),
    "gemma3_text": _Family(
        _GEMMA3 | {"rope_theta": 1e6}, _GEMMA | {"branch_norms": True, "qk_norm": True},
        ("hidden_activation", _TANH), _BRANCHES,
    ),
    "gpt2": _Family(
        {
            "n_inner": None, "layer_norm_epsilon": 1e-5, "attn_pdrop": 0.1, "resid_pdrop": 0.1,
            "tie_word_embeddings": True,
        },
        {"style": "gpt2", "activation": "gelu", "qkv_bias": True, "proj_bias": True, "mlp_bias": True},
        ("activation_function", _TANH),
        Names(
            "transformer.", "wte", "h.{}.", "ln_1", ("attn.c_attn",), "attn.c_proj",
            mlp_norm="ln_2", fc1=("mlp.c_fc",), fc2="mlp.c_proj", final_norm="ln_f",
        ),
    ),
}
#: Llama's keys, and GPT-2's; what else a configuration of GPT-2 has is not Llama's.
_GPT2_KEYS = {
    **{key: key for key in ("model_type", "vocab_size", "n_positions", "resid_pdrop", "tie_word_embeddings")},
    "hidden_size": "n_embd", "num_hidden_layers": "n_layer", "num_attention_heads": "n_head",
    "intermediate_size": "n_inner", "rms_norm_eps": "layer_norm_epsilon", "attention_dropout": "attn_pdrop",
}


def _list_of(fits: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, (list, tuple)) and all(map(fits, value))


#: What is read of a configuration, by the kind of its values; keys with ``?`` may be null.
_KINDS = {
    key.rstrip("?"): Kind(f"{expected} or null", lambda value, fits=fits: value is None or fits(value))
    if key.endswith("?") else Kind(expected, fits)
    for expected, fits, keys in (
        ("a whole number from 1", lambda value: type(value) is int and value > 0,
         "hidden_size num_attention_heads vocab_size n_embd n_head n_positions num_local_experts num_experts "
         "moe_intermediate_size decoder_sparse_step sliding_window_pattern intermediate_size "
         "num_key_value_heads? head_dim? n_inner?"),
        ("a whole number from 1 to 100000", lambda value: type(value) is int and 0 < value <= 100_000,
         "num_hidden_layers n_layer"),
        ("a whole number from 0,", lambda value: type(value) is int and value >= 0, "sliding_window?"),
        ("a number", lambda value: type(value) in (int, float) and math.isfinite(value),
         "rms_norm_eps layer_norm_epsilon rope_theta rope_local_base_freq attention_dropout attn_pdrop resid_pdrop "
         "final_logit_softcapping? partial_rotary_factor?"),
        ("true, false", lambda value: type(value) is bool,
         "tie_word_embeddings? attention_bias? mlp_bias? qkv_bias? use_sliding_window?"),
        ("an object", lambda value: isinstance(value, Mapping),
         "rope_parameters? rope_scaling? full_attention? sliding_attention?"),
        ("a list of full_attention and sliding_attention", _list_of(_ATTENTIONS.__contains__), "layer_types?"),
        ("a list of numbers of layers", _list_of(lambda value: type(value) is int), "mlp_only_layers?"),
    )
    for key in keys.split()
}
# fmt: on


def read_config(source: str | os.PathLike[str] | Mapping[str, Any] | Any) -> Architecture:
    """Read a model's description: a folder with ``config.json``, that file, its contents, or a ``transformers`` one.

    Local operation.

    Raises:
        CheckpointError: No such file, keys missing, or a model that computes something else than the supported
            families; all problems in one error.
    """
    config = config_contents(source)
    named = config.get("model_type", "")
    family = FAMILIES.get(named) if isinstance(named, str) else None
    if family is None:
        got = repr(config.get("model_type"))
        raise CheckpointError("config.json: model_type", expected=f"one of {', '.join(FAMILIES)}", got=got)
    config = {**family.defaults, **config}
    problems, found = _of_other_kinds(config), None
    if not problems:
        problems = _unsupported(config, family)
        try:
            found = _architecture(config, family)
        except KeyError as error:
            problems.append(f"{error.args[0]} is missing")
    if found is not None and found.heads % found.kv_heads:
        problems.append(f"{found.heads} query heads for {found.kv_heads} key heads")
    if problems or found is None:
        raise CheckpointError(
            f"config.json of a {named} model: {'; '.join(problems)}",
            why="TransformerEngine's layer would compute something else",
        )
    return found


def config_contents(source: Any) -> Mapping[str, Any]:
    """The entries of a configuration, as :func:`read_config` takes it."""
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
    path = Path(source)
    path = path / "config.json" if path.is_dir() else path
    try:
        contents = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:  # deep nesting ends the recursion of the parser
        hub = "one of the Hugging Face hub is downloaded first: hf download NAME --local-dir FOLDER"
        fix = "" if path.exists() else f"the folder of a model, with config.json; {hub}"
        raise CheckpointError(f"{path}: not a readable config.json ({error})", fix=fix) from error
    if not isinstance(contents, dict):
        raise CheckpointError(f"{path}: not a config.json", expected="a JSON object")
    return contents


def write_config(folder: Path, config: Any, tensors: Mapping[str, Lazy]) -> list[str]:
    """Write ``config.json``, which tells the files' dtype, and copy what lies beside it; the files' names."""
    contents = dict(config_contents(config))
    dtypes = {dtype_name(tensor.dtype) for tensor in tensors.values()}
    if len(dtypes) == 1:
        contents["dtype" if "dtype" in contents else "torch_dtype"] = dtypes.pop()
    words = contents["model_type"].removesuffix("_text").split("_")
    kind = "GPT2LMHeadModel" if words == ["gpt2"] else "".join(map(str.capitalize, words)) + "ForCausalLM"
    contents["architectures"] = contents.get("architectures") or [kind]
    (folder / "config.json").write_text(json.dumps(contents, indent=2, default=str) + "\n", encoding="utf-8")
    names = ["config.json"]
    beside = Path(config) if isinstance(config, (str, os.PathLike)) and Path(config).is_dir() else None
    for path in (path for pattern in _BESIDE for path in (beside.glob(pattern) if beside else ())):
        if path.is_file():
            shutil.copyfile(path, folder / path.name)
            names.append(path.name)
    return names


def _of_other_kinds(config: Mapping[str, Any], where: str = "") -> list[str]:
    """Values that no configuration has under their keys."""
    found = []
    for key, value in config.items():
        kind = _KINDS.get(key)
        if kind is not None and not kind.fits(value):
            found.append(f"{where}{key} is {value!a:.60}, expected {kind.expected}")
        elif kind is not None and isinstance(value, Mapping):
            found += _of_other_kinds(value, f"{key}.")
    return found


def _unsupported(config: Mapping[str, Any], family: _Family) -> list[str]:
    """Settings with which the layer computes something that TransformerEngine's modules do not."""
    wanted: dict[str, tuple[Any, ...]] = {
        family.activation[0]: family.activation[1],
        "add_cross_attention": (False,),
        "scale_attn_by_inverse_layer_idx": (False,),
        "scale_attn_weights": (True,),
        "quantization_config": (None,),
        "attn_logit_softcapping": (None,),
        "use_bidirectional_attention": (None, False),
    }
    if "query_pre_attn_scalar" in family.defaults:
        wanted["query_pre_attn_scalar"] = (config.get("head_dim") or 256,)
    problems = [
        f"{key} is {config[key]!r}, supported: {', '.join(map(str, values))}"
        for key, values in wanted.items()
        if config.get(key, values[0]) not in values
    ]
    types = config.get("layer_types")
    if types and len(types) != config.get("num_hidden_layers"):
        problems.append(f"layer_types names {len(types)} layers, num_hidden_layers is another number")
    if config.get("use_sliding_window") and not types:
        problems.append("use_sliding_window without layer_types does not say which layers have the window")
    return problems


def _architecture(config: Mapping[str, Any], family: _Family) -> Architecture:
    gpt2, gemma = config["model_type"] == "gpt2", "zero_centered" in family.always
    if gpt2:
        config = {llamas: config[own] for llamas, own in _GPT2_KEYS.items()}
    hidden, heads, layers = config["hidden_size"], config["num_attention_heads"], config["num_hidden_layers"]
    theta, scaling, window_theta = _rope(config)
    bias = bool(config.get("attention_bias", False))
    values: dict[str, Any] = {
        "model_type": config["model_type"],
        "style": "llama",
        "layers": layers,
        "hidden": hidden,
        "ffn": config["intermediate_size"] or 4 * hidden,
        "heads": heads,
        "kv_heads": config.get("num_key_value_heads") or heads,
        "head_dim": config.get("head_dim") or (256 if gemma else hidden // heads),
        "vocabulary": config["vocab_size"],
        "positions": config["n_positions"] if gpt2 else 0,
        "norm_eps": config.get("rms_norm_eps", 1e-6),
        "activation": "swiglu",
        "qkv_bias": bool(config.get("qkv_bias", bias)),
        "proj_bias": bias,
        "mlp_bias": config["model_type"] == "llama" and config.get("mlp_bias", False),
        "qk_norm": False,
        "tied": config.get("tie_word_embeddings", False),
        "embedding_scale": hidden**0.5 if gemma else 1.0,
        "logit_cap": config.get("final_logit_softcapping"),
        "experts": _experts(config, *family.experts) if family.experts else None,
        "rope_theta": theta,
        "rope_scaling": scaling,
        "window_rope_theta": window_theta,
        "windows": _windows(config),
        "attention_dropout": config.get("attention_dropout", 0.0),
        "hidden_dropout": config["resid_pdrop"] if gpt2 else 0.0,
    }
    return Architecture(**{**values, **family.always})


def _rope(config: Mapping[str, Any]) -> tuple[float, Mapping[str, Any] | None, float | None]:
    """Base and scaling of the rotary embedding, and its base in layers with a window, where that differs."""
    rope, scaling = config.get("rope_parameters") or {}, config.get("rope_scaling") or {}
    window_theta = None
    if config["model_type"] == "gemma3_text":
        windowed = rope.get("sliding_attention") or {}
        window_theta = windowed.get("rope_theta", config.get("rope_local_base_freq", 10000.0))
        rope = {**(rope.get("full_attention", rope) or {}), **scaling}
    else:  # of both, transformers takes the older key
        rope = dict(scaling or rope)
    theta = rope.pop("rope_theta", config.get("rope_theta", 10000.0))
    plain = rope.get("rope_type", rope.get("type", "default")) == "default"
    plain &= rope.get("partial_rotary_factor", 1.0) == 1.0
    return theta, None if plain else rope, window_theta


def _windows(config: Mapping[str, Any]) -> tuple[int | None, ...]:
    types, size = config.get("layer_types"), config.get("sliding_window", 4096)
    if types is None:
        every = config.get("sliding_window_pattern", 1)
        types = [_ATTENTIONS[(n + 1) % every > 0] for n in range(config["num_hidden_layers"])]
    return tuple(size if kind == "sliding_attention" else None for kind in types)


def _experts(config: Mapping[str, Any], number: str, width: str, shared: str = "") -> Experts:
    # transformers 5 writes Qwen 3's number under Mixtral's key.
    count = config["num_local_experts"] if "num_local_experts" in config else config[number]
    step, dense = config.get("decoder_sparse_step", 1), config.get("mlp_only_layers") or ()
    layers = {n for n in range(config["num_hidden_layers"]) if n not in dense and (n + 1) % step == 0}
    return Experts(count, config[width], frozenset(layers), config.get(shared, 0))
