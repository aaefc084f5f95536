"""Parameters that the user registered as DTensors over ep, tp or both.

Any module may have such a parameter. The reference is the same model in one process with plain parameters.
"""

from __future__ import annotations

import math

import harness
import pytest
from experts import user_dtensors as bodies

from te_fsdp.layout import STRATEGIES

MESHES = {
    "ep2": {"ep": 2, "dp_shard": 1},
    "tp2": {"tp": 2, "dp_shard": 1},
    "dp2": {"dp_shard": 2},
    "ep2_dp2": {"ep": 2, "dp_shard": 2},
    "ep2_tp2": {"ep": 2, "tp": 2, "dp_shard": 1},
    "tp2_dp2": {"tp": 2, "dp_shard": 2},
    "hsdp_ep2": {"dp_replicate": 2, "ep": 2, "dp_shard": 1},
}
#: fp32: sums over 16 tokens in other orders, three chained AdamW steps with eps=1e-3.
NEAR = 2e-5
#: GroupedLinear multiplies fp32 numbers as TF32 on a GPU. Of operands that differ by 1e-7, 2e-4 are on two sides of
#: the middle between TF32 numbers, which are 2^-10 apart: sqrt(2e-4) * 2^-10 = 1.4e-5 a product; steps have seven.
NEAR_TF32 = 1e-4


def _ranks(mesh: str) -> int:
    return math.prod(MESHES[mesh].values())


def _check(outcomes, keys=("gradient", "norm", "parameter"), form="matmul") -> None:
    near = NEAR_TF32 if form in ("grouped", "on_te") and harness.device_type() == "cuda" else NEAR
    for found in outcomes:
        assert {key: found[key] for key in keys if found[key] >= near} == {}


def _cases(pairs):
    names = ["-".join(map(str, pair)) for pair in pairs]
    marks = [pytest.mark.ranks(max(_ranks(one) for one in pair if one in MESHES)) for pair in pairs]
    return [pytest.param(*p, id=name, marks=mark) for p, name, mark in zip(pairs, names, marks, strict=True)]


@pytest.mark.covering(
    strength=1, always=[{"mesh": "ep2_dp2", "form": "grouped", "strategy": "optim_grads_params"}]
)
@pytest.mark.parametrize(
    ("mesh", "form", "strategy"),
    _cases(
        [("ep2", form, "optim_grads_params") for form in bodies.FORMS]
        + [("ep2_dp2", "grouped", strategy) for strategy in STRATEGIES]
        + [("ep2_dp2", "matmul", "optim_grads_params"), ("ep2_dp2", "on_te", "optim")]
        + [
            (mesh, "matmul", "optim_grads_params")
            for mesh in ("tp2", "dp2", "ep2_tp2", "tp2_dp2", "hsdp_ep2")
        ]
        + [("ep2_tp2", "matmul", "no_shard"), ("hsdp_ep2", "grouped", "optim_grads")]
    ),
)
def test_training_equals_one_process(pool, mesh, form, strategy):
    """Check gradients, norms and parameters of three clipped AdamW steps by value."""
    found = pool.run(
        bodies.train_as_one_process, _ranks(mesh), axes=MESHES[mesh], form=form, strategy=strategy
    )
    _check(found, form=form)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("experts", [3, 5])
def test_uneven_experts(pool, experts):
    """Check ep ranks with different numbers of experts, which dp_shard does not divide."""
    _check(pool.run(bodies.train_as_one_process, 4, axes=MESHES["ep2_dp2"], form="matmul", experts=experts))


@pytest.mark.ranks(4)
def test_optimizer_state_sharded_over_replicas(pool):
    found = pool.run(
        bodies.train_as_one_process, 4, axes=MESHES["hsdp_ep2"], form="matmul", outer_strategy="optim"
    )
    _check(found)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_partial_gradients_of_a_rowwise_embedding(pool, strategy):
    """Check gradients whose placements differ from the parameter's."""
    for found in pool.run(bodies.parallelized, 4, strategy=strategy):
        assert max(found.values()) < NEAR, found


@pytest.mark.ranks(4)
def test_negative_control_wrong_gradient_divisor(pool):
    """Negative control: gradients of the unit of experts, divided by a wrong number."""
    found = pool.run(bodies.train_as_one_process, 4, axes=MESHES["ep2_dp2"], form="grouped", broken="divide")
    assert min(outcome["gradient"] for outcome in found) > 0.1
    assert min(outcome["norm"] for outcome in found) > 1e-3


@pytest.mark.covering(strength=1)
@pytest.mark.parametrize("plain", [False, True], ids=["te_fsdp", "dcp"])
@pytest.mark.parametrize(
    ("mesh", "onto", "experts"),
    _cases(
        [
            ("ep2_dp2", "ep2_tp2", 4),
            ("ep2", "ep2_dp2", 4),
            ("ep2_dp2", "dp2", 4),
            ("tp2_dp2", "ep2", 4),
            ("ep2_dp2", "ep2", 3),
        ]
    ),
)
def test_checkpoints_load_on_a_different_mesh(pool, tmp_path, mesh, onto, experts, plain):
    """The third step after a load equals that of one process without interruption."""
    options = {"form": "matmul", "experts": experts, "plain": plain, "path": str(tmp_path / "saved")}
    pool.run(bodies.train_and_save, _ranks(mesh), axes=MESHES[mesh], **options)
    _check(
        pool.run(bodies.load_and_train, _ranks(onto), axes=MESHES[onto], **options), ("gradient", "parameter")
    )


@pytest.mark.parametrize("mesh", _cases([("ep2",), ("ep2_dp2",), ("ep2_tp2",), ("tp2",)]))
def test_materialize_draws_the_values_of_one_process(pool, mesh):
    """Check initialization from meta bit for bit. A different seed draws different values."""
    for found in pool.run(bodies.compare_materialized, _ranks(mesh), axes=MESHES[mesh]):
        assert max(found.values()) == 0
    for found in pool.run(bodies.compare_materialized, _ranks(mesh), axes=MESHES[mesh], draws=12):
        assert found["block.stacked"] > 0.1


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("case", "kind", "text"),
    [
        ("replicated over ep", "PlacementError", "block.more: a parameter that is replicated over ep"),
        ("large", "PlacementError", "block.scale, block.more: dense parameters of module block"),
        ("partial", "PlacementError", "block.more: a parameter that is neither sharded nor replicated"),
        (
            "no elements",
            "PlacementError",
            "block.more: a DTensor parameter without elements on some ranks",
        ),
        ("other shapes", "MeshError", "the ranks of the mesh have different models"),
        ("local shape", "PlacementError", "block.more: local shape of a DTensor parameter"),
        ("over dp_shard", "OrderError", "block.more"),
    ],
)
def test_unsupported_dtensors_raise(pool, case, kind, text):
    for error in pool.run_expect_error(bodies.error_of_unsupported, 2, case=case):
        assert error.type_name == kind and text in error.message, error
