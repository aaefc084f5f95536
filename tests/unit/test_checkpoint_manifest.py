"""Invalid manifests with a good digest raise an error that names the problem."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st
from torch import nn

from te_fsdp import checkpoint
from te_fsdp.checkpoint import manifest as manifests
from te_fsdp.errors import CheckpointError
from tests.unit.damage import (
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


@pytest.fixture(scope="module")
def saves(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return two_saves(tmp_path_factory.mktemp("saves"))


_WEIGHT = {"shape": [1], "dtype": "float32", "layout": None, "format": None}
JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats()
    | st.text(st.characters(), max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=4,
)


@pytest.fixture(scope="module")
def formats(
    saves: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory
) -> dict[int, tuple[Path, Any]]:
    """Return a copy of a save to edit, as this te_fsdp writes it and as an older one did, with the manifest."""
    results = {}
    for version in (2, 3):
        path = tmp_path_factory.mktemp("formats") / "a"
        shutil.copytree(saves[0], path)
        body = as_format_2(path) if version == 2 else json.loads((path / MANIFEST).read_text())
        body.pop("digest", None)
        results[version] = path, body
    return results


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(chosen=st.data(), version=st.sampled_from([2, 3]))
def test_malformed_manifest_raises_or_is_ignored(
    formats: dict[int, tuple[Path, Any]], chosen: st.DataObject, version: int
) -> None:
    """Any value at any place, with a valid digest, raises an error, except in unchecked entries of old manifests."""
    path, body = formats[version]
    way = chosen.draw(st.sampled_from(list(places(body))))
    kind = chosen.draw(st.sampled_from(["replace", "remove", "add", "wrap"]))
    value = chosen.draw(JSON)

    def change(holder: Any, key: Any) -> None:
        if kind == "remove":
            del holder[key]
        elif kind == "wrap":
            holder[key] = [holder[key]]
        elif kind == "add" and isinstance(holder, dict):
            holder[chosen.draw(st.text(max_size=3))] = value
        else:
            holder[key] = value

    edited = put(body, way, change)
    (path / MANIFEST).write_bytes(sealed(edited))
    model, optimizer = training(1)
    before = digest(model, optimizer)
    error = loaded_or_error(path, model, optimizer)
    same = edited == body or (kind == "remove" and len(way) == 1 and not body[way[0]])  # left out is empty
    assert error or version == 2 or same
    if error:
        assert digest(model, optimizer) == before
        assert MANIFEST in error or METADATA in error or "does not fit" in error or "damaged" in error


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"[1]",
        b"3",
        b"null",
        b"\xff\xfe{}",
        b"[" * 100_000,
        b'{"a":' * 5000,
        b"1" * 5000,
        b'{"digest": "\\ud800"}',
    ],
    ids=[
        "empty",
        "list",
        "number",
        "null",
        "not UTF-8",
        "deep lists",
        "deep objects",
        "long number",
        "surrogate",
    ],
)
def test_unreadable_manifest_raises(saves: tuple[Path, Path], tmp_path: Path, text: bytes) -> None:
    shutil.copytree(saves[0], tmp_path / "a")
    (tmp_path / "a" / MANIFEST).write_bytes(text)
    with pytest.raises(CheckpointError, match=r"te_fsdp\.json: unreadable manifest"):
        checkpoint.load(tmp_path / "a", *training(1))


@pytest.mark.parametrize(
    ("way", "value", "told"),
    [
        (
            ("parameters", "0.weight", "shape"),
            [5, -6],
            r"parameters\.0\.weight\.shape\[1\]: expected an integer of at least",
        ),
        (
            ("parameters", "0.weight", "dtype"),
            "flaot32",
            r"0\.weight\.dtype: expected the name of a dtype, got 'flaot32'",
        ),
        (("optimizer", "groups"), {}, r"optimizer\.groups: expected a list, got \{\}"),
        (
            ("optimizer", "state", "0.bias", "step"),
            {"shape": []},
            r"state\.0\.bias\.step: expected the keys shape, dtype",
        ),
        (
            ("optimizer", "groups", 0, "parameters", 0),
            1,
            r"optimizer\.groups\[0\]\.parameters\[0\]: expected text, got 1",
        ),
        (
            ("extra", "order", "te_fsdp.tensor", "shape"),
            [2**64],
            r"extra.*shape\[0\]: expected an integer of at least",
        ),
        (
            ("extra", "own"),
            {"te_fsdp.per_rank": []},
            r"extra/own: values of 0 ranks: expected values of the 1 ranks",
        ),
        (("files", "../x"), [1, 2], r"a name in files: expected the name of a file, got '\.\./x'"),
        (("mesh", "ranks"), True, r"mesh\.ranks: expected an integer of at least 1, got True"),
        (("delayed",), {"a": {}}, r"delayed\.a: expected the keys num_gemms"),
        (("saved_at",), "yesterday", r"saved_at: expected an integer of at least 0, got 'yesterday'"),
        (("sawed_at",), 1, r"te_fsdp\.json: expected the keys versions, .*, got \['sawed_at'\]"),
    ],
    ids=lambda value: ".".join(map(str, value)) if isinstance(value, tuple) else "",
)
def test_invalid_manifest_values_raise_with_a_reason(
    formats: dict[int, tuple[Path, Any]], way: tuple[Any, ...], value: Any, told: str
) -> None:
    path, body = formats[2]
    (path / MANIFEST).write_bytes(sealed(put(body, way, lambda holder, key: holder.__setitem__(key, value))))
    with pytest.raises(CheckpointError, match=told):
        checkpoint.load(path, *training(1))


def test_missing_extra_tensor_raises_before_changes(formats: dict[int, tuple[Path, Any]]) -> None:
    path, body = formats[2]
    way = ("extra", "order", "te_fsdp.tensor", "key")
    (path / MANIFEST).write_bytes(
        sealed(put(body, way, lambda holder, key: holder.__setitem__(key, "extra/x")))
    )
    model, optimizer = training(1)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    with pytest.raises(CheckpointError, match="extra/x is missing. Its manifest and its tensors"):
        checkpoint.load(path, model, optimizer)
    assert all(torch.equal(*pair) for pair in zip(model.parameters(), before, strict=True))


def test_save_rejects_too_deeply_nested_extra(tmp_path: Path) -> None:
    deep: Any = 1
    for level in range(201):
        deep = [deep]
        if level == 100:
            checkpoint.save(tmp_path / "a", nn.Linear(2, 2), extra={"deep": deep})
    with pytest.raises(CheckpointError, match="at most 200 levels"):
        checkpoint.save(tmp_path / "b", nn.Linear(2, 2), extra={"deep": deep})
    assert [path.name for path in tmp_path.iterdir()] == ["a"]
    assert checkpoint.load(tmp_path / "a", nn.Linear(2, 2))


def test_shared_values_are_validated_once(saves: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """A difference in one of them is still detected: ``True`` is not a number, although it equals 1."""
    manifest, looks, check = manifests.Manifest.read(saves[0]), [], manifests._check
    manifest.parameters = {f"{n}.weight": {**_WEIGHT, "shape": [n % 3, 1]} for n in range(1000)}

    def counted(value: Any, rule: Any, where: str, depth: int = 0) -> None:
        looks.append(where)
        check(value, rule, where, depth)

    monkeypatch.setattr(manifests, "_check", counted)
    manifests.parse_manifest(json.loads(json.dumps(manifest.body)))
    assert sum(where.startswith("parameters.") for where in looks) < 100
    for bad in (
        {"shape": [2, True]},
        {"shape": [2.0, 1]},
        {"dtype": "float23"},
        {"format": "x"},
        {"size": 1},
    ):
        manifest.parameters["900.weight"] = {**_WEIGHT, "shape": [2, 1], **bad}
        with pytest.raises(manifests.DamagedFileError, match=r"^parameters\.900\.weight"):
            manifests.parse_manifest(json.loads(json.dumps(manifest.body)))
    manifest.parameters = {f"{n}.weight": {**_WEIGHT, "shape": [1]} for n in range(20)} | {"\ud800": _WEIGHT}
    with pytest.raises(manifests.DamagedFileError, match="a name in parameters: expected text"):
        manifests.parse_manifest(manifest.body)
