"""``save``: every rank writes its own pieces into a hidden directory, which becomes visible when all are done."""

from __future__ import annotations

import logging
import os
import secrets
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from te_fsdp.checkpoint import directory as directories
from te_fsdp.checkpoint.async_save import SaveHandle, background
from te_fsdp.checkpoint.compare import PROGRESS, check_same_model, check_spans_world, join
from te_fsdp.checkpoint.extra import encode_extra, join_ranks
from te_fsdp.checkpoint.host_memory import Block
from te_fsdp.checkpoint.manifest import Manifest
from te_fsdp.checkpoint.model_state import (
    JoinedModules,
    delayed_state,
    joined_model,
    mesh_sizes,
    model_state,
    modules_with_extra_state,
    original_layouts,
    share_newest_amax,
    stage_of,
    tied_names,
)
from te_fsdp.checkpoint.optimizer_state import Optimizers, States, join_ranks_experts
from te_fsdp.checkpoint.planner import RankWriter, WritePlan, file_of, plan_entries, signature_of, tensors_of
from te_fsdp.checkpoint.progress import bytes_bar
from te_fsdp.checkpoint.shard_files import Listed, explain_os_errors, without_collector
from te_fsdp.checkpoint.storage import absolute, listing
from te_fsdp.checkpoint.tensor_entries import TensorEntry, merge_copies, views_of
from te_fsdp.collectives.agreement import RankMessenger, digest, rank, rank_messenger, world_size
from te_fsdp.collectives.rendezvous import collective_call, errors_interrupt
from te_fsdp.errors import CheckpointError, OrderError, TeFsdpError, require_flags, shorten
from te_fsdp.features.main_params import main_parameters_of
from te_fsdp.features.unreduced_gradients import UnreducedGradients
from te_fsdp.features.written_weights import written_main_weights
from te_fsdp.layout import SyncMode
from te_fsdp.modules.semantics import from_json, record, to_json
from te_fsdp.records import binding_of
from te_fsdp.sharded_model import get_sharded_model
from te_fsdp.upstream import (
    fsdp2_gradients as _fsdp2_gradients,
    fsdp2_state as _fsdp2,
    fsdp2_units,
    te as _te,
    torch_dtensor as _torch,
)
from te_fsdp.version import VERSION

_log = logging.getLogger("te_fsdp")
#: Message of a rank to rank 0: digests of values that must be identical on all ranks of a stage, values per rank,
#: states of experts, token of the plan that it can reuse, and the number of its stage with the fields of one rank.
_RankMessage = tuple[
    dict[str, Any], Any, dict[str, States], str | None, tuple[int, dict[str, Any] | None] | None
]


def save(
    path: str | os.PathLike[str],
    model: nn.Module | Mapping[str, nn.Module] | Iterable[nn.Module],
    optimizer: Optimizer | Mapping[str, Optimizer] | None = None,
    *,
    extra: Mapping[str, Any] | None = None,
    asynchronous: bool = False,
    keep_last: int | None = None,
    progress: bool | None = None,
    shared: Iterable[str] = (),
) -> SaveHandle:
    """Save a model, its optimizer and further values, loadable on any mesh and any number of pipeline stages.

    The files contain every parameter and optimizer state in the layout of the unsharded module, each element once. They
    appear at ``path`` when they are complete and on disk. Collective over the world; call between steps. Small messages
    use a Gloo process group of te_fsdp, made at the first call.

    Args:
        path: A path that all ranks reach, one directory per checkpoint, for example ``DIR/step-200`` or ``"s3://..."``.
            It must not exist, or be an empty directory.
        model: Any model. Unsharded FSDP2 units are resharded first. On each rank of a pipeline its stage or stages,
            under the names of the unsplit model. Several models: a dict of them by name.
        optimizer: torch's or TE's FusedAdam, over the model's current parameters. Several: a dict of them by name.
        extra: Values that ``torch.load(weights_only=True)`` accepts, taken from rank 0. Values wrapped in
            :class:`te_fsdp.checkpoint.PerRank` are taken from every rank. DTensors load as full tensors on the CPU.
        asynchronous: Return once this rank's data are copied to the host, and write in a thread. Training may continue
            at once. A save starts after the previous save has ended. The interpreter waits for a running save at exit.
        keep_last: Number of checkpoints to keep, including this one. Older ones are removed once it is complete.
        progress: Draw a progress bar on rank 0.
        shared: Names, as shell patterns, of parameters that several stages share. They must be equal bit for bit, and
            are stored once.

    Returns:
        A handle. For an asynchronous save, ``result()`` waits and raises the error of any rank.

    Raises:
        CheckpointError: On all ranks, with nothing at ``path``: ``path`` exists, ranks disagree on values that must be
            identical, a value cannot be stored, a rank failed to write or did not respond, or the previous asynchronous
            save failed and its error was never retrieved.
        OrderError: The optimizer was built before the model was sharded, or the call is between two microbatches.
        CollectiveError: Some ranks did not make the call within :func:`te_fsdp.set_collective_timeout`.
    """
    require_flags("save", CheckpointError, asynchronous=asynchronous, progress=progress is None or progress)
    began, handle = time.perf_counter(), SaveHandle(absolute(path))
    model, optimizers, shared = joined_model(model), Optimizers(optimizer), tuple(shared)
    with collective_call("checkpoint.save"), errors_interrupt():
        # One save at a time: two would compete for the disk, and their order decides which is the newest.
        background().wait()
        writer = _prepare(rank_messenger(), handle.path, model, optimizers, extra, keep_last, shared)
        handle.bytes = sum(block.bytes for block in writer.own)
        complete = partial(_complete, handle, writer, keep_last, progress, began)
        if asynchronous:
            writer.copy(background().staging)
        else:
            complete()
        handle.stall = stall = time.perf_counter() - began
        if asynchronous:
            _log.info("saving %s in the background; save returned after %.3f s", handle.path, stall)
            background().start(handle, complete)
        return handle


def refuse_pending_gradients(model: nn.Module) -> None:
    """Raise OrderError between two microbatches of a step, because a save would omit their gradients.

    Local operation. Unreduced gradients are found, also in units of torch's own ``fully_shard``. Strategies that
    reduce in each microbatch have them in ``.grad``.
    """
    pending: dict[int, str] = {}
    units: set[nn.Module] = set()
    for state in filter(None, map(get_sharded_model, model.modules())):
        pending |= state.pending()
        # In other modes a step may have used the values of .grad already.
        if state.sync.waiting and state.sync.mode is SyncMode.LAST and not state.sync.completed:
            pending |= {id(p): name for name, p in state.parameters().items() if p.grad is not None}
        units.update(state.modules.values())
    records = [
        _fsdp2.sharded_param_of(record)
        for unit in model.modules()
        if fsdp2_units.is_fsdp_module(unit) and unit not in units
        for record in _fsdp2_gradients.params_with_unreduced_gradients(unit)
    ]
    names = {id(parameter): name for name, parameter in model.named_parameters()} if records else {}
    pending |= {id(p): names.get(id(p)) or f"one of shape {tuple(p.shape)}" for p in records}
    if not pending:
        return
    raise OrderError(
        f"checkpoint.save: {len(pending)} parameter(s) have gradients of a step that is not complete, such as "
        f"{next(iter(pending.values()))}",
        expected="a call between two steps",
        got="a call after a microbatch that was not the last one, before optimizer.step()",
        why="A checkpoint contains no gradients: a resumed run would lack these microbatches",
        fix="save after optimizer.step(), or discard the microbatches first (te_fsdp.zero_grad(model))",
    )


@dataclass
class _SaveCache:
    """Description of a model and its optimizer, without tensors, that the next save reuses."""

    fields: dict[str, Any]  #: Fields of the manifest, except the optimizer's groups
    #: Names of the files' tensors, by ``id`` of the parameters in the optimizer's groups
    names: dict[int, str]
    digests: dict[str, Any]  #: Digests of values that must be identical on all ranks
    #: Result of :func:`_fingerprint`; with ``None`` the next save describes everything again
    fingerprint: list[Any] | None
    #: Index of each stored tensor in those of :func:`_fingerprint`, and shape, strides and offset of a part of it
    views: list[tuple[int, tuple[Any, ...] | None]]
    plan: WritePlan | None = None


class _Collected:
    """One rank's contribution to a save: its tensors, and their description in the manifest.

    Raises all errors that a rank detects alone. ``before`` is the cache of the previous save of this model, reused if
    nothing has changed since.
    """

    joined: Mapping[str, Any] = {}  #: Fields of all stages of a pipeline; on rank 0

    def __init__(
        self,
        model: nn.Module,
        optimizers: Optimizers,
        extra: Any,
        before: _SaveCache | None,
        shared: tuple[str, ...],
    ) -> None:
        self.optimizers, self.stage = optimizers, stage_of(model)
        refuse_pending_gradients(model)
        self.sharded = list(filter(None, map(get_sharded_model, model.modules())))
        check_spans_world(model, self.stage)
        self.extra, self.own, extra_entries = encode_extra(extra, rank())
        self.delayed, self.delayed_entries = delayed_state(model)
        self.others = _stored({**self.delayed_entries, **extra_entries})
        # Includes the tensors of ``extra`` and of delayed scaling: their pieces are in the plan.
        fingerprint, self.leaves = _fingerprint(model, optimizers, self.others) or (None, [])
        # A load that converts dtypes reads main weights in place of the weights.
        mains: dict[int, torch.Tensor] = {}
        for optimizer in optimizers.values():
            mains |= written_main_weights(optimizer)
        fingerprint = None if mains else fingerprint
        self.is_cached = before is not None and fingerprint is not None and before.fingerprint == fingerprint
        if before is not None and self.is_cached:
            self.cache = before
        else:
            self.state = model_state(model, shared=shared)
            self.optimized = optimizers.state(model, self.state.owned, mains)
            # Copies are compared in each save, which therefore reuses no description.
            if any([merge_copies(self.state.entries), merge_copies(self.optimized.entries)]):
                fingerprint = None
            fields = {
                "parameters": self.state.described,
                "buffers": self.state.buffers,
                "mesh": mesh_sizes(model),
                "extra_states": modules_with_extra_state(model),
                "tied": tied_names(model),
                "optimizer": self.optimized.described if self.optimizers else None,
            }
            digests = {name: digest(repr(fields[name])) for name in ("parameters", "buffers")}
            digests["optimizer"] = digest(repr(self.optimized.described["state"]))
            names = {id(o.parameter): o.key for o in self.state.owned.values()}
            views = views_of(self.leaves, [*self.state.entries.values(), *self.optimized.entries.values()])
            fingerprint = None if views is None else fingerprint
            self.cache = _SaveCache(fields, names, digests, fingerprint, views or [])
            # Missing states of experts are added later; the ranks' messages determine them.
            self.signature = rank(), world_size(), signature_of(self.entries())
            # The description may have changed, for example a name of a tie, while the pieces are the same.
            if before is not None and before.plan is not None and before.plan.signature == self.signature:
                self.cache.plan = before.plan
        self.groups = optimizers.groups(self.cache.names)
        self.semantics = record(model)

    def seen(self, target: Path) -> _RankMessage:
        """Return this rank's message to rank 0, which compares the ranks."""
        cache, stage, kind = self.cache, None, self.optimizers.class_name
        digests = {
            "path": str(target),
            **cache.digests,
            "optimizer": digest(repr((cache.digests["optimizer"], kind, self.groups))),
            "delayed-scaling state": digest(repr(self.delayed)),
            # A rank's experts may not have run, and a user's modules may store their rank.
            "settings of modules": digest(repr(to_json(from_json(self.semantics)))),
        }
        components = [state.components.get(UnreducedGradients) for state in self.sharded]
        digests[PROGRESS] = ", ".join(str(c.progress) for c in components if c is not None)
        if self.stage is not None:
            # One rank of each stage sends its fields: the others of the stage have the same.
            speaks = int(self.stage.mesh.mesh.min()) == rank()
            stage = self.stage.across.get_local_rank(), self.fields() if speaks else None
        experts = {} if self.is_cached else self.optimized.experts
        token = None if cache.plan is None else cache.plan.token
        return digests, self.own, experts, token, stage

    def fields(self) -> dict[str, Any]:
        """Return this rank's fields of the manifest."""
        fields = {**self.cache.fields, "delayed": self.delayed, "semantics": self.semantics}
        if self.optimizers:
            fields["optimizer"] = {**fields["optimizer"], "groups": self.groups}
        return fields

    def entries(self) -> dict[str, TensorEntry]:
        """Return the entries of all tensors that have elements."""
        return _stored({**self.state.entries, **self.optimized.entries}) | self.others

    @torch.no_grad()
    def tensors(self) -> list[torch.Tensor]:
        """Return the tensors of all pieces of :meth:`entries`, in the order of the pieces' numbers."""
        if not self.is_cached:
            return tensors_of(self.entries())
        views = ((self.leaves[index], layout) for index, layout in self.cache.views)
        tensors = [leaf if layout is None else leaf.as_strided(*layout) for leaf, layout in views]
        return [*tensors, *tensors_of(self.others)]


def _stored(entries: dict[str, TensorEntry]) -> dict[str, TensorEntry]:
    return {key: entry for key, entry in entries.items() if not entry.is_empty}


def _fingerprint(
    model: nn.Module, optimizers: Optimizers, others: dict[str, TensorEntry]
) -> tuple[list[Any], list[torch.Tensor]] | None:
    """Return everything that determines the description of model and optimizer, and their local tensors.

    Comparing it takes a tenth of the time of a description. Objects are compared by ``id`` together with every
    described property, so an ``id`` that is reused for an equal object does no harm. Tensors are in the order of
    entries. ``None`` if more matters: quantized weights, grouped weights of experts, state that is sharded further
    than the weights, optimizers by name.
    """
    fsdp2_units.wait_and_reshard(model)
    # An optimizer without a name has the empty one.
    if optimizers.keys() - {""}:
        return None
    optimizer = optimizers.get("")
    grouped = any(_te.kind_of(module) == "GroupedLinear" for module in model.modules())
    if grouped or (optimizer is not None and main_parameters_of(optimizer) is not None):
        return None
    facts: list[Any] = [rank(), world_size(), original_layouts(model), signature_of(others)]
    parameters, buffers = dict[int, torch.Tensor](), dict[int, torch.Tensor]()
    for prefix, module in model.named_modules():
        binding = binding_of(module)
        layout = binding and (binding.tp_mesh, dict(binding.rules), binding.ep.mesh, binding.ep.experts_mesh)
        saved = [b for n, b in module._buffers.items() if b is not None and _torch.is_persistent(module, n)]
        parameters |= {id(p): p for p in module._parameters.values() if p is not None}
        buffers |= {id(buffer): buffer for buffer in saved}
        own = *module._parameters, *map(id, module._parameters.values())
        facts.append((prefix, id(module), type(module), layout, own, *module._buffers, *map(id, saved)))
    # Comparing by columns takes a third of the time of one row per tensor.
    optimizer_states = [] if optimizer is None else [*optimizer.state.values()]
    values = [value for state in optimizer_states for value in state.values()]
    tensor_types = {kind for kind in {*map(type, values)} if issubclass(kind, torch.Tensor)}
    states = [value for value in values if type(value) in tensor_types]
    if optimizer is not None:
        facts.append(
            (type(optimizer), [[id(p) for p in group["params"]] for group in optimizer.param_groups])
        )
        facts += [[*map(id, optimizer.state)], [*map(tuple, optimizer_states)]]
        facts.append([None if type(value) in tensor_types else repr(value) for value in values])
    tensors = [*parameters.values(), *buffers.values(), *states]
    leaves = _torch.local_tensors_of(tensors)
    if not {*map(type, leaves)} <= {torch.Tensor, torch.nn.Parameter}:
        return None
    facts += [[*map(id, tensors)], [*map(id, leaves)], _torch.specs_of(tensors)]
    facts += [[leaf.shape for leaf in leaves], [*map(torch.Tensor.stride, leaves)]]
    facts += [[leaf.dtype for leaf in leaves], [*map(torch.Tensor.storage_offset, leaves)]]
    facts += [[leaf.device for leaf in leaves]]
    return facts, leaves


@without_collector()  # the collector would take half of the call's time for many tensors
def _prepare(
    ranks: RankMessenger,
    target: Path,
    model: nn.Module,
    optimizers: Optimizers,
    extra: Mapping[str, Any] | None,
    keep_last: int | None,
    shared: tuple[str, ...],
) -> RankWriter:
    """Begin a save. Collect, check, make the hidden directory and assign the writers. Collective over the ranks."""
    attempt, created = list[_Collected](), list[Path]()
    # A joined model is made for each call, so the cache of the previous save is found by its first part.
    anchor = model.parts[0][1] if isinstance(model, JoinedModules) else model
    before: _SaveCache | None = background().plans.get(anchor)
    # Rank 0 alone has the encoded metadata. Its answer makes all other ranks plan again, too.
    if ranks.rank == 0 and before and (before.plan is None or before.plan.encoded is None):
        before = None  # the save that its plan was made for has failed

    def collect(before: _SaveCache | None) -> _RankMessage:
        background().raise_unretrieved()
        if keep_last is not None and (type(keep_last) is not int or keep_last < 1):
            expected = "None (keep all) or an integer of at least 1"
            raise CheckpointError("save: keep_last", expected=expected, got=repr(keep_last))
        attempt[:] = [_Collected(model, optimizers, extra, before, shared)]
        return attempt[0].seen(target)

    def begin(seen: list[_RankMessage]) -> list[tuple[Path, dict[str, States], str] | None]:
        digests, per_rank, experts, tokens, stages = map(list, zip(*seen, strict=True))
        if len({*tokens}) > 1:
            return [None] * len(seen)  # a change on one rank makes all ranks plan again
        check_same_model(digests, [stage and stage[0] for stage in stages])
        attempt[0].joined = join(stages, shared) or {}
        attempt[0].extra = join_ranks(attempt[0].extra, per_rank)
        expert_states = join_ranks_experts(experts)
        # After all comparisons, so that a refused save leaves no folder.
        created.append(directories.begin(target))
        return [(created[0], expert_states, secrets.token_hex(16))] * len(seen)

    try:
        begun = ranks.round(partial(collect, before), begin) or ranks.round(partial(collect, None), begin)
        assert begun is not None
        temporary, experts, save_id = begun
        collected, cache = attempt[0], attempt[0].cache
        manifest = _describe(ranks, collected, experts, save_id)
        plan = cache.plan or plan_entries(ranks, temporary, collected.entries(), collected.signature)
        tensors = collected.tensors()
        # Before the copy: an asynchronous save must raise in the call, not in its thread.
        plan.check_replicas(ranks, tensors)
        own = [Block(numbers, [tensors[number] for number in numbers]) for numbers in plan.blocks]
        writer = RankWriter(ranks, temporary, manifest, plan, own)
        # After the checks: a save that raised leaves no plan behind.
        cache.plan = plan
        background().plans[anchor] = cache
        return writer
    except BaseException:
        for temporary in created:
            directories.discard(temporary)
        raise


def _describe(
    ranks: RankMessenger, collected: _Collected, experts: dict[str, States], save_id: str
) -> Manifest:
    """Add the expert states that this rank lacks; return the manifest without files. Collective over the ranks."""
    if experts:  # allocates

        def complete() -> None:
            if not collected.is_cached:  # else this stage has none
                collected.optimized.complete(experts, collected.state.members)

        ranks.round(complete, lambda seen: [None] * len(seen))
    stage = collected.stage
    share_newest_amax(collected.delayed_entries, None if stage is None else stage.mesh)
    versions = {"te_fsdp": VERSION, "torch": torch.__version__}
    if _te.is_loaded():
        versions["transformer_engine"] = metadata.version("transformer_engine")
    fields = {**collected.fields(), **collected.joined}
    fields |= {"versions": versions, "extra": collected.extra}
    if fields["optimizer"] is not None:
        # Not in place: a later save reuses the dict.
        fields["optimizer"] |= {"state": {**fields["optimizer"]["state"], **experts}}
    return Manifest(saved_at=time.time_ns(), save_id=save_id, **fields)


def _complete(
    handle: SaveHandle, writer: RankWriter, keep_last: int | None, progress: bool | None, began: float
) -> None:
    """Write the files and make them visible, or raise any rank's error. Collective over the ranks, in any thread."""
    ranks, manifest, target, old_checkpoints = writer.ranks, writer.manifest, handle.path, []

    def write() -> tuple[Any, Listed]:
        bar = bytes_bar(f"saving {target.name}", handle.bytes, progress)
        with explain_os_errors(target, handle.bytes), bar as tick:
            return writer.write(tick)

    def commit(written: list[tuple[Any, Listed]]) -> list[None]:
        names = [file_of(rank) for rank in range(ranks.size)]
        # One listing, because a check of each file costs a request on network file systems.
        seen = listing(writer.path)
        invisible = [name for name in names if not (name in seen or (writer.path / name).is_file())]
        if invisible:
            raise CheckpointError(
                f"{writer.path}: rank 0 does not see {shorten(invisible)}",
                expected="a directory that all ranks share",
                fix="save onto a file system that all nodes mount",
            )
        with explain_os_errors(target):
            # As late as possible, so that concurrent saves rarely choose the same number.
            manifest.number = directories.next_number(target.parent)
            writer.finish(written)
            manifest.write(writer.path)
            directories.commit(writer.path, target)
        if keep_last is not None:
            old_checkpoints.extend(directories.hide_old(target, manifest, keep_last))
        return [None] * len(written)

    try:
        ranks.round(write, commit)
    except TeFsdpError as error:
        raise as_failed_save(target, error, manifest.save_id) from error
    finally:
        if ranks.rank == 0:
            directories.discard(writer.path)
    # Removing takes long on network file systems. The checkpoints are already hidden, so no rank waits.
    for path in old_checkpoints:
        directories.remove(path)
    _log.info("saved %s in %.2f s", target, time.perf_counter() - began)
    handle.finish()


def as_failed_save(path: Path, error: TeFsdpError, save_id: str) -> CheckpointError:
    """Return the error of a save that failed while or after writing."""
    why = "No checkpoint appeared at the path; earlier checkpoints are unchanged"
    with suppress(CheckpointError):  # there is none
        if Manifest.read(path).save_id == save_id:  # a rank died after it had written
            why = "The checkpoint was complete by then, and exists"
    return CheckpointError(
        f"{path}: save failed {error}",
        why=why,
        fix="see the cause above; check that all ranks reach the directory, and its free space",
    )
