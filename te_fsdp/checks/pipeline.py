"""Checks of a pipeline's stage: its first backward is not split into one for inputs and one for weights."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch

from te_fsdp.errors import OrderError
from te_fsdp.upstream import fsdp2_state as _fsdp2, te as _te, torch_dtensor as _torch
from te_fsdp.upstream.torch_autograd import graph_nodes

if TYPE_CHECKING:
    from torch import nn

    from te_fsdp.sharded_model import ShardedModel


def refuse_split_backward(state: ShardedModel) -> None:
    """Refuse, at the first backward of a pipeline's stage, a schedule that splits backward. Local operation."""
    # Zero-bubble schedules compute gradients of a stage's inputs first, and those of its weights in a second
    # backward through the same graph. Modules of TransformerEngine compute both at once and free the saved
    # tensors.
    if state.meshes.pp is None or not any(_te.kind_of(module) for module in state.model.modules()):
        return
    handles: list[Any] = []

    def refuse_split(leaf: Any, gradient: torch.Tensor) -> None:
        if _fsdp2.defers_leaf_gradient(leaf):
            raise OrderError(
                "a backward only for the inputs of a pipeline stage, before a separate one for its weights",
                expected="one backward for both, as in TransformerEngine's modules",
                got="a schedule that splits backward (zero bubble)",
                fix="use PipelineStage(..., dw_builder=lambda: lambda: None), which computes both in the first, or a "
                "schedule that does not split, such as Schedule1F1B or ScheduleInterleaved1F1B",
            )
        while handles:
            handles.pop().remove()

    def watch(module: nn.Module, args: Any, output: Any) -> None:
        for tensor in _torch.flatten(output)[0]:
            nodes = graph_nodes(tensor.grad_fn) if isinstance(tensor, torch.Tensor) else ()
            # The nearest parameter is enough: a split backward leaves out all of them.
            leaf = next(
                (n for n in nodes if isinstance(getattr(n, "variable", None), torch.nn.Parameter)), None
            )
            if leaf is not None:
                tensor.register_hook(functools.partial(refuse_split, leaf))

    handles.append(state.model.register_forward_hook(_torch.disable_compile(watch)))
