"""Bodies of the tests of resuming: training continues from a checkpoint of DCP."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import harness
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.tensor import DTensor

from bridge.bodies import batch, full_weights

#: Options of each optimizer under test, by the name of a case.
OPTIMIZERS: dict[str, tuple[str, dict[str, Any]]] = {
    "Adam": ("Adam", {}),
    "amsgrad": ("Adam", {"amsgrad": True}),
    "AdamW": ("AdamW", {"foreach": False}),
    "foreach": ("AdamW", {"foreach": True}),
    "fused": ("AdamW", {"fused": True}),
    "momentum": ("SGD", {"momentum": 0.9, "weight_decay": 0.1}),
    "SGD": ("SGD", {}),
    "RMSprop": ("RMSprop", {"momentum": 0.5, "centered": True}),
    "FusedAdam": ("FusedAdam", {}),
    "FusedAdam+main": ("FusedAdam", {"master_weights": True}),
}


def make_net(seed: int, dtype: torch.dtype, frozen: bool) -> torch.nn.Sequential:
    """Return a model with uneven rows over four ranks and fewer rows than ranks. One parameter may be frozen."""
    torch.manual_seed(seed)
    linear, tanh = torch.nn.Linear, torch.nn.Tanh
    net = torch.nn.Sequential(linear(6, 9), tanh(), linear(9, 9), tanh(), linear(9, 2, bias=not frozen))
    net[2].bias.requires_grad_(not frozen)
    return net.to(harness.device(), dtype)


def make_optimizer(kind: str, parameters: Any) -> torch.optim.Optimizer:
    name, options = OPTIMIZERS[kind]
    if name == "FusedAdam":
        from transformer_engine.pytorch.optimizers import FusedAdam

        return FusedAdam(parameters, lr=0.01, **options)
    return getattr(torch.optim, name)(parameters, lr=0.01, **options)


def options_of(strategy: str, outer: str | None) -> dict[str, Any]:
    """Return the mesh of megatron-fsdp's own test, with its flattened axes: context parallelism, and no tp."""
    world = dist.get_world_size()
    shape = (2, world // 2, 1, 1) if outer is not None else (1, world // 2, 2, 1)
    names = ("dp_outer", "dp_shard", "cp", "tp")
    mesh = dist.init_device_mesh(harness.device_type(), shape, mesh_dim_names=names)
    mesh["dp_shard", "cp"]._flatten("dp_shard_cp")
    everyone = mesh["dp_outer", "dp_shard", "cp"]._flatten("hsdp")
    return {
        "device_mesh": mesh,
        "dp_shard_dim": "dp_shard_cp",
        "dp_outer_dim": "dp_outer",
        "tp_dim": "tp",
        "hybrid_fsdp_group": everyone.get_group(),
        "zero_dp_strategy": strategy,
        "outer_dp_sharding_strategy": outer or "no_shard",
        "fsdp_unit_modules": ["torch.nn.Linear"],
    }


class Case:
    """One model with its optimizer, and its steps."""

    def __init__(self, kind: str, seed: int, mesh: dict[str, Any], dtype: torch.dtype) -> None:
        from te_fsdp.compat import megatron_fsdp

        self.dtype = dtype
        net = make_net(seed, dtype, frozen=kind == "AdamW")
        groups = [
            {"params": list(net[0].parameters()), "lr": 0.05 * seed},
            {"params": list(net[2:].parameters())},
        ]
        self.model, self.optimizer = megatron_fsdp.fully_shard(net, make_optimizer(kind, groups), **mesh)

    def train(self, steps: range) -> None:
        for step in steps:
            data = batch(step, 0, dist.get_rank()).to(self.dtype)
            self.model(data).float().square().mean().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()

    def state(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def take_over(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"], strict=False)
        self.optimizer.load_state_dict(state["optimizer"])


def resume(
    kinds: list[str], strategy: str, outer: str | None, directory: str, low: bool = False
) -> dict[str, dict[str, Any]]:
    """Save after two steps, go on for two; load into other models, go on for the same two. One checkpoint for all.

    Returns:
        By kind of optimizer what differs: in the state dicts right after loading, and in the weights after the two
        steps more; and the number of states.
    """
    mesh, results = options_of(strategy, outer), {}
    dtype = torch.bfloat16 if low else torch.float32
    first = {kind: Case(kind, 1, mesh, dtype) for kind in kinds}
    for case in first.values():
        case.train(range(2))
    saved = {kind: deepcopy(case.state()) for kind, case in first.items()}
    dcp.save({kind: case.state() for kind, case in first.items()}, checkpoint_id=directory)
    second = {kind: Case(kind, 2, mesh, dtype) for kind in kinds}
    states = {kind: case.state() for kind, case in second.items()}
    dcp.load(states, checkpoint_id=directory)
    for kind in kinds:
        second[kind].take_over(states[kind])
        loaded = differences(saved[kind], deepcopy(second[kind].state()))
        for case in (first[kind], second[kind]):
            case.train(range(2, 4))
        trained = differences(full_weights(first[kind].model), full_weights(second[kind].model))
        count = sum(len(s) for s in saved[kind]["optimizer"]["state"].values())
        results[kind] = {"loaded": loaded, "trained": trained, "states": count}
    return results


def without_state(strategy: str, outer: str | None) -> dict[str, list[str]]:
    """Load weights alone by state dicts, into an optimizer with state and one without. The control."""
    mesh, results = options_of(strategy, outer), {}
    for kind in ("Adam", "SGD"):
        first, second = Case(kind, 1, mesh, torch.float32), Case(kind, 1, mesh, torch.float32)
        first.train(range(2))
        second.model.load_state_dict(first.model.state_dict())
        for case in (first, second):
            case.train(range(2, 4))
        results[kind] = differences(full_weights(first.model), full_weights(second.model))
    return results


def before_the_first_step() -> dict[str, Any]:
    """Load state dicts with gradients, and state dicts without a target."""
    from te_fsdp.compat import megatron_fsdp
    from te_fsdp.errors import CheckpointError, OrderError

    mesh, results = options_of("optim_grads_params", None), {}
    case = Case("Adam", 1, mesh, torch.float32)
    weights = full_weights(case.model)
    case.model(batch(0, 0, dist.get_rank())).square().mean().backward()
    gradients = {name: p.grad.to_local().clone() for name, p in case.model.named_parameters()}
    state = case.optimizer.state_dict()["state"]
    results["states"] = [sorted(s) for s in state.values()]
    results["steps"] = sorted({float(s["step"]) for s in state.values()})
    after = {name: p.grad.to_local() for name, p in case.model.named_parameters()}
    results["changed"] = differences([weights, gradients], [full_weights(case.model), after])
    refused: dict[str, Any] = {"Adamax": {}, "SGD": {"momentum": 0.9, "dampening": 0.5}, "NAdam": {}}
    for name, options in refused.items():
        other = megatron_fsdp.fully_shard_optimizer(
            getattr(torch.optim, name)(case.model.parameters(), lr=0.01, **options)
        )
        results[name] = error_of(OrderError, other.state_dict)
    adam = torch.optim.Adam(case.model.parameters())
    early = adam.state_dict()
    megatron_fsdp.fully_shard_optimizer(adam)
    results["early"] = error_of(CheckpointError, lambda: adam.load_state_dict(early))
    plain = torch.optim.SGD(case.model.parameters())
    megatron_fsdp.fully_shard_optimizer(plain).load_state_dict(plain.state_dict())  # keeps none, rightly
    return results


def error_of(kind: type[Exception], call: Any) -> str:
    try:
        call()
    except kind as error:
        return str(error)
    return "none"


def differences(one: Any, two: Any, name: str = "") -> list[str]:
    """Return names of the leaves of two trees that have not the same type, shape and bits."""
    if isinstance(one, dict) and isinstance(two, dict):
        keys = [*one, *(key for key in two if key not in one)]
        return [d for key in keys for d in differences(one.get(key), two.get(key), f"{name}.{key}")]
    if isinstance(one, list) and isinstance(two, list) and len(one) == len(two):
        return [
            d
            for at, (a, b) in enumerate(zip(one, two, strict=True))
            for d in differences(a, b, f"{name}.{at}")
        ]
    if isinstance(one, torch.Tensor) and isinstance(two, torch.Tensor):
        one, two = (t.to_local() if isinstance(t, DTensor) else t for t in (one, two))
        same = one.dtype == two.dtype and one.shape == two.shape and torch.equal(one, two)
        return [] if same else [f"{name}: {one} {two}"]
    return [] if type(one) is type(two) and one == two else [f"{name}: {one} {two}"]
