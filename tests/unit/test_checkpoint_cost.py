"""What checkpoints of many small tensors cost, by counting what is done for each tensor; no clock is asked."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict

from te_fsdp import checkpoint
from te_fsdp.checkpoint.portable import dcp as dcp_files
from te_fsdp.checkpoint.portable.dcp import open_dcp

#: Files of one length and of different shapes, among others.
SHAPES = [(4, 6), (6, 4), (24,), (2, 12), (4, 6), (6, 4)]


def small_model(count: int = 40, seed: int = 0) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Many parameters of few kinds, and AdamW's state of them."""
    torch.manual_seed(seed)
    parameters = {f"p{n}": nn.Parameter(torch.randn(SHAPES[n % len(SHAPES)])) for n in range(count)}
    model = nn.ParameterDict(parameters)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    return model, optimizer


def values(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Every tensor of a model and its optimizer, copied."""
    found = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    for name, parameter in model.named_parameters():
        state = optimizer.state[parameter].items()
        found |= {f"{name}.{key}": value.detach().clone() for key, value in state if torch.is_tensor(value)}
    return found


def assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert [name for name in found if not torch.equal(found[name], expected[name])] == []


def counted(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> list[Any]:
    """Arguments of each call of a function, from now on."""
    calls: list[Any] = []
    original = getattr(owner, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        calls.append(args)
        return original(*args, **kwargs)

    monkeypatch.setattr(owner, name, call)
    return calls


def test_a_plain_directory_is_not_unpickled_tensor_by_tensor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, optimizer = small_model()
    weights, state = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id=tmp_path / "plain", no_dist=True)
    calls = counted(monkeypatch, dcp_files, "read_objects")
    other, its_optimizer = small_model(seed=1)
    checkpoint.load(tmp_path / "plain", other, its_optimizer)
    assert_equal(values(other, its_optimizer), values(model, optimizer))
    # Each kind of tensor once, and the options of the group; there are 160 tensors.
    assert len(calls) < 30


def test_only_files_that_are_alike_up_to_their_data_share_what_was_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = {name: torch.arange(6.0) + n for n, name in enumerate("abc")}
    dcp.save(state, checkpoint_id=tmp_path / "plain", no_dist=True)
    [file] = (tmp_path / "plain").glob("*.distcp")
    last = max(open_dcp(tmp_path / "plain").windows, key=lambda window: window.offset)
    data = bytearray(file.read_bytes())
    data[data.index(b"archive/data/0", last.offset)] ^= 1  # torch goes by the list at the end of its files
    file.write_bytes(data)
    calls = counted(monkeypatch, dcp_files, "read_objects")
    for name, tensor in open_dcp(tmp_path / "plain").tensors.items():
        assert torch.equal(tensor.whole(), state[name])
    assert len(calls) == 2
