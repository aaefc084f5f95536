"""Bodies: ``set_state_dict`` with state dicts on rank 0 alone."""

from __future__ import annotations

from typing import Any

import harness
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict


def loaded(broadcast: bool, which: str, **options: Any) -> list[str]:
    """Load the states of rank 0. Returns the error, or the weights that have changed."""
    import transformer_engine.pytorch as te

    import te_fsdp

    meshes = te_fsdp.Meshes.build(device_type=harness.device_type())
    model = te.Linear(32, 32, device="meta", params_dtype=torch.float32)
    te_fsdp.fully_shard(model, meshes, **options)
    te_fsdp.materialize(model, seed=0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.ones(4, 32, device=harness.device())).sum().backward()
    optimizer.step()
    states = get_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True))
    missing = {"both": (0, 1), "model": (0,), "optimizer": (1,)}[which] if dist.get_rank() else ()
    states = [{} if number in missing else state for number, state in enumerate(states)]
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=broadcast)
    try:
        set_state_dict(
            model, optimizer, model_state_dict=states[0], optim_state_dict=states[1], options=options
        )
    except te_fsdp.CheckpointError as error:
        return [str(error)]
    return []
