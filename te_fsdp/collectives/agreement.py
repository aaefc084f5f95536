"""Cross-rank agreement: either all ranks continue, or all ranks raise.

    :func:`raised_on_all_ranks`  a failing rank raises its own error, the others raise one that names it
    :func:`all_agree`            all raise the same error, or each rank gets its own result
    :func:`from_rank_0`          rank 0 runs the function; all get its result or raise its error
    :meth:`RankMessenger.round`  all send to rank 0, which replies to each, in any thread
    :func:`maximum`, :func:`are_equal`, :func:`gather` and similar: numbers and small objects, then equal on all ranks

Without an error, each rank receives a few numbers, independent of the number of ranks. Objects are gathered only
over few ranks, or when a rank has an error.

Each of these calls waits for all its ranks: :func:`te_fsdp.collectives.rendezvous.collective_call` ensures that
they arrive.
"""

from __future__ import annotations

import _thread
import datetime
import hashlib
import logging
import pickle
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from te_fsdp import errors
from te_fsdp.collectives import rendezvous
from te_fsdp.collectives.groups import shared_group
from te_fsdp.collectives.rendezvous import collective_timeout
from te_fsdp.collectives.watching import all_reduce_maximum, delayed_signals, run_while_all_live
from te_fsdp.errors import CheckpointError, CollectiveError, TeFsdpError
from te_fsdp.upstream.torch_gloo import new_lazy_group

_log = logging.getLogger("te_fsdp")
T = TypeVar("T")
U = TypeVar("U")


def rank() -> int:
    """Return the rank of this process; 0 without torch.distributed."""
    return dist.get_rank() if dist.is_initialized() else 0


def world_size() -> int:
    """Return the number of processes; 1 without torch.distributed."""
    return dist.get_world_size() if dist.is_initialized() else 1


# ------------------------------------------------------------------------------------------- numbers and small objects


def gather(value: T, over: DeviceMesh | dist.ProcessGroup | None = None) -> list[T]:
    """Return every rank's value on every rank. Values are pickled, so keep them small. Collective over the ranks.

    ``over`` is a group, a 1-D mesh, or ``None`` for the world.
    """
    group = over.get_group() if isinstance(over, DeviceMesh) else over
    size = world_size() if group is None else group.size()
    if size == 1:
        return [value]
    if group is None and (ranks := _coordinated.get()) is not None:
        return ranks.round(lambda: value, lambda seen: [seen] * size)
    values: list[Any] = [None] * size
    run_while_all_live(lambda: dist.all_gather_object(values, value, group=group))
    return values


def gather_by_rank(value: T, mesh: DeviceMesh) -> dict[int, T]:
    """Map each global rank of a mesh to its value, for error texts. Collective: :func:`gather` over each axis."""
    values = {rank(): value}
    # Axis by axis, because a mesh has no process group of all its ranks.
    for axis in range(mesh.ndim):
        parts = gather(values, mesh.get_group(axis))
        values = {key: of_rank for part in parts for key, of_rank in part.items()}
    return values


def format_differences(rows: dict[str, str], mesh: DeviceMesh) -> list[str]:
    """Return texts that name the rows that differ between ranks. Collective over ``mesh``."""
    by_rank, lines = sorted(gather_by_rank(rows, mesh).items()), []
    for name in dict.fromkeys(name for _, of_rank in by_rank for name in of_rank):
        ranks: dict[str, list[int]] = {}
        for rank, of_rank in by_rank:
            ranks.setdefault(of_rank.get(name, "missing"), []).append(rank)
        texts = [f"{text} on {rendezvous.format_ranks(on)}" for text, on in ranks.items()]
        lines += [f"{name} {' and '.join(texts)}"] if len(texts) > 1 else []
    return lines


def gather_if_any(value: T) -> list[T]:
    """Call :func:`gather` over the world, or return an empty list if no rank's value is true, as in most checks.

    Collective over the world: an all-reduce of one number, and :func:`gather` if any value is true.
    """
    if (ranks := _coordinated.get()) is not None:
        return ranks.round(lambda: value, lambda seen: [seen if any(seen) else []] * len(seen))
    return gather(value) if on_any_rank(bool(value)) else []


def on_any_rank(value: bool, over: DeviceMesh | dist.ProcessGroup | None = None) -> bool:
    """Return whether ``value`` is true on any rank (``None``: of the world). Collective as :func:`maximum`."""
    if over is None and world_size() == 1:
        return value
    flag = torch.tensor([int(value)], device=_device(over))
    maximum(flag, over)
    return bool(flag.item())


def _device(over: DeviceMesh | dist.ProcessGroup | None) -> str:
    """Return the device type for small messages: the CPU for "cpu:gloo,cuda:nccl", which avoids waiting for the GPU."""
    group = over.get_group(0) if isinstance(over, DeviceMesh) else over
    config = dist.get_backend_config(group)
    return "cpu" if "cpu:" in config else config.partition(":")[0]


def maximum(
    values: torch.Tensor, over: DeviceMesh | dist.ProcessGroup | None = None, *, leave_out: Sequence[str] = ()
) -> None:
    """Compute the maximum over ranks (``None``: the world), elementwise and in place.

    Collective: one all-reduce over a group, or one over each axis of a mesh except ``leave_out``, in sequence, so that
    the result reaches every rank. ``values`` must be on a device of the ranks' process groups. In a
    :func:`te_fsdp.collectives.rendezvous.collective_call`, the host waits, and raises CollectiveError if a rank ends.
    """
    if isinstance(over, DeviceMesh):
        names = over.mesh_dim_names or ("",) * over.ndim
        axes = [axis for axis, name in enumerate(names) if over.size(axis) > 1 and name not in leave_out]
        groups: list[Any] = [over.get_group(axis) for axis in axes]
    else:
        groups = [over]
    for group in groups:
        all_reduce_maximum(values, group)


def are_equal(
    values: torch.Tensor | Sequence[int],
    over: DeviceMesh | dist.ProcessGroup | None = None,
    *,
    device: torch.device | str | None = None,
    leave_out: Sequence[str] = (),
) -> torch.Tensor:
    """Return a bool mask of the integers that are the same on all ranks, with their shape and device.

    The mask is the same on all ranks. Integers must be between -2^62 and 2^62. Collective as :func:`maximum`, with two
    integers for each. Python numbers are moved to ``device``, by default one that the process group supports.
    """
    if not isinstance(values, torch.Tensor):
        values = torch.tensor(values, dtype=torch.int64, device=device or _device(over))
    integers = values.to(torch.int64)
    # The maximum of the negatives is the negative of the minimum, so one collective compares both.
    extremes = torch.stack([integers, -integers])
    maximum(extremes, over, leave_out=leave_out)
    return extremes[0] == -extremes[1]


def digest(data: str | bytes) -> int:
    """Return a 56-bit hash of a text or bytes, for :func:`are_equal`."""
    data = data.encode() if isinstance(data, str) else data
    return int.from_bytes(hashlib.blake2b(data, digest_size=7).digest(), "big")


# -------------------------------------------------------------------------------------------------------------- errors


@contextmanager
def raised_on_all_ranks(mesh: DeviceMesh | None, where: str) -> Iterator[None]:
    """Raise any error of one rank on all ranks of ``mesh`` when the context ends, so that no rank hangs.

    Collective over ``mesh`` (``None``: this rank alone) when the context ends: an all-reduce of one number per axis,
    then a gather of the error text if a rank failed. Collectives inside the context are safe only if failing ranks
    reach them too. ``where`` names the operation in the error of the other ranks.

    Raises:
        TeFsdpError: On ranks without their own error: the class and text of the first failing rank's error.
    """
    own_error: Exception | None = None
    try:
        yield
    except Exception as error:  # raised again below, on every rank
        own_error = error
    if isinstance(own_error, CollectiveError) and own_error.has_ended:
        raise own_error  # the other ranks detect it, too
    problems: dict[int, tuple[str, str] | None] = {}
    if mesh is not None and mesh.size() > 1 and on_any_rank(own_error is not None, mesh):
        problems = gather_by_rank(
            None if own_error is None else (type(own_error).__name__, str(own_error)), mesh
        )
    # The error of this rank first: its traceback shows the cause.
    if own_error is not None:
        raise own_error
    for first, problem in sorted(problems.items()):
        if problem is not None:
            name, error_text = problem
            cls = getattr(errors, name, TeFsdpError) if name in errors.__all__ else TeFsdpError
            raise cls(f"{where} failed on rank {first}: {name}: {error_text}")


def from_rank_0(call: Callable[[], T]) -> T:
    """Run a function on rank 0; return its result or raise its exception on all ranks. Collective over the world.

    Exceptions other than ``TeFsdpError`` become ``CheckpointError``.
    """
    if (ranks := _coordinated.get()) is not None:
        return ranks.round(lambda: None, lambda seen: [result_of(*_call(call, "rank 0: "))] * len(seen))
    outcome: list[Any] = [*_call(call, "rank 0: ")] if rank() == 0 else [None, None]
    if world_size() > 1:
        dist.broadcast_object_list(outcome, src=0)
    if outcome[1] is not None:
        raise outcome[1]
    return outcome[0]


def all_agree(call: Callable[[], T]) -> T:
    """Run a function on every rank; if any rank fails, raise the first error on all. Collective over the world."""
    result, own_error = _call(call)
    if (ranks := _coordinated.get()) is not None:
        ranks.round(lambda: result_of(None, own_error), lambda seen: [None] * len(seen))
        return result  # type: ignore[return-value]
    problem = _first_error(gather_if_any(_serialize_error(own_error)))
    if problem is None:
        return result  # type: ignore[return-value]
    raise problem from (own_error.__cause__ if own_error is not None else None)


def _call(call: Callable[[], T], where: str = "") -> tuple[T | None, TeFsdpError | None]:
    """Return the function's result, and its exception converted to a ``TeFsdpError``."""
    from torch.distributed.checkpoint import CheckpointException  # the caller has already imported DCP

    try:
        return call(), None
    except TeFsdpError as error:
        return None, error
    except (Exception, CheckpointException) as error:  # the latter does not derive from Exception
        converted = CheckpointError(f"{where}{type(error).__name__}: {error}")
        converted.__cause__ = error
        return None, converted


def result_of(result: Any, error: Exception | None) -> Any:
    """Return the result of :func:`_call`, or raise its error."""
    if error is not None:
        raise error
    return result


def _serialize_error(error: TeFsdpError | None) -> tuple[type[TeFsdpError], str] | None:
    return None if error is None else (type(error), str(error))


def _first_error(by_rank: list[tuple[type[TeFsdpError], str] | None]) -> TeFsdpError | None:
    """Return the error of the first failing rank; it lists the failing ranks unless all failed."""
    failed = [r for r, problem in enumerate(by_rank) if problem is not None]
    if not failed:
        return None
    kind, text = by_rank[failed[0]]  # type: ignore[misc]
    if len(failed) < len(by_rank):
        text = f"on rank(s) {', '.join(map(str, failed))}: {text}"
    return kind(text)


# ------------------------------------------------------------------------------------------- a process group of our own


def rank_messenger(*, all_pairs: bool = False) -> RankMessenger:
    """Return the world over te_fsdp's own gloo group, separate from training collectives. Collective at first use.

    Each rank is connected to rank 0, or to all ranks with ``all_pairs``. All connections are made here: a rank that
    ends later is then noticed.
    """
    if world_size() == 1:
        return RankMessenger(0, 1, None)

    def connect() -> RankMessenger:
        group = dist.new_group(backend="gloo") if all_pairs else new_lazy_group()
        messenger = RankMessenger(rank(), world_size(), group)
        if not all_pairs:
            messenger.round(lambda: None, lambda seen: seen)
            rendezvous.send_interrupts(messenger.send_error)
        return messenger

    # It waits for the addresses of all ranks, half an hour for one that ends here.
    return shared_group(("messages", all_pairs), connect)


#: The messenger of this thread's running call, if :func:`through_rank_0` has set one.
_coordinated: ContextVar[RankMessenger | None] = ContextVar("te_fsdp messenger", default=None)


@contextmanager
def through_rank_0(enabled: bool = True) -> Iterator[None]:
    """Send the messages of agreements over the world through rank 0, so that all ranks name a rank that ends.

    A collective of the default process group fails only on the neighbors of the rank that has ended. The others wait
    for a timeout. With ``enabled=False`` agreements are such collectives again, for loops with many of them: rank 0
    sends each rank a message. Collective over the world: :func:`rank_messenger`.
    """
    is_needed = enabled and world_size() > 1 and not rendezvous.is_simulated()
    token = _coordinated.set(rank_messenger() if is_needed else None)
    try:
        yield
    finally:
        _coordinated.reset(token)


@dataclass(frozen=True)
class RankMessenger:
    """Rank 0 as coordinator of all ranks; pickled messages over a dedicated gloo group.

    It works in any thread, for one call at a time, also after the program has destroyed its process groups.
    """

    # Methods of the group object are called, because torch.distributed's functions raise after such an end.

    rank: int  #: Rank of this process
    size: int  #: Number of ranks
    group: Any  #: Their gloo group; ``None`` for one rank

    def round(self, call: Callable[[], T], on_rank_0: Callable[[list[T]], list[U]]) -> U:
        """Run a function on every rank, then run another on rank 0 with all results. Return each rank's reply.

        Collective over the ranks: point-to-point messages to rank 0 and back. An error on any rank is raised on all
        ranks: that of the first failing rank, which lists the failing ranks unless all failed. Errors other than
        ``TeFsdpError`` become ``CheckpointError``. So does a rank that has ended, or is silent for
        :func:`te_fsdp.set_collective_timeout`. While ranks wait, the log names the one that is stopped or busy.
        """
        result, error = _call(call)
        with delayed_signals(), self._log_waits() as peer:
            return self._exchange(result, error, on_rank_0, peer)

    def _exchange(
        self, result: Any, error: TeFsdpError | None, on_rank_0: Callable[[list[T]], list[U]], peer: list[int]
    ) -> U:
        reply: Any
        try:
            if self.rank != 0:
                self._wait(self._send(_pack((result, _serialize_error(error))), 0))
                reply, problem = self._receive(0)()
            else:
                # Rank 0 answers all ranks that are alive, also after an error, so that none of them waits.
                results: list[Any] = [result]
                problems, dead = [_serialize_error(error)], set()
                receives = [self._receive(peer_rank) for peer_rank in range(1, self.size)]
                for peer_rank, receive in enumerate(receives, 1):
                    peer[0] = peer_rank
                    try:
                        value, problem = receive()
                    except RuntimeError as lost:
                        dead.add(peer_rank)
                        text = f"the rank has ended, or was silent for {collective_timeout():.0f} s: {lost}"
                        value, problem = None, (CheckpointError, text)
                    results.append(value)
                    problems.append(problem)
                replies: Any = None
                worst = _first_error(problems)
                peer[0] = self.rank
                if worst is None:
                    replies, worst = _call(lambda: on_rank_0(results))
                replies = [None] * self.size if replies is None else replies
                self._reply(replies, worst, dead, peer)
                reply, problem = replies[0], worst
        except RuntimeError as lost:  # raised by gloo
            if isinstance(lost, TeFsdpError):
                raise
            text = f"the rank, which coordinates the call, has ended, or was silent: {lost}"
            raise CheckpointError(f"on rank(s) 0: {text}") from lost
        if problem is not None:
            raise problem from (error.__cause__ if error is not None else None)
        return reply

    def _reply(self, replies: list[Any], worst: TeFsdpError | None, dead: set[int], peer: list[int]) -> None:
        """Send each living rank its reply and the error of the round."""
        last, message, alive = None, None, [r for r in range(1, self.size) if r not in dead]
        for start in range(0, len(alive), _AT_ONCE):
            sends: dict[int, list[dist.Work]] = {}
            for receiver in alive[start : start + _AT_ONCE]:
                # Most replies are one object for all ranks.
                if message is None or replies[receiver] is not last:
                    last, message = replies[receiver], _pack((replies[receiver], worst))
                sends[receiver] = []
                with self._noted(receiver, peer):
                    sends[receiver] = self._send(message, receiver)
            for receiver, works in sends.items():
                with self._noted(receiver, peer):
                    self._wait(works)

    def send_error(self, text: str) -> list[Any]:
        """Send rank 0, or on rank 0 all ranks, an error that their round raises. Does not wait for them.

        Return the objects that must stay alive until the ranks have received them.
        """
        error, kept, peers = CollectiveError(text), list[Any](), [0] if self.rank else [*range(1, self.size)]
        for peer in peers:
            with suppress(RuntimeError):  # the rank has ended
                kept += self._send(_pack((None, _serialize_error(error) if self.rank else error)), peer)

        def receive() -> None:
            for received in [self._receive(peer) for peer in peers]:
                with suppress(RuntimeError):
                    received()

        # A send of Gloo waits for its receive, also that of a second part.
        _thread.start_new_thread(receive, ())
        return kept

    @contextmanager
    def _noted(self, receiver: int, peer: list[int]) -> Iterator[None]:
        peer[0] = receiver
        try:
            yield
        except RuntimeError as lost:
            # Ranks with a reply go on, so this rank does too. The next round reports the ended one.
            _log.warning("rank %d has ended before its reply: %s", receiver, lost)

    @contextmanager
    def _log_waits(self) -> Iterator[list[int]]:
        """Log the rank in the yielded list, from which this one waits for a message, after 10, 20, 40, ... seconds."""
        peer, ended, began = [0], threading.Event(), time.monotonic()

        def report() -> None:
            # Rank 0 names the late rank first. The others wait for rank 0, which may wait for it.
            due = rendezvous.REPORT_AFTER * (1 if self.rank == 0 else 4)
            while not ended.wait(began + due - time.monotonic()):
                if peer[0] != self.rank:
                    why = "" if peer[0] else ", which answers after all ranks have sent"
                    text = "rank %d has waited %.0f s for a message from rank %d%s. The limit is %.0f s per message."
                    _log.warning(text, self.rank, due, peer[0], why, collective_timeout())
                due = min(2 * due, due + 300)

        # A wait of Gloo cannot be divided: a timeout closes all its connections. A Thread would wait for the start and
        # the end of report, which takes longer than a round if ranks share cores.
        with suppress(RuntimeError):  # no thread can be started while the interpreter ends
            _thread.start_new_thread(report, ())
        try:
            yield peer
        finally:
            ended.set()

    def _send(self, message: list[torch.Tensor], to: int) -> list[dist.Work]:
        """Start to send a message of :func:`_pack`."""
        return [self.group.send([part], to, 0) for part in message]

    def _receive(self, source: int) -> Callable[[], Any]:
        """Start to receive a message; return a function that waits for it and raises Gloo's errors."""
        frame = bytearray(_FRAME)
        try:
            first: dist.Work | RuntimeError = self.group.recv([_tensor_of(frame)], source, 0)
        except RuntimeError as lost:
            first = lost

        def received() -> Any:
            if isinstance(first, RuntimeError):
                raise first
            self._wait([first])
            size = int.from_bytes(frame[:_SIZE], "little")
            rest = bytearray(max(0, size - (_FRAME - _SIZE)))
            if rest:
                self._wait([self.group.recv([_tensor_of(rest)], source, 0)])
            return pickle.loads((frame[_SIZE:] + rest)[:size])

        return received

    def _wait(self, works: list[dist.Work]) -> None:
        for work in works:
            work.wait(datetime.timedelta(seconds=collective_timeout()))


#: Bytes of the first part of a message, and those of the message's size at its start.
_FRAME, _SIZE = 1024, 8
#: Most replies that rank 0 sends at once, each perhaps of some MiB.
_AT_ONCE = 64


def _tensor_of(data: bytearray) -> torch.Tensor:
    return torch.frombuffer(data, dtype=torch.uint8)


def _pack(value: Any) -> list[torch.Tensor]:
    """Pickle a message: a first part of fixed size, for which receivers wait, and a second one with the rest."""
    data = pickle.dumps(value)
    message = bytearray(len(data).to_bytes(_SIZE, "little") + data)
    message.extend(bytes(max(0, _FRAME - len(message))))
    parts = _tensor_of(message).split([_FRAME, len(message) - _FRAME])
    return [part for part in parts if part.numel()]
