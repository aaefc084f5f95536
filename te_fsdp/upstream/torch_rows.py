"""Functions of DTensors that return copies of sharded rows, where a tensor of one process has a view.

Checked with torch 2.11 to 2.14.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from te_fsdp.upstream.torch_dtensor import memory_id
from te_fsdp.upstream.torch_mixed_lists import run_stock

_aten = torch.ops.aten
#: Views for which torch gathers sharded rows. Other views of sharded rows raise.
_VIEWS = (
    _aten.select.int,
    _aten.slice.Tensor,
    _aten.split.Tensor,
    _aten.split_with_sizes.default,
    _aten.diagonal.default,
)
#: Meshes by id over which FSDP2 shards parameters, whose gradients and optimizer states have no record. A set would
#: keep one of several equal meshes, and lose all with the end of its model.
sharding_meshes: weakref.WeakValueDictionary[int, DeviceMesh] = weakref.WeakValueDictionary()
#: Attribute of DTensors that :func:`te_fsdp.upstream.torch_data.count_writes_to_data` has detached from parameters.
DETACHED = "_detached_parameter"
_assigning = threading.local()


# [Note: copied rows] ``weight[3]`` of a DTensor with sharded rows is a row that torch has gathered. In one process it
# is a view, so that ``weight[3].zero_()`` changes the weight. The write to the copy would be lost without an error.
@functools.cache
def after_copies(record: str, call: Callable[[Sequence[DTensor], bool], None]) -> None:
    """Call a function with copied rows of te_fsdp's tensors, and whether ``tensor[index] = value`` writes to them.

    These tensors have an attribute ``record``, are detached from one, or have a mesh of :data:`sharding_meshes`. Local
    operation, once per process.
    """
    handlers: dict[Any, Any] = DTensor._op_dispatcher._custom_op_handlers
    stock, keys = DTensor.__setitem__, {record, DETACHED}

    def handle(op: Any, args: Any, kwargs: Any) -> Any:
        results, source = run_stock(op, args, kwargs), args[0]
        if type(source._local_tensor) is torch.Tensor and (
            source._spec.mesh in sharding_meshes.values()
            or not keys.isdisjoint(source.__dict__)
            or (source._base is not None and not keys.isdisjoint(source._base.__dict__))
        ):
            views = [results] if isinstance(results, DTensor) else results
            memory = memory_id(source._local_tensor)
            copies = [view for view in views if memory_id(view._local_tensor) != memory]
            if copies:
                call(copies, getattr(_assigning, "now", False))
        return results

    def assign(self: DTensor, index: Any, value: Any) -> None:
        is_mask = isinstance(index, DTensor) and index.dtype == torch.bool and index.shape == self.shape
        if is_mask and isinstance(value, (int, float)):
            self.masked_fill_(index, value)  # torch's DTensor refuses ``index_put_`` of sharded tensors
            return
        before, _assigning.now = getattr(_assigning, "now", False), not torch.compiler.is_compiling()
        try:
            stock(self, index, value)
        finally:
            _assigning.now = before

    for view in _VIEWS:
        handlers.setdefault(view, handle)
    DTensor.__setitem__ = assign  # type: ignore[assignment]
