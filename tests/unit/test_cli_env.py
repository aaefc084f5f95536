"""Test ``te-fsdp env``, also in environments with problems."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import os
import re
import sys
import types
from pathlib import Path

import pytest

from te_fsdp.cli import env, environment, main
from te_fsdp.cli.env import faults
from te_fsdp.cli.environment import Environment, Gpu
from te_fsdp.upstream import patches as _patches
from tests.unit.commands import python_path, start

GPU = Gpu("NVIDIA H200", "9.0", 141 * 2**30)
TE = {
    name: ["2.20.2"] for name in ("transformer_engine", "transformer_engine_cu13", "transformer_engine_torch")
}
SOUND = Environment(
    python="3.12.3",
    executable="python",
    te_fsdp="0.1",
    torch="2.11.0+cu130",
    torch_cuda="13.0",
    driver="580.65",
    cudnn="9.19.0",
    cudnn_home="/site/nvidia/cudnn",
    te=TE,
    te_bindings=True,
    te_says={"recipes": {"float8": ""}, "emulated": None, "attention": {"backend": "fused", "reasons": []}},
    gpus=[dataclasses.replace(GPU, peers=[1]), dataclasses.replace(GPU, peers=[0])],
)
OTHER_CUDNN = ["/usr/lib/libcudnn.so.9.14.0"]
#: The changed fact -> the problem's text, and its fix.
WRONG = {
    "old torch": (
        {"torch": "2.9.1"},
        "torch 2.9.1 is older than the supported versions (2.11 to 2.15)",
        "pip install 'torch>=2.11'",
    ),
    "new python": ({"python": "3.15.0"}, "Python 3.15.0", "use Python 3.10 to 3.14"),
    "old te": (
        {"te": {"transformer_engine": ["2.9.0"]}},
        "TransformerEngine 2.9.0",
        "transformer-engine>=2.18",
    ),
    "two cores": (
        {"te": {**TE, "transformer_engine_cu12": ["2.20.2"]}},
        "several cores of TransformerEngine: transformer_engine_cu13, transformer_engine_cu12",
        "pip uninstall transformer_engine_cu13 transformer_engine_cu12",
    ),
    "two versions": (
        {"te": {**TE, "transformer_engine_torch": ["2.19.0"]}},
        "transformer_engine_torch 2.19.0",
        "--no-build-isolation 'te-fsdp[gpu]'",
    ),
    "a version twice": (
        {"te": {**TE, "transformer_engine": ["2.20.2", "2.18.0"]}},
        "2.20.2 and 2.18.0",
        "pip uninstall",
    ),
    "another cuda": (
        {"torch_cuda": "12.8"},
        "CUDA 12.8, TransformerEngine's core with CUDA 13",
        "'te-fsdp[gpu-cu12]'",
    ),
    "torch for cpus": (
        {"torch": "2.13.0+cpu", "torch_cuda": None},
        "a build without CUDA",
        "--force-reinstall torch",
    ),
    "hidden": (
        {"gpus": [], "cuda_problem": "CUDA_VISIBLE_DEVICES hides all GPUs"},
        "hides all",
        "unset CUDA_VISIBLE",
    ),
    "driver": (
        {"gpus": [], "cuda_problem": "driver too old"},
        "sees no GPU: driver too old",
        "update the driver (580.65)",
    ),
    "no te": ({"te": {}, "te_bindings": False}, "TransformerEngine is not installed", "'te-fsdp[gpu]'"),
    "no te, no gpu": ({"te": {}, "te_bindings": False, "gpus": []}, "not installed", "'te-fsdp[emulation]'"),
    "no bindings": (
        {"te": {"transformer_engine": ["2.20.2"]}, "te_bindings": False},
        "bindings for PyTorch",
        "missing: install a CUDA toolkit",
    ),
    "undefined symbol": (
        {"te_says": {"error": "ImportError: x.so: undefined symbol: _ZN3c10"}},
        "cannot be imported: ImportError: x.so: undefined symbol",
        "--force-reinstall --no-deps transformer_engine_torch",
    ),
    "flash-attn of another torch": (
        {"te_says": {"error": "ImportError: flash_attn_2_cuda.so: undefined symbol: _ZN3c10"}},
        "flash_attn_2_cuda.so: undefined symbol",
        "--force-reinstall --no-deps flash-attn",
    ),
    "flash-attn of another version": (
        {
            "flash_attention": {"flash-attn": "2.8.4"},
            "te_says": {"attention": {"taken": {"flash-attn": False}}},
        },
        "does not use flash-attn 2.8.4",
        "--no-build-isolation 'te-fsdp[flash]'",
    ),
    "installed without a driver": (
        {
            "te_says": {"error": "RuntimeError: Found no NVIDIA driver on your system."},
            "gpus": [],
            "driver": None,
        },
        "Found no NVIDIA driver",
        "run it on a machine with a driver",
    ),
    "aborts": ({"te_says": {"error": "ended by signal 6"}}, "ended by signal 6", "--no-cache-dir"),
    "emulation with gpus": (
        {"emulation": "9.0"},
        "TE_FSDP_EMULATION=9.0 on a machine with GPUs",
        "unset TE_FSDP",
    ),
    "emulation with bindings": (
        {"emulation": "9.0", "gpus": []},
        "compiled bindings",
        "te-fsdp[emulation] only",
    ),
    "two cudnn": (
        {"cudnn_files": OTHER_CUDNN},
        "two versions of cuDNN: torch's 9.19.0",
        "export CUDNN_HOME=/site/nvidia/cudnn LD_LIBRARY_PATH=/site/nvidia/cudnn/lib:$LD_LIBRARY_PATH",
    ),
}


def test_valid_environment_has_no_problems():
    assert faults(SOUND) == []


@pytest.mark.parametrize("case", WRONG)
def test_every_problem_has_a_fix(case):
    change, what, cure = WRONG[case]
    result = faults(dataclasses.replace(SOUND, **change))
    assert len(result) == 1, result
    assert what in result[0].what
    assert cure in result[0].cure
    assert result[0].why


@pytest.mark.parametrize(
    "change",
    [
        {"cudnn_files": OTHER_CUDNN, "variables": {"LD_LIBRARY_PATH": "/site/nvidia/cudnn/lib:/usr/lib"}},
        {"cudnn_files": ["/opt/libcudnn.so.9.19.0"]},
        {"torch": "2.11.0a0+eb65b36914.nv26.02"},
    ],
    ids=["torch's cuDNN first", "the same cuDNN twice", "NVIDIA's container"],
)
def test_unusual_but_valid_environments_have_no_problems(change):
    assert faults(dataclasses.replace(SOUND, **change)) == []


def test_gpu_links_are_parsed(monkeypatch):
    table = (
        "\t\x1b[4mGPU0\tGPU1\tNIC0\tCPU Affinity\x1b[0m\n"
        "GPU0\t X \tNV18\tPIX\t0-31\nGPU1\tNV18\t X \tSYS\t32-63\nNIC0\tPIX\tSYS\t X\n"
    )
    monkeypatch.setattr(environment, "_run", lambda *command: (0, table, ""))
    assert environment.gpu_links() == [["X", "NV18"], ["NV18", "X"]]


def test_env_exit_code_and_text_report_problems(monkeypatch, capsys):
    change, what, cure = WRONG["two cudnn"]
    monkeypatch.setattr(env, "gather", lambda: dataclasses.replace(SOUND, **change))
    assert main(["env"]) == 1
    output = capsys.readouterr().out
    assert f"Fault 1: {what}" in output
    assert f"fix:  {cure}" in output
    monkeypatch.setattr(
        env, "gather", lambda: dataclasses.replace(SOUND, **WRONG["flash-attn of another version"][0])
    )
    assert main(["env", "--json"]) == 0  # a note: attention works
    assert [fault["breaks"] for fault in json.loads(capsys.readouterr().out)["faults"]] == [False]
    assert main(["env", "--no-such-option"]) == 2


HOPPER = [  # TransformerEngine's words, but for the last of an older GPU
    "Disabling FlashAttention to give FusedAttention preference on Hopper+ for performance reasons",
    "Available backends = {FlashAttention=True (2.8.3), FusedAttention=True, UnfusedDotProductAttention=True}",
    "Selected backend = FusedAttention (sub-backend 1).",
]


@pytest.mark.parametrize(
    ("backend", "reasons", "installed", "said"),
    [
        (
            "fused",
            HOPPER,
            {"flash-attn": "2.8.3"},
            ["flash .*Disabling FlashAttention to give", "fused .*taken"],
        ),
        (
            "fused",
            [HOPPER[1].replace("FlashAttention=True (2.8.3)", "FlashAttention=False")],
            {},
            ["flash .*not installed .the extra flash", "unfused .*a preferred backend is available"],
        ),
        ("unfused", ["Disabling FusedAttention due to NVTE_FUSED_ATTN=0"], {}, ["fused .*NVTE_FUSED_ATTN=0"]),
        ("none", ["Disabling UnfusedDotProductAttention for X"], {}, ["unfused .*for X", "none .*for X"]),
    ],
    ids=["flash gives way", "flash is missing", "switched off", "none"],
)
def test_env_shows_reasons_for_the_attention_backend(monkeypatch, capsys, backend, reasons, installed, said):
    attention = {"backend": backend, "reasons": reasons, "shape": {"heads": 32}}
    te_says = {"recipes": {}, "emulated": None, "attention": attention}
    facts = dataclasses.replace(SOUND, te_says=te_says, flash_attention=installed)
    monkeypatch.setattr(env, "gather", lambda: facts)
    monkeypatch.setenv("COLUMNS", "200")
    assert main(["env"]) == 0
    shown = capsys.readouterr().out
    assert all(re.search(f"^ *{pattern}", shown, re.MULTILINE) for pattern in said), shown
    assert "causal, heads 32" in shown
    monkeypatch.setattr(
        env, "gather", lambda: dataclasses.replace(facts, te_says=te_says | {"emulated": [10, 0]})
    )
    assert main(["env"]) == 0
    shown = capsys.readouterr().out
    # The emulation ends the list of backends, not the output.
    for text in (
        "Attention: unfused, the only backend of the emulation",
        "Patched by te_fsdp",
        "No problems found.",
    ):
        assert text in shown


def test_emulation_does_not_count_as_te_bindings(monkeypatch):
    """An imported module has no spec; the check finds the module that a different process would import."""
    monkeypatch.setattr(environment, "te_capabilities", lambda parts, bindings: None)
    results = []
    for module in (None, types.ModuleType("transformer_engine_torch")):
        monkeypatch.delitem(sys.modules, "transformer_engine_torch", raising=False)
        if module is not None:
            monkeypatch.setitem(sys.modules, "transformer_engine_torch", module)
        results.append(environment.gather().te_bindings)
    assert results[0] == results[1]


# ----------------------------------------------------------------------------- faults, found where they really are


@pytest.fixture
def site(tmp_path, monkeypatch):
    """Prepend a folder to sys.path and PYTHONPATH, and hide all other CUDA libraries."""
    for variable in ("CUDA_HOME", "CUDA_PATH", "LD_LIBRARY_PATH"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("PYTHONPATH", python_path(tmp_path))
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def distribution(site, name, version):
    """Create the remains of an interrupted pip installation."""
    folder = site / f"{name}-{version}.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")


def found_here(monkeypatch, **others):
    """Return the problems found by `gather` on a machine with two GPUs; only `others` changes TransformerEngine."""
    if "te_says" in others:
        monkeypatch.setattr(environment, "te_capabilities", lambda parts, bindings: others["te_says"])
    of_gpus = {name: getattr(SOUND, name) for name in ("torch", "torch_cuda", "cudnn", "gpus", "driver")}
    return faults(dataclasses.replace(environment.gather(), **of_gpus, cuda_problem="", emulation=""))


def test_two_te_installations_are_detected(site, monkeypatch):
    for name, version in (
        ("transformer_engine", "2.18.0"),  # in addition to the version under test
        ("transformer-engine-cu12", "2.18.0"),
        ("transformer_engine_cu13", "2.18.0"),
        ("transformer_engine_torch", "2.18.0"),
    ):
        distribution(site, name, version)
    cores, versions = found_here(monkeypatch, te_says=SOUND.te_says)
    assert "several cores" in cores.what and "transformer_engine_cu12, transformer_engine_cu13" in cores.what
    assert (
        "transformer_engine 2.18.0 and 2." in versions.what and "again until pip finds none" in versions.cure
    )


def test_two_cudnn_versions_are_detected(site, monkeypatch):
    """torch's wheels contain one version, and LD_LIBRARY_PATH a different one."""
    for folder, name in (("nvidia/cudnn/lib", "libcudnn.so.9"), ("other", "libcudnn.so.9.14.0")):
        (site / folder).mkdir(parents=True)
        (site / folder / name).touch()
    (site / "other/libcudnn.so.9").symlink_to("libcudnn.so.9.14.0")
    monkeypatch.setattr(environment, "te_distributions", lambda: TE)
    monkeypatch.setenv("LD_LIBRARY_PATH", f"{site}/other:{site}/nvidia/cudnn/lib")
    (fault,) = found_here(monkeypatch, te_says=SOUND.te_says)
    assert f"torch's 9.19.0 in {site}/nvidia/cudnn/lib, and {site}/other/libcudnn.so.9.14.0" in fault.what
    name, value = fault.cure.split()[-1].replace("$LD_LIBRARY_PATH", os.environ["LD_LIBRARY_PATH"]).split("=")
    monkeypatch.setenv(name, value)  # the cure cures it
    assert not found_here(monkeypatch, te_says=SOUND.te_says)


def test_missing_te_bindings_and_compiler_are_detected(site, monkeypatch):
    monkeypatch.setattr(environment, "te_distributions", lambda: {"transformer_engine": ["2.20.2"]})
    monkeypatch.setattr(environment.importlib.machinery.PathFinder, "find_spec", lambda *given: None)
    monkeypatch.setattr(environment.shutil, "which", lambda name: None)
    if not Path("/usr/local/cuda/bin/nvcc").exists():
        (fault,) = found_here(monkeypatch, te_says={})
        assert "nvcc, which is missing: install a CUDA toolkit" in fault.cure
    (site / "bin").mkdir()
    (site / "bin/nvcc").touch()
    monkeypatch.setenv("CUDA_HOME", str(site))
    (fault,) = found_here(monkeypatch, te_says={})
    assert f"compiles with nvcc: {site}/bin/nvcc" in fault.cure


def test_te_bindings_for_a_different_torch_are_detected(site, monkeypatch, python):
    """TransformerEngine fails to import in the subprocess, as with such bindings."""
    distribution(site, "transformer_engine_torch", importlib.metadata.version("transformer_engine"))
    distribution(site, "transformer_engine_cu13", importlib.metadata.version("transformer_engine"))
    (site / "transformer_engine").mkdir()
    symbol = "transformer_engine_torch.so: undefined symbol: _ZN3c104cuda9SetDeviceEab"
    (site / "transformer_engine/__init__.py").write_text(f"raise ImportError({symbol!r})\n")
    monkeypatch.setattr(sys, "executable", python)
    (fault,) = found_here(monkeypatch)
    assert symbol in fault.what and "compiled against a different torch than 2.11.0+cu130" in fault.why
    assert fault.cure.endswith("--no-cache-dir --force-reinstall --no-deps transformer_engine_torch")


def test_env_describes_this_environment(python, tmp_path):
    """Run as a user does: TransformerEngine's own messages, the patch tables, one JSON document."""
    done = start(python, "te_fsdp.cli", ["env", "--json"], tmp_path)
    result = json.loads(done.stdout)
    assert done.returncode == (0 if result["ok"] else 1), done.stderr
    assert result["te_says"]["recipes"]["float8"] == ""
    assert result["te_says"]["attention"]["backend"] in ("flash", "fused", "unfused")
    rows = [*_patches.PATCHES.values(), *_patches.FSDP2]
    assert [row["why"] for row in result["patches"]] == [row.why for row in rows]
