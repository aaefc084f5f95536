"""``torch.save`` files, read without their data and written by blocks; and DCP's directories, which hold such files.

A file of ``torch.save`` is a zip file of uncompressed members: a pickle, and the bytes of each storage with a checksum
(zero where checksums were switched off). Reading takes the pickle and notes where the storages lie, which are read, and
compared with their checksums, when their rows are asked for. ``torch.load(mmap=True, weights_only=True)`` compares
nothing, maps the file, which counts as the process' memory (396 MB more for a file of 400 MB, here 20) and ends it by
SIGBUS where the file is cut short meanwhile, needs TE for TE's tensors, and opens no file inside of another, as DCP's
are; told not to read the data it takes 0.8 ms for each tensor, this 0.04. DCP brings whole pieces into memory.

Writing lets torch write the file with gaps where the data belongs (``torch.serialization.skip_data``), and fills the
gaps afterwards, with their checksums. ``torch.load`` reads the result weights-only, also with ``mmap=True``.
"""

from __future__ import annotations

import collections
import os
import struct
import sys
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import IO, Any

import torch
from torch import serialization
from torch.distributed.checkpoint.metadata import Metadata

from te_fsdp.boxed_dtensor import ORIGINAL_ORDER
from te_fsdp.checkpoint.directory import damaged
from te_fsdp.checkpoint.index import Index, files_in, read_metadata
from te_fsdp.checkpoint.lazy_tensors import Chunked, Lazy, Record, Stored, as_bytes, read_bytes
from te_fsdp.checkpoint.manifest import DCP_METADATA, Tick, unreadable
from te_fsdp.checkpoint.shard_files import crc32, view_of
from te_fsdp.checkpoint.storage import listing
from te_fsdp.errors import CheckpointError
from te_fsdp.unpickling import TableUnpickler, UnknownNameError
from te_fsdp.upstream import torch_dtensor as _torch
from te_fsdp.upstream.te_formats import TENSORS, Quantized, with_record

#: Stands behind the data of a member of a zip file; its checksum follows, once more.
_BEHIND = b"PK\x07\x08"
_DAMAGED = "the file is damaged, truncated or of another kind"


# ---------------------------------------------------------------------------------------------------- the pickle


def _rebuild(storage: Any, start: int, size: Any, stride: Any, *rest: Any) -> torch.Tensor:
    return _rebuild_as(storage, start, size, stride, False, None, storage[1])


def _rebuild_as(
    storage: Any, start: int, size: Any, stride: Any, grad: Any, hooks: Any, dtype: torch.dtype, *rest: Any
) -> torch.Tensor:
    record, _ = storage
    # Refuses what does not lie within the storage.
    whole = torch.empty(record.count // dtype.itemsize, dtype=dtype, device="meta")
    return with_record(whole.as_strided(size, stride, start), record)


#: What stands in pickled state dicts.
_STATE_DICTS: dict[str, Any] = {
    "torch._utils._rebuild_tensor": _rebuild,
    "torch._utils._rebuild_tensor_v2": _rebuild,
    "torch._utils._rebuild_tensor_v3": _rebuild_as,
    "torch._utils._rebuild_parameter": lambda data, *rest: data,
    "torch._utils._rebuild_parameter_with_state": lambda data, *rest: data,
    # What gives a tensor back its class and attributes.
    "torch._tensor._rebuild_from_type_v2": lambda function, kind, args, state: function(*args),
    "torch.nn.parameter.Parameter": None,
    "torch.Tensor": None,
    "torch.Size": torch.Size,
    "torch.device": torch.device,
    "collections.OrderedDict": collections.OrderedDict,
    "collections.Counter": collections.Counter,
    "_codecs.encode": lambda text, encoding: text.encode("latin1"),  # bytes
    # Of a number it would be as many bytes.
    "builtins.bytearray": lambda data=b"", *how: bytearray(memoryview(data.encode(*how) if how else data)),
    "builtins.set": set,
    "builtins.complex": complex,
    **TENSORS,
}


# ------------------------------------------------------------------------------------------------------- reading


class _FilePart:
    """A part of an open file as a file, for ``zipfile``."""

    def __init__(self, stream: IO[bytes], offset: int, length: int) -> None:
        self.stream, self.offset, self.length, self.at = stream, offset, length, 0

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self.at

    def seek(self, offset: int, whence: int = 0) -> int:
        self.at = max(0, offset + (0, self.at, self.length)[whence])
        return self.at

    def read(self, count: int = -1) -> bytes:
        rest = max(0, self.length - self.at)
        self.stream.seek(self.offset + self.at)
        data = self.stream.read(rest if count < 0 else min(count, rest))
        self.at += len(data)
        return data


@dataclass(frozen=True, slots=True)
class Window:
    """A ``torch.save`` file: a whole file, or as many bytes of one from an offset, as DCP strings them together.

    Its methods raise CheckpointError where it is no such file, or damaged.
    """

    file: Path
    key: str = ""
    offset: int = 0
    length: int = -1  # to the end of the file

    @property
    def label(self) -> str:
        """For messages."""
        return f"{self.key} in {self.file}" if self.key else str(self.file)

    def objects(self) -> Any:
        """What was stored: plain objects, :class:`Quantized`, and tensors without data, with a ``record`` of theirs.

        Of a class that no state dict needs: CheckpointError.
        """
        records = self.records()
        with unreadable(self.label, "file of torch.save", _DAMAGED):
            order = records.get("byteorder")
            if order is not None and order.read() != sys.byteorder.encode():
                raise ValueError(f"bytes of a {order.read()!r}-endian machine")
            storages = lambda dtype, key: (records[f"data/{key}"], dtype)  # noqa: E731
            try:
                return TableUnpickler(records["data.pkl"].read(), _STATE_DICTS, storages).load()
            except UnknownNameError as error:
                raise CheckpointError(
                    f"{self.label}: cannot be read weights-only",
                    expected="tensors, TransformerEngine's quantized tensors (no GroupedTensor) and plain containers",
                    got=f"an object of {error}",
                    why="Anything else in a pickle may run code",
                    fix="load it with torch, and save a plain state_dict() with torch.save, or te_fsdp.checkpoint.save",
                ) from error

    def records(self) -> dict[str, Record]:
        """The members of the zip file by their names, without what all of these begin with."""
        records: dict[str, Record] = {}
        with unreadable(self.label, "file of torch.save", _DAMAGED), self.file.open("rb") as stream:
            length = self.file.stat().st_size - self.offset if self.length < 0 else self.length
            part = _FilePart(stream, self.offset, length)
            with zipfile.ZipFile(part) as archive:  # type: ignore[arg-type]
                members = archive.infolist()
            for member in members:
                part.seek(member.header_offset)
                head = part.read(30)
                begin = member.header_offset + 30 + sum(struct.unpack("<HH", head[26:]))
                name, end = member.filename.partition("/")[2], begin + member.file_size
                # Of two members of one name zipfile takes the last, torch the first.
                if member.compress_type or end > length or head[:4] != b"PK\x03\x04" or name in records:
                    raise zipfile.BadZipFile(f"{member.filename} at byte {member.header_offset}")
                records[name] = Record(
                    self.file, self.offset + begin, member.file_size, member.CRC or None, self.label
                )
        return records

    def changed(self) -> bool:
        """Whether its contents contradict the checksums that ``torch.save`` put beside them. Reads all of it."""
        try:
            for record in self.records().values():
                record.check()
        except CheckpointError:
            return True
        return False


def stored(tensor: torch.Tensor, key: str, like: torch.Tensor | None = None) -> Stored:
    """A tensor from :meth:`Window.objects`, or a view of one, ``like``, as one that is read from its file."""
    record: Record = (tensor if like is None else like).record  # type: ignore[attr-defined]
    shape, stride = tuple(tensor.shape), tuple(tensor.stride())
    return Stored(key, record, shape, tensor.dtype, stride, int(tensor.storage_offset()))


def write_torch(path: Path, objects: Any, tick: Tick) -> None:
    """Write or overwrite a file, neither atomic nor synced: nested dicts and lists with lazy tensors. Local."""
    gaps: dict[int, torch.Tensor] = {}  # a tensor under several names is stored once
    written, found = list[Lazy](), list[Any]()

    def gap_of(tensor: Lazy, key: str) -> torch.Tensor:
        written.append(tensor)
        return gaps.setdefault(id(tensor), _torch.fake_tensor(tensor.shape, tensor.dtype))

    try:
        with serialization.skip_data(materialize_fake_tensors=True):
            torch.save(with_leaves(objects, gap_of), path)
    except RuntimeError:
        # "iostream error": torch does not tell what the system has refused. This asks for it again.
        with path.open("ab") as file:
            os.posix_fallocate(file.fileno(), 0, sum(gap.untyped_storage().nbytes() for gap in gaps.values()))
        raise
    with_leaves(Window(path).objects(), lambda gap, _: found.append(gap))
    sums: dict[int, int] = {}
    with path.open("r+b") as file:
        by_offset = {gap.record.offset: tensor for tensor, gap in zip(written, found, strict=True)}
        for offset, tensor in by_offset.items():
            crc = 0
            file.seek(offset)
            for block in as_bytes(tensor):
                crc = crc32(block, crc)
                file.write(block)
                tick(len(block))
            sums[offset] = crc
            if file.read(4) == _BEHIND:
                file.write(struct.pack("<I", crc))
    # The same in the directory of the zip file, whose members are told by where their data begin.
    records = Window(path).records()
    with zipfile.ZipFile(path, "a") as archive:
        for member in archive.infolist():
            member.CRC = sums.get(records[member.filename.partition("/")[2]].offset, member.CRC)
        archive.comment = archive.comment  # writes the directory anew


def with_leaves(value: Any, change: Callable[[Any, str], Any], key: str = "") -> Any:
    """Nested dicts and lists with what ``change`` makes of tensors, of any kind, and of the keys above them."""
    if isinstance(value, Lazy | torch.Tensor | Quantized):
        return change(value, key)
    if isinstance(value, Mapping):
        return {k: with_leaves(v, change, f"{key}.{k}" if key else str(k)) for k, v in value.items()}
    if type(value) in (list, tuple):
        return type(value)(with_leaves(v, change, f"{key}.{n}") for n, v in enumerate(value))
    return value


# ------------------------------------------------------------------------------------------- directories of DCP

#: By length, shape and dtype: what comes before the data of some pieces, and where the elements of one of them lie.
Heads = dict[tuple[int, tuple[int, ...], torch.dtype], list[tuple[bytes, Stored]]]


@dataclass
class Piece(Lazy):
    """A rectangle that DCP wrote, with shape and dtype according to DCP's metadata; CheckpointError if they are others.

    To list the members of its file takes most of the time of a small tensor, and most files differ in the data alone:
    what comes before these is compared with that of the pieces beside it that were looked at before (``heads``).
    """

    window: Window
    shape: tuple[int, ...]
    dtype: torch.dtype
    heads: Heads = field(default_factory=dict, repr=False)

    def rows(self, first: int, last: int) -> torch.Tensor:
        """See :meth:`Lazy.rows`."""
        return self._as_described(self.found).rows(first, last)

    @cached_property
    def found(self) -> Any:
        """Where the elements of a tensor lie, or what else there is, by :meth:`Window.objects` when first asked for."""
        w = self.window
        return self._find(lambda at, count: bytes(read_bytes(w.file, w.offset + at, count, w.label)))

    def within(self, data: torch.Tensor, *, check: bool) -> torch.Tensor:
        """The tensor in the bytes of its file, given as a uint8 tensor on the host; a view of them. In any thread.

        With ``check`` they are compared with the checksum that ``torch.save`` wrote, if it did.
        """
        like = self._as_described(self._find(lambda at, count: bytes(data[at : at + count].numpy())))
        begin, count = like.record.offset - self.window.offset, like.record.count
        if check:
            like.record.check(view_of(data[begin : begin + count]))
        last = like.start + sum((n - 1) * stride for n, stride in zip(self.shape, like.stride, strict=True))
        elements = data[begin : begin + (last + 1) * self.dtype.itemsize].view(self.dtype)
        return elements.as_strided(self.shape, like.stride, elements.storage_offset() + like.start)

    def _find(self, read: Callable[[int, int], bytes]) -> Any:
        """What lies in a file, whose bytes ``read`` gives; of one that begins as another did, where it did there."""
        window = self.window
        known = self.heads.setdefault((window.length, self.shape, self.dtype), [])
        for head, like in known:
            if read(0, len(head)) == head:
                count, begin = like.record.count, window.offset + len(head)
                mark, crc = struct.unpack("<4sI", read(len(head) + count, 8))
                if mark == _BEHIND:  # where torch writes the checksum
                    record = Record(window.file, begin, count, crc or None, window.label)
                    return replace(like, key=window.key, record=record)
        found = window.objects()
        if isinstance(found, torch.Tensor):
            found = stored(found, window.key)
            known.append((read(0, found.record.offset - window.offset), found))
        return found

    def _as_described(self, found: Any) -> Stored:
        got = (found.shape, found.dtype) if isinstance(found, Stored) else type(found).__name__
        if got != (self.shape, self.dtype):
            raise CheckpointError(
                f"{self.window.key}: its bytes in {self.window.file}",
                expected=(self.shape, self.dtype),
                got=got,
                fix="the checkpoint is damaged, take an earlier one",
            )
        return found


@dataclass
class DcpContents:
    """Contents of a plain DCP directory, by key."""

    index: Index
    tensors: dict[str, Lazy]
    others: dict[str, Window]  #: Pickled objects
    paths: dict[str, tuple[Any, ...]]  #: Of keys that DCP flattened: where the value was in the nested dict
    windows: list[Window]  #: Every file of ``torch.save`` in the directory's files


def open_dcp(path: Path, metadata: Metadata | None = None) -> DcpContents:
    """The contents of a plain DCP directory, whose metadata may have been read before; CheckpointError: damaged."""
    metadata = metadata or read_metadata(path)
    file_of = files_in(path)
    windows: dict[str, list[Window]] = {}
    ends: dict[str, int] = {}
    with unreadable(path, DCP_METADATA):
        order = lambda item: (item[1].relative_path, item[1].offset, item[1].length)  # noqa: E731
        for index, place in sorted(metadata.storage_data.items(), key=order):
            name, begin = place.relative_path, place.offset
            if begin < ends.get(name, 0) or place.length <= 0:
                what = f"no {place.length} bytes of its own at byte {begin} of {name}"
                raise ValueError(f"{index.fqn}: {what}; does another piece lie there (safetensors?)")
            ends[name] = begin + place.length
            window = Window(file_of(name), index.fqn, begin, place.length)
            windows.setdefault(window.key, []).append(window)
        found = Index.of(metadata)
        others = {k: windows[k][0] for k in metadata.state_dict_metadata if k not in found.tensors}
        paths, described = dict(metadata.planner_data or {}), metadata.state_dict_metadata.keys()
        for key in (windows.keys() - described) | (described - paths.keys() if paths else set()):
            raise ValueError(f"not all is said of {key}")
        for key in (key for key, path in paths.items() if key != ".".join(map(str, path))):
            raise ValueError(f"{key} is said to be at {paths[key]}")  # DCP joins the one out of the other
    problems, seen = [], listing(path)
    for name, end in sorted(ends.items()):
        file = seen.get(name) or path / name
        if name not in seen and not file.is_file():
            problems.append(f"{name} is missing")
        elif (size := file.stat().st_size) < end:
            problems.append(f"{name}: expected {end} bytes, got {size}")
    damaged(path, problems)
    tensors = tensors_of(path, found)
    for key, tensor in tensors.items():
        properties = getattr(metadata.state_dict_metadata[key], "properties", None)
        if isinstance(tensor, Chunked) and getattr(properties, "memory_format", None) is ORIGINAL_ORDER:
            tensor.in_original_order = True
    return DcpContents(found, tensors, others, paths, [*chain.from_iterable(windows.values())])


def tensors_of(path: Path, index: Index) -> dict[str, Lazy]:
    """All tensors of a directory; CheckpointError: pieces that do not make them up, or lie elsewhere. Local."""
    heads: Heads = {}
    file_of = files_in(path)
    tensors: dict[str, Lazy] = {}
    with unreadable(path, DCP_METADATA):
        for key, rows in index.rows(index.tensors):
            (shape, dtype), chunks = index.tensors[key], []
            for number, begin, length, *box in rows.tolist():
                window = Window(file_of(index.files[number]), key, begin, length)
                piece = Piece(window, tuple(box[len(shape) :]), dtype, heads)
                chunks.append((tuple(box[: len(shape)]), piece))
            tensors[key] = Chunked(key, shape, dtype, chunks)
    return tensors
