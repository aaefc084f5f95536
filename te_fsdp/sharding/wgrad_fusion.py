"""Weight gradients that TE's products add up where FSDP2 looks for them (TE's ``fuse_wgrad_accumulation``).

With the option TE's GEMM writes a weight's gradient to ``weight.main_grad``, or adds it to what is there, and gives
autograd none. FSDP2 would then reduce nothing, without an error. But FSDP2 itself keeps a whole gradient between
backwards that do not reduce, and reduces what it finds there: TE is handed that one, made anew when it is asked for.
Checked on torch 2.11 and 2.13 (``FSDPParam.unsharded_accumulated_grad``), read on 2.15 (the gathered parameter's
``grad``).

TE 2.18 to 2.20 asks weights that have ``__fsdp_param__`` for ``get_main_grad()`` during backward. Whether to overwrite
what it gets there TE takes from ``weight.overwrite_main_grad`` in forward, but looks at that in backward alone, right
before the product: it is an object that knows by then (``__bool__``).
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING, Any

import torch

from te_fsdp import _fsdp2, _te, _torch
from te_fsdp.errors import PlacementError

if TYPE_CHECKING:
    from torch import nn

    from te_fsdp.quantized.shards import Key
    from te_fsdp.sharding.state import ShardingState

#: Weights of the modules whose option is served. GroupedLinear's is still refused.
_WEIGHTS = {
    "Linear": ("weight",),
    "LayerNormLinear": ("weight",),
    "LayerNormMLP": ("fc1_weight", "fc2_weight"),
}


@contextlib.contextmanager
def wgrad_fusion_set_aside(model: nn.Module) -> Iterator[list[nn.Module]]:
    """Without the option while the model is bound, which refuses it: FSDP2 alone would lose gradients. Local operation.

    Yields:
        The modules that have it, and get it back at the end.
    """
    fused = [m for m in model.modules() if getattr(m, "fuse_wgrad_accumulation", False) and _is_served(m)]
    for module in fused:
        module.fuse_wgrad_accumulation = False  # type: ignore[assignment]
    try:
        yield fused
    finally:
        for module in fused:
            module.fuse_wgrad_accumulation = True  # type: ignore[assignment]


def _weights_of(module: nn.Module) -> tuple[str, ...]:
    return _WEIGHTS.get(_te.kind_of(module) or "", ())


def _is_served(module: nn.Module) -> bool:
    """Whether TE reads the parameters themselves: split ones it concatenates first."""
    names = _weights_of(module)
    return bool(names) and all(module._parameters.get(name) is not None for name in names)


def refuse_whole(fused: list[nn.Module], replicated: Collection[Key], model: nn.Module) -> None:
    """Raise for a fused module whose weights FSDP2 does not reduce. Local operation, the same on all ranks.

    Raises:
        PlacementError: Names the module.
    """
    names = {id(module): name for name, module in model.named_modules()}
    for module in fused:
        for weight in _weights_of(module):
            if (id(module), weight) in replicated:
                raise PlacementError(
                    f"{names[id(module)]}.{weight}: fuse_wgrad_accumulation=True of a weight that is not sharded",
                    why="TE gives no gradient that could be reduced",
                    fix="leave fuse_wgrad_accumulation off, or the module out of no_shard",
                )


def fuse_wgrad(state: ShardingState, fused: list[nn.Module]) -> None:
    """Let TE accumulate the weight gradients of ``fused`` where FSDP2 finds them. Local operation."""
    if not fused:
        return
    records = {}
    for unit in state.modules.values():
        for managed, group in _fsdp2.records_of(unit):
            for owner, name in _torch.owners_of(managed):
                records[id(owner), name] = _Buffer(managed, group)
    holder: list[weakref.ref[torch.Tensor]] = []
    for module in fused:
        buffers = {name: records[id(module), name] for name in _weights_of(module)}
        module.register_forward_pre_hook(_torch.untraced(functools.partial(_before_forward, buffers, holder)))


class _Buffer:
    """Where FSDP2 looks for one parameter's gradient. True while what is there is to be overwritten."""

    def __init__(self, managed: Any, group: Any) -> None:
        self.managed, self.group = weakref.ref(managed), weakref.ref(group)
        self._is_new = self._was_asked = False

    def __bool__(self) -> bool:
        if _torch.backward_id() < 0:
            return False  # nobody knows in forward: TE has to add, to zeros
        self._was_asked = True
        return self._is_new

    def tensor(self) -> torch.Tensor:
        """The local buffer, to be overwritten where nothing was accumulated. Local operation."""
        managed, group = self.managed(), self.group()
        assert managed is not None and group is not None
        self._is_new = _fsdp2.accumulated(managed) is None
        found = _fsdp2.accumulated_gradient(managed, group)
        if self._is_new and not self._was_asked:
            found.zero_()  # a TE that does not ask adds to it: the first time nobody knows
        return found


def _before_forward(
    buffers: dict[str, _Buffer], holder: list[weakref.ref[torch.Tensor]], module: nn.Module, args: Any
) -> None:
    """After FSDP2 has gathered: the tensors that TE will see say where their gradients go."""
    for name, buffer in buffers.items():
        local: Any = _torch.local_of(module._parameters[name])  # type: ignore[arg-type]
        if not hasattr(local, "__fsdp_param__"):
            local.__fsdp_param__, local.overwrite_main_grad = True, buffer
            local.get_main_grad = functools.partial(_main_grad, buffer, holder, weakref.ref(local))


def _main_grad(
    buffer: _Buffer, holder: list[weakref.ref[torch.Tensor]], weight: weakref.ref[torch.Tensor]
) -> torch.Tensor:
    """The buffer, for TE. TE keeps it as an attribute of the weight: that of the weight before is dropped here."""
    for earlier in holder:
        tensor = earlier()
        if tensor is not None:
            tensor.__dict__.pop("main_grad", None)
    holder[:] = [weight]
    return buffer.tensor()
