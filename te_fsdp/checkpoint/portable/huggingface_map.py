"""The map of a Hugging Face model's tensors to a TransformerEngine model's: checked, streamed, both ways.

Hugging Face's names are those of transformers 4.57 and 5.23 (``models/*/modeling_*.py``, of experts
``conversion_mapping.py``; ``GPT2Model``'s ``Conv1D`` keeps matrices as ``(in, out)``), TransformerEngine's those of
2.18 to 2.20 (``pytorch/module/layernorm_linear.py``, ``layernorm_mlp.py``, ``grouped_linear.py``,
``pytorch/attention/multi_head_attention.py``), in the layout of the unsharded module.
"""

from __future__ import annotations

import fnmatch
import logging
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial, reduce
from itertools import cycle
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from te_fsdp.checkpoint.lazy_tensors import InMemory, Lazy
from te_fsdp.checkpoint.portable.huggingface_config import FAMILIES, Architecture, Names, read_config
from te_fsdp.checkpoint.portable.huggingface_model import (
    ModelDescription,
    Recorded,
    TeBlocks,
    TeNames,
    centering,
    given_or_default,
    known_blocks,
    layer_differences,
)
from te_fsdp.checkpoint.reader import rounded
from te_fsdp.checkpoint.tensor_entries import Shape
from te_fsdp.errors import CheckpointError, shorten
from te_fsdp.layout import GROUPED, PLAIN, Layout
from te_fsdp.upstream import te as _te

_log = logging.getLogger("te_fsdp")

#: Tensors by name, in memory or yet to be read.
Tensors = Mapping[str, torch.Tensor | Lazy]

# Causal masks and frequencies that older versions of transformers saved; recomputed there, not needed here.
_IGNORED_HUGGINGFACE = r"(.*\.)?(rotary_emb\.inv_freq|attn\.(bias|masked_bias))"
# Extra state of TransformerEngine's modules, and the frequencies of its RotaryPositionEmbedding.
_IGNORED_TE = r"(.*\.)?(_extra_state|inv_freq)"
_ROUNDED = "%s: zero-centering rounded this weight, and perhaps others; it is exact from 0.5 to 2"


# [Note: groups, parts and forms] Two naming schemes store the same tensors in different forms. A *group* is
# the smallest set of weights that must be read together, such as query, key and value of one layer. Its
# *parts* are plain matrices and vectors, matrices as ``(out, in)``. Each side stores the parts in a *form*:
# under one name each, one below the other under one name, interleaved by attention group, transposed, minus
# one. A conversion unpacks one side's form into the parts and packs them into the other's. Except for
# zero-centered gammas all of this moves values and computes nothing.
@dataclass(frozen=True)
class Form:
    """Storage of the parts of a group on one side.

    A name for each part; or one name for all, one below the other; or several names for one part, of which all but one
    may be absent (a tied weight).
    """

    names: tuple[str, ...]
    transposed: bool = False  #: Matrices are stored as ``(in, out)``
    zero_centered: bool = False  #: Whether the stored values are the part minus one
    #: Number of attention groups whose rows are interleaved under one name: for each group the rows of every part
    groups: int = 1
    #: Layout in a checkpoint: stacked if te_fsdp shards the parts separately, grouped for experts
    layout: Layout = PLAIN

    def shapes(self, parts: Sequence[Shape]) -> dict[str, Shape]:
        """Return the shape under each name, for parts of the given shapes."""
        if len(self.names) < len(parts):
            parts = [(sum(part[0] for part in parts), *parts[0][1:])]
        stored = cycle(part[::-1] if self.transposed else part for part in parts)
        return dict(zip(self.names, stored, strict=False))

    def unpack(self, tensors: Mapping[str, torch.Tensor], parts: Sequence[Shape]) -> list[torch.Tensor]:
        """Return the parts, as views if possible; all names of one part must have the same value."""
        names = [name for name in self.names if name in tensors]
        stored = [tensors[name] for name in names[: len(parts)]]
        for name in names[len(parts) :]:
            copies = tensors[name], stored[0]
            bits = (tensor.contiguous().view(torch.uint8) for tensor in copies)  # NaN equals NaN
            if copies[0].dtype != copies[1].dtype or not torch.equal(*bits):
                raise CheckpointError(
                    f"{name}: differs from {names[0]}",
                    expected="the same values, since the Hugging Face model ties the two",
                    fix='untie them in config.json ("tie_word_embeddings": false), or tie them in the model',
                )
        if self.transposed:
            stored = [tensor.t() for tensor in stored]
        if len(stored) < len(parts):
            rows = [part[0] // self.groups for part in parts]
            split = stored[0].unflatten(0, (self.groups, -1)).split(rows, 1)
            stored = [piece.flatten(0, 1) for piece in split]
        return stored

    def pack(self, parts: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the tensors to store under the form's names; the inverse of :meth:`unpack`."""
        if len(self.names) < len(parts):
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
    #: Biases of the same module that the Hugging Face model lacks: zeros of these shapes
    zeros: Mapping[str, Shape] = field(default_factory=dict)

    def names(self, *, te: bool, tied: bool) -> tuple[str, ...]:
        """Return the names on one side; ``tied``: with the further names of a tied weight."""
        names = (self.te if te else self.huggingface).names
        return (*(names if tied else names[: len(self.parts)]), *(self.zeros if te else ()))

    def shapes(self, *, te: bool) -> dict[str, Shape]:
        """Return the shape under each name on one side."""
        return self.te.shapes(self.parts) | dict(self.zeros) if te else self.huggingface.shapes(self.parts)

    def convert(
        self, tensors: Mapping[str, torch.Tensor], *, to_te: bool, dtype: torch.dtype
    ) -> dict[str, torch.Tensor]:
        """Return the other side's tensors; values that it lacks must be zero."""
        source, target = (self.huggingface, self.te) if to_te else (self.te, self.huggingface)
        parts = source.unpack(tensors, self.parts)
        if source.zero_centered != target.zero_centered:
            # In float64, rounded once: exact for gammas of ordinary size in float32 and narrower.
            parts = [part.double() + (1.0 if source.zero_centered else -1.0) for part in parts]
        result = {name: rounded(name, dtype, tensor) for name, tensor in target.pack(parts).items()}
        if to_te:
            return result | {
                n: torch.zeros(shape, dtype=dtype, device="cpu") for n, shape in self.zeros.items()
            }
        self.check_zeros(tensors)
        return result

    def check_zeros(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Check that biases that the Hugging Face model lacks are zero; raise CheckpointError otherwise."""
        if any(bool(tensors[name].count_nonzero()) for name in self.zeros if name in tensors):
            raise CheckpointError(
                f"{', '.join(self.zeros)}: values that the Hugging Face model has no parameter for",
                expected="zeros",
                why="TransformerEngine's bias=True gives every projection a bias",
                fix='use a config.json with these biases ("attention_bias": true, "mlp_bias": true for Llama), or '
                "train with these biases frozen, as load_huggingface leaves them",
            )

    def rounds(self, tensors: Mapping[str, torch.Tensor], converted: Mapping[str, torch.Tensor]) -> bool:
        """Return whether zero-centering had to round, so that the inverse conversion would not be exact."""
        if self.huggingface.zero_centered == self.te.zero_centered:
            return False
        source, target = next(iter(tensors.values())), next(iter(converted.values()))
        # The rounding of values to a narrower dtype is not one of zero-centering.
        dtype = torch.promote_types(source.dtype, target.dtype)
        sums = (source.double() + shift for shift in (1.0, -1.0))
        exact = (value for value in sums if torch.equal(value.to(dtype).double(), value))
        return not any(torch.equal(value.to(target.dtype), target) for value in exact)


@dataclass(frozen=True)
class _Tables:
    """All groups of one model, in its order. Prefixes: ``hf`` of Hugging Face, ``te`` of TransformerEngine."""

    a: Architecture
    style: Names
    blocks: TeBlocks
    names: TeNames
    recorded: Recorded

    def model(self) -> Iterator[Group]:
        a, names, style = self.a, self.names, self.style
        wide, embedding = (a.vocabulary, a.hidden), f"{style.prefix}{style.embedding}.weight"
        # Either side may store a tied weight twice. One group of both names compares the two.
        if a.tied:
            te = (names.embedding,) if names.head is None else (names.embedding, names.head)
            yield Group((wide,), Form((embedding, "lm_head.weight")), Form(te))
        else:
            yield _renamed(wide, embedding, names.embedding)
        if a.positions:
            yield _renamed((a.positions, a.hidden), f"{style.prefix}wpe.weight", names.positions)
        for n in range(a.layers):
            yield from self.layer(style.prefix + style.layer.format(n), names.layer.format(layer=n))
        yield from self.norm(style.prefix + style.final_norm, names.final_norm)
        if not a.tied:
            assert names.head is not None
            yield _renamed(wide, "lm_head.weight", names.head)

    def layer(self, hf: str, te: str) -> Iterator[Group]:
        a, names, style, mlp = self.a, self.names, self.style, te + self.names.mlp
        yield from self.attention(hf, te + names.attention)
        if a.experts is not None:
            yield from self.norm(hf + style.mlp_norm, te + names.mlp_norm)
            yield from self.experts(hf + style.experts, te)
            return
        yield from self.norm(hf + style.mlp_norm, f"{mlp}layer_norm_")
        gated, biases = len(style.fc1) > 1, (a.mlp_bias, bool(self.blocks.mlp_bias))
        fc1 = Form((f"{mlp}fc1_*",), layout=Layout("stacked", (1, 1)) if gated else PLAIN)
        yield from self.linear(hf, style.fc1, fc1, [(a.ffn, a.hidden)] * len(style.fc1), biases)
        yield from self.linear(hf, (style.fc2,), Form((f"{mlp}fc2_*",)), [(a.hidden, a.ffn)], biases)

    def attention(self, hf: str, te: str) -> Iterator[Group]:
        a, style, qkv, bias = self.a, self.style, f"{te}layernorm_qkv.", bool(self.blocks.bias)
        semantics, heads = self.recorded.get(te.removesuffix(".")), (a.heads, a.kv_heads, a.kv_heads)
        interleaved = None if semantics is None else semantics.settings.get("qkv_weight_interleaved")
        if not self.blocks.fuse_qkv_params:
            form = Form(tuple(f"{qkv}{part}_*" for part in ("query", "key", "value")))
        elif (self.blocks.qkv_weight_interleaved if interleaved is None else interleaved) is not False:
            form = Form((f"{qkv}*",), groups=a.kv_heads)
        else:
            form = Form((f"{qkv}*",), layout=Layout("stacked", heads))
        yield from self.norm(hf + style.attention_norm, f"{qkv}layer_norm_")
        shapes = [(count * a.head_dim, a.hidden) for count in heads]
        yield from self.linear(hf, style.qkv, form, shapes, (a.qkv_bias, bias))
        proj, shape = Form((f"{te}proj.*",)), (a.hidden, a.heads * a.head_dim)
        yield from self.linear(hf, (style.proj,), proj, [shape], (a.proj_bias, bias))
        for part in "qk" if a.qk_norm else "":
            yield _renamed((a.head_dim,), f"{hf}self_attn.{part}_norm.weight", f"{te}{part}_norm.weight")

    def experts(self, block: str, te: str) -> Iterator[Group]:
        """Yield the groups of the router, of each expert separately, and of the shared expert."""
        a, e, names = self.a, self.a.experts, self.names
        assert e is not None
        yield _renamed((e.count, a.hidden), f"{block}gate.weight", te + names.router)

        def mlp(hf: str, fc1: str, fc2: str, ffn: int, layout: Layout) -> Iterator[Group]:
            up, down = (Form((te + name,), layout=layout) for name in (fc1, fc2))
            yield from self.linear(hf, self.style.expert_fc1, up, [(ffn, a.hidden)] * 2)
            yield from self.linear(hf, (self.style.expert_fc2,), down, [(a.hidden, ffn)])

        for n in range(e.count):
            fc1, fc2 = f"{names.experts_fc1}*{n}", f"{names.experts_fc2}*{n}"
            yield from mlp(f"{block}experts.{n}.", fc1, fc2, e.ffn, GROUPED)
        if e.shared_ffn:
            fc1, fc2 = f"{names.shared_fc1}*", f"{names.shared_fc2}*"
            yield from mlp(f"{block}shared_expert.", fc1, fc2, e.shared_ffn, PLAIN)
            yield _renamed((1, a.hidden), f"{block}shared_expert_gate.weight", te + names.shared_gate)

    def norm(self, hf: str, te: str) -> Iterator[Group]:
        """Yield the groups of weight and bias, if there is one. ``te`` is their prefix."""
        centered = centering(self.recorded, te.removesuffix("layer_norm_").removesuffix("."))
        if centered is None:
            last = te == self.names.final_norm
            centered = self.blocks.final_norm_zero_centered if last else self.blocks.zero_centered_gamma
        weight, shape = Form((f"{te}weight",), zero_centered=bool(centered)), (self.a.hidden,)
        yield Group((shape,), Form((f"{hf}.weight",), zero_centered=self.a.zero_centered), weight)
        if self.a.style == "gpt2":
            yield _renamed(shape, f"{hf}.bias", f"{te}bias")

    def linear(
        self,
        hf: str,
        parts: Sequence[str],
        te: Form,
        shapes: Sequence[Shape],
        biases: Sequence[bool] = (False, False),
    ) -> Iterator[Group]:
        """Yield the weight group and the bias group of projections that are one module of TE.

        ``*`` in names stands for weight or bias. ``biases``: whether Hugging Face's and TE's modules have biases.
        """

        def named(form: Form, kind: str) -> Form:
            return replace(form, names=tuple(name.replace("*", kind) for name in form.names))

        heights = tuple(shape[:1] for shape in shapes)
        huggingface = Form(tuple(f"{hf}{part}.*" for part in parts), transposed=self.a.style == "gpt2")
        zeros = named(te, "bias").shapes(heights) if biases[1] and not biases[0] else {}
        yield Group(tuple(shapes), named(huggingface, "weight"), named(te, "weight"), zeros)
        if all(biases):
            yield Group(heights, named(huggingface, "bias"), named(te, "bias"))


def _renamed(shape: Shape, hf: str, te: str) -> Group:
    """Return the group of a tensor that differs in TE by its name only."""
    return Group((shape,), Form((hf,)), Form((te,)))


@dataclass(frozen=True)
class WeightMap:
    """All groups of a model in its order, and the conversions, without tensors."""

    architecture: Architecture
    groups: tuple[Group, ...]
    names: TeNames  #: Of the TransformerEngine model
    #: Pattern of names in the TransformerEngine model's state dict that are not weights
    ignored_te: str = _IGNORED_TE
    #: Differences between the functions of the model's layers and Hugging Face's, as texts
    differences: tuple[str, ...] = ()
    _rounded: list[Group] = field(default_factory=list)  #: A group that a conversion has rounded, if any

    @classmethod
    def build(
        cls,
        config: Any,
        blocks: TeBlocks | None = None,
        names: TeNames | None = None,
        model: ModelDescription | None = None,
    ) -> WeightMap:
        """Return the map of a model from the arguments of :func:`read_config`, or an :class:`Architecture`.

        Properties of an existing model have priority over ``blocks``, which must contain all others. Without a model,
        the defaults of ``blocks`` are TransformerEngine's.
        """
        blocks, names = given_or_default(blocks, TeBlocks), given_or_default(names, TeNames)
        if model is not None:
            blocks = known_blocks(blocks, model, names)
        a = config if isinstance(config, Architecture) else read_config(config)
        model, style = model or ModelDescription((), {}, {}), FAMILIES[a.model_type].names
        bias = (a.qkv_bias or a.proj_bias or a.mlp_bias) if blocks.bias is None else blocks.bias
        mlp_bias = bias if blocks.mlp_bias is None else blocks.mlp_bias
        if ((a.qkv_bias or a.proj_bias) and not bias) or (a.mlp_bias and not mlp_bias):
            raise CheckpointError(
                f"bias=False of the layers, but the {a.model_type} model has biases",
                fix="build te.TransformerLayer with read_config(...).te_kwargs(), which sets bias",
            )
        if names.head is None and not a.tied:
            raise CheckpointError(
                f"names.head is None, but the {a.model_type} model has a separate head",
                expected="a name for lm_head.weight, since config.json does not tie it to the embedding",
                fix="give the model a head and pass TeNames(head=...)",
            )
        tables = _Tables(a, style, replace(blocks, bias=bias, mlp_bias=mlp_bias), names, model.recorded)
        groups = tuple(tables.model())
        counts = Counter(name for group in groups for name in group.names(te=True, tied=True))
        if equal := [name for name, count in counts.items() if count > 1]:
            raise CheckpointError(
                f"Hugging Face model: several of its tensors have one name in the model: {shorten(equal, 3)}",
                expected="a name for each part and layer in names=TeNames(...)",
                why="All but one would be lost",
                fix='put {layer} into TeNames(layer="layers.{layer}."); for a model whose head is its embedding, pass '
                "TeNames(head=None) and a config.json that ties them",
            )
        ignored = "|".join([_IGNORED_TE, *map(fnmatch.translate, names.ignored)])
        return cls(a, groups, names, ignored, tuple(layer_differences(model, a, names)))

    def is_linear(self, group: Group) -> bool:
        """Return whether a group is weights of linear layers, not of embeddings or routers."""
        names = self.names
        others, suffixes = (names.embedding, names.positions, names.head), (names.router, names.shared_gate)
        return len(group.parts[0]) == 2 and not any(
            name in others or name.endswith(suffixes) for name in group.te.names
        )

    def shapes(self, *, te: bool) -> dict[str, Shape]:
        """Return every tensor's shape, of the unsharded TransformerEngine model or of the Hugging Face model."""
        return {name: shape for group in self.groups for name, shape in group.shapes(te=te).items()}

    def layouts(self) -> dict[str, str]:
        """Return the layout of every tensor of the TransformerEngine model, as in a checkpoint's manifest."""
        return {n: str(group.te.layout) for group in self.groups for n in group.names(te=True, tied=True)}

    def convert(
        self, group: Group, tensors: Mapping[str, torch.Tensor], *, to_te: bool, dtype: torch.dtype
    ) -> dict[str, torch.Tensor]:
        """Return the other side's tensors of a group, as :meth:`Group.convert`; log the first inexact conversion."""
        converted = group.convert(tensors, to_te=to_te, dtype=dtype)
        if not self._rounded and group.rounds(tensors, converted):
            self._rounded.append(group)
            _log.warning(_ROUNDED, ", ".join(converted))
        return converted

    def lazily(self, source: Tensors, *, to_te: bool, dtype: torch.dtype | None = None) -> dict[str, Lazy]:
        """Return the other side's tensors, converted on demand. Local operation.

        Reading in order keeps one group in memory at a time, and reads each source tensor once. A tied head is not
        written to Hugging Face's files, which have it under the embedding's name only. ``dtype=None`` keeps each
        tensor's dtype; a group of several dtypes is promoted.

        Raises:
            CheckpointError: Missing, unexpected, wrongly shaped or non-plain tensors, all named in one error before any
                is read; a ``dtype`` that loses values. On reading: copies of a tied weight that differ, values that the
                Hugging Face model has no place for.
        """
        if dtype is not None and not (isinstance(dtype, torch.dtype) and _is_high(dtype)):
            raise CheckpointError(
                "Hugging Face model: dtype",
                expected="None, or a floating-point dtype of 16 bits or more",
                got=repr(dtype),
                why="Values in fewer bits need scales, which would not be stored",
            )
        expected, result, cache = self.shapes(te=not to_te), {}, []
        both = ([group.names(te=not to_te, tied=tied) for tied in (False, True)] for group in self.groups)
        required = [
            name for one, every in both for name in one if source.keys().isdisjoint({*every} - {*one})
        ]
        _check(source, expected, required, re.compile(_IGNORED_HUGGINGFACE if to_te else self.ignored_te))

        def rows(
            group: Group, tensors: dict[str, Lazy], kind: torch.dtype, name: str, first: int, last: int
        ) -> torch.Tensor:
            # Tensors are read in order, each in blocks of rows, so the group of the last call is enough.
            if not cache or cache[0] is not group:
                cache.clear()
                read = {key: tensor.full() for key, tensor in tensors.items()}
                cache[:] = group, self.convert(group, read, to_te=to_te, dtype=kind)
            return cache[1][name][first:last].clone()

        for group in self.groups:
            present = {name: source[name] for name in group.names(te=not to_te, tied=True) if name in source}
            tensors = {name: t if isinstance(t, Lazy) else InMemory(t) for name, t in present.items()}
            kinds = [tensor.dtype for name, tensor in tensors.items() if name not in group.zeros]
            kind, shapes = dtype or reduce(torch.promote_types, kinds), group.shapes(te=to_te)
            for name in group.names(te=to_te, tied=to_te):
                result[name] = Lazy(shapes[name], kind, partial(rows, group, tensors, kind, name))
        return result


def _check(
    source: Tensors, shapes: Mapping[str, Shape], required: list[str], ignored: re.Pattern[str]
) -> None:
    """Raise one CheckpointError for all differences between a source and the map, except values."""
    missing = [name for name in required if name not in source]
    unexpected = [name for name in source if name not in shapes and not ignored.fullmatch(name)]
    problems = [f"missing: {shorten(missing, 20)}"] if missing else []
    problems += [f"unexpected: {shorten(unexpected, 20)}"] if unexpected else []
    fix = "compare config.json, TeBlocks (the layers' options) and TeNames (the other parts' names) with the model"
    of_model = (
        "use te_fsdp.checkpoint.save_huggingface(path, model, config=...) for a sharded or quantized one"
    )
    for name in source.keys() & shapes.keys():
        tensor, shape = source[name], tuple(source[name].shape)
        if isinstance(tensor, torch.Tensor) and (tensor.is_meta or _te.is_quantized(tensor)):
            problems.append(
                f"{name} is a {'meta' if tensor.is_meta else 'quantized'} tensor, not a plain one"
            )
            fix = of_model
        elif isinstance(tensor, DTensor) or not _is_high(tensor.dtype):
            is_in_file = isinstance(tensor, Lazy)
            kind = "tensor" if is_in_file else type(tensor).__name__
            problems.append(f"{name} is a {kind} of {tensor.dtype}, not a plain one of high precision")
            fix = "dequantize the Hugging Face model, and save it in bf16" if is_in_file else of_model
        elif shape != shapes[name]:
            problems.append(f"{name} has shape {list(shape)}, not {list(shapes[name])}")
    if problems:
        raise CheckpointError(
            f"tensors that do not fit the map: {'. '.join(problems[:20])}",
            why="A tensor that the map omits would be lost",
            fix=fix,
        )


def _is_high(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point and dtype.itemsize > 1
