"""``te_fsdp.json``: what a checkpoint holds, to be read and compared before any tensor moves."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import Any

import torch

from te_fsdp.checkpoint.schema import InvalidError, check_manifest
from te_fsdp.checkpoint.sums import CheckedFile, DamagedFileError, Listed, Tick, checksum, silent
from te_fsdp.errors import CheckpointError

__all__ = [
    "DCP_METADATA",
    "FILE_NAME",
    "FORMAT_VERSION",
    "STACKS_EXPERTS",
    "Manifest",
    "Tick",
    "check_files",
    "checksum",
    "dtype_name",
    "read_manifest",
    "save_number",
    "write_manifest",
]

FILE_NAME = "te_fsdp.json"
#: Raised when an older te_fsdp could misread what a newer one writes.
FORMAT_VERSION = 3
#: From this version on, the weights of a layer's experts are one tensor. Before, each had its own.
STACKS_EXPERTS = 2
#: From this version on, files have checksums of their pieces, and all of a checkpoint the id of its save.
SUMS_PIECES = 3
#: DCP's own description of the tensors, written by its coordinator.
DCP_METADATA = ".metadata"
_NO_DIGEST = "0" * 32
#: Begins the marks in DCP's metadata that are ours.
_OURS = "te_fsdp-"


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
        files: Per file of the directory: bytes and CRC-32; of files of tensors the CRC-32 of the table at the end,
            and the byte at which it begins.
        extra_states: Modules whose stock state dict has an ``_extra_state`` entry; exporting writes it, empty.
        tied: Further names of parameters and buffers, with the first name, under which they are stored.
        semantics: What the modules compute, from :func:`te_fsdp.modules.semantics.record`; null in files of format
            versions before 3, empty in those that come from files of other kinds.
        number: Of the save, one more than the largest beside it; 0 in manifests from before there were numbers.
        format_version: :data:`FORMAT_VERSION`.
        save_id: Drawn for each save, 32 hexadecimal digits. Empty before :data:`SUMS_PIECES`.

    A new field needs a line in :data:`te_fsdp.checkpoint.schema.SCHEMA`, and a default if older checkpoints lack it.
    """

    versions: dict[str, str]
    mesh: dict[str, int]
    saved_at: int
    parameters: dict[str, dict[str, Any]]
    buffers: dict[str, dict[str, Any]]
    delayed: dict[str, dict[str, Any]]
    optimizer: dict[str, Any] | None
    extra: dict[str, Any]
    files: dict[str, Listed] = field(default_factory=dict)
    extra_states: list[str] = field(default_factory=list)
    tied: dict[str, str] = field(default_factory=dict)
    semantics: dict[str, Any] | None = None
    number: int = 0
    format_version: int = FORMAT_VERSION
    save_id: str = ""

    def tensor(self, name: str) -> dict[str, Any]:
        """What is said of a parameter or buffer; of a buffer that it is in high precision."""
        return self.parameters.get(name) or {"format": None, **self.buffers[name]}

    @property
    def identity(self) -> str:
        """The save's id with a digest of all that is said here but for the files: what DCP's metadata is marked with.

        So nothing here can be changed alone, not even together with the digest that the manifest has of itself.
        """
        body = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "files"}
        digest = hashlib.blake2b(json.dumps(body, sort_keys=True).encode(), digest_size=16)
        return f"{_OURS}{self.save_id}-{digest.hexdigest()}"

    def check_identity(self, found: str | None) -> None:
        """Compare with the mark that DCP's metadata has.

        Raises:
            DamagedFileError: The two are not of one save, or the manifest was changed after it.
        """
        ours = self.identity if self.save_id else None
        if found != ours and (ours or str(found).startswith(_OURS)):
            raise DamagedFileError(
                f"it and {FILE_NAME} are not of one save, or {FILE_NAME} was changed: expected {ours}, got {found}"
            )


def write_manifest(directory: Path, manifest: Manifest) -> None:
    """Write the manifest into a directory, synced to disk. Local operation.

    Raises:
        CheckpointError: It could not be read back.
    """
    body = {f.name: getattr(manifest, f.name) for f in fields(manifest)}
    with _unreadable(directory / FILE_NAME, "keep plain values in extra and in the optimizer's options"):
        first = {"digest": _NO_DIGEST, "number": manifest.number}  # where save_number looks
        text = _lines({**first, **body}).encode("ascii")
        body = json.loads(text)
        body.pop("digest")
        _parse(body)
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
    with _unreadable(path, "the checkpoint is damaged, load an earlier one"):
        text = path.read_bytes()
        body = json.loads(text)
        if type(body) is not dict or type(body.get("format_version")) is not int:
            raise InvalidError("no object with a format_version")
        if body["format_version"] > FORMAT_VERSION:
            raise CheckpointError(
                f"{path}: written by a newer te_fsdp, {body.get('versions')!a:.200}",
                expected=f"format version {FORMAT_VERSION} or older",
                got=str(body["format_version"])[:40],
                fix="update te_fsdp",
            )
        # Of the text, not of what it means: "1e-5" and "1E-5" are one number, and one of them is damage.
        digest = str(body.pop("digest", None))
        found = _digest(text.replace(digest.encode(), _NO_DIGEST.encode(), 1))
        if digest != found:
            raise InvalidError(f"expected digest {digest!a:.40}, got {found}")
        return _parse(body)


def _parse(body: dict[str, Any]) -> Manifest:
    required = {f.name for f in fields(Manifest) if f.default is MISSING and f.default_factory is MISSING}
    check_manifest(body, required | {"files", "format_version"})
    manifest = Manifest(**body)
    has_id = len(manifest.save_id) == 32 and set(manifest.save_id) <= set("0123456789abcdef")
    if has_id != (manifest.format_version >= SUMS_PIECES) or (manifest.save_id and not has_id):
        raise InvalidError(
            f"save_id: expected one from format {SUMS_PIECES} on, got {manifest.save_id!a:.80}"
        )
    return manifest


@contextmanager
def _unreadable(path: Path, fix: str) -> Iterator[None]:
    try:
        yield
    # Deep nesting ends the recursion of the parser; bad UTF-8 is a ValueError.
    except (OSError, ValueError, RecursionError) as error:
        kind = "" if isinstance(error, InvalidError) else f"{type(error).__name__}: "
        raise CheckpointError(f"{path}: unreadable manifest ({kind}{error})", fix=fix) from error


def save_number(directory: Path) -> int:
    """The number of the save, from the first lines of its manifest; 0 where there is none. Local operation."""
    try:
        with (directory / FILE_NAME).open("rb") as file:
            found = re.search(rb'"number": (\d{1,18}),', file.read(120))
    except OSError:  # another job has removed it
        return 0
    return int(found[1]) if found else 0


def check_files(
    directory: Path,
    manifest: Manifest,
    names: Iterable[str] | None = None,
    *,
    checksums: bool = False,
    tick: Tick = silent,
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
        listed, path = manifest.files[name], directory / name
        try:
            if checksums:
                with CheckedFile(path, listed, manifest.save_id) as file:
                    file.check(listed[1], tick)
            elif (have := path.stat().st_size) != listed[0]:
                problems.append(f"{name}: expected {listed[0]} bytes, got {have}")
        except FileNotFoundError:
            problems.append(f"{name} is missing")
        except DamagedFileError as error:
            problems.append(f"{name}: {error}")
        except OSError as error:
            problems.append(f"{name}: {error.strerror or error}")
    return problems


def _lines(body: dict[str, Any]) -> str:
    """JSON with a line for each entry of each field; ``indent`` is slow, and one line is for no reader."""
    texts = {key: json.dumps(value) for key, value in body.items()}
    for key, value in body.items():
        if isinstance(value, dict) and value:
            entries = ",\n".join(f"  {json.dumps(name)}: {json.dumps(item)}" for name, item in value.items())
            texts[key] = f"{{\n{entries}\n }}"
    return "{\n" + ",\n".join(f" {json.dumps(key)}: {text}" for key, text in texts.items()) + "\n}\n"


def _digest(text: bytes) -> str:
    """Of the manifest's text with zeros in the place of the digest."""
    return hashlib.blake2b(text, digest_size=16).hexdigest()


def dtype_name(dtype: torch.dtype) -> str:
    """``"float32"`` of ``torch.float32``."""
    return str(dtype).removeprefix("torch.")
