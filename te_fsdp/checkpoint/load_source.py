"""Sources of a load: a checkpoint of te_fsdp, or a directory of plain ``torch.distributed.checkpoint``.

Plain DCP records the location of each value in the saved nested dict (``planner_data``). te_fsdp writes its own keys
and no such records. A directory without a manifest is therefore a plain one if every key has a record. Otherwise it is
a checkpoint of te_fsdp that has lost its manifest, and is refused.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path

import torch
from torch import nn

from te_fsdp.checkpoint.directory import damaged, open_checkpoint
from te_fsdp.checkpoint.index import Index, read_index
from te_fsdp.checkpoint.lazy_tensors import Chunked, Lazy, Stack
from te_fsdp.checkpoint.manifest import DCP_METADATA, FILE_NAME, SUMS_PIECES, Manifest, Tick, has_manifest
from te_fsdp.checkpoint.model_state import owned_parameters, tied_names
from te_fsdp.checkpoint.plain_dcp import DcpContents, open_dcp
from te_fsdp.checkpoint.reader import CHECKPOINT, DCP_KIND, Choices, Contents, key_ends
from te_fsdp.checkpoint.reading import ReadShare, Rectangle, Staged, read_stored, reading_threads
from te_fsdp.checkpoint.shard_files import crc32
from te_fsdp.checkpoint.state_dicts import open_dcp_contents
from te_fsdp.checkpoint.storage import absolute, is_remote
from te_fsdp.checkpoint.tensor_entries import Shape, TensorEntry, stacked_name
from te_fsdp.collectives.agreement import (
    RankMessenger,
    all_agree,
    from_rank_0,
    gather_if_any,
    rank,
    rank_messenger,
    result_of,
    world_size,
)
from te_fsdp.collectives.watching import run_while_all_live
from te_fsdp.errors import CheckpointError, TeFsdpError, shorten
from te_fsdp.layout import slices
from te_fsdp.upstream.te_formats import NVFP4_ROWS, NVFP4_SQUARES

_log = logging.getLogger("te_fsdp")
#: Components of an NVFP4 weight with scales of blocks -> the dim in which equal scales make 16 x 16 blocks.
_SCALES = {"rowwise_scale_inv": -2, "columnwise_scale_inv": -1}
#: A name of a checkpoint that has to change: a further name of a tied tensor, with its first name in the model; or the
#: name of the tensor of all experts, with ``None``, under which the experts are stacked.
_Change = tuple[str, str | None]


@dataclass
class Source(Contents):
    """A checkpoint that is being loaded. For a stage of a pipeline, the manifest has the contents of the stage."""

    index: Index | None = None  #: Locations of the pieces to read; ``None``: read ``tensors``
    staged: Staged = field(default_factory=Staged, repr=False)  #: Data that were read and not copied yet
    #: The world, if data for several ranks are read once; otherwise each rank reads its own.
    ranks: RankMessenger | None = None

    def described(self) -> dict[str, tuple[Shape, torch.dtype]]:
        """Return shape and dtype of every tensor in the files, by key. Local operation."""
        if self.index is not None:
            return self.index.tensors
        return {key: (tensor.shape, tensor.dtype) for key, tensor in self.tensors.items()}

    def stage(self, entries: dict[str, TensorEntry], rectangles: Iterable[Rectangle] = ()) -> None:
        """Read and check the data of entries, and further rectangles, into host memory.

        Collective over the world. The entries' own memory is not changed. Raise CheckpointError on all ranks if one
        rank failed. A rank reads only stored pieces that contain its own rows.
        """
        pieces = [(key, *piece.chunk) for key, entry in entries.items() for piece in entry.pieces]
        # The same rectangle may be needed twice, by a weight and as the source of a main weight.
        required = [area for area in dict.fromkeys([*pieces, *rectangles]) if math.prod(area[2])]
        self.staged.parts.update({area: [] for area in required})
        if self.ranks is None:
            all_agree(lambda: self._read(required))
            return
        dtypes = all_agree(lambda: {key: dtype for key, (_, dtype) in self.described().items()})
        share = ReadShare.of(self.ranks, required, dtypes)
        # No rank sends before all have read and checked: damage must be found before anything is used.
        all_agree(lambda: share.read(self.staged, self._read))
        problem: TeFsdpError | None = None
        try:
            run_while_all_live(lambda: share.exchange(self.staged))
        except TeFsdpError as error:  # others interrupt the load: ranks wait for data of this one
            problem = error
        # All ranks name a rank that ends here, also those that do not exchange data with it.
        all_agree(lambda: result_of(None, problem))
        _log.info("%s: read shared with rank(s) %s", self.source, shorten(list(map(str, share.members)), 8))

    def tensor(self, key: str) -> torch.Tensor:
        """Read and check a full tensor of the files, into host memory. Local operation."""
        shape = self.described()[key][0]
        full = key, (0,) * len(shape), tuple(shape)
        self.staged.parts[full] = []
        self._read([full])
        values = self.staged.new(full, torch.device("cpu"))
        del self.staged.parts[full]
        return values

    def _read(self, required: list[Rectangle]) -> None:
        if self.index is not None:
            read_stored(self.source, self.manifest, self.index, required, self.staged)
            return
        read = lambda area: _values(self.tensors[area[0]], *area[1:])  # noqa: E731
        # Computed tensors may cache the input of the last one, so they are not thread-safe.
        are_stored = all(isinstance(self.tensors[key], Chunked) for key, _, _ in required)
        with reading_threads() as pool:
            for area, values in zip(required, (pool.map if are_stored else map)(read, required), strict=True):
                self.staged.parts[area] = [((0,) * len(area[2]), values)]


def _values(tensor: Lazy, offsets: Shape, shape: Shape) -> torch.Tensor:
    """Return a rectangle of a tensor, contiguous, on the host."""
    if not shape:
        return tensor.full().reshape(())
    begin, end = offsets[0], offsets[0] + shape[0]
    if isinstance(tensor, Stack):  # do not read the rows of other experts
        return torch.stack([_values(tensor.select(i), offsets[1:], shape[1:]) for i in range(begin, end)])
    return tensor.rows(begin, end)[(slice(None), *slices(offsets[1:], shape[1:]))].contiguous()


# --- opening


def open_source(path: Path, model: nn.Module, optimizer: str, *, verify: bool, read: str) -> Source:
    """Open a checkpoint of te_fsdp or a plain directory. Collective over the world.

    The arguments except ``path`` are those of :func:`te_fsdp.checkpoint.load`. The model determines tied names.
    ``optimizer`` is the class to use if the files do not record it, empty if none is loaded. Raise CheckpointError on
    all ranks for an incomplete checkpoint, any other directory, or ranks that do not see the same files.
    """

    def checksum_of(manifest: Manifest | None) -> int | str | None:
        file = path / (DCP_METADATA if manifest is None else FILE_NAME)
        try:
            return crc32(file.read_bytes()) if file.is_file() else None
        except OSError as error:  # other ranks may see it
            return str(error)

    def first() -> tuple[Manifest | None, int | str | None, str, str]:
        if read not in ("auto", "each", "once"):
            raise CheckpointError("load: read", expected="'auto', 'each' or 'once'", got=repr(read))
        is_plain = not (has_manifest(path) or (path / FILE_NAME).exists()) and (path / DCP_METADATA).is_file()
        manifest = None if is_plain else open_checkpoint(path)
        return manifest, checksum_of(manifest), str(path), read

    manifest, checksum, path_on_0, read = from_rank_0(first)
    # Each rank reads its own part. Ranks may have resolved the newest checkpoint at different times, or their file
    # systems may be out of date.
    differing = gather_if_any("" if checksum_of(manifest) == checksum else f"{path} on rank {rank()}")
    if differing:
        raise CheckpointError(
            f"{path_on_0}: the ranks see different checkpoints",
            expected="the same on all ranks",
            got=", ".join([f"{path_on_0} on rank 0", *list(filter(None, differing))[:3]]),
            why="Weights of two checkpoints would be mixed. Nothing was loaded",
            fix="find the path on rank 0, for example by te_fsdp.checkpoint.latest, and broadcast it; if the paths are "
            "equal, mount one file system on all nodes",
        )
    if manifest is None:
        plain = all_agree(lambda: open_dcp(path, needs_paths=True))
        if verify:
            _verify_together(path, plain)
        choices = Choices(optimizer_class=optimizer or None)
        contents = all_agree(lambda: open_dcp_contents(path, plain, choices))
        _fit(contents, _changes(contents.manifest, model))
        if contents.manifest.optimizer is not None and not optimizer:
            contents.notes.append("optimizer: left, since none was passed to load")
        count = f"{len(contents.manifest.parameters)} tensors of a state dict"
        contents.notes.insert(0, f"a plain {DCP_KIND} directory, without te_fsdp's manifest: {count} taken")
        source = Source(**vars(contents))
    else:
        if verify:
            _verify_together(path, manifest)
        elif manifest.format_version < SUMS_PIECES and rank() == 0:
            text = "%s: a format without piece checksums: only load(..., verify=True) detects damaged tensors"
            _log.info(text, path)
        source = _own_source(path, manifest, model, is_verified=verify)
        _name_rows(source)
    if world_size() > 1 and (read == "once" or (read == "auto" and is_remote(path))):
        source.ranks = rank_messenger(all_pairs=True)
    return source


def _own_source(path: Path, manifest: Manifest, model: nn.Module, *, is_verified: bool) -> Source:
    """Return the source of a te_fsdp checkpoint, its names fitted if it was converted. Collective over the world."""
    index = all_agree(lambda: read_index(path, manifest))
    # A save records the settings of modules, and with them the model's own names.
    is_converted = not (manifest.semantics or {}).get("modules")
    # A converted checkpoint does not contain the model's names, for example of tied weights, so they are fitted.
    if not (is_converted and (changes := _changes(manifest, model))):
        return Source(path, CHECKPOINT, manifest, index=index)
    if not is_verified:  # lazy tensors are not compared with the table of checksums
        _verify_together(path, manifest)
    contents = all_agree(lambda: Contents.of_checkpoint(path))
    _fit(contents, changes)
    return Source(**vars(contents))


def _name_rows(source: Source) -> None:
    """Rename the format of NVFP4 weights with one scale per 1 x 16 block, which earlier te_fsdp called ``nvfp4``.

    Collective over the world if there are weights of this name: each rank reads the scales of some of them.
    """
    parameters = source.manifest.parameters
    candidates = [
        n for n, described in parameters.items() if str(described["format"]).startswith(f"{NVFP4_SQUARES} ")
    ]
    if not candidates:
        return

    def has_squares(name: str) -> bool:
        # Rows with such scales by chance are also valid square blocks, with the same values.
        part = next(part for part in _SCALES if part in parameters[name]["components"])
        scales, dim = source.tensor(f"model.{name}:{part}"), _SCALES[part]
        if scales.shape[dim] % 16:
            return False
        blocks = scales.unflatten(dim, (-1, 16))
        return torch.equal(blocks, blocks.narrow(dim, 0, 1).expand_as(blocks))

    rows = all_agree(lambda: [name for name in candidates[rank() :: world_size()] if not has_squares(name)])
    for name in chain.from_iterable(gather_if_any(rows)):
        described = parameters[name]
        parameters[name] = described | {"format": described["format"].replace(NVFP4_SQUARES, NVFP4_ROWS, 1)}


# --- names


# State dicts and safetensors do not record which names a model ties, nor whether ``weight0`` belongs to an expert. Only
# the model does. So the names of files that te_fsdp.checkpoint.save did not write are fitted to the model.
def _changes(manifest: Manifest, model: nn.Module) -> list[_Change]:
    """Return the changes of names that any rank's model needs, in one order on all ranks. Collective over the world."""

    def changes() -> list[_Change]:
        names = manifest.parameters.keys() | manifest.buffers.keys()
        grouped = {o.key for o in owned_parameters(model) if o.expert is not None or o.is_grouped}
        ties = tied_names(model)
        for name, first in list(ties.items()):
            if stacked_name(first) in grouped and stacked_name(name) != stacked_name(first):
                grouped.add(stacked_name(name))
                ties[stacked_name(name)] = stacked_name(first)
        experts = [name for name in sorted(grouped) if name not in names and f"{name}0" in names]
        tied = [(name, first) for name, first in ties.items() if name in names | {*experts}]
        return [*((name, None) for name in experts), *tied]

    return [*dict.fromkeys(chain.from_iterable(gather_if_any(all_agree(changes))))]


def _fit(contents: Contents, changes: list[_Change]) -> None:
    """Change names and stack experts; rank 0 compares the values of ties. Collective over the world."""
    if experts := {name for name, first in changes if first is None}:
        all_agree(lambda: contents.stack_experts(experts))
    ties = [(name, first) for name, first in changes if first is not None and name in contents.names]
    # Where the value of a first name is stored: files may have only further names of a tied tensor.
    stored_name = {first: first if first in contents.names else name for name, first in reversed(ties)}
    equal = from_rank_0(lambda: [_is_equal(contents, name, stored_name[first]) for name, first in ties])
    for (name, first), is_equal in zip(ties, equal, strict=True):
        tie(contents, name, first, is_equal=is_equal)


def _is_equal(contents: Contents, name: str, other: str) -> bool:
    """Return whether two tensors have one description and one value, bit for bit. Reads them. Local operation."""
    described = {**contents.manifest.parameters, **contents.manifest.buffers}
    # Before any data are read. Different formats mean different values for the model.
    if name == other or described[name] != described[other]:
        return name == other
    for suffix in key_ends(described[name]):
        pair = [contents.tensors[f"model.{n}{suffix}"] for n in (name, other)]
        if len({(tensor.shape, tensor.dtype) for tensor in pair}) != 1:
            return False
        # In blocks, because an embedding may be larger than the memory that is free on this host.
        for block in pair[0].blocks():
            # As bytes, because NaN differs from itself.
            if not torch.equal(*(t.rows(*block).contiguous().view(-1).view(torch.uint8) for t in pair)):
                return False
    return True


def tie(contents: Contents, name: str, first: str, *, is_equal: bool) -> None:
    """Keep a tied tensor once, under the model's first name; changes ``contents``. Local operation.

    Values that differ stay. The load then names them as tensors that only the checkpoint has.
    """
    manifest, tensors = contents.manifest, contents.tensors
    if not is_equal:
        contents.notes.append(f"{name}: tied to {first} in this model, but its stored values differ")
        return
    is_absent = first not in contents.names
    for suffix in key_ends(manifest.tensor(name)):
        tensor = tensors.pop(f"model.{name}{suffix}")
        if is_absent:
            tensors[f"model.{first}{suffix}"] = tensor
    for table in (manifest.parameters, manifest.buffers):
        if (described := table.pop(name, None)) is not None and is_absent:
            table[first] = described
    if manifest.optimizer is not None:
        states, assigned = manifest.optimizer["state"], set[str]()
        is_free, tied_states = first not in states, states.pop(name, {})
        for key, described in tied_states.items():
            tensor = tensors.pop(f"optimizer.state.{name}.{key}", None)  # a plain value has none
            if is_free:
                states.setdefault(first, {})[key] = described
                tensors |= {} if tensor is None else {f"optimizer.state.{first}.{key}": tensor}
        # A parameter may be in one group only: the first one that has either name keeps it.
        for group in manifest.optimizer["groups"]:
            names = dict.fromkeys(first if n == name else n for n in group["parameters"])
            group["parameters"] = [n for n in names if n not in assigned]
            assigned |= names.keys()
    manifest.tied.pop(first, None)
    manifest.tied |= {n: first for n, other in manifest.tied.items() if other == name} | {name: first}
    reason = "stored under this name only" if is_absent else "and equal to it"
    contents.notes.append(f"{name}: tied to {first} here, {reason}")


# --- verifying


def verify(path: str | os.PathLike[str]) -> None:
    """Check a checkpoint against its checksums. Local operation; needs no model, reads all files once.

    ``load(..., verify=True)`` does the same on all ranks together. Otherwise ``load`` checks the data that it reads.

    Raises:
        CheckpointError: No checkpoint, or a damaged one; names the files.
    """
    source = absolute(path)
    manifest = open_checkpoint(source)
    damaged(source, manifest.check_files(source, checksums=True))
    read_index(source, manifest)


def problems_of(path: Path, tick: Tick) -> list[str]:
    """Return all problems of a checkpoint as texts: manifest, files, and their consistency with DCP's metadata."""
    try:
        problems = Manifest.read(path).check_files(path, checksums=True, tick=tick)
        if not problems:
            read_index(path, open_checkpoint(path))
    except CheckpointError as error:
        return [str(error)]
    return problems


def _verify_together(path: Path, opened: Manifest | DcpContents) -> None:
    """Check files against their checksums, each on one rank; records of ``torch.save`` in a plain directory.

    Collective over the world. Raise CheckpointError on all ranks, with all damaged files.
    """
    share = slice(rank(), None, world_size())  # of the largest first

    def problems() -> list[str]:
        if isinstance(opened, Manifest):
            names = sorted(opened.files, key=lambda name: (-opened.files[name][0], name))
            return opened.check_files(path, names[share], checksums=True)
        records = sorted(opened.records, key=lambda record: -record.length)[share]
        changed = [record for record in records if record.has_changed()]
        return [f"{r.key} in {r.file.name}: its contents have changed (CRC-32)" for r in changed]

    damaged(path, [*chain.from_iterable(gather_if_any(all_agree(problems)))])
