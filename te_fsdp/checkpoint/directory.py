"""Directories of checkpoints: visible only when whole, written by one job at a time, not removed while they are read.

A save writes into a hidden directory beside its target, whose lock it holds (:mod:`te_fsdp.checkpoint.storage`), and
renames it at the end; an old checkpoint is renamed before its files are removed. What a killed job leaves behind is
hidden, never taken for a checkpoint, and removed by a later save. All this holds for what is converted, too.

    DIR/step-100                              whole
    DIR/.step-200.te_fsdp-lock/OWNER          taken by whoever writes step-200
    DIR/.step-200.te_fsdp-saving.OWNER        being written, or left by a killed job
    DIR/.step-50.te_fsdp-removing.OWNER       being removed, or left by a killed job

Object storage has neither renaming nor locks: there a checkpoint is whole when its manifest is there, written last and
only where none lies. It names the folder beside it, ``te_fsdp-data.OWNER``, into which one save alone has written.
"""

from __future__ import annotations

import errno
import logging
import math
import os
import re
import shutil
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, cast

from te_fsdp.checkpoint import storage
from te_fsdp.checkpoint.manifest import (
    DCP_METADATA,
    FILE_NAME,
    Manifest,
    has_manifest,
    problems_shown,
    read_manifest,
    save_number,
    unreadable,
)
from te_fsdp.checkpoint.shard_files import explain_os_errors, sync
from te_fsdp.checkpoint.storage import LOCK, Owner, RemotePath, is_remote, resolve_path
from te_fsdp.errors import CheckpointError

_log = logging.getLogger("te_fsdp")
_SAVING, _REMOVING = ".te_fsdp-saving", ".te_fsdp-removing"
_HIDDEN = re.compile(rf"(?s)\.(.+)({_SAVING}|{_REMOVING}|{LOCK})(?:\.(.+))?")
#: Begins the names of folders on object storage; an object in one from its beginning on, by which other jobs find it
#: and this one sees that it may write.
_DATA, _BEGUN = "te_fsdp-data.", "writing"
#: After so many seconds what a process of another machine was writing counts as abandoned.
_ABANDONED = 24 * 3600


def begin(target: Path, *, is_file: bool = False) -> Path:
    """Take the lock of a target, remove what killed jobs have left beside it, and make the hidden directory.

    One process alone calls this: rank 0 of a save. :func:`commit` or :func:`discard` ends it. For a file it only
    returns the path. CheckpointError: another process writes this target, something lies there, or the system refuses.
    """
    if is_remote(target):
        return _begin_folder(target, is_file)
    with explain_os_errors(target):
        if not target.parent.exists():  # else what is wrong with it shows below
            target.parent.mkdir(parents=True, exist_ok=True)
        owner = storage.acquire_lock(target)
        temporary = _hidden_name(target, _SAVING, owner)
        try:
            for left in target.parent.glob(".*.te_fsdp-*"):
                _remove_left(left, target)
            _check_free(target, owner)
            if not is_file:
                temporary.mkdir()
        except BaseException:
            discard(temporary)
            raise
    return temporary


def _hidden_name(path: Path, mark: str, owner: Owner) -> Path:
    return path.with_name(f".{storage.short_name(path.name)}{mark}.{owner}")


def commit(temporary: Path, target: Path) -> None:
    """Make what was written visible, durably, and give the lock back. One process calls this, after all have written.

    CheckpointError: something lies there by now, or another has the lock. :func:`discard` is still to be called.
    """
    if is_remote(temporary):
        data, manifest = (temporary / FILE_NAME).read_bytes(), cast(Any, target / FILE_NAME)
        try:
            manifest.create(data)
        except FileExistsError as error:
            if manifest.read_bytes() != data:  # else it was asked twice, since the first answer was lost
                raise _exists(target) from error
        for name in (FILE_NAME, _BEGUN):
            remove(temporary / name)
        return
    owner = Owner.parse(temporary.name.rpartition(f"{_SAVING}.")[2])
    try:
        _check_free(target, owner)
        sync(temporary)
        os.rename(temporary, target)
    except OSError:
        _check_free(target, owner)  # this process was held up since the first look
        raise
    sync(target.parent)
    storage.release_lock(target, owner)


def discard(temporary: Path) -> None:
    """Remove the hidden path of what failed, and give the lock back. Nothing after :func:`commit`. Local operation."""
    if is_remote(temporary):
        target = temporary.parent
        try:
            if (target / FILE_NAME).exists() and read_manifest(target).folder == temporary.name:
                return
        except (CheckpointError, OSError) as error:
            _log.warning(
                "%s: not removed, since what lies at %s cannot be read: %s", temporary, target, error
            )
            return
    remove(temporary)
    if found := _HIDDEN.fullmatch(temporary.name):  # there are no locks on object storage
        storage.release_lock(temporary.with_name(found[1]), Owner.parse(found[3]))


def _check_free(target: Path, owner: Owner) -> None:
    if os.path.lexists(target) and (not target.is_dir() or target.is_symlink() or any(target.iterdir())):
        raise _exists(target)
    storage.check_lock(target, owner)


def _exists(target: Any) -> CheckpointError:
    return CheckpointError(
        f"{target}: exists already",
        expected="a path where nothing lies, or an empty directory",
        why="What lies there is replaced by nobody, so that a crash can never damage it",
        fix="choose another path, such as step-<number>, or remove what lies there first (te-fsdp ckpt: --force)",
    )


def _remove_left(left: Path, target: Path) -> None:
    """Remove a hidden path whose process is dead, has lost the target's lock to this one, or was silent for a day."""
    found = _HIDDEN.fullmatch(left.name)
    if found is None:
        return
    name, mark, text = found.groups()
    if mark == LOCK and text is None:
        return storage.release_stale_lock(left)
    with suppress(OSError):  # somebody else has removed it
        last = 0.0 if (name, mark) == (storage.short_name(target.name), _SAVING) else left.stat().st_mtime
        owner = Owner.parse(text or "")
        if not _is_owner_dead(owner, last):
            return
        # Clocks of machines may differ by days: a save that goes on holds its lock, and shows signs of life there.
        lives = (
            owner.is_alive() is None and mark == _SAVING and storage.gives_signs(left.with_name(name), owner)
        )
        if not lives:
            _log.info("%s was left by a job that was killed", left)
            remove(left)


def _is_owner_dead(owner: Owner, last: float) -> bool:
    """Whether an owner is dead or, where nobody can tell, has written nothing for a day."""
    alive = owner.is_alive()
    return time.time() - last > _ABANDONED if alive is None else not alive


@contextmanager
def new_directory(
    target: Path, *, needed: int | None = None, is_file: bool = False, is_checkpoint: bool = False
) -> Iterator[Path]:
    """Yield a hidden directory beside ``target``, or its path for a file, which becomes ``target`` if all goes well.

    ``needed`` are the bytes that will be written, for messages. A checkpoint has a manifest, without which nothing
    appears whole on object storage. CheckpointError: as :func:`begin`.
    """
    with explain_os_errors(target, needed):
        has_no_manifest = is_file or (is_remote(target) and not is_checkpoint)
        temporary = begin(target, is_file=has_no_manifest)
        try:
            yield temporary
            for path in () if is_remote(target) else temporary.rglob("*"):
                sync(path)
            commit(temporary, target)
        finally:
            discard(temporary)


@contextmanager
def in_place_of(target: Path) -> Iterator[Path]:
    """Yield the path for what shall replace ``target``, which stays until that is whole; one process calls this.

    Killed on the way, both lie whole in ``NAME.new``. CheckpointError: on object storage, or what the system refuses.
    """
    if is_remote(target):
        raise CheckpointError(
            f"{target}: cannot be replaced on object storage",
            expected="a path where nothing lies",
            fix="choose another path",
        )
    beside = target.with_name(f"{target.name}.new")
    with explain_os_errors(target):
        owner = storage.acquire_lock(target)
        try:
            yield beside / target.name
            storage.check_lock(target, owner)
            os.rename(target, old := _hidden_name(beside / target.name, _REMOVING, Owner.new()))
            os.rename(beside / target.name, target)
            sync(target.parent)
            remove(old)
        finally:
            storage.release_lock(target, owner)
            with suppress(OSError):  # it is not empty, or was never made
                beside.rmdir()


def remove(path: Path) -> None:
    """Remove a file or a directory, as far as that is possible: a later save removes what is left. Local operation."""
    try:
        if is_remote(path):
            path.remove_all()
        elif path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink()
    except FileNotFoundError:
        pass
    except OSError as error:  # on a disk it is another user's, perhaps
        level = logging.WARNING if is_remote(path) else logging.DEBUG
        _log.log(level, "%s: cannot be removed: %s", path, error)


def _begin_folder(target: RemotePath, is_file: bool) -> Any:
    """Remove what killed jobs have left here and beside, and begin a folder."""
    if is_file:
        raise CheckpointError(
            f"{target}: cannot be written on object storage",
            expected="a checkpoint of te_fsdp",
            got="files without a manifest",
            why="Without renaming only a manifest makes files appear in one step",
            fix="write to a local path, and copy that",
        )
    if not all(map(_owner_of_folder, target.iterdir())):
        raise _exists(target)
    for place in target.parent.iterdir():
        for folder in () if (place / FILE_NAME).exists() else place.iterdir():
            owner = _owner_of_folder(folder)
            # One save runs at a time: another one of this process has failed, and could not clean up.
            if owner and (owner.is_here or _is_owner_dead(owner, folder.touched() or math.inf)):
                _log.info("%s was left by a job that was killed", folder)
                remove(cast(Any, folder))
    folder = target / f"{_DATA}{Owner.new()}"
    (folder / _BEGUN).write_bytes(b"")
    return folder


def _owner_of_folder(folder: RemotePath) -> Owner | None:
    """Who writes, or wrote, a folder; ``None`` for what is none of ours."""
    owner = Owner.parse(folder.name.removeprefix(_DATA))
    return owner if folder.name.startswith(_DATA) and owner.machine else None


def latest(directory: str | os.PathLike[str]) -> Path | None:
    """The newest whole checkpoint of a directory, such as ``DIR`` of ``DIR/step-200``, or itself. Local operation.

    Newest is what was saved last, by the number that each save gives its checkpoint, whatever the names, the steps and
    the clock: a rolled-back run finds its own last one. What is not whole (no readable manifest, files missing or of
    the wrong size) is passed over with a warning. ``None`` where nothing is.
    """
    place = resolve_path(directory)
    while True:
        seen = visible(place) or [place] * has_manifest(place)
        whole = None
        for path, manifest in reversed(in_order(seen)):
            problems = problems_shown(path, manifest)
            if not problems:
                whole = path
                break
            if path.exists():
                _log.warning("%s is not whole, passed over: %s", path, "; ".join(problems))
        if all(path.exists() for path in seen):
            return whole
        # Another job's keep_last has removed some, since it has saved newer ones.


def in_order(checkpoints: Iterable[Path]) -> list[tuple[Path, Manifest]]:
    """Those checkpoints whose manifests can be read, the oldest first; the others with a warning. Local operation.

    In the order of their save numbers; where two jobs gave the same one, of their steps (``extra["step"]``, else the
    last number in the name). Those of earlier versions, without a number, come first, in the order of their times.
    """

    def age(checkpoint: tuple[Path, Manifest]) -> tuple[int, int, int, str]:
        path, manifest = checkpoint
        step = manifest.extra.get("step")
        if type(step) is not int:
            step = int((re.findall(r"\d+", path.name) or [-1])[-1])
        return manifest.number, 0 if manifest.number else manifest.saved_at, step, path.name

    found = []
    for path in checkpoints:
        try:
            found.append((path, read_manifest(path)))
        except CheckpointError as error:
            if path.exists():  # else another job has removed it
                _log.warning("%s is passed over: %s", path, error)
    return sorted(found, key=age)


def next_number(directory: Path) -> int:
    """The number of the next save into a directory: one more than the largest there. Local operation."""
    return 1 + max((save_number(path) for path in visible(directory)), default=0)


def hide_old(newest: Path, manifest: Manifest, keep_last: int) -> list[Path]:
    """Give all but the last few checkpoints of a directory hidden names: each is whole, or none, from then on.

    What another job has saved since counts as newer, and stays. Rank 0 alone calls this, once the newest, which counts,
    is visible, and removes what it gets.
    """
    # Symbolic links are other names of what counts already, or lies elsewhere.
    beside = in_order(p for p in visible(newest.parent) if p != newest and not os.path.islink(str(p)))
    older = [path for path, other in beside if other.number < manifest.number]
    gone = []
    for path in older[: max(0, len(older) + 1 - keep_last)]:
        try:
            if is_remote(path):
                (path / FILE_NAME).unlink()
                gone.append(path)
            else:
                hidden = _hidden_name(path, _REMOVING, Owner.new())
                os.rename(path, hidden)
                gone.append(hidden)
        except FileNotFoundError:
            pass  # another job has removed it
        except OSError as error:
            _log.warning("%s should be removed and cannot be: %s", path, error)
    if gone and not is_remote(newest):
        # The new names must be on disk before the first file goes: a partial directory must not reappear.
        sync(newest.parent)
    return gone


def visible(directory: Path) -> list[Path]:
    """Visible directories with a manifest; those that this user may not enter are told. Local operation."""
    found = []
    with unreadable(directory, "directory", "check the path"):
        inside = sorted(directory.iterdir()) if directory.is_dir() else []
    for path in inside:
        try:
            if not path.name.startswith(".") and has_manifest(path):
                found.append(path)
        except CheckpointError as error:
            # Root's, in each mount of an ext file system: nothing to speak of.
            level = logging.DEBUG if path.name == "lost+found" else logging.WARNING
            _log.log(level, "%s is passed over: %s", path, error)
    return found


def open_checkpoint(path: Path) -> Manifest:
    """Manifest of a checkpoint whose files are there, in the sizes that were written; else CheckpointError. Local."""
    if not has_manifest(path):
        raise _why_no_checkpoint(path)
    manifest = read_manifest(path)
    damaged(path, problems_shown(path, manifest))
    return manifest


def damaged(path: Path, problems: list[str]) -> None:
    """Raise if there are problems with the files of a checkpoint: CheckpointError, all in one. Local operation."""
    refused = [one for one in problems if os.strerror(errno.EACCES) in one or os.strerror(errno.EPERM) in one]
    if refused:
        raise CheckpointError(
            f"{path}: files that this user may not read: {'; '.join(sorted(refused))}",
            why="Nothing was loaded",
            fix="check the permissions of the directory and its files",
        )
    if problems:
        raise CheckpointError(
            f"{path}: damaged checkpoint: {'; '.join(sorted(problems))}",
            why="Nothing was loaded",
            fix="load an earlier checkpoint, or copy this one again",
        )


def _why_no_checkpoint(path: Path) -> CheckpointError:
    """Why a path is no checkpoint, with the checkpoints that are near it."""
    if (path / DCP_METADATA).is_file():
        return CheckpointError(
            f"{path}: {FILE_NAME} is missing beside its {DCP_METADATA}",
            expected="a checkpoint of te_fsdp, or a plain one whose metadata tells the nested dict (planner_data)",
            got="neither for certain",
            why="A checkpoint of te_fsdp that has lost its manifest is not whole",
            fix="load an earlier checkpoint or copy this one again; if torch.distributed.checkpoint wrote it without "
            "flattening, read it with te-fsdp ckpt convert",
        )
    got = "a directory without it" if path.is_dir() else "a file" if path.exists() else "nothing at that path"
    fix, inside = "check the path; no checkpoint lies near it", visible(path)
    files = [path] if not path.is_dir() or inside else path.iterdir()
    if (path / "config.json").is_file():
        fix = "te_fsdp.checkpoint.load_huggingface reads folders of Hugging Face models"
    elif path.is_file() or any(file.suffix == ".safetensors" for file in files):
        fix = (
            f"te-fsdp ckpt convert {path} TARGET --to checkpoint makes one of torch.save or safetensors files"
        )
    elif near := inside or visible(path.parent):
        names = ", ".join(checkpoint.name for checkpoint in near[-5:])
        fix = f"in {near[0].parent} there is {names}; te_fsdp.checkpoint.latest(directory) finds the newest"
    what = "a directory of checkpoints" if inside else "no such checkpoint"
    return CheckpointError(f"{path}: {what}", expected=f"a directory with {FILE_NAME}", got=got, fix=fix)
