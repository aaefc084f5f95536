"""Check that the documentation's code runs, that names on its pages exist.

The quickstart's Python blocks, joined, are the script that its commands start; both are taken from the page.
"""

import ast
import functools
import importlib
import inspect
import json
import math
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import te_fsdp
from tests.unit import documented
from tests.unit.commands import ROOT, start

MORE = ["README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md"]
MORE += ["benchmarks/README.md", "examples/fsdp2_tp/README.md"]
PAGES = [*(ROOT / page for page in MORE), *sorted((ROOT / "docs").glob("*.md"))]
QUICKSTART = "docs/quickstart.md"


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


every_page = pytest.mark.parametrize("page", PAGES, ids=name_of)


def run(python: str, command: str, folder: Path) -> str:
    """Run a command of the page; returns what it printed."""
    program, *arguments = documented.words(command)
    module = {"torchrun": "torch.distributed.run", "te-fsdp": "te_fsdp.cli"}[program]
    result = start(python, module, arguments, folder)
    assert result.returncode == 0, f"{command}\n{result.stdout[-2000:]}\n{result.stderr[-4000:]}"
    return result.stdout


def losses(output: str) -> dict[int, float]:
    """Step -> loss of the lines that the script prints."""
    return {
        int(step): float(loss) for step, loss in re.findall(r"^step (\d+): loss (\S+)$", output, re.MULTILINE)
    }


def test_quickstart_runs(tmp_path, python):
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if 0 < gpus < 4:
        pytest.skip(f"the quickstart's commands need 4 GPUs, found {gpus}")
    (tmp_path / "quickstart.py").write_text("\n".join(documented.blocks(QUICKSTART, "python")))
    [[_, *commands, look]] = documented.to_run(
        QUICKSTART
    )  # the first one sets OMP_NUM_THREADS, as `start` does
    if gpus:
        commands = [command.replace(" -m te_fsdp.emulation", "") for command in commands]
    assert len(commands) == 2, commands

    first, second = (run(python, command, tmp_path) for command in commands)
    assert "sharding" in first, f"no report in\n{first}"
    assert "gathers of the root: none (it has no sharded weights)" in first
    assert "float8 (bfloat16)" in first, f"no quantized weight in\n{first}"
    assert list(losses(first)) == list(range(10)), first
    assert list(losses(second)) == list(range(10, 20)), second
    everything = [*losses(first).values(), *losses(second).values()]
    assert all(math.isfinite(loss) for loss in everything), everything
    # Ten steps take a fifth off the toy task's loss: a resume without the weights would begin at the top.
    assert losses(second)[10] < 0.9 * losses(first)[0], everything
    assert json.loads(run(python, f"{look} --json", tmp_path))["extra"]["step"] == 20


def test_train_page_runs(tmp_path, python):
    """Run the page's script: ten steps on one mesh, then ten on a different mesh with a continuous loss."""
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if 0 < gpus < 4:
        pytest.skip(f"the page's commands need 4 GPUs, found {gpus}")
    page = "docs/train.md"
    (tmp_path / "train.py").write_text("\n".join(documented.blocks(page, "python")))
    [[_, *commands]] = documented.to_run(page)  # the first one sets OMP_NUM_THREADS, as `start` does
    if gpus:
        commands = [command.replace(" -m te_fsdp.emulation", "") for command in commands]
    printed = [run(python, command, tmp_path) for command in commands]
    results = [dict(re.findall(r"^step (\d+): loss ([\d.]+),", text, re.MULTILINE)) for text in printed]
    assert [list(map(int, steps)) for steps in results] == [list(range(10)), list(range(10, 20))], printed
    losses = [float(loss) for steps in results for loss in steps.values()]
    # Learnt in 20 steps: 5.6 nats to 2.2. A resume without weights or main weights would start at 5.6 again.
    assert losses[10] < losses[9] + 0.1 and losses[19] < 0.6 * losses[0], losses
    assert all("evaluation: loss" in text for text in printed)


@every_page
def test_code_blocks_are_python(page):
    for block in documented.blocks(name_of(page), "python"):
        ast.parse(block)


@every_page
def test_documented_names_exist(page):
    for name in sorted(set(re.findall(r"(?<![\"\w])te_fsdp(?:\.[A-Za-z_]\w*)+", page.read_text()))):
        if name not in ("te_fsdp.json", "te_fsdp.index"):  # files of a checkpoint
            find(name)


@every_page
def test_arguments_in_code_blocks_exist(page):
    for block in documented.blocks(name_of(page), "python"):
        for name, arguments, keywords in calls(block):
            inspect.signature(find(name)).bind_partial(*arguments, **dict.fromkeys(keywords))


@every_page
def test_documented_files_and_tests_exist(page):
    text = page.read_text()
    linked = {
        target.partition("#")[0] for target in re.findall(r"\]\(([^)\s]+)\)", text) if "://" not in target
    }
    gone = [target for target in sorted(linked) if target and not (page.parent / target).exists()]
    assert not gone, f"{page.name} links to {gone}"
    named = re.findall(r"\b((?:tests|scripts|examples|benchmarks|constraints|docs)/[\w/]+\.\w+)", text)
    assert not [path for path in named if not (ROOT / path).exists()]
    for tests, names in re.findall(r"(test_\w+\.py)((?:`?,?\s*`?::test_\w+)*)", text):
        sources = [path.read_text() for path in ROOT.glob(f"tests/**/{tests}")]
        assert sources, f"{page.name} names {tests}, which is gone"
        for name in re.findall(r"test_\w+", names):
            assert any(f"def {name}(" in source for source in sources), f"{page.name} names {tests}::{name}"


@every_page
def test_documented_anchors_exist(page):
    """Anchors follow GitHub's rules for headings, which MyST shares (``myst_heading_anchors``)."""
    assert not broken_anchors(page, page.read_text())


def broken_anchors(page: Path, text: str) -> list[str]:
    """Return links of a page's text to headings that no page has; MyST anchors headings of three levels."""
    prose = re.sub(r"^```.*?^```$|`[^`\n]*`", "", text, flags=re.MULTILINE | re.DOTALL)
    broken = []
    for target, anchor in re.findall(r"\]\(([^)#\s]*)#([^)\s]+)\)", prose):
        other = page.parent / target if target else page
        if "://" not in target and other.suffix == ".md" and anchor not in anchors(other):
            broken.append(f"{target}#{anchor}")
    return broken


@functools.cache
def anchors(page: Path) -> set[str]:
    """Return GitHub's anchors of a page: lower case, no punctuation, hyphens for spaces, a number for the second."""
    results: dict[str, int] = {}
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    for heading in re.findall(r"^#{1,3} (.+?)\s*$", text, re.MULTILINE):
        words = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower()
        slug = re.sub(r"[^\w\- ]", "", words).replace(" ", "-")
        results[slug] = results.get(slug, -1) + 1
    return {f"{slug}-{n}" if n else slug for slug, last in results.items() for n in range(last + 1)}


def test_control_broken_anchor_is_detected():
    page = ROOT / "docs/data.md"
    assert broken_anchors(page, "[a](concepts.md#stages) [b](#nowhere) [c](concepts.md#no-place)") == [
        "#nowhere",
        "concepts.md#no-place",
    ]


# ------------------------------------------------------------------------------------------------------- commands


@every_page
def test_documented_commands_exist(page):
    """Check make targets and options of scripts and te-fsdp, also in commands that no test runs."""
    listed = [line for block in documented.blocks(name_of(page), "sh") for line in documented.lines(block)]
    assert not [word for command in listed for word in unknown_words(command)]


@every_page
def test_each_documented_command_is_run_or_excused(page):
    name = name_of(page)
    assert not unaccounted(name, name in documented.RUN_BY)
    for block in documented.blocks(name, "text"):
        assert not re.match(rf"([A-Z_]+=\S+ )*({documented.PROGRAMS}) ", block), (
            f"commands are `sh`:\n{block}"
        )
    bash = subprocess.run(
        ["bash", "-n"],
        input="\n".join(documented.blocks(name, "sh")),
        text=True,
        capture_output=True,
        check=False,
    )
    assert not bash.stderr


def unaccounted(page: str, is_run: bool) -> list[str]:
    """Return commands of a page that no test runs and nothing excuses, or that two reasons excuse."""
    listed = [line for block in documented.blocks(page, "sh") for line in documented.lines(block)]
    reasons = {line: len(documented.why_not(page, line)) for line in listed}
    return [line for line, count in reasons.items() if count > 1 or (count == 0 and not is_run)]


def test_tests_and_reasons_of_documented_commands_exist():
    pages = {name_of(page) for page in PAGES}
    for page, test in documented.RUN_BY.items():
        assert documented.to_run(page), f"{page} has no command that {test} would run"
        file, function = test.split("::")
        assert f"def {function}(" in (ROOT / file).read_text() and "to_run(" in (ROOT / file).read_text(), (
            test
        )
    used = {
        key
        for page in pages
        for block in documented.blocks(page, "sh")
        for line in documented.lines(block)
        for key in documented.why_not(page, line)
    }
    assert used == documented.NOT_RUN.keys()
    named = [result for why in documented.NOT_RUN.values() for result in re.findall(r"tests/\S+\.py", why)]
    assert named and all((ROOT / path).exists() for path in named)


def test_control_command_without_a_test_is_detected():
    assert unaccounted("docs/moe.md", False)
    assert not unaccounted("docs/moe.md", True)


def unknown_words(command: str) -> list[str]:
    """Return words of a command that its program's source does not define."""
    first, *words = documented.words(re.sub(r"^([A-Z_]+=\S+ )+", "", command))
    if first == "make":
        targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        return [word for word in words if "=" not in word and word not in targets]
    at = next((n for n, word in enumerate(words) if word.startswith("examples/")), None)
    if first == "te-fsdp":
        sources = sorted((ROOT / "te_fsdp/cli").glob("*.py")) + sorted((ROOT / "te_fsdp").glob("*/**/*.py"))
    elif at is not None:
        sources, words = sorted((ROOT / words[at]).parent.glob("*.py")), words[at + 1 :]
    else:
        return []  # programs of the reader's own, and pytest, which has its own options
    known = "\n".join(source.read_text() for source in sources).replace("_", "-")
    options = [word.partition("=")[0] for word in words if word.startswith("--") and word != "--help"]
    return [o for o in options if not re.search(rf"\b{re.escape(o.strip('-').split('.')[-1])}\b", known)]


def test_control_wrong_commands_are_detected():
    assert unknown_words("make fetch ARGS=1") == ["fetch"]
    wrong = "torchrun --nproc-per-node 2 examples/fsdp2_tp/train.py --tp 2 --no-such 2"
    assert unknown_words(wrong) == ["--no-such"]
    assert unknown_words("te-fsdp plan my-llama --no-such 8") == ["--no-such"]


def test_api_reference_lists_every_public_name():
    page = (ROOT / "docs/api.md").read_text()
    names = [f"te_fsdp.{name}" for name in te_fsdp.__all__ if name not in ("__version__", "checkpoint")]
    names += [f"te_fsdp.checkpoint.{name}" for name in te_fsdp.checkpoint.__all__]
    errors = {
        f"te_fsdp.{name}" for name in importlib.import_module("te_fsdp.errors").__all__
    }  # docs/errors.md
    assert not [name for name in names if name not in errors and not re.search(rf"{re.escape(name)}\b", page)]


def calls(block: str) -> Iterator[tuple[str, list[None], list[str]]]:
    """Yield (name, positional arguments, keywords) of the calls of te_fsdp's functions in a block."""
    for node in ast.walk(ast.parse(block)):
        if isinstance(node, ast.Call) and (name := ast.unparse(node.func)).startswith("te_fsdp."):
            yield name, [None] * len(node.args), [keyword.arg for keyword in node.keywords if keyword.arg]


@functools.cache
def find(name: str) -> object:
    """Return the module or attribute of a dotted name of te_fsdp."""
    first, *rest = name.split(".")
    result = importlib.import_module(first)
    if rest[0] in te_fsdp._MODULES:  # subclasses of TransformerEngine's, which may be absent
        return object
    for n, part in enumerate(rest, 1):
        if not hasattr(result, part):
            importlib.import_module(".".join([first, *rest[:n]]))
        result = getattr(result, part)
    return result


def test_control_wrong_names_and_arguments_are_detected():
    find("te_fsdp.errors.MeshError")
    for name in ("te_fsdp.errors.MashError", "te_fsdp.nowhere"):
        with pytest.raises(ModuleNotFoundError):
            find(name)
    ((name, arguments, keywords),) = calls("te_fsdp.fully_shard(model, meshes, strategie='optim')")
    with pytest.raises(TypeError, match="strategie"):
        inspect.signature(find(name)).bind_partial(*arguments, **dict.fromkeys(keywords))
