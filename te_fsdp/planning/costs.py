"""Cost model of a training step: bytes, floating-point operations, messages."""

# [Note: costs] Parameters are read from the meta model after ``te_fsdp.fully_shard``: from its DTensors and
# from the plan of each parameter (:class:`~te_fsdp.records.ParameterPlan`). All numbers are those of the
# first rank. It has the largest shard of every parameter because FSDP2 shards with ``torch.chunk``.
#
# The activations that a module saves for backward follow one formula per kind of module (``_stage``). Sizes
# are those of one tp rank. With sequence parallelism, a rank has a fraction of the tokens between layers.
# Attention is assumed to use a backend of TE without additional memory (flash or cuDNN). Tokens are assumed
# to be distributed equally among the experts. Dropout masks, activations of other modules and operations
# between modules are not counted. The formulas were compared with TransformerEngine 2.20.2 on H200 GPUs and
# under emulation.

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from te_fsdp.features.reporting import bytes_of, cost_of, shard_in_training
from te_fsdp.layout import GATED_ACTIVATIONS, Storage
from te_fsdp.mesh import Meshes
from te_fsdp.planning.job import OPTIMIZERS, RECIPE_ROWS, Gating, Job, Sizes, Workload
from te_fsdp.quantized.components import empty_on_meta
from te_fsdp.records import ParamOwner, first_owners, plan_of
from te_fsdp.sharded_model import ShardedModel, require_sharded_model
from te_fsdp.upstream import te as _te, te_modules as _te_modules, torch_dtensor as _torch
from te_fsdp.upstream.fsdp2_patches import single_rank_parameters
from te_fsdp.upstream.te_formats import Format


@dataclass(frozen=True)
class Weight:
    """Cost of one parameter on the first rank, in bytes unless noted."""

    label: str  #: FQN
    unit: str  #: Name of the FSDP2 unit
    storage: Storage  #: Storage rule of its strategy
    experts: bool  #: Whether it is sharded over ``ep``
    format: Format | None  #: Quantized format; ``None`` in high precision
    itemsize: int  #: Bytes per element in its own dtype (the nominal dtype of a quantized weight)
    logical: int  #: Number of elements of the original parameter. Replicas are counted once
    elements: int  #: Number of elements of this rank's shard
    unsharded: int  #: Number of elements of the unsharded parameter on this rank (sharded by tp and ep only)
    sharded: int  #: Size of the shard
    #: Whether FSDP2 manages the parameter but this rank has all of it. Nothing is sent. The unsharded parameter
    #: shares the memory of the shard unless its values are cast.
    is_alone: bool
    #: Whether its gradient becomes the reduced gradient without a buffer (:mod:`te_fsdp.upstream.fsdp2_patches`).
    is_passed: bool
    #: Size of the unsharded parameter in forward, in addition to the shard; 0 without an all-gather
    gathered: int
    gathered_again: int  #: Size of the unsharded parameter in backward
    #: Size of the transposes that TransformerEngine creates from a gathered quantized weight for backward. The
    #: backward of the module frees them.
    derived: int
    derived_early: int  #: The same, created in forward already
    #: Size of the copies that TransformerEngine creates only in the backward of the module: transposes of float8
    #: weights that stay unsharded, and quantized copies of high-precision weights.
    copied: int
    unreduced: int  #: Size of its gradient as backward creates it
    gradient: int  #: Size of its reduced gradient; 0 if it is frozen
    sent_itemsize: int  #: Bytes per element of its gradient in the reduction

    @property
    def module(self) -> str:
        """Return the FQN of the module that owns it."""
        return self.label.rpartition(".")[0]

    @property
    def name(self) -> str:
        """Return the name of the parameter in its module."""
        return self.label.rpartition(".")[2]

    @property
    def reduction(self) -> int:
        """Return the size of the buffer from which its gradient is reduced."""
        return self.unsharded * self.sent_itemsize if self.gradient else 0

    @property
    def needs_main_weight(self) -> bool:
        """Return whether the optimizer keeps a main weight: the parameter is quantized or below fp32."""
        return self.format is not None or self.itemsize < 4


def weights_of(model: nn.Module, job: Job) -> list[Weight]:
    """Return the cost of every parameter of a sharded meta model, in module order. Local operation."""
    state = require_sharded_model(model, "plan")
    passes_of = {
        key: passes for unit in state.modules.values() for key, passes in single_rank_parameters(unit).items()
    }
    return [_weight(owner, passes_of.get(key), state, job) for key, owner in first_owners(model).items()]


def _weight(owner: ParamOwner, passes: bool | None, state: ShardedModel, job: Job) -> Weight:
    """Return the cost of one parameter. ``passes``: whether a single-rank gradient is passed on."""
    label, module, name, parameter = owner
    plan, precision = plan_of(parameter), state.precision
    assert plan is not None  # set by fully_shard
    local, quantizer = _torch.local_of(parameter), _te.weight_quantizer(module, name)
    shape, replicated = _without_fsdp(parameter), plan.storage.is_replicated
    dtype = precision.compute.get(plan.unit) if precision is not None else None
    full, compute = math.prod(shape), (dtype or parameter.dtype).itemsize
    has_all_experts = isinstance(parameter, DTensor) and "ep" in (parameter.device_mesh.mesh_dim_names or ())
    kind, derived, early, copied = None, 0, 0, 0
    if quantizer is None:
        gathered = gathered_again = full * compute
        resident = bytes_of(local)
        # Under a recipe TE quantizes this weight for its GEMMs.
        multiplied = _te.kind_of(module) in ("Linear", "LayerNormLinear", "LayerNormMLP", "GroupedLinear")
        if job.recipe != "none" and multiplied and not (name.startswith("layer_norm") or "bias" in name):
            copied = 2 * full
    else:
        kind = _te.format_of_quantizer(quantizer)
        resident = bytes_of(shard_in_training(module, name, parameter))
        empty = functools.partial(empty_on_meta, quantizer, shape, parameter.dtype)
        gathered = gathered_again = forward = bytes_of(empty(backward=False))
        every = bytes_of(empty()) - (full if kind.shares_data and len(shape) == 2 and not replicated else 0)
        if kind.independent_directions:
            stays_gathered = plan.storage.gather == "step" or job.recompute
            gathered, gathered_again = (every, every) if stays_gathered else (forward, every - forward)
        elif not replicated and plan.storage.gather == "pass":
            derived = every - forward
        elif not replicated and kind.transpose:
            copied = every - forward
        elif not replicated:
            derived = early = every - forward
    if replicated or (passes is not None and (quantizer is not None or compute == parameter.element_size())):
        gathered = gathered_again = 0
    cost = cost_of(parameter, quantizer is not None)
    policy = None if state.precision is None else state.precision.policy
    sent_dtype = (policy.grad_comm_dtype if policy is not None else None) or cost.dtype
    return Weight(
        label=label,
        unit=plan.unit,
        storage=plan.storage,
        experts=plan.experts,
        format=kind,
        itemsize=parameter.element_size(),
        logical=parameter.numel() * (1 if has_all_experts or not plan.experts else state.meshes.size("ep")),
        elements=local.numel(),
        unsharded=full,
        sharded=resident,
        is_alone=passes is not None,
        is_passed=bool(passes),
        gathered=gathered,
        gathered_again=gathered_again,
        derived=derived,
        derived_early=early,
        copied=copied,
        unreduced=full * compute if cost.gradient else 0,
        gradient=cost.gradient,
        sent_itemsize=sent_dtype.itemsize if sent_dtype is not None else 0,
    )


def _without_fsdp(parameter: torch.Tensor) -> tuple[int, ...]:
    """Return the shape of a parameter after the all-gather over data-parallel axes."""
    shape = list(parameter.shape)
    if isinstance(parameter, DTensor):
        mesh = parameter.device_mesh
        for axis, placement in enumerate(parameter.placements):
            dim = _torch.shard_dim_of(placement)
            if dim is not None and (mesh.mesh_dim_names or ())[axis] != "dp_shard":
                shape[dim] = -(-shape[dim] // mesh.size(axis))
    return tuple(shape)


# ------------------------------------------------------------------------------------------- optimizer and checkpoint


def optimizer_bytes(weights: Iterable[Weight], job: Job, meshes: Meshes) -> dict[str, int]:
    """Return the bytes of an optimizer's state on this rank: its own states and main weights. Local operation.

    ``shard_optimizer`` shards states over further axes of the dense mesh.
    """
    states = main = 0
    for weight, state_size, extra in _states(weights, job):
        axes = weight.storage.extra_state_axes if job.outer_strategy == "optim" else ()
        elements = -(-weight.elements // math.prod(map(meshes.size, axes)))
        states += elements * state_size
        main += elements * extra
    return {"optimizer states": states, "main weights in the optimizer": main}


def checkpoint_bytes(weights: Iterable[Weight], job: Job) -> dict[str, int]:
    """Return the bytes of the tensors in a checkpoint over all ranks, without replicas. Local operation."""
    kinds = list(weights)
    optimizer = sum(weight.logical * (size + extra) for weight, size, extra in _states(kinds, job))
    return {"model": sum(map(_stored, kinds)), "optimizer": optimizer}


def _states(weights: Iterable[Weight], job: Job) -> Iterator[tuple[Weight, int, int]]:
    """Yield each trained weight with the bytes per element of its optimizer states and of its main weight."""
    trained = [weight for weight in weights if weight.gradient]
    fused = job.optimizer == "fused-adam"
    # FusedAdam keeps main weights for all parameters, including fp32 ones, or for none.
    every = fused and any(weight.needs_main_weight for weight in trained)
    for weight in trained:
        has_main = weight.needs_main_weight or every
        size = 4 if fused or has_main else weight.itemsize
        yield weight, OPTIMIZERS[job.optimizer] * size, 4 if has_main else 0


def _stored(weight: Weight) -> int:
    """Return the bytes of a weight in a file: components without padding, in every direction that exists."""
    if weight.format is None or not weight.format.buffers:
        return weight.logical * weight.itemsize
    blocks = ((b.dtype.itemsize, math.prod(b.block)) for b in weight.format.buffers if b.block is not None)
    return math.ceil(sum(weight.logical * itemsize / block for itemsize, block in blocks))


def sum_of(weights: Iterable[Weight], name: str) -> int:
    """Return the sum of one attribute over all weights."""
    return sum(getattr(weight, name) for weight in weights)


# ------------------------------------------------------------------------------------------------------- activations


@dataclass(frozen=True)
class Moment:
    """A point in a module's backward at which memory can peak."""

    temporary: int  #: Bytes in addition to the saved activations; negative if some are freed already
    gradients: tuple[str, ...] | None = None  #: Own parameters whose gradients exist; ``None``: all
    #: Own parameters whose transposes or quantized copies exist; ``None``: all
    derived: tuple[str, ...] | None = None


@dataclass(frozen=True)
class Stage:
    """Activation memory of one module in forward and backward."""

    saved: int  #: Bytes saved from its forward to its backward
    moments: tuple[Moment, ...] = (Moment(0),)  #: Points of its backward at which memory can peak
    #: Size of the unit's input if this module is its first. Only the input is saved under recomputation.
    entering: int = 0
    module: str = ""  #: FQN; empty for the loss


#: Bytes of a high-precision activation (bf16).
_E = 2


@dataclass(frozen=True)
class _Bytes:
    """Bytes per value under a job's recipe, with the workload of the rank."""

    work: Workload
    tp: int  #: Size of the tp axis
    q: float  #: Bytes of a GEMM input, in one direction
    both: float  #: Bytes of a GEMM input in both directions
    rows: float  #: Bytes of a tensor quantized in both directions (float8: rowwise only)
    quantized: bool  #: Whether there is a recipe

    def part(self, module: Any) -> int:
        """Return the number of tokens that enter a module on this rank."""
        owners = [module] if hasattr(module, "tp_size") else [module, getattr(module, "weight", None)]
        split = any(getattr(owner, "sequence_parallel", False) for owner in owners)
        return -(-self.work.tokens // getattr(module, "tp_size", self.tp)) if split else self.work.tokens


def stages_of(model: nn.Module, job: Job, work: Workload, tp: int) -> tuple[list[Stage], list[str]]:
    """Return the activation costs of a microbatch in forward order, and notes on modules not counted. Local operation.

    ``model`` is the meta model, sharded for its mesh. ``work`` is the workload of a microbatch on one rank. Modules are
    assumed to run in registration order, embeddings first.
    """
    value, float8 = RECIPE_ROWS[job.recipe].value_bytes, job.recipe in ("delayed", "current")
    both = value * (1 if float8 and _te_modules.supports_all_gemm_layouts() else 2)
    rows = value if float8 else both
    sizes = _Bytes(work, tp, value or _E, both or _E, rows, value > 0)
    stages: list[Stage] = []
    unknown: Counter[str] = Counter()
    modules = dict(model.named_modules())
    for name, module in modules.items():
        parent, _, child_name = name.rpartition(".")
        stage = _stage(module, modules.get(parent), child_name, sizes)
        if stage is not None:
            # An embedding runs first, wherever the model registers it.
            index = 0 if isinstance(module, nn.Embedding) else len(stages)
            stages.insert(index, replace(stage, module=name))
        elif any(p is not None for p in module._parameters.values()) and not [*module.children()]:
            unknown[type(module).__name__] += 1
    if work.vocabulary:
        logits = work.vocabulary * work.part(tp)
        # The loss saves the output of log_softmax. Its backward adds the gradient of that output and its own gradient.
        # The gradient of the head follows in bf16.
        stages.append(Stage(4 * logits, (Moment(8 * logits),)))
    notes = [f"activations of {count} x {kind} are not counted" for kind, count in sorted(unknown.items())]
    return stages, notes


def _stage(module: Any, parent: Any, name: str, sizes: _Bytes) -> Stage | None:
    """Return the activation cost of a module named ``name`` in its parent; ``None`` if its kind is not supported."""
    kind, work = _te.kind_of(module), sizes.work
    in_attention = parent is not None and _te.kind_of(parent) == "MultiheadAttention"
    if kind == "LayerNormMLP":
        return _mlp(module, sizes)
    if kind in ("Linear", "LayerNormLinear"):
        tokens, is_norm = sizes.work.tokens, kind == "LayerNormLinear"
        # TE itself divides out_features by tp if parallel_mode is "column".
        width, out = module.in_features, module.out_features
        rows = sizes.part(module) if is_norm or module.parallel_mode == "column" else tokens
        quantized = out * sizes.both if sizes.quantized else 0
        temporary = tokens * (out * _E + quantized + (1 + is_norm) * width * _E)
        if is_norm:
            saved = rows * (width * (_E + sizes.q) + _statistics(module))
        else:
            # Attention saves its output, which the projection reads.
            saved = rows * width * (sizes.q if sizes.quantized else 0 if in_attention else _E)
        return Stage(int(saved), (Moment(int(temporary)),), rows * width * _E)
    if kind == "DotProductAttention":
        return _attention(module, work.tokens)
    if kind == "GroupedLinear":
        rows, into = work.expert_rows(module.tp_size, sizes.tp), module.in_features
        return Stage(int(rows * into * sizes.q), (Moment(rows * (into + module.out_features) * _E),))
    if isinstance(module, Gating):
        # The input of the activation (both halves), its output, and the results if the router is trained.
        rows = work.part(sizes.tp) * (work.experts_per_token if module.hidden else 1)
        return Stage(rows * (3 * module.width + module.hidden) * _E, (Moment(rows * 3 * module.width * _E),))
    tokens = sizes.part(module)
    if kind in ("LayerNorm", "RMSNorm") or isinstance(module, nn.LayerNorm | nn.RMSNorm):
        heads = 1
        if in_attention and name in ("q_norm", "k_norm"):
            # These norms are applied per head. Their input is a copy of a tensor that attention saves.
            heads = parent.num_attention_heads if name == "q_norm" else parent.num_gqa_groups
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
    """Return the bytes of the norm statistics per token: the inverse deviation, and the mean for LayerNorm."""
    return 4 if module.normalization == "RMSNorm" else 8


def _attention(module: Any, tokens: int) -> Stage:
    heads, groups = module.num_attention_heads // module.tp_size, module.num_gqa_groups // module.tp_size
    width = module.hidden_size_per_attention_head_k
    values = width * (2 * heads + 2 * groups)
    # Gradients of query, key, value and output, plus an fp32 copy of the query's gradient.
    return Stage(tokens * (values * _E + 4 * heads), (Moment(tokens * (values * _E + 4 * heads * width)),))


def _mlp(module: Any, sizes: _Bytes) -> Stage:
    part, t = sizes.part(module), sizes.work.tokens
    width, inner = module.layer_norm_weight.shape[0], module.size_per_partition
    up = inner * (2 if module.activation in GATED_ACTIVATIONS else 1)
    # Float8 is all-gathered rowwise over tp. TE then saves no columnwise copy.
    normalised = sizes.q if part < t else sizes.both
    activated = sizes.rows if sizes.quantized else _E
    saved = part * (width * (_E + normalised) + _statistics(module)) + t * (up * _E + inner * activated)
    incoming = width * (_E + (sizes.both if sizes.quantized else 0))
    # The gradients of the activation and of the up-projection are computed from the up-projection's output. This
    # output is freed before the GEMM of the up-projection starts.
    first = t * (inner * _E + up * _E + incoming)
    second = t * (inner * _E + up * (sizes.both if sizes.quantized else _E) - up * _E + width * _E + incoming)
    moments = Moment(int(first), ("fc2_weight",), ("fc2_weight",)), Moment(int(second), None, ("fc1_weight",))
    return Stage(int(saved), moments, part * width * _E)


# ------------------------------------------------------------------------------------- multiplications and traffic

#: Cost of forward plus backward, relative to forward. A backward runs twice the GEMMs of its forward. Its attention
#: costs 2.5 times the forward because it recomputes the scores.
_PRODUCTS, _ATTENTION = 3.0, 3.5


def flops_of(model: nn.Module, job: Job, work: Workload, tp: int) -> dict[str, float]:
    """Return the floating-point operations of a rank per step: ``"products"`` and ``"attention"``."""
    products = attention = 0.0
    modules: list[Any] = list(model.modules())
    for module in modules:
        kind = _te.kind_of(module)
        if kind == "DotProductAttention":
            width = module.num_attention_heads // module.tp_size * module.hidden_size_per_attention_head_k
            # A causal mask leaves half of the scores, and kernels skip the others.
            keys = job.sequence / 2 if "causal" in module.attn_mask_type else job.sequence
            if (module.window_size or (-1, -1))[0] >= 0:
                keys = min(keys, module.window_size[0])
            attention += 4 * work.tokens * keys * width
            continue
        # Biases and weights of norms take no part in a GEMM.
        matrices = [p for p in module._parameters.values() if p is not None and p.dim() > 1]
        if kind == "GroupedLinear":
            products += 2 * work.expert_rows(module.tp_size, tp) * module.in_features * module.out_features
        elif kind is not None or isinstance(module, nn.Linear):
            is_parallel = getattr(module, "tp_size", 1) > 1
            rows = work.tokens if is_parallel else work.part(tp)
            products += 2 * rows * sum(matrix.numel() for matrix in matrices)
    recomputed = 1 if job.recompute else 0
    return {
        "products": job.microbatches * products * (_PRODUCTS + recomputed),
        "attention": job.microbatches * attention * (_ATTENTION + recomputed),
    }


#: Yields ((axis, tensor, collective, ranks), bytes).
Sent = Iterator[tuple[tuple[str, str, str, int], float]]


def sent_by(model: nn.Module, job: Job, sizes: Sizes, work: Workload) -> Sent:
    """Yield the activations and their gradients that TE or the model sends over tp, cp and ep in a step."""
    tp, cp, ep = sizes.tp, sizes.cp, sizes.ep
    # Recomputation in backward repeats the communication of forward.
    backwards, forwards = job.microbatches, job.microbatches * (2 if job.recompute else 1)
    value, experts = RECIPE_ROWS[job.recipe].value_bytes or _E, 0
    modules: list[Any] = list(model.modules())
    for module in modules:
        kind = _te.kind_of(module)
        # Widths all-gathered over tp before the first GEMM and reduced after the last one.
        into = out = 0
        if tp > 1 and kind == "LayerNormMLP" and module.set_parallel_mode:
            into = out = module.layer_norm_weight.shape[0]
        elif tp > 1 and kind in ("Linear", "LayerNormLinear"):
            into = module.in_features if module.parallel_mode == "column" else 0
            out = module.out_features if module.parallel_mode == "row" else 0
        if (into or out) and module.sequence_parallel:
            # A column-parallel GEMM all-gathers its input in every forward, and again for the weight's gradient.
            gathered = into * value * (forwards + backwards) + out * value * backwards
            scattered = into * 2 * backwards + out * 2 * forwards
            yield ("tp", "activations", "all-gather", tp), work.tokens * gathered * (tp - 1) / tp
            yield ("tp", "activations", "reduce-scatter", tp), work.tokens * scattered * (tp - 1) / tp
        elif into or out:
            summed = into * 2 * backwards + out * 2 * forwards
            yield ("tp", "activations", "all-reduce", tp), 2 * work.tokens * summed * (tp - 1) / tp
        if kind == "DotProductAttention" and cp > 1:
            width = 2 * module.num_gqa_groups // module.tp_size * module.hidden_size_per_attention_head_k
            # Keys and values are sent around the ring in forward. Backward sends them together with their gradients.
            rounds = forwards + 2 * backwards
            yield ("cp", "keys and values", "ring", cp), work.tokens * width * 2 * rounds * (cp - 1)
        if kind == "GroupedLinear" and ep > 1:
            # Tokens are sent to the first GroupedLinear of a layer and returned from the second.
            width = module.out_features if experts % 2 else module.in_features
            experts += 1
            size = work.expert_rows(module.tp_size, tp) * width * 2 * (forwards + backwards)
            yield ("ep", "tokens", "all-to-all", ep), size * (ep - 1) / ep
