"""Bodies about set_device_mesh: placements, names, attributes, object identity, gradients, lifetime."""

from __future__ import annotations

import copy
from typing import Any

import harness
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from parity.models import BATCH, FFN, HIDDEN, KINDS, SEQUENCE, Build
from parity.placements import PLACEMENTS, ROWS
from parity.runs import Findings


def _model(case: str, meshes: Any, device: Any = None) -> tuple[nn.Module, dict[str, Any]]:
    kind, options, expected = PLACEMENTS[case]
    device = harness.device() if device is None else device
    return KINDS[kind](Build(device, **meshes.te_kwargs()), **options).module, expected


def _meshes(axes: dict[str, int]) -> Any:
    import te_fsdp

    return te_fsdp.Meshes.build(**axes, device_type=harness.device_type())


def _sharded(placement: Any, axes: dict[str, int]) -> tuple[Any, ...]:
    """Return FSDP2's sharding of a tensor-parallel placement: it shards dim 0 of each tp rank's tensor."""
    tp = axes.get("tp", 1)
    placements: tuple[Any, ...] = (Shard(0),)
    if tp > 1:
        placements = (_StridedShard(0, split_factor=tp) if placement == ROWS else Shard(0), placement)
    return (Replicate(), *placements) if axes.get("dp_replicate", 1) > 1 else placements


def placements(case: str, axes: dict[str, int], device: str) -> int:
    """Return placements, names, classes and state_dict keys after set_device_mesh and after fully_shard."""
    import te_fsdp

    meshes = _meshes(axes)
    model, expected = _model(case, meshes, "meta" if device == "meta" else None)
    names = [name for name, _ in model.named_parameters()]
    keys, classes = list(model.state_dict()), [type(m) for m in model.modules()]
    shapes = {name: p.shape for name, p in model.named_parameters()}
    assert set(names) == set(expected)
    te_fsdp.set_device_mesh(model, tp_mesh=meshes.tp, weight_mesh=meshes.weight)
    for name, parameter in model.named_parameters():
        assert isinstance(parameter, nn.Parameter) and parameter.requires_grad, name
        if meshes.size("tp") == 1:
            assert not isinstance(parameter, DTensor), name
            continue
        assert parameter.placements == (expected[name],), (name, parameter.placements)
        assert parameter.device_mesh == meshes.tp and parameter._local_tensor.shape == shapes[name]
    _unchanged(model, names, keys, classes)
    te_fsdp.fully_shard(model, meshes)
    for name, parameter in model.named_parameters():
        assert parameter.placements == _sharded(expected[name], axes), (name, parameter.placements)
        assert parameter.device_mesh.ndim == len(parameter.placements)
    _unchanged(model, names, keys, classes)
    return len(names)


def _unchanged(model: nn.Module, names: list[str], keys: list[str], classes: list[type]) -> None:
    assert [name for name, _ in model.named_parameters()] == names
    assert list(model.state_dict()) == keys
    for module, cls in zip(model.modules(), classes, strict=True):
        assert isinstance(module, cls), (type(module), cls)


def keywords(name: str, args: tuple[Any, ...], options: dict[str, Any], expected: dict[str, str]) -> None:
    """Compare te_fsdp's class with the two keywords to TE's class and a call of set_device_mesh."""
    import transformer_engine.pytorch as te

    import te_fsdp

    meshes = _meshes({"dp_shard": 1, "tp": 2})
    torch.manual_seed(dist.get_rank())
    model = getattr(te_fsdp, name)(*args, tp_mesh=meshes.tp, weight_mesh=meshes.weight, **options)
    torch.manual_seed(dist.get_rank())
    own = {} if name.endswith("Norm") else meshes.te_kwargs()
    stock = getattr(te, name)(*args, **own, **options)
    plain = getattr(te_fsdp, name)(*args, **own, **options)
    assert isinstance(model, getattr(te, name)) and type(model) is getattr(te_fsdp, name)
    assert list(model.state_dict()) == list(stock.state_dict()) == list(plain.state_dict())
    assert not any(isinstance(p, DTensor) for p in plain.parameters())
    assert {n: repr(p.placements[0]) for n, p in model.named_parameters() if n in expected} == expected
    for parameter, original in zip(model.parameters(), stock.parameters(), strict=True):
        harness.assert_bitwise_equal("parameter", parameter._local_tensor, original)
    plain.set_device_mesh(tp_mesh=meshes.tp, weight_mesh=meshes.weight)  # the method
    for parameter, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert parameter.placements == other.placements and parameter.device_mesh == other.device_mesh


# --- attributes ------------------------------------------------------------------------------------------------------

MARKS = ("tensor_model_parallel", "partition_dim", "partition_stride", "sequence_parallel")


def attributes(axes: dict[str, int], wrap: str, device: str) -> int:
    """Check that Python attributes of parameters, TE's and the user's, outlive every replacement of a parameter."""
    import te_fsdp

    meshes = _meshes(axes)
    model, stock = (_marked_model(meshes, kind) for kind in (device, "real"))
    before = _attributes(model)  # on meta, TE has not set its marks yet
    everything = _attributes(stock)
    assert sum("sequence_parallel" in marks for marks in everything.values()) > 4
    assert sum("partition_dim" in marks for marks in everything.values()) > 4
    te_fsdp.set_device_mesh(model, tp_mesh=meshes.tp, weight_mesh=meshes.weight)
    _same_attributes("set_device_mesh", before, model)
    if wrap == "te_fsdp":
        te_fsdp.fully_shard(model, meshes)
    elif wrap == "torch":
        for unit in (*model.layers, model):
            fully_shard(unit, mesh=meshes.fsdp_with_size_one)
    else:
        model = copy.deepcopy(model)
    _same_attributes(wrap, before, model)
    before = everything
    if device == "meta":
        te_fsdp.materialize(model, seed=0)
        _same_attributes("materialize", before, model)
    torch.manual_seed(0)
    for module in model.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    _same_attributes("reset_parameters", before, model)
    ids = torch.arange(SEQUENCE * BATCH, device=harness.device()).view(-1, BATCH) % 15
    ids = ids.chunk(meshes.size("tp"))[meshes.device_mesh.get_local_rank("tp")]
    for _ in range(2):
        output = model(ids)
        _same_attributes("forward", before, model)
        output.sum().backward()
        _same_attributes("backward", before, model)
    saved = {
        name: value.clone() for name, value in model.state_dict().items() if isinstance(value, torch.Tensor)
    }
    for assign in (False, True):
        model.load_state_dict(saved, assign=assign)
        _same_attributes(f"load_state_dict(assign={assign})", before, model)
    return len(before)


def _marked_model(meshes: Any, device: str) -> nn.Module:
    """Return a language model on "meta" or the "real" device, each parameter with an attribute of the user's."""
    how = Build(
        "meta" if device == "meta" else harness.device(), **meshes.te_kwargs(), sequence_parallel=True
    )
    model = KINDS["language_model"](how, layers=1, qk_norm_type="RMSNorm").module
    for place, parameter in enumerate(model.parameters()):
        parameter.decay = place
    return model


def _attributes(model: nn.Module) -> dict[str, dict[str, Any]]:
    wanted = (*MARKS, "decay")
    return {n: {k: v for k, v in p.__dict__.items() if k in wanted} for n, p in model.named_parameters()}


def _same_attributes(when: str, before: dict[str, dict[str, Any]], model: nn.Module) -> None:
    after = _attributes(model)
    assert after == before, (
        when,
        {n: (before[n], after.get(n)) for n in before if before[n] != after.get(n)},
    )


# --- what the kernels read -------------------------------------------------------------------------------------------


def identity(axes: dict[str, int], wrap: str) -> int:
    """Check that inside TE's forward and backward a parameter is the local tensor that FSDP2 manages."""
    import transformer_engine.pytorch as te

    import te_fsdp

    seen: dict[str, torch.Tensor] = {}

    class Watched(te.LayerNormMLP):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            for name in self._parameters:
                assert getattr(self, name) is self._parameters[name]
                seen[name] = getattr(self, name)
            return super().forward(*args, **kwargs)

    meshes = _meshes(axes)
    build = Build(harness.device(), **meshes.te_kwargs())
    model = Watched(HIDDEN, FFN, set_parallel_mode=True, **build.kwargs)
    harness.shift_rows_by_rank(model, build.tp_group)
    te_fsdp.set_device_mesh(model, tp_mesh=meshes.tp, weight_mesh=meshes.weight)
    assert isinstance(model, Watched)
    if wrap != "tp":
        fully_shard(model, mesh=meshes.fsdp_with_size_one, reshard_after_forward=wrap == "reshard")
    x = torch.randn(SEQUENCE, BATCH, HIDDEN, device=harness.device())
    for _ in range(2):
        output = model(x)
        managed = _managed(model)
        assert seen.keys() == managed.keys() == model._parameters.keys()
        for name, tensor in seen.items():
            assert tensor is managed[name], name
            assert not isinstance(tensor, DTensor)
        output.sum().backward()
        for name, parameter in model.named_parameters():
            assert (
                isinstance(parameter.grad, DTensor) and parameter.grad.placements == parameter.placements
            ), name
            assert parameter.grad.device_mesh == parameter.device_mesh
    return len(seen)


def _managed(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return local tensors of the unsharded parameters that FSDP2 keeps, or of the DTensors without FSDP2."""
    from te_fsdp.upstream import fsdp2_units

    if not fsdp2_units.is_fsdp_module(model):
        return {name: p._local_tensor for name, p in model._parameters.items()}
    (group,) = fsdp2_units.fsdp_parameter_groups(model)
    return {p._module_info.param_name: p._unsharded_param._local_tensor for p in group.fsdp_params}


def frozen(axes: dict[str, int]) -> None:
    """Check that frozen parameters stay frozen and get no gradient; the others get the one they get otherwise."""
    import te_fsdp

    meshes, gradients = _meshes(axes), []
    ice = ("fc1_weight", "layer_norm_bias")
    for freeze in (False, True):
        torch.manual_seed(0)
        model = KINDS["layer_norm_mlp"](Build(harness.device(), **meshes.te_kwargs())).module
        for name in ice if freeze else ():
            model.get_parameter(name).requires_grad_(False)
        te_fsdp.fully_shard(model, meshes)
        torch.manual_seed(1)
        model(torch.randn(SEQUENCE, BATCH, HIDDEN, device=harness.device())).square().sum().backward()
        for name, parameter in model.named_parameters():
            assert parameter.requires_grad == (not freeze or name not in ice), name
        gradients.append({name: p.grad for name, p in model.named_parameters()})
    for name, gradient in gradients[1].items():
        if name in ice:
            assert gradient is None, name
        else:
            harness.assert_bitwise_equal(name, gradient, gradients[0][name])


def without_gradients(case: str, axes: dict[str, int], wrap: str) -> None:
    """Check that eval and no_grad forwards return the training forward's bits, and leave nothing behind."""
    import te_fsdp

    meshes = _meshes(axes)
    kind, options, _ = PLACEMENTS[case]
    torch.manual_seed(0)
    subject = KINDS[kind](Build(harness.device(), **meshes.te_kwargs()), **options)
    if wrap == "tp":
        te_fsdp.set_device_mesh(subject.module, tp_mesh=meshes.tp)
    else:
        te_fsdp.fully_shard(subject.module, meshes)
    inputs = {name: torch.randn(item.shape, device=harness.device()) for name, item in subject.inputs.items()}
    trained = subject.call(subject.module, **inputs)
    subject.module.eval()
    with torch.no_grad():
        evaluated = subject.call(subject.module, **inputs)
    assert not evaluated.requires_grad
    harness.assert_bitwise_equal("eval", evaluated, trained)
    subject.module.train()
    trained.sum().backward()
    harness.assert_bitwise_equal("after backward", subject.call(subject.module, **inputs), trained)


def recomputed(axes: dict[str, int], wrap: str, reentrant: bool) -> None:
    """Compare gradients of te.checkpoint, which runs forward twice, with those without it.

    Not to the bit, nor with stock TE in one process: residual gradients are added in a different order, and on GPUs
    the activation's fused kernels differ. What stock TE itself differs by is measured here, and four times that, or
    2e-6 (a few roundings of 6e-8 of terms a few times larger than their sum), is allowed.
    """
    import te_fsdp

    meshes = _meshes(axes)

    def built(build: Build) -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(
            *(KINDS["transformer_layer"](build, qk_norm_type="RMSNorm").module for _ in range(2))
        )

    def sharded() -> nn.Module:
        model = built(Build(harness.device(), **meshes.te_kwargs(), sequence_parallel=True))
        if wrap == "tp":
            te_fsdp.set_device_mesh(model, tp_mesh=meshes.tp)
        else:
            te_fsdp.fully_shard(model, meshes)
        return model

    tp = meshes.size("tp")
    stock = [_gradients(built(Build(harness.device())), 1, None, once, reentrant) for once in (False, True)]
    own = max(_relative(stock[1][name], stock[0][name]) for name in stock[0])
    group = meshes.te_kwargs()["tp_group"]
    actual = [_gradients(sharded(), tp, group, once, reentrant) for once in (False, True)]
    checks, allowed = Findings(), max(2e-6, 4 * own)
    for name, gradient in actual[1].items():
        why = f"four times stock TE's own {own:.1e}, or a few roundings"
        checks.attempt(checks.close, name, gradient, actual[0][name], allowed, why)
    checks.settle(len(actual[0]) // 2)


def _gradients(
    model: nn.Module, tp: int, tp_group: Any, recompute: bool, reentrant: bool
) -> dict[str, torch.Tensor]:
    """Return local gradients of the input and of every parameter after one backward."""
    torch.manual_seed(1 + (tp_group.rank() if tp > 1 else 0))  # each its part of the tokens
    x = torch.randn(SEQUENCE // tp, BATCH, HIDDEN, device=harness.device(), requires_grad=True)
    run = _with_checkpoints(model, tp_group, reentrant) if recompute else model
    run(x).square().sum().backward()
    grads = {"x": x.grad, **{name: p.grad for name, p in model.named_parameters()}}
    return {name: getattr(g, "_local_tensor", g) for name, g in grads.items()}


def _relative(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the larger of the relative errors by norm and of the worst element, as `Comparisons.close` takes them."""
    difference = (actual - expected).double()
    by_norm = difference.norm() / expected.double().norm().clamp(min=1e-30)
    worst = difference.abs().max() / expected.abs().max().clamp(min=1e-30)
    return float(max(by_norm, worst))


def _with_checkpoints(model: nn.Module, tp_group: Any, reentrant: bool) -> Any:
    import transformer_engine.pytorch as te

    def run(x: torch.Tensor) -> torch.Tensor:
        for layer in model:
            x = te.checkpoint(layer, x, tp_group=tp_group, use_reentrant=reentrant)
        return x

    return run
