"""What a rank sends in an optimizer step, axis by axis: collectives, how often, and bytes.

Bytes are those that a rank must receive whatever the algorithm, of n ranks that hold or get B bytes together:

    all-gather, reduce-scatter    B (n - 1) / n          all-to-all    B (n - 1) / n
    all-reduce                    2 B (n - 1) / n        ring          B (n - 1)

So they are at the same time the least that it sends. From them and the speed of a link follows the time that a step
spends on an axis, if nothing is hidden behind computation: what estimates steps begins here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from te_fsdp import _te
from te_fsdp.planning.activations import VALUE_BYTES

if TYPE_CHECKING:
    from torch import nn

    from te_fsdp.planning.job import Job, Sizes, Workload
    from te_fsdp.planning.weights import Weight


@dataclass(frozen=True)
class Traffic:
    """One kind of collective over one axis in an optimizer step.

    Attributes:
        axis: Name; ``"dp"`` where ``dp_replicate`` and ``dp_shard`` act as one.
        what: What is sent.
        collective: ``"all-gather"``, ``"reduce-scatter"``, ``"all-reduce"``, ``"all-to-all"`` or ``"ring"``.
        ranks: How many take part.
        bytes: That a rank receives in a step.
    """

    axis: str
    what: str
    collective: str
    ranks: int
    bytes: int


def traffic_of(
    model: nn.Module, weights: Sequence[Weight], job: Job, sizes: Sizes, work: Workload
) -> tuple[Traffic, ...]:
    """All of a step's traffic, but for scales, norms and checks: a few numbers each. Local operation.

    Args:
        model: On meta, cut for its mesh.
        weights: All weights of the rank.
        job: What is planned.
        sizes: Of the mesh.
        work: What a microbatch brings.
    """
    total: Counter[tuple[str, str, str, int]] = Counter()
    for key, size in (*_of_weights(weights, job, sizes), *_of_activations(model, job, sizes, work)):
        total[key] += round(size)
    order = ("dp_shard", "dp_replicate", "dp", "tp", "cp", "ep")
    rows = [Traffic(*key, size) for key, size in total.items() if size]
    return tuple(sorted(rows, key=lambda row: (order.index(row.axis), row.what)))


_Found = Iterator[tuple[tuple[str, str, str, int], float]]


def _of_weights(weights: Sequence[Weight], job: Job, sizes: Sizes) -> _Found:
    """Weights and gradients over the data-parallel axes."""
    replicas = sizes.dp_replicate
    for weight in weights:
        shards = sizes.dp_shard * sizes.cp * (1 if weight.experts else sizes.ep)
        storage, times = weight.storage, 1 if weight.storage.reduce == "last" else job.microbatches
        gradient = weight.whole * weight.wire
        if storage.is_whole:
            ranks = shards * replicas
            yield ("dp", "gradients", "all-reduce", ranks), 2 * gradient * (ranks - 1) / ranks
            continue
        share = (shards - 1) / shards
        gathers = weight.gathered
        if storage.gather == "pass" and weight.trained:
            gathers = job.microbatches * (weight.gathered + weight.gathered_again)
        elif storage.gather == "pass":
            gathers = job.microbatches * 2 * weight.gathered
        yield ("dp_shard", "weights", "all-gather", shards), gathers * share
        yield ("dp_shard", "gradients", "reduce-scatter", shards), times * gradient * share
        part = gradient / shards
        if storage.gradient[0] == "P":
            others = (replicas - 1) / replicas
            yield ("dp_replicate", "gradients", "reduce-scatter", replicas), part * others
            yield ("dp_replicate", "weights", "all-gather", replicas), weight.held * others * weight.trained
        else:
            yield ("dp_replicate", "gradients", "all-reduce", replicas), 2 * part * (replicas - 1) / replicas


def _of_activations(model: nn.Module, job: Job, sizes: Sizes, work: Workload) -> _Found:
    """Activations and their gradients over tp, cp and ep: what TransformerEngine, or the model, sends."""
    tp, cp, ep = sizes.tp, sizes.cp, sizes.ep
    # What a backward runs again, it sends again.
    backwards, forwards = job.microbatches, job.microbatches * (2 if job.recompute else 1)
    value, experts = VALUE_BYTES[job.recipe] or 2, 0
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
