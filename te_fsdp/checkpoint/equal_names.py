"""Tensors that would have one name in the files, of which a checkpoint holds one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from fnmatch import fnmatchcase

import torch

from te_fsdp.checkpoint.tensor_entries import Entry
from te_fsdp.errors import CheckpointError, shorten


def in_several(names: list[str], where: str) -> CheckpointError:
    """Return the error for tensors of one name in stages."""
    return CheckpointError(
        f"save: {len(names)} tensor(s) of one name in {where}: {shorten(names)}",
        expected="every name in one stage",
        got="layers that each stage counts from 0, or tensors that stages share",
        why="The files hold one tensor under each name, so that all others would be lost",
        fix="give a stage the names of the whole model: leave the other layers out of an nn.ModuleDict, or set them to "
        'None in a copy of the model; save(..., shared=["embedding.weight"]) names what stages share, which must be '
        "equal and is stored once",
    )


def refuse_equal_names(names: Iterable[str], shared: Iterable[str], is_joined: bool) -> None:
    """Raise CheckpointError for several tensors of one name. Local operation.

    ``shared`` are patterns of names that are allowed; ``is_joined``: the names are of several stages of this rank.
    """
    twice = [name for name, count in Counter(names).items() if count > 1]
    twice = [name for name in twice if not any(fnmatchcase(name, pattern) for pattern in shared)]
    if twice and is_joined:
        raise in_several(twice, "the stages of one rank")
    if twice:
        raise CheckpointError(
            f"checkpoint: {len(twice)} name(s) of several tensors of the model: {shorten(twice)}",
            expected="a name of its own for each, without the parts that torch.compile and activation checkpointing "
            "insert",
            why="The files hold one tensor under each name, so that all others would be lost",
            fix="rename a module: leave out dots, _orig_mod and _checkpoint_wrapped_module",
        )


def merge_copies(entries: dict[str, Entry]) -> bool:
    """Remove the pieces that a rank has twice, because of ``shared`` names; return whether there were any. Local.

    Raise CheckpointError for copies that differ.
    """
    found = False
    for key, entry in entries.items():
        by_place = {(piece.offsets, piece.tensor.shape): piece for piece in reversed(entry.pieces)}
        if len(by_place) == len(entry.pieces):
            continue
        found = True
        for piece in entry.pieces:
            pair = [piece.tensor, by_place[piece.offsets, piece.tensor.shape].tensor]
            first, other = (part.contiguous().flatten().view(torch.uint8) for part in pair)
            if not torch.equal(first, other):
                raise CheckpointError(
                    f"save: {key} differs between stages of one rank",
                    expected="equal values of what stages share, which is stored once",
                    fix="synchronize it after each step",
                )
        entries[key] = replace(entry, pieces=tuple(by_place.values()))
    return found
