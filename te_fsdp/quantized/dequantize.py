"""Values of quantized weights from the components of a file, for any rectangle, without TE's tensors.

TE's own ``dequantize`` needs a tensor with padded scales on the GPU. What a checkpoint holds is unpadded and may be a
few blocks of a weight only, and a file may be read where there is no TE and no GPU.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from te_fsdp._te_formats import FORMATS, Block, unknown_format
from te_fsdp.errors import CheckpointError

__all__ = ["covering", "dequantize_box", "needed_components"]

_FP8 = {"kFloat8E4M3": torch.float8_e4m3fn, "kFloat8E5M2": torch.float8_e5m2}
#: Values of E2M1, by its four bits.
_FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
#: NVFP4's first-level scales are E4M3 numbers up to 448, its values go up to 6.
_NVFP4_MAX = 6.0 * 448.0


def needed_components(described: str, have: Sequence[str], label: str) -> dict[str, Block]:
    """Which components of a quantized weight give its values. Local operation.

    Args:
        described: Format as :func:`te_fsdp.quantized.components.describe_format` writes it.
        have: Names of the components that there are.
        label: Name for messages.

    Returns:
        Name of the component -> rows and columns of the weight that one element covers.

    Raises:
        CheckpointError: A format that is not known, or components of neither direction.
    """
    name, dtype = described.split()[0], described.split()[-1]
    row = FORMATS.get(name, unknown_format(name))
    for choice in row.directions() if dtype in row.elements else ():
        if set(choice) <= set(have):
            return choice
    known = [row for row in FORMATS.values() if row.buffers]
    *elements, last = dict.fromkeys(element for row in known for element in row.elements)
    raise CheckpointError(
        f"{label}: values of a quantized weight",
        expected=f"components of one of {', '.join(map(str, known))}, of {', '.join(elements)} or {last}",
        got=f"{described} with {', '.join(have)}",
        fix="load it into a model of the same format",
    )


def covering(
    offsets: Sequence[int], sizes: Sequence[int], block: Block
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Offset and size, in elements of a component, of the blocks that cover a rectangle of the weight.

    The rectangle may cut through blocks; for a value of the whole weight it is that one element.
    """
    if block is None:
        return (0,), (1,)
    # A format without blocks (1 x 1) may have any number of dims.
    steps = block if len(offsets) == 2 else (1,) * len(offsets)
    start = tuple(o // s for o, s in zip(offsets, steps, strict=True))
    stop = tuple(-(-(o + n) // s) for o, n, s in zip(offsets, sizes, steps, strict=True))
    return start, tuple(b - a for a, b in zip(start, stop, strict=True))


def dequantize_box(
    described: str,
    parts: Mapping[str, torch.Tensor],
    needed: Mapping[str, Block],
    offsets: Sequence[int],
    sizes: Sequence[int],
) -> torch.Tensor:
    """Values of a rectangle of the weight. Local operation.

    Args:
        described: Format with its dtype, for example ``"mxfp8 kFloat8E4M3"``.
        parts: Per needed component the elements that :func:`covering` gives, not transposed.
        needed: From :func:`needed_components`.
        offsets: Where the rectangle lies in the weight.
        sizes: Its extents.

    Returns:
        float32 tensor of shape ``sizes`` on the parts' device: TE's ``dequantize(dtype=torch.float32)``, to the bit.
    """
    data_name, scale_name = list(needed)[:2]
    data = _decode(described, parts[data_name], vertical=data_name.startswith("columnwise"))
    data = _crop(data, offsets, sizes, needed[data_name])
    scale = parts[scale_name]
    block = needed[scale_name]
    if block is None:
        return data * scale.float().reshape(())
    row = FORMATS[described.split()[0]]
    number = next(buffer.number for buffer in row.buffers if buffer.name == scale_name)
    factor = scale.view(number).float()
    amax = next((parts[n] for n in needed if n.startswith("amax")), None)
    if amax is not None:
        # The kernels' order of multiplications.
        factor = (
            factor
            * amax.float().reshape(())
            * torch.tensor(1.0 / _NVFP4_MAX, dtype=torch.float32, device=amax.device)
        )
    for dim, step in enumerate(block):
        factor = factor.repeat_interleave(step, dim) if step > 1 else factor
    return data * _crop(factor, offsets, sizes, block)


def _crop(values: torch.Tensor, offsets: Sequence[int], sizes: Sequence[int], block: Block) -> torch.Tensor:
    """The rectangle out of the elements of the blocks that cover it."""
    steps = block if block is not None and len(offsets) == 2 else (1,) * len(offsets)
    return values[tuple(slice(o % s, o % s + n) for o, n, s in zip(offsets, sizes, steps, strict=True))]


def _decode(described: str, data: torch.Tensor, *, vertical: bool) -> torch.Tensor:
    """float32 numbers of FP8 bytes, or of FP4 pairs: the low four bits come first."""
    dtype = described.split()[-1]
    if dtype in _FP8:
        return data.view(torch.uint8).view(_FP8[dtype]).float()
    table = torch.tensor(_FP4, dtype=torch.float32, device=data.device)
    codes = data.view(torch.uint8).long()
    pair = torch.stack((table[codes & 15], table[codes >> 4]), dim=1 if vertical else 2)
    rows, columns = data.shape
    return pair.reshape(2 * rows, columns) if vertical else pair.reshape(rows, 2 * columns)
