"""`te_fsdp.clip_grad_norm_`, compared with torch's clipping of the unsharded model on any set of meshes."""

from __future__ import annotations

import math

import pytest
from parity import clipping

MESHES = {
    "dp2_tp2": {"dp_shard": 2, "tp": 2},
    "dp4": {"dp_shard": 4},
    "tp4": {"dp_shard": 1, "tp": 4},
    "hsdp": {"dp_replicate": 2, "dp_shard": 2},
    "hsdp_tp": {"dp_replicate": 2, "dp_shard": 2, "tp": 2},
}


@pytest.mark.parametrize(
    ("mesh", "norm_type"),
    [
        pytest.param(
            mesh, norm, marks=pytest.mark.ranks(math.prod(MESHES[mesh].values())), id=f"{mesh}-{norm}"
        )
        for mesh in MESHES
        for norm in (2.0, 1.0, math.inf)
        if norm == 2.0 or mesh == "dp2_tp2"
    ],
)
def test_norm_and_clipped_gradients_equal_torch(pool, mesh, norm_type):
    ranks = math.prod(MESHES[mesh].values())
    results = pool.run(clipping.clipping, ranks, axes=MESHES[mesh], norm_type=norm_type)
    assert len({result["total"] for result in results}) == 1


@pytest.mark.ranks(4)
def test_an_empty_shard_without_gradient_does_not_hang(pool):
    """Check dp4 with 3 rows (1, 1, 1, 0). The last rank must take part in the all-reduce."""
    pool.run(clipping.clipping, 4, axes=MESHES["dp4"], norm_type=2.0, lacking=True)


@pytest.mark.ranks(2)
def test_non_finite_norm_raises_on_all_ranks(pool):
    errors = pool.run_expect_error(clipping.non_finite, 2, axes={"dp_shard": 2})
    assert {error.type_name for error in errors} == {"PrecisionError"}
    assert all("norm" in error.message and "nan" in error.message for error in errors)


@pytest.mark.ranks(2)
def test_norm_of_partial_gradients_raises(pool):
    for error in pool.run_expect_error(clipping.unreduced, 2, axes={"dp_shard": 2}):
        assert error.type_name == "PlacementError" and "Partial" in error.message
        assert "clip_grad_norm_: gradient of Module.weight, a parameter of shape (4, 3)" in error.message
    for error in pool.run_expect_error(clipping.unreduced_in_a_model, 2, axes={"dp_shard": 2}):
        assert (
            error.type_name == "PlacementError" and "clip_grad_norm_: gradient of 1.weight:" in error.message
        )


@pytest.mark.ranks(4)
def test_negative_control_local_norm(pool):
    """Negative control: the norm of a rank's own shards is not the model's norm."""
    for result in pool.run(clipping.clipping, 4, axes=MESHES["dp2_tp2"], norm_type=2.0):
        assert abs(result["local"] - clipping.MAX_NORM) > 0.05


@pytest.mark.ranks(4)
@pytest.mark.parametrize("by_torch", [False, True], ids=["te_fsdp", "torch"])
def test_norm_over_two_meshes(pool, by_torch):
    """Check parameters on several meshes, which torch's function rejects unless te_fsdp shards some of them."""
    pool.run(clipping.two_meshes, 4, axes=MESHES["dp2_tp2"], by_torch=by_torch)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("axes", [{"pp": 2, "dp_shard": 2}, {"pp": 2, "tp": 2}], ids=["dp", "tp"])
def test_norm_covers_stages_without_te_fsdp_fully_shard(pool, axes):
    """Check stages that torch's ``fully_shard`` or ``set_device_mesh`` sharded. Only one stage was included."""
    for result in pool.run(clipping.stages_of_torch, 4, axes=axes):
        assert result["norm"] == pytest.approx(result["expected"], rel=1e-5)  # fp32 sums of 512 squares
        assert result["one_stage"] == pytest.approx(result["own"], rel=1e-5)
