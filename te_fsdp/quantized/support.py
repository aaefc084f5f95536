"""What TE or the device cannot do with a recipe, found before a step is spent on it, with the reason.

`docs/support.md` lists the combinations.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from te_fsdp import _te
from te_fsdp._te_formats import Format
from te_fsdp.errors import PrecisionError

if TYPE_CHECKING:
    from torch import nn

    from te_fsdp.binding import Binding

__all__ = ["check_quantizer", "check_recipe"]


def check_quantizer(label: str, quantizer: Any) -> None:
    """Raise if weights that this quantizer makes cannot be trained here. Local operation.

    Args:
        label: Full name of the weight.
        quantizer: The weight's quantizer.

    Raises:
        PrecisionError: The device does not have the format, or FSDP2 would gather a hybrid weight wrongly.
    """
    fmt = _te.format_of_quantizer(quantizer)
    problem = _device_problem(fmt)
    if problem:
        raise PrecisionError(
            f"{label}: {fmt} weight on this device",
            expected="a format that the device has",
            why=problem,
            fix="use another recipe in quantized_model_init",
        )
    parts = [part for part in _te.quantizers_of_parts(quantizer) if part is not quantizer]
    formats = [_te.format_of_quantizer(part).name for part in parts]
    if "nvfp4" in formats:
        raise PrecisionError(
            f"{label}: hybrid weight with an NVFP4 part",
            expected="parts in float8, float8-block, MXFP8 or high precision",
            why="TransformerEngine has no all-gather of it (HybridQuantizedTensor.fsdp_pre_all_gather)",
            fix="keep these weights in high precision; the recipe itself may stay",
        )
    if any(map(_te.is_delayed_quantizer, parts)):
        raise PrecisionError(
            f"{label}: hybrid weight with a part in delayed scaling",
            expected="parts in current scaling, float8-block, MXFP8 or high precision",
            why="TransformerEngine reduces the amax history of a module, and not that of a weight's part",
            fix="use Float8CurrentScalingQuantizer for this part, or keep these weights in high precision",
        )
    if any(name == "identity" and part.dtype is None for name, part in zip(formats, parts, strict=True)):
        raise PrecisionError(
            f"{label}: hybrid weight with an IdentityQuantizer without dtype",
            expected="IdentityQuantizer(dtype=torch.bfloat16), or whatever dtype the model has",
            got="dtype None",
            why="FusedAdam would put the fp32 main weight in its place, and FSDP2 gather it as bf16",
            fix="give the factory's IdentityQuantizer a dtype",
        )


def check_recipe(module: nn.Module, binding: Binding) -> None:
    """Raise if this module cannot run under the recipe of the enclosing ``te.autocast``. Local operation.

    Args:
        module: A bound ``GroupedLinear`` whose forward is about to run.
        binding: Its binding.

    Raises:
        PrecisionError: TE refuses the module under it.
    """
    tp = binding.tp_mesh.size() if binding.tp_mesh is not None else 1
    if tp == 1 or getattr(module, "tp_size", 1) == 1:
        return
    recipe = _te.active_recipe()
    if recipe is not None and recipe.float8_current_scaling():
        raise PrecisionError(
            f"{binding.name or 'model'} (GroupedLinear): recipe {type(recipe).__name__} with tp_size={tp}",
            expected="a recipe without one scale per activation, or tp_size=1",
            why="TransformerEngine refuses it: activations split outside of the module have no common scale",
            fix="use DelayedScaling, Float8BlockScaling or MXFP8BlockScaling, or build it with tp_size=1",
        )


def _device_problem(fmt: Format) -> str:
    """TE's reason why the device cannot compute in a format; empty if it can."""
    if not fmt.available:
        return ""
    available, reason = getattr(_te.te(), fmt.available)(return_reason=True)
    return "" if available else reason
