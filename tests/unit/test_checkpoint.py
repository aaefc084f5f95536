"""Test checkpoints of one process, without TE or torch.distributed."""

from __future__ import annotations

import copy
import io
import json
from pathlib import Path

import pytest
import torch
from hypothesis import given, strategies as st
from torch import nn

from te_fsdp import checkpoint
from te_fsdp.checkpoint import manifest
from te_fsdp.checkpoint.extra import decode, encode, tensor_slots
from te_fsdp.checkpoint.progress import bytes_bar
from te_fsdp.errors import CheckpointError


class Model(nn.Module):
    def __init__(self, seed: int = 0, width: int = 6) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embedding = nn.Embedding(5, width)
        self.norm = nn.BatchNorm1d(width)
        self.head = nn.Linear(width, 5, bias=False)
        self.head.weight = self.embedding.weight  # tied
        self.frozen = nn.Parameter(torch.randn(3), requires_grad=False)
        self.unused = nn.Parameter(torch.randn(2, 2))
        self.empty = nn.Parameter(torch.randn(0, 4))
        self.register_buffer("scratch", torch.randn(2), persistent=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.embedding(ids)))


OPTIMIZERS = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, betas=(0.8, 0.9)),
    "amsgrad": lambda p: torch.optim.AdamW(p, lr=0.01, amsgrad=True, foreach=False),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.01),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9, nesterov=True),
    "tensor lr": lambda p: torch.optim.Adam(p, lr=torch.tensor(0.01), foreach=False),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.01),
}


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, seed: int = 3) -> list[float]:
    generator = torch.Generator().manual_seed(seed)
    losses = []
    for _ in range(steps):
        ids = torch.randint(0, 5, (8,), generator=generator)
        loss = nn.functional.cross_entropy(model(ids), ids.flip(0))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("fresh", [True, False], ids=["fresh", "used"])
def test_resumed_training_matches_uninterrupted_training(tmp_path: Path, name: str, fresh: bool) -> None:
    model = Model()
    optimizer = OPTIMIZERS[name](model.parameters())
    train(model, optimizer, 2)
    optimizer.param_groups[0]["lr"] *= 0.5
    optimizer.param_groups[0]["initial_lr"] = 0.01
    path = tmp_path / "step-2"
    checkpoint.save(path, model, optimizer, extra={"step": 2})
    expected_state = copy.deepcopy(optimizer.state_dict())
    losses = train(model, optimizer, 3, seed=4)

    other = Model(seed=1)
    other_optimizer = OPTIMIZERS[name](other.parameters())
    if not fresh:
        train(other, other_optimizer, 4, seed=9)
        other_optimizer.param_groups[0]["stray"] = 1
    scratch = other.scratch.clone()
    assert checkpoint.load(path, other, other_optimizer) == {"step": 2}
    loaded_state = other_optimizer.state_dict()
    torch.testing.assert_close(loaded_state["state"], expected_state["state"], rtol=0, atol=0)
    groups = zip(loaded_state["param_groups"], expected_state["param_groups"], strict=True)
    assert all(str(a) == str(b) for a, b in groups)
    assert torch.equal(other.scratch, scratch), "not persistent, not saved"
    assert other.head.weight is other.embedding.weight
    assert train(other, other_optimizer, 3, seed=4) == losses
    assert train(Model(seed=1), OPTIMIZERS[name](model.parameters()), 3, seed=4) != losses


def test_checkpoint_without_optimizer_loads_model_only(tmp_path: Path) -> None:
    model, other = Model(), Model(seed=1)
    checkpoint.save(tmp_path / "a", model)
    assert checkpoint.load(tmp_path / "a", other) == {}
    torch.testing.assert_close(other.state_dict(), model.state_dict(), rtol=0, atol=0)
    with pytest.raises(CheckpointError, match="optimizer: none in the checkpoint"):
        checkpoint.load(tmp_path / "a", other, OPTIMIZERS["adamw"](other.parameters()))


def test_load_lists_all_differences_in_one_error(tmp_path: Path) -> None:
    model = Model()
    checkpoint.save(tmp_path / "a", model, OPTIMIZERS["adamw"](model.parameters()))
    other = Model(seed=1, width=4)
    other.norm.running_mean = other.norm.running_mean.double()
    other.more = nn.Linear(2, 2)
    del other.frozen
    before = {k: v.clone() for k, v in other.state_dict().items()}
    with pytest.raises(CheckpointError) as caught:
        checkpoint.load(tmp_path / "a", other, OPTIMIZERS["momentum"](other.parameters()))
    message = str(caught.value)
    assert "2 missing in the checkpoint (more.bias, more.weight)" in message
    assert "1 only in the checkpoint (frozen)" in message
    assert "5 with a different shape (embedding.weight: saved (5, 6), model has (5, 4)" in message
    assert "optimizer: saved AdamW, this one is SGD" in message
    assert "optimizer group 0: 1 only in the checkpoint (frozen)" in message
    torch.testing.assert_close(other.state_dict(), before, rtol=0, atol=0)


def test_save_rejects_unsupported_optimizer_options_and_states(tmp_path: Path) -> None:
    model = Model()
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    optimizer.param_groups[0]["schedule"] = print
    with pytest.raises(CheckpointError, match=r"optimizer.param_groups\[0\]/schedule: cannot be stored"):
        checkpoint.save(tmp_path / "a", model, optimizer)
    factored = torch.optim.Adafactor(model.parameters())
    train(model, factored, 1)
    with pytest.raises(CheckpointError, match="state without a known place in the parameter"):
        checkpoint.save(tmp_path / "a", model, factored)
    assert not list(tmp_path.iterdir())


def test_save_rejects_meta_tensors(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"2 tensor\(s\) on meta: weight, bias.*materialize"):
        checkpoint.save(tmp_path / "a", nn.Linear(2, 2, device="meta"))


def test_verify_detects_corruption_in_every_file(tmp_path: Path) -> None:
    model = Model()
    path = tmp_path / "a"
    checkpoint.save(path, model, OPTIMIZERS["adamw"](model.parameters()))
    checkpoint.verify(path)
    for file in sorted(path.iterdir()):
        good = file.read_bytes()
        for place in (0, len(good) // 2, len(good) - 1):
            bad = bytearray(good)
            bad[place] ^= 1
            file.write_bytes(bad)
            with pytest.raises(CheckpointError, match=r"damaged|unreadable|newer|no such"):
                checkpoint.verify(path)
        file.write_bytes(good)
    checkpoint.verify(path)


def test_load_rejects_a_manifest_of_a_different_save(tmp_path: Path) -> None:
    """File sizes and digest match but tensors do not. The load detects this before reading data."""
    small, large = Model(), nn.Sequential(nn.Linear(3, 3))
    checkpoint.save(tmp_path / "a", small)
    checkpoint.save(tmp_path / "b", large)
    wrong = manifest.Manifest.read(tmp_path / "a")
    wrong.files = manifest.Manifest.read(tmp_path / "b").files
    wrong.write(tmp_path / "b")
    with pytest.raises(CheckpointError, match="from different saves"):
        checkpoint.load(tmp_path / "b", Model())


@pytest.mark.parametrize("number", [1, 99])
def test_load_rejects_unknown_format_versions(tmp_path: Path, number: int) -> None:
    checkpoint.save(tmp_path / "a", Model())
    newer = manifest.Manifest.read(tmp_path / "a")
    newer.format_version = number
    newer.write(tmp_path / "a")
    told = rf"written by a different version of te_fsdp.*expected format version 2 to 4, got {number}\."
    with pytest.raises(CheckpointError, match=told):
        checkpoint.load(tmp_path / "a", Model())


def test_latest_is_the_newest_complete_checkpoint(tmp_path: Path) -> None:
    assert checkpoint.latest(tmp_path) is None and checkpoint.latest(tmp_path / "none") is None
    for name in ("step-20", "step-9", "step-100"):
        checkpoint.save(tmp_path / name, Model())
    assert checkpoint.latest(tmp_path) == tmp_path / "step-100"
    assert checkpoint.latest(tmp_path / "step-100") == tmp_path / "step-100"  # given itself
    checkpoint.save(tmp_path / "step-50", Model())  # a run that was rolled back
    assert checkpoint.latest(str(tmp_path)) == tmp_path / "step-50"
    data = next((tmp_path / "step-50").glob("*.distcp"))
    data.write_bytes(data.read_bytes()[:-1])
    assert checkpoint.latest(tmp_path) == tmp_path / "step-100"
    (tmp_path / "step-100" / "te_fsdp.json").write_text("{")
    assert checkpoint.latest(tmp_path) == tmp_path / "step-9"


def test_save_does_not_overwrite_existing_paths(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    checkpoint.save(tmp_path / "empty", Model())  # an empty directory is as good as none
    (tmp_path / "file").touch()
    for name in ("empty", "file"):
        with pytest.raises(CheckpointError, match=f"{name}: exists already.*step-<number>"):
            checkpoint.save(tmp_path / name, Model())


def test_each_element_is_written_once(tmp_path: Path) -> None:
    model = Model()
    checkpoint.save(tmp_path / "a", model)
    listed = json.loads((tmp_path / "a" / "te_fsdp.json").read_text())
    assert "head.weight" not in listed["parameters"], "tied: stored under its first name"
    assert listed["parameters"]["embedding.weight"] == {
        "shape": [5, 6],
        "dtype": "float32",
        "layout": None,
        "format": None,
    }
    assert set(listed["versions"]) >= {"te_fsdp", "torch"}


def test_compiled_modules_are_saved_under_original_names(tmp_path: Path) -> None:
    model, other = Model(), Model(seed=1)
    checkpoint.save(tmp_path / "a", torch.compile(model))
    checkpoint.load(tmp_path / "a", other)
    assert torch.equal(model.unused, other.unused)


def test_progress_bar_is_shown_on_rank_0_only(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    checkpoint.save(tmp_path / "a", Model(), progress=True)
    assert "saving a" in capsys.readouterr().err
    with bytes_bar("x", 10, None) as tick:
        tick(10)
    assert capsys.readouterr().err == ""


PLAIN = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5)
VALUES = st.recursive(
    PLAIN,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text(max_size=4), inner, max_size=3)
    ),
    max_leaves=12,
)


@given(st.dictionaries(st.text(max_size=4), VALUES, max_size=4))
def test_extra_values_round_trip_unchanged(value: dict) -> None:
    encoded, entries = encode(value)
    assert not entries
    back = decode(json.loads(json.dumps(encoded)), {})
    assert back == value and repr(back) == repr(value)


def test_tensors_in_extra_round_trip(tmp_path: Path) -> None:
    extra = {"a": {"b/c": torch.arange(6).view(2, 3).t()}, "a/b": {"c": (torch.tensor(1.5).bfloat16(),)}}
    checkpoint.save(tmp_path / "a", Model(), extra=extra)
    back = checkpoint.load(tmp_path / "a", Model())
    assert torch.equal(back["a"]["b/c"], extra["a"]["b/c"])
    assert (
        torch.equal(back["a/b"]["c"][0], extra["a/b"]["c"][0]) and back["a/b"]["c"][0].dtype == torch.bfloat16
    )
    encoded, entries = encode(extra)
    assert set(tensor_slots(encoded)) == set(entries) == {"extra/a/b~1c", "extra/a~1b/c/0"}


@pytest.mark.parametrize("value", [{"a": [{1: 2}]}, {"te_fsdp.tuple": []}, {"a": {"te_fsdp.value": [1]}}])
def test_extra_round_trips_any_dict_key(tmp_path: Path, value: dict) -> None:
    """Cover keys that are not strings, and keys that the JSON encoding reserves."""
    checkpoint.save(tmp_path / "a", Model(), extra=value)
    assert checkpoint.load(tmp_path / "a", Model()) == value


@pytest.mark.parametrize(
    ("value", "words"),
    [
        pytest.param(
            {"path": Path("x")}, r"extra/path: cannot be stored.*got PosixPath.*str\(path\)", id="path"
        ),
        pytest.param({"m": torch.empty(2, device="meta")}, "extra/m: cannot be stored", id="meta tensor"),
        pytest.param({"f": io.BytesIO()}, "got BytesIO", id="stream"),
    ],
)
def test_save_rejects_unsupported_extra_values(tmp_path: Path, value: dict, words: str) -> None:
    with pytest.raises(CheckpointError, match=words):
        checkpoint.save(tmp_path / "a", Model(), extra=value)
    assert not list(tmp_path.iterdir())
