"""``graphed_units``: replay each unit from CUDA graphs, inside of an eager loop.

    forward of a unit, backward of a unit                   a CUDA graph each
    all-gathers, reductions, clipping, optimizer, loss      eager

A unit's ``forward`` is replaced. Hooks of FSDP2 and of the user on the unit itself run around it, as before.
"""

from __future__ import annotations

import functools
import itertools
import logging
import weakref
from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from te_fsdp.errors import OrderError, PlacementError, require_integer, require_kind
from te_fsdp.features.cuda_recorder import CudaRecorder, capture_failure, recorder_for
from te_fsdp.features.graph_checks import Signature
from te_fsdp.features.param_gather import sharded_units
from te_fsdp.features.transports import transports_of
from te_fsdp.features.unit_recording import NotRecordableError, StaticBuffers, UnitRecording
from te_fsdp.modules.mixin import record_forward
from te_fsdp.sharded_model import ShardedModel, refuse_in_backward, require_sharded_model
from te_fsdp.upstream import (
    fsdp2_state as _fsdp2,
    fsdp2_units,
    te as _te,
    torch_autograd as _autograd,
    torch_dtensor as _torch,
    unit_graphs as _graphs,
)
from te_fsdp.upstream.fsdp2_fixed_memory import FixedMemory

_log = logging.getLogger("te_fsdp")

#: Maximum number of kinds of inputs of a unit, and of recordings of a unit.
MAX_KINDS, MAX_RECORDINGS = 4, 16


def graphed_units(
    model: nn.Module,
    *,
    units: Iterable[str] | None = None,
    warmup: int = 2,
    generators: Iterable[torch.Generator] = (),
) -> GraphedUnits:
    """Record forward and backward of each unit into CUDA graphs, and replay them in the eager training loop.

    The loop may log, change optimizers or schedules, or clip in its own way. Only the units lose their host time, and
    :func:`te_fsdp.graphed_step` removes all of it. Results equal those of the eager loop bit for bit.

    The first ``warmup`` forwards of a unit with a kind of inputs run eagerly. The next one records. A unit that cannot
    be recorded runs eagerly, and the reason is logged once. Reasons are hooks on modules inside of it, delayed scaling,
    recomputed or offloaded activations, fused or delayed weight gradients, or a device value that its forward reads.
    The following forwards run eagerly, too: evaluations, forwards while an earlier backward of the unit is pending, and
    inputs of more than four kinds (shapes, dtypes, values other than tensors, recipes). Values of closures stay those
    of the recording.

    Unsharded weights permanently get memory at fixed addresses. Units of the same shapes share the memory of two
    units. If one rank has the full weights and casts them (``MixedPrecisionPolicy``), every unit has its own.

    Local operation. Collectives in a unit's forward and backward are recorded with it.

    Args:
        model: Materialized model passed to :func:`te_fsdp.fully_shard`, before its first forward.
        units: Names of the units. The default is all units without units inside of them.
        warmup: Number of eager forwards of each unit before a recording, at least 1.
        generators: Device generators of the units, in addition to the device's default and those of TE's tracker.

    Raises:
        OrderError: The model is not sharded, or has run a forward.
        PlacementError: A unit is not all-gathered by the copy engine, or contains further units, or is unknown.
            Also for a ``warmup`` out of range, and if all units have the strategy ``no_shard``.
    """
    refuse_in_backward("graphed_units")
    state = require_sharded_model(model, "graphed_units")
    require_integer("graphed_units", "warmup", warmup, least=1)
    require_kind("graphed_units", "generators", generators, Iterable, expected="torch.Generators")
    names = _names_of_units(state, units)
    return GraphedUnits(state, names, warmup, tuple(generators))


def _names_of_units(state: ShardedModel, units: Iterable[str] | None) -> list[str]:
    """Return the names of the units to record; raise PlacementError if there is none, or one cannot be recorded."""
    within = {name: fsdp2_units.inner_units(unit) for name, unit in state.modules.items()}
    if not within:
        raise PlacementError(
            "graphed_units of a model without FSDP2 units",
            expected="a strategy that shards parameters, gradients or optimizer state",
            got='strategy="no_shard" for all units',
            why="Units are recorded between FSDP2's all-gathers and reductions",
            fix="use te_fsdp.graphed_step",
        )
    if units is None:
        return [name for name, inner in within.items() if not inner]
    names = sharded_units(state, units, "graphed_units")
    for name in names:
        if within[name]:
            raise PlacementError(
                f"{name or 'the root'}: graphed_units of a unit that contains units",
                expected="units without units inside of them",
                got=f"the unit {within[name][0]} inside",
                why="Its all-gathers and reductions would be recorded",
                fix="name the inner units",
            )
    return names


# ---------------------------------------------------------------------------------------------------------- addresses


def fix_addresses(state: ShardedModel, names: list[str]) -> list[FixedMemory]:
    """All-gather units to fixed addresses from now on; raise if some cannot be. Local operation."""
    # Units that are all-gathered in each pass take turns in the memory of two units. The others keep their own.
    transports, shared, separate = transports_of(state).by_unit, FixedMemory(2), FixedMemory(0)
    gathered = [name for name in names if transports[name].name != "none"]
    for name in gathered:
        unit, label = state.modules[name], name or "the root"
        if transports[name].gathers is None:
            raise PlacementError(
                f"{label}: graphed_units of a unit that NCCL all-gathers",
                expected='fully_shard(..., transport="copy_engine"), which can gather to fixed addresses',
                got=str(transports[name]),
                why="A graph contains the addresses of unsharded weights, and FSDP2 allocates their memory again "
                "in each pass",
                fix='pass transport="copy_engine" to te_fsdp.fully_shard, or use te_fsdp.graphed_step',
            )
        if _graphs.has_gathered(unit):
            raise OrderError(
                f"{label}: graphed_units after the first forward",
                expected="a call before the first forward",
                got="weights that have been all-gathered before, to memory that FSDP2 frees",
                fix="call te_fsdp.graphed_units right after te_fsdp.materialize",
            )
        if (most := _graphs.input_buffers(unit)) > 1:
            raise OrderError(
                f"{label}: graphed_units with several reductions in flight",
                expected="set_reduce_scatter_max_input_buffers(1), the default",
                got=f"{most}",
                fix="omit the call of set_reduce_scatter_max_input_buffers",
            )
    # Only now, because all units are checked before the first one changes.
    for name in names:
        if transports[name].name == "none":
            _graphs.keep_casts(state.modules[name])
    for name in gathered:
        gathers = transports[name].gathers
        assert gathers is not None
        gathers.fix_addresses(state.modules[name], shared if state.units[name].gather == "pass" else separate)
    return [shared, separate]


# ---------------------------------------------------------------------------------------------------------- one unit


# [Note: order of replays] Recordings share memory ([Note: memory of graphs] in ``unit_recording.py``). Recordings of
# one forward pass form a generation. While the backward of a unit is pending, only later recordings of the same
# generation may be replayed, and backwards run in reverse order. Other forwards run eagerly, which is always correct.
# A pending unit whose autograd graph is freed is not pending any more.
class _Shared:
    def __init__(
        self, device: torch.device, recorder: CudaRecorder, memory: list[FixedMemory], warmup: int
    ) -> None:
        self.recorder, self.warmup = recorder, warmup
        self.buffers = StaticBuffers()
        self.why_eager: dict[str, str] = {}  #: Reason for each unit that runs eagerly
        self.recordings = self.replays = self.generation = self.order = 0
        self.last_backward = -1  #: Order of the unit whose backward was replayed last
        self.is_busy = False  #: Whether a unit is being recorded
        #: Forwards of each unit with gradients since the last backward, replayed or not.
        self.forwards: Counter[str] = Counter()
        self._backward_id = -1  #: Id of the backward at whose end they are cleared
        self._device, self._memory = device, memory
        #: Forwards whose backward is pending, in order. Weak: the autograd graph keeps them alive. If the graph is
        #: freed, the backward cannot come.
        self.stack: list[weakref.ref[_Pending]] = []

    def pending(self) -> list[_Pending]:
        """Return the replayed forwards whose backward has not run, in order ([Note: order of replays])."""
        alive = [node for ref in self.stack if (node := ref()) is not None and node.waits]
        if len(alive) != len(self.stack):
            self.stack = [weakref.ref(node) for node in alive]
        return alive

    def count_until_end_of_backward(self) -> None:
        """Let the counts of forwards start from zero when the running backward has ended."""
        if self._backward_id != _torch.backward_id():
            self._backward_id = _torch.backward_id()
            # A later backward may contain pending forwards, and further forwards of their units.
            _autograd.at_end_of_backward(lambda: None if self.pending() else self.forwards.clear())

    def is_recording(self) -> bool:
        """Return whether a unit or a full step is being recorded."""
        return self.is_busy or (self._device.type == "cuda" and torch.cuda.is_current_stream_capturing())

    def fixed_storages(self, unit: nn.Module) -> set[int]:
        """Return the addresses of storages that stay the same, for a unit that is unsharded."""
        shards = map(_torch.local_of, _fsdp2.sharded_parameters(unit))
        fixed = (*shards, *_graphs.kept_casts(unit))
        buffers = (_te.buffers_of(tensor) if _te.is_quantized(tensor) else [tensor] for tensor in fixed)
        addresses = {buffer.untyped_storage().data_ptr() for buffer in itertools.chain(*buffers)}
        for group in fsdp2_units.fsdp_parameter_groups(unit):
            for memory in self._memory:
                addresses |= memory.storages(group)
        return addresses

    def reason_of_addresses(self, unit: nn.Module) -> str:
        """Return why weights of a unit have no fixed addresses; empty if they have."""
        fixed = self.fixed_storages(unit)
        for parameter, _ in _fsdp2.unsharded_parameters(unit):
            local = _torch.local_of(parameter)
            if _te.is_quantized(local) and _te.is_grouped(local):
                return "it has quantized weights of all experts in one parameter"
            parts = _te.value_buffers_of(local) if _te.is_quantized(local) else [local]
            if any(part.untyped_storage().data_ptr() not in fixed for part in parts):
                return f"its unsharded weight of shape {tuple(parameter.shape)} has no fixed address"
        return ""


class _Pending:
    """A replayed forward whose backward has not run. The autograd graph keeps it alive."""

    def __init__(self, shared: _Shared, name: str, recording: UnitRecording, is_new: bool) -> None:
        self.recording, self.is_new = recording, is_new
        self.waits, self.assigns = True, False  # see record_forward
        self._shared, self.name = shared, name

    def backward(self, gradients: Any, goes_on: bool) -> list[Any]:
        """Run the recorded backward. ``goes_on``: whether that of the unit's inputs follows."""
        pending = self._shared.pending()
        if not self.waits or not pending or pending[-1] is not self:
            raise OrderError(
                f"{self.name}: backward of a unit with graphs",
                expected="backwards in the reverse order of forwards, one for each forward",
                got="a later unit whose backward is pending"
                if self.waits
                else "a second backward of this unit",
                why="Graphs of units share memory, so that the values of this forward may be overwritten",
                fix="omit the unit from te_fsdp.graphed_units(model, units=...)",
            )
        if self._shared.last_backward != self.recording.order + 1:
            # [Note: gradients of weights] expects the unit in between
            _graphs.wait_for_reductions(self.recording.unit)
        self._shared.count_until_end_of_backward()
        others = pending[:-1]
        is_alone = self._shared.forwards[self.name] <= 1 and all(node.name != self.name for node in others)
        results = self.recording.run_backward(
            gradients, is_alone=is_alone, is_reduced_next=goes_on or not others
        )
        self.waits, self._shared.last_backward = False, self.recording.order
        return results


class _Unit:
    def __init__(self, shared: _Shared, name: str, unit: nn.Module) -> None:
        self.name, self.module, self.forward = name, unit, unit.forward
        self.shared, self.why = shared, ""
        self.eager_forwards: list[tuple[Signature, int]] = []  # with the number of eager forwards
        self.recordings: list[UnitRecording] = []
        self.count = 0  #: Number of recordings that were made, also of those that were replaced

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Run the unit's forward, from a graph if possible."""
        shared = self.shared
        if not torch.is_grad_enabled() or shared.is_recording() or _torch.in_backward():
            return self.forward(*args, **kwargs)
        shared.forwards[self.name] += 1
        if self.why:
            return self.forward(*args, **kwargs)
        leaves, structure = _torch.flatten((args, kwargs))
        # A forward also reads these values, which are not among its arguments.
        device = "cuda" if torch.cuda.is_available() else "cpu"
        casts = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
        signature = Signature.of(leaves, structure, (_te.active_recipe(), casts))
        recording, is_new = self._find(signature, leaves, structure)
        if recording is None:
            return self.forward(*args, **kwargs)
        if not shared.pending():
            # Of the previous pass, whose gradients this forward may overwrite.
            _graphs.wait_for_reductions(recording.unit)
        pending = _Pending(shared, self.name, recording, is_new)
        shared.stack.append(weakref.ref(pending))
        for binding in recording.bindings:
            record_forward(binding, pending)
        shared.replays += not is_new
        return recording.apply(pending, leaves)

    def _find(
        self, signature: Signature, leaves: list[Any], structure: Any
    ) -> tuple[UnitRecording | None, bool]:
        """Return a recording for a forward, and whether it is new; ``None`` to run eagerly."""
        pending = self.shared.pending()
        last = pending[-1].recording if pending else None
        alive = [node.recording for node in pending]
        # A recorded forward whose backward never ran cannot be used.
        self.recordings = [r for r in self.recordings if r.is_complete or r in alive]
        for recording in self.recordings:
            # [Note: order of replays]: only later recordings of the generation that is pending.
            if last is not None and (
                recording.generation != last.generation or recording.order <= last.order
            ):
                continue
            if recording.is_complete and recording.signature.fits(signature):
                change = recording.changed()
                if not change:
                    return recording, False
                _log.info("graphed_units: %s is recorded again, because of a change: %s", self.name, change)
                self.recordings.remove(recording)
                break
        if not self._has_run(signature) or not all(node.is_new for node in pending):
            return None, False
        return self._record(signature, leaves, structure, first=not pending), True

    def _has_run(self, signature: Signature) -> bool:
        """Return whether enough eager forwards have run with a kind of inputs; count this one if not."""
        for index, (earlier, count) in enumerate(self.eager_forwards):
            if earlier.fits(signature):
                self.eager_forwards[index] = earlier, count + 1
                return count >= self.shared.warmup
        if len(self.eager_forwards) == MAX_KINDS:
            self.run_eagerly(
                f"inputs of more than {MAX_KINDS} kinds (shapes, dtypes, recipes, or other values)"
            )
        else:
            self.eager_forwards.append((signature, 1))
        return False

    def _record(
        self, signature: Signature, leaves: list[Any], structure: Any, first: bool
    ) -> UnitRecording | None:
        shared, why = self.shared, self._reason(leaves)
        if not why and self.count == MAX_RECORDINGS:
            why = f"its weights or settings have changed after each of {MAX_RECORDINGS} recordings"
        if why:
            self.run_eagerly(why)
            return None
        recording = UnitRecording(
            self.module,
            self.forward,
            signature,
            (leaves, structure),
            shared.recorder,
            shared.buffers,
            shared.fixed_storages(self.module),
        )
        shared.is_busy = True
        try:
            recording.record_forward()
        except Exception as error:
            # The caller's own forward follows, so that the step is complete without a graph.
            self.run_eagerly(str(error) if isinstance(error, NotRecordableError) else capture_failure(error))
            return None
        finally:
            shared.is_busy = False
        shared.generation += first
        shared.order = 0 if first else shared.order + 1
        recording.generation, recording.order = shared.generation, shared.order
        self.recordings.append(recording)
        self.count += 1
        shared.recordings += 1
        return recording

    def _reason(self, leaves: list[Any]) -> str:
        """Return why the unit cannot be recorded; empty if no reason is known. Local operation."""
        recipe = _te.active_recipe()
        if recipe is not None and (recipe.delayed() or recipe.custom()):
            return f"{type(recipe).__name__} updates scales between forward and backward"
        if hooked := _graphs.hooked_module(self.module):
            return f"a hook on {hooked}, which a replay would not call"
        # Hooks of saved tensors run in Python during forward and backward, which a replay skips.
        if _graphs.replaces_saved_tensors():
            return "saved tensors are replaced by hooks (recomputed or offloaded activations)"
        for module in self.module.modules():
            if getattr(module, "fuse_wgrad_accumulation", False) or _te.delays_weight_gradients(module):
                return "TransformerEngine accumulates or delays its weight gradients"
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        for tensor in tensors:
            if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
                return f"an input is a {type(tensor).__name__}"
        if not any(value.requires_grad for value in (*tensors, *self.module.parameters())):
            return "nothing in it is trained"
        return self.shared.reason_of_addresses(self.module)

    def run_eagerly(self, why: str) -> None:
        """Run all following forwards eagerly, and log the reason once."""
        self.why = self.shared.why_eager[self.name] = why
        self.recordings.clear()
        _log.warning("graphed_units: %s runs eagerly: %s", self.name or "the root", why)


# ---------------------------------------------------------------------------------------------------------- all units


class GraphedUnits:
    """Units with graphs, created by :func:`graphed_units`."""

    def __init__(
        self, state: ShardedModel, names: list[str], warmup: int, generators: tuple[torch.Generator, ...]
    ) -> None:
        device = state.meshes.device
        recorder: Any = recorder_for(device, generators)
        self._shared = _Shared(
            device, recorder, [] if recorder is None else fix_addresses(state, names), warmup
        )
        self._units: list[_Unit] = []
        for name in [unit for unit in state.units if unit and unit not in state.modules]:
            self._shared.why_eager[name] = 'strategy="no_shard", so that it is not an FSDP2 unit'
            _log.warning("graphed_units: %s runs eagerly: %s", name, self._shared.why_eager[name])
        if recorder is None:
            self._shared.why_eager |= dict.fromkeys(names, f"there are no CUDA graphs on {device.type}")
            _log.warning("graphed_units: units run eagerly: there are no CUDA graphs on %s", device.type)
            return
        for name in names:
            graphed = _Unit(self._shared, name, state.modules[name])
            self._units.append(graphed)
            run = functools.wraps(graphed.forward)(functools.partial(_Unit.run, graphed))
            graphed.module.forward = run  # type: ignore[bad-assignment]

    @property
    def why_eager(self) -> dict[str, str]:
        """Map the name of each unit that runs eagerly to the reason."""
        return dict(self._shared.why_eager)

    @property
    def recordings(self) -> int:
        """Return the number of recordings."""
        return self._shared.recordings

    @property
    def replays(self) -> int:
        """Return the number of replayed forwards."""
        return self._shared.replays

    def forget(self) -> None:
        """Drop all recordings. The next forwards record again. Local operation; no backward may be pending.

        Use it after changes that te_fsdp cannot detect, to retry units that could not be recorded, and before
        ``dist.destroy_process_group``, which waits forever for graphs with collectives.
        """
        for unit in self._units:
            unit.recordings.clear()
            unit.eager_forwards.clear()
            unit.why = ""
            self._shared.why_eager.pop(unit.name, None)
        self._shared.buffers = StaticBuffers()

    def remove(self) -> None:
        """Drop all recordings and restore the units' own ``forward``. Local operation."""
        self.forget()
        for unit in self._units:
            unit.module.__dict__.pop("forward", None)
        self._units.clear()
