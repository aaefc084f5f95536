"""``fully_shard``, ``fully_shard_model`` and ``fully_shard_optimizer`` with Megatron-FSDP's arguments.

Scripts of Megatron-FSDP load into ``optimizer.state_dict()`` before the first step. DCP fills the state dict that it
is given. That of an optimizer which has not stepped yet has no state, so that nothing of it would be loaded, in
silence. Megatron-FSDP takes a step beforehand, which counts as one (0.6.1: and moves the weights). Here state is made
when ``state_dict()`` is called, for each parameter that has none yet, and is that of no step:

    torch's optimizers   as the optimizer itself makes it: another one of its kind steps on zeros of the same layout,
                         and its count of steps goes back to 0
    TE's FusedAdam       by its ``initialize_state``, and ``step`` of each group, which is not among the state
"""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable
from types import MethodType
from typing import TYPE_CHECKING, Any

import torch

from te_fsdp import _te
from te_fsdp.compat.megatron_fsdp.arguments import Arguments, DistributedDataParallelConfig, native_strategy
from te_fsdp.compat.megatron_fsdp.meshes import FSDPDistributedIndex, default_index
from te_fsdp.compat.megatron_fsdp.wrapper import MegatronFSDP
from te_fsdp.errors import CheckpointError, OrderError
from te_fsdp.layout import OUTER_STRATEGIES
from te_fsdp.quantized.optimizer_steps import KEEPS_MAIN_WEIGHTS
from te_fsdp.sharding.main_parameters import MAIN
from te_fsdp.sharding.main_weights import following, initialize_fused_adam, main_weights
from te_fsdp.sharding.outer_optimizer import optimizer_shard_in, shard_optimizer
from te_fsdp.sharding.reductions import finish_grad_reduce, zero_grad
from te_fsdp.sharding.state import ShardingState, state_of

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

#: Whose state after a step on zeros, with "step" put back, is that of no step at all.
_PLAIN = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD, torch.optim.RMSprop)


def allocate_before_state_dict(optimizer: Optimizer) -> None:
    """Let ``optimizer.state_dict()`` allocate state where there is none. Local operation.

    Gradients and weights stay as they are. ``state_dict()`` before the first step raises ``OrderError`` for an
    optimizer whose state cannot be made without a step that counts, and ``load_state_dict()`` raises
    ``CheckpointError`` for a state dict without state, such as one that was asked for before this call, of an
    optimizer that keeps some.
    """
    # Around the methods, not as hooks: those run when main weights are in the parameters' places already.
    save, load = _saving(optimizer.state_dict), _loading(optimizer.load_state_dict)
    optimizer.state_dict = MethodType(save, optimizer)  # type: ignore[method-assign]
    optimizer.load_state_dict = MethodType(load, optimizer)  # type: ignore[method-assign]


def _saving(stock: Callable[[], dict[str, Any]]) -> Callable[[Optimizer], dict[str, Any]]:
    def state_dict(optimizer: Optimizer) -> dict[str, Any]:
        _allocate(optimizer)
        return stock()

    return state_dict


def _loading(stock: Callable[[dict[str, Any]], None]) -> Callable[[Optimizer, dict[str, Any]], None]:
    def load_state_dict(optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
        if not state_dict["state"]:
            _allocate(optimizer)
            _refuse_empty(optimizer)
        stock(state_dict)

    return load_state_dict


def _refuse_empty(optimizer: Optimizer) -> None:
    kept = sum(bool(state) for state in optimizer.state.values())
    if kept:
        raise CheckpointError(
            f"{type(optimizer).__name__}.load_state_dict",
            expected=f"state of {kept} parameters",
            got="a state dict without any",
            why="DCP fills the state dict of an optimizer as it is: what is missing there is not loaded",
            fix="ask for optimizer.state_dict() after fully_shard_optimizer(optimizer), and load into that",
        )


@torch.no_grad()
def _allocate(optimizer: Optimizer) -> None:
    """Give every trained parameter without state its state before the first step. Local operation.

    Raises:
        OrderError: No parameter has state, and that of this optimizer is not made without a step.
    """
    fused = _te.is_fused_adam(optimizer)
    stepped = any(set(state) - {MAIN} for state in optimizer.state.values())
    if not fused and not _is_plain(optimizer):
        if not stepped:
            raise OrderError(
                f"{type(optimizer).__name__}.state_dict() before the first step",
                expected="state to load into",
                got="none, and it is not made without a step that counts",
                fix="load with te_fsdp.checkpoint.load, which allocates it",
            )
        return
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if set(optimizer.state.get(parameter, {})) - {MAIN}:
                continue
            if fused and (parameter.requires_grad or optimizer_shard_in(optimizer, parameter) is None):
                initialize_fused_adam(optimizer, parameter)  # its steps give frozen parameters state as well
            elif parameter.requires_grad:
                _initialize(optimizer, group, parameter)
        if fused and "step" not in group:
            group["step"] = _no_steps(optimizer, group)


def _is_plain(optimizer: Optimizer) -> bool:
    # The first step with dampening does not dampen, which it tells by the absence of state.
    dampened = any(group.get("momentum") and group.get("dampening") for group in optimizer.param_groups)
    return type(optimizer) in _PLAIN and not dampened


def _initialize(optimizer: Optimizer, group: dict[str, Any], parameter: torch.Tensor) -> None:
    """What a torch optimizer keeps for a parameter before its first step."""
    main_parameters = getattr(optimizer, KEEPS_MAIN_WEIGHTS, None)
    main = None if main_parameters is None else main_parameters.make(optimizer, parameter)
    blank = torch.zeros_like(parameter if main is None else main)
    blank.grad = torch.zeros_like(blank)
    other = type(optimizer)([{**group, "params": [blank]}])  # type: ignore[call-arg]
    other.step()
    state = other.state.get(blank, {})
    if "step" in state:
        state["step"] = torch.zeros_like(state["step"]) if isinstance(state["step"], torch.Tensor) else 0
    if state:
        optimizer.state[parameter].update(state)


def _no_steps(optimizer: Any, group: dict[str, Any]) -> int | torch.Tensor:
    """FusedAdam's count of steps before the first one, of the type that it gives it."""
    if not optimizer.capturable:
        return 0
    device = group["params"][0].device if group["params"] else None
    return torch.zeros(1, dtype=torch.int, device=device)


_log = logging.getLogger("te_fsdp")
_BRIDGED = "_te_fsdp_megatron"


def fully_shard_model(module: nn.Module, *args: Any, **kwargs: Any) -> MegatronFSDP:
    """Shard a model: :func:`te_fsdp.fully_shard`, and a wrapper with Megatron-FSDP's methods around it.

    Collective over the world.

    Args:
        module: The model, on the device, on the CPU or on meta. Changed in place.
        *args: As :class:`Arguments` describes them.
        **kwargs: As :class:`Arguments` describes them.

    Returns:
        The wrapper; ``.module`` is the model.

    Raises:
        TypeError: An argument that megatron-fsdp does not have.
        MeshError, PlacementError, PrecisionError, InitError: As :func:`te_fsdp.fully_shard` and
            :func:`te_fsdp.materialize`.
    """
    given = Arguments(*args, **kwargs)
    given.say_what_has_no_meaning()
    strategy = native_strategy(given.zero_dp_strategy, "zero_dp_strategy")
    outer = native_strategy(given.outer_dp_sharding_strategy, "outer_dp_sharding_strategy", OUTER_STRATEGIES)
    if given.device_mesh is None:
        index = default_index(given.dp_shard_dim, given.tp_dim)
    else:
        index = FSDPDistributedIndex(
            given.device_mesh,
            given.dp_shard_dim,
            given.dp_outer_dim,
            given.tp_dim,
            given.hybrid_fsdp_group,
            given.hybrid_fsdp_expt_group,
            outer == "optim" and given.dp_outer_dim is not None,
            given.expt_device_mesh,
            given.fsdp_group_ag,
            given.expt_fsdp_group_ag,
        )
    return MegatronFSDP(
        module,
        index,
        DistributedDataParallelConfig(
            data_parallel_sharding_strategy=strategy, outer_dp_sharding_strategy=outer
        ),
        given.mixed_precision_policy,
        given.fsdp_unit_modules,
        device=given.device,
        calculate_per_token_loss=given.calculate_per_token_loss,
        init_model_with_meta_device=given.init_model_with_meta_device,
        sync_model_each_microbatch=given.sync_model_each_microbatch,
        report_nan_in_param_grad=given.report_nan_in_param_grad,
    )


def _show_arguments(function: Callable[..., Any], more: int) -> None:
    """Let ``help`` and editors show what ``*args`` and ``**kwargs`` stand for, after ``more`` arguments."""
    own = list(inspect.signature(function).parameters.values())[:more]
    theirs = list(inspect.signature(Arguments).parameters.values())
    function.__signature__ = inspect.Signature([*own, *theirs])  # type: ignore[attr-defined]


def fully_shard_optimizer(optimizer: Optimizer, preproc_state_dict_for_dcp_ckpt: bool = True) -> Optimizer:
    """Prepare an optimizer over the parameters of a :class:`MegatronFSDP` model, in place.

    Main weights for parameters that lack them (:func:`te_fsdp.main_weights`), state cut where the strategy says so
    (:func:`te_fsdp.shard_optimizer`), and Megatron-FSDP's further arguments of ``step`` and ``zero_grad``. Parameter
    groups and their options stay; no step is taken. Local operation, but for quantized weights.

    Args:
        optimizer: Over parameters of the sharded model.
        preproc_state_dict_for_dcp_ckpt: Without meaning.

    Returns:
        ``optimizer``.

    Raises:
        OrderError: No parameter of a sharded model among its parameters.
    """
    Arguments(preproc_state_dict_for_dcp_ckpt=preproc_state_dict_for_dcp_ckpt).say_what_has_no_meaning()
    state = _state_of(optimizer)
    main_weights(state.model, optimizer)
    shard_optimizer(optimizer)
    if not hasattr(optimizer, _BRIDGED):
        setattr(optimizer, _BRIDGED, True)
        allocate_before_state_dict(optimizer)
        # As methods: learning rate schedulers look for the function in them.
        step, zero = _step(optimizer.step, state.model), _zero_grad(optimizer.zero_grad, state.model)
        optimizer.step = MethodType(step, optimizer)  # type: ignore[method-assign]
        optimizer.zero_grad = MethodType(zero, optimizer)  # type: ignore[method-assign]
    return optimizer


def fully_shard(
    module: nn.Module, optimizer: Optimizer, *args: Any, **kwargs: Any
) -> tuple[MegatronFSDP, Optimizer]:
    """Shard a model and the optimizer that was built over it: arguments of :func:`fully_shard_model`.

    The optimizer's parameter groups keep their options and get the sharded parameters in place of those that were
    there. Collective over the world.

    Args:
        module: The model.
        optimizer: Over the model's parameters; must not have stepped.
        *args: As for :func:`fully_shard_model`.
        **kwargs: As for :func:`fully_shard_model`.

    Returns:
        The wrapper and ``optimizer``.

    Raises:
        OrderError: The optimizer holds other parameters, or has state.
    """
    fix = "build it from model.parameters() right before, or use fully_shard_model and build it afterwards"
    with following(module, optimizer, "fully_shard", fix):
        model = fully_shard_model(module, *args, **kwargs)
    return model, fully_shard_optimizer(optimizer)


def _state_of(optimizer: Optimizer) -> ShardingState:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            state = state_of(parameter)
            if state is not None:
                return state
    raise OrderError(
        f"fully_shard_optimizer({type(optimizer).__name__})",
        expected="an optimizer over the parameters of a sharded model",
        got="other parameters",
        fix="call fully_shard_model first, then build the optimizer from the parameters of what it returns",
    )


def _step(stock: Callable[..., Any], model: nn.Module) -> Callable[..., Any]:
    """``step`` that takes Megatron-FSDP's two arguments more, and by default reduces what waits."""

    @functools.wraps(stock)
    def step(
        optimizer: Optimizer,
        *args: Any,
        sync_grad_before_optimizer_step: bool = True,
        install_optimized_model_weights: bool = True,
        **kwargs: Any,
    ) -> Any:
        if not install_optimized_model_weights:
            _log.warning(
                "megatron_fsdp: a step always installs its weights; use the optimizer's own main weights"
            )
        if sync_grad_before_optimizer_step:
            finish_grad_reduce(model)
        return stock(*args, **kwargs)

    return step


def _zero_grad(stock: Callable[..., Any], model: nn.Module) -> Callable[..., Any]:
    """``zero_grad`` that takes Megatron-FSDP's argument more.

    What lies in buffers is forgotten for a model as a whole; an optimizer over a part of one leaves the gradients of
    the others alone, which may not have stepped yet.
    """

    @functools.wraps(stock)
    def zero_grads(optimizer: Optimizer, *args: Any, zero_grad_buffer: bool = True, **kwargs: Any) -> Any:
        result = stock(*args, **kwargs)
        held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        if zero_grad_buffer and all(id(p) in held for p in model.parameters() if p.requires_grad):
            to_none = kwargs.get("set_to_none", args[0] if args else None)
            zero_grad(model, set_to_none=to_none is not False)
        return result

    return zero_grads


_show_arguments(fully_shard_model, 1)
_show_arguments(fully_shard, 2)
