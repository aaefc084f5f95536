"""Worker processes from start to end; `pool` decides when."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from . import devices, wire

START_TIMEOUT = 300.0
_PACKAGE_PARENT = str(Path(__file__).resolve().parent.parent)


@dataclass
class Worker:
    """A running worker process as the pool sees it."""

    rank: int
    pid: int
    connection: Connection
    process: subprocess.Popen[bytes] | None  # None: forked by the server, which then knows its exit status


class Processes:
    """The processes of one pool: on the CPU a fork server and its children, otherwise one spawned per GPU."""

    def __init__(self, te: bool, device_type: str, python: str) -> None:
        self.run_dir = tempfile.mkdtemp(prefix="te_fsdp_pool_")
        self._options: dict[str, Any] = {
            "address": str(Path(self.run_dir) / "socket"),
            "run_dir": self.run_dir,
            "te": te,
            "torch": torch.__version__,
            "coverage": _coverage_options(),
        }
        self._device_type = device_type
        self._python = python
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(self._options["address"])
        self._listener.listen(64)
        self._server: subprocess.Popen[bytes] | None = None
        self._control: Connection | None = None

    def start(self, ranks: list[int]) -> list[Worker]:
        """Start workers for these ranks and wait until each has answered.

        Raises:
            RuntimeError: one of them ended first, or took longer than START_TIMEOUT; the text contains its output.
        """
        if self._device_type == "cuda":
            spawned = {rank: self._spawn("worker", rank=rank) for rank in ranks}
            pids = {process.pid: process for process in spawned.values()}
        else:
            self._ensure_server()
            pids = {self._ask_server("fork", rank): None for rank in ranks}
        workers = []
        for _ in ranks:
            connection = self._accept([process for process in pids.values() if process is not None])
            _, rank, pid = wire.receive(connection)
            workers.append(Worker(rank, pid, connection, pids[pid]))
        return sorted(workers, key=lambda worker: worker.rank)

    def stacks(self, workers: list[Worker]) -> dict[int, str]:
        """Return Python stacks of running workers by rank, without the thread that reads the pool's commands."""
        for worker in workers:
            os.kill(worker.pid, signal.SIGUSR1)
        time.sleep(0.5)
        return {worker.rank: _read_stacks(wire.stack_file(self.run_dir, worker.pid)) for worker in workers}

    def end(self, worker: Worker, grace: float) -> None:
        """Wait `grace` seconds for a worker to end by itself, then kill it; returns when it is gone."""
        if not _ended(worker.connection, grace):
            os.kill(worker.pid, signal.SIGKILL)  # safe: the process is not reaped, so the id is still its own
        self.exit_code(worker)
        worker.connection.close()

    def exit_code(self, worker: Worker) -> int | None:
        """Return the exit code of a worker that has ended or is ending (negative: signal), else None."""
        if worker.process is None:
            return self._ask_server("wait", worker.pid)
        try:
            return worker.process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            return None

    def close(self) -> None:
        """End the fork server and remove the run directory. End the workers first."""
        if self._control is not None:
            self._control.close()
        if self._server is not None:
            try:
                self._server.wait(timeout=5)
            except subprocess.TimeoutExpired:
                self._server.kill()
                self._server.wait()
        self._listener.close()
        shutil.rmtree(self.run_dir, ignore_errors=True)

    def _ensure_server(self) -> None:
        if self._control is not None:
            return
        self._server = self._spawn("server")
        self._control = self._accept([self._server])
        verdict, detail = wire.receive(self._control)
        if verdict != "ready":
            self._control.close()
            self._control = None
            raise RuntimeError(f"the workers could not be prepared (options {self._options}):\n{detail}")

    def _ask_server(self, command: str, argument: int) -> Any:
        assert self._control is not None
        wire.send(self._control, (command, argument))
        return wire.receive(self._control)

    def _spawn(self, module: str, **extra: Any) -> subprocess.Popen[bytes]:
        environment = dict(os.environ)
        environment.update(OMP_NUM_THREADS="1", MKL_NUM_THREADS="1")
        environment[devices.DEVICE_VARIABLE] = self._device_type
        environment["PYTHONPATH"] = os.pathsep.join([_PACKAGE_PARENT, *(path for path in sys.path if path)])
        if "rank" in extra:
            environment.update(devices.node_environment(extra["rank"]))
        options = json.dumps({**self._options, **extra})
        return subprocess.Popen([self._python, "-m", f"harness.{module}", options], env=environment)

    def _accept(self, children: list[subprocess.Popen[bytes]]) -> Connection:
        deadline = time.monotonic() + START_TIMEOUT
        self._listener.settimeout(0.5)
        while time.monotonic() < deadline:
            try:
                accepted, _ = self._listener.accept()
            except TimeoutError:
                for child in children:
                    if child.poll() not in (None, 0):
                        raise RuntimeError(
                            f"a worker process ended with code {child.returncode} before it was ready; "
                            "its output says why"
                        ) from None
                continue
            accepted.setblocking(True)
            return Connection(accepted.detach())
        raise RuntimeError(f"no worker was ready after {START_TIMEOUT:.0f} s")


def _ended(connection: Connection, seconds: float) -> bool:
    """Return whether the worker closes its end within this time; late answers are dropped."""
    deadline = time.monotonic() + seconds
    try:
        while connection.poll(max(0.0, deadline - time.monotonic())):
            connection.recv_bytes()
    except (EOFError, OSError):
        return True
    return False


def _read_stacks(path: str) -> str:
    try:
        text = Path(path).read_text()
    except OSError:
        return "(no stack was written)"
    threads = [block for block in text.split("\n\n") if block.strip() and "_read_commands" not in block]
    return "\n".join(threads).strip() or "(no stack was written: the process did not react to a signal)"


def _coverage_options() -> dict[str, Any] | None:
    """Return arguments for coverage in the workers if it runs here or COVERAGE_PROCESS_START is set."""
    try:
        import coverage
    except ImportError:
        return None
    current = coverage.Coverage.current()
    if current is not None:
        source = current.get_option("run:source")
        return {
            "config_file": getattr(current.config, "config_file", None) or False,
            "data_file": os.path.abspath(current.get_option("run:data_file") or ".coverage"),
            "branch": bool(current.get_option("run:branch")),
            **({"source": list(source)} if source else {}),
        }
    start = os.environ.get("COVERAGE_PROCESS_START")
    return {"config_file": os.path.abspath(start)} if start else None
