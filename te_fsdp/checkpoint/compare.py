"""Comparison of a checkpoint with the job that loads it.

Everything is compared before anything is changed. The files contain the unsplit model of a pipeline, independent of the
stages: a save joins the fields of each stage, and a load removes the other stages' tensors from the manifest. Tensors
of no stage stay, and are a difference on all stages.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch

from te_fsdp.checkpoint.manifest import Manifest
from te_fsdp.checkpoint.model_state import (
    ModelState,
    Stage,
    delayed_modules,
    meshes_of,
    modules_of,
    of_all_gemms,
    owned_parameters,
    owned_tensors,
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

if TYPE_CHECKING:
    from torch import nn

    from te_fsdp.checkpoint.load_source import Source

#: Name in ``Differences.settings`` of all settings, where a checkpoint has none.
SETTINGS = "settings"
#: Names in ``Differences.optimizer`` of the entire optimizer, and of its groups' options and membership.
WHOLE_OPTIMIZER, GROUPS = "optimizer", "optimizer.param_groups"


@dataclass
class Differences:
    """Differences, and tensors that fit after a conversion."""

    #: Kind of difference, tensor or module -> detail (may be empty).
    tensors: dict[tuple[str, str], str] = field(default_factory=dict)
    #: Text, and the parameter, :data:`WHOLE_OPTIMIZER` or :data:`GROUPS`; without details.
    optimizer: dict[tuple[str, str], None] = field(default_factory=dict)
    #: Tensor -> how it is converted, for example ``"float32 -> mxfp8 kFloat8E4M3"``.
    converted: dict[str, str] = field(default_factory=dict)
    #: Settings of modules by name (``<module>.<setting>``), including harmless ones.
    settings: dict[str, Difference] = field(default_factory=dict)

    def names(self) -> set[str]:
        """Return the tensors that differ."""
        return {name for _, name in self.tensors}

    def without(self, allow: str | Iterable[str], *, strict: bool) -> Differences:
        """Return the differences that ``allow`` does not name.

        Without ``strict`` only settings that change the function.
        """
        patterns = [allow] if isinstance(allow, str) else list(allow)

        def is_open(*names: str, always: bool = False) -> bool:
            known = any(fnmatchcase(name, pattern) for name in names for pattern in patterns)
            return (strict or always) and not known

        left = Differences()
        for name, setting in self.settings.items():
            # With a dot in front too, so that "*.eps" names the setting of a root module.
            if setting.effect != "note" and is_open(name, f".{name}", always=setting.effect == "error"):
                left.settings[name] = setting
        left.tensors = {of: detail for of, detail in self.tensors.items() if is_open(of[1])}
        for text, name in self.optimizer:
            if is_open(name, f"optimizer.state.{name}", WHOLE_OPTIMIZER):
                left.optimizer[text, name] = None
        return left

    def over_all_ranks(self, *, convert: bool) -> Differences:
        """Return the union over ranks, identical on all ranks. Collective over the world.

        Without ``convert``, conversions become differences.
        """
        union = Differences()
        # A list, because an object with only allowed differences is false.
        held = [self] if any(vars(self).values()) else []
        for other in chain.from_iterable(gather_if_any(held)):
            for name, found in vars(other).items():
                getattr(union, name).update(found)
        if not convert:
            union.tensors.update({("that would be converted", n): how for n, how in union.converted.items()})
            union.converted = {}
        return union

    def left(self) -> dict[str, str]:
        """Return every difference by name, with the reason as text."""
        reasons = {name: [str(one)] for name, one in self.settings.items() if one.effect != "note"}
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
        lines = [f"{len(shown)} {kind} ({shorten(shown, 3)})" for kind, shown in kinds.items()]
        for text in dict.fromkeys(text for text, _ in self.optimizer):
            names = [n for one, n in self.optimizer if one == text and n not in (WHOLE_OPTIMIZER, GROUPS)]
            lines.append(f"{text} ({shorten(sorted(names))})" if names else text)
        return lines + format_differences(one for one in self.settings.values() if one.effect != "note")

    def __bool__(self) -> bool:
        return bool(self.tensors or self.optimizer or self.settings)


def compare(source: Source, model: nn.Module, state: ModelState) -> Differences:
    """Return the differences between a checkpoint and a model, whose ``state`` is given. Local operation."""
    manifest = source.manifest
    # Lazy tensors are those of plain and converted files. TE's float8 tensors do not record the origin of their
    # scales there, so a weight without state has the scaling of the model.
    for name, then in manifest.parameters.items() if source.index is None else ():
        now = state.described.get(name, {}).get("format") or ""
        if then["format"] and then["format"].replace(" current ", " delayed ") == now:
            then["format"] = now
    found = compare_model(manifest, state)
    if source.kind == DCP_KIND:
        compare_stacked(found, source, state.described)
    for name, first in tied_names(model).items():
        if (then := manifest.tied.get(name, first)) != first:
            found.settings[f"{name}.tied"] = Difference(f"{name}.tied", then, first, "error")
    here, recorded, seen = semantics_of(model), manifest.semantics, list[Difference]()
    known = from_json(recorded) if recorded else {}
    # Attributes of a user's module may have a value for each rank. The saved ones are rank 0's.
    if recorded and rank() == 0:
        seen += user_differences(from_json(recorded, user_defined=True), user_settings(model))
    if known:
        # A difference of a module whose tensors one side lacks is reported with these tensors.
        alone = {*manifest.parameters, *manifest.buffers} ^ {*state.described, *state.buffers}
        seen += differences(known, here, alone)
        recipes = (recorded or {}).get("recipes"), _te.recipes_in_use(model)
        if all(recipes) and recipes[0] != recipes[1]:
            seen.append(Difference("recipes", *recipes, "note"))
    elif values := distinguishing_settings(here):
        # An older te_fsdp could have recorded TE's settings, and did not; in files of other kinds they never are.
        is_older = not recorded and distinguishing_settings(
            {name: one for name, one in here.items() if one.library == "te"}
        )
        seen.append(Difference(SETTINGS, "none", values, "strict" if is_older else "note"))
    found.settings |= {one.name: one for one in seen}
    # A module has a recipe once it has run under it. Margin and history may change in training. The
    # number of GEMMs and the FP8 formats may not.
    modules, live = modules_of(model), delayed_modules(model)
    for name, saved in manifest.delayed.items():
        if not _te_modules.has_recipe_state(modules.get(name)):
            found.tensors["with delayed-scaling state for a module that the model lacks", name] = ""
            continue
        module = modules[name]
        live_recipe = of_all_gemms(
            module, _te_modules.describe_delayed_recipe(module) if name in live else saved
        )
        for key in ("num_gemms", "fp8_format"):
            if saved[key] != live_recipe[key]:
                shown = _saved_and_here(saved[key], live_recipe[key])
                found.tensors["with another recipe", name] = f"{key}: {shown}"
    return found


def compare_model(manifest: Manifest, state: ModelState) -> Differences:
    """Return the differences in parameters and buffers. Local operation."""
    found = Differences()
    saved = {**manifest.parameters, **manifest.buffers}
    here: dict[str, dict[str, Any]] = {**state.described, **state.buffers}
    for name in sorted(here.keys() - saved.keys()):
        found.tensors["missing in the checkpoint", name] = ""
    for name in sorted(saved.keys() - here.keys()):
        found.tensors["only in the checkpoint", name] = ""
    for name in sorted(here.keys() & saved.keys()):
        then, now = saved[name], here[name]
        # Converted files and foreign modules may not know their layouts.
        layouts = then.get("layout"), now.get("layout")
        if then["shape"] != now["shape"]:
            shapes = [str(tuple(one["shape"])) for one in (then, now)]
            for index, one in enumerate((then, now)):
                if one.get("layout") == GROUPED and one["shape"]:
                    shapes[index] += f" of {one['shape'][0]} experts"
            found.tensors["with another shape", name] = _saved_and_here(*shapes)
        elif layouts[0] != layouts[1] and None not in layouts:
            found.tensors["with another layout", name] = _saved_and_here(*layouts)
        else:
            formats = then.get("format"), now.get("format")
            kinds = [one.get("format") or one["dtype"] for one in (then, now)]
            # Components that only the checkpoint has, such as transposes, are not read.
            lacks = set(now.get("components", ())) - set(then.get("components", ()))
            if kinds[0] == kinds[1] and not lacks and name not in state.cut_blocks:
                continue
            plain = [one["dtype"] for one in (then, now) if one.get("format") is None]
            # Integers and bools are not rounded or quantized: a difference that no conversion removes.
            if not all(getattr(torch, dtype).is_floating_point for dtype in plain):
                what, both = ("dtype", kinds) if formats == (None, None) else ("format", formats)
                found.tensors[f"with another {what}", name] = _saved_and_here(*both)
                continue
            why = ""
            if formats[0] is not None and formats[0] == formats[1]:
                cause = f"{', '.join(sorted(lacks))} not saved" if lacks else "this mesh cuts through blocks"
                why = f" ({cause})"
            found.converted[name] = f"{kinds[0]} -> {kinds[1]}{why}"
    return found


def _saved_and_here(old: Any, new: Any) -> str:
    return f"saved {old or 'high precision'}, model has {new or 'high precision'}"


def compare_stacked(found: Differences, source: Source, described: dict[str, dict[str, Any]]) -> None:
    """Check the row order of stacked weights in a plain directory. Local operation.

    At tp=1 it is that of the unsharded module. In a directory of tensor parallelism it is not, which is a difference.
    If the directory does not show its mesh, a note asks the user.
    """
    cut, unconfirmed = cut_by_tp(source.tensors), []
    for name, now in described.items():
        if not str(now["layout"]).startswith("stacked") or f"model.{name}" not in source.tensors:
            continue
        # Without te_fsdp's manifest only TE's extra state, or pieces of columns, show the order of the rows.
        if f"model.{name}" in cut:
            found.tensors["whose rows tensor parallelism has put in another order", name] = ""
        elif name.rpartition(".")[0] not in source.manifest.extra_states:
            unconfirmed.append(name)
    if unconfirmed and not has_original_order(source.tensors):
        source.notes.append(
            f"{len(unconfirmed)} fused or gated weight(s) taken with the rows of the unsharded module "
            f"({shorten(unconfirmed, 3)}), "
            "which nothing in the directory confirms: were they saved with tensor parallelism? Then these rows are "
            "scrambled; load it on the mesh that saved it, and save it with te_fsdp.checkpoint.save"
        )


# --- ranks and stages


def check_whole_job(model: nn.Module, stage: Stage | None) -> None:
    """Raise CheckpointError for a separate model on some ranks."""
    for ranks in (meshes.device_mesh.size() for meshes in meshes_of(model)):
        if stage is None and ranks != world_size():
            raise CheckpointError(
                f"checkpoint of {type(model).__name__}, a model on {ranks} of {world_size()} ranks",
                expected="one model on all ranks",
                got="meshes of one stage, cut out of a mesh with a further axis",
                why="Stages are different models, and a checkpoint of te_fsdp holds one",
                fix="plain torch.distributed.checkpoint with get_state_dict, and names that differ between stages; "
                'for stages of one model, Meshes.build(pp=...) or from_device_mesh(mesh, pp=whole["pp"])',
            )


def check_same_model(digests: list[dict[str, bytes]], stages: list[int | None]) -> None:
    """Check that all ranks of a stage describe the same model and optimizer, and all ranks one path.

    Rank 0 alone calls this; raise CheckpointError otherwise.
    """
    # Taken out first: all ranks have one path, while the other digests are compared within a stage.
    paths = [os.fsdecode(seen.pop("path")) for seen in digests]
    for path in paths:
        if path != paths[0]:
            raise CheckpointError(
                "save: the ranks were given different paths",
                expected="one path",
                got=f"{paths[0]} on rank 0, {path} on rank {paths.index(path)}",
                why="A checkpoint holds the parts of all ranks",
                fix="pass the same path on all ranks, without the rank's number",
            )
    # Stages have different models. Each rank is compared with the first rank of its stage.
    first = {stage: stages.index(stage) for stage in set(stages)}
    for name in digests[0]:
        others = [r for r, seen in enumerate(digests) if seen[name] != digests[first[stages[r]]][name]]
        if others:
            to = sorted({first[stages[r]] for r in others})
            raise CheckpointError(
                f"save: {name} of the model",
                expected="the same names, shapes, formats and options on all ranks",
                got=f"rank(s) {', '.join(map(str, others))} differ from rank {', '.join(map(str, to))}",
                fix="build the same model and optimizer on all ranks",
            )


def join(
    seen: list[tuple[int, dict[str, Any] | None] | None], shared: Iterable[str]
) -> dict[str, Any] | None:
    """Return the manifest's fields of the unsplit model, ``None`` without stages. Rank 0 alone calls this.

    ``seen`` has each rank's stage number, and the stage's fields from one rank of each stage. ``shared`` are patterns
    of names that several stages may have. Raise CheckpointError for stages that do not fit together.
    """
    absent = [str(r) for r, one in enumerate(seen) if one is None]
    if len(absent) == len(seen):
        return None
    if absent:
        raise CheckpointError(
            f"save: rank(s) {shorten(absent)} hold no stage of a pipeline, as the others do",
            expected="a stage that te_fsdp.fully_shard was called on, on every rank",
            fix="shard every stage",
        )
    by_stage = {number: part for number, part in filter(None, seen) if part is not None}
    fields = [by_stage[number] for number in sorted(by_stage)]
    # Fields whose names are those of tensors or modules, of which each stage has its own.
    united = ("parameters", "buffers", "delayed", "tied")
    joined: dict[str, Any] = {name: _union([part[name] for part in fields], name) for name in united}
    refuse_equal_names(chain(*(part["parameters"] for part in fields)), shared, "several stages")
    joined["extra_states"] = list(dict.fromkeys(n for part in fields for n in part["extra_states"]))
    recorded = [part["semantics"] for part in fields]
    modules = _union([from_json(part) for part in recorded], "settings of modules")
    for part in reversed(recorded):  # a user's modules may differ, as a stage's number: the first one tells
        modules |= from_json(part, user_defined=True)
    recipes = dict.fromkeys(recipe for part in recorded for recipe in part["recipes"])
    joined["semantics"] = {"recipes": list(recipes), **to_json(modules)}
    joined["optimizer"] = _join_optimizers([part["optimizer"] for part in fields])
    return joined


def _union(parts: list[dict[str, Any]], what: str) -> dict[str, Any]:
    """Return all entries; raise CheckpointError for a name with different entries in several stages."""
    union: dict[str, Any] = {}
    for number, part in enumerate(parts):
        for name, described in part.items():
            if union.setdefault(name, described) != described:
                shown = [union[name], described]
                if isinstance(described, dict):
                    shown = [", ".join(f"{key} {value}" for key, value in one.items()) for one in shown]
                raise CheckpointError(
                    f"save: {what}: {name} in stage {number}",
                    expected=f"as in an earlier stage, {shown[0]}",
                    got=shown[1],
                    why="The files hold one tensor under each name",
                    fix="give the layers of a stage the names that they have in the whole model",
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
            shown = ["none" if k is None else f"{k[0]} with groups {k[1]}" for k in (kinds[0], kind)]
            raise CheckpointError(
                f"save: the optimizer of stage {number}",
                expected=f"as in stage 0, {shown[0]:.300}",
                got=f"{shown[1]:.300}",
                why="In the files it is one optimizer of the whole model",
                fix="give the optimizers of all stages the same groups in the same order, and options; a group that "
                "a stage has no parameters for may be empty",
            )
    if first is None:
        return None
    groups = [dict(group) for group in first["groups"]]
    for part in filter(None, others):
        for group, more in zip(groups, part["groups"], strict=True):
            group["parameters"] = list(dict.fromkeys([*group["parameters"], *more["parameters"]]))
    states = _union([part["state"] for part in parts if part is not None], "optimizer state")
    return {"class": first["class"], "groups": groups, "state": states}


def take_own_part(source: Source, model: nn.Module) -> None:
    """Remove the tensors of other stages from a source's manifest. Collective over the world for stages."""
    stage = stage_of(model)
    if stage is None:
        return

    def held() -> set[str]:
        # Modules' names as well: in the whole model no tensor has the name of a module.
        tensors = [*owned_parameters(model), *owned_tensors(model, "_buffers")]
        return {owned.key for owned in tensors} | modules_of(model).keys()

    mine, manifest = all_agree(held), source.manifest
    # A tensor that no stage has is not away: it stays in the manifest, and is a difference on all stages.
    away = set().union(*gather(mine, stage.across)) - mine

    def kept(named: dict[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in named.items() if name not in away}

    named = ("parameters", "buffers", "delayed")
    fields: dict[str, Any] = {name: kept(getattr(manifest, name)) for name in named}
    if manifest.optimizer is not None:
        groups = [
            {**group, "parameters": [n for n in group["parameters"] if n not in away]}
            for group in manifest.optimizer["groups"]
        ]
        state = kept(manifest.optimizer["state"])
        fields["optimizer"] = {**manifest.optimizer, "groups": groups, "state": state}
    if manifest.semantics:
        fields["semantics"] = {**manifest.semantics, "modules": kept(manifest.semantics["modules"])}
    source.manifest = replace(manifest, **fields)
