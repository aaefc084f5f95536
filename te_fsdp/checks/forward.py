"""Checks of a sharded model's forwards."""

# [Note: same computation] All ranks of a model must run the same computation: training or evaluation, recipe,
# trained parameters.
#
#     a new mode     ranks that all-gather weights or split layers together enter the same mode: not
#                    ``if rank == 0: model.eval(); model(x)``
#     in training    the recipe of ``te.autocast``, the dtype of ``torch.autocast`` and the trained parameters are the
#                    same on all ranks, because reductions must match
#     in a unit      its recipe, if ``te.autocast`` is entered within the model's forward
#     all units      run in the same order on ranks that all-gather, reduce or split layers together: a collective would
#                    join that of a different unit, without an error if both have the same size

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from te_fsdp.collectives.agreement import (
    are_equal,
    digest,
    format_differences,
    gather_by_rank,
    raised_on_all_ranks,
)
from te_fsdp.collectives.rendezvous import collective_call, format_ranks, is_capturing, is_simulated
from te_fsdp.errors import (
    CollectiveError,
    GradientError,
    MeshError,
    OrderError,
    PlacementError,
    PrecisionError,
    shorten,
)
from te_fsdp.records import param_owners
from te_fsdp.sharded_model import ShardedModel, record_unsharded_params, versions_of
from te_fsdp.upstream import (
    fsdp2_state as _fsdp2,
    te as _te,
    torch_autograd as _torch_autograd,
    torch_dtensor as _torch,
)
from te_fsdp.upstream.fsdp2_units import reduces_gradients

# Cap on cross-rank checks per mesh, so that scripts that alternate train and eval do not pay for one per step.
_MOST = 64
_UNKNOWN = object()


# --------------------------------------------------------------------------------------------------- state of a forward


def refuse_inference_mode(state: ShardedModel) -> None:
    """Raise if weights that were first all-gathered under ``torch.inference_mode`` are to be trained. Local."""
    if torch.is_inference_mode_enabled():
        # FSDP2 chooses its roots in the first forward, so no root means that this one is the first.
        state.checked.inferred = state.checked.inferred or (bool(state.modules) and not state.roots())
    elif state.checked.inferred:
        raise OrderError(
            f"{type(state.model).__name__}: forward after a first one under torch.inference_mode",
            expected="the first forward outside of inference mode",
            got="unsharded weights that are inference tensors",
            why="FSDP2 allocates them once, in the first forward, and torch writes to them in that mode only",
            fix="use torch.no_grad() for evaluation before training",
        )


def refuse_stale_weights(state: ShardedModel, name: str, unit: nn.Module, started: bool) -> None:
    """Raise if a unit would run with weights that were changed since they were all-gathered. Local operation."""
    if not started and state.units[name].gather == "pass" and name not in state.unsharded.versions:
        return  # all-gathered in each forward and backward: only start_param_gather can make these stale
    if not started and not _fsdp2.is_unit_unsharded(unit):
        if state.units[name].gather == "pass":
            state.unsharded.versions.pop(name, None)
        else:
            state.unsharded.versions[name] = versions_of(unit)
        return
    gathered_at = state.unsharded.versions.get(name)
    if gathered_at is None:
        return
    now = versions_of(unit)
    changed = [key for key, version in gathered_at.items() if now.get(key, version) != version]
    if changed:
        record_unsharded_params(unit)  # names() finds the shards of registered unsharded parameters
        raise OrderError(
            f"{state.names()[changed[0]]}: forward with an unsharded weight from before the last update",
            expected="weights all-gathered after the optimizer's step",
            got="a shard that was written to while the unsharded weight was kept",
            why="Only the steps of torch.optim.Optimizer's subclasses release kept weights",
            fix="call te_fsdp.release_params(model) after the update",
        )


def refuse_opaque_output(name: str, unit: nn.Module, opaque: list[Any]) -> None:
    """Raise if a unit that is trained returned objects in which no tensor was found. Local operation."""
    if not any(parameter.requires_grad for parameter in unit.parameters()):
        return
    kinds = dict.fromkeys(type(item).__name__ for item in opaque)
    raise PlacementError(
        f"{name or type(unit).__name__.removeprefix('FSDP')}: forward returned {shorten(list(kinds), 3)}",
        expected="tensors, or containers, dataclasses and objects that have them as attributes",
        got="an object without a tensor that can be found",
        why="FSDP2 all-gathers a unit's weights for backward in hooks on the tensors that it returns",
        fix="return the tensors, a tuple or a dict of them; or do not make this module a unit",
    )


def refuse_function_transforms(state: ShardedModel) -> None:
    """Raise in a forward under a transform that custom autograd functions do not support. Local operation."""
    # Checked in each forward, because a transform is a context of the caller and not a property of the model.
    # ``torch.func`` supports FSDP2's units of torch's layers.
    transform = _torch_autograd.function_transform()
    if not transform:
        return
    names = [name or "the model" for name, module in state.model.named_modules() if _te.kind_of(module)]
    if not names and torch.is_grad_enabled() and transform != "torch.func":
        names = [name or "the root unit" for name in state.modules]
    if names:
        raise OrderError(
            f"{names[0]}: forward under {transform}, as of vmap, jvp, jacrev or a dual level",
            expected="a forward outside of function transforms",
            got=f"a transform of {len(names)} module(s)",
            why="The autograd functions of TransformerEngine and FSDP2 support backward only",
            fix="call the model once per row or direction, and use backward() or torch.autograd.grad for gradients of "
            "inputs; or transform an unsharded model of torch's own layers",
        )


# ----------------------------------------------------------------------------------------------------- same computation


def raise_together(state: ShardedModel, run: Callable[[], None]) -> None:
    """Run local checks before the first forward, and raise the error of one rank on all.

    Collective over the ranks that all-gather or split layers with this one, which would wait for that rank. Later
    forwards run the checks locally.
    """
    mode = state.model.training, torch.is_grad_enabled()
    if state.computed.modes or _torch.in_backward():
        run()
        return
    with _with_peers(state, mode) as mesh, raised_on_all_ranks(mesh, f"{type(state.model).__name__}.forward"):
        run()
    state.computed.mode = mode


# [Note: when ranks compare] A rank compares with the others when something differs from its last forward. In
# steady state a forward compares a few objects and the flags of the parameters. Ranks that change together
# compare, and raise together. A rank that changes alone waits for the others, logs it, and gives up: the
# others are in an all-gather of torch's by then.
def compare_computation(state: ShardedModel) -> None:
    """Compare, before a forward of the model, its mode, recipe and trained parameters over ranks.

    Local operation in steady state. After a change it is collective over the ranks that all-gather or split layers with
    this one, and in training over all ranks of the model: a rendezvous in the store, then two numbers per axis.
    At level "full" every forward compares.
    """
    compared, every = state.computed, state.checks.level == "full"
    mode = state.model.training, torch.is_grad_enabled()
    compared.order_mode = *mode, extent_of_reductions(state) if mode[1] else 0
    compared.running, compared.reordered = [], None
    if mode != compared.mode or every:
        with _with_peers(state, mode):
            compared.mode = mode
    if mode != (True, True):
        return
    compared.pairs.clear()
    device = state.meshes.device_mesh.device_type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
    under = _te.active_recipe(), dtype
    trained = _trained(state)
    if not trained:
        compared.places = [
            (owner.label, owner.module._parameters, owner.name) for owner in param_owners(state.model)
        ]
        trained = _trained(state)
    if under != compared.under or trained != compared.trained or every:
        _compare(state, under, trained)
        # TransformerEngine (2.18 to 2.20) computes the gradient of a bias with that of its weight in high precision. So
        # the next forward of trained biases whose weight is frozen raises without ``te.autocast``.
        for path, module in state.model.named_modules() if not all(trained) else ():
            if _te.kind_of(module) not in ("Linear", "LayerNormLinear", "LayerNormMLP", "GroupedLinear"):
                continue
            if getattr(module, "return_bias", False) or getattr(module, "gemm_bias_unfused_add", False):
                continue  # autograd adds these biases
            if module not in _watched() and _untrained_bias(module):
                _watched()[module] = module.register_forward_hook(functools.partial(_refuse_bias, path))
        # Units whose recipe changes with that of the model are covered by this comparison.
        compared.pairs.append((_UNKNOWN if compared.under is None else compared.under[0], under[0]))
        compared.under, compared.trained = under, trained


#: Layers whose next forward with gradients checks the bias, and its hook.
_watched = functools.cache(weakref.WeakKeyDictionary[Any, Any])


def _untrained_bias(module: nn.Module) -> str | None:
    """Return the first trained bias of a module that gets no gradient in high precision. Local operation."""
    # LayerNormMLP computes the gradient of fc1_bias with that of its activation.
    names = [n for n in sorted(module._parameters) if not n.startswith(("layer_norm", "fc1"))]
    weights = [name for name in names if "weight" in name]
    if _te.kind_of(module) == "GroupedLinear":
        weights = weights[:1]  # decides for all experts
    trained = [n for n in names if (p := module._parameters[n]) is not None and p.requires_grad]
    # Without a weight, a parametrization computes it.
    if not weights or not set(weights).isdisjoint(trained):
        return None
    return next((name for name in trained if "bias" in name), None)


def _refuse_bias(path: str, module: Any, args: Any, output: Any) -> None:
    """Raise after a module's first forward with gradients if it has computed in high precision. Local operation."""
    if not torch.is_grad_enabled() or module not in _watched():  # a copy of the module
        return
    bias = _untrained_bias(module)
    if bias is not None and not module.__dict__.get("fp8"):
        raise GradientError(
            f"{path}.{bias}: a trained bias of a frozen weight, in high precision".lstrip("."),
            expected="a gradient for each trained parameter",
            got="a bias whose weight has requires_grad=False, in a forward without te.autocast",
            why="TransformerEngine computes the gradient of a bias with that of its weight, unless it quantizes",
            fix="call requires_grad_(False) on the bias, or train the weight as well; to train biases alone, use "
            "torch.nn.Linear, or te.autocast with a recipe",
        )
    # Only after a forward that does not raise: graphed_step runs a step again if its recording raises.
    _watched().pop(module).remove()


def compare_recipe(state: ShardedModel, name: str, unit: nn.Module, started: bool) -> None:
    """Compare, before a unit's forward in training, its recipe over ranks, if it differs from the last one.

    Collective then, as :func:`compare_computation`, over the ranks that run the unit together.
    """
    compared, recipe = state.computed, _te.active_recipe()
    before = compared.units.get(name, _UNKNOWN)
    if recipe is before or compared.mode != (True, True) or compared.under is None:
        return
    # In the first forward all ranks compare one unit of each class: some may enter te.autocast, some not.
    is_first = before is _UNKNOWN and bool(name)
    is_first = is_first and type(state.modules[name]) not in {type(state.modules[n]) for n in compared.units}
    compared.units[name] = recipe
    inner = recipe != compared.under[0] if before is _UNKNOWN else recipe != before
    changed = inner and (before, recipe) not in compared.pairs
    if is_first or changed:  # one comparison covers all units with the same change
        compared.pairs.append((before, recipe))
        _compare(state, (recipe, compared.under[1]), None, unit=name)


def extent_of_reductions(state: ShardedModel) -> int:
    """Return whether backwards reduce the gradients of all units: 1 over ``dp_shard``, 2 also over ``dp_replicate``."""
    # Without calls of the user's setters, the mode of synchronization determines the flags of all units.
    known, mode = state.computed.extents, None if state.computed.setter else state.sync.mode
    if mode is None or mode not in known:
        units = state.modules.values()
        # HFSDP averages gradients in an order of its own.
        replicas = state.outer == "no_shard" and state.meshes.size("dp_replicate") > 1
        known[mode] = int(all(map(reduces_gradients, units)))
        if replicas and all(reduces_gradients(unit, replicas=True) for unit in units):
            known[mode] = 2
    return known[mode]


def _trained(state: ShardedModel) -> list[bool]:
    """Return the ``requires_grad`` of each parameter. Read by owner, because weak references forbid torch's swaps."""
    compared = state.computed
    try:
        return [table[name].requires_grad for _, table, name in compared.places]
    except (KeyError, AttributeError):  # a parameter was removed
        compared.places.clear()
        return []


@contextmanager
def _with_peers(state: ShardedModel, mode: tuple[bool, bool]) -> Iterator[DeviceMesh | None]:
    """Begin the context when the ranks that share this rank's ``dp_shard`` and ``tp`` groups have arrived.

    Its value is their mesh, ``None`` if this rank did not wait for others.
    """
    compared = state.computed
    mesh = peer_ranks(state, any(state.units[name].gather == "pass" for name in state.modules))
    if mesh is None or not should_check(state, mesh):
        yield None
    else:
        kind = f"forward in {'training' if mode[0] else 'evaluation'}"
        kind += "" if mode[1] else " without gradients"
        # The name contains the mode: ranks in different modes would run different collectives, and wait for
        # each other.
        with forward_rendezvous(kind if mode in compared.modes else f"first {kind}", mesh):
            compared.checks_done[mesh.mesh_dim_names, ""] += 1
            yield mesh
    compared.modes.add(mode)


def peer_ranks(state: ShardedModel, gathers: bool, *, replicas: bool = False) -> DeviceMesh | None:
    """Return the mesh of the ranks that share layers with this one over tp; with ``gathers``, also its all-gathers.

    ``replicas`` includes ``dp_replicate``. ``None`` if there are no such ranks.
    """
    included = {"dp_replicate": replicas, "dp_shard": gathers, "tp": True}
    axes = tuple(
        axis for axis, is_included in included.items() if is_included and state.meshes.size(axis) > 1
    )
    return state.meshes.device_mesh[axes] if axes else None


def should_check(state: ShardedModel, mesh: DeviceMesh, *, always: bool = False, of: str = "") -> bool:
    """Return whether to run a cross-rank check, at most ``_MOST`` times per mesh and kind (``of``).

    All ranks of the mesh count equally.
    """
    if mesh.size() == 1 or is_simulated() or is_capturing():
        return False
    if always or state.checks.level == "full":
        return True
    return state.computed.checks_done[mesh.mesh_dim_names, of] < _MOST


def _compare(
    state: ShardedModel, under: tuple[Any, Any], trained: list[bool] | None, *, unit: str | None = None
) -> None:
    """Wait for all ranks of the model, and raise on all of them unless recipe and trained parameters are the same."""
    compared, mesh = state.computed, state.meshes.device_mesh
    if unit is not None:  # other replicas may not run it
        mesh = peer_ranks(state, state.units[unit].gather == "pass")
    # Parameters are frozen a few times in a training, recipes may alternate.
    frozen = trained is not None and trained != compared.trained
    if mesh is None or not should_check(state, mesh, always=frozen):
        return
    where = f"{type(state.model).__name__}.forward" if unit is None else f"forward of {unit or 'the model'}"
    first = compared.trained is None
    mine, flags = _format_recipe(*under), {}
    if trained is not None:
        for (label, table, name), flag in zip(compared.places, trained, strict=True):
            flags[label] = f"{'trained' if flag else 'frozen'} in {table[name].dtype}"
    # Each rank of ep has different experts, perhaps more of them.
    by_name = sorted({(n.rstrip("0123456789") if state.is_expert(n) else n, f) for n, f in flags.items()})
    with forward_rendezvous(
        "first forward in training" if first else _describe_change(state, mine, trained, unit), mesh
    ):
        # Counted inside of the rendezvous: only then all ranks of the mesh count it.
        compared.checks_done[mesh.mesh_dim_names, ""] += 1
        same = are_equal([digest(mine), digest(repr(by_name))], mesh).tolist()
        if not same[0]:
            ranks: dict[str, list[int]] = {}
            for rank, text in sorted(gather_by_rank(mine, mesh).items()):
                ranks.setdefault(text, []).append(rank)
            terms = {text: text.split(", ") for text in ranks}
            common = set.intersection(*map(set, terms.values()))
            kinds = {ranks_of_text[0] for ranks_of_text in terms.values()}
            shown = []
            for text, ranks_of_text in ranks.items():
                kind, *options = terms[text]
                options = [option for option in options if option not in common] if len(kinds) == 1 else []
                shown.append(f"{', '.join([kind, *options])} on {format_ranks(ranks_of_text)}")
            raise PrecisionError(
                f"{where}: recipes that differ between ranks",
                expected="the same te.autocast, and torch.autocast, on all ranks of the model",
                got=shorten(shown, 4, "; "),
                why="They compute one forward together, and wait for each other's amax if a recipe needs that",
                fix="enter te.autocast(enabled=..., recipe=...) on all ranks in the same way: by numbers that are "
                "equal on all ranks, such as the step or an all-reduced loss, not by the rank",
            )
        if not same[1]:
            raise _different_parameters_error(where, flags, mesh)


@contextmanager
def forward_rendezvous(label: str, mesh: DeviceMesh) -> Iterator[None]:
    """Begin the context when all ranks have arrived. Ranks that time out report their changes."""
    call, _, point = label.partition(": ")
    arrived = False
    # The ranks that do not raise would not join the all-reduce at the end of te.autocast.
    with _te.skip_amax_reduction_after_errors():
        try:
            with collective_call(call, mesh):
                arrived = True
                yield
        except CollectiveError as error:
            raise (
                error if arrived or not point else CollectiveError(f"{error} On this rank: {point}.")
            ) from None


def _describe_change(state: ShardedModel, mine: str, trained: list[bool] | None, unit: str | None) -> str:
    """Return the name of the rendezvous, and the text for a rank that has arrived alone."""
    compared = state.computed
    if trained is not None and compared.trained is not None and trained != compared.trained:
        changed = [
            f"{name} {'is trained' if now else 'was frozen'}"
            for (name, _, _), before, now in zip(compared.places, compared.trained, trained, strict=False)
            if before != now
        ]
        return f"forward with different trained parameters than before: {shorten(changed, 3)}"
    if unit is not None or compared.under is None:
        return f"forward under a different recipe than before: {mine}"
    # If the class of the recipe differs, its options add no information.
    recipes = mine.split(", "), _format_recipe(*compared.under).split(", ")
    now, before = (recipe[:1] if recipes[0][0] != recipes[1][0] else recipe for recipe in recipes)
    return f"forward under a different recipe than before: {', '.join(now)} instead of {', '.join(before)}"


def _format_recipe(recipe: Any, dtype: torch.dtype | None) -> str:
    """Return recipe and dtype as text, without addresses of functions."""
    return _te.format_recipe(recipe) + ("" if dtype is None else f", torch.autocast({dtype})")


def _different_parameters_error(where: str, mine: dict[str, str], mesh: DeviceMesh) -> MeshError:
    """Return the error that names the parameters. Collective over ``mesh``."""
    # Only after a difference was found, because the names of all parameters are a large message.
    lines = [line for line in format_differences(mine, mesh) if "missing on" not in line]
    return MeshError(
        f"{where}: different parameters are trained on some ranks",
        expected="the same requires_grad and dtypes on all ranks of the model",
        got=shorten(lines, 3, "; ") or f"{len(mine)} parameters here",
        why="They are all-gathered, and their gradients reduced, together: each rank would wait for others",
        fix="call requires_grad_(), and to() or half(), on all ranks in the same way, not under `if rank == 0`",
    )
