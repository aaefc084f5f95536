"""Expert parallelism of ``GroupedLinear``: which experts a rank holds, agreed on by all, and their global names."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, TypeAlias

from te_fsdp import _te
from te_fsdp.agree import gather, raised_on_all_ranks
from te_fsdp.binding import NO_SHARD
from te_fsdp.errors import MeshError, PlacementError
from te_fsdp.layout.experts import ExpertRange, expert_ranges
from te_fsdp.modules.plan import ModulePlan, quantizable
from te_fsdp.modules.single import single_cuts
from te_fsdp.quantized.shards import plan_cuts

if TYPE_CHECKING:
    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh

    from te_fsdp.quantized.alignment import Grid

__all__ = ["Selection", "deal_out", "find_experts", "register_globally", "with_cuts"]

#: Which grouped modules are dealt out: names in the tree, classes; ``None``: all of them.
Selection: TypeAlias = Iterable[type | str] | None


def find_experts(model: nn.Module, selection: Selection) -> set[str]:
    """Names of the ``GroupedLinear`` modules that expert parallelism deals out. Local operation.

    Args:
        model: The root.
        selection: Names and classes of grouped modules, or of modules that hold some; ``None``: all in the tree.

    Raises:
        PlacementError: An entry without a ``GroupedLinear``.
    """
    names = dict(model.named_modules())
    grouped = [name for name, module in names.items() if _te.kind_of(module) == "GroupedLinear"]
    if selection is None:
        return set(grouped)
    chosen: set[str] = set()
    for want in selection:
        holders = [
            n for n, m in names.items() if (n == want if isinstance(want, str) else isinstance(m, want))
        ]
        found = [n for n in grouped if any(n == h or not h or n.startswith(f"{h}.") for h in holders)]
        if not found:
            raise PlacementError(
                f"set_device_mesh: experts {want if isinstance(want, str) else want.__name__!r}",
                expected="a GroupedLinear, or a module that holds some",
                got="none of that name or class",
                fix="name modules as model.named_modules() does",
            )
        chosen.update(found)
    return chosen


def deal_out(plan: Callable[[], list[ModulePlan]], ep_mesh: DeviceMesh, where: str) -> list[ModulePlan]:
    """Plan, and find out over ``ep_mesh`` which experts each module holds. Changes nothing.

    Collective over ``ep_mesh`` (two small object gathers), also where this rank's own plan fails.

    Args:
        plan: The plan of one rank: modules on an expert-parallel mesh are experts.
        ep_mesh: 1-D.
        where: Name of the operation, for messages.

    Raises:
        TeFsdpError: On all ranks of ``ep_mesh``: what any of them raises, expert modules that differ in more than the
            number of experts, and experts that are not dealt out as ``torch.chunk`` cuts.
    """
    with raised_on_all_ranks(ep_mesh, where):
        planned = plan()
        told = {item.name: _described(item.module) for item in planned if item.meshes.ep_mesh is not None}
    held = _ranges(gather(told, ep_mesh), where)
    here = ep_mesh.get_local_rank()
    return [
        dataclasses.replace(item, experts=held[item.name][here]) if item.name in told else item
        for item in planned
    ]


def _described(module: Any) -> tuple[int, str]:
    """Number of experts, and all else in which the ranks must agree, as text."""
    names = ("in_features", "out_features", "use_bias", "parallel_mode", "tp_size", "params_dtype")
    names += ("primary_weights_in_fp8", "single_grouped_weight", "single_grouped_bias")
    return module.num_gemms, ", ".join(f"{name}={getattr(module, name, None)}" for name in names)


def _ranges(told: list[dict[str, tuple[int, str]]], where: str) -> dict[str, list[ExpertRange]]:
    """Ranges of all ranks by module, from what the ranks tell of theirs; every rank finds the same."""
    for rank, modules in enumerate(told):
        differ = [
            n for n in {**told[0], **modules} if told[0].get(n, (0, ""))[1] != modules.get(n, (0, ""))[1]
        ]
        if differ:
            expected = told[0].get(differ[0], (0, "no such module"))[1]
            raise MeshError(
                f"{where}: expert module(s) {', '.join(differ[:5])} over ep={len(told)}",
                expected=f"on rank {rank} of ep as on the first: {expected}",
                got=modules.get(differ[0], (0, "no such module"))[1],
                why="Experts of one layer may lie on any rank, and differ in their values alone",
                fix="build the model from the same configuration on all ranks; num_gemms alone may differ",
            )
    return {
        name: expert_ranges([modules[name][0] for modules in told], name or "GroupedLinear")
        for name in told[0]
    }


def with_cuts(
    planned: list[ModulePlan], dense: Grid, stays_whole: Callable[[Any, str], bool]
) -> list[ModulePlan]:
    """The plans, with the dims that FSDP2 shall cut of weights that are or will be quantized. Local operation.

    Args:
        planned: Of all modules, their experts known.
        dense: Sizes of the axes that dense weights lie on.
        stays_whole: Whether data parallelism leaves a module's own parameter whole.

    Raises:
        PlacementError: No cut of a quantized weight fits.
    """
    # At once: a mesh that an error proposes fits all of them.
    of_dense = plan_cuts(quantizable(item for item in planned if item.experts is None), dense, stays_whole)
    found = []
    for item in planned:
        cuts = of_dense.get(id(item.module), {})
        grid = item.meshes.grid
        if item.experts is not None:
            own = plan_cuts(quantizable([item]), grid, stays_whole).get(id(item.module), {})
            cuts = {item.registered(name): dim for name, dim in own.items()}
        singles = single_cuts(item.module, grid, item.experts, item.name)
        found.append(dataclasses.replace(item, cuts={**cuts, **singles}))
    return found


def register_globally(module: nn.Module, experts: ExpertRange) -> None:
    """Register a module's parameters under global expert indices, in the order that they have. Local operation."""
    own = dict(module._parameters)
    module._parameters.clear()
    module._parameters.update({experts.registered_name(name): value for name, value in own.items()})
    exempt = module.__dict__.get(NO_SHARD)
    if isinstance(exempt, frozenset):
        module.__dict__[NO_SHARD] = frozenset(map(experts.registered_name, exempt))
    _te.rename_parameters(module, {name: experts.registered_name(name) for name in own})
