"""Compare estimated step times with closed forms or with runs on two H200s."""

from __future__ import annotations

import json
from functools import partial
from types import SimpleNamespace

import pytest

import te_fsdp
from te_fsdp.errors import CheckpointError, PlacementError
from te_fsdp.planning import Job, Machine, Plan, Sizes, plan
from tests.unit.commands import ROOT
from tests.unit.test_planning import CONFIG, GROUPS, HEADS, HIDDEN, LAYER, LAYERS, VOCABULARY, WIDTH

TOKENS = 64
# Two rates follow from the rows without communication, contention from te_fsdp's bf16 row; link and memory are those of
# Machine. "bf16" and "FP8" name weights and products.
LIMIT = {"none": 84.4, "current": 62.9}
CONTENTION, FP32 = 0.4, te_fsdp.MixedPrecisionPolicy()
# The host issues a step of FP8 weights in this number of ms, by two eager rows; other hosts are faster than their GPUs.
HOSTS = {"FP8": 86.3, "FP8, later": 71.7}
#: Weights, setting -> job, sizes, measured ms, estimate.
ROWS = {
    ("bf16", "optim_grads_params"): ({}, {}, 100.8, 101.2),
    ("bf16, FP8 compute", "optim_grads_params"): ({"recipe": "current"}, {}, 80.6, 79.7),
    ("FP8", "optim_grads_params"): ({"recipe": "current", "quantized_weights": True}, {}, 95.5, 86.3),
    ("bf16", "no_shard, fp32 gradients"): ({"strategy": "no_shard", "precision": FP32}, {}, 113.2, 111.3),
    ("bf16", "optim, fp32 gradients"): ({"strategy": "optim", "precision": FP32}, {}, 100.6, 100.4),
    ("bf16", "optim_grads_params, fp32 gradients"): ({"precision": FP32}, {}, 106.3, 105.3),
    ("bf16", "HSDP 2 x 1, fp32 gradients"): (
        {"precision": FP32},
        {"dp_replicate": 2, "dp_shard": 1},
        115.6,
        109.6,
    ),
    ("bf16", "HFSDP 2 x 1, fp32 gradients"): (
        {"precision": FP32, "outer_strategy": "optim"},
        {"dp_replicate": 2, "dp_shard": 1},
        121.1,
        107.1,
    ),
    ("FP8", "no_shard, fp32 gradients"): (
        {"recipe": "current", "quantized_weights": True, "strategy": "no_shard", "precision": FP32},
        {},
        89.8,
        89.8,
    ),
    ("FP8", "optim_grads_params, fp32 gradients"): (
        {"recipe": "current", "quantized_weights": True, "precision": FP32},
        {},
        89.8,
        86.3,
    ),
    ("FP8", "optim_grads, fp32 gradients"): (
        {"recipe": "current", "quantized_weights": True, "strategy": "optim_grads", "precision": FP32},
        {},
        90.4,
        86.3,
    ),
    ("FP8", "optim, fp32 gradients"): (
        {"recipe": "current", "quantized_weights": True, "strategy": "optim", "precision": FP32},
        {},
        80.2,
        86.3,
    ),
    ("FP8, later", "optim_grads_params"): ({"recipe": "current", "quantized_weights": True}, {}, 76.6, 73.6),
    ("FP8, CUDA graphs", "optim_grads_params"): (
        {"recipe": "current", "quantized_weights": True},
        {},
        75.8,
        73.6,
    ),
}


def test_estimated_step_times_match_h200_measurements(hopper, monkeypatch):
    """Estimates are within 15 %. The page shows this table."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import plan_memory

    sizes = SimpleNamespace(layers=8, hidden=4096, ffn=14336, heads=32, groups=8, vocabulary=0, experts=0)
    build = partial(plan_memory.build, sizes)
    page, rates = (ROOT / "benchmarks/README.md").read_text(), {}
    for (weights, setting), (options, axes, measured, estimate) in ROWS.items():
        job = Job(build, optimizer="fused-adam", units=("layers.*",), **options)
        result = plan(job, Sizes(**{"dp_shard": 2, **axes}))
        if not rates:  # the optimizer of the rows without communication is that of this one
            optimizer = result.time(Machine(1)).optimizer
            flops = sum(result.flops.values()) / 1e12
            rates = {recipe: flops / (ms / 1e3 - optimizer) for recipe, ms in LIMIT.items()}
        machine = Machine(rates[job.recipe], contention=CONTENTION, host=HOSTS.get(weights, 0.0))
        got = 1e3 * result.time(machine).seconds
        assert got == pytest.approx(estimate, abs=0.06), (weights, setting, got)
        assert abs(got / measured - 1) < 0.15
        assert (
            f"| {weights} | {setting} | {measured} | {estimate} | {estimate / measured - 1:+.0%} |".replace(
                "%", " %"
            )
            in page
        ), (weights, setting)
    for name, rates_in_page in (("BF16", f"{rates['none']:.0f}"), ("FP8", f"{rates['current']:.0f}")):
        assert f"{rates_in_page} TFLOP/s in {name}" in page


def test_expected_step_times_match_the_recorded_files():
    files = ("step-h200x2", "step-h200x2-transport")
    rows, later = (json.loads((ROOT / f"benchmarks/results/{f}.json").read_text())["rows"] for f in files)
    earlier = json.loads((ROOT / "benchmarks/results/strategies-h200x2.json").read_text())["results"]

    def ms(rows, library, weights, setting="zero3", key="ms"):
        expected = library, weights, setting
        return next(round(r[key], 1) for r in rows if (r["library"], r["weights"], r["setting"]) == expected)

    assert {"none": ms(rows, "limit", "bf16"), "current": ms(rows, "limit", "fp8-compute")} == LIMIT
    hosts = {
        name: ms(of, "te_fsdp", "fp8", key="host_ms") for name, of in zip(HOSTS, (rows, later), strict=True)
    }
    assert hosts == HOSTS
    measured = {
        "bf16": ms(rows, "te_fsdp", "bf16"),
        "bf16, FP8 compute": ms(rows, "te_fsdp", "fp8-compute"),
        "FP8": ms(rows, "te_fsdp", "fp8"),
        "FP8, later": ms(later, "te_fsdp", "fp8"),
        "FP8, CUDA graphs": ms(rows, "te_fsdp", "fp8", "zero3 graph"),
    }
    for (weights, setting), (_, _, value, _) in ROWS.items():
        word = setting.removesuffix(", fp32 gradients").replace(" 2 x 1", "")
        if word == setting:
            assert value == measured[weights]
            continue
        word = f"optim_grads_params {word}" if word in ("HSDP", "HFSDP") else word
        assert value == round(earlier[f"{weights.lower()} {word} te_fsdp"]["ms"], 1)


def test_step_time_matches_closed_forms(te):
    """Two microbatches on two nodes with two ranks each, tp within a node and dp_shard across nodes."""
    job = Job(CONFIG, sequence=TOKENS, microbatches=2, recompute=True)
    result = plan(job, Sizes(dp_shard=2, tp=2))
    # A rank of tp has half of each product in layers, and the head for half of the tokens; three times, and once again.
    assert result.flops["products"] == 2 * 4 * 2 * TOKENS * (LAYERS * LAYER // 2 + VOCABULARY * HIDDEN // 2)
    assert result.flops["attention"] == 2 * 4.5 * LAYERS * 4 * TOKENS * TOKENS / 2 * WIDTH * HEADS / 2
    machine = Machine(1e-3, 2e-3, within=2.0, between=1.0, memory=10.0, node=2, contention=0.5)
    step, sent = result.time(machine), result.sent()
    compute = result.flops["products"] / 1e9 + result.flops["attention"] / 2e9
    assert step.compute == pytest.approx(compute)
    assert step.links == pytest.approx({"dp_shard": sent["dp_shard"] / 1e9, "tp": sent["tp"] / 2e9})
    edge = 2 * result.largest_unit / 2 / 1e9
    assert step.exposed == pytest.approx({"dp_shard": edge, "tp": sent["tp"] / 2e9})
    assert step.contended == pytest.approx(0.5 * (sent["dp_shard"] / 1e9 - edge))
    states = result.held_bytes - result.held["weights, 16 bits"]
    updated = 2 * states + result.gradients + result.held["weights, 16 bits"]
    assert step.optimizer == pytest.approx(updated / 1e10)
    assert step.seconds == pytest.approx(compute + edge + sent["tp"] / 2e9 + step.contended + step.optimizer)
    slow = result.time(Machine(1e-3, host=1e9))
    assert slow.seconds == pytest.approx(1e6) and slow.waits > 0 and step.waits == 0
    fast = result.time(Machine(1e9, between=1.0, node=2))  # what no computation hides, the step waits for
    assert fast.exposed["dp_shard"] == pytest.approx(sent["dp_shard"] / 1e9, rel=1e-3)


def test_context_parallel_step_time_matches_closed_forms(te):
    whole, half = (
        plan(Job(CONFIG, sequence=TOKENS), item) for item in (Sizes(dp_shard=2), Sizes(dp_shard=1, cp=2))
    )
    assert {name: 2 * value for name, value in half.flops.items()} == whole.flops
    step = half.time(Machine(1e-3))
    rings = LAYERS * TOKENS / 2 * 2 * GROUPS * WIDTH * 2 * 3
    assert step.links["cp"] == pytest.approx(rings / 140e9) and step.exposed["cp"] == 0


@pytest.mark.parametrize(
    "wrong, text",
    [
        ({"tflops": 0.0}, "tflops"),
        ({"tflops": 1.0, "within": -1.0}, "within"),
        ({"tflops": 1.0, "contention": 2}, "fraction"),
        ({"tflops": 1.0, "host": -1.0}, "host"),
    ],
)
def test_machine_rejects_invalid_numbers(wrong, text):
    with pytest.raises(PlacementError, match=text):
        Machine(**wrong)


def test_older_plan_without_operation_counts_is_rejected(te):
    result = plan(Job(CONFIG, sequence=TOKENS), Sizes())
    old = json.loads(json.dumps(result.as_json()))
    del old["flops"]
    with pytest.raises(CheckpointError, match="contains no operation counts"):
        Plan.from_json(old).time(Machine(1.0))
