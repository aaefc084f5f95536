"""Bodies: NVFP4 weights with one scale per 1 x 16 block (rows) or per 16 x 16 block (squares)."""

from __future__ import annotations

import contextlib
from typing import Any
from unittest import mock

import harness
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

from quantization import bodies
from quantization.models import build, recipe_of
from quantization.two_dim import full_values, wide_range

HIDDEN = 256


def loads(source: str, target: str, way: str, directory: str) -> dict[str, Any]:
    """Load weights of one kind into the other, or into the same.

    Squares are sharded over both ranks, rows are replicated. ``way`` is ``"checkpoint"``, ``"older"`` (a checkpoint of
    te_fsdp that has one name for both kinds) or ``"dcp"``.

    Returns:
        Whether forward and backward equal those of one process, which quantizes the values of the source, or has
        its bytes ("equal"); whether they differ from those before the load ("control"), and for different kinds from
        those of the source ("quantized"); and what ``load`` reports as converted.
    """
    import te_fsdp
    from te_fsdp.checkpoint import model_state

    saved, loaded = _model(source, 1), _model(target, 2)
    values = {name: _values(parameter) for name, parameter in saved.named_parameters()}
    stock = model_state.describe_format
    older = mock.patch.object(
        model_state, "describe_format", lambda *args: str(stock(*args)).replace("nvfp4-1d", "nvfp4")
    )
    before, converted = _run(loaded, target), {}
    if way == "dcp":
        dcp.save(_weights(saved), checkpoint_id=directory)
        dcp.load(_weights(loaded), checkpoint_id=directory)
    else:
        with older if way == "older" else contextlib.nullcontext():
            te_fsdp.checkpoint.save(directory, saved)
        converted = te_fsdp.checkpoint.load(directory, loaded).converted
    if source == target:
        expected = _run(saved, target)
    else:
        with _init(target):
            reference = build("linear", HIDDEN, harness.device(), bias=False, init_method=wide_range)
        with torch.no_grad():
            for name, parameter in reference.named_parameters():
                parameter.copy_(values[name])
        expected = _run(reference, target)
    result = _run(loaded, target)
    return {
        "equal": all(map(torch.equal, result, expected)),
        "control": not torch.equal(before[0], result[0]),
        "quantized": source == target or not torch.equal(_run(saved, source)[0], result[0]),
        "converted": sorted(set(converted.values())),
    }


def errors_of_sharding() -> list[str]:
    """Shard rows with te_fsdp's and with torch's ``fully_shard``; return the errors."""
    from torch.distributed.fsdp import fully_shard

    import te_fsdp

    meshes = te_fsdp.Meshes.build(dp_shard=-1, device_type=harness.device_type())

    def by_torch(model: nn.Module) -> None:
        te_fsdp.set_device_mesh(model, None, meshes.weight)
        fully_shard(model, mesh=meshes.fsdp or meshes.device_mesh["dp_shard"])
        torch.manual_seed(1)
        for module in model.modules():
            if hasattr(module, "reset_parameters"):
                module.reset_parameters()

    def by_te_fsdp(model: nn.Module) -> None:
        te_fsdp.fully_shard(model, meshes)
        te_fsdp.materialize(model, seed=1)

    results = []
    for shard in (by_te_fsdp, by_torch):
        with _init("nvfp4_rows"):
            model = build("linear", HIDDEN, "meta", bias=False)
        try:
            shard(model)
            _run(model, "nvfp4_rows")
        except te_fsdp.PrecisionError as error:
            results.append(str(error))
    return results


def same_rowwise_data() -> dict[str, bool]:
    """Return for each buffer whether it is equal for a weight and for its own dequantized values."""
    import transformer_engine.pytorch as te

    with _init("nvfp4_rows"):
        weight = te.Linear(HIDDEN, HIDDEN, bias=False, device=harness.device(), init_method=wide_range).weight
    one = weight.detach()
    other = one._get_quantizer()(one.dequantize(dtype=torch.float32))
    results = {}
    for name in (
        "rowwise_data",
        "rowwise_scale_inv",
        "amax_rowwise",
        "columnwise_data",
        "columnwise_scale_inv",
    ):
        a, b = (tensor.get_metadata()[name].view(torch.uint8) for tensor in (one, other))
        results[name] = torch.equal(a, b)
    return results


def _init(recipe: str) -> Any:
    import transformer_engine.pytorch as te

    return te.quantized_model_init(recipe=recipe_of(recipe))


def _model(recipe: str, seed: int) -> nn.Module:
    import te_fsdp

    meshes = te_fsdp.Meshes.build(dp_shard=2, device_type=harness.device_type())
    with _init(recipe):
        model = build("linear", HIDDEN, "meta", bias=False, init_method=wide_range)
    strategy = "no_shard" if recipe == "nvfp4_rows" else "optim_grads_params"
    te_fsdp.fully_shard(model, meshes, units=[], strategy=strategy)
    return te_fsdp.materialize(model, seed=seed)


def _values(parameter: torch.Tensor) -> torch.Tensor:
    """Return the values in FP32. Those of NVFP4 are not exact in BF16."""
    return (
        full_values(parameter)
        if hasattr(parameter, "to_local")
        else parameter.dequantize(dtype=torch.float32)
    )


def _weights(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor for name, tensor in model.state_dict().items() if "extra" not in name}


def _run(model: nn.Module, recipe: str) -> list[torch.Tensor]:
    import transformer_engine.pytorch as te

    x = bodies.batch_of(HIDDEN)[0].detach().requires_grad_()
    with te.autocast(enabled=True, recipe=recipe_of(recipe)):
        output = model(x)
    output.float().square().mean().backward()
    return [output.detach(), x.grad]
