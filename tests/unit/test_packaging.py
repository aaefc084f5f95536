"""Test packaging settings: requirements, files, lint with few packages installed."""

from __future__ import annotations

import ast
import fnmatch
import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

import te_fsdp
from te_fsdp import versions

if sys.version_info >= (3, 11):
    import tomllib
else:
    tomllib = pytest.importorskip("tomli", reason="Python 3.10 reads pyproject.toml by tomli")

ROOT = Path(__file__).resolve().parents[2]
SETTINGS = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT = SETTINGS["project"]
EXTRAS = {name: list(map(Requirement, result)) for name, result in PROJECT["optional-dependencies"].items()}
REQUIRED = {result.name: result.specifier for result in map(Requirement, PROJECT["dependencies"])}


# ------------------------------------------------------------------------------------------------- requirements


@pytest.mark.parametrize(
    ("version", "fits"),
    {
        "2.11.0": True,
        "2.13.0+cpu": True,
        "2.11.0a0+eb65b36914.nv26.02": True,  # of an NVIDIA container
        "2.15.1": True,
        "2.10.1": False,
        "2.16.0": True,  # newer than tested: named in the log, not refused
        "2.16.0a0+0123456789.nv27.01": True,
    }.items(),
)
def test_requirement_admits_container_torch_versions(version, fits):
    """pip replaces an installed torch that the requirement does not admit."""
    assert REQUIRED["torch"].contains(version, prereleases=True) == fits


def test_control_upper_bound_excludes_container_torch():
    assert not SpecifierSet(">=2.11,<2.16").contains("2.11.0a0+eb65b36914.nv26.02", prereleases=True)


def test_versions_agree_in_all_files():
    """Requirements, classifiers and the table of tested versions agree. torch and TE have no upper bound."""
    for specifier, tested in (
        (REQUIRED["torch"], versions.TORCH),
        *(
            (result[0].specifier, versions.TRANSFORMER_ENGINE)
            for result in (EXTRAS["emulation"], EXTRAS["gpu"], EXTRAS["gpu-cu12"])
        ),
    ):
        major = tested.first[0]
        inside = [minor for minor in range(60) if specifier.contains(f"{major}.{minor}.0")]
        assert inside == list(range(tested.first[1], 60)), specifier
    pythons = range(versions.PYTHON.first[1], versions.PYTHON.last[1] + 1)
    expected = SpecifierSet(PROJECT["requires-python"])
    assert [minor for minor in range(60) if expected.contains(f"3.{minor}.0")] == list(pythons)
    listed = re.findall(r":: Python :: 3\.(\d+)", "\n".join(PROJECT["classifiers"]))
    assert list(map(int, listed)) == list(pythons)


def test_untested_versions_are_logged_once(caplog):
    """A newer torch or TE logs a warning with the tested versions. Tested ones, also in containers, log nothing."""
    assert (
        versions.untested("2.15.1", "2.20.2")
        == versions.untested("2.11.0a0+eb65b36914.nv26.02", "2.18.0")
        == []
    )
    assert versions.untested("2.16.0", "3.0.0") == [
        "torch 2.16.0 is newer than the tested versions (2.11 to 2.15).",
        "TransformerEngine 3.0.0 is newer than the tested versions (2.18 to 2.20).",
    ]
    versions.warn_if_untested.cache_clear()
    with pytest.MonkeyPatch.context() as patch, caplog.at_level("WARNING", "te_fsdp"):
        patch.setattr(versions, "TORCH", versions.Tested((2, 0), (2, 1)))
        versions.warn_if_untested()
        versions.warn_if_untested()
    versions.warn_if_untested.cache_clear()
    assert [record.getMessage().count("2.0 to 2.1") for record in caplog.records] == [1]


def test_cpu_extras_do_not_install_cuda_packages():
    """Only the extras for GPUs install TransformerEngine's compiled parts."""
    for name in ("emulation", "test", "lint", "docs", "integrations"):
        told = [*REQUIRED, *(result.name for result in EXTRAS[name])]
        assert not [
            item for item in told if re.search(r"nvidia|cuda|flash|transformer[-_]engine[-_]", item)
        ], name
        assert not [item for item in EXTRAS[name] if item.name == "transformer-engine" and item.extras], name
    assert "transformer-engine" not in REQUIRED
    for name, core in (("gpu", "core_cu13"), ("gpu-cu12", "core_cu12")):
        assert EXTRAS[name][0].extras == {core, "pytorch"}


# ------------------------------------------------------------------------------------------- what is distributed


def test_package_data_lists_all_files():
    """Data files must be listed in the settings, or a wheel would not contain them."""
    package = ROOT / "te_fsdp"
    patterns = SETTINGS["tool"]["setuptools"]["package-data"]["te_fsdp"]
    others = [
        path.relative_to(package).as_posix()
        for path in package.rglob("*")
        if path.is_file() and path.suffix not in (".py", ".pyc")
    ]
    assert "py.typed" in others
    unnamed = [
        path
        for path in others
        if not any(fnmatch.fnmatch(path, pattern.removeprefix("**/")) for pattern in patterns)
    ]
    assert not unnamed
    folders = {path.parent for path in package.rglob("*.py")}
    assert not [folder for folder in folders if not (folder / "__init__.py").exists()]


def test_source_distribution_has_the_documented_files():
    told = (ROOT / "MANIFEST.in").read_text()
    named = [
        word for line in told.splitlines() if re.match("include|graft", line) for word in line.split()[1:]
    ]
    assert not [name for name in named if not (ROOT / name).exists()]
    assert {"constraints", "docs", "examples", "scripts", "tests", "Makefile"} <= set(named)


def test_console_script_exists():
    for target in PROJECT["scripts"].values():
        module, _, name = target.partition(":")
        assert callable(getattr(importlib.import_module(module), name))


def test_dockerfile_uses_existing_files():
    """Check its lines like a linter. scripts/setup.sh, which does the work, has no other test here."""
    lines = (ROOT / "Dockerfile").read_text().replace("\\\n", " ").splitlines()
    steps = [line.split(maxsplit=1) for line in lines if line.strip() and not line.startswith("#")]
    assert {word for word, _ in steps} <= {"FROM", "ARG", "RUN", "WORKDIR", "COPY", "ENV", "USER", "CMD"}
    bases = [rest.split()[0] for word, rest in steps if word == "FROM"]
    (minor,) = {int(re.fullmatch(r"python:3\.(\d+)-slim-\w+", base)[1]) for base in bases}
    assert versions.PYTHON.first[1] <= minor <= versions.PYTHON.last[1]
    ran = [rest for word, rest in steps if word == "RUN"]
    for text in ran:
        bash = subprocess.run(["bash", "-n"], input=text, text=True, capture_output=True, check=False)
        assert bash.returncode == 0, bash.stderr
        if "apt-get" in text:
            assert "--no-install-recommends" in text and text.endswith("rm -rf /var/lib/apt/lists/*"), text
    (setup,) = [text for text in ran if "setup.sh" in text]
    setups = (ROOT / "scripts/setup.sh").read_text()
    (given,) = [rest for word, rest in steps if word == "ARG" and rest.startswith("SETUP")]
    assert setup == "VENV=/opt/te_fsdp scripts/setup.sh" and f"#   {given} " in setups
    copied = [rest.split() for word, rest in steps if word == "COPY"]
    assert copied == [[".", "."], ["--from=build", "/opt/te_fsdp", "/opt/te_fsdp"]]
    assert [rest for word, rest in steps if word == "USER"][-1] != "root"
    left_out = (ROOT / ".dockerignore").read_text().splitlines()
    needed = ["te_fsdp", "pyproject.toml", "README.md", "LICENSE", "constraints", "scripts", "setup.py"]
    assert not [name for name in needed if any(fnmatch.fnmatch(name, pattern) for pattern in left_out)]


def test_documented_extras_exist():
    pages = [
        ROOT / "README.md",
        ROOT / "CONTRIBUTING.md",
        *(ROOT / "docs").glob("*.md"),
        ROOT / "te_fsdp/cli/env.py",
    ]
    told = re.findall(
        r"(?:te-fsdp|whl|[\"'. ]\.)\[([a-z0-9,-]+)\]", "".join(page.read_text() for page in pages)
    )
    assert {"emulation", "gpu", "flash"} <= set(told)
    assert {name for names in told for name in names.split(",")} <= set(EXTRAS)


def test_documented_wheel_name_is_correct():
    assert (
        f"te_fsdp-{te_fsdp.__version__}-py3-none-any.whl[emulation]" in (ROOT / "docs/install.md").read_text()
    )


# ------------------------------------------------------------------------------- lint where little is installed

#: Distribution -> what is imported, where the two differ.
IMPORTED_AS = {"transformer-engine": "transformer_engine", "zlib-ng": "zlib_ng"}


def imports(text: str) -> set[str]:
    """Return modules that a source imports from elsewhere, by their dotted names."""
    results: set[str] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            results |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            results.add(node.module)
    return {name for name in results if name.partition(".")[0] not in {*sys.stdlib_module_names, "te_fsdp"}}


def unknown_to_lint(replaced: list[str]) -> list[str]:
    """Return imports of te_fsdp that pyrefly cannot resolve with only the packages that `make lint` installs."""
    told = [*REQUIRED, *(result.name for extra in ("emulation", "lint") for result in EXTRAS[extra])]
    there = {IMPORTED_AS.get(name, name) for name in told}
    sources = [path for kind in ("*.py", "*.pyi") for path in (ROOT / "te_fsdp").rglob(kind)]
    used = set().union(*(imports(path.read_text()) for path in sources))
    return sorted(
        name
        for name in used
        if name.partition(".")[0] not in there
        and not any(fnmatch.fnmatchcase(name, pattern) for pattern in replaced)
    )


def test_lint_does_not_require_optional_frameworks():
    """`make lint` installs only the extras emulation and lint. With more packages, a missing entry is not detected."""
    replaced = SETTINGS["tool"]["pyrefly"]["replace-imports-with-any"]
    assert not unknown_to_lint(replaced)
    fewer = [pattern for pattern in replaced if pattern != "transformers"]
    assert unknown_to_lint(fewer) == ["transformers"]


# ------------------------------------------------------------------------------------------- continuous integration


def commands(text: str) -> list[str]:
    """Return targets of make that a script runs, in order."""
    return re.findall(r"^\s*make ([\w-]+)", text, re.MULTILINE)


def test_github_workflow_runs_the_ci_targets():
    """.github/workflows/ci.yml runs the targets of .ci/run and tests on every Python, nothing else."""
    yaml = pytest.importorskip("yaml", reason="PyYAML reads the workflow")
    jobs = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())["jobs"]
    scripts = [step["run"] for job in jobs.values() for step in job["steps"] if "run" in step]
    targets = commands("\n".join(scripts))
    assert sorted(targets) == sorted(commands((ROOT / ".ci/run").read_text()))
    assert all(set(line.split()[:1]) == {"make"} for script in scripts for line in script.splitlines()), (
        scripts
    )
    makefile = (ROOT / "Makefile").read_text()
    assert not [target for target in targets if not re.search(rf"^{target}:", makefile, re.MULTILINE)]
    pythons = jobs["test"]["strategy"]["matrix"]["python"]
    assert pythons == [f"3.{minor}" for minor in range(versions.PYTHON.first[1], versions.PYTHON.last[1] + 1)]
    for job in jobs.values():
        assert job["timeout-minutes"] <= 90 and not job.get("continue-on-error")
        (python,) = [step for step in job["steps"] if "setup-python" in step.get("uses", "")]
        assert python["with"]["cache"] == "pip"
        read = python["with"]["cache-dependency-path"].split()
        assert read and not [pattern for pattern in read if not list(ROOT.glob(pattern))]


@pytest.mark.parametrize(
    ("path", "names"),
    [
        ("te_fsdp.sharding.graphed", "GraphedStep StepOutput graphed_step"),
        ("te_fsdp.checkpoint.portable.huggingface", "read_config import_huggingface export_huggingface"),
    ],
)
def test_earlier_public_modules_are_importable(path, names):
    """Modules that docs/api.md has listed stay importable and re-export the same objects."""
    module = importlib.import_module(path)
    for name in names.split():
        result = getattr(module, name)
        assert result is getattr(importlib.import_module(result.__module__), name)
    assert not hasattr(module, "GraphedModel")
