"""Check that a load detects all kinds of corruption before it changes anything."""

from __future__ import annotations

import copy
import io
import json
import os
import random
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

from te_fsdp import checkpoint
from te_fsdp.checkpoint import lazy_tensors, manifest as manifests, reading, shard_files
from te_fsdp.checkpoint.index import read_index
from te_fsdp.checkpoint.lazy_tensors import DcpRecord
from te_fsdp.checkpoint.load_source import Source
from te_fsdp.errors import CheckpointError
from tests.unit.damage import (
    DATA,
    INDEX,
    MANIFEST,
    METADATA,
    as_format_2,
    digest,
    loaded_or_error,
    places,
    put,
    sealed,
    training,
    two_saves,
)

# --------------------------------------------------------------------------------------------------- corruptions


def other(value: Any, chance: random.Random) -> Any:
    if type(value) is bool:
        return not value
    if isinstance(value, int | float):
        return value + chance.choice((1, -1, 64))
    if isinstance(value, str):
        return chance.choice((value + "x", value[1:] + "0", "float64"))
    return chance.choice((None, [value], 0)) if value is not None else 1


@pytest.fixture(scope="module")
def saves(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return two_saves(tmp_path_factory.mktemp("saves"))


class Corruption:
    KINDS = ("flip", "truncate", "extend", "swap", "foreign", "zero", "repeat", "edit", "downgrade")

    def __init__(self, chance: random.Random, files: dict[str, bytes], foreign: dict[str, bytes]) -> None:
        self.kind, self.name = chance.choice(self.KINDS), chance.choice(sorted(files))
        self.files, data = dict(files), bytearray(files[self.name])
        at, length = chance.randrange(len(data)), chance.randrange(1, 200)
        if self.kind == "flip":
            data[at] ^= 1 << chance.randrange(8)
        elif self.kind == "truncate":
            del data[at:]
        elif self.kind == "extend":
            data += bytes(length)
        elif self.kind == "swap":
            second = chance.choice([name for name in files if name != self.name])
            self.files[second], data = bytes(data), bytearray(files[second])
        elif self.kind == "foreign":
            data = bytearray(foreign[self.name])
        elif self.kind == "zero":
            data[at : at + length] = bytes(len(data[at : at + length]))
        elif self.kind == "repeat":  # one part of a file where another was
            source = chance.randrange(len(data))
            part = data[source : source + length]
            data[at : at + len(part)] = part[: len(data) - at]
        else:
            self.name = MANIFEST
            body = json.loads(files[MANIFEST])
            del body["digest"]
            if self.kind == "downgrade":
                body |= {"format_version": 2, "save_id": ""}
            way = chance.choice([w for w in places(body) if w[0] != "files" or self.kind == "edit"])
            drop = chance.random() < 0.2
            body = put(body, way, lambda h, k: h.pop(k) if drop else h.__setitem__(k, other(h[k], chance)))
            data = bytearray(sealed(body))
        self.files[self.name] = bytes(data)


def test_load_detects_200_random_corruptions_and_changes_nothing(
    saves: tuple[Path, Path], tmp_path: Path
) -> None:
    """A load detects a corrupted byte anywhere in any file and changes no bit of model or optimizer.

    None is exempt: tables cover the files of tensors from the first byte to the last, and are covered by the manifest.
    """
    files, foreign = ({p.name: p.read_bytes() for p in path.iterdir()} for path in saves)
    path, chance = tmp_path / "a", random.Random(13)
    shutil.copytree(saves[0], path)
    victims = [training(1), training(1, steps=0)]
    before = [digest(*victim) for victim in victims]
    missed, kinds = [], dict.fromkeys(Corruption.KINDS, 0)
    while sum(kinds.values()) < 200:
        corruption = Corruption(chance, files, foreign)
        if corruption.files == files:
            continue  # zeros where zeros were
        kinds[corruption.kind] += 1
        for name, data in corruption.files.items():
            (path / name).write_bytes(data)
        victim = victims[sum(kinds.values()) % 2]
        if not loaded_or_error(path, *victim):
            missed.append(f"{corruption.kind} {corruption.name}")
        assert [digest(*v) for v in victims] == before, f"{corruption.kind} {corruption.name}"
    assert missed == [] and min(kinds.values()) > 10, kinds
    for name, data in files.items():
        (path / name).write_bytes(data)
    assert loaded_or_error(path, *victims[1]) == "", "put back, it loads"
    assert digest(*victims[1]) != before[1], "the digest sees what a load changes"


def test_load_errors_name_the_corrupted_file_and_tensor(saves: tuple[Path, Path], tmp_path: Path) -> None:
    path = tmp_path / "a"
    shutil.copytree(saves[0], path)
    model, optimizer = training(1)
    stored = dcp.FileSystemReader(path).read_metadata().storage_data
    place = next(s for i, s in stored.items() if i.fqn == "model.2.weight")
    good = bytearray((path / DATA).read_bytes())
    good[place.offset + place.length // 2] ^= 1
    (path / DATA).write_bytes(good)
    span = f"bytes {place.offset} to {place.offset + place.length}"
    error = loaded_or_error(path, model, optimizer)
    text = f"{DATA}: its contents have changed (CRC-32 of {span}), of model.2.weight."
    assert text in error and "Nothing was loaded" in error
    shutil.copy(saves[1] / DATA, path / DATA)
    assert f"{DATA}: it was written by a different save" in loaded_or_error(path, model, optimizer)
    shutil.copy(saves[0] / DATA, path / DATA)
    shutil.copy(saves[1] / METADATA, path / METADATA)
    listed = json.loads((path / MANIFEST).read_text())
    del listed["digest"]
    raw = (path / METADATA).read_bytes()
    listed["files"][METADATA] = [len(raw), shard_files.crc32((path / METADATA).read_bytes())]
    (path / MANIFEST).write_bytes(sealed(listed))
    assert "from different saves" in loaded_or_error(path, model, optimizer)
    listed["files"][DATA] = [len(good), shard_files.crc32((saves[0] / DATA).read_bytes())]
    (path / MANIFEST).write_bytes(sealed(listed))
    text = f"files.{DATA}: expected the offset of its table of checksums, got none"
    assert text in loaded_or_error(path, model, optimizer)


def test_load_rejects_pipes_and_directories_in_place_of_files(
    saves: tuple[Path, Path], tmp_path: Path
) -> None:
    class StillWaitingError(BaseException):
        pass

    def alarm(*args: object) -> None:
        raise StillWaitingError

    path, before = tmp_path / "a", signal.signal(signal.SIGALRM, alarm)
    signal.setitimer(signal.ITIMER_REAL, 20.0)
    try:
        for name, problem in ((DATA, "is not a file"), (INDEX, "is not a file"), (MANIFEST, "is missing")):
            shutil.copytree(saves[0], path, dirs_exist_ok=True)
            (path / name).unlink()
            os.mkfifo(path / name)
            assert f"{name} {problem}" in loaded_or_error(path, *training(1))
            with pytest.raises(CheckpointError, match="no such|is missing|is not a file"):
                checkpoint.verify(path)
            (path / name).unlink()
            (path / name).mkdir()
            assert f"{name} {problem}" in loaded_or_error(path, *training(1))
            (path / name).rmdir()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)


def test_load_rejects_a_new_checkpoint_edited_to_an_old_format(
    saves: tuple[Path, Path], tmp_path: Path
) -> None:
    """Tables are removed, sizes and file checksums are valid. DCP's metadata still has the new format's mark."""
    path = tmp_path / "a"
    shutil.copytree(saves[0], path)
    as_format_2(path, save_id="")
    assert "from different saves, or te_fsdp.json was changed" in loaded_or_error(path, *training(1))


def test_load_reads_each_required_byte_once(
    saves: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Data that was not requested, such as the optimizer, is not read."""
    read: list[int] = []
    preadv = os.preadv
    monkeypatch.setattr(os, "preadv", lambda f, b, at: read.append(preadv(f, b, at)) or read[-1])
    model, optimizer = training(1)
    stored = dcp.FileSystemReader(saves[0]).read_metadata().storage_data
    index, data = (manifests.Manifest.read(saves[0]).files[name] for name in (INDEX, DATA))
    known = index[0] + data[0] - data[2]  # the index, and both tables of checksums
    for what, prefixes in ((optimizer, ("model.", "optimizer.", "extra/")), (None, ("model.", "extra/"))):
        read.clear()
        checkpoint.load(saves[0], model, what)
        assert sum(read) == known + sum(s.length for i, s in stored.items() if i.fqn.startswith(prefixes))


def test_checksum_table_has_12_bytes_per_tensor(saves: tuple[Path, Path]) -> None:
    stored = dcp.FileSystemReader(saves[0]).read_metadata().storage_data
    size, _, begin = manifests.Manifest.read(saves[0]).files[DATA]
    assert size - begin == 12 * len(stored) + 42 + len(DATA)


# ----------------------------------------------------------------------------------------------- older checkpoints


def test_format_2_checkpoints_load_without_tensor_checksums(
    saves: tuple[Path, Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """They load with their file checksums. The log says how to verify more."""
    path = tmp_path / "a"
    shutil.copytree(saves[0], path)
    as_format_2(path)
    checkpoint.verify(path)
    model, optimizer = training(1)
    with caplog.at_level("INFO", "te_fsdp"):
        checkpoint.load(path, model, optimizer)
    assert [r.message for r in caplog.records].count(
        f"{path}: a format without piece checksums: only load(..., verify=True) detects damaged tensors"
    ) == 1
    expected, want_optimizer = training(0)
    assert digest(model, optimizer) == digest(expected, want_optimizer)
    data = bytearray((path / DATA).read_bytes())
    at = data.index(next(expected.parameters()).detach().numpy().tobytes())
    data[at] ^= 1
    (path / DATA).write_bytes(data)
    assert loaded_or_error(path, model, optimizer) == "", "why pieces have checksums"
    with pytest.raises(CheckpointError, match="have changed"):
        checkpoint.load(path, model, optimizer, verify=True)


# -------------------------------------------------------------------------------------------------- pieces of tensors


@pytest.mark.parametrize("shape", [(), (1,), (7,), (300, 5), (2, 3, 4)], ids=str)
@pytest.mark.parametrize("kind", ["plain", "transposed", "low", "eight"])
def test_stored_tensors_of_any_layout_are_readable(tmp_path: Path, shape: tuple[int, ...], kind: str) -> None:
    """Cover every dtype and stride, with several tensors in one file."""
    dtype = {"low": torch.bfloat16, "eight": torch.uint8}.get(kind, torch.float32)
    holder = nn.Module()
    for index in range(3):
        value = torch.arange(index, index + int(torch.tensor(shape).prod()) if shape else index + 1).to(dtype)
        value = value.reshape(shape)
        if kind == "transposed" and len(shape) > 1:
            value = value.reshape(shape[::-1]).permute(*reversed(range(len(shape))))
        holder.register_buffer(f"b{index}", value)
    checkpoint.save(tmp_path / "a", holder)
    fresh = copy.deepcopy(holder)
    for buffer in fresh.buffers():
        buffer.zero_()
    checkpoint.load(tmp_path / "a", fresh)
    torch.testing.assert_close(dict(fresh.named_buffers()), dict(holder.named_buffers()), rtol=0, atol=0)


def test_stored_tensors_of_equal_length_keep_their_strides(tmp_path: Path) -> None:
    """Tensors with equal shape, dtype and length but different strides differ only in their pickles."""
    values = [torch.arange(16.0).view(4, 4), torch.arange(16.0).view(4, 4).t()]
    lengths = set()
    for value in (*values, *values):
        torch.save(value, tmp_path / "a")
        piece = torch.frombuffer(bytearray((tmp_path / "a").read_bytes()), dtype=torch.uint8)
        lengths.add(len(piece))
        stored = DcpRecord(tmp_path / "a", "a", 0, len(piece), (4, 4), torch.float32)
        for check in (False, True):
            assert torch.equal(stored.tensor_in(piece, check=check), value)
        assert torch.equal(stored.rows(1, 3), value[1:3])
    assert len(lengths) == 1


def test_only_the_current_torch_save_layout_is_read_without_unpickling(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For other layouts, for example of a different torch, the zip directory locates the elements."""
    values = torch.arange(16.0).view(4, 4)
    for value in (values, values.t()):
        stream = io.BytesIO()
        torch.save(value, stream)
        piece = torch.frombuffer(bytearray(stream.getvalue()), dtype=torch.uint8)
        result = shard_files.elements_of(piece, torch.float32, (4, 4))
        assert torch.equal(result, value) if value is values else result is None
    model, fresh = nn.Linear(4, 4), nn.Linear(4, 4)
    checkpoint.save(tmp_path / "a", model)
    monkeypatch.setattr(lazy_tensors, "elements_of", lambda *_, **how: None)
    checkpoint.load(tmp_path / "a", fresh)
    assert torch.equal(fresh.weight, model.weight) and torch.equal(fresh.bias, model.bias)


def test_reading_rows_does_not_keep_the_full_shard_in_memory(saves: tuple[Path, Path]) -> None:
    """A rank that needs one row of a large shard keeps only this row."""
    path, manifest = saves[0], manifests.Manifest.read(saves[0])
    index = read_index(path, manifest)
    for rows, most in ((1, 1), (5, 5000)):
        staged, place = reading.Staged(), ("model.0.weight", (0, 0), (rows, 6))
        staged.parts[place] = []
        reading.read_stored(path, manifest, index, [place], staged)
        ((_, values),) = staged.parts[place]
        assert values.shape == (rows, 6) and values.untyped_storage().nbytes() <= most * 24


# ----------------------------------------------------------------------------------------- quantized and delayed state


@pytest.mark.parametrize(("key", "shape"), [("scale", (3, 1)), ("scale", (2,)), ("amax_history", (7, 3))])
def test_delayed_scaling_state_of_wrong_shape_is_rejected_before_changes(
    te: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str, shape: tuple[int, ...]
) -> None:
    """Modules receive this state last, so a late shape error would leave the model partly loaded."""
    recipe = __import__("transformer_engine.common.recipe", fromlist=["x"]).DelayedScaling(amax_history_len=8)

    def build(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        layer = te.Linear(32, 32, device="cpu")
        with te.autocast(enabled=True, recipe=recipe):
            layer(torch.randn(32, 32)).sum().backward()
        return nn.Sequential(layer)

    checkpoint.save(tmp_path / "a", build(0))
    described = Source.described
    monkeypatch.setattr(
        Source,
        "described",
        lambda self: {
            k: (shape, dtype) if k.startswith("delayed.") and k.endswith(f"fwd.{key}") else (there, dtype)
            for k, (there, dtype) in described(self).items()
        },
    )
    model = build(1)
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(CheckpointError, match="a history of 8 steps for as many tensors"):
        checkpoint.load(tmp_path / "a", model)
    assert all(torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))


@pytest.mark.parametrize(("saved", "here"), [("delayed", "delayed"), ("none", "mxfp8"), ("mxfp8", "none")])
def test_failed_load_does_not_change_quantized_models(te: Any, tmp_path: Path, saved: str, here: str) -> None:
    """Converted weights, delayed-scaling state and main weights change only after all data was read."""
    from transformer_engine.common import recipe as recipes

    kinds = {"delayed": recipes.DelayedScaling, "mxfp8": recipes.MXFP8BlockScaling}

    def build(kind: str, seed: int, steps: int) -> tuple[nn.Module, Any]:
        torch.manual_seed(seed)
        recipe = kinds[kind]() if kind in kinds else None
        with te.quantized_model_init(enabled=recipe is not None, recipe=recipe):
            model = nn.Sequential(
                *(te.Linear(32, 32, params_dtype=torch.bfloat16, device="cpu") for _ in range(2))
            )
        optimizer = te.optimizers.FusedAdam(model.parameters(), lr=1e-2, master_weights=True)
        for _ in range(steps):
            with te.autocast(enabled=recipe is not None, recipe=recipe):
                model(torch.randn(32, 32, dtype=torch.bfloat16)).float().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return model, optimizer

    def state(model: nn.Module, optimizer: Any) -> list[Any]:
        results: list[Any] = []
        for module in model:
            metas = [
                (k, getattr(v, "scale", v)) for k, v in module.fp8_meta.items() if k.startswith("scaling")
            ]
            results.append({k: v.clone() for k, v in metas if isinstance(v, torch.Tensor)})
        for p in model.parameters():
            results.append(p.dequantize().clone() if hasattr(p, "dequantize") else p.clone())
            results.append({k: v.clone() for k, v in optimizer.state.get(p, {}).items()})
        return results

    path = tmp_path / "a"
    checkpoint.save(path, *build(saved, 0, 2))
    stored = dcp.FileSystemReader(path).read_metadata().storage_data
    last = max(stored.values(), key=lambda s: s.offset)
    good = (path / DATA).read_bytes()
    for steps in (0, 1):
        model, optimizer = build(here, 1, steps)
        before = state(model, optimizer)
        bad = bytearray(good)
        bad[last.offset + last.length // 2] ^= 4
        (path / DATA).write_bytes(bad)
        with pytest.raises(CheckpointError, match="have changed"):
            checkpoint.load(path, model, optimizer)
        torch.testing.assert_close(state(model, optimizer), before, rtol=0, atol=0)
        (path / DATA).write_bytes(good)
        checkpoint.load(path, model, optimizer)
        with pytest.raises(AssertionError):
            torch.testing.assert_close(state(model, optimizer), before, rtol=0, atol=0)
