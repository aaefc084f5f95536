"""Optimizer states without the entries that a step creates."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from te_fsdp.errors import CheckpointError

if TYPE_CHECKING:
    from torch.optim import Optimizer


def refuse_incomplete_states(
    optimizer: Optimizer, state_dict: dict[str, Any], main: str, *, is_fresh: bool
) -> None:
    """Raise CheckpointError for a state dict from which DCP has loaded the main weights alone. Local operation.

    Args:
        optimizer: The optimizer that loads ``state_dict``.
        state_dict: In the form of ``optimizer.state_dict()``.
        main: Name of the main weight in a state.
        is_fresh: Whether the optimizer has not stepped.
    """
    states = state_dict["state"]
    # Without momentum the main weight is all that SGD has.
    is_sgd = isinstance(optimizer, torch.optim.SGD)
    groups = [g for g in state_dict["param_groups"] if not is_sgd or g.get("momentum") != 0]
    keys = [key for group in groups for key in group["params"] if key in states]
    incomplete = [key for key in keys if set(states[key]) == {main}]
    # A fresh optimizer has no other entries, so a dict that has some is from a trained optimizer. Its incomplete
    # states are those of parameters that have not stepped, such as frozen ones.
    if not incomplete or (is_fresh and len(incomplete) < len(keys)):
        return
    raise CheckpointError(
        f"{type(optimizer).__name__}.load_state_dict: {len(incomplete)} parameters with main weights only",
        expected="the full state",
        got="the state of an optimizer that has not stepped",
        why="DCP loads only the entries that the given state dict contains",
        fix="read it by get_state_dict or use te_fsdp.checkpoint.load, which create the missing state",
    )
