"""State dicts of one process as a checkpoint's contents.

Their tensors are those of the unsharded module, so names and rows are canonical. Modules whose rows or blocks are in
a different order (stacked for tp, quantized for several shards) record that in their ``_extra_state`` entry, and are
refused. Optimizer state is read from DCP directories only.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from te_fsdp.checkpoint.directory import refuse_text
from te_fsdp.checkpoint.extra import encode_numbers
from te_fsdp.checkpoint.lazy_tensors import (
    InMemory,
    Lazy,
    RefusedClassError,
    load_weights_only,
    open_safetensors,
)
from te_fsdp.checkpoint.manifest import dtype_name, unreadable
from te_fsdp.checkpoint.plain_dcp import (
    DcpContents,
    Quantized,
    as_lazy,
    cut_by_tp,
    open_dcp,
    quantized_or_plain,
    with_leaves,
)
from te_fsdp.checkpoint.reader import DCP_KIND, MANIFEST_KEY, OTHER, Choices, Contents, describe
from te_fsdp.checkpoint.storage import is_remote
from te_fsdp.checkpoint.tensor_entries import GROUPED, stacked_name
from te_fsdp.errors import CheckpointError, shorten
from te_fsdp.modules.extra_state import (
    DELAYED,
    DamagedEntryError,
    bytes_of,
    describe_load_condition,
    has_expert_rows,
    marks_of,
    unpack,
)
from te_fsdp.upstream.te_modules import read_extra_state, unreadable_state
from te_fsdp.upstream.torch_dtensor import unflatten_state_dict, without_wrappers

_MODEL_KEYS = ("model", "state_dict", "model_state_dict", "module")
_OPTIMIZER_KEYS = ("optimizer", "optimizer_state_dict", "optim")
_EXTRA = "_extra_state"
_SGD = {"momentum", "nesterov", "foreach"}


def refuse_other_files(path: Path) -> None:
    """Raise CheckpointError for peft's adapters, and for text in place of weights, in a folder too. Local operation."""
    for file in [*path.glob("*.safetensors")] if not is_remote(path) and path.is_dir() else [path]:
        refuse_text(file)
    folder = path.parent if path.name.startswith("adapter_model.") else path
    if (folder / "adapter_config.json").is_file():
        raise CheckpointError(
            f"{path}: an adapter (adapter_config.json)",
            expected="all weights of a model",
            fix="merge the adapter into its model first: peft's merge_and_unload(), then save_pretrained",
        )


def open_state_dicts(path: Path, kind: str, choices: Choices) -> Contents:
    """Return the contents of files of a kind: safetensors (te_fsdp's too), ``torch.save``, or a plain DCP directory.

    The kinds are those of :func:`te_fsdp.checkpoint.portable.convert.resolve`. Raise CheckpointError for other files.
    Local operation.
    """
    refuse_other_files(path)
    if kind == "torch":
        with unreadable(path, "file of torch.save", "the file is damaged, truncated or of a different kind"):
            # Mapped. An object that contains itself raises RecursionError here.
            tree = with_leaves(load_weights_only(path, str(path)), as_lazy)
        return _from_tree(path, "torch.save", tree, choices)
    if kind != "safetensors":
        return open_dcp_contents(path, open_dcp(path), choices)
    tensors, metadata = open_safetensors(path)
    # A file of te_fsdp describes its layout. Without the description, a key with OTHER is a part of one.
    if MANIFEST_KEY in metadata:
        return Contents.from_portable(path, tensors, metadata[MANIFEST_KEY])
    if te_fsdp_names := [name for name in tensors if name.startswith(OTHER)]:
        raise CheckpointError(
            f"{path}: no description by te_fsdp, although it has tensors such as {te_fsdp_names[0]}",
            fix="load an earlier checkpoint: the file was changed after te_fsdp wrote it",
        )
    contents = Contents(path, "safetensors")
    _add_model(contents, tensors, choices)
    # safetensors' save_model stores a tied tensor once, and its further names here.
    tied = {name: first for name, first in metadata.items() if first in tensors and name not in tensors}
    contents.manifest.tied |= tied
    contents.notes += [f"{name}: tied to {first}, stored once" for name, first in tied.items()]
    return contents


def open_dcp_contents(path: Path, opened: DcpContents, choices: Choices) -> Contents:
    """Return the state dicts in a directory of ``torch.distributed.checkpoint.save``; CheckpointError for others."""
    # Pieces of column-parallel weights may be in the order of ranks. That is found from all keys together.
    cut = cut_by_tp(opened.tensors)
    leaves: dict[str, Any] = {
        key: quantized_or_plain(key, tensor, scrambled=key in cut) for key, tensor in opened.tensors.items()
    }
    for key, record in opened.others.items():
        try:
            leaves[key] = with_leaves(record.load(), as_lazy)
        except RefusedClassError as error:
            leaves[key] = error  # raised if the entry is needed: it may belong to a part that is not read
    tree = unflatten_state_dict(leaves, {key: (key,) for key in leaves} | opened.paths)
    return _from_tree(path, DCP_KIND, tree, choices)


def _is_extra(name: Any) -> bool:
    return str(name).rpartition(".")[2] == _EXTRA


def _from_tree(path: Path, kind: str, tree: Any, choices: Choices) -> Contents:
    # The keys of a checkpoint of te_fsdp, as torch's dcp_to_torch_save writes them.
    if isinstance(tree, dict) and any(str(key).startswith("optimizer.state.") for key in tree):
        parts: dict[str, dict[str, Any]] = {}
        for key, value in tree.items():
            part, _, name = str(key).partition(".")
            parts.setdefault(part, {})[name] = value
        tree = parts
    inner = [*tree.values()] if isinstance(tree, dict) and choices.key is None else []
    if len(inner) == 1 and isinstance(inner[0], dict) and inner[0].keys() & {*_MODEL_KEYS}:
        # One object under its own name, such as {"app": AppState(...)} in torch's tutorials.
        return _from_tree(path, kind, inner[0], choices)
    model_key, state = _find_model(path, tree, choices.key)
    contents = Contents(path, kind)
    _add_model(contents, state, choices)
    taken = state.keys() if model_key is None else {model_key.partition(".")[0]}
    unread_keys = [str(key) for key in tree if str(key) not in taken]
    # torch.save files have optimizer state without names, so it is read from DCP directories only.
    for key in [k for k in unread_keys if k in _OPTIMIZER_KEYS and kind == DCP_KIND]:
        if _add_optimizer(contents, tree[key], choices):
            unread_keys.remove(key)
    if model_key is not None:
        contents.notes.append(f"weights: taken from {model_key!r}")
    if unread_keys:
        contents.notes.append(f"left: {', '.join(sorted(unread_keys))}")
    return contents


def _find_model(path: Path, tree: Any, key: str | None) -> tuple[str | None, dict[str, Any]]:
    """Return the model's state dict and its key in the tree; ``None`` if the tree itself is the state dict."""
    if key is not None:
        node = tree
        for part in key.split("."):
            node = node.get(part) if isinstance(node, dict) else None
        if not isinstance(node, dict):
            raise CheckpointError(f"{path}: nothing under --key {key}", got=_keys(tree))
        return key, node
    entries: dict[Any, Any] = tree if isinstance(tree, dict) else {}
    model_keys = [k for k in _MODEL_KEYS if isinstance(entries.get(k), dict)]
    # Before the tensors next to it, such as the state of a random number generator.
    model_keys = [k for k in model_keys if _elements(entries[k])] or model_keys
    # A training script may keep its step or its arguments next to the weights.
    others = dict | list | str | float | int | None
    state = {k: v for k, v in entries.items() if _is_extra(k) or not isinstance(v, others)}
    # The state of a random number generator consists of integers.
    weights = sum(
        _elements(v)
        for v in state.values()
        if not isinstance(v, torch.Tensor | Lazy) or v.dtype.is_floating_point
    )
    nested = _elements(entries[model_keys[0]]) if len(model_keys) == 1 else 0
    if nested and weights <= 2 * nested:
        return model_keys[0], entries[model_keys[0]]
    if not nested and any(isinstance(v, Lazy | Quantized | torch.Tensor) for v in entries.values()):
        left = {k: v for k, v in entries.items() if isinstance(v, dict | list) and not _is_extra(k)}
        sizes = [_elements(v) for k, v in left.items() if k not in _OPTIMIZER_KEYS and not _is_optimizer(v)]
        # An average has as many elements as the weights, and some more if it counts its updates.
        if max(sizes, default=0) <= 2 * weights:
            return None, state
    if len(model_keys) != 1 or nested:
        raise CheckpointError(
            f"{path}: no state dict found",
            expected=f"tensors by name, or a dict with one of {', '.join(_MODEL_KEYS)}",
            got="the state of an optimizer" if "param_groups" in entries else _keys(tree),
            fix="pass a file with one of these; use te-fsdp ckpt convert --key for other keys",
        )
    return model_keys[0], entries[model_keys[0]]


def _is_optimizer(state: Any) -> bool:
    """Return whether a value is an optimizer's state, nested or flat (:func:`_nested`), or contains one."""
    if not isinstance(state, dict):
        return isinstance(state, list) and any(map(_is_optimizer, state))
    return any(str(k).startswith("param_groups") or _is_optimizer(v) for k, v in state.items())


def _elements(value: Any) -> int:
    """Return the number of elements of all tensors in nested dicts and lists."""
    if isinstance(value, Lazy | Quantized | torch.Tensor):
        return math.prod(value.shape)
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    return sum(map(_elements, inner))


def _keys(tree: Any) -> str:
    if isinstance(tree, dict):
        return f"the keys {shorten(list(map(str, tree)), 8)}" if tree else "an empty dict"
    return "a tensor" if isinstance(tree, Lazy) else _kind_of(tree)


def _kind_of(value: Any) -> str:
    """Return the kind of an unsupported value as text; for a tensor, the property that is not supported."""
    if type(value) not in (torch.Tensor, torch.nn.Parameter):
        return type(value).__name__
    return f"{'meta' if value.is_meta else dtype_name(value.dtype) if value.is_quantized else value.layout} tensor"


def _add_model(contents: Contents, state: Mapping[str, Any], choices: Choices) -> None:
    """Add weights, buffers and delayed-scaling state of a state dict."""
    manifest, unread = contents.manifest, []
    names = {name: without_wrappers(name) if isinstance(name, str) else name for name in state}
    if len({*names.values()}) == len(names):  # as checkpoints of te_fsdp name the tensors of a model
        state = {names[name]: value for name, value in state.items()}
    extras = {name.rpartition(".")[0]: value for name, value in state.items() if _is_extra(name)}
    manifest.extra_states = sorted(extras)
    # Before the weights: the format of a float8 weight depends on the delayed-scaling state of its module.
    for name, value in extras.items():
        _add_extra_state(contents, name, value, choices)
    # Files of torch.save have tied weights twice. One process shares their memory, which shows the tie.
    first: dict[Any, str] = {}
    for name, value in ((name, value) for name, value in state.items() if not _is_extra(name)):
        identity: Any = name
        if isinstance(value, InMemory) and value.bytes:
            # An empty tensor has no address of its own, so two of them would look tied.
            identity = (value.tensor.data_ptr(), value.shape, value.tensor.stride(), value.dtype)
        if not isinstance(name, str):
            unread.append(f"{name!r}, a name that is not a string")
        elif first.setdefault(identity, name) != name:
            # Tied weights are one tensor under several names. A checkpoint stores it under the first.
            contents.notes.append(f"{name}: tied to {first[identity]}, stored once")
            manifest.tied[name] = first[identity]
        elif isinstance(value, Quantized):
            # TE's float8 tensor does not record the origin of its scale. State of delayed scaling does.
            is_delayed = name.rpartition(".")[0] in manifest.delayed
            format_ = value.format.replace(" current ", " delayed " if is_delayed else " ")
            layout = None if len(value.shape) == 2 else GROUPED  # each expert has its own scales
            quantized = {"format": format_, "components": sorted(value.components), "layout": layout}
            manifest.parameters[name] = describe(value) | quantized
            contents.tensors |= {f"model.{name}:{part}": tensor for part, tensor in value.components.items()}
        elif isinstance(value, Lazy):
            manifest.parameters[name] = describe(value)
            contents.tensors[f"model.{name}"] = value
        else:
            unread.append(f"{name} ({_kind_of(value)})")
    if unread:
        raise CheckpointError(
            f"{contents.source}: {len(unread)} value(s) of the state dict are not plain tensors: "
            f"{', '.join(unread[:5])}",
            fix="omit them, or select the model's state dict with te-fsdp ckpt convert --key",
        )
    if not contents.tensors:
        raise CheckpointError(
            f"{contents.source}: a state dict without tensors",
            expected="the model's weights",
            got=_keys(dict(state)),
            fix="check the saved keys, or select the model's state dict with te-fsdp ckpt convert --key",
        )
    if read := len(manifest.delayed):
        note = f"delayed-scaling state: taken from TransformerEngine's _extra_state of {read} module(s)"
        contents.notes.append(note)
    if unread_count := len(extras) - read:
        reason = "dropped as requested" if choices.extra_state == "drop" else "without state"
        contents.notes.append(f"_extra_state of {unread_count} module(s): {reason}")
    if not extras:
        contents.notes.append(
            "_extra_state: none in the file; delayed scaling would start with new histories"
        )


def _add_extra_state(contents: Contents, module: str, value: Any, choices: Choices) -> None:
    """Add one module's ``_extra_state``: a tensor of TE's or ours, nothing, or a dict, perhaps with a condition."""
    key = f"{contents.source}: {f'{module}.{_EXTRA}'.lstrip('.')}"
    if isinstance(value, dict) and set(value) != {DELAYED}:  # te_fsdp before version 0.1
        condition = str(next(iter(value), ""))
        _check_uncut(key, marks_of(condition) if len(value) == 1 else (-1,), condition)
        value = next(iter(value.values()))
    if isinstance(value, Lazy) and len(value.shape) > 1 and not has_expert_rows(value.full()):
        _check_uncut(key, tuple(value.shape[1:]), describe_load_condition(tuple(value.shape[1:])))
    # After the checks of the row order, which dropping the state must not skip.
    if choices.extra_state == "drop":
        return
    # Raised here and not where it was read, because with "drop" an unreadable entry does not matter.
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
    """Return the delayed-scaling state in an entry of TE's or of ours, in the form of a bound module's state dict."""
    try:
        entry = value.full()
        own_entry, data = unpack(entry), bytes_of(entry)
    except DamagedEntryError as error:
        raise CheckpointError(
            f"{key}: not a state of TransformerEngine", expected="bytes", got=f"{value.dtype}: {error}"
        ) from error
    if own_entry is not None:
        state = own_entry[1] or {}
    else:
        recipe, tensors = read_extra_state(data, key) or ({}, {})
        state = {"recipe": recipe, **tensors} if tensors else {}
    return {n: InMemory(v) if isinstance(v, torch.Tensor) else v for n, v in state.items()}


def _check_uncut(key: str, marks: tuple[int, ...], condition: str) -> None:
    """Raise CheckpointError unless rows and blocks are in the order of the unsharded module."""
    if set(marks) != {1}:
        raise CheckpointError(
            f"{key}: weights of a sharded module",
            expected="a state dict of one process",
            got=condition or "an entry of a different kind",
            why="Its rows or blocks are not in the order of the unsharded module",
            fix="load it on the mesh that saved it, and save it with te_fsdp.checkpoint.save",
        )


# --- the optimizer of a DCP directory, in the form of torch's Optimizer.state_dict()


def _add_optimizer(contents: Contents, state: Any, choices: Choices) -> bool:
    """Add a torch optimizer's state dict to a checkpoint's contents, or a note why not; return whether it was added.

    Parameters are identified by name, as ``torch.distributed.checkpoint.state_dict`` writes them, or by the
    ``param_names`` of each group, which torch writes for an optimizer of named parameters.
    """

    def option(value: Any, key: str) -> Any:
        is_number = key.startswith("param_groups.") and isinstance(value, Lazy) and value.shape in ((), (1,))
        return value.full().item() if is_number else value

    state = with_leaves(state, option)  # reads options, before the try: damage is an error, not a note
    try:
        state = _nested(state)
        if not isinstance(state, Mapping) or not isinstance(state.get("param_groups"), list):
            raise CheckpointError("not a torch optimizer's state_dict()")
        groups, names = _names(contents, state)
        # DCP converts numbers to text in the keys of dicts.
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
                    states.setdefault(name, {})[key] = {"value": encode_numbers(value, f"{key} of {name}")}
        group_options = [{k: v for k, v in g.items() if k not in ("params", "param_names")} for g in groups]
        described_groups = [
            {"parameters": [names[n] for n in group["params"]], "options": encode_numbers(options, "options")}
            for group, options in zip(groups, group_options, strict=True)
        ]
        # The state dict of torch does not record the class of its optimizer.
        class_name = _class_of(groups) or choices.optimizer_class
        if class_name is None:
            raise CheckpointError(
                "its class cannot be inferred from its options (save it with te_fsdp.checkpoint.save)"
            )
        described = {"class": class_name, "groups": described_groups, "state": states}
    except (CheckpointError, TypeError, KeyError, ValueError, AttributeError) as error:
        reason = f"not a torch optimizer's state_dict() ({type(error).__name__}: {error})"
        contents.notes.append(f"optimizer: left, {error if isinstance(error, CheckpointError) else reason}")
        return False
    contents.manifest.optimizer = described
    contents.tensors |= tensors
    contents.notes.append(f"optimizer: taken, {described['class']} with {len(described['state'])} states")
    return True


def _nested(state: Any) -> Any:
    """Return a flat state dict (``state.<name>.<key>``, ``param_groups.<name>.<option>``) as a nested one."""
    prefixes = ("state.", "param_groups.")
    if not isinstance(state, Mapping) or not state or not all(str(k).startswith(prefixes) for k in state):
        return state
    states: dict[str, dict[str, Any]] = {}
    options: dict[str, dict[str, Any]] = {}
    for key, value in state.items():
        kind, _, path = key.partition(".")
        name, _, last = path.rpartition(".")
        (states if kind == "state" else options).setdefault(name, {})[last] = value
    # The flat form repeats the options for each parameter. Parameters with equal options become one group.
    groups: list[tuple[dict[str, Any], list[str]]] = []
    for name, own in options.items():
        equal_groups = [names for shared, names in groups if shared == own]
        equal_groups[0].append(name) if equal_groups else groups.append((own, [name]))
    return {"state": states, "param_groups": [{**own, "params": names} for own, names in groups]}


def _names(contents: Contents, state: Mapping[str, Any]) -> tuple[list[Any], dict[Any, str]]:
    """Return the param groups with the experts of all ranks, and each parameter's name, by number or by name."""
    groups = [{**group, "params": list(group["params"])} for group in state["param_groups"]]
    # DCP writes the lists of names of rank 0 only.
    present, saved = {name for group in groups for name in group["params"]}, state.get("state", {})
    others = (n for n in contents.manifest.parameters if n in saved and n not in present)
    for name in (name for name in others if stacked_name(name) != name):
        matches = [g for g in groups if stacked_name(name) in {stacked_name(str(n)) for n in g["params"]}]
        if len(matches) == 1:
            matches[0]["params"].append(name)
    numbers = [number for group in groups for number in group["params"]]
    if all(isinstance(number, str) for number in numbers):
        names = dict(zip(numbers, numbers, strict=True))
    elif all("param_names" in group for group in groups):
        names = {n: name for g in groups for n, name in zip(g["params"], g["param_names"], strict=True)}
    else:  # DCP keeps no order: its metadata lists the tensors of rank 0 first
        raise CheckpointError(
            "it numbers its parameters without names (save the state of get_state_dict, or pass the optimizer "
            "model.named_parameters())"
        )
    if unknown := [name for name in names.values() if name not in contents.manifest.parameters]:
        raise CheckpointError(f"it names {unknown[0]}, which the state dict lacks")
    return groups, names


def _class_of(groups: list[Any]) -> str | None:
    """Return the class with these options; ``None`` if several have them (NAdam, RAdam, Adamax, TE's FusedSGD)."""
    options = groups[0] if groups else {}
    adam = "AdamW" if options.get("decoupled_weight_decay") else "Adam"
    known = {"FusedAdam": {"bias_correction", "betas"}, adam: {"betas", "amsgrad"}, "SGD": _SGD}
    return next((name for name, keys in known.items() if keys <= options.keys()), None)
