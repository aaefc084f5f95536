"""New main weights, cut over the replicas of a parameter, on their way into the parameter of each replica.

    fp32            rows                          all-gathered in place
    bf16            rows, rounded                 all-gathered in place
    quantized       rows, quantized with the      all-gathered byte by byte: values, scales, transposes
                    scale of the whole weight
    quantized, where rows are no whole blocks     all-gathered in fp32, quantized by each replica

The bytes are the same either way: formats scale blocks of values, or the whole weight, of which the replicas take the
amax together.

With ``overlap_gather`` they arrive while the next forward has begun:

    at once          parameters that FSDP2 does not manage; weights with delayed scaling, whose amaxes the step shares;
                     quantized weights that are sent as fp32
    unit by unit     all others: the root's own first, then its units as they are registered

The replicas begin all of it in the step, in one order, whatever they use afterwards.

:func:`install_by_unit` and :class:`~te_fsdp.move.pending.PendingGathers` (``state.pending_gathers``, which all that
reads or writes parameters waits for) are the overlap: without them a step calls ``start_install(cut).wait()``.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from te_fsdp import _fsdp2, _te, _torch
from te_fsdp.errors import PlacementError
from te_fsdp.move.pending import Pending, PendingGathers, UnitGather
from te_fsdp.quantized.amax import (
    Scaled,
    cast,
    has_current_scale,
    largest_of,
    shared_scales,
    take_delayed_scale,
    write_all,
)
from te_fsdp.quantized.components import block_of, buffers_of_parts, finish_writing
from te_fsdp.sharding.outer_collectives import OptimizerShard, Part, start_gather
from te_fsdp.sharding.state import state_of

if TYPE_CHECKING:
    from te_fsdp.sharding.state import ShardingState

#: Why one tensor of all experts crosses as fp32.
SINGLE = "one tensor of all experts"
#: Shards, each with this rank's rows of the main weight, in the same order on all replicas.
Cut = Sequence[tuple[OptimizerShard, torch.Tensor]]


@torch.no_grad()
def start_install(
    cut: Cut,
    *,
    written: list[torch.Tensor] | None = None,
    scales: Mapping[int, torch.Tensor] | None = None,
) -> Pending[None]:
    """Begin to make parameters their new main weights, each rounded or quantized once.

    Collective over the replicas: one all-gather per dtype, one for the bytes of all quantized weights together, and
    one more for each large tensor; and as :func:`scales_of_rows`, for NVFP4 and hybrids with a reduction for each.
    The wait issues none, unless weights are sent as fp32.

    Args:
        cut: Main weights and parameters must not change until the end.
        written: Gets the plain tensors that parameters consist of and that are written to, but for those of weights
            that are sent as fp32.
        scales: From :func:`scales_of_rows`, which is called if there are none.
    """
    scales = scales_of_rows(cut) if scales is None else scales
    written = [] if written is None else written
    plain: list[Part] = []
    packed: list[Part] = []
    whole: list[Part] = []
    copies: list[tuple[torch.Tensor, torch.Tensor]] = []
    for shard, rows in cut:
        local = _torch.local_of(shard.parameter)
        if not _te.is_quantized(local):
            own = shard.of(local)
            # In the dtype of the parameter, where they belong if they lie together there.
            if not own.is_contiguous():
                own = rows.to(local.dtype)
            elif own.data_ptr() != rows.data_ptr():
                copies.append((own, rows))
            plain.append(Part(shard, own, local))
            written.append(local)
        elif why_not_bytes(shard) is None:
            packed += _quantized_parts(shard, rows, local, scales.get(id(shard)), written, copies)
        else:
            value = torch.empty(local.shape, dtype=rows.dtype, device=rows.device)
            whole.append(Part(shard, rows, value))
    _torch.copy_all_([target for target, _ in copies], [source for _, source in copies])
    sent = {id(part.shard): part.shard for part in packed}.values()
    _share_newest_amax(sent)
    gather = start_gather(plain + whole + packed)

    def finish(unused: None) -> None:
        write_all((_torch.local_of(part.shard.parameter), part.whole) for part in whole)
        for shard in sent:
            finish_writing(_torch.local_of(shard.parameter))

    return gather.then(finish)


def scales_of_rows(cut: Cut) -> dict[int, torch.Tensor]:
    """By ``id`` of its shard the scale of each current-scaling weight that is sent as bytes, one element.

    Each from the amax of the whole main weight. Collective over replicas and weight mesh, if there are some: one max
    all-reduce for each group of theirs.
    """
    asked: dict[int, Scaled] = {}
    for shard, rows in cut:
        local = _torch.local_of(shard.parameter)
        if not _te.is_quantized(local) or why_not_bytes(shard) is not None:
            continue
        quantizer = _te.quantizer_of(local)
        if has_current_scale(type(quantizer)):
            asked[id(shard)] = Scaled(rows, quantizer, shard.amax_group)
    return dict(zip(asked, shared_scales([*asked.values()]), strict=True))


def why_not_bytes(shard: OptimizerShard) -> str | None:
    """Why a quantized weight crosses the replicas' axis as fp32; ``None`` for one that does so as bytes.

    Local operation on the global shape and the format: the same on all ranks, also on those that hold other pieces.
    They take one amax together, each way over other groups.
    """
    local = _torch.local_of(shard.parameter)
    kind = (type(local), tuple(local.shape))
    if kind not in shard.obstacles:
        shard.obstacles[kind] = _obstacle(shard, local)
    return shard.obstacles[kind]


def _obstacle(shard: OptimizerShard, local: torch.Tensor) -> str | None:
    if _te.is_grouped(local) or local.ndim != 2:
        return SINGLE
    block = block_of(local)
    if block is None:
        return f"no table of the buffers of {_te.format_of(local)}"
    if block > 1 and not shard.has_whole(block):
        what = "columns" if shard.dim else "rows"
        return f"{shard.rows.shape[shard.dim]} {what} over {shard.size} ranks, a scale spans {block}"
    try:
        buffers_of_parts(local, "weight")
    except PlacementError:
        return f"an option of {_te.format_of(local)} without a table of its buffers"
    return None


# ------------------------------------------------------------------------------------------------------------ quantized


def _quantized_parts(
    shard: OptimizerShard,
    rows: torch.Tensor,
    local: torch.Tensor,
    scale: torch.Tensor | None,
    written: list[torch.Tensor],
    copies: list[tuple[torch.Tensor, torch.Tensor]],
) -> list[Part]:
    """This rank's rows, quantized: what is sent. What all replicas have alike goes to ``copies``: target and source."""
    targets = buffers_of_parts(local, "install")
    written += [target.tensor for target in targets]
    quantized = _quantize(shard, rows, local, scale, [target.name for target in targets])
    parts = []
    for target, source in zip(targets, buffers_of_parts(quantized, "install"), strict=True):
        assert target.name == source.name
        if target.block is None:
            copies.append((target.tensor, source.tensor))
        else:
            parts.append(Part(shard, source.tensor, target.tensor, as_bytes=True))
    return parts


def _quantize(
    shard: OptimizerShard,
    rows: torch.Tensor,
    local: torch.Tensor,
    scale: torch.Tensor | None,
    names: list[str],
) -> torch.Tensor:
    """This rank's rows in the format of the weight, with the buffers that it has, of these names."""
    quantizer = _te.quantizer_of(local).copy()
    if len(_te.parts_of(local)) == 1:
        columnwise = [name.startswith("columnwise") for name in names]
        quantizer.set_usage(rowwise=not all(columnwise), columnwise=any(columnwise))
    if scale is not None:
        return cast(rows, quantizer, scale)
    if _te.needs_shared_amax(quantizer):
        _te.reduce_amax_over(quantizer, shard.amax_group)
    if rows.numel() or not _te.has_delayed_scale(local):
        return quantizer(rows)
    quantizer.amax.zero_()  # no kernel runs for a tensor without elements: the last step's amax would stay
    empty = quantizer(rows)
    take_delayed_scale(empty)
    return empty


def _share_newest_amax(shards: Iterable[OptimizerShard]) -> None:
    """Give delayed-scaling weights the amax of all replicas' rows as the newest of their histories.

    Collective over the replicas. Over the other pieces it is taken after the step, as for all weights.
    """
    found: dict[tuple[int, ...], list[OptimizerShard]] = {}
    for shard in shards:
        if _te.has_delayed_scale(_torch.local_of(shard.parameter)):
            found.setdefault(shard.ranks, []).append(shard)
    for members in found.values():
        amaxes = [_te.quantizer_of(_torch.local_of(shard.parameter)).amax for shard in members]
        largest_of(amaxes, members[0].group)


@torch.no_grad()
def install_by_unit(cut: Cut) -> None:
    """Begin to make parameters their new main weights, as :func:`start_install` does.

    Collective over the replicas: as that, but for what is sent together, which is of one unit. Nothing waits for it but
    :class:`~te_fsdp.move.pending.PendingGathers`.
    """
    left = {id(shard.parameter): (shard, rows) for shard, rows in cut}
    scales = scales_of_rows(cut)
    begins: list[tuple[ShardingState, list[UnitGather]]] = []
    for state in {id(s): s for shard, _ in cut if (s := state_of(shard.parameter)) is not None}.values():
        gathers = []
        for name, unit in reversed(state.modules.items()):  # outer before inner
            own = [id(parameter) for parameter in _fsdp2.sharded_parameters(unit)]
            members = [left.pop(key) for key in own if key in left and may_be_sent_later(left[key][0])]
            if members:
                touched = [rows for _, rows in members]
                touched += [scales[id(shard)] for shard, _ in members if id(shard) in scales]
                begin = functools.partial(start_install, members, written=touched, scales=scales)
                gathers.append(UnitGather(name, unit, begin, touched))
        begins.append((state, gathers))
    start_install([*left.values()], scales=scales).wait()
    for state, gathers in begins:
        if gathers:
            assert state.pending_gathers is not None  # since watch_state_dicts
            state.pending_gathers.begin(gathers, state.meshes.device)


def watch_state_dicts(state: ShardingState) -> None:
    """Let state dicts of a model, and of parts of it, wait for its new weights. Local operation."""
    if state.pending_gathers is None:
        state.pending_gathers = PendingGathers()
        for module in state.model.modules():
            module.register_state_dict_pre_hook(functools.partial(_wait, state))
            module.register_load_state_dict_pre_hook(functools.partial(_wait, state))


def _wait(state: ShardingState, *unused: Any) -> None:
    state.wait_for_gathers()


def may_be_sent_later(shard: OptimizerShard) -> bool:
    """Whether new weights of a parameter can arrive after the step, with its unit. Local operation."""
    local = _torch.local_of(shard.parameter)
    return not _te.is_quantized(local) or (not _te.has_delayed_scale(local) and why_not_bytes(shard) is None)
