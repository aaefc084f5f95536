"""Check that gradients that a node assigns to leaves equal autograd's for every use of a leaf."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from te_fsdp.upstream.torch_autograd import assign_to_leaves


class _Twice(torch.autograd.Function):
    """Multiply each tensor by 2."""

    assigns = True

    @staticmethod
    def forward(ctx: Any, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(tensor * 2 for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        results = [gradient * 2 for gradient in gradients]
        return tuple(assign_to_leaves(ctx, results) if _Twice.assigns else results)


def _plain(one: torch.Tensor, two: torch.Tensor) -> list[Any]:
    sum(_Twice.apply(one, two)).sum().backward()
    return []


def _again(one: torch.Tensor, two: torch.Tensor) -> list[Any]:
    """Run a second backward, which adds to the gradients, with one node that gets a leaf twice."""
    _plain(one, two)
    sum(_Twice.apply(one, one)).sum().backward()
    return []


def _hooks(one: torch.Tensor, two: torch.Tensor) -> list[Any]:
    seen = list[Any]()
    one.register_hook(lambda gradient: gradient * 3)
    two.register_post_accumulate_grad_hook(lambda leaf: seen.append(leaf.grad.clone()))
    _plain(one, two)
    return seen


def _returned(one: torch.Tensor, two: torch.Tensor) -> list[Any]:
    return list(torch.autograd.grad(sum(_Twice.apply(one, two)).sum(), [two]))


def _some(one: torch.Tensor, two: torch.Tensor) -> list[Any]:
    sum(_Twice.apply(one, two)).sum().backward(inputs=[two])
    return []


def _frozen(one: torch.Tensor, two: torch.Tensor) -> list[Any]:
    two.requires_grad_(False)
    return _plain(one, two)


def _frozen_later(one: torch.Tensor, two: torch.Tensor) -> list[Any]:
    """Freeze a leaf between forward and backward."""
    total = sum(_Twice.apply(one, two)).sum()
    two.requires_grad_(False)
    total.backward()
    return []


def _derived(one: torch.Tensor, two: torch.Tensor) -> list[Any]:
    """Return a tensor that is not a leaf, and a graph of the gradients."""
    sum(_Twice.apply(one * 3, two)).sum().backward(create_graph=True)
    return [one.grad.requires_grad if one.grad is not None else None]


@pytest.mark.filterwarnings("ignore:Using backward:UserWarning")
@pytest.mark.parametrize("use", [_plain, _again, _hooks, _returned, _some, _frozen, _frozen_later, _derived])
def test_assigned_leaf_gradients_equal_autograd(
    monkeypatch: pytest.MonkeyPatch, use: Callable[..., list[Any]]
) -> None:
    outcomes = []
    for assigns in (True, False):
        monkeypatch.setattr(_Twice, "assigns", assigns)
        leaves = [torch.full((2, 3), float(number), requires_grad=True) for number in (1, 2)]
        results = use(*leaves)
        outcomes.append([*results, *[leaf.grad for leaf in leaves]])
    for actual, expected in zip(*outcomes, strict=True):
        assert torch.equal(actual, expected) if isinstance(expected, torch.Tensor) else actual is expected


def test_control_assigned_gradients_are_not_returned_to_autograd() -> None:
    """Control: without hooks or earlier gradients, nothing is returned to autograd."""
    left = list[Any]()

    class Seen(_Twice):
        @staticmethod
        def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
            left.extend(assign_to_leaves(ctx, [gradient * 2 for gradient in gradients]))
            return tuple(left)

    one, two = (torch.ones(2, requires_grad=True) for _ in range(2))
    sum(Seen.apply(one, two)).sum().backward()
    assert left == [None, None]
    assert one.grad is not None and one.grad.tolist() == [2.0, 2.0]
