"""Whether a model's ``te.TransformerLayer`` compute what a Hugging Face model's layers do, beyond names and shapes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from te_fsdp import _te

if TYPE_CHECKING:
    from torch import nn

    from te_fsdp.checkpoint.portable.huggingface_config import Architecture

__all__ = ["layer_differences"]


def layer_differences(model: nn.Module, architecture: Architecture) -> list[str]:
    """Options of the layers with which the same weights would compute something else, in words. Local operation.

    Each is named once, with the first layer that has it. Dropout is the user's choice.
    """
    found: dict[str, str] = {}
    for name, layer in model.named_modules():
        if _te.kind_of(layer) == "TransformerLayer":
            for option, (now, wanted) in _options(layer, architecture).items():
                if now != wanted:
                    found.setdefault(option, f"{name}: {option} is {now}, not {wanted}")
    return list(found.values())


def _options(layer: Any, a: Architecture) -> dict[str, tuple[Any, Any]]:
    """Option of the layer -> its value, and the value that it should have."""
    kwargs, attention, mlp = a.te_kwargs(), layer.self_attention, layer.layernorm_mlp
    qkv = attention.layernorm_qkv
    options = {
        "num_attention_heads": (attention.num_attention_heads, a.heads),
        "num_gqa_groups": (attention.num_gqa_groups, a.kv_heads),
        "kv_channels": (attention.hidden_size_per_attention_head, a.head_dim),
        "normalization": (qkv.normalization, kwargs["normalization"]),
        "layernorm_epsilon": (qkv.eps, a.norm_eps),
        "activation": (mlp.activation, kwargs["activation"]),
        "self_attn_mask_type": (layer.self_attn_mask_type, "causal"),
        "window_size": (_window(layer.window_size), _window(kwargs.get("window_size"))),
        "qk_norm": (attention.q_norm is not None, a.qk_norm),
    }
    if a.style == "llama":
        options["rotary_pos_interleaved"] = (attention.rotary_pos_interleaved, False)
    if a.qk_norm and attention.q_norm is not None:
        options["qk_norm_before_rope"] = (attention.qk_norm_before_rope, True)
        options["qk_norm_eps"] = (attention.q_norm.eps, a.norm_eps)
    return options


def _window(size: tuple[int, int] | None) -> tuple[int, int]:
    """A causal layer's window; none is written in three ways."""
    return (-1, 0) if size is None or tuple(size) == (-1, -1) else tuple(size)  # type: ignore[return-value]
