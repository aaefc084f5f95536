"""Compare planned activations with the tensors that TransformerEngine saves for backward."""

from __future__ import annotations

import pytest
import torch

from te_fsdp.planning.costs import stages_of
from te_fsdp.planning.job import RECIPES, Job, Workload

TOKENS, HIDDEN, FFN = 128, 256, 384
BUILD = {
    "LayerNormLinear": lambda te, **kw: te.LayerNormLinear(
        HIDDEN, FFN, normalization="RMSNorm", bias=False, **kw
    ),
    "Linear": lambda te, **kw: te.Linear(HIDDEN, FFN, bias=False, **kw),
    "gated": lambda te, **kw: te.LayerNormMLP(
        HIDDEN, FFN, normalization="RMSNorm", activation="swiglu", bias=False, **kw
    ),
    "MLP": lambda te, **kw: te.LayerNormMLP(HIDDEN, FFN, activation="relu", bias=False, **kw),
    "RMSNorm": lambda te, **kw: te.RMSNorm(HIDDEN, device=kw["device"], dtype=kw["params_dtype"]),
}


def saved(module: torch.nn.Module, x: torch.Tensor) -> int:
    """Return the bytes that autograd saves in a forward, without parameters."""
    own = {p.untyped_storage().data_ptr() for p in module.parameters()}
    held: dict[int, int] = {}
    # As a module that FSDP2 manages: TransformerEngine keeps no quantized copies of its weights.
    module._is_fsdp2 = True

    def note(tensor: torch.Tensor) -> torch.Tensor:
        memory = tensor.untyped_storage()
        if memory.data_ptr() not in own:
            held[memory.data_ptr()] = memory.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        y = module(x)
    del y
    return sum(held.values())


CASES = [
    (kind, recipe)
    for kind in BUILD
    for recipe in ("none", "current", "mxfp8")[: 1 if kind == "RMSNorm" else 3]
]


@pytest.mark.parametrize(("kind", "recipe"), CASES)
def test_planned_activations_match_tensors_saved_by_te(te, kind, recipe):
    import transformer_engine.common.recipe as recipes

    module = BUILD[kind](te, params_dtype=torch.bfloat16, device="cpu")
    x = torch.randn(TOKENS, HIDDEN, dtype=torch.bfloat16, requires_grad=True)
    job = Job(lambda: module, recipe=recipe)
    (stage, *_), notes = stages_of(module, job, Workload(TOKENS, 0, 1, True), 1)
    enabled = recipe != "none"
    with te.autocast(enabled=enabled, recipe=getattr(recipes, RECIPES[recipe])() if enabled else None):
        module(x)  # the first one has its own buffers
        result = saved(module, x)
    # Amaxes and scales are a few numbers each.
    assert result == pytest.approx(stage.saved, abs=200, rel=0.001) and not notes, (result, stage.saved)
