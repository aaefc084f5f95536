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
from dataclasses import dataclass, replace
from typing import Literal

import torch

from te_fsdp.checkpoint.entries import GROUPED
from te_fsdp.errors import CheckpointError, message
from te_fsdp.layout.rules import PLAIN, Layout

__all__ = ["Form", "Group", "Shape"]

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Form:
    """How one side stores the parts of a group.

    Attributes:
        names: The side's tensor names.
        packing: ``"separate"``: a name for each part. ``"joined"``: one name, the parts one below the other.
            ``"interleaved"``: one name; for each of ``groups`` its rows of every part in turn. ``"copies"``:
            one part under several names, of which all but the first may be absent. ``"absent"``: no name; the
            parts are zero.
        transposed: Matrices are stored as ``(in, out)``.
        zero_centered: Stored is the part minus one.
        groups: Attention groups of an interleaved form.
        blocks: Relative heights of a joined form's parts, where te_fsdp must know them to cut the tensor.
        grouped: The tensors are an expert's, part of one for all in a checkpoint.
    """

    names: tuple[str, ...]
    packing: Literal["separate", "joined", "interleaved", "copies", "absent"] = "separate"
    transposed: bool = False
    zero_centered: bool = False
    groups: int = 1
    blocks: tuple[int, ...] = ()
    grouped: bool = False

    @property
    def required(self) -> tuple[str, ...]:
        """Names without which the parts cannot be had."""
        return self.names[:1] if self.packing == "copies" else self.names

    def without(self, prefix: str) -> Form:
        """The form with a prefix taken off its names."""
        return replace(self, names=tuple(name.removeprefix(prefix) for name in self.names))

    @property
    def layout(self) -> str:
        """Layout of the tensors, in the words of a checkpoint's manifest."""
        if self.grouped:
            return GROUPED
        return str(Layout("stacked", self.blocks) if self.blocks else PLAIN)

    def shapes(self, parts: Sequence[Shape]) -> dict[str, Shape]:
        """Shape under each name, for parts of the given shapes."""
        if self.packing in ("joined", "interleaved"):
            parts = [(sum(part[0] for part in parts), *parts[0][1:])]
        elif self.packing == "copies":
            parts = list(parts) * len(self.names)
        stored = [part[::-1] if self.transposed else part for part in parts]
        return dict(zip(self.names, stored, strict=self.packing != "absent"))

    def unpack(self, tensors: Mapping[str, torch.Tensor], parts: Sequence[Shape]) -> list[torch.Tensor]:
        """The parts, from tensors under the form's names. Views where that is possible.

        Raises:
            CheckpointError: Copies that differ.
        """
        if self.packing == "absent":
            return [torch.zeros(part, device="cpu") for part in parts]
        found = [tensors[name] for name in self.names if name in tensors]
        if self.packing == "copies":
            self._check_copies(tensors)
            found = found[:1]
        if self.transposed:
            found = [tensor.t() for tensor in found]
        if self.packing == "joined":
            found = list(found[0].split([part[0] for part in parts]))
        elif self.packing == "interleaved":
            rows = [part[0] // self.groups for part in parts]
            cut = found[0].unflatten(0, (self.groups, -1)).split(rows, 1)
            found = [piece.flatten(0, 1) for piece in cut]
        return found

    def pack(self, parts: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
        """The tensors to store under the form's names; the reverse of :meth:`unpack`."""
        if self.packing == "joined":
            parts = [torch.cat(list(parts))]
        elif self.packing == "interleaved":
            pieces = [part.unflatten(0, (self.groups, -1)) for part in parts]
            parts = [torch.cat(pieces, 1).flatten(0, 1)]
        elif self.packing == "copies":
            parts = list(parts) * len(self.names)
        if self.transposed:
            parts = [part.t() for part in parts]
        return {name: _own(part) for name, part in zip(self.names, parts, strict=self.packing != "absent")}

    def _check_copies(self, tensors: Mapping[str, torch.Tensor]) -> None:
        first, *others = self.names
        for name in others:
            if name in tensors and not _same_bits(tensors[name], tensors[first]):
                raise CheckpointError(
                    message(
                        f"{name}: differs from {first}",
                        expected="the same values, since the Hugging Face model ties the two",
                        fix='untie them in config.json ("tie_word_embeddings": false), or tie them in the model',
                    )
                )


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

    def written(self, *, to_te: bool) -> tuple[str, ...]:
        """Names to write: of a tied weight all that a state dict has, but in Hugging Face's files the first alone."""
        return self.te.names if to_te else self.huggingface.required

    def convert(
        self, tensors: Mapping[str, torch.Tensor], *, to_te: bool, dtype: torch.dtype
    ) -> dict[str, torch.Tensor]:
        """The other side's tensors.

        Args:
            tensors: This side's, all required names present, shapes right.
            to_te: From Hugging Face to TransformerEngine, else the other way.
            dtype: Of the result. Zero-centering is computed in float64 and rounded once.

        Raises:
            CheckpointError: Copies that differ, values other than zero that the target has no name for.
        """
        source, target = (self.huggingface, self.te) if to_te else (self.te, self.huggingface)
        parts = source.unpack(tensors, self.parts)
        if source.zero_centered != target.zero_centered:
            # In float64: exact for gammas of ordinary size in float32 and narrower.
            parts = [part.double() + (1.0 if source.zero_centered else -1.0) for part in parts]
        if target.packing == "absent":
            _check_zero(source, parts)
        return {name: tensor.to(dtype) for name, tensor in target.pack(parts).items()}

    def rounds(self, tensors: Mapping[str, torch.Tensor], converted: Mapping[str, torch.Tensor]) -> bool:
        """Whether zero-centering had to round, so that converting back would not give every bit again."""
        if self.huggingface.zero_centered == self.te.zero_centered:
            return False
        mine, other = tensors[next(iter(tensors))], converted[next(iter(converted))]
        if not mine.numel():
            return False
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
            message(
                f"{', '.join(source.names)}: values that the Hugging Face model has no parameter for",
                expected="zeros",
                why="TransformerEngine's bias=True gives every projection a bias",
                fix='a config.json with these biases ("attention_bias": true, "mlp_bias": true for Llama), or '
                "training with these biases frozen",
            )
        )
