"""Check that the notebook runs completely with the saved outputs."""

import json
import re

import pytest
import torch

from tests.unit.commands import ROOT, start

NOTEBOOK = ROOT / "examples/notebook/laptop.ipynb"


def cells(kind: str) -> list[str]:
    """Return the text of the cells of a kind."""
    return ["".join(c["source"]) for c in json.loads(NOTEBOOK.read_text())["cells"] if c["cell_type"] == kind]


def losses(output: str, where: str) -> list[float]:
    """Return the losses of a line that the notebook prints."""
    (line,) = re.findall(rf"^losses {where}: (.*)$", output, re.MULTILINE)
    return [float(loss) for loss in line.split()]


def test_notebook_runs(tmp_path, python):
    if torch.cuda.is_available() and torch.cuda.device_count() < 2:
        pytest.skip("the notebook's second part needs 2 GPUs, found 1")
    (tmp_path / "notebook.py").write_text("\n".join(cells("code")))
    done = start(python, "notebook", [], tmp_path)
    assert done.returncode == 0, done.stderr[-4000:]
    first, there, last = (losses(done.stdout, where) for where in ("here", "there", "here again"))
    assert "float8 (bfloat16)" in done.stdout and len(first) == len(there) == 10
    assert first[0] > there[0] > last[-1], "each part continues where the previous one ended"


def test_notebook_outputs_are_saved():
    """Outputs must not be missing, belong to different cells, or name a machine."""
    notebook = json.loads(NOTEBOOK.read_text())
    assert notebook["nbformat"] == 4
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1))
    outputs = [output for cell in code for output in cell["outputs"]]
    printed = "".join("".join(output.get("text", "")) for output in outputs)
    first, there, last = (losses(printed, where) for where in ("here", "there", "here again"))
    assert len(first) == len(there) == 10 and first[0] > there[0] > last[-1]
    assert "float8 (bfloat16)" in printed and "error" not in {output["output_type"] for output in outputs}
    assert any("image/png" in output.get("data", {}) for output in code[-1]["outputs"])
    assert not re.search(r"/(home|root|work|tmp)/", json.dumps(outputs))
    linked = re.findall(r"\]\(([^)#]+)\)", "\n".join(cells("markdown")))
    assert linked and all((NOTEBOOK.parent / target).exists() for target in linked), linked
