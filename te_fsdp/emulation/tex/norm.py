"""Normalization: ``pytorch/csrc/extensions/normalization.cpp``, ``common/normalization``.

Everything is computed in fp32 from the stored inputs; statistics are kept in fp32, one per row.
"""

from __future__ import annotations

from typing import Any

import torch

from te_fsdp.emulation._errors import EmulationError
from te_fsdp.emulation.tex import fused
from te_fsdp.emulation.tex.enums import DType, to_torch_dtype


def _gamma(weight: torch.Tensor, zero_centered: bool) -> torch.Tensor:
    gamma = weight.detach().float()
    return gamma + 1.0 if zero_centered else gamma


def _check(quantizer: Any) -> None:
    if fused.kind(quantizer) == "Float8Quantizer" and int(quantizer.dtype) != int(DType.kFloat8E4M3):
        raise EmulationError("normalization fused with delayed scaling writes E4M3 only: no kernel for E5M2")


def _plain(tensor: Any) -> torch.Tensor:
    return (
        tensor.dequantize() if hasattr(tensor, "dequantize") and hasattr(tensor, "get_metadata") else tensor
    )


def _rows(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().float().reshape(-1, tensor.shape[-1])


def layernorm_fwd(
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    eps: float,
    ln_out: Any,
    quantizer: Any,
    otype: Any,
    sm_margin: int,
    zero_centered_gamma: bool,
) -> list[Any]:
    """Return ``gamma * (x - mean) / sqrt(var + eps) + beta`` over the last dim.

    Returns:
        ``[output (quantized if asked), mean fp32 (rows,), 1 / sqrt(var + eps) fp32 (rows,)]``.
    """
    del sm_margin
    _check(quantizer)
    x = _rows(_plain(input))
    mu = x.mean(-1)
    centered = x - mu[:, None]
    rsigma = torch.rsqrt(centered.square().mean(-1) + eps)
    value = _gamma(weight, zero_centered_gamma) * (rsigma[:, None] * centered)
    if bias is not None:
        value = value + bias.detach().float()
    out = fused.finish(value.reshape(input.shape), to_torch_dtype(otype), quantizer, ln_out)
    return [out, mu, rsigma]


def rmsnorm_fwd(
    input: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    ln_out: Any,
    quantizer: Any,
    otype: Any,
    sm_margin: int,
    zero_centered_gamma: bool,
) -> list[Any]:
    """Return ``gamma * x / sqrt(mean(x^2) + eps)`` over the last dim.

    Returns:
        ``[output (quantized if asked), None, 1 / sqrt(mean(x^2) + eps) fp32 (rows,)]``.
    """
    del sm_margin
    _check(quantizer)
    x = _rows(_plain(input))
    rsigma = torch.rsqrt(x.square().mean(-1) + eps)
    value = _gamma(weight, zero_centered_gamma) * (rsigma[:, None] * x)
    out = fused.finish(value.reshape(input.shape), to_torch_dtype(otype), quantizer, ln_out)
    return [out, None, rsigma]


def _backward(
    dz: torch.Tensor, normalized: torch.Tensor, rsigma: torch.Tensor, gamma: torch.Tensor, centered: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the fp32 gradients of the input and of gamma, from the normalized input (rows, H)."""
    dy = dz * gamma
    dx = dy - normalized * (dy * normalized).mean(-1, keepdim=True)
    if centered:
        dx = dx - dy.mean(-1, keepdim=True)
    return rsigma.reshape(-1, 1) * dx, (dz * normalized).sum(0)


def layernorm_bwd(
    dz: torch.Tensor,
    x: torch.Tensor,
    mu: torch.Tensor,
    rsigma: torch.Tensor,
    gamma: torch.Tensor,
    sm_margin: int,
    zero_centered_gamma: bool,
) -> list[torch.Tensor]:
    """Return the backward of :func:`layernorm_fwd`: ``[dx, dgamma, dbeta]`` in the dtypes of x and gamma."""
    del sm_margin
    normalized = rsigma.reshape(-1, 1) * (_rows(x) - mu.reshape(-1, 1))
    grad = _rows(dz)
    dx, dgamma = _backward(grad, normalized, rsigma, _gamma(gamma, zero_centered_gamma), centered=True)
    return [dx.to(x.dtype).reshape(x.shape), dgamma.to(gamma.dtype), grad.sum(0).to(gamma.dtype)]


def rmsnorm_bwd(
    dz: torch.Tensor,
    x: torch.Tensor,
    rsigma: torch.Tensor,
    gamma: torch.Tensor,
    sm_margin: int,
    zero_centered_gamma: bool,
) -> list[torch.Tensor]:
    """Return the backward of :func:`rmsnorm_fwd`: ``[dx, dgamma]`` in the dtypes of x and gamma."""
    del sm_margin
    normalized = rsigma.reshape(-1, 1) * _rows(x)
    dx, dgamma = _backward(_rows(dz), normalized, rsigma, _gamma(gamma, zero_centered_gamma), centered=False)
    return [dx.to(x.dtype).reshape(x.shape), dgamma.to(gamma.dtype)]


def rmsnorm_bwd_add(
    dz: torch.Tensor,
    x: torch.Tensor,
    add: torch.Tensor,
    rsigma: torch.Tensor,
    gamma: torch.Tensor,
    sm_margin: int,
    zero_centered_gamma: bool,
) -> list[torch.Tensor]:
    """Run :func:`rmsnorm_bwd` plus ``add`` on the input gradient, rounded once: ``[dx, dgamma]``."""
    del sm_margin
    normalized = rsigma.reshape(-1, 1) * _rows(x)
    dx, dgamma = _backward(_rows(dz), normalized, rsigma, _gamma(gamma, zero_centered_gamma), centered=False)
    return [(dx + _rows(add)).to(x.dtype).reshape(x.shape), dgamma.to(gamma.dtype)]


__all__ = ["layernorm_bwd", "layernorm_fwd", "rmsnorm_bwd", "rmsnorm_bwd_add", "rmsnorm_fwd"]
