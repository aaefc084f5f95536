"""Loading an optimizer: what fits of its state, made without a step, and the options of its groups."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor import DTensor

from te_fsdp import _te, _torch
from te_fsdp.checkpoint.compare import GROUPS, Differences
from te_fsdp.checkpoint.entries import Entry, add_entry, per_expert
from te_fsdp.checkpoint.extra import decode
from te_fsdp.checkpoint.manifest import dtype_name
from te_fsdp.checkpoint.model_state import Owned
from te_fsdp.checkpoint.optimizer_state import describe_state
from te_fsdp.sharding.optimizer import optimizers_of
from te_fsdp.sharding.outer_chunks import Chunk
from te_fsdp.sharding.outer_optimizer import chunk_in, stand_ins_of
from te_fsdp.sharding.outer_state import is_low

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch.optim import Optimizer

__all__ = [
    "compare_optimizer",
    "initialize_fused_adam",
    "keeping_main_weights",
    "main_weight",
    "prepare_loading",
    "restore_groups",
    "set_main_weight",
    "shared_numbers",
]

#: Name of main weights in an optimizer's state: FusedAdam's, and that of te_fsdp.main_weights.
_MAIN = "master_param"


def compare_optimizer(
    found: Differences, optimizer: Optimizer, saved: dict[str, Any], owned: dict[str, Owned]
) -> None:
    """Add the differences between a saved optimizer and this one. Local operation; changes nothing."""
    name = type(optimizer).__name__
    if saved["class"] != name:
        found.add_optimizer(f"optimizer: saved {saved['class']}, this one is {name}")
    names = {id(o.parameter): o.key for o in owned.values()}
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
    for one in owned.values():
        states = _own_states(saved, one)
        if states:
            _compare_states(found, optimizer, states, one)


def _own_states(saved: dict[str, Any], owned: Owned) -> dict[str, dict[str, Any]]:
    """What was saved of one parameter's state."""
    states = saved["state"].get(owned.key, {})
    own = {key: per_expert(described, owned.expert) for key, described in states.items()}
    return {key: described for key, described in own.items() if described is not None}


def _compare_states(
    found: Differences, optimizer: Optimizer, states: dict[str, dict[str, Any]], owned: Owned
) -> None:
    """State tensors whose kind, shape or dtype would not fit, or fits after a conversion."""
    name, parameter = owned.key, owned.parameter
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
    whole = owned.info().original_shape
    for key, described in states.items():
        _compare_state(found, name, key, described, expected.get(key), whole)


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
        if chunk_in(optimizer, parameter) is not None:  # te_fsdp keeps the main weights
            expected.pop("master_param", None)
            expected |= {"master_param": "float32"} if is_low(parameter) else {}
        return expected
    present = optimizer.state.get(parameter)
    if chunk_in(optimizer, parameter) is not None and not is_low(parameter):
        saved = {key: described for key, described in saved.items() if key != _MAIN}
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
) -> tuple[dict[str, Entry], set[str]]:
    """Make the optimizer's state as saved: allocate what is missing, drop what was not there.

    Local operation; no step is made.

    Args:
        optimizer: Compared with ``saved`` before.
        saved: The manifest's ``optimizer``.
        owned: The model's parameters by name.
        weights: The manifest's ``parameters``.
        leave: Tensors whose state is left as it is.

    Returns:
        Entries of the live state tensors, still to be filled, and the names of parameters with a main weight among
        them.
    """
    by_id = {id(o.parameter): o for o in owned.values()}
    entries: dict[str, Entry] = {}
    mains: set[str] = set()
    for group in optimizer.param_groups:
        on_device = bool(group.get("capturable") or group.get("fused"))
        for parameter in group["params"]:
            one = by_id[id(parameter)]
            if one.key in leave:
                continue
            states = _own_states(saved, one)
            if not states:
                _forget_state(optimizer, parameter)
                continue
            fresh = _fresh_state(optimizer, one, states, weights[one.key], on_device)
            if _MAIN in fresh:
                mains.add(one.fqn)
            for key, value in fresh.items():
                label, at = f"optimizer.state.{one.key}.{key}", states[key].get("at")
                entry = describe_state(label, value, one)[1]
                if entry is not None:
                    add_entry(entries, label, entry if at is None else at.lift(entry))
    return entries, mains


def _fresh_state(
    optimizer: Optimizer,
    owned: Owned,
    states: dict[str, dict[str, Any]],
    weight: dict[str, Any],
    on_device: bool,
) -> dict[str, Any]:
    """Give a parameter the described state, with memory that is still to be filled."""
    parameter, whole = owned.parameter, owned.info().original_shape
    expected = _expected_dtypes(optimizer, parameter, states)
    initialize_fused_adam(optimizer, parameter)
    present = optimizer.state[parameter]
    fresh = {}
    for key, described in states.items():
        if key not in expected:
            continue
        wanted: dict[str, Any] = {**described, "dtype": expected[key] or described.get("dtype")}
        if tuple(wanted.get("shape", ())) == whole:
            if expected[key] is None and described["dtype"] == weight["dtype"] and key != "step":
                # torch's optimizers keep state in the dtype of what they update: the main weight, or the weight.
                updated = present.get(_MAIN)
                wanted["dtype"] = dtype_name(parameter.dtype if updated is None else updated.dtype)
            wanted["shape"] = tuple(parameter.shape)
        fresh[key] = _slot(wanted, parameter, present.get(key), on_device, chunk_in(optimizer, parameter))
    kept = {k: v for k, v in present.items() if k == _MAIN and k not in fresh and k not in states}
    present.clear()
    present.update(fresh | kept)
    return fresh


def _forget_state(optimizer: Optimizer, parameter: torch.nn.Parameter) -> None:
    """Drop a parameter's state; the main weight of an optimizer that cannot make it anew is kept, to be set later."""
    state = optimizer.state.pop(parameter, {})
    if _MAIN in state and not hasattr(optimizer, "initialize_state"):
        optimizer.state[parameter][_MAIN] = state[_MAIN]


def initialize_fused_adam(optimizer: Optimizer, parameter: torch.Tensor) -> None:
    """Make the state of a parameter that TE's FusedAdam has none of; nothing for other optimizers. Local operation.

    By its own method: it keeps more about a state than the state itself.
    """
    stand_ins = stand_ins_of(optimizer)
    if stand_ins is not None:
        stand_ins.initialize(optimizer, parameter)
    elif not optimizer.state.get(parameter) and hasattr(optimizer, "initialize_state"):
        low = parameter.dtype == torch.bfloat16
        optimizer.initialize_state(parameter, low and optimizer.store_param_remainders)  # type: ignore[operator]


def _slot(
    described: dict[str, Any], parameter: torch.Tensor, present: Any, on_device: bool, chunk: Chunk | None
) -> Any:
    """The value that is there if it fits, else a new one of the described kind."""
    if described["dtype"] is None:
        return decode(described["value"], {})
    shape, dtype = tuple(described["shape"]), getattr(torch, described["dtype"])
    if isinstance(present, torch.Tensor) and tuple(present.shape) == shape and present.dtype == dtype:
        return present
    if shape != tuple(parameter.shape):
        # torch's rule for "step": on the host unless the optimizer is capturable or fused.
        return torch.zeros(shape, dtype=dtype, device=parameter.device if on_device else "cpu")
    if chunk is not None:
        return chunk.distributed(torch.zeros(chunk.shape, dtype=dtype, device=parameter.device))
    own = _torch.local_of(parameter)
    local = torch.zeros(own.shape, dtype=dtype, device=parameter.device)
    if not _te.is_quantized(own):
        # As torch's optimizers make it: kernels for many tensors at once want the strides of the parameter.
        local = torch.zeros_like(own, dtype=dtype, memory_format=torch.preserve_format)
    if not isinstance(parameter, DTensor):
        return local
    # The parameter's own spec would say the parameter's dtype, which is not always the state's.
    mesh, placements = parameter.device_mesh, parameter.placements
    return DTensor.from_local(
        local, mesh, placements, run_check=False, shape=parameter.shape, stride=parameter.stride()
    )


def shared_numbers(
    saved: dict[str, Any], members: dict[str, list[Owned]], leave: set[str]
) -> dict[str, tuple[torch.Tensor, list[int]]]:
    """Numbers that the files have for each expert, and parameters here for all experts together. Local operation.

    Returns:
        By file key: memory for the numbers, and the experts that have one.
    """
    found = {}
    for name, states in saved["state"].items():
        if name in leave or name not in members or members[name][0].expert is not None:
            continue
        for key, described in states.items():
            if described.get("scalar"):
                memory = torch.empty(
                    described["shape"], dtype=getattr(torch, described["dtype"]), device="cpu"
                )
                found[f"optimizer.state.{name}.{key}"] = memory, described["experts"]
    return found


def restore_groups(
    optimizer: Optimizer, saved: dict[str, Any], owned: dict[str, Owned], loaded: set[str]
) -> list[int]:
    """Give every group its saved options; what is neither saved nor a default of the optimizer is removed.

    Args:
        optimizer: Its groups are changed in place.
        saved: The manifest's ``optimizer``.
        owned: The model's parameters by name.
        loaded: Tensors whose state was loaded.

    Returns:
        Groups whose options were left: their loaded parameters come from several saved groups, or from none, so that
        no saved options are theirs.
    """
    names = {id(o.parameter): o.key for o in owned.values()}
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
        _place_numbers(optimizer, group)
    return left


def _place_numbers(optimizer: Optimizer, group: dict[str, Any]) -> None:
    """Steps and the like on the device, if the options that came with the checkpoint (``fused``) want them there."""
    if not (group.get("capturable") or group.get("fused")):
        return  # on the host or not, the other kernels take them
    for parameter in group["params"]:
        state = optimizer.state.get(parameter, {})
        for key, value in state.items():
            if isinstance(value, torch.Tensor) and value.numel() == 1 and value.shape != parameter.shape:
                state[key] = value.to(parameter.device)


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
    optimizer: Optimizer | None, parameter: torch.Tensor, *, make: bool = False
) -> torch.Tensor | None:
    """The local main weight of a parameter, ``None`` where there is none. Local operation.

    Of an optimizer given to ``shard_optimizer`` this rank's rows.

    Args:
        optimizer: Any optimizer.
        parameter: One of its parameters.
        make: Make TE's FusedAdam begin the state, zero moments included, as its next step would.
    """
    if optimizer is None:
        return None
    held = (p for group in optimizer.param_groups for p in group["params"])
    if make and getattr(optimizer, "master_weights", False) and any(parameter is p for p in held):
        initialize_fused_adam(optimizer, parameter)
    main = optimizer.state.get(parameter, {}).get(_MAIN)
    return None if main is None else _torch.local_of(main)


def keeping_main_weights(owned: Iterable[Owned], given: Optimizer | None = None) -> list[Optimizer]:
    """Optimizers whose next step would put the weights of before a load back. Local operation.

    Args:
        owned: The model's parameters.
        given: The one that is loaded, which is not among them.
    """
    found = optimizers_of(one.parameter for one in owned)
    return [o for o in found if o is not given and any(_MAIN in state for state in o.state.values())]


@torch.no_grad()
def set_main_weight(
    optimizer: Optimizer, owned: Owned, value: torch.Tensor | None, *, make: bool = False
) -> None:
    """Let a main weight follow its weight; nothing where there is none. Local operation.

    Args:
        optimizer: Any optimizer.
        owned: The parameter, which has its new value.
        value: float32 of the local shape, of which that was made; ``None``: it is what the parameter holds.
        make: Make TE's FusedAdam begin the state of a quantized weight, if it has less than ``value``.
    """
    quantized = _te.is_quantized(owned.local)
    main = main_weight(optimizer, owned.parameter, make=make and quantized and value is not None)
    if main is None:
        return
    if main.dtype == torch.int16:
        main.zero_()  # what another weight lacked: this one is all there is
        return
    if value is None:
        value = owned.local.dequantize(dtype=torch.float32) if quantized else owned.local.detach()  # type: ignore[operator]
    chunk = chunk_in(optimizer, owned.parameter)
    if main.dtype == torch.float32:
        main.copy_(value if chunk is None else chunk.of(value))
    elif main.numel():  # FusedAdam's, with a scale of its own
        optimizer.set_scaled_state(owned.parameter, _MAIN, value.to(torch.float32, copy=True))  # type: ignore[attr-defined]
