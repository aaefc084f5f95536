"""Check of the loss over a column-parallel head: it must not normalize over one rank's part of the outputs."""

# [Note: losses of a part of the logits] Each rank of tp has the logits of its part of the classes. A plain
# ``cross_entropy`` of them is a softmax over these classes only: a different loss, without an error while all
# labels are small.
#
# [Note: gradients of a softmax] The gradient of a softmax sums to zero over the classes that it normalizes.
# So a plain loss gives every token, on every rank, a gradient of the rank's logits that sums to zero. A
# vocabulary-parallel loss gives that on no rank without the token's label: there all elements have one sign.
# The ratio of the sum to the sum of magnitudes separates the two cases, 0 from 1.

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from te_fsdp.collectives.rendezvous import is_capturing, is_simulated
from te_fsdp.errors import GradientError
from te_fsdp.records import MODULE, ModuleRecord, binding_of, module_record
from te_fsdp.upstream import te as _te, torch_dtensor as _torch

if TYPE_CHECKING:
    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh

    from te_fsdp.sharded_model import ShardedModel

# Backwards with a gradient that are checked.
_BACKWARDS = 2
# Rows of a gradient that are checked. One row with a gradient decides.
_ROWS = 64
# Largest sum of a row relative to its magnitudes that counts as zero. Rounding to bf16 causes at most 1/256.
_ZERO = 1 / 128


def watch_head_gradients(state: ShardedModel) -> None:
    """Check the gradients of column-parallel outputs that no other TE module reads, in the first backwards. Local.

    Such a backward becomes collective over tp: one max all-reduce of two numbers.
    """
    if (tp := state.meshes.tp_or_none) is not None:
        _watch(state.model, tp, every=state.checks.level == "full")


def watch_head_gradients_of_bound(model: nn.Module, tp_mesh: DeviceMesh | None) -> None:
    """Check them in a bound model, or without ``tp_mesh`` no longer, unless it is a TE module. Local operation."""
    for module in model.modules():
        record: ModuleRecord | None = module.__dict__.get(MODULE)
        if record is not None and (check := record.checks.pop(_HeadGradientCheck, None)) is not None:
            check.stop()
    if tp_mesh is not None and tp_mesh.size() > 1 and _te.kind_of(model) is None:
        module_record(model).checks[_HeadGradientCheck] = _watch(model, tp_mesh)


def _watch(model: nn.Module, tp: DeviceMesh, *, every: bool = False) -> _HeadGradientCheck:
    """Register the hooks of a check on a model's outermost TE modules, if a head is among them."""
    check, outermost = _HeadGradientCheck(tp, every), dict(_outermost_te_modules(model))
    heads = {
        name
        for name, module in outermost.items()
        if binding_of(module) is not None
        and _te.kind_of(module) in ("Linear", "LayerNormLinear")
        and getattr(module, "parallel_mode", None) == "column"
    }
    # Only a column-parallel layer at the end has an output of which each tp rank computes a part.
    if heads and not is_simulated():
        for name, module in outermost.items():
            check.handles.append(module.register_forward_hook(check.hook(name, name in heads)))
    return check


def _outermost_te_modules(module: nn.Module, name: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yield the TE modules below a module that are not part of another TE module, with their names."""
    if _te.kind_of(module) is not None:
        yield name, module
        return
    for child, inner in module.named_children():
        yield from _outermost_te_modules(inner, f"{name}.{child}".lstrip("."))


class _HeadGradientCheck:
    """State of the check of one model."""

    def __init__(self, tp: DeviceMesh, every: bool) -> None:
        self.tp, self._left = tp, -1 if every else _BACKWARDS
        self.handles: list[Any] = []
        #: Number of executed TE modules that are not heads. An output that one of them may read is not a model's.
        self._others = 0

    def __deepcopy__(self, memo: dict[int, Any]) -> _HeadGradientCheck:
        """Share the mesh with the copy, because process groups cannot be copied."""
        return _HeadGradientCheck(self.tp, self._left < 0)

    def stop(self) -> None:
        """Remove all hooks. Local operation."""
        self._left = 0
        while self.handles:
            self.handles.pop().remove()

    def hook(self, name: str, is_head: bool) -> Callable[..., None]:
        """Return a forward hook that counts a module, or that registers the check on a head's output."""

        def after(module: nn.Module, args: Any, output: Any) -> None:
            if not is_head:
                self._others += 1
                return
            # TE returns (output, bias) with return_bias.
            logits = output[0] if isinstance(output, tuple) else output
            if isinstance(logits, torch.Tensor) and logits.requires_grad and not is_capturing():
                logits.register_hook(functools.partial(self._check, name, self._others))

        return _torch.disable_compile(after)

    @torch.no_grad()
    def _check(self, name: str, others: int, gradient: torch.Tensor) -> None:
        """Raise ``GradientError`` if the gradient is that of a softmax over one rank's outputs. Collective over tp."""
        if self._left == 0 or others != self._others or gradient.numel() == 0 or is_capturing():
            return
        rows = gradient.flatten(0, -2)
        # Evenly spread rows: the labels of the first ones may all be ignored.
        rows = rows[:: max(len(rows) // _ROWS, 1)].float()
        magnitudes = rows.abs().sum(-1)
        has_gradient = magnitudes > 0
        ratios = torch.where(has_gradient, rows.sum(-1).abs() / magnitudes, 0).nan_to_num(nan=1.0)
        # A rank whose classes have no probability at all does not decide: its gradient is zero.
        found = torch.stack([ratios.amax(), 1 - has_gradient.any().float()])
        dist.all_reduce(found, dist.ReduceOp.MAX, group=self.tp.get_group())
        ratio, is_undecided = found.tolist()
        if is_undecided:
            return
        if ratio < _ZERO:
            raise GradientError(
                f"{name or 'the model'}: a loss over one rank's part of the outputs",
                expected=f"a loss over the outputs of all {self.tp.size()} ranks of tp: the module is column-parallel",
                got="gradients that sum to zero over each rank's outputs, as the gradients of a softmax do",
                why="Each rank normalizes over its own classes, which gives a different loss",
                fix="compute the loss of DTensors inside torch.distributed.tensor.parallel.loss_parallel "
                "(docs/train.md), or with transformer_engine.pytorch.parallel_cross_entropy; or gather the outputs "
                "over tp before the loss. If this is intended, pass checks='setup' to fully_shard, or "
                "check_inputs=False to set_device_mesh",
            )
        self._left -= self._left > 0
        if self._left == 0:
            self.stop()
