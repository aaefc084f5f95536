"""``te_fsdp.json``: what a checkpoint holds, to be read and compared before any tensor moves."""

from __future__ import annotations

import hashlib
import json
import os
import zlib
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from te_fsdp.errors import CheckpointError, message

__all__ = [
    "FILE_NAME",
    "FORMAT_VERSION",
    "RECORDS_SEMANTICS",
    "STACKS_EXPERTS",
    "Manifest",
    "Tick",
    "checksum",
    "check_files",
    "read_manifest",
    "write_manifest",
]

FILE_NAME = "te_fsdp.json"
#: Raised when an older te_fsdp could misread what a newer one writes.
FORMAT_VERSION = 3
#: From this version on, the weights of a layer's experts are one tensor. Before, each had its own.
STACKS_EXPERTS = 2
#: From this version on, a save records what the modules compute.
RECORDS_SEMANTICS = 3
#: DCP's own description of the tensors, written by its coordinator.
DCP_METADATA = ".metadata"
_NO_DIGEST = "0" * 32

#: Told the bytes that were just read or written.
Tick = Callable[[int], None]


def _silent(count: int) -> None:
    """The tick of whoever wants to hear nothing."""


@dataclass
class Manifest:
    """Contents of ``te_fsdp.json``.

    Attributes:
        versions: Of te_fsdp, torch and TransformerEngine that wrote it.
        mesh: Axis sizes and the number of ranks that wrote it; what is loaded does not depend on them.
        saved_at: Time of the save on rank 0, nanoseconds since 1970.
        parameters: Per name: ``shape``, ``dtype``, ``layout`` (null for modules that neither TE nor te_fsdp knows),
            ``format`` (null for high precision) and, for quantized ones, ``components``.
        buffers: Per name: ``shape`` and ``dtype``.
        delayed: Per module with delayed scaling: its recipe, number of GEMMs and shapes.
        optimizer: Class, groups with their options, and the state tensors per parameter; null when none was
        saved.
        extra: The user's values; tensors in it are references to DCP keys, values per rank are lists.
        files: Per file of the directory: bytes and CRC-32.
        extra_states: Modules whose stock state dict has an ``_extra_state`` entry; exporting writes it, empty.
        tied: Further names of parameters and buffers, with the first name, under which they are stored.
        semantics: What the modules compute, from :func:`te_fsdp.modules.semantics.record`; null in files of format
            versions before 3, and in those that were not made from a model.
        format_version: :data:`FORMAT_VERSION`.
    """

    versions: dict[str, str]
    mesh: dict[str, int]
    saved_at: int
    parameters: dict[str, dict[str, Any]]
    buffers: dict[str, dict[str, Any]]
    delayed: dict[str, dict[str, Any]]
    optimizer: dict[str, Any] | None
    extra: dict[str, Any]
    files: dict[str, list[int]] = field(default_factory=dict)
    extra_states: list[str] = field(default_factory=list)
    tied: dict[str, str] = field(default_factory=dict)
    semantics: dict[str, Any] | None = None
    format_version: int = FORMAT_VERSION

    def tensor(self, name: str) -> dict[str, Any]:
        """What is said of a parameter or buffer; of a buffer that it is in high precision."""
        return self.parameters.get(name) or {"format": None, **self.buffers[name]}


def write_manifest(directory: Path, manifest: Manifest) -> None:
    """Write the manifest into a directory, synced to disk. Local operation."""
    text = json.dumps({"digest": _NO_DIGEST, **asdict(manifest)}, indent=1).encode("ascii")
    with (directory / FILE_NAME).open("wb") as file:
        file.write(text.replace(_NO_DIGEST.encode(), _digest(text).encode(), 1))
        file.flush()
        os.fsync(file.fileno())


def read_manifest(directory: Path) -> Manifest:
    """Read and check the manifest of a directory. Local operation.

    Raises:
        CheckpointError: It is unreadable, was changed, or was written by a newer te_fsdp.
    """
    path = directory / FILE_NAME
    damaged = "the checkpoint is damaged, load an earlier one"
    try:
        text = path.read_bytes()
        body = json.loads(text)
        version, digest = body["format_version"], str(body.pop("digest"))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            message(f"{path}: unreadable manifest ({type(error).__name__}: {error})", fix=damaged)
        ) from error
    if not isinstance(version, int) or version > FORMAT_VERSION:
        raise CheckpointError(
            message(
                f"{path}: written by a newer te_fsdp, {body.get('versions')}",
                expected=f"format version {FORMAT_VERSION} or older",
                got=version,
                fix="update te_fsdp",
            )
        )
    # Of the text, not of what it means: "1e-5" and "1E-5" are one number, and one of them is damage.
    found = _digest(text.replace(digest.encode(), _NO_DIGEST.encode(), 1))
    if digest != found:
        raise CheckpointError(
            message(f"{path}: unreadable manifest", expected=f"digest {digest}", got=found, fix=damaged)
        )
    try:
        return Manifest(**body)
    except TypeError as error:
        raise CheckpointError(message(f"{path}: unreadable manifest ({error})", fix=damaged)) from error


def check_files(
    directory: Path,
    manifest: Manifest,
    names: Iterable[str] | None = None,
    *,
    checksums: bool = False,
    tick: Tick = _silent,
) -> list[str]:
    """What is wrong with listed files, in words: missing, of another size, or of another checksum. Local operation.

    Args:
        directory: Of the checkpoint.
        manifest: Its manifest.
        names: Which files; all by default.
        checksums: Read them, and compare their checksums too.
        tick: Told the bytes that were read.
    """
    problems = []
    for name in manifest.files if names is None else names:
        (size, crc), path = manifest.files[name], directory / name
        try:
            have = path.stat().st_size
            if have != size:
                problems.append(f"{name}: expected {size} bytes, got {have}")
            elif checksums and checksum(path, tick) != crc:
                problems.append(f"{name}: its contents have changed (CRC-32)")
        except FileNotFoundError:
            problems.append(f"{name} is missing")
        except OSError as error:
            problems.append(f"{name}: {error.strerror or error}")
    return problems


def checksum(path: Path, tick: Tick = _silent) -> int:
    """CRC-32 of a file. ``tick`` is told the bytes of each block that was read."""
    crc = 0
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            crc = zlib.crc32(block, crc)
            tick(len(block))
    return crc


def _digest(text: bytes) -> str:
    """Of the manifest's text with zeros in the place of the digest."""
    return hashlib.blake2b(text, digest_size=16).hexdigest()
