"""Checks that a quantized weight can be trained. ``docs/support.md`` lists the combinations."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from te_fsdp.errors import PlacementError, PrecisionError
from te_fsdp.layout import ParameterRule
from te_fsdp.upstream import te as _te, torch_dtensor as _torch
from te_fsdp.upstream.te_formats import FORMATS, NVFP4_ROWS, NVFP4_SQUARES, Format, has_amax_history


@dataclass(frozen=True)
class Grid:
    """Sizes of the axes that shard weights, and of the axis that replicates them."""

    dp_replicate: int = 1
    dp_shard: int = 1
    tp: int = 1

    def __str__(self) -> str:
        return f"dp_replicate={self.dp_replicate}, dp_shard={self.dp_shard}, tp={self.tp}"


@dataclass(frozen=True)
class Weight:
    """A weight that TE stores quantized."""

    label: str  #: Full name, for messages
    shape: tuple[int, ...]  #: tp-local
    format: Format
    rule: ParameterRule  #: How tp shards the weight, and how its rows are stacked
    block: int  #: Rows and columns per scale, the larger of both formats for a hybrid
    tp: int = 1  #: Size of the tp axis

    @staticmethod
    def from_quantizer(
        quantizer: Any, label: str, shape: tuple[int, ...], rule: ParameterRule, tp: int
    ) -> Weight:
        """Return the description of a weight, or of one expert's weight, for a TE quantizer."""
        formats = [_te.format_of_quantizer(part) for part in _te.quantizers_of_parts(quantizer)]
        largest = max(row.block or 1 for row in FORMATS.values())  # upper bound for unknown formats
        block = max(row.block or largest for row in formats)
        return Weight(label, shape, _te.format_of_quantizer(quantizer), rule, block, tp)

    def over(self, tp: int) -> Weight | None:
        """Return the same original weight for a different tp size, or ``None`` if it does not divide the weight."""
        dim, shape = self.rule.shard_dim, self.shape
        if dim is not None:
            # `shape` is tp-local, so the size over all tp ranks is the same for every tp size.
            size = shape[dim] * self.tp
            if size % tp:
                return None
            shape = (*shape[:dim], size // tp, *shape[dim + 1 :])
        return replace(self, shape=shape, tp=tp)


def plan_shard_dims(
    weights: Iterable[tuple[str, nn.Module, str, ParameterRule]],
    grid: Grid,
    stays_replicated: Callable[[nn.Module, str], bool],
) -> dict[int, dict[str, int]]:
    """Return the dim that FSDP2 must shard for each weight that is or will be quantized, by ``id`` of owner and name.

    Local operation, before any change. All ranks have the same shapes and raise the same error (:func:`check_fit`).
    ``weights`` contains label, owner, name and rule of each tp-local weight that TE may quantize. ``stays_replicated``
    returns whether data parallelism replicates a module's direct parameter.
    """
    quantized = {}
    for label, module, name, rule in weights:
        parameter, quantizer = module._parameters[name], _te.weight_quantizer(module, name)
        if parameter is None or quantizer is None or stays_replicated(module, name):
            continue
        if grid.dp_shard > 1:
            refuse_sharded_rows(label, quantizer, _torch.local_of(parameter))
        shape = tuple(_torch.local_of(parameter).shape)
        quantized[id(module), name] = Weight.from_quantizer(quantizer, label, shape, rule, grid.tp)
    all_weights = tuple(quantized.values())
    dims: dict[int, dict[str, int]] = {}
    for (owner, name), weight in quantized.items():
        dims.setdefault(owner, {})[name] = check_fit(weight, grid, all_weights)
    return dims


# [Note: blocks and shards] A block format has one scale per block of values (MXFP8 32, NVFP4 16, float8-block
# 128 x 128), so a shard must consist of full blocks. FSDP2 shards a dim of length L over n ranks into chunks
# of ceil(L / n), and its reduce-scatter shards gradients the same way (``torch._chunk_cat``). The chunk sizes
# cannot be chosen. There are three cases:
#
# - Rows divisible by ``n * block``: FSDP2 shards rows, its default.
# - Otherwise, columns divisible by ``n * block``: FSDP2 shards columns (``shard_placement_fn``).
# - Otherwise the weight cannot be sharded. A short last chunk rarely helps: the chunks together lack fewer than ``n``
#   rows, so full blocks are missing only if ``n`` exceeds the block size. TE does not support MXFP8 or NVFP4 for rows
#   that are not a multiple of the block. float8-block has a short last block, which is accepted along dims that neither
#   FSDP2 nor tp shards.
#
# Float8 has one scale per weight. Its shards may have any size, including 0.
#
# The checks use shapes only, so every rank raises the same error without communication.
def fits(weight: Weight, fsdp_size: int, dim: int) -> bool:
    """Return whether all shards of a weight fit its format if FSDP2 shards ``dim`` over ``fsdp_size`` ranks."""
    if weight.format.has_one_scale:
        return dim == 0 or weight.shape[dim] % fsdp_size == 0
    if dim and fsdp_size > 1 and weight.format.block is None:
        return False  # hybrids: no table of their buffers, which a gather along columns needs
    block, parts = weight.block, weight.rule.layout.blocks
    sizes, units = (weight.shape[0], math.prod(weight.shape[1:])), [block, block]
    units[dim] *= fsdp_size
    if weight.format.short_blocks:  # a short last block is accepted along a dim that is not sharded
        tp_dim = weight.rule.shard_dim if weight.tp > 1 else None
        units = [1 if d != tp_dim and unit == block else unit for d, unit in enumerate(units)]
    # No scale may span two of the tensors stacked in one weight: in the original they are not adjacent.
    stacked = len(parts) == 1 or all(sizes[0] * part // sum(parts) % block == 0 for part in parts)
    return stacked and all(size % unit == 0 for size, unit in zip(sizes, units, strict=True))


def fitting_dim(weight: Weight, fsdp_size: int) -> int | None:
    """Return the dim that FSDP2 must shard: rows if they fit, else columns if those do, else ``None``."""
    return next((dim for dim in (0, 1) if fits(weight, fsdp_size, dim)), None)


def check_fit(
    weight: Weight, grid: Grid, all_weights: Sequence[Weight] = (), *, dim: int | None = None
) -> int:
    """Return the dim that FSDP2 can shard: ``dim`` if it is given, else rows or columns.

    Local operation with the same result on every rank. If no dim fits, PlacementError names the weight, its shape, the
    nearest mesh that fits all of ``all_weights``, and the nearest shape.
    """
    fitting = fitting_dim(weight, grid.dp_shard) if dim is None else dim
    if fitting is not None and fits(weight, grid.dp_shard, fitting):
        return fitting
    block, parts, count = weight.block, weight.rule.layout.blocks, grid.dp_shard
    rows, columns = weight.shape[0], math.prod(weight.shape[1:])
    heights = [rows * part // sum(parts) for part in parts]
    if dim is None and weight.format.block is None:
        dim = 0  # hybrids are never sharded along columns
    problem = f"{weight.label}: {weight.format} weight of tp-local shape {weight.shape}"
    got = f"{rows} rows and {columns} columns"
    why = f"One scale spans {block} rows or columns; a shard boundary within a block has no correct scale"
    if weight.rule.layout.is_stacked and any(height % block for height in heights):
        problem = f"{weight.label}: stacked {weight.format} weight of tp-local shape {weight.shape}"
        expected = f"each of the {len(parts)} tensors stacked in it to have a multiple of {block} rows"
        got = f"{heights} rows"
        why = "A scale would span rows that are not adjacent in the unsharded weight, so checkpoints could not store it"
    elif weight.format.has_one_scale:  # used only if the caller chose the dim
        expected = f"dim {dim} divisible by the {count} FSDP rank(s) that shard it"
        why = "FSDP2 shards dims other than the first only if they divide evenly"
    elif count == 1:
        expected = f"rows and columns divisible by {block}"
    elif dim is None:
        expected = f"rows or columns divisible by {count} FSDP ranks * {block}, and the others by {block}"
    else:
        problem += f", sharded along dim {dim}" if dim else ""
        first, second = ("columns", "rows") if dim else ("rows", "columns")
        expected = f"{first} divisible by {count} FSDP ranks * {block} and {second} divisible by {block}"
    shape = _nearest_shape(weight, grid, (0, 1) if dim is None else (dim,))
    fix = f"{_nearest_grid(all_weights or (weight,), grid)}, or {shape}, or high-precision weights"
    raise PlacementError(problem, expected=expected, got=got, why=why, fix=fix)


def _nearest_grid(weights: Sequence[Weight], grid: Grid) -> str:
    """Return the mesh of the same number of ranks nearest to the given one on which all weights fit, as a string."""

    def fits_all(other: Grid) -> bool:
        moved = [weight.over(other.tp) for weight in weights]
        return all(w is not None and fitting_dim(w, other.dp_shard) is not None for w in moved)

    def distance(other: Grid) -> float:
        # In logarithms, so that half as many and twice as many ranks are equally near.
        return abs(math.log(grid.tp / other.tp)) + abs(math.log(grid.dp_shard / other.dp_shard))

    world = grid.dp_replicate * grid.dp_shard * grid.tp
    # Only smaller tp sizes: they divide everything that the larger one divides, including heads.
    sizes = [(shard, tp) for tp in _divisors(grid.tp) for shard in _divisors(world // tp)]
    grids = [Grid(world // tp // shard, shard, tp) for shard, tp in sizes]
    best = min(filter(fits_all, grids), key=distance, default=None)
    if best is None:
        return "no mesh of these ranks fits; change the weight's shape"
    if best == grid:  # only the caller's dim is wrong
        return "let te_fsdp.fully_shard choose the dim, or pass shard_placement_fn to torch's fully_shard"
    return f"use the mesh {best}"


def _divisors(number: int) -> list[int]:
    """Return all divisors, the largest first."""
    return [d for d in range(number, 0, -1) if number % d == 0]


def _nearest_shape(weight: Weight, grid: Grid, dims: tuple[int, ...]) -> str:
    """Format the nearest original shape that fits the mesh if FSDP2 shards one of ``dims``."""
    block, heights = weight.block, weight.rule.layout.blocks  # relative heights, such as numbers of heads
    total = sum(heights) // math.gcd(*heights)
    tp = [grid.tp if weight.rule.shard_dim == dim else 1 for dim in (0, 1)]
    original = (weight.shape[0] * tp[0], math.prod(weight.shape[1:]) * tp[1])

    def nearest(dim: int) -> tuple[int, ...]:
        cuts = [grid.dp_shard if dim == d else 1 for d in (0, 1)]
        # Each stacked tensor needs full blocks per tp rank, and all of them together need full blocks per FSDP rank.
        units = (total * tp[0] * block * cuts[0] // math.gcd(cuts[0], total), tp[1] * block * cuts[1])
        return tuple(max(1, round(h / u)) * u for h, u in zip(original, units, strict=True))

    def distance(shape: tuple[int, ...]) -> float:
        return sum(abs(math.log(s / h)) if h else 1.0 for s, h in zip(shape, original, strict=True))

    kind = "unsharded shape" if grid.tp > 1 else "shape"
    return f"a weight of {kind} {min(map(nearest, dims), key=distance)} instead of {original}"


def check_quantizer(label: str, quantizer: Any) -> None:
    """Raise PrecisionError if the device does not support the format, or FSDP2 a hybrid weight. Local operation."""
    fmt = _te.format_of_quantizer(quantizer)
    is_available, reason = (
        getattr(_te.te(), fmt.available)(return_reason=True) if fmt.available else (True, "")
    )
    if not is_available:
        raise PrecisionError(
            f"{label}: {fmt} weight on this device",
            expected="a format that the device supports",
            why=reason,
            fix="use a different recipe in quantized_model_init",
        )
    # The parts of a hybrid are quantized and gathered by their own classes, each with its own limits.
    parts = [part for part in _te.quantizers_of_parts(quantizer) if part is not quantizer]
    formats = [_te.format_of_quantizer(part).name for part in parts]
    if {NVFP4_SQUARES, NVFP4_ROWS} & {*formats}:
        raise PrecisionError(
            f"{label}: hybrid weight with an NVFP4 part",
            expected="parts in float8, float8-block, MXFP8 or high precision",
            why="TransformerEngine cannot all-gather it (HybridQuantizedTensor.fsdp_pre_all_gather)",
            fix="keep these weights in high precision; the recipe can stay the same",
        )
    if any(map(has_amax_history, map(type, parts))):
        raise PrecisionError(
            f"{label}: hybrid weight with a part in delayed scaling",
            expected="parts in current scaling, float8-block, MXFP8 or high precision",
            why="TransformerEngine reduces the amax history of a module, but not the history of a part of a weight",
            fix="use Float8CurrentScalingQuantizer for this part, or keep these weights in high precision",
        )
    if any(name == "identity" and part.dtype is None for name, part in zip(formats, parts, strict=True)):
        raise PrecisionError(
            f"{label}: hybrid weight with an IdentityQuantizer without dtype",
            expected="IdentityQuantizer(dtype=torch.bfloat16), or the model's dtype",
            got="dtype None",
            why="FusedAdam would replace it by the fp32 main weight, which FSDP2 would all-gather as bf16",
            fix="set a dtype on the factory's IdentityQuantizer",
        )


def refuse_sharded_rows(label: str, quantizer: Any, local: torch.Tensor) -> None:
    """Raise PrecisionError if FSDP2 shards an NVFP4 weight with one scale per 1 x 16 block for training. Local.

    ``quantizer`` comes from :func:`te_fsdp.upstream.te.weight_quantizer`, and ``local`` may not be quantized yet.
    """
    # Weights can have the same rowwise data and different columnwise data. TE's all-gather sends rowwise data only,
    # which is sufficient for weights that were quantized without gradients.
    # type: ignore[attr-defined]
    is_trained = local.get_usages()["columnwise"] if _te.is_quantized(local) else quantizer.columnwise_usage
    if is_trained and _te.format_of_quantizer(quantizer).name == NVFP4_ROWS:
        raise PrecisionError(
            f"{label}: sharded NVFP4 weight with 1-D quantization, one scale per 1 x 16 block",
            expected="2-D quantization of weights, one scale per 16 x 16 block",
            why="An all-gather sends rowwise data, from which the columnwise data of such a weight cannot be computed",
            fix="build the model with NVFP4BlockScaling(disable_2d_quantization=False), the default, or keep it "
            "replicated with te_fsdp.fsdp_no_shard; for inference, build and shard it under torch.no_grad()",
        )
