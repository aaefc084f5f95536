"""Main weights of parameters that user code has written to since the last step."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch.optim import Optimizer

from te_fsdp.collectives.rendezvous import is_capturing
from te_fsdp.features.main_params import MAIN, MainParameters, is_low_precision, optimizer_shard_in
from te_fsdp.lifecycle import Step, runs_if
from te_fsdp.quantized.components import element_type
from te_fsdp.quantized.quantizer_record import write_numbers_of
from te_fsdp.records import KEEPS_MAIN_WEIGHTS
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


@runs_if("has_main_weights")
def record_weight_versions(step: Step) -> None:
    """Record the versions of low-precision parameters after a step."""
    main_parameters: MainParameters | None = getattr(step.optimizer, KEEPS_MAIN_WEIGHTS, None)
    if main_parameters is not None:
        main_parameters.versions = weight_versions(step.optimizer, main_parameters.versions)


# [Note: written weights] An optimizer step updates the main weight and writes it to the parameter. It must start from
# the user's writes to the parameter: an average, the values of a lookahead, a loaded state dict. The main
# weight is exact where it rounds to the parameter's value. So a parameter that gets its previous values back, after an
# evaluation with averaged weights, keeps its main weight bit for bit. Elsewhere the main weight becomes the
# parameter's value. A full state dict has the values of quantized weights in BF16. Quantizing them again changes the
# scale, so that some main weights no longer round to their values. If all main weights of a shard are within the error
# of the scale, they are kept. Versions of tensors and counts of quantizations detect writes, so that other steps read
# no values.
@runs_if("has_main_weights")
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


@torch.no_grad()
def update_main_weights_since(optimizer: Any, recorded: WeightVersions | None) -> WeightVersions:
    """Update the main weights of parameters that were written to since versions were recorded (``None``: of all).

    Return the current versions. Local operation.
    """
    now = weight_versions(optimizer, recorded)
    for parameter in _written_since(now, recorded):
        main, value = _new_main_weight(optimizer, parameter)
        if main is None or value is None:
            continue
        if main is optimizer.state[parameter][MAIN]:
            _torch.local_of(main).copy_(value)
        else:  # a scaled main weight of FusedAdam
            optimizer.set_scaled_state(parameter, MAIN, value)
    return now


def _written_since(now: WeightVersions, recorded: WeightVersions | None) -> list[torch.Tensor]:
    """Return the parameters whose versions differ from the recorded ones; all without records. Local operation."""
    before = recorded.versions if recorded is not None and recorded.parameters is now.parameters else None
    if before == now.versions:
        return []
    return [p for n, p in enumerate(now.parameters) if before is None or before[n] != now.versions[n]]


def unscaled_main_weight(optimizer: Any, parameter: torch.Tensor) -> Any:
    """Return a main weight without FusedAdam's scale, in fp32; remainders (int16) and ``None`` unchanged. Local."""
    main = optimizer.state.get(parameter, {}).get(MAIN)
    if main is None or main.dtype in (torch.float32, torch.int16):
        return main
    if not _torch.local_of(main).numel():  # has no scale
        return main.float()
    return _torch.placed_like(optimizer.get_unscaled_state(parameter, MAIN), main)


def _new_main_weight(optimizer: Any, parameter: torch.Tensor) -> tuple[Any, torch.Tensor | None]:
    """Return :func:`unscaled_main_weight`, and its values for the parameter's present ones; ``None`` without update."""
    main = unscaled_main_weight(optimizer, parameter)
    # Remainders (int16) complete the parameter's own bits.
    if main is None or not _torch.local_of(main).numel() or main.dtype == torch.int16:
        return main, None
    rounded = rounded_values(_torch.local_of(parameter).detach())
    shard = optimizer_shard_in(optimizer, parameter)
    if shard is not None:
        rounded = RoundedValues(*map(shard.of, rounded))
    exact = _torch.local_of(main)
    if main is not optimizer.state[parameter][MAIN]:
        # FP16 rounds a main weight after the weight was rounded from it. The scale makes the largest one 2**15.
        error = exact.abs() * (2.0**-11 + _FP32_ERROR) + exact.abs().max() * 2.0**-39
        rounded = rounded._replace(outward=rounded.outward + error, inward=rounded.inward + error)
    return main, rounded.keep(exact)


@torch.no_grad()
def written_main_weights(optimizer: Any) -> dict[int, torch.Tensor]:
    """Return copies of the main weights that the next step would update, with new values. Local operation.

    They are found by ``id`` of the parameter. The optimizer keeps its main weights, because a parameter may get its
    previous values back before the step, for example after a save of averaged weights.
    """
    main_parameters: MainParameters | None = getattr(optimizer, KEEPS_MAIN_WEIGHTS, None)
    recorded, copies = (
        None if main_parameters is None else main_parameters.versions,
        dict[int, torch.Tensor](),
    )
    for parameter in _written_since(weight_versions(optimizer, recorded), recorded):
        main, value = _new_main_weight(optimizer, parameter)
        if value is not None and not torch.equal(value, _torch.local_of(main)):
            copies[id(parameter)] = _torch.placed_like(value, main)
    return copies


# --- values that round to those of a low-precision tensor


class _Element(NamedTuple):
    """An element type of a quantized format."""

    one: int  #: Byte of the value 1.0; 0 without a scale. FP4 has two values in a byte.
    exponent: int  #: Exponent of the smallest normal value
    mantissa: int  #: Bits of the mantissa
    largest: float


_ELEMENTS = {
    "kFloat8E4M3": _Element(0x38, -6, 3, 448.0),
    "kFloat8E5M2": _Element(0x3C, -14, 2, 57344.0),
    "kFloat4E2M1": _Element(0x22, 0, 1, 6.0),
}
# Relative error of fp32 products, with a margin, so that values next to a power of two have its exponent.
_FP32_ERROR = 2.0**-20
# Relative error of rounding to BF16
_BF16_ERROR = 2.0**-9


class RoundedValues(NamedTuple):
    """Values of a low-precision tensor, in fp32, with the values that round to them."""

    value: torch.Tensor
    #: The largest distance of a value that rounds to ``value`` and is farther from zero
    outward: torch.Tensor
    #: The same for values that are closer to zero
    inward: torch.Tensor
    #: Distance to add to both if the scale was computed from values in BF16
    scale_error: torch.Tensor

    def keep(self, exact: torch.Tensor) -> torch.Tensor:
        """Return ``exact`` where it rounds to the values, and the values elsewhere. Local operation."""
        is_inward = (exact.abs() < self.value.abs()) | (exact.sign() * self.value.sign() < 0)
        distance, error = torch.where(is_inward, self.inward, self.outward), (exact - self.value).abs()
        has_other_scale = (error <= distance + self.scale_error).all()
        return torch.where((error <= distance) | has_other_scale, exact, self.value)


def rounded_values(local: torch.Tensor) -> RoundedValues:
    """Return the values of a local tensor of low precision. Local operation."""
    if _te.is_grouped(local):
        experts = [rounded_values(expert) for expert in local.experts]  # type: ignore[attr-defined]
        if experts:
            return RoundedValues(*(torch.stack(tensors) for tensors in zip(*experts, strict=True)))
        return _plain(local.dequantize())  # type: ignore[operator]
    if not _te.is_quantized(local):
        return _plain(local.detach())
    part = _te.storage_parts_of(local)[0]
    exact = _te.high_precision_part(part)
    return _plain(exact) if exact is not None else _quantized(part)


def _plain(local: torch.Tensor) -> RoundedValues:
    info, value = torch.finfo(local.dtype), local.float()
    smallest = math.frexp(info.tiny)[1] - 1
    element = _Element(0, smallest, 1 - math.frexp(info.eps)[1], info.max)
    return _with_distances(value, torch.ones_like(value), element)


def _quantized(part: torch.Tensor) -> RoundedValues:
    element, row = _ELEMENTS[element_type(part)], _te.format_of(part)
    value = part.dequantize(dtype=torch.float32)  # type: ignore[call-arg]
    names = [b.attribute for b in row.buffers if b.holds_values] if row is not None else []
    data_of = {name: data for name in names if (data := getattr(part, name, None)) is not None}
    # If all data bytes are those of 1.0, dequantization returns the scale of each value.
    try:
        for name, data in data_of.items():
            setattr(part, name, torch.full_like(data, element.one))
        scale = part.dequantize(dtype=torch.float32)  # type: ignore[call-arg]
    finally:
        for name, data in data_of.items():
            setattr(part, name, data)
    # Other scales come from the values, which then exceed ``largest`` by less than half its spacing.
    saturates: torch.Tensor | bool = _te.has_delayed_scale(part)
    buffers = [b.attribute for b in row.buffers if b.name.startswith("amax_")] if row is not None else []
    amaxes = [amax.max() for name in buffers if (amax := getattr(part, name, None)) is not None]
    if amaxes:  # NVFP4, whose block scales are float8 numbers: subnormal ones are rounded by any factor
        float8 = _ELEMENTS["kFloat8E4M3"]
        unit = torch.stack(amaxes).max() / (element.largest * float8.largest)
        saturates = scale < unit * 2.0**float8.exponent
    return _with_distances(value, scale, element, saturates)


def _with_distances(
    value: torch.Tensor, scale: torch.Tensor, element: _Element, saturates: torch.Tensor | bool = True
) -> RoundedValues:
    """Return values that are ``scale`` times a number of an element type.

    ``saturates`` is true if much larger values round to the largest number of the type.
    """
    number = (value / scale).abs().nan_to_num() * (1 + _FP32_ERROR)
    # Subnormal numbers have the spacing of the smallest normal one. The mantissa is at least 0.5.
    mantissa, exponent = torch.frexp(number.clamp(min=2.0**element.exponent))
    exponent = exponent - 1
    half = torch.ldexp(scale, exponent - element.mantissa - 1) * (1 + _FP32_ERROR)
    # The numbers below a power of two are twice as dense.
    is_power = (mantissa < 0.5 * (1 + 4 * _FP32_ERROR)) & (exponent > element.exponent)
    inward = torch.where(is_power, half / 2, half)
    # Quantization multiplies by the scale, dequantization by its inverse: both round in fp32, relative to the value.
    error = value.abs().nan_to_num() * (_FP32_ERROR / 4 if element.one else 0.0)
    # With a scale of zero all values round to zero.
    is_open = ((number >= element.largest) & saturates) | (scale == 0)
    outward = (half + error).masked_fill(is_open, math.inf)
    scale_error = (value.abs() + half) * (2 * _BF16_ERROR if element.one else 0.0)
    return RoundedValues(value, outward, inward + error, scale_error)
