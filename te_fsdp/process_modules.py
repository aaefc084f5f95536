"""All modules of this process, found by the garbage collector."""

from __future__ import annotations

import gc
from collections.abc import Collection, Iterator

from torch import nn


def registered_at(parameters: Collection[int]) -> Iterator[tuple[nn.Module, str]]:
    """Yield every module of this process that has one of the parameters, and its name there.

    Parameters have no reference to their owners. Local operation, for setup and errors only. ``parameters`` are ids;
    ids removed from the collection during the iteration are not searched further.
    """
    for module in modules_of_process():
        for name, parameter in module.__dict__.get("_parameters", {}).items():
            if id(parameter) in parameters:
                yield module, name


def modules_of_process() -> Iterator[nn.Module]:
    """Yield all modules of this process that the garbage collector tracks. For setup and errors only."""
    # Compare types, because isinstance has side effects on some proxies.
    return (candidate for candidate in gc.get_objects() if issubclass(type(candidate), nn.Module))
