"""Where a load reads from: the files of a save of ours, or tensors that lie in files of other kinds.

Those are directories of plain ``torch.distributed.checkpoint``. Plain DCP notes where each value was in the nested dict
that it was given (``planner_data``); te_fsdp writes keys of its own and no such notes. A directory without a manifest
whose every key has one is therefore foreign; one without is a checkpoint of te_fsdp that has lost its manifest, and is
refused.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from te_fsdp.agree import (
    Ranks,
    all_agree,
    are_equal,
    digest,
    from_rank_0,
    gather,
    gather_if_any,
    own_ranks,
    rank,
    world_size,
)
from te_fsdp.checkpoint import torch_files
from te_fsdp.checkpoint.background import background
from te_fsdp.checkpoint.contents import DCP_KIND, Choices, Contents, open_checkpoint_contents, stack_experts
from te_fsdp.checkpoint.directory import damaged, in_use, open_checkpoint
from te_fsdp.checkpoint.entries import Entry
from te_fsdp.checkpoint.index import Index, check_index, read_index, read_metadata
from te_fsdp.checkpoint.lazy import Chunked, Lazy, Stack
from te_fsdp.checkpoint.manifest import (
    DCP_METADATA,
    FILE_NAME,
    STACKS_EXPERTS,
    SUMS_PIECES,
    Manifest,
    Tick,
    check_files,
    has_manifest,
    read_manifest,
)
from te_fsdp.checkpoint.model_state import tied_names
from te_fsdp.checkpoint.paths import absolute, is_remote
from te_fsdp.checkpoint.reading import Rectangle, Share, Staged, read_stored, rectangle
from te_fsdp.checkpoint.state_dicts import open_dcp_contents
from te_fsdp.checkpoint.sums import checksum
from te_fsdp.errors import CheckpointError, shorten
from te_fsdp.layout import slices

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

_log = logging.getLogger("te_fsdp")
#: Who reads what several ranks want.
_READ = ("auto", "each", "once")


@dataclass
class Source:
    """A checkpoint that is being loaded."""

    path: Path  #: The directory
    manifest: Manifest  #: What it holds; for a stage of a pipeline, what of that is the stage's
    #: By the keys that our files have; ``None``: the files are ours.
    tensors: Mapping[str, Lazy] | None = None
    kind: str = "te_fsdp"  #: What wrote it, in words
    #: What was taken of a foreign directory, and what not, in words.
    notes: list[str] = field(default_factory=list)
    staged: Staged = field(default_factory=Staged, repr=False)  #: What was read and has not been copied yet
    #: The world, if what several ranks want is read once; else each reads what it wants.
    ranks: Ranks | None = None

    @cached_property
    def index(self) -> Index:
        """What lies where; read when it is first asked for. Local operation."""
        return read_index(self.path, self.manifest)

    def check_index(self) -> None:
        """Raise if the index lacks what the manifest lists; of other kinds of files there is none. Local operation."""
        if self.tensors is None:
            self.index = check_index(self.path, self.manifest)

    def described(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Shape and dtype of every tensor in the files, by key. Local operation."""
        if self.tensors is not None:
            return {key: (tensor.shape, tensor.dtype) for key, tensor in self.tensors.items()}
        return self.index.tensors

    def stage(self, entries: dict[str, Entry], more: Iterable[Rectangle] = ()) -> None:
        """Read what goes into entries, and more, into memory of the host, and check it; the entries' own is left alone.

        Collective over the world: CheckpointError on all ranks where one failed; nothing has changed then. No rank
        reads more than the stored pieces that its own rows lie in.
        """
        places = [rectangle(key, piece) for key, entry in entries.items() for piece in entry.pieces]
        wanted = self.staged.expect([*places, *more])
        if self.ranks is None:
            all_agree(lambda: self._read(wanted))
            return
        dtypes = all_agree(lambda: {key: dtype for key, (_, dtype) in self.described().items()})
        share = Share.of(self.ranks, wanted, dtypes)

        def read() -> None:
            share.provide()
            self._read(share.own)

        all_agree(read)
        share.exchange(self.staged)
        _log.info("%s: read together with rank(s) %s", self.path, shorten(list(map(str, share.members)), 8))

    def _read(self, wanted: list[Rectangle]) -> None:
        if self.tensors is None:
            read_stored(self.path, self.manifest, self.index, wanted, self.staged)
            return
        # Tensors that are what lies in a DCP directory, by their keys there; the others are made of such.
        names = {}
        for key, _, _ in wanted:
            tensor = self.tensors[key]
            pieces = [piece for _, piece in tensor.chunks] if isinstance(tensor, Chunked) else []
            if pieces and all(isinstance(piece, torch_files.Piece) for piece in pieces):
                names[key] = tensor.key  # type: ignore[missing-attribute]
        if names:  # files of other kinds have no metadata
            stored = [place for place in wanted if place[0] in names]
            read_stored(self.path, self.manifest, self.index, stored, self.staged, names)
        for place in (place for place in wanted if place[0] not in names):
            key, offsets, shape = place
            values = torch.empty(shape, dtype=self.tensors[key].dtype, device="cpu")
            _fill(values, self.tensors[key], offsets)
            self.staged.parts[place] = [((0,) * len(shape), values)]


def _fill(target: torch.Tensor, tensor: Lazy, offsets: tuple[int, ...]) -> None:
    """Copy what of a tensor begins there, a block of rows at a time."""
    if not target.numel():
        return
    if isinstance(tensor, Stack):  # no expert's rows are read for another's
        for index, part in enumerate(target, offsets[0]):
            _fill(part, tensor.select(index), offsets[1:])
        return
    if not target.ndim:
        target.copy_(tensor.whole().reshape(()))
        return
    begin, end = offsets[0], offsets[0] + target.shape[0]
    columns = slices(offsets[1:], target.shape[1:])
    for first, last in tensor.blocks():
        low, high = max(first, begin), min(last, end)
        if low < high:
            target[low - begin : high - begin].copy_(tensor.rows(low, high)[(slice(None), *columns)])


# --- opening


def open_source(
    path: Path, model: nn.Module, optimizer: Optimizer | None, *, verify: bool, read: str
) -> Source:
    """The checkpoint at a path: ours, or a foreign one that is told to be so. Collective over the world.

    All but the path is as :func:`te_fsdp.checkpoint.load` takes it. The model tells which names are of one tensor, the
    optimizer its class where the files do not.

    Raises:
        CheckpointError: Nothing whole there, neither ours nor certainly foreign, or ranks that do not see or want the
            same. All ranks raise it.
    """

    def ours() -> Manifest | None:
        is_plain = not (has_manifest(path) or (path / FILE_NAME).exists()) and (path / DCP_METADATA).is_file()
        return None if is_plain else open_checkpoint(path)

    manifest = from_rank_0(ours)
    _check_same(path, FILE_NAME if manifest is not None else DCP_METADATA, read)
    if manifest is None:
        source = _foreign_source(path, model, optimizer, verify)
    else:
        if verify:
            _verify_together(path, manifest)
        elif manifest.format_version < SUMS_PIECES and rank() == 0:
            text = "%s: from before checksums of pieces: damaged tensors are found by load(..., verify=True) alone"
            _log.info(text, path)
        is_old = manifest.format_version < STACKS_EXPERTS
        source = all_agree(lambda: _older(path, manifest)) if is_old else Source(path, manifest)
    if world_size() > 1 and (read == "once" or (read == "auto" and is_remote(path))):
        background().wait()  # a running save talks over the same group
        source.ranks = own_ranks()
    return source


def _check_same(path: Path, name: str, read: str) -> None:
    """All ranks must see the checkpoint that rank 0 does, since each reads its own part. Collective over the world.

    Ranks may ask for the newest one at moments between which another appears, or through file systems that are late.
    """
    try:
        mine = checksum(path / name) if (path / name).is_file() else None
    except OSError as error:  # the others see it, perhaps
        mine = str(error)
    seen = [(str(path), mine, read)]
    if world_size() > 1 and not are_equal([digest(repr((mine, read)))]).all():
        seen = gather(seen[0])
    reads = sorted({repr(one[2]) for one in seen})
    if len(reads) > 1 or read not in _READ:
        raise CheckpointError(
            "load: read",
            expected=f"one of {', '.join(map(repr, _READ))}, the same on all ranks",
            got=", ".join(reads),
            why="Nothing was loaded",
        )
    others = [f"{where} on rank {r}" for r, (where, found, _) in enumerate(seen) if found != seen[0][1]]
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


def _foreign_source(path: Path, model: nn.Module, optimizer: Optimizer | None, verify: bool) -> Source:
    """A plain directory, with what is taken of it. Collective over the world."""

    def opened() -> torch_files.Opened:
        metadata = read_metadata(path)
        keys = set(metadata.state_dict_metadata)
        if not (keys and isinstance(metadata.planner_data, dict) and keys <= metadata.planner_data.keys()):
            open_checkpoint(path)  # ours perhaps, that has lost its manifest: raises, and tells why
        return torch_files.open_dcp(path, metadata)

    plain = all_agree(opened)
    if verify:
        _verify_together(path, plain)
    choices = Choices(otherwise_class=None if optimizer is None else type(optimizer).__name__)
    contents = all_agree(lambda: open_dcp_contents(path, choices, plain))
    for name, first in from_rank_0(lambda: _equal_ties(contents, model)).items():
        contents.manifest.parameters.pop(name)
        contents.tensors.pop(f"model.{name}")
        contents.notes.append(f"{name}: tied to {first} here, and equal to it")
    if contents.manifest.optimizer is not None and optimizer is None:
        contents.notes.append("optimizer: left, since none was given to load")
    count = f"{len(contents.manifest.parameters)} tensors of a state dict"
    told = [f"a plain {DCP_KIND} directory, without te_fsdp's manifest: {count} taken", *contents.notes]
    source = Source(path, contents.manifest, contents.tensors, contents.kind, told)
    source.index = plain.index
    return source


def _equal_ties(contents: Contents, model: nn.Module) -> dict[str, str]:
    """Further names of the model's tied tensors under which the files hold equal values."""
    have, equal = contents.manifest.parameters, {}
    for name, first in tied_names(model).items():
        a, b = (contents.tensors.get(f"model.{n}") if n in have else None for n in (name, first))
        if a is None or b is None or (a.shape, a.dtype) != (b.shape, b.dtype):
            continue
        if all(torch.equal(a.rows(*block), b.rows(*block)) for block in a.blocks()):
            equal[name] = first
    return equal


# --- verifying


def verify(path: str | os.PathLike[str]) -> None:
    """Check a checkpoint against its checksums. Local operation; needs no model, reads all files once.

    ``load(..., verify=True)`` does the same on all ranks together. Without it, ``load`` checks what it reads.

    Raises:
        CheckpointError: No checkpoint there, or a damaged one; names the files.
    """
    source = absolute(path)
    with in_use(source):
        manifest = open_checkpoint(source)
        damaged(source, check_files(source, manifest, checksums=True))
        check_index(source, manifest)


def problems_of(path: Path, tick: Tick) -> list[str]:
    """Everything that is wrong with a checkpoint: manifest, files, and the two against DCP's metadata; in words."""
    try:
        problems = check_files(path, read_manifest(path), checksums=True, tick=tick)
        if not problems:
            check_index(path, open_checkpoint(path))
    except CheckpointError as error:
        return [str(error)]
    return problems


def _verify_together(path: Path, opened: Manifest | torch_files.Opened) -> None:
    """Check files against their checksums, of a plain directory ``torch.save``'s, each by one rank.

    Collective over the world: CheckpointError on all ranks, with all damaged files.
    """
    mine = slice(rank(), None, world_size())  # of the largest first

    def changed() -> list[str]:
        if isinstance(opened, Manifest):
            names = sorted(opened.files, key=lambda name: (-opened.files[name][0], name))
            return check_files(path, opened, names[mine], checksums=True)
        windows = sorted(opened.windows, key=lambda window: -window.length)[mine]
        return [
            f"{w.key} in {w.file.name}: its contents have changed (CRC-32)" for w in windows if w.changed()
        ]

    damaged(path, [text for texts in gather_if_any(all_agree(changed)) for text in texts])
