"""Keeping the last few checkpoints: old ones are removed after the new one is whole, and not while they are read."""

from __future__ import annotations

import fcntl
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from te_fsdp.checkpoint.directory import REMOVING, hidden_name, in_order, sync, visible
from te_fsdp.checkpoint.manifest import FILE_NAME, Manifest
from te_fsdp.errors import CheckpointError

__all__ = ["check_keep_last", "hide_old", "in_use"]

_log = logging.getLogger("te_fsdp")


def check_keep_last(keep_last: int | None) -> None:
    """Refuse numbers that would remove the checkpoint that was just made.

    Raises:
        CheckpointError: ``keep_last`` is no positive whole number.
    """
    if keep_last is not None and (type(keep_last) is not int or keep_last < 1):
        raise CheckpointError(
            "save: keep_last", expected="None (keep all) or a whole number from 1", got=repr(keep_last)
        )


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
    if gone:
        # The new names must be on disk before the first file goes: a partial directory must not reappear.
        sync(newest.parent)
    return gone


def _hide(path: Path) -> Path | None:
    """Rename a checkpoint that nobody reads; ``None`` if it stays."""
    try:
        with (path / FILE_NAME).open("r+b") as manifest:
            try:
                fcntl.flock(manifest, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                _log.info("%s is being loaded, a later save will remove it", path)
                return None
            except OSError:
                _log.debug("%s: this file system has no locks", path)
            hidden = hidden_name(path, REMOVING)
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

    Best effort: a file system without locks, or without the right to open the manifest, gives none. Where
    there is no checkpoint, nothing is done.
    """
    try:
        manifest = (path / FILE_NAME).open("rb")
    except OSError:
        yield
        return
    with manifest:
        try:
            fcntl.flock(manifest, fcntl.LOCK_SH)
        except OSError:
            _log.debug("%s: this file system has no locks", path)
        yield
