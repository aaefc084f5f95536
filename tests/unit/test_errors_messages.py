"""Test the full error text of every mistake in one process. Mesh errors are in test_mesh."""

from __future__ import annotations

import builtins
import pickle

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard

import te_fsdp
from te_fsdp import errors
from te_fsdp.errors import (
    InitError,
    MeshError,
    OrderError,
    PlacementError,
    PrecisionError,
    TeFsdpError,
    message,
)
from te_fsdp.mesh import Meshes


def test_error_message_follows_the_template():
    assert message("up: wrong") == "up: wrong."
    assert message("up: wrong", expected=2, got=4) == "up: wrong: expected 2, got 4."
    assert message("up: wrong", got=0) == "up: wrong: got 0."
    assert message("up: wrong", expected=0) == "up: wrong: expected 0."
    # Clauses may come with or without a full stop.
    whole = message("up: wrong", expected="a", got="b.", why="It matters.", fix="do this.")
    assert whole == message("up: wrong", expected="a", got="b", why="It matters", fix="do this")
    assert whole == "up: wrong: expected a, got b. It matters. Fix: do this."


def test_errors_build_messages_and_are_picklable():
    parts = {"expected": 2, "got": 4, "why": "It matters", "fix": "do this"}
    error = MeshError("up: wrong", **parts)
    assert str(error) == message("up: wrong", **parts) and error.args == (str(error),)
    for item in (error, MeshError("up: wrong"), TeFsdpError()):
        again = pickle.loads(pickle.dumps(item))
        assert type(again) is type(item) and again.args == item.args
    assert str(MeshError("up: wrong")) == "up: wrong" and str(MeshError("up", got=0)) == "up: got 0."


def test_each_part_of_a_message_is_optional():
    assert message("x", expected=1) == "x: expected 1."
    assert message("x", got=0) == "x: got 0."
    assert message("x", why="y") == "x. y."
    assert message("x", fix="y") == "x. Fix: y."


def test_errors_derive_from_te_fsdp_error_and_a_builtin():
    """All errors share one base class and derive from the builtin that a Python user would catch."""
    caught_as = {
        "MeshError": "ValueError",
        "PlacementError": "ValueError",
        "PrecisionError": "ValueError",
        "InputError": "ValueError",
        "OrderError": "RuntimeError",
        "InitError": "RuntimeError",
        "CheckpointError": "RuntimeError",
        "CollectiveError": "RuntimeError",
        "GradientError": "ArithmeticError",
    }
    assert {
        "TeFsdpError",
        "suggest",
        "message",
        "require_flag_fields",
        "require_flags",
        "require_integer",
        "require_kind",
        "require_number",
        "shorten",
        *caught_as,
    } == set(errors.__all__)
    for name, builtin in caught_as.items():
        error = getattr(errors, name)
        assert issubclass(error, (TeFsdpError,)) and issubclass(error, getattr(builtins, builtin))
        assert getattr(te_fsdp, name) is error


def test_unknown_attribute_raises_attribute_error():
    with pytest.raises(AttributeError, match=r"^module 'te_fsdp' has no attribute 'fully_shared'$"):
        te_fsdp.fully_shared  # noqa: B018
    assert set(te_fsdp.__all__) == set(dir(te_fsdp)) and "fully_shard" in dir(te_fsdp)


# ------------------------------------------------------------------------------- a world of four, played by rank 0


class Model(nn.Module):
    """Calls one module, named `up`."""

    def __init__(self, up: nn.Module) -> None:
        super().__init__()
        self.up = up

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.up(x)


class Job:
    """Four ranks, and models on them."""

    def __init__(self, te) -> None:
        self.te = te
        self.dp = Meshes.build(device_type="cpu")
        self.tp = Meshes.build(tp=2, device_type="cpu")
        self.pair = DeviceMesh("cpu", [0, 1], mesh_dim_names=("dp",))
        self.across = DeviceMesh("cpu", [0, 2], mesh_dim_names=("tp",))

    def column(self, device: str = "meta", *, tp: bool = True, **options: object) -> Model:
        """Return a model with a column-parallel linear of 64 x 64."""
        kwargs = self.tp.te_kwargs() if tp else {}
        return Model(
            self.te.Linear(64, 64, parallel_mode="column" if tp else None, device=device, **kwargs, **options)
        )

    def quantized(self, recipe: str, device: str = "meta", *, tp: bool = True) -> Model:
        """Return the same with a quantized weight."""
        from transformer_engine.common import recipe as recipes

        with self.te.quantized_model_init(enabled=True, recipe=getattr(recipes, recipe)()):
            return self.column(device, tp=tp, params_dtype=torch.bfloat16)


@pytest.fixture
def job(te, fake_world) -> Job:
    fake_world(4)
    return Job(te)


def placed(job: Job, placements: list, mesh: DeviceMesh) -> Model:
    model = job.column()
    model.up.weight = nn.Parameter(DTensor.from_local(torch.ones(2, 2), mesh, placements))
    return model


def after_our_fully_shard(job: Job) -> None:
    model = te_fsdp.fully_shard(job.column(tp=False), job.dp)
    te_fsdp.set_device_mesh(model, None, job.dp.weight)  # changes nothing: allowed
    te_fsdp.set_device_mesh(model, job.tp.tp)


def after_torchs_fully_shard(job: Job) -> None:
    te_fsdp.set_device_mesh(torch_fully_shard(job.column(tp=False), mesh=job.dp.fsdp), job.tp.tp)


def our_fully_shard_after_torchs(job: Job) -> None:
    te_fsdp.fully_shard(torch_fully_shard(job.column(tp=False), mesh=job.dp.fsdp), job.dp)


def other_meshes(job: Job) -> None:
    model = job.column(tp=False)
    te_fsdp.set_device_mesh(model, job.tp.tp)
    te_fsdp.set_device_mesh(model, job.across)


def forward_without_hooks(job: Job) -> None:
    model = te_fsdp.fully_shard(job.column("cpu"), job.tp, units="up")
    model.forward = model.up.forward
    model.up.forward(torch.ones(2, 64))


def torchs_fully_shard_of_blocks(job: Job) -> None:
    model = job.quantized("NVFP4BlockScaling", "cpu", tp=False)
    model.up.weight = nn.Parameter(model.up.weight)
    te_fsdp.set_device_mesh(model)
    torch_fully_shard(model, mesh=job.pair)


def unfilled(job: Job) -> None:
    model = te_fsdp.fully_shard(job.column(init_method=lambda weight: weight[:1].fill_(1.0)), job.tp)
    te_fsdp.materialize(model)


MISTAKES = {
    "weight mesh without tp": (
        lambda job: te_fsdp.set_device_mesh(job.column(), job.tp.tp, DeviceMesh("cpu", [2, 3])),
        MeshError,
        "set_device_mesh(Model): weight_mesh: expected a mesh that contains the tp ranks [0, 1], got "
        "ranks [2, 3]. "
        "Fix: pass te_fsdp.Meshes(...).weight, the flattened (dp_shard, tp) mesh.",
    ),
    "scale of its own": (
        lambda job: te_fsdp.set_device_mesh(job.quantized("Float8CurrentScaling"), job.tp.tp),
        MeshError,
        "up.weight: weight_mesh of a quantized weight with one scale per tensor: expected the mesh of "
        "all ranks that shard it, got None. Each rank would quantize its shard with a different scale. "
        "Fix: pass "
        "weight_mesh=te_fsdp.Meshes(...).weight.",
    ),
    "tp_mesh is not tp_group": (
        lambda job: te_fsdp.set_device_mesh(job.column(), job.across),
        MeshError,
        "up: tp_mesh: expected the ranks of tp_group, [0, 1], got [0, 2]. Fix: pass the mesh of "
        "tp_group, or build the module with tp_size only.",
    ),
    "other meshes": (
        other_meshes,
        OrderError,
        "up: set_device_mesh with different meshes than before: expected tp_mesh=ranks [0, 1], "
        "weight_mesh=None, got "
        "tp_mesh=ranks [0, 2], weight_mesh=None. The parameters already have placements. "
        "Fix: bind a model once; build a new model for a new mesh.",
    ),
    "after our fully_shard": (
        after_our_fully_shard,
        OrderError,
        "up: set_device_mesh after fully_shard: expected tp_mesh=None, weight_mesh=ranks [0, 1, 2, 3], got "
        "tp_mesh=ranks [0, 1], weight_mesh=None. The parameters already have placements. "
        "Fix: call set_device_mesh before fully_shard.",
    ),
    "after torch's fully_shard": (
        after_torchs_fully_shard,
        OrderError,
        "up.weight: set_device_mesh after the parameter became a DTensor: expected a plain parameter, as "
        "TE creates it, or a DTensor on tp_mesh with TE's placement, got DTensor with placements "
        "(Shard(dim=0),). "
        "FSDP2 would ignore the tensor-parallel placement, and checkpoints would lose tp shards. Fix: "
        "call set_device_mesh before fully_shard, or call te_fsdp.fully_shard, which does both.",
    ),
    "our fully_shard after torch's": (
        our_fully_shard_after_torchs,
        OrderError,
        "FSDPModel: fully_shard on a module that is already sharded: expected a model without FSDP2, got "
        "FSDPModel. "
        "The tensor-parallel placements must be set before FSDP2 shards the parameters. Fix: call "
        "te_fsdp.fully_shard "
        "once, and not torch's fully_shard before it.",
    ),
    "a parameter on a grid": (
        lambda job: te_fsdp.fully_shard(
            placed(job, [Shard(0), Replicate()], DeviceMesh("cpu", [[0, 1], [2, 3]])), job.tp
        ),
        OrderError,
        "up.weight: set_device_mesh after the parameter became a DTensor: expected a plain parameter, as "
        "TE creates it, or a DTensor on tp_mesh with TE's placement, got DTensor with placements "
        "(Shard(dim=0), Replicate()). "
        "FSDP2 would ignore the tensor-parallel placement, and checkpoints would lose tp shards. Fix: "
        "call set_device_mesh before fully_shard, or call te_fsdp.fully_shard, which does both.",
    ),
    "unit of no name": (
        lambda job: te_fsdp.fully_shard(job.column(), job.tp, units=["up", "layers.0"]),
        PlacementError,
        "fully_shard: unit 'layers.0' matches no module: expected a class or one of the names up. Fix: use "
        "names of model.named_modules().",
    ),
    "unit of no class": (
        lambda job: te_fsdp.fully_shard(job.column(), job.tp, units=nn.Conv2d),
        PlacementError,
        "fully_shard: unit 'Conv2d' matches no module: expected a class or one of the names up. Fix: use "
        "names of model.named_modules().",
    ),
    "unit without children": (
        lambda job: te_fsdp.fully_shard(
            nn.Sequential(*(nn.Linear(4, 4) for _ in range(10))), job.dp, units="3.*"
        ),
        PlacementError,
        "fully_shard: unit '3.*' matches no module: expected a class or one of the names 0, 1, 2, 3, 4, 5, "
        "6, 7 and 2 "
        "more. Fix: use names of model.named_modules().",
    ),
    "a container as unit": (
        lambda job: te_fsdp.fully_shard(Model(nn.ModuleList([nn.Linear(4, 4)])), job.dp, units="up"),
        PlacementError,
        "up: fully_shard of a ModuleList: expected a module with a forward, got a container without a forward. "
        "FSDP2 all-gathers "
        'weights in the hooks of forward, which a container never runs. Fix: units="up.*" for each of '
        "its children.",
    ),
    "a container as model": (
        lambda job: te_fsdp.fully_shard(nn.ModuleDict({"up": nn.Linear(4, 4)}), job.dp),
        PlacementError,
        "model: fully_shard of a ModuleDict: expected a module with a forward, got a container without a forward. "
        "FSDP2 all-gathers "
        "weights in the hooks of forward, which a container never runs. Fix: shard the module that calls it.",
    ),
    "a scalar": (
        lambda job: te_fsdp.fully_shard(Model(nn.ParameterList([torch.ones(())])), job.dp),
        PlacementError,
        "up.0: fully_shard of a scalar parameter: expected at least one dim to shard, got shape (). Fix: "
        "make it a "
        "tensor of shape (1,), or call te_fsdp.fsdp_no_shard(parameter).",
    ),
    "a cut through blocks": (
        lambda job: te_fsdp.fully_shard(job.quantized("MXFP8BlockScaling", tp=False), job.dp),
        PlacementError,
        "up.weight: mxfp8 weight of tp-local shape (64, 64): expected rows or columns divisible by 4 "
        "FSDP ranks * 32, "
        "and the others by 32, got 64 rows and 64 columns. One scale spans 32 rows or columns; a shard "
        "boundary within a block has no correct scale. Fix: use the mesh dp_replicate=2, dp_shard=2, "
        "tp=1, or a weight of shape "
        "(128, 64) "
        "instead of (64, 64), or high-precision weights.",
    ),
    "shards that are dequantized": (
        torchs_fully_shard_of_blocks,
        PrecisionError,
        "up.weight: shards of a quantized weight: expected nvfp4 shards, got torch.bfloat16 shards. FSDP2 "
        "shards with tensor operations for which TE returns dequantized copies. Fix: use "
        "te_fsdp.fully_shard, or build "
        "the model on meta and call reset_parameters after fully_shard.",
    ),
    "forward without hooks": (
        forward_without_hooks,
        OrderError,
        "up: forward with 'weight' on mesh axes ('dp_shard', 'tp'): expected the unsharded parameter, "
        "got a shard of "
        "it, placements (_StridedShard(dim=0, sf=2), Shard(dim=0)). FSDP2 all-gathers in the forward "
        "hooks of its "
        "units, which did not run. Fix: call the sharded module itself (not .forward or another method), or "
        "call unshard() first.",
    ),
    "an init method that does not fill": (
        unfilled,
        InitError,
        "up.weight: not initialized: expected an init method that fills the unsharded tensor, got "
        "uninitialized values. "
        "Fix: pass an init_method to the TE module that fills the tensor in place.",
    ),
    "a keyword mesh of three axes": (
        lambda job: te_fsdp.Linear(4, 4, parallel_mode="column", tp_mesh=job.tp.device_mesh, device="meta"),
        MeshError,
        "Linear: tp_mesh: expected a 1-D DeviceMesh, got 3-D mesh of shape (1, 2, 2) with axes "
        "('dp_replicate', "
        "'dp_shard', 'tp'). Fix: pass one axis, for example tp_mesh=mesh[\"tp\"], or the flattened "
        "weight mesh of "
        "te_fsdp.Meshes.",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_raise_with_the_full_text(job, mistake):
    make, error, text = MISTAKES[mistake]
    with pytest.raises(error) as caught:
        make(job)
    assert str(caught.value) == text


@pytest.mark.parametrize("mistake", ["a container as unit", "a scalar", "unit of no name"])
def test_rejected_fully_shard_does_not_change_the_model(job, mistake):
    """Units before the rejected one are not changed either."""
    first, up = nn.Linear(4, 4), job.te.Linear(4, 4, device="cpu")
    second = nn.ModuleList([up])
    if mistake == "a scalar":
        up.register_module("own", nn.ParameterList([torch.ones(())]))
    model = nn.Sequential(first, second)
    before = {name: id(p) for name, p in model.named_parameters()}
    with pytest.raises(PlacementError):
        te_fsdp.fully_shard(model, job.dp, units=["0", "1" if mistake != "unit of no name" else "2"])
    assert {name: id(p) for name, p in model.named_parameters()} == before
    assert (type(first), type(up)) == (nn.Linear, job.te.Linear)


def test_weight_mesh_may_have_a_name_of_the_users(job):
    """A weight mesh with the ranks of te_fsdp's is the same mesh."""
    model = job.column()
    own = DeviceMesh("cpu", job.tp.weight.mesh.tolist(), mesh_dim_names=("mine",))
    te_fsdp.set_device_mesh(model, job.tp.tp, own)
    te_fsdp.fully_shard(model, job.tp)
    assert isinstance(model.up.weight, DTensor)
