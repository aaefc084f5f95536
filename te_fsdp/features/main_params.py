"""``MainParameters``: parameters that an optimizer updates in place of the model's during its ``step``.

    model's parameters   read by forward; referenced by the optimizer's groups and state between steps
    main weights         fp32 rows of quantized or low-precision parameters, ``state[parameter]["master_param"]``
    own rows             rows of a replicated parameter: of its main weight, or of the parameter itself (a view)
    FusedAdam's own      main weights of quantized weights
                         (:func:`te_fsdp.features.main_weights.use_fused_adam_master_weights`)

A parameter has a main parameter if it is of low precision, if the optimizer's state is sharded over its replicas
(:mod:`te_fsdp.features.hfsdp.optimizer_shards`), or both.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Shard
from torch.optim import Optimizer

from te_fsdp.errors import CheckpointError, OrderError
from te_fsdp.features.hfsdp.gradients import OuterAverages, assign_main_gradients
from te_fsdp.features.hfsdp.optimizer_shards import (
    MainParameter,
    OptimizerShard,
    all_gather_main_params,
    axes_that_shard_dim0,
    is_padded,
    optimizer_shard,
)
from te_fsdp.features.incomplete_states import has_equal_groups, refuse_unloadable_states
from te_fsdp.features.local_step import install_local_tensors, remove_local_tensors
from te_fsdp.layout import chunk_range
from te_fsdp.lifecycle import gradient_of, gradients_of
from te_fsdp.quantized.amax import MAIN, quantize_into
from te_fsdp.records import KEEPS_MAIN_WEIGHTS, get_or_create_record
from te_fsdp.tensor_version import WeightVersions
from te_fsdp.upstream import te as _te, torch_dtensor as _torch
from te_fsdp.upstream.patches import apply_patch_to
from te_fsdp.upstream.torch_autograd import without_subclasses
from te_fsdp.upstream.torch_mixed_lists import foreach_writes


def is_low_precision(parameter: torch.Tensor) -> bool:
    """Return whether a parameter is quantized, or a floating-point parameter below fp32."""
    if parameter.dtype not in (torch.float32, torch.float64):
        return parameter.is_floating_point()
    return _te.is_quantized(_torch.local_of(parameter))


def initial_main_weight(local: torch.Tensor) -> torch.Tensor:
    """Return a new fp32 tensor with the initial value of a local tensor."""
    initial = _te.high_precision_value(local)
    if initial is not None:
        return initial.to(device=local.device, dtype=torch.float32, copy=True)
    if _te.is_quantized(local):
        return local.dequantize(dtype=torch.float32).detach().clone()  # type: ignore[call-arg]
    return local.detach().to(torch.float32, copy=True)


def main_parameters_of(optimizer: Optimizer) -> MainParameters | None:
    """Return the main parameters of an optimizer with sharded state, else ``None``."""
    main_params = getattr(optimizer, KEEPS_MAIN_WEIGHTS, None)
    return main_params if main_params is not None and main_params.shards_state else None


def optimizer_shard_in(optimizer: Optimizer, parameter: torch.Tensor) -> OptimizerShard | None:
    """Return the rows of a parameter for which this rank keeps state; ``None`` if its state is not sharded."""
    main_parameters = main_parameters_of(optimizer)
    return main_parameters.of(parameter).shard if main_parameters is not None else None


def rows_of_state(value: torch.Tensor, parameter: torch.Tensor) -> tuple[int, int, int] | None:
    """Return dim, start and end of the part of a local tensor that a state covers; ``None`` if it is not sharded."""
    mesh_dims = parameter.device_mesh.ndim if isinstance(parameter, DTensor) else 0
    if not isinstance(value, DTensor) or value.device_mesh.ndim != mesh_dims + 1:
        return None
    mesh, dim = value.device_mesh, _torch.shard_dim_of(value.placements[0])
    assert dim is not None
    low, high = chunk_range(_torch.local_of(parameter).shape[dim], mesh.size(0), mesh.get_local_rank(0))
    return dim, low, high


# [Note: main parameters in a step] Before a step, gradients are averaged over the replicas, and each rank keeps its
# rows. Main parameters then replace their parameters in the groups, with their state. After the step the parameters
# are restored, the replicas all-gather all rows, and each parameter becomes its main weight, rounded or quantized
# once. ``zero_grad``, learning rate schedulers and the groups' options only see the model's parameters.
class MainParameters:
    """The main parameters of one optimizer. Hooks call the object in steps and state dicts.

    With ``kept_by_fused_adam`` TE's FusedAdam creates and updates the main weights in its own state.
    """

    def __init__(self, optimizer: Optimizer, *, kept_by_fused_adam: bool = False) -> None:
        #: Averages of the gradients over the replicas; ``None`` if state is not sharded (main weights only).
        self.averages: OuterAverages | None = None
        #: Main parameters by ``id`` of the parameter.
        self.by_id: dict[int, MainParameter] = {}
        #: Parameters whose main parameters are in the groups; empty between steps.
        self.pairs: list[MainParameter] = []
        #: Local tensors that replace members of the groups; empty between steps.
        self.locals: list[torch.Tensor] = []
        self._groups: list[tuple[list[torch.Tensor], list[torch.Tensor]]] = []
        self.versions: WeightVersions | None = None  # of low-precision parameters, after the last step
        self._optimizer = weakref.ref(optimizer)
        self._own_main_weights: bool | None = None
        self.kept_by_fused_adam = kept_by_fused_adam
        # Loaded states with a main weight alone.
        self._without_state: list[tuple[MainParameter, dict[str, Any]]] = []
        foreach_writes().count(self)  # steps, which update local tensors, do not become slower
        self._before = optimizer.register_step_pre_hook(_torch.disable_compile(self._before_step))
        after = optimizer.register_step_post_hook(_torch.disable_compile(self._after_step))
        hooks: Any = after.hooks_dict_ref()  # an OrderedDict
        # Run before the user's hooks, which must see the parameters with their new values.
        hooks.move_to_end(after.id, last=False)
        if kept_by_fused_adam:
            # A failed step leaves main parameters in the groups, but state dicts need the parameters.
            optimizer.register_state_dict_pre_hook(self.restore_params)
            optimizer.register_load_state_dict_pre_hook(lambda opt, state_dict: self.restore_params(opt))
        elif _te.is_fused_adam(optimizer):
            # FusedAdam reads the groups after torch's hooks, which would restore the parameters too early.
            apply_patch_to(optimizer, "save", functools.partial(self._save, optimizer, optimizer.state_dict))
            apply_patch_to(
                optimizer, "load", functools.partial(self._load, optimizer, optimizer.load_state_dict)
            )
        else:
            optimizer.register_state_dict_pre_hook(self._before_save)
            optimizer.register_state_dict_post_hook(self._after_save)
            optimizer.register_load_state_dict_pre_hook(self._before_load)
            optimizer.register_load_state_dict_post_hook(self._after_load)
        setattr(optimizer, KEEPS_MAIN_WEIGHTS, self)

    # --- which parameters

    @property
    def shards_state(self) -> bool:
        """Return whether state is sharded over the replicas of parameters."""
        return self.averages is not None

    def shard_state(self, shards: Iterable[OptimizerShard]) -> OuterAverages:
        """Shard optimizer state across replicas with these shards; return the averages. Local operation."""
        self.averages = averages = OuterAverages(self.by_id, self.sharded, self.lookup)
        self.by_id.clear()
        for shard in shards:
            self.of(shard.parameter, shard)
        return averages

    def of(self, parameter: torch.Tensor, shard: OptimizerShard | None = None) -> MainParameter:
        """Return the ``MainParameter`` of a parameter; set its ``shard`` if given. Local operation."""
        pair = self.by_id.get(id(parameter))
        if pair is None:
            pair = self.by_id[id(parameter)] = MainParameter(parameter)
        if pair.shard is None and self.shards_state:
            pair.shard = shard or optimizer_shard(parameter)
            if pair.shard is not None:
                # With this option FusedAdam reads ``decoupled_grad`` instead of ``grad``.
                pair.shard.decoupled = getattr(self._optimizer(), "use_decoupled_grad", False)
                get_or_create_record(parameter).main_parameters = weakref.ref(self)
        return pair

    def create(self, optimizer: Optimizer, parameter: torch.Tensor) -> torch.Tensor | None:
        """Return the main parameter of a parameter, without a gradient; ``None`` if none is needed. Local operation."""
        # A new main weight starts with the parameter's initial value, or with the value that FusedAdam uses.
        shard, local, low = self.of(parameter).shard, _torch.local_of(parameter), is_low_precision(parameter)
        if self.kept_by_fused_adam:
            # Initialized as in FusedAdam's step. Its own kernel quantizes weights with delayed scaling.
            if not _te.is_quantized(local) or _te.has_delayed_scale(local):
                return None
            if not optimizer.state.get(parameter):
                optimizer.initialize_state(parameter, False)  # type: ignore[missing-attribute]
            return optimizer.state[parameter].get(MAIN)
        if not low and shard is None:
            return None
        if not low:
            # A view if the rows are contiguous. TE's FusedAdam ignores strides.
            return shard.distributed(shard.of(local.detach()).contiguous())
        main = optimizer.state.get(parameter, {}).get(MAIN)
        if main is None or (shard is not None and rows_of_state(main, parameter) is None):
            # Keep only this rank's rows of an unsharded main weight created by main_weights.
            value = initial_main_weight(local) if main is None else _torch.local_of(main)
            if shard is None:
                main = _torch.placed_like(value, parameter)
            else:
                main = shard.distributed(shard.of(value).clone(memory_format=torch.contiguous_format))
            optimizer.state[parameter][MAIN] = main
        _te.drop_high_precision_value(local)
        return main

    def create_all(self, optimizer: Optimizer) -> None:
        """Create all main weights now, so that they are allocated and start with the initial values."""
        for parameter in [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]:
            self.create(optimizer, parameter)

    def sharded(self) -> list[MainParameter]:
        """Return parameters with sharded state in the optimizer's order, identical on all replicas. Local."""
        groups = getattr(self._optimizer(), "param_groups", ())
        pairs = []
        for parameter in [p for group in groups for p in group["params"]]:
            pair = self.by_id.get(id(parameter))
            if pair is None or pair.shard is None:
                pair = self.of(parameter)
            if pair.shard is not None:
                pairs.append(pair)
        return pairs

    def lookup(self, parameters: Sequence[torch.Tensor], optimizer: Any = None) -> list[MainParameter | None]:
        """Return the main parameters for a step, created or updated as needed; ``None`` if not needed. Local."""
        optimizer = self._optimizer() if optimizer is None else optimizer
        assert optimizer is not None
        pairs: list[MainParameter | None] = []
        for parameter, local in zip(parameters, _torch.local_tensors_of(parameters), strict=True):
            state = optimizer.state.get(parameter)
            if not parameter.requires_grad and not state and gradient_of(parameter) is None:
                pairs.append(None)
                continue
            pair = self.by_id.get(id(parameter)) or self.of(parameter)
            # The cached main parameter is valid while the parameter has the same local tensor (initialization and
            # loading may replace it) and its state the same main weight (loading may replace it). Rows of the
            # parameter itself may be a copy, so they are updated in each step. A main parameter with an averaged
            # gradient stays.
            averaged = pair.source is not None
            is_current = state.get(MAIN) is pair.main if state and pair.low else averaged
            if pair.local is not local or not (pair.main is None or is_current):
                main = pair.main if averaged else self.create(optimizer, parameter)
                pair.local, pair.low, pair.main = local, is_low_precision(parameter), main
            pairs.append(None if pair.main is None else pair)
        return pairs

    # --- in the parameters' places, and out of them

    def install_main_params(self, optimizer: Any, *, stepping: bool = False, keep_main: bool = False) -> None:
        """Replace parameters in the groups by main parameters, and re-key the state.

        ``stepping`` excludes frozen parameters. ``keep_main`` keeps main weights in the state, as in state dicts.
        """
        if self._groups:  # a failed step has left them there
            self.restore_params(optimizer)
        scales, count = getattr(optimizer, "_scales", None), 0  # no scales without low-precision states
        for group in optimizer.param_groups:
            members, parameters = group["params"], list(group["params"])
            self._groups.append((members, parameters))
            count += len(parameters)
            members.clear()
            for parameter, pair in zip(parameters, self.lookup(parameters, optimizer), strict=True):
                if pair is None:
                    # FusedAdam creates state for all parameters that it sees.
                    frozen = not parameter.requires_grad and not optimizer.state.get(parameter)
                    if not frozen or not stepping or self.of(parameter).shard is None:
                        members.append(parameter)
                    continue
                state = optimizer.state.pop(parameter, {})
                if not keep_main or not pair.low:
                    state.pop(MAIN, None)
                if state:
                    optimizer.state[pair.main] = state
                if scales:
                    rekey_scales(optimizer, parameter, pair.main)
                self.pairs.append(pair)
                members.append(pair.main)
        if len(self.by_id) > count:  # drop parameters that the optimizer no longer has
            ids = {id(parameter) for _, parameters in self._groups for parameter in parameters}
            for key in self.by_id.keys() - ids:
                del self.by_id[key]
        if self.averages is not None and _te.is_fused_adam(optimizer):
            # Main parameters are the main weights, so FusedAdam must not create any.
            self._own_main_weights, optimizer.master_weights = optimizer.master_weights, False

    def remove_main_params(self, optimizer: Optimizer) -> None:
        """Restore parameters and state, and drop averaged gradients."""
        with without_subclasses():
            assign_main_gradients([pair.main for pair in self.pairs], [None] * len(self.pairs))
        self.restore_params(optimizer)
        if self.averages is not None:
            self.averages.clear()

    def restore_params(self, optimizer: Any) -> None:
        """Restore parameters and state, and keep averaged gradients."""
        if self.locals:
            remove_local_tensors(optimizer, self.locals)
        # In place, because learning rate schedulers and users have references to the group's list.
        for members, parameters in self._groups:
            members[:] = parameters
        scales = getattr(optimizer, "_scales", None)
        for pair in self.pairs:
            # The state moves back to the parameter, where state_dict and checkpoints find it.
            state = optimizer.state.pop(pair.main, {})
            if pair.low:
                state = {**state, MAIN: pair.main}
            if state:
                optimizer.state[pair.parameter] = state
            if scales:
                rekey_scales(optimizer, pair.main, pair.parameter)
        self.pairs, self._groups, self._without_state = [], [], []
        # FusedAdam must not make main weights of the FP32 main parameters, but its option belongs to the user.
        if self._own_main_weights is not None:
            optimizer.master_weights, self._own_main_weights = self._own_main_weights, None

    # --- hooks of the optimizer

    def install_main_params_again(self) -> None:
        """Let hooks that the user has registered since run before this object's hook. Local operation."""
        hooks: Any = self._before.hooks_dict_ref()
        hooks.move_to_end(self._before.id)

    @torch.no_grad()
    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if kwargs.get("closure") is not None or any(map(callable, args[1:])):
            raise OrderError(
                f"{type(optimizer).__name__}.step(closure) with main weights",
                expected="step() after backward()",
                got="a closure",
                why="The closure computes gradients after the main weights need them",
                fix="call backward() first, then step() without a closure",
            )
        if self.averages is not None:
            self.restore_params(optimizer)
            self.averages.average()
        self.install_main_params(optimizer, stepping=True)
        pairs = [pair for pair in self.pairs if pair.shard is None]
        if self.kept_by_fused_adam:
            parameters = {id(pair.main): pair.parameter for pair in pairs}
            for group in optimizer.param_groups:
                _set_fused_adam_gradients(optimizer, group["params"], parameters)
        else:
            mains, gradients = [pair.main for pair in pairs], gradients_of([pair.parameter for pair in pairs])
            assign_main_gradients(mains, _torch.in_dtypes_of(gradients, mains))
        self.locals = install_local_tensors(optimizer)

    @torch.no_grad()
    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        cut: list[tuple[OptimizerShard, torch.Tensor]] = []
        updates: list[tuple[torch.Tensor, torch.Tensor]] = []
        with without_subclasses():  # reads .grad of DTensors without Python calls
            for pair in self.pairs:
                main: Any = pair.main
                if main.grad is None:
                    continue
                local = _torch.local_of_dtensor(main) if isinstance(main, DTensor) else main
                if pair.shard is None:
                    updates.append((pair.local, local))
                else:
                    cut.append((pair.shard, local))
        quantize_into(updates)
        if cut:
            all_gather_main_params(cut)
        self.remove_main_params(optimizer)

    def _save(self, optimizer: Optimizer, stock: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        self._before_save(optimizer)
        try:
            result = stock()
        finally:
            self.restore_params(optimizer)
        self._after_save(optimizer, result)
        return result

    def _load(self, optimizer: Optimizer, stock: Callable[..., None], state_dict: dict[str, Any]) -> None:
        fitted = self._before_load(optimizer, state_dict)
        try:
            stock(fitted)
        finally:
            self._after_load(optimizer)

    def _before_save(self, optimizer: Optimizer) -> None:
        if self.shards_state:
            self.install_main_params(optimizer, keep_main=True)
        else:
            self.restore_params(optimizer)

    def _after_save(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
        self.restore_params(optimizer)
        for key, pair in self._members(optimizer, state_dict):
            if not (state := state_dict["state"].get(key)) or (shard := pair.shard) is None:
                continue
            if is_padded(shard):
                state_dict["state"][key] = {name: _padded(shard, value) for name, value in state.items()}

    def _before_load(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Install main parameters first, because loaded state is cast to the dtype of the parameters in the groups."""
        self.restore_params(optimizer)
        if not has_equal_groups(optimizer, state_dict):  # torch raises
            return state_dict
        refuse_unloadable_states(optimizer, state_dict, MAIN, cut=self.shards_state)
        states = dict(state_dict["state"])
        for key, pair in (members := self._members(optimizer, state_dict)):
            if (state := states.get(key)) and pair.shard is not None:  # this rank's rows of sharded states
                states[key] = {name: _local_rows(pair.shard, name, value) for name, value in state.items()}
            # Frozen parameters may have none, and torch would cast the loaded one to the parameter's dtype.
            if state and MAIN in state and is_low_precision(pair.parameter):
                self.create(optimizer, pair.parameter)
        self.install_main_params(optimizer)
        # Optimizers of torch read the other entries of a state that is not empty.
        bare = {key for key, state in states.items() if set(state) == {MAIN}}
        self._without_state = [(pair, states.pop(key)) for key, pair in members if key in bare]
        return {**state_dict, "state": states}

    @torch.no_grad()
    def _after_load(self, optimizer: Optimizer) -> None:
        """Copy loaded main weights into the existing ones, and restore the parameters."""
        loaded_states = [(pair, optimizer.state.get(pair.main, {})) for pair in self.pairs]
        for pair, state in loaded_states + self._without_state:
            if (loaded := state.pop(MAIN, None)) is not None and pair.low:
                _torch.local_of(pair.main).copy_(_torch.local_of(loaded))
        self.restore_params(optimizer)

    def _members(self, optimizer: Optimizer, state_dict: Any) -> list[tuple[Any, MainParameter]]:
        """Return (key in the state dict, ``MainParameter``) of each parameter."""
        keys = [key for group in state_dict["param_groups"] for key in group["params"]]
        params = [p for group in optimizer.param_groups for p in group["params"]]
        return [(key, self.of(parameter)) for key, parameter in zip(keys, params, strict=True)]


def _set_fused_adam_gradients(
    optimizer: Any, members: Iterable[torch.Tensor], parameters: Mapping[int, torch.Tensor]
) -> None:
    """Set gradients of the main weights of a FusedAdam group. ``parameters``: ``id`` of a main weight -> parameter.

    Gradients are cast to fp32 if those of the group have several dtypes, or for ``capturable``. Local operation.
    """
    name = "decoupled_grad" if optimizer.use_decoupled_grad else "grad"
    mains, gradients, dtypes = [], list[Any](), set[torch.dtype]()
    with without_subclasses():  # reads and sets attributes of DTensors without Python calls
        for member in members:
            if member.dtype != torch.float32:
                continue
            parameter = parameters.get(id(member))
            gradient = getattr(member if parameter is None else parameter, name, None)
            if gradient is not None:
                dtypes.add(gradient.dtype)
            if parameter is not None:
                mains.append(member)
                gradients.append(gradient)
    if len(dtypes) > 1 or optimizer.capturable:
        gradients = _torch.in_dtypes_of(gradients, mains)
    with without_subclasses():
        for main, gradient in zip(mains, gradients, strict=True):
            if gradient is not None:
                main.grad = None  # grad_dtype cannot change while there is a gradient
                main.grad_dtype = gradient.dtype
        assign_main_gradients(mains, gradients)


def rekey_scales(optimizer: Any, source: torch.Tensor, target: torch.Tensor) -> None:
    """Re-key FusedAdam's scales of low-precision states to a different parameter (``_scales``, TE 2.18 to 2.20)."""
    scales = getattr(optimizer, "_scales", {})
    if source in scales:
        scales[target] = scales.pop(source)


# [Note: padded states] ``state_dict`` contains states and main weights as DTensors, and ``load_state_dict``
# loads them. But DTensor placements cannot represent rows that several axes shard unevenly. DCP would
# silently store them at wrong offsets (torch 2.11 to 2.15). Such states are padded to the same number of rows
# on all ranks and get a leading dim per sharding axis. They load on the same mesh, and have a different shape
# (which raises) on any other mesh. te_fsdp.checkpoint uses :attr:`OptimizerShard.low` and ``high`` and does
# not have this limitation.
def _padded(shard: OptimizerShard, value: Any) -> Any:
    """Return a state of unevenly sharded rows, with a leading dim per sharding axis and padded rows."""
    if not isinstance(value, DTensor) or value.shape != shard.parameter.shape:
        return value
    mesh, axes, rows, local = shard.mesh, axes_that_shard_dim0(shard), value.shape[0], _torch.local_of(value)
    # In this order, because the last axis shards first. Every rank then has the same number of rows.
    for axis in reversed(axes):
        rows = -(-rows // mesh.size(axis))
    padded = torch.cat([local, local.new_zeros((rows - len(local), *local.shape[1:]))])[(None,) * len(axes)]
    like = torch.empty((*(mesh.size(axis) for axis in axes), rows, *value.shape[1:]), device="meta")
    placements = [
        Shard(axes.index(axis)) if axis in axes else _torch.shifted(placement, len(axes))
        for axis, placement in enumerate(shard.placements)
    ]
    return _torch.placed(padded, mesh, placements, like)


def _local_rows(shard: OptimizerShard, name: str, value: Any) -> Any:
    """Return this rank's rows of a loaded state: already sharded (possibly padded), or of the full parameter shard."""
    if not isinstance(value, torch.Tensor) or value.ndim == 0:
        return value
    local, leading = _torch.local_of(value), len(axes_that_shard_dim0(shard))
    # A padded state of this format. Other shapes are states of full shards, from before shard_optimizer.
    if value.ndim == shard.parameter.ndim + leading and set(local.shape[:leading]) <= {1}:
        local = local.reshape(local.shape[leading:])[: shard.high - shard.low]
    elif tuple(local.shape) != shard.shape and local.shape == _torch.local_of(shard.parameter).shape:
        local = shard.of(local).contiguous()
    if tuple(local.shape) != shard.shape:
        raise CheckpointError(
            f"load_state_dict: {name} of a parameter of shape {tuple(shard.parameter.shape)}",
            expected=f"this rank's rows, {shard.shape}, or the rows of its shard",
            got=f"{tuple(local.shape)} of {tuple(value.shape)}",
            fix="load it on the same mesh, or use te_fsdp.checkpoint",
        )
    return shard.distributed(local)
