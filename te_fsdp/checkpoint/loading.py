"""``load``: compare checkpoint, model and optimizer, report every difference at once, read all, only then change.

What was not saved follows what was: main weights the weights, delayed scaling's scales the quantized weights.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal

import torch

from te_fsdp import _te, _te_modules
from te_fsdp.agree import all_agree, gather, rank
from te_fsdp.all_ranks import collective_call
from te_fsdp.checkpoint.compare import (
    SETTINGS,
    WHOLE_OPTIMIZER,
    Differences,
    check_whole_job,
    compare_model,
    compare_semantics,
    compare_stacked,
    settle_scaling,
    take_own_part,
)
from te_fsdp.checkpoint.conversion import (
    Conversion,
    batches,
    compare_delayed,
    main_weight_of,
    make_delayed,
    other_format_modules,
    plan_conversion,
    reset_delayed,
)
from te_fsdp.checkpoint.directory import in_use
from te_fsdp.checkpoint.entries import Entry, decode, for_rank, tensor_slots, whole_entry
from te_fsdp.checkpoint.model_state import (
    ModelState,
    Owned,
    as_one,
    mesh_sizes,
    model_state,
    stage_of,
)
from te_fsdp.checkpoint.optimizer_state import (
    check_scaled_state,
    compare_optimizer,
    prepare_loading,
    restore_groups,
)
from te_fsdp.checkpoint.paths import absolute
from te_fsdp.checkpoint.reading import Rectangle
from te_fsdp.checkpoint.source import Source, open_source
from te_fsdp.checkpoint.sums import without_collector
from te_fsdp.errors import CheckpointError, require_flags, shorten
from te_fsdp.layout import slices
from te_fsdp.sharding.main_parameters import optimizer_shard_in
from te_fsdp.sharding.main_weights import check_optimizer, keeping_main_weights, main_weight, set_main_weight

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

_log = logging.getLogger("te_fsdp")


class Loaded(dict[str, Any]):
    """What ``save`` was given as ``extra``, and what the load did.

    Attributes:
        left: Name of a tensor, module or optimizer state that was not loaded -> why.
        converted: Name -> from what to what, and where the values came from.
        notes: Other things that came from elsewhere than usual, in words.
    """

    def __init__(
        self,
        extra: dict[str, Any] | None = None,
        *,
        left: dict[str, str] | None = None,
        converted: dict[str, str] | None = None,
        notes: list[str] | None = None,
    ) -> None:
        super().__init__(extra or {})
        self.left: dict[str, str] = dict(left or {})
        self.converted: dict[str, str] = dict(converted or {})
        self.notes: list[str] = list(notes or [])

    @property
    def is_complete(self) -> bool:
        """Whether nothing was left."""
        return not self.left


def load(
    path: str | os.PathLike[str],
    model: nn.Module | Iterable[nn.Module],
    optimizer: Optimizer | None = None,
    *,
    strict: bool = True,
    allow: Iterable[str] = (),
    convert: bool = True,
    verify: bool = False,
    read: Literal["auto", "each", "once"] = "auto",
) -> Loaded:
    """Load a checkpoint into a model and its optimizer, in place, whatever mesh it was saved on.

    First compares the checkpoint with model and optimizer; on any difference nothing is changed. Weights of another
    dtype or quantization format are converted: from saved main weights if there are some, else from the (dequantized)
    values, rounded or quantized once, with the amax of the whole weight. Optimizer state that is missing is allocated.
    Collective over the world: call on all ranks. All ranks must reach the directory.

    Plain ``torch.distributed.checkpoint`` is taken too: a model's state dict, or ``get_state_dict``'s ``{"model": ...,
    "optimizer": ...}``. TE's ``_extra_state`` is read without running anything of it. ``notes`` says what was taken.

    Args:
        path: A checkpoint that :func:`te_fsdp.checkpoint.save` wrote, or a plain one; ``"s3://..."`` as well.
        model: The model on its device, sharded or not, or a rank's stages; what its parameters hold is overwritten.
        optimizer: Over the model's current parameters; its group options are overwritten by the saved ones. ``None``:
            saved optimizer state is not read. Main weights of others follow the weights, which ``notes`` tells.
        strict: Whether everything must fit. ``False``: what differs or is missing is left, and named in the result and
            a warning; optimizer state parameter by parameter. Settings that change what modules compute raise still.
        allow: Names of deliberate differences, as shell patterns (``"head.*"``), that may be left: a parameter with its
            optimizer state, ``"optimizer"`` for the whole optimizer, ``"*.eps"`` for a setting of modules,
            ``"settings"`` for all in a checkpoint that records none.
        convert: Whether weights and state of another dtype or format are converted. ``False``: they differ.
        verify: Compare all files with their checksums before, each on one rank. Otherwise manifest, DCP's metadata,
            sizes of the files and (from format 3 on) what is read are checked.
        read: ``"each"``: every rank reads all that it loads. ``"once"``: of what several load (HSDP's replicas) each
            reads a part, and sends it to the others. ``"auto"``: once from object storage, else each.

    Returns:
        What ``save`` was given as ``extra``, tensors on the CPU, values per rank as this rank's (on another mesh as
        ``None``, with a warning). Its attributes tell what was not simply copied.

    Raises:
        CheckpointError: None there, a damaged one, or one that differs: all differences in one text, on all ranks.
        OrderError: The optimizer was built before the model was sharded.
        CollectiveError: Some ranks did not make the call within :func:`te_fsdp.set_collective_timeout`.
    """
    require_flags("load", CheckpointError, strict=strict, convert=convert, verify=verify)
    source, model = absolute(path), as_one(model, optimizer)
    # Of a stage another name, lest ranks with and without one wait.
    call = "checkpoint.load" + (" (a stage)" if stage_of(model) else "")
    with collective_call(call), in_use(source), without_collector():
        began = time.perf_counter()
        opened = open_source(source, model, optimizer, verify=verify, read=read)
        take_own_part(opened, model)
        state, found = all_agree(lambda: _compare(opened, model, optimizer))
        found = found.over_all_ranks(convert=convert)
        _refuse(opened, found.without(allow, strict=strict))
        loaded = Filling(opened, model, optimizer, state, found).result()
        _log.info("loaded %s in %.2f s", source, time.perf_counter() - began)
        return loaded


def _compare(source: Source, model: nn.Module, optimizer: Optimizer | None) -> tuple[ModelState, Differences]:
    """Everything that one rank can find out; changes nothing."""
    manifest, stage = source.manifest, stage_of(model)
    check_whole_job(model, stage)
    if stage is None:  # else it was compared with the manifest of the whole model
        source.check_index()
    state = model_state(model, may_cut_blocks=True)
    settle_scaling(source, state.described)
    found = compare_model(manifest, state)
    compare_stacked(found, source, state.described)
    compare_semantics(found, manifest, model, state)
    for kind, name, detail in compare_delayed(model, manifest.delayed):
        found.add(kind, name, detail)
    for name in found.converted.keys() & state.members.keys():
        for owned in state.members[name]:
            plan_conversion(owned, manifest.tensor(name), {})  # raises where there are no values
    if optimizer is None:
        return state, found
    check_optimizer(model, optimizer)
    check_scaled_state(optimizer)
    if manifest.optimizer is None:
        found.add_optimizer("optimizer: none in the checkpoint")
    else:
        compare_optimizer(found, optimizer, manifest.optimizer, state.owned)
    return state, found


def _refuse(source: Source, found: Differences) -> None:
    """Raise if there are differences."""
    if not found:
        return
    mesh = ", ".join(f"{axis}={size}" for axis, size in source.manifest.mesh.items())
    origin = f"saved on {mesh} by te_fsdp {source.manifest.versions.get('te_fsdp')}"
    if SETTINGS in found.settings:
        ways = f'load(..., allow=["{SETTINGS}"]) if the modules were built with these settings'
    else:
        ways = "build model and optimizer as they were saved, name deliberate differences in load(..., allow=[...])"
    if all(setting.effect == "strict" for setting in found.settings.values()):
        ways += ", or load(..., strict=False) to take what fits"
    raise CheckpointError(
        f"{source.path} does not fit: {'; '.join(found.texts())}",
        why=f"Nothing was loaded ({'; '.join(source.notes) or origin})",
        fix=ways,
    )


class Filling:
    """The part of a load that changes things: a source, a model with its optimizer, and differences, all allowed.

    Attributes:
        source: What is read.
        notes: What came from elsewhere than usual, in words.
    """

    def __init__(
        self,
        source: Source,
        model: nn.Module,
        optimizer: Optimizer | None,
        state: ModelState,
        found: Differences,
    ) -> None:
        self.source, self.model, self.optimizer, self.stage = source, model, optimizer, stage_of(model)
        self.state, self.found = state, found
        self.manifest = source.manifest
        fitting = (self.manifest.parameters.keys() | self.manifest.buffers.keys()) - found.names()
        # In the model's order, which is every rank's: collectives follow it.
        self.names = [n for n in [*state.described, *state.buffers] if n in fitting]
        self.notes: list[str] = list(source.notes)
        self.sources: dict[str, str] = {}
        differing = found.optimizer_names()
        taken = optimizer is not None and WHOLE_OPTIMIZER not in differing
        self.saved_optimizer: dict[str, Any] | None = self.manifest.optimizer if taken else None
        self.left_states = differing | (state.members.keys() - set(self.names))
        self.main_loaded: set[str] = set()
        self.others = keeping_main_weights((o.parameter for o in state.owned.values()), optimizer)

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
            entries, more = all_agree(lambda: self._entries(direct, conversions))
            self.source.stage({**entries, **slots}, more)
        # All has been read and is right. From here on the model changes.
        self.source.staged.fill({**entries, **slots})
        for key, entry in make_delayed(self.model, delayed).items():
            for piece in entry.pieces:  # of some experts, perhaps, out of the whole tensor
                piece.tensor.copy_(slots[key].pieces[0].tensor[slices(piece.offsets, piece.tensor.shape)])
        self._restart_delayed(set(delayed), direct)
        self.state.finish_loading(set(direct))
        for batch in self._batches(conversions):
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
            text = "values per rank were saved on another mesh, so they are None"
            self.notes.append(f"{text}: {shorten(homeless)}")
        return decode(extra, slots)

    def result(self) -> Loaded:
        """:meth:`run`, and what a load gives back; what was not simply copied also goes to the log."""
        extra = self.run()
        harmless = self.found.harmless()
        loaded = Loaded(
            extra, left=self.found.left(), converted=self._converted(), notes=[*self.notes, *harmless]
        )
        path = self.source.path
        if loaded.left:
            _log.warning("%s: loaded in part; left as it was: %s", path, "; ".join(self.found.texts()))
        if loaded.converted:
            shown = [f"{name}: {how}" for name, how in loaded.converted.items()]
            _log.warning("%s: %d tensor(s) converted (%s)", path, len(shown), shorten(shown, 3))
        silent = [*self.source.notes, *harmless] if rank() else []  # rank 0 tells them
        for note in loaded.notes:
            if note not in silent:
                _log.warning("%s: %s", path, note)
        return loaded

    def _converted(self) -> dict[str, str]:
        """How each converted tensor was converted, for the user."""
        converted, loaded = {}, set(self.names)
        for name, how in self.found.converted.items():
            parameter = name.removeprefix("optimizer.state.").rpartition(".")[0]
            is_state = name.startswith("optimizer.state.") and self.saved_optimizer is not None
            if name in loaded or (is_state and parameter not in self.left_states):
                converted[name] = f"{how}, from {self.sources[name]}" if name in self.sources else how
        return converted

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

    def _entries(
        self, direct: list[str], conversions: dict[str, list[Conversion]]
    ) -> tuple[dict[str, Entry], list[Rectangle]]:
        """What goes into its place as it is, made where the optimizer lacks it; and what is converted."""
        entries = {key: self.state.entries[key] for name in direct for key in self.state.keys[name]}
        if self.optimizer is not None and self.saved_optimizer is not None:
            weights, owned = self.manifest.parameters, self.state.owned
            states, self.main_loaded = prepare_loading(
                self.optimizer, self.saved_optimizer, owned, weights, self.left_states
            )
            entries |= states
        planned = [one for named in conversions.values() for one in named]
        return entries, [place for one in planned if self._live(one) is None for place in one.reads()]

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

    def _check_shared_numbers(self) -> None:
        """Numbers that each expert has of its own in the files, and all share here, must be equal. Collective.

        Raises:
            CheckpointError: They differ. Nothing has changed.
        """
        vectors: dict[str, tuple[torch.Tensor, list[int]]] = {}
        for name, states in (self.saved_optimizer or {"state": {}})["state"].items():
            members = self.state.members.get(name, [])
            if name in self.left_states or not members or members[0].expert is not None:
                continue
            for key, described in states.items():
                if described.get("scalar"):
                    dtype = getattr(torch, described["dtype"])
                    numbers = torch.empty(described["shape"], dtype=dtype, device="cpu")
                    vectors[f"optimizer.state.{name}.{key}"] = numbers, described["experts"]
        if not vectors and self.stage is None:  # on no rank, then
            return
        self.source.read({key: whole_entry(numbers) for key, (numbers, _) in vectors.items()})
        differing = [key for key, (v, experts) in vectors.items() if len(v[experts].unique(dim=0)) > 1]

        def refuse() -> None:
            if differing:
                raise CheckpointError(
                    f"{self.source.path}: {shorten(differing)}",
                    expected="one number for all experts, which are one parameter here",
                    got="different ones",
                    why="Nothing was loaded",
                    fix="build the layer without a single grouped weight, or load without the optimizer",
                )

        if self.stage is None:  # all ranks see the same
            refuse()
        else:
            all_agree(refuse)

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
                state, _, what = key.rpartition(".")
                scales = have.get(f"{state}.scale", ((), None))[0]
                steps = (recipe["amax_history_len"],) if what == "amax_history" else ()
                if len(scales) != 1 or tuple(shape) != (*steps, *scales):
                    raise CheckpointError(
                        f"{self.source.path}: {key}",
                        expected=f"a history of {recipe['amax_history_len']} steps of as many tensors as have a scale",
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
                _te_modules.follow_scale(owned.module, owned.name, owned.local)

    def _batches(self, conversions: dict[str, list[Conversion]]) -> Iterator[list[Conversion]]:
        """What is converted at a time, as often on all ranks: stages convert other weights. Collective for stages."""
        found = list(batches(conversions, self.manifest))
        if self.stage is not None:
            found += [[]] * (max(gather(len(found))) - len(found))
        yield from found

    def _convert(self, batch: list[Conversion], delayed: set[str]) -> None:
        """Convert and store a few weights. Collective over the world."""
        staged = self.source.staged
        live = [self._live(conversion) for conversion in batch]
        # A rank may lack the memory.
        values = all_agree(
            lambda: [c.value(staged) if main is None else main for c, main in zip(batch, live, strict=True)]
        )
        for conversion, value in zip(batch, values, strict=True):
            owned = conversion.owned
            conversion.store(value, keep_delayed_scale=owned.key.rpartition(".")[0] in delayed)
            self._refresh_main_weights(owned, value)

    def _live(self, conversion: Conversion) -> torch.Tensor | None:
        """The optimizer's main weight that is read into its place and gives the values, if there is one."""
        owned = conversion.owned
        main = main_weight(self.optimizer, owned.parameter)
        is_main = conversion.key == main_weight_of(owned.key) and owned.fqn in self.main_loaded
        whole = self.optimizer is not None and optimizer_shard_in(self.optimizer, owned.parameter) is None
        return main if main is not None and main.dtype == torch.float32 and is_main and whole else None

    def _refresh_main_weights(self, owned: Owned, value: torch.Tensor | None) -> None:
        """Main weights that were not loaded follow the weight, lest the optimizer's step undo the load."""
        if self.optimizer is not None and owned.fqn not in self.main_loaded:
            # The quantized weight has less than what was read: the main weight is made of the latter.
            set_main_weight(self.optimizer, owned.parameter, owned.local, value, make=True)
        for optimizer in self.others:
            set_main_weight(optimizer, owned.parameter, owned.local, value)
