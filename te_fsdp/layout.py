"""Tables of placements on the axes of a mesh: rules of modules, boxes of shards, strategies. Needs no TE, no tensors.

Terms (see docs/concepts): *original* is the unsharded parameter of a single process (tp size 1). *tp-local* is the part
of it on one tensor-parallel rank.

    plain                     stacked, two blocks (gated fc1), tp = 2
    original   tp-local 0     original    tp-local 0   tp-local 1
    +-----+    +-----+        +------+    +------+     +------+
    |  0  |    |  0  |        | G_0  |    | G_0  |     | G_1  |
    +-----+    +-----+        | G_1  |    +------+     +------+
    |  1  |                   +------+    | U_0  |     | U_1  |
    +-----+                   | U_0  |    +------+     +------+
                              | U_1  |
                              +------+

A stacked tp-local tensor is not a contiguous slice of the original: ``Shard(0)`` describes it correctly only while
the tensor-parallel size stays the same. The layout is stored with the parameter, so that initialization, reports and
checkpoints are exact, or raise.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType

from te_fsdp.errors import MeshError, PlacementError
from te_fsdp.mesh_checks import AXES


@dataclass(frozen=True)
class Layout:
    """Mapping of tp-local rows to the original: one ``"plain"`` block, ``"stacked"`` blocks, or ``"grouped"``.

    Stacked blocks follow each other along dim 0. ``blocks`` are their relative heights: ``(1, 1)`` for
    ``[gate; up]``, ``(np, ng, ng)`` for a fused, non-interleaved QKV with ``np`` query heads and ``ng`` key groups.
    A grouped tensor is one block with a leading dim of experts.
    """

    kind: str = "plain"
    blocks: tuple[int, ...] = (1,)

    def __post_init__(self) -> None:
        assert self.kind in ("plain", "stacked", "grouped"), self.kind
        assert len(self.blocks) >= 1 and all(b > 0 for b in self.blocks), self.blocks
        assert (self.kind == "stacked") == (len(self.blocks) > 1), self

    @functools.cached_property
    def is_stacked(self) -> bool:
        """Return whether tp-local rows come from several separate ranges of the original."""
        return self.kind == "stacked"

    @functools.cached_property
    def is_grouped(self) -> bool:
        """Return whether dim 0 indexes experts."""
        return self.kind == "grouped"

    def __str__(self) -> str:
        return self.kind if not self.is_stacked else f"stacked{self.blocks}"


PLAIN = Layout()
GROUPED = Layout("grouped")


@dataclass(frozen=True)
class ParameterRule:
    """Tensor-parallel properties of one parameter."""

    #: Tensor dim that is sharded over ``tp``, or ``None`` for a parameter replicated over ``tp``.
    shard_dim: int | None
    layout: Layout = PLAIN  #: Mapping of the tp-local rows to the original
    #: Whether each ``tp`` rank computes a partial gradient of this replicated parameter, which must be summed over
    #: ``tp``.
    partial_grad: bool = False
    quantizable: bool = False  #: Whether TE may quantize this parameter (weights of GEMMs)

    def __post_init__(self) -> None:
        assert not (self.partial_grad and self.shard_dim is not None), "a sharded parameter owns its gradient"


#: Activations whose fc1 output consists of two stacked parts ``[gate; up]`` (TE 2.20.2
#: ``pytorch/module/layernorm_mlp.py``).
GATED_ACTIVATIONS = frozenset({"geglu", "glu", "qgeglu", "reglu", "sreglu", "swiglu", "clamped_swiglu"})
_GATED = Layout("stacked", (1, 1))


# [Note: placement table] The placement table (``*_rules``) defines the rule of each parameter by module kind
# and parallel mode. Source of every row: TransformerEngine 2.20.2
# (``pytorch/module/{linear,layernorm_linear,layernorm_mlp,grouped_linear}.py``, ``pytorch/attention``),
# unchanged since 2.18. Replicated parameters with partial gradients:
#
# - under sequence parallelism each rank processes its own tokens, so norm weights and row biases are summed over
#   ``tp``;
# - q/k norms process only the rank's own heads, so they are always summed;
# - without sequence parallelism TE all-reduces the input gradient before the norm, and every rank adds the same row
#   bias, so no sum is needed.
def linear_rules(
    weight_names: Iterable[str],
    bias_names: Iterable[str],
    parallel_mode: str | None,
    *,
    sequence_parallel: bool = False,
    layout: Layout = PLAIN,
) -> dict[str, ParameterRule]:
    """Return the rules of Linear and LayerNormLinear: weight ``(out, in)``, bias ``(out,)``, norm ``(in,)``.

    TE can split a fused projection into several weights. ``layout`` is that of a fused weight and its bias under
    ``"column"``. With ``sequence_parallel``, activations outside the GEMM are sharded along the sequence.
    """
    dim = {"column": 0, "row": 1, None: None}[parallel_mode]
    weight = ParameterRule(dim, layout if dim == 0 else PLAIN, quantizable=True)
    # A row-parallel layer adds its bias after the reduction, to the tokens of this rank.
    bias = ParameterRule(None, partial_grad=sequence_parallel and parallel_mode == "row")
    if parallel_mode == "column":
        bias = ParameterRule(0, layout)
    norm = ParameterRule(None, partial_grad=sequence_parallel)
    return {
        **dict.fromkeys(("layer_norm_weight", "layer_norm_bias"), norm),
        **dict.fromkeys(weight_names, weight),
        **dict.fromkeys(bias_names, bias),
    }


def mlp_rules(activation: str, *, sequence_parallel: bool = False) -> dict[str, ParameterRule]:
    """Return the rules of LayerNormMLP: fc1 column-parallel (stacked when gated), fc2 row-parallel, rest replicated."""
    layout = _GATED if activation in GATED_ACTIVATIONS else PLAIN
    replicated = ParameterRule(None, partial_grad=sequence_parallel)
    return {
        **dict.fromkeys(("layer_norm_weight", "layer_norm_bias", "fc2_bias"), replicated),
        "fc1_weight": ParameterRule(0, layout, quantizable=True),
        "fc1_bias": ParameterRule(0, layout),
        "fc2_weight": ParameterRule(1, quantizable=True),
    }


def grouped_linear_rules(
    weight_names: Iterable[str], bias_names: Iterable[str], parallel_mode: str | None
) -> dict[str, ParameterRule]:
    """Return the rules of GroupedLinear: one 2-D weight ``(out, in)`` and an optional bias ``(out,)`` per expert."""
    dim = {"column": 0, "row": 1, None: None}[parallel_mode]
    return {
        **{name: ParameterRule(dim, quantizable=True) for name in weight_names},
        **{name: ParameterRule(0 if parallel_mode == "column" else None) for name in bias_names},
    }


def single_grouped_rules(
    parameter_names: Iterable[str], parallel_mode: str | None
) -> dict[str, ParameterRule]:
    """Return the rules of GroupedLinear's single parameters: ``weight`` (experts, out, in) and ``bias`` (experts, out).

    Each sharded dim is that of one expert's tensor plus one, because dim 0 indexes the experts.
    """
    dim = {"column": 1, "row": 2, None: None}[parallel_mode]
    table = {
        "weight": ParameterRule(dim, GROUPED, quantizable=True),
        "bias": ParameterRule(1 if parallel_mode == "column" else None, GROUPED),
    }
    return {name: table[name] for name in parameter_names}


_EXPERT_NAME = re.compile(r"(weight|bias)(0|[1-9]\d*)")


# [Note: global expert names] TE numbers the experts of a ``GroupedLinear`` from 0 on every rank. Under expert
# parallelism the same name (in state dicts, DCP, optimizer states) would then mean different experts. So
# parameters are registered under global indices:
#
#     4 experts, ep = 2          rank 0 of ep             rank 1 of ep
#     TE's names                 weight0  weight1         weight0  weight1
#     registered names           weight0  weight1         weight2  weight3
#
# Experts are distributed over ranks as in ``torch.chunk``. Except on the first rank, the first global index
# of a rank is therefore at least its number of experts. So TE's local name never equals the registered name
# of a different expert.
@dataclass(frozen=True)
class ExpertRange:
    """The experts of one rank, which are consecutive."""

    first: int  #: Global index of the first one
    count: int  #: Their number, TE's ``num_gemms``
    total: int  #: Number of experts on all ranks of ``ep``
    most: int = 0  #: Number on each rank except the last; 0: ``count``

    def counts(self) -> tuple[int, int]:
        """Return the number of experts on the first and on the last rank of ``ep``, the same on every rank."""
        most = self.most or self.count
        return most, self.total - (math.ceil(self.total / most) - 1) * most

    def registered_name(self, name: str) -> str:
        """Return the registered name of TE's parameter ``name``. Names without an expert index are unchanged."""
        match = _EXPERT_NAME.fullmatch(name)
        if match is None or int(match[2]) >= self.count:
            return name
        return f"{match[1]}{int(match[2]) + self.first}"

    def is_elsewhere(self, name: str) -> bool:
        """Return whether ``name`` is the registered name of an expert's parameter on a different rank."""
        index = expert_index(name)
        return index is not None and index < self.total and not self.first <= index < self.first + self.count


def expert_index(name: str) -> int | None:
    """Return the number in an expert's parameter name (``weight12``), or ``None`` for other names."""
    match = _EXPERT_NAME.fullmatch(name)
    return None if match is None else int(match[2])


def expert_ranges(counts: Sequence[int], label: str) -> list[ExpertRange]:
    """Return the expert range of each rank along ``ep``, from the number of experts (``num_gemms``) on each.

    Raises ``MeshError`` for numbers that ``torch.chunk`` would not return, and for a rank without experts.
    """
    total, ranks = sum(counts), len(counts)
    step = -(-total // ranks)
    chunked = [max(0, min(step, total - rank * step)) for rank in range(ranks)]
    if list(counts) != chunked or 0 in counts:
        even = "choose an ep size that divides the number of experts"
        raise MeshError(
            f"{label}: experts over ep={ranks}",
            expected=f"{total} experts distributed as {chunked}, at least one on each rank",
            got=f"num_gemms of the ranks {list(counts)}",
            why="The number of experts on the previous ranks determines which expert a weight belongs to",
            fix="build it with num_gemms=len(meshes.experts(total))" if 0 not in chunked else even,
        )
    return [ExpertRange(rank * step, count, total, step) for rank, count in enumerate(counts)]


@dataclass(frozen=True)
class Box:
    """A rectangle shared by a local shard and the original tensor: its offsets in each, and its size."""

    original: tuple[int, ...]
    local: tuple[int, ...]
    sizes: tuple[int, ...]

    def original_slices(self) -> tuple[slice, ...]:
        """Return the slices that select this box in the original tensor."""
        return slices(self.original, self.sizes)

    def local_slices(self) -> tuple[slice, ...]:
        """Return the slices that select this box in the local shard."""
        return slices(self.local, self.sizes)


def slices(offsets: Sequence[int], sizes: Sequence[int]) -> tuple[slice, ...]:
    """Return the slices that select the rectangle with these offsets and sizes."""
    return tuple(slice(offset, offset + size) for offset, size in zip(offsets, sizes, strict=True))


@dataclass(frozen=True)
class Coordinates:
    """A rank's position on the axes that shard a parameter. Axes that do not shard it have size 1.

    FSDP2 shards ``fsdp_dim``. ``ep`` shards dim 0 of the tp-local tensor before FSDP2 does.
    """

    tp_size: int = 1
    tp_rank: int = 0
    fsdp_size: int = 1
    fsdp_rank: int = 0
    fsdp_dim: int = 0
    ep_size: int = 1
    ep_rank: int = 0


def chunk_range(length: int, chunks: int, index: int) -> tuple[int, int]:
    """Return the half-open range of chunk ``index`` as in ``torch.chunk``. The range is empty past the end."""
    step = -(-length // chunks) if length else 0
    return min(index * step, length), min((index + 1) * step, length)


# [Note: order of cuts] A parameter is sharded first over ``tp`` (by the layout), then over the FSDP shard axis (even
# ceil-chunks of the tp-local tensor, as in FSDP2). A shard consists of rectangles of the original (:class:`Box`).
# Example: a gated fc1 with 8 rows. tp rank 0 of 2 has original rows 0-1 (gate) and 4-5 (up). Within it, FSDP rank 0
# of 2 has rows 0-1, FSDP rank 1 rows 4-5.
def shard_boxes(
    original_shape: Sequence[int], rule: ParameterRule, at: Coordinates, *, name: str = "parameter"
) -> tuple[tuple[int, ...], list[Box]]:
    """Return the local shape of the shard ``at`` a position and its boxes in local order, none for an empty shard.

    Raises ``PlacementError`` if tp does not divide the sharded dim, or a stacked block, of ``original_shape`` (at tp
    size 1).
    """
    shape = local_shape = tuple(original_shape)
    zeros, boxes = (0,) * len(shape), None
    if rule.shard_dim is not None and at.tp_size > 1:
        dim, rows, boxes, block_start, local_start = rule.shard_dim, shape[rule.shard_dim], [], 0, 0
        # tp must divide each block: a rank with a part of gate and a different part of up would compute neither.
        heights = block_heights(rows, rule)
        if sum(heights) != rows or any(h % at.tp_size for h in heights):
            raise PlacementError(
                f"{name}: dim {dim} of shape {shape}, layout {rule.layout}",
                expected=f"every block divisible by tp size {at.tp_size}",
                got=f"block sizes {heights}",
                fix="choose a dimension that is divisible by the tp size, or a different tp size",
            )
        for height in heights:
            part = height // at.tp_size
            original = _with_entry(zeros, dim, block_start + at.tp_rank * part)
            boxes.append(Box(original, _with_entry(zeros, dim, local_start), _with_entry(shape, dim, part)))
            block_start, local_start = block_start + height, local_start + part
        local_shape = _with_entry(shape, dim, local_start)
    cuts = ((0, at.ep_size, at.ep_rank), (at.fsdp_dim, at.fsdp_size, at.fsdp_rank))
    return chunk_boxes(local_shape, [cut for cut in cuts if cut[1] > 1 and local_shape], boxes)


def chunk_boxes(
    shape: Sequence[int], cuts: Iterable[tuple[int, int, int]], boxes: Iterable[Box] | None = None
) -> tuple[tuple[int, ...], list[Box]]:
    """Return the local shape and the boxes after consecutive cuts, each a dim, a number of chunks and an index.

    ``boxes`` are those of the tensor of ``shape`` that is cut; by default it is the original. An empty shard has none.
    """
    shape = tuple(shape)
    zeros = (0,) * len(shape)
    boxes = (Box(zeros, zeros, shape),) if boxes is None else boxes
    for dim, chunks, index in cuts:
        low, high = chunk_range(shape[dim], chunks, index)
        shape, boxes = _with_entry(shape, dim, high - low), cut_boxes(boxes, dim, low, high)
    return shape, [box for box in boxes if 0 not in box.sizes]


def cut_boxes(boxes: Iterable[Box], dim: int, low: int, high: int) -> tuple[Box, ...]:
    """Return the boxes clipped to the local range [low, high) of ``dim``, in coordinates of that range."""
    clipped = []
    for box in boxes:
        start = max(box.local[dim], low)
        stop = min(box.local[dim] + box.sizes[dim], high)
        if start < stop and 0 not in box.sizes:
            shift = start - box.local[dim]
            # Clipping moves the start of a box by the same distance in the original tensor.
            original = _with_entry(box.original, dim, box.original[dim] + shift)
            local, sizes = _with_entry(box.local, dim, start - low), _with_entry(box.sizes, dim, stop - start)
            clipped.append(Box(original, local, sizes))
    return tuple(clipped)


def block_heights(rows: int, rule: ParameterRule) -> list[int]:
    """Return the height of each block of a layout in an original tensor with this number of rows."""
    return [rows * part // sum(rule.layout.blocks) for part in rule.layout.blocks]


def _with_entry(values: tuple[int, ...], index: int, value: int) -> tuple[int, ...]:
    """Return ``values`` with the entry at ``index`` replaced by ``value``."""
    return (*values[:index], value, *values[index + 1 :])


# --- strategies


class SyncMode(Enum):
    """Role of a backward in its optimizer step."""

    #: The last backward of its optimizer step: reduces all gradients, reshards all weights. The default.
    LAST = "last"
    #: Not the last one: gradients are reduced if the strategy shards them, weights stay unsharded if it keeps them.
    ACCUMULATE = "accumulate"
    NO_SYNC = "no_sync"  #: Not the last one: no gradient is reduced


@dataclass(frozen=True)
class Storage:
    """Storage of one kind of parameters: a row of :data:`STORAGE`.

    Placements have one letter for each of (``dp_replicate``, ``dp_shard``): ``R`` for a replicated tensor, ``S`` for a
    sharded tensor, ``P`` for a partial sum that is not yet reduced.
    """

    strategy: str  #: The user's name of the strategy over ``dp_shard``, or :data:`REPLICATED`
    outer: str  #: The user's name of the strategy over ``dp_replicate``
    parameter: str  #: Placements of the parameter between two steps
    gradient: str  #: Placements of its gradient after a backward that reduces
    optimizer: str  #: Placements of its main weight and optimizer state
    #: When it is all-gathered: ``"never"``, once per ``"step"``, or in each ``"pass"`` (forward and backward).
    gather: str
    reduce: str  #: Which backward of a step reduces its gradient: the ``"last"`` or ``"each"``

    @functools.cached_property
    def is_replicated(self) -> bool:
        """Return whether the parameter is replicated over data parallelism and not managed by FSDP2."""
        return self.parameter == "RR"

    @functools.cached_property
    def extra_state_axes(self) -> tuple[str, ...]:
        """Return the axes that shard the main weight and optimizer state although they replicate the parameter."""
        columns = zip(AXES, self.parameter, self.optimizer, strict=False)
        return tuple(axis for axis, parameter, optimizer in columns if parameter != optimizer)

    def reduces(self, mode: SyncMode) -> bool:
        """Return whether a backward ends with gradients reduced over ``dp_shard``."""
        return mode is SyncMode.LAST or (mode is SyncMode.ACCUMULATE and self.reduce == "each")

    def releases(self, mode: SyncMode) -> bool:
        """Return whether the weights are resharded at the end of a backward."""
        return mode is SyncMode.LAST or self.gather == "pass"

    def __str__(self) -> str:
        return self.strategy


#: Strategy names in the API. ``no_shard`` is the only one without FSDP2.
STRATEGIES = ("no_shard", "optim", "optim_grads", "optim_grads_params")
#: Strategies over ``dp_replicate``: replicate all state of the ``dp_shard`` group (HSDP), or shard main weights and
#: optimizer state over both axes (HFSDP).
OUTER_STRATEGIES = ("no_shard", "optim")
#: Strategy of replicated parameters in a sharded unit (:func:`te_fsdp.fsdp_no_shard`).
REPLICATED = "fsdp_no_shard"

# [Note: strategies] The strategies shard (:data:`STORAGE` is the same table with ``dp_replicate``):
#
#                          between steps: R replicated, S sharded
#                          weights  gradients  optimizer   all-gather        reshard after       gradients reduced in
#     no_shard             R        R          R           never             -                   the last microbatch
#     optim                S        R          S           once per step     the last backward   the last microbatch
#     optim_grads          S        S          S           once per step     the last backward   each microbatch
#     optim_grads_params   S        S          S           in each forward   each forward and    each microbatch
#                                                          and backward      backward
#
# The last three columns apply to a training loop that marks the last microbatch (``te_fsdp.microbatch``).
# In a plain loop, each backward counts as the last one.
_ROWS = (
    #        strategy              outer       parameter gradient optimizer gather   reduce
    Storage("no_shard",           "no_shard",  "RR",     "RR",    "RR",     "never", "last"),
    Storage("optim",              "no_shard",  "RS",     "RS",    "RS",     "step",  "last"),
    Storage("optim_grads",        "no_shard",  "RS",     "RS",    "RS",     "step",  "each"),
    Storage("optim_grads_params", "no_shard",  "RS",     "RS",    "RS",     "pass",  "each"),
    Storage(REPLICATED,           "no_shard",  "RR",     "RR",    "SS",     "never", "last"),
    Storage("no_shard",           "optim",     "RR",     "RR",    "RR",     "never", "last"),
    Storage("optim",              "optim",     "RS",     "PS",    "SS",     "step",  "last"),
    Storage("optim_grads",        "optim",     "RS",     "PS",    "SS",     "step",  "each"),
    Storage("optim_grads_params", "optim",     "RS",     "PS",    "SS",     "pass",  "each"),
    Storage(REPLICATED,           "optim",     "RR",     "RR",    "SS",     "never", "last"),
)  # fmt: skip

#: The table, by strategy and outer strategy.
STORAGE: Mapping[tuple[str, str], Storage] = MappingProxyType({(r.strategy, r.outer): r for r in _ROWS})
