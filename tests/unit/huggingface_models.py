"""Small Hugging Face models with random weights, also out of ``te.TransformerLayer``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from te_fsdp.checkpoint.portable import huggingface as hf

SIZES = {"vocab_size": 40, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 16}
SIZES |= {"bos_token_id": 0, "eos_token_id": 1, "attn_implementation": "eager"}
GPT2 = {"vocab_size": 40, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 16}
GPT2 |= {"bos_token_id": 0, "eos_token_id": 1, "attn_implementation": "eager"}

EAGER = {"experts_implementation": "eager"}  # the other ones do not do float64
MOE = {**EAGER, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}

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
    # Norms' weights minus one, embeddings scaled.
    "gemma": ("GemmaConfig", {**SIZES, "rms_norm_eps": 1e-5}),
    "mixtral": ("MixtralConfig", {**SIZES, **EAGER, "num_local_experts": 4, "num_experts_per_tok": 2}),
    # A shared expert with a gate.
    "qwen2-moe": (
        "Qwen2MoeConfig",
        {**SIZES, **MOE, "shared_expert_intermediate_size": 40},
    ),
    "qwen3-moe": ("Qwen3MoeConfig", {**SIZES, **MOE, "head_dim": 16, "norm_topk_prob": True}),
    "gpt2": ("GPT2Config", GPT2),
    "gpt2-untied": ("GPT2Config", {**GPT2, "tie_word_embeddings": False, "n_inner": 40}),
}


def make_huggingface(name: str, seed: int = 0) -> nn.Module:
    """Create a model in which every parameter affects the output: large weights, different gammas and biases."""
    import transformers

    kind, settings = MODELS[name]
    config = getattr(transformers, kind)(**settings)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if parameter.ndim >= 2:
                parameter.normal_(0.0, 0.25, generator=generator)
            elif key.endswith("bias"):
                parameter.normal_(0.0, 0.3, generator=generator)
            else:  # the range in which zero-centering is exact
                parameter.uniform_(0.5, 2.0, generator=generator).sub_(float("Gemma" in kind))
    return model


class Experts(nn.Module):
    """Two grouped layers with SwiGLU between them.

    Attributes:
        exchange: Takes rows to the ranks that have their experts, and back; ``None``: all experts are here.
    """

    exchange: Any = None

    def __init__(self, te: Any, hidden: int, ffn: int, experts: int, **kwargs: Any) -> None:
        super().__init__()
        self.fc1 = te.GroupedLinear(experts, hidden, 2 * ffn, bias=False, **kwargs)
        self.fc2 = te.GroupedLinear(experts, ffn, hidden, bias=False, **kwargs)

    def forward(self, rows: torch.Tensor, counts: list[int]) -> torch.Tensor:
        """Concatenate rows of the experts, this number of rows each."""
        return self.own(rows, counts) if self.exchange is None else self.exchange(self.own, rows, counts)

    def own(self, rows: torch.Tensor, counts: list[int]) -> torch.Tensor:
        """Return the same, of the experts that are here."""
        gate, up = self.fc1(rows, counts).chunk(2, -1)
        return self.fc2(nn.functional.silu(gate) * up, counts)


class SharedExpert(nn.Module):
    """The expert that processes all tokens."""

    def __init__(self, te: Any, hidden: int, ffn: int, **kwargs: Any) -> None:
        super().__init__()
        self.fc1 = te.Linear(hidden, 2 * ffn, bias=False, **kwargs)
        self.fc2 = te.Linear(ffn, hidden, bias=False, **kwargs)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute SwiGLU."""
        gate, up = self.fc1(x).chunk(2, -1)
        return self.fc2(nn.functional.silu(gate) * up)


class OwnLayer(nn.Module):
    """A layer with experts, which ``te.TransformerLayer`` does not support."""

    def __init__(self, te: Any, a: hf.Architecture, layer: int, config: Any, **kwargs: Any) -> None:
        super().__init__()
        own = {key: kwargs.pop(key) for key in ("fuse_qkv_params", "qkv_weight_interleaved") if key in kwargs}
        gamma = {"zero_centered_gamma": kwargs.pop("zero_centered_gamma", False)}
        self.own_experts = kwargs.pop("own_experts", None)
        attention = {**a.te_attention_kwargs(), "attention_dropout": 0.0, **own, **gamma, **kwargs}
        self.self_attention = te.MultiheadAttention(**attention, qkv_format="bshd")
        plain = {key: kwargs[key] for key in ("device", "params_dtype") if key in kwargs}

        def norm() -> nn.Module:
            dtype = {"dtype": plain["params_dtype"]} if "params_dtype" in plain else {}
            return te.RMSNorm(a.hidden, eps=a.norm_eps, device=plain["device"], **dtype, **gamma)

        self.shared_expert = None
        self.mlp_norm = norm()
        self.router = nn.Linear(a.hidden, a.experts.count, bias=False, device=plain["device"])
        self.top, self.normalised = config.num_experts_per_tok, getattr(config, "norm_topk_prob", True)
        self.experts = Experts(te, a.hidden, a.experts.ffn, self.own_experts or a.experts.count, **plain)
        if a.experts.shared_ffn:
            self.shared_expert = SharedExpert(te, a.hidden, a.experts.shared_ffn, **plain)
            self.shared_expert_gate = nn.Linear(a.hidden, 1, bias=False, device=plain["device"])

    def forward(self, x: torch.Tensor, rotary_pos_emb: torch.Tensor) -> torch.Tensor:
        """Map (b, s, hidden) to the same shape."""
        x = x + self.self_attention(x, rotary_pos_emb=rotary_pos_emb)
        rows = self.mlp_norm(x).flatten(0, 1)
        out = self.routed(rows)
        if self.shared_expert is not None:
            out = out + torch.sigmoid(self.shared_expert_gate(rows)) * self.shared_expert(rows)
        return x + out.view_as(x)

    def routed(self, rows: torch.Tensor) -> torch.Tensor:
        """Run each row through its experts."""
        weights, chosen = torch.softmax(self.router(rows).float(), -1).topk(self.top)
        if self.normalised:
            weights = weights / weights.sum(-1, keepdim=True)
        order = chosen.flatten().argsort(stable=True)
        counts = torch.bincount(chosen.flatten(), minlength=self.router.out_features).tolist()
        out = self.experts(rows[order // self.top], counts)
        scaled = out * weights.flatten()[order].unsqueeze(1).to(out.dtype)
        return torch.zeros_like(rows).index_add(0, order // self.top, scaled)


class TeModel(nn.Module):
    """The model of an :class:`~te_fsdp.checkpoint.portable.huggingface.Architecture`, batch first."""

    def __init__(
        self, te: Any, a: hf.Architecture, *, config: Any = None, device: str = "cpu", **layer: Any
    ) -> None:
        super().__init__()
        gamma = layer.get("zero_centered_gamma", False)
        self.a = a
        place: dict[str, Any] = {"device": device, "dtype": layer.get("params_dtype")}
        self.embedding = nn.Embedding(a.vocabulary, a.hidden, **place)
        self.positions = nn.Embedding(a.positions, a.hidden, **place) if a.positions else None
        self.layers = nn.ModuleList(
            self.layer(te, n, config, {"device": device, **layer}) for n in range(a.layers)
        )
        norm = te.RMSNorm if a.style == "llama" else te.LayerNorm
        self.norm = norm(a.hidden, eps=a.norm_eps, zero_centered_gamma=gamma, **place)
        self.head = nn.Linear(a.hidden, a.vocabulary, bias=False, **place)
        if a.tied:
            self.head.weight = self.embedding.weight
        if a.style == "llama":
            from transformer_engine.pytorch.attention import RotaryPositionEmbedding

            self.rotary = RotaryPositionEmbedding(**a.te_rotary_kwargs())

    def layer(self, te: Any, n: int, config: Any, options: dict[str, Any]) -> nn.Module:
        """Return a layer, stock where TransformerEngine has it."""
        a = self.a
        if a.experts is not None:
            return OwnLayer(te, a, n, config, **options)
        options.pop("own_experts", None)
        kwargs = {**a.te_kwargs(), "hidden_dropout": 0.0, "attention_dropout": 0.0, **options}
        return te.TransformerLayer(**kwargs, attn_input_format="bshd")

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Map tokens (b, s) to logits (b, s, vocabulary)."""
        x, length = self.embedding(tokens) * self.a.embedding_scale, tokens.shape[1]
        if self.positions is not None:
            x = x + self.positions(torch.arange(length, device=tokens.device))
        angles = None if self.positions is not None else self.rotary(length)
        for layer in self.layers:
            x = layer(x, rotary_pos_emb=angles)
        return self.head(self.norm(x))


def to_te(weights: hf.WeightMap, source: Any, **options: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Return tensors of the TransformerEngine model."""
    return ((name, lazy.full()) for name, lazy in weights.lazily(source, to_te=True, **options).items())


def to_huggingface(weights: hf.WeightMap, source: Any, **options: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Return tensors of the Hugging Face model."""
    return ((name, lazy.full()) for name, lazy in weights.lazily(source, to_te=False, **options).items())
