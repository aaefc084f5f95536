"""Bodies: changes of weights that an evaluation left unsharded, compared with one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import harness
import torch
from strategies.models import Model, batch, one_process, sharded, step_both
from torch import nn
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method

LEARNING_RATE = 0.1


def _weights(model: nn.Module) -> list[torch.Tensor]:
    return [p for name, p in model.named_parameters() if name.endswith("weight") and "norm" not in name]


def _each(write: Callable[[torch.Tensor], Any]) -> Callable[[nn.Module], None]:
    def apply(model: nn.Module) -> None:
        for parameter in _weights(model):
            write(parameter)

    return apply


@torch.no_grad()
def _add(parameter: torch.Tensor) -> None:
    parameter.add_(0.02)


@torch.no_grad()
def _foreach(model: nn.Module) -> None:
    torch._foreach_add_(_weights(model), 0.02)


@torch.no_grad()
def _local(parameter: Any) -> None:
    (parameter.to_local() if hasattr(parameter, "to_local") else parameter).mul_(1.1)


def _merge(parameter: torch.Tensor) -> None:
    parameter.data += 0.02 * torch.ones_like(parameter)


def _data_local(parameter: Any) -> None:
    data = parameter.data
    (data.to_local() if hasattr(data, "to_local") else data).mul_(1.1)


def _part_local(part: Callable[[torch.Tensor], Any]) -> Callable[[nn.Module], None]:
    @torch.no_grad()
    def write(parameter: torch.Tensor) -> None:
        view = part(parameter)
        (view.to_local() if hasattr(view, "to_local") else view).mul_(1.1)

    return _each(write)


def _state_dict(model: nn.Module) -> None:
    for key, value in model.state_dict().items():
        if key.endswith("weight") and "norm" not in key:
            (value.to_local() if hasattr(value, "to_local") else value).mul_(1.1)


def _freeze(model: nn.Module) -> None:
    model.head.weight.requires_grad_(False)
    model.head.bias.requires_grad_(True)


#: Name -> change of a model.
CHANGES: dict[str, Callable[[nn.Module], None]] = {
    "nothing": lambda model: None,
    "optimizer": lambda model: None,
    "add_": _each(_add),
    "init": _each(lambda p: nn.init.constant_(p, 0.02)),
    "foreach": _foreach,
    "to_local": _each(_local),
    "frozen": _freeze,
    "data.mul_": _each(lambda p: p.data.mul_(1.1)),
    "data.copy_": _each(lambda p: p.data.copy_(torch.full_like(p, 0.02))),
    "data.clamp_": _each(lambda p: p.data.clamp_(-0.1, 0.1)),
    "data +=": _each(_merge),
    "data.to_local": _each(_data_local),
    "detach.to_local": _part_local(lambda p: p.detach()),
    "state dict": _state_dict,
    "columns.to_local": _part_local(lambda p: p[:, 2:5]),
    "view.detach.to_local": _part_local(lambda p: p.T.detach()),
    "detach.view.to_local": _part_local(lambda p: p.detach()[:, 1:]),
    "data.view.to_local": _part_local(lambda p: p.data.T),
}


def make_model(by: str) -> tuple[Any, Any]:
    """Return meshes and a model. ``by``: a strategy, or "torch", "method" (of torch's units), "2" (to fewer ranks)."""
    import te_fsdp

    if by not in ("torch", "method", "2"):
        meshes = te_fsdp.Meshes.build(dp_shard=-1, device_type=harness.device_type())
        return meshes, sharded(meshes, by)
    meshes = te_fsdp.Meshes.build(dp_shard=-1, device_type=harness.device_type())
    model = Model("meta")
    te_fsdp.set_device_mesh(model, meshes.tp, meshes.weight)
    for unit in (*model.blocks, model):
        fully_shard(unit, mesh=meshes.fsdp, reshard_after_forward=2 if by == "2" else False)
    te_fsdp.materialize(model, seed=7)
    if by == "method":
        register_fsdp_forward_method(model, "score")
    return meshes, model


def compare_changes_after_evaluation(by: str) -> dict[str, float]:
    """Return the largest difference of outputs and weights from one process, after each change and two steps."""
    return {change: _changed(by, change) for change in CHANGES}


def _changed(by: str, change: str) -> float:
    meshes, model = make_model(by)
    reference, worst = one_process(), 0.0
    pairs = [(m, torch.optim.SGD(m.parameters(), lr=LEARNING_RATE)) for m in (model, reference)]

    def evaluate(number: int) -> float:
        x = batch(number, meshes.data_size, 1)[0][meshes.data_rank]
        with torch.no_grad():
            mine, wanted = (model.score if by == "method" else model)(x), reference(x)
        return float((mine - wanted).norm() / wanted.norm())

    step_both(pairs, meshes, 0)
    worst = max(worst, evaluate(1))
    for m, _ in pairs:
        CHANGES[change](m)
    worst = max(worst, evaluate(2), evaluate(3))
    for m, _ in pairs:
        CHANGES[change](m)
    if change == "optimizer":
        pairs = [(m, torch.optim.SGD(m.parameters(), lr=LEARNING_RATE)) for m, _ in pairs]
    step_both(pairs, meshes, 4)
    step_both(pairs, meshes, 5)
    worst = max(worst, evaluate(6))
    for unit in model.modules():
        if hasattr(unit, "reshard"):
            unit.reshard()
    mine = torch.cat([harness.full(p.detach()).flatten() for p in model.parameters()])
    wanted = torch.cat([harness.full(p).flatten() for p in reference.parameters()])
    return max(worst, float((mine - wanted).norm() / wanted.norm()))


def count_all_gathers(by: str) -> list[int]:
    """Count the all-gathers of three evaluations without changes between them."""
    from torch.distributed.fsdp._fully_shard import _fsdp_param_group as groups

    meshes, model = make_model(by)
    counts, stock = [], groups.foreach_all_gather

    def count(*args: Any, **kwargs: Any) -> Any:
        counts[-1] += 1
        return stock(*args, **kwargs)

    groups.foreach_all_gather = count
    try:
        for number in range(3):
            counts.append(0)
            with torch.no_grad():
                model(batch(number, meshes.data_size, 1)[0][meshes.data_rank])
    finally:
        groups.foreach_all_gather = stock
    return counts


def _assign(weight: Any) -> None:
    weight.data = 2 * weight.data


def _swap(weight: Any) -> None:
    torch.utils.swap_tensors(weight, nn.Parameter(2 * weight.detach()))


#: Name -> change of a weight that torch ignores, and a part of the error.
REFUSED: dict[str, tuple[Callable[[Any], None], str]] = {
    "data": (_assign, "parameter.data was assigned"),
    "swap_tensors": (_swap, "torch.utils.swap_tensors of a sharded model's parameter"),
}


def error_of_change(by: str, surgery: str) -> str:
    """Return the error after a step and a change of a weight."""
    import te_fsdp

    meshes, model = make_model(by)
    x = batch(0, meshes.data_size, 1)[0][meshes.data_rank]
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    model(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    with torch.no_grad():
        model(x)
    try:
        REFUSED[surgery][0](model.blocks[1].fc2_weight)
        model(x).square().mean().backward()
        optimizer.step()
    except te_fsdp.TeFsdpError as error:
        return str(error)
    return ""


def error_of_data_assignment(by: str) -> str:
    """Return the error after an assignment to ``.data`` of one weight in a unit that has stepped."""
    import te_fsdp

    meshes, model = make_model(by)
    x = batch(0, meshes.data_size, 1)[0][meshes.data_rank]
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    model(x).square().mean().backward()
    optimizer.step()
    weight = model.blocks[1].fc2_weight
    weight.data = 2 * weight.data
    try:
        model(x)
    except te_fsdp.OrderError as error:
        return str(error)
    return ""
