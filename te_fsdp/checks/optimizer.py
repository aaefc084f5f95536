"""Checks of an optimizer: current parameters of the model, the same on all ranks, state of this rank."""

# [Note: replaced and copied parameters] **Replaced parameters.** Binding, sharding and materializing replace
# parameters. A step on the old ones would be lost:
#
#     optimizer built before    contains                       the model has, and gradients go to
#     set_device_mesh           plain parameters               DTensors on tp
#     fully_shard               plain ones, or DTensors on tp  FSDP2's shards
#     materialize               shards on meta                 shards on the device
#
# Each replacement marks the old object, which exists as long as something refers to it.
#
# **Copied optimizers.** An optimizer that was copied or pickled without its model contains copies. Copies of
# DTensors are marked, pickles leave an empty mark, copies of plain parameters none. Those are recognized by
# the optimizer, whose constructor did not run, and by a model that has parameters of the same kind.

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from te_fsdp.checks.model import not_in_the_model, refuse_changed_parameters
from te_fsdp.checks.weights import compare_copies, refuse_equal_parts
from te_fsdp.collectives.agreement import are_equal, digest, gather_by_rank, raised_on_all_ranks
from te_fsdp.collectives.rendezvous import collective_call, is_capturing, is_simulated
from te_fsdp.errors import CheckpointError, MeshError, OrderError, shorten
from te_fsdp.features.hfsdp.gradients import refuse_unaveraged
from te_fsdp.features.main_params import MAIN, main_parameters_of
from te_fsdp.features.unsupported_optimizers import check_optimizer_of_quantized, refuse_unsupported_optimizer
from te_fsdp.lifecycle import Step, gradient_of
from te_fsdp.modules.torch_units import unsharded_params
from te_fsdp.optimizer_step import has_mixed_groups
from te_fsdp.process_modules import modules_of_process, registered_at
from te_fsdp.records import (
    COPIED,
    KEEPS_MAIN_WEIGHTS,
    MODULE,
    PARAMETER,
    binding_of,
    get_or_create_record,
    get_record,
    label_of,
)
from te_fsdp.sharded_model import ShardedModel, shard_of, sharded_model_of
from te_fsdp.tensor_checksums import checksum
from te_fsdp.upstream import te as _te, torch_dtensor as _torch
from te_fsdp.upstream.torch_functions import after_failed_load

#: States without which a step of torch's optimizers fails, or begins with zeros.
_STATES: dict[type, tuple[str, ...]] = {
    torch.optim.Adam: ("step", "exp_avg", "exp_avg_sq"),  # also AdamW
    torch.optim.SGD: ("momentum_buffer",),
    torch.optim.Adagrad: ("step", "sum"),
    torch.optim.RMSprop: ("step", "square_avg"),
    torch.optim.Adamax: ("step", "exp_avg", "exp_inf"),
    torch.optim.NAdam: ("step", "exp_avg", "exp_avg_sq"),
    torch.optim.RAdam: ("step", "exp_avg", "exp_avg_sq"),
}


# --------------------------------------------------------------------------------------- replaced and copied parameters


#: The optimizers of this process that are no copies, and the copies whose parameters modules have.
_valid: weakref.WeakSet[Optimizer] = weakref.WeakSet()


def refuse_replaced(step: Step) -> None:
    """Raise OrderError for parameters that modules no longer have, or that are copies of a sharded model's. Local."""
    marked = {id(parameter): parameter for parameter, record in step.recorded_params if record.replaced_by}
    is_copy = step.optimizer not in _valid and _torch.is_copied_optimizer(step.optimizer)
    if not marked and not is_copy:
        _valid.add(step.optimizer)
        return
    params = (parameter for group in step.optimizer.param_groups for parameter in group["params"])
    # Parameters without a record, or with the empty one of a pickle.
    unmarked = {
        id(parameter): parameter for parameter in params if is_copy and not parameter.__dict__.get(PARAMETER)
    }
    # A step is correct for a parameter that another model still has, or that belongs to a copy of the model.
    to_find = {*marked, *unmarked}
    for owner, name in registered_at(to_find):
        key = id(owner._parameters[name])
        to_find.discard(key)
        unmarked.pop(key, None)
        if key in marked:
            get_or_create_record(marked.pop(key)).replaced_by = None
    # A copy was pickled, or has the kind of a sharded model's parameter. _sharded_kinds visits all modules of the
    # process, so it runs only if a copy is suspected.
    kinds = _sharded_kinds() if unmarked else {}
    if all(PARAMETER in parameter.__dict__ or _kind(parameter) in kinds for parameter in unmarked.values()):
        marked |= unmarked
    if not marked:
        if is_copy:
            _valid.add(step.optimizer)
        return
    parameter = next(iter(marked.values()))
    record = get_record(parameter)
    if record is not None and record.replaced_by is not None and record.replaced_by[1] != COPIED:
        name, by = record.replaced_by
    else:  # a copy has the name of its original, or of its kind
        original = record.copied_from() if record is not None and record.copied_from is not None else None
        state = original.state() if original is not None and original.state is not None else None
        names = state.parameters() if state is not None else {}
        fqn = next((name for name, candidate in names.items() if get_record(candidate) is original), None)
        name, by = fqn or _sharded_kinds().get(_kind(parameter)) or label_of(parameter), COPIED
    count = sum(len(group["params"]) for group in step.optimizer.param_groups)
    more = f", and {len(marked) - 1} more of its {count}" if len(marked) > 1 else ""
    got = f"one from before {by}, which replaced it"
    expected_owner = "new"
    fix = "build the optimizer after te_fsdp.fully_shard and te_fsdp.materialize, from model.parameters()"
    if by == COPIED:
        got, expected_owner = "a copy, as copy.deepcopy or a pickle of an optimizer creates", "model's"
        fix = "build a new optimizer from model.parameters(), and call load_state_dict(optimizer.state_dict()) on it"
    raise OrderError(
        f"{step.where}: {name}{more}",
        expected="current parameters of the model",
        got=got,
        why=f"Gradients are assigned to the {expected_owner} parameter: the step would change nothing",
        fix=fix,
    )


def _kind(parameter: torch.Tensor) -> tuple[Any, ...]:
    return isinstance(parameter, DTensor), tuple(parameter.shape), parameter.dtype


def _sharded_kinds() -> dict[tuple[Any, ...], str]:
    """Return the kinds of parameters of this process's sharded models, with a name for each. For errors only."""
    names: dict[tuple[Any, ...], str] = {}
    for record in [module.__dict__.get(MODULE) for module in modules_of_process()]:
        if record is not None and record.sharded is not None:
            for name, parameter in record.sharded.parameters().items():
                names.setdefault(_kind(parameter), name)
    return names


#: The number of parameters of each optimizer of bound models whose parameters were checked.
_checked: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()


def refuse_copied_values(step: Step) -> bool:
    """Raise for tensors without gradients that have the values of trained parameters. Local operation.

    Return whether the parameters can be regarded as checked: there were gradients.
    """
    params = {id(p): p for group in step.optimizer.param_groups for p in group["params"]}
    # A closure or a hook may assign gradients later. Classes outside of torch may compute them in the step.
    is_known = type(step.optimizer).__module__.startswith("torch.optim.") or _te.is_fused_adam(step.optimizer)
    if step.closure is not None or not is_known or _torch.has_own_step_hooks(step.optimizer):
        return True
    idle = {key: p for key, p in params.items() if gradient_of(p) is None and not get_record(p)}
    has_gradients = len(idle) < len(params)
    shapes: set[torch.Size] = set()
    memory: dict[int, str] = {}
    for module in modules_of_process() if idle else ():
        for name, registered in module.__dict__.get("_parameters", {}).items():
            idle.pop(id(registered), None)
            if registered is None or get_record(registered) is None:
                continue
            shard = shard_of(registered)
            if gradient_of(shard) is not None:
                local, binding = _torch.local_of(shard), binding_of(module)
                label = binding.label(name) if binding is not None else f"{type(module).__name__}.{name}"
                shapes |= {shard.shape, local.shape}
                if not _te.is_quantized(local):
                    memory[_torch.memory_id(local)] = label
    local_params = [(p, _torch.local_of(p)) for p in idle.values()]
    views = [
        memory.get(_torch.memory_id(t)) for _, t in local_params if not _te.is_quantized(t) and t.numel()
    ]
    names = list(filter(None, views))
    # Copies have their own memory. They are recognized if all tensors could be copies, and none has a gradient.
    are_copies = len(idle) == len(params) and all(p.shape in shapes for p in idle.values())
    if names or (are_copies and any(p.dim() > 1 for p in idle.values())):
        what = names[0] if names else f"a tensor of shape {tuple(next(iter(params.values())).shape)}"
        more = f", and {max(len(names), 1) - 1} more of its {len(params)}" if len(names) > 1 else ""
        raise OrderError(
            f"{step.where}: {what}{more}",
            expected="the model's parameters",
            got="a different tensor "
            + ("with the memory of this one" if names else "without a gradient")
            + ", as detach, .data, clone and state_dict return",
            why="Gradients are assigned to the model's parameter: the step would change nothing",
            fix="build the optimizer from model.parameters(), or assign .grad of its tensors before the step",
        )
    return has_gradients or bool(shapes)


def refuse_gathered_by_torch(step: Step) -> None:
    """Raise for unsharded parameters of units of torch's own ``fully_shard``, from a call of ``unshard``. Local."""
    params = {id(p): p for group in step.optimizer.param_groups for p in group["params"]}
    if _checked.get(step.optimizer) == len(params):
        return
    for parameter in unsharded_params():
        if id(parameter) in params:
            raise _gathered(
                step, parameter, "while a unit is unsharded", "before unshard(), or after reshard()"
            )
    if refuse_copied_values(step):
        _checked[step.optimizer] = len(params)


def refuse_gathered(step: Step) -> None:
    """Raise for unsharded parameters, which the model has while weights are kept between microbatches. Local."""
    for parameter, record in step.recorded_params:
        if record.fsdp_param is not None and shard_of(parameter) is not parameter:
            fix = "before the first forward, or after te_fsdp.release_params(model)"
            raise _gathered(step, parameter, "while its weights are kept between microbatches", fix)


def _gathered(step: Step, parameter: torch.Tensor, when: str, fix: str) -> OrderError:
    return OrderError(
        f"{step.where}: an unsharded parameter of shape {tuple(parameter.shape)}",
        expected="sharded parameters",
        got=f"a parameter that the model has {when}",
        why="Its update would be lost",
        fix=f"build the optimizer {fix}",
    )


# ---------------------------------------------------------------------------------------------------- options and state


def refuse_closure(step: Step) -> None:
    """Raise if the backward of a closure would come after work that the step does once, before it. Local operation."""
    if not step.models or step.closure is None:
        return
    records = [get_record(parameter) for _, parameters in step.models for parameter in parameters]
    if has_mixed_groups(step.optimizer) or any(
        f.tp_replica or (f.plan is not None and f.plan.gradient_dtype is not None) for f in records if f
    ):
        raise OrderError(
            f"{step.where}(closure) of a model with tensor parallelism, with parameters that "
            "are not sharded, or with gradients in main_grads_dtype",
            expected="step() after backward()",
            got="a closure",
            why="Its gradients would exist only after the functions that make them equal over tp, or cast them",
            fix="call backward() first, then step() without a closure",
        )


def require_main_weights(step: Step) -> None:
    """Raise if a quantized weight with a gradient has no fp32 main weight. Local operation."""
    for label, parameter, _ in step.quantized:
        if parameter.grad is not None or getattr(parameter, "decoupled_grad", None) is not None:
            check_optimizer_of_quantized(step.optimizer, label)
            return  # the same for all weights


def require_outer_averages(step: Step) -> None:
    """Raise before a step of HFSDP whose gradients would not be averaged over ``dp_replicate``. Local operation."""
    if any(state.outer == "optim" for state, _ in step.models) and main_parameters_of(step.optimizer) is None:
        for parameter, _ in step.recorded_params:
            if gradient_of(parameter) is not None:
                refuse_unaveraged(parameter, f"{step.where}()")


def check_first_step(step: Step) -> None:
    """Check an optimizer's parameters and state, and that copies of weights are equal, in its first step.

    Checked again after its number of parameters or its state has changed. Collective over the mesh then.
    """
    count = sum(len(group["params"]) for group in step.optimizer.param_groups)
    for state, parameters in step.models:
        checked = state.checked.optimizers.get(step.optimizer)
        if checked == (count, id(step.optimizer.state)):  # loading assigns a different dict
            continue
        # The checks read values on the host, which a capture forbids. An eager step checks them.
        if is_capturing():
            return
        mesh = state.meshes.device_mesh
        with collective_call("first step of an optimizer", mesh), raised_on_all_ranks(mesh, step.where):
            refuse_changed_parameters(state)
            refuse_copied_values(step)
            needed = _states_of(step.optimizer)
            for parameter in parameters if needed else ():
                state_keys = {name for name in step.optimizer.state.get(parameter, {}) if name != MAIN}
                if state_keys and not state_keys.issuperset(needed):
                    raise _another_class(
                        f"{step.where}: states of {step.names[id(parameter)]}",
                        needed,
                        f"{', '.join(sorted(state_keys))}, as of an optimizer of a different class",
                    )
            _refuse_state_of_other_ranks(step, parameters)
            refuse_unsupported_optimizer(step.optimizer, parameters)
        if not is_simulated():
            _compare_options(state, step)
            # te_fsdp does not average these. Those of other wrappers (DistributedDataParallel), and those that the
            # user averages, are equal by now.
            mesh = state.meshes.fsdp
            others = [
                p
                for group in step.optimizer.param_groups
                for p in group["params"]
                if type(p) is torch.nn.Parameter and get_record(p) is None and p.requires_grad
            ]
            if others and mesh is not None and mesh.size() > 1:
                gradients = [p.grad for p in others if p.grad is not None and p.grad.layout is torch.strided]
                # The sum of the checksums may wrap, but is equal if they are.
                total = sum(int(checksum(gradient)) for gradient in gradients) % (1 << 60)
                if not bool(are_equal([total], mesh)):
                    other_ids = {id(p) for p in others}
                    labels = [f"{type(owner).__name__}.{name}" for owner, name in registered_at(other_ids)]
                    raise not_in_the_model(
                        list(dict.fromkeys(labels)) or ["a parameter"], len(others), "left out"
                    )
            # Once per model: a second optimizer updates parameters of a model that was compared.
            if not state.checked.optimizers:
                compare_copies(state, step.where)
                refuse_equal_parts(state, step.where)
        state.checked.optimizers[step.optimizer] = count, id(step.optimizer.state)


def compare_options(step: Step) -> None:
    """Raise unless all ranks have given the optimizer the same parameters and options. Collective over the mesh."""
    for state, _ in () if is_simulated() or is_capturing() else step.models:
        _compare_options(state, step)


def _compare_options(state: ShardedModel, step: Step) -> None:
    mesh = state.meshes.device_mesh
    if mesh.size() == 1:
        return
    # The order matters if a step communicates for several parameters together.
    ordered = state.meshes.size("tp") > 1 or state.outer == "optim"
    names = state.names()
    params = [p for group in step.optimizer.param_groups for p in group["params"] if id(p) in names]
    # Quantization reduces the amaxes of weights in the order of the groups.
    ordered = ordered or any(_te.is_quantized(_torch.local_of(p)) for p in params)
    groups, options = [], format_options(step.optimizer)
    for group in step.optimizer.param_groups:
        fqns = [names[id(p)] for p in group["params"] if id(p) in names]
        # Each rank of ep has different experts, perhaps more of them.
        comparable = (name.rstrip("0123456789") if state.is_expert(name) else name for name in fqns)
        groups.append(list(dict.fromkeys(comparable)) if ordered else sorted(set(comparable)))
    clipping, max_norm, norm_type = state.checked.clipping
    same = are_equal([digest(repr(groups)), digest(repr(options)), clipping >> 3], mesh).tolist()
    if not same[2]:
        pairs = gather_by_rank(f"max_norm={max_norm:g}, norm_type={norm_type:g}", mesh)
        raise MeshError(
            f"{step.where}: clip_grad_norm_ had different arguments on the ranks",
            expected="the same max_norm and norm_type on all ranks of the model in each step",
            got="in the last call "
            + shorten([f"{pairs[rank]} on rank {rank}" for rank in sorted(pairs)], 4, "; "),
            why="The ranks scale the shards of each gradient together",
            fix="compute both from numbers that are the same on all ranks, such as the returned norm",
        )
    if not all(same):
        raise MeshError(
            f"{step.where}: the optimizers differ between ranks",
            expected="the same parameters, in the same order, with the same options, on all ranks",
            got=f"here first {shorten(groups[0], 2)}" if not same[0] else f"here {options[0]}",
            why="The ranks update the shards of each weight together",
            fix="build groups in the order of model.named_parameters(), not from a set; drive learning rates by "
            "numbers that are the same on all ranks, such as an all-reduced loss",
        )


def format_options(optimizer: Optimizer) -> list[dict[str, str]]:
    """Return the options of each group as text. Local operation; tensors on a device are read."""
    # Numbers are compared by value, objects by their class. Names of experts (``param_names``) differ between ep ranks.
    plain = (bool, int, float, str, tuple, list, type(None))
    options = []
    for group in optimizer.param_groups:
        values = {
            k: v.tolist() if isinstance(v, torch.Tensor) else v
            for k, v in group.items()
            if k not in ("params", "param_names")
        }
        options.append({k: repr(v) if isinstance(v, plain) else type(v).__name__ for k, v in values.items()})
    return options


def refuse_unknown_state(optimizer: Any, parameter: torch.Tensor, name: str) -> None:
    """Raise for a loaded state that TE's ``FusedAdam`` does not have. Local operation."""
    raise _another_class(
        f"{type(optimizer).__name__}.load_state_dict: {name} of {label_of(parameter)}",
        optimizer.name_to_dtype_map,
        "a state of a different class, such as torch.optim.AdamW",
    )


def explain_failed_loads(state: ShardedModel) -> None:
    """Name states of a different class that torch's optimizers cannot load from now on. Local operation."""
    # One function of the module: each function that is passed is called once more.
    after_failed_load(_refuse_failed_load)


def _refuse_failed_load(optimizer: Optimizer) -> None:
    needed = _states_of(optimizer)
    for parameter in [p for group in optimizer.param_groups for p in group["params"]]:
        state, param_state = sharded_model_of(parameter), optimizer.state.get(parameter)
        if state is not None and explain_failed_loads in state.checks.sharded and param_state:
            raise _another_class(
                f"{type(optimizer).__name__}.load_state_dict: states of {state.names().get(id(parameter))}",
                needed,
                f"{', '.join(sorted(param_state))}, as of an optimizer of a different class",
            )


def _states_of(optimizer: Optimizer) -> tuple[str, ...]:
    return next((names for cls, names in _STATES.items() if isinstance(optimizer, cls)), ())


def _another_class(problem: str, needed: Iterable[str], got: str) -> CheckpointError:
    return CheckpointError(
        problem,
        expected=f"the states of this class: {', '.join(needed)}",
        got=got,
        fix="load the state into an optimizer of the class that saved it, or begin with new state",
    )


def _refuse_state_of_other_ranks(step: Step, parameters: list[torch.Tensor]) -> None:
    """Raise for state that another rank has pickled, and for main weights that the optimizer does not update."""
    follows = hasattr(step.optimizer, KEEPS_MAIN_WEIGHTS) or _te.is_fused_adam(step.optimizer)
    of_torch = type(step.optimizer).__module__.startswith("torch.optim.")
    for parameter in parameters:
        param_state = step.optimizer.state.get(parameter, {})
        for name, value in param_state.items():
            if isinstance(parameter, DTensor) and _torch.is_shard_of_other_rank(value, parameter):
                raise CheckpointError(
                    f"{step.where}: {name} of {step.names[id(parameter)]}",
                    expected="this rank's shard",
                    got="the shard of a different rank, as in a file that one rank saved with torch.save",
                    why="torch.save writes the shard of the rank that calls it",
                    fix="use te_fsdp.checkpoint.save and load, on all ranks",
                )
            shape = tuple(getattr(value, "shape", ()))
            if not isinstance(parameter, DTensor) or isinstance(value, DTensor) or not shape:
                continue
            # Other optimizers may store plain shards. On one rank these have the shape of the unsharded parameter.
            is_shard = not of_torch and shape == tuple(_torch.local_of(parameter).shape)
            if shape == tuple(parameter.shape) and not is_shard:
                raise CheckpointError(
                    f"{step.where}: {name} of {step.names[id(parameter)]}",
                    expected="this rank's shard, a DTensor",
                    got=f"a tensor of the unsharded parameter's shape {shape}, as in a full state dict",
                    why="optimizer.load_state_dict does not shard the state",
                    fix="use te_fsdp.checkpoint.load, or torch.distributed.checkpoint.state_dict."
                    "set_optimizer_state_dict(model, optimizer, state, options=StateDictOptions(full_state_dict=True)) "
                    "with names as keys",
                )
        if not follows and MAIN in param_state:
            raise OrderError(
                f"{step.where}: {step.names[id(parameter)]}: a main weight in the optimizer's state",
                expected="the optimizer of the te_fsdp.main_weights call",
                got="a different optimizer, such as a copy.copy of it, or one that has loaded this state",
                why="It would update the low-precision weight, and not the main weight",
                fix="call step() of that optimizer; call te_fsdp.main_weights before load_state_dict",
            )
