"""Test the index of a save: it equals DCP's metadata, is read in parts, must belong to the save."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from te_fsdp import checkpoint
from te_fsdp.checkpoint import index, shard_files
from te_fsdp.checkpoint.index import Index, encode, read_index, unpickle_metadata
from te_fsdp.checkpoint.manifest import Manifest
from te_fsdp.checkpoint.planner import assign_writers
from te_fsdp.checkpoint.reader import empty_manifest
from te_fsdp.checkpoint.reading import pieces_to_read
from te_fsdp.checkpoint.tensor_entries import RankTensors
from te_fsdp.errors import CheckpointError
from tests.unit.damage import INDEX, MANIFEST, METADATA, loaded_or_error, sealed, training, two_saves

RANKS, SHAPES = 6, [(), (13,), (12, 5), (4, 6, 3), (7, 2)]


def written(path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Manifest, Index]:
    """Write index and metadata of 40 tensors over six ranks, every third one also split along its last dim."""
    monkeypatch.setattr(index, "_ROWS", 16)
    seen: list[RankTensors] = [[] for _ in range(RANKS)]
    for number in range(40):
        shape = SHAPES[number % len(SHAPES)]
        for rank in range(RANKS):
            low, high = (rank * shape[0] // RANKS, (rank + 1) * shape[0] // RANKS) if shape else (0, 1)
            boxes = [((low, *(0 for _ in shape[1:])), (high - low, *shape[1:]))] if shape else [((), ())]
            if len(shape) > 1 and number % 3 == 0:
                ((first, *zeros), (rows, *sizes)), last = boxes[0], shape[-1]
                half = last // 2
                boxes = [
                    ((first, *zeros[:-1], 0), (rows, *sizes[:-1], half)),
                    ((first, *zeros[:-1], half), (rows, *sizes[:-1], last - half)),
                ]
            boxes = [box for box in boxes if 0 not in box[1]]
            if boxes:
                seen[rank].append((f"k{number}", shape, torch.float32 if number % 2 else torch.int8, boxes))
    parts = assign_writers(seen)
    places = []
    for part in parts:
        lengths = np.random.default_rng(0).integers(100, 2**33, len(part.writes))
        ends = np.cumsum(lengths)
        places.append(np.stack([np.array(part.writes), ends - lengths, lengths], axis=1))
    manifest = empty_manifest()
    manifest.save_id, manifest.format_version = "a" * 32, 3
    encode(parts[0].tensors or {}, [f"f{rank}" for rank in range(RANKS)], places, manifest.identity).write(
        path, manifest
    )
    return manifest, Index.of(unpickle_metadata((path / METADATA).read_bytes()))


def by_name(found: Index, keys: list[str]) -> dict[str, list[tuple[Any, ...]]]:
    """Return rows with the names of files."""
    rows = {key: own.tolist() for key, own in found.rows(keys)}
    return {key: [(found.files[at], *rest) for at, *rest in own] for key, own in rows.items()}


def test_index_equals_dcp_metadata(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    manifest, described = written(tmp_path, monkeypatch)
    blocks: list[int] = []
    unpack = index._unpack
    monkeypatch.setattr(index, "_unpack", lambda *given: blocks.append(1) or unpack(*given))
    result = read_index(tmp_path, manifest)
    keys = [*described.tensors]
    assert result.tensors == described.tensors and len(keys) == 40
    assert by_name(result, keys) == by_name(described, keys)
    assert len(blocks) > 5
    blocks.clear()
    some = ["k3", "k38", "none"]
    assert by_name(result, some) == by_name(described, some)
    assert len(blocks) == 2, "no more than requested"


def test_load_reads_only_shards_that_overlap_the_rectangle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each element of a rectangle is read once from the shard that contains it, for few and many shards."""
    manifest, described = written(tmp_path, monkeypatch)
    for few in (0, 100):
        monkeypatch.setattr("te_fsdp.checkpoint.reading._FEW", few)
        for key, (shape, _) in described.tensors.items():
            low, sizes = tuple(n // 4 for n in shape), tuple(max(1, n // 2) for n in shape)
            wanted = [(key, low, sizes)]
            covered = torch.zeros(sizes, dtype=torch.int64)
            for pieces in pieces_to_read(tmp_path, manifest, read_index(tmp_path, manifest), wanted).values():
                for piece, parts in pieces:
                    [(begin, own)] = [
                        (row[3 : 3 + len(shape)], row[3 + len(shape) :])
                        for row in by_name(described, [key])[key]
                        if (row[0], row[1]) == (piece.file.name, piece.offset)
                    ]
                    assert piece.shape == tuple(own)
                    for _, box in parts:
                        assert 0 not in box.sizes, "it does not touch the rectangle only"
                        covered[tuple(map(slice, box.original, np.add(box.original, box.sizes)))] += 1
                        there = np.add(begin, box.local).tolist()
                        assert there == np.add(low, box.original).tolist()
            assert bool((covered == 1).all())


@pytest.fixture(scope="module")
def saves(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return two_saves(tmp_path_factory.mktemp("saves"))


def test_load_does_not_unpickle_dcp_metadata(
    saves: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(index, "unpickle_metadata", None)
    checkpoint.load(saves[0], *training(1))


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ("unlisted", f"{INDEX}: not listed in the manifest"),
        ("without a table", f"unreadable {INDEX}"),
        ("of another save", f"unreadable {INDEX} .*it was written by a different save"),
    ],
)
def test_load_rejects_an_index_of_a_different_save(
    saves: tuple[Path, Path], tmp_path: Path, change: str, text: str
) -> None:
    """The manifest has a valid digest, as an attacker would write it."""
    path = tmp_path / "a"
    shutil.copytree(saves[0], path)
    body, other = (json.loads((save / MANIFEST).read_text()) for save in saves)
    if change == "unlisted":
        del body["files"][INDEX]
    elif change == "without a table":
        body["files"][INDEX] = [(path / INDEX).stat().st_size, shard_files.crc32((path / INDEX).read_bytes())]
    else:
        shutil.copy(saves[1] / INDEX, path / INDEX)
        body["files"][INDEX] = other["files"][INDEX]
    del body["digest"]
    (path / MANIFEST).write_bytes(sealed(body))
    error = loaded_or_error(path, *training(1))
    assert re.search(text, error), error


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"files": None},
        {"blocks": [[[[], [2], "float32", 1]]]},
        {"blocks": [[["model.0.bias", [5], "Tensor", 1]]]},
    ],
    ids=["none", "no files", "no name", "no dtype"],
)
def test_load_rejects_malformed_index_with_valid_checksums(
    saves: tuple[Path, Path], tmp_path: Path, change: dict[str, Any]
) -> None:
    path = tmp_path / "a"
    shutil.copytree(saves[0], path)
    body, data = json.loads((path / MANIFEST).read_text()), (path / INDEX).read_bytes()
    begin = data.index(b'{"files"')
    with (path / INDEX).open("wb") as raw:
        file = shard_files.SummedFile(raw)
        file.add([data[:begin]])
        file.add([json.dumps({**json.loads(data[begin : body["files"][INDEX][2]]), **change}).encode()])
        body["files"][INDEX] = file.finish(INDEX, body["save_id"])
    del body["digest"]
    (path / MANIFEST).write_bytes(sealed(body))
    for error in (loaded_or_error(path, *training(1)), error_of_verifying(path)):
        assert bool(error) == bool(change), "the control loads"


def error_of_verifying(path: Path) -> str:
    try:
        checkpoint.verify(path)
    except CheckpointError as error:
        return str(error)
    return ""


def test_load_reads_older_checkpoints_without_index(saves: tuple[Path, Path], tmp_path: Path) -> None:
    path = tmp_path / "a"
    shutil.copytree(saves[0], path)
    (path / INDEX).unlink()
    body = json.loads((path / MANIFEST).read_text())
    del body["files"][INDEX], body["digest"]
    (path / MANIFEST).write_bytes(sealed(body))
    (model, optimizer), (expected, _) = training(1), training(0)
    checkpoint.load(path, model, optimizer)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), expected.parameters(), strict=True))
