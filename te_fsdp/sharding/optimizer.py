"""Whether an optimizer still holds the model's parameters, which sharding replaces; and which optimizers hold them."""

from __future__ import annotations

import functools
import gc
import weakref
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from torch.optim import Optimizer

from te_fsdp import _torch
from te_fsdp.errors import OrderError
from te_fsdp.quantized.optimizer_steps import KEEPS_MAIN_WEIGHTS

if TYPE_CHECKING:
    import torch
    from torch import nn

__all__ = ["check_optimizer", "optimizers_of", "remember"]


@functools.cache
def _met() -> weakref.WeakSet[Optimizer]:
    """Optimizers that were given main weights, or have begun a step on parameters of a sharded model."""
    return weakref.WeakSet()


def remember(optimizer: Optimizer) -> None:
    """From now on :func:`optimizers_of` finds this optimizer, wherever it is. Local operation."""
    _met().add(optimizer)


def check_optimizer(model: nn.Module, optimizer: Optimizer) -> None:
    """Raise if an optimizer holds parameters that are not (or no longer) the model's.

    Sharding, and materialisation from meta, put new parameters into the model. An optimizer built before goes
    on with the old ones: its steps change nothing that the model reads. Local operation, though FSDP2 units
    are resharded.

    Args:
        model: The model, sharded or not.
        optimizer: Any torch optimizer; it may leave out parameters of the model.

    Raises:
        OrderError: Says how many parameters are not the model's.
    """
    for module in model.modules():
        if _torch.is_fsdp_module(module):
            module.reshard()  # type: ignore[operator]
    current = {id(p) for p in model.parameters()}
    held = [p for group in optimizer.param_groups for p in group["params"]]
    foreign = sum(id(p) not in current for p in held)
    if foreign:
        raise OrderError(
            f"{type(optimizer).__name__}: {foreign} of {len(held)} parameters are not the model's",
            expected="the parameters that the model has now",
            got="others, such as those from before fully_shard or materialize",
            why="Its step would change nothing that the model reads",
            fix="build it after te_fsdp.fully_shard and te_fsdp.materialize, from model.parameters()",
        )


def _with_subclasses(kind: type) -> Iterator[type]:
    yield kind
    for below in type.__subclasses__(kind):
        yield from _with_subclasses(below)


def optimizers_of(parameters: Iterable[torch.Tensor]) -> list[Optimizer]:
    """Every optimizer of this process that holds one of these parameters, which do not know it. Local operation.

    Looks at all objects that the garbage collector knows: for loads alone. What ``gc.freeze()`` has put aside is not
    listed, and could not be put aside again by itself; optimizers of sharded models that have stepped are known.
    """
    wanted = {id(parameter) for parameter in parameters}
    # By its type: proxies of all kinds answer isinstance with side effects. And by a set of types: there are a million
    # objects, and a call for each would take longer than to load a model of a GiB.
    kinds = set(_with_subclasses(Optimizer))
    listed = [found for found in gc.get_objects() if type(found) in kinds]
    known = {id(optimizer): optimizer for optimizer in [*listed, *_met()]}.values()
    holding = []
    for optimizer in known:
        stand_ins = optimizer.__dict__.get(KEEPS_MAIN_WEIGHTS)
        if stand_ins is not None:
            stand_ins.put_back(optimizer)  # a step that raised has left them in the parameters' places
        # Of wrappers around another optimizer the inner one is enough.
        groups = optimizer.__dict__.get("param_groups", ())
        if any(id(parameter) in wanted for group in groups for parameter in group["params"]):
            holding.append(optimizer)
    return holding
