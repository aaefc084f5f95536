"""A checkpoint and a model with its optimizer: all differences before anything is read; then what is read, checked.

The index says what lies where (:mod:`te_fsdp.checkpoint.index`). Reading is ours: DCP's reader takes a piece from its
file once for each rectangle, checks nothing, and writes into the model as it goes.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from te_fsdp import _te
from te_fsdp.agree import gather_if_any, rank
from te_fsdp.checkpoint import torch_files
from te_fsdp.checkpoint.background import HostMemory, threads_here
from te_fsdp.checkpoint.directory import damaged
from te_fsdp.checkpoint.entries import GROUPED, Entry, Piece
from te_fsdp.checkpoint.index import FIXED, Index, Rows
from te_fsdp.checkpoint.manifest import DCP_METADATA, INDEX, Manifest
from te_fsdp.checkpoint.model_state import ModelState
from te_fsdp.checkpoint.sums import CheckedFile, DamagedFileError, runs
from te_fsdp.errors import shorten
from te_fsdp.layout import slices
from te_fsdp.modules.semantics import (
    Difference,
    deciding,
    differences,
    from_json,
    in_words,
    own_differences,
    own_settings,
    semantics_of,
)

if TYPE_CHECKING:
    from torch import nn

#: Name in ``Differences.settings`` of all settings, where a checkpoint has none.
SETTINGS = "settings"
#: Stand in ``Differences.optimizer`` for all of an optimizer, and for its groups' options and membership.
WHOLE_OPTIMIZER, GROUPS = "optimizer", "optimizer.param_groups"


@dataclass
class Differences:
    """What does not fit, and what fits after a conversion.

    Attributes:
        tensors: Kind of difference -> tensor or module name -> detail (may be empty).
        optimizer: Difference of the optimizer, in words -> parameters concerned, :data:`WHOLE_OPTIMIZER` or
            :data:`GROUPS`, without details.
        converted: Tensor -> how it is converted, for example ``"float32 -> mxfp8 kFloat8E4M3"``.
        settings: Of modules, by name (``<module>.<setting>``), harmless ones included.
    """

    tensors: dict[str, dict[str, str]] = field(default_factory=dict)
    optimizer: dict[str, dict[str, str]] = field(default_factory=dict)
    converted: dict[str, str] = field(default_factory=dict)
    settings: dict[str, Difference] = field(default_factory=dict)

    def add(self, kind: str, name: str, detail: str = "") -> None:
        """Note one tensor."""
        self.tensors.setdefault(kind, {})[name] = detail

    def add_optimizer(self, text: str, name: str = WHOLE_OPTIMIZER) -> None:
        """Note one parameter of the optimizer, or all of it."""
        self.optimizer.setdefault(text, {})[name] = ""

    def refuse_conversions(self) -> None:
        """Count what would be converted as a difference."""
        for name, how in self.converted.items():
            self.add("that would be converted", name, how)
        self.converted = {}

    def names(self) -> set[str]:
        """Tensors that differ."""
        return {name for named in self.tensors.values() for name in named}

    def optimizer_names(self) -> set[str]:
        """Parameters whose optimizer state differs; ``"optimizer"`` among them means all."""
        return {name for named in self.optimizer.values() for name in named}

    def without(self, allow: Iterable[str], *, strict: bool = True) -> Differences:
        """Those that no pattern of ``allow`` names; without ``strict`` only settings that change the function."""
        patterns = list(allow)

        def is_open(*names: str, always: bool = False) -> bool:
            known = any(fnmatchcase(name, pattern) for name in names for pattern in patterns)
            return (strict or always) and not known

        left = Differences()
        for name, setting in self.settings.items():
            if setting.effect != "note" and is_open(name, f".{name}", always=setting.effect == "error"):
                left.settings[name] = setting
        for kind, name, detail in _each(self.tensors):
            if is_open(name):
                left.add(kind, name, detail)
        for text, name, _ in _each(self.optimizer):
            if is_open(name, f"optimizer.state.{name}", WHOLE_OPTIMIZER):
                left.add_optimizer(text, name)
        return left

    def over_all_ranks(self) -> Differences:
        """The union over ranks, the same on all. Collective over the world."""
        union = Differences()
        mine = (self.tensors, self.optimizer, self.converted, self.settings)
        held = (
            [self] if any(mine) else []
        )  # a list, since differences that are allowed make this object false
        for other in itertools.chain.from_iterable(gather_if_any(held)):
            for kind, name, detail in _each(other.tensors):
                union.add(kind, name, detail)
            for text, name, _ in _each(other.optimizer):
                union.add_optimizer(text, name)
            union.converted.update(other.converted)
            union.settings.update(other.settings)
        return union

    def left(self) -> dict[str, str]:
        """Everything that differs, by name, with the reason in words."""
        reasons = {name: [str(one)] for name, one in self.settings.items() if one.effect != "note"}
        for kind, name, detail in _each(self.tensors):
            reasons.setdefault(name, []).append(f"{kind}{': ' if detail else ''}{detail}")
        for text, name, _ in _each(self.optimizer):
            key = name if name in (WHOLE_OPTIMIZER, GROUPS) else f"optimizer.state.{name}"
            reasons.setdefault(key, []).append(text)
        return {name: "; ".join(texts) for name, texts in sorted(reasons.items())}

    def texts(self) -> list[str]:
        """One text per kind, with the number of tensors and the first few names."""
        lines = []
        for kind, named in self.tensors.items():
            shown = [f"{name}{': ' if detail else ''}{detail}" for name, detail in named.items()]
            lines.append(f"{len(named)} {kind} ({shorten(shown, 3)})")
        for text, names in self.optimizer.items():
            shown = [name for name in names if name not in (WHOLE_OPTIMIZER, GROUPS)]
            lines.append(f"{text} ({shorten(sorted(shown))})" if shown else text)
        return lines + in_words(one for one in self.settings.values() if one.effect != "note")

    def harmless(self) -> list[str]:
        """Settings that differ, but not in what the weights compute when the model is evaluated."""
        return in_words(one for one in self.settings.values() if one.effect == "note")

    def __bool__(self) -> bool:
        return bool(self.tensors or self.optimizer or self.settings)


def _each(found: dict[str, dict[str, str]]) -> Iterator[tuple[str, str, str]]:
    """Kind, name and detail of each difference."""
    return ((kind, name, detail) for kind, named in found.items() for name, detail in named.items())


def compare_model(manifest: Manifest, state: ModelState) -> Differences:
    """Differences in parameters and buffers. Local operation."""
    found = Differences()
    saved = {**manifest.parameters, **manifest.buffers}
    here: dict[str, dict[str, Any]] = {**state.described, **state.buffers}
    for name in sorted(here.keys() - saved.keys()):
        found.add("missing in the checkpoint", name)
    for name in sorted(saved.keys() - here.keys()):
        found.add("only in the checkpoint", name)
    for name in sorted(here.keys() & saved.keys()):
        then, now = saved[name], here[name]
        # Converted files and foreign modules may not know their layouts.
        layouts = then.get("layout"), now.get("layout")
        if then["shape"] != now["shape"]:
            found.add("with another shape", name, _saved_and_here(_shape(then), _shape(now)))
        elif layouts[0] != layouts[1] and None not in layouts:
            found.add("with another layout", name, _saved_and_here(*layouts))
        else:
            _compare_contents(found, name, then, now, name in state.cut_blocks)
    return found


def compare_semantics(found: Differences, manifest: Manifest, model: nn.Module, state: ModelState) -> None:
    """Differences in what modules compute beside their weights, or that nobody recorded that. Local operation."""
    here, recorded = semantics_of(model), manifest.semantics
    known = from_json(recorded) if recorded else {}
    if recorded and rank() == 0:
        for one in own_differences(from_json(recorded, own=True), own_settings(model)):
            found.settings[one.name] = one
    if not known:
        # An older te_fsdp could have recorded TE's settings, and did not; in files of other kinds they never are.
        asks = not recorded and deciding({name: one for name, one in here.items() if one.library == "te"})
        values = deciding(here)
        if values:
            found.settings[SETTINGS] = Difference(SETTINGS, "none", values, "strict" if asks else "note")
        return
    alone = {*manifest.parameters, *manifest.buffers} ^ {*state.described, *state.buffers}
    for one in differences(known, here, alone):
        found.settings[one.name] = one
    recipes = (recorded or {}).get("recipes"), _te.recipes_in_use(model)
    if all(recipes) and recipes[0] != recipes[1]:
        found.settings["recipes"] = Difference("recipes", *recipes, "note")


def _compare_contents(
    found: Differences, name: str, then: dict[str, Any], now: dict[str, Any], cuts_blocks: bool
) -> None:
    """Format, components and dtype of one tensor: equal, convertible, or neither."""
    formats = then.get("format"), now.get("format")
    if formats == (None, None):
        if then["dtype"] == now["dtype"]:
            return
        if not (_is_real(then["dtype"]) and _is_real(now["dtype"])):
            found.add("with another dtype", name, _saved_and_here(then["dtype"], now["dtype"]))
        else:
            found.converted[name] = f"{then['dtype']} -> {now['dtype']}"
        return
    lacks = set(now.get("components", ())) - set(then.get("components", ()))
    if formats[0] == formats[1] and not lacks and not cuts_blocks:
        return
    if any(described["format"] is None and not _is_real(described["dtype"]) for described in (then, now)):
        found.add("with another format", name, _saved_and_here(*formats))
        return
    old, new = (d.get("format") or d["dtype"] for d in (then, now))
    why = ""
    if formats[0] == formats[1]:
        why = f" ({', '.join(sorted(lacks))} not saved)" if lacks else " (this mesh cuts through blocks)"
    found.converted[name] = f"{old} -> {new}{why}"


def _is_real(dtype: str) -> bool:
    return getattr(torch, dtype).is_floating_point


def _saved_and_here(old: Any, new: Any) -> str:
    return f"saved {_text(old)}, model has {_text(new)}"


def _shape(described: dict[str, Any]) -> str:
    shape = tuple(described["shape"])
    return f"{shape} of {shape[0]} experts" if described.get("layout") == GROUPED and shape else str(shape)


def _text(value: Any) -> str:
    if value is None:
        return "high precision"
    return str(tuple(value)) if isinstance(value, list) else str(value)


#: A part of a tensor of the files: its key, where it begins, its shape.
Rectangle = tuple[str, tuple[int, ...], tuple[int, ...]]

#: Stored pieces up to which a loop is faster than arrays.
_FEW = 8
#: Bytes of neighbouring pieces that are read together.
_RUN = 1 << 20
#: Reading and summing up release the interpreter, so that threads help where there are cores for them.
_MOST_THREADS = 4


def rectangle(key: str, piece: Piece) -> Rectangle:
    """What of a tensor of the files a piece holds."""
    return key, tuple(piece.offsets), tuple(piece.tensor.shape)


@dataclass
class Staged:
    """What was read for a load, on the host, until it has been copied to where it belongs.

    Attributes:
        parts: By rectangle: where each part of it begins, and its values.
        uses: How often each rectangle is still wanted. With the last copy its memory is freed.
    """

    parts: dict[Rectangle, list[tuple[tuple[int, ...], torch.Tensor]]] = field(default_factory=dict)
    uses: Counter[Rectangle] = field(default_factory=Counter)

    def expect(self, places: Iterable[Rectangle]) -> list[Rectangle]:
        """Note what :meth:`copy` will be called with, each time; what of it is still to be read. Local operation."""
        wanted = []
        for place in places:
            self.uses[place] += 1
            if math.prod(place[2]) and place not in self.parts:
                self.parts[place] = []
                wanted.append(place)
        return wanted

    def copy(self, place: Rectangle, into: torch.Tensor) -> None:
        """Copy what was read of a rectangle into memory of its shape. Local operation."""
        self.uses[place] -= 1
        parts = self.parts.get(place, []) if self.uses[place] else self.parts.pop(place, [])
        for offsets, values in parts:
            into[slices(offsets, values.shape)].copy_(values)

    def new(self, place: Rectangle, device: torch.device) -> torch.Tensor:
        """What was read of a rectangle that is not empty, as a new tensor. Local operation."""
        into = torch.empty(place[2], dtype=self.parts[place][0][1].dtype, device=device)
        self.copy(place, into)
        return into

    def fill(self, entries: dict[str, Entry]) -> None:
        """Copy what was read into the memory of entries. Local operation."""
        for key, entry in entries.items():
            for piece in entry.pieces:
                self.copy(rectangle(key, piece), piece.tensor)


@dataclass(frozen=True)
class _Part:
    """What of a stored piece a rectangle takes: its shape, and where it begins in either."""

    place: Rectangle
    shape: tuple[int, ...]
    in_piece: tuple[int, ...]
    in_place: tuple[int, ...]


#: A stored piece, and what is wanted of it.
_Wanted = tuple[torch_files.Piece, list[_Part]]


def read_stored(
    path: Path,
    manifest: Manifest,
    index: Index,
    wanted: list[Rectangle],
    into: Staged,
    names: Mapping[str, str] | None = None,
) -> None:
    """Read rectangles from the files of a DCP directory. Local operation; each byte is read once.

    Args:
        path: The directory.
        manifest: Says what the files must be.
        index: Says what lies where.
        wanted: What is read.
        into: Takes it.
        names: Of a plain directory, whose files the manifest does not list: their keys by ours.

    Raises:
        CheckpointError: Files that are not as they were saved, or that lack something.
    """
    by_file = pieces_to_read(path, manifest, index, wanted, names)
    path = manifest.at(path)
    with ThreadPoolExecutor(threads_here(_MOST_THREADS), "te_fsdp load") as pool:
        for name, pieces in by_file.items():
            taken: list[_Wanted] = []
            try:
                # Sizes of a plain directory's files were compared with its metadata when it was opened.
                listed = manifest.files.get(name) if names is None else [(path / name).stat().st_size]
                with CheckedFile(path / name, listed, manifest.save_id) as file:
                    for taken, tensors in _read_ahead(pool, file, runs(pieces, _span, _RUN)):
                        _take(tensors.result(), taken, into)
            except (OSError, DamagedFileError) as error:
                begin = getattr(error, "begin", None)
                keys = [f", of {piece.window.key}" for piece, _ in taken if piece.window.offset == begin]
                damaged(path, [f"{name}: {error}{''.join(keys)}"])


def pieces_to_read(
    path: Path,
    manifest: Manifest,
    index: Index,
    wanted: list[Rectangle],
    names: Mapping[str, str] | None = None,
) -> dict[str, list[_Wanted]]:
    """What is read by :func:`read_stored`, by file, in its order there. Takes and raises the same. Local operation."""
    path, names = manifest.at(path), names or {}
    missing: dict[str, list[Rectangle]] = {}
    for place in wanted:
        missing.setdefault(names.get(place[0], place[0]), []).append(place)
    found: dict[str, dict[int, _Wanted]] = {}
    file_of = functools.cache(lambda name: torch_files.file_in(path, name))
    heads: torch_files.Heads = {}
    for key, rows in index.rows([*missing]):
        covered, (shape, dtype) = 0, index.tensors[key]
        places = [place for place in missing[key] if len(place[1]) == len(shape)]
        for place in places:
            for (number, begin, length), sizes, part in _overlapping(rows, place):
                in_file = found.setdefault(index.files[number], {})
                if begin not in in_file:
                    window = torch_files.Window(file_of(index.files[number]), key, begin, length)
                    in_file[begin] = torch_files.Piece(window, sizes, dtype, heads), []
                in_file[begin][1].append(part)
                covered += math.prod(part.shape)
        if covered == sum(math.prod(sizes) for _, _, sizes in missing[key]):
            del missing[key]
    if missing:
        said_by = INDEX if INDEX in manifest.files else DCP_METADATA
        damaged(path, [f"{said_by}: {next(iter(missing))} is not there, or not all of it"])
    return {name: [at[offset] for offset in sorted(at)] for name, at in found.items()}


def _overlapping(
    rows: Rows, place: Rectangle
) -> Iterator[tuple[tuple[int, int, int], tuple[int, ...], _Part]]:
    """The stored pieces that a rectangle takes something of: where each lies, its shape, and what of it."""
    _, offsets, sizes = place
    dims = len(offsets)
    if len(rows) > _FEW:
        begins, ends = rows[:, FIXED : FIXED + dims], rows[:, FIXED : FIXED + dims] + rows[:, FIXED + dims :]
        rows = rows[((begins < np.add(offsets, sizes)) & (ends > offsets)).all(axis=1)]
    for number, first, length, *box in rows.tolist():
        begins, shape = box[:dims], tuple(box[dims:])
        low = tuple(map(max, begins, offsets))
        high = (min(a + n, b + m) for a, n, b, m in zip(begins, shape, offsets, sizes, strict=True))
        own = tuple(b - a for a, b in zip(low, high, strict=True))
        if all(count > 0 for count in own):
            in_piece = tuple(a - b for a, b in zip(low, begins, strict=True))
            in_place = tuple(a - b for a, b in zip(low, offsets, strict=True))
            yield (number, first, length), shape, _Part(place, own, in_piece, in_place)


def _span(wanted: _Wanted) -> tuple[int, int]:
    return wanted[0].window.offset, wanted[0].window.length


def _read_ahead(
    pool: ThreadPoolExecutor, file: CheckedFile, runs: Iterable[list[_Wanted]]
) -> Iterator[tuple[list[_Wanted], Future[list[torch.Tensor]]]]:
    """Each run with its tensors; a few are read in advance, which bounds the memory for what is not wanted of them."""
    pending: deque[tuple[list[_Wanted], Future[list[torch.Tensor]]]] = deque()
    memory = HostMemory()

    def read(run: list[_Wanted], data: torch.Tensor) -> list[torch.Tensor]:
        lengths = [piece.window.length for piece, _ in run]
        file.read(run[0][0].window.offset, lengths, data)
        # Neighbours begin anywhere, where elements of several bytes cannot.
        parts = data.split(lengths) if len(run) == 1 else [part.clone() for part in data.split(lengths)]
        # Where there is no table, there may be checksums that torch.save wrote.
        check = file.pieces is None
        return [piece.within(part, check=check) for (piece, _), part in zip(run, parts, strict=True)]

    try:
        for run in runs:
            size = sum(piece.window.length for piece, _ in run)
            # What _take keeps. The rest is let go at once, and its memory is used again.
            is_kept = len(run) == 1 and size > _RUN and _mostly(*run[0])
            data = memory.take(size) if is_kept else torch.empty(size, dtype=torch.uint8, device="cpu")
            pending.append((run, pool.submit(read, run, data)))
            if len(pending) > 2 * _MOST_THREADS:
                yield pending.popleft()
        while pending:
            yield pending.popleft()
    finally:
        wait(tensors for _, tensors in pending if not tensors.cancel())


def _mostly(piece: torch_files.Piece, parts: list[_Part]) -> bool:
    """Whether at least half of a piece is wanted."""
    return 2 * sum(math.prod(part.shape) for part in parts) >= math.prod(piece.shape)


def _take(tensors: list[torch.Tensor], run: list[_Wanted], into: Staged) -> None:
    """Keep what is wanted of some pieces."""
    for tensor, (piece, parts) in zip(tensors, run, strict=True):
        is_kept = _mostly(piece, parts)
        for part in parts:
            values = tensor[slices(part.in_piece, part.shape)]
            # A view keeps all of the piece in memory.
            values = values if is_kept else values.clone()
            into.parts[part.place].append((part.in_place, values))
