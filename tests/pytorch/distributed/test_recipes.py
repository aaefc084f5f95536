"""Ports of public recipes as docs/recipes.md describes them.

Changed lines, losses and checkpoints are compared with the recipes.
"""

from __future__ import annotations

import ast
import difflib
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from recipes import bodies

#: docs/recipes.md says that they were measured under emulation. GPUs have no packed attention in fp32.
pytestmark = pytest.mark.cpu

BASE = {"width": 32, "heads": 4, "layers": 2, "tied": False, "fp8": False, "experts": 0, "stacked": False}
#: Larger than the recipes' initializer range, so that every layer decides about the loss.
BASE |= {"dtype": torch.float32, "std": 0.2}
FP8 = {**BASE, "fp8": True, "dtype": torch.bfloat16, "std": 0.02}
CASES: dict[str, tuple[str, dict[str, Any], list[dict[str, int]]]] = {
    "llama": ("llama", BASE, [{"dp_shard": 2}, {"dp_shard": 2, "tp": 2}]),
    "llama, tied": ("llama", {**BASE, "tied": True}, [{"dp_shard": 2, "tp": 2}, {"dp_shard": 2}]),
    "llama, FP8": ("llama", FP8, [{"dp_shard": 2}, {"dp_shard": 1}]),
    "llama, FP8, tp": ("llama", FP8, [{"dp_shard": 2}, {"dp_shard": 1, "tp": 2}]),
    "esm2": ("esm2", BASE, [{"dp_shard": 2}, {"dp_shard": 2, "tp": 2}]),
    "mixtral": ("mixtral", {**BASE, "experts": 4}, [{"dp_shard": 2, "ep": 2}, {"dp_shard": 1, "ep": 4}]),
    "mixtral, stacked": (
        "mixtral",
        {**BASE, "experts": 4, "stacked": True},
        [{"dp_shard": 2, "ep": 2}, {"dp_shard": 1, "ep": 4}],
    ),
}
#: Losses are about 4. Sums of fp32 in a different order: 2^-24 of each of ten chained sums, after up to four steps.
NEAR = 1e-5
#: Each rank of tp quantizes activations with its own scale, which rounds some to a different value of E4M3, 2^-4 away,
#: and sums in bf16. Most of it cancels over 48 tokens and 32 channels.
NEAR_FP8 = 2**-6


def largest(ranks: list[dict[str, Any]]) -> float:
    """Return the largest difference of a loss from that of one process."""
    pairs = [pair for rank in ranks for pair in zip(rank["losses"], rank["expected"], strict=True)]
    assert len(pairs) == 2 * len(ranks)
    return max(abs(loss - expected) for loss, expected in pairs)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("case", CASES)
def test_losses_equal_one_process(pool, tmp_path, case):
    """Check two steps on a mesh and two on a different one, which the recipe's own DCP code loads."""
    kind, config, meshes = CASES[case]
    found, before = [], 0
    for axes, steps in zip(meshes, ((0, 2), (2, 4)), strict=True):
        ranks = math.prod(axes.values())
        arguments = {"kind": kind, "config": config, "axes": axes, "steps": steps, "before": before}
        before = ranks // axes.get("tp", 1)
        found.append(largest(pool.run(bodies.train, ranks, folder=str(tmp_path / "saved"), **arguments)))
    near = {"llama, FP8": 0.0, "llama, FP8, tp": NEAR_FP8}.get(case, NEAR)
    assert max(found) <= near, found


@pytest.mark.ranks(2)
def test_original_recipe_trains(pool, tmp_path):
    """Check the script before the port. Negative control: one process with different initial weights."""
    arguments = {"kind": "llama", "config": BASE, "axes": None, "steps": (0, 2)}
    assert largest(pool.run(bodies.train, 2, folder=str(tmp_path / "stock"), **arguments)) < NEAR
    wrong = pool.run(bodies.train, 2, folder=str(tmp_path / "wrong"), is_wrong=True, **arguments)
    assert largest(wrong) > 100 * NEAR


@pytest.mark.ranks(2)
def test_uninitialized_rotary_frequencies_raise(pool):
    """Check a buffer that its constructor computes on meta."""
    for text in pool.run(bodies.error_of_meta_frequencies, 2, config=BASE):
        assert "rotary_emb.inv_freq" in text


def test_port_changes_six_lines():
    """Check that the ported script changes six lines: four for FSDP2, one for tp layers, one for the data."""
    text = (Path(__file__).parent / "recipes/scripts.py").read_text()
    functions = {node.name: node for node in ast.parse(text).body if isinstance(node, ast.FunctionDef)}
    before, after = (
        [line for statement in functions[name].body[1:] for line in ast.unparse(statement).splitlines()]
        for name in ("stock", "ported")
    )
    changes = difflib.ndiff(before, after)
    changed = [line[2:].strip() for line in changes if line.startswith("+ ")]
    words = ("Meshes.build", "keywords", "fully_shard", "materialize", "data_rank", "clip_grad_norm_")
    assert [word for line in changed for word in words if word in line] == [*words]
    assert len(changed) == 6
