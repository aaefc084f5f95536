"""The tables: which Hugging Face tensors are which parameters of a model of ``te.TransformerLayer``.

Left, Hugging Face's names as of transformers 4.57 and 5.23 (``models/*/modeling_*.py``, ``GPT2Model``'s
``Conv1D`` keeps matrices as ``(in, out)``). Right, TransformerEngine's, the same in 2.18 to 2.20
(``pytorch/module/layernorm_linear.py``, ``layernorm_mlp.py``, ``pytorch/attention/multi_head_attention.py``), in
the layout of the unsharded module.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from te_fsdp import _te
from te_fsdp.checkpoint.portable.huggingface_groups import Form, Group
from te_fsdp.errors import CheckpointError, message

if TYPE_CHECKING:
    from torch import nn

    from te_fsdp.checkpoint.portable.huggingface_config import Architecture

__all__ = ["TeBlocks", "TeNames", "groups_of"]


@dataclass(frozen=True)
class TeNames:
    """Names of a model's parts around its layers. Change what your model calls otherwise.

    Attributes:
        layer: Prefix of a layer, with ``{layer}`` for its number from 0.
        embedding: Token embedding, shape (vocabulary, hidden).
        positions: Learned position embedding, shape (positions, hidden); not used with rotary embeddings.
        final_norm: Prefix of the last norm, whose parameters are ``weight`` and, for LayerNorm, ``bias``.
        head: Output projection, shape (vocabulary, hidden), without bias. ``None``: the model has none of its own
            and uses the embedding.
        ignored: Patterns (``fnmatch``) of further names in the model's state dict that are no weights.
    """

    layer: str = "layers.{layer}."
    embedding: str = "embedding.weight"
    positions: str = "positions.weight"
    final_norm: str = "norm."
    head: str | None = "head.weight"
    ignored: tuple[str, ...] = ()


@dataclass(frozen=True)
class TeBlocks:
    """Options of the model's ``te.TransformerLayer`` that decide how parameters are named and laid out.

    Attributes:
        fuse_qkv_params: As given to the layer.
        qkv_weight_interleaved: As given to the layer; without ``fuse_qkv_params`` it has no effect.
        zero_centered_gamma: As given to the layer. Holds for the layers' norms, not for q/k norms.
        bias: As given to the layer; ``None``: where the Hugging Face model has any bias.
        final_norm_zero_centered: ``zero_centered_gamma`` of the model's last norm.
    """

    fuse_qkv_params: bool = False
    qkv_weight_interleaved: bool = True
    zero_centered_gamma: bool = False
    bias: bool | None = None
    final_norm_zero_centered: bool = False

    @classmethod
    def of(cls, model: nn.Module, *, final_norm_zero_centered: bool = False) -> TeBlocks:
        """Read the options off a model's layers. Local operation; the model may be sharded or on meta.

        Raises:
            CheckpointError: No ``te.TransformerLayer``, layers that differ, or layers of another structure (with
                cross attention, norms after the branches, or attention and MLP in parallel).
        """
        found = {name: cls._of_layer(name, m) for name, m in model.named_modules() if _is_layer(m)}
        kinds = {
            (b.fuse_qkv_params, b.qkv_weight_interleaved, b.zero_centered_gamma, b.bias)
            for b in found.values()
        }
        if len(kinds) != 1:
            raise CheckpointError(
                message(
                    f"{type(model).__name__}: layers",
                    expected="te.TransformerLayer with the same options everywhere",
                    got=f"{len(kinds)} kinds of them" if kinds else "none",
                )
            )
        return cls(*kinds.pop(), final_norm_zero_centered)

    @classmethod
    def _of_layer(cls, name: str, layer: Any) -> TeBlocks:
        unusual = {
            "layer_type": layer.layer_type != "encoder",
            "output_layernorm": layer.output_layernorm,
            "parallel_attention_mlp": layer.parallel_attention_mlp,
            "apply_residual_connection_post_layernorm": layer.apply_residual_connection_post_layernorm,
        }
        if any(unusual.values()):
            raise CheckpointError(
                message(
                    f"{name}: {', '.join(option for option, set_ in unusual.items() if set_)} set",
                    expected="a layer with self attention and MLP in turn, each after its norm",
                    why="No Hugging Face model of Llama's or GPT-2's style computes this",
                )
            )
        projection = layer.self_attention.layernorm_qkv
        names = [parameter for parameter, _ in projection.named_parameters()]
        return cls(
            fuse_qkv_params="weight" in names,
            qkv_weight_interleaved=layer.self_attention.qkv_weight_interleaved,
            zero_centered_gamma=projection.zero_centered_gamma,
            bias="bias" in names or "query_bias" in names,
        )


def _is_layer(module: nn.Module) -> bool:
    return _te.kind_of(module) == "TransformerLayer"


def groups_of(architecture: Architecture, blocks: TeBlocks, names: TeNames) -> tuple[Group, ...]:
    """All groups of a model, in the order of the model.

    Args:
        architecture: The model.
        blocks: Options of its TransformerEngine layers.
        names: TransformerEngine side's other names.

    Raises:
        CheckpointError: Biases in the Hugging Face model, none in the layers; an untied head that has no name.
    """
    a, gpt2 = architecture, architecture.style == "gpt2"
    prefix = "transformer." if gpt2 else "model."
    biased = a.qkv_bias or a.proj_bias or a.mlp_bias
    if biased and blocks.bias is False:
        raise CheckpointError(
            message(
                f"bias=False of the layers, but the {a.model_type} model has biases",
                fix="build te.TransformerLayer with read_config(...).te_kwargs(), which sets bias",
            )
        )
    if names.head is None and not a.tied:
        raise CheckpointError(
            message(
                f"names.head is None, but the {a.model_type} model has a head of its own",
                expected="a name for lm_head.weight, since config.json does not tie it to the embedding",
                fix="give the model a head and pass TeNames(head=...)",
            )
        )
    norm = _Norm(a.hidden, gpt2, blocks.final_norm_zero_centered)
    wide = (a.vocabulary, a.hidden)
    groups = [_embedding(a, names, prefix + ("wte" if gpt2 else "embed_tokens") + ".weight", wide)]
    if gpt2:
        groups.append(_one((a.positions, a.hidden), f"{prefix}wpe.weight", names.positions))
    layer_groups = _gpt2_layer if gpt2 else _llama_layer
    bias = biased if blocks.bias is None else blocks.bias
    for layer in range(a.layers):
        their = f"{prefix}{'h' if gpt2 else 'layers'}.{layer}."
        groups += layer_groups(a, blocks, bias, their, names.layer.format(layer=layer))
    groups += norm.groups(prefix + ("ln_f" if gpt2 else "norm") + ".", names.final_norm)
    if not a.tied:
        assert names.head is not None
        groups.append(_one(wide, "lm_head.weight", names.head))
    return tuple(groups)


def _one(shape: tuple[int, ...], theirs: str, ours: str, *, transposed: bool = False) -> Group:
    """A tensor that has one name on either side."""
    return Group((shape,), Form((theirs,), transposed=transposed), Form((ours,)))


def _embedding(a: Architecture, names: TeNames, theirs: str, shape: tuple[int, int]) -> Group:
    """The embedding, which a tied head shares: then either side may store it twice."""
    if not a.tied:
        return _one(shape, theirs, names.embedding)
    ours = (names.embedding,) if names.head is None else (names.embedding, names.head)
    return Group((shape,), Form((theirs, "lm_head.weight"), "copies"), Form(ours, "copies"))


@dataclass(frozen=True)
class _Norm:
    """Norms of one kind."""

    width: int
    with_bias: bool
    zero_centered: bool

    def groups(self, theirs: str, ours: str) -> Iterator[Group]:
        """Weight, and bias if there is one; both arguments are the prefixes of ``weight`` and ``bias``."""
        weight = Form((f"{ours}weight",), zero_centered=self.zero_centered)
        yield Group(((self.width,),), Form((f"{theirs}weight",)), weight)
        if self.with_bias:
            yield _one((self.width,), f"{theirs}bias", f"{ours}bias")


def _qkv(a: Architecture, blocks: TeBlocks, theirs: Form, ours: str, kind: str, *inner: int) -> Group:
    """Query, key and value, weights or biases (``kind``), onto ``layernorm_qkv``."""
    wide, narrow = a.heads * a.head_dim, a.kv_heads * a.head_dim
    if not blocks.fuse_qkv_params:
        form = Form(tuple(f"{ours}{part}_{kind}" for part in ("query", "key", "value")))
    elif blocks.qkv_weight_interleaved:
        form = Form((f"{ours}{kind}",), "interleaved", groups=a.kv_heads)
    else:
        form = Form((f"{ours}{kind}",), "joined", blocks=(a.heads, a.kv_heads, a.kv_heads))
    return Group(((wide, *inner), (narrow, *inner), (narrow, *inner)), theirs, form)


def _bias(shape: tuple[int, ...], exists: bool, theirs: str, ours: str) -> Group:
    """A bias of TransformerEngine's, zero if the Hugging Face model has none."""
    return Group((shape,), Form((theirs,)) if exists else Form((), "absent"), Form((ours,)))


def _llama_layer(a: Architecture, blocks: TeBlocks, bias: bool, theirs: str, ours: str) -> list[Group]:
    attention, mlp = f"{ours}self_attention.", f"{ours}layernorm_mlp."
    qkv = f"{attention}layernorm_qkv."
    norm = _Norm(a.hidden, False, blocks.zero_centered_gamma)
    gate_up = ((a.ffn, a.hidden), (a.ffn, a.hidden))

    def three(kind: str) -> Form:
        return Form(tuple(f"{theirs}self_attn.{part}_proj.{kind}" for part in "qkv"))

    def two(kind: str) -> Form:
        return Form((f"{theirs}mlp.gate_proj.{kind}", f"{theirs}mlp.up_proj.{kind}"))

    groups = [
        *norm.groups(f"{theirs}input_layernorm.", f"{qkv}layer_norm_"),
        _qkv(a, blocks, three("weight"), qkv, "weight", a.hidden),
        _one((a.hidden, a.heads * a.head_dim), f"{theirs}self_attn.o_proj.weight", f"{attention}proj.weight"),
        *norm.groups(f"{theirs}post_attention_layernorm.", f"{mlp}layer_norm_"),
        Group(gate_up, two("weight"), Form((f"{mlp}fc1_weight",), "joined", blocks=(1, 1))),
        _one((a.hidden, a.ffn), f"{theirs}mlp.down_proj.weight", f"{mlp}fc2_weight"),
    ]
    if a.qk_norm:
        groups += [
            _one((a.head_dim,), f"{theirs}self_attn.{part}_norm.weight", f"{attention}{part}_norm.weight")
            for part in "qk"
        ]
    if bias:
        nothing, halves = Form((), "absent"), ((a.ffn,), (a.ffn,))
        groups += [
            _qkv(a, blocks, three("bias") if a.qkv_bias else nothing, qkv, "bias"),
            _bias((a.hidden,), a.proj_bias, f"{theirs}self_attn.o_proj.bias", f"{attention}proj.bias"),
            Group(
                halves,
                two("bias") if a.mlp_bias else nothing,
                Form((f"{mlp}fc1_bias",), "joined", blocks=(1, 1)),
            ),
            _bias((a.hidden,), a.mlp_bias, f"{theirs}mlp.down_proj.bias", f"{mlp}fc2_bias"),
        ]
    return groups


def _gpt2_layer(a: Architecture, blocks: TeBlocks, bias: bool, theirs: str, ours: str) -> list[Group]:
    assert bias
    attention, mlp = f"{ours}self_attention.", f"{ours}layernorm_mlp."
    qkv = f"{attention}layernorm_qkv."
    norm = _Norm(a.hidden, True, blocks.zero_centered_gamma)
    joined = Form((f"{theirs}attn.c_attn.weight",), "joined", transposed=True)
    square, up, down = (a.hidden, a.hidden), (a.ffn, a.hidden), (a.hidden, a.ffn)
    return [
        *norm.groups(f"{theirs}ln_1.", f"{qkv}layer_norm_"),
        _qkv(a, blocks, joined, qkv, "weight", a.hidden),
        _qkv(a, blocks, Form((f"{theirs}attn.c_attn.bias",), "joined"), qkv, "bias"),
        _one(square, f"{theirs}attn.c_proj.weight", f"{attention}proj.weight", transposed=True),
        _one((a.hidden,), f"{theirs}attn.c_proj.bias", f"{attention}proj.bias"),
        *norm.groups(f"{theirs}ln_2.", f"{mlp}layer_norm_"),
        _one(up, f"{theirs}mlp.c_fc.weight", f"{mlp}fc1_weight", transposed=True),
        _one((a.ffn,), f"{theirs}mlp.c_fc.bias", f"{mlp}fc1_bias"),
        _one(down, f"{theirs}mlp.c_proj.weight", f"{mlp}fc2_weight", transposed=True),
        _one((a.hidden,), f"{theirs}mlp.c_proj.bias", f"{mlp}fc2_bias"),
    ]
