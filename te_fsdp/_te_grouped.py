"""TE's ``GroupedLinear`` by private names: its grouped kernels, and the methods that read its parameters.

Checked on TE 2.18 to 2.20.2.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from te_fsdp import _te

__all__ = ["GroupedReads", "grouped_path_problem"]

#: cuBLASLt that TE asks for (2.20.2 ``is_module_grouped_tensor_path_supported``).
_NEEDED = {"hopper": 130400, "hopper current": 130500, "hopper block": 130600, "blackwell": 130300}


class GroupedReads:
    """Mixin in front of TE's class: what TE reads as weights and biases, and makes of them, goes by way of te_fsdp."""

    def is_adopted(self) -> bool:
        """Whether te_fsdp holds the parameters as ordinary tensors, so that TE shall make no ``GroupedTensor``."""
        return False

    def seen_by_te(self, name: str, tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        """What TE shall see of its ``weight`` or ``bias`` tensors."""
        return list(tensors)

    def make_grouped_weights(self, defer_init: bool = False) -> None:
        """TE's conversion of the experts' parameters into one."""
        if self.is_adopted():
            self.set_tensor_parallel_attributes(defer_init=defer_init)  # type: ignore[attr-defined]
        else:
            super().make_grouped_weights(defer_init=defer_init)  # type: ignore[misc]

    def _make_grouped_biases(self) -> None:
        if not self.is_adopted():
            super()._make_grouped_biases()  # type: ignore[misc]

    def _get_weight_tensors(self) -> list[torch.Tensor]:
        return self.seen_by_te("weight", super()._get_weight_tensors())  # type: ignore[misc]

    def _get_bias_tensors(self) -> list[torch.Tensor]:
        tensors = super()._get_bias_tensors()  # type: ignore[misc]
        # A bias that the forward returns is the user's: it stays what is registered.
        return tensors if self.return_bias else self.seen_by_te("bias", tensors)  # type: ignore[attr-defined]


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
