"""Collective calls that start only after all their ranks have entered them.

Training steps (forward, backward, gradient norm, optimizer) do not synchronize here.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from te_fsdp.collectives.liveness import Liveness
from te_fsdp.errors import CollectiveError, TeFsdpError, message
from te_fsdp.upstream import torch_dtensor as _torch

_log = logging.getLogger("te_fsdp")

#: Seconds until a waiting rank logs the missing ranks.
REPORT_AFTER = 10.0
#: Seconds until a waiting rank checks whether missing ranks are alive, and between two checks.
ASK_AFTER = 3.0
#: Seconds until a waiting rank times out, as in torch's CPU process groups (``default_pg_timeout``).
DEFAULT_TIMEOUT = 1800.0
_GO = b"go"
#: Seconds that waiting ranks get to read an outcome or a record. They poll at least every ``ASK_AFTER`` seconds.
_READING = 5.0
# Maximum number of ranks in a message: longer lists are not readable, and each rank costs requests.
_NAMED = 8
#: Most ranks that a rank watches.
_NEAR = 64

# [Note: ranks that have ended] Before its first call, each rank writes the key ``alive/<rank>``. Ranks that wait, for
# a call or within one, use it to check whether the others are alive (:mod:`te_fsdp.collectives.liveness`). If a process
# has ended, all ranks raise at once instead of after the timeout.


@dataclass(frozen=True)
class Running:
    """A collective call that has begun."""

    rendezvous: Rendezvous | None  #: ``None`` for one rank
    in_thread: bool = False  #: Whether this is a thread of :mod:`te_fsdp.collectives.watching`


#: The collective call that this thread is in.
running_call: ContextVar[Running | None] = ContextVar("te_fsdp call", default=None)


@dataclass
class _Job:
    """State of a default process group."""

    last: dict[tuple[int, ...], tuple[int, str]] = field(default_factory=dict)  #: Number and name by ranks
    addresses: dict[tuple[int, ...], dict[int, str]] = field(default_factory=dict)  #: Addresses by ranks
    send: Callable[[str], Any] | None = None  #: Sends an error to ranks that wait for a message
    #: Error of a call that was interrupted on a rank, and the handles of its messages
    interrupted: tuple[str, Any] | None = None


@dataclass
class _Process:
    timeout: float = DEFAULT_TIMEOUT
    liveness: Liveness = field(default_factory=Liveness)
    jobs: WeakKeyDictionary[Any, _Job] = field(default_factory=WeakKeyDictionary)  #: By default process group


_process = functools.cache(_Process)


def _job() -> _Job:
    return _process().jobs.setdefault(dist.group.WORLD, _Job())


def liveness() -> Liveness:
    """Return this process' port and connections."""
    return _process().liveness


def send_interrupts(send: Callable[[str], Any]) -> None:
    """Call a function with the error of an interrupted call of this rank, and keep its result. Local operation."""
    _job().send = send


def is_simulated() -> bool:
    """Return whether the other ranks are simulated: torch's fake process group returns the data that the rank sends."""
    return dist.get_backend() == "fake"


def is_capturing() -> bool:
    """Return whether a CUDA graph is being captured, which forbids reading values or waiting for other ranks."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def set_collective_timeout(seconds: float) -> None:
    """Set how long ranks wait for each other in a collective call before all of them raise ``CollectiveError``.

    The timeout applies to the calls of te_fsdp outside the training step (``Meshes.build``, ``fully_shard``,
    ``materialize``, ``shard_optimizer``, ``broadcast_params``, ``checkpoint.save`` and ``load``, ...). It applies to
    this process and to later calls. The shortest timeout among the ranks decides. All-gathers with
    ``transport="copy_engine"`` use each rank's own timeout. A checkpoint save waits as long for each
    rank that is still writing, or stopped, and logs the rank after 10, 20, 40, ... seconds. Local operation.

    Args:
        seconds: More than 0; 1800 (half an hour) by default. Choose more than the longest time that one rank works
            alone, for example in an evaluation.

    Raises:
        CollectiveError: Not a positive number.
    """
    if not isinstance(seconds, int | float) or not seconds > 0:
        raise CollectiveError(
            "set_collective_timeout: seconds",
            expected="a positive number",
            got=repr(seconds),
            fix="te_fsdp.set_collective_timeout(1800), the default",
        )
    _process().timeout = float(seconds)


def collective_timeout() -> float:
    """Return the timeout in seconds (:func:`set_collective_timeout`)."""
    return _process().timeout


@contextmanager
def collective_call(call: str, mesh: DeviceMesh | None = None) -> Iterator[None]:
    """Enter the context only after all ranks have reached it. Nested calls do not wait again.

    Collective over the ranks of ``mesh`` (``None``: all), through the store of the default process group. Nothing is
    sent for one rank or for torch's fake process group. ``call`` names the public call, the same on all ranks.

    Raises:
        CollectiveError: On all participating ranks: a rank did not arrive within :func:`set_collective_timeout`, or
            entered a different call.
    """
    # The outer call has brought all ranks here. A second rendezvous would also fail if only some ranks make
    # the inner call.
    if running_call.get() is not None:
        yield
        return
    rendezvous: Rendezvous | None = None
    if dist.is_initialized() and not is_simulated():
        ranks = tuple(range(dist.get_world_size()) if mesh is None else sorted(mesh.mesh.flatten().tolist()))
        if len(ranks) > 1:
            rendezvous = Rendezvous.next(call, ranks)
            rendezvous.refuse_after_interrupt()
    try:
        if rendezvous is not None:
            rendezvous.wait()
        running_call.set(Running(rendezvous))
        yield
    except (KeyboardInterrupt, SystemExit) as error:
        if rendezvous is not None:
            rendezvous.interrupt(error)
        raise
    finally:
        running_call.set(None)


@contextmanager
def errors_interrupt() -> Iterator[None]:
    """Let the other ranks of the running call raise if this rank raises an error that ranks have not agreed on."""
    try:
        yield
    except TeFsdpError:
        raise
    except Exception as error:
        running = running_call.get()
        if running is not None and running.rendezvous is not None:
            running.rendezvous.interrupt(error)
        raise


def full_name(call: str) -> str:
    """Return the name of a call for messages: te_fsdp's, or that of a method or function of a different owner."""
    owner = call.partition(".")[0]
    is_other = (
        owner != call
        and owner.isidentifier()
        and owner not in ("Meshes", "Muon", "checkpoint", "huggingface")
    )
    return call if is_other else f"te_fsdp.{call}"


def ended_error(call: str, ended: list[int], size: int, own: Exception | None = None) -> CollectiveError:
    """Return the error for ranks that have ended. ``own`` is this rank's error, if the collective has raised one."""
    return _with_end(
        f"{full_name(call)}: {format_ranks(ended)} {'has' if len(ended) == 1 else 'have'} ended",
        expected=f"the call on all {size} ranks",
        got="an ended process (its connection is closed)"
        + (f", and here {type(own).__name__}: {(str(own).splitlines() or [''])[0][:200]}" if own else ""),
    )


def _with_end(what: str, got: str, expected: str | None = None) -> CollectiveError:
    why = "It may have been killed or have raised an error; check its own output"
    fix = "restart the job from its last checkpoint"
    error = CollectiveError(what, expected=expected, got=got, why=why, fix=fix)
    error.has_ended = True
    return error


@contextmanager
def store_errors(call: str) -> Iterator[None]:
    """Raise an error that names the process that hosted the store, in place of errors of a lost connection to it."""
    try:
        yield
    except (dist.DistError, ConnectionError) as lost:
        holder = "torchrun's agent" if _agent_has_store() else "rank 0"
        raise _with_end(
            f"{full_name(call)}: {holder}, which hosts the store of torch.distributed, has ended",
            got=f"{type(lost).__name__}: {str(lost).splitlines()[0]:.200}",
        ) from lost


def _start_of_job() -> str:
    """Return the part of the keys that distinguishes one start of an elastic job from another, same on all ranks."""
    # torchrun's agent keeps its store across restarts, including the keys of dead ranks. Each node counts its own
    # restarts. Therefore only a single-node job can distinguish all its starts. Other jobs distinguish starts with
    # different numbers of ranks (docs/nodes.md).
    if not _agent_has_store():
        return ""
    is_one_node = os.environ.get("GROUP_WORLD_SIZE") == "1"
    restarts = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") if is_one_node else ""
    # Not TORCHELASTIC_RESTART_COUNT of several nodes: ranks with different counts would use different keys.
    return f"{dist.get_world_size()}.{restarts}/"


def _agent_has_store() -> bool:
    """Return whether torchrun's agent hosts the store; otherwise rank 0 does."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


# [Note: rendezvous] A call that only some ranks make (``if rank == 0: checkpoint.save(...)``) would block inside a
# collective, where te_fsdp cannot apply a timeout. Therefore calls outside the training step first synchronize through
# the key-value store of ``torch.distributed`` (usually torchrun's TCPStore). The n-th call of a set of ranks uses keys
# under ``te_fsdp/calls/<ranks>/<n>/``:
#
#     <rank>      name of the call that the rank has entered; the rank removes it in its next call
#     came        number of ranks that have entered any call
#     in/<call>   number of ranks that have entered this call
#     outcome     ``go``, or the text of the error that all ranks raise. The first writer decides (compare-and-set), so
#                 that ranks that time out agree with a rank that arrives at that moment
#
# A call costs each rank a few requests, independent of the number of ranks. Missing ranks are searched for only after
# ``REPORT_AFTER`` seconds.
@dataclass(frozen=True)
class Rendezvous:
    """The n-th joint call of a set of ranks, as seen by one of them."""

    call: str
    ranks: tuple[int, ...]
    number: int
    own_rank: int  # global rank of this process
    before: str  # name of the previous call, which has ended on every rank that has entered this one
    store: Any

    @classmethod
    def next(cls, call: str, ranks: tuple[int, ...]) -> Rendezvous:
        """Return the next joint call of these ranks."""
        last_calls = _job().last
        number, before = last_calls.get(ranks, (-1, ""))
        last_calls[ranks] = number + 1, call
        is_world = len(ranks) == dist.get_world_size()
        name = "world" if is_world else hashlib.blake2b(repr(ranks).encode(), digest_size=8).hexdigest()
        store = dist.PrefixStore(f"te_fsdp/calls/{_start_of_job()}{name}", _torch.default_store())
        return cls(call, ranks, number + 1, dist.get_rank(), before, store)

    def wait(self) -> None:
        """Enter the call and wait for all ranks. Raises ``CollectiveError`` on all ranks if some do not arrive."""
        own_rank, number, store = self.own_rank, self.number, self.store
        with store_errors(self.call):
            address = _process().liveness.publish()
            if number == 0 and address:
                store.set(f"alive/{own_rank}", address)
            # Before counting: a rank that sees all ranks counted can read all names.
            store.set(f"{number}/{own_rank}", self.call)
            # Two counters: ranks in this call, and ranks in any call. If they differ, ranks are in different calls.
            in_this_call = store.add(f"{number}/in/{self.call}", 1)
            arrived = store.add(f"{number}/came", 1)
            # The store is never cleared as a whole, so keys of the previous call are deleted by the next one.
            store.delete_key(f"{number - 1}/{own_rank}")
            if arrived == len(self.ranks):
                same_call = in_this_call == arrived or store.add(f"{number}/in/{self.call}", 0) == arrived
                self._write_outcome(_GO if same_call else self._different_calls_error().encode())
                for key in ("came", f"in/{self.before}", "outcome"):
                    store.delete_key(f"{number - 1}/{key}")
            outcome = self._outcome()
            if outcome != _GO:
                self.wait_for_readers(lambda: max(arrived, store.add(f"{number}/came", 0)))
                raise CollectiveError(outcome.decode())
            if number == 0:
                # Read the addresses of the next ranks, which all have published, and reach their machines.
                position, size = self.ranks.index(own_rank), len(self.ranks)
                following = [self.ranks[(position + step) % size] for step in range(1, min(size, _NEAR))]
                if not store.check([f"alive/{rank}" for rank in following]):  # a rank has no free port
                    following = [rank for rank in following if store.check([f"alive/{rank}"])]
                values = store.multi_get([f"alive/{rank}" for rank in following]) if following else []
                addresses = {rank: value.decode() for rank, value in zip(following, values, strict=True)}
                _job().addresses[self.ranks] = addresses
                _process().liveness.reach_machines(addresses.values())

    # [Note: interrupted calls] A script may catch KeyboardInterrupt or SystemExit of a call, while the other ranks wait
    # within it. Before all have arrived, the outcome is the error. Later, ranks that watch a collective read a key, and
    # those that wait for a message receive the error. Later calls would match with collectives of the call that have
    # begun on some ranks only, so that they raise.
    def interrupt(self, error: BaseException) -> None:
        """Let the other ranks raise, in this call or the next one. Local operation."""
        text = message(
            f"{full_name(self.call)}: interrupted on rank {self.own_rank} by {type(error).__name__}",
            expected=f"the call to its end on all {len(self.ranks)} ranks",
            got=f"{error!r:.200} on rank {self.own_rank}, which the script has caught",
            why="Ranks wait for each other in collectives of the call",
            fix="end the job on all ranks, and restart it from its last checkpoint",
        )
        with suppress(dist.DistError, ConnectionError):
            self._write_outcome(text.encode())
            if self.store.get(f"{self.number}/outcome") == _GO:
                self.store.set(f"{self.number}/interrupted", text)
                _job().interrupted = text, (_job().send or len)(text)

    def raise_if_interrupted(self, client: Any = None) -> None:
        """Raise CollectiveError if the call was interrupted on another rank. ``client``: other client of the store."""
        store, key = client or self.store, f"{self.number}/interrupted"
        if store.check([key]):
            text = store.get(key).decode()
            _job().interrupted = text, None
            raise CollectiveError(text)

    def refuse_after_interrupt(self) -> None:
        """Raise CollectiveError, on all ranks of this call, if an earlier call was interrupted."""
        if interrupted := _job().interrupted:
            self._write_outcome(interrupted[0].encode())
            raise CollectiveError(interrupted[0])

    def wait_for_readers(self, expected: Callable[[], int]) -> None:
        """Wait on rank 0 until the others have read an error: the store may end with rank 0 after the error."""
        read, until = self.store.add(f"{self.number}/read", 1), time.monotonic() + _READING
        while self.own_rank == 0 and time.monotonic() <= until and read < expected():
            time.sleep(0.05)
            read = self.store.add(f"{self.number}/read", 0)

    def ended_ranks(self, found: list[int]) -> list[int]:
        """Return the ranks that the first rank to find any has found ended; ``found`` on that rank itself.

        Ranks that raise then end, too, so that later ones would find more.
        """
        key = f"{self.number}/ended"
        recorded = self.store.get(key).decode() if self.store.check([key]) else ""
        if found and not self._is_current(recorded):
            lines = [f"{rank} {self.store.get(f'alive/{rank}').decode()}" for rank in found]
            recorded = self.store.compare_set(key, recorded, "\n".join(lines)).decode()
        if not self._is_current(recorded):
            return []
        return [int(line.partition(" ")[0]) for line in recorded.splitlines()]

    def _is_current(self, recorded: str) -> bool:
        """Return whether a record is of this start of the job, in which the ranks have these addresses."""
        entries = [line.partition(" ") for line in recorded.splitlines()]
        keys = [f"alive/{rank}" for rank, _, _ in entries]
        return (
            bool(keys)
            and self.store.check(keys)
            and [value.decode() for value in self.store.multi_get(keys)]
            == [address for _, _, address in entries]
        )

    def addresses(self) -> dict[int, str]:
        """Return the addresses of the next ranks."""
        return _job().addresses.get(self.ranks, {})

    def _write_outcome(self, outcome: bytes) -> None:
        """Write the outcome unless another rank has written it."""
        self.store.compare_set(f"{self.number}/outcome", "", outcome.decode())

    def _outcome(self) -> bytes:
        """Return the outcome. While waiting, log the missing ranks; after the timeout, write an error as outcome."""
        key, began, report_at, ask_at = f"{self.number}/outcome", time.monotonic(), REPORT_AFTER, ASK_AFTER
        while not self.store.check([key]):
            waited, timeout = time.monotonic() - began, _process().timeout
            if waited >= timeout:
                arrived = self.store.add(f"{self.number}/came", 0)
                error = message(
                    f"{full_name(self.call)}: {self._format_missing(arrived)} not called it",
                    expected=f"the call on all {len(self.ranks)} ranks",
                    got=f"the call on {arrived} of them after {waited:.0f} s",
                    why="It is a collective call; the ranks that made it have timed out",
                    fix="make the call on every rank (not under `if rank == 0`), or increase the timeout: "
                    "te_fsdp.set_collective_timeout(seconds)",
                )
                self._write_outcome(error.encode())
                continue
            if waited >= ask_at:
                ask_at = waited + ASK_AFTER
                if ended := self._exited_ranks():
                    self._write_outcome(str(ended_error(self.call, ended, len(self.ranks))).encode())
                    continue
            if waited >= report_at:
                self._report(waited)
                # After 10, 20, 40, ... seconds, at last every 5 minutes.
                report_at = min(2 * waited, waited + 300)
            # Polled, because a blocking wait in the store prints its own warnings. Short intervals at first, longer
            # ones later, so that thousands of ranks do not overload the store.
            time.sleep(min(max(waited / 10, 1e-3), 1.0, max(timeout - waited, 1e-3)))
        return self.store.get(key)

    def _exited_ranks(self) -> list[int]:
        """Return missing ranks whose processes have ended. Each rank checks first the ranks after itself."""
        # The store of several nodes may contain addresses of dead ranks of an earlier start (:func:`_start_of_job`).
        if self.number == 0 and _agent_has_store() and os.environ.get("GROUP_WORLD_SIZE") != "1":
            return []
        position = self.ranks.index(self.own_rank)
        missing = self._without_key((*self.ranks[position + 1 :], *self.ranks[:position]), _NAMED)
        alive = [rank for rank in missing if self.store.check([f"alive/{rank}"])]
        ended = _process().liveness.ended({rank: self.store.get(f"alive/{rank}").decode() for rank in alive})
        # A rank may have entered the call and ended since. It then counts as present.
        return [rank for rank in ended if not self.store.check([f"{self.number}/{rank}"])]

    def _report(self, waited: float) -> None:
        """Log the missing ranks. Write an error as outcome if some ranks are in a different call."""
        arrived = self.store.add(f"{self.number}/came", 0)
        # add(key, 0) reads a counter without waiting for a key that does not exist yet.
        if arrived != self.store.add(f"{self.number}/in/{self.call}", 0):
            self._write_outcome(self._different_calls_error().encode())
        elif arrived < len(self.ranks):
            _log.warning(
                "%s: rank %d has waited %.0f s. Of %d ranks, %s not called it yet. All of them must call it.",
                full_name(self.call),
                dist.get_rank(),
                waited,
                len(self.ranks),
                self._format_missing(arrived),
            )

    def _different_calls_error(self) -> str:
        """Build the error text for ranks that are in different calls."""
        named: dict[str, list[int]] = {}
        for rank in self.ranks:
            # get would block for a rank that has not arrived.
            if self.store.check([f"{self.number}/{rank}"]):
                named.setdefault(self.store.get(f"{self.number}/{rank}").decode(), []).append(rank)
        calls = "; ".join(f"{format_ranks(ranks)} in {full_name(call)}" for call, ranks in named.items())
        return message(
            f"{full_name(self.call)}: the ranks are in different calls",
            expected=f"the same call on all {len(self.ranks)} ranks",
            got=calls,
            why="Mismatched collective calls would wait for each other forever",
            fix="make the same calls in the same order on every rank",
        )

    def _format_missing(self, arrived: int) -> str:
        """Format the missing ranks with the start of the verb, for example 'ranks 1, 3 have'."""
        missing = len(self.ranks) - arrived
        absent = self._without_key(self.ranks, min(missing, _NAMED))
        more = f" and {missing - len(absent)} more" if missing > len(absent) else ""
        return f"{format_ranks(absent)}{more} {'has' if missing == 1 else 'have'}"

    def _without_key(self, ranks: tuple[int, ...], most: int) -> list[int]:
        """Return the first ``most`` missing ranks by bisection, which takes few requests if few ranks are missing."""
        if most <= 0 or self.store.check([f"{self.number}/{rank}" for rank in ranks]):
            return []
        if len(ranks) == 1:
            return list(ranks)
        half = len(ranks) // 2
        first = self._without_key(ranks[:half], most)
        return first + self._without_key(ranks[half:], most - len(first))


def format_ranks(ranks: list[int]) -> str:
    """Format ranks for a message and join consecutive ones, for example 'ranks 0-2, 5'."""
    parts: list[list[int]] = []
    for rank in ranks:
        if parts and rank == parts[-1][-1] + 1:
            parts[-1][1:] = [rank]
        else:
            parts.append([rank])
    shown = ", ".join("-".join(map(str, part)) for part in parts[:_NAMED])
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {shown}{', ...' if len(parts) > _NAMED else ''}"
