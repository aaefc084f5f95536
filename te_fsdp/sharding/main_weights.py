"""``main_weights``: fp32 main weights for an optimizer, begun at the values that the model was initialised with.

    model's parameters     what forward reads: quantized, or bf16; the optimizer's groups and state refer to them
    main weights           fp32, placed as the parameters; ``optimizer.state[parameter]["master_param"]``

TE's FusedAdam keeps main weights itself. For torch's optimizers they stand in for the parameters while
``step`` runs: gradients are cast to fp32, the optimizer updates main weights, and each parameter then becomes
its main weight, rounded or quantized once. Between steps nothing tells the difference, so that ``zero_grad``,
gradient clipping, learning rate schedulers and checkpoints work as usual.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor import DTensor

from te_fsdp import _te, _torch
from te_fsdp.errors import CheckpointError, OrderError, message
from te_fsdp.quantized.optimizer_steps import KEEPS_MAIN_WEIGHTS, quantized_parameters, refuse
from te_fsdp.sharding.optimizer import check_optimizer

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

__all__ = ["main_weights"]

#: Name of the main weight in an optimizer's state; FusedAdam's own.
MAIN = "master_param"


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
        model: The model, sharded and materialised.
        optimizer: Over parameters of the model; unchanged where it holds fp32 parameters only.

    Raises:
        OrderError: The optimizer holds parameters that are not the model's, or has stepped without main weights.
        PrecisionError: A FusedAdam that keeps none, or not in fp32, over quantized weights.
    """
    check_optimizer(model, optimizer)
    if _te.is_fused_adam(optimizer):
        for label, parameter, local in quantized_parameters(optimizer):
            refuse(optimizer, label)
            _start_fused(optimizer, parameter, local)
    elif not hasattr(optimizer, KEEPS_MAIN_WEIGHTS):
        low = [p for g in optimizer.param_groups for p in g["params"] if _is_low(p)]
        if any(optimizer.state.get(p) for p in low):
            raise OrderError(
                message(
                    f"main_weights({type(optimizer).__name__}) after its first step",
                    expected="an optimizer without state",
                    got="state that belongs to low-precision parameters",
                    fix="call te_fsdp.main_weights right after the optimizer was built",
                )
            )
        if low:
            setattr(optimizer, KEEPS_MAIN_WEIGHTS, _StandIns(optimizer, low))


def _is_low(parameter: torch.Tensor) -> bool:
    """Whether a parameter is quantized, or a floating-point one below fp32."""
    wide = (torch.float32, torch.float64)
    return parameter.is_floating_point() and (
        _te.is_quantized(_torch.local_of(parameter)) or parameter.dtype not in wide
    )


def _beginning(local: torch.Tensor) -> torch.Tensor:
    """A new fp32 tensor with the value that a local tensor was initialised with."""
    kept = _te.high_precision_value(local)
    if kept is not None:
        return kept.to(device=local.device, dtype=torch.float32, copy=True)
    if _te.is_quantized(local):
        return local.dequantize(dtype=torch.float32).detach().clone()  # type: ignore[call-arg]
    return local.detach().to(torch.float32, copy=True)


def _start_fused(optimizer: Any, parameter: torch.Tensor, local: torch.Tensor) -> None:
    """Begin FusedAdam's own main weight of one quantized parameter."""
    if not optimizer.state.get(parameter) and _te.high_precision_value(local) is not None:
        optimizer.initialize_state(parameter, False)
        optimizer.set_scaled_state(parameter, MAIN, _beginning(local))
    _te.forget_high_precision_value(local)


class _StandIns:
    """Main weights that take the places of an optimizer's low-precision parameters while it works.

    Attributes:
        pairs: Parameter and main weight of each, while they stand in; empty otherwise.
    """

    def __init__(self, optimizer: Optimizer, low: list[torch.Tensor]) -> None:
        self.pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
        for parameter in low:
            local = _torch.local_of(parameter)
            optimizer.state[parameter][MAIN] = _like(_beginning(local), parameter)
            _te.forget_high_precision_value(local)
        optimizer.register_step_pre_hook(self._before_step)
        optimizer.register_step_post_hook(self._after_step)
        optimizer.register_load_state_dict_pre_hook(self._before_load)
        optimizer.register_load_state_dict_post_hook(self._after_load)
        optimizer.register_state_dict_pre_hook(self.stand_down)

    def stand_in(self, optimizer: Optimizer) -> None:
        """Put main weights into the groups, and the state under their names."""
        self.stand_down(optimizer)  # a step that raised has left them in
        for group in optimizer.param_groups:
            for index, parameter in enumerate(group["params"]):
                if not _is_low(parameter):
                    continue
                state = optimizer.state.pop(parameter, {})
                main = state.pop(MAIN, None)
                if main is None:  # a parameter group added later
                    main = _like(_beginning(_torch.local_of(parameter)), parameter)
                if state:
                    optimizer.state[main] = state
                group["params"][index] = main
                self.pairs.append((parameter, main))

    def stand_down(self, optimizer: Optimizer) -> None:
        """Give the parameters their places and their state back."""
        back = {id(main): parameter for parameter, main in self.pairs}
        for group in optimizer.param_groups:
            group["params"][:] = [back.get(id(p), p) for p in group["params"]]
        for parameter, main in self.pairs:
            main.grad = None
            optimizer.state[parameter] = {**optimizer.state.pop(main, {}), MAIN: main}
        self.pairs = []

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if kwargs.get("closure") is not None or any(callable(a) for a in args[1:]):
            raise OrderError(
                message(
                    f"{type(optimizer).__name__}.step(closure) with main weights",
                    expected="step() after backward()",
                    got="a closure",
                    why="Its gradients would come too late for the main weights",
                    fix="call backward() first, then step() without a closure",
                )
            )
        self.stand_in(optimizer)
        for parameter, main in self.pairs:
            gradient = parameter.grad
            main.grad = None if gradient is None else gradient.to(torch.float32)

    @torch.no_grad()
    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        for parameter, main in self.pairs:
            if main.grad is None:
                continue
            local, value = _torch.local_of(parameter), _torch.local_of(main)
            if _te.is_quantized(local):
                local.quantize_(value)  # type: ignore[operator]
            else:
                local.copy_(value)
        self.stand_down(optimizer)

    def _before_load(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
        """Loaded state is cast to the dtype of the parameters in the groups: these must be the fp32 ones."""
        alone = [key for key, state in state_dict["state"].items() if set(state) == {MAIN}]
        if alone:
            raise CheckpointError(
                message(
                    f"{type(optimizer).__name__}.load_state_dict: {len(alone)} parameter(s) with main weights alone",
                    expected="the whole state",
                    got="that of an optimizer that has not stepped",
                    why="DCP fills the state dict of an optimizer as it is: what is missing there is not loaded",
                    fix="use te_fsdp.checkpoint.load, which makes the missing state",
                )
            )
        self.stand_in(optimizer)

    @torch.no_grad()
    def _after_load(self, optimizer: Optimizer) -> None:
        for _, main in self.pairs:
            loaded = optimizer.state.get(main, {}).pop(MAIN, None)
            if loaded is not None:
                _torch.local_of(main).copy_(_torch.local_of(loaded))
        self.stand_down(optimizer)


def _like(local: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """``local`` placed as a parameter is."""
    if not isinstance(parameter, DTensor):
        return local
    return DTensor.from_local(
        local,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )
