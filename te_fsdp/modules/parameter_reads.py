"""Parameters that a forward reads, of its own module or of others, or returns."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from te_fsdp.errors import OrderError
from te_fsdp.records import ModuleBinding
from te_fsdp.upstream import torch_dtensor as _torch
from te_fsdp.upstream.torch_functions import is_in_forward


def check_unsharded(binding: ModuleBinding, name: str, parameter: DTensor) -> None:
    """Raise OrderError if a parameter is still sharded over data parallel: kernels must not read shards. Local."""
    mesh = binding.unsharded_mesh(name)
    if mesh is not None and (parameter.device_mesh is mesh or parameter.device_mesh == mesh):
        return
    raise OrderError(
        f"{binding.name or 'model'}: forward with {name!r} on mesh axes {parameter.device_mesh.mesh_dim_names}",
        expected="the unsharded parameter",
        got=f"a shard of it, placements {tuple(parameter.placements)}",
        why="FSDP2 all-gathers in the forward hooks of its units, which did not run",
        fix="call the sharded module itself (not .forward or another method), or call unshard() first",
    )


def is_read_as_local(binding: ModuleBinding, name: str, parameter: DTensor) -> bool:
    """Return whether a read of a parameter gets its local tensor: in forward, if it is unsharded. Local operation.

    The parameter belongs to a module outside of TE. tp replicates it, so the local tensor has all elements.
    """
    return (
        name not in binding.distributed
        and parameter.device_mesh == binding.unsharded_mesh(name)
        # Recomputation of a function runs outside of any module's forward.
        and (is_in_forward() or (_torch.in_backward() and torch.is_grad_enabled()))
    )


def replace_returned_parameters(
    output: tuple[Any, ...], local: Collection[torch.Tensor | None], *, copy: bool
) -> Any:
    """Replace local parameters among a forward's results (``return_bias=True``) by tensors that outlive the forward.

    ``local`` are the tensors of :func:`te_fsdp.modules.mixin.local_parameters`, or else the module's direct parameters.
    ``copy`` avoids a dangling view if FSDP2 may free the parameter after this forward.
    """
    inside = set(map(id, local))
    results = list(output)
    for index, item in enumerate(output):
        if isinstance(item, torch.Tensor) and id(item) in inside:
            # Do not create a view without gradients: it would require gradients as soon as its base does.
            kept_view = item.view_as(item) if torch.is_grad_enabled() else item.detach()
            results[index] = item.clone() if copy else kept_view
    return tuple(results)
