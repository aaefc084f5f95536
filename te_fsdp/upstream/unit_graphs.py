"""Private names of torch for graphs of single units, checked with torch 2.11 to 2.15."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as _modules

from te_fsdp.upstream.fsdp2_units import fsdp_parameter_groups, managed_fsdp_params, reductions_of

_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


def without_ownership(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor over the same memory that does not keep it allocated; on the CPU the tensor itself.

    The memory must belong to the pool of a CUDA graph that is alive.
    """
    if tensor.device.type != "cuda" or not tensor.numel():
        return tensor.detach()
    reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    # Only the elements that the strides reach, because a view may end before its storage does.
    shape, data = ((reach + 1) * tensor.element_size(),), (tensor.data_ptr(), False)
    interface = {"shape": shape, "typestr": "|u1", "data": data, "version": 3}
    memory = torch.as_tensor(SimpleNamespace(__cuda_array_interface__=interface), device=tensor.device)
    return memory.view(tensor.dtype).as_strided(tensor.shape, tensor.stride())


def reduces_gradients(unit: nn.Module) -> bool:
    """Return whether FSDP2 reduces a unit's gradients at the end of the next backward into other memory."""
    # The only rank of a shard group keeps the gradients themselves.
    groups = fsdp_parameter_groups(unit)
    return all(group.reduce_grads and group.mesh_info.shard_mesh_size > 1 for group in groups)


def goes_on_to_inputs(node: Any, inputs: int) -> bool:
    """Return whether the running backward goes on from a node to its first ``inputs`` tensors.

    Next is then FSDP2's post-backward, through which the inputs of a unit go.
    """
    edges = [edge for edge, _ in node.next_functions[:inputs]]
    return any(
        edge is not None and not hasattr(edge, "variable") and torch._C._will_engine_execute_node(edge)
        for edge in edges
    )


def has_gathered(unit: nn.Module) -> bool:
    """Return whether FSDP2 has all-gathered a unit before, and so chosen the memory for it."""
    return any(managed.all_gather_outputs for managed in managed_fsdp_params(unit))


def wait_for_reductions(unit: nn.Module) -> None:
    """Let the current stream wait until no reduction of the model reads gradients any more. Local operation."""
    for group in fsdp_parameter_groups(unit):
        for reduction in reductions_of(group.comm_ctx):
            group.device_handle.current_stream().wait_event(reduction.event)


def input_buffers(unit: nn.Module) -> int:
    """Return the number of units whose gradients FSDP2 keeps for reductions at the same time; 1 before torch 2.14."""
    most = [getattr(g, "reduce_scatter_max_input_buffers", 1) for g in fsdp_parameter_groups(unit)]
    return max(most, default=1)


def keep_casts(unit: nn.Module) -> None:
    """Keep the memory of weights that a single rank casts in each pass allocated. Local operation.

    The rank all-gathers nothing, and FSDP2 would free the cast weight after each pass.
    """
    for group in fsdp_parameter_groups(unit):
        if group.mesh_info.shard_mesh_size == 1:
            for managed in group.fsdp_params:
                managed.__dict__.setdefault("free_unsharded_param", _keep_cast)


def kept_casts(unit: nn.Module) -> list[torch.Tensor]:
    """Return the memory of weights that :func:`keep_casts` keeps allocated."""
    records = managed_fsdp_params(unit)
    kept = [record for record in records if vars(record).get("free_unsharded_param") is _keep_cast]
    return [tensor for record in kept for tensor in record.all_gather_outputs]


#: Replaces ``FSDPParam.free_unsharded_param``. Does nothing, and is not the function of shards that are not cast.
_keep_cast: Callable[[], Any] = list


def hooked_module(unit: nn.Module) -> str:
    """Return the name of a module inside of a unit with hooks, ``"every module"`` for global ones; empty if none."""
    if any(getattr(_modules, f"_global{kind}", None) for kind in (*_HOOKS, "_forward_hooks_always_called")):
        return "every module"
    for name, module in unit.named_modules():
        if module is not unit and any(module.__dict__.get(kind) for kind in _HOOKS):
            return name
    return ""


def replaces_saved_tensors() -> bool:
    """Return whether hooks replace the tensors that autograd saves, as for offloading and recomputation."""
    top: Any = torch._C._autograd._top_saved_tensors_default_hooks
    return top(False) is not None
