"""Private names of FSDP2's records of a unit. Checked on torch 2.11 to 2.15."""

from __future__ import annotations

import functools
import operator
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.distributed._composable_state import _module_state_mapping
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from te_fsdp.upstream.torch_dtensor import local_of

#: Function of a parameter group.
Listener: TypeAlias = "Callable[[Any], None]"
#: Attribute of a parameter group: its :class:`GroupRecord`.
GROUP = "_te_fsdp_group"


@dataclass(eq=False)
class GroupRecord:
    """Additions of te_fsdp to a parameter group of FSDP2 (``FSDPParamGroup``)."""

    #: Functions called before a reduction, after it, and after each backward (``fsdp2_patches.py``).
    listeners: tuple[list[Listener], list[Listener], list[Listener]] | None = None
    replay: Any = None  #: Function that replays TE's all-gather hooks (``fsdp2_settled.py``)
    #: Living autograd nodes of the group's ``post_backward``, one for each forward with gradients (``fsdp2_hooks.py``)
    post_backwards: list[weakref.ref[Any]] = field(default_factory=list)
    #: Whether ``post_backward`` leaves the reduction to a later one of the same backward
    is_postponed: bool = False
    #: Versions of the shards while they are registered, although the group is unsharded (``modules/torch_units.py``).
    exposed: list[int] | None = None
    backward: int = (
        -1
    )  #: Running backward (-1: none) when the group was last unsharded (``modules/torch_units.py``)
    #: Record in place of all of the group's (``fsdp2_reduce.OneGradient``); ``None``: FSDP2 reduces each
    one: Any = None
    flags: Any = None  #: Record that is reduced with the gradients (``fsdp2_unused.UseFlags``)
    gathers: Any = None  #: Object that all-gathers the group instead of FSDP2
    sends_without_copy: bool = False  #: Whether gradients are sent without a copy (``symmetric_memory.py``)
    #: The trained records, and the parts of the gradients computed from them
    parts: tuple[Any, Any] | None = None
    #: The group's list of records, and those with a replicated unsharded parameter (``fsdp2_gradients.py``).
    replicated: tuple[list[Any], list[Any]] | None = None


@dataclass
class ShardedUnshardedPair:
    """The sharded and the unsharded parameter that FSDP2 registers alternately.

    The references are strong, because torch cannot swap a tensor that has weak references.
    """

    shard: DTensor | None = None  #: The sharded parameter
    unsharded: torch.Tensor | None = None  #: The unsharded parameter, or a different tensor that was assigned
    #: Frees the memory of the unsharded parameter that FSDP2 does not free (:mod:`te_fsdp.quantized.fsdp_hooks`);
    #: ``None`` if there is none.
    release: Callable[[], None] | None = None
    #: Whether the shard is registered while the unsharded parameter is kept (:mod:`te_fsdp.sharded_model`).
    is_shard_exposed: bool = False


def record_of_group(group: Any) -> GroupRecord:
    """Return the record of a parameter group; create it if it does not exist."""
    record = group.__dict__.get(GROUP)
    if record is None:
        record = group.__dict__[GROUP] = GroupRecord()
    return record


def is_fsdp_module(module: nn.Module) -> bool:
    """Return whether FSDP2's ``fully_shard`` was applied to this very module."""
    return isinstance(module, FSDPModule)


def wait_and_reshard(model: nn.Module) -> None:
    """Reshard FSDP2 units, and wait for pending unshards. Local operation."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            FSDPModule.reshard(module)  # not a call of the user


def inner_units(unit: nn.Module) -> list[str]:
    """Return the names of the FSDP2 units inside of a module."""
    return [name for name, module in unit.named_modules() if module is not unit and is_fsdp_module(module)]


def fsdp_state_of(unit: nn.Module) -> Any:
    """Return the state that FSDP2 keeps for a unit. Functions that run in each step call the method themselves."""
    return unit._get_fsdp_state()  # type: ignore[operator]


def roots_in_forward() -> list[nn.Module]:
    """Return the root units whose forward is in progress (``FSDPStateContext.iter_forward_root``)."""
    states = {id(unit): fsdp_state_of(unit) for unit in _module_state_mapping if is_fsdp_module(unit)}
    roots = {id(state._state_ctx.iter_forward_root): state for state in states.values()}
    return [root for state in states.values() if id(state) in roots for root in state._modules]


def units_around(module: nn.Module) -> list[nn.Module]:
    """Return the FSDP2 units that contain a module, or are it."""
    units = [unit for unit in _module_state_mapping if is_fsdp_module(unit)]
    return [unit for unit in units if any(inner is module for inner in unit.modules())]


def is_kept_root(unit: nn.Module) -> bool:
    """Return whether FSDP2 keeps a unit unsharded because it is the root (``_auto_reshard_after_forward``)."""
    state = fsdp_state_of(unit)
    return bool(state._is_root and state._auto_reshard_after_forward)


def is_root_in_forward(unit: nn.Module) -> bool:
    """Return whether a forward of a unit's root is in progress (``FSDPStateContext.iter_forward_root``)."""
    return fsdp_state_of(unit)._state_ctx.iter_forward_root is not None


def call_before(owner: Any, method: str, call: Callable[[], None]) -> None:
    """Call a function before a method of one object: of a unit, or of a parameter group. Local operation."""
    stock = getattr(owner, method)

    @functools.wraps(stock)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        call()
        return stock(*args, **kwargs)

    object.__setattr__(
        owner, method, wrapped
    )  # no parameter, which a module's own __setattr__ would look for


def before_unshard(unit: nn.Module, call: Callable[[Any], None]) -> None:
    """Call a function with each parameter group of a unit before it is unsharded (``FSDPParamGroup.unshard``)."""
    for group in fsdp_parameter_groups(unit):
        call_before(group, "unshard", functools.partial(call, group))


def after_methods(unit: nn.Module, call: Callable[..., None]) -> None:
    """Call a function as a forward hook after methods of ``register_fsdp_forward_method`` (``_post_forward``)."""
    state = fsdp_state_of(unit)
    stock = state._post_forward  # FSDP2's own hook of forward is another reference to it

    def post_forward(module: nn.Module, args: Any, output: Any) -> Any:
        output = stock(module, args, output)
        call(module, args, output)
        return output

    state._post_forward = post_forward


def shards_of(group: Any) -> list[torch.nn.Parameter]:
    """Return the sharded parameters of a group, even if it is unsharded (``FSDPParam.sharded_param``)."""
    return [managed.sharded_param for managed in group.fsdp_params]


def is_in_backward(group: Any) -> bool:
    """Return whether a group is unsharded for its backward (``FSDPParamGroup._training_state``)."""
    return group._training_state.name == "PRE_BACKWARD"


def name_of_group(group: Any) -> str:
    """Return the name of a group's unit (``FSDPParamGroup._module_fqn``, empty for the root)."""
    return group._module_fqn or "the root unit"


def named_shards(unit: torch.nn.Module) -> list[tuple[str, torch.nn.Parameter]]:
    """Return the sharded parameters of a unit, with the names that they have since a forward (``_param_fqn``)."""
    return [(one._param_fqn or "a parameter", one.sharded_param) for one in managed_fsdp_params(unit)]


def free_group(group: Any) -> None:
    """Reshard a group, also in the forward of a unit with ``reshard_after_forward=False`` (``_to_sharded``)."""
    group._to_sharded()


def reshards_to_fewer_ranks(group: Any) -> bool:
    """Return whether FSDP2 shards a group over fewer ranks after a forward (``FSDPParamGroup``)."""
    return group is not None and group._use_post_forward_mesh


def fsdp_parameter_groups(module: nn.Module) -> list[Any]:
    """Return FSDP2's parameter groups of a unit (``_fsdp_param_groups``; one ``_fsdp_param_group`` in 2.11)."""
    state: Any = module._get_fsdp_state()  # type: ignore[operator]
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:
        return [] if state._fsdp_param_group is None else [state._fsdp_param_group]
    return list(groups)


def all_gather_ranks(unit: nn.Module) -> torch.distributed.ProcessGroup | None:
    """Return the process group of a unit's all-gathers; ``None`` for a single rank or a unit without weights."""
    for group in fsdp_parameter_groups(unit):
        if group.mesh_info.shard_mesh_size > 1:
            return group.mesh_info.shard_process_group
    return None


def managed_fsdp_params(unit: nn.Module) -> list[Any]:
    """Return FSDP2's records (``FSDPParam``) of the parameters that an FSDP module all-gathers."""
    return [managed for group in fsdp_parameter_groups(unit) for managed in group.fsdp_params]


def reductions_of(comm: Any) -> list[Any]:
    """Return the reductions whose inputs FSDP2 keeps until they end (``FSDPCommContext``)."""
    # One object on torch 2.11, a list on later versions.
    states = getattr(comm, "reduce_scatter_states", None)
    in_flight = states if states is not None else [getattr(comm, "reduce_scatter_state", None)]
    return [state for state in in_flight if state is not None and state.event is not None]


def owners_of(managed: Any) -> list[tuple[nn.Module, str]]:
    """Return the modules at which a record's parameter is registered, with its name (``FSDPParam._module_info``)."""
    info = managed._module_info
    shared = zip(info.shared_modules, info.shared_param_names, strict=True)
    return [(info.module, info.param_name), *shared]


def divide_factor(module: nn.Module) -> tuple[bool, float | None]:
    """Return whether FSDP2 manages a module's parameters, and the divide factor. With one, sum first, then divide."""
    for group, managed in iter_fsdp_params():
        if any(owner is module for owner, _ in owners_of(managed)):
            if group.gradient_divide_factor is not None and group.mesh_info.shard_mesh_size > 1:
                group.force_sum_reduction_for_comms = True
            return True, group.gradient_divide_factor
    return False, None


def find_fsdp_param(module: nn.Module, name: str) -> Any | None:
    """Return FSDP2's record of a parameter; ``None`` if FSDP2 does not manage it."""
    for _, managed in iter_fsdp_params():
        if any(owner is module and attr == name for owner, attr in owners_of(managed)):
            return managed
    return None


def record_of(module: nn.Module, local: torch.Tensor) -> Any | None:
    """Return FSDP2's record of a module's parameter by its local tensor; ``None`` without FSDP2."""
    names = (name for name, p in module._parameters.items() if p is not None and local_of(p) is local)
    return next((find_fsdp_param(module, name) for name in names), None)


def replace_property(managed: Any, name: str, get: Callable[[Any], Any]) -> None:
    """Replace a property of one record (``FSDPParam``). Local operation."""
    # An attribute of an object cannot override a property, so the object gets a subclass.
    managed.__class__ = _with_property(type(managed), name, get)


@functools.cache
def _with_property(kind: type, name: str, get: Callable[[Any], Any]) -> type:
    return type(kind.__name__, (kind,), {name: property(get)})


def retie_parameters(module: nn.Module, before: dict[str, nn.Parameter | None]) -> None:
    """Register the parameters that replaced ``before`` (by name) also at the modules that share them. Local."""
    for name, old in before.items():
        new = module._parameters.get(name)
        if old is not None and new is not old and (managed := find_fsdp_param(module, name)) is not None:
            for owner, attr in owners_of(managed):
                if owner._parameters.get(attr) is old:
                    owner._parameters[attr] = new


def iter_fsdp_params() -> Iterator[tuple[Any, Any]]:
    """Yield parameter group and record of each parameter that FSDP2 manages in this process."""
    for unit in list(_module_state_mapping):
        for group in fsdp_parameter_groups(unit) if is_fsdp_module(unit) else ():
            for managed in group.fsdp_params:
                yield group, managed


def reduction_of(unit: nn.Module) -> tuple[int, int, bool]:
    """Return the numbers of shards and replicas of a unit's gradients, and whether backward all-reduces the latter."""
    (group, *_) = fsdp_parameter_groups(unit)
    info = group.mesh_info
    return info.shard_mesh_size, getattr(info, "replicate_mesh_size", 1), group.all_reduce_grads


_flags_of_group = operator.attrgetter(
    "reduce_grads",
    "all_reduce_grads",
    "reshard_after_backward",
    "unshard_in_backward",
    "gradient_divide_factor",
    "force_sum_reduction_for_comms",
)


def flags_of_backward(units: Iterable[nn.Module]) -> tuple[Any, ...]:
    """Return the settings of units' backwards, which loops may change in each microbatch."""
    flags = []
    for unit in units:
        state: Any = unit._get_fsdp_state()  # type: ignore[operator]
        flags.append(state._state_ctx.is_last_backward)
        flags += map(_flags_of_group, getattr(state, "_fsdp_param_groups", ()) or fsdp_parameter_groups(unit))
    return tuple(flags)


def reduces_gradients(unit: nn.Module, *, replicas: bool = False) -> bool:
    """Return whether backwards of a unit reduce gradients; with ``replicas`` also over replicas."""
    groups = fsdp_parameter_groups(unit)
    return all(group.reduce_grads and (group.all_reduce_grads or not replicas) for group in groups)
