"""Gradients of parameters that a rank did not use in a backward, under FSDP2; torch 2.11 to 2.15.

FSDP2 reduces the gradients that exist. Ranks whose gradients differ would run different collectives. So a parameter
without a gradient takes part with zeros.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor import DTensor

from te_fsdp._fsdp2_patches import LISTENERS, listen
from te_fsdp._torch import dtensor, find_managed, local_of, spec_of, with_dtype

if TYPE_CHECKING:
    from torch import nn


def fill_unused(group: Any) -> None:
    """Give a parameter group's trained parameters zero gradients before it reduces, where they have none.

    In place of FSDP2's ``set_reduce_scatter_unused_params``, which torch 2.11 does not have.
    """
    if _fill not in group.__dict__.get(LISTENERS, ((), ()))[0]:
        listen(group, before=_fill)


def _fill(group: Any) -> None:
    for managed in group.fsdp_params:
        parameter = getattr(managed, "_unsharded_param", None)  # before the first gather there is none
        if parameter is None or not parameter.requires_grad:
            continue
        if parameter.grad is None and managed.unsharded_accumulated_grad is None:
            parameter.grad = zero_gradient(managed)


def zero_gradient(managed: Any, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Return zeros as the unsharded gradient of a record's parameter. Local operation.

    Do not use ``torch.zeros_like``: it dequantizes a quantized weight. The weight may be resharded at this point, so
    that its storage has no bytes.
    """
    parameter = managed._unsharded_param
    local = local_of(parameter)
    dtype = dtype or getattr(parameter, "grad_dtype", None) or parameter.dtype
    zeros = torch.zeros(local.shape, dtype=dtype, device=local.device)
    return dtensor(zeros, with_dtype(spec_of(parameter), dtype)) if isinstance(parameter, DTensor) else zeros


def keep_zeros_unquantized(module: nn.Module, shard: torch.Tensor) -> None:
    """Let FSDP2's ``set_reduce_scatter_unused_params`` make zeros for a module's quantized weight without reading it.

    ``FSDPParam.unsharded_zero_grad_data`` calls ``torch.zeros_like`` (torch 2.13 and later). ``shard`` is the local
    tensor. Local operation.
    """
    for name, parameter in module._parameters.items():
        if parameter is None or local_of(parameter) is not shard:
            continue
        managed = find_managed(module, name)
        kind = type(managed)
        if isinstance(getattr(kind, _ZERO_GRADIENT, None), property) and not issubclass(kind, _Zeros):
            managed.__class__ = _with_zeros(kind)


#: Name of FSDP2's property that makes the zeros of an unused parameter.
_ZERO_GRADIENT = "unsharded_zero_grad_data"


class _Zeros:
    """Marker of a record's class whose zeros are those of :func:`zero_gradient`."""


@functools.cache
def _with_zeros(kind: type) -> type:
    """Return a subclass of a record's class with that property replaced."""
    zeros = property(lambda managed: managed._get_grad_inner_tensor(zero_gradient(managed)))
    return type(kind.__name__, (_Zeros, kind), {_ZERO_GRADIENT: zeros})


def one_gradient_dtype(group: Any) -> None:
    """Let a parameter group reduce gradients of which only some have added up over several backwards.

    FSDP2 adds up in the dtype of the reduction, but leaves gradients of a first backward in the gathered parameters'
    dtype, and makes zeros for unused parameters in that: where the two differ, it cannot reduce them together (torch
    2.15 keeps all in one dtype by itself).
    """
    listen(group, before=_in_one_dtype)


def _in_one_dtype(group: Any) -> None:
    records = [m for m in group.fsdp_params if "unsharded_accumulated_grad" in vars(m)]
    added = [m.unsharded_accumulated_grad for m in records if m.unsharded_accumulated_grad is not None]
    for managed in records if added else ():
        parameter = managed._unsharded_param
        if managed.unsharded_accumulated_grad is not None or not parameter.requires_grad:
            continue
        if parameter.grad is not None:
            managed.unsharded_accumulated_grad = parameter.grad.to(added[0].dtype)
            parameter.grad = None
        else:
            managed.unsharded_accumulated_grad = zero_gradient(managed, added[0].dtype)
