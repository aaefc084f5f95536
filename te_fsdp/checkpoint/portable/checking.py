"""Every byte of a checkpoint's files against its checksums, with progress; in one process, without a model."""

from __future__ import annotations

from pathlib import Path

from te_fsdp.checkpoint.compare import check_metadata
from te_fsdp.checkpoint.directory import open_checkpoint
from te_fsdp.checkpoint.manifest import Manifest, Tick, check_files, read_manifest
from te_fsdp.errors import CheckpointError

__all__ = ["file_problems", "problems_of"]


def file_problems(path: Path, manifest: Manifest, tick: Tick) -> list[str]:
    """What is wrong with a checkpoint's files: missing, of another size, or changed; in words."""
    return check_files(path, manifest, sorted(manifest.files), checksums=True, tick=tick)


def problems_of(path: Path, tick: Tick) -> list[str]:
    """Everything that is wrong with a checkpoint: manifest, files, and the two against DCP's metadata; in words."""
    try:
        problems = file_problems(path, read_manifest(path), tick)
        if not problems:
            check_metadata(path, open_checkpoint(path))
    except CheckpointError as error:
        return [str(error)]
    return problems
