"""Test edge cases in one process: unusual optimizers, unusual tensors, plain DCP directories."""

from __future__ import annotations

import errno
import os
import shutil
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict

from te_fsdp import checkpoint, emulation
from te_fsdp.checkpoint.extra import encode
from te_fsdp.checkpoint.manifest import Manifest
from te_fsdp.checkpoint.model_state import OwnedTensor
from te_fsdp.checkpoint.optimizer_state import SavedOptimizer
from te_fsdp.checkpoint.saving import as_failed_save
from te_fsdp.cli import main
from te_fsdp.errors import CheckpointError


def model(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))


def step(model: nn.Module, optimizer: torch.optim.Optimizer, shape: tuple[int, ...] = (2, 3)) -> None:
    model(torch.ones(shape)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def states(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    named = {
        f"{name}.{key}": v for name, p in model.named_parameters() for key, v in optimizer.state[p].items()
    }
    return {key: value for key, value in named.items() if isinstance(value, torch.Tensor)}


def test_files_are_complete_when_they_are_synced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A power failure loses unsynced data, so all writes must precede fsync."""
    synced, real = {}, os.fsync

    def fsync(number: int) -> None:
        synced[Path(os.readlink(f"/proc/self/fd/{number}")).name] = os.fstat(number).st_size
        real(number)

    monkeypatch.setattr(os, "fsync", fsync)
    checkpoint.save(tmp_path / "a", model())
    sizes = {path.name: path.stat().st_size for path in (tmp_path / "a").iterdir()}
    assert len(sizes) == 4 and {name: synced[name] for name in sizes} == sizes


@pytest.mark.parametrize("kind", ["save", "keep_last", "checkpoint", "file", "folder"])
def test_names_appear_only_after_contents_are_synced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """The order is: files, their directory, the rename to the final name, the parent directory."""
    checkpoint.save(tmp_path / "a", model())
    events: list[tuple[str, Path]] = []
    fsync, rename, rmtree = os.fsync, os.rename, shutil.rmtree

    def note(event: str, path: Any) -> None:
        events.append((event, Path(path)))

    def contents(path: Path) -> list[Path]:
        return [path, *path.rglob("*")] if path.is_dir() else [path]

    def synced(number: int) -> None:
        note("sync", os.readlink(f"/proc/self/fd/{number}"))
        fsync(number)

    def renamed(old: Any, new: Any, **where: Any) -> None:
        if Path(old).name.startswith(".") and Path(new).parent == tmp_path:
            done = {path for event, path in events if event == "sync"}
            assert [p for p in contents(Path(old)) if p not in done] == [], "would be lost with the power"
            assert events[-1][1] == Path(old), "entries are synced when all are there"
        note("rename", new)
        rename(old, new, **where)

    def removed(path: Any, **how: Any) -> None:
        note("remove", path)
        rmtree(path, **how)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "rename", renamed)
    monkeypatch.setattr(shutil, "rmtree", removed)
    if kind in ("save", "keep_last"):
        checkpoint.save(tmp_path / "b", model(), keep_last=1 if kind == "keep_last" else None)
    else:
        name, to = {
            "checkpoint": ("b", "checkpoint"),
            "file": ("b.pt", "torch"),
            "folder": ("b", "safetensors"),
        }[kind]
        assert main(["ckpt", "convert", str(tmp_path / "a"), str(tmp_path / name), "--to", to]) == 0
    shown = [event for event in events if event[1].parent == tmp_path or event[1] == tmp_path]
    last = [("sync", tmp_path)]
    if kind == "keep_last":
        # A directory whose files go must not have its old name after a crash.
        (hidden,) = [path for event, path in shown if event == "remove"]
        assert shown[-3:-1] == [("rename", hidden), *last]
        shown = shown[:-3]
    assert shown[-2][0] == "rename" and shown[-1:] == last


def test_load_rejects_an_edited_manifest(tmp_path: Path) -> None:
    """A changed digit leaves the JSON valid but changes its meaning."""
    ours = model()
    checkpoint.save(tmp_path / "a", ours, torch.optim.SGD(ours.parameters(), lr=0.125))
    manifest = tmp_path / "a" / "te_fsdp.json"
    text = manifest.read_text()
    assert text.count("0.125") == 1
    manifest.write_text(text.replace("0.125", "0.625"))
    with pytest.raises(CheckpointError, match=r"unreadable manifest \(expected digest"):
        checkpoint.load(tmp_path / "a", ours)


def test_failed_save_reports_whether_the_checkpoint_is_complete(tmp_path: Path) -> None:
    lost = CheckpointError("on rank(s) 1: the rank has ended")
    assert "No checkpoint appeared at the path" in str(as_failed_save(tmp_path / "a", lost, "0" * 32))
    checkpoint.save(tmp_path / "a", model())
    ours = Manifest.read(tmp_path / "a").save_id
    assert "was complete by then, and exists" in str(as_failed_save(tmp_path / "a", lost, ours))
    assert "by then" not in str(as_failed_save(tmp_path / "a", lost, "0" * 32)), (
        "the checkpoint of another job exists"
    )


@pytest.mark.parametrize("options", [{"fused": True}, {"foreach": True}], ids=["fused", "foreach"])
def test_loaded_optimizer_state_has_the_strides_of_its_parameter(
    tmp_path: Path, options: dict[str, bool]
) -> None:
    """Torch creates state with the parameter's strides, which multi-tensor kernels require."""
    ours, other = (nn.Conv2d(2, 2, 3).to(memory_format=torch.channels_last) for _ in range(2))
    optimizer, fresh = (torch.optim.AdamW(m.parameters(), **options) for m in (ours, other))
    step(ours, optimizer, (1, 2, 4, 4))
    checkpoint.save(tmp_path / "a", ours, optimizer)
    checkpoint.load(tmp_path / "a", other, fresh)
    there, here = states(ours, optimizer), states(other, fresh)
    assert {k: v.stride() for k, v in here.items()} == {k: v.stride() for k, v in there.items()}
    assert not here["weight.exp_avg"].is_contiguous()
    torch.testing.assert_close(here, there, rtol=0, atol=0)


def test_optimizer_steps_of_scalar_bf16_parameters_stay_exact(tmp_path: Path) -> None:
    """The bf16 parameter is a scalar like its step. bf16 cannot represent 257."""
    ours, other = nn.Module(), nn.Module()
    ours.scale, other.scale = nn.Parameter(torch.tensor(2.0)), nn.Parameter(torch.tensor(1.0).bfloat16())
    optimizer, fresh = (torch.optim.AdamW(m.parameters()) for m in (ours, other))
    ours.scale.grad = torch.tensor(1.0)
    optimizer.step()
    optimizer.state[ours.scale]["step"].fill_(257)
    checkpoint.save(tmp_path / "a", ours, optimizer)
    checkpoint.load(tmp_path / "a", other, fresh)
    assert fresh.state[other.scale]["step"].item() == 257
    assert fresh.state[other.scale]["exp_avg"].dtype == torch.bfloat16


def test_optimizer_steps_are_on_the_device_that_fused_requires() -> None:
    """A fused kernel reads steps on the device. A non-fused optimizer has them on the CPU."""
    parameter = nn.Parameter(torch.empty(2, 3, device="meta"))
    optimizer = torch.optim.AdamW([parameter])
    for fused, device in ((False, "cpu"), (True, "meta")):
        optimizer.state[parameter].update(step=torch.tensor(3.0), exp_avg=torch.empty(2, 3, device="meta"))
        options = {**encode(optimizer.defaults)[0], "fused": fused}
        saved = {"groups": [{"parameters": ["x"], "options": options}]}
        owned = {id(parameter): OwnedTensor("x", nn.Module(), "x", parameter)}
        assert SavedOptimizer(optimizer, saved, owned).restore_groups({"x"}) == []
        assert optimizer.state[parameter]["step"].device.type == device
        assert optimizer.state[parameter]["exp_avg"].shape == (2, 3)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_save_and_load_ignore_the_default_device(tmp_path: Path, asynchronous: bool) -> None:
    """Programs may call `torch.set_default_device("cuda")`. The test uses meta, which loses all values."""
    ours, other = model(), model(1)
    optimizer, fresh = (torch.optim.AdamW(m.parameters()) for m in (ours, other))
    step(ours, optimizer)
    extra = {"data": torch.arange(3), "rng": checkpoint.rng_state()}
    dcp.save(ours.state_dict(), checkpoint_id=tmp_path / "plain")
    with torch.device("meta"):
        assert torch.empty(1).is_meta
        checkpoint.save(tmp_path / "a", ours, optimizer, extra=extra, asynchronous=asynchronous).result()
        loaded = checkpoint.load(tmp_path / "a", other, fresh, verify=True)
        checkpoint.set_rng_state(loaded["rng"])
        checkpoint.load(tmp_path / "plain", other)
    assert loaded["data"].tolist() == [0, 1, 2]
    torch.testing.assert_close(other.state_dict(), ours.state_dict(), rtol=0, atol=0)
    torch.testing.assert_close(states(other, fresh), states(ours, optimizer), rtol=0, atol=0)


@pytest.mark.parametrize("recipe", ["Float8CurrentScaling", "MXFP8BlockScaling", "NVFP4BlockScaling"])
def test_format_conversion_ignores_the_default_device(te: Any, recipe: str, tmp_path: Path) -> None:
    from transformer_engine.common import recipe as recipes

    with te.quantized_model_init(recipe=getattr(recipes, recipe)()):
        ours = te.Linear(32, 32, bias=False, params_dtype=torch.bfloat16)
    other = te.Linear(32, 32, bias=False, params_dtype=torch.bfloat16)
    checkpoint.save(tmp_path / "a", ours)
    with torch.device("meta"):
        loaded = checkpoint.load(tmp_path / "a", other)
    assert "from dequantized values" in loaded.converted["weight"]
    assert torch.equal(other.weight, ours.weight.dequantize(dtype=torch.float32).bfloat16())


def test_save_rejects_optimizer_state_of_a_removed_parameter(tmp_path: Path) -> None:
    ours = model()
    optimizer = torch.optim.AdamW(ours.parameters())
    step(ours, optimizer)
    del optimizer.param_groups[0]["params"][0]
    ours[0].weight = nn.Parameter(torch.ones(3, 3))
    with pytest.raises(
        CheckpointError, match=r"AdamW: state of a parameter that the model does not have.*\(3, 3\)"
    ):
        checkpoint.save(tmp_path / "a", ours, optimizer)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("kind", "before"),
    [
        ("sgd", "no step"),
        ("sgd", "one layer"),
        ("adamw", "no step"),
        ("adamw", "one layer"),
        ("fused", "no step"),  # it begins the state of all parameters at its first step
    ],
)
def test_load_removes_optimizer_state_missing_in_the_checkpoint(
    te: Any, tmp_path: Path, kind: str, before: str
) -> None:
    """Otherwise momentum and steps of the abandoned run would affect the loaded weights."""

    def build() -> tuple[nn.Sequential, torch.optim.Optimizer]:
        ours = model()
        if kind == "fused":
            return ours, te.optimizers.FusedAdam(ours.parameters(), lr=0.1)
        if kind == "adamw":
            return ours, torch.optim.AdamW(ours.parameters(), lr=0.1)
        return ours, torch.optim.SGD(ours.parameters(), lr=0.1, momentum=0.9)

    def partly(ours: nn.Sequential, optimizer: torch.optim.Optimizer) -> None:
        """Run a step in which the second layer has no gradient."""
        ours[0](torch.ones(2, 3)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    saved, there = build(), build()
    if before == "one layer":
        partly(*saved)
    checkpoint.save(tmp_path / "a", *saved)
    step(*there)
    assert set(states(*there)) > set(states(*saved)), "there is something to drop"
    checkpoint.load(tmp_path / "a", *there)
    torch.testing.assert_close(states(*there), states(*saved), rtol=0, atol=0)
    step(*saved)
    step(*there)
    torch.testing.assert_close(there[0].state_dict(), saved[0].state_dict(), rtol=0, atol=0)


def test_load_removes_state_entries_missing_in_the_checkpoint(tmp_path: Path) -> None:
    """Such entries come from an option that only the abandoned run had enabled."""
    saved, there = model(), model()
    plain = torch.optim.AdamW(saved.parameters(), lr=0.1)
    maxima = torch.optim.AdamW(there.parameters(), lr=0.1, amsgrad=True)
    step(saved, plain)
    step(there, maxima)
    checkpoint.save(tmp_path / "a", saved, plain)
    checkpoint.load(tmp_path / "a", there, maxima)
    assert states(there, maxima).keys() == states(saved, plain).keys()


@pytest.mark.parametrize("was_buffer", [True, False])
def test_load_casts_a_buffer_that_became_a_parameter(tmp_path: Path, was_buffer: bool) -> None:
    def build(is_buffer: bool, value: torch.Tensor) -> nn.Module:
        made = nn.Module()
        made.register_buffer("x", value) if is_buffer else setattr(made, "x", nn.Parameter(value))
        return made

    checkpoint.save(tmp_path / "a", build(was_buffer, torch.full((3,), 1.5)))
    other = build(not was_buffer, torch.zeros(3, dtype=torch.bfloat16))
    loaded = checkpoint.load(tmp_path / "a", other)
    assert "float32 -> bfloat16" in loaded.converted["x"] and other.x.tolist() == [1.5] * 3


def test_parameter_remainders_are_reset_by_a_load_without_the_optimizer(te: Any, tmp_path: Path) -> None:
    """The remainders of old bf16 weights are invalid for loaded weights. Moments are kept."""
    from transformer_engine.pytorch.optimizers import FusedAdam

    ours, other = (model(seed).bfloat16() for seed in (0, 1))
    optimizer = FusedAdam(other.parameters(), lr=0.01, master_weights=True, store_param_remainders=True)
    for parameter in other.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    before = {k: v.clone() for k, v in states(other, optimizer).items()}
    assert any(v.count_nonzero() for k, v in before.items() if k.endswith("master_param")), "there are some"
    checkpoint.save(tmp_path / "a", ours)
    checkpoint.load(tmp_path / "a", other, optimizer, allow=["optimizer"])
    expected = {k: v.zero_() if k.endswith("master_param") else v for k, v in before.items()}
    torch.testing.assert_close(states(other, optimizer), expected, rtol=0, atol=0)


@pytest.mark.parametrize("quantized", [False, True], ids=["bf16", "quantized"])
@pytest.mark.parametrize("with_optimizer", [False, True])
def test_main_weights_of_fp32_parameters_are_not_loaded(
    te: Any, quantized: bool, with_optimizer: bool, tmp_path: Path
) -> None:
    """FusedAdam creates them, but updates the parameters themselves. Loads restored the initial values."""
    from transformer_engine.common.recipe import Float8CurrentScaling
    from transformer_engine.pytorch.optimizers import FusedAdam

    trained = te.Linear(32, 16)
    optimizer = FusedAdam(trained.parameters(), lr=0.5, master_weights=True)
    step(trained, optimizer, (16, 32))
    checkpoint.save(tmp_path / "a", trained, optimizer)
    with te.quantized_model_init(enabled=quantized, recipe=Float8CurrentScaling()):
        other = te.Linear(32, 16, params_dtype=torch.bfloat16)
    adam = FusedAdam(other.parameters(), lr=0.5, master_weights=True)
    if with_optimizer:
        checkpoint.load(tmp_path / "a", other, adam)
        for saved, parameter in zip(trained.parameters(), other.parameters(), strict=True):
            assert torch.equal(adam.state[parameter]["master_param"], saved.detach())
    else:
        checkpoint.load(tmp_path / "a", other)
    value = other.weight.dequantize() if quantized else other.weight
    # Rounding: half of the last of E4M3's three bits of mantissa, or of bf16's seven. E4M3's least number is
    # 2**-9 / 448 of the largest one, and weights are below 1.
    rtol, atol = (2**-4, 1e-5) if quantized else (2**-8, 0)
    torch.testing.assert_close(value.float(), trained.weight, rtol=rtol, atol=atol)


@pytest.mark.parametrize("recipe", ["DelayedScaling", "Float8CurrentScaling"])
def test_columnwise_only_weights_round_trip(te: Any, recipe: str, tmp_path: Path) -> None:
    """On Hopper, TE may keep only the transpose of a weight. A load must update it."""
    from transformer_engine.common import recipe as recipes

    def build(seed: int, *, turned: bool) -> Any:
        torch.manual_seed(seed)
        with te.quantized_model_init(recipe=getattr(recipes, recipe)()):
            made = te.Linear(32, 16, bias=False)
        if turned:
            made.weight.update_usage(rowwise_usage=True, columnwise_usage=True)
            made.weight.update_usage(rowwise_usage=False, columnwise_usage=True)
            assert made.weight.get_metadata()["data"] is None
        return made

    def value(linear: Any) -> torch.Tensor:
        buffers = linear.weight.get_metadata()
        data = buffers["data_transpose"].t() if buffers["data"] is None else buffers["data"]
        return data.view(torch.float8_e4m3fn).float() * buffers["fp8_scale_inv"]

    emulation.switch_arch("9.0")
    try:
        expected = value(build(0, turned=False))
        for saved in (True, False):
            checkpoint.save(tmp_path / str(saved), build(0, turned=saved))
            for loaded in (True, False):
                other = build(1, turned=loaded)
                assert not torch.equal(value(other), expected)
                checkpoint.load(tmp_path / str(saved), other)
                assert torch.equal(value(other), expected), (saved, loaded)
    finally:
        emulation.switch_arch("10.0")


def test_load_rejects_corrupted_plain_dcp_metadata(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / ".metadata").write_bytes(b"garbage")
    with pytest.raises(CheckpointError, match=r"a: unreadable .metadata \(.*Fix: the checkpoint is damaged"):
        checkpoint.load(tmp_path / "a", model())


@pytest.mark.parametrize("kind", ["Adam", "AdamW", "NAdam", "RAdam", "Adamax", "SGD", "RMSprop", "Adagrad"])
def test_plain_dcp_loads_every_torch_optimizer_by_name(tmp_path: Path, kind: str) -> None:
    """States are matched by name for every torch optimizer. A different class is rejected if the options show it."""
    ours, other = model(), model(1)
    build = getattr(torch.optim, kind)
    optimizer, fresh = (build(m.parameters(), lr=0.1) for m in (ours, other))
    step(ours, optimizer)
    weights, state = get_state_dict(ours, optimizer)
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id=tmp_path / "a")
    checkpoint.load(tmp_path / "a", other, fresh)
    torch.testing.assert_close(states(other, fresh), states(ours, optimizer), rtol=0, atol=0)
    if kind in ("Adam", "AdamW", "SGD"):
        with pytest.raises(CheckpointError, match=f"optimizer: saved {kind}, this one is Rprop"):
            checkpoint.load(tmp_path / "a", other, torch.optim.Rprop(other.parameters()))


def test_plain_dcp_loads_numbered_optimizer_state_by_group_names_only(tmp_path: Path) -> None:
    """Param group names identify the parameters. DCP keeps no order, so numbers alone are ambiguous."""
    ours, other = model(), model(1)
    optimizer = torch.optim.AdamW(reversed(list(ours.named_parameters())))
    fresh = torch.optim.AdamW(other.parameters())
    step(ours, optimizer)
    saved = {"model": ours.state_dict(), "optimizer": optimizer.state_dict()}
    dcp.save(saved, checkpoint_id=tmp_path / "named")
    checkpoint.load(tmp_path / "named", other, fresh)
    torch.testing.assert_close(states(other, fresh), states(ours, optimizer), rtol=0, atol=0)
    del saved["optimizer"]["param_groups"][0]["param_names"]
    dcp.save(saved, checkpoint_id=tmp_path / "numbered")
    with pytest.raises(CheckpointError, match="optimizer: left, it numbers its parameters without names"):
        checkpoint.load(tmp_path / "numbered", other, fresh)


def _failing_fsync(number: int, of_directories: bool) -> Callable[[int], None]:
    """Return an os.fsync that fails with an errno for directories alone, or for files alone."""
    real = os.fsync

    def fsync(handle: int) -> None:
        if stat.S_ISDIR(os.fstat(handle).st_mode) == of_directories:
            raise OSError(number, os.strerror(number))
        real(handle)

    return fsync


@pytest.mark.parametrize("of_directories", [True, False], ids=["directory", "file"])
@pytest.mark.parametrize(
    ("number", "text"),
    [(errno.ENOSPC, "disk is full"), (errno.EDQUOT, "quota"), (errno.EIO, "cannot be written")],
    ids=["full", "quota", "lost"],
)
def test_failed_fsync_fails_the_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, text: str, of_directories: bool
) -> None:
    """Bug class: a save ignores an fsync error of a file or directory, whose data may not be on disk."""
    monkeypatch.setattr(os, "fsync", _failing_fsync(number, of_directories))
    with pytest.raises(CheckpointError, match=text):
        checkpoint.save(tmp_path / "a", model())


def test_save_succeeds_on_file_systems_without_directory_fsync(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control: EINVAL for a directory means that the file system does not support the operation."""
    monkeypatch.setattr(os, "fsync", _failing_fsync(errno.EINVAL, True))
    checkpoint.save(tmp_path / "a", model())
    checkpoint.load(tmp_path / "a", model())
