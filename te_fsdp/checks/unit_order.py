"""Comparison of the order in which ranks run units."""

# [Note: order of units] Ranks compare the order after their first forward in each mode. A rank whose later forward
# calls a unit at a new position, or ends before one, waits for the others there. If all change, they compare again at
# the end. A rank that changes alone logs the unit, and gives up as in [Note: when ranks compare].
# The ranks are those that all-gather units, reduce their gradients or split them together in this mode. So ranks may
# run different numbers of microbatches while they keep weights and gradients unsharded, and replicas until the last
# one. Therefore the all-gathers of the first forward and the first reductions are compared separately.
#
# Manual calls of unshard and reshard, and setters, change collectives too. Loops may repeat them in each step. So a
# rank waits before a manual all-gather or a forward only if it has never made the same calls since a step, or had the
# same settings, in a forward of this mode.

from __future__ import annotations

import contextlib
import functools
from itertools import zip_longest
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from te_fsdp.checks.forward import forward_rendezvous, peer_ranks, should_check
from te_fsdp.collectives.agreement import are_equal, digest, gather_by_rank
from te_fsdp.collectives.rendezvous import format_ranks
from te_fsdp.errors import CollectiveError, shorten
from te_fsdp.sharded_model import ShardedModel
from te_fsdp.upstream import fsdp2_state as _fsdp2, torch_dtensor as _torch
from te_fsdp.upstream.fsdp2_units import all_gather_ranks, call_before, flags_of_backward, reduces_gradients


def require_same_unit(state: ShardedModel, name: str, unit: nn.Module, started: bool) -> None:
    """Wait, before a unit's forward, for the ranks that all-gather or split it with this one. Collective over them.

    Ranks in forwards of different units raise CollectiveError.
    """
    mesh = peer_ranks(state, state.units[name].gather == "pass")
    if mesh is not None and should_check(state, mesh) and not _is_over_ep(state, name):
        with forward_rendezvous(f"forward of {name or 'the model'}", mesh):
            pass


def _is_over_ep(state: ShardedModel, name: str) -> bool:
    """Return whether a unit has experts. Ranks of ``ep`` run different ones, for example only those with tokens."""
    known = state.computed.over_ep
    if name not in known:
        group, ep = all_gather_ranks(state.modules[name]), state.meshes.ep
        known[name] = ep is not None and (group is None or group.size() < state.meshes.size("dp_shard"))
    return known[name]


#: Setters of FSDP2 that change the order of all-gathers, and those that loops may call in each microbatch.
_OF_ORDER = "set_modules_to_forward_prefetch", "set_modules_to_backward_prefetch", "set_reshard_after_forward"
_OF_BACKWARD = (
    "set_requires_gradient_sync",
    "set_requires_all_reduce",
    "set_is_last_backward",
    "set_reshard_after_backward",
    "set_unshard_in_backward",
    "set_gradient_divide_factor",
    "set_force_sum_reduction_for_comms",
)


def watch_setters(state: ShardedModel) -> None:
    """Record calls of FSDP2's setters, ``unshard`` and ``reshard`` ([Note: order of units]). Local operation."""
    compared = state.computed

    def record_setter(setter: str) -> None:
        compared.setter = setter
        if setter in _OF_ORDER:
            compared.orders = {mode: [] for mode in compared.orders}

    def record_call(method: str, name: str) -> None:
        is_unsharded = _fsdp2.is_unit_unsharded(state.modules[name])
        if _torch.in_backward() or is_unsharded is (method == "unshard") or _is_over_ep(state, name):
            return
        if compared.calls is None:  # as the forwards so far
            compared.states |= {(mode[:2], ((), ())) for mode in compared.orders}
        before, since = compared.calls or ((), ())
        # Loops without a step repeat the last calls.
        since = (*since, f"{method} of {name or 'the model'}")[-2 * len(state.modules) :]
        compared.calls = before, since
        if method == "unshard":
            _wait_for_new_states(state, compared.calls[1][-1])

    gathers = ("unshard", "reshard") if state.meshes.size("dp_shard") > 1 else ()
    compared.states = {flags_of_backward(state.modules.values())}
    for name, unit in state.modules.items():
        for setter in (*_OF_ORDER, *_OF_BACKWARD):
            call_before(unit, setter, functools.partial(record_setter, setter))
        for method in gathers:
            call_before(unit, method, functools.partial(record_call, method, name))


def _wait_for_new_states(state: ShardedModel, call: str = "") -> None:
    """Wait for the other ranks if manual calls or setters have led to a state that this rank has not had before.

    Before a manual all-gather (``call``), or the first unit of a forward. Collective in a new state.
    """
    compared, mode = state.computed, state.computed.order_mode
    #: State -> its label, the ranks that must have it too, and whether their settings are new
    new: dict[Any, tuple[str, DeviceMesh | None, bool]] = {}
    if compared.calls is not None:
        made = shorten(list(compared.calls[1] or compared.calls[0]), 3) or "none"
        label = f"{call or 'forward'}: a new order of manual calls, {made}"
        key = call or mode[:2], compared.calls  # backwards do not matter
        # Ranks may run different numbers of forwards while their units are unsharded.
        gathers = key not in compared.states and (bool(call) or any(map(_is_sharded, state.modules.values())))
        new[key] = label, state.meshes.device_mesh["dp_shard"] if gathers else None, False
        compared.calls = compared.calls if call else (compared.calls[1] or compared.calls[0], ())
    # Ranks that keep weights for a step may run different numbers of forwards, of which the first all-gathers.
    gathers = any(state.units[name].gather == "pass" for name in state.modules)
    if compared.setter and mode[1] and not call and gathers:
        mesh = _ranks_of_order(state, gathers)
        label = f"forward with new settings of FSDP2: {compared.setter} was called"
        # The end of the first forward compares settings.
        new[flags_of_backward(state.modules.values())] = label, mesh if compared.orders else None, True
    for key, (label, mesh, has_new_settings) in new.items():
        if key in compared.states or (mesh is not None and not should_check(state, mesh, of="state")):
            continue
        if mesh is not None:
            with forward_rendezvous(label, mesh):
                compared.checks_done[mesh.mesh_dim_names, "state"] += 1
            compared.reordered = mesh if has_new_settings else compared.reordered
        if mesh is not None or not compared.orders:  # others are not compared, and may be new in each step
            compared.states.add(key)


def _is_sharded(unit: nn.Module) -> bool:
    """Return whether the next forward of a unit all-gathers it from other ranks."""
    return not _fsdp2.is_unit_unsharded(unit) and all_gather_ranks(unit) is not None


def follow_unit_order(state: ShardedModel, name: str, unit: nn.Module, started: bool) -> None:
    """Record a unit that a forward of the model calls. Local unless its position is new ([Note: order of units])."""
    compared = state.computed
    order = compared.running
    over_ep = compared.over_ep  # without a call, in each forward of a unit
    if order is None or (over_ep[name] if name in over_ep else _is_over_ep(state, name)):
        return
    order.append(name)
    index, known = len(order) - 1, compared.orders.get(compared.order_mode)
    if not index and (compared.setter or compared.calls):
        _wait_for_new_states(state)
    if known is None or compared.reordered is not None or known[index : index + 1] == [name]:
        return
    before = (known[index] or "the model") if index < len(known) else "no unit"
    reason = f"the last forward called {before} instead" if known else f"{compared.setter} was called"
    where = f"forward of {name or 'the model'} in a different order than before"
    _wait_for_new_order(state, name, f"{where}: {reason}", started)


def _ranks_of_order(state: ShardedModel, gathers: bool) -> DeviceMesh | None:
    """Return the mesh of the ranks that must run units in the same order.

    ``gathers`` is whether a unit has to be all-gathered.
    """
    (_, trains, replicas), units = state.computed.order_mode, state.modules
    # The units' own flags, which the user's calls of setters may have changed.
    joint = all(
        state.units[name].gather == "pass" or (trains and reduces_gradients(unit))
        for name, unit in units.items()
    )
    return peer_ranks(state, gathers or joint, replicas=replicas == 2)


def _wait_for_new_order(state: ShardedModel, unit: str, label: str, started: bool = False) -> None:
    """Wait until all ranks that must run units in the same order have changed it. Collective over them."""
    mesh = _ranks_of_order(state, not started and not _fsdp2.is_unit_unsharded(state.modules[unit]))
    if mesh is not None and should_check(state, mesh, of="order"):
        with forward_rendezvous(label, mesh):
            state.computed.checks_done[mesh.mesh_dim_names, "order"] += 1
        state.computed.reordered = mesh


def compare_unit_order(state: ShardedModel) -> None:
    """Compare, after a forward of the model, the order of its units over ranks ([Note: order of units]).

    Collective after the first forward in a mode, and after a change on all ranks.
    """
    compared, mode = state.computed, state.computed.order_mode
    mine, known, compared.running = compared.running, compared.orders.get(mode), None
    # Ranks may have different numbers of microbatches before the one that reduces, so it compares the settings.
    if (
        compared.setter
        and mode[1]
        and all(reduces_gradients(u, replicas=True) for u in state.modules.values())
    ):
        compared.setter = ""
    if mine is None or not state.modules:
        return
    over = [(compared.reordered, False)]
    if known is None:
        # The first forward, and the first with gradients, all-gather all units.
        gathers = not any(key[1] or not mode[1] for key in compared.orders)
        over = [(peer_ranks(state, True), True)] if gathers else []
        # Without reductions, only a different order of the all-gathers is new.
        same = any(key[:2] == mode[:2] and order == mine for key, order in compared.orders.items())
        over += [(_ranks_of_order(state, False), False)] if mode[2] or not (gathers or same) else []
    elif compared.reordered is None and len(mine) < len(known) and mine == known[: len(mine)]:
        missing = known[len(mine)]
        where = f"end of forward without {missing or 'the model'}"
        _wait_for_new_order(state, missing, f"{where}: the last forward called it")
        over = [(compared.reordered, False)]
    if known is None or compared.reordered is not None:
        compared.orders[mode] = mine
    for mesh, of_gathers in over:
        if mesh is None or not should_check(state, mesh, always=True):
            continue
        # Ranks may reach their first reductions after different numbers of microbatches.
        is_first = known is None and not of_gathers
        with forward_rendezvous("first reductions", mesh) if is_first else contextlib.nullcontext():
            require_same_order(state, mine, mesh, of_gathers)


def require_same_order(state: ShardedModel, mine: list[str], mesh: DeviceMesh, of_gathers: bool) -> None:
    """Raise CollectiveError if the ranks of a mesh have different orders or settings. Collective over them."""
    names = {id(module): name or "the root unit" for name, module in state.modules.items()}
    settings = [
        f"{names[id(unit)]} with {setting}"
        for unit in state.modules.values()
        for setting in _fsdp2.collective_settings(unit, names, of_gathers=of_gathers)
    ]
    same = are_equal([digest(repr(mine)), digest(repr(settings))], mesh).tolist()
    if all(same):
        return
    lists = gather_by_rank(settings if same[0] else mine, mesh)
    ran: dict[str, list[int]] = {}  # at the first difference
    items = next(items for items in zip_longest(*lists.values(), fillvalue="no unit") if len({*items}) > 1)
    for rank, item in sorted(zip(lists, items, strict=True)):
        ran.setdefault(item, []).append(rank)
    what = "units with different settings of FSDP2" if same[0] else "units that ran in different orders"
    raise CollectiveError(
        f"{type(state.model).__name__}.forward: {what}",
        expected="the same units, in the same order, on all ranks that all-gather, reduce or split them together",
        got="; ".join(f"{item} on {format_ranks(those)}" for item, those in ran.items()),
        why="A collective of one unit would join that of a different one, so their weights or gradients would be mixed",
        fix="run units in an order that does not depend on the rank or on a set, and call FSDP2's setters on all ranks",
    )
