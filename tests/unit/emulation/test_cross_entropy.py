"""Compare TransformerEngine's cross entropy in one process with torch's. ``test_distributed.py`` tests two ranks."""

import pytest
import torch
from torch.nn import functional

from tests.unit.emulation import reference as ref


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("reduced", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_cross_entropy_loss_and_gradient_match_torch(te, dtype, reduced, smoothing):
    """Cover mean and per-row losses, smoothed labels and ignored targets."""
    logits = (3 * torch.randn(2, 6, 40)).to(dtype).requires_grad_()
    target = torch.randint(0, 40, (2, 6))
    target[0, 2] = target[1, 5] = -100
    exact = logits.detach().double().requires_grad_()
    arguments = {"label_smoothing": smoothing, "reduction": "mean" if reduced else "none"}
    expected = functional.cross_entropy(exact.flatten(0, 1), target.flatten(), **arguments)
    loss = te.parallel_cross_entropy(logits, target, smoothing, reduced)
    assert loss.dtype == torch.float32 and loss.numel() == expected.numel()
    assert ref.distance(loss.flatten(), expected.flatten()) <= 16 * ref.FP32_UNIT
    weights = torch.rand(loss.shape)
    (loss * weights).sum().backward()
    (expected * weights.flatten()).sum().backward()
    # the gradient is rounded once to the dtype of the logits
    assert ref.distance(logits.grad, exact.grad) <= (2**-8 if dtype == torch.bfloat16 else 32 * ref.FP32_UNIT)
    assert not logits.grad[0, 2].any() and logits.grad[0, 1].any()
