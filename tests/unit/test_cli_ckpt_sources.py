"""Sources of `te-fsdp ckpt`: damage is found as it is read, all ends in a text, and none is written to."""

from __future__ import annotations

import shutil
import struct
import zipfile
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from te_fsdp.checkpoint.portable.convert import open_any
from te_fsdp.cli.main import main
from te_fsdp.errors import CheckpointError


def state() -> dict[str, torch.Tensor]:
    """A weight of several blocks' reading, a transposed one, a view, and one that is two names' storage."""
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
    """Bytes of the data in a file of torch.save, spread over all of its members."""
    with zipfile.ZipFile(file) as archive:
        members = [m for m in archive.infolist() if "/data/" in m.filename or m.filename.endswith("data.pkl")]
    found = []
    content = file.read_bytes()
    for member in members:
        at = member.header_offset
        begin = at + 30 + int.from_bytes(content[at + 26 : at + 28], "little")
        begin += int.from_bytes(content[at + 28 : at + 30], "little")
        step = max(1, member.file_size // count)
        found += [begin + k for k in range(0, member.file_size, step)]
    return found


@pytest.mark.parametrize("kind", ["torch", "te_fsdp"])
def test_every_flipped_bit_of_a_torch_file_is_found(
    tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of the data and of the pickle, in what torch.save wrote and in what `convert` did; nothing appears."""
    file, target = tmp_path / "a.pt", tmp_path / "x"
    torch.save(state(), tmp_path / "s.pt")
    if kind == "torch":
        shutil.copy(tmp_path / "s.pt", file)
    else:
        assert (
            main(["ckpt", "convert", str(tmp_path / "s.pt"), str(tmp_path / "ours"), "--to", "checkpoint"])
            == 0
        )
        assert main(["ckpt", "convert", str(tmp_path / "ours"), str(file), "--everything"]) == 0
        with zipfile.ZipFile(file) as archive:
            assert archive.testzip() is None and len(archive.infolist()) > 8
            sums = [struct.pack("<4sI", b"PK\x07\x08", m.CRC) for m in archive.infolist() if m.file_size]
        assert all(text in file.read_bytes() for text in sums), "once more behind the data"
        for mapped in (False, True):
            torch.testing.assert_close(
                torch.load(file, weights_only=True, mmap=mapped)["model"], state(), rtol=0, atol=0
            )
    good = file.read_bytes()
    for at in places(file, 5):
        flipped(file, at)
        with pytest.raises(CheckpointError, match="CRC-32"):
            contents = open_any(file)
            for name in contents.names:
                for first, last in contents.value(name).blocks(256):
                    contents.value(name).rows(first, last)
        file.write_bytes(good)
    flipped(file, places(file, 2)[-1])
    capsys.readouterr()
    for words in (
        ["convert", file, target, "--to", "checkpoint"],
        ["export", file, target],
        ["diff", file, file],
    ):
        assert main(["ckpt", *map(str, words)]) == 1
        assert "its contents have changed (CRC-32)" in capsys.readouterr().err
        assert not target.exists()
    file.write_bytes(good)
    assert main(["ckpt", "export", str(file), str(target)]) == 0, "the control"


def test_every_flipped_bit_of_a_plain_directory_is_found(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    dcp.save({"model": state()}, checkpoint_id=tmp_path / "d", no_dist=True)
    file = next((tmp_path / "d").glob("*.distcp"))
    good = file.read_bytes()
    value = state()["a.weight"].numpy().tobytes()
    for at in range(good.index(value), good.index(value) + len(value), len(value) // 7):
        flipped(file, at)
        for words in (["convert", "x", "--to", "checkpoint"], ["export", "x"], ["diff", str(tmp_path / "d")]):
            capsys.readouterr()
            target = words[1] if words[0] == "diff" else str(tmp_path / words[1])
            assert main(["ckpt", words[0], str(tmp_path / "d"), target, *words[2:]]) == 1
            assert "CRC-32" in capsys.readouterr().err and not (tmp_path / "x").exists()
        file.write_bytes(good)
    assert main(["ckpt", "diff", str(tmp_path / "d"), str(tmp_path / "d")]) == 0, "the control"


def test_files_without_checksums_are_read(tmp_path: Path) -> None:
    """torch writes 0 where they were switched off, as te_fsdp did into its files before version 0.2."""
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        torch.save(state(), tmp_path / "a.pt")
    finally:
        torch.serialization.set_crc32_options(before)
    contents = open_any(tmp_path / "a.pt")
    for name, want in state().items():
        assert torch.equal(
            contents.value(name).whole().view(torch.uint8), want.contiguous().view(torch.uint8)
        ), name
