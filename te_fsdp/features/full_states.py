"""Unsharded states of HFSDP in DCP's ``full_state_dict=True``, without padding ([Note: padded states])."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint import state_dict as _state_dict

from te_fsdp.boxed_dtensor import rows_of_shards
from te_fsdp.features.hfsdp.optimizer_shards import OptimizerShard, axes_that_shard_dim0, is_padded
from te_fsdp.features.main_params import optimizer_shard_in
from te_fsdp.layout import chunk_range
from te_fsdp.upstream import torch_dtensor as _torch

#: Functions of torch that return and load the states of optimizers.
_FUNCTIONS = "_get_optim_state_dict", "_load_optim_state_dict"


@functools.cache
def unpad_full_states() -> None:
    """Let torch return and load full states in the shapes of the parameters. Local operation, once per process."""
    get, load = (getattr(_state_dict, name) for name in _FUNCTIONS)

    @functools.wraps(get)
    def get_states(model: nn.Module, optimizers: Any, info: Any) -> Any:
        states = get(model, optimizers, info)
        return _converted(model, optimizers, states, _unpadded) if info.full_state_dict else states

    @functools.wraps(load)
    def load_states(model: nn.Module, optimizers: Any, states: Any, info: Any) -> None:
        states = _converted(model, optimizers, states, _padded) if info.full_state_dict else states
        load(model, optimizers, states, info)

    for name, function in zip(_FUNCTIONS, (get_states, load_states), strict=True):
        setattr(_state_dict, name, function)


def _converted(
    model: nn.Module,
    optimizers: Any,
    states: dict[str, Any],
    convert: Callable[[OptimizerShard, torch.Tensor], torch.Tensor],
) -> dict[str, Any]:
    """Return states with tensors of padded parameters converted, in a nested or flat state dict."""
    nested, flat = dict(states.get("state", {})), dict(states)
    for path, parameter in model.named_parameters():
        name = _torch.without_wrappers(path)
        shard = next((s for o in optimizers if (s := optimizer_shard_in(o, parameter)) is not None), None)
        if shard is None or not is_padded(shard):
            continue
        if name in nested:
            nested[name] = {key: convert(shard, value) for key, value in nested[name].items()}
        for key in [key for key in flat if key.startswith(f"state.{name}.")]:
            flat[key] = convert(shard, flat[key])
    return flat | {"state": nested} if nested else flat


def _ranges(shard: OptimizerShard) -> Iterator[tuple[tuple[int, ...], int, int]]:
    """Yield the coordinates of each part along the axes that shard rows, with its range of rows."""
    sizes = [shard.mesh.size(axis) for axis in axes_that_shard_dim0(shard)]
    for place in itertools.product(*map(range, sizes)):
        low, high = 0, shard.parameter.shape[0]
        for size, index in zip(reversed(sizes), reversed(place), strict=True):  # the last axis shards first
            start, end = chunk_range(high - low, size, index)
            low, high = low + start, low + end
        yield place, low, high


def _unpadded(shard: OptimizerShard, value: Any) -> Any:
    """Return the original state of a padded one that is unsharded."""
    parameter, leading = shard.parameter, len(axes_that_shard_dim0(shard))
    if not isinstance(value, torch.Tensor) or value.ndim != parameter.ndim + leading:
        return value
    full = value.new_empty(parameter.shape)
    for place, low, high in _ranges(shard):
        full[low:high] = value[place][: high - low]
    rows = rows_of_shards(parameter)
    return full if rows is None else full[rows.to(full.device)]


def _padded(shard: OptimizerShard, value: Any) -> Any:
    """Return the padded state of an original one that is unsharded."""
    parameter = shard.parameter
    if not isinstance(value, torch.Tensor) or value.shape != parameter.shape:
        return value
    if (rows := rows_of_shards(parameter)) is not None:
        value = value[rows.argsort().to(value.device)]
    parts = list(_ranges(shard))
    sizes, height = [n + 1 for n in parts[-1][0]], max(high - low for _, low, high in parts)
    padded = value.new_zeros((*sizes, height, *value.shape[1:]))
    for place, low, high in parts:
        padded[place][: high - low] = value[low:high]
    return padded
