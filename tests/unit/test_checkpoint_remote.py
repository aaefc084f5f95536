"""Check that checkpoints on object storage are atomic without renames or locks."""

from __future__ import annotations

import importlib.util
import os
import signal
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

from te_fsdp import checkpoint
from te_fsdp.checkpoint import directory
from te_fsdp.checkpoint.directory import Owner
from te_fsdp.checkpoint.manifest import Manifest
from te_fsdp.checkpoint.shard_files import DamagedFileError, open_checked
from te_fsdp.checkpoint.storage import RemotePath, absolute, resolve_path
from te_fsdp.cli import main
from te_fsdp.errors import CheckpointError
from tests.unit import remote_storage
from tests.unit.remote_storage import SlowFileSystem

ELSEWHERE = "elsewhere-00000000.7.1.1700000000.cafe"


def trained(value: float = 1.0) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Linear(4, 4)
    nn.init.constant_(model.weight, value)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(4)).sum().backward()
    optimizer.step()
    return model, optimizer


def loaded(path: Any, **options: Any) -> tuple[nn.Module, torch.optim.Optimizer, Any]:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    return model, optimizer, checkpoint.load(path, model, optimizer, **options)


def text_of(call: Any, *arguments: Any, **options: Any) -> str:
    with pytest.raises(CheckpointError) as caught:
        call(*arguments, **options)
    return str(caught.value)


@pytest.fixture
def memory() -> str:
    fsspec.filesystem("memory").store.clear()
    return "memory://bucket/run"


@pytest.fixture
def slow(tmp_path: Path) -> str:
    remote_storage.register()
    return f"slow://{tmp_path}/run"


def save_and_load(root: str) -> None:
    model, optimizer = trained()
    for step in range(4):
        handle = checkpoint.save(
            f"{root}/step-{step}",
            model,
            optimizer,
            extra={"step": step},
            keep_last=2,
            asynchronous=step % 2 == 1,
        )
        assert str(handle.result()) == f"{root}/step-{step}"
    assert sorted(path.name for path in resolve_path(root).iterdir()) == ["step-2", "step-3"]
    newest = checkpoint.latest(root)
    checkpoint.verify(newest)
    again, other, extra = loaded(newest, verify=True)
    assert extra == {"step": 3} and torch.equal(again.weight, model.weight)
    states = [o.state[m.weight]["exp_avg"] for o, m in ((other, again), (optimizer, model))]
    assert torch.equal(*states) and states[0].abs().sum() > 0
    assert "exists already" in text_of(checkpoint.save, f"{root}/step-3", model)
    message = text_of(loaded, f"{root}/step-9")
    assert "no such checkpoint" in message and "step-2" in message


def test_remote_checkpoints_are_saved_loaded_listed_and_removed(memory: str, tmp_path: Path) -> None:
    save_and_load(memory)
    manifest = Manifest.read(resolve_path(f"{memory}/step-3"))
    assert (manifest.format_version, manifest.folder[:13]) == (4, "te_fsdp-data.")
    names = {path.name for path in manifest.data_folder(resolve_path(f"{memory}/step-3")).iterdir()}
    assert names == {".metadata", "te_fsdp.index", "__0_0.distcp"}
    # A save without a folder is written for earlier readers.
    checkpoint.save(tmp_path / "local", trained()[0])
    local = (tmp_path / "local" / "te_fsdp.json").read_text()
    assert '"format_version": 3' in local and '"folder"' not in local


def test_local_copy_of_a_remote_checkpoint_loads(memory: str, tmp_path: Path) -> None:
    model, _ = trained(3.0)
    checkpoint.save(f"{memory}/a", model)
    fsspec.filesystem("memory").get("/bucket/run/a", str(tmp_path / "a"), recursive=True)
    assert torch.equal(loaded_weights(tmp_path / "a"), model.weight)


def test_remote_plain_dcp_directory_loads_and_converts(memory: str, tmp_path: Path) -> None:
    model, _ = trained(3.0)
    dcp.save({"model": model.state_dict()}, checkpoint_id=str(tmp_path / "plain"), no_dist=True)
    fsspec.filesystem("memory").put(str(tmp_path / "plain"), "/bucket/plain", recursive=True)
    assert torch.equal(loaded_weights("memory://bucket/plain"), model.weight)
    target = str(tmp_path / "converted")
    assert main(["ckpt", "convert", "memory://bucket/plain", target, "--to", "checkpoint"]) == 0
    assert torch.equal(loaded_weights(target), model.weight)


def loaded_weights(path: Any) -> torch.Tensor:
    model = nn.Linear(4, 4)
    checkpoint.load(path, model)
    return model.weight


def test_ckpt_commands_accept_remote_paths(
    memory: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint.save(f"{memory}/a", *trained())
    local, back, file = str(tmp_path / "b"), f"{memory}/c", str(tmp_path / "d.pt")
    for command in (
        ["inspect", memory],
        ["verify", f"{memory}/a"],
        ["convert", f"{memory}/a", local, "--to", "checkpoint"],
        ["convert", local, back, "--to", "checkpoint"],
        ["convert", back, file],
        ["diff", f"{memory}/a", back],
    ):
        assert main(["ckpt", *command]) == 0, (command, capsys.readouterr())
    resolve_path(f"{memory}/d.pt").write_bytes(Path(file).read_bytes())
    for command, text in (
        (["export", local, f"{memory}/e"], "got files without a manifest"),
        (["convert", local, back, "--to", "checkpoint", "--force"], "cannot be replaced on object storage"),
        (["convert", local, f"{memory}/a", "--to", "checkpoint"], "exists already"),
        (["convert", back, back, "--to", "checkpoint"], "got the source itself"),
        (["inspect", f"{memory}/d.pt"], "cannot be read on object storage"),
        (["inspect", "nowhere://x/y"], "cannot be reached (Protocol not known: nowhere)"),
    ):
        capsys.readouterr()
        assert main(["ckpt", *command]) == 1 and text in capsys.readouterr().err, command


def test_remote_load_detects_corruption(memory: str) -> None:
    path = resolve_path(f"{memory}/a")
    checkpoint.save(path, trained()[0])
    file = Manifest.read(path).data_folder(path) / "__0_0.distcp"
    contents = file.read_bytes()
    at = contents.index(trained()[0].weight.detach().numpy().tobytes())
    for data, text in (
        (contents[:at] + b"\xff" + contents[at + 1 :], "its contents have changed (CRC-32"),
        (contents[:-1], f"expected {len(contents)} bytes, got {len(contents) - 1}"),
        (None, "__0_0.distcp is missing"),
    ):
        file.unlink() if data is None else file.write_bytes(data)
        model = nn.Linear(4, 4)
        before = model.weight.clone()
        assert text in text_of(checkpoint.load, path, model)
        assert torch.equal(model.weight, before)
    manifest = path / "te_fsdp.json"
    manifest.write_bytes(manifest.read_bytes().replace(b'"folder": "te', b'"folder": "..'))
    assert "expected digest" in text_of(loaded, path)


def test_remote_reads_stop_at_the_end_of_the_object(memory: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kind = type(fsspec.filesystem("memory"))
    stock = kind.cat_file

    def refusing(
        self: Any, path: str, start: int | None = None, end: int | None = None, **options: Any
    ) -> Any:
        if start is not None and start >= self.info(path)["size"]:
            raise OSError("InvalidRange")  # as S3
        return stock(self, path, start, end, **options)

    monkeypatch.setattr(kind, "cat_file", refusing)
    path: Any = absolute(f"{memory}/file")
    path.write_bytes(b"x" * 10)
    for begin in (8, 12):
        with (
            open_checked(path, (10, 0), "") as file,
            pytest.raises(DamagedFileError, match=f"expected {begin + 4} "),
        ):
            file.read(begin, [], torch.empty(4, dtype=torch.uint8))


def kill_after(operations: int) -> Any:
    left = iter(range(operations))

    def count(name: str) -> None:
        if next(left, None) is None:
            os.kill(os.getpid(), signal.SIGKILL)

    return count


def test_latest_remote_checkpoint_is_exact_after_kills(slow: str) -> None:
    """The newest complete checkpoint is exact. The next save, also to the same path, removes leftovers."""
    for moment in range(100):
        root = f"{slow}-{moment}"
        checkpoint.save(f"{root}/step-1", trained(1.0)[0], keep_last=1)
        # Before the fork: a child of a process that has threads of autograd cannot run a backward.
        following = trained(2.0)[0]
        pid = os.fork()
        if pid == 0:
            try:
                SlowFileSystem.hook = staticmethod(kill_after(moment))
                checkpoint.save(f"{root}/step-2", following, keep_last=1)
                os._exit(0)
            finally:  # the child of an error would run the rest of the tests
                os._exit(1)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        killed = code < 0
        assert code <= 0, moment
        newest = checkpoint.latest(root)
        assert newest is not None and newest.name in ("step-1", "step-2")
        value = {"step-1": 1.0, "step-2": 2.0}[newest.name]
        assert torch.equal(loaded_weights(newest), trained(value)[0].weight), moment
        if newest.name == "step-1":
            checkpoint.save(f"{root}/step-2", trained(2.0)[0], keep_last=1)
        checkpoint.save(f"{root}/step-3", trained(3.0)[0], keep_last=1)
        left = sorted(
            p.name for p in Path(root.removeprefix("slow://")).rglob("*") if p.name.endswith(".json")
        )
        assert left == ["te_fsdp.json"], moment
        folders = list(Path(root.removeprefix("slow://")).glob("*/te_fsdp-data.*"))
        assert len(folders) == 1, (moment, folders)
        if not killed:
            assert moment > 8
            return
    raise AssertionError("a save has no end")


def test_one_of_two_remote_saves_to_one_path_wins(memory: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path = resolve_path(f"{memory}/a")
    monkeypatch.setattr(Owner, "new", lambda: Owner.parse(ELSEWHERE))
    expected = directory.begin(path)
    monkeypatch.undo()
    checkpoint.save(f"{memory}/mine", trained(1.0)[0])
    mine = resolve_path(f"{memory}/mine")
    (expected / "te_fsdp.json").write_bytes((mine / "te_fsdp.json").read_bytes())
    checkpoint.save(path, trained(5.0)[0])  # we end first
    assert "exists already" in text_of(directory.commit, expected, path)
    directory.discard(expected)
    assert not expected.exists() and torch.equal(loaded_weights(path), trained(5.0)[0].weight)

    other = resolve_path(f"{memory}/b")
    monkeypatch.setattr(Owner, "new", lambda: Owner.parse(ELSEWHERE))
    expected = directory.begin(other)
    monkeypatch.undo()
    # After a day without a write, by the clock of the storage, its job counts as dead. Folders that te_fsdp did not
    # write stay.
    foreign = resolve_path(f"{memory}/data/te_fsdp-data.v1/x")
    old = expected.name, "te_fsdp-data.v1"
    foreign.write_bytes(b"x")
    written = directory.last_written
    for seconds, stays in ((86000, True), (86500, False)):
        later = lambda folder, s=seconds: written(folder) + s * (folder.name not in old)  # noqa: E731
        monkeypatch.setattr(directory, "last_written", later)
        checkpoint.save(f"{memory}/c-{stays}", trained()[0])
        assert expected.exists() == stays
    assert not expected.exists() and foreign.exists()


def test_remote_save_survives_a_lost_response(memory: str, monkeypatch: pytest.MonkeyPatch) -> None:
    create = RemotePath.create

    def twice(self: RemotePath, data: bytes) -> None:
        create(self, data)
        create(self, data)

    monkeypatch.setattr(RemotePath, "create", twice)
    checkpoint.save(f"{memory}/a", trained(1.0)[0])

    class LostError(Exception):
        pass

    def failing(self: RemotePath, data: bytes) -> None:
        create(self, data)
        raise LostError("no answer")

    # It was complete by then: what has begun to be seen is not removed.
    monkeypatch.setattr(RemotePath, "create", failing)
    message = text_of(checkpoint.save, f"{memory}/b", trained(2.0)[0])
    assert "LostError: no answer" in message and "The checkpoint was complete by then, and exists" in message
    monkeypatch.undo()
    assert torch.equal(loaded_weights(f"{memory}/b"), trained(2.0)[0].weight)

    def broken(name: str, *arguments: Any, **options: Any) -> Any:
        raise LostError("no such region")

    monkeypatch.setattr(fsspec.get_filesystem_class("memory"), "cat_file", broken)
    assert "LostError: no such region" in text_of(loaded, f"{memory}/b")


def test_remote_paths_are_resolved() -> None:
    assert str(resolve_path(Path("s3://bucket/x/"))) == str(resolve_path("s3://bucket/x")) == "s3://bucket/x"
    assert resolve_path("file:///x/y") == Path("/x/y") and absolute("x") == Path.cwd() / "x"
    assert resolve_path(Path("file:///x/y")) == Path("/x/y"), "of which a Path has one slash"
    assert resolve_path("a:/b") == Path("a:/b") and resolve_path("s3:/b") == Path("s3:/b")
    path = resolve_path("s3://bucket/x.pt")
    assert (path.name, path.suffix, str(path.parent)) == ("x.pt", ".pt", "s3://bucket")
    assert path == resolve_path(path) != resolve_path("s3://bucket/y")


def test_s3_checkpoints_round_trip(tmp_path: Path) -> None:
    for library in ("s3fs", "moto", "flask"):
        if importlib.util.find_spec(library) is None:
            pytest.skip(f"{library} is not installed (te-fsdp[s3], moto[server])")
    with remote_storage.s3_server(tmp_path):
        save_and_load("s3://bucket/run")
        first = resolve_path("s3://bucket/once")
        first.create(b"1")
        with pytest.raises(FileExistsError):
            first.create(b"2")
        assert first.read_bytes() == b"1" and first.stat().st_size == 1
        assert "exist" in text_of(checkpoint.save, "s3://no-such-bucket/a", trained()[0])
