"""Paths of checkpoints, on disk or on object storage, and which process writes one: no two jobs write one path.

Object storage (``s3://bucket/...``) is reached through fsspec, which imports the library for a kind of storage (s3fs,
gcsfs, adlfs) when a path of that kind is first touched. Listings are not cached: other processes write there.

A local path that is being written has a lock, a directory with one file, whose name is its holder::

    DIR/.step-200.te_fsdp-lock/HOST-BOOT.PID.START.SINCE.TOKEN     held by the process of this name
    DIR/.step-200.te_fsdp-lock.HOST-BOOT.PID.START.SINCE.TOKEN/    being taken, or left by a killed job

It is taken by renaming a directory that has the file already, which fails where another's file lies; handed on by
renaming the file, which of several can be done by one; given back by removing the file, which cannot meet another's.
Each is one step for every file system with directories, those without ``fcntl`` locks included, and whoever is killed
between two steps leaves a name that tells who it was.

A process on this machine is known to live or to be dead, by its id and the time of its start. One elsewhere touches its
file every few seconds; who finds such a lock looks whether that happens. Clocks are not compared.
"""

from __future__ import annotations

import errno
import hashlib
import io
import logging
import os
import re
import secrets
import shutil
import socket
import stat
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property, partialmethod
from pathlib import Path, PurePath
from types import SimpleNamespace
from typing import Any, NamedTuple, TypeGuard, cast

from te_fsdp.errors import CheckpointError

_log = logging.getLogger("te_fsdp")
#: ``scheme://...``, or ``scheme:/...``, which ``Path`` makes of it. A scheme has two letters at least.
_URL = re.compile(r"([a-z][a-z0-9+.\-]+)://?(.*)", re.DOTALL)
#: What listings of several kinds of storage call the time of writing.
_WRITTEN = ("LastModified", "mtime", "created")
LOCK = ".te_fsdp-lock"
#: Seconds between signs of life.
BEAT = 5.0
#: Seconds without one, after which a holder on another machine counts as dead: clients of NFS may see a file's time a
#: minute late.
SILENCE = 120.0
#: Bytes of a name that is used as it is in the names of locks and of hidden directories.
_LONGEST = 110
#: By the owner of each lock that this process holds, what ends its signs of life.
_held: dict[Owner, threading.Event] = {}


def resolve_path(path: str | os.PathLike[str] | Path) -> Path:
    """A local path, or one on object storage where it is a URL; CheckpointError if it is neither. Touches nothing.

    A leading ``~`` or ``~user`` is the home directory, as in a shell.
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
        return _expanded(text)
    scheme, rest = found.groups()
    if scheme in ("file", "local"):
        return Path(rest if "://" in text else f"/{rest}")
    return cast(Any, RemotePath(f"{scheme}://{rest}"))


def _expanded(text: str) -> Path:
    """Return a local path with its leading ``~`` replaced by the home directory."""
    full = os.path.expanduser(text)
    if full.startswith("~"):
        raise CheckpointError(
            f"checkpoint: path {text}",
            expected="a user that this machine has, after ~",
            got=f"{text.split('/')[0]}, whose home directory is unknown",
            fix=f"write the home directory itself, or ./{text} for a directory of this name",
        )
    return Path(full)


def absolute(path: str | os.PathLike[str] | Path) -> Path:
    """:func:`resolve_path`, whatever the current directory is later; ``..`` is above a link's target.

    Local operation.
    """
    place = resolve_path(path)
    full = os.path.realpath if ".." in str(place).split("/") else os.path.abspath
    return place if is_remote(place) else Path(full(place))


def is_remote(path: Path) -> TypeGuard[Any]:
    """Whether a path is on object storage."""
    return isinstance(path, RemotePath)


@dataclass(frozen=True, order=True)
class RemotePath:
    """An object, or the common beginning of several, on object storage.

    It has those methods of ``Path`` that checkpoints use, and inherits none: they would look for a directory ``s3:`` on
    the local disk. Errors of the libraries below, which have many classes, come as ``OSError``, as those of disks do.
    """

    url: str  #: With its scheme
    #: What a listing told of it
    listed: dict[str, Any] | None = field(default=None, compare=False, repr=False)

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

    is_file = partialmethod(call, "isfile")
    is_dir = partialmethod(call, "isdir")  # whether there are objects whose names begin so
    exists = partialmethod(call, "exists")  # one or the other
    read_bytes = partialmethod(call, "cat_file")
    write_bytes = partialmethod(call, "pipe_file")
    unlink = partialmethod(call, "rm_file")
    remove_all = partialmethod(call, "rm", recursive=True)  # all objects whose names begin so

    def iterdir(self) -> Iterator[RemotePath]:
        """What lies directly below, by one request for a thousand names; none where there is nothing."""
        try:
            found = self.call("ls", detail=True)
        except FileNotFoundError:
            return
        own = self._place[1].rstrip("/")
        for info in found:
            key = info["name"].rstrip("/")
            if key and key != own:  # some list a folder in itself
                yield RemotePath(f"{self.url}/{key.rpartition('/')[2]}", info)

    def stat(self) -> Any:
        """Its bytes; from the listing that it comes from, if it comes from one."""
        info = self.listed or self.call("info")
        if info.get("type") == "directory" or info.get("size") is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), self.url)
        return SimpleNamespace(st_size=int(info["size"]), st_mode=stat.S_IFREG)

    def open(self, mode: str = "rb", buffering: int = -1) -> Any:
        """A file: a written one appears when it is closed; one read without buffer reads what it is asked for."""
        return RangeFile(self) if mode == "rb" and not buffering else self.call("open", mode)

    def create(self, data: bytes) -> None:
        """Write an object, or raise FileExistsError where there is one: of several processes that do, one succeeds.

        S3, Google's and Azure's storage decide it; an fsspec that cannot ask them to looks, and writes a moment later.
        """
        try:
            self.call("pipe_file", data, mode="create")
        except TypeError:
            if self.exists():
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), self.url) from None
            self.write_bytes(data)

    def touched(self) -> float | None:
        """Seconds since 1970 at which one of the objects directly below was last written; ``None`` if none tells."""
        told = [(path.listed or {}).get(key) for path in self.iterdir() for key in _WRITTEN]
        return max((t.timestamp() if hasattr(t, "timestamp") else float(t) for t in told if t), default=None)


class RangeFile(io.RawIOBase):
    """An object, which exists, that is read range by range, each by one request."""

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

    seekable = readable

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Go to a byte."""
        self._at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self.size}[whence]
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


# --------------------------------------------------------------------------------------------------------- locks


class Owner(NamedTuple):
    """A process that writes, or removes, a checkpoint. As text it is a part of a file's name."""

    machine: str  #: The host, and digits of what a process id means there: boot, process ids' namespace
    pid: int
    start: str  #: Of the process, in ticks since the boot; empty where the system does not tell
    since: int  #: When it began this piece of work, in seconds since 1970, by its clock
    token: str  #: Makes each piece of work another owner

    @classmethod
    def new(cls) -> Owner:
        """This process, beginning something."""
        pid = os.getpid()
        return cls(_machine(), pid, _start_of(pid) or "", int(time.time()), secrets.token_hex(4))

    @classmethod
    def parse(cls, text: str) -> Owner:
        """The owner of a name; one on no known machine if it tells none."""
        parts = text.split(".")
        if len(parts) != 5 or not (parts[1].isdigit() and parts[3].isdigit()):
            return cls("", 0, "", 0, text)
        return cls(parts[0], int(parts[1]), parts[2], int(parts[3]), parts[4])

    def __str__(self) -> str:
        return ".".join(map(str, self))

    def describe(self) -> str:
        """For messages."""
        if not self.machine:
            return f"unknown: {self.token}"
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.since))
        own = " (this process)" if self.is_here else ""
        return f"process {self.pid}{own} on {self.machine.rpartition('-')[0]}, since {since} by its clock"

    @property
    def is_here(self) -> bool:
        """Whether it is this process."""
        return self.pid == os.getpid() and self.is_alive() is True

    def is_alive(self) -> bool | None:
        """Whether the process lives; ``None`` if it is on another machine, or was before this one's boot."""
        if self.machine != _machine():
            return None
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return False
        except PermissionError:
            pass
        start = _start_of(self.pid)
        return start is None or start == self.start


def _machine() -> str:
    """Where a process id means what it means here: hosts may share a name, and containers a host."""
    known = [os.uname().sysname, "", ""]  # empty where it is no Linux
    with suppress(OSError):
        known[1] = Path("/proc/sys/kernel/random/boot_id").read_text()
    with suppress(OSError):
        known[2] = str(os.stat("/proc/self/ns/pid").st_ino)
    digits = hashlib.blake2b("\n".join(known).encode(), digest_size=4).hexdigest()
    return f"{socket.gethostname().replace('.', '_')[:48]}-{digits}"


def _start_of(pid: int) -> str | None:
    """When a process started, in the system's words; ``""`` for one that has ended, ``None`` where nobody tells."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    # proc(5): the third field is the state, the 22nd the start. Killed ones stay as zombies until somebody asks.
    return "" if fields[0] in "ZX" else fields[19]


def acquire_lock(target: Path) -> Owner:
    """Take the lock of a path whose parent exists, from a dead holder too, and give signs of life from then on. Local.

    Raises CheckpointError, naming it, for a living holder; one on another machine is given :data:`SILENCE` seconds.
    """
    lock, owner = _lock_of(target), Owner.new()
    own = lock.with_name(f"{lock.name}.{owner}")
    own.mkdir()
    try:
        (own / str(owner)).touch()
        while not _has_taken(target, owner, lock, own):
            time.sleep(0.01)  # it was given back, or taken, between two looks
    finally:
        if own.exists():
            shutil.rmtree(own, ignore_errors=True)
    ended = _held[owner] = threading.Event()

    def give_signs() -> None:
        while not ended.wait(BEAT):
            with suppress(OSError):  # another has taken it over, or no answer came
                os.utime(lock / str(owner))

    threading.Thread(target=give_signs, name=f"te_fsdp {owner}", daemon=True).start()
    return owner


def _has_taken(target: Path, owner: Owner, lock: Path, own: Path) -> bool:
    """Take a lock that nobody has, or that of a dead holder; whether that was possible."""
    try:
        os.rename(own, lock)
        return True
    except OSError as error:
        holder = _holder(lock)
        if holder is None and error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
    if holder is None or holder.name == str(owner):
        # A server that answers late is asked twice: the second time the lock is there, and it is ours.
        return holder is not None
    known = Owner.parse(holder.name)
    alive = known.is_alive()
    if alive or (alive is None and not _has_no_heartbeat(holder)):
        raise _written_by(target, known)
    try:
        os.rename(holder, lock / str(owner))
    except FileNotFoundError:
        return False
    _log.warning("%s: taking over from a dead job, %s", target, known.describe())
    return True


def _written_by(target: Any, owner: Owner, why: str = "Nothing was written") -> CheckpointError:
    return CheckpointError(
        f"{target}: another job is writing it",
        expected="one writer for a path",
        got=owner.describe(),
        why=why,
        fix="save under another name, such as a directory per run; or end that job",
    )


def _has_no_heartbeat(holder: Path) -> bool:
    """Whether a holder elsewhere gives no sign of life, for as long as this takes."""
    _log.warning("%s: waiting for a sign of life, at most %.0f s", holder, SILENCE)
    deadline = time.monotonic() + SILENCE
    with suppress(FileNotFoundError):  # it has gone meanwhile: taking it will tell
        seen = holder.stat().st_mtime_ns
        while time.monotonic() < deadline:
            time.sleep(min(BEAT, SILENCE) / 10)
            if holder.stat().st_mtime_ns != seen:
                return False
    return True


def gives_signs(target: Path, owner: Owner) -> bool:
    """Return whether an owner on another machine holds the lock of a target and shows signs of life. Local operation.

    Takes up to :data:`SILENCE` seconds if it holds the lock.
    """
    file = _lock_of(target) / str(owner)
    return file.exists() and not _has_no_heartbeat(file)


def check_lock(target: Path, owner: Owner) -> None:
    """Raise if another has taken this owner's lock, since it was still for so long that it seemed dead. Local."""
    lock = _lock_of(target)
    if (lock / str(owner)).exists():
        return
    holder = _holder(lock)
    why = f"It has taken over, since this one gave no sign of life for {SILENCE:.0f} s: nothing of it has appeared"
    raise _written_by(target, Owner.parse("it has ended" if holder is None else holder.name), why)


def release_lock(target: Path, owner: Owner) -> None:
    """Give a lock back; nothing where it is another's. Local operation."""
    file = _lock_of(target) / str(owner)
    if owner in _held:
        _held.pop(owner).set()
    with suppress(OSError):  # another's by now, or the next one has come between the two steps
        file.unlink()
        file.parent.rmdir()


def release_stale_lock(lock: Path) -> None:
    """Remove a lock whose holder is known to be dead, or that nobody holds. Local operation."""
    with suppress(OSError):  # held, or taken between the two steps; or another user's
        holder = _holder(lock)
        if holder is not None and Owner.parse(holder.name).is_alive() is False:
            holder.unlink()
        lock.rmdir()


def short_name(name: str) -> str:
    """Return a name to which mark and owner may be added: file systems take 255 bytes. Short ones stay as they are."""
    if len(os.fsencode(name)) <= _LONGEST:
        return name
    digest = hashlib.blake2b(os.fsencode(name), digest_size=8).hexdigest()
    return f"{os.fsencode(name)[: _LONGEST - 20].decode(errors='ignore')}~{digest}"


def _lock_of(target: Path) -> Path:
    return target.with_name(f".{short_name(target.name)}{LOCK}")


def _holder(lock: Path) -> Path | None:
    """The file that names the holder."""
    try:
        return next(iter(lock.iterdir()), None)
    except (FileNotFoundError, NotADirectoryError):
        return None
