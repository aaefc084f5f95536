"""Save a small training run, for tests that corrupt the files."""

from __future__ import annotations

import copy
import io
import json
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from te_fsdp import checkpoint
from te_fsdp.checkpoint import manifest as manifests, shard_files
from te_fsdp.errors import CheckpointError

MANIFEST, METADATA, INDEX, DATA = "te_fsdp.json", ".metadata", "te_fsdp.index", "__0_0.distcp"
EXTRA = {
    "step": 7,
    "order": torch.arange(300),
    "own": checkpoint.PerRank([1, (2, torch.ones(2))]),
    "note": "a",
}


def training(seed: int, steps: int = 1) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01 * (seed + 1))
    for _ in range(steps):
        model(torch.randn(4, 6)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def digest(model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """Return a digest of model and optimizer, including options."""
    text = io.StringIO()

    def add(where: str, value: Any) -> None:
        for key, item in value.items() if isinstance(value, dict) else ():
            add(f"{where}/{key}", item)
        if isinstance(value, torch.Tensor):
            text.write(
                f"{where}: {value.dtype} {tuple(value.shape)} {value.detach().numpy().tobytes().hex()}\n"
            )
        elif not isinstance(value, dict):
            text.write(f"{where}: {value!r}\n")

    add("model", model.state_dict())
    add("optimizer", optimizer.state_dict())
    return text.getvalue()


def two_saves(folder: Path) -> tuple[Path, Path]:
    """Save one model twice, one step apart, with files of the same names and sizes."""
    model, optimizer = training(0)
    checkpoint.save(folder / "a", model, optimizer, extra=EXTRA)
    model, optimizer = training(0, steps=2)
    checkpoint.save(folder / "b", model, optimizer, extra=EXTRA)
    sizes = [{p.name: p.stat().st_size for p in (folder / name).iterdir()} for name in "ab"]
    assert sizes[0].keys() == {MANIFEST, METADATA, INDEX, DATA} and sizes[0][DATA] == sizes[1][DATA]
    return folder / "a", folder / "b"


def sealed(body: Any) -> bytes:
    """Return a manifest's text with a valid digest."""
    body = {"digest": "0" * 32, **body} if isinstance(body, dict) else body
    text = json.dumps(body).encode()
    return text.replace(b"0" * 32, manifests._digest(text).encode(), 1)


def places(node: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path of every value in nested JSON."""
    items = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    for key, item in items:
        yield (*at, key)
        yield from places(item, (*at, key))


def put(node: Any, way: tuple[Any, ...], change: Callable[[Any, Any], None]) -> Any:
    """Return a copy in which a function has changed the container of a value."""
    node = copy.deepcopy(node)
    holder = node
    for key in way[:-1]:
        holder = holder[key]
    change(holder, way[-1])
    return node


def loaded_or_error(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    try:
        checkpoint.load(path, model, optimizer)
    except CheckpointError as error:
        return str(error)
    return ""


def as_format_2(path: Path, *, save_id: str = "0d5d1bd6-5b0e-4b0f-9c5e-3c5b6f0a8d6e") -> dict[str, Any]:
    """Convert a save to format 2, without tensor checksums and index, and return its manifest."""
    body = json.loads((path / MANIFEST).read_text())
    del body["files"][INDEX]
    (path / INDEX).unlink()
    begin = body["files"][DATA][2]
    with (path / DATA).open("r+b") as file:
        file.truncate(begin)
    metadata = pickle.loads((path / METADATA).read_bytes())
    metadata.storage_meta.save_id = save_id or metadata.storage_meta.save_id
    (path / METADATA).write_bytes(pickle.dumps(metadata))
    for name in (DATA, METADATA):
        body["files"][name] = [(path / name).stat().st_size, shard_files.crc32((path / name).read_bytes())]
    for field in ("digest", "save_id", "semantics"):
        body.pop(field)
    body["format_version"] = 2
    (path / MANIFEST).write_bytes(sealed(body))
    return body
