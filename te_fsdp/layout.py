"""Where the pieces of a parameter lie, and how each strategy stores it: pure data and arithmetic, no TE, no tensor.

Words (see docs/concepts): *original* is the parameter as one process would hold it (tp size 1); *tp-local* is
one tensor-parallel rank's part of it.

    plain                     stacked, two blocks (gated fc1), tp = 2
    original   tp-local 0     original    tp-local 0   tp-local 1
    +-----+    +-----+        +------+    +------+     +------+
    |  0  |    |  0  |        | G_0  |    | G_0  |     | G_1  |
    +-----+    +-----+        | G_1  |    +------+     +------+
    |  1  |                   +------+    | U_0  |     | U_1  |
    +-----+                   | U_0  |    +------+     +------+
                              | U_1  |
                              +------+

A stacked tp-local tensor is not a contiguous slice of the original: ``Shard(0)`` describes it only as long as
the tensor-parallel size does not change. The layout stays with the parameter so that initialisation,
reports and checkpoints can be exact, or refuse.

The placement table (``*_rules``) gives each parameter of a module kind and parallel mode its rule. Source of
every row: facts of TransformerEngine 2.20.2 (``pytorch/module/{linear,layernorm_linear,layernorm_mlp,
grouped_linear}.py``, ``pytorch/attention``), the same in 2.18 and 2.19. Which replicated parameters have partial
gradients:

- under sequence parallelism each rank sees its own tokens, hence norm weights and row biases sum over ``tp``;
- q/k norms see only the rank's own heads, hence they always sum;
- without sequence parallelism TE all-reduces the input gradient before it reaches the norm, and every rank
  adds the same row bias, hence nothing is summed.

TE counts the experts of a ``GroupedLinear`` from 0 on every rank. Under expert parallelism names (of state dicts, DCP,
optimizers' states) would take one expert for another. So parameters are registered under global indices:

    4 experts, ep = 2          rank 0 of ep             rank 1 of ep
    TE's names                 weight0  weight1         weight0  weight1
    registered names           weight0  weight1         weight2  weight3

Ranks follow each other as ``torch.chunk`` cuts. A rank's own range therefore begins at or behind the number of its
experts, unless it is the first: no name of TE's is a registered name of another expert.

A rank's local shard is cut first over ``tp`` (following the layout), then over the FSDP shard axis (even ceil-chunks of
the tp-local tensor, as FSDP2 does it); it is made of rectangles of the original (:class:`Box`). Of a gated fc1 with 8
rows tp rank 0 of 2 holds original rows 0-1 (gate) and 4-5 (up), FSDP rank 0 of 2 in it rows 0-1, FSDP rank 1 rows 4-5.

What strategies cut (:data:`STORAGE` is the same with ``dp_replicate``):

                         held between steps            gathered          gathered weights     gradients are reduced,
                         weights  grads   optimizer    (all-gather)      are released after   several microbatches
    no_shard             whole    whole   whole        never             -                    with the last one
    optim                cut      whole   cut          once per step     the last backward    with the last one
    optim_grads          cut      cut     cut          once per step     the last backward    with each one
    optim_grads_params   cut      cut     cut          in each forward   forward, and         with each one
                                                       and backward      backward

The two middle columns are what a training loop gets that says which microbatch is the last one
(``te_fsdp.microbatch``). In a plain loop each backward counts as the last one.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType

from te_fsdp.axes import AXES
from te_fsdp.errors import MeshError, PlacementError


@dataclass(frozen=True)
class Layout:
    """How tp-local rows lie in the original: in one ``"plain"`` block, in ``"stacked"`` ones, or ``"grouped"``.

    Stacked blocks lie one under the other along dim 0; ``blocks`` are their relative heights: ``(1, 1)`` for
    ``[gate; up]``, ``(np, ng, ng)`` for a fused, non-interleaved QKV with ``np`` query heads and ``ng`` groups of keys.
    A grouped tensor is one block with a leading dim of experts.
    """

    kind: str = "plain"
    blocks: tuple[int, ...] = (1,)

    def __post_init__(self) -> None:
        assert self.kind in ("plain", "stacked", "grouped"), self.kind
        assert len(self.blocks) >= 1 and all(b > 0 for b in self.blocks), self.blocks
        assert (self.kind == "stacked") == (len(self.blocks) > 1), self

    @property
    def is_stacked(self) -> bool:
        """Whether tp-local rows come from several separate ranges of the original."""
        return self.kind == "stacked"

    @property
    def is_grouped(self) -> bool:
        """Whether dim 0 counts experts."""
        return self.kind == "grouped"

    def __str__(self) -> str:
        return self.kind if not self.is_stacked else f"stacked{self.blocks}"


PLAIN = Layout()
GROUPED = Layout("grouped")


@dataclass(frozen=True)
class ParameterRule:
    """Tensor-parallel facts of one parameter."""

    #: Tensor dim that the ``tp`` axis cuts, or ``None`` for a parameter replicated over ``tp``.
    shard_dim: int | None
    layout: Layout = PLAIN  #: How the tp-local rows lie in the original
    #: Whether each ``tp`` rank computes only its contribution to the gradient of this replicated parameter, so that
    #: contributions must be summed over ``tp``.
    partial_grad: bool = False
    quantizable: bool = False  #: Whether TE may hold this parameter in a quantized format (weights of GEMMs)

    def __post_init__(self) -> None:
        assert not (self.partial_grad and self.shard_dim is not None), "a sharded parameter owns its gradient"
        assert not (self.layout.is_stacked and self.shard_dim not in (0, None)), (
            "blocks are stacked along dim 0"
        )


#: Activations whose fc1 produces two stacked parts ``[gate; up]`` (TE 2.20.2
#: ``pytorch/module/layernorm_mlp.py``).
GATED_ACTIVATIONS = frozenset({"geglu", "glu", "qgeglu", "reglu", "sreglu", "swiglu", "clamped_swiglu"})
_GATED = Layout("stacked", (1, 1))


def linear_rules(
    weight_names: Iterable[str],
    bias_names: Iterable[str],
    parallel_mode: str | None,
    *,
    sequence_parallel: bool = False,
    layout: Layout = PLAIN,
) -> dict[str, ParameterRule]:
    """Rules of Linear and LayerNormLinear: weights ``(out, in)``, biases ``(out,)``, the norm's parameters ``(in,)``.

    TE splits a fused projection into several weights where asked to. ``layout`` is that of a fused weight and its bias
    under ``"column"``; with ``sequence_parallel`` activations outside the GEMM are cut along the sequence.
    """
    dim = {"column": 0, "row": 1, None: None}[parallel_mode]
    weight = ParameterRule(dim, layout if dim == 0 else PLAIN, quantizable=True)
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
    """Rules of LayerNormMLP: fc1 column-parallel (stacked when gated), fc2 row-parallel, the rest replicated."""
    layout = _GATED if activation in GATED_ACTIVATIONS else PLAIN
    shared = ParameterRule(None, partial_grad=sequence_parallel)
    return {
        **dict.fromkeys(("layer_norm_weight", "layer_norm_bias", "fc2_bias"), shared),
        "fc1_weight": ParameterRule(0, layout, quantizable=True),
        "fc1_bias": ParameterRule(0, layout),
        "fc2_weight": ParameterRule(1, quantizable=True),
    }


def grouped_linear_rules(
    weight_names: Iterable[str], bias_names: Iterable[str], parallel_mode: str | None
) -> dict[str, ParameterRule]:
    """Rules of GroupedLinear with one 2-D weight ``(out, in)`` per expert and an optional bias ``(out,)`` each."""
    dim = {"column": 0, "row": 1, None: None}[parallel_mode]
    return {
        **{name: ParameterRule(dim, quantizable=True) for name in weight_names},
        **{name: ParameterRule(0 if parallel_mode == "column" else None) for name in bias_names},
    }


def single_grouped_rules(
    parameter_names: Iterable[str], parallel_mode: str | None
) -> dict[str, ParameterRule]:
    """Rules of GroupedLinear's single parameters: ``weight`` (experts, out, in) and ``bias`` (experts, out).

    Dims are those of one expert's tensor plus one: the 2-D placements on this tensor would cut the experts.
    """
    dim = {"column": 1, "row": 2, None: None}[parallel_mode]
    table = {
        "weight": ParameterRule(dim, GROUPED, quantizable=True),
        "bias": ParameterRule(1 if parallel_mode == "column" else None, GROUPED),
    }
    return {name: table[name] for name in parameter_names}


def norm_rules(*, sequence_parallel: bool = False, per_head: bool = False) -> dict[str, ParameterRule]:
    """Rules of LayerNorm and RMSNorm; ``per_head`` marks q/k norms inside attention."""
    return dict.fromkeys(("weight", "bias"), ParameterRule(None, partial_grad=sequence_parallel or per_head))


_NAME = re.compile(r"(weight|bias)(0|[1-9]\d*)")


@dataclass(frozen=True)
class ExpertRange:
    """The experts that one rank holds: ``count`` (TE's ``num_gemms``) of ``total``, from the global index ``first`` on.

    ``most`` is how many the first rank holds, and all others but the last; 0 for as many as this one.
    """

    first: int
    count: int
    total: int
    most: int = 0

    def counts(self) -> tuple[int, int]:
        """How many experts the first rank of ``ep`` holds, and how many the last: the same on every rank."""
        most = self.most or self.count
        return most, self.total - (math.ceil(self.total / most) - 1) * most

    def registered_name(self, name: str) -> str:
        """The name under which a parameter that TE calls ``name`` is registered; other names as they are."""
        found = _NAME.fullmatch(name)
        if found is None or int(found[2]) >= self.count:
            return name
        return f"{found[1]}{int(found[2]) + self.first}"

    def is_elsewhere(self, name: str) -> bool:
        """Whether ``name`` is the registered name of an expert's parameter that another rank holds."""
        index = expert_index(name)
        return index is not None and index < self.total and not self.first <= index < self.first + self.count


def expert_index(name: str) -> int | None:
    """The number in an expert's parameter name (``weight12``), ``None`` for other names."""
    found = _NAME.fullmatch(name)
    return None if found is None else int(found[2])


def expert_ranges(counts: Sequence[int], label: str) -> list[ExpertRange]:
    """The range of each rank along ``ep``, from how many experts (``num_gemms``) each holds.

    Raises ``MeshError`` for other numbers than ``torch.chunk`` gives, and for a rank without experts.
    """
    total, ranks = sum(counts), len(counts)
    step = -(-total // ranks)
    fitting = [max(0, min(step, total - rank * step)) for rank in range(ranks)]
    if list(counts) != fitting or 0 in counts:
        even = "choose an ep size that divides the number of experts"
        raise MeshError(
            f"{label}: experts over ep={ranks}",
            expected=f"{total} experts dealt out as {fitting}, at least one on each rank",
            got=f"num_gemms of the ranks {list(counts)}",
            why="Which expert a weight belongs to follows from how many the ranks before hold",
            fix="build it with num_gemms=len(meshes.experts(total))" if 0 not in fitting else even,
        )
    return [ExpertRange(rank * step, count, total, step) for rank, count in enumerate(counts)]


@dataclass(frozen=True)
class Box:
    """A rectangle that a local shard and the original tensor have in common: its offsets in each, and its extents."""

    original: tuple[int, ...]
    local: tuple[int, ...]
    sizes: tuple[int, ...]

    def original_slices(self) -> tuple[slice, ...]:
        """Index of this box in the original tensor."""
        return slices(self.original, self.sizes)

    def local_slices(self) -> tuple[slice, ...]:
        """Index of this box in the local shard."""
        return slices(self.local, self.sizes)


def slices(offsets: Sequence[int], sizes: Sequence[int]) -> tuple[slice, ...]:
    """Index of a rectangle."""
    return tuple(slice(at, at + size) for at, size in zip(offsets, sizes, strict=True))


@dataclass(frozen=True)
class Coordinates:
    """A rank's place on the axes that cut a parameter; size 1 where an axis does not.

    FSDP2 cuts ``fsdp_dim``; ``ep`` cuts dim 0 of what ``tp`` leaves, before FSDP2 does.
    """

    tp_size: int = 1
    tp_rank: int = 0
    fsdp_size: int = 1
    fsdp_rank: int = 0
    fsdp_dim: int = 0
    ep_size: int = 1
    ep_rank: int = 0


def chunk_range(length: int, chunks: int, index: int) -> tuple[int, int]:
    """Half-open range of chunk ``index`` when ``length`` is cut as ``torch.chunk`` cuts it; empty past the end."""
    step = -(-length // chunks) if length else 0
    return min(index * step, length), min((index + 1) * step, length)


def shard_boxes(
    original_shape: Sequence[int], rule: ParameterRule, at: Coordinates, *, name: str = "parameter"
) -> tuple[tuple[int, ...], list[Box]]:
    """Local shape of the shard ``at`` a place and the boxes that tile it, in local order; none for an empty shard.

    Raises ``PlacementError`` where tp does not divide the cut dim, or a stacked block, of ``original_shape`` (at tp
    size 1).
    """
    local_shape, found = _tp_boxes(tuple(original_shape), rule, at, name)
    for dim, size, rank in ((0, at.ep_size, at.ep_rank), (at.fsdp_dim, at.fsdp_size, at.fsdp_rank)):
        if size > 1 and local_shape:
            low, high = chunk_range(local_shape[dim], size, rank)
            local_shape, found = _put(local_shape, dim, high - low), cut_boxes(found, dim, low, high)
    return local_shape, [box for box in found if 0 not in box.sizes]


def chunk_boxes(
    original_shape: Sequence[int], cuts: Iterable[tuple[int, int, int]]
) -> tuple[tuple[int, ...], list[Box]]:
    """Return the local shape and the boxes after consecutive cuts, each a dim, a number of chunks and an index.

    The box list is empty for an empty shard.
    """
    shape = tuple(original_shape)
    zeros = (0,) * len(shape)
    found: tuple[Box, ...] = (Box(zeros, zeros, shape),)
    for dim, chunks, index in cuts:
        low, high = chunk_range(shape[dim], chunks, index)
        shape, found = _put(shape, dim, high - low), cut_boxes(found, dim, low, high)
    return shape, [box for box in found if 0 not in box.sizes]


def cut_boxes(boxes: Iterable[Box], dim: int, low: int, high: int) -> tuple[Box, ...]:
    """The parts of boxes within the local range [low, high) of ``dim``, in coordinates of that range."""
    found = []
    for box in boxes:
        start = max(box.local[dim], low)
        stop = min(box.local[dim] + box.sizes[dim], high)
        if start < stop and 0 not in box.sizes:
            shift = start - box.local[dim]
            original = _put(box.original, dim, box.original[dim] + shift)
            found.append(Box(original, _put(box.local, dim, start - low), _put(box.sizes, dim, stop - start)))
    return tuple(found)


def block_heights(rows: int, rule: ParameterRule) -> list[int]:
    """Return the height of each block of a layout in an original tensor with this number of rows."""
    return [rows * part // sum(rule.layout.blocks) for part in rule.layout.blocks]


def _tp_boxes(
    shape: tuple[int, ...], rule: ParameterRule, at: Coordinates, name: str
) -> tuple[tuple[int, ...], tuple[Box, ...]]:
    """Shape of the tp-local tensor and its boxes: one when plain, one per block when stacked."""
    zeros = (0,) * len(shape)
    if rule.shard_dim is None or at.tp_size == 1:
        return shape, (Box(zeros, zeros, shape),)
    dim, rows = rule.shard_dim, shape[rule.shard_dim]
    heights = block_heights(rows, rule)
    if sum(heights) != rows or any(h % at.tp_size for h in heights):
        raise PlacementError(
            f"{name}: dim {dim} of shape {shape}, layout {rule.layout}",
            expected=f"every block divisible by tp size {at.tp_size}",
            got=f"block sizes {heights}",
            fix="choose a dimension or a tp size that divides",
        )
    boxes, block_start, local_start = [], 0, 0
    for height in heights:
        part = height // at.tp_size
        original = _put(zeros, dim, block_start + at.tp_rank * part)
        boxes.append(Box(original, _put(zeros, dim, local_start), _put(shape, dim, part)))
        block_start, local_start = block_start + height, local_start + part
    return _put(shape, dim, local_start), tuple(boxes)


def _put(values: tuple[int, ...], index: int, value: int) -> tuple[int, ...]:
    """``values`` with one entry replaced."""
    return (*values[:index], value, *values[index + 1 :])


# --- strategies


class SyncMode(Enum):
    """How a backward counts."""

    #: As the last one of its optimizer step: all gradients are reduced, gathered weights released. The default.
    LAST = "last"
    #: Others follow: gradients are reduced where that saves memory, weights kept where the strategy keeps them.
    ACCUMULATE = "accumulate"
    NO_SYNC = "no_sync"  #: Others follow, and none of this one's gradients is reduced


@dataclass(frozen=True)
class Storage:
    """How parameters of one kind are stored: a row of :data:`STORAGE`.

    Placements have a letter for each of (``dp_replicate``, ``dp_shard``): ``R`` where every rank of the axis holds the
    whole, ``S`` where each holds a piece, ``P`` where each holds a contribution that is still to be added up.
    """

    strategy: str  #: The user's word for what is cut over ``dp_shard``, or :data:`REPLICATED`
    outer: str  #: The user's word for what is cut over ``dp_replicate``
    parameter: str  #: Of the parameter between two steps
    gradient: str  #: Of its gradient after a backward that reduces
    optimizer: str  #: Of its main weight and of the optimizer's states
    #: When it is gathered: ``"never"``, once per ``"step"``, or in each ``"pass"`` (forward and backward).
    gather: str
    reduce: str  #: With which backward of a step its gradient is reduced: the ``"last"`` or ``"each"``

    @functools.cached_property
    def is_whole(self) -> bool:
        """Whether every data-parallel rank holds the whole parameter: FSDP2 knows nothing of it."""
        return self.parameter == "RR"

    @functools.cached_property
    def cut_further(self) -> tuple[str, ...]:
        """The axes that cut main weight and optimizer state, though every rank of them holds the parameter alike."""
        columns = zip(AXES, self.parameter, self.optimizer, strict=False)
        return tuple(axis for axis, parameter, optimizer in columns if parameter != optimizer)

    def reduces(self, mode: SyncMode) -> bool:
        """Whether a backward ends with gradients reduced over ``dp_shard``."""
        return mode is SyncMode.LAST or (mode is SyncMode.ACCUMULATE and self.reduce == "each")

    def releases(self, mode: SyncMode) -> bool:
        """Whether a backward ends with weights released."""
        return mode is SyncMode.LAST or self.gather == "pass"

    def __str__(self) -> str:
        return self.strategy


#: What users write. ``no_shard`` is the only one without FSDP2.
STRATEGIES = ("no_shard", "optim", "optim_grads", "optim_grads_params")
#: Over ``dp_replicate``: every rank has the whole state of its ``dp_shard`` group (HSDP), or main weights and
#: optimizer state are cut over both axes (HFSDP).
OUTER_STRATEGIES = ("no_shard", "optim")
#: Of parameters that stay whole in a unit that is cut (:func:`te_fsdp.fsdp_no_shard`).
REPLICATED = "fsdp_no_shard"

_ROWS = (
    #        strategy              outer       parameter gradient optimizer gather   reduce
    Storage("no_shard",           "no_shard",  "RR",     "RR",    "RR",     "never", "last"),
    Storage("optim",              "no_shard",  "RS",     "RS",    "RS",     "step",  "last"),
    Storage("optim_grads",        "no_shard",  "RS",     "RS",    "RS",     "step",  "each"),
    Storage("optim_grads_params", "no_shard",  "RS",     "RS",    "RS",     "pass",  "each"),
    Storage(REPLICATED,               "no_shard",  "RR",     "RR",    "SS",     "never", "last"),
    Storage("no_shard",           "optim",     "RR",     "RR",    "RR",     "never", "last"),
    Storage("optim",              "optim",     "RS",     "PS",    "SS",     "step",  "last"),
    Storage("optim_grads",        "optim",     "RS",     "PS",    "SS",     "step",  "each"),
    Storage("optim_grads_params", "optim",     "RS",     "PS",    "SS",     "pass",  "each"),
    Storage(REPLICATED,               "optim",     "RR",     "RR",    "SS",     "never", "last"),
)  # fmt: skip

#: The table, by strategy and outer strategy.
STORAGE: Mapping[tuple[str, str], Storage] = MappingProxyType({(r.strategy, r.outer): r for r in _ROWS})
