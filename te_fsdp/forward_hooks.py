"""What happens by itself around forward, and other methods that gather, of sharded models.

    the model    what an exception has left half done is mended; what ranks compute differently is refused
    a unit       new weights on their way are waited for, stale gathered ones refused

All ranks of a model must **compute alike**: in training or not, under which recipe, for which parameters.

    a new mode     the ranks that gather weights, or split layers, with this one have come in the same mode: not
                   ``if rank == 0: model.eval(); model(x)``
    in training    recipe of ``te.autocast`` and dtype of ``torch.autocast`` are the same on all ranks, and
                   so is which parameters are trained: reductions of others would meet
    in a unit      its recipe, where ``te.autocast`` is entered within the model's forward

A rank meets the others when something is other than in its last forward; a settled forward compares a few objects and
the flags of the parameters. Ranks that change together compare what they have, and raise together. One that changes
alone waits for the others, says so, and gives up: those that have not changed are in a gather of torch's by then.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from types import MethodType
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.fsdp import register_fsdp_forward_method

from te_fsdp.checks.first_step import before_first_forward, refuse_inference_mode
from te_fsdp.checks.unsupported import choose_root, refuse_taken_away
from te_fsdp.collectives.agreement import are_equal, digest, gather_by_rank
from te_fsdp.collectives.rendezvous import collective_call, format_ranks, is_capturing, is_simulated
from te_fsdp.errors import CollectiveError, MeshError, OrderError, PlacementError, PrecisionError, shorten
from te_fsdp.features.unreduced_gradients import register_backward_checks
from te_fsdp.gradient_sync import has_failed_backward, raise_if_backward_failed
from te_fsdp.initialize import check_initialised
from te_fsdp.modules.inputs import check_inputs
from te_fsdp.optimizer_step import wrap_zero_grad
from te_fsdp.records import is_replicated, iter_param_owners
from te_fsdp.sharded_model import (
    ShardedModel,
    attach_state_to_params,
    expose_sharded_params,
    expose_unsharded_params,
    get_sharded_model,
    is_assigned,
    record_unsharded_params,
    recover_from_exception,
    refuse_assigned,
    shard_of,
    sharded_model_of,
    versions_of,
)
from te_fsdp.upstream import (
    fsdp2_patches as _fsdp2_patches,
    fsdp2_state as _fsdp2,
    fsdp2_units,
    te as _te,
    torch_dtensor as _torch,
)

if TYPE_CHECKING:
    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh

# How often ranks meet: scripts that alternate in every step shall not for ever.
_MOST = 64
_UNKNOWN = object()


def register_forward_hooks(state: ShardedModel) -> None:
    """Look after the weights of a model before each forward of it and of its units."""
    for name, unit in state.modules.items():
        # Before FSDP2's own hook, which gathers.
        before = _torch.disable_compile(functools.partial(_before_unit, state, name))
        unit.register_forward_pre_hook(before, prepend=True)
        if state.units[name].gather != "pass":
            _fsdp2_patches.wrap_unshard(unit, functools.partial(expose_unsharded_params, state, name, unit))
    state.model.register_forward_pre_hook(
        _torch.disable_compile(functools.partial(_before_forward, state)), prepend=True
    )
    state.model.register_forward_hook(_torch.disable_compile(functools.partial(_after_forward, state)))
    wrap_zero_grad(state)


def _check_initialised(state: ShardedModel) -> None:
    """Before FSDP2 does: it would advise ``to_empty``, which leaves whatever the memory held. Local operation."""
    check_initialised(state.parameters().items())
    before_first_forward(state)
    state.on_meta = False


def _before_forward(state: ShardedModel, module: nn.Module, args: Any) -> None:
    refuse_taken_away(state)
    if state.on_meta:
        _check_initialised(state)
    if not _torch.in_backward() and not state.methods:
        refuse_inference_mode(state)
        recover_from_exception(state)
        has_failed_backward(
            state
        )  # gradients that were cleared since are forgotten before there are new ones
        if state.replicated is not None and state.replicated.settle():
            # Now and not at the step: this rank's reductions would meet those of another microbatch.
            state.failed = True
            raise_if_backward_failed(state, "forward")
        for root in state.roots() if state.unfinished else ():
            _fsdp2.clear_forward_order(root)
        if not _is_marked(state):
            attach_state_to_params(state)
        _check_same_computation(state)
        if state.waiting:
            state.unreduced.drop_cleared()


def _is_marked(state: ShardedModel) -> bool:
    """Whether the parameters are still those that were marked: initialisation and loading replace them.

    Those that FSDP2 does not manage are marked anew by what reduces their gradients. Raises where ``.data`` of one was
    assigned. Of each unit one is looked at: whoever does that does it to all.
    """
    for unit in state.modules.values():
        first = next(iter(_fsdp2.sharded_parameters(unit)), None)
        if first is not None and is_assigned(first):
            refuse_assigned(state)
        if first is not None and sharded_model_of(first) is None:
            return False
    return True


def _before_unit(state: ShardedModel, name: str, unit: nn.Module, args: Any) -> None:
    """Raise if a unit would run with weights that were changed since they were gathered."""
    if state.on_meta:
        refuse_taken_away(state)
        _check_initialised(state)
    choose_root(state, unit)
    if name in state.aside:
        expose_unsharded_params(state, name, unit)
    if _torch.in_backward():  # recomputed activations
        _fsdp2.allow_recompute(unit)
        return
    _require_same_recipe(state, name)
    started = state.gathers.pop(name, None) is not None  # this forward waits for it
    if not started and not _fsdp2.is_unit_unsharded(unit):
        # Released again in each forward and backward: only start_param_gather can make these stale.
        if state.units[name].gather == "pass":
            state.versions.pop(name, None)
        else:
            state.versions[name] = versions_of(unit)
        return
    gathered_at = state.versions.get(name)
    if gathered_at is None:
        return
    now = versions_of(unit)
    changed = [key for key, version in gathered_at.items() if now.get(key, version) != version]
    if changed:
        raise OrderError(
            f"{state.names()[changed[0]]}: forward with a gathered weight from before the last update",
            expected="weights gathered after the optimizer's step",
            got="a shard that was written to while the whole weight was kept",
            why="Only the steps of torch.optim.Optimizer's subclasses release kept weights by themselves",
            fix="call te_fsdp.release_params(model) after the update",
        )


def _after_forward(state: ShardedModel, module: nn.Module, args: Any, output: Any) -> None:
    """Gathered parameters that are kept are those that ``model.parameters()`` gives: let them be recognised."""
    for name, unit in state.modules.items():
        kept = state.units[name].gather != "pass"
        if kept and name not in state.known_unsharded and _fsdp2.is_unit_unsharded(unit):
            record_unsharded_params(unit)
            state.known_unsharded.add(name)
    if module is state.model and not (state.methods or _torch.in_backward()):
        if torch.is_grad_enabled():
            register_backward_checks(state, output)
        else:
            expose_sharded_params(state)


def register_forward_method(module: nn.Module, method: str) -> None:
    """Let a method of a unit gather the unit's weights as ``forward`` does, for example ``generate`` or ``encode``.

    FSDP2 gathers in the hooks of ``forward``; a method that is called on its own sees shards and fails. Local
    operation; the method itself becomes collective, as ``forward`` is. Nothing is gathered for modules that are not
    sharded (:func:`te_fsdp.fsdp_no_shard`), whose weights are always whole; if the whole model is one, its gradients
    are watched.

    Args:
        module: A unit of a model after :func:`te_fsdp.fully_shard`, or its root.
        method: Name of the method.

    Raises:
        OrderError: The module is no unit.
        PlacementError: It has no such method.

    Source: ``torch.distributed.fsdp.register_fsdp_forward_method``, which does nothing for other modules.
    """
    if not callable(getattr(module, method, None)):
        raise PlacementError(
            f"register_forward_method: {type(module).__name__} has no method {method!r}",
            expected="the name of a method",
        )
    is_unit = fsdp2_units.is_fsdp_module(module)
    if is_unit:
        register_fsdp_forward_method(module, method)
    if is_unit or get_sharded_model(module) is not None:
        _wrap_method(module, method)
        return
    own = [is_replicated(place.owner, place.name) for place in iter_param_owners(module)]
    if not own or not all(own):
        raise OrderError(
            f"register_forward_method({type(module).__name__}, {method!r})",
            expected="a unit, after te_fsdp.fully_shard",
            got="a module that gathers nothing by itself",
            why="Its weights are gathered by the unit around it, so the method would see shards",
            fix="call it after te_fsdp.fully_shard(..., units=...) that makes a unit of this module, or register "
            "a method of the unit",
        )


def _wrap_method(unit: nn.Module, method: str) -> None:
    """Look after the weights and gradients of a unit, or of the model, around one more method, as around forward."""
    found = next(map(sharded_model_of, map(shard_of, unit.parameters())), None)
    if found is None:
        return  # torch's own fully_shard has sharded it
    state, stock, is_root = found, getattr(unit, method), unit is found.model
    names = [name for name, own in state.modules.items() if own is unit]
    replicated = state.replicated if is_root else None
    check = _torch.disable_compile(check_inputs)

    @functools.wraps(stock)
    def watched(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if is_root:
            _before_forward(state, unit, args)
            check(unit, args, kwargs, method)
        if replicated is not None:
            replicated.attach()
        for name in names:
            _before_unit(state, name, unit, args)
        state.methods += is_root
        try:
            output = stock(*args, **kwargs)
        finally:
            state.methods -= is_root
        _after_forward(state, unit, args, output)
        if replicated is not None:
            replicated.watch(output)
        return output

    setattr(unit, method, MethodType(watched, unit))


# ------------------------------------------------------------------------------------------------------ computed alike


def _check_same_computation(state: ShardedModel) -> None:
    """Compare, before a forward of the model, what it would compute with what the other ranks would.

    Local operation while nothing changes; else collective over the ranks that gather or split layers with this one, and
    in training over all of the model's: through the store, then an all-reduce of two numbers for each axis.
    """
    known = state.computed
    mode = state.model.training, torch.is_grad_enabled()
    if mode != known.mode:
        _rendezvous_with_peers(state, mode)
        known.mode = mode
    if mode != (True, True):
        return
    known.pairs.clear()
    device = state.meshes.device_mesh.device_type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
    under = _te.active_recipe(), dtype
    trained = _trained(state)
    if not trained:
        known.places = [
            (place.label, place.owner._parameters, place.name) for place in iter_param_owners(state.model)
        ]
        trained = _trained(state)
    if under != known.under or trained != known.trained:
        _compare(state, under, trained)
        known.pairs.append((_UNKNOWN if known.under is None else known.under[0], under[0]))
        known.under, known.trained = under, trained


def _require_same_recipe(state: ShardedModel, name: str) -> None:
    """Compare, before a unit's forward in training, its recipe over the ranks, if it is another than in the last."""
    known, recipe = state.computed, _te.active_recipe()
    before = known.units.get(name, _UNKNOWN)
    if recipe is before or known.mode != (True, True) or known.under is None:
        return
    # In the first forward one unit of each class is looked at on all ranks: some may enter te.autocast, some not.
    is_first = before is _UNKNOWN and bool(name)
    is_first = is_first and type(state.modules[name]) not in {type(state.modules[own]) for own in known.units}
    known.units[name] = recipe
    inner = recipe != known.under[0] if before is _UNKNOWN else recipe != before
    changed = inner and (before, recipe) not in known.pairs
    if is_first or changed:  # of many units that change alike one is enough
        known.pairs.append((before, recipe))
        _compare(state, (recipe, known.under[1]), None, unit=name)


def _trained(state: ShardedModel) -> list[bool]:
    """Which parameters are trained. Looked up where they are registered: weak references would forbid torch's swaps."""
    known = state.computed
    try:
        return [held[name].requires_grad for _, held, name in known.places]
    except (KeyError, AttributeError):  # one was taken away
        known.places.clear()
        return []


def _rendezvous_with_peers(state: ShardedModel, mode: tuple[bool, bool]) -> None:
    """Wait for the ranks whose gathers and products meet those of this one."""
    known = state.computed
    mesh = _peer_ranks(state, any(state.units[name].gather == "pass" for name in state.modules))
    if mesh is not None and _should_check(state, mesh):
        kind = f"forward in {'training' if mode[0] else 'evaluation'}"
        kind += "" if mode[1] else " without gradients"
        with _rendezvous(kind if mode in known.modes else f"first {kind}", mesh):
            known.checks_done[mesh.mesh_dim_names] += 1
    known.modes.add(mode)


def _peer_ranks(state: ShardedModel, gathers: bool) -> DeviceMesh | None:
    """The ranks that gather weights, if this is asked for, or split layers with this one; ``None``: nobody."""
    axes = tuple(
        axis for axis in ("dp_shard", "tp") if state.meshes.size(axis) > 1 and (gathers or axis == "tp")
    )
    return state.meshes.device_mesh[axes] if axes else None


def _should_check(state: ShardedModel, mesh: DeviceMesh, *, always: bool = False) -> bool:
    """Whether these ranks meet at all, and have not done so too often: all of a set have had as many meetings."""
    if mesh.size() == 1 or is_simulated() or is_capturing():
        return False
    return always or state.computed.checks_done[mesh.mesh_dim_names] < _MOST


def _compare(
    state: ShardedModel, under: tuple[Any, Any], trained: list[bool] | None, *, unit: str | None = None
) -> None:
    """Meet all ranks of the model, and raise on all of them unless they have the same."""
    known, mesh = state.computed, state.meshes.device_mesh
    if unit is not None:  # which other replicas may not reach
        mesh = _peer_ranks(state, state.units[unit].gather == "pass")
    # Parameters are frozen a few times in a training, recipes may alternate.
    frozen = trained is not None and trained != known.trained
    if mesh is None or not _should_check(state, mesh, always=frozen):
        return
    where = f"{type(state.model).__name__}.forward" if unit is None else f"forward of {unit or 'the model'}"
    first = known.trained is None
    mine, flags = _format_recipe(*under), {}
    if trained is not None:
        flags = {label: flag for (label, _, _), flag in zip(known.places, trained, strict=True)}
    # Each rank of ep has other experts, perhaps more.
    told = sorted({(n.rstrip("0123456789") if state.is_expert(n) else n, flag) for n, flag in flags.items()})
    with _rendezvous(
        "first forward in training" if first else _what_changed(state, mine, trained, unit), mesh
    ):
        known.checks_done[mesh.mesh_dim_names] += 1
        same = are_equal([digest(mine), digest(repr(told))], mesh).tolist()
        if not same[0]:
            raise PrecisionError(
                f"{where}: recipes that differ between ranks",
                expected="the same te.autocast, and torch.autocast, on all ranks of the model",
                got=_format_recipes_by_rank(mine, mesh),
                why="They compute one forward together, and wait for each other's amax where a recipe needs that",
                fix="enter te.autocast(enabled=..., recipe=...) on all ranks alike: by numbers that all have, such as "
                "the step or an all-reduced loss, not by the rank",
            )
        if not same[1]:
            raise _other_parameters(where, flags, mesh)


@contextmanager
def _rendezvous(what: str, mesh: DeviceMesh) -> Iterator[None]:
    """What is in the context begins when all ranks have come. Those that wait in vain say what has changed here."""
    call, _, here = what.partition(": ")
    come = False
    with _te.skip_amax_reduction_after_errors():
        try:
            with collective_call(call, mesh):
                come = True
                yield
        except CollectiveError as error:
            raise error if come or not here else CollectiveError(f"{error} On this rank: {here}.") from None


def _what_changed(state: ShardedModel, mine: str, trained: list[bool] | None, unit: str | None) -> str:
    """Name of the meeting, and what this rank has to say if it has come alone."""
    known = state.computed
    if trained is not None and known.trained is not None and trained != known.trained:
        changed = [
            f"{name} {'is trained' if now else 'was frozen'}"
            for (name, _, _), before, now in zip(known.places, known.trained, trained, strict=False)
            if before != now
        ]
        return f"forward with other trained parameters than before: {shorten(changed, 3)}"
    if unit is not None or known.under is None:
        return f"forward under another recipe than before: {mine}"
    words = mine.split(", "), _format_recipe(*known.under).split(", ")
    now, before = (own[:1] if words[0][0] != words[1][0] else own for own in words)
    return f"forward under another recipe than before: {', '.join(now)} in place of {', '.join(before)}"


def _format_recipe(recipe: Any, dtype: torch.dtype | None) -> str:
    """Recipe and dtype as they are compared and named: functions without their addresses."""
    return _te.format_recipe(recipe) + ("" if dtype is None else f", torch.autocast({dtype})")


def _format_recipes_by_rank(mine: str, mesh: DeviceMesh) -> str:
    """Which ranks have what, without the options that all have. Collective over ``mesh``."""
    ranks: dict[str, list[int]] = {}
    for rank, text in sorted(gather_by_rank(mine, mesh).items()):
        ranks.setdefault(text, []).append(rank)
    words = {text: text.split(", ") for text in ranks}
    common = set.intersection(*map(set, words.values()))
    kinds = {own[0] for own in words.values()}
    shown = []
    for text, own in ranks.items():
        kind, *options = words[text]
        options = [option for option in options if option not in common] if len(kinds) == 1 else []
        shown.append(f"{', '.join([kind, *options])} on {format_ranks(own)}")
    return shorten(shown, 4, "; ")


def _other_parameters(where: str, mine: dict[str, bool], mesh: DeviceMesh) -> MeshError:
    """The error that names the parameters. Collective over ``mesh``."""
    everyone = gather_by_rank(mine, mesh)
    found = []
    for name in dict.fromkeys(name for own in everyone.values() for name in own):
        flags = [(rank, own.get(name)) for rank, own in sorted(everyone.items())]
        trained, frozen = ([rank for rank, flag in flags if flag is wanted] for wanted in (True, False))
        if trained and frozen:
            found.append(f"{name} trained on {format_ranks(trained)}, frozen on {format_ranks(frozen)}")
    return MeshError(
        f"{where}: other parameters are trained on some ranks",
        expected="the same requires_grad on all ranks of the model",
        got=shorten(found, 3, "; ") or f"{sum(mine.values())} trained parameters here",
        why="Their gradients are reduced together: each rank would wait for others",
        fix="call requires_grad_() on all ranks alike, not under `if rank == 0`",
    )
