"""Test meshes: sizes, names, groups, full error messages."""

from __future__ import annotations

import itertools
import math
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import te_fsdp
from te_fsdp.errors import MeshError
from te_fsdp.mesh import Meshes
from te_fsdp.mesh_checks import AXES, check_1d

ROOT = Path(__file__).resolve().parents[2]


def build(**sizes) -> Meshes:
    return Meshes.build(**sizes, device_type="cpu")


def ranks(mesh: DeviceMesh | None) -> list | None:
    """Return the ranks of a mesh, nested as its axes are."""
    return None if mesh is None else mesh.mesh.tolist()


def members(mesh: DeviceMesh | None) -> list[int] | None:
    """Return the ranks of a 1-D mesh's process group."""
    return None if mesh is None else dist.get_process_group_ranks(mesh.get_group())


def expected(world: int, replicate: int, shard: int, tp: int, rank: int) -> dict[str, list | None]:
    """Compute by enumeration which ranks share a group: rank = (replica * shard + place) * tp + tp rank."""
    of = {r: (r // (shard * tp), r // tp % shard, r % tp) for r in range(world)}
    i, j, k = of[rank]
    line = [r for r in of if of[r][0] == i and of[r][2] == k]
    grid = [[r for r in of if of[r][0] == a and of[r][2] == k] for a in range(replicate)]
    weight = [r for r in of if of[r][0] == i]
    return {
        "tp": [r for r in of if of[r][:2] == (i, j)] if tp > 1 else None,
        "fsdp": (grid if replicate > 1 else line) if replicate * shard > 1 else None,
        "fsdp_with_size_one": grid if replicate > 1 else line,
        "weight": weight if shard * tp > 1 else None,
    }


def found(meshes: Meshes) -> dict[str, list | None]:
    results = {name: ranks(getattr(meshes, name)) for name in ("fsdp", "fsdp_with_size_one", "weight")}
    return {"tp": ranks(meshes.tp_or_none), **results}


SIZES = [
    s for s in itertools.product((1, 2, 3, 4), (1, 2, 3, 4, 8), (1, 2, 4)) if math.prod(s) in (1, 2, 4, 6, 8)
]


@pytest.mark.parametrize(("replicate", "shard", "tp"), SIZES)
def test_each_mesh_has_the_expected_ranks(fake_world, replicate, shard, tp):
    world = replicate * shard * tp
    for rank in {0, world // 2, world - 1}:
        fake_world(world, rank)
        meshes = build(dp_replicate=replicate, dp_shard=shard, tp=tp)
        want = expected(world, replicate, shard, tp, rank)
        assert found(meshes) == want
        assert (members(meshes.tp_or_none), members(meshes.weight)) == (want["tp"], want["weight"])
        assert members(meshes.tp) == (want["tp"] or [rank]) and meshes.tp.size() == tp
        assert meshes.tp.get_local_rank() == rank % tp
        assert meshes.device_mesh.mesh_dim_names == AXES
        assert [meshes.size(axis) for axis in AXES] == [replicate, shard, tp]
        assert str(meshes) == f"dp_replicate={replicate} x dp_shard={shard} x tp={tp}"
        assert meshes.fsdp_with_size_one.mesh_dim_names == (AXES[:2] if replicate > 1 else ("dp_shard",))
        assert meshes.te_kwargs()["tp_size"] == tp
        assert (meshes.te_kwargs()["tp_group"] is None) == (tp == 1)


@pytest.mark.parametrize(
    ("axes", "shard"), [({}, 8), ({"tp": 2}, 4), ({"tp": 8}, 1), ({"dp_replicate": 2, "tp": 2}, 2)]
)
def test_dp_shard_is_inferred(fake_world, axes, shard):
    fake_world(8)
    assert build(**axes).size("dp_shard") == shard


def test_any_axis_can_be_inferred(fake_world):
    fake_world(8)
    assert build(dp_shard=2, tp=-1).size("tp") == 4


def test_weight_mesh_is_created_once(fake_world):
    fake_world(4)
    meshes = build(tp=2)
    assert meshes.weight.get_group() is meshes.weight.get_group()
    assert meshes.weight == meshes.weight


# -------------------------------------------------------------------------------------------- from_device_mesh


@pytest.mark.parametrize("order", list(itertools.permutations(AXES)))
def test_axes_are_found_by_name(fake_world, order):
    """In any order of axes, a group contains the ranks that differ along one named axis only."""
    sizes = {"dp_replicate": 2, "dp_shard": 3, "tp": 2}
    for rank in (0, 5, 11):
        fake_world(12, rank)
        mesh = init_device_mesh("cpu", tuple(sizes[a] for a in order), mesh_dim_names=order)
        meshes = Meshes.from_device_mesh(mesh)
        assert meshes.device_mesh.mesh_dim_names == AXES
        assert {a: meshes.size(a) for a in AXES} == sizes
        for axis in AXES:
            assert ranks(meshes.device_mesh[axis]) == ranks(mesh[axis])
            assert members(meshes.device_mesh[axis]) == members(mesh[axis])
        place = dict(zip(order, mesh.get_coordinate(), strict=True))
        same_replica = mesh.mesh.select(order.index("dp_replicate"), place["dp_replicate"]).flatten().tolist()
        assert sorted(ranks(meshes.weight)) == sorted(same_replica)
        assert members(meshes.weight) == sorted(same_replica)


@pytest.mark.parametrize(
    ("names", "shape", "full"),
    [
        (("tp",), (4,), (1, 1, 4)),
        (("dp_shard",), (4,), (1, 4, 1)),
        (("dp_replicate",), (4,), (4, 1, 1)),
        (("tp", "dp_shard"), (2, 2), (1, 2, 2)),
        (("cp", "dp_shard", "ep"), (1, 4, 1), (1, 4, 1)),
    ],
)
def test_missing_axes_have_size_one(fake_world, names, shape, full):
    fake_world(4)
    meshes = Meshes.from_device_mesh(init_device_mesh("cpu", shape, mesh_dim_names=names))
    assert tuple(meshes.size(axis) for axis in AXES) == full


def test_a_matching_mesh_is_adopted_unchanged(fake_world):
    fake_world(4)
    mesh = init_device_mesh("cpu", (1, 2, 2), mesh_dim_names=AXES)
    assert Meshes.from_device_mesh(mesh).device_mesh is mesh


# -------------------------------------------------------------------------------------------------- messages


BUILD_ERRORS = {
    "too many": (
        {"dp_shard": 3, "tp": 2},
        "Meshes.build: dp_replicate(1) * dp_shard(3) * tp(2) = 6: expected a product equal to WORLD_SIZE = 8, got 6. "
        "Fix: dp_shard=4, or dp_shard=-1 to infer it.",
    ),
    "too few": (
        {"dp_replicate": 2, "dp_shard": 2},
        "Meshes.build: dp_replicate(2) * dp_shard(2) * tp(1) = 4: expected a product equal to WORLD_SIZE = 8, got 4. "
        "Fix: dp_shard=4, or dp_shard=-1 to infer it.",
    ),
    "no dp_shard fits": (
        {"dp_shard": 2, "tp": 3},
        "Meshes.build: dp_replicate(1) * dp_shard(2) * tp(3) = 6: expected a product equal to WORLD_SIZE = 8, got 6. "
        "Fix: sizes whose product is WORLD_SIZE.",
    ),
    "does not divide": (
        {"tp": 3},
        "Meshes.build: dp_replicate(1) * dp_shard(-1) * tp(3) = 3 * ?: expected a product equal to WORLD_SIZE = 8, "
        "got 3, which does not divide 8. Fix: sizes whose product is WORLD_SIZE.",
    ),
    "larger than the world": (
        {"tp": 16},
        "Meshes.build: dp_replicate(1) * dp_shard(-1) * tp(16) = 16 * ?: expected a product equal to WORLD_SIZE = 8, "
        "got 16, which does not divide 8. Fix: sizes whose product is WORLD_SIZE.",
    ),
    "zero": (
        {"tp": 0},
        "Meshes.build: dp_replicate(1) * dp_shard(-1) * tp(0): expected positive sizes, at most one of them -1, "
        "got (1, -1, 0)."
        " Fix: give every axis a size of 1 or more; only one may be -1 (the default of dp_shard).",
    ),
    "negative": (
        {"tp": -2},
        "Meshes.build: dp_replicate(1) * dp_shard(-1) * tp(-2): expected positive sizes, at most one of them -1, "
        "got (1, -1, -2)."
        " Fix: give every axis a size of 1 or more; only one may be -1 (the default of dp_shard).",
    ),
    "two free": (
        {"tp": -1},
        "Meshes.build: dp_replicate(1) * dp_shard(-1) * tp(-1): expected positive sizes, at most one of them -1, "
        "got (1, -1, -1)."
        " Fix: give every axis a size of 1 or more; only one may be -1 (the default of dp_shard).",
    ),
    "no number": (
        {"tp": "2"},
        "Meshes.build: dp_replicate(1) * dp_shard(-1) * tp(2): expected positive sizes, at most one of them -1, "
        "got (1, -1, '2')."
        " Fix: give every axis a size of 1 or more; only one may be -1 (the default of dp_shard).",
    ),
    "a float": (
        {"dp_shard": 4.0, "tp": 2},
        "Meshes.build: dp_replicate(1) * dp_shard(4.0) * tp(2): expected positive sizes, at most one of them -1, "
        "got (1, 4.0, 2)."
        " Fix: give every axis a size of 1 or more; only one may be -1 (the default of dp_shard).",
    ),
    "a bool": (
        {"tp": True},
        "Meshes.build: dp_replicate(1) * dp_shard(-1) * tp(True): expected positive sizes, at most one of them -1, "
        "got (1, -1, True)."
        " Fix: give every axis a size of 1 or more; only one may be -1 (the default of dp_shard).",
    ),
    "context and expert parallel": (
        {"cp": 2, "ep": 2, "tp": 4},
        "Meshes.build: dp_replicate(1) * dp_shard(-1) * cp(2) * ep(2) * tp(4) = 16 * ?: expected a product equal to "
        "WORLD_SIZE = 8, got 16, which does not divide 8. Fix: sizes whose product is WORLD_SIZE.",
    ),
    "dp_shard counts neither cp nor ep": (
        {"dp_shard": 8, "ep": 4},
        "Meshes.build: dp_replicate(1) * dp_shard(8) * ep(4) * tp(1) = 32: expected a product equal to WORLD_SIZE = 8, "
        "got 32. Fix: dp_shard=2, or dp_shard=-1 to infer it.",
    ),
}


@pytest.mark.parametrize("mistake", BUILD_ERRORS)
def test_build_rejects_invalid_sizes(fake_world, mistake):
    fake_world(8)
    sizes, text = BUILD_ERRORS[mistake]
    with pytest.raises(MeshError) as caught:
        build(**sizes)
    assert str(caught.value) == text


@pytest.mark.parametrize(
    ("shape", "names", "text"),
    [
        (
            (2, 2),
            None,
            "Meshes.from_device_mesh: the mesh has unnamed axes: expected names out of ('dp_replicate', 'dp_shard', "
            "'cp', 'ep', 'tp'), got shape (2, 2) without mesh_dim_names. Fix: init_device_mesh(..., "
            'mesh_dim_names=("dp_shard", "tp")).',
        ),
        (
            (2, 2),
            ("data", "tp"),
            "Meshes.from_device_mesh: axis 'data' of size 2: expected axes out of ('dp_replicate', 'dp_shard', 'cp', "
            "'ep', 'tp'), got ('data', 'tp'). te_fsdp binds axes by name: gradients are not reduced "
            "over an axis that it ignores. Fix: names={'data': 'dp_shard'} if that is its role, or names={'data': "
            "None} if ranks along it have different weights, as pipeline stages do.",
        ),
        (
            (2, 2),
            ("ep", "dp_shard"),
            "Meshes.from_device_mesh: axes dp_shard, cp and ep: expected ep within cp within dp_shard, so that ranks "
            "ascend along the three as one axis, got axes ('ep', 'dp_shard') over ranks [[0, 1], [2, 3]]. Dense "
            "weights are sharded over them as one axis, and process groups number their ranks in ascending order. "
            "Fix: build the mesh with dp_shard before cp before ep.",
        ),
    ],
    ids=["unnamed", "unknown", "experts_outside"],
)
def test_from_device_mesh_rejects_invalid_meshes(fake_world, shape, names, text):
    fake_world(4)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    with pytest.raises(MeshError) as caught:
        Meshes.from_device_mesh(mesh)
    assert str(caught.value) == text


@pytest.mark.parametrize(
    ("names", "words"),
    [
        ({"dat": "dp_shard"}, ["names: axis 'dat'", "one of ('data', 'outer', 'tp')", "Fix: 'data'"]),
        ({"data": "dp"}, ["names['data']", "got 'dp'", "Fix: names={'data': 'dp_shard'}"]),
        ({"data": "tp", "outer": None}, ["two axes named 'tp'", "('data', 'outer', 'tp')"]),
        ({"data": "dp_shard", "outer": "dp_shard"}, ["two axes named 'dp_shard'", "Fix: flatten"]),
        ({"data": "dp_shard"}, ["axis 'outer' of size 2", "names={'outer': 'dp_replicate'}"]),
        ({}, ["axis 'data' of size 2"]),
        ({"data": "dp_shard", "outer": 3}, ["names['outer']", "got 3"]),
    ],
)
def test_unknown_axis_names_are_rejected(fake_world, names, words):
    fake_world(8)
    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("data", "outer", "tp"))
    with pytest.raises(MeshError) as caught:
        Meshes.from_device_mesh(mesh, names=names)
    assert all(word in str(caught.value) for word in words), str(caught.value)


@pytest.mark.parametrize("rank", [0, 5, 7])
@pytest.mark.parametrize(
    ("axes", "names"),
    [
        ({"outer": 2, "data": 2, "tp": 2}, {"outer": "dp_replicate", "data": "dp_shard"}),
        ({"tp": 2, "data": 2, "outer": 2}, {"outer": "dp_replicate", "data": "dp_shard"}),
    ],
)
def test_mapped_axis_names_give_the_same_meshes(fake_world, axes, names, rank):
    """Renamed axes give the same meshes as te_fsdp's names."""
    fake_world(8, rank)
    ours = [names.get(axis, axis) for axis in axes]
    theirs = init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes))
    meshes = Meshes.from_device_mesh(theirs, names=names)
    same = Meshes.from_device_mesh(init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=ours))
    assert found(meshes) == found(same)
    assert meshes.device_mesh.mesh_dim_names == AXES


@pytest.mark.parametrize("rank", [0, 3, 6])
@pytest.mark.parametrize(
    ("axes", "names"),
    [
        ({"pp": 2, "dp_shard": 2, "tp": 2}, None),
        ({"dp_shard": 2, "Pipeline-Parallel": 2, "tp": 2}, None),
        ({"x": 2, "dp_shard": 2, "tp": 2}, {"x": None}),
    ],
)
def test_stage_of_a_pipeline_mesh_gets_its_own_meshes(fake_world, axes, names, rank):
    """The meshes contain the ranks of this rank's stage only."""
    fake_world(8, rank)
    mesh = init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes))
    at = next(i for i, name in enumerate(axes) if name not in ("dp_shard", "tp"))
    own = mesh.mesh.select(at, mesh.get_coordinate()[at])
    meshes = Meshes.from_device_mesh(mesh, names=names)
    assert ranks(meshes.device_mesh) == [own.tolist()]
    assert sorted(members(meshes.weight)) == sorted(own.flatten().tolist())
    assert members(meshes.tp) == members(mesh["tp"]) and meshes.te_kwargs()["tp_size"] == 2
    assert str(meshes) == "dp_replicate=1 x dp_shard=2 x tp=2"
    # A model that is marked as separate is not a stage of this one.
    across = mesh[list(axes)[at]]
    assert (ranks(meshes.pp), members(meshes.pp)) == (
        (None, None) if names else (ranks(across), members(across))
    )


@pytest.mark.parametrize("rank", [0, 6])
def test_build_creates_the_meshes_of_all_stages(fake_world, rank):
    """Stages are contiguous ranks, also with experts. A mesh of one stage and one of all stages agree."""
    fake_world(8, rank)
    meshes = build(pp=2, ep=2, tp=2)
    first = rank // 4 * 4
    own = list(range(first, first + 4))
    assert ranks(meshes.device_mesh) == [[own[:2], own[2:]]] and meshes.data_size == 2
    assert ranks(meshes.pp) == members(meshes.pp) == [rank % 4, rank % 4 + 4]
    assert sorted(members(meshes.weight)) == own and members(meshes.ep) == [
        first + rank % 2,
        first + rank % 2 + 2,
    ]
    whole = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("pp", "dp_shard", "tp"))
    same = Meshes.from_device_mesh(whole["dp_shard", "tp"], pp=whole["pp"])
    assert ranks(same.pp) == ranks(meshes.pp) and ranks(same.weight) == ranks(meshes.weight)
    with pytest.raises(
        MeshError, match="Meshes.from_device_mesh: pp: expected for the mesh of one stage, a pp mesh"
    ):
        Meshes.from_device_mesh(whole, pp=whole["pp"])
    with pytest.raises(MeshError, match="shares only this rank, [06], with it"):
        Meshes.from_device_mesh(whole["dp_shard", "tp"], pp=whole["tp"])


def test_values_that_are_not_meshes_are_rejected(fake_world):
    fake_world(2)
    for given, word in ((None, "NoneType"), ((2, 1), "tuple"), ("dp", "str")):
        with pytest.raises(MeshError) as caught:
            te_fsdp.fully_shard(torch.nn.Linear(2, 2), given)
        assert (
            f"fully_shard: meshes: expected te_fsdp.Meshes, or a DeviceMesh with named axes, got {word}"
            in str(caught.value)
        )
    with pytest.raises(MeshError, match="the mesh has unnamed axes"):
        te_fsdp.fully_shard(torch.nn.Linear(2, 2), DeviceMesh("cpu", [0, 1]))


@pytest.mark.parametrize("order", [[[1, 0], [3, 2]], [[2, 3], [0, 1]]])
def test_descending_ranks_are_rejected(fake_world, order):
    """torch sorts the ranks of a group, so FSDP2 would shard differently than the mesh describes."""
    fake_world(4)
    mesh = DeviceMesh("cpu", order, mesh_dim_names=("dp_shard", "tp"))
    by_mesh = mesh.get_coordinate()
    by_group = tuple(dist.get_rank(mesh.get_group(axis)) for axis in (0, 1))
    assert tuple(by_mesh) != by_group  # the reason; should torch mend it, the refusal may go
    with pytest.raises(MeshError) as caught:
        Meshes.from_device_mesh(mesh)
    assert str(caught.value) == (
        f"Meshes.from_device_mesh: mesh: expected ranks that ascend along every axis, got {order}. Process groups "
        "number their ranks in ascending order, so shards would be swapped. Fix: build the mesh from ascending "
        "ranks, as init_device_mesh does."
    )
    with pytest.raises(MeshError, match=r"set_device_mesh\(Linear\): tp_mesh: expected ranks that ascend"):
        te_fsdp.set_device_mesh(torch.nn.Linear(2, 2), tp_mesh=DeviceMesh("cpu", [1, 0]))


def test_size_of_an_unknown_axis_raises(fake_world):
    fake_world(1)
    with pytest.raises(MeshError) as caught:
        build().size("pp")
    assert str(caught.value) == (
        "Meshes.size: axis: expected one of ('dp_replicate', 'dp_shard', 'cp', 'ep', 'tp'), got 'pp'. "
        "Fix: for stages use meshes.pp.size()."
    )


def test_check_1d_rejects_2d_meshes(fake_world):
    fake_world(4)
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_shard", "tp"))
    check_1d(None, "tp_mesh", "here")
    check_1d(grid["tp"], "tp_mesh", "here")
    with pytest.raises(MeshError) as caught:
        check_1d(grid, "tp_mesh", "here")
    assert str(caught.value) == (
        "here: tp_mesh: expected a 1-D DeviceMesh, got 2-D mesh of shape (2, 2) with axes ('dp_shard', 'tp'). "
        'Fix: pass one axis, for example tp_mesh=mesh["tp"], or the flattened weight mesh of te_fsdp.Meshes.'
    )
    with pytest.raises(MeshError) as caught:
        check_1d(grid.get_group("tp"), "weight_mesh", "here")
    assert "here: weight_mesh: expected a 1-D DeviceMesh or None, got ProcessGroup. Fix: pass one" in str(
        caught.value
    )


# ------------------------------------------------------------------------------------------------ one process


def test_meshes_on_the_cpu_have_no_groups(fake_world):
    fake_world(1)
    meshes = build()
    assert (meshes.device_type, meshes.device) == ("cpu", torch.device("cpu"))
    assert (meshes.tp_or_none, meshes.fsdp, meshes.weight) == (None, None, None)
    assert (meshes.tp.get_local_rank(), meshes.tp.size()) == (0, 1)
    assert meshes.te_kwargs() == {"tp_group": None, "tp_size": 1}


# --- nodes

#: (ranks of a node, sizes) -> beginnings of the messages.
SLOW = [
    (4, {"tp": 4}, []),
    (4, {"tp": 8}, ["tp=8 crosses nodes of 4 ranks"]),
    (4, {"ep": 4}, []),
    (4, {"ep": 4, "tp": 2}, ["ep=4 crosses nodes of 4 ranks"]),
    (4, {"dp_replicate": 4}, []),
    (2, {"dp_replicate": 2}, []),  # weights of eight ranks cannot stay on two
    (3, {"tp": 16}, []),  # other numbers of ranks on other nodes
    (16, {"tp": 16}, []),
]


@pytest.mark.parametrize(("node", "sizes", "said"), SLOW)
def test_axes_that_cross_nodes_are_logged(fake_world, monkeypatch, caplog, node, sizes, said):
    fake_world(16)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(node))
    with caplog.at_level("WARNING", "te_fsdp"):
        meshes = build(**sizes)
    assert meshes.nodes == (16 // node if 16 % node == 0 else 1)
    assert len(caplog.messages) == len(said)
    assert all(text.startswith(f"Meshes: {words}") for text, words in zip(caplog.messages, said, strict=True))


def test_replicas_within_a_node_are_logged(fake_world, monkeypatch, caplog):
    """Weights are all-gathered across nodes although each node has two copies of a shard."""
    fake_world(16)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    mesh = DeviceMesh("cpu", torch.arange(16).reshape(8, 2).t(), mesh_dim_names=("dp_replicate", "dp_shard"))
    with caplog.at_level("WARNING", "te_fsdp"):
        Meshes.from_device_mesh(mesh)
    assert [text.split(":")[1] for text in caplog.messages] == [
        " dp_shard=8 crosses nodes of 4 ranks and dp_replicate does not"
    ]
