"""Wrappers of torch's functions for state dicts, which place the rows of original tensors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from itertools import chain
from typing import Any

import torch
from torch.distributed import _state_dict_utils
from torch.distributed.checkpoint import (
    default_planner,
    filesystem,
    hf_storage,
    state_dict,
    state_dict_loader,
)
from torch.distributed.tensor import DTensor

from te_fsdp.boxed_dtensor import BoxedDTensor, order_states
from te_fsdp.errors import CheckpointError
from te_fsdp.layout import slices
from te_fsdp.row_order import refuse_writes_to_copies
from te_fsdp.upstream import torch_dtensor as _torch
from te_fsdp.upstream.patches import replace_once, wrapping
from te_fsdp.upstream.torch_redistribution import (
    communicate_all_dtypes,
    gather_uneven_by_axis,
    move_strided_shards,
)
from te_fsdp.upstream.torch_rows import after_copies


def place_full_tensors(record: str, fit: Callable[..., Any]) -> None:
    """Let torch place rows in full state dicts and results; ``record`` marks parameters. Later calls do nothing.

    ``fit`` returns the state of a parameter that an optimizer loads, given those and the dtype of its main weights.
    """

    @wrapping
    def place_states(
        stock: Any, full: dict[str, Any], local: dict[str, Any], *args: Any, **kwargs: Any
    ) -> None:
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
    def place_pairs(
        stock: Any, local_state_dict: dict[str, Any], keys: Any, *args: Any, **kwargs: Any
    ) -> None:
        for key in keys:
            pair = local_state_dict.get(key)
            if isinstance(pair, tuple):
                require_same_form(key, pair[1].dtype, pair[0])
            if isinstance(pair, tuple) and isinstance(pair[0], BoxedDTensor) and pair[0]._map is not None:
                local_state_dict[key] = pair[0].fill(pair[1])
        stock(local_state_dict, keys, *args, **kwargs)

    # torch computes one rectangle from the placements. Tensors without a mapping take torch's own way.
    for owner, name, wrap in (
        (_state_dict_utils, "_distribute_tensors", place_pairs),
        (state_dict, "_distribute_state_dict", place_states),
        (torch.optim.Optimizer, "load_state_dict", _order_loaded(fit)),
        (DTensor, "full_tensor", _refuse_order_of_ranks),
        (DTensor, "__create_write_items__", _refuse_order_of_ranks),
    ):
        replace_once(owner, name, wrap)
    wrap_plans()
    move_strided_shards()
    gather_uneven_by_axis()
    communicate_all_dtypes()
    after_copies(record, refuse_writes_to_copies)


def wrap_plans() -> None:
    """Let DCP compare main weights before it loads, and write all pieces into safetensors; once per process."""

    @wrapping
    def compare_forms(
        stock: Any, state_dict: dict[str, Any], metadata: Any, *args: Any, **kwargs: Any
    ) -> Any:
        for key, stored in metadata.state_dict_metadata.items():
            if (properties := getattr(stored, "properties", None)) is not None:
                require_same_form(key, properties.dtype, state_dict.get(key))
        return stock(state_dict, metadata, *args, **kwargs)

    @wrapping
    def split_pieces(
        stock: Any, self: Any, storage_plan: dict[str, int] | None, items: Any
    ) -> dict[int, list[Any]]:
        # A file of safetensors has one tensor of a name, and torch would drop all pieces but the last one.
        last, files = max(storage_plan.values()) if storage_plan else 1, dict[int, list[Any]]()
        for number, bucket in stock(self, storage_plan, items).items():
            count = Counter[str]()
            for item in bucket:
                files.setdefault(number + count[item.index.fqn] * last, []).append(item)
                count[item.index.fqn] += 1
        return files

    replace_once(default_planner, "create_default_local_load_plan", compare_forms)
    replace_once(hf_storage.HuggingFaceStorageWriter, "_split_by_storage_plan", split_pieces)


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
def _refuse_order_of_ranks(stock: Any, self: DTensor, *args: Any, **kwargs: Any) -> Any:
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


def _order_loaded(fit: Callable[..., Any]) -> Callable[[Any], Any]:
    @wrapping
    def load_state_dict(stock: Any, self: torch.optim.Optimizer, state_dict: dict[str, Any]) -> None:
        remainders = getattr(self, "store_param_remainders", None)  # of TE's FusedAdam
        keys = chain.from_iterable(group["params"] for group in state_dict["param_groups"])
        params = chain.from_iterable(group["params"] for group in self.param_groups)
        for key, parameter in zip(keys, params, strict=False):
            state = state_dict["state"].get(key) or {}
            main, is_bf16 = state.get("master_param"), parameter.dtype == torch.bfloat16
            form = torch.int16 if remainders and is_bf16 else torch.float32
            if remainders is not None and main is not None:
                require_same_form(f"{key}.master_param", main.dtype, torch.empty(0, dtype=form))
            if state:
                state_dict["state"][key] = fit(self, parameter, state, form)
        order_states(self, state_dict)
        stock(self, state_dict)

    return load_state_dict


def wrap_dcp(narrow: Callable[[Any], Any], load: Callable[[Any], Any], write: Callable[[Any], Any]) -> None:
    """Wrap the functions that narrow tensors, load a state dict and write safetensors; once per process."""
    # The planner narrows the tensors that a load fills, if they are not DTensors.
    for owner, name, wrap in (
        (filesystem, "narrow_tensor_by_index", narrow),
        (default_planner, "narrow_tensor_by_index", narrow),
        (state_dict_loader, "_load_state_dict", load),
        (hf_storage.HuggingFaceStorageWriter, "write_data", write),
    ):
        if hasattr(owner, name):
            replace_once(owner, name, wrap)
