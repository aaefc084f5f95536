"""Maxima over ranks of delayed scaling's newest amaxes in saved state dicts."""

# [Note: newest amaxes] TE reduces the newest row of an amax history over ranks at the end of the next training
# forward. Until then each rank has a row of its own, for example after an evaluation, or after a backward in which
# TE quantizes weights again under FSDP2. A file has one row for all ranks. The maximum over ranks is the same
# state, because TE takes the maximum, too. DCP's plans carry the rows to the coordinator and back. A collective of
# te_fsdp could interleave with those of training, because ``dcp.async_save`` saves in a thread.

from __future__ import annotations

from collections.abc import Iterable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from te_fsdp.collectives.agreement import gather_by_rank
from te_fsdp.collectives.rendezvous import collective_call
from te_fsdp.modules.extra_state import Amaxes, newest_amaxes, with_newest_amaxes
from te_fsdp.records import binding_of, get_record
from te_fsdp.upstream import torch_dtensor as _torch
from te_fsdp.upstream.patches import Replacements, wrapping


class PlanData(dict[str, Any]):
    """``planner_data`` of a save plan, with the newest amaxes of a rank, or their maxima over ranks."""

    amaxes: Amaxes

    @classmethod
    def join(cls, data: Any, amaxes: Amaxes) -> PlanData:
        """Return a copy of a plan's data with these amaxes."""
        result = cls(data or ())
        result.amaxes = amaxes
        return result


def maxima(by_rank: Iterable[Amaxes]) -> Amaxes:
    """Return the maxima over ranks. Ranks omit amaxes of zero."""
    result: Amaxes = {}
    for amaxes in by_rank:
        for key, newest in amaxes.items():
            result[key] = torch.maximum(result.get(key, newest), newest)
    return result


@wrapping
def create_local_plan(self: Any, *, stock: Any) -> Any:
    """Call ``create_local_plan`` of a save planner. The coordinator also gets the amaxes of a cached plan."""
    plan, amaxes = stock(self), newest_amaxes(self.state_dict)
    return replace(plan, planner_data=PlanData.join(plan.planner_data, amaxes)) if amaxes else plan


@wrapping
def create_global_plan(self: Any, all_plans: Any, *, stock: Any) -> Any:
    """Call ``create_global_plan`` of a save planner, which runs on the coordinator only."""
    amaxes = maxima(getattr(plan.planner_data, "amaxes", {}) for plan in all_plans)
    plans, metadata = stock(self, all_plans)
    # Cached plans have the amaxes of an earlier save.
    plans = [replace(plan, planner_data=PlanData.join(plan.planner_data, amaxes)) for plan in plans]
    return plans, metadata


@wrapping
def finish_plan(self: Any, new_plan: Any, *, stock: Any) -> Any:
    """Call ``finish_plan`` of a save planner: the rank that writes an entry writes it with the maxima."""
    amaxes = getattr(new_plan.planner_data, "amaxes", {})
    self.state_dict = _with_maxima(self.state_dict, amaxes) if amaxes else self.state_dict
    return stock(self, new_plan)


def full_model_state(stock: Any, model: torch.nn.Module, *args: Any) -> dict[str, Any]:
    """Call torch's function that returns a model's state dict. Collective over the mesh for an unsharded one."""
    state = stock(model, *args)
    if not args[-1].full_state_dict:
        return state
    meshes = [p.device_mesh for p in model.parameters() if isinstance(p, DTensor)]
    is_collective = bool(meshes)  # already, by the all-gathers of its parameters
    # That of the sharded model also has the axes over which its parameters are replicated.
    records = filter(None, map(get_record, model.parameters()))
    sharded = [r.state() for r in records if r.state is not None]
    meshes += [state.meshes.device_mesh for state in sharded if state is not None]
    entries = {
        f"{_torch.without_wrappers(path)}._extra_state".lstrip("."): module.get_extra_state()
        for path, module in model.named_modules()
        if binding_of(module) is not None
        and type(module).get_extra_state is not torch.nn.Module.get_extra_state
    }
    # Without FP8 the entries of replicated modules are empty.
    if not meshes or not (entries if is_collective else any(map(torch.numel, entries.values()))):
        return state
    mesh = max(meshes, key=DeviceMesh.size)
    # Otherwise rank 0 alone would wait in the gather if it calls this as it does with DDP.
    call = "torch.distributed.checkpoint.state_dict.get_model_state_dict(full_state_dict=True)"
    with nullcontext() if is_collective else collective_call(call, mesh):
        by_rank = gather_by_rank(newest_amaxes(entries), mesh)
    return _with_maxima(state, maxima(by_rank.values()))


def _with_maxima(state: dict[str, Any], amaxes: Amaxes) -> dict[str, Any]:
    """Return a state dict whose entries have these amaxes. Entries of other ranks are omitted."""
    keys = {key for key, _ in amaxes} & state.keys()
    return {**state, **{key: with_newest_amaxes(key, state[key], amaxes) for key in keys}}


PATCHES: Replacements = (
    (DefaultSavePlanner, "create_local_plan", create_local_plan),
    (DefaultSavePlanner, "create_global_plan", create_global_plan),
    (DefaultSavePlanner, "finish_plan", finish_plan),
)
