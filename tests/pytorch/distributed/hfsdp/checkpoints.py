"""Bodies: checkpoints of cut optimizer state onto other meshes, and quantized weights under it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import harness
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from hfsdp.bodies import same_parameters
from hfsdp.models import SEED, Case, Run

#: Axes of the mesh (None: stock TE in one process) and the outer strategy.
Place = tuple[dict[str, int] | None, str]


def elsewhere(case: dict[str, Any], saved: Place, others: list[Place], directory: str) -> list[int]:
    """Save on one mesh, load on others: the same bits of weights and state, and the same steps afterwards.

    Returns:
        Comparisons per other mesh.
    """
    import te_fsdp

    path = Path(directory) / "checkpoint"
    run = Run(Case(**case), saved[0], outer=saved[1])
    run.steps(2)
    te_fsdp.checkpoint.save(path, run.model, run.optimizer)
    position, expected = run.position, whole_state(run)
    run.steps(2)
    counts = []
    for axes, outer in others:
        other = Run(Case(**case), axes, outer=outer, seed=SEED + 1)
        te_fsdp.checkpoint.load(path, other.model, other.optimizer)
        checks, found = harness.Comparisons(), whole_state(other)
        assert found.keys() == expected.keys(), found.keys() ^ expected.keys()
        for name, value in expected.items():
            checks.same_bits(f"{axes} {outer} {name}", found[name], value)
        other.position = position
        other.steps(2)
        if other.case.dtype == torch.float32:  # bf16 sums differ from mesh to mesh
            same_parameters(checks, other, run, f"{axes} {outer} trained on")
        counts.append(checks.require(1))
    return counts


def whole_state(run: Run) -> dict[str, torch.Tensor]:
    """Weights and state of a run, whole, by name. Collective."""
    found = {}
    for name, parameter in run.model.named_parameters():
        found[name] = harness.full(parameter)
        for key, value in sorted(run.optimizer.state.get(parameter, {}).items()):
            if isinstance(value, torch.Tensor):
                found[f"{name} {key}"] = harness.full(value)
    return found


def quantized(recipe: str, optimizer: str, tp: int) -> int:
    """Each weight is one quantization, by stock TE in one process, of its whole main weight, to the byte.

    Returns:
        Number of buffers compared.
    """
    from quantization.bodies import SEED as STOCK_SEED
    from quantization.bodies import Stepper, batch_of
    from quantization.one_scale import HIDDEN, compare, gathered, named_weights, recipe_of, requantize, stock

    import te_fsdp

    meshes = te_fsdp.Meshes.build(dp_replicate=2, tp=tp, device_type=harness.device_type())
    model = stock("mlp_swiglu", recipe, "meta", **meshes.te_kwargs())
    te_fsdp.fully_shard(model, meshes, outer_strategy="optim")
    te_fsdp.materialize(model, seed=STOCK_SEED)
    oracle = stock("mlp_swiglu", recipe)
    step, count = Stepper(model, recipe_of(recipe), meshes, False), 0
    if optimizer == "adamw":
        step.optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    te_fsdp.shard_optimizer(step.optimizer)
    for number in range(3):
        step(*batch_of(HIDDEN))
        values = {}
        for name, module, own, parameter in named_weights(model):
            main = step.optimizer.state[parameter]["master_param"]
            values[name] = gathered(module, own, over_outer(main, parameter))
        requantize(oracle, values)
        count += compare(model, oracle, f"step {number + 1}")
    return count


def over_outer(main: DTensor, parameter: DTensor) -> DTensor:
    """A cut main weight as it would be if it was not cut: all holders' rows, placed as the parameter. Collective."""
    mine = main.to_local().cpu()
    rows: list[Any] = [None] * main.device_mesh.size(0)
    dist.all_gather_object(rows, mine, group=main.device_mesh.get_group(0))
    return DTensor.from_local(
        torch.cat(rows).to(harness.device()),
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )
