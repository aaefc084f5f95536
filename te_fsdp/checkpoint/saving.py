"""``save``: every rank writes its own pieces into a hidden directory; when all have, it becomes visible."""

from __future__ import annotations

import hashlib
import logging
import os
import secrets
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn
from torch.distributed.tensor import DTensor

import te_fsdp
from te_fsdp import _te, _torch
from te_fsdp.agree import Ranks, own_ranks, rank, world_size
from te_fsdp.all_ranks import collective_call
from te_fsdp.checkpoint import directory as directories
from te_fsdp.checkpoint.background import SaveHandle, background, bytes_bar
from te_fsdp.checkpoint.compare import check_same_model, check_whole_job, join
from te_fsdp.checkpoint.conversion import delayed_state, share_newest_amax
from te_fsdp.checkpoint.entries import Entry, OwnParts, as_dict, encode, join_ranks, views_of
from te_fsdp.checkpoint.manifest import Manifest, write_manifest
from te_fsdp.checkpoint.model_state import (
    as_one,
    come_to_rest,
    mesh_sizes,
    model_state,
    modules_with_extra_state,
    stage_of,
    tied_names,
)
from te_fsdp.checkpoint.optimizer_state import (
    OptimizerState,
    States,
    check_scaled_state,
    describe_groups,
    join_ranks_experts,
    optimizer_state,
)
from te_fsdp.checkpoint.paths import absolute, listing
from te_fsdp.checkpoint.sums import Listed, telling_why, without_collector
from te_fsdp.checkpoint.writing import (
    Plan,
    Writing,
    as_failed_save,
    check_replicas,
    plan_entries,
    signature_of,
    tensors_of,
)
from te_fsdp.errors import CheckpointError, TeFsdpError, require_flags, shorten
from te_fsdp.modules.plan import original_layouts
from te_fsdp.modules.semantics import from_json, record, to_json
from te_fsdp.parameters import binding_of
from te_fsdp.sharding.main_weights import check_optimizer
from te_fsdp.sharding.outer_optimizer import main_parameters_of

if TYPE_CHECKING:
    from torch.optim import Optimizer

_log = logging.getLogger("te_fsdp")


def save(
    path: str | os.PathLike[str],
    model: nn.Module | Iterable[nn.Module],
    optimizer: Optimizer | None = None,
    *,
    extra: Mapping[str, Any] | None = None,
    asynchronous: bool = False,
    keep_last: int | None = None,
    progress: bool | None = None,
    shared: Iterable[str] = (),
) -> SaveHandle:
    """Save a model, its optimizer and what else a run needs, loadable on any mesh and any number of stages.

    The files hold every parameter and optimizer state in the layout of the unsharded module, each element once. They
    appear at ``path`` when whole and on disk; a killed save leaves a hidden directory that a later save removes.

    Collective over the world: call on all ranks, between steps. All ranks must reach the directory. Small messages go
    over a gloo group of our own, made at the first call.

    Args:
        path: Where the checkpoint shall lie; a directory per checkpoint, for example ``DIR/step-200``, or
            ``"s3://..."``. Nothing may lie there yet but an empty directory.
        model: Any model; FSDP2 units that are gathered are resharded first. On each rank of a pipeline its stage or
            stages, under the names of the whole model, which the files hold.
        optimizer: torch's or TE's FusedAdam, over the model's current parameters.
        extra: Plain values and tensors (step, position in the data); rank 0's are kept, and every rank's of what is
            wrapped in :class:`te_fsdp.checkpoint.PerRank`.
        asynchronous: Return as soon as what this rank writes has been copied to the host, and write in a thread:
            training may change everything at once. A save begins after the one before has ended; the interpreter
            waits for a running one before it ends, for silent ranks as :func:`te_fsdp.set_collective_timeout` says.
        keep_last: Once this checkpoint is whole, remove older ones beside it but for the last so many, this one
            included. What is being loaded stays.
        progress: Draw a progress bar on rank 0.
        shared: Names, as shell patterns, of parameters that several stages may hold, bit for bit equal; stored once.

    Returns:
        A handle. Of an asynchronous save, ``result()`` waits and raises what went wrong on any rank.

    Raises:
        CheckpointError: Something lies at ``path``, ranks disagree on what they must share, something cannot be stored,
            a rank failed to write, or the save before has and nobody asked: on all ranks, with nothing at ``path``.
        OrderError: The optimizer was built before the model was sharded.
        CollectiveError: Some ranks did not make the call within :func:`te_fsdp.set_collective_timeout`.
    """
    require_flags("save", CheckpointError, asynchronous=asynchronous, progress=progress is None or progress)
    began, handle = time.perf_counter(), SaveHandle(absolute(path))
    with collective_call("checkpoint.save"):
        waited = background().wait()
        writing, manifest = _prepare(own_ranks(), handle.path, model, optimizer, extra, keep_last, shared)
        handle.bytes = writing.bytes
        complete = partial(_complete, writing, handle.path, manifest, keep_last, progress, began)
        if asynchronous:
            writing.copy(background().staging)
        else:
            complete()
            handle.finish()
        handle.stall = time.perf_counter() - began
        if asynchronous:
            background().start(handle, complete, waited, writing.ranks)
        return handle


@dataclass
class _Described:
    """What a save has found out about a model and its optimizer, for the next one: no tensors, which may go meanwhile.

    Attributes:
        fields: Of the manifest.
        states: The optimizer's, as the manifest has them; empty without one.
        names: Of the files' tensors, by the ``id`` of the parameters in the optimizer's groups.
        digests: Of what must be the same on all ranks.
        look: From :func:`_look`; ``None``: unknown, so that the next save describes everything anew.
        views: Which of the tensors that :func:`_look` gives is stored, and shape, strides and offset of a part of it.
    """

    fields: dict[str, Any]
    states: States
    names: dict[int, str]
    digests: dict[str, bytes]
    look: list[Any] | None = None
    views: list[tuple[int, tuple[Any, ...] | None]] = field(default_factory=list)


class _Seen(NamedTuple):
    """What rank 0 hears of a rank.

    Attributes:
        digests: Of what must be the same on all ranks of a stage.
        own: Values per rank.
        experts: States of experts.
        token: Of the plan that it can use again.
        stage: Its number, and what it says in the manifest if this rank speaks for it.
    """

    digests: dict[str, bytes]
    own: Any
    experts: dict[str, States]
    token: str | None
    stage: tuple[int, dict[str, Any] | None] | None


class _Collected:
    """What one rank contributes: its tensors, and what the manifest says of them. With all errors that a rank can have.

    ``plan`` and ``before`` are of the last save of this model, and taken if nothing has changed since.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | None,
        extra: Mapping[str, Any] | None,
        plan: Plan | None,
        before: _Described | None,
    ) -> None:
        self.model, self.optimizer, self.plan, self.own = model, optimizer, plan, OwnParts(rank())
        self.stage = stage_of(model)
        check_whole_job(model, self.stage)
        self.extra, self.extra_entries = encode(as_dict(extra), own=self.own)
        self.delayed, self.delayed_entries = delayed_state(model)
        self.look, self.leaves = _look(model, optimizer, self.others()) or (None, [])
        self.is_known = before is not None and self.look is not None and before.look == self.look
        if before is not None and self.is_known:
            self.described = before
            self.groups = [] if optimizer is None else describe_groups(optimizer, before.names)
        else:
            self.describe()
        self.semantics = record(model)

    def describe(self) -> None:
        """Describe model and optimizer, whatever is known from before."""
        model, optimizer, self.is_known = self.model, self.optimizer, False
        self.state = model_state(model)
        self.optimized = OptimizerState({"groups": [], "state": {}}, {})
        if optimizer is not None:
            check_optimizer(model, optimizer)
            check_scaled_state(optimizer)
            self.optimized = optimizer_state(optimizer, self.state.owned)
        self.groups, states = self.optimized.described["groups"], self.optimized.described["state"]
        fields = {
            "parameters": self.state.described,
            "buffers": self.state.buffers,
            "mesh": mesh_sizes(model),
        }
        fields |= {"extra_states": modules_with_extra_state(model), "tied": tied_names(model)}
        digests = {name: _digest(fields[name]) for name in ("parameters", "buffers")}
        names = {id(o.parameter): o.key for o in self.state.owned.values()}
        self.described = _Described(fields, states, names, digests | {"optimizer": _digest(states)})
        views = views_of(self.leaves, [*self.state.entries.values(), *self.optimized.entries.values()])
        if self.look is not None and views is not None:
            self.described.look, self.described.views = self.look, views
        # Of all ranks these tell what every rank's experts lack, which is added later.
        self.signature = rank(), world_size(), signature_of(self.entries())
        if self.plan is not None and self.plan.signature != self.signature:
            self.plan = None

    def seen(self, target: Path) -> _Seen:
        """What rank 0 hears."""
        kind = type(self.optimizer).__name__
        digests = {
            "path": str(target).encode(),
            **self.described.digests,
            "optimizer": self.described.digests["optimizer"] + _digest((kind, self.groups)),
            "delayed-scaling state": _digest(self.delayed),
            # A rank's experts may not have run, and a user's modules may know their rank.
            "settings of modules": _digest(to_json(from_json(self.semantics))),
        }
        experts = {} if self.is_known else self.optimized.experts
        token, stage = None if self.plan is None else self.plan.token, None
        if self.stage is not None:
            speaks = int(self.stage.mesh.mesh.min()) == rank()
            stage = self.stage.across.get_local_rank(), self.fields() if speaks else None
        return _Seen(digests, self.own.encoded, experts, token, stage)

    def fields(self) -> dict[str, Any]:
        """What this rank says in the manifest."""
        fields = {
            **self.described.fields,
            "delayed": self.delayed,
            "semantics": self.semantics,
            "optimizer": None,
        }
        if self.optimizer is not None:
            kind, states = type(self.optimizer).__name__, self.described.states
            fields["optimizer"] = {"class": kind, "groups": self.groups, "state": states}
        return fields

    def entries(self) -> dict[str, Entry]:
        """All tensors that have elements, with rank 0's of the user, and every rank's own."""
        return _stored({**self.state.entries, **self.optimized.entries}) | self.others()

    def others(self) -> dict[str, Entry]:
        """Those that are not the model's and the optimizer's own."""
        extra = self.extra_entries if rank() == 0 else {}
        return _stored({**self.delayed_entries, **extra, **self.own.entries})

    def tensors(self) -> list[torch.Tensor]:
        """Those of all pieces of :meth:`entries`, by the numbers that pieces have."""
        if not self.is_known:
            return tensors_of(self.entries())
        leaves = [leaf.detach() if leaf.requires_grad else leaf for leaf in self.leaves]
        views = ((leaves[at], part) for at, part in self.described.views)
        found = [leaf if part is None else leaf.as_strided(*part) for leaf, part in views]
        return [*found, *tensors_of(self.others())]


def _stored(entries: dict[str, Entry]) -> dict[str, Entry]:
    return {key: entry for key, entry in entries.items() if not entry.is_empty}


def _digest(part: Any) -> bytes:
    return hashlib.blake2b(repr(part).encode(), digest_size=8).digest()


def _look(
    model: nn.Module, optimizer: Optimizer | None, others: dict[str, Entry]
) -> tuple[list[Any], list[torch.Tensor]] | None:
    """All that the description of a model and its optimizer follows from, to be compared; and their local tensors.

    In a tenth of the time that it takes to describe them. Objects stand there by their ``id``, and with all of them
    that is described: one that has the ``id`` of another one, which is gone, is described alike. The tensors are in the
    order of the entries. ``None`` where more matters: quantized weights, grouped weights of experts, and state that is
    cut further than the weights.
    """
    come_to_rest(model)
    plain = {torch.Tensor, torch.nn.Parameter}
    grouped = any(_te.kind_of(module) == "GroupedLinear" for module in model.modules())
    is_cut = optimizer is not None and main_parameters_of(optimizer) is not None
    if grouped or is_cut or {*map(type, _torch.locals_of(model.parameters()))} - plain:
        return None
    look: list[Any] = [rank(), world_size(), original_layouts(model), signature_of(others)]
    parameters, buffers = dict[int, torch.Tensor](), dict[int, torch.Tensor]()
    states: list[torch.Tensor] = []
    for prefix, module in model.named_modules():
        binding = binding_of(module)
        tie = binding and (binding.tp_mesh, dict(binding.rules), binding.ep_mesh, binding.experts_mesh)
        look.append((prefix, id(module), type(module), tie, *module._buffers))
        for name, parameter in module._parameters.items():
            look.append((name, id(parameter)))
            if parameter is not None:
                parameters.setdefault(id(parameter), parameter)
        saved = [b for n, b in module._buffers.items() if b is not None and _torch.is_persistent(module, n)]
        look.append([id(buffer) for buffer in saved])
        for buffer in saved:
            buffers.setdefault(id(buffer), buffer)
    if optimizer is not None:
        look.append((type(optimizer), [[id(p) for p in group["params"]] for group in optimizer.param_groups]))
        for parameter, state in optimizer.state.items():
            look.append(id(parameter))
            for key, value in state.items():
                look.append(key if isinstance(value, torch.Tensor) else (key, repr(value)))
                if isinstance(value, torch.Tensor):
                    states.append(value)
    tensors = [*parameters.values(), *buffers.values(), *states]
    leaves = _torch.locals_of(tensors)
    # By columns, which takes half of the time of a row for each tensor.
    look += [[id(tensor) for tensor in tensors], [id(leaf) for leaf in leaves]]
    look += [[(t.device_mesh, t.placements, t.shape) for t in tensors if isinstance(t, DTensor)]]
    look += [[leaf.shape for leaf in leaves], [leaf.stride() for leaf in leaves]]
    look += [[leaf.dtype for leaf in leaves], [leaf.storage_offset() for leaf in leaves]]
    look += [[leaf.device for leaf in leaves]]
    return (look, leaves) if {*map(type, leaves)} <= plain else None


@without_collector()  # which would take half of the call's time where tensors are many
def _prepare(
    ranks: Ranks,
    target: Path,
    given: nn.Module | Iterable[nn.Module],
    optimizer: Optimizer | None,
    extra: Mapping[str, Any] | None,
    keep_last: int | None,
    shared: Iterable[str],
) -> tuple[Writing, Manifest]:
    """Collect, check, begin the hidden directory, decide who writes what. Collective over the ranks.

    Returns what this rank writes, and the manifest without the list of files; complete on rank 0 alone.
    """
    found: list[_Collected] = []
    begun: list[Path] = []
    whole: list[dict[str, Any] | None] = []
    model = as_one(given, optimizer)
    plan, before = background().plans.get(model, (None, None))
    if plan is None or (ranks.rank == 0 and plan.encoded is None):
        plan = before = None  # there was none, or the save that it was made for has failed

    def mine() -> Any:
        background().raise_unasked()
        if keep_last is not None and (type(keep_last) is not int or keep_last < 1):
            expected = "None (keep all) or a whole number from 1"
            raise CheckpointError("save: keep_last", expected=expected, got=repr(keep_last))
        found.append(_Collected(model, optimizer, extra, plan, before))
        return found[0].seen(target)

    def anew() -> Any:
        found[0].plan = None
        found[0].describe()
        return found[0].seen(target)

    def begin(seen: list[_Seen]) -> list[tuple[Path, dict[str, States], str] | None]:
        if len({one.token for one in seen}) > 1:
            return [None] * len(seen)  # what is new to one rank is planned anew by all
        check_same_model([one.digests for one in seen], [one.stage and one.stage[0] for one in seen])
        whole.append(join([one.stage for one in seen], shared))
        found[0].extra = join_ranks(found[0].extra, [one.own for one in seen])
        experts = join_ranks_experts([one.experts for one in seen])
        begun.append(directories.begin(target))
        return [(begun[0], experts, secrets.token_hex(16))] * len(seen)

    try:
        begun_with = ranks.round(mine, begin) or ranks.round(anew, begin)
        assert begun_with is not None
        temporary, experts, save_id = begun_with
        manifest, collected = _describe(ranks, found[0], experts, save_id, *whole), found[0]
        plan = collected.plan or plan_entries(ranks, temporary, collected.entries(), collected.signature)
        tensors = collected.tensors()
        check_replicas(ranks, plan, tensors)
        writing = Writing(ranks, temporary, save_id, plan, tensors)
        background().plans[model] = plan, collected.described
        return writing, manifest
    except BaseException:
        for temporary in begun:
            directories.discard(temporary)
        raise


def _describe(
    ranks: Ranks,
    collected: _Collected,
    experts: dict[str, States],
    save_id: str,
    whole: dict[str, Any] | None = None,
) -> Manifest:
    """The manifest without files; completes what experts of this rank lack. Collective over the ranks.

    ``experts`` are of all ranks, ``whole`` are fields of all stages of a pipeline, on rank 0.
    """
    if experts:  # allocates

        def complete() -> None:
            if not collected.is_known:  # else this stage has none
                collected.optimized.complete(experts, collected.state.members)

        ranks.round(complete, lambda seen: [None] * len(seen))
    stage = collected.stage
    share_newest_amax(collected.delayed_entries, None if stage is None else stage.mesh)
    versions = {"te_fsdp": te_fsdp.__version__, "torch": torch.__version__}
    if _te.is_loaded():
        versions["transformer_engine"] = metadata.version("transformer_engine")
    fields = {**collected.fields(), **(whole or {})}
    if fields["optimizer"] is not None:
        # Not in place: a later save takes what is there now.
        fields["optimizer"] |= {"state": {**fields["optimizer"]["state"], **experts}}
    fields |= {"versions": versions, "extra": collected.extra}
    return Manifest(saved_at=time.time_ns(), save_id=save_id, **fields)


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
        bar = bytes_bar(f"saving {target.name}", writing.bytes, progress)
        with telling_why(target, writing.bytes), bar as tick:
            return writing.write(tick)

    def commit(written: list[tuple[Any, dict[str, Listed]]]) -> list[None]:
        manifest.files = {name: values for _, files in written for name, values in files.items()}
        seen = listing(writing.path)
        absent = [name for name in manifest.files if not (name in seen or (writing.path / name).is_file())]
        if absent:
            raise CheckpointError(
                f"{writing.path}: rank 0 does not see {shorten(absent)}",
                expected="a directory that all ranks share",
                fix="save onto a file system that all nodes mount",
            )
        with telling_why(target):
            manifest.number = directories.next_number(target.parent)
            writing.finish([places for places, _ in written], manifest)
            write_manifest(writing.path, manifest)
            directories.commit(writing.path, target)
        if keep_last is not None:
            hidden.extend(directories.hide_old(target, manifest, keep_last))
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
