"""Bodies: state dicts that scripts make of DTensors themselves, as the FSDP2 example of pytorch/examples."""

from __future__ import annotations

import copy
import inspect
import io
import pickle
from multiprocessing.reduction import ForkingPickler
from typing import Any

import harness
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import CheckpointException, state_dict
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from plain_dcp.round_trip import (
    WHOLE,
    Job,
    Model,
    differing,
    largest_difference,
    to_full,
    within_one_step,
)
from te_fsdp.errors import CheckpointError

KIND, AXES = "gated MLP", {"dp_shard": 1, "tp": 2}


def _like(value: torch.Tensor, target: DTensor) -> DTensor:
    return distribute_tensor(value.to(harness.device()), target.device_mesh, target.placements)


def assigned_on_meta() -> dict[str, Any]:
    """Load a model on meta by ``load_state_dict(assign=True)``; compare with the unsharded module, as the next step."""
    import te_fsdp

    meshes = te_fsdp.Meshes.build(**AXES, device_type=harness.device_type())
    torch.manual_seed(3)
    unsharded = Model(KIND, "none", keep=False, device=str(harness.device()))
    model = Model(KIND, "none", keep=False, device="meta", **meshes.te_kwargs())
    te_fsdp.set_device_mesh(model, meshes.tp, meshes.weight)
    fully_shard(model, mesh=meshes.fsdp_with_size_one)
    targets: Any = model.state_dict()
    state = {
        name: nn.Parameter(_like(value, targets[name])) for name, value in unsharded.state_dict().items()
    }
    model.load_state_dict(state, strict=False, assign=True)
    outcome = {
        "wrong": differing(*({n: to_full(p) for n, p in m.named_parameters()} for m in (model, unsharded))),
        # The negative control: the loaded tensor has different rows on this rank.
        "control": torch.equal(state["inner.fc1_weight"].to_local(), model.inner.fc1_weight.to_local()),
    }
    for one in (model, unsharded):
        x = torch.ones(8, 2, 512, device=harness.device()).cumsum(0) / 8
        one(x).square().mean().backward()
        torch.optim.AdamW(one.parameters(), lr=1e-2, eps=1e-3).step()
    after = [{n: to_full(p) for n, p in one.named_parameters()} for one in (model, unsharded)]
    return outcome | {"after": largest_difference(*after)}


def _load_states(optimizer: Any, full: dict[str, Any]) -> None:
    """Shard unsharded states as the example does: in the optimizer's own state dict."""
    # Torch's function, which the example imports by name before te_fsdp replaces anything.
    inspect.unwrap(state_dict._init_optim_state)(optimizer)
    own = optimizer.state_dict()
    for key, states in own["state"].items():
        for name, loaded in full[key].items():
            value, target = copy.deepcopy(loaded), states[name]
            states[name] = _like(value, target) if isinstance(target, DTensor) else value
    optimizer.load_state_dict(own)


def _job(recipe: str, axes: dict[str, int], sharder: str, by: str, seed: int) -> Job:
    import te_fsdp

    job = Job(KIND, recipe, axes, sharder, False, seed=seed)
    if by == "the example, main weights":
        job.optimizer = torch.optim.AdamW(job.model.parameters(), lr=1e-2, eps=1e-3)
        te_fsdp.main_weights(job.model, job.optimizer)
    return job


def loaded_states(recipe: str, axes: dict[str, int], sharder: str, by: str) -> dict[str, Any]:
    """Load the states of a trained optimizer ``by`` the example or ``torch.save``; compare them, and the next step."""
    job, other = (_job(recipe, axes, sharder, by, seed) for seed in (3, 4))
    job.step(0)
    job.step(1)
    # Of a third one, because it creates the states of the optimizer.
    values, control = job.values(), _job(recipe, axes, sharder, by, 4).values()
    if by == "torch.save":
        file = io.BytesIO()
        torch.save({"model": job.model.state_dict(), "optimizer": job.optimizer.state_dict()}, file)
        file.seek(0)
        saved = torch.load(file, weights_only=False)
        other.model.load_state_dict(saved["model"])
        other.optimizer.load_state_dict(saved["optimizer"])
    else:
        state_dict.set_model_state_dict(other.model, job.state()["model"])
        entries = job.optimizer.state_dict()["state"]
        full = {
            key: {n: t.full_tensor() if isinstance(t, DTensor) else t for n, t in states.items()}
            for key, states in entries.items()
        }
        _load_states(other.optimizer, full)
    wrong = differing(values, other.values())
    exported = get_optimizer_state_dict(other.model, other.optimizer, options=WHOLE)["state"]
    flat = {
        f"{n}.{k}": to_full(t)
        for n, states in exported.items()
        for k, t in states.items()
        if torch.is_tensor(t)
    }
    job.step(2)
    other.step(2)
    return {
        "control": len(differing(values, control)),
        "wrong": wrong,
        "exported": differing(flat, {key: values[key] for key in flat}),
        "after": largest_difference(job.values(), other.values()),
    }


def copies_and_pickles(recipe: str, directory: str) -> dict[str, Any]:
    """Copy and pickle a gated weight; return wrong values, and the errors of functions of the loaded one."""
    job, other = (Job(KIND, recipe, AXES, "te_fsdp", False, seed=seed) for seed in (3, 4))
    name, file = "inner.fc1_weight", io.BytesIO()
    weight: Any = job.model.get_parameter(name)
    expected = to_full(weight)
    copies = {"copy": copy.copy(weight), "deepcopy": copy.deepcopy(weight.detach())}
    outcome: dict[str, Any] = {
        key: torch.equal(to_full(tensor), expected) and tensor.shape == weight.shape
        for key, tensor in copies.items()
    }
    torch.save(weight.detach(), file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    for key, call in {
        "full_tensor": loaded.full_tensor,
        "dcp.save": lambda: dcp.save({"weight": loaded}, checkpoint_id=directory),
    }.items():
        try:
            call()
            outcome[key] = "no error"
        except (CheckpointError, CheckpointException) as error:
            outcome[key] = str(error)
    other.model.load_state_dict({name: loaded}, strict=False)
    return outcome | {"loaded": torch.equal(to_full(other.model.get_parameter(name)), expected)}


def quantized_tensors(recipe: str, broadcast: bool) -> list[str]:
    """Load the state dict of stock TE's quantized module, from rank 0 or on all ranks; compare the values."""
    torch.manual_seed(5)
    stock = Model(KIND, recipe, keep=True, device=str(harness.device()))
    job = Job(KIND, recipe, AXES, "torch", True, seed=4)
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=broadcast)
    state = stock.state_dict() if torch.distributed.get_rank() == 0 or not broadcast else {}
    state_dict.set_model_state_dict(job.model, state, options=options)
    found, expected = ({n: to_full(p) for n, p in m.named_parameters()} for m in (job.model, stock))
    # Rank 0's values are quantized once. All ranks' bytes are copied.
    is_same = within_one_step if broadcast else lambda one, other, _: torch.equal(one, other)
    return [name for name, value in expected.items() if not is_same(value, found[name], recipe)]


def main_weights_in_a_process(recipe: str) -> list[str]:
    """Stage and pickle the state of an optimizer with main weights, as ``dcp.async_save`` does for a process."""
    import te_fsdp

    job = Job("Linear", recipe, {"dp_shard": 2}, "torch", False, seed=3)
    job.optimizer = torch.optim.AdamW(job.model.parameters(), lr=1e-2)
    te_fsdp.main_weights(job.model, job.optimizer)
    job.step(0)
    states = get_optimizer_state_dict(job.model, job.optimizer)["state"]
    copied = pickle.loads(
        ForkingPickler.dumps(DefaultStager(StagingOptions(False, False, False, False)).stage(states))
    )
    assert "master_param" in states["inner.weight"]
    return [
        f"{name}.{key}"
        for name, entries in states.items()
        for key, value in entries.items()
        if not torch.equal(to_full(value), to_full(copied[name][key]))
    ]
