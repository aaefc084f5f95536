"""FSDP2's all-gather hooks of TE's quantized tensors, made right for tensor parallelism and axes of size 1.

Four faults of the stock hooks (TE 2.20.2 with torch 2.11 to 2.15), each mended by a wrapper that leaves
tensors of
modules without a te_fsdp binding alone:

1. From the second gather on FSDP2 passes ``out`` as the DTensor around the unsharded weight. TE writes the
   gathered buffers onto that wrapper, and the kernels go on reading the old ones.
2. Every gather replaces the tensor's amax group by the FSDP group, so that tensor-parallel ranks drift to
different scales.
3. With a shard axis of size 1 FSDP2 copies only the first of several buffers (pytorch PR #197999). All of
   them then travel as one.
4. FSDP2 passes the first gathered tensor through ``torch.as_strided``, and TE's version scrambles the
   transpose that Hopper's backward reads, without marking it invalid (confirmed on an H200). The first result
   therefore goes out without its transpose, which TE then makes from the bytes when it is needed.
"""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from te_fsdp import _te, _torch
from te_fsdp.binding import binding_of
from te_fsdp.quantized.amax import attach_group
from te_fsdp.quantized.weight_mesh import agree_on_weight_mesh

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["mend_hooks"]

_MARK = "_te_fsdp_mended"
# Kernels and vectorised copies want aligned buffers; 256 bytes is what torch's CUDA allocator aligns to
# within a block.
_ALIGNMENT = 256


class _Packed(NamedTuple):
    """Metadata of a gather whose buffers travel as one: TE's metadata, and where each buffer lies."""

    metadata: Any
    pieces: tuple[tuple[int, torch.Size, torch.dtype], ...]


def mend_hooks() -> None:
    """Wrap the hooks of every quantized tensor class that has them; once per class, later calls do nothing."""
    for cls in _te.gathering_tensor_classes():
        if _MARK not in cls.__dict__:
            cls.fsdp_pre_all_gather = _wrap_pre(cls.fsdp_pre_all_gather)  # type: ignore[attr-defined]
            cls.fsdp_post_all_gather = _wrap_post(cls.fsdp_post_all_gather)  # type: ignore[attr-defined]
            setattr(cls, _MARK, True)


def _wrap_pre(stock: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(stock)  # FSDP2 counts the parameters of the signature
    def fsdp_pre_all_gather(
        self: torch.Tensor,
        mesh: DeviceMesh,
        orig_size: torch.Size,
        contiguous_orig_stride: tuple[int, ...],
        module: nn.Module,
        mp_policy: Any,
    ) -> tuple[tuple[torch.Tensor, ...], Any]:
        inputs, metadata = stock(self, mesh, orig_size, contiguous_orig_stride, module, mp_policy)
        binding = binding_of(module)
        if binding is None:
            return inputs, metadata
        agree_on_weight_mesh(binding, module, self)
        attach_group(self, binding)
        if mesh.size() == 1 and len(inputs) > 1:
            return _pack(inputs, metadata)
        return inputs, metadata

    return fsdp_pre_all_gather


def _wrap_post(stock: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(stock)
    def fsdp_post_all_gather(
        self: torch.Tensor,
        all_gather_outputs: tuple[torch.Tensor, ...],
        metadata: Any,
        param_dtype: torch.dtype,
        *,
        out: torch.Tensor | None = None,
    ) -> Any:
        target = None if out is None else _torch.local_of(out)
        if isinstance(metadata, _Packed):
            buffers = _unpack(all_gather_outputs[0], metadata)
            tensor, _ = stock(self, buffers, metadata.metadata, param_dtype, out=target)
            # The buffers alias the gathered one, which FSDP2 frees and reallocates itself: nothing more to
            # hand over.
            inner: tuple[torch.Tensor, ...] = ()
        else:
            tensor, inner = stock(self, all_gather_outputs, metadata, param_dtype, out=target)
        if out is None:
            _te.forget_transpose(tensor)
        return tensor, inner

    return fsdp_post_all_gather


def _pack(inputs: tuple[torch.Tensor, ...], metadata: Any) -> tuple[tuple[torch.Tensor, ...], _Packed]:
    """All buffers in one flat uint8 tensor, each starting at an aligned byte."""
    pieces, start = [], 0
    for tensor in inputs:
        pieces.append((start, tensor.shape, tensor.dtype))
        start += math.ceil(tensor.numel() * tensor.element_size() / _ALIGNMENT) * _ALIGNMENT
    flat = torch.empty(start, dtype=torch.uint8, device=inputs[0].device)
    for tensor, (offset, _, _) in zip(inputs, pieces, strict=True):
        flat[offset : offset + tensor.numel() * tensor.element_size()].copy_(
            tensor.reshape(-1).view(torch.uint8)
        )
    return (flat,), _Packed(metadata, tuple(pieces))


def _unpack(flat: torch.Tensor, packed: _Packed) -> tuple[torch.Tensor, ...]:
    """Views of the buffers that :func:`_pack` laid out."""
    buffers = []
    for offset, shape, dtype in packed.pieces:
        length = math.prod(shape) * dtype.itemsize
        buffers.append(flat.view(-1)[offset : offset + length].view(dtype).view(shape))
    return tuple(buffers)
