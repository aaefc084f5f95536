"""Loading an optimizer: what fits of its state, made without a step, and the options of its groups."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor import DTensor

from te_fsdp import _torch
from te_fsdp.checkpoint.compare import GROUPS, Differences
from te_fsdp.checkpoint.entries import Entry, Owned
from te_fsdp.checkpoint.extra import decode
from te_fsdp.checkpoint.model_state import dtype_name
from te_fsdp.checkpoint.optimizer_state import describe_state

if TYPE_CHECKING:
    from torch.optim import Optimizer

__all__ = ["compare_optimizer", "main_weight", "prepare_loading", "restore_groups"]

#: Name of main weights in an optimizer's state: FusedAdam's, and that of te_fsdp.main_weights.
_MAIN = "master_param"


def compare_optimizer(
    found: Differences, optimizer: Optimizer, saved: dict[str, Any], owned: dict[str, Owned]
) -> None:
    """Add the differences between a saved optimizer and this one. Local operation; changes nothing."""
    name = type(optimizer).__name__
    if saved["class"] != name:
        found.add_optimizer(f"optimizer: saved {saved['class']}, this one is {name}")
    names = {id(o.parameter): n for n, o in owned.items()}
    if len(saved["groups"]) != len(optimizer.param_groups):
        found.add_optimizer(
            f"optimizer: {len(saved['groups'])} groups saved, here {len(optimizer.param_groups)}", GROUPS
        )
        here = [{names[id(p)] for group in optimizer.param_groups for p in group["params"]}]
        there = [{n for group in saved["groups"] for n in group["parameters"]}]
    else:
        here = [{names[id(p)] for p in group["params"]} for group in optimizer.param_groups]
        there = [set(group["parameters"]) for group in saved["groups"]]
    for index, (now, then) in enumerate(zip(here, there, strict=True)):
        for verb, which in (
            ("missing in the checkpoint", now - then),
            ("only in the checkpoint", then - now),
        ):
            for parameter in sorted(which):
                found.add_optimizer(f"optimizer group {index}: {len(which)} {verb}", parameter)
    _compare_states(found, optimizer, saved["state"], owned)


def _compare_states(
    found: Differences, optimizer: Optimizer, saved: dict[str, Any], owned: dict[str, Owned]
) -> None:
    """State tensors whose kind, shape or dtype would not fit, or fits after a conversion."""
    for name, states in saved.items():
        if name not in owned:
            continue  # reported with the groups
        parameter = owned[name].parameter
        expected = _expected_dtypes(optimizer, parameter, states)
        for key in sorted(set(states) ^ set(expected)):
            where = "only in the checkpoint" if key in states else "not in the checkpoint"
            if key != _MAIN or {states.get(key, {}).get("dtype"), expected.get(key)} - {
                None,
                "float32",
            }:
                found.add_optimizer(f"optimizer state {key!r} is {where}", name)
            else:
                made = "left out" if key in states else "made from the loaded weights"
                found.converted[f"optimizer.state.{name}.{key}"] = f"{where}: {made}"
        for key, described in states.items():
            _compare_state(found, name, key, described, expected.get(key), tuple(parameter.shape))


def _compare_state(
    found: Differences,
    name: str,
    key: str,
    described: dict[str, Any],
    wanted: str | None,
    whole: tuple[int, ...],
) -> None:
    """Dtype and shape of one state tensor."""
    dtype, shape = described.get("dtype"), tuple(described.get("shape", ()))
    if dtype is None:
        return
    if wanted is not None and dtype != wanted:
        if all(getattr(torch, d).is_floating_point for d in (dtype, wanted)):
            found.converted[f"optimizer.state.{name}.{key}"] = f"{dtype} -> {wanted}"
        else:
            found.add_optimizer(
                f"optimizer state {key!r}: saved {dtype}, this optimizer keeps {wanted}", name
            )
    if shape not in ((), (1,), whole):
        found.add_optimizer(f"optimizer state {key!r}: saved shape {shape}", name)


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


def prepare_loading(
    optimizer: Optimizer,
    saved: dict[str, Any],
    owned: dict[str, Owned],
    weights: dict[str, dict[str, Any]],
    leave: set[str] = frozenset(),  # type: ignore[assignment]
) -> dict[str, Entry]:
    """Make the optimizer's state as saved: allocate what is missing, drop what was not there.

    Local operation; no step is made.

    Args:
        optimizer: Compared with ``saved`` before.
        saved: The manifest's ``optimizer``.
        owned: The model's parameters by name.
        weights: The manifest's ``parameters``.
        leave: Parameters whose state is left as it is.

    Returns:
        Entries of the live state tensors, still to be filled.
    """
    names = {id(o.parameter): n for n, o in owned.items()}
    entries: dict[str, Entry] = {}
    for group in optimizer.param_groups:
        on_device = bool(group.get("capturable") or group.get("fused"))
        for parameter in group["params"]:
            name = names[id(parameter)]
            if name in leave:
                continue
            states = saved["state"].get(name)
            if states is None:
                _forget_state(optimizer, parameter)
                continue
            expected = _expected_dtypes(optimizer, parameter, states)
            _initialize_fused_adam(optimizer, parameter)
            present = optimizer.state[parameter]
            fresh = {}
            for key, described in states.items():
                if key in expected:
                    dtype = expected[key] or _follow_weight(described, weights[name], parameter)
                    fresh[key] = _slot({**described, "dtype": dtype}, parameter, present.get(key), on_device)
            kept = {k: v for k, v in present.items() if k == _MAIN and k not in fresh and k not in states}
            present.clear()
            present.update(fresh | kept)
            for key, value in fresh.items():
                entry = describe_state(f"optimizer.state.{name}.{key}", value, owned[name])[1]
                if entry is not None:
                    entries[f"optimizer.state.{name}.{key}"] = entry
    return entries


def _forget_state(optimizer: Optimizer, parameter: torch.nn.Parameter) -> None:
    """Drop a parameter's state; the main weight of an optimizer that cannot make it anew is kept, to be set later."""
    state = optimizer.state.pop(parameter, {})
    if _MAIN in state and not hasattr(optimizer, "initialize_state"):
        optimizer.state[parameter][_MAIN] = state[_MAIN]


def _initialize_fused_adam(optimizer: Optimizer, parameter: torch.nn.Parameter) -> None:
    """TE's FusedAdam keeps more about a state than the state itself."""
    if not optimizer.state.get(parameter) and hasattr(optimizer, "initialize_state"):
        low = parameter.dtype == torch.bfloat16
        optimizer.initialize_state(parameter, low and optimizer.store_param_remainders)  # type: ignore[operator]


def _follow_weight(described: dict[str, Any], weight: dict[str, Any], parameter: torch.Tensor) -> str | None:
    """Dtype of a new state tensor: torch's optimizers keep state in the weight's dtype, so it follows that one."""
    dtype = described.get("dtype")
    if dtype == weight["dtype"] and described["shape"] == weight["shape"]:
        return dtype_name(parameter.dtype)
    return dtype


def _slot(described: dict[str, Any], parameter: torch.Tensor, present: Any, on_device: bool) -> Any:
    """The value that is there if it fits, else a new one of the described kind."""
    if described["dtype"] is None:
        return decode(described["value"], {})
    shape, dtype = tuple(described["shape"]), getattr(torch, described["dtype"])
    if isinstance(present, torch.Tensor) and tuple(present.shape) == shape and present.dtype == dtype:
        return present
    if shape != tuple(parameter.shape):
        # torch's rule for "step": on the host unless the optimizer is capturable or fused.
        return torch.zeros(shape, dtype=dtype, device=parameter.device if on_device else "cpu")
    local = torch.zeros(_torch.local_of(parameter).shape, dtype=dtype, device=parameter.device)
    if not isinstance(parameter, DTensor):
        return local
    # The parameter's own spec would say the parameter's dtype, which is not always the state's.
    mesh, placements = parameter.device_mesh, parameter.placements
    return DTensor.from_local(
        local, mesh, placements, run_check=False, shape=parameter.shape, stride=parameter.stride()
    )


def restore_groups(
    optimizer: Optimizer, saved: dict[str, Any], owned: dict[str, Owned], loaded: set[str]
) -> list[int]:
    """Give every group its saved options; what is neither saved nor a default of the optimizer is removed.

    Args:
        optimizer: Its groups are changed in place.
        saved: The manifest's ``optimizer``.
        owned: The model's parameters by name.
        loaded: Parameters whose state was loaded.

    Returns:
        Groups whose options were left: their loaded parameters come from several saved groups, or from none, so that
        no saved options are theirs.
    """
    names = {id(o.parameter): n for n, o in owned.items()}
    where = {name: index for index, group in enumerate(saved["groups"]) for name in group["parameters"]}
    same_number = len(saved["groups"]) == len(optimizer.param_groups)
    left = []
    for index, group in enumerate(optimizer.param_groups):
        mine = {names[id(p)] for p in group["params"]} & loaded
        sources = {where[name] for name in mine}
        if same_number and sources <= {index}:
            sources = {index}
        if len(sources) != 1:
            left.append(index)
            continue
        _restore_group(optimizer, group, saved["groups"][sources.pop()])
    return left


def _restore_group(optimizer: Optimizer, group: dict[str, Any], then: dict[str, Any]) -> None:
    options = decode(then["options"], {})
    for key in set(group) - set(options) - set(optimizer.defaults) - {"params", "param_names"}:
        del group[key]
    for key, value in options.items():
        if isinstance(group.get(key), torch.Tensor):
            group[key].fill_(value)  # captured graphs refer to this tensor
        else:
            group[key] = value


def main_weight(
    optimizer: Optimizer | None, parameter: torch.nn.Parameter, *, make: bool = False
) -> torch.Tensor | None:
    """The local main weight of a parameter, ``None`` where there is none. Local operation.

    Args:
        optimizer: Any optimizer.
        parameter: One of its parameters.
        make: Make TE's FusedAdam begin the state, zero moments included, as its next step would.
    """
    if optimizer is None:
        return None
    held = (p for group in optimizer.param_groups for p in group["params"])
    if make and getattr(optimizer, "master_weights", False) and any(parameter is p for p in held):
        _initialize_fused_adam(optimizer, parameter)
    main = optimizer.state.get(parameter, {}).get(_MAIN)
    return None if main is None else _torch.local_of(main)
