"""Bodies: optimizers over quantized weights update fp32 main weights, of which each weight is one quantization."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import harness
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from quantization.bodies import SEED, Stepper, batch_of
from quantization.weight_bytes import (
    HIDDEN,
    STEPS,
    compare,
    gathered,
    meshes_of,
    named_weights,
    recipe_of,
    requantize,
    same_history,
    sharded,
    stock,
)

ADAM = {"lr": 2e-3, "betas": (0.9, 0.95), "weight_decay": 0.1}
#: torch.optim.AdamW's options of each of its implementations
IMPLEMENTATIONS = {
    "for each": {"foreach": False},
    "foreach": {"foreach": True},
    "fused": {"fused": True},
}


def prepare(recipe: str, dp_replicate: int, tp: int, *, seed: int = SEED) -> tuple[nn.Module, Stepper]:
    """Return a sharded model with quantized weights, and its step, still with an optimizer of the stepper's own."""
    import te_fsdp

    meshes = meshes_of(dp_replicate, tp)
    model = sharded("mlp_swiglu", recipe, meshes)
    te_fsdp.materialize(model, seed=seed)
    return model, Stepper(model, recipe_of(recipe), meshes, False)


def adamw(implementation: str, recipe: str, dp_replicate: int, tp: int) -> dict[str, int]:
    """Compare torch's AdamW with main weights with AdamW on plain fp32 tensors and the same gradients.

    Returns:
        Number of buffers compared with one process' quantization, and of main weights compared with plain AdamW's.
    """
    import te_fsdp

    model, step = prepare(recipe, dp_replicate, tp)
    plain = {name: nn.Parameter(initial_value(p)) for name, p in model.named_parameters()}
    step.optimizer = optimizer = torch.optim.AdamW(
        model.parameters(), **ADAM, **IMPLEMENTATIONS[implementation]
    )
    te_fsdp.main_weights(model, optimizer)
    assert not any(hasattr(local_of(p), "_high_precision_init_val") for p in model.parameters())
    oracle = stock("mlp_swiglu", recipe)
    twin = torch.optim.AdamW(plain.values(), **ADAM, **IMPLEMENTATIONS[implementation])
    optimizer.register_step_pre_hook(lambda *_: copy_gradients(model, plain))  # before zero_grad
    counts = {"buffers": 0, "main": 0}
    for number in range(STEPS):
        step(*batch_of(HIDDEN))
        twin.step()
        counts["main"] += same_main_weights(model, optimizer, plain)
        values = {
            name: gathered(module, own, optimizer.state[parameter]["master_param"])
            for name, module, own, parameter in named_weights(model)
        }
        requantize(oracle, values)
        counts["buffers"] += compare(model, oracle, f"step {number + 1}")
    return counts


def compare_initial_main_weights(recipe: str) -> int:
    """Check that main weights start at the drawn values, also of replicated weights.

    Returns:
        Number of main weights compared.
    """
    import te_fsdp

    results = []
    for strategy in ("optim_grads_params", "no_shard"):
        model = sharded("mlp_swiglu", recipe, meshes_of(1, 1), strategy=strategy)
        te_fsdp.materialize(model, seed=SEED)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        te_fsdp.main_weights(model, optimizer)
        mains = {n: optimizer.state[p].get("master_param") for n, p in model.named_parameters()}
        results.append({name: harness.full(main) for name, main in mains.items() if main is not None})
    cut, whole = results
    for name, main in whole.items():
        harness.assert_bitwise_equal(name, main, cut[name])
    return len(whole)


def initial_value(parameter: torch.Tensor) -> torch.Tensor:
    """Return the local value that a parameter was drawn with, in fp32."""
    local = local_of(parameter)
    kept = getattr(local, "_high_precision_init_val", None)
    return (local if kept is None else kept).detach().to(harness.device()).float().clone()


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the local tensor of a DTensor."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def copy_gradients(model: nn.Module, plain: dict[str, nn.Parameter]) -> None:
    """Give plain tensors the gradients of the parameters."""
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        plain[name].grad = local_of(parameter.grad).float().clone()


def same_main_weights(model: nn.Module, optimizer: Any, plain: dict[str, nn.Parameter]) -> int:
    """Check that main weights are fp32, placed as their parameters, and bitwise equal to the plain ones."""
    checks = harness.Comparisons()
    for name, parameter in model.named_parameters():
        state = optimizer.state[parameter]
        for key in ("exp_avg", "exp_avg_sq", "master_param"):
            value = state[key]
            assert value.dtype == torch.float32 and value.shape == parameter.shape, (name, key)
            if isinstance(parameter, DTensor):
                assert value.placements == parameter.placements and value.device_mesh == parameter.device_mesh
        checks.bitwise_equal(name, local_of(state["master_param"]), plain[name])
        if parameter.dtype == torch.bfloat16 and not hasattr(local_of(parameter), "_quantizer"):
            checks.bitwise_equal(f"{name} rounded", local_of(parameter), plain[name].bfloat16())
    return len(plain)


def resumed(route: str, path: str, dp_replicate: int, tp: int) -> list[str]:
    """Compare two more steps after a save and a load with two more without; return names that differ."""
    import te_fsdp

    def fresh(seed: int) -> tuple[nn.Module, Stepper]:
        model, step = prepare("current", dp_replicate, tp, seed=seed)
        step.optimizer = torch.optim.AdamW(model.parameters(), **ADAM)
        te_fsdp.main_weights(model, step.optimizer)
        return model, step

    model, step = fresh(SEED)
    other, other_step = fresh(SEED + 1)
    for _ in range(2):
        step(*batch_of(HIDDEN))
    if route == "te_fsdp":
        te_fsdp.checkpoint.save(Path(path) / "checkpoint", model, step.optimizer)
        te_fsdp.checkpoint.load(Path(path) / "checkpoint", other, other_step.optimizer)
    else:
        # Loading passes an optimizer's state on by reference.
        state = torch.load(saved(step.optimizer.state_dict()), weights_only=False)
        other.load_state_dict(model.state_dict())
        other_step.optimizer.load_state_dict(state)
    for _ in range(2):
        step(*batch_of(HIDDEN))
        other_step(*batch_of(HIDDEN))
    actual, expected = tensors(model, step.optimizer), tensors(other, other_step.optimizer)
    assert actual.keys() == expected.keys() and len(actual) > 12
    return [name for name in actual if not torch.equal(actual[name], expected[name])]


def saved(state: Any) -> io.BytesIO:
    """Return the bytes that torch.save writes for a state dict."""
    stream = io.BytesIO()
    torch.save(state, stream)
    stream.seek(0)
    return stream


def tensors(model: nn.Module, optimizer: Any) -> dict[str, torch.Tensor]:
    """Return weights and optimizer state of this rank by name, dequantized."""
    results = {}
    for name, parameter in model.named_parameters():
        local = local_of(parameter)
        results[name] = local.dequantize() if hasattr(local, "_quantizer") else local.detach()
        for key, value in optimizer.state[parameter].items():
            results[f"{name} {key}"] = local_of(value)
    return results


def error_of(case: str) -> None:
    """Make one step that would requantize through low precision, or that main weights do not support."""
    from transformer_engine.pytorch.optimizers import FusedAdam

    import te_fsdp

    model, step = prepare("delayed" if case == "no main weights" else "current", 1, 2)
    parameters = list(model.parameters())
    if case == "adamw":
        step.optimizer = torch.optim.AdamW(parameters)
    elif case == "sgd foreach":
        step.optimizer = torch.optim.SGD(parameters, lr=0.1, foreach=True)
    elif case == "no main weights":
        step.optimizer = FusedAdam(parameters)
    elif case == "half":
        step.optimizer = FusedAdam(parameters, master_weights=True, master_weight_dtype=torch.float16)
    elif case == "remainders":
        step.optimizer = FusedAdam(parameters, master_weights=True, store_param_remainders=True)
    elif case == "main_weights of it":
        te_fsdp.main_weights(model, FusedAdam(parameters))
    elif case == "too late":
        optimizer = torch.optim.SGD(parameters, lr=0.1)
        optimizer.state[parameters[0]]["momentum_buffer"] = torch.zeros(())
        te_fsdp.main_weights(model, optimizer)
    elif case == "closure":
        step.optimizer = torch.optim.AdamW(parameters)
        te_fsdp.main_weights(model, step.optimizer)
        step.optimizer.step(lambda: 0.0)
    before = [local_of(p).dequantize() for _, _, _, p in named_weights(model)]
    try:
        step(*batch_of(HIDDEN))
    finally:
        after = [local_of(p).dequantize() for _, _, _, p in named_weights(model)]
        assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True)), (
            "changed before it was refused"
        )


def delayed_state_dict(dp_replicate: int, tp: int) -> int:
    """Load delayed scaling's state by a state dict, torch.save and torch.load(weights_only=True) into a fresh model.

    Returns:
        Number of modules whose state came back.
    """
    import os

    import te_fsdp
    from te_fsdp.upstream import te as _te

    os.environ.pop("NVTE_ALLOW_UNSAFE_PICKLE_EXTRA_STATE", None)
    model, step = prepare("delayed", dp_replicate, tp)
    for _ in range(3):
        step(*batch_of(HIDDEN))
    entries = {key: value for key, value in model.state_dict().items() if key.endswith("_extra_state")}
    loaded = torch.load(saved(entries), weights_only=True)
    state = {**model.state_dict(), **loaded}
    meshes = meshes_of(dp_replicate, tp)
    fresh = sharded("mlp_swiglu", "delayed", meshes)
    te_fsdp.materialize(fresh, seed=SEED + 1)
    fresh.load_state_dict(state)
    checks, count = harness.Comparisons(), 0
    for (name, ours), theirs in zip(model.named_modules(), fresh.modules(), strict=True):
        states, others = _te.delayed_states(ours), _te.delayed_states(theirs)
        for key in states or {}:
            checks.bitwise_equal(f"{name} {key} scale", others[key].scale, states[key].scale)
            checks.bitwise_equal(f"{name} {key} history", others[key].amax_history, states[key].amax_history)
        count += bool(states)
    for name, module, own, parameter in named_weights(fresh):
        same_history(checks, name, module, own, model.get_submodule(name.rpartition(".")[0]))
        # The optimizer and the kernels read the loaded state itself.
        index = module.param_init_meta[own].fp8_meta_index
        quantizer, live = local_of(parameter)._quantizer, module.fp8_meta["scaling_fwd"]
        assert quantizer.scale.data_ptr() == live.scale[index].data_ptr()
        assert quantizer.amax.data_ptr() == live.amax_history[0][index].data_ptr()
    checks.require(4)
    return count
