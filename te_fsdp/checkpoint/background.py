"""Saves that go on while training does: one at a time in a process, each with a handle; and a bar of progress."""

from __future__ import annotations

import atexit
import functools
import logging
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from te_fsdp.agree import rank
from te_fsdp.checkpoint.staging import Staging
from te_fsdp.errors import CheckpointError, TeFsdpError

__all__ = ["Background", "SaveHandle", "background", "bytes_bar"]

_log = logging.getLogger("te_fsdp")

#: Seconds in which the caller goes on: whoever starts a thread waits for it, and then for the interpreter.
_HEAD_START = 0.005
#: Seconds between two drawings of a bar.
_INTERVAL = 0.1


class SaveHandle:
    """A save that :func:`te_fsdp.checkpoint.save` has begun, perhaps finished.

    Attributes:
        path: Where the checkpoint appears when it is whole.
        stall: Seconds that the call held up its caller.
        bytes: What this rank writes.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.stall = 0.0
        self.bytes = 0
        self._finished = threading.Event()
        self._error: TeFsdpError | None = None
        self._asked = False

    def done(self) -> bool:
        """Whether it has ended, well or not. Local operation."""
        return self._finished.is_set()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until it has ended, at most so many seconds; whether it has. Local operation."""
        return self._finished.wait(timeout)

    def result(self, timeout: float | None = None) -> Path:
        """Wait until it has ended; the path of the checkpoint. Local operation.

        Raises:
            CheckpointError: It failed, on this rank or another; all ranks raise the same.
            TimeoutError: It has not ended within so many seconds. It goes on.
        """
        if not self._finished.wait(timeout):
            raise TimeoutError(f"{self.path}: still being saved after {timeout} s")
        self._asked = True
        if self._error is not None:
            raise self._error
        return self.path

    def unasked(self) -> TeFsdpError | None:
        """What made it fail, unless :meth:`result` has raised it. Local operation."""
        return self._error if self.done() and not self._asked else None

    def finish(self, error: TeFsdpError | None = None) -> None:
        """Note how it ended. The save itself calls this."""
        self._error = error
        self._finished.set()


class Background:
    """What a process keeps from one save to the next: the running one, memory for copies, and each model's plan."""

    def __init__(self) -> None:
        self.staging = Staging()
        self.plans: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
        atexit.register(self._report)
        self._last: SaveHandle | None = None
        self._thread: threading.Thread | None = None

    def wait(self) -> float:
        """Wait for the running save, if there is one; the seconds that it took. Local operation."""
        began = time.perf_counter()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        return time.perf_counter() - began

    def raise_unasked(self) -> None:
        """Raise what made the last save fail, unless its handle was asked, or this has been told before.

        Raises:
            CheckpointError: Names the save.
        """
        last, self._last = self._last, None
        error = None if last is None else last.unasked()
        if error is not None:
            raise CheckpointError(
                f"save: the one before has failed, and nobody has asked for its result: {error}",
                why="This one was not begun",
                fix="call result() of the handle that save(..., asynchronous=True) returns, before the next save",
            )

    def _report(self) -> None:
        """When the interpreter ends, which it does after the thread: say what nobody has heard of."""
        error = None if self._last is None else self._last.unasked()
        if error is not None:
            # Not through the logger, which may have no handler.
            sys.stderr.write(f"te_fsdp: {error}\n")

    def start(self, handle: SaveHandle, work: Callable[[], None], waited: float) -> None:
        """Do the rest of a save in a thread. The interpreter does not end before it has.

        Args:
            handle: Told how it ends.
            work: Raises TeFsdpError when it fails.
            waited: Seconds of its stall that were spent on waiting for the save before.
        """
        text = (
            "saving %s in the background; its caller was held up for %.3f s, %.3f s of it by the save before"
        )
        _log.info(text, handle.path, handle.stall, waited)

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
            else:
                handle.finish()

        self._last = handle
        self._thread = threading.Thread(target=run, name=f"te_fsdp save {handle.path.name}", daemon=False)
        self._thread.start()


@functools.cache
def background() -> Background:
    """The process' own."""
    return Background()


@contextmanager
def bytes_bar(text: str, total: int, enabled: bool | None) -> Iterator[Callable[[int], None]]:
    """Yield a function to call with the bytes that were just moved; rank 0 draws a bar on stderr if enabled.

    Args:
        text: What is being done.
        total: Bytes that this rank moves at most.
        enabled: ``None`` and ``False`` draw nothing.
    """
    if not enabled or rank() != 0:
        yield lambda count: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    # Drawn by whoever moves the bytes: while the interpreter ends, no thread can be started for it.
    with Progress(*columns, console=Console(stderr=True), auto_refresh=False) as progress:
        task, drawn = progress.add_task(text, total=total), [0.0]

        def tick(count: int) -> None:
            progress.advance(task, count)
            if time.monotonic() - drawn[0] > _INTERVAL:
                progress.refresh()
                drawn[0] = time.monotonic()

        yield tick
        # Replicas that other ranks write never pass here.
        progress.update(task, completed=total)
        progress.refresh()
