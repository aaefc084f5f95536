"""Test the record on a parameter: sharing, copies, pickles."""

from __future__ import annotations

import copy
import io
import weakref

import torch
import torch.distributed as dist
from torch import nn

import te_fsdp
from te_fsdp import records
from te_fsdp.records import (
    copy_param_attrs,
    get_or_create_record,
    get_record,
    label_of,
    param_owners,
    replace_local_tensor,
    share_record,
)


class _State:
    """Stands in for a sharding state."""


def _parameter(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.zeros(*(shape or (2,))))


def test_reading_a_record_does_not_create_one():
    parameter = _parameter()
    assert get_record(parameter) is None
    assert records.PARAMETER not in parameter.__dict__
    assert label_of(parameter) == "a parameter of shape (2,)"
    get_or_create_record(parameter).label = "layer.weight"
    assert label_of(parameter) == "layer.weight"


def test_replacement_parameter_has_its_own_record_and_user_attributes():
    old, state = _parameter(), _State()
    old.mine, old.skipped = "mine", 1
    (
        get_or_create_record(old).label,
        get_or_create_record(old).state,
        get_or_create_record(old).replaced_by,
    ) = (
        "weight",
        weakref.ref(state),
        ("weight", "a cast"),
    )
    old.requires_grad_(False)
    new = replace_local_tensor(old, torch.ones(2, dtype=torch.float64), leave_out=("skipped",))
    assert new.dtype == torch.float64 and not new.requires_grad
    assert new.mine == "mine" and not hasattr(new, "skipped")
    assert (
        get_or_create_record(new).label == "weight"
        and get_or_create_record(new).state is get_or_create_record(old).state
    )
    assert get_or_create_record(new).replaced_by is None, (
        "the mark of an object that was lost belongs to that object"
    )
    get_or_create_record(new).label = "other"
    assert get_or_create_record(old).label == "weight"


def test_replacement_parameter_keeps_its_own_attributes():
    old, new = _parameter(), _parameter()
    old.mine, new.mine = 1, 2
    get_or_create_record(old).label = "old"
    get_or_create_record(new).label = "new"
    copy_param_attrs(old, new)
    assert new.mine == 2 and get_or_create_record(new).label == "new"


def test_unsharded_parameter_shares_the_record():
    shard, gathered = _parameter(), _parameter()
    get_or_create_record(gathered).label = "of an earlier shard"
    get_or_create_record(shard).label = "weight"
    share_record(shard, gathered)
    get_or_create_record(shard).tp_replica = True
    assert get_or_create_record(gathered).label == "weight" and get_or_create_record(gathered).tp_replica


def test_deep_copied_record_drops_references():
    state = _State()
    facts = records.ParameterRecord(
        label="weight", tp_replica=True, state=weakref.ref(state), replaced_by=("a", "b")
    )
    copied = copy.deepcopy(facts)
    assert (copied.label, copied.tp_replica, copied.state) == ("weight", True, None)
    assert copied.replaced_by == ("", "copy.deepcopy") and copied.copied_from() is facts


def test_pickled_parameter_loads_with_weights_only():
    parameter = _parameter()
    parameter.mine = 3
    get_or_create_record(parameter).label = "weight"
    file = io.BytesIO()
    torch.save(parameter, file)
    file.seek(0)
    read = torch.load(file, weights_only=True)
    assert read.mine == 3
    assert get_record(read) is None and not get_or_create_record(read).tp_replica


def test_param_owners_returns_every_name_of_tied_parameters():
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    model[1].weight = model[0].weight
    results = list(param_owners(model))
    assert [place.label for place in results] == ["0.weight", "1.weight"]
    assert results[0].parameter is results[1].parameter and results[1].module is model[1]


def test_parameter_tied_after_binding_keeps_its_record(fake_world):
    fake_world(2)
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    te_fsdp.set_device_mesh(model, dist.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",)))
    first, second = model[0].weight, model[1].weight
    first.mine = 1
    get_or_create_record(first).no_shard = True
    model[1].weight = first
    assert model[1].weight is first and first.mine == 1
    assert get_or_create_record(first).no_shard and get_or_create_record(first).tp_replica
    assert not get_or_create_record(second).no_shard
