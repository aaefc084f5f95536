"""``main_weights``: fp32 main weights for an optimizer, begun at the values that the model was initialised with.

    model's parameters     what forward reads: quantized, or bf16; the optimizer's groups and state refer to them
    main weights           fp32, placed as the parameters; ``optimizer.state[parameter]["master_param"]``

TE's FusedAdam keeps main weights itself. For torch's optimizers they stand in for the parameters while
``step`` runs: gradients are cast to fp32, the optimizer updates main weights, and each parameter then becomes
its main weight, rounded or quantized once. Between steps nothing tells the difference, so that ``zero_grad``,
gradient clipping, learning rate schedulers and checkpoints work as usual.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from te_fsdp import _te
from te_fsdp.errors import OrderError
from te_fsdp.quantized.optimizer_steps import KEEPS_MAIN_WEIGHTS, quantized_parameters, refuse
from te_fsdp.sharding.optimizer import check_optimizer, remember
from te_fsdp.sharding.outer_dicts import make_stand_ins
from te_fsdp.sharding.outer_state import MAIN, beginning, is_low
from te_fsdp.sharding.state import settle

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

__all__ = ["main_weights"]


def main_weights(model: nn.Module, optimizer: Optimizer) -> None:
    """Give an optimizer fp32 main weights for the model's quantized and other low-precision parameters.

    Main weights begin at the value from before quantization where TE kept it
    (``quantized_model_init(preserve_high_precision_init_val=True)``), which is then dropped; else at the parameter's
    own value. Main weights that exist, from a checkpoint or an earlier call, stay as they are. Call it once, after
    the optimizer was built and before the first step. Local operation.

    With TE's FusedAdam: ``master_weights=True`` is needed, and this call only sets the beginning. With any optimizer
    of ``torch.optim``: from now on each ``step`` updates the main weights (DTensors with the parameters'
    placements, in ``optimizer.state[parameter]["master_param"]``) and then quantizes each once, which for formats
    with one scale per tensor is a collective over the weight mesh. Memory: 4 bytes per parameter, and during
    ``step`` another 4 for gradients in fp32.

    Args:
        model: The model, sharded and materialised.
        optimizer: Over parameters of the model; unchanged where it holds fp32 parameters only.

    Raises:
        OrderError: The optimizer holds parameters that are not the model's, or has stepped without main weights.
        PrecisionError: A FusedAdam that keeps none, or not in fp32, over quantized weights.
    """
    check_optimizer(model, optimizer)
    remember(optimizer)
    settle(model)
    if _te.is_fused_adam(optimizer):
        for label, parameter, local in quantized_parameters(optimizer):
            refuse(optimizer, label)
            _start_fused(optimizer, parameter, local)
    elif not hasattr(optimizer, KEEPS_MAIN_WEIGHTS):
        low = [p for g in optimizer.param_groups for p in g["params"] if is_low(p)]
        if any(optimizer.state.get(p) for p in low):
            raise OrderError(
                f"main_weights({type(optimizer).__name__}) after its first step",
                expected="an optimizer without state",
                got="state that belongs to low-precision parameters",
                fix="call te_fsdp.main_weights right after the optimizer was built",
            )
        if low:
            stand_ins = make_stand_ins(optimizer, cuts=False)
            stand_ins.start(optimizer)
            setattr(optimizer, KEEPS_MAIN_WEIGHTS, stand_ins)


def _start_fused(optimizer: Any, parameter: torch.Tensor, local: torch.Tensor) -> None:
    """Begin FusedAdam's own main weight of one quantized parameter."""
    if not optimizer.state.get(parameter) and _te.high_precision_value(local) is not None:
        optimizer.initialize_state(parameter, False)
        optimizer.set_scaled_state(parameter, MAIN, beginning(local))
    _te.forget_high_precision_value(local)
