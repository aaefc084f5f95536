"""A small model with every kind of parameter in a checkpoint."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any

import harness
import torch
import torch.distributed as dist
from torch import nn

HIDDEN, FFN, HEADS, SEQUENCE, BATCH, CLASSES = 128, 128, 8, 32, 4, 16


@dataclass(frozen=True)
class Case:
    """The saved model.

    Attributes:
        stacked: gated fc1 and fused, non-interleaved QKV with grouped queries; otherwise plain layouts alone.
        optimizer: "adamw" (fp32 weights), "sgd" (with momentum) or "fused" (TE's, bf16 weights, fp32 main ones).
            "fused bf16": moments in bf16. "remainders": main weights as the 16 bits that bf16 weights lack.
        recipe: TE's quantization recipe; "none" for none.
        quantized: whether weights are stored quantized.
        unused: whether a trainable parameter is used by nothing. Its missing state breaks torch's set_state_dict.
    """

    stacked: bool = False
    optimizer: str = "adamw"
    recipe: str = "none"
    quantized: bool = False
    unused: bool = True

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32 if self.optimizer in ("adamw", "sgd") else torch.bfloat16


class Model(nn.Module):
    """Embedding, a TransformerLayer, norm, head; a frozen and an unused parameter, and a buffer."""

    def __init__(self, case: Case, device: Any, **kwargs: Any) -> None:
        super().__init__()
        import transformer_engine.pytorch as te

        options = {"params_dtype": case.dtype, "device": device, **kwargs}
        # MXFP8 has blocks of 32 rows, which tp would cut through in the stacked key and value.
        fused = {"qkv_weight_interleaved": not case.stacked or case.quantized, "num_gqa_groups": HEADS // 2}
        self.embedding = nn.Embedding(CLASSES, HIDDEN, dtype=case.dtype, device=device)
        self.layer = te.TransformerLayer(
            HIDDEN,
            FFN,
            HEADS,
            hidden_dropout=0.0,
            attention_dropout=0.0,
            activation="swiglu" if case.stacked else "gelu",
            set_parallel_mode=True,
            fuse_qkv_params=True,
            **fused,
            **options,
        )
        self.norm = te.LayerNorm(HIDDEN, dtype=case.dtype, device=device)
        self.head = Head(case, device)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.layer(self.embedding(ids))))


class Head(nn.Module):
    """Linear with a frozen scale, a parameter that nothing uses, and a persistent buffer that forward counts in."""

    def __init__(self, case: Case, device: Any) -> None:
        super().__init__()
        dtype = case.dtype
        # 11 rows: uneven over any number of ranks.
        self.weight = nn.Parameter(torch.empty(11, HIDDEN, dtype=dtype, device=device))
        self.frozen = nn.Parameter(torch.empty(11, dtype=dtype, device=device), requires_grad=False)
        self.unused = nn.Parameter(torch.empty(3, 2, dtype=dtype, device=device), requires_grad=case.unused)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64, device=device))

    def reset_parameters(self) -> None:
        with torch.no_grad():
            self.weight.normal_(std=HIDDEN**-0.5)
            self.frozen.uniform_(0.5, 1.5)
            self.unused.normal_()
            self.calls.zero_()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return nn.functional.linear(x, self.weight) * self.frozen


def recipe_of(name: str) -> Any:
    """Return TE's recipe object of a name, None for "none"."""
    from transformer_engine.common import recipe

    return {
        "none": lambda: None,
        "delayed": lambda: recipe.DelayedScaling(amax_history_len=4),
        "current": recipe.Float8CurrentScaling,
        "block": recipe.Float8BlockScaling,
        "mxfp8": recipe.MXFP8BlockScaling,
        "mxfp8_2d": lambda: recipe.MXFP8BlockScaling(enable_2d_quantization=True),  # TE 2.19
        "nvfp4": recipe.NVFP4BlockScaling,
    }[name]()


class Run:
    """A model on a mesh with its optimizer, and steps of it."""

    def __init__(self, case: Case, axes: dict[str, int] | None, seed: int) -> None:
        """Build, shard, initialise; ``axes`` is None for stock TE in one process, without te_fsdp."""
        import transformer_engine.pytorch as te

        import te_fsdp

        self.case, self.recipe = case, recipe_of(case.recipe)
        with te.quantized_model_init(recipe=self.recipe) if case.quantized else contextlib.nullcontext():
            if axes is None:
                self.meshes = None
                torch.manual_seed(seed)
                self.model = Model(case, harness.device())
                self.model.head.reset_parameters()
            else:
                self.meshes = te_fsdp.Meshes.build(**axes, device_type=harness.device_type())
                self.model = Model(case, "meta", **self.meshes.te_kwargs())
                te_fsdp.fully_shard(self.model, self.meshes)
                te_fsdp.materialize(self.model, seed=seed)
        self.optimizer = self._optimizer()
        self.position = 0

    def _optimizer(self) -> torch.optim.Optimizer:
        from transformer_engine.pytorch.optimizers import FusedAdam

        trained = [p for p in self.model.parameters() if p.requires_grad]
        # Two groups with their own options.
        groups = [{"params": trained[:3], "lr": 3e-3}, {"params": trained[3:], "weight_decay": 0.2}]
        if self.case.dtype is torch.bfloat16:
            dtypes = dict.fromkeys(("exp_avg_dtype", "exp_avg_sq_dtype"), torch.bfloat16)
            options = {"fused": {}, "fused bf16": dtypes, "remainders": {"store_param_remainders": True}}
            more = options[self.case.optimizer]
            return FusedAdam(groups, lr=2e-3, betas=(0.8, 0.95), master_weights=True, **more)
        if self.case.optimizer == "sgd":
            return torch.optim.SGD(groups, lr=0.02, momentum=0.9)
        return torch.optim.AdamW(groups, lr=2e-3, betas=(0.8, 0.95))

    def steps(self, count: int) -> list[float]:
        """Return losses of `steps` training steps on batches that depend on the position in the data alone."""
        return [self._step() for _ in range(count)]

    @torch.no_grad()
    def loss(self) -> float:
        """Return the loss on the next batch, which stays the next one."""
        return self._mean(self._forward())

    def _step(self) -> float:
        loss = self._forward()
        self.position += 1
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return self._mean(loss)

    def _forward(self) -> torch.Tensor:
        import transformer_engine.pytorch as te

        generator = torch.Generator().manual_seed(100 + self.position)
        torch.manual_seed(self.position + 1)  # NVFP4 rounds gradients at random
        ids, target = torch.randint(0, 11, (2, SEQUENCE, BATCH), generator=generator).to(harness.device())
        if self.meshes is not None:
            mesh, sizes = self.meshes.device_mesh, self.meshes.size
            rank = mesh.get_local_rank("dp_replicate") * sizes("dp_shard") + mesh.get_local_rank("dp_shard")
            chunks = sizes("dp_replicate") * sizes("dp_shard")
            ids, target = (t.chunk(chunks, dim=1)[rank].contiguous() for t in (ids, target))
        with te.autocast(enabled=self.recipe is not None, recipe=self.recipe):
            logits = self.model(ids)
        return nn.functional.cross_entropy(logits.flatten(0, 1).float(), target.flatten())

    def _mean(self, loss: torch.Tensor) -> float:
        total = loss.detach().double()
        if dist.is_initialized():
            dist.all_reduce(total)
            total /= dist.get_world_size()
        return total.item()
