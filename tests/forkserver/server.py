"""The program of a fork server; see `__init__.py`. `python server.py FOLDER [PATH...]`: listens at FOLDER/socket.

Packages that it imports before are searched on the paths of the programs first.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import inspect
import json
import os
import runpy
import selectors
import signal
import socket
import sys
import threading
import types
from typing import Any

#: Packages that programs with te_fsdp or TransformerEngine import.
PRELOADED = (
    "torch",
    "torch._dynamo",
    "torch.distributed.checkpoint",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.fsdp",
    "torch.distributed.launcher.api",
    "torch.distributed.tensor",
    "torch.distributed.tensor.experimental",
    "torch.testing",
    "einops",
    "numpy",
    "onnxscript",
    "pydantic.dataclasses",
    "pydantic.json_schema",
    "pytest",
    "rich.table",
    "tyro",
    "zlib_ng.zlib_ng",
)


def serve(folder: str) -> dict[str, Any]:
    """Fork a process for each launcher that calls, until standard input is closed.

    Returns:
        In a forked process, which leaves this function: what it is to run.
    """
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(os.path.join(folder, "socket"))
    listener.listen(64)
    # The pipe yields a byte when a process has ended.
    ended, signalled = os.pipe()
    os.set_blocking(signalled, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(signalled, warn_on_full_buffer=False)
    watched = selectors.DefaultSelector()
    for source in (0, ended, listener):
        watched.register(source, selectors.EVENT_READ)
    launchers: dict[int, socket.socket] = {}
    os.write(1, b"ready\n")
    while True:
        for key, _ in watched.select():
            if key.fileobj == 0:
                for pid in launchers:
                    os.kill(pid, signal.SIGKILL)
                os._exit(0)
            elif key.fileobj == ended:
                os.read(ended, 1 << 16)
                _tell_of_ended(launchers, watched)
            elif key.data in launchers:  # this one was killed, and so is its process
                os.kill(key.data, signal.SIGKILL)
                watched.unregister(key.fileobj)
            elif key.fileobj is listener:
                connection = listener.accept()[0]
                try:
                    job, streams = _received(connection)
                except (OSError, EOFError):  # its launcher was killed before it had sent anything
                    connection.close()
                    continue
                pid = os.fork()
                if pid == 0:
                    signal.set_wakeup_fd(-1)
                    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                    watched.close()
                    for number in (ended, signalled, *(launcher.fileno() for launcher in launchers.values())):
                        os.close(number)
                    for number, stream in enumerate(streams):
                        os.dup2(stream, number)
                        os.close(stream)
                    listener.close()
                    connection.close()
                    return job
                for stream in streams:
                    os.close(stream)
                with contextlib.suppress(OSError):  # it was killed just now, which is detected next
                    connection.sendall(b"%d\n" % pid)
                launchers[pid] = connection
                watched.register(connection, selectors.EVENT_READ, pid)


def _tell_of_ended(launchers: dict[int, socket.socket], watched: selectors.BaseSelector) -> None:
    """Let launchers end as their processes did."""
    for pid in list(launchers):
        result, status = os.waitpid(pid, os.WNOHANG)
        if result:
            launcher = launchers.pop(pid)
            with contextlib.suppress(KeyError):
                watched.unregister(launcher)
            with contextlib.suppress(OSError):  # it was killed
                launcher.sendall(b"%d\n" % os.waitstatus_to_exitcode(status))
            launcher.close()


def _received(connection: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """Return a launcher's job, and its three streams."""
    size, streams, _, _ = socket.recv_fds(connection, 4, 3)
    text = b""
    while not size or len(text) < int.from_bytes(size, "big"):
        part = connection.recv(1 << 20)
        if not part:
            raise EOFError
        text += part
    return json.loads(text), streams


def prepare(job: dict[str, Any], path: list[str]) -> list[str]:
    """Make this process one that was started with the job's arguments; those that are left are the program's.

    Args:
        job: What the launcher has sent.
        path: `sys.path` without PYTHONPATH and the program's own folder.
    """
    torch = sys.modules["torch"]
    # A fork makes torch create its thread pool again at first use: if two threads of autograd do so, torch aborts
    # ("Invalid thread pool!").
    torch.set_num_threads(torch.get_num_threads())
    os.environ.clear()
    os.environ.update(job["environment"])
    os.chdir(job["folder"])
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.executable, words = job["executable"], job["words"]
    while words and words[0] == "-u":
        sys.stdout.reconfigure(write_through=True)
        words = words[1:]
    if not words or (words[0].startswith("-") and words[0] not in ("-c", "-m")):
        raise SystemExit(f"the fork server does not know Python's option in {words}")
    first = "" if words[0] in ("-c", "-m") else os.path.dirname(os.path.abspath(words[0]))
    added = [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    sys.path[:] = [first, *added, *path]
    sys.dont_write_bytecode = bool(os.environ.get("PYTHONDONTWRITEBYTECODE"))
    importlib.invalidate_caches()
    if {"COVERAGE_PROCESS_START", "COVERAGE_PROCESS_CONFIG"} & os.environ.keys():
        from coverage import process_startup

        process_startup(force=True)
    return words


def run(words: list[str]) -> None:
    """Run a module, a script or a text as Python's command line does."""
    kind, *rest = words
    if kind == "-m":
        sys.argv = rest
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
        return
    program = types.ModuleType("__main__")
    sys.modules["__main__"] = program  # stays: threads may run on until the process ends
    if kind == "-c":
        sys.argv, text = ["-c", *rest[1:]], rest[0]
    else:
        sys.argv, program.__file__ = words, kind
        with open(kind, encoding="utf-8") as file:
            text = file.read()
    exec(compile(text, "<string>" if kind == "-c" else kind, "exec", dont_inherit=True), program.__dict__)


def end_of(job: dict[str, Any], path: list[str]) -> int:
    """Run a job in this process; the exit status, after what Python does at the end of a program."""
    status: Any = 0
    try:
        run(prepare(job, path))
    except SystemExit as exit_:
        status = exit_.code
        if not isinstance(status, int | None):
            print(status, file=sys.stderr)
            status = 1
    except BaseException as error:
        frames = error.__traceback__
        while frames is not None and frames.tb_frame.f_code.co_filename == __file__:
            frames = frames.tb_next
        sys.excepthook(type(error), error.with_traceback(frames), frames)
        status = 1
    threading._shutdown()
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    return status or 0


if __name__ == "__main__":
    own_path = sys.path[1:]
    sys.path[1:1] = sys.argv[2:]
    for preloaded in PRELOADED:
        with contextlib.suppress(ImportError):  # what is not installed is not needed
            importlib.import_module(preloaded)
    # torch registers each custom operator with the file of its caller. The first search reads the files of all modules.
    inspect.getmodule(inspect.currentframe())
    gc.collect()
    gc.freeze()  # keeps the collector of the forked processes from touching, and so copying, the shared pages
    # Not the interpreter's own end, which takes all modules apart, 0.3 s of CPU time with torch.
    os._exit(end_of(serve(sys.argv[1]), own_path) & 0xFF)
