"""Optimizer state in the form of torch's ``Optimizer.state_dict()``, which numbers parameters, and in ours by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from te_fsdp.checkpoint.entries import decode, encode, stacked_name
from te_fsdp.checkpoint.manifest import dtype_name
from te_fsdp.checkpoint.portable.contents import DCP_KIND, Contents
from te_fsdp.checkpoint.portable.lazy import Lazy
from te_fsdp.errors import CheckpointError


def add_optimizer(
    contents: Contents, state: Any, class_name: str | None, otherwise_class: str | None = None
) -> bool:
    """Take a torch optimizer's state dict into a checkpoint's contents; note it where that cannot be done.

    Parameters are told by their names, where ``torch.distributed.checkpoint.state_dict`` made the state dict; by the
    ``param_names`` of each group (torch writes them if the optimizer was given named parameters); with one group also
    by their order, if their number and the shapes of their state fit, and the file keeps an order.

    Args:
        contents: With the model's parameters; changed.
        state: ``{"state": {number or name: {...}}, "param_groups": [...]}``, or that of ``get_state_dict`` with
            ``flatten_optimizer_state_dict=True``; tensors lazy.
        class_name: Class of the optimizer; ``None``: told from its options.
        otherwise_class: Class of the optimizer where its options do not tell.

    Returns:
        Whether it was taken.
    """
    try:
        described, tensors = _read(contents, _nested(state), class_name, otherwise_class)
    except _NotTaken as reason:
        contents.notes.append(f"optimizer: left, {reason}")
        return False
    except (TypeError, KeyError, ValueError, AttributeError) as error:
        contents.notes.append(
            f"optimizer: left, no torch optimizer's state_dict() ({type(error).__name__}: {error})"
        )
        return False
    contents.manifest.optimizer = described
    contents.tensors |= tensors
    contents.notes.append(f"optimizer: taken, {described['class']} with {len(described['state'])} states")
    return True


class _NotTaken(Exception):
    """Why an optimizer's state has no place in the checkpoint."""


def _nested(state: Any) -> Any:
    """A state dict that was flattened (``state.<name>.<key>``, ``param_groups.<name>.<option>``) as nested ones."""
    prefixes = ("state.", "param_groups.")
    if not isinstance(state, Mapping) or not state or not all(str(k).startswith(prefixes) for k in state):
        return state
    states: dict[str, dict[str, Any]] = {}
    options: dict[str, dict[str, Any]] = {}
    for key, value in state.items():
        name, _, last = key.partition(".")[2].rpartition(".")
        if key.startswith("state."):
            states.setdefault(name, {})[last] = value
        else:
            options.setdefault(name, {})[last] = _option(value)
    groups: list[tuple[dict[str, Any], list[str]]] = []
    for name, own in options.items():
        alike = [names for known, names in groups if known == own]
        alike[0].append(name) if alike else groups.append((own, [name]))
    return {"state": states, "param_groups": [{**own, "params": names} for own, names in groups]}


def _read(
    contents: Contents, state: Any, class_name: str | None, otherwise_class: str | None
) -> tuple[dict[str, Any], dict[str, Lazy]]:
    if not isinstance(state, Mapping) or not isinstance(state.get("param_groups"), list):
        raise _NotTaken("no torch optimizer's state_dict()")
    groups = _with_other_experts(contents, state["param_groups"], state.get("state", {}))
    names = _names(contents, groups)
    by_text = {
        str(number): number for number in names
    }  # DCP makes text of numbers, in the keys of a dict alone
    tensors: dict[str, Lazy] = {}
    states: dict[str, dict[str, Any]] = {}
    for number, values in state.get("state", {}).items():
        name = names.get(by_text.get(number, number))
        if name is None:
            raise _NotTaken(f"state of parameter {number}, which is in no group")
        for key, value in values.items():
            if isinstance(value, Lazy):
                if value.shape not in ((), (1,), tuple(contents.manifest.parameters[name]["shape"])):
                    raise _NotTaken(f"{key} of {name} has the shape {value.shape}")
                described = {"shape": list(value.shape), "dtype": dtype_name(value.dtype)}
                states.setdefault(name, {})[key] = described
                tensors[f"optimizer.state.{name}.{key}"] = value
            elif value is not None:
                states.setdefault(name, {})[key] = {"value": _plain(value, f"{key} of {name}")}
    described_groups = []
    for group in groups:
        options = {k: _option(v) for k, v in group.items() if k not in ("params", "param_names")}
        own = {"parameters": [names[n] for n in group["params"]], "options": _plain(options, "options")}
        described_groups.append(own)
    kind = class_name or _class_of(groups) or otherwise_class
    if kind is None:
        raise _NotTaken("its class cannot be told from its options (say it with --optimizer-class)")
    return {"class": kind, "groups": described_groups, "state": states}, tensors


def _with_other_experts(contents: Contents, groups: list[Any], states: Mapping[Any, Any]) -> list[Any]:
    """The groups with the experts of all ranks: DCP writes lists of names as rank 0 has them."""
    held = {name for group in groups for name in group["params"]}
    groups = [{**group, "params": list(group["params"])} for group in groups]
    for name in [n for n in contents.manifest.parameters if n in states and n not in held]:
        if stacked_name(name) == name:
            continue
        homes = [g for g in groups if stacked_name(name) in {stacked_name(str(n)) for n in g["params"]}]
        if len(homes) == 1:
            homes[0]["params"].append(name)
    return groups


def _plain(value: Any, what: str) -> Any:
    try:
        return encode(value, what)[0]
    except CheckpointError as error:
        raise _NotTaken(str(error)) from error


def _option(value: Any) -> Any:
    return value.whole().item() if isinstance(value, Lazy) and value.shape in ((), (1,)) else value


def _names(contents: Contents, groups: list[Any]) -> dict[Any, str]:
    """Name of each numbered parameter."""
    known = contents.manifest.parameters
    numbers = [number for group in groups for number in group["params"]]
    if all(isinstance(number, str) for number in numbers):
        names = dict(zip(numbers, numbers, strict=True))
    elif all("param_names" in group for group in groups):
        names = {n: name for g in groups for n, name in zip(g["params"], g["param_names"], strict=True)}
    elif contents.kind == DCP_KIND or len(groups) != 1 or len(numbers) != len(known):
        # DCP keeps no order: its metadata lists what rank 0 writes first.
        raise _NotTaken(
            "it numbers its parameters without names (save what get_state_dict gives, or give the optimizer "
            "model.named_parameters(); torch.save also keeps the order of one group with all parameters)"
        )
    else:
        names = dict(zip(numbers, known, strict=True))
    strange = [name for name in names.values() if name not in known]
    if strange:
        raise _NotTaken(f"it names {strange[0]}, which the state dict lacks")
    return names


def _class_of(groups: list[Any]) -> str | None:
    """The class whose options these are, ``None`` where several have them (NAdam, RAdam, Adamax, TE's FusedSGD)."""
    options = groups[0] if groups else {}
    if {"betas", "bias_correction"} <= options.keys():
        return "FusedAdam"
    if {"betas", "amsgrad"} <= options.keys():
        return "AdamW" if options.get("decoupled_weight_decay") else "Adam"
    if {"momentum", "nesterov", "foreach"} <= options.keys():
        return "SGD"
    return None


def optimizer_state_dict(contents: Contents) -> dict[str, Any] | None:
    """A checkpoint's optimizer in the form that torch's ``load_state_dict`` takes, tensors lazy.

    Raises:
        CheckpointError: Options that are tensors, which a checkpoint of te_fsdp does not hold.
    """
    described = contents.manifest.optimizer
    if described is None:
        return None
    numbers: dict[str, int] = {}
    groups = []
    for group in described["groups"]:
        for name in group["parameters"]:
            numbers[name] = len(numbers)
        params = [numbers[name] for name in group["parameters"]]
        options = decode(group["options"], {})
        groups.append({**options, "params": params, "param_names": list(group["parameters"])})
    state: dict[int, dict[str, Any]] = {}
    for name, values in described["state"].items():
        if name not in numbers:
            raise CheckpointError(f"optimizer state of {name}", expected="a parameter of a group")
        state[numbers[name]] = {
            key: contents.tensors[f"optimizer.state.{name}.{key}"] if "dtype" in d else decode(d["value"], {})
            for key, d in values.items()
        }
    return {"state": state, "param_groups": groups}
