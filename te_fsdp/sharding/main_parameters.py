"""``MainParameters``: what an optimizer updates in place of the model's parameters, while its ``step`` runs.

    model's parameters   what forward reads; the optimizer's groups and state refer to them between steps
    main weights         fp32 rows of quantized or other low-precision parameters, ``state[parameter]["master_param"]``
    own rows             of a parameter that other ranks hold as well: of its main weight, or of itself (a view)
    FusedAdam's own      main weights of quantized weights (:func:`te_fsdp.sharding.main_weights.lend_main_weights`)

A parameter has a main parameter if it is of low precision, or if the optimizer's state is cut over its replicas
(:mod:`te_fsdp.sharding.outer_collectives`), or both. Before a step gradients are averaged over the replicas, each rank
keeping its rows (one reduce-scatter), and main parameters take the places of their parameters in the groups, with their
state. After it they give them back, the replicas gather all rows (one all-gather), and each parameter becomes its main
weight, rounded or quantized once. Nothing else changes: ``zero_grad``, learning rate schedulers and the groups'
options see the model's parameters.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from te_fsdp import _te, _torch
from te_fsdp.errors import OrderError
from te_fsdp.parameters import noted
from te_fsdp.quantized.amax import write_all
from te_fsdp.sharding.outer_averages import OuterAverages
from te_fsdp.sharding.outer_collectives import OptimizerShard, optimizer_shard, rows_of_state
from te_fsdp.sharding.outer_gather import install_by_unit, start_install
from te_fsdp.sharding.state import state_of
from te_fsdp.step_hooks import Seen, give_gradients, gradients_of

if TYPE_CHECKING:
    from torch.optim import Optimizer
    from torch.utils.hooks import RemovableHandle

#: Name of the main weight in an optimizer's state; FusedAdam's own.
MAIN = "master_param"


def is_low(parameter: torch.Tensor) -> bool:
    """Whether a parameter is quantized, or a floating-point one below fp32."""
    if parameter.dtype not in (torch.float32, torch.float64):
        return parameter.is_floating_point()
    return _te.is_quantized(_torch.local_of(parameter))


def beginning(local: torch.Tensor) -> torch.Tensor:
    """A new fp32 tensor with the value that a local tensor was initialised with."""
    kept = _te.high_precision_value(local)
    if kept is not None:
        return kept.to(device=local.device, dtype=torch.float32, copy=True)
    if _te.is_quantized(local):
        return local.dequantize(dtype=torch.float32).detach().clone()  # type: ignore[call-arg]
    return local.detach().to(torch.float32, copy=True)


@dataclass(eq=False)
class MainParameter:
    """What is known of one parameter of an optimizer.

    Attributes:
        parameter: The parameter.
        shard: This rank's rows of it; ``None`` if its state is not cut.
        main: The main parameter at the last look; ``None`` where there needs to be none.
        local: The parameter's local tensor then.
        low: Whether it is of low precision, so that the main parameter is its main weight.
        source: The gradient over whose replicas that of ``main`` is the average; ``None``: it has none.
    """

    parameter: torch.Tensor
    shard: OptimizerShard | None = None
    main: Any = None
    local: torch.Tensor | None = None
    low: bool = False
    source: Seen | None = None


class MainParameters:
    """The main parameters of one optimizer.

    Attributes:
        known: What is known of each parameter, by its id.
        pairs: Of those whose main parameters are in their places now; empty between steps.
        averages: Of the gradients, over the replicas; ``None`` where state is not cut over these: then there are main
            weights alone.
        overlaps: Whether new weights arrive after the step, unit by unit.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self.averages: OuterAverages | None = None
        self.overlaps = False
        self.known: dict[int, MainParameter] = {}
        self.pairs: list[MainParameter] = []
        self._groups: list[tuple[list[torch.Tensor], list[torch.Tensor]]] = []
        self._optimizer = weakref.ref(optimizer)
        self._own_main_weights: bool | None = None
        self._fused = _te.is_fused_adam(optimizer)
        self._before = optimizer.register_step_pre_hook(self._before_step)
        after = optimizer.register_step_post_hook(self._after_step)
        # Before those of the user's: they shall see the parameters, with their new values.
        _put_hook(after, first=True)

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
                noted(parameter).main_parameters = weakref.ref(self)
        return known

    def make(self, optimizer: Optimizer, parameter: torch.Tensor) -> torch.Tensor | None:
        """The main parameter of a parameter, without gradient; ``None`` for one that needs none. Local operation.

        A new main weight begins at the value that the parameter was initialised with; FusedAdam's own where that does.
        """
        if self._fused and not self.cuts:
            return _main_weight_of_fused(optimizer, parameter)
        shard, local, low = self.of(parameter).shard, _torch.local_of(parameter), is_low(parameter)
        if not low and shard is None:
            return None
        state = state_of(parameter)
        if state is not None:  # may have new weights on their way
            state.wait_for_gathers()
        if shard is not None and not low:
            # A view where rows lie together; TE's FusedAdam goes through memory without strides.
            return shard.distributed(shard.of(local.detach()).contiguous())
        main = optimizer.state.get(parameter, {}).get(MAIN)
        if main is None or (shard is not None and rows_of_state(main, parameter) is None):
            # Of a whole one that main_weights has made only this rank's rows stay.
            whole = beginning(local) if main is None else _torch.local_of(main)
            if shard is None:
                main = _torch.placed_like(whole, parameter)
            else:
                rows = shard.of(whole).clone(memory_format=torch.contiguous_format)
                main = shard.distributed(rows)
            optimizer.state[parameter][MAIN] = main
        _te.forget_high_precision_value(local)
        return main

    def start(self, optimizer: Optimizer) -> None:
        """Give each parameter its main weight now, so that its memory is taken and its beginning kept."""
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.requires_grad:
                    self.make(optimizer, parameter)

    def initialize(self, optimizer: Optimizer, parameter: torch.Tensor) -> None:
        """Make what FusedAdam keeps for a parameter before its first step; nothing for other optimizers."""
        if not hasattr(optimizer, "initialize_state") or set(optimizer.state.get(parameter, {})) - {MAIN}:
            return
        main, fused = self.make(optimizer, parameter), optimizer
        keeps = fused.master_weights  # type: ignore[missing-attribute]
        fused.master_weights = keeps and main is None  # type: ignore[missing-attribute]
        try:
            fused.initialize_state(parameter if main is None else main, False)  # type: ignore[missing-attribute]
        finally:
            fused.master_weights = keeps  # type: ignore[missing-attribute]
        if main is not None:
            optimizer.state[parameter] |= optimizer.state.pop(main)
            _move_scales(optimizer, main, parameter)

    def swap_in(self, optimizer: Optimizer, *, stepping: bool = False, keep_main: bool = False) -> None:
        """Put main parameters into the groups, and the state under their names.

        Args:
            optimizer: The optimizer.
            stepping: Leave frozen parameters out: FusedAdam makes states for all that it sees.
            keep_main: Leave main weights in the state as well, as state dicts show them.
        """
        self.put_back(optimizer)  # a step that raised has left them in
        scales = hasattr(optimizer, "_scales")
        for group in optimizer.param_groups:
            live, held = group["params"], list(group["params"])
            self._groups.append((live, held))
            live.clear()
            for parameter, pair in zip(held, self._look(optimizer, held), strict=True):
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
                    _move_scales(optimizer, parameter, pair.main)
                self.pairs.append(pair)
                live.append(pair.main)
        count = sum(len(held) for _, held in self._groups)
        if len(self.known) > count:  # also of parameters that it has no longer
            ids = {id(parameter) for _, held in self._groups for parameter in held}
            self.known = {key: known for key, known in self.known.items() if key in ids}
        if self.cuts and _te.is_fused_adam(optimizer):
            # Main parameters are the main weights: it shall make none of them.
            self._own_main_weights, optimizer.master_weights = optimizer.master_weights, False  # type: ignore[missing-attribute]

    def _look(self, optimizer: Optimizer, parameters: Sequence[torch.Tensor]) -> list[MainParameter | None]:
        """Parameters with their main parameters; ``None`` for those that need none, and for frozen ones without state.

        Each is made where there is none, or where the last look does not hold any longer. Local operation.
        """
        found: list[MainParameter | None] = []
        for parameter, local in zip(parameters, _torch.locals_of(parameters), strict=True):
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
                own.local, own.low, own.main = local, is_low(parameter), main
            found.append(None if own.main is None else own)
        return found

    def swap_out(self, optimizer: Optimizer) -> None:
        """Give the parameters their places and their state back; averaged gradients are forgotten."""
        give_gradients([pair.main for pair in self.pairs], [None] * len(self.pairs))
        self.put_back(optimizer)
        if self.averages is not None:
            self.averages.clear()

    def put_back(self, optimizer: Optimizer) -> None:
        """As :meth:`swap_out`, but averaged gradients stay."""
        for live, held in self._groups:
            live[:] = held
        for pair in self.pairs:
            state = optimizer.state.pop(pair.main, {})
            if pair.low:
                state = {**state, MAIN: pair.main}
            if state:
                optimizer.state[pair.parameter] = state
            if hasattr(optimizer, "_scales"):
                _move_scales(optimizer, pair.main, pair.parameter)
        self.pairs, self._groups = [], []
        if self._own_main_weights is not None:
            optimizer.master_weights, self._own_main_weights = self._own_main_weights, None  # type: ignore[missing-attribute]

    def trained(self) -> list[tuple[MainParameter, OptimizerShard]]:
        """The trained parameters whose state is cut, each with this rank's rows, in the optimizer's order.

        The same parameters on all replicas. Local operation.
        """
        optimizer = self._optimizer()
        groups = [] if optimizer is None else optimizer.param_groups
        held = [p for group in groups for p in group["params"] if p.requires_grad]
        found = []
        for parameter in held:
            own = self.known.get(id(parameter))
            if own is None or own.shard is None:
                own = self.of(parameter)
            if own.shard is not None:
                found.append((own, own.shard))
        return found

    def look(self, parameters: Sequence[torch.Tensor]) -> None:
        """Let trained parameters have the main parameters that a step now would use. Local operation."""
        optimizer = self._optimizer()
        assert optimizer is not None
        self._look(optimizer, parameters)

    # --- hooks of the optimizer

    def swap_in_last(self) -> None:
        """Let hooks that the user has registered since see the parameters before a step. Local operation."""
        _put_hook(self._before, first=False)

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
        self.swap_in(optimizer, stepping=True)
        whole = [pair for pair in self.pairs if pair.shard is None]
        mains = [pair.main for pair in whole]
        if self._fused and not self.cuts:
            _give_as_they_are(optimizer, {id(pair.main): pair.parameter for pair in whole})
        else:
            give_gradients(
                mains, _torch.in_dtypes_of(gradients_of([pair.parameter for pair in whole]), mains)
            )

    @torch.no_grad()
    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        cut: list[tuple[OptimizerShard, torch.Tensor]] = []
        whole: list[tuple[torch.Tensor, torch.Tensor]] = []
        mains = _torch.locals_of([pair.main for pair in self.pairs])
        for pair, main in zip(self.pairs, mains, strict=True):
            if pair.main.grad is None:
                continue
            if pair.shard is not None:
                cut.append((pair.shard, main))
            elif pair.local is not None:
                whole.append((pair.local, main))
        write_all(whole)
        if self.overlaps:
            install_by_unit(cut)
        elif cut:
            start_install(cut).wait()
        self.swap_out(optimizer)


def _put_hook(hook: RemovableHandle, *, first: bool) -> None:
    """Let a hook run before the others of its optimizer, or after them."""
    hooks: Any = hook.hooks_dict_ref()  # an OrderedDict
    hooks.move_to_end(hook.id, last=not first)


def _main_weight_of_fused(optimizer: Any, parameter: torch.Tensor) -> torch.Tensor | None:
    """The main weight that TE's FusedAdam keeps of a quantized weight, begun as its step would. Local operation.

    ``None`` for weights with delayed scaling, which its kernel quantizes, and for those that are not quantized.
    """
    local = _torch.local_of(parameter)
    if not _te.is_quantized(local) or _te.has_delayed_scale(local):
        return None
    if not optimizer.state.get(parameter):
        optimizer.initialize_state(parameter, False)
    return optimizer.state[parameter].get(MAIN)


def _give_as_they_are(optimizer: Any, parameters: dict[int, torch.Tensor]) -> None:
    """Give main weights their parameters' gradients in the dtype that these have, of which FusedAdam takes any.

    In one group it takes one dtype for all parameters in fp32, and with ``capturable=True`` theirs alone. Where that is
    not so gradients become fp32 ones.

    Args:
        optimizer: TE's FusedAdam, with main weights in its groups.
        parameters: Parameter by the ``id`` of its main weight.
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
            give_gradients([main], [gradient])


def _move_scales(optimizer: Any, source: torch.Tensor, target: torch.Tensor) -> None:
    """Key FusedAdam's scales of low-precision states by another parameter (``_scales``, TE 2.18 .. 2.20)."""
    scales = getattr(optimizer, "_scales", {})
    if source in scales:
        scales[target] = scales.pop(source)
