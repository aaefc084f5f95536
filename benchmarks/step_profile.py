"""Host time of a step of benchmarks/step.py, by package or function (--profile)."""

from __future__ import annotations

import cProfile
import pstats
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch

#: Part of a file's path -> package. The last part counts: a folder above an environment may have the name of a package.
PACKAGES = (
    ("/te_fsdp/", "te_fsdp"),
    ("/megatron_fsdp/", "megatron-fsdp"),
    ("/transformer_engine/", "transformer_engine"),
    ("/torch/distributed/fsdp/", "torch.distributed.fsdp"),
    ("/torch/distributed/tensor/", "torch.distributed.tensor"),
    ("/torch/distributed/", "torch.distributed"),
    ("/torch/autograd/", "torch.autograd"),
    ("/torch/optim/", "torch.optim"),
    ("/torch/nn/", "torch.nn"),
    ("/torch/", "torch"),
)
FUNCTIONS = 30


def package_of(file: str) -> str:
    """Return the package of a source file. Built-in functions have no file."""
    if file in ("~", ""):
        return "built-in functions"
    return _place_in(file)[1]


def _place_in(file: str) -> tuple[int, str]:
    """Return where the package begins in a path, and its name; ``(-1, "other")`` for other files."""
    places = [(file.rfind(part), len(part), package) for part, package in PACKAGES]
    start, _, package = max(places)
    return (start, package) if start >= 0 else (-1, "other")


def profile(step: Callable[[], Any], steps: int = 2) -> dict[str, Any]:
    """Return milliseconds and calls of a step by package, and the functions with most time. Runs ``steps`` steps.

    Backwards run on the calling thread, because cProfile either misses other threads or mixes them up (Python 3.12). A
    profile makes small calls look more expensive than they are.
    """
    profiler = cProfile.Profile()
    with torch.autograd.set_multithreading_enabled(False):
        step()
        profiler.enable()
        for _ in range(steps):
            step()
        profiler.disable()
    own, calls, functions = Counter[str](), Counter[str](), list[dict[str, Any]]()
    stats: Any = pstats.Stats(profiler)
    for (file, line, name), (_, count, total, cumulative, _) in stats.stats.items():
        package = package_of(file)
        own[package] += total
        calls[package] += count
        short = file[_place_in(file)[0] + 1 :]
        functions.append(
            {
                "function": name if file == "~" else f"{short}:{line} {name}",
                "own_ms": 1e3 * total / steps,
                "ms": 1e3 * cumulative / steps,
                "calls": count / steps,
            }
        )
    functions.sort(key=lambda row: row["own_ms"], reverse=True)
    packages = {p: {"own_ms": 1e3 * ms / steps, "calls": calls[p] / steps} for p, ms in own.most_common()}
    return {"packages": packages, "functions": functions[:FUNCTIONS]}


def text(title: str, found: dict[str, Any]) -> str:
    """Return a profile as text."""
    lines = [title, f"{'own ms':>9} {'calls':>8}  package"]
    for package, row in found["packages"].items():
        lines.append(f"{row['own_ms']:9.2f} {row['calls']:8.0f}  {package}")
    lines.append(f"{'own ms':>9} {'ms':>9} {'calls':>8}  function")
    for row in found["functions"]:
        lines.append(f"{row['own_ms']:9.2f} {row['ms']:9.2f} {row['calls']:8.0f}  {row['function']}")
    return "\n".join([*lines, ""])
