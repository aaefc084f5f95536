"""What a bound ``GroupedLinear`` adds: experts under global names for everyone, under TE's names for TE."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from te_fsdp import _te, _te_delayed, _torch
from te_fsdp.binding import Binding, binding_of
from te_fsdp.errors import OrderError, PlacementError
from te_fsdp.layout.experts import ExpertRange, expert_index
from te_fsdp.modules.single import SingleModule

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["GroupedModule"]


class GroupedModule(SingleModule):
    """Mixin of ``GroupedLinear``. Without expert parallelism it changes nothing.

    With it, parameters are registered under global indices (:mod:`te_fsdp.layout.experts`). TE's own code asks for
    ``weight0``, and gets the rank's first expert.
    """

    def __getattr__(self, name: str) -> Any:
        """An attribute that no other way finds: a parameter by TE's local name."""
        experts = _experts_of(self)
        return super().__getattr__(name if experts is None else experts.registered_name(name))

    def __setattr__(self, name: str, value: Any) -> None:
        """The same for assignments of parameters."""
        experts = _experts_of(self)
        if experts is not None and (isinstance(value, torch.nn.Parameter) or value is None):
            parameters, registered = self.__dict__["_parameters"], experts.registered_name(name)
            name = registered if name not in parameters and registered in parameters else name
            if expert_index(name) is not None and isinstance(value, DTensor):
                _check_apart(self, name, value)
        super().__setattr__(name, value)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """TE's forward; delayed scaling reduces the amax of experts over the ranks that hold the same ones."""
        binding = binding_of(self)
        if binding is None or binding.experts is None:
            return super().forward(*args, **kwargs)
        if binding.under_fsdp and not binding.divided and torch.is_grad_enabled():
            _check_divided(self, binding)
        with _amax_group(binding):
            return super().forward(*args, **kwargs)

    def _load_from_state_dict(self, state_dict: Any, prefix: Any, *args: Any) -> None:  # type: ignore[bad-override]
        """Take this rank's experts out of a state dict that may hold all of them, one by one or as one tensor."""
        experts = _experts_of(self)
        if experts is not None:
            self._remap_grouped_weight_state_dict_keys(state_dict, prefix)  # type: ignore[not-callable]
            self._remap_grouped_bias_state_dict_keys(state_dict, prefix)  # type: ignore[not-callable]
            for key in [
                k for k in state_dict if k.startswith(prefix) and experts.is_elsewhere(k[len(prefix) :])
            ]:
                del state_dict[key]
        super()._load_from_state_dict(state_dict, prefix, *args)


def _experts_of(module: GroupedModule) -> ExpertRange | None:
    binding = binding_of(module)
    return None if binding is None else binding.experts


def _check_apart(module: GroupedModule, name: str, parameter: DTensor) -> None:
    """FSDP2 must not cut an expert over ranks that hold other experts. Every rank sees the same.

    Raises:
        PlacementError: It does; torch's ``fully_shard`` was given the mesh of dense parameters, or none.
    """
    binding = binding_of(module)
    assert binding is not None and binding.ep_mesh is not None
    both = set(parameter.device_mesh.mesh.flatten().tolist()) & set(binding.ep_mesh.mesh.flatten().tolist())
    if len(both) > 1:
        raise PlacementError(
            f"{binding.label(name)}: fully_shard of an expert over ranks {sorted(both)}",
            expected="ranks that hold the same experts",
            got="ranks along ep, which hold others",
            why="Shards of different experts would be gathered as one weight",
            fix="use te_fsdp.fully_shard, or call torch's on each expert module first, with mesh="
            "meshes.expert_fsdp_with_size_one",
        )


def _amax_group(binding: Binding) -> contextlib.AbstractContextManager[object]:
    """Within the context TE's delayed scaling reduces over the ranks that share the module's experts."""
    recipe = _te.active_recipe()
    if recipe is None or not (recipe.delayed() or recipe.custom()):
        return contextlib.nullcontext()
    if binding.amax_group is None and binding.weight_mesh is not None:
        binding.amax_group = binding.weight_mesh.get_group()
    elif binding.amax_group is None:  # this rank alone holds them; for TE None means all ranks
        alone = dist.new_group([dist.get_rank()], use_local_synchronization=True)
        binding.amax_group = cast("ProcessGroup", alone)
    return _te_delayed.amax_reduced_over(binding.amax_group)


def _check_divided(module: torch.nn.Module, binding: Binding) -> None:
    """FSDP2 must have been told by what to divide: it would divide by the ranks that share the expert.

    The loss of each rank is a mean over its own tokens, and the gradient of an expert sums over tokens of all ranks of
    ``ep``.
    """
    managed, factor = _torch.divide_factor(module)
    if managed and factor is None:
        assert binding.ep_mesh is not None
        raise OrderError(
            f"{binding.name or 'model'}: gradients of experts under torch's fully_shard",
            expected="a gradient divide factor of the expert module's own FSDP2 unit",
            got="none",
            why="FSDP2 would divide by the ranks that share an expert, not by all data-parallel ranks whose tokens "
            f"it sees: {binding.ep_mesh.size()} times too little",
            fix="call module.set_gradient_divide_factor(number of data-parallel ranks, ep included), or use "
            "te_fsdp.fully_shard",
        )
    binding.divided = True
