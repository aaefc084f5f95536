"""Tensors and objects in a directory of ``torch.distributed.checkpoint``, with lazy reading."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from te_fsdp.boxed_dtensor import ORIGINAL_ORDER
from te_fsdp.checkpoint.directory import damaged, why_no_checkpoint
from te_fsdp.checkpoint.index import Index, files_in, read_metadata
from te_fsdp.checkpoint.lazy_tensors import Chunked, Lazy, Piece
from te_fsdp.checkpoint.manifest import DCP_METADATA, is_ours, unreadable
from te_fsdp.checkpoint.storage import listing


def with_leaves(value: Any, change: Callable[[Any, str], Any], key: str = "") -> Any:
    """Return nested dicts and lists with every tensor replaced by ``change(tensor, key)``, keys joined by dots."""
    if isinstance(value, Lazy | torch.Tensor):
        return change(value, key)
    if isinstance(value, Mapping):
        return {k: with_leaves(v, change, f"{key}.{k}" if key else str(k)) for k, v in value.items()}
    if type(value) in (list, tuple):
        return type(value)(with_leaves(v, change, f"{key}.{n}") for n, v in enumerate(value))
    return value


@dataclass
class DcpContents:
    """Contents of a plain DCP directory, by key."""

    tensors: dict[str, Lazy]
    others: dict[str, Piece]  #: Pickled objects
    paths: dict[str, tuple[Any, ...]]  #: Location in the nested dict, for keys that DCP flattened
    records: list[Piece]  #: All records of the directory's files


def open_dcp(path: Path, *, needs_paths: bool = False) -> DcpContents:
    """Return the contents of a plain DCP directory. Local operation.

    Raise CheckpointError for damage, for a checkpoint of te_fsdp that has lost its manifest, and with ``needs_paths``
    for metadata that does not record the location of each key in the nested dict.
    """
    metadata = read_metadata(path)
    keys, known = metadata.state_dict_metadata.keys(), metadata.planner_data
    has_paths = bool(keys) and isinstance(known, dict) and keys <= known.keys()
    if is_ours(getattr(metadata.storage_meta, "save_id", None)) or (needs_paths and not has_paths):
        raise why_no_checkpoint(path)
    file_of = files_in(path)
    records: dict[str, list[Piece]] = {}
    ends: dict[str, int] = {}
    with unreadable(path, DCP_METADATA):
        order = lambda item: (item[1].relative_path, item[1].offset, item[1].length)  # noqa: E731
        # In the order of the files, in which records that overlap are neighbors.
        for index, place in sorted(metadata.storage_data.items(), key=order):
            name, begin = place.relative_path, place.offset
            if begin < ends.get(name, 0) or place.length <= 0:
                what = f"no {place.length} bytes of its own at byte {begin} of {name}"
                raise ValueError(f"{index.fqn}: {what}; is another piece stored there (safetensors?)")
            ends[name] = begin + place.length
            records.setdefault(index.fqn, []).append(Piece(file_of(name), index.fqn, begin, place.length))
        found = Index.of(metadata)
        others = {k: records[k][0] for k in metadata.state_dict_metadata if k not in found.tensors}
        paths, described = dict(metadata.planner_data or {}), metadata.state_dict_metadata.keys()
        for key in (records.keys() - described) | (described - paths.keys() if paths else set()):
            raise ValueError(f"the description of {key} is incomplete")
        for key in (key for key, path in paths.items() if key != ".".join(map(str, path))):
            raise ValueError(f"the path of {key} is {paths[key]}")  # DCP joins the path into the key
    problems, seen = [], listing(path)
    for name, end in sorted(ends.items()):
        file = seen.get(name) or path / name
        if name not in seen and not file.is_file():
            problems.append(f"{name} is missing")
        elif (size := file.stat().st_size) < end:
            problems.append(f"{name}: expected {end} bytes, got {size}")
    damaged(path, problems)
    tensors = tensors_of(path, found, check=True)
    # te_fsdp's DTensors record the order of their rows as a memory format, which DCP writes and does not use.
    for key, tensor in tensors.items():
        properties = getattr(metadata.state_dict_metadata[key], "properties", None)
        if isinstance(tensor, Chunked) and getattr(properties, "memory_format", None) is ORIGINAL_ORDER:
            tensor.in_original_order = True
    return DcpContents(tensors, others, paths, [*chain.from_iterable(records.values())])


def tensors_of(path: Path, index: Index, *, check: bool = False) -> dict[str, Lazy]:
    """Return all tensors of a directory; ``check`` compares with ``torch.save``'s checksums. Local operation.

    Raise CheckpointError if the pieces do not cover a tensor, or are outside of the directory.
    """
    file_of = files_in(path)
    tensors: dict[str, Lazy] = {}
    with unreadable(path, DCP_METADATA):
        for key, rows in index.rows(index.tensors):
            (shape, dtype), chunks = index.tensors[key], []
            for number, begin, length, *box in rows.tolist():
                # Nothing is read here. A piece opens its file only when its values are needed.
                at, sizes = tuple(box[: len(shape)]), tuple(box[len(shape) :])
                piece = Piece(file_of(index.files[number]), key, begin, length, sizes, dtype, check)
                chunks.append((at, piece))
            tensors[key] = Chunked(key, shape, dtype, chunks)
    return tensors
