"""Object storage for tests.

fsspec's ``file://`` is a local path for te_fsdp. Under the name ``slow`` it is treated as object storage, shared by
processes; it may have a bandwidth that all of them share, and calls a hook before each operation.
"""

from __future__ import annotations

import fcntl
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import fsspec
from fsspec.implementations.local import LocalFileSystem


class SlowFileSystem(LocalFileSystem):
    """``slow:///path``: local files, at ``RATE`` bytes a second for all processes that have the file ``CLOCK``."""

    protocol = "slow"
    RATE: float | None = None
    CLOCK: str = ""
    hook: Callable[[str], None] = staticmethod(lambda name: None)

    @classmethod
    def _strip_protocol(cls, path):
        return super()._strip_protocol(str(path).removeprefix(f"{cls.protocol}://"))

    def __init__(self, **options):
        super().__init__(auto_mkdir=True, **options)

    def pipe_file(self, path, value, mode="overwrite", **options):
        self._touched("put")
        super().pipe_file(path, value, mode=mode, **options)

    def cat_file(self, path, start=None, end=None, **options):
        self._touched("get")
        data = super().cat_file(path, start, end, **options)
        self._wait(len(data))
        return data

    def open(self, path, mode="rb", **options):
        self._touched(f"open {mode}")
        return super().open(path, mode, **options)

    def rm_file(self, path):
        self._touched("remove")
        super().rm_file(path)

    def rm(self, path, recursive=False, maxdepth=None):
        self._touched("remove all")
        super().rm(path, recursive=recursive, maxdepth=maxdepth)

    def ls(self, path, detail=False, **options):
        self._touched("list")
        return super().ls(path, detail=detail, **options)

    def _touched(self, name: str) -> None:
        type(self).hook(name)

    def _wait(self, count: int) -> None:
        """Wait as with one connection to the storage: each transfer starts after the previous one."""
        if self.RATE is None:
            return
        with open(self.CLOCK, "a+") as clock:
            fcntl.flock(clock, fcntl.LOCK_EX)
            clock.seek(0)
            free = max(time.monotonic(), float(clock.read() or 0)) + count / self.RATE
            clock.truncate(0)
            clock.write(repr(free))
        time.sleep(max(0.0, free - time.monotonic()))


class StandIn(SlowFileSystem):
    """``s3://bucket/path``: local files below the current directory."""

    protocol = "s3"


def register(kind: type[SlowFileSystem] = SlowFileSystem) -> None:
    fsspec.register_implementation(kind.protocol, kind, clobber=True)


@contextmanager
def s3_server(folder: Path) -> Iterator[dict[str, str]]:
    """Yield the environment of clients of Moto's server with a bucket ``bucket``."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    log = (folder / "server.log").open("wb")
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    server = subprocess.Popen(command, stdout=log, stderr=log)
    environment = {
        "AWS_ENDPOINT_URL_S3": f"http://127.0.0.1:{port}",
        "AWS_ACCESS_KEY_ID": "x",
        "AWS_SECRET_ACCESS_KEY": "x",
        "AWS_DEFAULT_REGION": "us-east-1",
    }
    before = {name: os.environ.get(name) for name in environment}
    os.environ.update(environment)
    try:
        deadline = time.monotonic() + 60
        while True:
            try:
                fsspec.filesystem("s3", skip_instance_cache=True).mkdir("bucket")
                break
            except Exception:
                if server.poll() is not None or time.monotonic() > deadline:
                    raise AssertionError((folder / "server.log").read_text()) from None
                time.sleep(0.2)
        yield environment
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})
        server.terminate()
        server.wait(30)
        log.close()
