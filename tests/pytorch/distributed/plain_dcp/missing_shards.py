"""Bodies: ``dcp.load`` of a directory that lacks the shards of some ranks."""

from __future__ import annotations

from pathlib import Path

import harness
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor


def load_own_shards(axes: dict[str, int], sharder: str, directory: str) -> dict[str, str]:
    """Save on rank 0, and on each rank into a directory of its own, without the other ranks; load both.

    Returns:
        The errors of the loads by directory: "first" of rank 0, also into "plain" tensors, and "own 0" or "own 1".
    """
    import transformer_engine.pytorch as te

    import te_fsdp

    meshes = te_fsdp.Meshes.build(**axes, device_type=harness.device_type())
    options = {"set_parallel_mode": True, **meshes.te_kwargs(), "device": "meta"}
    model = te.LayerNormMLP(32, 64, activation="swiglu", params_dtype=torch.float32, **options)
    if sharder == "torch":
        te_fsdp.set_device_mesh(model, meshes.tp, meshes.weight)
        fully_shard(model, mesh=meshes.device_mesh["dp_shard"])
    else:
        te_fsdp.fully_shard(model, meshes)
    te_fsdp.materialize(model, seed=0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.ones(8, 32, device=harness.device())).sum().backward()
    optimizer.step()
    model_state, optimizer_state = get_state_dict(model, optimizer)
    states = {"model": model_state, "optimizer": optimizer_state}
    own = f"own {dist.get_rank()}"
    for name in ("first", own) if dist.get_rank() == 0 else (own,):
        dcp.save(states, checkpoint_id=Path(directory, name), no_dist=True)
    dist.barrier()
    shards = [value.to_local() for value in model_state.values() if isinstance(value, DTensor)]
    saved, errors = [shard.clone() for shard in shards], {}
    # Entries that no file has: torch omits them, as the caller says, and loads an object in place of a tensor.
    others = {"new": torch.zeros_like(next(v for v in model_state.values() if isinstance(v, DTensor)))}
    planner = dcp.DefaultLoadPlanner(allow_partial_load=True)
    plain = {"model": {name: torch.zeros(value.shape) for name, value in model_state.items()}}
    for name, target, alone in (
        ("first", states, False),
        ("plain", plain, False),
        (own, states | others, True),
    ):
        for shard in shards:
            shard.add_(1)
        path = Path(directory, "first" if name == "plain" else name)
        try:
            dcp.load(target, checkpoint_id=path, no_dist=alone, planner=planner if alone else None)
            errors[name] = "" if all(map(torch.equal, saved, shards)) else "other values"
        except dcp.CheckpointException as error:
            errors[name] = " ".join(f"{rank}: {failure[0]}" for rank, failure in error.failures.items())
    return errors
