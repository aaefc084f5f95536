"""Bodies: a run that moves from mesh to mesh."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from checkpointing.bodies import assemble
from checkpointing.format_models import QuantizedTraining
from checkpointing.formats import AFTER, differing, shards


def continue_on_mesh(
    axes: dict[str, int] | None, directory: str, recipe: str, position: int, *, spoil: bool = False
) -> dict[str, Any]:
    """Load the previous mesh's checkpoint, compare every value, train, and save for the next mesh.

    Args:
        axes: This mesh.
        directory: Folder of the checkpoints.
        recipe: Format of the weights.
        position: Number of links before; 0 begins the chain.
        spoil: Negative control: nothing is loaded.

    Returns:
        Differences after the load, number of values compared, losses of `AFTER` steps.
    """
    import te_fsdp

    run = QuantizedTraining(recipe, axes, seed=position)
    wrong: list[str] = []
    count = 0
    if position:
        path = f"{directory}/{recipe}-{position - 1}"
        if not spoil:
            loaded = te_fsdp.checkpoint.load(path, run.model, run.optimizer, verify=True)
            assert loaded == {"position": position * AFTER} and not loaded.left and not loaded.converted
        wrong, count = differing(run, torch.load(f"{path}.pt", weights_only=True))
        run.position = position * AFTER
    losses = run.steps(AFTER)
    path = f"{directory}/{recipe}-{position}"
    te_fsdp.checkpoint.save(path, run.model, run.optimizer, extra={"position": run.position})
    expected = assemble(shards(run))
    if not dist.is_initialized() or dist.get_rank() == 0:
        torch.save(expected, f"{path}.pt")
    return {"wrong": wrong, "tensors": count, "losses": losses}


def train_uninterrupted(axes: dict[str, int], recipe: str, links: int) -> list[float]:
    """Return losses of training that is never interrupted."""
    return QuantizedTraining(recipe, axes, seed=0).steps(links * AFTER)
