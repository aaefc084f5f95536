"""Collectives within collective calls that raise on all ranks if a rank ends meanwhile."""

from __future__ import annotations

import functools
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from te_fsdp.collectives import rendezvous
from te_fsdp.collectives.rendezvous import Rendezvous, ended_error, running_call, store_errors
from te_fsdp.errors import TeFsdpError

T = TypeVar("T")

#: Seconds to wait for the store, which a thread may be using.
_STORE_PATIENCE = 1.0
#: Signals whose handlers may raise KeyboardInterrupt or SystemExit. All signals would take 0.15 ms of a round.
_SIGNALS = signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2


@contextmanager
def delayed_signals() -> Iterator[None]:
    """Run Python's signal handlers at the end, since one that raises would leave half of a message unsent or unread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    delayed = list[tuple[int, Any]]()
    handlers: dict[int, Any] = {n: h for n in _SIGNALS if callable(h := signal.getsignal(n))}
    try:
        for number in handlers:
            signal.signal(number, lambda number, frame: delayed.append((number, frame)))
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        for number, frame in delayed:
            handlers[number](number, frame)


def is_watched() -> bool:
    """Return whether collectives are watched: in a :func:`collective_call` of several ranks, in its own thread."""
    running = running_call.get()
    is_possible = running is not None and running.rendezvous is not None and not running.in_thread
    return is_possible and not rendezvous.is_capturing()


def run_while_all_live(collective: Callable[[], T]) -> T:
    """Return the result of a collective that blocks the host, such as ``new_group``, which runs in a thread.

    Raise CollectiveError if a rank of the running :func:`collective_call` ends meanwhile. Outside of a call, run it in
    this thread.
    """
    if not is_watched():
        return collective()
    future: Future[T] = Future()
    running, kind = running_call.get(), torch.accelerator.current_accelerator()
    assert running is not None
    device = None if kind is None else torch.get_device_module(kind)
    stream = device.current_stream() if device is not None and device.is_initialized() else None

    def run() -> T:
        running_call.set(replace(running, in_thread=True))
        with nullcontext() if device is None or stream is None else device.stream(stream):
            return collective()

    # A daemon, because the interpreter must be able to end while the collective waits for a rank that has ended.
    threading.Thread(target=_answer, args=(future, run), name="te_fsdp collective", daemon=True).start()
    # Without the store: a client of TCPStore serves one thread at a time.
    _wait_while_all_live(lambda: future.done() and [future.result()] != [], asks_store=False)
    return future.result()


def all_reduce_maximum(values: torch.Tensor, group: dist.ProcessGroup | None) -> None:
    """Compute the maximum over a group in place.

    Where :func:`is_watched`, wait for it, and raise CollectiveError if a rank ends.
    """
    if not is_watched():
        dist.all_reduce(values, op=dist.ReduceOp.MAX, group=group)
        return
    # NCCL cannot be interrupted, and its watchdog ends the process if it detects that another one has ended.
    sent = values.cpu() if "cpu:" in dist.get_backend_config(group) else values
    started: list[dist.Work | None] = []

    def is_completed() -> bool:
        if not started:
            started.append(dist.all_reduce(sent, op=dist.ReduceOp.MAX, group=group, async_op=True))
        work = started[0]
        if completed := work is None or work.is_completed():
            # Later kernels of this stream run after it. It also raises its error.
            _ = work is None or work.wait()
        return completed

    def complete() -> None:
        while not is_completed():
            time.sleep(1e-4)

    if sent.device.type == "cpu":
        _wait_while_all_live(is_completed, asks_store=True)
    else:
        # The first collective of an NCCL group blocks the host until all its ranks have connected.
        run_while_all_live(complete)
    if sent is not values:
        values.copy_(sent)


def _wait_while_all_live(poll: Callable[[], bool], *, asks_store: bool) -> None:
    """Return once ``poll`` returns true. Raise its error, or CollectiveError if a rank of the call has ended."""
    running = running_call.get()
    assert running is not None and running.rendezvous is not None
    joint_call, began, ask_at = running.rendezvous, time.monotonic(), rendezvous.ASK_AFTER
    failed: Exception | None = None
    other_client: Any = None  # of the store, which a thread may be using
    while True:
        try:
            if failed is None and poll():
                return
        except (RuntimeError, ConnectionError) as error:  # of Gloo, on neighbors of a rank that has ended
            if isinstance(error, TeFsdpError) and not isinstance(error.__cause__, RuntimeError):
                raise
            failed, ask_at = error, time.monotonic() - began + rendezvous.ASK_AFTER
        waited = time.monotonic() - began
        if failed is not None or waited >= ask_at:
            found = rendezvous.liveness().ended(joint_call.addresses())
            with store_errors(joint_call.call):
                if not (asks_store or failed is not None) and other_client is None:
                    other_client = joint_call.store.clone()
                joint_call.raise_if_interrupted(other_client)
                ended = _agreed(joint_call, found, is_store_free=asks_store or failed is not None)
            if ended:
                raise ended_error(joint_call.call, ended, len(joint_call.ranks), failed) from failed
            if failed is not None and waited >= ask_at:  # connections of a process may close one by one
                raise failed
            if failed is None:
                ask_at = waited + rendezvous.ASK_AFTER
        # Short intervals at first, which keep the cost of a wait small.
        time.sleep(min(max(waited / 10, 5e-5), 0.1))


def _agreed(joint_call: Rendezvous, found: list[int], *, is_store_free: bool) -> list[int]:
    """Return the ended ranks that all ranks name, or those that this rank has found if the store does not answer."""
    answer: Future[list[int]] = Future()
    arguments = answer, functools.partial(joint_call.ended_ranks, found)
    if is_store_free:
        _answer(*arguments)
    elif found:
        # A thread that waits in the store blocks other threads, which then never end.
        threading.Thread(target=_answer, args=arguments, name="te_fsdp store", daemon=True).start()
        wait([answer], _STORE_PATIENCE)
    if not answer.done() or (found and answer.exception()):
        return found
    if ended := answer.result():
        with suppress(dist.DistError, ConnectionError):
            joint_call.wait_for_readers(lambda: len(joint_call.ranks) - len(ended))
    return ended


def _answer(future: Future[T], call: Callable[[], T]) -> None:
    """Set a future to the result or the error of a call."""
    try:
        future.set_result(call())
    except BaseException as error:
        future.set_exception(error)
