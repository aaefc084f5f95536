"""``save``: every rank writes its own pieces into a hidden directory; when all have, it becomes visible."""

from __future__ import annotations

import hashlib
import logging
import os
import secrets
import time
from collections.abc import Mapping
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

import te_fsdp
from te_fsdp import _te
from te_fsdp.agree import Ranks, own_ranks, rank
from te_fsdp.all_ranks import collective_call
from te_fsdp.checkpoint import directory as directories
from te_fsdp.checkpoint.background import SaveHandle, background, bytes_bar
from te_fsdp.checkpoint.conversion import delayed_state, share_newest_amax
from te_fsdp.checkpoint.directory import check_keep_last, hide_old
from te_fsdp.checkpoint.entries import Entry
from te_fsdp.checkpoint.extra import OwnParts, encode, join_ranks
from te_fsdp.checkpoint.manifest import Manifest, write_manifest
from te_fsdp.checkpoint.model_state import mesh_sizes, model_state, modules_with_extra_state, tied_names
from te_fsdp.checkpoint.optimizer_state import (
    OptimizerState,
    States,
    check_scaled_state,
    join_ranks_experts,
    optimizer_state,
)
from te_fsdp.checkpoint.sums import Listed, without_collector
from te_fsdp.checkpoint.writing import Writing, as_failed_save, plan_writing
from te_fsdp.errors import CheckpointError, TeFsdpError, shorten
from te_fsdp.modules.semantics import record
from te_fsdp.sharding.main_weights import check_optimizer

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

__all__ = ["save"]

_log = logging.getLogger("te_fsdp")


def save(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Optimizer | None = None,
    *,
    extra: Mapping[str, Any] | None = None,
    asynchronous: bool = False,
    keep_last: int | None = None,
    progress: bool | None = None,
) -> SaveHandle:
    """Save a model, its optimizer and what else a run needs, loadable on any mesh.

    The files hold every parameter and optimizer state in the layout of the unsharded module, each element once. They
    appear at ``path`` when whole and on disk; a killed save leaves a hidden directory that a later save removes.

    Collective over the world: call on all ranks, between steps. All ranks must reach the directory. Small messages go
    over a gloo group of our own, made at the first call.

    Args:
        path: Where the checkpoint shall lie; a directory per checkpoint, for example ``DIR/step-200``. Nothing may
            lie there yet but an empty directory.
        model: Any model; FSDP2 units that are gathered are resharded first.
        optimizer: torch's or TE's FusedAdam, over the model's current parameters.
        extra: Plain values and tensors (step, position in the data); rank 0's are kept, and every rank's of what is
            wrapped in :class:`te_fsdp.checkpoint.PerRank`.
        asynchronous: Return as soon as what this rank writes has been copied to the host, and write in a thread:
            training may change everything at once. A save begins after the one before has ended; the interpreter
            waits for a running one before it ends.
        keep_last: Once this checkpoint is whole, remove older ones beside it but for the last so many, this one
            included. What is being loaded stays.
        progress: Draw a progress bar on rank 0.

    Returns:
        A handle. Of an asynchronous save, ``result()`` waits and raises what went wrong on any rank.

    Raises:
        CheckpointError: Something lies at ``path``, ranks disagree on the model or on values that they must share,
            something cannot be stored, a rank failed to write, or the save before has failed and nobody asked. All
            ranks raise the same; nothing appears at ``path``.
        OrderError: The optimizer was built before the model was sharded.
        CollectiveError: Some ranks did not make the call within :func:`te_fsdp.set_collective_timeout`.
    """
    began, handle = time.perf_counter(), SaveHandle(Path(os.path.abspath(path)))
    with collective_call("checkpoint.save"):
        waited = background().wait()
        writing, manifest = _prepare(own_ranks(), handle.path, model, optimizer, extra, keep_last)
        handle.bytes = writing.bytes
        complete = partial(_complete, writing, handle.path, manifest, keep_last, progress, began)
        if asynchronous:
            writing.copy(background().staging)
        else:
            complete()
            handle.finish()
        handle.stall = time.perf_counter() - began
        if asynchronous:
            background().start(handle, complete, waited)
        return handle


class _Collected:
    """What one rank contributes: its tensors, and what the manifest says of them.

    Local operation, with all the errors that a rank can have.
    """

    def __init__(
        self, model: nn.Module, optimizer: Optimizer | None, extra: Mapping[str, Any] | None
    ) -> None:
        self.model, self.own = model, OwnParts(rank())
        self.extra, self.extra_entries = encode(dict(extra or {}), own=self.own)
        self.state = model_state(model)
        self.optimized: OptimizerState | None = None
        if optimizer is not None:
            check_optimizer(model, optimizer)
            check_scaled_state(optimizer)
            self.optimized = optimizer_state(optimizer, self.state.owned)
        self.delayed, self.delayed_entries = delayed_state(model)
        self.semantics = record(model)

    def seen(self) -> tuple[dict[str, bytes], dict[str, Any], dict[str, States]]:
        """What rank 0 hears: digests of what must be the same on all ranks, values per rank, states of experts."""
        parts = {
            "parameters": self.state.described,
            "buffers": self.state.buffers,
            "optimizer": self.optimized.described if self.optimized else None,
            "delayed-scaling state": self.delayed,
            "settings of modules": {**self.semantics, "recipes": None},  # a rank's experts may not have run
        }
        digests = {
            name: hashlib.blake2b(repr(part).encode(), digest_size=8).digest() for name, part in parts.items()
        }
        return digests, self.own.encoded, self.optimized.experts if self.optimized else {}

    def entries(self, rank: int) -> dict[str, Entry]:
        """All tensors, with rank 0's of the user, and every rank's own."""
        optimized = self.optimized.entries if self.optimized else {}
        extra = self.extra_entries if rank == 0 else {}
        return {**self.state.entries, **optimized, **self.delayed_entries, **extra, **self.own.entries}


@without_collector()  # which would take half of the call's time where tensors are many
def _prepare(
    ranks: Ranks,
    target: Path,
    model: nn.Module,
    optimizer: Optimizer | None,
    extra: Mapping[str, Any] | None,
    keep_last: int | None,
) -> tuple[Writing, Manifest]:
    """Collect, check, begin the hidden directory, decide who writes what. Collective over the ranks.

    Returns:
        What this rank writes, and the manifest without the list of files; complete on rank 0 alone.
    """
    found: list[_Collected] = []
    begun: list[Path] = []

    def mine() -> Any:
        background().raise_unasked()
        check_keep_last(keep_last)
        found.append(_Collected(model, optimizer, extra))
        return found[0].seen()

    def begin(seen: list[Any]) -> list[tuple[Path, dict[str, States], str]]:
        _check_same_model([digests for digests, _, _ in seen])
        found[0].extra = join_ranks(found[0].extra, [encoded for _, encoded, _ in seen])
        experts = join_ranks_experts([own for _, _, own in seen])
        begun.append(directories.begin(target))
        return [(begun[0], experts, secrets.token_hex(16))] * len(seen)

    try:
        temporary, experts, save_id = ranks.round(mine, begin)
        manifest = _describe(ranks, found[0], experts, save_id)
        plans = background().plans
        writing = plan_writing(ranks, temporary, found[0].entries(ranks.rank), save_id, plans.get(model))
        plans[model] = writing.plan
        return writing, manifest
    except BaseException:
        for temporary in begun:
            directories.discard(temporary)
        raise


def _describe(ranks: Ranks, collected: _Collected, experts: dict[str, States], save_id: str) -> Manifest:
    """The manifest without files; completes by what the other ranks know. Collective over the ranks."""
    model, state, optimized = collected.model, collected.state, collected.optimized
    if optimized is not None and experts:  # allocates
        ranks.round(lambda: optimized.complete(experts, state.members), lambda seen: [None] * len(seen))
    share_newest_amax(collected.delayed_entries)
    versions = {"te_fsdp": te_fsdp.__version__, "torch": torch.__version__}
    if _te.is_loaded():
        versions["transformer_engine"] = metadata.version("transformer_engine")
    return Manifest(
        versions=versions,
        mesh=mesh_sizes(model),
        saved_at=time.time_ns(),
        parameters=state.described,
        buffers=state.buffers,
        delayed=collected.delayed,
        optimizer=optimized.described if optimized else None,
        extra=collected.extra,
        extra_states=modules_with_extra_state(model),
        tied=tied_names(model),
        semantics=collected.semantics,
        save_id=save_id,
    )


def _check_same_model(digests: list[dict[str, bytes]]) -> None:
    """All ranks must describe the same model and optimizer. Rank 0 alone calls this."""
    for name in digests[0]:
        others = [r for r, seen in enumerate(digests) if seen[name] != digests[0][name]]
        if others:
            raise CheckpointError(
                f"save: {name} of the model",
                expected="the same names, shapes, formats and options on all ranks",
                got=f"rank(s) {', '.join(map(str, others))} differ from rank 0",
                fix="build model and optimizer alike on all ranks",
            )


def _complete(
    writing: Writing,
    target: Path,
    manifest: Manifest,
    keep_last: int | None,
    progress: bool | None,
    began: float,
) -> None:
    """Write, list the files, make the checkpoint visible; or raise what has gone wrong on a rank before.

    Collective over the ranks, in any thread.
    """
    ranks, hidden = writing.ranks, []

    def mine() -> tuple[Any, dict[str, Listed]]:
        draw = bool(progress) and ranks.rank == 0
        with (
            directories.telling_full(target, writing.bytes),
            bytes_bar(f"saving {target.name}", writing.bytes, draw) as tick,
        ):
            return writing.write(tick)

    def commit(written: list[tuple[Any, dict[str, Listed]]]) -> list[None]:
        manifest.files = {name: values for _, files in written for name, values in files.items()}
        absent = [name for name in manifest.files if not (writing.path / name).is_file()]
        if absent:
            raise CheckpointError(
                f"{writing.path}: rank 0 does not see {shorten(absent)}",
                expected="a directory that all ranks share",
                fix="save onto a file system that all nodes mount",
            )
        with directories.telling_full(target):
            manifest.number = directories.next_number(target.parent)
            writing.finish([results for results, _ in written], manifest)
            write_manifest(writing.path, manifest)
            directories.commit(writing.path, target)
        hidden.extend(hide_old(target, manifest, keep_last))
        return [None] * len(written)

    try:
        ranks.round(mine, commit)
    except TeFsdpError as error:
        raise as_failed_save(target, error, manifest.save_id) from error
    finally:
        if ranks.rank == 0:
            directories.discard(writing.path)
    for path in hidden:
        directories.remove(path)
    _log.info("saved %s in %.2f s", target, time.perf_counter() - began)
