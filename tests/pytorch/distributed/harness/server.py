"""Fork server of the CPU pool: forks workers that share the imports of torch, the emulation, TE.

`multiprocessing`'s own fork server is one per process and preloads once; pools differ in what is preloaded.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import sys
import time
import traceback
from multiprocessing.connection import Client
from typing import Any

import torch

from . import shared_memory, state, wire, worker


def main(options: dict[str, Any]) -> None:
    """Preload, report, then fork a worker for each ("fork", rank) until the pool ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # ends when the pool does, also on a Ctrl-C
    started = time.perf_counter()
    control = Client(options["address"], family="AF_UNIX")
    try:
        if torch.__version__ != options["torch"]:
            raise ImportError(f"torch {torch.__version__} in the workers, {options['torch']} in the pool")
        state.preload(options["te"])
        if options["te"] and not options["coverage"]:  # workers measure from their start
            state.preload_library()
        shared = shared_memory.install()
    except BaseException:
        wire.send(control, ("failed", traceback.format_exc()))
        return
    gc.collect()
    gc.freeze()  # keeps the collector of the children from touching, and so copying, the shared pages
    wire.send(control, ("ready", time.perf_counter() - started))
    codes: dict[int, int] = {}
    alive: set[int] = set()
    while True:
        try:
            command, argument = wire.receive(control)
        except (EOFError, OSError):
            os._exit(0)
        if command == "fork":
            if not alive:
                shared.renew()
            pid = os.fork()
            if pid == 0:
                control.close()
                _become_worker(argument, options, shared)
            alive.add(pid)
            wire.send(control, pid)
        elif command == "wait":
            wire.send(control, _wait(argument, codes))
            alive.discard(argument)


def _become_worker(rank: int, options: dict[str, Any], shared: shared_memory.Exchange) -> None:
    # A fork makes torch create its thread pool again at first use: if two threads of autograd do so, torch aborts
    # ("Invalid thread pool!").
    torch.set_num_threads(1)
    try:
        worker.main(rank, options, shared)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
    os._exit(1)


def _wait(pid: int, codes: dict[int, int], seconds: float = 2.0) -> int | None:
    """Return the exit code of a child (negative: signal); None if it still runs after a short wait."""
    deadline = time.monotonic() + seconds
    while pid not in codes and time.monotonic() < deadline:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            codes[pid] = os.waitstatus_to_exitcode(status)
        else:
            time.sleep(0.01)
    return codes.get(pid)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
