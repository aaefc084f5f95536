"""``DTensor.data`` of te_fsdp's parameters. Checked with torch 2.11 to 2.15."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from te_fsdp.upstream.torch_dtensor import memory_id

#: Number of assignments to ``.data`` of parameters with a record since :func:`count_writes_to_data`.
assignments: list[int] = [0]


# [Note: writes through data] ``p.data.clamp_()`` changes the values of ``p``, but torch gives ``p.data`` a version of
# its own. Weights that are kept for further forwards, main weights and checks compare versions of ``p``. A detached
# tensor has the same values, and the version of ``p``. Of DTensors, ``detach`` copies the local tensor with a new
# version, so the result gets that of ``p``. It is the same object, of which a quantized weight is written at once.
@functools.cache
def count_writes_to_data(record: str) -> None:
    """Count writes through ``.data`` of DTensors with the attribute ``record``; once per process. Local operation."""
    stock: Any = vars(torch.Tensor.__mro__[1])["data"]

    def get(self: DTensor) -> Any:
        # Dynamo traces this: it reads no ``__dict__``, and would find this property again in ``stock``.
        if getattr(self, record, None) is None:
            return self._stock_data  # type: ignore[missing-attribute]
        data: Any = self.detach()
        data._local_tensor = self._local_tensor
        return data

    def set_(self: DTensor, value: torch.Tensor) -> None:
        memory = memory_id(self) if record in self.__dict__ else 0
        stock.__set__(self, value)
        if memory and memory_id(self) != memory:
            assignments[0] += 1

    DTensor._stock_data = stock  # type: ignore[missing-attribute]
    DTensor.data = property(get, set_)  # type: ignore[assignment]
