"""What a Hugging Face model's layers compute, as semantics of TransformerEngine's modules: read, compared, recorded.

Two naming schemes store the same tensors in different forms. A *group* is the smallest set of weights that must be
read together, such as query, key and value of one layer. Its *parts* are plain matrices and vectors, matrices as
``(out, in)``. Each side stores the parts in a *form*: under one name each, one below the other under one name,
interleaved by attention group, transposed, minus one. A conversion unpacks one side's form into the parts and packs
them into the other's. Except for zero-centered gammas all of this moves values and computes nothing.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import cycle
from typing import TYPE_CHECKING, Any

import torch

from te_fsdp.agree import rank
from te_fsdp.checkpoint.model_state import clean_name, owned_parameters
from te_fsdp.checkpoint.portable.huggingface_config import Architecture
from te_fsdp.errors import CheckpointError, shorten
from te_fsdp.layout import PLAIN, Layout
from te_fsdp.modules.semantics import Semantics, differences, semantics_of

if TYPE_CHECKING:
    from torch import nn

    from te_fsdp.checkpoint.portable.huggingface_map import WeightMap

Shape = tuple[int, ...]
_log = logging.getLogger("te_fsdp")


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


Recorded = Mapping[str, Semantics]

_PLAIN_LAYER = {
    "layer_type": "encoder",
    "output_layernorm": False,
    "parallel_attention_mlp": False,
    "apply_residual_connection_post_layernorm": False,
}


@dataclass(frozen=True)
class TeNames:
    """Names of a model's parts. Change what your model calls otherwise.

    Attributes:
        layer: Prefix of a layer, with ``{layer}`` for its number from 0.
        embedding: Token embedding, shape (vocabulary, hidden).
        positions: Learned position embedding, shape (positions, hidden); not used with rotary embeddings.
        final_norm: Prefix of the last norm, whose parameters are ``weight`` and, for LayerNorm, ``bias``.
        head: Output projection, shape (vocabulary, hidden), without bias. ``None``: the model has none of its own
            and uses the embedding.
        ignored: Patterns (``fnmatch``) of further names in the model's state dict that are no weights.
        attention: Prefix of ``te.MultiheadAttention`` in a layer, with its norm (``input_layernorm=True``).
        mlp: Prefix of ``te.LayerNormMLP`` in a layer.
        attention_out_norm: Prefix of the norm after attention (Gemma 2 and 3).
        mlp_out_norm: Prefix of the norm after the MLP (Gemma 2 and 3).
        mlp_norm: Prefix of the norm before a layer's experts.
        router: The router's weight, shape (experts, hidden).
        experts_fc1: Prefix of ``te.GroupedLinear``, gate above up.
        experts_fc2: Prefix of ``te.GroupedLinear``, the way back.
        shared_fc1: Prefix of the shared expert's linear layer, gate above up.
        shared_fc2: Prefix of its way back.
        shared_gate: Weight of its gate, shape (1, hidden).
    """

    layer: str = "layers.{layer}."
    embedding: str = "embedding.weight"
    positions: str = "positions.weight"
    final_norm: str = "norm."
    head: str | None = "head.weight"
    ignored: tuple[str, ...] = ()
    attention: str = "self_attention."
    mlp: str = "layernorm_mlp."
    attention_out_norm: str = "attention_out_norm."
    mlp_out_norm: str = "mlp_out_norm."
    mlp_norm: str = "mlp_norm."
    router: str = "router.weight"
    experts_fc1: str = "experts.fc1."
    experts_fc2: str = "experts.fc2."
    shared_fc1: str = "shared_expert.fc1."
    shared_fc2: str = "shared_expert.fc2."
    shared_gate: str = "shared_expert_gate.weight"


@dataclass(frozen=True)
class TeBlocks:
    """Options of the model's layers that decide how parameters are named and laid out.

    For weights on their way in, ``None`` is TransformerEngine's default. On their way out nothing is assumed: what is
    ``None`` is read off the model, or off the checkpoint, and is an error where these do not tell.

    Attributes:
        fuse_qkv_params: As given to the layer.
        qkv_weight_interleaved: As given to the layer; without ``fuse_qkv_params`` it has no effect.
        zero_centered_gamma: As given to the layers' norms; not used for q/k norms, which TransformerEngine never
            centers.
        bias: As given to the layer, or to its attention; default: where the Hugging Face model has any bias.
        mlp_bias: As given to ``te.LayerNormMLP``, where that is another; default: as ``bias``.
        final_norm_zero_centered: ``zero_centered_gamma`` of the model's last norm.
    """

    fuse_qkv_params: bool | None = None
    qkv_weight_interleaved: bool | None = None
    zero_centered_gamma: bool | None = None
    bias: bool | None = None
    mlp_bias: bool | None = None
    final_norm_zero_centered: bool | None = None

    @classmethod
    def of(cls, model: nn.Module, names: TeNames | None = None) -> TeBlocks:
        """Read the options off a model. Local operation; the model may be sharded or on meta.

        Args:
            model: The model.
            names: Names of its parts; default: those of :class:`TeNames`.

        Raises:
            CheckpointError: Options that the model does not tell, since its parts are of other kinds or names.
        """
        return known_blocks(cls(), parameter_names(model), semantics_of(model), names or TeNames())


def parameter_names(model: nn.Module) -> set[str]:
    """Names of a model's parameters, without what wrappers add."""
    return {clean_name("", name) for name, _ in model.named_parameters(remove_duplicate=False)}


def known_blocks(told: TeBlocks, parameters: Collection[str], recorded: Recorded, names: TeNames) -> TeBlocks:
    """Options of a model's layers: what its parameters' names and its semantics say, else what was told.

    Args:
        told: By the caller.
        parameters: Names of the model's parameters.
        recorded: Semantics of its modules, as far as known.
        names: Names of its parts.

    Raises:
        CheckpointError: Options that nothing tells, all named.
    """
    layer = names.layer.format(layer=0)
    qkv, mlps = f"{layer}{names.attention}layernorm_qkv", [n for n in parameters if n.endswith(".fc2_weight")]
    seen: dict[str, bool | None] = {
        "fuse_qkv_params": f"{qkv}.weight" in parameters,
        "bias": f"{qkv}.bias" in parameters or f"{qkv}.query_bias" in parameters,
        "mlp_bias": any(f"{n.removesuffix('weight')}bias" in parameters for n in mlps),
        "zero_centered_gamma": centering(recorded, qkv),
        "final_norm_zero_centered": centering(recorded, names.final_norm.removesuffix(".")),
    }
    attention = recorded.get((layer + names.attention).removesuffix("."))
    if not seen["fuse_qkv_params"]:
        seen["qkv_weight_interleaved"] = True  # has no effect
    elif attention is not None:
        seen["qkv_weight_interleaved"] = attention["qkv_weight_interleaved"]
    blocks = replace(told, **{name: value for name, value in seen.items() if value is not None})
    unknown = [field.name for field in fields(blocks) if getattr(blocks, field.name) is None]
    if unknown:
        raise CheckpointError(
            f"options of the layers that nothing tells: {', '.join(unknown)}",
            why="Other options are other weights under the same names and shapes. A state dict does not have them, "
            "nor has a checkpoint that was saved without its modules' semantics, or with other names of modules",
            fix="blocks=TeBlocks.of(model), or TeBlocks(...) with each of them; on the command line "
            + " ".join(f"--te.layers.{name.replace('_', '-')} True|False" for name in unknown),
        )
    return blocks


def centering(recorded: Recorded, module: str) -> bool | None:
    """Whether the norm in a module is zero-centered; ``None`` where that is not known."""
    return recorded[module]["zero_centered_gamma"] if module in recorded else None


def layer_differences(
    recorded: Recorded, architecture: Architecture, names: TeNames, blocks: TeBlocks
) -> list[str]:
    """Settings of modules with which the same weights would compute something else, in words. Local operation.

    A setting that several layers share is named once, with the first layer. Not compared: dropout, centering of norms
    (which is converted), modules of a user's own classes, and scaled frequencies, for which a warning asks.
    """
    wanted, theta = semantics_of_config(architecture, names, blocks, recorded), architecture.rope_theta
    rotaries = {name: one for name, one in recorded.items() if one.kind == "RotaryPositionEmbedding"}
    if architecture.rope_scaling is None:
        for name, one in rotaries.items():
            base = architecture.window_rope_theta
            rotary = {"rotary_base": base if one["rotary_base"] == base else theta, "interleaved": False}
            wanted[name] = Semantics(one.kind, "te", rotary)
    plain = [name for name, one in rotaries.items() if one["seq_len_interpolation_factor"] is None]
    if architecture.rope_scaling is not None and plain and not rank():
        text = "config.json scales rotary frequencies (%s), %s does not: does the model itself?"
        _log.warning(text, dict(architecture.rope_scaling), shorten(plain, 3))
    found: dict[tuple[str, str, str], str] = {}
    for one in differences(wanted, recorded):
        module, _, setting = one.name.rpartition(".")
        if one.effect == "error" and setting != "zero_centered_gamma":
            text = f"{module}: {setting} is {one.now}, not {one.then}"
            found.setdefault((setting, str(one.now), str(one.then)), text)
    return list(found.values())


def semantics_of_config(
    a: Architecture, names: TeNames, blocks: TeBlocks, recorded: Recorded | None = None
) -> dict[str, Semantics]:
    """Semantics of the TransformerEngine model that computes what a Hugging Face model does.

    Args:
        a: The model.
        names: Names of the TransformerEngine model's parts.
        blocks: Options of its layers.
        recorded: Semantics of a model to compare with; ``None``: where one is possible a layer is a
            ``te.TransformerLayer``.
    """
    centered = {"zero_centered_gamma": bool(blocks.zero_centered_gamma)}
    last = {"zero_centered_gamma": bool(blocks.final_norm_zero_centered)}
    norm, kind = {"eps": a.norm_eps}, "RMSNorm" if a.style == "llama" else "LayerNorm"
    fused = {**norm, "normalization": kind, **centered}
    attention: dict[str, Any] = {
        "attention_type": "self",
        "softmax_type": "vanilla",
        "num_attention_heads": a.heads,
        "num_gqa_groups": a.kv_heads,
        "kv_channels": a.head_dim,
        "qk_norm_type": "RMSNorm" if a.qk_norm else None,
        "qk_norm_eps": a.norm_eps if a.qk_norm else None,
    }
    if blocks.fuse_qkv_params:
        attention["qkv_weight_interleaved"] = blocks.qkv_weight_interleaved is not False
    if a.style == "llama":
        attention["rotary_pos_interleaved"] = False
    if a.qk_norm:
        attention["qk_norm_before_rope"] = True
    found: dict[str, Semantics] = {}

    def add(name: str, kind: str, settings: dict[str, Any]) -> None:
        found[name.removesuffix(".")] = Semantics(kind, "te", settings)

    for n in range(a.layers):
        layer, sparse = names.layer.format(layer=n), a.experts is not None and n in a.experts.layers
        window = a.windows[n] if a.windows else None
        mask: dict[str, Any] = {"window_size": [-1 if window is None else window - 1, 0]}
        whole = not (sparse or a.branch_norms)
        if recorded is not None:
            here = recorded.get(layer.removesuffix("."))
            whole = here is not None and here.kind == "TransformerLayer"
        if whole:  # which tells its attention mask and window in each call
            add(layer, "TransformerLayer", {**_PLAIN_LAYER, **mask, "self_attn_mask_type": "causal"})
            mask = {}
        else:
            mask["attn_mask_type"] = "causal"
        add(layer + names.attention, "MultiheadAttention", attention | mask)
        add(f"{layer}{names.attention}layernorm_qkv", "LayerNormLinear", fused)
        if not sparse:
            mlp = {"activation": a.activation, "activation_params": None}
            add(layer + names.mlp, "LayerNormMLP", fused | mlp)
        others = [names.mlp_norm] if sparse else []
        for name in others + ([names.attention_out_norm, names.mlp_out_norm] if a.branch_norms else []):
            add(layer + name, kind, {**norm, **centered})
    add(names.final_norm, kind, {**norm, **last})
    return found


def check_fits(call: str, model: nn.Module, weights: WeightMap, found: dict[str, list[str]]) -> None:
    """Raise what does not fit, if anything. Local operation.

    To what was found, parameters are added whose rows are two blocks, but not where tensor parallelism has cut them:
    each rank then takes other rows for gate and up than the unsharded model does.

    Args:
        call: The user's call.
        model: The model.
        weights: Its map.
        found: Kind of difference -> names.

    Raises:
        CheckpointError: Naming everything.
    """
    forms = [g.te for g in weights.groups if len(g.te.names) < len(g.parts) and not g.te.layout.is_stacked]
    gated = {name for form in forms if form.groups == 1 for name in form.names}
    found["gate above up, cut by tensor parallelism as one block (use expert parallelism)"] = [
        owned.fqn
        for owned in owned_parameters(model)
        if (owned.fqn in gated or f"{owned.fqn}0" in gated)
        and owned.info.rule.shard_dim == int(owned.is_grouped)
        and owned.info.at.tp_size > 1
    ]
    problems = [f"{what}: {shorten(names, 20)}" for what, names in found.items() if names]
    if problems:
        raise CheckpointError(
            f"{call}: {type(model).__name__} does not fit: {'; '.join(problems)}",
            why="Nothing was changed",
            fix="name the model's parts by TeNames, build the layers with read_config(...).te_kwargs()",
        )
