"""Run concurrent saves to one path in forked processes; a script for test_checkpoint_concurrent_jobs.

    python concurrent_save_worker.py DIRECTORY PLAN...

A job may be stopped before its n-th touch of a directory's files, killed there, or slowed down at each: Python's audit
events (opening, renaming, removing, making and listing) are counted, so that nothing depends on the machine's load. One
line of JSON for each trial.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from te_fsdp import checkpoint
from te_fsdp.checkpoint import directory
from te_fsdp.errors import CheckpointError

#: More touches than any job here makes.
MANY = 200


def at_touches(where: Path, act: Callable[[int], None]) -> None:
    """Call a function with the number of each later file access."""
    count, within = 0, str(where)

    def hook(event: str, arguments: tuple[object, ...]) -> None:
        nonlocal count
        if event.startswith(("open", "os.")) and str(next(iter(arguments), "")).startswith(within):
            count += 1
            act(count - 1)

    sys.addaudithook(hook)


class Job:
    """A forked process: its output at exit, and a way to resume it after it has stopped."""

    def __init__(self, where: Path, work: Callable[[], object], at: int = -1, how: str = "stop") -> None:
        self.stopped, stop = os.pipe()
        go, self.go = os.pipe()
        self.told, tell = os.pipe()
        self.pid = os.fork()
        if self.pid:
            for end in (stop, go, tell):
                os.close(end)
            return
        for end in (self.stopped, self.go, self.told):
            os.close(end)

        def act(touch: int) -> None:
            if how == "slow":
                time.sleep(random.random() * 0.01)
            elif touch == at and how == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            elif touch == at:
                os.write(stop, b"s")
                os.read(go, 1)

        random.seed(os.getpid())
        at_touches(where, act)
        try:
            answer = work() or "done"
        except CheckpointError as error:
            answer = str(error)
        except BaseException as error:
            answer = f"{type(error).__name__}: {error}"
        os.write(tell, str(answer).encode()[:4000])
        os._exit(0)

    def stop(self) -> bool:
        """Wait until it stops; ``False`` if it has ended instead."""
        return os.read(self.stopped, 1) == b"s"

    def end(self) -> str:
        """Resume it and wait for its end; return its output, empty for a killed process."""
        with contextlib.suppress(BrokenPipeError):  # it has ended already
            os.write(self.go, b"g")
        told = b""
        while part := os.read(self.told, 4096):
            told += part
        os.waitpid(self.pid, 0)
        for end in (self.stopped, self.go, self.told):
            os.close(end)
        return told.decode()


def names(where: Path) -> list[str]:
    return sorted(path.name for path in where.iterdir())


def model(value: float) -> torch.nn.Module:
    result = torch.nn.Linear(2, 2, bias=False)
    torch.nn.init.constant_(result.weight, value)
    return result


def value_of(path: Path) -> float:
    result = model(0.0)
    checkpoint.load(path, result, verify=True)
    return float(result.weight[0, 0].detach())


def put(target: Path, text: str) -> Callable[[], None]:
    """Return a job that writes a directory with one file, as conversions do."""

    def work() -> None:
        with directory.new_directory(target) as folder:
            (folder / "text").write_text(text)

    return work


def stopped(where: Path) -> Iterator[dict[str, object]]:
    """Run two jobs at one path. One stops at each file access while the other runs, or stops and ends later."""
    for also in (None, 4, 9, 14):
        for at in range(MANY):
            here = where / f"{at}-{also}"
            here.mkdir()
            first = Job(here, put(here / "x", "first"), at)
            met = first.stop()
            second = Job(here, put(here / "x", "second"), -1 if also is None else also)
            if also is not None and second.stop():
                told = [first.end(), second.end()]
            else:
                told = [second.end(), first.end()][::-1]
            text = (here / "x" / "text").read_text() if (here / "x").exists() else None
            pids = [first.pid, second.pid]
            yield {"at": at, "also": also, "told": told, "pids": pids, "text": text, "names": names(here)}
            if not met:
                break


def killed(where: Path) -> Iterator[dict[str, object]]:
    """Kill a job at each file access of a save. The next job saves to the same path at once."""
    for at in range(MANY):
        here = where / str(at)
        for step in (1, 2):
            checkpoint.save(here / f"step-{step}", model(step))

        def save(here: Path = here) -> None:
            checkpoint.save(here / "step-3", model(3.0), keep_last=2)

        ended = Job(here, save, at, "kill").end()
        newest = checkpoint.latest(here)
        told, began = "done", time.monotonic()
        try:
            checkpoint.save(here / "step-3", model(4.0), keep_last=2)
        except CheckpointError as error:
            told = str(error)
        seconds = time.monotonic() - began
        checkpoint.save(here / "step-4", model(5.0), keep_last=2)
        yield {
            "at": at,
            "newest": newest and newest.name,
            "told": told,
            "seconds": seconds,
            "value": value_of(here / "step-3"),
            "names": names(here),
        }
        if ended:
            break


def slow(where: Path) -> Iterator[dict[str, object]]:
    """Run two jobs on a slow disk: same or different paths, with and without removal of old checkpoints."""
    for trial in range(8):
        here = where / str(trial)
        for step in (1, 2, 3):
            checkpoint.save(here / f"step-{step}", model(step))

        def save(value: float, name: str, here: Path = here) -> None:
            checkpoint.save(here / name, model(value), keep_last=2, asynchronous=value == 5.0).result()

        same = trial % 2 == 0
        paths = ["step-4", "step-4" if same else "step-5"]
        jobs = [
            Job(here, lambda v=v, p=p: save(v, p), how="slow") for v, p in zip((4.0, 5.0), paths, strict=True)
        ]
        seen = set()
        while os.waitid(os.P_PID, jobs[0].pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            newest = checkpoint.latest(here)
            seen.add(newest and newest.name)
            time.sleep(0.002)  # it looks often enough, and the jobs need the core
        told = [job.end() for job in jobs]
        values = {path.name: value_of(path) for path in directory.visible(here)}
        yield {
            "same": same,
            "told": told,
            "pids": [job.pid for job in jobs],
            "seen": sorted(map(str, seen)),
            "values": values,
            "names": names(here),
        }


if __name__ == "__main__":
    torch.set_num_threads(1)
    checkpoint.save(
        Path(sys.argv[1]) / "warm", model(0.0)
    )  # what torch imports late is imported before the forks
    for plan in sys.argv[2:]:
        for outcome in globals()[plan](Path(sys.argv[1]) / plan):
            print(json.dumps({"plan": plan, **outcome}), flush=True)
