"""Weight gradients that TransformerEngine accumulates itself (``fuse_wgrad_accumulation``)."""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import nn

from te_fsdp.apply_fully_shard import Setup
from te_fsdp.errors import PlacementError
from te_fsdp.layout import expert_index
from te_fsdp.lifecycle import runs_if
from te_fsdp.plan import ModelPlan
from te_fsdp.upstream import fsdp2_state as _fsdp2, fsdp2_units, te as _te, torch_dtensor as _torch
from te_fsdp.upstream.te_modules import keep_cast_weight

#: Weights of the modules that support ``fuse_wgrad_accumulation``, besides GroupedLinear with a weight per expert.
_FUSED_WEIGHTS = {
    "Linear": ("weight",),
    "LayerNormLinear": ("weight",),
    "LayerNormMLP": ("fc1_weight", "fc2_weight"),
}


@contextlib.contextmanager
def wgrad_fusion_disabled(model: nn.Module) -> Iterator[list[nn.Module]]:
    """Disable the option while the model is bound. Yield the modules that have it, and enable it again. Local."""
    # Binding refuses the option, because FSDP2 alone would lose gradients. Only modules whose parameters TE reads
    # directly are supported: TE concatenates split ones first.
    fused = [
        module
        for module in model.modules()
        if getattr(module, "fuse_wgrad_accumulation", False)
        and (names := _fused_weights(module))
        and all(module._parameters.get(name) is not None for name in names)
    ]
    for module in fused:
        module.fuse_wgrad_accumulation = False  # type: ignore[assignment]
    try:
        yield fused
    finally:
        for module in fused:
            module.fuse_wgrad_accumulation = True  # type: ignore[assignment]


def _fused_weights(module: nn.Module) -> tuple[str, ...]:
    """Return the names of a module's weights whose gradients TE accumulates."""
    kind = _te.kind_of(module) or ""
    # Not tested with TE's grouped tensors, as a parameter or in its GEMMs.
    if kind == "GroupedLinear" and not getattr(module, "use_grouped_tensor", False):
        # Under ep the names have global indices once the module is bound.
        return tuple(
            [n for n in module._parameters if n.startswith("weight") and expert_index(n) is not None]
        )
    return _FUSED_WEIGHTS.get(kind, ())


def refuse_fused(fused: list[nn.Module], plan: ModelPlan) -> None:
    """Raise for a fused module whose weights FSDP2 does not reduce. Local operation, the same on all ranks."""
    for module in fused:
        for weight in _fused_weights(module):
            row = plan.parameters[id(module), weight]
            if row.storage.is_replicated:
                raise PlacementError(
                    f"{row.label}: fuse_wgrad_accumulation=True of a weight that is not sharded",
                    expected="a weight that FSDP2 shards",
                    got=f"strategy {row.storage}",
                    why="TE returns no gradient that could be reduced",
                    fix="leave fuse_wgrad_accumulation off, or the module out of no_shard",
                )


@runs_if("fused")
def fuse_wgrad(setup: Setup) -> None:
    """Let TE accumulate the weight gradients of the fused modules where FSDP2 expects them. Local operation."""
    holders: list[_Holder] = []
    records = {
        (id(owner), name): (managed, group)
        for unit in setup.state.modules.values()
        for managed, group in _fsdp2.fsdp_params_of(unit)
        for owner, name in fsdp2_units.owners_of(managed)
    }
    for module in setup.fused:
        if _te.kind_of(module) == "LayerNormLinear":
            weight: Any = module._parameters["weight"]
            if not _te.is_quantized(_torch.local_of(weight)):
                keep_cast_weight(module)
        buffers = {n: _MainGradBuffer(*records[id(module), n], holders) for n in _fused_weights(module)}
        # TE evaluates one buffer to decide whether to overwrite, and then writes the gradients of all experts
        # in this way.
        if _te.kind_of(module) == "GroupedLinear":
            peers = list(buffers.values())
            for buffer in peers:
                buffer.peers = peers
        module.register_forward_pre_hook(
            _torch.disable_compile(functools.partial(_attach_main_grad_buffers, buffers))
        )


class _Holder(NamedTuple):
    """A weight that has a gradient buffer as an attribute, and the buffers of its module."""

    peers: list[_MainGradBuffer]
    weight: weakref.ref[torch.Tensor]


# [Note: main_grad under FSDP2] With the option TE's GEMM writes a weight's gradient to ``weight.main_grad``,
# or adds it to the values there. It returns none to autograd. FSDP2 would then reduce nothing, without an
# error. FSDP2 itself keeps an unsharded gradient between backwards that do not reduce, and reduces it later.
# TE gets that tensor, which is allocated on the first request. Checked on torch 2.11 and 2.13
# (``FSDPParam.unsharded_accumulated_grad``), read on 2.15 (``grad`` of the unsharded parameter).
def _attach_main_grad_buffers(buffers: dict[str, _MainGradBuffer], module: nn.Module, args: Any) -> None:
    """Attach the gradient buffers to the local tensors that TE will read. Runs after FSDP2's all-gather."""
    for name, buffer in buffers.items():
        local: Any = _torch.local_of(module._parameters[name])  # type: ignore[arg-type]
        # TE's protocol for Megatron-FSDP: TE calls ``get_main_grad`` for the memory to accumulate in. With
        # ``overwrite_main_grad`` it writes instead of adding.
        if not hasattr(local, "__fsdp_param__"):
            local.__fsdp_param__, local.overwrite_main_grad = True, buffer
            local.get_main_grad = functools.partial(buffer.tensor, weakref.ref(local))


# [Note: when TE decides to overwrite] TE 2.18 to 2.20 calls ``get_main_grad()`` during backward on weights
# that have ``__fsdp_param__``. TE reads whether to overwrite that tensor from ``weight.overwrite_main_grad``
# in forward, but evaluates the value only in backward, right before the GEMM. So the value is an object that
# decides then (``__bool__``). ``GroupedLinear`` evaluates that of its first weight, for all its weights, and after
# it has called ``get_main_grad()`` on each.
class _MainGradBuffer:
    """The tensor in which FSDP2 expects one parameter's gradient. True while TE must overwrite its values."""

    def __init__(self, managed: Any, group: Any, holders: list[_Holder]) -> None:
        self.managed, self.group = weakref.ref(managed), weakref.ref(group)
        self.is_new = self.was_asked = False
        self.peers: list[_MainGradBuffer] = [self]  # the buffers for which TE evaluates one of these objects
        self._holders = holders  # the weights of the model that keep a buffer as an attribute

    def __bool__(self) -> bool:
        if _torch.backward_id() < 0:
            return False  # unknown in forward: TE must add to zeros
        for peer in self.peers:
            peer.was_asked = True
        if all(peer.is_new for peer in self.peers):
            return True
        for peer in self.peers:  # TE adds to all of them
            if peer.is_new:
                peer.buffer().zero_()
        return False

    def buffer(self) -> torch.Tensor:
        """Return the local buffer, which is allocated on the first request. Local operation."""
        managed, group = self.managed(), self.group()
        assert managed is not None and group is not None
        return _fsdp2.find_unreduced_gradient(managed, group)

    def tensor(self, weight: weakref.ref[torch.Tensor]) -> torch.Tensor:
        """Return the local buffer for TE, which overwrites it if nothing was accumulated. Local operation."""
        # TE keeps it as an attribute of the weight. Drop the attributes of the previous weights, except those of the
        # same GroupedLinear, which TE sets together.
        for holder in self._holders:
            previous = holder.weight()
            if previous is not None and holder.peers is not self.peers:
                previous.__dict__.pop("main_grad", None)
        remaining = [h for h in self._holders if h.peers is self.peers and h.weight() is not weight()]
        self._holders[:] = [*remaining, _Holder(self.peers, weight)]
        self.is_new = _fsdp2.unreduced_gradient(self.managed()) is None
        buffer = self.buffer()
        if self.is_new and not self.was_asked:
            buffer.zero_()  # a TE version that does not evaluate the object adds to the buffer
        return buffer
