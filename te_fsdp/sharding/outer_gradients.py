"""Gradients where the optimizer looks for them, and those that nobody may read yet.

With ``outer_strategy="optim"`` (HFSDP) ``parameter.grad`` is the average within one replica, until the replicas have
averaged it (:mod:`te_fsdp.sharding.outer_averages`). Whatever reads it before (torch's clipping, a loss scaler, a log)
would find another number on each replica, and scale each by another factor. Such a gradient is therefore a DTensor
that computes nothing, an :class:`UnaveragedGradient`:

    works     shape, dtype and the like; zeros; multiplication or division by one number, the same on all ranks; what
              FSDP2 and te_fsdp do, by way of the local tensor
    raises    everything else, on each rank that tries it

``te_fsdp.finish_grad_reduce(model, outer=True)`` makes ``.grad`` the average, and an ordinary DTensor.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Sequence
from numbers import Number
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import torch
from torch.distributed.tensor import DTensor

from te_fsdp import _fsdp2_patches, _torch
from te_fsdp.errors import OrderError
from te_fsdp.parameters import facts_of
from te_fsdp.sharding.outer_collectives import OUTER

if TYPE_CHECKING:
    from te_fsdp.sharding.state import ShardingState


def gradient_of(parameter: torch.Tensor) -> torch.Tensor | None:
    """A parameter's own gradient: the decoupled one of another dtype where there is one, else ``grad``."""
    decoupled = getattr(parameter, "decoupled_grad", None)
    return decoupled if decoupled is not None else parameter.grad


def gradients_of(parameters: Iterable[torch.Tensor]) -> list[torch.Tensor | None]:
    """:func:`gradient_of` several at once: every step asks twice for all parameters."""
    found = []
    for parameter in parameters:
        decoupled = getattr(parameter, "decoupled_grad", None)
        found.append(parameter.grad if decoupled is None else decoupled)
    return found


def give_gradients(mains: Iterable[torch.Tensor], gradients: Iterable[torch.Tensor | None]) -> None:
    """Set the gradient of each main parameter under both names that optimizers read."""
    for main, gradient in zip(mains, gradients, strict=True):
        main.grad = main.decoupled_grad = gradient  # type: ignore[missing-attribute]


def zero_gradient(parameter: torch.Tensor) -> torch.Tensor:
    """Give a parameter without gradient one of zeros. Local operation."""
    local = _torch.local_of(parameter)
    dtype = getattr(parameter, "grad_dtype", None) or parameter.dtype
    zeros = _torch.placed_like(torch.zeros(local.shape, dtype=dtype, device=local.device), parameter)
    parameter.grad = zeros
    return zeros


class Seen(NamedTuple):
    """A gradient at some time, to tell later whether it is still what it was then.

    Attributes:
        gradient: The gradient, if it lives.
        version: How often it had been written to in place.
    """

    gradient: weakref.ref[torch.Tensor]
    version: int

    @classmethod
    def now(cls, gradients: Sequence[torch.Tensor | None]) -> list[Seen | None]:
        """Several as they are now. Local operation."""
        together = zip(gradients, _torch.versions_of(gradients), strict=True)
        return [
            None if gradient is None else cls(weakref.ref(gradient), version)
            for gradient, version in together
        ]

    @staticmethod
    def are_same(seen: Sequence[Seen | None], gradients: Sequence[torch.Tensor | None]) -> list[bool]:
        """Whether gradients are those that were seen, unchanged; where none was seen, whether there is none. Local."""
        together = zip(seen, gradients, _torch.versions_of(gradients), strict=True)
        return [
            gradient is None if one is None else one.gradient() is gradient and one.version == version
            for one, gradient, version in together
        ]


# --------------------------------------------------------------------------------------- gradients of one replica alone

#: Attribute of a gradient that is the average over all replicas.
_AVERAGED = "_te_fsdp_averaged"
#: Attribute of a gradient: its parameter's label.
_LABEL = "_te_fsdp_label"
#: Attributes that are values; the others are shape, dtype and the like.
_VALUES = ("data", "T", "H", "mT", "mH", "real", "imag")
#: Methods and functions that tell the shape and the like, or change no value.
_NO_VALUES = (
    *("size", "dim", "ndimension", "numel", "nelement", "stride", "element_size", "storage_offset"),
    *("get_device", "is_contiguous", "is_floating_point", "is_complex", "__len__", "__hash__"),
    *("requires_grad_", "detach", "detach_"),
)
#: Linear, so that they give the same before and after the average.
_LINEAR = (
    *("zero_", "mul_", "div_", "__imul__", "__itruediv__", "multiply_", "divide_", "true_divide_"),
    *("_foreach_zero_", "_foreach_mul_", "_foreach_div_"),
)


def _refusing(what: str) -> Callable[..., NoReturn]:
    """A method that raises OrderError."""

    def refuse(self: torch.Tensor, *unused: Any, **more: Any) -> NoReturn:
        _refuse(what, self)

    return refuse


class UnaveragedGradient(DTensor):
    """A gradient that is averaged within one replica of the model alone, see above."""

    __slots__ = ()

    to_local = _refusing("to_local")
    full_tensor = _refusing("full_tensor")
    redistribute = _refusing("redistribute")
    __deepcopy__ = _refusing("deepcopy")
    __reduce_ex__ = _refusing("pickle")

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run what is harmless.

        Not ``__torch_dispatch__``: torch before 2.13 does not ask a subclass of DTensor for its own.

        Raises:
            OrderError: Anything else.
        """
        name = func.__name__
        if name in ("__get__", "__set__", "__delete__"):
            name = func.__self__.__name__
            harmless = name not in _VALUES
        else:
            linear = name in _LINEAR and not kwargs and all(map(_is_number, args[1:]))
            harmless = linear or name in _NO_VALUES
        if not harmless:
            given = args[0] if args and isinstance(args[0], (list, tuple)) else args
            _refuse(name, next((g for g in given if isinstance(g, cls)), None))
        result = _torch.plain_results(func, types, args, kwargs or {})
        return guard(result) if type(result) is DTensor else result

    def __repr__(self, **unused: Any) -> str:
        """Without values."""
        return f"{type(self).__name__}(shape={tuple(self.shape)}, placements={self.placements})"


def _is_number(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return all(map(_is_number, value))
    return isinstance(value, Number) or (isinstance(value, torch.Tensor) and value.ndim == 0)


def _refuse(what: str, gradient: torch.Tensor | None) -> NoReturn:
    label = "" if gradient is None else gradient.__dict__.get(_LABEL, "")
    shape = "" if gradient is None else f" of shape {tuple(gradient.shape)}"
    raise OrderError(
        f"{what} on the gradient of {label or f'a parameter{shape}'}",
        expected=f"a gradient that is averaged over {OUTER}",
        got="one that is averaged over this copy of the model alone, as each backward leaves it with "
        'outer_strategy="optim"',
        why="Each copy would see other numbers",
        fix="use te_fsdp.clip_grad_norm_ and te_fsdp.scale_gradients; or call te_fsdp.finish_grad_reduce(model, "
        "outer=True) on all ranks after the last backward, which makes .grad the average",
    )


def guard(gradient: torch.Tensor) -> torch.Tensor:
    """The same gradient, as one that is averaged within one replica alone. Local operation."""
    if type(gradient) is DTensor:
        gradient.__class__ = UnaveragedGradient
    return gradient


def is_averaged(gradient: torch.Tensor) -> bool:
    """Whether :func:`open_averaged` was called on a gradient, and nothing was added since. Local operation."""
    return _AVERAGED in gradient.__dict__


def open_averaged(gradient: torch.Tensor) -> None:
    """Take note that a gradient is the average over all replicas now: everybody may read it. Local operation."""
    if type(gradient) is UnaveragedGradient:
        gradient.__class__ = DTensor  # type: ignore[bad-argument-type]
    setattr(gradient, _AVERAGED, True)


def reopen(gradient: torch.Tensor, divisor: int) -> None:
    """Make an averaged gradient this replica's again, so that it can be added to and averaged with what was added.

    Local operation. The average of equal values is that value; sums must not be added up again.

    Args:
        gradient: Of any kind; changed only if it is averaged.
        divisor: Number of replicas if gradients are sums over them, else 1.
    """
    if gradient.__dict__.pop(_AVERAGED, False):
        if divisor != 1:
            _torch.local_of(gradient).div_(divisor)
        guard(gradient)


def guard_gradients(state: ShardingState) -> None:
    """Let the gradients that FSDP2 reduces for a model with ``outer_strategy="optim"`` be guarded. Local operation."""
    replicas = state.meshes.size(OUTER)
    if state.outer == "optim" and replicas > 1:
        before = functools.partial(_before, 1 if state.average_gradients else replicas)
        for unit in state.modules.values():
            _fsdp2_patches.around_reductions(unit, before, _after)


@torch.no_grad()
def _before(divisor: int, parameters: Iterable[torch.Tensor]) -> None:
    for parameter in parameters:
        if parameter.grad is not None:
            reopen(parameter.grad, divisor)


def _after(parameters: Iterable[torch.Tensor]) -> None:
    for parameter in parameters:
        gradient = parameter.grad
        if type(gradient) is DTensor:
            gradient.__class__ = UnaveragedGradient
            facts = facts_of(parameter)
            setattr(gradient, _LABEL, facts.label or "" if facts is not None else "")
