"""Several models and several optimizers by name: ``save(path, {"actor": actor, "critic": critic}, {"muon": ...})``.

Models are one module, in which the parameters of each have its name in front: ``actor.layers.0.weight``. Optimizers
are one in the manifest, whose groups have the name of theirs. A parameter has one optimizer.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeAlias

from torch import Tensor, nn

from te_fsdp.checkpoint.compare import WHOLE_OPTIMIZER, Differences
from te_fsdp.checkpoint.model_state import JoinedModules
from te_fsdp.checkpoint.optimizer_state import (
    OptimizerState,
    check_scaled_state,
    compare_optimizer,
    describe_groups,
    optimizer_state,
)
from te_fsdp.errors import CheckpointError, shorten
from te_fsdp.features.main_weights import check_optimizer, unwrap_optimizer
from te_fsdp.records import require_optimizer

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from te_fsdp.checkpoint.model_state import OwnedTensor

#: Optimizers by name; ``""`` is the name of one that was given without a name.
Parts: TypeAlias = "dict[str, Optimizer]"


def joined_model(given: Any) -> nn.Module:
    """Return a model, models by name, or a rank's stages as one module; CheckpointError for others."""
    if isinstance(given, nn.Module):
        return given
    # A state dict is a mapping too, but not of models.
    is_named = isinstance(given, Mapping) and not any(isinstance(value, Tensor) for value in given.values())
    if is_named:
        _check_names(given, "model")
    parts = []
    for name, model in given.items() if is_named else [("", given)]:
        stages = [model] if isinstance(model, nn.Module) else model
        stages = list(stages) if isinstance(stages, Iterable) else []
        if not stages or not all(isinstance(stage, nn.Module) for stage in stages):
            raise CheckpointError(
                "checkpoint: model",
                expected="a module, a dict of modules by name, or a rank's stages",
                got=type(model).__name__,
                fix="checkpoint.save(path, model, optimizer) and load(path, model, optimizer) take the objects "
                "themselves, no state dicts",
            )
        parts += [(name, stage) for stage in stages]
    return parts[0][1] if len(parts) == 1 and not is_named else JoinedModules(parts)


def anchor_of(model: nn.Module) -> nn.Module:
    """Return the module by which a save finds the plan of the previous save: a joined model is made for each call."""
    return model.parts[0][1] if isinstance(model, JoinedModules) else model


def parts_of(optimizer: Any) -> Parts:
    """Return optimizers by name, within their wrappers; one without a name has ``""``. CheckpointError for others."""
    if optimizer is None:
        return {}
    if not isinstance(optimizer, Mapping):
        require_optimizer(optimizer, "checkpoint: model, optimizer")
        return {"": unwrap_optimizer(optimizer)}
    _check_names(optimizer, "optimizer")
    for name, one in optimizer.items():
        require_optimizer(one, f"checkpoint: model, optimizer {name!r}")
    return {name: unwrap_optimizer(one) for name, one in optimizer.items()}


def _check_names(given: Mapping[Any, Any], what: str) -> None:
    odd = [name for name in given if type(name) is not str or not name or set(name) & {".", "=", ",", "/"}]
    if odd or not given:
        raise CheckpointError(
            f"checkpoint: {what}s by name",
            expected=f'a dict of {what}s, whose names have none of . = , / in them, such as {{"actor": ...}}',
            got=", ".join(map(repr, odd)) or "an empty dict",
            fix="give each a short name, the same at each save and load",
        )


def class_of(parts: Parts) -> str:
    """Return what the manifest has as the class: that of one optimizer, or names and classes of several."""
    return ", ".join(
        f"{name}={type(one).__name__}" if name else type(one).__name__ for name, one in parts.items()
    )


def joined_state(model: nn.Module, parts: Parts, owned: dict[int, OwnedTensor]) -> OptimizerState:
    """Return what all optimizers contribute to a checkpoint; CheckpointError for a parameter of two. Local."""
    joined, holders = OptimizerState({"state": {}}, {}), dict[str, str]()
    for name, one in parts.items():
        check_optimizer(model, one)
        check_scaled_state(one)
        # By the files' tensors: the experts of a layer are one of them.
        for key in dict.fromkeys(owned[id(p)].key for group in one.param_groups for p in group["params"]):
            if holders.setdefault(key, name) != name:
                raise CheckpointError(
                    f"save: {key} is in two optimizers, {holders[key]!r} and {name!r}",
                    expected="one optimizer for each parameter",
                    why="The files hold the state of a parameter under its name",
                    fix="give the parameter, or all experts of a layer, to one of them",
                )
        state = optimizer_state(one, owned)
        joined.described["state"] |= state.described["state"]
        joined.entries |= state.entries
        joined.experts |= state.experts
    joined.described["class"] = class_of(parts)
    return joined


def joined_groups(parts: Parts, names: dict[int, str]) -> list[dict[str, Any]]:
    """Return the groups of all optimizers, each with the name of its optimizer where that has one. Local operation."""
    return [
        {**group, **({"optimizer": name} if name else {})}
        for name, one in parts.items()
        for group in describe_groups(one, names)
    ]


def split(saved: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return what a manifest says of each optimizer, by its name."""
    names = dict.fromkeys(group.get("optimizer", "") for group in saved["groups"])
    # A single optimizer without a name, as all checkpoints had before several were supported.
    if set(names) <= {""}:
        return {"": saved}
    # The manifest has one class for all, such as "muon=Muon, adam=AdamW".
    classes = dict(one.split("=", 1) for one in saved["class"].split(", "))
    found = {}
    for name in names:
        groups = [group for group in saved["groups"] if group.get("optimizer", "") == name]
        own = {parameter for group in groups for parameter in group["parameters"]}
        state = {key: states for key, states in saved["state"].items() if key in own}
        found[name] = {"class": classes.get(name, ""), "groups": groups, "state": state}
    return found


def compare_optimizers(
    found: Differences,
    model: nn.Module,
    parts: Parts,
    saved: dict[str, Any] | None,
    owned: dict[int, OwnedTensor],
) -> None:
    """Add the differences between saved optimizers and these. Local operation; changes nothing."""
    for one in parts.values():
        check_optimizer(model, one)
        check_scaled_state(one)
    if saved is None:
        found.optimizer["optimizer: none in the checkpoint", WHOLE_OPTIMIZER] = None
        return
    there = split(saved)
    # Without names on one side, optimizers cannot be matched.
    if ("" in there) != ("" in parts):
        shown = [shorten([*names]) if "" not in names else "one without a name" for names in (there, parts)]
        found.optimizer[f"optimizer: saved {shown[0]}, here {shown[1]}", WHOLE_OPTIMIZER] = None
        return
    for name in sorted(there.keys() | parts.keys()):
        if name in there and name in parts:
            # Collected separately, so that each text can begin with the name of the optimizer.
            own = Differences()
            compare_optimizer(own, parts[name], there[name], owned)
            found.optimizer |= {(f"{name}: {text}" if name else text, of): None for text, of in own.optimizer}
            found.converted |= own.converted
            continue
        if name in there:
            where, keys = "only", {key for group in there[name]["groups"] for key in group["parameters"]}
        else:
            groups = parts[name].param_groups
            where, keys = "not", {owned[id(p)].key for group in groups for p in group["params"]}
        for key in sorted(keys):
            found.optimizer[f"optimizer {name!r} is {where} in the checkpoint", key] = None


def each_with_manifest(parts: Parts, manifest: Any) -> Iterator[tuple[Optimizer, Any]]:
    """Yield each optimizer that is here and in a manifest, with the manifest as if it were the only one."""
    there = split(manifest.optimizer)
    for name, one in parts.items():
        if name in there:
            yield one, replace(manifest, optimizer=there[name])
