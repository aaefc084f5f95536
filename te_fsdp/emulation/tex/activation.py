"""Activations: ``pytorch/csrc/extensions/{activation,bias}.cpp``, formulas of ``common/util/math.h``.

Gated variants take ``[act half, linear half]`` along the last dim and give ``act(first) * second``. All math is fp32;
the order of rounding of the fused kernels is in ``fused.finish``. Block scaling has no fused kernel: computed,
rounded, then quantized.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from te_fsdp.emulation._errors import EmulationError
from te_fsdp.emulation.tex import fused

#: Slope of the logistic approximation of GELU ("quick GELU").
QUICK_GELU_ALPHA = 1.702


def gelu_value(x: torch.Tensor) -> torch.Tensor:
    """Return the tanh form of GELU, fp32."""
    return x * (0.5 + 0.5 * torch.tanh(x * (0.79788456 + 0.03567741 * x * x)))


def dgelu_value(x: torch.Tensor) -> torch.Tensor:
    """Return the derivative of :func:`gelu_value`, fp32."""
    tanh = torch.tanh(0.79788456 * x * (1.0 + 0.044715 * x * x))
    return 0.5 * x * ((1.0 - tanh * tanh) * (0.79788456 + 0.1070322243 * x * x)) + 0.5 * (1.0 + tanh)


def _quick(x: torch.Tensor, alpha: float = QUICK_GELU_ALPHA) -> torch.Tensor:
    return x * torch.sigmoid(alpha * x)


def _dquick(x: torch.Tensor, alpha: float = QUICK_GELU_ALPHA) -> torch.Tensor:
    s = torch.sigmoid(alpha * x)
    return alpha * x * (s * (1.0 - s)) + s


def _dsigmoid(x: torch.Tensor) -> torch.Tensor:
    s = torch.sigmoid(x)
    return s * (1.0 - s)


def _relu(x: torch.Tensor) -> torch.Tensor:
    return torch.fmax(x, x.new_zeros(()))


class _Activation(NamedTuple):
    value: Callable[[torch.Tensor], torch.Tensor]
    derivative: Callable[[torch.Tensor], torch.Tensor]


_ACTIVATIONS: dict[str, _Activation] = {
    "gelu": _Activation(gelu_value, dgelu_value),
    "qgelu": _Activation(_quick, _dquick),
    "relu": _Activation(_relu, lambda x: (x > 0).float()),
    "srelu": _Activation(lambda x: torch.where(x > 0, x * x, 0.0), lambda x: _relu(2.0 * x)),
    "silu": _Activation(lambda x: x * torch.sigmoid(x), lambda x: x * _dsigmoid(x) + torch.sigmoid(x)),
    "sigmoid": _Activation(torch.sigmoid, _dsigmoid),
}
#: Gated activation -> the activation of its first half.
_GATED = {
    "geglu": "gelu",
    "qgeglu": "qgelu",
    "reglu": "relu",
    "sreglu": "srelu",
    "swiglu": "silu",
    "glu": "sigmoid",
}


def _halves(input: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    first, second = input.detach().float().chunk(2, dim=-1)
    return first, second


def _finish(value: torch.Tensor, dtype: torch.dtype, quantizer: Any) -> Any:
    return fused.finish(value, dtype, quantizer, amax_of_fp32=True)


def _forward(name: str) -> Callable[..., Any]:
    def call(input: torch.Tensor, quantizer: Any) -> Any:
        if name in _GATED:
            first, second = _halves(input)
            value = _ACTIVATIONS[_GATED[name]].value(first) * second
        else:
            value = _ACTIVATIONS[name].value(input.detach().float())
        return _finish(value, input.dtype, quantizer)

    call.__name__ = call.__qualname__ = name
    call.__doc__ = (
        f"Forward of {name}; the last dim halves when it is gated. Quantized if a quantizer is given."
    )
    return call


def _gradient(name: str, grad: torch.Tensor, input: torch.Tensor) -> torch.Tensor:
    """Return the fp32 gradient of the input of activation ``name``."""
    dy = grad.detach().float()
    if name not in _GATED:
        return _ACTIVATIONS[name].derivative(input.detach().float()) * dy
    first, second = _halves(input)
    activation = _ACTIVATIONS[_GATED[name]]
    return torch.cat([activation.derivative(first) * dy * second, activation.value(first) * dy], dim=-1)


def _backward(name: str) -> Callable[..., Any]:
    def call(grad: torch.Tensor, fwd_input: torch.Tensor, quantizer: Any) -> Any:
        return _finish(_gradient(name, grad, fwd_input), fwd_input.dtype, quantizer)

    call.__name__ = call.__qualname__ = "d" + name
    call.__doc__ = f"Backward of {name}: gradient of its input, quantized if a quantizer is given."
    return call


def _dbias_backward(name: str) -> Callable[..., Any]:
    def call(grad: torch.Tensor, fwd_input: torch.Tensor, quantizer: Any) -> list[Any]:
        if quantizer is None:
            raise EmulationError(f"dbias_d{name}: the extension does not do it without a quantizer")
        value = _gradient(name, grad, fwd_input)
        rounded = value
        if fused.kind(quantizer) not in ("Float8Quantizer", "MXFP8Quantizer"):
            # The unfused kernels sum the gradient as it was stored; the fused ones sum what they hold in registers.
            rounded = value.to(grad.dtype).float()
        dbias = rounded.reshape(-1, value.shape[-1]).sum(0).to(grad.dtype)
        return [dbias, _finish(value, grad.dtype, quantizer)]

    call.__name__ = call.__qualname__ = "dbias_d" + name
    call.__doc__ = f"Bias gradient and backward of {name}: ``[dbias, gradient of the input]``."
    return call


def _clamp(x: torch.Tensor, low: float | None, high: float) -> torch.Tensor:
    """Clamp as with fmaxf and then fminf, which return the number if the other operand is NaN."""
    x = x if low is None else torch.fmax(x, x.new_tensor(low))
    return torch.fmin(x, x.new_tensor(high))


def clamped_swiglu(
    input: torch.Tensor,
    quantizer: Any,
    limit: float = 7.0,
    alpha: float = QUICK_GELU_ALPHA,
    glu_linear_offset: float = 1.0,
) -> Any:
    """Return the clamped SwiGLU: ``quick(min(first, limit), alpha) * (clamp(second, +-limit) + offset)``."""
    first, second = _halves(input)
    value = _quick(_clamp(first, None, limit), alpha) * (_clamp(second, -limit, limit) + glu_linear_offset)
    return _finish(value, input.dtype, quantizer)


def clamped_dswiglu(
    grad: torch.Tensor,
    fwd_input: torch.Tensor,
    quantizer: Any,
    limit: float = 7.0,
    alpha: float = QUICK_GELU_ALPHA,
    glu_linear_offset: float = 1.0,
) -> Any:
    """Return the backward of :func:`clamped_swiglu`; clamped values have no gradient."""
    first, second = _halves(fwd_input)
    dy = grad.detach().float()
    clamped = _clamp(first, None, limit)
    linear = _clamp(second, -limit, limit) + glu_linear_offset
    dfirst = torch.where(first <= limit, _dquick(clamped, alpha), 0.0) * dy * linear
    # The two kernels disagree about a value that sits exactly on the limit.
    inside = second.abs() <= limit if fused.kind(quantizer) == "MXFP8Quantizer" else second.abs() < limit
    dsecond = torch.where(inside, _quick(clamped, alpha) * dy, 0.0)
    return _finish(torch.cat([dfirst, dsecond], dim=-1), fwd_input.dtype, quantizer)


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "clamped_swiglu": clamped_swiglu,
    "clamped_dswiglu": clamped_dswiglu,
}
for _name in [*_GATED, *(one for one in _ACTIVATIONS if one != "sigmoid")]:
    FUNCTIONS[_name] = _forward(_name)
    FUNCTIONS["d" + _name] = _backward(_name)
for _name in ("gelu", "silu", "relu", "qgelu", "srelu"):
    FUNCTIONS["dbias_d" + _name] = _dbias_backward(_name)

__all__ = ["FUNCTIONS", "QUICK_GELU_ALPHA", "dgelu_value", "gelu_value"]
