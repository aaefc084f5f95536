"""The pytest plugin of the harness.

Its workers with TransformerEngine, architectures, skips and coverage are tested.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import harness
import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

HERE = Path(__file__).parent

SAMPLE = """
import pytest, torch, harness

def capability():
    from transformer_engine.pytorch.utils import get_device_compute_capability
    return "{}.{}".format(*get_device_compute_capability())

@pytest.mark.arch("9.0", "10.0")
@pytest.mark.parametrize("recipe", ["none", "mxfp8"])
def test_recipes(pool, arch, recipe):
    assert pool.run(capability, 2) == [arch, arch]

def test_default(pool, arch):
    assert arch == "10.0" and pool.run(capability, 1) == ["10.0"]

@pytest.mark.gpu
def test_on_gpu(): ...

def test_fails(pool):
    pool.run(fails, 2)

def fails():
    raise ValueError("seen by pytest")
"""


def unmeasured_environment() -> dict[str, str]:
    """Return the environment without COVERAGE_*, by which `make coverage` measures child processes too."""
    return {name: value for name, value in os.environ.items() if not name.startswith("COVERAGE_")}


def run_sample(python: str, folder: Path, sample: str, *options: str, measure: tuple = (), **env: str) -> str:
    (folder / "test_sample.py").write_text(sample)
    path = os.pathsep.join([str(HERE), *(entry for entry in sys.path if entry)])
    command = [
        python,
        *measure,
        "-m",
        "pytest",
        "-p",
        "conftest",
        "-p",
        "no:cacheprovider",
        "-v",
        "-rs",
        *options,
    ]
    done = subprocess.run(
        [*command, "--rootdir", str(folder), "-c", os.devnull, str(folder / "test_sample.py")],
        env={**unmeasured_environment(), "PYTHONPATH": path, "COLUMNS": "200", **env},
        capture_output=True,
        text=True,
        timeout=200,
        cwd=folder,
    )
    return done.stdout + done.stderr


@pytest.mark.cpu
def test_unsupported_recipes_skip_with_te_reason(tmp_path, python):
    output = run_sample(python, tmp_path, SAMPLE, "--device", "cpu", "--pool-durations", "2")
    lines = [line.split(" ")[0] for line in output.splitlines() if line.startswith("test_sample.py::")]
    archs = [line.split("[")[1].split("-")[0].rstrip("]") for line in lines if "[" in line]
    assert archs == ["9.0"] * 2 + ["10.0"] * 4, output
    assert "1 failed, 4 passed, 2 skipped" in output, output
    assert "Device compute capability 10.0 or higher required for MXFP8 execution" in output
    assert "needs a GPU with the real TransformerEngine" in output
    assert "ranks 0, 1: ValueError: seen by pytest" in output
    assert "slowest of" in output and "2 ranks  test_sample.py::" in output


@pytest.mark.cpu
def test_coverage_is_measured_in_workers(tmp_path, python):
    """Python itself: coverage is to begin before anything is imported."""
    pytest.importorskip("coverage")
    (tmp_path / "measured.py").write_text("def body():\n    value = 1\n    return value\n")
    sample = (
        "import harness, measured\n"
        "def test_it():\n"
        f"    with harness.WorkerPool(2, te=False, python={python!r}) as pool:\n"
        "        assert pool.run(measured.body, 2) == [1, 1]\n"
    )
    data = tmp_path / "data"
    measure = ("-m", "coverage", "run", f"--data-file={data}", "--parallel-mode", f"--include={tmp_path}/*")
    output = run_sample(sys.executable, tmp_path, sample, "--device", "cpu", measure=measure)
    assert "1 passed" in output, output
    coverage, env = [sys.executable, "-m", "coverage"], unmeasured_environment()
    subprocess.run(
        [*coverage, "combine", f"--data-file={data}", str(tmp_path)], check=True, capture_output=True, env=env
    )
    report = subprocess.run(
        [*coverage, "report", f"--data-file={data}", "-m"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=env,
    ).stdout
    line = next(line for line in report.splitlines() if line.startswith("measured.py"))
    assert line.split()[1:4] == ["3", "0", "100%"], report


def quantized_shards(recipe: str) -> dict:
    """Gather a DTensor over quantized local tensors as its dequantized values."""
    import transformer_engine.pytorch as te
    from transformer_engine.common import recipe as recipes

    chosen = {"current": recipes.Float8CurrentScaling, "mxfp8": recipes.MXFP8BlockScaling}[recipe]()
    with te.quantized_model_init(enabled=True, recipe=chosen):
        linear = te.Linear(64, 96, bias=False, params_dtype=torch.bfloat16, device=harness.device())
    weight = linear.weight.detach()
    checks = harness.Comparisons()
    checks.bitwise_equal("whole", weight, weight.dequantize())
    mesh = init_device_mesh(harness.device_type(), (2,), mesh_dim_names=("dp_shard",))
    sharded = DTensor.from_local(weight, mesh, [Shard(0)], run_check=False)
    checks.bitwise_equal("sharded", sharded, torch.cat([weight.dequantize(), weight.dequantize()]))
    with pytest.raises(AssertionError, match="differ in bits"):
        checks.bitwise_equal("sharded", sharded, torch.cat([weight.dequantize(), -weight.dequantize()]))
    return {"type": type(weight).__name__, **checks.require(2)}


@pytest.mark.ranks(2)
@pytest.mark.arch("10.0", "9.0")
@pytest.mark.parametrize("recipe", ["current", "mxfp8"])
def test_full_dequantizes(pool, recipe):
    expected = {"current": "Float8Tensor", "mxfp8": "MXFP8Tensor"}[recipe]
    assert [result["type"] for result in pool.run(quantized_shards, 2, recipe=recipe)] == [expected] * 2
