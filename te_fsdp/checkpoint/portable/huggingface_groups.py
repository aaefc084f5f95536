"""Groups of tensors that two naming schemes store in different forms, and the moves between them.

A *group* is the smallest set of weights that must be read together, such as query, key and value of one layer.
Its *parts* are plain matrices and vectors, matrices as ``(out, in)``. Each side stores the parts in a *form*:
under one name each, one below the other under one name, interleaved by attention group, transposed, minus one. A
conversion unpacks one side's form into the parts and packs them into the other's. Except for zero-centered
gammas all of this moves values and computes nothing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle

import torch

from te_fsdp.errors import CheckpointError
from te_fsdp.layout.rules import PLAIN, Layout

__all__ = ["Form", "Group", "Shape"]

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Form:
    """How one side stores the parts of a group.

    A name for each part; or one name for all, which lie one below the other; or several names for one part, of which
    all but the first may be absent (a tied weight); or no name: the parts are zero.

    Attributes:
        names: The side's tensor names.
        transposed: Matrices are stored as ``(in, out)``.
        zero_centered: Stored is the part minus one.
        groups: Under one name for all, rows are interleaved: for each of so many attention groups its rows of every
            part in turn.
        layout: Of the tensors in a checkpoint: stacked where te_fsdp must know the parts to cut them, grouped where
            they are an expert's and the checkpoint has one for all.
    """

    names: tuple[str, ...]
    transposed: bool = False
    zero_centered: bool = False
    groups: int = 1
    layout: Layout = PLAIN

    def shapes(self, parts: Sequence[Shape]) -> dict[str, Shape]:
        """Shape under each name, for parts of the given shapes."""
        if len(self.names) < len(parts):
            parts = [(sum(part[0] for part in parts), *parts[0][1:])]
        return dict(
            zip(self.names, cycle(part[::-1] if self.transposed else part for part in parts), strict=False)
        )

    def unpack(self, tensors: Mapping[str, torch.Tensor], parts: Sequence[Shape]) -> list[torch.Tensor]:
        """The parts, from tensors under the form's names. Views where that is possible.

        Raises:
            CheckpointError: Several names for one part, under which different values are stored.
        """
        if not self.names:
            return [torch.zeros(part, device="cpu") for part in parts]
        found = [tensors[name] for name in self.names[: len(parts)]]
        for name in self.names[len(parts) :]:
            if name in tensors and not _same_bits(tensors[name], found[0]):
                raise CheckpointError(
                    f"{name}: differs from {self.names[0]}",
                    expected="the same values, since the Hugging Face model ties the two",
                    fix='untie them in config.json ("tie_word_embeddings": false), or tie them in the model',
                )
        if self.transposed:
            found = [tensor.t() for tensor in found]
        if len(found) < len(parts):
            rows = [part[0] // self.groups for part in parts]
            cut = found[0].unflatten(0, (self.groups, -1)).split(rows, 1)
            found = [piece.flatten(0, 1) for piece in cut]
        return found

    def pack(self, parts: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
        """The tensors to store under the form's names; the reverse of :meth:`unpack`."""
        if 0 < len(self.names) < len(parts):
            pieces = [part.unflatten(0, (self.groups, -1)) for part in parts]
            parts = [torch.cat(pieces, 1).flatten(0, 1)]
        stored = cycle(part.t() if self.transposed else part for part in parts)
        return {name: _own(part) for name, part in zip(self.names, stored, strict=False)}


@dataclass(frozen=True)
class Group:
    """Parts that are converted together.

    Attributes:
        parts: Shape of each part.
        huggingface: Their form in a Hugging Face model.
        te: Their form in the unsharded TransformerEngine model.
    """

    parts: tuple[Shape, ...]
    huggingface: Form
    te: Form

    def form(self, *, te: bool) -> Form:
        """The parts' form on one side."""
        return self.te if te else self.huggingface

    def required(self, *, te: bool) -> tuple[str, ...]:
        """Names on one side without which the parts cannot be had."""
        return self.form(te=te).names[: len(self.parts)]

    def written(self, *, to_te: bool) -> tuple[str, ...]:
        """Names to write: of a tied weight all that a state dict has, but in Hugging Face's files the first alone."""
        return self.te.names if to_te else self.required(te=False)

    def convert(
        self, tensors: Mapping[str, torch.Tensor], *, to_te: bool, dtype: torch.dtype
    ) -> dict[str, torch.Tensor]:
        """The other side's tensors.

        Args:
            tensors: This side's, all required names present, shapes right.
            to_te: From Hugging Face to TransformerEngine, else the other way.
            dtype: Of the result. Zero-centering is computed in float64 and rounded once.

        Raises:
            CheckpointError: Names of one weight with different values; values other than zero that the target has
                no name for.
        """
        source, target = self.form(te=not to_te), self.form(te=to_te)
        parts = source.unpack(tensors, self.parts)
        if source.zero_centered != target.zero_centered:
            # In float64: exact for gammas of ordinary size in float32 and narrower.
            parts = [part.double() + (1.0 if source.zero_centered else -1.0) for part in parts]
        if not target.names:
            _check_zero(source, parts)
        return {name: tensor.to(dtype) for name, tensor in target.pack(parts).items()}

    def rounds(self, tensors: Mapping[str, torch.Tensor], converted: Mapping[str, torch.Tensor]) -> bool:
        """Whether zero-centering had to round, so that converting back would not give every bit again."""
        if self.huggingface.zero_centered == self.te.zero_centered:
            return False
        mine, other = tensors[next(iter(tensors))], converted[next(iter(converted))]
        shift = (other.double() - mine.to(other.dtype).double()).abs()
        return bool((shift != 1.0).any())


def _own(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous tensor that shares no storage with a larger one."""
    tensor = tensor.contiguous()
    whole = math.prod(tensor.shape) * tensor.element_size() == tensor.untyped_storage().nbytes()
    return tensor if whole else tensor.clone()


def _same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Equal bit for bit, NaN included."""
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    if one.data_ptr() == other.data_ptr() and one.stride() == other.stride():
        return True
    return torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))


def _check_zero(source: Form, parts: Sequence[torch.Tensor]) -> None:
    if any(bool(part.count_nonzero()) for part in parts):
        raise CheckpointError(
            f"{', '.join(source.names)}: values that the Hugging Face model has no parameter for",
            expected="zeros",
            why="TransformerEngine's bias=True gives every projection a bias",
            fix='a config.json with these biases ("attention_bias": true, "mlp_bias": true for Llama), or '
            "training with these biases frozen",
        )
