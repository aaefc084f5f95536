"""A lock for each target, so that no two jobs write one path: who holds it, since when, and whether that one lives.

    DIR/.step-200.te_fsdp-lock/HOST-BOOT.PID.START.SINCE.TOKEN     held by the process of this name
    DIR/.step-200.te_fsdp-lock.HOST-BOOT.PID.START.SINCE.TOKEN/    being taken, or left by a killed job

The lock is a directory with one file, whose name is its holder. It is taken by renaming a directory that has the file
already, which fails where another's file lies; handed on by renaming the file, which of several can be done by one;
given back by removing the file, which cannot meet another's. Each is one step for every file system with directories,
those without ``fcntl`` locks included, and whoever is killed between two steps leaves a name that tells who it was.

A process on this machine is known to live or to be dead, by its id and the time of its start. One elsewhere is known to
live by a sign of life: it touches its file every few seconds. Who finds such a lock looks for :data:`SILENCE` seconds
whether that happens. Clocks are not compared.
"""

from __future__ import annotations

import errno
import hashlib
import logging
import os
import secrets
import shutil
import socket
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from te_fsdp.errors import CheckpointError

_log = logging.getLogger("te_fsdp")
LOCK = ".te_fsdp-lock"
#: Seconds between signs of life.
BEAT = 5.0
#: Seconds without one, after which a holder on another machine counts as dead: clients of NFS may see a file's time a
#: minute late.
SILENCE = 120.0


@dataclass(frozen=True)
class Owner:
    """A process that writes, or removes, a checkpoint. As text it is a part of a file's name.

    Attributes:
        machine: Name of the host, and digits of what a process id means there: its boot and its process ids' namespace.
        pid: Process id.
        start: Time of the process' start, in ticks since the boot; empty where the system does not tell.
        since: When it began this piece of work, in seconds since 1970, by its clock.
        token: Makes each piece of work another owner.
    """

    machine: str
    pid: int
    start: str
    since: int
    token: str

    @classmethod
    def new(cls) -> Owner:
        """This process, beginning something."""
        start = _start_of(os.getpid()) or ""
        return cls(_machine(), os.getpid(), start, int(time.time()), secrets.token_hex(4))

    @classmethod
    def parse(cls, text: str) -> Owner:
        """The owner of a name; one on no known machine if it tells none."""
        parts = text.split(".")
        if len(parts) != 5 or not (parts[1].isdigit() and parts[3].isdigit()):
            return cls("", 0, "", 0, text)
        return cls(parts[0], int(parts[1]), parts[2], int(parts[3]), parts[4])

    def __str__(self) -> str:
        return f"{self.machine}.{self.pid}.{self.start}.{self.since}.{self.token}"

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
    known = [os.uname().sysname]
    for read in (
        lambda: Path("/proc/sys/kernel/random/boot_id").read_text(),
        lambda: str(os.stat("/proc/self/ns/pid").st_ino),
    ):
        try:
            known.append(read())
        except OSError:
            known.append("")  # no Linux
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


def take(target: Path, owner: Owner) -> None:
    """Take the lock of a target, from a dead holder too, and give signs of life from then on.

    Local operation. Waits up to :data:`SILENCE` seconds for a holder on another machine.

    Args:
        target: The path that is going to be written; its parent exists.
        owner: Who takes it, new.

    Raises:
        CheckpointError: Another process writes this target; names it.
    """
    lock = _lock_of(target)
    own = lock.with_name(f"{lock.name}.{owner}")
    own.mkdir()
    try:
        (own / str(owner)).touch()
        while not (_rename(own, lock) or _inherit(target, lock, owner)):
            time.sleep(0.01)  # it was given back, or taken, between two looks
    finally:
        if own.exists():
            shutil.rmtree(own, ignore_errors=True)
    _Beat(lock / str(owner)).start()


def _rename(own: Path, lock: Path) -> bool:
    """Take a lock that nobody has."""
    try:
        os.rename(own, lock)
    except OSError as error:
        # A server that answers late is asked twice: the second time the lock is there, and it is ours.
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST) or _holder(lock) is not None:
            return False
        raise
    return True


def _inherit(target: Path, lock: Path, owner: Owner) -> bool:
    """Take the lock of a dead holder; whether that was possible."""
    holder = _holder(lock)
    if holder is None:
        return False
    if holder.name == str(owner):
        return True
    known = Owner.parse(holder.name)
    alive = known.is_alive()
    if alive or (alive is None and not _is_silent(holder)):
        raise written_by(target, known, "; or end that job, whose lock is then taken over")
    try:
        os.rename(holder, lock / str(owner))
    except FileNotFoundError:
        return False
    _log.warning("%s: taking over from a dead job, %s", target, known.describe())
    return True


def written_by(target: Any, owner: Owner, more: str = "") -> CheckpointError:
    """The error of two writers, with what else may be done about it."""
    return CheckpointError(
        f"{target}: another job is writing it",
        expected="one writer for a path",
        got=owner.describe(),
        why="Nothing was written",
        fix=f"save under another name, such as a directory per run{more}",
    )


def exists(target: Any, place: str, fix: str = "") -> CheckpointError:
    """The error of a path where something lies; a save's, unless told what to do."""
    return CheckpointError(
        f"{target}: exists already",
        expected=place,
        why="What lies there is replaced by nobody, so that a crash can never damage it",
        fix=fix or "save under another name, such as step-<number>, or remove the old one first",
    )


def _is_silent(holder: Path) -> bool:
    """Whether a holder elsewhere gives no sign of life, for as long as this takes."""
    seen, deadline = _touched(holder), time.monotonic() + SILENCE
    _log.warning("%s: waiting for a sign of life, at most %.0f s", holder, SILENCE)
    while seen is not None and time.monotonic() < deadline:
        time.sleep(min(BEAT, SILENCE) / 10)
        now = _touched(holder)
        if now is not None and now != seen:
            return False
        seen = now
    return True  # if it has gone meanwhile, taking it will tell


def _touched(holder: Path) -> int | None:
    try:
        return holder.stat().st_mtime_ns
    except FileNotFoundError:
        return None


class _Beat(threading.Thread):
    """Gives signs of life until the lock is given back, or another's."""

    def __init__(self, file: Path) -> None:
        super().__init__(name=f"te_fsdp {file.name}", daemon=True)
        self.file, self.ended = file, threading.Event()

    def run(self) -> None:
        """Touch the file every few seconds."""
        while not self.ended.wait(BEAT):
            try:
                os.utime(self.file)
            except FileNotFoundError:
                return
            except OSError as error:
                _log.debug("%s: no sign of life: %s", self.file, error)


def check(target: Path, owner: Owner) -> None:
    """Raise if a lock is no longer its taker's. Local operation.

    Raises:
        CheckpointError: This process has been still for so long that another one took it for dead.
    """
    lock = _lock_of(target)
    if (lock / str(owner)).exists():
        return
    holder = _holder(lock)
    raise CheckpointError(
        f"{target}: another job has taken over, since this one gave no sign of life for {SILENCE:.0f} s",
        expected=f"the lock of {owner.describe()}",
        got=Owner.parse(holder.name).describe() if holder is not None else "none",
        why="Nothing of this save has appeared",
        fix="save under another name; find out what held this process up",
    )


def release(target: Path, owner: Owner) -> None:
    """Give a lock back; nothing where it is another's. Local operation."""
    file = _lock_of(target) / str(owner)
    for thread in threading.enumerate():
        if isinstance(thread, _Beat) and thread.file == file:
            thread.ended.set()
    try:
        file.unlink()
        file.parent.rmdir()
    except OSError:
        return  # another's by now, or the next one has come between the two steps


def release_dead(lock: Path) -> None:
    """Remove a lock whose holder is known to be dead, or that nobody holds. Local operation."""
    try:
        holder = _holder(lock)  # another user's lock may not be looked into
        if holder is not None and Owner.parse(holder.name).is_alive() is False:
            holder.unlink()
        lock.rmdir()
    except OSError:
        return  # held, or taken between the two steps


def _lock_of(target: Path) -> Path:
    return target.with_name(f".{target.name}{LOCK}")


def _holder(lock: Path) -> Path | None:
    """The file that names the holder."""
    try:
        return next(iter(lock.iterdir()), None)
    except (FileNotFoundError, NotADirectoryError):
        return None
