"""Activation recomputation: forwards that run again in backward.

Modules that are used twice are tested, too. Values are compared with stock TransformerEngine in one process.

Every combination of strategy, format and form of checkpointing trains. The cases here are those that run different
code.
"""

from __future__ import annotations

import pytest
from harness import BodyFailed
from recomputing import bodies

from te_fsdp.layout import STRATEGIES

DP2, TP2, DP2_TP2 = {"dp_shard": 2}, {"dp_shard": 1, "tp": 2}, {"dp_shard": 2, "tp": 2}
OWN = {"place": "own"}

#: name -> way: TE's own, around a unit, in it, around several, one in another, torch's selection.
WAYS = {
    "own": OWN,
    "unit": {"place": "unit", "kind": "torch"},
    "unit_te": {"place": "unit", "kind": "te"},
    "unit_reentrant": {"place": "unit", "kind": "te_reentrant"},
    "inside": {"place": "inside", "kind": "torch"},
    "inside_reentrant": {"place": "inside", "kind": "torch_reentrant"},
    "units": {"place": "units", "kind": "torch"},
    "units_reentrant": {"place": "units", "kind": "te_reentrant"},
    "nested": {"place": "nested", "kind": "torch"},
    "nested_reentrant": {"place": "nested", "kind": "torch_reentrant"},
    "selective": {"place": "selective", "kind": "torch"},
    "offloaded": {"place": "unit", "kind": "torch_offload"},
    "offloaded_te": {"place": "unit", "kind": "te_offload"},
}
#: The same for what is used twice.
TWICE = {
    "module": {"twice": "module"},
    "module_in_checkpoint": {"twice": "module", "place": "inside", "kind": "te_reentrant"},
    "unit": {"twice": "unit"},
    "unit_in_checkpoint": {"twice": "unit", "place": "unit", "kind": "torch"},
    "unit_in_checkpoint_reentrant": {"twice": "unit", "place": "unit", "kind": "torch_reentrant"},
    "unit_in_one_checkpoint": {"twice": "unit", "place": "units", "kind": "te"},
    "unit_in_one_checkpoint_reentrant": {"twice": "unit", "place": "units", "kind": "te_reentrant"},
}
MXFP8 = {"recipe": "mxfp8", "weights": "quantized"}


def _run(pool, ranks: int, **case) -> None:
    pool.run(bodies.trained, ranks, **case)


# --- what reads parameters again in backward ------------------------------------------------------------------------


@pytest.mark.covering(days=2)
@pytest.mark.ranks(2)
@pytest.mark.parametrize("axes", [DP2, TP2], ids=["tp1", "tp2"])
@pytest.mark.parametrize("frozen", ["", "first", "then"])
def test_recomputation_without_fsdp(pool, axes, frozen):
    _run(pool, 2, strategy="bound", axes=axes, frozen=frozen, **OWN)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_recomputation_under_every_strategy(pool, strategy):
    _run(pool, 2, strategy=strategy, axes=TP2, frozen="then", **OWN)


@pytest.mark.ranks(2)
def test_recomputation_with_fused_wgrad_accumulation(pool):
    _run(pool, 2, strategy="optim_grads_params", axes=TP2, fused=True, **OWN)


@pytest.mark.ranks(4)
def test_recomputation_with_tensor_parallelism(pool):
    _run(pool, 4, strategy="optim_grads_params", axes=DP2_TP2, **OWN)


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("recipe", "weights"),
    [
        ("none", "bf16"),
        ("current", "bf16"),
        ("block", "bf16"),
        ("delayed", "quantized"),
        ("current", "quantized"),
        ("block", "quantized"),
        ("mxfp8", "quantized"),
    ],
)
def test_recomputation_in_every_format(pool, recipe, weights):
    """Omit delayed scaling of bf16 weights. Under FSDP2, TE quantizes them again in backward with newer scales."""
    _run(pool, 2, strategy="torch", axes=DP2, recipe=recipe, weights=weights, **OWN)


@pytest.mark.covering(days=2)
@pytest.mark.ranks(2)
@pytest.mark.parametrize("way", WAYS)
def test_every_form_of_checkpointing(pool, way):
    _run(pool, 2, strategy="optim_grads_params", axes=DP2, **WAYS[way])


@pytest.mark.ranks(4)
def test_selective_checkpointing_with_tensor_parallelism(pool):
    """TE sums products over tp in place: a policy that keeps products must not keep those."""
    _run(pool, 4, strategy="optim_grads_params", axes=DP2_TP2, **WAYS["selective"])


@pytest.mark.ranks(2)
def test_negative_control_wrong_gradient(pool):
    """Negative control."""
    with pytest.raises(BodyFailed, match="fc1_weight: relative error"):
        _run(pool, 2, strategy="optim_grads_params", axes=DP2, broken="gradient", **OWN)


# --- what is used twice ---------------------------------------------------------------------------------------------


@pytest.mark.covering(
    # FSDP2 does not run its hooks for the second use of a unit under a reentrant checkpoint.
    always=[{"way": "unit_in_checkpoint_reentrant", "strategy": "optim_grads_params"}],
    strength=1,
)
@pytest.mark.ranks(2)
@pytest.mark.parametrize("strategy", ["optim_grads_params", "optim"])
@pytest.mark.parametrize("way", TWICE)
def test_modules_used_twice(pool, way, strategy):
    _run(pool, 2, strategy=strategy, axes=DP2, **TWICE[way])


# --- MXFP8 weights, whose two halves are gathered apart -------------------------------------------------------------


@pytest.mark.covering(
    # TE's recomputation passes by no forward that could ask; a part of a unit; a module that is used twice, also there;
    # a checkpoint around several units.
    always=[{"way": way} for way in ("own", "inside", "module", "module_in_checkpoint", "units")],
    strength=0,
)
@pytest.mark.ranks(2)
@pytest.mark.parametrize("recipe", ["mxfp8"])
@pytest.mark.parametrize("way", WAYS | TWICE)
def test_recomputation_of_mxfp8_weights(pool, recipe, way):
    _run(pool, 2, strategy="optim_grads_params", axes=DP2, **MXFP8, **(WAYS | TWICE)[way])


@pytest.mark.ranks(2)
@pytest.mark.parametrize("recipe", ["mxfp8"])
@pytest.mark.parametrize(
    ("strategy", "way"), [("optim", "module"), ("optim_grads", "own"), ("no_shard", "unit")]
)
def test_recomputation_of_kept_mxfp8_weights(pool, recipe, strategy, way):
    _run(pool, 2, strategy=strategy, axes=DP2, **MXFP8, **(WAYS | TWICE)[way])


@pytest.mark.ranks(2)
@pytest.mark.parametrize("recipe", ["mxfp8"])
def test_all_gathers_of_mxfp8_weights(pool, recipe):
    """Check one all-gather per direction, or with recomputation one per unit in backward for both."""
    for plain in pool.run(bodies.gathers, 2):
        forward = plain[0][:2]
        assert plain == [forward * 2] * 3 and forward[0] == forward[1]
    for unit in pool.run(bodies.gathers, 2, place="unit", kind="torch"):
        first, *later = unit
        # Two units with three modules each, of which the backward of the first round gathers both halves.
        assert first[:2] == forward and len(first) == 2 + 2 * (1 + 3)
        for seen in later:
            assert seen[:2] == forward and len(seen) == 4
            assert all(1.9 * half < both < 2 * half for half, both in zip(forward, seen[2:], strict=True))
    for own in pool.run(bodies.gathers, 2, place="own"):
        assert all(seen[:2] == forward and len(seen) == 4 and seen[2] > forward[0] for seen in own)
