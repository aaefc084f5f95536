"""safetensors files, single or sharded with an index, read and written by blocks.

The format: eight bytes with the length of a JSON header, the header (name -> dtype, shape, first and last byte),
the tensors' bytes one after the other. Of the package ``safetensors``, ``save_file`` takes tensors that are all in
memory, and ``safe_open`` maps the file: a file that is cut short meanwhile, or a disk that fails, ends the process by
SIGBUS. It tells no offsets either, so that nothing but the forty lines that check the header would go. These functions
hold a block at a time, and raise. What the package refuses in a header they refuse as well.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from te_fsdp.checkpoint.lazy import Lazy, Record, Stored, as_bytes, read_bytes, total_bytes
from te_fsdp.checkpoint.manifest import Tick
from te_fsdp.errors import CheckpointError

INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
#: The package's own limit.
_MOST_HEADER = 100_000_000


def is_safetensors(path: Path) -> bool:
    """Whether a path is a safetensors file or a folder of them."""
    if path.is_dir():
        return (path / INDEX).is_file() or any(p.suffix == ".safetensors" for p in path.iterdir())
    return path.suffix == ".safetensors"


def open_safetensors(path: Path) -> tuple[dict[str, Lazy], dict[str, str]]:
    """Tensors and metadata of a file, or of a folder with an index or with one file. Local operation.

    Raises:
        CheckpointError: Files missing, truncated or damaged, or an index that does not fit them.
    """
    if not path.is_dir():
        return _open_file(path)
    if (path / INDEX).is_file():
        return _open_sharded(path / INDEX)
    files = sorted(path.glob("*.safetensors"))
    if len(files) != 1:
        raise CheckpointError(
            f"{path}: a folder of safetensors files",
            expected=f"{INDEX}, or one file",
            got=f"{len(files)} files without an index",
            fix="add the index, or name one file",
        )
    return _open_file(files[0])


def _open_sharded(index: Path) -> tuple[dict[str, Lazy], dict[str, str]]:
    try:
        where = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        files = sorted(set(where.values()))
        if any(Path(name).name != name for name in files):
            raise ValueError("a file outside of the folder")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise _damaged(index, f"unreadable index ({type(error).__name__}: {error})") from error
    tensors: dict[str, Lazy] = {}
    metadata: dict[str, str] = {}
    problems = []
    for name in files:
        if not (index.parent / name).is_file():
            problems.append(f"{name} is missing")
            continue
        found, more = _open_file(index.parent / name)
        metadata |= more
        for key in found.keys() & tensors.keys():
            problems.append(f"{key} is in two files")
        for key in found.keys() - {k for k, file in where.items() if file == name}:
            problems.append(f"{key} is in {name} but not listed as such")
        tensors |= found
    problems += [f"{key} is not in {where[key]}" for key in where.keys() - tensors.keys()]
    if problems:
        more_text = f" and {len(problems) - 5} more" if len(problems) > 5 else ""
        raise _damaged(index, "; ".join(sorted(problems)[:5]) + more_text)
    return {key: tensors[key] for key in where}, metadata


def _damaged(path: Path, what: str) -> CheckpointError:
    return CheckpointError(f"{path}: {what}", fix="the file is damaged or truncated, copy it again")


def _open_file(path: Path) -> tuple[dict[str, Lazy], dict[str, str]]:
    try:
        size = path.stat().st_size
    except OSError as error:
        fix = "a model of the Hugging Face hub is downloaded first: hf download NAME --local-dir FOLDER"
        raise CheckpointError(f"{path}: no such file", fix=f"check the path; {fix}") from error
    if size < 8:
        raise _damaged(path, f"not a safetensors file ({size} bytes)")
    (length,) = struct.unpack("<Q", bytes(read_bytes(path, 0, 8, "header"))[:8])
    if length > min(size - 8, _MOST_HEADER):
        raise _damaged(path, f"not a safetensors file (a header of {length} bytes in a file of {size})")
    try:
        header = json.loads(bytes(read_bytes(path, 8, length, "header"))[:length])
        metadata = header.pop("__metadata__", {})
        if not all(isinstance(text, str) for text in metadata.values()):
            raise ValueError("metadata that is no text")
        tensors = {key: _tensor(path, key, 8 + length, described) for key, described in header.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise _damaged(path, f"unreadable header ({type(error).__name__}: {error})") from error
    end = 8 + length
    for record in sorted((tensor.record for tensor in tensors.values()), key=lambda record: record.offset):
        if record.offset != end and record.count:
            raise _damaged(path, f"{record.label} begins at byte {record.offset} instead of {end}")
        end = max(end, record.offset + record.count)
    if end != size:
        raise _damaged(path, f"expected {end} bytes, got {size}")
    return dict(tensors), metadata


def _tensor(path: Path, key: str, begin: int, described: Mapping[str, Any]) -> Stored:
    shape, (first, last) = tuple(described["shape"]), described["data_offsets"]
    if not all(type(n) is int and n >= 0 for n in (*shape, first, last)):
        raise ValueError(f"{key} has the shape {shape} and lies at {first} to {last}")
    dtype = _DTYPES.get(described["dtype"])
    if dtype is None:
        raise ValueError(f"{key} has the unknown dtype {described['dtype']!r}")
    if math.prod(shape) * dtype.itemsize != last - first:
        raise ValueError(f"{key} of shape {shape} does not fit its {last - first} bytes")
    stride = tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))
    return Stored(key, Record(path, begin + first, last - first, None, key), shape, dtype, stride)


def write_file(path: Path, tensors: Mapping[str, Lazy], metadata: Mapping[str, str], tick: Tick) -> None:
    """Write or overwrite a file, with texts for its header. Local operation.

    Neither atomic nor synced: see :mod:`te_fsdp.checkpoint.directory`.

    Raises:
        CheckpointError: A dtype that safetensors lacks, or a tensor that cannot be read.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt", **metadata}}
    at = 0
    for key, tensor in tensors.items():
        if tensor.dtype not in _NAMES:
            raise CheckpointError(
                f"{key}: safetensors cannot hold it", expected=", ".join(_NAMES.values()), got=tensor.dtype
            )
        end = at + tensor.bytes
        header[key] = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for tensor in tensors.values():
            for block in as_bytes(tensor):
                file.write(block)
                tick(len(block))


def write_folder(
    folder: Path, tensors: Mapping[str, Lazy], metadata: Mapping[str, str], tick: Tick, shard_bytes: int
) -> list[str]:
    """Write ``model.safetensors``, or shards and their index, into a folder; returns the files' names.

    A shard exceeds ``shard_bytes`` only where a single tensor does. ``metadata`` goes into the first. See
    :func:`write_file`.
    """
    files = deal(tensors, ([key] for key in tensors), shard_bytes)
    for n, (file, names) in enumerate(files.items()):
        write_file(folder / file, {name: tensors[name] for name in names}, {} if n else metadata, tick)
    return [*files, *write_index(folder, tensors, files)]


def deal(
    tensors: Mapping[str, Lazy], together: Iterable[Sequence[str]], shard_bytes: int
) -> dict[str, list[str]]:
    """Names of tensors by the file of a folder that they go into, in order.

    Names that are ``together`` go into one file, which exceeds ``shard_bytes`` only where these do.
    """
    shards: list[list[str]] = [[]]
    filled = 0
    for names in together:
        size = sum(tensors[name].bytes for name in names)
        if shards[-1] and filled + size > shard_bytes:
            shards.append([])
            filled = 0
        shards[-1] += names
        filled += size
    if len(shards) == 1:
        return {_SINGLE: shards[0]}
    return {f"model-{n:05d}-of-{len(shards):05d}.safetensors": names for n, names in enumerate(shards, 1)}


def write_index(folder: Path, tensors: Mapping[str, Lazy], files: Mapping[str, Sequence[str]]) -> list[str]:
    """Write the index of a folder with several files, given with their names; returns its name, none for one file."""
    if len(files) == 1:
        return []
    where = {name: file for file, names in files.items() for name in names}
    index = {"metadata": {"total_size": total_bytes(tensors)}, "weight_map": where}
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    return [INDEX]
