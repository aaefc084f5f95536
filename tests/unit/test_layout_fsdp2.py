"""Compare boxes with FSDP2's shards on a mesh of many ranks, which this process simulates in turn."""

from __future__ import annotations

import math
import re

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from te_fsdp.errors import PlacementError
from te_fsdp.layout import Coordinates, Layout, ParameterRule
from te_fsdp.records import BINDING, ModuleBinding
from te_fsdp.shard_info import shard_info
from tests.unit.layout_reference import GATED, from_boxes, tp_local

WORLD, ME = 16, 8
AXES = ("dp_replicate", "dp_shard", "tp")
MESHES = [(1, 2, 2), (1, 4, 2), (1, 2, 4), (1, 3, 2), (1, 5, 1), (1, 8, 1), (1, 1, 4), (2, 2, 2), (2, 3, 1)]
QKV = Layout("stacked", (8, 4, 4))

# name: shape (rows in units of tp where it is cut), rule, dim that FSDP2 shards
EVEN = {
    "column": ((48, 2), ParameterRule(0), 0),
    "row": ((24, 8), ParameterRule(1), 0),
    "replicated": ((24,), ParameterRule(None), 0),
    "column_dim_1": ((8, 120), ParameterRule(0), 1),
    "row_dim_1": ((3, 480), ParameterRule(1), 1),
}
UNEVEN = {
    "uneven_column": ((28, 2), ParameterRule(0), 0),
    "uneven_row": ((7, 8), ParameterRule(1), 0),
    "uneven_replicated": ((5,), ParameterRule(None), 0),
    "short": ((2, 3), ParameterRule(None), 0),
}
STACKED = {
    "gated": ((24, 2), ParameterRule(0, GATED), 0),
    "gated_bias": ((40,), ParameterRule(0, GATED), 0),
    "qkv": ((48, 3), ParameterRule(0, QKV), 0),
    "qkv_bias": ((16,), ParameterRule(0, QKV), 0),
}
CASES = {**EVEN, **UNEVEN, **STACKED}


def positions(shape: tuple[int, ...]) -> list[DeviceMesh]:
    """Yield meshes of one shape over consecutive ranks, with this process at each position in turn."""
    ranks = torch.arange(math.prod(shape)).reshape(shape)
    return [DeviceMesh("cpu", ME - place + ranks, mesh_dim_names=AXES) for place in range(math.prod(shape))]


def original(name: str) -> torch.Tensor:
    """Return the unsharded parameter of a case with distinct elements."""
    shape = CASES[name][0]
    return torch.arange(math.prod(shape), dtype=torch.float32).reshape(shape)


def sharded_model(mesh: DeviceMesh) -> nn.Module:
    """Return a bound module with the parameters of all cases, sharded by FSDP2."""
    tp = mesh["tp"] if mesh["tp"].size() > 1 else None
    tp_size, tp_rank = mesh["tp"].size(), mesh["tp"].get_local_rank()
    module, dims = nn.Module(), {}
    module.__dict__[BINDING] = ModuleBinding(
        "m", tp, None, {name: rule for name, (_, rule, _) in CASES.items()}
    )
    for name, (_, rule, dim) in CASES.items():
        value = tp_local(original(name), rule, tp_size, tp_rank).clone()
        if tp is not None:
            placement = Replicate() if rule.shard_dim is None else Shard(rule.shard_dim)
            value = DTensor.from_local(value, tp, [placement], run_check=False)
        parameter = nn.Parameter(value)
        dims[id(parameter)] = dim
        module.register_parameter(name, parameter)
    data = mesh["dp_replicate", "dp_shard"] if mesh["dp_replicate"].size() > 1 else mesh["dp_shard"]
    return fully_shard(module, mesh=data, shard_placement_fn=lambda p: Shard(dims[id(p)]))


@pytest.mark.parametrize("shape", MESHES, ids=lambda shape: "x".join(map(str, shape)))
def test_boxes_equal_shards_of_fsdp2(fake_world, shape):
    """Compare shapes, coordinates and values of plain and stacked, even, uneven and empty shards on every rank."""
    fake_world(WORLD, ME)
    wrong_if_plain = 0
    for mesh in positions(shape):
        model = sharded_model(mesh)
        place = dict(zip(AXES, mesh.get_coordinate(), strict=True))
        for name, parameter in model.named_parameters():
            info = shard_info(model, name, parameter)
            local = parameter.to_local()
            assert info.original_shape == CASES[name][0]
            assert info.local_shape == tuple(local.shape)
            own = info.coordinates
            assert (own.fsdp_size, own.fsdp_rank) == (shape[1], place["dp_shard"]), (name, own)
            assert (own.tp_size, own.tp_rank) == (shape[2], place["tp"]), (name, own)
            assert torch.equal(from_boxes(original(name), info.local_shape, info.boxes), local), (name, info)
            if name in STACKED:
                _, plain = _plain(model, name, parameter)
                wrong_if_plain += not torch.equal(plain, local)
    # Negative control: without their layouts the values of stacked parameters are not FSDP2's.
    assert (wrong_if_plain > 0) == (shape[2] > 1)


def _plain(model: nn.Module, name: str, parameter: DTensor) -> tuple[tuple[int, ...], torch.Tensor]:
    rules = model.__dict__[BINDING].rules
    known, rules[name] = rules[name], ParameterRule(rules[name].shard_dim)
    info = shard_info(model, name, parameter)
    rules[name] = known
    return info.local_shape, from_boxes(original(name), info.local_shape, info.boxes)


@pytest.mark.parametrize("shape", MESHES, ids=lambda shape: "x".join(map(str, shape)))
def test_plain_boxes_equal_dtensor_offsets(fake_world, shape):
    """Compare with DTensor's own offsets, including `_StridedShard`, uneven and empty shards.

    Plain DCP writes and reads by these: it is right for plain layouts as long as they agree with ours.
    """
    fake_world(WORLD, ME)
    compared = 0
    for mesh in positions(shape):
        model = sharded_model(mesh)
        for name in {**EVEN, **UNEVEN}:
            parameter = getattr(model, name)
            local_shape, offset = compute_local_shape_and_global_offset(
                parameter.shape, parameter.device_mesh, parameter.placements
            )
            info = shard_info(model, name, parameter)
            expected = [] if 0 in local_shape else [tuple(offset)]
            assert info.local_shape == tuple(local_shape), name
            assert [box.original for box in info.boxes] == expected, name
            compared += 1
    assert compared == len({**EVEN, **UNEVEN}) * math.prod(shape)


def test_shard_info_of_an_unbound_fsdp2_parameter(fake_world):
    """The DTensor is sharded by FSDP2 only, so its last mesh dimension is FSDP2's, not tp."""
    fake_world(4, rank=3)
    model = nn.Linear(3, 10, bias=False)
    value = torch.arange(30.0).reshape(10, 3)
    model.weight.data.copy_(value)
    fully_shard(model, mesh=DeviceMesh("cpu", [0, 1, 2, 3]))
    info = shard_info(model, "weight", model.weight)
    assert (info.coordinates, info.local_shape) == (Coordinates(1, 0, 4, 3, 0), (1, 3))
    assert torch.equal(from_boxes(value, (1, 3), info.boxes), value[9:])
    assert torch.equal(model.weight.to_local(), value[9:])


def test_local_tensor_of_the_wrong_shape_is_rejected(fake_world):
    fake_world(2)
    module = nn.Module()
    module.p = nn.Parameter(DTensor.from_local(torch.ones(3, 2), DeviceMesh("cpu", [0, 1]), [Shard(0)]))
    module.p._local_tensor = torch.ones(2, 2)
    with pytest.raises(
        PlacementError, match=re.escape("up.p: local shape: expected (3, 2) of (6, 2) at")
    ) as caught:
        shard_info(module, "p", module.p, label="up.p")
    assert "got (2, 2)." in str(caught.value)
    assert "Fix: do not replace local tensors by hand; bind and shard the model again." in str(caught.value)


def test_two_fsdp_shard_axes_are_rejected(fake_world):
    fake_world(4)
    mesh = DeviceMesh("cpu", [[0, 1], [2, 3]])
    module = nn.Module()
    module.p = nn.Parameter(DTensor.from_local(torch.ones(2, 2), mesh, [Shard(0), Shard(1)]))
    with pytest.raises(PlacementError) as caught:
        shard_info(module, "p", module.p)
    assert str(caught.value) == (
        "p: placements (Shard(dim=0), Shard(dim=1)): expected at most one FSDP shard axis, got 2. "
        "Fix: shard it by te_fsdp.fully_shard, or by torch's over one mesh axis."
    )


def test_rank_outside_of_the_mesh_is_rejected(fake_world):
    fake_world(4)
    module = nn.Module()
    module.p = nn.Parameter(DTensor.from_local(torch.ones(2, 2), DeviceMesh("cpu", [1, 2]), [Shard(0)]))
    with pytest.raises(PlacementError, match=r"p: .* mesh: expected one of the ranks \[1, 2\], got rank 0"):
        shard_info(module, "p", module.p)
