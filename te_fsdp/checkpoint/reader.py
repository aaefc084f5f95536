"""Contents of a file or directory of any kind, read by blocks."""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from te_fsdp.checkpoint.directory import open_checkpoint
from te_fsdp.checkpoint.index import described_tensors, problems_of_tensors, read_index
from te_fsdp.checkpoint.lazy_tensors import InMemory, Lazy, Stack, dequantized, mapped, total_bytes
from te_fsdp.checkpoint.manifest import Manifest, dtype_name, main_weight_of, parse_manifest, unreadable
from te_fsdp.checkpoint.plain_dcp import Quantized, tensors_of
from te_fsdp.checkpoint.tensor_entries import GROUPED, ExpertPlace, join_experts, per_expert, stacked_name
from te_fsdp.errors import CheckpointError, shorten
from te_fsdp.modules.semantics import NOTHING
from te_fsdp.version import VERSION

CHECKPOINT = "te_fsdp checkpoint"
#: :attr:`Contents.kind` of a directory of ``torch.distributed.checkpoint.save``.
DCP_KIND = "torch.distributed.checkpoint"
#: Metadata key of te_fsdp's manifest in portable files, and prefix of tensors that are not weights.
MANIFEST_KEY = "te_fsdp"
OTHER = "te_fsdp:"
#: A weight of one expert in TE's modules.
_OF_EXPERT = re.compile(r"(|.*\.)(weight|bias)(0|[1-9]\d*)")


def empty_manifest() -> Manifest:
    """Return an empty manifest, written now by one process."""
    versions = {"te_fsdp": VERSION, "torch": torch.__version__}
    return Manifest(versions, {"ranks": 1}, time.time_ns(), {}, {}, {}, None, {}, semantics=dict(NOTHING))


@dataclass
class Contents:
    """Contents of a checkpoint of any kind."""

    source: Path
    kind: str  #: Kind of the source, as text
    #: Its ``files`` are empty unless it is a checkpoint of te_fsdp
    manifest: Manifest = field(default_factory=empty_manifest)
    tensors: dict[str, Lazy] = field(default_factory=dict)  #: By te_fsdp's keys (``model.<name>``, ...)
    notes: list[str] = field(default_factory=list)  #: Data that were taken or left, as texts

    @property
    def names(self) -> list[str]:
        """Return the names of parameters and buffers."""
        return [*self.manifest.parameters, *self.manifest.buffers]

    @property
    def bytes(self) -> int:
        """Return the size of all tensors in bytes."""
        return total_bytes(self.tensors)

    def components(self, name: str) -> dict[str, Lazy] | None:
        """Return the components of a quantized weight; ``None`` for a high-precision one."""
        described = self.manifest.parameters.get(name, {})
        if described.get("format") is None:
            return None
        return {c: self.tensors[f"model.{name}:{c}"] for c in described["components"]}

    def value(self, name: str) -> Lazy:
        """Return a parameter's or buffer's value, dequantized; raise CheckpointError if its format cannot be."""
        components = self.components(name)
        if components is None:
            return self.tensors[f"model.{name}"]
        described = self.manifest.parameters[name]
        shape, dtype = tuple(described["shape"]), getattr(torch, described["dtype"])
        if described["layout"] != GROUPED:
            return dequantized(name, shape, dtype, described["format"], components)
        experts = [{part: t.select(index) for part, t in components.items()} for index in range(shape[0])]
        return Stack([dequantized(name, shape[1:], dtype, described["format"], own) for own in experts])

    def best_value(self, name: str, weights: str) -> tuple[Lazy, str]:
        """Return a value and its origin: ``"main"``, ``"dequantized"`` or ``"stored"``.

        ``weights="auto"`` takes the optimizer's main weight if there is one, ``"compute"`` never does. ``"main"``
        raises CheckpointError for a quantized weight without one.
        """
        states = (self.manifest.optimizer or {"state": {}})["state"].get(name, {})
        quantized = self.components(name) is not None
        if weights != "compute" and main_weight_of(self.manifest.tensor(name), states):
            main = self.tensors[f"optimizer.state.{name}.master_param"]
            return with_remainders(self.value(name), main) if main.dtype == torch.int16 else main, "main"
        if weights == "main" and quantized:
            raise CheckpointError(
                f"{name}: no main weight",
                expected="an optimizer that keeps main weights (FusedAdam with master_weights=True)",
                got="a checkpoint without one",
                fix="export with --weights auto, which takes the dequantized weight",
            )
        return self.value(name), "dequantized" if quantized else "stored"

    @classmethod
    def of_checkpoint(cls, path: Path) -> Contents:
        """Open a checkpoint of te_fsdp; raise CheckpointError if it is incomplete or damaged. Local operation."""
        manifest = open_checkpoint(path)
        tensors = tensors_of(manifest.data_folder(path), read_index(path, manifest))
        return cls(path, CHECKPOINT, manifest, tensors | _empty(manifest))

    @classmethod
    def from_portable(cls, path: Path, tensors: Mapping[str, Lazy], description: str) -> Contents:
        """Return the contents of safetensors with te_fsdp's manifest; CheckpointError for missing tensors or damage."""
        with unreadable(path, "description by te_fsdp", "the file was changed after te_fsdp wrote it"):
            manifest = parse_manifest(json.loads(description))
        keys = {
            name.removeprefix(OTHER) if name.startswith(OTHER) else f"model.{name}": tensor
            for name, tensor in tensors.items()
            # torch.save and safetensors write a tied tensor under each of its names, a checkpoint under the first.
            if name.partition(":")[0] not in manifest.tied
        }
        if problems := problems_of_tensors(manifest, {key: (t.shape, t.dtype) for key, t in keys.items()}):
            raise CheckpointError(
                f"{path}: its tensors differ from its description: {shorten(problems)}",
                fix="load an earlier checkpoint: the file was changed after te_fsdp wrote it",
            )
        return cls(path, "safetensors", manifest, keys | _empty(manifest))

    def stack_experts(self, wanted: Collection[str] | None = None) -> None:
        """Stack the experts' weights (``weight0``, ``weight1``, ...) and optimizer state in place.

        A module's tensors belong to experts if they are numbered from 0 without gaps and are of one kind. In addition,
        the model must have the stacked name (``wanted``). Without a model, the module must be TE's: te_fsdp's manifest
        or an ``_extra_state`` entry shows this. A plain module may number its parameters as well.
        """
        manifest, tensors = self.manifest, self.tensors
        layers = _layers(manifest, wanted)
        stacked_of = {name: stacked for stacked, members in layers.items() for name in members}
        if not layers:
            return
        parameters: dict[str, dict[str, Any]] = {}
        for name, described in manifest.parameters.items():
            stacked = stacked_of.get(name, name)
            if stacked in layers and stacked not in parameters:
                members = layers[stacked]
                described = {**described, "shape": [len(members), *described["shape"]], "layout": GROUPED}
                for suffix in key_ends(described):
                    parts = [tensors.pop(f"model.{n}{suffix}") for n in members]
                    tensors[f"model.{stacked}{suffix}"] = Stack(parts)
            parameters.setdefault(stacked, described)
        manifest.parameters = parameters
        if manifest.optimizer is not None:
            groups = [
                {**group, "parameters": [*dict.fromkeys(stacked_of.get(n, n) for n in group["parameters"])]}
                for group in manifest.optimizer["groups"]
            ]
            saved = manifest.optimizer["state"]
            states = {name: own for name, own in saved.items() if name not in stacked_of}
            for stacked, members in layers.items():
                shape = manifest.parameters[stacked]["shape"][1:]
                if joined := _stack_states(tensors, stacked, members, saved, shape):
                    states[stacked] = joined
            manifest.optimizer = {**manifest.optimizer, "state": states, "groups": groups}
        modules = {stacked.rpartition(".")[0] for stacked in layers}
        self.notes.append(f"experts: the weights of {len(modules)} layer(s) taken as one tensor each")

    def split_experts(self) -> Contents:
        """Return the same contents with weights and optimizer state for each expert, under TE's names."""
        totals = {n: d["shape"][0] for n, d in self.manifest.parameters.items() if d.get("layout") == GROUPED}
        if not totals:
            return self
        manifest = replace(self.manifest, parameters={})
        split = Contents(self.source, self.kind, manifest, dict(self.tensors), list(self.notes))
        for name, described in self.manifest.parameters.items():
            if name not in totals:
                manifest.parameters[name] = described
                continue
            for suffix in key_ends(described):
                weights = split.tensors.pop(f"model.{name}{suffix}")
                split.tensors |= {f"model.{name}{i}{suffix}": weights.select(i) for i in range(totals[name])}
            for index in range(totals[name]):
                manifest.parameters[f"{name}{index}"] = {**described, "shape": described["shape"][1:]}
        if (optimizer := manifest.optimizer) is None:
            return split
        states = {name: own for name, own in optimizer["state"].items() if name not in totals}
        for name in totals.keys() & optimizer["state"].keys():
            for key, described in optimizer["state"][name].items():
                stacked = split.tensors.pop(f"optimizer.state.{name}.{key}", None)
                for index in range(totals[name]):
                    if (own := per_expert(described, ExpertPlace(index, totals[name]))) is None:
                        continue
                    states.setdefault(f"{name}{index}", {})[key] = own
                    if stacked is not None:
                        tensor = stacked.select(index) if own["expert"] is not None else stacked
                        split.tensors[f"optimizer.state.{name}{index}.{key}"] = tensor
        groups = []
        for group in optimizer["groups"]:
            # TE registers the weight and the bias of one expert after the other.
            first, names = dict[str, int](), list[tuple[int, int, str]]()
            for number, name in enumerate(group["parameters"]):
                if name not in totals:
                    names.append((number, 0, name))
                    continue
                number = first.setdefault(name.rpartition(".")[0], number)
                names += [(number, index, f"{name}{index}") for index in range(totals[name])]
            groups.append({**group, "parameters": [name for *_, name in sorted(names, key=lambda n: n[:2])]})
        manifest.optimizer = {**optimizer, "state": states, "groups": groups}
        return split


def with_remainders(upper: Lazy, lower: Lazy) -> Lazy:
    """Return fp32 main weights that FusedAdam keeps as bf16 weights (``upper``) and the 16 missing bits as int16.

    TE rounds the weight to nearest: if the remainder, read as a signed number, is negative, the weight is one unit
    in the last place above the upper half (TE 2.20.2 ``multi_tensor_adam.cu``).
    """

    def joined(upper: torch.Tensor, lower: torch.Tensor) -> torch.Tensor:
        lower = lower.to(torch.int32)
        upper = upper.view(torch.int16).to(torch.int32) - (lower < 0).to(torch.int32)
        return ((upper << 16) | (lower & 0xFFFF)).view(torch.float32)

    return mapped(joined, torch.float32, upper, lower)


def rounded(name: str, dtype: torch.dtype, tensor: torch.Tensor) -> torch.Tensor:
    """Cast a floating-point tensor to a dtype, rounding each value once. Local operation.

    Raise CheckpointError for a finite value beyond the range of a ``dtype`` with fewer exponents (FP16), which would
    become infinite. Reads the extremes on the host then.
    """
    result = tensor.to(dtype)
    # Conversions to bf16 are not checked: it lacks only the last 0.4 % of the range of fp32.
    is_narrower = torch.finfo(dtype).tiny > torch.finfo(tensor.dtype).tiny
    # The extremes allocate nothing; elements are compared only if one is infinite or NaN.
    if not is_narrower or not result.numel() or all(one.isfinite() for one in result.aminmax()):
        return result
    if bool((result.isinf() & tensor.isfinite()).any()):
        raise CheckpointError(
            f"{name}: values beyond the range of {dtype_name(dtype)}",
            expected=f"at most {torch.finfo(dtype).max:.6g}",
            got=f"{tensor[tensor.isfinite()].abs().max():.6g}",
            why="They would become infinite",
            fix="use a different dtype, such as bfloat16",
        )
    return result


@dataclass
class Choices:
    """Options of a reader for properties that files do not record."""

    #: Key of the model's state dict, with dots for nested keys; ``None``: by usual names
    key: str | None = None
    extra_state: str = "read"  #: ``"read"`` TE's delayed-scaling state, or ``"drop"`` it
    optimizer_class: str | None = None  #: Class of the optimizer if its options do not determine it


def describe(tensor: Lazy | Quantized) -> dict[str, Any]:
    """Return the manifest's description of a parameter of unknown layout, as one in high precision."""
    return {"shape": list(tensor.shape), "dtype": dtype_name(tensor.dtype), "layout": None, "format": None}


def _empty(manifest: Manifest) -> dict[str, Lazy]:
    """Return the tensors without elements. The manifest describes them, and files do not store them."""
    return {
        key: InMemory(torch.empty(shape, dtype=getattr(torch, dtype), device="cpu"))
        for key, shape, dtype in described_tensors(manifest)
        if shape is not None and dtype is not None and not math.prod(shape) and not key.startswith("extra")
    }


def _stack_states(
    tensors: dict[str, Lazy], stacked: str, members: list[str], saved: Mapping[str, Any], shape: list[int]
) -> dict[str, dict[str, Any]]:
    """Stack the optimizer state of the experts ``members``, with weights of one shape; return its description."""
    joined: dict[str, dict[str, Any]] = {}
    for index, name in enumerate(members):
        expert, states = ExpertPlace(index, len(members)), saved.get(name, {})
        join_experts(joined, {k: expert.of_all_experts(d, shape) for k, d in states.items()}, stacked)
    for key, described in joined.items():
        if "dtype" in described:
            # For an expert without the state: one expanded zero.
            zero = torch.zeros((), dtype=getattr(torch, described["dtype"]), device="cpu")
            zeros = InMemory(zero.expand(described["shape"][1:]))
            parts = [tensors.pop(f"optimizer.state.{name}.{key}", zeros) for name in members]
            tensors[f"optimizer.state.{stacked}.{key}"] = Stack(parts)
    return joined


def key_ends(described: Mapping[str, Any]) -> list[str]:
    """Return the key suffix of each stored tensor of a parameter: ``""``, or ``:<component>`` for each component."""
    return [f":{part}" for part in described["components"]] if "components" in described else [""]


def _layers(manifest: Manifest, wanted: Collection[str] | None) -> dict[str, list[str]]:
    """Return the names of the experts' tensors in order, by the name of the stacked tensor."""
    parameters, extras = manifest.parameters, manifest.extra_states
    numbered: dict[str, dict[int, str]] = {}
    for name in parameters:
        if match := _OF_EXPERT.fullmatch(name):
            numbered.setdefault(stacked_name(name), {})[int(match[3])] = name
    layers = {}
    for stacked, by_index in numbered.items():
        # Numbers with gaps are not those of the experts of one layer.
        if sorted(by_index) != list(range(len(by_index))) or stacked in parameters:
            continue
        module, members = stacked.rpartition(".")[0], [by_index[n] for n in range(len(by_index))]
        kinds: list[dict[str, Any]] = [{**parameters[name], "layout": None} for name in members]
        # Only TE's modules have an extra state. A user's own weights with numbers in their names are left.
        is_te = module in extras or parameters[members[0]].get("layout") == GROUPED
        is_layer = is_te if wanted is None else stacked in wanted
        dims = 2 if stacked.endswith("weight") else 1
        if is_layer and len(kinds[0]["shape"]) == dims and all(kind == kinds[0] for kind in kinds):
            layers[stacked] = members
    return layers
