"""The placement table: module kind and parallel mode -> rule of each parameter.

Source of every row: facts of TransformerEngine 2.20.2
(``pytorch/module/{linear,layernorm_linear,layernorm_mlp, grouped_linear}.py``, ``pytorch/attention``), the
same in 2.18 and 2.19. Which replicated parameters have partial gradients:

- under sequence parallelism each rank sees its own tokens, hence norm weights and row biases sum over ``tp``;
- q/k norms see only the rank's own heads, hence they always sum;
- without sequence parallelism TE all-reduces the input gradient before it reaches the norm, and every rank
  adds the same row bias, hence nothing is summed.
"""

from __future__ import annotations

from collections.abc import Iterable

from te_fsdp.layout.rules import GROUPED, PLAIN, Layout, ParameterRule

__all__ = [
    "GATED_ACTIVATIONS",
    "attention_offset_rules",
    "grouped_linear_rules",
    "linear_rules",
    "mlp_rules",
    "norm_rules",
    "replicated_rules",
    "single_grouped_rules",
]

#: Activations whose fc1 produces two stacked halves ``[gate; up]`` (TE 2.20.2
#: ``pytorch/module/layernorm_mlp.py``).
GATED_ACTIVATIONS = frozenset({"geglu", "glu", "qgeglu", "reglu", "sreglu", "swiglu", "clamped_swiglu"})

_GATED = Layout("stacked", (1, 1))


def linear_rules(
    weight_names: Iterable[str],
    bias_names: Iterable[str],
    parallel_mode: str | None,
    *,
    sequence_parallel: bool = False,
    norm_names: Iterable[str] = (),
    layout: Layout = PLAIN,
) -> dict[str, ParameterRule]:
    """Rules of Linear and LayerNormLinear.

    Args:
        weight_names: Weight parameters, shape ``(out, in)`` each (several when TE splits a fused projection).
        bias_names: Bias parameters that exist, shape ``(out,)`` each.
        parallel_mode: TE's ``"column"``, ``"row"`` or ``None``.
        sequence_parallel: Whether activations outside the GEMM are cut along the sequence.
        norm_names: Norm parameters of LayerNormLinear, shape ``(in,)`` each.
        layout: Layout of a column-parallel fused weight and its bias.
    """
    dim = {"column": 0, "row": 1, None: None}[parallel_mode]
    weight = ParameterRule(dim, layout if dim == 0 else PLAIN, quantizable=True)
    if parallel_mode == "column":
        bias = ParameterRule(0, layout)
    else:
        bias = ParameterRule(None, partial_grad=sequence_parallel and parallel_mode == "row")
    norm = ParameterRule(None, partial_grad=sequence_parallel)
    return {
        **dict.fromkeys(norm_names, norm),
        **dict.fromkeys(weight_names, weight),
        **dict.fromkeys(bias_names, bias),
    }


def mlp_rules(
    parameter_names: Iterable[str], activation: str, *, sequence_parallel: bool = False
) -> dict[str, ParameterRule]:
    """Rules of LayerNormMLP: fc1 column-parallel (stacked when gated), fc2 row-parallel, the rest replicated."""
    layout = _GATED if activation in GATED_ACTIVATIONS else PLAIN
    shared = ParameterRule(None, partial_grad=sequence_parallel)
    table = {
        "layer_norm_weight": shared,
        "layer_norm_bias": shared,
        "fc1_weight": ParameterRule(0, layout, quantizable=True),
        "fc1_bias": ParameterRule(0, layout),
        "fc2_weight": ParameterRule(1, quantizable=True),
        "fc2_bias": shared,
    }
    return {name: table[name] for name in parameter_names}


def grouped_linear_rules(
    weight_names: Iterable[str], bias_names: Iterable[str], parallel_mode: str | None
) -> dict[str, ParameterRule]:
    """Rules of GroupedLinear with one 2-D weight ``(out, in)`` per expert and an optional bias ``(out,)`` each."""
    dim = {"column": 0, "row": 1, None: None}[parallel_mode]
    return {
        **{name: ParameterRule(dim, quantizable=True) for name in weight_names},
        **{name: ParameterRule(0 if parallel_mode == "column" else None) for name in bias_names},
    }


def single_grouped_rules(
    parameter_names: Iterable[str], parallel_mode: str | None
) -> dict[str, ParameterRule]:
    """Rules of GroupedLinear's single parameters: ``weight`` (experts, out, in) and ``bias`` (experts, out).

    Dims are those of one expert's tensor plus one: the 2-D placements on this tensor would cut the experts.
    """
    dim = {"column": 1, "row": 2, None: None}[parallel_mode]
    table = {
        "weight": ParameterRule(dim, GROUPED, quantizable=True),
        "bias": ParameterRule(1 if parallel_mode == "column" else None, GROUPED),
    }
    return {name: table[name] for name in parameter_names}


def norm_rules(
    parameter_names: Iterable[str], *, sequence_parallel: bool = False, per_head: bool = False
) -> dict[str, ParameterRule]:
    """Rules of LayerNorm and RMSNorm; ``per_head`` marks q/k norms inside attention."""
    rule = ParameterRule(None, partial_grad=sequence_parallel or per_head)
    return dict.fromkeys(parameter_names, rule)


def attention_offset_rules(parameter_names: Iterable[str]) -> dict[str, ParameterRule]:
    """Rules of DotProductAttention: the learnable ``softmax_offset``, one value per local head, shape ``(heads,)``."""
    return {name: ParameterRule(0) for name in parameter_names}


def replicated_rules(partial_by_name: dict[str, bool]) -> dict[str, ParameterRule]:
    """Rules of a module that TE does not know: everything replicated, with the given gradient marks."""
    return {name: ParameterRule(None, partial_grad=partial) for name, partial in partial_by_name.items()}
