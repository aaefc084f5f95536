"""Tensors in ``.grad`` that refuse operations on their values, because these are not the model's gradient."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, NoReturn

import torch
from torch.distributed.tensor import DTensor

#: Attributes that return values. Others return shape, dtype and similar.
_VALUES = ("data", "T", "H", "mT", "mH", "real", "imag")
#: Methods and functions that return shape and similar, or that do not change values.
_NO_VALUES = (
    *("size", "dim", "ndimension", "numel", "nelement", "stride", "element_size", "storage_offset"),
    *("get_device", "is_contiguous", "is_floating_point", "is_complex", "__len__", "__hash__"),
    *("requires_grad_", "detach", "detach_"),
)


def reads_values(func: Any) -> tuple[str, bool]:
    """Return the name of an operation or attribute, and whether it reads values. Local operation."""
    name = func.__name__
    if name in ("__get__", "__set__", "__delete__"):
        name = func.__self__.__name__
        return name, name in _VALUES
    return name, name not in _NO_VALUES


def tensor_arguments(args: tuple[Any, ...]) -> Any:
    """Return the arguments of an operation, or the tensors of its first one, if that is a list."""
    return args[0] if args and isinstance(args[0], (list, tuple)) else args


class UnreadableGradient:
    """Mixin for tensor subclasses without readable values. They define :meth:`refuse` and ``__torch_function__``."""

    # Not ``__torch_dispatch__``, because torch before 2.13 does not call it for subclasses of DTensor.
    __slots__ = ()

    @staticmethod
    @abstractmethod
    def refuse(gradient: Any, use: str) -> NoReturn:
        """Raise :class:`~te_fsdp.errors.OrderError` for an operation on a gradient."""

    def __deepcopy__(self, memo: Any) -> NoReturn:
        """Raise :meth:`refuse`'s error, because a copy has values."""
        self.refuse(self, "deepcopy")

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        """Raise :meth:`refuse`'s error, because a pickle has values."""
        self.refuse(self, "pickle")

    def __repr__(self: Any, **unused: Any) -> str:
        """Return a description without values."""
        placements = f", placements={self.placements}" if isinstance(self, DTensor) else ""
        return f"{type(self).__name__}(shape={tuple(self.shape)}{placements})"


class UnreadableShard(UnreadableGradient, DTensor):
    """Mixin for subclasses of DTensor without readable values."""

    __slots__ = ()

    def to_local(self, **unused: Any) -> torch.Tensor:
        """Raise :meth:`refuse`'s error."""
        self.refuse(self, "to_local")

    def full_tensor(self, **unused: Any) -> torch.Tensor:
        """Raise :meth:`refuse`'s error."""
        self.refuse(self, "full_tensor")

    def redistribute(self, *unused: Any, **more: Any) -> DTensor:
        """Raise :meth:`refuse`'s error."""
        self.refuse(self, "redistribute")
