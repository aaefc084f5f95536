"""``te_fsdp.json``: the description of a checkpoint, read before any tensor.

Every value is validated when it is read and before it is written. A rule is a :class:`Kind`; ``[rule]``, a list;
``{kind: rule}``, an object with any names of a kind; ``{"a": rule, "b?": rule}``, an object with these names, where
``b`` may be absent; or a function from the value to its rule.
"""

from __future__ import annotations

import functools
import hashlib
import json
import re
import stat
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, NamedTuple, get_type_hints

import torch

from te_fsdp.checkpoint.shard_files import (
    DamagedFileError,
    Listed,
    Tick,
    crc32,
    no_progress,
    open_checked,
    synced,
    without_collector,
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
#: Nested levels. Python's own limit on recursion is not far above.
_DEEPEST = 200
_DAMAGED = "the checkpoint is damaged, load an earlier one"


class Kind(NamedTuple):
    """A rule for values without parts: a description, and a test."""

    expected: str
    fits: Callable[[Any], bool]


def _check(value: Any, rule: Any, where: str, depth: int = 0) -> None:
    while callable(rule):
        rule = rule(value)
    if isinstance(rule, Kind):
        if not rule.fits(value):
            raise _refuse(where, rule.expected, value)
    elif depth > _DEEPEST:
        raise _refuse(where[:80], f"at most {_DEEPEST} levels", "more")
    elif type(value) is not type(rule):
        raise _refuse(where, "a list" if type(rule) is list else "an object", value)
    elif type(rule) is list:
        for index, item in enumerate(value):
            _check(item, rule[0], f"{where}[{index}]", depth + 1)
    elif isinstance(names := next(iter(rule)), Kind):
        checked: set[str] = set()
        for name, item in value.items():
            _check(name, names, f"a name in {where}")
            # Most tensors have equal descriptions, which are checked once. Equal texts are equal values in JSON.
            json_text = repr(item)
            if json_text not in checked:
                _check(item, rule[names], f"{where}.{name}", depth + 1)
                checked.add(json_text)
    else:
        rules = {name.rstrip("?"): item_rule for name, item_rule in rule.items()}
        required = [name for name in rule if not name.endswith("?")]
        problems = [f"no {name!r}" for name in required if name not in value] + sorted(value.keys() - rules)
        if problems:
            raise _refuse(where or FILE_NAME, f"the keys {', '.join(required)}", problems)
        for name, item in value.items():
            _check(item, rules[name], f"{where}.{name}".lstrip("."), depth + 1)


def _refuse(where: str, expected: str, value: Any) -> DamagedFileError:
    return DamagedFileError(f"{where}: expected {expected}, got {value!a:.80}")


def _encodes(value: Any) -> bool:
    # isascii() first: nearly all names are ASCII.
    return type(value) is str and (value.isascii() or not any("\ud800" <= c <= "\udfff" for c in value))


def _integer(low: int = 0, high: int = 2**63 - 1) -> Kind:
    # type() and not isinstance(): bool is a subclass of int.
    return Kind(f"an integer of at least {low}", lambda value: type(value) is int and low <= value <= high)


def _or_null(rule: Any) -> Callable[[Any], Any]:
    return lambda value: _NULL if value is None else rule


def _is_dtype(name: Any) -> bool:
    return type(name) is str and isinstance(getattr(torch, name, None), torch.dtype)


def _is_file_name(name: Any) -> bool:
    return _encodes(name) and name not in ("", ".", "..") and not {"/", "\0"} & set(name)


def _encoded(value: Any) -> Any:
    """Return the rule for a value of ``extra`` or an optimizer's option (:mod:`te_fsdp.checkpoint.extra`)."""
    if type(value) is list:
        return [_encoded]
    if type(value) is dict:
        marked = next((name for name in _MARKED if name in value), None)
        return {_TEXT: _encoded} if marked is None else {marked: _MARKED[marked]}
    return _PLAIN


def _semantics(value: Any) -> Any:
    kinds = value.get("kinds") if type(value) is dict else None
    most = len(kinds) - 1 if type(kinds) is list else 0
    kind = {"kind": _TEXT, "library": _TEXT, "settings": {_TEXT: _encoded}}
    return {"kinds": [kind], "modules": {_TEXT: _integer(0, most)}, "recipes?": [_TEXT]}


def _parameter(value: Any) -> Any:
    quantized = type(value) is dict and value.get("format") is not None
    rules = {"format": _TEXT, "components": [_TEXT]} if quantized else {"format": _NULL}
    return {**_TENSOR, "layout": _or_null(_TEXT), **rules}


def _state(value: Any) -> Any:
    plain = type(value) is dict and "value" in value
    return {**({"value": _encoded} if plain else _TENSOR), "experts?": [_integer()], "scalar?": _FLAG}


_NULL = Kind("null", lambda value: value is None)
_TEXT = Kind("text", _encodes)
_FILE_NAME = Kind("the name of a file", _is_file_name)
_FOLDER = Kind("the name of a folder, or none", lambda name: name == "" or _is_file_name(name))
_ID = Kind("32 hexadecimal digits, or none", lambda value: bool(re.fullmatch("([0-9a-f]{32})?", str(value))))
_FLAG = Kind("true or false", lambda value: type(value) is bool)
_PLAIN = Kind("a plain value", lambda value: type(value) in (NoneType, bool, int, float) or _encodes(value))
_FILE = Kind(
    "bytes, CRC-32 and perhaps the offset of the table",
    lambda value: (
        type(value) is list
        and len(value) in (2, 3)
        and all(map(_integer().fits, value))
        and value[1] < 2**32
        and value[2:] <= value[:1]
    ),
)
_TENSOR = {"shape": [_integer()], "dtype": Kind("the name of a dtype", _is_dtype)}
_DTYPE = Kind("the name of a dtype", lambda name: str(name)[:6] == "torch." and _is_dtype(name[6:]))
_MARKED = {
    "te_fsdp.tuple": [_encoded],
    "te_fsdp.value": [_encoded],
    "te_fsdp.per_rank": [_encoded],
    "te_fsdp.tensor": {**_TENSOR, "key": _TEXT, "dtype": _DTYPE},
}
_DELAYED = {
    "num_gemms": _integer(1),
    "margin": Kind("a number", lambda value: type(value) in (int, float)),
    "fp8_format": Kind("E4M3, E5M2 or HYBRID", ("E4M3", "E5M2", "HYBRID").__contains__),
    "amax_history_len": _integer(1),
    "amax_compute_algo": Kind("max or most_recent", ("max", "most_recent").__contains__),
    "reduce_amax": _FLAG,
}
_OPTIMIZER = {
    "class": _TEXT,
    "groups": [{"parameters": [_TEXT], "options": {_TEXT: _encoded}, "optimizer?": _TEXT}],
    "state": {_TEXT: {_TEXT: _state}},
}


@dataclass
class Manifest:
    """Contents of ``te_fsdp.json``. Each field's annotation has the rule for its values.

    A new field needs a default, which :attr:`body` omits because the :attr:`identity` of older checkpoints lacks it,
    and a new format version, because older readers refuse unknown fields.
    """

    #: Versions of te_fsdp, torch and TransformerEngine that wrote it
    versions: Annotated[dict[str, str], {_TEXT: _TEXT}]
    #: Axis sizes and the number of ranks that wrote it; loaded values do not depend on them
    mesh: Annotated[dict[str, int], {_TEXT: _integer(1)}]
    saved_at: Annotated[int, _integer()]  #: Time of the save on rank 0, nanoseconds since 1970
    #: Per name: shape, dtype, layout (null for modules that are not TE's), format (null for high
    #: precision) and, for quantized ones, components
    parameters: Annotated[dict[str, dict[str, Any]], {_TEXT: _parameter}]
    buffers: Annotated[dict[str, dict[str, Any]], {_TEXT: _TENSOR}]
    #: Per module with delayed scaling: its recipe, number of GEMMs and shapes
    delayed: Annotated[dict[str, dict[str, Any]], {_TEXT: _DELAYED}]
    #: Class, groups with their options, and state tensors per parameter; null when none was saved
    optimizer: Annotated[dict[str, Any] | None, _or_null(_OPTIMIZER)]
    #: The user's values; tensors in it are references to DCP keys, values per rank are lists
    extra: Annotated[dict[str, Any], {_TEXT: _encoded}]
    #: Files of the directory, by name
    files: Annotated[dict[str, Listed], {_FILE_NAME: _FILE}] = field(default_factory=dict)
    #: Modules whose stock state dict has an ``_extra_state`` entry; exporting writes it, empty
    extra_states: Annotated[list[str], [_TEXT]] = field(default_factory=list)
    #: Further names of parameters and buffers, with the first name, under which they are stored
    tied: Annotated[dict[str, str], {_TEXT: _TEXT}] = field(default_factory=dict)
    #: From :func:`te_fsdp.modules.semantics.record`; null before format 3, empty in converted checkpoints
    semantics: Annotated[dict[str, Any] | None, _or_null(_semantics)] = None
    #: Number of the save, one more than the largest in the directory; 0 in early manifests
    number: Annotated[int, _integer()] = 0
    format_version: Annotated[int, _integer(1)] = SUMS_PIECES
    #: Drawn for each save; empty before :data:`SUMS_PIECES`
    save_id: Annotated[str, _ID] = ""
    #: Name of the folder with the other files, next to the manifest; empty: the files are next to it
    folder: Annotated[str, _FOLDER] = ""

    @classmethod
    def read(cls, directory: Path) -> Manifest:
        """Read the manifest; raise CheckpointError if it is unreadable, changed, or of a newer te_fsdp. Local."""
        path = directory / FILE_NAME
        with unreadable(path, "manifest"):
            encoded = path.read_bytes()
            body = json.loads(encoded)
            if type(body) is not dict or type(body.get("format_version")) is not int:
                raise DamagedFileError("not an object with a format_version")
            if not FIRST_FORMAT <= body["format_version"] <= HAS_FOLDER:
                raise CheckpointError(
                    f"{path}: written by a different version of te_fsdp, {body.get('versions')!a:.200}",
                    expected=f"format version {FIRST_FORMAT} to {HAS_FOLDER}",
                    got=str(body["format_version"])[:40],
                    fix="update te_fsdp; load a checkpoint of an older format with the te_fsdp that wrote it",
                )
            # A digest of the text: "1e-5" and "1E-5" are one number, and one of them is damage.
            digest = str(body.pop("digest", None))
            computed = _digest(encoded.replace(digest.encode(), _NO_DIGEST.encode(), 1))
            if digest != computed:
                raise DamagedFileError(f"expected digest {digest!a:.40}, got {computed}")
            manifest = parse_manifest(body)
            exempt = (DCP_METADATA, INDEX)  # their readers check them
            unlisted = [n for n, listed in manifest.files.items() if len(listed) != 3 and n not in exempt]
            if bool(manifest.save_id) != (manifest.format_version >= SUMS_PIECES):
                raise _refuse("save_id", f"one from format {SUMS_PIECES} on", manifest.save_id)
            if unlisted and manifest.save_id:
                raise DamagedFileError(
                    f"files.{unlisted[0]}: expected the offset of its table of checksums, got none"
                )
            return manifest

    def write(self, directory: Path) -> None:
        """Write the manifest, synced to disk; raise CheckpointError if it could not be read back. Local operation."""
        path = directory / FILE_NAME
        with unreadable(path, "manifest", "use plain values in extra and in the optimizer's options"):
            body = {"digest": _NO_DIGEST, "number": self.number} | self.body  # where next_number looks
            lines = (f" {json.dumps(name)}: {json.dumps(value)}" for name, value in body.items())
            encoded = ("{\n" + ",\n".join(lines) + "\n}\n").encode("ascii")
            # Thousands of tensors would make the collector traverse all objects of the process.
            with without_collector():
                body = json.loads(encoded)
                del body["digest"]
                parse_manifest(body)
                del body
        with synced(path) as file:
            file.write(encoded.replace(_NO_DIGEST.encode(), _digest(encoded).encode(), 1))

    def data_folder(self, path: Path) -> Path:
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

    def check_identity(self, mark: str | None) -> None:
        """Raise DamagedFileError unless this mark in DCP's metadata is of the same save and the same fields."""
        expected = self.identity if self.save_id else None
        if mark != expected and (expected or is_ours(mark)):
            raise DamagedFileError(
                f"it and {FILE_NAME} are from different saves, or {FILE_NAME} was changed: expected {expected}, "
                f"got {mark}"
            )

    def check_files(
        self,
        path: Path,
        names: Iterable[str] | None = None,
        *,
        checksums: bool = False,
        tick: Tick = no_progress,
    ) -> list[str]:
        """Return the problems of listed files, or of those in ``names``: missing, of a wrong size, changed. Local.

        Changes are found only with ``checksums``.
        """
        problems, folder = [], self.data_folder(path)
        listed_files = listing(folder)  # one request for a thousand files
        for name in self.files if names is None else names:
            listed, file = self.files[name], listed_files.get(name) or folder / name
            try:
                status = file.stat()
                if not stat.S_ISREG(status.st_mode):  # reading a pipe would block
                    problems.append(f"{name} is not a file")
                elif checksums:
                    with open_checked(file, listed, self.save_id) as opened:
                        opened.check(listed[1], tick)
                elif status.st_size != listed[0]:
                    problems.append(f"{name}: expected {listed[0]} bytes, got {status.st_size}")
            except FileNotFoundError:
                problems.append(f"{name} is missing")
            except (DamagedFileError, OSError) as error:
                problems.append(f"{name}: {getattr(error, 'strerror', None) or error}")
        return problems

    def problems_shown(self, path: Path) -> list[str]:
        """Return the problems of a checkpoint that are visible without reading its tensors. Local operation."""
        problems, folder = self.check_files(path), self.data_folder(path)
        if problems:
            return problems
        try:
            data = self.metadata_in(path)
            if INDEX in self.files:
                # The index is read instead of the metadata, so the mark is checked here. It is near the end.
                mark = MARK.search(data, max(0, len(data) - 4096))
                self.check_identity(mark and mark[0].decode())
            elif (folder / INDEX).is_file():
                return [f"{INDEX}: not listed in the manifest"]
        except (DamagedFileError, OSError) as error:
            return [f"{DCP_METADATA}: {getattr(error, 'strerror', None) or error}"]
        return []

    def metadata_in(self, path: Path) -> bytes:
        """Return DCP's metadata, a pickle, as it was written; else raise DamagedFileError or OSError. Local."""
        data = (self.data_folder(path) / DCP_METADATA).read_bytes()
        if self.files.get(DCP_METADATA) != [len(data), crc32(data)]:
            raise DamagedFileError("its contents have changed (CRC-32)")
        return data


def main_weight_of(weight: dict[str, Any], states: dict[str, Any]) -> dict[str, Any]:
    """Return the description of a saved weight's main weight, empty without one.

    FusedAdam(master_weights=True) has one for FP32 weights too, which its steps do not update (TE 2.20.2).
    """
    is_low_precision = weight["format"] is not None or weight["dtype"] not in ("float32", "float64")
    return states.get("master_param", {}) if is_low_precision else {}


def is_ours(mark: Any) -> bool:
    """Return whether a mark in DCP's metadata is te_fsdp's, written from :data:`SUMS_PIECES` on."""
    return str(mark).startswith(_OURS)


def parse_manifest(body: dict[str, Any]) -> Manifest:
    """Return a manifest from its fields; raise DamagedFileError, which names the place. Local operation."""
    rules, hints = {}, get_type_hints(Manifest, include_extras=True)
    for f in fields(Manifest):
        is_required = f.default is MISSING and f.default_factory is MISSING
        rules[f.name if is_required else f"{f.name}?"] = hints[f.name].__metadata__[0]
    _check(body, rules, "")
    return Manifest(**body)


@contextmanager
def unreadable(path: Path | str, name: str, fix: str = _DAMAGED) -> Iterator[None]:
    """Raise CheckpointError that names a file for any error in the context, except other CheckpointErrors."""
    try:
        yield
    except Exception as error:
        is_damage = isinstance(error, DamagedFileError)
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


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()


@functools.cache  # called for every tensor
def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype, such as ``"float32"``."""
    return str(dtype).removeprefix("torch.")
