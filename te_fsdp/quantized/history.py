"""Delayed scaling: a weight's quantizer reads the module's scale and writes the module's amax history, always.

TE makes a new history when the length changes, as it does in the first forward if ``te.autocast`` has another
``amax_history_len`` than ``quantized_model_init`` had. It tells the weights of the module, but not FSDP2's shards,
which go on with the old history: their scale stays as it was, and weights that grow are cut off at the format's
largest value, in silence (TE 2.20.2 ``adjust_amax_history_length``).
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

from te_fsdp import _te, _torch
from te_fsdp.quantized.amax import attach_group

if TYPE_CHECKING:
    import torch
    from torch import nn

    from te_fsdp.binding import Binding

__all__ = ["follow_history", "remember_shard"]


def remember_shard(binding: Binding, module: nn.Module, local: torch.Tensor) -> None:
    """Remember a shard while its module holds it; in forward the module holds the gathered weight. Local operation."""
    for name, parameter in module._parameters.items():
        if parameter is not None and _torch.local_of(parameter) is local:
            binding.shards[name] = weakref.ref(local)


def follow_history(binding: Binding, module: nn.Module) -> None:
    """Point the quantizers of a module's weights, gathered and not, at its scale and history. Local operation."""
    tensors = [(n, _torch.local_of(p)) for n, p in module._parameters.items() if p is not None]
    tensors += [(n, local) for n, ref in binding.shards.items() if (local := ref()) is not None]
    for name, local in tensors:
        live = _te.weight_quantizer(module, name)
        if live is None or not _te.is_quantized(local) or not _te.has_delayed_scale(local):
            continue
        quantizer = _te.quantizer_of(local)
        quantizer.scale, quantizer.amax = live.scale, live.amax
        attach_group(local, binding)  # TE may have put another quantizer there
