"""Whether an optimizer still holds the model's parameters: sharding replaces them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from te_fsdp import _torch
from te_fsdp.errors import OrderError, message

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

__all__ = ["check_optimizer"]


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
            message(
                f"{type(optimizer).__name__}: {foreign} of {len(held)} parameters are not the model's",
                expected="the parameters that the model has now",
                got="others, such as those from before fully_shard or materialize",
                why="Its step would change nothing that the model reads",
                fix="build it after te_fsdp.fully_shard and te_fsdp.materialize, from model.parameters()",
            )
        )
