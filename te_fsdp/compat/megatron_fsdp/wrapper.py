"""``MegatronFSDP``: the wrapper module of that name, with the methods of its documentation, over a te_fsdp model."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch

from te_fsdp.compat.megatron_fsdp.meshes import FSDPDistributedIndex
from te_fsdp.sharding.broadcast import broadcast_params
from te_fsdp.sharding.comm import comm_of
from te_fsdp.sharding.gathers import finish_param_gather, release_params, start_param_gather
from te_fsdp.sharding.reductions import finish_grad_reduce, scale_gradients, start_grad_reduce, zero_grad
from te_fsdp.sharding.schedule import microbatch, set_auto_sync, sync
from te_fsdp.sharding.state import ShardingState, required_state

if TYPE_CHECKING:
    from te_fsdp.compat.megatron_fsdp.arguments import MixedPrecisionPolicy

__all__ = ["MegatronFSDP"]

_log = logging.getLogger("te_fsdp")


class MegatronFSDP(torch.nn.Module):
    """A module around a model that te_fsdp has sharded, as ``fully_shard_model`` of this package returns it.

    Calling it calls the model. Its own additions are methods; parameters and state are the model's, under
    ``module.`` in names.

    Attributes:
        module: The sharded model.
        mp_policy: The policy that it was sharded with.
        model_auto_sync: Whether each backward counts as the last one of its step.
        dist_index: Process groups and meshes.
    """

    def __init__(self, module: torch.nn.Module, mp_policy: MixedPrecisionPolicy, *, auto_sync: bool) -> None:
        super().__init__()
        self.module = module
        self.mp_policy = mp_policy
        self.dist_index = FSDPDistributedIndex(self._state().meshes)
        self.model_auto_sync = True
        self.set_model_auto_sync(auto_sync)

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
            PrecisionError: A dtype that gradients cannot travel in.
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
