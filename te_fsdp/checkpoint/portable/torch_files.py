"""``torch.save`` files: read without their data, written by blocks.

A file of ``torch.save`` is a zip file of uncompressed members: a pickle, and the bytes of each storage with a checksum
(zero where checksums were switched off). Reading takes the pickle and notes where the storages lie, which are read, and
compared with their checksums, when their rows are asked for. ``torch.load(mmap=True, weights_only=True)`` compares
nothing; it maps the file, which counts as the process' memory (396 MB more for a file of 400 MB, here 20), ends the
process by SIGBUS where the file is cut short meanwhile, needs TE for TE's tensors, and opens no file inside of another,
as DCP's are. Kept from reading the data, by a private mode of torch, it takes 0.8 ms of CPU for each tensor, this 0.03
ms (files of 2,000 small ones).

Writing lets torch write the file with gaps where the data belongs (``torch.serialization.skip_data``), and fills the
gaps afterwards, with their checksums. ``torch.load`` reads the result weights-only, also with ``mmap=True``.
"""

from __future__ import annotations

import collections
import io
import os
import struct
import sys
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch
from torch import serialization

from te_fsdp import _torch
from te_fsdp._te_formats import TENSORS, TableUnpickler, UnknownNameError, with_record
from te_fsdp.checkpoint.manifest import Tick
from te_fsdp.checkpoint.portable.lazy import Lazy, Record, Stored
from te_fsdp.checkpoint.portable.safetensors import as_bytes
from te_fsdp.checkpoint.sums import crc32
from te_fsdp.errors import CheckpointError

#: Begins each member of a zip file.
_MEMBER = b"PK\x03\x04"
#: Stands behind the data of a member of a zip file; its checksum follows, once more.
BEHIND = b"PK\x07\x08"


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


def _same(data: Any, *rest: Any) -> Any:
    """Stands for what makes a parameter of a tensor."""
    return data


def _rebuild_type(function: Any, kind: Any, args: Any, state: Any) -> Any:
    """Stands for what gives a tensor back its class and attributes."""
    return function(*args)


#: What stands in pickled state dicts.
_STATE_DICTS: dict[str, Any] = {
    "torch._utils._rebuild_tensor": _rebuild,
    "torch._utils._rebuild_tensor_v2": _rebuild,
    "torch._utils._rebuild_tensor_v3": _rebuild_as,
    "torch._utils._rebuild_parameter": _same,
    "torch._utils._rebuild_parameter_with_state": _same,
    "torch._tensor._rebuild_from_type_v2": _rebuild_type,
    "torch.nn.parameter.Parameter": None,
    "torch.Tensor": None,
    "torch.Size": torch.Size,
    "torch.device": torch.device,
    "collections.OrderedDict": collections.OrderedDict,
    "collections.Counter": collections.Counter,
    "_codecs.encode": lambda text, encoding: text.encode("latin1"),  # bytes
    "builtins.bytearray": bytearray,
    "builtins.set": set,
    "builtins.complex": complex,
    **TENSORS,
}


# ------------------------------------------------------------------------------------------------------- reading


class _Part:
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
    """A ``torch.save`` file: a whole file, or a part of one, as DCP strings them together.

    Attributes:
        file: The file.
        key: Name of what is in it, for messages.
        offset: Byte at which it begins.
        length: Its bytes; -1: to the end of the file.
    """

    file: Path
    key: str = ""
    offset: int = 0
    length: int = -1

    @property
    def label(self) -> str:
        """For messages."""
        return f"{self.key} in {self.file}" if self.key else str(self.file)

    def objects(self) -> Any:
        """What was stored: plain objects, :class:`Quantized`, and tensors without data, with a ``record`` of theirs.

        Raises:
            CheckpointError: It cannot be read, or holds an object of a class that no state dict needs.
        """
        records = self.records()
        try:
            order = records.get("byteorder")
            if order is not None and order.read() != sys.byteorder.encode():
                raise ValueError(f"bytes of a {order.read()!r}-endian machine")
            pickled = io.BytesIO(records["data.pkl"].read())
            storages = lambda dtype, key: (records[f"data/{key}"], dtype)  # noqa: E731
            return TableUnpickler(pickled, _STATE_DICTS, storages).load()
        except UnknownNameError as error:
            fix = "save a plain state_dict() with torch.save"
            if "GroupedTensor" in str(error):
                fix = "load it with torch and save it with te_fsdp.checkpoint.save"
            raise CheckpointError(
                f"{self.label}: cannot be read weights-only",
                expected="tensors, TransformerEngine's quantized tensors and plain containers",
                got=f"an object of {error}",
                why="Anything else in a pickle may run code",
                fix=fix,
            ) from error
        except CheckpointError:
            raise
        except Exception as error:  # a damaged pickle may raise anything
            raise self._no_torch_file(error) from error

    def records(self) -> dict[str, Record]:
        """The members of the zip file by their names, without what all of these begin with.

        Raises:
            CheckpointError: It is no such file, or damaged.
        """
        records: dict[str, Record] = {}
        try:
            with self.file.open("rb") as stream:
                length = self.file.stat().st_size - self.offset if self.length < 0 else self.length
                part = _Part(stream, self.offset, length)
                with zipfile.ZipFile(part) as archive:  # type: ignore[arg-type]
                    members = archive.infolist()
                for member in members:
                    part.seek(member.header_offset)
                    head = part.read(30)
                    begin = member.header_offset + 30 + sum(struct.unpack("<HH", head[26:]))
                    if member.compress_type or begin + member.file_size > length or head[:4] != _MEMBER:
                        raise zipfile.BadZipFile(f"{member.filename} at byte {member.header_offset}")
                    records[member.filename.partition("/")[2]] = Record(
                        self.file, self.offset + begin, member.file_size, member.CRC or None, self.label
                    )
        except (OSError, zipfile.BadZipFile, struct.error, ValueError, NotImplementedError) as error:
            raise self._no_torch_file(error) from error
        return records

    def changed(self) -> bool:
        """Whether its contents contradict the checksums that ``torch.save`` put beside them. Reads all of it."""
        try:
            for record in self.records().values():
                record.check()
        except CheckpointError:
            return True
        return False

    def _no_torch_file(self, error: Exception) -> CheckpointError:
        first = str(error).strip().partition("\n")[0]
        return CheckpointError(
            f"{self.label}: not a file that torch.save wrote ({type(error).__name__}: {first})",
            expected="torch.save's zip format",
            fix="the file is damaged, truncated or of another kind",
        )


def stored(tensor: torch.Tensor, key: str, like: torch.Tensor | None = None) -> Stored:
    """A tensor without data as one that is read from its file.

    Args:
        tensor: From :meth:`Window.objects`.
        key: Name, for messages.
        like: The stored tensor of which ``tensor`` is a view; ``None``: itself.
    """
    record: Record = (tensor if like is None else like).record  # type: ignore[attr-defined]
    shape, stride = tuple(tensor.shape), tuple(tensor.stride())
    return Stored(key, record, shape, tensor.dtype, stride, int(tensor.storage_offset()))


def write_torch(path: Path, objects: Any, tick: Tick) -> None:
    """Write nested dicts, lists and plain values with lazy tensors in them. Local operation.

    Neither atomic nor synced: see :mod:`te_fsdp.checkpoint.directory`.

    Args:
        path: The file; overwritten.
        objects: What ``torch.load`` shall give.
        tick: Told the bytes of each block.

    Raises:
        CheckpointError: A tensor cannot be read.
    """
    gaps: dict[int, torch.Tensor] = {}  # a tensor under several names is stored once

    def gap_of(tensor: Lazy) -> torch.Tensor:
        return gaps.setdefault(id(tensor), _torch.without_data(tensor.shape, tensor.dtype))

    try:
        with serialization.skip_data(materialize_fake_tensors=True):
            torch.save(_map(objects, gap_of), path)
    except RuntimeError:
        # "iostream error": torch does not tell what the system has refused. This asks for it again.
        with path.open("ab") as file:
            os.posix_fallocate(file.fileno(), 0, sum(gap.untyped_storage().nbytes() for gap in gaps.values()))
        raise
    sums: dict[int, int] = {}
    with path.open("r+b") as file:
        for tensor, gap in zip(_leaves(objects), _leaves(Window(path).objects()), strict=True):
            if gaps.pop(id(tensor), None) is None:
                continue
            offset, crc = gap.record.offset, 0
            file.seek(offset)
            for block in as_bytes(tensor):
                crc = crc32(block, crc)
                file.write(block)
                tick(len(block))
            sums[offset] = crc
            if file.read(4) == BEHIND:
                file.write(struct.pack("<I", crc))
    _write_checksums(path, sums)


def _write_checksums(path: Path, sums: dict[int, int]) -> None:
    """Give the members whose data begin at some bytes their checksums in the directory of the zip file."""
    at = {record.offset: name for name, record in Window(path).records().items()}
    with zipfile.ZipFile(path, "a") as archive:
        by_name = {member.filename.partition("/")[2]: member for member in archive.infolist()}
        for offset, crc in sums.items():
            by_name[at[offset]].CRC = crc
        archive.comment = archive.comment  # writes the directory anew


def _map(value: Any, change: Callable[[Lazy], Any]) -> Any:
    if isinstance(value, Lazy):
        return change(value)
    if isinstance(value, dict):
        return {key: _map(item, change) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_map(item, change) for item in value)
    return value


def _leaves(value: Any) -> Iterator[Any]:
    """Tensors, lazy or not, in the order of :func:`_map`."""
    if isinstance(value, Lazy | torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _leaves(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _leaves(item)
