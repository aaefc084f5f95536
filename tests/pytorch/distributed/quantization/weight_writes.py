"""Bodies: writes to quantized weights, which use the scale of the unsharded weight."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Iterator
from typing import Any

import harness
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from quantization.bodies import SEED, Stepper, batch_of, quantized_weights
from quantization.weight_bytes import (
    HIDDEN,
    compare,
    compare_unsharded,
    meshes_of,
    named_weights,
    recipe_of,
    sharded,
    stock,
)

#: Ways to write new values into the weights of a model: ``way(model, {name: DTensor})``.
WAYS = (
    "copy_",
    "data",
    "detach",
    "quantize_",
    "to_local",
    "load_state_dict",
    "set_model_state_dict",
    "whole",
    "data =",
)


def writes(recipe: str, dp_replicate: int, tp: int) -> int:
    """Write values whose largest element is on one rank, in every supported way, and compare with one process.

    Returns:
        Number of buffers compared.
    """
    import te_fsdp

    meshes = meshes_of(dp_replicate, tp)
    model = sharded("linear", recipe, meshes)
    te_fsdp.materialize(model, seed=SEED)
    oracle = stock("linear", recipe)
    compared = 0
    for number, way in enumerate(WAYS):
        values = new_values(oracle, number)
        write(way, model, values)
        with torch.no_grad():
            for name, _, _, parameter in named_weights(model):
                weight, value = oracle.get_parameter(name), values[name]
                if way == "whole" and recipe == "delayed":
                    # Loaded values have their own scale, E4M3's largest number by theirs.
                    scale = parameter._local_tensor._quantizer.scale
                    torch.testing.assert_close(scale, 448 / value.float().abs().max(), rtol=1e-6, atol=0)
                    weight._quantizer.scale.copy_(scale)
                weight.quantize_(value)
        compared += compare(model, oracle, way)
        compare_unsharded(model, oracle)  # from the second one on FSDP2 reuses the gathered tensor
    return compared


def new_values(oracle: nn.Module, seed: int) -> dict[str, torch.Tensor]:
    """Return other full values of each quantized weight; the largest one moves through the matrix."""
    generator = torch.Generator().manual_seed(seed)
    values = {}
    for name, _, _, parameter in named_weights(oracle):
        value = torch.randn(tuple(parameter.shape), generator=generator)
        value[-1 - 17 * seed, 19 * seed] = 7.0 + seed
        values[name] = value.bfloat16().to(harness.device())
    return values


@torch.no_grad()
def write(way: str, model: nn.Module, values: dict[str, torch.Tensor]) -> None:
    """Write full values into a sharded model by one of :data:`WAYS`."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

    pieces = {n: local_shard(m, own, p, values[n]) for n, m, own, p in named_weights(model)}
    if way == "load_state_dict":
        model.load_state_dict(pieces, strict=False)
    elif way == "set_model_state_dict":
        set_model_state_dict(model, pieces, options=StateDictOptions(strict=False))
    elif way == "whole":
        options = StateDictOptions(full_state_dict=True, strict=False)
        set_model_state_dict(model, dict(values), options=options)
    for name, module, _, parameter in named_weights(model):
        if way == "data =":
            assign_data(module, parameter._local_tensor, pieces[name].to_local())
        elif way == "copy_":
            parameter.copy_(pieces[name])
        elif way == "data":
            parameter.data.copy_(pieces[name])
        elif way == "detach":
            parameter.detach().copy_(pieces[name])
        elif way == "quantize_":
            parameter._local_tensor.quantize_(pieces[name].to_local())
        elif way == "to_local":
            parameter.detach().to_local().copy_(pieces[name].to_local())


def assign_data(module: nn.Module, local: Any, value: torch.Tensor) -> None:
    """Give a float8 weight new bytes and a new scale tensor, as TE's ``data`` setter does; quantize into others."""
    from te_fsdp.quantized.shards import quantize_shard
    from te_fsdp.records import binding_of

    fresh = quantize_shard(value, local._quantizer.copy(), binding_of(module))
    for part, new in zip(parts_of(local), parts_of(fresh), strict=True):
        if type(part).__name__ == "Float8Tensor":
            part.data = new
        else:
            part.quantize_(value)


def parts_of(local: Any) -> list[Any]:
    """Return a quantized tensor, or the two that a hybrid one consists of."""
    hybrid = type(local).__name__ == "HybridQuantizedTensor"
    return [local._rowwise_storage, local._columnwise_storage] if hybrid else [local]


def local_shard(module: nn.Module, own: str, parameter: torch.Tensor, value: torch.Tensor) -> DTensor:
    """Return this rank's part of a full value, placed as the parameter."""
    from te_fsdp.shard_info import shard_info

    info = shard_info(module, own, parameter)
    local = torch.empty(info.local_shape, dtype=value.dtype, device=value.device)
    for box in info.boxes:
        local[box.local_slices()] = value[box.original_slices()]
    mesh, placements = parameter.device_mesh, parameter.placements
    return DTensor.from_local(
        local, mesh, placements, run_check=False, shape=parameter.shape, stride=parameter.stride()
    )


def copies(recipe: str, dp_replicate: int, tp: int) -> dict[str, Any]:
    """Check that copies of the weights can be made after a step by every means, and lead to no process group."""
    from torch.distributed.checkpoint.staging import BlockingAsyncStager

    import te_fsdp

    meshes = meshes_of(dp_replicate, tp)
    model = sharded("linear", recipe, meshes)
    te_fsdp.materialize(model, seed=SEED)
    step = Stepper(model, recipe_of(recipe), meshes, False)
    step(*batch_of(HIDDEN))
    ranks = sorted(meshes.weight.mesh.tolist())
    marks, reachable = [], 0
    for _, _, parameter in quantized_weights(model):
        local = parameter._local_tensor
        forms = [local, local.detach(), local.clone(), nn.Parameter(local.detach()), copy.deepcopy(local)]
        forms += [parameter.detach()._local_tensor, parameter.data._local_tensor]
        marks += [group_ranks(form) == ranks for form in forms]
        reachable += sum(1 for form in forms for _ in process_groups(form))
        same = pickle.loads(pickle.dumps(local))
        assert torch.equal(same.dequantize(), local.dequantize()) and not list(process_groups(same))
        stream = io.BytesIO()
        torch.save(local, stream)
        stream.seek(0)
        assert torch.equal(torch.load(stream, weights_only=True).dequantize(), local.dequantize())
    state = {key: value for key, value in model.state_dict().items() if isinstance(value, DTensor)}
    staged = BlockingAsyncStager().stage(copy.deepcopy(state))
    assert staged.keys() == state.keys()
    twins = [copy.deepcopy(p)._local_tensor for _, _, p in quantized_weights(model)]
    return {"marks": marks, "reachable": reachable, "twins": [group_ranks(twin) == ranks for twin in twins]}


def group_ranks(tensor: torch.Tensor) -> list[int] | None:
    """Return ranks over which TE would reduce the amax of a write into this tensor."""
    import torch.distributed as dist

    from te_fsdp.quantized.amax import amax_group_name

    name = amax_group_name(tensor)
    (part,) = (part for part in parts_of(tensor) if hasattr(part, "_scale_inv") or part is tensor)
    group = getattr(part, "amax_reduction_group", None)
    if name is None or group is None:
        return None
    assert group.group_name == name
    return sorted(dist.get_process_group_ranks(group))


def process_groups(root: Any) -> Iterator[Any]:
    """Yield process groups that a walk through the attributes of an object finds, except those of meshes."""
    from torch.distributed import ProcessGroup

    seen, left = set(), [root]
    while left:
        item = left.pop()
        if id(item) in seen or isinstance(item, (DeviceMesh, type)):
            continue
        seen.add(id(item))
        if isinstance(item, ProcessGroup):
            yield item
        elif isinstance(item, dict):
            left += item.values()
        elif isinstance(item, (list, tuple)):
            left += item
        elif hasattr(item, "__dict__"):
            left.append(item.__dict__)


def wrong_mesh(which: str) -> None:
    """Call FSDP2 directly, after ``set_device_mesh`` with a weight mesh other than that of the weights."""
    from torch.distributed.fsdp import fully_shard

    import te_fsdp

    meshes = meshes_of(*{"replicas": (2, 1), "one rank": (1, 1)}.get(which, (1, 2)))
    mesh = meshes.device_mesh
    weight = {
        "no tp": lambda: mesh["dp_shard"],
        "no shards": lambda: mesh["tp"],
        "replicas": lambda: mesh["dp_replicate", "dp_shard"]._flatten("both"),
        "one rank": lambda: incomplete_mesh_on_rank_3(mesh["dp_shard"]),
    }[which]()
    model = stock("linear", "current", "meta", **meshes.te_kwargs())
    te_fsdp.set_device_mesh(model, tp_mesh=meshes.tp, weight_mesh=weight)
    fully_shard(model, mesh=meshes.fsdp)
    te_fsdp.materialize(model, seed=SEED)


def incomplete_mesh_on_rank_3(right: DeviceMesh) -> DeviceMesh:
    """Pass the right mesh, but on rank 3 one that lacks ranks."""
    import torch.distributed as dist

    halves = DeviceMesh(harness.device_type(), torch.arange(4).view(2, 2), mesh_dim_names=("a", "b"))
    return halves["b"] if dist.get_rank() == 3 else right


def user_fully_shard(recipe: str, dp_replicate: int) -> int:
    """Call FSDP2 directly without tp or weight mesh: its shard axis is used. Return the number of buffers."""
    from torch.distributed.fsdp import fully_shard

    import te_fsdp

    meshes = meshes_of(dp_replicate, 1)
    model = stock("mlp_swiglu", recipe, "meta")
    te_fsdp.set_device_mesh(model)
    fully_shard(model, mesh=meshes.fsdp)
    torch.manual_seed(SEED)
    for module in model.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    compared = compare(model, stock("mlp_swiglu", recipe), "init")
    assert {str(group_ranks(p._local_tensor)) for _, _, p in quantized_weights(model)} == {
        str(sorted(meshes.weight.mesh.tolist()))
    }
    return compared
