"""`WorkerPool`: rank processes that are started once for all test bodies."""

from __future__ import annotations

import contextlib
import os
import pickle
import sys
import time
import warnings
from collections.abc import Callable, Collection
from dataclasses import dataclass
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist

from . import devices, wire
from .processes import Processes, Worker
from .report import Answers, BodyFailed, describe

RUN_TIMEOUT = 120.0
"""Seconds a whole run may take."""
FAILURE_GRACE = 15.0
"""Seconds that the other ranks have to answer once one rank has failed."""
RESET_TIMEOUT = 30.0
_SCALE_VARIABLE = "TE_FSDP_TEST_TIMEOUT_SCALE"


class RaisedError(NamedTuple):
    """Error of a rank in `run_expect_error`."""

    type_name: str
    message: str


@dataclass
class Timing:
    """One run, for the report at the end of the session."""

    test: str
    body: str
    world_size: int
    seconds: float
    cpu_seconds: float
    """Of all ranks together, the reset included; 0 where a rank did not live to tell."""


class WorkerPool:
    """Worker processes for distributed tests.

    Args:
        max_ranks: largest number of ranks of a run; workers start when a run first needs them.
        device_type: "cpu" or "cuda"; by default the result of `devices.choose()`.
        te: load TransformerEngine in the workers. False is for tests that need only torch.
        python: the interpreter, or a replacement for it.

    Attributes:
        arch: compute capability that the emulation simulates in later runs, "9.0" or "10.0"; unused on GPUs.
    """

    def __init__(
        self,
        max_ranks: int = 8,
        *,
        device_type: str | None = None,
        te: bool = True,
        python: str = sys.executable,
    ) -> None:
        self.max_ranks = max_ranks
        self.device_type = devices.choose(device_type)
        self.arch = "10.0"
        self.te = te
        self.timings: list[Timing] = []
        self.starts = 0
        self._cpu_seconds = 0.0
        self._processes = Processes(te, self.device_type, python)
        self._workers: dict[int, Worker] = {}
        self._number = 0

    def __enter__(self) -> WorkerPool:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def run(
        self,
        fn: Callable[..., Any],
        world_size: int,
        *,
        timeout: float = RUN_TIMEOUT,
        env: dict[str, str] | None = None,
        init_group: bool = True,
        seed: int = 0,
        **kwargs: Any,
    ) -> list[Any]:
        """Call `fn(**kwargs)` on ranks 0..world_size-1 of a fresh process group; return the results by rank.

        Args:
            fn: a module-level function; the workers import it by name.
            world_size: number of ranks.
            timeout: seconds the run may take.
            env: environment variables of this run only.
            init_group: False leaves `dist.init_process_group` (env://) to the body.
            seed: for torch, numpy and random, the same on every rank.
            kwargs: arguments of the body; must pickle.

        Raises:
            BodyFailed: (an AssertionError) with each failing rank's traceback and each stuck rank's stacks.
        """
        __tracebackhide__ = True
        answers = self._run(fn, world_size, timeout, env, init_group, seed, kwargs)
        failed = {rank: answer for rank, answer in answers.items() if answer[0] != "ok"}
        if failed:
            raise BodyFailed(describe(_name(fn), world_size, failed), failed)
        return [pickle.loads(answers[rank][1]) for rank in range(world_size)]

    def run_expect_error(
        self,
        fn: Callable[..., Any],
        world_size: int,
        *,
        timeout: float = RUN_TIMEOUT,
        env: dict[str, str] | None = None,
        init_group: bool = True,
        seed: int = 0,
        **kwargs: Any,
    ) -> list[RaisedError]:
        """Run a body that must raise on all ranks, as `run` does; return the errors by rank.

        Raises:
            BodyFailed: a rank returned normally, hung or died.
        """
        __tracebackhide__ = True
        answers = self._run(fn, world_size, timeout, env, init_group, seed, kwargs, expect_error=True)
        wrong = {rank: answer for rank, answer in answers.items() if answer[0] != "error"}
        if wrong:
            raise BodyFailed(describe(_name(fn), world_size, answers, expected_error=True), answers)
        return [
            RaisedError(answers[rank][1]["type"], answers[rank][1]["message"]) for rank in range(world_size)
        ]

    def close(self) -> None:
        """End all workers; each saves its coverage. The pool cannot be used afterwards."""
        self._end_workers()
        self._processes.close()

    def _run(
        self,
        fn: Callable[..., Any],
        world_size: int,
        timeout: float,
        env: dict[str, str] | None,
        init_group: bool,
        seed: int,
        kwargs: dict[str, Any],
        expect_error: bool = False,
    ) -> Answers:
        function = _reference(fn)
        workers = self._ensure(world_size)
        self._number += 1
        started = time.monotonic()
        # Each group gets its own store: ranks that read the keys of an earlier group would wait for
        # dead peers. A file, since connecting to a TCPStore was seen to stall for 5 s; env:// needs one.
        store = None if init_group else dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        store_file = Path(self._processes.run_dir) / f"store-{self._number}"
        job = {
            "function": function,
            "kwargs": pickle.dumps(kwargs, protocol=pickle.HIGHEST_PROTOCOL),
            "sys_path": [path for path in sys.path if path],
            "seed": seed,
            "store": str(store_file) if init_group else None,
            "generation": self._number,
            "arch": self.arch,
        }
        clean, answers, self._cpu_seconds = False, {}, 0.0
        try:
            for worker in workers:
                rank_env = _rank_environment(worker.rank, world_size, store)
                _post(worker, ("run", self._number, {**job, "env": {**rank_env, **(env or {})}}))
            answers = self._collect(workers, _scaled(timeout))
            expected = "error" if expect_error else "ok"
            # On a GPU an error may have left the device useless to its process.
            whole = (expected,) if self.device_type == "cuda" else ("ok", "error")
            clean = all(verdict in whole for verdict, _ in answers.values()) and self._reset(workers)
        finally:
            if not clean:  # unanswered ranks are stuck and would not react to a request
                self._end_workers(
                    {rank for rank in range(world_size) if answers.get(rank, ("stuck",))[0] == "stuck"}
                )
            store_file.unlink(missing_ok=True)
            test = os.environ.get("PYTEST_CURRENT_TEST", "").split(" ")[0]
            self.timings.append(
                Timing(test, _name(fn), world_size, time.monotonic() - started, self._cpu_seconds)
            )
        return answers

    def _ensure(self, world_size: int) -> list[Worker]:
        if not 1 <= world_size <= self.max_ranks:
            if self.device_type == "cuda" and world_size > self.max_ranks:
                import pytest

                pytest.skip(f"needs {world_size} GPUs, found {self.max_ranks}")
            raise ValueError(f"world_size {world_size} is outside 1..{self.max_ranks} of this pool")
        missing = [rank for rank in range(world_size) if rank not in self._workers]
        if missing:
            self.starts += 1
            for worker in self._processes.start(missing):
                self._workers[worker.rank] = worker
        return [self._workers[rank] for rank in range(world_size)]

    def _collect(self, workers: list[Worker], timeout: float) -> Answers:
        """Wait for all answers; after a failure only a little longer. Ranks without one are stuck."""
        answers: Answers = {}
        deadline = time.monotonic() + timeout
        waited_for = f"the run's {timeout:.0f} s"
        while len(answers) < len(workers):
            pending = {worker.connection: worker for worker in workers if worker.rank not in answers}
            ready = wait(list(pending), max(0.0, deadline - time.monotonic()))
            if not ready and time.monotonic() >= deadline:
                stacks = self._processes.stacks(list(pending.values()))
                answers.update({rank: ("stuck", (waited_for, stack)) for rank, stack in stacks.items()})
                break
            for connection in ready:
                worker = pending[connection]
                answers[worker.rank] = self._receive(worker)
                grace = _scaled(FAILURE_GRACE)
                if answers[worker.rank][0] != "ok" and time.monotonic() + grace < deadline:
                    deadline = time.monotonic() + grace
                    waited_for = f"{grace:.0f} s after rank {worker.rank} failed"
        return answers

    def _receive(self, worker: Worker) -> tuple[str, Any]:
        try:
            _number, verdict, value = wire.receive(worker.connection)
        except (EOFError, OSError):
            return "died", self._processes.exit_code(worker)
        return verdict, value

    def _reset(self, workers: list[Worker]) -> bool:
        """Let every rank of the run drop its group and state concurrently; return False if one could not."""
        for worker in workers:
            _post(worker, ("reset", self._number, None))
        answers = self._collect(workers, _scaled(RESET_TIMEOUT))
        failed = {rank: answer for rank, answer in answers.items() if answer[0] != "ok"}
        if failed:
            warnings.warn(describe("the reset after a run", len(workers), failed), stacklevel=2)
        self._cpu_seconds = sum(spent for verdict, spent in answers.values() if verdict == "ok")
        return not failed

    def _end_workers(self, stuck: Collection[int] = ()) -> None:
        workers, self._workers = list(self._workers.values()), {}
        for worker in workers:
            _post(worker, ("exit", 0, None))
        deadline = time.monotonic() + 5.0
        for worker in workers:
            grace = 0.0 if worker.rank in stuck else max(0.0, deadline - time.monotonic())
            self._processes.end(worker, grace)


def _rank_environment(rank: int, world_size: int, store: dist.TCPStore | None) -> dict[str, str]:
    """Return torchrun's environment; with a store, that of torchrun's agent, so that no worker hosts one."""
    return {
        "RANK": str(rank),
        **devices.node_environment(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "GROUP_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port) if store else "29500",
        **({"TORCHELASTIC_USE_AGENT_STORE": "True"} if store else {}),
    }


def _post(worker: Worker, message: tuple[Any, ...]) -> None:
    with contextlib.suppress(OSError):  # it has died, which the wait for its answer reports
        wire.send(worker.connection, message)


def _scaled(seconds: float) -> float:
    return seconds * float(os.environ.get(_SCALE_VARIABLE, "1"))


def _name(fn: Callable[..., Any]) -> str:
    return f"{fn.__module__}.{fn.__qualname__}"


def _reference(fn: Callable[..., Any]) -> tuple[str, str, str]:
    if "<" in fn.__qualname__ or fn.__module__ == "__main__":
        raise TypeError(
            f"{_name(fn)} cannot be found by name in a worker: expected a function at the top level "
            "of a module, not of a script or another function"
        )
    file = getattr(sys.modules[fn.__module__], "__file__", None)
    return fn.__module__, str(Path(file).resolve()) if file else "", fn.__qualname__
