"""HFSDP (`outer_strategy="optim"`): weights over dp_shard, optimizer state over dp_replicate x dp_shard."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from hfsdp import bodies, checkpoints, discarded_state, experts, gradient_reads, quantized_transfers
from hfsdp.models import OPTIMIZERS

#: Axes of each mesh -> cases that run on it one after the other.
PARITY: dict[str, tuple[dict[str, int], list[dict[str, Any]]]] = {
    "2x1": ({"dp_replicate": 2, "dp_shard": 1}, [{"optimizer": "fused", "microbatches": 3}]),
    "4x1": (
        {"dp_replicate": 4, "dp_shard": 1},
        [{"optimizer": "te", "clip": 0.5}, {"optimizer": "sgd", "microbatches": 3}],
    ),
    "2x2": (
        {"dp_replicate": 2, "dp_shard": 2},
        [
            {
                "optimizer": "sgd",
                "microbatches": 3,
                "clip": 0.5,
                "strategy": "optim",
                "halved": True,
                "contexts": True,
            },
            {"optimizer": "adamw", "clip": 0.5},
            {
                "optimizer": "foreach",
                "microbatches": 3,
                "strategy": "optim_grads",
                "contexts": True,
                "halved": True,
            },
            {"optimizer": "te", "microbatches": 3, "clip": 0.5},
        ],
    ),
    "2x2xtp2": (
        {"dp_replicate": 2, "dp_shard": 2, "tp": 2},
        [{"optimizer": "adamw", "microbatches": 3, "clip": 0.5}],
    ),
    # Replicated parameters, of 11 rows, with state sharded over data parallel; with HFSDP, and in plain FSDP.
    "exempt 2x2": (
        {"dp_replicate": 2, "dp_shard": 2},
        [{"optimizer": "te", "microbatches": 3, "clip": 0.5, "exempt": ("head", "embedding")}],
    ),
    "exempt 4": ({"dp_shard": 4}, [{"optimizer": "foreach", "clip": 0.5, "exempt": ("head",)}]),
    "exempt dp2xtp2": (
        {"dp_shard": 2, "tp": 2},
        [{"optimizer": "sgd", "exempt": ("mlp",), "strategy": "optim"}],
    ),
}


def _mesh(name: str) -> object:
    return pytest.param(name, marks=pytest.mark.ranks(math.prod(PARITY[name][0].values())), id=name)


def _all_cases(mesh: str) -> list[dict[str, Any]]:
    """Return every combination on a mesh."""
    factors = {
        "optimizer": list(OPTIMIZERS),
        "microbatches": [1, 3],
        "clip": [0.0, 0.5],
        "strategy": ["optim", "optim_grads", "optim_grads_params"],
        "contexts": [False, True],
    }
    same = {"exempt": PARITY[mesh][1][0].get("exempt", ())}
    found = [
        dict(zip(factors, values, strict=True)) | same for values in itertools.product(*factors.values())
    ]
    return [case for case in found if case["microbatches"] > 1 or not case["contexts"]]


#: Cases of one run.
TOGETHER = 8


@pytest.mark.parametrize("mesh", [_mesh(name) for name in PARITY])
def test_training_equals_one_process(pool, request, mesh):
    """Check pairs of factors, or with `--matrix full` every optimizer, strategy and loop on each mesh."""
    axes, cases = PARITY[mesh]
    if request.config.getoption("--matrix", "covering") == "full":
        cases = _all_cases(mesh)
    # Between runs workers release process groups, each of which has threads.
    for several in (cases[first : first + TOGETHER] for first in range(0, len(cases), TOGETHER)):
        arguments = {"axes": axes, "cases": several, "timeout": 120 + 10 * len(several)}
        results = pool.run(bodies.parity, math.prod(axes.values()), **arguments)
        assert all(len(result) == len(several) for result in results)


@pytest.mark.ranks(4)
def test_large_tensors_are_averaged_in_place(pool):
    """Check in-place averages against weights that are sharded by columns or unevenly."""
    cases = [{"optimizer": "te", "microbatches": 3, "clip": 0.5}, {"optimizer": "sgd", "exempt": ("head",)}]
    assert all(
        pool.run(bodies.parity_with_large_tensors, 4, axes={"dp_replicate": 2, "dp_shard": 2}, cases=cases)
    )


@pytest.mark.ranks(4)
def test_optimizer_state_of_exempt_parameters_is_sharded(pool):
    """Check a weight with 32 columns over 4 ranks, and a bias of 11 rows with 3, 3, 3 and 2 elements."""
    shapes = pool.run(bodies.exempt_parts, 4, axes={"dp_replicate": 2, "dp_shard": 2})
    assert shapes == [[(11, 8), (count,)] for count in (3, 3, 3, 2)]


@pytest.mark.ranks(2)
def test_negative_control_summed_gradients(pool):
    """Negative control: gradients are summed over the outer axis. SGD shows it, Adam without clipping does not."""
    axes = {"dp_replicate": 2, "dp_shard": 1}
    for seen in pool.run(bodies.sum_instead_of_mean, 2, axes=axes, case={"optimizer": "sgd"}):
        assert "relative error" in seen


@pytest.mark.ranks(4)
def test_precision_policy(pool):
    """Check bf16 compute weights with fp32 main weights. Gradients cross the outer axis in the policy's dtype."""
    for cost in pool.run(bodies.costs, 4, dtype=torch.bfloat16, outer="optim", wire=torch.bfloat16):
        kinds = [(kind, dtype) for kind, dtype, _ in cost["sent"]]
        assert kinds == [("reduce_scatter", "torch.bfloat16"), ("all_gather", "torch.float32")]
        assert cost["state"] == pytest.approx(8 * cost["elements"] / 4, rel=0.01)
        assert cost["weights"] == pytest.approx(4 * cost["elements"] / 2, rel=0.01)
        # FSDP2 reduces one flag for each parameter, which shows whether a rank used it, with the gradients.
        assert cost["gradients"] == cost["weights"] + 4 * cost["parameters"]


@pytest.mark.ranks(2)
@pytest.mark.parametrize("marked", [False, True], ids=["plain", "marked"])
def test_parameters_without_gradients_on_their_owners(pool, marked):
    """Check that a parameter without a gradient on its owners is unchanged, weight decay included."""
    pool.run(bodies.missing_gradients, 2, marked=marked)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_collectives_and_memory(pool, dtype):
    """Check memory of opt/(in x out) + (grad + weight)/in, and one collective in each direction."""
    reduction = "all_to_all" if dtype == torch.bfloat16 else "reduce_scatter"
    for cost in pool.run(bodies.costs, 4, dtype=dtype, outer="optim"):
        n, low = cost["elements"], dtype == torch.bfloat16
        size = 2 if low else 4
        kinds = [(kind, dtype) for kind, dtype, _ in cost["sent"]]
        # Dtypes below fp32 are sent unchanged, and summed in fp32.
        assert kinds == [(reduction, str(dtype)), ("all_gather", str(dtype))]
        # Inputs: all gradients of the shard, and the rows of this rank; parts begin on multiples of 16 elements.
        assert [elements for _, _, elements in cost["sent"]] == pytest.approx([n / 2, n / 4], rel=0.01)
        # Two moments; low-precision weights have an fp32 main weight, fp32 ones are their own.
        assert cost["state"] == pytest.approx((12 if low else 8) * n / 4, rel=0.01)
        assert cost["weights"] == pytest.approx(size * n / 2, rel=0.01)
        assert cost["gradients"] == pytest.approx(size * n / 2, rel=0.01)
    # The MLP's two weights as they are, the rest packed; each way the sum is what it was.
    for cost in pool.run(bodies.costs, 4, dtype=dtype, outer="optim", large=128):
        sent = {kind: [n for k, _, n in cost["sent"] if k == kind] for kind in (reduction, "all_gather")}
        assert [len(found) for found in sent.values()] == [3, 3], sent
        n = cost["elements"]
        assert [sum(found) for found in sent.values()] == pytest.approx([n / 2, n / 4], rel=0.01)
    # Negative control: the same accounting of HSDP sees twice the state.
    for cost in pool.run(bodies.costs, 4, dtype=dtype, outer="no_shard"):
        assert cost["state"] == pytest.approx((12 if low else 8) * cost["elements"] / 2, rel=0.01)


@pytest.mark.ranks(2)
def test_gradients_of_any_dtype(pool):
    """Check that FusedAdam(use_decoupled_grad=True) gets unrounded fp32 gradients of bf16 weights."""
    assert pool.run(bodies.decoupled_gradients, 2) == [[("reduce_scatter", "float32")]] * 2


#: Bytes on the wire per element, of both orientations where these are quantized independently.
BYTES = {
    "current": 1,
    "delayed": 1,
    "mxfp8": 2 * (1 + 1 / 32),
    "block": 2 * (1 + 4 / 128**2),
    "nvfp4": 2 * (1 / 2 + 1 / 16),
    "e4m3/mxfp8": 1 + (1 + 1 / 32),
    "bf16/e5m2": 2 + 1,
    "block/e4m3": (1 + 4 / 128**2) + 1,
    "e4m3/e5m2": 1 + 1,
    "e4m3/block": 1 + (1 + 4 / 128**2),
}
#: Recipe, mesh, and options of hfsdp/quantized_transfers.py. The second weight of "block" is sharded along its columns.
#: The MXFP8 weights of width 96 over four ranks have no full blocks along either dim.
WIRE: dict[str, tuple[str, dict[str, int], dict[str, Any]]] = {
    "current 2x1xtp2": ("current", {"dp_replicate": 2, "dp_shard": 1, "tp": 2}, {}),
    "current 2x2": ("current", {"dp_replicate": 2, "dp_shard": 2}, {"alone": True, "optimizer": "te"}),
    "current 3x1": ("current", {"dp_replicate": 3, "dp_shard": 1}, {}),
    "delayed 3x1": ("delayed", {"dp_replicate": 3, "dp_shard": 1}, {"optimizer": "te"}),
    "hybrid 3x1": ("e4m3/e5m2", {"dp_replicate": 3, "dp_shard": 1}, {}),
    "delayed 2x2": ("delayed", {"dp_replicate": 2, "dp_shard": 2}, {}),
    "mxfp8 2x2": ("mxfp8", {"dp_replicate": 2, "dp_shard": 2}, {"alone": True, "optimizer": "te"}),
    "mxfp8 4x1": ("mxfp8", {"dp_replicate": 4, "dp_shard": 1}, {"hidden": 96}),
    "block 2x2": ("block", {"dp_replicate": 2, "dp_shard": 2}, {"alone": True}),
    "nvfp4 2x1xtp2": ("nvfp4", {"dp_replicate": 2, "dp_shard": 1, "tp": 2}, {}),
    "hybrid hopper 2x2": ("e4m3/block", {"dp_replicate": 2, "dp_shard": 2}, {}),
    "hybrid 2x1xtp2": ("e4m3/mxfp8", {"dp_replicate": 2, "dp_shard": 1, "tp": 2}, {}),
    "hybrid 2x2": ("bf16/e5m2", {"dp_replicate": 2, "dp_shard": 2}, {"optimizer": "te"}),
    "hybrid blocks 2x2": ("block/e4m3", {"dp_replicate": 2, "dp_shard": 2}, {"strategy": "optim"}),
    "hybrid mixed 2x2": ("e4m3/mxfp8", {"dp_replicate": 2, "dp_shard": 2}, {"strategy": "optim_grads"}),
}


@pytest.mark.covering(days=2)
@pytest.mark.parametrize(
    ("recipe", "case"),
    [
        pytest.param(recipe, case, id=case, marks=pytest.mark.ranks(math.prod(axes.values())))
        for case, (recipe, axes, _) in WIRE.items()
    ],
)
def test_weights_are_quantized_once_and_sent_as_bytes(pool, arch, recipe, case):
    """Check rows of three ranks with one scale. The last rank sends fewer rows."""
    if arch.startswith("9") and recipe.partition("/")[2] not in ("", "block"):
        pytest.skip("Hopper quantizes a hybrid weight's column-wise part to blocks or not at all")
    _, axes, options = WIRE[case]
    ranks = math.prod(axes.values())
    results = pool.run(quantized_transfers.quantized, ranks, recipe=recipe, axes=axes, **options)
    wide = options.get("hidden") == 96
    assert [len(result["logged"]) for result in results] == [int(wide), *[0] * (ranks - 1)]
    for result in results:
        assert result["compared"] >= 2 * quantized_transfers.STEPS
        as_bytes, as_fp32 = result["elements"]
        assert as_bytes and bool(as_fp32) == wide
        sent = dict.fromkeys(("uint8", "float32", "bfloat16"), 0)
        for call in result["sent"]:
            sent[call.dtype] += call.bytes
        assert sent["uint8"] == pytest.approx(BYTES[recipe] * as_bytes, rel=0.01)
        assert sent["float32"] == pytest.approx(4 * as_fp32, rel=0.01)
        assert (
            sent["bfloat16"] <= 2 * result["others"] + 2 * 16 * 4 * 16
        )  # parts begin on multiples of 16 elements


@pytest.mark.ranks(2)
@pytest.mark.recipe("nvfp4")
def test_replicated_weights_without_columnwise_data(pool):
    """TE clears the columnwise data of a replicated weight in backward, and kept its amax. The step then raised."""
    assert pool.run(quantized_transfers.replicated, 2) == [18] * 2


@pytest.mark.ranks(2)
@pytest.mark.recipe("current")
def test_negative_control_transfer_faults(pool):
    """Negative control: weights sent as fp32 take four times the bytes, and a scale per rank is detected."""
    axes = {"dp_replicate": 2, "dp_shard": 1}
    for result in pool.run(quantized_transfers.quantized, 2, recipe="current", axes=axes, fault="no bytes"):
        sent = [call.bytes for call in result["sent"] if call.dtype == "float32"]
        assert sum(sent) == pytest.approx(4 * result["elements"][1], rel=0.01)
    errors = pool.run_expect_error(
        quantized_transfers.quantized, 2, recipe="current", axes=axes, fault="amax"
    )
    assert all("bits" in error.message for error in errors), errors


@pytest.mark.covering(days=2)
@pytest.mark.ranks(4)
@pytest.mark.parametrize(
    ("replicas", "shape"),
    [(2, (3, 15)), (2, (5, 15)), (4, (3, 15))],
    ids=["2x2 of 3", "2x2 of 5", "4x1 of 3"],
)
@pytest.mark.parametrize("recipe", ["current", "delayed"])
def test_uneven_shards_of_quantized_weights(pool, recipe, replicas, shape):
    """Check shards that replicas divide evenly and unevenly, and ranks without rows."""
    axes = {"dp_replicate": replicas, "dp_shard": 4 // replicas}
    assert (
        pool.run(quantized_transfers.uneven_weight, 4, recipe=recipe, axes=axes, shape=shape, timeout=30)
        == [2 * quantized_transfers.STEPS] * 4
    )


#: Where checkpoints go: HFSDP, HSDP, plain FSDP, one process.
HFSDP, HFSDP_4X1 = (
    ({"dp_replicate": 2, "dp_shard": 2}, "optim"),
    ({"dp_replicate": 4, "dp_shard": 1}, "optim"),
)
HSDP, FSDP = ({"dp_replicate": 2, "dp_shard": 2}, "no_shard"), ({"dp_shard": 4}, "no_shard")
ALONE, TP = (None, "no_shard"), ({"dp_replicate": 2, "dp_shard": 1, "tp": 2}, "optim")


@pytest.mark.covering(
    # From replicas with state cut over both axes onto all kinds of meshes; parameters that are not sharded at all.
    always=[{"saved": HFSDP, "others": [HFSDP, HSDP, HFSDP_4X1, TP, ALONE]}, {"others": [HFSDP_4X1, FSDP]}],
    strength=0,
)
@pytest.mark.ranks(4)
@pytest.mark.parametrize(
    ("case", "saved", "others"),
    [
        ({"optimizer": "adamw"}, HFSDP, [HFSDP, HSDP, HFSDP_4X1, TP, ALONE]),
        ({"optimizer": "sgd"}, FSDP, [HFSDP]),
        ({"optimizer": "te", "dtype": torch.bfloat16}, HFSDP, [HFSDP_4X1, FSDP, ALONE]),
        ({"optimizer": "foreach", "dtype": torch.bfloat16}, TP, [HFSDP, HSDP]),
        ({"optimizer": "adamw", "exempt": ("head",)}, HFSDP, [HFSDP_4X1, FSDP]),
    ],
    ids=["adamw", "sgd", "te-bf16", "adamw-bf16", "exempt"],
)
def test_checkpoints_load_on_different_meshes(pool, tmp_path, case, saved, others):
    arguments = {"case": case, "saved": saved, "others": others, "directory": str(tmp_path)}
    assert all(
        len(counts) == len(others)
        for counts in pool.run(checkpoints.load_on_different_meshes, 4, **arguments)
    )


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    "case", [{"optimizer": "adamw"}, {"optimizer": "te", "dtype": torch.bfloat16}], ids=["adamw", "te-bf16"]
)
def test_state_dict_of_the_optimizer(pool, case):
    pool.run(bodies.state_dict_round_trip, 2, case=case, axes={"dp_replicate": 2, "dp_shard": 1})


@pytest.mark.ranks(4)
@pytest.mark.parametrize("case", [{"optimizer": "adamw"}, {"optimizer": "te"}], ids=["adamw", "te"])
def test_dcp_round_trip_requires_the_same_mesh(pool, tmp_path, case):
    """Check 11 rows over 2 x 2 ranks: correct on the same mesh, an error on a different one."""
    on_2x2, on_4x1 = {"dp_replicate": 2, "dp_shard": 2}, {"dp_replicate": 4, "dp_shard": 1}
    pool.run(
        bodies.through_dcp,
        4,
        case=case,
        saved=on_2x2,
        axes=on_2x2,
        path=str(tmp_path / "same"),
    )
    arguments = {"case": case, "saved": on_2x2, "axes": on_4x1, "path": str(tmp_path / "other")}
    for error in pool.run_expect_error(bodies.through_dcp, 4, **arguments):
        assert "HFSDP's states are padded for one mesh" in error.message, error


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("case", "kind", "words"),
    [
        ("step unsharded", "OrderError", "te_fsdp.shard_optimizer(optimizer)"),
        ("clip unsharded", "OrderError", "te_fsdp.shard_optimizer(optimizer)"),
        ("two optimizers", "OrderError", "AdamW.step()"),
        ("closure", "OrderError", "step(closure)"),
        ("backward after clip", "OrderError", "changed after they were averaged"),
        ("too late", "OrderError", "after its first step"),
        ("other order", "MeshError", "the same parameters in the same order"),
    ],
)
def test_wrong_usage_raises(pool, case, kind, words):
    for error in pool.run_expect_error(bodies.error_of, 2, case=case):
        assert error.type_name == kind and words in error.message, error


@pytest.mark.ranks(2)
@pytest.mark.parametrize("marked", [False, True], ids=["plain", "marked"])
def test_reading_unaveraged_gradients_raises(pool, marked):
    """Check that reads of `.grad` before the average over dp_replicate raise on each rank, without communication."""
    for found in pool.run(gradient_reads.errors_of_reads, 2, marked=marked):
        assert found["read"] == found["harmful"] == []
        assert len(found["texts"]) == 2 * 2 * 3 * len(gradient_reads.READERS)
        assert all("use te_fsdp.clip_grad_norm_" in text for text in found["texts"])


@pytest.mark.covering(days=2)
@pytest.mark.ranks(2)
@pytest.mark.parametrize("marked", [False, True], ids=["plain", "marked"])
@pytest.mark.parametrize("how", ["optimizer", "model", "te_fsdp"])
def test_discarded_step_leaves_no_clip_factor(pool, how, marked):
    """Check that the clip factor of a discarded average does not multiply gradients of later steps."""
    pool.run(discarded_state.discard_clipped_step, 2, how=how, marked=marked)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("marked", [False, True], ids=["plain", "marked"])
def test_nan_in_padding_is_not_reported(pool, marked):
    """Check that uninitialized padding of uneven rows is not sent, because ``report_nan`` would report it."""
    for raised, finite in pool.run(discarded_state.nan_in_padding, 2, marked=marked, poisoned=False):
        assert raised == ["", "", ""] and len(finite) >= 3 and all(finite)
    for raised, finite in pool.run(discarded_state.nan_in_padding, 2, marked=marked, poisoned=True):
        assert raised[:2] == ["", ""] and "NaN or infinity" in raised[2], raised
        assert all(finite) is not marked  # a step that raises sends nothing; backward may have


@pytest.mark.ranks(4)
def test_uneven_experts(pool):
    """Check seven experts, four and three per ep rank. Their state is sharded over the two replicas."""
    axes = {"dp_replicate": 2, "dp_shard": 1, "ep": 2}
    arguments = {"axes": axes, "route": "uneven"}
    pool.run(experts.training, 4, experts=7, single=False, **arguments)
    for elements in pool.run(experts.rows_of_states, 4, axes=axes, experts=4):
        assert len(elements) == 8 and all(whole == 2 * cut for whole, cut in elements.values())
