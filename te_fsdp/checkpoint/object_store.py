"""Checkpoints on object storage, which has neither renaming nor locks: whole when the manifest is there.

A save writes under a name of its own below its target. The manifest, written last and only where none lies, names that
folder: of two jobs that save to one path the first to end has it, and neither writes what the other one reads.

    s3://bucket/run/step-100/te_fsdp.json                  whole, with what is in the folder that it names
    s3://bucket/run/step-100/te_fsdp-data.OWNER/...
    s3://bucket/run/step-200/te_fsdp-data.OWNER/...       being written or removed, or left by a killed job

The process of a folder's name is known to live or to be dead if it is on this machine. One elsewhere gives no sign of
life; what it has left goes a day after it last wrote there.
"""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import Any, cast

from te_fsdp.checkpoint.locks import Owner, exists, written_by
from te_fsdp.checkpoint.manifest import FILE_NAME, read_manifest
from te_fsdp.checkpoint.remote import RemotePath
from te_fsdp.errors import CheckpointError

_log = logging.getLogger("te_fsdp")
_DATA = "te_fsdp-data."
#: An object in a folder from its beginning on: a name to be found by other jobs, and a first proof that we may write.
_BEGUN = "writing"
#: After so many seconds a folder of another machine's process counts as abandoned.
_ABANDONED = 24 * 3600
_FREE = "a path where nothing lies"


def begin(target: RemotePath, *, force: bool | None, is_file: bool) -> Path:
    """Remove what killed jobs have left here and beside, and begin a folder. One process alone calls this.

    Raises:
        CheckpointError: Something lies there already, or another process of this machine writes it.
    """
    if is_file or force:
        raise CheckpointError(
            f"{target}: cannot be {'replaced' if force else 'written'} on object storage",
            expected="a checkpoint of te_fsdp, at a path where nothing lies",
            got="--force" if force else "files without a manifest",
            why="Without renaming only a manifest makes files appear in one step",
            fix="choose another path" if force else "write to a local path, and copy that",
        )
    for beside in target.parent.iterdir():
        if beside.name != target.name and not (beside / FILE_NAME).exists():
            _remove_left(beside)
    _check_free(target)
    folder = target / f"{_DATA}{Owner.new()}"
    (folder / _BEGUN).write_bytes(b"")
    return cast(Path, folder)


def _check_free(target: RemotePath) -> None:
    if not all(map(_owner_of, target.iterdir())):
        raise exists(target, _FREE)
    for owner in _remove_left(target):
        if owner.is_alive():
            raise written_by(target, owner)
        _log.warning(
            "%s: begun by another job as well, %s; the first to end has it", target, owner.describe()
        )


def _owner_of(folder: RemotePath) -> Owner | None:
    """Who writes, or wrote, a folder; ``None`` for what is none of ours."""
    mark, _, text = folder.name.partition(".")
    owner = Owner.parse(text)
    return owner if f"{mark}." == _DATA and owner.machine else None


def _remove_left(target: RemotePath) -> list[Owner]:
    """Remove the folders below that nobody works on any more; the owners of the others. ``target`` has no manifest."""
    left = []
    for folder in target.iterdir():
        owner = _owner_of(folder)
        if owner is None:
            continue
        alive, last = owner.is_alive(), folder.touched()
        # One save runs at a time: another one of this process has failed, and could not clean up.
        if alive is False or owner.is_here or (alive is None and last and time.time() - last > _ABANDONED):
            _log.info("%s was left by a job that was killed", folder)
            remove(folder)
        else:
            left.append(owner)
    return left


def commit(folder: RemotePath) -> None:
    """Make what was written visible, by the manifest in the folder. One process alone calls this.

    Raises:
        CheckpointError: Another job has been faster.
    """
    target, data = folder.parent, (folder / FILE_NAME).read_bytes()
    manifest = target / FILE_NAME
    try:
        manifest.create(data)
    except FileExistsError as error:
        if manifest.read_bytes() != data:  # else it was asked twice, since the first answer was lost
            raise exists(target, _FREE) from error
    for name in (FILE_NAME, _BEGUN):
        _try(target, (folder / name).unlink, True)


def discard(folder: RemotePath) -> None:
    """Remove the folder of what failed; nothing after :func:`commit`, nor where that cannot be told."""
    target = folder.parent
    try:
        if (target / FILE_NAME).exists() and read_manifest(target).folder == folder.name:  # type: ignore[arg-type]
            return
    except (CheckpointError, OSError) as error:
        _log.warning("%s: not removed, since what lies at %s cannot be read: %s", folder, target, error)
        return
    remove(folder)


def hide(path: RemotePath) -> Path | None:
    """Make a checkpoint no checkpoint; what is still to be removed. ``None`` if another job has."""
    try:
        (path / FILE_NAME).unlink()
    except FileNotFoundError:
        return None
    return cast(Path, path)


def remove(path: RemotePath) -> None:
    """Remove all below a path as far as that is possible: a later save removes what is left."""
    _try(path, path.remove_all)


def _try(path: RemotePath, call: Any, *arguments: Any) -> None:
    try:
        call(*arguments)
    except FileNotFoundError:
        return
    except OSError as error:
        _log.warning("%s: cannot be removed: %s", path, error)
