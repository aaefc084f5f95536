"""Small models of every module kind, written once for stock TE in one process or for tensor parallelism.

Each builder takes a `Build` (device, tensor-parallel group, sequence parallelism) and its own options, and returns a
`Subject`: the module, the shapes of its global inputs, and which dim of inputs and outputs `tp` cuts. Activations are
(sequence, batch, hidden), data parallelism shards the batch, sequence parallelism the sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import harness
import torch
from harness.tensor_parallel import SumOverTp
from torch import nn

SEQUENCE, BATCH, HIDDEN, FFN, HEADS, GROUPS, VOCABULARY, EXPERTS = 8, 4, 32, 64, 8, 4, 16, 3
SEQUENCE_DIM, BATCH_DIM, LAST_DIM = 0, 1, -1


@dataclass(frozen=True)
class Build:
    """Where and how a model is built.

    Attributes:
        device: device of the parameters, "meta" included.
        tp_group, tp_size: tensor parallelism, as TE's constructors take it.
        sequence_parallel: whether activations outside the GEMMs are sharded along the sequence.
    """

    device: Any
    tp_group: Any = None
    tp_size: int = 1
    sequence_parallel: bool = False

    @property
    def kwargs(self) -> dict[str, Any]:
        """Return keywords that every parallel TE module takes."""
        return {
            "device": self.device,
            "tp_group": self.tp_group,
            "tp_size": self.tp_size,
            "sequence_parallel": self.sequence_parallel,
            "params_dtype": torch.float32,
        }

    @property
    def cut(self) -> int | None:
        """Return the dim in which sequence parallelism shards activations."""
        return SEQUENCE_DIM if self.sequence_parallel else None


@dataclass(frozen=True)
class Input:
    """A global input: its shape, the dim that `tp` cuts, and the number of classes if it holds token ids."""

    shape: tuple[int, ...]
    tp_dim: int | None = None
    classes: int = 0


@dataclass
class Subject:
    """A module under test with all that is needed to feed it."""

    module: nn.Module
    inputs: dict[str, Input]
    output_tp_dim: int | None
    call: Callable[..., torch.Tensor] = lambda module, x: module(x)
    #: Parameters whose gradient is zero in exact arithmetic -> a sibling that gives the scale of its rounding noise.
    no_gradient: Mapping[str, str] = field(default_factory=dict)


def _activation(tp_dim: int | None, width: int = HIDDEN) -> Input:
    return Input((SEQUENCE, BATCH, width), tp_dim)


def linear(build: Build, parallel_mode: str | None, bias: bool = True) -> Subject:
    import transformer_engine.pytorch as te

    kwargs = build.kwargs if parallel_mode else {**build.kwargs, "tp_group": None, "tp_size": 1}
    module = te.Linear(HIDDEN, FFN, bias=bias, parallel_mode=parallel_mode, **kwargs)
    before, after = {"column": (build.cut, LAST_DIM), "row": (LAST_DIM, build.cut), None: (None, None)}[
        parallel_mode
    ]
    return Subject(module, {"x": _activation(before)}, after)


def layer_norm_linear(build: Build, bias: bool = True, normalization: str = "LayerNorm") -> Subject:
    import transformer_engine.pytorch as te

    module = te.LayerNormLinear(
        HIDDEN, FFN, bias=bias, normalization=normalization, parallel_mode="column", **build.kwargs
    )
    return Subject(module, {"x": _activation(build.cut)}, LAST_DIM)


def layer_norm_mlp(
    build: Build,
    activation: str = "gelu",
    bias: bool = True,
    normalization: str = "LayerNorm",
    checkpoint: bool = False,
) -> Subject:
    import transformer_engine.pytorch as te

    options = {
        "activation": activation,
        "bias": bias,
        "normalization": normalization,
        "checkpoint": checkpoint,
    }
    module = te.LayerNormMLP(HIDDEN, FFN, set_parallel_mode=True, **options, **build.kwargs)
    return Subject(module, {"x": _activation(build.cut)}, build.cut)


class Experts(nn.Module):
    """Two grouped linears, column- then row-parallel, on tokens sorted by expert: (expert, token, hidden).

    GroupedLinear communicates nothing over `tp`, so that the sum is ours.
    """

    def __init__(self, build: Build, bias: bool) -> None:
        super().__init__()
        import transformer_engine.pytorch as te

        kwargs = {**build.kwargs, "sequence_parallel": False, "bias": bias}
        self.fc1 = te.GroupedLinear(EXPERTS, HIDDEN, FFN, parallel_mode="column", **kwargs)
        self.fc2 = te.GroupedLinear(EXPERTS, FFN, HIDDEN, parallel_mode="row", **kwargs)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        splits = [x.shape[1]] * EXPERTS
        hidden = nn.functional.gelu(self.fc1(x.reshape(-1, HIDDEN), splits))
        output = SumOverTp.apply(
            self.fc2(hidden, splits), self.fc1.tp_group if self.fc1.tp_size > 1 else None
        )
        return output.view(x.shape)


def grouped_linear(build: Build, bias: bool = False) -> Subject:
    return Subject(Experts(build, bias), {"x": Input((EXPERTS, SEQUENCE, HIDDEN))}, None)


def norm(build: Build, kind: str) -> Subject:
    import transformer_engine.pytorch as te

    module = getattr(te, kind)(HIDDEN, device=build.device, sequence_parallel=build.sequence_parallel)
    return Subject(module, {"x": _activation(build.cut)}, build.cut)


def core_attention(build: Build, groups: int = HEADS) -> Subject:
    """Return a DotProductAttention with the learnable softmax offset, its only parameter."""
    import transformer_engine.pytorch as te

    width = HIDDEN // HEADS
    module = te.DotProductAttention(
        HEADS,
        width,
        num_gqa_groups=groups,
        softmax_type="learnable",
        tp_size=build.tp_size,
        tp_group=build.tp_group,
        sequence_parallel=build.sequence_parallel,
    ).to(build.device)  # TE puts the offset on the accelerator for any requested device
    shapes = {"q": HEADS, "k": groups, "v": groups}
    inputs = {name: Input((SEQUENCE, BATCH, heads, width), tp_dim=2) for name, heads in shapes.items()}
    return Subject(module, inputs, LAST_DIM, lambda module, q, k, v: module(q, k, v))


def attention(
    build: Build,
    attention_type: str = "self",
    groups: int = HEADS,
    qk_norm_type: str | None = None,
    softmax_type: str = "vanilla",
    recompute: bool = False,
    **options: Any,
) -> Subject:
    """Return a MultiheadAttention; options as TE's: input_layernorm, fuse_qkv_params, qkv_weight_interleaved, bias.

    With `recompute` the core attention is run again in backward.
    """
    import transformer_engine.pytorch as te

    cross = attention_type == "cross"
    module = te.MultiheadAttention(
        HIDDEN,
        HEADS,
        num_gqa_groups=groups,
        attention_dropout=0.0,
        attention_type=attention_type,
        attn_mask_type="no_mask" if cross else "causal",
        qk_norm_type=qk_norm_type,
        softmax_type=softmax_type,
        set_parallel_mode=True,
        **options,
        **build.kwargs,
    )
    inputs = {"x": _activation(build.cut)}
    if cross:
        inputs["memory"] = _activation(build.cut)
    quiet = _without_gradient(qk_norm_type, softmax_type)

    def call(module: nn.Module, x: torch.Tensor, memory: torch.Tensor | None = None) -> torch.Tensor:
        output = module(x, encoder_output=memory, checkpoint_core_attention=recompute)
        return output[0] if isinstance(output, tuple) else output

    return Subject(module, inputs, build.cut, call, quiet)


def _without_gradient(qk_norm_type: str | None, softmax_type: str) -> dict[str, str]:
    """Return names without gradient: softmax over keys ignores a vector added to all keys, as the key bias does."""
    if softmax_type != "vanilla":
        return {}
    return {None: {"key_bias": "query_bias"}, "LayerNorm": {"k_norm.bias": "q_norm.bias"}}.get(
        qk_norm_type, {}
    )


def _layer(build: Build, **options: Any) -> nn.Module:
    import transformer_engine.pytorch as te

    options = {"num_gqa_groups": options.pop("groups", HEADS), "self_attn_mask_type": "causal", **options}
    dropout = {"hidden_dropout": 0.0, "attention_dropout": 0.0}
    return te.TransformerLayer(
        HIDDEN, FFN, HEADS, set_parallel_mode=True, **dropout, **options, **build.kwargs
    )


def transformer_layer(build: Build, layer_type: str = "encoder", **options: Any) -> Subject:
    """Return a TransformerLayer, with cross attention for layer_type="decoder"; other options as TE's."""
    inputs = {"x": _activation(build.cut)}
    if layer_type == "decoder":
        inputs["memory"] = _activation(build.cut)
    quiet = _without_gradient(options.get("qk_norm_type"), options.get("softmax_type", "vanilla"))

    def call(module: nn.Module, x: torch.Tensor, memory: torch.Tensor | None = None) -> torch.Tensor:
        return module(x, encoder_output=memory)

    return Subject(_layer(build, layer_type=layer_type, **options), inputs, build.cut, call, quiet)


class LanguageModel(nn.Module):
    """Embedding, layers, norm and head. Under sequence parallelism each tp rank embeds and scores its own tokens."""

    def __init__(self, build: Build, layers: int, tied: bool, **options: Any) -> None:
        super().__init__()
        import transformer_engine.pytorch as te

        self.embedding = nn.Embedding(VOCABULARY, HIDDEN, device=build.device)
        self.layers = nn.ModuleList(_layer(build, **options) for _ in range(layers))
        self.norm = te.RMSNorm(HIDDEN, device=build.device, sequence_parallel=build.sequence_parallel)
        self.head = nn.Linear(HIDDEN, VOCABULARY, bias=False, device=build.device)
        if tied:
            self.head.weight = self.embedding.weight
        for parameter in (self.embedding.weight, self.head.weight):
            parameter.sequence_parallel = build.sequence_parallel

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x)
        # Embeddings of unit size, tied to the head, would make logits and gradients far larger than elsewhere.
        return self.head(self.norm(x)) * HIDDEN**-0.5


def language_model(build: Build, layers: int = 2, tied: bool = False, **options: Any) -> Subject:
    module = LanguageModel(build, layers, tied, **options)
    quiet = _without_gradient(options.get("qk_norm_type"), options.get("softmax_type", "vanilla"))
    tokens = Input((SEQUENCE, BATCH), build.cut, classes=VOCABULARY)
    return Subject(module, {"x": tokens}, build.cut, no_gradient=quiet)


_KINDS: dict[str, Callable[..., Subject]] = {
    "linear": linear,
    "layer_norm_linear": layer_norm_linear,
    "layer_norm_mlp": layer_norm_mlp,
    "grouped_linear": grouped_linear,
    "layer_norm": partial(norm, kind="LayerNorm"),
    "rms_norm": partial(norm, kind="RMSNorm"),
    "core_attention": core_attention,
    "attention": attention,
    "transformer_layer": transformer_layer,
    "language_model": language_model,
}


def _of_own_parts(builder: Callable[..., Subject], build: Build, *args: Any, **options: Any) -> Subject:
    subject = builder(build, *args, **options)
    harness.shift_rows_by_rank(subject.module, build.tp_group)
    return subject


KINDS = {kind: partial(_of_own_parts, builder) for kind, builder in _KINDS.items()}
