"""Test the plan of `fully_shard` by value: units, storage, shards, no change of the model."""

from __future__ import annotations

import dataclasses
import inspect
import re
from pathlib import Path

import pytest
import torch
from torch import nn

import te_fsdp
from te_fsdp import shard_model as entry
from te_fsdp.errors import PlacementError
from te_fsdp.layout import OUTER_STRATEGIES, REPLICATED, STORAGE, STRATEGIES, SyncMode
from te_fsdp.modules import plan as of_modules
from te_fsdp.plan import ModelPlan, ShardRequest, plan_sharding, plan_storage
from te_fsdp.records import plan_of
from te_fsdp.sharded_model import attach_state_to_params, get_sharded_model

#           parameter gradient optimizer gather reduce, over (dp_replicate, dp_shard)
TABLE = {
    ("no_shard", "no_shard"): "RR RR RR never last",
    ("optim", "no_shard"): "RS RS RS step last",
    ("optim_grads", "no_shard"): "RS RS RS step each",
    ("optim_grads_params", "no_shard"): "RS RS RS pass each",
    ("fsdp_no_shard", "no_shard"): "RR RR SS never last",
    ("no_shard", "optim"): "RR RR RR never last",
    ("optim", "optim"): "RS PS SS step last",
    ("optim_grads", "optim"): "RS PS SS step each",
    ("optim_grads_params", "optim"): "RS PS SS pass each",
    ("fsdp_no_shard", "optim"): "RR RR SS never last",
}


def test_storage_table_has_the_expected_rows():
    results = {
        key: f"{r.parameter} {r.gradient} {r.optimizer} {r.gather} {r.reduce}" for key, r in STORAGE.items()
    }
    assert results == TABLE
    assert STORAGE.keys() == {
        (strategy, outer) for strategy in (*STRATEGIES, REPLICATED) for outer in OUTER_STRATEGIES
    }


def test_strategies_page_has_the_storage_table():
    expected = [
        "| strategy | `outer_strategy` | parameter | gradient | optimizer | gathered | reduced |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    outers: dict[tuple[str, str], list[str]] = {}
    for r in sorted(STORAGE.values(), key=lambda r: not r.is_replicated):
        columns = f"{r.parameter} | {r.gradient} | {r.optimizer} | {r.gather} | {r.reduce}"
        outers.setdefault((r.strategy, columns), []).append(f"`{r.outer}`")
    for (strategy, columns), outer in outers.items():
        expected.append(f"| `{strategy}` | {'any' if len(outer) > 1 else outer[0]} | {columns} |")
    page = Path(__file__).parents[2] / "docs/internals.md"
    assert "\n".join(expected) in page.read_text(), "\n".join(expected)


@pytest.mark.parametrize("row", STORAGE.values(), ids=str)
def test_storage_rows_satisfy_invariants(row):
    """A rank updates its shard with reduced gradients. Only optimizer state may be sharded further."""
    assert set(row.parameter) <= {"R", "S"} and set(row.optimizer) <= {"R", "S"}
    assert row.is_replicated == (row.gather == "never")
    for parameter, gradient, optimizer in zip(row.parameter, row.gradient, row.optimizer, strict=True):
        assert parameter == "R" or optimizer == "S"
        assert gradient == parameter or (gradient, optimizer) == ("P", "S")
    assert row.reduces(SyncMode.LAST) and row.releases(SyncMode.LAST) and not row.reduces(SyncMode.NO_SYNC)
    assert (row.reduces(SyncMode.ACCUMULATE), row.releases(SyncMode.ACCUMULATE)) == (
        row.reduce == "each",
        row.gather == "pass",
    )


class Block(nn.Module):
    """A norm between two linears, one column- and one row-parallel; 32 x 128 by default."""

    def __init__(self, te, tp, hidden=32, ffn=128):
        super().__init__()
        options = {"bias": False, "device": "meta", "params_dtype": torch.bfloat16, **tp}
        self.up = te.LayerNormLinear(hidden, ffn, parallel_mode="column" if tp else None, **options)
        self.down = te.Linear(ffn, hidden, parallel_mode="row" if tp else None, **options)

    def forward(self, x):
        return self.down(self.up(x))


class Net(nn.Module):
    """Two blocks, an embedding, and a head."""

    def __init__(self, te, tp=None, *, tied=False):
        super().__init__()
        self.embedding = nn.Embedding(8, 32, device="meta")
        self.blocks = nn.ModuleList(Block(te, tp or {}) for _ in range(2))
        self.head = nn.Linear(32, 8, bias=False, device="meta")
        if tied:
            self.head.weight = self.embedding.weight


def shown(plan: ModelPlan) -> dict[str, str]:
    """Return label -> unit, storage over (dp_replicate, dp_shard), tp's dim, FSDP2's dim."""
    results = {}
    for row in plan.parameters.values():
        storage = f"{row.storage.parameter}/{row.storage.gradient}/{row.storage.optimizer}"
        tp = "-" if row.rule is None or row.rule.shard_dim is None else row.rule.shard_dim
        cut = "-" if row.fsdp_dim is None else row.fsdp_dim
        results[row.label] = f"{row.unit or 'root'} {storage} tp={tp} cut={cut}" + " expert" * row.experts
    return results


def untouched(model: nn.Module, make) -> None:
    """Check that parameters and modules are unchanged and have no te_fsdp attributes."""
    fresh = make()
    assert [type(m) for m in model.modules()] == [type(m) for m in fresh.modules()]
    for (name, parameter), (same, other) in zip(
        model.named_parameters(), fresh.named_parameters(), strict=True
    ):
        assert (name, type(parameter), parameter.__dict__.keys()) == (
            same,
            type(other),
            other.__dict__.keys(),
        )


def test_unknown_zero_copy_gradients_value_is_rejected(te, fake_world):
    fake_world(2)
    request = ShardRequest(zero_copy_gradients="always")
    with pytest.raises(PlacementError, match="zero_copy_gradients.*True, False or 'auto'.*got 'always'"):
        plan_sharding(nn.Linear(4, 4), te_fsdp.Meshes.build(device_type="cpu"), request)


#: Arguments whose decisions are in the plan's units and storage, or that are compared as a part of the model.
IN_OTHER_FORM = {"units", "strategy", "reshard_after_forward", "mp_policy", "offload_policy", "experts"}


def test_settings_have_every_argument():
    """A new argument of `fully_shard` is compared over ranks, or listed above."""
    read = set(re.findall(r"request\.(\w+)", inspect.getsource(ModelPlan.settings)))
    assert {field.name for field in dataclasses.fields(ShardRequest)} - read == IN_OTHER_FORM


def test_plan_of_a_dense_model_over_tp_and_fsdp(te, fake_world):
    fake_world(4)
    meshes = te_fsdp.Meshes.build(dp_shard=2, tp=2, device_type="cpu")

    def make() -> Net:
        from transformer_engine.common.recipe import MXFP8BlockScaling

        with te.quantized_model_init(recipe=MXFP8BlockScaling()):
            return Net(te, meshes.te_kwargs())

    model = make()
    plan = plan_sharding(
        model, meshes, ShardRequest(units="blocks.*", strategy={"": "optim", "blocks.1": "optim_grads"})
    )
    whole = "RS/RS/RS"
    assert shown(plan) == {
        "blocks.0.down.weight": f"blocks.0 {whole} tp=1 cut=1",  # 32 rows are one block
        "blocks.0.up.layer_norm_bias": f"blocks.0 {whole} tp=- cut=-",
        "blocks.0.up.layer_norm_weight": f"blocks.0 {whole} tp=- cut=-",
        "blocks.0.up.weight": f"blocks.0 {whole} tp=0 cut=0",
        "blocks.1.down.weight": f"blocks.1 {whole} tp=1 cut=1",
        "blocks.1.up.layer_norm_bias": f"blocks.1 {whole} tp=- cut=-",
        "blocks.1.up.layer_norm_weight": f"blocks.1 {whole} tp=- cut=-",
        "blocks.1.up.weight": f"blocks.1 {whole} tp=0 cut=0",
        "embedding.weight": f"root {whole} tp=- cut=-",
        "head.weight": f"root {whole} tp=- cut=-",
    }  # fmt: skip
    assert {name: str(row) for name, row in plan.units.items()} == {
        "": "optim", "blocks.0": "optim", "blocks.1": "optim_grads"
    }  # fmt: skip
    untouched(model, make)


def test_plan_of_hfsdp_with_replicated_and_tied_parameters(te, fake_world):
    """Replicas share the optimizer state. A tied weight is not sharded."""
    fake_world(4)
    meshes = te_fsdp.Meshes.build(dp_replicate=2, dp_shard=2, device_type="cpu")
    model = Net(te, tied=True)
    te_fsdp.fsdp_no_shard(model.blocks[0].up)
    units = {"": "optim_grads_params", "blocks.1": "no_shard", "head": "optim"}
    with pytest.raises(te_fsdp.PlacementError, match="head.weight: one parameter in several units"):
        plan_sharding(model, meshes, ShardRequest(strategy=units, outer_strategy="optim"))
    te_fsdp.fsdp_no_shard(model.head.weight)
    plan = plan_sharding(model, meshes, ShardRequest(strategy=units, outer_strategy="optim"))
    cut, exempt, copied = "RS/PS/SS", "RR/RR/SS", "RR/RR/RR"
    assert shown(plan) == {
        "blocks.0.down.weight": f"root {cut} tp=- cut=-",
        "blocks.0.up.layer_norm_bias": f"root {exempt} tp=- cut=-",
        "blocks.0.up.layer_norm_weight": f"root {exempt} tp=- cut=-",
        "blocks.0.up.weight": f"root {exempt} tp=- cut=-",
        "blocks.1.down.weight": f"blocks.1 {copied} tp=- cut=-",
        "blocks.1.up.layer_norm_bias": f"blocks.1 {copied} tp=- cut=-",
        "blocks.1.up.layer_norm_weight": f"blocks.1 {copied} tp=- cut=-",
        "blocks.1.up.weight": f"blocks.1 {copied} tp=- cut=-",
        "embedding.weight": f"root {exempt} tp=- cut=-",
        "head.weight": f"head {exempt} tp=- cut=-",
    }  # fmt: skip
    owners = {row.owners for row in plan.parameters.values() if len(row.owners) > 1}
    assert owners == {("embedding.weight", "head.weight")}
    assert [item.plan.label for item in plan.replicated if "blocks" not in item.plan.label] == [
        "embedding.weight"
    ]
    # "head" is not sharded, and not a unit any more; "blocks.1" was asked for as one that is not cut.
    assert (
        list(plan.units) == ["", "blocks.1"]
        and {"embedding", "head", "blocks.0.up"} <= plan.replicated_modules
    )


def test_plan_of_experts_over_ep(te, fake_world):
    """Experts have global names and separate units, sharded over ranks with the same experts."""
    fake_world(4)
    meshes = te_fsdp.Meshes.build(dp_shard=2, ep=2, device_type="cpu")
    options = {"bias": False, "device": "meta"}
    model = nn.ModuleDict(
        {"router": nn.Linear(8, 4, **options), "experts": te.GroupedLinear(2, 8, 16, **options)}
    )
    te_fsdp.fsdp_no_shard(model["experts"].weight1)
    plan = plan_sharding(nn.Sequential(model), meshes, ShardRequest())
    assert shown(plan) == {
        "0.experts.weight0": "0.experts RS/RS/RS tp=- cut=- expert",
        "0.experts.weight1": "0.experts RR/RR/SS tp=- cut=- expert",
        "0.router.weight": "root RS/RS/RS tp=- cut=-",
    }
    (item,) = [item for item in plan.modules if item.experts is not None]
    assert (item.experts.first, item.experts.count, item.experts.total) == (0, 2, 4)
    assert item.meshes.ep_mesh == meshes.ep and item.meshes.weight_mesh == meshes.expert_weight


def test_fully_shard_plans_once(te, fake_world, monkeypatch):
    fake_world(1)
    calls: list[str] = []

    def counting(module: object, name: str) -> None:
        real = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *args, **kwargs: calls.append(name) or real(*args, **kwargs))

    counting(entry, "plan_sharding")
    counting(of_modules, "plan_tree")
    te_fsdp.fully_shard(Net(te), te_fsdp.Meshes.build(device_type="cpu"), units=Block)
    assert calls == ["plan_sharding", "plan_tree"]


def test_too_few_dims_are_rejected_before_binding(te, fake_world):
    fake_world(2)
    meshes = te_fsdp.Meshes.build(tp=2, device_type="cpu")
    options = {"device": "meta", "parallel_mode": "column", **meshes.te_kwargs()}
    model = nn.Sequential(te.LayerNorm(32, device="meta"), te.Linear(32, 32, **options))
    model[1].bias = nn.Parameter(torch.empty((), device="meta"))
    for bind in (
        lambda: te_fsdp.set_device_mesh(model, meshes.tp),
        lambda: plan_sharding(model, meshes, ShardRequest()),
    ):
        with pytest.raises(
            te_fsdp.PlacementError, match=r"1.bias: its rule shards dim 0 over tp: .* got shape \(\)|a scalar"
        ):
            bind()
        assert type(model[0]) is te.LayerNorm and "_te_fsdp_binding" not in model[0].__dict__


def test_no_shard_requires_all_experts_of_a_grouped_parameter(te):
    module = te.GroupedLinear(2, 8, 16, bias=False, device="meta")
    module.single_grouped_weight = True  # as the constructor's option of that name leaves it
    te_fsdp.fsdp_no_shard(module.weight1)
    units = {"": STORAGE["optim_grads_params", "no_shard"]}
    with pytest.raises(te_fsdp.PlacementError, match="weight1 is exempt from sharding, but tied to weight0"):
        plan_storage(module, units)
    te_fsdp.fsdp_no_shard(module.weight0)
    assert {row.owners for row in plan_storage(module, units).values()} == {("weight0", "weight1")}


def test_renamed_parameters_keep_their_plan(te, fake_world):
    """torch.compile renames the parameters of a module that it wraps."""
    fake_world(1)
    model = te_fsdp.fully_shard(
        Net(te), te_fsdp.Meshes.build(device_type="cpu"), strategy={"head": "no_shard"}
    )
    te_fsdp.materialize(model, seed=0)
    plans = [plan_of(parameter) for parameter in model.parameters()]
    model.blocks = nn.ModuleDict({"inner": model.blocks})
    attach_state_to_params(get_sharded_model(model))
    assert [plan_of(parameter) for parameter in model.parameters()] == plans and None not in plans
    te_fsdp.broadcast_params(model)


@pytest.mark.parametrize("other", ["embedding", "row", "column", "own class"])
def test_ties_with_different_tp_sharding_are_rejected(te, fake_world, other):
    """A weight that tp shards in one of its modules only, or along different dims, is rejected by name."""

    class Parallel(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.empty(64, 64))

    fake_world(4)
    meshes = te_fsdp.Meshes.build(dp_shard=2, tp=2, device_type="cpu")
    options = {"bias": False, "device": "meta", **meshes.te_kwargs()}
    head = te.Linear(64, 64, parallel_mode="column", **options)
    tied = {
        "embedding": lambda: nn.Embedding(32, 64, device="meta"),
        "row": lambda: te.Linear(64, 64, parallel_mode="row", **options),
        "column": lambda: te.LayerNormLinear(64, 64, parallel_mode="column", **options),
        "own class": Parallel,
    }[other]()
    tied.weight = head.weight
    model = nn.Sequential(tied, head)
    if other in ("column", "own class"):
        plan_sharding(model, meshes, ShardRequest())
        return
    with pytest.raises(PlacementError, match="0.weight, 1.weight: one parameter, which tp shards") as raised:
        plan_sharding(model, meshes, ShardRequest())
    shown = {"embedding": "0.weight: not sharded", "row": "0.weight: dim 1, "}[other]
    assert shown in str(raised.value) and "1.weight: dim 0, " in str(raised.value)


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
@pytest.mark.parametrize("strategy", ["no_shard", "optim_grads_params"])
def test_sparse_gradients_are_rejected(fake_world, kind, strategy):
    """No reduction supports sparse gradients. Frozen and dense embeddings are sharded."""
    fake_world(2)
    meshes = te_fsdp.Meshes.build(device_type="cpu")
    model = nn.Sequential(kind(8, 4, sparse=True), nn.Linear(4, 4))
    with pytest.raises(PlacementError, match=r"0.weight: Embedding(Bag)?\(sparse=True\): expected dense"):
        plan_sharding(model, meshes, ShardRequest(strategy=strategy))
    model[0].weight.requires_grad_(False)
    plan_sharding(model, meshes, ShardRequest(strategy=strategy))
