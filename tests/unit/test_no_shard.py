"""Test marks of `fsdp_no_shard`, ties across units."""

from __future__ import annotations

import copy
import logging

import pytest
import torch
from torch import nn

import te_fsdp
from te_fsdp.errors import OrderError, PlacementError
from te_fsdp.layout import REPLICATED, STORAGE, Storage
from te_fsdp.plan import ShardRequest, plan_sharding, plan_storage, replicated_parameters
from te_fsdp.records import ParameterPlan

SHARD, WHOLE = STORAGE["optim_grads_params", "no_shard"], STORAGE["no_shard", "no_shard"]


class Net(nn.Module):
    """An encoder in two levels, two blocks, a head, and its own parameter."""

    def __init__(self, device: str = "cpu") -> None:
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Linear(2, 2, device=device), nn.Sequential(nn.Linear(2, 2, device=device))
        )
        self.blocks = nn.ModuleList(nn.Linear(2, 2, device=device) for _ in range(2))
        self.head = nn.Linear(2, 2, device=device)
        self.scale = nn.Parameter(torch.ones(2, device=device))


ENCODER = ["encoder.0.bias", "encoder.0.weight", "encoder.1.0.bias", "encoder.1.0.weight"]


def planned(model: nn.Module, **units: object) -> list[str]:
    """Return the names of replicated parameters."""
    rows = {name.replace("__", "."): row for name, row in units.items()}
    return [plan.label for plan in exempt(model, {"": SHARD, **rows})]


def exempt(model: nn.Module, units: dict[str, Storage]) -> list[ParameterPlan]:
    """Return the plans of replicated parameters."""
    return [item.plan for item in replicated_parameters(model, plan_storage(model, units))]


def test_fsdp_no_shard_accepts_modules_and_parameters():
    model = Net()
    assert planned(model) == []
    te_fsdp.fsdp_no_shard(model.encoder)
    assert planned(model) == ENCODER
    te_fsdp.fsdp_no_shard(model.scale)
    te_fsdp.fsdp_no_shard(iter([model.blocks[1], model.head.bias]))
    assert planned(model) == ["blocks.1.bias", "blocks.1.weight", *ENCODER, "head.bias", "scale"]


def test_replicated_modules_do_not_become_units(fake_world):
    fake_world(1)
    model = Net("meta")
    te_fsdp.fsdp_no_shard([model.encoder, model.scale, model.blocks[1], model.head.bias])
    units = ["encoder", "head", "blocks.0"]
    plan = plan_sharding(model, te_fsdp.Meshes.build(device_type="cpu"), ShardRequest(units))
    assert list(plan.units) == ["", "blocks.0", "head"]
    assert plan.replicated_modules == {"encoder", "encoder.0", "encoder.1", "encoder.1.0", "blocks.1"}
    assert {item.parameter for item in plan.replicated} == {
        *model.encoder.parameters(),
        *model.blocks[1].parameters(),
        model.scale,
        model.head.bias,
    }


def test_modules_added_below_a_marked_module_are_exempt():
    model = Net()
    te_fsdp.fsdp_no_shard(model.encoder)
    model.encoder.append(nn.Linear(2, 2, bias=False))
    assert planned(model) == [*ENCODER, "encoder.2.weight"]


def _to_empty(model: Net) -> Net:
    return model.to_empty(device="cpu")


def _assigned(model: Net) -> Net:
    model.load_state_dict(Net().state_dict(), assign=True)
    return model


def _reset(model: Net) -> Net:
    """Do the same as TE's reset_parameters: new parameters under the old names."""
    for module in model.modules():
        for name, parameter in list(module._parameters.items()):
            module.register_parameter(name, nn.Parameter(torch.zeros(parameter.shape)))
    return model


@pytest.mark.parametrize("change", [copy.deepcopy, _to_empty, _assigned, _reset])
def test_no_shard_marks_survive_model_changes(change):
    model = Net("meta")
    te_fsdp.fsdp_no_shard([model.encoder, model.scale])
    before = dict(model.named_parameters())
    changed = change(model)
    assert changed is model or changed.scale is not model.scale
    assert all(before[name] is not p for name, p in changed.named_parameters())
    assert planned(changed) == [*ENCODER, "scale"]


def test_no_shard_mark_of_a_parameter_without_module_is_kept():
    scale = nn.Parameter(torch.ones(2))
    te_fsdp.fsdp_no_shard(scale)
    model = Net()
    model.scale = scale
    assert planned(model) == ["scale"]


def test_strategy_no_shard_applies_to_the_innermost_unit():
    model = Net()
    everything = planned(model, encoder=WHOLE, blocks__0=SHARD)
    assert everything == ENCODER
    rows = {"": WHOLE, "blocks.0": SHARD}
    plans = exempt(model, rows)
    assert "blocks.0.weight" not in [plan.label for plan in plans] and len(plans) == 9
    assert {plan.storage for plan in plans} == {WHOLE}
    te_fsdp.fsdp_no_shard(model.head)
    assert {plan.storage for plan in exempt(model, {"": SHARD})} == {STORAGE[REPLICATED, "no_shard"]}


def test_planning_does_not_mark_the_model(caplog, fake_world):
    fake_world(1)
    model, meshes = Net(), te_fsdp.Meshes.build(device_type="cpu")
    strategy = {"": "optim", "head": "no_shard"}
    plan_sharding(model, meshes, ShardRequest(strategy=strategy))
    assert planned(model) == [] and all(not p.__dict__ for p in model.parameters())
    with caplog.at_level(logging.INFO, "te_fsdp"):
        te_fsdp.fully_shard(model, meshes, strategy=strategy)
    notes = {row.name: row.note for row in te_fsdp.report(model)}
    assert [name for name, note in notes.items() if note.startswith("no_shard")] == [
        "head.weight",
        "head.bias",
    ]
    (record,) = caplog.records
    assert "2 parameters of 6 elements" in record.getMessage() and "head.bias" in record.getMessage()


def test_fsdp_no_shard_rejects_wrong_arguments():
    model = Net()
    for wrong in (3, "encoder", torch.ones(2), [model.head, 3], [model.head.weight.data]):
        with pytest.raises(TypeError, match="fsdp_no_shard: what: expected"):
            te_fsdp.fsdp_no_shard(wrong)
    assert planned(model) == []


def test_tie_between_replicated_and_sharded_modules_is_rejected():
    model = Net()
    model.blocks[0].weight = model.head.weight
    te_fsdp.fsdp_no_shard(model.head)
    with pytest.raises(PlacementError, match=r"head.weight is exempt.*tied to blocks.0.weight"):
        planned(model)
    te_fsdp.fsdp_no_shard(model.head.weight)
    rows = plan_storage(model, {"": SHARD, "blocks.0": SHARD})
    assert [item.plan.label for item in replicated_parameters(model, rows)] == [
        "blocks.0.weight",
        "head.bias",
    ]
    assert rows[id(model.head), "weight"].storage == rows[id(model.blocks[0]), "weight"].storage
    assert rows[id(model.head), "weight"].owners == ("blocks.0.weight", "head.weight")


@pytest.mark.parametrize(
    ("units", "error"),
    [
        ((), None),
        (("blocks.0",), "blocks.0.weight in blocks.0, head.weight in the root"),
        (("blocks.1",), None),
    ],
)
def test_tie_across_units_is_rejected(units, error):
    model = Net()
    model.head.weight = model.blocks[0].weight
    rows = dict.fromkeys(("", *units), SHARD)
    if error is None:
        plan_storage(model, rows)
        return
    with pytest.raises(PlacementError, match=error):
        plan_storage(model, rows)


def test_second_name_of_a_unit_is_not_a_tie():
    model = Net()
    model.last = model.blocks[1]
    rows = plan_storage(model, {"": SHARD, "blocks.1": SHARD})
    assert rows[id(model.last), "weight"].label == "blocks.1.weight"


def test_register_forward_method_requires_a_unit():
    model = Net()
    with pytest.raises(OrderError, match=r"register_forward_method\(Linear, 'forward'\): expected a unit"):
        te_fsdp.register_forward_method(model.head, "forward")
    with pytest.raises(PlacementError, match="Linear has no method 'generate'"):
        te_fsdp.register_forward_method(model.head, "generate")
    te_fsdp.fsdp_no_shard(model.head)
    te_fsdp.register_forward_method(model.head, "forward")
