"""Unsharded state dicts of experts (``full_state_dict=True``) under expert parallelism."""

# [Note: full state dicts of experts] On an expert-parallel mesh, a ``GroupedLinear`` with a parameter for each
# expert registers the local experts only. torch gathers each tensor over its mesh, which excludes
# expert parallelism. Rank 0 would therefore export the first experts only, without an error. Here the ranks
# exchange their experts before torch gathers everything else. A load ignores the experts of other ranks.

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from te_fsdp.collectives.agreement import from_rank_0, gather, rank, world_size
from te_fsdp.modules.extra_state import ExpertEntry
from te_fsdp.modules.state_loading import create_missing_states, drop_main_weights
from te_fsdp.records import binding_of
from te_fsdp.upstream import te as _te, torch_dtensor as _torch
from te_fsdp.upstream.torch_dcp import loaded_entries, nested_states
from te_fsdp.upstream.torch_redistribution import as_bits

#: Whether torch loads an optimizer, for which it compares the names with those of the rank's parameters.
_loads: ContextVar[bool] = ContextVar("loads", default=False)
#: Whether the state dict has shards, which torch loads into an optimizer without states, too
loads_shards: ContextVar[bool] = ContextVar("loads_shards", default=False)
#: Keys that lead to a value in nested dicts.
_Path = tuple[str, ...]


class _Tensor(NamedTuple):
    """Description of a tensor that another rank sends."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class Experts(NamedTuple):
    """A module whose experts are distributed over an expert-parallel mesh."""

    mesh: Any  #: The expert-parallel mesh
    prefix: str  #: Prefix of the names in state dicts
    names: list[str]  #: Names of this rank's tensors of one expert each, without the prefix
    others: set[str]  #: Names of the other ranks' tensors


def _modules(model: nn.Module) -> Iterator[Experts]:
    """Yield the experts of each module that does not have all of them on this rank. Local operation."""
    for path, module in model.named_modules():
        binding = binding_of(module)
        if (
            binding is None
            or binding.experts is None
            or binding.ep.mesh is None
            or binding.ep.mesh.size() == 1
        ):
            continue
        numbers = range(binding.experts.total)
        names = {f"{stack}{n}" for stack in ("weight", "bias") for n in numbers}
        # A module with one parameter for all experts registers ``None`` for each of them.
        parameters = [n for n, parameter in module._parameters.items() if parameter is not None]
        local_names = [n for n in parameters if n in names and n not in binding.distributed]
        stacks = {_stack(name) for name in local_names}
        others = {f"{stack}{n}" for stack in stacks for n in numbers} - set(local_names)
        path = _torch.without_wrappers(path)
        yield Experts(binding.ep.mesh, f"{path}." if path else "", local_names, others)


def with_all_experts(stock: Callable[..., Any], model: nn.Module, *arguments: Any) -> Any:
    """Call torch's function that returns a state dict; complete the experts of an unsharded one.

    Collective over the meshes of the experts, for an unsharded state dict.
    """
    *before, info = arguments
    modules = [*_modules(model)]
    if not modules:
        return stock(model, *arguments)
    is_full = info.full_state_dict
    state = dict(
        stock(model, *before, replace(info, full_state_dict=False, cpu_offload=False) if is_full else info)
    )
    if "param_groups" in state and not _loads.get():
        # DCP writes the list of one rank, in which every rank must find its experts when it loads.
        state["param_groups"] = list(map(dict, state["param_groups"]))
        for group in state["param_groups"]:
            names = dict.fromkeys(group["params"])
            for experts in modules:  # the other ranks' experts after this rank's
                stacks = {_stack(name) for name in experts.names if experts.prefix + name in names}
                more = sorted(name for name in experts.others if _stack(name) in stacks)
                names |= dict.fromkeys(experts.prefix + name for name in more)
            group["params"] = list(names)
    if not is_full:
        return state
    if "state" in state:  # nested: torch shares the inner dicts with the optimizer
        state["state"] = {name: dict(param_state) for name, param_state in state["state"].items()}
    for experts in modules:
        _complete(state, experts, to_cpu=info.cpu_offload)
    return _torch.full_or_cpu_state_dict(state, info)


def _stack(name: str) -> str:
    return name.rstrip("0123456789")


def _complete(state: dict[str, Any], experts: Experts, *, to_cpu: bool) -> None:
    """Replace this rank's experts by the unsharded tensors of all experts. Collective over the experts' meshes.

    With ``to_cpu``, only rank 0 keeps them, as in torch.
    """
    local = {path: value for name in experts.names for path, value in _entries(state, experts.prefix + name)}
    extra = f"{experts.prefix}_extra_state"
    rows = state.get(extra)
    rows = rows.as_subclass(torch.Tensor) if isinstance(rows, ExpertEntry) and rows.numel() else None
    described = {
        path: _Tensor(tuple(value.shape), value.dtype) if _is_sent(value) else value
        for path, value in local.items()
    }
    keeps, group = not to_cpu or rank() == 0, experts.mesh.get_group()
    device = torch.device(experts.mesh.device_type)
    # The experts of all ranks are inserted below, in rank order. With ``to_cpu``, ranks other than 0 keep none.
    for path in local:
        _holder(state, path).pop(path[-1])
    by_rank = gather((described, rows), group)
    for source, (others, _) in enumerate(by_rank):
        is_mine = source == experts.mesh.get_local_rank()
        for path, value in others.items():
            if isinstance(value, _Tensor):
                full = _unsharded(local[path], device) if is_mine else None
                if full is None:
                    full = torch.empty(value.shape, dtype=value.dtype, device=device)
                dist.broadcast(as_bits(full), group=group, group_src=source)
                value = full.cpu() if to_cpu and keeps else full
            if keeps:
                _holder(state, path)[path[-1]] = value
    entries_of_ranks = [entry for _, entry in by_rank if entry is not None]
    if len(entries_of_ranks) == len(by_rank):
        state[extra] = torch.cat(entries_of_ranks)


def _is_sent(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.ndim > 0


def _entries(state: dict[str, Any], name: str) -> list[tuple[_Path, Any]]:
    """Return the entries of a parameter in a model's state dict, or in an optimizer's, nested or flat."""
    if name in state:
        return [((name,), state[name])]
    if "state" in state:
        return [(("state", name, key), value) for key, value in state["state"].get(name, {}).items()]
    prefixes = (f"state.{name}.", f"param_groups.{name}.")
    return [((key,), value) for key, value in state.items() if key.startswith(prefixes)]


def _holder(state: dict[str, Any], path: _Path) -> dict[str, Any]:
    for key in path[:-1]:
        state = state.setdefault(key, {})
    return state


def _unsharded(value: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return the unsharded values of a tensor on a device. Collective over the mesh of a DTensor."""
    value = value.detach().to(device)
    value = value.full_tensor() if isinstance(value, DTensor) else value
    return (value.dequantize() if _te.is_quantized(value) else value).contiguous()


def has_other_experts(model: nn.Module) -> bool:
    """Return whether other ranks have experts of the model that this rank does not have. Local operation."""
    return any(experts.others for experts in _modules(model))


def load_optimizer_states(
    stock: Any,
    in_model_form: Callable[..., Any],
    model: nn.Module,
    optimizers: Any,
    state_dict: Any,
    info: Any,
) -> None:
    """Call torch's function that loads an optimizer's state dict; ``in_model_form`` renames entries of experts."""
    # Without expert parallelism torch broadcasts the parameters that rank 0 has. Otherwise the full state dict of
    # rank 0 is broadcast here, and each rank keeps the states of its parameters.
    modules = [*_modules(model)] if info.broadcast_from_rank0 and world_size() > 1 else []
    if modules:
        flat: dict[_Path, Any] = {(key,): value for key, value in state_dict.items() if key != "state"}
        for name, param_state in state_dict.get("state", {}).items():
            flat |= {("state", name, key): value for key, value in param_state.items()}
        described = [
            {path: _Tensor(tuple(v.shape), v.dtype) if _is_sent(v) else v for path, v in flat.items()}
        ]
        dist.broadcast_object_list(described, src=0)
        device = torch.device(modules[0].mesh.device_type)
        others = {experts.prefix + name for experts in modules for name in experts.others}
        heads = tuple(f"{kind}.{name}." for kind in ("state", "param_groups") for name in others)
        loaded: dict[str, Any] = {}
        for path, value in described[0].items():
            if isinstance(value, _Tensor):
                full = torch.empty(value.shape, dtype=value.dtype, device=device)
                if rank() == 0:
                    full.copy_(flat[path])
                dist.broadcast(as_bits(full), src=0)
                value = full.cpu()
            if others.isdisjoint(path) and not path[0].startswith(heads):
                _holder(loaded, path)[path[-1]] = value
        state_dict, info = loaded, replace(info, broadcast_from_rank0=False)
    state_dict = in_model_form(model, state_dict)
    for optimizer in optimizers if info.full_state_dict or "state" not in state_dict else ():
        find = functools.partial(loaded_entries, model, optimizer, state_dict, info)
        # Only rank 0 has a state dict. Other ranks would wait if it raised alone.
        entries = from_rank_0(find) if info.broadcast_from_rank0 else find()
        create_missing_states(optimizer, entries, info)
        drop_main_weights(optimizer, entries, info)
    tokens = _loads.set(True), loads_shards.set(not info.full_state_dict and "state" in state_dict)
    # torch would look for nested states in the optimizer's flattened ones.
    is_flat = info.full_state_dict and info.flatten_optimizer_state_dict
    nested = replace(info, flatten_optimizer_state_dict=False) if is_flat else info
    try:
        for some in [(optimizer,) for optimizer in optimizers] if is_flat else [optimizers]:
            states = nested_states(*some, state_dict, info) if is_flat else state_dict
            stock(model, some, states, nested)
    finally:
        _loads.reset(tokens[0])
        loads_shards.reset(tokens[1])
    for optimizer in optimizers:
        _te.move_options(optimizer)
