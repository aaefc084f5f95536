"""What must hold around every optimizer step of a model with quantized weights.

Before: the optimizer keeps fp32 main weights. torch's optimizers would otherwise update quantized weights by
dequantizing and requantizing them operation by operation, which loses most small updates in silence; TE's
FusedAdam without main weights raises, or leaves delayed-scaling weights as they are (TE 2.20.2).

After: delayed-scaling weights have the amax of the whole weight in their histories, where FusedAdam put that of
a shard; and no cached transpose, which FusedAdam does not update (Hopper layout).

Both look only at weights that te_fsdp has bound, through torch's hooks for all optimizers
(``torch.optim.optimizer.register_optimizer_step_pre_hook``).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from te_fsdp import _te, _torch
from te_fsdp.errors import PrecisionError
from te_fsdp.parameters import KEY
from te_fsdp.quantized.amax_mark import reduce_newest_amax, take_delayed_scale

if TYPE_CHECKING:
    from torch.optim import Optimizer

__all__ = ["KEEPS_MAIN_WEIGHTS", "quantized_parameters", "refuse", "watch_steps"]

#: Attribute of an optimizer to which te_fsdp has given main weights.
KEEPS_MAIN_WEIGHTS = "_te_fsdp_main_weights"
_WATCHED = "_te_fsdp_watched"


def watch_steps() -> None:
    """Look at every optimizer step from now on; once per process, later calls do nothing."""
    cls = _te.te().QuantizedTensor
    if _WATCHED not in cls.__dict__:
        register_optimizer_step_pre_hook(_before)
        register_optimizer_step_post_hook(_after)
        setattr(cls, _WATCHED, True)


def quantized_parameters(optimizer: Optimizer) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    """Label, parameter and local tensor of every quantized weight of a bound module. Local operation."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            facts = parameter.__dict__.get(KEY)
            if (
                facts
                and (label := facts.label) is not None
                and _te.is_quantized(local := _torch.local_of(parameter))
            ):
                yield label, parameter, local


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


def _before(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    for label, parameter, _ in quantized_parameters(optimizer):
        if parameter.grad is not None or getattr(parameter, "decoupled_grad", None) is not None:
            return refuse(optimizer, label)  # what holds for one weight holds for all
    return None


def _after(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    delayed = [(p, local) for _, p, local in quantized_parameters(optimizer) if _te.has_delayed_scale(local)]
    for parameter, local in delayed:
        _te.forget_transpose(local)
        if parameter.requires_grad:
            take_delayed_scale(local)
    reduce_newest_amax(local for _, local in delayed)
