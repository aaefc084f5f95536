"""What a Hugging Face ``config.json`` says about a model, as far as weights and TransformerEngine need it.

Read without the ``transformers`` package. Keys and defaults are those of transformers 4.57 and 5.23
(``models/{llama,mistral,qwen2,qwen3,gpt2}/configuration_*.py``).
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from te_fsdp.errors import CheckpointError, message

__all__ = ["Architecture", "read_config"]

_LLAMA_STYLE = ("llama", "mistral", "qwen2", "qwen3")
_FAMILIES = (*_LLAMA_STYLE, "gpt2")


@dataclass(frozen=True)
class Architecture:
    """A decoder model of Llama's or GPT-2's style.

    Attributes:
        model_type: transformers' name of the family.
        style: ``"llama"`` (RMSNorm, rotary embedding, SwiGLU) or ``"gpt2"`` (LayerNorm, learned positions, GELU).
        layers: Number of layers.
        hidden: Width.
        ffn: Width inside the MLP.
        heads: Query heads.
        kv_heads: Key and value heads (GQA groups).
        head_dim: Width of a head.
        vocabulary: Rows of the embedding.
        positions: Rows of the learned position embedding; 0 with rotary embedding.
        norm_eps: Epsilon of all norms.
        qkv_bias: Whether query, key and value have biases.
        proj_bias: Whether the attention's output projection has one.
        mlp_bias: Whether the MLP's projections have biases.
        qk_norm: Whether query and key are normalised per head, before the rotary embedding.
        tied: Whether the head shares the embedding's weight.
        rope_theta: Base of the rotary embedding.
        rope_scaling: The rotary embedding's further settings; ``None`` for the plain one.
        window: Positions that a token attends to, itself included; ``None``: all before it.
        attention_dropout: Of attention probabilities.
        hidden_dropout: Of the branches' outputs.
    """

    model_type: str
    style: Literal["llama", "gpt2"]
    layers: int
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    positions: int
    norm_eps: float
    qkv_bias: bool
    proj_bias: bool
    mlp_bias: bool
    qk_norm: bool
    tied: bool
    rope_theta: float = 10000.0
    rope_scaling: Mapping[str, Any] | None = None
    window: int | None = None
    attention_dropout: float = 0.0
    hidden_dropout: float = 0.0

    def te_kwargs(self) -> dict[str, Any]:
        """Arguments of ``te.TransformerLayer`` for a layer that computes what the Hugging Face layer does.

        Add what is yours to choose: ``fuse_qkv_params``, ``zero_centered_gamma``, ``params_dtype``, parallelism.
        """
        llama = self.style == "llama"
        kwargs: dict[str, Any] = {
            "hidden_size": self.hidden,
            "ffn_hidden_size": self.ffn,
            "num_attention_heads": self.heads,
            "num_gqa_groups": self.kv_heads,
            "kv_channels": self.head_dim,
            "layernorm_epsilon": self.norm_eps,
            "hidden_dropout": self.hidden_dropout,
            "attention_dropout": self.attention_dropout,
            "normalization": "RMSNorm" if llama else "LayerNorm",
            "activation": "swiglu" if llama else "gelu",
            "bias": self.qkv_bias or self.proj_bias or self.mlp_bias,
            "self_attn_mask_type": "causal",
        }
        if self.qk_norm:
            kwargs |= {"qk_norm_type": "RMSNorm", "qk_norm_eps": self.norm_eps, "qk_norm_before_rope": True}
        if self.window is not None:
            kwargs["window_size"] = (self.window - 1, 0)
        return kwargs

    def te_rotary_kwargs(self) -> dict[str, Any]:
        """Arguments of TransformerEngine's ``RotaryPositionEmbedding``, whose result each layer takes.

        Raises:
            CheckpointError: No rotary embedding, or scaled frequencies, which that class does not compute.
        """
        if self.style != "llama" or self.rope_scaling is not None:
            raise CheckpointError(
                message(
                    "rope_scaling in config.json" if self.rope_scaling else f"{self.model_type} model",
                    expected="a rotary embedding of plain frequencies",
                    got=self.rope_scaling or "learned positions",
                    fix="compute the frequencies as the Hugging Face model does and pass them as rotary_pos_emb, shape "
                    "(sequence, 1, 1, head_dim): the angles of one half of a head, twice",
                )
            )
        return {"dim": self.head_dim, "rotary_base": self.rope_theta, "interleaved": False}


def read_config(source: str | os.PathLike[str] | Mapping[str, Any] | Any) -> Architecture:
    """Read a model's description. Local operation.

    Args:
        source: A folder with ``config.json``, that file, its contents, or a ``transformers`` configuration.

    Raises:
        CheckpointError: No such file, keys missing, or a model that computes something else than the supported
            families; all problems in one error.
    """
    config = _contents(source)
    family = config.get("model_type")
    if family not in _FAMILIES:
        raise CheckpointError(
            message("config.json: model_type", expected=f"one of {', '.join(_FAMILIES)}", got=repr(family))
        )
    problems = _unsupported(config)
    try:
        architecture = _gpt2(config) if family == "gpt2" else _llama(config)
    except KeyError as error:
        problems.append(f"{error.args[0]} is missing")
        architecture = None
    if architecture is not None and architecture.heads % architecture.kv_heads:
        problems.append(f"{architecture.heads} query heads for {architecture.kv_heads} key heads")
    if problems or architecture is None:
        raise CheckpointError(
            message(
                f"config.json of a {family} model: {'; '.join(problems)}",
                why="TransformerEngine's layer would compute something else",
            )
        )
    return architecture


def _contents(source: Any) -> Mapping[str, Any]:
    if isinstance(source, Mapping):
        return source
    if hasattr(source, "to_dict"):
        return source.to_dict()
    path = Path(source)
    path = path / "config.json" if path.is_dir() else path
    try:
        contents = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(message(f"{path}: not a readable config.json ({error})")) from error
    if not isinstance(contents, dict):
        raise CheckpointError(message(f"{path}: not a config.json", expected="a JSON object"))
    return contents


def _unsupported(config: Mapping[str, Any]) -> list[str]:
    """Settings with which the layer computes something that TransformerEngine's layer does not."""
    gpt2 = config["model_type"] == "gpt2"
    key, right = (
        ("activation_function", ("gelu_new", "gelu_pytorch_tanh")) if gpt2 else ("hidden_act", ("silu",))
    )
    problems = []
    if config.get(key, right[0]) not in right:
        problems.append(f"{key} is {config[key]!r}, supported: {', '.join(right)}")
    wanted = {
        "add_cross_attention": False,
        "scale_attn_by_inverse_layer_idx": False,
        "scale_attn_weights": True,
        "quantization_config": None,
    }
    problems += [
        f"{key} is {config[key]!r}, supported: {value!r}"
        for key, value in wanted.items()
        if config.get(key, value) != value
    ]
    kinds = set(config.get("layer_types") or ["full_attention"])
    if len(kinds) > 1:
        problems.append(f"layer_types are {', '.join(sorted(kinds))}, supported: one type for all layers")
    if config.get("use_sliding_window") and not config.get("layer_types"):
        problems.append("use_sliding_window without layer_types does not say which layers have the window")
    return problems


def _gpt2(config: Mapping[str, Any]) -> Architecture:
    hidden, heads = config["n_embd"], config["n_head"]
    return Architecture(
        model_type="gpt2",
        style="gpt2",
        layers=config["n_layer"],
        hidden=hidden,
        ffn=config.get("n_inner") or 4 * hidden,
        heads=heads,
        kv_heads=heads,
        head_dim=hidden // heads,
        vocabulary=config["vocab_size"],
        positions=config["n_positions"],
        norm_eps=config.get("layer_norm_epsilon", 1e-5),
        qkv_bias=True,
        proj_bias=True,
        mlp_bias=True,
        qk_norm=False,
        tied=config.get("tie_word_embeddings", True),
        attention_dropout=config.get("attn_pdrop", 0.1),
        hidden_dropout=config.get("resid_pdrop", 0.1),
    )


def _llama(config: Mapping[str, Any]) -> Architecture:
    family, hidden, heads = config["model_type"], config["hidden_size"], config["num_attention_heads"]
    default_head = 128 if family == "qwen3" else hidden // heads
    rope = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    theta = rope.pop("rope_theta", config.get("rope_theta", 10000.0))
    plain = rope.get("rope_type", rope.get("type", "default")) == "default"
    plain &= rope.get("partial_rotary_factor", 1.0) == 1.0
    bias = config.get("attention_bias", False) if family in ("llama", "qwen3") else family == "qwen2"
    windowed = family == "mistral"
    if config.get("layer_types"):
        windowed = config["layer_types"][0] == "sliding_attention"
    return Architecture(
        model_type=family,
        style="llama",
        layers=config["num_hidden_layers"],
        hidden=hidden,
        ffn=config["intermediate_size"],
        heads=heads,
        kv_heads=config.get("num_key_value_heads") or heads,
        head_dim=config.get("head_dim") or default_head,
        vocabulary=config["vocab_size"],
        positions=0,
        norm_eps=config.get("rms_norm_eps", 1e-6),
        qkv_bias=bias,
        proj_bias=bias and family != "qwen2",
        mlp_bias=config.get("mlp_bias", False) if family == "llama" else False,
        qk_norm=family == "qwen3",
        tied=config.get("tie_word_embeddings", False),
        rope_theta=theta,
        rope_scaling=None if plain else rope,
        window=config.get("sliding_window", 4096) if windowed else None,
        attention_dropout=config.get("attention_dropout", 0.0),
    )
