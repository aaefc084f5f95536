"""Check that docs/support.md matches the definitions of the test matrix."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "tests/pytorch/distributed"


def _load():
    spec = importlib.util.spec_from_file_location("support_table", ROOT / "scripts" / "support_table.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


support_table = _load()

from matrix import covering, definitions, rotation  # noqa: E402  (support_table puts its folder on the path)


@pytest.fixture(scope="module")
def text() -> str:
    return support_table.page()


@pytest.fixture(scope="module")
def default() -> list[definitions.Case]:
    return definitions.default()


def test_support_page_is_up_to_date(text):
    assert support_table.PAGE.read_text(encoding="utf-8") == text, "run: python scripts/support_table.py"


def test_support_page_lists_rejected_combinations(text):
    for case, refusal in definitions.refused():
        assert case.arch == "9.0" or refusal.reason in text


def test_covering_contains_every_valid_pair(default):
    names = tuple(definitions.FACTORS)
    pairs = {pair for case in definitions.full() for pair in covering.pairs_of(vars(case), names)}
    covered = {pair for case in default for pair in covering.pairs_of(vars(case), names)}
    assert covered == pairs and len(pairs) > 300


def test_covering_is_deterministic(default):
    """A process with a different hash seed, and so a different set order, gives the same covering."""
    program = "from matrix.definitions import default; print(*default(), sep='\\n')"
    printed = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": str(FOLDER), "PYTHONHASHSEED": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    assert printed.stdout.splitlines() == [str(case) for case in default]


def test_covering_omits_invalid_pairs():
    factors = {"a": (1, 2), "b": (1, 2), "c": (1, 2)}
    cases = covering.covering(factors, lambda case: not (case["a"] == 2 and case["b"] == 2))
    assert {(case["a"], case["b"]) for case in cases} == {(1, 1), (1, 2), (2, 1)}
    assert len(cases) < 6


def test_subset_has_every_format_on_every_mesh():
    cases = definitions.subset()
    places = {(case.recipe, case.weights, case.mesh) for case in cases}
    assert len(places) == 3 * 2 * 4 and all(definitions.supported(case) for case in cases)
    assert {case.module for case in cases} == set(definitions.MODULES)
    assert all(definitions.MESHES[case.mesh].ranks == 4 for case in cases)


def test_different_seed_covers_the_same_pairs(default):
    names = tuple(definitions.FACTORS)
    other = definitions.default(seed=740_000)
    assert other == definitions.default.__wrapped__(seed=740_000) and set(other) != set(default)
    pairs = [
        {pair for case in cases for pair in covering.pairs_of(vars(case), names)}
        for cases in (default, other)
    ]
    assert pairs[0] == pairs[1]
    assert len(other) < 1.2 * len(default), "as quick as the first"


def test_rotated_days_run_a_full_covering():
    """`COVER_DAYS` consecutive seeds run each case of one covering once. Later seeds use a different covering."""
    first = 740_000 - 740_000 % rotation.COVER_DAYS
    days = range(first, first + rotation.COVER_DAYS)
    whole = definitions.default(first)
    assert all(definitions.default.__wrapped__(seed) == whole for seed in days)
    assert set(definitions.default(first + rotation.COVER_DAYS)) != set(whole)
    parameters = [{"case": case} for case in whole]
    parts = [rotation.chosen(parameters, days=rotation.COVER_DAYS, seed=seed) for seed in days]
    assert sorted(place for part in parts for place in part) == list(range(len(whole)))
    assert max(map(len, parts)) <= len(whole) / rotation.COVER_DAYS + 1
