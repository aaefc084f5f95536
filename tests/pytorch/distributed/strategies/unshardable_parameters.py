"""Bodies: parameters that FSDP2 cannot shard with the rest of their unit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import harness
import torch
from torch import nn

WIDTH = 32
KINDS: dict[str, Callable[[], torch.Tensor]] = {
    "other_dtype": lambda: torch.linspace(0.5, 1.5, WIDTH, dtype=torch.float64),
    "empty": lambda: torch.empty(0, WIDTH),
    "not_contiguous": lambda: torch.linspace(-0.1, 0.1, 4 * WIDTH).view(WIDTH, 4).t(),
    "scalar": lambda: torch.tensor(0.7),
}


class Model(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        import transformer_engine.pytorch as te

        device = harness.device()
        self.linear = te.Linear(WIDTH, WIDTH, params_dtype=torch.float32, device=device)
        self.odd = nn.Parameter(KINDS[kind]().to(device))
        self.out = nn.Linear(WIDTH, WIDTH, device=device)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.linear(x)
        scale = (self.odd * torch.arange(WIDTH, device=x.device)).sum(0) if self.odd.ndim > 1 else self.odd
        return self.out((x * (1 + scale)).float())


def train_as_one_process(kind: str, strategy: str) -> dict[str, float]:
    """Train three steps of SGD, as one process; compare gradients and parameters by value."""
    import te_fsdp

    torch.manual_seed(1)
    reference = Model(kind)
    torch.manual_seed(1)
    model = Model(kind)
    meshes = te_fsdp.Meshes.build(dp_shard=-1, device_type=harness.device_type())
    if kind == "scalar":
        te_fsdp.fsdp_no_shard(model.odd)
    te_fsdp.fully_shard(model, meshes, strategy=strategy)
    ours, theirs = (torch.optim.SGD(m.parameters(), lr=0.05) for m in (model, reference))
    worst = 0.0
    for step in range(3):
        x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(step)).to(harness.device())
        mine = x.chunk(meshes.data_size)[meshes.data_rank]
        model(mine).square().mean().backward()
        reference(x).square().mean().backward()
        te_fsdp.release_params(model)
        worst = max(worst, *_distance(model, reference, lambda p: p.grad))
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
    return {"worst": max(worst, *_distance(model, reference, lambda p: p.detach()))}


def _distance(model: nn.Module, reference: nn.Module, what: Any) -> list[float]:
    results = []
    for name, parameter in reference.named_parameters():
        mine, theirs = what(model.get_parameter(name)), what(parameter)
        if not theirs.numel():
            continue
        mine = mine.full_tensor() if hasattr(mine, "full_tensor") else mine
        results.append(float((mine - theirs).norm() / theirs.norm()))
    return results


def learnable_softmax(strategy: str) -> int:
    """Train TE's fp32 `softmax_offset` in a bf16 model, which gets a gradient."""
    import transformer_engine.pytorch as te

    import te_fsdp

    meshes = te_fsdp.Meshes.build(dp_shard=-1, device_type=harness.device_type())
    torch.manual_seed(1)
    kwargs: dict[str, Any] = {"params_dtype": torch.bfloat16, "device": harness.device()}
    model = te.TransformerLayer(64, 128, 4, softmax_type="learnable", self_attn_mask_type="no_mask", **kwargs)
    offset = next(name for name, _ in model.named_parameters() if name.endswith("softmax_offset"))
    te_fsdp.fully_shard(model, meshes, strategy=strategy)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    x = torch.randn(8, 2, 64, generator=torch.Generator().manual_seed(meshes.data_rank)).bfloat16()
    before = model.get_parameter(offset).detach().clone()
    model(x.to(harness.device())).float().square().mean().backward()
    optimizer.step()
    assert model.get_parameter(offset).dtype == torch.float32
    changed = int((model.get_parameter(offset).detach() != before).sum())
    assert changed > 0
    return changed


class Large(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.small = nn.Linear(1100, 1100, dtype=torch.bfloat16)
        self.large = nn.Linear(1100, 1100, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.small(self.large(x).bfloat16())


def error_of_large_parameter() -> None:
    """Raise on every rank."""
    import te_fsdp

    te_fsdp.fully_shard(Large(), te_fsdp.Meshes.build(dp_shard=-1, device_type=harness.device_type()))


class Cached(nn.Linear):
    """A module with a tensor on meta that is neither a parameter nor a buffer."""

    def __init__(self) -> None:
        super().__init__(8, 8, device="meta")
        self.cache = torch.empty(8, device="meta")


def error_of_meta_attribute() -> None:
    """Raise on every rank."""
    import te_fsdp

    model = nn.Sequential(Cached())
    te_fsdp.fully_shard(model, te_fsdp.Meshes.build(dp_shard=-1, device_type=harness.device_type()))
    te_fsdp.materialize(model, seed=0)
