"""A small model with uneven, frozen or unused parameters, trained on a mesh or by one process."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any

import harness
import torch
from torch import nn

HIDDEN, FFN, SEQUENCE, BATCH, CLASSES, SEED = 32, 64, 8, 24, 11, 5


@dataclass(frozen=True)
class Case:
    """One training run.

    Attributes:
        optimizer: A key of :data:`OPTIMIZERS`.
        microbatches: Backwards per step.
        clip: Largest norm of the gradients, 0 for no clipping.
        dtype: Of the parameters.
        strategy: Over ``dp_shard``.
        contexts: Whether the loop marks the last microbatch.
        halved: Whether gradients are halved after they were clipped.
        exempt: Modules passed to ``fsdp_no_shard``.
    """

    optimizer: str = "adamw"
    microbatches: int = 1
    clip: float = 0.0
    dtype: torch.dtype = torch.float32
    strategy: str = "optim_grads_params"
    contexts: bool = False
    halved: bool = False
    exempt: tuple[str, ...] = ()


# eps: large enough that Adam does not blow the rounding of gradients near zero up to whole steps.
ADAM = {"lr": 2e-2, "betas": (0.8, 0.95), "eps": 1e-3}
OPTIMIZERS: dict[str, tuple[str, dict[str, Any]]] = {
    "sgd": ("SGD", {"lr": 0.2, "momentum": 0.9}),
    "adamw": ("AdamW", {**ADAM, "foreach": False}),
    "foreach": ("AdamW", {**ADAM, "foreach": True}),
    "fused": ("AdamW", {**ADAM, "fused": True}),
    "te": ("FusedAdam", {**ADAM, "master_weights": True}),
}


class Model(nn.Module):
    """Embedding, MLP, head of 11 rows; a frozen parameter and one that forward does not use."""

    def __init__(self, dtype: torch.dtype, device: Any, **kwargs: Any) -> None:
        super().__init__()
        import transformer_engine.pytorch as te

        self.embedding = nn.Embedding(CLASSES, HIDDEN, dtype=dtype, device=device)
        options = {"params_dtype": dtype, "device": device, "set_parallel_mode": True, **kwargs}
        self.mlp = te.LayerNormMLP(HIDDEN, FFN, activation="gelu", **options)
        self.head = Head(dtype, device)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids)
        return self.head(x + self.mlp(x))


class Head(nn.Module):
    """Linear with a frozen scale and an unused parameter."""

    def __init__(self, dtype: torch.dtype, device: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(CLASSES, HIDDEN, dtype=dtype, device=device))
        # Of 11 elements: uneven over any number of ranks. The weight has columns that are even.
        self.bias = nn.Parameter(torch.empty(CLASSES, dtype=dtype, device=device))
        self.frozen = nn.Parameter(torch.empty(CLASSES, dtype=dtype, device=device), requires_grad=False)
        self.unused = nn.Parameter(torch.empty(3, 2, dtype=dtype, device=device))

    def reset_parameters(self) -> None:
        with torch.no_grad():
            self.weight.normal_(std=HIDDEN**-0.5)
            self.bias.normal_()
            self.frozen.uniform_(0.5, 1.5)
            self.unused.normal_()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.weight, self.bias) * self.frozen


def make_optimizer(name: str, model: nn.Module) -> Any:
    """Return the optimizer in two groups with their own options."""
    from transformer_engine.pytorch.optimizers import FusedAdam

    kind, options = OPTIMIZERS[name]
    params = list(model.parameters())
    # No weight decay for what forward does not use: FSDP2 may give it gradients of zeros, one process gives it none.
    groups = [
        {"params": params[:2], "lr": 1e-2},
        {"params": params[2:-1], "weight_decay": 0.2},
        {"params": params[-1:], "weight_decay": 0.0},
    ]
    return (FusedAdam if kind == "FusedAdam" else getattr(torch.optim, kind))(groups, **options)


class Run:
    """A model and its optimizer, on a mesh or in one process, and training steps of it."""

    def __init__(self, case: Case, axes: dict[str, int] | None, *, outer: str = "optim", seed: int = SEED):
        """Build the run: ``axes`` is None for stock TE in one process; ``outer`` is fully_shard's outer_strategy."""
        import te_fsdp

        self.case, self.meshes, self.position = case, None, 0
        if axes is None:
            torch.manual_seed(seed)
            self.model = Model(case.dtype, harness.device())
            self.model.head.reset_parameters()
        else:
            self.meshes = te_fsdp.Meshes.build(**axes, device_type=harness.device_type())
            self.model = Model(case.dtype, "meta", **self.meshes.te_kwargs())
            te_fsdp.fsdp_no_shard([self.model.get_submodule(name) for name in case.exempt])
            te_fsdp.fully_shard(
                self.model, self.meshes, units="mlp", strategy=case.strategy, outer_strategy=outer
            )
            te_fsdp.materialize(self.model, seed=seed)
        self.optimizer = make_optimizer(case.optimizer, self.model)
        if axes is not None and outer == "optim":
            te_fsdp.shard_optimizer(self.optimizer)
        elif case.dtype != torch.float32:
            te_fsdp.main_weights(self.model, self.optimizer)

    @property
    def copies(self) -> tuple[int, int]:
        """Return the number of data-parallel ranks, and which of them this is."""
        if self.meshes is None:
            return 1, 0
        mesh, sizes = self.meshes.device_mesh, self.meshes.size
        rank = mesh.get_local_rank("dp_replicate") * sizes("dp_shard") + mesh.get_local_rank("dp_shard")
        return sizes("dp_replicate") * sizes("dp_shard"), rank

    def backward(self) -> None:
        """Run all microbatches of one step: this rank's part of each."""
        import te_fsdp

        for number in range(self.case.microbatches):
            last = number == self.case.microbatches - 1
            marked = self.case.contexts and self.meshes is not None
            with te_fsdp.microbatch(self.model, is_last=last) if marked else contextlib.nullcontext():
                self._microbatch()

    def _microbatch(self) -> None:
        generator = torch.Generator().manual_seed(100 + self.position)
        self.position += 1
        ids, target = torch.randint(0, CLASSES, (2, SEQUENCE, BATCH), generator=generator)
        count, rank = self.copies
        ids, target = (t.chunk(count, dim=1)[rank].contiguous().to(harness.device()) for t in (ids, target))
        logits = self.model(ids)
        loss = nn.functional.cross_entropy(logits.flatten(0, 1).float(), target.flatten())
        (loss / self.case.microbatches).backward()

    def steps(self, count: int) -> list[float]:
        """Run this number of steps; return the norms of the gradients if they are clipped."""
        import te_fsdp

        norms = []
        for _ in range(count):
            self.backward()
            if self.case.clip:
                clip = torch.nn.utils.clip_grad_norm_ if self.meshes is None else te_fsdp.clip_grad_norm_
                norms.append(float(clip(self.model.parameters(), self.case.clip)))
            if self.case.halved and self.meshes is not None:
                te_fsdp.scale_gradients(self.model, 0.5)
            elif self.case.halved:
                for parameter in self.model.parameters():
                    if parameter.grad is not None:
                        parameter.grad *= 0.5
            self.optimizer.step()
            self.optimizer.zero_grad()
        return norms
