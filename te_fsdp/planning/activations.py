"""What modules keep from their forward to their backward, by a formula for each kind, and need beside it in backward.

Per token of a rank, with e bytes of an activation (2 in bf16), q bytes of a quantized value with its scales and f
bytes of it in both directions. Sizes are those of one tp rank; under sequence parallelism s tokens of the rank's t
enter and leave a layer.

    module                     kept                                                        tokens
    LayerNormLinear            input e, normalised input e or q, statistics 4 (8)          s
    attention                  query, key, value, output e; log-sum-exp 4 per head         t
    Linear                     input e or q; of attention's projection q alone             t
    LayerNormMLP               input e, normalised input e or f, statistics 4 (8)          s
                               up-projection (and gate) e, activation e or f (float8 q)    t
    GroupedLinear              input e or q                                                rows of its experts
    between two of these       gate, other half, activation, result e                      rows of its experts
    LayerNorm, RMSNorm         input e, statistics 4 (8)                                   s
    Embedding                  indices 8                                                   s
    torch's Linear             input e                                                     s
    cross entropy in fp32      4 per logit                                                 s

Attention is one of TE's that needs no memory beyond that (flash or cuDNN), and experts get equally many tokens. Masks
of dropout, what other modules keep, and what a model of one's own does between its modules are not counted. Checked on
TransformerEngine 2.20.2 on H200s; its own code under emulation saves the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import nn

from te_fsdp import _te
from te_fsdp.layout import GATED_ACTIVATIONS
from te_fsdp.planning.job import Gating

if TYPE_CHECKING:
    from te_fsdp.planning.job import Job, Workload


@dataclass(frozen=True)
class Moment:
    """An instant of a module's backward.

    Attributes:
        temporary: Bytes beyond what is kept; negative where some of that is gone already.
        gradients: Own parameters whose gradients are there; ``None``: all.
        derived: Own parameters whose transposes, or quantized copies, are there; ``None``: all.
    """

    temporary: int
    gradients: tuple[str, ...] | None = None
    derived: tuple[str, ...] | None = None


@dataclass(frozen=True)
class Stage:
    """One module in forward and backward.

    Attributes:
        module: Name.
        kept: Bytes from its forward to its backward.
        moments: Instants of its backward at which memory is high.
        entering: Bytes of what enters a unit that begins with this module: all that is kept under recomputation.
    """

    module: str
    kept: int
    moments: tuple[Moment, ...] = (Moment(0),)
    entering: int = 0


@dataclass(frozen=True)
class _Sizes:
    """Bytes of values under a job's recipe, and its tokens.

    Attributes:
        tokens: Of the rank.
        e: Of a value in high precision.
        q: Of one that products read, in one direction.
        both: Of one in both directions.
        rows: Of one that is made in both, or, in float8, in rows alone.
        quantized: Whether there is a recipe.
    """

    tokens: int
    e: int
    q: float
    both: float
    rows: float
    quantized: bool

    def part(self, module: Any) -> int:
        """Tokens that enter a module whose input is cut under sequence parallelism."""
        split = bool(getattr(module, "sequence_parallel", False))
        return -(-self.tokens // module.tp_size) if split else self.tokens


#: Bytes of a value in one direction, scales included; both directions hold twice as much, but for float8 where the
#: device multiplies any two orders of float8 (Blackwell): there one serves both.
VALUE_BYTES = {
    "none": 0.0,
    "delayed": 1.0,
    "current": 1.0,
    "block": 1 + 4 / 128,
    "mxfp8": 1 + 1 / 32,
    "nvfp4": 0.5 + 1 / 16,
}


def stages_of(model: nn.Module, job: Job, work: Workload, tp: int) -> tuple[list[Stage], list[str]]:
    """Stages of a microbatch on one rank, in the order of forward, and notes on what is not counted. Local operation.

    Modules are taken to run in the order in which they are registered, embeddings first.

    Args:
        model: On meta, cut for its mesh.
        job: How it is trained.
        work: What a microbatch brings.
        tp: Size of that axis.
    """
    value = VALUE_BYTES[job.recipe]
    single = job.recipe in ("delayed", "current") and _te.multiplies_any_order()
    e = 2
    both = value * (1 if single else 2)
    rows = value if job.recipe in ("delayed", "current") else both
    sizes = _Sizes(work.tokens, e, value or e, both or e, rows, value > 0)
    found: list[Stage] = []
    unknown: dict[str, int] = {}
    modules = dict(model.named_modules())
    for name, module in modules.items():
        parent = modules.get(name.rpartition(".")[0])
        stage = _stage(name, module, parent, sizes, work, tp)
        if isinstance(module, nn.Embedding) and stage is not None:
            found.insert(0, stage)  # wherever a model registers it, it runs first
        elif stage is not None:
            found.append(stage)
        elif _is_unknown(module):
            unknown[type(module).__name__] = unknown.get(type(module).__name__, 0) + 1
    if work.vocabulary:
        logits = work.vocabulary * work.part(tp)
        # Of log_softmax its result, the gradient of that, and its own; then the head's in bf16.
        found.append(Stage("", 4 * logits, (Moment(8 * logits),)))
    notes = [f"activations of {count} x {kind} are not counted" for kind, count in sorted(unknown.items())]
    return found, notes


def _is_unknown(module: nn.Module) -> bool:
    """Whether a module may keep activations of which nothing is known here."""
    own = any(parameter is not None for parameter in module._parameters.values())
    return own and next(module.children(), None) is None


def _stage(
    name: str, module: Any, parent: nn.Module | None, sizes: _Sizes, work: Workload, tp: int
) -> Stage | None:
    kind, e = _te.kind_of(module), sizes.e
    if kind == "LayerNormLinear":
        return _norm_linear(name, module, sizes)
    if kind == "LayerNormMLP":
        return _mlp(name, module, sizes)
    if kind == "Linear":
        return _linear(name, module, parent, sizes)
    if kind == "GroupedLinear":
        rows = work.expert_rows(module.tp_size, tp)
        return Stage(
            name,
            int(rows * module.in_features * sizes.q),
            (Moment(rows * (module.in_features + module.out_features) * e),),
        )
    if kind == "DotProductAttention":
        return _attention(name, module, sizes)
    if isinstance(module, Gating):
        # Both halves, the activation of one; and results, whose weights are trained.
        rows = work.part(tp) * (work.experts_per_token if module.hidden else 1)
        return Stage(
            name, rows * (3 * module.width + module.hidden) * e, (Moment(rows * 3 * module.width * e),)
        )
    tokens = sizes.part(module) if hasattr(module, "tp_size") else _outside(sizes, module, tp)
    if kind in ("LayerNorm", "RMSNorm") or isinstance(module, nn.LayerNorm | nn.RMSNorm):
        # Norms of queries and keys see each head: their input is a copy of what attention keeps.
        heads = _heads(name, parent)
        width = (module.weight.shape[-1] if module.weight is not None else 0) * heads
        tokens = sizes.tokens if heads > 1 else tokens
        statistics = 4 if kind == "RMSNorm" or isinstance(module, nn.RMSNorm) else 8
        return Stage(
            name,
            tokens * (width * e + statistics * heads),
            (Moment(2 * tokens * width * e),),
            tokens * width * e,
        )
    if isinstance(module, nn.Embedding):
        return Stage(name, 8 * tokens)
    if isinstance(module, nn.Linear):
        return Stage(
            name,
            tokens * module.in_features * e,
            (Moment(tokens * (module.in_features + module.out_features) * e),),
        )
    return None


def _outside(sizes: _Sizes, module: nn.Module, tp: int) -> int:
    """Tokens that a module sees that is not cut by tp: its weight says whether they are a part of the sequence."""
    weight = getattr(module, "weight", None)
    part = bool(getattr(weight, "sequence_parallel", False) or getattr(module, "sequence_parallel", False))
    return -(-sizes.tokens // tp) if part else sizes.tokens


def _heads(name: str, parent: Any) -> int:
    """Heads of which a norm inside attention sees each on its own; 1 for any other norm."""
    own = name.rpartition(".")[2]
    if own not in ("q_norm", "k_norm") or _te.kind_of(parent) != "MultiheadAttention":
        return 1
    count = parent.num_attention_heads if own == "q_norm" else parent.num_gqa_groups
    return count // parent.tp_size


def _statistics(module: Any) -> int:
    """Bytes of a token's statistics: inverse deviation, and of LayerNorm the mean."""
    return 4 if module.normalization == "RMSNorm" else 8


def _norm_linear(name: str, module: Any, sizes: _Sizes) -> Stage:
    part, t, e = sizes.part(module), sizes.tokens, sizes.e
    # TE divides out_features by tp itself where parallel_mode is "column".
    width, out = module.in_features, module.out_features
    kept = part * (width * (e + sizes.q) + _statistics(module))
    quantized = out * sizes.both if sizes.quantized else 0
    temporary = t * (out * e + quantized + 2 * width * e)
    return Stage(name, int(kept), (Moment(int(temporary)),), part * width * e)


def _linear(name: str, module: Any, parent: nn.Module | None, sizes: _Sizes) -> Stage:
    rows = sizes.part(module) if module.parallel_mode == "column" else sizes.tokens
    # Attention keeps its output, which the projection reads.
    shared = _te.kind_of(parent) == "MultiheadAttention" if parent is not None else False
    per = sizes.q if sizes.quantized else 0 if shared else sizes.e
    quantized = module.out_features * sizes.both if sizes.quantized else 0
    temporary = sizes.tokens * (module.out_features * sizes.e + quantized + module.in_features * sizes.e)
    return Stage(
        name,
        int(rows * module.in_features * per),
        (Moment(int(temporary)),),
        rows * module.in_features * sizes.e,
    )


def _attention(name: str, module: Any, sizes: _Sizes) -> Stage:
    heads, groups = module.num_attention_heads // module.tp_size, module.num_gqa_groups // module.tp_size
    width = module.hidden_size_per_attention_head_k
    values = width * (2 * heads + 2 * groups)
    # Gradients of all four, and of the queries once more in fp32.
    temporary = sizes.tokens * (values * sizes.e + 4 * heads * width)
    return Stage(name, sizes.tokens * (values * sizes.e + 4 * heads), (Moment(temporary),))


def _mlp(name: str, module: Any, sizes: _Sizes) -> Stage:
    part, t, e = sizes.part(module), sizes.tokens, sizes.e
    width, inner = module.layer_norm_weight.shape[0], module.size_per_partition
    up = inner * (2 if module.activation in GATED_ACTIVATIONS else 1)
    # Float8 is gathered in rows over tp, and not kept in columns then.
    normalised = sizes.q if part < t else sizes.both
    activated = sizes.rows if sizes.quantized else e
    kept = part * (width * (e + normalised) + _statistics(module)) + t * (up * e + inner * activated)
    incoming = width * (e + (sizes.both if sizes.quantized else 0))
    # The gradients of activation and up-projection are made from the latter, which is gone when its own product begins.
    first = t * (inner * e + up * e + incoming)
    second = t * (inner * e + up * (sizes.both if sizes.quantized else e) - up * e + width * e + incoming)
    moments = Moment(int(first), ("fc2_weight",), ("fc2_weight",)), Moment(int(second), None, ("fc1_weight",))
    return Stage(name, int(kept), moments, part * width * e)
