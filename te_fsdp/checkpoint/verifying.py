"""``verify``: read every byte of a checkpoint and compare it with what was written."""

from __future__ import annotations

import os
from pathlib import Path

from te_fsdp.agree import all_agree, gather, rank, world_size
from te_fsdp.checkpoint.compare import check_metadata
from te_fsdp.checkpoint.directory import damaged, open_checkpoint
from te_fsdp.checkpoint.manifest import Manifest, Tick, check_files, read_manifest
from te_fsdp.checkpoint.retention import in_use
from te_fsdp.errors import CheckpointError

__all__ = ["problems_of", "verify", "verify_together"]


def verify(path: str | os.PathLike[str]) -> None:
    """Check a checkpoint against its checksums. Local operation; needs no model, reads all files once.

    ``load(..., verify=True)`` does the same on all ranks together. Without it, ``load`` checks what it reads.

    Raises:
        CheckpointError: No checkpoint there, or a damaged one; names the files.
    """
    source = Path(os.path.abspath(path))
    with in_use(source):
        manifest = open_checkpoint(source)
        damaged(source, check_files(source, manifest, checksums=True))
        check_metadata(source, manifest)


def problems_of(path: Path, tick: Tick) -> list[str]:
    """Everything that is wrong with a checkpoint: manifest, files, and the two against DCP's metadata; in words."""
    try:
        problems = check_files(path, read_manifest(path), checksums=True, tick=tick)
        if not problems:
            check_metadata(path, open_checkpoint(path))
    except CheckpointError as error:
        return [str(error)]
    return problems


def verify_together(source: Path, manifest: Manifest) -> None:
    """Check the files of a checkpoint against their checksums, each by one rank. Collective over the world.

    Raises:
        CheckpointError: Damaged files, all of them in one text, the same on all ranks.
    """
    # The largest first, each to the rank that has the least to read.
    shares: list[list[str]] = [[] for _ in range(world_size())]
    load = [0] * world_size()
    for name, (size, *_) in sorted(manifest.files.items(), key=lambda item: (-item[1][0], item[0])):
        least = load.index(min(load))
        shares[least].append(name)
        load[least] += size
    problems = gather(all_agree(lambda: check_files(source, manifest, shares[rank()], checksums=True)))
    damaged(source, [text for texts in problems for text in texts])
