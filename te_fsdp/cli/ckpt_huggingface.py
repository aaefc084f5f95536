"""Hugging Face models as source of ``te-fsdp ckpt convert`` and as target of ``te-fsdp ckpt export``."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from te_fsdp.checkpoint.portable.contents import Contents
from te_fsdp.checkpoint.portable.convert import Tick
from te_fsdp.checkpoint.portable.huggingface import (
    TeBlocks,
    TeNames,
    open_huggingface,
    values_for_huggingface,
    write_huggingface,
)

__all__ = ["Model", "open_model", "write_model"]


@dataclass(frozen=True)
class Model:
    """The TransformerEngine model whose weights a Hugging Face model's are, or become."""

    layers: TeBlocks = field(default_factory=TeBlocks)
    names: TeNames = field(default_factory=TeNames)
    untie: bool = False
    """Give a head that the Hugging Face model ties to the embedding values of its own."""

    @property
    def is_described(self) -> bool:
        """Whether anything was said about it."""
        return self != Model()


def open_model(source: Path, model: Model) -> Contents:
    """Contents of a Hugging Face model's folder.

    Raises:
        CheckpointError: A model that is not supported, or files that do not fit its description.
    """
    return open_huggingface(source, model.layers, model.names, untie=model.untie)


def write_model(
    target: Path, contents: Contents, like: Path, model: Model, tick: Tick, *, shard_bytes: int, force: bool
) -> list[str]:
    """Write a Hugging Face model's folder like another one; returns its files.

    Raises:
        CheckpointError: Weights that do not fit the model that ``like`` describes.
    """
    tensors = values_for_huggingface(contents, like, model.layers, model.names)
    return write_huggingface(target, tensors, like, tick, shard_bytes=shard_bytes, force=force)
