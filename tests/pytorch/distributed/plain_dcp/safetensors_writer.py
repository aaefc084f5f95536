"""Bodies: torch's Hugging Face storage (``HuggingFaceStorageWriter``) with quantized weights."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch.distributed.checkpoint import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

from plain_dcp.round_trip import Job, within_one_step


def saved(kind: str, recipe: str, axes: dict[str, int], joined: bool, directory: str) -> dict[str, Any]:
    """Save a quantized model in safetensors. Compare the joined file, or the model that a different mesh loads."""
    job = Job(kind, recipe, axes, "te_fsdp", False, seed=1)
    expected, state = job.values(), job.state()["model"]
    mapping = dict.fromkeys(state, 1) if joined else None
    writer = HuggingFaceStorageWriter(
        path=directory, save_distributed=True, enable_consolidation=joined, fqn_to_index_mapping=mapping
    )
    dcp.save(state, storage_writer=writer)
    dist.barrier()
    if joined:
        result = load_file(f"{directory}/model-00001-of-00001.safetensors")
        dtypes = {str(result[k].dtype) for k in state}
        wrong = [k for k in state if not torch.equal(result[k].float(), expected[k].bfloat16().float().cpu())]
        return {"wrong": wrong, "dtypes": dtypes, "control": 1}
    other = Job(kind, recipe, {"dp_shard": dist.get_world_size()}, "te_fsdp", False, seed=2)
    before, target = other.values(), other.state()["model"]
    control = sum(not within_one_step(before[k], expected[k], recipe) for k in state)
    dcp.load(target, storage_reader=HuggingFaceStorageReader(directory))
    set_model_state_dict(other.model, target, options=StateDictOptions(strict=False))
    values = other.values()
    wrong = [k for k in state if not within_one_step(values[k], expected[k], recipe)]
    return {"wrong": wrong, "dtypes": {"torch.bfloat16"}, "control": control}
