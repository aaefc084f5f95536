"""Check that errors suggest the strategy for names of other libraries or misspellings."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, ShardingStrategy

import te_fsdp
from te_fsdp.errors import PlacementError, suggest
from te_fsdp.layout import OUTER_STRATEGIES, STRATEGIES
from te_fsdp.plan import check_option, find_units

WORDS = {
    "no_shard": [
        "zero0",
        "ZeRO-0",
        0,
        "ddp",
        "DDP",
        "no",
        "none",
        "NO_SHARD",
        ShardingStrategy.NO_SHARD,
        None,
    ],
    "optim": ["zero1", "zero-1", "ZERO_1", 1, "stage1", "optimizer", "optm", "Optim"],
    "optim_grads": [
        "zero2",
        "ZeRO 2",
        2,
        "shard_grad_op",
        ShardingStrategy.SHARD_GRAD_OP,
        "optim_grad",
        "optimgrads",
    ],
    "optim_grads_params": [
        "zero3",
        "zero-3",
        "ZERO_3",
        3,
        "full_shard",
        "FULL_SHARD",
        ShardingStrategy.FULL_SHARD,
        "fsdp",
        "fully_shard",
        "optim-grads-params",
        "optim_grad_params",
    ],
}


@pytest.mark.parametrize(("ours", "word"), [(ours, word) for ours, words in WORDS.items() for word in words])
def test_strategy_names_of_other_libraries_get_a_suggestion(ours, word):
    with pytest.raises(PlacementError) as caught:
        check_option("strategy", word)
    message = str(caught.value)
    assert (
        message.startswith("fully_shard: strategy: expected one of ('no_shard', ") and repr(word) in message
    )
    assert message.endswith(f"Fix: strategy='{ours}'.")


@pytest.mark.parametrize("ours", STRATEGIES)
def test_native_strategy_names_are_accepted(ours):
    assert check_option("strategy", ours) == ours


@pytest.mark.parametrize(
    "word", ["hybrid_shard", ShardingStrategy.HYBRID_SHARD, "hsdp", "hfsdp", "HYBRID_SHARD_ZERO2"]
)
def test_names_of_hybrid_strategies_suggest_a_mesh(word):
    with pytest.raises(
        PlacementError, match=r"Fix: strategy='optim_grads.*Meshes.build\(dp_replicate="
    ) as caught:
        check_option("strategy", word)
    assert ("outer_strategy='optim'" in str(caught.value)) == (word == "hfsdp")


@pytest.mark.parametrize("word", ["bananas", "", 7, pytest.param(object(), id="object"), "x"])
def test_unknown_strategy_gets_no_suggestion(word):
    """Values that are not similar to a name get no suggestion."""
    with pytest.raises(PlacementError, match=r"Fix: use one of these, or omit strategy\.$"):
        check_option("strategy", word)


@pytest.mark.parametrize(
    ("ours", "word"),
    [
        ("no_shard", "hsdp"),
        ("no_shard", None),
        ("no_shard", "no-shard"),
        ("no_shard", "zero0"),
        ("optim", "hfsdp"),
        ("optim", "zero1"),
        ("optim", "optim_grads"),
        ("optim", "full_shard"),
        ("optim", "Optim"),
    ],
)
def test_outer_strategy_names_get_a_suggestion(ours, word):
    with pytest.raises(PlacementError, match=f"outer_strategy: .*Fix: outer_strategy='{ours}'"):
        check_option("outer_strategy", word)
    assert all(check_option("outer_strategy", known) == known for known in OUTER_STRATEGIES)


def test_misspelled_unit_gets_a_suggestion():
    model = torch.nn.Sequential(torch.nn.Linear(2, 2))
    model.add_module("decoder", torch.nn.Linear(2, 2))
    with pytest.raises(
        PlacementError, match="unit 'decodr' matches no module.*Fix: write 'decoder', if you mean that module"
    ):
        find_units(model, "decodr", "optim")
    with pytest.raises(PlacementError, match=r"Fix: use names of model.named_modules\(\)"):
        find_units(model, "embedding", "optim")


def test_suggest_finds_similar_names():
    assert suggest("Dp-Shrd", ("dp_shard", "tp")) == "dp_shard"
    assert suggest("data", ("dp_shard", "tp")) is None
    assert suggest("data", ("dp_shard", "tp"), {"data": "dp_shard"}) == "dp_shard"


@pytest.mark.parametrize("policy", [CPUOffloadPolicy(), CPUOffloadPolicy(pin_memory=False)], ids=repr)
def test_cpu_offload_policy_is_rejected_before_changes(fake_world, policy):
    fake_world(1)
    meshes, model = te_fsdp.Meshes.build(device_type="cpu"), torch.nn.Linear(4, 4, device="meta")
    with pytest.raises(PlacementError) as caught:
        te_fsdp.fully_shard(model, meshes, offload_policy=policy)
    assert "fully_shard: offload_policy=CPUOffloadPolicy: expected None, or OffloadPolicy()" in str(
        caught.value
    )
    assert "Fix: omit it" in str(caught.value) and type(model) is torch.nn.Linear
    te_fsdp.fully_shard(model, meshes, offload_policy=OffloadPolicy())
    assert type(model) is not torch.nn.Linear
