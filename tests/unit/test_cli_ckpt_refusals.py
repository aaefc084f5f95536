"""Check that `te-fsdp ckpt` rejects invalid input before it creates a file."""

from __future__ import annotations

import io
import json
import os
import pickle
import shutil
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, strategies as st
from torch import nn

from te_fsdp import checkpoint
from te_fsdp.checkpoint import directory, lazy_tensors
from te_fsdp.checkpoint.directory import new_directory
from te_fsdp.checkpoint.lazy_tensors import Chunked, DcpRecord, InMemory
from te_fsdp.checkpoint.portable.convert import open_any
from te_fsdp.cli import main
from te_fsdp.errors import CheckpointError
from tests.unit.commands import python_path

ROOT = Path(__file__).resolve().parents[2]


def saved(path: Path, seed: int = 0) -> Path:
    torch.manual_seed(seed)
    checkpoint.save(path, nn.Sequential(nn.Linear(8, 6), nn.Linear(6, 4)))
    return path


def refuse(capsys: pytest.CaptureFixture[str], *words: Any) -> str:
    """Exit code 1; returns the error's text."""
    capsys.readouterr()
    assert main(["ckpt", *map(str, words)]) == 1
    text = capsys.readouterr().err
    assert "unexpected" not in text, text  # the text of an unhandled error
    return text


def listing(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_convert_reports_operating_system_errors(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = saved(tmp_path / "a")
    (tmp_path / "file").write_text("no directory")
    for name in ("x.pt", "x.safetensors"):
        assert "Not a directory" in refuse(capsys, "convert", source, tmp_path / "file" / name)
    assert listing(tmp_path) == {"a", "file"}


def test_existing_targets_require_force(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, other = saved(tmp_path / "a"), saved(tmp_path / "b", seed=1)
    for name, way in (("x.pt", []), ("x.safetensors", []), ("x", ["--to", "checkpoint"])):
        target = tmp_path / name
        assert main(["ckpt", "convert", str(source), str(target), *way]) == 0
        assert "exists already" in refuse(capsys, "convert", other, target, *way)
        assert values(target) == values(source)
        assert main(["ckpt", "convert", str(other), str(target), *way, "--force"]) == 0
        assert values(target) == values(other) != values(source)
    assert listing(tmp_path) == {"a", "b", "x", "x.pt", "x.safetensors"}, "nothing hidden is left"


def test_force_does_not_replace_a_pipe_or_device(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, pipe, link = saved(tmp_path / "a"), tmp_path / "pipe", tmp_path / "link.pt"
    os.mkfifo(pipe)
    for to in ("torch", "safetensors", "checkpoint"):
        text = refuse(capsys, "convert", source, pipe, "--to", to, "--force")
        assert f"{pipe}: cannot be replaced" in text and "got a device, a pipe or a socket" in text
    assert pipe.is_fifo() and listing(tmp_path) == {"a", "pipe"}
    link.symlink_to(pipe)  # the link itself is replaced
    assert main(["ckpt", "convert", str(source), str(link), "--force"]) == 0
    assert pipe.is_fifo() and values(link) == values(source)


def test_force_keeps_the_target_until_its_replacement_is_complete(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    source, other = saved(tmp_path / "a"), saved(tmp_path / "b", seed=1)
    target, args = tmp_path / "x", ["--to", "checkpoint"]
    for before in ("nothing", "something"):
        assert main(["ckpt", "convert", str(source), str(target), *args, "--force"]) == 0, before
    with monkeypatch.context() as patch:
        patch.setattr(lazy_tensors.Lazy, "blocks", lambda self: iter([(0, self.height + 1)]))
        refuse(capsys, "convert", other, target, *args, "--force")
    assert main(["ckpt", "diff", str(source), str(target)]) == 0
    assert listing(tmp_path) == {"a", "b", "x"}, "nothing is left of what failed"

    rename = os.rename

    def killed(path: Path, to: Path) -> None:
        if path == target:
            raise KeyboardInterrupt
        rename(path, to)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(os, "rename", killed)
        with directory.in_place_of(target) as place, directory.new_directory(place) as folder:
            (folder / "text").write_text("new")
            patch.setattr(directory, "discard", lambda temporary: None)
    assert (tmp_path / "x.new" / "x" / "text").read_text() == "new"
    assert main(["ckpt", "diff", str(source), str(target)]) == 0


def test_force_replaces_a_target_that_cannot_be_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The target may contain a mount or another user's files. It is renamed before any file is removed."""
    source, target = saved(tmp_path / "a"), saved(tmp_path / "x", seed=1)
    gone, remove = list[Path](), directory.remove
    monkeypatch.setattr(
        directory, "remove", lambda path: gone.append(path) if path.exists() else remove(path)
    )
    assert main(["ckpt", "convert", str(source), str(target), "--to", "checkpoint", "--force"]) == 0
    assert main(["ckpt", "diff", str(source), str(target)]) == 0
    assert [path.parent for path in gone] == [tmp_path / "x.new"]
    assert main(["ckpt", "diff", str(source), str(gone[0].rename(tmp_path / "old"))]) == 1, "whole until then"


def test_failed_write_leaves_no_files(tmp_path: Path) -> None:
    for is_file, target in ((True, tmp_path / "f"), (False, tmp_path / "d")):
        with (
            pytest.raises(RuntimeError, match="half"),
            new_directory(target, is_file=is_file) as temporary,
        ):
            (temporary if is_file else temporary / "x").write_text("half")
            raise RuntimeError("half")
        assert listing(tmp_path) == set()


def test_empty_directory_is_accepted_as_target(tmp_path: Path) -> None:
    """A file cannot replace an empty directory."""
    for name in "df":
        (tmp_path / name).mkdir()
    with new_directory(tmp_path / "d") as temporary:
        (temporary / "x").write_text("whole")
    with (
        pytest.raises(CheckpointError, match="f: cannot be written"),
        new_directory(tmp_path / "f", is_file=True) as temporary,
    ):
        temporary.write_text("whole")
    assert {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*")} == {"d", "d/x", "f"}


def test_corrupted_checkpoint_is_not_copied(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A copy would get valid checksums for corrupted data."""
    path = saved(tmp_path / "a")
    data = next(path.glob("*.distcp"))
    good = bytearray(data.read_bytes())
    place = good.index(next(iter(values(path).values())))
    bad = bytearray(good)
    bad[place] ^= 1
    data.write_bytes(bad)
    for words in (["convert", tmp_path / "x.pt"], ["export", tmp_path / "x.pt"], ["diff", path]):
        assert "have changed" in refuse(capsys, words[0], path, words[1])
    assert listing(tmp_path) == {"a"}
    assert main(["ckpt", "convert", str(path), str(tmp_path / "x.pt"), "--check", "sizes"]) == 0, (
        "the control"
    )
    data.write_bytes(good[:-5])
    for words in (["inspect"], ["diff", path], ["export", tmp_path / "y"]):
        assert data.name in refuse(capsys, words[0], path, *words[1:])
    data.unlink()
    assert data.name in refuse(capsys, "convert", path, tmp_path / "z.pt", "--check", "sizes")


def values(path: Path) -> dict[str, bytes]:
    """Return the bytes of the weights by name."""
    contents = open_any(path)
    return {name: contents.value(name).full().numpy().tobytes() for name in contents.names}


def test_unfinished_and_incomplete_checkpoints_are_rejected(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = saved(tmp_path / "c/a")
    half = tmp_path / ".b.te_fsdp-saving.host.1.abc"
    shutil.copytree(path, half)
    assert "not finished" in refuse(capsys, "convert", half, tmp_path / "x.pt")
    shutil.copytree(path, tmp_path / "lost")
    (tmp_path / "lost/te_fsdp.json").unlink()  # what is left is read by plain DCP, under other names
    for words in (["inspect"], ["convert", tmp_path / "x.pt"], ["diff", path], ["export", tmp_path / "x.pt"]):
        message = refuse(capsys, words[0], tmp_path / "lost", *words[1:])
        assert "lost: te_fsdp.json is missing next to its .metadata" in message
    (tmp_path / "empty").mkdir()
    assert "no such checkpoint" in refuse(capsys, "inspect", tmp_path / "empty")
    assert "path does not exist" in refuse(capsys, "inspect", tmp_path / "none")
    os.mkfifo(tmp_path / "pipe")
    assert "neither a file nor a directory" in refuse(capsys, "inspect", tmp_path / "pipe")
    (tmp_path / "text.pt").write_bytes(b"\xfftext")
    assert "neither a safetensors file nor" in refuse(capsys, "inspect", tmp_path / "text.pt")
    torch.save({"a": 1, "b": "x"}, tmp_path / "plain.pt")
    assert "no state dict found" in refuse(capsys, "inspect", tmp_path / "plain.pt")
    torch.save({"model": {"w": torch.ones(2), "n": 3}}, tmp_path / "mixed.pt")
    assert "n (int)" in refuse(capsys, "inspect", tmp_path / "mixed.pt")
    assert "nothing under --key net" in refuse(capsys, "inspect", tmp_path / "mixed.pt", "--key", "net")
    assert "no checksums to verify" in refuse(capsys, "verify", tmp_path / "mixed.pt")
    assert main(["ckpt", "inspect", str(tmp_path / "c")]) == 0


class Runs:
    """Unpickling it would run code."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, ("pwned",)


def test_files_cannot_execute_code(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    dcp.save({"w": torch.ones(2)}, checkpoint_id="d", no_dist=True)
    Path("d/.metadata").write_bytes(pickle.dumps(Runs()))
    assert "mkdir is not allowed in the metadata" in refuse(capsys, "inspect", "d")
    torch.save({"w": torch.ones(2), "evil": Runs()}, "evil.pt")
    assert f"an object of {os.mkdir.__module__}.mkdir" in refuse(capsys, "inspect", "evil.pt")
    pickled = torch.frombuffer(bytearray(pickle.dumps(Runs())), dtype=torch.uint8)
    torch.save({"lin.weight": torch.ones(2), "lin._extra_state": pickled}, "extra.pt")
    error = refuse(capsys, "convert", "extra.pt", "x", "--to", "checkpoint")
    assert "lin._extra_state: te_fsdp cannot read this state" in error and "--extra-state drop" in error
    assert main(["ckpt", "convert", "extra.pt", "x", "--to", "checkpoint", "--extra-state", "drop"]) == 0
    assert not Path("pwned").exists()
    pickle.loads(pickle.dumps(Runs()))
    assert Path("pwned").exists(), "the control: unpickled as usual it runs"


def test_truncated_torch_files_are_rejected(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.save({"w": torch.ones(200)}, tmp_path / "a.pt")
    good = (tmp_path / "a.pt").read_bytes()
    for length in (len(good) - 1, len(good) // 2, 10, 0):
        (tmp_path / "a.pt").write_bytes(good[:length])
        assert "a.pt" in refuse(capsys, "convert", tmp_path / "a.pt", tmp_path / "x", "--to", "checkpoint")
    assert listing(tmp_path) == {"a.pt"}


def test_corrupted_safetensors_are_rejected(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = saved(tmp_path / "a")
    assert main(["ckpt", "convert", str(source), str(tmp_path / "x.safetensors")]) == 0
    file = tmp_path / "x.safetensors"
    good = file.read_bytes()
    (length,) = struct.unpack("<Q", good[:8])
    header = json.loads(good[8 : 8 + length])

    def with_header(**changes: Any) -> bytes:
        text = json.dumps({**header, **changes}).encode()
        return struct.pack("<Q", len(text)) + text + good[8 + length :]

    weight = header["0.weight"]
    at = weight["data_offsets"][0] + 4
    bad = {
        "unreadable safetensors file (SafetensorError: ": good[:-1],
        "unreadable safetensors file (Safetensor": good[:5],
        "unreadable safetensors file (Safetenso": struct.pack("<Q", 2**40) + good[8:],
        "unreadable safetensors file (Safetens": good[:8] + b"x" + good[9:],
        "unreadable safetensors file (Safeten": with_header(**{"0.weight": {**weight, "dtype": "F2"}}),
        "unreadable safetensors file (Safete": with_header(**{"0.weight": {**weight, "shape": [8, 7]}}),
        "unreadable safetensors file (Safet": with_header(
            **{"0.bias": {**header["0.bias"], "data_offsets": [at, at + 24]}}
        ),
        "differ from its description": with_header(
            **{"0.weight": {**weight, "shape": [8, 6]}}  # the manifest says (6, 8)
        ),
    }
    described = header["__metadata__"]
    bad["no description by te_fsdp"] = with_header(
        **{"__metadata__": {"te_fsdq": described["te_fsdp"]}, "te_fsdp:extra": header.pop("0.bias")}
    )
    for text, data in bad.items():
        file.write_bytes(data)
        error = refuse(capsys, "convert", file, tmp_path / "back", "--to", "checkpoint")
        assert "x.safetensors" in error and (text in error or "does not fit" in error), (text, error)
    assert listing(tmp_path) == {"a", "x.safetensors"}


def test_mismatched_safetensors_shards_are_rejected(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "x"
    args = ["--to", "safetensors", "--max-shard-size", "100B"]
    assert main(["ckpt", "convert", str(saved(tmp_path / "a")), str(folder), *args]) == 0
    files = sorted(folder.glob("*.safetensors"))
    assert len(files) == 4
    kept = files[1].read_bytes()
    files[1].unlink()
    assert f"{files[1].name}: no such file" in refuse(capsys, "inspect", folder)
    shutil.copy(files[2], files[1])
    assert "but not listed there" in refuse(capsys, "inspect", folder)
    files[1].write_bytes(kept)
    assert main(["ckpt", "inspect", str(folder)]) == 0
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"w": "../a/te_fsdp.json"}}')
    assert "a file outside of the folder" in refuse(capsys, "inspect", folder)
    (folder / "model.safetensors.index.json").unlink()
    assert " and 1 more without an index" in refuse(capsys, "inspect", folder)


def test_sharded_state_dicts_with_unmet_load_conditions_are_rejected(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The load condition in a sharded module's _extra_state is enforced for both kinds of files."""
    for condition, fits in (
        ("rows stacked for tp=2, other tp sizes need te_fsdp.checkpoint", False),
        ("quantized for tp=1 and 2 FSDP shard(s), other meshes need te_fsdp.checkpoint", False),
        ("rows stacked for tp=1, other tp sizes need te_fsdp.checkpoint", True),
    ):
        state = {
            "fc1.weight": torch.ones(4, 2),
            "fc1._extra_state": {condition: torch.empty(0, dtype=torch.uint8)},
        }
        path = tmp_path / str(abs(hash(condition)))
        torch.save(state, f"{path}.pt")
        dcp.save(state, checkpoint_id=path, no_dist=True)
        for source in (f"{path}.pt", path):
            if fits:
                assert main(["ckpt", "inspect", str(source)]) == 0
            else:
                assert "fc1._extra_state: weights of a sharded module" in refuse(capsys, "inspect", source)


# ------------------------------------------------------------------------------------------ blocks of rows


@given(
    st.lists(st.integers(1, 5), min_size=1, max_size=3),
    st.integers(0, 3),
    st.sampled_from(["plain", "turned", "padded"]),
    st.sampled_from([torch.float32, torch.uint8, torch.bfloat16]),
    st.integers(1, 64),
)
def test_rows_of_any_layout_equal_the_unsharded_weight(
    tmp_path_factory: pytest.TempPathFactory,
    shape: list[int],
    start: int,
    kind: str,
    dtype: torch.dtype,
    budget: int,
) -> None:
    """Cover tensors of any strides, read in blocks of any size, from one file or several shards."""
    tensor = torch.arange(start + 1000).to(dtype)[start:]
    size = shape[0] * shape[-1] if len(shape) == 2 else int(torch.tensor(shape).prod())
    if len(shape) == 2 and kind == "turned":
        view = tensor[:size].view(shape[1], shape[0]).t()
    elif len(shape) == 2 and kind == "padded":
        view = tensor[: shape[0] * 7].view(shape[0], 7)[:, : shape[1]]
    else:
        view = tensor[:size].view(shape)
    file = tmp_path_factory.getbasetemp() / "rows.bin"
    record = io.BytesIO()
    torch.save(view, record)
    file.write_bytes(b"abcde" + record.getvalue() + b"xyz")
    stored = DcpRecord(file, "k", 5, len(record.getvalue()), tuple(shape), dtype, check=True)
    blocks = list(stored.blocks(budget))
    assert [first for first, _ in blocks] == [0, *(last for _, last in blocks[:-1])] and blocks[-1][
        1
    ] == shape[0]
    assert torch.equal(torch.cat([stored.rows(*block) for block in blocks]), view)
    cut = shape[0] // 2
    pieces = [
        ((0,) * len(shape), InMemory(view[:cut])),
        ((cut,) + (0,) * (len(shape) - 1), InMemory(view[cut:])),
    ]
    whole = Chunked("k", tuple(shape), dtype, pieces)
    assert torch.equal(torch.cat([whole.rows(*block) for block in blocks]), view)
    with pytest.raises(CheckpointError, match="cover"):
        Chunked("k", tuple(shape), dtype, pieces[1:] if cut else [])


# ------------------------------------------------------------------------------------------------- memory

MEGABYTES = 200
PROBE = """
import sys
import threading
from te_fsdp.checkpoint import lazy_tensors
from te_fsdp.cli import main

def memory():
    # Anonymous memory alone: mapped files are given back when memory is needed.
    line = next(line for line in open("/proc/self/status") if line.startswith("RssAnon"))
    return int(line.split()[1]) / 1024

def convert(source, target, *way):
    before, seen, ended = memory(), [0.0], threading.Event()

    def watch():
        while not ended.wait(0.001):
            seen.append(memory())

    thread = threading.Thread(target=watch)
    thread.start()
    sys.argv[1:] = ["ckpt", "convert", source, target, *way, "--check", "sizes", "--json"]
    assert main() == 0
    ended.set()
    thread.join()
    return max(0.0, max(seen) - before)

folder = sys.argv[1]
for source in ("small", "big"):
    files = [f"{folder}/{source}{suffix}" for suffix in ("", ".safetensors", ".pt")]
    ways = [[*files[:2]]]
    for file in files[1:]:
        ways.append([file, f"{file}-back", "--to", "checkpoint", "--dtype", "float16"])
    grown = [convert(*words) for words in ways]
lazy_tensors.Lazy.blocks = lambda self: iter([(0, self.height)])
grown.append(convert(files[0], f"{folder}/control.safetensors"))
print("grown", *grown, file=sys.stderr)
"""


def test_convert_uses_less_memory_than_the_checkpoint(tmp_path: Path) -> None:
    """Converting 200 MB (one tensor of 120 MB, 40 of 2 MB) increases memory by less than a quarter of that.

    Only a torch.save target needs all tensors in memory. The control takes each tensor as one block.
    """

    class Model(nn.Module):
        def __init__(self, rows: int) -> None:
            super().__init__()
            self.wide = nn.Parameter(torch.ones(60 * rows, 1000, dtype=torch.float32))
            low = [torch.ones(2 * rows, 1000, dtype=torch.bfloat16) for _ in range(40)]
            self.many = nn.ParameterList(map(nn.Parameter, low))

    checkpoint.save(tmp_path / "small", Model(1))
    checkpoint.save(tmp_path / "big", Model(MEGABYTES * 1000 // 400))
    for name, rows in (("small", 1), ("big", MEGABYTES * 1000 // 400)):
        torch.save(Model(rows).state_dict(), tmp_path / f"{name}.pt")
    assert sum(path.stat().st_size for path in (tmp_path / "big").iterdir()) >= MEGABYTES * 10**6
    done = subprocess.run(
        [sys.executable, "-c", PROBE, str(tmp_path)],
        env={**os.environ, "PYTHONPATH": python_path(), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    *blocks, whole = map(float, done.stderr.split("grown ")[1].split())
    assert max(blocks) < MEGABYTES / 4 < whole, "megabytes"
