"""Bodies: loads of full state dicts between two optimizer steps."""

from __future__ import annotations

from typing import Any

import harness
import torch
import torch.distributed as dist
from checkpointing.format_models import QuantizedTraining
from checkpointing.models import recipe_of
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)


def main_weights_after_load(recipe: str, *, broadcast: bool) -> dict[str, Any]:
    """Load a full state dict into a trained model, step without an update, and compare with the saved model.

    Returns:
        Numbers of elements of main weights that differ: before the load (negative control) and after the step. Number
        of elements of weights that differ after the load.
    """
    saved = QuantizedTraining(recipe, {"dp_shard": 2}, seed=0)
    saved.steps(2)
    _multiply(saved, 0.6)  # delayed scaling keeps the scale of larger values
    saved.steps(1)
    full = StateDictOptions(full_state_dict=True, cpu_offload=True)
    states = get_state_dict(saved.model, saved.optimizer, options=full)  # of rank 0
    if not broadcast:
        given = [states]
        dist.broadcast_object_list(given, src=0)
        states = given[0]
    right, weights = _main_weights(saved), _weights(saved)
    run = QuantizedTraining(recipe, {"dp_shard": 2}, seed=1)
    _multiply(run, 0.2)  # smaller than those of the file
    run.steps(5)  # longer than the amax history
    found: dict[str, Any] = {"before": _differing(_main_weights(run), right)}
    model, optimizer = ({}, {}) if broadcast and dist.get_rank() else states
    options = StateDictOptions(full_state_dict=True, cpu_offload=True, broadcast_from_rank0=broadcast)
    set_state_dict(
        run.model, run.optimizer, model_state_dict=model, optim_state_dict=optimizer, options=options
    )
    found["weights"] = _differing(_weights(run), weights)
    for group in run.optimizer.param_groups:
        group["lr"] = 0.0
    run.steps(1)
    return found | {"after": _differing(_main_weights(run), right)}


@torch.no_grad()
def _multiply(run: QuantizedTraining, factor: float) -> None:
    for parameter in run.model.parameters():
        parameter.copy_(parameter.to(torch.bfloat16) * factor)


def _main_weights(run: QuantizedTraining) -> dict[str, torch.Tensor]:
    return {
        name: harness.full(run.optimizer.state[parameter]["master_param"]).clone()
        for name, parameter in run.model.named_parameters()
    }


def _weights(run: QuantizedTraining) -> dict[str, torch.Tensor]:
    return {
        name: harness.full(parameter.detach()).clone() for name, parameter in run.model.named_parameters()
    }


def _differing(found: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> int:
    assert found.keys() == right.keys()
    return sum(int((found[name] != right[name]).sum()) for name in right)


class Training:
    """A gated MLP whose units stay unsharded between forward and backward."""

    def __init__(
        self, axes: dict[str, int], strategy: str, seed: int, kind: str = "AdamW", *, quantized: bool = False
    ) -> None:
        import transformer_engine.pytorch as te

        import te_fsdp

        self.meshes = te_fsdp.Meshes.build(**axes, device_type=harness.device_type())
        self.recipe = recipe_of("current") if quantized else None
        dtype = torch.bfloat16 if quantized else torch.float32
        with te.quantized_model_init(enabled=quantized, recipe=self.recipe):
            self.model = te.LayerNormMLP(16, 32, activation="swiglu", device="meta", params_dtype=dtype)
        te_fsdp.fully_shard(self.model, self.meshes, strategy=strategy)
        te_fsdp.materialize(self.model, seed=seed)
        self.optimizer = getattr(torch.optim, kind)(self.model.parameters(), lr=1e-2)
        if quantized:
            te_fsdp.main_weights(self.model, self.optimizer)

    def forward(self, position: int) -> torch.Tensor:
        import transformer_engine.pytorch as te

        generator = torch.Generator().manual_seed(10 * position + self.meshes.data_rank)
        x = torch.randn(16, 16, generator=generator).to(harness.device(), next(self.model.parameters()).dtype)
        with te.autocast(enabled=self.recipe is not None, recipe=self.recipe):
            return self.model(x).float().square().mean()

    def step(self, position: int) -> None:
        self.forward(position).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def values(self) -> dict[str, torch.Tensor]:
        values = {n: harness.full(p.detach()).clone() for n, p in self.model.named_parameters()}
        for name, parameter in self.model.named_parameters():
            for key, value in self.optimizer.state.get(parameter, {}).items():
                values[f"{name}.{key}"] = harness.full(value).clone()
        return values


def load_after_forward(strategy: str) -> dict[str, Any]:
    """Load an optimizer by broadcast while units are unsharded; return the values that differ from the saved ones."""
    saved = Training({"dp_shard": 2}, strategy, 0)
    saved.step(0)
    options = {"full_state_dict": True, "cpu_offload": True}
    state = get_optimizer_state_dict(saved.model, saved.optimizer, options=StateDictOptions(**options))
    run = Training({"dp_shard": 2}, strategy, 1)
    run.step(5)
    before = run.values()
    run.forward(6)
    options["broadcast_from_rank0"] = True
    given = state if dist.get_rank() == 0 else {}
    set_optimizer_state_dict(run.model, run.optimizer, given, options=StateDictOptions(**options))
    right, found = saved.values(), run.values()
    states = [name for name in right if "." in name]
    return {
        "differ": [n for n in states if not torch.equal(found[n], right[n])],
        "changed": sum(not torch.equal(found[n], before[n]) for n in states),
        "states": len(states),
    }


def lacks_a_parameter() -> str:
    """Load a state dict of rank 0 that lacks a parameter; return the error of this rank."""
    run = Training({"dp_shard": 2}, "optim_grads_params", 0)
    run.step(0)
    options = {"full_state_dict": True, "cpu_offload": True}
    state: Any = get_optimizer_state_dict(run.model, run.optimizer, options=StateDictOptions(**options))
    given = {}
    if dist.get_rank() == 0:
        state["state"].pop("fc1_weight")
        given = state
    before = run.values()
    options["broadcast_from_rank0"] = True
    try:
        set_optimizer_state_dict(run.model, run.optimizer, given, options=StateDictOptions(**options))
    except Exception as error:
        assert all(torch.equal(value, before[name]) for name, value in run.values().items())
        return f"{type(error).__name__}: {error}"
    return ""


def with_gradients(kind: str) -> dict[str, Any]:
    """Get a state dict before the first step, with and without gradients; return errors and numbers of states.

    Then load those of a step into an optimizer with gradients, which has not stepped.
    """
    run = Training({"dp_shard": 2}, "optim_grads_params", 0, kind)
    run.forward(0).backward()
    found = dict[str, Any]()
    for name in ("gradients", "none"):
        try:
            found[name] = len(get_optimizer_state_dict(run.model, run.optimizer)["state"])
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"
        run.optimizer.zero_grad()
    run.step(1)
    saved = get_optimizer_state_dict(run.model, run.optimizer)
    other = Training({"dp_shard": 2}, "optim_grads_params", 0, kind)
    other.forward(0).backward()
    set_optimizer_state_dict(other.model, other.optimizer, saved)
    loaded = get_optimizer_state_dict(other.model, other.optimizer)["state"]
    found["loaded"] = len(loaded)
    for name, entries in saved["state"].items():
        for key, value in entries.items():
            assert torch.equal(harness.full(value), harness.full(loaded[name][key])), (name, key)
    return found


def load_between_microbatches(directory: str) -> list[str]:
    """Load and evaluate after a forward without backward, and train; return the values that differ without the load.

    The weights are all-gathered a second time before the step, into the same memory.
    """
    import te_fsdp

    values = []
    for loads in (False, True):
        run = Training({"dp_replicate": 2, "dp_shard": 1}, "optim_grads", 0, quantized=True)
        if loads:
            te_fsdp.checkpoint.save(f"{directory}/saved", run.model, run.optimizer)
            run.forward(3)
            te_fsdp.checkpoint.load(f"{directory}/saved", run.model, run.optimizer)
        with torch.no_grad():
            run.forward(4)
        run.step(5)
        values.append(run.values())
    return [name for name, value in values[0].items() if not torch.equal(value, values[1][name])]


def values_in_fp32() -> dict[str, float]:
    """Return the largest errors of `float` of current-scaling shards. Negative control: by way of BF16."""
    run = QuantizedTraining("current", {"dp_shard": 2}, seed=0)
    run.steps(1)
    found = {"detached": 0.0, "no_grad": 0.0, "bf16": 0.0}
    for parameter in (parameter for name, parameter in run.model.named_parameters() if "fc" in name):
        local: Any = parameter.to_local()  # type: ignore[operator]
        if not hasattr(local, "dequantize") or type(local) is torch.Tensor:
            continue
        right = local.dequantize(dtype=torch.float32)
        with torch.no_grad():
            values = {"detached": parameter.detach().float(), "no_grad": parameter.float()}
        values = {name: value.to_local() for name, value in values.items()}  # type: ignore[operator]
        values["bf16"] = local.dequantize(dtype=torch.bfloat16).float()
        for name, value in values.items():
            assert value.dtype == torch.float32
            found[name] = max(found[name], float((value - right).abs().max()))
    (run.model.mlp.fc2_weight.float().sum() * 2).backward()
    gradient = harness.full(run.model.mlp.fc2_weight.grad)
    return found | {"gradient": float((gradient - 2).abs().max())}
