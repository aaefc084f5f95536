"""Private lists of torch's optimizers, and their loads of states, checked with torch 2.11 to 2.15."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.optim import optimizer
from torch.utils import _foreach_utils


def support_foreach(cls: type[torch.Tensor]) -> None:
    """Let torch's optimizers use foreach kernels for a subclass of DTensor, as torch does for DTensor itself."""
    # Optimizers compare exact classes (``_foreach_supported_types``). One parameter of an unknown subclass
    # would make them update its group parameter by parameter.
    for types in (optimizer._foreach_supported_types, _foreach_utils._foreach_supported_types):
        if cls not in types:
            types.append(cls)  # type: ignore[arg-type]


@functools.cache
def after_failed_load(call: Callable[[Any], None]) -> None:
    """Call a function with the optimizer of torch whose ``load_state_dict`` misses a state. Local, once per process."""
    # ``__setstate__`` then raises KeyError, which follows unless the function raises (torch 2.11 to 2.15).
    for cls in {value for value in vars(torch.optim).values() if isinstance(value, type)}:
        if "__setstate__" in vars(cls) and cls is not torch.optim.Optimizer:
            cls.__setstate__ = _explain(cls.__setstate__, call)  # type: ignore[attr-defined]


def _explain(stock: Callable[..., None], call: Callable[[Any], None]) -> Callable[..., None]:
    @functools.wraps(stock)
    def __setstate__(self: Any, state: Any) -> None:
        try:
            stock(self, state)
        except KeyError:
            call(self)
            raise

    return __setstate__
