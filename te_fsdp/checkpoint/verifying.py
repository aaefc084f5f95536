"""``verify``: read every byte of a checkpoint and compare it with what was written."""

from __future__ import annotations

import os
from pathlib import Path

from te_fsdp.checkpoint.collective import all_agree, gather, rank, world_size
from te_fsdp.checkpoint.compare import check_metadata
from te_fsdp.checkpoint.directory import open_checkpoint
from te_fsdp.checkpoint.manifest import Manifest, checksum
from te_fsdp.checkpoint.retention import in_use
from te_fsdp.errors import CheckpointError, message

__all__ = ["damaged", "verify", "verify_together"]


def verify(path: str | os.PathLike[str]) -> None:
    """Check a checkpoint against its checksums. Local operation; needs no model, reads all files once.

    ``load(..., verify=True)`` does the same on all ranks together. Without it, ``load`` compares the sizes of
    the files, and reads no more than the manifest and DCP's metadata.

    Raises:
        CheckpointError: No checkpoint there, or a damaged one; names the files.
    """
    source = Path(os.path.abspath(path))
    with in_use(source):
        manifest = open_checkpoint(source)
        damaged(source, _changed(source, manifest, list(manifest.files)))
        check_metadata(source, manifest)


def verify_together(source: Path, manifest: Manifest) -> None:
    """Check the files of a checkpoint against their checksums, each by one rank. Collective over the world.

    Raises:
        CheckpointError: Damaged files, all of them in one text, the same on all ranks.
    """
    # The largest first, each to the rank that has the least to read.
    shares: list[list[str]] = [[] for _ in range(world_size())]
    load = [0] * world_size()
    for name, (size, _) in sorted(manifest.files.items(), key=lambda item: (-item[1][0], item[0])):
        least = load.index(min(load))
        shares[least].append(name)
        load[least] += size
    problems = gather(all_agree(lambda: _changed(source, manifest, shares[rank()])))
    damaged(source, [text for texts in problems for text in texts])


def _changed(source: Path, manifest: Manifest, names: list[str]) -> list[str]:
    """What is wrong with some of the files."""
    problems = []
    for name in names:
        size, crc = manifest.files[name]
        try:
            have = (source / name).stat().st_size
            if have != size:
                problems.append(f"{name}: expected {size} bytes, got {have}")
            elif checksum(source / name) != crc:
                problems.append(f"{name}: its contents have changed (CRC-32)")
        except OSError as error:
            problems.append(f"{name}: {error.strerror or error}")
    return problems


def damaged(source: Path, problems: list[str]) -> None:
    """Raise if there are problems with the files of a checkpoint.

    Raises:
        CheckpointError: All of them in one text.
    """
    if problems:
        raise CheckpointError(
            message(
                f"{source}: damaged checkpoint: {'; '.join(sorted(problems))}",
                why="Nothing was loaded",
                fix="load an earlier checkpoint, or copy this one again",
            )
        )
