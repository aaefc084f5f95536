"""Comparison of a checkpoint with the job that loads it.

Everything is compared before anything is changed. The files contain the unsplit model of a pipeline, independent of the
stages: a save joins the fields of each stage, and a load removes the other stages' tensors from the manifest. Tensors
of no stage stay, and are a difference on all stages.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from itertools import chain
from typing import Any

import torch
from torch import nn

from te_fsdp.checkpoint.load_source import Source
from te_fsdp.checkpoint.manifest import Manifest
from te_fsdp.checkpoint.model_state import (
    ModelState,
    Stage,
    delayed_modules,
    meshes_of,
    modules_of,
    of_all_gemms,
    owned_buffers,
    owned_parameters,
    stage_of,
    tied_names,
)
from te_fsdp.checkpoint.plain_dcp import cut_by_tp, has_original_order
from te_fsdp.checkpoint.reader import DCP_KIND
from te_fsdp.checkpoint.tensor_entries import GROUPED, refuse_equal_names
from te_fsdp.collectives.agreement import all_agree, gather, gather_if_any, rank, world_size
from te_fsdp.errors import CheckpointError, shorten
from te_fsdp.modules.semantics import (
    Difference,
    differences,
    distinguishing_settings,
    format_differences,
    from_json,
    semantics_of,
    to_json,
    user_differences,
    user_settings,
)
from te_fsdp.upstream import te as _te, te_modules as _te_modules

#: Name in ``Differences.settings`` of all settings, if a checkpoint has none.
SETTINGS = "settings"
#: Names in ``Differences.optimizer`` of the entire optimizer, and of its groups' options and membership.
WHOLE_OPTIMIZER, GROUPS = "optimizer", "optimizer.param_groups"


@dataclass
class Differences:
    """Differences between a checkpoint and a model with its optimizer, and tensors that need a conversion."""

    #: Kind of difference, tensor or module -> detail (may be empty).
    tensors: dict[tuple[str, str], str] = field(default_factory=dict)
    #: Text, and the parameter, :data:`WHOLE_OPTIMIZER` or :data:`GROUPS`; without details.
    optimizer: dict[tuple[str, str], None] = field(default_factory=dict)
    #: Tensor -> how it is converted, for example ``"float32 -> mxfp8 kFloat8E4M3"``.
    converted: dict[str, str] = field(default_factory=dict)
    #: Settings of modules by name (``<module>.<setting>``), including harmless ones.
    settings: dict[str, Difference] = field(default_factory=dict)

    def add_optimizer(self, text: str, name: str = WHOLE_OPTIMIZER, label: str = "") -> None:
        """Add a difference of one parameter's optimizer state, of :data:`GROUPS`, or of the entire optimizer."""
        self.optimizer[label + text, name] = None

    def names(self) -> set[str]:
        """Return the names of the tensors that differ."""
        return {name for _, name in self.tensors}

    def without(self, allow: str | Iterable[str], *, strict: bool) -> Differences:
        """Return differences that ``allow`` does not name; if not ``strict``, only settings of effect ``"error"``."""
        patterns = [allow] if isinstance(allow, str) else list(allow)

        def is_open(*names: str, always: bool = False) -> bool:
            is_allowed = any(fnmatchcase(name, pattern) for name in names for pattern in patterns)
            return (strict or always) and not is_allowed

        result = Differences({tensor: text for tensor, text in self.tensors.items() if is_open(tensor[1])})
        for name, setting in self.settings.items():
            # With a dot in front too, so that "*.eps" names the setting of a root module.
            if setting.effect != "note" and is_open(name, f".{name}", always=setting.effect == "error"):
                result.settings[name] = setting
        for text, name in self.optimizer:
            if is_open(name, f"optimizer.state.{name}", WHOLE_OPTIMIZER):
                result.add_optimizer(text, name)
        return result

    def over_all_ranks(self, *, convert: bool) -> Differences:
        """Return the union of all ranks. Without ``convert`` conversions are differences. Collective over the world."""
        union = Differences()
        # A list, because an object with only allowed differences is false.
        own = [self] if any(vars(self).values()) else []
        for other in chain.from_iterable(gather_if_any(own)):
            for name, items in vars(other).items():
                getattr(union, name).update(items)
        if not convert:
            union.tensors |= {("that would be converted", n): text for n, text in union.converted.items()}
            union.converted = {}
        return union

    def left(self) -> dict[str, str]:
        """Return the reason of every difference, by name of the tensor, setting or optimizer state."""
        reasons = {name: [str(s)] for name, s in self.settings.items() if s.effect != "note"}
        for (kind, name), detail in self.tensors.items():
            reasons.setdefault(name, []).append(f"{kind}: {detail}" if detail else kind)
        for text, name in self.optimizer:
            key = name if name in (WHOLE_OPTIMIZER, GROUPS) else f"optimizer.state.{name}"
            reasons.setdefault(key, []).append(text)
        return {name: "; ".join(texts) for name, texts in sorted(reasons.items())}

    def texts(self) -> list[str]:
        """Return one text per kind, with the number of tensors and the first few names."""
        kinds: dict[str, list[str]] = {}
        for (kind, name), detail in self.tensors.items():
            kinds.setdefault(kind, []).append(f"{name}: {detail}" if detail else name)
        lines = [f"{len(tensors)} {kind} ({shorten(tensors, 3)})" for kind, tensors in kinds.items()]
        for text in dict.fromkeys(text for text, _ in self.optimizer):
            names = {name for other, name in self.optimizer if other == text} - {WHOLE_OPTIMIZER, GROUPS}
            lines.append(f"{text} ({shorten(sorted(names))})" if names else text)
        return lines + format_differences(s for s in self.settings.values() if s.effect != "note")

    def refuse(self, source: Source) -> None:
        """Raise CheckpointError if there are differences. Local operation, after :meth:`over_all_ranks`."""
        if not self:
            return
        mesh = ", ".join(f"{axis}={size}" for axis, size in source.manifest.mesh.items())
        origin = f"saved on {mesh} by te_fsdp {source.manifest.versions.get('te_fsdp')}"
        if SETTINGS in self.settings:
            fix = f'load(..., allow=["{SETTINGS}"]) if the modules were built with these settings'
        else:
            fix = "build model and optimizer as they were saved, name deliberate differences in load(..., allow=[...])"
        if all(setting.effect == "strict" for setting in self.settings.values()):
            fix += ", or load(..., strict=False) to load the parts that fit"
        raise CheckpointError(
            f"{source.source} does not fit: {'; '.join(self.texts())}",
            why=f"Nothing was loaded ({'; '.join(source.notes) or origin})",
            fix=fix,
        )

    def __bool__(self) -> bool:
        return bool(self.tensors or self.optimizer or self.settings)


def compare(source: Source, model: nn.Module, state: ModelState) -> Differences:
    """Compare a checkpoint with a model: tensors, ties, settings of modules and FP8 recipes. Local operation.

    ``state`` is the model's. The ``source`` is changed: current or unknown scaling becomes the model's. If
    te_fsdp did not write it, its ``notes`` then name stacked weights whose row order is not certain.
    """
    manifest = source.manifest
    # TE's float8 tensors do not record the origin of their scales in plain files, nor in what is converted from them.
    # Files that versions until 0.3 converted have "current" instead.
    for name, saved in manifest.parameters.items():
        model_format = state.described.get(name, {}).get("format") or "none none"
        kind, *scaling, element = model_format.split()
        if scaling and saved["format"] in (f"{kind} {element}", f"{kind} current {element}"):
            saved["format"] = model_format
    result = compare_model(manifest, state)
    if source.kind == DCP_KIND:
        compare_stacked(result, source, state.described)
    for name, first in tied_names(model).items():
        if (saved_first := manifest.tied.get(name, first)) != first:
            result.settings[f"{name}.tied"] = Difference(f"{name}.tied", saved_first, first, "error")
    result.settings |= {d.name: d for d in _compare_settings(manifest, model, state)}
    # A module has a recipe once it has run under it. Margin and history may change in training. The
    # number of GEMMs and the FP8 formats may not.
    modules, live = modules_of(model), delayed_modules(model)
    for name, saved in manifest.delayed.items():
        module = modules.get(name)
        if module is None or not _te_modules.has_recipe_state(module):
            result.tensors["with delayed-scaling state for a module that the model lacks", name] = ""
            continue
        current = of_all_gemms(module, _te_modules.describe_delayed_recipe(module) if name in live else saved)
        for key in ("num_gemms", "fp8_format"):
            if saved[key] != current[key]:
                detail = f"{key}: {_saved_and_current(saved[key], current[key])}"
                result.tensors["with a different recipe", name] = detail
    return result


def _compare_settings(manifest: Manifest, model: nn.Module, state: ModelState) -> list[Difference]:
    """Return the differences between the saved settings of modules and the model's. Local operation."""
    recorded, current, result = manifest.semantics, semantics_of(model), list[Difference]()
    # Attributes of a user's module may have a value for each rank. The saved ones are rank 0's.
    if recorded and rank() == 0:
        result += user_differences(from_json(recorded, user_defined=True), user_settings(model))
    saved = from_json(recorded) if recorded else {}
    if saved:
        # A difference of a module whose tensors one side lacks is reported with these tensors.
        unmatched = {*manifest.parameters, *manifest.buffers} ^ {*state.described, *state.buffers}
        result += differences(saved, current, unmatched)
        recipes = (recorded or {}).get("recipes"), _te.recipes_in_use(model)
        if all(recipes) and recipes[0] != recipes[1]:
            result.append(Difference("recipes", *recipes, "note"))
    elif settings := distinguishing_settings(current):
        # An older te_fsdp could have recorded TE's settings, and did not; in files of other kinds they never are.
        of_te = {name: semantics for name, semantics in current.items() if semantics.library == "te"}
        is_older = not recorded and distinguishing_settings(of_te)
        result.append(Difference(SETTINGS, "none", settings, "strict" if is_older else "note"))
    return result


def compare_model(manifest: Manifest, state: ModelState) -> Differences:
    """Return the differences in parameters and buffers. Local operation."""
    result = Differences()
    all_saved = {**manifest.parameters, **manifest.buffers}
    all_current: dict[str, dict[str, Any]] = {**state.described, **state.buffers}
    for name in sorted(all_current.keys() - all_saved.keys()):
        result.tensors["missing in the checkpoint", name] = ""
    for name in sorted(all_saved.keys() - all_current.keys()):
        result.tensors["only in the checkpoint", name] = ""
    for name in sorted(all_current.keys() & all_saved.keys()):
        pair = saved, current = all_saved[name], all_current[name]
        layouts = saved.get("layout"), current.get("layout")
        formats = saved.get("format"), current.get("format")
        kinds = formats[0] or saved["dtype"], formats[1] or current["dtype"]
        # Components that only the checkpoint has, such as transposes, are not read.
        lacking = set(current.get("components", ())) - set(saved.get("components", ()))
        if saved["shape"] != current["shape"]:
            experts = [d["shape"][:1] if d.get("layout") == GROUPED else [] for d in pair]
            texts = [f" of {count[0]} experts" if count else "" for count in experts]
            shapes = [f"{tuple(d['shape'])}{text}" for d, text in zip(pair, texts, strict=True)]
            result.tensors["with a different shape", name] = _saved_and_current(*shapes)
        # Converted files and foreign modules may not record their layouts.
        elif layouts[0] != layouts[1] and None not in layouts:
            result.tensors["with a different layout", name] = _saved_and_current(*layouts)
        # Integers and bools are not rounded or quantized: a difference that no conversion removes.
        elif kinds[0] != kinds[1] and not all(
            d.get("format") or getattr(torch, d["dtype"]).is_floating_point for d in pair
        ):
            property_name, values = ("dtype", kinds) if formats == (None, None) else ("format", formats)
            result.tensors[f"with a different {property_name}", name] = _saved_and_current(*values)
        elif kinds[0] != kinds[1]:
            result.converted[name] = f"{kinds[0]} -> {kinds[1]}"
        elif lacking:
            result.converted[name] = f"{kinds[0]} -> {kinds[1]} ({', '.join(sorted(lacking))} not saved)"
        elif name in state.cut_blocks:
            result.converted[name] = f"{kinds[0]} -> {kinds[1]} (this mesh cuts through blocks)"
    return result


def _saved_and_current(saved: Any, current: Any) -> str:
    return f"saved {saved or 'high precision'}, model has {current or 'high precision'}"


def compare_stacked(differences: Differences, source: Source, described: dict[str, dict[str, Any]]) -> None:
    """Check the row order of stacked weights in a plain directory. Local operation.

    At tp=1 it is that of the unsharded module. In a directory of tensor parallelism it is not, which is a difference.
    If the directory does not show its mesh, a note asks the user.
    """
    cut, unconfirmed = cut_by_tp(source.tensors), []
    for name, description in described.items():
        if not str(description["layout"]).startswith("stacked") or f"model.{name}" not in source.tensors:
            continue
        # Without te_fsdp's manifest only TE's extra state, or pieces of columns, show the order of the rows.
        if f"model.{name}" in cut:
            differences.tensors["with rows in a different order (tensor parallelism)", name] = ""
        elif name.rpartition(".")[0] not in source.manifest.extra_states:
            unconfirmed.append(name)
    if unconfirmed and not has_original_order(source.tensors):
        source.notes.append(
            f"{len(unconfirmed)} fused or gated weight(s) taken with the rows of the unsharded module "
            f"({shorten(unconfirmed, 3)}), "
            "although the directory does not record their order. If they were saved with tensor parallelism, their "
            "rows are scrambled: load it on the mesh that saved it, and save it with te_fsdp.checkpoint.save"
        )


# --- ranks and stages


def check_spans_world(model: nn.Module, stage: Stage | None) -> None:
    """Raise CheckpointError if the model's mesh does not cover the world and it is not a pipeline stage."""
    for ranks in (meshes.device_mesh.size() for meshes in meshes_of(model)):
        if stage is None and ranks != world_size():
            raise CheckpointError(
                f"checkpoint of {type(model).__name__}, a model on {ranks} of {world_size()} ranks",
                expected="one model on all ranks",
                got="the mesh of one stage: a slice of a mesh with a further axis",
                why="Stages are different models, and a checkpoint of te_fsdp contains one",
                fix="use plain torch.distributed.checkpoint with get_state_dict and names that differ between stages; "
                'for stages of one model, use Meshes.build(pp=...) or from_device_mesh(mesh, pp=full_mesh["pp"])',
            )


#: Name of the digest that has the numbers of steps and backwards in plain text.
PROGRESS = "progress"


def check_same_model(digests: list[dict[str, Any]], stages: list[int | None]) -> None:
    """Check that all ranks of a stage describe the same model and optimizer, and all ranks one path.

    Rank 0 alone calls this; raise CheckpointError otherwise.
    """
    # Taken out first: all ranks have one path, while the other digests are compared within a stage.
    paths = [seen.pop("path") for seen in digests]
    if differing := [f"{path} on rank {r}" for r, path in enumerate(paths) if path != paths[0]]:
        raise CheckpointError(
            "save: the ranks passed different paths",
            expected="one path",
            got=f"{paths[0]} on rank 0, {differing[0]}",
            why="A checkpoint contains the parts of all ranks",
            fix="pass the same path on all ranks, without the rank's number",
        )
    # Stages have different models. Each rank is compared with the first rank of its stage.
    first = {stage: stages.index(stage) for stage in set(stages)}
    for name in digests[0]:
        others = [r for r, seen in enumerate(digests) if seen[name] != digests[first[stages[r]]][name]]
        if others:
            references = sorted({first[stages[r]] for r in others})
            if name == PROGRESS:
                raise CheckpointError(
                    "save: the ranks are in different steps",
                    expected="the same numbers of steps and backwards on all ranks",
                    got="; ".join(f"{digests[r][name]} on rank {r}" for r in [*references, *others][:8]),
                    why="The shards of a weight have different updates",
                    fix="restart from an earlier checkpoint, and skip a step on all ranks or none",
                )
            raise CheckpointError(
                f"save: {name} of the model",
                expected="the same names, shapes, formats and options on all ranks",
                got=f"rank(s) {', '.join(map(str, others))} differ from rank {', '.join(map(str, references))}",
                fix="build the same model and optimizer on all ranks",
            )


def join(
    seen: list[tuple[int, dict[str, Any] | None] | None], shared: Iterable[str]
) -> dict[str, Any] | None:
    """Return the manifest's fields of the unsplit model, ``None`` without stages. Rank 0 alone calls this.

    ``seen`` has each rank's stage number, and the stage's fields from one rank of each stage. ``shared`` are
    patterns of names that several stages may have. Raise CheckpointError for stages that do not fit together.
    """
    absent = [str(r) for r, stage in enumerate(seen) if stage is None]
    if len(absent) == len(seen):
        return None
    if absent:
        raise CheckpointError(
            f"save: rank(s) {shorten(absent)} have no pipeline stage, but other ranks have one",
            expected="a stage that te_fsdp.fully_shard was called on, on every rank",
            fix="shard every stage",
        )
    by_stage = {number: part for number, part in filter(None, seen) if part is not None}
    fields = [by_stage[number] for number in sorted(by_stage)]
    # Fields keyed by names of tensors or modules, which differ between stages.
    united = ("parameters", "buffers", "delayed", "tied")
    joined: dict[str, Any] = {name: _union([part[name] for part in fields], name) for name in united}
    refuse_equal_names(chain(*(part["parameters"] for part in fields)), shared, "several stages")
    joined["extra_states"] = list(dict.fromkeys(n for part in fields for n in part["extra_states"]))
    recorded = [part["semantics"] for part in fields]
    modules = _union([from_json(part) for part in recorded], "settings of modules")
    for part in reversed(recorded):  # a user's modules may differ between stages: the first stage's are kept
        modules |= from_json(part, user_defined=True)
    recipes = dict.fromkeys(recipe for part in recorded for recipe in part["recipes"])
    joined["semantics"] = {"recipes": list(recipes), **to_json(modules)}
    joined["optimizer"] = _join_optimizers([part["optimizer"] for part in fields])
    return joined


def _union(parts: list[dict[str, Any]], label: str) -> dict[str, Any]:
    """Return the items of all stages; raise CheckpointError for a name whose values differ between stages."""
    union: dict[str, Any] = {}
    for stage, part in enumerate(parts):
        for name, value in part.items():
            if union.setdefault(name, value) != value:
                shown = [union[name], value]
                if isinstance(value, dict):
                    shown = [", ".join(f"{key} {item}" for key, item in d.items()) for d in shown]
                raise CheckpointError(
                    f"save: {label}: {name} in stage {stage}",
                    expected=f"as in an earlier stage, {shown[0]}",
                    got=shown[1],
                    why="The files store one tensor per name",
                    fix="register each layer under the name that it has in the unsplit model; build parameters that "
                    "several stages share equally, and name them in save(..., shared=[...])",
                )
    return union


def _join_optimizers(parts: list[dict[str, Any] | None]) -> dict[str, Any] | None:
    """Return one optimizer with the parameters of all stages, whose groups must have equal options."""
    first, *others = parts
    kinds = [
        None if p is None else (p["class"], [(g["options"], g.get("optimizer")) for g in p["groups"]])
        for p in parts
    ]
    for number, kind in enumerate(kinds):
        if kind != kinds[0]:
            formatted = ["none" if k is None else f"{k[0]} with groups {k[1]}" for k in (kinds[0], kind)]
            raise CheckpointError(
                f"save: the optimizer of stage {number}",
                expected=f"as in stage 0, {formatted[0]:.300}",
                got=f"{formatted[1]:.300}",
                why="The files contain one optimizer of the unsplit model",
                fix="give the optimizers of all stages the same groups in the same order, and options; a group that "
                "a stage has no parameters for may be empty",
            )
    if first is None:
        return None
    groups = [dict(group) for group in first["groups"]]
    for part in filter(None, others):
        for group, additional in zip(groups, part["groups"], strict=True):
            group["parameters"] = list(dict.fromkeys([*group["parameters"], *additional["parameters"]]))
    states = _union([part["state"] for part in parts if part is not None], "optimizer state")
    return {"class": first["class"], "groups": groups, "state": states}


def take_own_part(source: Source, model: nn.Module) -> None:
    """Remove other stages' tensors from a source's manifest. Collective over the world for a pipeline, else local."""
    stage = stage_of(model)
    if stage is None:
        return

    owned, manifest = all_agree(lambda: [*owned_parameters(model), *owned_buffers(model)]), source.manifest
    # Modules' names as well: in the unsplit model no tensor has the name of a module.
    own = {tensor.key for tensor in owned} | modules_of(model).keys()
    # A tensor that no stage has stays in the manifest, and is a difference on all stages.
    elsewhere = set().union(*gather(own, stage.across)) - own

    tables = [manifest.parameters, manifest.buffers, manifest.delayed]
    if manifest.optimizer is not None:
        tables.append(manifest.optimizer["state"])
        for group in manifest.optimizer["groups"]:
            group["parameters"] = [name for name in group["parameters"] if name not in elsewhere]
    if manifest.semantics:
        tables.append(manifest.semantics["modules"])
    for table in tables:
        for name in table.keys() & elsewhere:
            del table[name]
