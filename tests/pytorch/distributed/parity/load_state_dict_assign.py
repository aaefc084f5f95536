"""Bodies: ``load_state_dict(assign=True)`` at every stage, from the plain module to a trained sharded model."""

from __future__ import annotations

from typing import Any

import harness
import pytest
import torch
import torch.distributed as dist
from checkpointing.models import recipe_of
from strategies.models import Model, batch

STAGES = ("bound", "sharded", "materialized")


def load_with_assign(stages: list[str], recipe: str) -> list[str]:
    """Load values bit for bit into the existing parameters and train. Unsharded tensors raise.

    Args:
        stages: Of :data:`STAGES`.
        recipe: Of quantized weights; none by default.

    Returns:
        The stages that were run.
    """
    import te_fsdp

    meshes = te_fsdp.Meshes.build(tp=2, device_type=harness.device_type())
    checks = harness.Comparisons()
    for stage in stages:
        model, other = (_made(meshes, stage, recipe, seed) for seed in (1, 2))
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1e-2)
        if recipe:
            te_fsdp.main_weights(model, optimizer)
        before = dict(model.named_parameters())
        with pytest.raises(te_fsdp.errors.PlacementError, match=r"assign=True.*set_model_state_dict"):
            model.load_state_dict(
                {n: torch.ones(p.shape) for n, p in before.items()}, assign=True, strict=False
            )
        model.load_state_dict(other.state_dict(), assign=True)
        values = dict(other.named_parameters())
        for name, parameter in model.named_parameters():
            assert parameter is before[name], name
            checks.bitwise_equal(f"{stage}: {name}", _bits(parameter), _bits(values[name]))
        if not recipe:
            model(batch(0, 1, 1)[0, 0]).sum().backward()
            optimizer.step()
            moved = [n for n, p in model.named_parameters() if not torch.equal(_bits(p), _bits(values[n]))]
            assert len(moved) == len(before) - 1, moved  # one is frozen
    checks.require(len(stages) * 8)
    return stages


def _made(meshes: Any, stage: str, recipe: str, seed: int) -> Model:
    import transformer_engine.pytorch as te
    from quantization.models import recipe_of

    import te_fsdp

    torch.manual_seed(seed)
    device = "meta" if stage == "materialized" else harness.device()
    with te.quantized_model_init(enabled=bool(recipe), recipe=recipe_of(recipe) if recipe else None):
        model = Model(device, set_parallel_mode=True, **meshes.te_kwargs())
    harness.shift_rows_by_rank(model, meshes.tp.get_group())
    if stage == "bound":
        te_fsdp.set_device_mesh(model, tp_mesh=meshes.tp, weight_mesh=meshes.weight)
    else:
        te_fsdp.fully_shard(model, meshes, units="blocks.*")
    return te_fsdp.materialize(model, seed=seed) if stage == "materialized" else model


def _bits(parameter: torch.Tensor) -> torch.Tensor:
    local = getattr(parameter, "_local_tensor", parameter).detach()
    return local.dequantize() if hasattr(local, "dequantize") and type(local) is not torch.Tensor else local


def assign_pickled(recipe: str, directory: str, *, device: str) -> list[str]:
    """Assign a ``torch.save`` file of TE's unsharded module to a ``fsdp_no_shard`` model, and train a step of each.

    Returns:
        Names of parameters that differ from those of the unsharded module, after the load and after the step.
    """
    import transformer_engine.pytorch as te
    from transformer_engine.pytorch.optimizers import FusedAdam
    from transformer_engine.pytorch.quantization import FP8GlobalStateManager

    import te_fsdp

    def made(where: str) -> Any:
        with te.quantized_model_init(recipe=recipe_of(recipe)):
            return te.Linear(64, 64, device=where, params_dtype=torch.bfloat16)

    torch.manual_seed(1)
    stock, model = made(str(harness.device())), made(device if device == "meta" else str(harness.device()))
    file = f"{directory}/{dist.get_rank()}.pt"
    torch.save(stock.state_dict(), file)
    te_fsdp.fsdp_no_shard(model)
    te_fsdp.fully_shard(model, te_fsdp.Meshes.build(dp_shard=2, device_type=harness.device_type()))
    model.load_state_dict(torch.load(file, weights_only=False), assign=True)
    differing = []
    for stage in ("loaded", "stepped"):
        if stage == "stepped":
            for module in (stock, model):
                optimizer = FusedAdam(module.parameters(), lr=1e-2, master_weights=True)
                x = torch.ones(32, 64, dtype=torch.bfloat16, device=harness.device())
                with te.autocast(enabled=True, recipe=recipe_of(recipe)):
                    module(x).float().square().mean().backward()
                optimizer.step()
                FP8GlobalStateManager.reset()  # models would roll each other's amax histories
        pairs = zip(stock.named_parameters(), model.parameters(), strict=True)
        differing += [
            f"{stage} {n}" for (n, p), q in pairs if not torch.equal(harness.full(p), harness.full(q))
        ]
    return differing
