"""What a step does with each parameter of a sharded model on meta: bytes held, gathered, reduced and updated.

Read off the model that ``te_fsdp.fully_shard`` has sharded: its DTensors, and the plan that it made
(:class:`~te_fsdp.parameters.ParameterPlan`). The rank is the first one, which has the largest shard of everything:
FSDP2 cuts as ``torch.chunk`` does.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor import DTensor

from te_fsdp import _te, _torch
from te_fsdp._fsdp2_grads import whole_shards
from te_fsdp._te_formats import FORMATS, Format
from te_fsdp.parameters import places_of, plan_of
from te_fsdp.planning.job import OPTIMIZERS
from te_fsdp.quantized.components import empty_on_meta
from te_fsdp.sharding.report import bytes_of, cost_of, settled_shard
from te_fsdp.sharding.state import required_state

if TYPE_CHECKING:
    from torch import nn

    from te_fsdp.layout import Storage
    from te_fsdp.parameters import Place
    from te_fsdp.planning.job import Job
    from te_fsdp.sharding.state import ShardingState


@dataclass(frozen=True)
class Weight:
    """One parameter on the first rank; all numbers without a unit are bytes.

    Attributes:
        label: Full name.
        module: Name of the module that has it.
        name: Its last part.
        unit: Name of its unit.
        storage: Row of the strategy.
        experts: Whether it is dealt out over ``ep``.
        format: Of a quantized one.
        itemsize: Of an element in its own dtype, the nominal one of a quantized weight.
        logical: Elements of the original: of all ranks, each once.
        elements: Elements of this rank's shard.
        whole: Elements of the gathered parameter: what tp and ep leave of it.
        held: Of the shard.
        is_alone: Whether no other rank has a part of it, though FSDP2 manages it: nothing is sent, and the gathered
            parameter has the shard's memory, unless its values are cast.
        is_passed: Whether its gradient becomes the reduced one without a buffer (:mod:`te_fsdp._fsdp2_grads`).
        gathered: Of the gathered parameter in forward, beside the shard; 0 where nothing is gathered.
        gathered_again: Of the gathered parameter in backward.
        derived: That TransformerEngine makes of a gathered quantized weight for backward, beside what was gathered:
            transposes. Its module's backward frees them.
        derived_early: Likewise, in forward already.
        copied: That TransformerEngine makes of it in its module's backward alone: transposes of float8 weights that
            stay gathered, and what weights that are not quantized themselves are quantized into.
        unreduced: Of its gradient as backward makes it.
        reduction: Of the buffer that its gradient is reduced from.
        gradient: Of its reduced gradient.
        wire: Bytes of an element of its gradient when it is sent.
    """

    label: str
    module: str
    name: str
    unit: str
    storage: Storage
    experts: bool
    format: Format | None
    itemsize: int
    logical: int
    elements: int
    whole: int
    held: int
    is_alone: bool
    is_passed: bool
    gathered: int
    gathered_again: int
    derived: int
    derived_early: int
    copied: int
    unreduced: int
    reduction: int
    gradient: int
    wire: int

    @property
    def trained(self) -> bool:
        """Whether it has a gradient."""
        return self.gradient > 0

    @property
    def is_low(self) -> bool:
        """Whether it is quantized, or below fp32: an optimizer then keeps a main weight."""
        return self.format is not None or self.itemsize < 4


def weights_of(model: nn.Module, job: Job) -> list[Weight]:
    """Every parameter of a sharded model on meta, each once, in the order of its modules. Local operation.

    Args:
        model: On which ``te_fsdp.fully_shard`` was called.
        job: What was planned.
    """
    state = required_state(model, "plan")
    whole = {key: passes for unit in state.modules.values() for key, passes in whole_shards(unit).items()}
    found, seen = [], set()
    for place in places_of(model):
        if id(place.parameter) not in seen:
            seen.add(id(place.parameter))
            found.append(_weight(place, whole.get(id(place.parameter)), state, job))
    return found


def _weight(place: Place, passes: bool | None, state: ShardingState, job: Job) -> Weight:
    """One place's weight; ``passes``: of a whole shard, whether its gradient is passed on."""
    label, module, name, parameter = place
    plan = plan_of(parameter)
    assert plan is not None  # fully_shard has noted it on each
    local, quantizer = _torch.local_of(parameter), _te.weight_quantizer(module, name)
    shape, logical = _without_fsdp(parameter), parameter.numel()
    if plan.experts:
        logical *= state.meshes.size("ep")
    whole, replicated = math.prod(shape), plan.storage.is_whole
    compute, derived, early, copied = _compute_size(parameter, plan.unit, state), 0, 0, 0
    kind = None if quantizer is None else _te.format_of_quantizer(quantizer)
    if quantizer is None:
        gathered = again = whole * compute
        held = bytes_of(local)
        if job.recipe != "none" and _is_multiplied(module, name):
            copied = 2 * whole
    else:
        held = bytes_of(settled_shard(module, name, parameter))
        forward = bytes_of(empty_on_meta(quantizer, shape, parameter.dtype, backward=False))
        every = bytes_of(empty_on_meta(quantizer, shape, parameter.dtype))
        gathered = again = forward
        if kind is not None and kind.independent_directions:
            kept = plan.storage.gather == "step" or job.recompute
            gathered, again = (every, every) if kept else (forward, every - forward)
        elif not replicated and plan.storage.gather == "pass":
            derived = every - forward
        elif not replicated and kind is not None and kind.transpose:
            copied = every - forward
        elif not replicated:
            derived = early = every - forward
    if replicated or (passes is not None and (quantizer is not None or compute == parameter.element_size())):
        gathered = again = 0
    cost = cost_of(parameter, quantizer is not None)
    wire = getattr(state.precision, "grad_comm_dtype", None) or cost.dtype
    return Weight(
        label=label,
        module=label.rpartition(".")[0],
        name=name,
        unit=plan.unit,
        storage=plan.storage,
        experts=plan.experts,
        format=kind,
        itemsize=parameter.element_size(),
        logical=logical,
        elements=local.numel(),
        whole=whole,
        held=held,
        is_alone=passes is not None,
        is_passed=bool(passes),
        gathered=gathered,
        gathered_again=again,
        derived=derived,
        derived_early=early,
        copied=copied,
        unreduced=whole * compute if cost.gradient else 0,
        reduction=whole * wire.itemsize if wire is not None and cost.gradient else 0,
        gradient=cost.gradient,
        wire=wire.itemsize if wire is not None else 0,
    )


def _without_fsdp(parameter: torch.Tensor) -> tuple[int, ...]:
    """Shape of a parameter as it is gathered: cut by the axes that are not data parallelism."""
    shape = list(parameter.shape)
    if isinstance(parameter, DTensor):
        mesh = parameter.device_mesh
        for axis, placement in enumerate(parameter.placements):
            dim = _torch.shard_dim_of(placement)
            if dim is not None and (mesh.mesh_dim_names or ())[axis] != "dp_shard":
                shape[dim] = -(-shape[dim] // mesh.size(axis))
    return tuple(shape)


def _compute_size(parameter: torch.Tensor, unit: str, state: ShardingState) -> int:
    """Bytes of an element in the dtype that a unit computes in."""
    plan = state.precision_plan
    dtype = plan.compute.get(unit) if plan is not None else None
    return (dtype or parameter.dtype).itemsize


def _is_multiplied(module: nn.Module, name: str) -> bool:
    """Whether TE quantizes a high-precision parameter for its products under a recipe."""
    kind = _te.kind_of(module)
    return kind in ("Linear", "LayerNormLinear", "LayerNormMLP", "GroupedLinear") and not (
        name.startswith("layer_norm") or "bias" in name
    )


# ------------------------------------------------------------------------------------------- optimizer and checkpoint


def optimizer_bytes(weights: Iterable[Weight], job: Job, ranks: dict[str, int]) -> dict[str, int]:
    """Bytes of an optimizer's state on this rank: its own states, and main weights. Local operation.

    Args:
        weights: All.
        job: What is planned.
        ranks: Size of each axis of the dense meshes: ``shard_optimizer`` cuts states over some.
    """
    states = main = 0
    for weight, own, extra in _states(weights, job):
        cut = [ranks[axis] for axis in weight.storage.cut_further] if job.outer_strategy == "optim" else []
        elements = -(-weight.elements // math.prod(cut))
        states += elements * own
        main += elements * extra
    return {"optimizer states": states, "main weights in the optimizer": main}


def checkpoint_bytes(weights: Iterable[Weight], job: Job) -> dict[str, int]:
    """Bytes of tensors in a checkpoint of all ranks: each element once. Local operation.

    Args:
        weights: All.
        job: What is planned.
    """
    found = list(weights)
    model = sum(_stored(weight) for weight in found)
    return {
        "model": model,
        "optimizer": sum(w.logical * (own + extra) for w, own, extra in _states(found, job)),
    }


def _states(weights: Iterable[Weight], job: Job) -> Iterator[tuple[Weight, int, int]]:
    """Each trained weight, and bytes of an element of the optimizer's own states and of its main weight."""
    trained = [weight for weight in weights if weight.trained]
    fused = job.optimizer == "fused-adam"
    # FusedAdam keeps main weights of all parameters, fp32 ones too, or of none.
    every = fused and any(weight.is_low for weight in trained)
    for weight in trained:
        has_main = weight.is_low or every
        size = 4 if fused or has_main else weight.itemsize
        yield weight, OPTIMIZERS[job.optimizer] * size, 4 if has_main else 0


def _stored(weight: Weight) -> int:
    """Bytes of a weight in a file: components without padding, both directions of those that have both on the rank."""
    if weight.format is None or weight.format.name not in FORMATS or not weight.format.buffers:
        return weight.logical * weight.itemsize
    total = 0.0
    for buffer in weight.format.buffers:
        if buffer.block is not None:
            total += weight.logical * buffer.dtype.itemsize / math.prod(buffer.block)
    return math.ceil(total)


def temporary_in_step(weights: Iterable[Weight], job: Job) -> int:
    """Bytes that an optimizer's step needs beside its state and gradients: fp32 copies of gradients. Local.

    FusedAdam reads gradients as they are.
    """
    if job.optimizer == "fused-adam":
        return 0
    low = (w for w in weights if w.trained and w.is_low and w.gradient < 4 * w.elements)
    return sum(4 * weight.elements for weight in low)


def sums(weights: Iterable[Weight], *names: str) -> Any:
    """Sums of some of the weights' numbers, in this order; of one name the number."""
    found = list(weights)
    totals = [sum(getattr(weight, name) for weight in found) for name in names]
    return totals[0] if len(totals) == 1 else totals
