"""Bodies: reads of `.grad` after a backward, before the step."""

from __future__ import annotations

import copy
import io
import re
from collections.abc import Callable
from typing import Any

import harness
import pytest
import torch

from hfsdp.overlap import CLOSE, Pair


def _save(p: torch.Tensor) -> None:
    torch.save(p.grad, io.BytesIO())


#: Operations on a parameter with a gradient that raise.
READERS: dict[str, Callable[[Any], Any]] = {
    "clip_grad_norm_": lambda p: torch.nn.utils.clip_grad_norm_([p], 1.0, foreach=False),
    "clip_grad_norm_, foreach": lambda p: torch.nn.utils.clip_grad_norm_([p], 1.0, foreach=True),
    "get_total_norm": lambda p: torch.nn.utils.get_total_norm([p.grad]),
    "clip_grad_value_": lambda p: torch.nn.utils.clip_grad_value_([p], 1.0, foreach=False),
    "clip_grad_value_, foreach": lambda p: torch.nn.utils.clip_grad_value_([p], 1.0, foreach=True),
    "a loss scaler": lambda p: _unscale([p]),
    "norm": lambda p: p.grad.norm(),
    "isfinite": lambda p: torch.isfinite(p.grad).all(),
    "to_local": lambda p: p.grad.to_local(),
    "full_tensor": lambda p: p.grad.full_tensor(),
    "redistribute": lambda p: p.grad.redistribute(placements=p.grad.placements),
    "clone": lambda p: p.grad.clone(),
    "detach and clone": lambda p: p.grad.detach().clone(),
    "data": lambda p: p.grad.data.sum(),
    "item": lambda p: p.grad[0, 0].item(),
    "index": lambda p: p.grad[0],
    "sum of two": lambda p: p.grad + p.grad,
    "sum in place": lambda p: p.grad.add_(1.0),
    "factors by element": lambda p: p.grad.mul_(torch.ones_like(p)),
    "cast": lambda p: p.grad.to(torch.float64),
    "deepcopy": lambda p: copy.deepcopy(p.grad),
    "torch.save": _save,
}
#: Operations with the same result before and after an average.
HARMLESS: dict[str, Callable[[Any], Any]] = {
    "shape": lambda p: (p.grad.shape, p.grad.dtype, p.grad.device, p.grad.numel(), repr(p.grad)),
    "half": lambda p: p.grad.mul_(0.5),
    "a tensor of one element": lambda p: p.grad.mul_(torch.tensor(2.0, device=harness.device())),
    "over": lambda p: p.grad.div_(2),
    "foreach": lambda p: torch._foreach_mul_([p.grad], 2.0),
    "zeros": lambda p: torch.optim.SGD([p], lr=0.1).zero_grad(set_to_none=False),
}


def _unscale(parameters: list[torch.Tensor]) -> None:
    scaler = torch.amp.GradScaler(harness.device_type())
    scaler.scale(torch.ones((), device=harness.device()))
    scaler.unscale_(torch.optim.SGD(parameters, lr=0.1))


def errors_of_reads(marked: bool) -> dict[str, list[str]]:
    """Check that after a backward each reader raises on each rank, before and after a step; gradients stay as they are.

    Returns:
        ``read``: calls that have read something; ``harmful``: what raised though it is harmless; ``texts``: of the
        errors.
    """
    import te_fsdp
    from te_fsdp.upstream.torch_dtensor import local_of

    pair = Pair()
    results: dict[str, list[str]] = {"read": [], "harmful": [], "texts": []}

    def read_in_hook(parameter: Any) -> None:
        try:
            results["read"].append(f"in a hook {parameter.grad.norm()}")
        except te_fsdp.OrderError:
            parameter.seen = True

    for parameter in pair.model.parameters():
        parameter.register_post_accumulate_grad_hook(read_in_hook)
    for seed in (1, 2):
        pair.backward(seed, marked=marked)
        pair.expect(seed)
        for when in ("before", "after"):
            for name, parameter in pair.model.named_parameters():
                with pytest.raises(te_fsdp.OrderError, match=f"norm on the gradient of {re.escape(name)}: "):
                    parameter.grad.norm()
                if parameter.ndim > 1:
                    kept = local_of(parameter.grad).clone()
                    for reader, read in READERS.items():
                        try:
                            read(parameter)
                            results["read"].append(f"{reader} {when} step {seed}")
                        except te_fsdp.OrderError as error:
                            results["texts"].append(str(error))
                    harness.assert_bitwise_equal(name, local_of(parameter.grad), kept)
            if when == "before":
                _step_and_keep(pair)
        for parameter in pair.model.parameters():
            for reader, read in HARMLESS.items():
                try:
                    read(parameter)
                except te_fsdp.OrderError as error:
                    results["harmful"].append(f"{reader}: {error}")
            assert not local_of(parameter.grad).any()
        pair.optimizer.zero_grad()
    assert all(parameter.seen for parameter in pair.model.parameters())
    pair.checks.require(12)
    return results


def _step_and_keep(pair: Pair) -> None:
    """Step, and keep the gradients."""
    pair.optimizer.step()
    pair.other.step()
    pair.other.zero_grad()
    for name, parameter in pair.reference.named_parameters():
        pair.checks.close(name, harness.full(pair.model.get_parameter(name)), parameter, **CLOSE)
