"""List documented commands: `RUN_BY` names the test that runs them, `NOT_RUN` the reason why none does.

`test_docs.py` checks that every command is of one of the two kinds; the tests get the commands to run from `to_run`.
"""

from __future__ import annotations

import re
import shlex
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
#: Page -> the test that runs its commands, but for those of `NOT_RUN`.
RUN_BY = {
    "README.md": "tests/pytorch/distributed/test_commands.py::test_documented_commands_run",
    "docs/cli.md": "tests/unit/test_cli_ckpt.py::test_documented_cli_commands_run",
    "docs/emulation.md": "tests/pytorch/distributed/test_commands.py::test_documented_commands_run",
    "docs/huggingface.md": "tests/unit/test_huggingface_cli.py::test_huggingface_page_command_runs",
    "docs/install.md": "tests/pytorch/distributed/test_commands.py::test_documented_commands_run",
    "docs/integrations.md": "tests/pytorch/distributed/test_integrations.py::test_documented_commands_run",
    "docs/moe.md": "tests/pytorch/distributed/test_commands.py::test_documented_commands_run",
    "docs/plan.md": "tests/unit/test_planning.py::test_plan_page_commands_run",
    "docs/quickstart.md": "tests/unit/test_docs.py::test_quickstart_runs",
    "docs/train.md": "tests/unit/test_docs.py::test_train_page_runs",
    "docs/versions.md": "tests/pytorch/distributed/test_commands.py::test_documented_commands_run",
    "examples/fsdp2_tp/README.md": "tests/pytorch/distributed/test_commands.py::test_documented_commands_run",
}
#: (page, what a command matches) -> why no test runs it, or the test that runs its program for less.
NOT_RUN = {
    ("", r"(uv )?pip (install|wheel) |python3 -m venv |uv venv "): "installs, by the network",
    ("README.md", "make test "): "runs all tests, this one too",
    ("", r"(PIP_FIND_LINKS=\S+ )?SETUP=gpu scripts/setup.sh"): "installs, by the network, what GPUs need",
    ("docs/install.md", "site=|export C|export CUDA_HOME"): "prepares a compilation for GPUs",
    ("docs/install.md", "docker "): "builds an image by the network; test_packaging.py reads the Dockerfile",
    ("docs/cli.md", "mkdir|te-fsdp completion"): "writes where shells look; tests/unit/test_planning.py",
    ("docs/moe.md", r"NODES=2|make train-moe ARGS"): "needs GPUs",
    ("docs/nodes.md", "export TORCH_DISABLE|torchrun|head=|srun"): "needs several nodes; test_torchrun.py",
    ("examples/fsdp2_tp/README.md", ".*train_vocabulary.py"): "test_example_vocabulary.py runs the script for less",
    ("benchmarks/README.md", "python benchmarks/scale.py"): "takes many minutes; tests/unit/test_scale.py",
    ("benchmarks/README.md", ".*many_ranks.py"): "32 ranks; tests/unit/test_scale.py::test_many_ranks_benchmark_runs",
    ("benchmarks/README.md", ".*benchmarks/step.py"): "needs GPUs; tests/pytorch/distributed/test_step_benchmark.py",
    ("benchmarks/README.md", "export TE|.*benchmarks/convergence.py"): "GPUs, or minutes; test_convergence_curves.py",
    ("benchmarks/README.md", ".*benchmarks/(checkpoint.py --gib 16|rollout.py|weight_gathers.py)"): "needs four GPUs",
    ("benchmarks/README.md", ".*benchmarks/checkpoint.py --gib 1 "): "writes many GiB",
}  # fmt: skip
#: First words of a line that is a command, after variables; `text` blocks have none.
PROGRAMS = r"make|te-fsdp|torchrun|python3?|pytest|pip|uv|docker|srun|bash|git|cd|export|scripts/\S+"


@cache
def blocks(page: str, language: str) -> list[str]:
    """Return contents of a page's fenced blocks of a language, in order."""
    text = (ROOT / page).read_text()
    return re.findall(rf"^```{language}\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)


def lines(block: str) -> list[str]:
    """Return the commands of a block unchanged, without comments; those over several lines joined."""
    joined = block.replace("\\\n", " ")
    return [line for line in joined.splitlines() if line.strip() and not line.startswith("#")]


def why_not(page: str, command: str) -> list[tuple[str, str]]:
    """Return the entries of `NOT_RUN` that a command matches."""
    return [key for key in NOT_RUN if key[0] in ("", page) and re.match(key[1], command)]


def to_run(page: str) -> list[list[str]]:
    """Return the commands that a page's test runs, per `sh` block. Blocks without such commands are omitted."""
    results = [[line for line in lines(block) if not why_not(page, line)] for block in blocks(page, "sh")]
    return [commands for commands in results if commands]


def words(command: str) -> list[str]:
    """Return a command's words, without its comment."""
    return shlex.split(command, comments=True)
