"""Wrappers of torch's functions for state dicts, which place the rows of original tensors."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import torch
from torch.distributed import _state_dict_utils
from torch.distributed.checkpoint import LoadPlan, default_planner, hf_storage, state_dict
from torch.distributed.tensor import DTensor

from te_fsdp.boxed_dtensor import BoxedDTensor
from te_fsdp.errors import CheckpointError
from te_fsdp.layout import slices
from te_fsdp.upstream import torch_dtensor as _torch
from te_fsdp.upstream.patches import Replacements, wrapping
from te_fsdp.upstream.torch_dcp import chunk_list


@wrapping
def place_states(full: dict[str, Any], local: dict[str, Any], *args: Any, stock: Any, **kwargs: Any) -> None:
    """Distribute full tensors into a state dict, with stacked rows in order. Local operation."""
    targets = {key: local.get(key) for key, value in full.items() if torch.is_tensor(value)}
    for key, target in targets.items():
        require_same_form(key, full[key].dtype, target)
    boxes = {k: t for k, t in targets.items() if isinstance(t, BoxedDTensor) and t._map is not None}
    uneven: dict[str, Any] = {
        key: t for key, t in targets.items() if key not in boxes and _torch.has_uneven_strides(t)
    }
    # torch places the others. Its one rectangle is wrong for stacked rows and uneven strides.
    others = {key: value for key, value in full.items() if key not in boxes and key not in uneven}
    stock(others, local, *args, **kwargs)
    for key, tensor in boxes.items():
        local[key] = tensor.fill(full[key])
    for key, tensor in uneven.items():
        (chunk,) = tensor.__create_chunk_list__()
        piece = full[key].detach()[slices(chunk.offsets, chunk.sizes)]
        device = piece.device if tensor.is_meta else tensor.device
        local[key] = _torch.dtensor(piece.to(device, copy=True), tensor._spec)


@wrapping
def place_pairs(local_state_dict: dict[str, Any], keys: Any, *args: Any, stock: Any, **kwargs: Any) -> None:
    """Distribute broadcast tensors into a state dict, with stacked rows in order. Local operation."""
    for key in keys:
        pair = local_state_dict.get(key)
        if isinstance(pair, tuple):
            require_same_form(key, pair[1].dtype, pair[0])
        if isinstance(pair, tuple) and isinstance(pair[0], BoxedDTensor) and pair[0]._map is not None:
            local_state_dict[key] = pair[0].fill(pair[1])
    stock(local_state_dict, keys, *args, **kwargs)


@wrapping
def local_load_plan(
    state_dict: dict[str, Any], metadata: Any, *args: Any, stock: Any, **kwargs: Any
) -> LoadPlan:
    """Plan a load; raise CheckpointError for main weights in another form, or missing shards. Local operation."""
    for key, stored in metadata.state_dict_metadata.items():
        if (properties := getattr(stored, "properties", None)) is not None:
            require_same_form(key, properties.dtype, state_dict.get(key))
    plan = stock(state_dict, metadata, *args, **kwargs)
    # Others are not loaded (``allow_partial_load``), or loaded as objects.
    stored = {k: v for k, v in state_dict.items() if hasattr(metadata.state_dict_metadata.get(k), "chunks")}
    _require_all_elements(stored, plan)
    return plan


def _require_all_elements(state_dict: dict[str, Any], plan: LoadPlan) -> None:
    """Raise CheckpointError for shards of which a checkpoint lacks elements. Local operation."""
    # torch reads what there is, and leaves the rest as it was.
    found = Counter[Any]()
    for item in plan.items:
        elements = math.prod(item.lengths)
        found[item.dest_index.fqn] += elements
        found[item.dest_index.fqn, item.dest_index.offset] += elements
    for key, value in state_dict.items():
        # Most tensors need no list of their rectangles.
        if isinstance(value, torch.Tensor) and found[key] >= _torch.local_of(value).numel():
            continue
        for chunk in chunk_list(value):
            if found[key, chunk.offsets] < math.prod(chunk.sizes):
                raise CheckpointError(
                    f"dcp.load: {key}, the shard of shape {tuple(chunk.sizes)} at {tuple(chunk.offsets)}",
                    expected=f"{math.prod(chunk.sizes)} elements in the files",
                    got=str(found[key, chunk.offsets]),
                    why="dcp.save(no_dist=True) writes only the shards of its own rank",
                    fix="save on all ranks, without no_dist",
                )


@wrapping
def split_pieces(
    self: Any, storage_plan: dict[str, int] | None, items: Any, *, stock: Any
) -> dict[int, list[Any]]:
    """Split the pieces of tensors over files so that no file has two of one tensor. Local operation."""
    # A file of safetensors has one tensor of a name, and torch would drop all pieces but the last one.
    last, files = max(storage_plan.values()) if storage_plan else 1, dict[int, list[Any]]()
    for number, bucket in stock(self, storage_plan, items).items():
        count = Counter[str]()
        for item in bucket:
            files.setdefault(number + count[item.index.fqn] * last, []).append(item)
            count[item.index.fqn] += 1
    return files


def require_same_form(key: str, saved: torch.dtype, target: Any) -> None:
    """Raise CheckpointError for remainders of main weights (int16) in place of main weights, or the reverse."""
    # torch would convert the numbers, and te_fsdp would then begin with the rounded weights, without an error.
    is_main = key.endswith("master_param") and isinstance(target, torch.Tensor)
    if is_main and (saved == torch.int16) != (target.dtype == torch.int16):
        raise CheckpointError(
            f"{key}: saved {str(saved)[6:]}, this optimizer keeps {str(target.dtype)[6:]}",
            expected="main weights in one form",
            why="FusedAdam(store_param_remainders=True) stores 16 bits of each, te_fsdp.shard_optimizer all 32",
            fix="use the optimizer that saved them",
        )


@wrapping
def refuse_order_of_ranks(self: DTensor, *args: Any, stock: Any, **kwargs: Any) -> Any:
    """Refuse a method that would take the rows of a stacked tensor, which ``torch.load`` has read, for ordered ones."""
    if self.__dict__.get(_torch.BOXES) is True:
        raise CheckpointError(
            f"{stock.__name__}: a tensor of shape {tuple(self.shape)} that torch.load has read",
            expected="rows in the order of the unsharded module",
            got="rows of a stacked weight in the order of the ranks",
            why="Pickles record no more, so that processes without te_fsdp can read them",
            fix="load it into the model or optimizer first, or save it with te_fsdp.checkpoint or DCP",
        )
    return stock(self, *args, **kwargs)


# torch computes one rectangle from the placements. Tensors without a mapping take torch's own way.
PATCHES: Replacements = (
    (_state_dict_utils, "_distribute_tensors", place_pairs),
    (state_dict, "_distribute_state_dict", place_states),
    (DTensor, "full_tensor", refuse_order_of_ranks),
    (DTensor, "__create_write_items__", refuse_order_of_ranks),
    (default_planner, "create_default_local_load_plan", local_load_plan),
    (hf_storage.HuggingFaceStorageWriter, "_split_by_storage_plan", split_pieces),
)
