"""Files of tensors with a checksum for each stored piece, in a table at the end of the file.

    file:   piece, piece, ..., table
    table:  mark, id of the save, name of the file, then bytes (u64) and CRC-32 (u32) of each piece in turn

:class:`SummedFile` writes such a file, :class:`CheckedFile` reads it.
"""

from __future__ import annotations

import errno
import functools
import gc
import io
import logging
import math
import os
import shutil
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from zlib_ng.zlib_ng import crc32  # the same sums as zlib's in a fifth of the time

from te_fsdp.checkpoint.host_memory import flat_rows
from te_fsdp.checkpoint.storage import is_remote, random_access
from te_fsdp.checkpoint.tensor_entries import Shape
from te_fsdp.errors import CheckpointError

_log = logging.getLogger("te_fsdp")
#: Called with the number of bytes that were just read or written.
Tick = Callable[[int], None]
#: The manifest's entry of a file: bytes and CRC-32. With a third number, the CRC-32 is of the table from this byte on.
Listed = list[int]

#: Errors of file systems that cannot sync directories. Any other error means that entries may be lost.
_CANNOT_SYNC = (errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EBADF, errno.EACCES)
_FULL = {
    errno.ENOSPC: ("the disk is full", "free some space (keep_last=... removes old checkpoints)"),
    errno.EDQUOT: ("the quota of this user or project is used up", "free some of it, or have it raised"),
    errno.EFBIG: ("a file would be too large", "raise the limit (ulimit -f), or that of the file system"),
}

#: Follows the data of a member of a zip file, with the member's checksum.
_DATA_END, _DESCRIPTOR = b"PK\x07\x08", struct.Struct("<4sI")
_HEAD, _ROW = struct.Struct("<8s32sH"), struct.Struct("<QI")
_MARK = b"te_fsdp\x01"
_BLOCK = 1 << 20


def no_progress(count: int) -> None:
    """Do nothing: the progress callback for callers that show none."""


@contextmanager
def without_collector() -> Iterator[None]:
    """Pause Python's garbage collector, which would traverse millions of descriptions while they are made."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def view_of(data: torch.Tensor) -> memoryview:
    """Return the memory of a uint8 tensor on the host."""
    return memoryview(data.numpy())  # type: ignore[arg-type]


# ------------------------------------------------------------------------------------------------------- writing


@contextmanager
def synced(path: Path) -> Iterator[Any]:
    """Yield a file to write, which is on disk, or complete on object storage, when the context ends."""
    with path.open("wb") as file:
        yield file
        if not is_remote(path):
            file.flush()
            os.fsync(file.fileno())


@contextmanager
def explain_os_errors(target: Path, needed: int | None = None) -> Iterator[None]:
    """Raise CheckpointError for an OSError of writing, with the space needed and available for a full disk.

    ``needed`` is the number of bytes that this process writes.
    """
    try:
        yield
    except OSError as error:
        if error.errno not in _FULL or is_remote(target):
            raise CheckpointError(
                f"{target}: cannot be written ({error.strerror or error}: {error.filename or target})",
                why="No file appeared there",
                fix="check the path and the permissions",
            ) from error
        cause, fix = _FULL[error.errno]
        # The target itself does not exist, and its parent may be the directory that could not be created.
        existing = next(path for path in target.parents if path.exists())
        raise CheckpointError(
            f"{target}: {cause} ({error.strerror})",
            expected="space for it" if needed is None else f"space for {needed:,} bytes of this process",
            got=f"{shutil.disk_usage(existing).free:,} bytes free on the file system of {existing}",
            fix=f"{fix}, or write elsewhere",
        ) from error


def sync(path: Path) -> None:
    """Flush a file, or the entries of a directory if the system supports that, to disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        # Network file systems report a full disk or a lost server here, not at the write.
        if error.errno not in _CANNOT_SYNC or not path.is_dir():
            raise
        _log.debug("%s: this file system cannot sync directories", path)
    finally:
        os.close(handle)


# A piece is a ``torch.save`` file, as in DCP, which takes torch 0.1 ms. The bytes around the elements are
# therefore made once for all pieces of one dtype and shape.
class Frame(NamedTuple):
    """Bytes around the elements in a ``torch.save`` file of a contiguous tensor.

    The checksums of the zip format are zero in it. ``torch.load`` ignores them.
    """

    head: bytes
    size: int  #: Size of the elements in bytes
    tail: bytes
    length: int  #: Size of the file in bytes


class _Gaps(io.BytesIO):
    """A file in memory that records the offsets of skipped data instead of storing them."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[int] = []

    def seek(self, offset: int, whence: int = 0) -> int:
        self.found.append(self.tell())
        return offset


@functools.lru_cache(maxsize=4096)
def frame_of(dtype: torch.dtype, shape: Shape) -> Frame:
    """Return the frame of a plain tensor on the host as this torch writes it. Local operation; takes 0.1 ms once."""
    file, size = _Gaps(), math.prod(shape) * dtype.itemsize
    with torch.serialization.skip_data():  # of this thread alone
        # Its memory is never touched, so the system allocates none.
        torch.save(torch.empty(shape, dtype=dtype, device="cpu"), file)
    assert len(file.found) == 1 or not size, "torch omits the elements in one place"
    begin, frame = [*file.found, 0][0], file.getvalue()
    return Frame(frame[:begin], size, frame[begin:], len(frame) + size)


def elements_of(
    data: torch.Tensor, dtype: torch.dtype, shape: Shape, *, check: bool = False
) -> torch.Tensor | None:
    """Return a view of the tensor in a stored piece (uint8, on the host); ``None`` for bytes of a different frame.

    ``check`` compares the elements with the checksum of ``torch.save``, if it wrote one; raise DamagedFileError.
    """
    # A record that is not longer than its elements has no frame of torch.save around them.
    if math.prod(shape) * dtype.itemsize >= len(data):
        return None
    frame = frame_of(dtype, shape)
    begin = len(frame.head)
    if len(data) != frame.length or bytes(data[:begin].numpy()) != frame.head:
        return None
    elements = data[begin : begin + frame.size]
    if check and frame.size:
        mark, crc = _DESCRIPTOR.unpack(data[begin + frame.size :][: _DESCRIPTOR.size].numpy().tobytes())
        if mark != _DATA_END:
            return None
        # torch can write archives without checksums, which have 0 here.
        if crc not in (0, crc32(view_of(elements))):
            raise DamagedFileError("its contents have changed (CRC-32)")
    return elements.view(dtype).view(shape)


# The manifest has each file's size, its table's CRC-32 and the offset of the table. A piece is therefore
# checked when it is read, and a file of a different save or under a different name is refused.
class SummedFile:
    """A file of pieces, open for writing. Only small tensors are written under the interpreter lock."""

    def __init__(self, raw: Any) -> None:
        self.raw, self.sums = raw, list[tuple[int, int]]()

    def write(self, rows: torch.Tensor) -> None:
        """Add a piece for each row of a tensor on the host."""
        frame = frame_of(rows.dtype, tuple(rows.shape[1:]))
        data = flat_rows(rows).view(torch.uint8).numpy()
        if frame.length > _BLOCK:
            for row in data:
                cuts = range(0, frame.size, _BLOCK)
                self.add([frame.head, *(row[begin : begin + _BLOCK] for begin in cuts), frame.tail])
            return
        # Small pieces are joined and written at once: the number of calls determines how long training waits.
        length, around, per_write = frame.length, (frame.head, frame.tail), _BLOCK // frame.length
        for chunk in (data[begin : begin + per_write] for begin in range(0, len(data), per_write)):
            head, tail = (np.frombuffer(b * len(chunk), np.uint8).reshape(len(chunk), -1) for b in around)
            pieces = np.concatenate([head, chunk, tail], axis=1)
            self.raw.write(pieces.reshape(-1))
            self.sums += [(length, crc32(piece)) for piece in pieces]

    def add(self, parts: list[Any]) -> None:
        """Append one piece, given as consecutive byte buffers."""
        crc = length = 0
        for part in parts:  # written while it is in the processor's cache
            crc = crc32(part, crc)
            length += self.raw.write(part)
        self.sums.append((length, crc))

    def finish(self, name: str, save_id: str) -> Listed:
        """Add the table, with the save id of 32 characters; return the manifest's entry of the file."""
        table = _HEAD.pack(_MARK, save_id.encode(), len(name.encode())) + name.encode()
        table += b"".join(_ROW.pack(*row) for row in self.sums)
        # Last, because the sums of all pieces are known only now. Object storage cannot write backwards.
        self.raw.write(table)
        begin = sum(length for length, _ in self.sums)
        return [begin + len(table), crc32(table), begin]


# ------------------------------------------------------------------------------------------------------- reading


class DamagedFileError(CheckpointError):
    """A file that has changed since the save. The message describes the damage and does not name the file."""

    def __init__(self, problem: str, begin: int | None = None) -> None:
        super().__init__(problem)
        self.begin = begin  #: Offset of the damaged piece, if it is one


def damaged_value(label: str, expected: object, got: object = None) -> CheckpointError:
    """Return the error for a value in the files that no save writes."""
    fix = "load an earlier checkpoint: this one is damaged"
    return CheckpointError(label, expected=expected, got=got, fix=fix)


def _changed(begin: int, length: int) -> DamagedFileError:
    return DamagedFileError(f"its contents have changed (CRC-32 of bytes {begin} to {begin + length})", begin)


@contextmanager
def open_checked(path: Path, listed: Listed | None, save_id: str) -> Iterator[CheckedFile]:
    """Open a file of a checkpoint that is compared with its checksums when it is read.

    Files of te_fsdp before format 3 have no table; only their size is known. Raise DamagedFileError if it is not the
    file that the manifest with this save id lists.
    """
    if listed is None:
        raise DamagedFileError("not listed in the manifest")
    with random_access(path) as (size, read_at):
        if size != listed[0]:
            raise DamagedFileError(f"expected {listed[0]} bytes, got {size}")
        unchecked = CheckedFile(path, size, read_at, None)
        if len(listed) != 3:
            yield unchecked
            return
        tail = torch.empty(size - listed[2], dtype=torch.uint8, device="cpu")
        table, name = bytes(view_of(unchecked.read(listed[2], [], tail))), path.name.encode()
        head = _HEAD.size + len(name)
        # Before the checksum: the file of a different save is intact, and its error names the cause.
        if table.startswith(_MARK) and table[8:40] != save_id.encode():
            raise DamagedFileError(f"it was written by a different save, {table[8:40]!r}")
        if table.startswith(_MARK) and table[_HEAD.size : head] != name:
            raise DamagedFileError("it is a different file of the same save, renamed")
        if crc32(table) != listed[1] or (len(table) - head) % _ROW.size:
            raise DamagedFileError("its table of checksums has changed (CRC-32)")
        pieces, offset = {}, 0
        for length, crc in _ROW.iter_unpack(table[head:]):
            pieces[offset] = length, crc
            offset += length
        yield replace(unchecked, pieces=pieces)


@dataclass(frozen=True)
class CheckedFile:
    """A file opened by :func:`open_checked`, whose reads are compared with its checksums."""

    path: Path
    size: int
    read_at: Callable[[memoryview, int], int]
    #: Bytes and CRC-32 of each piece, by the byte at which it begins; ``None`` without checksums
    pieces: dict[int, tuple[int, int]] | None

    def read(self, offset: int, lengths: Sequence[int], data: torch.Tensor) -> torch.Tensor:
        """Fill ``data``, uint8 on the host, with pieces of these lengths from an offset on. Thread-safe.

        Raise DamagedFileError if they are not the saved bytes, or the file has no such pieces.
        """
        view, count_read = view_of(data), 0
        while count_read < len(view):
            count = self.read_at(view[count_read:], offset + count_read)
            if not count:
                raise DamagedFileError(f"expected {offset + len(view)} bytes, got {offset + count_read}")
            count_read += count
        for length in lengths if self.pieces is not None else ():
            piece_length, crc = self.pieces.get(offset, (None, 0))  # type: ignore[union-attr]
            if piece_length != length:
                raise DamagedFileError(f"no piece of {length} bytes begins at byte {offset}", offset)
            if crc32(view[:length]) != crc:
                raise _changed(offset, length)
            view, offset = view[length:], offset + length
        return data

    def check(self, crc: int, tick: Tick) -> None:
        """Read the file and raise DamagedFileError for a change. ``crc`` is that of a file without a table."""
        pieces = {0: (self.size, crc)} if self.pieces is None else self.pieces
        with self.path.open("rb") as file:
            for offset, (length, expected) in pieces.items():
                crc, remaining = 0, length
                while block := file.read(min(remaining, _BLOCK)):
                    crc, remaining = crc32(block, crc), remaining - len(block)
                    tick(len(block))
                if crc != expected:
                    raise _changed(offset, length)
