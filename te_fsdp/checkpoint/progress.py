"""A progress bar on rank 0, or nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from te_fsdp.checkpoint.collective import rank

__all__ = ["bytes_bar"]


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
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task(text, total=total)
        yield lambda count: progress.advance(task, count)
        # Replicas that other ranks write never pass here.
        progress.update(task, completed=total)
