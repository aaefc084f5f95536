"""One rank: waits for commands of the pool, runs bodies. Forked by `server` (CPU) or spawned (GPUs)."""

from __future__ import annotations

import faulthandler
import importlib
import importlib.util
import json
import os
import pickle
import queue
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Client, Connection
from pathlib import Path
from types import ModuleType
from typing import Any

from . import shared_memory, state, wire

TRACEBACK_FRAMES = 12


def main(rank: int, options: dict[str, Any], shared: shared_memory.Exchange | None = None) -> None:
    """Serve the pool until it requests exit or ends. Never returns.

    Args:
        rank: this worker's rank in every run it takes part in.
        options: `address` of the pool's socket, `run_dir`, `coverage`.
        shared: memory of the pool's workers, if they have some.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the pool handles Ctrl-C
    stacks = open(wire.stack_file(options["run_dir"], os.getpid()), "w")  # noqa: SIM115 (open as long as the process)
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
    coverage = _start_coverage(options.get("coverage"))
    connection = Client(options["address"], family="AF_UNIX")
    wire.send(connection, ("hello", rank, os.getpid()))
    inbox: queue.SimpleQueue[tuple[Any, ...]] = queue.SimpleQueue()
    threading.Thread(target=_read_commands, args=(connection, inbox), daemon=True).start()
    environment, directory = dict(os.environ), os.getcwd()
    reported = _cpu_seconds()
    while True:
        command, number, job = inbox.get()
        if command == "exit":
            break
        if command == "run":
            state.restore_environment(environment, job["env"])
            if shared is not None:
                gloo_alone = job["store"] is None or os.environ.get(shared_memory.GLOO_VARIABLE) == "1"
                shared.begin(None if gloo_alone else job["generation"])
                if not gloo_alone:
                    os.environ[shared_memory.LAZY_VARIABLE] = "1"
            answer = _answer(run_body, job)
        else:
            answer = _answer(state.reset)
            state.restore_environment(environment, {})
            os.chdir(directory)
            reported, spent = _cpu_seconds(), _cpu_seconds() - reported
            answer = ("ok", spent) if answer[0] == "ok" else answer
        wire.send(connection, (number, *answer))
    if coverage is not None:
        coverage.stop()
        coverage.save()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # interpreter shutdown with live communication threads can abort; nothing is left to clean up


def run_body(job: dict[str, Any]) -> bytes:
    """Prepare the process as a fresh torchrun worker, call the body, pickle what it returns.

    Args:
        job: `sys_path`, `function` (module name, file, qualified name), `kwargs` (pickled), `seed`, `store`
            (the file of the new group's store, or None), `generation` and `arch`.
    """
    for entry in job["sys_path"]:
        if entry not in sys.path:
            sys.path.append(entry)
    state.pretend(job["arch"])
    body = load_function(*job["function"])
    kwargs = pickle.loads(job["kwargs"])
    state.seed_everything(job["seed"])
    if job["store"] is not None:
        state.join_group(job["generation"], job["store"])
    result = body(**kwargs)
    return pickle.dumps(wire.by_value(result), protocol=pickle.HIGHEST_PROTOCOL)


def load_function(module_name: str, file: str, qualified_name: str) -> Callable[..., Any]:
    """Find a function by module and name; the file decides when two modules share a name."""
    target: Any = _load_module(module_name, file)
    for part in qualified_name.split("."):
        target = getattr(target, part)
    return target


def _load_module(name: str, file: str) -> ModuleType:
    try:
        module = importlib.import_module(name)
        if not file or Path(module.__file__ or "").resolve() == Path(file).resolve():
            return module
    except ModuleNotFoundError as error:
        if error.name is None or not (name == error.name or name.startswith(error.name + ".")):
            raise
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise ImportError(f"cannot load module {name!r} from {file!r}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def _answer(function: Callable[..., Any], *arguments: Any) -> tuple[str, Any]:
    try:
        return "ok", function(*arguments)
    except BaseException as error:
        inner = error.__traceback__
        while (
            inner is not None and inner.tb_next is not None and inner.tb_frame.f_code.co_filename == __file__
        ):
            inner = inner.tb_next  # the worker's own frames are not useful
        described = traceback.TracebackException(type(error), error, inner, limit=-TRACEBACK_FRAMES)
        lines = described.format()
        return "error", {"type": type(error).__name__, "message": str(error), "traceback": "".join(lines)}


def _cpu_seconds() -> float:
    """Return the CPU time of this process so far, with all threads and terminated children."""
    return sum(os.times()[:4])


def _read_commands(connection: Connection, inbox: queue.SimpleQueue[tuple[Any, ...]]) -> None:
    """Read commands in a separate thread, so that a worker stuck in a collective still notices the end of the pool."""
    while True:
        try:
            inbox.put(wire.receive(connection))
        except (EOFError, OSError):
            time.sleep(0.1)
            os._exit(1)


def _start_coverage(options: dict[str, Any] | None) -> Any:
    if not options:
        return None
    import coverage

    measured = coverage.Coverage(data_suffix=True, **options)
    measured.start()
    return measured


if __name__ == "__main__":
    given = json.loads(sys.argv[1])
    state.preload(given["te"])
    main(given["rank"], given)
