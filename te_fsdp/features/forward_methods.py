"""``register_forward_method``: methods of a unit that all-gather its weights as ``forward`` does."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import MethodType
from typing import Any

from torch import nn
from torch.distributed.fsdp import register_fsdp_forward_method

from te_fsdp.errors import OrderError, PlacementError
from te_fsdp.forward_hooks import after_forward, before_forward, before_unit, choose_root
from te_fsdp.records import is_replicated, param_owners
from te_fsdp.sharded_model import get_sharded_model, shard_of, sharded_model_of
from te_fsdp.upstream import fsdp2_state as _fsdp2, fsdp2_units, torch_dtensor as _torch
from te_fsdp.upstream.fsdp2_containers import restore_after_exception


def register_forward_method(module: nn.Module, method: str) -> None:
    """Make a method of a unit all-gather its weights as ``forward`` does, for example ``generate`` or ``encode``.

    FSDP2 all-gathers in hooks of ``forward``. Other methods called directly would get shards and fail. This call is
    local; the method becomes collective over ``dp_shard``, like ``forward``. Modules that are not sharded
    (:func:`te_fsdp.fsdp_no_shard`) need no all-gather; if the whole model is such a module, only its gradients are
    handled. Inside of a forward, or a registered method, of the same unit the method runs as it is.

    Args:
        module: A unit of a model after :func:`te_fsdp.fully_shard`, or its root.
        method: Name of the method.

    Raises:
        OrderError: The module is not a unit.
        PlacementError: It has no such method.

    Source: ``torch.distributed.fsdp.register_fsdp_forward_method``, which has no effect for other modules.
    """
    if not isinstance(method, str) or not callable(getattr(module, method, None)):
        raise PlacementError(
            f"register_forward_method: {type(module).__name__} has no method {method!r:.80}",
            expected="the name of a method",
            fix=f'te_fsdp.register_forward_method(model, "generate"), if {type(module).__name__} defines generate',
        )
    is_unit, stock = fsdp2_units.is_fsdp_module(module), getattr(module, method)
    # FSDP2's wrapper first, so that te_fsdp's runs around it, as its hooks of forward do.
    if is_unit:
        register_fsdp_forward_method(module, method)
    if is_unit or get_sharded_model(module) is not None:
        _wrap_method(module, method, stock)
        return
    flags = [is_replicated(owner.module, owner.name) for owner in param_owners(module)]
    if not flags or not all(flags):
        raise OrderError(
            f"register_forward_method({type(module).__name__}, {method!r})",
            expected="a unit, after te_fsdp.fully_shard",
            got="a module that is not a unit",
            why="The unit around it all-gathers its weights, so the method would see shards",
            fix="call it after te_fsdp.fully_shard(..., units=...) that makes a unit of this module, or register "
            "a method of the unit",
        )


def _wrap_method(unit: nn.Module, method: str, stock: Callable[..., Any]) -> None:
    """Handle weights and gradients around one more method of a unit, or of the model, as around forward."""
    model_state = next(map(sharded_model_of, map(shard_of, unit.parameters())), None)
    if model_state is None:
        return  # torch's own fully_shard has sharded it
    state, gathering, is_root = model_state, getattr(unit, method), unit is model_state.model
    names = [name for name, module in state.modules.items() if module is unit]
    checks = [_torch.disable_compile(check) for check in state.checks.inputs]
    forwards: list[bool] = []  # not empty during a forward of the root
    if is_root:  # FSDP2's state remains the same after an exception
        begin, end = (lambda *_: forwards.append(True), lambda *_: forwards.clear())
        unit.register_forward_pre_hook(_torch.disable_compile(begin), prepend=True)
        unit.register_forward_hook(_torch.disable_compile(end), always_call=True)

    @functools.wraps(stock)
    def watched(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        # A second all-gather inside of the unit's forward would end it: FSDP2 reshards the unit after the inner method.
        exposed = any(name in state.unsharded.exposed for name in names)
        begun = forwards or state.computed.methods if is_root else not exposed
        if begun and (not fsdp2_units.is_fsdp_module(unit) or _fsdp2.is_in_forward(unit)):
            return stock(*args, **kwargs)
        if is_root:
            before_forward(state, unit, args)
            for check in checks:
                check(unit, args, kwargs, method)
        for name in names:
            choose_root(state, [], unit, args)
            before_unit(state, name, unit, args)
        # The model's hooks of forwards inside of the method do not begin a new forward.
        state.computed.methods += is_root
        try:
            output = gathering(*args, **kwargs)
        except Exception:
            _ = names and restore_after_exception(unit)
            raise
        finally:
            state.computed.methods -= is_root
        after_forward(state, unit, args, output)
        return output

    setattr(unit, method, MethodType(watched, unit))
