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
from te_fsdp.checkpoint.extra import decode, encode
from te_fsdp.checkpoint.model_state import dtype_name, shorten
from te_fsdp.errors import CheckpointError, message

if TYPE_CHECKING:
    from torch.optim import Optimizer

__all__ = ["OptimizerState", "optimizer_state", "prepare_loading", "restore_groups"]


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
            described, entry = _describe(f"optimizer.state.{name}.{key}", value, owned[name])
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


def _describe(key: str, value: Any, owned: Owned) -> tuple[dict[str, Any], Entry | None]:
    """Description and entry of one state value."""
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


def compare_optimizer(optimizer: Optimizer, saved: dict[str, Any], owned: dict[str, Owned]) -> list[str]:
    """Differences between a saved optimizer and this one, in words. Local operation; changes nothing."""
    problems = []
    name = type(optimizer).__name__
    if saved["class"] != name:
        problems.append(f"optimizer: saved {saved['class']}, this one is {name}")
    names = {id(o.parameter): n for n, o in owned.items()}
    if len(saved["groups"]) != len(optimizer.param_groups):
        problems.append(f"optimizer: {len(saved['groups'])} groups saved, here {len(optimizer.param_groups)}")
    else:
        for index, (then, now) in enumerate(zip(saved["groups"], optimizer.param_groups, strict=True)):
            here, there = {names[id(p)] for p in now["params"]}, set(then["parameters"])
            for verb, which in (
                ("missing in the checkpoint", here - there),
                ("only in the checkpoint", there - here),
            ):
                if which:
                    problems.append(
                        f"optimizer group {index}: {len(which)} {verb} ({shorten(sorted(which))})"
                    )
    problems += _compare_states(optimizer, saved["state"], owned)
    return problems


def _compare_states(optimizer: Optimizer, saved: dict[str, Any], owned: dict[str, Owned]) -> list[str]:
    """State tensors whose kind, shape or dtype would not fit; one line per kind of difference."""
    found: dict[str, list[str]] = {}
    for name, states in saved.items():
        if name not in owned:
            continue  # reported with the groups
        parameter = owned[name].parameter
        expected = _expected_dtypes(optimizer, parameter, states)
        for key in sorted(set(states) ^ set(expected)):
            text = f"optimizer state {key!r} is " + (
                "only in the checkpoint" if key in states else "not in the checkpoint"
            )
            found.setdefault(text, []).append(name)
        for key, described in states.items():
            dtype = described.get("dtype")
            if key in expected and expected[key] is not None and dtype != expected[key]:
                text = f"optimizer state {key!r}: saved {dtype}, this optimizer keeps {expected[key]}"
                found.setdefault(text, []).append(name)
            shape = tuple(described.get("shape", ()))
            if dtype is not None and shape not in ((), (1,), tuple(parameter.shape)):
                found.setdefault(f"optimizer state {key!r}: saved shape {shape}", []).append(name)
    return [f"{text} ({shorten(names)})" for text, names in found.items()]


def _expected_dtypes(
    optimizer: Optimizer, parameter: torch.Tensor, saved: dict[str, Any]
) -> dict[str, str | None]:
    """State names of a parameter with the dtype that the optimizer wants, ``None`` where it takes any."""
    dtypes = getattr(optimizer, "name_to_dtype_map", None)
    if dtypes is not None:  # TE's FusedAdam
        expected: dict[str, str | None] = {k: dtype_name(d) for k, d in dtypes.items()}
        if not optimizer.master_weights:  # type: ignore[attr-defined]
            expected.pop("master_param")
        elif optimizer.store_param_remainders and parameter.dtype == torch.bfloat16:  # type: ignore[attr-defined]
            expected["master_param"] = "int16"
        return expected
    present = optimizer.state.get(parameter)
    if not present:
        return dict.fromkeys(saved)
    tensors = {k: dtype_name(v.dtype) for k, v in present.items() if isinstance(v, torch.Tensor)}
    # What torch makes only when it is needed (amsgrad, momentum) may come with the checkpoint.
    return {**dict.fromkeys(saved), **{k: d for k, d in tensors.items() if k in saved}}


def prepare_loading(optimizer: Optimizer, saved: dict[str, Any], owned: dict[str, Owned]) -> dict[str, Entry]:
    """Make the optimizer's state as saved: allocate what is missing, drop what was not there.

    Local operation.

    Args:
        optimizer: Compared with ``saved`` before.
        saved: The manifest's ``optimizer``.
        owned: The model's parameters by name.

    Returns:
        Entries of the live state tensors, still to be filled.
    """
    names = {id(o.parameter): n for n, o in owned.items()}
    entries: dict[str, Entry] = {}
    for group in optimizer.param_groups:
        on_device = bool(group.get("capturable") or group.get("fused"))
        for parameter in group["params"]:
            name = names[id(parameter)]
            described = saved["state"].get(name)
            if described is None:
                optimizer.state.pop(parameter, None)
                continue
            if not optimizer.state.get(parameter) and hasattr(optimizer, "initialize_state"):
                # TE's FusedAdam keeps more about a state than the state itself.
                low = parameter.dtype == torch.bfloat16
                optimizer.initialize_state(parameter, low and optimizer.store_param_remainders)  # type: ignore[operator]
            present = optimizer.state[parameter]
            fresh = {k: _slot(d, parameter, present.get(k), on_device) for k, d in described.items()}
            present.clear()
            present.update(fresh)
            for key, value in fresh.items():
                if isinstance(value, torch.Tensor):
                    full_key = f"optimizer.state.{name}.{key}"
                    entry = _describe(full_key, value, owned[name])[1]
                    assert entry is not None
                    entries[full_key] = entry
    return entries


def _slot(described: dict[str, Any], parameter: torch.Tensor, present: Any, on_device: bool) -> Any:
    """The value that is there if it fits, else a new one of the described kind."""
    if "dtype" not in described:
        return decode(described["value"], {})
    shape, dtype = tuple(described["shape"]), getattr(torch, described["dtype"])
    if isinstance(present, torch.Tensor) and tuple(present.shape) == shape and present.dtype == dtype:
        return present
    if shape != tuple(parameter.shape):
        # torch's rule for "step": on the host unless the optimizer is capturable or fused.
        return torch.zeros(shape, dtype=dtype, device=parameter.device if on_device else "cpu")
    local = torch.zeros(_torch.local_of(parameter).shape, dtype=dtype, device=parameter.device)
    return _torch.dtensor(local, _torch.spec_of(parameter)) if isinstance(parameter, DTensor) else local


def restore_groups(optimizer: Optimizer, saved: dict[str, Any]) -> None:
    """Give every group its saved options; what is neither saved nor a default of the optimizer is removed."""
    for group, then in zip(optimizer.param_groups, saved["groups"], strict=True):
        options = decode(then["options"], {})
        for key in set(group) - set(options) - set(optimizer.defaults) - {"params", "param_names"}:
            del group[key]
        for key, value in options.items():
            if isinstance(group.get(key), torch.Tensor):
                group[key].fill_(value)  # captured graphs refer to this tensor
            else:
                group[key] = value
