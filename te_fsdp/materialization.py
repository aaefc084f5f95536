"""``materialize``: move a model from meta to the device.

Every rank gets its shards of the initialization that one process would draw. Ranks must build the same model with equal
random states, which the checks at the point "draw" compare.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, TypeVar

import torch
from torch import nn

from te_fsdp.collectives.agreement import raised_on_all_ranks
from te_fsdp.collectives.rendezvous import collective_call
from te_fsdp.errors import InitError, require_integer
from te_fsdp.initialize import has_sentinel, initialize_by_reset, target_device
from te_fsdp.inline_init import record_writes, refuse_lost_writes
from te_fsdp.lifecycle import track_replaced_parameters
from te_fsdp.model_init import attributes_on_meta, dropped_by_ties, find_initializers, refuse_computed_weights
from te_fsdp.modules.mixin import ForeignModule
from te_fsdp.records import binding_of, inherit, require_model
from te_fsdp.sharded_model import attach_state_to_params, get_sharded_model, mesh_of
from te_fsdp.upstream import te as _te, te_modules as _te_modules, torch_dtensor as _torch

_log = logging.getLogger("te_fsdp")

ModelT = TypeVar("ModelT", bound="nn.Module")


def materialize(model: ModelT, *, seed: int | None = None) -> ModelT:
    """Move a model from meta to the device and initialize it; each rank stores only its shards.

    The unsharded weights do not depend on the mesh: one process that builds the same model on the device from the same
    random state draws equal weights. Modules are initialized in the order of ``model.modules()``: TE modules by their
    init methods, others by ``reset_parameters``, or else by ``_reset_parameters`` (as in ``nn.MultiheadAttention``).
    Weights under ``quantized_model_init`` are quantized, with one scale per weight. Modules without meta tensors do
    not change. Tied parameters stay tied, with values of their last owner, or of the source in ``_tied_weights_keys``.

    Then the model's own initialization runs, if it has one: ``init_weights()``, else ``initialize_weights()``, else
    ``_init_weights``, applied to every module. It sees unsharded tensors, and every rank keeps its parts. So does a
    ``reset_parameters`` of a module with children that its constructor calls. Code that a constructor runs inline
    cannot run again: in-place writes to parameters on meta that nothing repeats are an error.

    Collective over the mesh of the parameters: call on all ranks. Needs memory for one unsharded parameter; with an
    initialization of the model's own, for the unsharded parameters of one module.

    Args:
        model: The model, before or after :func:`te_fsdp.fully_shard`; returned.
        seed: Seed of the initialization, the same on all ranks. The ranks' random states are restored afterwards.
            ``None``: use (and advance) the current default generator, which must then be equal on all ranks.

    Raises:
        InitError: Parameters or buffers that nothing initializes, all by name; parameters that a constructor has
            initialized on meta; ranks with different random states; or an initialization that cannot be called.
        PlacementError: ``seed`` is not an integer.
        CollectiveError: Some ranks did not make the call within :func:`te_fsdp.set_collective_timeout`.
    """
    require_model(model, "materialize(model)")
    pending = [
        (name, module)
        for name, module in model.named_modules()
        if any(t is not None and t.is_meta for t in (*module._parameters.values(), *module._buffers.values()))
    ]
    mesh = mesh_of(model)
    with (
        collective_call("materialize", mesh) if mesh is not None else nullcontext(),
        raised_on_all_ranks(mesh, "materialize"),
        _seeded(seed, model),
        track_replaced_parameters(model, "materialize"),
    ):
        refuse_computed_weights(pending)
        unset = _initialize_model(model, pending)
        if unset:
            raise InitError(
                f"{len(unset)} tensor(s) were not initialized: {', '.join(sorted(unset))}",
                expected="an initializer for each",
                got="meta tensors, or values that reset_parameters left uninitialized",
                why="They would contain uninitialized memory",
                fix="define reset_parameters() on the module that owns them, filling every parameter and buffer, "
                "or assign tensors with values before materialize (such as rotary frequencies of the model's own, "
                "computed outside of torch.device('meta'))",
            )
    state = get_sharded_model(model)
    if state is not None:
        attach_state_to_params(state)
        for renew in state.components.after_materialize:
            renew()
    _log.debug("materialize: initialized %d modules", len(pending))
    return model


def _initialize_model(model: nn.Module, pending: list[tuple[str, nn.Module]]) -> set[str]:
    """Initialize the modules, then run the model's own initialization; return the names of tensors left unset."""
    record_writes(model)
    initializers = find_initializers(model)
    resets = {id(item.module) for item in initializers if item.is_reset}
    unset, done = set[str](), 0
    for initializer in initializers:  # in the order of constructors: after the initialization of submodules
        inside = [index for index, (name, _) in enumerate(pending) if initializer.contains(name)]
        end = max((done, *(index + 1 for index in inside)))
        unset.update(_initialize_modules(model, [i for i in pending[done:end] if id(i[1]) not in resets]))
        initializer.run([pending[index][1] for index in inside])
        done = end
    unset.update(_initialize_modules(model, [i for i in pending[done:] if id(i[1]) not in resets]))
    tensors = dict(model.named_parameters(remove_duplicate=False))
    tensors |= dict(model.named_buffers(remove_duplicate=False))
    # A later initializer may have filled tensors that an earlier one left unset.
    unset = {name for name in unset if has_sentinel(_torch.local_of(tensors[name]))}
    unset |= {n for n, t in [*model.named_parameters(), *model.named_buffers()] if t.is_meta}
    unset |= set(attributes_on_meta(model))
    if not unset:
        # Only if nothing is left: tensors that stay on meta are the clearer error.
        refuse_lost_writes(model, [item.contains for item in initializers if not item.is_reset])
    return unset


def _initialize_modules(model: nn.Module, pending: list[tuple[str, nn.Module]]) -> list[str]:
    """Initialize all modules in order, tied parameters together; return the names of uninitialized tensors.

    An error of one module is raised after the last module. Otherwise the other ranks would wait in the collectives of
    the remaining modules.
    """
    # Keep the tensors, because a freed tensor's id could be used again.
    owners: dict[int, list[tuple[dict[str, Any], str, torch.Tensor]]] = {}
    for owner in model.modules():
        for key, tensor in (*owner._parameters.items(), *owner._buffers.items()):
            if tensor is not None:
                table = owner._parameters if key in owner._parameters else owner._buffers
                owners.setdefault(id(tensor), []).append((table, key, tensor))
    dropped = dropped_by_ties(model)
    unset: list[str] = []
    first_error: Exception | None = None
    for name, module in pending:
        before = {k: t for k, t in (*module._parameters.items(), *module._buffers.items()) if t is not None}
        dropped_locals = [_torch.local_of(t) for key, t in before.items() if (id(module), key) in dropped]
        values = [(local, local.detach().clone()) for local in dropped_locals if not local.is_meta]
        try:
            unset += [f"{name}.{key}" if name else key for key in _initialize(module)]
            for local, value in values:
                local.detach().copy_(value)
        except Exception as error:  # raised after the loop
            first_error = first_error or error
        for key, old in before.items():
            new = module._parameters.get(key, module._buffers.get(key))
            if new is None or new is old:
                continue
            if isinstance(old, torch.nn.Parameter):
                inherit(old, new)
            owners[id(new)] = owners[id(old)]
            for table, owned_name, _ in owners[id(old)]:
                table[owned_name] = new
    if first_error is not None:
        raise first_error
    return unset


def _initialize(module: nn.Module) -> list[str]:
    """Initialize one module's direct tensors; return the names of uninitialized tensors."""
    reset: Any = getattr(module, "reset_parameters", None)
    if isinstance(module, ForeignModule):
        # Its reset_parameters would raise for this module only, while materialize reports all modules in one error.
        reset = super(ForeignModule, module).reset_parameters  # type: ignore[misc]
    elif reset is not None and _te.kind_of(module) == "unknown" and not _te_modules.holds_quantized(module):
        return initialize_by_reset(module, reset)  # te.ops modules are not bound and do not support shards
    elif reset is not None and (binding_of(module) is not None or _te.kind_of(module) is not None):
        # TE initializes nothing if the user's DTensors have replaced all parameters of the module.
        binding, param_names = binding_of(module), {n for n, p in module._parameters.items() if p is not None}
        if binding is None or not param_names or param_names != binding.distributed.keys():
            reset()
        return []
    reset = reset or getattr(module, "_reset_parameters", None)
    # materialize reports the tensors that stay on meta, in one error with all others.
    return [] if reset is None else initialize_by_reset(module, reset)  # type: ignore[bad-argument-type]


@contextmanager
def _seeded(seed: int | None, model: nn.Module) -> Iterator[None]:
    """Run with the given seed and restore the random states afterwards; without a seed, use the current state."""
    if seed is None:
        yield
        return
    require_integer("materialize", "seed", seed, least=-(2**63), most=2**64 - 1)  # as torch.manual_seed
    devices = {target_device(p) for p in model.parameters()}
    indices = [d.index for d in devices if d.type != "cpu"]
    kind = next((d.type for d in devices if d.type != "cpu"), "cuda")
    with torch.random.fork_rng(indices, device_type=kind):
        torch.manual_seed(int(seed))
        yield
