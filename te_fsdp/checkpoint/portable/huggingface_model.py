"""The TransformerEngine model that corresponds to a Hugging Face model."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple, TypeVar

import torch
from torch import nn

from te_fsdp.checkpoint.portable.huggingface_config import Architecture
from te_fsdp.errors import CheckpointError, require_kind, shorten
from te_fsdp.modules.rotary import frequencies_of, scales_attention, wanted_rotary
from te_fsdp.modules.semantics import SETTINGS, Semantics, differences, format_differences, semantics_of
from te_fsdp.upstream import torch_dtensor as _torch

Recorded = Mapping[str, Semantics]
_Options = TypeVar("_Options", "TeNames", "TeBlocks")


@dataclass(frozen=True)
class TeNames:
    """Names of a model's parts. Change the names that differ in your model."""

    layer: str = "layers.{layer}."  #: Prefix of a layer, with ``{layer}`` for its number from 0
    embedding: str = "embedding.weight"  #: Token embedding, shape (vocabulary, hidden)
    positions: str = "positions.weight"  #: Learned position embedding, shape (positions, hidden), if any
    final_norm: str = "norm."  #: Prefix of the last norm: ``weight`` and, for LayerNorm, ``bias``
    #: Output projection, shape (vocabulary, hidden), without bias; ``None``: the model uses the embedding
    head: str | None = "head.weight"
    ignored: tuple[str, ...] = ()  #: Patterns (``fnmatch``) of names in the state dict that are not weights
    attention: str = "self_attention."  #: Prefix of ``te.MultiheadAttention(input_layernorm=True)``
    mlp: str = "layernorm_mlp."  #: Prefix of ``te.LayerNormMLP`` in a layer
    mlp_norm: str = "mlp_norm."  #: Prefix of the norm before a layer's experts
    router: str = "router.weight"  #: The router's weight, shape (experts, hidden)
    experts_fc1: str = "experts.fc1."  #: Prefix of ``te.GroupedLinear``, gate above up
    experts_fc2: str = "experts.fc2."  #: Prefix of ``te.GroupedLinear``, the way back
    shared_fc1: str = "shared_expert.fc1."  #: Prefix of the shared expert's linear layer, gate above up
    shared_fc2: str = "shared_expert.fc2."  #: Prefix of its way back
    shared_gate: str = "shared_expert_gate.weight"  #: Weight of its gate, shape (1, hidden)

    def __post_init__(self) -> None:
        try:
            self.layer.format(layer=0)
        except (AttributeError, LookupError, ValueError) as error:
            expected = 'a prefix with {layer} for its number, such as "layers.{layer}."'
            raise CheckpointError("TeNames(layer=...)", expected=expected, got=self.layer) from error


@dataclass(frozen=True)
class TeBlocks:
    """Options of the model's layers that determine names and layouts of parameters.

    For an import, ``None`` is TransformerEngine's default. An export assumes nothing: ``None`` is read from the model
    or the checkpoint, and is an error if these do not record it.
    """

    fuse_qkv_params: bool | None = None  #: As given to the layer
    qkv_weight_interleaved: bool | None = None  #: As given; no effect without ``fuse_qkv_params``
    zero_centered_gamma: bool | None = None  #: As given to the layers' norms; q/k norms are never centered
    bias: bool | None = None  #: As given to layer or attention; default: where the Hugging Face model has any
    mlp_bias: bool | None = None  #: As given to ``te.LayerNormMLP``; default: as ``bias``
    final_norm_zero_centered: bool | None = None  #: ``zero_centered_gamma`` of the model's last norm

    @classmethod
    def of(cls, model: nn.Module, names: TeNames | None = None) -> TeBlocks:
        """Read the options of a model, sharded or on meta; raise CheckpointError for unknown ones. Local operation."""
        return known_blocks(cls(), describe_model(model), given_or_default(names, TeNames))


def given_or_default(value: Any, kind: type[_Options]) -> _Options:
    """Return an argument, or the defaults of its class for ``None``; CheckpointError for a different class."""
    value, name = kind() if value is None else value, "names" if kind is TeNames else "blocks"
    expected = f"te_fsdp.checkpoint.portable.huggingface.{kind.__name__}(...)"
    require_kind("Hugging Face model", name, value, kind, expected=expected, error=CheckpointError)
    return value


class ModelDescription(NamedTuple):
    """Properties of a model or checkpoint: names of its parameters, and its modules' semantics if known."""

    parameters: Collection[str]
    recorded: Recorded
    frequencies: Mapping[str, torch.Tensor]  #: By name of a rotary embedding, if known


def describe_model(model: nn.Module) -> ModelDescription:
    """Return the properties of a model, with names without the prefixes of wrappers. Local operation."""
    names = {_torch.without_wrappers(name) for name, _ in model.named_parameters(remove_duplicate=False)}
    buffers = {_torch.without_wrappers(name): b for name, b in model.named_buffers() if not b.is_meta}
    return ModelDescription(names, semantics_of(model), frequencies_of(buffers, buffers.__getitem__))


def known_blocks(blocks: TeBlocks, model: ModelDescription, names: TeNames) -> TeBlocks:
    """Return the options of a model's layers, none of them unset: from the model, else from ``blocks``."""
    parameters, recorded, _ = model
    _check_names(parameters, names)
    attention = names.layer.format(layer=0) + names.attention
    qkv, semantics = f"{attention}layernorm_qkv", recorded.get(attention.removesuffix("."))
    options: dict[str, bool | None] = {
        "fuse_qkv_params": f"{qkv}.weight" in parameters,
        "bias": f"{qkv}.bias" in parameters or f"{qkv}.query_bias" in parameters,
        "mlp_bias": any(name.endswith(".fc2_bias") for name in parameters),
        "zero_centered_gamma": centering(recorded, qkv),
        "final_norm_zero_centered": centering(recorded, names.final_norm.removesuffix(".")),
    }
    if semantics is not None or not options["fuse_qkv_params"]:  # without which it has no effect
        name = "qkv_weight_interleaved"
        options[name] = semantics is None or semantics.settings.get(name)
    blocks = replace(blocks, **{name: value for name, value in options.items() if value is not None})
    unknown = [field.name for field in fields(blocks) if getattr(blocks, field.name) is None]
    if unknown:
        raise CheckpointError(
            f"unknown options of the layers: {', '.join(unknown)}",
            why="Different options mean different weights under the same names and shapes. A state dict does not "
            "record them, nor does a checkpoint without its modules' semantics, or with other names of modules",
            fix="use te_fsdp.checkpoint.save_huggingface(path, model, config=...), which reads them from the model; or "
            "pass blocks=TeBlocks.of(model), or TeBlocks(...) with each of them; on the command line "
            + " ".join(f"--te.layers.{name.replace('_', '-')} True|False" for name in unknown),
        )
    return blocks


def _check_names(parameters: Collection[str], names: TeNames) -> None:
    """Raise CheckpointError if the model has no layers, or no last norm, under the names that ``names`` gives them."""
    first = names.layer.format(layer=0)
    for prefix, part in (first, "layer"), (names.final_norm, "final_norm"):
        if not parameters or any(name.startswith(prefix) for name in parameters):
            continue
        inside = next((n for n in sorted(parameters) if f".{names.attention}" in n), "")
        inner = re.sub(r"\d+", "{layer}", inside[: inside.find(f".{names.attention}") + 1], count=1)
        shown = [f'layer="{inner}"' if inner else 'layer="...{layer}."', 'final_norm="..."'][part != "layer"]
        layer = "" if part == "layer" else re.escape(names.layer).replace(r"\{layer\}", r"\d+")
        others = [name for name in sorted(parameters) if not layer or not re.match(layer, name)]
        raise CheckpointError(
            f"Hugging Face model: no parameter of the model begins with {prefix}",
            expected="the model's own names in names=TeNames(...)",
            got=f"parameters such as {shorten(others, 3)}",
            why="A model's parts are identified by their names",
            fix=f"pass names=TeNames({shown}) with every part that the model names differently (embedding, "
            f"final_norm, head, ...); on the command line --te.names.{part.replace('_', '-')} and so on",
        )


def centering(recorded: Recorded, module: str) -> bool | None:
    """Return whether the norm in a module is zero-centered; ``None`` if that is unknown."""
    return recorded[module]["zero_centered_gamma"] if module in recorded else None


def layer_differences(model: ModelDescription, a: Architecture, names: TeNames) -> list[str]:
    """Return settings of modules that make the same weights compute a different function, as texts. Local operation.

    Settings without an expected value must be as in a module without them. Not compared: dropout, centering of norms
    (which is converted), modules of custom classes.
    """
    expected, recorded = dict[str, Semantics](), model.recorded

    def want(name: str, kind: str, **settings: Any) -> None:
        expected[name.removesuffix(".")] = Semantics(kind, "te", settings)

    kind = "RMSNorm" if a.style == "llama" else "LayerNorm"
    kwargs, norm = a.te_attention_kwargs(), {"eps": a.norm_eps, "normalization": kind}
    window, causal = [*kwargs.pop("window_size", (-1, 0))], kwargs.pop("attn_mask_type")
    attention = {"attention_type": "self"} | {key: value for key, value in kwargs.items() if key in SETTINGS}
    for layer in (names.layer.format(layer=n) for n in range(a.layers)):
        mask: dict[str, Any] = {"window_size": window, "attn_mask_type": causal}
        semantics = recorded.get(layer.removesuffix("."))
        if semantics is not None and semantics.kind == "TransformerLayer":  # passes both to its attention
            want(layer, semantics.kind, window_size=window, self_attn_mask_type=causal)
            mask = {}
        want(layer + names.attention, "MultiheadAttention", **attention, **mask)
        want(f"{layer}{names.attention}layernorm_qkv", "LayerNormLinear", **norm)
        want(layer + names.mlp, "LayerNormMLP", **norm, activation=a.activation)
        want(layer + names.mlp_norm, kind, eps=a.norm_eps)
    want(names.final_norm, kind, eps=a.norm_eps)
    for name, module in recorded.items():
        if module.kind == "RotaryPositionEmbedding":
            frequencies = model.frequencies.get(name)
            rotary = wanted_rotary(module, frequencies, a.rope_theta, a.head_dim, a.rope_scaling)
            want(name, module.kind, **rotary)
    errors = (difference for difference in differences(expected, recorded) if difference.effect == "error")
    texts = format_differences(
        (error for error in errors if not error.name.endswith(".zero_centered_gamma")), "{1}, not {0}"
    )
    if scales_attention(a.rope_scaling) and "MultiheadAttention" in {m.kind for m in recorded.values()}:
        texts.append(f"attention: scaled by its heads alone, not as {dict(a.rope_scaling or {})} has it")
    return texts
