"""``load``: restore a model from a checkpoint on any mesh.

Checkpoint, model and optimizer are compared first, and all differences are reported at once. Then everything is read,
and only then is anything changed. State that was not saved follows state that was: main weights follow the weights,
the scales of delayed scaling the quantized weights.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import nn
from torch.optim import Optimizer

from te_fsdp.checkpoint.async_save import background
from te_fsdp.checkpoint.compare import WHOLE_OPTIMIZER, Differences, check_spans_world, compare, take_own_part
from te_fsdp.checkpoint.extra import decode, for_rank, tensor_slots
from te_fsdp.checkpoint.load_source import Source, open_source
from te_fsdp.checkpoint.model_state import (
    ModelState,
    OwnedTensor,
    delayed_modules,
    joined_model,
    make_delayed,
    mesh_sizes,
    model_state,
    modules_of,
    stage_of,
)
from te_fsdp.checkpoint.optimizer_state import Optimizers, SavedOptimizer, split
from te_fsdp.checkpoint.reading import Conversion, Rectangle
from te_fsdp.checkpoint.shard_files import damaged_value, without_collector
from te_fsdp.checkpoint.storage import absolute
from te_fsdp.checkpoint.tensor_entries import TensorEntry
from te_fsdp.collectives.agreement import all_agree, gather, rank, through_rank_0, world_size
from te_fsdp.collectives.rendezvous import collective_call, errors_interrupt
from te_fsdp.errors import CheckpointError, require_flags, require_kind, shorten
from te_fsdp.features.main_weights import optimizers_with_stale_main_weights, set_main_weight
from te_fsdp.layout import slices
from te_fsdp.modules.semantics import format_differences
from te_fsdp.upstream import te as _te, te_modules as _te_modules, torch_dtensor as _torch

_log = logging.getLogger("te_fsdp")


class Loaded(dict[str, Any]):
    """The saved ``extra``, with a report of the load.

    Attributes:
        left: Name of a tensor, module or optimizer state that was not loaded -> reason.
        converted: Name -> conversion, and the origin of the values.
        notes: Further values with an unusual origin, as texts.
    """

    def __init__(
        self, extra: dict[str, Any], left: dict[str, str], converted: dict[str, str], notes: list[str]
    ) -> None:
        super().__init__(extra)
        self.left, self.converted, self.notes = left, converted, notes

    @property
    def is_complete(self) -> bool:
        """Return whether everything was loaded."""
        return not self.left


def load(
    path: str | os.PathLike[str],
    model: nn.Module | Mapping[str, nn.Module] | Iterable[nn.Module],
    optimizer: Optimizer | Mapping[str, Optimizer] | None = None,
    *,
    strict: bool = True,
    allow: Iterable[str] = (),
    convert: bool = True,
    verify: bool = False,
    read: Literal["auto", "each", "once"] = "auto",
) -> Loaded:
    """Load a checkpoint into a model and its optimizer, in place, independent of the mesh that saved it.

    First compares the checkpoint with model and optimizer. On any difference nothing is changed. Weights of a different
    dtype or quantization format are converted from saved main weights if there are any, else from the (dequantized)
    values: rounded or quantized once, with the amax of the unsharded weight. Missing optimizer state is allocated.
    Collective over the world: call on all ranks. All ranks must reach the directory.

    Directories of plain ``torch.distributed.checkpoint`` are loaded too: a model's state dict, or ``{"model": ...,
    "optimizer": ...}`` from ``get_state_dict``. ``notes`` lists the loaded parts.

    Args:
        path: A checkpoint of :func:`te_fsdp.checkpoint.save`, or a plain one; ``"s3://..."`` as well.
        model: The model on its device, sharded or not, a rank's stages, or models by name; it is overwritten.
        optimizer: Over the model's current parameters, or several by name as in the save. Group options are overwritten
            by the saved ones. ``None``: none is read. Other optimizers' main weights follow the weights, see ``notes``.
        strict: Whether everything must fit. ``False``: differing or missing state is left and named in the result and a
            warning, optimizer state parameter by parameter. Settings that change the function of modules still raise.
        allow: Names of deliberate differences, as shell patterns (``"head.*"``), that may be left: a parameter with its
            optimizer state, ``"optimizer"`` for the entire optimizer, ``"*.eps"`` for a setting of modules,
            ``"settings"`` for all in a checkpoint that records none.
        convert: Whether weights and state of a different dtype or format are converted. ``False``: these differ.
        verify: Compare all files with their checksums first, each on one rank. Otherwise manifest, DCP's metadata,
            sizes of the files and (from format 3 on) the data that are read are checked.
        read: ``"each"``: every rank reads its own data. ``"once"``: data for several ranks (HSDP's replicas) are read
            in parts, one per rank, and sent. ``"auto"``: once from object storage, else each. Rank 0's value is used.

    Returns:
        The saved ``extra``, with tensors on the CPU and this rank's values of ``PerRank`` (``None`` with a warning on
        a different mesh). Its attributes list everything that was not simply copied.

    Raises:
        CheckpointError: No checkpoint, a damaged one, or one that differs: all differences in one text, on all ranks.
        OrderError: The optimizer was built before the model was sharded.
        CollectiveError: Some ranks did not make the call within :func:`te_fsdp.set_collective_timeout`.
    """
    require_flags("load", CheckpointError, strict=strict, convert=convert, verify=verify)
    require_kind("load", "allow", allow, Iterable, expected="names", error=CheckpointError)
    source, model, optimizers = absolute(path), joined_model(model), Optimizers(optimizer)
    with _joint_load(model), without_collector():
        began = time.perf_counter()
        opened = open_source(source, model, optimizers.class_name, verify=verify, read=read)
        take_own_part(opened, model)
        state, diff = all_agree(lambda: _compare(opened, model, optimizers))
        diff = diff.over_all_ranks(convert=convert)
        diff.without(allow, strict=strict).refuse(opened)
        loaded = ModelLoader(opened, model, optimizers, state, diff).result()
        _log.info("loaded %s in %.2f s", source, time.perf_counter() - began)
        return loaded


@contextmanager
def _joint_load(model: nn.Module) -> Iterator[None]:
    """Enter the load on all ranks, with rank 0 as coordinator of all agreements. Collective over the world."""
    # Under a different name for a stage, ranks with and without one raise instead of waiting for each other.
    with collective_call("checkpoint.load" + (" (a stage)" if stage_of(model) else "")):
        if world_size() > 1:
            background().wait()  # a running save uses the same process group
        # The other ranks wait in the next agreement for a rank that raises between two of them, as MemoryError.
        with through_rank_0(), errors_interrupt():
            yield


def _compare(source: Source, model: nn.Module, optimizers: Optimizers) -> tuple[ModelState, Differences]:
    """Return this rank's model state and all differences that it detects; change nothing."""
    manifest, stage = source.manifest, stage_of(model)
    check_spans_world(model, stage)
    state = model_state(model, may_cut_blocks=True)
    diff = compare(source, model, state)
    # Only weights need a source of values. Conversions of optimizer state are casts.
    for name in diff.converted.keys() & state.members.keys():
        for owned in state.members[name]:
            Conversion.of(owned, manifest.tensor(name), {})  # raises without values
    if optimizers:
        optimizers.compare(diff, model, manifest.optimizer, state.owned)
    return state, diff


class ModelLoader:
    """The part of a load that changes model and optimizer, given only allowed differences.

    Its ``notes`` describe values with an unusual origin.
    """

    def __init__(
        self, source: Source, model: nn.Module, optimizers: Optimizers, state: ModelState, diff: Differences
    ) -> None:
        self.source, self.model, self.optimizers, self.stage = source, model, optimizers, stage_of(model)
        self.state, self.diff, self.manifest = state, diff, source.manifest
        fitting = (self.manifest.parameters.keys() | self.manifest.buffers.keys()) - diff.names()
        # In the model's order, which is every rank's: collectives follow it.
        self.names = [n for n in [*state.described, *state.buffers] if n in fitting]
        self.notes: list[str] = list(source.notes)
        differing = {name for _, name in diff.optimizer}
        taken = bool(optimizers) and WHOLE_OPTIMIZER not in differing
        self.saved_optimizer: dict[str, Any] | None = self.manifest.optimizer if taken else None
        saved_parts = {} if self.saved_optimizer is None else split(self.saved_optimizer)
        #: The optimizers that are loaded
        self.loaded_optimizers = [
            SavedOptimizer(own, saved_parts[n], state.owned)
            for n, own in optimizers.items()
            if n in saved_parts
        ]
        self.left_states = differing | (state.members.keys() - set(self.names))
        self.mains: set[str] = set()  #: Parameters whose main weight is loaded
        self.others = optimizers_with_stale_main_weights(
            (o.parameter for o in state.owned.values()), [*optimizers.values()]
        )

    def run(self) -> dict[str, Any]:
        """Read everything, then change the model and its optimizer; return ``extra``. Collective over the world.

        Raise CheckpointError, with nothing changed, if any rank cannot read its data.
        """
        saved_states = (self.manifest.optimizer or {"state": {}})["state"]
        conversions: dict[str, list[Conversion]] = {}
        for name in [n for n in self.names if n in self.diff.converted and n not in self.state.buffers]:
            description, own = self.manifest.tensor(name), saved_states.get(name, {})
            members = self.state.members.get(name, [])
            conversions[name] = [Conversion.of(owned, description, own) for owned in members]
            if members:
                self.diff.converted[name] += f", from {conversions[name][0].source}"
        numbers = self._shared_numbers()
        direct = [name for name in self.names if name not in conversions]
        extra, lost = for_rank(self.manifest.extra, self.manifest.mesh, mesh_sizes(self.model), rank())
        delayed, delayed_slots = self._delayed()
        slots = {**tensor_slots(extra), **delayed_slots}
        states = [optimizer.state for optimizer in self.optimizers.values()]
        # A failed read must leave the optimizer as it was. Reads go to the host, so no tensor is written.
        before = [{parameter: dict(state) for parameter, state in own.items()} for own in states]
        try:
            # A rank may lack the memory for optimizer state.
            entries, rectangles = all_agree(lambda: self._entries(direct, conversions))
            self.source.stage({**entries, **slots}, [*rectangles, *numbers])
            all_agree(lambda: self._check_shared(numbers))
        except BaseException:
            # State was allocated or dropped, but not written to.
            for own, original in zip(states, before, strict=True):
                own.clear()
                own.update(original)
            raise
        # Everything was read and checked. From here on the model changes.
        self.source.staged.fill({**entries, **slots})
        for key, entry in make_delayed(self.model, delayed).items():
            for piece in entry.pieces:  # perhaps of some experts only
                piece.tensor.copy_(slots[key].pieces[0].tensor[slices(piece.offsets, piece.tensor.shape)])
        copied = [owned for name in direct for owned in self.state.members.get(name, [])]
        self._restart_delayed(delayed, copied)
        for owned in copied:
            if _te.is_quantized(owned.local):
                owned.drop_derived_state()
            self._refresh_main_weights(owned, None)
        self._convert(conversions, delayed)
        for optimizer in self.loaded_optimizers:
            left = optimizer.restore_groups(self.state.members.keys() - self.left_states)
            self.notes += [f"options of optimizer group {index} left as they were" for index in left]
        for name in sorted({type(other).__name__ for other in self.others}):
            self.notes.append(
                f"{name}, which was not passed to load: its main weights are set to the loaded weights, its other "
                "state is unchanged"
            )
        if lost:
            text = "values per rank were saved on a different mesh, so they are None"
            self.notes.append(f"{text}: {shorten(lost)}")
        return decode(extra, slots)

    def result(self) -> Loaded:
        """Return :meth:`run` as the result of a load; log everything that was not simply copied."""
        extra = self.run()
        harmless = format_differences(d for d in self.diff.settings.values() if d.effect == "note")
        # A conversion is reported if its tensor, or the state's parameter, was loaded.
        taken = {*self.names}
        if self.saved_optimizer is not None:
            taken |= {f"optimizer.state.{name}" for name in self.state.members.keys() - self.left_states}
        items = self.diff.converted.items()
        converted = {name: text for name, text in items if {name, name.rpartition(".")[0]} & taken}
        notes, path = [*self.notes, *harmless], self.source.source
        loaded = Loaded(extra, self.diff.left(), converted, notes)
        if loaded.left:
            _log.warning("%s: loaded partially; not loaded: %s", path, "; ".join(self.diff.texts()))
        if converted:
            shown = [f"{name}: {text}" for name, text in converted.items()]
            _log.warning("%s: %d tensor(s) converted (%s)", path, len(shown), shorten(shown, 3))
        silent = [*self.source.notes, *harmless] if rank() else []  # rank 0 logs them
        for note in notes:
            if note not in silent:
                _log.warning("%s: %s", path, note)
        return loaded

    def _entries(
        self, direct: list[str], conversions: dict[str, list[Conversion]]
    ) -> tuple[dict[str, TensorEntry], list[Rectangle]]:
        """Return entries to copy directly, allocated if the optimizer lacks them, and rectangles for conversions."""
        entries = {key: self.state.entries[key] for name in direct for key in self.state.keys[name]}
        for optimizer in self.loaded_optimizers:
            states, mains = optimizer.prepare(self.manifest.parameters, self.left_states)
            entries, self.mains = entries | states, self.mains | mains
        planned = (conversion for members in conversions.values() for conversion in members)
        return entries, [rectangle for conversion in planned for rectangle in conversion.reads()]

    def _shared_numbers(self) -> dict[Rectangle, list[int]]:
        """Return numbers that the files have for each expert, and that the experts share here."""
        # The number of one expert would be taken for all, so all are read and compared.
        result = {}
        for name, states in (self.saved_optimizer or {"state": {}})["state"].items():
            members = self.state.members.get(name, [])
            if name in self.left_states or not members or members[0].expert is not None:
                continue
            for key, described in states.items():
                if described.get("scalar"):
                    shape = tuple(described["shape"])
                    result[f"optimizer.state.{name}.{key}", (0,) * len(shape), shape] = described["experts"]
        return result

    def _check_shared(self, numbers: dict[Rectangle, list[int]]) -> None:
        """Raise CheckpointError if the experts' numbers, which were read, differ. Local operation."""
        staged, host = self.source.staged, torch.device("cpu")
        values_by_key = [(area[0], staged.new(area, host)[experts]) for area, experts in numbers.items()]
        differing = [key for key, values in values_by_key if len(values.unique(dim=0)) > 1]
        if differing:
            raise CheckpointError(
                f"{self.source.source}: {shorten(differing)}",
                expected="one number for all experts, which are one parameter here",
                got="different numbers",
                why="Nothing was loaded",
                fix="build the layer without a single grouped weight, or load without the optimizer",
            )

    def _delayed(self) -> tuple[dict[str, Any], dict[str, TensorEntry]]:
        """Return the delayed-scaling state that this model takes, by module, and host memory for all of it.

        It is small. It is assigned after reading. Modules whose weights have a different format here take none.
        """
        modules, differing, stored = modules_of(self.model), self.diff.names(), self.source.described()
        taken: dict[str, Any] = {}
        slots: dict[str, TensorEntry] = {}
        foreign = []
        for name, recipe in self.manifest.delayed.items():
            if name in differing:
                continue
            locals_ = _torch.local_tensors_of(p for p in modules[name]._parameters.values() if p is not None)
            delayed = [_te.has_delayed_scale(local) for local in locals_ if _te.is_quantized(local)]
            if delayed and not any(delayed):
                foreign.append(name)
                continue
            taken[name] = recipe
            for state in (f"delayed.{name}:scaling_fwd", f"delayed.{name}:scaling_bwd"):
                keys = f"{state}.scale", f"{state}.amax_history"
                (scales, _), (history, _) = kinds = [stored.get(key, ((), torch.float32)) for key in keys]
                if len(scales) != 1 or tuple(history) != (recipe["amax_history_len"], *scales):
                    steps = recipe["amax_history_len"]
                    expected = f"a history of {steps} steps for as many tensors as there are scales"
                    raise damaged_value(f"{self.source.source}: {keys[1]}", expected, f"shape {history}")
                for key, (shape, dtype) in zip(keys, kinds, strict=True):
                    slots[key] = TensorEntry.replicated(torch.empty(shape, dtype=dtype, device="cpu"))
        if foreign:
            self.notes.append(
                f"delayed-scaling state of {len(foreign)} module(s) not taken: their weights have a different format "
                f"here ({shorten(foreign)})"
            )
        return taken, slots

    def _restart_delayed(self, loaded: dict[str, Any], copied: list[OwnedTensor]) -> None:
        """Reset delayed-scaling state that was not loaded to that of a new module, with the loaded weights' scales."""
        keep, restarted = loaded.keys() | self.diff.names(), []
        for name, (_, states) in delayed_modules(self.model).items():
            # Includes modules of a different format, whose saved state has no meaning for these scales.
            if name not in keep:
                restarted.append(name)
                for state in states.values():
                    state.scale.fill_(1.0)
                    state.amax_history.zero_()
        if restarted:
            self.notes.append(
                f"delayed-scaling state of {len(restarted)} module(s) not in the checkpoint: histories start again, "
                f"weights keep their scales ({shorten(restarted)})"
            )
        for owned in copied:
            is_loaded, local = owned.key.rpartition(".")[0] in loaded, owned.local
            if not is_loaded and _te.is_quantized(local) and _te.has_delayed_scale(local):
                _te_modules.sync_delayed_scale(owned.module, owned.name, local)

    def _convert(self, conversions: dict[str, list[Conversion]], delayed: Collection[str]) -> None:
        """Convert and store weights one at a time, in equal number on all ranks. Collective over the world."""
        # The same names on all ranks, even if these have different experts.
        weights = [*conversions.values()]
        # The agreement below is a collective, so each rank must run it equally often.
        if self.stage is not None:  # stages convert different weights
            weights += [[]] * (max(gather(len(weights))) - len(weights))
        for members in weights:
            # A rank may lack the memory.
            with through_rank_0(enabled=False):
                values = all_agree(lambda members=members: [m.value(self.source.staged) for m in members])
            for conversion, value in zip(members, values, strict=True):
                owned = conversion.owned
                conversion.store(value, keep_delayed_scale=owned.key.rpartition(".")[0] in delayed)
                self._refresh_main_weights(owned, value)

    def _refresh_main_weights(self, owned: OwnedTensor, value: torch.Tensor | None) -> None:
        """Set main weights that were not loaded to the weight, or the next step would undo the load."""
        for optimizer in self.optimizers.values() if owned.fqn not in self.mains else ():
            # The values that were read are more precise than the quantized weight.
            set_main_weight(optimizer, owned.parameter, owned.local, value, make=True)
        for optimizer in self.others:
            set_main_weight(optimizer, owned.parameter, owned.local, value)
