"""Modules outside of TransformerEngine next to tensor-parallel ones. torch saves their tensors for backward."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable

import harness
import pytest
import torch
from strategies.models import CLASSES, HIDDEN, SEED, Model as Blocks, batch
from torch import nn
from torch.nn.utils import prune


class Scale(nn.Module):
    """An elementwise product, whose backward reads the parameter itself."""

    def __init__(self, width: int, device) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.linspace(0.5, 1.5, width, device=device))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.gain


class Model(nn.Module):
    def __init__(self, device, **tp) -> None:
        super().__init__()
        import transformer_engine.pytorch as te

        options = {"params_dtype": torch.float32, "device": device, "set_parallel_mode": True, **tp}
        self.mlp = te.LayerNormMLP(32, 64, **options)
        self.norm = nn.LayerNorm(32, device=device)
        self.scale = Scale(32, device)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.scale(self.norm(x + self.mlp(x)))


def gradients(model: nn.Module, x: torch.Tensor) -> dict[str, torch.Tensor]:
    for _ in range(2):  # the second time FSDP2 gathers into memory that is there
        model.zero_grad()
        model(x).square().mean().backward()
    parts = ("norm.weight", "norm.bias", "scale.gain")
    return {n: harness.full(p.grad) for n, p in model.named_parameters() if n in parts}


def body(sharded: bool) -> dict[str, float]:
    """Compare gradients of foreign modules with the same modules in one process; nothing is left behind."""
    import te_fsdp

    meshes = te_fsdp.Meshes.build(dp_shard=1, tp=2, device_type=harness.device_type())
    model = Model(harness.device(), **meshes.te_kwargs())
    harness.shift_rows_by_rank(model, meshes.tp.get_group())
    if sharded:
        te_fsdp.fully_shard(model, meshes)
    else:
        te_fsdp.set_device_mesh(model, tp_mesh=meshes.tp)
    x = torch.randn(4, 8, 32, device=harness.device())
    found = gradients(model, x)

    alone = nn.Sequential()
    alone.norm, alone.scale = nn.LayerNorm(32, device=harness.device()), Scale(32, harness.device())
    alone.forward = lambda y: alone.scale(alone.norm(y))
    with torch.no_grad():
        y = x + model.mlp(x) if not sharded else _input_of_norm(model, x)
    expected = gradients(alone, y)
    checks = harness.Comparisons()
    for name, value in expected.items():
        checks.close(name, found[name], value, rtol=1e-5, why="fp32, means of 32 terms in a different order")
    counts = checks.require(3)
    watched = weakref.ref(model.scale.gain)
    del model, found
    gc.collect()
    assert watched() is None, "the parameter outlives its model"
    return counts


def _input_of_norm(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    seen: list[torch.Tensor] = []
    handle = model.norm.register_forward_pre_hook(lambda module, args: seen.append(args[0].detach().clone()))
    model(x)
    handle.remove()
    return seen[0]


@pytest.mark.ranks(2)
@pytest.mark.parametrize("sharded", [False, True], ids=["bound", "sharded"])
def test_gradients_of_non_te_modules(pool, sharded):
    pool.run(body, 2, sharded=sharded)


#: Functions with hooks that compute a module's weight before its forward.
COMPUTED: dict[str, Callable[[nn.Linear], nn.Module]] = {
    "weight_norm": nn.utils.weight_norm,
    "spectral_norm": nn.utils.spectral_norm,
    "prune": lambda head: prune.l1_unstructured(head, "weight", 0.5),
}


def error_of_computed_weights(name: str) -> float:
    """Train three steps under tp and in one process. Return the largest relative error of a tensor of the head."""
    import te_fsdp

    meshes = te_fsdp.Meshes.build(dp_shard=-1, tp=2, device_type=harness.device_type())
    torch.manual_seed(SEED)
    models = [Blocks("meta", set_parallel_mode=True, **meshes.te_kwargs()), Blocks(harness.device())]
    for model in models:
        torch.manual_seed(SEED)
        model.head = COMPUTED[name](nn.Linear(HIDDEN, CLASSES, device=harness.device()))
    te_fsdp.materialize(te_fsdp.fully_shard(models[0], meshes, units="blocks.*"), seed=SEED)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    for step in range(3):
        x = batch(step, meshes.data_size, 1)[0]
        for model, optimizer, data in zip(
            models, optimizers, (x[meshes.data_rank], x.flatten(0, 1)), strict=True
        ):
            model(data).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    mine, wanted = ([*model.head.parameters(), *model.head.buffers()] for model in models)
    return max(
        float((harness.full(a.detach()) - b).norm() / b.norm()) for a, b in zip(mine, wanted, strict=True)
    )


@pytest.mark.ranks(4)
@pytest.mark.parametrize("name", COMPUTED)
def test_computed_weights_equal_one_process(pool, name):
    # fp32: sums in another order
    assert max(pool.run(error_of_computed_weights, 4, name=name)) < 1e-5
