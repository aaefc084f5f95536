"""Quantized weights without TransformerEngine: their components in files, and the values that they stand for.

The arithmetic is that of TE's ``dequantize()``, to the bit: an fp32 product, rounded once to the weight's dtype.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from te_fsdp.checkpoint.portable.lazy import Lazy
from te_fsdp.checkpoint.portable.pickled import Quantized, stored
from te_fsdp.errors import CheckpointError, PlacementError, message
from te_fsdp.quantized.components import components_from

__all__ = ["Dequantized", "components_in_file"]

_ELEMENTS = {"kFloat8E4M3": torch.float8_e4m3fn, "kFloat8E5M2": torch.float8_e5m2}
#: The sixteen values of E2M1, by code.
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
#: NVFP4's second-level scale: amax / (largest E2M1 * largest E4M3).
_NVFP4_RANGE = 6.0 * 448.0
#: Data and scale that the values are computed from, per format.
_READ = {
    "float8": ("data", "fp8_scale_inv"),
    "mxfp8": ("rowwise_data", "rowwise_scale_inv"),
    "float8-block": ("rowwise_data", "rowwise_scale_inv"),
    "nvfp4": ("rowwise_data", "rowwise_scale_inv", "amax_rowwise"),
}
_ROWS_PER_SCALE = {"float8-block": 128}


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
        self.name, _, rest = self.format.partition(" ")
        self.element = rest.split(" ")[-1]
        absent = [c for c in _READ.get(self.name, ("a known format",)) if c not in self.components]
        if absent or (self.name != "nvfp4" and self.element not in _ELEMENTS):
            raise CheckpointError(
                message(
                    f"{self.key}: cannot be dequantized",
                    expected=f"one of {', '.join(_READ)} with its rowwise components",
                    got=f"{self.format} with {', '.join(sorted(self.components))}",
                    fix="keep the quantized components as they are",
                )
            )

    def rows(self, first: int, last: int) -> torch.Tensor:
        """See :meth:`Lazy.rows`."""
        data, scale, *rest = (self.components[c] for c in _READ[self.name])
        values = data.rows(first, last)
        if self.name == "nvfp4":
            values = _unpack(values)
            amax = rest[0].whole().float()
            scales = scale.rows(first, last).view(torch.float8_e4m3fn).float() * (amax / _NVFP4_RANGE)
            return _scaled(values, scales, 16).to(self.dtype)
        values = values.view(_ELEMENTS[self.element]).float()
        if self.name == "float8":
            return (values * scale.whole().view(-1)[0]).to(self.dtype)
        if self.name == "mxfp8":
            scales = scale.rows(first, last).view(torch.float8_e8m0fnu).float()
            return _scaled(values, scales, 32).to(self.dtype)
        height = _ROWS_PER_SCALE[self.name]
        above = first // height
        scales = scale.rows(above, math.ceil(last / height)).repeat_interleave(height, 0)
        return _scaled(values, scales[first - above * height : last - above * height], 128).to(self.dtype)


def _scaled(values: torch.Tensor, scales: torch.Tensor, width: int) -> torch.Tensor:
    return values * scales.repeat_interleave(width, -1)[..., : values.shape[-1]]


def _unpack(packed: torch.Tensor) -> torch.Tensor:
    """fp32 values of bytes that hold two E2M1 numbers each, the first in the low half."""
    codes = torch.stack((packed & 0xF, packed >> 4), -1).flatten(-2)
    return torch.tensor(_E2M1)[codes.int()]


def components_in_file(found: Quantized, key: str, file: Path, base: int = 0) -> dict[str, Lazy]:
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
        part.name: stored(part.tensor, file, f"{key}:{part.name}", base, like=found.buffers[part.name])
        for part in components
    }
