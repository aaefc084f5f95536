"""``GroupedLinear`` modules that are bound to meshes."""

# [Note: experts in one parameter] Experts have global names for callers and local names for TE. The single
# parameters are a 3-D weight (experts, out, in) and a 2-D bias (experts, out). TE stores them as a
# ``GroupedTensor``, which does not support sharding operations, and creates them again in
# ``reset_parameters``. A bound module stores the same memory as an ordinary tensor, which FSDP2, DCP and
# optimizers support. TE gets a ``GroupedTensor`` over the same memory when it reads its weights:
#
#     registered:     weight      plain (experts, out, in), or a DTensor of this shape
#     TE reads:       GroupedTensor over the unsharded local tensor, for one forward and its backward

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from te_fsdp.collectives.agreement import gather
from te_fsdp.collectives.groups import group_of_ranks
from te_fsdp.errors import MeshError, OrderError, PlacementError, PrecisionError
from te_fsdp.layout import ExpertRange, ParameterRule, expert_index, expert_ranges
from te_fsdp.modules.expert_entries import mark_entries
from te_fsdp.modules.mixin import ResettableModule
from te_fsdp.quantized.alignment import Grid, Weight, check_fit, fits
from te_fsdp.quantized.grouped_weight import as_grouped, as_plain_parameter, grouped_shard_dim
from te_fsdp.records import BINDING, ModuleBinding, binding_of, inherit, name_of
from te_fsdp.upstream import fsdp2_units, te as _te, torch_dtensor as _torch
from te_fsdp.upstream.te_formats import has_amax_history
from te_fsdp.upstream.te_modules import GroupedWeightAccess, grouped_path_problem, rename_parameters

#: Grouped modules to distribute over ep: FQNs, or classes (of the modules or of their ancestors); ``None``: all.
Selection: TypeAlias = Iterable[type | str] | None
_SWITCH = "NVTE_GROUPED_LINEAR_SINGLE_PARAM"


def find_experts(model: nn.Module, selection: Selection) -> set[str]:
    """Return the FQNs of the ``GroupedLinear`` modules that ep distributes, by default all. Local operation.

    Modules whose parameters are the user's DTensors, or are registered elsewhere, are excluded. Raise
    PlacementError for an entry without a ``GroupedLinear``.
    """
    names = dict(model.named_modules())
    grouped = [name for name, module in names.items() if _te.kind_of(module) == "GroupedLinear"]
    owners = {
        name
        for name in grouped
        if any(p is not None and not isinstance(p, DTensor) for p in names[name]._parameters.values())
    }
    if selection is None:
        return owners
    chosen: set[str] = set()
    for selector in selection:
        holders = [
            n
            for n, m in names.items()
            if (n == selector if isinstance(selector, str) else isinstance(m, selector))
        ]
        matched = [n for n in grouped if any(n == h or not h or n.startswith(f"{h}.") for h in holders)]
        if not matched:
            raise PlacementError(
                f"set_device_mesh: experts {selector if isinstance(selector, str) else selector.__name__!r}",
                expected="a GroupedLinear, or a module that contains some",
                got="no module of this name or class",
                fix="use names from model.named_modules()",
            )
        chosen.update(matched)
    # Parameters that the user has distributed already are not divided a second time.
    return chosen & owners


def experts_over(modules: Mapping[str, Any], ep_mesh: DeviceMesh, where: str) -> dict[str, ExpertRange]:
    """Return the experts of each module on this rank. Collective over the 1-D ``ep_mesh``: an object all-gather.

    Raise MeshError on all its ranks if modules differ in more than their number of experts, or if the experts
    are not distributed as ``torch.chunk`` does.
    """
    # Number of experts, and the settings that must be equal on all ranks as text.
    options = ("in_features", "out_features", "use_bias", "parallel_mode", "tp_size", "params_dtype")
    options += ("primary_weights_in_fp8", "single_grouped_weight", "single_grouped_bias")
    settings = {
        name: (module.num_gemms, ", ".join(f"{option}={getattr(module, option, None)}" for option in options))
        for name, module in modules.items()
    }
    # Every rank compares, because any rank may have the wrong model.
    by_rank = gather(settings, ep_mesh)
    for rank, of_rank in enumerate(by_rank):
        differ = [
            n
            for n in {**by_rank[0], **of_rank}
            if by_rank[0].get(n, (0, ""))[1] != of_rank.get(n, (0, ""))[1]
        ]
        if differ:
            expected = by_rank[0].get(differ[0], (0, "no such module"))[1]
            raise MeshError(
                f"{where}: expert module(s) {', '.join(differ[:5])} over ep={len(by_rank)}",
                expected=f"the same on rank {rank} of ep as on rank 0: {expected}",
                got=of_rank.get(differ[0], (0, "no such module"))[1],
                why="Experts of one layer may differ in their values only",
                fix="build the model from the same configuration on all ranks; only num_gemms may differ",
            )
    ep_rank = ep_mesh.get_local_rank()
    return {
        name: expert_ranges([of_rank[name][0] for of_rank in by_rank], name or "GroupedLinear")[ep_rank]
        for name in by_rank[0]
    }


def single_names(module: Any) -> tuple[str, ...]:
    """Return the names of the single parameters of a module, bound or not: ``weight``, ``bias``."""
    if _te.kind_of(module) != "GroupedLinear":
        return ()
    flags = {
        "weight": getattr(module, "single_grouped_weight", False),
        "bias": module.use_bias and getattr(module, "single_grouped_bias", False),
    }
    return tuple(name for name, single in flags.items() if single)


def single_parameters(module: Any) -> dict[str, Any]:
    """Return the module's direct parameters by their names after binding. Local operation without side effects."""
    params = {name: p for name, p in module._parameters.items() if p is not None}
    for single in single_names(module):
        parts = [f"{single}{index}" for index in range(module.num_gemms)]
        local = [params.pop(name) for name in parts if name in params]
        params.setdefault(single, local[0] if local else None)
    return params


def check_single(module: Any, label: str) -> None:
    """Check that TE, its switches and the device support single parameters; raise PlacementError otherwise. Local."""
    names = single_names(module)
    if not names:
        return
    problem = why = fix = ""
    one_each = "one parameter per expert"
    if not hasattr(module, "use_grouped_tensor"):
        problem, fix = "this version of TransformerEngine", f"TransformerEngine 2.19 or later, or {one_each}"
        why = "It splits the parameter outside of autograd, so the parameter gets no gradient"
    elif not module.use_grouped_tensor:
        problem, fix = "use_grouped_tensor=False", "GroupedLinear(..., use_grouped_tensor=True)"
        why = "TransformerEngine supports one parameter for all experts only with its grouped kernels"
    elif has_amax_history(type(_te.weight_quantizer(module, "weight0"))):
        problem, fix = "delayed scaling", f"use a different recipe in quantized_model_init, or {one_each}"
        why = "TransformerEngine has no grouped kernels for it and stores such weights separately"
    elif device := grouped_path_problem(None):
        problem, fix, why = "this device", one_each, device
    if problem:
        flags = ", ".join(f"single_grouped_{name}=True" for name in names)
        raise PlacementError(
            f"{label} (GroupedLinear): {flags} with {problem} is not supported", why=why, fix=fix
        )


def check_switch(options: dict[str, Any]) -> None:
    """Raise PlacementError if single parameters are requested but TE ignores them because its switch is off."""
    requested = [name for name in ("single_grouped_weight", "single_grouped_bias") if options.get(name)]
    if requested and not int(os.environ.get(_SWITCH, "0")) > 0:
        raise PlacementError(
            f"GroupedLinear: {', '.join(requested)}",
            expected=f"the environment variable {_SWITCH}=1",
            got=os.environ.get(_SWITCH, "not set"),
            why="TransformerEngine otherwise only warns and creates one parameter per expert",
            fix=f"set {_SWITCH}=1 before the model is built, or omit the option",
        )


def check_recipe(module: Any, label: str) -> None:
    """Raise PrecisionError if TE does not support a module under the recipe of the current ``te.autocast``. Local."""
    recipe = _te.active_recipe()
    if recipe is None:
        return
    if module.tp_size > 1 and recipe.float8_current_scaling():
        raise PrecisionError(
            f"{label} (GroupedLinear): recipe {type(recipe).__name__} with tp_size={module.tp_size}",
            expected="a recipe without one scale per activation, or tp_size=1",
            why="TransformerEngine rejects it, because activations split outside of the module have no common scale",
            fix="use DelayedScaling, Float8BlockScaling or MXFP8BlockScaling, or build it with tp_size=1",
        )
    problem = grouped_path_problem(recipe) if single_names(module) else ""
    if problem:
        raise PrecisionError(
            f"{label} (GroupedLinear): one parameter for all experts under {type(recipe).__name__}",
            expected="a recipe for which TransformerEngine has grouped kernels on this device",
            why=problem,
            fix="use a different recipe, or one parameter per expert (single_grouped_weight=False)",
        )


def adopt_single(module: Any, adopted: dict[int, tuple[Any, Any]]) -> None:
    """Replace a module's ``GroupedTensor`` parameters by ordinary ones over the same memory. Local operation.

    ``adopted`` maps the id of each parameter to it and its replacement, so that modules keep sharing
    parameters.
    """
    # On the meta device TE has separate parameters until ``reset_parameters``. They are replaced by one
    # parameter.
    for name in single_names(module):
        parameter = module._parameters.get(name)
        parts = [f"{name}{index}" for index in range(module.num_gemms)]
        first = module._parameters[parts[0]] if parameter is None else parameter
        _, new = adopted.get(id(first), (None, None))
        if new is None and parameter is not None:
            new = as_plain_parameter(parameter)
        elif new is None:
            local = torch.empty((module.num_gemms, *first.shape), dtype=first.dtype, device="meta")
            new = torch.nn.Parameter(local, requires_grad=first.requires_grad)
            inherit(first, new)
        # The old one is kept until all modules are bound: a new tensor could get its id.
        adopted[id(first)] = first, new
        for part in parts:
            module._parameters[part] = None
        module._parameters[name] = new
        rename_parameters(module, {parts[0]: name})


def plan_single_shard_dims(
    module: Any, grid: Grid, experts: ExpertRange | None = None, label: str = ""
) -> dict[str, int]:
    """Return the dim in which FSDP2 must shard each single parameter.

    Local operation on sizes, identical on all ranks. Quantized weights are sharded between experts, or within
    all experts at block boundaries. ``experts`` are those of the module under ``ep``. Raise PlacementError for
    an expert whose size is not a multiple of the block size.
    """
    names = single_names(module)
    counts = experts.counts() if experts is not None else (module.num_gemms,) if names else ()
    dims = {}
    for name in names:
        shape = (module.out_features, module.in_features) if name == "weight" else (module.out_features,)
        quantizer = weight = None
        if name == "weight":
            quantizer = _te.weight_quantizer(module, "weight") or _te.weight_quantizer(module, "weight0")
        if quantizer is not None:
            rule = ParameterRule({"column": 0, "row": 1}.get(module.parallel_mode), quantizable=True)
            weight = Weight.from_quantizer(quantizer, f"{label}.{name}", shape, rule, grid.tp)
            # tp alone must leave full blocks, whatever data parallelism shards afterwards.
            check_fit(weight, replace(grid, dp_shard=1))

        def fits_within(dim: int, weight: Weight | None = weight) -> bool:
            return weight is None or fits(weight, grid.dp_shard, dim - 1)

        dims[name] = grouped_shard_dim((module.num_gemms, *shape), grid.dp_shard, counts, fits_within)
    return dims


class GroupedModule(GroupedWeightAccess, ResettableModule):
    """Mixin of ``GroupedLinear``: global names of experts, and TE's view of single parameters.

    Under expert parallelism parameters are registered under global indices (:mod:`te_fsdp.layout`). TE's own
    code reads ``weight0`` and gets the rank's first expert.
    """

    def is_adopted(self) -> bool:
        """Return whether the module is bound."""
        return binding_of(self) is not None

    def tensors_for_te(self, name: str, tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        """Return single parameters as ``GroupedTensor`` over the same memory, others unchanged."""
        if not self.is_adopted() or name not in single_names(self):
            return list(tensors)
        return [as_grouped(_torch.local_of(tensor)) for tensor in tensors]

    def __getattr__(self, name: str) -> Any:
        """Resolve TE's local name of a parameter."""
        binding = self.__dict__.get(BINDING)
        if binding is None or binding.experts is None:
            return super().__getattr__(name)
        registered = binding.experts.registered_name(name)
        parameter = self.__dict__["_parameters"].get(registered)
        return super().__getattr__(registered) if parameter is None else parameter

    def __setattr__(self, name: str, value: Any) -> None:
        """Resolve TE's local name in an assignment."""
        experts = _experts_of(self) if value is None or isinstance(value, torch.nn.Parameter) else None
        if experts is not None:
            parameters, registered = self.__dict__["_parameters"], experts.registered_name(name)
            name = registered if name not in parameters and registered in parameters else name
        super().__setattr__(name, value)

    def _on_replace(self, binding: ModuleBinding, name: str, old: torch.Tensor | None, value: Any) -> None:
        """Check the mesh of an expert's parameter as well, once per tensor."""
        if binding.experts is not None and expert_index(name) is not None and isinstance(value, DTensor):
            assert binding.ep.mesh is not None
            meshes = value.device_mesh.mesh, binding.ep.mesh.mesh
            shared = set.intersection(*(set(mesh.flatten().tolist()) for mesh in meshes))
            if len(shared) > 1:  # FSDP2 got the dense mesh, or none
                raise PlacementError(
                    f"{binding.label(name)}: fully_shard of an expert over ranks {sorted(shared)}",
                    expected="ranks with the same experts",
                    got="ranks along ep, which have different experts",
                    why="FSDP2 would all-gather shards of different experts as one weight",
                    fix="use te_fsdp.fully_shard, or call torch's fully_shard on each expert module first, with mesh="
                    "meshes.expert_fsdp_with_size_one",
                )
        super()._on_replace(binding, name, old, value)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run TE's forward after checking that it has grouped kernels for the recipe."""
        binding = binding_of(self)
        if binding is not None:
            if binding.experts is not None:
                if binding.fsdp.is_managed and not binding.ep.divided and torch.is_grad_enabled():
                    # By default FSDP2 would divide by the number of ranks that share the expert. The loss of each rank
                    # is a mean over its own tokens, but the gradient of an expert sums over those of all ``ep`` ranks.
                    managed, factor = fsdp2_units.divide_factor(self)
                    if managed and factor is None:
                        assert binding.ep.mesh is not None
                        raise OrderError(
                            f"{binding.name or 'model'}: gradients of experts under torch's fully_shard",
                            expected="a gradient divide factor of the expert module's FSDP2 unit",
                            got="none",
                            why="FSDP2 would divide by the ranks that share an expert, not by all data-parallel ranks "
                            f"whose tokens it sees: {binding.ep.mesh.size()} times too little",
                            fix="call module.set_gradient_divide_factor(number of data-parallel ranks, ep included), "
                            "or use te_fsdp.fully_shard",
                        )
                    binding.ep.divided = True
                recipe, mesh = _te.active_recipe(), binding.weight_mesh
                has_history = recipe is not None and (recipe.delayed() or recipe.custom())
                if has_history and binding.amax.group is None:
                    # Delayed scaling reduces the amax of experts over the ranks with the same experts. Without a
                    # mesh this rank alone has them. For TE a group of None means all ranks.
                    alone = group_of_ranks([dist.get_rank()], "amax of experts") if mesh is None else None
                    binding.amax.group = alone if mesh is None else mesh.get_group()
            check_recipe(self, name_of(self))
        return super().forward(*args, **kwargs)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        """Mark the entries of experts, so that plain DCP loads either form of them."""
        super()._save_to_state_dict(destination, prefix, keep_vars)
        mark_entries(self, destination, prefix)

    def _load_from_state_dict(self, state_dict: Any, prefix: Any, *args: Any) -> None:  # type: ignore[bad-override]
        """Load this rank's experts from a state dict with all of them, separate or as one tensor."""
        experts = _experts_of(self)
        if experts is not None:
            self._remap_grouped_weight_state_dict_keys(state_dict, prefix)  # type: ignore[not-callable]
            self._remap_grouped_bias_state_dict_keys(state_dict, prefix)  # type: ignore[not-callable]
            for key in [
                k for k in state_dict if k.startswith(prefix) and experts.is_elsewhere(k[len(prefix) :])
            ]:
                # Unexpected keys are an error in strict mode, but the experts of other ranks are expected.
                del state_dict[key]
        super()._load_from_state_dict(state_dict, prefix, *args)


def _experts_of(module: GroupedModule) -> ExpertRange | None:
    binding = binding_of(module)
    return None if binding is None else binding.experts
