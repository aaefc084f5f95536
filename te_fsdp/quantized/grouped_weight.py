"""A quantized weight that contains all experts of a layer.

FSDP2 and optimizers see ``GroupedWeight`` as an ordinary TE quantized tensor: (experts, out, in), quantized and
dequantized as a unit. Internally it is TE's ``GroupedTensor``: flat buffers of all experts. Each expert's quantized
tensor is a view of them, with its own scale in per-tensor formats.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from te_fsdp.quantized.amax import amax_group_name, set_amax_group
from te_fsdp.quantized.components import (
    BufferLocations,
    Component,
    bytes_of_ranks,
    components_of,
    pack_bytes,
    pack_flat,
)
from te_fsdp.quantized.quantizer_record import count_write
from te_fsdp.records import copy_param_attrs
from te_fsdp.upstream import fsdp2_patches as _fsdp2_patches, te as _te, torch_dtensor as _torch
from te_fsdp.upstream.patches import replace_once, wrapping
from te_fsdp.upstream.te_derived import derive_transpose
from te_fsdp.upstream.te_formats import GROUPED_BUFFERS


class GroupedGather(NamedTuple):
    """Metadata of an all-gather ([Note: packed tensors] in ``components.py``)."""

    names: list[str]  #: Names of the sent buffers
    shape: tuple[int, ...]  #: Unsharded shape
    flat: BufferLocations | None = None  #: Their offsets in one flat tensor, for a shard axis of size 1
    places: BufferLocations | None = None  #: Their offsets in packed tensors
    dim: int = 0  #: The sharded dim


@functools.cache
def grouped_weight_class() -> type[torch.Tensor]:
    """Return the class. It is created at the first call, because TE is not imported before."""

    @wrapping
    def wrap_copy(
        self: Any, source: torch.Tensor, *args: Any, stock: Callable[..., Any], **kwargs: Any
    ) -> Any:
        # TE copies from the memory of other classes, which this one does not have: a segmentation fault.
        return stock(self, getattr(source, "grouped", source), *args, **kwargs)

    replace_once(_te.te().tensor.GroupedTensor, "copy_", wrap_copy)  # ``load_state_dict`` of a stock module
    return type("GroupedWeight", (_GroupedWeightMixin, _te.te().QuantizedTensor), {"__module__": __name__})


# [Note: shards of all experts] FSDP2 shards the weight between experts if their number is divisible. An all-gather
# then concatenates the flat buffers of the shards, which is the layout of the unsharded ``GroupedTensor``. Otherwise
# FSDP2 shards every expert into full blocks of rows or columns, if there are enough, and their bytes are packed
# ([Note: packed tensors]). Otherwise the shards have different numbers of experts, or none. Blocks and scales are
# never split.
#
# A contiguous (experts, out, in) tensor has the same bytes as TE's grouped tensor of it: the experts follow each other
# in flat buffers. Conversions copy nothing. FSDP2 frees and refills the memory of the gathered weight, and the grouped
# tensor that TE has saved for backward uses the same memory.
class _GroupedWeightMixin:
    """Methods that ``GroupedWeight`` adds to TE's ``QuantizedTensor``."""

    grouped: Any  #: The ``GroupedTensor``; ``None`` without experts
    experts: list[Any]  #: Each expert's quantized tensor, a view of ``grouped``
    owns_buffers: bool  #: Whether the buffers of a gathered weight are copies of the gathered memory
    _quantizer: Any
    shape: torch.Size
    dtype: torch.dtype
    device: torch.device

    def dequantize(self, *, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Return the high-precision (experts, out, in) tensor."""
        dtype = self.dtype if dtype is None else dtype
        if not self.experts:
            return torch.empty(self.shape, dtype=dtype, device=self.device)
        return torch.stack([expert.dequantize(dtype=dtype) for expert in self.experts])

    def quantize_(self, tensor: torch.Tensor, *, noop_flag: torch.Tensor | None = None) -> Any:
        """Quantize (experts, out, in) in place, each expert with its own scale.

        Collective over the quantizer's amax group if it has one: one reduction per expert.
        """
        if isinstance(tensor, _te.te().QuantizedTensor):
            tensor = tensor.dequantize()
        self.mark_experts()
        count_write(self._quantizer)
        for expert, value in zip(self.experts, tensor.detach(), strict=True):
            self._quantizer.update_quantized(value, expert, noop_flag=noop_flag)
        return self

    def mark_experts(self) -> None:
        """Set the amax group of the experts' quantizers. TE creates separate quantizers for some of them."""
        group = amax_group_name(self)  # type: ignore[bad-argument-type]
        if group is not None:
            for expert in self.experts:
                set_amax_group(expert, group)

    def derive_transposes(self) -> None:
        """Recompute the cached transposes of float8 weights from their bytes. Local operation."""
        for expert in self.experts:
            derive_transpose(expert)  # all experts share one buffer

    def get_metadata(self) -> dict[str, Any]:
        """Return the existing flat buffers by their names in ``GroupedTensor``."""
        return dict(_buffers(self.grouped))

    def get_data_tensors(self) -> tuple[torch.Tensor, ...]:
        """Return the existing flat buffers; TE checks whether they are pinned."""
        return tuple(self.get_metadata().values())

    def get_usages(self) -> dict[str, bool]:
        """Return the directions that the buffers provide."""
        return self._quantizer.get_usages()

    def as_grouped(self) -> Any:
        """Return a separate ``GroupedTensor`` over the same buffers, for one forward and its backward."""
        with torch.inference_mode(False):  # otherwise the wrapper created outside cannot be detached
            return self.grouped.detach()

    def detach(self) -> Any:
        """Return a new tensor object with the same buffers."""
        new = _make(self.grouped, self.experts, tuple(self.shape), self.dtype, self.device, self._quantizer)
        new.owns_buffers = self.owns_buffers
        return new

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return self.cloned()

    def __reduce_ex__(self, proto: Any) -> Any:
        if not self.experts:
            return empty_experts, (tuple(self.shape), self._quantizer, self.dtype, self.device)
        return self.grouped.detach().__reduce_ex__(proto)  # TE's, which pickles without te_fsdp have, too

    def cloned(self) -> Any:
        """Return a copy with its own buffers."""
        new = empty_experts(tuple(self.shape), self._quantizer.copy(), self.dtype, self.device)
        for name, buffer in _buffers(self.grouped):
            getattr(new.grouped, name).copy_(buffer)
        return new

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any, kwargs: Any = None) -> Any:
        """Keep the weight quantized in operations on the full tensor. Dequantize it for all others."""
        kwargs = kwargs or {}
        aten, weight = torch.ops.aten, args[0]
        if isinstance(weight, cls):
            is_view = func in (aten.view.default, aten.as_strided.default)
            if func in (aten.alias.default, aten.detach.default) or (
                is_view and tuple(args[1]) == tuple(weight.shape)
            ):
                return weight.detach()
            if func is aten.clone.default:
                return weight.cloned()
            if func is aten.copy_.default:
                source = args[1]
                if isinstance(source, cls) and _kind(weight) == _kind(source):
                    for name, target in _buffers(weight.grouped):
                        target.copy_(getattr(source.grouped, name))
                else:
                    weight.quantize_(source)
                return weight
            if is_view:
                return func(weight.dequantize(), *args[1:], **kwargs)
        return super().__torch_dispatch__(func, types, args, kwargs)  # type: ignore[misc]

    # --- FSDP2

    def release(self) -> None:
        """Free buffers of a gathered weight that FSDP2 does not own. Called when its shard replaces it."""
        for _, buffer in _buffers(self.grouped) if self.owns_buffers else ():
            buffer.untyped_storage().resize_(0)

    def fsdp_pre_all_gather(
        self,
        mesh: DeviceMesh,
        outer_size: torch.Size,
        outer_stride: tuple[int, ...],
        module: nn.Module | None = None,
        mp_policy: Any = None,
    ) -> tuple[tuple[torch.Tensor, ...], GroupedGather]:
        """Return the flat buffers as (experts, bytes per expert), padded to the first rank's number of experts."""
        if module is not None:
            _fsdp2_patches.disable_flat_shards(module, self)  # type: ignore[arg-type]
        total, ranks, full_shape = outer_size[0], mesh.size(), tuple(outer_size)
        within = [dim for dim in (1, 2) if self.shape[dim] != outer_size[dim]]
        if within:
            names = [*_buffers_sent_by_shard(self.grouped, self.experts[0])]
            buffers = [getattr(self.grouped, name).view(total, -1) for name in names]
            flats, places = pack_bytes(buffers, tuple(self.shape))
            return flats, GroupedGather(names, full_shape, places=places, dim=within[0])
        rows, template = -(-total // ranks), self
        if not self.experts:
            template = empty_experts((1, *outer_size[1:]), self._quantizer, self.dtype, self.device)
        # NVFP4 stores the amax with the weight, as its second-level scale.
        has_amax = any("amax" in buffer.name for buffer in _te.format_of_quantizer(self._quantizer).buffers)
        inputs, names = [], []
        for name, buffer in _buffers(template.grouped):
            if name in ("amax", "scale") and not has_amax:
                continue  # workspaces of the quantization
            if any(buffer is getattr(template.grouped, sent_name) for sent_name in names):
                continue  # current scaling shares its scales between both directions
            local = buffer.view(len(template.experts), -1)[: len(self.experts)]
            if len(local) < rows:
                local = torch.cat([local, local.new_zeros((rows - len(local), local.shape[1]))])
            inputs.append(local)
            names.append(name)
        if ranks == 1 and len(inputs) > 1:
            packed, flat = pack_flat(inputs)
            return (packed,), GroupedGather(names, full_shape, flat=flat)
        if total % ranks:
            flats, places = pack_bytes(inputs, (rows, *outer_size[1:]))
            return flats, GroupedGather(names, full_shape, places=places)
        return tuple(inputs), GroupedGather(names, full_shape)

    def fsdp_post_all_gather(
        self,
        all_gather_outputs: tuple[torch.Tensor, ...],
        metadata: GroupedGather,
        param_dtype: torch.dtype,
        *,
        out: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]] | None:
        """Return the unsharded weight over the gathered buffers. Later all-gathers refill the same memory."""
        if metadata.places is not None:
            unsharded = self._unpacked(all_gather_outputs, metadata, metadata.places, param_dtype, out)
            return (unsharded, ()) if out is None else None
        if out is not None:
            return None
        if metadata.flat is not None:
            values = list(metadata.flat.typed(all_gather_outputs[0].view(-1)))
        else:
            values = [output[: metadata.shape[0]].reshape(-1) for output in all_gather_outputs]
        by_name = dict(zip(metadata.names, values, strict=True))
        experts, numel = metadata.shape[0], math.prod(metadata.shape[1:])
        fields = {GROUPED_BUFFERS[name]: buffer for name, buffer in by_name.items()}
        offsets = {}
        if _te.format_of_quantizer(self._quantizer).has_one_scale and "columnwise_data" in fields:
            # Both directions share the scale, which is sent once.
            fields["columnwise_scale_inv"] = fields["scale_inv"]
        for name in ("scale_inv", "columnwise_scale_inv"):
            if name in fields:
                size = fields[name].numel() // experts
                offsets[f"{name}_offsets"] = [index * size for index in range(experts + 1)]
        grouped = _te.te().tensor.GroupedTensor(
            (experts * metadata.shape[1], metadata.shape[2]),
            param_dtype,
            num_tensors=experts,
            shapes=[tuple(metadata.shape[1:])] * experts,
            quantizer=self._quantizer,
            offsets=[index * numel for index in range(experts + 1)],
            **offsets,
            **fields,
        )
        return _adopt(grouped), ()

    def _unpacked(
        self,
        outputs: Sequence[torch.Tensor],
        metadata: GroupedGather,
        locations: BufferLocations,
        dtype: torch.dtype,
        out: torch.Tensor | None,
    ) -> Any:
        """Return the unsharded weight built from packed tensors, with its own buffers."""
        if out is None:
            unsharded = empty_experts(metadata.shape, self._quantizer.copy(), dtype, self.device)
            unsharded.owns_buffers = True
        else:  # refills memory that `release` has freed, which autograd may have saved for backward
            unsharded: Any = _torch.local_of(out)
            for _, buffer in _buffers(unsharded.grouped):
                buffer.untyped_storage().resize_(buffer.nbytes)
                buffer.zero_()  # padding of scales
        if metadata.dim:
            experts, ranks = self.shape[0], unsharded.shape[metadata.dim] // self.shape[metadata.dim]
            flat = bytes_of_ranks(outputs, self.shape, metadata.dim, ranks)
            parts = _buffers_sent_by_shard(self.grouped, self.experts[0])
            wholes = _buffers_sent_by_shard(unsharded.grouped, unsharded.experts[0])
            for (name, part), values in zip(parts.items(), locations.typed(flat), strict=True):
                size = values.shape[-1]
                sent, target = part.tensor, getattr(unsharded.grouped, name)
                source = values.as_strided(
                    (experts, ranks, *sent.shape), (ranks * size, size, *sent.stride())
                )
                into = wholes[name].tensor
                strides = (target.numel() // experts, *into.stride())
                stack = target.as_strided((experts, *into.shape), strides, target.storage_offset())
                if part.block is None:
                    stack.copy_(source[:, 0])  # one value of the unsharded weight, identical on all ranks
                else:
                    stack.unflatten(metadata.dim, (ranks, sent.shape[metadata.dim - 1])).copy_(
                        source.movedim(1, metadata.dim)
                    )
            unsharded.derive_transposes()
        else:  # one expert after the other
            flat = torch.cat([output.reshape(output.shape[0], -1) for output in outputs], dim=1)
            for name, value in zip(metadata.names, locations.typed(flat), strict=True):
                getattr(unsharded.grouped, name).copy_(value[: metadata.shape[0]].reshape(-1))
        for output in outputs:  # FSDP2 would free them with the weight only, and allocates them again
            output.untyped_storage().resize_(0)
        return unsharded


def quantize_experts(value: torch.Tensor, quantizer: Any, group_name: str | None) -> torch.Tensor:
    """Quantize (experts, out, in), possibly without experts, into a new ``GroupedWeight``."""
    persistent = _te.persistent_quantizer_of(quantizer)
    new: Any = empty_experts(tuple(value.shape), persistent, value.dtype, value.device)
    set_amax_group(new, group_name)
    with torch.no_grad():
        new.quantize_(value)
    return new


def empty_experts(shape: Sequence[int], quantizer: Any, dtype: torch.dtype, device: torch.device) -> Any:
    """Return a ``GroupedWeight`` with zeroed buffers. Local operation."""
    grouped, experts = None, []
    if shape[0]:
        grouped = _te.te().tensor.GroupedTensor.make_grouped_tensor_with_shapes(
            num_tensors=shape[0],
            shapes=[tuple(shape[1:])] * shape[0],
            quantizer=quantizer,
            device=device,
            dtype=dtype,
        )
        for _, buffer in _buffers(grouped):
            buffer.zero_()  # includes the padding of scales, which no kernel writes
        experts = grouped.quantized_tensors
    return _make(grouped, experts, tuple(shape), dtype, device, quantizer)


def _adopt(grouped: Any) -> Any:
    """Return a ``GroupedWeight`` over the buffers of a quantized ``GroupedTensor`` created by TE."""
    storage = grouped.detach()
    storage.quantizer = storage.quantizer.copy()  # the module reconfigures its own quantizer
    experts = storage.split_into_quantized_tensors()
    return _make(storage, experts, tuple(storage.shape), storage.dtype, storage.device, storage.quantizer)


def _buffers(grouped: Any) -> list[tuple[str, torch.Tensor]]:
    """Return name and tensor of the existing buffers of a ``GroupedTensor``."""
    buffers = [] if grouped is None else [(name, getattr(grouped, name)) for name in GROUPED_BUFFERS]
    return [(name, buffer) for name, buffer in buffers if buffer is not None]


def _kind(weight: Any) -> tuple[Any, ...]:
    """Return quantizer, names and sizes of buffers. Bytes can be copied between weights with equal results."""
    sizes = [(name, buffer.numel(), buffer.dtype) for name, buffer in _buffers(weight.grouped)]
    return _te.format_of_quantizer(_te.quantizer_of(weight)), type(_te.quantizer_of(weight)), sizes


def _make(
    grouped: Any,
    experts: list[Any],
    shape: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
    quantizer: Any,
) -> Any:
    new: Any = grouped_weight_class()(shape, dtype, device=device)
    new.grouped, new.experts, new.owns_buffers = grouped, experts, False
    setattr(new, _te.QUANTIZER, quantizer)
    return new


class _AsGrouped(torch.autograd.Function):
    """Convert a tensor to a grouped tensor over its memory. Gradients pass unchanged."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        return _wrap(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return gradients[0]


def as_grouped(tensor: torch.Tensor) -> torch.Tensor:
    """Return a ``GroupedTensor`` over the memory of a contiguous (experts, out, in) or (experts, out). Local."""
    if torch.is_grad_enabled() and tensor.requires_grad:
        return _AsGrouped.apply(tensor)
    return _wrap(tensor)


def _wrap(tensor: torch.Tensor) -> torch.Tensor:
    if isinstance(tensor, _GroupedWeightMixin):
        return tensor.as_grouped()
    tensor = tensor.detach()
    return _te.te().tensor.GroupedTensor.make_grouped_tensor_from_rowwise_data(
        num_tensors=tensor.shape[0],
        tensor_shape=tuple(tensor.shape[1:]),
        rowwise_data=tensor,
        dtype=tensor.dtype,
    )


def as_plain_parameter(parameter: torch.nn.Parameter) -> torch.nn.Parameter:
    """Return the ordinary parameter over the memory of a ``GroupedTensor`` one, with its attributes. Local."""
    if not isinstance(parameter, _te.te().tensor.GroupedTensor):
        return parameter  # unchanged
    grouped: Any = parameter.detach()
    local = grouped.rowwise_data.view(parameter.shape) if grouped.quantizer is None else _adopt(grouped)
    new = torch.nn.Parameter(local, requires_grad=parameter.requires_grad)
    initial = _te.high_precision_value(parameter)
    if initial is not None:
        _te.attach_high_precision_value(new, initial)
    copy_param_attrs(parameter, new)
    return new


def grouped_shard_dim(
    shape: tuple[int, ...],
    ranks: int,
    counts: Collection[int] = (),
    fits: Callable[[int], bool] = lambda dim: True,
) -> int:
    """Return the dim along which FSDP2 must shard a tensor of all experts over ``ranks``, for equal shards.

    It is 0 if the number of experts is divisible, else the first divisible dim, else 0 with uneven or empty shards.
    The shape is tp-local (experts, out, in) or (experts, out). ``counts`` are the numbers of experts of the ``ep``
    ranks, which all shard along one dim. ``fits`` returns whether an expert may be sharded along a divisible dim.
    """
    if all(count % ranks == 0 for count in counts or shape[:1]):
        return 0
    return next((dim for dim in range(1, len(shape)) if shape[dim] % ranks == 0 and fits(dim)), 0)


# --- input of an all-gather


def _buffers_sent_by_shard(grouped: Any, expert: Any) -> dict[str, Component]:
    """Map the buffers that an all-gather sends, if experts are sharded within, to components of the first expert."""
    # Buffers without a component can be recomputed from the others.
    first: dict[int, str] = {}
    for name, buffer in _buffers(grouped):
        first.setdefault(buffer.data_ptr(), name)
    components = components_of(expert, "gathered weight")
    return {first[component.tensor.data_ptr()]: component for component in components}
