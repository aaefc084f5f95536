"""The examples as modules, run by worker processes."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
FOLDER = ROOT / "examples/fsdp2_tp"
# On a different mesh, bf16 sums are in a different order. This moves a logit by about one rounding: half a unit in the
# last of bf16's 8 places, 2^-9 of a logit of size 1 to 2. The loss moves by at most twice the largest such move (a
# log-softmax has Lipschitz constant 2); most moves cancel over the 256 tokens. A token whose experts nearly tie may go
# to a different one: its own logits then change, 1/256 of the loss. Measured: 4e-4, with experts 2e-4.
TOLERANCE = 2**-8


def example(name: str) -> Any:
    """Return an example as a module; call it where TransformerEngine may be imported."""
    if str(FOLDER) not in sys.path:
        sys.path.insert(0, str(FOLDER))
    return importlib.import_module(name)


def rows(folder: Path) -> list[dict[str, Any]]:
    """Return the steps that a run recorded; it has also drawn its plot."""
    assert (folder / "loss.png").read_bytes().startswith(b"\x89PNG")
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
