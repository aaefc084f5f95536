"""``fsdp_no_shard``: parameters that stay whole on every data-parallel rank, inside a sharded model.

    sharded       cut over data parallel, gathered for each use, gradients reduce-scattered, by FSDP2
    exempt        whole, never gathered, unknown to FSDP2, gradients reduced by ``no_shard_reduce``

The mark is kept by the owner: parameters are replaced all the time (meta init, ``to_empty``, ``deepcopy``,
``load_state_dict(assign=True)``, TE's ``reset_parameters``) and lose what hangs on them. Strategy ``no_shard`` is the
same thing for all parameters of a unit.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import nn

from te_fsdp import _torch
from te_fsdp.agree import rank
from te_fsdp.binding import NO_SHARD, binding_of, is_exempt
from te_fsdp.errors import OrderError, PlacementError, message
from te_fsdp.modules.replaced import registered_at
from te_fsdp.modules.single import single_names
from te_fsdp.parameters import noted, places_of
from te_fsdp.sharding.ties import unit_by_module

if TYPE_CHECKING:
    from te_fsdp.quantized.shards import Key
    from te_fsdp.sharding.strategies import Strategy

__all__ = ["Exempt", "NoShard", "fsdp_no_shard", "plan_no_shard"]

_log = logging.getLogger("te_fsdp")


def fsdp_no_shard(what: nn.Module | nn.Parameter | Iterable[nn.Module | nn.Parameter]) -> None:
    """Keep parameters whole on every data-parallel rank when the model is sharded.

    They are never gathered, and FSDP2 does not see them: no hooks on modules that are exempt as a whole, and no unit
    of them. What tensor parallelism cuts stays cut. Gradients of those that are trained are summed up over data
    parallel at the end of each backward, in one all-reduce per dtype; the ranks must hold equal values, which
    :func:`te_fsdp.fully_shard` checks. Frozen ones cost no communication at all.

    Call it before :func:`te_fsdp.fully_shard`, on all ranks alike. Local operation. The mark stays on the modules that
    own the parameters, through deep copies, initialisation from meta and loading; that of a parameter which no module
    owns yet stays on the parameter.

    Args:
        what: A module (all parameters in it and in its children), a parameter, or several of these.

    Raises:
        TypeError: Something else.
        OrderError: The module or parameter is sharded already.
    """
    several = [what] if isinstance(what, (nn.Module, nn.Parameter)) else what
    if not isinstance(several, Iterable) or isinstance(several, (str, torch.Tensor)):
        raise TypeError(
            message("fsdp_no_shard", expected="a module, a parameter or several", got=type(what).__name__)
        )
    items = list(several)
    for item in items:
        if not isinstance(item, (nn.Module, nn.Parameter)):
            raise TypeError(
                message("fsdp_no_shard", expected="modules and parameters", got=type(item).__name__)
            )
    modules = [item for item in items if isinstance(item, nn.Module)]
    parameters = [item for item in items if not isinstance(item, nn.Module)]
    owned = list(registered_at({id(parameter) for parameter in parameters})) if parameters else []
    for module in [*(sub for top in modules for sub in top.modules()), *(owner for owner, _ in owned)]:
        _check_unsharded(module)
    for module in modules:
        for sub in module.modules():
            sub.__dict__[NO_SHARD] = True
    for parameter in parameters:
        noted(parameter).no_shard = True
    for module, name in owned:
        _add_mark(module, name)


def _add_mark(module: nn.Module, name: str) -> None:
    known = module.__dict__.get(NO_SHARD, frozenset())
    if known is not True:
        module.__dict__[NO_SHARD] = known | {name}


def _check_unsharded(module: nn.Module) -> None:
    binding = binding_of(module)
    if _torch.is_fsdp_module(module) or (binding is not None and binding.under_fsdp):
        label = (binding.name if binding is not None else "") or type(module).__name__
        raise OrderError(
            f"{label}: fsdp_no_shard on a module that is sharded already",
            why="Its parameters are cut, or their gradients are reduced by FSDP2",
            fix="call te_fsdp.fsdp_no_shard before te_fsdp.fully_shard",
        )


@dataclass(frozen=True)
class Exempt:
    """An exempt parameter by its owner.

    Attributes:
        label: Name in the model.
        module: Owner; for tied parameters the first one.
        name: Name in the owner.
        unit: Its unit if that has strategy ``no_shard``; ``None`` if it is exempt from a unit that is sharded.
    """

    label: str
    module: nn.Module
    name: str
    unit: str | None

    @property
    def cut_state(self) -> bool:
        """Whether its optimizer state shall be cut nevertheless: that of its unit is."""
        return self.unit is None

    @property
    def parameter(self) -> nn.Parameter:
        """The parameter that is there now."""
        return self.module._parameters[self.name]  # type: ignore[return-value]

    def bound(self) -> Exempt:
        """The same by the names it has when its module is bound: experts then count globally."""
        binding, name = binding_of(self.module), self.name
        if binding is None:
            return self
        single = name.rstrip("0123456789")
        if single in single_names(self.module):
            name = single  # made of the parameters of all experts
        elif binding.experts is not None:
            name = binding.experts.registered_name(name)
        return replace(self, label=self.label.removesuffix(self.name) + name, name=name)


@dataclass(frozen=True)
class NoShard:
    """What of a model stays whole.

    Attributes:
        model: The root.
        parameters: Each exempt parameter once, in the order of their names: the same on all ranks.
        keys: Each of them at every place where it is registered.
        whole: Ids of modules that have parameters, all of them exempt, in them and below them.
        units: Names of the units with strategy ``no_shard``, as backward leaves them if forward runs through the tree.
    """

    model: nn.Module
    parameters: tuple[Exempt, ...]
    keys: frozenset[Key]
    whole: frozenset[int]
    units: tuple[str, ...]

    def has(self, module: nn.Module, name: str) -> bool:
        """Whether a module's own parameter stays whole, by the name that it has now or when its module is bound."""
        return (id(module), name) in self.keys

    def ignored(self) -> set[nn.Parameter]:
        """The exempt parameters there are now, for FSDP2's ``ignored_params``."""
        return {exempt.parameter for exempt in self.bound()}

    def bound(self) -> list[Exempt]:
        """The exempt parameters by the names that they have when the model is bound, each once."""
        found = {(id(exempt.module), exempt.name): exempt for exempt in (e.bound() for e in self.parameters)}
        return list(found.values())

    def without_units(self, units: dict[str, Strategy]) -> dict[str, Strategy]:
        """The units that are left: no unit is made of a module that is exempt as a whole."""
        return {
            name: row
            for name, row in units.items()
            if not (name and row.shards and id(self.model.get_submodule(name)) in self.whole)
        }

    def commit(self, device: torch.device) -> None:
        """Mark them where they are not yet (strategy ``no_shard``), move them, and say so on rank 0.

        Local operation. Moves from the CPU what FSDP2 moves for others: parameters, and buffers if all is exempt.
        """
        for module in self.model.modules():
            own = [(id(module), name) in self.keys for name, p in module._parameters.items() if p is not None]
            for name, parameter in module._parameters.items():
                if parameter is not None and (id(module), name) in self.keys:
                    _add_mark(
                        module, "*" if all(own) else name
                    )  # names of experts change when they are bound
                    noted(parameter).no_shard = True
                    if parameter.device.type == "cpu" != device.type:
                        parameter.data = parameter.data.to(device)
            for name, buffer in module._buffers.items() if id(self.model) in self.whole else ():
                if buffer is not None and buffer.device.type == "cpu":
                    module._buffers[name] = buffer.to(device)
        if self.parameters and rank() == 0:
            _log.info("%s", self)

    def __str__(self) -> str:
        parameters = [exempt.parameter for exempt in self.parameters]
        trained = sum(parameter.requires_grad for parameter in parameters)
        elements = sum(parameter.numel() for parameter in parameters)
        names = ", ".join(exempt.label for exempt in self.parameters[:3])
        more = f" and {len(parameters) - 3} more" if len(parameters) > 3 else ""
        return (
            f"no_shard: {len(parameters)} parameters of {elements:,} elements stay whole on every data-parallel "
            f"rank, {trained} of them trained: {names}{more}"
        )


def plan_no_shard(model: nn.Module, units: Mapping[str, Strategy]) -> NoShard:
    """Find what stays whole: what is marked, and what the innermost unit around it does not shard.

    Local operation; changes nothing. Gives the same on all ranks that hold the same model.

    Args:
        model: The root.
        units: Name -> strategy of each unit, ``""`` for the root.

    Raises:
        PlacementError: A parameter registered at several places, some of them exempt and some not.
    """
    names = dict(model.named_modules(remove_duplicate=False))
    marked = {id(sub) for m in names.values() if m.__dict__.get(NO_SHARD) is True for sub in m.modules()}
    inside = unit_by_module(model, units)
    places: dict[int, list[tuple[str, nn.Module, str, bool]]] = {}
    for place in places_of(model, remove_duplicate=False):
        replicated = id(place.owner) in marked or not units[inside[place.path]].shards
        exempt = replicated or is_exempt(place.owner, place.name)
        places.setdefault(id(place.parameter), []).append((place.label, place.owner, place.name, exempt))
    for several in places.values():
        _check_agreed(several)
    found = [several for several in places.values() if several[0][3]]
    keys = frozenset(
        (id(place[1]), name) for several in found for place in several for name in _names(*place[1:3])
    )
    whole = frozenset(id(module) for module in names.values() if _is_whole(module, keys))
    first = sorted((several[0][:3] for several in found), key=lambda place: place[0])
    kept = tuple(name for name in reversed(list(units)) if not units[name].shards)
    parameters = []
    for label, module, name in first:
        unit = inside[label.rpartition(".")[0]]
        parameters.append(Exempt(label, module, name, unit if unit in kept else None))
    return NoShard(model, tuple(parameters), keys, whole, kept)


def _names(module: nn.Module, name: str) -> tuple[str, ...]:
    """A parameter's own name, and that of the parameter of all experts that binding makes of it."""
    single = name.rstrip("0123456789")
    return (name, single) if single in single_names(module) else (name,)


def _is_whole(module: nn.Module, keys: frozenset[Key]) -> bool:
    own = [(id(place.owner), place.name) in keys for place in places_of(module)]
    return bool(own) and all(own)


def _check_agreed(places: list[tuple[str, nn.Module, str, bool]]) -> None:
    """A tied parameter is exempt everywhere or nowhere."""
    exempt = [label for label, _, _, flag in places if flag]
    others = [label for label, _, _, flag in places if not flag]
    if exempt and others:
        raise PlacementError(
            f"{exempt[0]} is exempt from sharding, but tied to {', '.join(others)}",
            expected="all owners of a tied parameter exempt, or none",
            why="One tensor cannot be whole for one owner and cut for another",
            fix="pass the parameter itself, or all of its owners, to te_fsdp.fsdp_no_shard",
        )
