"""Collective calls begin when all their ranks have come; who waits says for whom, and gives up on all ranks alike.

A call that only some ranks make (``if rank == 0: checkpoint.save(...)``) would leave them in a collective that no
timeout of ours can end. So the calls outside the training step first meet in the key-value store that
``torch.distributed`` keeps anyway (torchrun's TCPStore, as a rule). Keys under ``te_fsdp/calls/<ranks>/<n>/``, for the
n-th call that these ranks make together:

    <rank>      name of the call that the rank is in; the rank removes it in its next call
    came        how many ranks have come, in whatever call
    in/<call>   how many of them in this call
    outcome     ``go``, or the text of the error that all raise: whoever writes it first decides (compare-and-set), so
                that ranks which give up and the one that comes in this very moment agree

Before its first call a rank writes ``alive/<rank>``, by which a rank that waits asks whether the missing ones live
(:mod:`te_fsdp.liveness`). If one has ended, all raise at once, and not after half an hour.

A call costs a rank a handful of requests, however many ranks there are; only after ``REPORT_AFTER`` seconds does anyone
look for the missing ones. Steps (forward, backward, gradient norm, optimizer) do not meet here.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from te_fsdp import _torch
from te_fsdp.errors import CollectiveError, message
from te_fsdp.liveness import Liveness

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_log = logging.getLogger("te_fsdp")

#: Seconds until a waiting rank says for whom it waits.
REPORT_AFTER = 10.0
#: Seconds until it asks whether missing ranks live, and between two such questions.
ASK_AFTER = 3.0
#: Seconds until it gives up: that of torch's process groups on the CPU (``default_pg_timeout``).
DEFAULT_TIMEOUT = 1800.0
_GO = b"go"
#: Seconds in which ranks that wait read an outcome: they ask for it at least once in a second.
_READING = 3.0
# At most so many ranks are named; more would not be read, and each costs requests.
_NAMED = 8


@dataclass
class _Process:
    """What a process keeps: its timeout, whether this thread is in a call, and the calls of each set of ranks."""

    timeout: float = DEFAULT_TIMEOUT
    thread: threading.local = field(default_factory=threading.local)
    liveness: Liveness = field(default_factory=Liveness)
    #: Default process group -> ranks -> number and name of their last call. Gone with the process group.
    last: WeakKeyDictionary[Any, dict[tuple[int, ...], tuple[int, str]]] = field(
        default_factory=WeakKeyDictionary
    )


_process = functools.cache(_Process)


def is_simulated() -> bool:
    """Whether the other ranks do not exist: torch's fake process group answers a rank with what the rank has sent."""
    return dist.get_backend() == "fake"


def is_capturing() -> bool:
    """Whether a CUDA graph is being captured: nobody may look at values then, nor meet others."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def set_collective_timeout(seconds: float) -> None:
    """How long the ranks of a collective call wait for each other before all of them raise ``CollectiveError``.

    It holds for the calls of te_fsdp outside the training step (``Meshes.build``, ``fully_shard``, ``materialize``,
    ``shard_optimizer``, ``broadcast_params``, ``checkpoint.save`` and ``load``, ...), in this process, from now on; the
    shortest timeout among the ranks decides. Gathers by ``transport="copy_engine"`` wait as long too, each rank by its
    own, and so do the ranks of a checkpoint for one that still writes when they have written. Local operation.

    Args:
        seconds: More than 0; 1800 (half an hour) by default. A rank may come so much later than the first: make it
            longer than what one rank alone does at times, such as an evaluation.

    Raises:
        CollectiveError: Not a positive number.
    """
    if not isinstance(seconds, int | float) or not seconds > 0:
        raise CollectiveError(
            "set_collective_timeout", expected="a positive number of seconds", got=repr(seconds)
        )
    _process().timeout = float(seconds)


def collective_timeout() -> float:
    """Seconds that ranks wait for each other (:func:`set_collective_timeout`)."""
    return _process().timeout


@contextmanager
def collective_call(call: str, mesh: DeviceMesh | None = None) -> Iterator[None]:
    """What is in the context begins when all ranks have come to it; calls in the context do not wait again.

    Collective over the ranks of ``mesh`` (``None``: all), through the store of the default process group; nothing is
    sent where that has one rank or is torch's fake one. ``call`` names the public call, the same on all ranks.

    Raises:
        CollectiveError: On all ranks that come: some did not within :func:`set_collective_timeout`, or made another
            call.
    """
    thread = _process().thread
    if getattr(thread, "inside", False):
        yield
        return
    if dist.is_initialized() and not is_simulated():
        ranks = range(dist.get_world_size()) if mesh is None else sorted(mesh.mesh.flatten().tolist())
        if len(ranks) > 1:
            _Meeting.next(call, tuple(ranks)).wait()
    thread.inside = True
    try:
        yield
    finally:
        thread.inside = False


def _start_of_job() -> str:
    """Part of the keys that tells one start of an elastic job from another in the same store; the same on all ranks.

    torchrun's agent keeps its store when it starts the ranks again, with what dead ones have written. Each node counts
    its own restarts, so that only a job of one node can tell all its starts apart, others those on other numbers of
    ranks (docs/nodes.md).
    """
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return ""
    is_one_node = os.environ.get("GROUP_WORLD_SIZE") == "1"
    restarts = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") if is_one_node else ""
    return f"{dist.get_world_size()}.{restarts}/"


def _may_be_of_an_earlier_start() -> bool:
    """Return whether the store may have addresses of dead ranks of an earlier start: see :func:`_start_of_job`."""
    return (
        os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" and os.environ.get("GROUP_WORLD_SIZE") != "1"
    )


@dataclass(frozen=True)
class _Meeting:
    """The n-th call that a set of ranks makes together, as one of them sees it."""

    call: str
    ranks: tuple[int, ...]
    number: int
    me: int  # this rank, in the world
    before: str  # name of the call before, which has ended for all who have come to this one
    store: Any

    @classmethod
    def next(cls, call: str, ranks: tuple[int, ...]) -> _Meeting:
        """Take part in the next meeting of these ranks."""
        known = _process().last.setdefault(dist.group.WORLD, {})
        number, before = known.get(ranks, (-1, ""))
        known[ranks] = number + 1, call
        whole = len(ranks) == dist.get_world_size()
        name = "world" if whole else hashlib.blake2b(repr(ranks).encode(), digest_size=8).hexdigest()
        store = dist.PrefixStore(f"te_fsdp/calls/{_start_of_job()}{name}", _torch.default_store())
        return cls(call, ranks, number + 1, dist.get_rank(), before, store)

    def wait(self) -> None:
        """Come, and wait until all have. Raises ``CollectiveError`` on all ranks if they do not."""
        try:
            self._meet()
        except (dist.DistError, ConnectionError) as lost:
            holder = (
                "torchrun's agent" if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" else "rank 0"
            )
            raise CollectiveError(
                f"te_fsdp.{self.call}: {holder}, which keeps the store of torch.distributed, has ended",
                got=f"{type(lost).__name__}: {str(lost).splitlines()[0]:.200}",
                why="It may have been killed, or have raised an error; its own output says which",
                fix="start the job again from its last checkpoint",
            ) from lost

    def _meet(self) -> None:
        me, number, address = self.me, self.number, _process().liveness.publish()
        if number == 0 and address:
            self.store.set(f"alive/{me}", address)
        self.store.set(f"{number}/{me}", self.call)  # before it is counted: who counts all ranks can ask all
        mine = self.store.add(f"{number}/in/{self.call}", 1)
        came = self.store.add(f"{number}/came", 1)
        self.store.delete_key(f"{number - 1}/{me}")
        if came == len(self.ranks):
            everyone_here = mine == came or self.store.add(f"{number}/in/{self.call}", 0) == came
            self._settle(_GO if everyone_here else self._other_calls().encode())
            for key in ("came", f"in/{self.before}", "outcome"):
                self.store.delete_key(f"{number - 1}/{key}")
        outcome = self._outcome()
        if outcome != _GO:
            self._let_others_read(came)
            raise CollectiveError(outcome.decode())

    def _let_others_read(self, came: int) -> None:
        """Wait on rank 0, which may keep the store and end after the error, until the others have read the outcome."""
        read, until = self.store.add(f"{self.number}/read", 1), time.monotonic() + _READING
        while self.me == 0 and read < max(came, self.store.add(f"{self.number}/came", 0)):
            if time.monotonic() > until:
                return
            time.sleep(0.05)
            read = self.store.add(f"{self.number}/read", 0)

    def _settle(self, outcome: bytes) -> None:
        """Decide, unless another rank has."""
        self.store.compare_set(f"{self.number}/outcome", "", outcome.decode())

    def _outcome(self) -> bytes:
        """What was decided; says meanwhile for whom this rank waits, and gives up in the end."""
        key, began, report_at, ask_at = f"{self.number}/outcome", time.monotonic(), REPORT_AFTER, ASK_AFTER
        while not self.store.check([key]):
            waited, timeout = time.monotonic() - began, _process().timeout
            if waited >= timeout:
                self._settle(self._gave_up(waited).encode())
                continue
            if waited >= ask_at:
                ask_at = waited + ASK_AFTER
                if ended := self._ended():
                    self._settle(self._lost(ended).encode())
                    continue
            if waited >= report_at:
                self._report(waited)
                report_at = min(2 * waited, waited + 300)
            # Polled, since a wait in the store would print warnings of its own: at once after short waits, and
            # seldom enough after long ones that thousands of ranks do not keep the store busy.
            time.sleep(min(max(waited / 10, 1e-3), 1.0, max(timeout - waited, 1e-3)))
        return self.store.get(key)

    def _ended(self) -> list[int]:
        """Return missing ranks whose processes have ended. Of many, each rank asks those that follow itself."""
        if self.number == 0 and _may_be_of_an_earlier_start():
            return []
        at = self.ranks.index(self.me)
        missing = self._without_key((*self.ranks[at + 1 :], *self.ranks[:at]), _NAMED)
        known = [rank for rank in missing if self.store.check([f"alive/{rank}"])]
        ended = [
            rank for rank in known if _process().liveness.has_ended(self.store.get(f"alive/{rank}").decode())
        ]
        # A rank may have come and ended since: then it is in this call as the others are.
        return sorted(rank for rank in ended if not self.store.check([f"{self.number}/{rank}"]))

    def _lost(self, ended: list[int]) -> str:
        return message(
            f"te_fsdp.{self.call}: {ranks_in_words(ended)} {'has' if len(ended) == 1 else 'have'} ended",
            expected=f"the call on all {len(self.ranks)} ranks",
            got="a process that is gone: its connection is closed",
            why="It may have been killed, or have raised an error; its own output says which",
            fix="start the job again from its last checkpoint",
        )

    def _report(self, waited: float) -> None:
        """Log who has not come; or decide that nobody need wait, if some are in another call."""
        came = self.store.add(f"{self.number}/came", 0)
        if came != self.store.add(f"{self.number}/in/{self.call}", 0):
            self._settle(self._other_calls().encode())
        elif came < len(self.ranks):
            _log.warning(
                "te_fsdp.%s: rank %d has waited for %.0f s: of %d ranks, %s not called it yet. It is a collective "
                "call: every rank must make it.",
                self.call,
                dist.get_rank(),
                waited,
                len(self.ranks),
                self._absent(came),
            )

    def _gave_up(self, waited: float) -> str:
        came = self.store.add(f"{self.number}/came", 0)
        return message(
            f"te_fsdp.{self.call}: {self._absent(came)} not called it",
            expected=f"the call on all {len(self.ranks)} ranks",
            got=f"it on {came} of them after {waited:.0f} s",
            why="It is collective: the ranks that made it have given up",
            fix="make the call on every rank (not under `if rank == 0`), or give ranks that come later more time: "
            "te_fsdp.set_collective_timeout(seconds)",
        )

    def _other_calls(self) -> str:
        """Error text for ranks that are in different calls."""
        named: dict[str, list[int]] = {}
        for rank in self.ranks:
            if self.store.check([f"{self.number}/{rank}"]):
                named.setdefault(self.store.get(f"{self.number}/{rank}").decode(), []).append(rank)
        calls = "; ".join(f"{ranks_in_words(ranks)} in te_fsdp.{call}" for call, ranks in named.items())
        return message(
            f"te_fsdp.{self.call}: the ranks are in different calls",
            expected=f"the same call on all {len(self.ranks)} ranks",
            got=calls,
            why="Collective calls that do not match would wait for each other for ever",
            fix="make the same calls in the same order on every rank",
        )

    def _absent(self, came: int) -> str:
        """Ranks without a key, and the verb's beginning: 'ranks 1, 3 have'."""
        missing = len(self.ranks) - came
        found = self._without_key(self.ranks, min(missing, _NAMED))
        more = f" and {missing - len(found)} more" if missing > len(found) else ""
        return f"{ranks_in_words(found)}{more} {'has' if missing == 1 else 'have'}"

    def _without_key(self, ranks: tuple[int, ...], most: int) -> list[int]:
        """The first so many ranks that have not come, by halving: few requests where few are missing."""
        if most <= 0 or self.store.check([f"{self.number}/{rank}" for rank in ranks]):
            return []
        if len(ranks) == 1:
            return list(ranks)
        half = len(ranks) // 2
        first = self._without_key(ranks[:half], most)
        return first + self._without_key(ranks[half:], most - len(first))


def ranks_in_words(ranks: list[int]) -> str:
    """Ranks for a message, neighbours joined: 'ranks 0-2, 5'."""
    parts: list[list[int]] = []
    for rank in ranks:
        if parts and rank == parts[-1][-1] + 1:
            parts[-1][1:] = [rank]
        else:
            parts.append([rank])
    shown = ", ".join("-".join(map(str, part)) for part in parts[:_NAMED])
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {shown}{', ...' if len(parts) > _NAMED else ''}"
