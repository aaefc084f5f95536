"""Functions of ``torch.nn.utils`` that compute a parameter from others. On DTensors they fail without its name.

torch 2.11 to 2.15.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.nn.utils import parametrizations, prune

#: Functions that ``orthogonal``, ``spectral_norm`` and those of ``prune`` call first.
_FUNCTIONS = (
    (getattr(parametrizations, "_Orthogonal", None), "__init__"),
    (getattr(parametrizations, "_SpectralNorm", None), "__init__"),
    (prune.BasePruningMethod, "apply"),
    (prune, "global_unstructured"),
)


@functools.cache
def before_reparametrization(call: Callable[[torch.Tensor], None]) -> None:
    """Call a function with each tensor before torch replaces it. Local, once per process."""
    for owner, name in _FUNCTIONS:
        if owner is not None:
            # vars, because getattr would bind a classmethod.
            stock = vars(owner)[name]
            wrapped = _wrap(getattr(stock, "__func__", stock), call)
            setattr(owner, name, classmethod(wrapped) if isinstance(stock, classmethod) else wrapped)


def _wrap(stock: Callable[..., Any], call: Callable[[torch.Tensor], None]) -> Callable[..., Any]:
    @functools.wraps(stock)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        for tensor in _tensors_in([*args, *kwargs.values()]):
            call(tensor)
        return stock(*args, **kwargs)

    return wrapped


def _tensors_in(values: Any) -> Iterator[torch.Tensor]:
    """Yield tensors, and the parameters that pairs of a module and a name refer to."""
    for value, following in zip(values, [*values[1:], None], strict=True):
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, torch.nn.Module) and isinstance(following, str):
            parameter = value._parameters.get(following)
            if parameter is not None:
                yield parameter
        elif isinstance(value, list | tuple):
            yield from _tensors_in(list(value))
