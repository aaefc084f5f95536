"""What all ranks of a model must compute alike: in training or not, under which recipe, for which parameters.

    a new mode          the ranks that gather weights, or split layers, with this one have come in the same mode: not
                        ``if rank == 0: model.eval(); model(x)``
    in training         recipe of ``te.autocast`` and dtype of ``torch.autocast`` are the same on all ranks, and
                        so is which parameters are trained: reductions of others would meet
    in a unit           its recipe, where ``te.autocast`` is entered within the model's forward

A rank meets the others when something is other than in its last forward; a settled forward compares a few objects and
the flags of the parameters. Ranks that change together compare what they have, and raise together. One that changes
alone waits for the others, says so, and gives up: those that have not changed are in a gather of torch's by then.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from te_fsdp import _te, _te_modules
from te_fsdp.agree import are_equal, by_rank, digest
from te_fsdp.all_ranks import collective_call, is_capturing, is_simulated, ranks_in_words
from te_fsdp.errors import CollectiveError, MeshError, PrecisionError, shorten
from te_fsdp.parameters import places_of

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from te_fsdp.sharding.state import ShardingState

# How often ranks meet: scripts that alternate in every step shall not for ever.
_MOST = 64
_UNKNOWN = object()


def require_computed_alike(state: ShardingState) -> None:
    """Compare, before a forward of the model, what it would compute with what the other ranks would.

    Local operation while nothing changes; else collective over the ranks that gather or split layers with this one, and
    in training over all of the model's: through the store, then an all-reduce of two numbers for each axis.

    Raises:
        CollectiveError: Some ranks do not come, or in another mode.
        PrecisionError: Recipes, or dtypes of ``torch.autocast``, differ.
        MeshError: Other parameters are trained on some ranks.
    """
    known = state.computed
    mode = state.model.training, torch.is_grad_enabled()
    if mode != known.mode:
        _meet_in_mode(state, mode)
        known.mode = mode
    if mode != (True, True):
        return
    known.pairs.clear()
    device = state.meshes.device_mesh.device_type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
    under = _te.active_recipe(), dtype
    trained = _trained(state)
    if not trained:
        found = list(places_of(state.model))
        known.names = [place.label for place in found]
        known.places = [(place.owner._parameters, place.name) for place in found]
        trained = _trained(state)
    if under != known.under or trained != known.trained:
        _compare(state, under, trained)
        known.pairs.append((_UNKNOWN if known.under is None else known.under[0], under[0]))
        known.under, known.trained = under, trained


def require_same_recipe(state: ShardingState, name: str) -> None:
    """Compare, before a unit's forward in training, its recipe over the ranks, if it is another than in the last.

    Local operation while nothing changes; else as :func:`require_computed_alike`.

    Raises:
        PrecisionError: Recipes differ.
        CollectiveError: Some ranks do not come.
    """
    known, recipe = state.computed, _te.active_recipe()
    before = known.units.get(name, _UNKNOWN)
    if recipe is before or known.mode != (True, True) or known.under is None:
        return
    known.units[name] = recipe
    # In the first forward one unit of each class is looked at on all ranks: some may enter te.autocast, some not.
    kind = type(state.modules[name])
    is_first = before is _UNKNOWN and bool(name) and kind not in known.kinds
    known.kinds.add(kind)
    inner = recipe != known.under[0] if before is _UNKNOWN else recipe != before
    changed = inner and (before, recipe) not in known.pairs
    if is_first or changed:  # of many units that change alike one is enough
        known.pairs.append((before, recipe))
        _compare(state, (recipe, known.under[1]), None, unit=name)


def _trained(state: ShardingState) -> list[bool]:
    """Which parameters are trained. Looked up where they are registered: weak references would forbid torch's swaps."""
    known = state.computed
    try:
        return [held[name].requires_grad for held, name in known.places]
    except (KeyError, AttributeError):  # one was taken away
        known.places.clear()
        return []


def _meet_in_mode(state: ShardingState, mode: tuple[bool, bool]) -> None:
    """Wait for the ranks whose gathers and products meet those of this one."""
    known = state.computed
    mesh = _met_by(state, any(state.units[name].gather == "pass" for name in state.modules))
    if mesh is not None and _may_meet(state, mesh):
        kind = (
            f"forward in {'training' if mode[0] else 'evaluation'}{'' if mode[1] else ' without gradients'}"
        )
        with _meeting(kind if mode in known.modes else f"first {kind}", mesh):
            _count(state, mesh)
    known.modes.add(mode)


def _met_by(state: ShardingState, gathers: bool) -> DeviceMesh | None:
    """The ranks that gather weights, if this is asked for, or split layers with this one; ``None``: nobody."""
    axes = tuple(
        axis for axis in ("dp_shard", "tp") if state.meshes.size(axis) > 1 and (gathers or axis == "tp")
    )
    return state.meshes.device_mesh[axes] if axes else None


def _may_meet(state: ShardingState, mesh: DeviceMesh, *, always: bool = False) -> bool:
    """Whether these ranks meet at all, and have not done so too often."""
    if mesh.size() == 1 or is_simulated() or is_capturing():
        return False
    return always or state.computed.meetings.get(mesh.mesh_dim_names, 0) < _MOST


def _count(state: ShardingState, mesh: DeviceMesh) -> None:
    """Count a meeting: for each set of ranks, all of which have had as many."""
    known = state.computed.meetings
    known[mesh.mesh_dim_names] = known.get(mesh.mesh_dim_names, 0) + 1


def _compare(
    state: ShardingState, under: tuple[Any, Any], trained: list[bool] | None, *, unit: str | None = None
) -> None:
    """Meet all ranks of the model, and raise on all of them unless they have the same."""
    known, mesh = state.computed, state.meshes.device_mesh
    if unit is not None:  # which other replicas may not reach
        mesh = _met_by(state, state.units[unit].gather == "pass")
    # Parameters are frozen a few times in a training, recipes may alternate.
    frozen = trained is not None and trained != known.trained
    if mesh is None or not _may_meet(state, mesh, always=frozen):
        return
    where = f"{type(state.model).__name__}.forward" if unit is None else f"forward of {unit or 'the model'}"
    first = known.trained is None
    mine = _in_words(*under)
    with _meeting("first forward in training" if first else _what_changed(state, mine, trained, unit), mesh):
        _count(state, mesh)
        told = [digest(mine), digest("" if trained is None else repr(_trained_names(state, trained)))]
        same = are_equal(told, mesh).tolist()
        if not same[0]:
            raise PrecisionError(
                f"{where}: recipes that differ between ranks",
                expected="the same te.autocast, and torch.autocast, on all ranks of the model",
                got=_by_rank(mine, mesh),
                why="They compute one forward together, and wait for each other's amax where a recipe needs that",
                fix="enter te.autocast(enabled=..., recipe=...) on all ranks alike: by numbers that all have, such as "
                "the step or an all-reduced loss, not by the rank",
            )
        if not same[1]:
            assert trained is not None
            raise _other_parameters(where, dict(zip(known.names, trained, strict=True)), mesh)


@contextmanager
def _meeting(what: str, mesh: DeviceMesh) -> Iterator[None]:
    """What is in the context begins when all ranks have come. Those that wait in vain say what has changed here."""
    call, _, here = what.partition(": ")
    come = False
    with _te_modules.reducing_no_amax_after_errors():
        try:
            with collective_call(call, mesh):
                come = True
                yield
        except CollectiveError as error:
            raise error if come or not here else CollectiveError(f"{error} On this rank: {here}.") from None


def _what_changed(state: ShardingState, mine: str, trained: list[bool] | None, unit: str | None) -> str:
    """Name of the meeting, and what this rank has to say if it has come alone."""
    known = state.computed
    if trained is not None and known.trained is not None and trained != known.trained:
        changed = [
            f"{name} {'is trained' if now else 'was frozen'}"
            for name, before, now in zip(known.names, known.trained, trained, strict=False)
            if before != now
        ]
        return f"forward with other trained parameters than before: {shorten(changed, 3)}"
    if unit is not None or known.under is None:
        return f"forward under another recipe than before: {mine}"
    words = mine.split(", "), _in_words(*known.under).split(", ")
    now, before = (own[:1] if words[0][0] != words[1][0] else own for own in words)
    return f"forward under another recipe than before: {', '.join(now)} in place of {', '.join(before)}"


def _in_words(recipe: Any, dtype: torch.dtype | None) -> str:
    """Recipe and dtype as they are compared and named: functions without their addresses."""
    torchs = "" if dtype is None else f", torch.autocast({dtype})"
    return f"{_te.recipe_in_words(recipe)}{torchs}"


def _trained_names(state: ShardingState, trained: Sequence[bool]) -> list[tuple[str, bool]]:
    """What is compared: each rank of ep has other experts, perhaps more."""
    names = state.computed.names
    known = (name.rstrip("0123456789") if state.is_expert(name) else name for name in names)
    return sorted(set(zip(known, trained, strict=True)))


def _by_rank(mine: str, mesh: DeviceMesh) -> str:
    """Which ranks have what, without the options that all have. Collective over ``mesh``."""
    ranks: dict[str, list[int]] = {}
    for rank, text in sorted(by_rank(mine, mesh).items()):
        ranks.setdefault(text, []).append(rank)
    words = {text: text.split(", ") for text in ranks}
    common = set.intersection(*map(set, words.values()))
    kinds = {own[0] for own in words.values()}
    shown = []
    for text, own in ranks.items():
        kind, *options = words[text]
        options = [option for option in options if option not in common] if len(kinds) == 1 else []
        shown.append(f"{', '.join([kind, *options])} on {ranks_in_words(own)}")
    return shorten(shown, 4, "; ")


def _other_parameters(where: str, mine: dict[str, bool], mesh: DeviceMesh) -> MeshError:
    """The error that names the parameters. Collective over ``mesh``."""
    everyone = by_rank(mine, mesh)
    found = []
    for name in dict.fromkeys(name for own in everyone.values() for name in own):
        ranks = {
            flag: [rank for rank, own in sorted(everyone.items()) if own.get(name) is flag]
            for flag in (True, False)
        }
        if ranks[True] and ranks[False]:
            found.append(
                f"{name} trained on {ranks_in_words(ranks[True])}, frozen on {ranks_in_words(ranks[False])}"
            )
    return MeshError(
        f"{where}: other parameters are trained on some ranks",
        expected="the same requires_grad on all ranks of the model",
        got=shorten(found, 3, "; ") or f"{sum(mine.values())} trained parameters here",
        why="Their gradients are reduced together: each rank would wait for others",
        fix="call requires_grad_() on all ranks alike, not under `if rank == 0`",
    )
