"""Every sharding strategy on every kind of data-parallel mesh, by value against one process.

By default every pair of factors' values occurs that 4 ranks can run; `--matrix full` runs all combinations, on up to
8 ranks.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from harness import BodyFailed
from strategies import arguments, bodies, step_costs
from strategies.cases import Case, chosen

#: Cases that share a start of the workers.
TOGETHER = 8


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "cases" in metafunc.fixturenames:
        how = metafunc.config.getoption("--matrix", "covering")
        by_ranks: dict[int, list[Case]] = {}
        for case in chosen(how):
            by_ranks.setdefault(case.ranks, []).append(case)
        params = []
        for ranks, cases in sorted(by_ranks.items()):
            for first in range(0, len(cases), TOGETHER):
                several = cases[first : first + TOGETHER]
                name = f"{ranks}ranks-{first // TOGETHER}"
                params.append(pytest.param(several, id=name, marks=pytest.mark.ranks(ranks)))
        metafunc.parametrize("cases", params)


def test_training_equals_one_process(pool, cases):
    outcomes = pool.run(bodies.training, cases[0].ranks, cases=[case.kwargs for case in cases])
    for outcome in outcomes:
        assert len(outcome) == len(cases)


@pytest.mark.covering(days=2)
@pytest.mark.ranks(4)
@pytest.mark.parametrize(
    ("broken", "case", "words"),
    [
        # Megatron-FSDP's HFSDP adds gradients up instead of averaging them: hidden under Adam, and under clipping.
        ("sum", Case("optim_grads_params", "hfsdp", 1, "plain", "2x2", "AdamW", 1), "norm"),
        ("sum", Case("optim", "none", 3, "microbatch", "dp2", "SGD", 1), "gradient"),
        # Its optim and no_shard strategies, and HSDP, never reduce if the last microbatch is not marked.
        ("unreduced", Case("optim", "none", 3, "plain", "dp2", "SGD", 1), "an unreduced gradient"),
        ("unreduced", Case("no_shard", "none", 3, "plain", "dp2", "SGD", 1), "an unreduced gradient"),
        (
            "unreduced",
            Case("optim_grads_params", "hsdp", 3, "plain", "2x2", "SGD", 1),
            "an unreduced gradient",
        ),
        # Its default corrupts accumulation by reducing what was reduced before.
        ("twice", Case("optim", "none", 3, "plain", "dp2", "SGD", 1), "updated"),
    ],
    ids=lambda value: str(value) if isinstance(value, Case) else None,
)
def test_negative_control_known_faults(pool, broken, case, words):
    with pytest.raises(BodyFailed, match=words):
        pool.run(bodies.training, case.ranks, cases=[case.kwargs], broken=broken)


# --- collectives and memory -----------------------------------------------------------------------------------------


def documented() -> dict[str, list[str]]:
    """Return rows of the docs' table of collectives: ``"strategy loop"`` -> cells."""
    text = (Path(__file__).parents[3] / "docs" / "strategies.md").read_text()
    found = re.findall(r"^\| `(\w+)` \| (`(?:plain|microbatch|no_sync)`.*?) \| (.*) \|$", text, re.MULTILINE)
    return {
        f"{strategy} {loop}": [cell.strip() for cell in cells.split("|")]
        for strategy, loops, cells in found
        for loop in re.findall(r"\w+", loops)
    }


def value(cell: str, microbatches: int, units: int) -> int:
    """Return the value of a product such as ``2 m u``."""
    result = 1
    for factor in cell.split():
        result *= {"m": microbatches, "u": units}.get(factor) or int(factor)
    return 0 if cell == "0" else result


UNITS = 3


@pytest.mark.parametrize(
    ("dp_replicate", "outer", "microbatches"),
    [
        pytest.param(1, "no_shard", 1, marks=pytest.mark.ranks(2)),
        pytest.param(1, "no_shard", 3, marks=pytest.mark.ranks(2)),
        pytest.param(2, "no_shard", 3, marks=pytest.mark.ranks(4)),
        pytest.param(2, "optim", 2, marks=pytest.mark.ranks(4)),
    ],
)
def test_documented_collectives_are_measured(pool, dp_replicate, outer, microbatches):
    table = documented()
    assert len(table) == len(step_costs.STRATEGIES) * len(step_costs.LOOPS)
    options = {"dp_replicate": dp_replicate, "outer": outer, "microbatches": microbatches}
    for outcome in pool.run(step_costs.collectives, 2 * dp_replicate, **options):
        assert len(outcome) == len(table) - (3 if outer == "optim" else 0)
        for name, calls in outcome.items():
            gathers, scatters, hsdp, alone, more = table[name]
            expected = {"all_gather": value(gathers, microbatches, UNITS)}
            expected["reduce_scatter"] = value(scatters, microbatches, UNITS)
            if outer == "optim":
                told = "microbatch" in name
                assert more == ("1 + u" if told else "1 + 1")
                expected["all_gather"] += 1
                expected["reduce_scatter"] += UNITS if told else 1
                expected["integers"] = int(told)
            else:
                expected["all_reduce"] = value(hsdp if dp_replicate > 1 else alone, microbatches, UNITS)
                if name.startswith("no_shard"):
                    expected["integers"] = expected["all_reduce"] // UNITS
            assert calls == {kind: count for kind, count in expected.items() if count}, name


@pytest.mark.ranks(2)
def test_no_unneeded_all_gathers(pool):
    table = documented()
    for outcome in pool.run(step_costs.gathers_without_root, 2, microbatches=3):
        assert outcome == {name: value(table[name][0], 3, 2) for name in outcome}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("strategy", step_costs.STRATEGIES)
def test_memory_per_rank(pool, strategy):
    for outcome in pool.run(step_costs.memory, 2, strategy=strategy):
        for when, (found, expected) in outcome.items():
            assert found == pytest.approx(expected, rel=0.01), (when, found, expected)


# --- arguments and formats ------------------------------------------------------------------------------------------


@pytest.mark.ranks(2)
def test_wrong_arguments_raise(pool):
    assert pool.run(arguments.refused, 2, dp_replicate=2) == [len(arguments.REFUSED)] * 2


@pytest.mark.ranks(1)
@pytest.mark.parametrize(
    ("strategy", "expected"),
    [
        pytest.param(None, {"": "optim_grads_params"}, id="default"),
        pytest.param("optim", {"": "optim", "blocks.0": "optim", "blocks.1": "optim"}, id="one"),
        # A container hands it on to its children; the root has the default.
        pytest.param(
            {"blocks": "optim"},
            {"": "optim_grads_params", "blocks.0": "optim", "blocks.1": "optim"},
            id="container",
        ),
        # A name beats a class; what is named becomes a unit.
        pytest.param(
            {"LayerNormMLP": "optim", "blocks.1": "optim_grads", "": "optim_grads", "head": "optim"},
            {"": "optim_grads", "blocks.0": "optim", "blocks.1": "optim_grads", "head": "optim"},
            id="names and classes",
        ),
        # Replicated parameters do not belong to FSDP2.
        pytest.param(
            {"blocks.0": "no_shard"},
            {"": "optim_grads_params", "blocks.1": "optim_grads_params"},
            id="no_shard",
        ),
    ],
)
def test_strategies_of_units(pool, strategy, expected):
    units = None if strategy is None else "blocks.*"
    assert pool.run(arguments.rows, 1, strategy=strategy, units=units) == [expected]


@pytest.mark.ranks(2)
@pytest.mark.parametrize("recipe", ["current", "mxfp8"])
def test_quantized_weights_under_every_strategy(pool, recipe):
    pool.run(arguments.quantized, 2, recipe=recipe)
