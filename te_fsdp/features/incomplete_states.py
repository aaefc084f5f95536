"""Optimizer states without the entries that a step creates."""

from __future__ import annotations

import inspect
from collections import defaultdict
from typing import Any

import torch
from torch.optim import Optimizer

from te_fsdp.errors import CheckpointError, shorten
from te_fsdp.state_dict_wrappers import require_same_form
from te_fsdp.upstream.torch_dtensor import local_of


def has_equal_groups(optimizer: Optimizer, state_dict: dict[str, Any]) -> bool:
    """Return whether a state dict has the optimizer's numbers of parameters; torch refuses it otherwise. Local."""
    sizes = [[len(group["params"]) for group in of["param_groups"]] for of in (vars(optimizer), state_dict)]
    return sizes[0] == sizes[1]


def refuse_unloadable_states(
    optimizer: Optimizer, state_dict: dict[str, Any], main: str, *, cut: bool
) -> None:
    """Raise CheckpointError for main weights of another form or shape, or that DCP has loaded alone. Local operation.

    ``state_dict`` has the form of ``optimizer.state_dict()``, with equal groups. ``main`` is the name of the main
    weight in a state. ``cut``: the optimizer's states are rows, whose shapes the caller compares.
    """
    states = state_dict["state"]
    for key, state in states.items():
        if main in state:
            require_same_form(f"{key}.{main}", state[main].dtype, torch.empty(0))
    # Without momentum the main weight is all that SGD has.
    is_sgd = isinstance(optimizer, torch.optim.SGD)
    own_states: dict[Any, Any] = {}
    for group, own in zip(state_dict["param_groups"], optimizer.param_groups, strict=True):
        if not is_sgd or group.get("momentum") != 0:
            pairs = zip(group["params"], own["params"], strict=True)
            own_states |= {key: optimizer.state.get(p, {}) for key, p in pairs if key in states}
        for key, parameter in [] if cut else zip(group["params"], own["params"], strict=True):
            loaded = states.get(key, {}).get(main)
            if loaded is not None and local_of(loaded).shape != local_of(parameter).shape:
                raise CheckpointError(
                    f"{type(optimizer).__name__}.load_state_dict: a main weight of shape {tuple(loaded.shape)}",
                    expected=f"{tuple(parameter.shape)}, or this rank's shard of it",
                    got=f"{tuple(local_of(loaded).shape)} on this rank",
                    why="HFSDP pads rows that several mesh axes shard unevenly, for one mesh",
                    fix="load it on the mesh that saved it, or save and load by te_fsdp.checkpoint",
                )
    incomplete = [key for key in own_states if set(states[key]) == {main}]
    if all(set(state) == {main} for state in optimizer.state.values()):  # no step yet
        # A fresh optimizer has no other entries, so a dict that has some is from a trained optimizer. Its incomplete
        # states are those of parameters that have not stepped, such as frozen ones.
        incomplete = incomplete if len(incomplete) == len(own_states) else []
    else:
        # DCP writes to the tensors of the optimizer's own state dict, which has all entries that the optimizer has.
        # Other tensors are from a state dict of a time when these parameters had not stepped. They may also be padded
        # copies of its main weights.
        pairs_of = {key: (states[key][main], own_states[key].get(main)) for key in incomplete}
        incomplete = [
            key
            for key, (loaded, own) in pairs_of.items()
            if set(own_states[key]) == {main}
            and (loaded.shape != own.shape or local_of(loaded).data_ptr() == local_of(own).data_ptr())
        ]
    if not incomplete or _has_no_state(optimizer):
        return
    raise CheckpointError(
        f"{type(optimizer).__name__}.load_state_dict: {len(incomplete)} parameters with main weights only",
        expected="the full state",
        got=f"only main weights for parameters {shorten(list(map(str, incomplete)), 8)}, as before their first step",
        why="DCP loads only the entries that the given state dict contains",
        fix="read it by get_state_dict or use te_fsdp.checkpoint.load, which create the missing state",
    )


def _has_no_state(optimizer: Optimizer) -> bool:
    """Return whether a step creates no state, by a step of a copy of a user's optimizer. Local operation."""
    kind = type(optimizer)
    # torch's optimizers have state, except SGD.
    if kind.__module__.startswith(("torch.", "transformer_engine.", "te_fsdp.")):
        return False
    parameter = torch.nn.Parameter(torch.zeros(2, 2, device=optimizer.param_groups[0]["params"][0].device))
    parameter.grad = torch.zeros_like(parameter)
    trial = kind.__new__(kind)
    # Schedulers replace the method of an instance.
    trial.__dict__.update({name: value for name, value in vars(optimizer).items() if name != "step"})
    trial.state, trial.param_groups = (
        defaultdict(dict),
        [{**optimizer.param_groups[0], "params": [parameter]}],
    )
    try:
        with torch.no_grad():
            inspect.unwrap(kind.step)(trial)  # without the hooks of all optimizers
    except Exception:  # not known, for example because it requires several parameters
        return False
    return not trial.state[parameter]
