"""Comparison of the ranks' progress in training."""

# [Note: progress] A rank that skips a step, or has one microbatch less, runs the same collectives as the others: its
# forward joins that of a different step, without an error. So ranks compare their progress in the first steps and then
# regularly. A collective does not help, because they reach a step at different times. So each rank writes its number of
# backwards to the store before such a step, without waiting, with a digest of values that must be equal. Before a later
# step it counts the ranks that have written the same. In between it has run a backward, and no rank joins the
# reductions of that one before its own step. HFSDP reduces over the replicas in the step, so that a rank counts only
# if all have written.
# Replicas may run different numbers of microbatches before the last one, so the ranks of one replica compare these
# numbers. A rank that differs from them writes a digest of its own, which all ranks of the model detect.

from __future__ import annotations

import time
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from te_fsdp.checks.forward import extent_of_reductions
from te_fsdp.checks.gradients import compare_gradient_shapes
from te_fsdp.checks.optimizer import compare_options, format_options
from te_fsdp.checks.weights import compare_copies_of_step
from te_fsdp.collectives.agreement import digest
from te_fsdp.collectives.async_work import current_stream
from te_fsdp.collectives.rendezvous import (
    Rendezvous,
    collective_call,
    format_ranks,
    is_capturing,
    running_call,
    store_errors,
)
from te_fsdp.errors import MeshError, OrderError
from te_fsdp.features.unreduced_gradients import UnreducedGradients
from te_fsdp.layout import SyncMode
from te_fsdp.lifecycle import Step, gradients_of
from te_fsdp.sharded_model import ShardedModel
from te_fsdp.tensor_checksums import checksum

#: Ranks write before the first two steps, and then before each step whose number is a multiple of this.
EVERY = 100
#: Most seconds that a rank waits for those that have not written, and with an error for those that have not read it.
_PATIENCE = 5.0


class _Written(NamedTuple):
    """Progress that this rank writes to the store for the other ranks."""

    step: int
    backwards: int
    values: int  #: Digest of values that must be equal on all ranks
    of_replica: str  #: Key that counts the ranks of this replica with the same number of microbatches

    @property
    def key(self) -> str:
        """Return the key that counts the ranks which have written the same."""
        return f"{self.step}/of/{self.backwards}/{self.values}"


class Progress:
    """Progress of one model on this rank."""

    def __init__(self, state: ShardedModel, rendezvous: Rendezvous) -> None:
        self.steps = 0  #: Steps of optimizers of the model that have begun
        self.backwards = 0  #: Backwards that have begun and communicate with all ranks
        self.microbatches = 0  #: Backwards that have begun and communicate, in the modes below
        rows = state.units.values()
        self._gathers = any(row.gather == "pass" for row in rows)
        replicas = "dp_replicate" if state.meshes.size("dp_replicate") > 1 else ""
        self._replica = state.meshes.device_mesh.get_local_rank(replicas) if replicas else None
        #: The modes in which a backward or its forward communicates. In the others ranks may run different numbers.
        self.modes = tuple(
            mode for mode in SyncMode if self._gathers or any(row.reduces(mode) for row in rows)
        )
        self._ranks = sorted(state.meshes.device_mesh.mesh.flatten().tolist())
        self._rank, store, first = rendezvous.own_rank, rendezvous.store, f"alive/{rendezvous.ranks[0]}"
        # A store that outlives a start of the job may contain the keys of an earlier start.
        start = store.get(first).decode() if store.check([first]) else ""
        name = f"progress/{digest(f'{start} {self._ranks}')}/{rendezvous.number}"
        self._store: Any = dist.PrefixStore(name, store)
        self._written: _Written | None = None
        self._read: _Written | None = None  #: The last message that was compared

    def __str__(self) -> str:
        """Return the progress as text, which a save compares over the ranks."""
        return f"{self.steps} steps after {self.backwards} backwards"

    def count(self, state: ShardedModel) -> None:
        """Count a backward that begins. Local operation."""
        mode, is_known = state.sync.mode, self._replica is None and not state.computed.setter
        extent = 2 if is_known else extent_of_reductions(state)
        communicates = self._gathers or extent > 0 if state.computed.setter else mode in self.modes
        self.microbatches += communicates
        # HFSDP reduces over the replicas in the step.
        joins = mode is SyncMode.LAST and extent >= (1 if state.outer == "optim" else 2)
        self.backwards += communicates and (self._replica is None or joins)

    def compare(self, step: Step, state: ShardedModel, parameters: list[torch.Tensor]) -> None:
        """Read the progress that all ranks have written, and write this rank's if it is due."""
        written, is_due = self._written, self.steps <= 2 or self.steps % EVERY == 0
        if written is None and not is_due:
            return
        with store_errors(step.where):
            if written is not None and self.backwards != written.backwards and self._have_all(state, written):
                if self._store.add(written.key, 0) != len(self._ranks):
                    self._raise_unless_same(step, state, written)
                if (read := self._read) is not None:  # no rank needs its keys any more
                    counters = (read.key, f"{read.step}/all") if self._rank == self._ranks[0] else ()
                    replica = read.of_replica, f"{read.step}/replica/{self._replica}/all"
                    for key in (f"{read.step}/{self._rank}", *replica, *counters):
                        self._store.delete_key(key)
                self._written, self._read = None, written
            # Under HFSDP a rank may not have read the last message, while others wait for its next one.
            if is_due and (self._written is None or state.outer == "optim"):
                self._written = self._write(step, state, parameters)

    def _write(self, step: Step, state: ShardedModel, parameters: list[torch.Tensor]) -> _Written:
        values, number = _digest_of_values(step, state, parameters), str(self.backwards)
        of_replica = f"{self.steps}/replica/{self._replica}/{self.microbatches}"
        if self._replica is not None:
            self._store.add(of_replica, 1)
            all_of_replica = f"{self.steps}/replica/{self._replica}/all"
            if self._store.add(all_of_replica, 1) > self._store.add(of_replica, 0):
                values, number = values + 1, f"{number} last of {self.microbatches}"
        written = _Written(self.steps, self.backwards, values, of_replica)
        self._store.set(f"{self.steps}/{self._rank}", number)
        self._store.add(written.key, 1)
        # Each rank is counted here after it was counted there.
        is_different = self._store.add(f"{self.steps}/all", 1) > self._store.add(written.key, 0)
        # If this rank is late, the others read it now. Otherwise all ranks do so in the next step.
        if is_different and len(self._by_backwards(self.steps)) > 1:
            self._raise_unless_same(step, state, written)
        return written

    def _have_all(self, state: ShardedModel, written: _Written) -> bool:
        """Return whether all ranks have written, after this rank's part of the last backward has ended.

        A rank has then launched the reductions of that backward, after its own step.
        """
        if state.outer == "optim":
            # The early averages of HFSDP may end in another rank's step only, which waits for this one.
            return self._store.add(f"{written.step}/all", 0) == len(self._ranks)
        if (stream := current_stream(state.meshes.device)) is not None:
            stream.synchronize()
        return True

    def _wait_for_all(self, key: str) -> None:
        """Wait some seconds until all ranks are counted."""
        until = time.monotonic() + _PATIENCE
        while self._store.add(key, 0) < len(self._ranks) and time.monotonic() < until:
            time.sleep(0.05)

    def _by_backwards(self, step: int) -> dict[str, list[int]]:
        """Map each number of backwards to the ranks that have written it before a step."""
        ranks: dict[str, list[int]] = {}
        # get would block for a rank that has not reached the step.
        for rank in [rank for rank in self._ranks if self._store.check([f"{step}/{rank}"])]:
            ranks.setdefault(self._store.get(f"{step}/{rank}").decode(), []).append(rank)
        return ranks

    def _raise_unless_same(self, step: Step, state: ShardedModel, written: _Written) -> None:
        """Raise the error that names the ranks, on all ranks that are in this step or the next one.

        Return if the missing ranks write the same within :data:`_PATIENCE` seconds.
        """
        number = written.step
        self._wait_for_all(f"{number}/all")
        if self._store.add(written.key, 0) == len(self._ranks):
            return
        ranks = self._by_backwards(number)
        lines = [f"{backwards} backwards on {format_ranks(those)}" for backwards, those in ranks.items()]
        late = sorted({*self._ranks}.difference(*ranks.values()))
        if not late and len(ranks) == 1:
            with collective_call(step.where, state.meshes.device_mesh):
                for compare in (compare_options, compare_gradient_shapes, compare_copies_of_step):
                    compare(step)
        self._store.add(f"{number}/read", 1)
        self._wait_for_all(f"{number}/read")
        if not late and len(ranks) == 1:
            raise MeshError(
                f"{step.where}: the ranks differed in step {number}",
                expected="the same options, parameters with gradients, and values of unsharded parameters on all ranks",
                got="differences that the last step has removed",
                why="The ranks update the shards of each weight together",
                fix="restart from an earlier checkpoint with checks='full', which names the difference",
            )
        raise OrderError(
            f"{step.where}: the ranks are in different steps",
            expected=f"the same number of backwards before step {number} on all ranks of the model",
            got="; ".join([*lines, *([f"{format_ranks(late)} not there yet"] if late else [])]),
            why="Some ranks have skipped a step or a microbatch, so the shards of a weight have different updates",
            fix="restart from an earlier checkpoint, and skip on all ranks or none: all-reduce the flag; on a rank "
            "without data, multiply the loss by zero",
        )


def _digest_of_values(step: Step, state: ShardedModel, parameters: list[torch.Tensor]) -> int:
    """Return a digest of the options, missing gradients, copies that all ranks have, and arguments of clipping."""
    names, sums = state.names(), dict[str, torch.Tensor]()
    # Ranks may have the parameters in different orders. Each rank of ep has different experts.
    named = ((names.get(id(p)), p) for p in parameters)  # None: of a module that the user has removed
    by_name = {name: p for name, p in named if name is not None and not state.is_expert(name)}
    missing = []
    if state.outer != "optim":  # HFSDP averages the gradients of the replicas that have one
        gradients = gradients_of(by_name.values())
        missing = [name for name, gradient in zip(by_name, gradients, strict=True) if gradient is None]
    if state.meshes.size("tp") == 1 and state.meshes.size("ep") == 1:
        sums = {name: checksum(p) for name, p in sorted(by_name.items()) if not isinstance(p, DTensor)}
    copies = torch.stack([*sums.values()]).tolist() if sums else []
    return digest(repr((format_options(step.optimizer), sorted(missing), copies, state.checked.clipping)))


def record_clipping(state: ShardedModel, max_norm: float, norm_type: float) -> None:
    """Record arguments of ``clip_grad_norm_`` that differ from the last ones. Local operation."""
    before, *last = state.checked.clipping
    # A graph that replays a step on some ranks records nothing.
    if (pair := [float(max_norm), float(norm_type)]) != last:
        state.checked.clipping = hash((before, *pair)), pair[0], pair[1]


def watch_progress(state: ShardedModel) -> None:
    """Count the backwards and steps of a model from now on. Local operation, except for requests to the store."""
    running = running_call.get()
    # None without other ranks, or if they are simulated.
    if running is not None and running.rendezvous is not None:
        component: Any = state.components.by_class[UnreducedGradients]
        component.progress = Progress(state, running.rendezvous)


def compare_progress(step: Step) -> None:
    """Compare the ranks' numbers of backwards and steps, by requests to the store before some steps.

    At level "full" the ranks of the model rendezvous in the store before every step instead.
    """
    for state, parameters in step.models:
        component: Any = state.components.by_class[UnreducedGradients]
        progress: Progress | None = component.progress
        if progress is None or is_capturing():
            continue
        progress.steps += 1
        if state.checks.level == "full":
            with collective_call(step.where, state.meshes.device_mesh):
                pass
        else:
            progress.compare(step, state, parameters)
