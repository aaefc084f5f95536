"""``shard_optimizer``: main weights and optimizer state cut over all ranks that hold a parameter alike."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist

from te_fsdp import _te, _torch
from te_fsdp.agree import are_equal, digest
from te_fsdp.all_ranks import collective_call
from te_fsdp.errors import MeshError, OrderError, PrecisionError, require_flags
from te_fsdp.move.pending import PendingGathers
from te_fsdp.parameters import label_of, require_optimizer
from te_fsdp.quantized.amax import KEEPS_MAIN_WEIGHTS
from te_fsdp.sharding.main_parameters import MAIN, MainParameters, main_parameters_of
from te_fsdp.sharding.outer_shards import (
    SINGLE,
    OptimizerShard,
    by_kind,
    may_be_sent_later,
    optimizer_shard,
    why_not_bytes,
)
from te_fsdp.sharding.state import state_of

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from te_fsdp.sharding.state import ShardingState

_log = logging.getLogger("te_fsdp")

AnyOptimizer = TypeVar("AnyOptimizer", bound="Optimizer")


def shard_optimizer(optimizer: AnyOptimizer, *, overlap_gather: bool = False) -> AnyOptimizer:
    """Cut an optimizer's state, and the main weights, over the ranks that hold its parameters alike.

    For models sharded with ``outer_strategy="optim"`` (HFSDP), where it is needed: state over ``dp_replicate`` x
    ``dp_shard``, weights and gradients over ``dp_shard``. Also cuts the state of parameters that are replicated over
    data parallel while the strategy shards optimizer state. Without such parameters, and when called again, it does
    nothing.

    From now on each ``step`` averages gradients over the replicas (one reduce-scatter per dtype, and one for each large
    tensor; unit by unit, during backward, where :func:`te_fsdp.microbatch` says which one is the last), updates
    this rank's rows, and gathers all rows (all-gathers in the same way: fp32 and bf16 weights in their dtype, quantized
    ones as bytes; each is one quantization of its whole main weight). A quantized weight whose rows hold no whole
    blocks is gathered as fp32 and quantized afterwards, which a warning says. Low-precision parameters have
    fp32 main weights in ``optimizer.state[parameter]["master_param"]``, begun as :func:`te_fsdp.main_weights` begins
    them; there is no need to call that. Groups, their options and schedulers keep referring to the model's parameters.
    States are DTensors of the parameters' shapes.

    With ``overlap_gather`` new weights arrive while the next forward runs, each unit's before it runs (the same
    all-gathers, for each unit by itself). All that te_fsdp does with parameters, state dicts included, waits for them.
    Code of one's own that reads or writes parameters between a step and the next forward must first call
    :func:`te_fsdp.release_params`, or :func:`te_fsdp.finish_param_gather` for whole weights.

    Collective over the replicas (one all-reduce of two integers; for quantized weights with one scale a process group
    may be made): call it on all ranks, right after the optimizer was built. The optimizer works element by element
    (SGD, Adam and their kin, TE's FusedAdam), or is :class:`te_fsdp.Muon`.

    Args:
        optimizer: Any optimizer of ``torch.optim``'s protocol, over parameters of the model; is returned.
        overlap_gather: Whether ``step`` returns before new weights arrive; the same on all ranks. It has those that
            FSDP2 does not manage, that have delayed scaling, or that are gathered as fp32 and quantized afterwards.

    Raises:
        OrderError: It has made steps before; ``overlap_gather`` without effect, or not given to the first call.
        PrecisionError: A FusedAdam whose main weights are not fp32, over low-precision parameters.
        MeshError: The ranks hold different parameters, or in different orders, or only some have ``overlap_gather``.
        CollectiveError: Some ranks did not make the call within :func:`te_fsdp.set_collective_timeout`.
    """
    require_flags("shard_optimizer", overlap_gather=overlap_gather)
    require_optimizer(optimizer, "shard_optimizer(optimizer)")
    held = [p for group in optimizer.param_groups for p in group["params"]]
    known = main_parameters_of(optimizer)
    shards = [shard for p in held if known is None and (shard := optimizer_shard(p)) is not None]
    if overlap_gather:
        _check_overlap(optimizer, known, held, shards)
    if not shards:
        return optimizer
    _check_fresh(optimizer)
    states = {id(s): s for p in held if (s := state_of(p)) is not None}.values()
    with collective_call("shard_optimizer", next(iter(states)).meshes.device_mesh):
        _check_same(shards, overlap_gather)
        main_parameters = _cut(optimizer, shards)
    main_parameters.overlaps = overlap_gather
    for state in states:
        state.outer_optimizer = main_parameters
        if overlap_gather:
            _watch_state_dicts(state)
    return optimizer


def _watch_state_dicts(state: ShardingState) -> None:
    """Let state dicts of a model, and of parts of it, wait for its new weights."""
    if state.pending_gathers is None:
        gathers = state.pending_gathers = PendingGathers()
        for module in state.model.modules():
            module.register_state_dict_pre_hook(lambda *unused: gathers.wait())
            module.register_load_state_dict_pre_hook(lambda *unused: gathers.wait())


def _cut(optimizer: Optimizer, shards: list[OptimizerShard]) -> MainParameters:
    """Let an optimizer have main parameters that are cut. Collective where an amax needs a process group."""
    main_parameters = getattr(optimizer, KEEPS_MAIN_WEIGHTS, None) or MainParameters(optimizer)
    main_parameters.cut(shards)
    for shard in shards:
        # Of the state that main_weights has made of whole shards keep what is not zero.
        state = optimizer.state.pop(shard.parameter, {})
        if MAIN in state:
            optimizer.state[shard.parameter][MAIN] = state[MAIN]
    _prepare_bytes(shards)
    main_parameters.start(optimizer)
    return main_parameters


def _check_overlap(
    optimizer: Optimizer,
    known: MainParameters | None,
    held: Sequence[torch.Tensor],
    shards: Sequence[OptimizerShard],
) -> None:
    """Raise where new weights cannot arrive after the step: ``known`` are main parameters of an earlier call."""
    if known is not None and not known.overlaps:
        raise OrderError(
            f"shard_optimizer({type(optimizer).__name__}, overlap_gather=True)",
            expected="the first call for an optimizer",
            got="one that was sharded without it",
            fix="give overlap_gather=True to the first call, on all ranks",
        )
    # FSDP2 may not have looked at its parameters since they were initialised, so that it is not asked for them.
    if known is None and not any(not c.reduced and may_be_sent_later(c) for c in shards):
        raise OrderError(
            f"shard_optimizer({type(optimizer).__name__}, overlap_gather=True)",
            expected='parameters of a model with outer_strategy="optim" and dp_replicate > 1',
            got=f"{len(held)} parameters, none of which has new weights that are gathered unit by unit",
            why="The option would have no effect",
            fix="leave it out, or shard the model with te_fsdp.fully_shard(..., outer_strategy='optim')",
        )


def _check_fresh(optimizer: Optimizer) -> None:
    """State that is there already has the shapes of whole shards."""
    fused = _te.is_fused_adam(optimizer)
    # FusedAdam has main parameters from the beginning of its first step on, which may have raised.
    stepped = any("step" in group for group in optimizer.param_groups)
    stepped = stepped or (fused and hasattr(optimizer, KEEPS_MAIN_WEIGHTS))
    states = [] if fused else [s for s in optimizer.state.values() if set(s) - {MAIN}]
    if stepped or states:
        raise OrderError(
            f"shard_optimizer({type(optimizer).__name__}) after its first step",
            expected="an optimizer without state",
            got="state of whole shards",
            fix="call te_fsdp.shard_optimizer right after the optimizer was built, and load checkpoints afterwards",
        )
    dtype = getattr(optimizer, "master_weight_dtype", torch.float32)
    if fused and dtype != torch.float32:
        raise PrecisionError(
            f"shard_optimizer({type(optimizer).__name__})",
            expected="fp32 main weights",
            got=f"master_weight_dtype={dtype}",
            fix="leave master_weight_dtype at its default",
        )


def _check_same(shards: list[OptimizerShard], overlap_gather: bool) -> None:
    """Raise on all replicas unless all have the same parameters in the same order, and the same option."""
    for mine in sorted(by_kind(shards, [shard.ranks for shard in shards]), key=lambda alike: alike[0].ranks):
        described: list[Any] = [
            (tuple(_torch.local_of(c.parameter).shape), str(c.parameter.dtype), c.parameter.requires_grad)
            for c in mine
        ]
        device = _torch.local_of(mine[0].parameter).device
        if not are_equal([digest(repr((described, overlap_gather)))], mine[0].group, device=device):
            raise MeshError(
                f"shard_optimizer: ranks {list(mine[0].ranks)} hold copies of the same model",
                expected="optimizers over the same parameters in the same order, and the same overlap_gather",
                got=f"here {len(mine)} parameters, the first {described[0]}, overlap_gather={overlap_gather}",
                fix="build the optimizer from the same parameter groups, and with the same options, on all ranks",
            )


def _prepare_bytes(shards: list[OptimizerShard]) -> None:
    """Make the groups that quantized weights need to be sent as bytes, and say which of them do not."""
    wide: dict[str, list[str]] = {}
    for shard in shards:
        local = _torch.local_of(shard.parameter)
        if not _te.is_quantized(local):
            continue
        why = why_not_bytes(shard)
        if why is not None:
            label = label_of(shard.parameter, "weight")
            wide.setdefault(why, []).append(label)
        elif _te.needs_shared_amax(_te.quantizer_of(local)):
            _ = shard.amax_group  # made where there is none
    if dist.get_rank() == 0:
        for why, labels in wide.items():
            _log.warning(
                "shard_optimizer: %d quantized weights cross their replicas' axis as fp32 (%s): %s. Fix: %s",
                len(labels),
                why,
                ", ".join(labels),
                "sizes of which every rank of dp_replicate x dp_shard gets equally many whole blocks"
                if why != SINGLE
                else "GroupedLinear(single_grouped_weight=False), or this cost",
            )
