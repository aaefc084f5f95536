"""``main_weights``: fp32 main weights for an optimizer, initialized with the model's initial values.

:func:`shard_optimizer` shards them, and the optimizer's state, over all ranks that replicate a parameter. TE's
FusedAdam keeps main weights itself. For torch's optimizers they replace the parameters during ``step``
([Note: main parameters in a step] in ``main_params.py``).
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import logging
from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from te_fsdp.collectives.agreement import are_equal, digest
from te_fsdp.collectives.rendezvous import collective_call
from te_fsdp.collectives.watching import run_while_all_live
from te_fsdp.errors import MeshError, OrderError, PrecisionError, shorten
from te_fsdp.features.full_states import unpad_full_states
from te_fsdp.features.hfsdp.gradients import ShardedOptimizer
from te_fsdp.features.hfsdp.optimizer_shards import (
    SINGLE,
    OptimizerShard,
    group_by_key,
    optimizer_shard,
    reason_for_fp32,
)
from te_fsdp.features.main_params import (
    MAIN,
    MainParameters,
    initial_main_weight,
    is_low_precision,
    main_parameters_of,
    optimizer_shard_in,
    rekey_scales,
)
from te_fsdp.features.unsupported_optimizers import check_optimizer_of_quantized, refuse_unsupported_optimizer
from te_fsdp.features.written_weights import record_weight_versions, update_written_main_weights
from te_fsdp.lifecycle import (
    Step,
    StepFunctions,
    quantized_of_optimizer,
    register_step_functions,
    run_checks,
    runs_if,
    sync_tp_replicas,
)
from te_fsdp.modules.torch_units import reshard_units
from te_fsdp.optimizer_step import registered_optimizers
from te_fsdp.quantized.amax import refresh_quantized
from te_fsdp.records import KEEPS_MAIN_WEIGHTS, label_of, require_model, require_optimizer
from te_fsdp.sharded_model import sharded_model_of
from te_fsdp.upstream import fsdp2_units, te as _te, torch_dtensor as _torch

_log = logging.getLogger("te_fsdp")

AnyOptimizer = TypeVar("AnyOptimizer", bound=Optimizer)


def check_optimizer(model: nn.Module, optimizer: Optimizer) -> None:
    """Check that an optimizer has only current parameters of the model; raise otherwise.

    Sharding and materialization replace parameters of the model. An optimizer built before would keep updating the
    previous ones, without effect on the model. The optimizer may omit parameters. The model may be sharded or not.
    Local operation that reshards FSDP2 units.

    Raises:
        OrderError: The optimizer has parameters that are not the model's. The error contains their number.
        PlacementError: A step of this torch optimizer would fail on sharded parameters (docs/optimizers.md).
    """
    require_model(model, "check_optimizer(model, optimizer)")
    require_optimizer(optimizer, "check_optimizer(model, optimizer)")
    # An unsharded unit has different parameter objects than the optimizer.
    fsdp2_units.wait_and_reshard(model)
    current = {id(p) for p in model.parameters()}
    params = [p for group in optimizer.param_groups for p in group["params"]]
    foreign = [p for p in params if id(p) not in current]
    if foreign:
        # They may be parameters of other sharded models.
        states = {id(state): state for state in map(sharded_model_of, foreign) if state is not None}
        living = {id(parameter) for state in states.values() for parameter in state.parameters().values()}
        if others := sum(id(parameter) in living for parameter in foreign):
            # fully_shard of FSDP2 has renamed the class.
            kinds = [type(state.model).__name__.removeprefix("FSDP") for state in states.values()]
            raise OrderError(
                f"{type(optimizer).__name__}: {others} parameters of other sharded models ({shorten(kinds, 3)})",
                expected="one module that contains all models with parameters in the optimizer",
                got="one of these models",
                why="Main weights and checkpoints identify parameters by their names in one module",
                fix='models = torch.nn.ModuleDict({"a": a, "b": b}), and pass models to te_fsdp.main_weights, '
                "te_fsdp.shard_optimizer and te_fsdp.checkpoint; or use one optimizer per model",
            )
        raise OrderError(
            f"{type(optimizer).__name__}: {len(foreign)} of {len(params)} parameters are not the model's",
            expected="the current parameters of the model",
            got="different parameters, such as those from before fully_shard or materialize",
            why="Its step would not update the model",
            fix="build it after te_fsdp.fully_shard and te_fsdp.materialize, from model.parameters()",
        )
    refuse_unsupported_optimizer(optimizer, params)


def unwrap_optimizer(optimizer: Optimizer) -> Optimizer:
    """Return the optimizer inside of a wrapper that shares its state (accelerate's), else the optimizer. Local."""
    inner = getattr(optimizer, "optimizer", None)
    if isinstance(inner, Optimizer) and inner.state is optimizer.state:
        return unwrap_optimizer(inner)
    return optimizer


@contextlib.contextmanager
def rebind_optimizer_params(model: nn.Module, optimizer: Optimizer, where: str, fix: str) -> Iterator[None]:
    """Return a context in which a model is sharded. Afterwards the optimizer's groups contain the new parameters.

    Groups keep their options. Local operation. Raise OrderError (with the call's name and a fix) before any change if
    the optimizer has other parameters or has state.
    """
    # By name, because sharding replaces the objects.
    names = {id(parameter): name for name, parameter in model.named_parameters(remove_duplicate=False)}
    groups = [[names.get(id(parameter)) for parameter in group["params"]] for group in optimizer.param_groups]
    if any(name is None for group in groups for name in group) or optimizer.state:
        raise OrderError(
            f"{where}({type(optimizer).__name__})",
            expected="an optimizer over parameters of the model, before its first step",
            got="state" if optimizer.state else "different parameters",
            why="Its parameters are replaced by sharded ones",
            fix=fix,
        )
    yield
    sharded = dict(model.named_parameters(remove_duplicate=False))
    for group, fqns in zip(optimizer.param_groups, groups, strict=True):
        group["params"][:] = [sharded[name] for name in fqns if name is not None]


def _with_subclasses(kind: type) -> Iterator[type]:
    yield kind
    for below in type.__subclasses__(kind):
        yield from _with_subclasses(below)


def optimizers_of(parameters: Iterable[torch.Tensor]) -> list[Optimizer]:
    """Return every optimizer of this process with one of these parameters. Local operation, for loads only."""
    # The search inspects all objects of the garbage collector. It does not find objects in ``gc.freeze()``, which could
    # not be frozen individually again. Optimizers of sharded models that have stepped are known.
    parameters = list(parameters)
    ids = {id(parameter) for parameter in parameters}
    # Unknown ones are only included if they may keep main weights, as for fp32 parameters TE's FusedAdam alone does.
    may_keep = _te.is_loaded() or any(map(is_low_precision, parameters))
    # Compare types, because isinstance on proxies has side effects. Avoid a Python line per object: with a million
    # objects it would take longer than loading a model of 1 GiB.
    kinds, objects = set(_with_subclasses(Optimizer)), gc.get_objects() if may_keep else []
    listed = list(itertools.compress(objects, map(kinds.__contains__, map(type, objects))))
    optimizers = {id(optimizer): optimizer for optimizer in [*listed, *registered_optimizers]}.values()
    owners = []
    for optimizer in optimizers:
        main_parameters = optimizer.__dict__.get(KEEPS_MAIN_WEIGHTS)
        if main_parameters is not None:
            main_parameters.restore_params(optimizer)  # a failed step has left main parameters in the groups
        # A wrapper shares the groups of the optimizer inside, so one of them is sufficient.
        groups = optimizer.__dict__.get("param_groups", ())
        if any(id(parameter) in ids for group in groups for parameter in group["params"]):
            owners.append(optimizer)
    return owners


def main_weights(model: nn.Module, optimizer: Optimizer) -> None:
    """Create fp32 main weights in an optimizer for the model's quantized and low-precision parameters.

    Main weights start with the value before quantization if TE has kept it
    (``quantized_model_init(preserve_high_precision_init_val=True)``), which is then dropped. Otherwise they start with
    the parameter's value. Existing main weights (from a checkpoint or an earlier call) are not changed. Call it once
    after building the optimizer, before the first step. Local operation.

    With TE's FusedAdam, ``master_weights=True`` is required, and this call only sets initial values. With optimizers
    of ``torch.optim``, each ``step`` then updates the main weights (DTensors with the parameters' placements in
    ``optimizer.state[parameter]["master_param"]``) and quantizes each once. For formats with one scale per tensor this
    is a collective over the weight mesh. Memory: 4 bytes per parameter, and 4 more for fp32 gradients during ``step``.

    Args:
        model: Sharded and materialized model.
        optimizer: Optimizer over the model's parameters. It is not changed if all its parameters are fp32.

    Raises:
        OrderError: The optimizer has parameters that are not the model's, or has stepped without main weights.
        PrecisionError: A FusedAdam over quantized weights keeps no main weights, or not in fp32.
    """
    check_optimizer(model, optimizer)
    registered_optimizers.add(optimizer)
    register_step_functions(BEFORE_STEP, AFTER_STEP)
    if _te.is_fused_adam(optimizer):
        fused: Any = optimizer
        for label, parameter, local in quantized_of_optimizer(optimizer):
            check_optimizer_of_quantized(optimizer, label)
            # FusedAdam itself would initialize the main weight from the quantized weight, which has lost most
            # bits of the value.
            if not optimizer.state.get(parameter) and _te.high_precision_value(local) is not None:
                fused.initialize_state(parameter, False)
                fused.set_scaled_state(parameter, MAIN, initial_main_weight(local))
            # It is a copy of the weight on the CPU, which nothing reads any more.
            _te.drop_high_precision_value(local)
    elif not hasattr(optimizer, KEEPS_MAIN_WEIGHTS):
        # FP32 parameters are their own main weights.
        low = [p for g in optimizer.param_groups for p in g["params"] if is_low_precision(p)]
        if any(optimizer.state.get(p) for p in low):
            raise OrderError(
                f"main_weights({type(optimizer).__name__}) after its first step",
                expected="an optimizer without state",
                got="state that belongs to low-precision parameters",
                fix="call te_fsdp.main_weights right after building the optimizer",
            )
        if low:
            MainParameters(optimizer).create_all(optimizer)


def initialize_fused_adam(optimizer: Any, parameter: torch.Tensor) -> None:
    """Create the missing state of a parameter in TE's FusedAdam. Other optimizers are not changed. Local operation."""
    # By FusedAdam's own method, which stores more than the state itself.
    main_parameters, state_keys = main_parameters_of(optimizer), set(optimizer.state.get(parameter, ()))
    main_key = {MAIN} if main_parameters is not None else set()
    if not hasattr(optimizer, "initialize_state") or state_keys - main_key:
        return
    if main_parameters is None:
        # Remainders are the bits that bf16 lacks, so that parameters of other dtypes have none.
        low = parameter.dtype == torch.bfloat16
        optimizer.initialize_state(parameter, low and optimizer.store_param_remainders)
        return
    main, keeps = main_parameters.create(optimizer, parameter), optimizer.master_weights
    # With a main weight as parameter, FusedAdam would create a second main weight of it.
    optimizer.master_weights = keeps and main is None
    try:
        optimizer.initialize_state(parameter if main is None else main, False)
    finally:
        optimizer.master_weights = keeps
    if main is not None:
        # Between steps, state belongs to the parameter of the model.
        optimizer.state[parameter] |= optimizer.state.pop(main)
        rekey_scales(optimizer, main, parameter)


def main_weight(optimizer: Optimizer | None, parameter: torch.Tensor) -> torch.Tensor | None:
    """Return the local main weight of a parameter (this rank's rows if it is sharded), ``None`` without one. Local."""
    # FusedAdam's main weights of FP32 parameters are copies that its steps do not update (TE 2.20.2).
    has_one = optimizer is not None and is_low_precision(parameter)
    main = optimizer.state.get(parameter, {}).get(MAIN) if optimizer is not None and has_one else None
    return None if main is None else _torch.local_of(main)


# FusedAdam's own main weights of quantized weights are used the same way. FusedAdam alone would create an
# fp32 copy of each gradient and quantize weight by weight, with one amax reduction each (TE 2.18 to 2.20).
@runs_if("has_main_weights")
def use_fused_adam_master_weights(step: Step) -> None:
    """Install FusedAdam's main weights of quantized weights as main parameters, and local tensors for all."""
    optimizer: Any = step.optimizer
    if not step.recorded_params or not _te.is_fused_adam_class(type(optimizer)):
        return
    main_parameters = getattr(optimizer, KEEPS_MAIN_WEIGHTS, None)
    if main_parameters is None:
        main_parameters = MainParameters(optimizer, kept_by_fused_adam=True)
    if not main_parameters.shards_state:
        main_parameters.install_main_params_again()


#: Run around every step of an optimizer with main weights if no model is sharded (:mod:`te_fsdp.lifecycle`).
BEFORE_STEP: StepFunctions = (
    run_checks,
    update_written_main_weights,
    sync_tp_replicas,
    use_fused_adam_master_weights,
)
AFTER_STEP: StepFunctions = (refresh_quantized, record_weight_versions, reshard_units)


def optimizers_with_stale_main_weights(
    parameters: Iterable[torch.Tensor], except_of: Iterable[Optimizer] = ()
) -> list[Optimizer]:
    """Return the optimizers, except ``except_of``, whose next step would restore old weights from main weights."""
    # Optimizers inside of given wrappers (accelerate's) are excluded, because they share state.
    loaded = {id(optimizer.state) for optimizer in except_of}
    others = [o for o in optimizers_of(parameters) if id(o.state) not in loaded]
    return [o for o in others if any(MAIN in state for state in o.state.values())]


@torch.no_grad()
def set_main_weight(
    optimizer: Optimizer,
    parameter: torch.Tensor,
    local: torch.Tensor,
    value: torch.Tensor | None,
    *,
    make: bool = False,
) -> None:
    """Set a main weight to a weight's new value. ``local`` is the weight's local tensor. Local operation.

    Without a main weight nothing is changed. With ``make``, TE's FusedAdam creates the state of a quantized weight
    including zero moments, as its next step would. ``value`` is the fp32 value (local shape) from which the weight was
    quantized; ``None``: the parameter's own value. Main weights below fp32 are computed from the weight.
    """
    quantized = _te.is_quantized(local)
    if make and quantized and value is not None and getattr(optimizer, "master_weights", False):
        params = (p for group in optimizer.param_groups for p in group["params"])
        if any(parameter is p for p in params):
            initialize_fused_adam(optimizer, parameter)
    main = main_weight(optimizer, parameter)
    if main is None:
        return
    if main.dtype == torch.int16:
        main.zero_()  # remainders of the previous weight
        return
    # Rounding twice (first to fp16) may give a different weight.
    if value is None or main.dtype != torch.float32:
        value = local.dequantize(dtype=torch.float32) if quantized else local.detach()  # type: ignore[operator]
    shard = optimizer_shard_in(optimizer, parameter)
    if main.dtype == torch.float32:
        main.copy_(value if shard is None else shard.of(value))
    elif main.numel():  # FusedAdam's main weight with its own scale
        optimizer.set_scaled_state(parameter, MAIN, value.to(torch.float32, copy=True))  # type: ignore[attr-defined]


# ------------------------------------------------------------------------------------------------------ shard_optimizer


def shard_optimizer(optimizer: AnyOptimizer) -> AnyOptimizer:
    """Shard an optimizer's state and main weights over the ranks that replicate its parameters.

    Required for models sharded with ``outer_strategy="optim"`` (HFSDP): state is sharded over ``dp_replicate`` x
    ``dp_shard``, weights and gradients over ``dp_shard``. It also shards the state of parameters that are replicated
    over data parallel if the strategy shards optimizer state. Without such parameters, and in later calls, it does
    nothing.

    Afterwards each ``step`` averages gradients over the replicas: one reduce-scatter per dtype, and one per large
    tensor. If :func:`te_fsdp.microbatch` marks the last backward, this happens per unit during backward. Then it
    updates this rank's rows and all-gathers all rows, fp32 and bf16 weights in their dtype and quantized weights as
    bytes. Each weight is quantized once from its unsharded main weight. A quantized weight whose rows do not consist
    of full blocks is gathered in fp32 and quantized afterwards; a warning says so. Low-precision parameters have fp32
    main weights in ``optimizer.state[parameter]["master_param"]``, initialized as in :func:`te_fsdp.main_weights`,
    which is not needed in addition. Groups, options and schedulers keep referring to the model's parameters. States
    are DTensors with the parameters' shapes.

    Collective over the replicas: one all-reduce of two integers. A process group may be created for quantized weights
    with one scale. Call it on all ranks right after building the optimizer.

    Args:
        optimizer: Optimizer over the model's parameters, which is returned. It must work elementwise (SGD, Adam and
            variants, TE's FusedAdam), or be :class:`te_fsdp.Muon`.

    Raises:
        OrderError: The optimizer has stepped.
        PrecisionError: A FusedAdam over low-precision parameters has main weights that are not fp32.
        MeshError: The ranks have different parameters, or a different order.
        CollectiveError: Some ranks did not make the call within :func:`te_fsdp.set_collective_timeout`.
    """
    require_optimizer(optimizer, "shard_optimizer(optimizer)")
    params = [p for group in optimizer.param_groups for p in group["params"]]
    shards = [shard for p in params if (shard := optimizer_shard(p)) is not None]
    if not shards or main_parameters_of(optimizer) is not None:
        return optimizer
    _check_fresh(optimizer)
    unpad_full_states()
    states = {id(s): s for p in params if (s := sharded_model_of(p)) is not None}.values()
    with collective_call("shard_optimizer", next(iter(states)).meshes.device_mesh):
        _check_same(shards)
        main_parameters = getattr(optimizer, KEEPS_MAIN_WEIGHTS, None) or MainParameters(optimizer)
        averages = main_parameters.shard_state(shards)
        for shard in shards:
            # Keep nonzero values of the full-shard state created by main_weights.
            param_state = optimizer.state.pop(shard.parameter, {})
            if MAIN in param_state:
                optimizer.state[shard.parameter][MAIN] = param_state[MAIN]
        _prepare_bytes(shards)
        main_parameters.create_all(optimizer)
    for state in states:
        (state.components.get(ShardedOptimizer) or ShardedOptimizer(state)).add(averages)
    return optimizer


def _check_fresh(optimizer: Optimizer) -> None:
    """Check that the optimizer has no state, whose shapes would be those of full parameter shards."""
    fused = _te.is_fused_adam(optimizer)
    # FusedAdam has main parameters from the start of its first step, which may have raised.
    stepped = any("step" in group for group in optimizer.param_groups)
    stepped = stepped or (fused and hasattr(optimizer, KEEPS_MAIN_WEIGHTS))
    states = [] if fused else [s for s in optimizer.state.values() if set(s) - {MAIN}]
    if stepped or states:
        raise OrderError(
            f"shard_optimizer({type(optimizer).__name__}) after its first step",
            expected="an optimizer without state",
            got="state of full shards",
            fix="call te_fsdp.shard_optimizer right after building the optimizer, and load checkpoints afterwards",
        )
    dtype = getattr(optimizer, "master_weight_dtype", torch.float32)
    if fused and dtype != torch.float32:
        raise PrecisionError(
            f"shard_optimizer({type(optimizer).__name__})",
            expected="fp32 main weights",
            got=f"master_weight_dtype={dtype}",
            fix="use the default master_weight_dtype",
        )


def _check_same(shards: list[OptimizerShard]) -> None:
    """Check on all replicas that all have the same parameters in the same order; raise MeshError otherwise."""
    groups = group_by_key(shards, [shard.ranks for shard in shards])
    # Sorted, so that all ranks run the collectives of their groups in the same order.
    for mine in sorted(groups, key=lambda group: group[0].ranks):
        described: list[Any] = [
            (tuple(_torch.local_of(c.parameter).shape), str(c.parameter.dtype), c.parameter.requires_grad)
            for c in mine
        ]
        device = _torch.local_of(mine[0].parameter).device
        if not are_equal([digest(repr(described))], mine[0].group, device=device):
            raise MeshError(
                f"shard_optimizer: ranks {list(mine[0].ranks)} replicate the same model",
                expected="optimizers over the same parameters in the same order",
                got=f"here {len(mine)} parameters, the first {described[0]}",
                fix="build the optimizer from the same parameter groups on all ranks",
            )


def _prepare_bytes(shards: list[OptimizerShard]) -> None:
    """Create the groups needed to send quantized weights as bytes, and warn about weights sent as fp32."""
    wide: dict[str, list[str]] = {}
    for shard in shards:
        local = _torch.local_of(shard.parameter)
        why = reason_for_fp32(shard) if _te.is_quantized(local) else None
        if why is not None:
            wide.setdefault(why, []).append(label_of(shard.parameter, "weight"))
        elif _te.is_quantized(local) and _te.needs_shared_amax(_te.quantizer_of(local)):
            run_while_all_live(lambda shard=shard: shard.amax_group)  # creates the group
    if dist.get_rank() == 0:
        for why, labels in wide.items():
            _log.warning(
                "shard_optimizer: %d quantized weights are gathered over replicas as fp32 (%s): %s. Fix: %s",
                len(labels),
                why,
                ", ".join(labels),
                "use sizes for which every rank of dp_replicate x dp_shard gets the same number of full blocks"
                if why != SINGLE
                else "use GroupedLinear(single_grouped_weight=False), or accept this cost",
            )
