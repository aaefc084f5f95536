"""A model's own initialization (``init_weights`` or similar), run on unsharded tensors."""

from __future__ import annotations

import functools
import inspect
import re
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode

from te_fsdp.errors import InitError, shorten
from te_fsdp.initialize import (
    check_random_state,
    has_sentinel,
    original_value,
    sentinel,
    store_shard,
    take_shard,
    target_device,
)
from te_fsdp.inline_init import STOCK, count_rewrites
from te_fsdp.records import BINDING, PARAMETER, binding_of, param_attrs_to_copy
from te_fsdp.shard_info import shard_info
from te_fsdp.tensor_checksums import checksum
from te_fsdp.upstream import te as _te, torch_dtensor as _torch

#: Names of methods that initialize a model, in the order in which one of them is chosen.
METHODS = ("init_weights", "initialize_weights", "_init_weights")
#: Names of methods that initialize a module with its children, if its constructor calls one of them.
_RESETS = ("reset_parameters", "_reset_parameters")
#: Hugging Face's mark on modules and parameters that have their values.
_DONE = "_is_hf_initialized"


@dataclass(frozen=True)
class Initializer:
    """Initialization that a module defines for itself and its submodules."""

    name: str  #: Name of the module in the model
    module: nn.Module
    call: Callable[[], object]
    is_reset: bool = False  #: Whether it is ``reset_parameters`` of a module with children

    def contains(self, name: str) -> bool:
        """Return whether the named module is this one or one of its submodules."""
        return not self.name or f"{name}.".startswith(f"{self.name}.")

    def run(self, modules: list[nn.Module]) -> None:
        """Run it on unsharded tensors; every rank keeps its parts. Parameters of other ``modules`` keep their values.

        Collective over the mesh of the parameters: an all-reduce of each sharded parameter, and a check of the random
        state.
        """
        for parameter in self.module.parameters():
            if isinstance(parameter, DTensor):
                label = f"{self.name or type(self.module).__name__}: its own initialization"
                check_random_state(parameter, parameter.device_mesh, label)
                break
        pending = {id(t) for m in modules for t in (*m._parameters.values(), *m._buffers.values())}
        mode = _Unsharded(self.name, self.module, pending)
        # A bound module would initialize its shards. Here the mode passes unsharded tensors.
        with mode.unbound(), torch.no_grad():
            with _keeping_sources_of_ties(self.module), mode:
                self.call()
            mode.finish()


def find_initializers(model: nn.Module) -> list[Initializer]:
    """Return the initializations of modules that have tensors on meta, inner ones first, in the order of modules.

    Those are of the outermost modules with one, and of modules in these whose constructors run it. Marks that say that
    a module on meta is initialized are removed. Local operation. Raises InitError if one needs arguments.
    """
    initializers: list[Initializer] = []
    for name, module in model.named_modules():
        if not any(t.is_meta for t in (*module.parameters(), *module.buffers())):
            continue
        # A constructor may call reset_parameters after it has built children, and so initialize their parameters, as
        # ``nn.MultiheadAttention`` and ``nn.Transformer`` do.
        direct = sum(1 for _ in module.parameters(recurse=False))
        if _te.kind_of(module) is None and direct != sum(1 for _ in module.parameters()):
            method = next((method for method in _RESETS if callable(getattr(type(module), method, None))), "")
            if method and _runs_in_constructor(type(module), (method,)):
                initializers.append(Initializer(name, module, getattr(module, method), is_reset=True))
        is_inner = any(outer.contains(name) for outer in initializers if not outer.is_reset)
        # The outer initialization covers this module, unless its own constructor ran one.
        if is_inner and not _runs_in_constructor(type(module), (*METHODS, "post_init")):
            continue
        call = _initializer(name, module)
        if call is not None:
            initializers.append(Initializer(name, module, call))
    order = {name: index for index, (name, _) in enumerate(model.named_modules())}
    last = {item.name: max(order[name] for name in order if item.contains(name)) for item in initializers}
    # Hugging Face's marks on modules and tensors on meta are wrong: their constructors ran without effect.
    for module in (inner for item in initializers for inner in item.module.modules()):
        if any(t.is_meta for t in (*module.parameters(), *module.buffers())):
            module.__dict__.pop(_DONE, None)
        for tensor in (*module._parameters.values(), *module._buffers.values()):
            if tensor is not None and tensor.is_meta:
                tensor.__dict__.pop(_DONE, None)
    # In the order in which constructors end: inner modules first, as one process draws.
    return sorted(initializers, key=lambda item: (last[item.name], -order[item.name]))


def _runs_in_constructor(cls: type, methods: Iterable[str]) -> bool:
    """Return whether a constructor of the class names one of these methods."""
    codes = [
        vars(base)["__init__"].__code__
        for base in cls.__mro__
        if hasattr(vars(base).get("__init__"), "__code__")
    ]
    return any(method in code.co_names for code in codes for method in methods)


def _initializer(name: str, module: nn.Module) -> Callable[[], object] | None:
    """Return the module's own initialization as a function without arguments, ``None`` if it has none."""
    refused = []
    for method_name in METHODS:
        owner = next((cls for cls in type(module).__mro__ if method_name in vars(cls)), None)
        if owner is None or str(owner.__module__).partition(".")[0] in STOCK:
            continue
        method = getattr(module, method_name)
        required = [
            p.name
            for p in inspect.signature(method).parameters.values()
            if p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
        ]
        if not required:
            return method
        if len(required) == 1 and (
            method_name == "_init_weights" or required[0] in ("module", "m", "mod", "layer")
        ):
            return lambda: module.apply(getattr(module, method_name))
        refused.append(f"{method_name}({', '.join(required)})")
    if refused:
        raise InitError(
            f"materialize: {name or type(module).__name__}: an initialization of its own that cannot be called",
            expected=f"{' or '.join(METHODS)} without required arguments, or _init_weights(module)",
            got=f"{type(module).__name__}.{refused[0]}",
            why="The model would start from values other than those of its own initialization",
            fix="give its arguments defaults, or define init_weights(self) on the model, which calls it",
        )
    return None


def dropped_by_ties(model: nn.Module) -> set[tuple[int, str]]:
    """Return (id of a module, name) of parameters that Hugging Face's ``_tied_weights_keys`` replaces. Local."""
    # The module draws values for such a parameter before the model ties it to the parameter of another module.
    dropped = set()
    for module in model.modules():
        keys = getattr(module, "_tied_weights_keys", None)  # names or patterns; a dict maps them to sources
        patterns = [re.compile(rf"(?:{key})\Z") for key in keys or ()]
        owners_of: dict[int, list[tuple[str, nn.Module, str]]] = {}
        for name, owner in module.named_modules() if patterns else ():
            for attr, parameter in owner._parameters.items():
                if parameter is not None:
                    full = f"{name}.{attr}".removeprefix(".")
                    owners_of.setdefault(id(parameter), []).append((full, owner, attr))
        for tied in owners_of.values():
            listed = [entry for entry in tied if any(pattern.match(entry[0]) for pattern in patterns)]
            if 0 < len(listed) < len(tied):
                dropped |= {(id(owner), attr) for _, owner, attr in listed}
    return dropped


@contextmanager
def _keeping_sources_of_ties(root: nn.Module) -> Iterator[None]:
    """Make each ``_init_weights(module)`` keep the values of parameters that a tie replaces."""
    dropped = dropped_by_ties(root)
    stock = {module: getattr(module, "_init_weights", None) for module in root.modules() if dropped}

    def keeping(initialize: Any, module: nn.Module) -> None:
        sources = [p for n, p in module._parameters.items() if p is not None and (id(module), n) in dropped]
        # The mode passes unsharded tensors; reset_parameters of a bound module writes to the shards themselves.
        shards = [local for local in map(_torch.local_of, sources) if not local.is_meta]
        values = [(tensor, tensor.detach().clone()) for tensor in (*sources, *shards)]
        initialize(module)
        for tensor, value in values:
            # Values that were never set need not be kept.
            if not has_sentinel(value):
                tensor.copy_(value)

    owners = [module for module, initialize in stock.items() if callable(initialize)]
    before = {owner: owner.__dict__["_init_weights"] for owner in owners if "_init_weights" in owner.__dict__}
    for owner in owners:
        # On the instance: a class may be shared with other models.
        owner.__dict__["_init_weights"] = functools.partial(keeping, stock[owner])
    try:
        yield
    finally:
        for owner in owners:
            del owner.__dict__["_init_weights"]
            owner.__dict__.update({"_init_weights": before[owner]} if owner in before else {})


class _Entry:
    """The unsharded tensor that replaces a parameter or a buffer during the initialization."""

    def __init__(self, module: nn.Module, name: str, registered: torch.Tensor, full: torch.Tensor) -> None:
        self.module, self.name, self.registered, self.full = module, name, registered, full
        self.before, self.version = _fingerprint(full), _torch.version_of(full)
        self.views: list[weakref.ref[torch.Tensor]] = []


# [Note: own initialization] Hugging Face models, and many others, do not leave initialization to ``reset_parameters``
# of each module. One method of the model writes to the parameters of all modules. Here it runs with a mode that passes
# the original (unsharded) tensor to every torch function in place of a parameter. Each rank runs it on the same values
# with the same random state, and keeps its part.
#
# Memory: the tensors of one module at a time. When the method continues with a different module, the parts are stored
# and the tensors are freed, unless a view of one (``parameter.data``) is still referenced.
class _Unsharded(TorchFunctionMode):
    """Passes unsharded tensors to torch functions in place of a model's parameters and buffers on meta."""

    def __init__(self, label: str, root: nn.Module, pending: set[int]) -> None:
        super().__init__()
        self.label, self.root, self.pending = label, root, pending
        #: ``id`` of a tensor -> the tensor and the places where it is registered.
        self.places: dict[int, tuple[torch.Tensor, list[tuple[nn.Module, str]]]] = {}
        self.live: dict[int, _Entry] = {}
        self.bindings: dict[int, Any] = {}
        for module in root.modules():
            for name, tensor in (*module._parameters.items(), *module._buffers.items()):
                if tensor is not None and (isinstance(tensor, torch.nn.Parameter) or tensor.is_meta):
                    self.places.setdefault(id(tensor), (tensor, []))[1].append((module, name))

    @contextmanager
    def unbound(self) -> Iterator[None]:
        """Hide the bindings of modules outside of TE, so that their own ``reset_parameters`` runs."""
        foreign = [m for m in self.root.modules() if BINDING in m.__dict__ and _te.kind_of(m) is None]
        self.bindings = {id(module): module.__dict__.pop(BINDING) for module in foreign}
        try:
            yield
        finally:
            for module in foreign:
                module.__dict__[BINDING] = self.bindings[id(module)]

    @contextmanager
    def _bound(self, module: nn.Module) -> Iterator[None]:
        """Restore the binding of one module that :meth:`unbound` hides."""
        binding = self.bindings.get(id(module))
        if binding is not None:
            module.__dict__[BINDING] = binding
        try:
            yield
        finally:
            if binding is not None:
                del module.__dict__[BINDING]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        flat, spec = _torch.flatten((args, kwargs or {}))
        tracked = [x for x in flat if isinstance(x, torch.Tensor) and id(x) in self.places]
        # At most the tensors of one call are unsharded at a time, so that a large model fits into memory.
        if any(id(x) not in self.live for x in tracked):
            self._release([self.places[id(x)][1][0][0] for x in tracked])
        for tensor in tracked:
            if id(tensor) not in self.live:
                self.live[id(tensor)] = self._unshard(tensor)
        flat = [
            self.live[id(x)].full if isinstance(x, torch.Tensor) and id(x) in self.live else x for x in flat
        ]
        args, kwargs = _torch.unflatten(flat, spec)
        result = func(*args, **kwargs)
        for tensor in _torch.flatten(result)[0]:
            if not isinstance(tensor, torch.Tensor) or tensor.is_meta:
                continue
            for entry in self.live.values():
                # An initialization may write through a view that it made before, so the tensor stays unsharded
                # while a view lives.
                if tensor is not entry.full and _torch.memory_id(tensor) == _torch.memory_id(entry.full):
                    entry.views.append(weakref.ref(tensor))
        return result

    def _unshard(self, tensor: torch.Tensor) -> _Entry:
        module, name = self.places[id(tensor)][1][0]
        binding = binding_of(module)
        if binding is not None and binding.ep.mesh is not None and binding.ep.mesh.size() > 1:
            raise InitError(
                f"materialize: {binding.label(name)}: written by {type(self.root).__name__}'s own initialization",
                expected="experts that are on every rank",
                got="experts distributed over ep",
                why="Afterwards the random states of the ranks would differ",
                fix="leave experts to their init_method, and skip them in the model's own initialization",
            )
        if not isinstance(tensor, torch.nn.Parameter):
            return _Entry(
                module, name, tensor, sentinel(tuple(tensor.shape), tensor.dtype, target_device(tensor))
            )
        with self._bound(module):
            full = torch.nn.Parameter(
                original_value(module, name, tensor), requires_grad=tensor.requires_grad
            )
        full.__dict__.update({k: v for k, v in param_attrs_to_copy(tensor).items() if k != PARAMETER})
        return _Entry(module, name, tensor, full)

    def _release(self, modules: list[nn.Module]) -> None:
        """Store the parts of the tensors of all modules but these."""
        for key, entry in list(self.live.items()):
            is_referenced = any(view() is not None for view in entry.views)
            if not is_referenced and not any(entry.module is module for module in modules):
                self._store(key)

    def _store(self, key: int) -> None:
        entry = self.live.pop(key)
        # Writes through ``.data`` change no version, so the bits are compared too.
        if _torch.version_of(entry.full) != entry.version or _fingerprint(entry.full) != entry.before:
            count_rewrites(entry.registered, None)
        if _fingerprint(entry.full) == entry.before or id(entry.registered) not in self.pending:
            return
        if has_sentinel(entry.full):
            return  # reported by name as never initialized
        module, name, registered = entry.module, entry.name, entry.registered
        if not isinstance(registered, torch.nn.Parameter):
            for owner, attr in self.places[key][1]:
                owner._buffers[attr] = entry.full
            return
        with torch.no_grad(), self._bound(module):
            value = take_shard(entry.full.detach(), shard_info(module, name, registered))
            store_shard(module, name, registered, value, binding_of(module))
        new = module._parameters[name]
        assert new is not None
        if new is not registered:
            _, owners = self.places[key]
            self.places[id(new)] = new, owners
            self.pending.add(id(new))
            for owner, attr in owners:
                owner._parameters[attr] = new

    def finish(self) -> None:
        """Store the remaining tensors; raise InitError for assigned parameters. Collective for quantized weights."""
        for key in list(self.live):
            self._store(key)
        # FSDP2 and optimizers refer to the previous parameter, so a newly registered one would not be trained.
        assigned = []
        for registered, places in list(self.places.values()):
            for module, name in places:
                current = module._parameters.get(name) if isinstance(registered, torch.nn.Parameter) else None
                if current is not None and id(current) not in self.places:
                    assigned.append(f"{type(module).__name__}.{name}")
        if assigned:
            raise InitError(
                f"materialize: {self.label or type(self.root).__name__}: its own initialization assigned parameters",
                expected="values that are written in place",
                got=shorten(assigned, 3),
                why="The new parameters would not be sharded",
                fix="with torch.no_grad(): parameter.copy_(value)",
            )


def _fingerprint(tensor: torch.Tensor) -> int:
    """Return a checksum of a tensor's bits: writes through ``.data`` do not count as versions."""
    return int(checksum(tensor))


def attributes_on_meta(model: nn.Module) -> Iterator[str]:
    """Yield the names of tensors on meta that users' modules have as plain attributes, which are never initialized."""
    for name, module in model.named_modules():
        if _te.kind_of(module) is None:
            for key, value in vars(module).items():
                if isinstance(value, torch.Tensor) and value.is_meta:
                    yield f"{name}.{key}" if name else key


def refuse_computed_weights(pending: list[tuple[str, nn.Module]]) -> None:
    """Raise InitError if a module computes a weight on meta from other tensors (a parametrization).

    Its ``reset_parameters`` would initialize the computed weight instead of these tensors.
    """
    computed = []
    for name, module in pending:
        if isinstance(module, torch.nn.utils.parametrize.ParametrizationList):
            computed.append(f"{name} ({', '.join(type(step).__name__ for step in module)})")
        computed += [f"{name} ({type(hook).__name__})" for hook in _torch.weight_hooks(module)]
    if computed:
        raise InitError(
            f"materialize: {shorten(computed, 3)}: a parametrization on meta",
            expected="weight_norm, spectral_norm, pruning and similar on modules with values on the device",
            got=f"{len(computed)} weight(s) that are computed from tensors on meta",
            why="reset_parameters would write to the computed weight, and leave its source tensors uninitialized",
            fix="build these modules on the device, with equal seeds on all ranks, and parametrize them there, before "
            "te_fsdp.fully_shard; the rest of the model may stay on meta",
        )
