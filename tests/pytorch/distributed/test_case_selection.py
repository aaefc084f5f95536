"""Selection of test cases: cases that guard a fault always run, all pairs of values occur, the rest rotates."""

from __future__ import annotations

from itertools import combinations, product

import pytest
from matrix.rotation import COVER_DAYS, chosen, values_of
from test_harness_pytest import run_sample

FACTORS = {
    "mesh": ["dp4", "tp4", "hsdp", "one"],
    "recipe": ["none", "current", "mxfp8"],
    "units": [1, 2, 3],
    "sp": [0, 1],
}
PRODUCT = [dict(zip(FACTORS, values, strict=True)) for values in product(*FACTORS.values())]
# No product: separate rows, options as a dict, and combinations that do not occur.
ROWS = [
    {"mesh": "dp4", "how": {"strategy": "optim", "units": 1}},
    {"mesh": "dp4", "how": {"strategy": "optim"}},
    {"mesh": "tp4", "how": {"strategy": "no_shard"}},
    {"mesh": "tp4", "how": {"strategy": "optim"}},
    {"mesh": "one", "how": {}},
]
GUARD = {"mesh": "hsdp", "recipe": "current", "units": 2, "sp": 1}


def things(case: dict, strength: int) -> set:
    return set(combinations(sorted(values_of(case).items()), strength))


@pytest.mark.parametrize("strength", [1, 2])
@pytest.mark.parametrize("cases", [PRODUCT, ROWS], ids=["product", "rows"])
def test_all_pairs_of_values_are_covered(cases, strength):
    """Check the cases of ``COVER_DAYS`` seeds together."""
    wanted = set().union(*(things(case, strength) for case in cases))
    for first in range(0, 6, COVER_DAYS):
        days = [chosen(cases, strength=strength, seed=first + day) for day in range(COVER_DAYS)]
        assert all(taken == sorted(set(taken)) for taken in days)
        places = set().union(*days)
        assert set().union(*(things(cases[place], strength) for place in places)) == wanted
        assert max(map(len, days)) <= len(places) / COVER_DAYS + 2


def test_covering_array_is_near_the_minimum():
    """Check against 4 x 3 cases, the minimum, since no pair of a mesh and a recipe shares a case."""
    taken = sorted({place for day in range(COVER_DAYS) for place in chosen(PRODUCT, seed=COVER_DAYS + day)})
    assert 12 <= len(taken) <= 18
    stride = PRODUCT[:: len(PRODUCT) // len(taken)]
    pairs = set().union(*(things(case, 2) for case in PRODUCT))
    assert set().union(*(things(case, 2) for case in stride)) < pairs


@pytest.mark.parametrize("strength", [0, 1, 2])
def test_named_cases_run_with_every_seed(strength):
    both = [place for place, case in enumerate(PRODUCT) if case["mesh"] == "one" and case["units"] == 3]
    for seed in range(20):
        taken = chosen(PRODUCT, [GUARD, {"mesh": "one", "units": 3}], strength=strength, seed=seed)
        assert {PRODUCT.index(GUARD), *both} <= set(taken)
    without = [chosen(PRODUCT, strength=strength, seed=seed) for seed in range(20)]
    assert not all(PRODUCT.index(GUARD) in taken for taken in without)


@pytest.mark.parametrize("cases", [PRODUCT, ROWS, ROWS[:1]], ids=["product", "rows", "one"])
@pytest.mark.parametrize("strength", [0, 1, 2])
def test_seeds_repeat_and_rotate_through_all_cases(cases, strength):
    first = 740_000  # any seed, as days are
    parts = [chosen(cases, strength=strength, seed=first + day) for day in range(len(cases))]
    assert parts == [chosen(cases, strength=strength, seed=first + day) for day in range(len(cases))]
    assert set().union(*parts) == set(range(len(cases)))
    if len(parts[0]) < len(cases):
        assert len({tuple(part) for part in parts}) > 1


@pytest.mark.parametrize("days", [1, 2, 3, 9])
def test_each_case_runs_within_the_rotation(days):
    parts = [chosen(ROWS, [ROWS[0]], days=days, seed=740_000 + day) for day in range(days)]
    assert all(0 in part and part == sorted(part) for part in parts)
    assert set().union(*parts) == set(range(len(ROWS)))
    assert max(map(len, parts)) <= 1 + -(-len(ROWS) // days)


SAMPLE = """
import pytest

@pytest.mark.covering(always=[{"case": "c3"}], strength=0)
@pytest.mark.parametrize("case", ["c0", "c1", "c2", "c3", "c4"])
def test_rotated(case): ...

def test_other(): ...
"""


@pytest.mark.cpu
def test_matrix_options(tmp_path, python):
    """Check that the seed is printed and accepted, and that -k selects before the covering."""
    output = run_sample(python, tmp_path, SAMPLE, "--device", "cpu", "--matrix-seed", "1", "-k", "not c0")
    assert "--matrix-seed 1\n" in output, output
    ran = {line.split(" ")[0].split("::")[1] for line in output.splitlines() if "PASSED" in line}
    assert ran == {"test_rotated[c2]", "test_rotated[c3]", "test_other"}, output  # of c1 to c4 the second
    output = run_sample(python, tmp_path, SAMPLE.replace('"case": "c3"', '"case": "z"'), "--device", "cpu")
    assert "`covering` names a case that is none: {'case': 'z'}" in output, output
