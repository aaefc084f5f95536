"""A Hugging Face model's folder as contents of a checkpoint, and the reverse, for the command line."""

from __future__ import annotations

from pathlib import Path

from te_fsdp.checkpoint.portable.contents import Contents, describe, empty_manifest
from te_fsdp.checkpoint.portable.huggingface_config import read_config
from te_fsdp.checkpoint.portable.huggingface_map import WeightMap
from te_fsdp.checkpoint.portable.huggingface_names import TeBlocks, TeNames
from te_fsdp.checkpoint.portable.lazy import Lazy
from te_fsdp.checkpoint.portable.safetensors import open_safetensors
from te_fsdp.errors import CheckpointError, message

__all__ = ["huggingface_map", "open_huggingface", "values_for_huggingface"]


def huggingface_map(path: Path, blocks: TeBlocks, names: TeNames) -> WeightMap:
    """The map of the model whose ``config.json`` lies in a folder. Local operation.

    Raises:
        CheckpointError: No readable description of a supported model.
    """
    return WeightMap.build(read_config(path), blocks, names)


def open_huggingface(path: Path, blocks: TeBlocks, names: TeNames, *, untie: bool = False) -> Contents:
    """Contents of a folder with ``config.json`` and safetensors files, under TransformerEngine's names.

    Local operation.

    Args:
        path: The folder.
        blocks: Options of the ``te.TransformerLayer`` that shall hold the weights.
        names: Names of that model's other parts.
        untie: Whether a head that the Hugging Face model ties to the embedding gets values of its own.

    Raises:
        CheckpointError: A model that is not supported, or tensors that do not fit its description.
    """
    source, _ = open_safetensors(path)
    weights = huggingface_map(path, blocks, names).for_names(source)
    architecture, layouts = weights.architecture, weights.layouts()
    tensors = weights.lazily(source, to_te=True)
    notes = [f"{architecture.model_type} model of {architecture.layers} layers"]
    if architecture.tied and names.head in tensors and not untie:
        # A checkpoint has a shared parameter once, under its first name.
        del tensors[names.head]
        notes.append(f"{names.head}: tied to {names.embedding}, stored there")
    manifest = empty_manifest()
    manifest.parameters = {
        name: {**describe(tensor), "layout": layouts[name]} for name, tensor in tensors.items()
    }
    keys = {f"model.{name}": tensor for name, tensor in tensors.items()}
    return Contents(path, "Hugging Face model", manifest, keys, notes)


def values_for_huggingface(contents: Contents, weights: WeightMap) -> dict[str, Lazy]:
    """A checkpoint's weights as a Hugging Face model's tensors, converted when read. Local operation.

    Raises:
        CheckpointError: Weights that do not fit the model, or that lie otherwise than the options say.
    """
    layouts = weights.layouts()
    saved = {name: described.get("layout") for name, described in contents.manifest.parameters.items()}
    wrong = [
        f"{name} is {saved[name]}, not {layout}"
        for name, layout in layouts.items()
        if saved.get(name) not in (None, layout)
    ]
    if wrong:
        raise CheckpointError(
            message(
                f"{contents.source}: weights of another layout: {', '.join(wrong)}",
                why="Nothing was written",
                fix="give the options that the te.TransformerLayer was built with, qkv_weight_interleaved above all",
            )
        )
    return weights.lazily({name: contents.value(name) for name in contents.names}, to_te=False)
