"""Bodies: units of torch's own ``fully_shard`` that are unsharded in a step, compared with one process."""

from __future__ import annotations

from typing import Any

import harness
import torch
from strategies.models import SEED, Model, batch, whole
from torch.distributed.fsdp import fully_shard

LEARNING_RATE = 0.5


def _models(**options: Any) -> tuple[Any, Any, Any]:
    """Meshes, a bound model whose blocks and root are units of torch, and its reference in one process."""
    import te_fsdp

    meshes = te_fsdp.Meshes.build(dp_shard=-1, device_type=harness.device_type())
    model = Model("meta")
    te_fsdp.set_device_mesh(model, meshes.tp, meshes.weight)
    for unit in (*model.blocks, model):
        fully_shard(unit, mesh=meshes.fsdp, **options)
    te_fsdp.materialize(model, seed=SEED)
    return meshes, model, whole()


def stepped(how: str) -> dict[str, float]:
    """Three steps of a bound model. ``how``: "evaluated" between backward and step, or "kept" after backward."""
    meshes, model, reference = _models()
    if how == "kept":
        model.set_reshard_after_backward(False)
    ours, theirs = (
        torch.optim.SGD([p for p in m.parameters() if p.requires_grad], lr=LEARNING_RATE)
        for m in (model, reference)
    )
    worst = 0.0
    for step in range(3):
        x = batch(step, meshes.data_size, 1)[0]
        loss = model(x[meshes.data_rank]).square().mean()
        loss.backward()
        reference(x.flatten(0, 1)).square().mean().backward()
        if how == "evaluated":
            with torch.no_grad():
                model(x[0])
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad():
            mine, wanted = model(x[0]), reference(x[0])
        worst = max(worst, float((mine - wanted).norm() / wanted.norm()))
    return {"worst": worst}


def evaluated(change: str, **options: Any) -> dict[str, Any]:
    """Change the root's head after an evaluation, and train: freeze or write it, or make an optimizer."""
    meshes, model, reference = _models(**options)
    with torch.no_grad():
        for each in (model, reference):
            each(batch(0, meshes.data_size, 1)[0][meshes.data_rank])
    first = harness.full(reference.head.weight.detach()).clone()
    for each in (model, reference):
        if change == "frozen":
            each.head.weight.requires_grad_(False)
        elif change == "unfrozen":
            each.head.bias.requires_grad_(True)
        elif change == "written":
            with torch.no_grad():
                each.head.weight.mul_(2)
    ours, theirs = (torch.optim.SGD(m.parameters(), lr=LEARNING_RATE) for m in (model, reference))
    for step in range(3):
        x = batch(step, meshes.data_size, 1)[0]
        model(x[meshes.data_rank]).square().mean().backward()
        reference(x.flatten(0, 1)).square().mean().backward()
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
    model.reshard()
    pairs = list(zip(model.named_parameters(), reference.parameters(), strict=True))
    values = [(harness.full(p.detach()), harness.full(r.detach())) for (_, p), r in pairs]
    return {
        "worst": max(float((value - expected).norm() / expected.norm()) for value, expected in values),
        "flags": [n for (n, p), r in pairs if p.requires_grad != r.requires_grad],
        "moved": bool((harness.full(reference.head.weight.detach()) != first).any()),
    }


def built_unsharded(part: str, when: str) -> tuple[str, str]:
    """Build an optimizer while a unit is unsharded by ``unshard()``, or after ``reshard()``; train a step."""
    meshes, model, _ = _models()
    unit = model if part == "root" else model.blocks[0]
    unit.unshard()
    if when == "after reshard":
        unit.reshard()
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    model(batch(0, meshes.data_size, 1)[0][meshes.data_rank]).square().mean().backward()
    try:
        optimizer.step()
    except RuntimeError as error:
        return type(error).__name__, str(error)
    return "", ""
