"""Record the `torch.distributed` collectives of a body with kind, dtype, size."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

#: Functions of torch.distributed -> kind, then position and name of the tensor with all ranks' parts (or the only one),
#: and of this rank's input. Old and new names of c10d; old ones may call new ones.
_FUNCTIONS = {
    "all_gather_into_tensor": ("all_gather", (0, "output_tensor"), (1, "input_tensor")),
    "all_gather_single": ("all_gather", (0, "output_tensor"), (1, "input_tensor")),
    "reduce_scatter_tensor": ("reduce_scatter", (1, "input"), (1, "input")),
    "reduce_scatter_single": ("reduce_scatter", (1, "input"), (1, "input")),
    "all_reduce": ("all_reduce", (0, "tensor"), (0, "tensor")),
    "all_to_all_single": ("all_to_all", (1, "input"), (1, "input")),
    "broadcast": ("broadcast", (0, "tensor"), (0, "tensor")),
}
#: Methods of a process group that take several such pairs as one operation -> kind, positions of full tensors and
#: parts.
_SEVERAL = {
    "all_gather_single_coalesced": ("all_gather", 0, 1),
    "allgather_into_tensor_coalesced": ("all_gather", 0, 1),
    "reduce_scatter_single_coalesced": ("reduce_scatter", 1, 1),
    "reduce_scatter_tensor_coalesced": ("reduce_scatter", 1, 1),
}


class Collective(NamedTuple):
    """One call.

    Attributes:
        kind: "all_gather", "reduce_scatter", "all_reduce", "all_to_all" or "broadcast".
        dtype: of its tensors, as in "float32".
        whole: elements of all ranks' parts together: what is gathered, scattered or reduced.
        given: elements of this rank's input.
        bytes: of the whole.
    """

    kind: str
    dtype: str
    whole: int
    given: int
    bytes: int


@contextmanager
def recorded() -> Iterator[list[Collective]]:
    """Record the collectives called in the context, in order; coalesced ones one by one.

    A call made by a recorded call belongs to that call. A process group of a different class sends nothing itself.
    """
    seen: list[Collective] = []
    stock = {name: getattr(dist, name) for name in _FUNCTIONS if hasattr(dist, name)}
    # From the class's `__dict__`: getattr would return objects that are not methods when they are set again.
    methods = {name: method for name, method in vars(dist.ProcessGroup).items() if name in _SEVERAL}
    several = {name: getattr(dist.ProcessGroup, name) for name in methods}
    depth = [0]

    def recording(name: str) -> Any:
        kind, *places = _FUNCTIONS[name]

        def call(*args: Any, **kwargs: Any) -> Any:
            group = kwargs.get("group")
            if group is not None and type(group) is not dist.ProcessGroup:
                return stock[name](*args, **kwargs)
            if depth[0] == 0:
                whole, given = (args[at] if len(args) > at else kwargs[key] for at, key in places)
                seen.append(_described(kind, whole, given))
            depth[0] += 1
            try:
                return stock[name](*args, **kwargs)
            finally:
                depth[0] -= 1

        return call

    def recording_several(name: str) -> Any:
        kind, *places = _SEVERAL[name]

        def call(group: dist.ProcessGroup, *args: Any) -> Any:
            if depth[0] == 0 and type(group) is dist.ProcessGroup:
                pairs = zip(*(args[at] for at in places), strict=True)
                seen.extend(_described(kind, whole, given) for whole, given in pairs)
            depth[0] += 1
            try:
                return several[name](group, *args)
            finally:
                depth[0] -= 1

        return call

    for name in stock:
        setattr(dist, name, recording(name))
    for name in several:
        setattr(dist.ProcessGroup, name, recording_several(name))
    try:
        yield seen
    finally:
        for name, function in stock.items():
            setattr(dist, name, function)
        for name, method in methods.items():
            setattr(dist.ProcessGroup, name, method)


def _described(kind: str, whole: torch.Tensor, given: torch.Tensor) -> Collective:
    size = whole.numel()
    return Collective(
        kind, str(whole.dtype).removeprefix("torch."), size, given.numel(), size * whole.element_size()
    )
