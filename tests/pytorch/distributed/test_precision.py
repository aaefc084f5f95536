"""The precision policy: exact sums, values of one process, communicated bytes, `grad_comm`."""

from __future__ import annotations

import pytest
from precision import bodies, bytes_sent, memory, quantized, steps
from precision.bodies import HIDDEN, MICROBATCHES, MIDDLE

#: One microbatch brings 256 of the small gradients at once, where only the dtype of the sum is in question.
AT_ONCE = {"first": 256}
BF16_WIRE = {"grad_comm_dtype": "bfloat16"}
FP32_SUMS = {**BF16_WIRE, "grad_reduce_dtype": "float32"}
#: Bytes of scales that travel per 32 elements of a weight.
SCALES = {"current": 0, "mxfp8": 1}
WIDTH = {"bfloat16": 2, "float16": 2, "float32": 4}
#: Elements of the model: norm, two weights, two biases; every dim 0 divides by the ranks.
ELEMENTS = 2 * HIDDEN + 2 * HIDDEN * MIDDLE + HIDDEN + MIDDLE
#: 300 * 2^-8 as the mean over ranks that bring once and twice as much.
EXACT = 1.5 * bodies.MANY * bodies.SMALL

VALUES = {
    "default": {"policy": {}},
    "from meta, delayed": {"policy": {}, "meta": True, "each": False},
    "bf16 weights": {"policy": {"main_params_dtype": None}},
    "bf16 weights, delayed": {"policy": {"main_params_dtype": None}, "each": False},
    "bf16 gradients": {"policy": {"main_grads_dtype": None}},
    "bf16 wire": {"policy": BF16_WIRE},
    "bf16 wire, delayed": {"policy": BF16_WIRE, "each": False},
    "bf16 wire, cast here": {"policy": BF16_WIRE, "each": False, "copies": False},
    "bf16 wire, fp32 sum": {"policy": {**BF16_WIRE, "grad_reduce_dtype": "float32"}},
    "fp16 wire": {"policy": {"grad_comm_dtype": "float16"}},
    "fp32 model": {"policy": {"param_dtype": "bfloat16"}, "model": "float32"},
    "optim": {"policy": {"main_params_dtype": None}, "each": False, "strategy": "optim"},
    "not sharded": {"policy": BF16_WIRE, "exempt": "second"},
    "optim_grads": {"policy": BF16_WIRE, "strategy": "optim_grads"},
}
HSDP = {
    "default, all-reduce at the end": {"policy": {}, "outer_last": True},
    "bf16 wire": {"policy": BF16_WIRE},
    "bf16 wire, all-reduce at the end": {"policy": BF16_WIRE, "outer_last": True},
    "bf16 wire, delayed": {"policy": BF16_WIRE, "each": False},
    "bf16 wire, fp32 sums": {"policy": FP32_SUMS},
    "bf16 wire, fp32 sums, all-reduce at the end": {"policy": FP32_SUMS, "outer_last": True},
    "bf16 wire, fp32 sums, delayed": {"policy": FP32_SUMS, "each": False},
}


#: Of the model of `bodies.values`: two linear layers and a norm, each with a weight and a bias.
PARAMETERS = 6


def _bytes(case: dict, axes: dict[str, int], world: int) -> dict[str, int]:
    """Return bytes of one step by collective and dtype: units gathered once or twice; reductions per mark."""
    arithmetic = bodies.resolved(case["policy"], getattr(bodies.torch, case.get("model", "bfloat16")))
    wire, compute = (str(d).removeprefix("torch.") for d in (arithmetic.wire, arithmetic.compute))
    reductions = MICROBATCHES if case.get("each", True) else 1
    shards = world // axes.get("dp_replicate", 1)
    sent = ELEMENTS + PARAMETERS * shards  # a flag for each parameter and rank: whether the rank has used it
    if "exempt" in case:
        second = HIDDEN * MIDDLE + HIDDEN
        sharded = (sent - 2 * shards - second) * WIDTH[wire]
        return {
            f"all_gather {compute}": 2 * MICROBATCHES * (ELEMENTS - second) * WIDTH[compute],
            f"reduce_scatter {wire}": MICROBATCHES * sharded,
            f"all_reduce {wire}": MICROBATCHES * second * WIDTH[wire],
        }
    expected = {}
    if shards > 1:
        gathers = 1 if "strategy" in case else 2 * MICROBATCHES
        expected[f"all_gather {compute}"] = gathers * ELEMENTS * WIDTH[compute]
        kind = "all_to_all" if arithmetic.fp32_sum else "reduce_scatter"
        expected[f"{kind} {wire}"] = reductions * sent * WIDTH[wire]
    if "dp_replicate" in axes:
        outer = 1 if case.get("outer_last") else reductions
        for kind in ("all_to_all", "all_gather") if arithmetic.fp32_sum else ("all_reduce",):
            key = f"{kind} {wire}"
            expected[key] = expected.get(key, 0) + outer * sent // shards * WIDTH[wire]
    return expected


@pytest.mark.ranks(4)
@pytest.mark.parametrize(
    ("cases", "axes", "ranks"),
    [(VALUES, {}, 2), (HSDP, {"dp_replicate": 2}, 4), (HSDP, {"dp_replicate": 2}, 2)],
    ids=["dp2", "hsdp2x2", "replicate2"],
)
def test_values_and_communicated_bytes(pool, cases, axes, ranks):
    for outcome in pool.run(bodies.values, ranks, cases=cases, axes=axes):
        for name, case in cases.items():
            arithmetic = bodies.resolved(case["policy"], getattr(bodies.torch, case.get("model", "bfloat16")))
            found = outcome[name]
            assert found["gradients"] == [str(arithmetic.grads)], name
            assert found["weights"] == sorted(
                {str(arithmetic.main), *(["torch.bfloat16"] if "exempt" in case else [])}
            )
            expected = _bytes(case, axes, ranks)
            if "strategy" in case or not case.get("each", True):
                # FSDP2 also gathers ahead of backwards that do not follow, until the last one of a step.
                gathered = [key for key in expected if key.startswith("all_gather")]
                assert all(found["bytes"].pop(key) >= expected.pop(key) for key in gathered), name
            if "exempt" in case:  # parts of a flat buffer begin at multiples of some elements
                padding = found["bytes"].pop("all_reduce bfloat16") - expected.pop("all_reduce bfloat16")
                assert 0 <= padding <= MICROBATCHES * 128, padding
            assert found["bytes"] == expected, name


@pytest.mark.parametrize("ranks", [pytest.param(n, marks=pytest.mark.ranks(n)) for n in (2, 4, 8)])
def test_fp16_averages_are_exact(pool, ranks):
    """Exact: powers of two have few bits, and a sum near the largest fp16, 65504, is halved before it overflows."""
    expected = [[32000.0], [(2**ranks - 1) / ranks]]
    for found in pool.run(bytes_sent.fp16_averages, ranks, large=32000.0):
        assert found == {"all_reduce": expected, "reduce_scatter": expected}


@pytest.mark.ranks(2)
def test_fp32_gradients_are_unchanged_by_a_step(pool):
    pool.run(bodies.gradients_after_a_step, 2)


@pytest.mark.ranks(2)
def test_accumulation_is_exact(pool):
    cases = {
        "fp32 weights": {"policy": {}},
        "bf16 weights": {"policy": {"main_params_dtype": None}, **AT_ONCE},
        "bf16 wire": {"policy": BF16_WIRE, **AT_ONCE},
        "fp32 weights, delayed": {"policy": {}, "each": False, **AT_ONCE},
        "bf16 weights, delayed": {"policy": {"main_params_dtype": None}, "each": False, **AT_ONCE},
    }
    controls = {
        "bf16 sum": {"policy": {"main_grads_dtype": "bfloat16"}},
        "bf16 sum, delayed": {"policy": {"main_grads_dtype": None}, "each": False, **AT_ONCE},
        "bf16 sum, bf16 weights": {
            "policy": {"main_params_dtype": None, "main_grads_dtype": None},
            **AT_ONCE,
        },
    }
    for found in pool.run(bodies.accumulated, 2, cases=cases | controls, axes={}):
        assert {name: found[name] for name in cases} == {name: [EXACT] for name in cases}
        assert all(found[name] != [EXACT] for name in controls), found


@pytest.mark.ranks(4)
@pytest.mark.parametrize(
    ("recipe", "axes", "ranks"),
    [("mxfp8", {"tp": 2}, 4), ("none", {"tp": 2}, 4), ("current", {}, 2), ("delayed", {}, 2)],
)
def test_accumulation_is_exact_under_quantized_weights_and_tp(pool, recipe, axes, ranks):
    weights = "" if recipe == "none" else recipe
    cases = {
        "each": {"policy": {}, "recipe": weights, **AT_ONCE},
        "delayed": {"policy": {}, "recipe": weights, "each": False, **AT_ONCE},
        "bf16 sum": {"policy": {"main_grads_dtype": None}, "recipe": weights, **AT_ONCE},
    }
    for found in pool.run(bodies.accumulated, ranks, cases=cases, axes=axes):
        control = found.pop("bf16 sum")
        assert found == {"each": [EXACT], "delayed": [EXACT]} and control != [EXACT]


@pytest.mark.ranks(2)
@pytest.mark.parametrize("recipe", ["current", "mxfp8"])
def test_quantized_weights_are_gathered_as_bytes(pool, recipe):
    for found in pool.run(bodies.quantized_bytes, 2, recipe=recipe, policy=BF16_WIRE):
        weight, bias = found["weight"], found["bias"]
        # Forward and backward: one byte per element, one per block of 32 or none (one scale per weight), bf16 biases.
        gathered = 2 * (weight + SCALES[recipe] * weight // 32 + 2 * bias)
        assert found["bytes"] == {
            "all_gather uint8": gathered,
            "reduce_scatter bfloat16": 2 * (weight + bias + 2 * 2),  # a flag for each parameter and rank
        }
        assert found["gradients"] == ["torch.float32"]


@pytest.mark.ranks(2)
def test_grad_comm_applies_within_its_context(pool):
    fp32, bf16 = ["float32"], ["bfloat16"]
    expected = {"before": fp32, "inside": bf16, "nested": fp32, "inside again": bf16, "after": fp32}
    expected["gradients"] = ["torch.float32"]
    expected["ranges"] = ["te_fsdp::reduce_scatter (first)", "te_fsdp::reduce_scatter (second)"]
    assert pool.run(bodies.dtypes_around_grad_comm, 2, dtype="bfloat16") == [expected] * 2


@pytest.mark.ranks(4)
@pytest.mark.parametrize("axes", [{}, {"tp": 2}, {"dp_replicate": 2}], ids=["dp", "tp", "hsdp"])
def test_main_weights_of_the_optimizer_take_fp32_gradients(pool, axes):
    """Each of torch's kernels: lerp_ of the first two wants its operands in one dtype."""
    kinds = [{"foreach": False}, {"foreach": True}, {"fused": True}]
    pool.run(steps.main_weights_of_the_optimizer, 4 if axes else 2, options=kinds, axes=axes)


@pytest.mark.ranks(2)
@pytest.mark.parametrize(("recipe", "policy", "meta"), [("current", {}, True), ("mxfp8", BF16_WIRE, False)])
def test_quantized_training(pool, recipe, policy, meta):
    results = pool.run(quantized.training, 2, recipe=recipe, policy=policy, meta=meta)
    # fc1 and fc2 at the beginning and after each step; every gradient and their main weights in each step.
    assert all(found["buffers"] >= 3 * 2 * 2 and found["values"] == 2 * (6 + 2) for found in results), results


#: Bytes per element of a rank's shard, or of the unsharded tensor for unreduced gradients.
MEMORY = {
    "default": ({}, "", {"weights": 4, "reduced": 4, "unreduced": 4, "main": 0}),
    "bf16 weights": (
        {"main_params_dtype": None},
        "",
        {"weights": 2, "reduced": 4, "unreduced": 4, "main": 0},
    ),
    "bf16 gradients": (
        {"main_grads_dtype": None},
        "",
        {"weights": 4, "reduced": 2, "unreduced": 2, "main": 0},
    ),
    "both": (
        {"main_params_dtype": None, "main_grads_dtype": None},
        "",
        {"weights": 2, "reduced": 2, "unreduced": 2, "main": 0},
    ),
    "quantized": ({}, "current", {"weights": 1, "reduced": 4, "unreduced": 4, "main": 4}),
}


@pytest.mark.ranks(2)
@pytest.mark.recipe("current")
@pytest.mark.arch("10.0", "9.0")
def test_documented_memory_is_measured(pool):
    """Check within 1 %, because scales and unquantized biases are not counted."""
    cases = {name: {"policy": policy, "recipe": recipe} for name, (policy, recipe, _) in MEMORY.items()}
    for found in pool.run(memory.live_bytes_by_case, 2, cases=cases):
        for name, (_, _, size) in MEMORY.items():
            got, elements = found[name], found[name]["elements"]
            weights = size["weights"] * elements
            expected = {
                "weights": weights,
                "unreduced": weights + size["unreduced"] * 2 * elements,
                "reduced": weights + size["reduced"] * elements,
                "stepped": weights + size["main"] * elements,
            }
            assert {when: got[when] for when in expected} == pytest.approx(expected, rel=0.01), name
            assert got["own"] == pytest.approx(weights, rel=0.01), name
            report = {words.split(",")[0]: number for words, number in got["report"].items()}
            assert report["gradients"] == pytest.approx(size["reduced"] * elements, rel=0.01), name
            assert report["unreduced gradients during accumulation"] == pytest.approx(
                size["unreduced"] * 2 * elements, rel=0.01
            )
            main = report.get("main weights in the optimizer", 0)
            assert main == pytest.approx(size["main"] * elements, rel=0.01), name
