"""Operators over lists with sharded and plain tensors, which torch refuses without a name; torch 2.11 to 2.15."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor import DTensor

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_OPERATORS = (
    torch.ops.aten._foreach_norm.Scalar,  # clip_grad_norm_, get_total_norm
    torch.ops.aten._foreach_mul_.Tensor,  # clip_grads_with_norm_
    torch.ops.aten._foreach_clamp_min_.Scalar,  # clip_grad_value_
)


@functools.cache
def before_mixed_lists(call: Callable[[Sequence[torch.Tensor]], None]) -> None:
    """Call a function with the tensors before torch refuses them (``_custom_op_handlers``). Local, once per process."""
    handlers = DTensor._op_dispatcher._custom_op_handlers
    for operator in _OPERATORS:
        handlers.setdefault(operator, functools.partial(_handle, call))


def _handle(call: Callable[[Sequence[torch.Tensor]], None], op: Any, args: Any, kwargs: Any) -> Any:
    dispatcher = DTensor._op_dispatcher
    is_mixed = len({isinstance(tensor, DTensor) for tensor in args[0]}) == 2
    if is_mixed and not getattr(dispatcher, "_allow_implicit_replication", False):
        call(args[0])
    # torch's own implementation, which it uses for operators without a handler
    own = dispatcher._custom_op_handlers.pop(op)
    try:
        return op(*args, **kwargs)
    finally:
        dispatcher._custom_op_handlers[op] = own
