"""An optimizer's part of a checkpoint.

Works on the state tensors themselves, because state dicts of torch's optimizers and TE's FusedAdam copy and cast.
Missing state is allocated at load, without a step. Keys in the files: ``optimizer.state.<name>.<state>``.

Several optimizers are one in the manifest, whose groups have the name of theirs. A parameter has one optimizer.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.optim import Optimizer

from te_fsdp.checkpoint.compare import GROUPS, Differences
from te_fsdp.checkpoint.extra import decode, encode_numbers
from te_fsdp.checkpoint.manifest import dtype_name, main_weight_of
from te_fsdp.checkpoint.model_state import OwnedTensor, check_names
from te_fsdp.checkpoint.tensor_entries import Shape, TensorEntry, add_entry, join_experts, per_expert
from te_fsdp.errors import CheckpointError, shorten
from te_fsdp.features.main_params import MAIN, is_low_precision, optimizer_shard_in, rows_of_state
from te_fsdp.features.main_weights import check_optimizer, initialize_fused_adam, unwrap_optimizer
from te_fsdp.layout import cut_boxes
from te_fsdp.records import KEEPS_MAIN_WEIGHTS, require_optimizer
from te_fsdp.upstream import te as _te, torch_dtensor as _torch

#: The manifest's description of states, by name.
States = dict[str, dict[str, Any]]


@dataclass
class OptimizerState:
    """An optimizer's contribution to a checkpoint."""

    #: The manifest's ``optimizer``, without its groups, and the states in ``experts``
    described: dict[str, Any]
    entries: dict[str, TensorEntry]  #: Tensors by key
    #: States of parameters of single experts, by the name of the tensor of all. Each rank has its own experts, and some
    #: of these may have no state.
    experts: dict[str, States] = field(default_factory=dict)

    def complete(self, experts: dict[str, States], members: dict[str, list[OwnedTensor]]) -> None:
        """Add the result of :func:`join_ranks_experts`; state that an expert here lacks becomes zeros. Local."""
        self.described["state"] |= experts
        for name, states in experts.items():
            for owned, (key, described) in itertools.product(members.get(name, []), states.items()):
                if "dtype" not in described or per_expert(described, owned.expert) is not None:
                    continue
                dtype, device = getattr(torch, described["dtype"]), owned.local.device
                if described["scalar"]:
                    number = torch.zeros(described["shape"][1:], dtype=dtype, device="cpu")
                    entry = TensorEntry.replicated(number).grouped(owned.expert)
                else:
                    entry = owned.entry(torch.zeros(owned.info.local_shape, dtype=dtype, device=device))
                add_entry(self.entries, f"optimizer.state.{name}.{key}", entry)


def join_ranks_experts(by_rank: list[dict[str, States]]) -> dict[str, States]:
    """Return the states of all ranks' experts; raise CheckpointError for different kinds in one layer."""
    joined: dict[str, States] = {}
    for experts in by_rank:
        for name, states in experts.items():
            join_experts(joined.setdefault(name, {}), states, name)
    return {name: joined[name] for name in sorted(joined)}


def describe_state(key: str, value: Any, owned: OwnedTensor) -> tuple[dict[str, Any], TensorEntry | None]:
    """Return description and entry of a state value of a parameter, for its own tensor. Local operation.

    ``key`` is the file key. A plain value is stored in the manifest, and has no entry. Raise CheckpointError for a
    value without a known place in the original parameter.
    """
    if not isinstance(value, torch.Tensor):
        return {"value": encode_numbers(value, key)}, None
    local, full_shape = _torch.local_of(value), owned.parameter.shape
    described: dict[str, Any] = {"shape": list(value.shape), "dtype": dtype_name(value.dtype)}
    # The step count. A parameter with one element has state of that shape, too, which is its own.
    if value.numel() == 1 and value.ndim <= 1 and value.shape != full_shape:
        return described, TensorEntry.replicated(local)
    if value.shape != full_shape or _te.is_quantized(local):
        format_ = f" in {_te.format_of(local)}" if _te.is_quantized(local) else ""
        raise CheckpointError(
            f"{key}: state without a known place in the parameter",
            expected=f"a scalar, or high precision of shape {tuple(full_shape)}",
            got=f"shape {tuple(value.shape)}{format_}",
            fix="use an optimizer with elementwise state (AdamW, SGD, FusedAdam without uint8)",
        )
    info = owned.info
    shape, boxes = info.local_shape, info.boxes
    rows = rows_of_state(value, owned.parameter)
    if rows is not None:  # shard_optimizer has cut it further
        dim, low, high = rows
        shape, boxes = (*shape[:dim], high - low, *shape[dim + 1 :]), cut_boxes(boxes, dim, low, high)
    if tuple(local.shape) != shape:
        got, fix = tuple(local.shape), "shard the state like its parameter"
        raise CheckpointError(f"{key}: local shape", expected=shape, got=got, fix=fix)
    described["shape"] = list(info.original_shape)
    return described, TensorEntry.cut(local, info.original_shape, boxes)


def split(saved: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the manifest's entry of each optimizer, by its name."""
    names = dict.fromkeys(group.get("optimizer", "") for group in saved["groups"])
    # A single optimizer without a name, as all checkpoints had before several were supported.
    if set(names) <= {""}:
        return {"": saved}
    # The manifest has one class for all, such as "muon=Muon, adam=AdamW".
    classes = dict(item.split("=", 1) for item in saved["class"].split(", "))
    result = {}
    for name in names:
        groups = [group for group in saved["groups"] if group.get("optimizer", "") == name]
        parameters = {parameter for group in groups for parameter in group["parameters"]}
        state = {key: states for key, states in saved["state"].items() if key in parameters}
        result[name] = {"class": classes.get(name, ""), "groups": groups, "state": state}
    return result


def _slot(
    optimizer: Optimizer, parameter: torch.Tensor, present: Any, shape: Shape, dtype: torch.dtype
) -> Any:
    """Return the existing value if it fits, else a new one."""
    if isinstance(present, torch.Tensor) and tuple(present.shape) == shape and present.dtype == dtype:
        return present
    if shape != tuple(parameter.shape):
        return torch.zeros(shape, dtype=dtype, device="cpu")  # restore_groups moves it to its device
    chunk = optimizer_shard_in(optimizer, parameter)
    if chunk is not None:
        return chunk.distributed(torch.zeros(chunk.shape, dtype=dtype, device=parameter.device))
    own = _torch.local_of(parameter)
    if _te.is_quantized(own):
        local = torch.zeros(own.shape, dtype=dtype, device=parameter.device)
    else:
        # As torch's optimizers make it: kernels for many tensors at once want the strides of the parameter.
        local = torch.zeros_like(own, dtype=dtype, memory_format=torch.preserve_format)
    return _torch.placed_like(local, parameter)


def _restored(present: Any, saved: Any) -> Any:
    """Return a saved option. Its numbers are copied to the present tensors, which captured graphs read."""
    if isinstance(present, torch.Tensor):
        return present.fill_(saved)
    if type(present) is type(saved) and type(saved) in (tuple, list) and len(present) == len(saved):
        return type(saved)(map(_restored, present, saved))
    return saved


class SavedOptimizer(NamedTuple):
    """An optimizer with its entry in the manifest, and the model's parameters by ``id``."""

    optimizer: Optimizer
    saved: dict[str, Any]
    owned: dict[int, OwnedTensor]

    def compare(self, diff: Differences, label: str) -> None:
        """Add the differences, in texts that begin with ``label``. Local operation; changes nothing."""
        optimizer, saved, owned = self
        add, kind = functools.partial(diff.add_optimizer, label=label), type(optimizer).__name__
        # Different classes may still have equal state, so the comparison goes on and reports all differences.
        if saved["class"] != kind:
            add(f"optimizer: saved {saved['class']}, this one is {kind}")
        groups = [{owned[id(p)].key for p in group["params"]} for group in optimizer.param_groups]
        saved_groups = [set(group["parameters"]) for group in saved["groups"]]
        if len(groups) != len(saved_groups):
            add(f"optimizer: {len(saved_groups)} groups saved, here {len(groups)}", GROUPS)
            # Groups cannot be paired then, but missing parameters are still reported.
            groups, saved_groups = [set().union(*groups)], [set().union(*saved_groups)]
        for index, (current, before) in enumerate(zip(groups, saved_groups, strict=True)):
            # By name: the order of parameters may differ between versions of a script.
            for verb, names in ("missing in", current - before), ("only in", before - current):
                for name in sorted(names):
                    add(f"optimizer group {index}: {len(names)} {verb} the checkpoint", name)
        for target in owned.values():
            name, states = target.key, self._states(target)
            expected = self._expected_dtypes(target.parameter, states) if states else {}
            # The parameter's first step, which allocates the moments, came after the save.
            if states.keys() == {MAIN}:
                expected = {key: dtype for key, dtype in expected.items() if key == MAIN}
            for key in sorted(states.keys() ^ expected.keys()):
                where = "only in the checkpoint" if key in states else "not in the checkpoint"
                # TE's FusedAdam has an option for main weights, and FP32 weights need none.
                if not hasattr(optimizer, "name_to_dtype_map") and is_low_precision(target.parameter):
                    fix = "call te_fsdp.main_weights(model, optimizer) before load"
                    add(f"optimizer state {key!r} is {where}: {fix}", name)
                elif key != MAIN or {states.get(key, {}).get("dtype"), expected.get(key)} - {None, "float32"}:
                    add(f"optimizer state {key!r} is {where}", name)
                else:
                    result = "left out" if key in states else "made from the loaded weights"
                    diff.converted[f"optimizer.state.{name}.{key}"] = f"{where}: {result}"
            for key, described in states.items():
                if "dtype" not in described:
                    continue
                dtype, wanted = described["dtype"], expected.get(key)
                if wanted is not None and dtype != wanted:
                    if all(getattr(torch, d).is_floating_point for d in (dtype, wanted)):
                        diff.converted[f"optimizer.state.{name}.{key}"] = f"{dtype} -> {wanted}"
                    else:
                        add(f"optimizer state {key!r}: saved {dtype}, this optimizer keeps {wanted}", name)
                shape = tuple(described["shape"])
                if shape not in ((), (1,), target.info.original_shape):
                    add(f"optimizer state {key!r}: saved shape {shape}", name)

    def _states(self, owned: OwnedTensor) -> States:
        """Return the saved descriptions of one parameter's state."""
        states = self.saved["state"].get(owned.key, {})
        own = {key: per_expert(described, owned.expert) for key, described in states.items()}
        return {key: described for key, described in own.items() if described is not None}

    def _expected_dtypes(self, parameter: torch.Tensor, saved: States) -> dict[str, str | None]:
        """Return a parameter's state names with the optimizer's dtype, ``None`` if it accepts any."""
        optimizer: Any = self.optimizer
        is_cut = optimizer_shard_in(optimizer, parameter) is not None  # te_fsdp has the main weights
        dtypes = getattr(optimizer, "name_to_dtype_map", None)
        if dtypes is not None:  # TE's FusedAdam
            expected: dict[str, str | None] = {k: dtype_name(d) for k, d in dtypes.items()}
            if not optimizer.master_weights:
                expected.pop(MAIN)
            elif optimizer.store_param_remainders and parameter.dtype == torch.bfloat16:
                expected[MAIN] = "int16"
            if is_cut:
                expected.pop(MAIN, None)
                expected |= {MAIN: "float32"} if is_low_precision(parameter) else {}
            return expected
        present = optimizer.state.get(parameter, {})
        if not is_low_precision(parameter) or not (MAIN in present or hasattr(optimizer, KEEPS_MAIN_WEIGHTS)):
            saved = {key: described for key, described in saved.items() if key != MAIN}
        # State that torch allocates on demand (amsgrad, momentum) may be in the checkpoint.
        return {
            k: dtype_name(v.dtype) if isinstance(v := present.get(k), torch.Tensor) else None for k in saved
        }

    def prepare(self, weights: States, excluded: set[str]) -> tuple[dict[str, TensorEntry], set[str]]:
        """Allocate missing state, after a comparison, and drop other state. Local operation.

        No step is made. ``weights`` are the saved parameters. The state of the tensors in ``excluded`` stays. Return
        entries of the live state tensors, still to be filled, and the names of the parameters whose main weight is one.
        """
        optimizer, entries, mains = self.optimizer, dict[str, TensorEntry](), set[str]()
        for parameter in (parameter for group in optimizer.param_groups for parameter in group["params"]):
            target = self.owned[id(parameter)]
            if target.key in excluded:
                continue
            states = self._states(target)
            if not states:
                state = optimizer.state.pop(parameter, {})
                # Keep the main weight of an optimizer that cannot initialize it, to set it later.
                if MAIN in state and not hasattr(optimizer, "initialize_state"):
                    optimizer.state[parameter][MAIN] = state[MAIN]
                continue
            weight = weights[target.key]
            if is_low_precision(parameter) and not main_weight_of(weight, states):
                states.pop(MAIN, None)  # it is made from the loaded weight
            fresh = self._fresh_state(target, states, weight["dtype"])
            mains |= {target.fqn} if MAIN in fresh else set()
            for key, value in fresh.items():
                label = f"optimizer.state.{target.key}.{key}"
                entry = describe_state(label, value, target)[1]
                if entry is not None:
                    add_entry(entries, label, entry.grouped(states[key].get("expert")))
        return entries, mains

    def _fresh_state(self, owned: OwnedTensor, states: States, weight_dtype: str) -> dict[str, Any]:
        """Allocate the described state of a parameter, whose weight was saved in a dtype; a load fills it later."""
        optimizer, parameter, full_shape = self.optimizer, owned.parameter, owned.info.original_shape
        expected = self._expected_dtypes(parameter, states)
        # It allocates state in TE's own dtypes and scales, which differ from the parameter's.
        initialize_fused_adam(optimizer, parameter)
        present = optimizer.state[parameter]
        fresh = {}
        for key, described in states.items():
            if key not in expected:
                continue
            if "dtype" not in described and expected[key] is None:
                fresh[key] = decode(described["value"], {})
                continue
            shape, dtype = tuple(described["shape"]), expected[key] or described["dtype"]
            if shape == full_shape:
                if expected[key] is None and dtype == weight_dtype and key != "step":
                    # torch's optimizers keep state in the dtype of the updated tensor: the main weight, or the weight.
                    updated = present.get(MAIN)
                    dtype = dtype_name(parameter.dtype if updated is None else updated.dtype)
                shape = tuple(parameter.shape)
            fresh[key] = _slot(optimizer, parameter, present.get(key), shape, getattr(torch, dtype))
        # A main weight that the checkpoint lacks is set later from the loaded weight.
        unsaved_main = {k: v for k, v in present.items() if k == MAIN and k not in fresh and k not in states}
        # Cleared, not merged: state that the checkpoint lacks belongs to steps after the save.
        present.clear()
        present.update(fresh | unsaved_main)
        return fresh

    def restore_groups(self, loaded: set[str]) -> list[int]:
        """Set every group's saved options; remove options that are neither saved nor defaults. Local operation.

        ``loaded`` are the tensors whose state was loaded. Return the groups whose options were left: their loaded
        parameters are from several saved groups, or from none.
        """
        optimizer, saved, owned = self
        index_of = {
            name: index for index, group in enumerate(saved["groups"]) for name in group["parameters"]
        }
        # Frozen groups have no loaded parameters. With equal numbers they are still paired by position.
        same_number = len(saved["groups"]) == len(optimizer.param_groups)
        unchanged = []
        for index, group in enumerate(optimizer.param_groups):
            sources = {index_of[name] for name in {owned[id(p)].key for p in group["params"]} & loaded}
            if same_number and sources <= {index}:
                sources = {index}
            if len(sources) == 1:
                options = decode(saved["groups"][sources.pop()]["options"], {})
                # Schedulers add options such as ``initial_lr``. One that was not saved belongs to a later state.
                for key in set(group) - set(options) - set(optimizer.defaults) - {"params", "param_names"}:
                    del group[key]
                for key, value in options.items():
                    group[key] = _restored(group.get(key), value)
            else:
                unchanged.append(index)
            # These options, which may be from the checkpoint, need "step" on the device: torch's rule. Other kernels
            # accept it on both.
            if not (group.get("capturable") or group.get("fused")):
                continue
            for parameter in group["params"]:
                state = optimizer.state.get(parameter, {})
                for key, value in state.items():
                    if (
                        isinstance(value, torch.Tensor)
                        and value.numel() == 1
                        and value.shape != parameter.shape
                    ):
                        state[key] = value.to(parameter.device)
        return unchanged


class Optimizers(dict[str, Optimizer]):
    """Optimizers by name, within their wrappers; one that was given without a name has ``""``."""

    def __init__(self, given: Any) -> None:
        """Take an optimizer, a dict of them by name, or ``None``; raise CheckpointError for others."""
        if isinstance(given, Mapping):
            check_names(given, "optimizer")
        else:
            given = {} if given is None else {"": given}
        for name, value in given.items():
            require_optimizer(value, "checkpoint: model, optimizer" + (f" {name!r}" if name else ""))
        super().__init__({name: unwrap_optimizer(value) for name, value in given.items()})

    @property
    def class_name(self) -> str:
        """Return the manifest's ``class``: the class of one optimizer, or names and classes of several."""
        kinds = {name: type(optimizer).__name__ for name, optimizer in self.items()}
        return ", ".join(f"{name}={kind}" if name else kind for name, kind in kinds.items())

    def _check(self, model: nn.Module) -> None:
        """Raise for other parameters than the model's, and for state that depends on the mesh."""
        for optimizer in self.values():
            check_optimizer(model, optimizer)
            if isinstance(optimizer, torch.optim.LBFGS):
                raise CheckpointError(
                    f"{type(optimizer).__name__}: state of all parameters in one vector",
                    expected="state per parameter",
                    why="The order of its elements depends on the mesh",
                    fix="save and load the model alone: LBFGS begins with a new history",
                )
            dtypes = getattr(optimizer, "name_to_dtype_map", {})
            scaled = {k: dtype_name(d) for k, d in dtypes.items() if d in (torch.float16, torch.uint8)}
            # The dtype of main weights is set even if there are none.
            if not getattr(optimizer, "master_weights", True):
                scaled.pop(MAIN, None)
            if scaled:
                raise CheckpointError(
                    f"{type(optimizer).__name__}: state kept with a scale per shard",
                    expected="float32 or bfloat16 state",
                    got=", ".join(f"{key} in {dtype}" for key, dtype in scaled.items()),
                    fix="leave exp_avg_dtype, exp_avg_sq_dtype and master_weight_dtype at float32 (or bfloat16)",
                )

    def state(
        self, model: nn.Module, owned: dict[int, OwnedTensor], mains: dict[int, torch.Tensor]
    ) -> OptimizerState:
        """Return entries and description of the states, given the model's parameters. Local operation.

        ``mains`` replace main weights, by ``id`` of the parameter. Raise CheckpointError for state without a place in
        the original parameter, or a parameter of two optimizers.
        """
        result, holders = OptimizerState({"state": {}, "class": self.class_name}, {}), dict[str, str]()
        states: dict[str, States] = result.described["state"]
        self._check(model)
        for name, optimizer in self.items():
            # By the files' tensors: the experts of a layer are one of them.
            for key in dict.fromkeys(
                owned[id(p)].key for group in optimizer.param_groups for p in group["params"]
            ):
                if holders.setdefault(key, name) != name:
                    raise CheckpointError(
                        f"save: {key} is in two optimizers, {holders[key]!r} and {name!r}",
                        expected="one optimizer for each parameter",
                        why="The files store the state of a parameter under its name",
                        fix="pass the parameter, or all experts of a layer, to one of them",
                    )
            for parameter, state in optimizer.state.items():
                target = owned.get(id(parameter))
                if target is None:
                    raise CheckpointError(
                        f"{type(optimizer).__name__}: state of a parameter that the model does not have",
                        expected="state of the model's parameters",
                        got=f"state of one of shape {tuple(getattr(parameter, 'shape', ()))} that is in no group",
                        why="The files store parameters under their names in the model",
                        fix="remove its entry from optimizer.state together with the parameter from its group",
                    )
                for key, value in state.items():
                    if value is None:
                        continue
                    value = mains.get(id(parameter), value) if key == MAIN else value
                    label = f"optimizer.state.{target.key}.{key}"
                    described, entry = describe_state(label, value, target)
                    if target.expert is None:
                        states.setdefault(target.key, {})[key] = described
                    else:
                        described = target.expert.of_all_experts(described, target.info.original_shape)
                        join_experts(result.experts.setdefault(target.key, {}), {key: described}, target.key)
                    if entry is not None:
                        add_entry(result.entries, label, entry.grouped(target.expert))
        return result

    def groups(self, names: dict[int, str]) -> list[dict[str, Any]]:
        """Return names and options of all groups, each with its optimizer's name if there is one. Local operation.

        The experts of a layer share one name. ``names`` are those of the files' tensors, by the parameters' ``id``.
        Raise CheckpointError for options that cannot be stored, and for experts of one layer in several groups.
        """
        groups: list[dict[str, Any]] = []
        for label, optimizer in self.items():
            group_of: dict[str, int] = {}
            for index, group in enumerate(optimizer.param_groups):
                options = {key: value for key, value in group.items() if key not in ("params", "param_names")}
                # The learning rate and betas may be tensors.
                encoded = encode_numbers(options, f"optimizer.param_groups[{index}]")
                parameters = list(dict.fromkeys(names[id(p)] for p in group["params"]))
                divided = [name for name in parameters if group_of.setdefault(name, index) != index]
                if divided:
                    raise CheckpointError(
                        f"optimizer: experts of {divided[0]} in the groups {group_of[divided[0]]} and {index}",
                        expected="all experts of a layer in one group",
                        why="A checkpoint stores the weights of all experts as one tensor",
                        fix="put them in one group",
                    )
                groups.append(
                    {"parameters": parameters, "options": encoded} | ({"optimizer": label} if label else {})
                )
        return groups

    def compare(
        self, diff: Differences, model: nn.Module, saved: dict[str, Any] | None, owned: dict[int, OwnedTensor]
    ) -> None:
        """Add the differences between saved optimizers and these. Local operation; changes nothing."""
        self._check(model)
        if saved is None:
            diff.add_optimizer("optimizer: none in the checkpoint")
            return
        by_name = split(saved)
        # Without names on one side, optimizers cannot be matched.
        if ("" in by_name) != ("" in self):
            names = [shorten([*o]) if "" not in o else "one without a name" for o in (by_name, self)]
            diff.add_optimizer(f"optimizer: saved {names[0]}, here {names[1]}")
            return
        for name in sorted(by_name.keys() & self.keys()):
            SavedOptimizer(self[name], by_name[name], owned).compare(diff, f"{name}: " if name else "")
        for name in sorted(by_name.keys() - self.keys()):
            for key in sorted({key for group in by_name[name]["groups"] for key in group["parameters"]}):
                diff.add_optimizer(f"optimizer {name!r} is only in the checkpoint", key)
        for name in sorted(self.keys() - by_name.keys()):
            parameters = [p for group in self[name].param_groups for p in group["params"]]
            for key in sorted({owned[id(p)].key for p in parameters}):
                diff.add_optimizer(f"optimizer {name!r} is not in the checkpoint", key)
