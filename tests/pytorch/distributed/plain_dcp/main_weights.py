"""Bodies: main weights where an optimizer loads a state dict without them, or the model was written to."""

from __future__ import annotations

import copy
from typing import Any

import harness
import torch
from checkpointing.models import recipe_of
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)


class Job:
    """A gated MLP in BF16, perhaps quantized, and an optimizer with or without main weights."""

    def __init__(
        self, seed: int, optimizer: str, *, recipe: str = "none", keeps: bool = True, **options: Any
    ) -> None:
        import transformer_engine.pytorch as te
        from transformer_engine.pytorch.optimizers import FusedAdam

        import te_fsdp

        self.meshes = te_fsdp.Meshes.build(dp_shard=2, device_type=harness.device_type())
        self.recipe = recipe_of(recipe)
        with te.quantized_model_init(enabled=recipe != "none", recipe=self.recipe):
            self.model = mlp(torch.bfloat16)
        te_fsdp.fully_shard(self.model, self.meshes)
        te_fsdp.materialize(self.model, seed=seed)
        if optimizer == "FusedAdam":
            self.optimizer: Any = FusedAdam(self.model.parameters(), lr=1e-2, master_weights=keeps, **options)
        else:
            self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        if keeps:
            te_fsdp.main_weights(self.model, self.optimizer)

    def step(self, position: int) -> None:
        import transformer_engine.pytorch as te

        generator = torch.Generator().manual_seed(10 * position + self.meshes.data_rank)
        x = torch.randn(32, 32, generator=generator).to(harness.device(), torch.bfloat16)
        with te.autocast(enabled=self.recipe is not None, recipe=self.recipe):
            y = self.model(x)
        y.float().square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def mains(self) -> dict[str, torch.Tensor]:
        states = {name: self.optimizer.state.get(p, {}) for name, p in self.model.named_parameters()}
        return {n: harness.full(s["master_param"]).clone() for n, s in states.items() if "master_param" in s}

    def weights(self) -> dict[str, torch.Tensor]:
        return {name: harness.full(p.detach()).clone() for name, p in self.model.named_parameters()}


def mlp(dtype: torch.dtype) -> Any:
    import transformer_engine.pytorch as te

    return te.LayerNormMLP(32, 64, activation="swiglu", device="meta", params_dtype=dtype)


def load_without(optimizer: str, *, full: bool, keeps: bool) -> dict[str, Any]:
    """Load the state of an optimizer without main weights into one that ``keeps`` them, or the reverse; step.

    Returns:
        Main weights before the load that differ from the weights, and differences from an optimizer that loads main
        weights equal to the weights ("differ"). Keys of the states after the step.
    """
    saved, run, expected = (Job(seed, optimizer, keeps=keeps != (seed == 0)) for seed in (0, 1, 2))
    for job in (saved, run, expected):
        job.step(0)
    options = StateDictOptions(full_state_dict=full)
    weights, before = saved.weights(), run.mains()
    for job in (run, expected):
        model, state = get_state_dict(saved.model, saved.optimizer, options=options)
        named = dict(saved.model.named_parameters())
        for name, values in state["state"].items():
            values = copy.deepcopy(values)  # AdamW would share its step count with the given state
            own = {key: value for key, value in values.items() if key != "master_param"}
            if job is expected and keeps:
                own["master_param"] = weights[name].float() if full else named[name].detach().float()
            state["state"][name] = own if job is expected else values
        set_state_dict(
            job.model, job.optimizer, model_state_dict=model, optim_state_dict=state, options=options
        )
        job.step(1)
    found, right = (job.mains() | job.weights() for job in (run, expected))
    return {
        "stale": [n for n, main in before.items() if not torch.equal(main.bfloat16(), weights[n])],
        "differ": [n for n in right if not torch.equal(found[n], right[n])],
        "keys": sorted({key for state in run.optimizer.state.values() for key in state} - {"step"}),
    }


def save_after_writes(directory: str, optimizer: str, recipe: str) -> dict[str, Any]:
    """Save while the model has the weights of a different one, and load into a model in FP32.

    Returns:
        Main weights that do not round to the written weights, in the optimizer ("stale"), in the file ("saved") and in
        a stream of weights ("sent"). Differences of the next step from one without the save ("differ").
    """
    import te_fsdp
    from te_fsdp.checkpoint.portable.weight_transfer import shares_of
    from te_fsdp.features.written_weights import rounded_values
    from te_fsdp.upstream.torch_dtensor import local_of

    other, run, expected = (Job(seed, optimizer, recipe=recipe) for seed in (0, 1, 1))
    for job in (run, expected):
        job.step(0)
    own = {name: local_of(p).clone() for name, p in run.model.named_parameters()}
    set_model_state_dict(run.model, get_model_state_dict(other.model))
    te_fsdp.checkpoint.save(f"{directory}/it", run.model, run.optimizer)
    sent = shares_of(run.model, run.optimizer)
    model = mlp(torch.float32)
    te_fsdp.fully_shard(model, run.meshes)
    te_fsdp.materialize(model, seed=5)
    te_fsdp.checkpoint.load(f"{directory}/it", model)
    mains = {name: run.optimizer.state[p]["master_param"] for name, p in run.model.named_parameters()}
    loaded, written = dict(model.named_parameters()), dict(run.model.named_parameters())
    differ: dict[str, list[str]] = {"stale": [], "saved": [], "sent": []}
    for name, parameter in written.items():
        rounded = rounded_values(local_of(parameter).detach())
        values = {"stale": local_of(mains[name]), "saved": local_of(loaded[name]).detach()}
        values["sent"] = torch.cat([piece.full().flatten() for _, piece in sent[name].pieces])
        for key, value in values.items():
            value = value.to(rounded.value).view(rounded.value.shape)
            if not torch.equal(rounded.keep(value), value):
                differ[key].append(name)
    with torch.no_grad():
        for name, parameter in written.items():
            local_of(parameter).copy_(own[name])
    for job in (run, expected):
        job.step(1)
    found, right = (job.mains() | job.weights() for job in (run, expected))
    return differ | {"differ": [n for n in right if not torch.equal(found[n], right[n])]}


def send_scaled_main_weights(*, written: bool) -> dict[str, list[str]]:
    """Read the sent weights of FusedAdam with main weights in FP16, perhaps after a write.

    Returns:
        Weights whose sent values are not the scaled main weights ("differ"). Those whose main weights without their
        scales are different ("scaled").
    """
    from te_fsdp.checkpoint.portable.weight_transfer import shares_of
    from te_fsdp.upstream.torch_dtensor import local_of

    job = Job(1, "FusedAdam", master_weight_dtype=torch.float16)
    job.step(0)
    named, found = dict(job.model.named_parameters()), {"differ": list[str](), "scaled": list[str]()}
    if written:
        with torch.no_grad():
            for parameter in named.values():
                local_of(parameter).mul_(2)
    sent = shares_of(job.model, job.optimizer)
    for name, parameter in named.items():
        if not local_of(parameter).numel():
            continue
        right = job.optimizer.get_unscaled_state(parameter, "master_param").flatten()
        if written:
            right = local_of(parameter).detach().float().flatten()
        value = torch.cat([piece.full().flatten() for _, piece in sent[name].pieces]).to(right.device)
        stored = local_of(job.optimizer.state[parameter]["master_param"]).float().flatten()
        found["differ"] += [] if value.dtype == right.dtype and torch.equal(value, right) else [name]
        found["scaled"] += [] if torch.equal(stored, right) else [name]
    return found


def load_scaled_main_weights() -> dict[str, list[str]]:
    """Load the state dicts of FusedAdam with main weights in FP16; step; double the weights, and step without change.

    Returns:
        Differences from a run without the load ("differ"), and main weights unlike the doubled weights ("stale").
    """
    run, other = (Job(seed, "FusedAdam", master_weight_dtype=torch.float16) for seed in (0, 1))
    run.step(0)
    other.model.load_state_dict(run.model.state_dict())
    other.optimizer.load_state_dict(run.optimizer.state_dict())
    for job in (run, other):
        job.step(1)
    found, right = (job.mains() | job.weights() for job in (other, run))
    with torch.no_grad():
        for parameter in other.model.parameters():
            parameter.mul_(2)
    for group in other.optimizer.param_groups:
        group["lr"] = 0.0
    other.step(2)
    written = {name: 2 * weight for name, weight in right.items()}
    now = other.weights()
    return {
        "differ": [name for name in right if not torch.equal(found[name], right[name])],
        "stale": [name for name in now if not torch.equal(now[name], written[name])],
    }


def load_one_dict_twice(*, keeps: bool) -> list[bool]:
    """Load an optimizer's state dict into two others, of which the first ``keeps`` main weights, the saved one not.

    Returns:
        Whether the dict has its states as before, and whether the main weights of the second are those that it loads.
    """
    saved, first = Job(0, "FusedAdam", keeps=not keeps), Job(1, "FusedAdam", keeps=keeps)
    second = Job(2, "FusedAdam")
    for job in (saved, first, second):
        job.step(0)
    state_dict = saved.optimizer.state_dict()
    before = {key: dict(state) for key, state in state_dict["state"].items()}
    second.model.load_state_dict(saved.model.state_dict())
    for job in (first, second):
        job.optimizer.load_state_dict(state_dict)
    mains, weights = second.mains(), saved.weights()
    expected = {n: weight.float() for n, weight in weights.items()} if keeps else saved.mains()
    states = state_dict["state"]
    is_same = {key: {n: id(value) for n, value in states[key].items()} for key in states} == {
        key: {n: id(value) for n, value in state.items()} for key, state in before.items()
    }
    return [is_same, all(torch.equal(mains[name], expected[name]) for name in expected), bool(expected)]
