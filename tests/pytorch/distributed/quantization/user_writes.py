"""Bodies: writes to low-precision weights between two steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import harness
import torch
import torch.distributed as dist
from matrix.models import recipe_of
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

STEPS = 4
#: Bound models that torch's own ``fully_shard`` shards, or nothing.
BOUND = ("torch", "none")
OPTIMIZERS: dict[str, Callable[[Any, Any], Any]] = {
    "SGD": lambda te, params: torch.optim.SGD(params, lr=0.05, momentum=0.9),
    "AdamW": lambda te, params: torch.optim.AdamW(params, lr=1e-2),
    "FusedAdam": lambda te, params: te.optimizers.FusedAdam(params, lr=1e-2, master_weights=True),
}


def full(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy of the full values in fp32."""
    tensor = tensor.detach()
    if isinstance(tensor, DTensor):
        tensor = tensor.full_tensor()
    if hasattr(tensor, "dequantize") and type(tensor) is not torch.Tensor:
        return tensor.dequantize(dtype=torch.float32).clone()
    return tensor.float().clone()


def values(parameter: torch.Tensor) -> torch.Tensor:
    """Return the full fp32 values of a parameter, gathered from the dequantized shards."""
    if not isinstance(parameter, DTensor):
        return full(parameter)
    local = full(parameter.to_local())
    spec: Any = DTensor.from_local(local, parameter.device_mesh, parameter.placements)
    return spec.full_tensor()


class Model(nn.Module):
    """Two linear layers of TE."""

    def __init__(self, recipe: str, device: Any = "meta") -> None:
        import transformer_engine.pytorch as te

        super().__init__()
        # Each of 2 shards has a full block.
        self.width = 256 if recipe == "block" else 64
        self.recipe = None if recipe == "none" else recipe_of(recipe)
        options: dict[str, Any] = {"bias": False, "params_dtype": torch.bfloat16, "device": device}
        with te.quantized_model_init(enabled=self.recipe is not None, recipe=self.recipe):
            self.layers = nn.Sequential(*(te.Linear(self.width, self.width, **options) for _ in range(2)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        import transformer_engine.pytorch as te

        with te.autocast(enabled=self.recipe is not None, recipe=self.recipe):
            return self.layers(x)


def _like(parameter: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Return a full value in the layout of a parameter."""
    if isinstance(parameter, DTensor):
        return distribute_tensor(value, parameter.device_mesh, parameter.placements)
    return value


def _negated(value: torch.Tensor) -> torch.Tensor:
    """Return values to which no main weight rounds that rounds to ``value``."""
    return torch.where(value.abs() < 1e-3, torch.full_like(value, 0.05), -value)


def _load(model: nn.Module) -> None:
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

    states = {name: _negated(values(p)) for name, p in model.named_parameters()}
    options = StateDictOptions(full_state_dict=True, strict=False)
    set_model_state_dict(model, states, options=options)


def _lookahead(parameter: torch.Tensor) -> None:
    slow = _like(parameter, _negated(values(parameter)))
    slow.lerp_(_like(parameter, values(parameter)), 0.25)
    parameter.copy_(slow)


def _in_and_out(parameter: torch.Tensor, write: Callable[[torch.Tensor, torch.Tensor], Any]) -> None:
    kept = parameter.detach().clone()
    write(parameter, _like(parameter, _negated(values(parameter))))
    write(parameter, kept)


def _each(write: Callable[[torch.Tensor], Any]) -> Callable[[nn.Module], None]:
    def apply(model: nn.Module) -> None:
        for parameter in model.parameters():
            write(parameter)

    return apply


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


#: Name -> function that writes to the weights of a model.
WAYS: dict[str, Callable[[Any], Any]] = {
    "copy_": _each(lambda p: p.copy_(_like(p, _negated(values(p))))),
    "mul_": _each(lambda p: p.mul_(-1)),
    "data.copy_": _each(lambda p: p.data.copy_(_like(p, _negated(values(p))))),
    "data.mul_": _each(lambda p: p.data.mul_(-1)),
    "detach.copy_": _each(lambda p: p.detach().copy_(_like(p, _negated(values(p))))),
    "foreach": lambda model: torch._foreach_mul_(list(model.parameters()), -1.0),
    "foreach_copy": lambda model: torch._foreach_copy_(
        list(model.parameters()), [_like(p, _negated(values(p))) for p in model.parameters()]
    ),
    "lookahead": _each(_lookahead),
    "load": _load,
    "nothing": lambda model: None,
    "in and out": _each(lambda p: _in_and_out(p, lambda p, value: p.copy_(value))),
    "held.copy_": lambda model: [v.copy_(_like(v, _negated(values(v)))) for v in model.held],
}
#: Ways through local tensors.
LOCAL_WAYS: dict[str, Callable[[nn.Module], None]] = {
    "detach.to_local": _each(lambda p: _local(p.detach()).mul_(-1)),
    "state dict": lambda model: [
        _local(p).mul_(-1) for p in model.state_dict().values() if torch.is_tensor(p)
    ],
}
#: Ways after which the weights have their previous values.
RESTORED = ("nothing", "in and out")
#: Ways that are not detected for BF16 weights in DTensors.
UNCOUNTED: tuple[str, ...] = ()


def _train(model: Model, optimizer: Any, seed: int, *, readable: bool) -> list[torch.Tensor]:
    """Train one step; return the full gradients, zeros if they are not readable."""
    generator = torch.Generator().manual_seed(10 * seed + dist.get_rank())
    x = torch.randn(32, model.width, generator=generator).to(harness.device(), torch.bfloat16)
    model(x).float().square().mean().backward()
    if readable:
        gradients = [full(p.grad) for p in model.parameters() if p.grad is not None]
    else:
        gradients = [torch.zeros(p.shape, device=harness.device()) for p in model.parameters()]
    optimizer.step()
    optimizer.zero_grad()
    return gradients


def _require_rounded(label: str, parameter: torch.Tensor, main: torch.Tensor, recipe: str) -> None:
    """Check that a weight is its main weight, rounded once.

    Half of the spacing is 1/16 of a normal E4M3 value, 1/4 of a normal E2M1 value. Subnormal E2M1 values have spacings
    of 1/12 of the largest value of the block. Delayed scaling takes its scale from the amax of earlier values. Larger
    values saturate, as in one process.
    """
    weight = values(parameter)
    if recipe == "delayed":
        local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        largest = 448 * local.get_metadata()["fp8_scale_inv"]  # type: ignore[attr-defined]
        main = main.clamp(-largest, largest)
    part, floor = (2.0**-2, 2.0**-4) if recipe == "nvfp4" else (2.0**-4, 2.0**-8)
    limit = part * main.abs() + floor * main.abs().max()
    assert bool(((weight - main).abs() <= limit).all()), label


@torch.no_grad()
def _write(model: Model, exact: list[nn.Parameter], way: str) -> bool:
    """Write to the weights, and the changed values to exact weights; return whether any has changed."""
    before = [values(p) for p in model.parameters()]
    (WAYS | LOCAL_WAYS)[way](model)
    count = 0
    for p, old, master in zip(model.parameters(), before, exact, strict=True):
        changed = values(p) != old
        count += int(changed.sum())
        master.copy_(torch.where(changed, values(p), master))
    return count > 0


def _of_exact(te: Any, optimizer: str, exact: list[nn.Parameter]) -> Any:
    """Return the optimizer of one process, over fp32 weights."""
    if optimizer == "FusedAdam":
        return te.optimizers.FusedAdam(exact, lr=1e-2)
    return OPTIMIZERS[optimizer](te, exact)


def trained(
    recipe: str,
    optimizer: str,
    strategy: str,
    way: str,
    *,
    at: int = 2,
    outer: str = "no_shard",
    **axes: int,
) -> dict[str, Any]:
    """Compare main weights with fp32 weights of one process that get the written values, over some steps.

    Args:
        recipe: The format of the weights; ``"none"`` for BF16.
        optimizer: A key of :data:`OPTIMIZERS`. ``FusedAdam`` keeps its own main weights.
        strategy: The strategy, or one of :data:`BOUND`.
        way: A key of :data:`WAYS`.
        at: The step before which the weights are written to.
        outer: The outer strategy.
        **axes: Sizes of the axes of the mesh.
    """
    import transformer_engine.pytorch as te

    import te_fsdp

    meshes = te_fsdp.Meshes.build(**axes, device_type=harness.device_type())
    model = Model(recipe)
    if strategy in BOUND:
        te_fsdp.set_device_mesh(model, weight_mesh=meshes.weight if strategy == "torch" else None)
        if strategy == "torch":
            fully_shard(model, mesh=meshes.fsdp)
    else:
        te_fsdp.fully_shard(model, meshes, strategy=strategy, outer_strategy=outer, checks="setup")
    model.held = [p.detach() for p in te_fsdp.materialize(model, seed=0).parameters()]
    sharded = OPTIMIZERS[optimizer](te, model.parameters())
    if outer == "optim":
        te_fsdp.shard_optimizer(sharded)
    te_fsdp.main_weights(model, sharded)
    # One process: fp32 weights under the same optimizer, and unsharded weights in the format to write to.
    exact = [nn.Parameter(values(p)) for p in model.parameters()]
    plain = _of_exact(te, optimizer, exact)
    if outer == "optim":
        # Between steps, gradients are not averaged over dp_replicate. Without updates they are not needed.
        sharded.param_groups[0]["lr"] = plain.param_groups[0]["lr"] = 0.0
    checks, written = harness.Comparisons(), False
    for step in range(STEPS):
        if step == at:
            written = _write(model, exact, way)
        gradients = _train(model, sharded, step, readable=outer == "no_shard")
        for master, gradient in zip(exact, gradients, strict=True):
            master.grad = gradient
        plain.step()
        for index, (p, master) in enumerate(zip(model.parameters(), exact, strict=True)):
            label, expected = f"{index} {step}", master.detach()
            if outer == "no_shard":
                # The same fp32 operations on each element, in kernels for other shapes: 1 ulp.
                main = full(sharded.state[p]["master_param"])
                checks.close(label, main, expected, 2e-7, "fp32 elements, 1 ulp")
            _require_rounded(label, p, expected, recipe)
    return {"checks": checks.require(2 * STEPS if outer == "no_shard" else 0), "written": written}


def trained_without_updates(**options: Any) -> dict[str, Any]:
    """Run :func:`trained` without te_fsdp's update of written main weights: the negative control."""
    from te_fsdp.features import written_weights

    with mock.patch.object(written_weights, "_new_main_weight", lambda *unused: (None, None)):
        return trained(**options)


#: Writes of one value to a weight. All but the first write through its local tensor.
OF_ONE_VALUE: dict[str, Callable[[Any, Any], Any]] = {
    "copy_": lambda p, value: p.copy_(value),
    "data.to_local": lambda p, value: _local(p.data).copy_(_local(value)),
    "detach.to_local": lambda p, value: _local(p.detach()).copy_(_local(value)),
    "data._local_tensor": lambda p, value: p.data._local_tensor.copy_(_local(value)),
    "state dict": lambda p, value: _local(p.module.state_dict()["weight"]).copy_(_local(value)),
}


def outputs_after_evaluation(recipe: str, strategy: str) -> dict[str, torch.Tensor]:
    """Evaluate a trained model, write to its weights, and evaluate again: return the outputs for each write."""
    import te_fsdp

    meshes = te_fsdp.Meshes.build(dp_shard=2, device_type=harness.device_type())
    results = {}
    for way, write in ({"nothing": lambda p, value: None} | OF_ONE_VALUE).items():
        model = Model(recipe)
        if strategy == "torch":
            te_fsdp.set_device_mesh(model, weight_mesh=meshes.weight)
            fully_shard(model, mesh=meshes.fsdp, reshard_after_forward=False)
        else:
            te_fsdp.fully_shard(model, meshes, strategy=strategy, checks="setup")
        te_fsdp.materialize(model, seed=0)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        te_fsdp.main_weights(model, optimizer)
        _train(model, optimizer, 0, readable=True)
        rows = torch.ones(32, model.width, dtype=torch.bfloat16, device=harness.device())
        with torch.no_grad():
            model(rows)
            for layer in model.layers:
                p = layer.weight
                p.module = layer
                generator = torch.Generator().manual_seed(3)
                value = torch.randn(p.shape, generator=generator).to(harness.device(), torch.bfloat16)
                write(p, _like(p, value))
            results[way] = model(rows).float().cpu()
    return results
