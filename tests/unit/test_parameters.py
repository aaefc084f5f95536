"""The record on a parameter: who shares it, who has a copy, and what pickles see."""

from __future__ import annotations

import copy
import io
import weakref

import torch
import torch.distributed as dist
from torch import nn

import te_fsdp
from te_fsdp import parameters
from te_fsdp.parameters import carry_over, facts_of, label_of, noted, places_of, share, successor


class _State:
    """Stands in for a sharding state."""


def _parameter(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.zeros(*(shape or (2,))))


def test_nothing_is_made_by_looking():
    parameter = _parameter()
    assert facts_of(parameter) is None
    assert parameters.KEY not in parameter.__dict__
    assert label_of(parameter) == "a parameter of shape (2,)"
    noted(parameter).label = "layer.weight"
    assert label_of(parameter) == "layer.weight"


def test_a_successor_has_a_record_of_its_own_and_the_users_attributes():
    old, state = _parameter(), _State()
    old.mine, old.skipped = "mine", 1
    noted(old).label, noted(old).state, noted(old).replaced = (
        "weight",
        weakref.ref(state),
        ("weight", "a cast"),
    )
    old.requires_grad_(False)
    new = successor(old, torch.ones(2, dtype=torch.float64), leave_out=("skipped",))
    assert new.dtype == torch.float64 and not new.requires_grad
    assert new.mine == "mine" and not hasattr(new, "skipped")
    assert noted(new).label == "weight" and noted(new).state is noted(old).state
    assert noted(new).replaced is None, "the mark of an object that was lost belongs to that object"
    noted(new).label = "other"
    assert noted(old).label == "weight"


def test_what_a_successor_has_stays():
    old, new = _parameter(), _parameter()
    old.mine, new.mine = 1, 2
    noted(old).label = "old"
    noted(new).label = "new"
    carry_over(old, new)
    assert new.mine == 2 and noted(new).label == "new"


def test_a_gathered_parameter_shares_the_record():
    shard, gathered = _parameter(), _parameter()
    noted(gathered).label = "of an earlier shard"
    noted(shard).label = "weight"
    share(shard, gathered)
    noted(shard).tp_replica = True
    assert noted(gathered).label == "weight" and noted(gathered).tp_replica


def test_copies_leave_references_behind():
    state = _State()
    facts = parameters.Facts(label="weight", tp_replica=True, state=weakref.ref(state), replaced=("a", "b"))
    copied = copy.deepcopy(facts)
    assert (copied.label, copied.tp_replica, copied.state) == ("weight", True, None)
    assert copied.replaced == ("", "copy.deepcopy") and copied.copy_of() is facts


def test_pickles_can_be_read_with_weights_only():
    parameter = _parameter()
    parameter.mine = 3
    noted(parameter).label = "weight"
    file = io.BytesIO()
    torch.save(parameter, file)
    file.seek(0)
    read = torch.load(file, weights_only=True)
    assert read.mine == 3
    assert facts_of(read) is None and not noted(read).tp_replica


def test_places_name_tied_parameters_wherever_they_are():
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    model[1].weight = model[0].weight
    found = list(places_of(model, "root"))
    assert [place.label for place in found] == ["root.0.weight", "root.1.weight"]
    assert found[0].parameter is found[1].parameter and found[1].owner is model[1]


def test_a_parameter_that_is_tied_after_binding_keeps_its_own_record(fake_world):
    fake_world(2)
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    te_fsdp.set_device_mesh(model, dist.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",)))
    first, second = model[0].weight, model[1].weight
    first.mine = 1
    noted(first).no_shard = True
    model[1].weight = first
    assert model[1].weight is first and first.mine == 1
    assert noted(first).no_shard and noted(first).tp_replica
    assert not noted(second).no_shard
