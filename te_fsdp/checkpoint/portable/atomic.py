"""Files and directories that appear whole or not at all, and replace nothing unless asked to."""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from te_fsdp.errors import CheckpointError, message

__all__ = ["new_directory", "new_file", "sync"]

_MARK = ".te_fsdp-writing."


@contextmanager
def new_directory(target: Path, *, force: bool = False) -> Iterator[Path]:
    """Yield a hidden directory beside ``target``, which becomes ``target`` when the block ends well.

    Args:
        target: Where the directory shall lie.
        force: Replace what lies there; it stays until the new one is whole.

    Raises:
        CheckpointError: Something lies there already.
    """
    with _new(target, force) as temporary:
        temporary.mkdir()
        yield temporary
        for path in temporary.rglob("*"):
            sync(path)


@contextmanager
def new_file(target: Path, *, force: bool = False) -> Iterator[Path]:
    """Yield a hidden path beside ``target`` for a file, which becomes ``target`` when the block ends well.

    See :func:`new_directory`.
    """
    with _new(target, force) as temporary:
        yield temporary


@contextmanager
def _new(target: Path, force: bool) -> Iterator[Path]:
    _check_free(target, force)
    token = secrets.token_hex(4)
    temporary = target.parent / f".{target.name}{_MARK}{os.getpid()}.{token}"
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        yield temporary
        sync(temporary)
        _check_free(target, force)
        if os.path.lexists(target):
            aside = target.parent / f".{target.name}.te_fsdp-replaced.{token}"
            os.rename(target, aside)
            os.rename(temporary, target)
            _remove(aside)
        else:
            os.rename(temporary, target)
        sync(target.parent)
    except OSError as error:
        place = error.filename or target
        raise CheckpointError(
            message(
                f"{target}: cannot be written ({error.strerror or error}: {place})",
                why="Nothing has appeared there",
                fix="check the space left and the permissions",
            )
        ) from error
    finally:
        _remove(temporary)


def _check_free(target: Path, force: bool) -> None:
    if not os.path.lexists(target) or force:
        return
    if target.is_dir() and not target.is_symlink() and not any(target.iterdir()):
        target.rmdir()
        return
    raise CheckpointError(
        message(
            f"{target}: exists already",
            expected="a path where nothing lies",
            fix="choose another path, or replace what lies there with --force",
        )
    )


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def sync(path: Path) -> None:
    """Flush a file, or a directory's entries, to disk, where the system can."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError:
        pass  # this file system cannot sync directories
    finally:
        os.close(handle)
