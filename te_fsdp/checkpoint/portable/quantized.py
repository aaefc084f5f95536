"""Values of weights in files without TransformerEngine: of quantized ones, and of main weights in two halves."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from te_fsdp.checkpoint.portable.lazy import Lazy
from te_fsdp.checkpoint.portable.pickled import Quantized
from te_fsdp.checkpoint.portable.torch_files import stored
from te_fsdp.errors import CheckpointError, PlacementError, message
from te_fsdp.quantized.components import components_from
from te_fsdp.quantized.dequantize import covering, dequantize_box, needed_components

__all__ = ["Dequantized", "Remainders", "components_in_file"]


@dataclass
class Dequantized(Lazy):
    """The values of a quantized weight.

    Attributes:
        key: Name, for messages.
        shape: Of the weight.
        dtype: That the weight stands for.
        format: The manifest's text, such as ``"mxfp8 kFloat8E4M3"``.
        components: The stored components by name.
    """

    key: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    format: str
    components: Mapping[str, Lazy]

    def __post_init__(self) -> None:
        self.needed = needed_components(self.format, list(self.components), self.key)

    def rows(self, first: int, last: int) -> torch.Tensor:
        """See :meth:`Lazy.rows`. Reads the blocks that cover these rows."""
        offsets = (first,) + (0,) * (len(self.shape) - 1)
        sizes = (last - first, *self.shape[1:])
        parts = {}
        for name, block in self.needed.items():
            start, size = covering(offsets, sizes, block)
            stored_part = self.components[name]
            parts[name] = (
                stored_part.whole() if block is None else stored_part.rows(start[0], start[0] + size[0])
            )
        return dequantize_box(self.format, parts, self.needed, offsets, sizes).to(self.dtype)


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


def components_in_file(found: Quantized, key: str) -> dict[str, Lazy]:
    """The components of one of TE's tensors in a ``torch.save`` file, unpadded and in the weight's orientation.

    Raises:
        CheckpointError: A format or option without a known layout.
    """
    try:
        if found.options.get("nvfp4_use_4over6"):
            raise PlacementError(message(f"{key}: NVFP4 with 4over6 scales has no known layout"))
        components = components_from(found.format, {**found.buffers, **found.options}, found.shape, key)
    except PlacementError as error:
        raise CheckpointError(str(error)) from error
    return {
        part.name: stored(part.tensor, f"{key}:{part.name}", like=found.buffers[part.name])
        for part in components
    }
