"""Cached sharding decisions of DTensor, compared with those of torch.

They are results of operations and layouts of meshes.
"""

from __future__ import annotations

import harness
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor


def _updated(shape: tuple[int, ...], placements: tuple[object, ...]) -> None:
    """Make new decisions: products, casts, lists and scalars of tensors on a mesh."""
    names = ("a", "b")[: len(shape)]
    mesh = init_device_mesh(harness.device_type(), shape, mesh_dim_names=names)
    values = [distribute_tensor(torch.ones(8, 6 + place), mesh, placements) for place in range(3)]
    parameters = [torch.nn.Parameter(value) for value in values]
    for parameter in parameters:
        parameter.grad = (parameter.detach().to(torch.bfloat16).float() * 2 + 1).div(3)
    distribute_tensor(torch.ones(8, 6, dtype=torch.int64), mesh, placements) / 2
    torch.optim.AdamW(parameters).step()
    (values[0].t() @ values[1]).sum(0, keepdim=True)


def metas_on_two_meshes() -> list[int]:
    """Return how many results were computed on one mesh, and then on another one."""
    propagator = DTensor._op_dispatcher.sharding_propagator
    metas, decisions = (
        propagator._propagate_tensor_meta_non_cached,
        propagator.propagate_op_sharding_non_cached,
    )
    counts = []
    for shape, placements in (((4,), (Shard(0),)), ((2, 2), (Replicate(), Shard(0)))):
        before = len(metas.known), decisions.made
        _updated(shape, placements)
        counts.append(len(metas.known) - before[0])
        assert decisions.made > before[1], "torch was not asked"
    for schema in decisions.known:
        found = metas(schema)
        assert found == metas.compute(schema) and type(found) is type(metas.compute(schema)), schema
    quotient = next(
        schema
        for schema in decisions.known
        if schema.op is torch.ops.aten.div.Tensor and schema.args_schema[0].tensor_meta.dtype == torch.int64
    )
    assert metas(quotient).dtype == torch.float32
    torch.set_default_dtype(torch.float64)
    assert metas(quotient).dtype == torch.float64, "of integers, by the default dtype"
    return counts


def layouts_of_a_mesh() -> None:
    """Compare slices and layouts of a mesh with those that torch computes without memory."""
    from torch.distributed import _mesh_layout

    mesh = init_device_mesh(harness.device_type(), (2, 2, 2), mesh_dim_names=("a", "b", "c"))
    world = torch.arange(8).view(2, 2, 2)
    rank = dist.get_rank()
    for _ in range(2):
        assert torch.equal(mesh.mesh, world)
        assert torch.equal(mesh["a"].mesh, world[:, rank // 2 % 2, rank % 2])
        assert torch.equal(mesh["a", "c"].mesh, world[:, rank // 2 % 2])
        assert torch.equal(mesh["b", "c"]._flatten().mesh, world[rank // 4].flatten())
    collapse = getattr(_mesh_layout._MeshLayout, "collapse", None)  # absent before torch 2.13
    assert collapse is None or collapse.cache_info().hits > collapse.cache_info().misses


@pytest.mark.cpu
@pytest.mark.ranks(4)
def test_tensor_metadata_is_cached_across_meshes(pool):
    """Check that shapes, strides and dtypes are computed on the first mesh only, and equal torch's."""
    for first, second in pool.run(metas_on_two_meshes, 4):
        assert first > 10 and second == 0


@pytest.mark.cpu
@pytest.mark.ranks(8)
def test_layouts_are_those_of_torch(pool):
    pool.run(layouts_of_a_mesh, 8)
