"""Components of a quantized weight: its tensors in the layout of the original weight.

:mod:`te_fsdp.upstream.te_formats` lists them. A component is a view of the weight's own buffer without its
padding, so that writing to it changes the weight. A rectangle of the weight is a rectangle of each component if
it consists of full blocks. TE's quantized tensors are never sliced, because some return a temporary copy.

The values of a rectangle can be computed from stored components without TE's tensors. TE's own ``dequantize`` requires
a tensor with padded scales on the GPU. A checkpoint contains unpadded components and possibly only some blocks of a
weight, and may be read without TE or a GPU.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from te_fsdp.collectives.redistribute import PackedLayout as PackedBuffer
from te_fsdp.errors import CheckpointError, PlacementError
from te_fsdp.layout import Box
from te_fsdp.upstream import te as _te
from te_fsdp.upstream.te_formats import FORMATS, Block, unknown_format


@dataclass(frozen=True)
class Component:
    """One tensor of a quantized weight."""

    name: str  #: TE's name of the buffer
    #: View of the buffer: local shape divided by ``block``, or one element for a value of the unsharded weight.
    tensor: torch.Tensor
    #: Rows and columns of the weight per element; ``None`` for a value of the unsharded weight.
    block: tuple[int, ...] | None

    def shape(self, original: Sequence[int]) -> tuple[int, ...]:
        """Return the shape of this component of the unsharded weight of shape ``original``."""
        if self.block is None:
            return tuple(self.tensor.shape)
        return tuple(math.ceil(size / step) for size, step in zip(original, self.block, strict=True))

    def boxes(self, boxes: Sequence[Box], label: str, original: Sequence[int] | None = None) -> list[Box]:
        """Convert rectangles of the weight to this component's; raise PlacementError if a rectangle splits a block.

        ``original`` is the shape of the unsharded weight, whose last block may be incomplete.
        """
        if self.block is None:
            zeros = (0,) * self.tensor.ndim
            return [Box(zeros, zeros, tuple(self.tensor.shape))]
        scaled = []
        for box in boxes:
            ends = [o + s for o, s in zip(box.original, box.sizes, strict=True)]
            # The last block of a dim ends with the weight, even if it is incomplete.
            short = [original is not None and end == original[dim] for dim, end in enumerate(ends)]
            parts = []
            for values in (box.original, box.local, box.sizes):
                splits = [value % step != 0 for value, step in zip(values, self.block, strict=True)]
                if any(
                    split and not (values is box.sizes and short[dim]) for dim, split in enumerate(splits)
                ):
                    raise PlacementError(
                        f"{label} ({self.name}): a rank's rectangle at {box.original} of size {box.sizes} splits "
                        "blocks",
                        expected=f"multiples of {self.block}",
                        got=f"{values}",
                        why="The block would belong to two ranks at once",
                        fix="choose sizes for which every rank gets complete blocks, or use high-precision weights",
                    )
                parts.append(tuple(math.ceil(v / step) for v, step in zip(values, self.block, strict=True)))
            scaled.append(Box(*parts))
        return scaled


def describe_format(local: torch.Tensor, label: str = "weight") -> str | None:
    """Return the format of a quantized tensor as text that defines its data; ``None`` for a plain tensor.

    Raises PlacementError if an option of the format changes the meaning of the data.
    """
    row = _te.format_of(local)
    if row is None:
        return None
    options = _options_set(row.unrecorded_options, local.get_metadata())  # type: ignore[attr-defined]
    if options:
        raise PlacementError(
            f"{label}: {row} weight with {options}",
            expected="an option that checkpoints record",
            why="Its data would be read as different values without this option",
            fix="disable the option for weights in the recipe, or keep this weight in high precision",
        )
    scaling = " delayed" if _te.has_delayed_scale(local) else " current" if row.has_one_scale else ""
    return f"{row}{scaling} {element_type(local)}"


def element_type(local: torch.Tensor) -> str:
    """Return the name of the element type of a quantized tensor, such as ``"kFloat8E4M3"``."""
    metadata = local.get_metadata()  # type: ignore[attr-defined]
    dtype = metadata.get("fp8_dtype", metadata.get("fp4_dtype"))
    return getattr(dtype, "name", str(dtype))


def components_of(local: torch.Tensor, label: str) -> list[Component]:
    """Return the existing components of one of TE's quantized tensors. Local operation.

    Raises PlacementError if the layout of the format or of one of its options is unknown.
    """
    name, metadata, shape = str(_te.format_of(local)), local.get_metadata(), tuple(local.shape)  # type: ignore[attr-defined]
    row = FORMATS.get(name, unknown_format(name))
    options = _options_set(row.unknown_options, metadata)
    if not row.buffers or options or (not row.has_one_scale and len(shape) != 2):
        raise PlacementError(
            f"{label}: quantized weight without a known layout",
            expected=f"a 2-D weight in one of {', '.join(n for n, fmt in FORMATS.items() if fmt.buffers)}",
            got=f"{name} of shape {shape} {options or ''}".rstrip(),
            fix=(
                "build it in high precision, without quantized_model_init; the custom recipe can stay"
                if name == "hybrid"
                else "keep this weight in high precision"
            ),
        )
    components = []
    turned = metadata.get(row.transpose) if metadata.get("data") is None else None
    for buffer in row.buffers:
        tensor = metadata.get(buffer.name)
        if buffer.name == "data" and turned is not None:
            # Hopper may keep only the transposed data (last dim first) of a weight for backward.
            tensor = turned.movedim(0, -1)
        if tensor is None:
            continue
        if buffer.block is None:
            components.append(Component(buffer.name, tensor.detach().view(-1), None))
            continue
        steps = _steps(buffer.block, shape)
        sizes = tuple([-(-size // step) for size, step in zip(shape, steps, strict=True)])
        view = tensor.detach()
        # Transposed buffers are described like the weight, so that one rectangle applies to all components.
        view = view.t() if buffer.is_transposed else view
        if view.ndim != len(sizes) or any(map(operator.lt, view.shape, sizes)):
            raise PlacementError(
                f"{label}: shape of a quantized weight's buffer",
                expected=f"at least {sizes}",
                got=tuple(view.shape),
                fix="use a version of TransformerEngine that te_fsdp supports (te-fsdp env)",
            )
        components.append(Component(buffer.name, view[tuple([slice(0, size) for size in sizes])], steps))
    return components


def rowwise_components(local: torch.Tensor) -> list[Component]:
    """Return :func:`components_of` a float8 tensor with rowwise data, with fewer calls; none for other tensors."""
    row, components = _te.format_of(local), list[Component]()
    for buffer in row.buffers if row is not None and row.block == 1 else ():
        tensor = getattr(local, buffer.attribute, None)
        if tensor is None:
            return []
        is_data = buffer.block is None
        view = tensor.detach()
        components.append(
            Component(buffer.name, view.view(-1) if is_data else view, None if is_data else (1,) * view.ndim)
        )
    return components


def buffers_of_parts(local: torch.Tensor, label: str) -> list[Component]:
    """Return :func:`components_of` in a fixed order, for a hybrid tensor those of both parts. Local operation."""
    # Names of both parts may be equal. A high-precision part is one buffer of its values.
    buffers: list[Component] = []
    for part in _te.storage_parts_of(local):
        values = _te.high_precision_part(part)
        if values is None:
            buffers += components_of(part, label)
        else:
            buffers.append(Component("high precision", values.detach(), (1,) * values.ndim))
    return buffers


def empty_on_meta(
    quantizer: Any, shape: Sequence[int], dtype: torch.dtype, *, backward: bool | None = None
) -> torch.Tensor:
    """Return the quantized tensor that a quantizer creates from a value, with meta buffers. Local operation.

    The shape is 3-D for one weight of all experts of a layer. ``backward`` selects the buffers read by backward
    (true) or forward (false); ``None``: all buffers.
    """
    configured = quantizer.copy()
    if backward is not None:
        configured.set_usage(rowwise=not backward, columnwise=backward)
    rows, columns = math.prod(shape[:-1]), shape[-1]  # experts are stacked along the rows
    return configured.make_empty((rows, columns), dtype=dtype, device=torch.device("meta"))


def keep_rowwise_only(shard: torch.Tensor) -> None:
    """Drop a shard's columnwise data if it can be derived from its rowwise data, also in later writes. Local."""
    # These are the transpose of a float8 shard, and the columnwise data of a 2-D MXFP8 shard. An all-gather sends the
    # rowwise data. TE computes the unsharded weight's transpose; for 2-D MXFP8 see [Note: 2-D MXFP8] in
    # ``upstream/te_derived.py``. A tensor of all experts is sent unchanged.
    row = _te.format_of(shard)
    if row is None or shard.ndim > 2 or not (row.transpose or row.shares_data):
        return
    if row.transpose:
        _te.drop_transpose(shard)
    else:
        shard.update_usage(columnwise_usage=False)  # type: ignore[attr-defined]
    _te.quantizer_of(shard).set_usage(columnwise=False)


def block_of(local: torch.Tensor) -> int | None:
    """Return the rows (and columns) per scale of a quantized tensor, the maximum for hybrids; ``None`` if unknown."""
    formats = [(_te.high_precision_part(part), _te.format_of(part)) for part in _te.storage_parts_of(local)]
    parts = [1 if values is not None or row is None else row.block for values, row in formats]
    return None if None in parts else max(part for part in parts if part is not None)


def _options_set(options: Mapping[str, bool], metadata: Mapping[str, Any]) -> dict[str, bool]:
    """Return the options that a tensor has set to these values."""
    return {key: value for key, value in options.items() if metadata.get(key, not value) == value}


def _steps(block: Block, sizes: Sequence[int]) -> tuple[int, ...]:
    """Return the elements per dim that one component element covers. 1 x 1 formats support any number of dims."""
    return block if block is not None and len(sizes) == 2 else (1,) * len(sizes)


def drop_derived_state(local: torch.Tensor) -> None:
    """Drop or recompute data that a quantized tensor derived from overwritten values. Local operation."""
    if _te.is_grouped(local):
        local.derive_transposes()  # type: ignore[missing-attribute]
    for part in _te.storage_parts_of(local):
        _te.drop_transpose(part)
    _te.drop_high_precision_value(local)


# --- values


#: Element type (``tex.DType``) -> dtype.
FLOAT8 = {"kFloat8E4M3": torch.float8_e4m3fn, "kFloat8E5M2": torch.float8_e5m2}
#: Values of E2M1, indexed by its four bits.
_FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
#: NVFP4's first-level scales are E4M3 values up to 448. Its values are at most 6.
_NVFP4_MAX = 6.0 * 448.0


def needed_components(described: str, have: Sequence[str], label: str) -> dict[str, Block]:
    """Return the needed components for the values of a quantized weight: name -> rows and columns per element.

    ``described`` is its format in the notation of :func:`describe_format`, for example ``"mxfp8 kFloat8E4M3"``. Local
    operation. Raises CheckpointError if the format is unknown, or components of both directions are missing.
    """
    name, *_, dtype = described.split()
    row = FORMATS.get(name, unknown_format(name))
    for choice in row.directions() if dtype in row.elements else ():
        if set(choice) <= set(have):
            return choice
    formats = [row for row in FORMATS.values() if row.buffers]
    *elements, last = dict.fromkeys(element for row in formats for element in row.elements)
    raise CheckpointError(
        f"{label}: values of a quantized weight",
        expected=f"components of one of {', '.join(map(str, formats))}, of {', '.join(elements)} or {last}",
        got=f"{described} with {', '.join(have)}",
        fix="load it into a model with the same format",
    )


def covering(
    offsets: Sequence[int], sizes: Sequence[int], block: Block
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return offset and size, in component elements, of the blocks that cover a rectangle, which may split blocks."""
    if block is None:  # a value of the unsharded weight is one element
        return (0,), (1,)
    steps = _steps(block, offsets)
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
    """Return the values of a rectangle of the weight, bitwise equal to TE's ``dequantize(dtype=torch.float32)``.

    ``described`` is as for :func:`needed_components`, whose result is ``needed``. ``parts`` contains the elements of
    each component that :func:`covering` selects, not transposed. The result has shape ``sizes``. Local operation.
    """

    def crop(values: torch.Tensor, block: Block) -> torch.Tensor:
        """Extract the rectangle from the blocks that cover it."""
        starts = zip(offsets, sizes, _steps(block, offsets), strict=True)
        return values[tuple(slice(o % s, o % s + n) for o, n, s in starts)]

    data_name, scale_name = list(needed)[:2]
    codes, dtype = parts[data_name].view(torch.uint8), described.split()[-1]
    if dtype in FLOAT8:
        data = codes.view(FLOAT8[dtype]).float()
    else:  # pairs of FP4 values, low four bits first
        table = torch.tensor(_FP4, dtype=torch.float32, device=codes.device)
        paired = 0 if data_name.startswith("columnwise") else 1
        pair = torch.stack((table[codes.long() & 15], table[codes.long() >> 4]), dim=paired + 1)
        data = pair.flatten(paired, paired + 1)
    data = crop(data, needed[data_name])
    scale = parts[scale_name]
    block = needed[scale_name]
    if block is None:
        return data * scale.float().reshape(())
    row = FORMATS[described.split()[0]]
    number = next(buffer.number for buffer in row.buffers if buffer.name == scale_name)
    factor = scale.view(number).float()
    amax = next((parts[n] for n in needed if n.startswith("amax")), None)
    if amax is not None:
        # Multiply in the kernels' order.
        largest = torch.tensor(1.0 / _NVFP4_MAX, dtype=torch.float32, device=amax.device)
        factor = factor * amax.float().reshape(()) * largest
    for dim, step in enumerate(block):
        factor = factor.repeat_interleave(step, dim) if step > 1 else factor
    return data * crop(factor, block)


# --- packed tensors

# [Note: packed tensors] FSDP2 all-gathers any number of buffers and concatenates them along the shard dim, with three
# exceptions (torch 2.11 to 2.15, ``foreach_all_gather_copy_out``):
#
# - Over a shard axis of size 1 it copies only the first of several buffers. Buffers of experts are then sent as one
#   flat tensor (:func:`pack_flat`), and others are not sent at all (``fsdp_hooks.py``).
# - Along dims other than the first it assumes that every buffer has the parameter's shape. Scales and NVFP4 data (two
#   values per byte) do not.
# - The same applies to uneven shards.
#
# In the last two cases the bytes of all buffers are sent in packed tensors: one or more uint8 tensors of the shard's
# shape (:func:`pack_bytes`). After the all-gather, each rank's bytes are extracted and each buffer is assembled. A
# weight of N values then sends multiples of N bytes (two for MXFP8 and float8-block in one direction, as many as
# bf16), which temporarily use additional memory.


class BufferLocations(NamedTuple):
    """Byte offsets of buffers, with their dtypes."""

    buffer: PackedBuffer
    dtypes: tuple[torch.dtype, ...]

    def typed(self, memory: torch.Tensor) -> Iterator[torch.Tensor]:
        """Yield the buffers in the last dim of ``memory``, contiguous. Local operation."""
        for piece, dtype in zip(self.buffer.views(memory), self.dtypes, strict=True):
            yield piece.contiguous().view(dtype)


def pack_flat(inputs: Sequence[torch.Tensor]) -> tuple[torch.Tensor, BufferLocations]:
    """Pack the bytes of buffers into one flat uint8 tensor. Local operation."""
    parts = [tensor.reshape(-1).view(torch.uint8) for tensor in inputs]
    # Align to 256 bytes for kernels and vectorized copies, as torch's CUDA allocator does within a block.
    buffer = PackedBuffer(tuple(part.numel() for part in parts), 256)
    locations = BufferLocations(buffer, tuple(tensor.dtype for tensor in inputs))
    return buffer.pack(parts, torch.uint8, inputs[0].device), locations


def pack_bytes(
    inputs: Sequence[torch.Tensor], shape: tuple[int, ...]
) -> tuple[tuple[torch.Tensor, ...], BufferLocations]:
    """Pack the bytes of all (experts, ...) buffers into uint8 tensors of ``shape``. Local operation."""
    lengths = tuple(buffer.shape[1] * buffer.element_size() for buffer in inputs)
    buffer = PackedBuffer(lengths, 16)  # sufficient alignment for every scale dtype
    chunk_size = math.prod(shape[1:])
    count = max(1, math.ceil(buffer.numel / chunk_size))
    flat = torch.zeros((shape[0], count * chunk_size), dtype=torch.uint8, device=inputs[0].device)
    for source, piece in zip(inputs, buffer.views(flat), strict=True):
        piece.copy_(source.contiguous().view(torch.uint8).view(piece.shape))
    parts = flat.view(shape[0], count, chunk_size).unbind(1)
    locations = BufferLocations(buffer, tuple(source.dtype for source in inputs))
    return tuple(part.contiguous().view(shape) for part in parts), locations


def bytes_of_ranks(
    outputs: Sequence[torch.Tensor], shape: Sequence[int], dim: int, ranks: int
) -> torch.Tensor:
    """Return (experts, ranks, bytes) of packed tensors sharded along ``dim`` of an (experts, rows, columns) shard.

    ``outputs`` are the results of FSDP2's all-gather: memory of the unsharded shape with an arbitrary view shape.
    """
    rank_shape = (*shape[:dim], ranks, *shape[dim:])
    parts = [output.view(rank_shape).movedim(dim, 1).reshape(shape[0], ranks, -1) for output in outputs]
    return torch.cat(parts, dim=-1)
