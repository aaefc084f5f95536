"""Cached metadata of a quantized shard's all-gathers.

    local tensor of the shard
      ._te_fsdp_weight   WeightRecord     te_fsdp's data about this tensor (te_fsdp.records)
        .gathers         GatherMetadata   format, amax group, FSDP2's group: constant for shard and mesh
          .replays[key]  Replay           names of the attributes that TE's hook returned

    key                  (before backward, stays unsharded after forward, rowwise usage, columnwise usage)

    all-gather of the shard
      replay_gather      with a Replay of the key: read the attributes, TE's hook does not run
      fsdp_pre_all_gather (te_fsdp.quantized.fsdp_hooks), otherwise: run TE's hook, then
        GatherMetadata   build it in the first all-gather, or if mesh or size has changed
        Replay           record one, if the result has attributes and constants only
        CustomGather     convert TE's buffers, for uneven or column-wise shards and single ranks

[Note: replays] explains why a Replay is valid.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from te_fsdp.quantized.components import BufferLocations
from te_fsdp.quantized.quantizer_record import GROUP_ATTRIBUTE, QUANTIZER_RECORD
from te_fsdp.records import BINDING, WEIGHT, ModuleBinding, WeightRecord
from te_fsdp.upstream import te as _te
from te_fsdp.upstream.te_formats import Format


class GatherMetadata(NamedTuple):
    """Metadata shared by all all-gathers of a shard, computed in the first one and cached in the shard's record.

    It is recomputed for a shard that replaces another one in its module (``MeshModule._on_replace``),
    and if one of the first three fields has changed. TE replaces the quantizer when the length of delayed
    scaling's history changes, so only its kind is cached. Its group name is checked in every all-gather.
    """

    weight_mesh: int  #: ``id`` of the binding's weight mesh, which is set at most once
    mesh: int  #: ``id`` of the all-gather's mesh, which FSDP2 keeps with the shard
    unsharded_shape: torch.Size  #: Shape of the unsharded weight
    row: Format
    has_one_scale: bool  #: Whether the amax of the unsharded weight is reduced over a group
    group: str | None  #: Name of that group; ``None`` if the weight is not sharded
    is_unconverted: bool  #: Whether FSDP2 all-gathers TE's buffers without conversion
    unit: weakref.ref[Any]  #: FSDP2's parameter group, whose state TE's hook reads
    #: Results of TE's hook by the pass (``fsdp2_settled.pass_of``) and the quantizer's usages
    replays: dict[tuple[Any, ...], Replay]
    #: Empty tensor, which a shard on a single rank sends; ``None`` for several ranks.
    nothing: torch.Tensor | None


# [Note: replays] TE's hook of a float8 shard returns attributes of the shard and flags. It reads the state of
# FSDP2's group and the quantizer's usages. The second call under equal conditions therefore reads the
# attributes of the first. TE's hook would search the group of FSDP2 and that of the mesh in each all-gather.
class Replay(NamedTuple):
    """Result of TE's hook of a float8 shard: attributes of the shard and constants ([Note: replays])."""

    inputs: tuple[str, ...]  #: Attributes that are sent
    constants: tuple[Any, ...]  #: TE's metadata, with ``None`` for attributes
    attributes: tuple[tuple[int, str], ...]  #: Their places in the metadata, and their names

    @classmethod
    def of(cls, shard: torch.Tensor, inputs: Sequence[Any], metadata: Any) -> Replay | None:
        """Return the replay of a result, or ``None`` if it contains other objects."""
        if not isinstance(metadata, tuple):
            return None
        # By identity: the hook passes on the shard's own buffers, so a replay can read them by name without
        # running it.
        names = {id(value): name for name, value in vars(shard).items()}
        is_constant = [value is None or isinstance(value, (bool, int, str)) for value in metadata]
        indices = [index for index, constant in enumerate(is_constant) if not constant]
        if not all(id(value) in names for value in (*inputs, *[metadata[index] for index in indices])):
            return None
        constants = tuple([v if kept else None for v, kept in zip(metadata, is_constant, strict=True)])
        sent = tuple([names[id(value)] for value in inputs])
        return cls(sent, constants, tuple([(index, names[id(metadata[index])]) for index in indices]))


def replay_gather(
    shard: torch.Tensor, mesh: DeviceMesh, orig_size: torch.Size, module: nn.Module, now: tuple[bool, bool]
) -> tuple[tuple[torch.Tensor, ...], Any] | None:
    """Return the result of a shard's all-gather hook from an earlier one ([Note: replays]), or ``None``. Local.

    ``now`` is the pass of FSDP2's group (``fsdp2_settled.pass_of``).
    """
    attrs = shard.__dict__
    weight: WeightRecord | None = attrs.get(WEIGHT)
    gathers: GatherMetadata | None = None if weight is None else weight.gathers
    binding: ModuleBinding | None = module.__dict__.get(BINDING)
    if (
        gathers is None
        or not gathers.replays
        or binding is None
        or gathers[:3] != (id(binding.weight_mesh), id(mesh), orig_size)
        # TE's own recomputation (LayerNormMLP(checkpoint=True)) does not call forward, which sets ``recomputed``.
        or binding.fsdp.recomputed
        or module.__dict__.get("checkpoint") is True
    ):
        return None
    quantizer: Any = getattr(shard, _te.QUANTIZER)
    record = quantizer.__dict__.get(QUANTIZER_RECORD)
    # has_amax_group, without its call: TE's hook has set a different group, or the weight has a new quantizer.
    if gathers.has_one_scale and (
        gathers.group is None
        or not record
        or record.amax_group != gathers.group
        or GROUP_ATTRIBUTE in attrs
        or getattr(quantizer, _te.REDUCES_AMAX, False)
    ):
        return None
    replay = gathers.replays.get((*now, quantizer.rowwise_usage, quantizer.columnwise_usage))
    if replay is None:
        return None
    metadata = list(replay.constants)
    for index, name in replay.attributes:
        metadata[index] = attrs[name]
    inputs = tuple(map(attrs.__getitem__, replay.inputs))
    if gathers.nothing is not None:
        return (gathers.nothing,), CustomGather(tuple(metadata), buffers=inputs)
    return inputs, tuple(metadata)


class Packed(NamedTuple):
    """Layout of packed tensors of a shard along columns."""

    shape: tuple[int, int]  #: Shape of the shard
    places: BufferLocations
    #: Shape of a rank's buffer, and columns of the unsharded buffer with padding
    buffers: list[tuple[torch.Size, int]]


class CustomGather(NamedTuple):
    """Metadata of an all-gather that converts TE's buffers in one of three ways."""

    metadata: Any  #: TE's metadata
    buffers: tuple[torch.Tensor, ...] = ()  #: TE's buffers, for a shard on a single rank
    rows: int = 0  #: Rows of the unsharded weight, for uneven shards
    packed: Packed | None = None  #: Layout, for shards along columns
