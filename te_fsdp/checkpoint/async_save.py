"""Asynchronous saves, one at a time in a process."""

from __future__ import annotations

import atexit
import functools
import logging
import sys
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from te_fsdp.checkpoint.host_memory import Staging
from te_fsdp.errors import CheckpointError, TeFsdpError

_log = logging.getLogger("te_fsdp")
#: Seconds in which the caller continues: it would wait for the new thread, and then for the interpreter lock.
_HEAD_START = 0.005


class SaveHandle:
    """A save that :func:`te_fsdp.checkpoint.save` has begun, perhaps finished.

    Attributes:
        path: Path of the checkpoint when it is complete.
        stall: Seconds that the call blocked its caller.
        bytes: Number of bytes that this rank writes.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.stall, self.bytes = path, 0.0, 0
        self._finished = threading.Event()
        self._error: TeFsdpError | None = None
        self._retrieved = False

    def done(self) -> bool:
        """Return whether the save has ended, with or without an error. Local operation."""
        return self._finished.is_set()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until the save has ended, at most ``timeout`` seconds; return whether it has. Local operation."""
        return self._finished.wait(timeout)

    def result(self, timeout: float | None = None) -> Path:
        """Wait until the save has ended; return the path of the checkpoint. Local operation.

        Raises:
            CheckpointError: The save failed, on this rank or another; all ranks raise the same.
            TimeoutError: The save has not ended within ``timeout`` seconds. It continues.
        """
        if not self._finished.wait(timeout):
            raise TimeoutError(f"{self.path}: still being saved after {timeout} s")
        self._retrieved = True
        if self._error is not None:
            raise self._error
        return self.path

    def unretrieved_error(self) -> TeFsdpError | None:
        """Return the error of a failed save whose :meth:`result` was never called. Local operation."""
        return self._error if self.done() and not self._retrieved else None

    def finish(self, error: TeFsdpError | None = None) -> None:
        """Record the result. The save itself calls this."""
        self._error = error
        self._finished.set()


class Background:
    """State of a process between saves: the running save, memory for copies, and the plan of each model."""

    def __init__(self) -> None:
        self.staging = Staging()
        self.plans: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
        self._last: SaveHandle | None = None
        self._thread: threading.Thread | None = None
        # Python joins threads that are not daemons before it runs these functions.
        atexit.register(self._report)

    def wait(self) -> None:
        """Wait for the running save, if there is one. Local operation."""
        if self._thread is not None:
            # Errors stay in the handle. The next save raises them on all ranks together.
            self._thread.join()

    def spare(self) -> list[torch.Tensor]:
        """Return uint8 host memory that is kept for saves and unused until the next one. Local operation."""
        return [] if self._thread is not None and self._thread.is_alive() else [*self.staging.slabs]

    def raise_unretrieved(self) -> None:
        """Raise the error of the previous save, if neither its handle nor this method has raised it."""
        # Once: the following save must be possible.
        last, self._last = self._last, None
        error = None if last is None else last.unretrieved_error()
        if error is not None:
            raise CheckpointError(
                f"save: the previous asynchronous save failed and its error was never retrieved: {error}",
                why="This save was not started",
                fix="call result() of the handle that save(..., asynchronous=True) returns, before the next save",
            )

    def _report(self) -> None:
        """Report an unretrieved error when the interpreter ends, after the thread."""
        error = None if self._last is None else self._last.unretrieved_error()
        if error is not None:
            # Not through the logger, which may have no handler.
            sys.stderr.write(f"te_fsdp: {error}\n")

    def start(self, handle: SaveHandle, work: Callable[[], None]) -> None:
        """Run ``work`` in a thread that reports its result to the handle. The interpreter waits for it at exit."""

        def run() -> None:
            time.sleep(_HEAD_START)
            try:
                work()
            except TeFsdpError as error:
                _log.error("%s", error)
                handle.finish(error)
            except BaseException as error:  # nothing may vanish with the thread
                _log.exception("%s: the save has failed", handle.path)
                handle.finish(CheckpointError(f"{handle.path}: {type(error).__name__}: {error}"))

        self._last = handle
        # Not a daemon thread: the interpreter must not end within a save.
        self._thread = threading.Thread(target=run, name=f"te_fsdp save {handle.path.name}", daemon=False)
        self._thread.start()


@functools.cache
def background() -> Background:
    """Return the state of this process."""
    return Background()
