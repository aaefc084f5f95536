"""Bodies: every kind of optimizer on a different mesh."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import harness
import torch
import torch.distributed as dist
from torch import nn

from checkpointing.bodies import logical_state
from checkpointing.reshard import compare

HIDDEN, FFN, BATCH, BEFORE, AFTER = 32, 48, 8, 2, 2


def _fused(params: Any, **options: Any) -> torch.optim.Optimizer:
    from transformer_engine.pytorch.optimizers import FusedAdam

    return FusedAdam(params, lr=2e-3, master_weights=True, **options)


_HALF = {"exp_avg_dtype": torch.bfloat16, "exp_avg_sq_dtype": torch.bfloat16}
#: Name: dtype of the weights, constructor.
OPTIMIZERS: dict[str, tuple[torch.dtype, Callable[[Any], torch.optim.Optimizer]]] = {
    "adamw foreach": (torch.float32, lambda p: torch.optim.AdamW(p, lr=2e-3, foreach=True)),
    "adamw fused": (torch.float32, lambda p: torch.optim.AdamW(p, lr=2e-3, fused=True)),
    "adamw amsgrad": (torch.float32, lambda p: torch.optim.AdamW(p, lr=2e-3, amsgrad=True, foreach=False)),
    "adamw bf16": (torch.bfloat16, lambda p: torch.optim.AdamW(p, lr=2e-3)),
    "sgd": (torch.float32, lambda p: torch.optim.SGD(p, lr=2e-3)),
    "sgd momentum": (torch.float32, lambda p: torch.optim.SGD(p, lr=2e-3, momentum=0.9, nesterov=True)),
    "fused adam": (torch.bfloat16, _fused),
    "fused adam bf16 state": (torch.bfloat16, lambda p: _fused(p, **_HALF)),
    "fused adam remainders": (torch.bfloat16, lambda p: _fused(p, store_param_remainders=True)),
}


class MixedParameters(nn.Module):
    """A gated MLP and parameters that are frozen, unused, or smaller than a mesh."""

    def __init__(self, dtype: torch.dtype, device: Any, **tp: Any) -> None:
        super().__init__()
        import transformer_engine.pytorch as te

        options = {"params_dtype": dtype, "device": device, **tp}
        self.mlp = te.LayerNormMLP(HIDDEN, FFN, activation="swiglu", set_parallel_mode=True, **options)
        self.rest = RemainingParameters(dtype, device)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.rest(x + self.mlp(x))


class RemainingParameters(nn.Module):
    def __init__(self, dtype: torch.dtype, device: Any) -> None:
        super().__init__()
        self.single = nn.Parameter(torch.empty(1, dtype=dtype, device=device))
        self.three = nn.Parameter(torch.empty(3, 2, dtype=dtype, device=device))
        self.frozen = nn.Parameter(torch.empty(HIDDEN, dtype=dtype, device=device), requires_grad=False)
        self.unused = nn.Parameter(torch.empty(5, dtype=dtype, device=device))

    def reset_parameters(self) -> None:
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.uniform_(0.5, 1.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.frozen * self.single + self.three.sum()


class OptimizerRun:
    """The model on a mesh with one of the optimizers; two groups with their own options."""

    def __init__(self, name: str, axes: dict[str, int], seed: int, *, factor: float = 1.0) -> None:
        import te_fsdp

        dtype, make = OPTIMIZERS[name]
        self.dtype = dtype
        self.meshes = te_fsdp.Meshes.build(**axes, device_type=harness.device_type())
        self.model = MixedParameters(dtype, "meta", **self.meshes.te_kwargs())
        te_fsdp.fully_shard(self.model, self.meshes, units=["mlp"])
        te_fsdp.materialize(self.model, seed=seed)
        trained = [p for p in self.model.parameters() if p.requires_grad]
        groups = [
            {"params": trained[:3], "lr": 3e-3 * factor},
            {"params": trained[3:], "weight_decay": 0.3 * factor},
        ]
        self.optimizer = make(groups)
        self.position = 0

    def steps(self, count: int) -> list[float]:
        return [self._step() for _ in range(count)]

    def _step(self) -> float:
        generator = torch.Generator().manual_seed(100 + self.position)
        self.position += 1
        x = torch.randn(4, BATCH, HIDDEN, generator=generator).to(harness.device(), self.dtype)
        mesh, sizes = self.meshes.device_mesh, self.meshes.size
        x = x.chunk(sizes("dp_shard"), dim=1)[mesh.get_local_rank("dp_shard")].contiguous()
        loss = self.model(x).float().square().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        total = loss.detach().double()
        dist.all_reduce(total)
        return (total / dist.get_world_size()).item()

    def options(self) -> list[dict[str, Any]]:
        return [{k: v for k, v in group.items() if k != "params"} for group in self.optimizer.param_groups]


def save_optimizers(axes: dict[str, int], directory: str) -> dict[str, Any]:
    """Train with each optimizer, save, write down all state, train on; returns further losses and options."""
    import te_fsdp

    outcomes = {}
    for name in OPTIMIZERS:
        run = OptimizerRun(name, axes, seed=0)
        run.steps(BEFORE)
        expected, options = logical_state(run), run.options()
        te_fsdp.checkpoint.save(f"{directory}/{name}", run.model, run.optimizer)
        if dist.get_rank() == 0:
            torch.save(expected, f"{directory}/{name}.pt")
        outcomes[name] = {"losses": run.steps(AFTER), "options": options}
    return outcomes


def load_optimizers(axes: dict[str, int], directory: str, *, load: bool = True) -> dict[str, Any]:
    """Load each, into fresh optimizers with other options, without a step being made; compare, train on."""
    import te_fsdp

    outcomes = {}
    for name in OPTIMIZERS:
        run = OptimizerRun(name, axes, seed=1, factor=2.0)
        step = run.optimizer.step
        run.optimizer.step = _no_step  # type: ignore[method-assign]
        if load:
            loaded = te_fsdp.checkpoint.load(f"{directory}/{name}", run.model, run.optimizer)
            assert not loaded.left and not loaded.converted
        run.optimizer.step = step  # type: ignore[method-assign]
        wrong, count = compare(run, torch.load(f"{directory}/{name}.pt", weights_only=True))
        empty = sum(p.to_local().numel() == 0 for p in run.model.parameters())
        run.position, options = BEFORE, run.options()
        losses = run.steps(AFTER)
        outcomes[name] = {
            "wrong": wrong,
            "tensors": count,
            "empty": empty,
            "losses": losses,
            "options": options,
        }
    return outcomes


def _no_step(*args: Any, **kwargs: Any) -> None:
    raise AssertionError("a load makes no step")
