"""Bodies: quantized units that a backward does not reach, compared with stock TE in one process."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any

import harness
import torch
from no_sharding.weight_decay import context_of
from torch import nn

from quantization.models import recipe_of

HIDDEN, TOKENS, STEPS = 512, 64, 3
UNITS = ("trunk", "left", "right")


class TwoHeads(nn.Module):
    """A trunk with two heads, each a linear layer with a quantized weight.

    Args:
        frozen: Run the trunk under ``torch.no_grad()``, although its weight is trained.
    """

    def __init__(self, recipe: str, *, frozen: bool = False) -> None:
        super().__init__()
        import transformer_engine.pytorch as te

        self.recipe, self.frozen = recipe_of(recipe), frozen
        if recipe == "nvfp4":  # two runs of stock TE would differ
            self.recipe = dataclasses.replace(self.recipe, disable_stochastic_rounding=True)
        options: dict[str, Any] = {"params_dtype": torch.bfloat16, "device": harness.device(), "bias": True}
        with te.quantized_model_init(enabled=True, recipe=self.recipe):
            for name in UNITS:
                setattr(self, name, te.Linear(HIDDEN, HIDDEN, **options))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        import transformer_engine.pytorch as te

        with te.autocast(enabled=True, recipe=self.recipe):
            with torch.no_grad() if self.frozen else contextlib.nullcontext():
                hidden = self.trunk(x)
            return self.left(hidden), self.right(hidden)


def batch(step: int, micro: int) -> torch.Tensor:
    """Return the same tokens on every rank, so that means over ranks are exact."""
    generator = torch.Generator().manual_seed(10 * step + micro)
    return torch.randn(TOKENS, HIDDEN, generator=generator).to(harness.device(), torch.bfloat16)


def loss_of(model: nn.Module, how: str, step: int, micro: int) -> torch.Tensor:
    """Return a loss of the left head; of both heads in the second step, where the right one is left out of others."""
    left, right = model(batch(step, micro))
    both = how == "left out" and step == 1
    return (left + right if both else left).float().square().mean()


def training(
    recipe: str,
    how: str,
    *,
    strategy: str = "optim_grads_params",
    units: tuple[str, ...] = UNITS,
    schedule: str = "plain",
    engine: str = "te_fsdp",
    fp32_gradients: bool = False,
    zero_copy: bool | str = "auto",
    spoil: bool = False,
) -> dict[str, Any]:
    """Compare gradients of three steps by value.

    Args:
        recipe: Name of a recipe.
        how: "two outputs" (the right head is never in the loss), "left out", or "frozen trunk".
        strategy: Of all units.
        units: That are gathered by themselves; () for the root alone.
        schedule: "plain"; "no_sync", "microbatch" or "by hand": two microbatches a step.
        engine: "te_fsdp", or "torch" for torch's own ``fully_shard`` with zeros for unused parameters.
        fp32_gradients: Reduce and accumulate in fp32.
        zero_copy: ``zero_copy_gradients``.
        spoil: Negative control: compare with the next step.
    """
    frozen = how == "frozen trunk"
    torch.manual_seed(3)
    reference = TwoHeads(recipe, frozen=frozen)
    torch.manual_seed(3)
    model = TwoHeads(recipe, frozen=frozen)
    shard(model, engine, strategy, units, fp32_gradients, zero_copy)
    micros, checks = 1 if schedule == "plain" else 2, harness.Comparisons()
    for step in range(STEPS):
        for item in (reference, model):
            item.zero_grad()
        for micro in range(micros):
            loss_of(reference, how, step + spoil, micro).backward()
            with context_of(model, schedule, is_last=micro == micros - 1):
                loss_of(model, how, step, micro).backward()
        finish(model, schedule)
        for (name, parameter), expected in zip(model.named_parameters(), reference.parameters(), strict=True):
            if expected.grad is None:
                # torch's own zeros stay. te_fsdp and torch 2.11 leave None where no rank has used a parameter.
                is_zeros = parameter.grad is not None and not harness.full(parameter.grad).any()
                makes_zeros = engine == "torch" and hasattr(model, "set_reduce_scatter_unused_params")
                left = is_zeros or step == 0 if makes_zeros else parameter.grad is None
                assert left, f"{name} in step {step}: {parameter.grad}"
            else:
                why = "bf16: the sum of two microbatches is rounded to 2^-8 in a different order"
                checks.close(f"{step} {name}", parameter.grad, expected.grad, 2**-7, why)
    return checks.require(STEPS * 2)


def shard(
    model: nn.Module,
    engine: str,
    strategy: str,
    units: tuple[str, ...],
    fp32_gradients: bool,
    zero_copy: bool | str,
) -> None:
    """Shard a model over all ranks by te_fsdp, or by torch's own ``fully_shard``."""
    import te_fsdp

    meshes = te_fsdp.Meshes.build(dp_shard=-1, device_type=harness.device_type())
    if engine == "te_fsdp":
        options: dict[str, Any] = {"zero_copy_gradients": zero_copy, "check_inputs": False}
        if fp32_gradients:
            options["precision"] = te_fsdp.MixedPrecisionPolicy(main_grads_dtype=torch.float32)
        te_fsdp.fully_shard(model, meshes, units=list(units), strategy=strategy, **options)
        return
    from torch.distributed.fsdp import fully_shard

    te_fsdp.set_device_mesh(model, weight_mesh=meshes.weight)
    for name in units:
        fully_shard(model.get_submodule(name), mesh=meshes.fsdp)
    fully_shard(model, mesh=meshes.fsdp)
    for module in model.modules():
        if hasattr(module, "set_reduce_scatter_unused_params"):
            module.set_reduce_scatter_unused_params(True)


def finish(model: nn.Module, schedule: str) -> None:
    """Reduce what waits, where the schedule does so by hand."""
    import te_fsdp

    if schedule == "by hand":
        te_fsdp.finish_grad_reduce(model)
        te_fsdp.set_auto_sync(model, True)
        te_fsdp.release_params(model)
