"""State dicts of one process, from ``torch.save`` files and plain DCP directories, as a checkpoint's contents.

What they hold is what the unsharded module holds, so names and rows are the canonical ones. State dicts of modules
whose rows or blocks lie otherwise (stacked for tp, quantized for several shards) say so in their ``_extra_state``
entry, and are refused.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from te_fsdp._te_formats import Quantized, read_extra_state
from te_fsdp.checkpoint.index import read_metadata
from te_fsdp.checkpoint.manifest import DCP_METADATA, FILE_NAME, dtype_name, is_ours
from te_fsdp.checkpoint.portable.contents import (
    DCP_KIND,
    MANIFEST_KEY,
    Contents,
    describe,
    empty_manifest,
    from_portable,
    portable_name,
    stack_experts,
)
from te_fsdp.checkpoint.portable.dcp import Opened, Piece, open_dcp
from te_fsdp.checkpoint.portable.lazy import Chunked, InMemory, Lazy, Stored
from te_fsdp.checkpoint.portable.optimizers import add_optimizer
from te_fsdp.checkpoint.portable.torch_files import Window, stored
from te_fsdp.checkpoint.sums import frame_of
from te_fsdp.errors import CheckpointError, PlacementError, shorten
from te_fsdp.modules.extra_state import DELAYED, DamagedEntryError, bytes_of, condition_of, marks_of, unpack
from te_fsdp.quantized.components import components_from

_MODEL_KEYS = ("model", "state_dict", "model_state_dict", "module")
_OPTIMIZER_KEYS = ("optimizer", "optimizer_state_dict", "optim")
_EXTRA = "_extra_state"


@dataclass
class Choices:
    """What a reader cannot know.

    Attributes:
        key: Where in a nested file the model's state dict is, dots between keys; ``None``: found by its name.
        optimizer_class: Class of the optimizer whose state dict is there; ``None``: told from its options.
        extra_state: ``"read"`` TE's delayed-scaling state, or ``"drop"`` it.
        otherwise_class: Class of the optimizer where its options do not tell.
    """

    key: str | None = None
    optimizer_class: str | None = None
    extra_state: str = "read"
    otherwise_class: str | None = None


@dataclass
class _WithParts:
    """A quantized weight with its components."""

    found: Quantized
    parts: dict[str, Lazy] = field(default_factory=dict)


def open_torch_contents(path: Path, choices: Choices) -> Contents:
    """A file that ``torch.save`` wrote: a state dict, or a dict with one in it. Local operation.

    Raises:
        CheckpointError: Damaged, not readable weights-only, no state dict in it, or of a sharded module.
    """
    try:
        tree = _with_places(Window(path).objects(), "")
    except RecursionError as error:
        raise CheckpointError(
            f"{path}: an object that holds itself, or is nested too deeply", expected="a state dict"
        ) from error
    if isinstance(tree, dict) and isinstance(tree.get(MANIFEST_KEY), dict) and choices.key is None:
        try:
            return _own_file(path, tree)
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise CheckpointError(
                f"{path}: not as te_fsdp wrote it ({type(error).__name__}: {error})",
                fix="the file was changed; convert its state dict alone with --key model",
            ) from error
    return _from_tree(path, "torch.save", tree, choices)


def open_dcp_contents(path: Path, choices: Choices, opened: Opened | None = None) -> Contents:
    """A directory that ``torch.distributed.checkpoint.save`` wrote, without a manifest of ours.

    Args:
        path: The directory.
        choices: What its files do not tell.
        opened: The directory, where it has been opened before.

    Raises:
        CheckpointError: See :func:`open_torch_contents`; also a checkpoint of ours that has lost its manifest.
    """
    if opened is None:
        metadata = read_metadata(path)
        if is_ours(getattr(metadata.storage_meta, "save_id", None)):
            raise CheckpointError(
                f"{path}: {FILE_NAME} is missing beside its {DCP_METADATA}",
                expected="a whole checkpoint of te_fsdp, or a directory of plain torch.distributed.checkpoint",
                got="what te_fsdp.checkpoint.save wrote, without its manifest",
                fix="take an earlier checkpoint or copy this one again",
            )
        opened = open_dcp(path, metadata)
    tree: dict[Any, Any] = {}
    leaves: dict[str, Any] = {key: _quantized_or_plain(key, t) for key, t in opened.tensors.items()}
    leaves |= {key: _object(window) for key, window in opened.others.items()}
    for key, leaf in leaves.items():
        *above, last = opened.paths.get(key, (key,))
        node = tree
        for part in above:
            node = node.setdefault(part, {})
        node[last] = leaf
    return _from_tree(path, DCP_KIND, _with_lists(tree), choices)


@dataclass(frozen=True)
class _Unread:
    """An object that weights-only loading refuses."""

    why: str


def _object(window: Window) -> Any:
    try:
        value = window.objects()
    except CheckpointError as error:
        return _Unread(str(error))
    return (
        _Unread("a tensor inside of another object") if isinstance(value, torch.Tensor | Quantized) else value
    )


def _with_lists(node: Any) -> Any:
    """DCP flattens lists that hold dicts or tensors; here they are lists again."""
    if not isinstance(node, dict):
        return node
    values = {key: _with_lists(value) for key, value in node.items()}
    if values and all(isinstance(key, int) for key in values):
        return [values[index] for index in sorted(values)]
    return values


def _quantized_or_plain(key: str, tensor: Lazy) -> Any:
    """DCP writes TE's tensors as pickled objects in the place of a piece."""
    pieces = [p for _, p in tensor.chunks if isinstance(p, Piece)] if isinstance(tensor, Chunked) else []
    # The metadata says of them what it says of plain tensors; the header of the piece tells. It is read where the
    # length is not that of a plain one, which is looked at again when it is read.
    if not pieces or not pieces[0].dtype.is_floating_point:
        return tensor
    if pieces[0].window.length == frame_of(pieces[0].dtype, pieces[0].shape).length:
        return tensor
    found = pieces[0].found
    if not isinstance(found, Quantized):
        return tensor
    if len(pieces) > 1:
        raise CheckpointError(
            f"{key}: a quantized weight in {len(pieces)} pieces",
            expected="a state dict of one process",
            why="Pieces that were quantized apart need not have one scale",
            fix="load it as it was saved, and save it with te_fsdp.checkpoint.save",
        )
    return _WithParts(found, _components(found, key))


def _components(found: Quantized, key: str) -> dict[str, Lazy]:
    """The components of one of TE's tensors in a ``torch.save`` file, unpadded and in the weight's orientation.

    Raises:
        CheckpointError: A format or option without a known layout.
    """
    if found.options.get("nvfp4_use_4over6"):
        raise CheckpointError(f"{key}: NVFP4 with 4over6 scales has no known layout.")
    try:
        components = components_from(found.format, {**found.buffers, **found.options}, found.shape, key)
    except PlacementError as error:
        raise CheckpointError(str(error)) from error
    return {
        part.name: stored(part.tensor, f"{key}:{part.name}", like=found.buffers[part.name])
        for part in components
    }


def _with_places(value: Any, key: str) -> Any:
    """Loaded objects with tensors that are read from their places."""
    if isinstance(value, torch.Tensor):
        return stored(value, key)
    if isinstance(value, Quantized):
        return _WithParts(value, _components(value, key))
    if isinstance(value, Mapping):
        return {k: _with_places(v, f"{key}.{k}" if key else str(k)) for k, v in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_with_places(v, f"{key}.{n}") for n, v in enumerate(value))
    return value


def _own_file(path: Path, tree: dict[str, Any]) -> Contents:
    """A file that te_fsdp wrote with everything."""
    own = tree[MANIFEST_KEY]
    tensors = {k: t for k, t in {**tree["model"], **own.get("tensors", {})}.items() if not _is_extra(k)}
    optimizer = tree.get("optimizer", {"state": {}, "param_groups": []})
    names = {
        n: name
        for g in optimizer["param_groups"]
        for n, name in zip(g["params"], g["param_names"], strict=True)
    }
    for number, values in optimizer["state"].items():
        found = {k: v for k, v in values.items() if isinstance(v, Lazy)}
        tensors |= {portable_name(f"optimizer.state.{names[number]}.{k}"): v for k, v in found.items()}
    contents = from_portable(path, "torch.save", tensors, own["manifest"])
    stack_experts(contents)
    return contents


def _is_extra(name: str) -> bool:
    return name == _EXTRA or name.endswith(f".{_EXTRA}")


def _from_tree(path: Path, kind: str, tree: Any, choices: Choices) -> Contents:
    where, state = _find_model(path, tree, choices.key)
    contents = Contents(path, kind, empty_manifest())
    _add_model(contents, state, choices)
    left = [] if where is None else [str(key) for key in tree if str(key) != where.partition(".")[0]]
    for key in [k for k in left if k in _OPTIMIZER_KEYS]:
        if add_optimizer(contents, tree[key], choices.optimizer_class, choices.otherwise_class):
            left.remove(key)
    if where is not None:
        contents.notes.append(f"weights: taken from {where!r}")
    if left:
        contents.notes.append(f"left: {', '.join(sorted(left))}")
    stack_experts(contents)
    return contents


def _find_model(path: Path, tree: Any, key: str | None) -> tuple[str | None, dict[str, Any]]:
    """The model's state dict, and where it is in the tree; ``None`` where it is the tree."""
    if key is not None:
        node = tree
        for part in key.split("."):
            node = node.get(part) if isinstance(node, dict) else None
        if not isinstance(node, dict):
            raise CheckpointError(f"{path}: nothing under --key {key}", got=_keys(tree))
        return key, node
    if isinstance(tree, dict) and any(isinstance(v, Lazy | _WithParts) for v in tree.values()):
        return None, tree
    found = [k for k in _MODEL_KEYS if isinstance(tree, dict) and isinstance(tree.get(k), dict)]
    if len(found) != 1:
        raise CheckpointError(
            f"{path}: no state dict found in it",
            expected=f"tensors by name, or a dict with one of {', '.join(_MODEL_KEYS)}",
            got=_keys(tree),
            fix="say where it is with --key",
        )
    return found[0], tree[found[0]]


def _keys(tree: Any) -> str:
    if not isinstance(tree, dict):
        return type(tree).__name__
    names = [str(k) for k in tree]
    return "the keys " + ", ".join(names[:8]) + (", ..." if len(names) > 8 else "")


def _add_model(contents: Contents, state: Mapping[str, Any], choices: Choices) -> None:
    """Weights, buffers and delayed-scaling state of a state dict."""
    manifest, unread = contents.manifest, []
    extras = {name.removesuffix(_EXTRA).rstrip("."): v for name, v in state.items() if _is_extra(str(name))}
    manifest.extra_states = sorted(extras)
    for name, value in extras.items():
        _add_extra_state(contents, name, value, choices)
    first: dict[Any, str] = {}
    for name, value in state.items():
        if _is_extra(str(name)):
            continue
        if isinstance(value, Stored) and value.bytes and isinstance(name, str):
            # Tied weights are one tensor under several names; a checkpoint holds it under the first.
            place = (value.record.offset, value.start, value.shape, value.stride, value.dtype)
            if first.setdefault(place, name) != name:
                contents.notes.append(f"{name}: tied to {first[place]}, stored once")
                manifest.tied[name] = first[place]
                continue
        if not isinstance(name, str):
            unread.append(f"{name!r} is no name")
        elif isinstance(value, _WithParts):
            _add_quantized(contents, name, value)
        elif isinstance(value, Lazy):
            manifest.parameters[name] = describe(value)
            contents.tensors[f"model.{name}"] = value
        else:
            unread.append(f"{name} ({type(value).__name__})")
    if unread:
        raise CheckpointError(
            f"{contents.source}: {len(unread)} value(s) of the state dict are no tensors: {', '.join(unread[:5])}",
            fix="say where the model's state dict is with --key, or leave them out of it",
        )
    read, empty = len(manifest.delayed), len(extras) - len(manifest.delayed)
    if read:
        contents.notes.append(
            f"delayed-scaling state: taken from TransformerEngine's _extra_state of {read} module(s)"
        )
    if empty:
        why = "dropped as asked" if choices.extra_state == "drop" else "without state"
        contents.notes.append(f"_extra_state of {empty} module(s): {why}")
    if not extras:
        contents.notes.append("_extra_state: none in the file; delayed scaling would start anew")


def _add_quantized(contents: Contents, name: str, value: _WithParts) -> None:
    found, scaling = value.found, ""
    if found.format == "float8":
        # TE's tensor does not tell where its scale came from; the module's state does.
        owner = name.rpartition(".")[0]
        scaling = " delayed" if owner in contents.manifest.delayed else " current"
    contents.manifest.parameters[name] = {
        "shape": list(found.shape),
        "dtype": dtype_name(found.dtype),
        "layout": None,
        "format": f"{found.format}{scaling} {found.element}",
        "components": sorted(value.parts),
    }
    contents.tensors |= {f"model.{name}:{part}": tensor for part, tensor in value.parts.items()}


def _add_extra_state(contents: Contents, module: str, value: Any, choices: Choices) -> None:
    """One module's ``_extra_state``: a tensor of TE's, nothing, or what te_fsdp's models save.

    That is delayed scaling's state as a dict of tensors, under the condition that loading depends on if there is one.
    """
    key = f"{contents.source}: {f'{module}.{_EXTRA}'.lstrip('.')}"
    if isinstance(value, dict) and set(value) != {DELAYED}:  # te_fsdp's until version 0.1
        condition = str(next(iter(value), ""))
        _check_uncut(key, marks_of(condition) if len(value) == 1 else (-1,), condition)
        value = next(iter(value.values()))
    if isinstance(value, Lazy) and len(value.shape) > 1:
        _check_uncut(key, tuple(value.shape[1:]), condition_of(tuple(value.shape[1:])))
    if choices.extra_state == "drop":
        return
    if isinstance(value, dict) and set(value) == {DELAYED}:
        _add_delayed(contents, module, dict(value[DELAYED]), key)
        return
    if isinstance(value, _Unread):
        raise _unreadable(key, "a tensor of TransformerEngine 2, or an empty entry", value.why)
    if not isinstance(value, Lazy):
        return
    try:
        entry = value.whole()
        own, data = unpack(entry), bytes_of(entry)
    except DamagedEntryError as error:
        raise CheckpointError(
            f"{key}: no state of TransformerEngine", expected="bytes", got=f"{value.dtype}: {error}"
        ) from error
    if own is None:  # TE's own
        read = read_extra_state(data, key)
        state = None if read is None else {"recipe": read[0], **read[1]}
    else:
        state = own[1]
    if state is not None:
        lazy = {n: InMemory(v) if isinstance(v, torch.Tensor) else v for n, v in state.items()}
        _add_delayed(contents, module, lazy, key)


def _unreadable(key: str, expected: str, got: str) -> CheckpointError:
    return CheckpointError(
        f"{key}: not a state that te_fsdp can read",
        expected=expected,
        got=got,
        fix="leave these entries out (te-fsdp ckpt convert --extra-state drop); histories then start anew",
    )


def _check_uncut(key: str, marks: tuple[int, ...], condition: str) -> None:
    """Rows and blocks must lie as in the unsharded module."""
    if set(marks) != {1}:
        raise CheckpointError(
            f"{key}: weights of a sharded module",
            expected="a state dict of one process",
            got=condition or "an entry of another kind",
            why="Its rows or blocks do not lie as in the unsharded module",
            fix="load it on the mesh that saved it, and save it with te_fsdp.checkpoint.save",
        )


def _add_delayed(contents: Contents, module: str, state: dict[str, Any], key: str) -> None:
    """Delayed scaling's state as the state dict of a bound module has it."""
    recipe = state.pop("recipe", None)
    if not isinstance(recipe, dict) or not all(isinstance(tensor, Lazy) for tensor in state.values()):
        raise _unreadable(key, "a recipe and tensors", _keys(state))
    contents.manifest.delayed[module] = dict(recipe)
    for name, tensor in state.items():
        contents.tensors[f"delayed.{module}:{name}"] = tensor


def refuse_scrambled(contents: Contents) -> None:
    """Raise where tensor parallelism has cut a gated fc1, whose rows then lie rank by rank; note what may be the same.

    Raises:
        CheckpointError: Names the weights.
    """
    cuts = Cuts(contents.tensors)
    cut = [name for name in contents.manifest.parameters if cuts.by_tp(name)]
    gated = [name for name in cut if _is_gated(contents.manifest.parameters, name)]
    if gated:
        raise CheckpointError(
            f"{contents.source}: {len(gated)} gated weight(s) in pieces of tensor parallelism: {shorten(gated, 3)}",
            expected="rows as in the unsharded module",
            got="each rank's gate and up one under the other, as TransformerEngine has them",
            fix="load it on the mesh that saved it, and save it with te_fsdp.checkpoint.save",
        )
    if cut:
        contents.notes.append(
            f"{len(cut)} weight(s) lie in pieces of tensor parallelism ({shorten(cut, 3)}): if one of them is a fused, "
            "non-interleaved QKV, its rows are scrambled"
        )


def _is_gated(parameters: Mapping[str, dict[str, Any]], name: str) -> bool:
    """Whether these are the rows of a gate and of what it gates, in one of TE's modules."""
    module, _, own = name.rpartition("fc1_")
    columns = parameters.get(f"{module}fc2_weight", {"shape": ()})["shape"][1:]
    return own in ("weight", "bias") and parameters[name]["shape"][:1] == [2 * n for n in columns]


class Cuts:
    """What the pieces of a plain DCP directory tell of the mesh that cut them.

    FSDP cuts all parameters of a unit into as many pieces. Tensor parallelism cuts norms never, and weights further.
    """

    def __init__(self, tensors: Mapping[str, Lazy]) -> None:
        """Takes the directory's tensors by key."""
        self._tensors = tensors
        self._norms: dict[str, list[tuple[int, float]]] = {}
        self._columns = False
        for key, tensor in tensors.items():
            shards = _shards(tensor)
            if key.endswith((".weight", ".layer_norm_weight")) and len(tensor.shape) == 1 and shards:
                # Pieces of one row are those of any greater number of shards.
                for unit in _units(key) if 0 < shards[1] < math.inf else ():
                    self._norms.setdefault(unit, []).append(shards)
            elif isinstance(tensor, Chunked):
                self._columns = self._columns or any(any(offsets[1:]) for offsets, _ in tensor.chunks)

    def by_tp(self, name: str) -> bool | None:
        """Whether tensor parallelism has cut the rows of a parameter; ``None`` where its pieces do not tell."""
        own = _shards(self._tensors.get(f"model.{name}"))
        if own is None or own[0] == 1:
            return None
        module, *above = _units(f"model.{name}")
        near = next((unit for unit in (module, *above) if unit in self._norms), None)
        if near is None:
            return None
        all_of = [own, *self._norms[near]]
        if max(least for least, _ in all_of) <= min(most for _, most in all_of):
            return False
        # A norm of another module may lie in another unit of FSDP's. Only tensor parallelism cuts columns besides.
        return True if near == module or self._columns else None


def _units(key: str) -> list[str]:
    """The module of a tensor and all modules around it, from the inside."""
    parts = key.split(".")
    return [".".join(parts[:count]) for count in range(len(parts) - 1, 0, -1)]


def _shards(tensor: Lazy | None) -> tuple[int, float] | None:
    """Least and largest number of FSDP shards that give a tensor's pieces along dim 0, the latter 0 if none does."""
    if not isinstance(tensor, Chunked) or not tensor.shape:
        return None
    firsts = sorted({offsets[0] for offsets, piece in tensor.chunks if math.prod(piece.shape)})
    if len(firsts) <= 1:
        return 1, 1
    rows, each = tensor.height, firsts[1]
    if firsts != list(range(0, rows, each)):
        return len(firsts), 0
    return len(firsts), math.inf if each == 1 else -(-rows // (each - 1)) - 1
