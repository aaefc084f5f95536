"""Body: two TE modules that share one quantized weight train it as one, as stock TE does in one process."""

from __future__ import annotations

from typing import Any

import harness
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from quantization.bodies import SEED, Stepper
from quantization.weight_bytes import recipe_of

FEATURES = 256


class Tied(nn.Module):
    """Two layers over one weight, and one with its own weight."""

    def __init__(self, device: Any) -> None:
        super().__init__()
        import transformer_engine.pytorch as te

        how: dict[str, Any] = {"bias": False, "params_dtype": torch.bfloat16, "device": device}
        self.first = te.Linear(FEATURES, FEATURES, **how)
        self.own = te.Linear(FEATURES, FEATURES, **how)
        self.second = te.Linear(FEATURES, FEATURES, **how)
        self.second.weight = self.first.weight
        #: Whether both layers had one weight object in each forward, so that it was gathered once.
        self.was_one = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.was_one &= self.second.weight is self.first.weight
        return self.second(self.own(self.first(x)))


def build(recipe: str, device: Any) -> nn.Module:
    import transformer_engine.pytorch as te

    torch.manual_seed(SEED)
    with te.quantized_model_init(recipe=recipe_of(recipe)):
        return Tied(device)


def train_tied(recipe: str, strategy: str, untie: bool = False) -> dict[str, float]:
    """Train three steps; gradients and weights are those of one process.

    Args:
        recipe: name of the recipe of the weights.
        strategy: of `fully_shard`.
        untie: the negative control: the comparison fails for two weights of equal values.
    """
    import te_fsdp

    reference, model = build(recipe, harness.device()), build(recipe, harness.device())
    if untie:
        import copy

        model.second.weight = nn.Parameter(copy.deepcopy(model.first.weight.detach()))
    meshes = te_fsdp.Meshes.build(dp_shard=-1, device_type=harness.device_type())
    te_fsdp.fully_shard(model, meshes, strategy=strategy)
    assert untie or model.first.weight is model.second.weight
    theirs, ours = Stepper(reference, recipe, None, False), Stepper(model, recipe, None, False)
    te_fsdp.main_weights(model, ours.optimizer)
    worst, expected = 0.0, {}

    def keep(*_: Any) -> None:
        expected.update({name: p.grad.clone() for name, p in reference.named_parameters()})

    def compare(*_: Any) -> None:
        nonlocal worst
        for name, gradient in expected.items():
            worst = max(worst, _distance(_whole(results[name].grad), gradient))

    theirs.optimizer.register_step_pre_hook(keep)
    for step in range(3):
        # The same data on every rank: the mean over the ranks is the gradient of one process.
        generator = torch.Generator().manual_seed(step)
        x, target = (torch.randn(64, FEATURES, generator=generator).bfloat16() for _ in range(2))
        theirs(x.to(harness.device()), target.to(harness.device()))
        te_fsdp.release_params(model)
        results = dict(model.named_parameters())
        handle = ours.optimizer.register_step_pre_hook(compare)
        ours(x.to(harness.device()), target.to(harness.device()))
        handle.remove()
    te_fsdp.release_params(model)
    assert untie or (model.was_one and model.first.weight is model.second.weight)
    for name, parameter in reference.named_parameters():
        worst = max(worst, _distance(_whole(model.get_parameter(name)), parameter.detach().dequantize()))
    return {"worst": worst}


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    """Return the unsharded values of a parameter or a gradient."""
    local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor.detach()
    local = local.dequantize() if hasattr(local, "_quantizer") else local.detach()
    if not isinstance(tensor, DTensor):
        return local
    return DTensor.from_local(local, tensor.device_mesh, tensor.placements).full_tensor()


def _distance(one: torch.Tensor, two: torch.Tensor) -> float:
    return float((one.float() - two.float()).norm() / two.float().norm())
