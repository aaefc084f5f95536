"""``load_state_dict(assign=True)`` of a bound model: what is loaded is copied into the parameters that are there.

Assigned tensors would take the parameters' places: FSDP2, optimizers and te_fsdp's own notes hold the old ones.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch.distributed.tensor import DTensor

from te_fsdp.errors import PlacementError

if TYPE_CHECKING:
    import torch
    from torch import nn

__all__ = ["watch_assignments"]

_WATCHED = "_te_fsdp_assignments"
_ASSIGN = "assign_to_params_buffers"


def watch_assignments(model: nn.Module) -> None:
    """Look at what is assigned to a model and to parts of it from now on. Local operation."""
    for module in model.modules():
        if _WATCHED not in module.__dict__:
            module.__dict__[_WATCHED] = True
            module.register_load_state_dict_pre_hook(_before_load)


def _before_load(
    module: nn.Module, state_dict: Any, prefix: str, metadata: dict[str, Any], *unused: Any
) -> None:
    """Runs for the module that is loaded first: all that is below it is checked before anything changes."""
    if not metadata.get(_ASSIGN):
        return
    for name, parameter in module.named_parameters(remove_duplicate=False):
        value = state_dict.get(prefix + name)
        if isinstance(parameter, DTensor) and value is not None:
            _check(prefix + name, parameter, value)
    own = [p for p in module._parameters.values() if isinstance(p, DTensor)]
    if own and not any(parameter.is_meta for parameter in own):
        metadata[_ASSIGN] = False


def _check(label: str, parameter: DTensor, value: torch.Tensor) -> None:
    """The value must be cut as the parameter is."""
    wanted = f"a DTensor with placements {tuple(parameter.placements)}"
    if not isinstance(value, DTensor):
        got = f"a plain tensor of shape {tuple(value.shape)}"
    elif value.placements != parameter.placements or value.device_mesh != parameter.device_mesh:
        got = f"one with {tuple(value.placements)} on {value.device_mesh}"
    else:
        return
    raise PlacementError(
        f"{label}: load_state_dict(assign=True) of a sharded parameter",
        expected=wanted,
        got=got,
        why="It would take the place of this rank's part",
        fix="te_fsdp.checkpoint.load, or torch.distributed.checkpoint.state_dict.set_model_state_dict(model, "
        "state_dict, options=StateDictOptions(full_state_dict=True)) for whole tensors; or load before "
        "te_fsdp.set_device_mesh and te_fsdp.fully_shard",
    )
