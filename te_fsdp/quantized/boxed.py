"""Quantized weights in torch's own state dicts, on any mesh.

A save writes each rectangle of the original weight as one of TE's quantized tensors: data and scales. If a
rectangle splits a block of scales, its high-precision values are written.

A load reads rectangles written by a different mesh (:class:`QuantizedSlice`). *Pending values* are values that a load
has read for a weight with one scale. They are quantized when the amax of all ranks is available.
"""

from __future__ import annotations

import functools
import math
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from te_fsdp.boxed_dtensor import BoxedDTensor, BoxMap, boxed, boxed_like
from te_fsdp.errors import PlacementError
from te_fsdp.layout import Box, ParameterRule, slices
from te_fsdp.quantized.components import components_of, describe_format, drop_derived_state
from te_fsdp.records import WEIGHT, ModuleBinding, weight_record
from te_fsdp.upstream import te as _te, torch_dtensor as _torch
from te_fsdp.upstream.torch_dcp import wrapper
from te_fsdp.upstream.torch_functions import is_in_conversion


def describe_shards(
    module: nn.Module, binding: ModuleBinding, name: str, parameter: torch.Tensor | None
) -> None:
    """Give a bound parameter the class that describes its shards to torch's functions. Local operation."""
    if not isinstance(parameter, DTensor):
        return
    rule = binding.rules.get(name) or ParameterRule(None)
    boxed(parameter, rule, has_tp=binding.tp_mesh is not None)
    if not _te.is_quantized(_torch.local_of(parameter)):
        return
    placements, owner = tuple(parameter.placements), (weakref.ref(module), name)
    if type(parameter) is BoxedDTensor:
        # The class changes in place, because optimizers, hooks and FSDP2 refer to the object.
        parameter.__class__ = QuantizedDTensor
    elif type(parameter) is DTensor:
        parameter.__class__ = QuantizedParameter
    if isinstance(parameter, BoxedDTensor):
        has_ep = binding.ep.experts_mesh is not None and rule.layout.is_grouped
        boxes = BoxMap(rule, binding.tp_mesh is not None, has_ep, placements, owner)
        parameter.__dict__[_torch.BOXES] = boxes


class QuantizedDTensor(BoxedDTensor):
    """A DTensor whose local tensor is one of TE's quantized tensors."""

    kept_class: type[BoxedDTensor] | None

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run the function as for any DTensor, on pending values instead of older bytes."""
        name = func.__name__
        if name in ("__get__", "__set__") or not any(map(_has_pending_values, args)):
            return super().__torch_function__(func, types, args, kwargs)
        if name == "detach":
            return _attach_pending(super().__torch_function__(func, types, args, kwargs), args[0])
        # In-place functions change the pending values. Sources of `copy_` are not rounded to the weight's dtype.
        is_in_place = name.endswith("_")
        newest = (_pending_or_same(arg, in_fp32=is_in_place) for arg in args)
        result = super().__torch_function__(func, types, tuple(newest), kwargs)
        return args[0] if is_in_place else result

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return _attach_pending(super().__deepcopy__(memo), self, copies=True)

    def for_process(self) -> BoxedDTensor:
        """Return the values: pickles of TE's tensors lack the quantizer. Local operation."""
        return boxed_like(self._plain_values(), self)

    def __reduce_ex__(self, proto: Any) -> Any:
        """Pickle the newest values."""
        return BoxedDTensor.__reduce_ex__(_pending_or_same(self), proto)

    def _plain_values(self, dtype: torch.dtype | None = None) -> DTensor:
        local, dtype = self._local_tensor, dtype or self.dtype
        if not _te.is_quantized(local):
            return super()._plain_values()
        # After a load, pending values are newer than the bytes.
        waiting = pending_values(local)
        values = values_of(local, dtype) if waiting is None else waiting.to(dtype)
        return _torch.dtensor(values, _torch.with_dtype(self._spec, dtype))

    def float(self, *args: Any, **options: Any) -> torch.Tensor:  # type: ignore[bad-override]
        """Return the values, in FP32 without autograd. torch would round them to BF16, which TE's tensors do not.

        Weights stay quantized in ``Module.float()``.
        """
        has_grad = self.requires_grad and torch.is_grad_enabled()
        if has_grad or not _te.is_quantized(self._local_tensor) or is_in_conversion():
            return super().float(*args, **options)
        return boxed_like(self._plain_values(torch.float32), self)

    def to_local(self, **options: Any) -> torch.Tensor:  # type: ignore[bad-override]
        """Return the local tensor, or its pending FP32 values. Writes to either are kept."""
        waiting = pending_values(self._local_tensor) if _has_pending_values(self) else None
        return super().to_local(**options) if waiting is None else waiting

    def view(self, *shape: Any, **options: Any) -> torch.Tensor:  # type: ignore[bad-override]
        """Return a view; a flat one, as of ``parameters_to_vector``, is of the values: MXFP8 has none of its bytes."""
        if shape == (-1,) and self.ndim > 1 and _te.is_quantized(self._local_tensor):
            return boxed_like(self._plain_values(), self).view(-1)
        return super().view(*shape, **options)

    def _needs_values(self) -> bool:
        return _te.is_quantized(self._local_tensor) or super()._needs_values()

    def local_boxes(self) -> list[Box]:
        """Return this rank's rectangles, of each expert in a tensor of several. Local operation."""
        boxes = super().local_boxes()
        if not _te.is_grouped(self._local_tensor):
            return boxes
        return [
            Box((b.original[0] + n, *b.original[1:]), (b.local[0] + n, *b.local[1:]), (1, *b.sizes[1:]))
            for b in boxes
            for n in range(b.sizes[0])
        ]

    def _shard_of(self, box: Box, *, to_write: bool) -> torch.Tensor:
        local = self._local_tensor
        if not _te.is_quantized(local):
            return super()._shard_of(box, to_write=to_write)
        if to_write and _has_pending_values(self):
            return _torch.local_of(_pending_or_same(self))[box.local_slices()]
        # This module has load_state_dict, which can compute one scale with all ranks.
        if _te.is_grouped(local):
            part = QuantizedSlice(local.experts[box.local[0]], box.local[1:], box.sizes[1:], True, waits=True)  # type: ignore[missing-attribute]
        else:
            part = QuantizedSlice(local, box.local, box.sizes, waits=True)
        return part.stored() if to_write else part

    def fill(self, original: torch.Tensor) -> DTensor:
        """Write this rank's rectangles of an original tensor. ``load_state_dict`` completes formats with one scale."""
        local = self._local_tensor
        if not _te.is_quantized(local):
            return super().fill(original)
        original = original.detach()
        for box in self.local_boxes():
            where = box.original, box.sizes
            # TE slices some formats only.
            is_quantized = _te.is_quantized(original)
            part = QuantizedSlice(original, *where) if is_quantized else original[slices(*where)]
            self._shard_of(box, to_write=False).copy_(part)
        return self


QuantizedDTensor.kept_class = QuantizedDTensor


class QuantizedParameter(QuantizedDTensor):
    """A parameter with rows in original order."""

    # Attribute access has no overhead, and only copies have the class above.
    __torch_function__ = _torch.plain_results  # type: ignore[bad-override]

    def _copied(self, name: str, *args: Any, **kwargs: Any) -> Any:
        # Copies have the newest values. A detached parameter shares pending values.
        newest = self if name == "detach" else _pending_or_same(self)
        copied = getattr(DTensor, name)(newest, *args, **kwargs)
        if type(copied) is DTensor:
            kind = _DetachedParameter if name == "detach" else QuantizedDTensor
            copied.__class__, copied.__dict__[_torch.BOXES] = kind, self.__dict__[_torch.BOXES]
        return copied

    detach = functools.partialmethod(_copied, "detach")
    clone = functools.partialmethod(_copied, "clone")
    to = functools.partialmethod(_copied, "to")
    cpu = functools.partialmethod(_copied, "cpu")
    cuda = functools.partialmethod(_copied, "cuda")


class _DetachedParameter(QuantizedDTensor):
    """Result of ``detach`` of a :class:`QuantizedParameter`, so that ``nn.Parameter`` accepts a parameter."""

    def requires_grad_(self, mode: bool = True) -> Any:
        """Set ``requires_grad``. ``nn.Parameter`` calls it and requires the class of the detached parameter."""
        self.__class__ = QuantizedParameter  # type: ignore[bad-argument-type]
        return super(QuantizedDTensor, self).requires_grad_(mode)


def weights_of(local: torch.Tensor) -> list[torch.Tensor]:
    """Return the quantized tensors that have their own components: of each expert, or the tensor itself."""
    return local.experts if _te.is_grouped(local) else [local]  # type: ignore[missing-attribute]


def pending_values(local: torch.Tensor, *, take: bool = False) -> torch.Tensor | None:
    """Return the pending values of a weight, or ``None``. ``take`` also removes them from its record."""
    weights = weights_of(local)
    records = [weight_record(weight) for weight in weights]
    if all(record.pending is None for record in records):
        return None
    waiting = [
        values_of(weight) if record.pending is None else record.pending
        for weight, record in zip(weights, records, strict=True)
    ]
    values = torch.stack(waiting) if _te.is_grouped(local) else waiting[0]
    for record, value in zip(records, values if _te.is_grouped(local) else waiting, strict=True):
        record.pending = None if take else value  # writes to the result change the pending values
    return values


def _has_pending_values(entry: Any) -> bool:
    """Return whether a tensor has pending values. Local operation."""
    local = _torch.local_of(entry) if isinstance(entry, QuantizedDTensor) else None
    return (
        local is not None
        and _te.is_quantized(local)
        and any(
            getattr(weight.__dict__.get(WEIGHT), "pending", None) is not None for weight in weights_of(local)
        )
    )


def _pending_or_same(tensor: Any, *, in_fp32: bool = False) -> Any:
    """Return a tensor's pending values, in its dtype or FP32; return tensors without any unchanged."""
    if not _has_pending_values(tensor):
        return tensor
    values = pending_values(_torch.local_of(tensor))
    assert values is not None
    values = values if in_fp32 else values.to(tensor.dtype)
    return _torch.with_local(values, tensor, requires_grad=False)


def _attach_pending(result: Any, source: QuantizedDTensor, *, copies: bool = False) -> Any:
    """Attach the pending values of ``source`` to a tensor derived from it. Local operation."""
    if not _has_pending_values(source):
        return result
    weights = (weights_of(_torch.local_of(tensor)) for tensor in (result, source))
    for new, old in zip(*weights, strict=True):
        if (values := weight_record(old).pending) is not None:
            weight_record(new).pending = values.clone() if copies else values
    return result


def take_written(local: torch.Tensor) -> bool:
    """Return whether a load has written bytes, and forget it."""
    records = [weight_record(weight) for weight in weights_of(local)]
    is_written = any(record.is_loaded for record in records)
    for record in records:
        record.is_loaded = False
    return is_written


def values_of(local: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return the values of a quantized tensor. Local operation."""
    return local.dequantize(dtype=dtype)  # type: ignore[operator]


# [Note: slices of quantized tensors] TE's tensors cannot be sliced everywhere. Some slices are temporary copies, so
# that writes to them are lost. This class represents a rectangle of a quantized tensor, as source and as target of a
# load. A target collects values until its weight is complete. Then it writes
#
# - data and scales, if all rectangles consist of blocks of the same format: every bit is preserved;
# - otherwise the values, quantized once. Formats with one scale per weight need the amax of all ranks, which is not
#   available during the read. ``dcp.load`` quantizes these values after all ranks have read. A rank that loads alone
#   (``no_dist=True``) reads the unsharded weight for its scale. Values in copies of a model's tensors, and those of an
#   unsharded tensor, are kept until ``load_state_dict``.
class QuantizedSlice(torch.Tensor):
    """A rectangle of one of TE's quantized tensors, read or written by ``copy_``."""

    base: torch.Tensor
    box: tuple[tuple[int, ...], tuple[int, ...]]
    waits: bool  #: Whether values stay pending until ``load_state_dict`` of a bound module
    is_stacked: bool  #: Whether a first dim of one expert precedes the dims of the rectangle

    @staticmethod
    def __new__(
        cls: Any,
        base: torch.Tensor,
        offsets: Sequence[int],
        sizes: Sequence[int],
        is_stacked: bool = False,
        *,
        waits: bool = False,
    ) -> QuantizedSlice:
        """Create the slice without a copy."""
        slice_ = wrapper(cls, (1, *sizes) if is_stacked else sizes, base)
        slice_.base, slice_.box, slice_.is_stacked = base, (tuple(offsets), tuple(sizes)), is_stacked
        slice_.waits = waits
        return slice_

    def __init__(self, *unused: Any, **options: Any) -> None:
        """Do nothing, because :meth:`__new__` has set all attributes."""

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[bad-override]
        """Run every other function on the dequantized values."""
        plain = [arg.values() if isinstance(arg, QuantizedSlice) else arg for arg in args]
        return func(*plain, **(kwargs or {}))

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the functions that DCP calls: ``detach``, ``narrow``, and ``copy_`` in both directions."""
        target = args[0]
        if func is torch.Tensor.copy_:
            if isinstance(target, QuantizedSlice):
                target.receive(args[1])
            else:
                target.copy_(args[1].values().to(target.device))
            return target
        if func is torch.Tensor.detach:
            return target
        if func is torch.Tensor.narrow:
            return target.part(*args[1:], **(kwargs or {}))
        return _torch.plain_results(func, types, args, kwargs or {})

    def part(self, dim: int, start: int, length: int) -> QuantizedSlice:
        """Return the slice of ``length`` elements along a dim, as ``Tensor.narrow`` does. No copy."""
        offsets, sizes = list(self.box[0]), list(self.box[1])
        dim -= self.is_stacked
        if dim >= 0:
            offsets[dim] += start
            sizes[dim] = length
        return QuantizedSlice(self.base, offsets, sizes, self.is_stacked, waits=self.waits)

    def stacked(self, is_stacked: bool = True) -> QuantizedSlice:
        """Return the same rectangle with or without a first dim of one expert."""
        return QuantizedSlice(self.base, *self.box, is_stacked, waits=self.waits)

    def values(self) -> torch.Tensor:
        """Return the dequantized values of the slice in fp32. Local operation."""
        return values_of(self.base)[slices(*self.box)].view(self.shape)

    def stored(self) -> torch.Tensor:
        """Return the tensor that DCP writes: a quantized tensor, or values if the rectangle splits blocks."""
        tensor = self._stored()
        return tensor.view(self.shape) if self.is_stacked else tensor

    def _stored(self) -> torch.Tensor:
        if self.box[1] == tuple(self.base.shape):
            return self.base
        rectangles = self.component_boxes()
        if rectangles is None:
            return values_of(self.base, self.dtype)[slices(*self.box)].contiguous()
        quantized = empty_like(self.base, self.box[1])
        targets = {component.name: component.tensor for component in components_of(quantized, "weight")}
        for component in components_of(self.base, "weight"):
            targets[component.name].copy_(component.tensor[rectangles[component.name]])
        # Derived buffers were computed from the empty tensor, before the bytes were copied.
        drop_derived_state(quantized)
        return quantized

    def component_boxes(self) -> dict[str, tuple[slice, ...]] | None:
        """Return the rectangle in units of each component; ``None`` if it splits blocks."""
        zeros = (0,) * len(self.box[0])
        boxes = {}
        for component in components_of(self.base, "weight"):
            box = Box(self.box[0], zeros, self.box[1])
            try:
                (rectangle,) = component.boxes([box], "weight", tuple(self.base.shape))
            except PlacementError:
                return None
            boxes[component.name] = rectangle.original_slices()
        return boxes

    @torch.no_grad()
    def receive(self, source: torch.Tensor) -> None:
        """Take the values, or bytes, of this rectangle; write the weight when it is complete."""
        if isinstance(source, QuantizedSlice):
            source = source.stacked(False)
        elif source.ndim > len(self.box[0]):
            source = source.view(source.shape[1:])
        if not isinstance(source, QuantizedSlice) and _te.is_quantized(source):
            source = QuantizedSlice(source, (0,) * source.ndim, source.shape)
        base = self.base
        record = weight_record(base)
        arrived: list[tuple[QuantizedSlice, torch.Tensor]] = record.arrived
        for earlier, _ in arrived:
            ranges = zip(*self.box, *earlier.box, strict=True)
            if all(
                a < t + e and t < a + s for a, s, t, e in ranges
            ):  # it overlaps with a part of a failed load
                arrived.clear()
                break
        arrived.append((self, source))
        # A scale depends on all values, so the weight is written when the last rectangle has arrived.
        if sum(math.prod(rectangle.box[1]) for rectangle, _ in arrived) < base.numel():
            return
        record.arrived = []
        record.pending = None  # pending values of an earlier load
        if write_bytes(base, arrived):
            return
        values = torch.empty(base.shape, dtype=torch.float32, device=base.device)
        for rectangle, part in arrived:
            read = part.values() if isinstance(part, QuantizedSlice) else part
            values[slices(*rectangle.box)] = read.to(values.device, torch.float32)
        if self.waits:  # until the amax of all ranks is available
            record.pending = values
            return
        base.quantize_(values)  # type: ignore[operator]
        record.is_loaded = True


def empty_like(base: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """Return a quantized tensor of this shape with the components that ``base`` has, and undefined data."""
    quantizer = _te.quantizer_of(base).copy()
    columnwise = [component.name.startswith("columnwise") for component in components_of(base, "weight")]
    # Only directions that the weight itself has can be copied.
    quantizer.set_usage(rowwise=not all(columnwise), columnwise=any(columnwise))
    return quantizer.make_empty(shape, dtype=base.dtype, device=base.device)


def write_bytes(base: torch.Tensor, arrived: list[tuple[QuantizedSlice, torch.Tensor]]) -> bool:
    """Copy the components of all sources if they have the target's format. Return whether they do."""
    kind = _kind_of(base)
    if not all(isinstance(source, QuantizedSlice) and _kind_of(source.base) == kind for _, source in arrived):
        return False  # hybrid weights have no components
    targets = {component.name: component for component in components_of(base, "weight")}
    copies = []
    once: dict[str, torch.Tensor] = {}
    for target, source in arrived:
        assert isinstance(source, QuantizedSlice)
        source_boxes, target_boxes = source.component_boxes(), target.component_boxes()
        sources = {component.name: component for component in components_of(source.base, "weight")}
        if source_boxes is None or target_boxes is None or not targets.keys() <= sources.keys():
            return False
        for name, component in targets.items():
            value = sources[name].tensor[source_boxes[name]]
            if component.block is None and not torch.equal(once.setdefault(name, value), value):
                return False  # shards with different scales
            copies.append((component.tensor[target_boxes[name]], value))
    # After all checks, so that an error leaves the weight unchanged.
    for into, value in copies:
        into.copy_(value)
    weight_record(base).is_loaded = True
    return True


def _kind_of(tensor: torch.Tensor) -> list[str]:
    """Return format and element type. Delayed and current scaling have the same data."""
    terms = str(describe_format(tensor)).split()
    return [terms[0], terms[-1]]
