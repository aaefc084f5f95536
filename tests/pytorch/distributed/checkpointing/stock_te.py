"""Bodies: files of stock TransformerEngine in one process, exchanged with te_fsdp on a mesh."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import harness
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from checkpointing.bodies import AFTER, differing, local_state, logical_state
from checkpointing.mistakes import error_of, warnings_of_te_fsdp
from checkpointing.models import Case, Run

BEFORE = 2  # delayed scaling reads its histories from the second step on


def save_with_torch(case: Case, directory: str) -> list[float]:
    """Train stock TE, save model and optimizer state dicts with plain DCP, train on; return the further losses."""
    run = Run(case, None, seed=0)
    run.steps(BEFORE)
    torch.save(logical_state(run), f"{directory}/expected.pt")
    optimizer = run.optimizer.state_dict()
    names = {id(p): name for name, p in run.model.named_parameters()}
    for saved, group in zip(optimizer["param_groups"], run.optimizer.param_groups, strict=True):
        # As torch does for an optimizer that was given named parameters.
        saved["param_names"] = [names[id(p)] for p in group["params"]]
    state = {"model": run.model.state_dict(), "optimizer": optimizer, "step": BEFORE}
    dcp.save(state, checkpoint_id=f"{directory}/plain", no_dist=True)
    return run.steps(AFTER)


def convert(directory: str) -> None:
    """Convert what :func:`save_with_torch` saved to a checkpoint of te_fsdp."""
    from te_fsdp.cli import main

    assert main(["ckpt", "convert", f"{directory}/plain", f"{directory}/ours", "--to", "checkpoint"]) == 0


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


def save_with_plain_dcp(case: Case, directory: str) -> None:
    """Train stock TE, save it by plain DCP: with optimizer, the weights alone, and both without TE's extra state."""
    run = Run(case, None, seed=0)
    run.steps(BEFORE)
    model, optimizer = get_state_dict(run.model, run.optimizer)
    stripped = {name: value for name, value in model.items() if not name.endswith("_extra_state")}
    dcp.save({"model": model, "optimizer": optimizer, "step": BEFORE}, checkpoint_id=f"{directory}/whole")
    dcp.save(model, checkpoint_id=f"{directory}/weights")
    dcp.save({"model": stripped, "optimizer": optimizer}, checkpoint_id=f"{directory}/stripped")
    torch.save(logical_state(run) | _histories(run), f"{directory}/expected.pt")


def _histories(run: Run) -> dict[str, torch.Tensor]:
    """Return delayed scaling's state without the newest row, which is each rank's own until the next forward."""
    return {name: value for name, value in local_state(run).items() if ":scaling_" in name}


def load_plain_dcp(case: Case, axes: dict[str, int], directory: str) -> dict[str, Any]:
    """Load each of the directories on a mesh; compare logical values bit for bit."""
    import te_fsdp

    expected = torch.load(f"{directory}/expected.pt", weights_only=True)
    results: dict[str, Any] = {}
    for name in ("whole", "weights", "stripped"):
        run = Run(case, axes, seed=1)
        fresh = differing(expected, logical_state(run))
        optimizer = None if name == "weights" else run.optimizer
        with warnings_of_te_fsdp() as warnings:
            loaded = te_fsdp.checkpoint.load(f"{directory}/{name}", run.model, optimizer, verify=True)
        outcome = {"notes": loaded.notes, "left": loaded.left, "converted": loaded.converted}
        outcome["wrong"] = differing(expected, logical_state(run) | _histories(run))
        results[name] = {**outcome, "fresh": len(fresh), "warnings": len(warnings)}
    return results


def errors_of_dcp_directories(case: Case, axes: dict[str, int], directory: str) -> dict[str, tuple[str, str]]:
    """Load incomplete or mismatched directories. All ranks raise the same error, and nothing changes."""
    import te_fsdp

    run = Run(case, axes, seed=1)
    before, source = local_state(run), Path(directory, "whole")
    te_fsdp.checkpoint.save(f"{directory}/ours", run.model, run.optimizer)
    if dist.get_rank() == 0:
        Path(directory, "ours", "te_fsdp.json").unlink()
        for name in ("torn", "missing", "changed"):
            shutil.copytree(source, Path(directory, name))
        data = next(Path(directory, "torn").glob("*.distcp"))
        data.write_bytes(data.read_bytes()[:-3000])
        next(Path(directory, "missing").glob("*.distcp")).unlink()
        data = next(Path(directory, "changed").glob("*.distcp"))
        content = bytearray(data.read_bytes())
        content[len(content) // 2] ^= 4
        data.write_bytes(content)
    dist.barrier()
    results = {}
    for name in ("ours", "torn", "missing", "changed"):
        path = f"{directory}/{name}"
        verify = name == "changed"
        results[name] = error_of(lambda p=path, v=verify: te_fsdp.checkpoint.load(p, run.model, verify=v))
    sgd = torch.optim.SGD(run.model.parameters(), lr=0.1, momentum=0.9)
    results["optimizer"] = error_of(lambda: te_fsdp.checkpoint.load(source, run.model, sgd))
    results["convert"] = error_of(
        lambda: te_fsdp.checkpoint.load(source, run.model.to(torch.float64), convert=False)
    )
    run.model.to(torch.float32)
    assert not differing(before, local_state(run)), "a refused load changes nothing"
    return results


def _stock(case: Case, seed: int) -> Run:
    """Return stock TE on stock FSDP2, without te_fsdp."""
    from torch.distributed.fsdp import fully_shard

    run = Run(case, None, seed)
    mesh = init_device_mesh(harness.device_type(), (dist.get_world_size(),))
    for module in (run.model.layer, run.model):
        fully_shard(module, mesh=mesh)
    run.optimizer = run._optimizer()
    return run


def _save_plain(
    run: Run, path: str, *, entries: bool = True, ordinary: bool = False
) -> dict[str, torch.Tensor]:
    """Train a step, save by torch alone, with TE's entries or without; logical values.

    ``ordinary``: with the DTensors of TE's pull request, whose rows tensor parallelism has put in a different order.
    """
    run.steps(1)
    model, optimizer = get_state_dict(run.model, run.optimizer)
    states = [model, *optimizer["state"].values()] if ordinary else []
    for value in (value for state in states for value in state.values()):
        if isinstance(value, DTensor):
            value.__class__ = DTensor
    kept = {name: value for name, value in model.items() if entries or not name.endswith("_extra_state")}
    dcp.save({"model": kept, "optimizer": optimizer}, checkpoint_id=path)
    return logical_state(run)


def exchange_with_stock_fsdp2(case: Case, axes: dict[str, int], directory: str) -> dict[str, Any]:
    """Exchange directories of plain DCP between stock FSDP2 and TE, and te_fsdp without tp, by both loads."""
    import te_fsdp

    outcome: dict[str, Any] = {}
    stock = _save_plain(_stock(case, 0), f"{directory}/stock")
    ours = _save_plain(Run(case, axes, seed=1), f"{directory}/ours")
    _save_plain(Run(case, axes, seed=1), f"{directory}/ours-stripped", entries=False)
    outcome["control"] = len(differing(stock, ours))
    for source, expected in {"stock": stock, "ours": ours, "ours-stripped": ours}.items():
        run = Run(case, axes, seed=2)
        loaded = te_fsdp.checkpoint.load(f"{directory}/{source}", run.model, run.optimizer)
        outcome[f"{source} by te_fsdp"] = differing(expected, logical_state(run))
        asked = any("If they were saved with tensor parallelism" in note for note in loaded.notes)
        outcome[f"{source} notes"] = asked != (source == "ours-stripped")  # nothing confirms it there
    for source, run, expected in (
        ("stock", Run(case, axes, seed=2), stock),
        ("ours", _stock(case, 2), ours),
    ):
        model, optimizer = get_state_dict(run.model, run.optimizer)
        dcp.load({"model": model, "optimizer": optimizer}, checkpoint_id=f"{directory}/{source}")
        set_state_dict(run.model, run.optimizer, model_state_dict=model, optim_state_dict=optimizer)
        outcome[f"{source} by DCP"] = differing(expected, logical_state(run))
    return outcome


def error_of_tp_row_order(
    case: Case, saved: dict[str, int], axes: dict[str, int], directory: str
) -> dict[str, Any]:
    """Load without the entries of tp-sharded modules. The shards reveal the row order, and nothing changes."""
    import te_fsdp

    stacked = _save_plain(Run(case, saved, seed=0), f"{directory}/scrambled", entries=False, ordinary=True)
    run = Run(case, axes, seed=1)
    before = local_state(run)
    path = f"{directory}/scrambled"
    refused = error_of(lambda: te_fsdp.checkpoint.load(path, run.model, run.optimizer))
    unchanged = not differing(before, local_state(run))
    loaded = te_fsdp.checkpoint.load(path, run.model, run.optimizer, strict=False)
    wrong = differing(stacked, logical_state(run))
    return {"refused": refused, "unchanged": unchanged, "left": sorted(loaded.left), "wrong": wrong}


def load_unsharded_row_order(
    case: Case, saved: dict[str, int], axes: dict[str, int], directory: str
) -> dict[str, Any]:
    """Load the same directory as te_fsdp's models write it: every bit."""
    import te_fsdp

    stacked = _save_plain(Run(case, saved, seed=0), f"{directory}/ordered", entries=False)
    run = Run(case, axes, seed=1)
    control = len(differing(stacked, logical_state(run)))
    te_fsdp.checkpoint.load(f"{directory}/ordered", run.model, run.optimizer)
    return {"control": control, "wrong": differing(stacked, logical_state(run))}
