"""What happens to a quantized weight when FSDP2 installs its sharded, or its gathered form in a module.

FSDP2 assigns parameters through the module's ``__setattr__``: once when it cuts them, then the gathered one before
each forward and backward and the sharded one after it. These are the only moments at which te_fsdp learns of a
``fully_shard`` called by the user, and of the end of a gathered weight's life.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor import DTensor

from te_fsdp import _te, _torch
from te_fsdp._te_patches import install_on
from te_fsdp.binding import is_exempt
from te_fsdp.errors import PlacementError
from te_fsdp.layout.rules import ParameterRule
from te_fsdp.quantized.alignment import Grid, check_fit
from te_fsdp.quantized.grouped_weight import is_grouped_weight
from te_fsdp.quantized.shards import weight_made_by

if TYPE_CHECKING:
    from torch import nn
    from torch.distributed.tensor.placement_types import Placement

    from te_fsdp._te_formats import Format
    from te_fsdp.binding import Binding

__all__ = ["GATHERED", "GATHERS", "check_cut", "mend_new_zeros", "note_gathered", "release_of"]

#: Attribute of the local tensor of a gathered weight, or of one that was gathered: its format.
GATHERED = "_te_fsdp_gathered"
#: Attribute of the local tensor of a quantized shard: what is known of its gathers (``all_gather``).
GATHERS = "_te_fsdp_gathers"


def note_gathered(old: torch.Tensor | None, new: torch.Tensor, binding: Binding) -> None:
    """Mark a gathered weight that FSDP2 installs in place of its shard. Local operation."""
    if isinstance(old, DTensor) and old.device_mesh != binding.tp_mesh:
        local = _torch.local_of(new)
        if _te.is_quantized(local):
            local.__dict__[GATHERED] = _te.format_of(local)


def release_of(
    gathered: torch.Tensor | None, shard: DTensor | None, binding: Binding
) -> Callable[[], None] | None:
    """What frees that which a gathered weight holds besides the buffers that FSDP2 frees. Local operation.

    TE derives transposes and padded scales from gathered bytes; they would stay until the next gather. Buffers that
    were put together along columns are te_fsdp's own.

    Args:
        gathered: The parameter that FSDP2 will take out of the module.
        shard: The sharded one that it will put in.
        binding: The module's.

    Returns:
        To be called at the end of every forward and backward; ``None`` if this is no gathered quantized weight.
    """
    local = None if gathered is None else _torch.local_of(gathered)
    if local is None or GATHERED not in local.__dict__:
        return None
    if is_grouped_weight(local):
        return local.release  # type: ignore[missing-attribute]
    row = local.__dict__[GATHERED]
    # Cut along another dim than the first?
    within = shard is not None and any(map(_torch.shard_dim_of, _fsdp_placements(shard, binding)))
    return functools.partial(_release_columns if within else _te.forget_derived, local, row)


def _release_columns(local: torch.Tensor, row: Format) -> None:
    _te.forget_derived(local, row)
    for values in _te.values_of(local):
        values.untyped_storage().resize_(0)


def _fsdp_placements(shard: DTensor, binding: Binding) -> tuple[Placement, ...]:
    """Placements that FSDP2 added: all but tp's, which is that of the last axis."""
    return shard.placements[:-1] if binding.tp_mesh is not None else shard.placements


def check_cut(module: nn.Module, binding: Binding, name: str, shard: DTensor) -> None:
    """Raise if FSDP2 has cut a weight, quantized now or later, so that its shards do not fit the format.

    Local operation on global shapes: every rank raises the same, before anything is communicated.

    Args:
        module: Owner.
        binding: The module's.
        name: Parameter name.
        shard: What FSDP2 installs.

    Raises:
        PlacementError: Names the weight, and the nearest mesh and shape that fit; also for a parameter that was to
            stay whole.
    """
    if is_exempt(module, name):
        raise PlacementError(
            f"{binding.label(name)}: cut by FSDP2, though te_fsdp.fsdp_no_shard was called for it",
            why="torch's fully_shard does not know the mark",
            fix="use te_fsdp.fully_shard; or pass it to torch's in ignored_params, and reduce its gradients",
        )
    rule, quantizer = binding.rules.get(name), _te.weight_quantizer(module, name)
    if rule is None or not rule.quantizable or quantizer is None:
        return
    mesh, tp = shard.device_mesh, 1 if binding.tp_mesh is None else binding.tp_mesh.size()
    shape, first = list(shard.shape), 0
    if rule.shard_dim is not None:
        shape[rule.shard_dim] //= tp
    if rule.layout.is_grouped:  # what must fit is one expert; cuts between experts always do
        first = 1
        rule = ParameterRule(None if rule.shard_dim is None else rule.shard_dim - 1, quantizable=True)
    weight = weight_made_by(quantizer, binding.label(name), tuple(shape[first:]), rule, tp)
    for axis, placement in enumerate(_fsdp_placements(shard, binding)):
        dim = _torch.shard_dim_of(placement)
        if dim is None or dim < first:
            continue
        count = mesh.size(axis)
        check_fit(weight, Grid(1 if first else mesh.size() // tp // count, count, tp), dim=dim - first)
        if first:
            binding.cut_within = True


def mend_new_zeros(local: torch.Tensor) -> None:
    """Let FSDP2 cut an MXFP8 weight that lies on the device. Local operation; other formats are left alone.

    FSDP2 copies its piece, which TE cuts byte for byte, into ``local.new_zeros(shape)``. That of TE 2.20.2 has scales
    without padding, into which those of the piece do not go unless their numbers happen to be multiples of 128 and 4.
    The attribute belongs to this tensor object alone.
    """
    row = _te.format_of(local)
    if row is not None and row.name == "mxfp8":
        install_on(local, "new zeros", functools.partial(_zeros, weakref.ref(local)))


def _zeros(reference: weakref.ref[torch.Tensor], size: Sequence[int], **options: Any) -> torch.Tensor:
    """``reference().new_zeros(size)`` with whole scale buffers."""
    local = reference()
    assert local is not None
    block = _te.format_of(local).block  # type: ignore[union-attr]
    if options or any(length % block for length in size):  # the cut is refused in the next moment
        return type(local).new_zeros(local, size, **options)
    quantizer = _te.quantizer_of(local).copy()
    quantizer.set_usage(**local.get_usages())  # type: ignore[attr-defined]
    zeros = quantizer.make_empty(tuple(size), dtype=local.dtype, device=local.device)
    for buffer in _te.buffers_of(zeros):
        buffer.zero_()
    return zeros
