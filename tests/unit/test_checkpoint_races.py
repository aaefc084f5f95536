"""Test races between jobs: symbolic links, a target that appears before the rename, replaced targets."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from te_fsdp import checkpoint
from te_fsdp.checkpoint import directory, planner
from te_fsdp.cli import main
from te_fsdp.errors import CheckpointError


def names(where: Path) -> list[str]:
    return sorted(path.name for path in where.iterdir())


@pytest.mark.parametrize("linked", [True, False])
def test_keep_last_ignores_symbolic_links(tmp_path: Path, linked: bool) -> None:
    """Links such as `latest` and `best` do not count. The same number of checkpoints is kept without them."""
    run, elsewhere = tmp_path / "run", tmp_path / "elsewhere"
    checkpoint.save(elsewhere / "step-9", nn.Linear(2, 2))
    for step in (1, 2, 3):
        checkpoint.save(run / f"step-{step}", nn.Linear(2, 2), extra={"step": step})
    links = {"latest": "step-3", "best": "step-2", "begun": str(elsewhere / "step-9")} if linked else {}
    for name, target in links.items():
        (run / name).symlink_to(target)
    checkpoint.save(run / "step-4", nn.Linear(2, 2), extra={"step": 4}, keep_last=3)
    assert names(run) == [*sorted(links), "step-2", "step-3", "step-4"]
    assert checkpoint.latest(run) == run / "step-4"
    for name in links:
        checkpoint.verify(run / name)


def test_paths_through_symbolic_links_resolve_like_the_system(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every call resolves `link/..` like the operating system, so saved checkpoints are found."""
    (tmp_path / "disk" / "job").mkdir(parents=True)
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "link").symlink_to(tmp_path / "disk" / "job")
    monkeypatch.chdir(tmp_path / "home")
    handle = checkpoint.save("link/../run/step-1", nn.Linear(2, 2))
    assert handle.path == tmp_path / "disk" / "run" / "step-1" and names(tmp_path / "home") == ["link"]
    newest = checkpoint.latest("link/../run")
    assert newest is not None and newest.samefile(handle.path)
    checkpoint.load(newest, nn.Linear(2, 2))
    checkpoint.verify("../disk/run/../run/step-1/")
    with pytest.raises(CheckpointError, match="step-1: exists already"):
        checkpoint.save(tmp_path / "disk" / "run" / "step-1", nn.Linear(2, 2))
    assert checkpoint.save("./step-2/", nn.Linear(2, 2)).path == tmp_path / "home" / "step-2", (
        "a link's own stays"
    )


def _at_rename(monkeypatch: pytest.MonkeyPatch, target: Path, act: Any) -> None:
    """Call a function between a job's last check of its target and the rename."""
    rename = os.rename

    def late(source: Any, to: Any) -> None:
        if Path(to) == target:
            monkeypatch.setattr(os, "rename", rename)
            act()
        rename(source, to)

    monkeypatch.setattr(os, "rename", late)


def test_save_reports_a_target_created_before_its_rename(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first rename wins. The error reports that the target exists, and the other job's files are kept."""
    target = tmp_path / "a"

    def be_faster() -> None:
        other = directory.begin(target)
        (other / "text").write_text("theirs")
        directory.commit(other, target)

    _at_rename(monkeypatch, target, be_faster)
    with pytest.raises(CheckpointError, match="a: exists already"):
        checkpoint.save(target, nn.Linear(2, 2))
    assert (target / "text").read_text() == "theirs" and names(tmp_path) == ["a"]


def test_save_reports_a_target_that_force_replaces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`--force` targets an empty directory that a job is saving to. The first rename wins."""
    checkpoint.save(tmp_path / "other", nn.Linear(2, 2))
    target, args = tmp_path / "x", ["--to", "checkpoint", "--force"]
    target.mkdir()
    blocks, codes = planner.RankWriter.blocks, []

    def meanwhile(self: Any) -> Any:
        monkeypatch.setattr(planner.RankWriter, "blocks", blocks)
        codes.append(main(["ckpt", "convert", str(tmp_path / "other"), str(target), *args]))
        return blocks(self)

    monkeypatch.setattr(planner.RankWriter, "blocks", meanwhile)
    with pytest.raises(CheckpointError, match="x: exists already"):
        checkpoint.save(target, nn.Linear(3, 3))
    assert codes == [0]
    checkpoint.load(target, nn.Linear(2, 2))
    assert names(tmp_path) == ["other", "x"]


def test_async_save_reports_required_bytes_on_a_full_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(self: Any) -> Any:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(planner.RankWriter, "blocks", full)
    for asynchronous in (False, True):
        with pytest.raises(CheckpointError, match="the disk is full.*expected space for 24 bytes of this"):
            checkpoint.save(tmp_path / "a", nn.Linear(2, 2), asynchronous=asynchronous).result()


def test_unreadable_directory_raises_checkpoint_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Example: a network mount that has disappeared. The caller gets CheckpointError, not OSError."""

    def gone(path: Path) -> Any:
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), str(path))

    assert checkpoint.latest(tmp_path) is None
    monkeypatch.setattr(Path, "iterdir", gone)
    with pytest.raises(CheckpointError, match=r"unreadable directory \(OSError.*Stale.*Fix: check the path"):
        checkpoint.latest(tmp_path)
    with pytest.raises(CheckpointError, match="unreadable directory .*File name too long"):
        checkpoint.latest(tmp_path / ("n" * 300))
