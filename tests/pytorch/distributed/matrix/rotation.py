"""Which cases of a test run today: those that guard a fault always, of the others a covering part that rotates.

A test requests it with the mark `covering`; tests/pytorch/distributed/conftest.py passes its cases to `chosen`.
"""

from __future__ import annotations

import dataclasses
import datetime
import random
from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any

from matrix.covering import cover

PAIRS = 2
#: Days over which the cases that cover all values, or pairs of them, are distributed.
COVER_DAYS = 5


def seed_of_today() -> int:
    """Return a different seed every day, the same on every machine with the same date."""
    return datetime.date.today().toordinal()


def seed_of(config: Any) -> int:
    """Return the seed of a run of pytest: `--matrix-seed`, else today's."""
    asked = config.getoption("--matrix-seed", default=None)
    return seed_of_today() if asked is None else asked


def values_of(parameters: Mapping[str, Any]) -> dict[str, str]:
    """Return the factors of a case and its value of each as text. A dict or dataclass has a factor per entry.

    Args:
        parameters: What a parametrized test is called with.
    """
    results: dict[str, str] = {}
    for name, value in parameters.items():
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            value = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        if isinstance(value, Mapping):
            results |= {f"{name}.{key}": _text(entry) for key, entry in value.items()}
        else:
            results[name] = _text(value)
    return results


def _text(value: Any) -> str:
    return getattr(value, "__qualname__", None) or repr(value)  # a function's repr holds its address


def is_named(parameters: Mapping[str, Any], wanted: Mapping[str, Any]) -> bool:
    """Return whether a case has all values of an entry of `always`: ``{"recipe": "current", "reshard": False}``."""
    return all(name in parameters and parameters[name] == value for name, value in wanted.items())


def chosen(
    cases: Sequence[Mapping[str, Any]],
    always: Sequence[Mapping[str, Any]] = (),
    *,
    strength: int = PAIRS,
    days: int = 0,
    shift: int = 0,
    seed: int,
) -> list[int]:
    """Return places of the cases to run, in their order.

    They are: all that `always` names; the one whose turn it is, so that as many seeds in a row as there are cases reach
    each of them; and a part of few others that bring what is missing of all pairs of values of two factors
    (`strength` 2) or of all values (1) that occur in `cases`, or none (0). The parts of `COVER_DAYS` seeds in a row,
    from a multiple of it, have them all.

    Args:
        cases: The parameters of each case.
        always: Values by parameter; a case that has all of an entry runs with every seed.
        strength: 2. Where nearly every pair occurs in a single case, so that pairs would be all cases, 1; where nearly
            every value does, 0.
        days: Instead of `strength`: run every case once in this number of days. For lists of cases that are not a
            product.
        shift: Added to `seed` where `days` is given.
        seed: Decides whose turn it is and between cases that bring equally much.
    """
    named = {place for place, case in enumerate(cases) if any(is_named(case, entry) for entry in always)}
    if days:
        return sorted(named | set(range((seed + shift) % min(days, len(cases)), len(cases), days)))
    factors = [values_of(case) for case in cases]
    names = sorted(
        {name for case in factors for name in case}
        - {name for name in factors[0] if len({case.get(name) for case in factors}) == 1}
    )
    contents = [
        frozenset(combinations([(name, case.get(name)) for name in names], min(strength, len(names))))
        for case in factors
    ]
    places = list(range(len(cases)))
    random.Random(seed // COVER_DAYS).shuffle(places)  # of equals `cover` takes the first
    taken = cover(
        [contents[place] for place in places],
        chosen=[index for index, place in enumerate(places) if place in named],
    )
    others = sorted({places[index] for index in taken} - named)
    return sorted(named | {seed % len(cases)} | set(others[seed % COVER_DAYS :: COVER_DAYS]))
