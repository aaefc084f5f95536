"""Check that public calls raise te_fsdp's error for arguments of wrong types."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn

import te_fsdp
from te_fsdp import checkpoint
from te_fsdp.errors import require_integer, require_kind

# call and argument -> the call with a value of the argument, and values of wrong kinds
CALLS: dict[str, tuple[Callable[[Any, Any, Any], Any], tuple[Any, ...]]] = {
    "materialize: seed": (
        lambda model, meshes, v: te_fsdp.materialize(model, seed=v),
        ("a", 1.5, True, [], torch.ones(2), 2**70, int),
    ),
    "set_device_mesh(Linear): expert_weight_mesh": (
        lambda model, meshes, v: te_fsdp.set_device_mesh(nn.Linear(2, 2), expert_weight_mesh=v),
        ("tp", 2, torch.ones(2)),
    ),
    "register_forward_method": (
        lambda model, meshes, v: te_fsdp.register_forward_method(model, v),
        (None, 1, "no_method", []),
    ),
    "release_params: units": (
        lambda model, meshes, v: te_fsdp.release_params(model, units=v),
        (1, nn.Linear),
    ),
    "start_param_gather: units": (
        lambda model, meshes, v: te_fsdp.start_param_gather(model, units=v),
        (1, True),
    ),
    "graphed_units: units": (lambda model, meshes, v: te_fsdp.graphed_units(model, units=v), (1, True)),
    "graphed_units: warmup": (lambda model, meshes, v: te_fsdp.graphed_units(model, warmup=v), ("2", 0, 1.5)),
    "graphed_units: generators": (lambda model, meshes, v: te_fsdp.graphed_units(model, generators=v), (1,)),
    "report_nan: action": (
        lambda model, meshes, v: te_fsdp.report_nan(model, action=v),
        ("ignore", None, []),
    ),
    "scale_gradients: factor": (
        lambda model, meshes, v: te_fsdp.scale_gradients(model, v),
        ("a", None, torch.ones(2)),
    ),
    "broadcast_params: optimizer": (
        lambda model, meshes, v: te_fsdp.broadcast_params(model, v),
        ("a", [], {"lr": 1}),
    ),
    "graphed_step: forward_backward": (lambda model, meshes, v: _graphed(model, call=v), (None, "f", [])),
    "graphed_step: warmup": (lambda model, meshes, v: _graphed(model, warmup=v), ("2", 0, 1.5)),
    "graphed_step: microbatches": (
        lambda model, meshes, v: _graphed(model, microbatches=v),
        ("2", 0, 1.5, True),
    ),
    "graphed_step: generators": (lambda model, meshes, v: _graphed(model, generators=v), (1,)),
    "Muon: params": (lambda model, meshes, v: te_fsdp.Muon(model, v), (1, True)),
    "Muon(adamw=...)": (
        lambda model, meshes, v: te_fsdp.Muon(model, adamw=v),
        ({"rate": 1}, 1, "lr", ["lr"]),
    ),
    "context_parallel_shard: meshes": (
        lambda model, meshes, v: te_fsdp.context_parallel_shard(torch.ones(2, 4), v),
        (None, "cp", 2),
    ),
    "set_context_parallel: meshes": (
        lambda model, meshes, v: te_fsdp.set_context_parallel(model, v),
        (None, "cp"),
    ),
    "Meshes.from_device_mesh: mesh": (
        lambda model, meshes, v: te_fsdp.Meshes.from_device_mesh(v),
        (None, "dp", torch.ones(2)),
    ),
    "Meshes.from_device_mesh: names": (
        lambda model, meshes, v: te_fsdp.Meshes.from_device_mesh(meshes.device_mesh, names=v),
        ("dp", 1, ["dp"]),
    ),
    "Meshes.build: device_type": (
        lambda model, meshes, v: te_fsdp.Meshes.build(device_type=v),
        (1.5, True, {}, torch.ones(2), 2**70, "tpu?"),
    ),
    "load: allow": (lambda model, meshes, v: checkpoint.load("/nowhere/1", model, allow=v), (None, 1, True)),
    "rng_state: tracker": (lambda model, meshes, v: checkpoint.rng_state(v), ("a", {}, [])),
    "set_rng_state: state": (
        lambda model, meshes, v: checkpoint.set_rng_state(v),
        ("a", 1, {}, [], {"a": 1}),
    ),
}
# calls whose only argument is the sharded model
OF_MODELS = (
    "microbatch", "no_sync", "sync", "start_grad_reduce", "finish_grad_reduce", "zero_grad", "release_params",
    "report_nan",
)  # fmt: skip


def _graphed(model: Any, call: Any = print, **options: Any) -> Any:
    return te_fsdp.graphed_step(model, torch.optim.SGD(model.parameters()), call, **options)


@pytest.mark.parametrize("call", CALLS)
def test_public_calls_reject_arguments_of_wrong_types(call, fake_world):
    """Bug class: Python or torch rejects the argument later in the call, or converts it silently."""
    fake_world(1)
    meshes = te_fsdp.Meshes.build(device_type="cpu")
    model = te_fsdp.fully_shard(nn.Linear(2, 2), meshes)
    make, values = CALLS[call]
    for value in values:
        with pytest.raises(te_fsdp.TeFsdpError) as raised:
            make(model, meshes, value)
        assert str(raised.value).startswith(call), value


@pytest.mark.parametrize("name", OF_MODELS)
def test_calls_reject_values_that_are_not_sharded_models(name):
    """A value without attributes, such as None, raises the same error as an unsharded module."""
    call: Any = getattr(te_fsdp, name)
    for value in (None, "model", 1, [], {}, object(), nn.Linear):
        options = {"is_last": True} if name == "microbatch" else {}
        with pytest.raises(te_fsdp.OrderError) as raised, call(value, **options) or nullcontext():
            pass
        assert name in str(raised.value)


def test_materialize_accepts_all_valid_seeds():
    """Cover the limits of torch.manual_seed, and NumPy integers."""
    import numpy as np

    for seed in (0, -1, 2**64 - 1, -(2**63), np.int64(3)):
        te_fsdp.materialize(nn.Linear(2, 2, device="meta"), seed=seed)  # type: ignore[bad-argument-type]


def test_wrong_argument_types_raise_with_expected_texts():
    with pytest.raises(te_fsdp.PlacementError) as raised:
        require_integer("call", "count", "3", least=1, most=4)
    assert "call: count: expected an integer of at least 1 and at most 4, got '3' (str). Fix: " in str(
        raised.value
    )
    with pytest.raises(te_fsdp.MeshError, match="call: mesh: expected a mesh, got the class Linear"):
        require_kind("call", "mesh", nn.Linear, str, expected="a mesh", error=te_fsdp.MeshError)
    require_integer("call", "count", 4, least=1, most=4)
    require_kind("call", "mesh", "x", (str, int), expected="a mesh")
