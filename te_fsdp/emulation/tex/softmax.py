"""Scaled softmax kernels of unfused attention: ``common/fused_softmax/*.cu``.

Math in fp32, result in the input dtype, always a new tensor (TransformerEngine wraps these in custom operators, which
must not return their inputs). The forward kernels take the scale factor in the input dtype, the backward ones in fp32,
as recorded on an H200. Shapes are (batch, heads, queries, keys) unless said otherwise.
"""

from __future__ import annotations

import torch

#: Score that the masked kernel writes for masked keys. A row with this maximum results in zeros.
MASKED = -10000.0


def _scaled(input: torch.Tensor, scale_factor: float) -> torch.Tensor:
    """Return the fp32 scores, from the scale factor as the forward kernel sees it."""
    return input.float() * torch.tensor(scale_factor, dtype=input.dtype).float()


def _softmax(scores: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return torch.softmax(scores, dim=-1).to(dtype)


def _backward(output_grads: torch.Tensor, softmax_results: torch.Tensor, scale_factor: float) -> torch.Tensor:
    probabilities = softmax_results.float()
    weighted = output_grads.float() * probabilities
    result = scale_factor * (weighted - probabilities * weighted.sum(-1, keepdim=True))
    return result.to(output_grads.dtype)


def scaled_softmax_forward(input: torch.Tensor, scale_factor: float) -> torch.Tensor:
    """Return the softmax of ``scale_factor * input`` over the last dim."""
    return _softmax(_scaled(input, scale_factor), input.dtype)


def scaled_masked_softmax_forward(
    input: torch.Tensor, mask: torch.Tensor, scale_factor: float
) -> torch.Tensor:
    """Return the softmax with ``mask`` (1 or batch, 1, queries, keys). Fully masked rows are 0."""
    scores = _scaled(input, scale_factor).masked_fill(mask.bool(), MASKED)
    empty = scores.amax(-1, keepdim=True) == MASKED
    return torch.softmax(scores, dim=-1).masked_fill(empty, 0.0).to(input.dtype)


def scaled_upper_triang_masked_softmax_forward(input: torch.Tensor, scale_factor: float) -> torch.Tensor:
    """Return the causal softmax of square scores (batch, n, n): query i sees keys 0..i."""
    keep = torch.ones(input.shape[-2:], dtype=torch.bool, device=input.device).tril()
    return _softmax(_scaled(input, scale_factor).masked_fill(~keep, float("-inf")), input.dtype)


def scaled_aligned_causal_masked_softmax_forward(input: torch.Tensor, scale_factor: float) -> torch.Tensor:
    """Return the bottom-right causal softmax: query i sees keys 0..i + keys - queries. Empty rows are 0."""
    queries, keys = input.shape[-2:]
    keep = torch.ones(queries, keys, dtype=torch.bool, device=input.device).tril(keys - queries)
    result = torch.softmax(_scaled(input, scale_factor).masked_fill(~keep, float("-inf")), dim=-1)
    return result.masked_fill(~keep, 0.0).to(input.dtype)


def scaled_softmax_backward(
    output_grads: torch.Tensor, softmax_results: torch.Tensor, scale_factor: float
) -> torch.Tensor:
    """Return the gradient of the scores, ``scale * (g * p - p * sum(g * p))``, from the softmax's results."""
    return _backward(output_grads, softmax_results, scale_factor)


def scaled_masked_softmax_backward(
    output_grads: torch.Tensor, softmax_results: torch.Tensor, scale_factor: float
) -> torch.Tensor:
    """Run :func:`scaled_softmax_backward`. Masked positions have probability 0 and gradient 0."""
    return _backward(output_grads, softmax_results, scale_factor)


def scaled_upper_triang_masked_softmax_backward(
    output_grads: torch.Tensor, softmax_results: torch.Tensor, scale_factor: float
) -> torch.Tensor:
    """Run :func:`scaled_softmax_backward`."""
    return _backward(output_grads, softmax_results, scale_factor)


def scaled_aligned_causal_masked_softmax_backward(
    output_grads: torch.Tensor, softmax_results: torch.Tensor, scale_factor: float
) -> torch.Tensor:
    """Run :func:`scaled_softmax_backward`."""
    return _backward(output_grads, softmax_results, scale_factor)


__all__ = [
    "scaled_aligned_causal_masked_softmax_backward",
    "scaled_aligned_causal_masked_softmax_forward",
    "scaled_masked_softmax_backward",
    "scaled_masked_softmax_forward",
    "scaled_softmax_backward",
    "scaled_softmax_forward",
    "scaled_upper_triang_masked_softmax_backward",
    "scaled_upper_triang_masked_softmax_forward",
]
