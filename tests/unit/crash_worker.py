"""Run ranks that save repeatedly until one is killed; a script for test_checkpoint_crash.

    python crash_worker.py DIRECTORY SEED TRIALS

It imports torch once and forks the ranks of each trial, which is cheap. Trial N saves under DIRECTORY/N; one line of
JSON per trial records the actions. Even trials save synchronously, odd ones in the background.

A rank is killed at what it does to files, not after some time: Python's audit events (opening, renaming and removing
files, making and listing directories) are counted, so that the moment does not depend on the machine's load.
"""

from __future__ import annotations

import json
import os
import random
import select
import signal
import sys
import time
import traceback
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

RANKS, KEEP = 2, 2
#: Kills come at most this many events after the victim's first complete checkpoint: about two saves. Rank 0 alone
#: makes directories, commits, and removes what is old.
EVENTS = (60, 8)
#: Ranks that die in turn, for each way to save.
VICTIMS = (0, 0, 1)
#: Where a rank may wait for a dead one; then it is killed too, and the trial reports it.
PATIENCE = 60.0


def build() -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return the model before its first step, unsharded."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(6)))
    return model, momentum(model)


def momentum(model: nn.Module) -> torch.optim.Optimizer:
    # Products with these numbers are exact, so that sharded and unsharded steps agree bit for bit.
    return torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.5)


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Change every weight and all state."""
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()


def kill_after(directory: Path, events: int) -> None:
    """Kill this process at a given number of file accesses in a directory."""
    left, within = events, f"{directory}{os.sep}"

    def count(event: str, arguments: tuple[object, ...]) -> None:
        nonlocal left
        if event.startswith(("open", "os.", "shutil.")) and str(next(iter(arguments), "")).startswith(within):
            left -= 1
            if left < 0:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(count)


def rank_main(directory: Path, rank: int, asynchronous: bool, report: int, events: int | None) -> None:
    """Save until killed, and report the number of each complete checkpoint.

    Args:
        directory: Of the checkpoints.
        rank: Of this process.
        asynchronous: Whether to save in the background.
        report: File descriptor of a pipe.
        events: Number of events after the first checkpoint at which the rank dies.
    """
    import te_fsdp

    # A dead rank does not arrive; torchrun ends the others by such a signal too.
    signal.signal(signal.SIGUSR1, lambda *_: te_fsdp.set_collective_timeout(1e-3))
    dist.init_process_group("gloo", init_method=f"file://{directory}.store", rank=rank, world_size=RANKS)
    model, _ = build()
    te_fsdp.fully_shard(model, te_fsdp.Meshes.build(dp_shard=RANKS, device_type="cpu"))
    optimizer = momentum(model)
    for number in range(1, 10_000):
        step(model, optimizer)
        path, extra = directory / f"step-{number}", {"step": number}
        handle = te_fsdp.checkpoint.save(
            path, model, optimizer, extra=extra, keep_last=KEEP, asynchronous=asynchronous
        )
        if asynchronous:
            before = [p.detach().clone() for p in model.parameters()]
            with torch.no_grad():
                for parameter in model.parameters():  # the snapshot must not see this
                    parameter.zero_()
            handle.result()
            with torch.no_grad():
                for parameter, value in zip(model.parameters(), before, strict=True):
                    parameter.copy_(value)
        os.write(report, number.to_bytes(4, "big"))
        if number == 1 and events is not None:
            kill_after(directory, events)


def fork_rank(directory: Path, rank: int, asynchronous: bool, events: int | None) -> tuple[int, int]:
    """Return the process id of a new rank, and the pipe on which it reports."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid:
        os.close(writer)
        return pid, reader
    status = 1
    try:
        rank_main(directory, rank, asynchronous, writer, events)
    except BaseException:  # the other rank's death, which is not of interest unless it came too early
        (directory.parent / f"{directory.name}.rank-{rank}.txt").write_text(traceback.format_exc())
    os._exit(status)


def moments(seed: int, trials: int) -> list[tuple[int, int]]:
    """Draw the victim and the number of events of each trial, stratified over all events, for each way to save."""
    chance = random.Random(seed)
    victims = [VICTIMS[number // 2 % len(VICTIMS)] for number in range(trials)]
    results = [(0, 0)] * trials
    for victim in range(RANKS):
        for asynchronous in range(2):
            own = [n for n in range(asynchronous, trials, 2) if victims[n] == victim]
            for part, number in enumerate(own):
                results[number] = victim, int((part + chance.random()) * EVENTS[victim] / len(own))
    return results


def trial(directory: Path, victim: int, events: int, asynchronous: bool) -> dict[str, object]:
    """Start ranks, kill one between its file accesses, end the others."""
    ranks = [
        fork_rank(directory, rank, asynchronous, events if rank == victim else None) for rank in range(RANKS)
    ]
    status = os.waitpid(ranks[victim][0], 0)[1]
    others = [pid for index, (pid, _) in enumerate(ranks) if index != victim]
    for pid in others:
        os.kill(pid, signal.SIGUSR1)
    noticed = wait_for(others, PATIENCE)
    for pid in others:
        if pid not in noticed:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    known = [0] * RANKS
    for index, (_, reader) in enumerate(ranks):
        while data := os.read(reader, 4):
            known[index] = int.from_bytes(data, "big")
        os.close(reader)
    return {
        "victim": victim,
        "events": events,
        "killed": os.WIFSIGNALED(status),
        "known": max(known),
        "noticed": len(noticed) == len(others),
    }


def wait_for(pids: list[int], seconds: float) -> set[int]:
    """Return the processes that end by themselves within this time."""
    ended: set[int] = set()
    deadline = time.monotonic() + seconds
    while len(ended) < len(pids) and time.monotonic() < deadline:
        for pid in set(pids) - ended:
            if os.waitpid(pid, os.WNOHANG)[0]:
                ended.add(pid)
        select.select([], [], [], 0.005)
    return ended


def main(directory: Path, seed: int, trials: int) -> None:
    torch.set_num_threads(1)
    import te_fsdp.checkpoint
    import te_fsdp.shard_model

    # Whatever torch imports when it is first used is imported here, before the forks.
    model, optimizer = build()
    step(model, optimizer)
    te_fsdp.checkpoint.save(directory / "warm", model, optimizer)
    for number, (victim, events) in enumerate(moments(seed, trials)):
        outcome = trial(directory / str(number), victim, events, asynchronous=bool(number % 2))
        print(json.dumps(outcome), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
