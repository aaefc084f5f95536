"""Functions of torch that te_fsdp wraps once per process: optimizers, parametrizations, ``GradScaler``.

Checked with torch 2.11 to 2.15.
"""

from __future__ import annotations

import functools
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn.utils import parametrizations, parametrize, prune
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm
from torch.optim import optimizer
from torch.utils import _foreach_utils

from te_fsdp.upstream.patches import wrapping
from te_fsdp.upstream.torch_dtensor import local_of


def support_foreach(cls: type[torch.Tensor]) -> None:
    """Let torch's optimizers use foreach kernels for a subclass of DTensor, as torch does for DTensor itself."""
    # Optimizers compare exact classes (``_foreach_supported_types``). One parameter of an unknown subclass
    # would make them update its group parameter by parameter.
    for types in (optimizer._foreach_supported_types, _foreach_utils._foreach_supported_types):
        if cls not in types:
            types.append(cls)  # type: ignore[arg-type]


_PLACES = {"chunk": 2, "split": 2, "split_with_sizes": 2, "tensor_split": 2}
_PLACES |= dict.fromkeys(("narrow", "select", "index_select", "unbind"), 1)
#: Functions that return parts of a tensor along one dim -> position of their argument ``dim``.
PARTS: dict[Any, int] = {
    **{getattr(owner, name): place for name, place in _PLACES.items() for owner in (torch, torch.Tensor)},
    torch.Tensor.__iter__: 1,
    torch.Tensor.__getitem__: 1,
}
#: Functions that may split or join the rows of a tensor.
VIEWS = {torch.Tensor.view, torch.Tensor.reshape, torch.reshape, torch.Tensor.unflatten, torch.unflatten}


def by_position(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return arguments for :data:`PARTS` and :data:`VIEWS` with the tensor first, also if it was passed by its name."""
    key = next((key for key in ("input", "tensor", "self") if key in kwargs), None)
    if args or key is None:
        return args, kwargs
    return (kwargs[key],), {name: value for name, value in kwargs.items() if name != key}


#: Functions whose names end as those of in-place functions, and which write no values.
_NO_VALUES = ("requires_grad_", "detach_", "share_memory_", "rename_")
_OPERATORS = frozenset(
    f"__i{name}__" for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and")
)


def is_in_place(func: Any) -> bool:
    """Return whether a function writes to its first argument, by its name."""
    name = func.__name__
    is_method = name.endswith("_") and not name.endswith("__") and name not in _NO_VALUES
    return is_method or name in _OPERATORS or name == "__setitem__"


def part_dims(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> set[int]:
    """Return the dims along which a function of :data:`PARTS` returns a part of its input."""
    tensor, place = args[0], PARTS[func]
    if func is not torch.Tensor.__getitem__:
        dim = kwargs.get("dim", args[place] if len(args) > place else 0)
        return {dim % tensor.ndim}
    index = args[1] if isinstance(args[1], tuple) else (args[1],)
    items = [item for item in index if item is not None]  # ``None`` adds a dim
    for place, item in enumerate(items):
        if item is Ellipsis:
            items[place : place + 1] = [slice(None)] * (tensor.ndim - len(items) + 1)
            break
    return {i for i, item in enumerate(items) if not isinstance(item, slice) or item != slice(None)}


def keeps_dim(func: Any, dim: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether the result of a function of :data:`VIEWS` has a dim of the tensor, or is flat."""
    shape = args[0].shape
    new = func(torch.empty(shape, dtype=args[0].dtype, device="meta"), *args[1:], **kwargs).shape
    before, size = shape[:dim].numel(), shape[dim]
    return len(new) == 1 or any(n == size and new[:i].numel() == before for i, n in enumerate(new))


@functools.cache
def after_failed_load(call: Callable[[Any], None]) -> None:
    """Call a function with the optimizer of torch whose ``load_state_dict`` misses a state. Local, once per process."""

    @wrapping
    def explain(self: Any, state: Any, *, stock: Callable[..., None]) -> None:
        try:
            stock(self, state)
        except KeyError:
            call(self)
            raise

    # ``__setstate__`` then raises KeyError, which follows unless the function raises (torch 2.11 to 2.15).
    for cls in {value for value in vars(torch.optim).values() if isinstance(value, type)}:
        if "__setstate__" in vars(cls) and cls is not torch.optim.Optimizer:
            cls.__setstate__ = explain(cls.__setstate__)  # type: ignore[attr-defined]


#: Functions that compute a parameter from others, or undo it, and fail on DTensors without its name: those that
#: ``orthogonal``, ``spectral_norm``, the functions of ``prune`` and those that undo them call first.
_FUNCTIONS = (
    (getattr(parametrizations, "_Orthogonal", None), "__init__"),
    (getattr(parametrizations, "_SpectralNorm", None), "__init__"),
    (prune.BasePruningMethod, "apply"),
    (prune.BasePruningMethod, "remove"),
    (SpectralNorm, "remove"),
    (WeightNorm, "remove"),
    (parametrize, "remove_parametrizations"),
    (prune, "global_unstructured"),
)


@functools.cache
def before_reparametrization(call: Callable[[torch.Tensor], None]) -> None:
    """Call a function with each tensor before torch replaces it. Local, once per process."""

    @wrapping
    def calling(*args: Any, stock: Callable[..., Any], **kwargs: Any) -> Any:
        # Of the objects that ``prune`` and ``spectral_norm`` remove from a module.
        name = getattr(args[0], "_tensor_name", getattr(args[0], "name", None)) if args else None
        for tensor in _tensors_in([*args, name, *kwargs.values()]):
            call(tensor)
        return stock(*args, **kwargs)

    for owner, name in _FUNCTIONS:
        if owner is not None:
            # vars, because getattr would bind a classmethod.
            stock = vars(owner)[name]
            wrapped = calling(getattr(stock, "__func__", stock))
            setattr(owner, name, classmethod(wrapped) if isinstance(stock, classmethod) else wrapped)


def _tensors_in(values: Any) -> Iterator[torch.Tensor]:
    """Yield tensors, and the parameters that pairs of a module and a name refer to."""
    for value, following in zip(values, [*values[1:], None], strict=True):
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, torch.nn.Module) and isinstance(following, str):
            names = (following, f"{following}_orig", f"{following}_v", f"parametrizations.{following}.")
            yield from (
                p for name, p in value.named_parameters() if name in names or name.startswith(names[-1])
            )
        elif isinstance(value, list | tuple):
            yield from _tensors_in(list(value))


def is_in_forward() -> bool:
    """Return whether a module's forward, or a registered method of a unit, runs on this thread. Local operation."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        # ``Module._call_impl``, and the wrappers of registered methods by FSDP2 and by te_fsdp
        if frame.f_code.co_name in ("_call_impl", "wrapped_method", "watched") and frame.f_globals[
            "__name__"
        ].startswith(("torch.", "te_fsdp.")):
            return True
        frame = frame.f_back
    return torch.compiler.is_compiling()


def is_in_conversion() -> bool:
    """Return whether a function that ``Module._apply`` applies, such as that of ``float()``, has called the caller."""
    # The function is torch's or TE's, which replaces ``Module.float``.
    frame = sys._getframe(2).f_back
    return frame is not None and frame.f_globals.get("__name__") == nn.Module.__module__


class _BackwardHooks(OrderedDict[int, Any]):
    """Backward hooks of a module, which call a function when ``make_graphed_callables`` counts them."""

    def __init__(self, hooks: Any, call: Callable[[], None]) -> None:
        super().__init__(hooks)
        self._call = call

    def __bool__(self) -> bool:
        return next(iter(self), None) is not None

    def __len__(self) -> int:
        frame = sys._getframe(1)
        if frame.f_code.co_name.endswith("make_graphed_callables"):
            # By now TE has replaced ``__call__`` of the modules' classes, which it does not undo in an exception
            # (2.18-2.20). It has also set a flag of the process, with which no backward updates the scales of delayed
            # scaling.
            module, caller = frame.f_globals, frame.f_back
            if module.get("__name__") == "transformer_engine.pytorch.graph" and caller is not None:
                for cls, call in caller.f_locals.get("old_call_funcs", {}).items():
                    del cls.__call__
                    if cls.__call__ is not call:
                        cls.__call__ = call
                module["set_capture_end"]()
            self._call()
        return super().__len__()

    def __reduce__(self) -> Any:
        return OrderedDict, (list(self.items()),)


def before_graphed_callables(module: nn.Module, call: Callable[[], None]) -> None:
    """Call a function in ``make_graphed_callables`` of torch or TransformerEngine for this module."""
    # Both first check that ``len(module._backward_hooks)`` is 0. Calls of the module use ``bool`` instead.
    module.__dict__["_backward_hooks"] = _BackwardHooks(module._backward_hooks, call)


# [Note: GradScaler over several meshes] The scaler passes all gradients of a dtype to one operator, which
# divides them by the scale and reports infinities. For DTensors torch has a handler
# (``found_inf_reduce_handler``). It rejects plain tensors in such a list. It all-reduces the report over the
# mesh of the first gradient only, so with tensor parallelism only some ranks would skip a step.
_UNSCALE = torch.ops.aten._amp_foreach_non_finite_check_and_unscale_.default


@functools.cache
def unscale_over_all_meshes() -> None:
    """Replace DTensor's handler of the scaler's operator (``_custom_op_handlers``). Local, once per process."""
    handlers: Any = DTensor._op_dispatcher._custom_op_handlers
    stock = handlers.get(_UNSCALE)
    if stock is None:
        return

    def unscale(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Unscale the local gradients and all-reduce the report over every mesh axis that shards one of them.

        Collective over these axes. Gradients with the same mesh and placements are left to torch.
        """
        gradients, report, *rest = args
        kinds = [(g.device_mesh, tuple(g.placements)) if isinstance(g, DTensor) else None for g in gradients]
        if len(set(kinds)) == 1 and None not in kinds:
            return stock(op, args, kwargs)
        # DTensor's handler rejects lists with plain tensors. Local tensors do not reach it.
        op([local_of(gradient) for gradient in gradients], report, *rest, **kwargs)
        axes: dict[tuple[int, ...], tuple[DeviceMesh, int]] = {}
        for mesh, placements in dict.fromkeys(kind for kind in kinds if kind is not None):
            for axis, placement in enumerate(placements):
                if not placement.is_replicate() and mesh.size(axis) > 1:
                    ranks = tuple(dist.get_process_group_ranks(mesh.get_group(axis)))
                    axes.setdefault(ranks, (mesh, axis))
        # Twice: a report that arrives over a later axis must also reach the ranks of an earlier one.
        for mesh, axis in [*axes.values()] * (2 if len(axes) > 1 else 1):
            dist.all_reduce(report, op=dist.ReduceOp.MAX, group=mesh.get_group(axis))
        return None

    handlers[_UNSCALE] = unscale
