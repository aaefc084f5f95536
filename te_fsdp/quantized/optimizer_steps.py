"""What must hold around every optimizer step of a model with quantized weights.

Before: the optimizer keeps fp32 main weights. torch's optimizers would otherwise update quantized weights by
dequantizing and requantizing them operation by operation, which loses most small updates in silence; TE's
FusedAdam without main weights raises, or leaves delayed-scaling weights as they are (TE 2.20.2).

After: delayed-scaling weights have the amax of the whole weight in their histories, where FusedAdam put that of
a shard; and no cached transpose, which FusedAdam does not update (Hopper layout).

Both look only at weights that te_fsdp has bound.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch

from te_fsdp import _te, _torch
from te_fsdp.errors import PrecisionError
from te_fsdp.quantized.amax_mark import reduce_newest_amax, take_delayed_scale

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from te_fsdp.parameters import Facts
    from te_fsdp.step_hooks import Step

__all__ = [
    "KEEPS_MAIN_WEIGHTS",
    "quantized_among",
    "refresh_quantized",
    "refuse",
    "require_main_weights",
    "take_out_main_weights",
]

#: Attribute of an optimizer to which te_fsdp has given main weights.
KEEPS_MAIN_WEIGHTS = "_te_fsdp_main_weights"


def quantized_among(
    held: Iterable[tuple[torch.Tensor, Facts]],
) -> list[tuple[str, torch.Tensor, torch.Tensor]]:
    """Label, parameter and local tensor of every quantized weight of a bound module. Local operation.

    Args:
        held: From :func:`te_fsdp.step_hooks.held_by`.
    """
    found = [(facts.label, parameter) for parameter, facts in held if facts.label is not None]
    together = zip(found, _torch.locals_of([parameter for _, parameter in found]), strict=True)
    return [(label, parameter, local) for (label, parameter), local in together if _te.is_quantized(local)]


def refuse(optimizer: Optimizer, label: str) -> None:
    """Raise if an optimizer would update a quantized weight otherwise than through fp32 main weights.

    Local operation; all ranks have the same optimizer and raise the same.

    Args:
        optimizer: Any optimizer.
        label: Name of the weight.

    Raises:
        PrecisionError: Names the weight, and the option or the call that helps.
    """
    if hasattr(optimizer, KEEPS_MAIN_WEIGHTS):
        return
    if not _te.is_fused_adam(optimizer):
        got, fix = "none", "call te_fsdp.main_weights(model, optimizer) once, before the first step"
    else:
        fused: Any = optimizer
        if (
            fused.master_weights
            and fused.master_weight_dtype == torch.float32
            and not fused.store_param_remainders
        ):
            return
        got = f"master_weights={fused.master_weights}, master_weight_dtype={fused.master_weight_dtype}, "
        got += f"store_param_remainders={fused.store_param_remainders}"
        fix = "FusedAdam(..., master_weights=True), master_weight_dtype and store_param_remainders at their defaults"
    raise PrecisionError(
        f"{label}: {type(optimizer).__name__} on a quantized weight",
        expected="fp32 main weights, of which the quantized weight is one quantization",
        got=got,
        why="Updates smaller than the format's step would be rounded away",
        fix=fix,
    )


def take_out_main_weights(step: Step) -> None:
    """Give the parameters their places in the groups back, if a step that raised has left main weights there."""
    main_parameters = getattr(step.optimizer, KEEPS_MAIN_WEIGHTS, None)
    if main_parameters is not None:
        main_parameters.put_back(step.optimizer)


def require_main_weights(step: Step) -> None:
    """Raise if a quantized weight with a gradient has no fp32 main weight (:func:`refuse`)."""
    for label, parameter, _ in quantized_among(step.held):
        if parameter.grad is not None or getattr(parameter, "decoupled_grad", None) is not None:
            refuse(step.optimizer, label)
            return  # what holds for one weight holds for all


def refresh_quantized(step: Step) -> None:
    """Give delayed-scaling weights the amax of the whole weight, and drop their transposes.

    Collective over the weight mesh if there are some: one max all-reduce.
    """
    delayed = [(p, local) for _, p, local in quantized_among(step.held) if _te.has_delayed_scale(local)]
    for parameter, local in delayed:
        _te.forget_transpose(local)
        if parameter.requires_grad:
            take_delayed_scale(local)
    reduce_newest_amax(local for _, local in delayed)
