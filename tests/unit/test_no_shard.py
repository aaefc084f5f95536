"""Marks of `fsdp_no_shard`: what they cover, what they survive; ties across units."""

from __future__ import annotations

import copy
import logging

import pytest
import torch
from torch import nn

import te_fsdp
from te_fsdp.errors import OrderError, PlacementError
from te_fsdp.sharding.no_shard import plan_no_shard
from te_fsdp.sharding.strategies import STRATEGIES
from te_fsdp.sharding.ties import check_ties

SHARD, WHOLE = STRATEGIES["optim_grads_params"], STRATEGIES["no_shard"]


class Net(nn.Module):
    """An encoder in two levels, two blocks, a head, and a parameter of its own."""

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
    """Names of what stays whole."""
    rows = {name.replace("__", "."): row for name, row in units.items()}
    return [exempt.label for exempt in plan_no_shard(model, {"": SHARD, **rows}).parameters]


def test_a_module_a_parameter_and_several():
    model = Net()
    assert planned(model) == []
    te_fsdp.fsdp_no_shard(model.encoder)
    assert planned(model) == ENCODER
    te_fsdp.fsdp_no_shard(model.scale)
    te_fsdp.fsdp_no_shard(iter([model.blocks[1], model.head.bias]))
    assert planned(model) == ["blocks.1.bias", "blocks.1.weight", *ENCODER, "head.bias", "scale"]
    plan = plan_no_shard(model, {"": SHARD})
    assert {id(model.encoder), id(model.encoder[1]), id(model.blocks[1])} <= plan.whole
    assert not {id(model), id(model.head), id(model.blocks)} & plan.whole
    assert plan.ignored() == {exempt.parameter for exempt in plan.parameters}
    assert list(plan.without_units({"": SHARD, "encoder": SHARD, "head": SHARD})) == ["", "head"]


def test_what_is_added_below_a_marked_module_is_exempt_too():
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
    """What TE's reset_parameters does: new parameters under the old names."""
    for module in model.modules():
        for name, parameter in list(module._parameters.items()):
            module.register_parameter(name, nn.Parameter(torch.zeros(parameter.shape)))
    return model


@pytest.mark.parametrize("change", [copy.deepcopy, _to_empty, _assigned, _reset])
def test_marks_survive(change):
    model = Net("meta")
    te_fsdp.fsdp_no_shard([model.encoder, model.scale])
    before = dict(model.named_parameters())
    changed = change(model)
    assert changed is model or changed.scale is not model.scale
    assert all(before[name] is not p for name, p in changed.named_parameters())
    assert planned(changed) == [*ENCODER, "scale"]


def test_a_parameter_without_owner_keeps_its_mark_itself():
    scale = nn.Parameter(torch.ones(2))
    te_fsdp.fsdp_no_shard(scale)
    model = Net()
    model.scale = scale
    assert planned(model) == ["scale"]


def test_strategy_no_shard_holds_for_the_innermost_unit():
    model = Net()
    everything = planned(model, encoder=WHOLE, blocks__0=SHARD)
    assert everything == ENCODER
    rows = {"": WHOLE, "blocks.0": SHARD}
    plan = plan_no_shard(model, rows)
    assert "blocks.0.weight" not in [e.label for e in plan.parameters] and len(plan.parameters) == 9
    assert not any(exempt.cut_state for exempt in plan.parameters)
    assert id(model) in plan_no_shard(model, {"": WHOLE}).whole
    te_fsdp.fsdp_no_shard(model.head)
    assert all(exempt.cut_state for exempt in plan_no_shard(model, {"": SHARD}).parameters)


def test_a_plan_changes_nothing_until_it_is_committed(caplog):
    model = Net()
    plan = plan_no_shard(model, {"": SHARD, "head": WHOLE})
    assert planned(model) == []
    with caplog.at_level(logging.INFO, "te_fsdp"):
        plan.commit(torch.device("cpu"))
    assert planned(model) == ["head.bias", "head.weight"]
    (record,) = caplog.records
    assert "2 parameters of 6 elements" in record.getMessage() and "head.bias" in record.getMessage()


def test_refused_arguments():
    model = Net()
    for wrong in (3, "encoder", torch.ones(2), [model.head, 3], [model.head.weight.data]):
        with pytest.raises(TypeError, match="fsdp_no_shard: expected"):
            te_fsdp.fsdp_no_shard(wrong)
    assert planned(model) == []


def test_ties_with_an_exempt_owner():
    model = Net()
    model.blocks[0].weight = model.head.weight
    te_fsdp.fsdp_no_shard(model.head)
    with pytest.raises(PlacementError, match=r"head.weight is exempt.*tied to blocks.0.weight"):
        planned(model)
    te_fsdp.fsdp_no_shard(model.head.weight)
    plan = plan_no_shard(model, {"": SHARD, "blocks.0": SHARD})
    assert [e.label for e in plan.parameters] == ["blocks.0.weight", "head.bias"]
    assert {(id(model.head), "weight"), (id(model.blocks[0]), "weight")} <= plan.keys
    check_ties(model, {"", "blocks.0"}, plan.keys)


@pytest.mark.parametrize(
    ("units", "error"),
    [
        ((), None),
        (("blocks.0",), "blocks.0.weight in blocks.0, head.weight in the root"),
        (("blocks.1",), None),
    ],
)
def test_ties_across_units(units, error):
    model = Net()
    model.head.weight = model.blocks[0].weight
    if error is None:
        check_ties(model, {"", *units})
        return
    with pytest.raises(PlacementError, match=error):
        check_ties(model, {"", *units})


def test_another_name_of_a_unit_is_no_tie():
    model = Net()
    model.last = model.blocks[1]
    check_ties(model, {"", "blocks.1"})


def test_forward_methods_of_modules_that_gather_nothing():
    model = Net()
    with pytest.raises(OrderError, match=r"register_forward_method\(Linear, 'forward'\): expected a unit"):
        te_fsdp.register_forward_method(model.head, "forward")
    with pytest.raises(PlacementError, match="Linear has no method 'generate'"):
        te_fsdp.register_forward_method(model.head, "generate")
    te_fsdp.fsdp_no_shard(model.head)
    te_fsdp.register_forward_method(model.head, "forward")
