"""``MainParameters``: what an optimizer updates in place of the model's parameters, while its ``step`` runs.

    model's parameters   what forward reads; the optimizer's groups and state refer to them between steps
    main weights         fp32 rows of quantized or other low-precision parameters, ``state[parameter]["master_param"]``
    own rows             of a parameter that other ranks hold as well: of its main weight, or of itself (a view)
    FusedAdam's own      main weights of quantized weights
    (:func:`te_fsdp.features.main_weights.use_fused_adam_master_weights`)

A parameter has a main parameter if it is of low precision, or if the optimizer's state is cut over its replicas
(:mod:`te_fsdp.features.hfsdp.optimizer_shards`), or both. Before a step gradients are averaged over the replicas,
each rank
keeping its rows, and main parameters take their parameters' places in the groups, with their state. After it they give
them back, the replicas gather all rows, and each parameter becomes its main weight, rounded or quantized once. Nothing
else changes: ``zero_grad``, learning rate schedulers and the groups' options see the model's parameters.

``state_dict`` shows states and main weights as the DTensors that they are, and ``load_state_dict`` takes them back. But
DTensor has no words for rows that are cut unevenly several times, and DCP, which goes by its arithmetic, would put them
in wrong places without an error (torch 2.11 to 2.15). Such states are padded to the same number of rows on all ranks,
and get a leading dim for each axis that cuts them: right on the same mesh, and of another shape, hence refused, on any
other. te_fsdp.checkpoint goes by :attr:`OptimizerShard.low` and ``high``, and has no such limit.
"""

from __future__ import annotations

import functools
import math
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor import DTensor, Shard

from te_fsdp.errors import CheckpointError, OrderError
from te_fsdp.features.hfsdp.gradients import OuterAverages
from te_fsdp.features.hfsdp.main_parameter import MainParameter
from te_fsdp.features.hfsdp.optimizer_shards import OptimizerShard, all_gather_main_params, optimizer_shard
from te_fsdp.features.local_step import Replaced, put_locals_in, take_locals_out
from te_fsdp.layout import chunk_range
from te_fsdp.lifecycle import assign_main_gradients, gradients_of
from te_fsdp.quantized.amax import KEEPS_MAIN_WEIGHTS, quantize_into
from te_fsdp.records import get_or_create_record
from te_fsdp.upstream import te as _te, torch_dtensor as _torch
from te_fsdp.upstream.patches import apply_patch_to

if TYPE_CHECKING:
    from torch.optim import Optimizer

#: Name of the main weight in an optimizer's state; FusedAdam's own.
MAIN = "master_param"


def is_low_precision(parameter: torch.Tensor) -> bool:
    """Whether a parameter is quantized, or a floating-point one below fp32."""
    if parameter.dtype not in (torch.float32, torch.float64):
        return parameter.is_floating_point()
    return _te.is_quantized(_torch.local_of(parameter))


def initial_main_weight(local: torch.Tensor) -> torch.Tensor:
    """A new fp32 tensor with the value that a local tensor was initialised with."""
    kept = _te.high_precision_value(local)
    if kept is not None:
        return kept.to(device=local.device, dtype=torch.float32, copy=True)
    if _te.is_quantized(local):
        return local.dequantize(dtype=torch.float32).detach().clone()  # type: ignore[call-arg]
    return local.detach().to(torch.float32, copy=True)


def main_parameters_of(optimizer: Optimizer) -> MainParameters | None:
    """The main parameters of an optimizer that cuts its state, ``None`` for any other."""
    found = getattr(optimizer, KEEPS_MAIN_WEIGHTS, None)
    return found if found is not None and found.cuts else None


def optimizer_shard_in(optimizer: Optimizer, parameter: torch.Tensor) -> OptimizerShard | None:
    """The rows of a parameter that this rank keeps state for; ``None`` if the optimizer does not cut it."""
    main_parameters = main_parameters_of(optimizer)
    return main_parameters.of(parameter).shard if main_parameters is not None else None


def rows_of_state(value: torch.Tensor, parameter: torch.Tensor) -> tuple[int, int, int] | None:
    """Dim and half-open range of it of the part of a local tensor that a state covers; ``None`` if it is not cut."""
    own = parameter.device_mesh.ndim if isinstance(parameter, DTensor) else 0
    if not isinstance(value, DTensor) or value.device_mesh.ndim != own + 1:
        return None
    mesh, dim = value.device_mesh, _torch.shard_dim_of(value.placements[0])
    assert dim is not None
    low, high = chunk_range(_torch.local_of(parameter).shape[dim], mesh.size(0), mesh.get_local_rank(0))
    return dim, low, high


class MainParameters:
    """The main parameters of one optimizer, which keeps them, taking part in its steps and its state dicts.

    Attributes:
        lent: Whether they are those that TE's FusedAdam keeps itself.
        known: What is known of each parameter, by its id.
        pairs: Of those whose main parameters are in their places now; empty between steps.
        locals: Members of the groups whose local tensors are in their places now; empty between steps.
        averages: Of the gradients, over the replicas; ``None`` where state is not cut: there are main weights alone.
    """

    def __init__(self, optimizer: Optimizer, *, lent: bool = False) -> None:
        self.averages: OuterAverages | None = None
        self.known: dict[int, MainParameter] = {}
        self.pairs: list[MainParameter] = []
        self.locals: list[Replaced] = []
        self._groups: list[tuple[list[torch.Tensor], list[torch.Tensor]]] = []
        self._optimizer = weakref.ref(optimizer)
        self._own_main_weights: bool | None = None
        self.lent = lent
        self._before = optimizer.register_step_pre_hook(self._before_step)
        after = optimizer.register_step_post_hook(self._after_step)
        hooks: Any = after.hooks_dict_ref()  # an OrderedDict
        # Before those of the user's: they shall see the parameters, with their new values.
        hooks.move_to_end(after.id, last=False)
        if lent:
            # After a step that raised they are still there, and its state dicts know parameters alone.
            optimizer.register_state_dict_pre_hook(self.put_back)
            optimizer.register_load_state_dict_pre_hook(lambda one, state_dict: self.put_back(one))
        elif _te.is_fused_adam(optimizer):
            # With main parameters in place to the end of its methods, which go on after torch's, and look at the groups
            # again: hooks of torch's would be too early.
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
    def cuts(self) -> bool:
        """Whether state is cut over the replicas of parameters."""
        return self.averages is not None

    def cut(self, shards: Iterable[OptimizerShard]) -> None:
        """From now on cut state over the replicas of parameters: so far of these. Local operation."""
        self.averages = OuterAverages(self)
        self.known.clear()
        for shard in shards:
            self.of(shard.parameter, shard)

    def of(self, parameter: torch.Tensor, shard: OptimizerShard | None = None) -> MainParameter:
        """What is known of a parameter, and maybe its ``shard``. Local operation."""
        known = self.known.get(id(parameter))
        if known is None:
            known = self.known[id(parameter)] = MainParameter(parameter)
        if known.shard is None and self.cuts:
            known.shard = shard or optimizer_shard(parameter)
            if known.shard is not None:
                known.shard.decoupled = getattr(self._optimizer(), "use_decoupled_grad", False)
                get_or_create_record(parameter).main_parameters = weakref.ref(self)
        return known

    def make(self, optimizer: Optimizer, parameter: torch.Tensor) -> torch.Tensor | None:
        """The main parameter of a parameter, without gradient; ``None`` for one that needs none. Local operation.

        A new main weight begins at the value that the parameter was initialised with; FusedAdam's own where that does.
        """
        shard, local, low = self.of(parameter).shard, _torch.local_of(parameter), is_low_precision(parameter)
        if self.lent:
            # FusedAdam's, begun as its step would. Weights with delayed scaling its own kernel quantizes.
            if not _te.is_quantized(local) or _te.has_delayed_scale(local):
                return None
            if not optimizer.state.get(parameter):
                optimizer.initialize_state(parameter, False)  # type: ignore[missing-attribute]
            return optimizer.state[parameter].get(MAIN)
        if not low and shard is None:
            return None
        if not low:
            # A view where rows lie together; TE's FusedAdam goes through memory without strides.
            return shard.distributed(shard.of(local.detach()).contiguous())
        main = optimizer.state.get(parameter, {}).get(MAIN)
        if main is None or (shard is not None and rows_of_state(main, parameter) is None):
            # Of a whole one that main_weights has made only this rank's rows stay.
            whole = initial_main_weight(local) if main is None else _torch.local_of(main)
            if shard is None:
                main = _torch.placed_like(whole, parameter)
            else:
                main = shard.distributed(shard.of(whole).clone(memory_format=torch.contiguous_format))
            optimizer.state[parameter][MAIN] = main
        _te.drop_high_precision_value(local)
        return main

    def start(self, optimizer: Optimizer) -> None:
        """Give each parameter its main weight now, so that its memory is taken and its beginning kept."""
        for parameter in [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]:
            self.make(optimizer, parameter)

    def trained(self) -> list[MainParameter]:
        """The trained parameters whose state is cut, in the optimizer's order; the same on all replicas. Local."""
        optimizer = self._optimizer()
        groups = [] if optimizer is None else optimizer.param_groups
        found = []
        for parameter in [p for group in groups for p in group["params"] if p.requires_grad]:
            own = self.known.get(id(parameter))
            if own is None or own.shard is None:
                own = self.of(parameter)
            if own.shard is not None:
                found.append(own)
        return found

    def look(self, parameters: Sequence[torch.Tensor], optimizer: Any = None) -> list[MainParameter | None]:
        """Parameters with the main parameters that a step now would use, made where the last look does not hold. Local.

        ``None`` for those that need none, and for frozen ones without state.
        """
        optimizer = self._optimizer() if optimizer is None else optimizer
        assert optimizer is not None
        found: list[MainParameter | None] = []
        for parameter, local in zip(parameters, _torch.local_tensors_of(parameters), strict=True):
            state = optimizer.state.get(parameter)
            if not parameter.requires_grad and not state:
                found.append(None)
                continue
            own = self.known.get(id(parameter)) or self.of(parameter)
            # The last look holds as long as the parameter has the same local tensor (initialising and loading may
            # replace it), and its state the same main weight (so may loading). Rows of a parameter itself are looked at
            # anew in each step: maybe a copy. With an averaged gradient a main parameter stays.
            averaged = own.source is not None
            kept = state.get(MAIN) is own.main if state and own.low else averaged
            if own.local is not local or not (own.main is None or kept):
                main = own.main if averaged else self.make(optimizer, parameter)
                own.local, own.low, own.main = local, is_low_precision(parameter), main
            found.append(None if own.main is None else own)
        return found

    # --- in the parameters' places, and out of them

    def install_main_params(self, optimizer: Any, *, stepping: bool = False, keep_main: bool = False) -> None:
        """Put main parameters into the groups, and the state under their names.

        ``stepping`` leaves frozen parameters out: FusedAdam makes states for all that it sees. ``keep_main`` leaves
        main weights in the state as well, as state dicts show them.
        """
        self.put_back(optimizer)  # a step that raised has left them in
        scales = hasattr(optimizer, "_scales")
        for group in optimizer.param_groups:
            live, held = group["params"], list(group["params"])
            self._groups.append((live, held))
            live.clear()
            for parameter, pair in zip(held, self.look(held, optimizer), strict=True):
                if pair is None:
                    frozen = not parameter.requires_grad and not optimizer.state.get(parameter)
                    if not frozen or not stepping or self.of(parameter).shard is None:
                        live.append(parameter)
                    continue
                state = optimizer.state.pop(parameter, {})
                if not keep_main or not pair.low:
                    state.pop(MAIN, None)
                if state:
                    optimizer.state[pair.main] = state
                if scales:
                    rekey_scales(optimizer, parameter, pair.main)
                self.pairs.append(pair)
                live.append(pair.main)
        ids = {id(parameter) for _, held in self._groups for parameter in held}
        if len(self.known) > len(ids):  # also of parameters that it has no longer
            self.known = {key: known for key, known in self.known.items() if key in ids}
        if self.cuts and _te.is_fused_adam(optimizer):
            # Main parameters are the main weights: it shall make none of them.
            self._own_main_weights, optimizer.master_weights = optimizer.master_weights, False

    def remove_main_params(self, optimizer: Optimizer) -> None:
        """Give the parameters their places and their state back; averaged gradients are forgotten."""
        assign_main_gradients([pair.main for pair in self.pairs], [None] * len(self.pairs))
        self.put_back(optimizer)
        if self.averages is not None:
            self.averages.clear()

    def put_back(self, optimizer: Any) -> None:
        """As :meth:`remove_main_params`, but averaged gradients stay."""
        if self.locals:
            take_locals_out(optimizer, self.locals)
        for live, held in self._groups:
            live[:] = held
        scales = hasattr(optimizer, "_scales")
        for pair in self.pairs:
            state = optimizer.state.pop(pair.main, {})
            if pair.low:
                state = {**state, MAIN: pair.main}
            if state:
                optimizer.state[pair.parameter] = state
            if scales:
                rekey_scales(optimizer, pair.main, pair.parameter)
        self.pairs, self._groups = [], []
        if self._own_main_weights is not None:
            optimizer.master_weights, self._own_main_weights = self._own_main_weights, None

    # --- hooks of the optimizer

    def install_main_params_again(self) -> None:
        """Let hooks that the user has registered since see the parameters before a step. Local operation."""
        hooks: Any = self._before.hooks_dict_ref()
        hooks.move_to_end(self._before.id)

    @torch.no_grad()
    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if kwargs.get("closure") is not None or any(callable(a) for a in args[1:]):
            raise OrderError(
                f"{type(optimizer).__name__}.step(closure) with main weights",
                expected="step() after backward()",
                got="a closure",
                why="Its gradients would come too late for the main weights",
                fix="call backward() first, then step() without a closure",
            )
        self.put_back(optimizer)
        if self.averages is not None:
            self.averages.make()
        self.install_main_params(optimizer, stepping=True)
        whole = [pair for pair in self.pairs if pair.shard is None]
        if self.lent:
            _assign_without_cast(optimizer, {id(pair.main): pair.parameter for pair in whole})
        else:
            mains, gradients = [pair.main for pair in whole], gradients_of([pair.parameter for pair in whole])
            assign_main_gradients(mains, _torch.in_dtypes_of(gradients, mains))
        self.locals = put_locals_in(optimizer)

    @torch.no_grad()
    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        cut: list[tuple[OptimizerShard, torch.Tensor]] = []
        whole: list[tuple[torch.Tensor, torch.Tensor]] = []
        mains = _torch.local_tensors_of([pair.main for pair in self.pairs])
        for pair, main in zip(self.pairs, mains, strict=True):
            if pair.main.grad is not None and pair.shard is not None:
                cut.append((pair.shard, main))
            elif pair.main.grad is not None:
                whole.append((pair.local, main))
        quantize_into(whole)
        if cut:
            all_gather_main_params(cut)
        self.remove_main_params(optimizer)

    def _save(self, optimizer: Optimizer, stock: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        self._before_save(optimizer)
        try:
            result = stock()
        finally:
            self.put_back(optimizer)
        self._after_save(optimizer, result)
        return result

    def _load(self, optimizer: Optimizer, stock: Callable[..., None], state_dict: dict[str, Any]) -> None:
        fitted = self._before_load(optimizer, state_dict)
        try:
            stock(fitted)
        finally:
            self._after_load(optimizer)

    def _before_save(self, optimizer: Optimizer) -> None:
        if self.cuts:
            self.install_main_params(optimizer, keep_main=True)
        else:
            self.put_back(optimizer)

    def _after_save(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
        self.put_back(optimizer)
        for key, shard in self._shards(optimizer, state_dict):
            state = state_dict["state"].get(key)
            if state and not _is_exact(shard):
                state_dict["state"][key] = {name: _padded(shard, value) for name, value in state.items()}

    def _before_load(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Loaded state is cast to the dtype of the parameters in the groups: these must be the fp32 ones."""
        alone = [key for key, state in state_dict["state"].items() if set(state) == {MAIN}]
        if alone:
            raise CheckpointError(
                f"{type(optimizer).__name__}.load_state_dict: {len(alone)} parameter(s) with main weights alone",
                expected="the whole state",
                got="that of an optimizer that has not stepped",
                why="DCP fills the state dict of an optimizer as it is: what is missing there is not loaded",
                fix="use te_fsdp.checkpoint.load, which makes the missing state",
            )
        states = dict(state_dict["state"])
        self.put_back(optimizer)
        for key, shard in self._shards(optimizer, state_dict):  # this rank's rows of what is cut
            if key in states:
                states[key] = {name: _own_rows(shard, name, value) for name, value in states[key].items()}
        self.install_main_params(optimizer)
        return {**state_dict, "state": states}

    @torch.no_grad()
    def _after_load(self, optimizer: Optimizer) -> None:
        """Copy loaded main weights into those that are there, and end the swap."""
        for pair in self.pairs:
            loaded = optimizer.state.get(pair.main, {}).pop(MAIN, None)
            if loaded is not None and pair.low:
                _torch.local_of(pair.main).copy_(_torch.local_of(loaded))
        self.put_back(optimizer)

    def _shards(self, optimizer: Optimizer, state_dict: Any) -> Iterator[tuple[Any, OptimizerShard]]:
        """Key in the state dict and rows of each cut parameter."""
        keys = [key for group in state_dict["param_groups"] for key in group["params"]]
        held = [p for group in optimizer.param_groups for p in group["params"]]
        for key, parameter in zip(keys, held, strict=False):  # torch compares the groups, with a message
            shard = self.of(parameter).shard
            if shard is not None:
                yield key, shard


def rekey_scales(optimizer: Any, source: torch.Tensor, target: torch.Tensor) -> None:
    """Key FusedAdam's scales of low-precision states by another parameter (``_scales``, TE 2.18 .. 2.20)."""
    scales = getattr(optimizer, "_scales", {})
    if source in scales:
        scales[target] = scales.pop(source)


def _assign_without_cast(optimizer: Any, parameters: dict[int, torch.Tensor]) -> None:
    """Give main weights, by whose ``id`` parameters are found, their gradients in the dtype that these have.

    Of which FusedAdam takes any, but in one group one dtype for all parameters in fp32, and with ``capturable=True``
    theirs alone. Where that is not so gradients become fp32 ones.
    """
    name = "decoupled_grad" if optimizer.use_decoupled_grad else "grad"
    for group in optimizer.param_groups:
        members = [p for p in group["params"] if p.dtype == torch.float32]
        gradients = [getattr(parameters.get(id(p), p), name, None) for p in members]
        dtypes = {gradient.dtype for gradient in gradients if gradient is not None}
        together = len(dtypes) <= 1 and not optimizer.capturable
        for main, gradient in zip(members, gradients, strict=True):
            if id(main) not in parameters:
                continue
            if gradient is not None:
                if not together:
                    (gradient,) = _torch.in_dtypes_of([gradient], [main])
                main.grad = None
                main.grad_dtype = gradient.dtype
            assign_main_gradients([main], [gradient])


def _axes_that_shard_dim0(shard: OptimizerShard) -> list[int]:
    """The axes of ``shard.mesh`` that cut dim 0, in their order there; the last one cuts first."""
    return [axis for axis, p in enumerate(shard.placements) if _torch.shard_dim_of(p) == 0]


def _is_exact(shard: OptimizerShard) -> bool:
    """Whether DTensor's arithmetic is right: one axis cuts the rows, or each does so evenly."""
    sizes = [size for axis in _axes_that_shard_dim0(shard) if (size := shard.mesh.size(axis)) > 1]
    # A further dim was chosen because it is even.
    return shard.dim > 0 or len(sizes) <= 1 or shard.parameter.shape[0] % math.prod(sizes) == 0


def _padded(shard: OptimizerShard, value: Any) -> Any:
    """A state of unevenly cut rows with one leading dim for each axis that cuts them, and padded rows after these."""
    if not isinstance(value, DTensor) or value.shape != shard.parameter.shape:
        return value
    mesh, axes, rows, local = shard.mesh, _axes_that_shard_dim0(shard), value.shape[0], _torch.local_of(value)
    for axis in reversed(axes):
        rows = -(-rows // mesh.size(axis))
    padded = torch.cat([local, local.new_zeros((rows - len(local), *local.shape[1:]))])[(None,) * len(axes)]
    like = torch.empty((*(mesh.size(axis) for axis in axes), rows, *value.shape[1:]), device="meta")
    placements = [
        Shard(axes.index(axis)) if axis in axes else _torch.shifted(placement, len(axes))
        for axis, placement in enumerate(shard.placements)
    ]
    return _torch.placed(padded, mesh, placements, like)


def _own_rows(shard: OptimizerShard, name: str, value: Any) -> Any:
    """A loaded state as this rank's rows: cut and maybe padded, or of the whole shard."""
    if not isinstance(value, torch.Tensor) or value.ndim == 0:
        return value
    local, leading = _torch.local_of(value), len(_axes_that_shard_dim0(shard))
    if value.ndim == shard.parameter.ndim + leading:
        local = local.reshape(local.shape[leading:])[: shard.high - shard.low]
    elif tuple(local.shape) != shard.shape and local.shape == _torch.local_of(shard.parameter).shape:
        local = shard.of(local).contiguous()
    if tuple(local.shape) != shard.shape:
        raise CheckpointError(
            f"load_state_dict: {name} of a parameter of shape {tuple(shard.parameter.shape)}",
            expected=f"this rank's rows, {shard.shape}, or those of its shard",
            got=f"{tuple(local.shape)} of {tuple(value.shape)}",
            fix="load it on the mesh that it was saved on, or through te_fsdp.checkpoint",
        )
    return shard.distributed(local)
