"""The map between a Hugging Face model's tensors and a TransformerEngine model's: checked, streamed, both ways.

Hugging Face's names are those of transformers 4.57 and 5.23 (``models/*/modeling_*.py``, of experts
``conversion_mapping.py``; ``GPT2Model``'s ``Conv1D`` keeps matrices as ``(in, out)``), TransformerEngine's those of
2.18 to 2.20 (``pytorch/module/layernorm_linear.py``, ``layernorm_mlp.py``, ``grouped_linear.py``,
``pytorch/attention/multi_head_attention.py``), in the layout of the unsharded module.

Two naming schemes store the same tensors in different forms. A *group* is the smallest set of weights that must be
read together, such as query, key and value of one layer. Its *parts* are plain matrices and vectors, matrices as
``(out, in)``. Each side stores the parts in a *form*: under one name each, one below the other under one name,
interleaved by attention group, transposed, minus one. A conversion unpacks one side's form into the parts and packs
them into the other's. Except for zero-centered gammas all of this moves values and computes nothing.
"""

from __future__ import annotations

import fnmatch
import logging
import os
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from te_fsdp import _te
from te_fsdp.checkpoint.lazy import InMemory, Lazy, is_safetensors, open_safetensors
from te_fsdp.checkpoint.portable.huggingface_config import (
    EXPERTS,
    MIXTRALS,
    STYLES,
    Architecture,
    Experts,
    read_config,
)
from te_fsdp.checkpoint.portable.huggingface_model import (
    Recorded,
    TeBlocks,
    TeNames,
    centering,
    known_blocks,
    layer_differences,
)
from te_fsdp.errors import CheckpointError, shorten
from te_fsdp.layout import GROUPED, PLAIN, Layout

_log = logging.getLogger("te_fsdp")

#: Tensors by name, in memory or yet to be read.
Tensors = Mapping[str, torch.Tensor | Lazy]
Shape = tuple[int, ...]

# Causal masks and frequencies that older versions of transformers saved; recomputed there, not needed here.
_IGNORED_HUGGINGFACE = r"(.*\.)?(rotary_emb\.inv_freq|attn\.(bias|masked_bias))"
# Pickles of TransformerEngine's modules and the frequencies of its RotaryPositionEmbedding.
_IGNORED_TE = r"(.*\.)?(_extra_state|inv_freq)"


@dataclass(frozen=True)
class Form:
    """How one side stores the parts of a group.

    A name for each part; or one name for all, which lie one below the other; or several names for one part, of which
    all but the first may be absent (a tied weight); or no name: the parts are zero.

    Attributes:
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
        stored = cycle(part[::-1] if self.transposed else part for part in parts)
        return dict(zip(self.names, stored, strict=False))

    def unpack(self, tensors: Mapping[str, torch.Tensor], parts: Sequence[Shape]) -> list[torch.Tensor]:
        """The parts, from tensors under the form's names. Views where that is possible.

        Raises:
            CheckpointError: Several names for one part, under which different values are stored.
        """
        if not self.names:
            return [torch.zeros(part, device="cpu") for part in parts]
        found = [tensors[name] for name in self.names[: len(parts)]]
        for name in (name for name in self.names[len(parts) :] if name in tensors):
            both = tensors[name], found[0]
            bits = (tensor.contiguous().view(torch.uint8) for tensor in both)  # NaN equals NaN
            if both[0].dtype != both[1].dtype or not torch.equal(*bits):
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
        return {name: part.contiguous() for name, part in zip(self.names, stored, strict=False)}


@dataclass(frozen=True)
class Group:
    """Parts of these shapes that are converted together; ``te`` is their form in the unsharded model."""

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
        """The other side's tensors, from this side's: all required names present, shapes right.

        Raises:
            CheckpointError: Names of one weight with different values; values other than zero that the target has
                no name for.
        """
        source, target = self.form(te=not to_te), self.form(te=to_te)
        parts = source.unpack(tensors, self.parts)
        if source.zero_centered != target.zero_centered:
            # In float64, rounded once: exact for gammas of ordinary size in float32 and narrower.
            parts = [part.double() + (1.0 if source.zero_centered else -1.0) for part in parts]
        if not target.names and any(bool(part.count_nonzero()) for part in parts):
            raise CheckpointError(
                f"{', '.join(source.names)}: values that the Hugging Face model has no parameter for",
                expected="zeros",
                why="TransformerEngine's bias=True gives every projection a bias",
                fix='a config.json with these biases ("attention_bias": true, "mlp_bias": true for Llama), or '
                "training with these biases frozen",
            )
        return {name: tensor.to(dtype) for name, tensor in target.pack(parts).items()}

    def rounds(self, tensors: Mapping[str, torch.Tensor], converted: Mapping[str, torch.Tensor]) -> bool:
        """Whether zero-centering had to round, so that converting back would not give every bit again."""
        if self.huggingface.zero_centered == self.te.zero_centered:
            return False
        mine, other = tensors[next(iter(tensors))], converted[next(iter(converted))]
        shift = (other.double() - mine.to(other.dtype).double()).abs()
        return bool((shift != 1.0).any())


@dataclass(frozen=True)
class _Tables:
    """All groups of one model, in its order. Prefixes: ``theirs`` Hugging Face's, ``ours`` TransformerEngine's."""

    a: Architecture
    blocks: TeBlocks
    names: TeNames
    recorded: Recorded
    bias: bool
    mlp_bias: bool

    def model(self) -> Iterator[Group]:
        a, names, style = self.a, self.names, STYLES[self.a.style]
        wide, embedding = (a.vocabulary, a.hidden), f"{style.prefix}{style.embedding}.weight"
        if a.tied:  # then either side may store it twice
            ours = (names.embedding,) if names.head is None else (names.embedding, names.head)
            yield Group((wide,), Form((embedding, "lm_head.weight")), Form(ours))
        else:
            yield _one(wide, embedding, names.embedding)
        if a.positions:
            yield _one((a.positions, a.hidden), f"{style.prefix}wpe.weight", names.positions)
        for n in range(a.layers):
            yield from self.layer(n, style.prefix + style.layer.format(n), names.layer.format(layer=n))
        yield from self.norm(style.prefix + style.final_norm, names.final_norm)
        if not a.tied:
            assert names.head is not None
            yield _one(wide, "lm_head.weight", names.head)

    def layer(self, n: int, theirs: str, ours: str) -> Iterator[Group]:
        a, names, style = self.a, self.names, STYLES[self.a.style]
        attention, mlp, before = ours + names.attention, ours + names.mlp, theirs + style.mlp_norm
        yield from self.attention(theirs, attention)
        if a.branch_norms:
            yield from self.norm(before, ours + names.attention_out_norm)
            after, before = f"{theirs}post_feedforward_layernorm", f"{theirs}pre_feedforward_layernorm"
            yield from self.norm(after, ours + names.mlp_out_norm)
        if a.experts is not None and n in a.experts.layers:
            yield from self.norm(before, ours + names.mlp_norm)
            yield from self.experts(a.experts, theirs, ours)
            return
        yield from self.norm(before, f"{mlp}layer_norm_")
        fc1 = [theirs + part for part in style.fc1]
        into = Form((f"{mlp}fc1_",), layout=Layout("stacked", (1, 1)) if len(fc1) > 1 else PLAIN)
        yield from self.linear(fc1, into, [a.ffn] * len(fc1), a.hidden, a.mlp_bias, self.mlp_bias)
        fc2 = Form((f"{mlp}fc2_",))
        yield from self.linear([theirs + style.fc2], fc2, [a.hidden], a.ffn, a.mlp_bias, self.mlp_bias)

    def attention(self, theirs: str, ours: str) -> Iterator[Group]:
        a, style, qkv = self.a, STYLES[self.a.style], f"{ours}layernorm_qkv."
        wide, narrow = a.heads * a.head_dim, a.kv_heads * a.head_dim
        if not self.blocks.fuse_qkv_params:
            form = Form(tuple(f"{qkv}{part}_" for part in ("query", "key", "value")))
        elif self.blocks.qkv_weight_interleaved is not False:
            form = Form((qkv,), groups=a.kv_heads)
        else:
            form = Form((qkv,), layout=Layout("stacked", (a.heads, a.kv_heads, a.kv_heads)))
        yield from self.norm(theirs + style.attention_norm, f"{qkv}layer_norm_")
        projections, heights = [theirs + part for part in style.qkv], [wide, narrow, narrow]
        yield from self.linear(projections, form, heights, a.hidden, a.qkv_bias, self.bias)
        proj = Form((f"{ours}proj.",))
        yield from self.linear([theirs + style.proj], proj, [a.hidden], wide, a.proj_bias, self.bias)
        for part in "qk" if a.qk_norm else "":
            norm = Form((f"{theirs}self_attn.{part}_norm.weight",), zero_centered=a.zero_centered)
            yield Group(((a.head_dim,),), norm, Form((f"{ours}{part}_norm.weight",)))

    def norm(self, theirs: str, ours: str) -> Iterator[Group]:
        """Weight, and bias if there is one. ``ours`` is their prefix."""
        told = centering(self.recorded, ours.removesuffix("layer_norm_").removesuffix("."))
        if told is None:
            last = ours == self.names.final_norm
            told = self.blocks.final_norm_zero_centered if last else self.blocks.zero_centered_gamma
        weight, shape = Form((f"{ours}weight",), zero_centered=bool(told)), (self.a.hidden,)
        yield Group((shape,), Form((f"{theirs}.weight",), zero_centered=self.a.zero_centered), weight)
        if self.a.style == "gpt2":
            yield _one(shape, f"{theirs}.bias", f"{ours}bias")

    def linear(
        self, theirs: Sequence[str], ours: Form, heights: Sequence[int], width: int, biased: bool, bias: bool
    ) -> Iterator[Group]:
        """Projections that are one module of TE's, whose names are prefixes; biases that the other lacks are zero."""
        for kind, inner in (("weight", (width,)), ("bias", ())) if bias else (("weight", (width,)),):
            names = [f"{one}.{kind}" for one in theirs] if kind == "weight" or biased else []
            form = Form(tuple(names), transposed=self.a.style == "gpt2")
            named = replace(ours, names=tuple(one + kind for one in ours.names))
            yield Group(tuple((height, *inner) for height in heights), form, named)

    def experts(self, e: Experts, theirs: str, ours: str) -> Iterator[Group]:
        """Router, each expert by itself, and the shared expert."""
        a, names = self.a, self.names
        block, gated, down = MIXTRALS if a.model_type == "mixtral" else EXPERTS
        block = theirs + block
        yield _one((e.count, a.hidden), f"{block}gate.weight", ours + names.router)
        for n in range(e.count):
            parts = Form(tuple(f"{block}experts.{n}.{part}.weight" for part in gated))
            into = Form((f"{ours}{names.experts_fc1}weight{n}",), layout=GROUPED)
            yield Group(((e.ffn, a.hidden),) * 2, parts, into)
            out = Form((f"{ours}{names.experts_fc2}weight{n}",), layout=GROUPED)
            yield Group(((a.hidden, e.ffn),), Form((f"{block}experts.{n}.{down}.weight",)), out)
        if e.shared_ffn:
            shared = f"{block}shared_expert."
            parts = Form(tuple(f"{shared}{part}.weight" for part in gated))
            yield Group(((e.shared_ffn, a.hidden),) * 2, parts, Form((f"{ours}{names.shared_fc1}weight",)))
            yield _one((a.hidden, e.shared_ffn), f"{shared}{down}.weight", f"{ours}{names.shared_fc2}weight")
            yield _one((1, a.hidden), f"{block}shared_expert_gate.weight", ours + names.shared_gate)


def _one(shape: Shape, theirs: str, ours: str) -> Group:
    """A tensor that has one name on either side."""
    return Group((shape,), Form((theirs,)), Form((ours,)))


@dataclass(frozen=True)
class WeightMap:
    """All groups of a model, in its order, and the conversions; holds no tensors."""

    architecture: Architecture
    groups: tuple[Group, ...]
    ignored_te: str = _IGNORED_TE  # a pattern: what is no weight in the TransformerEngine model's state dict

    @classmethod
    def build(
        cls,
        config: Any,
        blocks: TeBlocks | None = None,
        names: TeNames | None = None,
        recorded: Recorded | None = None,
    ) -> WeightMap:
        """Make the map of a model from what :func:`read_config` takes, or an :class:`Architecture`.

        Whether a norm is zero-centered say the semantics that are recorded of the TransformerEngine model, else
        ``blocks``, whose default is TransformerEngine's.

        Raises:
            CheckpointError: A model that is not supported; biases in it, none in the layers; an unnamed untied head.
        """
        a = config if isinstance(config, Architecture) else read_config(config)
        blocks, names = blocks or TeBlocks(), names or TeNames()
        bias = (a.qkv_bias or a.proj_bias or a.mlp_bias) if blocks.bias is None else blocks.bias
        mlp_bias = bias if blocks.mlp_bias is None else blocks.mlp_bias
        if ((a.qkv_bias or a.proj_bias) and not bias) or (a.mlp_bias and not mlp_bias):
            raise CheckpointError(
                f"bias=False of the layers, but the {a.model_type} model has biases",
                fix="build te.TransformerLayer with read_config(...).te_kwargs(), which sets bias",
            )
        if names.head is None and not a.tied:
            raise CheckpointError(
                f"names.head is None, but the {a.model_type} model has a head of its own",
                expected="a name for lm_head.weight, since config.json does not tie it to the embedding",
                fix="give the model a head and pass TeNames(head=...)",
            )
        ignored = "|".join([_IGNORED_TE, *map(fnmatch.translate, names.ignored)])
        return cls(a, tuple(_Tables(a, blocks, names, recorded or {}, bias, mlp_bias).model()), ignored)

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

        ``blocks`` are options that neither the names of its parameters nor its modules' semantics tell.

        Raises:
            CheckpointError: As :meth:`build`, and :func:`known_blocks`.
        """
        names = names or TeNames()
        blocks = known_blocks(blocks or TeBlocks(), parameters, recorded, names)
        weights = cls.build(config, blocks, names, recorded)
        return weights, layer_differences(recorded, weights.architecture, names, blocks)

    def for_names(self, source: Collection[str]) -> WeightMap:
        """The map for a model without head, as the hub's files of GPT-2: names lack the prefix. Else the map itself."""
        theirs = self.groups[0].huggingface.names[0]
        bare = theirs.partition(".")[2]
        if theirs in source or bare not in source:
            return self
        prefix, groups = theirs.removesuffix(bare), []
        for group in self.groups:
            names = tuple(name.removeprefix(prefix) for name in group.huggingface.names)
            groups.append(replace(group, huggingface=replace(group.huggingface, names=names)))
        return replace(self, groups=tuple(groups))

    def like(self, folder: Any) -> WeightMap:
        """The map with names as in a folder's files, if it is a folder with weights: see :meth:`for_names`."""
        is_folder = isinstance(folder, (str, os.PathLike)) and is_safetensors(Path(folder))
        return self.for_names(open_safetensors(Path(folder))[0]) if is_folder else self

    def shapes(self, *, te: bool) -> dict[str, Shape]:
        """Every tensor's shape, of the TransformerEngine model (unsharded), or of the Hugging Face model."""
        sides = [(group.form(te=te), group.parts) for group in self.groups]
        return {name: shape for form, parts in sides for name, shape in form.shapes(parts).items()}

    def layouts(self) -> dict[str, str]:
        """Layout of every tensor of the TransformerEngine model, in the words of a checkpoint's manifest."""
        return {name: str(group.te.layout) for group in self.groups for name in group.te.names}

    def lazily(self, source: Tensors, *, to_te: bool, dtype: torch.dtype | None = None) -> dict[str, Lazy]:
        """The other side's tensors as ones that are converted when read. Local operation.

        Reading them in order holds one group at a time, and reads each source tensor once. A tied head becomes none of
        Hugging Face's: their own files have it under the embedding's name alone. ``dtype=None`` keeps each tensor's.

        Raises:
            CheckpointError: Missing, unexpected or wrongly shaped tensors, and such that are not plain, all named in
                one error before anything is read; several dtypes in one group. When read: biases other than zero that
                the Hugging Face model does not have, copies of a tied weight that differ. A ``dtype`` that loses them.
        """
        if dtype is not None and not (isinstance(dtype, torch.dtype) and _is_high(dtype)):
            raise CheckpointError(
                "Hugging Face model: dtype",
                expected="None, or a floating-point dtype of 16 bits or more",
                got=repr(dtype),
                why="Values in fewer bits need scales, which nothing would hold",
            )
        required = [name for group in self.groups for name in group.required(te=not to_te)]
        expected = self.shapes(te=not to_te)
        _check(source, expected, required, re.compile(_IGNORED_HUGGINGFACE if to_te else self.ignored_te))
        conversion, found = _Conversion(to_te), {}
        lazy = {n: t if isinstance(t, Lazy) else InMemory(t) for n, t in source.items() if n in expected}
        kind = dtype or source[required[0]].dtype
        for batch in self.batches(to_te=to_te):
            mine = [(g, {n: lazy[n] for n in g.form(te=not to_te).names if n in lazy}) for g in batch]
            # Zeros that are made up get the dtype of what comes before.
            kind = dtype or _common_dtype(mine[0][1]) or kind
            shapes = batch[0].form(te=to_te).shapes(batch[0].parts)
            for name in batch[0].written(to_te=to_te):
                found[name] = Lazy(shapes[name], kind, partial(conversion.rows, name, mine, kind))
        return found

    def batches(self, *, to_te: bool) -> list[list[Group]]:
        """Groups that are read together: each, and after it those that leave no tensor and must be zero."""
        found: list[list[Group]] = []
        for group in self.groups:
            if group.written(to_te=to_te):
                found.append([])
            found[-1].append(group)
        return found


def _common_dtype(tensors: Mapping[str, Lazy]) -> torch.dtype | None:
    kinds = {tensor.dtype for tensor in tensors.values()}
    if len(kinds) > 1:
        raise CheckpointError(
            f"{', '.join(tensors)}: of several dtypes",
            expected="one dtype, or dtype=...",
            got=", ".join(sorted(map(str, kinds))),
            fix="pass dtype=torch.bfloat16 (or another) to convert all tensors",
        )
    return next(iter(kinds), None)


#: Groups that are read together, each with its source's tensors.
_Batch = list[tuple[Group, dict[str, Lazy]]]


class _Conversion:
    """Converts groups one after another."""

    def __init__(self, to_te: bool) -> None:
        self.to_te, self.warned = to_te, False
        self.last: tuple[Any, dict[str, torch.Tensor]] | None = None

    def rows(self, name: str, batch: _Batch, dtype: torch.dtype, first: int, last: int) -> torch.Tensor:
        """Rows of a tensor that some groups become; those of the last call are kept, since rows come in blocks."""
        if self.last is None or self.last[0] is not batch:
            self.last = None
            found: dict[str, torch.Tensor] = {}
            for group, source in batch:
                tensors = {name: lazy.whole() for name, lazy in source.items()}
                converted = group.convert(tensors, to_te=self.to_te, dtype=dtype)
                if not self.warned and group.rounds(tensors, converted):
                    self.warned = True
                    text = "%s: zero-centering rounded this weight, and perhaps others; it is exact from 0.5 to 2"
                    _log.warning(text, ", ".join(converted))
                found |= converted
            self.last = batch, found
        return self.last[1][name][first:last].clone()


def _check(
    source: Tensors, shapes: Mapping[str, Shape], required: list[str], ignored: re.Pattern[str]
) -> None:
    """Raise all at once in which a source differs from what the map expects, values aside."""
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
            f"tensors that do not fit the map: {'. '.join(problems[:20])}",
            why="Every tensor must be known, so that none is lost",
            fix="compare config.json, TeBlocks (the layers' options) and TeNames (the other parts' names) with the "
            "model; a sharded or quantized model: te_fsdp.checkpoint.save_huggingface(path, model, config=...)",
        )


def _unusable(tensor: torch.Tensor | Lazy) -> str | None:
    """What a tensor is, if its values cannot be taken as they are."""
    if isinstance(tensor, DTensor):
        return "a DTensor"
    if isinstance(tensor, torch.Tensor) and (_te.is_quantized(tensor) or tensor.is_meta):
        return "a quantized tensor" if _te.is_quantized(tensor) else "a meta tensor"
    return None if _is_high(tensor.dtype) else f"of {tensor.dtype}"


def _is_high(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point and dtype.itemsize > 1
