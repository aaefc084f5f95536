"""Bodies: ``dcp.load`` that only some ranks call."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict

from plain_dcp.round_trip import Job, differing, to_full


def load(
    kind: str, recipe: str, axes: dict[str, int], sharder: str, keep: bool, directory: str, how: str
) -> dict[str, Any]:
    """Load weights on each rank alone, without ``load_state_dict``; compare with a model that all ranks load."""
    path, rank = f"{directory}/0", dist.get_rank()
    groups = [dist.new_group([member]) for member in range(dist.get_world_size())]
    options: Any = {"process_group": groups[rank]} if "group" in how else {"no_dist": True}
    outputs, values, after = [], [], []
    # One model after the other: TE has one state of delayed scaling for all.
    for way in ("none", "together", "alone"):
        job = Job(kind, recipe, axes, sharder, keep, seed=4)
        job.output()  # derived data, such as transposes, of the old bytes
        state = {"model": get_model_state_dict(job.model)}
        if way == "together":
            dcp.load(state, checkpoint_id=path)
            set_model_state_dict(job.model, state["model"])
        for turn in range(dist.get_world_size() if "turns" in how else 1):
            if way == "alone" and ("turns" not in how or turn == rank):
                dcp.load(state, checkpoint_id=path, **options)
            dist.barrier()
        outputs.append(job.output())
        values.append({name: to_full(p) for name, p in job.model.named_parameters()})
        job.step(0)
        after.append({name: to_full(p) for name, p in job.model.named_parameters()})
    return {
        "control": not torch.equal(*outputs[:2]),
        "same output": torch.equal(*outputs[1:]),
        "wrong": differing(*values[1:]),
        "wrong after a step": differing(*after[1:]),
    }
