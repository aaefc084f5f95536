"""Bodies: stock TransformerEngine in one process saves and loads with torch alone; te_fsdp on a mesh in between."""

from __future__ import annotations

from typing import Any

import torch

from checkpointing.bodies import AFTER, BEFORE, differing, logical_state
from checkpointing.models import Case, Run


def save_with_torch(case: Case, directory: str) -> list[float]:
    """Train stock TE, save model and optimizer with torch.save, train on; returns the further losses."""
    run = Run(case, None, seed=0)
    run.steps(BEFORE)
    torch.save(logical_state(run), f"{directory}/expected.pt")
    optimizer = run.optimizer.state_dict()
    names = {id(p): name for name, p in run.model.named_parameters()}
    for saved, group in zip(optimizer["param_groups"], run.optimizer.param_groups, strict=True):
        # As torch does for an optimizer that was given named parameters.
        saved["param_names"] = [names[id(p)] for p in group["params"]]
    torch.save(
        {"model": run.model.state_dict(), "optimizer": optimizer, "step": BEFORE}, f"{directory}/plain.pt"
    )
    return run.steps(AFTER)


def load_converted(
    case: Case, axes: dict[str, int], directory: str, name: str, *, train: bool, load: bool = True
) -> dict[str, Any]:
    """Load a converted checkpoint on a mesh, compare logical values bit for bit, save it from there, train on."""
    import te_fsdp

    run = Run(case, axes, seed=1)
    run.position = BEFORE
    if load:
        te_fsdp.checkpoint.load(f"{directory}/{name}", run.model, run.optimizer)
        te_fsdp.checkpoint.save(f"{directory}/{name}-from-mesh", run.model, run.optimizer)
    expected = torch.load(f"{directory}/expected.pt", weights_only=True)
    wrong = differing(expected, logical_state(run))
    return {"wrong": wrong, "tensors": len(expected), "losses": run.steps(AFTER if train else 0)}


def load_with_torch(case: Case, directory: str, name: str) -> dict[str, Any]:
    """Load a file of torch.save into stock TE, strict, by torch alone; compare, train on."""
    run = Run(case, None, seed=1)
    run.position = BEFORE
    state = torch.load(f"{directory}/{name}", weights_only=True)
    run.model.load_state_dict(state["model"])
    run.optimizer.load_state_dict(state["optimizer"])
    expected = torch.load(f"{directory}/expected.pt", weights_only=True)
    return {
        "wrong": differing(expected, logical_state(run)),
        "tensors": len(expected),
        "losses": run.steps(AFTER),
    }
