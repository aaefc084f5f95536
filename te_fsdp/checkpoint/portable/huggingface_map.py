"""The map between a Hugging Face model's tensors and a TransformerEngine model's: checked, streamed, both ways."""

from __future__ import annotations

import fnmatch
import logging
import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from te_fsdp import _te
from te_fsdp.checkpoint.entries import GROUPED, stacked_name
from te_fsdp.checkpoint.portable.huggingface_config import Architecture, read_config
from te_fsdp.checkpoint.portable.huggingface_groups import Group, Shape
from te_fsdp.checkpoint.portable.huggingface_layers import (
    Recorded,
    TeBlocks,
    centering,
    known_blocks,
    layer_differences,
)
from te_fsdp.checkpoint.portable.huggingface_names import TeNames, groups_of
from te_fsdp.checkpoint.portable.lazy import InMemory, Lazy
from te_fsdp.checkpoint.portable.safetensors import is_safetensors, open_safetensors
from te_fsdp.errors import CheckpointError, message, shorten

__all__ = ["Tensors", "WeightMap"]

_log = logging.getLogger("te_fsdp")

#: Tensors by name, in memory or yet to be read.
Tensors = Mapping[str, torch.Tensor | Lazy]

# Causal masks and frequencies that older versions of transformers saved; recomputed there, not needed here.
_IGNORED_HUGGINGFACE = r"(.*\.)?(rotary_emb\.inv_freq|attn\.(bias|masked_bias))"
# Pickles of TransformerEngine's modules and the frequencies of its RotaryPositionEmbedding.
_IGNORED_TE = r"(.*\.)?(_extra_state|inv_freq)"


@dataclass(frozen=True)
class WeightMap:
    """All groups of a model, and the conversions. Built by :meth:`build`; holds no tensors.

    Attributes:
        architecture: The Hugging Face model.
        groups: In the order of the model.
        ignored_te: Pattern of names in the TransformerEngine model's state dict that are no weights.
    """

    architecture: Architecture
    groups: tuple[Group, ...]
    ignored_te: str = _IGNORED_TE

    @classmethod
    def build(
        cls,
        config: Any,
        blocks: TeBlocks | None = None,
        names: TeNames | None = None,
        centered: Callable[[str], bool | None] = lambda _: None,
    ) -> WeightMap:
        """Make the map of a model.

        Args:
            config: What :func:`read_config` takes, or an :class:`Architecture`.
            blocks: Options of the ``te.TransformerLayer``; default: TransformerEngine's defaults.
            names: Names of the TransformerEngine model's other parts; default: those of :class:`TeNames`.
            centered: Whether the norm in a module is zero-centered; ``None``: as ``blocks`` say.

        Raises:
            CheckpointError: A model that is not supported, or options that contradict it.
        """
        architecture = config if isinstance(config, Architecture) else read_config(config)
        names = names or TeNames()
        ignored = "|".join([_IGNORED_TE, *map(fnmatch.translate, names.ignored)])
        return cls(architecture, groups_of(architecture, blocks or TeBlocks(), names, centered), ignored)

    @classmethod
    def of(
        cls,
        config: Any,
        parameters: Collection[str],
        recorded: Recorded,
        blocks: TeBlocks | None = None,
        names: TeNames | None = None,
    ) -> tuple[WeightMap, list[str]]:
        """The map of a model that exists, and what its layers compute otherwise than the Hugging Face model, in words.

        Args:
            config: As for :meth:`build`.
            parameters: Names of the TransformerEngine model's parameters.
            recorded: Semantics of its modules.
            blocks: Options of its layers that neither tells.
            names: As for :meth:`build`.

        Raises:
            CheckpointError: As :meth:`build`, and :func:`known_blocks`.
        """
        names = names or TeNames()
        blocks = known_blocks(blocks or TeBlocks(), parameters, recorded, names)
        weights = cls.build(config, blocks, names, lambda module: centering(recorded, module))
        return weights, layer_differences(recorded, weights.architecture, names, blocks)

    def for_names(self, source: Collection[str]) -> WeightMap:
        """The map for a model without head, as the hub's files of GPT-2: names lack the prefix.

        The map itself unless the source has such names.
        """
        theirs = self.groups[0].huggingface.names[0]
        bare = theirs.partition(".")[2]
        if theirs in source or bare not in source:
            return self
        prefix = theirs.removesuffix(bare)
        groups = [replace(g, huggingface=g.huggingface.without(prefix)) for g in self.groups]
        return replace(self, groups=tuple(groups))

    def like(self, folder: Any) -> WeightMap:
        """The map with names as in a folder's files, if it is a folder with weights: see :meth:`for_names`."""
        is_folder = isinstance(folder, (str, os.PathLike)) and is_safetensors(Path(folder))
        return self.for_names(open_safetensors(Path(folder))[0]) if is_folder else self

    @property
    def te_names(self) -> set[str]:
        """Names of the TransformerEngine model's tensors."""
        return {name for group in self.groups for name in group.te.names}

    def checkpoint_shapes(self) -> dict[str, Shape]:
        """As :meth:`shapes` of the TransformerEngine model, but all experts of a layer as one, as in checkpoints."""
        found: dict[str, Shape] = {}
        layouts = self.layouts()
        for name, shape in self.shapes(te=True).items():
            if layouts[name] == GROUPED:
                name = stacked_name(name)
                shape = (found.get(name, (0,))[0] + 1, *shape)
            found[name] = shape
        return found

    def shapes(self, *, te: bool) -> dict[str, Shape]:
        """Every tensor's shape, of the TransformerEngine model (unsharded), or of the Hugging Face model."""
        sides = [(group.form(te=te), group.parts) for group in self.groups]
        return {name: shape for form, parts in sides for name, shape in form.shapes(parts).items()}

    def layouts(self) -> dict[str, str]:
        """Layout of every tensor of the TransformerEngine model, in the words of a checkpoint's manifest."""
        return {name: group.te.layout for group in self.groups for name in group.te.names}

    def to_te(
        self, source: Tensors, *, dtype: torch.dtype | None = None
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Tensors of the unsharded TransformerEngine model, from a Hugging Face model's: :meth:`lazily`, read in turn.

        Yields:
            Name and tensor: contiguous, on the CPU.

        Raises:
            CheckpointError: As :meth:`lazily`, before the first result.
        """
        return ((name, lazy.whole()) for name, lazy in self.lazily(source, to_te=True, dtype=dtype).items())

    def to_huggingface(
        self, source: Tensors, *, dtype: torch.dtype | None = None
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Tensors of the Hugging Face model, from the unsharded TransformerEngine model's: :meth:`to_te` reversed.

        A tied head comes under the embedding's name alone, as Hugging Face's own files have it.
        """
        return ((name, lazy.whole()) for name, lazy in self.lazily(source, to_te=False, dtype=dtype).items())

    def lazily(
        self,
        source: Tensors,
        *,
        to_te: bool,
        dtype: torch.dtype | None = None,
    ) -> dict[str, Lazy]:
        """The other side's tensors as ones that are converted when read. Local operation.

        Reading them in order holds one group at a time, and reads each source tensor once.

        Args:
            source: This side's tensors.
            to_te: From Hugging Face to TransformerEngine, else the other way.
            dtype: Of the results; ``None`` keeps each tensor's.

        Raises:
            CheckpointError: Missing, unexpected or wrongly shaped tensors, and such that are not plain, all named in
                one error before anything is read; several dtypes in one group. When read: biases other than zero that
                the Hugging Face model does not have, copies of a tied weight that differ.
        """
        forms = [group.form(te=not to_te) for group in self.groups]
        ignored = re.compile(_IGNORED_HUGGINGFACE if to_te else self.ignored_te)
        _check(source, self.shapes(te=not to_te), [n for form in forms for n in form.required], ignored)
        conversion, found = _Conversion(to_te), {}
        kind = dtype or next(source[name].dtype for form in forms for name in form.required)
        for batch in self.batches(to_te=to_te):
            mine: list[dict[str, Lazy]] = []
            for group in batch:
                names = group.form(te=not to_te).names
                mine.append({name: _lazy(source[name]) for name in names if name in source})
            # Zeros that are made up get the dtype of what comes before.
            kind = dtype or _common_dtype(mine[0]) or kind
            shapes = batch[0].form(te=to_te).shapes(batch[0].parts)
            for name in batch[0].written(to_te=to_te):
                found[name] = _Converted(name, shapes[name], kind, batch, mine, conversion)
        return found

    def batches(self, *, to_te: bool) -> list[tuple[Group, ...]]:
        """Groups that are read together: each, and after it those that leave no tensor and must be zero."""
        found: list[list[Group]] = []
        for group in self.groups:
            if group.written(to_te=to_te):
                found.append([group])
            else:
                found[-1].append(group)
        return [tuple(batch) for batch in found]


def _common_dtype(tensors: Mapping[str, Lazy]) -> torch.dtype | None:
    kinds = {tensor.dtype for tensor in tensors.values()}
    if len(kinds) > 1:
        raise CheckpointError(
            message(
                f"{', '.join(tensors)}: of several dtypes",
                expected="one dtype, or dtype=...",
                got=", ".join(sorted(map(str, kinds))),
                fix="pass dtype=torch.bfloat16 (or another) to convert all tensors",
            )
        )
    return next(iter(kinds), None)


class _Conversion:
    """Converts groups one after another."""

    def __init__(self, to_te: bool) -> None:
        self.to_te, self.warned = to_te, False
        self.last: tuple[Any, dict[str, torch.Tensor]] | None = None

    def read(self, wanted: _Converted) -> dict[str, torch.Tensor]:
        """What a group becomes; that of the last group is kept, since rows come in blocks."""
        if self.last is None or self.last[0] is not wanted.batch:
            self.last = None
            converted: dict[str, torch.Tensor] = {}
            for group, source in zip(wanted.batch, wanted.source, strict=True):
                tensors = {name: lazy.whole() for name, lazy in source.items()}
                converted |= self._convert(group, tensors, wanted.dtype)
            self.last = wanted.batch, converted
        return self.last[1]

    def _convert(
        self, group: Group, tensors: Mapping[str, torch.Tensor], dtype: torch.dtype
    ) -> dict[str, torch.Tensor]:
        converted = group.convert(tensors, to_te=self.to_te, dtype=dtype)
        if not self.warned and group.rounds(tensors, converted):
            self.warned = True
            _log.warning(
                "%s: zero-centering rounded this weight, and perhaps others; it is exact from 0.5 to 2",
                ", ".join(converted),
            )
        return converted


@dataclass
class _Converted(Lazy):
    """A tensor of a group, converted when its rows are asked for."""

    name: str
    shape: Shape
    dtype: torch.dtype
    batch: tuple[Group, ...]
    source: list[dict[str, Lazy]]
    conversion: _Conversion

    def rows(self, first: int, last: int) -> torch.Tensor:
        """See :meth:`Lazy.rows`."""
        return self.conversion.read(self)[self.name][first:last].clone()


def _check(
    source: Tensors, shapes: Mapping[str, Shape], required: list[str], ignored: re.Pattern[str]
) -> None:
    """Compare what a source has with what the map expects: everything but values.

    Raises:
        CheckpointError: Naming everything that is wrong.
    """
    missing = [name for name in required if name not in source]
    unexpected = [name for name in source if name not in shapes and not ignored.fullmatch(name)]
    problems = [f"missing: {shorten(missing, 20)}"] if missing else []
    problems += [f"unexpected: {shorten(unexpected, 20)}"] if unexpected else []
    for name in source.keys() & shapes.keys():
        shape, kind = tuple(source[name].shape), _unusable(source[name])
        if kind is not None:
            problems.append(f"{name} is {kind}, not a plain tensor of high precision")
        elif shape != shapes[name]:
            problems.append(f"{name} has shape {list(shape)}, not {list(shapes[name])}")
    if problems:
        raise CheckpointError(
            message(
                f"tensors that do not fit the map: {'. '.join(problems[:20])}",
                why="Every tensor must be known, so that none is lost",
                fix="compare config.json, TeBlocks (the layers' options) and TeNames (the other parts' names) with the "
                "model; a sharded or quantized model: te_fsdp.checkpoint.save_huggingface(path, model, config=...)",
            )
        )


def _unusable(tensor: torch.Tensor | Lazy) -> str | None:
    """What a tensor is, if its values cannot be taken as they are."""
    if isinstance(tensor, DTensor):
        return "a DTensor"
    if isinstance(tensor, torch.Tensor) and _te.is_quantized(tensor):
        return "a quantized tensor"
    if isinstance(tensor, torch.Tensor) and tensor.is_meta:
        return "a meta tensor"
    if not tensor.dtype.is_floating_point or tensor.dtype.itemsize < 2:
        return f"of {tensor.dtype}"
    return None


def _lazy(tensor: torch.Tensor | Lazy) -> Lazy:
    return tensor if isinstance(tensor, Lazy) else InMemory(tensor)
