"""What a step does with each parameter of a sharded model on meta: bytes held, gathered, reduced and updated.

Read off the model that ``te_fsdp.fully_shard`` has sharded: its DTensors, and the plan that it made
(:class:`~te_fsdp.parameters.ParameterPlan`). The rank is the first one, which has the largest shard of everything:
FSDP2 cuts as ``torch.chunk`` does.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch.distributed.tensor import DTensor

from te_fsdp import _te, _torch
from te_fsdp._fsdp2_patches import whole_shards
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
    """One parameter on the first rank; all numbers without a unit are bytes."""

    label: str  #: Full name
    unit: str  #: Name of its unit
    storage: Storage  #: Row of the strategy
    experts: bool  #: Whether it is dealt out over ``ep``
    format: Format | None  #: Of a quantized one
    itemsize: int  #: Of an element in its own dtype, the nominal one of a quantized weight
    logical: int  #: Elements of the original: of all ranks, each once
    elements: int  #: Elements of this rank's shard
    whole: int  #: Elements of the gathered parameter: what tp and ep leave of it
    held: int  #: Of the shard
    #: Whether no other rank has a part of it, though FSDP2 manages it: nothing is sent, and the gathered parameter has
    #: the shard's memory, unless its values are cast.
    is_alone: bool
    #: Whether its gradient becomes the reduced one without a buffer (:mod:`te_fsdp._fsdp2_patches`).
    is_passed: bool
    gathered: int  #: Of the gathered parameter in forward, beside the shard; 0 where nothing is gathered
    gathered_again: int  #: Of the gathered parameter in backward
    #: That TransformerEngine makes of a gathered quantized weight for backward, beside what was gathered: transposes.
    #: Its module's backward frees them.
    derived: int
    derived_early: int  #: Likewise, in forward already
    #: That TransformerEngine makes of it in its module's backward alone: transposes of float8 weights that stay
    #: gathered, and what weights that are not quantized themselves are quantized into.
    copied: int
    unreduced: int  #: Of its gradient as backward makes it
    gradient: int  #: Of its reduced gradient; 0 if it is not trained
    wire: int  #: Bytes of an element of its gradient when it is sent

    @property
    def module(self) -> str:
        """Name of the module that has it."""
        return self.label.rpartition(".")[0]

    @property
    def name(self) -> str:
        """The last part of its name."""
        return self.label.rpartition(".")[2]

    @property
    def reduction(self) -> int:
        """Of the buffer that its gradient is reduced from."""
        return self.whole * self.wire if self.gradient else 0

    @property
    def is_low(self) -> bool:
        """Whether it is quantized, or below fp32: an optimizer then keeps a main weight."""
        return self.format is not None or self.itemsize < 4


def weights_of(model: nn.Module, job: Job) -> list[Weight]:
    """Every parameter of a sharded model on meta, each once, in the order of its modules. Local operation."""
    state = required_state(model, "plan")
    whole = {key: passes for unit in state.modules.values() for key, passes in whole_shards(unit).items()}
    places: dict[int, Place] = {}
    for place in places_of(model):
        places.setdefault(id(place.parameter), place)
    return [_weight(place, whole.get(key), state, job) for key, place in places.items()]


def _weight(place: Place, passes: bool | None, state: ShardingState, job: Job) -> Weight:
    """One place's weight; ``passes``: of a whole shard, whether its gradient is passed on."""
    label, module, name, parameter = place
    plan, precision = plan_of(parameter), state.precision_plan
    assert plan is not None  # fully_shard has noted it on each
    local, quantizer = _torch.local_of(parameter), _te.weight_quantizer(module, name)
    shape, replicated = _without_fsdp(parameter), plan.storage.is_whole
    dtype = precision.compute.get(plan.unit) if precision is not None else None
    whole, compute = math.prod(shape), (dtype or parameter.dtype).itemsize
    kind, derived, early, copied = None, 0, 0, 0
    if quantizer is None:
        gathered = again = whole * compute
        held = bytes_of(local)
        # TE quantizes it for its products under a recipe.
        multiplied = _te.kind_of(module) in ("Linear", "LayerNormLinear", "LayerNormMLP", "GroupedLinear")
        if job.recipe != "none" and multiplied and not (name.startswith("layer_norm") or "bias" in name):
            copied = 2 * whole
    else:
        kind = _te.format_of_quantizer(quantizer)
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
        unit=plan.unit,
        storage=plan.storage,
        experts=plan.experts,
        format=kind,
        itemsize=parameter.element_size(),
        logical=parameter.numel() * (state.meshes.size("ep") if plan.experts else 1),
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


# ------------------------------------------------------------------------------------------- optimizer and checkpoint


def optimizer_bytes(weights: Iterable[Weight], job: Job, ranks: dict[str, int]) -> dict[str, int]:
    """Bytes of an optimizer's state on this rank: its own states, and main weights. Local operation.

    ``ranks`` are sizes of the axes of the dense meshes: ``shard_optimizer`` cuts states over some.
    """
    states = main = 0
    for weight, own, extra in _states(weights, job):
        cut = [ranks[axis] for axis in weight.storage.cut_further] if job.outer_strategy == "optim" else []
        elements = -(-weight.elements // math.prod(cut))
        states += elements * own
        main += elements * extra
    return {"optimizer states": states, "main weights in the optimizer": main}


def checkpoint_bytes(weights: Iterable[Weight], job: Job) -> dict[str, int]:
    """Bytes of tensors in a checkpoint of all ranks: each element once. Local operation."""
    found = list(weights)
    optimizer = sum(weight.logical * (own + extra) for weight, own, extra in _states(found, job))
    return {"model": sum(map(_stored, found)), "optimizer": optimizer}


def _states(weights: Iterable[Weight], job: Job) -> Iterator[tuple[Weight, int, int]]:
    """Each trained weight, and bytes of an element of the optimizer's own states and of its main weight."""
    trained = [weight for weight in weights if weight.gradient]
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
    blocks = ((b.dtype.itemsize, math.prod(b.block)) for b in weight.format.buffers if b.block is not None)
    return math.ceil(sum(weight.logical * itemsize / block for itemsize, block in blocks))


def temporary_in_step(weights: Iterable[Weight], job: Job) -> int:
    """Bytes of an optimizer's step beside its state: fp32 copies of gradients; FusedAdam reads those as they are."""
    low = (w for w in weights if w.gradient and w.is_low and w.gradient < 4 * w.elements)
    return 0 if job.optimizer == "fused-adam" else sum(4 * weight.elements for weight in low)


def sums(weights: Iterable[Weight], name: str) -> int:
    """Sum of one of the weights' numbers."""
    return sum(getattr(weight, name) for weight in weights)
