"""Write the tables of docs/support.md: `python scripts/support_table.py`.

The tables are those of the test matrix and of the ledger of GPU tests. The text around them is
`scripts/support_page.md`.
`--check` writes nothing and fails if the page is out of date.
"""

from __future__ import annotations

import csv
import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "support.md"
TEMPLATE = ROOT / "scripts" / "support_page.md"
LEDGER = ROOT / "tests" / "gpu_ledger.csv"
sys.path.insert(0, str(ROOT / "tests" / "pytorch" / "distributed"))

from matrix.definitions import (  # noqa: E402
    FACTORS,
    FORMATS,
    MESHES,
    MODULES,
    Case,
    Refusal,
    default,
    exists,
    full,
    refusal,
    refused,
)

RECIPES = {
    "none": "none",
    "delayed": "DelayedScaling",
    "current": "Float8CurrentScaling",
    "block": "Float8BlockScaling",
    "mxfp8": "MXFP8BlockScaling",
    "nvfp4": "NVFP4BlockScaling",
    "hybrid": "CustomRecipe (hybrid)",
}
TITLES = {
    "linear": "Linear",
    "layernorm_linear": "LayerNormLinear",
    "mlp_gelu": "LayerNormMLP gelu",
    "mlp_swiglu": "LayerNormMLP swiglu",
    "attention": "MultiheadAttention",
    "transformer": "TransformerLayer",
    "grouped": "GroupedLinear",
}
ARCHS = {"9.0": "Hopper", "10.0": "Blackwell"}


class Area(NamedTuple):
    """One row of the table of tested machines.

    Attributes:
        name: Text of the first cell.
        files: Regular expression for the names of test files, without `test_` and `.py`; the first match counts.
        earlier: Cards on which an earlier version passed, by the number of GPUs.
    """

    name: str
    files: str
    earlier: dict[int, str]


AREAS = (
    Area(
        "data, tensor and sequence parallelism, HSDP",
        r"case_sel|te_fsdp_call|parameter_attr|parity|set_device_mesh|matrix|shard_axis|wgrad|non_te|load_state_dict_a"
        r"|quantized_weight_updates",
        {1: "H200", 2: "H200"},
    ),
    Area("HFSDP", r"hfsdp", {1: "H200", 2: "H200"}),
    Area(
        "strategies, accumulation, `no_shard`",
        r"accumulation|strategies|no_shard|grad_norm|unused|params_and_grads|steady_state|forward_pref|stream",
        {1: "H200", 2: "H200"},
    ),
    Area(
        "expert parallelism, one weight per expert",
        r"expert_parallel|expert_dispatch|grouped|harness_shared",
        {2: "H200"},
    ),
    Area("one weight for all experts", r"expert_single", {}),
    Area(
        "FP8 weights: delayed, current and block scaling",
        r"alignment|quantized|main_weights|tied",
        {1: "H200", 2: "H200"},
    ),
    Area("precision policies, report of NaN", r"precision|nan_report", {1: "H200", 2: "H200"}),
    Area(
        "copy-engine all-gathers, gradients without a copy",
        r"copy_engine|zero_copy|tp_replicated",
        {1: "H200", 2: "H200"},
    ),
    Area(
        "recomputation, CUDA graphs, `torch.compile`",
        r"recomputation|graphed|compile|out_of",
        {1: "H200", 2: "H200"},
    ),
    Area("context parallelism, attention backends", r"context_parallel|attention", {2: "H200"}),
    Area("pipelines", r"pipeline", {}),
    Area("optimizers, Muon", r"optimizers|muon|stale", {1: "H200", 2: "H200"}),
    Area(
        "checkpoints, resharding, plain DCP",
        r"checkpoint|reshard|dcp|user_meshes|user_sharded",
        {1: "H100", 2: "H200"},
    ),
    Area("Hugging Face models, rollout", r"huggingface|rollout", {1: "H100", 2: "H200"}),
    Area("initialization", r"initialization|init_weights|fused_ops|unshardable", {2: "H200"}),
    Area(
        "errors: inputs, equal shards, calls of some ranks",
        r"mismatched_coll|errors|mistakes|tp_init|tp_inputs|unsupported|te_faults",
        {1: "H200", 2: "H200", 4: "H200"},
    ),
    Area("Megatron-FSDP bridge", r"megatron", {2: "H200", 4: "H200"}),
    Area("Fabric, accelerate, PEFT, torchtitan", r"accelerate|fabric|integrations|lora|torchtitan", {}),
    Area("examples, pages, launchers", r".*", {2: "H200"}),
)


def page() -> str:
    """Return the full text of docs/support.md."""
    notes: dict[Refusal, int] = {}
    rows = [_row(recipe, weights, notes) for recipe, weights in FORMATS]
    columns: dict[tuple[str, ...], list[str]] = {}  # modules with the same cells share a column
    for title, *cells in zip(TITLES.values(), *(row[3:] for row in rows), strict=True):
        columns.setdefault(tuple(cells), []).append(title)
    header = ["recipe", "weights", "devices", *map(", ".join, columns.values())]
    shared = [[*row[:3], *cells] for row, cells in zip(rows, zip(*columns, strict=True), strict=True)]
    merged: dict[tuple[str, ...], list[str]] = {}  # weights with the same cells share a row
    for recipe, weights, *cells in shared:
        merged.setdefault((recipe, *cells), []).append(weights)
    joined = [[recipe, ", ".join(weights), *cells] for (recipe, *cells), weights in merged.items()]
    table = [header, ["---"] * len(header), *joined]
    lines = [f"| {' | '.join(row)} |" for row in table]
    explained = [f"{number}. `{note.error}`: {note.reason}." for note, number in notes.items()]
    return TEMPLATE.read_text(encoding="utf-8").format(
        table="\n".join(lines), notes="\n".join(explained), tested="\n".join(_tested()), **_numbers()
    )


def _tested() -> list[str]:
    """Return the lines of the table of tested machines, from the ledger and from what earlier versions passed."""
    with LEDGER.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    counts: dict[tuple[str, int, str], Counter[str]] = {}
    for row in rows:
        file_name = Path(row["test"].partition("::")[0]).stem.removeprefix("test_")
        area = next(area for area in AREAS if re.match(area.files, file_name))
        card = row["card"].removeprefix("NVIDIA ").split()[0]
        key = (area.name, int(row["gpus"]), card)
        counts.setdefault(key, Counter())[row["outcome"]] += 1
    lines = ["| what | CPU emulation | 1 GPU | 2 GPUs | 4 GPUs |", "| --- | --- | --- | --- | --- |"]
    for area in AREAS:
        cells = [_tested_cell(area, gpus, counts) for gpus in (1, 2, 4)]
        lines.append(f"| {' | '.join([area.name, 'yes', *cells])} |")
    lines.append("| MXFP8, NVFP4 (they need Blackwell) | yes | | | |")
    lines.append("| more than 4 ranks | yes | | | |")
    return lines


def _tested_cell(area: Area, gpus: int, counts: dict[tuple[str, int, str], Counter[str]]) -> str:
    """Return results such as `H100: 12 of 13`, else the card of an earlier version, else an empty cell."""
    results = []
    for (name, number, card), outcomes in sorted(counts.items()):
        run = outcomes["passed"] + outcomes["failed"]
        if (name, number) == (area.name, gpus) and run:
            results.append(f"{card}: {outcomes['passed']}/{run}")
    if not results and gpus in area.earlier:
        results.append(area.earlier[gpus])
    return ", ".join(results)


def _row(recipe: str, weights: str, notes: dict[Refusal, int]) -> list[str]:
    archs = [
        arch
        for arch in ARCHS
        if refusal(Case(arch=arch, recipe=recipe, weights=weights, module="linear", mesh="dp4")) is None
    ]
    cells = [_cell(recipe, weights, module, archs, notes) for module in MODULES]
    return [RECIPES[recipe], weights, ", ".join(ARCHS[arch] for arch in archs), *cells]


def _cell(recipe: str, weights: str, module: str, archs: list[str], notes: dict[Refusal, int]) -> str:
    """Return the kinds of mesh on which a module trains, with the numbers of its notes."""
    cases = [case for case in _options(recipe, weights, module) if case.arch in archs]
    kinds = {
        kind: any(refusal(case) is None for case in cases if (MESHES[case.mesh].tp > 1) == (kind == "tp"))
        for kind in ("dp", "tp")
    }
    met = sorted({_number(result, notes) for case in cases if (result := refusal(case)) is not None})
    words = "yes" if all(kinds.values()) else "data parallel" if kinds["dp"] else "no"
    return words + "".join(f" [{number}]" for number in met)


def _options(recipe: str, weights: str, module: str) -> Iterator[Case]:
    for arch in FACTORS["arch"]:
        for mesh in MESHES:
            for parallel in FACTORS["sequence_parallel"]:
                for reshard in FACTORS["reshard"]:
                    for checkpointing in FACTORS["checkpointing"]:
                        case = Case(
                            arch, recipe, weights, module, mesh, parallel, "1", reshard, checkpointing
                        )
                        if exists(case):
                            yield case


def _number(found: Refusal, notes: dict[Refusal, int]) -> int:
    return notes.setdefault(found, len(notes) + 1)


def _numbers() -> dict[str, int]:
    return {"covering": len(default()), "full": sum(1 for _ in full()), "refused": len(refused())}


if __name__ == "__main__":
    if "--check" not in sys.argv[1:]:
        PAGE.write_text(page(), encoding="utf-8")
    elif PAGE.read_text(encoding="utf-8") != page():
        sys.exit("docs/support.md is out of date: run python scripts/support_table.py")
