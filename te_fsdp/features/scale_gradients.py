"""Scale all gradients of a model by one factor."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from te_fsdp.errors import require_number
from te_fsdp.features.hfsdp.gradients import averages_of
from te_fsdp.gradient_sync import require_reduced
from te_fsdp.lifecycle import gradients_of
from te_fsdp.sharded_model import require_sharded_model
from te_fsdp.upstream import torch_dtensor as _torch

if TYPE_CHECKING:
    from torch import nn


@torch.no_grad()
def scale_gradients(model: nn.Module, factor: float | torch.Tensor) -> None:
    """Multiply all gradients in place by a factor that is equal on all ranks, such as 1 / the number of tokens.

    Local operation. With HFSDP, after a backward that :func:`te_fsdp.microbatch` has marked as the last one, it
    completes the averages over ``dp_replicate``, as :func:`te_fsdp.clip_grad_norm_` does, and scales these. A factor
    that is a tensor has one element.

    Raises:
        OrderError: Gradients are not reduced yet, or have changed since they were averaged.
    """
    state = require_sharded_model(model, "scale_gradients")
    if not isinstance(factor, torch.Tensor) or factor.numel() != 1:
        require_number("scale_gradients", "factor", factor, least=-math.inf, fix="factor=1 / tokens")
    require_reduced(state, "scale_gradients")
    number = torch.as_tensor(factor, dtype=torch.float32).reshape(())
    averaging = averages_of(state.parameters().values())
    # Averages that started in backward are completed, so that they can be scaled in place of their gradients.
    for averages in averaging:
        averages.finish()
    # Replace gradients by their averages, which the next step uses.
    rows = {key: average for averages in averaging for key, average in averages.made.items()}
    own = [gradient for gradient in gradients_of(state.parameters().values()) if gradient is not None]
    _torch.multiply_all_(
        _torch.local_tensors_of(rows.get(id(gradient), gradient) for gradient in own), number
    )
    for averages in averaging:
        averages.multiplied(number)
