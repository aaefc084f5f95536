"""Bodies: full state dicts that rank 0 broadcasts, with ``cpu_offload``."""

from __future__ import annotations

import functools
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from plain_dcp import round_trip


def broadcast(kind: str, recipe: str, axes: dict[str, int], sharder: str) -> dict[str, object]:
    """Load rank 0's values with and without ``cpu_offload``; compare outputs, and the next step's values."""
    first = round_trip.Job(kind, recipe, axes, sharder, True, seed=3)
    first.step(0)
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    weights = get_model_state_dict(first.model, options=options)
    states = get_optimizer_state_dict(first.model, first.optimizer, options=options)
    outputs, values = [], []
    for offload in (False, True):
        job = round_trip.Job(kind, recipe, axes, sharder, True, seed=4)
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True, cpu_offload=offload)
        here = dist.get_rank() == 0
        # ``cpu`` copies, as it does on a GPU.
        with mock.patch.object(
            torch.Tensor, "cpu", functools.partialmethod(torch.Tensor.to, "cpu", copy=True)
        ):
            set_model_state_dict(job.model, dict(weights) if here else {}, options=options)
        set_optimizer_state_dict(job.model, job.optimizer, states if here else {}, options=options)
        outputs.append(job.output())
        job.step(1)
        values.append(job.values())
    control = round_trip.Job(kind, recipe, axes, sharder, True, seed=4).output()
    return {
        "control": not torch.equal(outputs[0], control),
        "same output": torch.equal(*outputs),
        "wrong": round_trip.differing(*values),
    }
