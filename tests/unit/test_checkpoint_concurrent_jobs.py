"""Test saves under bad conditions: concurrent jobs, clocks that are set back, full disks."""

from __future__ import annotations

import errno
import json
import logging
import os
import pickle
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from te_fsdp import checkpoint
from te_fsdp.checkpoint import directory, manifest, planner
from te_fsdp.checkpoint.directory import Owner
from te_fsdp.checkpoint.storage import resolve_path
from te_fsdp.cli import main
from te_fsdp.errors import CheckpointError
from tests.unit.commands import python_path

SCRIPT = Path(__file__).with_name("concurrent_save_worker.py")
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": python_path()}
#: Above the largest process id of a Linux kernel.
DEAD = 2**22 + 1


def model() -> nn.Module:
    return nn.Linear(2, 2)


def names(where: Path) -> list[str]:
    return sorted(path.name for path in where.iterdir())


# ------------------------------------------------------------------------------------------------ jobs at one path


@pytest.fixture(scope="module")
def met(tmp_path_factory: pytest.TempPathFactory, python: str) -> dict[str, list[dict[str, Any]]]:
    """Return outcomes of concurrent jobs, by plan."""
    where = tmp_path_factory.mktemp("met")
    plans = ("stopped", "killed", "slow")
    (where / "stopped").mkdir()
    command = [python, str(SCRIPT), str(where), *plans]
    ran = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=900, check=False)
    assert ran.returncode == 0, ran.stderr
    outcomes = [json.loads(line) for line in ran.stdout.splitlines() if line.startswith("{")]
    return {plan: [o for o in outcomes if o["plan"] == plan] for plan in plans}


def test_one_of_two_concurrent_saves_wins(met: dict[str, list[dict[str, Any]]]) -> None:
    """The first rename wins. The other job reports that the target exists and leaves no files."""
    winners = set()
    for outcome in met["stopped"]:
        won = [told == "done" for told in outcome["told"]]
        assert sum(won) == 1, outcome
        winner = won.index(True)
        assert outcome["text"] == ("first", "second")[winner] and outcome["names"] == ["x"], outcome
        assert "exists already" in outcome["told"][1 - winner], outcome
        winners.add(winner)
    assert winners == {0, 1} and len(met["stopped"]) > 20


def test_concurrent_saves_on_a_slow_disk_keep_a_complete_checkpoint(
    met: dict[str, list[dict[str, Any]]],
) -> None:
    for outcome in met["slow"]:
        told, values, kept = outcome["told"], outcome["values"], outcome["names"]
        assert set(outcome["seen"]) <= {"step-3", "step-4", "step-5"}, (
            "there is a newest whole one at any time"
        )
        if outcome["same"]:
            assert sorted(t == "done" for t in told) == [False, True], outcome
            winner = told.index("done")
            assert "exists already" in told[1 - winner], outcome
            assert values == {"step-3": 3.0, "step-4": (4.0, 5.0)[winner]}, outcome
        else:
            assert told == ["done", "done"], outcome
            # Saved at the same time they may have the same number: then neither counts the other as older.
            assert values in (
                {"step-4": 4.0, "step-5": 5.0},
                {"step-3": 3.0, "step-4": 4.0, "step-5": 5.0},
            ), outcome
        assert kept == sorted(values), "nothing hidden is left"


def test_killed_save_does_not_block_the_next_save(met: dict[str, list[dict[str, Any]]]) -> None:
    """The next job can save to the same path at once, unless the killed save was complete."""
    told = set()
    for outcome in met["killed"]:
        whole = outcome["newest"] == "step-3"
        assert outcome["newest"] in ("step-2", "step-3"), outcome
        assert outcome["told"] == "done" if not whole else "step-3: exists already" in outcome["told"], (
            outcome
        )
        assert outcome["value"] == (3.0 if whole else 4.0) and outcome["names"] == ["step-3", "step-4"], (
            outcome
        )
        told.add(whole)
    assert told == {True, False} and len(met["killed"]) > 20


# ------------------------------------------------------------------------------------- folders of killed jobs


def test_leftovers_of_a_reused_process_id_are_removed(tmp_path: Path) -> None:
    """A process with the ID of an exited owner started later. The control is this process itself."""
    here = Owner.new()
    for start, stays in (("1", False), (here.start, True)):
        owner = Owner(here.machine, here.pid, start, here.since, "0" * 8)
        left = tmp_path / f".step-1.te_fsdp-saving.{owner}"
        left.mkdir()
        checkpoint.save(tmp_path / f"step-{start}", model())
        assert left.exists() == stays


def test_zombie_process_counts_as_exited(tmp_path: Path) -> None:
    """A zombie has a process ID but no longer writes."""
    child = subprocess.Popen(["sleep", "100"])
    owner = Owner(directory._machine(), child.pid, directory._start_of(child.pid) or "", 0, "0" * 8)
    assert owner.is_alive() is True
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert owner.is_alive() is False
    child.wait()
    assert owner.is_alive() is False


def test_leftovers_of_exited_jobs_are_removed(tmp_path: Path) -> None:
    """Leftovers are removed if their process has exited, or is unknown and they are a day old."""
    here = Owner.new()
    dead, elsewhere = Owner(here.machine, DEAD, "1", 0, "0"), Owner("node7-12345678", 1, "1", 0, "0")
    actual = directory.begin(tmp_path / "step-1")
    left = {
        f".step-2.te_fsdp-saving.{dead}": False,
        f".step-2.te_fsdp-lock.{dead}": False,  # of an earlier version
        f".step-2.te_fsdp-removing.{dead}": False,
        f".step-3.te_fsdp-saving.{elsewhere}": True,
        f".step-3.te_fsdp-removing.{elsewhere}": True,
        f".step-4.te_fsdp-saving.{elsewhere}": False,  # a day old
        f".step-5.te_fsdp-saving.{elsewhere}": True,  # of the same path: that job may still be writing
        ".step-6.te_fsdp-lock": False,  # of an earlier version, a day old
        ".step-7.te_fsdp-lock": True,
        ".step-6.te_fsdp-saving.other-host.1.00000000": True,
        ".notes.te_fsdp-things": True,
    }
    for name in left:
        (tmp_path / name).mkdir()
    yesterday = time.time() - 25 * 3600
    for name in (f".step-4.te_fsdp-saving.{elsewhere}", ".step-6.te_fsdp-lock"):
        os.utime(tmp_path / name, (yesterday, yesterday))
    assert checkpoint.latest(tmp_path) is None
    checkpoint.save(tmp_path / "step-5", model())
    stays = [name for name, expected in left.items() if expected]
    assert set(names(tmp_path)) == {"step-5", actual.name, *stays}
    directory.discard(actual)


def test_machine_ids_differ_for_containers_and_hosts_of_one_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """Process IDs are not valid in other containers or on other hosts with the same name."""
    here, stat, read = directory._machine(), os.stat, Path.read_text
    assert directory._machine() == here

    def other_container(path: Any, **how: Any) -> Any:
        result = stat(path, **how)
        if str(path) != "/proc/self/ns/pid":
            return result
        return os.stat_result((result.st_mode, result.st_ino + 1, *result[2:]))

    with monkeypatch.context() as patch:
        patch.setattr(os, "stat", other_container)
        assert directory._machine() != here
    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_text", lambda path, *a: read(path, *a) + "x" * ("boot_id" in str(path)))
        assert directory._machine() != here
    assert directory._machine() == here


# ------------------------------------------------------------------------------------------------- order, not time


def test_latest_is_correct_after_the_clock_is_set_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [2 * 10**18]

    def clock() -> int:
        now[0] -= 10**12
        return now[0]

    monkeypatch.setattr(time, "time_ns", clock)
    for step in (9, 10, 100):
        checkpoint.save(tmp_path / f"step-{step}", model(), extra={"step": step})
        assert checkpoint.latest(tmp_path) == tmp_path / f"step-{step}"
    checkpoint.save(
        tmp_path / "step-50", model(), extra={"step": 50}, keep_last=2
    )  # a run that was rolled back
    assert names(tmp_path) == ["step-100", "step-50"] and checkpoint.latest(tmp_path) == tmp_path / "step-50"
    assert [manifest.Manifest.read(tmp_path / name).number for name in names(tmp_path)] == [3, 4]
    assert directory.next_number(tmp_path) == 5


def test_latest_orders_checkpoints_with_missing_or_equal_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(directory, "next_number", lambda where: 0)  # as earlier versions saved, ...
        for name, when in (("old-2", 8), ("old-1", 9)):
            patch.setattr(time, "time_ns", lambda when=when: when * 10**18)
            checkpoint.save(tmp_path / name, model())
    monkeypatch.setattr(directory, "next_number", lambda where: 3)  # ... and two jobs at the same time
    for name in ("step-10", "step-9", "c"):
        checkpoint.save(tmp_path / name, model(), extra={"step": 7} if name == "c" else None)
    monkeypatch.undo()
    ordered = [path.name for path, _ in directory.in_order(directory.visible(tmp_path))]
    assert ordered == ["old-2", "old-1", "c", "step-9", "step-10"]
    assert checkpoint.latest(tmp_path) == tmp_path / "step-10"
    checkpoint.save(tmp_path / "new", model(), keep_last=3)
    assert names(tmp_path) == ["new", "step-10", "step-9"], "what latest would find last goes first"


def test_latest_finds_a_checkpoint_saved_during_the_listing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Between listing names and reading files, a newer checkpoint appears and the listed ones are removed."""
    checkpoint.save(tmp_path / "step-1", model())
    read = manifest.Manifest.read

    def late(path: Path) -> Any:
        if not (tmp_path / "step-2").exists():
            monkeypatch.setattr(manifest.Manifest, "read", read)
            checkpoint.save(tmp_path / "step-2", model(), keep_last=1)
        return read(path)

    monkeypatch.setattr(manifest.Manifest, "read", late)
    with caplog.at_level(logging.WARNING, logger="te_fsdp"):
        assert checkpoint.latest(tmp_path) == tmp_path / "step-2"
    assert not caplog.records, "nothing was damaged"


def test_concurrent_removal_of_one_checkpoint_is_not_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for step in (1, 2, 3):
        checkpoint.save(tmp_path / f"step-{step}", model())
    hidden_name = directory._hidden_name

    def other_was_quicker(path: Path, mark: str) -> Path:
        if mark == directory._REMOVING:
            shutil.rmtree(path)
        return hidden_name(path, mark)

    monkeypatch.setattr(directory, "_hidden_name", other_was_quicker)
    with caplog.at_level(logging.WARNING, logger="te_fsdp"):
        checkpoint.save(tmp_path / "step-4", model(), keep_last=2)
    assert names(tmp_path) == ["step-3", "step-4"] and not caplog.records


def test_load_during_removal_succeeds_or_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At each file access, the load either has read everything, or raises and has changed nothing."""
    told = set()
    for at in range(20):
        (tmp_path / "a").exists() or checkpoint.save(tmp_path / "a", model())
        target, touched = model(), iter(range(at))
        before, opened = target.weight.clone(), Path.open

        def late(path: Path, *how: Any, touched: Any = touched, opened: Any = opened, **options: Any) -> Any:
            if path.is_relative_to(tmp_path) and next(touched, None) is None:
                shutil.rmtree(tmp_path / "a", ignore_errors=True)
            return opened(path, *how, **options)

        with monkeypatch.context() as patch:
            patch.setattr(Path, "open", late)
            try:
                checkpoint.load(tmp_path / "a", target)
                told.add("loaded")
            except CheckpointError:
                assert torch.equal(target.weight, before)
                told.add("refused")
    assert told == {"loaded", "refused"}


def test_path_checks_raise_system_errors_except_missing_paths(tmp_path: Path) -> None:
    """On every Python version, system errors are raised, and a missing path returns False."""
    for text in ("n" * 300, "none/inside", "null\0"):
        path = resolve_path(tmp_path / text)
        for exists in (path.exists, path.is_dir, path.is_file):
            if text == "n" * 300:
                with pytest.raises(OSError, match="File name too long"):
                    exists()
            else:
                assert not exists()
    path = resolve_path(tmp_path)
    assert path.exists() and path.is_dir() and not path.is_file()
    assert type(pickle.loads(pickle.dumps(path))) is type(tmp_path), "pickles need no te_fsdp"


def test_inaccessible_directories_are_skipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The directories belong to a different user. This is simulated because root may read everything."""
    for step in (1, 2):
        checkpoint.save(tmp_path / f"step-{step}", model())
    closed, stat = {"lost+found", "step-2"}, Path.stat
    (tmp_path / "lost+found").mkdir()

    def stat_here(path: Path, **options: Any) -> os.stat_result:
        if closed & {*path.parts[:-1]}:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return stat(path, **options)

    monkeypatch.setattr(Path, "stat", stat_here)
    with caplog.at_level(logging.WARNING, logger="te_fsdp"):
        assert checkpoint.latest(tmp_path) == tmp_path / "step-1"
    assert ["step-2: cannot be read (Permission denied)" in text for text in caplog.messages] == [True]
    checkpoint.save(tmp_path / "step-3", model(), keep_last=1)
    assert checkpoint.latest(tmp_path) == tmp_path / "step-3" and not (tmp_path / "step-1").exists()
    with pytest.raises(
        CheckpointError, match=r"step-2: cannot be read \(Permission denied\)\. Fix: check the path"
    ):
        checkpoint.load(tmp_path / "step-2", model())
    with pytest.raises(CheckpointError, match=r"step-2: cannot be read"):
        checkpoint.verify(tmp_path / "step-2")
    closed.clear()
    assert checkpoint.latest(tmp_path) == tmp_path / "step-3"


def test_system_errors_are_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = rf"a: cannot be written \({os.strerror(errno.EROFS)}.*check the path and the permissions"
    for place in PLACES.values():
        with monkeypatch.context() as patch:
            patch.setattr(*place, _always(errno.EROFS))
            with pytest.raises(CheckpointError, match=text):
                checkpoint.save(tmp_path / "a", model())
    assert names(tmp_path) == []
    checkpoint.save(tmp_path / "two\nlines", model())
    assert names(tmp_path) == ["two\nlines"]


# ------------------------------------------------------------------------------------------------------ full disks


def _always(number: int) -> Any:
    def fail(*args: Any, **how: Any) -> Any:
        raise OSError(number, os.strerror(number))

    return fail


FULL = {
    errno.ENOSPC: "the disk is full",
    errno.EDQUOT: "the quota of",
    errno.EFBIG: "a file would be too large",
}
PLACES = {
    "directory": (Path, "mkdir"),
    "tensors": (planner.RankWriter, "blocks"),
    "sync": (os, "fsync"),
    "manifest": (manifest, "_digest"),
    "rename": (os, "rename"),
}


@pytest.mark.parametrize("number", FULL)
@pytest.mark.parametrize("place", PLACES)
def test_full_disk_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str, number: int
) -> None:
    checkpoint.save(tmp_path / "a", model())
    text = (
        rf"b: {FULL[number]}.*\({os.strerror(number)}\): expected space for .* got [0-9,]+ bytes free .*Fix: "
    )
    with monkeypatch.context() as patch:
        patch.setattr(*PLACES[place], _always(number))
        asynchronous = number == errno.EDQUOT
        with pytest.raises(CheckpointError, match=text):
            checkpoint.save(tmp_path / "b", model(), keep_last=1, asynchronous=asynchronous).result()
    assert names(tmp_path) == ["a"] and checkpoint.latest(tmp_path) == tmp_path / "a"
    checkpoint.verify(tmp_path / "a")
    checkpoint.save(tmp_path / "b", model())


LIMIT = """
import resource, sys
import torch
from te_fsdp import checkpoint
from te_fsdp.cli import main
from te_fsdp.errors import CheckpointError
where = sys.argv[1]
large, extra = torch.nn.Linear(256, 256), {"text": "x" * 200_000}
checkpoint.save(f"{where}/a", large)
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))
small = torch.nn.Linear(2, 2)
for name, model, more in (("b", large, {}), ("c", large, {"asynchronous": True}), ("d", small, {"extra": extra})):
    try:
        checkpoint.save(f"{where}/{name}", model, **more).result()
    except CheckpointError as error:
        print(error)
for name in ("x.pt", "x.safetensors", "x"):
    for way in (["--to", "safetensors"], ["--to", "checkpoint"]) if name == "x" else ([],):
        assert main(["ckpt", "convert", f"{where}/a", f"{where}/{name}", *way]) == 1
"""


def test_file_size_limit_is_reported(tmp_path: Path, python: str) -> None:
    """Real errors are reported, including those that torch.save converts."""
    command = [python, "-c", LIMIT, str(tmp_path)]
    ran = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=300, check=False)
    assert ran.returncode == 0, ran.stderr
    output = [line for line in (ran.stdout + ran.stderr).splitlines() if "too large (File too large)" in line]
    assert len([line for line in output if "save failed" in line]) >= 3, ran.stdout + ran.stderr
    assert len([line for line in output if "te-fsdp: error:" in line and "263,168 bytes of" in line]) == 4, (
        ran.stderr
    )
    assert names(tmp_path) == ["a"]
    assert main(["ckpt", "verify", str(tmp_path / "a")]) == 0
