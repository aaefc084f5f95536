"""A progress bar on rank 0, or nothing."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from te_fsdp.agree import rank

__all__ = ["bytes_bar"]

#: Seconds between two drawings.
_INTERVAL = 0.1


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
