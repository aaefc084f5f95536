"""The compiled extension ``transformer_engine_torch``, in PyTorch.

:func:`build` gives the module that TransformerEngine imports under that name. Functions that are not implemented can
be imported, and raise ``NotImplementedError`` with their name when called.
"""

from __future__ import annotations

import functools
import importlib
import types
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from te_fsdp.emulation.tex import enums

#: Modules whose ``__all__`` (or ``FUNCTIONS``) make up the extension. A name defined twice is an error.
_SOURCES = (
    "formats",
    "gemm",
    "grouped",
    "norm",
    "activation",
    "softmax",
    "attention",
    "recipe",
    "multi_tensor",
    "misc",
    "packed",
    "permutation",
    "router",
)
#: Names that TransformerEngine reads with a default, so that they may be missing.
_OPTIONAL = ("flash_attention", "get_attention_backend")
#: Helpers of ``formats`` that are not part of the extension.
_INTERNAL = ("operand", "FLT_MAX", "dgelu_value", "gelu_value", "QUICK_GELU_ALPHA", "FUNCTIONS")


class _Extension(types.ModuleType):
    """Module whose missing functions raise with their name."""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("_") or name in _OPTIONAL:
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")

        def missing(*args: Any, **kwargs: Any) -> Any:
            raise NotImplementedError(f"{enums.TEX_MODULE}.{name} is not emulated on the CPU")

        missing.__name__ = missing.__qualname__ = name
        return missing


def _unseen(function: Callable[..., Any]) -> Callable[..., Any]:
    """Hide a function's operations from torch's dispatch modes, as in a compiled extension.

    Selective checkpointing is such a mode. It would save products that TransformerEngine then sums over tp in place,
    and sum the saved tensors again.
    """

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if not torch._C._len_torch_dispatch_stack():
            return function(*args, **kwargs)
        with _disable_current_modes():
            return function(*args, **kwargs)

    return call


def build() -> types.ModuleType:
    """Return a new module object that replaces the compiled extension."""
    module = _Extension(enums.TEX_MODULE, __doc__)
    names = module.__dict__
    known: dict[str, Any] = {}
    for one in enums.CLASSES + enums.ENUMS:
        names[one.__name__] = one
    for source in _SOURCES:
        loaded = importlib.import_module(f"{__name__}.{source}")
        functions = dict(getattr(loaded, "FUNCTIONS", {}))
        functions.update({name: getattr(loaded, name) for name in getattr(loaded, "__all__", ())})
        for name, value in functions.items():
            if name in _INTERNAL or not callable(value):
                continue
            if known.setdefault(name, names.get(name, value)) is not value:
                raise ImportError(f"{enums.TEX_MODULE}.{name} is defined twice, again in {loaded.__name__}")
            names[name] = _unseen(value) if isinstance(value, types.FunctionType) else value
    names["__all__"] = [name for name in names if not name.startswith("_")]
    return module


__all__ = ["build"]
