"""Write docs/support.md from the definitions of the test matrix: `python scripts/support_table.py`.

`--check` writes nothing and fails if the page is not what the definitions give.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "support.md"
sys.path.insert(0, str(ROOT / "tests" / "pytorch" / "distributed"))

from matrix.definitions import (  # noqa: E402
    FACTORS,
    FORMATS,
    MESHES,
    MODULES,
    Case,
    Refusal,
    default,
    every_format,
    exists,
    full,
    refusal,
    refused,
    subset,
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


def page() -> str:
    """The whole text of docs/support.md."""
    notes: dict[Refusal, int] = {}
    rows = [_row(recipe, weights, notes) for recipe, weights in FORMATS]
    header = ["recipe", "weights", "devices", *TITLES.values()]
    table = [header, ["---"] * len(header), *rows]
    lines = [f"| {' | '.join(row)} |" for row in table]
    explained = [f"{number}. `{note.error}`: {note.reason}." for note, number in notes.items()]
    return _PAGE.format(table="\n".join(lines), notes="\n".join(explained), **_numbers())


def _row(recipe: str, weights: str, notes: dict[Refusal, int]) -> list[str]:
    archs = [
        arch
        for arch in ARCHS
        if refusal(Case(arch=arch, recipe=recipe, weights=weights, module="linear", mesh="dp4")) is None
    ]
    cells = [_cell(recipe, weights, module, archs, notes) for module in MODULES]
    return [RECIPES[recipe], weights, ", ".join(ARCHS[arch] for arch in archs), *cells]


def _cell(recipe: str, weights: str, module: str, archs: list[str], notes: dict[Refusal, int]) -> str:
    """On which kinds of mesh a module trains, with the numbers of the notes that hold for some of its options."""
    cases = [case for case in _options(recipe, weights, module) if case.arch in archs]
    kinds = {
        kind: any(refusal(case) is None for case in cases if (MESHES[case.mesh].tp > 1) == (kind == "tp"))
        for kind in ("dp", "tp")
    }
    met = sorted({_number(found, notes) for case in cases if (found := refusal(case)) is not None})
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
    cases = default()
    return {
        "covering": len(cases),
        "hopper": sum(case.arch == "9.0" for case in cases),
        "blackwell": sum(case.arch == "10.0" for case in cases),
        "formats": len(every_format()),
        "full": sum(1 for _ in full()),
        "subset": len(subset()),
        "refused": len(refused()),
    }


_PAGE = """# Support

<!-- Written by scripts/support_table.py from tests/pytorch/distributed/matrix/definitions.py: edit those. -->

Which recipes train which modules. "yes" means: outputs, losses, gradients and updates of two steps equal those of one
process with stock TransformerEngine, within bounds derived from the format's rounding, on data parallel, HSDP and
tensor-parallel meshes and both together. "quantized" weights are those of `te.quantized_model_init`.

{table}

Sequence parallelism, gradient accumulation (gradients reduced each time, or with the last micro-batch), either value of
`reshard_after_forward`, and activation checkpointing (TransformerEngine's and torch's) go with all of it, except:

{notes}

A recipe on a device that does not have its format raises before the first step. What else to know:

- Quantized weights must be cut into whole blocks of their format; `fully_shard` says so if a size does not fit.
- GroupedLinear means one weight per expert, without bias under tensor parallelism.
- GroupedLinear with one weight for all experts, bf16 or quantized: no recipe and current scaling on both devices,
  block scaling on Hopper, MXFP8 and NVFP4 on Blackwell; see [concepts](concepts.md#experts).
- The hybrid recipe of the table has 8-bit blocks forward and high precision backward. In quantized weights an
  `IdentityQuantizer` needs a dtype, and NVFP4 parts cannot be gathered: `fully_shard` refuses both.
- `fuse_wgrad_accumulation=True` works under `fully_shard` for Linear, LayerNormLinear, LayerNormMLP and what is made
  of them: TE adds weight gradients to the buffer that FSDP2 reduces. GroupedLinear's, split parameters and modules
  that are only bound are refused.
- torch's checkpoint knows nothing of `te.autocast`: enter it inside of the checkpointed function.

## How it is tested

With TransformerEngine itself on H200s: the subset below on four GPUs, on an earlier version of te_fsdp; since then
parts of it on two. All rows of Blackwell alone, and one weight for all experts, under emulation only.

On the CPU under [emulation](emulation.md), as Hopper and as Blackwell. By default {covering} combinations run
({hopper} Hopper, {blackwell} Blackwell): every pair of values of any two factors. {refused} refusals are tested by
their words. More, up to the full product of {full} combinations:

```sh
pytest tests/pytorch/distributed/test_matrix.py                    # {covering} combinations, minutes
pytest tests/pytorch/distributed/test_matrix.py --matrix formats   # {formats}: each row of the table in each module
pytest tests/pytorch/distributed/test_matrix.py --matrix subset    # {subset} combinations, for 4 Hopper GPUs
pytest tests/pytorch/distributed/test_matrix.py --matrix full -k "mxfp8 and dp4"    # {full} without -k, hours
```
"""

if __name__ == "__main__":
    if "--check" not in sys.argv[1:]:
        PAGE.write_text(page(), encoding="utf-8")
    elif PAGE.read_text(encoding="utf-8") != page():
        sys.exit("docs/support.md is out of date: run python scripts/support_table.py")
