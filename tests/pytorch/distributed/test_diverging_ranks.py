"""A rank that skips a step, or has different microbatches, options or gradients.

The job went on with shards of different updates, or replicas that differ.
"""

from __future__ import annotations

import math

import bodies_diverging_ranks as bodies
import pytest

STEPS = (
    "OrderError",
    "SGD.step: the ranks are in different steps: expected the same number of backwards before step ",
)
OPTIONS = "MeshError", "SGD.step: the optimizers differ between ranks"
GRADIENTS = "MeshError", "SGD.step: gradients that differ between ranks"
COPIES = "InitError", "copies differ between ranks"
CLIPPING = (
    "MeshError",
    "SGD.step: clip_grad_norm_ had different arguments on the ranks",
    "got in the last call max_norm=0.001, norm_type=2 on rank 0; max_norm=0.001, norm_type=",
)

CASES = {
    ("skip_a_step", "optim_grads_params"): (*STEPS, "got 4 backwards on rank 0; 5 backwards on rank 1"),
    ("skip_a_step", "no_shard"): (*STEPS, " backwards on rank 0; "),
    ("leave_out_a_microbatch", "optim_grads_params"): (
        *STEPS,
        "got 3 backwards on rank 0; 2 backwards on rank 1",
    ),
    ("step_several_optimizers", "optim_grads_params"): (*STEPS, " on rank 1"),
    ("change_the_learning_rate", "optim_grads_params"): OPTIONS,
    ("clear_a_gradient", "optim_grads_params"): GRADIENTS,
    ("scale_gradients", "no_shard"): COPIES,
    ("clip_by_another_norm", "optim_grads_params"): CLIPPING,
    ("change_the_clipping", "optim_grads_params"): CLIPPING,
    ("change_the_clipping", "no_shard"): CLIPPING,
    ("change_the_clipping_by_torch", "optim_grads_params"): CLIPPING,
    ("change_the_norm_by_torch", "optim_grads_params"): CLIPPING,
}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("case", list(CASES), ids="-".join)
def test_deviation_on_one_rank_raises_on_all_ranks(pool, case):
    """Check that all ranks raise an error with the ranks, options or parameters."""
    program, strategy = case
    name, *texts = CASES[case]
    for error in pool.run_expect_error(bodies.run, 2, program=program, is_alone=True, strategy=strategy):
        assert error.type_name == name, error.message
        for text in texts:
            assert text in error.message


@pytest.mark.ranks(2)
@pytest.mark.parametrize("program", sorted({program for program, _ in CASES}))
@pytest.mark.parametrize("strategy", ["optim_grads_params", "no_shard"])
def test_same_loop_on_all_ranks_passes(pool, program, strategy):
    """Check that the same loop on all ranks raises nothing."""
    first, second = pool.run(bodies.run, 2, program=program, is_alone=False, strategy=strategy)
    assert first == second


@pytest.mark.ranks(2)
def test_deviation_is_detected_by_check_level(pool):
    """Check that the next step raises with checks="full", and none with "setup"."""
    options = {"program": "change_the_clipping", "is_alone": True, "strategy": "no_shard", "every": 100}
    for error in pool.run_expect_error(bodies.run, 2, **options, checks="full"):
        assert (error.type_name, CLIPPING[1] in error.message) == ("MeshError", True)
        assert "max_norm=0.001, norm_type=2 on rank 0; max_norm=0.002, norm_type=2 on rank 1" in error.message
    for level in ("first_steps", "setup", "off"):
        pool.run(bodies.run, 2, **options, checks=level)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("axes", ["dp_shard 4", "dp_replicate 2 dp_shard 2", "dp_shard 2 tp 2"])
def test_deviation_on_four_rank_meshes_raises(pool, axes):
    words = axes.split()
    axes = dict(zip(words[::2], map(int, words[1::2]), strict=True))
    for is_alone in (True, False):
        options = {
            "program": "change_the_learning_rate",
            "is_alone": is_alone,
            "strategy": "optim_grads_params",
            **axes,
        }
        if not is_alone:
            pool.run(bodies.run, 4, **options)
            continue
        for error in pool.run_expect_error(bodies.run, 4, **options):
            assert error.type_name == OPTIONS[0]


@pytest.mark.ranks(2)
@pytest.mark.parametrize("strategy", ["optim_grads_params", "no_shard"])
def test_save_detects_a_skipped_step(pool, tmp_path, strategy):
    """Check that a save detects a step that one rank has skipped since the last comparison."""
    pool.run(bodies.save_after_a_step, 2, path=str(tmp_path / "right"), is_alone=False, strategy=strategy)
    options = {"path": str(tmp_path / "wrong"), "is_alone": True, "strategy": strategy}
    for error in pool.run_expect_error(bodies.save_after_a_step, 2, **options):
        assert error.type_name == "CheckpointError"
        assert "save: the ranks are in different steps" in error.message
        assert "got 5 steps after 5 backwards on rank 0; 4 steps after 5 backwards on rank 1" in error.message
    assert not (tmp_path / "wrong").exists()


@pytest.mark.ranks(2)
def test_store_keys_are_deleted(pool):
    """Check that the store of a long job does not grow."""
    for counts in pool.run(bodies.keys_of_the_store, 2):
        assert counts[-1] == counts[-2] == counts[-3]


DP2, REPLICATE2 = {"dp_shard": 2}, {"dp_replicate": 2, "dp_shard": 1}
UNITS = {"dp_shard 2": {"dp_shard": 2}, "tp 2": {"tp": 2}, "dp_shard 2 tp 2": {"dp_shard": 2, "tp": 2}}


@pytest.mark.ranks(4)
@pytest.mark.parametrize("strategy", ["optim", "optim_grads", "optim_grads_params"])
@pytest.mark.parametrize("mesh", UNITS)
def test_different_order_of_units_raises(pool, mesh, strategy):
    """Check that the first forward raises if one rank calls units in a different order. It trained mixed weights."""
    options = {**UNITS[mesh], "strategy": strategy, "begin": 0}
    size = 4 if len(UNITS[mesh]) == 2 else 2
    for error in pool.run_expect_error(bodies.run_units_in_two_orders, size, is_alone=True, **options):
        assert error.type_name == "CollectiveError"
        assert "Branches.forward: units that ran in different orders" in error.message
        others = "rank 0" if size == 2 else "ranks 0, 2-3"
        assert f"got branches.0 on {others}; branches.1 on rank 1. " in error.message
    pool.run(bodies.run_units_in_two_orders, size, is_alone=False, **options)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("case", ["replicas", "evaluation", "evaluation of kept weights", "evaluation of tp"])
def test_different_order_of_units_in_other_collectives_raises(pool, case):
    """Check reductions over replicas, whose gradients were mixed, and jobs that only evaluate."""
    axes = {"replicas": REPLICATE2, "evaluation of tp": {"dp_shard": 1, "tp": 2}}.get(case, DP2)
    options = {"begin": 0, "is_training": case == "replicas", **axes}
    if "kept" in case:
        options["strategy"] = "optim"
    for error in pool.run_expect_error(bodies.run_units_in_two_orders, 2, is_alone=True, **options):
        assert error.type_name == "CollectiveError"
        assert "got branches.0 on rank 0; branches.1 on rank 1. " in error.message
    pool.run(bodies.run_units_in_two_orders, 2, is_alone=False, **options)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("is_training", [True, False], ids=["training", "evaluation"])
def test_full_checks_name_the_unit_of_each_rank(pool, is_training):
    """Check that forwards of different units, later or in an evaluation, raise with checks="full"."""
    options = {"dp_shard": 2, "begin": 1, "is_training": is_training, "checks": "full"}
    for error in pool.run_expect_error(bodies.run_units_in_two_orders, 2, is_alone=True, **options):
        assert error.type_name == "CollectiveError"
        assert (
            "rank 0 in te_fsdp.forward of branches.0; rank 1 in te_fsdp.forward of branches.1"
            in error.message
        )
    pool.run(bodies.run_units_in_two_orders, 2, is_alone=False, **options)


@pytest.mark.ranks(2)
def test_replicas_may_run_units_in_different_orders(pool):
    """Check that ranks of dp_replicate, or of no_shard, which all-gather nothing together, are not compared."""
    for options in (
        {"dp_replicate": 2, "is_training": False, "checks": "full"},
        {"dp_shard": 2, "strategy": "no_shard"},
    ):
        pool.run(bodies.run_units_in_two_orders, 2, is_alone=True, begin=0, **options)


@pytest.mark.ranks(2)
def test_ranks_of_ep_may_run_different_experts(pool):
    """Check that units of experts, which ranks of ep do not all-gather together, are not compared over ep."""
    for checks in (None, "full"):
        pool.run(bodies.different_experts_over_ep, 2, checks=checks)


SWAP, SKIP, REPEAT = [1, 0, 2], [0, 1], [0, 1, 2, 0]
LATER = "forward of layers.{} in a different order than before"
#: Axes, strategy, orders of step 1 by "RANK MICROBATCH", and the start of the error's text.
CHANGES = {
    "weights": (DP2, "optim_grads_params", {"1 0": SWAP}, LATER.format(1)),
    "weights of a step": (DP2, "optim", {"1 0": SWAP}, LATER.format(1)),
    "gradients": (DP2, "optim", {"1 1": SWAP}, LATER.format(1)),
    "gradients of a microbatch": (DP2, "optim_grads", {"1 0": SWAP}, LATER.format(1)),
    "last position": (DP2, "optim", {"1 1": [0, 2, 1]}, LATER.format(2)),
    "repeated": (DP2, "optim_grads", {"1 1": REPEAT}, LATER.format(0)),
    "replicas": (REPLICATE2, "optim_grads_params", {"1 1": SWAP}, LATER.format(1)),
    "skipped": (REPLICATE2, "optim_grads_params", {"1 1": SKIP}, "end of forward without layers.2"),
}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("change", CHANGES)
def test_later_change_of_the_order_on_one_rank_raises(pool, change):
    """Check that the rank that changes waits for the others and raises. It trained mixed weights or gradients."""
    axes, strategy, orders, text = CHANGES[change]
    options = {"axes": axes, "strategy": strategy, "orders": orders, "raises": True}
    _, error = pool.run(bodies.change_the_order, 2, **options)
    assert text in error and "rank 0 has not called it" in error and "the last forward called" in error


@pytest.mark.ranks(4)
@pytest.mark.parametrize("change", CHANGES)
def test_later_change_of_the_order_on_all_ranks_passes(pool, change):
    """Check legal branches, and axes over which ranks may differ."""
    axes, strategy, orders, _ = CHANGES[change]
    on_both = {f"{rank} {key[-1]}": order for key, order in orders.items() for rank in range(2)}
    cases = [(axes, strategy, "no_shard", on_both)]
    if change == "replicas":
        # Replicas reduce in the last microbatch. HFSDP averages gradients in an order of its own.
        hsdp = {"dp_replicate": 2, "dp_shard": 2}
        cases += [(hsdp, "optim_grads", "no_shard", {"2 0": SWAP, "3 0": SWAP})]
        cases += [(REPLICATE2, "optim", "optim", {"1 1": SWAP})]
    for axes, strategy, outer, orders in cases:
        options = {"strategy": strategy, "outer_strategy": outer, "orders": orders, "raises": False}
        pool.run(bodies.change_the_order, math.prod(axes.values()), axes=axes, **options)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("setter", bodies.SETTERS)
def test_setter_of_fsdp2_on_one_rank_raises(pool, setter):
    """Check that the first forward raises. With prefetch lists of one rank the job trained mixed weights."""
    for error in pool.run_expect_error(bodies.call_a_setter, 2, setter=setter, is_alone=True):
        assert error.type_name == "CollectiveError"
        assert "Layers.forward: units with different settings of FSDP2" in error.message
        assert f"with {setter}(" in error.message and " on rank 1. " in error.message
    for begin in (0, 1):
        assert pool.run(bodies.call_a_setter, 2, setter=setter, is_alone=False, begin=begin) == ["", ""]
    _, error = pool.run(bodies.call_a_setter, 2, setter=setter, is_alone=True, begin=1)
    assert "rank 0 has not called it" in error and f"{setter} was called" in error


#: Calls of :func:`bodies.call_manually`, strategy, and the error of a rank that makes them alone.
MANUAL = {
    "unshard": ("2 3|", "optim_grads_params", "unshard of layers.1: "),
    "unshard of a step": ("2|", "optim", "unshard of layers.1: "),
    "reshard": ("|-1 -3", "optim", "forward: "),
}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("case", MANUAL)
@pytest.mark.parametrize("begin", [0, 2])
def test_manual_unshard_on_one_rank_raises(pool, case, begin):
    """Check that it raises instead of mixing weights, and that loops wait only the first time."""
    calls, strategy, text = MANUAL[case]
    options = {"calls": calls, "strategy": strategy, "begin": begin}
    (_, _), (error, _) = pool.run(bodies.call_manually, 2, is_alone=True, **options)
    is_named = f"te_fsdp.{text}" in error and "a new order of manual calls" in error
    assert is_named or "different calls" in error, error
    assert pool.run(bodies.call_manually, 2, is_alone=False, **options) == [("", 0)] * 2


@pytest.mark.ranks(2)
def test_one_rank_may_reshard_before_a_step(pool):
    pool.run(bodies.reshard_before_a_step, 2)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("kind", ["gather", "factor"])
def test_different_microbatches_pass_after_manual_calls(pool, kind):
    """A rank with more microbatches of kept weights waited for the others, which waited in the reduction."""
    first, second = pool.run(bodies.run_different_microbatches, 2, timeout=20, kind=kind)
    assert first == second


HSDP = {"dp_replicate": 2, "dp_shard": 2}
#: Axes, numbers of microbatches by step and rank, and options of :func:`bodies.train_different_microbatches`.
MICROBATCHES = {
    "kept weights": (DP2, [[1, 3], [2, 1]], {"strategy": "optim"}),
    "kept weights over replicas": (HSDP, [[1, 2, 3, 1], [2, 1, 1, 2]], {"strategy": "optim"}),
    "replicas": (HSDP, [[1, 1, 2, 2], [2, 2, 1, 1], [1, 1, 2, 2]], {"strategy": "optim_grads"}),
    "hfsdp": (HSDP, [[1, 1, 2, 2], [2, 2, 1, 1], [1, 1, 2, 2]], {"outer_strategy": "optim"}),
    "setters of replicas": (REPLICATE2, [[1, 2], [2, 1], [1, 2]], {"setter": True}),
}


@pytest.mark.ranks(4)
@pytest.mark.parametrize("case", MICROBATCHES)
def test_different_microbatches_in_the_first_step_pass(pool, case):
    """Comparisons of the first step raised or waited, although torch's FSDP2 runs these loops."""
    axes, counts, options = MICROBATCHES[case]
    size = math.prod(axes.values())
    options = {"setter": False, **options}
    pool.run(bodies.train_different_microbatches, size, timeout=20, axes=axes, counts=counts, **options)


@pytest.mark.ranks(2)
def test_different_microbatches_with_reductions_raise(pool):
    options = {"axes": DP2, "counts": [[1, 2]], "strategy": "optim_grads", "setter": False}
    for error in pool.run_expect_error(bodies.train_different_microbatches, 2, **options):
        assert "Layers.forward: units with different settings of FSDP2" in error.message
