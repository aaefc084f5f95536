"""Pairwise covering: few cases in which every pair of values of any two factors occurs, unless it never can.

A greedy algorithm in the manner of AETG (Cohen et al., IEEE Transactions on Software Engineering 23 (1997) 437), made
deterministic. Written here since the machines with GPUs have no package for it.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import combinations, product
from typing import Any

Pair = tuple[tuple[str, Any], tuple[str, Any]]
Allowed = Callable[[dict[str, Any]], bool]
CANDIDATES = 30


def pairs_of(case: Mapping[str, Any], names: Sequence[str]) -> Iterator[Pair]:
    """All pairs of values in a case; `names` fixes their order."""
    for first, second in combinations(names, 2):
        yield (first, case[first]), (second, case[second])


def all_cases(factors: Mapping[str, Sequence[Any]], allowed: Allowed) -> Iterator[dict[str, Any]]:
    """The full product, without what is not allowed."""
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
    """Cases that contain every pair of values which some allowed case contains; always the same ones for a seed.

    Args:
        factors: Name -> values.
        allowed: Whether a whole case may occur.
        cost: Of cases that bring equally many missing pairs the cheapest is taken.
        seed: Decides between those that are equal in this too; 0 takes the first.
    """
    names = tuple(factors)
    everything = list(all_cases(factors, allowed))
    if seed:
        random.Random(seed).shuffle(everything)
    contents = [frozenset(pairs_of(case, names)) for case in everything]
    return [everything[place] for place in cover(contents, lambda place: cost(everything[place]))]


def cover(
    contents: Sequence[frozenset[Any]],
    cost: Callable[[int], int] = lambda place: 0,
    chosen: Sequence[int] = (),
) -> list[int]:
    """Places of sets that hold together what all sets hold: those chosen already, then few others, greedily.

    Args:
        contents: What each case contains: pairs of values, or whatever else is to occur.
        cost: By place. Of cases that bring equally many missing things the cheapest is taken, then the first.
        chosen: Places that are taken in any case.
    """
    holders: dict[Any, list[int]] = {}
    for place, things in enumerate(contents):
        for thing in things:
            holders.setdefault(thing, []).append(place)
    taken = list(chosen)
    missing = set(holders).difference(*(contents[place] for place in taken))
    order = sorted(missing, key=repr)
    choice = random.Random(0)
    while missing:
        # The thing that fewest cases could still bring, and of a sample of those the one that brings most others.
        wanted = min((thing for thing in order if thing in missing), key=lambda thing: len(holders[thing]))
        places = holders[wanted]
        sample = places if len(places) <= CANDIDATES else choice.sample(places, CANDIDATES)
        best = max(sample, key=lambda place: (len(contents[place] & missing), -cost(place)))
        taken.append(best)
        missing -= contents[best]
    return taken
