"""Implicit redistribution: torch redistributes arguments of a function on DTensors.

Checked with torch 2.11 and 2.13.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from torch.distributed.tensor import DTensor, Partial
from torch.utils import _pytree

from te_fsdp.upstream.torch_dtensor import shard_dim_of

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_watched = threading.local()


class MixedOrder(Exception):
    """Torch would redistribute an argument over the last axis, along a dim of the given sizes."""


@contextlib.contextmanager
def without_mixed_order(mesh: DeviceMesh, rows: list[int]) -> Iterator[None]:
    """Raise :class:`MixedOrder` before torch redistributes an argument over the last axis of ``mesh``.

    It only raises for dims with these numbers of rows. Local operation.
    """
    _install()
    before, _watched.now = getattr(_watched, "now", None), (mesh, rows)
    try:
        yield
    finally:
        _watched.now = before


@functools.cache
def _install() -> None:
    dispatcher: Any = DTensor._op_dispatcher
    stock = dispatcher.redistribute_local_args

    @functools.wraps(stock)
    def redistribute_local_args(op_info: Any, suggested: Any, *args: Any, **kwargs: Any) -> Any:
        now: tuple[DeviceMesh, list[int]] | None = getattr(_watched, "now", None)
        if now is not None:
            is_tree = op_info.args_tree_spec is not None
            new = _pytree.tree_leaves(suggested.args_schema) if is_tree else suggested.args_schema
            for old, fitted in zip(op_info.flat_args_schema, new, strict=False):
                if not hasattr(old, "placements") or not hasattr(fitted, "placements") or old.mesh != now[0]:
                    continue
                before, after = old.placements[-1], fitted.placements[-1]
                dims = {shard_dim_of(before), shard_dim_of(after)} - {None}
                moves = before != after and not isinstance(before, Partial)
                if moves and any(old.shape[dim] in now[1] for dim in dims):
                    raise MixedOrder
        return stock(op_info, suggested, *args, **kwargs)

    dispatcher.redistribute_local_args = redistribute_local_args
