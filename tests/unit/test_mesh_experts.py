"""Test meshes with context parallelism or expert parallelism."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from te_fsdp.errors import MeshError
from te_fsdp.mesh import ALL_AXES, AXES, Meshes
from tests.unit.test_mesh import build, members, ranks

EXPERT_SIZES = [
    s for s in itertools.product((1, 2), (1, 2, 3), (1, 2), (1, 2, 4), (1, 2)) if math.prod(s) in (2, 8, 12)
]


def placed(sizes: tuple[int, ...]) -> dict[int, tuple[int, ...]]:
    """Return each rank's coordinates on the five axes by enumeration. The last axis varies fastest."""
    return dict(enumerate(itertools.product(*map(range, sizes))))


def same(sizes: tuple[int, ...], rank: int, free: str) -> list[int]:
    """Return ranks that differ from `rank` on the axes of `free` at most."""
    of, fixed = placed(sizes), [i for i, axis in enumerate(ALL_AXES) if axis not in free.split()]
    return [r for r in of if all(of[r][i] == of[rank][i] for i in fixed)]


@pytest.mark.parametrize("sizes", EXPERT_SIZES)
def test_each_expert_mesh_has_the_expected_ranks(fake_world, sizes):
    world = math.prod(sizes)
    replicate, shard, cp, ep, tp = sizes
    for rank in {0, world // 2, world - 1}:
        fake_world(world, rank)
        meshes = build(dp_replicate=replicate, dp_shard=shard, cp=cp, ep=ep, tp=tp)
        assert [meshes.size(axis) for axis in ALL_AXES] == [replicate, shard * cp * ep, cp, ep, tp]
        assert meshes.expert_shards == shard * cp
        for mesh, free in (
            (meshes.tp, "tp"),
            (meshes.cp, "cp"),
            (meshes.ep, "ep"),
            (meshes.device_mesh["dp_shard"], "dp_shard cp ep"),
            (meshes.weight, "dp_shard cp ep tp"),
            (meshes.expert_weight, "dp_shard cp tp"),
        ):
            expected = same(sizes, rank, free)
            assert (members(mesh) or [rank]) == expected, free
            assert (ranks(mesh) or [rank]) == expected, free
        for mesh, free in (
            (meshes.fsdp_with_size_one, "dp_shard cp ep"),
            (meshes.expert_fsdp_with_size_one, "dp_shard cp"),
        ):
            assert members(mesh["dp_shard"]) == same(sizes, rank, free)
            assert sorted(mesh.mesh.flatten().tolist()) == same(sizes, rank, f"dp_replicate {free}")
            assert mesh.mesh_dim_names == (AXES[:2] if replicate > 1 else ("dp_shard",))
        assert (meshes.expert_fsdp is None) == (replicate * shard * cp == 1)


@pytest.mark.parametrize("sizes", EXPERT_SIZES)
def test_data_rank_is_equal_within_tp_and_cp_groups(fake_world, sizes):
    """Only ranks of one tp and cp group share a data rank. Data ranks are numbered from 0 in rank order."""
    numbers, asked = {}, dict(zip(ALL_AXES, sizes, strict=True))
    for rank, place in placed(sizes).items():
        fake_world(math.prod(sizes), rank)
        meshes = build(**asked)
        assert meshes.data_size == asked["dp_replicate"] * asked["dp_shard"] * asked["ep"]
        numbers.setdefault(meshes.data_rank, []).append(rank)
        replica, shard, _, expert, _ = place
        assert meshes.data_rank == (replica * asked["dp_shard"] + shard) * asked["ep"] + expert
    assert list(numbers) == list(range(meshes.data_size))
    for group in numbers.values():
        assert group == same(sizes, group[0], "cp tp")


def test_without_ep_experts_use_the_dense_meshes(fake_world):
    fake_world(8)
    meshes = build(dp_replicate=2, tp=2)
    assert (meshes.ep, meshes.cp, meshes.expert_mesh) == (None, None, None)
    assert meshes.expert_fsdp == meshes.fsdp
    assert meshes.expert_weight is meshes.weight


def test_expert_meshes_share_groups_with_the_dense_ones(fake_world):
    fake_world(16)
    meshes = build(dp_replicate=2, ep=2, tp=2)
    for axis in ("dp_replicate", "tp"):
        assert meshes.expert_mesh.get_group(axis) is meshes.device_mesh.get_group(axis)
    assert meshes.expert_weight.get_group() is meshes.expert_weight.get_group()
    assert str(meshes) == "dp_replicate=2 x dp_shard=4 (2 x ep=2) x tp=2"


@pytest.mark.parametrize("order", [("tp", "dp_shard", "ep"), ("dp_shard", "cp", "tp", "ep"), ("ep", "tp")])
def test_expert_axes_are_found_by_name(fake_world, order):
    """Other axes may be in between if ep is nested in cp and cp in dp_shard."""
    for rank in (0, 3):
        fake_world(2 ** len(order), rank)
        mesh = init_device_mesh("cpu", (2,) * len(order), mesh_dim_names=order)
        meshes = Meshes.from_device_mesh(mesh)
        for axis in ("tp", "ep", "cp"):
            assert members(getattr(meshes, axis)) == (members(mesh[axis]) if axis in order else None)
        if "dp_shard" in order and "cp" not in order:
            assert members(meshes.expert_fsdp) == members(mesh["dp_shard"])
        dense = [axis for axis in order if axis != "tp"]
        assert meshes.size("dp_shard") == 2 ** len(dense)


@pytest.mark.parametrize("order", [("ep", "dp_shard"), ("cp", "dp_shard"), ("ep", "tp", "cp")])
def test_expert_axes_that_are_not_nested_are_rejected(fake_world, order):
    """Flattened, their ranks would not ascend, and each rank would have a different rank's shard."""
    fake_world(2 ** len(order))
    mesh = init_device_mesh("cpu", (2,) * len(order), mesh_dim_names=order)
    with pytest.raises(
        MeshError, match="expected ep within cp within dp_shard.*build the mesh with dp_shard before"
    ):
        Meshes.from_device_mesh(mesh)


def test_experts_are_distributed_like_torch_chunk(fake_world):
    """Distributed as by torch.chunk; an expert-parallel rank without experts is rejected."""
    for total in (4, 6, 7, 8):
        dealt = torch.arange(total).chunk(4)
        for rank in range(4):
            fake_world(4, rank)
            meshes = build(ep=4)
            if len(dealt) == 4:
                assert list(meshes.experts(total)) == dealt[rank].tolist()
    assert list(build().experts(3)) == [0, 1, 2]
    with pytest.raises(MeshError) as caught:
        build(ep=4).experts(6)
    assert str(caught.value) == (
        "Meshes.experts: 6 experts over ep=4: expected at least one expert on every rank, got [2, 2, 2, 0]. A "
        "GroupedLinear needs at least one GEMM. Fix: choose an ep size that divides the number of experts."
    )
