"""Checks of a model: built the same on all ranks, initialized before its first forward, kept intact later."""

# [Note: checks of a model]
#
#     before it is sharded    names, shapes and values that all ranks must have
#     after it is sharded     deepcopy, pickle and make_graphed_callables are refused
#     before a forward        parameters that were added or removed after ``fully_shard``, gradient hooks that never
#                             run, memory that ``to_empty`` has allocated and nothing has written
#     first trained forward   writes to a weight, which would change only its unsharded copy

from __future__ import annotations

import functools
import operator
from collections.abc import Iterable
from itertools import chain, repeat
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from te_fsdp.checks.backward import refuse_second_derivatives
from te_fsdp.checks.weights import find_equal_shards, has_device_parameters, refuse_equal_shards
from te_fsdp.collectives.agreement import are_equal, digest, format_differences, maximum, raised_on_all_ranks
from te_fsdp.errors import InitError, MeshError, OrderError, shorten
from te_fsdp.initialize import check_initialized, check_written
from te_fsdp.mesh import Meshes
from te_fsdp.modules.semantics import SETTINGS, Setting, semantics_of
from te_fsdp.plan import ModelPlan
from te_fsdp.records import ParameterPlan, ParamOwner, binding_of, get_record, param_owners
from te_fsdp.replicated_params import ReplicatedParameter, removal_error
from te_fsdp.sharded_model import ShardedModel, record_unsharded_params, sharded_model_of
from te_fsdp.tensor_checksums import checksum
from te_fsdp.upstream import (
    fsdp2_patches as _fsdp2_patches,
    fsdp2_state as _fsdp2,
    te as _te,
    torch_dtensor as _torch,
)
from te_fsdp.upstream.fsdp2_containers import opaque_in, tensors_in
from te_fsdp.upstream.fsdp2_units import call_before, fsdp_parameter_groups, fsdp_state_of, reduction_of
from te_fsdp.upstream.torch_autograd import refuse_hooks, use_count
from te_fsdp.upstream.torch_data import assigned_data, assignments
from te_fsdp.upstream.torch_functions import before_graphed_callables, before_reparametrization

# ------------------------------------------------------------------------------------------------- before it is sharded


def compare_models(plan: ModelPlan) -> None:
    """Raise on all ranks unless all have built the same model: names, tp-local shapes, dtypes, devices, settings.

    Expert modules are compared over the ranks that have the same experts. Settings are those whose differences a
    checkpoint refuses, of modules that all ranks have. Collective over the world: a max all-reduce of a few integers
    per axis (three with ``ep``), and gathers of the descriptions if they differ.
    """
    # Ranks with different models, or with different units, would wait for each other in collectives that
    # never match.
    model, meshes, world, arguments = plan.model, plan.meshes, plan.meshes.device_mesh, plan.settings()
    tp = meshes.tp_or_none
    described: dict[bool, dict[str, str]] = {False: {}, True: {}}
    for label, module, name, p in param_owners(model):
        row = plan.parameters[id(module), name]
        kind = f"{tuple(p.shape)} in {p.dtype}{'' if p.requires_grad else ', frozen'}{', on meta' if p.is_meta else ''}"
        if (quantizer := _te.weight_quantizer(module, name)) is not None:
            kind += f", for {type(quantizer).__name__}"
        rule = row.rule if tp is not None else None
        if rule is not None and (rule.partial_grad or rule.shard_dim is not None):
            kind += f", {'a sum' if rule.partial_grad else f'Shard({rule.shard_dim})'} over tp"
        # A DTensor's shape is that of all experts, the same on all ranks.
        described[row.experts and not isinstance(p, DTensor)][label] = kind
    settings = {
        f"{name or type(model).__name__}: {setting}": str(value)
        for name, module in semantics_of(model).items()
        for setting, value in [("class", module.kind), *module.settings.items()]
        if SETTINGS.get(setting, Setting("error")).effect == "error"
    }
    rows = repr(described[False]), arguments, repr(settings), repr(described[True])
    digests = torch.tensor(list(map(digest, rows)), device=meshes.device)
    differs = (~are_equal(digests if meshes.expert_mesh is None else digests[:3], world)).long()
    if meshes.expert_mesh is not None:
        # Experts differ over ep, so each is compared over the axes that replicate it.
        same_experts = are_equal(digests[3:], meshes.expert_mesh, leave_out=("ep",))
        differs = torch.cat([differs, (~same_experts).long()])
        # So that all ranks raise if the ranks of one expert detect a difference.
        maximum(differs, world)
    models, others, options, experts_of_one = differs.tolist()
    found = format_differences(described[False] if models else settings, world) if models or options else []
    # A module without parameters may exist on one rank only, for example to log.
    if models or experts_of_one or any("missing on" not in line for line in found):
        shown = found if models else [line for line in found if "missing on" not in line]
        raise MeshError(
            f"{type(model).__name__}: the ranks of the mesh have different models",
            expected="the same names, shapes, dtypes, devices and settings on all ranks",
            got=shorten(shown, 3, "; ") or f"here {described[True]}"[:1000],
            fix="build the model from the same configuration on all ranks",
        )
    if others:
        by_name = {name: text for name, _, text in (part.partition("=") for part in arguments.split("; "))}
        raise MeshError(
            "fully_shard: the ranks of the mesh were given different arguments",
            expected="the same units, strategies and dtypes on all ranks",
            got=shorten(format_differences(by_name, world), 3, "; "),
            fix="call it with the same arguments on all ranks",
        )


def compare_initial_values(plan: ModelPlan) -> None:
    """Raise on all ranks unless parameters on the device are equal wherever they must be.

    Before FSDP2 shards them, all data-parallel ranks have the same tp-local tensors, and all tp ranks the same
    replicated parameters. Experts are compared among the ranks that have the same ones. Shards over tp, and experts of
    different ep ranks, must not be equal. Collective over the world: max all-reduces of two integers per parameter and
    axis, small object gathers.
    """
    meshes, rows = plan.meshes, plan.parameters
    items = ((p.label, p.parameter, rows[id(p.module), p.name]) for p in param_owners(plan.model))
    # Without experts all ranks compare the same values, so all detect the same differences.
    may_differ = any(row.experts for row in rows.values())
    _require_equal(items, meshes, meshes.device_mesh if may_differ else None, "fully_shard")
    if (meshes.tp_or_none is not None or meshes.ep is not None) and has_device_parameters(plan.modules):
        with raised_on_all_ranks(meshes.device_mesh, "fully_shard"):
            refuse_equal_shards(find_equal_shards(plan.modules, meshes.tp_or_none, meshes.ep))


def compare_renewed_values(parameters: Iterable[ReplicatedParameter], meshes: Meshes) -> None:
    """Compare as :func:`compare_initial_values` unsharded parameters that were materialized or converted."""
    rows = ((item.plan.label, item.parameter, item.plan) for item in parameters)
    _require_equal(rows, meshes, meshes.device_mesh, "materialize")


#: A parameter before it is sharded: its label, a checksum of the tp-local value, whether tp replicates it.
_Sum = tuple[str, torch.Tensor, bool]


def _require_equal(
    parameters: Iterable[tuple[str, torch.Tensor, ParameterPlan]],
    meshes: Meshes,
    affected: DeviceMesh | None,
    where: str,
) -> None:
    """Raise for parameters whose values differ between ranks; on all ranks of ``affected`` if only some detect it."""
    checksums: dict[bool, list[_Sum]] = {False: [], True: []}
    for label, parameter, plan in parameters:
        local = _torch.local_of(parameter)
        if not local.is_meta:
            replicated = plan.rule is None or plan.rule.shard_dim is None
            checksums[plan.experts].append((label, checksum(local), replicated))
    if affected is None and not any(checksums.values()):  # on meta, on all ranks
        return
    with raised_on_all_ranks(affected, where):
        bad = _differing(checksums[False], meshes.device_mesh)
        bad += _differing(checksums[True], meshes.expert_mesh or meshes.device_mesh)
        if bad:
            raise InitError(
                f"{shorten(bad)}: values differ between ranks that must have the same",
                expected="equal parameters on all data-parallel ranks, and equal replicated ones on all tp ranks",
                got=f"{len(bad)} of {sum(map(len, checksums.values()))} parameters differ",
                why="FSDP2 would shard a different initialization on each rank",
                fix="use one seed on all ranks before building the model, or build it on meta and call "
                "te_fsdp.materialize",
            )


def _differing(checksums: list[_Sum], mesh: DeviceMesh) -> list[str]:
    """Return labels of parameters that differ over the data-parallel axes of ``mesh``, or over tp though replicated.

    Collective over ``mesh`` without ``ep``. All its ranks get the same result.
    """
    if not checksums:
        return []
    labels, sums, replicas = zip(*checksums, strict=True)
    mine = torch.stack(sums)
    differs = ~are_equal(mine, mesh, leave_out=("ep", "tp"))
    if "tp" in (mesh.mesh_dim_names or ()):
        replicated = torch.tensor(replicas, device=mine.device)
        differs |= replicated & ~are_equal(mine, mesh["tp"])
        # One tp rank may detect a difference alone. All must raise, or none.
        differs_anywhere = differs.to(torch.int64)
        maximum(differs_anywhere, mesh["tp"])
        differs = differs_anywhere.bool()
    return [label for label, flag in zip(labels, differs.tolist(), strict=True) if flag]


# ------------------------------------------------------------------------------------------- copies, removed parameters


def watch_model(state: ShardedModel) -> None:
    """Refuse copies, graphs, removed parameters and second derivatives of a model from now on. Local operation."""
    model = state.model
    for owner in param_owners(model, remove_duplicate=False):
        state.checked.places.setdefault(
            (id(owner.module), owner.name), (owner.module._parameters, owner.name, owner.label)
        )
    for name, unit in {"": model, **state.modules}.items():
        label = name or type(model).__name__.removeprefix("FSDP")
        # ``copy.deepcopy`` and pickle look these methods up on the object itself.
        unit.__dict__["__deepcopy__"] = functools.partial(_refuse_use, label, "deepcopy")
        unit.__dict__["__reduce_ex__"] = functools.partial(_refuse_use, label, "pickle")
        before_graphed_callables(unit, functools.partial(_refuse_use, label, "graphs"))
    before_reparametrization(_refuse_reparametrization)
    for name, unit in state.modules.items():
        # Before the all-gather of backward, so that no rank waits for one that has raised.
        for group in fsdp_parameter_groups(unit):
            call_before(group, "pre_backward", functools.partial(refuse_second_derivatives, name))


def _refuse_use(label: str, use: str, *_: Any) -> Any:
    """Raise in a deepcopy, a pickle or ``make_graphed_callables`` of a unit. Local operation."""
    if use == "graphs":
        raise OrderError(
            f"{label}: make_graphed_callables of a module after fully_shard",
            expected="a module that is not sharded",
            got="a unit of FSDP2, whose hooks all-gather its weights and reduce its gradients",
            why="A graph of forward and backward only would contain neither",
            fix="record the full step with te_fsdp.graphed_step(model, optimizer, forward_backward), or forward and "
            "backward of each unit with te_fsdp.graphed_units(model)",
        )
    if use == "pickle":
        raise OrderError(
            f"{label}: pickle of a model after fully_shard, as torch.save(model) or copy.copy(model) makes it",
            expected="a state dict or a checkpoint",
            got="modules with process groups and hooks",
            fix="call te_fsdp.checkpoint.save(path, model, optimizer) on all ranks; for a second model, "
            "build and shard it separately",
        )
    raise OrderError(
        f"{label}: deepcopy of a model after fully_shard, as by torch.optim.swa_utils.AveragedModel",
        expected="an unsharded model",
        got="FSDP2 units, whose parameter groups and hooks belong to this model",
        fix="average shards: average = [p.detach().clone() for p in model.parameters()] and torch._foreach_lerp_ "
        "(docs/data.md has the loop); for a second model, build and shard it separately",
    )


def refuse_removed_parameters(state: ShardedModel) -> None:
    """Raise unless all parameters that were sharded are still registered. Local operation, before FSDP2 all-gathers."""
    # Every forward runs this, so the comparison of all entries is one call in C.
    columns = list(zip(*state.checked.places.values(), strict=True))
    # dict.get returns None for a removed name and for a parameter set to None. Both have no weight.
    if not columns or all(map(operator.is_not, map(dict.get, columns[0], columns[1]), repeat(None))):
        return
    # A module that was removed with its parameters is not a removed parameter.
    owners = {id(module._parameters) for module in state.model.modules()}
    removed = [
        label
        for table, name, label in state.checked.places.values()
        if table.get(name) is None and id(table) in owners
    ]
    if removed:
        raise removal_error(removed)


def refuse_functional_values(state: ShardedModel) -> None:
    """Raise for tensors that replace parameters during one call, before FSDP2 adopts them. Local operation."""
    # A parameter that is assigned before the first forward is a parameter, and gets the record of the previous one.
    bound = {id(module._parameters) for module in state.model.modules() if binding_of(module) is not None}
    foreign = [
        label
        for table, name, label in state.checked.places.values()
        if isinstance(value := table.get(name), torch.Tensor)
        and (not isinstance(value, torch.nn.Parameter) or (id(table) in bound and get_record(value) is None))
    ]
    if foreign:
        raise OrderError(
            f"{shorten(foreign, 3)}: values of torch.func.functional_call in the first forward",
            expected="the parameters that te_fsdp.fully_shard has set",
            got="tensors that the call removes when it ends",
            why="FSDP2 would adopt them as its shards in the first forward",
            fix="copy the values: `with torch.no_grad(): parameter.copy_(values)`, with a DTensor of its placements",
        )


def _refuse_reparametrization(tensor: torch.Tensor) -> None:
    """Raise if torch is about to compute a sharded parameter from others. Local operation."""
    state = sharded_model_of(tensor)
    if state is not None and refuse_removed_parameters in state.checks.forward:
        raise removal_error([state.names().get(id(tensor), "a parameter")])


def refuse_shared_memory(state: ShardedModel) -> None:
    """Refuse ``share_memory()`` of the model and of its modules from now on. Local operation."""
    first: dict[int, ParamOwner] = {}
    for owner in param_owners(state.model):
        if isinstance(owner.parameter, DTensor):
            first.setdefault(id(owner.module), owner)
    for owner in first.values():
        _fsdp2_patches.wrap_apply(owner.module, functools.partial(_refuse_sharing, owner.label))


def _refuse_sharing(label: str, stock: Any, fn: Any, *args: Any, **kwargs: Any) -> Any:
    """Raise in ``share_memory()``, which ends the process for DTensors; else run ``Module._apply``."""
    if "share_memory" in getattr(fn, "__qualname__", ""):
        raise OrderError(
            f"{label}: share_memory() of a sharded model",
            expected="parameters that are plain tensors",
            got="a shard of this rank",
            why="Other processes would see this rank's shard only, and torch cannot share the memory of DTensors",
            fix="share an unsharded model, or its full state dict (torch.distributed.checkpoint.state_dict)",
        )
    return stock(fn, *args, **kwargs)


# ----------------------------------------------------------------------------------------------- before a first forward


def require_initialized(state: ShardedModel) -> None:
    """Raise for parameters on meta, before FSDP2 does with advice that leaves them uninitialized. Local operation."""
    check_initialized(state.parameters().items())


def refuse_uninitialized(state: ShardedModel) -> None:
    """Raise for tensors that ``to_empty`` has allocated and nothing has written to. Local operation."""
    if not state.checked.released:
        return
    # Once after each to_empty, because isnan waits for the device.
    state.checked.released = False
    check_written([*state.parameters().items(), *state.model.named_buffers()])


def refuse_changed_parameters(state: ShardedModel) -> None:
    """Raise for trained parameters, gradient hooks and assignments to ``.data`` that came after ``fully_shard``."""
    for _, unit in state.gathered():  # by the user, by a pipeline's schedule, or in the backward that steps
        record_unsharded_params(unit)
    # Parameters that are not sharded are hooked by the reduction of their gradients.
    reduced = {id(p) for parameters in state.components.reduced_parameters for p in parameters()}
    others = {name: p for name, p in state.parameters().items() if id(p) not in reduced}
    new = [name for name, p in others.items() if p.requires_grad and not isinstance(p, DTensor)]
    if new and state.meshes.device_mesh.size() > 1:
        raise not_in_the_model(new, len(new), "added or replaced since")
    refuse_hooks(others.items())
    refuse_assigned(state)


def refuse_new_parameters(state: ShardedModel) -> None:
    """Check the parameters again if modules were added or replaced, or parameters added. Local operation."""
    checked = state.checked
    # Every forward runs this, so it calls functions in C only.
    if checked.contents != [*chain(*map(dict.values, checked.tables[0])), sum(map(len, checked.tables[1]))]:
        refuse_changed_parameters(state)
        modules = [*state.model.modules()]
        checked.tables = [m._modules for m in modules], [m._parameters for m in modules]
        checked.contents = [*chain(*map(dict.values, checked.tables[0])), sum(map(len, checked.tables[1]))]


def refuse_assigned_data(state: ShardedModel) -> None:
    """Raise if ``.data`` of a sharded parameter was assigned since the last forward. Local operation."""
    if assignments[0] != state.checked.assignments:
        refuse_assigned(state)
        state.checked.assignments = assignments[0]


def not_in_the_model(names: list[str], count: int, change: str) -> OrderError:
    """Return the error for trained parameters that ``fully_shard`` has not seen."""
    return OrderError(
        f"{shorten(names, 3)}: trained, but not in the model when te_fsdp.fully_shard was called",
        expected="the parameters that the model had then",
        got=f"{count} parameter(s) of a module that was {change}",
        why="Their gradients would not be averaged over the ranks, whose copies would drift apart",
        fix="change the model first (a new head, adapters), then call te_fsdp.fully_shard on all of it",
    )


def refuse_writes_in_forward(state: ShardedModel) -> None:
    """Refuse writes to parameters in the first trained forward of each unit. Local operation."""
    for name, unit in state.modules.items():
        _watch_writes(state, name, unit)


def _watch_writes(state: ShardedModel, name: str, unit: nn.Module) -> None:
    reads: list[tuple[torch.Tensor, Any, int, torch.Tensor]] = []
    parameters: list[tuple[torch.Tensor, int]] = []  # with their reference counts

    @_torch.without_modes()
    def before(unit: nn.Module, args: Any) -> None:
        # Inference mode does not count versions. Recomputes are not compared.
        if torch.is_grad_enabled() and not _torch.in_backward():
            unsharded = list(_fsdp2.unsharded_parameters(unit))
            reads[:] = [
                (parameter, record, _torch.version_of(parameter), checksum(_torch.local_of(parameter)))
                for parameter, record in unsharded
                if not _te.is_quantized(_torch.local_of(parameter))  # kernels write those without a version
            ]
            parameters[:] = [(parameter, use_count(parameter)) for parameter, _ in unsharded]

    @_torch.without_modes()
    def after(unit: nn.Module, args: Any, output: Any) -> None:
        if _torch.in_backward() or not torch.is_grad_enabled():
            return
        while handles:
            handles.pop().remove()
        # Writes through ``.data`` do not change the version, so checksums are compared, in one transfer to the host.
        # A forward that has run backward has freed them.
        kept = reads if _fsdp2.is_unit_unsharded(unit) else []
        sums = [torch.ne(total, checksum(_torch.local_of(parameter))) for parameter, _, _, total in kept]
        changed = torch.stack(sums).tolist() if sums else [False] * len(reads)
        written = [
            record
            for (parameter, record, version, _), differs in zip(reads, changed, strict=True)
            if differs or _torch.version_of(parameter) != version
        ]
        counts = list(parameters)
        reads.clear()
        parameters.clear()
        if state.units[name].gather == "pass" and counts and reduction_of(unit)[0] > 1:
            refuse_freed_outputs(name, unit, counts, output)
        if written:
            record_unsharded_params(unit)
            names = state.names()
            labels = [names.get(id(_fsdp2.sharded_param_of(record)), "a parameter") for record in written]
            raise OrderError(
                f"{shorten(labels, 3)}: written to in forward",
                expected="a forward that only reads weights",
                got="an in-place write, as by nn.Embedding(max_norm=...) or weight.clamp_() in a module's forward",
                why="It changes only the unsharded copy, which is freed: the sharded weight does not change",
                fix="write to the parameters after the optimizer's step, under torch.no_grad()",
            )

    # After FSDP2's hook that all-gathers, and before the one that reshards.
    handles: list[Any] = [
        unit.register_forward_pre_hook(_torch.disable_compile(before)),
        unit.register_forward_hook(_torch.disable_compile(after), prepend=True),
    ]


def refuse_freed_outputs(
    name: str, unit: nn.Module, parameters: list[tuple[torch.Tensor, int]], output: Any
) -> None:
    """Raise OrderError if the results of a unit's forward need weights that FSDP2 frees after it. Local operation.

    ``parameters`` are the unsharded parameters and their reference counts before the forward.
    """
    label = name or type(unit).__name__.removeprefix("FSDP")
    memory = {_torch.memory_id(_torch.local_of(parameter)) for parameter, _ in parameters}
    tensors = list(tensors_in(output))
    if any(_torch.memory_id(_torch.local_of(tensor)) in memory for tensor in tensors):
        raise OrderError(
            f"{label}: forward returned one of the unit's parameters, or a view of it",
            expected="new tensors",
            got="memory of an unsharded weight",
            why="FSDP2 frees it after the forward of the unit",
            fix="return parameter.clone(); or do not make this module a unit",
        )
    if not tensors:
        torch.clear_autocast_cache()  # its casts are graphs with the weights
    kept = any(use_count(parameter) > before for parameter, before in parameters)
    # The forward may have run backward itself.
    has_gradients = any(shard.grad is not None for shard in _fsdp2.sharded_parameters(unit))
    # ``refuse_opaque_output`` checks objects of unknown classes. New items of containers are outputs too.
    if tensors or not kept or has_gradients or opaque_in(output) or any(fsdp_state_of(unit).containers):
        return
    raise OrderError(
        f"{label}: forward returned {type(output).__name__}",
        expected="the tensors of which a loss is computed",
        got="no tensor, although an attribute or another object keeps a graph with the unit's weights",
        why="FSDP2 all-gathers a unit's weights for backward in hooks on the tensors that it returns",
        fix="return the tensors, a tuple or a dict of them; or do not make this module a unit",
    )


def is_assigned(parameter: torch.Tensor) -> bool:
    """Return whether ``.data`` of a sharded parameter was assigned since its record was set. Local operation."""
    if not isinstance(parameter, DTensor):
        return False
    record = get_record(parameter)
    memory = record.memory if record is not None else None
    return memory is not None and memory[0] == id(parameter) and memory[1] != _torch.memory_id(parameter)


def refuse_assigned(state: ShardedModel) -> None:
    """Raise OrderError if ``.data`` of a sharded parameter was assigned. Local operation."""
    assigned = [name for name, parameter in state.parameters().items() if is_assigned(parameter)]
    if assigned:
        raise assigned_data(shorten(assigned, 3), len(assigned))
