"""What a bound module's ``_extra_state`` says in a plain state dict: right, or a refusal, under plain DCP too.

TE's entry is empty for stateless recipes and a pickle under delayed scaling, which ``torch.load`` with
``weights_only=True`` reads but TE's modules take only with ``NVTE_ALLOW_UNSAFE_PICKLE_EXTRA_STATE=1``. Here
delayed scaling's state is a dict of tensors and plain values, that any of our modules takes back:

    layers.0.fc1._extra_state: {"delayed scaling": {"recipe": {...}, "scaling_fwd.scale": tensor, ...}}

Plain ``torch.distributed.checkpoint`` refuses to write it: a fresh model, which has no such state before its
first forward, would come back without it in silence.

Two kinds of weights cannot be resharded by plain DCP: stacked rows (a DTensor can't say that a rank holds
several ranges) and quantized tensors (a slice of them may be a temporary, the write to it lost). For modules
with such weights the entry becomes a dict with one key that tells the condition. DCP makes it a key of the
checkpoint, and on another mesh stops at the missing key, by name and before it reads anything:

    Missing key in checkpoint state_dict: model.layers.0.fc1._extra_state.rows stacked for tp=4, other tp
    sizes need te_fsdp.checkpoint

High-precision values may always be loaded into quantized weights: each becomes one quantization, with the
scale of the whole weight.
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

__all__ = ["DELAYED", "guard", "unguard"]

#: Key of delayed scaling's state in an entry.
DELAYED = "delayed scaling"


class _NotForDcp(torch.Tensor):
    """A tensor for state dicts and ``torch.save``, where it becomes a plain one; plain DCP cannot write it."""

    __torch_function__ = _torch.plain_results  # type: ignore[bad-override]

    def __create_write_items__(self, fqn: str, tensor: torch.Tensor) -> NoReturn:
        """DCP asks for this when it plans to write the tensor."""
        raise CheckpointError(
            message(
                f"{fqn}: delayed scaling's state in a plain state dict",
                expected="a state dict for torch.save or load_state_dict",
                got="torch.distributed.checkpoint",
                why="A model that has not run yet could not take it back, and would lose the amax history in silence",
                fix="save with te_fsdp.checkpoint.save (dropping the _extra_state keys loses the amax history)",
            )
        )

    def __reduce_ex__(self, proto: Any) -> Any:
        return self.as_subclass(torch.Tensor).__reduce_ex__(proto)

    def __deepcopy__(self, memo: dict[int, Any]) -> _NotForDcp:
        return self.as_subclass(torch.Tensor).clone().as_subclass(_NotForDcp)


def guard(module: nn.Module, stock: Any) -> Any:
    """The value that a bound module's ``get_extra_state`` returns. Local operation.

    Args:
        module: A TE module.
        stock: What TE's own ``get_extra_state`` returned.

    Raises:
        PrecisionError: Delayed scaling inside a custom recipe, whose state has no fixed shape.
    """
    if binding_of(module) is None:
        return stock
    if isinstance(stock, torch.Tensor) and stock.numel():
        states = _te.delayed_states(module)
        # Without states it is the pickle of a custom recipe, which TE ignores when it loads it.
        stock = stock.new_empty(0) if states is None else {DELAYED: _describe(module, states)}
    condition = _condition(module)[0]
    return stock if condition is None else {condition: stock}


def _describe(module: nn.Module, states: dict[str, Any]) -> dict[str, Any]:
    """Copies of delayed scaling's tensors, and what it takes to make such state anew."""
    described: dict[str, Any] = {"recipe": _te.describe_delayed_recipe(module)}
    for key, state in states.items():
        for name in ("scale", "amax_history"):
            described[f"{key}.{name}"] = getattr(state, name).detach().clone().as_subclass(_NotForDcp)
    return described


def unguard(module: nn.Module, state: Any) -> Any:
    """What of a loaded value TE's own ``set_extra_state`` gets; delayed scaling's state is taken back here.

    Local operation.

    Raises:
        CheckpointError: The value was saved under a condition that does not hold here, or under none where
            one is due; or it is another module's state.
    """
    saved, stock = None, None if _torch.is_absent_extra_state(state) else state
    if isinstance(state, dict) and len(state) == 1 and DELAYED not in state:
        saved, stock = next(iter(state.items()))
    if binding_of(module) is not None or saved is not None:
        _check_condition(module, saved)
    if isinstance(stock, dict) and DELAYED in stock:
        _restore(module, stock[DELAYED])
        return None  # nothing is left for TE
    return stock


def _check_condition(module: nn.Module, saved: str | None) -> None:
    condition, rows, cut = _condition(module)
    # Rows that are not stacked, or not cut, are those of any module; high-precision ones fit quantized weights.
    if saved in (condition, rows) or (saved is None and not cut):
        return
    raise CheckpointError(
        message(
            f"{_label(module)}: weights of a plain state dict",
            expected=condition or "no condition",
            got=saved or "no condition (an unsharded module)",
            why="Its rows or blocks lie otherwise than here, and would be scrambled",
            fix="save and load with te_fsdp.checkpoint, which fits any mesh",
        )
    )


def _restore(module: nn.Module, saved: dict[str, Any]) -> None:
    """Write delayed scaling's state into the module's live tensors, made where there are none."""
    present = _te.delayed_states(module)
    for key, state in (present or {}).items():
        have, got = tuple(state.scale.shape), tuple(saved[f"{key}.scale"].shape)
        if have != got:
            raise CheckpointError(
                message(
                    f"{_label(module)}: delayed scaling's {key} of a state dict",
                    expected=f"scales of shape {have}",
                    got=got,
                    fix="load the state dict of a model of the same modules",
                )
            )
    for key, state in _te.make_delayed_states(module, saved["recipe"]).items():
        state.scale.copy_(saved[f"{key}.scale"])
        state.amax_history.copy_(saved[f"{key}.amax_history"])


def _condition(module: nn.Module) -> tuple[str | None, str | None, bool]:
    """On what loading this module's weights by plain DCP depends.

    Returns:
        The condition; that of the same rows in high precision; whether rows are stacked and cut, so that whole ones
        would not fit.
    """
    binding = binding_of(module)
    own = {n: p for n, p in module._parameters.items() if p is not None}
    if binding is None or not own:
        return None, None, False
    tp_size = binding.tp_mesh.size() if binding.tp_mesh is not None else 1
    stacked = any(binding.rules[n].layout.is_stacked for n in own if n in binding.rules)
    rows = f"rows stacked for tp={tp_size}, other tp sizes need te_fsdp.checkpoint" if stacked else None
    condition, cut = rows, stacked and tp_size > 1
    quantized = [n for n, p in own.items() if _te.is_quantized(_torch.local_of(p))]
    if quantized:
        at = shard_info(module, quantized[0], own[quantized[0]], label=_label(module)).at
        shards = f"quantized for tp={tp_size} and {at.fsdp_size} FSDP shard(s)"
        condition = f"{shards}, other meshes need te_fsdp.checkpoint"
    return condition, rows, cut


def _label(module: nn.Module) -> str:
    binding = binding_of(module)
    return binding.name if binding is not None and binding.name else type(module).__name__
