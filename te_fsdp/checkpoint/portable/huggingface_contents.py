"""A Hugging Face model's folder as contents of a checkpoint, and the reverse, for the command line."""

from __future__ import annotations

from pathlib import Path

from te_fsdp.checkpoint.portable.contents import Contents, describe, empty_manifest
from te_fsdp.checkpoint.portable.experts import split_experts, stack_experts
from te_fsdp.checkpoint.portable.huggingface_config import read_config
from te_fsdp.checkpoint.portable.huggingface_layers import TeBlocks, semantics_of_config
from te_fsdp.checkpoint.portable.huggingface_map import WeightMap
from te_fsdp.checkpoint.portable.huggingface_names import TeNames
from te_fsdp.checkpoint.portable.lazy import Lazy
from te_fsdp.checkpoint.portable.safetensors import open_safetensors
from te_fsdp.errors import CheckpointError, message
from te_fsdp.modules.semantics import from_json, to_json

__all__ = ["open_huggingface", "values_for_huggingface"]


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
    weights = WeightMap.build(read_config(path), blocks, names).for_names(source)
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
    manifest.semantics = {"recipes": []} | to_json(semantics_of_config(architecture, names, blocks))
    keys = {f"model.{name}": tensor for name, tensor in tensors.items()}
    contents = Contents(path, "Hugging Face model", manifest, keys, notes)
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
            message(
                f"{contents.source}: another model than {like} describes: {', '.join(wrong)}",
                why="Nothing was written",
                fix="take the config.json of this model; where options were given, those of its layers",
            )
        )
    return weights.like(like).lazily({name: contents.value(name) for name in contents.names}, to_te=False)
