"""Directories of checkpoints: a save that is visible only when whole, and finding whole ones.

A save writes into a hidden directory beside its target and renames it at the end; an old checkpoint is renamed
before its files are removed. What a killed job leaves behind is hidden, never taken for a checkpoint, and removed
by a later save.

    DIR/step-100                                     whole
    DIR/.step-200.te_fsdp-saving.HOST.PID.TOKEN      being written, or left by a killed job
    DIR/.step-50.te_fsdp-removing.HOST.PID.TOKEN     being removed, or left by a killed job
"""

from __future__ import annotations

import difflib
import logging
import os
import secrets
import shutil
import socket
import time
from pathlib import Path

from te_fsdp.checkpoint.manifest import (
    DCP_METADATA,
    FILE_NAME,
    Manifest,
    check_files,
    checksum,
    read_manifest,
)
from te_fsdp.errors import CheckpointError, message

__all__ = [
    "begin",
    "commit",
    "damaged",
    "discard",
    "hidden_name",
    "latest",
    "open_checkpoint",
    "visible",
    "sync_directory",
]

_log = logging.getLogger("te_fsdp")
_SAVING, _REMOVING = ".te_fsdp-saving.", ".te_fsdp-removing."
#: After so many seconds a temporary directory of another machine's process counts as abandoned.
_ABANDONED = 24 * 3600


def begin(target: Path) -> Path:
    """Make the hidden directory of a save, and remove what killed saves have left beside it.

    Rank 0 alone calls this.

    Raises:
        CheckpointError: Something lies at the target already.
    """
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise CheckpointError(
            message(
                f"{target}: exists already",
                expected="a path where nothing lies, or an empty directory",
                why="A checkpoint is replaced by nobody, so that a crash can never damage one",
                fix="save under another name, such as step-<number>, or remove the old one first",
            )
        )
    target.parent.mkdir(parents=True, exist_ok=True)
    for mark in (_SAVING, _REMOVING):
        for left in target.parent.glob(f".*{mark}*"):
            if _is_abandoned(left, mark, target):
                _log.info("removing %s, left by a job that was killed", left)
                shutil.rmtree(left, ignore_errors=True)
    temporary = hidden_name(target, saving=True)
    temporary.mkdir()
    return temporary


def hidden_name(target: Path, *, saving: bool) -> Path:
    """A new name beside a checkpoint, for it while it is being written, or being removed."""
    mark = _SAVING if saving else _REMOVING
    return target.parent / f".{target.name}{mark}{_machine()}.{os.getpid()}.{secrets.token_hex(4)}"


def discard(temporary: Path) -> None:
    """Remove the hidden directory of a save that failed. Rank 0 alone calls this."""
    shutil.rmtree(temporary, ignore_errors=True)


def _is_abandoned(left: Path, mark: str, target: Path) -> bool:
    """Whether nobody works on a hidden directory any more.

    It is of the same checkpoint's save, or its process on this machine is dead, or it is a day old.
    """
    name, _, owner = left.name.partition(mark)
    if name == f".{target.name}" and mark == _SAVING:
        return True
    host, _, rest = owner.partition(".")
    pid = rest.partition(".")[0]
    if host == _machine() and pid.isdigit():
        return not _is_alive(int(pid))
    try:
        return time.time() - left.stat().st_mtime > _ABANDONED
    except OSError:
        return False


def _machine() -> str:
    """Where a process id means what it means here. Containers may share a host's name, and not its process ids."""
    host = socket.gethostname().replace(".", "-")
    try:
        return f"{host}-{os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:  # no Linux
        return host


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def commit(temporary: Path, target: Path) -> None:
    """Make a finished save visible, durably. Rank 0 alone calls this, after all ranks have written."""
    sync_directory(temporary)
    os.rename(temporary, target)
    sync_directory(target.parent)


def sync_directory(directory: Path) -> None:
    """Flush a directory's entries to disk, where the system can."""
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError:
        _log.debug("%s: this file system cannot sync directories", directory)
    finally:
        os.close(handle)


def latest(directory: str | os.PathLike[str]) -> Path | None:
    """The newest whole checkpoint in a directory of checkpoints. Local operation.

    Newest by the time of the save, whatever the names; a rolled-back run therefore finds its own last
    checkpoint. What is not whole (no readable manifest, files missing or of the wrong size) is passed over
    with a warning.

    Args:
        directory: Directory whose entries are checkpoints, such as ``DIR`` of ``DIR/step-200``.

    Returns:
        Path of the checkpoint, or ``None`` where there is none, the directory itself included.
    """
    found: list[tuple[int, str, Path]] = []
    for path in visible(Path(directory)):
        try:
            manifest = read_manifest(path)
            problems = _problems(path, manifest)
        except CheckpointError as error:
            problems, manifest = [str(error)], None
        if problems or manifest is None:
            _log.warning("%s is not whole, passed over: %s", path, "; ".join(problems))
        else:
            found.append((manifest.saved_at, path.name, path))
    return max(found)[2] if found else None


def _problems(path: Path, manifest: Manifest) -> list[str]:
    """What is wrong with a checkpoint, as far as that shows without reading its tensors."""
    problems = check_files(path, manifest)
    listed = manifest.files.get(DCP_METADATA)
    if not problems and (listed is None or checksum(path / DCP_METADATA) != listed[1]):
        problems.append(f"{DCP_METADATA}: its contents have changed (CRC-32)")
    return problems


def visible(directory: Path) -> list[Path]:
    """Visible directories with a manifest."""
    if not directory.is_dir():
        return []
    return [
        p for p in sorted(directory.iterdir()) if not p.name.startswith(".") and (p / FILE_NAME).is_file()
    ]


def open_checkpoint(path: Path) -> Manifest:
    """Manifest of a checkpoint whose files are all there, with the sizes that they were written with.

    Local operation.

    Raises:
        CheckpointError: No checkpoint there, an unreadable manifest, or missing or truncated files.
    """
    if not (path / FILE_NAME).is_file():
        raise CheckpointError(_nothing_there(path))
    manifest = read_manifest(path)
    damaged(path, _problems(path, manifest))
    return manifest


def damaged(path: Path, problems: list[str]) -> None:
    """Raise if there are problems with the files of a checkpoint. Local operation.

    Raises:
        CheckpointError: All of them in one text.
    """
    if problems:
        raise CheckpointError(
            message(
                f"{path}: damaged checkpoint: {'; '.join(sorted(problems))}",
                why="Nothing was loaded",
                fix="load an earlier checkpoint, or copy this one again",
            )
        )


def _nothing_there(path: Path) -> str:
    """Why a path is no checkpoint, with the checkpoints that are near it."""
    if (path / DCP_METADATA).is_file():
        return message(
            f"{path}: {FILE_NAME} is missing beside its {DCP_METADATA}",
            expected="a checkpoint of te_fsdp, or a plain one whose metadata tells the nested dict (planner_data)",
            got="neither for certain",
            why="A checkpoint of te_fsdp that has lost its manifest is not whole",
            fix="load an earlier checkpoint or copy this one again; if torch.distributed.checkpoint wrote it without "
            "flattening, read it with te-fsdp ckpt convert",
        )
    inside, beside = visible(path), visible(path.parent)
    if inside:
        names = ", ".join(p.name for p in inside[-5:])
        fix = f"load one of them: te_fsdp.checkpoint.latest({str(path)!r}) finds the newest"
        return message(
            f"{path}: a directory of checkpoints", expected="one of them", got=f"{names} inside", fix=fix
        )
    got = "a directory without it" if path.is_dir() else "a file" if path.exists() else "nothing at that path"
    close = difflib.get_close_matches(path.name, [p.name for p in beside], n=3, cutoff=0.4)
    close = close or [p.name for p in beside[-3:]]
    fix = (
        f"in {path.parent} there is {', '.join(close)}"
        if close
        else "check the path; no checkpoint lies near it"
    )
    return message(f"{path}: no such checkpoint", expected=f"a directory with {FILE_NAME}", got=got, fix=fix)
