"""Check that `te-fsdp ckpt` detects corruption in its sources, never writes to them."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import struct
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from te_fsdp.checkpoint.portable.convert import open_any
from te_fsdp.cli import ckpt, main
from te_fsdp.errors import CheckpointError


def state() -> dict[str, torch.Tensor]:
    """Return a weight of several read blocks, a transposed one, a view, and one with two names."""
    torch.manual_seed(0)
    base = torch.randn(40, 30)
    return {
        "a.weight": torch.randn(300, 7),
        "a.bias": torch.randn(300),
        "turned": torch.randn(20, 30).t(),
        "view": base[5:30, 3:20],
        "low": torch.randn(64, 8).to(torch.float8_e4m3fn),
    }


def flipped(file: Path, at: int) -> None:
    data = bytearray(file.read_bytes())
    data[at] ^= 1 << (at % 8)
    file.write_bytes(data)


def places(file: Path, count: int) -> list[int]:
    """Return bytes of the data in a file of torch.save, spread over all of its members."""
    with zipfile.ZipFile(file) as archive:
        members = [m for m in archive.infolist() if "/data/" in m.filename or m.filename.endswith("data.pkl")]
    results = []
    content = file.read_bytes()
    for member in members:
        at = member.header_offset
        begin = at + 30 + int.from_bytes(content[at + 26 : at + 28], "little")
        begin += int.from_bytes(content[at + 28 : at + 30], "little")
        step = max(1, member.file_size // count)
        results += [begin + k for k in range(0, member.file_size, step)]
    return results


@pytest.mark.parametrize("kind", ["torch", "te_fsdp"])
def test_flipped_bits_in_torch_files_are_detected(
    tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Cover data and pickle in files of torch.save and `convert`. No target is created."""
    file, target = tmp_path / "a.pt", tmp_path / "x"
    torch.save(state(), tmp_path / "s.pt")
    if kind == "torch":
        shutil.copy(tmp_path / "s.pt", file)
    else:
        ours = str(tmp_path / "ours")
        assert main(["ckpt", "convert", str(tmp_path / "s.pt"), ours, "--to", "checkpoint"]) == 0
        assert main(["ckpt", "convert", ours, str(file), "--everything"]) == 0
        for mapped in (False, True):
            torch.testing.assert_close(
                torch.load(file, weights_only=True, mmap=mapped), state(), rtol=0, atol=0
            )
    good = file.read_bytes()
    for at in places(file, 5):
        flipped(file, at)
        for words in (["convert", file, target, "--to", "checkpoint"], ["export", file, target]):
            capsys.readouterr()
            assert main(["ckpt", *map(str, words)]) == 1
            assert str(file) in capsys.readouterr().err and not target.exists()
        file.write_bytes(good)
    assert main(["ckpt", "export", str(file), str(target)]) == 0, "the control"


def test_flipped_bits_in_plain_dcp_directories_are_detected(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    dcp.save({"model": state()}, checkpoint_id=tmp_path / "d", no_dist=True)
    file = next((tmp_path / "d").glob("*.distcp"))
    good = file.read_bytes()
    value = state()["a.weight"].numpy().tobytes()
    for at in range(good.index(value), good.index(value) + len(value), len(value) // 7):
        flipped(file, at)
        for words in (["convert", "x", "--to", "checkpoint"], ["export", "x"]):
            capsys.readouterr()
            assert main(["ckpt", words[0], str(tmp_path / "d"), str(tmp_path / "x"), *words[2:]]) == 1
            assert "CRC-32" in capsys.readouterr().err and not (tmp_path / "x").exists()
        file.write_bytes(good)
    assert main(["ckpt", "export", str(tmp_path / "d"), str(tmp_path / "x")]) == 0, "the control"


def test_flipped_bits_in_dcp_metadata_never_change_tensors(tmp_path: Path) -> None:
    """The metadata has no checksum. Names, dtypes and shards are checked for consistency and against the files."""
    parts = {f"model.{n}": torch.full((4, 3), n + 1.0) for n in range(3)}
    dcp.save(parts, checkpoint_id=tmp_path / "d", no_dist=True)
    file = tmp_path / "d/.metadata"
    metadata = pickle.loads(file.read_bytes())
    # The first two as pieces of one, as two ranks write it.
    rows = [dcp.metadata.ChunkStorageMetadata(torch.Size([4 * n, 0]), torch.Size([4, 3])) for n in range(2)]
    stored, lies = metadata.state_dict_metadata, metadata.storage_data
    stored["model.w"] = replace(stored.pop("model.0"), size=torch.Size([8, 3]), chunks=rows)
    lies |= {
        dcp.metadata.MetadataIndex("model.w", row.offsets, n): lies.pop(key)
        for n, (row, key) in enumerate(zip(rows, [*lies][:2], strict=True))
    }
    del stored["model.1"]
    metadata.planner_data = {key: tuple(key.split(".")) for key in stored}
    good = pickle.dumps(metadata)
    whole = {"w": torch.cat([parts["model.0"], parts["model.1"]]), "2": parts["model.2"]}

    def read() -> dict[str, torch.Tensor]:
        contents = open_any(tmp_path / "d")
        return {name: contents.value(name).full() for name in contents.names}

    refused = 0
    for at in range(len(good)):
        data = bytearray(good)
        data[at] ^= 1 << (3 if at % 3 else 1)
        file.write_bytes(data)
        try:
            result = read()
        except CheckpointError:
            refused += 1
            continue
        assert result.keys() == whole.keys(), at
        assert all(torch.equal(result[name], whole[name]) for name in whole), at
    assert refused > len(good) / 2
    metadata.state_dict_metadata["model.w"].chunks[1] = rows[0]
    file.write_bytes(pickle.dumps(metadata))
    with pytest.raises(CheckpointError, match=r"pieces that cover \(8, 3\) once"):
        read()
    file.write_bytes(good)
    assert read().keys() == whole.keys(), "the control"


def test_corrupted_optimizer_options_raise_instead_of_being_skipped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Objects and scalar tensors among the options are read first. Corruption there is an error."""
    model = torch.nn.Linear(3, 2)
    rate = torch.tensor(0.3728)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, capturable=True)
    group = {**optimizer.state_dict()["param_groups"][0], "params": ["weight", "bias"]}
    tree = {"model": model.state_dict(), "optimizer": {"state": {}, "param_groups": [group]}}
    source = tmp_path / "source"
    dcp.save(tree, checkpoint_id=source, no_dist=True)
    file = next(source.glob("*.distcp"))
    good = file.read_bytes()
    for number in (rate.numpy().tobytes(), b"G?\xef\xf7\xce\xd9\x16\x87+"):  # and the betas, in a pickle
        flipped(file, good.index(number) + 2)
        assert main(["ckpt", "convert", str(source), str(tmp_path / "t"), "--to", "checkpoint"]) == 1
        assert "CRC-32" in capsys.readouterr().err and not (tmp_path / "t").exists()
        file.write_bytes(good)
    assert main(["ckpt", "convert", str(source), str(tmp_path / "t"), "--to", "checkpoint"]) == 0
    assert "optimizer: taken, AdamW" in capsys.readouterr().out


@pytest.mark.parametrize("lost", ["state_dict_metadata", "planner_data"])
def test_incomplete_dcp_metadata_is_rejected(tmp_path: Path, lost: str) -> None:
    """A tensor has a file offset but no shape, or no path in the nested dict."""
    dcp.save({"model": state()}, checkpoint_id=tmp_path / "d", no_dist=True)
    assert len(open_any(tmp_path / "d").names) == 5, "the control"
    metadata = pickle.loads((tmp_path / "d/.metadata").read_bytes())
    del getattr(metadata, lost)["model.a.bias"]
    (tmp_path / "d/.metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(CheckpointError, match=r"the description of model\.a\.bias is incomplete"):
        open_any(tmp_path / "d")


@pytest.mark.parametrize("length", [-1, 0])
def test_invalid_record_lengths_are_rejected(tmp_path: Path, length: int) -> None:
    """Reading to the end of the file would return a different value, and the optimizer would be skipped."""
    dcp.save({"model": state(), "lr": 0.5}, checkpoint_id=tmp_path / "d", no_dist=True)
    metadata = pickle.loads((tmp_path / "d/.metadata").read_bytes())
    next(lie for index, lie in metadata.storage_data.items() if index.fqn == "lr").length = length
    (tmp_path / "d/.metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(CheckpointError, match=f"lr: no {length} bytes of its own at byte"):
        open_any(tmp_path / "d")


def test_impossibly_large_shapes_are_rejected(tmp_path: Path) -> None:
    dcp.save({"model": state()}, checkpoint_id=tmp_path / "d", no_dist=True)
    metadata = pickle.loads((tmp_path / "d/.metadata").read_bytes())
    told = metadata.state_dict_metadata["model.a.weight"]
    told.size = told.chunks[0].sizes = torch.Size([2**31, 2**31])
    (tmp_path / "d/.metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(CheckpointError, match=r"model\.a\.weight: its bytes in .*got \(\(300, 7\)"):
        open_any(tmp_path / "d").value("a.weight").rows(0, 1)


def test_files_without_checksums_are_read(tmp_path: Path) -> None:
    """torch writes 0 if checksums are disabled, as te_fsdp did before version 0.2."""
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        torch.save(state(), tmp_path / "a.pt")
    finally:
        torch.serialization.set_crc32_options(before)
    contents = open_any(tmp_path / "a.pt")
    for name, want in state().items():
        assert torch.equal(
            contents.value(name).full().view(torch.uint8), want.contiguous().view(torch.uint8)
        ), name


# ------------------------------------------------------------------------------------------ existing targets

TENSOR = torch.ones(4, 3)
RECURSIVE: list = []
RECURSIVE.append(RECURSIVE)
#: Of torch.save: names that are none, optimizers that are none, objects of no known class, entries of TE that are none.
OBJECTS = [
    {1: TENSOR},
    {("a", 1): TENSOR, "b": TENSOR},
    [TENSOR],
    TENSOR,
    3,
    {},
    {"w": TENSOR, "l": RECURSIVE},
    torch.nn.Linear(2, 2),
    {"w": TENSOR.to_sparse()},
    {"l.weight": TENSOR, "l._extra_state": torch.frombuffer(bytearray(b"\x80\x05junk"), dtype=torch.uint8)},
]
OPTIMIZERS = [
    {"state": 3, "param_groups": [3]},
    {"param_groups": [{}]},
    {"state": {0: {"step": 1}}, "param_groups": [{"params": [0], "param_names": ["w", "v"]}]},
    {"state": {0: {"step": 1}}, "param_groups": [{"params": [0], "param_names": [[1]]}]},
]
GOOD = {"dtype": "F32", "shape": [4, 3], "data_offsets": [0, 48]}
#: Headers of safetensors.
HEADERS = [
    b"",
    b"[" * 200_000,
    b'{"\xff": 1}',
    b'{"w": NaN}',
    [],
    None,
    {"w": []},
    {"w": {**GOOD, "shape": [4.0, 3]}},
    {"w": {**GOOD, "shape": [-4, -3]}},
    {"w": {**GOOD, "shape": [True, 12]}},
    {"w": {**GOOD, "shape": [2**63, 3]}},
    {"w": {**GOOD, "dtype": []}},
    {"w": {**GOOD, "data_offsets": [48, 0]}},
    {"w": {**GOOD, "data_offsets": [0]}},
    {"w": {**GOOD, "data_offsets": [0, 48]}, "v": {**GOOD, "data_offsets": [24, 72]}},
    {"w": {**GOOD, "shape": [3], "data_offsets": [0, 12]}},
    {"__metadata__": {"a": 1}, "w": GOOD},
    {"__metadata__": [], "w": GOOD},
    {"__metadata__": {"te_fsdp": "{}"}, "w": GOOD},
    {"__metadata__": {"te_fsdp": "[" * 100_000}, "w": GOOD},
]


def strange(folder: Path) -> list[Path]:
    """Create files and directories that resemble checkpoints but are not."""
    made: list[Path] = []

    def file(name: str, data: bytes) -> None:
        made.append(folder / name)
        made[-1].write_bytes(data)

    for suffix in ("", ".pt", ".safetensors"):
        file(f"empty{suffix}", b"")
        file(f"zip{suffix}", b"PK\x05\x06" + bytes(18))
        (folder / f"folder{suffix}").mkdir()
        made.append(folder / f"folder{suffix}")
    for number, objects in enumerate(OBJECTS):
        torch.save(objects, folder / f"{number}.pt")
        made.append(folder / f"{number}.pt")
    disks = bytearray((folder / "0.pt").read_bytes())
    disks[disks.rindex(b"PK\x06\x07") + 16] = 2  # of how many it is one
    file("disks.pt", bytes(disks))
    torch.save({"w": TENSOR}, folder / "old.pt", _use_new_zipfile_serialization=False)
    for number, header in enumerate(HEADERS):
        text = header if isinstance(header, bytes) else json.dumps(header).encode()
        file(f"{number}.safetensors", struct.pack("<Q", len(text)) + text + bytes(48))
    file("length.safetensors", struct.pack("<Q", 2**63) + bytes(50))
    for name, index in (("list", "[]"), ("deep", "[" * 100_000), ("outside", '{"weight_map": {"a": ".."}}')):
        (folder / name).mkdir()
        (folder / name / "model.safetensors.index.json").write_text(index)
        made.append(folder / name)
    for name in (".metadata", "te_fsdp.json", "a.safetensors"):  # a directory in the place of a file
        (folder / f"d{name}" / name).mkdir(parents=True)
        made.append(folder / f"d{name}")
    (folder / "loop").symlink_to(folder / "pool")
    (folder / "pool").symlink_to(folder / "loop")
    os.mkfifo(folder / "pipe.pt")
    names = ("old.pt", "loop", "loop/x.pt", "pipe.pt", "0.pt/x", "a\0b", "x" * 300)
    return [*made, *(folder / name for name in names)]


def test_every_invalid_file_gives_a_one_line_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The exit status is 1 with one line that names the path, never a traceback or "unexpected" error."""
    sources = strange(tmp_path)
    assert len(sources) > 50
    for source in sources:
        for words in (["convert", source, tmp_path / "out", "--to", "checkpoint"], ["diff", source, source]):
            assert main(["ckpt", *map(str, words)]) == 1, source
            text = capsys.readouterr().err
            assert text.startswith("te-fsdp: error: ") and "unexpected " not in text, (source, text)
            assert source.name[:40] in text or source.parent.name in text, (source, text)
    assert not (tmp_path / "out").exists()


def test_unexpected_exceptions_give_a_one_line_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: object) -> None:
        raise ZeroDivisionError("x")

    monkeypatch.setattr(ckpt, "open_any", fail)
    assert main(["ckpt", "inspect", str(tmp_path)]) == 1
    assert "unexpected ZeroDivisionError: x; please report it" in capsys.readouterr().err


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=range(len(OPTIMIZERS)))
def test_entries_that_are_not_optimizer_state_are_skipped(tmp_path: Path, optimizer: object) -> None:
    """In a DCP directory a note has the reason. In a torch.save file every optimizer is skipped."""
    tree = {"model": {"w": TENSOR}, "optimizer": optimizer}
    torch.save(tree, tmp_path / "a.pt")
    dcp.save(tree, checkpoint_id=tmp_path / "a", no_dist=True)
    for name, note in (("a.pt", "left: optimizer"), ("a", "optimizer: left, ")):
        contents = open_any(tmp_path / name)
        assert contents.manifest.optimizer is None and contents.names == ["w"]
        if name == "a.pt" or optimizer != {"param_groups": [{}]}:  # of which DCP writes nothing
            assert any(item.startswith(note) for item in contents.notes), contents.notes


def test_convert_keeps_unusual_tensor_names(tmp_path: Path) -> None:
    """Tensors keep any name."""
    values = {"\u00fc.\u4e2d\U0001f600": TENSOR, "a/../b": TENSOR * 2, "": TENSOR * 3, "w:x": TENSOR * 4}
    torch.save(values, tmp_path / "a.pt")
    assert main(["ckpt", "convert", str(tmp_path / "a.pt"), str(tmp_path / "x"), "--to", "checkpoint"]) == 0
    assert main(["ckpt", "export", str(tmp_path / "x"), str(tmp_path / "y"), "--dtype", "float32"]) == 0
    for path in (tmp_path / "x", tmp_path / "y"):
        contents = open_any(path)
        assert {name: contents.value(name).full().tolist() for name in contents.names} == {
            name: value.tolist() for name, value in values.items()
        }


def test_convert_never_writes_to_its_source(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The target may not be the source, inside it or around it, through any path or link, with or without --force."""
    folder = tmp_path / "around" / "a"
    torch.save(state(), tmp_path / "s.pt")
    assert main(["ckpt", "convert", str(tmp_path / "s.pt"), str(folder), "--to", "checkpoint"]) == 0
    (tmp_path / "link").symlink_to(folder)
    (tmp_path / "up").symlink_to(tmp_path / "around")
    (tmp_path / "file").symlink_to(tmp_path / "s.pt")
    os.link(tmp_path / "s.pt", tmp_path / "hard.pt")
    monkeypatch.chdir(folder)

    def digest() -> dict[str, bytes]:
        return {str(p): p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}

    before = digest()
    targets = [
        (
            folder,
            [folder, folder / "x", folder / "x/y", folder.parent, tmp_path, "x", "../a/x", "../../up/a/z"],
        ),
        (folder, [tmp_path / "link", tmp_path / "link" / "x", tmp_path / "up" / "a", tmp_path / "up"]),
        (tmp_path / "link", [folder / "x", folder.parent]),
        (
            tmp_path / "s.pt",
            [tmp_path / "s.pt", tmp_path / "file", tmp_path / "hard.pt", tmp_path, tmp_path / "s.pt/x"],
        ),
    ]
    for source, names in targets:
        for target in names:
            kind = "torch" if str(target).endswith(".pt") else "safetensors"
            for way in ([], ["--force"]):
                for words in (["convert", source, target, "--to", kind], ["export", source, target]):
                    capsys.readouterr()
                    assert main(["ckpt", *map(str, words), *way]) == 1, (source, target)
                    assert "a path outside of the source" in capsys.readouterr().err, (source, target)
    assert digest() == before
    assert main(["ckpt", "export", str(folder), str(tmp_path / "around" / "b")]) == 0, (
        "the control: next to it"
    )
