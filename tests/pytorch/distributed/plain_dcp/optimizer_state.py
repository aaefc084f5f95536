"""Bodies: optimizer state dicts in which some states, or all, are main weights only."""

from __future__ import annotations

import copy
from typing import Any

import harness
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from plain_dcp.partial_optimizer_state import _equal_after_a_step, _error_of_own_state, _job, _step
from plain_dcp.round_trip import WHOLE, Job, differing, to_full


class SignSGD(torch.optim.Optimizer):
    """An optimizer without state, and with an option that only an attribute records."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})
        self.scale = 1.0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.sub_(self.scale * group["lr"] * parameter.grad.sign())


class Momentum(SignSGD):
    """An optimizer of the user with state."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for parameter in [p for group in self.param_groups for p in group["params"] if p.grad is not None]:
            state = self.state[parameter]
            state["momentum"] = state.get("momentum", 0) * 0.5 + parameter.grad
        super().step()


def stateless(outer: str) -> dict[str, Any]:
    """Load the state of an optimizer without state into a new optimizer, and into the trained one itself."""
    job, other = _job(SignSGD, outer, 3), _job(SignSGD, outer, 4)
    _step(*job)
    job[1].load_state_dict(job[1].state_dict())
    other[0].load_state_dict(job[0].state_dict())
    other[1].load_state_dict(copy.deepcopy(job[1].state_dict()))
    return _equal_after_a_step(job, other)


def with_state(outer: str) -> str:
    """Load into a user's optimizer that has state, before its first step. The control."""
    return _error_of_own_state(_job(Momentum, outer, 3)[1])


def rolled_back(outer: str, trained: bool) -> dict[str, Any]:
    """Load the state from before the second layer has stepped, which steps afterwards."""
    job, other = _job("AdamW", outer, 3), _job("AdamW", outer, 3)
    for model, optimizer in (job, other):
        model[1].requires_grad_(False)
        _step(model, optimizer)
    saved = copy.deepcopy([part.state_dict() for part in other])
    other[0][1].requires_grad_(trained)
    _step(*other)
    for part, state in zip(other, saved, strict=True):
        part.load_state_dict(state)
    states = [sorted(other[1].state[p]) for p in other[0].parameters()]
    for model, _ in (job, other):
        model[1].requires_grad_(True)
    return _equal_after_a_step(job, other) | {"states": states}


def filled_in_place(outer: str) -> str:
    """Return the error if DCP has written only the main weights of a layer that has not stepped."""
    job = _job("AdamW", outer, 3)
    job[0][1].requires_grad_(False)
    _step(*job)
    try:
        job[1].load_state_dict(job[1].state_dict())
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def refused_and_loaded(outer: str, kind: str) -> dict[str, Any]:
    """Load a state dict of a wrong size, which raises and changes nothing, and then a correct one."""
    job, other = _job(kind, outer, 3), _job(kind, outer, 4)
    for model, _ in (job, other):
        model[1].requires_grad_(False)  # a main weight alone
        _step(model, job[1] if model is job[0] else other[1])
    saved = copy.deepcopy(job[1].state_dict())
    wrong = copy.deepcopy(saved)
    wrong["param_groups"].append({**wrong["param_groups"][0], "params": [7]})
    parameters, before = [*other[0].parameters()], _values(other[1])
    try:
        other[1].load_state_dict(wrong)
        text = ""
    except ValueError as error:
        text = str(error)
    groups = all(a is b for a, b in zip(other[1].param_groups[0]["params"], parameters, strict=True))
    unchanged = all(map(torch.equal, before, _values(other[1])))
    other[0].load_state_dict(job[0].state_dict())
    other[1].load_state_dict(saved)
    for model, _ in (job, other):
        model[1].requires_grad_(True)
    return _equal_after_a_step(job, other) | {"text": text, "groups": groups, "unchanged": unchanged}


def _values(optimizer: Any) -> list[torch.Tensor]:
    from te_fsdp.upstream.torch_dtensor import local_of

    states = [optimizer.state[p] for group in optimizer.param_groups for p in group["params"]]
    return [
        local_of(value).clone()
        for state in states
        for value in state.values()
        if isinstance(value, torch.Tensor)
    ]


def in_the_other_form(saved: str, loaded: str, directory: str) -> dict[str, Any]:
    """Load main weights as remainders or the reverse, which another optimizer has saved: errors, and changed values."""
    import te_fsdp

    job, other = (Job("gated MLP", recipe, {"tp": 2}, "te_fsdp", False, 3) for recipe in (saved, loaded))
    job.step(0)
    other.step(0)
    dcp.save({"o": get_optimizer_state_dict(job.model, job.optimizer)}, checkpoint_id=directory)
    full = get_optimizer_state_dict(job.model, job.optimizer, options=WHOLE)
    before, outcome = other.values(), {}

    def load_files() -> None:
        state = {"o": get_optimizer_state_dict(other.model, other.optimizer)}
        dcp.load(state, checkpoint_id=directory)
        set_optimizer_state_dict(other.model, other.optimizer, state["o"])

    def load_full(broadcast: bool) -> None:
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=broadcast)
        set_optimizer_state_dict(other.model, other.optimizer, full, options=options)

    loads: dict[str, Any] = {"dcp": load_files, "full": lambda: load_full(False)}
    loads["broadcast"] = lambda: load_full(True)
    # Without DCP, into a trained and a new optimizer, and into main weights of te_fsdp.
    kind, params = type(other.optimizer), other.model.parameters
    fresh = kind(params(), lr=1e-2, master_weights=True, store_param_remainders=loaded == "remainders")
    loads["trained"] = lambda: other.optimizer.load_state_dict(job.optimizer.state_dict())
    loads["fresh"] = lambda: fresh.load_state_dict(job.optimizer.state_dict())
    if loaded == "bf16":
        adam = torch.optim.AdamW(params(), lr=1e-2)
        te_fsdp.main_weights(other.model, adam)
        loads["main weights"] = lambda: adam.load_state_dict(job.optimizer.state_dict())
    for name, load in loads.items():
        outcome[name] = ""
        try:
            load()
        except BaseException as error:  # CheckpointException does not derive from Exception
            outcome[name] = str(error)
    assert not fresh.state
    return outcome | {"changed": differing(before, other.values())}


def from_fp32(quantized: bool, directory: str) -> dict[str, list[str]]:
    """Load states of FusedAdam with FP32 weights into BF16 or quantized ones; return main weights that differ."""
    import transformer_engine.pytorch as te
    from transformer_engine.common.recipe import Float8CurrentScaling
    from transformer_engine.pytorch.optimizers import FusedAdam

    import te_fsdp

    meshes = te_fsdp.Meshes.build(dp_shard=2, device_type=harness.device_type())
    jobs = []
    for seed, dtype in enumerate((torch.float32, *[torch.bfloat16] * 4)):
        recipe = Float8CurrentScaling() if seed and quantized else None
        with te.quantized_model_init(enabled=recipe is not None, recipe=recipe):
            model = torch.nn.Sequential(te.Linear(32, 32, params_dtype=dtype, device="meta"))
        te_fsdp.fully_shard(model, meshes)
        te_fsdp.materialize(model, seed=seed)
        jobs.append((model, FusedAdam(model.parameters(), lr=1e-2, master_weights=True)))
    (model, optimizer), *others = jobs
    for job in jobs:
        job[0](torch.ones(16, 32, dtype=job[0][0].bias.dtype, device=harness.device())).sum().backward()
        job[1].step()
    weights = {name: to_full(p) for name, p in model.named_parameters()}
    kept = {name: to_full(optimizer.state[p]["master_param"]).clone() for name, p in model.named_parameters()}
    states = [
        get_optimizer_state_dict(model, optimizer),
        get_optimizer_state_dict(model, optimizer, options=WHOLE),
    ]
    dcp.save({"o": states[0]}, checkpoint_id=directory)
    target = {"o": get_optimizer_state_dict(*others[0])}
    dcp.load(target, checkpoint_id=directory)
    set_optimizer_state_dict(*others[0], target["o"])
    for job, broadcast in zip(others[1:], (False, True), strict=False):
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=broadcast)
        set_optimizer_state_dict(*job, states[1], options=options)
    others[3][1].load_state_dict(optimizer.state_dict())
    ways = dict(zip(("dcp", "full", "broadcast", "load_state_dict"), others, strict=True))
    mains = {
        way: {name: to_full(own.state[p]["master_param"]) for name, p in m.named_parameters()}
        for way, (m, own) in ways.items()
    }
    now = {name: to_full(optimizer.state[p]["master_param"]) for name, p in model.named_parameters()}
    changed = {way: differing(weights, values) for way, values in mains.items()}
    return changed | {"own": differing(kept, now), "control": differing(kept, weights)}
