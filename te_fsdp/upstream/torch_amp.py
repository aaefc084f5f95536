"""``torch.amp.GradScaler`` for parameters on several meshes, sharded and replicated; torch 2.11 to 2.15."""

# [Note: GradScaler over several meshes] The scaler passes all gradients of a dtype to one operator, which
# divides them by the scale and reports infinities. For DTensors torch has a handler
# (``found_inf_reduce_handler``). It rejects plain tensors in such a list. It all-reduces the report over the
# mesh of the first gradient only, so with tensor parallelism only some ranks would skip a step.

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from te_fsdp.upstream.torch_dtensor import local_of

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_UNSCALE = torch.ops.aten._amp_foreach_non_finite_check_and_unscale_.default


@functools.cache
def unscale_over_all_meshes() -> None:
    """Replace DTensor's handler of the scaler's operator (``_custom_op_handlers``). Local, once per process."""
    handlers: Any = DTensor._op_dispatcher._custom_op_handlers
    stock = handlers.get(_UNSCALE)
    if stock is None:
        return

    def unscale(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Unscale the local gradients and all-reduce the report over every mesh axis that shards one of them.

        Collective over these axes. Gradients with the same mesh and placements are left to torch.
        """
        gradients, report, *rest = args
        kinds = [(g.device_mesh, tuple(g.placements)) if isinstance(g, DTensor) else None for g in gradients]
        if len(set(kinds)) == 1 and None not in kinds:
            return stock(op, args, kwargs)
        # DTensor's handler rejects lists with plain tensors. Local tensors do not reach it.
        op([local_of(gradient) for gradient in gradients], report, *rest, **kwargs)
        axes: dict[tuple[int, ...], tuple[DeviceMesh, int]] = {}
        for mesh, placements in dict.fromkeys(kind for kind in kinds if kind is not None):
            for axis, placement in enumerate(placements):
                if not placement.is_replicate() and mesh.size(axis) > 1:
                    ranks = tuple(dist.get_process_group_ranks(mesh.get_group(axis)))
                    axes.setdefault(ranks, (mesh, axis))
        # Twice: a report that arrives over a later axis must also reach the ranks of an earlier one.
        for mesh, axis in [*axes.values()] * (2 if len(axes) > 1 else 1):
            dist.all_reduce(report, op=dist.ReduceOp.MAX, group=mesh.get_group(axis))
        return None

    handlers[_UNSCALE] = unscale
