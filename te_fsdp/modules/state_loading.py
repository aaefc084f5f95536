"""Checks before loads of state dicts into a bound model."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint import state_dict as _state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from te_fsdp.boxed_dtensor import order_states, rows_for
from te_fsdp.collectives.agreement import are_equal, gather_by_rank, on_any_rank
from te_fsdp.collectives.rendezvous import format_ranks
from te_fsdp.errors import CheckpointError, OrderError, PlacementError, shorten
from te_fsdp.quantized.amax import MAIN
from te_fsdp.quantized.boxed_loading import quantize_pending
from te_fsdp.records import KEEPS_MAIN_WEIGHTS, get_record, module_record
from te_fsdp.state_dict_wrappers import require_same_form
from te_fsdp.upstream import te as _te, te_modules as _te_modules, torch_dtensor as _torch
from te_fsdp.upstream.fsdp2_units import wait_and_reshard
from te_fsdp.upstream.patches import Replacements, wrapping
from te_fsdp.upstream.torch_dcp import is_called_by

_ASSIGN = "assign_to_params_buffers"
_STATE = re.compile(r"(?<![^.])state\.")


def watch_loading(model: nn.Module) -> None:
    """Check all later calls of ``load_state_dict`` of a model and its modules. Local operation."""
    for module in model.modules():
        hooks = module_record(module).hooks
        if _before_load not in hooks:
            hooks.add(_before_load)
            module.register_load_state_dict_pre_hook(_before_load)


# [Note: assigned tensors] ``load_state_dict(assign=True)`` of a bound model copies the loaded values into the
# existing parameters. Assigned tensors would replace parameters to which FSDP2, optimizers and te_fsdp's
# records refer.
def _before_load(
    module: nn.Module, state_dict: Any, prefix: str, metadata: dict[str, Any], *unused: Any
) -> None:
    """Check all modules below the loaded module before anything changes."""
    # torch has a placeholder for each entry that is missing, which TE's modules without parameters cannot read.
    state_dict.update({key: None for key, value in state_dict.items() if _torch.is_absent_extra_state(value)})
    assign = bool(metadata.get(_ASSIGN))
    for name, parameter in module.named_parameters(remove_duplicate=False):
        value = state_dict.get(prefix + name)
        if isinstance(parameter, DTensor) and isinstance(value, torch.Tensor):
            _check(prefix + name, parameter, value, assign)
    # Pending values must be in the weights, because `load_state_dict` copies their data.
    quantize_pending(module, state_dict, prefix)
    if not assign:
        return
    params = [p for p in module._parameters.values() if isinstance(p, DTensor)]
    # Parameters on meta have no memory to copy to, so the loaded tensors replace them.
    if params and not any(parameter.is_meta for parameter in params):
        metadata[_ASSIGN] = False
    for name, target in module._parameters.items():
        value = state_dict.get(prefix + name)
        if target is None or value is None:
            continue
        if target.is_meta:
            state_dict[prefix + name] = rows_for(target, value)
        # Pickles of float8 tensors have no quantizer, without which TE cannot quantize new values.
        if _te.is_quantized(value) and getattr(value, _te.QUANTIZER, value) is None:
            setattr(value, _te.QUANTIZER, _te.quantizer_of(target) or _te.weight_quantizer(module, name))
            _te_modules.sync_delayed_scale(module, name, value)


def entries_of_second_names(model: nn.Module) -> dict[str, None]:
    """Return absent entries ``_extra_state`` of modules with two names: torch broadcasts one. Local operation."""
    first = {name for name, _ in model.named_modules()}
    return {
        f"{_torch.without_wrappers(name)}._extra_state": None
        for name, module in model.named_modules(remove_duplicate=False)
        if name not in first and type(module).get_extra_state is not nn.Module.get_extra_state
    }


@wrapping
def verify_resharded(model: nn.Module, *args: Any, stock: Any, **kwargs: Any) -> Any:
    """Call torch's function that maps a model's parameters to FQNs, which it then uses for the optimizer's parameters.

    It needs the sharded parameters, because the optimizer has those.
    """
    wait_and_reshard(model)
    return stock(model, *args, **kwargs)


@wrapping
def verify_on_all_ranks(model_state: Any, optimizer_state: Any, info: Any, *, stock: Any) -> None:
    """Call torch's check of the arguments of ``set_state_dict``, which is wrong if ranks other than 0 pass ``{}``.

    It raises on these ranks alone, or lets them omit the model with ``broadcast_from_rank0``: the others wait.
    """
    is_load = is_called_by("set_") and (info.full_state_dict or info.broadcast_from_rank0)
    bound = [key for key in info.fqn_param_mapping if isinstance(key, torch.Tensor) and get_record(key)]
    meshes = [parameter.device_mesh for parameter in bound if isinstance(parameter, DTensor)]
    if is_load and bound and info.broadcast_from_rank0:
        # From ``{}`` torch concludes that the call is for the optimizer only. It broadcasts to all ranks.
        info.handle_model |= on_any_rank(bool(model_state))
    elif is_load and meshes:
        mesh, given = max(meshes, key=DeviceMesh.size), [bool(model_state), bool(optimizer_state)]
        if not bool(are_equal(list(map(int, given)), mesh).all()):
            by_rank = sorted(gather_by_rank(all(given), mesh).items())
            raise CheckpointError(
                "set_state_dict: state dicts on some ranks only",
                expected="the full state dicts on all ranks",
                got=f"an empty one on {format_ranks([rank for rank, is_full in by_rank if not is_full])}",
                why="Ranks with a state dict would wait for the others",
                fix="pass options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True), and {} on "
                "all ranks but rank 0",
            )
    stock(model_state, optimizer_state, info)


def create_states(optimizer: Optimizer, parameters: Iterable[torch.Tensor]) -> None:
    """Create states by a step with zero gradients and learning rates of zero, as torch does. Collective as the step."""
    rates = [(group, group["lr"]) for group in optimizer.param_groups if "lr" in group]
    for parameter in parameters:
        dtype = getattr(parameter, "grad_dtype", None) or parameter.dtype
        parameter.grad = torch.zeros_like(parameter, dtype=dtype)
    try:
        for group, rate in rates:
            group["lr"] = torch.zeros_like(rate) if isinstance(rate, torch.Tensor) else 0.0
        optimizer.step()
    finally:
        for group, rate in rates:
            group["lr"] = rate
        optimizer.zero_grad(set_to_none=True)


# [Note: parameters without state] A parameter that was frozen or had no gradient in all steps has no optimizer state.
# torch loads a full or flattened state dict into existing states, and creates states only if the optimizer has none.
# Rank 0 would add unsharded states, and the other ranks none. Flattened states would be lost.
def create_missing_states(optimizer: Optimizer, entries: set[Sequence[str]], info: Any) -> None:
    """Create the states of parameters that an optimizer lacks, for (name, key) of a state dict.

    Collective over the largest mesh of the parameters, for those that te_fsdp has bound.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    names = {name for name, key in entries if key != MAIN}
    missing = {name: p for name, p in _without_state(optimizer, info).items() if name in names}
    if not any(map(get_record, parameters)) or not has_stepped(optimizer):  # torch creates all states
        return
    meshes = [p.device_mesh for p in parameters if isinstance(p, DTensor)]
    # Ranks have different experts, and the step is collective.
    if not (on_any_rank(bool(missing), max(meshes, key=DeviceMesh.size)) if meshes else missing):
        return
    if pending := [p for p in parameters if p.grad is not None]:
        raise OrderError(
            f"{type(optimizer).__name__}: load of states before the first step of {', '.join(sorted(missing))}",
            expected="no gradients",
            got=f"gradients of {len(pending)} parameters",
            why="A step with zero gradients creates the states",
            fix="call optimizer.zero_grad() first",
        )
    create_states(optimizer, missing.values())


def fit_main_weight(optimizer: Any, parameter: torch.Tensor, state: Any, form: torch.dtype) -> Any:
    """Return a loaded state with the main weight that FusedAdam needs, or without one that it would never update.

    ``form`` is the dtype of main weights; int16 for remainders. Local operation.
    """
    is_known = type(optimizer).__module__.startswith(("torch.", "transformer_engine."))
    main_params, keeps = (
        getattr(optimizer, KEEPS_MAIN_WEIGHTS, None),
        getattr(optimizer, "master_weights", False),
    )
    by_te_fsdp = main_params is not None and not (
        main_params.kept_by_fused_adam and not main_params.shards_state
    )
    if get_record(parameter) is None or not is_known or by_te_fsdp or keeps == (MAIN in state):
        return state
    if not keeps:
        return {key: value for key, value in state.items() if key != MAIN}
    local: Any = _torch.local_of(parameter).detach()
    if parameter.dtype == torch.float32 and not _te.is_quantized(local):  # FusedAdam does not use it
        return state
    value = local.dequantize(dtype=torch.float32) if _te.is_quantized(local) else local.float()
    return {**state, MAIN: torch.zeros_like(local, dtype=form) if form == torch.int16 else value}


def drop_main_weights(optimizer: Any, entries: set[Sequence[str]], info: Any) -> None:
    """Drop FusedAdam's main weights of parameters whose loaded states have none. Local operation.

    ``entries`` are (name, key) of the state dict. torch would keep these main weights, which are of other weights.
    """
    main_params = getattr(optimizer, KEEPS_MAIN_WEIGHTS, None)
    if not getattr(optimizer, "master_weights", False) or getattr(main_params, "shards_state", False):
        return
    names = {name for name, _ in entries} - {name for name, key in entries if key == MAIN}
    for parameter in [p for group in optimizer.param_groups for p in group["params"]]:
        if get_record(parameter) and not names.isdisjoint(info.fqn_param_mapping[parameter]):
            optimizer.state.get(parameter, {}).pop(MAIN, None)


def has_stepped(optimizer: Optimizer) -> bool:
    """Return whether a parameter has a state. Local operation.

    Main weights exist before the first step of their parameters. A read of ``optimizer.state[p]`` adds an empty one.
    """
    return any(set(state) - {MAIN} for state in optimizer.state.values())


def _without_state(optimizer: Optimizer, info: Any) -> dict[str, torch.Tensor]:
    """Return the parameters to train that have no state, by all their names. Local operation."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    missing = [p for p in parameters if p.requires_grad and not set(optimizer.state.get(p, ())) - {MAIN}]
    return {name: p for p in missing for name in info.fqn_param_mapping[p]}


#: Names with state in the state dict of a partly stepped optimizer -> names without. A copy has the same names.
_lacking: dict[frozenset[str], set[str]] = {}


def record_missing_states(states: dict[str, Any], optimizers: Iterable[Optimizer], info: Any) -> None:
    """Record which parameters have no state when torch returns a state dict, nested or flattened. Local operation."""
    missing = {name: p for o in optimizers if has_stepped(o) for name, p in _without_state(o, info).items()}
    names = {name for name, state in states.get("state", {}).items() if state} or _named_states(states)[""]
    if names:  # else of a rank that does not keep the full state dict
        _lacking[frozenset(names)] = {name for name, p in missing.items() if get_record(p)}


def _named_states(keys: Iterable[str]) -> dict[str, set[str]]:
    """Return the names of parameters in flat keys of optimizer states, by the prefix of ``state.<name>.<key>``."""
    found: dict[str, set[str]] = {"": set()}
    for key in keys:
        for place in [m.start() for m in _STATE.finditer(key)]:
            found.setdefault(key[:place], set()).add(key[place + len("state.") :].rpartition(".")[0])
    return found


def refuse_missing_states(planner: Any) -> None:
    """Raise CheckpointError if a checkpoint has states that ``dcp.load`` would omit. Local operation.

    DCP reads only what the given state dict has. That of a partly stepped optimizer lacks states.
    """
    given = _named_states(planner.state_dict) if any(_lacking.values()) else {}
    by_prefix = {prefix: names for prefix, own in given.items() if (names := _lacking.get(frozenset(own)))}
    lacking = planner.metadata.state_dict_metadata.keys() - planner.state_dict.keys() if by_prefix else ()
    parts = {key[:end] for key in lacking for end, letter in enumerate(key) if letter == "."}
    problems = {n for prefix, names in by_prefix.items() for n in names if f"{prefix}state.{n}" in parts}
    if problems:
        raise CheckpointError(
            f"dcp.load: states of {len(problems)} parameters that have not stepped: {shorten(sorted(problems))}",
            expected="a state dict with the states that the checkpoint has",
            got="that of an optimizer in which other parameters have stepped",
            why="DCP reads only the entries of the given state dict, so that these states would be lost",
            fix="load into a new optimizer, for which torch creates all states, or use te_fsdp.checkpoint.load",
        )


def with_own_states(state_dict: dict[str, Any]) -> dict[str, Any]:
    """Return a copy of an optimizer's state dict with the same tensors. A caller may load the original again. Local."""
    result = copy.copy(state_dict)
    result["state"] = {key: copy.copy(state) for key, state in state_dict["state"].items()}
    return result


@wrapping
def load_states(self: Optimizer, state_dict: dict[str, Any], *, stock: Any) -> None:
    """Load an optimizer's state dict with fitting main weights and stacked rows in order. Collective for those rows."""
    remainders = getattr(self, "store_param_remainders", None)  # of TE's FusedAdam
    if remainders is None:  # FusedAdam reads its argument again, which is a copy already
        state_dict = with_own_states(state_dict)
    keys = chain.from_iterable(group["params"] for group in state_dict["param_groups"])
    params = chain.from_iterable(group["params"] for group in self.param_groups)
    for key, parameter in zip(keys, params, strict=False):
        state = state_dict["state"].get(key) or {}
        main, is_bf16 = state.get("master_param"), parameter.dtype == torch.bfloat16
        form = torch.int16 if remainders and is_bf16 else torch.float32
        if remainders is not None and main is not None:
            require_same_form(f"{key}.master_param", main.dtype, torch.empty(0, dtype=form))
        if state:
            state_dict["state"][key] = fit_main_weight(self, parameter, state, form)
    order_states(self, state_dict)
    stock(self, state_dict)


PATCHES: Replacements = (
    (Optimizer, "load_state_dict", load_states),
    # Every call for state dicts checks its arguments by these.
    (_state_dict, "_verify_options", verify_resharded),
    (_state_dict, "_verify_state_dict", verify_on_all_ranks),
)


def _check(label: str, parameter: DTensor, value: torch.Tensor, assign: bool) -> None:
    """Check that a loaded value has the placement of the parameter and belongs to this rank; raise otherwise."""
    if _torch.is_shard_of_other_rank(value, parameter):
        raise CheckpointError(
            f"{label}: load_state_dict of a sharded parameter",
            expected="this rank's shard",
            got="the shard of a different rank, as in a file that one rank saved with torch.save",
            why="torch.save writes only the calling rank's shard of a sharded tensor",
            fix="use te_fsdp.checkpoint.save and load, on all ranks",
        )
    why = (
        "It would replace this rank's shard" if assign else "Each rank needs its shard of an unsharded tensor"
    )
    if not isinstance(value, DTensor):
        got = f"a plain tensor of shape {tuple(value.shape)}"
    elif assign and (value.placements != parameter.placements or value.device_mesh != parameter.device_mesh):
        got = f"a DTensor with placements {tuple(value.placements)} on {value.device_mesh}"
    else:
        return
    raise PlacementError(
        f"{label}: load_state_dict({'assign=True' if assign else ''}) of a sharded parameter",
        expected=f"a DTensor with placements {tuple(parameter.placements)}",
        got=got,
        why=why,
        fix="use te_fsdp.checkpoint.load, or torch.distributed.checkpoint.state_dict.set_model_state_dict(model, "
        "state_dict, options=StateDictOptions(full_state_dict=True)) for unsharded tensors, or load before "
        "te_fsdp.set_device_mesh and te_fsdp.fully_shard",
    )
