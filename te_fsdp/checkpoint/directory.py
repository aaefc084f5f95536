"""Directories of checkpoints: visible only when whole, written by one job at a time, not removed while they are read.

A save writes into a hidden directory beside its target, whose lock it holds (:mod:`te_fsdp.checkpoint.locks`), and
renames it at the end; an old checkpoint is renamed before its files are removed. What a killed job leaves behind is
hidden, never taken for a checkpoint, and removed by a later save. All this holds for what is converted, too.

    DIR/step-100                              whole
    DIR/.step-200.te_fsdp-lock/OWNER          taken by whoever writes step-200
    DIR/.step-200.te_fsdp-saving.OWNER        being written, or left by a killed job
    DIR/.step-50.te_fsdp-removing.OWNER       being removed, or left by a killed job
    DIR/.step-60.te_fsdp-replaced.OWNER       its place is being taken, or was when the job was killed
"""

from __future__ import annotations

import difflib
import errno
import fcntl
import logging
import os
import re
import shutil
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from te_fsdp.checkpoint import object_store
from te_fsdp.checkpoint.locks import LOCK, Owner, check, exists, release, release_dead, take
from te_fsdp.checkpoint.manifest import (
    DCP_METADATA,
    FILE_NAME,
    INDEX,
    MARK,
    Manifest,
    check_files,
    has_manifest,
    read_manifest,
    save_number,
)
from te_fsdp.checkpoint.remote import is_remote, place_of
from te_fsdp.checkpoint.sums import DamagedFileError, checksum
from te_fsdp.errors import CheckpointError, message

_log = logging.getLogger("te_fsdp")
_SAVING, _REMOVING, _REPLACED = ".te_fsdp-saving", ".te_fsdp-removing", ".te_fsdp-replaced"
_HIDDEN = re.compile(rf"(?s)\.(.+)({_SAVING}|{_REMOVING}|{_REPLACED}|{LOCK}|\.te_fsdp-writing)(?:\.(.+))?")
#: After so many seconds a temporary directory of another machine's process counts as abandoned.
_ABANDONED = 24 * 3600
#: Last bytes of DCP's metadata, among which is the mark of the save.
_END = 4096
_FULL = {
    errno.ENOSPC: ("the disk is full", "free some space (keep_last=... removes old checkpoints)"),
    errno.EDQUOT: ("the quota of this user or project is used up", "free some of it, or have it raised"),
    errno.EFBIG: ("a file would be too large", "raise the limit (ulimit -f), or that of the file system"),
}


def begin(target: Path, *, force: bool | None = None, is_file: bool = False) -> Path:
    """Take the lock of a target, remove what killed jobs have left beside it, and make the hidden directory.

    One process alone calls this: rank 0 of a save. :func:`commit` or :func:`discard` ends it.

    Args:
        target: What is to appear.
        force: Whether it may take the place of what lies there; ``None`` in a save, which may not.
        is_file: Whether it is a file, of which the hidden path is returned only.

    Raises:
        CheckpointError: Another process writes this target, something lies there already, or it cannot be written.
    """
    if is_remote(target):
        return object_store.begin(target, force=force, is_file=is_file)
    owner = Owner.new()
    with telling_why(target):
        if not target.parent.exists():  # else what is wrong with it shows below
            target.parent.mkdir(parents=True, exist_ok=True)
        take(target, owner)
        temporary = _hidden_name(target, _SAVING, owner)
        try:
            for left in target.parent.glob(".*.te_fsdp-*"):
                _remove_left(left, target)
            _check_free(target, force)
            if not is_file:
                temporary.mkdir()
        except BaseException:
            discard(temporary)
            raise
    return temporary


def _hidden_name(path: Path, mark: str, owner: Owner | None = None) -> Path:
    """A new name beside a checkpoint, for it while it is being written, or removed."""
    return path.with_name(f".{path.name}{mark}.{owner or Owner.new()}")


def commit(temporary: Path, target: Path, *, force: bool | None = None) -> None:
    """Make what was written visible, durably, and give the lock back. Local operation.

    Of a save, rank 0 alone calls this, after all ranks have written.

    Raises:
        CheckpointError: Something lies at the target by now, or another process has its lock. :func:`discard` is
            still to be called.
    """
    if is_remote(temporary):
        return object_store.commit(temporary)
    owner = _owner_of(temporary)
    check(target, owner)
    _check_free(target, force)
    sync(temporary)
    aside = None
    if target.is_dir() or (temporary.is_dir() and os.path.lexists(target)):  # files are replaced in one step
        aside = _hidden_name(target, _REPLACED, owner)
        os.rename(target, aside)
    try:
        os.rename(temporary, target)
    except BaseException:
        if aside is not None:
            os.rename(aside, target)
        raise
    sync(target.parent)
    release(target, owner)
    if aside is not None:
        remove(aside)


def discard(temporary: Path) -> None:
    """Remove the hidden path of what failed, and give the lock back. Nothing after :func:`commit`. Local operation."""
    if is_remote(temporary):
        return object_store.discard(temporary)
    remove(temporary)
    found = _HIDDEN.fullmatch(temporary.name)
    assert found is not None
    release(temporary.with_name(found[1]), _owner_of(temporary))


def _owner_of(hidden: Path) -> Owner:
    return Owner.parse(hidden.name.rpartition(f"{_SAVING}.")[2])


def _check_free(target: Path, force: bool | None) -> None:
    if force or not os.path.lexists(target):
        return
    if target.is_dir() and not target.is_symlink() and not any(target.iterdir()):
        return
    fix = "" if force is None else "choose another path, or replace what lies there with --force"
    raise exists(target, "a path where nothing lies, or an empty directory", fix)


def _remove_left(left: Path, target: Path) -> None:
    """Remove a hidden path that nobody works on any more.

    Its process is known to be dead, or has lost the target's lock to this one, or gave no sign of life for a day.
    """
    found = _HIDDEN.fullmatch(left.name)
    if found is None:
        return
    name, mark, text = found.groups()
    if mark == LOCK and text is None:
        release_dead(left)
        return
    alive = Owner.parse(text or "").is_alive()
    try:
        silent = time.time() - left.stat().st_mtime > _ABANDONED
    except OSError:
        return  # somebody else has removed it
    if alive or (alive is None and not silent and (name != target.name or mark != _SAVING)):
        return
    _log.info("%s was left by a job that was killed", left)
    place = left.with_name(name)
    if mark != _REPLACED or os.path.lexists(place):
        remove(left)
    elif place == target:  # the only copy; of other targets it waits for those who hold their locks
        os.rename(left, place)


@contextmanager
def new_directory(
    target: Path,
    *,
    force: bool = False,
    needed: int | None = None,
    is_file: bool = False,
    is_checkpoint: bool = False,
) -> Iterator[Path]:
    """Yield a hidden directory beside ``target``, which becomes ``target`` when the block ends well.

    Args:
        target: Where the directory shall lie.
        force: Replace what lies there; it stays until the new one is whole.
        needed: Bytes that will be written, for messages.
        is_file: Yield the hidden path alone, for a file.
        is_checkpoint: Whether a manifest is written too, without which nothing appears whole on object storage.

    Raises:
        CheckpointError: Something lies there already, another process writes it, or it cannot be written.
    """
    with telling_why(target, needed):
        has_no_manifest = is_file or (is_remote(target) and not is_checkpoint)
        temporary = begin(target, force=force, is_file=has_no_manifest)
        try:
            yield temporary
            for path in () if is_remote(target) else temporary.rglob("*"):
                sync(path)
            commit(temporary, target, force=force)
        finally:
            discard(temporary)


@contextmanager
def telling_why(target: Path, needed: int | None = None) -> Iterator[None]:
    """Say what the system has refused to write, of a full disk that it is full, whatever became of the system's error.

    Args:
        target: What is being written.
        needed: Bytes that this process has to write.

    Raises:
        CheckpointError: In the place of the system's error.
    """
    try:
        yield
    except BaseException as error:
        # DCP's are no Exceptions, and torch.save raises another one when it closes its file.
        cause: BaseException | None = error
        while cause is not None and getattr(cause, "errno", None) not in _FULL:
            cause = cause.__cause__ or cause.__context__
        if not isinstance(cause, OSError) or is_remote(target):
            if not isinstance(error, OSError):
                raise
            raise CheckpointError(
                f"{target}: cannot be written ({error.strerror or error}: {error.filename or target})",
                why="Nothing has appeared there",
                fix="check the path and the permissions",
            ) from error
        what, fix = _FULL[cause.errno]  # type: ignore[index]
        place = next(path for path in target.parents if path.exists())
        raise CheckpointError(
            f"{target}: {what} ({cause.strerror})",
            expected="space for it" if needed is None else f"space for {needed:,} bytes of this process",
            got=f"{shutil.disk_usage(place).free:,} bytes free on the file system of {place}",
            fix=f"{fix}, or write elsewhere",
        ) from error


def remove(path: Path) -> None:
    """Remove a file or a directory, as far as that is possible: a later save removes what is left. Local operation."""
    if is_remote(path):
        object_store.remove(path)
    elif path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with suppress(OSError):  # another user's, perhaps
            path.unlink()


def sync(path: Path) -> None:
    """Flush a file, or a directory's entries where the system can, to disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno in _FULL or not path.is_dir():  # told late, by file systems over a network
            raise
        _log.debug("%s: this file system cannot sync directories", path)
    finally:
        os.close(handle)


def latest(directory: str | os.PathLike[str]) -> Path | None:
    """The newest whole checkpoint in a directory of checkpoints. Local operation.

    Newest is what was saved last, by the number that each save gives its checkpoint, whatever the names, the steps and
    the clock: a rolled-back run finds its own last checkpoint. See :func:`in_order`. What is not whole (no readable
    manifest, files missing or of the wrong size) is passed over with a warning.

    Args:
        directory: Directory whose entries are checkpoints, such as ``DIR`` of ``DIR/step-200``.

    Returns:
        Path of the checkpoint, of ``directory`` itself if it is one; ``None`` where nothing is, not even a directory.
    """
    place = place_of(directory)
    while True:
        seen = visible(place) or [place] * (place / FILE_NAME).is_file()
        whole = (path for path, manifest in reversed(in_order(seen)) if _is_whole(path, manifest))
        newest = next(whole, None)
        if all(path.exists() for path in seen):
            return newest
        # Another job's keep_last has removed some, since it has saved newer ones.


def _is_whole(path: Path, manifest: Manifest) -> bool:
    problems = _problems(path, manifest)
    if problems and path.exists():
        _log.warning("%s is not whole, passed over: %s", path, "; ".join(problems))
    return not problems


def in_order(paths: Iterable[Path]) -> list[tuple[Path, Manifest]]:
    """Those checkpoints whose manifests can be read, the oldest first; the others with a warning. Local operation.

    In the order of their save numbers. Two jobs may give the same one at the same time: then in that of their steps
    (``extra["step"]``, else the last number in the name). Those of earlier versions of te_fsdp, which have no number,
    come before all others, in the order of their times.
    """
    found = []
    for path in paths:
        try:
            found.append((path, read_manifest(path)))
        except CheckpointError as error:
            if path.exists():  # else another job has removed it
                _log.warning("%s is passed over: %s", path, error)
    return sorted(found, key=_age)


def _age(checkpoint: tuple[Path, Manifest]) -> tuple[int, int, int, str]:
    path, manifest = checkpoint
    step = manifest.extra.get("step")
    if type(step) is not int:
        step = int((re.findall(r"\d+", path.name) or [-1])[-1])
    return manifest.number, 0 if manifest.number else manifest.saved_at, step, path.name


def next_number(directory: Path) -> int:
    """The number of the next save into a directory: one more than the largest there. Local operation."""
    return 1 + max((save_number(path) for path in visible(directory)), default=0)


def hide_old(newest: Path, manifest: Manifest, keep_last: int | None) -> list[Path]:
    """Give all but the last few checkpoints of a directory hidden names; they are no checkpoints from then on.

    Renaming is one step, so that a crash leaves each of them whole or hidden. Rank 0 alone calls this, after
    the newest one has become visible. What another job has saved since counts as newer, and stays.

    Args:
        newest: The checkpoint that was just made; always kept.
        manifest: Its manifest.
        keep_last: How many to keep, the newest included; ``None`` for all.

    Returns:
        The hidden directories, still to be removed.
    """
    if keep_last is None:
        return []
    beside = in_order(path for path in visible(newest.parent) if path != newest)
    older = [path for path, other in beside if other.number < manifest.number]
    gone = [
        hidden for path in older[: max(0, len(older) + 1 - keep_last)] if (hidden := _hide(path)) is not None
    ]
    if gone and not is_remote(newest):
        # The new names must be on disk before the first file goes: a partial directory must not reappear.
        sync(newest.parent)
    return gone


def _hide(path: Path) -> Path | None:
    """Rename a checkpoint that nobody reads; ``None`` if it stays."""
    try:
        if is_remote(path):
            return object_store.hide(path)
        with (path / FILE_NAME).open("r+b") as manifest:
            try:
                fcntl.flock(manifest, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                _log.info("%s is being loaded, a later save will remove it", path)
                return None
            except OSError:
                _log.debug("%s: this file system has no locks", path)
            hidden = _hidden_name(path, _REMOVING)
            os.rename(path, hidden)
            return hidden
    except FileNotFoundError:
        return None  # another job has removed it
    except OSError as error:
        _log.warning("%s should be removed and cannot be: %s", path, error)
        return None


@contextmanager
def in_use(path: Path) -> Iterator[None]:
    """Keep a checkpoint from being removed by ``keep_last``, in this or another process. Local operation.

    Best effort: a file system without locks, object storage, or a manifest that we may not open gives none. Where
    there is no checkpoint, nothing is done.
    """
    with ExitStack() as opened:
        try:
            if not is_remote(path) and (path / FILE_NAME).is_file():  # a pipe would be waited for
                manifest = opened.enter_context((path / FILE_NAME).open("rb"))
                fcntl.flock(manifest, fcntl.LOCK_SH)
        except OSError as error:
            _log.debug("%s: no lock of this file system: %s", path, error)
        yield


def _problems(path: Path, manifest: Manifest) -> list[str]:
    """What is wrong with a checkpoint, as far as that shows without reading its tensors."""
    problems, folder = check_files(path, manifest), manifest.at(path)
    listed, metadata = manifest.files.get(DCP_METADATA), folder / DCP_METADATA
    if problems:
        return problems
    try:
        if listed is None or checksum(metadata) != listed[1]:
            return [f"{DCP_METADATA}: its contents have changed (CRC-32)"]
    except OSError as error:
        return [f"{DCP_METADATA}: {error.strerror or error}"]
    if INDEX in manifest.files:
        # It is read instead of the metadata, whose mark nobody else looks at. It stands near the end.
        with metadata.open("rb") as file:
            file.seek(max(0, listed[0] - _END))
            mark = MARK.search(file.read())
        try:
            manifest.check_identity(mark and mark[0].decode())
        except DamagedFileError as error:
            return [f"{DCP_METADATA}: {error}"]
    elif (folder / INDEX).is_file():
        return [f"{INDEX}: not listed in the manifest"]
    return []


def visible(directory: Path) -> list[Path]:
    """Visible directories with a manifest; those that this user may not enter are told. Local operation."""
    if not directory.is_dir():
        return []
    found = []
    for path in (path for path in sorted(directory.iterdir()) if not path.name.startswith(".")):
        try:
            found += [path] if has_manifest(path) else []
        except CheckpointError as error:
            # Root's, in each mount of an ext file system: nothing to speak of.
            level = logging.DEBUG if path.name == "lost+found" else logging.WARNING
            _log.log(level, "%s is passed over: %s", path, error)
    return found


def open_checkpoint(path: Path) -> Manifest:
    """Manifest of a checkpoint whose files are all there, with the sizes that they were written with.

    Local operation.

    Raises:
        CheckpointError: No checkpoint there, an unreadable manifest, or missing or truncated files.
    """
    if not has_manifest(path):
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
            f"{path}: damaged checkpoint: {'; '.join(sorted(problems))}",
            why="Nothing was loaded",
            fix="load an earlier checkpoint, or copy this one again",
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
    inside, beside = visible(path), [p.name for p in visible(path.parent)]
    if inside:
        got = f"{', '.join(p.name for p in inside[-5:])} inside"
        fix = f"load one of them: te_fsdp.checkpoint.latest({str(path)!r}) finds the newest"
        return message(f"{path}: a directory of checkpoints", expected="one of them", got=got, fix=fix)
    got = "a directory without it" if path.is_dir() else "a file" if path.exists() else "nothing at that path"
    close = difflib.get_close_matches(path.name, beside, n=3, cutoff=0.4) or beside[-3:]
    fix = "check the path; no checkpoint lies near it"
    if close:
        fix = f"in {path.parent} there is {', '.join(close)}"
    if (path / "config.json").is_file():
        fix = "te_fsdp.checkpoint.load_huggingface reads folders of Hugging Face models"
    elif path.is_file():
        fix = f"te-fsdp ckpt convert {path} TARGET --to checkpoint makes one of a torch.save or safetensors file"
    return message(f"{path}: no such checkpoint", expected=f"a directory with {FILE_NAME}", got=got, fix=fix)
