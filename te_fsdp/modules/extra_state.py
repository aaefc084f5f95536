"""What a bound module's ``_extra_state`` says in a plain state dict, so that plain DCP is right or refuses.

TE's entry is empty for stateless recipes and a pickle under delayed scaling. Two kinds of weights cannot be
resharded by plain ``torch.distributed.checkpoint``: stacked rows (a DTensor can't say that a rank holds
several ranges) and quantized tensors (a slice of them may be a temporary, the write to it lost). For modules
with such weights the entry becomes a dict with one key that tells the condition. DCP makes it a key of the
checkpoint, and on another mesh stops at the missing key, by name and before it reads anything:

    Missing key in checkpoint state_dict: model.layers.0.fc1._extra_state.rows stacked for tp=4, other tp
    sizes need te_fsdp.checkpoint
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

import torch

from te_fsdp import _te, _torch
from te_fsdp.binding import binding_of
from te_fsdp.errors import CheckpointError, message
from te_fsdp.modules.shards import shard_info

if TYPE_CHECKING:
    from torch import nn

__all__ = ["guard", "unguard"]


class _NotForFiles:
    """TE's pickled state in memory: can be passed on or dropped, but not written."""

    def __init__(self, label: str, state: torch.Tensor) -> None:
        self.label, self.state = label, state

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise CheckpointError(
            message(
                f"{self.label}._extra_state: delayed scaling's state in a plain state dict",
                expected="tensors of fixed shape",
                got=f"TransformerEngine's pickle of {self.state.numel()} bytes",
                why="DCP could not load it into a fresh model, whose entry is empty",
                fix="save with te_fsdp.checkpoint.save (dropping the _extra_state keys loses the amax history)",
            )
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> _NotForFiles:
        return self


def guard(module: nn.Module, stock: Any) -> Any:
    """The value that a bound module's ``get_extra_state`` returns. Local operation.

    Args:
        module: A TE module.
        stock: What TE's own ``get_extra_state`` returned.
    """
    if binding_of(module) is None:
        return stock
    if isinstance(stock, torch.Tensor) and stock.numel():
        stock = _NotForFiles(_label(module), stock)
    condition = _condition(module)
    return stock if condition is None else {condition[0]: stock}


def unguard(module: nn.Module, state: Any) -> Any:
    """What of a loaded value TE's own ``set_extra_state`` gets. Local operation.

    Raises:
        CheckpointError: The value was saved under a condition that does not hold here, or under none where
        one is due.
    """
    saved, stock = next(iter(state.items())) if isinstance(state, dict) and len(state) == 1 else (None, state)
    if isinstance(stock, _NotForFiles):
        stock = stock.state
    if binding_of(module) is None and saved is None:
        return stock
    condition, resharded = _condition(module) or (None, False)
    # Whole rows, from a module without tensor parallelism and binding, fit a module that is not cut.
    if saved == condition or (saved is None and not resharded):
        return stock
    raise CheckpointError(
        message(
            f"{_label(module)}: weights of a plain state dict",
            expected=condition or "no condition",
            got=saved or "no condition (an unsharded or unquantized module)",
            why="Its rows or blocks lie otherwise than here, and would be scrambled",
            fix="save and load with te_fsdp.checkpoint, which fits any mesh",
        )
    )


def _condition(module: nn.Module) -> tuple[str, bool] | None:
    """On what loading this module's weights by plain DCP depends, and whether whole weights would not fit."""
    binding = binding_of(module)
    own = {n: p for n, p in module._parameters.items() if p is not None}
    if binding is None or not own:
        return None
    tp_size = binding.tp_mesh.size() if binding.tp_mesh is not None else 1
    quantized = [n for n, p in own.items() if _te.is_quantized(_torch.local_of(p))]
    if quantized:
        at = shard_info(module, quantized[0], own[quantized[0]], label=_label(module)).at
        text = f"quantized for tp={tp_size} and {at.fsdp_size} FSDP shard(s), other meshes need te_fsdp.checkpoint"
        return text, True
    if any(binding.rules[n].layout.is_stacked for n in own if n in binding.rules):
        return f"rows stacked for tp={tp_size}, other tp sizes need te_fsdp.checkpoint", tp_size > 1
    return None


def _label(module: nn.Module) -> str:
    binding = binding_of(module)
    return binding.name if binding is not None and binding.name else type(module).__name__
