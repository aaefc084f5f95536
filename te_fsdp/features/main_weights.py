"""``main_weights``: fp32 main weights for an optimizer, begun at the values that the model was initialised with.

:func:`shard_optimizer` cuts them, and the optimizer's state, over all ranks that hold a parameter alike.

    model's parameters     what forward reads: quantized, or bf16; the optimizer's groups and state refer to them
    main weights           fp32, placed as the parameters; ``optimizer.state[parameter]["master_param"]``

TE's FusedAdam keeps main weights itself. For torch's optimizers they take the parameters' places while
``step`` runs: gradients are cast to fp32, the optimizer updates main weights, and each parameter then becomes
its main weight, rounded or quantized once. Between steps nothing tells the difference, so that ``zero_grad``,
gradient clipping, learning rate schedulers and checkpoints work as usual.

FusedAdam's own main weights of quantized weights do the same. By itself it would make an fp32 copy of each gradient,
and quantize weight by weight, each with a reduction of its amax (TE 2.18 to 2.20).
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import logging
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from te_fsdp.collectives.agreement import are_equal, digest
from te_fsdp.collectives.rendezvous import collective_call
from te_fsdp.errors import MeshError, OrderError, PrecisionError, shorten
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
from te_fsdp.features.unsupported_optimizers import refuse_unsupported_optimizer
from te_fsdp.lifecycle import parameters_of_optimizer
from te_fsdp.optimizer_step import known_optimizers, register_optimizer
from te_fsdp.quantized.amax import KEEPS_MAIN_WEIGHTS, quantized_among, refuse_unsafe_optimizer
from te_fsdp.records import label_of, require_model, require_optimizer
from te_fsdp.sharded_model import sharded_model_of
from te_fsdp.upstream import fsdp2_units, te as _te, torch_dtensor as _torch

if TYPE_CHECKING:
    from torch import nn

    from te_fsdp.lifecycle import Step

_log = logging.getLogger("te_fsdp")

AnyOptimizer = TypeVar("AnyOptimizer", bound=Optimizer)


def check_optimizer(model: nn.Module, optimizer: Optimizer) -> None:
    """Raise if an optimizer holds parameters that are not (or no longer) the model's.

    Sharding, and materialisation from meta, put new parameters into the model. An optimizer built before goes
    on with the old ones: its steps change nothing that the model reads. It may leave out parameters of the model, which
    is sharded or not. Local operation, though FSDP2 units are resharded.

    Raises:
        OrderError: Says how many parameters are not the model's.
        PlacementError: An optimizer of torch whose step would fail half way on sharded parameters (docs/optimizers.md).
    """
    require_model(model, "check_optimizer(model, optimizer)")
    require_optimizer(optimizer, "check_optimizer(model, optimizer)")
    for module in model.modules():
        if fsdp2_units.is_fsdp_module(module):
            module.reshard()  # type: ignore[operator]
    current = {id(p) for p in model.parameters()}
    held = [p for group in optimizer.param_groups for p in group["params"]]
    foreign = sum(id(p) not in current for p in held)
    if foreign:
        _refuse_several_models(model, optimizer, [p for p in held if id(p) not in current])
        raise OrderError(
            f"{type(optimizer).__name__}: {foreign} of {len(held)} parameters are not the model's",
            expected="the parameters that the model has now",
            got="others, such as those from before fully_shard or materialize",
            why="Its step would change nothing that the model reads",
            fix="build it after te_fsdp.fully_shard and te_fsdp.materialize, from model.parameters()",
        )
    refuse_unsupported_optimizer(optimizer, held)


def _refuse_several_models(model: nn.Module, optimizer: Optimizer, foreign: list[torch.Tensor]) -> None:
    """Raise if parameters that are not the model's are those of other sharded models. Local operation."""
    states = {id(state): state for state in map(sharded_model_of, foreign) if state is not None}
    living = {id(parameter) for state in states.values() for parameter in state.parameters().values()}
    others = [parameter for parameter in foreign if id(parameter) in living]
    if others:
        kinds = [type(state.model).__name__.removeprefix("FSDP") for state in states.values()]
        raise OrderError(
            f"{type(optimizer).__name__}: {len(others)} parameters of other sharded models ({shorten(kinds, 3)})",
            expected="one module that contains all models whose parameters the optimizer has",
            got="one of these models",
            why="Main weights and checkpoints are found by the names of parameters in one module",
            fix='models = torch.nn.ModuleDict({"a": a, "b": b}), and pass models to te_fsdp.main_weights, '
            "te_fsdp.shard_optimizer and te_fsdp.checkpoint; or use one optimizer for each model",
        )


def unwrapped(optimizer: Optimizer) -> Optimizer:
    """What a wrapper with the state of another optimizer, such as accelerate's, is around; others themselves. Local."""
    inner = getattr(optimizer, "optimizer", None)
    if isinstance(inner, Optimizer) and inner.state is optimizer.state:
        return unwrapped(inner)
    return optimizer


@contextlib.contextmanager
def rebind_optimizer_params(model: nn.Module, optimizer: Optimizer, where: str, fix: str) -> Iterator[None]:
    """Context in which a model is sharded: afterwards the optimizer's groups hold the parameters that it has then.

    Groups keep their options. Local operation. Raises ``OrderError``, with the call's name and what to do instead, for
    an optimizer that holds other parameters, or has state; before anything is changed.
    """
    names = {id(parameter): name for name, parameter in model.named_parameters(remove_duplicate=False)}
    groups = [[names.get(id(parameter)) for parameter in group["params"]] for group in optimizer.param_groups]
    if any(name is None for group in groups for name in group) or optimizer.state:
        raise OrderError(
            f"{where}({type(optimizer).__name__})",
            expected="an optimizer over parameters of the model, before its first step",
            got="state" if optimizer.state else "other parameters",
            why="Its parameters are replaced by sharded ones",
            fix=fix,
        )
    yield
    sharded = dict(model.named_parameters(remove_duplicate=False))
    for group, wanted in zip(optimizer.param_groups, groups, strict=True):
        group["params"][:] = [sharded[name] for name in wanted if name is not None]


def _with_subclasses(kind: type) -> Iterator[type]:
    yield kind
    for below in type.__subclasses__(kind):
        yield from _with_subclasses(below)


def optimizers_of(parameters: Iterable[torch.Tensor]) -> list[Optimizer]:
    """Every optimizer of this process that holds one of these parameters, which do not know it. Local operation.

    Of those that te_fsdp has not met only such as may keep main weights: of fp32 parameters TE's FusedAdam alone does.
    Looks at all objects that the garbage collector knows: for loads alone. What ``gc.freeze()`` has put aside is not
    listed, and could not be put aside again by itself; optimizers of sharded models that have stepped are known.
    """
    parameters = list(parameters)
    wanted = {id(parameter) for parameter in parameters}
    may_keep = _te.is_loaded() or any(map(is_low_precision, parameters))
    # By its type: proxies of all kinds answer isinstance with side effects. And without a line of Python for each of a
    # million objects, which would take longer than to load a model of a GiB.
    kinds, objects = set(_with_subclasses(Optimizer)), gc.get_objects() if may_keep else []
    listed = list(itertools.compress(objects, map(kinds.__contains__, map(type, objects))))
    known = {id(optimizer): optimizer for optimizer in [*listed, *known_optimizers()]}.values()
    holding = []
    for optimizer in known:
        main_parameters = optimizer.__dict__.get(KEEPS_MAIN_WEIGHTS)
        if main_parameters is not None:
            main_parameters.put_back(optimizer)  # a step that raised has left them in the parameters' places
        # Of wrappers around another optimizer the inner one is enough.
        groups = optimizer.__dict__.get("param_groups", ())
        if any(id(parameter) in wanted for group in groups for parameter in group["params"]):
            holding.append(optimizer)
    return holding


def main_weights(model: nn.Module, optimizer: Optimizer) -> None:
    """Give an optimizer fp32 main weights for the model's quantized and other low-precision parameters.

    Main weights begin at the value from before quantization where TE kept it
    (``quantized_model_init(preserve_high_precision_init_val=True)``), which is then dropped; else at the parameter's
    own value. Main weights that exist, from a checkpoint or an earlier call, stay as they are. Call it once, after
    the optimizer was built and before the first step. Local operation.

    With TE's FusedAdam: ``master_weights=True`` is needed, and this call only sets the beginning. With any optimizer
    of ``torch.optim``: from now on each ``step`` updates the main weights (DTensors with the parameters'
    placements, in ``optimizer.state[parameter]["master_param"]``) and then quantizes each once, which for formats
    with one scale per tensor is a collective over the weight mesh. Memory: 4 bytes per parameter, and during
    ``step`` another 4 for gradients in fp32.

    Args:
        model: Sharded and materialised.
        optimizer: Over parameters of the model; unchanged where it holds fp32 parameters only.

    Raises:
        OrderError: The optimizer holds parameters that are not the model's, or has stepped without main weights.
        PrecisionError: A FusedAdam that keeps none, or not in fp32, over quantized weights.
    """
    check_optimizer(model, optimizer)
    register_optimizer(optimizer)
    if _te.is_fused_adam(optimizer):
        fused: Any = optimizer
        for label, parameter, local in quantized_among(parameters_of_optimizer(optimizer)):
            refuse_unsafe_optimizer(optimizer, label)
            if not optimizer.state.get(parameter) and _te.high_precision_value(local) is not None:
                fused.initialize_state(parameter, False)
                fused.set_scaled_state(parameter, MAIN, initial_main_weight(local))
            _te.drop_high_precision_value(local)
    elif not hasattr(optimizer, KEEPS_MAIN_WEIGHTS):
        low = [p for g in optimizer.param_groups for p in g["params"] if is_low_precision(p)]
        if any(optimizer.state.get(p) for p in low):
            raise OrderError(
                f"main_weights({type(optimizer).__name__}) after its first step",
                expected="an optimizer without state",
                got="state that belongs to low-precision parameters",
                fix="call te_fsdp.main_weights right after the optimizer was built",
            )
        if low:
            MainParameters(optimizer).start(optimizer)


def initialize_fused_adam(optimizer: Any, parameter: torch.Tensor) -> None:
    """Make the state of a parameter that TE's FusedAdam has none of; nothing for other optimizers. Local operation.

    By its own method: it keeps more about a state than the state itself.
    """
    main_parameters, held = main_parameters_of(optimizer), set(optimizer.state.get(parameter, ()))
    if not hasattr(optimizer, "initialize_state") or held - (
        {MAIN} if main_parameters is not None else set()
    ):
        return
    if main_parameters is None:
        low = parameter.dtype == torch.bfloat16
        optimizer.initialize_state(parameter, low and optimizer.store_param_remainders)
        return
    main, keeps = main_parameters.make(optimizer, parameter), optimizer.master_weights
    optimizer.master_weights = keeps and main is None
    try:
        optimizer.initialize_state(parameter if main is None else main, False)
    finally:
        optimizer.master_weights = keeps
    if main is not None:
        optimizer.state[parameter] |= optimizer.state.pop(main)
        rekey_scales(optimizer, main, parameter)


def main_weight(optimizer: Optimizer | None, parameter: torch.Tensor) -> torch.Tensor | None:
    """The local main weight of a parameter, ``None`` where there is none. Local operation.

    Of an optimizer given to ``shard_optimizer`` this rank's rows.
    """
    main = None if optimizer is None else optimizer.state.get(parameter, {}).get(MAIN)
    return None if main is None else _torch.local_of(main)


def use_fused_adam_master_weights(step: Step) -> None:
    """Let the main weights that TE's FusedAdam keeps of quantized weights take their places, and local tensors all."""
    optimizer: Any = step.optimizer
    if not step.models or not _te.is_fused_adam(optimizer):
        return
    main_parameters = getattr(optimizer, KEEPS_MAIN_WEIGHTS, None)
    if main_parameters is None:
        main_parameters = MainParameters(optimizer, lent=True)
    if not main_parameters.cuts:
        main_parameters.install_main_params_again()


def optimizers_with_stale_main_weights(
    parameters: Iterable[torch.Tensor], given: Iterable[Optimizer] = ()
) -> list[Optimizer]:
    """Return optimizers but the ``given`` ones, that are loaded, whose next step would put weights of before back.

    Nor what they are wrappers around, as accelerate's are: these have the same state. Local operation.
    """
    loaded = {id(one.state) for one in given}
    found = [o for o in optimizers_of(parameters) if id(o.state) not in loaded]
    return [o for o in found if any(MAIN in state for state in o.state.values())]


@torch.no_grad()
def set_main_weight(
    optimizer: Optimizer,
    parameter: torch.Tensor,
    local: torch.Tensor,
    value: torch.Tensor | None,
    *,
    make: bool = False,
) -> None:
    """Let a main weight follow its weight, whose ``local`` tensor has its new value. Local operation.

    Nothing where there is none; ``make`` makes TE's FusedAdam begin the state of a quantized weight, zero moments
    included, as its next step would: the weight has less than ``value``, float32 of the local shape, of which it was
    made (``None``: it is what the parameter holds). Main weights below fp32 follow the weight alone.
    """
    quantized = _te.is_quantized(local)
    if make and quantized and value is not None and getattr(optimizer, "master_weights", False):
        held = (p for group in optimizer.param_groups for p in group["params"])
        if any(parameter is p for p in held):
            initialize_fused_adam(optimizer, parameter)
    main = main_weight(optimizer, parameter)
    if main is None:
        return
    if main.dtype == torch.int16:
        main.zero_()  # what another weight lacked: this one is all there is
        return
    # Rounded twice, to fp16 first, a value may come to another weight.
    if value is None or main.dtype != torch.float32:
        value = local.dequantize(dtype=torch.float32) if quantized else local.detach()  # type: ignore[operator]
    shard = optimizer_shard_in(optimizer, parameter)
    if main.dtype == torch.float32:
        main.copy_(value if shard is None else shard.of(value))
    elif main.numel():  # FusedAdam's, with a scale of its own
        optimizer.set_scaled_state(parameter, MAIN, value.to(torch.float32, copy=True))  # type: ignore[attr-defined]


# ------------------------------------------------------------------------------------------------------ shard_optimizer


def shard_optimizer(optimizer: AnyOptimizer) -> AnyOptimizer:
    """Cut an optimizer's state, and the main weights, over the ranks that hold its parameters alike.

    For models sharded with ``outer_strategy="optim"`` (HFSDP), where it is needed: state over ``dp_replicate`` x
    ``dp_shard``, weights and gradients over ``dp_shard``. Also cuts the state of parameters that are replicated over
    data parallel while the strategy shards optimizer state. Without such parameters, and when called again, it does
    nothing.

    From now on each ``step`` averages gradients over the replicas (one reduce-scatter per dtype, and one for each large
    tensor; unit by unit, during backward, where :func:`te_fsdp.microbatch` says which one is the last), updates
    this rank's rows, and gathers all rows (all-gathers in the same way: fp32 and bf16 weights in their dtype, quantized
    ones as bytes; each is one quantization of its whole main weight). A quantized weight whose rows hold no whole
    blocks is gathered as fp32 and quantized afterwards, which a warning says. Low-precision parameters have
    fp32 main weights in ``optimizer.state[parameter]["master_param"]``, begun as :func:`te_fsdp.main_weights` begins
    them; there is no need to call that. Groups, their options and schedulers keep referring to the model's parameters.
    States are DTensors of the parameters' shapes.

    Collective over the replicas (one all-reduce of two integers; for quantized weights with one scale a process group
    may be made): call it on all ranks, right after the optimizer was built.

    Args:
        optimizer: Over parameters of the model; is returned. One that works element by element (SGD, Adam and their
            kin, TE's FusedAdam), or :class:`te_fsdp.Muon`.

    Raises:
        OrderError: It has made steps before.
        PrecisionError: A FusedAdam whose main weights are not fp32, over low-precision parameters.
        MeshError: The ranks hold different parameters, or in different orders.
        CollectiveError: Some ranks did not make the call within :func:`te_fsdp.set_collective_timeout`.
    """
    require_optimizer(optimizer, "shard_optimizer(optimizer)")
    held = [p for group in optimizer.param_groups for p in group["params"]]
    shards = [shard for p in held if (shard := optimizer_shard(p)) is not None]
    if not shards or main_parameters_of(optimizer) is not None:
        return optimizer
    _check_fresh(optimizer)
    states = {id(s): s for p in held if (s := sharded_model_of(p)) is not None}.values()
    with collective_call("shard_optimizer", next(iter(states)).meshes.device_mesh):
        _check_same(shards)
        main_parameters = _shard_state(optimizer, shards)
    for state in states:
        known = state.components.get(ShardedOptimizer)
        if known is None:
            state.components.attach(ShardedOptimizer(main_parameters.averages))
        else:
            known.averages = main_parameters.averages
    return optimizer


def _shard_state(optimizer: Optimizer, shards: list[OptimizerShard]) -> MainParameters:
    """Let an optimizer have main parameters that are cut. Collective where an amax needs a process group."""
    main_parameters = getattr(optimizer, KEEPS_MAIN_WEIGHTS, None) or MainParameters(optimizer)
    main_parameters.cut(shards)
    for shard in shards:
        # Of the state that main_weights has made of whole shards keep what is not zero.
        state = optimizer.state.pop(shard.parameter, {})
        if MAIN in state:
            optimizer.state[shard.parameter][MAIN] = state[MAIN]
    _prepare_bytes(shards)
    main_parameters.start(optimizer)
    return main_parameters


def _check_fresh(optimizer: Optimizer) -> None:
    """State that is there already has the shapes of whole shards."""
    fused = _te.is_fused_adam(optimizer)
    # FusedAdam has main parameters from the beginning of its first step on, which may have raised.
    stepped = any("step" in group for group in optimizer.param_groups)
    stepped = stepped or (fused and hasattr(optimizer, KEEPS_MAIN_WEIGHTS))
    states = [] if fused else [s for s in optimizer.state.values() if set(s) - {MAIN}]
    if stepped or states:
        raise OrderError(
            f"shard_optimizer({type(optimizer).__name__}) after its first step",
            expected="an optimizer without state",
            got="state of whole shards",
            fix="call te_fsdp.shard_optimizer right after the optimizer was built, and load checkpoints afterwards",
        )
    dtype = getattr(optimizer, "master_weight_dtype", torch.float32)
    if fused and dtype != torch.float32:
        raise PrecisionError(
            f"shard_optimizer({type(optimizer).__name__})",
            expected="fp32 main weights",
            got=f"master_weight_dtype={dtype}",
            fix="leave master_weight_dtype at its default",
        )


def _check_same(shards: list[OptimizerShard]) -> None:
    """Raise on all replicas unless all have the same parameters in the same order."""
    for mine in sorted(
        group_by_key(shards, [shard.ranks for shard in shards]), key=lambda alike: alike[0].ranks
    ):
        described: list[Any] = [
            (tuple(_torch.local_of(c.parameter).shape), str(c.parameter.dtype), c.parameter.requires_grad)
            for c in mine
        ]
        device = _torch.local_of(mine[0].parameter).device
        if not are_equal([digest(repr(described))], mine[0].group, device=device):
            raise MeshError(
                f"shard_optimizer: ranks {list(mine[0].ranks)} hold copies of the same model",
                expected="optimizers over the same parameters in the same order",
                got=f"here {len(mine)} parameters, the first {described[0]}",
                fix="build the optimizer from the same parameter groups on all ranks",
            )


def _prepare_bytes(shards: list[OptimizerShard]) -> None:
    """Make the groups that quantized weights need to be sent as bytes, and say which of them do not."""
    wide: dict[str, list[str]] = {}
    for shard in shards:
        local = _torch.local_of(shard.parameter)
        why = reason_for_fp32(shard) if _te.is_quantized(local) else None
        if why is not None:
            wide.setdefault(why, []).append(label_of(shard.parameter, "weight"))
        elif _te.is_quantized(local) and _te.needs_shared_amax(_te.quantizer_of(local)):
            _ = shard.amax_group  # made where there is none
    if dist.get_rank() == 0:
        for why, labels in wide.items():
            _log.warning(
                "shard_optimizer: %d quantized weights cross their replicas' axis as fp32 (%s): %s. Fix: %s",
                len(labels),
                why,
                ", ".join(labels),
                "sizes of which every rank of dp_replicate x dp_shard gets equally many whole blocks"
                if why != SINGLE
                else "GroupedLinear(single_grouped_weight=False), or this cost",
            )
