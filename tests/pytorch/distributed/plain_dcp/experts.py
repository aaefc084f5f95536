"""Bodies: torch's own state dicts of experts over an expert-parallel mesh."""

from __future__ import annotations

import copy
from typing import Any

import harness
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from plain_dcp import round_trip
from plain_dcp.round_trip import (
    Job,
    differing,
    largest_difference,
    of_all_experts,
    to_full,
    within_one_step,
)

AXES = {"dp_shard": 2, "ep": 2}


def _flat(states: dict[str, Any]) -> dict[str, torch.Tensor]:
    results = {f"{name}.{key}": value for name, own in states.items() for key, value in own.items()}
    return {name: to_full(value) for name, value in results.items() if torch.is_tensor(value)}


def exports(kind: str, recipe: str, sharder: str) -> dict[str, Any]:
    """Export models and optimizers as unsharded tensors, before and after a step, and load them into other jobs.

    Returns:
        Names whose tensors are wrong, by use.
    """
    job = Job(kind, recipe, AXES, sharder, True, seed=3)
    on_rank_0 = StateDictOptions(full_state_dict=True, cpu_offload=True)
    first = get_model_state_dict(job.model, options=on_rank_0)
    outcome: dict[str, Any] = {"elsewhere": sorted(first) if dist.get_rank() else []}
    if dist.get_rank() == 0:
        weights = {name: to_full(value) for name, value in first.items() if not name.endswith("_extra_state")}
        expected = round_trip.unsharded(kind, recipe, 3)
        outcome["unsharded"] = differing(of_all_experts(kind, weights), expected)
    job.step(0)
    job.optimizer.param_groups[0]["lr"] = 0.5
    values = job.values()
    for use, options in {
        "everywhere": StateDictOptions(full_state_dict=True),
        "rank 0": on_rank_0,
    }.items():
        model = get_model_state_dict(job.model, options=options)
        states = get_optimizer_state_dict(job.model, job.optimizer, options=options)
        if use == "everywhere" or dist.get_rank() == 0:
            results = {n: to_full(value) for n, value in model.items() if not n.endswith("_extra_state")}
            results |= _flat(states["state"])
            outcome[use] = differing(of_all_experts(kind, results), values)
            names = sorted(states["param_groups"][0]["params"])
            outcome[f"group, {use}"] = [] if names == sorted(states["state"]) else names
        other = Job(kind, recipe, AXES, sharder, True, seed=4)
        load = StateDictOptions(full_state_dict=True, broadcast_from_rank0=use == "rank 0")
        set_model_state_dict(other.model, model, options=load)
        set_optimizer_state_dict(other.model, other.optimizer, copy.deepcopy(states), options=load)
        again = other.values()  # quantized once
        outcome[f"loaded, {use}"] = [
            f"{n}: {float((again[n] - values[n]).abs().max() / values[n].abs().max()):.3f}"
            for n in differing(again, values)
            if not within_one_step(again[n], values[n], recipe)
        ]
        outcome[f"lr, {use}"] = [other.optimizer.param_groups[0].get("lr")]
    return outcome


def resumes(kind: str, recipe: str, sharder: str, directory: str) -> dict[str, Any]:
    """Save by ``dcp.async_save`` and load on the same mesh: values, delayed scaling, options of a group of experts."""
    axes = AXES if kind == "experts" else {"dp_shard": 2, "tp": 2}
    job, other = (Job(kind, recipe, axes, sharder, True, seed) for seed in (3, 4))
    job.step(0)
    job.optimizer.param_groups[0]["lr"] = 0.5
    dcp.async_save(
        job.state(), checkpoint_id=directory, process_group=dist.new_group(backend="gloo")
    ).result()
    state = other.state()
    dcp.load(state, checkpoint_id=directory)
    other.take(state)
    outcome = {"wrong": differing(job.values(), other.values())}
    entries = {n: value for n, value in job.model.state_dict().items() if n.endswith("_extra_state")}
    # Not by value: the newest amaxes are each rank's own until the next forward, and the files have those of one rank.
    again = other.model.state_dict()  # as a save without a step in between has it
    sizes = {n: (state["model"][n].numel(), again[n].numel()) for n in entries}
    outcome["entries"] = [n for n, entry in entries.items() if {*sizes[n]} != {entry.numel()}]
    outcome["states"] = sum(entry.numel() > 0 for entry in entries.values())
    job.step(1)
    other.step(1)
    outcome["after"] = largest_difference(job.values(), other.values())
    return {**outcome, "lr": other.optimizer.param_groups[0].get("lr")}


def _delayed(job: Job) -> dict[str, torch.Tensor]:
    """Return delayed scaling's state of all experts without the newest amaxes, which are one rank's."""
    from te_fsdp.upstream import te as _te

    inner, group = job.model.inner, job.model.ep
    first = 0 if group is None else dist.get_rank(group) * inner.num_gemms
    results = {}
    for key, state in (_te.delayed_states(inner) or {}).items():
        for name, tensor in (("scale", state.scale), ("amax_history", state.amax_history[1:])):
            for index, part in enumerate(tensor.cpu().clone().chunk(inner.num_gemms, -1), first):
                results[f"{key}.{name}.{index}"] = part
    return of_all_experts("experts", results, group)


def load_on_different_mesh(sharder: str, directory: str) -> dict[str, Any]:
    """Load the delayed scaling of experts by ``dcp.load`` onto meshes whose ranks have other experts."""
    job = Job("experts", "delayed", AXES, sharder, True, seed=3)
    for name, parameter in job.model.inner.named_parameters():
        if int(name.removeprefix("weight")) + 2 * dist.get_rank(job.model.ep) == 1:
            with torch.no_grad():
                parameter.mul_(8)  # its own scale
    for position in range(3):
        job.step(position)
    saved = _delayed(job)
    dcp.save(job.state(), checkpoint_id=directory)
    outcome: dict[str, Any] = {"experts": len({tuple(t.flatten().tolist()) for t in saved.values()})}
    for axes in ({"ep": 4}, {"ep": 2, "tp": 2}, {"dp_shard": 4}):
        other = Job("experts", "delayed", axes, sharder, True, seed=4)
        outcome[f"control {axes}"] = len(differing(saved, _delayed(other)))
        state = other.state()
        dcp.load(state, checkpoint_id=directory)
        other.take(state)
        outcome[f"wrong {axes}"] = differing(saved, _delayed(other))
    return outcome


def uneven_rows() -> dict[str, Any]:
    """Load unsharded tensors whose rows the ranks of tp and dp divide unevenly: 81 rows of tp over two ranks."""
    import transformer_engine.pytorch as te

    import te_fsdp

    meshes = te_fsdp.Meshes.build(dp_shard=2, tp=2, device_type=harness.device_type())
    assert meshes.tp is not None
    tp = {"tp_size": 2, "tp_group": meshes.tp.get_group(), "parallel_mode": "column", "device": "meta"}
    model = nn.Sequential(te.Linear(8, 162, **tp))
    te_fsdp.fully_shard(model, meshes)
    te_fsdp.materialize(model, seed=0)
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    generator = torch.Generator().manual_seed(1)
    values = {name: torch.randn(p.shape, generator=generator) for name, p in model.named_parameters()}
    full = StateDictOptions(full_state_dict=True)
    states = get_optimizer_state_dict(model, optimizer, options=full)
    for name, own in states["state"].items():
        own["exp_avg"] = 2 * values[name]
    set_model_state_dict(model, dict(values), options=StateDictOptions(full_state_dict=True, strict=False))
    set_optimizer_state_dict(model, optimizer, states, options=full)
    results = {name: to_full(p) for name, p in model.named_parameters()}
    moments = {name: to_full(optimizer.state[p]["exp_avg"]) / 2 for name, p in model.named_parameters()}
    sizes = sorted({int(p.to_local().shape[0]) for p in model.parameters()})
    return {"weights": differing(results, values), "moments": differing(moments, values), "rows": sizes}


def converted(kind: str, recipe: str, directory: str) -> dict[str, Any]:
    """Convert a plain directory of a mesh by the command line; compare it with a checkpoint and the weights."""
    from pathlib import Path

    import te_fsdp
    from te_fsdp.checkpoint.portable.convert import open_any
    from te_fsdp.cli import main

    job = Job(kind, recipe, AXES, "te_fsdp", True, seed=3)
    if recipe == "none":  # the param groups have names, which are those of each rank's experts
        job.optimizer = torch.optim.AdamW(job.model.named_parameters(), lr=1e-2)
    job.step(0)
    te_fsdp.checkpoint.save(f"{directory}/c", job.model, job.optimizer)
    dcp.save(job.state(), checkpoint_id=f"{directory}/dcp")
    values = {name: value for name, value in job.values().items() if name.count(".") == 1}
    outcome: dict[str, Any] = {}
    if dist.get_rank() == 0:
        plain, target = f"{directory}/dcp", f"{directory}/converted"
        outcome["codes"] = [
            main(["ckpt", "convert", plain, target, "--to", "checkpoint"]),
            main(["ckpt", "diff", f"{directory}/c", target, "--weights-only", "--strict"]),
        ]
        stacked = open_any(Path(target)).value("inner.weight").full()
        outcome["wrong"] = differing(
            of_all_experts("one parameter", {"inner.weight": stacked.float()}), values
        )
    dist.barrier()
    other = Job(kind, recipe, {"dp_shard": 4}, "te_fsdp", True, seed=4)
    te_fsdp.checkpoint.load(f"{directory}/converted", other.model, strict=False)
    loaded = {name: value for name, value in other.values().items() if name.count(".") == 1}
    return outcome | {"loaded": differing(loaded, values)}
