"""``verify``: read every byte of a checkpoint and compare it with what was written."""

from __future__ import annotations

import os
from pathlib import Path

from te_fsdp.checkpoint.compare import check_metadata
from te_fsdp.checkpoint.directory import open_checkpoint
from te_fsdp.checkpoint.manifest import check_files
from te_fsdp.errors import CheckpointError, message

__all__ = ["verify"]


def verify(path: str | os.PathLike[str]) -> None:
    """Check a checkpoint against its checksums. Local operation; needs no model, reads all files once.

    ``load`` compares the sizes of the files only.

    Raises:
        CheckpointError: No checkpoint there, or a damaged one; names the files.
    """
    source = Path(os.path.abspath(path))
    manifest = open_checkpoint(source)
    problems = check_files(source, manifest, checksums=True)
    if problems:
        raise CheckpointError(
            message(f"{source}: damaged checkpoint: {'; '.join(problems)}", fix="load an earlier checkpoint")
        )
    check_metadata(source, manifest)
