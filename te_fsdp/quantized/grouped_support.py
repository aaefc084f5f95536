"""Whether TE can multiply with grouped tensors here: device, cuBLASLt and recipe, in words."""

from __future__ import annotations

from typing import Any

import torch

from te_fsdp import _te

__all__ = ["grouped_path_problem"]

#: cuBLASLt that TE asks for (2.20.2 ``is_module_grouped_tensor_path_supported``).
_NEEDED = {"hopper": 130400, "hopper current": 130500, "hopper block": 130600, "blackwell": 130300}


def grouped_path_problem(recipe: Any | None) -> str:
    """Why TE's grouped kernels do not run a ``GroupedLinear`` here; empty if they do. Local operation.

    Args:
        recipe: A recipe, or ``None`` for bf16.
    """
    linear = _te.te().module.grouped_linear
    if linear.is_module_grouped_tensor_path_supported(recipe, torch.bfloat16):
        return ""
    capability, version = linear.get_device_compute_capability(), linear.tex.get_cublasLt_version()
    where = f"compute capability {capability[0]}.{capability[1]}"
    if not (9, 0) <= capability <= (11, 0):
        return f"TransformerEngine has grouped kernels for Hopper and Blackwell, not for {where}"
    key = "blackwell" if capability >= (10, 0) else "hopper"
    if key == "hopper" and recipe is not None:
        kind = (
            "block" if recipe.float8_block_scaling() else "current" if recipe.float8_current_scaling() else ""
        )
        key = f"{key} {kind}".strip()
    if version < _NEEDED[key]:
        return (
            f"TransformerEngine needs cuBLASLt {_readable(_NEEDED[key])} or later for it on {where}, "
            f"found {_readable(version)}"
        )
    return f"TransformerEngine has no grouped kernels for {type(recipe).__name__} on {where}"


def _readable(version: int) -> str:
    """130400 -> 13.4."""
    return f"{version // 10000}.{version // 100 % 100}"
