"""Hugging Face folder of a sharded model, written from a stream of its weights."""

from __future__ import annotations

import json
import os
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from te_fsdp.checkpoint.directory import new_directory
from te_fsdp.checkpoint.lazy_tensors import InMemory, Lazy, write_file, write_index
from te_fsdp.checkpoint.portable.huggingface import TeBlocks, TeNames
from te_fsdp.checkpoint.portable.huggingface_config import write_config
from te_fsdp.checkpoint.shard_files import no_progress, sync
from te_fsdp.checkpoint.storage import absolute
from te_fsdp.collectives.agreement import all_agree, from_rank_0, gather, world_size
from te_fsdp.collectives.rendezvous import collective_call
from te_fsdp.huggingface.fp8_blocks import quantization_config
from te_fsdp.huggingface.stream import WeightFormat, WeightStream, iter_weights

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer


@torch.no_grad()
def save_folder(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Optimizer | None = None,
    *,
    config: Any,
    names: TeNames | None = None,
    blocks: TeBlocks | None = None,
    format: WeightFormat = "fp8-block",
    bucket_bytes: int = 1 << 30,
) -> None:
    """Write a folder of weights for inference engines, one file per bucket of :func:`iter_weights`.

    Ranks receive and write the buckets in turn. ``config.json`` gets ``quantization_config`` for ``"fp8-block"``, as
    vLLM, SGLang and transformers read it. Collective over the world: call on all ranks, between steps. For weights in
    high precision, :func:`te_fsdp.checkpoint.save_huggingface` writes several files at once.

    Args:
        path: The folder to make. It appears when it is complete and synced.
        model: Sharded on any mesh or not sharded, quantized or not.
        optimizer: If it keeps main weights, values come from them.
        config: As for :func:`te_fsdp.checkpoint.save_huggingface`; so are ``names`` and ``blocks``.
        names: Names of the model's parts.
        blocks: Options of the layers that the model does not record.
        format: As for :func:`iter_weights`.
        bucket_bytes: Limit in bytes of what a rank allocates; a file has at most half of it.

    Raises:
        CheckpointError: What :func:`iter_weights` raises; ``path`` exists; a file cannot be written. The same on all
            ranks, and no folder appears.
    """
    with collective_call("huggingface.save_folder"), ExitStack() as stack:
        stream = iter_weights(
            model,
            optimizer,
            config=config,
            names=names,
            blocks=blocks,
            format=format,
            receiver=range(world_size()),
            bucket_bytes=bucket_bytes,
        )
        folder = from_rank_0(lambda: stack.enter_context(new_directory(absolute(path))))
        tensors, files = _write_buckets(stream, folder)

        def finish() -> None:
            write_index(folder, tensors, files)
            write_config(folder, config, tensors)
            if format == "fp8-block":
                _add_to_config(folder / "config.json", quantization_config(config, names=names))
            stack.close()

        from_rank_0(finish)


def _write_buckets(stream: WeightStream, folder: Path) -> tuple[dict[str, Lazy], dict[str, list[str]]]:
    """Write a file for each bucket; return shapes and dtypes, and names by file. Collective over the world."""
    described: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
    files: dict[str, list[str]] = {}
    count = len(stream.buckets)
    for number, groups in enumerate(stream.buckets, 1):
        file = f"model-{number:05d}-of-{count:05d}.safetensors" if count > 1 else "model.safetensors"
        files[file] = [name for group in groups for name in stream.names_of(group)]
        bucket = {name: next(stream)[1] for name in files[file]}
        held = {name: tensor for name, tensor in bucket.items() if tensor is not None}
        described |= {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in held.items()}
        all_agree(partial(_write, folder / file, held))
        del bucket, held
    return {name: Lazy(*one, _unread) for part in gather(described) for name, one in part.items()}, files


def _write(file: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Write a bucket, on the rank that received it. Local operation."""
    if tensors:
        write_file(file, {name: InMemory(tensor) for name, tensor in tensors.items()}, {}, no_progress)
        sync(file)


def _unread(first: int, last: int) -> torch.Tensor:
    raise AssertionError("the index and config.json need shapes and dtypes alone")


def _add_to_config(file: Path, quantization: dict[str, Any]) -> None:
    contents = json.loads(file.read_text(encoding="utf-8"))
    key = "dtype" if "dtype" in contents else "torch_dtype"
    contents |= {key: "bfloat16", "quantization_config": quantization}
    file.write_text(json.dumps(contents, indent=2) + "\n", encoding="utf-8")
