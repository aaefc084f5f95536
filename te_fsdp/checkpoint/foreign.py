"""Loading what others saved: directories of plain ``torch.distributed.checkpoint``.

Plain DCP notes where each value was in the nested dict that it was given (``planner_data``); te_fsdp writes keys of
its own and no such notes. A directory without a manifest whose every key has one is therefore foreign; one without is
a checkpoint of te_fsdp that has lost its manifest, and is refused.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from te_fsdp.agree import all_agree, from_rank_0, gather, rank, world_size
from te_fsdp.checkpoint import directory as directories
from te_fsdp.checkpoint.compare import Differences
from te_fsdp.checkpoint.manifest import (
    DCP_METADATA,
    FILE_NAME,
    STACKS_EXPERTS,
    SUMS_PIECES,
    Manifest,
    checksum,
)
from te_fsdp.checkpoint.model_state import tied_names
from te_fsdp.checkpoint.portable.contents import DCP_KIND, Contents, open_checkpoint_contents
from te_fsdp.checkpoint.portable.dcp import Piece, Window, open_dcp
from te_fsdp.checkpoint.portable.experts import stack_experts
from te_fsdp.checkpoint.portable.lazy import Chunked, Stack
from te_fsdp.checkpoint.portable.state_dicts import Choices, Cuts, open_dcp_contents
from te_fsdp.checkpoint.reading import read_metadata
from te_fsdp.checkpoint.source import Source
from te_fsdp.checkpoint.verifying import verify_together
from te_fsdp.errors import CheckpointError, shorten

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

__all__ = ["compare_stacked", "open_source", "settle_scaling"]

_log = logging.getLogger("te_fsdp")


def open_source(path: Path, model: nn.Module, optimizer: Optimizer | None, *, verify: bool) -> Source:
    """The checkpoint at a path: ours, or a foreign one that is told to be so. Collective over the world.

    Args:
        path: The directory.
        model: What it will be loaded into; tells which names are of one tensor.
        optimizer: The same; its class is taken where the files do not tell one.
        verify: Compare all files with their checksums, each read by one rank.

    Raises:
        CheckpointError: Nothing whole there, or neither ours nor certainly foreign. All ranks raise the same.
    """
    manifest = from_rank_0(lambda: None if _is_foreign(path) else directories.open_checkpoint(path))
    _check_same(path, FILE_NAME if manifest is not None else DCP_METADATA)
    if manifest is not None:
        if verify:
            verify_together(path, manifest)
        elif manifest.format_version < SUMS_PIECES and rank() == 0:
            text = "%s: from before checksums of pieces: damaged tensors are found by load(..., verify=True) alone"
            _log.info(text, path)
        if manifest.format_version < STACKS_EXPERTS:
            return all_agree(lambda: _older(path, manifest))
        return Source(path, manifest)
    if verify:
        _verify(path)
    choices = Choices(otherwise_class=None if optimizer is None else type(optimizer).__name__)
    contents = all_agree(lambda: _open(path, choices))
    tied = from_rank_0(lambda: _equal_ties(contents, model))
    for name, first in tied.items():
        contents.manifest.parameters.pop(name)
        contents.tensors.pop(f"model.{name}")
        contents.notes.append(f"{name}: tied to {first} here, and equal to it")
    if contents.manifest.optimizer is not None and optimizer is None:
        contents.notes.append("optimizer: left, since none was given to load")
    return Source(path, contents.manifest, contents.tensors, contents.kind, _told(contents))


def _check_same(path: Path, name: str) -> None:
    """All ranks must see the checkpoint that rank 0 does, since each reads its own part. Collective over the world.

    Ranks may ask for the newest one at moments between which another appears, or through file systems that are late.

    Raises:
        CheckpointError: Names the ranks.
    """
    file = path / name
    seen = gather((str(path), checksum(file) if file.is_file() else None))
    others = [f"{where} on rank {r}" for r, (where, found) in enumerate(seen) if found != seen[0][1]]
    if others:
        raise CheckpointError(
            f"{seen[0][0]}: the ranks see different checkpoints",
            expected="the same on all ranks",
            got=", ".join([f"{seen[0][0]} on rank 0", *others[:3]]),
            why="Weights of two moments would be mixed. Nothing was loaded",
            fix="find the path on rank 0, by te_fsdp.checkpoint.latest for example, and broadcast it; if it is the "
            "same path, mount one file system on all nodes",
        )


def _older(path: Path, manifest: Manifest) -> Source:
    """A checkpoint of ours in which every expert's weight is a tensor of its own. Local operation."""
    contents = open_checkpoint_contents(path)
    before = set(contents.tensors)
    stack_experts(contents)
    if before == set(contents.tensors):
        return Source(path, manifest)
    return Source(path, contents.manifest, contents.tensors, notes=contents.notes)


def settle_scaling(source: Source, described: dict[str, dict[str, Any]]) -> None:
    """TE's float8 tensors do not tell where their scales came from: without state, as in the model here. Local."""
    if source.tensors is None:
        return
    for name, then in source.manifest.parameters.items():
        now = described.get(name, {}).get("format") or ""
        if then["format"] and then["format"].replace(" current ", " delayed ") == now:
            then["format"] = now


def compare_stacked(found: Differences, source: Source, described: dict[str, dict[str, Any]]) -> None:
    """Rows that are stacked for tensor parallelism, in a plain directory: whether they lie as in the unsharded module.

    At tp=1 they do. Those that tensor parallelism has cut do not: a difference. Where nothing tells: a note. Local.
    """
    if source.kind != DCP_KIND or source.tensors is None:
        return
    cuts, asked = Cuts(source.tensors), []
    for name, now in described.items():
        tensor = source.tensors.get(f"model.{name}")
        if not str(now["layout"]).startswith("stacked") or tensor is None:
            continue
        by_tp = cuts.by_tp(name)
        whole = not isinstance(tensor, Chunked) or len(tensor.chunks) == 1
        if by_tp:
            found.add("whose rows tensor parallelism has put in another order", name)
        elif by_tp is None and not (whole and name.rpartition(".")[0] in source.manifest.extra_states):
            asked.append(name)
    if asked:
        source.notes.append(
            f"{len(asked)} fused or gated weight(s) taken with the rows of the unsharded module ({shorten(asked, 3)}), "
            "which nothing in the directory confirms: were they saved with tensor parallelism? Then these rows are "
            "scrambled; load it on the mesh that saved it, and save it with te_fsdp.checkpoint.save"
        )


def _is_foreign(path: Path) -> bool:
    """Whether a directory was surely not written by te_fsdp. Local operation."""
    if (path / FILE_NAME).exists() or not (path / DCP_METADATA).is_file():
        return False
    metadata = read_metadata(path)
    keys = set(metadata.state_dict_metadata)
    return bool(keys) and isinstance(metadata.planner_data, dict) and keys <= metadata.planner_data.keys()


def _open(path: Path, choices: Choices) -> Contents:
    """Contents with every header read, so that damage shows before anything changes."""
    contents = open_dcp_contents(path, choices)
    for tensor in contents.tensors.values():
        for part in tensor.parts if isinstance(tensor, Stack) else [tensor]:
            for _, piece in part.chunks if isinstance(part, Chunked) else ():
                if isinstance(piece, Piece):
                    piece.header()
    return contents


def _equal_ties(contents: Contents, model: nn.Module) -> dict[str, str]:
    """Further names of the model's tied tensors under which the files hold equal values."""
    have = contents.manifest.parameters
    pairs = {name: first for name, first in tied_names(model).items() if name in have and first in have}
    return {name: first for name, first in pairs.items() if _equal(contents, name, first)}


def _equal(contents: Contents, name: str, first: str) -> bool:
    if not all(f"model.{n}" in contents.tensors for n in (name, first)):
        return False
    a, b = contents.tensors[f"model.{name}"], contents.tensors[f"model.{first}"]
    if (a.shape, a.dtype) != (b.shape, b.dtype):
        return False
    return all(torch.equal(a.rows(*block), b.rows(*block)) for block in a.blocks())


def _told(contents: Contents) -> list[str]:
    """What was taken and what was not, beginning with what the directory is."""
    manifest = contents.manifest
    count = f"{len(manifest.parameters)} tensors of a state dict"
    return [f"a plain {DCP_KIND} directory, without te_fsdp's manifest: {count} taken", *contents.notes]


def _verify(path: Path) -> None:
    """Compare the files with the checksums that ``torch.save`` put into them. Collective over the world."""

    def changed() -> list[str]:
        shares: list[list[Window]] = [[] for _ in range(world_size())]
        load = [0] * world_size()
        for window in sorted(open_dcp(path).windows, key=lambda w: (-w.length, str(w.file), w.offset)):
            least = load.index(min(load))
            shares[least].append(window)
            load[least] += window.length
        return [
            f"{w.key} in {w.file.name}: its contents have changed (CRC-32)"
            for w in shares[rank()]
            if w.changed()
        ]

    directories.damaged(path, [text for texts in gather(all_agree(changed)) for text in texts])
