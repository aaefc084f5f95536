"""What ``fully_shard`` is asked for: which modules become units, with which strategy, in whose words."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DataParallel, DistributedDataParallel

from te_fsdp import _te, _torch
from te_fsdp.errors import OrderError, PlacementError, meant, shorten
from te_fsdp.layout import OUTER_STRATEGIES, STRATEGIES
from te_fsdp.sharding.state import state_of

if TYPE_CHECKING:
    from torch import nn

#: How users name units: classes, or names in the tree.
Wanted = Iterable[type | str] | type | str
#: What a model gets that names no strategy.
DEFAULT = "optim_grads_params"
#: How weights are gathered: :mod:`te_fsdp.sharding.comm_units`.
TRANSPORTS = ("auto", "nccl", "copy_engine")

_HYBRID = "'{}' on Meshes.build(dp_replicate=...), whose outer axis copies the model"
_HFSDP = "'optim_grads_params' and outer_strategy='optim' on Meshes.build(dp_replicate=...)"
#: Words of DeepSpeed, FSDP1 and others, as :func:`te_fsdp.errors.meant` compares them, and what to write here.
_ELSEWHERE = {
    **dict.fromkeys(
        ("0", "zero0", "stage0", "zerostage0", "ddp", "no", "none", "false", "replicate"), "no_shard"
    ),
    **dict.fromkeys(("1", "zero1", "stage1", "zerostage1", "optimizer", "zero", "os"), "optim"),
    **dict.fromkeys(("2", "zero2", "stage2", "zerostage2", "shardgradop", "osg", "gradop"), "optim_grads"),
    **dict.fromkeys(("3", "zero3", "stage3", "zerostage3", "fullshard", "fullyshard"), "optim_grads_params"),
    **dict.fromkeys(("full", "fsdp", "fsdp2", "params", "true", "osgp"), "optim_grads_params"),
    **dict.fromkeys(("hybridshard", "hsdp", "hybrid"), _HYBRID.format("optim_grads_params")),
    "hybridshardzero2": _HYBRID.format("optim_grads"),
    "hfsdp": _HFSDP,
}
_OUTER_ELSEWHERE = {
    **dict.fromkeys(
        ("0", "zero0", "ddp", "no", "none", "false", "replicate", "hsdp", "hybridshard"), "no_shard"
    ),
    **dict.fromkeys(
        ("1", "2", "3", "zero1", "zero2", "zero3", "hfsdp", "full", "fullshard", "true"), "optim"
    ),
    **dict.fromkeys(("optimgrads", "optimgradsparams", "shardgradop", "optimizer", "zero"), "optim"),
}
_TRANSPORT_ELSEWHERE = {
    "gloo": "nccl",
    "default": "auto",
    "none": "auto",
    **dict.fromkeys(("ce", "p2p", "symmmem", "symmetricmemory"), "copy_engine"),
}
#: Option of ``fully_shard`` -> its words, and those of others.
_WORDS = {
    "strategy": (STRATEGIES, _ELSEWHERE),
    "outer_strategy": (OUTER_STRATEGIES, _OUTER_ELSEWHERE),
    "transport": (TRANSPORTS, _TRANSPORT_ELSEWHERE),
}


def check_order(model: nn.Module) -> None:
    """Neither FSDP2 nor ``fully_shard`` must have been applied to any part before, nor to a model that holds this."""
    for name, module in model.named_modules():
        if isinstance(module, (DataParallel, DistributedDataParallel, FullyShardedDataParallel)):
            raise OrderError(
                f"{name or 'model'}: fully_shard of a {type(module).__name__}",
                expected="the model that it was made of",
                got="a wrapper that reduces gradients, or cuts parameters, itself",
                fix="te_fsdp.fully_shard in its place; strategy='no_shard' keeps whole weights on each rank",
            )
        if _torch.is_fsdp_module(module):
            raise OrderError(
                f"{name or type(model).__name__}: fully_shard on a module that is sharded already",
                expected="a model without FSDP2",
                got=type(module).__name__,
                why="The tensor-parallel placements must be set before FSDP2 cuts the parameters",
                fix="call te_fsdp.fully_shard once, and not torch's fully_shard before it",
            )
    for name, parameter in model.named_parameters():
        if isinstance(parameter, DTensor) and parameter.device_mesh.ndim > 1:
            raise OrderError(
                f"{name}: fully_shard on a parameter that is sharded already",
                expected="a plain parameter or a DTensor on the tp mesh",
                got=f"placements {tuple(parameter.placements)}",
                fix="build the model anew",
            )
        # What FSDP2 does not tell: strategies without it, and a module within a sharded one.
        state = state_of(parameter)
        if state is not None:
            raise OrderError(
                f"{name}: fully_shard on a parameter that is sharded already",
                expected="a model that fully_shard was not called on",
                got=f"a parameter of a sharded {type(state.model).__name__}",
                why="Its gradients would be averaged twice",
                fix="call te_fsdp.fully_shard once, on all of the model; units= and strategy= tell its parts apart",
            )


def refuse_hooks(named: Iterable[tuple[str, torch.Tensor]], *, sharded: bool = True) -> None:
    """Raise for gradient hooks that never run, or would be lost. Local operation.

    Args:
        named: Parameters that FSDP2 manages, or is to manage, by name.
        sharded: Whether it does so by now: then hooks that run after a gradient was added are right.

    Raises:
        OrderError: Names the first.
    """
    hooked = [
        name
        for name, p in named
        if _torch.has_gradient_hooks(p) or (not sharded and getattr(p, "_post_accumulate_grad_hooks", None))
    ]
    if hooked:
        raise OrderError(
            f"{hooked[0]}: a gradient hook on a parameter that {'is' if sharded else 'is about to be'} sharded",
            expected="register_post_accumulate_grad_hook, after te_fsdp.fully_shard and te_fsdp.materialize",
            got=f"{len(hooked)} parameter(s) with hooks"
            + (" by register_hook" if sharded else " from before fully_shard"),
            why="FSDP2 puts a new parameter in each one's place, and autograd gives gradients to the gathered ones: "
            "the hook would never run",
            fix="parameter.register_post_accumulate_grad_hook(hook), which sees the reduced gradient in parameter.grad",
        )


def check_accepted(model: nn.Module, units: Iterable[str]) -> None:
    """What FSDP2 would refuse half way, when some units are cut already."""
    for name in units:
        module = model.get_submodule(name)
        if _is_container(module):
            raise PlacementError(
                f"{name or 'model'}: fully_shard of a {type(module).__name__}",
                expected="a module with a forward",
                got="a container without",
                why="FSDP2 gathers weights in the hooks of forward, which a container never runs",
                fix=f'units="{name}.*" for each of its children'
                if name
                else "shard the module that calls it",
            )
    for name, parameter in model.named_parameters():
        if parameter.ndim == 0:
            raise PlacementError(
                f"{name}: fully_shard of a scalar parameter",
                expected="at least one dim to cut",
                got="shape ()",
                fix="make it a tensor of shape (1,)",
            )


def find_units(
    model: nn.Module, units: Wanted | None, strategy: str | Mapping[type | str, str]
) -> dict[str, str]:
    """The modules that become units, and the strategy of each.

    Args:
        model: The root.
        units: Classes or names; ``None``: every ``te.TransformerLayer``.
        strategy: One for all units, or one for each class or name. A key holds for the module that it names and for
            all in it, as far as no key of a module further in says otherwise; that module becomes a unit. ``""``
            is the root. What no key reaches gets :data:`DEFAULT`.

    Returns:
        Name -> strategy of the root and of these, outer before inner, each module once.

    Raises:
        PlacementError: A class or name without a module; two classes that want different strategies for a module.
    """
    names = dict(model.named_modules())
    if units is None:
        layer = _te.module_class("TransformerLayer") if _te.is_loaded() else ()
        chosen = {name for name, module in names.items() if isinstance(module, layer)}
    else:
        wanted = units if isinstance(units, Iterable) and not isinstance(units, str) else [units]
        chosen = {name for want in wanted for name in _find(names, want)}
    given: dict[str, str] = {}
    if isinstance(strategy, Mapping):
        given = _strategies_by_name(names, strategy)
        chosen |= given.keys()
    else:
        given[""] = check_word("strategy", strategy)
    inner = [name for name in names if name in chosen and name]
    return {name: nearest_strategy(name, given) for name in ["", *inner]}


def _find(names: dict[str, nn.Module], want: type | str) -> list[str]:
    """Names of the modules that a class, a name or a name with ``.*`` stands for."""
    if isinstance(want, type):
        found = [n for n, m in names.items() if isinstance(m, want)]
    elif not isinstance(want, str):
        raise PlacementError(
            f"fully_shard: a {type(want).__name__} as a unit or as a key of strategy",
            expected="a class, or a name in the tree",
            fix="name modules as model.named_modules() does",
        )
    elif want.endswith(".*"):
        prefix = want[:-1]
        found = [n for n in names if n.startswith(prefix) and "." not in n[len(prefix) :]]
    else:
        found = [want] if want in names else []
    if not found:
        near = None if isinstance(want, type) or want.endswith(".*") else meant(want, names)
        kinds = {type(module).__name__ for module in names.values()}
        raise PlacementError(
            f"fully_shard: unit {want if isinstance(want, str) else want.__name__!r} matches no module",
            expected=f"a class or a name out of {shorten([n for n in names if n], 8)}",
            fix=f"the class {want} itself, not its name"
            if want in kinds
            else f"{near!r}, if that is meant"
            if near
            else "name modules as model.named_modules() does",
        )
    return found


def _strategies_by_name(names: dict[str, nn.Module], strategy: Mapping[Any, Any]) -> dict[str, str]:
    """A mapping of classes and names, as one of names: a name beats a class."""
    found: dict[str, str] = {}
    for want in sorted(strategy, key=lambda want: isinstance(want, str)):
        word = check_word("strategy", strategy[want])
        for name in _find(names, want):
            if isinstance(want, type) and found.get(name, word) != word:
                raise PlacementError(
                    f"{name or 'model'}: two strategies",
                    expected="one class of the mapping that it is an instance of, or equal strategies",
                    got=f"{found[name]} and {word}",
                    fix="name the module",
                )
            for own in _with_forward(names, name):
                found[own] = word
    return found


def _with_forward(names: dict[str, nn.Module], name: str) -> list[str]:
    """The module itself, or the children of a container: a container cannot be gathered."""
    if not name or not _is_container(names[name]):
        return [name]
    return [
        own for child, _ in names[name].named_children() for own in _with_forward(names, f"{name}.{child}")
    ]


def _is_container(module: nn.Module) -> bool:
    listing = isinstance(module, (torch.nn.ModuleList, torch.nn.ModuleDict))
    return listing and type(module).forward is torch.nn.Module.forward


def nearest_strategy(name: str, given: Mapping[str, str]) -> str:
    """The strategy of the innermost module around ``name`` that has one."""
    while name not in given and name:
        name = name.rpartition(".")[0]
    return given.get(name, DEFAULT)


def unit_by_module(model: nn.Module, units: Collection[str]) -> dict[str, str]:
    """The innermost unit around each module, by name; a module of several names has them all. Local operation.

    Args:
        model: The root.
        units: Names of the units; the root is one in any case.
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    named = {id(modules[name]): name for name in units}
    inside: dict[str, str] = {}
    for name, module in modules.items():  # parents come before their children
        inside[name] = named.get(id(module), inside[name.rpartition(".")[0]] if name else "")
    return inside


def check_word(option: str, given: Any) -> str:
    """What an option of ``fully_shard`` was given, if it is one of the option's words.

    Args:
        option: ``"strategy"``, ``"outer_strategy"`` or ``"transport"``.
        given: By the user.

    Raises:
        PlacementError: It is none; suggests the word that it probably stands for.
    """
    words, elsewhere = _WORDS[option]
    if isinstance(given, str) and given in words:
        return given
    near = meant(given, words, elsewhere)
    fix = f"{option}={near if near is None or near.startswith(chr(39)) else repr(near)}"
    raise PlacementError(
        f"fully_shard: {option}",
        expected=f"one of {words}",
        got=repr(given),
        fix=fix if near is not None else f"one of these; {option} may be left out",
    )
