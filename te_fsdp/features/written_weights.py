"""Main weights of parameters that user code has written to since the last step."""

from __future__ import annotations

from typing import Any

import torch
from torch.optim import Optimizer

from te_fsdp.collectives.rendezvous import is_capturing
from te_fsdp.features.main_params import MAIN, MainParameters, is_low_precision, optimizer_shard_in
from te_fsdp.lifecycle import Step
from te_fsdp.quantized.amax import KEEPS_MAIN_WEIGHTS
from te_fsdp.quantized.quantizer_record import write_numbers_of
from te_fsdp.quantized.rounding import rounded_values
from te_fsdp.tensor_version import WeightVersions
from te_fsdp.upstream import te as _te, torch_dtensor as _torch


def weight_versions(optimizer: Optimizer, recorded: WeightVersions | None) -> WeightVersions:
    """Return the current versions of an optimizer's low-precision parameters. Local operation.

    The parameters are those of ``recorded``, unless the optimizer has a different number now.
    """
    count = 0
    for group in optimizer.param_groups:
        count += len(group["params"])
    if recorded is not None and recorded.count == count:
        parameters = recorded.parameters
    else:
        parameters = [p for group in optimizer.param_groups for p in group["params"] if is_low_precision(p)]
    return WeightVersions(parameters, write_numbers_of(parameters), count)


def record_weight_versions(step: Step) -> None:
    """Record the versions of low-precision parameters after a step."""
    main_parameters: MainParameters | None = getattr(step.optimizer, KEEPS_MAIN_WEIGHTS, None)
    if main_parameters is not None:
        main_parameters.versions = weight_versions(step.optimizer, main_parameters.versions)


# [Note: written weights] An optimizer step updates the main weight and writes it to the parameter. It must start from
# what the user has written to the parameter: an average, the values of a lookahead, a loaded state dict. The main
# weight is exact where it rounds to the parameter's value. So a parameter that gets its previous values back, after an
# evaluation with averaged weights, keeps its main weight bit for bit. Elsewhere the main weight becomes the
# parameter's value. Versions of tensors and counts of quantizations detect writes, so that other steps read no values.
def update_written_main_weights(step: Step) -> None:
    """Update the main weights of parameters that user code has written to. Local operation."""
    main_parameters: MainParameters | None = getattr(step.optimizer, KEEPS_MAIN_WEIGHTS, None)
    if main_parameters is None and not (step.recorded_params and _te.is_fused_adam(step.optimizer)):
        return
    # The first step compares all main weights with their parameters.
    recorded = None if main_parameters is None else main_parameters.versions
    if is_capturing():  # graphed_step does it before each replay
        return
    now = update_main_weights_since(step.optimizer, recorded)
    if main_parameters is not None:
        main_parameters.versions = now


def update_main_weights_since(optimizer: Optimizer, recorded: WeightVersions | None) -> WeightVersions:
    """Update the main weights of parameters that were written to since versions were recorded (``None``: of all).

    Return the current versions. Local operation.
    """
    now = weight_versions(optimizer, recorded)
    before = recorded.versions if recorded is not None and recorded.parameters is now.parameters else None
    if before != now.versions:
        for index, parameter in enumerate(now.parameters):
            if before is None or before[index] != now.versions[index]:
                _update_main_weight(optimizer, parameter)
    return now


# A function of its own, because tests replace it.
@torch.no_grad()
def _update_main_weight(optimizer: Any, parameter: torch.Tensor) -> None:
    """Replace the values of a main weight that do not round to its parameter's values."""
    main = optimizer.state.get(parameter, {}).get(MAIN)
    main = None if main is None else _torch.local_of(main)
    # Remainders (int16) complete the parameter's own bits, so they need no update.
    if main is None or not main.numel() or main.dtype == torch.int16:
        return
    rounded = rounded_values(_torch.local_of(parameter).detach())
    shard = optimizer_shard_in(optimizer, parameter)
    if shard is not None:
        rounded = rounded.map(shard.of)
    if main.dtype == torch.float32:
        main.copy_(rounded.keep(main))
    else:  # a scaled main weight of FusedAdam
        exact = optimizer.get_unscaled_state(parameter, MAIN)
        optimizer.set_scaled_state(parameter, MAIN, rounded.keep(_torch.local_of(exact).float()))
