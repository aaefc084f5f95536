"""Open a checkpoint by a path of the command line, which may be a folder some levels above the checkpoints."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from te_fsdp.checkpoint.directory import visible
from te_fsdp.checkpoint.manifest import DCP_METADATA, has_manifest
from te_fsdp.checkpoint.portable import convert
from te_fsdp.checkpoint.reader import Choices, Contents
from te_fsdp.checkpoint.storage import is_remote, resolve_path
from te_fsdp.errors import CheckpointError

#: Levels of folders below the path that are searched.
_DEPTH = 3


def open_any(path: Path, choices: Choices | None = None) -> Contents:
    """Open a checkpoint or file at the path, or the newest checkpoint below it."""
    return convert.open_any(find_checkpoints(path), choices)


def resolve(path: Path) -> tuple[Path, str]:
    """Return the path and kind of the checkpoint or file at the path, or of the newest checkpoint below it."""
    return convert.resolve(find_checkpoints(path))


def find_checkpoints(path: Path) -> Path:
    """Return the path, or the only folder of checkpoints below it: ``run/ckpt`` for ``run`` with ``run/ckpt/step-15``.

    Folders below are searched only if the path is a local folder that contains no checkpoint itself.

    Raises:
        CheckpointError: Several folders below the path contain checkpoints.
    """
    place = resolve_path(path)
    if is_remote(place) or not place.is_dir() or has_manifest(place) or visible(place):
        return path
    if (place / DCP_METADATA).exists() or any(place.glob("*.safetensors")):
        return path
    found = list(_folders_of_checkpoints(place, _DEPTH))
    if len(found) > 1:
        raise CheckpointError(
            f"{path}: several folders with checkpoints",
            expected="one",
            got=", ".join(map(str, found)),
            fix="name one of them",
        )
    return found[0] if found else path


def _folders_of_checkpoints(folder: Path, depth: int) -> Iterator[Path]:
    """Yield the folders below that contain checkpoints. Folders below these are not searched."""
    if depth == 0:
        return
    for inside in sorted(folder.iterdir()):
        if inside.name.startswith(".") or not inside.is_dir():
            continue
        if visible(inside):
            yield inside
        else:
            yield from _folders_of_checkpoints(inside, depth - 1)
