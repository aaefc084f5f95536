"""Optimizers that are not elementwise, closures, fused kernels; copied optimizers."""

from __future__ import annotations

import math

import pytest
from parity import optimizers
from strategies import closures

MESHES = {"dp2": {"dp_shard": 2}, "hsdp": {"dp_replicate": 2, "dp_shard": 2}}
SPARE = "LBFGS of sharded parameters: expected parameters that it can update, got "
REFUSED = {
    "uneven rows": f"PlacementError: {SPARE}last.weight, without equal shards of rows on all ranks",
    "not trained": f"PlacementError: {SPARE}last.bias, which is not trained",
    "own losses": "MeshError: LBFGS.step(closure): losses that differ between ranks",
    "own losses, searched": "MeshError: LBFGS.step(closure): losses that differ between ranks",
    "no_sync": "OrderError: SGD.step(closure): gradients of 4 parameter(s) were not reduced",
    "fused SGD": "PlacementError: SGD of sharded parameters: expected parameters that it can update, got 4 sharded "
    "ones, and fused=True. This torch's DTensor has no rule for _fused_sgd_. Fix: SGD(..., foreach=True)",
    "fused SGD, rate on the device": "has no rule for _fused_sgd_",
    "fused Adagrad": "has no rule for _fused_adagrad_. Fix: Adagrad(..., foreach=True)",
    "FusedSGD": "PlacementError: FusedSGD of sharded parameters",
}


@pytest.mark.parametrize(
    "mesh", [pytest.param(m, marks=pytest.mark.ranks(math.prod(MESHES[m].values()))) for m in MESHES]
)
def test_lbfgs_equals_one_process(pool, mesh):
    pool.run(optimizers.lbfgs, math.prod(MESHES[mesh].values()), axes=MESHES[mesh])


@pytest.mark.ranks(2)
def test_lbfgs_with_weights_kept_unsharded(pool):
    """Check LBFGS, whose closure reads changing weights several times. Includes a negative control."""
    pool.run(optimizers.lbfgs, 2, axes={}, strategy="optim")
    for error in pool.run_expect_error(optimizers.lbfgs, 2, axes={}, spoil=True):
        assert "None 1 first.weight: relative error" in error.message


@pytest.mark.ranks(2)
def test_unsupported_optimizers_raise(pool):
    for found in pool.run(optimizers.errors_of_optimizers, 2):
        assert set(found) == set(REFUSED)
        for case, text in REFUSED.items():
            assert text in found[case] and "Fix: " in found[case], (case, found[case])


@pytest.mark.ranks(2)
@pytest.mark.parametrize("tp", [1, 2])
def test_copied_optimizers_raise(pool, tp):
    for found in pool.run(optimizers.errors_of_copies, 2, tp=tp):
        assert len(found) == 5
        for case, text in found.items():
            assert text.startswith(
                "AdamW.step: first.weight, and 3 more of its 4: expected current parameters of the model"
            ), (case, text)
            assert "got a copy, as copy.deepcopy or a pickle" in text and "load_state_dict" in text


@pytest.mark.ranks(2)
def test_copied_models_with_their_optimizers_train(pool):
    pool.run(optimizers.train_copies, 2)


@pytest.mark.ranks(2)
def test_shallow_copied_optimizer_has_no_main_weights(pool):
    for text in pool.run(optimizers.error_of_shallow_copy, 2):
        assert (
            text.startswith("SGD.step: first.weight: a main weight in the optimizer's state")
            and "Fix: " in text
        )


@pytest.mark.ranks(2)
@pytest.mark.parametrize("optimizer", ["SGD", "AdamW"])
def test_closures_with_late_gradients_raise(pool, optimizer):
    """Check each condition of the error separately, tensor parallelism included. A plain model is the control."""
    for found in pool.run(closures.closure_errors, 2, optimizer=optimizer):
        assert found.pop("plain") is False  # it was updated
        assert len(found) == 4 and all(found.values()), found
