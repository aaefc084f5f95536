"""Bodies: parameters that are frozen while they have a gradient, compared with one process."""

from __future__ import annotations

import contextlib
from typing import Any

import harness
import torch
import torch.distributed as dist
from torch import nn

WIDTH, ROWS = 32, 8
#: ``fully_shard`` options by name.
STRATEGIES: dict[str, dict[str, Any]] = {
    "zero1": {"strategy": "optim"},
    "zero2": {"strategy": "optim_grads"},
    "zero3": {"strategy": "optim_grads_params"},
    "no_shard": {"strategy": "no_shard"},
    "no_shard unit": {"strategy": {"units.0": "no_shard", "": "optim"}},
    "no_shard zero1": {"strategy": "optim"},
    "hfsdp": {"outer_strategy": "optim"},
    "hfsdp zero1": {"strategy": "optim", "outer_strategy": "optim"},
    "hsdp": {"outer_strategy": "no_shard"},
    "copy_engine": {"transport": "copy_engine"},
}
FROZEN = "units.0.weight"


class Net(nn.Module):
    """A loss that is linear in the weights, so that gradients are integers, which sum exactly in any order."""

    def __init__(self, dtype: torch.dtype, device: Any) -> None:
        super().__init__()
        import transformer_engine.pytorch as te

        size = {"bias": False, "params_dtype": dtype, "device": device}
        self.units = nn.ModuleList(te.Linear(WIDTH, WIDTH, **size) for _ in range(3))

    def forward(self, x: torch.Tensor, factor: torch.Tensor, skip: tuple[int, ...] = ()) -> torch.Tensor:
        outputs = [unit(x) * factor for n, unit in enumerate(self.units) if n not in skip]
        return torch.stack([output.sum(dtype=torch.float32) for output in outputs]).sum()


def _optimizer(name: str, parameters: Any, **options: Any) -> Any:
    if name == "FusedAdam":
        from transformer_engine.pytorch.optimizers import FusedAdam

        return FusedAdam(parameters, lr=1e-2, eps=1e-3, **options)
    if name == "AdamW":
        return torch.optim.AdamW(parameters, lr=1e-2, eps=1e-3)
    return torch.optim.SGD(parameters, lr=2**-6, momentum=0.5)


class OneProcess:
    """One process without te_fsdp, with main weights in FP32."""

    def __init__(self, name: str, dtype: torch.dtype, start: dict[str, torch.Tensor]) -> None:
        self.model = Net(dtype, harness.device())
        with torch.no_grad():
            for key, parameter in self.model.named_parameters():
                parameter.copy_(start[key])
        self.main = {k: nn.Parameter(p.detach().float().clone()) for k, p in self.model.named_parameters()}
        self.optimizer = _optimizer(name, list(self.main.values()))

    def step(self) -> None:
        for key, parameter in self.model.named_parameters():
            self.main[key].grad = None if parameter.grad is None else parameter.grad.float()
        self.optimizer.step()
        with torch.no_grad():
            for key, parameter in self.model.named_parameters():
                parameter.copy_(self.main[key])


#: Optimizer, and whether weights are BF16 with main weights.
OPTIMIZERS = (("SGD", False), ("AdamW", True), ("FusedAdam", True))


def differing(case: str, when: str, marked: bool = False) -> list[str]:
    """Return the differences of :func:`train` for all optimizers."""
    return [f"{name}, {label}" for name, low in OPTIMIZERS for label in train(case, name, low, when, marked)]


class Pair:
    """A sharded model and one process that take the same steps."""

    def __init__(self, case: str, name: str, low: bool) -> None:
        import te_fsdp

        options, self.dtype = STRATEGIES[case], torch.bfloat16 if low else torch.float32
        axes = {"dp_replicate": 2, "dp_shard": 2} if "outer_strategy" in options else {"dp_shard": 4}
        meshes = te_fsdp.Meshes.build(**axes, device_type=harness.device_type())
        torch.manual_seed(0)
        self.model = model = Net(self.dtype, harness.device())
        self.plain = OneProcess(
            name, self.dtype, {key: p.detach().clone() for key, p in model.named_parameters()}
        )
        if case == "no_shard zero1":
            te_fsdp.fsdp_no_shard(model.units[0])
        te_fsdp.fully_shard(model, meshes, units="units.*", checks="setup", **options)
        master = {"master_weights": low} if name == "FusedAdam" else {}
        self.optimizer = _optimizer(name, list(model.parameters()), **master)
        if low:
            te_fsdp.main_weights(model, self.optimizer)
        te_fsdp.shard_optimizer(self.optimizer)
        self.different: list[str] = []

    def backward(self, seed: int, *, marked: bool, one_replica: bool = False) -> None:
        import te_fsdp

        generator = torch.Generator().manual_seed(seed)
        batch = [torch.randint(-1, 2, (4 * ROWS, WIDTH), generator=generator) for _ in range(2)]
        batch = [t.to(harness.device(), self.dtype) for t in batch]
        rank = dist.get_rank()
        mine = [t[rank * ROWS : (rank + 1) * ROWS] for t in batch]
        # Of the frozen weight, one replica alone may have a gradient.
        skipped = (0,) if one_replica and rank >= 2 else ()
        with te_fsdp.microbatch(self.model, is_last=True) if marked else contextlib.nullcontext():
            (self.model(*mine, skipped) * 4).backward()  # gradients are averaged over 4 ranks
        if not one_replica:
            self.plain.model(*batch).backward()
            return
        self.plain.model(*batch, (0,)).backward()
        x, factor = (t[: 2 * ROWS] for t in batch)
        (self.plain.model.units[0](x) * factor).sum(dtype=torch.float32).backward()

    def clear(self, *, all_: bool = True) -> None:
        for one in (self.model, self.plain.model):
            for key, parameter in one.named_parameters():
                if all_ or key != FROZEN:
                    parameter.grad = None

    def train_weight(self, flag: bool) -> None:
        for one in (self.model, self.plain.model):
            one.get_parameter(FROZEN).requires_grad_(flag)

    def step(self, label: str, moves: bool) -> None:
        before = self.plain.main[FROZEN].detach().clone()
        self.optimizer.step()
        self.plain.step()
        assert moves is not torch.equal(before, self.plain.main[FROZEN]), label
        for key, parameter in self.model.named_parameters():
            if not torch.equal(harness.full(parameter), harness.full(self.plain.model.get_parameter(key))):
                self.different.append(f"{label}: {key}")
            main = self.optimizer.state.get(parameter, {}).get("master_param")
            if main is not None and not torch.equal(harness.full(main), harness.full(self.plain.main[key])):
                self.different.append(f"{label}: main weight of {key}")


def train(case: str, name: str, low: bool, when: str, marked: bool) -> list[str]:
    """Freeze a weight before its gradient is used, and keep the gradient for two steps: the steps that differ."""
    pair = Pair(case, name, low)
    if when != "first":
        pair.backward(0, marked=marked)
        pair.step("trained", True)
        pair.clear()
    pair.backward(1, marked=marked, one_replica=when == "one replica")
    pair.train_weight(False)
    pair.step("frozen with a gradient", True)
    pair.clear(all_=False)
    pair.backward(2, marked=marked)
    pair.step("frozen with the gradient of an earlier step", True)
    for seed in (3, 4):
        pair.clear()
        pair.backward(seed, marked=marked)
        pair.step("frozen", False)
    pair.train_weight(True)
    pair.clear()
    pair.backward(5, marked=marked)
    pair.train_weight(False)
    pair.step("trained in the backward alone", True)
    pair.train_weight(True)
    pair.clear()
    pair.backward(6, marked=marked)
    pair.step("trained again", True)
    return pair.different


def assign() -> None:
    """Step a parameter that is frozen from the start, and whose gradient is assigned after the first step."""
    import te_fsdp

    meshes = te_fsdp.Meshes.build(dp_replicate=2, dp_shard=2, device_type=harness.device_type())
    model = Net(torch.float32, harness.device())
    model.get_parameter(FROZEN).requires_grad_(False)
    te_fsdp.fully_shard(model, meshes, units="units.*", outer_strategy="optim")
    optimizer = te_fsdp.shard_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    batch = torch.ones(ROWS, WIDTH, device=harness.device())
    model(batch, batch).backward()
    optimizer.step()
    weight = model.get_parameter(FROZEN)
    weight.grad = torch.ones_like(weight)
    optimizer.step()
