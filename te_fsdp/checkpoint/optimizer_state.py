"""An optimizer's side of a checkpoint: state by parameter name, placed as the parameters, and group options.

Works on the state tensors themselves: torch's optimizers and TE's FusedAdam give and take their state dicts
through copies and casts. State that is missing at load is allocated, by no step. Keys in the files:
``optimizer.state.<name>.<state>``.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from te_fsdp import _te, _torch
from te_fsdp.checkpoint.entries import Entry, add_entry, cut_entry, join_experts, whole_entry
from te_fsdp.checkpoint.extra import encode
from te_fsdp.checkpoint.manifest import dtype_name
from te_fsdp.checkpoint.model_state import Owned
from te_fsdp.errors import CheckpointError
from te_fsdp.layout.boxes import cut_boxes
from te_fsdp.sharding.outer_chunks import rows_of_state

if TYPE_CHECKING:
    from torch.optim import Optimizer

__all__ = ["OptimizerState", "check_scaled_state", "describe_state", "join_ranks_experts", "optimizer_state"]


@dataclass
class OptimizerState:
    """What an optimizer contributes to a checkpoint.

    Attributes:
        described: The manifest's ``optimizer``, without the states in ``experts``.
        entries: Tensors by key.
        experts: States of parameters of single experts, by the name of the tensor of all. Each rank has its own
            experts, and some of these may have no state.
    """

    described: dict[str, Any]
    entries: dict[str, Entry]
    experts: dict[str, dict[str, dict[str, Any]]] = field(default_factory=dict)

    def complete(
        self, experts: dict[str, dict[str, dict[str, Any]]], members: dict[str, list[Owned]]
    ) -> None:
        """Take the states of all ranks' experts; what an expert here lacks becomes zeros. Local operation.

        Args:
            experts: From :func:`join_ranks_experts`.
            members: This rank's parameters by the name of the files' tensor.
        """
        self.described["state"] |= experts
        for name, states in experts.items():
            for owned in members.get(name, []):
                place = owned.expert
                for key, described in states.items():
                    if place is None or "dtype" not in described or place.index in described["experts"]:
                        continue
                    add_entry(
                        self.entries, f"optimizer.state.{name}.{key}", place.lift(_zeros(described, owned))
                    )


def _zeros(described: dict[str, Any], owned: Owned) -> Entry:
    """Entry of a state that an expert does not have."""
    shape, dtype = described["shape"][1:], getattr(torch, described["dtype"])
    if described["scalar"]:
        return whole_entry(torch.zeros(shape, dtype=dtype, device="cpu"))
    info = owned.info()
    local = torch.zeros(info.local_shape, dtype=dtype, device=owned.local.device)
    return cut_entry(local, info.original_shape, info.boxes)


def join_ranks_experts(
    seen: list[dict[str, dict[str, dict[str, Any]]]],
) -> dict[str, dict[str, dict[str, Any]]]:
    """The states of the experts of all ranks, from each rank's :attr:`OptimizerState.experts`.

    Raises:
        CheckpointError: Experts of one layer with states of different kinds.
    """
    joined: dict[str, dict[str, dict[str, Any]]] = {}
    for experts in seen:
        for name, states in experts.items():
            join_experts(joined.setdefault(name, {}), states, name)
    return {name: joined[name] for name in sorted(joined)}


def optimizer_state(optimizer: Optimizer, owned: dict[str, Owned]) -> OptimizerState:
    """Entries and description of an optimizer's state. Local operation.

    Args:
        optimizer: Its parameters are the model's (checked by the caller).
        owned: The model's parameters by name.

    Raises:
        CheckpointError: State that has no place in the original parameter, or options that cannot be stored.
    """
    by_id = {id(o.parameter): o for o in owned.values()}
    found = OptimizerState({}, {})
    states: dict[str, dict[str, Any]] = {}
    for parameter, state in optimizer.state.items():
        one = by_id.get(id(parameter))
        if one is None:
            raise _state_of_a_stranger(optimizer, parameter)
        for key, value in state.items():
            if value is None:
                continue
            label = f"optimizer.state.{one.key}.{key}"
            described, entry = describe_state(label, value, one)
            if one.expert is None:
                states.setdefault(one.key, {})[key] = described
            else:
                shape = described.get("shape", ())
                if entry is not None:
                    described = {**described, "shape": [one.expert.total, *shape]}
                    described["scalar"] = tuple(shape) != one.info().original_shape
                described["experts"] = [one.expert.index]
                join_experts(found.experts.setdefault(one.key, {}), {key: described}, one.key)
            if entry is not None:
                add_entry(found.entries, label, one.entry(entry))
    found.described = {
        "class": type(optimizer).__name__,
        "groups": _groups(optimizer, by_id),
        "state": states,
    }
    return found


def _state_of_a_stranger(optimizer: Optimizer, parameter: Any) -> CheckpointError:
    return CheckpointError(
        f"{type(optimizer).__name__}: state of a parameter that the model does not have",
        expected="state of the model's parameters",
        got=f"that of one of shape {tuple(getattr(parameter, 'shape', ()))}, which is in no group",
        why="The files know parameters by their names in the model",
        fix="remove its entry from optimizer.state, as whoever took it out of the group should have done",
    )


def _groups(optimizer: Optimizer, by_id: dict[int, Owned]) -> list[dict[str, Any]]:
    """Names and options of the groups; the experts of a layer are one name."""
    groups: list[dict[str, Any]] = []
    where: dict[str, int] = {}
    for index, group in enumerate(optimizer.param_groups):
        options = {key: _plain(value) for key, value in group.items() if key not in ("params", "param_names")}
        encoded, _ = encode(options, f"optimizer.param_groups[{index}]")
        names = list(dict.fromkeys(by_id[id(p)].key for p in group["params"]))
        torn = [name for name in names if where.setdefault(name, index) != index]
        if torn:
            raise CheckpointError(
                f"optimizer: experts of {torn[0]} in the groups {where[torn[0]]} and {index}",
                expected="all experts of a layer in one group",
                why="A checkpoint holds the weights of all experts as one tensor",
                fix="give them one group",
            )
        groups.append({"parameters": names, "options": encoded})
    return groups


def _plain(value: Any) -> Any:
    """An option as a plain value: tensors of one element (lr of capturable optimizers) as numbers."""
    return value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else value


def describe_state(key: str, value: Any, owned: Owned) -> tuple[dict[str, Any], Entry | None]:
    """Description and entry of one state value. Local operation.

    Args:
        key: File key.
        value: The value: a tensor, or a plain one, which goes into the manifest and has no entry.
        owned: The parameter that it belongs to; shape and entry are those of its own tensor.

    Raises:
        CheckpointError: It has no known place in the original parameter.
    """
    if not isinstance(value, torch.Tensor):
        encoded, _ = encode(value, key)
        return {"value": encoded}, None
    local = _torch.local_of(value)
    described: dict[str, Any] = {"shape": list(value.shape), "dtype": dtype_name(value.dtype)}
    if value.numel() == 1 and value.ndim <= 1 and tuple(value.shape) != tuple(owned.parameter.shape):
        return described, whole_entry(local)
    if tuple(value.shape) != tuple(owned.parameter.shape) or _te.is_quantized(local):
        got = f"shape {tuple(value.shape)}" + (
            f" in {_te.format_of(local)}" if _te.is_quantized(local) else ""
        )
        raise CheckpointError(
            f"{key}: state without a known place in the parameter",
            expected=f"a scalar, or high precision of shape {tuple(owned.parameter.shape)}",
            got=got,
            fix="use an optimizer whose state is element by element (AdamW, SGD, FusedAdam without uint8)",
        )
    info = owned.info()
    shape, boxes = info.local_shape, info.boxes
    rows = rows_of_state(value, owned.parameter)
    if rows is not None:  # shard_optimizer has cut it further
        dim, low, high = rows
        shape, boxes = (*shape[:dim], high - low, *shape[dim + 1 :]), cut_boxes(boxes, dim, low, high)
    if tuple(local.shape) != shape:
        raise CheckpointError(
            f"{key}: local shape",
            expected=shape,
            got=tuple(local.shape),
            fix="shard it as the parameter",
        )
    described["shape"] = list(info.original_shape)
    if shape == info.original_shape:
        return described, whole_entry(local)
    return described, cut_entry(local, info.original_shape, boxes)


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
            f"{type(optimizer).__name__}: state kept with a scale per shard",
            expected="float32 or bfloat16 state",
            got=", ".join(f"{key} in {dtype}" for key, dtype in scaled.items()),
            fix="leave exp_avg_dtype, exp_avg_sq_dtype and master_weight_dtype at float32 (or bfloat16)",
        )
