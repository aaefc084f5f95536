"""What is looked at once, before it costs a training run: at a model's first forward, and an optimizer's first step.

    first forward         parameters that came after ``fully_shard``, gradient hooks that never run, memory that
                          ``to_empty`` left as it was
    first backward        of a pipeline's stage: it is not split into one for inputs and one for weights
    first trained one     no weight is written to, which would change its gathered copy alone
    first step            the same parameters and hooks once more; others beside the model; optimizers that differ
                          between ranks or cannot update shards; state of another rank; copies of a weight that
                          differ between ranks

Nothing here is repeated in later forwards and steps, but for a comparison of two numbers.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
from torch.distributed.tensor import DTensor

from te_fsdp.collectives.agreement import are_equal, digest, raised_on_all_ranks
from te_fsdp.collectives.rendezvous import is_capturing, is_simulated
from te_fsdp.errors import CheckpointError, InitError, MeshError, OrderError, PlacementError, shorten
from te_fsdp.features.main_params import MAIN
from te_fsdp.initialize import MEANT, checksum, is_constant, refuse_equal_shards
from te_fsdp.lifecycle import registered_at
from te_fsdp.quantized.amax import KEEPS_MAIN_WEIGHTS
from te_fsdp.records import get_record, iter_param_owners, label_of
from te_fsdp.replica_groups import replica_groups_of_dtensor, replica_groups_of_plan
from te_fsdp.sharded_model import record_unsharded_params, refuse_assigned, refuse_hooks, shard_of
from te_fsdp.upstream import fsdp2_state as _fsdp2, te as _te, torch_dtensor as _torch

if TYPE_CHECKING:
    import torch.distributed as dist
    from torch import nn
    from torch.optim import Optimizer

    from te_fsdp.lifecycle import Step
    from te_fsdp.sharded_model import ShardedModel

T = TypeVar("T")

# Elements of a part that chance does not make equal to another.
_TELLING = 16
#: Optimizers of torch with operations that DTensor refuses, after others have changed weights (torch 2.11 to 2.15).
_UNFIT = ("Adafactor", "Rprop")
#: The operator of a class's fused form, of those that DTensor may not know (torch 2.11 to 2.15 know Adam's).
_FUSED: dict[type, str] = {torch.optim.SGD: "_fused_sgd_", torch.optim.Adagrad: "_fused_adagrad_"}


def before_first_forward(state: ShardedModel) -> None:
    """Raise for what was done to a model between ``fully_shard`` and its first forward. Local operation."""
    _refuse_changed(state)
    if not state.released:
        return
    state.released = False
    unset = [
        name
        for name, tensor in [*state.parameters().items(), *state.model.named_buffers()]
        if (local := _torch.local_of(tensor)).is_floating_point()
        and local.numel()
        and not _te.is_quantized(local)
        and bool(local.isnan().all())
    ]
    if unset:
        raise InitError(
            f"{shorten(unset, 3)}: never initialised",
            expected="values after to_empty, which gives memory alone",
            got=f"{len(unset)} tensor(s) that nothing was written to",
            why="They would hold whatever the memory held",
            fix="call te_fsdp.materialize(model) in place of to_empty, or load a checkpoint",
        )


def refuse_inference_mode(state: ShardedModel) -> None:
    """Raise where weights that were first gathered under ``torch.inference_mode`` are to be trained. Local."""
    if torch.is_inference_mode_enabled():
        state.inferred = state.inferred or (bool(state.modules) and not state.roots())
    elif state.inferred:
        raise OrderError(
            f"{type(state.model).__name__}: forward after a first one under torch.inference_mode",
            expected="a first forward outside of it",
            got="gathered weights that are inference tensors",
            why="FSDP2 allocates them once, in the first forward, and torch writes to them in that mode alone",
            fix="use torch.no_grad() for evaluation before training",
        )


def before_first_step(step: Step) -> None:
    """Look once at what an optimizer holds, and whether copies of weights are equal. Collective over the mesh then."""
    held = sum(len(group["params"]) for group in step.optimizer.param_groups)
    for state, parameters in step.models:
        known = state.optimizers.get(step.optimizer)
        if known == (held, id(step.optimizer.state)):  # loading puts another dict there
            continue
        if is_capturing():
            return
        with raised_on_all_ranks(state.meshes.device_mesh, step.where):
            _refuse_changed(state)
            _refuse_state_of_others(step, parameters)
            refuse_unsupported_optimizer(step.optimizer, parameters)
        if not is_simulated():
            _refuse_other_optimizers(state, step, parameters)
            _refuse_unmanaged_parameters(state, step)
            if not state.optimizers:
                with raised_on_all_ranks(state.meshes.device_mesh, step.where):
                    _refuse_differing_copies(state)
                with raised_on_all_ranks(state.meshes.device_mesh, step.where):
                    refuse_equal_shards(_equal_shards(state))
        state.optimizers[step.optimizer] = held, id(step.optimizer.state)


def _refuse_changed(state: ShardedModel) -> None:
    """Raise for what has come since ``fully_shard``: trained parameters, gradient hooks, assignments to ``.data``."""
    for _, unit in state.gathered():  # by hand, by a pipeline's schedule, or in the backward that steps
        record_unsharded_params(unit)
    # What stays whole is hooked by what reduces its gradients.
    reduced = state.replicated.reduced() if state.replicated is not None else set()
    others = {name: p for name, p in state.parameters().items() if id(p) not in reduced}
    new = [name for name, p in others.items() if p.requires_grad and not isinstance(p, DTensor)]
    if new and state.meshes.device_mesh.size() > 1:
        raise _not_in_the_model(new, len(new), "added or replaced since")
    refuse_hooks(others.items())
    refuse_assigned(state)


def _not_in_the_model(names: list[str], count: int, how: str) -> OrderError:
    return OrderError(
        f"{shorten(names, 3)}: trained, but not in the model that te_fsdp.fully_shard was given",
        expected="the parameters that the model had then",
        got=f"{count} parameter(s) of a module that was {how}",
        why="Nobody would average their gradients over the ranks, whose copies would drift apart",
        fix="change the model first (a new head, adapters), then call te_fsdp.fully_shard on all of it",
    )


def _refuse_unmanaged_parameters(state: ShardedModel, step: Step) -> None:
    """Raise for plain parameters of no sharded model if their gradients differ over data parallel.

    Nobody averages these. Those of other wrappers (DistributedDataParallel), and what the user averages, are equal by
    now. Collective over data parallel where the optimizer holds such parameters.
    """
    mesh = state.meshes.fsdp
    others = [
        p
        for group in step.optimizer.param_groups
        for p in group["params"]
        if type(p) is torch.nn.Parameter and get_record(p) is None and p.requires_grad
    ]
    if not others or mesh is None or mesh.size() == 1:
        return
    gradients = [p.grad for p in others if p.grad is not None and p.grad.layout is torch.strided]
    # Each word by itself: what they add up to may wrap, but is equal where they are.
    told = sum(int(checksum(gradient)) for gradient in gradients) % (1 << 60)
    if not bool(are_equal([told], mesh)):
        wanted = {id(p) for p in others}
        found = [f"{type(owner).__name__}.{name}" for owner, name in registered_at(wanted)]
        raise _not_in_the_model(list(dict.fromkeys(found)) or ["a parameter"], len(others), "left out")


def _refuse_other_optimizers(state: ShardedModel, step: Step, parameters: list[torch.Tensor]) -> None:
    """Raise unless all ranks have given the optimizer the same parameters and options. Collective over the mesh."""
    mesh = state.meshes.device_mesh
    if mesh.size() == 1:
        return
    # The order counts where a step sends something for several parameters together.
    ordered = state.meshes.size("tp") > 1 or state.outer == "optim"
    ordered = ordered or any(_te.is_quantized(_torch.local_of(p)) for p in parameters)
    names = state.names()
    groups, options = [], []
    for group in step.optimizer.param_groups:
        held = [names[id(p)] for p in group["params"] if id(p) in names]
        # Each rank of ep has other experts, perhaps more.
        known = (name.rstrip("0123456789") if state.is_expert(name) else name for name in held)
        groups.append(list(dict.fromkeys(known)) if ordered else sorted(set(known)))
        options.append({key: _format_option(value) for key, value in group.items() if key != "params"})
    same = are_equal([digest(repr(groups)), digest(repr(options))], mesh).tolist()
    if not all(same):
        raise MeshError(
            f"{step.where}: the optimizers of the ranks differ",
            expected="the same parameters, in the same order, with the same options, on all ranks",
            got=f"here first {shorten(groups[0], 2)}" if not same[0] else f"here {options[0]}",
            why="The ranks update the parts of each weight together",
            fix="build groups in the order of model.named_parameters(), not from a set; drive learning rates by "
            "numbers that all ranks have alike, such as a loss that was all-reduced",
        )


def _format_option(value: Any) -> str:
    """An option as it is compared: numbers by value, objects by their kind."""
    if isinstance(value, torch.Tensor):
        return str(value.tolist())
    plain = (bool, int, float, str, tuple, list, type(None))
    return repr(value) if isinstance(value, plain) else type(value).__name__


# --------------------------------------------------------------------------------------------------- writes in forward


def refuse_writes_in_forward(state: ShardedModel, unit: nn.Module) -> None:
    """Refuse parameters of a unit that are written to in its first forward that is trained. Local operation."""
    seen: list[tuple[torch.Tensor, Any, int]] = []

    def before(unit: nn.Module, args: Any) -> None:
        if torch.is_grad_enabled():  # else perhaps in inference mode, where nobody counts
            seen[:] = [
                (parameter, record, _torch.version_of(parameter))
                for parameter, record in _fsdp2.unsharded_parameters(unit)
                if not _te.is_quantized(_torch.local_of(parameter))  # kernels write those behind torch's back
            ]

    def after(unit: nn.Module, args: Any, output: Any) -> None:
        if _torch.in_backward() or not torch.is_grad_enabled():
            return
        while handles:
            handles.pop().remove()
        written = [record for parameter, record, version in seen if _torch.version_of(parameter) != version]
        seen.clear()
        if written:
            record_unsharded_params(unit)
            names = state.names()
            found = [names.get(id(_fsdp2.sharded_param_of(record)), "a parameter") for record in written]
            raise OrderError(
                f"{shorten(found, 3)}: written to in forward",
                expected="weights that a forward only reads",
                got="a write in place, as of nn.Embedding(max_norm=...), or of weight.clamp_() in a module's forward",
                why="It changes the gathered copy alone, which is released: the sharded weight stays as it was",
                fix="write to the parameters after the optimizer's step, under torch.no_grad()",
            )

    # After FSDP2's hook, which gathers, and before the one that releases.
    handles: list[Any] = [
        unit.register_forward_pre_hook(_torch.disable_compile(before)),
        unit.register_forward_hook(_torch.disable_compile(after), prepend=True),
    ]


# ------------------------------------------------------------------------------------------------- split backwards


def check_first_backward(state: ShardedModel) -> None:
    """Refuse, at the first backward of a pipeline's stage, a schedule that splits backward. Local operation.

    Zero-bubble schedules compute gradients of a stage's inputs first, and those of its weights in a second backward
    through the same graph. Modules of TransformerEngine compute both at once, and free what they have saved.
    """
    if not any(_te.kind_of(module) for module in state.model.modules()):
        return
    handles: list[Any] = []

    def watch(module: nn.Module, args: Any, output: Any) -> None:
        for tensor in _torch.flatten(output)[0]:
            leaf = _parameter_leaf(tensor.grad_fn) if isinstance(tensor, torch.Tensor) else None
            if leaf is not None:
                tensor.register_hook(functools.partial(_refuse_split, handles, leaf))

    handles.append(state.model.register_forward_hook(_torch.disable_compile(watch)))


def _parameter_leaf(node: Any) -> Any:
    """The node of a graph that is nearest to its end and takes a parameter's gradient; ``None`` if there is none."""
    waiting, seen = deque([node]), {node}
    while waiting:
        node = waiting.popleft()
        if isinstance(getattr(node, "variable", None), torch.nn.Parameter):
            return node
        more = {inner for inner, _ in getattr(node, "next_functions", ()) if inner is not None} - seen
        waiting.extend(more)
        seen |= more
    return None


def _refuse_split(handles: list[Any], leaf: Any, gradient: torch.Tensor) -> None:
    """At a gradient of the stage's output; once a backward has been whole, nobody looks again."""
    if _fsdp2.defers_leaf_gradient(leaf):
        raise OrderError(
            "a backward for the inputs of a pipeline's stage alone, with another one for its weights to come",
            expected="one backward for both, as modules of TransformerEngine compute them",
            got="a schedule that splits backward (zero bubble)",
            fix="PipelineStage(..., dw_builder=lambda: lambda: None), which computes both in the first; or a schedule "
            "that does not split, such as Schedule1F1B or ScheduleInterleaved1F1B",
        )
    while handles:
        handles.pop().remove()


# ------------------------------------------------------------------------------------------------- states and copies


def _refuse_state_of_others(step: Step, parameters: list[torch.Tensor]) -> None:
    """Raise for state that another rank has pickled, and for main weights that the optimizer does not update."""
    follows = hasattr(step.optimizer, KEEPS_MAIN_WEIGHTS) or _te.is_fused_adam(step.optimizer)
    for parameter in parameters:
        held = step.optimizer.state.get(parameter, {})
        for name, value in held.items():
            if isinstance(parameter, DTensor) and _torch.is_of_another_rank(value, parameter):
                raise CheckpointError(
                    f"{step.where}: {name} of {step.names[id(parameter)]}",
                    expected="this rank's part",
                    got="that of another rank, as torch.load of a file that one rank saved gives it",
                    why="torch.save writes of a sharded tensor the part of the rank that calls it",
                    fix="te_fsdp.checkpoint.save and load, on all ranks",
                )
            shape = getattr(value, "shape", ())
            if (
                isinstance(parameter, DTensor)
                and not isinstance(value, DTensor)
                and _is_whole(shape, parameter)
            ):
                raise CheckpointError(
                    f"{step.where}: {name} of {step.names[id(parameter)]}",
                    expected="this rank's part, a DTensor",
                    got=f"a tensor of the unsharded parameter's shape {tuple(shape)}, as a full state dict has it",
                    why="optimizer.load_state_dict takes state as it is",
                    fix="te_fsdp.checkpoint.load; or torch.distributed.checkpoint.state_dict.set_optimizer_state_dict("
                    "model, optimizer, state, options=StateDictOptions(full_state_dict=True)) with names as keys",
                )
        if not follows and MAIN in held:
            raise OrderError(
                f"{step.where}: {step.names[id(parameter)]}: a main weight in the optimizer's state",
                expected="an optimizer that te_fsdp.main_weights was called with",
                got="another one, such as a copy.copy of it, which has its state alone",
                why="It would update the low-precision weight, and leave the main weight as it was",
                fix="step with the optimizer that was given to te_fsdp.main_weights",
            )


def _is_whole(shape: Any, parameter: DTensor) -> bool:
    """Return whether a plain state tensor has the shape of an unsharded parameter, which is not that of the shard."""
    return tuple(shape) == tuple(parameter.shape) and tuple(shape) != tuple(_torch.local_of(parameter).shape)


def _refuse_differing_copies(state: ShardedModel) -> None:
    """Raise where ranks that hold copies hold different ones. Collective over every axis that copies a parameter."""
    held: dict[dist.ProcessGroup, list[tuple[str, torch.Tensor]]] = {}
    for place in iter_param_owners(state.model):
        # Weights may be gathered now.
        shard = place._replace(parameter=cast("torch.nn.Parameter", shard_of(place.parameter)))
        groups = [*replica_groups_of_dtensor(shard.parameter), *replica_groups_of_plan(state, shard)]
        if groups:
            value = checksum(_torch.local_of(shard.parameter))
            for group in groups:
                held.setdefault(group, []).append((place.label, value))
    bad = list(dict.fromkeys(label for label, is_same in _compared(held) if not is_same))
    if bad:
        raise InitError(
            f"{shorten(bad)}: copies differ between ranks",
            expected="equal values on all ranks that hold a weight's copies, before the first step",
            got=f"{len(bad)} parameter(s) that differ",
            why="Something was written to them rank by rank, such as nn.init with a seed for each rank",
            fix="equal seeds on all ranks when weights are written; or te_fsdp.materialize(model, seed=...)",
        )


def _equal_shards(state: ShardedModel) -> list[str]:
    """Parameters of which all ranks of an axis hold the same part, of values that are not all the same.

    So does ``parameter.to_local().normal_()`` with equal seeds leave them. Experts, which may begin as copies of one,
    are left out. Collective over every axis that cuts a parameter.
    """
    cut: dict[dist.ProcessGroup, list[tuple[tuple[str, str, torch.Tensor], torch.Tensor]]] = {}
    for name, p in state.parameters().items():
        local = _torch.local_of(p)
        if not isinstance(p, DTensor) or p.ndim > 2 or state.is_expert(name) or _te.is_quantized(local):
            continue
        if p.numel() < _TELLING * p.device_mesh.size() or getattr(p, MEANT, False):
            continue
        names = p.device_mesh.mesh_dim_names or ()
        for axis, placement in enumerate(p.placements):
            if _torch.shard_dim_of(placement) is not None and p.device_mesh.size(axis) > 1:
                part = (name, names[axis], local), checksum(local)
                cut.setdefault(p.device_mesh.get_group(axis), []).append(part)
    found: dict[str, str] = {}
    for (name, axis, local), is_same in _compared(cut):
        if is_same and not bool(is_constant(local)):
            found.setdefault(name, f"{name} (all ranks of {axis})")
    return list(found.values())


def _compared(held: Mapping[dist.ProcessGroup, list[tuple[T, torch.Tensor]]]) -> Iterator[tuple[T, bool]]:
    """What a checksum is of, and whether all ranks of its group have the same. Collective: two integers for each."""
    for group, sums in held.items():
        same = are_equal(torch.stack([value for _, value in sums]), group).tolist()
        yield from zip((what for what, _ in sums), same, strict=True)


# -------------------------------------------------------------------------------------------------- unfit optimizers


def refuse_unsupported_optimizer(optimizer: Optimizer, held: list[torch.Tensor]) -> None:
    """Raise for an optimizer whose step would fail, or be wrong, on the sharded ones of ``held``. Local operation.

    docs/optimizers.md has the table of those that are exact.
    """
    sharded = [p for p in held if isinstance(p, DTensor)]
    refusal = _unsupported_reason(optimizer, sharded) if sharded else None
    if refusal is not None:
        got, why, fix = refusal
        raise PlacementError(
            f"{type(optimizer).__name__} of sharded parameters",
            expected="parameters that it can update",
            got=got,
            why=why,
            fix=fix,
        )


def _unsupported_reason(optimizer: Optimizer, sharded: list[DTensor]) -> tuple[str, str, str] | None:
    """What it has got, why it cannot update that, and what to do."""
    kind, got = type(optimizer), f"{len(sharded)} sharded ones"
    if kind in [getattr(torch.optim, unfit) for unfit in _UNFIT]:
        fix = "an optimizer that works element by element, such as torch.optim.AdamW"
        return got, "It uses operations that torch's DTensor refuses", fix
    if _te.is_fused_sgd(optimizer):
        why = "TransformerEngine hands them to a kernel as DTensors, which have no memory of their own"
        return got, why, "torch.optim.SGD(..., foreach=True)"
    if kind is getattr(torch.optim, "Muon", None) and any(map(_has_empty_shards, sharded)):
        fix = "te_fsdp.Muon(model, params, ...), which takes any shards"
        return "some of which a rank has no rows", "torch's DTensor cannot update them", fix
    if isinstance(optimizer, torch.optim.LBFGS):
        return _flat_vector_problem(sharded)
    # One operator for all parameters, that DTensor may have no rule for.
    operator = next((name for fused, name in _FUSED.items() if isinstance(optimizer, fused)), None)
    ids = set(map(id, sharded))
    for group in optimizer.param_groups if operator is not None else ():
        if not group.get("fused") or not any(id(p) in ids for p in group["params"]):
            continue
        by_tensor = isinstance(group.get("lr"), torch.Tensor)
        if not _torch.has_rule(f"{operator}.{'tensor_lr' if by_tensor else 'default'}"):
            return (
                f"{got}, and fused=True",
                f"This torch's DTensor has no rule for {operator}",
                f"{kind.__name__}(..., foreach=True), which takes a few kernels as well; Adam and AdamW take "
                "fused=True",
            )
    return None


def _flat_vector_problem(sharded: list[DTensor]) -> tuple[str, str, str] | None:
    """``LBFGS`` has one vector of all gradients: DTensor puts it together of equal parts of rows alone."""
    fix = "sizes that dp_shard divides and no tp, parameters that are all trained; or torch.optim.AdamW"
    for parameter in sharded:
        mesh, dims = parameter.device_mesh, map(_torch.shard_dim_of, parameter.placements)
        cut = [
            (mesh.size(axis), dim) for axis, dim in enumerate(dims) if dim is not None and mesh.size(axis) > 1
        ]
        # Whether each rank holds as many whole rows as any other, or all: the same on all ranks.
        is_equal = not cut or (len(cut) == 1 and cut[0][1] == 0 and parameter.shape[0] % cut[0][0] == 0)
        if not is_equal:
            got = f"{label_of(parameter)}, which ranks do not hold equal parts of rows of"
            return got, "It puts all gradients into one vector, which DTensor does with such parts alone", fix
        if not parameter.requires_grad:
            why = "It takes zeros for a gradient that is not there, as a tensor that DTensor takes with no others"
            return f"{label_of(parameter)}, which is not trained", why, fix
    return None


def _has_empty_shards(parameter: DTensor) -> bool:
    """Whether some rank holds nothing of it: the same on all ranks."""
    lengths = list(parameter.shape)
    # Later axes cut first.
    for axis in reversed(range(parameter.device_mesh.ndim)):
        dim = _torch.shard_dim_of(parameter.placements[axis])
        if dim is not None:
            ranks = parameter.device_mesh.size(axis)
            lengths[dim], whole = -(-lengths[dim] // ranks), lengths[dim]
            if lengths[dim] * (ranks - 1) >= whole and ranks > 1:
                return True
    return False
