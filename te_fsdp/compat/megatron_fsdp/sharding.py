"""Megatron-FSDP's sharding functions (``fully_shard``, ``fully_shard_model``, ``fully_shard_optimizer``)."""

# [Note: initial optimizer state] Scripts of Megatron-FSDP load into ``optimizer.state_dict()`` before the
# first step. DCP fills the entries of the given state dict. Before the first step an optimizer has no state,
# so DCP would silently load nothing. Megatron-FSDP takes a step first, which counts as a step (in 0.6.1 it
# also changes the weights). te_fsdp allocates the initial state of every parameter when ``state_dict()`` is
# called:
#
#     torch's optimizers     an optimizer of the same class steps on zeros; then its step count is reset to 0
#     TE's FusedAdam         ``initialize_state``, and ``step`` of each group, which is not part of the state

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from te_fsdp import gradient_sync
from te_fsdp.compat.megatron_fsdp.arguments import (
    UNUSED_OPTIONS,
    Arguments,
    DistributedDataParallelConfig,
    FSDPDistributedIndex,
    MixedPrecisionPolicy,
    default_index,
    native_strategy,
    native_units,
    warn_about_unused,
)
from te_fsdp.errors import CheckpointError, InitError, OrderError
from te_fsdp.features import param_gather
from te_fsdp.features.broadcast_params import broadcast_params
from te_fsdp.features.clip_grad_norm import scale_gradients
from te_fsdp.features.main_params import MAIN, optimizer_shard_in
from te_fsdp.features.main_weights import (
    initialize_fused_adam,
    main_weights,
    rebind_optimizer_params,
    shard_optimizer,
)
from te_fsdp.features.nan_report import report_nan
from te_fsdp.layout import OUTER_STRATEGIES
from te_fsdp.materialization import materialize
from te_fsdp.modules.state_loading import has_stepped
from te_fsdp.records import KEEPS_MAIN_WEIGHTS
from te_fsdp.shard_model import fully_shard as native_fully_shard
from te_fsdp.sharded_model import require_sharded_model, sharded_model_of
from te_fsdp.upstream import te as _te

_log = logging.getLogger("te_fsdp")
BRIDGED = "_te_fsdp_megatron"  #: Attribute of prepared optimizers, and of modules and parameters to shard
#: Optimizers whose state after a step on zeros, with "step" reset, equals their initial state.
_PLAIN = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD, torch.optim.RMSprop)


class MegatronFSDP(torch.nn.Module):
    """Wrapper around a model sharded by te_fsdp, as ``fully_shard_model`` returns it.

    The forward calls the model. FQNs of parameters and state start with ``module.``. Collective over the world.

    Args:
        module: The model on the device, the CPU or the meta device. It is changed in place.
        dist_index: Process groups and meshes; ``None``: one axis of all ranks.
        ddp_config: Strategies; ``None``: ``optim_grads_params``.
        sync_model_each_microbatch: As for :class:`Arguments`, but ``False`` by default as in megatron-fsdp.

    The other arguments are those of :class:`Arguments`. A warning names arguments without effect.

    Attributes:
        module, dist_index, ddp_config, mp_policy: The arguments; ``module`` is sharded.
        model_auto_sync: Whether every backward counts as the last one of its step.

    Raises:
        MeshError, PlacementError, PrecisionError, InitError: As :func:`te_fsdp.fully_shard` and
            :func:`te_fsdp.materialize`.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        dist_index: FSDPDistributedIndex | None = None,
        ddp_config: DistributedDataParallelConfig | None = None,
        mixed_precision_policy: MixedPrecisionPolicy = MixedPrecisionPolicy(),  # noqa: B008 (frozen)
        fsdp_unit_modules: Sequence[type | str] | None = None,
        disable_bucketing: bool = False,
        device: torch.device | None = None,
        calculate_per_token_loss: bool = False,
        init_model_with_meta_device: bool = False,
        sync_model_each_microbatch: bool = False,
        keep_fp8_transpose_cache: bool = False,
        nccl_ub: bool = False,
        fsdp_double_buffer: bool = False,
        fsdp_db_use_persist_buf_on_alloc_fail: bool = False,
        disable_symmetric_registration: bool = False,
        enable_fine_grained_param_gather_hook: bool = False,
        enable_fine_grained_param_gather_backward_hook: bool = False,
        fine_grained_recurse_module_types: tuple[type, ...] | None = None,
        report_nan_in_param_grad: bool = False,
    ) -> None:
        arguments: dict[str, Any] = {k: v for k, v in locals().items() if k in Arguments.__dataclass_fields__}
        hooks = enable_fine_grained_param_gather_hook or enable_fine_grained_param_gather_backward_hook
        arguments["enable_fine_grained_param_gather"] = hooks or bool(fine_grained_recurse_module_types)
        super().__init__()
        Arguments(**arguments)  # warns about arguments without effect
        config = ddp_config or DistributedDataParallelConfig(
            data_parallel_sharding_strategy="optim_grads_params"
        )
        warn_about_unused(config, UNUSED_OPTIONS)
        strategies = _native_strategies(config, dist_index)
        units, policy = native_units(fsdp_unit_modules), mixed_precision_policy.native()
        self.dist_index = dist_index if dist_index is not None else default_index()
        self.ddp_config, self.mp_policy = config, mixed_precision_policy
        # Sharding needs the values on the device, except on meta, where materialize draws them by shard.
        if not init_model_with_meta_device:
            _move(module, device or self.dist_index.meshes.device)
        native_fully_shard(
            module,
            self.dist_index.meshes,
            units=units,
            strategy=strategies[0],
            outer_strategy=strategies[1],
            precision=policy,
            average_gradients=not calculate_per_token_loss,
        )
        if init_model_with_meta_device:
            materialize(module)
        if report_nan_in_param_grad or config.check_for_nan_in_grad:
            report_nan(module)
        self.module = module
        self.model_auto_sync = True
        self.set_model_auto_sync(sync_model_each_microbatch)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model's forward in a profiler range named after the model."""
        with torch.profiler.record_function(f"MegatronFSDP({type(self.module).__name__})"):
            return self.module(*args, **kwargs)

    def set_model_auto_sync(self, sync_model: bool = True) -> None:
        """Set whether every backward counts as the last one of its step: :func:`te_fsdp.set_auto_sync`."""
        gradient_sync.set_auto_sync(self.module, sync_model)
        self.model_auto_sync = sync_model

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Return the context of a microbatch that is not the last one (:func:`te_fsdp.microbatch`)."""
        with gradient_sync.microbatch(self.module, is_last=False), self._auto_sync(False):
            yield

    @contextlib.contextmanager
    def sync(self) -> Iterator[None]:
        """Return a context in which every backward reduces all gradients: :func:`te_fsdp.sync`."""
        with gradient_sync.sync(self.module), self._auto_sync(True):
            yield

    @contextlib.contextmanager
    def _auto_sync(self, value: bool) -> Iterator[None]:
        """Set ``model_auto_sync`` for the duration of a context."""
        before, self.model_auto_sync = self.model_auto_sync, value
        try:
            yield
        finally:
            self.model_auto_sync = before

    def start_grad_sync(self, *unused: Any) -> None:
        """Start the deferred reductions: :func:`te_fsdp.start_grad_reduce`. Collective over data parallel."""
        gradient_sync.start_grad_reduce(self.module)

    def synchronize_gradient_reduce(self) -> None:
        """Complete all gradients: :func:`te_fsdp.finish_grad_reduce`. Collective over data parallel."""
        gradient_sync.finish_grad_reduce(self.module)

    def finish_grad_sync(self, force_all_reduce: bool = False) -> None:
        """Complete all gradients and reshard the weights. Collective over data parallel.

        With HFSDP, gradients are then reduced over the sharding axis only. The optimizer's step averages them
        over the outer axis, restricted to the rows that the rank updates. Reading ``.grad`` raises:
        :func:`te_fsdp.finish_grad_reduce`.
        """
        if force_all_reduce:
            _log.warning("megatron_fsdp: finish_grad_sync(force_all_reduce=True) has the effect of False")
        gradient_sync.finish_grad_reduce(self.module)
        param_gather.release_params(self.module)

    def attach_grad_to_optimizer_state(self) -> None:
        """Complete all gradients. ``.grad`` already contains the gradients that the optimizer reads."""
        gradient_sync.finish_grad_reduce(self.module)

    def scale_gradients(self, scaling_factor: float | torch.Tensor) -> None:
        """Multiply all gradients: :func:`te_fsdp.scale_gradients`."""
        scale_gradients(self.module, scaling_factor)

    def zero_grad_buffer(self) -> None:
        """Discard all gradients: :func:`te_fsdp.zero_grad`."""
        gradient_sync.zero_grad(self.module)

    def start_param_sync(self, *unused: Any, force_sync: bool = False, force_dispatch: bool = False) -> None:
        """All-gather the root unit ahead, or with ``force_sync`` all units and wait. Collective over ``dp_shard``.

        It can be used as a hook. ``force_dispatch`` has no effect because all-gathers are always asynchronous.
        """
        if force_sync:
            param_gather.finish_param_gather(self.module)
        else:
            modules = require_sharded_model(self.module, "MegatronFSDP").modules
            param_gather.start_param_gather(self.module, [""] if "" in modules else None)

    def synchronize_param_gather(self) -> None:
        """Reshard weights so that ``parameters()`` returns sharded parameters: :func:`te_fsdp.release_params`."""
        param_gather.release_params(self.module)

    def install_optimized_model_weights(self) -> None:
        """Reshard weights so that the next forward reads updated values. Optimizer steps do this themselves."""
        param_gather.release_params(self.module)

    def broadcast_params(self) -> None:
        """Broadcast replicated parameters so that all replicas are equal: :func:`te_fsdp.broadcast_params`."""
        broadcast_params(self.module)

    def get_distributed_index(self) -> FSDPDistributedIndex:
        """Return the index of process groups and meshes."""
        return self.dist_index

    def reset_mixed_precision_policy(self, mixed_precision_policy: MixedPrecisionPolicy) -> None:
        """Use the ``grad_comm_dtype`` of a policy for future reductions. The other dtypes cannot change.

        Raises:
            PrecisionError: The dtype is not supported for gradient reductions.
        """
        native = mixed_precision_policy.native()  # validates the dtypes
        comm = require_sharded_model(self.module, "reset_mixed_precision_policy").sync.comm
        assert comm is not None, "fully_shard_model always gives a policy"
        comm.dtype = native.grad_comm_dtype
        before = (self.mp_policy.main_params_dtype, self.mp_policy.main_grads_dtype)
        if before != (native.main_params_dtype, native.main_grads_dtype):
            _log.warning("megatron_fsdp: main_params_dtype and main_grads_dtype stay %s and %s", *before)
        self.mp_policy = type(self.mp_policy)(*before, native.grad_comm_dtype)

    @contextlib.contextmanager
    def mixed_precision_context(self, mixed_precision_policy: MixedPrecisionPolicy) -> Iterator[None]:
        """Return a context with a different ``grad_comm_dtype``: see :meth:`reset_mixed_precision_policy`."""
        before = self.mp_policy
        self.reset_mixed_precision_policy(mixed_precision_policy)
        try:
            yield
        finally:
            self.reset_mixed_precision_policy(before)

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Load a state dict, then reshard weights so that the next forward reads the loaded values."""
        result = super().load_state_dict(state_dict, strict=strict, assign=assign)
        param_gather.release_params(self.module)
        return result


def _native_strategies(
    config: DistributedDataParallelConfig, index: FSDPDistributedIndex | None
) -> tuple[str, str]:
    """Return the strategies of a configuration. The outer one is ``no_shard`` without an outer axis."""
    strategy = native_strategy(config.data_parallel_sharding_strategy, "data_parallel_sharding_strategy")
    outer = native_strategy(config.outer_dp_sharding_strategy, "outer_dp_sharding_strategy", OUTER_STRATEGIES)
    if outer != "no_shard" and (index is None or not index.use_hybrid_fsdp):
        _log.warning("megatron_fsdp: outer_dp_sharding_strategy=%r has no effect without dp_outer_dim", outer)
        outer = "no_shard"
    return strategy, outer


def _move(module: torch.nn.Module, device: torch.device) -> None:
    """Move a model to a device; raise InitError if it has meta tensors."""
    meta = [n for n, t in [*module.named_parameters(), *module.named_buffers()] if t.is_meta]
    if meta:
        raise InitError(
            f"fully_shard: {meta[0]} is on meta",
            expected="a model with values",
            got=f"{len(meta)} meta tensor(s)",
            fix="init_model_with_meta_device=True",
        )
    module.to(device)


def fully_shard_model(module: nn.Module, *args: Any, **kwargs: Any) -> MegatronFSDP:
    """Shard a model with :func:`te_fsdp.fully_shard` and wrap it with Megatron-FSDP's methods.

    The model may be on the device, the CPU or the meta device. It is changed in place. Further arguments are
    those of :class:`Arguments`. Collective over the world.

    Raises:
        TypeError: megatron-fsdp does not have this argument.
        MeshError, PlacementError, PrecisionError, InitError: As :func:`te_fsdp.fully_shard` and
            :func:`te_fsdp.materialize`.
    """
    named = Arguments(*args, **kwargs)
    strategy = native_strategy(named.zero_dp_strategy, "zero_dp_strategy")
    outer = native_strategy(named.outer_dp_sharding_strategy, "outer_dp_sharding_strategy", OUTER_STRATEGIES)
    if named.device_mesh is None:
        index = default_index(named.dp_shard_dim, named.tp_dim)
    else:
        taken = inspect.signature(FSDPDistributedIndex).parameters.keys() & vars(named).keys()
        index = FSDPDistributedIndex(
            **{name: getattr(named, name) for name in taken},
            hsdp_outer_dp_shard=outer == "optim" and named.dp_outer_dim is not None,
        )
    strategies = {"data_parallel_sharding_strategy": strategy, "outer_dp_sharding_strategy": outer}
    return MegatronFSDP(
        module,
        index,
        DistributedDataParallelConfig(**strategies),
        named.mixed_precision_policy or MixedPrecisionPolicy(),
        named.fsdp_unit_modules,
        device=named.device,
        calculate_per_token_loss=named.calculate_per_token_loss,
        init_model_with_meta_device=named.init_model_with_meta_device,
        sync_model_each_microbatch=named.sync_model_each_microbatch,
        report_nan_in_param_grad=named.report_nan_in_param_grad,
    )


def _show_arguments(function: Callable[..., Any], more: int) -> None:
    """Set a function's signature so that ``help`` and editors show :class:`Arguments` after ``more`` arguments."""
    own, added = (list(inspect.signature(of).parameters.values()) for of in (function, Arguments))
    function.__signature__ = inspect.Signature([*own[:more], *added])  # type: ignore[attr-defined]


def fully_shard_optimizer(optimizer: Optimizer, preproc_state_dict_for_dcp_ckpt: bool = True) -> Optimizer:
    """Prepare an optimizer over the parameters of a :class:`MegatronFSDP` model, in place.

    It adds missing main weights (:func:`te_fsdp.main_weights`). It shards optimizer state
    according to the strategy (:func:`te_fsdp.shard_optimizer`). It adds Megatron-FSDP's arguments of ``step``
    and ``zero_grad``. Parameter groups and options are kept, and no step is taken.

    Afterwards ``state_dict()`` allocates missing state. It raises ``OrderError`` before the first step if the
    optimizer cannot allocate state without a real step. ``load_state_dict()`` raises ``CheckpointError`` if the
    state dict has no state although the optimizer has some. Local operation, except with quantized weights.

    Args:
        optimizer: Optimizer over parameters of the sharded model. It is returned.
        preproc_state_dict_for_dcp_ckpt: Without effect.

    Raises:
        OrderError: The optimizer has no parameter of a sharded model.
    """
    Arguments(preproc_state_dict_for_dcp_ckpt=preproc_state_dict_for_dcp_ckpt)  # warns
    states = (sharded_model_of(p) for group in optimizer.param_groups for p in group["params"])
    models = list({id(state): state.model for state in states if state is not None}.values())
    if not models:
        raise OrderError(
            f"fully_shard_optimizer({type(optimizer).__name__})",
            expected="an optimizer over the parameters of a sharded model",
            got="different parameters",
            fix="call fully_shard_model first, then build the optimizer from the parameters of the returned model",
        )
    main_weights(models[0] if len(models) == 1 else torch.nn.ModuleList(models), optimizer)
    shard_optimizer(optimizer)
    # A second call must not wrap the methods again.
    if not hasattr(optimizer, BRIDGED):
        setattr(optimizer, BRIDGED, True)
        _bridge(optimizer, models)
    return optimizer


def fully_shard(
    module: nn.Module, optimizer: Optimizer, *args: Any, **kwargs: Any
) -> tuple[MegatronFSDP, Optimizer]:
    """Shard a model and its existing optimizer. Further arguments are those of :func:`fully_shard_model`.

    The optimizer must not have stepped. It keeps its parameter groups and options and gets the sharded
    parameters. Collective over the world.

    Raises:
        OrderError: The optimizer has different parameters, or it has state.
    """
    fix = "build it from model.parameters() right before, or use fully_shard_model and build it afterwards"
    with rebind_optimizer_params(module, optimizer, "fully_shard", fix):
        model = fully_shard_model(module, *args, **kwargs)
    return model, fully_shard_optimizer(optimizer)


def _bridge(optimizer: Optimizer, models: Sequence[nn.Module]) -> None:
    """Replace four methods of an optimizer by versions with Megatron-FSDP's arguments."""
    # Wrap methods instead of registering hooks: hooks run after the main weights have replaced the parameters.
    stock = {n: getattr(optimizer, n) for n in ("step", "zero_grad", "state_dict", "load_state_dict")}

    @functools.wraps(stock["step"])
    def step(
        optimizer: Optimizer,
        *args: Any,
        sync_grad_before_optimizer_step: bool = True,
        install_optimized_model_weights: bool = True,
        **kwargs: Any,
    ) -> Any:
        if not install_optimized_model_weights:
            text = "megatron_fsdp: a step always installs its weights; use the optimizer's own main weights"
            _log.warning(text)
        for model in models if sync_grad_before_optimizer_step else ():
            gradient_sync.finish_grad_reduce(model)
        return stock["step"](*args, **kwargs)

    @functools.wraps(stock["zero_grad"])
    def zero_grad(optimizer: Optimizer, *args: Any, zero_grad_buffer: bool = True, **kwargs: Any) -> Any:
        result = stock["zero_grad"](*args, **kwargs)
        # Buffered gradients are discarded for the entire model. An optimizer over some of its parameters must leave
        # the gradients of other optimizers alone, because these may not have stepped yet.
        parameter_ids = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        to_none = kwargs.get("set_to_none", args[0] if args else None)
        for model in models if zero_grad_buffer else ():
            if all(id(p) in parameter_ids for p in model.parameters() if p.requires_grad):
                gradient_sync.zero_grad(model, set_to_none=to_none is not False)
        return result

    def state_dict(optimizer: Optimizer) -> dict[str, Any]:
        _allocate(optimizer)
        return stock["state_dict"]()

    def load_state_dict(optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
        if not state_dict["state"]:
            _allocate(optimizer)
            # A state dict without state would reset the optimizer silently.
            if with_state := sum(bool(state) for state in optimizer.state.values()):
                raise CheckpointError(
                    f"{type(optimizer).__name__}.load_state_dict",
                    expected=f"a state dict with state of {with_state} parameters",
                    got="a state dict without state",
                    why="DCP loads only the entries that the given state dict contains",
                    fix="call optimizer.state_dict() after fully_shard_optimizer(optimizer), and load into the result",
                )
        stock["load_state_dict"](state_dict)

    # Assign bound methods: learning rate schedulers read ``__func__`` of ``step``.
    for name, function in zip(stock, (step, zero_grad, state_dict, load_state_dict), strict=True):
        setattr(optimizer, name, MethodType(function, optimizer))


@torch.no_grad()
def _allocate(optimizer: Any) -> None:
    """Allocate the initial state of trained parameters without state. Gradients and weights stay. Local operation.

    Raises:
        OrderError: No parameter has state, and the optimizer cannot allocate it without a real step.
    """
    fused = _te.is_fused_adam(optimizer)
    stepped = has_stepped(optimizer)
    # A first step does not apply dampening. The optimizer detects a first step by missing state.
    dampened = any(group.get("momentum") and group.get("dampening") for group in optimizer.param_groups)
    if not fused and not (type(optimizer) in _PLAIN and not dampened):
        if stepped:
            return
        raise OrderError(
            f"{type(optimizer).__name__}.state_dict() before the first step",
            expected="state to load into",
            got="no state, and this optimizer allocates it only in its first real step",
            fix="load with te_fsdp.checkpoint.load, which allocates it",
        )
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if set(optimizer.state.get(parameter, {})) - {MAIN}:
                continue
            if fused and (parameter.requires_grad or optimizer_shard_in(optimizer, parameter) is None):
                # its steps allocate state for frozen parameters, too
                initialize_fused_adam(optimizer, parameter)
            elif parameter.requires_grad:
                _initialize(optimizer, group, parameter)
        if fused and "step" not in group:
            device = group["params"][0].device if group["params"] else None
            zero = torch.zeros(1, dtype=torch.int, device=device) if optimizer.capturable else 0
            group["step"] = zero  # the type that FusedAdam uses


def _initialize(optimizer: Optimizer, group: dict[str, Any], parameter: torch.Tensor) -> None:
    """Set the initial state that a torch optimizer keeps for a parameter."""
    main_parameters = getattr(optimizer, KEEPS_MAIN_WEIGHTS, None)
    main = None if main_parameters is None else main_parameters.create(optimizer, parameter)
    blank = torch.zeros_like(parameter if main is None else main)
    # A step on zeros allocates the state in the optimizer's own way, and changes nothing.
    blank.grad = torch.zeros_like(blank)
    other = type(optimizer)([{**group, "params": [blank]}])  # type: ignore[call-arg]
    other.step()
    state = other.state.get(blank, {})
    if "step" in state:
        state["step"] = torch.zeros_like(state["step"]) if isinstance(state["step"], torch.Tensor) else 0
    if state:
        optimizer.state[parameter].update(state)


_show_arguments(fully_shard_model, 1)
_show_arguments(fully_shard, 2)
