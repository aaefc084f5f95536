"""Bodies: plain DCP of HFSDP's states whose rows several axes shard unevenly."""

from __future__ import annotations

import shutil
import tempfile
from typing import Any

import harness
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from plain_dcp.partial_optimizer_state import _step


def resumed(copies: int, outer: str, full: bool) -> dict[str, Any]:
    """Save on 2 x 2 ranks and load on a different mesh. Return the error and the changed values."""
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(folder, 0)
    options = StateDictOptions(full_state_dict=full)
    job, other = _job(2, "optim", 3), _job(copies, outer, 4)
    _step(*job)
    saved = {"optimizer": get_optimizer_state_dict(*job, options=options)}
    if not full:
        dcp.save(saved, checkpoint_id=folder[0])
    own = {"optimizer": get_optimizer_state_dict(*other)}  # creates the states
    before, text = _states(other), ""
    try:
        if not full:
            dcp.load(own, checkpoint_id=folder[0])
            saved = own
        set_optimizer_state_dict(*other, saved["optimizer"], options=options)
    except BaseException as error:  # CheckpointException does not derive from Exception
        text = f"{type(error).__name__}: {error}"
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(folder[0])
    unchanged = before == _states(other)
    return {"text": text, "unchanged": unchanged, "equal": _full_states(*job) == _full_states(*other)}


def _job(copies: int, outer: str, seed: int) -> tuple[nn.Module, Any]:
    import transformer_engine.pytorch as te

    import te_fsdp

    meshes = te_fsdp.Meshes.build(dp_replicate=copies, device_type=harness.device_type())
    model = nn.Sequential(Odd(), te.Linear(32, 32, bias=False, params_dtype=torch.bfloat16, device="meta"))
    te_fsdp.fully_shard(model, meshes, outer_strategy=outer)
    te_fsdp.materialize(model, seed=seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2**-4)
    te_fsdp.main_weights(model, optimizer)
    return model, te_fsdp.shard_optimizer(optimizer) if outer == "optim" else optimizer


class Odd(nn.Module):
    """A weight of 18 x 9, of which 2 x 2 ranks have uneven parts. Its sum is added to the inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(18, 9, dtype=torch.bfloat16, device="meta"))

    def reset_parameters(self) -> None:
        nn.init.ones_(self.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.weight.sum()


def _states(job: tuple[nn.Module, Any]) -> list[list[float]]:
    from te_fsdp.upstream.torch_dtensor import local_of

    states = [job[1].state[p] for p in job[0].parameters()]
    return [local_of(v).flatten().tolist() for state in states for v in state.values() if torch.is_tensor(v)]


def _full_states(model: nn.Module, optimizer: Any) -> dict[str, list[float]]:
    """Return the unsharded states. The local ones differ between meshes."""
    options = StateDictOptions(full_state_dict=True, flatten_optimizer_state_dict=True)
    states = get_optimizer_state_dict(model, optimizer, options=options)
    return {key: v.flatten().tolist() for key, v in states.items() if torch.is_tensor(v)}
