"""The best values that a checkpoint has of its weights: the optimizer's main weights, else the weights themselves."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from te_fsdp.checkpoint.portable.contents import Contents
from te_fsdp.checkpoint.portable.lazy import Lazy
from te_fsdp.errors import CheckpointError, message

__all__ = ["Remainders", "best_value"]


@dataclass
class Remainders(Lazy):
    """fp32 main weights that FusedAdam keeps as bf16 weights and the 16 bits that these lack.

    TE rounds the weight to nearest: where the remainder, read as a signed number, is negative, the weight is one
    unit in the last place above the upper half (TE 2.20.2 ``multi_tensor_adam.cu``).

    Attributes:
        upper: The bf16 weights.
        lower: The int16 remainders.
    """

    upper: Lazy
    lower: Lazy
    shape: tuple[int, ...] = field(init=False)
    dtype: torch.dtype = torch.float32

    def __post_init__(self) -> None:
        self.shape = self.upper.shape

    def rows(self, first: int, last: int) -> torch.Tensor:
        """See :meth:`Lazy.rows`."""
        lower = self.lower.rows(first, last).to(torch.int32)
        upper = self.upper.rows(first, last).view(torch.int16).to(torch.int32) - (lower < 0).to(torch.int32)
        return ((upper << 16) | (lower & 0xFFFF)).view(torch.float32)


def best_value(contents: Contents, name: str, weights: str) -> tuple[Lazy, str]:
    """A parameter's or buffer's value, and where it came from.

    Args:
        contents: The checkpoint.
        name: Of the parameter or buffer.
        weights: ``"main"``: the optimizer's main weights, an error where a quantized weight has none;
            ``"auto"``: main weights where there are any; ``"compute"``: never.

    Returns:
        The value, and ``"main"``, ``"dequantized"`` or ``"stored"``.

    Raises:
        CheckpointError: ``"main"`` for a quantized weight that has none.
    """
    states = (contents.manifest.optimizer or {"state": {}})["state"].get(name, {})
    quantized = contents.components(name) is not None
    if weights != "compute" and "master_param" in states:
        main = contents.tensors[f"optimizer.state.{name}.master_param"]
        if main.dtype == torch.int16:
            main = Remainders(contents.value(name), main)
        return main, "main"
    if weights == "main" and quantized:
        raise CheckpointError(
            message(
                f"{name}: no main weight",
                expected="an optimizer that keeps main weights (FusedAdam with master_weights=True)",
                got="a checkpoint without one",
                fix="export with --weights auto, which takes the dequantized weight",
            )
        )
    return contents.value(name), "dequantized" if quantized else "stored"
