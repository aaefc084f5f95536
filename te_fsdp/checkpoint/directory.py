"""Directories of checkpoints, which become visible only when complete.

Every save writes into its own folder. One step at the end makes it visible: the rename to the target on a disk, the
creation of the manifest on object storage. That step fails if another save has done it before, so no locks are needed.
A checkpoint is renamed before its files are removed. A later save removes the folders of killed jobs::

    DIR/step-100                              complete
    DIR/.step-200.te_fsdp-saving.OWNER        being written, or left by a killed job
    DIR/.step-50.te_fsdp-removing.OWNER       being removed, or left by a killed job

    s3://DIR/step-200/te_fsdp.json            written last; names the folder next to it
    s3://DIR/step-200/te_fsdp-data.OWNER/     the files of one save
"""

from __future__ import annotations

import codecs
import errno
import hashlib
import logging
import os
import re
import secrets
import shutil
import socket
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple, cast

from te_fsdp.checkpoint.manifest import DCP_METADATA, FILE_NAME, Manifest, has_manifest, unreadable
from te_fsdp.checkpoint.shard_files import explain_os_errors, sync
from te_fsdp.checkpoint.storage import RemotePath, is_remote, last_written, resolve_path
from te_fsdp.errors import CheckpointError

_log = logging.getLogger("te_fsdp")
_SAVING, _REMOVING = ".te_fsdp-saving", ".te_fsdp-removing"
#: Earlier versions also left locks.
_HIDDEN = re.compile(rf"(?s)\..*(?:{_SAVING}|{_REMOVING}|\.te_fsdp-lock)(?:\.(.+))?")
#: Prefix of folder names on object storage, and the object in a folder that is being written.
_DATA, _BEGUN = "te_fsdp-data.", "writing"
#: Seconds without a write after which the folder of another machine's process counts as abandoned.
_ABANDONED = 24 * 3600
#: Bytes of the target's name in a hidden name. File systems allow 255 bytes for both together.
_NAME_BYTES = 100


def begin(target: Path, *, is_file: bool = False) -> Path:
    """Create the hidden folder that a save writes into, and remove the folders of killed jobs. Local operation.

    Return the hidden path, with ``is_file`` for a file that does not exist yet. One process calls this once for a save,
    and :func:`commit` and :func:`discard` at its end. Raise CheckpointError if the target exists, or for errors of the
    file system.
    """
    if is_remote(target):
        if not all(map(_owner_of_folder, target.iterdir())):
            raise _exists(target)
        data_folder = target / f"{_DATA}{Owner.new()}"
        (data_folder / _BEGUN).write_bytes(b"")
        for checkpoint in target.parent.iterdir():
            for folder in () if (checkpoint / FILE_NAME).exists() else checkpoint.iterdir():
                owner = _owner_of_folder(folder)
                if owner is not None and folder != data_folder:
                    _remove_abandoned(folder, owner, data_folder)
        return data_folder
    with explain_os_errors(target):
        if not target.parent.exists():  # otherwise a later step reports the problem
            target.parent.mkdir(parents=True, exist_ok=True)
        # Before anything is written: an error after hours of writing would be too late.
        _check_free(target)
        temporary = _hidden_name(target, _SAVING)
        temporary.mkdir()
        for folder in target.parent.glob(".*.te_fsdp-*"):
            if match := _HIDDEN.fullmatch(folder.name):
                _remove_abandoned(folder, Owner.parse(match[1] or ""), temporary)
        # Only the name was needed, and the folder has shown that the system permits to create it.
        if is_file:
            temporary.rmdir()
    return temporary


def _remove_abandoned(folder: Path, owner: Owner, created: Path) -> None:
    """Remove a folder whose process is gone, or is unknown and has not written for a day.

    ``created`` was just created. Its time is the current time of the storage. The clocks of machines may differ by
    days.
    """
    is_alive = owner.is_alive()
    # A process has one save at a time, so its other folders are those of failed saves.
    is_abandoned = not is_alive or (is_remote(folder) and owner.pid == os.getpid())
    if is_alive is None:
        written = last_written(folder)
        is_abandoned = written is not None and (last_written(created) or 0.0) - written > _ABANDONED
    if is_abandoned:
        _log.info("%s was left by a job that was killed", folder)
        remove(folder)


def _hidden_name(path: Path, mark: str) -> Path:
    name = os.fsencode(path.name)[:_NAME_BYTES].decode(errors="ignore")
    return path.with_name(f".{name}{mark}.{Owner.new()}")


def commit(temporary: Path, target: Path) -> None:
    """Make a written folder visible, durably. One process calls this after all ranks have written.

    Raise CheckpointError if another save was first. The caller still has to call :func:`discard`.
    """
    if is_remote(temporary):
        data, manifest = (temporary / FILE_NAME).read_bytes(), cast(Any, target / FILE_NAME)
        try:
            manifest.create(data)
        except FileExistsError as error:
            # Ids in the manifest are random, so equal bytes are those of this save.
            if manifest.read_bytes() != data:  # otherwise the request was repeated after a lost answer
                raise _exists(target) from error
        for name in (FILE_NAME, _BEGUN):
            remove(temporary / name)
        return
    try:
        _check_free(target)
        # The entries of the directory must be on disk before its final name is.
        sync(temporary)
        os.rename(temporary, target)
    except OSError:
        _check_free(target)  # another job may have been faster since the first check
        raise
    sync(target.parent)


def discard(temporary: Path) -> None:
    """Remove the folder of a failed save. Do nothing after :func:`commit`. Local operation."""
    if is_remote(temporary):
        target = temporary.parent
        try:
            if (target / FILE_NAME).exists() and Manifest.read(target).folder == temporary.name:
                return
        except (CheckpointError, OSError) as error:
            _log.warning("%s: not removed, since %s cannot be read: %s", temporary, target / FILE_NAME, error)
            return
    remove(temporary)


def _check_free(target: Path) -> None:
    with suppress(FileNotFoundError):
        os.lstat(target)  # raises for a name that is too long
    if os.path.lexists(target) and (not target.is_dir() or target.is_symlink() or any(target.iterdir())):
        raise _exists(target)


def _exists(target: Any) -> CheckpointError:
    return CheckpointError(
        f"{target}: exists already",
        expected="a path that does not exist, or an empty directory",
        why="Existing checkpoints are never overwritten, so that a crash cannot damage them",
        fix="choose another path, such as step-<number>, or remove the existing one first (te-fsdp ckpt: --force)",
    )


@contextmanager
def new_directory(
    target: Path, *, needed: int | None = None, is_file: bool = False, is_checkpoint: bool = False
) -> Iterator[Path]:
    """Yield a hidden path, for a directory or a file, that becomes ``target`` if the context ends without an error.

    ``needed`` is the number of bytes to write, for messages. On object storage only a checkpoint, which has a
    manifest, can appear in one step. Raise CheckpointError like :func:`begin`.
    """
    if is_remote(target) and not is_checkpoint:
        raise CheckpointError(
            f"{target}: cannot be written on object storage",
            expected="a checkpoint of te_fsdp",
            got="files without a manifest",
            why="Object storage cannot rename, so only a manifest can make files appear in one step",
            fix="write to a local path, and copy the result",
        )
    with explain_os_errors(target, needed):
        temporary = begin(target, is_file=is_file)
        try:
            yield temporary
            # Before the rename: after a power failure the name must not refer to files whose bytes are lost.
            for path in () if is_remote(target) else temporary.rglob("*"):
                sync(path)
            commit(temporary, target)
        finally:
            discard(temporary)


@contextmanager
def in_place_of(target: Path) -> Iterator[Path]:
    """Yield the path for a replacement of ``target``, which stays until the replacement is complete.

    A job that is killed between the two renames leaves both in ``NAME.new``. Raise CheckpointError on object storage,
    or for errors of the system.
    """
    if is_remote(target) or not (target.is_symlink() or target.is_file() or target.is_dir()):
        raise CheckpointError(
            f"{target}: cannot be replaced{' on object storage' if is_remote(target) else ''}",
            expected="a file or a directory on disk",
            got="an object" if is_remote(target) else "a device, a pipe or a socket",
            fix="choose another path",
        )
    # A folder, in which the replacement and the old target can both have the target's own name.
    folder = target.with_name(f"{target.name}.new")
    with explain_os_errors(target):
        try:
            yield folder / target.name
            os.rename(target, old := _hidden_name(folder / target.name, _REMOVING))
            os.rename(folder / target.name, target)
            sync(target.parent)
            remove(old)
        finally:
            with suppress(OSError):  # it is not empty, or was never made
                folder.rmdir()


def remove(path: Path) -> None:
    """Remove a file or a directory as far as possible; a later save removes the rest. Local operation."""
    try:
        if is_remote(path):
            path.remove_all()
        elif path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink()
    except FileNotFoundError:
        pass
    except OSError as error:  # for example another user's file
        level = logging.WARNING if is_remote(path) else logging.DEBUG
        _log.log(level, "%s: cannot be removed: %s", path, error)


class Owner(NamedTuple):
    """A process that writes or removes a checkpoint. Its text is part of a folder name."""

    machine: str  #: Host name, and a digest of the boot and the namespace of process ids
    pid: int
    start: str  #: Start of the process in ticks since boot; empty if the system does not report it
    since: int  #: Start of this piece of work, in seconds since 1970
    token: str  #: Distinguishes pieces of work of one process

    @classmethod
    def new(cls) -> Owner:
        """Return an owner for this process and a new piece of work."""
        pid = os.getpid()
        return cls(_machine(), pid, _start_of(pid) or "", int(time.time()), secrets.token_hex(4))

    @classmethod
    def parse(cls, text: str) -> Owner:
        """Return the owner in a folder name; one with an empty machine for any other text."""
        parts = text.split(".")
        if len(parts) != 5 or not (parts[1].isdigit() and parts[3].isdigit()):
            return cls("", 0, "", 0, text)
        return cls(parts[0], int(parts[1]), parts[2], int(parts[3]), parts[4])

    def __str__(self) -> str:
        return ".".join(map(str, self))

    def is_alive(self) -> bool | None:
        """Return whether the process is alive; ``None`` if it runs on another machine, or ran before this boot."""
        if self.machine != _machine():
            return None
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return False
        except PermissionError:
            pass
        start = _start_of(self.pid)
        return start is None or start == self.start


def _machine() -> str:
    """Return the scope of a process id: hosts may have equal names, and containers may share a host."""
    parts = [os.uname().sysname, "", ""]  # empty except on Linux
    with suppress(OSError):
        parts[1] = Path("/proc/sys/kernel/random/boot_id").read_text()
    with suppress(OSError):
        parts[2] = str(os.stat("/proc/self/ns/pid").st_ino)
    digits = hashlib.blake2b("\n".join(parts).encode(), digest_size=4).hexdigest()
    return f"{socket.gethostname().replace('.', '_')[:48]}-{digits}"


def _start_of(pid: int) -> str | None:
    """Return when a process started; ``""`` for one that has ended, ``None`` if the system does not report it."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    # proc(5): the third field is the state, the 22nd the start. A killed process stays a zombie until it is reaped.
    return "" if fields[0] in "ZX" else fields[19]


def _owner_of_folder(folder: RemotePath) -> Owner | None:
    """Return the process that wrote a folder; ``None`` for a folder that te_fsdp did not write."""
    owner = Owner.parse(folder.name.removeprefix(_DATA))
    return owner if folder.name.startswith(_DATA) and owner.machine else None


def latest(directory: str | os.PathLike[str]) -> Path | None:
    """Return the newest complete checkpoint of a directory, such as ``DIR`` of ``DIR/step-200``, or the path itself.

    Every save gives its checkpoint a number, and the largest number is the newest, independent of names, steps and
    clocks. Incomplete checkpoints (no readable manifest, missing files, wrong sizes) are skipped with a warning.
    ``None`` if there is none. Local operation.
    """
    folder = resolve_path(directory)
    while True:
        checkpoints = visible(folder) or [folder] * has_manifest(folder)
        newest = None
        for path, manifest in reversed(in_order(checkpoints)):
            problems = manifest.problems_shown(path)
            if not problems:
                newest = path
                break
            if path.exists():
                _log.warning("%s is not complete, skipped: %s", path, "; ".join(problems))
        # Another job may have removed a checkpoint meanwhile (keep_last). Its list would then be incomplete, so
        # it is read again.
        if all(path.exists() for path in checkpoints):
            return newest


def in_order(checkpoints: Iterable[Path]) -> list[tuple[Path, Manifest]]:
    """Return the checkpoints with readable manifests, oldest first; warn about the others. Local operation.

    The order is by save number, then by step (``extra["step"]``, else the last number in the name). Checkpoints of
    early versions, without a number, come first, by time.
    """

    def age(checkpoint: tuple[Path, Manifest]) -> tuple[int, int, int, str]:
        path, manifest = checkpoint
        step = manifest.extra.get("step")
        if type(step) is not int:
            step = int((re.findall(r"\d+", path.name) or [-1])[-1])
        return manifest.number, 0 if manifest.number else manifest.saved_at, step, path.name

    readable = []
    for path in checkpoints:
        try:
            readable.append((path, Manifest.read(path)))
        except CheckpointError as error:
            if path.exists():  # otherwise another job has removed it
                _log.warning("%s is skipped: %s", path, error)
    return sorted(readable, key=age)


def next_number(directory: Path) -> int:
    """Return the number of the next save into a directory, one more than the largest there. Local operation.

    The numbers are in the first lines of the manifests; early ones have none.
    """
    largest = 0
    for path in visible(directory):
        with suppress(OSError), (path / FILE_NAME).open("rb") as file:  # another job may have removed it
            match = re.search(rb'"number": (\d{1,18}),', file.read(120))
            largest = max(largest, int(match[1]) if match else 0)
    return 1 + largest


def hide_old(newest: Path, manifest: Manifest, keep_last: int) -> list[Path]:
    """Rename all but the last ``keep_last`` checkpoints of a directory to hidden names; return these for removal.

    Checkpoints that another job has saved since then are newer, and stay. Rank 0 calls this once ``newest``, which is
    one of the ``keep_last``, is visible.
    """
    # Symbolic links are further names of other entries, or point elsewhere.
    others = in_order(p for p in visible(newest.parent) if p != newest and not os.path.islink(str(p)))
    older = [path for path, other in others if other.number < manifest.number]
    gone = []
    for path in older[: max(0, len(older) + 1 - keep_last)]:
        try:
            if is_remote(path):
                (path / FILE_NAME).unlink()
                gone.append(path)
            else:
                os.rename(path, new_path := _hidden_name(path, _REMOVING))
                gone.append(new_path)
        except FileNotFoundError:
            pass  # another job has removed it
        except OSError as error:
            _log.warning("%s cannot be removed: %s", path, error)
    if gone and not is_remote(newest):
        # The new names must be on disk before the first file is removed, or a partial directory could reappear.
        sync(newest.parent)
    return gone


def visible(directory: Path) -> list[Path]:
    """Return the visible directories with a manifest; warn about those this user may not enter. Local operation."""
    checkpoints = []
    with unreadable(directory, "directory", "check the path"):
        entries = sorted(directory.iterdir()) if directory.is_dir() else []
    for path in entries:
        try:
            if not path.name.startswith(".") and has_manifest(path):
                checkpoints.append(path)
        except CheckpointError as error:
            # Every mount of an ext file system has lost+found, which belongs to root.
            level = logging.DEBUG if path.name == "lost+found" else logging.WARNING
            _log.log(level, "%s is skipped: %s", path, error)
    return checkpoints


def open_checkpoint(path: Path) -> Manifest:
    """Return the manifest of a checkpoint whose files exist with the written sizes; else raise CheckpointError."""
    if not has_manifest(path):
        raise why_no_checkpoint(path)
    manifest = Manifest.read(path)
    damaged(path, manifest.problems_shown(path))
    return manifest


def refused_files(problems: list[str]) -> list[str]:
    """Return the problems of files that this user may not read."""
    return [p for p in problems if os.strerror(errno.EACCES) in p or os.strerror(errno.EPERM) in p]


def damaged(path: Path, problems: list[str], why: str = "Nothing was loaded") -> None:
    """Raise one CheckpointError with all problems of a checkpoint's files, if there are any. Local operation."""
    fix, kind = "load an earlier checkpoint, or copy this one again", "damaged checkpoint"
    if refused := refused_files(problems):
        fix, kind = (
            "check the permissions of the directory and its files",
            "files that this user may not read",
        )
    if problems:
        raise CheckpointError(f"{path}: {kind}: {'; '.join(sorted(refused or problems))}", why=why, fix=fix)


def refuse_text(path: Path) -> None:
    """Raise CheckpointError for a local file of text, such as ``config.json``, or an empty one. Local operation."""
    if is_remote(path) or not path.is_file():
        return
    with unreadable(path, "file"), path.open("rb") as file:
        start = file.read(512)
    try:
        codecs.getincrementaldecoder("utf-8")().decode(start)  # the last character may be cut
    except UnicodeDecodeError:
        return
    if b"\0" in start:
        return
    folder = path.absolute().parent
    fix = "pass the folder or the file that contains the weights"
    if start.startswith(b"version https://git-lfs"):
        got, fix = (
            "a pointer of Git LFS",
            "download the file: git lfs pull, or hf download NAME --local-dir FOLDER",
        )
    else:
        got = "JSON" if start.lstrip()[:1] in (b"{", b"[") else "text" if start else "an empty file"
        if has_manifest(folder) or (folder / DCP_METADATA).is_file() or any(folder.glob("*.safetensors")):
            fix = f"pass its folder, {folder}"
    raise CheckpointError(f"{path}: no weights in this file", expected="a checkpoint", got=got, fix=fix)


def why_no_checkpoint(path: Path) -> CheckpointError:
    """Return the error for a path that is not a checkpoint; it names checkpoints nearby."""
    refuse_text(path)
    if (path / DCP_METADATA).is_file():
        return CheckpointError(
            f"{path}: {FILE_NAME} is missing next to its {DCP_METADATA}",
            expected="a checkpoint of te_fsdp, or a plain one whose metadata records the nested dict (planner_data)",
            got="a directory that may be neither",
            why="A checkpoint of te_fsdp that has lost its manifest is incomplete",
            fix="load an earlier checkpoint or copy this one again; if torch.distributed.checkpoint wrote it without "
            "flattening, read it with te-fsdp ckpt convert",
        )
    got = "a directory without it" if path.is_dir() else "a file" if path.exists() else "nothing at that path"
    fix, checkpoints = "check the path; no checkpoint is in it or next to it", visible(path)
    files = [path] if not path.is_dir() or checkpoints else path.iterdir()
    if (path / "config.json").is_file():
        fix = "use te_fsdp.checkpoint.load_huggingface for folders of Hugging Face models"
    elif path.is_file() or any(file.suffix == ".safetensors" for file in files):
        fix = (
            f"convert torch.save or safetensors files with te-fsdp ckpt convert {path} TARGET --to checkpoint"
        )
    elif nearby := checkpoints or visible(path.parent):
        names = ", ".join(checkpoint.name for checkpoint in nearby[-5:])
        fix = f"{nearby[0].parent} contains {names}; te_fsdp.checkpoint.latest(directory) returns the newest"
    reason = "a directory of checkpoints" if checkpoints else "no such checkpoint"
    return CheckpointError(f"{path}: {reason}", expected=f"a directory with {FILE_NAME}", got=got, fix=fix)
