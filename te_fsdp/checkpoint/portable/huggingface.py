"""Exchange of weights with Hugging Face models of Llama's or GPT-2's style.

torch's ``HuggingFaceStorageReader`` (2.11 to 2.15) fills tensors with the names and shapes of the files, without an
index or a check. Here query, key and value become one tensor, norms are shifted, and everything is checked first.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from te_fsdp.checkpoint.compare import Differences, compare_model
from te_fsdp.checkpoint.directory import new_directory
from te_fsdp.checkpoint.lazy_tensors import InMemory, Lazy, open_safetensors, total_bytes, write_folder
from te_fsdp.checkpoint.load_source import Source
from te_fsdp.checkpoint.loading import ModelLoader
from te_fsdp.checkpoint.manifest import Tick
from te_fsdp.checkpoint.model_state import model_state, owned_parameters, tied_names
from te_fsdp.checkpoint.optimizer_state import Optimizers
from te_fsdp.checkpoint.portable.huggingface_config import Architecture, read_config, write_config
from te_fsdp.checkpoint.portable.huggingface_map import Tensors, WeightMap
from te_fsdp.checkpoint.portable.huggingface_model import ModelDescription, TeBlocks, TeNames, describe_model
from te_fsdp.checkpoint.portable.weight_stream import save_huggingface
from te_fsdp.checkpoint.portable.weight_transfer import check_fits, check_model, require_same_model
from te_fsdp.checkpoint.reader import Contents, describe, empty_manifest
from te_fsdp.checkpoint.shard_files import no_progress
from te_fsdp.checkpoint.state_dicts import refuse_other_files
from te_fsdp.checkpoint.storage import absolute, expanded
from te_fsdp.collectives.agreement import all_agree, digest, rank, world_size
from te_fsdp.collectives.rendezvous import collective_call
from te_fsdp.errors import CheckpointError, shorten
from te_fsdp.modules.rotary import frequencies_of
from te_fsdp.modules.semantics import from_json

__all__ = [
    "Architecture",
    "TeBlocks",
    "TeNames",
    "WeightMap",
    "export_huggingface",
    "import_huggingface",
    "load_huggingface",
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
    """Yield names and plain CPU tensors of the unsharded TransformerEngine model for a Hugging Face model, in order.

    Local operation.

    Args:
        source: A folder with ``config.json`` and safetensors files, read group by group; or the tensors.
        config: The model's description, as for :func:`read_config`; ``None``: that of the folder.
        blocks: Options of the target's layers; default: TransformerEngine's defaults.
        names: Names of the model's parts.
        dtype: Dtype of the results; ``None`` keeps each tensor's.

    Raises:
        CheckpointError: An unsupported model; missing, unexpected or wrongly shaped tensors.
    """
    tensors, described, _ = _opened(source, config)
    weights = WeightMap.build(described, blocks, names)
    converted = weights.lazily(tensors, to_te=True, dtype=dtype)
    return ((name, tensor.full()) for name, tensor in converted.items())


def export_huggingface(
    source: Tensors,
    target: str | os.PathLike[str] | None = None,
    *,
    config: Any = None,
    blocks: TeBlocks | None = None,
    names: TeNames | None = None,
    dtype: torch.dtype | None = None,
    max_file_bytes: int = 5 * 10**9,
) -> None:
    """Write a Hugging Face model's folder from an unsharded TransformerEngine model's tensors. Local operation.

    :func:`save_huggingface` writes an existing model without options. ``source`` is the model's state dict, or lazy
    tensors: plain tensors of the unsharded model. One group is in memory in addition. ``blocks`` are the options of the
    layers, ``TeBlocks.of(model)``, which a state dict does not record. Other arguments are those of
    :func:`save_huggingface`. Raise CheckpointError if ``target`` exists, options are unknown, or tensors do not fit.
    """
    tensors_by_name, described, _ = _opened(source, config)
    weights = WeightMap.build(described, blocks, names, ModelDescription(tensors_by_name.keys(), {}, {}))
    tensors, path = weights.lazily(tensors_by_name, to_te=False, dtype=dtype), absolute(target)  # type: ignore[arg-type]
    write_huggingface(path, tensors, described, no_progress, shard_bytes=max_file_bytes)


def write_huggingface(
    target: Path, tensors: Mapping[str, Lazy], config: Any, tick: Tick, *, shard_bytes: int
) -> list[str]:
    """Write a Hugging Face model's folder, atomically. Return its files. Local operation.

    ``config`` is the model's description, or a folder with it and with a tokenizer, which is copied.
    """
    with new_directory(target, needed=total_bytes(tensors)) as temporary:
        names = write_folder(temporary, tensors, {}, tick, shard_bytes)
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

    The layers' options are read from the model. Each rank reads the data of its pieces into the CPU's memory. When all
    ranks have theirs, they are converted to the parameter's dtype, or quantized once, with the scale of the unsharded
    weight. Buffers are unchanged, main weights of optimizers follow, biases that the files lack become zero and are
    frozen. Collective over the world: call on all ranks.

    Args:
        source: As for :func:`import_huggingface`, like ``config`` and ``names``.
        model: On its device, sharded or not, quantized or not.
        optimizer: If it has main weights, those of quantized weights are made from the values that were read, also
            before its first step.
        config: The model's description; ``None``: that of the folder.
        names: Names of the model's parts.
        blocks: Options of the layers that the model does not show, because its norms are of a custom class.

    Raises:
        CheckpointError: The errors of :func:`import_huggingface`, parameters that the Hugging Face model does not have,
            layers that compute a different function, values that cannot be read or contradict each other. The same on
            all ranks, with nothing changed.
        OrderError: The optimizer has parameters that are not the model's.
    """
    with collective_call("checkpoint.load_huggingface"):
        loader, absent, sums = all_agree(
            lambda: _model_loader(source, model, optimizer, config, names, blocks)
        )
        require_same_model("load_huggingface", (loader.manifest.parameters, sorted(absent), sums))
        loader.run()
        for owned in owned_parameters(model):
            owned.parameter.requires_grad_(owned.parameter.requires_grad and owned.fqn not in absent)
    for note in loader.notes if rank() == 0 else ():
        _log.warning("%s: %s", loader.source.source, note)


def _model_loader(
    source: str | os.PathLike[str] | Tensors,
    model: nn.Module,
    optimizer: Optimizer | None,
    config: Any,
    names: TeNames | None,
    blocks: TeBlocks | None,
) -> tuple[ModelLoader, set[str], list[int]]:
    """Return the load of a model that fits, the biases that it lacks, and checksums of a sample. Local operation."""
    check_model("load_huggingface", model, optimizer)
    (tensors, described, folder), state = _opened(source, config), model_state(model, may_cut_blocks=True)
    weights = WeightMap.build(described, blocks, names, describe_model(model))
    converted, layouts, manifest = weights.lazily(tensors, to_te=True), weights.layouts(), empty_manifest()
    manifest.parameters = {name: {**describe(t), "layout": layouts[name]} for name, t in converted.items()}
    keys = {f"model.{name}": tensor for name, tensor in converted.items()}
    opened = Source(folder, "Hugging Face model", manifest, keys)
    # As in a checkpoint: one tensor for all experts of a layer, and the first name alone of a tied weight.
    opened.stack_experts()
    for name in tied_names(model) if weights.architecture.tied else ():
        manifest.parameters.pop(name, None)
    # Hugging Face's files have no buffers of these models.
    diff = compare_model(manifest, state).without([*state.buffers], strict=True)
    check_fits("load_huggingface", model, weights, diff.texts())
    quantized = {name: "quantized" for name, d in state.described.items() if d["format"] is not None}
    absent = {name for group in weights.groups for name in group.zeros}
    note = f"biases that it lacks are zero, and stay zero (frozen): {shorten(sorted(absent), 3)}"
    opened.notes = [note] if absent else []
    diff = Differences(converted=quantized)
    sums, stored = [], [t.tensor if isinstance(t, InMemory) else t for t in tensors.values()]
    # A part of a page of each tensor, at most 4,096 pages: all values would be read once more.
    for tensor in stored[:: 1 + len(stored) // 4096] if world_size() > 1 else ():
        if isinstance(tensor, torch.Tensor):
            values = tensor.detach().reshape(-1)[tensor.numel() // 2 :][:256].view(torch.uint8)
            sums.append(digest(values.cpu().numpy().tobytes()))
    return ModelLoader(opened, model, Optimizers(optimizer), state, diff), absent, sums


def values_for_huggingface(
    contents: Contents, like: Path, blocks: TeBlocks, names: TeNames, dtype: torch.dtype
) -> dict[str, Lazy]:
    """Return a checkpoint's weights as ``dtype`` tensors of the Hugging Face model in a folder, on demand. Local.

    The settings of its modules are in its manifest; ``blocks`` are options of layers that it lacks. Raise
    CheckpointError for tensors that do not fit, or layers that compute a different function.
    """
    notes, contents = contents.notes, contents.split_experts()
    saved = {name: described.get("layout") for name, described in contents.manifest.parameters.items()}
    recorded = from_json(contents.manifest.semantics) if contents.manifest.semantics else {}
    frequencies = frequencies_of(contents.names, lambda name: contents.value(name).full())
    weights = WeightMap.build(like, blocks, names, ModelDescription(saved, recorded, frequencies))
    if not recorded:
        notes.append("its semantics (eps, activation, window, ...) are not recorded: taken from config.json")
    problems = [*weights.differences] + [
        f"{name} is {saved[name]}, not {layout}"
        for name, layout in weights.layouts().items()
        if saved.get(name) not in (None, layout)
    ]
    if problems:
        raise CheckpointError(
            f"{contents.source}: not the model that {like} describes: {', '.join(problems)}",
            why="Nothing was written",
            fix="use the config.json of this model and, if options were given, the options of its layers",
        )
    return weights.lazily({n: contents.value(n) for n in contents.names}, to_te=False, dtype=dtype)


def _opened(source: str | os.PathLike[str] | Tensors, config: Any) -> tuple[Tensors, Any, Path]:
    """Return tensors, their description, and their folder."""
    if isinstance(source, (str, os.PathLike)):
        folder = expanded(source)
        if folder.name == "config.json":  # accepted for its folder
            folder = folder.parent
        refuse_other_files(folder)
        return open_safetensors(folder)[0], folder if config is None else config, folder
    if not isinstance(source, Mapping) or not all(
        isinstance(t, torch.Tensor | Lazy) for t in source.values()
    ):
        fix = "pass model.state_dict(); if sharded, use te_fsdp.checkpoint.save_huggingface(path, model, config=...)"
        raise CheckpointError(f"Hugging Face model: {type(source).__name__}, not tensors by name", fix=fix)
    return source, config, Path("tensors in memory")
