"""What a file or directory holds, whatever wrote it: a manifest's description, and tensors read by blocks."""

from __future__ import annotations

import json
import time
import zipfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

import te_fsdp
from te_fsdp.checkpoint.directory import latest, open_checkpoint
from te_fsdp.checkpoint.entries import GROUPED
from te_fsdp.checkpoint.manifest import DCP_METADATA, FILE_NAME, Manifest, dtype_name, parse_manifest
from te_fsdp.checkpoint.portable.dcp import check_metadata, open_dcp, stored_tensors
from te_fsdp.checkpoint.portable.lazy import Dequantized, InMemory, Lazy, Stack, with_remainders
from te_fsdp.checkpoint.portable.safetensors import is_safetensors, open_safetensors
from te_fsdp.errors import CheckpointError, message
from te_fsdp.modules.semantics import NOTHING

__all__ = [
    "CHECKPOINT",
    "DCP_KIND",
    "MANIFEST_KEY",
    "Contents",
    "describe",
    "empty_manifest",
    "open_checkpoint_contents",
    "open_safetensors_contents",
    "resolve",
]

CHECKPOINT = "te_fsdp checkpoint"
#: What :attr:`Contents.kind` says of a directory that ``torch.distributed.checkpoint.save`` wrote.
DCP_KIND = "torch.distributed.checkpoint"
#: Where portable files carry a manifest of ours; and what stands before names of tensors that are no weights.
MANIFEST_KEY = "te_fsdp"
_OTHER = "te_fsdp:"


@dataclass
class Contents:
    """Contents of a checkpoint of any kind.

    Attributes:
        source: Where it lies.
        kind: What it is, in words.
        manifest: Its description; ``files`` is empty unless it is a checkpoint of te_fsdp.
        tensors: By the keys that a checkpoint of te_fsdp has in its files (``model.<name>``, ...).
        notes: What was taken and what was left, in words.
    """

    source: Path
    kind: str
    manifest: Manifest
    tensors: dict[str, Lazy] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @property
    def names(self) -> list[str]:
        """Names of parameters and buffers."""
        return [*self.manifest.parameters, *self.manifest.buffers]

    def components(self, name: str) -> dict[str, Lazy] | None:
        """The components of a quantized weight; ``None`` for a high-precision one."""
        described = self.manifest.parameters.get(name, {})
        if described.get("format") is None:
            return None
        return {part: self.tensors[f"model.{name}:{part}"] for part in described["components"]}

    def value(self, name: str) -> Lazy:
        """A weight's or buffer's value; a quantized one dequantized.

        Raises:
            CheckpointError: A format that cannot be dequantized.
        """
        parts = self.components(name)
        if parts is None:
            return self.tensors[f"model.{name}"]
        described = self.manifest.parameters[name]
        shape, dtype = tuple(described["shape"]), getattr(torch, described["dtype"])
        if described["layout"] != GROUPED:
            return Dequantized(name, shape, dtype, described["format"], parts)
        experts = [
            {part: tensor.select(index) for part, tensor in parts.items()} for index in range(shape[0])
        ]
        return Stack([Dequantized(name, shape[1:], dtype, described["format"], own) for own in experts])

    def best_value(self, name: str, weights: str) -> tuple[Lazy, str]:
        """A parameter's or buffer's value, and where it came from.

        Args:
            name: Of the parameter or buffer.
            weights: ``"main"``: the optimizer's main weights, an error where a quantized weight has none;
                ``"auto"``: main weights where there are any; ``"compute"``: never.

        Returns:
            The value, and ``"main"``, ``"dequantized"`` or ``"stored"``.

        Raises:
            CheckpointError: ``"main"`` for a quantized weight that has none.
        """
        states = (self.manifest.optimizer or {"state": {}})["state"].get(name, {})
        quantized = self.components(name) is not None
        if weights != "compute" and "master_param" in states:
            main = self.tensors[f"optimizer.state.{name}.master_param"]
            if main.dtype == torch.int16:
                main = with_remainders(self.value(name), main)
            return main, "main"
        if weights == "main" and quantized:
            raise CheckpointError(
                f"{name}: no main weight",
                expected="an optimizer that keeps main weights (FusedAdam with master_weights=True)",
                got="a checkpoint without one",
                fix="export with --weights auto, which takes the dequantized weight",
            )
        return self.value(name), "dequantized" if quantized else "stored"

    @property
    def bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.bytes for tensor in self.tensors.values())


def empty_manifest() -> Manifest:
    """A manifest of nothing, written now, by one process."""
    versions = {"te_fsdp": te_fsdp.__version__, "torch": torch.__version__}
    return Manifest(versions, {"ranks": 1}, time.time_ns(), {}, {}, {}, None, {}, semantics=dict(NOTHING))


def describe(tensor: Lazy) -> dict[str, Any]:
    """The manifest's entry of a high-precision parameter of unknown layout."""
    return {
        "shape": list(tensor.shape),
        "dtype": dtype_name(tensor.dtype),
        "layout": None,
        "format": None,
    }


def resolve(path: Path) -> tuple[Path, str]:
    """Where a checkpoint lies, and of what kind it is: that of the path, or the newest in a folder of them.

    Kinds: :data:`CHECKPOINT`, ``"DCP"``, ``"safetensors"``, ``"torch"``. Local operation.

    Raises:
        CheckpointError: Nothing that can be read lies there, or a save that did not finish.
    """
    if ".te_fsdp-" in path.name and path.name.startswith("."):
        raise CheckpointError(
            f"{path}: was not finished", expected="a whole checkpoint", fix="take the one before"
        )
    if path.is_dir():
        if (path / FILE_NAME).is_file():
            return path, CHECKPOINT
        if (path / DCP_METADATA).is_file():
            return path, "DCP"
        if is_safetensors(path):
            return path, "safetensors"
        newest = latest(path)
        if newest is not None:
            return newest, CHECKPOINT
        open_checkpoint(path)  # raises, and tells what is there and what is near
    if path.is_file():
        if path.suffix == ".safetensors":
            return path, "safetensors"
        if zipfile.is_zipfile(path):
            return path, "torch"
        raise CheckpointError(
            f"{path}: neither a safetensors file nor one that torch.save wrote",
            fix="the file is truncated, older than torch 1.6, or of another kind",
        )
    raise CheckpointError(f"{path}: nothing there", fix="check the path")


def open_checkpoint_contents(path: Path) -> Contents:
    """A checkpoint of te_fsdp. Local operation; needs no model and no process group.

    Raises:
        CheckpointError: Not whole, damaged, or of two saves.
    """
    manifest = open_checkpoint(path)
    check_metadata(path, manifest)
    contents = Contents(path, CHECKPOINT, manifest, open_dcp(path).tensors)
    _add_empty(contents)
    return contents


def _add_empty(contents: Contents) -> None:
    """Tensors without elements are described, but stored nowhere."""
    for key, shape, dtype in stored_tensors(contents.manifest, empty=True):
        if shape is not None and dtype is not None and key.startswith(("model.", "optimizer.")):
            empty = torch.empty(shape, dtype=getattr(torch, dtype), device="cpu")
            contents.tensors[key] = InMemory(empty)


def open_safetensors_contents(path: Path) -> Contents:
    """Files of safetensors: ours with everything, or anybody's with weights alone. Local operation.

    Raises:
        CheckpointError: Damaged files, or a description of ours that does not fit the tensors.
    """
    tensors, metadata = open_safetensors(path)
    kind = "safetensors"
    if MANIFEST_KEY in metadata:
        return from_portable(path, kind, tensors, metadata[MANIFEST_KEY])
    manifest = empty_manifest()
    manifest.parameters = {name: describe(tensor) for name, tensor in tensors.items()}
    return Contents(path, kind, manifest, {f"model.{name}": tensor for name, tensor in tensors.items()})


def portable_name(key: str) -> str:
    """Name in portable files of a tensor that has a key in ours: weights have their own name."""
    return key.removeprefix("model.") if key.startswith("model.") else f"{_OTHER}{key}"


def portable_text(manifest: Manifest) -> str:
    """A manifest as text for a portable file."""
    body = asdict(manifest)
    body.pop("files")
    return json.dumps(body)


def from_portable(path: Path, kind: str, tensors: Mapping[str, Lazy], text: str) -> Contents:
    """Contents of a portable file that carries a manifest of ours.

    Raises:
        CheckpointError: The manifest is unreadable, or lists tensors that the file lacks.
    """
    try:
        manifest = parse_manifest(json.loads(text))
    # No text at all, or no object; deep nesting ends the recursion of the parser.
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(message(f"{path}: unreadable description by te_fsdp ({error})")) from error
    keys = {
        name.removeprefix(_OTHER) if name.startswith(_OTHER) else f"model.{name}": tensor
        for name, tensor in tensors.items()
        if name.partition(":")[0] not in manifest.tied
    }
    contents = Contents(path, kind, manifest, keys)
    absent = []
    for key, shape, dtype in stored_tensors(manifest):
        tensor = keys.get(key)
        if tensor is None or (
            shape is not None and [*tensor.shape, dtype_name(tensor.dtype)] != [*shape, dtype]
        ):
            absent.append(key if shape is None else f"{key} as {dtype} {tuple(shape)}")
    if absent:
        raise CheckpointError(
            f"{path}: {len(absent)} tensor(s) of its description are missing: {', '.join(absent[:5])}",
            fix="the file was changed after te_fsdp wrote it",
        )
    _add_empty(contents)
    return contents
