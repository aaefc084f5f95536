"""The map between a Hugging Face model's tensors and a TransformerEngine model's: checked, streamed, both ways."""

from __future__ import annotations

import fnmatch
import logging
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch.distributed.tensor import DTensor

from te_fsdp import _te
from te_fsdp.checkpoint.portable.huggingface_config import Architecture, read_config
from te_fsdp.checkpoint.portable.huggingface_groups import Form, Group, Shape
from te_fsdp.checkpoint.portable.huggingface_names import TeBlocks, TeNames, groups_of
from te_fsdp.checkpoint.portable.lazy import InMemory, Lazy
from te_fsdp.errors import CheckpointError, message

__all__ = ["Source", "Tensors", "WeightMap"]

_log = logging.getLogger("te_fsdp")

#: Tensors by name, in memory or yet to be read.
Tensors = Mapping[str, torch.Tensor | Lazy]
#: The same, or a stream. A mapping is checked as a whole before anything is converted.
Source = Tensors | Iterable[tuple[str, torch.Tensor]]

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
    ) -> WeightMap:
        """Make the map of a model.

        Args:
            config: What :func:`read_config` takes, or an :class:`Architecture`.
            blocks: Options of the ``te.TransformerLayer``; default: TransformerEngine's defaults.
            names: Names of the TransformerEngine model's other parts; default: those of :class:`TeNames`.

        Raises:
            CheckpointError: A model that is not supported, or options that contradict it.
        """
        architecture = config if isinstance(config, Architecture) else read_config(config)
        names = names or TeNames()
        ignored = "|".join([_IGNORED_TE, *map(fnmatch.translate, names.ignored)])
        return cls(architecture, groups_of(architecture, blocks or TeBlocks(), names), ignored)

    def for_names(self, source: Source) -> WeightMap:
        """The map for a model without head, as the hub's files of GPT-2: names lack the prefix.

        The map itself unless a mapping has such names.
        """
        theirs = self.groups[0].huggingface.names[0]
        bare = theirs.partition(".")[2]
        if not isinstance(source, Mapping) or theirs in source or bare not in source:
            return self
        prefix = theirs.removesuffix(bare)
        groups = [replace(g, huggingface=g.huggingface.without(prefix)) for g in self.groups]
        return replace(self, groups=tuple(groups))

    def shapes(self, *, te: bool) -> dict[str, Shape]:
        """Every tensor's shape, of the TransformerEngine model (unsharded), or of the Hugging Face model."""
        sides = [(group.te if te else group.huggingface, group.parts) for group in self.groups]
        return {name: shape for form, parts in sides for name, shape in form.shapes(parts).items()}

    def layouts(self) -> dict[str, str]:
        """Layout of every tensor of the TransformerEngine model, in the words of a checkpoint's manifest."""
        return {name: group.te.layout for group in self.groups for name in group.te.names}

    def to_te(
        self, source: Source, *, dtype: torch.dtype | None = None
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Tensors of the unsharded TransformerEngine model, from a Hugging Face model's. Local operation.

        Holds one group at a time; a stream in another order than the model's holds what it has begun.

        Args:
            source: The Hugging Face model's tensors, as :data:`Source`.
            dtype: Of the results; ``None`` keeps each tensor's.

        Yields:
            Name and tensor, contiguous; it may be the source's own where nothing had to be moved.

        Raises:
            CheckpointError: Missing, unexpected or wrongly shaped tensors, all named in one error: before the first
                result for a mapping, at the end for a stream; tensors that are not plain.
        """
        return self._convert(source, to_te=True, dtype=dtype)

    def to_huggingface(
        self, source: Source, *, dtype: torch.dtype | None = None
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Tensors of the Hugging Face model, from the unsharded TransformerEngine model's: :meth:`to_te` reversed.

        A tied head comes under the embedding's name alone, as Hugging Face's own files have it.

        Raises:
            CheckpointError: As :meth:`to_te`; biases other than zero that the Hugging Face model does not have.
        """
        return self._convert(source, to_te=False, dtype=dtype)

    def lazily(
        self,
        source: Tensors,
        *,
        to_te: bool,
        dtype: torch.dtype | None = None,
    ) -> dict[str, Lazy]:
        """The other side's tensors as ones that are converted when read, for files. Local operation.

        Reading them in order holds one group at a time, and reads each source tensor once.

        Args:
            source: This side's tensors.
            to_te: From Hugging Face to TransformerEngine, else the other way.
            dtype: As for :meth:`to_te`.

        Raises:
            CheckpointError: As :meth:`to_te`, before anything is read.
        """
        forms = [group.huggingface if to_te else group.te for group in self.groups]
        self._checker(to_te=to_te).all_at_once(source, forms)
        # Zeros that are made up get the dtype of what is there.
        conversion = _Conversion(
            to_te, dtype, next((source[n].dtype for f in forms for n in f.required), None)
        )
        found: dict[str, Lazy] = {}
        for group, form in zip(self.groups, forms, strict=True):
            mine = {name: _lazy(source[name]) for name in form.names if name in source}
            target = group.te if to_te else group.huggingface
            shapes = target.shapes(group.parts)
            kind = dtype or next((tensor.dtype for tensor in mine.values()), conversion.zeros)
            for name in _written(target, to_te):
                found[name] = _Converted(name, shapes[name], kind, group, mine, conversion)
        return found

    def _checker(self, *, to_te: bool) -> _Checker:
        return _Checker(self.shapes(te=not to_te), _IGNORED_HUGGINGFACE if to_te else self.ignored_te)

    def _convert(
        self, source: Source, *, to_te: bool, dtype: torch.dtype | None
    ) -> Iterator[tuple[str, torch.Tensor]]:
        conversion = _Conversion(to_te, dtype)
        for group, tensors in self._gather(source, self._checker(to_te=to_te), to_te=to_te):
            converted = conversion.of(group, tensors)
            for name in _written(group.te if to_te else group.huggingface, to_te):
                yield name, converted[name]

    def _gather(
        self, source: Source, checked: _Checker, *, to_te: bool
    ) -> Iterator[tuple[Group, dict[str, torch.Tensor]]]:
        """Each group with its source tensors, checked."""
        forms = [group.huggingface if to_te else group.te for group in self.groups]
        if isinstance(source, Mapping):
            tensors = cast("Tensors", source)
            checked.all_at_once(tensors, forms)
            for group, form in zip(self.groups, forms, strict=True):
                yield group, {name: _read(tensors[name]) for name in form.names if name in tensors}
            return
        group_of = {name: n for n, form in enumerate(forms) for name in form.names}
        begun: dict[int, dict[str, torch.Tensor]] = {n: {} for n, form in enumerate(forms) if not form.names}
        done: set[str] = set()
        for name, tensor in source:
            if not checked.expects(name, tensor):
                continue
            n = group_of[name]
            begun.setdefault(n, {})[name] = tensor.detach()
            done.add(name)
            if len(begun[n]) == len(forms[n].names):
                yield self.groups[n], begun.pop(n)
        checked.require(done, forms)
        for n, tensors in sorted(begun.items()):
            yield self.groups[n], tensors


def _written(form: Form, to_te: bool) -> tuple[str, ...]:
    """Names to write: of a tied weight all that a state dict has, but in Hugging Face's files the first alone."""
    return form.names if to_te else form.required


class _Conversion:
    """Converts groups one after another."""

    def __init__(self, to_te: bool, dtype: torch.dtype | None, zeros: torch.dtype | None = None) -> None:
        self.to_te, self.dtype, self.zeros = to_te, dtype, zeros or torch.float32
        self.last: tuple[Group, dict[str, torch.Tensor]] | None = None
        self.warned = False

    def of(self, group: Group, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The group's other side."""
        for tensor in tensors.values():
            self.zeros = tensor.dtype
        converted = group.convert(tensors, to_te=self.to_te, dtype=self.dtype, zeros=self.zeros)
        if not self.warned and group.rounds(tensors, converted):
            self.warned = True
            _log.warning(
                "%s: zero-centering rounded this weight, and perhaps others; it is exact from 0.5 to 2",
                ", ".join(converted),
            )
        return converted

    def read(self, group: Group, source: Mapping[str, Lazy]) -> dict[str, torch.Tensor]:
        """The same from tensors that are yet to be read; the last group is kept, since rows come in blocks."""
        if self.last is None or self.last[0] is not group:
            self.last = None
            self.last = group, self.of(group, {name: lazy.whole() for name, lazy in source.items()})
        return self.last[1]


@dataclass
class _Converted(Lazy):
    """A tensor of a group, converted when its rows are asked for."""

    name: str
    shape: Shape
    dtype: torch.dtype
    group: Group
    source: Mapping[str, Lazy]
    conversion: _Conversion

    def rows(self, first: int, last: int) -> torch.Tensor:
        """See :meth:`Lazy.rows`."""
        return self.conversion.read(self.group, self.source)[self.name][first:last].clone()


class _Checker:
    """Compares what a source has with what the map expects."""

    def __init__(self, shapes: Mapping[str, Shape], ignored: str) -> None:
        self.shapes, self.ignored = shapes, re.compile(ignored)
        self.unexpected: list[str] = []
        self.wrong: dict[str, str] = {}

    def all_at_once(self, source: Tensors, forms: list[Form]) -> None:
        """Check everything about a source but its values.

        Raises:
            CheckpointError: Naming everything that is wrong.
        """
        for name in source:
            self.expects(name, source[name])
        self.require(set(source), forms)

    def expects(self, name: str, tensor: torch.Tensor | Lazy) -> bool:
        """Whether a tensor belongs to the map and fits; if not, remembers it."""
        if name not in self.shapes:
            if not self.ignored.fullmatch(name):
                self.unexpected.append(name)
            return False
        shape, kind = tuple(tensor.shape), _unusable(tensor)
        if kind is not None:
            self.wrong[name] = f"is {kind}, not a plain tensor of high precision"
        elif shape != self.shapes[name]:
            self.wrong[name] = f"has shape {list(shape)}, not {list(self.shapes[name])}"
        return name not in self.wrong

    def require(self, found: set[str], forms: list[Form]) -> None:
        """Raise for everything that was noticed, and for names that did not come.

        Raises:
            CheckpointError: Naming everything that is wrong.
        """
        missing = [name for form in forms for name in form.required if name not in found | self.wrong.keys()]
        problems = [f"missing: {', '.join(missing)}"] if missing else []
        problems += [f"unexpected: {', '.join(self.unexpected)}"] if self.unexpected else []
        problems += [f"{name} {what}" for name, what in self.wrong.items()]
        if problems:
            raise CheckpointError(
                message(
                    f"tensors that do not fit the map: {'. '.join(problems)}",
                    why="Every tensor must be known, so that none is lost",
                    fix="compare config.json, TeBlocks (the layers' options) and TeNames (the other parts' names) "
                    "with the model; save sharded or quantized models with te_fsdp.checkpoint.save and export that",
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


def _read(tensor: torch.Tensor | Lazy) -> torch.Tensor:
    return tensor.whole() if isinstance(tensor, Lazy) else tensor.detach()


def _lazy(tensor: torch.Tensor | Lazy) -> Lazy:
    return tensor if isinstance(tensor, Lazy) else InMemory(tensor)
