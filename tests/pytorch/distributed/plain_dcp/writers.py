"""Bodies: torch's other ways to write the state dict of a tensor-parallel model."""

from __future__ import annotations

import pickle
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

from plain_dcp.round_trip import Job, differing


def read_by(way: str, recipe: str, directory: str) -> dict[str, Any]:
    """Save on dp=1, tp=2 in a way, load on dp=2; compare with the values before."""
    job = Job("gated MLP", recipe, {"tp": 2, "dp_shard": 1}, "te_fsdp", False, seed=1)
    other = Job("gated MLP", recipe, {"dp_shard": 2}, "te_fsdp", False, seed=2)
    if recipe == "none":
        job.step(0)
    expected, state = job.values(), job.state()
    outcome: dict[str, Any] = {"control": len(differing(expected, other.values()))}
    if way == "another process":
        # As ``dcp.async_save`` with a process: a copy on the CPU, then a pickle. Without a CPU copy, tensors on a
        # GPU arrive as handles, which no process opens that made them.
        stager = DefaultStager(StagingOptions(False, False, False, False))
        state = pickle.loads(ForkingPickler.dumps(stager.stage(state)))
        dcp.save(state, checkpoint_id=directory)
        result = other.state()
        dcp.load(result, checkpoint_id=directory)
        other.take(result)
        outcome["wrong"] = differing(expected, other.values())
        return outcome
    together = way == "safetensors, joined"
    mapping = dict.fromkeys(state["model"], 1) if together else None
    dcp.save(
        state["model"],
        storage_writer=HuggingFaceStorageWriter(
            path=directory,
            save_distributed=True,
            enable_consolidation=together,
            fqn_to_index_mapping=mapping,
        ),
    )
    if together:
        from safetensors.torch import load_file

        values = load_file(f"{directory}/{_file(directory)}")
    else:
        result = other.state()["model"]
        dcp.load(result, storage_reader=HuggingFaceStorageReader(directory))
        set_model_state_dict(other.model, result, options=StateDictOptions(strict=False))
        values = other.values()
    outcome["wrong"] = [k for k in state["model"] if not torch.equal(values[k].cpu(), expected[k].cpu())]
    return outcome


def _file(directory: str) -> str:
    import os

    (name,) = [name for name in os.listdir(directory) if name.endswith(".safetensors")]
    return name
