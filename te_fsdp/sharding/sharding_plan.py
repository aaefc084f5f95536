"""What ``fully_shard`` decides before it changes anything: units, strategies, dtypes, where each parameter goes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch.distributed.fsdp import MixedPrecisionPolicy as Fsdp2Policy
from torch.distributed.fsdp import OffloadPolicy

from te_fsdp.agree import raised_on_all_ranks
from te_fsdp.errors import PlacementError, PrecisionError
from te_fsdp.modules.checks import plan_modules
from te_fsdp.modules.experts import Selection
from te_fsdp.modules.plan import Meshing, ModulePlan
from te_fsdp.sharding.experts import with_expert_units
from te_fsdp.sharding.no_shard import NoShard, plan_no_shard
from te_fsdp.sharding.precision import MixedPrecisionPolicy
from te_fsdp.sharding.precision_plan import PrecisionPlan, plan_precision
from te_fsdp.sharding.state import ShardingState
from te_fsdp.sharding.strategies import DEFAULT, STRATEGIES, Strategy, check_outer
from te_fsdp.sharding.ties import check_ties
from te_fsdp.sharding.units import Wanted, check_accepted, check_order, find_units

if TYPE_CHECKING:
    from torch import nn

    from te_fsdp.mesh import Meshes

__all__ = ["Plan", "Request", "Wish", "plan_sharding"]

#: How users name strategies: one, or one for each class or name.
Wish = str | Strategy | Mapping[type | str, str | Strategy]


@dataclass(frozen=True)
class Request:
    """The arguments of ``fully_shard``."""

    units: Wanted | None
    strategy: Wish | None
    reshard_after_forward: bool | None
    outer_strategy: str
    precision: MixedPrecisionPolicy | None
    mp_policy: Fsdp2Policy | None
    offload_policy: OffloadPolicy | None
    experts: Selection
    average_gradients: bool = True


@dataclass(frozen=True)
class Plan:
    """What is known before anything changes: where each parameter goes, along which dim it is cut, in which dtypes."""

    state: ShardingState
    modules: list[ModulePlan]
    exempt: NoShard
    mp_policy: Fsdp2Policy

    def settings(self) -> str:
        """What was decided beside the parameters' places, in words that are the same on ranks that agree."""
        state = self.state
        units = ", ".join(f"{name or 'root'}={row}" for name, row in state.units.items())
        # Without numbers: ranks may hold different numbers of experts.
        exempt = ", ".join(dict.fromkeys(i.label.rstrip("0123456789") for i in self.exempt.parameters))
        policy = state.precision or self.mp_policy
        return (
            f"units {units}; outer_strategy={state.outer}; average_gradients={state.average_gradients}; {policy}; "
            f"not sharded: {exempt or 'none'}"
        )


def plan_sharding(model: nn.Module, meshes: Meshes, request: Request) -> Plan:
    """Check all that can be checked, and decide the rest. Changes nothing.

    Collective over the world: what one rank refuses, all do.
    """
    with raised_on_all_ranks(meshes.device_mesh, "fully_shard"):
        check_order(model)
        _check_policy(request.precision, request.mp_policy)
        _check_offload(request.offload_policy)
        rows = find_units(model, request.units, _strategy(request.strategy, request.reshard_after_forward))
        state = ShardingState(model, meshes, rows, check_outer(request.outer_strategy), request.precision)
        state.average_gradients = request.average_gradients
        exempt = _plan_units(state, request.experts)
        state.precision_plan = _plan_precision(state, exempt)
    replicas = meshes.size("dp_replicate")
    dense = Meshing(meshes.tp, meshes.weight, replicas=replicas)
    experts = Meshing(meshes.tp, meshes.expert_weight, meshes.ep, replicas)
    # A context of its own: it gathers over ep, where every rank must arrive.
    with raised_on_all_ranks(meshes.device_mesh, "fully_shard"):
        modules = plan_modules(model, dense, experts, request.experts, stays_whole=exempt.has)
    return Plan(state, modules, exempt, request.mp_policy or Fsdp2Policy())


def _plan_units(state: ShardingState, experts: Selection) -> NoShard:
    """Settle the units, and what none of them takes. Changes nothing in the model; a rank may fail alone."""
    state.units = with_expert_units(state.model, state.meshes, state.units, experts)
    _check_outer(state)
    exempt = plan_no_shard(state.model, state.units)
    state.units = exempt.without_units(state.units)
    check_ties(state.model, state.units, exempt.keys)
    check_accepted(state.model, state.units)
    return exempt


def _plan_precision(state: ShardingState, exempt: NoShard) -> PrecisionPlan | None:
    """What the precision policy means for the units that FSDP2 cuts. Changes nothing; a rank may fail alone."""
    if state.precision is None:
        return None
    all_reduces = state.outer == "no_shard" and state.meshes.size("dp_replicate") > 1
    units = [name for name in state.units if id(state.model.get_submodule(name)) not in exempt.whole]
    return plan_precision(state.model, units, state.precision, skip=exempt.keys, all_reduces=all_reduces)


def _strategy(strategy: Wish | None, reshard_after_forward: bool | None) -> Wish:
    """What is meant by ``strategy`` and FSDP2's word for it together."""
    if reshard_after_forward is None:
        return DEFAULT if strategy is None else strategy
    meant = STRATEGIES["optim_grads_params" if reshard_after_forward else "optim_grads"]
    if isinstance(reshard_after_forward, bool) and strategy in (None, meant, meant.name):
        return meant
    raise PlacementError(
        f"fully_shard: reshard_after_forward={reshard_after_forward!r} with strategy={strategy!r}",
        expected="one of the two; True means 'optim_grads_params', False 'optim_grads'",
        fix="leave reshard_after_forward out",
    )


def _check_outer(state: ShardingState) -> None:
    """Over the outer axis is cut what is cut over the inner one."""
    if state.outer == "optim" and not any(row.shards for row in state.units.values()):
        raise PlacementError(
            "fully_shard: strategy='no_shard' with outer_strategy='optim'",
            expected="a strategy that cuts the optimizer's state over dp_shard",
            got="one that cuts nothing",
            fix="strategy='optim', or leave outer_strategy out",
        )


def _check_policy(precision: MixedPrecisionPolicy | None, mp_policy: Fsdp2Policy | None) -> None:
    if precision is not None and mp_policy is not None:
        raise PrecisionError(
            "fully_shard: precision and mp_policy",
            expected="one of them",
            got="both",
            why="Each says in which dtypes to compute and to reduce",
            fix="leave mp_policy out",
        )


def _check_offload(policy: OffloadPolicy | None) -> None:
    """Shards stay on the device: optimizers of TE, amaxes and the reductions over tp work on them there."""
    if policy is not None and type(policy) is not OffloadPolicy:  # torch's base class offloads nothing
        raise PlacementError(
            f"fully_shard: offload_policy={type(policy).__name__}",
            expected="None, or OffloadPolicy(): shards, gradients and optimizer state stay on the device",
            got=policy,
            why="Quantization, TE's optimizers, gradient norms and checks over ranks read shards on the device; "
            "TE quantizes nothing on the CPU",
            fix="leave it out; strategy='optim_grads_params', a larger dp_shard, outer_strategy='optim' or bf16 "
            "moments of FusedAdam save memory on the device",
        )
