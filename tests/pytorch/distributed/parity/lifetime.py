"""Bodies about a bound model: deletion, copies, no tensor parallelism, binding of submodules."""

from __future__ import annotations

import copy
import gc
import weakref

import harness
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from parity.binding import _meshes
from parity.models import BATCH, GROUPS, HEADS, HIDDEN, KINDS, SEQUENCE, Build
from parity.runs import Findings


def check_freed(axes: dict[str, int], wrap: str) -> int:
    """Check that nothing of a deleted model survives forward, backward and a step: no cycle that gc cannot see."""
    import te_fsdp

    meshes = _meshes(axes)
    build = Build(harness.device(), **meshes.te_kwargs(), sequence_parallel=True)
    model = nn.Sequential(
        KINDS["transformer_layer"](build, qk_norm_type="LayerNorm", softmax_type="learnable").module,
        KINDS["layer_norm_mlp"](build, checkpoint=True).module,
    )
    if wrap == "tp":
        te_fsdp.set_device_mesh(model, tp_mesh=meshes.tp)
    else:
        te_fsdp.fully_shard(model, meshes)
    optimizer = torch.optim.AdamW(model.parameters())
    torch.manual_seed(meshes.device_mesh.get_local_rank("tp"))  # each its part of the tokens
    x = torch.randn(SEQUENCE // meshes.size("tp"), BATCH, HIDDEN, device=harness.device())
    for _ in range(2):
        model(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    alive = [weakref.ref(module) for module in model.modules()]
    for parameter in model.parameters():
        alive += [weakref.ref(parameter), weakref.ref(parameter._local_tensor)]
    output = model(x)  # a graph that is never run backward
    del model, optimizer, parameter, output
    gc.collect()
    left = [ref() for ref in alive if ref() is not None]
    assert not left, f"{len(left)} of {len(alive)} objects live on: {[type(o).__name__ for o in left][:5]}"
    return len(alive)


def check_deepcopy() -> None:
    """Check that a deep copy of a bound model computes the same and shares no parameter."""
    import te_fsdp

    meshes = _meshes({"dp_shard": 1, "tp": 2})
    model = KINDS["transformer_layer"](Build(harness.device(), **meshes.te_kwargs()), groups=GROUPS).module
    te_fsdp.set_device_mesh(model, tp_mesh=meshes.tp, weight_mesh=meshes.weight)
    twin = copy.deepcopy(model)
    x = torch.randn(SEQUENCE, BATCH, HIDDEN, device=harness.device())
    expected = model(x)
    harness.assert_bitwise_equal("copy", twin(x), expected)
    originals = dict(model.named_parameters())
    for name, parameter in twin.named_parameters():
        assert parameter.placements == originals[name].placements and parameter is not originals[name]
        assert parameter._local_tensor.data_ptr() != originals[name]._local_tensor.data_ptr(), name
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    harness.assert_bitwise_equal("copy", twin(x), expected)


def no_tensor_parallelism(tp_mesh: str) -> None:
    """Compare a model without a tp mesh, or with one of size 1, bit for bit with stock TE.

    But for gradients on GPUs, where kernels sum over tokens in an order that varies from run to run.

    Args:
        tp_mesh: "none", or "one" for a mesh of one rank.
    """
    import te_fsdp

    mesh = init_device_mesh(harness.device_type(), (2, 1), mesh_dim_names=("dp", "tp"))
    build = Build(harness.device())
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(KINDS["transformer_layer"](build, groups=GROUPS).module)
    model, stock = models
    which = {"tp_mesh": mesh["tp"] if tp_mesh == "one" else None, "weight_mesh": mesh["dp"]}
    te_fsdp.set_device_mesh(model, **which)
    te_fsdp.set_device_mesh(model, **which)  # saying the same again changes nothing
    model.set_device_mesh(**which)
    x = torch.randn(SEQUENCE, BATCH, HIDDEN, device=harness.device())
    gradients = []
    for item in models:
        item(x).square().sum().backward()
        gradients.append({name: harness.full(p.grad) for name, p in item.named_parameters()})
    checks, bits = Findings(), harness.device_type() == "cpu"
    for name, gradient in gradients[0].items():
        if bits:
            checks.attempt(checks.bitwise_equal, name, gradient, gradients[1][name])
        else:
            why = "atomic sums over 32 tokens: some fp32 roundings"
            checks.attempt(checks.close, name, gradient, gradients[1][name], 1e-6, why)
    checks.settle(10)
    fully_shard(model, mesh=mesh["dp"])
    harness.assert_bitwise_equal("sharded", model(x), stock(x))


def bind_submodules_first() -> None:
    """Check that binding submodules and then the model applies the model's rules to the submodules."""
    import te_fsdp
    from te_fsdp.records import binding_of

    meshes = _meshes({"dp_shard": 1, "tp": 2})
    options = {"fuse_qkv_params": True, "qkv_weight_interleaved": False, "qk_norm_type": "RMSNorm"}
    model = KINDS["attention"](Build(harness.device(), **meshes.te_kwargs()), **options).module
    for child in model.children():
        te_fsdp.set_device_mesh(child, tp_mesh=meshes.tp)
    objects = {name: id(p) for name, p in model.named_parameters()}
    te_fsdp.set_device_mesh(model, tp_mesh=meshes.tp, weight_mesh=meshes.weight)
    assert {name: id(p) for name, p in model.named_parameters()} == objects
    assert binding_of(model.qkv).rules["weight"].layout.blocks == (HEADS, HEADS, HEADS)
    assert binding_of(model.q_norm).rules["weight"].partial_grad
    assert binding_of(model.proj).weight_mesh == meshes.weight
