"""Optimizers that were built before the model got the parameters that it trains."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import harness
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard as fsdp2_fully_shard
from torch.distributed.tensor import DTensor

from parity.models import HIDDEN

#: When an optimizer may be built, in the order of the calls of each route.
MOMENTS = {
    "fully_shard": ("before set_device_mesh", "before fully_shard", "before materialize"),
    "torch": ("before set_device_mesh", "before fully_shard", "before reset_parameters"),
    "te_fsdp alone": ("before fully_shard", "before materialize"),
}
OPTIMIZERS = {
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=0.1),
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    "FusedAdam": lambda parameters: _fused_adam(parameters),
}


def _fused_adam(parameters: Any) -> torch.optim.Optimizer:
    import transformer_engine.pytorch as te

    return te.optimizers.FusedAdam(parameters, lr=0.1)


class Model(nn.Module):
    """TE modules sharded by tp, and one module outside of TE."""

    def __init__(self, device: Any, **tp: Any) -> None:
        super().__init__()
        import transformer_engine.pytorch as te

        options = {"device": device, "params_dtype": torch.float32, **tp}
        self.up = te.Linear(HIDDEN, HIDDEN, parallel_mode="column", **options)
        self.down = te.Linear(HIDDEN, HIDDEN, parallel_mode="row", **options)
        self.head = nn.Linear(HIDDEN, 8, device=device)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.down(self.up(x)))


def _groups(model: nn.Module, several: bool) -> list[Any]:
    parameters = [p for p in model.parameters() if p.requires_grad]
    return [{"params": parameters[:1]}, {"params": parameters[1:], "lr": 0.2}] if several else parameters


def _train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.ones(4, 2, HIDDEN, device=harness.device())).square().mean().backward()
    optimizer.step()


def _prepared(route: str, tp: int, build: Callable[[nn.Module, str], None]) -> nn.Module:
    """Return a model ready to train by one route; ``build`` is called with each moment before a call."""
    import te_fsdp

    meshes = te_fsdp.Meshes.build(tp=tp, device_type=harness.device_type())
    model = Model("meta", **meshes.te_kwargs())
    if route != "te_fsdp alone":
        build(model, "before set_device_mesh")
        te_fsdp.set_device_mesh(model, meshes.tp, meshes.weight)
    build(model, "before fully_shard")
    if route == "torch":
        fsdp2_fully_shard(model, mesh=meshes.fsdp_with_size_one)
        build(model, "before reset_parameters")
        for module in (model.up, model.down, model.head):
            module.reset_parameters()
    else:
        te_fsdp.fully_shard(model, meshes)
        build(model, "before materialize")
        te_fsdp.materialize(model)
    build(model, "")
    return model


def step(route: str, moment: str, tp: int, name: str = "AdamW", several: bool = False) -> tuple[str, str]:
    """Make two steps of an optimizer that was built at the given time. Return the error or nothing.

    The step of the right one must change parameters; the wrong one must raise at the first step, and change nothing.
    """
    import te_fsdp

    results: dict[str, Any] = {}

    def build(model: nn.Module, now: str) -> None:
        if now == moment:
            results["optimizer"] = OPTIMIZERS[name](_groups(model, several))

    model = _prepared(route, tp, build)
    before = [harness.full(p).clone() for p in model.parameters()]
    try:
        _train(model, results["optimizer"])
        _train(model, results["optimizer"])
    except te_fsdp.OrderError as error:
        raised = type(error).__name__, str(error)
    else:
        raised = "", ""
    changed = any(
        not torch.equal(harness.full(p), old) for p, old in zip(model.parameters(), before, strict=True)
    )
    assert changed == (moment == ""), "a wrong optimizer changes nothing, the right one does"
    return raised


def error_of_one_stale_parameter() -> str:
    """Return the error of an optimizer of the right parameters and one from before."""
    import te_fsdp

    old: list[nn.Parameter] = []

    def build(model: nn.Module, now: str) -> None:
        if now == "before fully_shard":
            old.append(model.down.weight)

    model = _prepared("te_fsdp alone", 1, build)
    optimizer = torch.optim.SGD([*model.parameters(), *old], lr=0.1)
    try:
        _train(model, optimizer)
    except te_fsdp.OrderError as error:
        return str(error)
    return ""


def _local(tensor: Any) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


#: Tensors with the values of parameters, which no backward gives gradients.
COPIES: dict[str, Callable[[list[torch.Tensor]], list[torch.Tensor]]] = {
    "local": lambda params: [_local(p).detach().requires_grad_() for p in params],
    "one": lambda params: [_local(params[0]).detach(), *params[1:]],
    "data": lambda params: [p.data for p in params],
    "flat": lambda params: [nn.Parameter(_local(p).detach().view(-1)) for p in params],
    "clone": lambda params: [nn.Parameter(_local(p).detach().clone()) for p in params],
    "full": lambda params: [nn.Parameter(harness.full(p).detach().clone()) for p in params],
}


def step_on_copies(route: str, tp: int, kind: str, name: str, assigned: str) -> tuple[str, list[bool]]:
    """Return the error of an optimizer over copies or views of parameters, and which weights changed.

    ``assigned``: the program assigns gradients before the step (``"before"``), in a hook of it (``"hook"``), or never.
    """
    import te_fsdp

    model = _prepared(route, tp, lambda model, now: None)
    params = list(model.parameters())
    tensors = COPIES[kind](params)
    optimizer = OPTIMIZERS[name](tensors)

    def assign(*_: Any) -> None:
        for tensor, parameter in zip(tensors, params, strict=True):
            gradient = _local(parameter.grad) if tensor is not parameter else parameter.grad
            tensor.grad = gradient.view(tensor.shape)

    if assigned == "hook":
        optimizer.register_step_pre_hook(assign)
    before = [harness.full(p).clone() for p in params]
    try:
        model(torch.ones(4, HIDDEN, device=harness.device())).square().mean().backward()
        if assigned == "before":
            assign()
        optimizer.step()
    except te_fsdp.OrderError as error:
        return str(error), []
    return "", [not torch.equal(harness.full(p), b) for p, b in zip(params, before, strict=True)]


def step_unrelated_optimizers() -> None:
    """Step optimizers of other models, of models that share a parameter, of deleted ones and of copies."""
    plain = Model(harness.device())
    twin = copy.deepcopy(plain)  # before: never wrapped
    optimizers = [(plain, torch.optim.SGD(plain.parameters(), lr=0.1))]
    optimizers += [(twin, torch.optim.AdamW(twin.parameters(), lr=0.1))]
    first = _prepared("te_fsdp alone", 1, lambda model, now: None)
    second = _prepared("fully_shard", 1, lambda model, now: None)
    for model in (first, second):
        optimizers.append((model, torch.optim.SGD(model.parameters(), lr=0.1)))
    for model, optimizer in optimizers:
        before = [harness.full(p).clone() for p in model.parameters()]
        _train(model, optimizer)
        assert any(
            not torch.equal(harness.full(p), b) for p, b in zip(model.parameters(), before, strict=True)
        )
    # Tensors of no module without gradients, as those that a first step does not use.
    torch.optim.SGD([torch.ones(HIDDEN, 3), torch.ones(HIDDEN, HIDDEN)], lr=0.1).step()
    del first, model
    gc.collect()
    optimizers[2][1].step()  # of a model that is gone


def shared_parameter() -> None:
    """Check a parameter that another model still has after this model has replaced it."""
    import te_fsdp

    model, other = Model(harness.device()), Model(harness.device())
    other.head.weight = model.head.weight
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
    te_fsdp.fully_shard(model, te_fsdp.Meshes.build(device_type=harness.device_type()))
    before = other.head.weight.detach().clone()
    _train(other, optimizer)
    assert not torch.equal(other.head.weight, before)


def replaced_parameters_are_freed() -> None:
    """Check that replaced parameters are freed."""
    old: list[weakref.ref[nn.Parameter]] = []
    model = _prepared(
        "te_fsdp alone", 1, lambda m, now: old.extend(map(weakref.ref, m.parameters())) if now else None
    )
    _train(model, torch.optim.SGD(model.parameters(), lr=0.1))
    gc.collect()
    left = [reference for reference in old if reference() is not None]
    assert len(old) == 12 and not left, f"{len(left)} of {len(old)} replaced parameters are still held"
