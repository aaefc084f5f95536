"""What a step sends, axis by axis, and how long it takes: what it multiplies, sends and updates, over given speeds.

Bytes are those that a rank must receive whatever the algorithm, of n ranks that hold or get B bytes together, which is
at the same time the least that it sends:

    all-gather, reduce-scatter    B (n - 1) / n          all-to-all    B (n - 1) / n
    all-reduce                    2 B (n - 1) / n        ring          B (n - 1)

Seconds:

    computation   products / their rate + attention / its rate
    optimizer     bytes of states and main weights, twice, of gradients and of weights, once / memory's rate
    tp, ep        bytes / link: nothing hides it, the next product waits
    others        bytes / link: goes on beside computation. Exposed are the first unit's gather and the last one's
                  reduction, and what is longer than the computation. What is hidden still costs a share of its time,
                  ``contention``: its kernels hold multiprocessors, and copies into and out of its buffers take memory.

A step takes no less than its host needs to issue it (:attr:`Machine.host`), which operations and bytes do not tell.

A link is one of a node where an axis and those further in lie within one, else one between nodes. Rates are those that
are reached, not those of a data sheet: they follow from one measured step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import nn

from te_fsdp import _te
from te_fsdp.errors import PlacementError
from te_fsdp.planning.activations import VALUE_BYTES

if TYPE_CHECKING:
    from collections.abc import Mapping

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


# ----------------------------------------------------------------------------------------------------------------- time

#: A backward does twice the products of its forward, and 2.5 times its attention, whose scores it computes again.
_PRODUCTS, _ATTENTION = 3.0, 3.5
#: Axes whose messages the next product waits for.
_WAITED_FOR = ("tp", "ep")


def flops_of(model: nn.Module, job: Job, work: Workload, tp: int) -> dict[str, float]:
    """Floating-point operations of a rank in a step: ``"products"`` and ``"attention"``. Local operation.

    Args:
        model: On meta, cut by tp alone.
        job: How it is trained.
        work: What a microbatch brings.
        tp: Size of that axis.
    """
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


@dataclass(frozen=True)
class Machine:
    """Speeds that a job reaches.

    Attributes:
        tflops: 10^12 operations a second of products, in the recipe's format.
        attention_tflops: Of attention; ``None``: as products. FP8 recipes leave attention in 16 bits.
        within: 10^9 bytes a second that a GPU receives over links of its node.
        between: Over links between nodes.
        memory: 10^9 bytes a second of a GPU's memory.
        node: GPUs of a node.
        contention: Share of hidden communication's time that computation loses.
        host: Milliseconds in which the host issues a step, as measured (``host_ms`` of ``benchmarks/step.py``); 0: the
            device never waits for it, as in CUDA graphs.
    """

    tflops: float
    attention_tflops: float | None = None
    within: float = 140.0
    between: float = 40.0
    memory: float = 4000.0
    node: int = 8
    contention: float = 0.4
    host: float = 0.0

    def __post_init__(self) -> None:
        for name in ("tflops", "within", "between", "memory", "node"):
            if not getattr(self, name) > 0:
                raise PlacementError(f"plan: {name}", expected="more than 0", got=getattr(self, name))
        if not 0 <= self.contention <= 1:
            raise PlacementError("plan: contention", expected="a share, 0 to 1", got=self.contention)
        if not self.host >= 0:
            raise PlacementError("plan: host", expected="0 or more", got=self.host)


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step.

    Attributes:
        compute: Products and attention.
        optimizer: Its step.
        links: Axis -> seconds that its messages take.
        exposed: Axis -> seconds of them that the step waits for.
        contended: What hidden messages cost computation.
        host: What issuing it takes.
    """

    compute: float
    optimizer: float
    links: dict[str, float]
    exposed: dict[str, float]
    contended: float
    host: float = 0.0

    @property
    def waits(self) -> float:
        """How long the device waits for its host."""
        return max(self.host - self._device, 0.0)

    @property
    def seconds(self) -> float:
        """All of it."""
        return self._device + self.waits

    @property
    def _device(self) -> float:
        return self.compute + self.optimizer + sum(self.exposed.values()) + self.contended


def step_time(
    flops: Mapping[str, float],
    traffic: tuple[Traffic, ...],
    updated: int,
    unit: int,
    sizes: Sizes,
    machine: Machine,
) -> StepTime:
    """Estimate a step; what :meth:`te_fsdp.planning.Plan.time` calls. Local operation.

    Args:
        flops: From :func:`flops_of`.
        traffic: The plan's.
        updated: Bytes that the optimizer reads and writes.
        unit: Bytes of the largest unit when it is gathered.
        sizes: Of the mesh.
        machine: Its speeds.
    """
    attention = machine.attention_tflops or machine.tflops
    compute = flops["products"] / machine.tflops / 1e12 + flops["attention"] / attention / 1e12
    links: dict[str, float] = {}
    exposed: dict[str, float] = {}
    hidden = 0.0
    for row in traffic:
        speed = 1e9 * (machine.within if reach_of(row.axis, sizes) <= machine.node else machine.between)
        links[row.axis] = links.get(row.axis, 0.0) + row.bytes / speed
        if row.axis in _WAITED_FOR:
            exposed[row.axis] = exposed.get(row.axis, 0.0) + row.bytes / speed
            continue
        # A gather before the first unit computes, a reduction after the last one has.
        edge = min(row.bytes, unit * (row.ranks - 1) / row.ranks) / speed if row.axis != "cp" else 0.0
        exposed[row.axis] = exposed.get(row.axis, 0.0) + edge
        hidden += row.bytes / speed - edge
    longer = max(hidden - compute, 0.0)
    if longer:
        slowest = max((axis for axis in links if axis not in _WAITED_FOR), key=lambda axis: links[axis])
        exposed[slowest] += longer
    optimizer = updated / machine.memory / 1e9
    contended = machine.contention * (hidden - longer)
    return StepTime(compute, optimizer, links, exposed, contended, machine.host / 1e3)


def reach_of(axis: str, sizes: Sizes) -> int:
    """How many neighbouring ranks an axis spans, those of axes further in included."""
    inner = {"tp": 1, "ep": sizes.tp, "cp": sizes.tp * sizes.ep}
    if axis in inner:
        return inner[axis] * getattr(sizes, axis)
    # Dense weights are cut over dp_shard, cp and ep.
    shards = sizes.tp * sizes.ep * sizes.cp * sizes.dp_shard
    return shards if axis == "dp_shard" else shards * sizes.dp_replicate
