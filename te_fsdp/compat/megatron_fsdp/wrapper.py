"""``MegatronFSDP``: the wrapper module of that name, with the methods of its documentation, over a te_fsdp model."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from te_fsdp.compat.megatron_fsdp.arguments import (
    CONFIG_WITHOUT_MEANING,
    Arguments,
    DistributedDataParallelConfig,
    MixedPrecisionPolicy,
    native_strategy,
    native_units,
    say_what_has_no_meaning,
)
from te_fsdp.compat.megatron_fsdp.meshes import FSDPDistributedIndex, default_index
from te_fsdp.errors import InitError
from te_fsdp.layout import OUTER_STRATEGIES
from te_fsdp.move.start import comm_of
from te_fsdp.sharding.fully_shard import fully_shard as native_fully_shard
from te_fsdp.sharding.grad_norm import report_nan
from te_fsdp.sharding.materialize import broadcast_params, materialize
from te_fsdp.sharding.reductions import (
    finish_grad_reduce,
    finish_param_gather,
    microbatch,
    release_params,
    scale_gradients,
    set_auto_sync,
    start_grad_reduce,
    start_param_gather,
    sync,
    zero_grad,
)
from te_fsdp.sharding.state import ShardingState, required_state

_log = logging.getLogger("te_fsdp")


class MegatronFSDP(torch.nn.Module):
    """A model that te_fsdp shards, in a module around it, as ``fully_shard_model`` of this package returns it.

    Calling it calls the model. Its own additions are methods; parameters and state are the model's, under
    ``module.`` in names. Collective over the world.

    Args:
        module: The model, on the device, on the CPU or on meta. Changed in place.
        dist_index: Process groups and meshes; ``None``: all ranks in one axis.
        ddp_config: Strategies; ``None``: ``optim_grads_params``.
        mixed_precision_policy: Dtypes of main weights, main gradients and the wire.
        fsdp_unit_modules: Classes, or import paths of classes, whose instances are gathered as one; ``None``: every
            ``te.TransformerLayer``.
        device: Where the model is moved before it is sharded; ``None``: the current device.
        calculate_per_token_loss: Sum gradients over data parallel; the caller divides by the number of tokens.
        init_model_with_meta_device: Initialise parameters on meta, each rank its shards, by ``reset_parameters`` or
            ``_reset_parameters``.
        sync_model_each_microbatch: Whether each backward counts as the last one of its step. ``False`` by default,
            as in megatron-fsdp; ``fully_shard_model`` has ``True``.
        report_nan_in_param_grad: Raise before a step on gradients that are not finite; names parameter and rank.

    The other arguments have no meaning here, and are named in a warning.

    Attributes:
        module: The sharded model.
        mp_policy: The policy that it was sharded with.
        model_auto_sync: Whether each backward counts as the last one of its step.
        dist_index: Process groups and meshes.
        ddp_config: As given.

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
        given: dict[str, Any] = {k: v for k, v in locals().items() if k in Arguments.__dataclass_fields__}
        hooks = enable_fine_grained_param_gather_hook or enable_fine_grained_param_gather_backward_hook
        given["enable_fine_grained_param_gather"] = hooks or bool(fine_grained_recurse_module_types)
        super().__init__()
        Arguments(**given).say_what_has_no_meaning()
        config = ddp_config or DistributedDataParallelConfig(
            data_parallel_sharding_strategy="optim_grads_params"
        )
        say_what_has_no_meaning(config, CONFIG_WITHOUT_MEANING)
        strategies = _native_strategies(config, dist_index)
        units, policy = native_units(fsdp_unit_modules), mixed_precision_policy.native()
        self.dist_index = dist_index if dist_index is not None else default_index()
        self.ddp_config, self.mp_policy = config, mixed_precision_policy
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

    def _state(self) -> ShardingState:
        return required_state(self.module, "MegatronFSDP")

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's forward, in a profiler range of its name."""
        with torch.profiler.record_function(f"MegatronFSDP({type(self.module).__name__})"):
            return self.module(*args, **kwargs)

    # ------------------------------------------------------------------------------------------------ microbatches

    def set_model_auto_sync(self, sync_model: bool = True) -> None:
        """Whether each backward counts as the last one of its step: :func:`te_fsdp.set_auto_sync`."""
        set_auto_sync(self.module, sync_model)
        self.model_auto_sync = sync_model

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Context of a microbatch that others follow: :func:`te_fsdp.microbatch` with ``is_last=False``."""
        with microbatch(self.module, is_last=False), self._auto_sync(False):
            yield

    @contextlib.contextmanager
    def sync(self) -> Iterator[None]:
        """Context in which each backward reduces all gradients: :func:`te_fsdp.sync`."""
        with sync(self.module), self._auto_sync(True):
            yield

    @contextlib.contextmanager
    def _auto_sync(self, value: bool) -> Iterator[None]:
        """``model_auto_sync`` as the contexts of the schedule put it, restored with them."""
        before, self.model_auto_sync = self.model_auto_sync, value
        try:
            yield
        finally:
            self.model_auto_sync = before

    # --------------------------------------------------------------------------------------------------- gradients

    def start_grad_sync(self, *unused: Any) -> None:
        """Start the reductions that wait: :func:`te_fsdp.start_grad_reduce`. Collective over data parallel."""
        start_grad_reduce(self.module)

    def synchronize_gradient_reduce(self) -> None:
        """Complete all gradients: :func:`te_fsdp.finish_grad_reduce`."""
        finish_grad_reduce(self.module)

    def finish_grad_sync(self, force_all_reduce: bool = False) -> None:
        """Complete all gradients and release gathered weights. Collective over data parallel.

        Args:
            force_all_reduce: Without meaning: reductions of all axes are finished in any case.
        """
        if force_all_reduce:
            _log.warning("megatron_fsdp: finish_grad_sync(force_all_reduce=True) does what False does")
        finish_grad_reduce(self.module)
        release_params(self.module)

    def attach_grad_to_optimizer_state(self) -> None:
        """Nothing is left to do after :meth:`synchronize_gradient_reduce`: complete gradients are ``.grad``."""
        finish_grad_reduce(self.module)

    def scale_gradients(self, scaling_factor: float | torch.Tensor) -> None:
        """Multiply all gradients: :func:`te_fsdp.scale_gradients`."""
        scale_gradients(self.module, scaling_factor)

    def zero_grad_buffer(self) -> None:
        """Forget all gradients: :func:`te_fsdp.zero_grad`."""
        zero_grad(self.module)

    # -------------------------------------------------------------------------------------------------- parameters

    def start_param_sync(self, *unused: Any, force_sync: bool = False, force_dispatch: bool = False) -> None:
        """Gather ahead: the root unit, or with ``force_sync`` all units, to the end. Collective over ``dp_shard``.

        Args:
            *unused: Ignored, so that it can be a hook.
            force_sync: Gather all, and wait.
            force_dispatch: Without meaning: gathers are always asynchronous.
        """
        if force_sync:
            finish_param_gather(self.module)
        else:
            start_param_gather(self.module, [""] if "" in self._state().modules else None)

    def synchronize_param_gather(self) -> None:
        """Release gathered weights, so that ``parameters()`` gives the sharded ones: :func:`te_fsdp.release_params`."""
        release_params(self.module)

    def install_optimized_model_weights(self) -> None:
        """Let the next forward read the optimizer's result. Steps do it by themselves; this is for other updates."""
        release_params(self.module)

    def broadcast_params(self) -> None:
        """Make copies of parameters equal: :func:`te_fsdp.broadcast_params`."""
        broadcast_params(self.module)

    # ---------------------------------------------------------------------------------------------------- settings

    def get_distributed_index(self) -> FSDPDistributedIndex:
        """Process groups and meshes."""
        return self.dist_index

    def reset_mixed_precision_policy(self, mixed_precision_policy: MixedPrecisionPolicy) -> None:
        """Take over ``grad_comm_dtype`` of a policy for the reductions to come; the other dtypes cannot change.

        Raises:
            PrecisionError: A dtype that gradients cannot be sent in.
        """
        native = mixed_precision_policy.native()  # checks the dtypes
        comm = comm_of(self.module)
        assert comm is not None, "fully_shard_model always gives a policy"
        comm.dtype = native.grad_comm_dtype
        before = (self.mp_policy.main_params_dtype, self.mp_policy.main_grads_dtype)
        if before != (native.main_params_dtype, native.main_grads_dtype):
            _log.warning("megatron_fsdp: main_params_dtype and main_grads_dtype stay %s and %s", *before)
        self.mp_policy = type(self.mp_policy)(*before, native.grad_comm_dtype)

    @contextlib.contextmanager
    def mixed_precision_context(self, mixed_precision_policy: MixedPrecisionPolicy) -> Iterator[None]:
        """Context of another ``grad_comm_dtype``: see :meth:`reset_mixed_precision_policy`."""
        before = self.mp_policy
        self.reset_mixed_precision_policy(mixed_precision_policy)
        try:
            yield
        finally:
            self.reset_mixed_precision_policy(before)

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """As of any module; gathered weights are released, so that the next forward reads what was loaded."""
        result = super().load_state_dict(state_dict, strict=strict, assign=assign)
        release_params(self.module)
        return result


def _native_strategies(
    config: DistributedDataParallelConfig, index: FSDPDistributedIndex | None
) -> tuple[str, str]:
    """The strategies of a configuration; that of the outer axis is ``no_shard`` where there is none."""
    strategy = native_strategy(config.data_parallel_sharding_strategy, "data_parallel_sharding_strategy")
    outer = native_strategy(config.outer_dp_sharding_strategy, "outer_dp_sharding_strategy", OUTER_STRATEGIES)
    if outer != "no_shard" and (index is None or not index.use_hybrid_fsdp):
        _log.warning("megatron_fsdp: outer_dp_sharding_strategy=%r has no effect without dp_outer_dim", outer)
        outer = "no_shard"
    return strategy, outer


def _move(module: torch.nn.Module, device: torch.device) -> None:
    """Move a model; what is on meta cannot be moved."""
    found = [n for n, t in [*module.named_parameters(), *module.named_buffers()] if t.is_meta]
    if found:
        raise InitError(
            f"fully_shard: {found[0]} is on meta",
            expected="a model with values",
            got=f"{len(found)} tensor(s) without",
            fix="init_model_with_meta_device=True",
        )
    module.to(device)
