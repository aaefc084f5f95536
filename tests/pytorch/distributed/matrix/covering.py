"""Pairwise covering: few cases in which every pair of values of any two factors occurs, unless it never can.

A greedy algorithm in the manner of AETG (Cohen et al., IEEE Transactions on Software Engineering 23 (1997) 437), made
deterministic. Written here since the machines with GPUs have no package for it.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import combinations, product
from typing import Any

import numpy

Pair = tuple[tuple[str, Any], tuple[str, Any]]
Allowed = Callable[[dict[str, Any]], bool]
CANDIDATES = 30


def pairs_of(case: Mapping[str, Any], names: Sequence[str]) -> Iterator[Pair]:
    """Yield all pairs of values in a case; `names` fixes their order."""
    for first, second in combinations(names, 2):
        yield (first, case[first]), (second, case[second])


def all_cases(factors: Mapping[str, Sequence[Any]], allowed: Allowed) -> Iterator[dict[str, Any]]:
    """Yield the full product, without what is not allowed."""
    for values in product(*factors.values()):
        case = dict(zip(factors, values, strict=True))
        if allowed(case):
            yield case


def covering(
    factors: Mapping[str, Sequence[Any]],
    allowed: Allowed,
    cost: Callable[[dict[str, Any]], int] = lambda case: 0,
    seed: int = 0,
) -> list[dict[str, Any]]:
    """Return cases that contain every pair of values which some allowed case contains; always the same ones for a seed.

    Args:
        factors: Name -> values.
        allowed: Whether a whole case may occur.
        cost: Of cases that bring equally many missing pairs the cheapest is taken.
        seed: Decides between those that are equal in this too; 0 takes the first.
    """
    everything = list(all_cases(factors, allowed))
    if seed:
        random.Random(seed).shuffle(everything)
    numbers = _numbered(everything, tuple(factors))
    return [everything[place] for place in _greedy(list(numbers), lambda place: cost(everything[place]))]


def _numbered(cases: Sequence[Mapping[str, Any]], names: Sequence[str]) -> numpy.ndarray:
    """Return the pairs of each case as a row of numbers, in the order of the pairs' texts."""
    columns = {name: list(dict.fromkeys(case[name] for case in cases)) for name in names}
    where = {name: {value: place for place, value in enumerate(values)} for name, values in columns.items()}
    chosen = {name: numpy.array([where[name][case[name]] for case in cases]) for name in names}
    rows, texts = [], []
    for first, second in combinations(names, 2):
        rows.append(len(texts) + chosen[first] * len(columns[second]) + chosen[second])
        pairs = product(columns[first], columns[second])
        texts += [repr(((first, one), (second, two))) for one, two in pairs]
    order = numpy.empty(len(texts), dtype=int)
    order[sorted(range(len(texts)), key=texts.__getitem__)] = numpy.arange(len(texts))
    return order[numpy.stack(rows, axis=1)]


def cover(
    contents: Sequence[frozenset[Any]],
    cost: Callable[[int], int] = lambda place: 0,
    chosen: Sequence[int] = (),
) -> list[int]:
    """Return places of sets that together contain all elements: those chosen already, then few others, greedily.

    Args:
        contents: What each case contains: pairs of values, or whatever else is to occur.
        cost: By place. Of cases that bring equally many missing things the cheapest is taken, then the first.
        chosen: Places that are taken in any case.
    """
    items = sorted(set().union(*contents), key=repr)
    number = {item: place for place, item in enumerate(items)}
    return _greedy(
        [numpy.array([number[item] for item in content], dtype=int) for content in contents], cost, chosen
    )


def _greedy(
    contents: Sequence[numpy.ndarray], cost: Callable[[int], int], chosen: Sequence[int] = ()
) -> list[int]:
    """Run `cover` on numbers."""
    items = numpy.concatenate([*contents, numpy.empty(0, dtype=int)])
    holders = numpy.repeat(numpy.arange(len(contents)), [len(content) for content in contents])
    holders = holders[numpy.argsort(items, kind="stable")]
    held = numpy.bincount(items)
    ends = numpy.cumsum(held)
    taken, missing = list(chosen), held > 0
    for place in taken:
        missing[contents[place]] = False
    choice = random.Random(0)
    while missing.any():
        # The thing that fewest cases could still bring, and of a sample of those the one that brings most others.
        (candidates,) = missing.nonzero()
        wanted = candidates[numpy.argmin(held[candidates])]
        places = holders[ends[wanted] - held[wanted] : ends[wanted]].tolist()
        sample = places if len(places) <= CANDIDATES else choice.sample(places, CANDIDATES)
        best = max(sample, key=lambda place: (missing[contents[place]].sum(), -cost(place)))
        taken.append(best)
        missing[contents[best]] = False
    return taken
