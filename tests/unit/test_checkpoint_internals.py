"""Test internals of saving: staging, checksums, retention, untrusted metadata, interpreter exit."""

from __future__ import annotations

import os
import pickle
import random
import signal
import subprocess
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, TensorProperties

from te_fsdp import checkpoint
from te_fsdp.checkpoint import plain_dcp, planner, shard_files
from te_fsdp.checkpoint.extra import for_rank, join_ranks
from te_fsdp.checkpoint.host_memory import Staging, blocks_of
from te_fsdp.checkpoint.index import read_metadata, unpickle_metadata
from te_fsdp.checkpoint.lazy_tensors import Chunked, Lazy
from te_fsdp.checkpoint.load_source import Source
from te_fsdp.checkpoint.planner import checksum
from te_fsdp.checkpoint.reading import Staged
from te_fsdp.errors import CheckpointError
from te_fsdp.tensor_checksums import _PIECE, row_checksums
from tests.unit.commands import python_path
from tests.unit.damage import MANIFEST, METADATA, as_format_2, sealed


def names(directory: Path) -> list[str]:
    return sorted(p.name for p in directory.iterdir())


# ------------------------------------------------------------------------------------------------------ copies


@settings(deadline=None)  # the machine may be busy
@given(
    st.lists(st.tuples(st.integers(0, 9), st.integers(1, 9), st.booleans()), min_size=1, max_size=6),
    st.data(),
)
def test_staged_copies_are_exact_and_independent(
    shapes: list[tuple[int, int, bool]], data: st.DataObject
) -> None:
    memory = Staging()
    for _ in range(2):  # the second time in the memory of the first
        tensors = {}
        for number, (rows, columns, transposed) in enumerate(shapes):
            dtype = data.draw(st.sampled_from([torch.float32, torch.bfloat16, torch.uint8, torch.int64]))
            tensor = torch.randint(0, 100, (rows, columns)).to(dtype)
            tensors[number] = tensor.t() if transposed else tensor[:, : columns // 2 + 1]
        blocks = blocks_of(tensors.items())
        rows = memory.copy(blocks)
        copies = {
            k: t
            for block, each in zip(blocks, rows, strict=True)
            for k, t in zip(block.keys, each, strict=True)
        }
        assert copies.keys() == tensors.keys() and len(blocks) == len(
            {(t.dtype, t.shape) for t in tensors.values()}
        )
        expected = {key: tensor.clone() for key, tensor in tensors.items()}
        for tensor in tensors.values():
            tensor.zero_()
        for key, copy in copies.items():
            assert torch.equal(copy, expected[key]) and copy.dtype == expected[key].dtype
        assert all(each.is_contiguous() for each in rows)


def test_staging_memory_is_reused_and_grows() -> None:
    memory = Staging()

    def place(size: int) -> int:
        return memory.copy(blocks_of([("a", torch.zeros(size))]))[0].data_ptr()

    place(1000)
    first = place(500)
    assert sum(map(len, memory.slabs)) == 4032
    assert place(1000) == first
    place(3000)
    assert sum(map(len, memory.slabs)) == 12032


def test_large_tensors_are_not_stacked() -> None:
    tensors = [torch.full((1 << 15,), float(n)) for n in range(3)] + [
        torch.full((2,), float(n)) for n in range(3)
    ]
    blocks = blocks_of(enumerate(tensors))
    assert [block.keys for block in blocks] == [[0], [1], [2], [3, 4, 5]]
    assert blocks[1].rows().data_ptr() == tensors[1].data_ptr()


# --------------------------------------------------------------------------------------------------- checksums


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.bool]
)
def test_checksums_depend_on_every_element_and_position(dtype: torch.dtype) -> None:
    """Cover the checksum for GPUs and the one for the CPU."""
    tensor = (
        torch.arange(100).remainder(2).to(dtype) if dtype == torch.bool else torch.arange(100.0).to(dtype)
    )
    for total in (lambda t: int(row_checksums(t.reshape(1, -1))), lambda t: checksum([t])):
        expected = total(tensor)
        assert total(tensor.clone()) == expected == total(tensor.view(10, 10))
        swapped = tensor.clone()
        swapped[[1, 2]] = tensor[[2, 1]]
        assert total(swapped) != expected
        for place in (0, 50, 99):
            changed = tensor.clone()
            changed.view(torch.uint8)[place * tensor.element_size()] ^= 1
            assert total(changed) != expected
    assert checksum([torch.empty(0), torch.ones(2, 3).t()]) == checksum([torch.empty(0), torch.ones(3, 2)])
    many = [torch.full((3,), float(number)) for number in range(5)]
    assert checksum(many) != checksum(many[::-1])  # of one block


def test_checksums_distinguish_positions_in_different_blocks() -> None:
    tensor = torch.zeros(2 * _PIECE + 3, dtype=torch.uint8)
    tensor[5] = 1
    other = tensor.roll(_PIECE)  # the same place in the next block
    assert int(row_checksums(tensor[None])) != int(row_checksums(other[None]))
    assert checksum([torch.arange(6.0)[::2]]) == checksum([torch.tensor([0.0, 2.0, 4.0])]), (
        "with gaps in memory"
    )


# --------------------------------------------------------------------------------------------------- retention


def test_keep_last_keeps_the_newest_checkpoints(tmp_path: Path) -> None:
    for step in range(5):
        handle = checkpoint.save(tmp_path / f"step-{step}", nn.Linear(2, 2), keep_last=3)
        assert handle.done() and handle.result() == tmp_path / f"step-{step}"
    assert names(tmp_path) == ["step-2", "step-3", "step-4"]
    (tmp_path / "notes").mkdir()
    checkpoint.save(tmp_path / "a", nn.Linear(2, 2), keep_last=1)
    assert names(tmp_path) == ["a", "notes"]
    checkpoint.save(tmp_path / "b", nn.Linear(2, 2), keep_last=2)
    assert names(tmp_path) == ["a", "b", "notes"]
    for wrong in (0, -1, 1.5, True):
        with pytest.raises(CheckpointError, match="keep_last"):
            checkpoint.save(tmp_path / "c", nn.Linear(2, 2), keep_last=wrong)  # type: ignore[arg-type]
    assert names(tmp_path) == ["a", "b", "notes"]


def test_failed_save_keeps_earlier_checkpoints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint.save(tmp_path / "a", nn.Linear(2, 2))

    def full(self: object) -> Any:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(planner.RankWriter, "blocks", full)
    with pytest.raises(CheckpointError, match="b: the disk is full .No space.*earlier checkpoints are unch"):
        checkpoint.save(tmp_path / "b", nn.Linear(2, 2), keep_last=1)
    assert names(tmp_path) == ["a"]


# ---------------------------------------------------------------------------------------- asynchronous, and its end


def test_async_save_handle_returns_the_path_and_saves_a_snapshot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go, original = threading.Event(), planner.RankWriter.blocks

    def late(self: planner.RankWriter) -> Any:
        assert go.wait(30)
        return original(self)

    monkeypatch.setattr(planner.RankWriter, "blocks", late)
    model = nn.Linear(2, 2)
    expected = model.weight.detach().clone()
    handle = checkpoint.save(tmp_path / "a", model, asynchronous=True)
    with torch.no_grad():
        model.weight.zero_()
    assert not handle.done() and not handle.wait(0.01) and checkpoint.latest(tmp_path) is None
    with pytest.raises(TimeoutError, match="still being saved after 0.01 s"):
        handle.result(0.01)
    go.set()
    assert handle.result() == tmp_path / "a" == checkpoint.latest(tmp_path)
    assert handle.done() and handle.bytes == 24 and handle.stall > 0
    checkpoint.load(tmp_path / "a", model)
    assert torch.equal(model.weight, expected)


def test_interpreter_exit_waits_for_a_running_save(tmp_path: Path, python: str) -> None:
    """The save succeeds in the parent process. It fails in the child, which reports it without a call to `result`."""
    code = """
import os, sys, time
import torch
from te_fsdp import checkpoint
from te_fsdp.checkpoint import async_save, planner
original, name = planner.RankWriter.blocks, "a" if os.fork() else "b"
def slow(self):
    time.sleep(0.5)
    if name == "b":
        raise OSError(28, "No space left on device")
    return original(self)
planner.RankWriter.blocks = slow
handle = checkpoint.save(f"{sys.argv[1]}/{name}", torch.nn.Linear(2, 2), asynchronous=True, progress=name == "a")
os.write(1, b"running %s\\n" % str(not handle.done()).encode())  # in one piece: two processes write
raise SystemExit(3)
"""
    command = [python, "-c", code, str(tmp_path)]
    # The te_fsdp of this tree, whichever is installed.
    environment = {**os.environ, "PYTHONPATH": python_path()}
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert ran.returncode == 3 and ran.stdout.count("running True") == 2, ran.stderr
    checkpoint.verify(tmp_path / "a")
    assert "saving a" in ran.stderr
    assert "te_fsdp: " in ran.stderr and "b: the disk is full (No space left on device)" in ran.stderr
    assert names(tmp_path) == ["a"]


def test_save_with_a_stopped_rank_fails_after_the_timeout(tmp_path: Path, python: str) -> None:
    """Rank 1 is stopped while it writes. Rank 0's save fails, and its interpreter exits."""
    code = """
import os, signal, sys
import torch
import torch.distributed as dist
import te_fsdp
from te_fsdp import checkpoint
from te_fsdp.checkpoint import async_save, planner
child = os.fork()
dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}/store", rank=int(not child), world_size=2)
if not child:
    planner.RankWriter.blocks = lambda self: os.kill(os.getpid(), signal.SIGSTOP)
te_fsdp.set_collective_timeout(1.0)
checkpoint.save(f"{sys.argv[1]}/a", torch.nn.Linear(2, 2), asynchronous=True)
if child:
    print(child, flush=True)
"""
    environment = {**os.environ, "PYTHONPATH": python_path()}
    with subprocess.Popen(
        [python, "-c", code, str(tmp_path)],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as ran:
        stopped = int(ran.stdout.readline())
        try:
            status = ran.wait(60)
        finally:
            os.kill(stopped, signal.SIGKILL)
        output = ran.stderr.read()
    assert status == 0
    text = "a: save failed on rank(s) 1: the rank has ended, or was silent for 1 s: "
    assert text in output and "Timed out waiting 1000ms" in output, output
    assert checkpoint.latest(tmp_path) is None


# ------------------------------------------------------------------------------------------- files of other people


class Evil:
    def __reduce__(self) -> tuple:
        return Path.write_text, (Path("executed"), "")


def test_metadata_of_a_newer_torch_is_readable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch 2.15 has one more field per tensor than 2.14. Later versions may add more."""
    checkpoint.save(tmp_path / "a", nn.Linear(2, 2))
    file = tmp_path / "a" / ".metadata"
    expected = unpickle_metadata(file.read_bytes())
    fields = TensorProperties.__getstate__
    with monkeypatch.context() as newer:
        newer.setattr(TensorProperties, "__getstate__", lambda self: (*fields(self), (2, 1)))
        written = pickle.dumps(expected)
    with pytest.raises(ValueError, match="too many values"):
        pickle.loads(written)
    assert unpickle_metadata(written) == expected


def test_metadata_cannot_execute_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    checkpoint.save(tmp_path / "a", nn.Linear(2, 2))
    file = tmp_path / "a" / ".metadata"
    assert set(unpickle_metadata(file.read_bytes()).state_dict_metadata) == {"model.weight", "model.bias"}
    for evil in (Evil(), {"state_dict_metadata": Evil()}, random.Random()):
        file.write_bytes(pickle.dumps(evil))
        with pytest.raises(CheckpointError, match="is not allowed in the metadata of a checkpoint"):
            read_metadata(tmp_path / "a")
        with pytest.raises(CheckpointError, match="damaged"):
            checkpoint.load(tmp_path / "a", nn.Linear(2, 2))
    file.write_bytes(pickle.dumps({}))
    with pytest.raises(pickle.UnpicklingError, match="a dict instead of DCP's Metadata"):
        unpickle_metadata(file.read_bytes())
    assert not Path("executed").exists()
    pickle.loads(pickle.dumps(Evil()))
    assert Path("executed").exists(), "a plain pickle would have"


@pytest.mark.parametrize(
    ("put", "number"),
    [(b"r\xff\xff\xff\x0f", "268,435,455"), (b"p268435455\n", "268,435,455")],
    ids=["long", "written"],
)
def test_metadata_with_huge_memo_indices_is_rejected(put: bytes, number: str) -> None:
    """Python's unpickler allocates its memo table up to the largest index, here 4 GiB."""
    good = pickle.dumps({"name": ["r" * 300, (1, 2.5, b"x" * 300)], "other": 1 << 70})
    for data in (good[:-1], b"\x80\x02}q\x00r\x01\x00\x00\x00p2\ncbuiltins\nint\nU\x03abc"):
        with pytest.raises(pickle.UnpicklingError, match=f"object number {number} in a pickle of"):
            unpickle_metadata(data + put + b".")
        with pytest.raises(pickle.UnpicklingError, match="a dict instead|is not allowed"):
            unpickle_metadata(data + b".")


@pytest.mark.parametrize(
    ("owner", "name"),
    [(Path, "read_bytes"), (ChunkStorageMetadata, "offsets"), (ChunkStorageMetadata, "more")],
)
def test_metadata_cannot_change_classes(owner: type, name: str) -> None:
    """A pickle can do harm without a call, by setting attributes of a class."""
    state = pickle.dumps((None, {name: "set"}), protocol=2)[2:-1]
    named = f"c{owner.__module__}\n{owner.__name__}\n".encode()
    before = dict(vars(owner))
    with pytest.raises(
        pickle.UnpicklingError,
        match=f"it sets attributes {owner.__name__}.{name}, which the metadata of a checkpoint never",
    ):
        unpickle_metadata(b"\x80\x02" + named + state + b"b.")
    with pytest.raises(
        pickle.UnpicklingError, match="system is not allowed"
    ):  # restored when it fails later, too
        unpickle_metadata(b"\x80\x02" + named + state + b"bcos\nsystem\n.")
    assert dict(vars(owner)) == before
    pickle.loads(b"\x80\x02" + named + state + b"b.")
    assert getattr(owner, name) == "set", "the control: unpickled as usual it is changed"
    if name in before:
        setattr(owner, name, before[name])
    else:
        delattr(owner, name)


def swap_in(path: Path, file: str) -> None:
    """Make the metadata of a directory refer to a stored tensor in a different file."""
    result = pickle.loads((path / ".metadata").read_bytes())
    place = next(iter(result.storage_data.values()))
    place.relative_path, place.offset, place.length = file, 0, (path / file).stat().st_size
    (path / ".metadata").write_bytes(pickle.dumps(result))


@pytest.mark.parametrize("kind", ["plain", "te_fsdp"])
def test_stored_tensors_cannot_execute_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Cover tensors of te_fsdp and plain DCP directories, with checksums that an attacker has recomputed."""
    monkeypatch.chdir(tmp_path)
    path, model = tmp_path / "a", nn.Linear(2, 2)
    if kind == "plain":
        dcp.save(model.state_dict(), checkpoint_id=path, no_dist=True)
        dcp.save({**model.state_dict(), "_extra_state": Evil()}, checkpoint_id=tmp_path / "b", no_dist=True)
        with pytest.raises(
            CheckpointError,
            match="_extra_state: te_fsdp cannot read this state.* cannot be read weights-only",
        ):
            checkpoint.load(tmp_path / "b", model)
    else:
        checkpoint.save(path, model)
        body = as_format_2(path)
    torch.save(Evil(), path / "evil.distcp")
    swap_in(path, "evil.distcp")
    if kind == "te_fsdp":
        for name in ("evil.distcp", METADATA):
            body["files"][name] = [
                (path / name).stat().st_size,
                shard_files.crc32((path / name).read_bytes()),
            ]
        (path / MANIFEST).write_bytes(sealed(body))
    with pytest.raises(CheckpointError, match="cannot be read weights-only"):
        checkpoint.load(path, model)
    assert not Path("executed").exists()
    torch.load(path / "evil.distcp", weights_only=False)
    assert Path("executed").exists(), "the control"
    swap_in(path, "../a/evil.distcp")
    with pytest.raises(CheckpointError, match=r"refers to \.\./a/evil\.distcp"):
        plain_dcp.open_dcp(path)


# ------------------------------------------------------------------------------------------------- values per rank


def test_per_rank_values_are_joined_and_split() -> None:
    encoded = {
        "a": [{"te_fsdp.per_rank": "extra/a/0"}],
        "b": {"te_fsdp.tuple": [1, {"te_fsdp.per_rank": "extra/b/1"}]},
    }
    parts = [({"extra/a/0": rank, "extra/b/1": {"r": [rank]}}, {}) for rank in range(2)]
    joined = join_ranks(encoded, parts)
    mesh = {"ranks": 2, "dp_shard": 2, "tp": 1}
    result, lost = for_rank(joined, mesh, {"ranks": 2, "dp_shard": 2}, 1)
    assert result == {"a": [1], "b": {"te_fsdp.tuple": [1, {"r": [1]}]}} and not lost
    for other in ({"ranks": 1}, {"ranks": 2, "tp": 2}, {"ranks": 4, "dp_shard": 4}):
        result, lost = for_rank(joined, mesh, other, 0)
        assert result == {"a": [None], "b": {"te_fsdp.tuple": [1, None]}} and lost == [
            "extra/a/0",
            "extra/b/1",
        ]
    with pytest.raises(CheckpointError, match="PerRank values at different places on rank 0 and rank 1"):
        join_ranks(encoded, [parts[0], ({}, {})])


def _mark(key: str, size: int = 1) -> dict[str, Any]:
    return {"te_fsdp.tensor": {"key": key, "shape": [size], "dtype": "torch.float32"}}


def test_dtensors_of_other_ranks_are_added_to_extra() -> None:
    """Example: averages of experts that rank 0 does not have. They were lost without an error."""
    first, second = "extra/ema/a~1b~2~0", "extra/new/c"
    encoded = join_ranks(
        {"step": 1, "ema": {"x": 2}}, [({}, {}), ({}, {first: _mark(first), second: _mark(second)})]
    )
    assert encoded == {"step": 1, "ema": {"x": 2, "a/b@~": _mark(first)}, "new": {"c": _mark(second)}}
    for there in ({"ema": [1]}, {"ema": {"te_fsdp.tuple": []}}, {"ema": {"a/b@~": 5}}, {"ema": 0}):
        with pytest.raises(
            CheckpointError, match="extra/ema/a~1b~2~0: a DTensor that rank 1 has and rank 0 does not have"
        ):
            join_ranks(there, [({}, {}), ({}, {first: _mark(first)})])
    with pytest.raises(CheckpointError, match="extra/ema/a~1b~2~0: different DTensors.*on rank 1"):
        join_ranks(
            {"ema": {"a/b@~": _mark(first)}}, [({}, {first: _mark(first)}), ({}, {first: _mark(first, 2)})]
        )


def test_per_rank_values_round_trip_in_one_process(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    torch.manual_seed(3)
    random.seed(3)
    extra = {"a@b": checkpoint.PerRank((torch.arange(3), None)), "a": [1], "rng": checkpoint.rng_state()}
    checkpoint.save(tmp_path / "a", model, extra=extra)
    drawn = torch.rand(2).tolist(), random.random()
    back = checkpoint.load(tmp_path / "a", model)
    assert torch.equal(back["a@b"][0], torch.arange(3)) and back["a@b"][1] is None and back["a"] == [1]
    checkpoint.set_rng_state(back["rng"])
    assert (torch.rand(2).tolist(), random.random()) == drawn
    with pytest.raises(CheckpointError, match="extra/x@0/0: cannot be stored.*got PerRank"):
        checkpoint.save(
            tmp_path / "b", nn.Linear(2, 2), extra={"x": checkpoint.PerRank([checkpoint.PerRank(1)])}
        )
    with pytest.raises(CheckpointError, match="set_rng_state: no state"):
        checkpoint.set_rng_state(None)
    with pytest.raises(CheckpointError, match="tracker"):
        checkpoint.set_rng_state(back["rng"], tracker=object())


def test_computed_tensors_are_read_by_one_thread() -> None:
    """Tensors of a Hugging Face folder cache the group of layers that was read last."""
    seen: list[threading.Thread] = []

    def rows(first: int, last: int) -> torch.Tensor:
        seen.append(threading.current_thread())
        return torch.ones(last - first)

    computed, staged = Lazy((4,), torch.float32, rows), Staged()
    stored = Chunked("b", (4,), torch.float32, [((0,), computed)])
    source: Any = SimpleNamespace(index=None, tensors={"a": computed, "b": stored}, staged=staged)
    Source._read(source, [("a", (0,), (4,)), ("b", (2,), (2,))])
    assert seen == [threading.main_thread()] * 2
    assert staged.new(("b", (2,), (2,)), torch.device("cpu")).tolist() == [1.0, 1.0]
    Source._read(source, [("b", (0,), (4,))])
    assert seen[2] is not threading.main_thread(), "the control"
