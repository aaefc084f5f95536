"""Changes between two steps, which steady-state steps detect without repeating the checks."""

from __future__ import annotations

import contextlib
from typing import Any

import harness
import torch
import torch.distributed as dist

import te_fsdp
from te_fsdp.features import main_params
from te_fsdp.upstream import torch_dtensor as _torch
from te_fsdp.upstream.torch_autograd import graph_nodes

HIDDEN = 32


def _model(axes: dict[str, int], layers: int = 2, **options: Any) -> tuple[torch.nn.Module, Any]:
    import transformer_engine.pytorch as te

    meshes = te_fsdp.Meshes.build(**axes)
    tp = (
        {**meshes.te_kwargs(), "parallel_mode": "column", "sequence_parallel": True}
        if axes.get("tp", 1) > 1
        else {}
    )
    common = {"params_dtype": torch.bfloat16, "device": "meta", "normalization": "LayerNorm", "bias": False}
    model = torch.nn.Sequential(*[te.LayerNormLinear(HIDDEN, HIDDEN, **common, **tp) for _ in range(layers)])
    te_fsdp.fully_shard(model, meshes, units=[te.LayerNormLinear], check_inputs=False, **options)
    te_fsdp.materialize(model, seed=0)
    return model, meshes


def _step(model: torch.nn.Module, optimizer: Any, seed: int = 0) -> torch.Tensor:
    torch.manual_seed(seed)
    x = torch.randn(8, HIDDEN, dtype=torch.bfloat16, device=harness.device())
    loss = sum(layer(x).float().square().mean() for layer in model)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def attributes_after_changes(transport: str) -> dict[str, Any]:
    """Set an attribute of a shard, and freeze it, after some steps; return both."""
    from transformer_engine.pytorch.optimizers import FusedAdam

    model, _ = _model({"dp_shard": 2}, transport=transport)
    optimizer = FusedAdam(model.parameters(), lr=1e-2, master_weights=True)
    for _ in range(3):
        _step(model, optimizer)
    layer, results = model[0], {}
    shard = layer.weight
    shard.of_the_shard = 1

    def look(module: Any, args: Any) -> None:
        results["gathered"] = module.weight is not shard
        results["shard's on gathered"] = getattr(module.weight, "of_the_shard", None)

    handle = layer.register_forward_pre_hook(look)
    _step(model, optimizer)
    handle.remove()
    results["same shard"] = layer.weight is shard
    layer.weight.requires_grad_(False)
    before = _torch.local_of(layer.weight).clone(), _torch.local_of(model[1].weight).clone()
    _step(model, optimizer)
    results["frozen stays"] = torch.equal(before[0], _torch.local_of(layer.weight))
    results["others go on"] = not torch.equal(before[1], _torch.local_of(model[1].weight))
    layer.weight.requires_grad_(True)
    _step(model, optimizer)
    results["thawed goes on"] = not torch.equal(before[0], _torch.local_of(layer.weight))
    return results


def unsharded_bytes(keeps: bool) -> list[int]:
    """Return bytes of the memory of the first layer's gathered parameters after a later step."""
    model, _ = _model({"dp_shard": 2})
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    for _ in range(3):
        _step(model, optimizer)
    model.set_keep_unsharded_storage(keeps)
    gathered = list[torch.Tensor]()
    model[0].register_forward_pre_hook(lambda module, _: gathered.extend(module.parameters()))
    _step(model, optimizer)
    return [_torch.local_of(parameter).untyped_storage().nbytes() for parameter in gathered]


def count_tp_reductions() -> list[int]:
    """Count all-reduces of tp in a later backward; return how many gradients of norms they sum."""
    model, meshes = _model({"dp_shard": 1, "tp": 2})
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    for _ in range(3):
        _step(model, optimizer, seed=dist.get_rank())
    calls: list[int] = []
    stock = dist.all_reduce

    def all_reduce(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        calls.append(tensor.numel())
        return stock(tensor, *args, **kwargs)

    dist.all_reduce = all_reduce
    try:
        _step(model, optimizer, seed=dist.get_rank())
    finally:
        dist.all_reduce = stock
    assert meshes.tp is not None
    return calls


def microbatches_over_tp(together: bool) -> list[torch.Tensor]:
    """Return gradients of norms after microbatches without reduction and one with; summed together, or by DTensor."""
    from te_fsdp import tp_gradients

    stock = tp_gradients._sum
    if not together:
        tp_gradients._sum = lambda group: None
    try:
        model, _ = _model({"dp_shard": 1, "tp": 2})
    finally:
        tp_gradients._sum = stock
    torch.manual_seed(dist.get_rank())
    for last in (False, False, True):
        with te_fsdp.microbatch(model, is_last=last):
            x = torch.randn(8, HIDDEN, dtype=torch.bfloat16, device=harness.device())
            sum(layer(x).float().square().mean() for layer in model).backward()
    return [_torch.local_of(p.grad).cpu() for name, p in model.named_parameters() if "layer_norm" in name]


def steps_of_fused_adam(axes: dict[str, int], is_fp8: bool, local: bool, state: str) -> dict[str, Any]:
    """Return weights, states and losses of five steps, with local tensors in the groups or with DTensors."""
    import transformer_engine.pytorch as te
    from transformer_engine.common.recipe import Float8CurrentScaling
    from transformer_engine.pytorch.optimizers import FusedAdam

    outer = {"outer_strategy": "optim"} if axes.get("dp_replicate", 1) > 1 else {}
    stock = main_params.install_local_tensors
    if not local:
        main_params.install_local_tensors = lambda optimizer: []
    try:
        with te.quantized_model_init(enabled=is_fp8, recipe=Float8CurrentScaling()):
            model, _ = _model(axes, **outer)
        dtypes = {"exp_avg_dtype": getattr(torch, state), "exp_avg_sq_dtype": getattr(torch, state)}
        optimizer = FusedAdam(model.parameters(), lr=1e-2, master_weights=True, **dtypes)
        te_fsdp.main_weights(model, optimizer)
        if outer:
            te_fsdp.shard_optimizer(optimizer)
        losses = [_step(model, optimizer, seed=n).cpu() for n in range(5)]
    finally:
        main_params.install_local_tensors = stock
    params = [p for group in optimizer.param_groups for p in group["params"]]
    states = {
        f"{number} {name}": _torch.local_of(value).float().cpu()
        for number, p in enumerate(params)
        for name, value in optimizer.state[p].items()
    }
    weights = [_torch.local_of(p) for p in params]
    return {
        "losses": losses,
        "states": states,
        "weights": [
            (w.dequantize() if is_fp8 and hasattr(w, "dequantize") else w).float().cpu() for w in weights
        ],
        "held": all(p is q for p, q in zip(params, model.parameters(), strict=True)),
        "keys": len(optimizer.state) == len(params),
        "clean": all(_torch.local_of(p).grad is None for p in params),
    }


def state_after_failed_step() -> dict[str, Any]:
    """Return the user's view after a step that raised with local tensors in the groups, and run the next steps."""
    from transformer_engine.pytorch.optimizers import FusedAdam

    results: dict[str, Any] = {}
    weights = []
    for fails in (False, True):
        model, _ = _model({"dp_shard": 2})
        optimizer = FusedAdam(model.parameters(), lr=1e-2, master_weights=True)
        for n in range(2):
            _step(model, optimizer, seed=n)
        if fails:
            stock = optimizer.multi_tensor_adam

            def fail(*_: Any) -> None:
                raise RuntimeError("no")

            optimizer.multi_tensor_adam = fail
            with contextlib.suppress(RuntimeError):
                _step(model, optimizer, seed=9)
            optimizer.multi_tensor_adam = stock
            for group in optimizer.param_groups:
                group["step"] -= 1
            held = optimizer.state_dict()["state"]
            results["saved"] = len(held) == len(list(model.parameters()))
            model.zero_grad()
        for n in range(2, 4):
            _step(model, optimizer, seed=n)
        own = [p for group in optimizer.param_groups for p in group["params"]]
        results["held"] = all(p is q for p, q in zip(own, model.parameters(), strict=True))
        weights.append([_torch.local_of(p).clone() for p in model.parameters()])
    results["same"] = all(map(torch.equal, *weights))
    return results


class NestedInputs(torch.nn.Module):
    """A layer whose inputs are flat, with lists of numbers and keywords, or nested in a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: Any, sizes: list[int] | None = None, *, scale: torch.Tensor | None = None) -> Any:
        value = x["value"] if isinstance(x, dict) else x
        y = self.layer(value)
        y = y if sizes is None else y.split(sizes)[0]
        return y if scale is None else y * scale


def gradients_by_inputs(form: str) -> tuple[list[torch.Tensor], list[torch.Tensor], bool]:
    """Return gradients of weights and inputs of a unit and of the same layer alone, and a condition.

    It is whether FSDP2's ranges are in a profile, and the unit reduces in the backward of its inputs.
    """
    meshes = te_fsdp.Meshes.build(dp_shard=2)
    torch.manual_seed(0)
    alone = torch.nn.Sequential(NestedInputs()).to(harness.device())
    torch.manual_seed(0)
    model = torch.nn.Sequential(NestedInputs()).to(harness.device())
    te_fsdp.fully_shard(model, meshes, units=["0"], check_inputs=False)
    results, nodes = [], set[str]()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        for unit in (model[0], alone[0]):
            torch.manual_seed(1)
            x = torch.randn(8, HIDDEN, device=harness.device(), requires_grad=True)
            scale = torch.randn(HIDDEN, device=harness.device(), requires_grad=True)
            if form == "flat":
                output = unit(x, [4, 4], scale=scale)
            else:
                output = unit({"value": x}, scale=scale)
            nodes |= {type(node).__name__ for node in graph_nodes(output.grad_fn)}
            output.square().sum().backward()
            weights = [p.grad for p in unit.parameters()]
            results.append(
                [*(g.full_tensor() if hasattr(g, "full_tensor") else g for g in weights), x.grad, scale.grad]
            )
    names = {event.key.partition(" (")[0] for event in profile.key_averages()}
    is_watched = not nodes.isdisjoint({"_PostBackwardBackward", "RegisterPostBackwardFunctionBackward"})
    has_ranges = {"FSDP::pre_forward", "FSDP::post_backward_reduce"} <= names
    return results[0], results[1], is_watched and has_ranges
