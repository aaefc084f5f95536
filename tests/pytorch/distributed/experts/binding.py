"""Bodies: what `set_device_mesh` does to experts."""

from __future__ import annotations

import copy
from typing import Any

import harness
import torch
import torch.distributed as dist
from parity.runs import shards
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from experts.bodies import batch, training
from experts.model import build

EXPERTS = 5  # three on the first of two ranks


def _meshes(**axes: int) -> Any:
    import te_fsdp

    return te_fsdp.Meshes.build(**axes, device_type=harness.device_type())


def _bound(meshes: Any, device: Any, **how: Any) -> Any:
    import te_fsdp

    options = {"bias": True, **how}
    model = build("none", "fp32", EXPERTS, meshes, device, **options)
    te_fsdp.set_device_mesh(
        model, meshes.tp, meshes.weight, ep_mesh=meshes.ep, expert_weight_mesh=meshes.expert_weight
    )
    return model


def names() -> dict[str, Any]:
    """Return names under which parameters are registered, TE's names for the same objects, and copies of the module."""
    meshes = _meshes(ep=2)
    model = _bound(meshes, harness.device())
    module, own = model.mixture.up, meshes.experts(EXPERTS)
    expected = [f"{kind}{index}" for index in own for kind in ("weight", "bias")]
    assert [name for name, _ in module.named_parameters()] == expected
    assert [n for n in module.state_dict() if not n.endswith("_extra_state")] == expected
    for place, index in enumerate(own):
        assert getattr(module, f"weight{place}") is module.get_parameter(f"weight{index}")
        assert getattr(module, f"bias{place}") is module.get_parameter(f"bias{index}")
    twin = copy.deepcopy(module)
    assert [name for name, _ in twin.named_parameters()] == expected
    assert twin.weight0 is twin.get_parameter(f"weight{own[0]}") is not module.weight0
    fresh = torch.nn.Parameter(torch.ones_like(module.weight0))
    module.weight0 = fresh  # by TE's name: replaces the parameter, and registers none
    assert module.get_parameter(f"weight{own[0]}") is fresh
    assert [name for name, _ in module.named_parameters()] == expected
    assert not hasattr(module, f"weight{EXPERTS}")
    return {"names": [name for name, _ in model.named_parameters()]}


def state_dicts() -> dict[str, Any]:
    """Load a state dict of all experts. Each rank gets its own, and none from local names."""
    torch.manual_seed(3)
    whole = build("none", "fp32", EXPERTS, None, harness.device(), bias=True)
    meshes = _meshes(ep=2)
    model = _bound(meshes, harness.device())
    one_by_one = whole.state_dict()
    stacked = dict(one_by_one)
    for module in ("up", "down"):
        for kind in ("weight", "bias"):
            parts = [stacked.pop(f"mixture.{module}.{kind}{index}") for index in range(EXPERTS)]
            stacked[f"mixture.{module}.{kind}"] = torch.stack(parts)
    checks = harness.Comparisons()
    for given in (one_by_one, stacked):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        model.load_state_dict(given)
        for name, parameter in model.named_parameters():
            checks.bitwise_equal(name, parameter, one_by_one[name])
    model.load_state_dict(model.state_dict())
    plain = build("none", "fp32", EXPERTS, meshes, harness.device(), bias=True)  # stock: local names
    refused = ""
    try:
        model.load_state_dict(plain.state_dict())
    except RuntimeError as error:
        refused = str(error)
    return {**checks.require(4), "refused": refused}


def count_colliding_names() -> dict[str, Any]:
    """Show the effect of local names: two ranks, one name, two experts. Global names identify each expert."""
    meshes = _meshes(ep=2)
    stock = build("none", "fp32", 4, meshes, harness.device(), bias=False)
    with torch.no_grad():
        for name, parameter in stock.named_parameters():
            parameter += dist.get_rank() if "mixture" in name else 0
    results = {}
    for bound in (False, True):
        if bound:
            import te_fsdp

            te_fsdp.set_device_mesh(stock, ep_mesh=meshes.ep)
        mine = {n: float(p.double().sum()) for n, p in stock.named_parameters() if "mixture" in n}
        everyone: list[Any] = [None, None]
        dist.all_gather_object(everyone, mine)
        clashes = [
            name for name in everyone[0] if name in everyone[1] and everyone[0][name] != everyone[1][name]
        ]
        results[bound] = (len({*everyone[0], *everyone[1]}), len(clashes))
    return {"stock": results[False], "bound": results[True]}


def torch_fully_shard(divide: bool, mesh: str) -> dict[str, Any]:
    """Compare gradients of the user's own calls of torch's fully_shard on a bound model with te_fsdp's."""
    import te_fsdp

    meshes = _meshes(ep=2, dp_shard=2)
    model = _bound(meshes, "meta")
    for unit in (model.mixture.up, model.mixture.down):
        chosen = meshes.expert_fsdp_with_size_one if mesh == "experts" else meshes.fsdp_with_size_one
        fully_shard(unit, mesh=chosen)
        if divide:
            unit.set_gradient_divide_factor(4.0)
            unit.set_force_sum_reduction_for_comms(harness.device_type() == "cpu")
    fully_shard(model, mesh=meshes.fsdp_with_size_one)
    other = build("none", "fp32", EXPERTS, meshes, "meta", bias=True)
    te_fsdp.fully_shard(other, meshes)
    checks = harness.Comparisons()
    for one in (model, other):
        te_fsdp.materialize(one, seed=1)
        x, target, chosen = batch("none", "fp32", EXPERTS, "uneven", 0)
        part = dist.get_rank()
        x, target, chosen = (t.chunk(4)[part] for t in (x.float(), target.float(), chosen))
        (one(x, chosen) - target).square().mean().backward()
    for (name, actual), (_, expected) in zip(model.named_parameters(), other.named_parameters(), strict=True):
        checks.bitwise_equal(name, actual.grad._local_tensor, expected.grad._local_tensor)
    return checks.require(4)


def errors_of_binding(mistake: str) -> None:
    """Return the errors that must be the same on all ranks, before anything has changed."""
    import transformer_engine.pytorch as te

    import te_fsdp

    meshes = _meshes(ep=2, dp_shard=2)
    kwargs = {"device": "meta"}
    count, width, ep, weight = 2, 32, meshes.ep, meshes.expert_weight
    if mistake == "width":
        width = 32 * (1 + meshes.ep.get_local_rank())
    elif mistake == "one fails":  # on one rank of ep alone
        kwargs["delay_wgrad_compute"] = meshes.ep.get_local_rank() == 1
    elif mistake == "weight mesh":
        weight = meshes.weight
    module = torch.nn.ModuleList([te.GroupedLinear(count, 32, width, **kwargs)])
    experts = {"unknown_module": ["encoder"]}.get(mistake)
    before = dict(module.named_parameters())
    try:
        te_fsdp.set_device_mesh(module, ep_mesh=ep, expert_weight_mesh=weight, experts=experts)
    finally:
        after = dict(module.named_parameters())
        assert before.keys() == after.keys() and all(before[n] is after[n] for n in before)
        assert type(module[0]) is te.GroupedLinear


def errors_of_fully_shard(mistake: str) -> None:
    """Return such errors of fully_shard, also with a rank that fails before the ranks of ep communicate."""
    import te_fsdp

    meshes = _meshes(ep=2, dp_shard=2)
    model = build("none", "fp32", EXPERTS, meshes, "meta", bias=True)
    if mistake == "unit":
        units = "first" if dist.get_rank() else "last.nothing"
        te_fsdp.fully_shard(model, meshes, units=units)
    elif mistake == "differs":  # among the ranks that have the same experts
        model.mixture.up.weight0.requires_grad_(dist.get_rank() != 2)
        te_fsdp.fully_shard(model, meshes)
    else:
        model = build("none", "fp32", 4, meshes, harness.device(), bias=True)
        with torch.no_grad():
            model.mixture.down.weight0 += dist.get_rank() == 3
        te_fsdp.fully_shard(model, meshes)


def current_scaling(quantized: bool) -> None:
    """Use a recipe that TE does not support for GroupedLinear under tp."""
    training(
        {"ep": 2, "tp": 2}, "current", "quantized" if quantized else "bf16", 4, bias=False, route="every"
    )


def memory(axes: dict[str, int]) -> dict[str, Any]:
    """Return bytes of expert weights and of their optimizer state on this rank, and of the unsharded model's."""
    import te_fsdp

    experts = 8
    meshes = _meshes(**axes)
    model = build("none", "fp32", experts, meshes, "meta", bias=False)
    te_fsdp.fully_shard(model, meshes)
    te_fsdp.materialize(model, seed=1)
    optimizer = torch.optim.Adam(model.parameters())
    dp = meshes.size("dp_shard")
    part = meshes.device_mesh.get_local_rank("dp_shard")
    x, target, chosen = (t.chunk(dp)[part] for t in batch("none", "fp32", experts, "every", 0))
    (model(x.float(), chosen) - target.float()).square().mean().backward()
    optimizer.step()
    weights = states = whole = 0
    for name, parameter, info in shards(model):
        if name.startswith("mixture."):
            local = parameter._local_tensor if isinstance(parameter, DTensor) else parameter
            weights += local.numel() * local.element_size()
            whole = 4 * torch.Size(info.original_shape).numel() * experts * 2  # up and down
            for value in optimizer.state[parameter].values():
                if value.ndim:
                    part_of = value._local_tensor if isinstance(value, DTensor) else value
                    states += part_of.numel() * part_of.element_size()
    rows = [row for row in te_fsdp.report(model) if row.layout == "grouped"]
    return {
        "weights": weights,
        "states": states,
        "whole": whole,
        "reported": sum(row.bytes for row in rows),
        "rows": [(row.name, row.shape, row.local_shape, row.placements) for row in rows],
    }


def gradients_in_fp16(axes: dict[str, int]) -> dict[str, Any]:
    """Compare fp16 gradients, which FSDP2 divides differently, with rounded fp32 gradients of the same model."""
    import te_fsdp

    meshes = _meshes(**axes)
    models = [build("none", weights, 4, meshes, "meta", bias=True) for weights in ("fp32", "fp16")]
    checks = harness.Comparisons()
    dp = meshes.size("dp_replicate") * meshes.size("dp_shard")
    for model in models:
        te_fsdp.fully_shard(model, meshes)
        te_fsdp.materialize(model, seed=1)
        with torch.no_grad():  # torch 2.11 draws other numbers for fp16
            for parameter, exact in zip(model.parameters(), models[0].parameters(), strict=True):
                parameter._local_tensor.copy_(exact._local_tensor)
        part = dist.get_rank()
        x, target, chosen = (t.chunk(dp)[part] for t in batch("none", "fp32", 4, "every", 0))
        dtype = next(model.parameters()).dtype
        (model(x.to(dtype), chosen).float() - target.float()).square().mean().backward()
    for (name, exact), (_, half) in zip(*(m.named_parameters() for m in models), strict=True):
        if name.startswith("mixture"):
            pair = half.grad._local_tensor.float(), exact.grad._local_tensor
            error = float((pair[0] - pair[1]).norm() / pair[1].norm())
            # 11 bits, four operations in a row; a wrong divisor is off by a factor of two or more.
            assert error < 0.02, (name, error)
            checks.close(name, *pair, 0.1, "fp16: a few operations of 11 bits each")
    return checks.require(4)


def sums_of_gradients(axes: dict[str, int], how: dict[str, Any]) -> dict[str, Any]:
    """Check that a step with sums of gradients over four ranks and a quarter of the learning rate is the same."""
    import te_fsdp

    meshes = _meshes(**axes)
    checks = harness.Comparisons()
    gradients, weights = [], []
    for average in (True, False):
        model = build("none", "fp32", EXPERTS, meshes, "meta", bias=True)
        te_fsdp.fully_shard(model, meshes, average_gradients=average, **how)
        te_fsdp.materialize(model, seed=1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5 if average else 0.125)
        te_fsdp.shard_optimizer(optimizer)
        x, target, chosen = (t.chunk(4)[dist.get_rank()] for t in batch("none", "fp32", EXPERTS, "every", 0))
        (model(x.float(), chosen) - target.float()).square().mean().backward()
        gradients.append({n: _local(p.grad).clone() for n, p in model.named_parameters()})
        optimizer.step()
        weights.append({n: _local(p).clone() for n, p in model.named_parameters()})
    for name, mean in gradients[0].items():
        if how.get("outer_strategy") != "optim":  # there .grad is a mean or a sum over dp_shard only
            checks.bitwise_equal(f"gradient {name}", gradients[1][name], 4 * mean)
        checks.bitwise_equal(name, weights[1][name], weights[0][name])
    return checks.require(4)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor.detach()
