"""Conversions of a sharded model by ``Module._apply`` (``to``, ``half``, ``to_empty`` or similar)."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn

from te_fsdp.apply_fully_shard import Setup
from te_fsdp.errors import OrderError
from te_fsdp.initialize import fill_with_nan
from te_fsdp.lifecycle import track_replaced_parameters
from te_fsdp.precision import gradient_dtype
from te_fsdp.records import copy_param_attrs, param_attrs_to_copy, plan_of
from te_fsdp.sharded_model import ShardedModel, attach_state_to_params, shard_of
from te_fsdp.upstream import (
    fsdp2_patches as _fsdp2_patches,
    te as _te,
    torch_autograd as _torch_autograd,
    torch_dtensor as _torch,
)


def follow_conversions(setup: Setup) -> None:
    """Make ``Module._apply`` (``to``, ``half``, ``to_empty``) keep te_fsdp's records, or raise. Local operation."""
    state, running = setup.state, False

    def apply_and_carry(module: nn.Module, stock: Any, *args: Any, **kwargs: Any) -> Any:
        """Run ``Module._apply``, and copy the Python attributes to the DTensors that replace the parameters.

        The dtype of gradients is restored, too. Gradients of other dtypes are removed during the call, because torch
        refuses them.
        """
        nonlocal running
        if running:  # a module that contains this one is converted
            return stock(*args, **kwargs)
        _refuse_conversion(state, module, args[0])
        for prepare in state.components.before_conversion:
            prepare()
        attrs, gradients = {}, {}
        for name, parameter in state.parameters().items():
            attrs[name] = param_attrs_to_copy(parameter)
            plan = plan_of(parameter)
            if plan is not None and plan.gradient_dtype is not None:
                gradients[name], parameter.grad = parameter.grad, None
        running = True
        try:
            with track_replaced_parameters(state.model, "to_empty, or another call that converts the model"):
                result = stock(*args, **kwargs)
            # The first forward detects what nothing has written to.
            recurse = kwargs.get("recurse", True)
            if fill_with_nan(args[0], [*module.parameters(recurse), *module.buffers(recurse)]):
                state.checked.released = state.checked.on_meta = True
            return result
        except NotImplementedError as error:
            if "meta tensor" not in str(error):
                raise
            raise OrderError(
                f"{type(state.model).__name__}: a move to a device before its parameters have values",
                expected="te_fsdp.materialize(model), which moves and initializes them",
                got="parameters on meta",
                fix="call te_fsdp.materialize(model, seed=...) instead",
            ) from error
        finally:
            running = False
            # Also after an error, because torch has replaced some of the parameters by then.
            for name, parameter in state.parameters().items():
                copy_param_attrs(attrs[name], parameter)
                if _te.is_quantized(parameter):
                    _torch_autograd.renew_hooks(parameter)
                if name in gradients:
                    gradient = gradients[name]
                    parameter.grad_dtype = gradient_dtype(parameter)
                    parameter.grad = None if gradient is None else gradient.to(parameter.device)
            attach_state_to_params(state, moved=True)

    for module in state.model.modules():
        _fsdp2_patches.wrap_apply(module, functools.partial(apply_and_carry, module))


def _refuse_conversion(state: ShardedModel, module: nn.Module, fn: Any) -> None:
    """Raise OrderError if ``to(dtype)``, ``half()`` or similar would change dtypes after the first forward. Local."""
    if not state.roots():
        return
    parameters = map(shard_of, module.parameters())
    kinds = {(p.dtype, p.device) for p in parameters if not _te.is_quantized(_torch.local_of(p))}
    for dtype, device in kinds:
        # `_apply` gets a function without its dtype, so that it is tried on an empty tensor.
        became = fn(torch.empty(0, dtype=dtype, device=device)).dtype
        if became != dtype:
            raise OrderError(
                f"{type(module).__name__}: a conversion from {dtype} to {became} after the first forward",
                expected="unchanged dtypes after the first forward",
                why="FSDP2 has already allocated all-gather buffers of the first dtype",
                fix="build the model in that dtype, or give te_fsdp.fully_shard a precision policy",
            )
