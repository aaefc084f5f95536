"""What crosses the wire: every collective of torch.distributed on bulk data, by kind and dtype."""

from __future__ import annotations

import collections
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

#: Functions of torch.distributed -> kind, and the position of the tensor that this rank sends or gets whole. The old
#: and the new names of c10d; torch 2.13's FSDP2 calls the new ones, and the old ones call none of them.
FUNCTIONS = {
    "all_gather_into_tensor": ("all_gather", 0, "output_tensor"),
    "all_gather_single": ("all_gather", 0, "output_tensor"),
    "reduce_scatter_tensor": ("reduce_scatter", 1, "input"),
    "reduce_scatter_single": ("reduce_scatter", 1, "input"),
    "all_reduce": ("all_reduce", 0, "tensor"),
    "all_to_all_single": ("all_to_all", 1, "input"),
}


@contextmanager
def recorded() -> Iterator[collections.Counter]:
    """Bytes by (kind, dtype) of the collectives inside: of the gathered, the scattered, or the reduced whole."""
    seen: collections.Counter = collections.Counter()
    stock = {name: getattr(dist, name) for name in FUNCTIONS if hasattr(dist, name)}
    depth = [0]

    def counting(name: str) -> Any:
        kind, position, keyword = FUNCTIONS[name]

        def call(*args: Any, **kwargs: Any) -> Any:
            tensor = args[position] if len(args) > position else kwargs[keyword]
            if depth[0] == 0:
                seen[kind, str(tensor.dtype).removeprefix("torch.")] += tensor.numel() * tensor.element_size()
            depth[0] += 1
            try:
                return stock[name](*args, **kwargs)
            finally:
                depth[0] -= 1

        return call

    for name in stock:
        setattr(dist, name, counting(name))
    try:
        yield seen
    finally:
        for name, function in stock.items():
            setattr(dist, name, function)


def padded(model: torch.nn.Module, unit: str, ranks: int) -> int:
    """Elements of a unit's parameters as FSDP2 sends them: rows filled up to a multiple of the ranks."""
    total = 0
    for parameter in model.get_submodule(unit).parameters():
        rows, rest = parameter.shape[0], parameter.shape[1:].numel()
        total += -(-rows // ranks) * ranks * rest
    return total
