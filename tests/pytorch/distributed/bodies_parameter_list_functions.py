"""Bodies of ``torch.nn.utils`` over parameters on several meshes, compared with full tensors."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import harness
import torch
import torch.distributed as dist
from bodies_mistakes import WIDTH, Model, draw_batch, make_meshes
from bodies_supported import full
from torch import nn
from torch.distributed.tensor import DTensor, Shard
from torch.nn import utils

FOREACH = (None, True, False)
#: Sums of squares of fp32 in a different order: seen 2e-7. Absolute: torch adds 1e-6 to norms near 100.
CLOSE = {"rtol": 1e-5, "atol": 1e-7}


class Experts(nn.Module):
    def __init__(self, meshes: Any) -> None:
        import transformer_engine.pytorch as te

        super().__init__()
        self.inp = nn.Linear(WIDTH, WIDTH, device="meta")
        self.experts = te.GroupedLinear(2, WIDTH, WIDTH, device="meta", **meshes.te_kwargs())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.experts(self.inp(x), [len(x) // 2] * 2)


def trained(axes: dict[str, int], strategy: str, kind: str) -> nn.Module:
    """Return a model with gradients. In a ``mixed`` one the last layer is a replicated plain tensor."""
    import te_fsdp

    meshes = make_meshes(**axes)
    model = Experts(meshes) if kind == "experts" else Model(meshes)
    if kind == "mixed":
        te_fsdp.fsdp_no_shard(model.head)
    units = [] if kind == "experts" else ["layer"]
    te_fsdp.materialize(te_fsdp.fully_shard(model, meshes, units=units, strategy=strategy), seed=0)
    model(draw_batch(meshes.data_rank)).square().sum().backward()
    return model


def _calls(
    parameters: list[torch.Tensor],
    limit: float,
    value: float,
    norm_type: float,
    norm: torch.Tensor,
    foreach: bool | None,
) -> dict[str, Callable[[], Any]]:
    gradients = [p.grad for p in parameters]
    return {
        "clip_grad_norm_": lambda: utils.clip_grad_norm_(parameters, limit, norm_type, foreach=foreach),
        "get_total_norm": lambda: utils.get_total_norm(gradients, norm_type, foreach=foreach),
        "clip_grads_with_norm_": lambda: utils.clip_grads_with_norm_(
            parameters, limit, norm, foreach=foreach
        ),
        "clip_grad_value_": lambda: utils.clip_grad_value_(parameters, value, foreach=foreach),
    }


def compare_clip_grad_functions(axes: dict[str, int], strategy: str) -> dict[str, list[str]]:
    """Return functions with a different result, and functions that do not detect a wrong result."""
    import te_fsdp

    model = trained(axes, strategy, "mixed")
    parameters = list(model.parameters())
    locals_of = [getattr(p.grad, "_local_tensor", p.grad) for p in parameters]
    saved, before = [t.clone() for t in locals_of], [full(p.grad).clone() for p in parameters]
    wrong, control = [], []
    flat = torch.cat([gradient.flatten() for gradient in before])
    for norm_type in (2.0, math.inf, 1.0):
        norm = torch.linalg.vector_norm(flat, norm_type)
        actual = te_fsdp.clip_grad_norm_(model, math.inf, norm_type)
        factor, limit, value = 0.5, 0.5 * float(norm), float(flat.abs().median())
        for foreach in FOREACH:
            calls = _calls(parameters, limit, value, norm_type, norm, foreach)
            for name, call in calls.items():
                result = call()
                label = f"{name} {norm_type} {foreach}"
                after = [full(p.grad) for p in parameters]
                if result is not None:
                    total = full(result)
                    same = torch.allclose(total, norm, **CLOSE) and torch.allclose(total, actual, **CLOSE)
                    wrong += [] if same else [f"{label}: {total} in place of {norm}"]
                expected = {
                    "get_total_norm": before,
                    "clip_grad_value_": [g.clamp(-value, value) for g in before],
                }.get(name, [factor * g for g in before])
                equal = all(torch.allclose(a, b, **CLOSE) for a, b in zip(after, expected, strict=True))
                wrong += [] if equal else [label]
                for tensor, own in zip(locals_of, saved, strict=True):
                    tensor.copy_(own)
        control += (
            [] if not torch.allclose(flat * factor, flat, **CLOSE) and value > 1e-3 else [f"{norm_type}"]
        )
    return {"wrong": wrong, "control": control}


def clip_by_norm_of_a_different_mesh(axes: dict[str, int], strategy: str) -> dict[str, list[str]]:
    """Scale gradients by a norm that is a DTensor, on the mesh of some of them; return what differs, and controls."""
    model = trained(axes, strategy, "mixed")
    parameters = list(model.parameters())
    locals_of = [getattr(p.grad, "_local_tensor", p.grad) for p in parameters]
    saved, before = [t.clone() for t in locals_of], [full(p.grad).clone() for p in parameters]
    sharded = [p.grad for p in parameters if isinstance(p, DTensor)]
    wrong, control = [], []
    # A set's order would differ between ranks: each rank's tensor-parallel mesh has a different hash.
    for mesh in dict.fromkeys(gradient.device_mesh for gradient in sharded):
        norm = utils.get_total_norm([gradient for gradient in sharded if gradient.device_mesh == mesh])
        limit = 0.5 * float(full(norm))
        control += [] if isinstance(norm, DTensor) and norm.device_mesh == mesh else [str(mesh)]
        others = [p for p in parameters if getattr(p, "device_mesh", None) != mesh]
        control += [] if others else ["no gradient on a different mesh"]
        control += [] if isinstance(torch.clamp(norm, max=1.0), DTensor) else ["a script's own factor"]
        for foreach in FOREACH:
            for chosen in (parameters, others):
                utils.clip_grads_with_norm_(iter(chosen), limit, norm, foreach=foreach)
                for parameter, gradient in zip(parameters, before, strict=True):
                    factor = 0.5 if any(parameter is item for item in chosen) else 1.0
                    if not torch.allclose(full(parameter.grad), factor * gradient, **CLOSE):
                        wrong.append(f"{foreach} {tuple(gradient.shape)}")
                for tensor, own in zip(locals_of, saved, strict=True):
                    tensor.copy_(own)
    return {"wrong": wrong, "control": control}


def _error(call: Callable[[], Any]) -> str:
    from te_fsdp import TeFsdpError

    try:
        call()
    except TeFsdpError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def _flattened(model: nn.Module) -> list[torch.Tensor]:
    """Return parameters that torch can flatten: before 2.13 none that a mesh axis shards along columns."""
    return [p for p in model.parameters() if Shard(1) not in getattr(p, "placements", ())]


def errors_of_unsupported_lists(axes: dict[str, int], strategy: str) -> dict[str, str]:
    """Return the errors of functions that torch cannot compute over the model's parameters."""
    model = trained(axes, strategy, "mixed")
    results = {"parameters_to_vector": _error(lambda: utils.parameters_to_vector(_flattened(model)))}
    results["gradients"] = _error(lambda: utils.parameters_to_vector([p.grad for p in _flattened(model)]))
    vector = torch.cat([full(p.detach()).flatten() for p in model.parameters()])

    def write() -> None:
        utils.vector_to_parameters(vector + 1, model.parameters())
        model(draw_batch())

    results["vector_to_parameters"] = _error(write)
    return results


def compare_parameters_to_vector(axes: dict[str, int], strategy: str) -> dict[str, bool]:
    """Join parameters and gradients on one mesh, some of them stacked, in the order of the unsharded module."""
    model = trained(axes, strategy, "one mesh")
    parameters = _flattened(model)
    results = {}
    for name, tensors in (("parameters", parameters), ("gradients", [p.grad for p in parameters])):
        expected = torch.cat([full(t.detach()).flatten() for t in tensors])
        vector = full(utils.parameters_to_vector(tensors).detach())
        results[name] = torch.equal(vector, expected)
        results[f"{name}: control"] = not torch.equal(vector.flip(0), expected)
    # The gradient of a penalty
    before = [full(p.grad).clone() for p in parameters]
    penalty = utils.parameters_to_vector(parameters)
    weights = torch.arange(penalty.numel(), device=harness.device(), dtype=torch.float32)
    (full(penalty) * weights).sum().backward()
    added = torch.cat([(full(p.grad) - b).flatten() for p, b in zip(parameters, before, strict=True)])
    # Rounding of sums of fp32 with values below 4096
    results["penalty"] = torch.allclose(added, weights, atol=1e-3)
    return results


def compare_quantized_parameters_to_vector(axes: dict[str, int], recipe: str) -> dict[str, bool]:
    """Join quantized parameters, some of them stacked: the values in the order of the unsharded module."""
    import transformer_engine.pytorch as te
    from quantization.models import recipe_of

    import te_fsdp

    meshes = make_meshes(**axes)
    with te.quantized_model_init(enabled=True, recipe=recipe_of(recipe)):
        options = {
            "activation": "swiglu",
            "params_dtype": torch.bfloat16,
            "device": "meta",
            **meshes.te_kwargs(),
        }
        model = nn.Sequential(te.LayerNormMLP(128, 128, set_parallel_mode=True, **options))
    te_fsdp.materialize(te_fsdp.fully_shard(model, meshes, units=["0"]), seed=0)
    parameters = _flattened(model)
    expected = torch.cat([full(p.detach()).flatten() for p in parameters])
    vector = full(utils.parameters_to_vector(parameters).detach())
    return {"equal": torch.equal(vector, expected), "control": not torch.equal(vector.flip(0), expected)}


def error_of_expert_norm(axes: dict[str, int], strategy: str) -> dict[str, str]:
    """Return the error of torch's clipping, or of the step after it."""

    def step(foreach: bool | None) -> None:
        model = trained(axes, strategy, "experts")
        utils.clip_grad_norm_(model.parameters(), 1e-3, foreach=foreach)
        torch.optim.SGD(model.parameters(), lr=0.1).step()

    results = {f"foreach={foreach}": _error(functools.partial(step, foreach)) for foreach in FOREACH}
    import te_fsdp

    model = trained(axes, strategy, "experts")
    te_fsdp.clip_grad_norm_(model, 1e-3)
    results["control"] = _error(torch.optim.SGD(model.parameters(), lr=0.1).step)
    dist.barrier()
    return results
