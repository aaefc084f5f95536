"""The tables: which Hugging Face tensors are which parameters of a model of TransformerEngine's modules.

Left, Hugging Face's names as of transformers 4.57 and 5.23 (``models/*/modeling_*.py``, of experts
``conversion_mapping.py``; ``GPT2Model``'s ``Conv1D`` keeps matrices as ``(in, out)``). Right, TransformerEngine's, the
same in 2.18 to 2.20 (``pytorch/module/layernorm_linear.py``, ``layernorm_mlp.py``, ``grouped_linear.py``,
``pytorch/attention/multi_head_attention.py``), in the layout of the unsharded module.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from te_fsdp.checkpoint.portable.huggingface_config import Architecture
from te_fsdp.checkpoint.portable.huggingface_groups import Form, Group, Shape
from te_fsdp.errors import CheckpointError, message

if TYPE_CHECKING:
    from te_fsdp.checkpoint.portable.huggingface_layers import TeBlocks

__all__ = ["TeNames", "groups_of"]


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


def groups_of(
    architecture: Architecture,
    blocks: TeBlocks,
    names: TeNames,
    centered: Callable[[str], bool | None] = lambda _: None,
) -> tuple[Group, ...]:
    """All groups of a model, in the order of the model.

    Args:
        architecture: The model.
        blocks: Options of its TransformerEngine layers.
        names: TransformerEngine side's other names.
        centered: Whether the norm in a module is zero-centered, by the module's name; ``None``: as ``blocks`` say.

    Raises:
        CheckpointError: Biases in the Hugging Face model, none in the layers; an untied head that has no name.
    """
    a = architecture
    biased = a.qkv_bias or a.proj_bias or a.mlp_bias
    bias = biased if blocks.bias is None else blocks.bias
    mlp_bias = bias if blocks.mlp_bias is None else blocks.mlp_bias
    if ((a.qkv_bias or a.proj_bias) and not bias) or (a.mlp_bias and not mlp_bias):
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
    return tuple(_Tables(a, blocks, names, centered, bias, mlp_bias).model())


def _one(shape: Shape, theirs: str, ours: str, *, transposed: bool = False) -> Group:
    """A tensor that has one name on either side."""
    return Group((shape,), Form((theirs,), transposed=transposed), Form((ours,)))


def _bias(shape: Shape, exists: bool, theirs: str, ours: str) -> Group:
    """A bias of TransformerEngine's, zero if the Hugging Face model has none."""
    return Group((shape,), Form((theirs,)) if exists else Form((), "absent"), Form((ours,)))


@dataclass(frozen=True)
class _Tables:
    """The tables of one model: its groups, part by part. Prefixes: ``theirs`` Hugging Face's, ``ours`` the other."""

    a: Architecture
    blocks: TeBlocks
    names: TeNames
    centered: Callable[[str], bool | None]
    bias: bool
    mlp_bias: bool

    def model(self) -> Iterator[Group]:
        a, names, gpt2 = self.a, self.names, self.a.style == "gpt2"
        prefix, wide = "transformer." if gpt2 else "model.", (a.vocabulary, a.hidden)
        embedding = prefix + ("wte" if gpt2 else "embed_tokens") + ".weight"
        if a.tied:  # then either side may store it twice
            ours = (names.embedding,) if names.head is None else (names.embedding, names.head)
            yield Group((wide,), Form((embedding, "lm_head.weight"), "copies"), Form(ours, "copies"))
        else:
            yield _one(wide, embedding, names.embedding)
        if gpt2:
            yield _one((a.positions, a.hidden), f"{prefix}wpe.weight", names.positions)
        for layer in range(a.layers):
            theirs, ours = f"{prefix}{'h' if gpt2 else 'layers'}.{layer}.", names.layer.format(layer=layer)
            yield from self.gpt2_layer(theirs, ours) if gpt2 else self.llama_layer(layer, theirs, ours)
        last = prefix + ("ln_f." if gpt2 else "norm.")
        yield from self.norm(last, names.final_norm, default=self.blocks.final_norm_zero_centered)
        if not a.tied:
            assert names.head is not None
            yield _one(wide, "lm_head.weight", names.head)

    def norm(self, theirs: str, ours: str, *, default: bool | None = None) -> Iterator[Group]:
        """Weight, and bias if there is one; both arguments are the prefixes of ``weight`` and ``bias``."""
        module = ours.removesuffix("layer_norm_").removesuffix(".")
        told = self.centered(module)
        weight = Form((f"{ours}weight",), zero_centered=bool(default if told is None else told))
        shape = (self.a.hidden,)
        yield Group((shape,), Form((f"{theirs}weight",), zero_centered=self.a.zero_centered), weight)
        if self.a.style == "gpt2":
            yield _one(shape, f"{theirs}bias", f"{ours}bias")

    def layer_norm(self, theirs: str, ours: str) -> Iterator[Group]:
        """One of a layer's norms."""
        return self.norm(theirs, ours, default=self.blocks.zero_centered_gamma)

    def qkv(self, theirs: Form, ours: str, kind: str, *inner: int) -> Group:
        """Query, key and value, weights or biases (``kind``), onto ``layernorm_qkv``."""
        a = self.a
        wide, narrow = a.heads * a.head_dim, a.kv_heads * a.head_dim
        if not self.blocks.fuse_qkv_params:
            form = Form(tuple(f"{ours}{part}_{kind}" for part in ("query", "key", "value")))
        elif self.blocks.qkv_weight_interleaved is not False:
            form = Form((f"{ours}{kind}",), "interleaved", groups=a.kv_heads)
        else:
            form = Form((f"{ours}{kind}",), "joined", blocks=(a.heads, a.kv_heads, a.kv_heads))
        return Group(((wide, *inner), (narrow, *inner), (narrow, *inner)), theirs, form)

    def llama_layer(self, layer: int, theirs: str, ours: str) -> Iterator[Group]:
        a, names = self.a, self.names
        yield from self.llama_attention(theirs, ours + names.attention)
        before = "post_attention_layernorm."
        if a.branch_norms:
            yield from self.layer_norm(f"{theirs}{before}", ours + names.attention_out_norm)
            yield from self.layer_norm(f"{theirs}post_feedforward_layernorm.", ours + names.mlp_out_norm)
            before = "pre_feedforward_layernorm."
        if a.experts is not None and layer in a.experts.layers:
            yield from self.layer_norm(theirs + before, ours + names.mlp_norm)
            yield from self.experts(theirs, ours)
            return
        yield from self.layer_norm(theirs + before, f"{ours}{names.mlp}layer_norm_")
        yield from self.gated(f"{theirs}mlp.", ours + names.mlp)

    def llama_attention(self, theirs: str, ours: str) -> Iterator[Group]:
        a, qkv = self.a, f"{ours}layernorm_qkv."

        def three(kind: str) -> Form:
            return Form(tuple(f"{theirs}self_attn.{part}_proj.{kind}" for part in "qkv"))

        yield from self.layer_norm(f"{theirs}input_layernorm.", f"{qkv}layer_norm_")
        yield self.qkv(three("weight"), qkv, "weight", a.hidden)
        yield _one((a.hidden, a.heads * a.head_dim), f"{theirs}self_attn.o_proj.weight", f"{ours}proj.weight")
        for part in "qk" if a.qk_norm else "":
            form = Form((f"{theirs}self_attn.{part}_norm.weight",), zero_centered=a.zero_centered)
            yield Group(((a.head_dim,),), form, Form((f"{ours}{part}_norm.weight",)))
        if self.bias:
            yield self.qkv(three("bias") if a.qkv_bias else Form((), "absent"), qkv, "bias")
            yield _bias((a.hidden,), a.proj_bias, f"{theirs}self_attn.o_proj.bias", f"{ours}proj.bias")

    def gated(self, theirs: str, ours: str) -> Iterator[Group]:
        """The MLP of a layer of Llama's."""
        a = self.a

        def two(kind: str) -> Form:
            return Form((f"{theirs}gate_proj.{kind}", f"{theirs}up_proj.{kind}"))

        stacked = Form((f"{ours}fc1_weight",), "joined", blocks=(1, 1))
        yield Group(((a.ffn, a.hidden), (a.ffn, a.hidden)), two("weight"), stacked)
        yield _one((a.hidden, a.ffn), f"{theirs}down_proj.weight", f"{ours}fc2_weight")
        if self.mlp_bias:
            stacked = Form((f"{ours}fc1_bias",), "joined", blocks=(1, 1))
            yield Group(((a.ffn,), (a.ffn,)), two("bias") if a.mlp_bias else Form((), "absent"), stacked)
            yield _bias((a.hidden,), a.mlp_bias, f"{theirs}down_proj.bias", f"{ours}fc2_bias")

    def experts(self, theirs: str, ours: str) -> Iterator[Group]:
        """Router, each expert by itself, and the shared expert."""
        a, names, experts = self.a, self.names, self.a.experts
        assert experts is not None
        mixtral = a.model_type == "mixtral"
        block = f"{theirs}{'block_sparse_moe' if mixtral else 'mlp'}."
        gate, up, down = ("w1", "w3", "w2") if mixtral else ("gate_proj", "up_proj", "down_proj")
        inner, back = (experts.ffn, a.hidden), (a.hidden, experts.ffn)
        yield _one((experts.count, a.hidden), f"{block}gate.weight", ours + names.router)
        for n in range(experts.count):
            one = f"{block}experts.{n}."
            into = Form((f"{ours}{names.experts_fc1}weight{n}",), "joined", grouped=True)
            yield Group((inner, inner), Form((f"{one}{gate}.weight", f"{one}{up}.weight")), into)
            out = Form((f"{ours}{names.experts_fc2}weight{n}",), grouped=True)
            yield Group((back,), Form((f"{one}{down}.weight",)), out)
        if experts.shared_ffn:
            shared, inner = f"{block}shared_expert.", (experts.shared_ffn, a.hidden)
            parts = Form((f"{shared}gate_proj.weight", f"{shared}up_proj.weight"))
            yield Group((inner, inner), parts, Form((f"{ours}{names.shared_fc1}weight",), "joined"))
            yield _one(inner[::-1], f"{shared}down_proj.weight", f"{ours}{names.shared_fc2}weight")
            yield _one((1, a.hidden), f"{block}shared_expert_gate.weight", ours + names.shared_gate)

    def gpt2_layer(self, theirs: str, ours: str) -> Iterator[Group]:
        a, attention, mlp = self.a, ours + self.names.attention, ours + self.names.mlp
        qkv = f"{attention}layernorm_qkv."
        square, up, down = (a.hidden, a.hidden), (a.ffn, a.hidden), (a.hidden, a.ffn)
        yield from self.layer_norm(f"{theirs}ln_1.", f"{qkv}layer_norm_")
        yield self.qkv(
            Form((f"{theirs}attn.c_attn.weight",), "joined", transposed=True), qkv, "weight", a.hidden
        )
        yield self.qkv(Form((f"{theirs}attn.c_attn.bias",), "joined"), qkv, "bias")
        yield _one(square, f"{theirs}attn.c_proj.weight", f"{attention}proj.weight", transposed=True)
        yield _one((a.hidden,), f"{theirs}attn.c_proj.bias", f"{attention}proj.bias")
        yield from self.layer_norm(f"{theirs}ln_2.", f"{mlp}layer_norm_")
        yield _one(up, f"{theirs}mlp.c_fc.weight", f"{mlp}fc1_weight", transposed=True)
        yield _one((a.ffn,), f"{theirs}mlp.c_fc.bias", f"{mlp}fc1_bias")
        yield _one(down, f"{theirs}mlp.c_proj.weight", f"{mlp}fc2_weight", transposed=True)
        yield _one((a.hidden,), f"{theirs}mlp.c_proj.bias", f"{mlp}fc2_bias")
