"""Levels of checks.

"off" calls none. Each level finds its mistakes and not those above. No level changes a result.

The negative control of every mistake is the level below, at which the same program ends without an error.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch
from strategies import check_levels

from te_fsdp.check_points import LEVELS
from te_fsdp.checks import CHECKS

ROOT = Path(__file__).resolve().parents[3]
MESHES = {"dp": {"dp_shard": 2}, "tp": {"dp_shard": 1, "tp": 2}, "hsdp": {"dp_replicate": 2, "dp_shard": 1}}
#: Mistake -> lowest level that finds it, and the error.
FOUND = {
    "values": ("setup", "InitError"),
    "inputs": ("first_steps", "InputError"),
    "stale backward": ("first_steps", "OrderError"),
    "later inputs": ("full", "InputError"),
    "later copies": ("full", "InitError"),
    "later options": ("full", "MeshError"),
    "later gradients": ("full", "MeshError"),
}


@pytest.mark.cpu  # on GPUs a backward's Python runs on a thread that torch starts, which nothing can profile
@pytest.mark.ranks(2)
@pytest.mark.parametrize("mesh", MESHES)
def test_level_off_calls_no_check(pool, mesh):
    assert pool.run(check_levels.calls_of_checks, 2, axes=MESHES[mesh], checks="off") == [[], []]
    # The count works: set-up calls the checks of set-up only, and the default level more.
    for found in pool.run(check_levels.calls_of_checks, 2, axes=MESHES[mesh], checks="setup"):
        assert dict(found)["compare_models"] == 1
        assert "compare_computation" not in dict(found)
        assert "refuse_replaced" not in dict(found)
    for found in pool.run(check_levels.calls_of_checks, 2, axes=MESHES[mesh], checks=None):
        assert dict(found)["compare_computation"] > 0
        assert dict(found)["refuse_replaced"] == 4
        assert "compare_gradient_shapes" not in dict(found)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("level", LEVELS)
def test_each_level_detects_its_mistakes(pool, level):
    rank = LEVELS.index(level)
    expected = {name: error if rank >= LEVELS.index(at) else "" for name, (at, error) in FOUND.items()}
    assert pool.run(check_levels.found_at, 2, checks=level) == [expected] * 2


@pytest.mark.ranks(2)
def test_levels_do_not_change_results(pool):
    """Check that weights after three steps have the same bits at every level, over dp_shard, tp and dp_replicate."""
    expected = pool.run(check_levels.right_programs, 2, checks="first_steps")
    for level in ("off", "setup", "full"):
        for found, wanted in zip(
            pool.run(check_levels.right_programs, 2, checks=level), expected, strict=True
        ):
            assert all(map(torch.equal, found, wanted))


@pytest.mark.cpu
@pytest.mark.ranks(2)
@pytest.mark.covering(always=[{"recipe": None, "mesh": "dp"}], strength=1)
@pytest.mark.parametrize("mesh", ["dp", "tp"])
@pytest.mark.parametrize(
    ("recipe", "is_fused"),
    [(None, False), ("Float8CurrentScaling", False), ("Float8CurrentScaling", True)],
)
def test_level_off_saves_a_quarter_of_the_calls(pool, mesh, recipe, is_fused):
    """Check calls of a steady-state step and of its optimizer step. Quantization adds the same calls at every level."""
    options = {"axes": MESHES[mesh], "recipe": recipe, "is_fused": is_fused}
    default = pool.run(check_levels.calls_of_step, 2, checks="first_steps", **options)
    off = pool.run(check_levels.calls_of_step, 2, checks="off", **options)
    for part in ("all", "optimizer"):
        for now, before in zip(off, default, strict=True):
            assert now[part] <= 0.75 * before[part], (part, off, default)


@pytest.mark.ranks(2)
def test_different_levels_on_ranks_raise(pool):
    """Check that both ranks raise and name the other level. They would run different collectives."""
    first, second = pool.run(check_levels.levels_by_rank, 2)
    assert "checks='off'" in first and "checks='full'" in first, first
    assert "checks='off'" in second and "checks='full'" in second, second


@pytest.mark.ranks(2)
@pytest.mark.parametrize("wanted", [False, True])
def test_check_inputs_alias_warns(pool, wanted):
    level, error = ("first_steps", "InputError") if wanted else ("setup", "")
    warning = f"fully_shard: check_inputs is deprecated: use checks='{level}'"
    assert (
        pool.run(check_levels.alias, 2, check_inputs=wanted) == [{"warnings": [warning], "error": error}] * 2
    )


@pytest.mark.ranks(2)
def test_check_inputs_false_keeps_other_checks(pool):
    """Check that `check_inputs=False` keeps the checks of other mistakes, unlike level "setup"."""
    expected = {"inputs": "", "stale backward": "OrderError"}
    assert pool.run(check_levels.found_without_inputs, 2) == [expected] * 2


@pytest.mark.cpu
@pytest.mark.ranks(2)
def test_documented_costs_are_measured(pool):
    """Collectives and bytes exactly. Calls within a tenth, because versions of torch and TE differ in a few.

    The first step also searches models of earlier tests in these workers, so its calls have a lower bound alone.
    """
    spec = importlib.util.spec_from_file_location("check_costs", ROOT / "scripts" / "check_costs.py")
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    written, measured = script.rows(script.PAGE.read_text()), script.rows(pool.run(check_levels.costs, 2)[0])
    assert [row[:2] for row in written] == [row[:2] for row in measured]
    for page, now in zip(written, measured, strict=True):
        for column, (one, other) in enumerate(zip(page[2:], now[2:], strict=True)):
            one, other = (int(number.replace(",", "")) for number in (one, other))
            more = 0 if column == 0 and one < other else abs(one - other)
            assert more <= (0.1 * other if column in (0, 3) else 0), (page, now)


def test_table_of_checks_names_existing_checks():
    """Check that every check has a name, a function with a docstring, and an error class of te_fsdp."""
    for check in CHECKS:
        assert check.name and check.value.__module__.startswith("te_fsdp.checks.")
        assert check.value.__doc__
    assert len({(check.when, check.value) for check in CHECKS}) == len(CHECKS)
