"""Bodies: buffers that are DTensors, as torch's `parallelize_module` makes them."""

from __future__ import annotations

from typing import Any

import harness
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from checkpointing.mistakes import error_of

PLACEMENTS = {"copied": Replicate(), "rows": Shard(0), "columns": Shard(1)}


def build(seed: int) -> nn.Module:
    """Return buffers of 5 x 3 elements in uneven shards, or plain ones in a world of one process."""
    module = nn.Linear(2, 2)
    torch.manual_seed(seed)
    mesh = init_device_mesh(harness.device_type(), (dist.get_world_size(),), mesh_dim_names=("tp",))
    for name, placement in PLACEMENTS.items():
        value = torch.randn(5, 3)
        if dist.get_world_size() > 1:
            value = distribute_tensor(value.to(harness.device()), mesh, [placement])
        module.register_buffer(name, value.to(harness.device()))
    return module.to(harness.device())


def values(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: harness.full(buffer) for name, buffer in module.named_buffers()}


def save_and_load(directory: str) -> dict[str, Any]:
    """Save, load into other values; then drifted copies."""
    import te_fsdp

    torch.manual_seed(0)
    module, other = build(0), build(1)
    expected, fresh = values(module), values(other)
    with torch.device("meta"):  # a program's default device is not that of the ranks' messages
        te_fsdp.checkpoint.save(f"{directory}/{dist.get_world_size()}", module)
        te_fsdp.checkpoint.load(f"{directory}/{dist.get_world_size()}", other)
    wrong = [name for name, value in values(other).items() if not torch.equal(value, expected[name])]
    control = [name for name, value in fresh.items() if not torch.equal(value, expected[name])]
    if isinstance(module.copied, DTensor):
        module.copied.to_local().add_(dist.get_rank())
    drifted = error_of(lambda: te_fsdp.checkpoint.save(f"{directory}/drifted", module))
    return {"wrong": wrong, "control": control, "drifted": drifted}


def load_on_different_mesh(directory: str, saved_on: int) -> list[str]:
    """Load the checkpoint of a different number of ranks. Return the names of wrong buffers."""
    import te_fsdp

    expected, other = values(build(0)), build(1)
    te_fsdp.checkpoint.load(f"{directory}/{saved_on}", other)
    return [name for name, value in values(other).items() if not torch.equal(value, expected[name])]
