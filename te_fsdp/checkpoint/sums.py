"""Checksums of what lies in a checkpoint's files: one for each stored piece, in a table at the end of its file.

    file:   piece, piece, ..., table
    table:  mark, id of the save, name of the file, then bytes (u64) and CRC-32 (u32) of each piece in turn

The manifest has each file's size, its table's CRC-32 and where the table begins. A piece is thus checked as it is read,
and a file of another save, or under another's name, is no good one. A rank reads the tables of the files that it reads
from: 12 bytes per piece, whatever the number of ranks that wrote.
"""

from __future__ import annotations

import io
import os
import struct
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import StorageMeta

from te_fsdp.errors import CheckpointError

__all__ = [
    "CheckedFile",
    "DamagedFileError",
    "Listed",
    "SummingWriter",
    "Tick",
    "checksum",
    "silent",
    "view_of",
]

#: Told the bytes that were just read or written.
Tick = Callable[[int], None]
#: The manifest's entry of a file: bytes and CRC-32; with a third number, that of the part from this byte on, a table.
Listed = list[int]

_HEAD, _ROW = struct.Struct("<8s32sH"), struct.Struct("<QI")
_MARK = b"te_fsdp\x01"
_BLOCK = 1 << 20


def silent(count: int) -> None:
    """The tick of whoever wants to hear nothing."""


def checksum(path: Path, tick: Tick = silent) -> int:
    """CRC-32 of a file. ``tick`` is told the bytes of each block that was read."""
    with path.open("rb") as file:
        return _crc(file, path.stat().st_size, tick)


def _crc(file: Any, length: int, tick: Tick) -> int:
    """CRC-32 of the next bytes of an open file; of those that there are, if they are fewer."""
    crc = 0
    while length > 0 and (block := file.read(min(length, _BLOCK))):
        crc = zlib.crc32(block, crc)
        length -= len(block)
        tick(len(block))
    return crc


# ------------------------------------------------------------------------------------------------------- writing


class SummingWriter(dcp.FileSystemWriter):
    """DCP's writer. What goes into each file is summed up piece by piece, and the table of it added at the end.

    Attributes:
        mark: What DCP's metadata gets as the id of the save: the identity of a manifest.
    """

    def __init__(self, path: Path, **options: Any) -> None:
        super().__init__(path, sync_files=False, **options)  # synced when the tables are there
        self.mark = ""
        self._files = _SummedFiles()
        self.fs: FileSystem = self._files

    def storage_meta(self) -> StorageMeta:
        """What DCP's metadata says of the save."""
        return replace(super().storage_meta() or StorageMeta(), save_id=self.mark)

    def finish_files(self, save_id: str, places: Iterable[Any]) -> dict[str, Listed]:
        """Add the tables to the files of tensors and sync them; the manifest's entries of them. Local operation.

        Args:
            save_id: Of the save, 32 characters.
            places: DCP's ``storage_data`` of the pieces: ``relative_path``, ``offset``, ``length``.
        """
        spans: dict[str, list[tuple[int, int]]] = {}
        for place in places:
            spans.setdefault(place.relative_path, []).append((place.offset, place.length))
        files = [file for file in self._files.written if not file[0].name.startswith(".")]  # not the metadata
        return {path.name: _add_table(path, sums, save_id, spans.get(path.name, [])) for path, sums in files}

    def list_metadata(self) -> Listed:
        """Sync DCP's metadata to disk; the manifest's entry of it. Local operation."""
        path = Path(self.path, ".metadata")
        with path.open("rb") as file:
            os.fsync(file.fileno())
        return [path.stat().st_size, checksum(path)]


class _SummedFiles(FileSystem):
    """DCP's files, with the checksums of what is written."""

    def __init__(self) -> None:
        self.written: list[tuple[Path, _Summed]] = []

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[io.IOBase]:
        """Open a file; of those that are written the checksums are kept."""
        if mode != "wb":
            with super().create_stream(path, mode) as stream:
                yield stream
            return
        with _Summed(io.FileIO(path, "w")) as stream:
            self.written.append((Path(path), stream))
            yield stream


def _add_table(path: Path, stream: _Summed, save_id: str, spans: list[tuple[int, int]]) -> Listed:
    rows, size = [], path.stat().st_size
    with path.open("r+b") as file:
        for at, length in _tiles(spans, size):
            crc = stream.sums.get((at, length))
            if crc is None:  # this DCP tells otherwise where a piece ends: what is on disk counts
                file.seek(at)
                crc = _crc(file, length, silent)
            rows.append((length, crc))
        name = path.name.encode()
        table = _HEAD.pack(_MARK, save_id.encode(), len(name)) + name
        table += b"".join(_ROW.pack(*row) for row in rows)
        file.seek(size)
        file.write(table)
        file.flush()
        os.fsync(file.fileno())
    return [size + len(table), zlib.crc32(table), size]


def _tiles(spans: list[tuple[int, int]], size: int) -> Iterator[tuple[int, int]]:
    """Pieces in the order of the file, and what lies between them, so that no byte is without a checksum."""
    end = 0
    for at, length in [*sorted(spans), (size, 0)]:
        if at > end:
            yield end, at - end
        if length:
            yield at, length
        end = at + length


class _Summed(io.BufferedWriter):
    """A file that sums up what is written to it, from flush to flush: DCP flushes after each piece."""

    def __init__(self, raw: io.RawIOBase) -> None:
        super().__init__(raw)
        self.sums: dict[tuple[int, int], int] = {}
        self._at = self._count = self._crc = 0

    def write(self, data: Any) -> int:
        """Write and sum up."""
        self._crc = zlib.crc32(data, self._crc)
        self._count += memoryview(data).nbytes
        return super().write(data)

    def flush(self) -> None:
        """Write what is buffered. What came since the last time is a piece."""
        super().flush()
        if self._count:
            self.sums[self._at, self._count] = self._crc
            self._at, self._count, self._crc = self._at + self._count, 0, 0


# ------------------------------------------------------------------------------------------------------- reading


def view_of(data: torch.Tensor) -> memoryview:
    """The memory of a uint8 tensor on the host."""
    return memoryview(data.numpy())  # type: ignore[arg-type]


class DamagedFileError(CheckpointError):
    """A file that is not as it was saved; the text says what is wrong, without the name of the file."""


class CheckedFile:
    """A file of a checkpoint that is compared with its checksums as it is read.

    Use it as a context. Files that te_fsdp wrote before format 3 have no table: only their size is known.

    Args:
        path: The file.
        listed: The manifest's entry of it; ``None`` where it has none.
        save_id: The manifest's.

    Raises:
        DamagedFileError: It is not the file that the manifest lists.
    """

    def __init__(self, path: Path, listed: Listed | None, save_id: str) -> None:
        if listed is None:
            raise DamagedFileError("not listed in the manifest")
        self._file = path.open("rb", buffering=0)
        #: Bytes and CRC-32 of each piece, by the byte at which it begins; ``None`` where nothing is known.
        self.pieces: dict[int, tuple[int, int]] | None = None
        self.size = os.fstat(self._file.fileno()).st_size
        try:
            if self.size != listed[0]:
                raise DamagedFileError(f"expected {listed[0]} bytes, got {self.size}")
            if len(listed) == 3:
                self.pieces = self._table(path.name.encode(), listed, save_id.encode())
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> CheckedFile:
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()

    def read(self, offset: int, lengths: Iterable[int]) -> torch.Tensor:
        """The bytes of consecutive pieces, a new uint8 tensor on the host. Any thread may call this.

        Args:
            offset: Byte at which the first begins.
            lengths: Of each.

        Raises:
            DamagedFileError: They are not the bytes that were saved, or there are no such pieces.
        """
        data = torch.empty(sum(lengths := list(lengths)), dtype=torch.uint8, device="cpu")
        view, have = view_of(data), 0
        while have < len(view):
            count = os.preadv(self._file.fileno(), [view[have:]], offset + have)
            if not count:
                raise DamagedFileError(f"expected {offset + len(view)} bytes, got {offset + have}")
            have += count
        for length in lengths if self.pieces is not None else ():
            expected = self.pieces.get(offset)  # type: ignore[union-attr]
            if expected is None or expected[0] != length:
                raise DamagedFileError(f"no piece of {length} bytes begins at byte {offset}")
            if zlib.crc32(view[:length]) != expected[1]:
                raise DamagedFileError(
                    f"its contents have changed (CRC-32 of bytes {offset} to {offset + length})"
                )
            view, offset = view[length:], offset + length
        return data

    def _table(self, name: bytes, listed: Listed, save_id: bytes) -> dict[int, tuple[int, int]]:
        _, crc, begin = listed
        table, head = os.pread(self._file.fileno(), self.size - begin, begin), _HEAD.size + len(name)
        if table.startswith(_MARK) and table[8:40] != save_id:
            raise DamagedFileError(f"a file of another save, {table[8:40]!r}")
        if table.startswith(_MARK) and table[_HEAD.size : head] != name:
            raise DamagedFileError("another file of the same save")
        if zlib.crc32(table) != crc or (len(table) - head) % _ROW.size:
            raise DamagedFileError("its table of checksums has changed (CRC-32)")
        pieces, at = {}, 0
        for length, of_piece in _ROW.iter_unpack(table[head:]):
            pieces[at] = length, of_piece
            at += length
        if at != begin:
            raise DamagedFileError(f"checksums of {at} bytes instead of {begin}")
        return pieces

    def check(self, crc: int, tick: Tick) -> None:
        """Read all of it.

        Args:
            crc: Of the whole file, where it has no table.
            tick: Told the bytes of each block.

        Raises:
            DamagedFileError: Something in it has changed.
        """
        reader = io.BufferedReader(self._file)
        spans = {0: (self.size, crc)} if self.pieces is None else self.pieces
        for at, (length, expected) in spans.items():
            if _crc(reader, length, tick) != expected:
                raise DamagedFileError(f"its contents have changed (CRC-32 of bytes {at} to {at + length})")
