"""Progress bar of the bytes that a save or a command moves."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from te_fsdp.collectives.agreement import rank

#: Seconds between two drawings of a bar.
_INTERVAL = 0.1


@contextmanager
def bytes_bar(description: str, total: int, enabled: bool | None) -> Iterator[Callable[[int], None]]:
    """Yield a function to call with the bytes that were just moved; rank 0 draws a bar on stderr if enabled.

    ``total`` are the bytes that this rank moves at most.
    """
    if not enabled or rank() != 0:
        yield lambda count: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    named = TextColumn("{task.description}", markup=False)  # names of directories may contain brackets
    columns = (named, BarColumn(), DownloadColumn(), TransferSpeedColumn())
    # Drawn by the thread that moves the bytes: no thread can be started while the interpreter ends.
    with Progress(*columns, console=Console(stderr=True), auto_refresh=False) as progress:
        task, drawn = progress.add_task(description, total=total), 0.0

        def tick(count: int) -> None:
            nonlocal drawn
            is_due = time.monotonic() - drawn > _INTERVAL
            progress.update(task, advance=count, refresh=is_due)
            drawn = time.monotonic() if is_due else drawn

        yield tick
        # Replicas that other ranks write never pass here.
        progress.update(task, completed=total, refresh=True)
