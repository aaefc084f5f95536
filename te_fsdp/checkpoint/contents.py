"""What a file or directory holds, whatever wrote it: a manifest's description, and tensors read by blocks."""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch

import te_fsdp
from te_fsdp.checkpoint.directory import open_checkpoint
from te_fsdp.checkpoint.entries import (
    GROUPED,
    ExpertPlace,
    join_experts,
    of_all_experts,
    per_expert,
    stacked_name,
)
from te_fsdp.checkpoint.index import check_index, stored_tensors
from te_fsdp.checkpoint.lazy import (
    Chunked,
    InMemory,
    Lazy,
    Stack,
    dequantized,
    mapped,
    open_safetensors,
    total_bytes,
)
from te_fsdp.checkpoint.manifest import Manifest, dtype_name, parse_manifest
from te_fsdp.checkpoint.torch_files import tensors_of
from te_fsdp.errors import CheckpointError, message, shorten
from te_fsdp.modules.semantics import NOTHING

CHECKPOINT = "te_fsdp checkpoint"
#: What :attr:`Contents.kind` says of a directory that ``torch.distributed.checkpoint.save`` wrote.
DCP_KIND = "torch.distributed.checkpoint"
#: Where portable files carry a manifest of ours; and what stands before names of tensors that are no weights.
MANIFEST_KEY = "te_fsdp"
_OTHER = "te_fsdp:"
#: A weight of one expert in TE's modules.
_OF_EXPERT = re.compile(r"(|.*\.)(weight|bias)(0|[1-9]\d*)")


@dataclass
class Contents:
    """Contents of a checkpoint of any kind."""

    source: Path
    kind: str  #: What it is, in words
    manifest: Manifest  #: Its ``files`` are empty unless it is a checkpoint of te_fsdp
    tensors: dict[str, Lazy] = field(default_factory=dict)  #: By te_fsdp's keys (``model.<name>``, ...)
    notes: list[str] = field(default_factory=list)  #: What was taken and what was left, in words

    @property
    def names(self) -> list[str]:
        """Names of parameters and buffers."""
        return [*self.manifest.parameters, *self.manifest.buffers]

    @property
    def bytes(self) -> int:
        """Bytes of all tensors."""
        return total_bytes(self.tensors)

    def components(self, name: str) -> dict[str, Lazy] | None:
        """The components of a quantized weight; ``None`` for a high-precision one."""
        described = self.manifest.parameters.get(name, {})
        if described.get("format") is None:
            return None
        return {part: self.tensors[f"model.{name}:{part}"] for part in described["components"]}

    def value(self, name: str) -> Lazy:
        """A weight's or buffer's value; a quantized one dequantized, CheckpointError if its format cannot be."""
        parts = self.components(name)
        if parts is None:
            return self.tensors[f"model.{name}"]
        described = self.manifest.parameters[name]
        shape, dtype = tuple(described["shape"]), getattr(torch, described["dtype"])
        if described["layout"] != GROUPED:
            return dequantized(name, shape, dtype, described["format"], parts)
        experts = [{part: t.select(index) for part, t in parts.items()} for index in range(shape[0])]
        return Stack([dequantized(name, shape[1:], dtype, described["format"], own) for own in experts])

    def best_value(self, name: str, weights: str) -> tuple[Lazy, str]:
        """A parameter's or buffer's value, and where it came from: ``"main"``, ``"dequantized"`` or ``"stored"``.

        With ``weights`` of ``"auto"`` the optimizer's main weight where there is one, of ``"compute"`` never.

        Raises:
            CheckpointError: ``"main"`` for a quantized weight that has none.
        """
        states = (self.manifest.optimizer or {"state": {}})["state"].get(name, {})
        quantized = self.components(name) is not None
        if weights != "compute" and "master_param" in states:
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


def with_remainders(upper: Lazy, lower: Lazy) -> Lazy:
    """fp32 main weights that FusedAdam keeps as bf16 weights (``upper``) and the 16 bits that these lack, as int16.

    TE rounds the weight to nearest: where the remainder, read as a signed number, is negative, the weight is one
    unit in the last place above the upper half (TE 2.20.2 ``multi_tensor_adam.cu``).
    """

    def joined(upper: torch.Tensor, lower: torch.Tensor) -> torch.Tensor:
        lower = lower.to(torch.int32)
        upper = upper.view(torch.int16).to(torch.int32) - (lower < 0).to(torch.int32)
        return ((upper << 16) | (lower & 0xFFFF)).view(torch.float32)

    return mapped(joined, torch.float32, upper, lower)


@dataclass
class Choices:
    """What a reader cannot know."""

    key: str | None = (
        None  #: Where in a nested file the model's state dict is, dots between keys; or by its name
    )
    optimizer_class: str | None = (
        None  #: Of the optimizer whose state dict is there; or told from its options
    )
    extra_state: str = "read"  #: ``"read"`` TE's delayed-scaling state, or ``"drop"`` it
    otherwise_class: str | None = None  #: Of the optimizer where its options do not tell


def empty_manifest() -> Manifest:
    """A manifest of nothing, written now, by one process."""
    versions = {"te_fsdp": te_fsdp.__version__, "torch": torch.__version__}
    return Manifest(versions, {"ranks": 1}, time.time_ns(), {}, {}, {}, None, {}, semantics=dict(NOTHING))


def describe(tensor: Lazy) -> dict[str, Any]:
    """The manifest's entry of a high-precision parameter of unknown layout."""
    return {"shape": list(tensor.shape), "dtype": dtype_name(tensor.dtype), "layout": None, "format": None}


def open_checkpoint_contents(path: Path) -> Contents:
    """A checkpoint of te_fsdp; CheckpointError if it is not whole, damaged, or of two saves. Local operation."""
    manifest = open_checkpoint(path)
    tensors = tensors_of(manifest.at(path), check_index(path, manifest))
    return Contents(path, CHECKPOINT, manifest, tensors | _empty(manifest))


def _empty(manifest: Manifest) -> dict[str, Lazy]:
    """Tensors without elements are described, but stored nowhere."""
    return {
        key: InMemory(torch.empty(shape, dtype=getattr(torch, dtype), device="cpu"))
        for key, shape, dtype in stored_tensors(manifest, empty=True)
        if shape is not None and dtype is not None and key.startswith(("model.", "optimizer."))
    }


def open_safetensors_contents(path: Path) -> Contents:
    """Files of safetensors, ours with everything, or anybody's with weights alone; as :func:`from_portable`. Local."""
    tensors, metadata = open_safetensors(path)
    if MANIFEST_KEY in metadata:
        return from_portable(path, "safetensors", tensors, metadata[MANIFEST_KEY])
    if others := [name for name in tensors if name.startswith(_OTHER)]:
        raise CheckpointError(
            f"{path}: unreadable description by te_fsdp (none, beside {others[0]})",
            fix="the file was changed after te_fsdp wrote it",
        )
    manifest = replace(empty_manifest(), parameters={name: describe(t) for name, t in tensors.items()})
    return Contents(path, "safetensors", manifest, {f"model.{name}": t for name, t in tensors.items()})


def portable_name(key: str) -> str:
    """Name in portable files of a tensor that has a key in ours: weights have their own name."""
    return key.removeprefix("model.") if key.startswith("model.") else f"{_OTHER}{key}"


def portable_text(manifest: Manifest) -> str:
    """A manifest as text for a portable file."""
    # Of a file, not of what it holds.
    return json.dumps({k: v for k, v in asdict(manifest).items() if k not in ("files", "folder")})


def from_portable(path: Path, kind: str, tensors: Mapping[str, Lazy], text: str) -> Contents:
    """Contents of a file with a manifest of ours; CheckpointError if that is unreadable, or lists what is missing."""
    try:
        manifest = parse_manifest(json.loads(text))
    # No text at all, or no object; deep nesting ends the recursion of the parser.
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(message(f"{path}: unreadable description by te_fsdp ({error})")) from error
    keys = {
        name.removeprefix(_OTHER) if name.startswith(_OTHER) else f"model.{name}": tensor
        for name, tensor in tensors.items()
        if name.partition(":")[0] not in manifest.tied
    }
    absent = []
    for key, shape, dtype in stored_tensors(manifest):
        have = None if key not in keys else (*keys[key].shape, dtype_name(keys[key].dtype))
        if have is None or (shape is not None and have != (*shape, dtype)):
            absent.append(key if shape is None else f"{key} as {dtype} {tuple(shape)}")
    if absent:
        raise CheckpointError(
            f"{path}: {len(absent)} tensor(s) of its description are missing: {', '.join(absent[:5])}",
            fix="the file was changed after te_fsdp wrote it",
        )
    return Contents(path, kind, manifest, keys | _empty(manifest))


# ------------------------------------------------------------- experts: a tensor for each, as TE has it, or one for all


def stack_experts(contents: Contents) -> None:
    """Put the weights of each expert (``weight0``, ``weight1``, ...) together, with their optimizer state; changes it.

    A module's tensors are experts' if they are numbered from 0 without gaps, are of one kind, and the module is TE's
    (it has an ``_extra_state``) or has nothing else, in files without such entries.
    """
    manifest, tensors = contents.manifest, contents.tensors
    found = _layers(manifest)
    stacked_of = {name: stacked for stacked, members in found.items() for name in members}
    if not found:
        return
    parameters: dict[str, dict[str, Any]] = {}
    for name, described in manifest.parameters.items():
        stacked = stacked_of.get(name, name)
        if stacked in found and stacked not in parameters:
            members = found[stacked]
            described = {**described, "shape": [len(members), *described["shape"]], "layout": GROUPED}
            for end in _ends(described):
                tensors[f"model.{stacked}{end}"] = Stack([tensors.pop(f"model.{n}{end}") for n in members])
        parameters.setdefault(stacked, described)
    manifest.parameters = parameters
    if manifest.optimizer is not None:
        groups = [
            {**group, "parameters": [*dict.fromkeys(stacked_of.get(n, n) for n in group["parameters"])]}
            for group in manifest.optimizer["groups"]
        ]
        states = _stacked_states(contents, manifest.optimizer["state"], found)
        states = {n: own for n, own in manifest.optimizer["state"].items() if n not in stacked_of} | states
        manifest.optimizer = {**manifest.optimizer, "state": states, "groups": groups}
    layers = {stacked.rpartition(".")[0] for stacked in found}
    contents.notes.append(f"experts: the weights of {len(layers)} layer(s) taken as one tensor each")


def _ends(described: Mapping[str, Any]) -> list[str]:
    """What the keys of a parameter's tensors end with."""
    return [f":{part}" for part in described["components"]] if "components" in described else [""]


def _layers(manifest: Manifest) -> dict[str, list[str]]:
    """By the name of the tensor of all experts: the names of theirs, in order."""
    parameters, extras = manifest.parameters, manifest.extra_states
    numbered: dict[str, dict[int, str]] = {}
    others: set[str] = set()
    for name in parameters:
        if match := _OF_EXPERT.fullmatch(name):
            numbered.setdefault(stacked_name(name), {})[int(match[3])] = name
        else:
            others.add(name.rpartition(".")[0])
    found = {}
    for stacked, by_index in numbered.items():
        if sorted(by_index) != list(range(len(by_index))) or stacked in parameters:
            continue
        module, members = stacked.rpartition(".")[0], [by_index[n] for n in range(len(by_index))]
        kinds: list[dict[str, Any]] = [{**parameters[name], "layout": None} for name in members]
        is_layer = module in extras if extras else module not in others
        is_layer = is_layer or parameters[members[0]].get("layout") == GROUPED
        dims = 2 if stacked.endswith("weight") else 1
        if is_layer and len(kinds[0]["shape"]) == dims and all(kind == kinds[0] for kind in kinds):
            found[stacked] = members
    return found


def _stacked_states(
    contents: Contents, states: Mapping[str, Any], found: Mapping[str, list[str]]
) -> dict[str, dict[str, Any]]:
    """Descriptions of the optimizer state of all experts, whose tensors are put together."""
    tensors, stacked_states = contents.tensors, {}
    for stacked, members in found.items():
        whole = contents.manifest.parameters[stacked]["shape"][1:]
        joined: dict[str, dict[str, Any]] = {}
        for index, name in enumerate(members):
            place, own = ExpertPlace(index, len(members)), states.get(name, {})
            join_experts(joined, {k: of_all_experts(d, place, whole) for k, d in own.items()}, stacked)
        for key, described in joined.items():
            if "dtype" in described:
                # Of an expert that does not have the state: one zero in memory, as often as wanted.
                zero = torch.zeros((), dtype=getattr(torch, described["dtype"]), device="cpu")
                zeros = InMemory(zero.expand(described["shape"][1:]))
                parts = [tensors.pop(f"optimizer.state.{n}.{key}", zeros) for n in members]
                tensors[f"optimizer.state.{stacked}.{key}"] = Stack(parts)
        if joined:
            stacked_states[stacked] = joined
    return stacked_states


def split_experts(contents: Contents) -> Contents:
    """The same contents with tensors for each expert, under TransformerEngine's names. Changes nothing."""
    totals = {n: d["shape"][0] for n, d in contents.manifest.parameters.items() if d.get("layout") == GROUPED}
    if not totals:
        return contents
    manifest = replace(contents.manifest, parameters={})
    split = Contents(contents.source, contents.kind, manifest, dict(contents.tensors), list(contents.notes))
    for name, described in contents.manifest.parameters.items():
        if name not in totals:
            manifest.parameters[name] = described
            continue
        for end in _ends(described):
            whole = split.tensors.pop(f"model.{name}{end}")
            split.tensors |= {f"model.{name}{i}{end}": whole.select(i) for i in range(totals[name])}
        for index in range(totals[name]):
            manifest.parameters[f"{name}{index}"] = {**described, "shape": described["shape"][1:]}
    if manifest.optimizer is not None:
        manifest.optimizer = _split_optimizer(manifest.optimizer, split.tensors, totals)
    return split


def _split_optimizer(
    optimizer: dict[str, Any], tensors: dict[str, Lazy], totals: Mapping[str, int]
) -> dict[str, Any]:
    states: dict[str, dict[str, Any]] = {}
    for name, own in optimizer["state"].items():
        if name not in totals:
            states[name] = own
            continue
        for key, described in own.items():
            whole = tensors.pop(f"optimizer.state.{name}.{key}", None)
            for index in range(totals[name]):
                one = per_expert(described, ExpertPlace(index, totals[name]))
                if one is None:
                    continue
                kept = {k: v for k, v in one.items() if k not in ("at", "experts", "scalar")}
                states.setdefault(f"{name}{index}", {})[key] = kept
                if whole is not None:
                    part = whole if one.get("at") is None else whole.select(index)
                    tensors[f"optimizer.state.{name}{index}.{key}"] = part
    groups = [
        {**group, "parameters": _in_order(group["parameters"], totals)} for group in optimizer["groups"]
    ]
    return {**optimizer, "state": states, "groups": groups}


def _in_order(names: list[str], totals: Mapping[str, int]) -> list[str]:
    """Names of a group with those of each expert, in TE's order: torch's optimizers load their state by position."""
    by_module: dict[str, list[str]] = {}
    for name in filter(totals.__contains__, names):
        by_module.setdefault(name.rpartition(".")[0], []).append(name)
    found: list[str] = []
    for name in names:
        if name not in totals:
            found.append(name)
            continue
        both = sorted(by_module.pop(name.rpartition(".")[0], ()), key=lambda n: n.endswith("bias"))
        found += [f"{n}{index}" for index in range(totals[name]) for n in both]
    return found


def with_other_experts(manifest: Manifest, groups: list[Any], states: Mapping[Any, Any]) -> list[Any]:
    """Groups of a state dict with the experts of all ranks: DCP writes lists of names as rank 0 has them."""
    held = {name for group in groups for name in group["params"]}
    groups = [{**group, "params": list(group["params"])} for group in groups]
    for name in (n for n in manifest.parameters if n in states and n not in held and stacked_name(n) != n):
        homes = [g for g in groups if stacked_name(name) in {stacked_name(str(n)) for n in g["params"]}]
        if len(homes) == 1:
            homes[0]["params"].append(name)
    return groups


# ---------------------------------------------------------------- pieces of a plain directory, as a mesh has cut them


def refuse_scrambled(contents: Contents) -> None:
    """CheckpointError where tensor parallelism has cut a gated fc1, so that rows lie rank by rank; a note of others."""
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
        self._tensors = tensors
        chunked = [tensor for tensor in tensors.values() if isinstance(tensor, Chunked)]
        self._columns = any(any(offsets[1:]) for tensor in chunked for offsets, _ in tensor.chunks)
        self._norms: dict[str, list[tuple[int, float]]] = {}
        for key, tensor in tensors.items():
            is_norm = key.endswith((".weight", ".layer_norm_weight")) and len(tensor.shape) == 1
            # Pieces of one row are those of any greater number of shards.
            if is_norm and (shards := _shards(tensor)) and 0 < shards[1] < math.inf:
                for unit in _units(key):
                    self._norms.setdefault(unit, []).append(shards)

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
    return [*accumulate(key.split(".")[:-1], "{}.{}".format)][::-1]


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
