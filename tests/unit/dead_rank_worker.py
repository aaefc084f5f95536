"""Run ranks of which one exits or is late before a collective call; a script for test_dead_ranks.

    python dead_rank_worker.py DIRECTORY KIND VICTIM

Three ranks save once together. Then the victim is killed, exits, stops for a while, or comes late; the others save. It
may also stop within the save, or be killed while ranks exchange data that were read once, or in a load: as it creates
the process group, or at a message of this number. With "set-up", it is killed, is late or stops in a collective of a
call that sets a model up; with "leave" the others end as soon as they have raised. One line of JSON for each rank
contains its error, the number of seconds, and whether the model is unchanged.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import time
from typing import Any

import torch
import torch.distributed as dist

RANKS, LATE = 3, 7.0
#: Seconds that ranks live on after a load: connections that they would close must not end the wait of others.
LINGER = 4.0


def store_of(rank: int, pipe: tuple[int, int]) -> dist.TCPStore:
    """Return the store that rank 0 keeps. The system chooses its port, so that no other process can have it."""
    reader, writer = pipe
    if rank:
        return dist.TCPStore("127.0.0.1", int(os.read(reader, 8)))
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    os.write(writer, f"{store.port:8}".encode() * (RANKS - 1))
    return store


def stop_for_a_while() -> None:
    if os.fork() == 0:  # the child lets its parent go on
        time.sleep(LATE)
        os.kill(os.getppid(), signal.SIGCONT)
        os._exit(0)
    os.kill(os.getpid(), signal.SIGSTOP)


def stopping(stock: Any) -> Any:
    def stops(self: Any, *args: Any) -> Any:
        type(self).round = stock
        stop_for_a_while()
        return stock(self, *args)

    return stops


def kill_in_load(kind: str) -> None:
    """Kill this process in its next load: as it creates a group, or before or after sending a message."""
    from te_fsdp.collectives.agreement import RankMessenger

    def kill(*_: Any, **__: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    _, moment, number = kind.split()
    if moment == "group":
        dist.new_group = kill
    send, count = RankMessenger._send, [0]

    def sends(*args: Any) -> list[dist.Work]:
        count[0] += 1
        if count[0] == int(number) and moment == "before":
            kill()
        works = send(*args)
        if count[0] == int(number) and moment == "after":
            for work in works:
                work.wait()
            kill()
        return works

    RankMessenger._send = sends  # type: ignore[method-assign]


def set_up(kind: str, is_victim: bool) -> None:
    """Set up a model. The victim is killed in a collective, or arrives late."""
    import te_fsdp
    from te_fsdp.collectives.agreement import are_equal, gather
    from te_fsdp.collectives.rendezvous import collective_call

    _, moment = kind.split()
    name = {"gather": "all_gather_object", "build": "new_group"}.get(moment, "all_reduce")
    stock = getattr(dist, name)

    def act(*args: Any, **kwargs: Any) -> Any:
        if moment == "late":
            time.sleep(LATE)
        elif moment == "stopped":
            stop_for_a_while()
        else:
            os.kill(os.getpid(), signal.SIGKILL)
        setattr(dist, name, stock)
        return stock(*args, **kwargs)

    if is_victim:
        setattr(dist, name, act)
    # Stages need a group of te_fsdp.
    meshes = te_fsdp.Meshes.build(
        pp=RANKS if moment == "build" else 1, dp_shard=1 if moment == "build" else RANKS, device_type="cpu"
    )
    with collective_call("fully_shard"):
        if moment == "gather":
            gather("a", meshes.device_mesh["dp_shard"])
        assert bool(are_equal([1], meshes.device_mesh))


class Records(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def main(directory: str, kind: str, victim: int, rank: int, pipe: tuple[int, int]) -> None:
    from te_fsdp import checkpoint
    from te_fsdp.checkpoint.reading import ReadShare
    from te_fsdp.collectives import rendezvous
    from te_fsdp.collectives.agreement import RankMessenger

    dist.init_process_group("gloo", store=store_of(rank, pipe), rank=rank, world_size=RANKS)
    model = torch.nn.Linear(2, 2)
    torch.nn.init.ones_(model.weight)
    torch.nn.init.ones_(model.bias)
    if kind.startswith("load"):
        torch.nn.init.zeros_(model.weight)
    elif kind != "first call" and not kind.startswith("set-up"):
        checkpoint.save(f"{directory}/first", model)
    if rank == victim and not kind.startswith("set-up"):
        if kind in ("killed", "first call"):
            if kind == "first call":
                time.sleep(1)
            os.kill(os.getpid(), signal.SIGKILL)
        elif kind == "exited":
            os._exit(0)
        elif kind.startswith("load"):
            kill_in_load(kind)
        elif kind == "stopped":
            stop_for_a_while()
        elif kind == "stopped within":
            RankMessenger.round = stopping(RankMessenger.round)  # type: ignore[method-assign]
        elif kind == "killed in the exchange":
            ReadShare.exchange = lambda *args: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[method-assign]
        else:
            time.sleep(LATE)
    began, text, logged = time.monotonic(), "", Records()
    logging.getLogger("te_fsdp").addHandler(logged)
    if kind == "stopped within":
        rendezvous.REPORT_AFTER = 2.0
    rendezvous.ASK_AFTER = 1.0 if kind.startswith(("load", "set-up")) else rendezvous.ASK_AFTER
    try:
        if kind == "killed in the exchange":
            checkpoint.load(f"{directory}/first", model, read="once")
        elif kind.startswith("set-up"):
            set_up(kind, rank == victim)
        elif kind.startswith("load"):
            checkpoint.load(f"{directory}/first", model)
        else:
            checkpoint.save(f"{directory}/second", model)
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
    seconds = time.monotonic() - began
    unchanged = not model.weight.any()
    line = {"rank": rank, "seconds": seconds, "text": text, "log": logged.texts, "unchanged": unchanged}
    os.write(
        1, f"{json.dumps(line)}\n".encode()
    )  # print writes the newline apart, so lines of two ranks can mix
    lingers = kind.startswith(("load", "set-up")) and kind != "set-up leave"
    time.sleep(LINGER if lingers else 0)
    os._exit(0)


if __name__ == "__main__":
    where, how, who = sys.argv[1:]
    children, port = [], os.pipe()
    for one in range(RANKS):
        pid = os.fork()
        if pid == 0:
            main(where, how, int(who), one, port)
        children.append(pid)
    for pid in children:
        os.waitpid(pid, 0)
