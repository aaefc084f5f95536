"""``fully_shard``: shard a model on FSDP2.

The call plans, checks, shards parameters, then runs the table :data:`te_fsdp.components.SETUP`.
"""

from __future__ import annotations

from typing import TypeVar

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy as Fsdp2Policy, OffloadPolicy

from te_fsdp.apply_fully_shard import Setup, attach_plan, check_plan, replace_parameters, require_meshes
from te_fsdp.check_points import requested_checks
from te_fsdp.collectives.rendezvous import collective_call
from te_fsdp.components import SETUP
from te_fsdp.errors import require_flags
from te_fsdp.features.wgrad_fusion import refuse_fused, wgrad_fusion_disabled
from te_fsdp.mesh import Meshes
from te_fsdp.modules.grouped import Selection
from te_fsdp.plan import ShardRequest, StrategySpec, UnitSpec, plan_sharding
from te_fsdp.precision import MixedPrecisionPolicy

ModelT = TypeVar("ModelT", bound="nn.Module")


def fully_shard(
    model: ModelT,
    meshes: Meshes | DeviceMesh,
    *,
    units: UnitSpec | None = None,
    strategy: StrategySpec | None = None,
    outer_strategy: str = "no_shard",
    precision: MixedPrecisionPolicy | None = None,
    mp_policy: Fsdp2Policy | None = None,
    offload_policy: OffloadPolicy | None = None,
    reshard_after_forward: bool | None = None,
    experts: Selection = None,
    average_gradients: bool = True,
    checks: str | None = None,
    check_inputs: bool | None = None,
    transport: str = "auto",
    zero_copy_gradients: bool | str = "auto",
) -> ModelT:
    """Shard a TE model over its meshes on FSDP2, before the optimizer is built. Collective over all ranks.

    Args:
        model: A tree of TE modules and others, with parameters on meta or on the device. Changed in place and returned.
        meshes: The job's meshes, or a torch mesh that :meth:`Meshes.from_device_mesh` accepts.
        units: Modules to all-gather as one: classes or names (``"layers.*"``: children); or ``te.TransformerLayer``.
        strategy: State sharded over ``dp_shard``: "no_shard", "optim", "optim_grads" or "optim_grads_params" (the
            default); or a mapping from classes or names to strategies. These modules become units; ``""`` is the root.
        outer_strategy: State also sharded over ``dp_replicate``: none ("no_shard") or the optimizer's ("optim").
        precision: Dtypes of main weights, of gradients and of their reduction. ``None``: the dtype of the parameters.
        mp_policy: FSDP2's own mixed precision policy instead of ``precision``.
        offload_policy: FSDP2's offload policy. One that offloads raises PlacementError.
        reshard_after_forward: FSDP2's name for strategies: True ``"optim_grads_params"``, False ``"optim_grads"``.
        experts: ``GroupedLinear`` modules to distribute over ``ep``, by name or class (also of a parent); default: all.
        average_gradients: Average gradients over the data-parallel ranks, for losses that are means; otherwise sum.
        checks: Level of checks: ``"off"``, ``"setup"``, ``"first_steps"`` (the default) or ``"full"`` (docs/checks.md).
        check_inputs: Deprecated, use ``checks``. False leaves out comparisons of inputs and gradients.
        transport: Transport of weight all-gathers: "auto", "nccl", "copy_engine". The log explains a fallback.
        zero_copy_gradients: Reduce large gradients without a copy, if possible; "auto": with "copy_engine".

    Raises:
        MeshError, PlacementError, OrderError: Contradicting arguments; or a model or unit that cannot be sharded.
        PrecisionError: Both ``precision`` and ``mp_policy``, or a policy that the model contradicts.
        InitError, CollectiveError: Values that must be equal on several ranks differ; some ranks did not make the call.
    """
    options = units, strategy, reshard_after_forward, outer_strategy, precision, mp_policy, offload_policy
    require_flags("fully_shard", average_gradients=average_gradients)
    points = requested_checks(checks, check_inputs)
    meshes, call = require_meshes(model, meshes), points.call("fully_shard")
    with collective_call(call, meshes.device_mesh), wgrad_fusion_disabled(model) as fused:
        request = ShardRequest(*options, experts, average_gradients, transport, zero_copy_gradients)
        plan = plan_sharding(model, meshes, request)
        refuse_fused(fused, plan)
        # Before the first parameter is replaced: a model that is sharded in part could not be used again.
        check_plan(plan, points)
        setup = Setup(plan, replace_parameters(plan, attach_plan(plan, points)), fused)
        # Components need the parameters and units as FSDP2 has left them.
        setup.run(SETUP)
    return model
