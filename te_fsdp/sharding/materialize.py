"""``materialize``: from meta to the device, every shard its part of one well-defined initialisation."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

from te_fsdp import _te
from te_fsdp.agree import raised_on_all_ranks
from te_fsdp.all_ranks import collective_call
from te_fsdp.errors import InitError, message
from te_fsdp.modules.base import ForeignModule
from te_fsdp.modules.initialize import initialize_by_reset, target_device
from te_fsdp.parameters import binding_of, places_of
from te_fsdp.sharding.state import mesh_of, settle, sharding_state
from te_fsdp.step_hooks import replacing

if TYPE_CHECKING:
    from torch import nn

__all__ = ["materialize"]

_log = logging.getLogger("te_fsdp")


def materialize(model: nn.Module, *, seed: int | None = None) -> nn.Module:
    """Move a model from meta to the device and initialise it, each rank its own shards.

    The logical weights do not depend on the mesh: they are those that building the same model in one process
    on the device draws from the same random state. Modules are initialised in the order of
    ``model.modules()``: TE modules by their init methods, others by their ``reset_parameters``, or else by a
    ``_reset_parameters``, as ``nn.MultiheadAttention`` has. Weights under ``quantized_model_init`` are quantized,
    with one scale per weight. Modules without a tensor on meta are left alone. Tied parameters stay tied, with the
    initial values of the last module that owns them.

    Collective over the mesh of the parameters: call on all ranks. Needs one original-size parameter of
    temporary memory.

    Args:
        model: The model, before or after :func:`te_fsdp.fully_shard`.
        seed: Seed of the initialisation, the same on all ranks; the ranks' random states are put back
            afterwards. ``None``: use (and advance) the current default generator, which must then be equal on
            all ranks.

    Returns:
        ``model``.

    Raises:
        InitError: Parameters or buffers that nothing initialises, all by name; or ranks with different random
            states.
        CollectiveError: Some ranks did not make the call within :func:`te_fsdp.set_collective_timeout`.
    """
    settle(model)
    pending = [(n, m) for n, m in model.named_modules() if _has_meta(m)]
    mesh = mesh_of(model)
    together = collective_call("materialize", mesh) if mesh is not None else contextlib.nullcontext()
    with (
        together,
        raised_on_all_ranks(mesh, "materialize"),
        _seeded(seed, model),
        replacing(model, "materialize"),
    ):
        unset = _initialize_all(pending, _owners(model))
        left = [n for n, t in [*model.named_parameters(), *model.named_buffers()] if t.is_meta]
        if unset or left:
            raise InitError(_never_initialised(sorted({*unset, *left})))
    state = sharding_state(model)
    if state is not None and state.replicated is not None:
        state.replicated.renewed()
    _log.debug("materialize: initialised %d modules", len(pending))
    return model


def _initialize_all(
    pending: list[tuple[str, nn.Module]], owners: dict[int, list[tuple[nn.Module, str]]]
) -> list[str]:
    """Initialise module after module; returns the names that were left unset.

    An error of one module is raised after the last one: a rank that stopped early would leave the others waiting in
    the collectives of the modules to come.
    """
    unset: list[str] = []
    first_error: Exception | None = None
    for name, module in pending:
        before = dict(module._parameters)
        try:
            unset += [f"{name}.{own}" if name else own for own in _initialize(module)]
        except Exception as error:  # raised below
            first_error = first_error or error
        _retie(module, before, owners)
    if first_error is not None:
        raise first_error
    return unset


def _has_meta(module: nn.Module) -> bool:
    """Whether a module itself owns a tensor on meta."""
    own = [*module._parameters.values(), *module._buffers.values()]
    return any(tensor is not None and tensor.is_meta for tensor in own)


def _never_initialised(names: list[str]) -> str:
    shown = ", ".join(names)
    return message(
        f"{len(names)} tensor(s) were never initialised: {shown}",
        expected="an initialiser for each",
        got="tensors on meta, or values that reset_parameters left unset",
        why="They would hold whatever the memory held",
        fix="define reset_parameters() on the module that owns them, filling every own parameter and buffer",
    )


def _initialize(module: nn.Module) -> list[str]:
    """Initialise one module's own tensors; returns the names that were left unset."""
    if isinstance(module, ForeignModule):
        # Its reset_parameters would raise for this module alone; materialize reports all at once.
        return initialize_by_reset(module, super(ForeignModule, module).reset_parameters)  # type: ignore[misc]
    if not hasattr(module, "reset_parameters"):
        other = getattr(module, "_reset_parameters", None)
        # What stays on meta is named at the end, together with all else.
        return [] if other is None else initialize_by_reset(module, other)
    if binding_of(module) is not None or _te.kind_of(module) is not None:
        module.reset_parameters()  # type: ignore[operator]
        return []
    return initialize_by_reset(module, module.reset_parameters)  # type: ignore[arg-type]


def _owners(model: nn.Module) -> dict[int, list[tuple[nn.Module, str]]]:
    """Every place that a parameter object is registered at: more than one for tied parameters."""
    owners: dict[int, list[tuple[nn.Module, str]]] = {}
    for place in places_of(model):
        owners.setdefault(id(place.parameter), []).append((place.owner, place.name))
    return owners


def _retie(
    module: nn.Module,
    before: dict[str, nn.Parameter | None],
    owners: dict[int, list[tuple[nn.Module, str]]],
) -> None:
    """Hand a replaced parameter to the other modules that it was tied to."""
    for name, old in before.items():
        new = module._parameters[name]
        if old is None or new is old:
            continue
        for owner, owner_name in owners[id(old)]:
            owner._parameters[owner_name] = new


@contextlib.contextmanager
def _seeded(seed: int | None, model: nn.Module) -> Iterator[None]:
    """Run with a seed of its own and put the random states back; without a seed, run with the current state."""
    if seed is None:
        yield
        return
    devices = {target_device(p) for p in model.parameters()}
    indices = [d.index for d in devices if d.type != "cpu"]
    kind = next((d.type for d in devices if d.type != "cpu"), "cuda")
    with torch.random.fork_rng(indices, device_type=kind):
        torch.manual_seed(seed)
        yield
