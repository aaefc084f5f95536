"""Load experts through plain DCP from either form of a ``GroupedLinear``: a tensor for each expert, or one for all."""

# [Note: two forms of experts] The two forms have different names in state dicts, and DCP loads by name. A bound
# module therefore marks its entries with an :class:`ExpertMark`. If a checkpoint has only the other form, the
# load plan reads that form into views of the entries: 2-D views of the tensor of all experts, or 3-D views of each
# expert's tensor. Names alone do not identify experts. An entry without a mark is loaded as torch loads it.

from __future__ import annotations

import copy
import functools
import io
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint import DefaultLoadPlanner, state_dict as _state_dict
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata

from te_fsdp.errors import CheckpointError, OrderError
from te_fsdp.layout import expert_index
from te_fsdp.modules.extra_state import ExpertEntry, plain_entry
from te_fsdp.modules.full_experts import (
    has_other_experts,
    load_optimizer_states,
    loads_shards,
    with_all_experts,
)
from te_fsdp.modules.newest_amaxes import full_model_state
from te_fsdp.modules.state_loading import (
    create_states,
    entries_of_second_names,
    has_stepped,
    record_missing_states,
    refuse_missing_states,
)
from te_fsdp.quantized.boxed import QuantizedSlice
from te_fsdp.records import binding_of, get_record
from te_fsdp.upstream import te as _te, torch_dtensor as _torch
from te_fsdp.upstream.patches import Replacements, wrapping
from te_fsdp.upstream.torch_dcp import LoadTarget

#: Attribute of a tensor in a state dict: an ExpertMark as a tuple, which ``torch.load(weights_only=True)`` accepts.
_MARK = "_te_fsdp_expert"


class ExpertMark(NamedTuple):
    """Identify a tensor of experts."""

    stack: str  #: Name of the tensor of all experts, ``weight`` or ``bias``
    index: int | None  #: Global index of the expert; ``None``: the tensor contains all
    total: int  #: Number of experts of all ranks

    def registered(self) -> str:
        """Return the name that the module registers."""
        return self.stack if self.index is None else f"{self.stack}{self.index}"

    def saved(self) -> list[str]:
        """Return the names that contain the tensor in the other form: stacked, or one tensor per expert."""
        return [f"{self.stack}{i}" for i in range(self.total)] if self.index is None else [self.stack]


def marks_of(module: torch.nn.Module) -> dict[str, ExpertMark]:
    """Return the marks of a bound module's parameters by registered name; none for other modules."""
    binding = binding_of(module)
    if binding is None or _te.kind_of(module) != "GroupedLinear":
        return {}
    count: Any = module.num_gemms
    total = binding.experts.total if binding.experts is not None else count
    marks = {}
    for name, parameter in module._parameters.items():
        # The user's DTensors describe their experts themselves.
        if parameter is None or name in binding.distributed:
            continue
        index = expert_index(name)
        if index is not None:
            marks[name] = ExpertMark(name[: -len(str(index))], index, total)
        elif name in ("weight", "bias"):
            marks[name] = ExpertMark(name, None, total)
    return marks


def mark_entries(module: torch.nn.Module, destination: dict[str, Any], prefix: str) -> None:
    """Mark a module's entries in a state dict. Local operation."""
    for name, mark in marks_of(module).items():
        if isinstance(value := destination.get(prefix + name), torch.Tensor):
            value.__dict__[_MARK] = tuple(mark)


@wrapping
def marked_optimizer_states(model: torch.nn.Module, *args: Any, stock: Any, **kwargs: Any) -> dict[str, Any]:
    """Return an optimizer's state dict with marked states of experts. Collective as :func:`with_all_experts`."""
    states_of = with_all_experts(stock, model, *args, **kwargs)
    for path, module in model.named_modules():
        for name, mark in marks_of(module).items():
            fqn = _torch.without_wrappers(f"{path}.{name}" if path else name)
            shape = module._parameters[name].shape  # type: ignore[union-attr]
            states = states_of["state"].get(fqn, {}) if "state" in states_of else states_of
            for key, value in states.items():
                is_own = states is not states_of or key.startswith(f"state.{fqn}.")
                if is_own and isinstance(value, torch.Tensor) and value.shape == shape:
                    value.__dict__[_MARK] = tuple(mark)
    record_missing_states(states_of, *args)
    return states_of


@wrapping
def load_model_state(model: torch.nn.Module, state_dict: dict[str, Any], info: Any, *, stock: Any) -> Any:
    """Load a model's state dict, with experts in either form. Collective with ``broadcast_from_rank0``."""
    # Ranks make tensors of the sizes that rank 0 broadcasts.
    states_of = {key: plain_entry(value) for key, value in _in_model_form(model, state_dict).items()}
    if info.broadcast_from_rank0:
        # torch broadcasts the values of rank 0's quantized tensors. All ranks quantize them, with one scale.
        values = {k: v.dequantize() for k, v in states_of.items() if _te.is_quantized(v)}
        states_of = {**entries_of_second_names(model), **states_of, **values}
    if info.broadcast_from_rank0 and has_other_experts(model):
        # torch would move every tensor of rank 0 to the CPU, also experts that this rank does not have.
        info = replace(info, cpu_offload=False)
    return stock(model, states_of, info)


@wrapping
def model_state(model: torch.nn.Module, *args: Any, stock: Any) -> dict[str, Any]:
    """Return a model's state dict with all experts and the newest amaxes. Collective for an unsharded one."""
    return full_model_state(functools.partial(with_all_experts, stock), model, *args)


@wrapping
def load_states_of_experts(
    model: torch.nn.Module, optimizers: Any, state_dict: Any, info: Any, *, stock: Any
) -> None:
    """Load an optimizer's state dict, with experts in either form. Collective with ``broadcast_from_rank0``."""
    load_optimizer_states(stock, _in_model_form, model, optimizers, state_dict, info)


@wrapping
def create_local_plan(self: Any, *, stock: Any) -> Any:
    """Plan a load of experts from the form that the checkpoint has. Local operation."""
    _refuse_padded(self)
    refuse_missing_states(self)
    _place_entries(self)
    fit = _Fit(self, self.state_dict)
    if fit.find():
        self.state_dict = fit.fitted()
        self.load_bytes = functools.partial(fit.load_bytes, self.load_bytes)
        self.commit_tensor = functools.partial(fit.commit_tensor, self.commit_tensor)
    return stock(self)


def _refuse_padded(planner: Any) -> None:
    """Raise CheckpointError for states of HFSDP that are padded for a different mesh. Local operation."""
    for fqn, wanted in planner.state_dict.items():
        saved = planner.metadata.state_dict_metadata.get(fqn)
        if not isinstance(wanted, torch.Tensor) or not isinstance(saved, TensorStorageMetadata):
            continue
        shape, *padded = sorted((tuple(saved.size), tuple(wanted.shape)), key=len)
        axes = len(padded[0]) - len(shape)  # that shard rows unevenly
        leading, rest = padded[0][:axes], padded[0][axes:]
        if (
            axes
            and shape
            and rest[1:] == shape[1:]
            and math.prod(leading) * rest[0] > shape[0]
            and shape[0] % math.prod(leading)
        ):
            raise CheckpointError(
                f"dcp.load: {fqn}",
                expected=f"a tensor of shape {tuple(wanted.shape)} in the files",
                got=tuple(saved.size),
                why="DTensors do not describe rows that several mesh axes shard unevenly, so HFSDP's states are "
                "padded for one mesh",
                fix="load on the mesh that saved, or save and load by te_fsdp.checkpoint",
            )


def _wrap_state_initialization(stock: Any) -> Any:
    """Wrap torch's step with zero gradients, whose dtype a parameter may refuse (``grad_dtype``).

    torch omits the step if the optimizer has any state, also if it consists of main weights or empty states.
    torch replaces a learning rate on the device by one on the CPU. FusedAdam's kernel then reads invalid memory.
    """
    original = stock

    @functools.wraps(stock)
    def init_states(optimizer: torch.optim.Optimizer) -> None:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        dtypes = [p for p in parameters if getattr(p, "grad_dtype", None) not in (None, p.dtype)]
        has_records = any(map(get_record, parameters))
        unstepped = bool(optimizer.state) and has_records and not has_stepped(optimizer)
        initialized = bool(optimizer.state) and not unstepped
        rates = [group["lr"] for group in optimizer.param_groups if "lr" in group]
        on_device = any(isinstance(rate, torch.Tensor) and rate.device.type != "cpu" for rate in rates)
        is_usual = not (dtypes or unstepped or on_device)
        pending = [p for p in parameters if p.grad is not None]
        if isinstance(optimizer, torch.optim.SGD):
            has_states = any(group["momentum"] for group in optimizer.param_groups)
        else:  # optimizers of other libraries may have no states
            has_states = type(optimizer).__module__.startswith(("torch.", "transformer_engine.", "te_fsdp."))
        is_omitted = pending and not initialized and has_states and not loads_shards.get()
        if is_omitted and has_records:
            raise OrderError(
                f"{type(optimizer).__name__}: state dict before the first step",
                expected="no gradients",
                got=f"gradients of {len(pending)} parameters",
                why="torch creates the states by a step with zero gradients, and omits them if there are others",
                fix="call optimizer.zero_grad() first",
            )
        if is_usual or initialized or pending:
            original(optimizer)
            return
        create_states(optimizer, [parameter for parameter in parameters if parameter.requires_grad])

    # Scripts import torch's function by name before, as PyTorch's FSDP2 example does, so its code is replaced.
    if isinstance(stock, FunctionType) and stock.__closure__ is None:
        original = FunctionType(stock.__code__, stock.__globals__, None, stock.__defaults__)
        stock.__code__, stock.__defaults__ = (lambda optim, call: call(optim)).__code__, (init_states,)
        return stock
    return init_states


def _in_model_form(model: torch.nn.Module, state_dict: dict[str, Any]) -> dict[str, Any]:
    """Return a state dict of unsharded tensors whose experts are in the form of the model. Local operation.

    It is the state dict of the model or of an optimizer, nested or flattened.
    """
    # torch would keep the model's values for names that it does not find, and raise for an optimizer's states.
    entries, renamed = dict(state_dict), dict[str, list[str]]()
    if "state" in entries:
        entries["state"] = dict(entries["state"])
    values = entries.get("state", entries)
    heads = ("state.", "param_groups.")
    tails = {key.rpartition(".")[2] for key in values if key.startswith(heads)}
    places = [("", ""), *((head, f".{tail}") for head in heads for tail in tails)]
    for path, module in model.named_modules():
        prefix = f"{_torch.without_wrappers(path)}." if path else ""
        for mark in marks_of(module).values():
            wanted = [f"{prefix}{mark.stack}{i}" for i in range(mark.total)]
            stacked, own = [f"{prefix}{mark.stack}"], prefix + mark.registered()
            saved, wanted = (wanted, stacked) if mark.index is None else (stacked, wanted)
            for head, tail in places:
                keys = [f"{head}{name}{tail}" for name in saved]
                if f"{head}{own}{tail}" in values or any(key not in values for key in keys):
                    continue
                found = [values.pop(key) for key in keys]
                parts = [_join(own, found)] if mark.index is None else _split(found[0], mark.total)
                values |= {f"{head}{name}{tail}": part for name, part in zip(wanted, parts, strict=True)}
                renamed |= dict.fromkeys(saved, wanted)
    if renamed and "param_groups" in entries:
        entries["param_groups"] = [
            {
                **group,
                "params": list(
                    dict.fromkeys(n for name in group["params"] for n in renamed.get(name, [name]))
                ),
            }
            for group in entries["param_groups"]
        ]
    return entries


def _join(name: str, values: list[Any]) -> Any:
    """Return the stacked tensors of all experts, or their one number or option; CheckpointError if they differ."""
    first = values[0]
    if isinstance(first, dict) and all(value.keys() == first.keys() for value in values):
        return {key: _join(f"{name}.{key}", [value[key] for value in values]) for key in first}
    if isinstance(first, torch.Tensor) and first.ndim:
        return torch.stack([_values(value) for value in values])
    for value in values:
        if not (torch.equal(first, value) if isinstance(first, torch.Tensor) else first == value):
            raise CheckpointError(
                f"{name}: one tensor of all experts",
                expected=f"one value for all experts, {first} as the first one has",
                got=str(value),
                fix="load into a GroupedLinear with a parameter for each expert",
            )
    return first


def _split(value: Any, experts: int) -> list[Any]:
    """Return each expert's part of a value of all experts."""
    if isinstance(value, dict):
        parts = {key: _split(part, experts) for key, part in value.items()}
        return [{key: part[i] for key, part in parts.items()} for i in range(experts)]
    if isinstance(value, torch.Tensor) and value.ndim:
        return list(_values(value).unbind())
    return [copy.deepcopy(value) for _ in range(experts)]  # a step counter each


def _values(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.dequantize() if _te.is_quantized(tensor) else tensor


def _place_entries(planner: Any) -> None:
    """Replace delayed-scaling entries of experts by entries that read the rows of the local experts."""
    saved, entries = planner.metadata.state_dict_metadata, {}
    for key, value in planner.state_dict.items():
        stored = saved.get(key)
        if not isinstance(value, ExpertEntry) or not isinstance(stored, TensorStorageMetadata):
            continue
        if len(stored.size) != 2:
            continue
        if value.experts is None or value.experts.total != stored.size[0]:
            raise CheckpointError(
                f"{key}: delayed-scaling state of experts",
                expected=f"{value.experts.total if value.experts else 'an unknown number of'} experts",
                got=f"{stored.size[0]} in the checkpoint",
                fix="load into the state_dict() of a model with the same number of experts",
            )
        # The width is the checkpoint's, because a new model has no state before its first forward.
        entries[key] = value.target(stored.size[1])
    for key, entry in entries.items():
        holder, last = _holder(planner, key)
        holder[last] = entry
    if entries:
        planner.state_dict = {**planner.state_dict, **entries}


def _holder(planner: Any, key: str) -> tuple[Any, Any]:
    """Return the nested container of a flat key's entry, and the entry's key in that container."""
    *path, last = planner.mappings.get(key, (key,))
    holder: Any = planner.original_state_dict
    for step in path:
        holder = holder[step]
    return holder, last


@dataclass
class _Fit:
    """The entries of one load whose experts the checkpoint stores in the other form."""

    planner: Any
    original: dict[str, Any]  #: The planner's entries under the names of the model
    #: Keys of the checkpoint, by the key of the model that each replaces; all are tensors of experts.
    tensors: dict[str, list[str]] = field(default_factory=dict)
    #: The same for other entries of a parameter: the step of an optimizer, options of a flattened state dict.
    others: dict[str, list[str]] = field(default_factory=dict)
    #: Prefixes of keys up to the name of a parameter, in the model and in the checkpoint.
    prefixes: dict[str, tuple[ExpertMark, list[str]]] = field(default_factory=dict)
    first: dict[str, torch.Tensor] = field(default_factory=dict)  #: Loaded numbers, by key of the model

    def find(self) -> bool:
        """Find the entries; return whether there are any. Local operation."""
        saved = self.planner.metadata.state_dict_metadata
        entries = self.planner.state_dict
        for key, value in entries.items():
            marked = value.__dict__.get(_MARK) if isinstance(value, torch.Tensor) else None
            mark = None if marked is None else ExpertMark(*marked)
            # The form that the checkpoint has is loaded as torch loads it.
            if mark is None or key in saved or mark.registered() not in (parts := key.split(".")):
                continue
            index = len(parts) - 1 - parts[::-1].index(mark.registered())
            prefixes = [".".join([*parts[:index], name]) for name in mark.saved()]
            keys = [".".join([prefix, *parts[index + 1 :]]) for prefix in prefixes]
            shape = value.shape[1:] if mark.index is None else (mark.total, *value.shape)
            if all(isinstance(saved.get(k), TensorStorageMetadata) and saved[k].size == shape for k in keys):
                self.tensors[key] = keys
                self.prefixes[".".join(parts[: index + 1])] = mark, prefixes
                # A flattened state dict has the options of a parameter's group next to its state.
                for n in (n for n, part in enumerate(parts[:index]) if part == "state"):
                    head, tail = [*parts[:n], "param_groups"], parts[n + 1 : index]
                    renamed = [".".join([*head, *tail, name]) for name in mark.saved()]
                    self.prefixes[".".join([*head, *tail, mark.registered()])] = mark, renamed
        for key in entries:
            for prefix, (_, prefixes) in self.prefixes.items():
                if key.startswith(f"{prefix}.") and key not in saved:
                    keys = [other + key[len(prefix) :] for other in prefixes]
                    if key not in self.tensors and all(other in saved for other in keys):
                        self.others[key] = keys
        return bool(self.tensors)

    def fitted(self) -> dict[str, Any]:
        """Return the entries under the names of the checkpoint. Local operation."""
        entries = self.planner.state_dict
        targets = {
            key: value for key, value in entries.items() if key not in self.tensors and key not in self.others
        }
        for key, keys in self.tensors.items():
            value, mark = entries[key], ExpertMark(*entries[key].__dict__[_MARK])
            # The rectangles of this rank, each with its offsets.
            shards = [((0,) * value.ndim, value)]
            if hasattr(value, "__create_chunk_list__"):
                offsets = [chunk.offsets for chunk in value.__create_chunk_list__() if 0 not in chunk.sizes]
                shards = [(tuple(o), value.__get_tensor_shard__(MetadataIndex("", o))) for o in offsets]
            for offset, piece in shards:
                # The model has one tensor per expert, the checkpoint one for all. Below it is the reverse.
                if mark.index is not None:
                    shape = (mark.total, *value.shape)
                    target = targets.setdefault(keys[0], LoadTarget(shape, value))
                    target.pieces[(mark.index, *offset)] = (
                        piece.stacked() if isinstance(piece, QuantizedSlice) else piece.unsqueeze(0)
                    )
                    continue
                for index in range(piece.shape[0]):
                    target = targets.setdefault(keys[offset[0] + index], LoadTarget(value.shape[1:], value))
                    target.pieces[offset[1:]] = (
                        piece.stacked(False) if isinstance(piece, QuantizedSlice) else piece[index]
                    )
            for name in keys if mark.index is None else ():
                targets.setdefault(name, LoadTarget(value.shape[1:], value))
        for key, keys in self.others.items():
            for name in keys:
                value = entries[key]
                targets[name] = torch.empty_like(value) if isinstance(value, torch.Tensor) else value
        return targets

    def load_bytes(self, stock: Callable[..., None], item: Any, value: io.BytesIO) -> None:
        """Load an object into every entry that it belongs to, with the parameter names of the model."""
        targets = self._targets(item.dest_index.fqn) or [item.dest_index.fqn]
        for key in targets:
            # The stock function reads the stream to its end, once for each target.
            value.seek(0)
            stock(replace(item, dest_index=replace(item.dest_index, fqn=key)), value)
            holder, last = _holder(self.planner, key)
            if last == "params":
                names: dict[str, None] = {}
                for name in holder[last]:
                    local_names = [
                        ".".join([*name.split(".")[:-1], mark.registered()])
                        for mark, prefixes in self.prefixes.values()
                        if any(prefix.endswith(f".{name}") for prefix in prefixes)
                    ]
                    names |= dict.fromkeys(local_names or [name])
                holder[last] = list(names)

    def commit_tensor(self, stock: Callable[..., None], item: Any, tensor: torch.Tensor) -> None:
        """Copy a number to every entry that it belongs to; CheckpointError if experts have different ones."""
        stock(item, tensor)
        for key in self._targets(item.dest_index.fqn):
            # Numbers such as "step" exist once per parameter, here once per expert.
            self.original[key].copy_(_join(key, [self.first.setdefault(key, tensor), tensor]))

    def _targets(self, saved: str) -> list[str]:
        return [key for key, keys in self.others.items() if saved in keys]


#: torch marks optimizer states of experts, and loads either form.
PATCHES: Replacements = (
    (_state_dict, "_get_optim_state_dict", marked_optimizer_states),
    (_state_dict, "_get_model_state_dict", model_state),
    (_state_dict, "_load_model_state_dict", load_model_state),
    (_state_dict, "_load_optim_state_dict", load_states_of_experts),
    (_state_dict, "_init_optim_state", _wrap_state_initialization),
    (DefaultLoadPlanner, "create_local_plan", create_local_plan),
)
