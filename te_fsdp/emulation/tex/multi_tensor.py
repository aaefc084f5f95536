"""Kernels over lists of tensors: ``common/multi_tensor/*.cu``.

All math is fp32 and results are rounded once, into the dtype of the tensor that receives them. ``noop_flag`` is a
one-element int tensor that kernels set to 1 on overflow, and that some of them (capturable ones, SGD) obey.
"""

from __future__ import annotations

from typing import Any

import torch

from te_fsdp.emulation._errors import EmulationError
from te_fsdp.emulation.tex.enums import to_torch_dtype
from te_fsdp.emulation.tex.recipe import FLT_MAX

Lists = list[list[torch.Tensor]]


def _single(value: Any) -> float:
    """Return the fp32 number next to it, as a kernel receives its arguments."""
    return torch.tensor(float(value), dtype=torch.float32).item()


def _flushed(value: torch.Tensor) -> torch.Tensor:
    """Return fp32 values with subnormals set to zero, as these kernels are compiled to do."""
    return torch.where(
        value.abs() < torch.finfo(torch.float32).tiny, torch.copysign(torch.zeros_like(value), value), value
    )


class _Adam:
    """One Adam step on fp32 values (``common/multi_tensor/adam.cu``)."""

    def __init__(
        self,
        lr: Any,
        beta1: float,
        beta2: float,
        epsilon: float,
        step: Any,
        mode: int,
        bias_correction: int,
        weight_decay: float,
    ) -> None:
        self.lr, self.epsilon, self.decay = float(lr), float(epsilon), float(weight_decay)
        self.beta1, self.beta2, self.decoupled = _single(beta1), _single(beta2), int(mode) == 1
        self.correction1 = self.correction2 = 1.0
        if int(bias_correction) == 1:
            self.correction1 = 1.0 - self.beta1 ** int(step)
            self.correction2 = 1.0 - self.beta2 ** int(step)

    def __call__(
        self, grad: torch.Tensor, param: torch.Tensor, exp_avg: torch.Tensor, exp_avg_sq: torch.Tensor
    ) -> torch.Tensor:
        """Return the new fp32 parameter values; the moments are updated in place."""
        if not self.decoupled:
            grad = grad + self.decay * param
        # The kernel subtracts in fp32 too, so that 1 - 0.999 is off by 1e-5 of itself.
        first = self.beta1 * exp_avg.float() + _single(1.0 - self.beta1) * grad
        second = self.beta2 * exp_avg_sq.float() + _single(1.0 - self.beta2) * grad * grad
        update = (first / self.correction1) / (torch.sqrt(second / self.correction2) + self.epsilon)
        if self.decoupled:
            update = update + self.decay * param
        exp_avg.copy_(first)
        exp_avg_sq.copy_(second)
        return param - self.lr * update


def multi_tensor_adam(chunk_size: int, noop_flag: torch.Tensor, tensor_lists: Lists, *args: Any) -> None:
    """Adam on ``[grads, params, exp_avg, exp_avg_sq]``, plus ``[fp32 main params]`` to update instead.

    ``args``: lr, beta1, beta2, epsilon, step, mode (0: L2, 1: decoupled decay), bias_correction, weight_decay.

    Raises:
        EmulationError: gradients, or parameters, of several dtypes.
    """
    del chunk_size, noop_flag
    for what, tensors in zip(("gradients", "parameters"), tensor_lists, strict=False):
        dtypes = {tensor.dtype for tensor in tensors}
        if len(dtypes) > 1:
            raise EmulationError(f"multi_tensor_adam: {what} of several dtypes, {sorted(map(str, dtypes))}")
    adam = _Adam(*args)
    with torch.no_grad():
        for grad, param, exp_avg, exp_avg_sq, *main in zip(*tensor_lists, strict=True):
            source = main[0] if main else param
            new = adam(grad.float(), source.float(), exp_avg, exp_avg_sq)
            param.copy_(new)
            if main:
                main[0].copy_(new)


def multi_tensor_adam_fp8(chunk_size: int, noop_flag: torch.Tensor, tensor_lists: Lists, *args: Any) -> None:
    """Adam with FP8 parameters: ``[grads, FP8 bytes, exp_avg, exp_avg_sq, main, scale, amax, scale_inv]``.

    ``args`` as for :func:`multi_tensor_adam`, then the FP8 dtype. The bytes are the saturated main parameter times
    ``scale``; ``amax`` is raised to its largest absolute value and ``scale_inv`` becomes ``1 / scale``. A transposed
    copy is *not* updated.
    """
    del chunk_size, noop_flag
    adam, fp8 = _Adam(*args[:-1]), to_torch_dtype(args[-1])
    limit = torch.finfo(fp8).max
    with torch.no_grad():
        for grad, data, exp_avg, exp_avg_sq, main, scale, amax, scale_inv in zip(*tensor_lists, strict=True):
            new = adam(grad.float(), main.float(), exp_avg, exp_avg_sq)
            main.copy_(new)
            data.copy_((new * scale).clamp(-limit, limit).to(fp8).view(torch.uint8))
            amax.copy_(torch.maximum(amax, new.abs().amax()))
            scale_inv.copy_(scale.reciprocal())


def multi_tensor_adam_param_remainder(
    chunk_size: int, noop_flag: torch.Tensor, tensor_lists: Lists, *args: Any
) -> None:
    """Adam on fp32 main parameters stored as bf16 parameters plus int16 remainders.

    Lists ``[grads, bf16 params, exp_avg, exp_avg_sq, int16 remainders]``. The bf16 half is the main value rounded by
    its low half taken as a signed number, which is why a negative remainder means that the high half was incremented.
    """
    del chunk_size, noop_flag
    adam = _Adam(*args)
    with torch.no_grad():
        for grad, param, exp_avg, exp_avg_sq, remainder in zip(*tensor_lists, strict=True):
            low = remainder.to(torch.int32)
            high = param.view(torch.int16).to(torch.int32) - (low < 0).to(torch.int32)
            main = ((high << 16) | (low & 0xFFFF)).view(torch.float32)
            bits = adam(grad.float(), main, exp_avg, exp_avg_sq).contiguous().view(torch.int32)
            low = bits << 16 >> 16
            high = (bits >> 16) + (low < 0).to(torch.int32)
            remainder.copy_(low)
            param.copy_((high << 16 >> 16).to(torch.int16).view(torch.bfloat16))


def multi_tensor_adam_capturable(
    chunk_size: int, noop_flag: torch.Tensor, tensor_lists: Lists, *args: Any
) -> None:
    """Run :func:`multi_tensor_adam` with tensors lr and step, and last ``inv_scale``, a factor of the gradients.

    Does nothing when ``noop_flag`` is 1. The unscaled gradients are written back.

    Raises:
        EmulationError: gradients of another dtype than the parameters.
    """
    dtypes = {tensor.dtype for tensor in (*tensor_lists[0], *tensor_lists[1])}
    if len(dtypes) > 1:
        raise EmulationError(f"multi_tensor_adam_capturable: several dtypes, {sorted(map(str, dtypes))}")
    if int(noop_flag) == 1:
        return
    inv_scale = args[-1]
    with torch.no_grad():
        for grad in tensor_lists[0]:
            grad.copy_(grad.float() * inv_scale)
    multi_tensor_adam(chunk_size, noop_flag, tensor_lists, *args[:-1])


def multi_tensor_adam_capturable_master(
    chunk_size: int, noop_flag: torch.Tensor, tensor_lists: Lists, *args: Any
) -> None:
    """Run :func:`multi_tensor_adam_capturable` with a fifth list of fp32 main parameters."""
    multi_tensor_adam_capturable(chunk_size, noop_flag, tensor_lists, *args)


def multi_tensor_sgd(
    chunk_size: int,
    noop_flag: torch.Tensor,
    tensor_lists: Lists,
    wd: float,
    momentum: float,
    dampening: float,
    lr: float,
    nesterov: bool,
    first_run: bool,
    wd_after_momentum: bool,
    scale: float,
) -> None:
    """SGD on ``[grads, params, momenta]``, plus ``[copies]``; nothing when ``noop_flag`` is set."""
    del chunk_size
    if int(noop_flag) != 0:
        return
    with torch.no_grad():
        for grad, param, buffer, *copies in zip(*tensor_lists, strict=True):
            value, weight = grad.float() * scale, param.float()
            if wd != 0.0 and not wd_after_momentum:
                value = value + wd * weight
            if momentum != 0.0:
                new = value if first_run else buffer.float() * momentum + (1.0 - dampening) * value
                buffer.copy_(new)
                value = value + momentum * new if nesterov else new
            if wd != 0.0 and wd_after_momentum:
                value = value + wd * weight
            param.copy_(weight - lr * value)
            for copy in copies:
                copy.copy_(param)


def _flag_overflow(noop_flag: torch.Tensor, value: torch.Tensor) -> None:
    if not bool(torch.isfinite(value).all()):
        noop_flag.fill_(1)


def multi_tensor_scale(chunk_size: int, noop_flag: torch.Tensor, tensor_lists: Lists, scale: float) -> None:
    """Return ``[inputs, outputs]``: outputs = inputs * scale; flags an input that is not finite."""
    del chunk_size
    with torch.no_grad():
        for source, target in zip(*tensor_lists, strict=True):
            value = source.float()
            target.copy_(_flushed(_flushed(value) * scale))
            _flag_overflow(noop_flag, value)


def multi_tensor_scale_tensor(
    chunk_size: int, noop_flag: torch.Tensor, tensor_lists: Lists, scale: torch.Tensor
) -> None:
    """Run :func:`multi_tensor_scale` with the factor in a one-element tensor."""
    multi_tensor_scale(chunk_size, noop_flag, tensor_lists, float(scale))


def multi_tensor_l2norm(
    chunk_size: int, noop_flag: torch.Tensor, tensor_lists: Lists, per_tensor: bool | None = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return fp32 ``(norm over all (1,), norm of each (n,) or empty)``; flags a result that is not finite."""
    return multi_tensor_unscale_l2norm(chunk_size, noop_flag, tensor_lists, torch.ones(1), per_tensor)


def multi_tensor_unscale_l2norm(
    chunk_size: int,
    noop_flag: torch.Tensor,
    tensor_lists: Lists,
    inv_scale: torch.Tensor,
    per_tensor: bool | None = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute :func:`multi_tensor_l2norm` of the tensors times the one-element ``inv_scale``."""
    del chunk_size
    squares = torch.stack([(one.detach().float() * inv_scale).square().sum() for one in tensor_lists[0]])
    _flag_overflow(noop_flag, squares)
    norms = squares.sqrt() if per_tensor else torch.empty(0)
    return squares.sum().sqrt().reshape(1), norms


def multi_tensor_compute_scale_and_scale_inv(
    chunk_size: int,
    noop_flag: torch.Tensor,
    tensor_lists: Lists,
    max_fp8: float,
    force_pow_2_scales: bool = False,
    epsilon: float = 0.0,
) -> None:
    """Scale and inverse scale of each amax, lists ``[amax, scale, scale_inv]`` (fp32), subnormals as zeros."""
    del chunk_size, noop_flag
    with torch.no_grad():
        for amax, scale, scale_inv in zip(*tensor_lists, strict=True):
            raised = _flushed(torch.where(amax < epsilon, torch.full_like(amax, epsilon), amax))
            usable = torch.isfinite(raised) & (raised != 0)
            value = torch.where(
                usable, torch.full_like(raised, max_fp8) / torch.where(usable, raised, 1.0), 1.0
            )
            value = torch.where(torch.isinf(value), torch.full_like(value, FLT_MAX), value)
            if force_pow_2_scales:
                value = (value.view(torch.int32) & 0x7F800000).view(torch.float32)
            scale.copy_(value)
            scale_inv.copy_(_flushed(value.reciprocal()))


__all__ = [
    "multi_tensor_adam",
    "multi_tensor_adam_capturable",
    "multi_tensor_adam_capturable_master",
    "multi_tensor_adam_fp8",
    "multi_tensor_adam_param_remainder",
    "multi_tensor_compute_scale_and_scale_inv",
    "multi_tensor_l2norm",
    "multi_tensor_scale",
    "multi_tensor_scale_tensor",
    "multi_tensor_sgd",
    "multi_tensor_unscale_l2norm",
]
