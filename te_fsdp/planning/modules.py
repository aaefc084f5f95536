"""What modules keep from their forward to their backward, and what they multiply and send: a formula for each kind.

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

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from torch import nn

from te_fsdp import _te, _te_modules
from te_fsdp.layout import GATED_ACTIVATIONS
from te_fsdp.planning.job import Gating

if TYPE_CHECKING:
    from te_fsdp.planning.job import Job, Sizes, Workload


@dataclass(frozen=True)
class Moment:
    """An instant of a module's backward."""

    temporary: int  #: Bytes beyond what is kept; negative where some of that is gone already
    gradients: tuple[str, ...] | None = None  #: Own parameters whose gradients are there; ``None``: all
    derived: tuple[str, ...] | None = (
        None  #: Those whose transposes, or quantized copies, are there; ``None``: all
    )


@dataclass(frozen=True)
class Stage:
    """One module in forward and backward."""

    kept: int  #: Bytes from its forward to its backward
    moments: tuple[Moment, ...] = (Moment(0),)  #: Instants of its backward at which memory is high
    #: Bytes of what enters a unit that begins with this module: all that is kept under recomputation.
    entering: int = 0
    module: str = ""  #: Its name; empty for the loss


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
#: Of a value in high precision: all of them are bf16.
_E = 2


@dataclass(frozen=True)
class _Bytes:
    """Bytes of values under a job's recipe, and the rank's tokens."""

    work: Workload
    tp: int  #: Size of that axis
    q: float  #: Of a value that products read, in one direction
    both: float  #: Of one in both directions
    rows: float  #: Of one that is made in both, or, in float8, in rows alone
    quantized: bool  #: Whether there is a recipe

    def part(self, module: Any) -> int:
        """Tokens that enter a module: a part where it is cut under sequence parallelism, or its weight says so."""
        own = [module] if hasattr(module, "tp_size") else [module, getattr(module, "weight", None)]
        split = any(getattr(one, "sequence_parallel", False) for one in own)
        return -(-self.work.tokens // getattr(module, "tp_size", self.tp)) if split else self.work.tokens


def stages_of(model: nn.Module, job: Job, work: Workload, tp: int) -> tuple[list[Stage], list[str]]:
    """Stages of a microbatch on one rank, in the order of forward, and notes on what is not counted. Local operation.

    Modules are taken to run in the order in which they are registered, embeddings first.

    Args:
        model: On meta, cut for its mesh.
        job: How it is trained.
        work: What a microbatch brings.
        tp: Size of that axis.
    """
    value, float8 = VALUE_BYTES[job.recipe], job.recipe in ("delayed", "current")
    both = value * (1 if float8 and _te_modules.multiplies_any_order() else 2)
    rows = value if float8 else both
    sizes = _Bytes(work, tp, value or _E, both or _E, rows, value > 0)
    found: list[Stage] = []
    unknown: Counter[str] = Counter()
    modules = dict(model.named_modules())
    for name, module in modules.items():
        parent, _, own = name.rpartition(".")
        stage = _stage(module, modules.get(parent), own, sizes)
        if stage is not None:
            # Wherever a model registers an embedding, it runs first.
            place = 0 if isinstance(module, nn.Embedding) else len(found)
            found.insert(place, replace(stage, module=name))
        elif any(p is not None for p in module._parameters.values()) and not [*module.children()]:
            unknown[type(module).__name__] += 1
    if work.vocabulary:
        logits = work.vocabulary * work.part(tp)
        # Of log_softmax its result, the gradient of that, and its own; then the head's in bf16.
        found.append(Stage(4 * logits, (Moment(8 * logits),)))
    notes = [f"activations of {count} x {kind} are not counted" for kind, count in sorted(unknown.items())]
    return found, notes


def _stage(module: Any, parent: Any, own: str, sizes: _Bytes) -> Stage | None:
    """A module's stage; ``own``: its name in its parent. ``None``: nothing is known of it."""
    kind, work = _te.kind_of(module), sizes.work
    in_attention = parent is not None and _te.kind_of(parent) == "MultiheadAttention"
    if kind == "LayerNormLinear":
        return _norm_linear(module, sizes)
    if kind == "LayerNormMLP":
        return _mlp(module, sizes)
    if kind == "Linear":
        return _linear(module, in_attention, sizes)
    if kind == "DotProductAttention":
        return _attention(module, work.tokens)
    if kind == "GroupedLinear":
        rows, into = work.expert_rows(module.tp_size, sizes.tp), module.in_features
        return Stage(int(rows * into * sizes.q), (Moment(rows * (into + module.out_features) * _E),))
    if isinstance(module, Gating):
        # Both halves, the activation of one; and results, whose weights are trained.
        rows = work.part(sizes.tp) * (work.experts_per_token if module.hidden else 1)
        return Stage(rows * (3 * module.width + module.hidden) * _E, (Moment(rows * 3 * module.width * _E),))
    tokens = sizes.part(module)
    if kind in ("LayerNorm", "RMSNorm") or isinstance(module, nn.LayerNorm | nn.RMSNorm):
        heads = 1
        if in_attention and own in ("q_norm", "k_norm"):
            # They see each head: their input is a copy of what attention keeps.
            heads = parent.num_attention_heads if own == "q_norm" else parent.num_gqa_groups
            heads //= parent.tp_size
            tokens = work.tokens if heads > 1 else tokens
        width = (module.weight.shape[-1] if module.weight is not None else 0) * heads
        statistics = 4 if kind == "RMSNorm" or isinstance(module, nn.RMSNorm) else 8
        entering = tokens * width * _E
        return Stage(entering + tokens * statistics * heads, (Moment(2 * entering),), entering)
    if isinstance(module, nn.Embedding):
        return Stage(8 * tokens)
    if isinstance(module, nn.Linear):
        into = module.in_features
        return Stage(tokens * into * _E, (Moment(tokens * (into + module.out_features) * _E),))
    return None


def _statistics(module: Any) -> int:
    """Bytes of a token's statistics: inverse deviation, and of LayerNorm the mean."""
    return 4 if module.normalization == "RMSNorm" else 8


def _norm_linear(module: Any, sizes: _Bytes) -> Stage:
    part = sizes.part(module)
    # TE divides out_features by tp itself where parallel_mode is "column".
    width, out = module.in_features, module.out_features
    kept = part * (width * (_E + sizes.q) + _statistics(module))
    quantized = out * sizes.both if sizes.quantized else 0
    temporary = sizes.work.tokens * (out * _E + quantized + 2 * width * _E)
    return Stage(int(kept), (Moment(int(temporary)),), part * width * _E)


def _linear(module: Any, is_projection: bool, sizes: _Bytes) -> Stage:
    tokens, width, out = sizes.work.tokens, module.in_features, module.out_features
    values = (sizes.part(module) if module.parallel_mode == "column" else tokens) * width
    # Attention keeps its output, which the projection reads.
    per = sizes.q if sizes.quantized else 0 if is_projection else _E
    quantized = out * sizes.both if sizes.quantized else 0
    temporary = tokens * (out * _E + quantized + width * _E)
    return Stage(int(values * per), (Moment(int(temporary)),), values * _E)


def _attention(module: Any, tokens: int) -> Stage:
    heads, groups = module.num_attention_heads // module.tp_size, module.num_gqa_groups // module.tp_size
    width = module.hidden_size_per_attention_head_k
    values = width * (2 * heads + 2 * groups)
    # Gradients of all four, and of the queries once more in fp32.
    return Stage(tokens * (values * _E + 4 * heads), (Moment(tokens * (values * _E + 4 * heads * width)),))


def _mlp(module: Any, sizes: _Bytes) -> Stage:
    part, t = sizes.part(module), sizes.work.tokens
    width, inner = module.layer_norm_weight.shape[0], module.size_per_partition
    up = inner * (2 if module.activation in GATED_ACTIVATIONS else 1)
    # Float8 is gathered in rows over tp, and not kept in columns then.
    normalised = sizes.q if part < t else sizes.both
    activated = sizes.rows if sizes.quantized else _E
    kept = part * (width * (_E + normalised) + _statistics(module)) + t * (up * _E + inner * activated)
    incoming = width * (_E + (sizes.both if sizes.quantized else 0))
    # The gradients of activation and up-projection are made from the latter, which is gone when its own product begins.
    first = t * (inner * _E + up * _E + incoming)
    second = t * (inner * _E + up * (sizes.both if sizes.quantized else _E) - up * _E + width * _E + incoming)
    moments = Moment(int(first), ("fc2_weight",), ("fc2_weight",)), Moment(int(second), None, ("fc1_weight",))
    return Stage(int(kept), moments, part * width * _E)


# --------------------------------------------------------------------------------------- what they multiply and send

#: A backward does twice the products of its forward, and 2.5 times its attention, whose scores it computes again.
_PRODUCTS, _ATTENTION = 3.0, 3.5


def flops_of(model: nn.Module, job: Job, work: Workload, tp: int) -> dict[str, float]:
    """Floating-point operations of a rank in a step: ``"products"`` and ``"attention"``; as :func:`stages_of`."""
    products = attention = 0.0
    modules: list[Any] = list(model.modules())
    for module in modules:
        kind = _te.kind_of(module)
        if kind == "DotProductAttention":
            width = module.num_attention_heads // module.tp_size * module.hidden_size_per_attention_head_k
            keys = job.sequence / 2 if "causal" in module.attn_mask_type else job.sequence
            if (module.window_size or (-1, -1))[0] >= 0:
                keys = min(keys, module.window_size[0])
            attention += 4 * work.tokens * keys * width
            continue
        matrices = [p for p in module._parameters.values() if p is not None and p.dim() > 1]
        if kind == "GroupedLinear":
            products += 2 * work.expert_rows(module.tp_size, tp) * module.in_features * module.out_features
        elif kind is not None or isinstance(module, nn.Linear):
            cut = getattr(module, "tp_size", 1) > 1
            rows = work.tokens if cut else work.part(tp)
            products += 2 * rows * sum(matrix.numel() for matrix in matrices)
    again = 1 if job.recompute else 0
    return {
        "products": job.microbatches * products * (_PRODUCTS + again),
        "attention": job.microbatches * attention * (_ATTENTION + again),
    }


#: (axis, what is sent, collective, ranks) and bytes.
Sent = Iterator[tuple[tuple[str, str, str, int], float]]


def sent_by(model: nn.Module, job: Job, sizes: Sizes, work: Workload) -> Sent:
    """Activations and their gradients over tp, cp and ep: what TransformerEngine, or the model, sends in a step."""
    tp, cp, ep = sizes.tp, sizes.cp, sizes.ep
    # What a backward runs again, it sends again.
    backwards, forwards = job.microbatches, job.microbatches * (2 if job.recompute else 1)
    value, experts = VALUE_BYTES[job.recipe] or _E, 0
    modules: list[Any] = list(model.modules())
    for module in modules:
        kind = _te.kind_of(module)
        into, out = _cut_widths(module, kind) if tp > 1 else (0, 0)
        if (into or out) and module.sequence_parallel:
            # The input of a column-parallel product once in each forward, and once more for its weight's gradient.
            gathered = into * value * (forwards + backwards) + out * value * backwards
            scattered = into * 2 * backwards + out * 2 * forwards
            yield ("tp", "activations", "all-gather", tp), work.tokens * gathered * (tp - 1) / tp
            yield ("tp", "activations", "reduce-scatter", tp), work.tokens * scattered * (tp - 1) / tp
        elif into or out:
            summed = into * 2 * backwards + out * 2 * forwards
            yield ("tp", "activations", "all-reduce", tp), 2 * work.tokens * summed * (tp - 1) / tp
        if kind == "DotProductAttention" and cp > 1:
            width = 2 * module.num_gqa_groups // module.tp_size * module.hidden_size_per_attention_head_k
            # Keys and values go round in forward, and with their gradients in backward.
            rounds = forwards + 2 * backwards
            yield ("cp", "keys and values", "ring", cp), work.tokens * width * 2 * rounds * (cp - 1)
        if kind == "GroupedLinear" and ep > 1:
            # Tokens go to the first GroupedLinear of a layer, and come back from the second.
            width = module.out_features if experts % 2 else module.in_features
            experts += 1
            size = work.expert_rows(module.tp_size, tp) * width * 2 * (forwards + backwards)
            yield ("ep", "tokens", "all-to-all", ep), size * (ep - 1) / ep


def _cut_widths(module: Any, kind: str | None) -> tuple[int, int]:
    """Widths of what tp brings together before a module's first product, and of what it adds up after its last one."""
    if kind == "LayerNormMLP" and module.set_parallel_mode:
        return module.layer_norm_weight.shape[0], module.layer_norm_weight.shape[0]
    if kind in ("Linear", "LayerNormLinear"):
        return {"column": (module.in_features, 0), "row": (0, module.out_features)}.get(
            module.parallel_mode, (0, 0)
        )
    return 0, 0
