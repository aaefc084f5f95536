"""Paths of checkpoints, on disk or on object storage.

Object storage (``s3://bucket/...``) is accessed through fsspec. fsspec imports the library of a storage kind (s3fs,
gcsfs, adlfs) on first use. Listings are not cached, because other processes write to the same place.
"""

from __future__ import annotations

import errno
import os
import re
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cached_property, partialmethod
from pathlib import Path, PurePath
from types import SimpleNamespace
from typing import Any, TypeGuard, cast

from te_fsdp.errors import CheckpointError

#: ``scheme://...``, or ``scheme:/...``, which ``Path`` makes of it. A scheme has at least two letters.
_URL = re.compile(r"([a-z][a-z0-9+.\-]+)://?(.*)", re.DOTALL)
#: System errors of a path that does not exist.
_ABSENT = (errno.ENOENT, errno.ENOTDIR, errno.EBADF, errno.ELOOP)
#: Keys of the modification time in listings of several kinds of storage.
_WRITTEN = ("LastModified", "mtime", "created")


def resolve_path(path: str | os.PathLike[str] | Path) -> Path:
    """Return a local path, or a path on object storage for a URL. Local operation; reads no storage.

    A leading ``~`` or ``~user`` is replaced by the home directory. Raise CheckpointError for any other type.
    """
    if isinstance(path, RemotePath):
        return cast(Any, path)
    if not isinstance(path, str | os.PathLike):
        raise CheckpointError(
            "checkpoint: path",
            expected="a path or a URL",
            got=type(path).__name__,
            fix="pass the path first: checkpoint.save(path, model, optimizer), load(path, model, optimizer)",
        )
    given = os.fspath(path)
    match = _URL.fullmatch(given) if "://" in given or isinstance(path, PurePath) else None
    if match is None:
        expanded = os.path.expanduser(given)
        if expanded.startswith("~"):
            raise CheckpointError(
                f"checkpoint: path {given}",
                expected="a user of this machine after ~",
                got=f"{given.split('/')[0]}, whose home directory is unknown",
                fix=f"pass the home directory's path, or ./{given} for a directory of this name",
            )
        return LocalPath(expanded)
    scheme, remainder = match.groups()
    if scheme in ("file", "local"):
        return LocalPath(remainder if "://" in given else f"/{remainder}")
    return cast(Any, RemotePath(f"{scheme}://{remainder}"))


def expanded(path: str | os.PathLike[str]) -> Path:
    """Return a path as :func:`resolve_path` does, and one on object storage as it is. Local operation."""
    resolved = resolve_path(path)
    return Path(path if is_remote(resolved) else resolved)


def absolute(path: str | os.PathLike[str] | Path) -> Path:
    """Return :func:`resolve_path` as an absolute path; ``..`` is resolved after links. Local operation."""
    resolved = resolve_path(path)
    resolve = os.path.realpath if ".." in str(resolved).split("/") else os.path.abspath
    return resolved if is_remote(resolved) else LocalPath(resolve(resolved))


class LocalPath(type(Path())):  # type: ignore[misc]
    """A path on disk that raises OSError if the system does not say whether it exists (permission denied).

    From Python 3.14 on the methods of ``Path`` return False for every error of the system, so that a checkpoint that a
    user may not read would count as missing.
    """

    def __reduce__(self) -> Any:
        return Path, (str(self),)

    def _mode(self, **options: bool) -> int:
        """Return the file's type and permissions; 0 if there is none."""
        try:
            return self.stat(**options).st_mode
        except OSError as error:
            if error.errno not in _ABSENT:
                raise
        except ValueError:  # a null character
            pass
        return 0

    def exists(self, **options: bool) -> bool:
        """Return whether there is a file or directory; raise OSError if the system does not say."""
        return self._mode(**options) != 0

    def is_dir(self, **options: bool) -> bool:
        """Return whether there is a directory; raise OSError if the system does not say."""
        return stat.S_ISDIR(self._mode(**options))

    def is_file(self, **options: bool) -> bool:
        """Return whether there is a file; raise OSError if the system does not say."""
        return stat.S_ISREG(self._mode(**options))


def is_remote(path: Path) -> TypeGuard[Any]:
    """Return whether a path is on object storage."""
    return isinstance(path, RemotePath)


@dataclass(frozen=True, order=True)
class RemotePath:
    """An object on object storage, or the common prefix of several objects.

    It has the methods of ``Path`` that checkpoints use. It does not inherit from ``Path``, whose other methods would
    access the local disk. Errors of the storage libraries are raised as ``OSError``.
    """

    url: str  #: Includes the scheme
    listed: dict[str, Any] | None = field(default=None, compare=False, repr=False)  #: Entry in a listing

    def __post_init__(self) -> None:
        object.__setattr__(self, "url", self.url.rstrip("/"))

    def __reduce__(self) -> Any:  # connections stay in their process
        return RemotePath, (self.url,)

    def __str__(self) -> str:
        return self.url

    def __truediv__(self, name: Any) -> RemotePath:
        return RemotePath(f"{self.url}/{name}")

    name = property(lambda self: self.url.rpartition("/")[2])
    suffix = property(lambda self: PurePath(self.name).suffix)
    parent = property(lambda self: RemotePath(self.url.rpartition("/")[0]))

    @cached_property
    def _filesystem_key(self) -> tuple[Any, str]:
        """Return fsspec's file system and its key of this path."""
        from fsspec.core import url_to_fs

        try:
            return url_to_fs(self.url, use_listings_cache=False)
        except (ImportError, ValueError) as error:
            raise CheckpointError(
                f"{self.url}: this kind of storage cannot be reached ({error})",
                expected="one that fsspec supports, with its library installed",
                fix="install the library (pip install te-fsdp[s3] for S3), or check the path",
            ) from error

    def call(self, method: str, *arguments: Any, **options: Any) -> Any:
        """Call a method of fsspec's file system for this path."""
        fs, key = self._filesystem_key
        try:
            return getattr(fs, method)(key, *arguments, **options)
        except (OSError, TypeError):
            raise
        except Exception as error:  # botocore and aiohttp have their own base classes
            raise OSError(errno.EIO, f"{type(error).__name__}: {error}", self.url) from error

    is_file = partialmethod(call, "isfile")
    is_dir = partialmethod(call, "isdir")  # whether objects with this prefix exist
    exists = partialmethod(call, "exists")  # one or the other
    read_bytes = partialmethod(call, "cat_file")
    write_bytes = partialmethod(call, "pipe_file")
    unlink = partialmethod(call, "rm_file")
    remove_all = partialmethod(call, "rm", recursive=True)  # all objects with this prefix

    def iterdir(self) -> Iterator[RemotePath]:
        """Yield the direct children, with one request per thousand names; none for a missing path."""
        try:
            infos = self.call("ls", detail=True)
        except FileNotFoundError:
            return
        own_key = self._filesystem_key[1].rstrip("/")
        for info in infos:
            key = info["name"].rstrip("/")
            if key and key != own_key:  # some file systems list a folder in itself
                yield RemotePath(f"{self.url}/{key.rpartition('/')[2]}", info)

    def stat(self) -> Any:
        """Return size and mode, from the listing if the path has an entry of one."""
        info = self.listed or self.call("info")
        if info.get("type") == "directory" or info.get("size") is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), self.url)
        return SimpleNamespace(st_size=int(info["size"]), st_mode=stat.S_IFREG)

    open = partialmethod(call, "open")  # a written file appears when it is closed

    def read_at(self, view: memoryview, offset: int) -> int:
        """Fill memory with the bytes from an offset on, by one request; return how many there were. Thread-safe."""
        data = self.call("cat_file", start=offset, end=offset + len(view))
        view[: len(data)] = data
        return len(data)

    def create(self, data: bytes) -> None:
        """Write a new object, or raise FileExistsError. Of several concurrent processes exactly one succeeds.

        S3, Google and Azure decide this on the server. With an older fsspec there is a short race.
        """
        try:
            self.call("pipe_file", data, mode="create")
        except TypeError:
            if self.exists():
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), self.url) from None
            self.write_bytes(data)


def listing(folder: Path) -> dict[str, Path]:
    """Return the children of a folder on object storage by name; empty for a local folder, where ``stat`` is fast."""
    return {path.name: path for path in folder.iterdir()} if is_remote(folder) else {}


@contextmanager
def random_access(path: Path) -> Iterator[tuple[int, Callable[[memoryview, int], int]]]:
    """Yield the size of a file, and a function that fills memory with its bytes from an offset on. Local operation.

    The function returns the number of bytes, and is thread-safe.
    """
    if is_remote(path):
        size = path.stat().st_size
        # Object stores refuse a range that begins at the end of the object.
        yield size, lambda view, offset: path.read_at(view, offset) if offset < size else 0
        return
    with path.open("rb", buffering=0) as file:
        yield os.fstat(file.fileno()).st_size, lambda view, offset: os.preadv(file.fileno(), [view], offset)


def last_written(folder: Path) -> float | None:
    """Return when a folder or one of its direct children was last written, by the clock of the storage.

    ``None`` if the storage has no such times, or the folder is gone. Local operation.
    """
    if not is_remote(folder):
        with suppress(OSError):
            return max(path.lstat().st_mtime for path in (folder, *folder.glob("*")))
        return None
    times = [(path.listed or {}).get(key) for path in folder.iterdir() for key in _WRITTEN]
    return max((t.timestamp() if hasattr(t, "timestamp") else float(t) for t in times if t), default=None)
