"""One model with every kind of parameter that is resharded, on any mesh."""

from __future__ import annotations

from typing import Any

import harness
import torch
from harness.tensor_parallel import SumGradientOverTp, SumOverTp
from torch import nn

from checkpointing.token_training import TokenTraining

# Of tp = 4 each rank gets 22 rows of each half of the gated fc1, 2 heads, 1 group; over three ranks these are uneven.
HIDDEN, FFN, HEADS, GROUPS, EXPERTS = 64, 88, 8, 4, 3
SEQUENCE, BATCH, CLASSES = 4, 12, 19


class Experts(nn.Module):
    """Two grouped linears with one weight per expert. GroupedLinear does not communicate over tp, so the model does."""

    def __init__(self, options: dict[str, Any]) -> None:
        super().__init__()
        import transformer_engine.pytorch as te

        self.up = te.GroupedLinear(EXPERTS, HIDDEN, FFN, bias=False, parallel_mode="column", **options)
        self.down = te.GroupedLinear(EXPERTS, FFN, HIDDEN, bias=False, parallel_mode="row", **options)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # By their place in the sequence, so that a token goes to one expert on every mesh.
        group, batch = self.up.tp_group if self.up.tp_size > 1 else None, x.shape[1]
        splits = [batch, batch, (SEQUENCE - 2) * batch]
        tokens = SumGradientOverTp.apply(x.reshape(-1, HIDDEN), group)
        partial_output = self.down(nn.functional.gelu(self.up(tokens, splits)), splits)
        return SumOverTp.apply(partial_output, group).view(x.shape)


class Small(nn.Module):
    """A gain of 3 elements (none on some ranks), a frozen and an unused one, and a counter."""

    def __init__(self, dtype: torch.dtype, device: Any) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.empty(3, dtype=dtype, device=device))
        self.frozen = nn.Parameter(torch.empty(HIDDEN, dtype=dtype, device=device), requires_grad=False)
        self.unused = nn.Parameter(torch.empty(5, 2, dtype=dtype, device=device))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64, device=device))

    def reset_parameters(self) -> None:
        with torch.no_grad():
            self.gain.uniform_(0.5, 1.5)
            self.frozen.uniform_(0.5, 1.5)
            self.unused.normal_()
            self.calls.zero_()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return x * self.frozen * self.gain.sum()


class Everything(nn.Module):
    """Residual stack of the module kinds: x + f(x) for each of them."""

    def __init__(self, dtype: torch.dtype, device: Any, **tp: Any) -> None:
        super().__init__()
        import transformer_engine.pytorch as te

        options = {"params_dtype": dtype, "device": device, **tp}
        self.embedding = nn.Embedding(CLASSES, HIDDEN, dtype=dtype, device=device)
        self.column = te.Linear(HIDDEN, FFN, bias=True, parallel_mode="column", **options)
        self.row = te.Linear(FFN, HIDDEN, bias=True, parallel_mode="row", **options)
        mlp = {"bias": True, "set_parallel_mode": True, **options}
        self.gelu = te.LayerNormMLP(HIDDEN, FFN, activation="gelu", **mlp)
        self.swiglu = te.LayerNormMLP(HIDDEN, FFN, activation="swiglu", **mlp)
        self.interleaved = self._attention(options, fuse_qkv_params=True, qkv_weight_interleaved=True)
        fused = {"fuse_qkv_params": True, "qkv_weight_interleaved": False}
        self.stacked = self._attention(options, **fused)
        self.grouped_queries = self._attention(options, num_gqa_groups=GROUPS, input_layernorm=True, **fused)
        self.cross = self._attention(options, attention_type="cross", num_gqa_groups=GROUPS, **fused)
        self.experts = Experts(options)
        self.layer = te.TransformerLayer(
            HIDDEN,
            FFN,
            HEADS,
            num_gqa_groups=GROUPS,
            activation="swiglu",
            set_parallel_mode=True,
            hidden_dropout=0.0,
            attention_dropout=0.0,
            **options,
        )
        self.norm = te.RMSNorm(HIDDEN, dtype=dtype, device=device)
        self.small = Small(dtype, device)
        self.head = nn.Linear(HIDDEN, CLASSES, dtype=dtype, device=device)

    @staticmethod
    def _attention(options: dict[str, Any], **more: Any) -> nn.Module:
        import transformer_engine.pytorch as te

        mask = "no_mask" if more.get("attention_type") == "cross" else "causal"
        common = {"attention_dropout": 0.0, "attn_mask_type": mask, "set_parallel_mode": True}
        return te.MultiheadAttention(HIDDEN, HEADS, **common, **more, **options)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = memory = self.embedding(ids)
        x = x + self.row(nn.functional.gelu(self.column(x)))
        for part in (self.gelu, self.swiglu, self.interleaved, self.stacked, self.grouped_queries):
            x = x + part(x)
        x = x + self.cross(x, encoder_output=memory)
        x = x + self.experts(x)
        return self.head(self.small(self.norm(self.layer(x))))


class Training(TokenTraining):
    """The model on a mesh with its optimizer, and steps of it."""

    CLASSES, SHAPE = CLASSES, (SEQUENCE, BATCH)

    def __init__(self, dtype: torch.dtype, axes: dict[str, int] | None, seed: int) -> None:
        """Build, shard, initialise; ``axes`` is None for stock TE in one process, without te_fsdp."""
        import te_fsdp

        if axes is None:
            self.meshes = None
            torch.manual_seed(seed)
            self.model: nn.Module = Everything(dtype, harness.device())
            self.model.small.reset_parameters()
        else:
            self.meshes = te_fsdp.Meshes.build(**axes, device_type=harness.device_type())
            self.model = Everything(dtype, "meta", **self.meshes.te_kwargs())
            te_fsdp.fully_shard(self.model, self.meshes, units=["layer", "swiglu"])
            te_fsdp.materialize(self.model, seed=seed)
        self.optimizer = self._optimizer(dtype)

    def _optimizer(self, dtype: torch.dtype) -> torch.optim.Optimizer:
        trained: dict[str, list[torch.nn.Parameter]] = {}
        for name, parameter in self.model.named_parameters():
            if parameter.requires_grad:  # the experts of a layer stay together
                trained.setdefault(name.rstrip("0123456789"), []).append(parameter)
        halves = [[p for some in list(trained.values())[half::2] for p in some] for half in (0, 1)]
        groups = [{"params": halves[0], "lr": 3e-3}, {"params": halves[1], "weight_decay": 0.2}]
        if dtype is torch.float32:
            return torch.optim.AdamW(groups, lr=2e-3, betas=(0.8, 0.95), fused=True)
        from transformer_engine.pytorch.optimizers import FusedAdam

        return FusedAdam(groups, lr=2e-3, betas=(0.8, 0.95), master_weights=True)
