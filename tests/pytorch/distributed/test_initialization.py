"""Initialization from one seed on any mesh. Logical weights equal stock TE in one process bit for bit."""

from __future__ import annotations

import pytest
from parity import initialization as bodies

MESHES = {
    "one": {},
    "dp2_tp2": {"dp_shard": 2, "tp": 2},
    "dp4": {"dp_shard": 4},
    "tp4": {"dp_shard": 1, "tp": 4},
    "hsdp": {"dp_replicate": 2, "dp_shard": 2},
    "hsdp_tp": {"dp_replicate": 2, "dp_shard": 2, "tp": 2},
}
WORLD = {"one": 1, "hsdp_tp": 8}
STACKED = {"fuse_qkv_params": True, "qkv_weight_interleaved": False}
MODELS = {
    "zoo": ("zoo", {}),
    "gelu": ("layer_norm_mlp", {}),
    "swiglu": ("layer_norm_mlp", {"activation": "swiglu"}),
    "fused": ("transformer_layer", {"fuse_qkv_params": True, "groups": 4}),
    "stacked": ("transformer_layer", {**STACKED, "groups": 4, "softmax_type": "learnable"}),
    "grouped": ("grouped_linear", {}),
}


def _mesh(name: str) -> object:
    return pytest.param(name, marks=pytest.mark.ranks(WORLD.get(name, 4)), id=name)


@pytest.mark.covering(days=2)
@pytest.mark.parametrize(
    ("mesh", "route"),
    [
        pytest.param(mesh, route, marks=pytest.mark.ranks(WORLD.get(mesh, 4)), id=f"{route}-{mesh}")
        for mesh in MESHES
        for route in ("seed", "manual_seed", "before")
        if route == "seed" or mesh in ("dp2_tp2", "hsdp")
    ],
)
def test_mixed_modules_equal_stock_te(pool, mesh, route):
    pool.run(bodies.equals_stock, WORLD.get(mesh, 4), kind="zoo", options={}, axes=MESHES[mesh], route=route)


@pytest.mark.covering(
    # Blocks of rows that tp cuts one by one, and an offset for each head.
    always=[{"model": "swiglu", "mesh": "tp4"}, {"model": "stacked", "mesh": "tp4"}],
    strength=1,
)
@pytest.mark.parametrize("mesh", [_mesh(name) for name in ("one", "dp2_tp2", "tp4")])
@pytest.mark.parametrize("model", [name for name in MODELS if name != "zoo"])
def test_te_modules_equal_stock_te(pool, mesh, model):
    kind, options = MODELS[model]
    how = {"kind": kind, "options": options, "axes": MESHES[mesh], "route": "manual_seed"}
    pool.run(bodies.equals_stock, WORLD.get(mesh, 4), **how)


# --- TE's own reset_parameters ---------------------------------------------------------------------------------------


@pytest.mark.covering(strength=1)
@pytest.mark.ranks(4)
@pytest.mark.parametrize("device", ["meta", "real"])
@pytest.mark.parametrize(
    ("shape", "names", "tp"),
    [
        ((2, 2), ("dp", "tp"), "tp"),
        ((2, 2), ("a", "b"), "b"),
        ((1, 2, 2), ("replicate", "shard", "tp"), "tp"),
        ((2, 2), ("outer", "inner"), None),
        ((4,), ("x",), None),
    ],
    ids=lambda value: "_".join(map(str, value)) if isinstance(value, tuple) else str(value),
)
@pytest.mark.parametrize("model", ["zoo"])
def test_te_reset_parameters_after_torch_fully_shard(pool, model, shape, names, tp, device):
    kind, options = MODELS[model]
    pool.run(bodies.te_reset, 4, kind=kind, options=options, shape=shape, names=names, tp=tp, device=device)


@pytest.mark.ranks(8)
def test_te_reset_parameters_on_hsdp_with_tp(pool):
    how = {"shape": (2, 2, 2), "names": ("copies", "pieces", "width"), "tp": "width", "device": "meta"}
    pool.run(bodies.te_reset, 8, kind="layer_norm_mlp", options={"activation": "swiglu"}, **how)


# --- errors ----------------------------------------------------------------------------------------------------------


@pytest.mark.ranks(4)
@pytest.mark.parametrize(
    ("mesh", "argument", "odd_rank"),
    [
        ("dp2_tp2", False, None),
        ("dp2_tp2", True, None),
        ("dp2_tp2", False, 3),
        ("dp2_tp2", True, 0),
        ("dp4", False, 3),
        ("tp4", False, 3),
        ("hsdp", True, 0),
    ],
)
def test_different_seeds_raise_on_all_ranks(pool, mesh, argument, odd_rank):
    how = {"axes": MESHES[mesh], "argument": argument, "odd_rank": odd_rank}
    for error in pool.run_expect_error(bodies.different_seeds, 4, **how):
        assert error.type_name == "InitError"
        assert "embedding (weight): initialization with different random states" in error.message
        assert "expected equal states on all ranks of the mesh, got different states" in error.message
        assert "Fix: call torch.manual_seed with one seed on all ranks first" in error.message


@pytest.mark.ranks(4)
@pytest.mark.parametrize("mesh", ["dp2_tp2", "dp4", "tp4", "hsdp"])
def test_parameters_built_from_different_seeds_raise_on_all_ranks(pool, mesh):
    for error in pool.run_expect_error(bodies.differing_values, 4, axes=MESHES[mesh]):
        assert error.type_name == "InitError"
        assert error.message.startswith("embedding.weight, ")
        assert "values differ between ranks that must have the same" in error.message
        assert "Fix: use one seed on all ranks before building the model" in error.message


@pytest.mark.ranks(4)
@pytest.mark.parametrize("mesh", ["dp2_tp2", "hsdp"])
@pytest.mark.parametrize(
    ("which", "names"),
    [
        pytest.param(["no_reset"], ["no_reset.lost", "no_reset.table"], id="no reset"),
        pytest.param(["forgetful"], ["forgetful.blank", "forgetful.forgotten"], id="incomplete reset"),
        pytest.param(
            ["forgetful", "no_reset"],
            ["forgetful.blank", "forgetful.forgotten", "no_reset.lost", "no_reset.table"],
            id="both",
        ),
    ],
)
def test_uninitialized_tensors_are_named(pool, mesh, which, names):
    for error in pool.run_expect_error(bodies.never_initialised, 4, axes=MESHES[mesh], which=which):
        assert error.type_name == "InitError"
        first = f"{len(names)} tensor(s) were not initialized: {', '.join(names)}: expected"
        assert error.message.startswith(first), error.message
        assert "Fix: define reset_parameters() on the module that owns them" in error.message


# --- tied parameters -------------------------------------------------------------------------------------------------


@pytest.mark.covering(strength=1)
@pytest.mark.ranks(4)
@pytest.mark.parametrize("mesh", ["dp2_tp2", "dp4", "hsdp"])
@pytest.mark.parametrize("route", ["after", "before", "device"])
def test_tied_parameters_stay_tied(pool, mesh, route):
    pool.run(bodies.stays_tied, 4, axes=MESHES[mesh], route=route)
