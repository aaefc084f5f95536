"""Bodies: loads of state dicts into an optimizer in which some parameters have no state."""

from __future__ import annotations

import copy
from typing import Any

import harness
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from checkpointing.models import recipe_of
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import fully_shard
from torch.utils._pytree import tree_map_only


class Model(torch.nn.Sequential):
    """A gated MLP, and a layer that forwards may leave out."""

    def forward(self, x: torch.Tensor, *, partly: bool = False) -> torch.Tensor:
        x = self[0](x)
        return x if partly else self[1](x)


class Training:
    """A model whose first GEMM is frozen in steps that leave out its last layer."""

    def __init__(self, axes: dict[str, int], optimizer: str, seed: int, *, by: str) -> None:
        import transformer_engine.pytorch as te

        import te_fsdp

        self.meshes = te_fsdp.Meshes.build(**axes, device_type=harness.device_type())
        is_quantized = optimizer == "main weights"
        self.recipe = recipe_of("current") if is_quantized else None
        dtype = torch.bfloat16 if is_quantized else torch.float32
        with te.quantized_model_init(enabled=is_quantized, recipe=self.recipe):
            options: dict[str, Any] = {"device": "meta", "params_dtype": dtype}
            tp = {"tp_size": axes.get("tp", 1), "set_parallel_mode": "tp" in axes}
            mlp = te.LayerNormMLP(16, 32, activation="swiglu", **tp, **options)
            self.model = Model(mlp, te.Linear(16, 16, **options))
        if by == "torch":
            te_fsdp.set_device_mesh(self.model, tp_mesh=self.meshes.tp, weight_mesh=self.meshes.weight)
            fully_shard(self.model, mesh=self.meshes.fsdp)
        else:
            te_fsdp.fully_shard(self.model, self.meshes, units=[te.LayerNormMLP])
        te_fsdp.materialize(self.model, seed=seed)
        cls = torch.optim.SGD if optimizer == "SGD" else torch.optim.AdamW
        momentum = {"momentum": 0.9} if optimizer == "SGD" else {}
        self.optimizer = cls(self.model.parameters(), lr=1e-2, **momentum)
        if is_quantized:
            te_fsdp.main_weights(self.model, self.optimizer)

    def steps(self, count: int, *, partly: bool = False) -> None:
        import transformer_engine.pytorch as te

        self.model[0].fc1_weight.requires_grad_(not partly)
        for position in range(count):
            generator = torch.Generator().manual_seed(10 * position + self.meshes.data_rank)
            x = torch.randn(16, 16, generator=generator).to(harness.device(), self.model[1].weight.dtype)
            with te.autocast(enabled=self.recipe is not None, recipe=self.recipe):
                y = self.model(x, partly=partly)
            y.float().square().mean().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
        self.model[0].fc1_weight.requires_grad_()

    def values(self) -> dict[str, torch.Tensor]:
        return {
            f"{name}.{key}": harness.full(value).clone()
            for name, parameter in self.model.named_parameters()
            for key, value in self.optimizer.state.get(parameter, {}).items()
            if torch.is_tensor(value)
        }


def load(axes: dict[str, int], optimizer: str, *, by: str, form: str) -> dict[str, Any]:
    """Load a state dict of all states into an optimizer that lacks some; return the differences.

    Returns:
        Numbers of states: of the file, and of the optimizer before the load. Names of states that differ after it,
        that are sharded differently than their parameters, and of parameters that the load has changed.
    """
    saved, run = (Training(axes, optimizer, seed, by=by) for seed in (0, 1))
    saved.steps(2)
    run.steps(3, partly=True)
    before = len(run.values())
    weights = {name: harness.full(p.detach()).clone() for name, p in run.model.named_parameters()}
    options = {"full_state_dict": form != "flat", "flatten_optimizer_state_dict": "flat" in form}
    state: Any = get_optimizer_state_dict(saved.model, saved.optimizer, options=StateDictOptions(**options))
    is_broadcast = "broadcast" in form
    state = state if not is_broadcast or dist.get_rank() == 0 else {}
    options["broadcast_from_rank0"] = is_broadcast
    set_optimizer_state_dict(run.model, run.optimizer, state, options=StateDictOptions(**options))
    right, found = saved.values(), run.values()
    named = dict(run.model.named_parameters())
    return {
        "states": len(right),
        "before": before,
        "differ": [n for n in right if n not in found or not torch.equal(found[n], right[n])],
        "unsharded": [
            f"{name}.{key}"
            for name, p in named.items()
            for key, value in run.optimizer.state[p].items()
            if torch.is_tensor(value) and value.ndim and getattr(value, "placements", ()) != p.placements
        ],
        "changed": [n for n, p in named.items() if not torch.equal(harness.full(p.detach()), weights[n])],
        "rates": [group["lr"] for group in run.optimizer.param_groups],
    }


def load_by_dcp(directory: str, *, flat: bool, prefix: str, form: str) -> tuple[str, str, int]:
    """Load states that the given state dict lacks by ``dcp.load``; return two errors, and the number of states.

    ``form`` is that of the given state dict: ``own``, or a ``deepcopy`` or ``clone`` of its tensors. The second
    error is that of a checkpoint without these states, which loads.
    """
    saved, run = (Training({"dp_shard": 2}, "AdamW", seed, by="te_fsdp") for seed in (0, 1))
    saved.steps(2)
    run.steps(3, partly=True)
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    errors = []
    for number, source in enumerate((saved, run)):
        there, here = (
            {prefix: get_optimizer_state_dict(job.model, job.optimizer, options=options)}
            for job in (source, run)
        )
        dcp.save(there, checkpoint_id=f"{directory}/{number}")
        if form == "deepcopy":
            here = copy.deepcopy(here)
        elif form == "clone":
            here = tree_map_only(torch.Tensor, torch.clone, here)
        try:
            dcp.load(here, checkpoint_id=f"{directory}/{number}")
            errors.append("")
        except CheckpointException as error:
            errors.append(str(error))
    return *errors, len(run.values())


def load_with_gradients(*, broadcast: bool) -> str:
    """Load while there are gradients; return the error of this rank."""
    saved, run = (Training({"dp_shard": 2}, "AdamW", seed, by="te_fsdp") for seed in (0, 1))
    saved.steps(1)
    run.steps(1, partly=True)
    state: Any = get_optimizer_state_dict(
        saved.model, saved.optimizer, options=StateDictOptions(full_state_dict=True)
    )
    x = torch.ones(16, 16, device=harness.device())
    run.model(x).sum().backward()
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=broadcast)
    try:
        set_optimizer_state_dict(
            run.model, run.optimizer, {} if broadcast and dist.get_rank() else state, options=options
        )
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""
