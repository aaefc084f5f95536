"""What te_fsdp knows about one parameter of a TE module before any tensor moves.

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

TE counts the experts of a ``GroupedLinear`` from 0 on every rank. Under expert parallelism ``weight0`` would then be
another expert's on each rank, and whatever goes by names (state dicts, DCP, optimizers' states) would take one for the
other. So parameters are registered under global indices:

    4 experts, ep = 2          rank 0 of ep             rank 1 of ep
    TE's names                 weight0  weight1         weight0  weight1
    registered names           weight0  weight1         weight2  weight3

Ranks follow each other as ``torch.chunk`` cuts. A rank's own range therefore begins at or behind the number of its
experts, unless it is the first: no name of TE's is a registered name of another expert.

Which rectangle (:class:`Box`) of the original tensor each piece of a local shard is, one arithmetic says for
initialisation and checkpoints: a rank's local shard is cut first over ``tp`` (following the parameter's layout), then
over the FSDP shard axis (even ceil-chunks of the tp-local tensor, as torch's FSDP2 does it).

Example, gated fc1 ``[gate; up]`` with 8 rows, tp = 2, 2 FSDP ranks: tp rank 0 holds original rows 0-1 (gate)
and 4-5 (up); FSDP rank 0 of it keeps local rows 0-1 = original rows 0-1, FSDP rank 1 local rows 2-3 =
original rows 4-5.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from te_fsdp.errors import MeshError, PlacementError


@dataclass(frozen=True)
class Layout:
    """How tp-local rows lie in the original tensor.

    Attributes:
        kind: ``"plain"`` (one block), ``"stacked"`` (blocks one under the other along dim 0) or ``"grouped"``
            (one block with a leading dim of experts).
        blocks: For ``"stacked"``: the relative heights of the blocks, for example ``(1, 1)`` for ``[gate;
            up]`` and ``(np, ng, ng)`` for a fused, non-interleaved QKV with ``np`` query heads and ``ng``
            key-value groups.
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
    """Tensor-parallel facts of one parameter.

    Attributes:
        shard_dim: Tensor dim that the ``tp`` axis cuts, or ``None`` for a parameter replicated over ``tp``.
        layout: How the tp-local rows lie in the original.
        partial_grad: Whether each ``tp`` rank computes only its own contribution to the gradient of this
            replicated parameter, so that contributions must be summed over ``tp`` (sequence parallelism, q/k
            norms).
        quantizable: Whether TE may hold this parameter in a quantized format (weights of GEMMs).
    """

    shard_dim: int | None
    layout: Layout = PLAIN
    partial_grad: bool = False
    quantizable: bool = False

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
    norm_names: Iterable[str] = (),
    layout: Layout = PLAIN,
) -> dict[str, ParameterRule]:
    """Rules of Linear and LayerNormLinear.

    Args:
        weight_names: Weight parameters, shape ``(out, in)`` each (several when TE splits a fused projection).
        bias_names: Bias parameters that exist, shape ``(out,)`` each.
        parallel_mode: TE's ``"column"``, ``"row"`` or ``None``.
        sequence_parallel: Whether activations outside the GEMM are cut along the sequence.
        norm_names: Norm parameters of LayerNormLinear, shape ``(in,)`` each.
        layout: Layout of a column-parallel fused weight and its bias.
    """
    dim = {"column": 0, "row": 1, None: None}[parallel_mode]
    weight = ParameterRule(dim, layout if dim == 0 else PLAIN, quantizable=True)
    if parallel_mode == "column":
        bias = ParameterRule(0, layout)
    else:
        bias = ParameterRule(None, partial_grad=sequence_parallel and parallel_mode == "row")
    norm = ParameterRule(None, partial_grad=sequence_parallel)
    return {
        **dict.fromkeys(norm_names, norm),
        **dict.fromkeys(weight_names, weight),
        **dict.fromkeys(bias_names, bias),
    }


def mlp_rules(
    parameter_names: Iterable[str], activation: str, *, sequence_parallel: bool = False
) -> dict[str, ParameterRule]:
    """Rules of LayerNormMLP: fc1 column-parallel (stacked when gated), fc2 row-parallel, the rest replicated."""
    layout = _GATED if activation in GATED_ACTIVATIONS else PLAIN
    shared = ParameterRule(None, partial_grad=sequence_parallel)
    table = {
        "layer_norm_weight": shared,
        "layer_norm_bias": shared,
        "fc1_weight": ParameterRule(0, layout, quantizable=True),
        "fc1_bias": ParameterRule(0, layout),
        "fc2_weight": ParameterRule(1, quantizable=True),
        "fc2_bias": shared,
    }
    return {name: table[name] for name in parameter_names}


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


def norm_rules(
    parameter_names: Iterable[str], *, sequence_parallel: bool = False, per_head: bool = False
) -> dict[str, ParameterRule]:
    """Rules of LayerNorm and RMSNorm; ``per_head`` marks q/k norms inside attention."""
    rule = ParameterRule(None, partial_grad=sequence_parallel or per_head)
    return dict.fromkeys(parameter_names, rule)


def attention_offset_rules(parameter_names: Iterable[str]) -> dict[str, ParameterRule]:
    """Rules of DotProductAttention: the learnable ``softmax_offset``, one value per local head, shape ``(heads,)``."""
    return {name: ParameterRule(0) for name in parameter_names}


_NAME = re.compile(r"(weight|bias)(0|[1-9]\d*)")


@dataclass(frozen=True)
class ExpertRange:
    """The experts that one rank holds.

    Attributes:
        first: Global index of its first expert.
        count: How many it holds: TE's ``num_gemms``.
        total: How many there are over all ranks of ``ep``.
        most: How many the first rank holds, and all others but the last; 0 for as many as this one.
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
    """The range of each rank along ``ep``, from how many experts each holds.

    Args:
        counts: ``num_gemms`` of each rank.
        label: Name of the module, for messages.

    Raises:
        MeshError: Not the numbers that ``torch.chunk`` gives, or a rank without experts.
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
    firsts = [sum(counts[:rank]) for rank in range(ranks)]
    return [ExpertRange(first, count, total, step) for first, count in zip(firsts, counts, strict=True)]


@dataclass(frozen=True)
class Box:
    """One rectangle that a local shard and the original tensor have in common.

    Attributes:
        original: Offsets in the original tensor.
        local: Offsets in the local shard.
        sizes: Extents, the same in both.
    """

    original: tuple[int, ...]
    local: tuple[int, ...]
    sizes: tuple[int, ...]

    def original_slices(self) -> tuple[slice, ...]:
        """Index of this box in the original tensor."""
        return tuple(slice(o, o + s) for o, s in zip(self.original, self.sizes, strict=True))

    def local_slices(self) -> tuple[slice, ...]:
        """Index of this box in the local shard."""
        return tuple(slice(o, o + s) for o, s in zip(self.local, self.sizes, strict=True))


@dataclass(frozen=True)
class Coordinates:
    """A rank's place on the axes that cut a parameter; size 1 where an axis does not.

    Attributes:
        tp_size: Ranks on the tensor-parallel axis.
        tp_rank: This rank's place there.
        fsdp_size: Ranks that FSDP2 shards over.
        fsdp_rank: This rank's place there.
        fsdp_dim: Tensor dim that FSDP2 cuts.
        ep_size: Ranks on the expert-parallel axis, which cuts dim 0 of what ``tp`` leaves, before FSDP2 does.
        ep_rank: This rank's place there.
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
    """Local shape of a shard and the boxes that tile it.

    Args:
        original_shape: Shape of the original tensor (tp size 1).
        rule: The parameter's rule.
        at: The rank's place.
        name: Name for error messages.

    Returns:
        The shard's shape and its boxes, in local order. No box for an empty shard.

    Raises:
        PlacementError: The cut dim, or a stacked block, does not divide by the tensor-parallel size.
    """
    tp_shape, boxes = _tp_boxes(tuple(original_shape), rule, at, name)
    local_shape, found = tp_shape, tuple(boxes)
    for dim, size, rank in ((0, at.ep_size, at.ep_rank), (at.fsdp_dim, at.fsdp_size, at.fsdp_rank)):
        if size > 1 and local_shape:
            low, high = chunk_range(local_shape[dim], size, rank)
            local_shape, found = _put(local_shape, dim, high - low), cut_boxes(found, dim, low, high)
    return local_shape, [box for box in found if 0 not in box.sizes]


def cut_boxes(boxes: Iterable[Box], dim: int, low: int, high: int) -> tuple[Box, ...]:
    """The parts of boxes within the local range [low, high) of ``dim``, in coordinates of that range."""
    return tuple(cut for box in boxes if (cut := _cut(box, dim, low, high)) is not None)


def _tp_boxes(
    shape: tuple[int, ...], rule: ParameterRule, at: Coordinates, name: str
) -> tuple[tuple[int, ...], list[Box]]:
    """Shape of the tp-local tensor and its boxes: one when plain, one per block when stacked."""
    zeros = (0,) * len(shape)
    if rule.shard_dim is None or at.tp_size == 1:
        return shape, [Box(zeros, zeros, shape)]
    dim, rows = rule.shard_dim, shape[rule.shard_dim]
    heights = [rows * part // sum(rule.layout.blocks) for part in rule.layout.blocks]
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
    return _put(shape, dim, local_start), boxes


def _cut(box: Box, dim: int, low: int, high: int) -> Box | None:
    """The part of ``box`` within local range [low, high) of ``dim``, in coordinates of that range."""
    start = max(box.local[dim], low)
    stop = min(box.local[dim] + box.sizes[dim], high)
    if start >= stop or 0 in _put(box.sizes, dim, 1):
        return None
    shift = start - box.local[dim]
    return Box(
        _put(box.original, dim, box.original[dim] + shift),
        _put(box.local, dim, start - low),
        _put(box.sizes, dim, stop - start),
    )


def _put(values: tuple[int, ...], index: int, value: int) -> tuple[int, ...]:
    """``values`` with one entry replaced."""
    return (*values[:index], value, *values[index + 1 :])
