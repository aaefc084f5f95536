"""Paths on object storage (``s3://bucket/...``), through fsspec: what checkpoints need of :class:`pathlib.Path`.

fsspec comes with torch; it imports the library for a kind of storage (s3fs, gcsfs, adlfs) when a path of that kind is
first touched. ``file://`` is no object storage but a local path, and treated as such.

Listings are not cached: other processes write there. Errors of the libraries below, which have many classes, come as
``OSError``, so that whoever handles a failing disk handles failing storage as well.
"""

from __future__ import annotations

import errno
import io
import os
import re
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path, PurePath
from typing import Any, TypeGuard, cast

from te_fsdp.errors import CheckpointError

#: ``scheme://...``, or ``scheme:/...``, which ``Path`` makes of it. A scheme has two letters at least.
_URL = re.compile(r"([a-z][a-z0-9+.\-]+)://?(.*)", re.DOTALL)
_LOCAL = ("file", "local")


def place_of(path: str | os.PathLike[str] | Path) -> Path:
    """A local path, or one on object storage. Local operation, touches nothing.

    Args:
        path: A path, or a URL that fsspec knows.

    Raises:
        CheckpointError: Neither.
    """
    if isinstance(path, RemotePath):
        return cast(Any, path)
    if not isinstance(path, str | os.PathLike):
        raise CheckpointError(
            "checkpoint: path",
            expected="a path or a URL",
            got=type(path).__name__,
            fix="the path comes first: checkpoint.save(path, model, optimizer), load(path, model, optimizer)",
        )
    text = os.fspath(path)
    found = _URL.fullmatch(text) if "://" in text or isinstance(path, PurePath) else None
    if found is None:
        return Path(text)
    scheme, rest = found.groups()
    return Path(rest) if scheme in _LOCAL else cast(Any, RemotePath(f"{scheme}://{rest}"))


def absolute(path: str | os.PathLike[str] | Path) -> Path:
    """:func:`place_of`, whatever the current directory is later. Local operation."""
    place = place_of(path)
    return place if is_remote(place) else Path(os.path.abspath(place))


def is_remote(path: Path) -> TypeGuard[Any]:
    """Whether a path is on object storage."""
    return isinstance(path, RemotePath)


@dataclass(frozen=True)
class _Status:
    """What ``stat`` tells of an object."""

    st_size: int
    st_mode: int = stat.S_IFREG


class RemotePath:
    """An object, or the common beginning of several, on object storage.

    It stands where a ``Path`` does, with those of its methods that checkpoints use. It inherits none: all others would
    look for a directory ``s3:`` on the local disk.

    Args:
        url: With its scheme.
        listed: What a listing told of it.
    """

    def __init__(self, url: str, listed: dict[str, Any] | None = None) -> None:
        self.url, self.listed = url.rstrip("/"), listed

    def __reduce__(self) -> Any:  # connections stay in their process
        return RemotePath, (self.url,)

    def __str__(self) -> str:
        return self.url

    def __repr__(self) -> str:
        return f"RemotePath({self.url!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RemotePath) and self.url == other.url

    def __hash__(self) -> int:
        return hash(self.url)

    def __lt__(self, other: Any) -> bool:
        return self.url < other.url

    def __truediv__(self, name: Any) -> RemotePath:
        return RemotePath(f"{self.url}/{name}")

    @property
    def name(self) -> str:
        """The last part."""
        return self.url.rpartition("/")[2]

    @property
    def suffix(self) -> str:
        """The last part's, with its dot."""
        return PurePath(self.name).suffix

    @property
    def parent(self) -> RemotePath:
        """Without the last part."""
        return RemotePath(self.url.rpartition("/")[0])

    @cached_property
    def _place(self) -> tuple[Any, str]:
        """Fsspec's file system, and its name for this path."""
        from fsspec.core import url_to_fs

        try:
            return url_to_fs(self.url, use_listings_cache=False)
        except (ImportError, ValueError) as error:
            raise CheckpointError(
                f"{self.url}: this kind of storage cannot be reached ({error})",
                expected="one that fsspec knows, with its library installed",
                fix="install the library (pip install te-fsdp[s3] for S3), or check the path",
            ) from error

    def call(self, method: str, *arguments: Any, **options: Any) -> Any:
        """A method of fsspec's file system, for this path."""
        fs, key = self._place
        try:
            return getattr(fs, method)(key, *arguments, **options)
        except (OSError, TypeError):
            raise
        except Exception as error:  # botocore's and aiohttp's have a base class each
            raise OSError(errno.EIO, f"{type(error).__name__}: {error}", self.url) from error

    def exists(self) -> bool:
        """Whether there is an object, or one whose name begins so."""
        return self.call("exists")

    def is_dir(self) -> bool:
        """Whether there are objects whose names begin so."""
        return self.call("isdir")

    def is_file(self) -> bool:
        """Whether there is an object of this name."""
        return self.call("isfile")

    def is_symlink(self) -> bool:
        """Never."""
        return False

    def iterdir(self) -> Iterator[RemotePath]:
        """What lies directly below, by one request for a thousand names; none where there is nothing."""
        try:
            found = self.call("ls", detail=True)
        except FileNotFoundError:
            return
        for info in found:
            name = info["name"].rstrip("/").rpartition("/")[2]
            if name and info["name"].rstrip("/") != self._place[1].rstrip(
                "/"
            ):  # some list a folder in itself
                yield RemotePath(f"{self.url}/{name}", info)

    def stat(self) -> _Status:
        """Its bytes; from the listing that it comes from, if it comes from one."""
        info = self.listed or self.call("info")
        if info.get("type") == "directory" or info.get("size") is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), self.url)
        return _Status(int(info["size"]))

    def open(self, mode: str = "rb", buffering: int = -1) -> Any:
        """A file: a written one appears when it is closed; one read without buffer reads what it is asked for."""
        if mode == "rb" and not buffering:
            return RangeFile(self)
        return self.call("open", mode)

    def read_bytes(self) -> bytes:
        """All of it."""
        return self.call("cat_file")

    def write_bytes(self, data: bytes) -> int:
        """Write an object, in one step."""
        self.call("pipe_file", data)
        return len(data)

    def create(self, data: bytes) -> None:
        """Write an object unless there is one: of several processes that do, one succeeds.

        S3, Google's and Azure's storage decide it; with an fsspec that cannot ask them to, there is a moment between
        looking and writing.

        Raises:
            FileExistsError: There is one.
        """
        try:
            self.call("pipe_file", data, mode="create")
        except TypeError:
            if self.exists():
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), self.url) from None
            self.write_bytes(data)

    def unlink(self, missing_ok: bool = False) -> None:
        """Remove an object."""
        try:
            self.call("rm_file")
        except FileNotFoundError:
            if not missing_ok:
                raise

    def remove_all(self) -> None:
        """Remove all objects whose names begin so."""
        self.call("rm", recursive=True)

    def touched(self) -> float | None:
        """Seconds since 1970 at which one of the objects directly below was last written; ``None`` if none tells."""
        listed = [path.listed or {} for path in self.iterdir()]
        times = [
            info[key] for info in listed for key in ("LastModified", "mtime", "created") if info.get(key)
        ]
        return max((t.timestamp() if hasattr(t, "timestamp") else float(t) for t in times), default=None)


class RangeFile(io.RawIOBase):
    """An object that is read range by range, each by one request.

    Args:
        path: The object, which exists.
    """

    def __init__(self, path: RemotePath) -> None:
        super().__init__()
        self._path, self._at = path, 0
        self.size = path.stat().st_size

    def read_at(self, view: memoryview, offset: int) -> int:
        """Fill memory from some byte on, as far as there are bytes; how many there were. Any thread may call this."""
        end = min(offset + len(view), self.size)
        if end <= offset:
            return 0
        data = self._path.call("cat_file", start=offset, end=end)
        view[: len(data)] = data
        return len(data)

    def readable(self) -> bool:
        """Yes."""
        return True

    def seekable(self) -> bool:
        """Yes."""
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Go to a byte."""
        self._at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self.size}[whence]
        return self._at

    def tell(self) -> int:
        """The byte that is read next."""
        return self._at

    def readinto(self, into: Any) -> int:
        """Read the next bytes."""
        count = self.read_at(memoryview(into).cast("B"), self._at)
        self._at += count
        return count


def listing(folder: Path) -> dict[str, Path]:
    """What lies in a folder on object storage, by name; nothing for local ones, where asking for a file is quick."""
    return {path.name: path for path in folder.iterdir()} if is_remote(folder) else {}


def read_at(file: Any, view: memoryview, offset: int) -> int:
    """Read an open file, unbuffered, from some byte on; how many bytes came. Local operation, in any thread."""
    if isinstance(file, RangeFile):
        return file.read_at(view, offset)
    return os.preadv(file.fileno(), [view], offset)
