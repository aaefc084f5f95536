"""Which ways of clearing gradients forget those that wait for their reduction too.

    te_fsdp.zero_grad(model)       all (``reductions.py``)
    module.zero_grad()             of the model, or of a module around it: all; of a part: as of an optimizer
    optimizer.zero_grad()          those that it has, if no others wait with them
    parameter.grad = None          none: FSDP2 keeps what waits apart from the sharded parameter

What waits of a microbatch that was given up (a loss of NaN) would else be in the next step.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any

from te_fsdp import _fsdp2_patches, _torch
from te_fsdp.errors import OrderError, shorten
from te_fsdp.sharding.reductions import forget_waiting, zero_grad
from te_fsdp.sharding.state import shard_of, sharding_state, state_of

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

    from te_fsdp.sharding.state import ShardingState


@functools.cache
def clear_with_modules() -> None:
    """Let ``zero_grad`` of modules forget what waits, too. Modules without sharded parameters see no change. Local."""
    _fsdp2_patches.around_zero_grad(_zero_grad)


def _zero_grad(stock: Callable[..., None], module: nn.Module, set_to_none: bool) -> None:
    """In the place of torch's, which reaches ``.grad`` of the parameters that a module has now.

    Raises:
        OrderError: A part of a model whose gradients wait together with others; nothing has changed then.
    """
    whole = [state for inner in module.modules() if (state := sharding_state(inner)) is not None]
    now = list(module.parameters())
    shards = list(map(shard_of, now))
    parts = {id(state): state for state in map(state_of, shards) if state is not None and state not in whole}
    if _torch.in_backward() or not (whole or parts):
        stock(module, set_to_none)
        return
    held = {id(parameter): parameter for parameter in (*now, *shards)}
    waiting = [
        state for state in parts.values() if state.waiting and _is_all_held(state, held, module, "a module")
    ]
    for state in whole:
        zero_grad(state.model, set_to_none=set_to_none)
        for parameter in (*state.model.parameters(), *state.parameters().values()):
            held.pop(id(parameter), None)
    for parameter in held.values():
        if set_to_none:
            parameter.grad = None
        elif parameter.grad is not None:
            parameter.grad.detach().zero_()  # a view of a bucket cannot be detached in place
    for state in waiting:
        forget_waiting(state)


def clear_with(optimizer: Optimizer, state: ShardingState) -> None:
    """Let ``optimizer.zero_grad()`` forget gradients that wait for their reduction too. Local operation.

    Those of a microbatch that was given up (a loss of NaN) would else be in the next step. Whoever has put a
    ``zero_grad`` of its own on the optimizer keeps it.
    """
    ours = optimizer.__dict__.get("zero_grad")
    if ours is None:
        ours = optimizer.zero_grad = _ZeroGrad(optimizer)  # type: ignore[method-assign]
    if isinstance(ours, _ZeroGrad):
        ours.states.add(state)


class _ZeroGrad:
    """``zero_grad`` of one optimizer, in the place of its class's.

    Args:
        optimizer: Not kept alive.

    Attributes:
        states: Of the sharded models that it works on.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = weakref.ref(optimizer)
        self.states: weakref.WeakSet[ShardingState] = weakref.WeakSet()
        functools.update_wrapper(self, type(optimizer).zero_grad)

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        """Clear the optimizer's gradients.

        Raises:
            OrderError: Other parameters' gradients wait for the same reductions; nothing has changed then.
        """
        optimizer = self._optimizer()
        assert optimizer is not None  # it is what this was called on
        waiting = [] if _torch.in_backward() else [state for state in self.states if state.waiting]
        if waiting:
            held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
            waiting = [state for state in waiting if _is_all_held(state, held, optimizer, "an optimizer")]
        type(optimizer).zero_grad(optimizer, *args, **kwargs)
        for state in waiting:
            forget_waiting(state)


def _is_all_held(state: ShardingState, held: Collection[int], holder: object, what: str) -> bool:
    """Whether an optimizer, or a module, holds all parameters whose gradients wait; raises if it holds some of them."""
    pending = state.pending()
    left = {key: label for key, label in pending.items() if key not in held}
    if left and len(left) < len(pending):
        raise OrderError(
            f"{type(holder).__name__}.zero_grad: gradients of {len(pending)} parameter(s) wait for their reduction",
            expected=f"{what} over all of them",
            got=f"one that does not hold {shorten(list(left.values()), 3)}",
            why="What was added up over microbatches is reduced, or forgotten, together",
            fix="call te_fsdp.zero_grad(model), which forgets all gradients",
        )
    return not left
