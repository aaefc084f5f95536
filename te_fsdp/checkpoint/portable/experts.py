"""Layers of experts in files: a tensor for each expert, as TransformerEngine has it; and one for all, as ours."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from te_fsdp.checkpoint.entries import (
    GROUPED,
    ExpertPlace,
    join_experts,
    of_all_experts,
    per_expert,
    stacked_name,
)
from te_fsdp.checkpoint.portable.contents import Contents
from te_fsdp.checkpoint.portable.lazy import InMemory, Lazy, Stack

__all__ = ["split_experts", "stack_experts"]

_NAME = re.compile(r"(|.*\.)(weight|bias)(0|[1-9]\d*)")


def stack_experts(contents: Contents) -> None:
    """Put the weights of each expert (``weight0``, ``weight1``, ...) together, with their optimizer state; changes it.

    A module's tensors are taken for experts if they are numbered from 0 without gaps, are of one kind, and the module
    is TE's (it has an ``_extra_state``) or has nothing else, in files without such entries.
    """
    found = _layers(contents)
    names = {name: stacked for stacked, members in found.items() for name in members}
    if not names:
        return
    manifest, tensors = contents.manifest, contents.tensors
    parameters: dict[str, dict[str, Any]] = {}
    for name, described in manifest.parameters.items():
        stacked = names.get(name, name)
        if stacked in found and stacked not in parameters:
            members = found[stacked]
            described = {**described, "shape": [len(members), *described["shape"]], "layout": GROUPED}
            for part in described.get("components", [""]):
                end = f":{part}" if part else ""
                tensors[f"model.{stacked}{end}"] = Stack([tensors.pop(f"model.{n}{end}") for n in members])
        parameters.setdefault(stacked, described)
    manifest.parameters = parameters
    if manifest.optimizer is not None:
        manifest.optimizer = _stack_optimizer(contents, manifest.optimizer, found, names)
    layers = {stacked.rpartition(".")[0] for stacked in found}
    contents.notes.append(f"experts: the weights of {len(layers)} layer(s) taken as one tensor each")


def _layers(contents: Contents) -> dict[str, list[str]]:
    """By the name of the tensor of all experts: the names of theirs, in order."""
    parameters, extras = contents.manifest.parameters, contents.manifest.extra_states
    numbered: dict[str, dict[int, str]] = {}
    others: set[str] = set()
    for name in parameters:
        match = _NAME.fullmatch(name)
        if match is None:
            others.add(name.rpartition(".")[0])
        else:
            numbered.setdefault(stacked_name(name), {})[int(match[3])] = name
    found = {}
    for stacked, by_index in numbered.items():
        module = stacked.rpartition(".")[0]
        members = [by_index[index] for index in sorted(by_index)]
        kinds: list[dict[str, Any]] = [{**parameters[name], "layout": None} for name in members]
        is_layer = module in extras if extras else module not in others
        is_layer = is_layer or parameters[members[0]].get("layout") == GROUPED
        dims = 2 if stacked.endswith("weight") else 1
        if (
            is_layer
            and sorted(by_index) == list(range(len(by_index)))
            and all(kind == kinds[0] for kind in kinds)
            and len(kinds[0]["shape"]) == dims
            and stacked not in parameters
        ):
            found[stacked] = members
    return found


def _stack_optimizer(
    contents: Contents, optimizer: dict[str, Any], found: Mapping[str, list[str]], names: Mapping[str, str]
) -> dict[str, Any]:
    tensors = contents.tensors
    states = {name: own for name, own in optimizer["state"].items() if name not in names}
    for stacked, members in found.items():
        whole = contents.manifest.parameters[stacked]["shape"][1:]
        joined: dict[str, dict[str, Any]] = {}
        for index, name in enumerate(members):
            place, own = ExpertPlace(index, len(members)), optimizer["state"].get(name, {})
            join_experts(joined, {k: of_all_experts(d, place, whole) for k, d in own.items()}, stacked)
        for key, described in joined.items():
            if "dtype" in described:
                # Of an expert that does not have the state: one zero in memory, as often as wanted.
                zero = torch.zeros((), dtype=getattr(torch, described["dtype"]), device="cpu")
                zeros = InMemory(zero.expand(described["shape"][1:]))
                parts = [tensors.pop(f"optimizer.state.{n}.{key}", zeros) for n in members]
                tensors[f"optimizer.state.{stacked}.{key}"] = Stack(parts)
        if joined:
            states[stacked] = joined
    groups = [
        {**group, "parameters": list(dict.fromkeys(names.get(n, n) for n in group["parameters"]))}
        for group in optimizer["groups"]
    ]
    return {**optimizer, "state": states, "groups": groups}


def split_experts(contents: Contents) -> Contents:
    """The same contents with tensors for each expert, under TransformerEngine's names. Changes nothing."""
    totals = {n: d["shape"][0] for n, d in contents.manifest.parameters.items() if d.get("layout") == GROUPED}
    if not totals:
        return contents
    manifest = replace(contents.manifest, parameters={})
    split = Contents(contents.source, contents.kind, manifest, dict(contents.tensors), list(contents.notes))
    for name, described in contents.manifest.parameters.items():
        if name not in totals:
            manifest.parameters[name] = described
            continue
        for part in described.get("components", [""]):
            end = f":{part}" if part else ""
            whole = split.tensors.pop(f"model.{name}{end}")
            split.tensors |= {f"model.{name}{i}{end}": whole.select(i) for i in range(totals[name])}
        for index in range(totals[name]):
            manifest.parameters[f"{name}{index}"] = {**described, "shape": described["shape"][1:]}
    if manifest.optimizer is not None:
        manifest.optimizer = _split_optimizer(manifest.optimizer, split.tensors, totals)
    return split


def _split_optimizer(
    optimizer: dict[str, Any], tensors: dict[str, Lazy], totals: Mapping[str, int]
) -> dict[str, Any]:
    states: dict[str, dict[str, Any]] = {}
    for name, own in optimizer["state"].items():
        if name not in totals:
            states[name] = own
            continue
        for key, described in own.items():
            whole = tensors.pop(f"optimizer.state.{name}.{key}", None)
            for index in range(totals[name]):
                one = per_expert(described, ExpertPlace(index, totals[name]))
                if one is None:
                    continue
                kept = {k: v for k, v in one.items() if k not in ("at", "experts", "scalar")}
                states.setdefault(f"{name}{index}", {})[key] = kept
                if whole is not None:
                    part = whole if one.get("at") is None else whole.select(index)
                    tensors[f"optimizer.state.{name}{index}.{key}"] = part
    groups = [
        {**group, "parameters": _in_order(group["parameters"], totals)} for group in optimizer["groups"]
    ]
    return {**optimizer, "state": states, "groups": groups}


def _in_order(names: list[str], totals: Mapping[str, int]) -> list[str]:
    """Names of a group with those of each expert, in TE's order: torch's optimizers load their state by position."""
    found: list[str] = []
    done: set[str] = set()
    for name in names:
        module = name.rpartition(".")[0]
        if name not in totals:
            found.append(name)
        elif module not in done:
            done.add(module)
            both = [n for n in names if n in totals and n.rpartition(".")[0] == module]
            both.sort(key=lambda n: n.endswith("bias"))
            found += [f"{n}{index}" for index in range(totals[name]) for n in both]
    return found
