"""Hugging Face folder of a sharded model, written from a stream of its weights."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from te_fsdp.checkpoint.directory import new_directory
from te_fsdp.checkpoint.lazy_tensors import assign_files, total_bytes, write_header, write_index
from te_fsdp.checkpoint.portable.fp8_blocks import quantization_config
from te_fsdp.checkpoint.portable.huggingface_config import write_config
from te_fsdp.checkpoint.portable.huggingface_model import TeBlocks, TeNames
from te_fsdp.checkpoint.portable.weight_stream import WeightFormat, WeightStream
from te_fsdp.checkpoint.portable.weight_transfer import raise_error
from te_fsdp.checkpoint.shard_files import sync
from te_fsdp.checkpoint.storage import absolute
from te_fsdp.collectives.agreement import all_agree, from_rank_0, rank, world_size
from te_fsdp.collectives.rendezvous import collective_call
from te_fsdp.errors import CheckpointError

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

#: Least bytes of a file that is started only to let more ranks write at once.
_SMALLEST_FILE = 256 << 20
#: Limit in bytes of what a rank allocates on its device, except for a larger group.
_BUCKET_BYTES = 256 << 20
_MAX_FILE_BYTES = 5 * 10**9


@torch.no_grad()
def save_huggingface(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Optimizer | None = None,
    *,
    config: Any,
    names: TeNames | None = None,
    blocks: TeBlocks | None = None,
    dtype: torch.dtype | None = None,
    max_file_bytes: int = _MAX_FILE_BYTES,
) -> None:
    """Write a model as a folder that ``transformers.AutoModelForCausalLM.from_pretrained`` reads, from any mesh.

    Norms, heads, activation and layouts are read from the model. The tensors are those of
    :func:`te_fsdp.huggingface.iter_weights`. Each is assembled on the device of the rank that writes its file, together
    with its group (query, key and value of a layer; gate and up; one expert). In addition to the model, a rank needs at
    most five times the bytes of the largest group, on the device and in the CPU's memory together. The folder appears
    when it is complete and on disk. Collective over the world: call on all ranks, between steps; all ranks must reach
    the folder.

    Args:
        path: The folder to make. It must not exist, or be an empty directory.
        model: Sharded or not, quantized or not.
        optimizer: If it has main weights, these are written, rounded once.
        config: A Hugging Face folder of the same model, whose tokenizer and similar files are copied; or a
            ``transformers`` configuration, or the contents of a ``config.json``.
        names: Names of the model's parts.
        blocks: Options of the layers that the model does not show, because its norms are of a custom class.
        dtype: Dtype of the files; ``None``: that of each parameter.
        max_file_bytes: Size after which another file is started.

    Raises:
        CheckpointError: ``path`` exists; an unsupported model, or another one than ``config`` describes; ranks that do
            not have every element; files that cannot be written. The same on all ranks, and no folder appears.
        OrderError: An optimizer of other parameters.
    """
    with collective_call("checkpoint.save_huggingface"):
        options = (config, names, blocks, "native", None, _BUCKET_BYTES, None)
        stream = all_agree(
            lambda: WeightStream(model, optimizer, *options, dtype=dtype, comparable=False)  # type: ignore[arg-type]
        )
        _write_folder(path, stream, config, max_file_bytes)


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
    bucket_bytes: int = _BUCKET_BYTES,
    max_file_bytes: int = _MAX_FILE_BYTES,
) -> None:
    """Write a folder of weights for inference engines, as :func:`te_fsdp.checkpoint.save_huggingface`.

    ``config.json`` gets ``quantization_config`` for ``"fp8-block"``, as vLLM, SGLang and transformers read it. The
    arguments and errors are those of :func:`te_fsdp.checkpoint.save_huggingface`; ``format`` and ``bucket_bytes``, the
    limit in bytes of what a rank allocates on its device, are those of :func:`te_fsdp.huggingface.iter_weights`.
    """
    with collective_call("huggingface.save_folder"):
        options = (config, names, blocks, format, None, bucket_bytes, None)
        stream = all_agree(lambda: WeightStream(model, optimizer, *options, comparable=False))
        _write_folder(path, stream, config, max_file_bytes)


def _write_folder(path: Any, stream: WeightStream, config: Any, max_file_bytes: int) -> None:
    """Write all tensors of a stream that has not started. Collective over the world."""
    if type(max_file_bytes) is not int or max_file_bytes < 1:
        raise CheckpointError("max_file_bytes", expected="a number of bytes from 1", got=repr(max_file_bytes))
    stream.start()
    ranks, tensors = world_size(), stream.tensors
    # More files than max_file_bytes requires, so that all ranks write, unless files would become small.
    most = min(max_file_bytes, max(_SMALLEST_FILE, -(-total_bytes(tensors) // ranks)))
    groups = (group for bucket in stream.buckets for group in bucket)
    assigned = assign_files(tensors, map(stream.names_of, groups), most)
    count = len(assigned)  # spread over the world: adjacent ranks share a host
    writers = [n * ranks // count if count <= ranks else n % ranks for n in range(count)]
    files = {file: (writer, names) for writer, (file, names) in zip(writers, assigned.items(), strict=True)}
    # Before the first tensor, because it replaces the buckets.
    stream.send_to({name: writer for writer, names in files.values() for name in names})
    with ExitStack() as stack:
        # Rank 0 alone makes the hidden folder, and renames it at the end, when all ranks have written.
        folder = from_rank_0(lambda: stack.enter_context(new_directory(absolute(path))))
        failed = _write_files(stream, folder, files)
        # After the end of the stream: a rank that cannot write still sends its parts to the others.
        all_agree(lambda: raise_error(failed))

        def finish() -> None:
            write_index(folder, stream.tensors, {file: names for file, (_, names) in files.items()})
            is_fp8 = stream.format == "fp8-block"
            quantization = quantization_config(config, names=stream.names) if is_fp8 else None
            write_config(folder, config, stream.tensors, quantization)
            stack.close()

        from_rank_0(finish)


def _write_files(
    stream: WeightStream, folder: Path, files: Mapping[str, tuple[int, Sequence[str]]]
) -> Exception | None:
    """Write the tensors that this rank receives, in a thread, while the next bucket is assembled.

    Collective over the world, also after an error of this rank, which is returned.
    """
    file_of = {name: file for file, (_, names) in files.items() for name in names}
    failed: Exception | None = None

    def append(bucket: dict[str, torch.Tensor]) -> None:
        for name, tensor in bucket.items():
            file = folder / file_of[name]
            if not file.exists():
                # The header needs only shapes. The bytes follow in its order, which is that of the stream.
                held = {key: stream.tensors[key] for key in files[file.name][1]}
                write_header(file, held, {})
            with file.open("ab") as opened:
                opened.write(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)

    def finish() -> None:
        for file, (writer, _) in files.items():
            # A file is on disk only when the host that wrote it has synced it.
            if writer == rank():
                sync(folder / file)

    with ThreadPoolExecutor(1) as pool:
        writing = pool.submit(lambda: None)
        for groups in stream.buckets:
            # Every rank takes all names of the bucket, with ``None`` for the tensors of others: it is collective.
            count = sum(len(stream.names_of(group)) for group in groups)
            bucket = {name: one.cpu() for name, one in islice(stream, count) if one is not None}
            try:
                # At most two buckets are in the CPU's memory: the one being written, and the next.
                writing.result()
                writing = pool.submit(append, bucket)
            except Exception as error:
                failed = failed or error
            del bucket
        for _ in stream:  # its end is collective
            pass
        try:
            writing.result()
            finish()
        except Exception as error:
            failed = failed or error
    return failed
