"""Models that a configuration builds out of TransformerEngine's modules: Llama, ESM-2, Mixtral.

Their structure is that of public recipes: packed sequences and rotary frequencies that are computed on meta; padding
masks and a tied head with a bias; experts of a grouped layer, or stacked in one parameter for each projection.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from checkpointing.huggingface import dispatch_to_experts
from torch import nn
from torch.distributed.tensor import DTensor, Shard
from torch.nn import functional as F

VOCABULARY, PADDING, IGNORED = 48, 1, -100


def initializers(std: float) -> dict[str, Any]:
    """Return how layers draw their weights."""
    normal = partial(nn.init.normal_, mean=0.0, std=std)
    return {"init_method": normal, "output_layer_init_method": normal}


class Rotary(nn.Module):
    """Angles of the rotary embedding. The frequencies are a buffer that no checkpoint contains."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.register_buffer("inv_freq", 100.0 ** -(torch.arange(0, width, 2) / width), persistent=False)

    def forward(self, length: int) -> torch.Tensor:
        angles = torch.outer(torch.arange(length, device=self.inv_freq.device), self.inv_freq)
        return torch.cat([angles, angles], dim=-1)[:, None, None]


class Base(nn.Module):
    """Common parts of the three models. ``state_dict`` leaves out ``_extra_state``, as recipes do."""

    layers: nn.ModuleList

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            module.weight.data.normal_(mean=0.0, std=0.2)
            if isinstance(module, nn.Linear) and module.bias is not None:
                module.bias.data.zero_()
            if isinstance(module, nn.Embedding) and module.padding_idx is not None:
                module.weight.data[module.padding_idx].zero_()

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        result = super().state_dict(*args, **kwargs)
        return {name: value for name, value in result.items() if not name.endswith("_extra_state")}

    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        return super().load_state_dict(state_dict, strict=False, assign=assign)


def loss_of(logits: torch.Tensor, labels: torch.Tensor, total: int) -> torch.Tensor:
    """Return the sum of the cross entropy of labels that count, over a number of labels."""
    return (
        F.cross_entropy(
            logits.flatten(0, -2).float(), labels.flatten(), ignore_index=IGNORED, reduction="sum"
        )
        / total
    )


class Llama(Base):
    """Packed sequences: (tokens of all sequences,) and their bounds."""

    def __init__(self, config: dict[str, Any], **layer: Any) -> None:
        super().__init__()
        import transformer_engine.pytorch as te

        width, heads = config["width"], config["heads"]
        place = {"device": layer["device"], "dtype": layer["params_dtype"]}
        self.embed_tokens = nn.Embedding(VOCABULARY, width, **place)
        self.layers = nn.ModuleList(
            te.TransformerLayer(
                width,
                2 * width,
                heads,
                num_gqa_groups=heads // 2,
                activation="swiglu",
                normalization="RMSNorm",
                bias=False,
                hidden_dropout=0.0,
                attention_dropout=0.0,
                fuse_qkv_params=True,
                **initializers(config["std"]),
                attn_input_format="thd",
                self_attn_mask_type="padding_causal",
                layer_number=number + 1,
                **layer,
            )
            for number in range(config["layers"])
        )
        self.norm = te.RMSNorm(width, **place)
        self.lm_head = nn.Linear(width, VOCABULARY, bias=False, **place)
        if config["tied"]:
            self.lm_head.weight = self.embed_tokens.weight
        self.rotary_emb = Rotary(width // heads)

    def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        x, bounds = self.embed_tokens(batch["tokens"]), batch["bounds"]
        longest = int(bounds.diff().max())
        packed = {"cu_seqlens_q": bounds, "cu_seqlens_kv": bounds}
        packed |= {"max_seqlen_q": longest, "max_seqlen_kv": longest}
        angles = self.rotary_emb(longest)
        for layer in self.layers:
            x = layer(x, rotary_pos_emb=angles, **packed)
        return self.lm_head(self.norm(x))


class ESM2(Base):
    """An encoder of padded sequences (b, s), whose tied head has a bias."""

    def __init__(self, config: dict[str, Any], **layer: Any) -> None:
        super().__init__()
        import transformer_engine.pytorch as te

        width, heads = config["width"], config["heads"]
        place = {"device": layer["device"], "dtype": layer["params_dtype"]}
        self.embed_tokens = nn.Embedding(VOCABULARY, width, padding_idx=PADDING, **place)
        self.layers = nn.ModuleList(
            te.TransformerLayer(
                width,
                2 * width,
                heads,
                activation="gelu",
                hidden_dropout=0.0,
                attention_dropout=0.0,
                fuse_qkv_params=True,
                **initializers(config["std"]),
                attn_input_format="bshd",
                self_attn_mask_type="padding",
                layer_number=number + 1,
                **layer,
            )
            for number in range(config["layers"])
        )
        self.norm = te.LayerNorm(width, **place)
        self.dense = nn.Linear(width, width, **place)
        self.decoder = nn.Linear(width, VOCABULARY, bias=True, **place)
        self.decoder.weight = self.embed_tokens.weight
        self.rotary_emb = Rotary(width // heads)

    def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        tokens = batch["tokens"]
        masked, angles = (tokens == PADDING)[:, None, None], self.rotary_emb(tokens.shape[1])
        x = self.embed_tokens(tokens)
        for layer in self.layers:
            x = layer(x, attention_mask=masked, rotary_pos_emb=angles)
        return self.decoder(F.gelu(self.dense(self.norm(x))))


class Experts(nn.Module):
    """Experts with SwiGLU. With ``stacked`` each projection is one parameter (experts, out, in) of this module."""

    def __init__(self, width: int, ffn: int, count: int, ep: Any, stacked: bool, **options: Any) -> None:
        super().__init__()
        import transformer_engine.pytorch as te

        self.stacked, self.count = stacked, count
        self.fc1 = te.GroupedLinear(count, width, 2 * ffn, bias=False, **options)
        self.fc2 = te.GroupedLinear(count, ffn, width, bias=False, **options)
        for name in ("fc1", "fc2") if stacked else ():
            own = getattr(self, name)._parameters
            weight = torch.stack([own.pop(f"weight{n}").detach() for n in range(count)])
            if ep is not None:
                weight = DTensor.from_local(weight, ep, [Shard(0)])
            self.register_parameter(f"{name}_weight", nn.Parameter(weight))

    def reset_parameters(self) -> None:
        for name in ("fc1", "fc2") if self.stacked else ():
            self.get_parameter(f"{name}_weight").data.normal_(mean=0.0, std=0.2)

    def forward(self, rows: torch.Tensor, counts: list[int]) -> torch.Tensor:
        for name in ("fc1", "fc2") if self.stacked else ():
            weight = self.get_parameter(f"{name}_weight")
            local = weight.to_local() if isinstance(weight, DTensor) else weight
            for number, expert in enumerate(local.unbind(0)):
                setattr(getattr(self, name), f"weight{number}", expert)
        gate, up = self.fc1(rows, counts).chunk(2, -1)
        return self.fc2(F.silu(gate) * up, counts)


class MixtralLayer(nn.Module):
    """Attention, and experts between ``moe_permute`` and ``moe_unpermute``."""

    def __init__(self, config: dict[str, Any], own: range, ep: Any, **layer: Any) -> None:
        super().__init__()
        import transformer_engine.pytorch as te

        width, place = config["width"], {"device": layer["device"], "dtype": layer["params_dtype"]}
        self.attention = te.MultiheadAttention(
            width,
            config["heads"],
            attention_dropout=0.0,
            input_layernorm=True,
            normalization="RMSNorm",
            bias=False,
            fuse_qkv_params=True,
            **initializers(config["std"]),
            qkv_format="bshd",
            attn_mask_type="causal",
            **layer,
        )
        self.norm = te.RMSNorm(width, **place)
        self.gate = nn.Linear(width, config["experts"], bias=False, **place)
        self.experts = Experts(
            width,
            width,
            len(own),
            ep,
            config["stacked"],
            init_method=initializers(config["std"])["init_method"],
            **layer,
        )
        self.dispatch = self.experts if ep is None else partial(dispatch_to_experts, ep, self.experts)

    def forward(self, x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
        import transformer_engine.pytorch as te

        x = x + self.attention(x, rotary_pos_emb=angles)
        rows = self.norm(x).flatten(0, 1)
        weights, chosen = self.gate(rows).softmax(-1).topk(2)
        permuted, places = te.moe_permute(rows, chosen.int(), chosen.numel(), map_type="index")
        counts = torch.bincount(chosen.flatten(), minlength=self.gate.out_features).tolist()
        results = self.dispatch(permuted, counts)
        mixed = te.moe_unpermute(results, places, merging_probs=weights.float(), map_type="index")
        return x + mixed.view_as(x)


class Mixtral(Base):
    """Sequences (b, s) without padding."""

    def __init__(
        self, config: dict[str, Any], own: range | None = None, ep: Any = None, **layer: Any
    ) -> None:
        super().__init__()
        import transformer_engine.pytorch as te

        width, own = config["width"], own or range(config["experts"])
        place = {"device": layer["device"], "dtype": layer["params_dtype"]}
        self.embed_tokens = nn.Embedding(VOCABULARY, width, **place)
        self.layers = nn.ModuleList(MixtralLayer(config, own, ep, **layer) for _ in range(config["layers"]))
        self.norm = te.RMSNorm(width, **place)
        self.lm_head = nn.Linear(width, VOCABULARY, bias=False, **place)
        self.rotary_emb = Rotary(width // config["heads"])

    def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        x, angles = self.embed_tokens(batch["tokens"]), self.rotary_emb(batch["tokens"].shape[1])
        for layer in self.layers:
            x = layer(x, angles)
        return self.lm_head(self.norm(x))


MODELS: dict[str, type[Base]] = {"llama": Llama, "esm2": ESM2, "mixtral": Mixtral}
