"""All ranks go on, or all raise: what checks across ranks are made of.

    :func:`raised_on_all_ranks`  a rank that fails raises its own error, the others one that names it
    :func:`all_agree`            all raise one error; else each rank has its own result
    :func:`from_rank_0`          one rank works for all, which get its result or raise its error
    :meth:`Ranks.round`          all tell rank 0, which answers each, in any thread
    :func:`maximum`, :func:`on_any_rank`, :func:`are_equal`, :func:`gather`, :func:`gather_if_any`
                                 numbers and small objects, the same on all ranks afterwards

Where nothing is wrong, a rank receives a few numbers however many ranks there are: objects are gathered over few ranks,
or when some rank has something to tell.

Whoever uses one of them waits for all its ranks: :func:`te_fsdp.all_ranks.collective_call` makes sure that they come.
"""

from __future__ import annotations

import datetime
import functools
import hashlib
import pickle
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from te_fsdp import errors
from te_fsdp.all_ranks import collective_timeout
from te_fsdp.errors import CheckpointError, TeFsdpError

T = TypeVar("T")
U = TypeVar("U")

# Odd multiplier of a linear congruential generator (Knuth): mixes positions for checksums.
_MULTIPLIER = 6364136223846793005
# Words at a time: each takes 24 bytes while its checksum is computed, and embeddings have a thousand million.
_PIECE = 1 << 23


def rank() -> int:
    """This process' rank; 0 without torch.distributed."""
    return dist.get_rank() if dist.is_initialized() else 0


def world_size() -> int:
    """Number of processes; 1 without torch.distributed."""
    return dist.get_world_size() if dist.is_initialized() else 1


# ------------------------------------------------------------------------------------------- numbers and small objects


def gather(value: T, over: DeviceMesh | dist.ProcessGroup | None = None) -> list[T]:
    """Every rank's value, on every rank: values are pickled, so keep them small. Collective over the ranks.

    ``over`` is a group, a 1-D mesh, or ``None`` for the world.
    """
    group = over.get_group() if isinstance(over, DeviceMesh) else over
    size = world_size() if group is None else group.size()
    if size == 1:
        return [value]
    values: list[Any] = [None] * size
    dist.all_gather_object(values, value, group=group)
    return values


def by_rank(value: T, mesh: DeviceMesh) -> dict[int, T]:
    """Global rank -> its value, of all ranks of a mesh. Collective: :func:`gather` over each axis, for errors."""
    told = {rank(): value}
    for axis in range(mesh.ndim):
        if mesh.size(axis) > 1:
            told = {key: own for part in gather(told, mesh.get_group(axis)) for key, own in part.items()}
    return told


def gather_if_any(value: T) -> list[T]:
    """As :func:`gather` over the world, or an empty list where no rank's value is true, as after most checks.

    Collective over the world: an all-reduce of one number, and :func:`gather` if any value is true.
    """
    return gather(value) if on_any_rank(bool(value)) else []


def on_any_rank(mine: bool, over: DeviceMesh | dist.ProcessGroup | None = None) -> bool:
    """Whether it holds on any rank; ``None``: of the world. Collective as :func:`maximum`, of one number."""
    if over is None and world_size() == 1:
        return mine
    told = torch.tensor([int(mine)], device=_device(over))
    maximum(told, over)
    return bool(told.item())


def _device(over: DeviceMesh | dist.ProcessGroup | None) -> str:
    """Where a group takes small numbers from: of "cpu:gloo,cuda:nccl" the CPU, since no GPU need be waited for then."""
    group = over.get_group(0) if isinstance(over, DeviceMesh) else over
    devices = [part.split(":")[0] for part in dist.get_backend_config(group).split(",")]
    return "cpu" if "cpu" in devices else devices[0]


def maximum(
    values: torch.Tensor, over: DeviceMesh | dist.ProcessGroup | None = None, *, leave_out: Sequence[str] = ()
) -> None:
    """Maximum over ranks (``None``: the world), element by element and in place.

    Collective: one all-reduce over a group, or over each axis of a mesh but those to ``leave_out``, axis after axis, so
    that it reaches everyone. ``values`` lie on a device of the ranks' process groups.
    """
    if not isinstance(over, DeviceMesh):
        dist.all_reduce(values, op=dist.ReduceOp.MAX, group=over)
        return
    for axis, name in enumerate(over.mesh_dim_names or ("",) * over.ndim):
        if over.size(axis) > 1 and name not in leave_out:
            dist.all_reduce(values, op=dist.ReduceOp.MAX, group=over.get_group(axis))


def are_equal(
    values: torch.Tensor | Sequence[int],
    over: DeviceMesh | dist.ProcessGroup | None = None,
    *,
    device: torch.device | str | None = None,
    leave_out: Sequence[str] = (),
) -> torch.Tensor:
    """Which of some integers between -2^62 and 2^62 are the same on all ranks; all ranks find the same.

    Collective as :func:`maximum`, of two integers for each. Numbers that are no tensor go to ``device``, by default one
    that the ranks' process group takes.

    Returns:
        bool, shape and device of ``values``.
    """
    if not isinstance(values, torch.Tensor):
        values = torch.tensor(values, dtype=torch.int64, device=device or _device(over))
    mine = values.to(torch.int64)
    extremes = torch.stack([mine, -mine])
    maximum(extremes, over, leave_out=leave_out)
    return extremes[0] == -extremes[1]


def digest(data: str | bytes) -> int:
    """56 bits that stand for a text or for bytes, to be compared by :func:`are_equal`."""
    data = data.encode() if isinstance(data, str) else data
    return int.from_bytes(hashlib.blake2b(data, digest_size=7).digest(), "big")


def row_checksums(rows: torch.Tensor) -> torch.Tensor:
    """Position-dependent checksum of each row of a plain, contiguous tensor (rows, elements): (rows,), int64, there.

    Halved: its negative exists too. Local operation.
    """
    words = words_of(rows)
    total = torch.zeros(len(words), dtype=torch.int64, device=rows.device)
    size = max(1, _PIECE // max(1, len(words)))
    for start in range(0, words.shape[1], size):
        piece = words[:, start : start + size]
        places = torch.arange(start + 1, start + 1 + piece.shape[1], dtype=torch.int64, device=rows.device)
        # No linear function of the position: biases after Adam's first step are patterns of two values,
        # and many such patterns have equal sums of positions.
        places.mul_(_MULTIPLIER)
        places.bitwise_xor_(places >> 32).mul_(_MULTIPLIER)
        total += (places * piece).sum(dim=1)
    return total // 2


def words_of(tensor: torch.Tensor) -> torch.Tensor:
    """A plain, contiguous tensor's bits as integers of the same size. Local operation."""
    sizes = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
    return tensor.view(sizes.get(tensor.element_size(), torch.int64))


# -------------------------------------------------------------------------------------------------------------- errors


@contextmanager
def raised_on_all_ranks(mesh: DeviceMesh | None, where: str) -> Iterator[None]:
    """Whatever one rank raises in the context is raised on all ranks of ``mesh`` when it ends, so that none waits.

    Collective over ``mesh`` (``None``: this rank alone) when the context ends: an all-reduce of one number per axis,
    and where a rank failed a gather of its text. The context itself may hold collectives only if every rank reaches
    them, failing or not. ``where`` is the operation, for the message on the ranks that did not fail themselves.

    Raises:
        TeFsdpError: On ranks without an error of their own: the class and text of the first failing rank's error.
    """
    mine: Exception | None = None
    try:
        yield
    except Exception as error:  # passed on below, on every rank
        mine = error
    told: dict[int, tuple[str, str] | None] = {}
    if mesh is not None and mesh.size() > 1 and on_any_rank(mine is not None, mesh):
        told = by_rank(None if mine is None else (type(mine).__name__, str(mine)), mesh)
    if mine is not None:
        raise mine
    for first, problem in sorted(told.items()):
        if problem is not None:
            kind, text = problem
            known = getattr(errors, kind, TeFsdpError) if kind in errors.__all__ else TeFsdpError
            raise known(f"{where} failed on rank {first}: {kind}: {text}")


def from_rank_0(call: Callable[[], T]) -> T:
    """Run a function on rank 0 and hand its result, or its exception, to all. Collective over the world.

    What is no ``TeFsdpError`` comes as ``CheckpointError``.
    """
    outcome: list[Any] = [*_attempt(call, "rank 0: ")] if rank() == 0 else [None, None]
    if world_size() > 1:
        dist.broadcast_object_list(outcome, src=0)
    if outcome[1] is not None:
        raise outcome[1]
    return outcome[0]


def all_agree(call: Callable[[], T]) -> T:
    """Run a function on every rank; if it raises on any, raise the first one's error on all. Collective: the world."""
    result, mine = _attempt(call)
    problem = _worst(gather_if_any(_told(mine)))
    if problem is None:
        return result  # type: ignore[return-value]
    raise problem from (mine.__cause__ if mine is not None else None)


def _attempt(call: Callable[[], T], where: str = "") -> tuple[T | None, TeFsdpError | None]:
    """The function's result, or what it raised as an error of ours."""
    from torch.distributed.checkpoint import CheckpointException  # by here the caller has imported DCP

    try:
        return call(), None
    except TeFsdpError as error:
        return None, error
    except (Exception, CheckpointException) as error:  # the latter is no Exception
        mine = CheckpointError(f"{where}{type(error).__name__}: {error}")
        mine.__cause__ = error
        return None, mine


def _told(error: TeFsdpError | None) -> tuple[type[TeFsdpError], str] | None:
    return None if error is None else (type(error), str(error))


def _worst(seen: list[tuple[type[TeFsdpError], str] | None]) -> TeFsdpError | None:
    """The error of the first failing rank, with the ranks named if not all failed."""
    failed = [r for r, problem in enumerate(seen) if problem is not None]
    if not failed:
        return None
    kind, text = seen[failed[0]]  # type: ignore[misc]
    if len(failed) < len(seen):
        text = f"on rank(s) {', '.join(map(str, failed))}: {text}"
    return kind(text)


# ------------------------------------------------------------------------------------------- a process group of our own


#: Our gloo group of each default process group; gone with it.
_groups = functools.cache(weakref.WeakKeyDictionary[Any, Any])


def own_ranks() -> Ranks:
    """The world over a gloo group of our own, which disturbs no collective of training. Collective at first."""
    if world_size() == 1:
        return Ranks(0, 1, None)
    world, groups = dist.group.WORLD, _groups()
    if world not in groups:
        groups[world] = dist.new_group(backend="gloo")
    return Ranks(rank(), world_size(), groups[world])


@dataclass(frozen=True)
class Ranks:
    """Rank 0 in the middle, the others around it; pickled messages over a gloo group that nobody else uses.

    It works in any thread, one at a time, and goes on working when the program destroys its process groups:
    the methods of the group itself are called, not torch.distributed's functions, which would refuse.
    """

    rank: int  #: This one
    size: int  #: How many there are
    group: Any  #: A gloo group of them; ``None`` for one rank

    def round(self, mine: Callable[[], T], on_rank_0: Callable[[list[T]], list[U]]) -> U:
        """Run a function on every rank, then another on rank 0, given all results; each rank gets its reply.

        Collective over the ranks: point to point, to rank 0 and back. An error anywhere is raised everywhere: the
        first failing rank's, with the ranks named if not all failed. What is no ``TeFsdpError``, and a rank that has
        died or is silent for :func:`te_fsdp.set_collective_timeout`, come as ``CheckpointError``.
        """
        result, error = _attempt(mine)
        try:
            if self.rank != 0:
                self._send((result, _told(error)), 0)
                reply, problem = self._receive(0)
            else:
                reply, problem = self._answer(result, error, on_rank_0)
        except RuntimeError as lost:  # gloo's
            if isinstance(lost, TeFsdpError):
                raise
            raise CheckpointError(f"rank {self.rank} lost another rank: {lost}") from lost
        if problem is not None:
            raise problem from (error.__cause__ if error is not None else None)
        return reply

    def _answer(
        self, result: Any, error: TeFsdpError | None, on_rank_0: Callable[[list[Any]], list[U]]
    ) -> Any:
        """Rank 0's part of a round."""
        results, told, dead = [result], [_told(error)], set()
        for other in range(1, self.size):
            try:
                value, problem = self._receive(other)
            except RuntimeError as lost:
                dead.add(other)
                text = f"the rank has ended, or was silent for {collective_timeout():.0f} s: {lost}"
                value, problem = None, (CheckpointError, text)
            results.append(value)
            told.append(problem)
        replies, worst = None, _worst(told)
        if worst is None:
            replies, worst = _attempt(lambda: on_rank_0(results))
        for other in set(range(1, self.size)) - dead:
            try:
                self._send((None if replies is None else replies[other], worst), other)
            except RuntimeError as lost:  # the others shall have their reply
                worst = worst or CheckpointError(f"on rank(s) {other}: the rank has ended: {lost}")
        return (None if replies is None else replies[0]), worst

    def _send(self, value: Any, to: int) -> None:
        data = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
        self._wait(self.group.send([torch.tensor([data.numel()], device="cpu")], to, 0))
        self._wait(self.group.send([data], to, 0))

    def _receive(self, source: int) -> Any:
        size = torch.empty(1, dtype=torch.int64, device="cpu")
        self._wait(self.group.recv([size], source, 0))
        data = bytearray(int(size))
        self._wait(self.group.recv([torch.frombuffer(data, dtype=torch.uint8)], source, 0))
        return pickle.loads(data)

    def _wait(self, work: dist.Work) -> None:
        work.wait(datetime.timedelta(seconds=collective_timeout()))
