"""Test installation of the emulation: errors, entry points, effects on the user's torch."""

import functools
import os
import runpy
import subprocess
import types
from pathlib import Path

import pytest
import torch

from te_fsdp import emulation
from te_fsdp.emulation import _patches
from tests.unit.commands import python_path

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def run(python):
    """Run Python with the project importable; return the completed process, with output as text."""
    return functools.partial(run_with, python)


def run_with(python, *arguments, cwd=None, path=(), **environment):
    env = {name: value for name, value in os.environ.items() if not name.startswith("TE_FSDP_")}
    env.update(PYTHONPATH=python_path(*path), OMP_NUM_THREADS="1", **environment)
    command = [python, *map(str, arguments)]
    return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=120, check=False)


def test_install_is_repeatable_and_rejects_a_different_architecture():
    name = emulation._state.arch_name()
    emulation.install(name)
    assert emulation.active() and emulation.arch() == emulation._state.ARCHITECTURES[name]
    other = "9.0" if name == "10.0" else "10.0"
    with pytest.raises(emulation.EmulationError, match=f"installed for architecture {name}, got {other}"):
        emulation.install(other)
    for function in (emulation.install, emulation.switch_arch):
        with pytest.raises(emulation.EmulationError, match="unknown architecture '8.9': expected one of"):
            function("8.9")


REFUSALS = """
import sys, types
import torch
before = dict(torch.Tensor.__dict__), list(sys.meta_path), set(sys.modules)
import te_fsdp.emulation as e
assert dict(torch.Tensor.__dict__) == before[0] and sys.meta_path == before[1]
assert not any(name.startswith("transformer_engine") for name in sys.modules)
assert "is_cuda" not in torch.Tensor.__dict__ and not e.active()

def refused(text, **kwargs):
    try:
        e.install(**kwargs)
    except e.EmulationError as error:
        assert text in str(error), error
        assert not e.active() and "is_cuda" not in torch.Tensor.__dict__ and sys.meta_path == before[1]
    else:
        raise AssertionError("not refused: " + text)

try:
    e.arch()
except e.EmulationError as error:
    assert "call te_fsdp.emulation.install() before" in str(error)
refused("unknown architecture '7.0'", arch="7.0")
for name in ("transformer_engine", "transformer_engine_torch"):
    sys.modules[name] = types.ModuleType(name)
    refused(name + " is already imported")
    refused(name + " is already imported", force=True)
    del sys.modules[name]
torch.cuda.is_available = lambda: True
refused("CUDA is available")
torch.cuda.is_available = lambda: False
sys.path.insert(0, sys.argv[1])
refused("the real extension transformer_engine_torch is installed")
assert e.install_from_env() is False
e.install(force=True)
assert e.active() and "is_cuda" in torch.Tensor.__dict__
ours = [name for name in sys.modules if name.startswith("te_fsdp.")]
assert all(name.startswith(("te_fsdp.emulation", "te_fsdp.version")) for name in ours)
print("all refused")
"""


def test_install_rejects_unsupported_environments(tmp_path, run):
    (tmp_path / "transformer_engine_torch.py").write_text("raise ImportError\n")
    script = tmp_path / "script.py"
    script.write_text(REFUSALS)
    done = run(script, tmp_path)
    assert done.returncode == 0 and "all refused" in done.stdout, done.stderr


def test_user_code_does_not_see_the_emulated_gpu(te):
    x = te.Linear(16, 16, device="cpu")(torch.randn(2, 16))
    assert torch.cuda.is_available() is False and torch.cuda.device_count() == 0
    assert x.device.type == "cpu" and x.is_cuda is False
    quantized = te.Float8CurrentScalingQuantizer(te.DType.kFloat8E4M3, device="cpu")(torch.randn(16, 16))
    assert quantized.is_cuda is False and quantized.device.type == "cpu"
    for create in (
        lambda: torch.empty(2, device="cuda"),
        lambda: x.to("cuda"),
        lambda: x.to(device="cuda:0", dtype=torch.float16),
        lambda: torch.nn.Linear(2, 2).to("cuda"),
        lambda: x.cuda(),
        lambda: torch.zeros(2).to(torch.device("cuda")),
    ):
        with pytest.raises((RuntimeError, AssertionError), match="CUDA|cuda|NVIDIA driver"):
            create()
    assert torch.device("cuda").type == "cuda"
    assert x.to(torch.float64).dtype == torch.float64 and x.to("meta").is_meta
    # A CUDA build of torch has a version without a GPU, too.
    assert torch.version.cuda == runpy.run_path(torch.version.__file__)["cuda"]
    assert torch.distributed.__name__ == "torch.distributed" and type(torch) is types.ModuleType


def test_te_code_sees_an_emulated_gpu(te, arch):
    from transformer_engine.pytorch import utils

    assert utils.get_device_compute_capability() == emulation._state.ARCHITECTURES[arch]
    assert utils.torch is not torch and utils.torch.nn is torch.nn
    assert utils.torch.cuda.is_available() is True
    assert isinstance(torch.device("cpu"), utils.torch.device)
    assert utils.torch.device("cuda", 0) == torch.device("cpu")
    assert utils.torch.device("meta") == torch.device("meta")
    assert utils.torch.empty(2, device="cuda").device.type == "cpu"
    assert utils.torch.version.cuda is not None
    for support in (te.is_mxfp8_available, te.is_nvfp4_available):
        assert support() is (arch == "10.0")
    assert te.is_fp8_available() is True and te.is_fp8_block_scaling_available() is True


def test_te_modules_have_stock_loader_attributes(te):
    import inspect

    assert type(te.Linear.__module__) is str
    assert inspect.getsource(te.Linear).startswith("class Linear")
    assert te.__spec__.loader.__class__.__name__ == "SourceFileLoader"


def test_switch_arch_changes_quantization_and_raises_inside_autocast(te):
    emulation.switch_arch("10.0")
    quantizer = te.Float8CurrentScalingQuantizer(te.DType.kFloat8E4M3, device="cpu")
    assert quantizer(torch.randn(16, 16))._transpose is None
    emulation.switch_arch("9.0")
    assert quantizer(torch.randn(16, 16))._transpose is not None
    with te.autocast(enabled=True), pytest.raises(emulation.EmulationError, match="inside an autocast"):
        emulation.switch_arch("10.0")


@pytest.mark.parametrize("patch", _patches.PATCHES, ids=lambda patch: patch.targets[0])
def test_patch_raises_if_its_target_is_missing(patch, monkeypatch):
    # The installed version may be one that does not need the patch, such as 2.18.
    monkeypatch.setattr(_patches, "te_version", lambda: patch.versions[0])
    assert patch.reason.startswith(("pytorch/", "common/"))
    empty = types.ModuleType(patch.module)
    with pytest.raises(emulation.EmulationError, match=f"{patch.module} has no"):
        _patches.apply(empty)


PROGRAM = """
import os, sys
import transformer_engine.pytorch as te
import torch
from te_fsdp import emulation
if __name__ == "__main__":
    y = te.Linear(16, 32)(torch.randn(4, 16))
    print(sys.argv[1:], tuple(y.shape), emulation.arch(), os.environ["TE_FSDP_EMULATION"],
    sys.argv[0].endswith("program.py"))
"""


def test_launcher_runs_scripts_and_modules(tmp_path, run):
    (tmp_path / "program.py").write_text("import neighbor\n" + PROGRAM)
    (tmp_path / "neighbor.py").write_text("")
    done = run("-m", "te_fsdp.emulation", "--arch", "9.0", tmp_path / "program.py", "--arch", "x")
    assert done.stdout.splitlines()[-1:] == ["['--arch', 'x'] (4, 32) (9, 0) 9.0 True"], done.stderr
    done = run("-m", "te_fsdp.emulation", "-m", "program", "1", path=[tmp_path], cwd=tmp_path)
    assert done.stdout.splitlines()[-1:] == ["['1'] (4, 32) (10, 0) 10.0 True"], done.stderr


def test_launcher_runs_under_torchrun(tmp_path, run):
    script = tmp_path / "program.py"
    script.write_text(
        "import os, torch.distributed as d, transformer_engine.pytorch as te\n"
        "d.init_process_group('gloo')\n"
        # In one write, so that the other rank's words cannot come in between.
        "os.write(1, f'rank {d.get_rank()} of {d.get_world_size()}\\n'.encode())\n"
        "d.barrier()\n"  # a rank that ends at once cuts off one that is still connecting
        "d.destroy_process_group()\n"
    )
    launch = [
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        "-m",
        "te_fsdp.emulation",
    ]
    done = run(*launch, "--arch", "10.0", script)
    assert "rank 0 of 2" in done.stdout and "rank 1 of 2" in done.stdout, done.stderr


def test_launcher_reports_usage_errors(tmp_path, capsys, monkeypatch):
    from te_fsdp.emulation.__main__ import main

    monkeypatch.setenv("TE_FSDP_EMULATION", emulation._state.arch_name())
    with pytest.raises(SystemExit):
        main(["--arch", "8.0", "x.py"])
    assert "invalid choice: '8.0'" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="no such file"):
        main([str(tmp_path / "missing.py")])
    other = "9.0" if emulation._state.arch_name() == "10.0" else "10.0"
    with pytest.raises(SystemExit, match="the emulation is installed for architecture"):
        main(["--arch", other, "x.py"])


def test_pytest_plugin_installs_the_emulation(tmp_path, run):
    (tmp_path / "test_it.py").write_text(
        "import transformer_engine.pytorch as te\nfrom te_fsdp import emulation\n"
        "def test_arch():\n    assert emulation.arch() == (9, 0) and te.is_fp8_available()\n"
    )
    arguments = [
        "-m",
        "pytest",
        "-q",
        "-p",
        "te_fsdp.emulation.pytest_plugin",
        tmp_path,
        "--rootdir",
        tmp_path,
    ]
    done = run(*arguments, "-v", TE_FSDP_EMULATION="9.0")
    assert done.returncode == 0 and "emulated on the CPU, architecture 9.0" in done.stdout, (
        done.stdout + done.stderr
    )
    done = run(*arguments, TE_FSDP_EMULATION="7.0")
    assert done.returncode == 4 and "unknown architecture '7.0'" in done.stderr
