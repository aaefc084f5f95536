"""Bodies of meshes with slices whose ranks are not ascending."""

from __future__ import annotations

import harness
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard


def error_of_unsorted_slice(call: str) -> str:
    """Return the error of a call with a slice that is ascending on ranks 0 and 1 only."""
    import transformer_engine.pytorch as te

    import te_fsdp

    names = {"stages": ("pp", "dp_shard"), "torch": ("dp_replicate", "dp_shard")}.get(
        call, ("dp_shard", "tp")
    )
    mesh = DeviceMesh(harness.device_type(), torch.tensor([[0, 1], [3, 2]]), mesh_dim_names=names)
    linear = te.Linear(32, 32, params_dtype=torch.float32, device="meta")
    try:
        if call == "stages":
            te_fsdp.Meshes.from_device_mesh(mesh["dp_shard"], pp=mesh["pp"])
        elif call == "slice":
            te_fsdp.Meshes.from_device_mesh(mesh["tp"])
        elif call == "set_device_mesh":
            te_fsdp.set_device_mesh(linear, tp_mesh=mesh["tp"])
        else:
            torch.manual_seed(0)
            te_fsdp.set_device_mesh(linear, weight_mesh=mesh["dp_shard"])
            fully_shard(linear, mesh=mesh)
            linear.to_empty(device=harness.device())
            linear.reset_parameters()
            linear(torch.ones(4, 32, device=harness.device()))
    except te_fsdp.MeshError as error:
        return str(error)
    return ""
