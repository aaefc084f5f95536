"""The part of a load that changes things: reads, converts, and lets what was not saved follow what was."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from te_fsdp import _te, _te_delayed
from te_fsdp.agree import all_agree, rank
from te_fsdp.checkpoint.compare import WHOLE_OPTIMIZER, Differences
from te_fsdp.checkpoint.conversion import (
    Conversion,
    batches,
    keeping_main_weights,
    main_weight,
    main_weight_of,
    plan_conversion,
    set_main_weight,
)
from te_fsdp.checkpoint.delayed import make_delayed, other_format_modules, reset_delayed
from te_fsdp.checkpoint.entries import Entry, add_entry, whole_entry
from te_fsdp.checkpoint.extra import decode, for_rank, tensor_slots
from te_fsdp.checkpoint.manifest import Manifest
from te_fsdp.checkpoint.model_state import ModelState, Owned, mesh_sizes
from te_fsdp.checkpoint.optimizer_state import prepare_loading, restore_groups, shared_numbers
from te_fsdp.checkpoint.source import Source
from te_fsdp.errors import CheckpointError, shorten
from te_fsdp.sharding.outer_optimizer import chunk_in

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

__all__ = ["Filling"]


@dataclass
class Filling:
    """A load whose differences are all allowed.

    Attributes:
        source: What is read.
        model: The model.
        optimizer: Its optimizer, if it is to be loaded or to follow.
        state: The model's entries.
        found: The differences, of all ranks.
    """

    source: Source
    model: nn.Module
    optimizer: Optimizer | None
    state: ModelState
    found: Differences

    def __post_init__(self) -> None:
        self.manifest: Manifest = self.source.manifest
        fitting = (self.manifest.parameters.keys() | self.manifest.buffers.keys()) - self.found.names()
        # In the model's order, which is every rank's: collectives follow it.
        self.names = [n for n in [*self.state.described, *self.state.buffers] if n in fitting]
        self.notes: list[str] = list(self.source.notes)
        self.sources: dict[str, str] = {}
        differing = self.found.optimizer_names()
        taken = self.optimizer is not None and WHOLE_OPTIMIZER not in differing
        self.saved_optimizer: dict[str, Any] | None = self.manifest.optimizer if taken else None
        self.left_states = differing | (self.state.members.keys() - set(self.names))
        self.main_loaded: set[str] = set()
        self.others = keeping_main_weights(self.state.owned.values(), self.optimizer)

    def run(self) -> dict[str, Any]:
        """Read everything, then change the model and its optimizer. Collective over the world.

        Returns:
            The user's ``extra``.

        Raises:
            CheckpointError: Something cannot be read, on any rank. Nothing has changed.
        """
        self._check_shared_numbers()
        conversions = self._conversions()
        direct = [name for name in self.names if name not in conversions]
        delayed = self._delayed()
        extra, homeless = for_rank(self.manifest.extra, self.manifest.mesh, mesh_sizes(self.model), rank())
        slots = {**tensor_slots(extra), **self._delayed_slots(delayed)}
        with self._taken_back_on_error():
            # A rank may lack the memory for what the optimizer is to get.
            entries = all_agree(lambda: self._direct_entries(direct))
            wanted = {**entries, **slots}
            all_agree(lambda: self._add_conversions(conversions, wanted))
            self.source.stage(wanted)
        # All has been read and is right. From here on the model changes.
        self.source.staged.fill({**entries, **slots})
        _fill_delayed(make_delayed(self.model, delayed), slots)
        self._restart_delayed(set(delayed), direct)
        self.state.finish_loading(set(direct))
        sizes = {name: math.prod(self.manifest.tensor(name)["shape"]) for name in conversions}
        for batch in batches(conversions, sizes):
            self._convert(batch, set(delayed))
        for owned in self._members(direct):
            self._refresh_main_weights(owned, None)
        if self.optimizer is not None and self.saved_optimizer is not None:
            loaded = self.state.members.keys() - self.left_states
            left = restore_groups(self.optimizer, self.saved_optimizer, self.state.owned, loaded)
            self.notes += [f"options of optimizer group {index} left as they were" for index in left]
        for name in sorted({type(other).__name__ for other in self.others}):
            self.notes.append(
                f"{name}, which was not given to load: its main weights are those of the loaded weights, its other "
                "state is as it was"
            )
        if homeless:
            self.notes.append(
                f"values per rank were saved on another mesh, so they are None: {shorten(homeless)}"
            )
        return decode(extra, slots)

    def converted(self) -> dict[str, str]:
        """How each converted tensor was converted, for the user."""
        own = {name: how for name, how in self.found.converted.items() if self._is_loaded(name)}
        return {n: f"{how}, from {self.sources[n]}" if n in self.sources else how for n, how in own.items()}

    def _is_loaded(self, name: str) -> bool:
        if not name.startswith("optimizer.state."):
            return name in self.names
        parameter = name.removeprefix("optimizer.state.").rpartition(".")[0]
        return self.saved_optimizer is not None and parameter not in self.left_states

    def _members(self, names: list[str]) -> list[Owned]:
        """This rank's parameters of some tensors."""
        return [owned for name in names for owned in self.state.members.get(name, [])]

    def _conversions(self) -> dict[str, list[Conversion]]:
        """What goes through high precision, by name of the files' tensor."""
        states = (self.manifest.optimizer or {"state": {}})["state"]
        found: dict[str, list[Conversion]] = {}
        for name in [n for n in self.names if n in self.found.converted and n not in self.state.buffers]:
            saved = self.manifest.tensor(name)
            members = self.state.members.get(name, [])
            found[name] = [plan_conversion(owned, saved, states.get(name, {})) for owned in members]
            if found[name]:
                self.sources[name] = found[name][0].source
        return found

    def _direct_entries(self, direct: list[str]) -> dict[str, Entry]:
        """What goes into its place as it is; state that the optimizer lacks is made."""
        entries = {key: self.state.entries[key] for name in direct for key in self.state.keys[name]}
        return entries | self._optimizer_entries()

    def _add_conversions(self, conversions: dict[str, list[Conversion]], wanted: dict[str, Entry]) -> None:
        """Add what will be converted, without memory of the device for it yet."""
        _, more = self._sources([c for named in conversions.values() for c in named], "meta")
        for key, entry in more.items():
            add_entry(wanted, key, entry)

    @contextmanager
    def _taken_back_on_error(self) -> Iterator[None]:
        """The optimizer's state as it was, if reading fails: state was made or dropped, but none was written to."""
        states = {} if self.optimizer is None else self.optimizer.state
        before = [(parameter, state, dict(state)) for parameter, state in states.items()]
        try:
            yield
        except BaseException:
            states.clear()
            for parameter, state, values in before:
                state.clear()
                state.update(values)
                states[parameter] = state
            raise

    def _optimizer_entries(self) -> dict[str, Entry]:
        if self.optimizer is None or self.saved_optimizer is None:
            return {}
        weights, owned = self.manifest.parameters, self.state.owned
        prepared = prepare_loading(self.optimizer, self.saved_optimizer, owned, weights, self.left_states)
        entries, self.main_loaded = prepared
        return entries

    def _check_shared_numbers(self) -> None:
        """Numbers that each expert has of its own in the files, and all share here, must be equal. Collective.

        Raises:
            CheckpointError: They differ. Nothing has changed.
        """
        if self.saved_optimizer is None:
            return
        vectors = shared_numbers(self.saved_optimizer, self.state.members, self.left_states)
        if not vectors:  # on no rank, then
            return
        self.source.read({key: whole_entry(vector) for key, (vector, _) in vectors.items()})
        differing = [key for key, (v, experts) in vectors.items() if len(v[experts].unique(dim=0)) > 1]
        if differing:
            raise CheckpointError(
                f"{self.source.path}: {shorten(differing)}",
                expected="one number for all experts, which are one parameter here",
                got="different ones",
                why="Nothing was loaded",
                fix="build the layer without a single grouped weight, or load without the optimizer",
            )

    def _delayed(self) -> dict[str, Any]:
        """Delayed-scaling state that this model takes."""
        fitting = {n: d for n, d in self.manifest.delayed.items() if n not in self.found.names()}
        foreign = other_format_modules(self.model, fitting)
        if foreign:
            self.notes.append(
                f"delayed-scaling state of {len(foreign)} module(s) not taken: their weights have another format here"
                f" ({shorten(foreign)})"
            )
        return {name: d for name, d in fitting.items() if name not in foreign}

    def _delayed_slots(self, described: dict[str, Any]) -> dict[str, Entry]:
        """Memory on the host for delayed-scaling state, whole: it is small, and modules get theirs after reading."""
        have, slots = self.source.described(), {}
        for name, recipe in described.items():
            for key in (key for key in have if key.startswith(f"delayed.{name}:")):
                shape, dtype = have[key]
                if key.endswith("amax_history") and (
                    len(shape) != 2 or shape[0] != recipe["amax_history_len"]
                ):
                    raise CheckpointError(
                        f"{self.source.path}: {key}",
                        expected=f"a history of {recipe['amax_history_len']} steps",
                        got=f"shape {shape}",
                        why="Nothing was loaded",
                        fix="the checkpoint is damaged, load an earlier one",
                    )
                slots[key] = whole_entry(torch.empty(shape, dtype=dtype, device="cpu"))
        return slots

    def _restart_delayed(self, loaded: set[str], direct: list[str]) -> None:
        """Delayed-scaling state that was not loaded: of a fresh module, but with the scales of the loaded weights."""
        restarted = reset_delayed(self.model, keep=loaded | self.found.names())
        if restarted:
            self.notes.append(
                f"delayed-scaling state of {len(restarted)} module(s) not in the checkpoint: histories begin anew, "
                f"weights keep their scales ({shorten(restarted)})"
            )
        for owned in self._members(direct):
            if owned.key.rpartition(".")[0] in loaded or not _te.is_quantized(owned.local):
                continue
            if _te.has_delayed_scale(owned.local):
                _te_delayed.follow_scale(owned.module, owned.name, owned.local)

    def _convert(self, batch: list[Conversion], delayed: set[str]) -> None:
        """Convert and store a few weights. Collective over the world."""
        live, wanted = all_agree(lambda: self._sources(batch))
        self.source.staged.fill(wanted)
        for conversion in batch:
            owned = conversion.owned
            value = live[owned.fqn] if owned.fqn in live else conversion.value()
            conversion.store(value, keep_delayed_scale=owned.key.rpartition(".")[0] in delayed)
            self._refresh_main_weights(owned, value)

    def _sources(
        self, batch: list[Conversion], device: str | None = None
    ) -> tuple[dict[str, torch.Tensor], dict[str, Entry]]:
        """Main weights that are read and give the values, by parameter; and memory for what the others are made of."""
        live: dict[str, torch.Tensor] = {}
        wanted: dict[str, Entry] = {}
        for conversion in batch:
            owned = conversion.owned
            main = main_weight(self.optimizer, owned.parameter)
            is_main = conversion.key == main_weight_of(owned.key) and owned.fqn in self.main_loaded
            whole = self.optimizer is not None and chunk_in(self.optimizer, owned.parameter) is None
            if main is not None and main.dtype == torch.float32 and is_main and whole:
                live[owned.fqn] = main
            else:
                for key, entry in conversion.entries(device).items():
                    add_entry(wanted, key, entry)
        return live, wanted

    def _refresh_main_weights(self, owned: Owned, value: torch.Tensor | None) -> None:
        """Main weights that were not loaded follow the weight, lest the optimizer's step undo the load."""
        if self.optimizer is not None and owned.fqn not in self.main_loaded:
            # The quantized weight has less than what was read: the main weight is made of the latter.
            set_main_weight(self.optimizer, owned, value, make=True)
        for optimizer in self.others:
            set_main_weight(optimizer, owned, value)


def _fill_delayed(entries: dict[str, Entry], slots: dict[str, Entry]) -> None:
    """Copy delayed-scaling state from the whole tensors into the modules' own, which may be some experts'."""
    for key, entry in entries.items():
        whole = slots[key].pieces[0].tensor
        for piece in entry.pieces:
            part = tuple(
                slice(at, at + size) for at, size in zip(piece.offsets, piece.tensor.shape, strict=True)
            )
            piece.tensor.copy_(whole[part])
