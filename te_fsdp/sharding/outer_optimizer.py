"""``shard_optimizer``: main weights and optimizer state cut over all ranks that hold a parameter alike.

``state_dict`` shows states and main weights as the DTensors that they are, and ``load_state_dict`` takes them back. One
exception: DTensor has no words for rows that are cut unevenly several times, and DCP, which goes by its arithmetic,
would put them in wrong places without an error (torch 2.11 to 2.15). Such states are padded to the same number of rows
on all ranks, and get a leading dim for each axis that cuts them: right on the same mesh, and of another shape, hence
refused, on any other. te_fsdp.checkpoint knows the rows and has no such limit.
"""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard

from te_fsdp import _te, _torch
from te_fsdp._patches import install_on
from te_fsdp.agree import are_equal, digest
from te_fsdp.all_ranks import collective_call
from te_fsdp.errors import CheckpointError, MeshError, OrderError, PrecisionError, require_flags
from te_fsdp.parameters import label_of, require_optimizer
from te_fsdp.quantized.amax import KEEPS_MAIN_WEIGHTS
from te_fsdp.sharding.main_parameters import MAIN, MainParameters
from te_fsdp.sharding.outer_collectives import OptimizerShard, optimizer_shard
from te_fsdp.sharding.outer_gather import (
    SINGLE,
    may_be_sent_later,
    watch_state_dicts,
    why_not_bytes,
)
from te_fsdp.sharding.state import state_of

if TYPE_CHECKING:
    from torch.optim import Optimizer

_log = logging.getLogger("te_fsdp")

AnyOptimizer = TypeVar("AnyOptimizer", bound="Optimizer")


def main_parameters_of(optimizer: Optimizer) -> MainParameters | None:
    """The main parameters of an optimizer that cuts its state, ``None`` for any other."""
    found = getattr(optimizer, KEEPS_MAIN_WEIGHTS, None)
    return found if found is not None and found.cuts else None


def optimizer_shard_in(optimizer: Optimizer, parameter: torch.Tensor) -> OptimizerShard | None:
    """The rows of a parameter that this rank keeps state for; ``None`` if the optimizer does not cut it."""
    main_parameters = main_parameters_of(optimizer)
    return main_parameters.of(parameter).shard if main_parameters is not None else None


def shard_optimizer(optimizer: AnyOptimizer, *, overlap_gather: bool = False) -> AnyOptimizer:
    """Cut an optimizer's state, and the main weights, over the ranks that hold its parameters alike.

    For models sharded with ``outer_strategy="optim"`` (HFSDP), where it is needed: state over ``dp_replicate`` x
    ``dp_shard``, weights and gradients over ``dp_shard``. Also cuts the state of parameters that are replicated over
    data parallel while the strategy shards optimizer state. Where there are no such parameters it does nothing.

    From now on each ``step`` averages gradients over the replicas (one reduce-scatter per dtype, and one for each large
    tensor; unit by unit, during backward, where :func:`te_fsdp.microbatch` says which one is the last), updates
    this rank's rows, and gathers all rows (all-gathers in the same way: fp32 and bf16 weights in their dtype, quantized
    ones as bytes; each is one quantization of its whole main weight). A quantized weight whose rows hold no whole
    blocks is gathered as fp32 and quantized afterwards, which a warning says. Low-precision parameters have
    fp32 main weights in ``optimizer.state[parameter]["master_param"]``, begun as :func:`te_fsdp.main_weights` begins
    them; there is no need to call that. Groups, their options and schedulers keep referring to the model's parameters.
    States are DTensors of the parameters' shapes. Calling it again does nothing.

    With ``overlap_gather`` new weights arrive while the next forward runs, each unit's before it runs (the same
    all-gathers, for each unit by itself). All that te_fsdp does with parameters, state dicts included, waits for them.
    Code of one's own that reads or writes parameters between a step and the next forward must first call
    :func:`te_fsdp.release_params`, or :func:`te_fsdp.finish_param_gather` for whole weights.

    Collective over the replicas (one all-reduce of two integers; for quantized weights with one scale a process group
    may be made): call it on all ranks, right after the optimizer was built. The optimizer works element by element
    (SGD, Adam and their kin, TE's FusedAdam), or is :class:`te_fsdp.Muon`.

    Args:
        optimizer: Any optimizer of ``torch.optim``'s protocol, over parameters of the model.
        overlap_gather: Whether ``step`` returns before new weights arrive; the same on all ranks. It has those that
            FSDP2 does not manage, that have delayed scaling, or that are gathered as fp32 and quantized afterwards.

    Returns:
        ``optimizer``.

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
    for state in states:
        state.outer_optimizer = main_parameters
        if overlap_gather:
            watch_state_dicts(state)
    main_parameters.overlaps = overlap_gather
    return optimizer


def _cut(optimizer: Optimizer, shards: list[OptimizerShard]) -> MainParameters:
    """Let an optimizer have main parameters that are cut. Collective where an amax needs a process group."""
    known: MainParameters | None = getattr(optimizer, KEEPS_MAIN_WEIGHTS, None)
    main_parameters = known or make_main_parameters(optimizer)
    main_parameters.cut(shards)
    for shard in shards:
        # Of the state that main_weights has made of whole shards keep what is not zero.
        state = optimizer.state.pop(shard.parameter, {})
        if MAIN in state:
            optimizer.state[shard.parameter][MAIN] = state[MAIN]
    setattr(optimizer, KEEPS_MAIN_WEIGHTS, main_parameters)
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
    by_ranks: dict[tuple[int, ...], list[OptimizerShard]] = {}
    for shard in shards:
        by_ranks.setdefault(shard.ranks, []).append(shard)
    for ranks, mine in sorted(by_ranks.items()):
        described: list[Any] = [
            (tuple(_torch.local_of(c.parameter).shape), str(c.parameter.dtype), c.parameter.requires_grad)
            for c in mine
        ]
        device = _torch.local_of(mine[0].parameter).device
        if not are_equal([digest(repr((described, overlap_gather)))], mine[0].group, device=device):
            raise MeshError(
                f"shard_optimizer: ranks {list(ranks)} hold copies of the same model",
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


def make_main_parameters(optimizer: Optimizer) -> MainParameters:
    """The main parameters of an optimizer, taking part in its steps and its state dicts. Local operation."""
    main_parameters = MainParameters(optimizer)
    dicts = _StateDicts(main_parameters)
    if _te.is_fused_adam(optimizer):
        # Its methods go on after torch's, and look at the groups again: hooks of torch's would be too early.
        install_on(optimizer, "save", functools.partial(dicts.save, optimizer, optimizer.state_dict))
        install_on(optimizer, "load", functools.partial(dicts.load, optimizer, optimizer.load_state_dict))
    else:
        optimizer.register_state_dict_pre_hook(dicts.before_save)
        optimizer.register_state_dict_post_hook(dicts.after_save)
        optimizer.register_load_state_dict_pre_hook(dicts.before_load)
        optimizer.register_load_state_dict_post_hook(dicts.after_load)
    return main_parameters


class _StateDicts:
    """What happens around an optimizer's state dicts.

    Attributes:
        main_parameters: Its main parameters.
    """

    def __init__(self, main_parameters: MainParameters) -> None:
        self.main_parameters = main_parameters

    def save(self, optimizer: Optimizer, stock: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """FusedAdam's ``state_dict``, with main parameters in place to its end."""
        self.before_save(optimizer)
        try:
            result = stock()
        finally:
            self.main_parameters.put_back(optimizer)
        self.after_save(optimizer, result)
        return result

    def load(
        self, optimizer: Optimizer, stock: Callable[[dict[str, Any]], None], state_dict: dict[str, Any]
    ) -> None:
        """FusedAdam's ``load_state_dict``, with main parameters in place to its end."""
        fitted = self.before_load(optimizer, state_dict)
        try:
            stock(fitted)
        finally:
            self.after_load(optimizer)

    def before_save(self, optimizer: Optimizer) -> None:
        if self.main_parameters.cuts:
            self.main_parameters.swap_in(optimizer, keep_main=True)
        else:
            self.main_parameters.put_back(optimizer)

    def after_save(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
        self.main_parameters.put_back(optimizer)
        for key, shard in self._shards(optimizer, state_dict):
            state = state_dict["state"].get(key)
            if state and not _is_exact(shard):
                state_dict["state"][key] = {name: _padded(shard, value) for name, value in state.items()}

    def before_load(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Loaded state is cast to the dtype of the parameters in the groups: these must be the fp32 ones."""
        alone = [key for key, state in state_dict["state"].items() if set(state) == {MAIN}]
        if alone:
            raise CheckpointError(
                f"{type(optimizer).__name__}.load_state_dict: {len(alone)} parameter(s) with main weights alone",
                expected="the whole state",
                got="that of an optimizer that has not stepped",
                why="DCP fills the state dict of an optimizer as it is: what is missing there is not loaded",
                fix="use te_fsdp.checkpoint.load, which makes the missing state",
            )
        states = dict(state_dict["state"])
        self.main_parameters.put_back(optimizer)
        for key, shard in self._shards(optimizer, state_dict):  # this rank's rows of what is cut
            if key in states:
                states[key] = {name: _own_rows(shard, name, value) for name, value in states[key].items()}
        self.main_parameters.swap_in(optimizer)
        return {**state_dict, "state": states}

    @torch.no_grad()
    def after_load(self, optimizer: Optimizer) -> None:
        """Copy loaded main weights into those that are there, and end the swap."""
        for pair in self.main_parameters.pairs:
            loaded = optimizer.state.get(pair.main, {}).pop(MAIN, None)
            if loaded is not None and pair.low:
                _torch.local_of(pair.main).copy_(_torch.local_of(loaded))
        self.main_parameters.put_back(optimizer)

    def _shards(
        self, optimizer: Optimizer, state_dict: dict[str, Any]
    ) -> Iterator[tuple[Any, OptimizerShard]]:
        """Key in the state dict and rows of each cut parameter."""
        keys = [key for group in state_dict["param_groups"] for key in group["params"]]
        held = [p for group in optimizer.param_groups for p in group["params"]]
        for key, parameter in zip(keys, held, strict=False):  # torch compares the groups, with a message
            shard = self.main_parameters.of(parameter).shard
            if shard is not None:
                yield key, shard


def _cutting(shard: OptimizerShard) -> list[int]:
    """The axes of ``shard.mesh`` that cut dim 0, in their order there; the last one cuts first."""
    return [axis for axis, p in enumerate(shard.placements) if _torch.shard_dim_of(p) == 0]


def _is_exact(shard: OptimizerShard) -> bool:
    """Whether DTensor's arithmetic is right: one axis cuts the rows, or each does so evenly."""
    if shard.dim:
        return True  # chosen because it is even
    sizes = [shard.mesh.size(axis) for axis in reversed(_cutting(shard))]
    return sum(size > 1 for size in sizes) <= 1 or shard.parameter.shape[0] % math.prod(sizes) == 0


def _padded(shard: OptimizerShard, value: Any) -> Any:
    """A state of unevenly cut rows with one leading dim for each axis that cuts them, and padded rows after these."""
    if not isinstance(value, DTensor) or value.shape != shard.parameter.shape:
        return value
    mesh, axes, rows = shard.mesh, _cutting(shard), value.shape[0]
    for axis in reversed(axes):
        rows = -(-rows // mesh.size(axis))
    local = _torch.local_of(value)
    padded = local.new_zeros((*(1 for _ in axes), rows, *local.shape[1:]))
    padded.view(rows, *local.shape[1:])[: len(local)].copy_(local)
    shape = torch.Size((*(mesh.size(axis) for axis in axes), rows, *value.shape[1:]))
    placements = [
        Shard(axes.index(axis)) if axis in axes else _torch.shifted(placement, len(axes))
        for axis, placement in enumerate(shard.placements)
    ]
    return _torch.placed(padded, mesh, placements, torch.empty(shape, device="meta"))


def _own_rows(shard: OptimizerShard, name: str, value: Any) -> Any:
    """A loaded state as this rank's rows: cut and maybe padded, or of the whole shard."""
    if not isinstance(value, torch.Tensor) or value.ndim == 0:
        return value
    local, leading = _torch.local_of(value), len(_cutting(shard))
    if value.ndim == shard.parameter.ndim + leading:
        local = local.reshape(local.shape[leading:])[: shard.high - shard.low]
    elif tuple(local.shape) != shard.shape and local.shape == _torch.local_of(shard.parameter).shape:
        local = shard.of(local).contiguous()
    if tuple(local.shape) != shard.shape:
        raise CheckpointError(
            f"load_state_dict: {name} of a parameter of shape {tuple(shard.parameter.shape)}",
            expected=f"this rank's rows, {shard.shape}, or those of its shard",
            got=f"{tuple(local.shape)} of {tuple(value.shape)}",
            fix="load it on the mesh that it was saved on, or through te_fsdp.checkpoint",
        )
    return shard.distributed(local)
