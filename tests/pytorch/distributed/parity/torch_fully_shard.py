"""Bodies: units of torch's own ``fully_shard`` that are unsharded in a step, compared with one process."""

from __future__ import annotations

import functools
from typing import Any

import harness
import torch
from strategies.models import SEED, Model, batch, one_process, step_both
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

LEARNING_RATE = 0.5


def _models(bound: str = "", **options: Any) -> tuple[Any, Any, Any]:
    """Return meshes, a model whose blocks and root are units of torch, and its reference in one process.

    ``bound`` is the submodule whose children are bound one by one. The default binds the model.
    """
    import te_fsdp

    meshes = te_fsdp.Meshes.build(dp_shard=-1, device_type=harness.device_type())
    model = Model("meta")
    for module in model.get_submodule(bound).children() if bound else (model,):
        te_fsdp.set_device_mesh(module, meshes.tp, meshes.weight)
    for unit in (*model.blocks, model):
        fully_shard(unit, mesh=meshes.fsdp, **options)
    te_fsdp.materialize(model, seed=SEED)
    return meshes, model, one_process()


def compare_steps(how: str) -> dict[str, float]:
    """Compare three steps of a bound model.

    ``how``: "evaluated" between backward and step, "kept" after backward, or "parts": the same, with bound blocks.
    """
    meshes, model, reference = _models("blocks" if how == "parts" else "")
    if how != "evaluated":
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


def use_block_twice(library: str) -> dict[str, float]:
    """Use a block twice in a forward under reentrant checkpoints of TE or torch; compare its gradients."""
    import transformer_engine.pytorch as te
    from torch.utils.checkpoint import checkpoint

    meshes, model, reference = _models()
    run: Any = te.checkpoint if library == "te" else checkpoint

    def forward(each: Any, x: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            x = x + run(each.blocks[0], x, use_reentrant=True)
        return each.head(x)

    x = batch(0, meshes.data_size, 1)[0]
    for each, inputs in ((model, x[meshes.data_rank]), (reference, x.flatten(0, 1))):
        each.forward = functools.partial(forward, each)
        each(inputs.clone().requires_grad_()).square().mean().backward()
    pairs = zip(model.blocks[0].parameters(), reference.blocks[0].parameters(), strict=True)
    gradients = [(harness.full(p.grad), harness.full(r.grad)) for p, r in pairs]
    return {"worst": max(float((ours - theirs).norm() / theirs.norm()) for ours, theirs in gradients)}


def errors_of_gradient_hooks(parameter: str, when: str) -> tuple[str, str, list[bool]]:
    """Register gradient hooks on a parameter before or after torch's fully_shard; return the error and the calls."""
    import te_fsdp

    meshes = te_fsdp.Meshes.build(dp_shard=-1, device_type=harness.device_type())
    model, called = Model(harness.device_type()), list[bool]()
    te_fsdp.set_device_mesh(model, meshes.tp, meshes.weight)
    try:
        if when == "before":
            model.get_parameter(parameter).register_hook(lambda gradient: 0 * gradient)
        for unit in (*model.blocks, model):
            fully_shard(unit, mesh=meshes.fsdp)
        if when == "after":
            model.get_parameter(parameter).register_hook(lambda gradient: 0 * gradient)
        model.get_parameter(parameter).register_post_accumulate_grad_hook(
            lambda p: called.append(p.grad is not None)
        )
        model(batch(0, meshes.data_size, 1)[0][meshes.data_rank]).square().mean().backward()
    except te_fsdp.OrderError as error:
        return type(error).__name__, str(error), called
    return "", "", called


def errors_of_second_backward(program: str) -> tuple[str, float]:
    """Return the error of a second backward, or of one with ``create_graph=True``, and the worst gradient without."""
    from torch.utils.checkpoint import checkpoint

    import te_fsdp

    meshes, model, reference = _models()
    x, worst = batch(0, meshes.data_size, 1)[0], 0.0
    try:
        for _ in range(2):
            for each, inputs in ((model, x[meshes.data_rank]), (reference, x.flatten(0, 1))):
                first, second = each(inputs), None
                if program == "two forwards":
                    second = each(2 * inputs)
                elif program == "recomputed":
                    first = each.head(checkpoint(each.blocks[0], inputs, use_reentrant=False))
                first.square().mean().backward(
                    create_graph=program == "create_graph", retain_graph=program == "retain_graph"
                )
                if second is not None or program == "retain_graph":
                    (first if second is None else second).square().mean().backward()
        for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
            if theirs.grad is not None:
                mine, wanted = harness.full(ours.grad), harness.full(theirs.grad)
                worst = max(worst, float((mine - wanted).norm() / wanted.norm()))
    except te_fsdp.OrderError as error:
        return str(error), worst
    return "", worst


def compare_changes_after_evaluation(change: str, **options: Any) -> dict[str, Any]:
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


def build_optimizer_while_unsharded(part: str, when: str) -> tuple[str, str]:
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


def compare_changes_to_unsharded(change: str, after: str, by: str = "set_device_mesh") -> dict[str, Any]:
    """Change units with ``reshard_after_forward=False`` while their weights are unsharded, and train.

    Args:
        change: "optimizer", "load_state_dict" or "none".
        after: "evaluation", or "backward" (units stay unsharded with ``set_reshard_after_backward(False)``).
        by: Function that binds the model: "set_device_mesh", or "te_fsdp" around torch's units.
    """
    import te_fsdp

    if by == "te_fsdp":
        meshes, model, reference = _nested()
    else:
        meshes, model, reference = _models(reshard_after_forward=False)
    if after == "backward":
        model.set_reshard_after_backward(False)
    pairs = [(m, torch.optim.SGD(m.parameters(), lr=LEARNING_RATE)) for m in (model, reference)]
    saved = [{n: v.clone() for n, v in m.state_dict().items() if torch.is_tensor(v)} for m, _ in pairs]
    worst = 0.0

    def evaluate() -> float:
        x = batch(9, meshes.data_size, 1)[0]
        with torch.no_grad():
            mine, wanted = model(x[0]), reference(x[0])
        return float((mine - wanted).norm() / wanted.norm())

    step_both(pairs, meshes, 0)
    worst = max(worst, evaluate())
    if after == "backward":
        step_both(pairs, meshes, 1)
        x = batch(2, meshes.data_size, 1)[0]
        model(x[meshes.data_rank]).square().mean().backward()
        pairs[0][1].zero_grad()
    text = ""
    try:
        for index, (m, _) in enumerate(pairs):
            if change == "load_state_dict":
                m.load_state_dict(saved[index], strict=False)
            elif change == "optimizer":
                for unit in filter(lambda unit: hasattr(unit, "unshard"), m.modules()):
                    unit.unshard()
                pairs[index] = (m, torch.optim.SGD(m.parameters(), lr=LEARNING_RATE))
        for number in range(3, 6):
            worst = max(worst, evaluate()) if change != "none" or number > 3 else worst
            step_both(pairs, meshes, number)
    except te_fsdp.TeFsdpError as error:
        text = f"{type(error).__name__}: {error}"
    worst = max(worst, evaluate())
    for unit in model.modules():
        if hasattr(unit, "reshard"):
            unit.reshard()
    return {"worst": worst, "weights": _distance(model, reference), "text": text}


def _distance(model: Any, reference: Any) -> float:
    pairs = zip(model.parameters(), reference.parameters(), strict=True)
    values = [(harness.full(p.detach()), harness.full(r.detach())) for p, r in pairs]
    return max(float((value - expected).norm() / expected.norm()) for value, expected in values)


def _nested() -> tuple[Any, Any, Any]:
    """Return meshes, a model of ``te_fsdp.fully_shard`` with torch's units in it, and its reference in one process."""
    import te_fsdp

    meshes = te_fsdp.Meshes.build(dp_shard=-1, device_type=harness.device_type())
    model = Model("meta")
    for unit in model.blocks:
        fully_shard(unit, mesh=meshes.fsdp, reshard_after_forward=False)
    te_fsdp.fully_shard(model, meshes)
    te_fsdp.materialize(model, seed=SEED)
    return meshes, model, one_process()


def error_of_mesh(mesh: str) -> tuple[str, str]:
    """Return class and text of the error of torch's ``fully_shard`` over a mesh, for a model with ``tp``."""
    import transformer_engine.pytorch as te

    import te_fsdp

    job = init_device_mesh(harness.device_type(), (2, 2), mesh_dim_names=("dp_shard", "tp"))
    meshes = te_fsdp.Meshes.from_device_mesh(job)
    model = nn.Module()
    model.fc = te.Linear(
        8, 8, parallel_mode="column", tp_size=2, tp_group=job["tp"].get_group(), device="meta"
    )
    te_fsdp.set_device_mesh(model, meshes.tp, meshes.weight)
    passed = {"job": job, "tp": job["tp"], "weight": meshes.weight, "dp": job["dp_shard"]}
    if mesh == "group":
        passed["group"] = DeviceMesh.from_group(job["dp_shard"].get_group(), harness.device_type())
    try:
        fully_shard(model, **({} if mesh == "none" else {"mesh": passed[mesh]}))
    except (te_fsdp.TeFsdpError, RuntimeError, TypeError) as error:
        return type(error).__name__, str(error)
    return "", ""
