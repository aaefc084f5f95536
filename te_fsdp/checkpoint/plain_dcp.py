"""Contents of a directory of ``torch.distributed.checkpoint``, read lazily.

DCP writes each rectangle of a sharded quantized weight as one of TE's quantized tensors, or as high-precision values
if it splits a block of scales. The metadata describes all of them like plain tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any, TypeAlias

import torch

from te_fsdp.boxed_dtensor import ORIGINAL_ORDER
from te_fsdp.checkpoint.directory import damaged, why_no_checkpoint
from te_fsdp.checkpoint.index import Index, files_in, read_metadata
from te_fsdp.checkpoint.lazy_tensors import Chunked, DcpRecord, InMemory, Lazy, Stack, dequantized
from te_fsdp.checkpoint.manifest import DCP_METADATA, is_ours, unreadable
from te_fsdp.checkpoint.shard_files import frame_of
from te_fsdp.checkpoint.storage import listing
from te_fsdp.checkpoint.tensor_entries import Shape
from te_fsdp.errors import CheckpointError, PlacementError
from te_fsdp.layout import Box
from te_fsdp.quantized.components import components_of, describe_format
from te_fsdp.upstream import te as _te

#: A rectangle of a weight: its offsets and its tensor, of TE or plain.
_WeightChunk: TypeAlias = tuple[Shape, Any]


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
    others: dict[str, DcpRecord]  #: Pickled objects
    paths: dict[str, tuple[Any, ...]]  #: Location in the nested dict, for keys that DCP flattened
    records: list[DcpRecord]  #: All records of the directory's files


def open_dcp(path: Path, *, needs_paths: bool = False) -> DcpContents:
    """Return the contents of a plain DCP directory. Local operation.

    Raise CheckpointError for damage, for a checkpoint of te_fsdp that has lost its manifest, and with ``needs_paths``
    for metadata that does not record the location of each key in the nested dict.
    """
    metadata = read_metadata(path)
    keys, planner_data = metadata.state_dict_metadata.keys(), metadata.planner_data
    has_paths = bool(keys) and isinstance(planner_data, dict) and keys <= planner_data.keys()
    if is_ours(getattr(metadata.storage_meta, "save_id", None)) or (needs_paths and not has_paths):
        raise why_no_checkpoint(path)
    file_of = files_in(path)
    records: dict[str, list[DcpRecord]] = {}
    ends: dict[str, int] = {}
    with unreadable(path, DCP_METADATA):
        file_order = lambda item: (item[1].relative_path, item[1].offset, item[1].length)  # noqa: E731
        # In the order of the files, in which records that overlap are neighbors.
        for index, info in sorted(metadata.storage_data.items(), key=file_order):
            name, begin = info.relative_path, info.offset
            if begin < ends.get(name, 0) or info.length <= 0:
                reason = f"no {info.length} bytes of its own at byte {begin} of {name}"
                raise ValueError(f"{index.fqn}: {reason}; is another piece stored there (safetensors?)")
            ends[name] = begin + info.length
            records.setdefault(index.fqn, []).append(DcpRecord(file_of(name), index.fqn, begin, info.length))
        stored = Index.of(metadata)
        objects = {k: records[k][0] for k in metadata.state_dict_metadata if k not in stored.tensors}
        paths, described = dict(metadata.planner_data or {}), metadata.state_dict_metadata.keys()
        for key in (records.keys() - described) | (described - paths.keys() if paths else set()):
            raise ValueError(f"the description of {key} is incomplete")
        for key in (key for key, path in paths.items() if key != ".".join(map(str, path))):
            raise ValueError(f"the path of {key} is {paths[key]}")  # DCP joins the path into the key
    problems, listed = [], listing(path)
    for name, needed in sorted(ends.items()):
        file = listed.get(name) or path / name
        if name not in listed and not file.is_file():
            problems.append(f"{name} is missing")
        elif (size := file.stat().st_size) < needed:
            problems.append(f"{name}: expected {needed} bytes, got {size}")
    damaged(path, problems)
    tensors = tensors_of(path, stored, check=True)
    # te_fsdp's DTensors record the order of their rows as a memory format, which DCP writes and does not use.
    for key, tensor in tensors.items():
        properties = getattr(metadata.state_dict_metadata[key], "properties", None)
        if isinstance(tensor, Chunked) and getattr(properties, "memory_format", None) is ORIGINAL_ORDER:
            tensor.in_original_order = True
    return DcpContents(tensors, objects, paths, [*chain.from_iterable(records.values())])


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
                offsets, sizes = tuple(box[: len(shape)]), tuple(box[len(shape) :])
                piece = DcpRecord(file_of(index.files[number]), key, begin, length, sizes, dtype, check)
                chunks.append((offsets, piece))
            tensors[key] = Chunked(key, shape, dtype, chunks)
    return tensors


# ------------------------------------------------------------------------------------------------------- order of rows


def has_original_order(tensors: Mapping[str, Lazy]) -> bool:
    """Return whether a plain directory records that rows are in the original order, as those of te_fsdp's models do."""
    return any(isinstance(tensor, Chunked) and tensor.in_original_order for tensor in tensors.values())


def cut_by_tp(tensors: Mapping[str, Lazy]) -> set[str]:
    """Return the keys of tensors with sharded rows, in a directory of tensor parallelism; else none.

    Tensor parallelism shows by sharded columns of row-parallel weights. FSDP shards columns only on request.
    """
    if has_original_order(tensors):
        return set()
    chunks_by_key = {key: tensor.chunks for key, tensor in tensors.items() if isinstance(tensor, Chunked)}
    if not any(any(offsets[1:]) for chunks in chunks_by_key.values() for offsets, _ in chunks):
        return set()
    return {key for key, chunks in chunks_by_key.items() if len({offsets[:1] for offsets, _ in chunks}) > 1}


# -------------------------------------------------------------------------------------------- quantized weights


@dataclass
class Quantized:
    """One of TE's quantized weights: its format and its components, in the layout of the weight."""

    format: str
    dtype: torch.dtype
    shape: Shape
    components: dict[str, Lazy]

    def values(self, key: str) -> Lazy:
        """Return the FP32 values."""
        return dequantized(key, self.shape, torch.float32, self.format, self.components)


def as_lazy(tensor: torch.Tensor, key: str) -> Any:
    """Return a loaded tensor as a lazy one, or the components of one of TE's; any other subclass unchanged."""
    if not _te.is_quantized(tensor):
        is_plain = type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.layout == torch.strided
        is_plain = is_plain and not (tensor.is_meta or tensor.is_quantized)
        return InMemory(tensor.detach().resolve_conj().resolve_neg()) if is_plain else tensor
    try:
        components: dict[str, Lazy] = {c.name: InMemory(c.tensor) for c in components_of(tensor, key)}
        return Quantized(describe_format(tensor, key) or "", tensor.dtype, tuple(tensor.shape), components)
    except PlacementError as error:
        raise CheckpointError(str(error)) from error


def quantized_or_plain(key: str, tensor: Lazy, *, scrambled: bool) -> Any:
    """Return a tensor of a DCP directory, or the quantized weight that DCP wrote in the place of its pieces.

    With ``scrambled``, rows of its pieces may be in the order of the ranks of tensor parallelism. Raise
    CheckpointError, which names ``key``, if the order of the rows is not known, or the format is not supported.
    """
    # DCP describes a quantized weight by its nominal dtype, so integers are never one.
    if not isinstance(tensor, Chunked) or not tensor.dtype.is_floating_point:
        return tensor
    # Replace each record of a quantized tensor by the tensor. Plain records are not read.
    parts: list[_WeightChunk] = []
    plain = set[tuple[Any, int]]()  # records of a different release of torch: one of each length is read
    for offsets, piece in tensor.chunks:
        parts.append((offsets, piece))
        if not isinstance(piece, DcpRecord) or (piece.shape, piece.length) in plain:
            continue
        # Only the length of the record differs.
        if piece.bytes < piece.length == frame_of(piece.dtype, piece.shape).length:
            continue
        loaded = piece.load()
        if _te.is_quantized(loaded):
            parts[-1] = (offsets, loaded)
        else:
            plain.add((piece.shape, piece.length))
    if all(isinstance(part, Lazy) for _, part in parts):
        return tensor
    is_stacked = len(tensor.shape) != 2
    # A single piece is the complete weight: its rows are in its own order, and no scales must be compared.
    if len(parts) == 1 and not is_stacked:
        return as_lazy(parts[0][1], key)
    if scrambled:
        raise CheckpointError(
            f"{key}: a quantized weight in {len(parts)} pieces of tensor parallelism",
            expected="rows in the order of the unsharded module",
            why="The directory does not record the order of its rows",
            fix="load it on the mesh that saved it, and save it with te_fsdp.checkpoint.save",
        )
    try:
        return _stack(key, tensor, parts) if is_stacked else _join(key, tensor, tensor.shape, parts)
    except PlacementError as error:
        raise CheckpointError(str(error)) from error


def _stack(key: str, tensor: Chunked, parts: Sequence[_WeightChunk]) -> Any:
    """Return the weights of all experts in one tensor, from pieces of one expert each."""
    by_expert: list[list[_WeightChunk]] = [[] for _ in range(tensor.shape[0])]
    for (index, *offsets), part in parts:
        own = part.select(0) if isinstance(part, Lazy) else part.view(part.shape[1:])
        by_expert[index].append((tuple(offsets), own))
    # Each expert has its own scales, so they are joined one by one.
    experts = [_join(key, tensor, tensor.shape[1:], own) for own in by_expert]
    if not all(isinstance(expert, Quantized) for expert in experts):
        return Stack([expert.values(key) if isinstance(expert, Quantized) else expert for expert in experts])
    stacked: dict[str, Lazy] = {
        n: Stack([expert.components[n] for expert in experts]) for n in experts[0].components
    }
    return replace(experts[0], shape=tensor.shape, components=stacked)


def _join(key: str, tensor: Chunked, shape: Shape, parts: Sequence[_WeightChunk]) -> Any:
    """Return a weight from its pieces: the stored components, or FP32 values if these do not fit together.

    Pieces that were quantized separately need not have one scale.
    """
    if not any(isinstance(part, Lazy) for _, part in parts):
        formats = {describe_format(part, key) for _, part in parts}
        components = _join_components(key, shape, parts) if len(formats) == 1 else None
        if components is not None:
            return Quantized(str(formats.pop()), parts[0][1].dtype, shape, components)
    plain: list[tuple[Shape, Lazy]] = []
    for offsets, part in parts:
        # FP32 contains the values of every format exactly, whatever the scales of the pieces.
        value = part.full().float() if isinstance(part, Lazy) else part.dequantize(dtype=torch.float32)
        plain.append((offsets, InMemory(value.detach())))
    return Chunked(key, shape, torch.float32, plain, in_original_order=tensor.in_original_order)


def _join_components(key: str, shape: Shape, parts: Sequence[_WeightChunk]) -> dict[str, Lazy] | None:
    """Return the components of a weight; ``None`` if pieces split blocks or have different scales per weight."""
    joined: dict[str, torch.Tensor] = {}
    for offsets, part in parts:
        for component in components_of(part, key):
            is_new = component.name not in joined
            if component.block is None:
                if not torch.equal(joined.setdefault(component.name, component.tensor), component.tensor):
                    return None
                continue
            if is_new:
                joined[component.name] = component.tensor.new_empty(component.shape(shape))
            # A piece may end within a block. Then its scales are not those of the full weight.
            try:
                (box,) = component.boxes([Box(offsets, (0,) * len(offsets), tuple(part.shape))], key, shape)
            except PlacementError:
                return None
            joined[component.name][box.original_slices()] = component.tensor
    # A component is usable only if every piece has it.
    names = [{component.name for component in components_of(part, key)} for _, part in parts]
    if any(names_of_part != names[0] for names_of_part in names):
        return None  # transposes exist in some pieces only
    return {name: InMemory(tensor) for name, tensor in joined.items()}
