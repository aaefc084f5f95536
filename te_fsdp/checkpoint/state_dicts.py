"""State dicts of one process, from ``torch.save`` files and plain DCP directories, as a checkpoint's contents.

What they hold is what the unsharded module holds, so names and rows are the canonical ones. State dicts of modules
whose rows or blocks lie otherwise (stacked for tp, quantized for several shards) say so in their ``_extra_state``
entry, and are refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from te_fsdp.checkpoint.index import read_metadata
from te_fsdp.checkpoint.lazy_tensors import Chunked, InMemory, Lazy, Stored, open_safetensors
from te_fsdp.checkpoint.manifest import DCP_METADATA, FILE_NAME, dtype_name, is_ours, unreadable
from te_fsdp.checkpoint.reader import (
    DCP_KIND,
    MANIFEST_KEY,
    OTHER,
    Choices,
    Contents,
    describe,
    empty_manifest,
    from_portable,
    portable_name,
    with_other_experts,
)
from te_fsdp.checkpoint.shard_files import frame_of
from te_fsdp.checkpoint.tensor_entries import encode
from te_fsdp.checkpoint.torch_files import DcpContents, Piece, Window, open_dcp, stored, with_leaves
from te_fsdp.errors import CheckpointError, PlacementError, shorten
from te_fsdp.modules.extra_state import (
    DELAYED,
    DamagedEntryError,
    bytes_of,
    describe_load_condition,
    marks_of,
    unpack,
)
from te_fsdp.quantized.components import components_from
from te_fsdp.unpickling import UnknownNameError
from te_fsdp.upstream.te_formats import Quantized, read_extra_state, unreadable_state

_MODEL_KEYS = ("model", "state_dict", "model_state_dict", "module")
_OPTIMIZER_KEYS = ("optimizer", "optimizer_state_dict", "optim")
_EXTRA = "_extra_state"


def open_torch_contents(path: Path, choices: Choices) -> Contents:
    """A file that ``torch.save`` wrote: a state dict, or a dict with one in it; CheckpointError if it is neither."""
    fix = "save a plain state_dict(); of a file of te_fsdp's take that with --key model"
    with unreadable(path, "objects", fix):
        tree = with_leaves(Window(path).objects(), _in_place)  # an object that holds itself: RecursionError
        if isinstance(tree, dict) and isinstance(tree.get(MANIFEST_KEY), dict) and choices.key is None:
            return _own_file(path, tree)
    return _from_tree(path, "torch.save", tree, choices)


def open_safetensors_contents(path: Path, choices: Choices) -> Contents:
    """Open safetensors files: te_fsdp's with everything, or a state dict; as :func:`from_portable`. Local operation."""
    tensors, metadata = open_safetensors(path)
    if MANIFEST_KEY in metadata:
        return from_portable(path, "safetensors", tensors, metadata[MANIFEST_KEY])
    if others := [name for name in tensors if name.startswith(OTHER)]:
        raise CheckpointError(
            f"{path}: unreadable description by te_fsdp (none, beside {others[0]})",
            fix="the file was changed after te_fsdp wrote it",
        )
    contents = Contents(path, "safetensors", empty_manifest())
    _add_model(contents, tensors, choices)
    # safetensors' save_model stores a tied tensor once, and its further names here.
    tied = {name: first for name, first in metadata.items() if first in tensors and name not in tensors}
    contents.manifest.tied |= tied
    contents.notes += [f"{name}: tied to {first}, stored once" for name, first in tied.items()]
    return contents


def open_dcp_contents(path: Path, choices: Choices, opened: DcpContents | None = None) -> Contents:
    """A directory of ``torch.distributed.checkpoint.save``, perhaps opened before; CheckpointError: none, or ours."""
    if opened is None:
        metadata = read_metadata(path)
        if is_ours(getattr(metadata.storage_meta, "save_id", None)):
            raise CheckpointError(
                f"{path}: {FILE_NAME} is missing next to its {DCP_METADATA}",
                expected="a whole checkpoint of te_fsdp, or a directory of plain torch.distributed.checkpoint",
                got="what te_fsdp.checkpoint.save wrote, without its manifest",
                fix="take an earlier checkpoint or copy this one again",
            )
        opened = open_dcp(path, metadata)
    leaves: dict[str, Any] = {key: _quantized_or_plain(key, t) for key, t in opened.tensors.items()}
    for key, window in opened.others.items():
        try:
            leaves[key] = with_leaves(window.objects(), _in_place)
        except CheckpointError as error:
            if not isinstance(error.__cause__, UnknownNameError):  # it is damaged
                raise
            leaves[key] = error
    tree: dict[Any, Any] = {}
    for key, leaf in leaves.items():
        *above, last = opened.paths.get(key, (key,))
        node = tree
        for part in above:
            node = node.setdefault(part, {})
        node[last] = leaf
    return _from_tree(path, DCP_KIND, _with_lists(tree), choices)


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
    if not pieces or not (first := pieces[0]).dtype.is_floating_point:
        return tensor
    is_plain = first.bytes < first.window.length == frame_of(first.dtype, first.shape).length
    if is_plain or not isinstance(first.found, Quantized):
        return tensor
    if len(pieces) > 1:
        raise CheckpointError(
            f"{key}: a quantized weight in {len(pieces)} pieces",
            expected="a state dict of one process",
            why="Pieces that were quantized apart need not have one scale",
            fix="load it as it was saved, and save it with te_fsdp.checkpoint.save",
        )
    return _in_place(first.found, key)


def _in_place(found: Any, key: str) -> Any:
    """A loaded tensor as one that is read from its place; of TE's the components, unpadded, as the weight lies."""
    if not isinstance(found, Quantized):
        return stored(found, key)
    if found.options.get("nvfp4_use_4over6"):
        raise CheckpointError(f"{key}: NVFP4 with 4over6 scales has no known layout.")
    like = found.buffers
    try:
        components = components_from(found.format, {**like, **found.options}, found.shape, key)
    except PlacementError as error:
        raise CheckpointError(str(error)) from error
    return replace(
        found, buffers={c.name: stored(c.tensor, f"{key}:{c.name}", like=like[c.name]) for c in components}
    )


def _own_file(path: Path, tree: dict[str, Any]) -> Contents:
    """A file that te_fsdp wrote with everything."""
    own = tree[MANIFEST_KEY]
    tensors = {**tree["model"], **own.get("tensors", {})}
    tensors = {k: t for k, t in tensors.items() if isinstance(t, Lazy) and not _is_extra(k)}
    optimizer = tree.get("optimizer", {"state": {}, "param_groups": []})
    names = _listed_names(optimizer["param_groups"])
    for number, values in optimizer["state"].items():
        found = {k: v for k, v in values.items() if isinstance(v, Lazy)}
        tensors |= {portable_name(f"optimizer.state.{names[number]}.{k}"): v for k, v in found.items()}
    return from_portable(path, "torch.save", tensors, own["manifest"])


def _is_extra(name: Any) -> bool:
    return str(name).rpartition(".")[2] == _EXTRA


def _from_tree(path: Path, kind: str, tree: Any, choices: Choices) -> Contents:
    inner = [*tree.values()] if isinstance(tree, dict) and choices.key is None else []
    if len(inner) == 1 and isinstance(inner[0], dict) and inner[0].keys() & {*_MODEL_KEYS}:
        # One object under a name of its own, as the {"app": AppState(...)} of torch's tutorials.
        return _from_tree(path, kind, inner[0], choices)
    where, state = _find_model(path, tree, choices.key)
    contents = Contents(path, kind, empty_manifest())
    _add_model(contents, state, choices)
    taken = state.keys() if where is None else {where.partition(".")[0]}
    left = [str(key) for key in tree if str(key) not in taken]
    for key in [k for k in left if k in _OPTIMIZER_KEYS]:
        if _add_optimizer(contents, tree[key], choices):
            left.remove(key)
    if where is not None:
        contents.notes.append(f"weights: taken from {where!r}")
    if left:
        contents.notes.append(f"left: {', '.join(sorted(left))}")
    return contents


def _find_model(path: Path, tree: Any, key: str | None) -> tuple[str | None, dict[str, Any]]:
    """The model's state dict, and where it is in the tree; ``None`` where it is the tree, but for dicts in it."""
    if key is not None:
        node = tree
        for part in key.split("."):
            node = node.get(part) if isinstance(node, dict) else None
        if not isinstance(node, dict):
            raise CheckpointError(f"{path}: nothing under --key {key}", got=_keys(tree))
        return key, node
    if isinstance(tree, dict) and any(isinstance(v, Lazy | Quantized) for v in tree.values()):
        beside = dict | list | str | float | int | None
        return None, {k: v for k, v in tree.items() if _is_extra(k) or not isinstance(v, beside)}
    found = [k for k in _MODEL_KEYS if isinstance(tree, dict) and isinstance(tree.get(k), dict)]
    if len(found) != 1:
        raise CheckpointError(
            f"{path}: no state dict found in it",
            expected=f"tensors by name, or a dict with one of {', '.join(_MODEL_KEYS)}",
            got=_keys(tree),
            fix="save one of these; te-fsdp ckpt convert takes --key, which says where it is",
        )
    return found[0], tree[found[0]]


def _keys(tree: Any) -> str:
    return f"the keys {shorten(list(map(str, tree)), 8)}" if isinstance(tree, dict) else type(tree).__name__


def _add_model(contents: Contents, state: Mapping[str, Any], choices: Choices) -> None:
    """Weights, buffers and delayed-scaling state of a state dict."""
    manifest, unread = contents.manifest, []
    extras = {name.rpartition(".")[0]: value for name, value in state.items() if _is_extra(name)}
    manifest.extra_states = sorted(extras)
    for name, value in extras.items():
        _add_extra_state(contents, name, value, choices)
    first: dict[Any, str] = {}
    for name, value in ((name, value) for name, value in state.items() if not _is_extra(name)):
        place: Any = name
        if isinstance(value, Stored) and value.bytes:
            record = value.record
            place = (record.file, record.offset, value.start, value.shape, value.stride, value.dtype)
        if not isinstance(name, str):
            unread.append(f"{name!r} is no name")
        elif first.setdefault(place, name) != name:
            # Tied weights are one tensor under several names; a checkpoint holds it under the first.
            contents.notes.append(f"{name}: tied to {first[place]}, stored once")
            manifest.tied[name] = first[place]
        elif isinstance(value, Quantized):
            _add_quantized(contents, name, value)
        elif isinstance(value, Lazy):
            manifest.parameters[name] = describe(value)
            contents.tensors[f"model.{name}"] = value
        else:
            unread.append(f"{name} ({type(value).__name__})")
    if unread:
        raise CheckpointError(
            f"{contents.source}: {len(unread)} value(s) of the state dict are no tensors: {', '.join(unread[:5])}",
            fix="leave them out of it; te-fsdp ckpt convert takes --key, which says where the model's state dict is",
        )
    if read := len(manifest.delayed):
        text = f"delayed-scaling state: taken from TransformerEngine's _extra_state of {read} module(s)"
        contents.notes.append(text)
    if empty := len(extras) - read:
        why = "dropped as asked" if choices.extra_state == "drop" else "without state"
        contents.notes.append(f"_extra_state of {empty} module(s): {why}")
    if not extras:
        contents.notes.append("_extra_state: none in the file; delayed scaling would start anew")


def _add_quantized(contents: Contents, name: str, found: Quantized) -> None:
    is_delayed = name.rpartition(".")[0] in contents.manifest.delayed
    # TE's float8 tensor does not tell where its scale came from; the module's state does.
    scaling = "" if found.format != "float8" else " delayed" if is_delayed else " current"
    contents.manifest.parameters[name] = {
        "shape": list(found.shape),
        "dtype": dtype_name(found.dtype),
        "layout": None,
        "format": f"{found.format}{scaling} {found.element}",
        "components": sorted(found.buffers),
    }
    contents.tensors |= {f"model.{name}:{part}": tensor for part, tensor in found.buffers.items()}


def _add_extra_state(contents: Contents, module: str, value: Any, choices: Choices) -> None:
    """One module's ``_extra_state``: a tensor of TE's or ours, nothing, or a dict, perhaps with a condition."""
    key = f"{contents.source}: {f'{module}.{_EXTRA}'.lstrip('.')}"
    if isinstance(value, dict) and set(value) != {DELAYED}:  # te_fsdp's until version 0.1
        condition = str(next(iter(value), ""))
        _check_uncut(key, marks_of(condition) if len(value) == 1 else (-1,), condition)
        value = next(iter(value.values()))
    if isinstance(value, Lazy) and len(value.shape) > 1:
        _check_uncut(key, tuple(value.shape[1:]), describe_load_condition(tuple(value.shape[1:])))
    if choices.extra_state == "drop":
        return
    if isinstance(value, CheckpointError):
        raise unreadable_state(key, "a tensor of TransformerEngine 2, or an empty entry", str(value))
    if isinstance(value, dict) and set(value) == {DELAYED}:
        state = value[DELAYED]
    elif not isinstance(value, Lazy) or not (state := _delayed_state(value, key)):
        return
    tensors = dict(state)
    recipe = tensors.pop("recipe", None)
    if not isinstance(recipe, dict) or not all(isinstance(tensor, Lazy) for tensor in tensors.values()):
        raise unreadable_state(key, "a recipe and tensors", _keys(tensors))
    contents.manifest.delayed[module] = dict(recipe)
    contents.tensors |= {f"delayed.{module}:{name}": tensor for name, tensor in tensors.items()}


def _delayed_state(value: Lazy, key: str) -> dict[str, Any]:
    """Delayed scaling's state in an entry of TE's or of ours, as a bound module's state dict has it, or nothing."""
    try:
        entry = value.whole()
        own, data = unpack(entry), bytes_of(entry)
    except DamagedEntryError as error:
        raise CheckpointError(
            f"{key}: no state of TransformerEngine", expected="bytes", got=f"{value.dtype}: {error}"
        ) from error
    if own is not None:
        state = own[1] or {}
    else:
        recipe, tensors = read_extra_state(data, key) or ({}, {})
        state = {"recipe": recipe, **tensors} if tensors else {}
    return {n: InMemory(v) if isinstance(v, torch.Tensor) else v for n, v in state.items()}


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


# --- the optimizer, in the form of torch's Optimizer.state_dict(), which numbers parameters


def _add_optimizer(contents: Contents, state: Any, choices: Choices) -> bool:
    """Take a torch optimizer's state dict into a checkpoint's contents, or note why not; whether it was taken.

    Parameters are told by names, where ``torch.distributed.checkpoint.state_dict`` made it; by the ``param_names``
    of each group (torch writes them if the optimizer was given named parameters); with one group also by their order,
    if their number and the shapes of their state fit, and the file keeps an order.
    """
    # What is damaged is not left: options are read here.
    state = with_leaves(state, lambda v, key: _option(v) if key.startswith("param_groups.") else v)
    try:
        described, tensors = _read_optimizer(contents, _nested(state), choices)
    except (CheckpointError, TypeError, KeyError, ValueError, AttributeError) as error:
        why = f"no torch optimizer's state_dict() ({type(error).__name__}: {error})"
        contents.notes.append(f"optimizer: left, {error if isinstance(error, CheckpointError) else why}")
        return False
    contents.manifest.optimizer = described
    contents.tensors |= tensors
    contents.notes.append(f"optimizer: taken, {described['class']} with {len(described['state'])} states")
    return True


def _nested(state: Any) -> Any:
    """A state dict that was flattened (``state.<name>.<key>``, ``param_groups.<name>.<option>``) as nested ones."""
    prefixes = ("state.", "param_groups.")
    if not isinstance(state, Mapping) or not state or not all(str(k).startswith(prefixes) for k in state):
        return state
    states: dict[str, dict[str, Any]] = {}
    options: dict[str, dict[str, Any]] = {}
    for key, value in state.items():
        kind, _, rest = key.partition(".")
        name, _, last = rest.rpartition(".")
        (states if kind == "state" else options).setdefault(name, {})[last] = value
    groups: list[tuple[dict[str, Any], list[str]]] = []
    for name, own in options.items():
        alike = [names for known, names in groups if known == own]
        alike[0].append(name) if alike else groups.append((own, [name]))
    return {"state": states, "param_groups": [{**own, "params": names} for own, names in groups]}


# What has no place in the checkpoint is a CheckpointError here, and a note above.
def _read_optimizer(
    contents: Contents, state: Any, choices: Choices
) -> tuple[dict[str, Any], dict[str, Lazy]]:
    if not isinstance(state, Mapping) or not isinstance(state.get("param_groups"), list):
        raise CheckpointError("no torch optimizer's state_dict()")
    groups = with_other_experts(contents.manifest, state["param_groups"], state.get("state", {}))
    names = _names(contents, groups)
    # DCP makes text of numbers, in the keys of a dict alone.
    by_text = {str(number): number for number in names}
    tensors: dict[str, Lazy] = {}
    states: dict[str, dict[str, Any]] = {}
    for number, values in state.get("state", {}).items():
        name = names.get(by_text.get(number, number))
        if name is None:
            raise CheckpointError(f"state of parameter {number}, which is in no group")
        for key, value in values.items():
            if isinstance(value, Lazy):
                if value.shape not in ((), (1,), tuple(contents.manifest.parameters[name]["shape"])):
                    raise CheckpointError(f"{key} of {name} has the shape {value.shape}")
                described = {"shape": list(value.shape), "dtype": dtype_name(value.dtype)}
                states.setdefault(name, {})[key] = described
                tensors[f"optimizer.state.{name}.{key}"] = value
            elif value is not None:
                states.setdefault(name, {})[key] = {"value": encode(value, f"{key} of {name}")[0]}
    own = [{k: v for k, v in g.items() if k not in ("params", "param_names")} for g in groups]
    described_groups = [
        {"parameters": [names[n] for n in group["params"]], "options": encode(options, "options")[0]}
        for group, options in zip(groups, own, strict=True)
    ]
    kind = _class_of(groups) or choices.optimizer_class
    if kind is None:
        raise CheckpointError(
            "its class cannot be told from its options (save it with te_fsdp.checkpoint.save)"
        )
    return {"class": kind, "groups": described_groups, "state": states}, tensors


def _option(value: Any) -> Any:
    return value.whole().item() if isinstance(value, Lazy) and value.shape in ((), (1,)) else value


def _listed_names(groups: list[Any]) -> dict[Any, str]:
    return {n: name for g in groups for n, name in zip(g["params"], g["param_names"], strict=True)}


def _names(contents: Contents, groups: list[Any]) -> dict[Any, str]:
    """Name of each numbered parameter."""
    known = contents.manifest.parameters
    numbers = [number for group in groups for number in group["params"]]
    if all(isinstance(number, str) for number in numbers):
        names = dict(zip(numbers, numbers, strict=True))
    elif all("param_names" in group for group in groups):
        names = _listed_names(groups)
    elif contents.kind != DCP_KIND and len(groups) == 1 and len(numbers) == len(known):
        names = dict(zip(numbers, known, strict=True))
    else:  # DCP keeps no order: its metadata lists what rank 0 writes first
        raise CheckpointError(
            "it numbers its parameters without names (save what get_state_dict gives, or give the optimizer "
            "model.named_parameters(); torch.save also keeps the order of one group with all parameters)"
        )
    if strange := [name for name in names.values() if name not in known]:
        raise CheckpointError(f"it names {strange[0]}, which the state dict lacks")
    return names


def _class_of(groups: list[Any]) -> str | None:
    """The class whose options these are, ``None`` where several have them (NAdam, RAdam, Adamax, TE's FusedSGD)."""
    options = groups[0] if groups else {}
    if {"betas", "bias_correction"} <= options.keys():
        return "FusedAdam"
    if {"betas", "amsgrad"} <= options.keys():
        return "AdamW" if options.get("decoupled_weight_decay") else "Adam"
    if {"momentum", "nesterov", "foreach"} <= options.keys():
        return "SGD"
    return None
