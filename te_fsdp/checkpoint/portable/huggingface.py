"""Hugging Face models of Llama's and GPT-2's style, as models of TransformerEngine's modules, and back.

torch's ``HuggingFaceStorageReader`` (2.11 to 2.15) fills tensors of the names and shapes that the files have, with no
index and no check of one; here query, key and value become one tensor, norms are shifted, and all is checked before.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor import DTensor

from te_fsdp.agree import all_agree, rank
from te_fsdp.all_ranks import collective_call
from te_fsdp.checkpoint.compare import Differences
from te_fsdp.checkpoint.directory import new_directory
from te_fsdp.checkpoint.loading import Filling
from te_fsdp.checkpoint.manifest import Tick
from te_fsdp.checkpoint.model_state import ModelState, model_state, tied_names
from te_fsdp.checkpoint.portable.contents import (
    Contents,
    describe,
    empty_manifest,
    split_experts,
    stack_experts,
)
from te_fsdp.checkpoint.portable.huggingface_config import (
    Architecture,
    first_given,
    read_config,
    write_config,
)
from te_fsdp.checkpoint.portable.huggingface_layers import (
    TeBlocks,
    TeNames,
    check_fits,
    parameter_names,
    semantics_of_config,
)
from te_fsdp.checkpoint.portable.huggingface_map import Tensors, WeightMap
from te_fsdp.checkpoint.portable.huggingface_saving import save_huggingface
from te_fsdp.checkpoint.portable.lazy import Lazy, total_bytes
from te_fsdp.checkpoint.portable.safetensors import open_safetensors, write_folder
from te_fsdp.checkpoint.source import Source
from te_fsdp.checkpoint.stages import check_whole_job
from te_fsdp.checkpoint.sums import silent
from te_fsdp.errors import CheckpointError
from te_fsdp.modules.semantics import from_json, semantics_of, to_json
from te_fsdp.sharding.main_weights import check_optimizer

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

__all__ = [
    "Architecture",
    "TeBlocks",
    "TeNames",
    "WeightMap",
    "export_huggingface",
    "import_huggingface",
    "load_huggingface",
    "open_huggingface",
    "read_config",
    "save_huggingface",
    "values_for_huggingface",
    "write_huggingface",
]

_log = logging.getLogger("te_fsdp")


def import_huggingface(
    source: str | os.PathLike[str] | Tensors,
    *,
    config: Any = None,
    blocks: TeBlocks | None = None,
    names: TeNames | None = None,
    dtype: torch.dtype | None = None,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors of the unsharded TransformerEngine model, from a Hugging Face model's. Local operation.

    Args:
        source: A folder with ``config.json`` and safetensors files, read group by group; or the tensors.
        config: The model's description, as :func:`read_config` takes it; ``None``: of the folder.
        blocks: Options of the layers that shall hold the weights; default: TransformerEngine's defaults.
        names: Names of the model's parts; default: those of :class:`TeNames`.
        dtype: Of the results; ``None`` keeps each tensor's.

    Returns:
        Stream of names and plain tensors on the CPU, in the order of the model.

    Raises:
        CheckpointError: A model that is not supported; missing, unexpected or wrongly shaped tensors.
    """
    tensors, folder = _opened(source)
    weights = WeightMap.build(first_given(config, folder), blocks, names).for_names(tensors)
    converted = weights.lazily(tensors, to_te=True, dtype=dtype)
    return ((name, tensor.whole()) for name, tensor in converted.items())


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

    Of a model that is there, :func:`save_huggingface` does it without options. Holds one group of tensors at a time
    besides ``source``. The folder appears when it is whole.

    Args:
        source: The model's state dict, or tensors yet to be read: plain tensors of the unsharded model.
        target: The folder to make; nothing may lie there yet but an empty directory.
        like: A Hugging Face folder of the same model: its ``config.json``, tokenizer and the like are copied, and
            names begin as in its files.
        config: The model's description, where there is no such folder.
        blocks: Options of the layers, ``TeBlocks.of(model)``: a state dict does not tell them.
        names: Names of the model's parts.
        dtype: Of the files; ``None`` keeps each tensor's.
        max_file_bytes: Size of a file beyond which another is begun.
        tick: Told the bytes of each block that is written.

    Raises:
        CheckpointError: Something lies at ``target``; neither ``like`` nor ``config``; options that are not known;
            what :meth:`WeightMap.lazily` raises.
    """
    described = first_given(like, config)
    if any(isinstance(tensor, DTensor) for tensor in source.values()):
        raise CheckpointError(
            "export_huggingface of a sharded model's state dict",
            expected="whole tensors of the unsharded model",
            got="DTensors",
            fix="te_fsdp.checkpoint.save_huggingface(path, model, config=...) writes it from all ranks",
        )
    weights, _ = WeightMap.of(read_config(described), source.keys(), {}, blocks, names)
    tensors = weights.like(described).lazily(source, to_te=False, dtype=dtype)
    write_huggingface(Path(os.path.abspath(target)), tensors, described, tick, shard_bytes=max_file_bytes)


def write_huggingface(
    target: Path,
    tensors: Mapping[str, Lazy],
    config: Any,
    tick: Tick | None = None,
    *,
    shard_bytes: int,
    force: bool = False,
) -> list[str]:
    """Write a Hugging Face model's folder; it appears when it is whole. Returns its files. Local operation.

    Args:
        target: The folder.
        tensors: Under Hugging Face's names.
        config: The model's description, or a folder with it and with a tokenizer, which is copied.
        tick: Told the bytes of each block that is written.
        shard_bytes: Size of a file beyond which another is begun.
        force: Replace what lies at the target.

    Raises:
        CheckpointError: Something lies at the target, or a tensor cannot be read or converted.
    """
    with new_directory(target, force=force, needed=total_bytes(tensors)) as temporary:
        names = write_folder(temporary, tensors, {}, tick or silent, shard_bytes)
        return names + write_config(temporary, config, tensors)


def load_huggingface(
    source: str | os.PathLike[str] | Tensors,
    model: nn.Module,
    optimizer: Optimizer | None = None,
    *,
    config: Any = None,
    names: TeNames | None = None,
    blocks: TeBlocks | None = None,
) -> None:
    """Load a Hugging Face model's weights into a model of TransformerEngine's modules, on any mesh, in place.

    The layers' options are read off the model. Each rank reads what it has pieces of, and keeps these in the CPU's
    memory until all ranks have theirs; then they are converted to the parameter's dtype, or quantized once, with the
    scale of the whole weight. Buffers are left alone. Main weights of optimizers follow.
    Collective over the world: call on all ranks.

    Args:
        source: As for :func:`import_huggingface`.
        model: On its device, sharded or not, quantized or not.
        optimizer: If it keeps main weights, those of quantized weights are made of the values that were read, before
            its first step too.
        config: As for :func:`import_huggingface`.
        names: Names of the model's parts.
        blocks: Options of the layers where the model does not tell them, since its norms are of a class of its own.

    Raises:
        CheckpointError: What :func:`import_huggingface` raises, parameters that the Hugging Face model does not
            have, layers that would compute something else; values that turn out to be unreadable, or to contradict
            each other. The same on all ranks, and nothing has changed.
        OrderError: An optimizer of other parameters.
    """

    def prepare() -> Filling:
        if optimizer is not None:
            check_optimizer(model, optimizer)
        check_whole_job(model, None)
        (tensors, folder), state = _opened(source), model_state(model, may_cut_blocks=True)
        described, parameters = first_given(config, folder), parameter_names(model)
        weights, wrong = WeightMap.of(described, parameters, semantics_of(model), blocks, names)
        contents = _contents(folder or Path("tensors in memory"), weights, tensors)
        _compare(weights, model, state, contents, wrong)
        quantized = {n: "quantized" for n, about in state.described.items() if about["format"] is not None}
        opened = Source(contents.source, contents.manifest, contents.tensors, contents.kind)
        return Filling(opened, model, optimizer, state, Differences(converted=quantized))

    with collective_call("checkpoint.load_huggingface"):
        filling = all_agree(prepare)
        filling.run()
    for note in filling.notes if rank() == 0 else ():
        _log.warning("%s: %s", filling.source.path, note)


def _compare(
    weights: WeightMap, model: nn.Module, state: ModelState, contents: Contents, wrong: list[str]
) -> None:
    """All parameters of the model against what is there for them.

    Raises:
        CheckpointError: Naming everything that differs.
    """
    shapes = {name: described["shape"] for name, described in state.described.items()}
    theirs = {name: described["shape"] for name, described in contents.manifest.parameters.items()}
    ours = {*shapes, *tied_names(model)}
    differing = [
        f"{name} ({shapes[name]}, not {shape})"
        for name, shape in theirs.items()
        if shapes.get(name, shape) != shape
    ]
    differences = {
        "the model has no": [name for name in theirs if name not in ours],
        "the Hugging Face model has nothing for": [name for name in ours if name not in theirs],
        "other shapes": differing,
        "layers that would compute something else": wrong,
    }
    check_fits("load_huggingface", model, weights, differences)


def open_huggingface(path: Path, blocks: TeBlocks, names: TeNames, *, untie: bool = False) -> Contents:
    """Contents of a folder with ``config.json`` and safetensors files, under TransformerEngine's names.

    Local operation.

    Args:
        path: The folder.
        blocks: Options of the layers that shall hold the weights.
        names: Names of that model's parts.
        untie: Whether a head that the Hugging Face model ties to the embedding gets values of its own.

    Raises:
        CheckpointError: A model that is not supported, or tensors that do not fit its description.
    """
    source, _ = open_safetensors(path)
    weights = WeightMap.build(read_config(path), blocks, names)
    contents, architecture = _contents(path, weights, source), weights.architecture
    contents.notes.insert(0, f"{architecture.model_type} model of {architecture.layers} layers")
    if architecture.tied and names.head in contents.manifest.parameters and not untie:
        # A checkpoint has a shared parameter once, under its first name.
        del contents.manifest.parameters[names.head], contents.tensors[f"model.{names.head}"]
        contents.notes.append(f"{names.head}: tied to {names.embedding}, stored there")
    semantics = to_json(semantics_of_config(architecture, names, blocks))
    contents.manifest.semantics = {"recipes": []} | semantics
    return contents


def _contents(path: Path, weights: WeightMap, source: Tensors) -> Contents:
    """A Hugging Face model's tensors as contents of a checkpoint, converted when read."""
    tensors, layouts = weights.for_names(source).lazily(source, to_te=True), weights.layouts()
    manifest = empty_manifest()
    manifest.parameters = {name: {**describe(t), "layout": layouts[name]} for name, t in tensors.items()}
    keys = {f"model.{name}": tensor for name, tensor in tensors.items()}
    contents = Contents(path, "Hugging Face model", manifest, keys)
    stack_experts(contents)
    return contents


def values_for_huggingface(
    contents: Contents, like: Path, blocks: TeBlocks, names: TeNames
) -> dict[str, Lazy]:
    """A checkpoint's weights as tensors of a Hugging Face model, converted when read. Local operation.

    Args:
        contents: The checkpoint. What its modules compute stands in its manifest.
        like: The Hugging Face model's folder.
        blocks: Options of the layers that the manifest does not tell.
        names: Names of the model's parts.

    Raises:
        CheckpointError: Weights that do not fit the model, or that lie otherwise than the options say; options that
            nothing tells; layers that compute something else than the Hugging Face model.
    """
    notes, contents = contents.notes, split_experts(contents)
    saved = {name: described.get("layout") for name, described in contents.manifest.parameters.items()}
    recorded = from_json(contents.manifest.semantics) if contents.manifest.semantics else {}
    weights, wrong = WeightMap.of(read_config(like), saved, recorded, blocks, names)
    if not recorded:
        notes.append("its semantics (eps, activation, window, ...) are not recorded: taken from config.json")
    wrong += [
        f"{name} is {saved[name]}, not {layout}"
        for name, layout in weights.layouts().items()
        if saved.get(name) not in (None, layout)
    ]
    if wrong:
        raise CheckpointError(
            f"{contents.source}: another model than {like} describes: {', '.join(wrong)}",
            why="Nothing was written",
            fix="take the config.json of this model; where options were given, those of its layers",
        )
    return weights.like(like).lazily({name: contents.value(name) for name in contents.names}, to_te=False)


def _opened(source: str | os.PathLike[str] | Tensors) -> tuple[Tensors, Path | None]:
    """Tensors, and the folder that they lie in, if any."""
    if isinstance(source, (str, os.PathLike)):
        return open_safetensors(Path(source))[0], Path(source)
    return source, None
