"""One scale for one weight: quantization whose amax covers every rank that holds a piece.

Every way to write into a quantized weight asks the tensor for its reduction group (TE 2.20.2
``update_quantized`` of the per-tensor quantizers): initialisation, the optimizer's requantization, loading
from high precision, ``copy_`` and ``quantize_`` by the user. te_fsdp marks the weights of bound modules with
the weight mesh's group, and the mark sticks (:mod:`te_fsdp.quantized.amax_mark`).

Delayed scaling: a weight's quantizer reads the module's scale and writes the module's amax history, always. TE makes a
new history when the length changes, as it does in the first forward if ``te.autocast`` has another
``amax_history_len`` than ``quantized_model_init`` had. It tells the weights of the module, but not FSDP2's shards,
which go on with the old history: their scale stays as it was, and weights that grow are cut off at the format's
largest value, in silence (TE 2.20.2 ``adjust_amax_history_length``). So the shards are remembered, and told too.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from te_fsdp import _te, _te_modules, _torch
from te_fsdp.parameters import binding_of
from te_fsdp.quantized.amax_mark import drop_group, is_marked, mark, reduce_newest_amax
from te_fsdp.quantized.grouped_weight import is_grouped_weight, quantize_experts

if TYPE_CHECKING:
    from torch import nn

    from te_fsdp.parameters import Binding


def attach_group(local: torch.Tensor, binding: Binding) -> None:
    """Tell a quantized local shard over which ranks its quantizations must reduce the amax.

    Local operation. Nothing to do for formats whose scales are local to a block. Without a weight mesh nothing cuts
    the weight, and a group that TE has put there is dropped.
    """
    if is_grouped_weight(local):
        group = experts_group(binding)
        drop_group(local) if group is None else mark(local, group)
        return
    if is_marked(local, binding.weight_group):
        return  # what every gather after the first finds
    if not _te.is_quantized(local) or not _te.one_scale_quantizers(_te.quantizer_of(local)):
        return
    group = binding.weight_group
    if group is None:
        drop_group(local)
    else:
        mark(local, group)


def quantize_shard(value: torch.Tensor, quantizer: Any, binding: Binding) -> torch.Tensor:
    """Quantize one rank's shard with the scale of the whole weight.

    Collective (max all-reduce of one or two floats) over the weight mesh for formats with one scale per
    tensor, local for the others.

    Args:
        value: High-precision local shard.
        quantizer: The module's weight quantizer; left without a group afterwards.
        binding: Gives the weight mesh.

    Returns:
        Quantized tensor of ``value``'s shape.
    """
    if value.dim() == 3:
        return quantize_experts(value, quantizer, experts_group(binding))
    shared = binding.weight_mesh is not None and _te.needs_shared_amax(quantizer)
    if shared:
        _te.reduce_amax_over(quantizer, binding.weight_mesh.get_group())  # type: ignore[union-attr]
    try:
        with torch.no_grad():
            local = quantizer(value)
    finally:
        if shared:
            _te.reduce_amax_over(quantizer, None)
    attach_group(local, binding)
    reduce_newest_amax([local])
    return local


def experts_group(binding: Binding) -> str | None:
    """Name of the group whose ranks hold pieces of the same experts: that of tp, and FSDP2's if it cuts within them."""
    rule = binding.rules.get("weight")
    if binding.cut_within and binding.weight_mesh is not None:
        return binding.weight_mesh.get_group().group_name
    cut = rule is not None and rule.shard_dim is not None and binding.tp_mesh is not None
    return binding.tp_mesh.get_group().group_name if cut else None  # type: ignore[missing-attribute]


def requantize(local: torch.Tensor, binding: Binding) -> None:
    """Give a weight that TE quantized rank by rank the scale of the whole weight, in place.

    Uses the value from before quantization where TE kept it, the dequantized bytes otherwise. Collective over
    the weight mesh for per-tensor formats; nothing to do for the others, whose scales are local to a block.
    """
    if _te.has_delayed_scale(local):  # every rank has quantized with the same scale
        attach_group(local, binding)
        reduce_newest_amax([local])
        return
    if binding.weight_mesh is None or not _te.needs_shared_amax(_te.quantizer_of(local)):
        return
    value = _te.high_precision_value(local)
    value = local.dequantize() if value is None else value.to(local.device)  # type: ignore[operator]
    attach_group(local, binding)
    with torch.no_grad():
        local.quantize_(value)  # type: ignore[operator]


def quantize_whole(
    module: nn.Module,
    name: str,
    local: torch.Tensor,
    value: torch.Tensor,
    *,
    keep_delayed_scale: bool = False,
) -> None:
    """Write a value into a quantized parameter, with the scale that the whole weight has.

    Collective over the ranks that hold pieces of the weight (maximum of one or two floats) for formats with one scale
    per tensor.

    Args:
        module: The parameter's owner.
        name: Its name there.
        local: Its local tensor.
        value: float32, of the local shape.
        keep_delayed_scale: For delayed scaling: use the scale that is there, instead of the one of this value.
    """
    binding = binding_of(module)
    if is_grouped_weight(local):  # every expert has a scale of its own
        if binding is not None:
            attach_group(local, binding)
        local.quantize_(value)  # type: ignore[operator]
        return
    group = _group_of_whole(module._parameters[name], binding)
    quantizer: Any = _te.quantizer_of(local)
    if _te.has_delayed_scale(local):
        amax = value.abs().amax().reshape(1) if value.numel() else value.new_zeros(1)
        if group is not None:
            dist.all_reduce(amax, op=dist.ReduceOp.MAX, group=group)
        if not keep_delayed_scale:
            _te_modules.set_delayed_scale(module, name, local, amax)
        local.quantize_(value)  # type: ignore[operator]
        quantizer.amax.copy_(amax.reshape(quantizer.amax.shape))
        return
    if binding is not None and binding.weight_mesh is not None:
        attach_group(local, binding)
    elif group is not None and _te.needs_shared_amax(quantizer):
        _te.take_amax_over(local, group)
    local.quantize_(value)  # type: ignore[operator]


def _group_of_whole(parameter: torch.Tensor | None, binding: Binding | None) -> Any | None:
    """The process group of the ranks that hold pieces of a parameter; ``None`` where one rank holds it all."""
    if binding is not None and binding.weight_mesh is not None:
        return binding.weight_mesh.get_group()
    if not isinstance(parameter, DTensor):
        return None
    mesh = parameter.device_mesh
    cuts = [i for i, p in enumerate(parameter.placements) if _torch.shard_dim_of(p) is not None]
    assert len(cuts) <= 1, "tp without a weight mesh is refused when the model is bound"
    return mesh.get_group(cuts[0]) if cuts else None


def remember_shard(binding: Binding, module: nn.Module, local: torch.Tensor) -> None:
    """Remember a shard while its module holds it; in forward the module holds the gathered weight. Local operation."""
    for name, parameter in module._parameters.items():
        if parameter is not None and _torch.local_of(parameter) is local:
            binding.shards[name] = weakref.ref(local)


def follow_history(binding: Binding, module: nn.Module) -> None:
    """Point the quantizers of a module's weights, gathered and not, at its scale and history. Local operation."""
    tensors = [(n, _torch.local_of(p)) for n, p in module._parameters.items() if p is not None]
    tensors += [(n, local) for n, ref in binding.shards.items() if (local := ref()) is not None]
    for name, local in tensors:
        live = _te.weight_quantizer(module, name)
        if live is None or not _te.is_quantized(local) or not _te.has_delayed_scale(local):
            continue
        quantizer = _te.quantizer_of(local)
        quantizer.scale, quantizer.amax = live.scale, live.amax
        attach_group(local, binding)  # TE may have put another quantizer there
