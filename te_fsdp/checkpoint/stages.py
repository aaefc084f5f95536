"""Stages of a pipeline in one checkpoint: what each contributes is joined, and each takes its own part.

A stage is a model of its own, whose tensors have the names that they have in the whole model. The files hold the whole
model, whoever wrote them: a save joins what the first rank of each stage tells, a load takes out of the manifest what
other stages hold. What no stage holds stays, and is a difference for all of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

from torch import nn

from te_fsdp import _torch
from te_fsdp.agree import gather, rank, world_size
from te_fsdp.checkpoint.manifest import Manifest
from te_fsdp.errors import CheckpointError, shorten
from te_fsdp.modules.semantics import Semantics, from_json, to_json
from te_fsdp.parameters import require_optimizer
from te_fsdp.sharding.state import sharding_state

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.optim import Optimizer

    from te_fsdp.mesh import Meshes


@dataclass(frozen=True)
class Stage:
    """This rank's stage, or stages: those at its place along ``pp``.

    Attributes:
        meshes: The stage's.
    """

    meshes: Meshes

    @property
    def across(self) -> DeviceMesh:
        """The ranks at the same place in each stage."""
        assert self.meshes.pp is not None
        return self.meshes.pp

    @property
    def number(self) -> int:
        """Which one it is."""
        return self.across.get_local_rank()

    @property
    def speaks(self) -> bool:
        """Whether this rank tells of the stage."""
        return int(self.meshes.device_mesh.mesh.min()) == rank()


class _Parts(nn.Module):
    """Several stages of one model as if they were registered in one module, under the names of the whole."""

    parts: tuple[nn.Module, ...]

    def __init__(self, parts: Iterable[nn.Module]) -> None:
        super().__init__()
        self.__dict__["parts"] = tuple(parts)  # registered they would have a prefix

    def named_modules(  # type: ignore[bad-override]
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        """The modules of all parts, those that hold others (the parts themselves) under one name."""
        memo = set() if memo is None else memo
        for part in self.parts:
            yield from part.named_modules(memo, prefix, remove_duplicate)


def as_one(model: nn.Module | Iterable[nn.Module], optimizer: Optimizer | None = None) -> nn.Module:
    """A model, or several stages of one, as one module.

    Raises:
        CheckpointError: Something else, such as a state dict.
        PlacementError: An optimizer that is none.
    """
    if optimizer is not None:
        require_optimizer(optimizer, "checkpoint: model, optimizer")
    if isinstance(model, nn.Module):
        return model
    given = list(model) if isinstance(model, Iterable) else []
    if not given or not all(isinstance(part, nn.Module) for part in given):
        raise CheckpointError(
            "checkpoint: model",
            expected="a module, or a rank's stages",
            got=type(model).__name__,
            fix="checkpoint.save(path, model, optimizer) and load(path, model, optimizer) take the objects themselves, "
            "no state dicts",
        )
    return given[0] if len(given) == 1 else _Parts(given)


def meshes_of(model: nn.Module) -> list[Meshes]:
    """The meshes of a model, or of models within it. Local operation."""
    states = (sharding_state(module) for module in model.modules())
    return [state.meshes for state in states if state is not None]


def stage_of(model: nn.Module) -> Stage | None:
    """This rank's stage, where the model is one and the stages are on all ranks. Local operation."""
    for meshes in meshes_of(model):
        if meshes.pp is not None and meshes.pp.size() * meshes.device_mesh.size() == world_size():
            return Stage(meshes)
    return None


def name_of(call: str, model: nn.Module) -> str:
    """A call's name for :func:`collective_call`: of a stage another one, lest ranks with and without one wait."""
    return call if stage_of(model) is None else f"{call} (a stage)"


def check_whole_job(model: nn.Module, stage: Stage | None) -> None:
    """All ranks write one checkpoint, in which each name is one tensor: ranks must not hold models of their own.

    Raises:
        CheckpointError: They do; or two stages of this rank have a tensor of one name.
    """
    if isinstance(model, _Parts):
        names = [
            n
            for part in model.parts
            for named in (part.named_parameters(), part.named_buffers())
            for n, _ in named
        ]
        twice = sorted(name for name, count in Counter(names).items() if count > 1)
        if twice:
            raise _in_several(twice, "the stages of one rank")
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


def _in_several(names: list[str], where: str) -> CheckpointError:
    return CheckpointError(
        f"save: {len(names)} tensor(s) of one name in {where}: {shorten(names)}",
        expected="every name in one stage",
        got="layers that each stage counts from 0, or tensors that stages share",
        why="The files hold one tensor under each name, so that all others would be lost",
        fix="give a stage the names of the whole model: leave the other layers out of an nn.ModuleDict, or set them to "
        'None in a copy of the model; save(..., shared=["embedding.weight"]) names what stages share, which must be '
        "equal and is stored once",
    )


# -------------------------------------------------------------------------------------------------------------- saving


def check_same_model(digests: list[dict[str, bytes]], stages: list[int | None]) -> None:
    """All ranks of a stage must describe the same model and optimizer, and all one path. Rank 0 alone calls this."""
    paths = [seen.pop("path").decode() for seen in digests]
    for path in paths:
        if path != paths[0]:
            raise CheckpointError(
                "save: the ranks were given different paths",
                expected="one path",
                got=f"{paths[0]} on rank 0, {path} on rank {paths.index(path)}",
                why="A checkpoint holds the parts of all ranks",
                fix="the same path on all ranks, without the rank's number",
            )
    first = {stage: stages.index(stage) for stage in set(stages)}
    for name in digests[0]:
        others = [r for r, seen in enumerate(digests) if seen[name] != digests[first[stages[r]]][name]]
        if others:
            to = sorted({first[stages[r]] for r in others})
            raise CheckpointError(
                f"save: {name} of the model",
                expected="the same names, shapes, formats and options on all ranks",
                got=f"rank(s) {', '.join(map(str, others))} differ from rank {', '.join(map(str, to))}",
                fix="build model and optimizer alike on all ranks",
            )


def join(
    told: list[tuple[int, dict[str, Any] | None] | None], shared: Iterable[str]
) -> dict[str, Any] | None:
    """The manifest's fields of the whole model. Rank 0 alone calls this.

    Args:
        told: By rank: number of its stage, and the stage's own fields from the rank that speaks for it.
        shared: Patterns of names that several stages may have.

    Returns:
        ``None`` without stages.

    Raises:
        CheckpointError: The stages do not fit together.
    """
    if all(one is None for one in told):
        return None
    if any(one is None for one in told):
        absent = [r for r, one in enumerate(told) if one is None]
        raise CheckpointError(
            f"save: rank(s) {shorten([str(r) for r in absent])} hold no stage of a pipeline, as the others do",
            expected="a stage that te_fsdp.fully_shard was called on, on every rank",
            fix="shard every stage",
        )
    by_stage = {number: part for number, part in filter(None, told) if part is not None}
    fields = [by_stage[number] for number in sorted(by_stage)]
    joined: dict[str, Any] = {}
    several: list[str] = []
    for name in ("parameters", "buffers", "delayed", "tied"):
        joined[name], twice = _union([part[name] for part in fields], name)
        several += twice if name == "parameters" else []
    patterns = tuple(shared)
    several = [name for name in several if not any(fnmatchcase(name, pattern) for pattern in patterns)]
    if several:
        raise _in_several(several, "several stages")
    joined["extra_states"] = list(dict.fromkeys(n for part in fields for n in part["extra_states"]))
    joined["semantics"] = _join_semantics([part["semantics"] for part in fields])
    joined["optimizer"] = _join_optimizers([part["optimizer"] for part in fields])
    return joined


def _union(parts: list[dict[str, Any]], what: str) -> tuple[dict[str, Any], list[str]]:
    """All entries, and the names that several stages have; they must say the same."""
    union: dict[str, Any] = {}
    several = []
    for number, part in enumerate(parts):
        for name, described in part.items():
            several += [name] if name in union else []
            if union.setdefault(name, described) != described:
                raise CheckpointError(
                    f"save: {what}: {name} in stage {number}",
                    expected=f"as in an earlier stage, {_shown(union[name])}",
                    got=_shown(described),
                    why="The files hold one tensor under each name",
                    fix="give the layers of a stage the names that they have in the whole model",
                )
    return union, several


def _shown(described: Any) -> str:
    return (
        ", ".join(f"{key} {value}" for key, value in described.items())
        if isinstance(described, dict)
        else str(described)
    )


def _join_semantics(parts: list[dict[str, Any]]) -> dict[str, Any]:
    modules, _ = _union([from_json(part) for part in parts], "settings of modules")
    recipes = dict.fromkeys(recipe for part in parts for recipe in part["recipes"])
    own: dict[str, Semantics] = {}
    for part in reversed(parts):  # modules of one's own may differ, as a stage's number: the first one tells
        own |= from_json(part, own=True)
    return {"recipes": list(recipes), **to_json(modules | own)}


def _join_optimizers(parts: list[dict[str, Any] | None]) -> dict[str, Any] | None:
    """One optimizer with the parameters of all stages; group by group, whose options must be equal."""
    first, *others = parts
    kinds = [None if p is None else (p["class"], [group["options"] for group in p["groups"]]) for p in parts]
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
    states, _ = _union([part["state"] for part in parts if part is not None], "optimizer state")
    return {"class": first["class"], "groups": groups, "state": states}


# ------------------------------------------------------------------------------------------------------------- loading


@dataclass(frozen=True)
class Names:
    """Names of tensors, as in the files, and of modules."""

    tensors: frozenset[str]
    modules: frozenset[str]

    def __sub__(self, other: Names) -> Names:
        return Names(self.tensors - other.tensors, self.modules - other.modules)


def elsewhere(stage: Stage, tensors: Iterable[str], model: nn.Module) -> Names:
    """What other stages hold, and this one does not. Collective over the stages: names are gathered.

    Args:
        stage: This rank's.
        tensors: Names of the files' tensors that it holds.
        model: It.
    """
    modules = frozenset(_torch.without_wrappers(name) for name, _ in model.named_modules())
    mine = Names(frozenset(tensors), modules)
    told = gather(mine, stage.across)
    union = Names(
        frozenset().union(*(n.tensors for n in told)), frozenset().union(*(n.modules for n in told))
    )
    return union - mine


def without(manifest: Manifest, away: Names) -> Manifest:
    """A manifest without what other stages hold. Local operation."""

    def kept(named: Mapping[str, Any], names: frozenset[str]) -> dict[str, Any]:
        return {name: value for name, value in named.items() if name not in names}

    optimizer, semantics = manifest.optimizer, manifest.semantics
    if optimizer is not None:
        groups = [
            {**group, "parameters": [n for n in group["parameters"] if n not in away.tensors]}
            for group in optimizer["groups"]
        ]
        optimizer = {**optimizer, "groups": groups, "state": kept(optimizer["state"], away.tensors)}
    if semantics and semantics["modules"]:
        semantics = {**semantics, "modules": kept(semantics["modules"], away.modules)}
    return replace(
        manifest,
        parameters=kept(manifest.parameters, away.tensors),
        buffers=kept(manifest.buffers, away.tensors),
        delayed=kept(manifest.delayed, away.modules),
        optimizer=optimizer,
        semantics=semantics,
    )
