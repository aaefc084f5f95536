"""Record the collectives that one rank launches, in order."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

_NAMESPACES = ("c10d", "_c10d_functional", "c10d_functional")
#: Operators of these namespaces that send nothing.
_LOCAL = ("wait_tensor", "_wrap_tensor_autograd")


class RecordCollectives(TorchDispatchMode):
    """Append a line for each collective of this thread to ``seen``, under ``collective 0``, ``collective 1`` and so on.

    A line has the operator, dtype and number of elements of each tensor, the reduction and the ranks. The order of
    collectives is part of the behavior: ranks that order them differently hang.
    """

    def __init__(self, seen: dict[str, str]) -> None:
        super().__init__()
        self._seen, self._count = seen, 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Record a collective, then run the operator."""
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # DTensor's own dispatch runs, and this mode sees its collectives
        operator = func.__name__.partition(".")[0]
        if func.namespace in _NAMESPACES and operator not in _LOCAL:
            self._seen[f"collective {self._count}"] = " ".join([operator, *map(_format, args)])
            self._count += 1
        return func(*args, **(kwargs or {}))


def _format(value: Any) -> str:
    """Format an argument of a collective: tensors by dtype and size, process groups by their ranks."""
    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}[{value.numel()}]"
    if isinstance(value, (list, tuple)):
        return "(" + ", ".join(map(_format, value)) + ")"
    if isinstance(value, str):  # name of a process group, or of a reduction
        try:
            group = dist.distributed_c10d._resolve_process_group(value)  # noqa: SLF001  # torch has no public lookup
        except (RuntimeError, KeyError, ValueError):
            return value
        return _format_ranks(group)
    if isinstance(value, torch.ScriptObject):
        try:
            return _format_ranks(dist.ProcessGroup.unbox(value))
        except RuntimeError:
            return "ReduceOp"  # whose kind is not readable
    return str(value)


def _format_ranks(group: dist.ProcessGroup) -> str:
    return "over " + ",".join(map(str, dist.get_process_group_ranks(group)))
