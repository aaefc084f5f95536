"""Compare random training configurations with stock TE in one process: `python scripts/search --count 300`.

Prints a line for each configuration, and at the end how many of each value were tried and all deviations. The exit
status is 1 if there was one. `--first N --count 1` repeats configuration N; the draw depends on the seed alone.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from dataclasses import fields
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests" / "pytorch" / "distributed"), str(ROOT)]

from harness import BodyFailed, WorkerPool  # noqa: E402
from matrix import search  # noqa: E402
from matrix.configurations import Configuration, draw  # noqa: E402

#: Seconds a configuration may take.
LIMIT = 300


def try_one(pool: WorkerPool, drawn: Configuration, *, spoil: bool = False) -> str:
    """Train one configuration. Return what deviated, or nothing."""
    pool.arch = drawn.arch
    try:
        pool.run(search.trial, drawn.ranks, timeout=LIMIT, drawn=drawn, spoil=spoil)
    except BodyFailed as error:
        return str(error)
    return ""


def table(tried: list[Configuration]) -> str:
    """Return a table of how often each value of each factor was tried."""
    lines = []
    for field in fields(Configuration):
        counts = Counter(str(getattr(drawn, field.name)) for drawn in tried)
        most = ", ".join(f"{value or '()'} {count}" for value, count in counts.most_common(8))
        lines.append(f"  {field.name:18} {most}")
    return "\n".join(lines)


def main() -> int:
    """Run the search from the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0, help="of the draws (default 0)")
    parser.add_argument("--first", type=int, default=0, help="number of the first configuration (default 0)")
    parser.add_argument("--count", type=int, default=300, help="configurations to train (default 300)")
    parser.add_argument(
        "--seconds", type=float, default=float("inf"), help="start no configuration later (default: no limit)"
    )
    parser.add_argument("--ranks", type=int, default=4, help="largest world to use (default 4)")
    options = parser.parse_args()
    started, tried, deviations = time.monotonic(), list[Configuration](), dict[int, str]()
    with WorkerPool(options.ranks) as pool:
        number = options.first
        while len(tried) < options.count and time.monotonic() - started < options.seconds:
            drawn = draw(options.seed, number)
            if drawn.ranks <= options.ranks:
                result = try_one(pool, drawn)
                tried.append(drawn)
                word = "DEVIATES" if result else "equal"
                seconds = time.monotonic() - started
                print(
                    f"[{seconds:6.0f} s] {len(tried)}/{options.count} {word:8} {number}: {drawn}", flush=True
                )
                if result:
                    deviations[number] = result
                    print("\n".join(line[:600] for line in result.splitlines()[:12]), flush=True)
            number += 1
    print(f"\n{len(tried)} configurations of seed {options.seed} in {time.monotonic() - started:.0f} s:")
    print(table(tried))
    print(f"{len(deviations)} deviate: {list(deviations)}")
    return bool(deviations)


if __name__ == "__main__":
    raise SystemExit(main())
