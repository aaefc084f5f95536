"""Test types for type checkers: public names, TransformerEngine's constructors with te_fsdp's keywords."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

import te_fsdp
from te_fsdp.bind_device_mesh import mesh_class

ROOT = Path(__file__).resolve().parents[2]
STUBS = {
    node.name: node
    for node in ast.parse((ROOT / "te_fsdp/modules/classes.pyi").read_text()).body
    if isinstance(node, ast.ClassDef)
}
#: Arguments that TransformerEngine's norms hand on to a class of theirs, as `**kwargs`.
HANDED_ON = {"device", "dtype", "sm_margin"}


@pytest.mark.parametrize("kind", te_fsdp._MODULES)
def test_stub_signatures_match_transformer_engine(te, kind):
    """Every argument of the installed version has the same position and default. Newer versions may have more."""
    stub = STUBS[kind]
    assert [ast.unparse(base) for base in stub.bases] == [mesh_class(kind).__mro__[1].__name__, f"te.{kind}"]
    (init,) = [node for node in stub.body if isinstance(node, ast.FunctionDef)]
    actual = [argument.arg for argument in init.args.args[1:]]
    defaults = dict(
        zip(
            reversed(actual),
            (ast.literal_eval(value) for value in reversed(init.args.defaults)),
            strict=False,
        )
    )
    expected = inspect.signature(getattr(te, kind)).parameters
    named = {name: value for name, value in expected.items() if value.kind is not value.VAR_KEYWORD}
    assert [name for name in actual if name in named] == list(named), "arguments, in their order"
    for name, value in named.items():
        assert defaults.get(name, inspect.Parameter.empty) == value.default, name
    keywords = {argument.arg for argument in init.args.kwonlyargs}
    assert keywords == {"tp_mesh", "weight_mesh"} | (HANDED_ON if len(named) < len(expected) else set())


#: Lines with an error that a checker must find; it must find none on other lines.
SCRIPT = """
from typing import TYPE_CHECKING

import te_fsdp
import torch
from torch.distributed.device_mesh import DeviceMesh

if TYPE_CHECKING:
    from typing_extensions import reveal_type


def train(mesh: DeviceMesh, meshes: te_fsdp.Meshes, model: torch.nn.Sequential) -> None:
    linear = te_fsdp.Linear(64, 128, bias=False, tp_mesh=mesh)
    reveal_type(linear)  # Linear
    linear.set_device_mesh(tp_mesh=mesh, weight_mesh=None)
    linear.set_device_mesh(tp_mesh=2)  # bad-argument-type
    te_fsdp.Linear(64)  # missing-argument
    te_fsdp.Linear(64, "128")  # bad-argument-type
    te_fsdp.Linear(64, 128, biass=False)  # unexpected-keyword
    te_fsdp.TransformerLayer(64, 128, 4, device="meta", **meshes.te_kwargs())
    te_fsdp.TransformerLayer(64, 128, 4, weight_mesh="dp")  # bad-argument-type
    te_fsdp.RMSNorm(64, dtype=torch.bfloat16, device="meta")
    te_fsdp.RMSNorm(64, devise="meta")  # unexpected-keyword
    te_fsdp.fully_shrad(model)  # missing-attribute
    reveal_type(te_fsdp.fully_shard(model, meshes, units=[te_fsdp.Linear]))  # Sequential
    reveal_type(te_fsdp.materialize(linear, seed=0))  # Linear
    te_fsdp.checkpoint.save("out", model, extras={})  # unexpected-keyword
"""


def test_type_checker_reports_exactly_the_mistakes(tmp_path):
    if importlib.util.find_spec("pyrefly") is None:
        pytest.skip("pyrefly comes with the extra lint")
    names = "\n".join(f"te_fsdp.{name}" for name in te_fsdp.__all__)
    (tmp_path / "script.py").write_text(SCRIPT + names + "\n")
    (tmp_path / "pyrefly.toml").write_text('preset = "default"\n')
    args = ["check", "script.py", "--python-interpreter-path", sys.executable, "--search-path", str(ROOT)]
    command = [sys.executable, "-m", "pyrefly", *args, "--output-format", "json"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False)
    results = {}
    for item in json.loads(done.stdout)["errors"]:
        # reveal_type reports the type as its own message kind.
        told = item["description"].removeprefix("revealed type: ")
        results[item["line"]] = told if item["name"] == "reveal-type" else item["name"]
    said = ((at, re.search(r"  # (\S+)$", line)) for at, line in enumerate(SCRIPT.splitlines(), 1))
    assert results == {at: match[1] for at, match in said if match}, done.stderr
