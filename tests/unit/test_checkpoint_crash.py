"""Check that the newest complete checkpoint is exact after processes were killed during saves."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
from pathlib import Path

import pytest
import torch
from torch import nn

from te_fsdp import checkpoint
from te_fsdp.checkpoint.manifest import Manifest
from te_fsdp.errors import CheckpointError
from tests.unit.commands import python_path

SCRIPT = Path(__file__).with_name("crash_worker.py")
#: The te_fsdp of this tree, whichever is installed.
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": python_path()}
SEED = int(os.environ.get("TE_FSDP_CRASH_SEED", "20"))
#: Half of them of synchronous saves, half of asynchronous ones.
TRIALS = int(os.environ.get("TE_FSDP_CRASH_TRIALS", "24"))


def _worker():
    spec = importlib.util.spec_from_file_location("crash_worker", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory, python: str) -> tuple[Path, list[dict]]:
    """Return directories of killed jobs, and the outcome of each."""
    directory = tmp_path_factory.mktemp("killed")
    command = [python, str(SCRIPT), str(directory), str(SEED), str(TRIALS)]
    ran = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=900, check=False)
    texts = "\n".join(path.read_text() for path in directory.glob("*.txt"))
    assert ran.returncode == 0, f"seed {SEED}: {ran.stderr}\n{texts}"
    return directory, [json.loads(line) for line in ran.stdout.splitlines() if line.startswith("{")]


class Expected:
    """The state after a number of steps in one process, which a checkpoint of that step must contain."""

    def __init__(self) -> None:
        self.worker = _worker()
        self.model, self.optimizer = self.worker.build()
        self.states = [self._state(self.model, self.optimizer)]

    @staticmethod
    def _state(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
        parameters = list(model.parameters())
        buffers = [optimizer.state[p].get("momentum_buffer") for p in parameters]
        return [t.detach().clone() for t in (*parameters, *(b for b in buffers if b is not None))]

    def after(self, steps: int) -> list[torch.Tensor]:
        while len(self.states) <= steps:
            self.worker.step(self.model, self.optimizer)
            self.states.append(self._state(self.model, self.optimizer))
        return self.states[steps]

    def loaded(self, path: Path) -> tuple[int, list[torch.Tensor]]:
        torch.manual_seed(1)
        model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(6)))
        optimizer = self.worker.momentum(model)
        extra = checkpoint.load(path, model, optimizer, verify=True)
        return extra["step"], self._state(model, optimizer)


def _same(left: list[torch.Tensor], right: list[torch.Tensor]) -> bool:
    return len(left) == len(right) and all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


def test_latest_checkpoint_is_exact_after_random_kills(killed: tuple[Path, list[dict]]) -> None:
    directory, outcomes = killed
    assert len(outcomes) == TRIALS
    expected, in_the_middle, noticed = Expected(), 0, 0
    for number, outcome in enumerate(outcomes):
        where = directory / str(number)
        told = f"seed {SEED}, trial {number}: {outcome}"
        newest = checkpoint.latest(where)
        assert outcome["killed"] and newest is not None, told
        step, state = expected.loaded(newest)
        assert newest.name == f"step-{step}", told
        # A rank knew that this one was complete; a newer one may have become complete as it died.
        assert outcome["known"] <= step <= outcome["known"] + 1, told
        assert _same(state, expected.after(step)), told
        assert not _same(state, expected.after(step - 1)), "the comparison can fail"
        whole = sorted(p for p in where.iterdir() if not p.name.startswith("."))
        for path in whole:
            checkpoint.verify(path)
        assert len(whole) in (1, 2, 3), told  # keep_last=2, and one that was about to be removed
        hidden = [p for p in where.iterdir() if p.name.startswith(".")]
        in_the_middle += bool(hidden)
        noticed += outcome["noticed"]
        checkpoint.save(where / "after", nn.Linear(2, 2))
        assert not [p for p in where.iterdir() if p.name.startswith(".")], "a later save cleans up"
    # Else the kills came between saves, and this test has shown nothing.
    assert in_the_middle >= TRIALS // 4, f"{in_the_middle} of {TRIALS} kills were in the middle of a save"
    assert noticed == TRIALS, f"{TRIALS - noticed} times the other rank waited for the dead one"


INSTANTS = ("before the manifest", "before the rename", "before the files go")
INSTANTS_SCRIPT = """
import os, signal, sys
from pathlib import Path
import torch
from te_fsdp import checkpoint
from te_fsdp.checkpoint import directory
from te_fsdp.checkpoint.manifest import Manifest

where, instants = Path(sys.argv[1]), sys.argv[2:]
for instant in instants:
    for step in (1, 2):
        checkpoint.save(where / instant / f"step-{step}", torch.nn.Linear(2, 2), extra={"step": step})
    if os.fork() == 0:
        module, name = {
            "before the manifest": (Manifest, "write"),
            "before the rename": (directory, "commit"),
            "before the files go": (directory, "remove"),
        }[instant]
        setattr(module, name, lambda *a: os.kill(os.getpid(), signal.SIGKILL))
        checkpoint.save(where / instant / "step-3", torch.nn.Linear(2, 2), extra={"step": 3}, keep_last=2)
        os._exit(0)
    assert os.wait()[1] == signal.SIGKILL, instant
"""


def test_latest_checkpoint_is_exact_after_kills_during_commit(tmp_path: Path, python: str) -> None:
    """Kill at instants that random times rarely reach."""
    command = [python, "-c", INSTANTS_SCRIPT, str(tmp_path), *INSTANTS]
    ran = subprocess.run(command, env=ENVIRONMENT, capture_output=True, timeout=120, check=False)
    assert ran.returncode == 0, ran.stderr.decode()
    for instant in INSTANTS:
        where, whole = tmp_path / instant, instant == "before the files go"
        names = sorted(p.name for p in where.iterdir() if not p.name.endswith("te_fsdp-lock"))
        (hidden,) = [name for name in names if name.startswith(".")]
        if whole:
            assert hidden.startswith(".step-1.te_fsdp-removing.") and names[1:] == ["step-2", "step-3"]
        else:
            assert hidden.startswith(".step-3.te_fsdp-saving.") and names[1:] == ["step-1", "step-2"]
        newest = checkpoint.latest(where)
        assert newest is not None
        assert checkpoint.load(newest, nn.Linear(2, 2), verify=True) == {"step": 3 if whole else 2}
        checkpoint.save(where / "step-4", nn.Linear(2, 2), keep_last=1)
        assert [p.name for p in where.iterdir()] == ["step-4"]


def test_keep_last_does_not_remove_corrupted_checkpoints(tmp_path: Path) -> None:
    for step in (1, 2):
        checkpoint.save(tmp_path / f"step-{step}", nn.Linear(2, 2))
    (tmp_path / "step-1" / "te_fsdp.json").write_text("{")
    checkpoint.save(tmp_path / "step-3", nn.Linear(2, 2), keep_last=1)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-1", "step-3"]
    with pytest.raises(CheckpointError):
        Manifest.read(tmp_path / "step-1")
