"""``StandIns``: what an optimizer updates in place of the model's parameters, while its ``step`` runs.

    model's parameters   what forward reads; the optimizer's groups and state refer to them between steps
    main weights         fp32 rows of quantized or other low-precision parameters, ``state[parameter]["master_param"]``
    own rows             of a parameter that other ranks hold as well: of its main weight, or of itself (a view)
    FusedAdam's own      main weights of quantized weights (:func:`te_fsdp.sharding.main_weights.lend_main_weights`)

A parameter has a stand-in if it is of low precision, or if the optimizer's state is cut over its holders
(:mod:`te_fsdp.sharding.outer_collectives`), or both. Before a step gradients are averaged over the holders, each rank
keeping its rows (one reduce-scatter), and stand-ins take the places of their parameters in the groups, with their
state. After it they give them back, the holders gather all rows (one all-gather), and each parameter becomes its main
weight, rounded or quantized once. Nothing else changes: ``zero_grad``, learning rate schedulers and the groups'
options see the model's parameters.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from te_fsdp import _te, _torch
from te_fsdp.errors import OrderError
from te_fsdp.parameters import noted
from te_fsdp.quantized.writes import write_all
from te_fsdp.sharding.outer_averages import OuterAverages
from te_fsdp.sharding.outer_collectives import Chunk, chunk_of, rows_of_state
from te_fsdp.sharding.outer_gather import install_by_unit, start_install
from te_fsdp.sharding.outer_gradients import give_gradients, gradients_of
from te_fsdp.sharding.state import state_of

if TYPE_CHECKING:
    from torch.optim import Optimizer
    from torch.utils.hooks import RemovableHandle

__all__ = ["MAIN", "StandIns", "beginning", "is_low"]

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


class Pair(NamedTuple):
    """A parameter and its stand-in.

    Attributes:
        parameter: The parameter.
        main: Its stand-in.
        local: The parameter's local tensor.
        low: Whether it is of low precision, so that the stand-in is its main weight.
        chunk: This rank's rows of it; ``None`` if its state is not cut.
    """

    parameter: torch.Tensor
    main: torch.Tensor
    local: torch.Tensor
    low: bool
    chunk: Chunk | None


class StandIns:
    """The stand-ins of one optimizer.

    Attributes:
        cuts: Whether state is cut over the holders of parameters; otherwise only main weights stand in.
        pairs: Those that stand in now; empty between steps.
        averages: Of the gradients, over the holders.
        overlaps: Whether new weights arrive after the step, unit by unit.
    """

    def __init__(self, optimizer: Optimizer, *, cuts: bool) -> None:
        self.cuts = cuts
        self.overlaps = False
        self.pairs: list[Pair] = []
        # What the last standing in has found, by the parameter's id; without a pair for one that needs none. Holds as
        # long as the parameter has the same local tensor (initialising and loading may replace it), and its state the
        # same main weight (so may loading). Where state is cut, stand-ins are found anew in each step.
        self._settled: dict[int, tuple[torch.Tensor, torch.Tensor, Pair | None]] = {}
        self._chunks: dict[int, Chunk] = {}
        self._groups: list[tuple[list[torch.Tensor], list[torch.Tensor]]] = []
        self._optimizer = weakref.ref(optimizer)
        self._own_main_weights: bool | None = None
        self._fused = _te.is_fused_adam(optimizer)
        self.averages = OuterAverages(self._cut, self._make_known)
        self._before = optimizer.register_step_pre_hook(self._before_step)
        after = optimizer.register_step_post_hook(self._after_step)
        # Before those of the user's: they shall see the parameters, with their new values.
        _put_hook(after, first=True)

    # --- who stands in

    def chunk(self, parameter: torch.Tensor) -> Chunk | None:
        """This rank's rows of a parameter; ``None`` if its state is not cut. Local operation."""
        if not self.cuts:
            return None
        known = self._chunks.get(id(parameter))
        if known is None or known.parameter is not parameter:
            known = chunk_of(parameter)
            if known is None:
                return None
            self._chunks[id(parameter)] = known
            noted(parameter).stand_ins = weakref.ref(self)
        return known

    def make(self, optimizer: Optimizer, parameter: torch.Tensor) -> torch.Tensor | None:
        """The stand-in of a parameter, without gradient; ``None`` for one that needs none. Local operation.

        A new main weight begins at the value that the parameter was initialised with; FusedAdam's own where that does.
        """
        if self._fused and not self.cuts:
            return _main_weight_of_fused(optimizer, parameter)
        chunk, local = self.chunk(parameter) if self.cuts else None, _torch.local_of(parameter)
        if is_low(parameter):
            main = optimizer.state.get(parameter, {}).get(MAIN)
            if main is None:
                _settle(parameter)
                whole = beginning(local)
                main = (
                    _torch.placed_like(whole, parameter)
                    if chunk is None
                    else chunk.distributed(chunk.of(whole).clone(memory_format=torch.contiguous_format))
                )
                optimizer.state[parameter][MAIN] = main
            elif chunk is not None and rows_of_state(main, parameter) is None:  # of main_weights
                rows = chunk.of(_torch.local_of(main)).clone(memory_format=torch.contiguous_format)
                main = optimizer.state[parameter][MAIN] = chunk.distributed(rows)
            _te.forget_high_precision_value(local)
        elif chunk is not None:
            _settle(parameter)
            # A view where rows lie together; TE's FusedAdam goes through memory without strides.
            main = chunk.distributed(chunk.of(local.detach()).contiguous())
        else:
            return None
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

    def stand_in(self, optimizer: Optimizer, *, stepping: bool = False, keep_main: bool = False) -> None:
        """Put stand-ins into the groups, and the state under their names.

        Args:
            optimizer: The optimizer.
            stepping: Leave frozen parameters out: FusedAdam makes states for all that it sees.
            keep_main: Leave main weights in the state as well, as state dicts show them.
        """
        self.put_back(optimizer)  # a step that raised has left them in
        settled: dict[int, tuple[torch.Tensor, torch.Tensor, Pair | None]] = {}
        before = {} if self.cuts else self._settled
        scales = hasattr(optimizer, "_scales")
        for group in optimizer.param_groups:
            live, held = group["params"], list(group["params"])
            self._groups.append((live, held))
            live.clear()
            for parameter, local in zip(held, _torch.locals_of(held), strict=True):
                state = optimizer.state.get(parameter, {})
                if not parameter.requires_grad and not state:  # frozen
                    if not stepping or self.chunk(parameter) is None:
                        live.append(parameter)
                    continue
                known = before.get(id(parameter), (None, None, None))
                pair = known[2]
                is_same = pair is None or state.get(MAIN) is pair.main
                if known[0] is not parameter or known[1] is not local or not is_same:
                    pair = self._pair(optimizer, parameter, local)
                if not self.cuts:
                    settled[id(parameter)] = parameter, local, pair
                if pair is None:
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
        self._settled = settled
        if self.cuts and _te.is_fused_adam(optimizer):
            # Stand-ins are the main weights: it shall make none of them.
            self._own_main_weights, optimizer.master_weights = optimizer.master_weights, False  # type: ignore[missing-attribute]

    def _pair(self, optimizer: Optimizer, parameter: torch.Tensor, local: torch.Tensor) -> Pair | None:
        """A parameter and its stand-in; ``None`` for one that needs none."""
        ready = self.averages.ready.get(id(parameter))
        main = ready.main if ready is not None else self.make(optimizer, parameter)
        return (
            None if main is None else Pair(parameter, main, local, is_low(parameter), self.chunk(parameter))
        )

    def stand_down(self, optimizer: Optimizer) -> None:
        """Give the parameters their places and their state back; averaged gradients are forgotten."""
        give_gradients([pair.main for pair in self.pairs], [None] * len(self.pairs))
        self.put_back(optimizer)
        self.averages.clear()

    def put_back(self, optimizer: Optimizer) -> None:
        """As :meth:`stand_down`, but averaged gradients stay."""
        for live, held in self._groups:
            live[:] = held
        for parameter, main, _, low, _ in self.pairs:
            state = optimizer.state.pop(main, {})
            if low:
                state = {**state, MAIN: main}
            if state:
                optimizer.state[parameter] = state
            if hasattr(optimizer, "_scales"):
                _move_scales(optimizer, main, parameter)
        self.pairs, self._groups = [], []
        if self._own_main_weights is not None:
            optimizer.master_weights, self._own_main_weights = self._own_main_weights, None  # type: ignore[missing-attribute]

    def _cut(self) -> list[Chunk]:
        """The trained parameters whose state is cut. Local operation."""
        optimizer = self._optimizer() if self.cuts else None
        groups = [] if optimizer is None else optimizer.param_groups
        held = [p for group in groups for p in group["params"] if p.requires_grad]
        return [chunk for p in held if (chunk := self.chunk(p)) is not None]

    def _make_known(self, parameter: torch.Tensor) -> torch.Tensor:
        """The stand-in of a parameter whose state is cut. Local operation."""
        optimizer = self._optimizer()
        main = None if optimizer is None else self.make(optimizer, parameter)
        assert main is not None
        return main

    # --- hooks of the optimizer

    def stand_in_last(self) -> None:
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
        self.averages.make()
        self.stand_in(optimizer, stepping=True)
        whole = [pair for pair in self.pairs if pair.chunk is None]
        mains = [pair.main for pair in whole]
        if self._fused and not self.cuts:
            _give_as_they_are(optimizer, {id(pair.main): pair.parameter for pair in whole})
        else:
            give_gradients(
                mains, _torch.in_dtypes_of(gradients_of([pair.parameter for pair in whole]), mains)
            )

    @torch.no_grad()
    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        cut: list[tuple[Chunk, torch.Tensor]] = []
        whole: list[tuple[torch.Tensor, torch.Tensor]] = []
        mains = _torch.locals_of([pair.main for pair in self.pairs])
        for pair, main in zip(self.pairs, mains, strict=True):
            if pair.main.grad is None:
                continue
            if pair.chunk is not None:
                cut.append((pair.chunk, main))
            else:
                whole.append((pair.local, main))
        write_all(whole)
        if self.overlaps:
            install_by_unit(cut)
        else:
            start_install(cut).wait()
        self.stand_down(optimizer)


def _settle(parameter: torch.Tensor) -> None:
    """Wait for a parameter's new weights, of which a stand-in is about to be made. Local operation."""
    state = state_of(parameter)
    if state is not None:
        state.pending_gathers.wait()


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


def _give_as_they_are(optimizer: Any, stood_in: dict[int, torch.Tensor]) -> None:
    """Give main weights their parameters' gradients in the dtype that these have, of which FusedAdam takes any.

    In one group it takes one dtype for all parameters in fp32, and with ``capturable=True`` theirs alone. Where that is
    not so gradients become fp32 ones.

    Args:
        optimizer: TE's FusedAdam, with main weights in its groups.
        stood_in: Parameter by the ``id`` of its main weight.
    """
    name = "decoupled_grad" if optimizer.use_decoupled_grad else "grad"
    for group in optimizer.param_groups:
        members = [p for p in group["params"] if p.dtype == torch.float32]
        gradients = [getattr(stood_in.get(id(p), p), name, None) for p in members]
        dtypes = {gradient.dtype for gradient in gradients if gradient is not None}
        together = len(dtypes) <= 1 and not optimizer.capturable
        for main, gradient in zip(members, gradients, strict=True):
            if id(main) not in stood_in:
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
