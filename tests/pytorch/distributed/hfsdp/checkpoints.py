"""Bodies: checkpoints of sharded optimizer state onto other meshes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import harness
import torch

from hfsdp.bodies import same_parameters
from hfsdp.models import SEED, Case, Run

#: Axes of the mesh (None: stock TE in one process) and the outer strategy.
Place = tuple[dict[str, int] | None, str]


def load_on_different_meshes(
    case: dict[str, Any], saved: Place, others: list[Place], directory: str
) -> list[int]:
    """Save on one mesh, load on others: the same bits of weights and state, and the same steps afterwards.

    Returns:
        Comparisons per other mesh.
    """
    import te_fsdp

    path = Path(directory) / "checkpoint"
    run = Run(Case(**case), saved[0], outer=saved[1])
    run.steps(2)
    te_fsdp.checkpoint.save(path, run.model, run.optimizer)
    position, expected = run.position, full_state(run)
    run.steps(2)
    counts = []
    for axes, outer in others:
        other = Run(Case(**case), axes, outer=outer, seed=SEED + 1)
        te_fsdp.checkpoint.load(path, other.model, other.optimizer)
        checks, result = harness.Comparisons(), full_state(other)
        assert result.keys() == expected.keys(), result.keys() ^ expected.keys()
        for name, value in expected.items():
            checks.bitwise_equal(f"{axes} {outer} {name}", result[name], value)
        other.position = position
        other.steps(2)
        if other.case.dtype == torch.float32:  # bf16 sums differ from mesh to mesh
            same_parameters(checks, other, run, f"{axes} {outer} trained on")
        counts.append(checks.require(1))
    return counts


def full_state(run: Run) -> dict[str, torch.Tensor]:
    """Return weights and state of a run, unsharded, by name. Collective."""
    results = {}
    for name, parameter in run.model.named_parameters():
        results[name] = harness.full(parameter)
        for key, value in sorted(run.optimizer.state.get(parameter, {}).items()):
            if isinstance(value, torch.Tensor):
                results[f"{name} {key}"] = harness.full(value)
    return results
