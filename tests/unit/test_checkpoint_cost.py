"""Test the cost of checkpoints with many small tensors by counting operations instead of time."""

from __future__ import annotations

import gc
import importlib
import threading
import weakref
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict

from te_fsdp import checkpoint
from te_fsdp.checkpoint import index, lazy_tensors, planner, saving
from te_fsdp.checkpoint.async_save import background
from te_fsdp.checkpoint.host_memory import Block, Staging
from te_fsdp.checkpoint.index import unpickle_metadata
from te_fsdp.checkpoint.manifest import Manifest
from te_fsdp.checkpoint.tensor_entries import Piece, TensorEntry
from te_fsdp.errors import CheckpointError

#: Files of one length and of different shapes, among others.
SHAPES = [(4, 6), (6, 4), (24,), (2, 12), (4, 6), (6, 4)]


def small_model(count: int = 40, seed: int = 0) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Create many parameters of few shapes, with AdamW state."""
    torch.manual_seed(seed)
    parameters = {f"p{n}": nn.Parameter(torch.randn(SHAPES[n % len(SHAPES)])) for n in range(count)}
    model = nn.ParameterDict(parameters)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    return model, optimizer


def values(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Return every tensor of a model and its optimizer, copied."""
    results = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    for name, parameter in model.named_parameters():
        state = optimizer.state[parameter].items()
        results |= {f"{name}.{key}": value.detach().clone() for key, value in state if torch.is_tensor(value)}
    return results


def assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert [name for name in found if not torch.equal(found[name], expected[name])] == []


def counted(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> list[Any]:
    """Record the arguments of each later call of a function."""
    calls: list[Any] = []
    original = getattr(owner, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        calls.append(args)
        return original(*args, **kwargs)

    monkeypatch.setattr(owner, name, call)
    return calls


def test_plain_dcp_load_does_not_unpickle_each_tensor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, optimizer = small_model()
    weights, state = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id=tmp_path / "plain", no_dist=True)
    calls = counted(monkeypatch, lazy_tensors, "load_weights_only")
    metadata = counted(monkeypatch, index, "unpickle_metadata")
    other, its_optimizer = small_model(seed=1)
    checkpoint.load(tmp_path / "plain", other, its_optimizer)
    assert_equal(values(other, its_optimizer), values(model, optimizer))
    # The options of the group alone; there are 160 tensors.
    assert len(calls) < 30 and len(metadata) == 1
    [file] = (tmp_path / "plain").glob("*.distcp")
    data, third = file.read_bytes(), small_model(seed=2)
    before = values(*third)
    for value in (other["p1"], its_optimizer.state[other["p2"]]["exp_avg"]):
        at = data.index(value.detach().numpy().tobytes()) + 17
        file.write_bytes(data[:at] + bytes([data[at] ^ 4]) + data[at + 1 :])
        with pytest.raises(CheckpointError, match=r"its contents have changed \(CRC-32\)"):
            checkpoint.load(tmp_path / "plain", *third)
        assert_equal(values(*third), before)


# ------------------------------------------------------------------------------------------------------ saving


def read_plainly(path: Path) -> dict[str, torch.Tensor]:
    """Return every tensor of a directory, by plain DCP."""
    metadata = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
    state = {key: torch.empty(saved.size, dtype=saved.properties.dtype) for key, saved in metadata.items()}
    dcp.load(state, checkpoint_id=path, no_dist=True)
    return state


def test_tensors_written_in_blocks_are_readable_by_plain_dcp(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, optimizer = small_model()
    extra = {
        "large": torch.randn(300, 301).t(),
        "number": torch.tensor(3.5, dtype=torch.float64),
        "bits": torch.randint(0, 2, (70,)).bool(),
        "complex": torch.randn(3, 2, dtype=torch.complex64),
        "bytes": torch.randint(0, 255, (4, 6), dtype=torch.uint8).view(torch.float8_e4m3fn),
        "halves": [torch.randn(5).to(dtype) for dtype in (torch.bfloat16, torch.float16, torch.bfloat16)],
    }
    checkpoint.save(tmp_path / "warm", nn.Linear(1, 1))
    calls = counted(monkeypatch, torch, "save")
    checkpoint.save(tmp_path / "now", model, optimizer, extra=extra)
    checkpoint.save(tmp_path / "later", model, optimizer, extra=extra, asynchronous=True).result()
    # Once for each dtype and shape; there are 170 tensors.
    assert len(calls) < 20
    expected = {f"model.{name}": parameter.detach() for name, parameter in model.named_parameters()}
    for name, parameter in model.named_parameters():
        expected |= {f"optimizer.state.{name}.{k}": v for k, v in optimizer.state[parameter].items()}
    for name in ("now", "later"):
        result = read_plainly(tmp_path / name)
        assert [key for key in expected if not torch.equal(result[key], expected[key])] == []
        loaded = checkpoint.load(tmp_path / name, *small_model(seed=1))
        for key in ("large", "number", "bits", "complex"):
            assert torch.equal(loaded[key], extra[key]) and torch.equal(result[f"extra/{key}"], extra[key])
        assert torch.equal(loaded["bytes"].view(torch.uint8), extra["bytes"].view(torch.uint8))
        for got, value in zip(loaded["halves"], extra["halves"], strict=True):
            assert got.dtype == value.dtype and torch.equal(got, value)


def test_save_plan_is_cached_until_contents_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The plan is reused while the contents match. New values are saved, and changed entries get a new plan."""
    plans = counted(monkeypatch, saving, "plan_entries")
    model, optimizer = small_model()
    other, its_optimizer = small_model()  # a second model of the same kind has its own plan
    steps = [
        (1, {}, (model, optimizer)),
        (1, {}, (model, optimizer)),
        (2, {}, (other, its_optimizer)),
        (2, {}, (model, optimizer)),
        (3, {"extra": {"t": torch.ones(3)}}, (model, optimizer)),
        (3, {"extra": {"t": torch.zeros(3)}, "asynchronous": True}, (model, optimizer)),
        (4, {"extra": {"t": torch.zeros(4)}}, (model, optimizer)),
        (5, {}, (model,)),
    ]
    for number, (count, options, saved) in enumerate(steps):
        with torch.no_grad():
            for parameter in saved[0].parameters():
                parameter.add_(1)
        expected = [parameter.detach().clone() for parameter in saved[0].parameters()]
        checkpoint.save(tmp_path / str(number), *saved, **options).result()
        assert len(plans) == count, number
        target = small_model(seed=2)[: len(saved)]
        loaded = checkpoint.load(tmp_path / str(number), *target, verify=True)
        assert all(torch.equal(a, b) for a, b in zip(target[0].parameters(), expected, strict=True))
        if options:
            assert torch.equal(loaded["t"], options["extra"]["t"])
    described = counted(monkeypatch, saving, "model_state")
    for name in ("before", "described again, and the same"):
        checkpoint.save(tmp_path / name, model, optimizer)
        optimizer.load_state_dict(deepcopy(optimizer.state_dict()))
    assert len(plans) == 6 and len(described) == 2
    model.p0.data = model.p0.data.double()
    checkpoint.save(tmp_path / "double", model)
    assert len(plans) == 7


def _other_values(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.step()
    optimizer.param_groups[0]["lr"] *= 2
    model.bn.running_mean.add_(1)


def _another_dtype(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model.p["p0"].data = model.p["p0"].data.double()


def _other_memory(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model.p["p0"].data = torch.randn(4, 6).t().contiguous().t()
    state = optimizer.state[model.p["p1"]]
    state["exp_avg"] = torch.full_like(state["exp_avg"], 5.0)


def _another_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.state[model.p["p1"]]["more"] = torch.randn_like(model.p["p1"])
    optimizer.state[model.p["p2"]]["number"] = 3
    del optimizer.state[model.p["p3"]]


def _another_number(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    _another_state(model, optimizer)
    checkpoint.save(_another_number.path, model, optimizer)  # type: ignore[attr-defined]
    optimizer.state[model.p["p2"]]["number"] = 4


def _another_parameter(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    old, new = model.p["p4"], nn.Parameter(torch.randn(2, 5))
    optimizer.state.pop(old)
    model.p["p4"] = new
    optimizer.param_groups[0]["params"] = list(model.parameters())


def _other_names(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model.bn._parameters["tied"] = model.p["p0"]
    model.bn._non_persistent_buffers_set.add("running_var")
    model.other = model.p
    del model.p


def _a_setting(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model.bn.eps = 0.5


def _two_groups(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    group = optimizer.param_groups[0]
    optimizer.param_groups.append({**group, "lr": 3.0, "params": group["params"][20:]})
    group["params"] = group["params"][:20]


@pytest.mark.parametrize(
    ("change", "is_known"),
    [(_other_values, True), (_a_setting, True)]
    + [(change, False) for change in (_another_dtype, _other_memory, _another_state, _another_number)]
    + [(change, False) for change in (_another_parameter, _other_names, _two_groups)],
)
def test_repeated_save_equals_a_first_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: Any, is_known: bool
) -> None:
    """A repeated save equals the first save of a new process, whatever has changed."""
    described = counted(monkeypatch, saving, "model_state")
    parameters, _ = small_model()
    model = nn.ModuleDict({"p": parameters, "bn": nn.BatchNorm1d(3)})
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    extra = {"t": torch.ones(3)}
    checkpoint.save(tmp_path / "before", model, optimizer, extra=extra)
    _another_number.path = tmp_path / "between"  # type: ignore[attr-defined]
    with torch.no_grad():
        change(model, optimizer)
    count = len(described)
    checkpoint.save(tmp_path / "known", model, optimizer, extra=extra, asynchronous=True).result()
    assert len(described) == count + (not is_known)
    background().plans.pop(model)
    checkpoint.save(tmp_path / "anew", model, optimizer, extra=extra)
    one, other = (Manifest.read(tmp_path / name) for name in ("known", "anew"))
    of_each_save = {"files": {}, "number": 0, "saved_at": 0, "save_id": ""}
    assert replace(one, **of_each_save) == replace(other, **of_each_save)
    assert_equal(read_plainly(tmp_path / "known"), read_plainly(tmp_path / "anew"))
    checkpoint.verify(tmp_path / "known")


@pytest.mark.parametrize("first", ["synchronous", "asynchronous"])
def test_device_tensors_are_written_in_plan_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first: str
) -> None:
    """With weights on a GPU and AdamW's steps on the CPU, a synchronous save copies GPU tensors in blocks."""
    plans = counted(monkeypatch, saving, "plan_entries")
    monkeypatch.setattr(Block, "is_on_host", property(lambda block: not block.tensors[0].ndim))
    monkeypatch.setattr(Staging, "copy", lambda _, blocks: [block.rows().clone() for block in blocks])
    model, optimizer = small_model()
    for number in range(3):
        path, asynchronous = tmp_path / str(number), (number % 2 == 0) == (first == "asynchronous")
        checkpoint.save(path, model, optimizer, asynchronous=asynchronous).result()
        target, its_optimizer = small_model(seed=2)
        checkpoint.load(path, target, its_optimizer)
        assert all(torch.equal(a, b) for a, b in zip(model.parameters(), target.parameters(), strict=True))
        for a, b in zip(optimizer.state.values(), its_optimizer.state.values(), strict=True):
            assert all(torch.equal(a[key], b[key]) for key in a)
    assert len(plans) == 1


def test_save_raises_if_file_offsets_differ_from_the_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise readers would find different tensors at the offsets in the metadata."""
    model, optimizer = small_model()
    checkpoint.save(tmp_path / "a", model, optimizer)
    blocks = planner.RankWriter.blocks
    monkeypatch.setattr(planner.RankWriter, "blocks", lambda self: iter([*blocks(self)][::-1]))
    with pytest.raises(CheckpointError, match="pieces are not at the places in the metadata"):
        checkpoint.save(tmp_path / "b", model, optimizer)
    assert [path.name for path in tmp_path.iterdir() if not path.name.startswith(".")] == ["a"]


def test_save_plan_is_recomputed_for_a_different_device() -> None:
    entry = [
        planner.signature_of(
            {"a": TensorEntry((2,), torch.float32, (Piece((0,), torch.empty(2, device=device)),))}
        )
        for device in ("cpu", "meta")
    ]
    assert entry[0] != entry[1]


@pytest.mark.parametrize(
    "step", ["blocks", "finish"]
)  # before its pieces have places in the files, and after
def test_plan_of_a_failed_save_is_not_reused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    model, optimizer = small_model()

    def full(*_: object) -> Any:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(planner.RankWriter, step, full)
        with pytest.raises(CheckpointError, match="No space left"):
            checkpoint.save(tmp_path / "a", model, optimizer)
    checkpoint.save(tmp_path / "a", model, optimizer)
    other = small_model(seed=1)
    checkpoint.load(tmp_path / "a", *other)
    assert_equal(values(*other), values(model, optimizer))


def test_cached_plans_do_not_keep_models_alive(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    checkpoint.save(tmp_path / "a", model)
    weight, plans = weakref.ref(model.weight), background().plans
    assert model in plans
    array = torch.ones(2, 2).numpy()
    memory, model.weight.data = weakref.ref(array), torch.from_numpy(array)
    del array
    checkpoint.save(tmp_path / "b", model)
    assert memory() is not None
    model.weight.data = torch.zeros(2, 2)
    assert memory() is None, "what has taken its place needs the memory"
    gc.collect()  # models of other tests
    count = len(plans)
    del model
    gc.collect()
    assert weight() is None and len(plans) == count - 1


def test_equal_metadata_is_stored_once(tmp_path: Path) -> None:
    """Weights and moments share shard metadata. The garbage collector keeps its state."""
    model, optimizer = small_model()
    for enabled in (True, False):
        (gc.enable if enabled else gc.disable)()
        try:
            checkpoint.save(tmp_path / str(enabled), model, optimizer)
            described = unpickle_metadata((tmp_path / str(enabled) / ".metadata").read_bytes())
            assert gc.isenabled() == enabled
        finally:
            gc.enable()
        tensors = described.state_dict_metadata
        assert tensors["model.p0"].chunks[0] is tensors["optimizer.state.p0.exp_avg"].chunks[0]
        assert tensors["model.p0"].chunks[0] is not tensors["model.p1"].chunks[0]
        for at in described.storage_data:
            assert at.offset is tensors[at.fqn].chunks[at.index].offsets


def asked_of_the_system(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Record the sizes of later host memory allocations."""
    memory_of_host = importlib.import_module(Block.__module__)
    asked, host_memory = list[int](), memory_of_host.host_memory

    def counted(count: int, **options: bool) -> torch.Tensor:
        asked.append(count)
        return host_memory(count, **options)

    monkeypatch.setattr(memory_of_host, "host_memory", counted)
    return asked


def test_load_allocates_memory_in_large_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Small allocations are slow: page faults take as long as reading the same amount from a file."""
    model = torch.nn.ParameterList(
        torch.randn(400_000) for _ in range(8)
    )  # each is more than is read together
    checkpoint.save(tmp_path / "a", model)
    monkeypatch.setattr(background().staging, "slabs", [])
    asked = asked_of_the_system(monkeypatch)
    checkpoint.load(tmp_path / "a", model)
    assert [count for count in asked if count] == [1 << 25], asked


def test_load_reuses_buffers_of_idle_saves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reuse avoids a second allocation. Buffers of a running save are not overwritten."""
    model = torch.nn.ParameterList(torch.randn(400_000) for _ in range(24))
    first = [weight.detach().clone() for weight in model]
    checkpoint.save(tmp_path / "first", model, asynchronous=True).result()
    background().wait()  # buffers are idle when its thread has ended, which is after the result
    goes_on, write = threading.Event(), planner.RankWriter.write

    def later(self: planner.RankWriter, tick: Any) -> Any:
        assert goes_on.wait(60)
        return write(self, tick)

    asked = asked_of_the_system(monkeypatch)
    with torch.no_grad():
        for weight in model:
            weight.neg_()
    checkpoint.load(tmp_path / "first", model)
    assert sum(asked) <= 1 << 25, "for what stands around the last tensors in their file"
    assert all(map(torch.equal, model, first))
    with torch.no_grad():
        for weight in model:
            weight.neg_()
    with monkeypatch.context() as patched:
        patched.setattr(planner.RankWriter, "write", later)
        second = checkpoint.save(tmp_path / "second", model, asynchronous=True)
        checkpoint.load(tmp_path / "first", model)
        assert sum(asked) > 2 << 25 and all(map(torch.equal, model, first))
        goes_on.set()
        second.result()
    checkpoint.load(tmp_path / "second", model)
    assert all(torch.equal(weight, -item) for weight, item in zip(model, first, strict=True))
