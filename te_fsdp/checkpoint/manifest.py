"""``te_fsdp.json``: the description of a checkpoint, read and compared before any tensor is.

A digest of its text shows every change since it was written, so its values are not validated again. Values of the user
are checked when they are encoded (:mod:`te_fsdp.checkpoint.extra`).
"""

from __future__ import annotations

import functools
import hashlib
import json
import re
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import torch

from te_fsdp.checkpoint.shard_files import (
    DamagedFileError,
    Listed,
    Tick,
    crc32,
    no_progress,
    open_checked,
    synced,
)
from te_fsdp.checkpoint.storage import listing
from te_fsdp.errors import CheckpointError

FILE_NAME = "te_fsdp.json"
#: Versions of the format that are read. From 3 on, files have checksums of their pieces and the id of their save. From
#: 4 on, files may be in a folder; checkpoints without one are written as 3. The version is raised when an older
#: te_fsdp could misread a newer checkpoint.
FIRST_FORMAT, SUMS_PIECES, HAS_FOLDER = 2, 3, 4
#: DCP's own description of the tensors, written by its coordinator.
DCP_METADATA = ".metadata"
#: te_fsdp's index with the same contents (:mod:`te_fsdp.checkpoint.index`); early checkpoints have none.
INDEX = "te_fsdp.index"
_NO_DIGEST = "0" * 32
#: Prefix of te_fsdp's marks in DCP's metadata, and the pattern of a mark, see :attr:`Manifest.identity`.
_OURS = "te_fsdp-"
MARK = re.compile(rb"te_fsdp-[0-9a-f]{32}-[0-9a-f]{32}")
_DAMAGED = "the checkpoint is damaged, load an earlier one"


class InvalidError(ValueError):
    """A manifest that te_fsdp has not written. The text names the place."""


@dataclass
class Manifest:
    """Contents of ``te_fsdp.json``.

    A new field needs a default if older checkpoints lack it.
    """

    #: Of te_fsdp, torch and TransformerEngine that wrote it
    versions: dict[str, str]
    #: Axis sizes and the number of ranks that wrote it; what is loaded does not depend on them
    mesh: dict[str, int]
    saved_at: int  #: Time of the save on rank 0, nanoseconds since 1970
    #: Per name: shape, dtype, layout (null for modules that neither TE nor te_fsdp knows), format (null for high
    #: precision) and, for quantized ones, components
    parameters: dict[str, dict[str, Any]]
    buffers: dict[str, dict[str, Any]]
    #: Per module with delayed scaling: its recipe, number of GEMMs and shapes
    delayed: dict[str, dict[str, Any]]
    #: Class, groups with their options, and state tensors per parameter; null when none was saved
    optimizer: dict[str, Any] | None
    #: The user's values; tensors in it are references to DCP keys, values per rank are lists
    extra: dict[str, Any]
    #: Of the directory, by name
    files: dict[str, Listed] = field(default_factory=dict)
    #: Modules whose stock state dict has an ``_extra_state`` entry; exporting writes it, empty
    extra_states: list[str] = field(default_factory=list)
    #: Further names of parameters and buffers, with the first name, under which they are stored
    tied: dict[str, str] = field(default_factory=dict)
    #: From :func:`te_fsdp.modules.semantics.record`; null before format 3, empty in what was converted
    semantics: dict[str, Any] | None = None
    #: Number of the save, one more than the largest in the directory; 0 in early manifests
    number: int = 0
    format_version: int = SUMS_PIECES
    #: Drawn for each save; empty before :data:`SUMS_PIECES`
    save_id: str = ""
    #: Name of the folder with the other files, next to the manifest; empty: the files are next to it
    folder: str = ""

    def at(self, path: Path) -> Path:
        """Return the folder with the files of the checkpoint at a path."""
        return path / self.folder if self.folder else path

    @property
    def body(self) -> dict[str, Any]:
        """Return the fields by name, without those that older readers do not support and that are empty."""
        return {f.name: getattr(self, f.name) for f in fields(self) if self.folder or f.name != "folder"}

    def tensor(self, name: str) -> dict[str, Any]:
        """Return the description of a parameter or buffer; a buffer has the format of high precision."""
        return self.parameters.get(name) or {"format": None, **self.buffers[name]}

    @property
    def identity(self) -> str:
        """Return the save's id with a digest of all fields except the files, the mark in DCP's metadata.

        Therefore no field can change unnoticed, not even together with the manifest's own digest.
        """
        body = {name: value for name, value in self.body.items() if name != "files"}
        return f"{_OURS}{self.save_id}-{_digest(json.dumps(body, sort_keys=True).encode())}"

    def check_identity(self, found: str | None) -> None:
        """Raise DamagedFileError unless this mark in DCP's metadata is of the same save and the same fields."""
        ours = self.identity if self.save_id else None
        if found != ours and (ours or is_ours(found)):
            raise DamagedFileError(
                f"it and {FILE_NAME} are not of one save, or {FILE_NAME} was changed: expected {ours}, got {found}"
            )


def is_ours(mark: Any) -> bool:
    """Return whether a mark in DCP's metadata is te_fsdp's, written from :data:`SUMS_PIECES` on."""
    return str(mark).startswith(_OURS)


def write_manifest(directory: Path, manifest: Manifest) -> None:
    """Write the manifest, synced to disk. Local operation."""
    body = {"digest": _NO_DIGEST, "number": manifest.number} | manifest.body  # where save_number looks
    lines = (f" {json.dumps(name)}: {json.dumps(value)}" for name, value in body.items())
    text = ("{\n" + ",\n".join(lines) + "\n}\n").encode("ascii")
    with synced(directory / FILE_NAME) as file:
        file.write(text.replace(_NO_DIGEST.encode(), _digest(text).encode(), 1))


def read_manifest(directory: Path) -> Manifest:
    """Read the manifest; raise CheckpointError if it is unreadable, changed, or of a newer te_fsdp. Local operation."""
    path = directory / FILE_NAME
    with unreadable(path, "manifest"):
        text = path.read_bytes()
        body = json.loads(text)
        if type(body) is not dict or type(body.get("format_version")) is not int:
            raise InvalidError("no object with a format_version")
        if not FIRST_FORMAT <= body["format_version"] <= HAS_FOLDER:
            raise CheckpointError(
                f"{path}: written by another te_fsdp, {body.get('versions')!a:.200}",
                expected=f"format version {FIRST_FORMAT} to {HAS_FOLDER}",
                got=str(body["format_version"])[:40],
                fix="update te_fsdp; of an older format, load it with the te_fsdp that wrote it",
            )
        # A digest of the text: "1e-5" and "1E-5" are one number, and one of them is damage.
        digest = str(body.pop("digest", None))
        found = _digest(text.replace(digest.encode(), _NO_DIGEST.encode(), 1))
        if digest != found:
            raise InvalidError(f"expected digest {digest!a:.40}, got {found}")
        manifest = Manifest(**body)
        others = (DCP_METADATA, INDEX)  # their readers check them
        unlisted = [
            name for name, listed in manifest.files.items() if len(listed) != 3 and name not in others
        ]
        if bool(manifest.save_id) != (manifest.format_version >= SUMS_PIECES):
            raise InvalidError(
                f"save_id: expected one from format {SUMS_PIECES} on, got {manifest.save_id!a:.80}"
            )
        if unlisted and manifest.save_id:
            raise InvalidError(f"files.{unlisted[0]}: expected where its table of checksums begins, got none")
        # The digest can be recomputed, and no text may make a reader open files elsewhere.
        for name in (*manifest.files, manifest.folder):
            if name in (".", "..") or {"/", "\0"} & set(name):
                raise InvalidError(f"a name in files: expected the name of a file, got {name!a:.80}")
        return manifest


@contextmanager
def unreadable(path: Path | str, name: str, fix: str = _DAMAGED) -> Iterator[None]:
    """Raise CheckpointError that names a file for any error in the context, except other CheckpointErrors."""
    try:
        yield
    except Exception as error:
        is_damage = isinstance(error, DamagedFileError | InvalidError)
        if isinstance(error, CheckpointError) and not is_damage:
            raise
        raise CheckpointError(
            f"{path}: unreadable {name} ({'' if is_damage else f'{type(error).__name__}: '}{error})",
            fix="check the permissions" if isinstance(error, PermissionError) else fix,
        ) from error


def has_manifest(path: Path) -> bool:
    """Return whether a directory has a manifest; raise CheckpointError if this user may not read it. Local."""
    try:
        return (path / FILE_NAME).is_file()
    except OSError as error:
        text = f"{path}: cannot be read ({error.strerror or error})"
        raise CheckpointError(text, fix="check the path and the permissions") from error


def save_number(directory: Path) -> int:
    """Return the number of the save from the first lines of its manifest; 0 without one. Local operation."""
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
    tick: Tick = no_progress,
) -> list[str]:
    """Return the problems of listed files: missing, of another size or, with ``checksums``, changed. Local operation.

    ``names`` selects some of them.
    """
    problems, folder = [], manifest.at(directory)
    seen = listing(folder)  # one request for a thousand files
    for name in manifest.files if names is None else names:
        listed, path = manifest.files[name], seen.get(name) or folder / name
        try:
            status = path.stat()
            if not stat.S_ISREG(status.st_mode):  # reading a pipe would block
                problems.append(f"{name} is not a file")
            elif checksums:
                with open_checked(path, listed, manifest.save_id) as file:
                    file.check(listed[1], tick)
            elif status.st_size != listed[0]:
                problems.append(f"{name}: expected {listed[0]} bytes, got {status.st_size}")
        except FileNotFoundError:
            problems.append(f"{name} is missing")
        except (DamagedFileError, OSError) as error:
            problems.append(f"{name}: {getattr(error, 'strerror', None) or error}")
    return problems


def problems_shown(path: Path, manifest: Manifest) -> list[str]:
    """Return the problems of a checkpoint that are visible without reading its tensors. Local operation."""
    problems, folder = check_files(path, manifest), manifest.at(path)
    if problems:
        return problems
    try:
        data = metadata_of(path, manifest)
        if INDEX in manifest.files:
            # The index is read instead of the metadata, so the mark is checked here. It is near the end.
            mark = MARK.search(data, max(0, len(data) - 4096))
            manifest.check_identity(mark and mark[0].decode())
        elif (folder / INDEX).is_file():
            return [f"{INDEX}: not listed in the manifest"]
    except (DamagedFileError, OSError) as error:
        return [f"{DCP_METADATA}: {getattr(error, 'strerror', None) or error}"]
    return []


def metadata_of(path: Path, manifest: Manifest) -> bytes:
    """Return DCP's metadata, a pickle, as it was written; else raise DamagedFileError or OSError. Local operation."""
    data = (manifest.at(path) / DCP_METADATA).read_bytes()
    if manifest.files.get(DCP_METADATA) != [len(data), crc32(data)]:
        raise DamagedFileError("its contents have changed (CRC-32)")
    return data


def _digest(text: bytes) -> str:
    return hashlib.blake2b(text, digest_size=16).hexdigest()


@functools.cache  # called for every tensor
def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype, such as ``"float32"``."""
    return str(dtype).removeprefix("torch.")
