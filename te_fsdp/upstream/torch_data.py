"""``DTensor.data`` of te_fsdp's parameters. Checked with torch 2.11 to 2.14."""

from __future__ import annotations

import functools
import sys
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from te_fsdp.errors import OrderError
from te_fsdp.upstream.torch_dtensor import BOXES, count_writes, memory_id, version_of
from te_fsdp.upstream.torch_rows import DETACHED

#: Number of assignments to ``.data`` of parameters with a record since :func:`count_writes_to_data`.
assignments: list[int] = [0]


# [Note: writes through data] ``p.data.clamp_()`` changes the values of ``p``, but torch gives ``p.data`` a version of
# its own. Weights that are kept for further forwards, main weights and checks compare versions of ``p``. A detached
# tensor has the same values, and the version of ``p``.
#
# [Note: assigned data] ``gradient.data = value`` makes a tensor use the memory of ``value``. Of a DTensor, torch
# replaces only the outer tensor, which has no values. A record marks parameters, whose local tensors FSDP2 owns.
# Gradients, optimizer states and averages have none.
@functools.cache
def count_writes_to_data(record: str) -> None:
    """Count writes through ``.data`` of DTensors with the attribute ``record``; once per process. Local operation."""
    stock: Any = vars(torch.Tensor.__mro__[1])["data"]

    def get(self: DTensor) -> Any:
        # Dynamo traces this: it reads no ``__dict__``, and would find this property again in ``stock``.
        if getattr(self, record, None) is None:
            return self._stock_data  # type: ignore[missing-attribute]
        return self.detach()

    def set_(self: DTensor, value: torch.Tensor) -> None:
        found = self.__dict__.get(record)
        if found is not None and memory_id(self) != memory_id(value):
            if found.plan is None:  # no fully_shard of te_fsdp, whose check names all parameters
                raise assigned_data(_name(found, self), 1)
            assignments[0] += 1
        stock.__set__(self, value)
        if found is not None or not isinstance(value, DTensor) or torch.compiler.is_compiling():
            return
        # [Note: assigned data]
        before = version_of(self)
        self.__class__, self._local_tensor, self._spec = type(value), value._local_tensor, value._spec
        self.__dict__.pop(BOXES, None)
        if BOXES in value.__dict__:
            self.__dict__[BOXES] = value.__dict__[BOXES]
        while version_of(self) <= before:  # the new local tensor has a version of its own
            count_writes([self])

    DTensor._stock_data = stock  # type: ignore[missing-attribute]
    DTensor.data = property(get, set_)  # type: ignore[assignment]
    _count_writes_to_views(record)
    _refuse_swaps(record)


def assigned_data(what: str, count: int) -> OrderError:
    """Return the error for assignments to ``.data`` of parameters."""
    return OrderError(
        f"{what}: parameter.data was assigned",
        expected="values that are written in place",
        got=f"an assignment to .data of {count} parameter(s), as by torch.nn.utils.vector_to_parameters",
        why="torch then leaves the values of a DTensor unchanged, without an error",
        fix="with torch.no_grad(): parameter.copy_(value)",
    )


def _name(found: Any, tensor: torch.Tensor) -> str:
    label = found.label if found.plan is None else found.plan.label
    return label or f"a parameter of shape {tuple(tensor.shape)}"


def _refuse_swaps(record: str) -> None:
    stock = torch.utils.swap_tensors

    @functools.wraps(stock)
    def swap_tensors(t1: torch.Tensor, t2: torch.Tensor) -> None:
        is_conversion = sys._getframe(1).f_globals["__name__"].startswith("torch.")
        for tensor in () if is_conversion else (t1, t2):
            found = tensor.__dict__.get(record)
            if found is None or found.copied_from is not None:  # copies may be swapped
                continue
            raise OrderError(
                f"{_name(found, tensor)}: torch.utils.swap_tensors of a sharded model's parameter",
                expected="values that are written in place",
                got="a different tensor in the same Python object",
                why="FSDP2 and the optimizer would use different tensors from then on, without an error",
                fix="with torch.no_grad(): parameter.copy_(value)",
            )
        stock(t1, t2)

    torch.utils.swap_tensors = swap_tensors


# [Note: writes to local tensors of views] Of ``p.detach()``, the entries of ``state_dict()`` and views such as ``p.T``,
# the DTensors have the version of ``p``. Their local tensors have versions of their own, because DTensor computes them
# below autograd. Views of the local tensor of ``p`` replace them. A quantized local tensor is shared: TE's ``detach``
# makes a tensor whose derived data, such as transposes, a write to the other one does not invalidate.
def _count_writes_to_views(record: str) -> None:
    to_local = DTensor.to_local

    def detach(self: DTensor) -> Any:
        result: Any = self._stock_detach()  # type: ignore[missing-attribute]
        if torch.compiler.is_compiling():
            return result
        is_ours = record in self.__dict__ or DETACHED in self.__dict__
        if type(self._local_tensor) is torch.Tensor:
            result._local_tensor = _counted(self, self._local_tensor).detach()
        elif is_ours:
            result._local_tensor = self._local_tensor
        if is_ours:
            result.__dict__[DETACHED] = True
        return result

    @functools.wraps(to_local)
    def counted_to_local(self: DTensor, **options: Any) -> torch.Tensor:
        local = to_local(self, **options)
        return local if torch.compiler.is_compiling() or local.requires_grad else _counted(self, local)

    DTensor._stock_detach = torch.Tensor.detach  # type: ignore[missing-attribute]
    DTensor.detach = detach  # type: ignore[assignment]
    DTensor.to_local = counted_to_local  # type: ignore[assignment]


def _counted(tensor: DTensor, local: torch.Tensor) -> torch.Tensor:
    """Return the local tensor of a view of a DTensor, with the version of that one's local tensor."""
    base = tensor._base
    source = base._local_tensor if isinstance(base, DTensor) else local
    is_view = type(local) is type(source) is torch.Tensor and memory_id(local) == memory_id(source)
    if source is local or not is_view or local.dtype != source.dtype:
        return local
    return source.as_strided(local.shape, local.stride(), local.storage_offset())
