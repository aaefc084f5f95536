"""Hugging Face models of Llama's and GPT-2's style, as models of ``te.TransformerLayer``, and back."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from te_fsdp import _te
from te_fsdp.all_ranks import collective_call
from te_fsdp.checkpoint.collective import all_agree
from te_fsdp.checkpoint.manifest import Tick
from te_fsdp.checkpoint.model_state import ModelState, model_state, shorten
from te_fsdp.checkpoint.owned import clean_name
from te_fsdp.checkpoint.portable.atomic import new_directory
from te_fsdp.checkpoint.portable.huggingface_config import Architecture, read_config
from te_fsdp.checkpoint.portable.huggingface_layers import layer_differences
from te_fsdp.checkpoint.portable.huggingface_map import Source, Tensors, WeightMap
from te_fsdp.checkpoint.portable.huggingface_names import TeBlocks, TeNames
from te_fsdp.checkpoint.portable.lazy import Lazy
from te_fsdp.checkpoint.portable.safetensors import is_safetensors, open_safetensors, write_folder
from te_fsdp.errors import CheckpointError, message

if TYPE_CHECKING:
    from torch import nn

__all__ = [
    "Architecture",
    "TeBlocks",
    "TeNames",
    "WeightMap",
    "export_huggingface",
    "import_huggingface",
    "load_huggingface",
    "read_config",
    "write_huggingface",
]

#: Files beside the weights that a copy of a model needs.
_BESIDE = (
    "config.json",
    "generation_config.json",
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "chat_template*",
    "LICENSE*",
)


def import_huggingface(
    source: str | os.PathLike[str] | Source,
    *,
    config: Any = None,
    blocks: TeBlocks | None = None,
    names: TeNames | None = None,
    dtype: torch.dtype | None = None,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors of the unsharded TransformerEngine model, from a Hugging Face model's. Local operation.

    Args:
        source: A folder with ``config.json`` and safetensors files, read group by group; or the tensors, as mapping
            or stream.
        config: The model's description, as :func:`read_config` takes it; ``None``: of the folder.
        blocks: Options of the ``te.TransformerLayer``; default: TransformerEngine's defaults.
        names: Names of the model's other parts; default: those of :class:`TeNames`.
        dtype: Of the results; ``None`` keeps each tensor's.

    Returns:
        Stream of names and plain tensors on the source's device, in the order of the model.

    Raises:
        CheckpointError: A model that is not supported; missing, unexpected or wrongly shaped tensors.
    """
    tensors = _opened(source)
    described = _config_of(source, config)
    return WeightMap.build(described, blocks, names).for_names(tensors).to_te(tensors, dtype=dtype)


def export_huggingface(
    source: Tensors,
    target: str | os.PathLike[str],
    *,
    like: str | os.PathLike[str] | None = None,
    config: Any = None,
    blocks: TeBlocks | None = None,
    names: TeNames | None = None,
    dtype: torch.dtype | None = None,
    max_file_bytes: int = 5 * 10**9,
    tick: Tick | None = None,
) -> None:
    """Write a Hugging Face model's folder from an unsharded TransformerEngine model's tensors. Local operation.

    Holds one group of tensors at a time besides ``source``. The folder appears when it is whole.

    Args:
        source: The model's state dict, or tensors yet to be read: plain tensors of the unsharded model.
        target: The folder to make; nothing may lie there yet but an empty directory.
        like: A Hugging Face folder of the same model: its ``config.json``, tokenizer and the like are copied
            unchanged, and names begin as in its files.
        config: The model's description, where there is no such folder; no ``config.json`` is written then.
        blocks: Options of the ``te.TransformerLayer``.
        names: Names of the model's other parts.
        dtype: Of the files; ``None`` keeps each tensor's.
        max_file_bytes: Size of a file beyond which another is begun.
        tick: Told the bytes of each block that is written.

    Raises:
        CheckpointError: Something lies at ``target``; neither ``like`` nor ``config``; what
            :meth:`WeightMap.to_huggingface` raises.
    """
    folder = None if like is None else Path(like)
    weights = WeightMap.build(_config_of(folder, config), blocks, names)
    if folder is not None and is_safetensors(folder):
        weights = weights.for_names(_opened(folder))
    tensors = weights.lazily(source, to_te=False, dtype=dtype)
    write_huggingface(
        Path(os.path.abspath(target)), tensors, folder, tick or (lambda _: None), shard_bytes=max_file_bytes
    )


def write_huggingface(
    target: Path,
    tensors: Mapping[str, Lazy],
    like: Path | None,
    tick: Tick,
    *,
    shard_bytes: int,
    force: bool = False,
) -> list[str]:
    """Write a Hugging Face model's folder; it appears when it is whole. Returns its files. Local operation.

    Args:
        target: The folder.
        tensors: Under Hugging Face's names.
        like: Folder whose ``config.json``, tokenizer and the like are copied unchanged.
        tick: Told the bytes of each block that is written.
        shard_bytes: Size of a file beyond which another is begun.
        force: Replace what lies at the target.

    Raises:
        CheckpointError: Something lies at the target, or a tensor cannot be read or converted.
    """
    with new_directory(target, force=force) as temporary:
        names = write_folder(temporary, tensors, {}, tick, shard_bytes)
        beside = [path for pattern in _BESIDE for path in (like.glob(pattern) if like else ())]
        for path in beside:
            if path.is_file():
                shutil.copyfile(path, temporary / path.name)
                names.append(path.name)
    return names


@torch.no_grad()
def load_huggingface(
    source: str | os.PathLike[str] | Tensors,
    model: nn.Module,
    *,
    config: Any = None,
    names: TeNames | None = None,
    final_norm_zero_centered: bool = False,
) -> None:
    """Load a Hugging Face model's weights into a model of ``te.TransformerLayer``, on any mesh, in place.

    The layers' options are read off the model. Each rank reads every tensor and keeps its own pieces, converted
    to the parameter's dtype; it holds one group of tensors at a time. Buffers are left alone.
    Collective over the world: call on all ranks, before the optimizer makes main weights.

    Args:
        source: As for :func:`import_huggingface`, but no stream.
        model: On its device, sharded or not, with weights in high precision.
        config: As for :func:`import_huggingface`.
        names: Names of the model's other parts.
        final_norm_zero_centered: ``zero_centered_gamma`` of the model's last norm.

    Raises:
        CheckpointError: What :func:`import_huggingface` raises, parameters that the Hugging Face model does not
            have, layers that would compute something else, or quantized weights: before anything is changed, the
            same on all ranks. Values that turn out to be unreadable, or to contradict each other, leave the
            weights replaced in part; the error says so.
    """

    def prepare() -> tuple[ModelState, Iterator[tuple[str, torch.Tensor]]]:
        tensors = _opened(source)
        blocks = TeBlocks.of(model, final_norm_zero_centered=final_norm_zero_centered)
        weights = WeightMap.build(_config_of(source, config), blocks, names).for_names(tensors)
        state = model_state(model)
        _compare(weights, model, state)
        stream = weights.to_te(tensors)
        first = next(stream)  # checks the whole source
        return state, _chain(first, stream)

    def move() -> None:
        try:
            for name, tensor in stream:
                # A tied head has no entry of its own.
                entry = state.entries.get(f"model.{name}")
                for piece in entry.pieces if entry is not None else ():
                    box = [slice(o, o + n) for o, n in zip(piece.offsets, piece.tensor.shape, strict=True)]
                    piece.tensor.copy_(tensor[tuple(box)])
        except CheckpointError as error:
            raise CheckpointError(f"{error} The model's weights are replaced in part: load again.") from error

    with collective_call("load_huggingface"):
        state, stream = all_agree(prepare)
        all_agree(move)


def _chain(
    first: tuple[str, torch.Tensor], rest: Iterator[tuple[str, torch.Tensor]]
) -> Iterator[tuple[str, torch.Tensor]]:
    yield first
    yield from rest


def _compare(weights: WeightMap, model: nn.Module, state: ModelState) -> None:
    """All parameters of the model against the map.

    Raises:
        CheckpointError: Naming everything that differs.
    """
    ours = {clean_name("", name): p for name, p in model.named_parameters(remove_duplicate=False)}
    theirs = weights.shapes(te=True)
    quantized = [name for name, owned in state.owned.items() if _te.is_quantized(owned.local)]
    shapes = {name: tuple(described["shape"]) for name, described in state.described.items()}
    wrong = [
        f"{name} ({list(shapes[name])}, not {list(shape)})"
        for name, shape in theirs.items()
        if name in shapes and shapes[name] != shape
    ]
    found = {
        "the model has no": [name for name in theirs if name not in ours],
        "the Hugging Face model has nothing for": [name for name in ours if name not in theirs],
        "other shapes": wrong,
        "quantized": quantized,
        "layers that would compute something else": layer_differences(model, weights.architecture),
    }
    problems = [f"{what}: {shorten(names, 20)}" for what, names in found.items() if names]
    if problems:
        raise CheckpointError(
            message(
                f"load_huggingface: {type(model).__name__} does not fit: {'; '.join(problems)}",
                why="Nothing was loaded",
                fix="name the model's parts by TeNames, build the layers with read_config(...).te_kwargs(); for "
                "quantized weights, save the imported weights with te_fsdp.checkpoint and load that",
            )
        )


def _opened(source: str | os.PathLike[str] | Source) -> Source:
    return open_safetensors(Path(source))[0] if isinstance(source, (str, os.PathLike)) else source


def _config_of(folder: Any, config: Any) -> Any:
    if config is not None:
        return config
    if isinstance(folder, (str, os.PathLike)):
        return read_config(folder)
    raise CheckpointError(
        message(
            "Hugging Face model without a description",
            expected="a folder with config.json, or config=...",
            fix="pass config=model.config, or the folder that the model came from",
        )
    )
