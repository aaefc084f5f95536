"""Test _extra_state entries, which are one tensor each."""

from __future__ import annotations

import copy
import io
import math
import operator
import pickle
from typing import Any

import pytest
import torch

from te_fsdp.errors import CheckpointError
from te_fsdp.layout import ExpertRange
from te_fsdp.modules import extra_state
from te_fsdp.modules.extra_state import (
    DamagedEntryError,
    describe_load_condition,
    has_expert_rows,
    marks_of,
    pack,
    pack_experts,
    unpack,
)

MARKS = [(), (1,), (2,), (16,), (1, 1), (1, 2), (2, 4), (8, 256)]


def state() -> dict[str, Any]:
    generator = torch.Generator().manual_seed(3)
    return {
        "recipe": {"margin": 0, "fp8_format": "HYBRID"},
        "scaling_fwd.scale": torch.rand(6, generator=generator),
        "scaling_fwd.amax_history": torch.rand(4, 6, generator=generator),
    }


def pack_old(marks: tuple[int, ...], state_: dict[str, Any] | None) -> torch.Tensor:
    """Return an entry as versions before 0.3 wrote it: shape ``(n, *marks)``."""
    data = b"" if state_ is None and max(marks, default=1) == 1 else extra_state._text(marks)
    if state_ is not None:
        data += pack(state_).numpy().tobytes().removeprefix(extra_state._text(()))
        # At least one row more, so that the shape shows that there is state.
        data = data.ljust((extra_state._rows(marks) + 1) * math.prod(marks), b"\0")
    data += b"\0" * (-len(data) % math.prod(marks))
    entry = torch.tensor(list(data), dtype=torch.uint8)
    return entry.view(len(data) // math.prod(marks), *marks)


def state_of_experts() -> dict[str, Any]:
    result = state()
    return {**result, "recipe": {**result["recipe"], "num_gemms": 3}}


def check_same(found: dict[str, Any] | None) -> None:
    expected = state()
    assert found is not None and found.keys() == expected.keys() and found["recipe"] == expected["recipe"]
    for key in expected.keys() - {"recipe"}:
        assert torch.equal(found[key], expected[key]), key


def saved(tensor: torch.Tensor) -> torch.Tensor:
    stream = io.BytesIO()
    torch.save({"entry": tensor}, stream)
    stream.seek(0)
    return torch.load(stream, weights_only=True)["entry"]


@pytest.mark.parametrize(
    "change",
    [
        torch.clone,
        torch.Tensor.float,
        torch.Tensor.double,
        torch.Tensor.bfloat16,
        torch.Tensor.half,
        torch.Tensor.long,
        copy.deepcopy,
        saved,
        lambda entry: (entry.float() + entry.float()) / 2,
    ],
)
@pytest.mark.parametrize("marks", MARKS)
def test_state_entries_survive_copies_and_casts(marks, change):
    check_same(unpack(change(pack_old(marks, state())))[1])
    plain = unpack(change(pack_old(marks, None)))
    assert plain == ((marks, None) if marks else None)


@pytest.mark.parametrize("marks", MARKS[1:])
def test_entry_shape_preserves_the_load_condition(marks):
    entry = pack_old(marks, None)
    for changed in (torch.zeros_like(entry), entry.float() * 1.7, entry.to(torch.float8_e4m3fn), entry != 0):
        assert unpack(changed) == (marks, None)


@pytest.mark.parametrize("marks", MARKS)
def test_changed_bytes_of_an_entry_are_detected(marks):
    entry = pack_old(marks, state())
    changed = entry.clone()
    changed.view(-1)[entry.numpy().tobytes().index(b'"crc"') + 40] += 1  # among the values, which follow
    with pytest.raises(DamagedEntryError):
        unpack(changed)
    with pytest.raises(DamagedEntryError):
        unpack(entry.float() * 1.7)
    if marks:
        with pytest.raises(DamagedEntryError):
            unpack(torch.zeros_like(entry))


def test_load_conditions_are_parsed_from_text():
    for marks in MARKS[1:]:
        assert marks_of(describe_load_condition(marks)) == marks
    assert marks_of("something else") == (-1,)


def test_entries_behave_as_plain_uint8_tensors():
    entry = pack(state()).as_subclass(extra_state._Entry)
    assert isinstance(entry, torch.Tensor) and entry.dtype == torch.uint8
    assert entry.numel() == entry.size().numel() == entry.size(0) and len(entry.size()) == 1
    assert not operator.ne(torch.Size([0]), entry.size()), (
        "DCP compares the sizes of saved entries in this way"
    )
    for made in (entry.clone(), entry.cpu() + 0, saved(entry), entry.sum()):
        assert type(made) is torch.Tensor


def test_plain_dcp_rejects_copies_of_expert_state():
    """Expert rows without indices would overwrite those of other ranks."""
    entry = pack_experts(state_of_experts(), 2).as_subclass(extra_state.ExpertEntry)
    for own in (entry, entry.clone(), entry.float(), entry.detach().cpu(), copy.deepcopy(entry)):
        with pytest.raises(
            CheckpointError, match=r"fc1\._extra_state: delayed scaling's state of experts in a copy"
        ):
            own.__create_write_items__("fc1._extra_state", own)
    assert type(saved(entry)) is torch.Tensor
    entry.experts = ExpertRange(2, len(entry), 2 + len(entry))
    (item,) = entry.__create_write_items__("fc1._extra_state", entry)
    assert tuple(item.index.offset) == (2, 0) and item.tensor_data.size[0] == 2 + len(entry)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float32])
def test_expert_state_rows_round_trip(dtype):
    """The state with one row per expert is unchanged in any dtype that a script casts entries to."""
    own = state_of_experts()
    entry = pack_experts(own, 7).to(dtype)
    assert len(entry) == 3 and has_expert_rows(entry)
    marks, result = unpack(entry)
    assert marks == () and result["recipe"] == own["recipe"]
    assert all(torch.equal(result[key], own[key]) for key in own if key != "recipe")
    assert not has_expert_rows(pack(own)) and not has_expert_rows(pack_old((2,), own))


def test_stock_te_rejects_entries_of_sharded_modules(te, monkeypatch):
    """Entries of unsharded modules are accepted like TE's own empty entry."""
    module = te.Linear(16, 16)
    for marks in MARKS[1:]:
        if set(marks) == {1}:
            module.set_extra_state(pack_old(marks, None))
            continue
        with pytest.raises(RuntimeError):
            module.set_extra_state(pack_old(marks, None))
    with pytest.raises(RuntimeError):
        module.set_extra_state(pack(state()))
    monkeypatch.setenv("NVTE_ALLOW_UNSAFE_PICKLE_EXTRA_STATE", "1")
    with pytest.raises(pickle.UnpicklingError):
        module.set_extra_state(pack_old((2,), None))


@pytest.mark.parametrize("marks", MARKS[1:])
def test_load_conditions_of_older_entries_are_enforced(marks):
    """Versions before 0.3 recorded the mesh of quantized or stacked weights in the entry, first as a key."""
    for entry in (pack_old(marks, None), {describe_load_condition(marks): None}):
        if set(marks) == {1}:  # of modules that are not sharded
            extra_state.decode_extra_state(torch.nn.Linear(2, 2), entry)
            continue
        with pytest.raises(
            CheckpointError, match="Linear: weights of a plain state dict: expected no condition"
        ):
            extra_state.decode_extra_state(torch.nn.Linear(2, 2), entry)
