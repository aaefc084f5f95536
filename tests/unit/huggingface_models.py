"""Small Hugging Face models with random weights, and the same models out of ``te.TransformerLayer``."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from te_fsdp.checkpoint.portable import huggingface as hf

SIZES = {"vocab_size": 40, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 16}
SIZES |= {"bos_token_id": 0, "eos_token_id": 1, "attn_implementation": "eager"}
GPT2 = {"vocab_size": 40, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 16}
GPT2 |= {"bos_token_id": 0, "eos_token_id": 1, "attn_implementation": "eager"}

#: Class of the configuration, and its settings.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {**SIZES, "rms_norm_eps": 1e-5, "rope_theta": 500.0}),
    "llama-tied-biased": (
        "LlamaConfig",
        {**SIZES, "tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True},
    ),
    "llama-attention-bias": ("LlamaConfig", {**SIZES, "attention_bias": True}),
    "mistral": ("MistralConfig", {**SIZES, "sliding_window": 3}),
    "qwen2": ("Qwen2Config", {**SIZES, "tie_word_embeddings": True}),
    # Heads wider than the model's width over their number.
    "qwen3": ("Qwen3Config", {**SIZES, "head_dim": 16}),
    "gpt2": ("GPT2Config", GPT2),
    "gpt2-untied": ("GPT2Config", {**GPT2, "tie_word_embeddings": False, "n_inner": 40}),
}


def make_huggingface(name: str, seed: int = 0) -> nn.Module:
    """A model whose every parameter matters: large weights, gammas and biases that differ."""
    import transformers

    kind, settings = MODELS[name]
    config = getattr(transformers, kind)(**settings)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if parameter.ndim == 2:
                parameter.normal_(0.0, 0.25, generator=generator)
            elif key.endswith("bias"):
                parameter.normal_(0.0, 0.3, generator=generator)
            else:  # the range in which zero-centering is exact
                parameter.uniform_(0.5, 2.0, generator=generator)
    return model


class TeModel(nn.Module):
    """The model of an :class:`~te_fsdp.checkpoint.portable.huggingface.Architecture`, batch first."""

    def __init__(self, te: Any, a: hf.Architecture, *, device: str = "cpu", **layer: Any) -> None:
        super().__init__()
        gamma = layer.get("zero_centered_gamma", False)
        options = {
            **a.te_kwargs(),
            "hidden_dropout": 0.0,
            "attention_dropout": 0.0,
            "device": device,
            **layer,
        }
        self.embedding = nn.Embedding(a.vocabulary, a.hidden, device=device)
        self.positions = nn.Embedding(a.positions, a.hidden, device=device) if a.positions else None
        self.layers = nn.ModuleList(
            te.TransformerLayer(**options, attn_input_format="bshd") for _ in range(a.layers)
        )
        norm = te.RMSNorm if a.style == "llama" else te.LayerNorm
        self.norm = norm(a.hidden, eps=a.norm_eps, zero_centered_gamma=gamma, device=device)
        self.head = nn.Linear(a.hidden, a.vocabulary, bias=False, device=device)
        if a.tied:
            self.head.weight = self.embedding.weight
        if a.style == "llama":
            from transformer_engine.pytorch.attention import RotaryPositionEmbedding

            self.rotary = RotaryPositionEmbedding(**a.te_rotary_kwargs())

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Tokens (b, s) -> logits (b, s, vocabulary)."""
        x, length = self.embedding(tokens), tokens.shape[1]
        if self.positions is not None:
            x = x + self.positions.weight[:length]
        angles = None if self.positions is not None else self.rotary(length)
        for layer in self.layers:
            x = layer(x, rotary_pos_emb=angles)
        return self.head(self.norm(x))
