"""An optimizer's side of a checkpoint: state by parameter name, placed as the parameters, and group options.

Works on the state tensors themselves: torch's optimizers and TE's FusedAdam give and take their state dicts
through copies and casts. State that is missing at load is allocated, by no step. Keys in the files:
``optimizer.state.<name>.<state>``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor import DTensor

from te_fsdp import _te, _torch
from te_fsdp.checkpoint.entries import Entry, Owned, cut_entry, whole_entry
from te_fsdp.checkpoint.extra import encode
from te_fsdp.checkpoint.model_state import dtype_name
from te_fsdp.errors import CheckpointError, message

if TYPE_CHECKING:
    from torch.optim import Optimizer

__all__ = ["OptimizerState", "check_scaled_state", "describe_state", "optimizer_state"]


@dataclass
class OptimizerState:
    """What an optimizer contributes to a checkpoint.

    Attributes:
        described: The manifest's ``optimizer``.
        entries: Tensors by key.
    """

    described: dict[str, Any]
    entries: dict[str, Entry]


def optimizer_state(optimizer: Optimizer, owned: dict[str, Owned]) -> OptimizerState:
    """Entries and description of an optimizer's state. Local operation.

    Args:
        optimizer: Its parameters are the model's (checked by the caller).
        owned: The model's parameters by name.

    Raises:
        CheckpointError: State that has no place in the original parameter, or options that cannot be stored.
    """
    names = {id(o.parameter): name for name, o in owned.items()}
    entries: dict[str, Entry] = {}
    states: dict[str, dict[str, Any]] = {}
    for parameter, state in optimizer.state.items():
        name = names[id(parameter)]
        for key, value in state.items():
            if value is None:
                continue
            described, entry = describe_state(f"optimizer.state.{name}.{key}", value, owned[name])
            states.setdefault(name, {})[key] = described
            if entry is not None:
                entries[f"optimizer.state.{name}.{key}"] = entry
    groups = []
    for index, group in enumerate(optimizer.param_groups):
        options = {key: _plain(value) for key, value in group.items() if key not in ("params", "param_names")}
        encoded, _ = encode(options, f"optimizer.param_groups[{index}]")
        groups.append({"parameters": [names[id(p)] for p in group["params"]], "options": encoded})
    return OptimizerState({"class": type(optimizer).__name__, "groups": groups, "state": states}, entries)


def _plain(value: Any) -> Any:
    """An option as a plain value: tensors of one element (lr of capturable optimizers) as numbers."""
    return value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else value


def describe_state(key: str, value: Any, owned: Owned) -> tuple[dict[str, Any], Entry | None]:
    """Description and entry of one state value. Local operation.

    Args:
        key: File key.
        value: The value: a tensor, or a plain one, which goes into the manifest and has no entry.
        owned: The parameter that it belongs to.

    Raises:
        CheckpointError: It has no known place in the original parameter.
    """
    if not isinstance(value, torch.Tensor):
        encoded, _ = encode(value, key)
        return {"value": encoded}, None
    local = _torch.local_of(value)
    described = {"shape": list(value.shape), "dtype": dtype_name(value.dtype)}
    if value.numel() == 1 and value.ndim <= 1 and tuple(value.shape) != tuple(owned.parameter.shape):
        return described, whole_entry(local)
    if tuple(value.shape) != tuple(owned.parameter.shape) or _te.is_quantized(local):
        got = f"shape {tuple(value.shape)}" + (
            f" in {_te.format_of(local)}" if _te.is_quantized(local) else ""
        )
        raise CheckpointError(
            message(
                f"{key}: state without a known place in the parameter",
                expected=f"a scalar, or high precision of shape {tuple(owned.parameter.shape)}",
                got=got,
                fix="use an optimizer whose state is element by element (AdamW, SGD, FusedAdam without uint8)",
            )
        )
    info = owned.info()
    if tuple(local.shape) != info.local_shape:
        raise CheckpointError(
            message(
                f"{key}: local shape",
                expected=info.local_shape,
                got=tuple(local.shape),
                fix="shard it as the parameter",
            )
        )
    if not isinstance(owned.parameter, DTensor):
        return described, whole_entry(local)
    return described, cut_entry(local, info.original_shape, info.boxes)


def check_scaled_state(optimizer: Optimizer) -> None:
    """Refuse FusedAdam's state with scales of its own.

    Raises:
        CheckpointError: Names the options; each shard has another scale, and TE keeps it outside of the
        state.
    """
    dtypes = getattr(optimizer, "name_to_dtype_map", {})
    scaled = {k: dtype_name(d) for k, d in dtypes.items() if d in (torch.float16, torch.uint8)}
    if not getattr(optimizer, "master_weights", True):
        scaled.pop("master_param", None)
    if scaled:
        raise CheckpointError(
            message(
                f"{type(optimizer).__name__}: state kept with a scale per shard",
                expected="float32 or bfloat16 state",
                got=", ".join(f"{key} in {dtype}" for key, dtype in scaled.items()),
                fix="leave exp_avg_dtype, exp_avg_sq_dtype and master_weight_dtype at float32 (or bfloat16)",
            )
        )
