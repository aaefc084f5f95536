"""Jobs with several sharded models or optimizers."""

from __future__ import annotations

import copy
from typing import Any

import harness
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from checkpointing.mistakes import Small


class Chain(Small):
    """A model with a forward."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.relu(self.first(x.to(self.first.weight.dtype))))


class Job:
    """A bf16 generator with main weights in FusedAdam, and two optimizers; an fp32 discriminator with AdamW."""

    def __init__(self, axes: dict[str, int], seed: int) -> None:
        from transformer_engine.pytorch.optimizers import FusedAdam

        import te_fsdp

        torch.manual_seed(seed)
        meshes = te_fsdp.Meshes.build(**axes, device_type=harness.device_type())
        self.models = {"g": Chain(dtype=torch.bfloat16), "d": Chain(width=6)}
        for model in self.models.values():
            te_fsdp.fully_shard(model, meshes)
        g, d = self.models["g"], self.models["d"]
        self.optimizers: dict[str, Any] = {
            "matrices": FusedAdam([g.first.weight, g.second.weight], lr=1e-2, master_weights=True),
            "biases": torch.optim.SGD([g.first.bias, g.second.bias], lr=1e-2, momentum=0.9),
            "d": torch.optim.AdamW(d.parameters(), lr=1e-2),
        }

    def steps(self, count: int) -> None:
        for _ in range(count):
            x = torch.linspace(-1, 1, 8, device=harness.device()).view(2, 4)
            for model in self.models.values():
                model(x).float().square().sum().backward()
            for optimizer in self.optimizers.values():
                optimizer.step()
                optimizer.zero_grad()

    def values(self) -> dict[str, torch.Tensor]:
        results = {f"{n}.{k}": p for n, model in self.models.items() for k, p in model.named_parameters()}
        for name, optimizer in self.optimizers.items():
            states = [optimizer.state[p] for group in optimizer.param_groups for p in group["params"]]
            results |= {
                f"{name}.{i}.{k}": v for i, s in enumerate(states) for k, v in s.items() if torch.is_tensor(v)
            }
        return {
            name: (v.full_tensor() if isinstance(v, DTensor) else v).detach().clone()
            for name, v in results.items()
        }


def save_several_models(directory: str, axes: dict[str, int]) -> dict[str, torch.Tensor]:
    """Train three steps, save with a running average of weights in ``extra``, train two more; return the values."""
    import te_fsdp

    job = Job(axes, 0)
    job.steps(3)
    average = {name: p.detach().clone() for name, p in job.models["d"].named_parameters()}
    assert all(isinstance(value, DTensor) for value in average.values())
    te_fsdp.checkpoint.save(
        f"{directory}/a", job.models, job.optimizers, extra={"average": average, "step": 3}
    )
    full = {f"average.{name}": value.full_tensor() for name, value in average.items()}
    job.steps(2)
    return harness_host(job.values() | full)


def load_several_models(directory: str, axes: dict[str, int]) -> dict[str, Any]:
    """Load on a different mesh into different values, and make the same two steps."""
    import te_fsdp

    job = Job(axes, 1)
    before = copy.deepcopy(job.values())
    loaded = te_fsdp.checkpoint.load(f"{directory}/a", job.models, job.optimizers)
    job.steps(2)
    average = {f"average.{name}": value for name, value in loaded["average"].items()}
    assert all(type(value) is torch.Tensor and value.device.type == "cpu" for value in average.values())
    return {
        "values": harness_host(job.values() | average),
        "before": harness_host(before),
        "step": loaded["step"],
    }


def harness_host(values: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: value.cpu() for name, value in values.items()}


def errors_of_extra_dtensors(directory: str, axes: dict[str, int]) -> dict[str, str]:
    """Return the errors of unsupported DTensors in ``extra``, raised on all ranks before a write."""
    from torch.distributed.tensor import Partial

    import te_fsdp

    meshes = te_fsdp.Meshes.build(**axes, device_type=harness.device_type())
    partial = DTensor.from_local(torch.ones(4, device=harness.device()), meshes.fsdp, [Partial()])
    model: nn.Module = te_fsdp.fully_shard(Chain(), meshes)
    try:
        te_fsdp.checkpoint.save(f"{directory}/refused", model, extra={"sums": {"w": partial}})
    except te_fsdp.errors.CheckpointError as error:
        return {"text": str(error)}
    return {}
